// Pairs of 16-bit floats in a word. Definitions: BF16, 1 or 0 (f16).

#if BF16
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif

__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned word;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ float low_half(unsigned word) {
#if BF16
    return __int_as_float(word << 16);
#else
    float y;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(word));
    return y;
#endif
}
__device__ __forceinline__ float high_half(unsigned word) {
#if BF16
    return __int_as_float(word & 0xffff0000u);
#else
    float y;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(word));
    return y;
#endif
}

// What native.rs names: single instructions for what WGSL needs several for.
namespace wgsl {

WGSL_FN f32 near_exp2(f32 x) { f32 r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
WGSL_FN f32 near_inverse(f32 x) { f32 r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// The first number in the low half.
WGSL_FN u32 pair_f16(f32 a, f32 b) {
#if __CUDA_ARCH__ >= 800
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
#else
    return u32(narrow(a).bits) | u32(narrow(b).bits) << 16;
#endif
}
WGSL_FN u32 pair_bf16(f32 a, f32 b) {
#if __CUDA_ARCH__ >= 800
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
#else
    const auto bits = [](f32 v) -> u32 {
        const u32 b = __float_as_uint(v);
        return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
    };
    return bits(a) | bits(b) << 16;
#endif
}

} // namespace wgsl

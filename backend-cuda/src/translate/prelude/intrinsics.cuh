// Functions named in intrinsics.rs: one or a few instructions where WGSL needs several operations.
namespace wgsl {

// Eight instructions, for all values and both directions. Error: 2 ulp.
WGSL_FN f32 exp_any(f32 x) { return ::expf(x); }
// An approximation and a Newton step, without the branches of a division.
WGSL_FN f32 rcp_normal(f32 x) {
    f32 r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return ::fmaf(r, ::fmaf(-x, r, 1.0f), r);
}
// Instructions keep NaN, so y has it already.
WGSL_FN f32 keep_nan(f32 y, f32) { return y; }

WGSL_FN f32 approx_exp2(f32 x) { f32 r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
WGSL_FN f32 approx_rcp(f32 x) { f32 r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// The upper and the lower word of a product.
WGSL_FN vec<u32, 2> mul_wide(u32 a, u32 b) { return {__umulhi(a, b), a * b}; }

// The first value is in the low half.
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

// The first value is in the low byte; no magnitude exceeds the type's maximum.
#if __CUDA_ARCH__ >= 890
WGSL_FN u32 pair_e4m3(f32 a, f32 b) {
    unsigned short r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
}
WGSL_FN u32 pair_e5m2(f32 a, f32 b) {
    unsigned short r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
}
#else
template <u32 mantissa, u32 bias> WGSL_FN u32 byte_in_range(f32 v) {
    const u32 b = __float_as_uint(v), magnitude = b & 0x7fffffffu;
    const bool normal = magnitude >> 23 >= 128u - bias;
    const u32 bits = normal ? magnitude - ((127u - bias) << 23) : (magnitude & 0x7fffffu) | 0x800000u;
    const u32 lost = normal ? 23u - mantissa : min(151u - bias - mantissa - (magnitude >> 23), 31u);
    const u32 kept = bits >> lost, remainder = bits & ((1u << lost) - 1u), half_way = 1u << (lost - 1u);
    return (b >> 24 & 0x80u) | (kept + (remainder > half_way || (remainder == half_way && (kept & 1u))));
}
WGSL_FN u32 pair_e4m3(f32 a, f32 b) { return byte_in_range<3, 7>(a) | byte_in_range<3, 7>(b) << 8; }
WGSL_FN u32 pair_e5m2(f32 a, f32 b) { return byte_in_range<2, 15>(a) | byte_in_range<2, 15>(b) << 8; }
#endif

// Before sm_80, which has a maximum that keeps NaN, the code computes like the WGSL.
#if __CUDA_ARCH__ >= 800
WGSL_FN u32 pair_bf16_max(u32 a, u32 b) {
    u32 r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
WGSL_FN u32 pair_f16_max(u32 a, u32 b) {
    u32 r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
WGSL_FN u32 pair_bf16_mark_nan(u32 marks, u32) { return marks; }
WGSL_FN u32 pair_f16_mark_nan(u32 marks, u32) { return marks; }
#else
WGSL_FN u32 pair_bf16_max(u32 a, u32 b) {
    const u32 low = __float_as_uint(fmaxf(__uint_as_float(a << 16), __uint_as_float(b << 16)));
    return low >> 16 | __float_as_uint(fmaxf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u)));
}
WGSL_FN u32 pair_f16_max(u32 a, u32 b) {
    const auto half = [](u32 bits) { f16 h; h.bits = static_cast<unsigned short>(bits); return widen(h); };
    return pair_f16(fmaxf(half(a), half(b)), fmaxf(half(a >> 16), half(b >> 16)));
}
WGSL_FN u32 pair_bf16_mark_nan(u32 marks, u32 pair) { return marks | ((pair & 0x7fff7fffu) + 0x007f007fu); }
WGSL_FN u32 pair_f16_mark_nan(u32 marks, u32 pair) { return marks | ((pair & 0x7fff7fffu) + 0x03ff03ffu); }
#endif

} // namespace wgsl

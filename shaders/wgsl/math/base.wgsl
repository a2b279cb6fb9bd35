// needs: none
//
// f32 building blocks. Every file in this folder is plain WGSL for inclusion into a kernel; its first line
// lists all files that it needs. Drivers' own exp, sin, pow and so on differ; these functions agree on all
// devices. Drivers may flush denormals, contract a*b+c, divide to 2.5 ulp, and assume that there is no NaN or
// infinity. Hence these rules:
// - Specials are detected by their bits, and their results are selected last, with `select`.
// - No step needs a particular rounding of a product or sum. For extra bits, factors are cut to 12 bits, so
//   that their products are exact with or without contraction.
// - No two constants are added to one value in turn. No result depends on a constant's position in a chain of
//   additions: compilers (Mesa, SPIRV-Tools) regroup such chains. `fma`, which may or may not be fused, is
//   not used.
// - No float out of range is cast to an integer.
// Errors in these files are the largest seen on lavapipe (Mesa 22.3 and 26.1) and SwiftShader over 2^21
// arguments of all magnitudes. They are in ulp, without denormals that were flushed. Polynomials are minimax
// fits: iterated weighted least squares on Chebyshev nodes against a 40-digit reference, with coefficients
// rounded to f32 one after the other.

fn m_bits(x: f32) -> u32 { return bitcast<u32>(x); }
// A function rather than a literal: WGSL rejects a constant expression that is NaN or infinite.
fn m_from_bits(u: u32) -> f32 { return bitcast<f32>(u); }
fn m_nan() -> f32 { return m_from_bits(0x7fc00000u); }
fn m_inf() -> f32 { return m_from_bits(0x7f800000u); }
fn m_isnan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn m_isinf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }
fn m_isfinite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }
fn m_signbit(x: f32) -> bool { return (bitcast<u32>(x) >> 31u) != 0u; }
fn m_iszero(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0u; }

// The magnitude of `x` with the sign of `s`, for any values.
fn m_copysign(x: f32, s: f32) -> f32 {
    return bitcast<f32>((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(s) & 0x80000000u));
}

// The upper 12 bits of the significand: the product of two such values is exact.
fn m_head(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u); }

// 2^k for -126 <= k <= 127.
fn m_pow2(k: i32) -> f32 { return bitcast<f32>(u32(k + 127) << 23u); }

// p * 2^k for p in [0.5, 4) and -250 <= k <= 250; rounds once, overflows to infinity, denormal results are
// correct.
fn m_scale(p: f32, k: i32) -> f32 {
    let a = clamp(k, -124, 125);
    return bitcast<f32>(bitcast<u32>(p) + (bitcast<u32>(a) << 23u)) * m_pow2(clamp(k - a, -126, 127));
}

// A positive finite x as m * 2^k with m in [sqrt(1/2), sqrt(2)). Works on the bits: correct for denormals,
// flushed or not.
struct m_Parts { m: f32, k: i32 }
fn m_split(x: f32) -> m_Parts {
    let u = bitcast<u32>(x);
    // A denormal is shifted so that its leading one is at the position of a normal float's implied one.
    let s = select(0u, countLeadingZeros(u) - 8u, u < 0x00800000u);
    let t = bitcast<i32>(u << s) - 0x3f3504f3i;
    return m_Parts(bitcast<f32>((t & 0x007fffffi) + 0x3f3504f3i), (t >> 23u) - i32(s));
}

// Maximum and minimum; NaN if either is NaN.
fn m_max(a: f32, b: f32) -> f32 { return select(select(max(a, b), b, m_isnan(b)), a, m_isnan(a)); }
fn m_min(a: f32, b: f32) -> f32 { return select(select(min(a, b), b, m_isnan(b)), a, m_isnan(a)); }

// To the nearest integer, ties to even, like WGSL's round.
fn m_round(x: f32) -> f32 { return round(x); }

// a / b, where b may be zero.
fn m_div(a: f32, b: f32) -> f32 {
    let zero = select(m_copysign(m_inf(), m_from_bits(m_bits(a) ^ m_bits(b))), m_nan(), m_iszero(a) | m_isnan(a));
    return select(a / b, zero, m_iszero(b));
}

fn m_sqrt(x: f32) -> f32 { return sqrt(x); }

// 1 / sqrt(x). Error: 1.5 ulp. rsqrt(0) is inf with the sign of the zero; for negative x the result is NaN.
fn m_rsqrt(x: f32) -> f32 {
    let r = 1.0 / sqrt(x);
    let special = select(select(m_nan(), 0.0, m_bits(x) == 0x7f800000u), m_copysign(m_inf(), x), m_iszero(x));
    return select(r, special, m_bits(x) - 1u >= 0x7f7fffffu);
}

// sqrt(a^2 + b^2) without intermediate overflow or underflow. Error: 1.2 ulp.
fn m_hypot(a: f32, b: f32) -> f32 {
    let ua = m_bits(a) & 0x7fffffffu;
    let ub = m_bits(b) & 0x7fffffffu;
    let hi = m_from_bits(max(ua, ub));
    let lo = m_from_bits(min(ua, ub));
    // Scaled so that the squares neither overflow nor underflow; powers of two are exact.
    let big = max(ua, ub) >= 0x5f000000u;
    let small = max(ua, ub) < 0x26800000u;
    let up = select(select(1.0, 0x1p100, small), 0x1p-66, big);
    let down = select(select(1.0, 0x1p-100, small), 0x1p66, big);
    let x = hi * up;
    let y = lo * up;
    let r = sqrt(x * x + y * y) * down;
    let special = select(m_nan(), m_inf(), (ua == 0x7f800000u) | (ub == 0x7f800000u));
    return select(r, special, max(ua, ub) >= 0x7f800000u);
}

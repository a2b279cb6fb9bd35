// needs: base
//
// exp, exp2, expm1, sigmoid, tanh, sinh, cosh.
//
// CUDA has its own m_exp, m_exp_down, m_rcp_normal, m_or_nan and m_nan_unless_finite (intrinsics.rs in
// backend-cuda), which take fewer instructions.

// e^(x + low) * 2^shift for any x, |low| <= 0.1 and |shift| <= 2. e^r is 1 + r + r^2 q(r) on |r| <= ln(2)/2
// (fit 2^-26 of expm1).
fn m_exp_sum(x: f32, low: f32, shift: i32) -> f32 {
    let xc = select(clamp(x, -106.0, 92.0), 0.0, m_isnan(x));
    let k = round(xc * 1.442695);
    // ln 2 in two parts: the first has 9 bits, so k times it is exact.
    let hi = xc - k * 0.693359375;
    let lo = k * -2.1219444e-4 - low;
    let r = hi - lo;
    let q = (((0.0013870696 * r + 0.008366272) * r + 0.041667435) * r + 0.16666546) * r + 0.49999997;
    return select(m_scale(1.0 + (hi + ((r * r) * q - lo)), i32(k) + shift), x, m_isnan(x));
}

// Error: 1.5 ulp.
fn m_exp(x: f32) -> f32 { return m_exp_sum(x, 0.0, 0i); }

// e^x for x <= 0, at half the cost: -inf gives 0, NaN an arbitrary value. Error: 1.5 ulp.
fn m_exp_down(x: f32) -> f32 {
    let xc = max(x, -106.0);
    let k = round(xc * 1.442695);
    let hi = xc - k * 0.693359375;
    let lo = k * -2.1219444e-4;
    let r = hi - lo;
    let q = (((0.0013870696 * r + 0.008366272) * r + 0.041667435) * r + 0.16666546) * r + 0.49999997;
    // The result is too large by 2^64 at first, so that denormal results are rounded once.
    let p = 1.0 + (hi + ((r * r) * q - lo));
    return m_from_bits(m_bits(p) + (bitcast<u32>(clamp(i32(k), -153i, 0i) + 64i) << 23u)) * 0x1p-64;
}

// 1 / x for 2^-100 <= |x| <= 2^100. Error: 1 ulp, on CUDA as well.
fn m_rcp_normal(x: f32) -> f32 { return 1.0 / x; }

// y, or x if x is NaN. y must be a function of x by which CUDA's instructions keep NaN; other devices may
// have lost it.
fn m_or_nan(y: f32, x: f32) -> f32 { return select(y, x, m_isnan(x)); }

// Like m_or_nan, for a function that is NaN at infinities too.
fn m_nan_unless_finite(y: f32, x: f32) -> f32 { return select(m_nan(), y, m_isfinite(x)); }

// Approximations by the device's own functions for results rounded to 16 bits, with a relative error below
// 2^-18. 2^x for x <= 0: below -126 gives 0, NaN an arbitrary value; 1 / x for 1 <= x <= 8. CUDA has an
// instruction for each (intrinsics.rs in backend-cuda).
fn m_approx_exp2(x: f32) -> f32 { return select(exp2(max(x, -126.0)), 0.0, x < -126.0); }
fn m_approx_rcp(x: f32) -> f32 { return 1.0 / x; }

// 2^(hi + lo) for |lo| <= 1, hi within [-200, 200]; 2^r is a polynomial on |r| <= 1/2 (fit 2^-28).
fn m_exp2_sum(hi: f32, lo: f32) -> f32 {
    let k = round(hi + lo);
    let r = (hi - k) + lo;
    let q = (((0.00015329279 * r + 0.001339097) * r + 0.009618499) * r + 0.055503596) * r + 0.24022648;
    return m_scale(1.0 + (r * 0.6931472 + (r * r) * q), i32(k));
}

// Error: 1.4 ulp.
fn m_exp2(x: f32) -> f32 {
    let xc = select(clamp(x, -152.0, 130.0), 0.0, m_isnan(x));
    return select(m_exp2_sum(xc, 0.0), x, m_isnan(x));
}

// e^x - 1. Error: 1.5 ulp.
fn m_expm1(x: f32) -> f32 {
    let xc = select(clamp(x, -18.0, 92.0), 0.0, m_isnan(x));
    let k = round(xc * 1.442695);
    let hi = xc - k * 0.693359375;
    let lo = k * -2.1219444e-4;
    let r = hi - lo;
    let q = (((0.0013870696 * r + 0.008366272) * r + 0.041667435) * r + 0.16666546) * r + 0.49999997;
    // 2^k (e^r - 1) + 2^k - 1, with 2^k factored out; 1 - 2^-k is exact or, beyond 24 bits, 1.
    let one = 1.0 - m_pow2(max(-i32(k), -126i));
    let e = (one + hi) + ((r * r) * q - lo);
    // Without scaling if k is 0, which keeps tiny and denormal x.
    let y = select(m_scale_any(e, i32(k)), r + (r * r) * q, k == 0.0);
    return select(y, x, m_isnan(x) | m_iszero(x));
}

// e * 2^k for any finite e and -126 <= k <= 250.
fn m_scale_any(e: f32, k: i32) -> f32 {
    let a = min(k, 100i);
    return (e * m_pow2(a)) * m_pow2(k - a);
}

// sigmoid(x) = 1 / (1 + e^-x) and its derivative, from one exponential: e / (1 + e)^2 is the derivative for
// both signs. The left tail keeps its relative accuracy. For NaN, the results are arbitrary.
fn m_logistic(x: f32) -> vec2<f32> {
    let e = m_exp_down(-abs(x));
    let d = m_rcp_normal(1.0 + e);
    let tail = e * d;
    return vec2<f32>(select(d, tail, m_signbit(x)), tail * d);
}

// Error: 2.7 ulp.
fn m_sigmoid(x: f32) -> f32 { return m_or_nan(m_logistic(x).x, x); }

// Error: 1.4 ulp. x + x^3 p(x^2) up to 0.625 (fit 2^-27), then 1 - 2 e^-2x / (1 + e^-2x).
fn m_tanh(x: f32) -> f32 {
    let a = abs(x);
    let z = a * a;
    let p = (((-0.005715499 * z + 0.020649103) * z - 0.053743005) * z + 0.13331485) * z - 0.33333284;
    let e = m_exp_down(-2.0 * a);
    let far = 1.0 - (2.0 * e) * m_rcp_normal(1.0 + e);
    let y = select(far, a + a * (z * p), a < 0.625);
    return m_or_nan(m_copysign(y, x), x);
}

// Error: 1.8 ulp. x + x^3 p(x^2) up to 1 (fit 2^-31), then from e^x / 2, which overflows only if the result
// does.
fn m_sinh(x: f32) -> f32 {
    let a = abs(x);
    let z = a * a;
    let p = ((2.7839255e-6 * z + 0.00019842635) * z + 0.008333311) * z + 0.16666667;
    let h = m_exp_sum(a, 0.0, -1i);
    let y = select(h - 0.25 / h, a + a * (z * p), a < 1.0);
    return select(m_copysign(y, x), x, m_isnan(x));
}

// Error: 1.5 ulp.
fn m_cosh(x: f32) -> f32 {
    let h = m_exp_sum(abs(x), 0.0, -1i);
    return h + 0.25 / h;
}

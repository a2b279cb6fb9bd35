// needs: base, exp, log
//
// erf, erfc, erfinv, the normal distribution's cdf.

// erf(x) / x - 1 on |x| <= 0.92, from z = x^2 (fit 2^-30).
fn m_erf_poly(z: f32) -> f32 {
    return (((((8.381269e-5 * z - 0.0008144748) * z + 0.005201076) * z - 0.026859278) * z + 0.11283687) * z
        - 0.37612632) * z + 0.12837917;
}

// erfc(a) for 0.88 <= a <= 4: the exponential of a polynomial, with an error relative to erf below 2^-33.
fn m_erfc_poly(a: f32) -> f32 {
    let t = ((((((-2.062705e-5 * a + 0.0004290626) * a - 0.0041449736) * a + 0.02505098) * a - 0.10817471) * a
        - 0.63344216) * a - 1.1294681) * a + 0.00016500773;
    return m_exp(t);
}

// Error: 1.2 ulp.
fn m_erf(x: f32) -> f32 {
    let a = min(abs(x), 4.0);
    let y = select(1.0 - m_erfc_poly(a), a + a * m_erf_poly(a * a), a < 0.9);
    return select(m_copysign(y, x), x, m_isnan(x));
}

// erfc(a) / e^(-a^2) for 0.48 <= a <= 12: 1 / (1 + 2a) times a polynomial of (a - 2) / (a + 2) (fit 2^-27).
fn m_erfcx_poly(a: f32) -> f32 {
    let t = (a - 2.0) / (a + 2.0);
    let g = ((((((((-0.00023456322 * t - 0.0012800932) * t + 0.0011601578) * t + 0.008672393) * t - 0.008012047) * t
        - 0.05421524) * t + 0.16404983) * t - 0.16603039) * t - 0.09276382) * t + 1.2769784;
    return g / (1.0 + 2.0 * a);
}

// 1 - erf(x), with relative accuracy for large x. Error: 3.7 ulp.
fn m_erfc(x: f32) -> f32 {
    let a = min(abs(x), 12.0);
    // The square in two parts; the head's is exact.
    let h = m_head(a);
    let tail = m_exp_sum(-h * h, (h - a) * (h + a), 0i) * m_erfcx_poly(a);
    let far = select(tail, 2.0 - tail, m_signbit(x));
    let near = 1.0 - (x + x * m_erf_poly(x * x));
    return select(select(far, near, abs(x) < 0.5), x, m_isnan(x));
}

// Error: 3.4 ulp. x times a polynomial of w = -ln(1 - x^2), or of its square root for w >= 5 (fits 2^-23).
fn m_erfinv(x: f32) -> f32 {
    let a = abs(x);
    let w = -m_log(max((1.0 - a) * (1.0 + a), 0x1p-30));
    let c = w - 2.5;
    let near = (((((((2.848839e-8 * c + 3.4403757e-7) * c - 3.527952e-6) * c - 4.400514e-6) * c + 0.0002185963) * c
        - 0.001253694) * c - 0.0041776933) * c + 0.24664071) * c + 1.5014094;
    let s = sqrt(w) - 3.0;
    let far = (((((((-0.00014890388 * s + 7.143245e-5) * s + 0.0012796344) * s - 0.0036437926) * s
        + 0.0057701264) * s - 0.0076308344) * s + 0.009434447) * s + 1.0016748) * s + 2.832977;
    let y = x * select(far, near, w < 5.0);
    let u = m_bits(x) & 0x7fffffffu;
    return select(y, select(m_nan(), m_copysign(m_inf(), x), u == 0x3f800000u), u >= 0x3f800000u);
}

// e^(-x^2 / 2).
fn m_gauss(x: f32) -> f32 {
    let a = min(abs(x), 16.0);
    let h = m_head(a);
    return select(m_exp_sum(-0.5 * h * h, 0.5 * (h - a) * (h + a), 0i), x, m_isnan(x));
}

// (1 + erf(x / sqrt 2)) / 2, with e = e^(-x^2 / 2) as input.
fn m_normcdf_of(x: f32, e: f32) -> f32 {
    let z = x * 0.70710677;
    let tail = 0.5 * e * m_erfcx_poly(min(abs(z), 12.0));
    let far = select(1.0 - tail, tail, m_signbit(x));
    return select(far, 0.5 + 0.5 * (z + z * m_erf_poly(z * z)), abs(z) < 0.6);
}

// The cumulative normal distribution, with relative accuracy in the left tail. Error: 3.9 ulp.
fn m_normcdf(x: f32) -> f32 { return m_normcdf_of(x, m_gauss(x)); }

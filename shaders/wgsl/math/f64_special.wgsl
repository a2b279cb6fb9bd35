// needs: base, f64_exp_log, f64
//
// The functions of `bessel` and `normal_tails` for f64.

// (x^2 / 4)^k / (k! (k + order)!), times `order`!: 40 terms suffice up to x = 22.
fn m_d_bessel_near(x: f64, order: f64) -> f64 {
    let z = 0.25 * x * x;
    var sum = 1.0lf;
    for (var k = 40.0lf; k > 0.0; k -= 1.0) { sum = 1.0 + sum * z / (k * (k + order)); }
    return sum;
}
// e^-x I(x) by the asymptotic series for x >= 22: the remainder after 30 terms is below 2^-60.
fn m_d_bessel_far(x: f64, order: f64) -> f64 {
    var sum = 1.0lf;
    for (var k = 30.0lf; k > 0.0; k -= 1.0) {
        let odd = 2.0 * k - 1.0;
        sum = 1.0 + sum * (odd * odd - 4.0 * order * order) / (8.0 * k * x);
    }
    return sum * 0.3989422804014327 / sqrt(x);
}
// e^-|x| I0(x).
fn m_d_i0e(x: f64) -> f64 {
    let a = abs(x);
    if a < 22.0 { return m_exp64(-a) * m_d_bessel_near(a, 0.0); }
    return select(select(m_d_bessel_far(min(a, 1e300), 0.0), 0.0, m_d_isinf(x)), x, m_d_isnan(x));
}
// e^-|x| I1(x).
fn m_d_i1e(x: f64) -> f64 {
    let a = abs(x);
    if a < 22.0 { return m_exp64(-a) * (0.5 * x) * m_d_bessel_near(a, 1.0); }
    return select(select(m_d_copysign(m_d_bessel_far(min(a, 1e300), 1.0), x), 0.0, m_d_isinf(x)), x, m_d_isnan(x));
}
// I0(x), infinite above 714. e^a is applied as two factors, because it overflows before the result does.
fn m_d_i0(x: f64) -> f64 {
    let a = min(abs(x), 730.0);
    if abs(x) < 22.0 { return m_d_bessel_near(a, 0.0); }
    let h = m_exp64(0.5 * a);
    return select(m_d_bessel_far(a, 0.0) * h * h, x, m_d_isnan(x));
}
// I1(x), computed like I0.
fn m_d_i1(x: f64) -> f64 {
    let a = min(abs(x), 730.0);
    if abs(x) < 22.0 { return (0.5 * x) * m_d_bessel_near(a, 1.0); }
    let h = m_exp64(0.5 * a);
    return select(m_d_copysign(m_d_bessel_far(a, 1.0) * h * h, x), x, m_d_isnan(x));
}

// exp(x^2), without the rounding error of x^2. Infinite above 26.7.
fn m_d_exp_square(x: f64) -> f64 {
    let a = min(abs(x), 40.0);
    // z has 24 bits, so its square is exact. The rest of x^2 is (a - z)(a + z).
    let z = f64(f32(a));
    return m_exp64(z * z) * m_exp64((a - z) * (a + z));
}
// exp(x^2) erfc(x).
fn m_d_erfcx(x: f64) -> f64 {
    let a = abs(x);
    if a < 1.25 { return m_d_exp_square(x) * m_d_erfc(x); }
    let far = m_exp64(m_d_erfc_rest(a) - 0.5625) / a;
    return select(select(far, 2.0 * m_d_exp_square(x) - far, x < 0.0), x, m_d_isnan(x));
}
// The logarithm of the normal distribution function. Below -1 it follows from erfcx, where erfc would underflow.
fn m_d_log_ndtr(x: f64) -> f64 {
    let t = x * 0.7071067811865476;
    let tail = m_log64(0.5 * m_d_erfcx(-min(t, 0.0))) - 0.5 * x * x;
    return select(select(m_d_log1p(-0.5 * m_d_erfc(t)), tail, x < -1.0), x, m_d_isnan(x));
}
// The inverse of the normal distribution function. In the tail, Newton's method solves for the logarithm of the
// probability, as in normal_tails.wgsl.
fn m_d_ndtri(p: f64) -> f64 {
    let q = min(p, 1.0 - p);
    let ends = select(m_d_nan(), select(-m_d_inf(), m_d_inf(), p == 1.0), (p == 0.0) | (p == 1.0));
    if !((p > 0.0) & (p < 1.0)) { return ends; }
    var lower: f64;
    if q >= 0.1 {
        lower = -1.4142135623730951 * m_d_erfinv(1.0 - 2.0 * q);
    } else {
        let log_q = m_log64(q);
        let s = sqrt(-2.0 * log_q);
        var y = s - m_log64(s * 2.5066282746310002) / s;
        for (var step = 0i; step < 5i; step++) {
            let scaled = m_d_erfcx(y * 0.7071067811865476);
            let off = (m_log64(0.5 * scaled) - 0.5 * y * y) - log_q;
            y += off * scaled * 1.2533141373155003;
        }
        lower = -y;
    }
    return select(lower, -lower, p > 0.5);
}

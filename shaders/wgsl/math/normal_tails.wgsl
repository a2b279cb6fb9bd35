// needs: base, exp, log, erf
//
// Tails of the normal distribution: erfc times e^(x^2), the logarithm of its cdf, and the inverse of the cdf.

// e^(x^2) for any x: the square in two parts, of which the head's is exact.
fn m_exp_square(x: f32) -> f32 {
    let a = min(abs(x), 16.0);
    let h = m_head(a);
    return m_exp_sum(h * h, (a - h) * (a + h), 0i);
}

// e^(x^2) erfc(x).
fn m_erfcx(x: f32) -> f32 {
    let a = abs(x);
    // Beyond 12 the first terms of the asymptotic series: the remainder is below 2^-25.
    let i = 1.0 / max(a, 12.0);
    let s = i * i;
    let series = i * 0.5641896 * (1.0 + s * (-0.5 + s * (0.75 - s * 1.875)));
    let far = select(series, m_erfcx_poly(min(a, 12.0)), a < 12.0);
    let square = m_exp_square(x);
    let mirrored = 2.0 * square - far;
    let near = square * (1.0 - (x + x * m_erf_poly(x * x)));
    return select(select(select(far, mirrored, m_signbit(x)), near, a < 0.5), x, m_isnan(x));
}

// ln of the probability that a normal value is below x.
fn m_log_ndtr(x: f32) -> f32 {
    let t = x * 0.70710677;
    let tail = m_log(0.5 * m_erfcx(-min(t, 0.0))) - 0.5 * x * x;
    return select(select(m_log1p(-m_normcdf(-x)), tail, x < -1.0), x, m_isnan(x));
}

// The inverse of the cumulative normal distribution for a probability p.
fn m_ndtri(p: f32) -> f32 {
    let q = min(p, 1.0 - p);
    let middle = 1.4142135 * m_erfinv(2.0 * max(q, 0.1) - 1.0);
    // In the tail from s = sqrt(-2 ln q) (fit 2^-13), and one Newton step on the logarithm of the
    // probability.
    let log_q = m_log(min(q, 0.1));
    let s = sqrt(-2.0 * log_q);
    let t = (s - 5.0) / (s + 5.0);
    let y = s * ((((((-1.0876741 * t + 1.1904483) * t - 0.74266547) * t + 0.6237623) * t - 0.54314184) * t
        + 0.34313205) * t + 0.8960624);
    let scaled = m_erfcx(y * 0.70710677);
    let off = (m_log(0.5 * scaled) - 0.5 * y * y) - log_q;
    // The derivative of that logarithm by -y is the density over the probability.
    let tail = -(y + off * scaled * 1.2533141);
    let lower = select(tail, middle, q >= 0.1);
    let inner = select(lower, -lower, p > 0.5);
    let ends = select(m_nan(), select(-m_inf(), m_inf(), p == 1.0), (p == 0.0) | (p == 1.0));
    return select(ends, inner, (p > 0.0) & (p < 1.0));
}

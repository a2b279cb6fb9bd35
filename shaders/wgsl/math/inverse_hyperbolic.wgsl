// needs: base, log
//
// asinh, acosh, atanh, through log1p with an argument computed without cancellation.

// Error: 1.8 ulp. From 2^30 on (0x4e800000) asinh(x) rounds to log(2 x).
fn m_asinh(x: f32) -> f32 {
    let u = m_bits(x) & 0x7fffffffu;
    let a = abs(x);
    let near = m_log1p(a + (a * a) / (1.0 + sqrt(a * a + 1.0)));
    let y = select(near, m_log_double(a), u >= 0x4e800000u);
    return select(m_copysign(y, x), x, u > 0x7f800000u);
}

// Error: 2.1 ulp. NaN below 1.
fn m_acosh(x: f32) -> f32 {
    let t = x - 1.0;
    let near = m_log1p(t + sqrt(max(t * (t + 2.0), 0.0)));
    let y = select(near, m_log_double(x), m_bits(x) >= 0x4e800000u);
    return select(y, m_nan(), m_signbit(x) | (m_bits(x) < 0x3f800000u));
}

// Error: 1.8 ulp. Infinite at 1 and -1, NaN beyond.
fn m_atanh(x: f32) -> f32 {
    let u = m_bits(x) & 0x7fffffffu;
    let a = min(abs(x), 0.99999994);
    let d = 2.0 * a;
    let y = m_copysign(0.5 * m_log1p(d + d * (a / (1.0 - a))), x);
    return select(y, select(m_nan(), m_copysign(m_inf(), x), u == 0x3f800000u), u >= 0x3f800000u);
}

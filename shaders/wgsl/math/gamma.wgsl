// needs: base, log
//
// lgamma, digamma. For x > 0 to a few ulp, including near their zeros. For x < 0, where terms cancel, the
// error is 2e-6 of the larger of 1 and these terms.

// sin(pi r) for 0 <= r <= 1/2 (fit 2^-25).
fn m_sinpi_poly(r: f32) -> f32 {
    let z = r * r;
    return r * (((((-0.043593846 * z + 0.10543967) * z - 0.6045218) * z + 2.5506525) * z - 5.167729) * z + 3.1415927);
}

// lgamma(1 + z) on [-1/2, 1/2] and lgamma(2 + z) on [-1/2, 1], with their zero at 0 factored out (fits 2^-24
// and 2^-26).
fn m_lgamma_near1(z: f32) -> f32 {
    return z * (((((((((((0.1567977 * z - 0.17993565) * z + 0.08086654) * z - 0.083860986) * z + 0.12728512) * z
        - 0.14760768) * z + 0.16953745) * z - 0.20719439) * z + 0.27057743) * z - 0.40068865) * z + 0.8224671) * z
        - 0.5772157);
}
fn m_lgamma_near2(z: f32) -> f32 {
    return z * (((((((((5.6469613e-5 * z - 0.00022835693) * z + 0.00053186034) * z - 0.0011931999) * z
        + 0.002886786) * z - 0.007386782) * z + 0.020581098) * z - 0.06735204) * z + 0.32246703) * z + 0.42278433);
}

fn m_lgamma_positive(x: f32) -> f32 {
    if (x < 0.5) { return m_lgamma_near1(x) - m_log(x); }
    if (x < 1.5) { return m_lgamma_near1(x - 1.0); }
    if (x < 8.0) {
        // Down to [2, 3) by the recurrence.
        var y = x;
        var product = 1.0;
        while (y >= 3.0) {
            y -= 1.0;
            product *= y;
        }
        return m_lgamma_near2(y - 2.0) + m_log(product);
    }
    // Stirling's series, arranged so that nothing overflows before the result does.
    let i = 1.0 / min(x, 0x1p100);
    let z = i * i;
    return (x - 0.5) * (m_log(x) - 1.0) + (0.41893855 + i * ((0.0008598601 * z - 0.002778964) * z + 0.083333336));
}

// ln |gamma(x)|. Error: 2.8 ulp for x > 0.
fn m_lgamma(x: f32) -> f32 {
    let u = m_bits(x) & 0x7fffffffu;
    if (u >= 0x7f800000u) { return m_from_bits(u); }
    let a = abs(x);
    let y = m_lgamma_positive(a);
    if (!m_signbit(x)) { return select(y, m_inf(), m_iszero(x)); }
    // Reflection: gamma(-a) gamma(a) = -pi / (a sin(pi a)). The poles are the integers.
    let r = abs(a - round(a));
    if (r == 0.0) { return select(m_inf(), -m_log(a), (u != 0u) & (u < 0x33800000u)); }
    return select((1.1447299 - m_log(a * m_sinpi_poly(r))) - y, -m_log(a), u < 0x33800000u);
}

// For x > 0. On [1, 2] a polynomial of x - 3/2 with the root factored out (fit 2^-25), from 3 on the
// asymptotic series (2^-32).
fn m_digamma_positive(x: f32) -> f32 {
    if (x >= 3.0) {
        let i = 1.0 / min(x, 0x1p100);
        let z = i * i;
        return m_log(x) - (0.5 * i + z * (((-0.0027798708 * z + 0.0038555819) * z - 0.008329471) * z + 0.08333329));
    }
    // One step of the recurrence, up or down.
    var y = x;
    var step = 0.0;
    if (x < 1.0) { y = x + 1.0; step = -1.0 / x; }
    if (x > 2.0) { y = x - 1.0; step = 1.0 / y; }
    let t = y - 1.5;
    let q = ((((((((-0.016161542 * t + 0.02382502) * t - 0.025906948) * t + 0.039417192) * t - 0.062033236) * t
        + 0.09510716) * t - 0.14840047) * t + 0.24053909) * t - 0.42362747) * t + 0.9510559;
    // The root is 1.4616321 + 1.2443e-8. The effect of the second part is added to `step`, because two
    // constants in turn become one.
    return (y - 1.4616321) * q + (step - 1.2036052e-8);
}

// The derivative of lgamma, as in PyTorch: at zero infinite with the opposite sign, and NaN at the negative
// integers. Error: 3.6 ulp for x > 0.
fn m_digamma(x: f32) -> f32 {
    let u = m_bits(x) & 0x7fffffffu;
    if (u >= 0x7f800000u) { return select(m_nan(), x, m_bits(x) == 0x7f800000u); }
    if (x == 0.0 || u < 0x00200000u) { return m_copysign(m_inf(), -x); }
    if (!m_signbit(x)) { return m_digamma_positive(x); }
    // Reflection: digamma(x) = digamma(1 - x) - pi / tan(pi x).
    let r = x - round(x);
    if (r == 0.0) { return m_nan(); }
    let a = abs(r);
    let cot = m_copysign(m_sinpi_poly(0.5 - a) / m_sinpi_poly(a), r);
    return m_digamma_positive(1.0 - x) - 3.1415927 * cot;
}

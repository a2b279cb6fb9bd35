// needs: base
//
// log, log2, log10, log1p, xlogy.

// ln(1 + f) - f on [sqrt(1/2) - 1, sqrt(2) - 1] (fit 2^-27 of the logarithm).
fn m_log_poly(f: f32) -> f32 {
    let p = ((((((-0.076375075 * f + 0.1276441) * f - 0.13160263) * f + 0.1420132) * f - 0.16623314) * f
        + 0.20001249) * f - 0.25000823) * f + 0.3333333;
    return (f * f) * (f * p - 0.5);
}

// k ln 2 + ln(1 + f).
fn m_log_sum(k: i32, f: f32) -> f32 {
    let kf = f32(k);
    return kf * 0.693359375 + (f + (m_log_poly(f) + kf * -2.1219444e-4));
}

// Selects the result for a zero, negative, infinite or NaN argument.
fn m_log_special(y: f32, x: f32) -> f32 {
    let special = select(select(m_nan(), x, (m_bits(x) == 0x7f800000u) | m_isnan(x)),
        m_from_bits(0xff800000u), m_iszero(x));
    return select(y, special, m_bits(x) - 1u >= 0x7f7fffffu);
}

// Error: 0.9 ulp.
fn m_log(x: f32) -> f32 {
    let p = m_split(x);
    return m_log_special(m_log_sum(p.k, p.m - 1.0), x);
}

// ln(x) + ln(2), for any x, where 2x may overflow. Error: 0.9 ulp.
fn m_log_double(x: f32) -> f32 {
    let p = m_split(x);
    return m_log_special(m_log_sum(p.k + 1i, p.m - 1.0), x);
}

// Error: 1.3 ulp. f log2(e) is computed as f + f (log2(e) - 1), which rounds less.
fn m_log2(x: f32) -> f32 {
    let p = m_split(x);
    let f = p.m - 1.0;
    let q = (((((((-0.116106085 * f + 0.18684587) * f - 0.18837966) * f + 0.20417617) * f - 0.2399391) * f
        + 0.28861663) * f - 0.36068296) * f + 0.48089656) * f - 0.7213475;
    return m_log_special(f32(p.k) + (f + f * (0.44269505 + f * q)), x);
}

// Error: 1.1 ulp. f log10(e) is computed as f / 2 + f (log10(e) - 1/2); log10(2) is in two parts, the first
// of 12 bits.
fn m_log10(x: f32) -> f32 {
    let p = m_split(x);
    let f = p.m - 1.0;
    let q = (((((((-0.03388099 * f + 0.05575832) * f - 0.056965075) * f + 0.061587237) * f - 0.0722109) * f
        + 0.08687237) * f - 0.10857663) * f + 0.14476454) * f - 0.21714725;
    let kf = f32(p.k);
    let low = f * -0.065705515 + ((f * f) * q + kf * 4.605039e-06);
    return m_log_special(kf * 0.301025390625 + (f * 0.5 + low), x);
}

// ln(1 + x). Error: 1.6 ulp.
fn m_log1p(x: f32) -> f32 {
    let p = m_split(1.0 + x);
    // (1 + x) 2^-k - 1 from x itself, not from the rounded sum; exact or rounded once, because k is at most
    // 26 here.
    let s = m_pow2(clamp(-p.k, -30i, 30i));
    let big = x >= 0x1p26;
    let f = select(s * x + (s - 1.0), p.m - 1.0, big);
    let y = m_log_special(m_log_sum(p.k, f), 1.0 + x);
    return select(y, x, m_iszero(x) | m_isnan(x));
}

// x ln(y); 0 if x is 0, unless y is NaN.
fn m_xlogy(x: f32, y: f32) -> f32 {
    return select(select(x * m_log(y), 0.0, x == 0.0), y + x, m_isnan(y) | m_isnan(x));
}

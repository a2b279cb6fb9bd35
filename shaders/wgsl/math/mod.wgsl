// needs: base
//
// fmod, remainder and the rounded divisions, as in PyTorch.

// The exact remainder of a / b with the sign of a, like C's fmodf. In integers, eight bits of the quotient at
// a time.
fn m_fmod(a: f32, b: f32) -> f32 {
    let ua = m_bits(a) & 0x7fffffffu;
    let ub = m_bits(b) & 0x7fffffffu;
    if (ub == 0u || ub > 0x7f800000u || ua >= 0x7f800000u) { return m_nan(); }
    if (ua < ub) { return a; }
    // Significands, and exponents; a denormal's exponent counts as 1.
    let sa = (ua & 0x007fffffu) | select(0u, 0x00800000u, ua >= 0x00800000u);
    let sb = (ub & 0x007fffffu) | select(0u, 0x00800000u, ub >= 0x00800000u);
    let eb = max(ub >> 23u, 1u);
    var remaining = max(ua >> 23u, 1u) - eb;
    var r = sa % sb;
    while (remaining > 0u && r != 0u) {
        let step = min(remaining, 8u);
        r = (r << step) % sb;
        remaining -= step;
    }
    // r * 2^(eb - 150), normalised unless it is zero or denormal.
    let zeros = countLeadingZeros(r | 1u) - 8u;
    let normal = (r << zeros) + ((eb - zeros - 1u) << 23u);
    let u = select(r << (eb - 1u), normal, (eb > zeros) & (r != 0u));
    return m_from_bits(select(u, 0u, r == 0u) | (m_bits(a) & 0x80000000u));
}

// The remainder with the sign of b, like Python's %.
fn m_remainder(a: f32, b: f32) -> f32 {
    let r = m_fmod(a, b);
    return select(r, r + b, !m_iszero(r) & (m_signbit(r) != m_signbit(b)));
}

// floor(a / b), consistent with m_remainder. As in PyTorch, computed from the result of fmod, so that the
// quotient is an integer up to rounding.
fn m_floor_div(a: f32, b: f32) -> f32 {
    let r = m_fmod(a, b);
    let borrow = !m_iszero(r) & (m_signbit(r) != m_signbit(b));
    let q = (a - r) / b - select(0.0, 1.0, borrow);
    let below = floor(q);
    let whole = select(below, below + 1.0, q - below > 0.5);
    let zero = m_copysign(0.0, m_from_bits(m_bits(a) ^ m_bits(b)));
    return select(select(select(whole, zero, q == 0.0), m_nan(), m_isnan(r)), m_div(a, b), m_iszero(b));
}

// trunc(a / b); if b divides a, the quotient independent of the rounding of the division.
fn m_trunc_div(a: f32, b: f32) -> f32 {
    let q = m_div(a, b);
    return select(trunc(q), round(q), m_iszero(m_fmod(a, b)));
}

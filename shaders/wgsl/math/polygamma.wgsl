// needs: base, exp, pow
//
// Hurwitz zeta function, the sum of (q + k)^-s over all k >= 0, and with it the derivatives of digamma.

// For q > 0 and s > 1: nine terms, and the Euler-Maclaurin series for the others (its remainder is below
// 2^-30 of them).
fn m_zeta_above(s: f32, q: f32) -> f32 {
    var sum = 0.0;
    var a = q;
    for (var k = 0u; k < 9u; k++) {
        sum += m_pow(a, -s);
        a += 1.0;
    }
    let rest = m_pow(a, 1.0 - s);
    let i = 1.0 / a;
    // Each term has two more rising factors of s and two more of 1/a.
    let b = s * rest * i * i;
    let c = b * (s + 1.0) * i * (s + 2.0) * i;
    let d = c * (s + 3.0) * i * (s + 4.0) * i;
    let more = rest / (s - 1.0) + (0.5 * rest * i + (0.083333336 * b - (0.0013888889 * c - 3.3068783e-5 * d)));
    return sum + select(more, 0.0, rest == 0.0);
}

// As in PyTorch, infinite for s = 1 and if a term is infinite. NaN for s below 1, and for q below 0 unless s is
// an integer.
fn m_zeta(s: f32, q: f32) -> f32 {
    if m_isnan(s) | m_isnan(q) { return s + q; }
    if s <= 1.0 { return select(m_nan(), m_inf(), s == 1.0); }
    if q > 0.0 { return m_zeta_above(s, q); }
    let above = ceil(q) - q;
    if above == 0.0 { return m_inf(); }
    if floor(s) != s { return m_nan(); }
    // The terms on both sides of zero, without those that do not belong to q.
    let beyond = m_zeta_above(s, above) - m_zeta_above(s, 1.0 - q);
    return m_zeta_above(s, q - floor(q)) + select(beyond, -beyond, floor(0.5 * s) * 2.0 != s);
}

// For an integer order n >= 1; factor: (-1)^(n + 1) n!.
fn m_polygamma(x: f32, n: f32, factor: f32) -> f32 { return factor * m_zeta(n + 1.0, x); }

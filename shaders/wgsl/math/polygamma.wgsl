// needs: base
//
// The derivatives of digamma, by Hurwitz's zeta function: zeta(s, q) is the sum of (q + k)^-s over all k from 0 on.

// a^-s.
fn m_power_below(a: f32, s: u32) -> f32 {
    var power = 1.0;
    for (var k = 0u; k < s; k++) { power *= a; }
    return 1.0 / power;
}

// For q > 0 and s > 1: nine terms, and Euler and Maclaurin's series for the others (what is left out is below 2^-30 of them).
fn m_zeta(s: u32, q: f32) -> f32 {
    var sum = 0.0;
    var a = q;
    for (var k = 0u; k < 9u; k++) {
        sum += m_power_below(a, s);
        a += 1.0;
    }
    let order = f32(s);
    let rest = m_power_below(a, s - 1u);
    let i = 1.0 / a;
    // Each term has two more factors of the rising s and of 1/a.
    let b = order * rest * i * i;
    let c = b * (order + 1.0) * i * (order + 2.0) * i;
    let d = c * (order + 3.0) * i * (order + 4.0) * i;
    return sum + (rest / (order - 1.0) + (0.5 * rest * i + (0.083333336 * b - (0.0013888889 * c - 3.3068783e-5 * d))));
}

// Of order n, a whole number from 1 on; factor: (-1)^(n + 1) n!.
fn m_polygamma(x: f32, n: f32, factor: f32) -> f32 {
    if m_isnan(x) { return x; }
    let s = u32(n) + 1u;
    if x > 0.0 { return factor * m_zeta(s, x); }
    let above = ceil(x) - x;
    if above == 0.0 { return factor * m_inf(); }
    // The terms on both sides of zero, without those that are not of x.
    let beyond = m_zeta(s, above) - m_zeta(s, 1.0 - x);
    return factor * (m_zeta(s, x - floor(x)) + select(beyond, -beyond, (s & 1u) == 1u));
}

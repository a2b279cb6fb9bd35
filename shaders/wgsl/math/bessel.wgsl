// needs: base, exp
//
// Modified Bessel functions of the first kind, of orders 0 and 1, plain and times e^-|x|.

// I0(x) and 2 I1(x) / x for |x| <= 8, from z = x^2 / 4 (fits 2^-31 and 2^-34).
fn m_i0_near(z: f32) -> f32 {
    return (((((((((1.4225384e-13 * z + 5.220173e-12) * z + 6.5991895e-10) * z + 3.886512e-8) * z
        + 1.9324923e-6) * z + 6.942961e-5) * z + 0.0017361486) * z + 0.027777726) * z + 0.25000003) * z + 1.0) * z
        + 1.0;
}
fn m_i1_near(z: f32) -> f32 {
    return (((((((((1.2514348e-14 * z + 5.519912e-13) * z + 7.242155e-11) * z + 4.872987e-9) * z + 2.7592503e-7) * z
        + 1.1572467e-5) * z + 0.00034722665) * z + 0.0069444375) * z + 0.083333336) * z + 0.5) * z + 1.0;
}
// e^-x I(x) times the square root of x for x >= 8, from i = 1 / x (fits 2^-29).
fn m_i0_far(i: f32) -> f32 {
    return (((((1.8277228 * i - 0.3056483) * i + 0.08512869) * i + 0.02725071) * i + 0.028094823) * i
        + 0.049867418) * i + 0.3989423;
}
fn m_i1_far(i: f32) -> f32 {
    return (((((-2.0761378 * i + 0.33764076) * i - 0.10340674) * i - 0.038659025) * i - 0.04680184) * i
        - 0.14960293) * i + 0.3989423;
}

fn m_i0e(x: f32) -> f32 {
    let a = abs(x);
    let c = min(a, 8.0);
    let y = select(m_i0_far(1.0 / max(a, 8.0)) / sqrt(a), m_exp(-c) * m_i0_near(0.25 * c * c), a < 8.0);
    return select(y, x, m_isnan(x));
}
fn m_i1e(x: f32) -> f32 {
    let a = abs(x);
    let c = min(a, 8.0);
    let y = select(m_i1_far(1.0 / max(a, 8.0)) / sqrt(a), m_exp(-c) * (0.5 * c) * m_i1_near(0.25 * c * c), a < 8.0);
    return select(m_copysign(y, x), x, m_isnan(x));
}
// For large x in two steps, of which the last one overflows.
fn m_i0(x: f32) -> f32 {
    let a = min(abs(x), 100.0);
    let c = min(a, 8.0);
    let h = m_exp(0.5 * a);
    let y = select(m_i0_far(1.0 / max(a, 8.0)) / sqrt(a) * h * h, m_i0_near(0.25 * c * c), a < 8.0);
    return select(y, x, m_isnan(x));
}
fn m_i1(x: f32) -> f32 {
    let a = min(abs(x), 100.0);
    let c = min(a, 8.0);
    let h = m_exp(0.5 * a);
    let y = select(m_i1_far(1.0 / max(a, 8.0)) / sqrt(a) * h * h, (0.5 * c) * m_i1_near(0.25 * c * c), a < 8.0);
    return select(m_copysign(y, x), x, m_isnan(x));
}

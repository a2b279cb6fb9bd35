// needs: base
//
// asin, acos, atan, atan2.

// (asin(x) - x) / x on |x| <= 1/2, from z = x^2 (fit 2^-31).
fn m_asin_poly(z: f32) -> f32 {
    return z * (((((0.03761694 * z + 0.014362824) * z + 0.031829067) * z + 0.044514213) * z + 0.075005196) * z
        + 0.1666666);
}

// Error: 2.4 ulp. Beyond 1/2: pi/2 - 2 asin(sqrt((1 - x) / 2)).
fn m_asin(x: f32) -> f32 {
    let a = abs(x);
    let z = (1.0 - a) * 0.5;
    let s = sqrt(max(z, 0.0));
    // pi/2 in two parts.
    let far = 1.5707964 - (2.0 * (s + s * m_asin_poly(z)) + 4.371139e-8);
    let y = m_copysign(select(far, a + a * m_asin_poly(a * a), a < 0.5), x);
    return select(y, m_nan(), (m_bits(x) & 0x7fffffffu) > 0x3f800000u);
}

// Error: 1.3 ulp.
fn m_acos(x: f32) -> f32 {
    let a = abs(x);
    let z = (1.0 - a) * 0.5;
    let s = sqrt(max(z, 0.0));
    let edge = 2.0 * (s + s * m_asin_poly(z));
    let far = select(edge, 3.1415927 - (edge + 8.742278e-8), m_signbit(x));
    let near = 1.5707964 - (x + (x * m_asin_poly(x * x) + 4.371139e-8));
    return select(select(far, near, a < 0.5), m_nan(), (m_bits(x) & 0x7fffffffu) > 0x3f800000u);
}

// atan on [0, 1] (fit 2^-28).
fn m_atan_poly(x: f32) -> f32 {
    let z = x * x;
    let p = (((((((-0.0017875476 * z + 0.010887361) * z - 0.031127002) * z + 0.057906546) * z - 0.08400475) * z
        + 0.10951175) * z - 0.14264052) * z + 0.19998531) * z - 0.333333;
    return x + x * (z * p);
}

// Error: 1.9 ulp.
fn m_atan(x: f32) -> f32 {
    let u = m_bits(x) & 0x7fffffffu;
    let far = u > 0x3f800000u;
    // Beyond 2^60 the quotient has no effect; Vulkan's division is only defined up to 2^126.
    let a = m_from_bits(min(u, 0x5d800000u));
    let t = m_atan_poly(select(a, 1.0 / a, far));
    let y = m_copysign(select(t, 1.5707964 - (t + 4.371139e-8), far), x);
    return select(y, x, u > 0x7f800000u);
}

// The angle of the point (x, y), like C's atan2f. Error: 2.0 ulp.
fn m_atan2(y: f32, x: f32) -> f32 {
    let uy = m_bits(y) & 0x7fffffffu;
    let ux = m_bits(x) & 0x7fffffffu;
    let steep = uy > ux;
    let hi = max(ux, uy);
    // Scaled into the range where division is defined.
    let scale = select(select(1.0, 0x1p64, hi < 0x20000000u), 0x1p-64, hi >= 0x7e000000u);
    let n = m_from_bits(min(ux, uy)) * scale;
    let d = m_from_bits(hi) * scale;
    // Here 0/0 (and denormals, if flushed) is 0, and inf/inf is 1.
    let q = select(select(n / d, 0.0, m_iszero(d)), select(0.0, 1.0, min(ux, uy) == 0x7f800000u), hi == 0x7f800000u);
    let t = m_atan_poly(q);
    let first = select(t, 1.5707964 - (t + 4.371139e-8), steep);
    let second = select(3.1415927 - (first + 8.742278e-8), 1.5707964 + (t - 4.371139e-8), steep);
    let r = m_copysign(select(first, second, m_signbit(x)), y);
    return select(r, m_nan(), hi > 0x7f800000u);
}

// needs: base, mul_wide
//
// sin, cos, tan. Accurate for every finite argument: the remainder of x modulo pi/2 has an error below 1 ulp.

// The angle r + low + quadrant * pi/2; low is the rounding error of r, or zero.
struct m_Angle { r: f32, low: f32, quadrant: u32 }

// Payne-Hanek reduction of |x| >= 256 in integers: the significand times the 96 bits of 2/pi that count
// modulo 4.
fn m_reduce_large(u: u32) -> m_Angle {
    let significand = (u & 0x007fffffu) | 0x00800000u;
    // x is significand * 2^e; the window starts at the bit of weight 2^1.
    let start = (u >> 23u) + 32u - 152u;
    // The bits before the first word of 2/pi are zeros.
    let word = (start >> 5u) - 1u;
    let shift = start & 31u;
    let w0 = m_two_over_pi(word);
    let w1 = m_two_over_pi(word + 1u);
    let w2 = m_two_over_pi(word + 2u);
    let w3 = m_two_over_pi(word + 3u);
    // Two shifts, because a shift by 32 is undefined.
    let a = (w0 << shift) | ((w1 >> 1u) >> (31u - shift));
    let b = (w1 << shift) | ((w2 >> 1u) >> (31u - shift));
    let c = (w2 << shift) | ((w3 >> 1u) >> (31u - shift));
    let mid = significand * b;
    let low = mid + m_mul_wide(significand, c).x;
    let carry = select(0u, 1u, low < mid);
    let high = significand * a + m_mul_wide(significand, b).x + carry;
    // high:low / 2^62 is the angle in quadrants; the fraction is centred on zero.
    let f1 = (high << 2u) | (low >> 30u);
    let f0 = low << 2u;
    let negative = (f1 >> 31u) != 0u;
    let quadrant = (high >> 30u) + (f1 >> 31u);
    let g0 = select(f0, ~f0 + 1u, negative);
    let g1 = select(f1, ~f1 + select(0u, 1u, f0 == 0u), negative);
    // The leading 32 bits, times pi/2, then rounded once.
    let is_high_zero = g1 == 0u;
    let h1 = select(g1, g0, is_high_zero);
    let h0 = select(g0, 0u, is_high_zero);
    let zeros = min(countLeadingZeros(h1), 31u);
    let lead = (h1 << zeros) | ((h0 >> 1u) >> (31u - zeros));
    let product = m_mul_wide(lead, 0xc90fdaa2u).x;
    // product is lead * (pi/4), lead is the fraction * 2^(32 + zeros).
    let r = f32(product) * m_pow2(-31i - i32(zeros) - select(0i, 32i, is_high_zero));
    return m_Angle(select(r, -r, negative), 0.0, quadrant);
}

// |x| = r + quadrant * pi/2, with |r| <= pi/4 up to rounding.
fn m_reduce(x: f32) -> m_Angle {
    let u = m_bits(x) & 0x7fffffffu;
    if (u >= 0x43800000u && u < 0x7f800000u) { return m_reduce_large(u); }
    let a = m_from_bits(min(u, 0x43800000u));
    // pi/2 in parts of 16, 16 and 24 bits: k is below 2^8, so the first two products are exact.
    let k = round(a * 0.63661975);
    let a1 = a - k * 1.570770263671875;
    let a2 = a1 - k * 2.6063062250614166e-05;
    let r = a2 - k * 6.07710062827671e-11;
    let low = ((a2 - r) - k * 6.07710062827671e-11) + ((a1 - a2) - k * 2.6063062250614166e-05);
    return m_Angle(r, low, u32(k));
}

// sin and cos of r + low on |r| <= pi/4 up to rounding (fits 2^-32 and 2^-33).
fn m_sin_poly(t: m_Angle) -> f32 {
    let z = t.r * t.r;
    let p = ((2.825502e-6 * z - 0.00019852517) * z + 0.0083333785) * z - 0.16666667;
    return t.r + ((t.r * z) * p + t.low);
}
fn m_cos_poly(t: m_Angle) -> f32 {
    let z = t.r * t.r;
    let p = (2.4430203e-5 * z - 0.0013887299) * z + 0.041666646;
    return 1.0 + (z * (p * z - 0.5) - t.r * t.low);
}

// sin(x + shift * pi/2), for a finite x >= 0.
fn m_sin_quadrant(angle: m_Angle, shift: u32) -> f32 {
    let q = angle.quadrant + shift;
    let y = select(m_sin_poly(angle), m_cos_poly(angle), (q & 1u) == 1u);
    return select(y, -y, (q & 2u) == 2u);
}

// Error: 1.6 ulp.
fn m_sin(x: f32) -> f32 {
    let y = m_sin_quadrant(m_reduce(x), 0u);
    let signed = select(y, -y, m_signbit(x));
    return select(select(signed, x, m_iszero(x)), m_nan(), !m_isfinite(x));
}

// Error: 1.6 ulp.
fn m_cos(x: f32) -> f32 {
    return select(m_sin_quadrant(m_reduce(x), 1u), m_nan(), !m_isfinite(x));
}

// Error: 3.4 ulp.
fn m_tan(x: f32) -> f32 {
    let angle = m_reduce(x);
    let s = m_sin_poly(angle);
    let c = m_cos_poly(angle);
    let odd = (angle.quadrant & 1u) == 1u;
    let y = select(s, -c, odd) / select(c, s, odd);
    let signed = select(y, -y, m_signbit(x));
    return select(select(signed, x, m_iszero(x)), m_nan(), !m_isfinite(x));
}

// needs: base, mul_wide, f64_exp_log, f64
//
// sin, cos, tan of f64, accurate for every finite argument: the f64 version of `trig`. The polynomials and
// the parts of pi/2 are those of FreeBSD's msun (k_sin.c, k_cos.c, e_rem_pio2.c; its notice is in `f64`).

// The angle r + low + quadrant * pi/2; low is the rounding error of r, or zero.
struct m_d_Angle { r: f64, low: f64, quadrant: u32 }

// Like `m_two_over_pi`, with the words after its last one.
fn m_d_two_over_pi(word: u32) -> u32 {
    switch word {
        case 7u: { return 0xdebbc561u; } case 8u: { return 0xb7246e3au; }
        case 9u: { return 0x424dd2e0u; } case 10u: { return 0x06492eeau; }
        case 11u: { return 0x09d1921cu; } case 12u: { return 0xfe1deb1cu; }
        case 13u: { return 0xb129a73eu; } case 14u: { return 0xe88235f5u; }
        case 15u: { return 0x2ebb4484u; } case 16u: { return 0xe99c7026u; }
        case 17u: { return 0xb45f7e41u; } case 18u: { return 0x3991d639u; }
        case 19u: { return 0x835339f4u; } case 20u: { return 0x9c845f8bu; }
        case 21u: { return 0xbdf9283bu; } case 22u: { return 0x1ff897ffu; }
        case 23u: { return 0xde05980fu; } case 24u: { return 0xef2f118bu; }
        case 25u: { return 0x5a0a6d1fu; } case 26u: { return 0x6d367ecfu; }
        case 27u: { return 0x27cb09b7u; } case 28u: { return 0x4f463f66u; }
        case 29u: { return 0x9e5fea2du; } case 30u: { return 0x7527bac7u; }
        case 31u: { return 0xebe5f17bu; } case 32u: { return 0x3d0739f7u; }
        case 33u: { return 0x8a5292eau; } case 34u: { return 0x6bfb5fb1u; }
        case 35u: { return 0x1f8d5d08u; } case 36u: { return 0x56033046u; } case 37u: { return 0xfc7b6babu; }
        default: { return m_two_over_pi(word); }
    }
}

// Payne-Hanek reduction of a >= 2^20 in integers: the significand times the 192 bits of 2/pi that count
// modulo 4.
fn m_d_reduce_large(a: f64) -> m_d_Angle {
    // a is m 2^k with m in [sqrt(1/2), sqrt(2)), as in m_log64.
    var m = a;
    var k = 0i;
    for (var step = 512i; step >= 64i; step /= 2i) {
        if m >= m_pow2_64(step) { m *= m_pow2_64(-step); k += step; }
    }
    let part = m_split(f32(m)).k;
    m *= m_pow2_64(-part);
    k += part;
    // a is high:low 2^(k - 53), and the relevant bits of 2/pi begin after bit k - 55.
    let scaled = m * 0x1p21;
    let high = u32(scaled);
    let low = u32((scaled - f64(high)) * 0x1p32);
    let start = u32(k + 9i);
    var bits: array<u32, 6>;
    for (var j = 0u; j < 6u; j++) {
        // The bits before the first word of 2/pi are zeros.
        let word = (start >> 5u) + j - 2u;
        let shift = start & 31u;
        // Two shifts, because a shift by 32 is undefined. Lowest word first.
        bits[5u - j] = (m_d_two_over_pi(word) << shift) | ((m_d_two_over_pi(word + 1u) >> 1u) >> (31u - shift));
    }
    // The product modulo 2^192; divided by 2^190, it is the angle in quadrants.
    var product: array<u32, 6>;
    for (var j = 0u; j < 6u; j++) { product[j] = 0u; }
    for (var i = 0u; i < 2u; i++) {
        let factor = select(low, high, i == 1u);
        var carry = 0u;
        for (var j = i; j < 6u; j++) {
            let more = bits[j - i] * factor;
            let first = product[j] + more;
            let second = first + carry;
            carry = m_mul_wide(bits[j - i], factor).x + select(0u, 1u, first < more) + select(0u, 1u, second < carry);
            product[j] = second;
        }
    }
    // The fraction, centred on zero, from its first 128 bits: no value of 53 bits is nearer than 2^-62 to a
    // multiple of pi/2.
    var fraction = 0.0lf;
    let half = (product[5] >> 29u) & 1u;
    let sign_mask = select(0u, 0xffffffffu, half == 1u);
    for (var j = 2u; j < 6u; j++) {
        let word = ((product[j] << 2u) | (product[j - 1u] >> 30u)) ^ sign_mask;
        fraction = (fraction + f64(word)) * 0x1p-32;
    }
    let r = fraction * 1.5707963267948966;
    return m_d_Angle(select(r, -r, half == 1u), 0.0, (product[5] >> 30u) + half);
}

// a = r + low + quadrant * pi/2 for a finite a >= 0, with |r| <= pi/4 up to rounding.
fn m_d_reduce(a: f64) -> m_d_Angle {
    if a >= 0x1p20 { return m_d_reduce_large(a); }
    // pi/2 in parts of 33, 33 and 53 bits: k is below 2^20, so the first two products are exact. The clamps
    // change no value, but keep compilers from regrouping the expressions.
    let k = floor(a * 0.6366197723675814 + 0.5);
    let first = clamp(a - k * 1.5707963267341256, -2.0, 2.0);
    let second = clamp(first - k * 6.077100506303966e-11, -2.0, 2.0);
    let lost = clamp((first - second) - k * 6.077100506303966e-11, -1.0, 1.0);
    let r = clamp(second - k * 2.0222662487959506e-21, -2.0, 2.0);
    return m_d_Angle(r, clamp((second - r) - k * 2.0222662487959506e-21, -1.0, 1.0) + lost, u32(k));
}

fn m_d_sin_poly(t: m_d_Angle) -> f64 {
    let z = t.r * t.r;
    let tail = 0.00833333333332249
        + z * (-0.0001984126982985795 + z
        * (2.7557313707070068e-06 + z * (-2.5050760253406863e-08 + z * 1.58969099521155e-10)));
    return t.r - ((z * (0.5 * t.low - z * t.r * tail) - t.low) + z * t.r * 0.16666666666666632);
}
fn m_d_cos_poly(t: m_d_Angle) -> f64 {
    let z = t.r * t.r;
    let tail = 0.0416666666666666 + z
        * (-0.001388888888887411 + z * (2.480158728947673e-05 + z * (-2.7557314351390663e-07 + z *
        (2.087572321298175e-09 + z * -1.1359647557788195e-11))));
    return 1.0 - (0.5 * z - (z * z * tail - t.r * t.low));
}

// sin(a + shift * pi/2), for a finite a >= 0.
fn m_d_sin_quadrant(angle: m_d_Angle, shift: u32) -> f64 {
    let q = angle.quadrant + shift;
    let y = select(m_d_sin_poly(angle), m_d_cos_poly(angle), (q & 1u) == 1u);
    return select(y, -y, (q & 2u) == 2u);
}

fn m_d_sin(x: f64) -> f64 {
    let finite = m_d_isfinite(x);
    let y = m_d_sin_quadrant(m_d_reduce(select(0.0, abs(x), finite)), 0u);
    return select(m_d_nan(), select(y, -y, m_signbit(f32(x))), finite);
}
fn m_d_cos(x: f64) -> f64 {
    let finite = m_d_isfinite(x);
    return select(m_d_nan(), m_d_sin_quadrant(m_d_reduce(select(0.0, abs(x), finite)), 1u), finite);
}
fn m_d_tan(x: f64) -> f64 {
    let finite = m_d_isfinite(x);
    let angle = m_d_reduce(select(0.0, abs(x), finite));
    let s = m_d_sin_poly(angle);
    let c = m_d_cos_poly(angle);
    let odd = (angle.quadrant & 1u) == 1u;
    let y = select(s, -c, odd) / select(c, s, odd);
    return select(m_d_nan(), select(y, -y, m_signbit(f32(x))), finite);
}

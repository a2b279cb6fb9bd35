// Floats with the 53 bits of an f64, computed by integers: the same on every device, also without 64-bit types.
// A kernel includes math/mul_wide before.

// mantissa · 2^exponent. The mantissa is 64 bits, the upper word first: its highest bit is set, or it is zero.
struct Wide {
    mantissa: vec2<u32>,
    exponent: i32,
    negative: bool,
}

// Exponents saturate here, far beyond those of an f64, and count as infinity or zero.
const W_LIMIT = 20000i;

fn w_zero() -> Wide { return Wide(vec2<u32>(0u), 0, false); }
fn w_is_zero(v: Wide) -> bool { return v.mantissa.x == 0u; }
fn w_one() -> Wide { return Wide(vec2<u32>(0x80000000u, 0u), -63, false); }

// A value from the parameters: both words of the mantissa, the exponent, and 1 for a negative sign.
fn w_from_words(words: vec4<u32>) -> Wide {
    return Wide(words.xy, bitcast<i32>(words.z), words.w != 0u);
}

fn w_shift_left(m: vec2<u32>, by: u32) -> vec2<u32> {
    let s = by & 31u;
    let carried = select(m.y >> ((32u - s) & 31u), 0u, s == 0u);
    let within = vec2<u32>((m.x << s) | carried, m.y << s);
    return select(select(within, vec2<u32>(within.y, 0u), by >= 32u), vec2<u32>(0u), by >= 64u);
}

fn w_shift_right(m: vec2<u32>, by: u32) -> vec2<u32> {
    let s = by & 31u;
    let carried = select(m.x << ((32u - s) & 31u), 0u, s == 0u);
    let within = vec2<u32>(m.x >> s, (m.y >> s) | carried);
    return select(select(within, vec2<u32>(0u, within.x), by >= 32u), vec2<u32>(0u), by >= 64u);
}

// Shifts to the right, and sets the lowest bit if a set bit was lost: rounding then remains exact.
fn w_shift_right_sticky(m: vec2<u32>, by: u32) -> vec2<u32> {
    let kept = w_shift_right(m, by);
    let back = w_shift_left(kept, by);
    let is_exact = (back.x == m.x) & (back.y == m.y);
    return vec2<u32>(kept.x, kept.y | select(1u, 0u, is_exact));
}

// Shifts the highest set bit to the top, and rounds to 53 bits, halves to even.
fn w_rounded(negative: bool, exponent: i32, m: vec2<u32>) -> Wide {
    if (m.x | m.y) == 0u { return w_zero(); }
    let zeros = select(32u + countLeadingZeros(m.y), countLeadingZeros(m.x), m.x != 0u);
    let shifted = w_shift_left(m, zeros);
    var mantissa = vec2<u32>(shifted.x, shifted.y & 0xfffff800u);
    var e = exponent - i32(zeros);
    let lost = shifted.y & 0x7ffu;
    if (lost > 0x400u) | ((lost == 0x400u) & ((shifted.y & 0x800u) != 0u)) {
        mantissa.y += 0x800u;
        mantissa.x += select(0u, 1u, mantissa.y == 0u);
        if (mantissa.x | mantissa.y) == 0u {
            mantissa.x = 0x80000000u;
            e += 1;
        }
    }
    return Wide(mantissa, clamp(e, -W_LIMIT, W_LIMIT), negative);
}

fn w_from_u32(v: u32) -> Wide { return w_rounded(false, 0, vec2<u32>(0u, v)); }

fn w_mul(a: Wide, b: Wide) -> Wide {
    if w_is_zero(a) | w_is_zero(b) { return w_zero(); }
    let low = m_mul_wide(a.mantissa.y, b.mantissa.y);
    let cross = m_mul_wide(a.mantissa.x, b.mantissa.y);
    let other = m_mul_wide(a.mantissa.y, b.mantissa.x);
    let high = m_mul_wide(a.mantissa.x, b.mantissa.x);
    let one = low.x + cross.y;
    let middle = one + other.y;
    let carry = select(0u, 1u, one < cross.y) + select(0u, 1u, middle < other.y);
    let two = high.y + cross.x;
    let three = two + other.x;
    let lower = three + carry;
    let over = select(0u, 1u, two < cross.x) + select(0u, 1u, three < other.x) + select(0u, 1u, lower < carry);
    let sticky = select(0u, 1u, (middle | low.y) != 0u);
    let product = vec2<u32>(high.x + over, lower | sticky);
    return w_rounded(a.negative != b.negative, a.exponent + b.exponent + 64, product);
}

fn w_add(a: Wide, b: Wide) -> Wide {
    if w_is_zero(a) { return b; }
    if w_is_zero(b) { return a; }
    let is_upper = (b.mantissa.x > a.mantissa.x)
        | ((b.mantissa.x == a.mantissa.x) & (b.mantissa.y > a.mantissa.y));
    let swaps = (b.exponent > a.exponent) | ((b.exponent == a.exponent) & is_upper);
    var large = a;
    var small = b;
    if swaps {
        large = b;
        small = a;
    }
    let m = w_shift_right_sticky(small.mantissa, min(u32(large.exponent - small.exponent), 64u));
    if large.negative != small.negative {
        let borrow = select(0u, 1u, large.mantissa.y < m.y);
        let rest = vec2<u32>(large.mantissa.x - m.x - borrow, large.mantissa.y - m.y);
        return w_rounded(large.negative, large.exponent, rest);
    }
    let lower = large.mantissa.y + m.y;
    let one = large.mantissa.x + m.x;
    let upper = one + select(0u, 1u, lower < m.y);
    if (one < m.x) | (upper < one) {
        let halved = vec2<u32>((upper >> 1u) | 0x80000000u, (lower >> 1u) | (upper << 31u) | (lower & 1u));
        return w_rounded(large.negative, large.exponent + 1, halved);
    }
    return w_rounded(large.negative, large.exponent, vec2<u32>(upper, lower));
}

// 1 / v, rounded once. Zero gives infinity.
fn w_reciprocal(v: Wide) -> Wide {
    if w_is_zero(v) { return Wide(vec2<u32>(0x80000000u, 0u), W_LIMIT, v.negative); }
    if (v.mantissa.x == 0x80000000u) & (v.mantissa.y == 0u) {
        return Wide(v.mantissa, -126 - v.exponent, v.negative);
    }
    // Divides 2^127 by the mantissa, bit by bit.
    var rest = vec2<u32>(0x80000000u, 0u);
    var quotient = vec2<u32>(0u);
    for (var bit = 0u; bit < 64u; bit++) {
        let carry = rest.x >> 31u;
        rest = w_shift_left(rest, 1u);
        quotient = w_shift_left(quotient, 1u);
        let is_below = (rest.x < v.mantissa.x) | ((rest.x == v.mantissa.x) & (rest.y < v.mantissa.y));
        if (carry == 1u) | !is_below {
            let borrow = select(0u, 1u, rest.y < v.mantissa.y);
            rest = vec2<u32>(rest.x - v.mantissa.x - borrow, rest.y - v.mantissa.y);
            quotient.y |= 1u;
        }
    }
    quotient.y |= select(0u, 1u, (rest.x | rest.y) != 0u);
    return w_rounded(v.negative, -127 - v.exponent, quotient);
}

// The integer part of |v| as both words, the upper one first; the lowest 64 bits for large values.
fn w_whole(v: Wide) -> vec2<u32> {
    let top = v.exponent + 63;
    if top < 0 { return vec2<u32>(0u); }
    if top > 63 { return w_shift_left(v.mantissa, u32(min(top - 63, 64))); }
    return w_shift_right(v.mantissa, u32(63 - top));
}

// The integer part as a two's complement, the lower word first, as in memory.
fn w_i64_words(v: Wide) -> vec2<u32> {
    let whole = w_whole(v);
    let negated = vec2<u32>(0u - whole.y, ~whole.x + select(0u, 1u, whole.y == 0u));
    return select(whole.yx, negated, v.negative);
}

// The bits of the nearest f32.
fn w_f32_bits(v: Wide) -> u32 {
    let sign = select(0u, 0x80000000u, v.negative);
    let top = v.exponent + 63;
    if w_is_zero(v) | (top < -150) { return sign; }
    if top > 127 { return sign | 0x7f800000u; }
    // 24 bits and two more, of which the last one is sticky; fewer for subnormals.
    let missing = max(0, -126 - top);
    let bits = w_shift_right_sticky(v.mantissa, u32(38 + missing)).y;
    let rounds = ((bits & 3u) == 3u) | ((bits & 7u) == 6u);
    // The highest of the 24 bits counts as one of the exponent.
    let biased = u32(max(top + 126, 0)) << 23u;
    return sign | (biased + (bits >> 2u) + select(0u, 1u, rounds));
}

// The bits of the f64, the lower word first, as in memory.
fn w_f64_words(v: Wide) -> vec2<u32> {
    let sign = select(0u, 0x80000000u, v.negative);
    let top = v.exponent + 63;
    if w_is_zero(v) { return vec2<u32>(0u, sign); }
    if top > 1023 { return vec2<u32>(0u, sign | 0x7ff00000u); }
    let missing = max(0, -1022 - top);
    let bits = w_shift_right(v.mantissa, u32(min(11 + missing, 64)));
    return vec2<u32>(bits.y, sign | ((u32(max(top + 1022, 0)) << 20u) + bits.x));
}

// 1 / k!, for k up to 13: the words of the mantissa, and the negative exponent.
fn w_inverse_factorial(k: u32) -> Wide {
    var words: vec3<u32>;
    switch k {
        case 2u: { words = vec3<u32>(0x80000000u, 0x00000000u, 64u); }
        case 3u: { words = vec3<u32>(0xaaaaaaaau, 0xaaaaa800u, 66u); }
        case 4u: { words = vec3<u32>(0xaaaaaaaau, 0xaaaaa800u, 68u); }
        case 5u: { words = vec3<u32>(0x88888888u, 0x88888800u, 70u); }
        case 6u: { words = vec3<u32>(0xb60b60b6u, 0x0b60b800u, 73u); }
        case 7u: { words = vec3<u32>(0xd00d00d0u, 0x0d00d000u, 76u); }
        case 8u: { words = vec3<u32>(0xd00d00d0u, 0x0d00d000u, 79u); }
        case 9u: { words = vec3<u32>(0xb8ef1d2au, 0xb639a000u, 82u); }
        case 10u: { words = vec3<u32>(0x93f27dbbu, 0xc4fae000u, 85u); }
        case 11u: { words = vec3<u32>(0xd7322b3fu, 0xaa272000u, 89u); }
        case 12u: { words = vec3<u32>(0x8f76c77fu, 0xc6c4c000u, 92u); }
        case 13u: { words = vec3<u32>(0xb092309du, 0x43684800u, 96u); }
        default: { words = vec3<u32>(0x80000000u, 0x00000000u, 63u); }
    }
    return Wide(words.xy, -i32(words.z), false);
}

// 2^x for |x| < 10000: a power of two, and a series for the fraction.
fn w_exp2(x: Wide) -> Wide {
    let half = Wide(vec2<u32>(0x80000000u, 0u), -64, x.negative);
    let octave = w_i64_words(w_add(x, half)).x;
    let magnitude = w_from_u32(select(octave, 0u - octave, x.negative));
    let fraction = w_add(x, Wide(magnitude.mantissa, magnitude.exponent, !x.negative));
    let z = w_mul(fraction, Wide(vec2<u32>(0xb17217f7u, 0xd1cf7800u), -64, false));
    var sum = w_inverse_factorial(13u);
    for (var k = 13u; k > 0u; k--) { sum = w_add(w_mul(sum, z), w_inverse_factorial(k - 1u)); }
    return Wide(sum.mantissa, clamp(sum.exponent + bitcast<i32>(octave), -W_LIMIT, W_LIMIT), false);
}

// base^t of a base that is not negative, whose logarithm to base 2 is log2_base. Powers of an integer t are products,
// and exact where an f64 holds them.
fn w_pow(base: Wide, log2_base: Wide, t: Wide) -> Wide {
    if w_is_zero(t) { return w_one(); }
    let whole = w_whole(t);
    let is_large = t.exponent + 63 > 30;
    var k = select(whole.y, 0x7fffffffu, is_large);
    var square = base;
    var power = w_one();
    let count = w_from_u32(k);
    while k > 0u {
        if (k & 1u) == 1u { power = w_mul(power, square); }
        square = w_mul(square, square);
        k >>= 1u;
    }
    let fraction = w_add(t, Wide(count.mantissa, count.exponent, !t.negative));
    if !w_is_zero(fraction) & !is_large & !w_is_zero(base) {
        let magnitude = Wide(fraction.mantissa, fraction.exponent, false);
        power = w_mul(power, w_exp2(w_mul(magnitude, log2_base)));
    }
    if w_is_zero(base) { power = base; }
    if t.negative { return w_reciprocal(power); }
    return power;
}

// Integers of 64 bits as two words, the lower one first, for devices without such integers. They wrap around.

fn i64w_from_u32(v: u32) -> vec2<u32> { return vec2<u32>(v, 0u); }
fn i64w_from_bool(v: bool) -> vec2<u32> { return vec2<u32>(select(0u, 1u, v), 0u); }
fn i64w_from_i32(v: i32) -> vec2<u32> { return vec2<u32>(bitcast<u32>(v), select(0u, 0xffffffffu, v < 0i)); }

fn i64w_is_negative(a: vec2<u32>) -> bool { return a.y >= 0x80000000u; }
fn i64w_add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}
fn i64w_neg(a: vec2<u32>) -> vec2<u32> { return i64w_add(~a, vec2<u32>(1u, 0u)); }
fn i64w_sub(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}
fn i64w_abs(a: vec2<u32>) -> vec2<u32> { return select(a, i64w_neg(a), i64w_is_negative(a)); }
fn i64w_sign(a: vec2<u32>) -> vec2<u32> {
    let positive = select(0u, 1u, any(a != vec2<u32>()));
    return select(vec2<u32>(positive, 0u), vec2<u32>(0xffffffffu), i64w_is_negative(a));
}

// The product of two words, by halves: WGSL has no wide multiplication.
fn i64w_mul_words(a: u32, b: u32) -> vec2<u32> {
    let a0 = a & 0xffffu;
    let a1 = a >> 16u;
    let b0 = b & 0xffffu;
    let b1 = b >> 16u;
    let mid = a1 * b0 + ((a0 * b0) >> 16u);
    let cross = a0 * b1 + (mid & 0xffffu);
    return vec2<u32>(a * b, a1 * b1 + (mid >> 16u) + (cross >> 16u));
}
fn i64w_mul(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = i64w_mul_words(a.x, b.x);
    return vec2<u32>(low.x, low.y + a.x * b.y + a.y * b.x);
}

fn i64w_less_unsigned(a: vec2<u32>, b: vec2<u32>) -> bool {
    return (a.y < b.y) | ((a.y == b.y) & (a.x < b.x));
}
fn i64w_less(a: vec2<u32>, b: vec2<u32>) -> bool {
    let sign = vec2<u32>(0u, 0x80000000u);
    return i64w_less_unsigned(a ^ sign, b ^ sign);
}
fn i64w_max(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, i64w_less(a, b)); }
fn i64w_min(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, i64w_less(b, a)); }

// The quotient of the magnitudes in xy and the remainder in zw, bit by bit. As for i32, a division by 0 gives a.
fn i64w_divide_magnitudes(a: vec2<u32>, b: vec2<u32>) -> vec4<u32> {
    let divisor = i64w_abs(b);
    var quotient = i64w_abs(a);
    if all(b == vec2<u32>()) { return vec4<u32>(quotient, 0u, 0u); }
    var remainder = vec2<u32>();
    for (var bit = 0u; bit < 64u; bit++) {
        remainder = vec2<u32>((remainder.x << 1u) | (quotient.y >> 31u), (remainder.y << 1u) | (remainder.x >> 31u));
        quotient = vec2<u32>(quotient.x << 1u, (quotient.y << 1u) | (quotient.x >> 31u));
        if !i64w_less_unsigned(remainder, divisor) {
            remainder = i64w_sub(remainder, divisor);
            quotient.x |= 1u;
        }
    }
    return vec4<u32>(quotient, remainder);
}
fn i64w_trunc_div(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let quotient = i64w_divide_magnitudes(a, b).xy;
    return select(quotient, i64w_neg(quotient), i64w_is_negative(a) != i64w_is_negative(b));
}
fn i64w_fmod(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let remainder = i64w_divide_magnitudes(a, b).zw;
    return select(remainder, i64w_neg(remainder), i64w_is_negative(a));
}
fn i64w_rounds_down(remainder: vec2<u32>, b: vec2<u32>) -> bool {
    return any(remainder != vec2<u32>()) & (i64w_is_negative(remainder) != i64w_is_negative(b));
}
fn i64w_remainder(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let remainder = i64w_fmod(a, b);
    return select(remainder, i64w_add(remainder, b), i64w_rounds_down(remainder, b));
}
fn i64w_floor_div(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let quotient = i64w_trunc_div(a, b);
    return i64w_sub(quotient, i64w_from_bool(i64w_rounds_down(i64w_fmod(a, b), b)));
}

// Truncates. A value out of range becomes the nearest float in it, and NaN becomes 0.
fn i64w_from_f32(v: f32) -> vec2<u32> {
    let bits = bitcast<u32>(v) & 0x7fffffffu;
    let is_negative = bitcast<u32>(v) >= 0x80000000u;
    if bits > 0x7f800000u { return vec2<u32>(); }
    // From 2^63 on.
    if bits >= 0x5f000000u {
        return select(vec2<u32>(0u, 0x7fffff80u), vec2<u32>(0u, 0x80000000u), is_negative);
    }
    let magnitude = trunc(abs(v));
    let high = floor(magnitude * 0x1p-32f);
    let words = vec2<u32>(u32(magnitude - high * 0x1p+32f), u32(high));
    return select(words, i64w_neg(words), is_negative);
}

// Rounds to nearest even: from the first 32 bits, whose last one stands for all that follow.
fn i64w_to_f32(a: vec2<u32>) -> f32 {
    let magnitude = i64w_abs(a);
    var value = f32(magnitude.x);
    if magnitude.y != 0u {
        let shift = countLeadingZeros(magnitude.y);
        let carried = select(0u, magnitude.x >> ((32u - shift) & 31u), shift > 0u);
        let rest = select(0u, 1u, (magnitude.x << shift) != 0u);
        value = f32((magnitude.y << shift) | carried | rest) * bitcast<f32>((159u - shift) << 23u);
    }
    return select(value, -value, i64w_is_negative(a));
}
{% if (out is defined and out == "f64") or (inputs is defined and "f64" in inputs) %}
fn i64w_from_f64(v: f64) -> vec2<u32> {
    let magnitude = trunc(abs(v));
    if !(magnitude == magnitude) { return vec2<u32>(); }
    if magnitude >= 9223372036854775808.0 {
        return select(vec2<u32>(0xfffffc00u, 0x7fffffffu), vec2<u32>(0u, 0x80000000u), v < 0.0);
    }
    let high = floor(magnitude / 4294967296.0);
    let words = vec2<u32>(u32(magnitude - high * 4294967296.0), u32(high));
    return select(words, i64w_neg(words), v < 0.0);
}
fn i64w_to_f64(a: vec2<u32>) -> f64 {
    let magnitude = i64w_abs(a);
    let value = f64(magnitude.y) * 4294967296.0 + f64(magnitude.x);
    return select(value, -value, i64w_is_negative(a));
}
{% endif %}

// needs: mul_wide
//
// Ranks of quantiles beyond the integers of f32.

// a n for 0 <= a <= 1, as a whole number and a fraction in units of 2^-32. Bits below set the last one. NaN gives 0.
fn m_rank(a: f32, n: u32) -> vec2<u32> {
    let bits = bitcast<u32>(a);
    if bits > 0x3f800000u { return vec2<u32>(0u, 0u); }
    let exponent = max(bits >> 23u, 1u);
    let mantissa = (bits & 0x7fffffu) | select(0u, 0x800000u, bits >= 0x800000u);
    let product = m_mul_wide(mantissa, n);
    // a = mantissa 2^(exponent - 150), and the product moves by 32 bits.
    if exponent >= 118u {
        let up = exponent - 118u;
        let carried = select(0u, product.y >> ((32u - up) & 31u), up > 0u);
        return vec2<u32>((product.x << up) | carried, product.y << up);
    }
    let down = 118u - exponent;
    if down >= 64u { return vec2<u32>(0u, select(0u, 1u, (product.x | product.y) != 0u)); }
    var high = product.x;
    var low = product.y;
    var lost = 0u;
    if down >= 32u {
        lost = low;
        low = high;
        high = 0u;
    }
    let rest = down & 31u;
    if rest > 0u {
        lost |= low << (32u - rest);
        low = (low >> rest) | (high << (32u - rest));
        high = high >> rest;
    }
    return vec2<u32>(high, low | select(0u, 1u, lost != 0u));
}

// A part of the rank a (high 2^16 + low): the upper and the lower 16 bits of its whole number, and its fraction.
fn m_rank_part(a: f32, high: f32, low: f32, part: f32) -> f32 {
    let rank = m_rank(a, (u32(high) << 16u) + u32(low));
    if part == 0.0 { return f32(rank.x >> 16u); }
    if part == 1.0 { return f32(rank.x & 0xffffu); }
    return f32(rank.y) * 0x1p-32f;
}

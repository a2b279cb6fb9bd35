// needs: none
//
// 64-bit products, and the bits of 2/pi.

// The upper and lower word of a product, by halves: WGSL has no wide multiplication.
fn m_mul_wide(a: u32, b: u32) -> vec2<u32> {
    let a0 = a & 0xffffu;
    let a1 = a >> 16u;
    let b0 = b & 0xffffu;
    let b1 = b >> 16u;
    let low = a0 * b0;
    let mid = a1 * b0 + (low >> 16u);
    let cross = a0 * b1 + (mid & 0xffffu);
    return vec2<u32>(a1 * b1 + (mid >> 16u) + (cross >> 16u), a * b);
}

// The first 224 bits of 2/pi, word by word; zero for other words. `f64_trig` has more.
fn m_two_over_pi(word: u32) -> u32 {
    switch word {
        case 0u: { return 0xa2f9836eu; }
        case 1u: { return 0x4e441529u; }
        case 2u: { return 0xfc2757d1u; }
        case 3u: { return 0xf534ddc0u; }
        case 4u: { return 0xdb629599u; }
        case 5u: { return 0x3c439041u; }
        case 6u: { return 0xfe5163abu; }
        default: { return 0u; }
    }
}

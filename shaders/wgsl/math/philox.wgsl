// needs: mul_wide
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four words for a
// counter and a key.

fn m_philox(start: vec4<u32>, first_key: vec2<u32>) -> vec4<u32> {
    var c = start;
    var key = first_key;
    for (var round = 0u; round < 10u; round++) {
        let p0 = m_mul_wide(0xd2511f53u, c.x);
        let p1 = m_mul_wide(0xcd9e8d57u, c.z);
        c = vec4<u32>(p1.x ^ c.y ^ key.x, p1.y, p0.x ^ c.w ^ key.y, p0.y);
        key += vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
    }
    return c;
}

// Block `i` after a 64-bit offset.
fn m_philox_block(i: u32, offset: vec2<u32>, seed: vec2<u32>) -> vec4<u32> {
    let low = offset.x + i;
    return m_philox(vec4<u32>(low, offset.y + select(0u, 1u, low < i), 0u, 0u), seed);
}

// 0 <= u < 1 in steps of 2^-24: exact in f32.
fn m_unit(x: u32) -> f32 { return f32(x >> 8u) * 5.9604644775390625e-8; }

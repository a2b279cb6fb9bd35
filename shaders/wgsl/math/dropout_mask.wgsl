// needs: mul_wide, philox

// What the weight that a query gives a key is multiplied by, where some weights are dropped: `line` numbers the queries of all heads. Eight
// keys share four numbers, and each has 16 bits; one below the threshold drops the weight.
fn m_kept(line: u32, key: u32, offset: vec2<u32>, seed: vec2<u32>, threshold: u32, kept: f32) -> f32 {
    let numbers = m_philox(vec4<u32>(offset, line, key >> 3u), seed);
    let number = (numbers[(key >> 1u) & 3u] >> ((key & 1u) * 16u)) & 0xffffu;
    return select(0.0, kept, number >= threshold);
}

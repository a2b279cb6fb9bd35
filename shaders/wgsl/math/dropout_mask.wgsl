// needs: mul_wide, philox

// Returns the dropout factor of the weight of a query and a key; `line` is the index of the query over all
// heads. Eight keys share one Philox block, with 16 bits for each; bits below the threshold drop the weight.
fn m_dropout_factor(line: u32, key: u32, offset: vec2<u32>, seed: vec2<u32>, threshold: u32, kept: f32) -> f32 {
    let numbers = m_philox(vec4<u32>(offset, line, key >> 3u), seed);
    let number = (numbers[(key >> 1u) & 3u] >> ((key & 1u) * 16u)) & 0xffffu;
    return select(0.0, kept, number >= threshold);
}

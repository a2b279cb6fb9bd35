// needs: mul_wide, philox
//
// Dropout of attention's weights. Eight neighbouring keys share one Philox block, with 16 bits for each; bits below the
// threshold drop the weight.

// Returns the block of a query and a key; `line` is the index of the query over all heads.
fn m_dropout_block(line: u32, key: u32, offset: vec2<u32>, seed: vec2<u32>) -> vec4<u32> {
    return m_philox(vec4<u32>(offset, line, key >> 3u), seed);
}

// Returns the dropout factor of a key from the word of its block that it shares with one neighbour.
fn m_dropout_select(word: u32, key: u32, threshold: u32, kept: f32) -> f32 {
    return select(0.0, kept, ((word >> ((key & 1u) * 16u)) & 0xffffu) >= threshold);
}

// Returns the dropout factors of four neighbouring keys from their half of a block.
fn m_dropout_quad(words: vec2<u32>, threshold: u32, kept: f32) -> vec4<f32> {
    let draws = vec4<u32>(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u);
    return select(vec4<f32>(), vec4<f32>(kept), draws >= vec4<u32>(threshold));
}

// Returns the dropout factor of the weight of a query and a key.
fn m_dropout_factor(line: u32, key: u32, offset: vec2<u32>, seed: vec2<u32>, threshold: u32, kept: f32) -> f32 {
    let block = m_dropout_block(line, key, offset, seed);
    return m_dropout_select(block[(key >> 1u) & 3u], key, threshold, kept);
}

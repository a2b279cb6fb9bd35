// needs: none
//
// Pairs of 16-bit floats that stay packed in a word.

fn m_pair_bf16_unpack(pair: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(pair << 16u), bitcast<f32>(pair & 0xffff0000u));
}
fn m_pair_f16_unpack(pair: u32) -> vec2<f32> { return unpack2x16float(pair); }

// Maximum of each half. CUDA has an instruction for it, which keeps NaN (intrinsics.rs in backend-cuda).
// Other devices may lose NaN, so callers that need NaN also keep marks.
fn m_pair_bf16_max(a: u32, b: u32) -> u32 {
    let larger = max(m_pair_bf16_unpack(a), m_pair_bf16_unpack(b));
    return bitcast<u32>(larger.y) | (bitcast<u32>(larger.x) >> 16u);
}
fn m_pair_f16_max(a: u32, b: u32) -> u32 { return pack2x16float(max(unpack2x16float(a), unpack2x16float(b))); }

// Marks: the first bit of each half is set once a pair has had NaN. CUDA's maximum keeps NaN, so CUDA needs
// no marks.
fn m_pair_bf16_mark_nan(marks: u32, pair: u32) -> u32 { return marks | ((pair & 0x7fff7fffu) + 0x007f007fu); }
fn m_pair_f16_mark_nan(marks: u32, pair: u32) -> u32 { return marks | ((pair & 0x7fff7fffu) + 0x03ff03ffu); }

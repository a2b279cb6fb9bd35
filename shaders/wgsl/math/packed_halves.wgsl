// needs: none
//
// Pairs of 16-bit floats that stay in their word.

fn m_pair_bf16_numbers(pair: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(pair << 16u), bitcast<f32>(pair & 0xffff0000u));
}
fn m_pair_f16_numbers(pair: u32) -> vec2<f32> { return unpack2x16float(pair); }

// The larger number of each half. CUDA has an instruction for it, which keeps NaN (native.rs in backend-cuda); what other devices make of
// that is theirs, so who must know keeps marks too.
fn m_pair_bf16_larger(a: u32, b: u32) -> u32 {
    let larger = max(m_pair_bf16_numbers(a), m_pair_bf16_numbers(b));
    return bitcast<u32>(larger.y) | (bitcast<u32>(larger.x) >> 16u);
}
fn m_pair_f16_larger(a: u32, b: u32) -> u32 { return pack2x16float(max(unpack2x16float(a), unpack2x16float(b))); }

// Marks with the first bit of each half set where a pair has had NaN. Where the larger number keeps that, CUDA makes no marks.
fn m_pair_bf16_marked(marks: u32, pair: u32) -> u32 { return marks | ((pair & 0x7fff7fffu) + 0x007f007fu); }
fn m_pair_f16_marked(marks: u32, pair: u32) -> u32 { return marks | ((pair & 0x7fff7fffu) + 0x03ff03ffu); }

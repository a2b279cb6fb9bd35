// needs: none
//
// Rounding of f32 to the values of bf16, to nearest even; NaN is 0x7fff.

// The bits of a pair. CUDA rounds pairs in one instruction (intrinsics.rs in backend-cuda).
fn m_round_pair_bf16(a: f32, b: f32) -> u32 {
    let bits = bitcast<vec2<u32>>(vec2<f32>(a, b));
    let rounded = (bits + vec2<u32>(0x7fffu) + ((bits >> vec2<u32>(16u)) & vec2<u32>(1u))) >> vec2<u32>(16u);
    let is_nan = (bits & vec2<u32>(0x7fffffffu)) > vec2<u32>(0x7f800000u);
    let halves = select(rounded, vec2<u32>(0x7fffu), is_nan);
    return halves.x | (halves.y << 16u);
}

// The upper half of a pair is the value with zeros below.
fn m_round_bf16(v: f32) -> f32 { return bitcast<f32>(m_round_pair_bf16(0.0, v)); }

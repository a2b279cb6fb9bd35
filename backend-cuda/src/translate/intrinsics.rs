//! Functions of the kernels that map to a CUDA instruction: they keep their signature, and the prelude has
//! their body.

/// Suffixes of WGSL function names, and the functions of the prelude that replace them.
const INTRINSICS: [(&str, &str); 10] = [
    ("m_near_exp2", "near_exp2"),
    ("m_near_inverse", "near_inverse"),
    ("_pair_bf16", "pair_bf16"),
    ("_pair_f16", "pair_f16"),
    ("_pair_within_f8_e4m3", "pair_e4m3"),
    ("_pair_within_f8_e5m2", "pair_e5m2"),
    ("m_pair_bf16_larger", "pair_bf16_larger"),
    ("m_pair_f16_larger", "pair_f16_larger"),
    ("m_pair_bf16_marked", "pair_bf16_marked"),
    ("m_pair_f16_marked", "pair_f16_marked"),
];

/// Returns the prelude's function that replaces a WGSL function.
pub(super) fn find_intrinsic(name: &str) -> Option<&'static str> {
    INTRINSICS.iter().find(|(end, _)| name.ends_with(end)).map(|(_, native)| *native)
}

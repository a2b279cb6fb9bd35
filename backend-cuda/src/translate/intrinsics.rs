//! Functions of the kernels that CUDA has an instruction for: they keep their signature, and the prelude has their body.

/// Ends of names, and what stands in the prelude for functions with such a name.
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

/// The prelude's function for one of this name.
pub(super) fn find_intrinsic(name: &str) -> Option<&'static str> {
    INTRINSICS.iter().find(|(end, _)| name.ends_with(end)).map(|(_, native)| *native)
}

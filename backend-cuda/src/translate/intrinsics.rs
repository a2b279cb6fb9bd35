//! Functions of the kernels that map to a CUDA instruction: they keep their signature, and the prelude has
//! their body.

/// Suffixes of WGSL function names, and the functions of the prelude that replace them.
const INTRINSICS: [(&str, &str); 10] = [
    ("m_approx_exp2", "approx_exp2"),
    ("m_approx_rcp", "approx_rcp"),
    ("_pair_bf16", "pair_bf16"),
    ("_pair_f16", "pair_f16"),
    ("_pair_in_range_f8_e4m3", "pair_e4m3"),
    ("_pair_in_range_f8_e5m2", "pair_e5m2"),
    ("m_pair_bf16_max", "pair_bf16_max"),
    ("m_pair_f16_max", "pair_f16_max"),
    ("m_pair_bf16_mark_nan", "pair_bf16_mark_nan"),
    ("m_pair_f16_mark_nan", "pair_f16_mark_nan"),
];

/// Returns the prelude's function that replaces a WGSL function.
pub(super) fn find_intrinsic(name: &str) -> Option<&'static str> {
    INTRINSICS.iter().find(|(end, _)| name.ends_with(end)).map(|(_, native)| *native)
}

//! Functions of the kernels that CUDA has an instruction for: they keep their signature, and the prelude has their body.

/// Ends of names, and what stands in the prelude for functions with such a name.
const NATIVE: [(&str, &str); 4] = [
    ("m_near_exp2", "near_exp2"),
    ("m_near_inverse", "near_inverse"),
    ("_pair_bf16", "pair_bf16"),
    ("_pair_f16", "pair_f16"),
];

/// The prelude's function for one of this name.
pub(super) fn native(name: &str) -> Option<&'static str> {
    NATIVE.iter().find(|(end, _)| name.ends_with(end)).map(|(_, native)| *native)
}

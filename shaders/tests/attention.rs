//! Every form of the attention kernels is valid WGSL, and fits the smallest workgroup memory and bindings.

use forebay_shaders::KernelSpec;

mod common;

fn fits(spec: &KernelSpec) {
    let module = common::valid(spec);
    let (mut shared, mut bindings) = (0, 0);
    for (_, global) in module.global_variables.iter() {
        match global.space {
            naga::AddressSpace::WorkGroup => shared += module.types[global.ty].inner.size(module.to_ctx()),
            naga::AddressSpace::Storage { .. } => bindings += 1,
            _ => {}
        }
    }
    assert!(shared <= 16 << 10, "{shared} bytes of workgroup memory");
    assert!(bindings <= 8, "{bindings} storage bindings");
}

#[test]
fn attention() {
    for dtype in ["f32", "f16", "bf16"] {
        for (head, value) in [(1usize, 1usize), (64, 64), (40, 128), (128, 3)] {
            for (mask, dropout) in [("", false), ("bool", true), ("f32", false), (dtype, true)] {
                let spec = |pass: &'static str| {
                    KernelSpec::new("attention")
                        .def("pass", pass)
                        .def("dtype", dtype)
                        .def("head", head)
                        .def("value", value)
                        .def("mask", mask)
                        .def("dropout", dropout)
                        .def("mode", if (head | value) % 4 == 0 { "packed" } else { "scattered" })
                };
                for pass in ["forward", "queries", "keys"] {
                    fits(&spec(pass));
                }
            }
        }
        fits(&KernelSpec::new("attention_delta").def("dtype", dtype).def("value", 64usize));
    }
    fits(&KernelSpec::new("attention_kept"));
    fits(&KernelSpec::new("drawn_words"));
}

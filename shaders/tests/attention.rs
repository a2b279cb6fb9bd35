//! Every variant of the attention kernels is valid WGSL, and fits the minimum workgroup memory and bindings.

use forebay_shaders::KernelSpec;

mod common;

fn check_limits(spec: &KernelSpec, max_bytes: u32) {
    let module = common::render_valid(spec);
    let (mut shared, mut bindings) = (0, 0);
    for (_, global) in module.global_variables.iter() {
        match global.space {
            naga::AddressSpace::WorkGroup => shared += module.types[global.ty].inner.size(module.to_ctx()),
            naga::AddressSpace::Storage { .. } => bindings += 1,
            _ => {}
        }
    }
    assert!(shared <= max_bytes, "{shared} bytes of workgroup memory, not {max_bytes}");
    assert!(bindings <= 8, "{bindings} storage bindings");
}

#[test]
fn attention_on_matrix_units() {
    for dtype in ["f16", "bf16"] {
        for (head, value) in [(64usize, 64usize), (16, 48), (128, 128)] {
            for pass in ["forward", "queries", "keys"] {
                for (mask, dropout, mode) in [("", false, "packed"), ("bool", true, "scattered")] {
                    for side in [16usize, 8] {
                        let spec = KernelSpec::new("attention_cooperative").def("pass", pass);
                        let spec = spec.def("dtype", dtype).def("side", side).def("skip_hidden", side == 16);
                        let spec = spec.def("head", head).def("value", value).def("mask", mask);
                        check_limits(&spec.def("dropout", dropout).def("mode", mode), 24 << 10);
                    }
                }
            }
        }
    }
}

#[test]
fn attention_of_f32_in_large_tiles() {
    // Counts like core/src/ops/attention/kernels.rs.
    let (rows, columns, lanes, weight_stride) = (64, 64, 8, 18);
    for pass in ["forward", "queries", "keys"] {
        for (head, value) in [(64usize, 64usize), (4, 48), (20, 8)] {
            for (mask, dropout, mode) in
                [("", false, "packed"), ("bool", true, "scattered"), ("f16", false, "packed")]
            {
                for (subgroups, exchanged, unroll) in [(true, 32usize, 8usize), (false, 8, 1)] {
                    let spec = KernelSpec::new("attention_f32").def("pass", pass).def("dtype", "f32");
                    let spec = spec.def("head", head).def("value", value).def("mask", mask);
                    let spec = spec.def("dropout", dropout).def("mode", mode);
                    let spec = spec.def("exchanged", exchanged).def("unroll", unroll).def("resident", 3usize);
                    let spec = spec.def("subgroups", subgroups).def("skip_hidden", subgroups);
                    let tile = |elements: usize| (elements / 4).next_multiple_of(lanes) * (columns + 1);
                    let (kept, others) = match pass {
                        "forward" => (head, lanes * weight_stride),
                        "queries" => (head + value, rows / 2),
                        _ => (head + value, columns / 2),
                    };
                    let quads = kept / 4 * (rows + 1) + tile(head) + tile(value) + exchanged * weight_stride;
                    check_limits(&spec, 16 * (quads + others) as u32);
                }
            }
        }
    }
}

#[test]
fn attention() {
    for dtype in ["f32", "f16", "bf16"] {
        for (head, value) in [(1usize, 1usize), (64, 64), (40, 128), (128, 3)] {
            for (mask, dropout) in [("", false), ("bool", true), ("f32", false), (dtype, true)] {
                let spec = |pass: &'static str, whole: bool| {
                    KernelSpec::new("attention")
                        .def("pass", pass)
                        .def("dtype", dtype)
                        .def("head", head)
                        .def("value", value)
                        .def("mask", mask)
                        .def("dropout", dropout)
                        .def("mode", if (head | value) % 4 == 0 { "packed" } else { "scattered" })
                        .def("aligned_quads", (head | value) % 4 == 0)
                        .def("whole", whole)
                };
                for pass in ["forward", "queries", "keys"] {
                    check_limits(&spec(pass, false), 16 << 10);
                    // Counts like core/src/ops/attention.rs.
                    let fours = |extent: usize| extent.div_ceil(4);
                    let rows = if pass == "forward" { fours(head) } else { fours(head.max(value)) };
                    let columns = 8 * (head.div_ceil(32) + value.div_ceil(32));
                    check_limits(&spec(pass, true), (16 * (65 * rows + 33 * columns + 64 * 9) + 768) as u32);
                }
            }
        }
        check_limits(&KernelSpec::new("attention_delta").def("dtype", dtype).def("value", 64usize), 16 << 10);
    }
    check_limits(&KernelSpec::new("attention_dropout_mask"), 16 << 10);
    check_limits(&KernelSpec::new("philox_state"), 16 << 10);
}

#[test]
fn attention_mask_gradient() {
    for dtype in ["f32", "f16", "bf16"] {
        for mask in ["f32", dtype] {
            for (head, value) in [(1usize, 1usize), (64, 64), (40, 128), (128, 3)] {
                let spec = KernelSpec::new("attention_mask_grad").def("dtype", dtype).def("mask", mask);
                check_limits(&spec.def("head", head).def("value", value), 16 << 10);
            }
        }
    }
}

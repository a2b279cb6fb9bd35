//! Every variant of the matrix product and convolution kernels that the core uses is valid WGSL.

use forebay_shaders::{KernelSpec, TemplateDef};

mod common;
use common::render_valid;

/// Returns the definitions of the tiled and the simple variants.
fn matmul_variants() -> Vec<Vec<(&'static str, TemplateDef)>> {
    let mut ways = Vec::new();
    for (high, rows, cols, depth) in
        [(16usize, 8usize, 2usize, 8usize), (32, 4, 1, 16), (4, 4, 1, 8), (16, 2, 1, 16), (16, 1, 1, 16)]
    {
        for (a_order, b_order) in [("k", "line"), ("line", "k")] {
            ways.push(vec![
                ("way", "tiled".into()),
                ("high", high.into()),
                ("rows", rows.into()),
                ("cols", cols.into()),
                ("depth", depth.into()),
                ("a_order", a_order.into()),
                ("b_order", b_order.into()),
            ]);
        }
    }
    for lanes in [1usize, 2, 256] {
        for order in ["k", "line"] {
            ways.push(vec![("way", "simple".into()), ("lanes", lanes.into()), ("order", order.into())]);
        }
    }
    ways
}

/// Checks every variant of a kernel in every supported mode.
fn check_variants(spec: &KernelSpec, tiles: bool) {
    for way in matmul_variants() {
        let tiled = way[0].1 == TemplateDef::Str("tiled");
        for split in [false, true] {
            for mode in ["packed", "scattered"] {
                if (tiled && !tiles) || (!tiled && mode == "packed") {
                    continue;
                }
                let mut spec = spec.clone().def("split", split).def("mode", mode);
                spec.defs.extend(way.iter().cloned());
                render_valid(&spec);
            }
        }
    }
}

#[test]
fn products_are_valid() {
    for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8"] {
        for bias in [false, true] {
            check_variants(
                &KernelSpec::new("matmul").def("dtype", dtype).def("out", dtype).def("bias", bias),
                matches!(dtype, "f32" | "f16" | "bf16"),
            );
        }
        let sums = match dtype {
            "f16" | "bf16" => "f32",
            "u8" => "u32",
            other => other,
        };
        render_valid(&KernelSpec::new("splitk_reduce").def("T", sums).def("dtype", dtype));
    }
}

#[test]
fn convolutions_are_valid() {
    for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64"] {
        for kind in ["forward", "input", "weight"] {
            for rank in [2usize, 3] {
                for bias in [false, true] {
                    let spec = KernelSpec::new("conv")
                        .def("kind", kind)
                        .def("dtype", dtype)
                        .def("rank", rank)
                        .def("quick", bias)
                        .def("bias", bias);
                    check_variants(&spec, matches!(dtype, "f32" | "f16" | "bf16"));
                }
            }
        }
    }
}

#[test]
fn windows_are_valid() {
    for rank in [2usize, 3] {
        for quick in [false, true] {
            for size in [2usize, 4] {
                render_valid(
                    &KernelSpec::new("im2col").def("size", size).def("rank", rank).def("quick", quick),
                );
            }
            for dtype in ["f32", "f16", "bf16"] {
                let spec = KernelSpec::new("col2im").def("from", "f32").def("dtype", dtype).def("rank", rank);
                let spec = spec.def("quick", quick).def("kernel_x", 3).def("kernel_y", 1).def("kernel_z", 2);
                let spec = spec.def("stride_x", 2).def("stride_y", 2).def("stride_z", 1);
                render_valid(&spec.def("dilation_x", 1).def("dilation_y", 2).def("dilation_z", 1));
            }
        }
    }
}

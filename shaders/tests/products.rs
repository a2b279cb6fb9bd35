//! Every variant of the matrix product and convolution kernels that the core uses is valid WGSL.

use forebay_shaders::{KernelSpec, TemplateDef};

mod common;
use common::render_valid;

type Definitions = Vec<(&'static str, TemplateDef)>;

/// Returns the definitions of the variants: tiles, tiles of matrix units, and the simple kernel.
fn matmul_variants() -> Vec<Definitions> {
    let mut variants = Vec::new();
    let mut push_orders = |variant: Definitions| {
        for (a_order, b_order) in [("k", "line"), ("line", "k")] {
            let mut variant = variant.clone();
            variant.extend([("a_order", a_order.into()), ("b_order", b_order.into())]);
            variants.push(variant);
        }
    };
    let tiles = [[16usize, 8, 2, 16, 16], [16, 8, 2, 8, 1], [32, 4, 1, 16, 1], [4, 4, 1, 8, 1]];
    for tile in tiles {
        let names = ["thread_rows", "rows", "cols", "depth", "unroll"];
        let variant = [("variant", TemplateDef::from("tiled"))];
        push_orders(variant.into_iter().chain(names.into_iter().zip(tile.map(TemplateDef::from))).collect());
    }
    // 16 x 16 matrices, then 8 x 8 ones with the subgroups of lavapipe and of Metal.
    let cooperative = [
        [128usize, 128, 32, 64, 64, 16, 32],
        [128, 64, 32, 64, 32, 16, 32],
        [64, 64, 32, 32, 32, 16, 32],
        [64, 64, 32, 32, 32, 8, 32],
        [32, 32, 32, 16, 32, 8, 8],
    ];
    for tile in cooperative {
        let names = ["rows", "cols", "depth", "sub_rows", "sub_cols", "side", "lanes"];
        let variant = [("variant", TemplateDef::from("cooperative"))];
        push_orders(variant.into_iter().chain(names.into_iter().zip(tile.map(TemplateDef::from))).collect());
    }
    for threads_per_output in [1usize, 2, 256] {
        for order in ["k", "line"] {
            variants.push(vec![
                ("variant", "simple".into()),
                ("threads_per_output", threads_per_output.into()),
                ("order", order.into()),
            ]);
        }
    }
    variants
}

/// Checks every variant of a kernel that supports `dtype` in every mode; with `vectors` also with aligned
/// operands.
fn check_variants(spec: &KernelSpec, dtype: &str, vectors: bool) {
    for variant in matmul_variants() {
        let is = |name: &'static str| variant[0].1 == TemplateDef::Str(name);
        let supported = is("simple")
            || is("tiled") && matches!(dtype, "f32" | "f16" | "bf16")
            || matches!(dtype, "f16" | "bf16");
        // One tile of matrix units stands for all where operands are gathered: these kernels are long.
        let repeats = is("cooperative") && !vectors && variant[1].1 == TemplateDef::from(128usize);
        if !supported || repeats {
            continue;
        }
        for split in [false, true] {
            for mode in ["packed", "scattered"] {
                if is("simple") && mode == "packed" {
                    continue;
                }
                for aligned in [[false, false], [true, true]] {
                    if aligned[0] && (!vectors || is("simple")) {
                        continue;
                    }
                    let mut spec = spec.clone().def("split", split).def("mode", mode);
                    if vectors {
                        spec = spec.def("a_vectors", aligned[0]).def("b_vectors", aligned[1]);
                        spec = spec.def("k_edges", aligned[0]);
                    }
                    spec.defs.extend(variant.iter().cloned());
                    render_valid(&spec);
                }
            }
        }
    }
}

#[test]
fn products_are_valid() {
    for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8"] {
        // Bias, GELU, its argument as a second output, accumulation.
        let mut epilogues = vec![[false; 4], [true, false, false, false], [false, false, false, true]];
        if matches!(dtype, "f32" | "f16" | "bf16") {
            epilogues.push([true, true, true, false]);
        }
        for [bias, gelu, pre_activation, accumulate] in epilogues.clone() {
            let spec = KernelSpec::new("matmul").def("dtype", dtype).def("out", dtype).def("bias", bias);
            let spec = spec.def("gelu", gelu).def("pre_activation", pre_activation);
            check_variants(&spec.def("accumulate", accumulate), dtype, true);
        }
        let sums = match dtype {
            "f16" | "bf16" => "f32",
            "u8" => "u32",
            other => other,
        };
        for [_, gelu, pre_activation, accumulate] in epilogues {
            let spec = KernelSpec::new("splitk_reduce").def("T", sums).def("dtype", dtype).def("gelu", gelu);
            render_valid(&spec.def("pre_activation", pre_activation).def("accumulate", accumulate));
        }
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
                        .def("f32_division", bias)
                        .def("bias", bias);
                    check_variants(&spec, dtype, false);
                }
            }
        }
    }
}

#[test]
fn windows_are_valid() {
    for rank in [2usize, 3] {
        for f32_division in [false, true] {
            for size in [2usize, 4] {
                render_valid(
                    &KernelSpec::new("im2col")
                        .def("size", size)
                        .def("rank", rank)
                        .def("f32_division", f32_division),
                );
            }
            for dtype in ["f32", "f16", "bf16"] {
                let spec = KernelSpec::new("col2im").def("from", "f32").def("dtype", dtype).def("rank", rank);
                let spec = spec
                    .def("f32_division", f32_division)
                    .def("kernel_x", 3)
                    .def("kernel_y", 1)
                    .def("kernel_z", 2);
                let spec = spec.def("stride_x", 2).def("stride_y", 2).def("stride_z", 1);
                render_valid(&spec.def("dilation_x", 1).def("dilation_y", 2).def("dilation_z", 1));
            }
        }
    }
}

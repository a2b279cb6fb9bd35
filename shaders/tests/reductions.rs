//! Every variant of the reduction, scan and normalisation kernels is valid WGSL.

use forebay_shaders::KernelSpec;

mod common;
use common::render_valid;

fn reduce(
    source: &'static str,
    compute: &'static str,
    out: &'static str,
    combine: &'static str,
) -> KernelSpec {
    KernelSpec::new("reduce")
        .def("source", source)
        .def("compute", compute)
        .def("out", out)
        .def("index", "i64w")
        .def("combine", combine)
}

#[test]
fn reductions() {
    let none: &[&'static str] = &[];
    for (source, compute, out) in [
        ("f32", "f32", "f32"),
        ("f16", "f16", "f16"),
        ("bf16", "bf16", "f32"),
        ("f64", "f64", "f64"),
        ("i32", "i64", "i64"),
        ("u8", "u32", "u8"),
        ("bool", "i32", "i64w"),
        ("bool", "u32", "bool"),
        ("f32", "u32", "bool"),
    ] {
        for combine in ["sum", "prod", "max", "min", "argmax", "argmin"] {
            for (flat, threads_per_row, across, width, unroll) in [
                (true, 1usize, false, 1usize, 1usize),
                (false, 8, true, 1, 4),
                (false, 8, true, 4, 8),
                (true, 256, false, 1, 8),
                (true, 256, false, 4, 4),
            ] {
                if width == 4 && (combine.starts_with("arg") || !matches!(source, "f32" | "f16" | "bf16")) {
                    continue;
                }
                for second_stage in [false, true] {
                    let nonzero = compute == "u32" && out == "bool" && !combine.starts_with("arg");
                    let from_first =
                        combine == "sum" && matches!(compute, "f32" | "f16" | "f64") && !second_stage;
                    let map = if from_first { "v - k" } else { "v" };
                    let spec = reduce(source, compute, out, combine)
                        .def("math", none)
                        .def("map", if nonzero { "nonzero" } else { map })
                        .def("from_first", from_first)
                        .def("post", "acc")
                        .def("factor", "")
                        .def("center", "")
                        .def("values", second_stage)
                        .def("has_indices", second_stage && combine.starts_with("arg"))
                        .def("flat", flat)
                        .def("planar", !flat)
                        .def("f32_division", width == 4)
                        .def("threads_per_row", threads_per_row)
                        .def("across", across)
                        .def("width", width)
                        .def("unroll", unroll);
                    render_valid(&spec.clone().def("staged", false));
                    let is_16_bits = matches!(out, "f16" | "bf16") && !combine.starts_with("arg");
                    if is_16_bits && !across && threads_per_row <= 64 {
                        render_valid(&spec.def("staged", true));
                    }
                }
            }
        }
    }
}

#[test]
fn sums_of_products() {
    let none: &[&'static str] = &[];
    for (source, factor) in [("f32", "f32"), ("f32", "bf16"), ("bf16", "f32"), ("f16", "f16")] {
        for (flat, threads_per_row, across, width, unroll) in
            [(true, 1usize, false, 1usize, 1usize), (false, 8, true, 4, 8), (true, 256, false, 4, 4)]
        {
            let spec = reduce(source, "f32", "bf16", "sum").def("math", none).def("factor", factor);
            let spec = spec.def("map", "v").def("from_first", false).def("post", "acc").def("center", "");
            let spec =
                spec.def("values", true).def("has_indices", false).def("flat", flat).def("across", across);
            let spec = spec.def("planar", false).def("f32_division", false);
            let spec = spec.def("threads_per_row", threads_per_row).def("width", width);
            render_valid(&spec.def("unroll", unroll).def("staged", false));
        }
    }
}

#[test]
fn gradients_of_extremes() {
    for dtype in ["f32", "f16", "bf16"] {
        for width in [1usize, 4] {
            for (across, threads_per_row, steps) in [
                (false, 1usize, 5usize),
                (false, 8, 2),
                (false, 256, 0),
                (true, 1, 3),
                (true, 8, 0),
                (true, 256, 0),
            ] {
                for equal_nan in [false, true] {
                    let spec = KernelSpec::new("extreme_grad").def("dtype", dtype).def("width", width);
                    let spec = spec.def("across", across).def("threads_per_row", threads_per_row);
                    render_valid(&spec.def("steps", steps).def("equal_nan", equal_nan));
                }
            }
        }
    }
}

#[test]
fn scans() {
    for (source, compute, out) in [("f32", "f32", "f32"), ("bf16", "bf16", "bf16"), ("u8", "i64", "i64")] {
        for combine in ["sum", "prod", "max", "min", "affine"] {
            for (exclusive, reverse) in [(false, false), (true, true)] {
                for threads_per_row in [1usize, 256] {
                    if exclusive && !matches!(combine, "sum" | "prod") {
                        continue;
                    }
                    for stage in ["whole", "totals", "carried"] {
                        let spec = KernelSpec::new("scan")
                            .def("source", source)
                            .def("compute", compute)
                            .def("out", out)
                            .def("index", "i64")
                            .def("combine", combine)
                            .def("exclusive", exclusive)
                            .def("reverse", reverse)
                            .def("threads_per_row", threads_per_row)
                            .def("stage", stage)
                            .def("level", 0usize);
                        render_valid(&spec);
                    }
                }
            }
        }
    }
    for compute in ["f32", "bf16", "f64", "i64", "i32", "u32"] {
        for combine in ["sum", "prod", "max", "min", "affine"] {
            for threads_per_row in [1usize, 256] {
                for stage in ["whole", "totals", "carried"] {
                    let spec = KernelSpec::new("scan")
                        .def("source", "")
                        .def("compute", compute)
                        .def("out", "")
                        .def("index", "")
                        .def("combine", combine)
                        .def("exclusive", false)
                        .def("reverse", false)
                        .def("threads_per_row", threads_per_row)
                        .def("stage", stage)
                        .def("level", 1usize);
                    render_valid(&spec);
                }
            }
        }
    }
}

#[test]
fn softmax() {
    // Types of x or g, of y and of the result: of both passes with one type, and under autocast.
    let types = [
        ["f32", "f32", "f32"],
        ["f16", "f16", "f16"],
        ["bf16", "bf16", "bf16"],
        ["f64", "f64", "f64"],
        ["bf16", "f32", "f32"],
        ["f16", "f32", "f16"],
        ["f32", "f32", "bf16"],
    ];
    for [dtype, y, result] in types {
        for pass in ["forward", "backward"] {
            for log in [false, true] {
                for (threads_per_row, across, width, register_steps) in
                    [(1usize, false, 1usize, 3usize), (8, true, 1, 0), (64, false, 4, 4), (256, false, 4, 0)]
                {
                    let width = if dtype == "f64" { 1 } else { width };
                    let spec = KernelSpec::new("softmax")
                        .def("pass", pass)
                        .def("log", log)
                        .def("dtype", dtype)
                        .def("y", y)
                        .def("result", result)
                        .def("threads_per_row", threads_per_row)
                        .def("across", across)
                        .def("width", width)
                        .def("register_steps", register_steps);
                    render_valid(&spec.clone().def("stage", "whole"));
                    if register_steps == 0 {
                        render_valid(&spec.clone().def("stage", "parts"));
                        render_valid(&spec.clone().def("stage", "apply"));
                        render_valid(
                            &spec.def("stage", "finish").def("pass", "forward").def("width", 1usize),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn row_normalisations() {
    for (x, residual, sum, result) in [
        ("f32", "", "f32", "f32"),
        ("bf16", "f32", "f32", "bf16"),
        ("f16", "f16", "f16", "f16"),
        ("bf16", "bf16", "bf16", "f32"),
    ] {
        for (weight, bias) in [("f32", "bf16"), ("", "")] {
            for (rms, threads_per_row, width, register_steps) in
                [(false, 256usize, 4usize, 2usize), (true, 64, 1, 3), (false, 8, 4, 1)]
            {
                for (pass, partial, extra_grad, inplace) in [
                    ("forward", 0usize, "", false),
                    ("backward", 2, "", false),
                    ("backward", 0, sum, false),
                    ("backward", 3, sum, true),
                ] {
                    let forward = pass == "forward";
                    let kept_in_parts = sum == "f32" && x != "f32";
                    let spec = KernelSpec::new("layer_norm")
                        .def("pass", pass)
                        .def("x", if forward || kept_in_parts { x } else { sum })
                        .def("residual", if forward || kept_in_parts { residual } else { "" })
                        .def("sum", sum)
                        .def("weight", weight)
                        .def("bias", bias)
                        .def("g", result)
                        .def("extra_grad", extra_grad)
                        .def("inplace", inplace)
                        .def("result", if forward { result } else { sum })
                        .def("partial", partial)
                        .def("copy", if partial == 3 && x != sum { x } else { "" })
                        .def("rms", rms)
                        .def("threads_per_row", threads_per_row)
                        .def("width", width)
                        .def("register_steps", register_steps);
                    render_valid(&spec.clone().def("scale", "").def("shift", ""));
                    // Modulated rows have no weight and bias.
                    if weight.is_empty() && partial != 3 {
                        render_valid(&spec.def("scale", x).def("shift", if forward { x } else { "" }));
                    }
                }
            }
        }
    }
}

/// Types of x, of the result and its gradient, and of weight and bias, with an activation.
const NORM_TYPES: [[&str; 5]; 6] = [
    ["f32", "f32", "f32", "f32", ""],
    ["f16", "f16", "f32", "", ""],
    ["bf16", "f32", "bf16", "bf16", ""],
    ["f32", "f32", "", "", "silu"],
    ["bf16", "bf16", "f32", "f32", "silu"],
    ["f16", "f32", "", "f16", "relu"],
];

#[test]
fn normalisations() {
    for [x, result, weight, bias, activation] in NORM_TYPES {
        for pass in ["forward", "backward"] {
            let forward = pass == "forward";
            for rms in [false, true] {
                for (threads_per_row, across, width) in
                    [(1usize, false, 1usize), (8, true, 1), (256, false, 4), (32, false, 8)]
                {
                    let spec = KernelSpec::new("norm")
                        .def("pass", pass)
                        .def("x", x)
                        .def("g", if forward { "" } else { result })
                        .def("result", if forward { result } else { x })
                        .def("weight", weight)
                        .def("bias", if forward || !activation.is_empty() { bias } else { "" })
                        .def("activation", activation)
                        .def("rms", rms)
                        .def("contiguous", threads_per_row == 8 || rms)
                        .def("flat", rms)
                        .def("one_weight", width == 8 && !rms)
                        .def("channel_sums", false)
                        .def("threads_per_row", threads_per_row)
                        .def("across", across)
                        .def("width", width);
                    for stage in ["whole", "parts", "apply"] {
                        render_valid(&spec.clone().def("stage", stage));
                    }
                    if !forward && !across {
                        render_valid(&spec.clone().def("stage", "apply").def("channel_sums", true));
                    }
                    if forward && !across {
                        render_valid(&spec.def("stage", "finish").def("width", 1usize));
                    }
                    let spec = KernelSpec::new("norm_weight_grad")
                        .def("x", x)
                        .def("g", result)
                        .def("weight", if activation.is_empty() { "" } else { weight })
                        .def("bias", if activation.is_empty() { "" } else { bias })
                        .def("activation", activation)
                        .def("rms", rms)
                        .def("single", across)
                        .def("threads_per_row", threads_per_row)
                        .def("across", across)
                        .def("width", width);
                    render_valid(&spec.clone().def("one_run", false));
                    if !across {
                        render_valid(&spec.def("one_run", true));
                    }
                }
            }
        }
    }
}

#[test]
fn batch_normalisations() {
    for [x, result, weight, bias, activation] in NORM_TYPES {
        for pass in ["moments", "forward", "sums", "backward"] {
            for (width, single, threads_per_row) in
                [(8, false, 64), (4, false, 256), (1, false, 1), (1, true, 32)]
            {
                let spec = KernelSpec::new("batch_norm")
                    .def("pass", pass)
                    .def("x", x)
                    .def("g", if matches!(pass, "sums" | "backward") { result } else { "" })
                    .def("result", if pass == "forward" { result } else { x })
                    .def("weight", weight)
                    .def("bias", bias)
                    .def("activation", activation)
                    .def("f32_division", !activation.is_empty())
                    .def("width", width);
                let spec = match pass {
                    "moments" | "sums" => spec
                        .def("register_steps", 3)
                        .def("single", single)
                        .def("threads_per_row", threads_per_row)
                        .def("across", single),
                    _ => spec
                        .def("same_channel", threads_per_row == 256)
                        .def("fixed", single)
                        .def("copies_sums", pass == "backward" && !single && !activation.is_empty())
                        .def("mean", weight)
                        .def("var", weight)
                        .def("counts", !activation.is_empty()),
                };
                // The kernel adds the parts of a channel itself, or finds them added.
                let is_whole = matches!(pass, "forward" | "backward") && !single;
                for adds in [false, is_whole] {
                    let copies = adds && pass == "backward";
                    let spec =
                        spec.clone().def("finishes", adds && pass == "forward").def("adds_parts", copies);
                    render_valid(&if copies { spec.def("copies_sums", true) } else { spec });
                }
            }
        }
        for counts in [false, true] {
            render_valid(
                &KernelSpec::new("batch_norm")
                    .def("pass", "finish")
                    .def("activation", "")
                    .def("mean", weight)
                    .def("var", weight)
                    .def("counts", counts)
                    .def("threads_per_row", 8)
                    .def("f32_division", false),
            );
        }
    }
}

#[test]
fn cross_entropy() {
    for (dtype, targets, weight) in
        [("f32", "i64w", ""), ("bf16", "i64", "f32"), ("f16", "f16", "f32"), ("f32", "f32", "")]
    {
        let soft = dtype == targets;
        for pass in ["forward", "backward", "both"] {
            for smooth in [false, true] {
                // The pass `both` supports only class targets, and writes over the logits.
                if soft && pass == "both" {
                    continue;
                }
                for (threads_per_row, across, width, ragged, inplace) in [
                    (1usize, false, 1usize, false, false),
                    (8, true, 1, false, false),
                    (256, false, 4, false, false),
                    (256, false, 4, true, true),
                    (64, false, 1, false, true),
                ] {
                    // Only `both` keeps rows in memory, and only rows of whole workgroups.
                    let cached_elements =
                        if pass == "both" && threads_per_row >= 256 { 4096usize } else { 0 };
                    let threads_per_row = if cached_elements > 0 && ragged { 512 } else { threads_per_row };
                    let spec = KernelSpec::new("cross_entropy")
                        .def("pass", pass)
                        .def("cached_elements", cached_elements)
                        .def("dtype", dtype)
                        .def("targets", targets)
                        .def("weight", weight)
                        .def("soft", soft)
                        .def("smooth", smooth)
                        .def("threads_per_row", threads_per_row)
                        .def("across", across)
                        .def("width", width)
                        .def("ragged", ragged)
                        .def("inplace", inplace && pass == "backward" || pass == "both");
                    render_valid(&spec);
                }
            }
        }
    }
}

#[test]
fn embedding_rows_and_losses() {
    for index in ["i64w", "i32", "u32"] {
        for (g, out, width) in [("f32", "f32", 4usize), ("bf16", "f32", 1), ("f16", "f32", 4)] {
            let spec = KernelSpec::new("embedding_grad").def("index", index).def("g", g);
            render_valid(&spec.def("out", out).def("width", width));
        }
        for weight in ["", "f32", "bf16"] {
            render_valid(&KernelSpec::new("class_weights").def("targets", index).def("weight", weight));
        }
    }
    for (dtype, width) in [("f32", 4usize), ("bf16", 1), ("f16", 4)] {
        render_valid(
            &KernelSpec::new("scale_inplace")
                .def("dtype", dtype)
                .def("width", width)
                .def("steps_per_thread", 8usize),
        );
        for to in ["f8_e4m3", "f8_e5m2"] {
            let spec = KernelSpec::new("fp8_quantize").def("dtype", dtype).def("to", to).def("width", width);
            render_valid(&spec.def("transposed", width == 4).def("steps_per_thread", 4usize));
        }
        render_valid(&KernelSpec::new("sum_partials").def("outs", width.min(3)).def("width", width));
        render_valid(&KernelSpec::new("gelu_recompute_grad").def("dtype", dtype).def("width", width));
    }
}

#[test]
fn ctc_recursion() {
    for pass in ["forward", "backward"] {
        render_valid(&KernelSpec::new("ctc_alpha").def("pass", pass));
    }
}

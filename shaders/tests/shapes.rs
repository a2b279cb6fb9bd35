//! Every variant of the resampling, pooling, distance, embedding bag, rotary and recurrent kernels that the
//! core uses is valid WGSL.

use forebay_shaders::KernelSpec;

mod common;
use common::render_valid;

#[test]
fn resampling() {
    for rank in 1..=3usize {
        for dtype in ["f32", "f16", "bf16", "f64", "u8"] {
            for weighted in [false, true] {
                if dtype != "u8" || !weighted {
                    render_valid(
                        &KernelSpec::new("resample")
                            .def("dtype", dtype)
                            .def("rank", rank)
                            .def("weighted", weighted),
                    );
                }
            }
        }
    }
}

#[test]
fn sequences() {
    for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8"] {
        for kind in ["integer", "float", "power"] {
            if kind != "integer" || !matches!(dtype, "f32" | "f16" | "bf16" | "f64") {
                render_valid(&KernelSpec::new("sequence").def("dtype", dtype).def("kind", kind));
            }
        }
    }
}

#[test]
fn remapped_positions() {
    for size in [1usize, 2, 4, 8, 16] {
        for rule in ["reflect", "replicate", "circular"] {
            render_valid(&KernelSpec::new("remap").def("size", size).def("rule", rule));
        }
    }
}

#[test]
fn sums_of_repeated_elements() {
    for rank in 1..=8usize {
        for dtype in ["f32", "f16", "bf16", "f64"] {
            render_valid(&KernelSpec::new("as_strided_grad").def("dtype", dtype).def("rank", rank));
        }
    }
}

#[test]
fn vector_products() {
    for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8"] {
        render_valid(&KernelSpec::new("cross").def("dtype", dtype));
    }
}

#[test]
fn distances() {
    for norm in ["zero", "one", "two", "max", "power"] {
        for parts in [false, true] {
            for dtype in ["f32", "f64"] {
                let of = |template| {
                    KernelSpec::new(template).def("dtype", dtype).def("norm", norm).def("parts", parts)
                };
                render_valid(&of("cdist"));
                for (cols, g_across) in
                    [(4, false), (4, true), (16, false), (16, true), (64, false), (64, true)]
                {
                    if norm != "zero" && (norm != "power" || cols == 4) {
                        render_valid(&of("cdist_grad").def("cols", cols).def("g_across", g_across));
                    }
                }
            }
            for (symmetric, quads) in [(false, false), (false, true), (true, false), (true, true)] {
                if norm != "power" {
                    let spec = KernelSpec::new("cdist_tiled").def("norm", norm).def("parts", parts);
                    render_valid(&spec.def("symmetric", symmetric).def("quads", quads));
                }
            }
        }
    }
}

#[test]
fn pools() {
    for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8"] {
        for kind in ["max", "avg"] {
            for pass in ["forward", "backward"] {
                for stage in ["each", "whole", "parts", "join"] {
                    for (adaptive, large) in [(false, false), (true, false), (true, true)] {
                        let spec = KernelSpec::new("pool").def("dtype", dtype).def("kind", kind);
                        render_valid(
                            &spec
                                .def("adaptive", adaptive)
                                .def("large", large)
                                .def("pass", pass)
                                .def("stage", stage),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn bags() {
    for dtype in ["f32", "f16", "bf16", "f64"] {
        for index in ["i64w", "i32", "u32"] {
            for offsets in ["none", "i64w", "i32", "u32"] {
                for (mode, scaled) in [("sum", false), ("sum", true), ("mean", false), ("max", false)] {
                    // All stages read indices the same way, so one dtype covers them.
                    let stages: &[_] =
                        if index == "i32" { &["whole", "parts", "joined"] } else { &["whole"] };
                    for &stage in stages {
                        let spec = KernelSpec::new("embedding_bag").def("dtype", dtype).def("index", index);
                        let spec = spec.def("offsets", offsets).def("mode", mode).def("scaled", scaled);
                        render_valid(&spec.def("stage", stage));
                    }
                }
            }
        }
    }
}

#[test]
fn rotary_embeddings() {
    for dtype in ["f32", "f16", "bf16", "f64"] {
        for table in ["f32", "f64"] {
            for interleaved in [false, true] {
                let spec = KernelSpec::new("rotary").def("dtype", dtype).def("table", table);
                let spec = spec.def("interleaved", interleaved);
                render_valid(&spec.clone().def("vectors", false));
                if dtype != "f64" && table == "f32" {
                    render_valid(&spec.def("vectors", true));
                }
            }
        }
    }
}

#[test]
fn recurrent_steps() {
    for kind in ["tanh", "relu", "lstm", "gru"] {
        for dtype in ["f32", "f16", "bf16", "f64"] {
            for lengths in ["", "i32"] {
                for (pass, keep) in [("forward", false), ("forward", true), ("backward", true)] {
                    let keep = keep && matches!(kind, "lstm" | "gru");
                    let spec = KernelSpec::new("recurrent").def("kind", kind).def("pass", pass);
                    render_valid(&spec.def("dtype", dtype).def("keep", keep).def("lengths", lengths));
                }
            }
        }
    }
}

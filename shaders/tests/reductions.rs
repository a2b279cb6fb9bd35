//! Every form of the reduction, scan and normalisation kernels is valid WGSL.

use forebay_shaders::{KernelSpec, render};
use naga::valid::{Capabilities, ValidationFlags, Validator};

fn valid(spec: &KernelSpec) {
    let wgsl = render(spec).unwrap_or_else(|e| panic!("{e}"));
    let module =
        naga::front::wgsl::parse_str(&wgsl).unwrap_or_else(|e| panic!("{}\n{wgsl}", e.emit_to_string(&wgsl)));
    Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .unwrap_or_else(|e| panic!("{}\n{wgsl}", e.emit_to_string(&wgsl)));
}

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
            for (flat, lanes, across) in [(true, 1usize, false), (false, 8, true), (true, 256, false)] {
                for seen in [false, true] {
                    let nonzero = compute == "u32" && out == "bool" && !combine.starts_with("arg");
                    let spec = reduce(source, compute, out, combine)
                        .def("math", none)
                        .def("map", if nonzero { "nonzero" } else { "v" })
                        .def("post", "acc")
                        .def("center", "")
                        .def("values", seen)
                        .def("seen", seen && combine.starts_with("arg"))
                        .def("flat", flat)
                        .def("lanes", lanes)
                        .def("across", across);
                    valid(&spec);
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
                for lanes in [1usize, 256] {
                    if exclusive && !matches!(combine, "sum" | "prod") {
                        continue;
                    }
                    let spec = KernelSpec::new("scan")
                        .def("source", source)
                        .def("compute", compute)
                        .def("out", out)
                        .def("index", "i64")
                        .def("combine", combine)
                        .def("exclusive", exclusive)
                        .def("reverse", reverse)
                        .def("lanes", lanes);
                    valid(&spec);
                }
            }
        }
    }
}

#[test]
fn softmax() {
    for dtype in ["f32", "f16", "bf16"] {
        for pass in ["forward", "backward"] {
            for log in [false, true] {
                for (lanes, across, width) in [(1usize, false, 1usize), (8, true, 1), (256, false, 4)] {
                    let spec = KernelSpec::new("softmax")
                        .def("pass", pass)
                        .def("log", log)
                        .def("dtype", dtype)
                        .def("lanes", lanes)
                        .def("across", across)
                        .def("width", width);
                    valid(&spec);
                }
            }
        }
    }
}

#[test]
fn normalisations() {
    for (dtype, weight, bias) in
        [("f32", "f32", "f32"), ("f16", "f32", ""), ("bf16", "bf16", "bf16"), ("f32", "", "")]
    {
        for (pass, given, sums) in [
            ("forward", false, false),
            ("forward", true, false),
            ("backward", false, false),
            ("backward", true, false),
            ("backward", true, true),
        ] {
            for rms in [false, true] {
                for (lanes, across, width) in [(1usize, false, 1usize), (8, true, 1), (256, false, 4)] {
                    let spec = KernelSpec::new("norm")
                        .def("pass", pass)
                        .def("dtype", dtype)
                        .def("weight", weight)
                        .def("bias", if pass == "forward" { bias } else { "" })
                        .def("rms", rms)
                        .def("given", given)
                        .def("sums", sums)
                        .def("flat", rms)
                        .def("lanes", lanes)
                        .def("across", across)
                        .def("width", width);
                    valid(&spec);
                    let spec = KernelSpec::new("norm_weight")
                        .def("dtype", dtype)
                        .def("rms", rms)
                        .def("single", across)
                        .def("lanes", lanes)
                        .def("across", across);
                    valid(&spec);
                }
            }
        }
    }
}

#[test]
fn cross_entropy() {
    for (dtype, goal, weight) in
        [("f32", "i64w", ""), ("bf16", "i64", "f32"), ("f16", "f16", "f32"), ("f32", "f32", "")]
    {
        let soft = dtype == goal;
        for pass in ["forward", "backward"] {
            for smooth in [false, true] {
                for (lanes, across, width) in [(1usize, false, 1usize), (8, true, 1), (256, false, 4)] {
                    let spec = KernelSpec::new("cross_entropy")
                        .def("pass", pass)
                        .def("dtype", dtype)
                        .def("goal", goal)
                        .def("weight", weight)
                        .def("soft", soft)
                        .def("smooth", smooth)
                        .def("lanes", lanes)
                        .def("across", across)
                        .def("width", width);
                    valid(&spec);
                }
            }
        }
    }
}

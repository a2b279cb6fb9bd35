//! Every variant of the sort, scatter and select kernels is valid WGSL.

use forebay_shaders::KernelSpec;

mod common;
use common::render_valid;

const KINDS: [&str; 8] = ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8"];

#[test]
fn sorts() {
    for kind in KINDS {
        for tiled in [false, true] {
            render_valid(&KernelSpec::new("sort").def("kind", kind).def("index", "").def("tiled", tiled));
        }
    }
    for index in ["i32", "u32", "i64w"] {
        render_valid(&KernelSpec::new("sort").def("kind", "u32").def("index", index).def("tiled", true));
    }
    for wide in [false, true] {
        render_valid(&KernelSpec::new("sort_merge").def("wide", wide));
        render_valid(&KernelSpec::new("sort_select").def("wide", wide));
    }
}

#[test]
fn first_elements() {
    for kind in KINDS {
        for (threads_per_row, steps) in [(8usize, 1usize), (64, 16), (256, 2)] {
            for (partial, indirect) in [(false, false), (true, false), (false, true), (true, true)] {
                let spec = KernelSpec::new("topk").def("kind", kind).def("threads_per_row", threads_per_row);
                render_valid(&spec.def("steps", steps).def("partial", partial).def("indirect", indirect));
            }
        }
    }
}

#[test]
fn scatters_of_distinct_indices() {
    for size in [2usize, 4, 8] {
        for index in ["i32", "u32", "i64w"] {
            render_valid(&KernelSpec::new("scatter_unique").def("size", size).def("index", index));
        }
    }
}

#[test]
fn selections() {
    for kind in KINDS {
        for (stage, coordinates) in [("count", false), ("write", false), ("write", true)] {
            let spec = KernelSpec::new("nonzero").def("kind", kind).def("stage", stage);
            render_valid(&spec.def("coordinates", coordinates));
        }
        for (sorter, out) in [("", "i64w"), ("i64w", "i32")] {
            render_valid(
                &KernelSpec::new("searchsorted").def("kind", kind).def("sorter", sorter).def("out", out),
            );
        }
    }
}

#[test]
fn scatters_of_sorted_indices() {
    for index in ["i32", "u32", "i64w"] {
        let of = |chained| KernelSpec::new("resolve_indices").def("index", index).def("chained", chained);
        for (chained, wraps) in [(false, false), (false, true), (true, false), (true, true)] {
            render_valid(&of(chained).def("wraps", wraps).def("narrow", false));
        }
        render_valid(&of(false).def("wraps", false).def("narrow", true));
    }
    for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8", "bool"] {
        for op in ["add", "set", "mul", "max", "min"] {
            for (stage, long) in [("runs", false), ("runs", true), ("join", true)] {
                let spec = KernelSpec::new("scatter_sorted").def("dtype", dtype).def("op", op);
                render_valid(&spec.def("stage", stage).def("long", long).def("divisor", ""));
            }
            for (base, long) in [("zero", false), ("zero", true), ("copy", false), ("copy", true)] {
                for replaces in [false, true] {
                    let spec = KernelSpec::new("scatter_rows").def("dtype", dtype).def("src", dtype);
                    let spec = spec.def("op", op).def("base", base).def("long", long);
                    let spec = spec.def("replaces", replaces && op != "set");
                    render_valid(&spec.def("averages", false).def("ties", false));
                }
            }
        }
    }
    for dtype in ["f32", "f16", "bf16"] {
        for (long, replaces) in [(false, false), (false, true), (true, false), (true, true)] {
            let spec = KernelSpec::new("scatter_rows").def("src", dtype).def("op", "add").def("base", "copy");
            let spec = spec.def("long", long).def("replaces", replaces);
            render_valid(&spec.clone().def("dtype", dtype).def("averages", true).def("ties", false));
            render_valid(&spec.def("dtype", "f32").def("averages", false).def("ties", true));
        }
        for divisor in ["run", "all"] {
            let spec = KernelSpec::new("scatter_sorted").def("dtype", dtype).def("op", "add");
            render_valid(&spec.def("stage", "join").def("long", true).def("divisor", divisor));
        }
        for (index, width) in [("i32", 1usize), ("i64w", 4), ("u32", 4)] {
            let spec = KernelSpec::new("scatter_tie_grad").def("dtype", dtype).def("index", index);
            render_valid(&spec.def("width", width));
        }
    }
}

#[test]
fn multinomial_cdf() {
    render_valid(&KernelSpec::new("multinomial_cdf"));
}

#[test]
fn counts() {
    for privatized in [false, true] {
        render_valid(&KernelSpec::new("bincount").def("privatized", privatized));
    }
}

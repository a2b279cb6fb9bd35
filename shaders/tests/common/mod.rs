//! What the tests of every family check first.

use forebay_shaders::{KernelSpec, render};
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// The module that a kernel renders to, which is valid WGSL.
pub(crate) fn render_valid(spec: &KernelSpec) -> naga::Module {
    let wgsl = render(spec).unwrap_or_else(|e| panic!("{e}"));
    let module =
        naga::front::wgsl::parse_str(&wgsl).unwrap_or_else(|e| panic!("{}\n{wgsl}", e.emit_to_string(&wgsl)));
    Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .unwrap_or_else(|e| panic!("{}\n{wgsl}", e.emit_to_string(&wgsl)));
    module
}

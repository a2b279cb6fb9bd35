//! Checks shared by the tests of every kernel family.

use forebay_shaders::{KernelSpec, render};
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// Renders a kernel and returns its module after validation.
pub(crate) fn render_valid(spec: &KernelSpec) -> naga::Module {
    let wgsl = render(spec).unwrap_or_else(|e| panic!("{e}"));
    let module =
        naga::front::wgsl::parse_str(&wgsl).unwrap_or_else(|e| panic!("{}\n{wgsl}", e.emit_to_string(&wgsl)));
    Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .unwrap_or_else(|e| panic!("{}\n{wgsl}", e.emit_to_string(&wgsl)));
    module
}

//! Lowers recorded kernels as the wgpu backend and wgpu do, for compilers and writers that run without a device.

use forebay::backend::Limits;
use forebay::backend::null::NullKernel;
use forebay_wgpu::offline;
use naga::back::pipeline_constants;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{Module, ShaderStage};

use crate::kernels;

/// Returns the module of a kernel with the values of its overrides.
///
/// # Errors
/// The kernel does not validate, or breaks the contract of its bindings.
pub(crate) fn lower(
    kernel: &NullKernel,
    limits: &Limits,
    max_immediate_bytes: u32,
) -> Result<(Module, ModuleInfo), String> {
    let module =
        kernels::with_source(kernel, |source| offline::lower_kernel(limits, max_immediate_bytes, source))
            .map_err(|error| error.to_string())?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.to_string())?;
    let constants = kernel.overrides.iter().cloned().collect();
    let entry = Some((ShaderStage::Compute, kernel.entry_point.as_str()));
    let (module, info) = pipeline_constants::process_overrides(&module, &info, entry, &constants)
        .map_err(|error| error.to_string())?;
    Ok((module.into_owned(), info.into_owned()))
}

//! Compiles kernels: parses and validates WGSL, makes every storage binding read_write, and creates a
//! pipeline.

use std::fmt::Display;

use forebay_core::backend::{KernelSource, Limits};
use forebay_core::environment;
use forebay_core::error::{Error, Result};
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, Module, ShaderStage, StorageAccess};

use crate::bind_groups::BindLayouts;
use crate::gpu::{Gpu, to_single_line};

/// A compiled kernel.
#[derive(Debug)]
pub(crate) struct CompiledKernel {
    pub(crate) label: String,
    pub(crate) pipeline: wgpu::ComputePipeline,
    /// Number of storage bindings.
    pub(crate) binding_count: u32,
    /// If true, the kernel has a uniform block.
    pub(crate) has_params: bool,
}

/// Bindings of a module.
struct BindingInterface {
    binding_count: u32,
    has_params: bool,
}

/// Compiles a kernel.
pub(crate) fn compile(
    gpu: &Gpu,
    layouts: &BindLayouts,
    limits: &Limits,
    source: &KernelSource<'_>,
) -> Result<CompiledKernel> {
    let refuse = |message: String| Error::KernelCompilation { label: source.label.to_owned(), message };
    let mut module = naga::front::wgsl::parse_str(source.wgsl)
        .map_err(|error| refuse(error.emit_to_string(source.wgsl)))?;
    check_entry(&module, source.entry_point).map_err(refuse)?;
    // Validates the module as written, for messages that quote the source; wgpu checks the device's own
    // features.
    Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| refuse(error.emit_to_string(source.wgsl)))?;
    let interface = check_bindings(&module, limits).map_err(refuse)?;
    make_storage_read_write(&mut module);

    let label = Some(source.label);
    let module = wgpu::ShaderSource::Naga(std::borrow::Cow::Owned(module));
    let checks = runtime_checks();
    let made = gpu.with_error_scopes(|| {
        // SAFETY: kernels guard their own accesses, and their loops end. By the core's contract, slices lie
        // inside their segments, and kernels compare positions with lengths. As a precaution, debug builds
        // and FOREBAY_BOUNDS_CHECKS=1 keep every check.
        let module = unsafe {
            gpu.device
                .create_shader_module_trusted(wgpu::ShaderModuleDescriptor { label, source: module }, checks)
        };
        let layout = layouts.pipeline(&gpu.device, interface.binding_count, interface.has_params);
        gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label,
            layout: Some(&layout),
            module: &module,
            entry_point: Some(source.entry_point),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants: source.overrides,
                zero_initialize_workgroup_memory: source.zero_workgroup_memory,
            },
            cache: None,
        })
    });
    let pipeline = made.map_err(|error| refuse(to_single_line(&error)))?;
    gpu.check_health()?;
    Ok(CompiledKernel {
        label: source.label.to_owned(),
        pipeline,
        binding_count: interface.binding_count,
        has_params: interface.has_params,
    })
}

/// Environment variable that enables bounds checks in release builds.
pub(crate) const BOUNDS_CHECKS: &str = "FOREBAY_BOUNDS_CHECKS";

/// Returns the checks that wgpu adds to shaders.
fn runtime_checks() -> wgpu::ShaderRuntimeChecks {
    // Opening the device reports an invalid value as an error.
    let careful =
        cfg!(debug_assertions) || environment::read_switch(BOUNDS_CHECKS).is_ok_and(|on| on == Some(true));
    let mut checks = wgpu::ShaderRuntimeChecks::checked();
    checks.bounds_checks = careful;
    checks.force_loop_bounding = false;
    checks
}

fn check_entry(module: &Module, entry: &str) -> Result<(), String> {
    match module.entry_points.iter().find(|found| found.name == entry) {
        Some(found) if found.stage == ShaderStage::Compute => Ok(()),
        Some(_) => Err(format!("entry point `{entry}` is not a compute shader")),
        None => {
            let names =
                module.entry_points.iter().map(|found| format!("`{}`", found.name)).collect::<Vec<_>>();
            Err(format!("there is no entry point `{entry}`; the module has {}", join_names(&names)))
        }
    }
}

fn join_names(names: &[impl Display]) -> String {
    match names {
        [] => "none".to_owned(),
        names => names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// Checks that the bindings follow the contract of `KernelSource`.
fn check_bindings(module: &Module, limits: &Limits) -> Result<BindingInterface, String> {
    let mut storage = Vec::new();
    let mut params = false;
    for (_, variable) in module.global_variables.iter() {
        let name = variable.name.as_deref().unwrap_or("_");
        let Some(binding) = variable.binding else { continue };
        match (variable.space, binding.group, binding.binding) {
            (AddressSpace::Storage { .. }, 0, number) => storage.push(number),
            (AddressSpace::Uniform, 1, 0) => {
                let size = module.types[variable.ty].inner.size(module.to_ctx());
                if size > limits.max_params_bytes {
                    let max = limits.max_params_bytes;
                    return Err(format!("the parameters `{name}` have {size} bytes; at most {max} fit"));
                }
                params = true;
            }
            (_, group, number) => {
                return Err(format!(
                    "`{name}` is at @group({group}) @binding({number}); storage buffers belong in group 0, and one \
                     uniform block at @group(1) @binding(0)"
                ));
            }
        }
    }
    // Two variables with one binding count once.
    storage.sort_unstable();
    storage.dedup();
    if storage.iter().enumerate().any(|(expected, &number)| expected as u32 != number) {
        return Err(format!("storage bindings are {}; they must be 0, 1, 2 and so on", join_names(&storage)));
    }
    let bindings = storage.len() as u32;
    if bindings > limits.max_bindings {
        return Err(format!("it binds {bindings} buffers; this device allows {}", limits.max_bindings));
    }
    Ok(BindingInterface { binding_count: bindings, has_params: params })
}

/// Makes every storage buffer read_write. One dispatch must not bind a buffer both read-only and read_write,
/// and inputs and outputs are slices of the same few buffers. (Types need no change: naga lets no function
/// take pointers to storage.)
fn make_storage_read_write(module: &mut Module) {
    for (_, variable) in module.global_variables.iter_mut() {
        if let AddressSpace::Storage { access } = &mut variable.space {
            *access |= StorageAccess::LOAD | StorageAccess::STORE;
        }
    }
}

//! Compiles kernels: parses and validates WGSL, makes every storage binding read_write, moves small
//! parameter blocks to immediates, and creates a pipeline on a background thread.

use std::borrow::Cow;
use std::fmt::Display;
use std::sync::{Arc, Once};

use forebay_core::backend::compile_pool::{self, PendingCode};
use forebay_core::backend::{DeviceInfo, KernelSource, Limits};
use forebay_core::environment;
use forebay_core::error::{Error, Result};
use forebay_shaders::cooperative::{self, OperandType};
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, Expression, Module, ShaderStage, StorageAccess, TypeInner};

use crate::bind_groups::BindLayouts;
use crate::gpu::{Gpu, to_single_line};
use crate::spirv;
use crate::uniformity;

/// A checked kernel, whose pipeline may still be compiling.
#[derive(Debug)]
pub(crate) struct KernelPipeline {
    pub(crate) label: String,
    pub(crate) pipeline: Arc<PendingCode<wgpu::ComputePipeline>>,
    /// Number of storage bindings.
    pub(crate) binding_count: u32,
    /// Bit of each storage binding that the kernel writes.
    pub(crate) written: u32,
    pub(crate) params: ParamSpace,
}

impl KernelPipeline {
    /// Returns the error of a kernel whose pipeline cannot be created.
    pub(crate) fn compilation_error(&self, message: &str) -> Error {
        Error::KernelCompilation { label: self.label.clone(), message: message.to_owned() }
    }
}

/// Address space of a kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ParamSpace {
    /// The kernel has no parameters.
    None,
    /// Immediates (push constants) of this many bytes: part of the recorded commands, without a buffer.
    Immediate(u32),
    /// A uniform buffer, for blocks that are too large for immediates or indexed by invocation, and for adapters
    /// without immediates.
    Uniform,
}

struct BindingInterface {
    binding_count: u32,
    /// Bytes of the parameter block, if there is one.
    params_bytes: Option<u32>,
}

/// A checked module in the form that wgpu takes.
pub(crate) struct LoweredModule {
    pub(crate) module: Module,
    /// Number of storage bindings.
    binding_count: u32,
    /// Bit of each storage binding that the kernel writes.
    written: u32,
    params: ParamSpace,
}

/// Checks a kernel, makes its storage writable, and moves parameters to immediates if at most `max_immediate_bytes`
/// hold them.
pub(crate) fn lower(
    limits: &Limits,
    max_immediate_bytes: u32,
    source: &KernelSource<'_>,
) -> Result<LoweredModule> {
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
    let written = written_bindings(&module);
    make_storage_read_write(&mut module);
    let params = match interface.params_bytes {
        None => ParamSpace::None,
        Some(bytes) if bytes <= max_immediate_bytes && !uniformity::indexes_params_by_invocation(&module) => {
            make_params_immediate(&mut module);
            ParamSpace::Immediate(bytes)
        }
        Some(_) => ParamSpace::Uniform,
    };
    Ok(LoweredModule { module, binding_count: interface.binding_count, written, params })
}

/// Checks a kernel, and starts to create its pipeline.
pub(crate) fn compile(
    gpu: &Arc<Gpu>,
    layouts: &BindLayouts,
    info: &DeviceInfo,
    source: &KernelSource<'_>,
) -> Result<KernelPipeline> {
    let lowered = lower(&info.limits, gpu.max_immediate_bytes(), source)?;
    check_matrix_sides(&lowered.module, info.features.cooperative_side)
        .map_err(|message| Error::KernelCompilation { label: source.label.to_owned(), message })?;
    let LoweredModule { module, binding_count, written, params } = lowered;
    let layout = layouts.pipeline(&gpu.device, binding_count, params);
    let (gpu, job) = (Arc::clone(gpu), PipelineJob::new(module, layout, source));
    // The driver's library is loaded: the device is open.
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(compile_pool::register_exit_handler);
    Ok(KernelPipeline {
        label: source.label.to_owned(),
        pipeline: compile_pool::start_compile(move || job.create_pipeline(&gpu)),
        binding_count,
        written,
        params,
    })
}

/// Everything that a background thread needs to create a pipeline.
struct PipelineJob {
    module: Module,
    layout: wgpu::PipelineLayout,
    label: String,
    entry_point: String,
    overrides: Vec<(String, f64)>,
    zero_workgroup_memory: bool,
}

impl PipelineJob {
    fn new(module: Module, layout: wgpu::PipelineLayout, source: &KernelSource<'_>) -> Self {
        Self {
            module,
            layout,
            label: source.label.to_owned(),
            entry_point: source.entry_point.to_owned(),
            overrides: source.overrides.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
            zero_workgroup_memory: source.zero_workgroup_memory,
        }
    }

    fn create_pipeline(self, gpu: &Gpu) -> Result<wgpu::ComputePipeline, String> {
        let operand = cooperative::packed_operand(&self.module);
        let spirv = operand.map(|operand| self.write_cooperative(operand)).transpose()?;
        let label = Some(self.label.as_str());
        let checks = runtime_checks();
        let constants: Vec<_> = self.overrides.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        let result = gpu.with_error_scopes(|| {
            let module = match spirv {
                Some(words) => {
                    let entry = wgpu::PassthroughShaderEntryPoint {
                        name: self.entry_point.as_str().into(),
                        workgroup_size: (0, 0, 0),
                    };
                    let descriptor = wgpu::ShaderModuleDescriptorPassthrough {
                        label,
                        entry_points: Cow::Borrowed(std::slice::from_ref(&entry)),
                        spirv: Some(words.into()),
                        ..Default::default()
                    };
                    // SAFETY: naga wrote the module from a validated one, with the same bindings as the layout.
                    // What `spirv` changes is tested on each device by a probe.
                    unsafe { gpu.device.create_shader_module_passthrough(descriptor) }
                }
                None => {
                    let module = wgpu::ShaderSource::Naga(Cow::Owned(self.module));
                    // SAFETY: kernels guard their own accesses, and their loops end. By the core's contract,
                    // slices lie inside their segments, and kernels compare positions with lengths. As a
                    // precaution, debug builds keep every check, and so does FOREBAY_BOUNDS_CHECKS=1.
                    unsafe {
                        gpu.device.create_shader_module_trusted(
                            wgpu::ShaderModuleDescriptor { label, source: module },
                            checks,
                        )
                    }
                }
            };
            gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label,
                layout: Some(&self.layout),
                module: &module,
                entry_point: Some(&self.entry_point),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &constants,
                    zero_initialize_workgroup_memory: self.zero_workgroup_memory,
                },
                cache: None,
            })
        });
        result.map_err(|error| to_single_line(&error))
    }

    /// Writes a kernel with cooperative matrices as SPIR-V. Such a kernel takes no overrides.
    fn write_cooperative(&self, operand: OperandType) -> Result<Vec<u32>, String> {
        use naga::back::spv;
        let info = Validator::new(ValidationFlags::all(), Capabilities::all())
            .validate(&self.module)
            .map_err(|error| to_single_line(&error))?;
        let zero_memory = match self.zero_workgroup_memory {
            true => spv::ZeroInitializeWorkgroupMemoryMode::Polyfill,
            false => spv::ZeroInitializeWorkgroupMemoryMode::None,
        };
        let options = spv::Options {
            lang_version: (1, 6),
            flags: spv::WriterFlags::empty(),
            zero_initialize_workgroup_memory: zero_memory,
            force_loop_bounding: false,
            use_storage_input_output_16: false,
            ..spv::Options::default()
        };
        let words =
            spv::write_vec(&self.module, &info, &options, None).map_err(|error| to_single_line(&error))?;
        let difference_is_product = cooperative::is_difference_product(&self.module);
        Ok(spirv::prepare_cooperative(&words, operand, difference_is_product))
    }
}

/// Environment variable that enables or disables bounds checks; debug builds have them by default.
pub(crate) const BOUNDS_CHECKS: &str = "FOREBAY_BOUNDS_CHECKS";

/// Returns the checks that wgpu adds to shaders.
fn runtime_checks() -> wgpu::ShaderRuntimeChecks {
    // Opening the device reports an invalid value as an error.
    let bounds_checks =
        environment::read_switch(BOUNDS_CHECKS).ok().flatten().unwrap_or(cfg!(debug_assertions));
    let mut checks = wgpu::ShaderRuntimeChecks::checked();
    checks.bounds_checks = bounds_checks;
    checks.force_loop_bounding = false;
    checks
}

fn check_entry(module: &Module, entry: &str) -> Result<(), String> {
    match module.entry_points.iter().find(|candidate| candidate.name == entry) {
        Some(candidate) if candidate.stage == ShaderStage::Compute => Ok(()),
        Some(_) => Err(format!("entry point `{entry}` is not a compute shader")),
        None => {
            let names =
                module.entry_points.iter().map(|other| format!("`{}`", other.name)).collect::<Vec<_>>();
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
    let mut params_bytes = None;
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
                params_bytes = Some(size);
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
    Ok(BindingInterface { binding_count: bindings, params_bytes })
}

/// Checks that cooperative matrices have the device's size, because the driver does not check it. A `side` of 0 accepts
/// every size: probes run before the side is known, and devices without matrix units refuse the module themselves.
fn check_matrix_sides(module: &Module, side: u32) -> Result<(), String> {
    let of_types = module.types.iter().filter_map(|(_, found)| match found.inner {
        TypeInner::CooperativeMatrix { columns, rows, .. } => Some((columns, rows)),
        _ => None,
    });
    // The type of a loaded matrix need not be among the module's types.
    let entry_points = module.entry_points.iter().map(|entry| &entry.function);
    let functions = module.functions.iter().map(|(_, function)| function).chain(entry_points);
    let of_loads =
        functions.flat_map(|function| function.expressions.iter()).filter_map(|(_, found)| match *found {
            Expression::CooperativeLoad { columns, rows, .. } => Some((columns, rows)),
            _ => None,
        });
    let mut sizes = of_types.chain(of_loads).map(|(columns, rows)| [rows as u32, columns as u32]);
    match sizes.find(|&size| side > 0 && size != [side; 2]) {
        None => Ok(()),
        Some([rows, columns]) => Err(format!(
            "it has cooperative matrices of {rows} x {columns}, this device those of {side} x {side}; write the kernel \
             for `Features::cooperative_side`"
        )),
    }
}

/// Returns the bit of each storage binding that a kernel may write.
fn written_bindings(module: &Module) -> u32 {
    let bit = |variable: &naga::GlobalVariable| match (variable.space, &variable.binding) {
        (AddressSpace::Storage { access }, Some(resource)) if access.contains(StorageAccess::STORE) => {
            1 << resource.binding
        }
        _ => 0,
    };
    module.global_variables.iter().fold(0, |bits, (_, variable)| bits | bit(variable))
}

/// Makes every storage buffer read_write. One dispatch must not bind a buffer both read-only and read_write,
/// and inputs and outputs are slices of the same few buffers. Types need no change: naga lets no function
/// take pointers to storage.
fn make_storage_read_write(module: &mut Module) {
    for (_, variable) in module.global_variables.iter_mut() {
        if let AddressSpace::Storage { access } = &mut variable.space {
            *access |= StorageAccess::LOAD | StorageAccess::STORE;
        }
    }
}

/// Moves the parameter block from its uniform buffer to immediates. (A uniform block has no f16 members, which
/// immediates may not have.)
fn make_params_immediate(module: &mut Module) {
    for (_, variable) in module.global_variables.iter_mut() {
        if variable.space == AddressSpace::Uniform {
            variable.space = AddressSpace::Immediate;
            variable.binding = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_another_size_are_refused() {
        let check = |wgsl: &str, side| check_matrix_sides(&naga::front::wgsl::parse_str(wgsl).unwrap(), side);
        let kernel = "
            enable wgpu_cooperative_matrix;
            @group(0) @binding(0) var<storage, read_write> x: array<f32>;
            @compute @workgroup_size(32) fn main() {
                let sums = coopLoad<coop_mat8x8<f32, C>>(&x[0], 8u);
                coopStore(sums, &x[64], 8u);
            }";
        let message = check(kernel, 16).unwrap_err();
        assert!(message.contains("8 x 8, this device those of 16 x 16"), "{message}");
        // A probe runs before the side is known.
        assert_eq!([check(kernel, 8), check(kernel, 0)], [Ok(()), Ok(())]);
        assert_eq!(check("@compute @workgroup_size(1) fn main() {}", 16), Ok(()));
    }
}

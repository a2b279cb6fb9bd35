//! Lists adapters with their capabilities, and opens devices.
//!
//! A device opens in three steps: `portable_descriptor` requests features and limits, `probe` tests the optional
//! types, and `describe_device` fills the core's `DeviceInfo`. An optional type needs an entry in `probe`; another
//! feature of wgpu goes to `portable_descriptor`, and a limit to `describe_device`.

use forebay_core::backend::{DeviceInfo, DeviceMemory, Features, Limits, PeakRates, SourceLimits};
use forebay_core::environment;
use forebay_core::error::{Error, Result};
use forebay_shaders::cooperative::OperandType;

use crate::backend::WgpuBackend;
use crate::gpu::{Gpu, immediate_bytes_within};
use crate::offline::OfflineAdapter;
use crate::params::MAX_PARAMS;
use crate::platform;
use crate::probe::{self, MatrixShape};
use crate::staging::MAX_READBACK_BYTES;
use crate::vulkan;

/// Minimum alignment of slices; an adapter may require more. Fixed, so that the same program has the same
/// memory on every adapter.
const ALIGNMENT: u32 = 256;
/// Buffers smaller than this share a block of the driver's memory inside wgpu; segments do not.
const SUBALLOCATION_BLOCK: u64 = 4 << 20;
/// Percentage of the driver's budget at which creating a buffer fails, before the machine runs out of memory.
const BUDGET_PERCENT: u8 = 98;

/// Storage buffers, invocations and bytes of a workgroup, and workgroups along a dimension, with which all operations
/// work. Kernels with more of them run only where the limits allow it.
const MAX_KERNEL_BUFFERS: u32 = 8;
const WORKGROUP_SIZE: u32 = 256;
const WORKGROUP_BYTES: u32 = 16 << 10;
const MAX_WORKGROUPS: u32 = u16::MAX as u32;

/// Environment variable that enables or disables matrix units. By default, hardware has them and software has not.
pub(crate) const MATRIX_UNITS: &str = "FOREBAY_MATRIX_UNITS";

const MATRIX_FEATURES: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::PASSTHROUGH_SHADERS);

/// A device that wgpu finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WgpuDeviceInfo {
    /// Index of the device, for [`WgpuBackend::open`].
    pub index: usize,
    /// The card's name.
    pub name: String,
    /// API, driver and version: `Vulkan, llvmpipe, Mesa 22.3.6`.
    pub driver: String,
    /// If true, the device is a software renderer.
    pub software: bool,
    /// Reason why the device cannot be used, if any.
    pub unavailable_reason: Option<String>,
}

/// An adapter with its index.
pub(crate) struct AdapterCandidate {
    pub(crate) adapter: wgpu::Adapter,
    info: wgpu::AdapterInfo,
    unavailable_reason: Option<String>,
}

impl AdapterCandidate {
    pub(crate) fn new(adapter: wgpu::Adapter) -> Self {
        let info = adapter.get_info();
        let unavailable_reason = unavailable_reason(&adapter);
        Self { adapter, info, unavailable_reason }
    }

    /// Orders usable adapters first, then hardware before software, then APIs by preference.
    fn sort_key(&self) -> (bool, u8, u8) {
        let kind = match self.info.device_type {
            wgpu::DeviceType::DiscreteGpu => 0,
            wgpu::DeviceType::IntegratedGpu => 1,
            wgpu::DeviceType::VirtualGpu => 2,
            wgpu::DeviceType::Other => 3,
            wgpu::DeviceType::Cpu => 4,
        };
        let api = match self.info.backend {
            wgpu::Backend::Vulkan | wgpu::Backend::Metal => 0,
            wgpu::Backend::Dx12 => 1,
            _ => 2,
        };
        (self.unavailable_reason.is_some(), kind, api)
    }

    fn is_software(&self) -> bool {
        self.info.device_type == wgpu::DeviceType::Cpu
    }

    /// Reports whether the settings allow matrix units. Software drivers take many times longer to compile such kernels
    /// than they save, so they need the variable.
    fn enables_matrix_units(&self) -> bool {
        // Opening the device reports an invalid value as an error.
        environment::read_switch(MATRIX_UNITS).ok().flatten().unwrap_or(!self.is_software())
    }

    /// Reports whether the API accepts the SPIR-V that [`spirv`](crate::spirv) prepares. Metal has 8 x 8 matrices too.
    fn accepts_spirv(&self) -> bool {
        self.info.backend == wgpu::Backend::Vulkan
    }

    /// Returns the shapes of matrices that the driver lists and the kernels can use, the preferred one first, or the
    /// reason why there are none. Subgroups have one size, f16 matrices have sums in f32, and the driver accepts this
    /// backend's SPIR-V.
    pub(crate) fn matrix_shapes(&self) -> Result<Vec<MatrixShape>, String> {
        use wgpu::CooperativeScalarType::{F16, F32};
        if !self.accepts_spirv() {
            return Err("wgpu takes the SPIR-V of matrix units only through Vulkan".to_owned());
        }
        if !self.adapter.features().contains(MATRIX_FEATURES) {
            return Err("the driver has no cooperative matrices in SPIR-V".to_owned());
        }
        if !self.enables_matrix_units() {
            return Err(match self.is_software() {
                true => format!("software drivers use matrix units only with {MATRIX_UNITS}=1"),
                false => format!("{MATRIX_UNITS}=0 disables matrix units"),
            });
        }
        let (lanes, max) = (self.info.subgroup_min_size, self.info.subgroup_max_size);
        if lanes != max {
            return Err(format!(
                "its subgroups have {lanes} to {max} invocations; the kernels need one size"
            ));
        }
        let properties = self.adapter.cooperative_matrix_properties();
        let lists = |side: u32| {
            properties.iter().any(|shape| {
                [shape.m_size, shape.n_size, shape.k_size] == [side; 3]
                    && (shape.ab_type, shape.cr_type) == (F16, F32)
            })
        };
        let fits = |side: u32| match side {
            16 => lanes == 32,
            _ => lanes.is_power_of_two() && (8..=64).contains(&lanes),
        };
        let sides = [16, 8].into_iter().filter(|&side| lists(side) && fits(side));
        let shapes = sides.map(|side| MatrixShape { side, lanes }).collect::<Vec<_>>();
        if shapes.is_empty() {
            return Err(format!(
                "the driver lists no product of f16 matrices with sums in f32 that its subgroups of {lanes} can use: \
                 16 x 16 with subgroups of 32, or 8 x 8 with at least 8 invocations"
            ));
        }
        Ok(shapes)
    }

    fn driver_description(&self) -> String {
        let api = match self.info.backend {
            wgpu::Backend::Vulkan => "Vulkan",
            wgpu::Backend::Metal => "Metal",
            wgpu::Backend::Dx12 => "DX12",
            other => other.to_str(),
        };
        let parts = [api, &self.info.driver, &self.info.driver_info];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
    }
}

fn unavailable_reason(adapter: &wgpu::Adapter) -> Option<String> {
    if !adapter.get_downlevel_capabilities().flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS) {
        return Some("it has no compute shaders".to_owned());
    }
    limits_reason(&adapter.limits())
}

/// Returns the reason why kernels cannot run within these limits, if any. WebGPU guarantees more than is needed.
fn limits_reason(limits: &wgpu::Limits) -> Option<String> {
    macro_rules! limits_below {
        ($($limit:ident: $needed:expr;)*) => {[$(
            (u64::from(limits.$limit) < u64::from($needed))
                .then(|| format!("`{}` is {}, and {} is needed", stringify!($limit), limits.$limit, $needed)),
        )*]};
    }
    let below = limits_below! {
        // Group 0 has the storage buffers, and group 1 the parameters.
        max_bind_groups: 2u32;
        max_bindings_per_bind_group: MAX_KERNEL_BUFFERS;
        max_storage_buffers_per_shader_stage: MAX_KERNEL_BUFFERS;
        max_uniform_buffers_per_shader_stage: 1u32;
        max_dynamic_uniform_buffers_per_pipeline_layout: 1u32;
        max_buffers_and_acceleration_structures_per_shader_stage: MAX_KERNEL_BUFFERS + 1;
        max_uniform_buffer_binding_size: MAX_PARAMS;
        max_compute_workgroup_size_x: WORKGROUP_SIZE;
        max_compute_workgroup_size_y: 1u32;
        max_compute_workgroup_size_z: 1u32;
        max_compute_invocations_per_workgroup: WORKGROUP_SIZE;
        max_compute_workgroup_storage_size: WORKGROUP_BYTES;
        max_compute_workgroups_per_dimension: MAX_WORKGROUPS;
        max_buffer_size: MAX_READBACK_BYTES;
        max_storage_buffer_binding_size: MAX_READBACK_BYTES;
    };
    let reasons = below.into_iter().flatten().collect::<Vec<_>>();
    (!reasons.is_empty()).then(|| format!("its limits are too low: {}", reasons.join("; ")))
}

/// Creates an instance, which `WGPU_BACKEND` may restrict.
pub(crate) fn create_instance() -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    descriptor.memory_budget_thresholds.for_resource_creation = Some(BUDGET_PERCENT);
    wgpu::Instance::new(descriptor)
}

fn list_candidates(instance: &wgpu::Instance) -> Vec<AdapterCandidate> {
    let backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    sort_candidates(platform::enumerate_adapters(instance, backends.with_env()))
}

/// Returns the adapters that `WGPU_ADAPTER_NAME` selects, in the order of their indices.
pub(crate) fn sort_candidates(adapters: Vec<wgpu::Adapter>) -> Vec<AdapterCandidate> {
    let requested_name = std::env::var("WGPU_ADAPTER_NAME").unwrap_or_default().to_lowercase();
    let mut candidates = adapters
        .into_iter()
        .map(AdapterCandidate::new)
        .filter(|candidate| candidate.info.name.to_lowercase().contains(&requested_name))
        .collect::<Vec<_>>();
    candidates.sort_by_key(AdapterCandidate::sort_key);
    candidates
}

/// See [`WgpuBackend::enumerate`].
pub(crate) fn enumerate() -> Vec<WgpuDeviceInfo> {
    let candidates = list_candidates(&create_instance());
    let describe = |(index, candidate): (usize, AdapterCandidate)| WgpuDeviceInfo {
        index,
        name: candidate.info.name.clone(),
        driver: candidate.driver_description(),
        software: candidate.is_software(),
        unavailable_reason: candidate.unavailable_reason,
    };
    candidates.into_iter().enumerate().map(describe).collect()
}

/// See [`WgpuBackend::new`].
pub(crate) fn open(index: usize) -> Result<WgpuBackend> {
    let instance = create_instance();
    let candidates = list_candidates(&instance);
    let candidate = usable_candidate(&instance, &candidates, index)?;
    finish_opening(open_probed(candidate, index)?, candidate.matrix_shapes())
}

/// Finds the limits of software drivers that no API reports, and tests the matrix units of these shapes.
fn finish_opening(mut backend: WgpuBackend, shapes: Result<Vec<MatrixShape>, String>) -> Result<WgpuBackend> {
    if backend.info_mut().software && !probe::runs_long_loops(&backend)? {
        backend.info_mut().limits.max_loop_iterations = probe::MESA_MAX_ITERATIONS;
    }
    let reason = match shapes {
        Ok(shapes) => probe_matrix_units(&mut backend, &shapes),
        Err(reason) => Some(reason),
    };
    describe_matrix_path(&mut backend, reason);
    Ok(backend)
}

/// Adds a description of how the device multiplies matrices; `reason` names the parts that it lacks, if any.
pub(crate) fn describe_matrix_path(backend: &mut WgpuBackend, reason: Option<String>) {
    let info = backend.info_mut();
    let operand_types = [(info.features.cooperative_f16, "f16"), (info.features.cooperative_bf16, "bf16")];
    let operand_types =
        operand_types.into_iter().filter_map(|(works, name)| works.then_some(name)).collect::<Vec<_>>();
    let mut path = match operand_types.as_slice() {
        [] => "matrix products: tiles of f32".to_owned(),
        types => {
            let side = info.features.cooperative_side;
            format!(
                "matrix products: matrix units ({side} x {side}) for {}, tiles of f32 for other types",
                types.join(", ")
            )
        }
    };
    if let Some(reason) = reason {
        path.push_str(&format!("; {reason}"));
    }
    info.paths.push(path);
}

/// See [`WgpuDeviceExt::from_wgpu`](crate::WgpuDeviceExt::from_wgpu).
pub(crate) fn share(
    adapter: &wgpu::Adapter,
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    extra_usages: wgpu::BufferUsages,
) -> Result<WgpuBackend> {
    let candidate = AdapterCandidate::new(adapter.clone());
    let limits = device.limits();
    let reason = candidate.unavailable_reason.clone().or_else(|| limits_reason(&limits));
    if let Some(reason) = reason {
        let name = &candidate.info.name;
        let reason = format!(
            "{name}: {reason}. Request the device with at least `wgpu::Limits::default()` as its `required_limits`, or \
             with the description of `wgpu_device_descriptor`"
        );
        return Err(Error::NoDevice { requested: "from_wgpu".into(), reason });
    }
    let enabled = device.features();
    let gpu = Gpu::shared(device.clone(), queue.clone());
    let mut backend = wrap_device(&candidate, 0, gpu, enabled, &limits);
    backend.set_extra_usages(extra_usages);
    // The types are tested on the device itself, because an adapter may open only one.
    let probes = probes_within(enabled);
    let mut features = backend.info_mut().features;
    if let Err(error) = probe::run_probes(&backend, &probes, &mut features) {
        log::warn!("{}: not all of its types work ({error}); trying one by one", candidate.info.name);
        for probe in probes {
            // A type that fails stays unused.
            let _ = probe::run_probes(&backend, &[probe], &mut features);
        }
    }
    backend.info_mut().features = features;
    let shapes = candidate.matrix_shapes().and_then(|shapes| match enabled.contains(MATRIX_FEATURES) {
        true => Ok(shapes),
        false => {
            Err("the program's device has no cooperative matrices: open it by `request_wgpu_device`"
                .to_owned())
        }
    });
    finish_opening(backend, shapes)
}

/// Tests the matrix units of each listed shape, until a type works in one, and sets the features of the types that
/// work. Returns the reasons why a type or a larger shape is not used.
fn probe_matrix_units(backend: &mut WgpuBackend, shapes: &[MatrixShape]) -> Option<String> {
    let mut reasons = Vec::new();
    if shapes.first().is_some_and(|shape| shape.side == 8) {
        reasons.push("the driver lists no 16 x 16 matrices that its subgroups can use".to_owned());
    }
    for &shape in shapes {
        let side = shape.side;
        let mut works = |operand| match probe::multiplies_matrices(backend, shape, operand) {
            Ok(true) => true,
            Ok(false) => {
                reasons.push(format!("matrix units compute {side} x {side} {operand} wrongly"));
                false
            }
            Err(error) => {
                reasons.push(format!("matrix units do not take {side} x {side} {operand}: {error}"));
                false
            }
        };
        let [f16, bf16] = [works(OperandType::F16), works(OperandType::Bf16)];
        if f16 || bf16 {
            let features = &mut backend.info_mut().features;
            (features.cooperative_f16, features.cooperative_bf16) = (f16, bf16);
            features.cooperative_side = side;
            break;
        }
    }
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

/// See [`offline::find_adapter`](crate::offline::find_adapter).
pub(crate) fn describe_offline(index: usize) -> Result<OfflineAdapter> {
    let instance = create_instance();
    let candidates = list_candidates(&instance);
    let candidate = usable_candidate(&instance, &candidates, index)?;
    let probes = probes_within(candidate.adapter.features());
    let descriptor = device_descriptor(candidate, probe_features(&probes));
    let (enabled, limits) = (descriptor.required_features, descriptor.required_limits);
    let mut info = describe_device(candidate, index, enabled, &limits);
    probes.iter().for_each(|probe| (probe.mark_supported)(&mut info.features));
    let max_immediate_bytes = immediate_bytes_within(enabled, &limits);
    Ok(OfflineAdapter { adapter: candidate.adapter.clone(), enabled, info, max_immediate_bytes })
}

/// Returns the probes of the types that these features contain.
pub(crate) fn probes_within(features: wgpu::Features) -> Vec<probe::TypeProbe> {
    probe::probes().into_iter().filter(|probe| features.contains(probe.feature)).collect()
}

/// Opens an adapter, and tests the types that its driver reports.
fn open_probed(candidate: &AdapterCandidate, index: usize) -> Result<WgpuBackend> {
    let probes = probes_within(candidate.adapter.features());
    let mut backend = request_device(candidate, index, probe_features(&probes))?;
    let mut features = backend.info_mut().features;
    let Err(error) = probe::run_probes(&backend, &probes, &mut features) else {
        backend.info_mut().features = features;
        return Ok(backend);
    };
    log::warn!("{}: not all of its types work ({error}); trying one by one", candidate.info.name);
    // Each type is tested on its own device, because a failing probe may lose its device.
    let mut working = wgpu::Features::empty();
    let mut features = Features { subgroups: features.subgroups, ..Features::default() };
    for probe in probes {
        let feature = probe.feature;
        let probe_device = request_device(candidate, index, feature)?;
        let mut tested = Features::default();
        if probe::run_probes(&probe_device, &[probe], &mut tested).is_ok() && tested != Features::default() {
            working |= feature;
            features = Features {
                f16: features.f16 | tested.f16,
                f64: features.f64 | tested.f64,
                i64: features.i64 | tested.i64,
                i16: features.i16 | tested.i16,
                ..features
            };
        }
    }
    let mut backend = request_device(candidate, index, working)?;
    backend.info_mut().features = features;
    Ok(backend)
}

/// Returns the adapter of an index, or the reason why there is none.
pub(crate) fn usable_candidate<'a>(
    instance: &wgpu::Instance,
    candidates: &'a [AdapterCandidate],
    index: usize,
) -> Result<&'a AdapterCandidate> {
    let refuse = |reason: String| Error::NoDevice { requested: format!("wgpu:{index}"), reason };
    let Some(candidate) = candidates.get(index) else {
        let reason = match candidates.len() {
            0 => describe_missing_device(instance),
            1 => format!("wgpu sees one device, wgpu:0 {}", candidates[0].info.name),
            count => format!("wgpu sees {count} devices, wgpu:0 to wgpu:{}", count - 1),
        };
        return Err(refuse(reason));
    };
    match &candidate.unavailable_reason {
        Some(reason) => Err(refuse(format!("{}: {reason}", candidate.info.name))),
        None => Ok(candidate),
    }
}

/// Returns the features that these types need.
pub(crate) fn probe_features(probes: &[probe::TypeProbe]) -> wgpu::Features {
    probes.iter().fold(wgpu::Features::empty(), |all, probe| all | probe.feature)
}

/// Describes a device with the features that need no probe, those of `probed`, and matrix units.
pub(crate) fn device_descriptor(
    candidate: &AdapterCandidate,
    probed: wgpu::Features,
) -> wgpu::DeviceDescriptor<'static> {
    let mut descriptor = portable_descriptor(&candidate.adapter, probed);
    if candidate.matrix_shapes().is_ok() {
        descriptor.required_features |= MATRIX_FEATURES;
    }
    // SAFETY: of the experimental features only cooperative matrices are requested; a probe tests them.
    descriptor.experimental_features = unsafe { wgpu::ExperimentalFeatures::enabled() };
    descriptor
}

/// Describes a device like [`device_descriptor`], without experimental features.
pub(crate) fn portable_descriptor(
    adapter: &wgpu::Adapter,
    probed: wgpu::Features,
) -> wgpu::DeviceDescriptor<'static> {
    let requested_features = wgpu::Features::SUBGROUP
        | wgpu::Features::SUBGROUP_BARRIER
        | wgpu::Features::SHADER_FLOAT32_ATOMIC
        | wgpu::Features::SHADER_INT64_ATOMIC_MIN_MAX
        | wgpu::Features::SHADER_INT64_ATOMIC_ALL_OPS
        | wgpu::Features::TIMESTAMP_QUERY
        | wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS
        | wgpu::Features::IMMEDIATES
        // `alloc_host` needs host memory that the device accesses in copies.
        | wgpu::Features::MAPPABLE_PRIMARY_BUFFERS;
    let mut features = adapter.features() & requested_features;
    if !probed.contains(wgpu::Features::SHADER_INT64) {
        features.remove(
            wgpu::Features::SHADER_INT64_ATOMIC_MIN_MAX | wgpu::Features::SHADER_INT64_ATOMIC_ALL_OPS,
        );
    }
    wgpu::DeviceDescriptor {
        label: Some("forebay"),
        required_features: features | probed,
        // The device gets all limits of the adapter: wgpu's defaults are 256 MiB and eight bindings.
        required_limits: adapter.limits(),
        memory_hints: wgpu::MemoryHints::Manual {
            suballocated_device_memory_block_size: SUBALLOCATION_BLOCK..SUBALLOCATION_BLOCK,
        },
        ..wgpu::DeviceDescriptor::default()
    }
}

/// Opens the device of a description with matrix units of bf16. `None` if the description or the driver has none.
pub(crate) fn request_with_bfloat16(
    candidate: &AdapterCandidate,
    descriptor: &wgpu::DeviceDescriptor<'_>,
) -> Option<(wgpu::Device, wgpu::Queue)> {
    let has_matrix_units = descriptor.required_features.contains(MATRIX_FEATURES);
    (has_matrix_units && vulkan::knows_bfloat16(&candidate.adapter))
        .then(|| vulkan::request_device_with_bfloat16(&candidate.adapter, descriptor))
        .flatten()
}

pub(crate) fn open_error(candidate: &AdapterCandidate, index: usize, message: &str) -> Error {
    Error::NoDevice {
        requested: format!("wgpu:{index}"),
        reason: format!("{} cannot be opened: {message}", candidate.info.name),
    }
}

/// Opens the device with the features that need no probe, and those of `probed`.
fn request_device(candidate: &AdapterCandidate, index: usize, probed: wgpu::Features) -> Result<WgpuBackend> {
    let descriptor = device_descriptor(candidate, probed);
    let (device, queue) = match request_with_bfloat16(candidate, &descriptor) {
        Some(opened) => opened,
        None => platform::request_device(&candidate.adapter, &descriptor)
            .map_err(|message| open_error(candidate, index, &message))?,
    };
    let (features, limits) = (descriptor.required_features, &descriptor.required_limits);
    Ok(wrap_device(candidate, index, Gpu::new(device, queue), features, limits))
}

/// Creates the backend of an opened device. The features of types are those that no probe tests.
pub(crate) fn wrap_device(
    candidate: &AdapterCandidate,
    index: usize,
    gpu: Gpu,
    features: wgpu::Features,
    limits: &wgpu::Limits,
) -> WgpuBackend {
    let info = describe_device(candidate, index, features, limits);
    let max_segment = limits.max_buffer_size.min(limits.max_storage_buffer_binding_size);
    let alignment = limits.min_storage_buffer_offset_alignment.max(ALIGNMENT);
    let source = SourceLimits {
        alignment: alignment.into(),
        max_segment: max_segment - max_segment % u64::from(alignment),
        virtual_memory: None,
    };
    let memory = DeviceMemory { total: vulkan::total_memory(&gpu.device), free: None };
    WgpuBackend::from_parts(gpu, info, source, memory)
}

/// Describes a device with these features and limits. The features of types are those that no probe tests.
fn describe_device(
    candidate: &AdapterCandidate,
    index: usize,
    features: wgpu::Features,
    limits: &wgpu::Limits,
) -> DeviceInfo {
    DeviceInfo {
        backend: "wgpu",
        index,
        name: candidate.info.name.clone(),
        driver: candidate.driver_description(),
        software: candidate.is_software(),
        features: Features { subgroups: features.contains(wgpu::Features::SUBGROUP), ..Features::default() },
        limits: launch_limits(limits, &candidate.info),
        // No API reports the rates.
        peak_rates: PeakRates::default(),
        paths: Vec::new(),
    }
}

fn launch_limits(limits: &wgpu::Limits, info: &wgpu::AdapterInfo) -> Limits {
    // One buffer of the stage holds the parameters.
    let buffers = limits.max_buffers_and_acceleration_structures_per_shader_stage.saturating_sub(1);
    Limits {
        max_binding_bytes: limits.max_storage_buffer_binding_size / 4 * 4,
        max_bindings: limits
            .max_storage_buffers_per_shader_stage
            .min(limits.max_bindings_per_bind_group)
            .min(buffers),
        max_workgroup_size: limits
            .max_compute_invocations_per_workgroup
            .min(limits.max_compute_workgroup_size_x),
        max_workgroup_memory: limits.max_compute_workgroup_storage_size,
        max_workgroups_per_dim: limits.max_compute_workgroups_per_dimension,
        subgroup_size: (info.subgroup_min_size, info.subgroup_max_size),
        max_params_bytes: u32::try_from(limits.max_uniform_buffer_binding_size)
            .unwrap_or(u32::MAX)
            .min(MAX_PARAMS),
        // For software renderers, a probe kernel finds the limit.
        max_loop_iterations: u32::MAX,
    }
}

/// Explains why [`enumerate`] finds no device, and how to fix that.
pub(crate) fn no_device_reason() -> String {
    describe_missing_device(&create_instance())
}

/// Explains why wgpu finds no adapter, and how to fix that.
fn describe_missing_device(instance: &wgpu::Instance) -> String {
    for filter in ["WGPU_ADAPTER_NAME", "WGPU_BACKEND", "VK_DRIVER_FILES", "VK_ICD_FILENAMES"] {
        if let Ok(value) = std::env::var(filter) {
            return format!("wgpu sees nothing with {filter}={value}; unset it, or correct it");
        }
    }
    missing_driver_message(instance).to_owned()
}

#[cfg(all(unix, not(target_vendor = "apple")))]
fn missing_driver_message(instance: &wgpu::Instance) -> &'static str {
    if vulkan::has_loader(instance) {
        "no Vulkan driver: install mesa-vulkan-drivers (Debian, Ubuntu) or the card's own driver, or run `cargo xtask \
         devices`"
    } else {
        "no Vulkan (libvulkan.so.1): install libvulkan1 and mesa-vulkan-drivers (Debian, Ubuntu), or run `cargo xtask \
         devices`"
    }
}

#[cfg(target_family = "wasm")]
fn missing_driver_message(_instance: &wgpu::Instance) -> &'static str {
    "the browser offers no WebGPU adapter; or the page asked without waiting: await `Device::open_async`"
}

#[cfg(not(any(target_family = "wasm", all(unix, not(target_vendor = "apple")))))]
fn missing_driver_message(_instance: &wgpu::Instance) -> &'static str {
    "no graphics driver with compute shaders: update the driver of the graphics card"
}

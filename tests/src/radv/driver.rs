//! Vulkan compute pipelines on a device that wgpu cannot open.
//!
//! RADV's null device has neither fences nor timeline semaphores, which wgpu requires. Compilation needs none, so this
//! module creates a device of its own from wgpu's adapter. Its extensions and features are those that wgpu enables. The
//! SPIR-V is written with the options of wgpu's Vulkan backend, so the driver compiles the same code.

use std::ffi::{CStr, CString};

use anyhow::{Context, Result, bail};
use ash::{khr, vk};
use forebay_wgpu::offline::OfflineAdapter;
use forebay_wgpu::wgpu;
use naga::back::spv::{self, Capability};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::ModuleInfo;
use naga::{AddressSpace, Module, ResourceBinding, ShaderStage};

use super::SUBGROUP_SIZE;

/// A device that only compiles.
pub(super) struct CompileDevice {
    device: ash::Device,
    executables: khr::pipeline_executable_properties::Device,
    has_subgroups: bool,
    options: spv::Options<'static>,
    /// Keeps the instance alive, which the device needs.
    _adapter: wgpu::Adapter,
}

/// Layout of a kernel's resources.
#[derive(Default)]
struct ResourceLayout {
    storage: Vec<u32>,
    has_uniform: bool,
    immediate_bytes: u32,
}

impl CompileDevice {
    /// Creates a device with the features that the backend requests.
    ///
    /// # Errors
    /// The adapter is not of Vulkan, or its driver refuses the device or has no statistics of pipelines.
    pub(super) fn open(offline: OfflineAdapter) -> Result<Self> {
        let OfflineAdapter { adapter, enabled, .. } = offline;
        let (device, executables, options) = {
            // SAFETY: the guard ends before the adapter; the handles in it are used, not destroyed.
            let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() };
            let hal = hal.context("the adapter is not one of Vulkan")?;
            if !hal
                .physical_device_capabilities()
                .supports_extension(khr::pipeline_executable_properties::NAME)
            {
                bail!("the driver has no statistics of pipelines (VK_KHR_pipeline_executable_properties)");
            }
            let mut extensions = hal.required_device_extensions(enabled);
            let mut features = hal.physical_device_features(&extensions, enabled);
            extensions.push(khr::pipeline_executable_properties::NAME);
            let names: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
            let queues = [vk::DeviceQueueCreateInfo::default().queue_priorities(&[1.0])];
            let mut statistics = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default()
                .pipeline_executable_info(true);
            let create_info =
                vk::DeviceCreateInfo::default().queue_create_infos(&queues).enabled_extension_names(&names);
            let create_info = features.add_to_device_create(create_info).push_next(&mut statistics);
            let instance = hal.shared_instance().raw_instance();
            let physical = hal.raw_physical_device();
            // SAFETY: the physical device is of this instance. wgpu chose extensions and features among those that
            // the driver reports, and everything that `create_info` points to outlives the call.
            let device = unsafe { instance.create_device(physical, &create_info, None) }
                .context("the driver refuses the device")?;
            let executables = khr::pipeline_executable_properties::Device::new(instance, &device);
            (device, executables, spirv_options(instance, physical, enabled))
        };
        let has_subgroups = enabled.contains(wgpu::Features::SUBGROUP);
        Ok(Self { device, executables, has_subgroups, options, _adapter: adapter })
    }

    /// Compiles a kernel, and returns the driver's statistics.
    ///
    /// # Errors
    /// naga does not write the kernel with the device's capabilities, or the driver refuses it.
    pub(super) fn compile(
        &self,
        module: &Module,
        info: &ModuleInfo,
        entry_point: &str,
        zero_workgroup_memory: bool,
    ) -> Result<Vec<(String, u64)>, String> {
        let layout = ResourceLayout::of(module);
        let mut options = self.options.clone();
        options.binding_map = layout.binding_map();
        if !zero_workgroup_memory {
            options.zero_initialize_workgroup_memory = spv::ZeroInitializeWorkgroupMemoryMode::None;
        }
        let pipeline =
            spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: entry_point.to_owned() };
        let words =
            spv::write_vec(module, info, &options, Some(&pipeline)).map_err(|error| error.to_string())?;
        let name = CString::new(entry_point).map_err(|error| error.to_string())?;
        // SAFETY: naga wrote the words from a validated module, and `layout` has all of its resources.
        unsafe { self.create_pipeline(&words, &name, &layout) }
            .map_err(|result| format!("the driver refuses the kernel: {result}"))
    }

    /// Creates a pipeline, reads its statistics, and destroys everything again.
    ///
    /// # Safety
    /// `words` is valid SPIR-V for this device with the entry point `name`, and uses only resources of `layout`.
    unsafe fn create_pipeline(
        &self,
        words: &[u32],
        name: &CStr,
        layout: &ResourceLayout,
    ) -> Result<Vec<(String, u64)>, vk::Result> {
        let device = &self.device;
        let binding = |number: u32, kind| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(number)
                .descriptor_type(kind)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        };
        let storage: Vec<_> = layout
            .storage
            .iter()
            .map(|&number| binding(number, vk::DescriptorType::STORAGE_BUFFER))
            .collect();
        let uniform = [binding(0, vk::DescriptorType::UNIFORM_BUFFER_DYNAMIC)];
        let groups = if layout.has_uniform { &[&storage[..], &uniform[..]][..] } else { &[&storage[..]] };
        let ranges = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::ALL)
            .size(layout.immediate_bytes)];
        let ranges = if layout.immediate_bytes > 0 { &ranges[..] } else { &[] };
        let mut flags = vk::PipelineShaderStageCreateFlags::empty();
        if self.has_subgroups {
            flags |= vk::PipelineShaderStageCreateFlags::ALLOW_VARYING_SUBGROUP_SIZE;
        }

        let mut sets = Vec::new();
        let mut pipeline_layout = vk::PipelineLayout::null();
        let mut shader = vk::ShaderModule::null();
        let mut pipelines = Vec::new();
        let mut create = || {
            for bindings in groups {
                let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(bindings);
                // SAFETY: `info` and its bindings outlive the call.
                sets.push(unsafe { device.create_descriptor_set_layout(&info, None) }?);
            }
            let info =
                vk::PipelineLayoutCreateInfo::default().set_layouts(&sets).push_constant_ranges(ranges);
            // SAFETY: the layouts of the sets are of this device.
            pipeline_layout = unsafe { device.create_pipeline_layout(&info, None) }?;
            let info = vk::ShaderModuleCreateInfo::default().code(words);
            // SAFETY: the caller guarantees that the words are valid.
            shader = unsafe { device.create_shader_module(&info, None) }?;
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .flags(flags)
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(shader)
                .name(name);
            let info = vk::ComputePipelineCreateInfo::default()
                .flags(vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR)
                .layout(pipeline_layout)
                .stage(stage);
            // SAFETY: the caller guarantees that the layout fits the shader; all handles are of this device.
            let created =
                unsafe { device.create_compute_pipelines(vk::PipelineCache::null(), &[info], None) };
            let (created, result) = match created {
                Ok(created) => (created, Ok(())),
                Err((created, error)) => (created, Err(error)),
            };
            pipelines = created;
            result?;
            let pipeline = pipelines.first().copied().unwrap_or_default();
            // A compute pipeline has one executable.
            let info = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
            // SAFETY: the pipeline was created with the flag for statistics.
            let statistics = unsafe { self.executables.get_pipeline_executable_statistics(&info) }?;
            let info = vk::PipelineInfoKHR::default().pipeline(pipeline);
            // SAFETY: as above.
            let properties = unsafe { self.executables.get_pipeline_executable_properties(&info) }?;
            let subgroup =
                properties.iter().map(|found| (SUBGROUP_SIZE.to_owned(), found.subgroup_size.into()));
            Ok(statistics.iter().filter_map(read_statistic).chain(subgroup).collect())
        };
        let result = create();
        // SAFETY: the handles are null or were created above, and nothing uses them.
        unsafe {
            pipelines.into_iter().for_each(|pipeline| device.destroy_pipeline(pipeline, None));
            device.destroy_shader_module(shader, None);
            device.destroy_pipeline_layout(pipeline_layout, None);
            sets.into_iter().for_each(|set| device.destroy_descriptor_set_layout(set, None));
        }
        result
    }
}

impl Drop for CompileDevice {
    fn drop(&mut self) {
        // SAFETY: `compile` destroys all objects of the device, and the adapter still keeps the instance alive.
        unsafe { self.device.destroy_device(None) };
    }
}

impl ResourceLayout {
    fn of(module: &Module) -> Self {
        let mut layout = Self::default();
        for (_, variable) in module.global_variables.iter() {
            match (variable.space, variable.binding) {
                (AddressSpace::Storage { .. }, Some(binding)) => layout.storage.push(binding.binding),
                (AddressSpace::Uniform, _) => layout.has_uniform = true,
                (AddressSpace::Immediate, _) => {
                    layout.immediate_bytes = module.types[variable.ty].inner.size(module.to_ctx());
                }
                _ => {}
            }
        }
        layout.storage.sort_unstable();
        // Two variables may have one binding.
        layout.storage.dedup();
        layout
    }

    fn binding_map(&self) -> spv::BindingMap {
        let storage = self.storage.iter().map(|&binding| (0, binding));
        let uniform = self.has_uniform.then_some((1, 0));
        let place = |(group, binding)| {
            let info = spv::BindingInfo { descriptor_set: group, binding, binding_array_size: None };
            (ResourceBinding { group, binding }, info)
        };
        storage.chain(uniform).map(place).collect()
    }
}

/// Returns the options with which wgpu writes trusted modules for a device with these features.
fn spirv_options(
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    enabled: wgpu::Features,
) -> spv::Options<'static> {
    let mut small_types = vk::PhysicalDeviceShaderFloat16Int8Features::default();
    let mut zero_memory = vk::PhysicalDeviceZeroInitializeWorkgroupMemoryFeatures::default();
    let mut dot_product = vk::PhysicalDeviceShaderIntegerDotProductFeatures::default();
    let mut features = vk::PhysicalDeviceFeatures2::default()
        .push_next(&mut small_types)
        .push_next(&mut zero_memory)
        .push_next(&mut dot_product);
    // SAFETY: the physical device is of this instance. A driver leaves structures alone that it does not know.
    unsafe { instance.get_physical_device_features2(physical, &mut features) };
    // SAFETY: as above.
    let version = unsafe { instance.get_physical_device_properties(physical) }.api_version;
    let capability_sets: [(bool, &[Capability]); 8] = [
        (true, &[Capability::Shader, Capability::Matrix]),
        (
            enabled.contains(wgpu::Features::SUBGROUP),
            &[
                Capability::GroupNonUniform,
                Capability::GroupNonUniformVote,
                Capability::GroupNonUniformArithmetic,
                Capability::GroupNonUniformBallot,
                Capability::GroupNonUniformShuffle,
                Capability::GroupNonUniformShuffleRelative,
                Capability::GroupNonUniformQuad,
            ],
        ),
        (enabled.contains(wgpu::Features::SHADER_INT64), &[Capability::Int64]),
        (enabled.contains(wgpu::Features::SHADER_F16), &[Capability::Float16]),
        (enabled.contains(wgpu::Features::SHADER_I16), &[Capability::Int16]),
        (enabled.contains(wgpu::Features::SHADER_FLOAT32_ATOMIC), &[Capability::AtomicFloat32AddEXT]),
        (small_types.shader_int8 != 0, &[Capability::Int8]),
        (
            dot_product.shader_integer_dot_product != 0,
            &[
                Capability::DotProductInputAllKHR,
                Capability::DotProductInput4x8BitKHR,
                Capability::DotProductInput4x8BitPackedKHR,
                Capability::DotProductKHR,
            ],
        ),
    ];
    let atomics = wgpu::Features::SHADER_INT64_ATOMIC_ALL_OPS | wgpu::Features::SHADER_INT64_ATOMIC_MIN_MAX;
    let atomics = enabled.intersects(atomics).then_some(Capability::Int64Atomics);
    let known = capability_sets.into_iter().filter(|(is_known, _)| *is_known);
    let unchecked = BoundsCheckPolicy::Unchecked;
    spv::Options {
        lang_version: match (vk::api_version_major(version), vk::api_version_minor(version)) {
            (1, 0) => (1, 0),
            (1, 1) => (1, 3),
            (1, 2) => (1, 5),
            _ => (1, 6),
        },
        flags: spv::WriterFlags::LABEL_VARYINGS | spv::WriterFlags::FORCE_POINT_SIZE,
        fake_missing_bindings: false,
        capabilities: Some(known.flat_map(|(_, set)| set.iter().copied()).chain(atomics).collect()),
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: match zero_memory.shader_zero_initialize_workgroup_memory {
            0 => spv::ZeroInitializeWorkgroupMemoryMode::Polyfill,
            _ => spv::ZeroInitializeWorkgroupMemoryMode::Native,
        },
        force_loop_bounding: false,
        use_storage_input_output_16: false,
        ..spv::Options::default()
    }
}

/// Returns the name and the value of a statistic that is an unsigned number.
fn read_statistic(statistic: &vk::PipelineExecutableStatisticKHR<'_>) -> Option<(String, u64)> {
    let name = statistic.name_as_c_str().ok()?.to_str().ok()?.to_owned();
    match statistic.format {
        // SAFETY: the format says which member of the union the driver wrote.
        vk::PipelineExecutableStatisticFormatKHR::UINT64 => Some((name, unsafe { statistic.value.u64 })),
        _ => None,
    }
}

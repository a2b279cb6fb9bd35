//! Bind groups and their layouts. Groups are cached, because training steps bind the same slices repeatedly.

use std::sync::Mutex;

use forebay_core::backend::{SegmentId, Slice, SourceError};
use forebay_core::sync::LockUnpoisoned;
use rustc_hash::FxHashMap;

use crate::gpu::{Gpu, to_single_line};
use crate::kernel::ParamSpace;
use crate::params::MAX_PARAMS;

/// Maximum number of groups in the young generation; the cache holds at most twice as many.
const MAX_YOUNG_GROUPS: usize = 2048;

/// The layouts of all kernels, by number of storage buffers and address space of the parameters.
#[derive(Debug)]
pub(crate) struct BindLayouts {
    pub(crate) params: wgpu::BindGroupLayout,
    storage: Mutex<FxHashMap<u32, wgpu::BindGroupLayout>>,
    pipeline: Mutex<FxHashMap<(u32, ParamSpace), wgpu::PipelineLayout>>,
}

impl BindLayouts {
    pub(crate) fn new(device: &wgpu::Device) -> Self {
        let params = wgpu::BindGroupLayoutEntry {
            binding: 0,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Uniform,
                has_dynamic_offset: true,
                min_binding_size: wgpu::BufferSize::new(MAX_PARAMS.into()),
            },
            count: None,
        };
        let params = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some("forebay parameters"),
            entries: &[params],
        });
        Self { params, storage: Mutex::default(), pipeline: Mutex::default() }
    }

    /// Returns the layout of `count` storage buffers, all of them read_write.
    pub(crate) fn storage(&self, device: &wgpu::Device, count: u32) -> wgpu::BindGroupLayout {
        let make = || {
            let entries = (0..count).map(|binding| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: false },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            });
            device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: Some("forebay storage"),
                entries: &entries.collect::<Vec<_>>(),
            })
        };
        self.storage.lock_unpoisoned().entry(count).or_insert_with(make).clone()
    }

    /// Returns the layout of a kernel with `count` storage buffers.
    pub(crate) fn pipeline(
        &self,
        device: &wgpu::Device,
        count: u32,
        params: ParamSpace,
    ) -> wgpu::PipelineLayout {
        let make = || {
            let storage = self.storage(device, count);
            let groups = [Some(&storage), Some(&self.params)];
            device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some("forebay"),
                bind_group_layouts: if params == ParamSpace::Uniform { &groups } else { &groups[..1] },
                immediate_size: if let ParamSpace::Immediate(bytes) = params { bytes } else { 0 },
            })
        };
        self.pipeline.lock_unpoisoned().entry((count, params)).or_insert_with(make).clone()
    }
}

/// Key of a group: segment, offset and bytes of each slice.
type BindKey = [[u64; 3]];

/// Cache of bind groups with two generations, which drops unused groups without bookkeeping on every hit.
#[derive(Debug, Default)]
pub(crate) struct BindGroupCache {
    young: FxHashMap<Box<BindKey>, wgpu::BindGroup>,
    old: FxHashMap<Box<BindKey>, wgpu::BindGroup>,
    key: Vec<[u64; 3]>,
}

impl BindGroupCache {
    /// Returns the group that binds `slices`, cached or new; `buffers` looks segments up.
    pub(crate) fn get_or_create(
        &mut self,
        gpu: &Gpu,
        layouts: &BindLayouts,
        slices: &[Slice],
        buffers: impl Fn(&Slice) -> Result<wgpu::Buffer, SourceError>,
    ) -> Result<wgpu::BindGroup, SourceError> {
        self.key.clear();
        self.key.extend(slices.iter().map(|slice| [slice.segment.0, slice.offset, slice.bytes]));
        if let Some(group) = self.young.get(self.key.as_slice()) {
            return Ok(group.clone());
        }
        let group = match self.old.remove(self.key.as_slice()) {
            Some(group) => group,
            None => Self::create(gpu, layouts, slices, buffers)?,
        };
        if self.young.len() >= MAX_YOUNG_GROUPS {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(self.key.as_slice().into(), group.clone());
        Ok(group)
    }

    fn create(
        gpu: &Gpu,
        layouts: &BindLayouts,
        slices: &[Slice],
        buffers: impl Fn(&Slice) -> Result<wgpu::Buffer, SourceError>,
    ) -> Result<wgpu::BindGroup, SourceError> {
        let refused = |detail| SourceError::Driver { call: "create_bind_group", detail };
        if slices.iter().any(|slice| slice.bytes == 0) {
            // wgpu interprets zero bytes as the rest of the buffer.
            return Err(refused("a slice is empty".to_owned()));
        }
        let buffers = slices.iter().map(buffers).collect::<Result<Vec<_>, _>>()?;
        let entries = slices.iter().zip(&buffers).enumerate().map(|(binding, (slice, buffer))| {
            let size = wgpu::BufferSize::new(slice.bytes);
            let resource =
                wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset: slice.offset, size });
            wgpu::BindGroupEntry { binding: binding as u32, resource }
        });
        let layout = layouts.storage(&gpu.device, slices.len() as u32);
        let entries = entries.collect::<Vec<_>>();
        let descriptor =
            wgpu::BindGroupDescriptor { label: Some("forebay storage"), layout: &layout, entries: &entries };
        gpu.with_error_scopes(|| gpu.device.create_bind_group(&descriptor))
            .map_err(|error| refused(to_single_line(&error)))
    }

    /// Drops the groups over a segment that is about to be freed.
    pub(crate) fn remove_segment(&mut self, segment: SegmentId) {
        for groups in [&mut self.young, &mut self.old] {
            groups.retain(|key, _| key.iter().all(|[bound, ..]| *bound != segment.0));
        }
    }

    #[cfg(test)]
    pub(crate) fn group_count(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

//! Launch parameters that are too large for immediates: a ring of uniform buffers, filled on the host and
//! uploaded once per submission.

use forebay_core::backend::SourceError;

use crate::gpu::Gpu;

/// Maximum bytes of parameters of one launch.
pub(crate) const MAX_PARAMS: u32 = 4096;
/// Bytes of parameters in one submission: 256 launches with the largest alignment.
const PAGE_BYTES: usize = 64 * 1024;

/// One uniform buffer, in use by one submission at a time.
#[derive(Debug)]
pub(crate) struct ParamPage {
    buffer: wgpu::Buffer,
    group: wgpu::BindGroup,
}

/// The parameters recorded since the last submission, and the free pages.
#[derive(Debug)]
pub(crate) struct ParamRing {
    layout: wgpu::BindGroupLayout,
    align: usize,
    bytes: Vec<u8>,
    page: Option<ParamPage>,
    free: Vec<ParamPage>,
}

impl ParamRing {
    /// Creates a ring; `layout` has one uniform buffer with a dynamic offset.
    pub(crate) fn new(layout: wgpu::BindGroupLayout, align: u32) -> Self {
        let align = align.max(16) as usize;
        Self { layout, align, bytes: Vec::with_capacity(PAGE_BYTES), page: None, free: Vec::new() }
    }

    /// Reports whether `len` more bytes fit into this submission.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.bytes.len() + len <= PAGE_BYTES
    }

    /// Adds one launch's parameters; returns the bind group and the dynamic offset.
    pub(crate) fn push(&mut self, gpu: &Gpu, params: &[u8]) -> Result<(&wgpu::BindGroup, u32), SourceError> {
        let page = match &mut self.page {
            Some(page) => page,
            none => {
                let page = match self.free.pop() {
                    Some(page) => page,
                    None => ParamPage::new(gpu, &self.layout)?,
                };
                none.insert(page)
            }
        };
        let offset = self.bytes.len();
        self.bytes.extend_from_slice(params);
        self.bytes.resize((offset + params.len()).next_multiple_of(self.align), 0);
        Ok((&page.group, offset as u32))
    }

    /// Takes the page of the commands about to be submitted, with the bytes that it must hold.
    pub(crate) fn take_page(&mut self) -> Option<(ParamPage, &[u8])> {
        Some((self.page.take()?, &self.bytes))
    }

    /// Forgets the recorded bytes, after their upload was recorded.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
    }

    /// Returns a page to the ring after the device has passed it.
    pub(crate) fn recycle(&mut self, page: ParamPage) {
        self.free.push(page);
    }
}

impl ParamPage {
    pub(crate) fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    fn new(gpu: &Gpu, layout: &wgpu::BindGroupLayout) -> Result<Self, SourceError> {
        // The binding of the last launch extends MAX_PARAMS bytes beyond its offset.
        let bytes = PAGE_BYTES as u64 + u64::from(MAX_PARAMS);
        let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
        let buffer = gpu.create_buffer("forebay parameters", bytes, usage, false)?;
        let window = wgpu::BufferBinding {
            buffer: &buffer,
            offset: 0,
            size: wgpu::BufferSize::new(MAX_PARAMS.into()),
        };
        let descriptor = wgpu::BindGroupDescriptor {
            label: Some("forebay parameters"),
            layout,
            entries: &[wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(window) }],
        };
        let group = gpu.with_error_scopes(|| gpu.device.create_bind_group(&descriptor)).map_err(|error| {
            SourceError::Driver { call: "create_bind_group", detail: crate::gpu::to_single_line(&error) }
        })?;
        Ok(Self { buffer, group })
    }
}

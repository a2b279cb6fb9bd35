//! The backend: segments, fences and the other calls of the core's traits, implemented over the recorder.
//!
//! `prepare_command` turns each command of the core into a `PreparedCommand`, which is recorded at once, or after
//! its kernel is compiled.

use std::collections::VecDeque;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use forebay_core::backend::{
    Backend, Command, CommandSequence, DeviceInfo, DeviceMemory, Fence, KernelContent, KernelId,
    KernelSource, Launch, PeerCopy, PendingDownload, SegmentId, SegmentSource, Slice, SourceError,
    SourceLimits, TimestampId,
};
use forebay_core::environment;
use forebay_core::error::{Error, Result};
use forebay_core::platform::CAN_BLOCK;
use forebay_core::sync::{LockUnpoisoned, RwLockUnpoisoned};
use rustc_hash::FxHashMap;

use crate::adapter::{self, WgpuDeviceInfo};
use crate::aliasing::{self, ScratchSegments};
use crate::bind_groups::{BindGroupCache, BindLayouts};
use crate::copy_fill::{CopyFillKernels, CopyFillLaunch, SizedSegment};
use crate::gpu::Gpu;
use crate::kernel::{self, KernelPipeline, ParamSpace};
use crate::params::ParamRing;
use crate::platform;
use crate::prepared::{PreparedCommand, PreparedCommands};
use crate::recorder::{CommandRecorder, Dispatch};
use crate::staging::{MAX_READBACK_BYTES, ReadbackPool};
use crate::timestamps::Timestamps;

/// Minimum bytes of a zero fill that uses the driver's clear command, which ends a pass; smaller fills use a
/// kernel.
const MIN_CLEAR_BYTES: u64 = 1 << 16;

/// Bytes that are bound to check a buffer of the program.
const BINDING_CHECK_BYTES: u64 = 16;

pub(crate) const SEGMENT_USAGES: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC).union(wgpu::BufferUsages::COPY_DST);

/// A device opened through wgpu.
#[derive(Debug)]
pub struct WgpuBackend {
    gpu: Arc<Gpu>,
    info: DeviceInfo,
    source_limits: SourceLimits,
    memory: DeviceMemory,
    layouts: BindLayouts,
    /// Segments by id. Ids are never reused, so a stale id is an error and cannot refer to another buffer.
    segments: RwLock<FxHashMap<u64, wgpu::Buffer>>,
    /// Ranges of the tensors over each buffer of the program, by segment.
    external: Mutex<FxHashMap<u64, Vec<Range<u64>>>>,
    /// Usages of segments that the program's commands need.
    extra_usages: wgpu::BufferUsages,
    next_segment: AtomicU64,
    kernels: RwLock<Vec<Arc<KernelPipeline>>>,
    /// Kernels by content, because several devices may share this backend.
    ids_by_content: Mutex<FxHashMap<KernelContent, KernelId>>,
    copy_fill: CopyFillKernels,
    readbacks: Arc<ReadbackPool>,
    scratch: ScratchSegments,
    timestamps: Timestamps,
    /// The last submission that the device has passed.
    completed: Arc<AtomicU64>,
    state: Arc<Mutex<QueueState>>,
}

/// Reason why a buffer of the program does not become a tensor.
pub(crate) enum RefusedBuffer {
    /// wgpu refuses the buffer: it is another device's, or was destroyed.
    Unusable(String),
    /// The buffer is a segment of the pool.
    HoldsTensors,
    /// A tensor lies over these bytes.
    Overlaps(Range<u64>),
}

/// Copy or fill in the form that wgpu takes.
enum CopyFill {
    Kernel(CopyFillLaunch),
    Command(PreparedCommand),
}

/// Recorded commands, and commands that cannot be recorded yet.
#[derive(Debug)]
pub(crate) struct QueueState {
    recorder: CommandRecorder,
    /// Commands that wait for a kernel that is still being compiled, and all later commands, in order.
    deferred: VecDeque<PreparedCommand>,
    bind_groups: BindGroupCache,
}

impl QueueState {
    /// Returns the recorder, with all commands in it. Waits for kernels that are still being compiled.
    pub(crate) fn drained_recorder(&mut self) -> Result<&mut CommandRecorder, SourceError> {
        self.drain_deferred(true)?;
        Ok(&mut self.recorder)
    }

    /// Submits all commands. Waits for kernels that are still being compiled.
    fn submit(&mut self) -> Result<Fence, SourceError> {
        self.drained_recorder()?.submit()
    }

    /// Records a command, after all deferred ones.
    fn record_or_defer(&mut self, command: PreparedCommand) -> Result<(), SourceError> {
        self.deferred.push_back(command);
        self.drain_deferred(false)
    }

    /// Records deferred commands in order: all of them if `wait` is true, else up to the first whose kernel is
    /// still being compiled. A command is dropped if its kernel does not compile or the driver refuses it. The caller
    /// gets the error, and the device stays usable.
    fn drain_deferred(&mut self, wait: bool) -> Result<(), SourceError> {
        while let Some(command) = self.deferred.front() {
            if !wait && !command.is_compiled() {
                break;
            }
            if let Some(command) = self.deferred.pop_front() {
                command.record(&mut self.recorder)?;
            }
        }
        Ok(())
    }
}

impl WgpuBackend {
    /// Lists wgpu's devices, in the order of [`open`](Self::open): discrete cards, integrated, virtual,
    /// software; unusable ones last.
    ///
    /// `WGPU_BACKEND` (`vulkan`, `metal`, `dx12`) and `WGPU_ADAPTER_NAME` (part of a name) restrict the list.
    pub fn enumerate() -> Vec<WgpuDeviceInfo> {
        adapter::enumerate()
    }

    /// Explains why [`enumerate`](Self::enumerate) finds no device, and how to fix that.
    pub fn no_device_reason() -> String {
        adapter::no_device_reason()
    }

    /// Opens a device of [`enumerate`](Self::enumerate).
    pub fn open(index: usize) -> Result<Arc<dyn Backend>> {
        environment::read_switch(kernel::BOUNDS_CHECKS)?;
        environment::read_switch(adapter::MATRIX_UNITS)?;
        Ok(Arc::new(Self::new(index)?))
    }

    /// Opens a device like [`open`](Self::open), and calls `done` with it: at once, or later in a browser page.
    pub fn open_then(index: usize, done: impl FnOnce(Result<Arc<dyn Backend>>) + Send + 'static) {
        platform::open_then(index, done);
    }

    /// Opens a device like [`open`](Self::open), but returns the concrete type.
    pub fn new(index: usize) -> Result<Self> {
        adapter::open(index)
    }

    /// Returns the bytes of driver memory that wgpu holds, including staging; `None` if wgpu does not report
    /// them.
    pub fn driver_bytes(&self) -> Option<u64> {
        self.gpu.device.generate_allocator_report().map(|report| report.total_reserved_bytes)
    }

    pub(crate) fn from_parts(gpu: Gpu, info: DeviceInfo, source: SourceLimits, memory: DeviceMemory) -> Self {
        let gpu = Arc::new(gpu);
        let layouts = BindLayouts::new(&gpu.device);
        let completed = Arc::new(AtomicU64::new(0));
        let align = gpu.device.limits().min_uniform_buffer_offset_alignment;
        let params = ParamRing::new(layouts.params.clone(), align);
        let recorder = CommandRecorder::new(Arc::clone(&gpu), params, Arc::clone(&completed));
        Self {
            gpu,
            info,
            source_limits: source,
            memory,
            layouts,
            segments: RwLock::default(),
            external: Mutex::default(),
            extra_usages: wgpu::BufferUsages::empty(),
            next_segment: AtomicU64::new(1),
            kernels: RwLock::default(),
            ids_by_content: Mutex::default(),
            copy_fill: CopyFillKernels::default(),
            readbacks: Arc::default(),
            scratch: ScratchSegments::default(),
            timestamps: Timestamps::default(),
            completed,
            state: Arc::new(Mutex::new(QueueState {
                recorder,
                deferred: VecDeque::new(),
                bind_groups: BindGroupCache::default(),
            })),
        }
    }

    /// Adds usages to the buffers of segments.
    pub(crate) fn set_extra_usages(&mut self, usages: wgpu::BufferUsages) {
        self.extra_usages = usages;
    }

    /// Returns the device.
    #[must_use]
    pub fn wgpu_device(&self) -> &wgpu::Device {
        &self.gpu.device
    }

    /// Returns the queue that the backend submits to.
    #[must_use]
    pub fn wgpu_queue(&self) -> &wgpu::Queue {
        &self.gpu.queue
    }

    /// Reports whether the device is the program's.
    pub(crate) fn is_shared(&self) -> bool {
        self.gpu.is_shared
    }

    pub(crate) fn buffer(&self, segment: SegmentId) -> Result<wgpu::Buffer> {
        Ok(self.segment(segment)?)
    }

    /// Makes a buffer of the program a segment, until a matching [`release_buffer`](Self::release_buffer). A
    /// buffer has one segment, because copies within a buffer differ from copies between buffers.
    ///
    /// The runtime orders operations and counts writes by tensor, so two tensors must not share bytes.
    pub(crate) fn adopt_buffer(
        &self,
        buffer: &wgpu::Buffer,
        range: Range<u64>,
    ) -> Result<SegmentId, RefusedBuffer> {
        let mut external = self.external.lock_unpoisoned();
        let existing = {
            let segments = self.segments.read_unpoisoned();
            segments.iter().find(|(_, existing)| *existing == buffer).map(|(&id, _)| id)
        };
        let segment = match existing {
            Some(id) if external.contains_key(&id) => SegmentId(id),
            Some(_) => return Err(RefusedBuffer::HoldsTensors),
            None => {
                self.check_buffer(buffer).map_err(RefusedBuffer::Unusable)?;
                self.register_buffer(buffer.clone())
            }
        };
        let ranges = external.entry(segment.0).or_default();
        match ranges.iter().find(|used| used.start.max(range.start) < used.end.min(range.end)) {
            Some(used) => Err(RefusedBuffer::Overlaps(used.clone())),
            None => {
                ranges.push(range);
                Ok(segment)
            }
        }
    }

    /// Checks that commands of this device can bind a buffer of the program. A bind group costs less than an operation
    /// that fails, which would take its whole submission with it.
    fn check_buffer(&self, buffer: &wgpu::Buffer) -> Result<(), String> {
        let Some(size) = wgpu::BufferSize::new(buffer.size().min(BINDING_CHECK_BYTES)) else {
            return Err("it has no bytes".to_owned());
        };
        let layout = self.layouts.storage(&self.gpu.device, 1);
        let binding = wgpu::BufferBinding { buffer, offset: 0, size: Some(size) };
        let resource = wgpu::BindingResource::Buffer(binding);
        let entries = [wgpu::BindGroupEntry { binding: 0, resource }];
        let descriptor =
            wgpu::BindGroupDescriptor { label: Some("forebay check"), layout: &layout, entries: &entries };
        self.gpu.create_checked(|| self.gpu.device.create_bind_group(&descriptor)).map(drop)
    }

    /// Releases a range of a program's buffer. With the last one, drops the backend's handle of the buffer, after
    /// submitting the commands that use the buffer. The buffer is not destroyed.
    pub(crate) fn release_buffer(&self, segment: SegmentId, range: &Range<u64>) {
        let mut external = self.external.lock_unpoisoned();
        let Some(ranges) = external.get_mut(&segment.0) else { return };
        if let Some(index) = ranges.iter().position(|used| used == range) {
            ranges.swap_remove(index);
        }
        if !ranges.is_empty() {
            return;
        }
        external.remove(&segment.0);
        let submitted = {
            let mut state = self.state.lock_unpoisoned();
            state.bind_groups.remove_segment(segment);
            state.submit()
        };
        self.segments.write_unpoisoned().remove(&segment.0);
        if let Err(error) = submitted {
            log::debug!("a buffer of the program was released without its device: {error}");
        }
    }

    /// Submits a copy of its own, after everything recorded so far. wgpu drops an encoder with an invalid command, and
    /// the program may submit commands that change the source.
    pub(crate) fn submit_copy(&self, copy: impl FnOnce(&mut wgpu::CommandEncoder)) -> Result<()> {
        self.gpu.check_health()?;
        let state = &mut *self.state.lock_unpoisoned();
        let recorder = state.drained_recorder()?;
        recorder.submit()?;
        copy(recorder.copy_encoder());
        recorder.submit()?;
        Ok(self.gpu.check_health()?)
    }

    /// Returns the device info for probes, which decide the features.
    pub(crate) fn info_mut(&mut self) -> &mut DeviceInfo {
        &mut self.info
    }

    fn segment(&self, segment: SegmentId) -> Result<wgpu::Buffer, SourceError> {
        let segments = self.segments.read_unpoisoned();
        segments.get(&segment.0).cloned().ok_or_else(|| SourceError::Driver {
            call: "segment",
            detail: format!("segment {} was freed, or belongs to another device", segment.0),
        })
    }

    /// Assigns an id to a buffer.
    fn register_buffer(&self, buffer: wgpu::Buffer) -> SegmentId {
        let id = self.next_segment.fetch_add(1, Ordering::Relaxed);
        self.segments.write_unpoisoned().insert(id, buffer);
        SegmentId(id)
    }

    fn kernel(&self, kernel: KernelId) -> Result<Arc<KernelPipeline>> {
        let kernels = self.kernels.read_unpoisoned();
        let compiled = kernels.get(kernel.0 as usize).cloned();
        compiled.ok_or_else(|| Error::argument("launch", format!("kernel {} is another device's", kernel.0)))
    }

    /// Looks up everything that a command needs. `None` for commands of a library, which this backend lacks, and for
    /// launches whose inputs must be copied first.
    fn prepare_command(&self, command: &Command<'_>) -> Result<Option<PreparedCommand>> {
        Ok(Some(match *command {
            Command::Launch(ref launch) => {
                if !platform::BINDINGS_MAY_OVERLAP {
                    let kernel = self.checked_kernel(launch)?;
                    if !aliasing::bindings_to_copy(&kernel.label, launch.bindings, kernel.written)?.is_empty()
                    {
                        return Ok(None);
                    }
                }
                self.prepare_dispatch(launch)?
            }
            Command::Copy { dst, src } => self.prepare_copy_fill(self.lower_copy(dst, src)?)?,
            Command::Fill { dst, word } => {
                self.prepare_copy_fill(self.lower_fill(dst, word, MIN_CLEAR_BYTES)?)?
            }
            Command::Matmul(_)
            | Command::BatchedMatmul(_)
            | Command::Attention(_)
            | Command::Convolution(_)
            | Command::Recurrent(_) => {
                return Ok(None);
            }
        }))
    }

    fn prepare_copy_fill(&self, copy_fill: CopyFill) -> Result<PreparedCommand> {
        match copy_fill {
            CopyFill::Kernel(work) => self.prepare_dispatch(&work.launch()),
            CopyFill::Command(command) => Ok(command),
        }
    }

    /// Chooses the form of a copy.
    fn lower_copy(&self, dst: Slice, src: Slice) -> Result<CopyFill> {
        let from = self.segment(src.segment)?;
        if src.segment == dst.segment {
            let segment = SizedSegment { segment: src.segment, bytes: from.size() };
            let work = self.copy_fill.copy(self, segment, dst.offset, src.offset, src.bytes)?;
            return Ok(CopyFill::Kernel(work));
        }
        let to = (self.segment(dst.segment)?, dst.offset);
        Ok(CopyFill::Command(PreparedCommand::Copy { from: (from, src.offset), to, bytes: src.bytes }))
    }

    /// Chooses the form of a fill. Zero fills of at least `min_clear_bytes` bytes use the driver's clear command.
    fn lower_fill(&self, dst: Slice, word: u32, min_clear_bytes: u64) -> Result<CopyFill> {
        let buffer = self.segment(dst.segment)?;
        if word == 0 && dst.bytes >= min_clear_bytes {
            let (offset, bytes) = (dst.offset, dst.bytes);
            return Ok(CopyFill::Command(PreparedCommand::Clear { buffer, offset, bytes }));
        }
        let segment = SizedSegment { segment: dst.segment, bytes: buffer.size() };
        Ok(CopyFill::Kernel(self.copy_fill.fill(self, segment, dst.offset, dst.bytes, word)?))
    }

    fn prepare_dispatch(&self, launch: &Launch<'_>) -> Result<PreparedCommand> {
        let kernel = self.checked_kernel(launch)?;
        let storage = self.bind(&mut self.state.lock_unpoisoned().bind_groups, launch.bindings)?;
        let (params, groups) = (launch.params.to_vec(), launch.groups);
        Ok(PreparedCommand::Dispatch { id: launch.kernel, kernel, storage, params, groups })
    }

    /// Records a launch, or defers the launch until its kernel is compiled.
    fn enqueue_launch(&self, launch: &Launch<'_>) -> Result<()> {
        let kernel = self.checked_kernel(launch)?;
        if !platform::BINDINGS_MAY_OVERLAP {
            let copy = |dst, src| self.copy(dst, src);
            let writes = (kernel.label.as_str(), kernel.written);
            let separated = aliasing::separate(self, &self.scratch, launch.bindings, writes, copy)?;
            if let Some(bindings) = separated {
                return self.enqueue_launch(&Launch { bindings: &bindings, ..*launch });
            }
        }
        let state = &mut *self.state.lock_unpoisoned();
        let Some(pipeline) = kernel.pipeline.get().filter(|_| state.deferred.is_empty()) else {
            let storage = self.bind(&mut state.bind_groups, launch.bindings)?;
            let (id, params, groups) = (launch.kernel, launch.params.to_vec(), launch.groups);
            let kernel = Arc::clone(&kernel);
            let command = PreparedCommand::Dispatch { id, kernel, storage, params, groups };
            return Ok(state.record_or_defer(command)?);
        };
        let storage = self.bind(&mut state.bind_groups, launch.bindings)?;
        Ok(state.recorder.dispatch(&Dispatch {
            kernel: launch.kernel,
            pipeline: pipeline.map_err(|error| kernel.compilation_error(error))?,
            param_space: kernel.params,
            storage: storage.as_ref(),
            params: launch.params,
            groups: launch.groups,
        })?)
    }

    /// Returns the bind group of a launch's slices; `None` if there are none.
    fn bind(
        &self,
        bind_groups: &mut BindGroupCache,
        slices: &[Slice],
    ) -> Result<Option<wgpu::BindGroup>, SourceError> {
        if slices.is_empty() {
            return Ok(None);
        }
        let buffer = |slice: &Slice| self.segment(slice.segment);
        bind_groups.get_or_create(&self.gpu, &self.layouts, slices, buffer).map(Some)
    }

    /// Returns the kernel of a launch after checking the bindings and parameters.
    fn checked_kernel(&self, launch: &Launch<'_>) -> Result<Arc<KernelPipeline>> {
        let kernel = self.kernel(launch.kernel)?;
        if launch.bindings.len() != kernel.binding_count as usize {
            let (expected, got) = (kernel.binding_count, launch.bindings.len());
            return Err(Error::argument(
                "launch",
                format!("`{}` binds {expected} slices; got {got}", kernel.label),
            ));
        }
        let (params, max) = (launch.params.len(), self.info.limits.max_params_bytes);
        let has_params = kernel.params != ParamSpace::None;
        if params > max as usize || (params > 0) != has_params {
            let expected =
                if has_params { format!("takes 1 to {max} bytes of") } else { "has no".to_owned() };
            return Err(Error::argument(
                "launch",
                format!("`{}` {expected} parameters; got {params}", kernel.label),
            ));
        }
        Ok(kernel)
    }
}

/// Copy to staging memory that was submitted.
struct PendingReadback {
    gpu: Arc<Gpu>,
    readbacks: Arc<ReadbackPool>,
    staging: wgpu::Buffer,
    /// `None` if the device has passed the submission.
    submission: Option<wgpu::SubmissionIndex>,
}

impl PendingDownload for PendingReadback {
    fn finish(self: Box<Self>, data: &mut [u8]) -> Result<()> {
        let Self { gpu, readbacks, staging, submission } = *self;
        Ok(readbacks.read_and_release(&gpu, staging, submission, data)?)
    }

    fn finish_then(self: Box<Self>, bytes: usize, done: Box<dyn FnOnce(Result<Vec<u8>>) + Send>) {
        if CAN_BLOCK {
            let mut data = vec![0; bytes];
            return done(self.finish(&mut data).map(|()| data));
        }
        let Self { gpu, readbacks, staging, .. } = *self;
        readbacks.read_then(gpu, staging, bytes, done);
    }
}

impl SegmentSource for WgpuBackend {
    fn limits(&self) -> SourceLimits {
        self.source_limits
    }

    fn device_memory(&self) -> DeviceMemory {
        self.memory
    }

    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        let max = self.source_limits.max_segment;
        if bytes > max {
            let detail = format!("one buffer of this device holds at most {max} bytes");
            return Err(SourceError::OutOfMemory { bytes, detail });
        }
        let usage = SEGMENT_USAGES | self.extra_usages;
        let size = bytes.next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT);
        Ok(self.register_buffer(self.gpu.create_buffer("forebay segment", size, usage, false)?))
    }

    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError> {
        let buffer = self.segment(segment)?;
        // Recorded commands that are not submitted yet may use the buffer, and would be refused without it.
        let submitted = {
            let mut state = self.state.lock_unpoisoned();
            state.bind_groups.remove_segment(segment);
            state.submit()
        };
        self.segments.write_unpoisoned().remove(&segment.0);
        // Destroyed explicitly, because wgpu may hold another reference: the memory is freed when the device
        // is done. A program that shares the device may still have a bind group over the buffer.
        if !self.gpu.is_shared {
            buffer.destroy();
        }
        submitted.and_then(|_| self.gpu.poll())
    }

    fn record_fence(&self) -> Result<Fence, SourceError> {
        self.state.lock_unpoisoned().submit()
    }

    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError> {
        if self.completed.load(Ordering::Acquire) >= fence.0 {
            return Ok(true);
        }
        self.gpu.poll()?;
        Ok(self.completed.load(Ordering::Acquire) >= fence.0)
    }

    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError> {
        if self.completed.load(Ordering::Acquire) >= fence.0 {
            return Ok(());
        }
        // The thread waits without the lock, so that other threads can record.
        let submission = self.state.lock_unpoisoned().recorder.pending_submission(fence);
        if let Some((reached, index)) = submission {
            self.gpu.wait(index, || self.completed.load(Ordering::Acquire) >= reached.0)?;
            self.completed.fetch_max(reached.0, Ordering::AcqRel);
        }
        Ok(())
    }
}

impl Backend for WgpuBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId> {
        self.gpu.check_health()?;
        let content = source.to_content();
        // The lock is held meanwhile: another thread that needs the same kernel waits, and does not compile it again.
        let mut ids = self.ids_by_content.lock_unpoisoned();
        if let Some(&id) = ids.get(&content) {
            return Ok(id);
        }
        let kernel = kernel::compile(&self.gpu, &self.layouts, &self.info, source)?;
        let mut kernels = self.kernels.write_unpoisoned();
        let id = KernelId(kernels.len() as u32);
        kernels.push(Arc::new(kernel));
        ids.insert(content, id);
        Ok(id)
    }

    fn wait_compiled(&self, kernel: KernelId) -> Result<()> {
        let kernel = self.kernel(kernel)?;
        kernel.pipeline.wait().map(drop).map_err(|error| kernel.compilation_error(error))
    }

    fn enqueue(&self, command: &Command<'_>) -> Result<bool> {
        self.gpu.check_health()?;
        let copy_fill = match *command {
            Command::Launch(ref launch) => return self.enqueue_launch(launch).map(|()| true),
            Command::Copy { dst: Slice { bytes: 0, .. }, .. }
            | Command::Fill { dst: Slice { bytes: 0, .. }, .. } => return Ok(true),
            Command::Copy { dst, src } => self.lower_copy(dst, src)?,
            Command::Fill { dst, word } => {
                let is_in_pass = self.state.lock_unpoisoned().recorder.is_in_pass();
                self.lower_fill(dst, word, if is_in_pass { MIN_CLEAR_BYTES } else { 0 })?
            }
            Command::Matmul(_)
            | Command::BatchedMatmul(_)
            | Command::Attention(_)
            | Command::Convolution(_)
            | Command::Recurrent(_) => {
                return Ok(false);
            }
        };
        match copy_fill {
            CopyFill::Kernel(work) => self.enqueue_launch(&work.launch())?,
            CopyFill::Command(command) => {
                self.state.lock_unpoisoned().record_or_defer(command)?;
                self.gpu.check_health()?;
            }
        }
        Ok(true)
    }

    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()> {
        self.gpu.check_health()?;
        let buffer = self.segment(dst.segment)?;
        Ok(self.state.lock_unpoisoned().drained_recorder()?.upload(&buffer, dst.offset, data)?)
    }

    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()> {
        self.gpu.check_health()?;
        let buffer = self.segment(src.segment)?;
        let mut offset = src.offset;
        for part in data.chunks_mut(MAX_READBACK_BYTES as usize) {
            let bytes = part.len() as u64;
            let staging = self.readbacks.acquire(&self.gpu, bytes)?;
            let submission = {
                let state = &mut *self.state.lock_unpoisoned();
                let recorder = state.drained_recorder()?;
                recorder.copy_encoder().copy_buffer_to_buffer(&buffer, offset, &staging, 0, bytes);
                let fence = recorder.submit()?;
                recorder.pending_submission(fence)
            };
            self.readbacks.read_and_release(&self.gpu, staging, submission.map(|(_, index)| index), part)?;
            offset += bytes;
        }
        Ok(())
    }

    fn start_download(&self, src: Slice) -> Result<Box<dyn PendingDownload>> {
        self.gpu.check_health()?;
        let buffer = self.segment(src.segment)?;
        let staging = self.readbacks.acquire(&self.gpu, src.bytes)?;
        let submission = {
            let state = &mut *self.state.lock_unpoisoned();
            let recorder = state.drained_recorder()?;
            recorder.copy_encoder().copy_buffer_to_buffer(&buffer, src.offset, &staging, 0, src.bytes);
            let fence = recorder.submit()?;
            recorder.pending_submission(fence)
        };
        Ok(Box::new(PendingReadback {
            gpu: Arc::clone(&self.gpu),
            readbacks: Arc::clone(&self.readbacks),
            staging,
            submission: submission.map(|(_, index)| index),
        }))
    }

    fn wait_fence_then(&self, fence: Fence, done: Box<dyn FnOnce(Result<()>) + Send>) {
        if CAN_BLOCK {
            return done(self.wait_fence(fence).map_err(Into::into));
        }
        let gpu = Arc::clone(&self.gpu);
        // All work submitted so far includes the work before the fence.
        self.gpu.queue.on_submitted_work_done(move || done(gpu.check_health().map_err(Into::into)));
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }

    fn copy_from_peer(&self, dst: Slice, source: &dyn Backend, src: Slice) -> Result<PeerCopy> {
        // Devices of one backend have pools of their own over the same buffers and the same queue.
        if !source
            .as_any()
            .and_then(|source| source.downcast_ref())
            .is_some_and(|source| ptr::eq(self, source))
        {
            return Ok(PeerCopy::Declined);
        }
        self.copy(dst, src)?;
        Ok(PeerCopy::Direct)
    }

    fn flush(&self) -> Result<()> {
        self.state.lock_unpoisoned().submit()?;
        Ok(())
    }

    fn prepare_commands(&self, commands: &[Command<'_>]) -> Result<Option<Box<dyn CommandSequence>>> {
        self.gpu.check_health()?;
        let mut steps = Vec::with_capacity(commands.len());
        for command in commands {
            match self.prepare_command(command)? {
                Some(step) => steps.push(step),
                None => return Ok(None),
            }
        }
        Ok(Some(Box::new(PreparedCommands {
            gpu: Arc::clone(&self.gpu),
            state: Arc::clone(&self.state),
            steps,
        })))
    }

    fn record_timestamp(&self) -> Result<Option<TimestampId>> {
        if !self.gpu.device.features().contains(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS) {
            return Ok(None);
        }
        let state = &mut *self.state.lock_unpoisoned();
        Ok(Some(self.timestamps.record(&self.gpu, state.drained_recorder()?.copy_encoder())?))
    }

    fn read_timestamps(&self) -> Result<Vec<f64>> {
        let submit = |resolve: &mut dyn FnMut(&mut wgpu::CommandEncoder)| {
            let state = &mut *self.state.lock_unpoisoned();
            let recorder = state.drained_recorder()?;
            resolve(recorder.copy_encoder());
            let fence = recorder.submit()?;
            Ok(recorder.pending_submission(fence).map(|(_, index)| index))
        };
        Ok(self.timestamps.read_all(&self.gpu, &self.readbacks, submit)?)
    }

    fn supports_pinned_host(&self) -> bool {
        self.gpu.device.features().contains(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS)
    }

    fn alloc_host(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        if !self.supports_pinned_host() {
            let detail =
                "this adapter's buffers are either the host's to map or the device's to copy".to_owned();
            return Err(SourceError::Driver { call: "alloc_host", detail });
        }
        // Host-visible memory that the queue copies like any other buffer.
        let usage =
            wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let size = bytes.next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT);
        Ok(self.register_buffer(self.gpu.create_buffer("forebay host", size, usage, false)?))
    }

    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.free_segment(segment)
    }
}

#[cfg(test)]
mod tests;

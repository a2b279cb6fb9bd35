//! The backend: one device, with one stream for each of its queues.
//!
//! `CudaQueue::try_enqueue` maps each command of the core to the driver or to a library, and decides which
//! library computes a product. Commands whose kernels are still being compiled are deferred. All methods of
//! the core's traits are in this file, except two: captured steps are in `prepared`, and the access of other
//! libraries is in `foreign`.

mod prepared;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use forebay_core::backend::{
    Backend, Command, CommandSequence, DeviceInfo, DeviceMemory, DeviceProcess, Event, Features, Fence,
    ForeignAccess, KernelId, KernelSource, LibraryFeatures, Limits, MAX_QUEUES, MatrixOperand, PageRemap,
    PeakRates, PeerCopy, PendingDownload, SegmentId, SegmentSource, Slice, SourceError, SourceLimits,
    TimestampId,
};
use forebay_core::disk_cache::DiskCache;
use forebay_core::environment;
use forebay_core::error::{Error, Result};
use forebay_core::sync::LockUnpoisoned;

use crate::attention::AttentionKernels;
use crate::batched_matmul::{self, BatchedMatmulKernels};
use crate::context::{Context, CudaStream, PinnedBuffer};
use crate::convolution::ConvKernels;
use crate::cubin_cache::CubinCache;
use crate::cublaslt::CublasLt;
use crate::deferred::{DeferredItem, DeferredQueue};
use crate::driver::{self, CudaUnavailable, Driver};
use crate::fences::{EventTracker, FenceTracker};
use crate::gelu_grad;
use crate::kernels::{KernelRegistry, MAX_BINDINGS, MAX_PARAM_BYTES, SubmitStatus};
use crate::nvtx::set_nvtx;
use crate::peer::PeerLinks;
use crate::processes;
use crate::recurrent::{self, RecurrentKernels};
use crate::settings::{self, bool_from_env};
use crate::sgemm_small::GemmKernels;
use crate::staging::{self, ChunkPool, PendingChunks, UploadRing};
use crate::timestamps::Timestamps;
use crate::virtual_memory::{PageMapping, VirtualAddressSpace};

/// Alignment of blocks in bytes: cuBLASLt's fastest kernels, 16-byte loads and wgpu require it.
pub(crate) const BLOCK_ALIGNMENT: u64 = 256;

/// A CUDA device, or one of its queues.
///
/// All work of a queue goes to its own stream, in the order of the calls. The backend uses the device's
/// primary context, as other CUDA libraries do, and may be called from any thread.
pub struct CudaBackend {
    queue: Arc<CudaQueue>,
    device: Arc<CudaDevice>,
}

/// State that the queues of a device share.
struct CudaDevice {
    info: DeviceInfo,
    total_memory: u64,
    fences: FenceTracker,
    events: EventTracker,
    timestamps: Timestamps,
    /// Links from other cards.
    links: PeerLinks,
    /// Declared before the kernels, so that graphs are dropped before the code that they launch.
    queues: [OnceLock<Arc<CudaQueue>>; MAX_QUEUES as usize],
    kernels: KernelRegistry,
    attention: AttentionKernels,
    convolution: ConvKernels,
    recurrent: RecurrentKernels,
    gemm: GemmKernels,
    batched_matmul: BatchedMatmulKernels,
    /// Page-locked allocations by address.
    host_allocations: Mutex<HashMap<u64, PinnedBuffer>>,
    idle_downloads: Arc<ChunkPool>,
    /// `None` if segments cannot grow.
    address_space: Option<VirtualAddressSpace>,
    context: Arc<Context>,
}

/// A stream and the state that only its work uses.
struct CudaQueue {
    /// Commands that wait for the compiler.
    deferred: DeferredQueue,
    cublaslt: CublasLt,
    uploads: Mutex<UploadRing>,
    stream: CudaStream,
}

impl CudaQueue {
    fn new(context: &Arc<Context>) -> Result<Self, SourceError> {
        Ok(Self {
            deferred: DeferredQueue::default(),
            cublaslt: CublasLt::default(),
            uploads: Mutex::default(),
            stream: CudaStream::new(context)?,
        })
    }

    /// Enqueues a command on a stream; if `wait` is true, waits for a kernel that is still being compiled.
    fn try_enqueue(
        &self,
        device: &CudaDevice,
        stream: &CudaStream,
        command: &Command<'_>,
        wait: bool,
    ) -> Result<SubmitStatus> {
        let CudaDevice { attention, convolution, recurrent, context, kernels, gemm, batched_matmul, .. } =
            device;
        match *command {
            Command::Launch(ref launch) => {
                while !kernels.launch(stream, launch)? {
                    if !wait && !kernels.is_compiled(launch.kernel) {
                        return Ok(SubmitStatus::Compiling);
                    }
                    kernels.finish_compile(context, launch.kernel)?;
                }
            }
            Command::Copy { dst, src } => {
                // SAFETY: the core has checked that the slices lie inside their segments and do not overlap.
                unsafe { stream.copy(slice_address(dst), slice_address(src), dst.bytes.min(src.bytes)) }?;
            }
            Command::Fill { dst, word } => {
                // SAFETY: the core has checked that the slice lies inside its segment; it starts at a
                // multiple of 4.
                unsafe { stream.fill(slice_address(dst), word, dst.bytes / 4) }?;
            }
            Command::Matmul(call) => {
                // Only if cuBLASLt is available: a dry run assumes that no other library supports products.
                if self.cublaslt.is_available(context) {
                    match gemm.submit(context, kernels, Some(stream), call, wait)? {
                        SubmitStatus::Declined => {}
                        status => return Ok(status),
                    }
                }
                if !self.cublaslt.run(stream, call)? {
                    return Ok(SubmitStatus::Declined);
                }
            }
            Command::BatchedMatmul(call) => {
                return Ok(batched_matmul.submit(context, kernels, Some(stream), call, wait)?);
            }
            Command::Attention(call) => {
                return Ok(attention.submit(context, kernels, Some(stream), call, wait)?);
            }
            Command::Convolution(call) => {
                return Ok(convolution.submit(context, kernels, Some(stream), call, wait)?);
            }
            Command::Recurrent(call) => {
                return Ok(recurrent.submit(context, kernels, Some(stream), call, wait)?);
            }
        }
        Ok(SubmitStatus::Submitted)
    }

    /// Enqueues deferred commands: all of them if `wait` is true, else those whose kernels are compiled.
    fn drain_deferred(&self, device: &CudaDevice, wait: bool) -> Result<()> {
        self.deferred.drain(|item| {
            let command = match item {
                DeferredItem::Command(command) => command.as_command(),
                DeferredItem::Remap(remap) => {
                    self.stream.synchronize()?;
                    device.require_address_space()?.complete_remap(remap)?;
                    return Ok(true);
                }
            };
            match self.try_enqueue(device, &self.stream, &command, wait)? {
                SubmitStatus::Submitted => Ok(true),
                SubmitStatus::Compiling => Ok(false),
                // The command was accepted before, and no fallback is left.
                SubmitStatus::Declined => Err(Error::Driver(SourceError::Driver {
                    call: "a library's kernel",
                    detail: "an accepted call was declined after its kernels had been compiled; the kernels are now on disk, so run the program again"
                        .to_owned(),
                })),
            }
        })
    }

    /// Enqueues all deferred commands and gives pending calls to the driver, and reports errors as a [`SourceError`].
    fn flush_pending(&self, device: &CudaDevice) -> Result<(), SourceError> {
        self.drain_deferred(device, true).map_err(|error| match error {
            Error::Driver(error) => error,
            error => SourceError::Driver { call: "nvrtcCompileProgram", detail: error.to_string() },
        })?;
        self.stream.flush_pending()
    }
}

impl CudaDevice {
    fn queues(&self) -> impl Iterator<Item = &Arc<CudaQueue>> {
        self.queues.iter().filter_map(OnceLock::get)
    }

    /// Enqueues the deferred commands of all queues.
    fn flush_pending(&self) -> Result<(), SourceError> {
        self.queues().try_for_each(|queue| queue.flush_pending(self))
    }

    /// Gives the pending calls of all streams to the driver, even after one failed: memory changes must come
    /// after them.
    fn flush_streams(&self) -> Result<(), SourceError> {
        self.streams().map(CudaStream::flush_pending).fold(Ok(()), Result::and)
    }

    fn streams(&self) -> impl Iterator<Item = &CudaStream> {
        self.queues().map(|queue| &queue.stream)
    }

    fn get_or_create_queue(&self, number: u8) -> Result<&Arc<CudaQueue>, SourceError> {
        let slot = self.queues.get(usize::from(number)).ok_or_else(|| SourceError::Driver {
            call: "queue",
            detail: format!("there is no queue {number}; there are {MAX_QUEUES}"),
        })?;
        if let Some(queue) = slot.get() {
            return Ok(queue);
        }
        let queue = Arc::new(CudaQueue::new(&self.context)?);
        let queue = slot.get_or_init(|| queue);
        if number > 0 {
            // The new queue's work may use memory whose remap is pending on another queue.
            self.flush_pending_remaps()?;
        }
        Ok(queue)
    }

    /// Returns the queue that can defer a remap: the only queue in use, if it has deferred commands.
    fn deferring_queue(&self) -> Option<&CudaQueue> {
        let mut queues = self.queues();
        let first = queues.next()?;
        (queues.next().is_none() && !first.deferred.is_empty()).then_some(first)
    }

    /// Reports whether a remap is pending, so that memory is not yet where the pool expects it.
    fn has_pending_remap(&self) -> bool {
        self.queues().any(|queue| queue.deferred.has_remap())
    }

    fn flush_pending_remaps(&self) -> Result<(), SourceError> {
        if self.has_pending_remap() { self.flush_pending() } else { Ok(()) }
    }

    fn require_address_space(&self) -> Result<&VirtualAddressSpace, SourceError> {
        self.address_space.as_ref().ok_or(SourceError::Driver {
            call: "cuMemAddressReserve",
            detail: "this device has no virtual memory management, or FOREBAY_CUDA_VMM=0 is set".to_owned(),
        })
    }
}

impl CudaBackend {
    /// Returns the number of devices, or the reason why CUDA cannot be used.
    pub fn device_count() -> Result<usize, CudaUnavailable> {
        Driver::load()?.device_count().map_err(CudaUnavailable::from)
    }

    /// Opens device `index`.
    pub fn open(index: usize) -> Result<Arc<dyn Backend>> {
        for name in settings::BOOL_VARIABLES {
            environment::read_switch(name)?;
        }
        Self::new(index).map(|backend| Arc::new(backend) as Arc<dyn Backend>).map_err(|error| {
            Error::NoDevice { requested: format!("cuda:{index}"), reason: error.to_string() }
        })
    }

    /// Opens device `index`; the error is typed, unlike that of [`open`](Self::open).
    pub fn new(index: usize) -> Result<Self, CudaUnavailable> {
        if bool_from_env("FOREBAY_NVTX") == Some(true)
            && let Err(error) = set_nvtx(true)
        {
            log::warn!("FOREBAY_NVTX: {error}");
        }
        let driver = Driver::load()?;
        let device = driver.device(index)?;
        let (major, minor) = device.compute_capability()?;
        let total = device.total_memory()?;
        let arch = major * 10 + minor;
        let warp = device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?;
        let info = DeviceInfo {
            backend: "cuda",
            index,
            name: device.name()?,
            driver: format!("CUDA {}.{}, sm_{arch}", driver.version / 1000, driver.version % 1000 / 10),
            software: false,
            features: Features {
                f16: (major, minor) >= (5, 3),
                f64: true,
                i64: true,
                i16: true,
                subgroups: true,
                f64_math: true,
                // From sm_80 on, the instruction mma.m16n8k16 exists.
                cooperative_f16: arch >= 80,
                cooperative_bf16: arch >= 80,
                cooperative_side: if arch >= 80 { 16 } else { 0 },
            },
            limits: Limits {
                max_binding_bytes: total,
                max_bindings: MAX_BINDINGS as u32,
                max_workgroup_size: device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
                max_workgroup_memory: device
                    .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
                // The limit of y and z; x allows more, but one rule is simpler than two.
                max_workgroups_per_dim: 65_535,
                subgroup_size: (warp, warp),
                max_params_bytes: MAX_PARAM_BYTES as u32,
                max_loop_iterations: u32::MAX,
            },
            peak_rates: peak_throughput(device, arch),
            paths: vec![match settings::portable_kernels() {
                true => "matrix products, attention and convolutions: portable kernels; FOREBAY_PORTABLE_KERNELS is set"
                    .to_owned(),
                false => "matrix products: cuBLASLt where it is installed, else tiles of f32".to_owned(),
            }],
        };
        let context = Context::retain(device)?;
        let addresses = match bool_from_env("FOREBAY_CUDA_VMM") {
            Some(false) => None,
            _ => VirtualAddressSpace::new(&context, total)?,
        };
        let device = CudaDevice {
            info,
            total_memory: total,
            fences: FenceTracker::default(),
            events: EventTracker::default(),
            timestamps: Timestamps::default(),
            links: PeerLinks::default(),
            kernels: KernelRegistry::new(arch, CubinCache::new(DiskCache::from_env())),
            attention: AttentionKernels::default(),
            convolution: ConvKernels::new(context.sm_count),
            recurrent: RecurrentKernels::default(),
            gemm: GemmKernels::new(context.sm_count),
            batched_matmul: BatchedMatmulKernels::default(),
            host_allocations: Mutex::default(),
            idle_downloads: Arc::default(),
            address_space: addresses,
            queues: Default::default(),
            context,
        };
        let queue = Arc::clone(device.get_or_create_queue(0)?);
        Ok(Self { queue, device: Arc::new(device) })
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // The fields release their handles when they are dropped; running work must not lose its memory
        // before. An error means that the device is lost, and nothing runs.
        self.streams().for_each(|stream| drop(stream.synchronize()));
    }
}

impl CudaBackend {
    /// Returns the queue's stream, after all deferred commands are in it.
    pub(crate) fn drained_stream(&self) -> Result<&CudaStream> {
        self.queue.drain_deferred(&self.device, true)?;
        Ok(&self.queue.stream)
    }

    /// Makes the next fence include work that was enqueued in a stream directly.
    pub(crate) fn mark_enqueued(&self) {
        self.device.fences.mark_enqueued();
    }

    /// Enqueues a command after all deferred ones; returns `false` if a library declines the command.
    fn submit(&self, command: &Command<'_>) -> Result<bool> {
        let Self { queue, device } = self;
        let CudaDevice {
            attention,
            convolution,
            recurrent,
            context,
            fences,
            kernels,
            gemm,
            batched_matmul,
            ..
        } = &**device;
        let accepted = if queue.deferred.is_empty() {
            match queue.try_enqueue(device, &queue.stream, command, false)? {
                SubmitStatus::Submitted => {
                    fences.mark_enqueued();
                    return Ok(true);
                }
                status => status == SubmitStatus::Compiling,
            }
        } else {
            match command {
                Command::Launch(launch) => kernels.check_launch(launch).map(|_| true)?,
                Command::Matmul(call) => {
                    queue.cublaslt.is_available(context)
                        && gemm.submit(context, kernels, None, call, false)? != SubmitStatus::Declined
                        || queue.cublaslt.accepts(&queue.stream, call)?
                }
                Command::BatchedMatmul(call) => {
                    batched_matmul.submit(context, kernels, None, call, false)? != SubmitStatus::Declined
                }
                Command::Attention(call) => {
                    attention.submit(context, kernels, None, call, false)? != SubmitStatus::Declined
                }
                Command::Convolution(call) => {
                    convolution.submit(context, kernels, None, call, false)? != SubmitStatus::Declined
                }
                Command::Recurrent(call) => {
                    recurrent.submit(context, kernels, None, call, false)? != SubmitStatus::Declined
                }
                Command::Copy { .. } | Command::Fill { .. } => true,
            }
        };
        if accepted {
            queue.deferred.push_command(command);
            fences.mark_enqueued();
            queue.drain_deferred(device, false)?;
        }
        Ok(accepted)
    }

    /// Enqueues a copy from another device in its stream, like PyTorch. Events order the streams of both devices. The
    /// source waits until `dst` is free, and this queue until the copy is complete.
    fn enqueue_peer_copy(&self, dst: Slice, source: &Self, src: Slice) -> Result<PeerCopy> {
        let (to, from) = (&*self.device, &*source.device);
        let path = to.links.get_or_open(&from.context, &to.context, to.address_space.as_ref())?;
        let (to_stream, from_stream) = (self.drained_stream()?, source.drained_stream()?);
        let (dst, src, bytes) = (slice_address(dst), slice_address(src), dst.bytes.min(src.bytes));
        let enqueued = (|| {
            let free = to.events.record(to_stream)?;
            to.events.wait(from_stream, free)?;
            if from.context.device == to.context.device {
                // SAFETY: the core has checked that the slices lie inside their segments, which differ.
                unsafe { from_stream.copy(dst, src, bytes) }?;
            } else {
                // SAFETY: as above; each slice is memory of its device.
                unsafe { from_stream.copy_to_peer(dst, &to.context, src, bytes) }?;
            }
            let copied = from.events.record(from_stream)?;
            from.events.wait(to_stream, copied)
        })();
        // This also runs after an error, because the copy may have been enqueued.
        from.fences.mark_enqueued();
        to.fences.mark_enqueued();
        enqueued?;
        Ok(path)
    }
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend").field("info", &self.device.info).finish_non_exhaustive()
    }
}

impl SegmentSource for CudaBackend {
    fn limits(&self) -> SourceLimits {
        SourceLimits {
            alignment: BLOCK_ALIGNMENT,
            max_segment: self.device.total_memory,
            virtual_memory: self.device.address_space.as_ref().map(|addresses| addresses.limits),
        }
    }

    fn device_memory(&self) -> DeviceMemory {
        let (free, total) = self.device.context.mem_get_info().ok().unzip();
        DeviceMemory { total: total.or(Some(self.device.total_memory)), free }
    }

    fn library_bytes(&self) -> u64 {
        self.device.queues().map(|queue| queue.cublaslt.workspace_bytes()).sum()
    }

    fn processes(&self) -> Vec<DeviceProcess> {
        let address = self.device.context.device.pci_address();
        address.map(|address| processes::list_processes(&address)).unwrap_or_default()
    }

    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.device.context.alloc(bytes).map(SegmentId)
    }

    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError> {
        let flushed = self.device.flush_streams();
        self.device.context.free(segment.0).and(flushed)
    }

    fn reserve_addresses(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.device.require_address_space()?.reserve(bytes).map(SegmentId)
    }

    fn free_addresses(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.device.flush_pending_remaps()?;
        let flushed = self.device.flush_streams();
        self.device.require_address_space()?.unreserve(segment.0).and(flushed)
    }

    fn remap(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        match self.device.has_pending_remap() {
            true => self.remap_after_submitted(pieces),
            false => self.device.require_address_space()?.map(to_page_mappings(pieces)),
        }
    }

    fn map_again(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        // A deferred remap may have to map the memory first.
        self.device.flush_pending_remaps()?;
        self.device.require_address_space()?.map_again(to_page_mappings(pieces))
    }

    fn unmap_again(&self, segment: SegmentId, pieces: &[u64]) -> Result<(), SourceError> {
        self.unmap(segment, 0, pieces)
    }

    fn has_deferred_work(&self) -> bool {
        self.device.deferring_queue().is_some()
    }

    fn remap_after_submitted(&self, pieces: &[PageRemap]) -> Result<(), SourceError> {
        let device = &*self.device;
        let addresses = device.require_address_space()?;
        if let Some(queue) = device.deferring_queue()
            && let Ok(remap) = addresses.prepare_remap(to_page_mappings(pieces))
            && queue.deferred.push_remap(remap)
        {
            // Another thread may have begun to use another queue.
            return if self.has_deferred_work() { Ok(()) } else { device.flush_pending() };
        }
        let fence = self.record_fence()?;
        self.wait_fence(fence)?;
        addresses.map(to_page_mappings(pieces))
    }

    fn unmap(&self, segment: SegmentId, offset: u64, pieces: &[u64]) -> Result<(), SourceError> {
        self.device.flush_pending_remaps()?;
        let flushed = self.device.flush_streams();
        let addresses = self.device.require_address_space()?;
        let mut address = device_address(segment, offset);
        for &bytes in pieces {
            addresses.unmap(address, bytes)?;
            address += bytes;
        }
        flushed
    }

    fn queue_count(&self) -> u8 {
        MAX_QUEUES
    }

    fn record_event(&self, queue: u8) -> Result<Event, SourceError> {
        let queue = self.device.get_or_create_queue(queue)?;
        queue.flush_pending(&self.device)?;
        self.device.events.record(&queue.stream)
    }

    fn wait_event(&self, queue: u8, event: Event) -> Result<(), SourceError> {
        let queue = self.device.get_or_create_queue(queue)?;
        queue.flush_pending(&self.device)?;
        self.device.events.wait(&queue.stream, event)
    }

    fn record_fence(&self) -> Result<Fence, SourceError> {
        self.device.flush_pending()?;
        self.device.fences.record(self.device.streams())
    }

    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError> {
        self.device.fences.is_done(fence)
    }

    fn wait_fence(&self, fence: Fence) -> Result<(), SourceError> {
        self.device.fences.wait(fence)
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> &DeviceInfo {
        &self.device.info
    }

    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId> {
        self.device.kernels.compile(&self.device.context, source)
    }

    fn wait_compiled(&self, kernel: KernelId) -> Result<()> {
        self.device.kernels.finish_compile(&self.device.context, kernel)
    }

    fn enqueue(&self, command: &Command<'_>) -> Result<bool> {
        match command {
            // The driver refuses copies and fills of no bytes.
            Command::Copy { dst, .. } | Command::Fill { dst, .. } if dst.bytes == 0 => Ok(true),
            command => self.submit(command),
        }
    }

    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()> {
        self.queue.drain_deferred(&self.device, true)?;
        let mut uploads = self.queue.uploads.lock_unpoisoned();
        let uploaded = uploads.upload(&self.queue.stream, slice_address(dst), data);
        // This also runs after an error, because a part of the upload may have been enqueued.
        self.device.fences.mark_enqueued();
        Ok(uploaded?)
    }

    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()> {
        self.queue.drain_deferred(&self.device, true)?;
        let (stream, idle) = (&self.queue.stream, &self.device.idle_downloads);
        let downloaded = staging::download(stream, slice_address(src), data, idle);
        self.device.fences.mark_enqueued();
        Ok(downloaded?)
    }

    fn start_download(&self, src: Slice) -> Result<Box<dyn PendingDownload>> {
        self.queue.drain_deferred(&self.device, true)?;
        let (stream, idle) = (&self.queue.stream, &self.device.idle_downloads);
        let pending = PendingChunks::enqueue(stream, slice_address(src), src.bytes, idle);
        self.device.fences.mark_enqueued();
        Ok(Box::new(pending?))
    }

    fn copy_from_peer(&self, dst: Slice, source: &dyn Backend, src: Slice) -> Result<PeerCopy> {
        match source.as_any().and_then(|source| source.downcast_ref()) {
            Some(source) => self.enqueue_peer_copy(dst, source, src),
            None => Ok(PeerCopy::Declined),
        }
    }

    fn flush(&self) -> Result<()> {
        self.queue.drain_deferred(&self.device, false)?;
        Ok(self.queue.stream.flush_pending()?)
    }

    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        let queue = Arc::clone(self.device.get_or_create_queue(number)?);
        Ok(Some(Arc::new(Self { queue, device: Arc::clone(&self.device) })))
    }

    fn record_timestamp(&self) -> Result<Option<TimestampId>> {
        self.queue.drain_deferred(&self.device, true)?;
        Ok(Some(self.device.timestamps.record(&self.device.context, &self.queue.stream)?))
    }

    fn read_timestamps(&self) -> Result<Vec<f64>> {
        Ok(self.device.timestamps.read_all()?)
    }

    fn supports_pinned_host(&self) -> bool {
        true
    }

    fn alloc_host(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        let memory = PinnedBuffer::new(&self.device.context, bytes as usize)?;
        let address = memory.address();
        self.device.host_allocations.lock_unpoisoned().insert(address, memory);
        Ok(SegmentId(address))
    }

    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        let flushed = self.device.flush_streams();
        let removed = self.device.host_allocations.lock_unpoisoned().remove(&segment.0);
        flushed.and(removed.map(drop).ok_or_else(|| SourceError::Driver {
            call: "cuMemFreeHost",
            detail: format!("no host memory is allocated at {:#x}", segment.0),
        }))
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn foreign_access(&self) -> Option<&dyn ForeignAccess> {
        Some(self)
    }

    fn library_features(&self) -> LibraryFeatures {
        let arch = self.device.kernels.arch();
        LibraryFeatures {
            matmul: self.queue.cublaslt.is_available(&self.device.context),
            batched_matmul: batched_matmul::is_supported(arch),
            f8_matmul: arch >= 89,
            gelu_grad_epilogue: arch == gelu_grad::REQUIRED_ARCH,
            convolution: arch == gelu_grad::REQUIRED_ARCH && !settings::portable_kernels(),
            recurrent: recurrent::is_supported(arch),
            one_pass_attention: arch == gelu_grad::REQUIRED_ARCH && !settings::portable_kernels(),
        }
    }

    fn prepare_commands(&self, commands: &[Command<'_>]) -> Result<Option<Box<dyn CommandSequence>>> {
        self.queue.drain_deferred(&self.device, true)?;
        match self.capture_graph(commands) {
            Ok(graph) => Ok(graph.map(|graph| Box::new(graph) as Box<dyn CommandSequence>)),
            Err(error @ Error::Driver(SourceError::DeviceLost(_))) => Err(error),
            Err(error) => {
                log::debug!("a captured step cannot become a CUDA graph: {error}");
                Ok(None)
            }
        }
    }
}

/// Computes peak rates from the clocks and widths that the driver reports.
fn peak_throughput(device: driver::DeviceHandle, arch: u32) -> PeakRates {
    let value = |attribute| device.attribute(attribute).ok().filter(|&value| value > 0).map(f64::from);
    let memory = value(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)
        .zip(value(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH));
    // FLOP for each multiprocessor and clock: dense 16-bit products with f32 sums (NVIDIA's architecture
    // papers).
    let flops_per_sm_clock = match arch {
        80 | 87 => Some(2048.0),
        86 | 89 | 120 | 121 => Some(512.0),
        90 => Some(4096.0),
        100 | 101 | 103 => Some(8192.0),
        _ => None,
    };
    let clocks = value(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        .zip(value(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE));
    PeakRates {
        // Two transfers per clock; the clock is in kHz, the width in bits.
        bytes_per_second: memory.map(|(clock, width)| 2.0 * clock * 1e3 * width / 8.0),
        flops_per_second: flops_per_sm_clock
            .zip(clocks)
            .map(|(flops, (sm_count, clock))| flops * sm_count * clock * 1e3),
    }
}

fn to_page_mappings(pieces: &[PageRemap]) -> Vec<PageMapping> {
    let address = |(segment, offset)| device_address(segment, offset);
    let pieces = pieces.iter();
    pieces.map(|p| PageMapping { to: address(p.to), bytes: p.bytes, from: p.from.map(address) }).collect()
}

/// Returns the device address of a byte of a segment. A segment's identity is its address.
pub(crate) fn device_address(segment: SegmentId, offset: u64) -> u64 {
    segment.0 + offset
}

pub(crate) fn slice_address(slice: Slice) -> u64 {
    device_address(slice.segment, slice.offset)
}

/// Returns the device address of a matrix's first element.
pub(crate) fn operand_address(operand: &MatrixOperand) -> u64 {
    device_address(operand.segment, operand.offset)
}

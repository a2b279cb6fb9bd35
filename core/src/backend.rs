//! Contract between the core and a GPU API: bytes, kernels and queues, but no tensors and no operations.
//!
//! A backend does not repeat the core's checks of shapes, dtypes and slice bounds. It reports errors that
//! only the backend can detect: a full device, a lost device, a kernel that does not compile.
//!
//! Every call that is not marked as blocking only enqueues work. Work runs in call order on one queue. A
//! block of memory may therefore be reused by the next call once the last call that uses the block is
//! enqueued. On a device with several queues, each queue is a backend over the same segments and kernels
//! ([`Backend::open_queue`]), and events order the queues.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::Result;
pub use crate::memory::source::{
    DeviceMemory, DeviceProcess, Event, Fence, MAX_QUEUES, PageRemap, SegmentId, SegmentSource, SourceError,
    SourceLimits, VirtualMemory,
};

pub mod batched_matmul;
pub mod cards;
pub(crate) mod command;
pub mod compile_pool;
pub mod convolution;
mod forward;
pub(crate) mod host_memory;
pub mod library;
pub mod null;
pub mod recurrent;

pub use batched_matmul::{BatchedMatmulCall, BatchedMatmulTiling, BatchedOperand};
pub use command::{Command, CommandSequence, OwnedCommand};
pub use convolution::{ConvolutionCall, ConvolutionProduct};
pub use library::{
    AttentionCall, AttentionDropout, AttentionExtents, AttentionGradients, AttentionMask, AttentionOperand,
    Epilogue, GELU_GRAD_SUM_ROWS, LibraryFeatures, MatmulCall, MatrixOperand,
};
pub use recurrent::{RecurrentCall, RecurrentKind, RecurrentPass, RecurrentTiling};

/// Description of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Name of the backend: `cuda`, `wgpu` or `null`.
    pub backend: &'static str,
    /// Index among the backend's devices.
    pub index: usize,
    /// Name of the card as reported by the driver.
    pub name: String,
    /// Driver, its version and the API: `Vulkan, llvmpipe, Mesa 22.3.6`.
    pub driver: String,
    /// If true, the device is a software rasteriser (lavapipe, SwiftShader), not a GPU.
    pub software: bool,
    /// Optional capabilities that kernels may use.
    pub features: Features,
    /// Limits of kernel launches.
    pub limits: Limits,
    /// Peak rates according to the data sheet.
    pub peak_rates: PeakRates,
    /// Implementations that the device uses for products and attention, with reasons, one line each.
    pub paths: Vec<String>,
}

/// Peak rates per second, which profiles compare measured rates with. `None` if the driver reports too
/// little.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PeakRates {
    /// Memory bandwidth in bytes per second.
    pub bytes_per_second: Option<f64>,
    /// Dense 16-bit floating-point operations per second at the highest clock. Data sheets may assume a lower
    /// clock: 989 TFLOP/s instead of 1,070 for an H100.
    pub flops_per_second: Option<f64>,
}

/// Index of a timestamp query, counted since the last [`Backend::read_timestamps`]. The timestamp is taken
/// when the queue reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimestampId(pub u32);

/// Optional capabilities of a device. Capabilities that drivers misreport are confirmed by a test kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features {
    /// 16-bit floats in storage and arithmetic (`enable f16`).
    pub f16: bool,
    /// 64-bit floats.
    pub f64: bool,
    /// 64-bit integers.
    pub i64: bool,
    /// 16-bit integers in storage (`array<u16>`), which allow 16-bit elements to be stored one by one.
    pub i16: bool,
    /// Subgroup operations.
    pub subgroups: bool,
    /// Products of f16 matrices with sums in f32, by the invocations of a subgroup (WGSL's cooperative matrices).
    pub cooperative_f16: bool,
    /// Products of bf16 matrices in that form.
    pub cooperative_bf16: bool,
    /// Rows and columns of these matrices: 16 with subgroups of 32 invocations, or 8 with subgroups of
    /// [`Limits::subgroup_size`]. 0 without matrix units.
    pub cooperative_side: u32,
    /// Transcendental functions on f64 (CUDA). The shading languages have none.
    pub f64_math: bool,
}

impl Features {
    /// Reports whether matrix units multiply matrices of this type, of [`cooperative_side`](Self::cooperative_side)
    /// rows and columns.
    #[must_use]
    pub fn has_cooperative(&self, dtype: DType) -> bool {
        match dtype {
            DType::F16 => self.cooperative_f16,
            DType::BF16 => self.cooperative_bf16,
            _ => false,
        }
    }
}

/// Limits of kernel launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of one binding in bytes.
    pub max_binding_bytes: u64,
    /// Maximum number of storage bindings of a kernel.
    pub max_bindings: u32,
    /// Maximum number of invocations in a workgroup.
    pub max_workgroup_size: u32,
    /// Maximum bytes of workgroup memory.
    pub max_workgroup_memory: u32,
    /// Maximum number of workgroups along one dimension.
    pub max_workgroups_per_dim: u32,
    /// Smallest and largest number of invocations in a subgroup.
    pub subgroup_size: (u32, u32),
    /// Maximum bytes of parameters of one launch.
    pub max_params_bytes: u32,
    /// Maximum number of iterations that all loops of one invocation may run in total; `u32::MAX` if
    /// unlimited. Mesa's software driver silently ends loops after 65,535 iterations, which makes results
    /// wrong.
    pub max_loop_iterations: u32,
}

/// Range of a segment that a kernel binds or a copy accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Segment that contains the range.
    pub segment: SegmentId,
    /// First byte: a multiple of the source's alignment for bindings, and of 4 for copies.
    pub offset: u64,
    /// Length in bytes; a multiple of 4.
    pub bytes: u64,
}

/// Source of a kernel: WGSL with one entry point.
///
/// Storage buffers are `@group(0) @binding(0..n)`, declared `read` or `read_write`; a backend may bind all of
/// them as read_write. Parameters, if any, are one `var<uniform>` at `@group(1) @binding(0)`.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSource<'a> {
    /// Name for messages and profiles, e.g. `softmax_forward f32`.
    pub label: &'a str,
    /// WGSL module.
    pub wgsl: &'a str,
    /// Name of the entry point.
    pub entry_point: &'a str,
    /// Values of `override` constants.
    pub overrides: &'a [(&'a str, f64)],
    /// If true, workgroup memory is zero-initialised, as WGSL specifies. Kernels that write every element
    /// before they read it disable this: zeroing costs each workgroup a pass, and some compilers seconds.
    pub zero_workgroup_memory: bool,
}

/// A kernel's source without its label: the key under which backends share compiled kernels between devices.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelContent {
    wgsl: String,
    entry_point: String,
    overrides: Vec<(String, u64)>,
    zero_workgroup_memory: bool,
}

impl KernelSource<'_> {
    /// Returns the cache key of this source.
    #[must_use]
    pub fn to_content(&self) -> KernelContent {
        KernelContent {
            wgsl: self.wgsl.to_owned(),
            entry_point: self.entry_point.to_owned(),
            overrides: self.overrides.iter().map(|(name, v)| ((*name).to_owned(), v.to_bits())).collect(),
            zero_workgroup_memory: self.zero_workgroup_memory,
        }
    }
}

/// Handle of a compiled kernel. The backend keeps the kernel for its whole lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub u32);

/// Arguments of one kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Kernel to launch.
    pub kernel: KernelId,
    /// Storage bindings, in order. A slice that the kernel writes must not overlap any other slice.
    pub bindings: &'a [Slice],
    /// Bytes of the uniform block in WGSL's layout; empty if the kernel has none.
    pub params: &'a [u8],
    /// Workgroups in x, y and z: each at least 1 and at most `Limits::max_workgroups_per_dim`.
    pub groups: [u32; 3],
}

/// Copy to the host that was enqueued and may not be complete.
pub trait PendingDownload: Send {
    /// Waits for the copy, and moves its bytes to `data`, whose length must be that of the copied slice. Blocks.
    fn finish(self: Box<Self>, data: &mut [u8]) -> Result<()>;

    /// Calls `done` with the `bytes` bytes of the copied slice, once the copy is complete.
    ///
    /// The default implementation blocks until then. A backend for a platform that cannot block calls `done` later.
    fn finish_then(self: Box<Self>, bytes: usize, done: Box<dyn FnOnce(Result<Vec<u8>>) + Send>) {
        let mut data = vec![0; bytes];
        done(self.finish(&mut data).map(|()| data));
    }
}

/// Completed download of a backend that reads at once.
impl PendingDownload for Vec<u8> {
    fn finish(self: Box<Self>, data: &mut [u8]) -> Result<()> {
        data.copy_from_slice(&self);
        Ok(())
    }
}

/// Path of a copy between two devices: see [`Backend::copy_from_peer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerCopy {
    /// Nothing was enqueued, because neither the backend nor its driver copies between these devices.
    #[default]
    Declined,
    /// The copy goes over the link between the devices. No byte passes through host memory.
    Direct,
    /// The driver leads the copy through host memory, because the devices have no link.
    Staged,
}

/// Memory and streams of a backend's queue that other libraries of the process use directly, as DLPack describes.
pub trait ForeignAccess {
    /// Returns DLPack's type and index of the device.
    fn dlpack_device(&self) -> (i32, i32);
    /// Returns the address of a slice.
    fn address(&self, slice: Slice) -> u64;
    /// Returns the slice of `bytes` at an address of another library. Its offset tells the alignment.
    fn slice_at(&self, address: u64, bytes: u64) -> Slice;
    /// Submits everything enqueued so far, and returns the handle of the queue's stream.
    fn stream(&self) -> Result<u64>;
    /// Makes a stream wait for everything enqueued so far in this queue.
    ///
    /// # Safety
    /// `stream` is a live stream of this device.
    unsafe fn signal_stream(&self, stream: u64) -> Result<()>;
    /// Makes later work of this queue wait for everything enqueued so far in a stream.
    ///
    /// # Safety
    /// `stream` is a live stream of this device.
    unsafe fn wait_for_stream(&self, stream: u64) -> Result<()>;
    /// Waits for all work on the device, also that of other libraries. Blocks.
    fn synchronize_context(&self) -> Result<()>;
}

/// GPU API, or an imitation of one. Segments, fences and memory belong to the supertrait.
pub trait Backend: SegmentSource {
    /// Returns the description of the device.
    fn info(&self) -> &DeviceInfo;

    /// Compiles a kernel or loads it from the backend's disk cache. A backend may continue to compile after
    /// it returns. Later work on a queue that launched the kernel then waits. A compile error is reported by
    /// the next call that waits for the device.
    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId>;
    /// Waits until a kernel is compiled, and returns its compile error. Blocks. A backend that wraps another one
    /// forwards this call.
    fn wait_compiled(&self, kernel: KernelId) -> Result<()> {
        let _ = kernel;
        Ok(())
    }
    /// Enqueues a command. Returns `false` if the backend declines a call of a library, for which the core then
    /// runs its own kernels. A backend without a library declines all of them, and no other commands.
    ///
    /// A fill sets every 32-bit word of its destination. A copy is within the device, or between the device and
    /// memory of [`alloc_host`](Self::alloc_host). Its ranges have equal lengths and do not overlap.
    fn enqueue(&self, command: &Command<'_>) -> Result<bool>;
    /// Enqueues [`Command::Launch`].
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.enqueue(&Command::Launch(*launch)).map(drop)
    }
    /// Enqueues [`Command::Copy`].
    fn copy(&self, dst: Slice, src: Slice) -> Result<()> {
        self.enqueue(&Command::Copy { dst, src }).map(drop)
    }
    /// Enqueues [`Command::Fill`].
    fn fill(&self, dst: Slice, word: u32) -> Result<()> {
        self.enqueue(&Command::Fill { dst, word }).map(drop)
    }

    /// Enqueues a copy from the host. The lengths must be equal. The caller may reuse `data` on return.
    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()>;
    /// Copies to the host after all previously enqueued work. The lengths must be equal. Blocks.
    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()>;
    /// Enqueues a copy to the host after all previously enqueued work, for a caller that waits elsewhere.
    ///
    /// The default implementation copies at once, and blocks.
    fn start_download(&self, src: Slice) -> Result<Box<dyn PendingDownload>> {
        let mut data = vec![0; src.bytes as usize];
        self.download(src, &mut data)?;
        Ok(Box::new(data))
    }
    /// Calls `done` once the device has passed `fence`.
    ///
    /// The default implementation blocks until then. A backend for a platform that cannot block calls `done` later.
    fn wait_fence_then(&self, fence: Fence, done: Box<dyn FnOnce(Result<()>) + Send>) {
        done(self.wait_fence(fence).map_err(Into::into));
    }
    /// Enqueues a copy from memory of another device to this one. The host does not wait.
    ///
    /// `source` is a queue of the other device. The copy comes after all work enqueued so far in both queues. Later
    /// work of both queues waits, on the devices, until the copy is complete. So memory of either side may be reused
    /// by the next call on its own queue. A backend that cannot copy from `source` enqueues nothing, and returns
    /// [`PeerCopy::Declined`]. The lengths must be equal.
    fn copy_from_peer(&self, dst: Slice, source: &dyn Backend, src: Slice) -> Result<PeerCopy> {
        let _ = (dst, source, src);
        Ok(PeerCopy::Declined)
    }
    /// Submits everything enqueued so far to the device, without waiting.
    fn flush(&self) -> Result<()>;

    /// Enqueues a timestamp query; returns `None` if the device has no clock.
    fn record_timestamp(&self) -> Result<Option<TimestampId>> {
        Ok(None)
    }
    /// Returns the timestamps of all queues since the last call, in nanoseconds on one clock, indexed by
    /// [`TimestampId`]. Blocks.
    fn read_timestamps(&self) -> Result<Vec<f64>> {
        Ok(Vec::new())
    }

    /// Returns a backend for one of the device's [queues](SegmentSource::queue_count), over the same segments
    /// and kernels. Returns `None` if the device has one queue.
    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        let _ = number;
        Ok(None)
    }
    /// Reports whether [`alloc_host`](Self::alloc_host) is supported.
    fn supports_pinned_host(&self) -> bool {
        false
    }
    /// Allocates page-locked host memory that the device copies from and to directly. The segment may only be
    /// used by [`copy`](Self::copy).
    fn alloc_host(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        let _ = bytes;
        let detail = "this backend has no memory of the host that the device reaches".to_owned();
        Err(SourceError::Driver { call: "alloc_host", detail })
    }
    /// Frees memory of [`alloc_host`](Self::alloc_host). Every use must have been fenced.
    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        let _ = segment;
        Ok(())
    }

    /// Returns the backend's own type, for interfaces that only this backend has.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
    /// Returns access to memory and streams for other libraries of the process.
    fn foreign_access(&self) -> Option<&dyn ForeignAccess> {
        None
    }
    /// Returns the calls of a library that [`enqueue`](Self::enqueue) accepts now.
    fn library_features(&self) -> LibraryFeatures {
        LibraryFeatures::default()
    }
    /// Prepares commands that this queue will run repeatedly, so that they are cheaper to enqueue. Returns
    /// `None` if the backend has no such form. Enqueues nothing.
    ///
    /// Memory that the commands name must not move until the result is dropped. Each command must have run
    /// before with the same addresses.
    fn prepare_commands(&self, commands: &[Command<'_>]) -> Result<Option<Box<dyn CommandSequence>>> {
        let _ = commands;
        Ok(None)
    }
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} {} ({})", self.backend, self.index, self.name, self.driver)
    }
}

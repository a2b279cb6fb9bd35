//! Null device, which counts memory and runs nothing. A step makes the same allocations from the same pool as
//! on a real device.

use std::any::Any;
use std::sync::Mutex;

use super::{
    Backend, Command, DeviceInfo, Epilogue, Features, KernelId, KernelSource, LibraryFeatures, Limits,
    MAX_QUEUES, MatmulCall, PeakRates, PeerCopy, Slice,
};
use crate::error::Result;
use crate::forward_backend;
use crate::memory::Config;
use crate::memory::counting_source::CountingSource;
use crate::memory::source::{
    DeviceMemory, Fence, PageRemap, SegmentId, SegmentSource, SourceError, SourceLimits, VirtualMemory,
};
use crate::sync::LockUnpoisoned;

/// Card that the null device imitates. [`CardProfile::from_card`] has known cards,
/// [`CardProfile::from_device`] describes an open device.
#[derive(Clone, Debug, PartialEq)]
pub struct CardProfile {
    /// Name of the card.
    pub name: String,
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// Bytes that the driver and its libraries use in addition to the pool.
    pub overhead_bytes: u64,
    /// If true, the card is a software driver, for which operations choose other kernels.
    pub is_software: bool,
    /// Calls that the vendor's library supports.
    pub library: LibraryFeatures,
    /// Number of concurrent queues.
    pub queues: u8,
    /// Alignment, size limits and virtual memory of segments.
    pub source_limits: SourceLimits,
    /// Optional capabilities that kernels may use.
    pub features: Features,
    /// Limits of kernel launches.
    pub limits: Limits,
    /// Configuration of the pool.
    pub config: Config,
    /// Peak rates, for time estimates.
    pub speed: CardSpeed,
}

impl CardProfile {
    /// Returns the bytes available to the pool.
    #[must_use]
    pub fn available_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.overhead_bytes)
    }

    /// Returns the bytes that a pool may take: the available bytes, within the limits of the configuration.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        let limit = self.config.pool_limit(Some(self.total_bytes));
        limit.unwrap_or(u64::MAX).min(self.available_bytes())
    }
}

/// Peak rates per second according to the vendor, to compare plans with each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CardSpeed {
    /// Floating-point operations of f32 matrix products.
    pub flops: f64,
    /// Floating-point operations of f16 and bf16 matrix products.
    pub half_flops: f64,
    /// Bytes of device memory read or written.
    pub memory_bandwidth: f64,
    /// Kernel launches by the host.
    pub launches_per_second: f64,
    /// Bytes copied between host and device.
    pub host_bandwidth: f64,
}

impl Default for CardProfile {
    /// Returns a card of 80 GiB with virtual memory and without a library, as through CUDA. Invalid
    /// environment settings are ignored here; opening a device and dry runs report them.
    fn default() -> Self {
        let total = 80 << 30;
        Self {
            name: "null".into(),
            total_bytes: total,
            overhead_bytes: 0,
            is_software: false,
            library: LibraryFeatures::default(),
            queues: MAX_QUEUES,
            source_limits: SourceLimits {
                alignment: 256,
                max_segment: total,
                virtual_memory: Some(VirtualMemory { granularity: 2 << 20, reservation: total / 8 * 9 }),
            },
            features: Features {
                f16: true,
                f64: true,
                i64: true,
                i16: true,
                subgroups: true,
                f64_math: true,
                cooperative_f16: false,
                cooperative_bf16: false,
                cooperative_side: 0,
            },
            limits: Limits {
                max_binding_bytes: 1 << 40,
                max_bindings: 32,
                max_workgroup_size: 1024,
                max_workgroup_memory: 227 << 10,
                max_workgroups_per_dim: 65_535,
                subgroup_size: (32, 32),
                max_params_bytes: 4096,
                max_loop_iterations: u32::MAX,
            },
            config: Config::from_env().unwrap_or_default(),
            speed: CardSpeed {
                flops: 67e12,
                half_flops: 990e12,
                memory_bandwidth: 3.35e12,
                launches_per_second: 250e3,
                host_bandwidth: 50e9,
            },
        }
    }
}

/// Estimated work of a null device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkEstimate {
    /// Number of kernels, library products, fills and copies.
    pub launches: u64,
    /// Bytes read and written if each launch accesses its bindings once.
    pub bytes: u64,
    /// Floating-point operations of matrix products.
    pub flops: f64,
    /// Estimated time: for each launch, the longest of its memory, arithmetic and launch times at the
    /// profile's [`CardSpeed`].
    pub seconds: f64,
    /// Time of copies between host and device, not included in `seconds`.
    pub host_seconds: f64,
}

impl std::ops::Sub for WorkEstimate {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            launches: self.launches - before.launches,
            bytes: self.bytes - before.bytes,
            flops: self.flops - before.flops,
            seconds: self.seconds - before.seconds,
            host_seconds: self.host_seconds - before.host_seconds,
        }
    }
}

/// Kernel that the null device was asked to compile.
#[derive(Clone, Debug, PartialEq)]
pub struct NullKernel {
    /// Label of the kernel.
    pub label: String,
    /// WGSL module.
    pub wgsl: String,
    /// Name of the entry point.
    pub entry_point: String,
    /// Values of `override` constants.
    pub overrides: Vec<(String, f64)>,
    /// If true, workgroup memory is zero-initialised.
    pub zero_workgroup_memory: bool,
}

/// Matrix product that the library declined. The next kernel computes it, so that kernel's time includes the
/// product.
#[derive(Clone, Copy, Debug, Default)]
struct DeclinedMatmul {
    flops: f64,
    is_16_bit: bool,
}

/// Backend of the null device; see the [module](self).
#[derive(Debug)]
pub struct NullBackend {
    info: DeviceInfo,
    profile: CardProfile,
    memory: CountingSource,
    totals: Mutex<(WorkEstimate, DeclinedMatmul)>,
    host_segments: Mutex<rustc_hash::FxHashSet<u64>>,
    kernels: Mutex<Vec<NullKernel>>,
}

impl NullBackend {
    /// Creates a device with this profile.
    #[must_use]
    pub fn new(profile: CardProfile) -> Self {
        let info = DeviceInfo {
            backend: "null",
            index: 0,
            name: profile.name.clone(),
            driver: "none".into(),
            software: profile.is_software,
            features: profile.features,
            limits: profile.limits,
            peak_rates: PeakRates::default(),
            paths: Vec::new(),
        };
        Self {
            memory: CountingSource::new(
                profile.source_limits,
                profile.queues,
                profile.total_bytes,
                profile.available_bytes(),
            ),
            info,
            profile,
            totals: Mutex::default(),
            host_segments: Mutex::default(),
            kernels: Mutex::default(),
        }
    }

    /// Returns the estimated work so far.
    #[must_use]
    pub fn estimated_work(&self) -> WorkEstimate {
        self.totals.lock_unpoisoned().0
    }

    fn add_work(&self, bytes: u64, product: Option<DeclinedMatmul>) {
        let (work, waiting) = &mut *self.totals.lock_unpoisoned();
        let DeclinedMatmul { flops, is_16_bit: half } = product.unwrap_or_else(|| std::mem::take(waiting));
        let speed = &self.profile.speed;
        let rate = if half { speed.half_flops } else { speed.flops };
        work.launches += 1;
        work.bytes += bytes;
        work.flops += flops;
        work.seconds +=
            (bytes as f64 / speed.memory_bandwidth).max(flops / rate).max(1.0 / speed.launches_per_second);
    }

    fn add_copy(&self, dst: Slice, src: Slice) {
        let host = self.host_segments.lock_unpoisoned();
        if [dst, src].iter().any(|slice| host.contains(&slice.segment.0)) {
            self.totals.lock_unpoisoned().0.host_seconds +=
                src.bytes as f64 / self.profile.speed.host_bandwidth;
            return;
        }
        drop(host);
        self.add_work(dst.bytes + src.bytes, Some(DeclinedMatmul::default()));
    }

    /// Returns every kernel that was requested, so that a test can compile all of them on a real device.
    #[must_use]
    pub fn compiled_kernels(&self) -> Vec<NullKernel> {
        self.kernels.lock_unpoisoned().clone()
    }

    fn memory(&self) -> &CountingSource {
        &self.memory
    }
}

impl SegmentSource for NullBackend {
    forward_backend! {
        memory: limits device_memory is_device_memory alloc_segment free_segment reserve_addresses
            free_addresses unmap remap map_again unmap_again queue_count record_fence is_fence_signaled wait_fence
    }
}

impl Backend for NullBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId> {
        let mut compiled = self.kernels.lock_unpoisoned();
        compiled.push(NullKernel {
            label: source.label.to_owned(),
            wgsl: source.wgsl.to_owned(),
            entry_point: source.entry_point.to_owned(),
            overrides: source.overrides.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect(),
            zero_workgroup_memory: source.zero_workgroup_memory,
        });
        Ok(KernelId(compiled.len() as u32 - 1))
    }
    fn enqueue(&self, command: &Command<'_>) -> Result<bool> {
        let library = &self.profile.library;
        let product = |flops, is_16_bit| DeclinedMatmul { flops, is_16_bit };
        let (is_accepted, bytes, product) = match *command {
            Command::Launch(launch) => {
                self.add_work(launch.bindings.iter().map(|b| b.bytes).sum(), None);
                return Ok(true);
            }
            Command::Copy { dst, src } => {
                self.add_copy(dst, src);
                return Ok(true);
            }
            Command::Fill { dst, .. } => (true, dst.bytes, DeclinedMatmul::default()),
            Command::Matmul(call) => {
                let MatmulCall { m, n, k, batch, .. } = *call;
                let flops = 2.0 * [m, n, k, batch].map(|x| x as f64).iter().product::<f64>();
                let bytes = batch * (m * k + k * n + m * n) * call.dtype.size() as u64;
                (accepts_matmul(library, call), bytes, product(flops, call.dtype.size() <= 2))
            }
            Command::Attention(call) => {
                let is_16_bit = call.dtype.size() == 2;
                (library.matmul && is_16_bit, call.bytes(), product(call.flops(), is_16_bit))
            }
            Command::Convolution(call) => {
                let is_accepted = library.convolution && call.is_supported();
                (is_accepted, call.bytes(), product(call.flops() as f64, true))
            }
            Command::BatchedMatmul(call) => {
                let is_accepted = library.batched_matmul && call.tiling().is_some();
                (is_accepted, call.bytes(), product(call.flops() as f64, true))
            }
            Command::Recurrent(call) => {
                let is_accepted = library.recurrent && call.tiling().is_some();
                (is_accepted, call.bytes(), product(call.flops() as f64, true))
            }
        };
        if is_accepted {
            self.add_work(bytes, Some(product));
        } else if matches!(command, Command::Matmul(_) | Command::Attention(_)) {
            // The products that replace a batch, a convolution or a recurrent layer count their own operations.
            self.totals.lock_unpoisoned().1 = product;
        }
        Ok(is_accepted)
    }
    fn upload(&self, _dst: Slice, _data: &[u8]) -> Result<()> {
        Ok(())
    }
    fn download(&self, _src: Slice, data: &mut [u8]) -> Result<()> {
        // The null device has no contents; zeros let a loop that prints its loss run.
        data.fill(0);
        Ok(())
    }
    fn copy_from_peer(&self, dst: Slice, source: &dyn Backend, src: Slice) -> Result<PeerCopy> {
        if !source.as_any().is_some_and(|source| source.is::<Self>()) {
            return Ok(PeerCopy::Declined);
        }
        self.add_work(dst.bytes + src.bytes, Some(DeclinedMatmul::default()));
        Ok(PeerCopy::Direct)
    }
    fn flush(&self) -> Result<()> {
        Ok(())
    }
    fn supports_pinned_host(&self) -> bool {
        self.profile.speed.host_bandwidth > 0.0
    }
    fn alloc_host(&self, _bytes: u64) -> Result<SegmentId, SourceError> {
        let id = self.memory.next_id();
        self.host_segments.lock_unpoisoned().insert(id.0);
        Ok(id)
    }
    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.host_segments.lock_unpoisoned().remove(&segment.0);
        Ok(())
    }
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
    fn library_features(&self) -> LibraryFeatures {
        self.profile.library
    }
}

/// Reports whether a library with these features computes a product.
fn accepts_matmul(library: &LibraryFeatures, call: &MatmulCall) -> bool {
    let is_missing = (call.dtype.is_storage_only() && !library.f8_matmul)
        || (matches!(call.epilogue, Epilogue::GeluGrad { .. }) && !library.gelu_grad_epilogue);
    library.matmul
        && !is_missing
        && call.has_supported_dtypes()
        && call.is_row_or_column_major()
        && call.supports_epilogue()
}

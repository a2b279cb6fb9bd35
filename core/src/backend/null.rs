//! The null device: it counts memory and runs nothing. A step that runs on it goes through the same pool with the same
//! sizes as on a real device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{
    AttentionCall, Backend, DeviceInfo, Epilogue, Features, KernelId, KernelSource, Launch, Limits,
    MAX_QUEUES, MatmulCall, Peak, Slice,
};
use crate::error::Result;
use crate::memory::Config;
use crate::memory::source::{
    DeviceMemory, Fence, SegmentId, SegmentSource, SourceError, SourceLimits, VirtualMemory,
};

/// What the null device plays. [`Profile::card`] has real ones, [`Profile::of`] is that of a device at hand.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Name of the card.
    pub name: String,
    /// Its memory in bytes.
    pub total: u64,
    /// What the driver and its libraries take of it beside the pool.
    pub overhead: u64,
    /// Whether it is a program that plays a GPU: kernels are chosen otherwise there.
    pub software: bool,
    /// Whether the vendor's library multiplies matrices: the core's own kernels take scratch memory, the library none
    /// of the pool's.
    pub library: bool,
    /// How many queues run side by side.
    pub queues: u8,
    /// How its memory comes in segments.
    pub source: SourceLimits,
    /// What its kernels may use.
    pub features: Features,
    /// What its launches must keep within.
    pub limits: Limits,
    /// How its pool is configured.
    pub config: Config,
    /// How fast it is.
    pub speed: Speed,
}

impl Profile {
    /// What a pool can have of the memory.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.total.saturating_sub(self.overhead)
    }
}

/// What a card does in a second, as its maker states it: the peaks, for comparisons of one plan with another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Floating-point operations of matrix products, in f32.
    pub flops: f64,
    /// The same in f16 and bf16.
    pub half_flops: f64,
    /// Bytes of its memory.
    pub bytes: f64,
    /// Launches of kernels by the host.
    pub launches: f64,
    /// Bytes copied from or to memory of the host.
    pub host: f64,
}

impl Default for Profile {
    /// A card of 80 GiB with virtual memory and without a library, as through CUDA. Its pool is configured by the environment as far as that
    /// can be understood; opening a device and dry runs fail where it cannot.
    fn default() -> Self {
        let total = 80 << 30;
        Self {
            name: "null".into(),
            total,
            overhead: 0,
            software: false,
            library: false,
            queues: MAX_QUEUES,
            source: SourceLimits {
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
                f8: false,
                gelu_grad: false,
            },
            limits: Limits {
                max_binding: 1 << 40,
                max_bindings: 32,
                max_workgroup_size: 1024,
                max_workgroup_memory: 227 << 10,
                max_groups: 65_535,
                subgroup_size: (32, 32),
                max_params: 4096,
                max_turns: u32::MAX,
            },
            config: Config::from_env().unwrap_or_default(),
            speed: Speed { flops: 67e12, half_flops: 990e12, bytes: 3.35e12, launches: 250e3, host: 50e9 },
        }
    }
}

/// What a null device would have done.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Kernels, products of the library, fills and copies.
    pub launches: u64,
    /// Bytes that they read and write, if each touches all that it binds once.
    pub bytes: u64,
    /// Floating-point operations of matrix products.
    pub flops: f64,
    /// The time they take: each the longest of its bytes, its operations and its launch, at the profile's [`Speed`].
    pub seconds: f64,
    /// The time that copies from and to memory of the host take, beside those.
    pub host_seconds: f64,
}

impl std::ops::Sub for Work {
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

/// A kernel that the null device was asked to compile.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// Its label.
    pub label: String,
    /// Its WGSL.
    pub wgsl: String,
    /// Its entry point.
    pub entry: String,
    /// The values of its override constants.
    pub overrides: Vec<(String, f64)>,
    /// Whether its workgroup memory starts as zeros.
    pub zeroed: bool,
}

/// A matrix product that the library declined: the kernel that follows makes it.
#[derive(Clone, Copy, Debug, Default)]
struct Product {
    flops: f64,
    half: bool,
}

/// See the module.
#[derive(Debug)]
pub struct NullBackend {
    info: DeviceInfo,
    profile: Profile,
    used: AtomicU64,
    next: AtomicU64,
    work: Mutex<(Work, Product)>,
    sizes: Mutex<rustc_hash::FxHashMap<u64, u64>>,
    /// The segments that are the host's.
    host: Mutex<rustc_hash::FxHashSet<u64>>,
    compiled: Mutex<Vec<Compiled>>,
}

impl NullBackend {
    /// A device of this profile.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        let info = DeviceInfo {
            backend: "null",
            index: 0,
            name: profile.name.clone(),
            driver: "none".into(),
            software: profile.software,
            features: profile.features,
            limits: profile.limits,
            peak: Peak::default(),
        };
        Self {
            info,
            profile,
            used: AtomicU64::new(0),
            next: AtomicU64::new(1),
            work: Mutex::default(),
            sizes: Mutex::default(),
            host: Mutex::default(),
            compiled: Mutex::default(),
        }
    }

    /// What it would have done so far.
    #[must_use]
    pub fn work(&self) -> Work {
        self.counts().0
    }

    fn counts(&self) -> MutexGuard<'_, (Work, Product)> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, bytes: u64, product: Option<Product>) {
        let (work, waiting) = &mut *self.counts();
        let Product { flops, half } = product.unwrap_or_else(|| std::mem::take(waiting));
        let speed = &self.profile.speed;
        let rate = if half { speed.half_flops } else { speed.flops };
        work.launches += 1;
        work.bytes += bytes;
        work.flops += flops;
        work.seconds += (bytes as f64 / speed.bytes).max(flops / rate).max(1.0 / speed.launches);
    }

    /// Every kernel that would have been compiled: with it, a test compiles all of them for real.
    #[must_use]
    pub fn compiled(&self) -> Vec<Compiled> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn take(&self, bytes: u64) -> Result<(), SourceError> {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let room = self.profile.room();
        if before.saturating_add(bytes) > room {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            let detail = format!("{before} of {room} bytes are in use");
            return Err(SourceError::OutOfMemory { bytes, detail });
        }
        Ok(())
    }

    fn host(&self) -> MutexGuard<'_, rustc_hash::FxHashSet<u64>> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sizes(&self) -> MutexGuard<'_, rustc_hash::FxHashMap<u64, u64>> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SegmentSource for NullBackend {
    fn limits(&self) -> SourceLimits {
        self.profile.source
    }
    fn device_memory(&self) -> DeviceMemory {
        let used = self.used.load(Ordering::Relaxed);
        DeviceMemory { total: Some(self.profile.total), free: Some(self.profile.room() - used) }
    }
    fn is_device_memory(&self) -> bool {
        false
    }
    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.take(bytes)?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.sizes().insert(id, bytes);
        Ok(SegmentId(id))
    }
    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError> {
        let bytes = self.sizes().remove(&segment.0).unwrap_or(0);
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }
    fn reserve_addresses(&self, _bytes: u64) -> Result<SegmentId, SourceError> {
        Ok(SegmentId(self.next.fetch_add(1, Ordering::Relaxed)))
    }
    fn free_addresses(&self, _segment: SegmentId) -> Result<(), SourceError> {
        Ok(())
    }
    fn map(&self, _segment: SegmentId, _offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.take(bytes)
    }
    fn unmap(&self, _segment: SegmentId, _offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }
    fn queue_count(&self) -> u8 {
        self.profile.queues
    }
    fn record_fence(&self) -> Result<Fence, SourceError> {
        Ok(Fence(0))
    }
    fn is_fence_signaled(&self, _fence: Fence) -> Result<bool, SourceError> {
        Ok(true)
    }
    fn wait_fence(&self, _fence: Fence) -> Result<(), SourceError> {
        Ok(())
    }
}

impl Backend for NullBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        compiled.push(Compiled {
            label: source.label.to_owned(),
            wgsl: source.wgsl.to_owned(),
            entry: source.entry.to_owned(),
            overrides: source.overrides.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect(),
            zeroed: source.zeroed,
        });
        Ok(KernelId(compiled.len() as u32 - 1))
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.count(launch.bindings.iter().map(|b| b.bytes).sum(), None);
        Ok(())
    }
    fn upload(&self, _dst: Slice, _data: &[u8]) -> Result<()> {
        Ok(())
    }
    fn download(&self, _src: Slice, data: &mut [u8]) -> Result<()> {
        // The null device has no contents; zeros keep a dry run of a loop that prints its loss alive.
        data.fill(0);
        Ok(())
    }
    fn copy(&self, dst: Slice, src: Slice) -> Result<()> {
        let host = self.host();
        if [dst, src].iter().any(|slice| host.contains(&slice.segment.0)) {
            self.counts().0.host_seconds += src.bytes as f64 / self.profile.speed.host;
            return Ok(());
        }
        drop(host);
        self.count(dst.bytes + src.bytes, Some(Product::default()));
        Ok(())
    }
    fn fill(&self, dst: Slice, _word: u32) -> Result<()> {
        self.count(dst.bytes, Some(Product::default()));
        Ok(())
    }
    fn flush(&self) -> Result<()> {
        Ok(())
    }
    fn reaches_host(&self) -> bool {
        self.profile.speed.host > 0.0
    }
    fn alloc_host(&self, _bytes: u64) -> Result<SegmentId, SourceError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.host().insert(id);
        Ok(SegmentId(id))
    }
    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.host().remove(&segment.0);
        Ok(())
    }
    fn matmul(&self, call: &MatmulCall) -> Result<bool> {
        let MatmulCall { m, n, k, batch, .. } = *call;
        let product = Product {
            flops: 2.0 * [m, n, k, batch].map(|x| x as f64).iter().product::<f64>(),
            half: call.dtype.size() <= 2,
        };
        let stored = call.dtype.is_storage_only() && !self.info.features.f8;
        let missing = matches!(call.epilogue, Epilogue::GeluGrad { .. }) && !self.info.features.gelu_grad;
        let takes = !stored && !missing && call.of_floats() && call.by_lines() && call.takes_epilogue();
        if self.profile.library && takes {
            let elements = batch * (m * k + k * n + m * n);
            self.count(elements * call.dtype.size() as u64, Some(product));
            return Ok(true);
        }
        self.counts().1 = product;
        Ok(false)
    }
    fn attention(&self, call: &AttentionCall) -> Result<bool> {
        let product = Product { flops: call.flops(), half: call.dtype.size() == 2 };
        if self.profile.library && product.half {
            self.count(call.bytes(), Some(product));
            return Ok(true);
        }
        self.counts().1 = product;
        Ok(false)
    }
    fn multiplies(&self) -> bool {
        self.profile.library
    }
}

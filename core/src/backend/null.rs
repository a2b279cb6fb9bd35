//! The null device: it counts memory and runs nothing. A step that runs on it goes through the same pool with the same
//! sizes as on a real device.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{Backend, DeviceInfo, Features, KernelId, KernelSource, Launch, Limits, MatmulCall, Slice};
use crate::error::Result;
use crate::memory::source::{
    DeviceMemory, Fence, SegmentId, SegmentSource, SourceError, SourceLimits, VirtualMemory,
};

/// What the null device plays.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Name of the card.
    pub name: String,
    /// Its memory in bytes.
    pub total: u64,
    /// How its memory comes in segments.
    pub source: SourceLimits,
    /// What its kernels may use.
    pub features: Features,
    /// What its launches must keep within.
    pub limits: Limits,
}

impl Default for Profile {
    /// A card of 80 GiB with virtual memory, as through CUDA.
    fn default() -> Self {
        let total = 80 << 30;
        Self {
            name: "null".into(),
            total,
            source: SourceLimits {
                alignment: 512,
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
            },
            limits: Limits {
                max_binding: 1 << 40,
                max_bindings: 16,
                max_workgroup_size: 1024,
                max_workgroup_memory: 48 << 10,
                max_groups: 65_535,
                subgroup_size: (32, 32),
                max_params: 4096,
            },
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
}

/// See the module.
#[derive(Debug)]
pub struct NullBackend {
    info: DeviceInfo,
    profile: Profile,
    used: AtomicU64,
    next: AtomicU64,
    launches: AtomicU32,
    sizes: Mutex<rustc_hash::FxHashMap<u64, u64>>,
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
            software: true,
            features: profile.features,
            limits: profile.limits,
        };
        Self {
            info,
            profile,
            used: AtomicU64::new(0),
            next: AtomicU64::new(1),
            launches: AtomicU32::new(0),
            sizes: Mutex::default(),
            compiled: Mutex::default(),
        }
    }

    /// How many kernels would have run.
    #[must_use]
    pub fn launches(&self) -> u32 {
        self.launches.load(Ordering::Relaxed)
    }

    /// Every kernel that would have been compiled: with it, a test compiles all of them for real.
    #[must_use]
    pub fn compiled(&self) -> Vec<Compiled> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn take(&self, bytes: u64) -> Result<(), SourceError> {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes > self.profile.total {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            let detail = format!("{} of {} bytes are in use", before, self.profile.total);
            return Err(SourceError::OutOfMemory { bytes, detail });
        }
        Ok(())
    }

    fn sizes(&self) -> std::sync::MutexGuard<'_, rustc_hash::FxHashMap<u64, u64>> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SegmentSource for NullBackend {
    fn limits(&self) -> SourceLimits {
        self.profile.source
    }
    fn device_memory(&self) -> DeviceMemory {
        let used = self.used.load(Ordering::Relaxed);
        DeviceMemory { total: Some(self.profile.total), free: Some(self.profile.total - used) }
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
    fn reserve(&self, _bytes: u64) -> Result<SegmentId, SourceError> {
        Ok(SegmentId(self.next.fetch_add(1, Ordering::Relaxed)))
    }
    fn unreserve(&self, _segment: SegmentId) -> Result<(), SourceError> {
        Ok(())
    }
    fn map(&self, _segment: SegmentId, _offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.take(bytes)
    }
    fn unmap(&self, _segment: SegmentId, _offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }
    fn fence(&self) -> Result<Fence, SourceError> {
        Ok(Fence(0))
    }
    fn fence_done(&self, _fence: Fence) -> Result<bool, SourceError> {
        Ok(true)
    }
    fn fence_wait(&self, _fence: Fence) -> Result<(), SourceError> {
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
        });
        Ok(KernelId(compiled.len() as u32 - 1))
    }
    fn launch(&self, _launch: &Launch<'_>) -> Result<()> {
        self.launches.fetch_add(1, Ordering::Relaxed);
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
    fn copy(&self, _dst: Slice, _src: Slice) -> Result<()> {
        Ok(())
    }
    fn fill(&self, _dst: Slice, _word: u32) -> Result<()> {
        Ok(())
    }
    fn flush(&self) -> Result<()> {
        Ok(())
    }
    fn matmul(&self, _call: &MatmulCall) -> Result<bool> {
        Ok(false)
    }
}

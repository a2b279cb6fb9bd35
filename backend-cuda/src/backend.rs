//! The backend: one device, one stream.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use forebay_core::backend::{
    Backend, DeviceInfo, DeviceMemory, Features, Fence, KernelId, KernelSource, Launch, Limits, MatmulCall,
    Piece, SegmentId, SegmentSource, Slice, SourceError, SourceLimits,
};
use forebay_core::error::{Error, Result};

use crate::cache::DiskCache;
use crate::context::{Context, Stream};
use crate::driver::{Driver, Unavailable};
use crate::fences::Fences;
use crate::kernels::{Kernels, MAX_BINDINGS, MAX_PARAMS};
use crate::matmul::Matmul;
use crate::staging::{Downloads, Uploads};
use crate::switches::is_set;
use crate::virtual_memory::AddressSpace;

/// Blocks start at multiples of this: what cuBLASLt's fastest kernels and 16-byte loads want, and wgpu's too.
const ALIGNMENT: u64 = 256;

/// A CUDA device.
///
/// All its work goes to one stream of its own, in the order of the calls. It uses the device's primary context, as
/// the other CUDA libraries of a process do, and may be called from any thread.
pub struct CudaBackend {
    info: DeviceInfo,
    total: u64,
    fences: Fences,
    kernels: Kernels,
    matmul: Matmul,
    uploads: Mutex<Uploads>,
    downloads: Mutex<Downloads>,
    /// `None` where segments cannot grow.
    addresses: Option<AddressSpace>,
    stream: Stream,
    context: Arc<Context>,
}

impl CudaBackend {
    /// How many devices there are; why there are none, if CUDA cannot be used at all.
    pub fn count() -> Result<usize, Unavailable> {
        Driver::load()?.device_count().map_err(Unavailable::from)
    }

    /// Opens device `index`.
    pub fn open(index: usize) -> Result<Arc<dyn Backend>> {
        Self::new(index)
            .map(|backend| Arc::new(backend) as Arc<dyn Backend>)
            .map_err(|error| Error::NoDevice { asked: format!("cuda:{index}"), reason: error.to_string() })
    }

    /// Opens device `index`, with an error that says apart what [`open`](Self::open) puts into words.
    pub fn new(index: usize) -> Result<Self, Unavailable> {
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
            },
            limits: Limits {
                max_binding: total,
                max_bindings: MAX_BINDINGS as u32,
                max_workgroup_size: device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
                max_workgroup_memory: device
                    .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?,
                // In y and z; x could have more, but one rule is simpler than two.
                max_groups: 65_535,
                subgroup_size: (warp, warp),
                max_params: MAX_PARAMS as u32,
            },
        };
        let context = Context::retain(device)?;
        let stream = Stream::new(&context)?;
        let addresses = match is_set("FOREBAY_CUDA_VMM") {
            Some(false) => None,
            _ => AddressSpace::new(&context, total)?,
        };
        Ok(Self {
            info,
            total,
            fences: Fences::default(),
            kernels: Kernels::new(arch, DiskCache::from_env()),
            matmul: Matmul::default(),
            uploads: Mutex::default(),
            downloads: Mutex::default(),
            addresses,
            stream,
            context,
        })
    }

    fn addresses(&self) -> Result<&AddressSpace, SourceError> {
        self.addresses.as_ref().ok_or(SourceError::Driver {
            call: "cuMemAddressReserve",
            detail: "this device has no virtual memory management, or FOREBAY_CUDA_VMM=0 is set".to_owned(),
        })
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // The parts give their handles back on their own; work that is still running must not lose its memory. An
        // error means that the device is lost, and nothing runs.
        let _ = self.stream.synchronize();
    }
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend").field("info", &self.info).finish_non_exhaustive()
    }
}

impl SegmentSource for CudaBackend {
    fn limits(&self) -> SourceLimits {
        SourceLimits {
            alignment: ALIGNMENT,
            max_segment: self.total,
            virtual_memory: self.addresses.as_ref().map(|addresses| addresses.limits),
        }
    }

    fn device_memory(&self) -> DeviceMemory {
        match self.context.memory() {
            Ok((free, total)) => DeviceMemory { total: Some(total), free: Some(free) },
            Err(_) => DeviceMemory { total: Some(self.total), free: None },
        }
    }

    fn alloc_segment(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.context.alloc(bytes).map(SegmentId)
    }

    fn free_segment(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.context.free(segment.0)
    }

    fn reserve(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        self.addresses()?.reserve(bytes).map(SegmentId)
    }

    fn unreserve(&self, segment: SegmentId) -> Result<(), SourceError> {
        self.addresses()?.unreserve(segment.0)
    }

    fn map(&self, segment: SegmentId, offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.addresses()?.map(&[(segment.0 + offset, bytes, None)])
    }

    fn arrange(&self, pieces: &[Piece]) -> Result<(), SourceError> {
        let address = |(segment, offset): (SegmentId, u64)| segment.0 + offset;
        let pieces = pieces.iter().map(|p| (address(p.to), p.bytes, p.from.map(address)));
        self.addresses()?.map(&pieces.collect::<Vec<_>>())
    }

    fn unmap(&self, segment: SegmentId, offset: u64, bytes: u64) -> Result<(), SourceError> {
        self.addresses()?.unmap(segment.0 + offset, bytes)
    }

    fn fence(&self) -> Result<Fence, SourceError> {
        self.fences.record(&self.stream)
    }

    fn fence_done(&self, fence: Fence) -> Result<bool, SourceError> {
        self.fences.done(fence)
    }

    fn fence_wait(&self, fence: Fence) -> Result<(), SourceError> {
        self.fences.wait(fence)
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId> {
        self.kernels.compile(&self.context, source)
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.kernels.launch(&self.stream, launch)?;
        self.fences.enqueued();
        Ok(())
    }

    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()> {
        let mut uploads = self.uploads.lock().unwrap_or_else(PoisonError::into_inner);
        let uploaded = uploads.upload(&self.stream, address(dst), data);
        // Also where it failed: a part of it may have been enqueued.
        self.fences.enqueued();
        Ok(uploaded?)
    }

    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()> {
        let mut downloads = self.downloads.lock().unwrap_or_else(PoisonError::into_inner);
        let downloaded = downloads.download(&self.stream, address(src), data);
        self.fences.enqueued();
        Ok(downloaded?)
    }

    fn copy(&self, dst: Slice, src: Slice) -> Result<()> {
        if dst.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the core has checked that both slices lie inside their segments and do not overlap.
        unsafe { self.stream.copy(address(dst), address(src), dst.bytes.min(src.bytes)) }?;
        self.fences.enqueued();
        Ok(())
    }

    fn fill(&self, dst: Slice, word: u32) -> Result<()> {
        if dst.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the core has checked that the slice lies inside its segment; copies start at multiples of 4.
        unsafe { self.stream.fill(address(dst), word, dst.bytes / 4) }?;
        self.fences.enqueued();
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        // The driver hands work to the device as it is enqueued.
        Ok(())
    }

    fn matmul(&self, call: &MatmulCall) -> Result<bool> {
        let done = self.matmul.run(&self.stream, call)?;
        if done {
            self.fences.enqueued();
        }
        Ok(done)
    }

    fn multiplies(&self) -> bool {
        self.matmul.is_present(&self.context)
    }
}

/// Where a slice begins on the device.
fn address(slice: Slice) -> u64 {
    slice.segment.0 + slice.offset
}

//! Owned handles of the driver: context, stream, event, pinned memory, module.
//!
//! Each releases its handle when dropped and keeps the context alive until then. Errors while releasing are
//! ignored: they come from a lost device, which the next call reports.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice_attribute, CUevent, CUfunction, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchConfig, CUmodule, CUresult, CUstream,
};
use forebay_core::backend::SourceError;
use smallvec::SmallVec;

use crate::driver::{DeviceHandle, check, check_alloc};
use crate::launch_thread::LaunchThread;
use crate::settings::bool_from_env;

thread_local! {
    /// The id of the context that this crate made current on this thread last.
    static CURRENT_CONTEXT: Cell<u64> = const { Cell::new(0) };
}

/// A device's primary context, which all libraries of a process share.
#[derive(Debug)]
pub(crate) struct Context {
    raw: CUcontext,
    pub(crate) device: DeviceHandle,
    /// If true, kernels may be started while the previous kernel ends (programmatic dependent launch).
    uses_pdl: bool,
    /// Number of multiprocessors.
    pub(crate) sm_count: u32,
    /// Most bytes of shared memory of a block.
    pub(crate) max_shared_bytes: u32,
    /// Never reused, so that a thread cannot mistake a new context for a destroyed one.
    pub(crate) id: u64,
}

/// Declares handles of the driver that may be used from every thread.
macro_rules! thread_safe {
    ($($handle:ident),*) => {$(
        // SAFETY: the driver's handles may be used from every thread; the other fields are thread-safe.
        unsafe impl Send for $handle {}
        // SAFETY: as above.
        unsafe impl Sync for $handle {}
    )*};
}

thread_safe!(Context, StreamHandle, CudaEvent, Function, CudaModule);

impl Context {
    pub(crate) fn retain(device: DeviceHandle) -> Result<Arc<Self>, SourceError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle; the device came from cuDeviceGet.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device.raw) })?;
        // From sm_90 on, kernels wait for the previous kernel themselves (`shaders/cuda/pdl.cuh`).
        let uses_pdl =
            device.compute_capability()?.0 >= 9 && bool_from_env("FOREBAY_CUDA_PDL") != Some(false);
        let sm_count = device.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let max_shared_bytes =
            device.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let context = Arc::new(Self { raw, device, uses_pdl, sm_count, max_shared_bytes, id });
        context.make_current()?;
        Ok(context)
    }

    /// Makes the context current on this thread. Skips the driver call if this crate made the context current
    /// last. Other code that makes another context current must restore the previous one, as NVIDIA's
    /// libraries do.
    #[inline]
    pub(crate) fn make_current(&self) -> Result<(), SourceError> {
        if CURRENT_CONTEXT.get() == self.id {
            return Ok(());
        }
        // SAFETY: the context is retained for as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })?;
        CURRENT_CONTEXT.set(self.id);
        Ok(())
    }

    /// Returns the free and total bytes of the device.
    pub(crate) fn mem_get_info(&self) -> Result<(u64, u64), SourceError> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Lets work of this context access plain allocations of another device's context. Memory with a mapping of its
    /// own is not included. Other libraries of the process may have done so before.
    pub(crate) fn enable_peer_access(&self, owner: &Self) -> Result<(), SourceError> {
        self.make_current()?;
        // SAFETY: both contexts are retained for as long as their owners live.
        match unsafe { sys::cuCtxEnablePeerAccess(owner.raw, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => check("cuCtxEnablePeerAccess", code),
        }
    }

    /// Waits for all work of the context, also that of other libraries.
    pub(crate) fn synchronize(&self) -> Result<(), SourceError> {
        self.make_current()?;
        // SAFETY: the context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Allocates device memory and returns its address.
    pub(crate) fn alloc(&self, bytes: u64) -> Result<u64, SourceError> {
        self.make_current()?;
        let mut address = 0;
        // SAFETY: writes one address.
        check_alloc("cuMemAlloc", bytes, unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) })?;
        Ok(address)
    }

    /// Frees memory from [`alloc`](Self::alloc); waits for the device.
    pub(crate) fn free(&self, address: u64) -> Result<(), SourceError> {
        self.make_current()?;
        // SAFETY: for an address that is no allocation, the driver returns an error.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(address) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.raw) };
    }
}

/// A kernel launch without its arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelLaunch {
    pub(crate) function: Function,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    /// Bytes of shared memory in addition to the statically declared ones.
    pub(crate) dynamic_shared_bytes: u32,
}

/// The bytes of an argument, including padding.
pub(crate) type ArgBytes = [MaybeUninit<u8>];

/// Returns the bytes of an argument.
pub(crate) fn arg_bytes<T: ?Sized>(of: &T) -> &ArgBytes {
    // SAFETY: the bytes are valid for as long as the argument is borrowed, and may be uninitialised.
    unsafe { slice::from_raw_parts(ptr::from_ref(of).cast(), size_of_val(of)) }
}

/// Returns the addresses of arguments in the form that the driver expects.
pub(crate) fn arg_pointers(arguments: &[&ArgBytes]) -> SmallVec<[*mut c_void; 8]> {
    arguments.iter().map(|argument| argument.as_ptr().cast_mut().cast()).collect()
}

/// The driver's handle of a stream that does not synchronise with the default stream.
#[derive(Debug)]
pub(crate) struct StreamHandle {
    raw: CUstream,
    /// If true, kernels may be started while the previous kernel ends.
    uses_pdl: bool,
    context: Arc<Context>,
}

impl StreamHandle {
    fn new(context: &Arc<Context>, uses_pdl: bool) -> Result<Self, SourceError> {
        context.make_current()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Self { raw, uses_pdl, context: Arc::clone(context) })
    }

    /// Makes the stream's context current on this thread and returns the raw handle.
    pub(crate) fn current_raw(&self) -> Result<CUstream, SourceError> {
        self.context.make_current().map(|()| self.raw)
    }

    /// Enqueues a kernel; `arguments` are the addresses of the arguments.
    ///
    /// # Safety
    /// Same conditions as [`CudaStream::launch`].
    pub(crate) unsafe fn launch(
        &self,
        call: &KernelLaunch,
        arguments: &mut [*mut c_void],
    ) -> Result<(), SourceError> {
        let mut pdl = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: call.grid[0],
            gridDimY: call.grid[1],
            gridDimZ: call.grid[2],
            blockDimX: call.block[0],
            blockDimY: call.block[1],
            blockDimZ: call.block[2],
            sharedMemBytes: call.dynamic_shared_bytes,
            hStream: self.current_raw()?,
            attrs: &mut pdl,
            numAttrs: self.uses_pdl.into(),
        };
        // SAFETY: the caller's promise; the driver copies all arguments before it returns.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&config, call.function.0, arguments.as_mut_ptr(), ptr::null_mut())
        })
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; the driver finishes the work that is still enqueued.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// A stream, with the calls that its thread has not yet given to the driver.
#[derive(Debug)]
pub(crate) struct CudaStream {
    /// `None` for a stream that captures a graph. Declared first, so that it ends before the stream.
    thread: Option<LaunchThread>,
    handle: Arc<StreamHandle>,
    pub(crate) context: Arc<Context>,
}

impl CudaStream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, SourceError> {
        let handle = Arc::new(StreamHandle::new(context, context.uses_pdl)?);
        Ok(Self { thread: Some(LaunchThread::start(&handle)), handle, context: Arc::clone(context) })
    }

    /// Creates a stream for the capture of a graph: calls are made at once, and kernels start after the previous
    /// one has ended.
    pub(crate) fn new_for_capture(context: &Arc<Context>) -> Result<Self, SourceError> {
        let handle = Arc::new(StreamHandle::new(context, false)?);
        Ok(Self { thread: None, handle, context: Arc::clone(context) })
    }

    /// Flushes pending calls and returns the raw handle, so that later work follows all earlier work.
    pub(crate) fn flushed_handle(&self) -> Result<CUstream, SourceError> {
        self.flush_pending()?;
        self.handle.current_raw()
    }

    /// Gives the pending calls to the driver.
    #[inline]
    pub(crate) fn flush_pending(&self) -> Result<(), SourceError> {
        self.thread.as_ref().map_or(Ok(()), LaunchThread::flush_pending)
    }

    /// Makes a call that enqueues work: at once, or later on the stream's thread.
    pub(crate) fn call(
        &self,
        call: impl FnOnce(CUstream) -> Result<(), SourceError> + Send + 'static,
    ) -> Result<(), SourceError> {
        match &self.thread {
            Some(thread) => thread.call(call),
            None => call(self.handle.current_raw()?),
        }
    }

    /// Waits for everything enqueued.
    pub(crate) fn synchronize(&self) -> Result<(), SourceError> {
        self.context.make_current()?;
        // Synchronises even after an error: the caller may free memory that earlier work uses.
        let flushed = self.flush_pending();
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle.raw) }).and(flushed)
    }

    /// Enqueues a copy to the device.
    ///
    /// # Safety
    /// `src` holds `bytes` bytes, which stay there unchanged until the copy is done; `dst` holds as many on
    /// the device.
    pub(crate) unsafe fn copy_from_host(
        &self,
        dst: u64,
        src: *const u8,
        bytes: usize,
    ) -> Result<(), SourceError> {
        let raw = self.flushed_handle()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(dst, src.cast(), bytes, raw) })
    }

    /// Enqueues a copy to the host.
    ///
    /// # Safety
    /// `dst` holds `bytes` bytes, which are not accessed until the copy is done; `src` holds as many on the
    /// device.
    pub(crate) unsafe fn copy_to_host(
        &self,
        dst: *mut u8,
        src: u64,
        bytes: usize,
    ) -> Result<(), SourceError> {
        let raw = self.flushed_handle()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(dst.cast(), src, bytes, raw) })
    }

    /// Makes later work of this stream wait on the device for `event`.
    pub(crate) fn wait_event(&self, event: &CudaEvent) -> Result<(), SourceError> {
        let raw = self.flushed_handle()?;
        // SAFETY: both handles live as long as their owners.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(raw, event.raw, 0) })
    }

    /// Enqueues a copy on the device, or between device and page-locked memory: the driver infers the kind
    /// from the addresses.
    ///
    /// # Safety
    /// Both ranges lie inside segments and do not overlap.
    pub(crate) unsafe fn copy(&self, dst: u64, src: u64, bytes: u64) -> Result<(), SourceError> {
        self.call(move |raw| {
            // SAFETY: the caller's promise.
            check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(dst, src, bytes as usize, raw) })
        })
    }

    /// Enqueues a copy from this stream's device to memory of another device's context. The driver uses the link
    /// between the devices if it may access the memory over the link, and host memory otherwise.
    ///
    /// # Safety
    /// `src` lies inside memory of this stream's context, and `dst` inside memory of `owner`.
    pub(crate) unsafe fn copy_to_peer(
        &self,
        dst: u64,
        owner: &Context,
        src: u64,
        bytes: u64,
    ) -> Result<(), SourceError> {
        let raw = self.flushed_handle()?;
        // SAFETY: the caller's promise; both contexts are retained by their owners.
        check("cuMemcpyPeerAsync", unsafe {
            sys::cuMemcpyPeerAsync(dst, owner.raw, src, self.context.raw, bytes as usize, raw)
        })
    }

    /// Enqueues setting `words` 32-bit words.
    ///
    /// # Safety
    /// The range lies inside the device's segments, and `dst` is a multiple of 4.
    pub(crate) unsafe fn fill(&self, dst: u64, word: u32, words: u64) -> Result<(), SourceError> {
        self.call(move |raw| {
            // SAFETY: the caller's promise.
            check("cuMemsetD32Async", unsafe { sys::cuMemsetD32Async(dst, word, words as usize, raw) })
        })
    }

    /// Enqueues a kernel: at once, or later on the stream's thread.
    ///
    /// # Safety
    /// The arguments have the sizes of the kernel's parameters, and the addresses among them hold what the
    /// kernel accesses.
    pub(crate) unsafe fn launch(
        &self,
        call: &KernelLaunch,
        arguments: &[&ArgBytes],
    ) -> Result<(), SourceError> {
        match &self.thread {
            // SAFETY: the caller's promise.
            Some(thread) => unsafe { thread.launch(call, arguments) },
            // SAFETY: as above.
            None => unsafe { self.handle.launch(call, &mut arg_pointers(arguments)) },
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(crate) struct CudaEvent {
    raw: CUevent,
    /// Keeps the context alive.
    context: Arc<Context>,
}

impl CudaEvent {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, SourceError> {
        Self::create(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event that also records the time at which the device passes the event.
    pub(crate) fn new_timed(context: &Arc<Context>) -> Result<Self, SourceError> {
        Self::create(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn create(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self, SourceError> {
        context.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Records the event after everything enqueued so far.
    pub(crate) fn record(&self, stream: &CudaStream) -> Result<(), SourceError> {
        let stream = stream.flushed_handle()?;
        // SAFETY: both handles live as long as their owners.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream) })
    }

    /// Records the event in a stream of another library.
    ///
    /// # Safety
    /// `stream` is a live stream of this context.
    pub(crate) unsafe fn record_foreign(&self, stream: CUstream) -> Result<(), SourceError> {
        self.context.make_current()?;
        // SAFETY: the caller's promise.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream) })
    }

    /// Makes later work of a stream of another library wait for the event.
    ///
    /// # Safety
    /// `stream` is a live stream of this context.
    pub(crate) unsafe fn make_foreign_wait(&self, stream: CUstream) -> Result<(), SourceError> {
        self.context.make_current()?;
        // SAFETY: the caller's promise.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, self.raw, 0) })
    }

    /// Returns the nanoseconds from `before` to this event; both are timed and passed.
    pub(crate) fn elapsed_since(&self, before: &CudaEvent) -> Result<f64, SourceError> {
        self.context.make_current()?;
        type Elapsed = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
        let mut milliseconds = 0.0;
        // SAFETY: the symbol was found when the driver was loaded, and has this type in every version. cudarc
        // binds only the second version, which drivers before 12.8 lack. Both events are valid; the function
        // writes one float.
        let code = unsafe {
            match sys::culib().get::<Elapsed>(b"cuEventElapsedTime") {
                Ok(elapsed) => elapsed(&mut milliseconds, before.raw, self.raw),
                Err(_) => CUresult::CUDA_ERROR_NOT_FOUND,
            }
        };
        check("cuEventElapsedTime", code).map(|()| f64::from(milliseconds) * 1e6)
    }

    /// Reports whether the device has passed the event.
    pub(crate) fn is_done(&self) -> Result<bool, SourceError> {
        self.context.make_current()?;
        // SAFETY: the event lives as long as `self`.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Blocks until the device has passed the event.
    pub(crate) fn synchronize(&self) -> Result<(), SourceError> {
        self.context.make_current()?;
        // SAFETY: the event lives as long as `self`.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// Page-locked host memory, which the device accesses directly (DMA).
#[derive(Debug)]
pub(crate) struct PinnedBuffer {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the context alive.
    _context: Arc<Context>,
}

// SAFETY: plain memory, owned by this value.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, SourceError> {
        context.make_current()?;
        let mut start = ptr::null_mut();
        // SAFETY: writes one pointer.
        check_alloc("cuMemHostAlloc", bytes as u64, unsafe { sys::cuMemHostAlloc(&mut start, bytes, 0) })?;
        let start = NonNull::new(start.cast()).ok_or(SourceError::Driver {
            call: "cuMemHostAlloc",
            detail: "succeeded without returning memory".to_owned(),
        })?;
        Ok(Self { start, bytes, _context: Arc::clone(context) })
    }

    /// Returns the address, which is the same on host and device.
    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Returns a pointer to `bytes` bytes from `offset`; `None` if the range lies outside.
    fn checked_range(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        // SAFETY: inside the allocation, as was just checked.
        inside.then(|| unsafe { self.start.as_ptr().add(offset) })
    }

    /// Copies `data` in, for the device to read.
    ///
    /// # Safety
    /// The device does not read these bytes now.
    pub(crate) unsafe fn write(&mut self, offset: usize, data: &[u8]) -> Option<*const u8> {
        let start = self.checked_range(offset, data.len())?;
        // SAFETY: `start` holds as many bytes; `data` is a shared borrow, so it cannot be this memory.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), start, data.len()) };
        Some(start)
    }

    /// Returns the first `bytes` bytes, for the device to write.
    pub(crate) fn write_target(&mut self, bytes: usize) -> Option<*mut u8> {
        self.checked_range(0, bytes)
    }

    /// Copies the first bytes out; `data` defines their number.
    ///
    /// # Safety
    /// The device has written these bytes and does not write them now.
    pub(crate) unsafe fn read(&self, data: &mut [u8]) {
        if let Some(start) = self.checked_range(0, data.len()) {
            // SAFETY: `start` holds as many bytes; `data` is a unique borrow, so it cannot be this memory.
            unsafe { ptr::copy_nonoverlapping(start, data.as_mut_ptr(), data.len()) };
        }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once; the driver waits for copies that use the memory.
        let _ = unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
    }
}

/// A kernel of a loaded [`CudaModule`]; valid as long as that module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Function(CUfunction);

impl Function {
    pub(crate) fn raw(self) -> CUfunction {
        self.0
    }

    /// Sets the maximum bytes of dynamic shared memory of a launch.
    pub(crate) fn set_max_dynamic_shared(self, bytes: u32) -> Result<(), SourceError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function is part of its module, which is loaded.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.0, attribute, bytes) })
    }

    /// Allows clusters of more blocks than every device supports.
    pub(crate) fn allow_non_portable_clusters(self) -> Result<(), SourceError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: the function is part of its module, which is loaded.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.0, attribute, 1) })
    }

    /// Returns the number of clusters of `blocks` blocks that run at once; 0 if the device runs none.
    pub(crate) fn max_active_clusters(self, blocks: u32, call: &KernelLaunch) -> Result<u32, SourceError> {
        let mut cluster = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 },
            },
        };
        let config = CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: call.block[0],
            blockDimY: call.block[1],
            blockDimZ: call.block[2],
            sharedMemBytes: call.dynamic_shared_bytes,
            hStream: ptr::null_mut(),
            attrs: &mut cluster,
            numAttrs: 1,
        };
        let mut clusters = 0;
        // SAFETY: writes one int, and reads the configuration and its attribute; the function's module is loaded.
        match unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.0, &config) } {
            CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE => Ok(0),
            code => check("cuOccupancyMaxActiveClusters", code).map(|()| clusters.unsigned_abs()),
        }
    }
}

/// Loaded device code.
#[derive(Debug)]
pub(crate) struct CudaModule {
    raw: CUmodule,
    /// Keeps the context alive.
    context: Arc<Context>,
}

impl CudaModule {
    pub(crate) fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Self, SourceError> {
        context.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a cubin contains its own length; cubins from the disk have been checked by their checksum.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Looks up one of the module's kernels.
    pub(crate) fn function(&self, name: &CStr) -> Result<Function, SourceError> {
        self.context.make_current()?;
        let mut function = ptr::null_mut();
        // SAFETY: writes one handle; the name ends in a zero.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut function, self.raw, name.as_ptr())
        })?;
        Ok(Function(function))
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        // Unloading looks the module up in the current context.
        if self.context.make_current().is_ok() {
            // SAFETY: loaded in `load`, unloaded once.
            let _ = unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

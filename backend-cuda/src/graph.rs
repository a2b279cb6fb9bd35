//! CUDA graphs: commands captured from a stream, which the driver then runs as one.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUgraph, CUgraphExec, CUgraphNode, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};
use forebay_core::backend::SourceError;

use crate::context::{Context, CudaStream, KernelLaunch};
use crate::driver::check;

/// A node of a graph; valid as long as the graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphNode(CUgraphNode);

// SAFETY: the driver's nodes may be used from any thread, one at a time.
unsafe impl Send for GraphNode {}

/// Type of `cuStreamGetCaptureInfo_v2`, the only version that all drivers of CUDA 12 and later have. (cudarc
/// binds only the third version for CUDA 13.)
type CaptureInfoFn = unsafe extern "C" fn(
    CUstream,
    *mut CUstreamCaptureStatus,
    *mut u64,
    *mut CUgraph,
    *mut *const CUgraphNode,
    *mut usize,
) -> CUresult;

/// A stream in capture mode: commands are recorded and do not run.
pub(crate) struct GraphCapture {
    stream: CudaStream,
    capture_info: CaptureInfoFn,
    /// If true, the capture must still be ended.
    is_open: Cell<bool>,
}

impl GraphCapture {
    /// Begins a capture; `None` if the driver cannot report captured nodes.
    pub(crate) fn begin(context: &Arc<Context>) -> Result<Option<Self>, SourceError> {
        // SAFETY: the context proves that the library is present; the function has had this type since CUDA
        // 11.3.
        let found = unsafe { sys::culib().get::<CaptureInfoFn>(b"cuStreamGetCaptureInfo_v2") };
        let Ok(info) = found.map(|symbol| *symbol) else { return Ok(None) };
        let stream = CudaStream::new_for_capture(context)?;
        // Relaxed: other threads and libraries may continue to allocate; their calls are not part of the
        // graph.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is valid.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(stream.flushed_handle()?, mode)
        })?;
        Ok(Some(Self { stream, capture_info: info, is_open: Cell::new(true) }))
    }

    pub(crate) fn stream(&self) -> &CudaStream {
        &self.stream
    }

    pub(crate) fn last_node(&self) -> Result<GraphNode, SourceError> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph, mut nodes, mut count) = (0, ptr::null_mut(), ptr::null(), 0);
        let stream = self.stream.flushed_handle()?;
        // SAFETY: the stream is valid; the function writes one value to each address.
        check("cuStreamGetCaptureInfo", unsafe {
            (self.capture_info)(stream, &mut status, &mut id, &mut graph, &mut nodes, &mut count)
        })?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE || count != 1 {
            let detail = format!("the capture has {count} dependencies, expected 1 ({status:?})");
            return Err(SourceError::Driver { call: "cuStreamGetCaptureInfo", detail });
        }
        // SAFETY: the pointer refers to one node until the next call with this stream.
        Ok(GraphNode(unsafe { *nodes }))
    }

    /// Ends the capture and instantiates the graph.
    pub(crate) fn finish(self) -> Result<CudaGraph, SourceError> {
        let raw = self.end_capture()?;
        CudaGraph { raw, exec: ptr::null_mut(), context: Arc::clone(&self.stream.context) }.instantiate()
    }

    fn end_capture(&self) -> Result<CUgraph, SourceError> {
        self.is_open.set(false);
        self.stream.context.make_current()?;
        let (stream, mut raw) = (self.stream.flushed_handle()?, ptr::null_mut());
        // SAFETY: the stream is being captured since `begin`; writes one handle.
        check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream, &mut raw) })?;
        Ok(raw)
    }
}

impl Drop for GraphCapture {
    fn drop(&mut self) {
        if self.is_open.get()
            && let Ok(raw) = self.end_capture()
            && !raw.is_null()
        {
            // SAFETY: created just now, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(raw) };
        }
    }
}

/// Commands that the driver runs as one.
#[derive(Debug)]
pub(crate) struct CudaGraph {
    /// The graph that names the nodes.
    raw: CUgraph,
    exec: CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: the driver's graphs may be used from any thread, one at a time.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    fn instantiate(mut self) -> Result<Self, SourceError> {
        // SAFETY: the graph is valid; writes one handle.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut self.exec, self.raw, 0)
        })?;
        Ok(self)
    }

    pub(crate) fn launch(&self, stream: CUstream) -> Result<(), SourceError> {
        self.context.make_current()?;
        // SAFETY: both are valid; memory used by the commands lives as long as the graph, as the core
        // promises.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream) })
    }

    /// Sets the kernel of a node and the addresses of its arguments from the next launch on. The kernel may
    /// change.
    ///
    /// # Safety
    /// The node is one of this graph; the arguments are as for a launch.
    pub(crate) unsafe fn set_node_params(
        &self,
        node: GraphNode,
        call: &KernelLaunch,
        arguments: &mut [*mut c_void],
    ) -> Result<(), SourceError> {
        self.context.make_current()?;
        let params = kernel_node_params(call, arguments);
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        check("cuGraphExecKernelNodeSetParams", unsafe {
            sys::cuGraphExecKernelNodeSetParams_v2(self.exec, node.0, &params)
        })
    }
}

/// Returns a kernel with its arguments as node parameters.
fn kernel_node_params(call: &KernelLaunch, arguments: &mut [*mut c_void]) -> CUDA_KERNEL_NODE_PARAMS {
    let ([gx, gy, gz], [bx, by, bz]) = (call.grid, call.block);
    CUDA_KERNEL_NODE_PARAMS {
        func: call.function.raw(),
        gridDimX: gx,
        gridDimY: gy,
        gridDimZ: gz,
        blockDimX: bx,
        blockDimY: by,
        blockDimZ: bz,
        sharedMemBytes: call.dynamic_shared_bytes,
        kernelParams: arguments.as_mut_ptr(),
        extra: ptr::null_mut(),
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.context.make_current().is_err() {
            return;
        }
        if !self.exec.is_null() {
            // SAFETY: made in `instantiate`, destroyed once; the driver keeps a graph that still runs until
            // its end.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
        // SAFETY: made by the driver, destroyed once.
        let _ = unsafe { sys::cuGraphDestroy(self.raw) };
    }
}

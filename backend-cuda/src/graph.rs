//! Graphs: commands that were given to a stream which only writes them down, and that the driver then runs as one.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUgraph, CUgraphExec, CUgraphNode, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};
use forebay_core::backend::SourceError;

use crate::context::{Context, KernelLaunch, Stream};
use crate::driver::check;

/// A command in a graph; valid as long as that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphNode(CUgraphNode);

// SAFETY: the driver's nodes may be named from every thread, one at a time.
unsafe impl Send for GraphNode {}

/// The driver's function of this name: the second of three, the only one that all drivers of CUDA 12 and later have. (cudarc
/// binds only the third for CUDA 13.)
type CaptureInfoFn = unsafe extern "C" fn(
    CUstream,
    *mut CUstreamCaptureStatus,
    *mut u64,
    *mut CUgraph,
    *mut *const CUgraphNode,
    *mut usize,
) -> CUresult;

/// A stream of its own, on which commands are written down and do not run.
pub(crate) struct GraphCapture {
    stream: Stream,
    capture_info: CaptureInfoFn,
    /// Whether it still has to be ended.
    is_open: Cell<bool>,
}

impl GraphCapture {
    /// Begins; `None` where the driver does not tell what it writes down.
    pub(crate) fn begin(context: &Arc<Context>) -> Result<Option<Self>, SourceError> {
        // SAFETY: the library is present, as everything here shows; the function has had this type since CUDA 11.3.
        let found = unsafe { sys::culib().get::<CaptureInfoFn>(b"cuStreamGetCaptureInfo_v2") };
        let Ok(info) = found.map(|symbol| *symbol) else { return Ok(None) };
        let stream = Stream::new_for_capture(context)?;
        // Relaxed: other threads, and the libraries here, may go on allocating meanwhile; nothing of that is part of the graph.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(stream.flushed_handle()?, mode)
        })?;
        Ok(Some(Self { stream, capture_info: info, is_open: Cell::new(true) }))
    }

    /// Where to enqueue.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What was written down last.
    pub(crate) fn last_node(&self) -> Result<GraphNode, SourceError> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph, mut nodes, mut count) = (0, ptr::null_mut(), ptr::null(), 0);
        let stream = self.stream.flushed_handle()?;
        // SAFETY: the stream lives; the function writes one value to each address.
        check("cuStreamGetCaptureInfo", unsafe {
            (self.capture_info)(stream, &mut status, &mut id, &mut graph, &mut nodes, &mut count)
        })?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE || count != 1 {
            let detail = format!("{count} commands are last in a line of them ({status:?})");
            return Err(SourceError::Driver { call: "cuStreamGetCaptureInfo", detail });
        }
        // SAFETY: there is one node there until the next call with this stream.
        Ok(GraphNode(unsafe { *nodes }))
    }

    /// The graph of all that was enqueued.
    pub(crate) fn finish(self) -> Result<Graph, SourceError> {
        let raw = self.end_capture()?;
        Graph { raw, exec: ptr::null_mut(), context: Arc::clone(&self.stream.context) }.instantiate()
    }

    fn end_capture(&self) -> Result<CUgraph, SourceError> {
        self.is_open.set(false);
        self.stream.context.make_current()?;
        let (stream, mut raw) = (self.stream.flushed_handle()?, ptr::null_mut());
        // SAFETY: the stream is being captured, since `begin`; writes one handle.
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
            // SAFETY: made just now, given back once.
            let _ = unsafe { sys::cuGraphDestroy(raw) };
        }
    }
}

/// Commands that the driver runs as one.
#[derive(Debug)]
pub(crate) struct Graph {
    /// As it was written down: nodes are named by it.
    raw: CUgraph,
    /// As it runs.
    exec: CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: the driver's graphs may be used from every thread, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// One of kernels that run one after the other, and their nodes.
    ///
    /// # Safety
    /// As for launches of them.
    pub(crate) unsafe fn from_kernels(
        context: &Arc<Context>,
        calls: &mut [(KernelLaunch, &mut [*mut c_void])],
    ) -> Result<(Self, Vec<GraphNode>), SourceError> {
        context.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuGraphCreate", unsafe { sys::cuGraphCreate(&mut raw, 0) })?;
        let graph = Self { raw, exec: ptr::null_mut(), context: Arc::clone(context) };
        let mut nodes: Vec<GraphNode> = Vec::with_capacity(calls.len());
        for (call, arguments) in calls {
            let (params, before) = (kernel_node_params(call, arguments), nodes.last().map(|node| node.0));
            let mut node = ptr::null_mut();
            // SAFETY: the caller's promise; the driver copies the arguments before it returns, and reads as many nodes as it is told.
            check("cuGraphAddKernelNode", unsafe {
                let before = before.as_ref().map_or(ptr::null(), ptr::from_ref);
                sys::cuGraphAddKernelNode_v2(&mut node, raw, before, usize::from(!before.is_null()), &params)
            })?;
            nodes.push(GraphNode(node));
        }
        Ok((graph.instantiate()?, nodes))
    }

    /// The same, ready to run.
    fn instantiate(mut self) -> Result<Self, SourceError> {
        // SAFETY: the graph lives; writes one handle.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut self.exec, self.raw, 0)
        })?;
        Ok(self)
    }

    /// Enqueues all of it.
    pub(crate) fn launch(&self, stream: CUstream) -> Result<(), SourceError> {
        self.context.make_current()?;
        // SAFETY: both live; what the commands name stays while the graph does, as the core promises.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream) })
    }

    /// Gives a kernel other arguments, whose addresses are `arguments`, from the next launch on. It may be another kernel than it was.
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

/// A kernel with its arguments, as graphs take it.
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

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.make_current().is_err() {
            return;
        }
        if !self.exec.is_null() {
            // SAFETY: made in `finished`, given back once; the driver keeps what is still running until it has run.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
        // SAFETY: made by the driver, given back once.
        let _ = unsafe { sys::cuGraphDestroy(self.raw) };
    }
}

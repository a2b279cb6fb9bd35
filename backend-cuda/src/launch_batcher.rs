//! Batches small kernels: if many are launched in quick succession, the driver gets several of them at once,
//! as a graph. A graph costs host and device less than single launches. Memory accesses keep the order of the
//! launches.
//!
//! The first kernels go to the stream at once, so that the device has work. Later kernels wait until there
//! are [`MAX_BATCH`] of them or a large or late one comes. Any other use of the stream, such as a
//! synchronisation, flushes the batch. Graphs are created once and reused with other arguments.

use std::ffi::c_void;
use std::mem::{self, MaybeUninit};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_core::backend::SourceError;
use forebay_core::sync::LockUnpoisoned;

use crate::context::{ArgBytes, CudaStream, Function, KernelLaunch, arg_pointers};
use crate::graph::{CudaGraph, GraphNode};
use crate::settings::{bool_from_env, launch_batching};

/// Maximum number of kernels in a batch; a power of two.
const MAX_BATCH: usize = 16;
/// Kernels that go to the stream at once before others wait.
const IMMEDIATE_LAUNCHES: u32 = 8;
/// Maximum number of blocks of a small kernel, for each multiprocessor.
const SMALL_BLOCKS_PER_SM: u64 = 2;
/// A kernel that comes later than this after the previous one is launched at once.
const BURST_GAP: Duration = Duration::from_micros(10);
/// Number of cached graphs of each length.
const MAX_GRAPHS_PER_LENGTH: usize = 8;
/// Batches that are launched kernel by kernel after a graph failed, before graphs are tried again.
const BATCHES_BEFORE_RETRY: u32 = 64;

/// Pending launches of a stream.
#[derive(Debug)]
pub(crate) struct LaunchBatcher {
    /// If true, launches are pending.
    has_pending: AtomicBool,
    /// If true, the stream has had another use since the last kernel.
    interrupted: AtomicBool,
    /// The value of `FOREBAY_CUDA_BATCH_LAUNCHES`: small kernels always or never wait. If it is not set, they
    /// wait after [`IMMEDIATE_LAUNCHES`] kernels in quick succession.
    always: Option<bool>,
    state: Mutex<BatcherState>,
}

#[derive(Debug, Default)]
struct BatcherState {
    /// Number of small kernels in quick succession, the last one at `last_launch`.
    burst_length: u32,
    last_launch: Option<Instant>,
    /// Pending launches, each with the number of its arguments.
    pending: Vec<(KernelLaunch, usize)>,
    /// The concatenated arguments of all pending launches, and the bytes of each argument.
    arg_bytes: Vec<MaybeUninit<u8>>,
    arg_sizes: Vec<usize>,
    /// Batches that will still be launched kernel by kernel.
    batches_until_retry: u32,
    /// Graphs of 2, 4, ... kernels, in LRU order: the one launched last comes last.
    graphs: [Vec<BatchGraph>; MAX_BATCH.ilog2() as usize],
}

/// An instantiated graph of consecutive kernels.
#[derive(Debug)]
struct BatchGraph {
    graph: CudaGraph,
    nodes: Vec<GraphNode>,
    functions: Vec<Function>,
}

impl LaunchBatcher {
    pub(crate) fn new() -> Self {
        Self {
            has_pending: AtomicBool::new(false),
            interrupted: AtomicBool::new(false),
            always: bool_from_env("FOREBAY_CUDA_BATCH_LAUNCHES"),
            state: Mutex::default(),
        }
    }

    /// Launches a kernel now or adds it to the batch.
    ///
    /// # Safety
    /// Same conditions as [`CudaStream::launch`], until the kernel is launched, which is before any other use of
    /// the stream.
    pub(crate) unsafe fn enqueue(
        &self,
        stream: &CudaStream,
        call: &KernelLaunch,
        arguments: &[&ArgBytes],
    ) -> Result<(), SourceError> {
        let state = &mut *self.state.lock_unpoisoned();
        if call.is_unbatchable {
            self.submit(state, stream)?;
        }
        let is_small = !call.is_unbatchable
            && call.block_count() <= SMALL_BLOCKS_PER_SM * u64::from(stream.context.sm_count);
        let is_batched = is_small
            && launch_batching()
            && self.always.unwrap_or_else(|| {
                state.update_burst(self.interrupted.swap(false, Ordering::Relaxed)) > IMMEDIATE_LAUNCHES
            });
        if !is_batched && state.pending.is_empty() {
            // SAFETY: the caller's promise.
            return unsafe { stream.launch_immediately(call, &mut arg_pointers(arguments)) };
        }
        state.push_pending(call, arguments);
        if !is_batched || state.pending.len() >= MAX_BATCH {
            return self.submit(state, stream);
        }
        self.has_pending.store(true, Ordering::Release);
        Ok(())
    }

    /// Launches the pending batch.
    #[inline]
    pub(crate) fn flush_pending(&self, stream: &CudaStream) -> Result<(), SourceError> {
        self.interrupted.store(true, Ordering::Relaxed);
        if !self.has_pending.load(Ordering::Acquire) {
            return Ok(());
        }
        self.submit(&mut self.state.lock_unpoisoned(), stream)
    }

    fn submit(&self, state: &mut BatcherState, stream: &CudaStream) -> Result<(), SourceError> {
        if state.pending.is_empty() {
            return Ok(());
        }
        let result = state.submit_pending(stream);
        // The batch is cleared even after an error: the caller gets the error, and the batch is not retried.
        state.pending.clear();
        state.arg_bytes.clear();
        state.arg_sizes.clear();
        // This comes last: a thread that reads `false` enqueues after the batch without taking the lock.
        self.has_pending.store(false, Ordering::Release);
        result
    }
}

impl BatcherState {
    /// Counts a kernel of a burst.
    fn update_burst(&mut self, interrupted: bool) -> u32 {
        let now = Instant::now();
        let soon =
            self.last_launch.replace(now).is_some_and(|before| now.duration_since(before) <= BURST_GAP);
        self.burst_length = if soon && !interrupted { self.burst_length.saturating_add(1) } else { 1 };
        self.burst_length
    }

    fn push_pending(&mut self, call: &KernelLaunch, arguments: &[&ArgBytes]) {
        self.pending.push((*call, arguments.len()));
        for argument in arguments {
            self.arg_bytes.extend_from_slice(argument);
            self.arg_sizes.push(argument.len());
        }
    }

    fn submit_pending(&mut self, stream: &CudaStream) -> Result<(), SourceError> {
        let (mut bytes, mut values) = (&self.arg_bytes[..], Vec::with_capacity(self.arg_sizes.len()));
        for &size in &self.arg_sizes {
            let (value, rest) = bytes.split_at(size);
            values.push(value);
            bytes = rest;
        }
        let (mut pointers, mut calls) = (arg_pointers(&values), Vec::with_capacity(self.pending.len()));
        let mut pointers = &mut pointers[..];
        for (call, arguments) in &self.pending {
            let (own, rest) = mem::take(&mut pointers).split_at_mut(*arguments);
            calls.push((*call, own));
            pointers = rest;
        }
        let mut calls = &mut calls[..];
        let mut result = Ok(());
        while !calls.is_empty() {
            let batch_len = if self.batches_until_retry == 0 { 1 << calls.len().ilog2() } else { 1 };
            let (batch, rest) = mem::take(&mut calls).split_at_mut(batch_len);
            calls = rest;
            let done = match batch {
                // SAFETY: the promise of the caller that pushed the launch.
                [(call, arguments)] => unsafe { stream.launch_immediately(call, arguments) },
                batch => {
                    let graphs = &mut self.graphs[batch.len().ilog2() as usize - 1];
                    // SAFETY: as above.
                    unsafe { BatchGraph::launch_batch(graphs, stream, batch) }.map(|as_one| {
                        if !as_one {
                            self.batches_until_retry = BATCHES_BEFORE_RETRY;
                        }
                    })
                }
            };
            // Later launches were already accepted, so they are launched even after an error.
            result = result.and(done);
        }
        self.batches_until_retry = self.batches_until_retry.saturating_sub(1);
        result
    }
}

impl BatchGraph {
    /// Launches kernels as a graph, cached or new; one by one if the driver refuses the graph. Returns `true`
    /// if a graph was launched.
    ///
    /// # Safety
    /// Each kernel fulfils the conditions of a launch.
    unsafe fn launch_batch(
        graphs: &mut Vec<Self>,
        stream: &CudaStream,
        calls: &mut [(KernelLaunch, &mut [*mut c_void])],
    ) -> Result<bool, SourceError> {
        // SAFETY: the caller's promise.
        let cached = unsafe { Self::get_or_create(graphs, stream, calls) };
        match cached.and_then(|cached| stream.launch_graph(&cached.graph).map(|()| cached)) {
            Ok(cached) => {
                graphs.push(cached);
                Ok(true)
            }
            Err(lost @ SourceError::DeviceLost(_)) => Err(lost),
            Err(error) => {
                log::debug!("kernels of a batch are launched one by one: {error}");
                let mut result = Ok(false);
                for (call, arguments) in calls {
                    // SAFETY: the caller's promise.
                    result =
                        result.and(unsafe { stream.launch_immediately(call, arguments) }.map(|()| false));
                }
                result
            }
        }
    }

    /// Returns a graph of these kernels with their arguments, taken from `graphs` or new.
    ///
    /// # Safety
    /// Each kernel fulfils the conditions of a launch.
    unsafe fn get_or_create(
        graphs: &mut Vec<Self>,
        stream: &CudaStream,
        calls: &mut [(KernelLaunch, &mut [*mut c_void])],
    ) -> Result<Self, SourceError> {
        let has_same_kernels =
            |cached: &Self| cached.functions.iter().zip(&*calls).all(|(f, (call, _))| *f == call.function);
        // Changing kernels takes the driver longer than changing arguments. If no graph has the same kernels,
        // the least recently used one is changed.
        let reusable = match graphs.iter().position(has_same_kernels) {
            None if graphs.len() < MAX_GRAPHS_PER_LENGTH => None,
            index => Some(graphs.remove(index.unwrap_or(0))),
        };
        let Some(mut cached) = reusable else {
            // SAFETY: the caller's promise.
            let (graph, nodes) = unsafe { CudaGraph::from_kernels(&stream.context, calls) }?;
            return Ok(Self {
                graph,
                nodes,
                functions: calls.iter().map(|(call, _)| call.function).collect(),
            });
        };
        for (k, (call, arguments)) in calls.iter_mut().enumerate() {
            // SAFETY: the caller's promise; the node is of this graph.
            unsafe { cached.graph.set_node_params(cached.nodes[k], call, arguments) }?;
            cached.functions[k] = call.function;
        }
        Ok(cached)
    }
}

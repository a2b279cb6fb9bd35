//! Small kernels in a line: where many are launched one after the other, the driver is given several of them at once, as a graph, which
//! costs host and device less than a launch of each. What they read and write is in the order in which they came.
//!
//! The first ones go to the stream at once, so that the device has work; then kernels wait until there are [`MOST`] of them, one that is
//! large or late, or anything else that is asked of the stream, as by whoever waits for the device. Graphs are made once and used again,
//! with other arguments.

use std::ffi::c_void;
use std::mem::{self, MaybeUninit};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_core::backend::SourceError;

use crate::context::{ArgBytes, Function, KernelLaunch, Stream, arg_pointers};
use crate::graph::{Graph, GraphNode};
use crate::lock;
use crate::settings::{bool_from_env, launch_batching};

/// Kernels that wait, at most; a power of two.
const MAX_BATCH: usize = 16;
/// Kernels that go to the stream at once before others wait.
const IMMEDIATE_LAUNCHES: u32 = 8;
/// Blocks of a small kernel, at most, for each multiprocessor.
const SMALL_BLOCKS_PER_SM: u64 = 2;
/// What comes later than this behind the one before does not wait.
const BURST_GAP: Duration = Duration::from_micros(10);
/// Graphs of each length that are kept.
const MAX_GRAPHS_PER_LENGTH: usize = 8;
/// Lines that are launched one by one after a graph could not be made or launched, before that is tried again.
const BATCHES_BEFORE_RETRY: u32 = 64;

/// What waits for a stream.
#[derive(Debug)]
pub(crate) struct LaunchBatcher {
    /// Whether anything does.
    has_pending: AtomicBool,
    /// Whether something else was asked of the stream since the last kernel.
    interrupted: AtomicBool,
    policy: BatchPolicy,
    state: Mutex<BatcherState>,
}

/// When kernels wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchPolicy {
    Never,
    /// Behind so many that came soon after each other.
    WhenBusy,
    Always,
}

#[derive(Debug, Default)]
struct BatcherState {
    /// Small kernels that came soon after each other, the last one of them at `last`.
    burst_length: u32,
    last_launch: Option<Instant>,
    /// With the number of its arguments each.
    pending: Vec<(KernelLaunch, usize)>,
    /// The arguments of all that waits, one after the other, and the bytes of each.
    arg_bytes: Vec<MaybeUninit<u8>>,
    arg_sizes: Vec<usize>,
    /// Lines that will still be launched one by one.
    batches_until_retry: u32,
    /// Graphs of 2, 4, ... kernels, the one that was launched last behind the others.
    graphs: [Vec<BatchGraph>; MAX_BATCH.ilog2() as usize],
}

/// A graph of kernels in a line.
#[derive(Debug)]
struct BatchGraph {
    graph: Graph,
    nodes: Vec<GraphNode>,
    functions: Vec<Function>,
}

impl LaunchBatcher {
    pub(crate) fn new() -> Self {
        let when = match bool_from_env("FOREBAY_CUDA_BATCH_LAUNCHES") {
            Some(false) => BatchPolicy::Never,
            Some(true) => BatchPolicy::Always,
            None => BatchPolicy::WhenBusy,
        };
        Self {
            has_pending: AtomicBool::new(false),
            interrupted: AtomicBool::new(false),
            policy: when,
            state: Mutex::default(),
        }
    }

    /// Takes a kernel for its stream.
    ///
    /// # Safety
    /// As for [`Stream::launch`], until it is launched, which is before anything else is done in the stream.
    pub(crate) unsafe fn enqueue(
        &self,
        stream: &Stream,
        call: &KernelLaunch,
        arguments: &[&ArgBytes],
    ) -> Result<(), SourceError> {
        let state = &mut *lock(&self.state);
        if call.is_unbatchable {
            self.submit(state, stream)?;
        }
        let small = !call.is_unbatchable
            && call.block_count() <= SMALL_BLOCKS_PER_SM * u64::from(stream.context.sm_count);
        let waits = small
            && launch_batching()
            && match self.policy {
                BatchPolicy::Never => false,
                BatchPolicy::WhenBusy => {
                    state.update_burst(self.interrupted.swap(false, Ordering::Relaxed)) > IMMEDIATE_LAUNCHES
                }
                BatchPolicy::Always => true,
            };
        if !waits && state.pending.is_empty() {
            // SAFETY: the caller's promise.
            return unsafe { stream.launch_immediately(call, &mut arg_pointers(arguments)) };
        }
        state.push_pending(call, arguments);
        if !waits || state.pending.len() >= MAX_BATCH {
            return self.submit(state, stream);
        }
        self.has_pending.store(true, Ordering::Release);
        Ok(())
    }

    /// Gives the stream all that waits.
    #[inline]
    pub(crate) fn flush_pending(&self, stream: &Stream) -> Result<(), SourceError> {
        self.interrupted.store(true, Ordering::Relaxed);
        if !self.has_pending.load(Ordering::Acquire) {
            return Ok(());
        }
        self.submit(&mut lock(&self.state), stream)
    }

    fn submit(&self, state: &mut BatcherState, stream: &Stream) -> Result<(), SourceError> {
        if state.pending.is_empty() {
            return Ok(());
        }
        let given = state.submit_pending(stream);
        // After an error too: what it was said for is not tried again.
        state.pending.clear();
        state.arg_bytes.clear();
        state.arg_sizes.clear();
        // At the end: whoever sees it goes on behind what waited.
        self.has_pending.store(false, Ordering::Release);
        given
    }
}

impl BatcherState {
    /// Counts a kernel among those that came soon after each other.
    fn update_burst(&mut self, turned: bool) -> u32 {
        let now = Instant::now();
        let soon =
            self.last_launch.replace(now).is_some_and(|before| now.duration_since(before) <= BURST_GAP);
        self.burst_length = if soon && !turned { self.burst_length.saturating_add(1) } else { 1 };
        self.burst_length
    }

    fn push_pending(&mut self, call: &KernelLaunch, arguments: &[&ArgBytes]) {
        self.pending.push((*call, arguments.len()));
        for argument in arguments {
            self.arg_bytes.extend_from_slice(argument);
            self.arg_sizes.push(argument.len());
        }
    }

    fn submit_pending(&mut self, stream: &Stream) -> Result<(), SourceError> {
        let (mut bytes, mut values) = (&self.arg_bytes[..], Vec::with_capacity(self.arg_sizes.len()));
        for &size in &self.arg_sizes {
            let (value, behind) = bytes.split_at(size);
            values.push(value);
            bytes = behind;
        }
        let (mut pointers, mut calls) = (arg_pointers(&values), Vec::with_capacity(self.pending.len()));
        let mut pointers = &mut pointers[..];
        for (call, arguments) in &self.pending {
            let (own, behind) = mem::take(&mut pointers).split_at_mut(*arguments);
            calls.push((*call, own));
            pointers = behind;
        }
        let mut calls = &mut calls[..];
        let mut given = Ok(());
        while !calls.is_empty() {
            let most = if self.batches_until_retry == 0 { 1 << calls.len().ilog2() } else { 1 };
            let (row, behind) = mem::take(&mut calls).split_at_mut(most);
            calls = behind;
            let done = match row {
                // SAFETY: the promise of who pushed it.
                [(call, arguments)] => unsafe { stream.launch_immediately(call, arguments) },
                row => {
                    let rows = &mut self.graphs[row.len().ilog2() as usize - 1];
                    // SAFETY: as above.
                    unsafe { BatchGraph::launch_batch(rows, stream, row) }.map(|as_one| {
                        if !as_one {
                            self.batches_until_retry = BATCHES_BEFORE_RETRY;
                        }
                    })
                }
            };
            // What comes behind is of others, who were told that it is on its way.
            given = given.and(done);
        }
        self.batches_until_retry = self.batches_until_retry.saturating_sub(1);
        given
    }
}

impl BatchGraph {
    /// Launches kernels as one of the graphs of so many, or a new one; one by one where the driver refuses it. Whether as a graph.
    ///
    /// # Safety
    /// As for launches of them.
    unsafe fn launch_batch(
        rows: &mut Vec<Self>,
        stream: &Stream,
        calls: &mut [(KernelLaunch, &mut [*mut c_void])],
    ) -> Result<bool, SourceError> {
        // SAFETY: the caller's promise.
        let ready = unsafe { Self::get_or_create(rows, stream, calls) };
        match ready.and_then(|row| stream.launch_graph(&row.graph).map(|()| row)) {
            Ok(row) => {
                rows.push(row);
                Ok(true)
            }
            Err(lost @ SourceError::DeviceLost(_)) => Err(lost),
            Err(error) => {
                log::debug!("kernels in a line are launched one by one: {error}");
                let mut given = Ok(false);
                for (call, arguments) in calls {
                    // SAFETY: the caller's promise.
                    given = given.and(unsafe { stream.launch_immediately(call, arguments) }.map(|()| false));
                }
                given
            }
        }
    }

    /// A graph of these kernels with their arguments, taken from `rows` or new.
    ///
    /// # Safety
    /// As for launches of them.
    unsafe fn get_or_create(
        rows: &mut Vec<Self>,
        stream: &Stream,
        calls: &mut [(KernelLaunch, &mut [*mut c_void])],
    ) -> Result<Self, SourceError> {
        let same = |row: &Self| row.functions.iter().zip(&*calls).all(|(f, (call, _))| *f == call.function);
        // Other kernels take the driver longer than other arguments: if none is the same, the one that was not used for longest is changed.
        let known = match rows.iter().position(same) {
            None if rows.len() < MAX_GRAPHS_PER_LENGTH => None,
            found => Some(rows.remove(found.unwrap_or(0))),
        };
        let Some(mut row) = known else {
            // SAFETY: the caller's promise.
            let (graph, nodes) = unsafe { Graph::from_kernels(&stream.context, calls) }?;
            return Ok(Self {
                graph,
                nodes,
                functions: calls.iter().map(|(call, _)| call.function).collect(),
            });
        };
        for (k, (call, arguments)) in calls.iter_mut().enumerate() {
            // SAFETY: the caller's promise; the node is of this graph.
            unsafe { row.graph.set_node_params(row.nodes[k], call, arguments) }?;
            row.functions[k] = call.function;
        }
        Ok(row)
    }
}

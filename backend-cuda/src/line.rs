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

use crate::context::{Call, Function, Stream, Value, addresses};
use crate::graph::{Graph, Node};
use crate::lock;
use crate::switches::{is_set, lines};

/// Kernels that wait, at most; a power of two.
const MOST: usize = 16;
/// Kernels that go to the stream at once before others wait.
const AT_ONCE: u32 = 8;
/// Blocks of a small kernel, at most, for each multiprocessor.
const SMALL: u64 = 2;
/// What comes later than this behind the one before does not wait.
const SOON: Duration = Duration::from_micros(10);
/// Graphs of each length that are kept.
const KEPT: usize = 8;
/// Lines that are launched one by one after a graph could not be made or launched, before that is tried again.
const REST: u32 = 64;

/// What waits for a stream.
#[derive(Debug)]
pub(crate) struct Line {
    /// Whether anything does.
    some: AtomicBool,
    /// Whether something else was asked of the stream since the last kernel.
    turned: AtomicBool,
    when: When,
    state: Mutex<State>,
}

/// When kernels wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Never,
    /// Behind so many that came soon after each other.
    Busy,
    Always,
}

#[derive(Debug, Default)]
struct State {
    /// Small kernels that came soon after each other, the last one of them at `last`.
    soon: u32,
    last: Option<Instant>,
    /// With the number of its arguments each.
    waiting: Vec<(Call, usize)>,
    /// The arguments of all that waits, one after the other, and the bytes of each.
    bytes: Vec<MaybeUninit<u8>>,
    sizes: Vec<usize>,
    /// Lines that will still be launched one by one.
    rest: u32,
    /// Graphs of 2, 4, ... kernels, the one that was launched last behind the others.
    rows: [Vec<Row>; MOST.ilog2() as usize],
}

/// A graph of kernels in a line.
#[derive(Debug)]
struct Row {
    graph: Graph,
    nodes: Vec<Node>,
    functions: Vec<Function>,
}

impl Line {
    pub(crate) fn new() -> Self {
        let when = match is_set("FOREBAY_CUDA_LINES") {
            Some(false) => When::Never,
            Some(true) => When::Always,
            None => When::Busy,
        };
        Self { some: AtomicBool::new(false), turned: AtomicBool::new(false), when, state: Mutex::default() }
    }

    /// Takes a kernel for its stream.
    ///
    /// # Safety
    /// As for [`Stream::launch`], until it is launched, which is before anything else is done in the stream.
    pub(crate) unsafe fn add(
        &self,
        stream: &Stream,
        call: &Call,
        arguments: &[&Value],
    ) -> Result<(), SourceError> {
        let state = &mut *lock(&self.state);
        if call.alone {
            self.give(state, stream)?;
        }
        let small = !call.alone && call.blocks() <= SMALL * u64::from(stream.context.units);
        let waits = small
            && lines()
            && match self.when {
                When::Never => false,
                When::Busy => state.comes_soon(self.turned.swap(false, Ordering::Relaxed)) > AT_ONCE,
                When::Always => true,
            };
        if !waits && state.waiting.is_empty() {
            // SAFETY: the caller's promise.
            return unsafe { stream.launch_now(call, &mut addresses(arguments)) };
        }
        state.push(call, arguments);
        if !waits || state.waiting.len() >= MOST {
            return self.give(state, stream);
        }
        self.some.store(true, Ordering::Release);
        Ok(())
    }

    /// Gives the stream all that waits.
    #[inline]
    pub(crate) fn settle(&self, stream: &Stream) -> Result<(), SourceError> {
        self.turned.store(true, Ordering::Relaxed);
        if !self.some.load(Ordering::Acquire) {
            return Ok(());
        }
        self.give(&mut lock(&self.state), stream)
    }

    fn give(&self, state: &mut State, stream: &Stream) -> Result<(), SourceError> {
        if state.waiting.is_empty() {
            return Ok(());
        }
        let given = state.give(stream);
        // After an error too: what it was said for is not tried again.
        state.waiting.clear();
        state.bytes.clear();
        state.sizes.clear();
        // At the end: whoever sees it goes on behind what waited.
        self.some.store(false, Ordering::Release);
        given
    }
}

impl State {
    /// Counts a kernel among those that came soon after each other.
    fn comes_soon(&mut self, turned: bool) -> u32 {
        let now = Instant::now();
        let soon = self.last.replace(now).is_some_and(|before| now.duration_since(before) <= SOON);
        self.soon = if soon && !turned { self.soon.saturating_add(1) } else { 1 };
        self.soon
    }

    fn push(&mut self, call: &Call, arguments: &[&Value]) {
        self.waiting.push((*call, arguments.len()));
        for argument in arguments {
            self.bytes.extend_from_slice(argument);
            self.sizes.push(argument.len());
        }
    }

    fn give(&mut self, stream: &Stream) -> Result<(), SourceError> {
        let (mut bytes, mut values) = (&self.bytes[..], Vec::with_capacity(self.sizes.len()));
        for &size in &self.sizes {
            let (value, behind) = bytes.split_at(size);
            values.push(value);
            bytes = behind;
        }
        let (mut pointers, mut calls) = (addresses(&values), Vec::with_capacity(self.waiting.len()));
        let mut pointers = &mut pointers[..];
        for (call, arguments) in &self.waiting {
            let (own, behind) = mem::take(&mut pointers).split_at_mut(*arguments);
            calls.push((*call, own));
            pointers = behind;
        }
        let mut calls = &mut calls[..];
        let mut given = Ok(());
        while !calls.is_empty() {
            let most = if self.rest == 0 { 1 << calls.len().ilog2() } else { 1 };
            let (row, behind) = mem::take(&mut calls).split_at_mut(most);
            calls = behind;
            let done = match row {
                // SAFETY: the promise of who pushed it.
                [(call, arguments)] => unsafe { stream.launch_now(call, arguments) },
                row => {
                    let rows = &mut self.rows[row.len().ilog2() as usize - 1];
                    // SAFETY: as above.
                    unsafe { Row::launch(rows, stream, row) }.map(|as_one| {
                        if !as_one {
                            self.rest = REST;
                        }
                    })
                }
            };
            // What comes behind is of others, who were told that it is on its way.
            given = given.and(done);
        }
        self.rest = self.rest.saturating_sub(1);
        given
    }
}

impl Row {
    /// Launches kernels as one of the graphs of so many, or a new one; one by one where the driver refuses it. Whether as a graph.
    ///
    /// # Safety
    /// As for launches of them.
    unsafe fn launch(
        rows: &mut Vec<Self>,
        stream: &Stream,
        calls: &mut [(Call, &mut [*mut c_void])],
    ) -> Result<bool, SourceError> {
        // SAFETY: the caller's promise.
        let ready = unsafe { Self::ready(rows, stream, calls) };
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
                    given = given.and(unsafe { stream.launch_now(call, arguments) }.map(|()| false));
                }
                given
            }
        }
    }

    /// A graph of these kernels with their arguments, taken from `rows` or new.
    ///
    /// # Safety
    /// As for launches of them.
    unsafe fn ready(
        rows: &mut Vec<Self>,
        stream: &Stream,
        calls: &mut [(Call, &mut [*mut c_void])],
    ) -> Result<Self, SourceError> {
        let same = |row: &Self| row.functions.iter().zip(&*calls).all(|(f, (call, _))| *f == call.function);
        // Other kernels take the driver longer than other arguments: if none is the same, the one that was not used for longest is changed.
        let known = match rows.iter().position(same) {
            None if rows.len() < KEPT => None,
            found => Some(rows.remove(found.unwrap_or(0))),
        };
        let Some(mut row) = known else {
            // SAFETY: the caller's promise.
            let (graph, nodes) = unsafe { Graph::row(&stream.context, calls) }?;
            return Ok(Self {
                graph,
                nodes,
                functions: calls.iter().map(|(call, _)| call.function).collect(),
            });
        };
        for (k, (call, arguments)) in calls.iter_mut().enumerate() {
            // SAFETY: the caller's promise; the node is of this graph.
            unsafe { row.graph.set(row.nodes[k], call, arguments) }?;
            row.functions[k] = call.function;
        }
        Ok(row)
    }
}

//! First and second runs of a checkpoint's body: the second one is to do what the first one did, and to change nothing else.
//!
//! A first run is recorded: the random numbers that it draws, values that it makes of state which it changes, and the versions of
//! older tensors that it reads. A second run draws the same numbers, is given the same values, leaves the state of modules alone,
//! and does not begin if what it reads was changed. The device's random numbers are not touched by it, so other threads, panics and errors
//! cannot disturb them.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::next_id;
use crate::error::{Error, Result};
use crate::runtime::device::{Device, RandomState};
use crate::runtime::stream::Access;
use crate::storage::Storage;
use crate::tensor::Tensor;

type StateValues = SmallVec<[Tensor; 2]>;

/// A tensor's memory that a first run has read, with its version then.
struct TrackedRead {
    storage: Weak<Storage>,
    version: u64,
    /// If true, the run has written to it as well: then it is the body's own affair.
    is_written: bool,
}

/// Record of a first run.
#[derive(Default)]
pub(super) struct ForwardRecord {
    /// Draws, each with the address of its device.
    draws: Vec<(usize, RandomState)>,
    values: Vec<StateValues>,
    /// Modes of modules, training or evaluation.
    modes: Vec<bool>,
    /// By the memory's id. Empty while the run goes on.
    reads: Vec<(Weak<Storage>, u64)>,
}

enum CheckpointFrame {
    Forward {
        run: ForwardRecord,
        /// Memory with a smaller id is older than the run.
        start: u64,
        reads: FxHashMap<u64, TrackedRead>,
    },
    Recompute {
        run: Arc<ForwardRecord>,
        draws: usize,
        values: usize,
        modes: usize,
    },
    /// Updates of state, which are no part of a run.
    StateUpdate,
}

/// Frames of all threads: without one, no operation looks for a frame.
static FRAME_COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Runs and updates that this thread is inside of, the innermost last.
    static FRAME_STACK: RefCell<Vec<CheckpointFrame>> = const { RefCell::new(Vec::new()) };
    /// Number of them that are second runs.
    static RECOMPUTE_DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A frame on the stack while this lives.
struct FrameGuard {
    depth: usize,
}

impl FrameGuard {
    fn new(frame: CheckpointFrame) -> Self {
        FRAME_COUNT.fetch_add(1, Ordering::Relaxed);
        RECOMPUTE_DEPTH
            .set(RECOMPUTE_DEPTH.get() + usize::from(matches!(frame, CheckpointFrame::Recompute { .. })));
        let depth = FRAME_STACK.with_borrow_mut(|stack| {
            stack.push(frame);
            stack.len()
        });
        Self { depth }
    }

    fn pop(&self) -> Option<CheckpointFrame> {
        FRAME_STACK.with_borrow_mut(|stack| if stack.len() == self.depth { stack.pop() } else { None })
    }

    /// Takes the frame off before its time: what [`Drop`] would drop.
    fn pop_early(self) -> Option<CheckpointFrame> {
        self.pop().inspect(Self::uncount)
    }

    fn uncount(frame: &CheckpointFrame) {
        FRAME_COUNT.fetch_sub(1, Ordering::Relaxed);
        RECOMPUTE_DEPTH
            .set(RECOMPUTE_DEPTH.get() - usize::from(matches!(frame, CheckpointFrame::Recompute { .. })));
    }
}

impl Drop for FrameGuard {
    fn drop(&mut self) {
        // What the frame holds is dropped when the stack is free.
        drop(self.pop().inspect(Self::uncount));
    }
}

/// Runs the body of a checkpoint for the first time, and records the run.
pub(super) fn run_forward<R>(body: impl FnOnce() -> Result<R>) -> Result<(R, ForwardRecord)> {
    let entered = FrameGuard::new(CheckpointFrame::Forward {
        run: ForwardRecord::default(),
        start: next_id(),
        reads: FxHashMap::default(),
    });
    let out = body()?;
    let Some(CheckpointFrame::Forward { mut run, reads, .. }) = entered.pop_early() else {
        return Err(Error::argument(
            "checkpoint",
            "a checkpoint's body ended on another thread than it began",
        ));
    };
    let unwritten = reads.into_values().filter(|read| !read.is_written);
    run.reads = unwritten.map(|read| (read.storage, read.version)).collect();
    Ok((out, run))
}

/// Runs the body of a checkpoint again.
pub(super) fn run_recompute<R>(run: &Arc<ForwardRecord>, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let _entered =
        FrameGuard::new(CheckpointFrame::Recompute { run: Arc::clone(run), draws: 0, values: 0, modes: 0 });
    body()
}

impl ForwardRecord {
    /// Reports whether everything that the run has read is unchanged.
    pub(super) fn is_current(&self) -> bool {
        self.reads
            .iter()
            .all(|(memory, version)| memory.upgrade().is_none_or(|memory| memory.version() == *version))
    }
}

/// Reports whether this thread runs the body of a [`checkpoint`](super::checkpoint) again, for its gradient. A module that changes state in its
/// forward pass leaves that state alone then; [`update_state`] does so.
///
/// ```
/// # use forebay_core::autograd;
/// assert!(!autograd::is_recomputing());
/// ```
#[must_use]
pub fn is_recomputing() -> bool {
    FRAME_COUNT.load(Ordering::Relaxed) > 0 && RECOMPUTE_DEPTH.get() > 0
}

/// Runs `update`, which changes state of a module in its forward pass, such as running statistics or a counter; without recording, and not
/// when a [`checkpoint`](super::checkpoint) runs its body again. A checkpointed model then changes as one without checkpoints does.
///
/// ```
/// # use forebay_core::{autograd, device::Device, dtype::DType, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// # let (x, seen) = (Tensor::ones(&[3], DType::F32, &device)?, Tensor::zeros(&[], DType::F32, &device)?);
/// autograd::update_state(|| seen.add_(&x.detach().sum_all()?))?;
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
///
/// # Errors
/// As `update`.
pub fn update_state(update: impl FnOnce() -> Result<()>) -> Result<()> {
    if is_recomputing() { Ok(()) } else { run_state_update(update) }
}

/// Does what is no part of the runs of checkpoints around it.
fn run_state_update<R>(update: impl FnOnce() -> Result<R>) -> Result<R> {
    let _no_grad = super::no_grad();
    let _entered = FrameGuard::new(CheckpointFrame::StateUpdate);
    update()
}

/// Runs [`update_state`] for an update that gives values which the forward pass goes on with: a second run is given those of the first one.
pub fn replayable_state_update(update: impl FnOnce() -> Result<StateValues>) -> Result<StateValues> {
    if FRAME_COUNT.load(Ordering::Relaxed) == 0 {
        return run_state_update(update);
    }
    let known = FRAME_STACK.with_borrow_mut(|stack| {
        stack.iter_mut().rev().find_map(|frame| match frame {
            CheckpointFrame::Recompute { run, values, .. } => {
                *values += 1;
                Some(run.values.get(*values - 1).cloned())
            }
            CheckpointFrame::Forward { .. } | CheckpointFrame::StateUpdate => None,
        })
    });
    let values = match known {
        None => run_state_update(update)?,
        Some(Some(values)) => values,
        Some(None) => {
            return Err(Error::Backward(
                "the body of a checkpoint took another way when it ran again; it must do the same twice"
                    .into(),
            ));
        }
    };
    FRAME_STACK.with_borrow_mut(|stack| {
        for run in recording_runs(stack) {
            run.values.push(values.clone());
        }
    });
    Ok(values)
}

/// The first runs that what happens now is a part of: those within the innermost second run.
fn recording_runs(stack: &mut [CheckpointFrame]) -> impl Iterator<Item = &mut ForwardRecord> {
    stack.iter_mut().rev().map_while(|frame| match frame {
        CheckpointFrame::Forward { run, .. } => Some(run),
        CheckpointFrame::Recompute { .. } | CheckpointFrame::StateUpdate => None,
    })
}

/// Gives the mode of a module, which is `now`; in a second run the mode that it had in the first one.
pub fn replayable_training_mode(now: bool) -> bool {
    if FRAME_COUNT.load(Ordering::Relaxed) == 0 {
        return now;
    }
    FRAME_STACK.with_borrow_mut(|stack| {
        let known = stack.iter_mut().rev().find_map(|frame| match frame {
            CheckpointFrame::Forward { .. } => None,
            CheckpointFrame::StateUpdate => Some(None),
            CheckpointFrame::Recompute { run, modes, .. } => {
                *modes += 1;
                Some(run.modes.get(*modes - 1).copied())
            }
        });
        let mode = known.flatten().unwrap_or(now);
        recording_runs(stack).for_each(|run| run.modes.push(mode));
        mode
    })
}

/// The next draw of a second run; `None` outside of one.
#[inline]
pub(crate) fn replayed_draw(device: &Device) -> Option<RandomState> {
    if FRAME_COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    FRAME_STACK.with_borrow_mut(|stack| {
        let state = stack.iter_mut().rev().find_map(|frame| match frame {
            CheckpointFrame::Forward { .. } => None,
            CheckpointFrame::StateUpdate => Some(None),
            CheckpointFrame::Recompute { run, draws, .. } => {
                let next = run.draws.get(*draws).filter(|(at, _)| *at == device.address());
                *draws += usize::from(next.is_some());
                Some(next.map(|(_, state)| *state))
            }
        });
        let state = state.flatten()?;
        recording_runs(stack).for_each(|run| run.draws.push((device.address(), state)));
        Some(state)
    })
}

/// Records a draw.
#[inline]
pub(crate) fn record_draw(device: &Device, state: RandomState) {
    if FRAME_COUNT.load(Ordering::Relaxed) > 0 {
        FRAME_STACK.with_borrow_mut(|stack| {
            recording_runs(stack).for_each(|run| run.draws.push((device.address(), state)))
        });
    }
}

/// Records that an operation reads or writes a tensor. It costs one load where no checkpoint runs.
#[inline]
pub(crate) fn record_access(t: &Tensor, access: Access) {
    if FRAME_COUNT.load(Ordering::Relaxed) > 0 {
        record_access_slow(t, access);
    }
}

#[cold]
fn record_access_slow(t: &Tensor, access: Access) {
    // A thread that ends has no runs any more.
    let _ = FRAME_STACK.try_with(|stack| {
        let Ok(mut stack) = stack.try_borrow_mut() else { return };
        let id = t.storage_id();
        for frame in stack.iter_mut().rev() {
            match frame {
                CheckpointFrame::StateUpdate => break,
                CheckpointFrame::Forward { start, reads, .. } if id < *start => {
                    let seen = || TrackedRead {
                        storage: t.downgrade_storage(),
                        version: t.version(),
                        is_written: false,
                    };
                    reads.entry(id).or_insert_with(seen).is_written |= access == Access::Write;
                }
                CheckpointFrame::Forward { .. } | CheckpointFrame::Recompute { .. } => {}
            }
        }
    });
}

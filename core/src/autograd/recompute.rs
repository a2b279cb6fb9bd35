//! Forward runs and recomputations of a checkpoint's body. A recomputation must repeat the forward run and
//! must change nothing else.
//!
//! The record of a forward run has its random draws and the module state values and modes that it used. It
//! also has the versions of older tensors that the run read. A recomputation replays the draws, values and
//! modes, and leaves the state of modules alone. It is an error if a tensor that the forward run read has
//! changed or is gone. Reading another older tensor than the forward run did is an error, too. A
//! recomputation does not touch the device's random state, so other threads, panics and errors cannot
//! disturb that state.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::runtime::capture::recorder::Buffer;
use crate::runtime::device::{Device, RandomState};
use crate::runtime::observer::{self, OperationObserver};
use crate::runtime::stream::Access;
use crate::storage::Storage;
use crate::storage::next_id;
use crate::tensor::Tensor;

type StateValues = SmallVec<[Tensor; 2]>;

/// Storage that a run has accessed, with its version at the time.
struct TrackedAccess {
    storage: Weak<Storage>,
    version: u64,
    /// If true, the run has also written to the storage, or its contents derive from another tracked storage,
    /// so it is not checked.
    is_written: bool,
}

/// Accesses by storage id.
type AccessMap = FxHashMap<u64, TrackedAccess>;

/// Record of a forward run.
#[derive(Default)]
pub(super) struct ForwardRecord {
    /// Random draws, each with the address of its device.
    draws: Vec<(usize, RandomState)>,
    values: Vec<StateValues>,
    /// Modes of modules, training or evaluation.
    modes: Vec<bool>,
    /// Older storages that the run accessed, without the inputs. Empty until the run ends.
    accesses: AccessMap,
    /// Ids of the storages of the inputs.
    inputs: SmallVec<[u64; 4]>,
    /// Ids of storages that were created during the run.
    created: Range<u64>,
}

/// Numbers of draws, values and modes that a recomputation has replayed.
#[derive(Default)]
struct ReplayCursors {
    draws: usize,
    values: usize,
    modes: usize,
}

enum CheckpointFrame {
    Forward {
        run: ForwardRecord,
        /// Storages with a smaller id are older than the run.
        start: u64,
        accesses: AccessMap,
    },
    Recompute {
        run: Arc<ForwardRecord>,
        cursors: ReplayCursors,
        /// Storages with a smaller id are older than the recomputation.
        start: u64,
        accesses: AccessMap,
        /// If true, the body asked whether it is recomputed, and may do other things than in the forward run.
        may_differ: bool,
    },
    /// Update of module state, which is not part of the run.
    StateUpdate,
}

thread_local! {
    /// Active frames of this thread, the innermost last.
    static FRAME_STACK: RefCell<Vec<CheckpointFrame>> = const { RefCell::new(Vec::new()) };
    /// Number of active frames that are recomputations.
    static RECOMPUTE_DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Guard that keeps a frame on the stack.
struct FrameGuard {
    depth: usize,
}

impl FrameGuard {
    fn new(frame: CheckpointFrame) -> Self {
        observer::begin(&CheckpointObserver);
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

    /// Pops the frame and returns it, instead of dropping it in [`Drop`].
    fn pop_early(self) -> Option<CheckpointFrame> {
        self.pop().inspect(Self::uncount)
    }

    fn uncount(frame: &CheckpointFrame) {
        observer::end();
        RECOMPUTE_DEPTH
            .set(RECOMPUTE_DEPTH.get() - usize::from(matches!(frame, CheckpointFrame::Recompute { .. })));
    }
}

impl Drop for FrameGuard {
    fn drop(&mut self) {
        // The frame is dropped after the borrow of the stack has ended.
        drop(self.pop().inspect(Self::uncount));
    }
}

/// Runs the body of a checkpoint for the first time and records the run.
pub(super) fn run_forward<R>(
    inputs: &[&Tensor],
    body: impl FnOnce() -> Result<R>,
) -> Result<(R, ForwardRecord)> {
    let start = next_id();
    let run = ForwardRecord::default();
    let entered = FrameGuard::new(CheckpointFrame::Forward { run, start, accesses: AccessMap::default() });
    let out = body()?;
    let Some(CheckpointFrame::Forward { mut run, accesses, .. }) = entered.pop_early() else {
        return Err(other_thread_error());
    };
    run.created = start..next_id();
    run.inputs = inputs.iter().map(|t| t.storage_id()).collect();
    // The versions of the inputs are checked where they are saved.
    run.accesses = accesses.into_iter().filter(|(id, _)| !run.inputs.contains(id)).collect();
    Ok((out, run))
}

/// Runs the body of a checkpoint again on `inputs` and replays the record. Also reports whether the run read
/// the older storages that the forward run read, and no others. A body that calls [`is_recomputing`] may read
/// others.
pub(super) fn run_recompute<R>(
    run: &Arc<ForwardRecord>,
    inputs: &[Tensor],
    body: impl FnOnce() -> Result<R>,
) -> Result<(R, bool)> {
    let entered = FrameGuard::new(CheckpointFrame::Recompute {
        run: Arc::clone(run),
        cursors: ReplayCursors::default(),
        start: next_id(),
        accesses: AccessMap::default(),
        may_differ: false,
    });
    let out = body()?;
    let Some(CheckpointFrame::Recompute { accesses, may_differ, .. }) = entered.pop_early() else {
        return Err(other_thread_error());
    };
    let is_known = |id: &u64| {
        run.accesses.contains_key(id)
            || run.inputs.contains(id)
            || run.created.contains(id)
            || inputs.iter().any(|t| t.storage_id() == *id)
    };
    let none_is_new = accesses.iter().all(|(id, access)| access.is_written || is_known(id));
    let none_is_missing =
        run.accesses.iter().all(|(id, access)| access.is_written || accesses.contains_key(id));
    Ok((out, may_differ || (none_is_new && none_is_missing)))
}

#[track_caller]
fn other_thread_error() -> Error {
    Error::argument("checkpoint", "a checkpoint's body ended on another thread than it began")
}

impl ForwardRecord {
    /// Reports whether everything that the run has read is there and unchanged.
    pub(super) fn is_current(&self) -> bool {
        let same = |storage: Arc<Storage>, version| storage.version() == version;
        self.accesses.values().all(|access| {
            access.is_written || access.storage.upgrade().is_some_and(|storage| same(storage, access.version))
        })
    }
}

/// Reports whether this thread recomputes the body of a [`checkpoint`](super::checkpoint) for its gradient. A
/// module that changes state in its forward pass must not change it then; [`update_state`] ensures that. A
/// body that calls this function may read other tensors in its second run.
///
/// ```
/// # use forebay_core::autograd;
/// assert!(!autograd::is_recomputing());
/// ```
#[must_use]
pub fn is_recomputing() -> bool {
    let recomputes = is_inside_recompute();
    if recomputes {
        FRAME_STACK.with_borrow_mut(|stack| {
            for frame in stack {
                if let CheckpointFrame::Recompute { may_differ, .. } = frame {
                    *may_differ = true;
                }
            }
        });
    }
    recomputes
}

/// Reports [`is_recomputing`] to an operation that reads the same tensors in both runs.
pub(crate) fn is_inside_recompute() -> bool {
    observer::is_active() && RECOMPUTE_DEPTH.get() > 0
}

/// Runs `update`, which changes module state in the forward pass, such as running statistics or a counter.
/// The update is not recorded, and is skipped when a [`checkpoint`](super::checkpoint) is recomputed. A
/// checkpointed model therefore changes like one without checkpoints.
///
/// ```
/// # use forebay_core::{autograd, device::Device, dtype::DType, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// # let (x, seen) = (Tensor::ones(&[3], DType::F32, &device)?, Tensor::zeros((), DType::F32, &device)?);
/// autograd::update_state(|| seen.add_(&x.detach().sum_all()?))?;
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
///
/// # Errors
/// Those of `update`.
#[track_caller]
pub fn update_state(update: impl FnOnce() -> Result<()>) -> Result<()> {
    if is_inside_recompute() { Ok(()) } else { run_state_update(update) }
}

/// Runs an update that is not part of the surrounding checkpoint runs.
fn run_state_update<R>(update: impl FnOnce() -> Result<R>) -> Result<R> {
    let _no_grad = super::no_grad();
    let _entered = FrameGuard::new(CheckpointFrame::StateUpdate);
    update()
}

/// Runs an update whose values the forward pass uses. A recomputation gets the values of the forward run.
#[doc(hidden)]
#[track_caller]
pub fn replayable_state_update(update: impl FnOnce() -> Result<StateValues>) -> Result<StateValues> {
    if !observer::is_active() {
        return run_state_update(update);
    }
    let known = FRAME_STACK.with_borrow_mut(|stack| {
        stack.iter_mut().rev().find_map(|frame| match frame {
            CheckpointFrame::Recompute { run, cursors, .. } => {
                cursors.values += 1;
                Some(run.values.get(cursors.values - 1).cloned())
            }
            CheckpointFrame::Forward { .. } | CheckpointFrame::StateUpdate => None,
        })
    });
    let values = match known {
        None => run_state_update(update)?,
        Some(Some(values)) => values,
        Some(None) => {
            return Err(Error::backward(
                "the body of a checkpoint ran other operations when it was recomputed; both runs must be the same",
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

/// Returns the forward runs that record the current event: those inside the innermost recomputation or state
/// update.
fn recording_runs(stack: &mut [CheckpointFrame]) -> impl Iterator<Item = &mut ForwardRecord> {
    stack.iter_mut().rev().map_while(|frame| match frame {
        CheckpointFrame::Forward { run, .. } => Some(run),
        CheckpointFrame::Recompute { .. } | CheckpointFrame::StateUpdate => None,
    })
}

/// Returns the record that the innermost recomputation replays; `None` outside of one or in a state update.
fn innermost_recompute(stack: &mut [CheckpointFrame]) -> Option<(&ForwardRecord, &mut ReplayCursors)> {
    match stack.iter_mut().rev().find(|frame| !matches!(frame, CheckpointFrame::Forward { .. }))? {
        CheckpointFrame::Recompute { run, cursors, .. } => Some((run, cursors)),
        CheckpointFrame::Forward { .. } | CheckpointFrame::StateUpdate => None,
    }
}

/// Returns the training mode of a module: `now`, or in a recomputation the mode of the forward run.
#[doc(hidden)]
pub fn replayable_training_mode(now: bool) -> bool {
    if !observer::is_active() {
        return now;
    }
    FRAME_STACK.with_borrow_mut(|stack| {
        let known = innermost_recompute(stack).and_then(|(run, cursors)| {
            cursors.modes += 1;
            run.modes.get(cursors.modes - 1).copied()
        });
        let mode = known.unwrap_or(now);
        recording_runs(stack).for_each(|run| run.modes.push(mode));
        mode
    })
}

/// Records and replays what the bodies of checkpoints draw, and records what they access.
struct CheckpointObserver;

impl OperationObserver for CheckpointObserver {
    fn is_replaying(&self) -> bool {
        is_inside_recompute()
    }

    fn replayed_draw(&self, device: &Device) -> Option<RandomState> {
        FRAME_STACK.with_borrow_mut(|stack| {
            let (run, cursors) = innermost_recompute(stack)?;
            let &(_, state) = run.draws.get(cursors.draws).filter(|(at, _)| *at == device.address())?;
            cursors.draws += 1;
            recording_runs(stack).for_each(|run| run.draws.push((device.address(), state)));
            Some(state)
        })
    }

    fn record_draw(&self, device: &Device, state: RandomState) {
        FRAME_STACK.with_borrow_mut(|stack| {
            recording_runs(stack).for_each(|run| run.draws.push((device.address(), state)));
        });
    }

    fn record_access(&self, buffer: &Arc<dyn Buffer>, access: Access) {
        let Ok(storage) = (Arc::clone(buffer) as Arc<dyn Any + Send + Sync>).downcast::<Storage>() else {
            return;
        };
        // The stack may be gone already while a thread ends.
        let _ = FRAME_STACK.try_with(|stack| {
            let Ok(mut stack) = stack.try_borrow_mut() else { return };
            for frame in stack.iter_mut().rev() {
                let (start, accesses) = match frame {
                    CheckpointFrame::StateUpdate => break,
                    CheckpointFrame::Forward { start, accesses, .. }
                    | CheckpointFrame::Recompute { start, accesses, .. } => (*start, accesses),
                };
                if storage.id < start {
                    let seen = || TrackedAccess {
                        storage: Arc::downgrade(&storage),
                        version: storage.version(),
                        is_written: false,
                    };
                    accesses.entry(storage.id).or_insert_with(seen).is_written |= access == Access::Write;
                }
            }
        });
    }
}

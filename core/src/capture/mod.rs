//! Captured steps: a training step is recorded once, planned as a whole, and replayed with little host work,
//! like a CUDA graph.
//!
//! [`Device::capture`] runs a closure twice. The first run is eager: it creates gradients and optimiser state,
//! and compiles kernels. The second run is recorded. **Both runs are real steps**: afterwards the parameters
//! have made two steps, and the outputs are those of the second. Each
//! [`replay`](CapturedStep::replay) makes one more step, with bitwise the same results as the closure. CUDA
//! runs a step as one graph from the second replay on; wgpu enqueues commands that were looked up and bound
//! in advance. While a profiler runs, commands are enqueued one by one.
//!
//! A replay reads the current contents of tensors, the current learning rates and step counts of this
//! library's optimisers, and the next random values. Everything else on the host stays as recorded: branches,
//! scalar arguments, shapes, and the choice of tensors. Some work cannot be recorded: reads of device
//! contents, uploads, other streams, other devices, and offloading. Such work makes the capture fail
//! ([`Error::Capture`]), even if the step ignores the operation's error. Work of other threads is not part of
//! the step. The capture fails if such work uses a tensor of the step during the recording, unless both only
//! read it.
//!
//! State that is carried from one step to the next must be a tensor that the step changes in place
//! (`state.copy_(&new)?`). The program must not keep a tensor of the step that is not an output. The next
//! replay would read the old tensor, so the capture fails. Two buffers that are swapped in each step are not
//! detected: copy instead.
//!
//! Memory used only inside the step lies in an arena that the [`CapturedStep`] owns. Commands whose results
//! are not used are dropped, and buffers with disjoint lifetimes share addresses. All other memory of the
//! step (parameters, state, inputs, outputs) is kept alive and pinned. A dry run on the null device requests
//! the same bytes from its pool.
//!
//! ```
//! use forebay_core::{autograd::no_grad, device::Device, dtype::DType, tensor::Tensor};
//! # let device = Device::null(Default::default());
//! let weight = Tensor::randn(&[1, 8], DType::F32, &device)?.to_leaf()?;
//! let x = Tensor::randn(&[32, 8], DType::F32, &device)?;
//! let mut step = device.capture_with(&[&x], |inputs| {
//!     let loss = inputs[0].linear(&weight, None)?.square()?.mean((), false)?;
//!     loss.backward()?;
//!     let _no_grad = no_grad();
//!     if let Some(grad) = weight.grad() {
//!         weight.sub_(&grad.mul(1e-3)?)?;
//!     }
//!     weight.set_grad(None);
//!     Ok(loss)
//! })?;
//! for _ in 0..10 {
//!     let loss = step.run(&[&x])?;
//! }
//! println!("{}", step.stats()); // commands, memory, launches dropped
//! # Ok::<(), forebay_core::error::Error>(())
//! ```

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::amp::{
    self,
    low_precision_copy::{CapturedCast, CapturedCastRead},
};
use crate::autograd::{CapturedGradWrite, Leaf};
use crate::backend::{Command, CommandSequence, OwnedCommand, SegmentId, Slice};
use crate::error::{Error, Result, fail, fail_if};
use crate::memory::{self, Block, Bytes, Request, Tag};
use crate::ops::conv::implicit;
use crate::ops::index::order::{CapturedOrder, RecordedOrder};
use crate::ops::norm::recorded_sum::RecordedSum;
use crate::ops::recurrent::fused as recurrent;
use crate::ops::{attention, matmul};
use crate::runtime::device::{Device, RandomState};
use crate::runtime::dispatch::DispatchGuard;
use crate::runtime::options::default_fusion_min_bytes;
use crate::runtime::profile::WorkItem;
use crate::runtime::stream::{Access, Stream};
use crate::storage::Storage;
use crate::tensor::{CapturedConstant, Tensor};

use crate::runtime::capture::plan::{CapturePlan, CapturedBuffer};
use crate::runtime::capture::recorder::{Buffer, CaptureRecording, RecordedBuffer, RecordedCommand};
#[doc(hidden)]
pub use crate::runtime::capture::replay_params::{PhiloxState, ReplayCtx};

/// Outputs of a captured step: tensors that every replay overwrites.
pub trait CaptureOutputs: Clone {
    /// Returns the outputs without history.
    #[must_use]
    fn detach_all(&self) -> Self;

    /// Returns the tensors of the outputs; `None` if they are unknown. A capture uses them to detect tensors
    /// that the program keeps without returning them from the step.
    fn tensors(&self) -> Option<Vec<Tensor>> {
        None
    }
}

impl CaptureOutputs for () {
    fn detach_all(&self) -> Self {}

    fn tensors(&self) -> Option<Vec<Tensor>> {
        Some(Vec::new())
    }
}

impl CaptureOutputs for Tensor {
    fn detach_all(&self) -> Self {
        self.detach()
    }

    fn tensors(&self) -> Option<Vec<Tensor>> {
        Some(vec![self.clone()])
    }
}

impl<T: CaptureOutputs> CaptureOutputs for Vec<T> {
    fn detach_all(&self) -> Self {
        self.iter().map(T::detach_all).collect()
    }

    fn tensors(&self) -> Option<Vec<Tensor>> {
        Some(self.iter().map(T::tensors).collect::<Option<Vec<_>>>()?.concat())
    }
}

impl<T: CaptureOutputs> CaptureOutputs for Option<T> {
    fn detach_all(&self) -> Self {
        self.as_ref().map(T::detach_all)
    }

    fn tensors(&self) -> Option<Vec<Tensor>> {
        self.as_ref().map_or(Some(Vec::new()), T::tensors)
    }
}

macro_rules! impl_outputs_for_tuples {
    ($(($($t:ident $at:tt),*);)*) => {$(
        impl<$($t: CaptureOutputs),*> CaptureOutputs for ($($t),*) {
            fn detach_all(&self) -> Self { ($(self.$at.detach_all()),*) }
            fn tensors(&self) -> Option<Vec<Tensor>> { Some([$(self.$at.tensors()?),*].concat()) }
        }
    )*};
}
impl_outputs_for_tuples! {
    (A 0, B 1);
    (A 0, B 1, C 2);
}

/// Statistics of a captured step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CaptureStats {
    /// Number of commands of a replay: kernels, products, copies and fills.
    pub commands: usize,
    /// Number of recorded commands that do not run because their results are not used.
    pub dropped: usize,
    /// Number of commands whose parameters are computed at each replay.
    pub dynamic: usize,
    /// Bytes of the arenas that hold buffers used only inside the step.
    pub arena_bytes: u64,
    /// Peak bytes of the recorded run, without memory that was allocated before it.
    pub eager_bytes: u64,
}

impl fmt::Display for CaptureStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { commands, dropped, dynamic: live, arena_bytes: arena, eager_bytes: eager } = self;
        write!(
            f,
            "{commands} commands, {live} of them live, {dropped} dropped; {} where a step takes {}",
            Bytes(*arena),
            Bytes(*eager)
        )
    }
}

/// Captured step; see the [module](self).
///
/// The step owns everything that its replays need, even after the model and the optimiser are dropped.
#[must_use = "a captured step is replayed by it"]
pub struct CapturedStep<O> {
    // Dropped before the memory that it names.
    prepared: Option<Box<dyn CommandSequence>>,
    stage: ReplayStage,
    commands: Vec<RecordedCommand>,
    replay_memory: ReplayMemory,
    stream: Stream,
    /// Random state at the start of the recording, and the number of blocks that the step draws.
    random_state: (RandomState, u64),
    grads: Vec<CapturedGrad>,
    casts: Vec<CapturedCast>,
    orders: Vec<CapturedOrder>,
    inputs: Vec<Tensor>,
    outputs: O,
    stats: CaptureStats,
}

/// Progress of a step's replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplayStage {
    /// Not replayed yet: libraries have not chosen algorithms for these addresses.
    NeverReplayed,
    Replayed,
    /// The backend was asked to prepare the commands.
    PrepareAttempted,
}

/// Memory that replays access.
struct ReplayMemory {
    device: Device,
    arenas: Vec<Block>,
    states: Vec<CapturedState>,
    _constants: Vec<Tensor>,
}

impl ReplayMemory {
    /// Allocates arenas of these bytes.
    fn new(device: &Device, constants: Vec<Tensor>, arena_sizes: Vec<u64>) -> Result<Self> {
        let mut arenas = Vec::with_capacity(arena_sizes.len());
        for bytes in arena_sizes {
            let request = Request::new(bytes).queue(device.current_queue()).tag(Tag::Workspace).op("capture");
            arenas.push(device.pool().alloc(request)?);
        }
        Ok(Self { device: device.clone(), arenas, states: Vec::new(), _constants: constants })
    }

    /// Returns the segment and the offset of each placement, which is an arena and an offset in the arena.
    fn arena_locations(&self, placements: &[Option<(usize, u64)>]) -> Vec<Option<(SegmentId, u64)>> {
        let locate = |placement: &Option<(usize, u64)>| {
            let (arena, offset) = (*placement)?;
            let block = self.arenas.get(arena)?;
            Some((block.segment, block.offset + offset))
        };
        placements.iter().map(locate).collect()
    }
}

/// Pinned storage that outlives a replay.
struct CapturedState {
    storage: Arc<Storage>,
    access: Access,
    slice: Slice,
}

/// Leaf whose gradient the step produces.
struct CapturedGrad {
    leaf: Arc<Leaf>,
    grad: Tensor,
    /// If true, the step accumulates into the gradient that existed before.
    accumulates: bool,
}

impl CapturedGrad {
    /// Returns the gradient that a write produced, or `None` if the leaf has no gradient any more.
    fn from_write(write: &CapturedGradWrite) -> Option<Self> {
        let (leaf, grad) = (Arc::clone(&write.leaf), write.leaf.grad()?);
        let accumulates =
            write.before.as_ref().is_some_and(|before| before.ptr_eq(&grad.downgrade_storage()));
        Some(Self { leaf, grad, accumulates })
    }
}

impl<O> fmt::Debug for CapturedStep<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Captured({})", self.stats)
    }
}

impl Drop for ReplayMemory {
    fn drop(&mut self) {
        self.states.iter().for_each(|kept| kept.storage.unpin_from_capture());
        self.arenas.drain(..).for_each(|block| self.device.pool().free(block));
    }
}

/// Guard that enables fusion on the null device during a recording, because memory is planned by commands and
/// must match that of a real device.
struct FusionOverride<'a>(&'a Device, bool);

impl<'a> FusionOverride<'a> {
    fn new(device: &'a Device) -> Self {
        let changed = device.is_null() && device.fusion_min_bytes().is_none();
        if changed {
            device.set_fusion_min_bytes(default_fusion_min_bytes());
        }
        Self(device, changed)
    }
}

impl Drop for FusionOverride<'_> {
    fn drop(&mut self) {
        if self.1 {
            self.0.set_fusion_min_bytes(None);
        }
    }
}

/// Reason why captures do not nest.
const NESTED_CAPTURE: &str = "a step inside a step; capture the outer one alone";

impl Device {
    /// Captures a step on the current stream. `step` runs twice, and both runs are real steps. See
    /// [`capture`](crate::capture).
    ///
    /// New data is written into the tensors that the step reads ([`Tensor::copy_`]), or passed as inputs (see
    /// [`capture_with`](Self::capture_with)).
    ///
    /// # Errors
    /// Those of `step`, and [`Error::Capture`] if the step cannot be captured.
    #[track_caller]
    pub fn capture<O: CaptureOutputs>(&self, step: impl FnMut() -> Result<O>) -> Result<CapturedStep<O>> {
        CapturedStep::new(self, Vec::new(), step)
    }

    /// Captures a step with inputs. `step` receives copies of `inputs`, into which [`CapturedStep::run`]
    /// copies new data.
    ///
    /// # Errors
    /// Those of [`capture`](Self::capture), and an input on another device.
    #[track_caller]
    pub fn capture_with<O: CaptureOutputs>(
        &self,
        inputs: &[&Tensor],
        mut step: impl FnMut(&[Tensor]) -> Result<O>,
    ) -> Result<CapturedStep<O>> {
        let own = self.copy_inputs("capture_with", inputs)?;
        CapturedStep::new(self, own.clone(), || step(&own))
    }

    /// Captures a step with inputs that has already run eagerly, so `step` runs only once, while it is
    /// recorded. Each batch of a training loop is then one step: the first is eager, the second recorded, the
    /// others are [replayed](CapturedStep::run).
    ///
    /// # Errors
    /// Those of [`capture_with`](Self::capture_with), and a first optimiser step, which creates the state,
    /// inside the recording.
    #[track_caller]
    pub fn record_with<O: CaptureOutputs>(
        &self,
        inputs: &[&Tensor],
        step: impl FnMut(&[Tensor]) -> Result<O>,
    ) -> Result<CapturedStep<O>> {
        CapturedStep::record_on_copies(self, inputs, step)?.1
    }

    /// Copies the inputs of a step.
    #[track_caller]
    fn copy_inputs(&self, op: &'static str, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let _tag = memory::scope::enter_tag(Tag::Input);
        let own = inputs.iter().map(|input| {
            if input.device() != self {
                return Err(Error::device(op, self, input.device()));
            }
            input.detach().copy()
        });
        own.collect()
    }
}

/// Returns the storages of a step's outputs, if the outputs are known.
fn output_storages(outputs: &impl CaptureOutputs) -> Option<Vec<Weak<Storage>>> {
    Some(outputs.tensors()?.iter().flat_map(Tensor::downgrade_storages).collect())
}

/// Fails if the step frees memory that existed before it, because a replay would not find that memory.
#[track_caller]
fn check_freed_memory(placements: &[Option<(usize, u64)>], buffers: &[RecordedBuffer]) -> Result<()> {
    let mut placed = placements.iter().zip(buffers).filter(|(placement, _)| placement.is_some());
    let Some((_, freed)) = placed.find(|(_, m)| !m.is_allocated_by_step) else { return Ok(()) };
    fail!(
        capture("capture"),
        "`{}` uses memory of {} that existed before the step and is freed in it, so a replay would not find it; \
         change such a tensor in place, and free gradients where the step ends",
        freed.op,
        Bytes(freed.bytes)
    );
}

/// Returns the access of a step to each of its buffers: a write if any command writes the buffer.
fn merge_accesses(accesses: impl Iterator<Item = (u32, Access)>, buffers: usize) -> Vec<Option<Access>> {
    let mut merged = vec![None; buffers];
    for (buffer, access) in accesses {
        let before: &mut Option<Access> = &mut merged[buffer as usize];
        if *before != Some(Access::Write) {
            *before = Some(access);
        }
    }
    merged
}

/// Makes commands refer to the memory of a replay: the segment and offset of each recorded buffer that has any.
fn relocate_operands(commands: &mut [RecordedCommand], locations: &[Option<(SegmentId, u64)>]) {
    for RecordedCommand { command, .. } in commands {
        command.visit_operands(0, |(segment, offset), _| {
            if let Some(Some((placed, start))) = locations.get(segment.0 as usize) {
                (*segment, *offset) = (*placed, start + *offset);
            }
        });
    }
}

/// Fails if a step replaces a tensor that it reads: each replay would read the tensor of the recording.
///
/// A tensor of the step that outlives it must be an output or a leaf's gradient. Any other one was stored by
/// the program, and must be a state that is not updated in place. The same holds for an output of the
/// previous run that this run reads and does not return, because this run returns a replacement.
#[track_caller]
fn check_state_in_place(
    record: &CaptureRecording,
    first: &[Weak<Storage>],
    outputs: Option<Vec<Weak<Storage>>>,
) -> Result<()> {
    let Some(outputs) = outputs else { return Ok(()) };
    let is_among = |all: &[Weak<Storage>], one: &Weak<dyn Buffer>| {
        all.iter().any(|other| std::ptr::addr_eq(other.as_ptr(), one.as_ptr()))
    };
    let grads: Vec<Weak<Storage>> = record
        .notes::<CapturedGradWrite>()
        .filter_map(|note| note.leaf.grad())
        .flat_map(|grad| grad.downgrade_storages())
        .collect();
    for memory in &record.buffers {
        let storage = &memory.storage;
        if storage.strong_count() == 0 || is_among(&outputs, storage) || is_among(&grads, storage) {
            continue;
        }
        let advice =
            "change a state in place (`state.copy_(&new)`), so that the next replay reads the new state";
        fail_if!(memory.is_allocated_by_step;
            capture("capture"), "the program keeps {memory} that the step makes and does not return. To read it after a replay, return it \
                 from the step; {advice}");
        fail_if!(is_among(first, storage);
            capture("capture"), "the step reads its own earlier result, {memory}, and returns another tensor in its place: a replay would \
                 read the old one again; {advice}");
    }
    Ok(())
}

impl<O: CaptureOutputs> CapturedStep<O> {
    /// Captures a step that runs once before it is recorded.
    fn new(device: &Device, inputs: Vec<Tensor>, mut step: impl FnMut() -> Result<O>) -> Result<Self> {
        device.capture_recorder().check_not_recording("capture", NESTED_CAPTURE)?;
        let first = {
            let _fused = FusionOverride::new(device);
            let outputs = step()?;
            output_storages(&outputs)
        };
        Self::record_step(device, inputs, &first.unwrap_or_default(), step)?.1
    }

    /// Runs a step on copies of its inputs and records it. The outputs are returned even if the capture
    /// fails.
    #[doc(hidden)]
    #[track_caller]
    pub fn record_on_copies(
        device: &Device,
        inputs: &[&Tensor],
        mut step: impl FnMut(&[Tensor]) -> Result<O>,
    ) -> Result<(O, Result<Self>)> {
        let own = device.copy_inputs("record_with", inputs)?;
        Self::record_step(device, own.clone(), &[], || step(&own))
    }

    /// Records a step. `first` has the storages of the outputs of the previous run.
    fn record_step(
        device: &Device,
        inputs: Vec<Tensor>,
        first: &[Weak<Storage>],
        mut step: impl FnMut() -> Result<O>,
    ) -> Result<(O, Result<Self>)> {
        device.capture_recorder().check_not_recording("capture", NESTED_CAPTURE)?;
        device.check_can_enqueue("capture")?;
        let _fused = FusionOverride::new(device);
        // Casts cached by an earlier step would be missing from the recording.
        amp::clear_autocast_cache();
        let running = {
            let mut guard = device.lock_dispatch();
            guard.take_failure()?;
            device.capture_recorder().begin_recording(device, device.current_queue())?
        };
        inputs.iter().for_each(|input| device.capture_recorder().record_input(input.storage()));
        let outputs = step().map(|outputs| outputs.detach_all());
        amp::clear_autocast_cache();
        let outputs = outputs?;
        // Freed before the check for tensors that outlive the step.
        drop(device.capture_recorder().take_notes::<RecordedOrder>(|_| true));
        drop(device.capture_recorder().take_notes::<RecordedSum>(|_| true));
        device.flush_fusion()?;
        let captured = running.into_recording().and_then(|record| {
            let random_draws = device.random_state().offset.wrapping_sub(record.random.offset);
            let random = (record.random, random_draws);
            check_state_in_place(&record, first, output_storages(&outputs))?;
            Self::from_recording(device, inputs, outputs.clone(), random, record)
        });
        Ok((outputs, captured))
    }

    #[track_caller]
    fn from_recording(
        device: &Device,
        inputs: Vec<Tensor>,
        outputs: O,
        random: (RandomState, u64),
        record: CaptureRecording,
    ) -> Result<Self> {
        let eager = record.peak_bytes();
        let copies =
            record.notes::<CapturedCastRead>().map(|read| CapturedCast::new(read.leaf.clone(), &read.copy));
        let copies = copies.collect::<Result<_>>()?;
        let orders = record.notes::<CapturedOrder>().cloned().collect();
        let constants = record.notes::<CapturedConstant>().map(|constant| constant.0.clone()).collect();
        let grads = record.notes::<CapturedGradWrite>().filter_map(CapturedGrad::from_write).collect();
        let CaptureRecording { commands, operands, buffers: memories, .. } = record;
        let storage = |buffer: Arc<dyn Buffer>| (buffer as Arc<dyn Any + Send + Sync>).downcast().ok();
        let storages: Vec<Option<Arc<Storage>>> =
            memories.iter().map(|m| m.storage.upgrade().and_then(storage)).collect();
        let pieces = memories.iter().zip(&storages).map(|(m, storage)| CapturedBuffer {
            bytes: m.bytes.next_multiple_of(16),
            outlives_step: storage.is_some(),
        });
        let pieces: Vec<CapturedBuffer> = pieces.collect();
        let source = device.raw_backend().limits();
        let overwritten: Vec<Option<u32>> = commands.iter().map(|command| command.overwritten).collect();
        let accesses = operands.iter().map(SmallVec::as_slice);
        let CapturePlan { is_needed: runs, placements, arena_sizes: arenas } =
            crate::runtime::capture::plan::plan_capture(
                accesses,
                &overwritten,
                &pieces,
                source.alignment.max(16),
                device.pool().max_block_size(),
            );
        check_freed_memory(&placements, &memories)?;
        let total = commands.len();
        fail_if!(total == 0;
            capture("capture"), "the step ran no command on this device; capture it on the device of its tensors");
        let accesses = operands.into_iter().zip(&runs).filter_map(|(t, runs)| runs.then_some(t));
        let accesses = merge_accesses(accesses.flatten(), pieces.len());
        let commands = commands.into_iter().zip(&runs).filter_map(|(c, runs)| runs.then_some(c));
        let mut commands: Vec<RecordedCommand> = commands.collect();
        let stats = CaptureStats {
            commands: commands.len(),
            dropped: total - commands.len(),
            dynamic: commands.iter().filter(|c| c.dynamic_params.is_some()).count(),
            arena_bytes: arenas.iter().sum(),
            eager_bytes: eager,
        };
        let mut memory = ReplayMemory::new(device, constants, arenas)?;
        let mut locations = memory.arena_locations(&placements);
        for ((storage, access), location) in storages.into_iter().zip(accesses).zip(&mut locations) {
            let (Some(storage), Some(access)) = (storage, access) else { continue };
            let slice = storage.pin_for_capture()?;
            *location = Some((slice.segment, slice.offset));
            memory.states.push(CapturedState { storage, access, slice });
        }
        relocate_operands(&mut commands, &locations);
        let stream = Stream::current(device);
        Ok(Self {
            prepared: None,
            stage: ReplayStage::NeverReplayed,
            commands,
            replay_memory: memory,
            stream,
            random_state: random,
            grads,
            casts: copies,
            orders,
            inputs,
            outputs,
            stats,
        })
    }

    /// Replays the step. The outputs are the same tensors each time, with new contents: copy values that must
    /// be kept.
    ///
    /// # Errors
    /// A step is being captured. A gradient that the step accumulates into was replaced.
    #[track_caller]
    pub fn replay(&mut self) -> Result<O> {
        let device = self.replay_memory.device.clone();
        device.check_can_enqueue("replay")?;
        device
            .capture_recorder()
            .check_not_recording("replay", "a captured step inside a step; call the closure itself")?;
        for CapturedGrad { leaf, grad, .. } in self.grads.iter().filter(|grown| grown.accumulates) {
            match leaf.grad() {
                Some(now) if now.is_same_view(grad) => {}
                Some(_) => {
                    fail!(
                        capture("replay"),
                        "a gradient that the step adds to is another tensor than when it was captured; capture it again"
                    );
                }
                // A missing gradient counts as zero.
                None => grad.fill_word(0)?,
            }
        }
        let _on = self.stream.enter();
        self.casts.iter_mut().try_for_each(CapturedCast::refresh)?;
        self.orders.iter().try_for_each(CapturedOrder::refresh)?;
        let (then, blocks) = self.random_state;
        let now = ReplayCtx::for_replay(then, device.draw_random_state(blocks));
        let profiled = device.is_profiled();
        let mut changed: SmallVec<[usize; 16]> = SmallVec::new();
        for (at, RecordedCommand { command: kind, dynamic_params: live, .. }) in
            self.commands.iter_mut().enumerate()
        {
            let (OwnedCommand::Launch { params, .. }, Some(live)) = (kind, live) else { continue };
            let state = live(&now).align();
            if state.bytes() != &params[..] {
                params.clear();
                params.extend_from_slice(state.bytes());
                changed.push(at);
            }
        }
        let mut guard = device.lock_dispatch();
        guard.take_failure()?;
        self.bind_states(&guard)?;
        if let Some(prepared) = &mut self.prepared {
            for at in changed {
                if let OwnedCommand::Launch { params, .. } = &self.commands[at].command {
                    prepared.set_params(at, params)?;
                }
            }
        } else if self.stage == ReplayStage::Replayed {
            self.stage = ReplayStage::PrepareAttempted;
            let commands: Vec<Command<'_>> = self.commands.iter().map(|c| c.command.as_command()).collect();
            self.prepared = device.queue_backend(device.current_queue())?.prepare_commands(&commands)?;
        }
        match &mut self.prepared {
            Some(prepared) if !profiled => prepared.enqueue()?,
            _ => self.enqueue_commands(&device)?,
        }
        self.casts.iter_mut().for_each(CapturedCast::record_versions);
        drop(guard);
        if self.stage == ReplayStage::NeverReplayed {
            self.stage = ReplayStage::Replayed;
        }
        for CapturedGrad { leaf, grad, .. } in &self.grads {
            leaf.set_grad(Some(grad.clone()));
        }
        self.casts.iter().for_each(CapturedCast::publish);
        Ok(self.outputs.clone())
    }

    /// Copies `inputs` into the captured inputs and replays the step.
    ///
    /// # Errors
    /// Those of [`replay`](Self::replay), and inputs whose number, shape or dtype differs from the capture.
    #[track_caller]
    pub fn run(&mut self, inputs: &[&Tensor]) -> Result<O> {
        const OP: &str = "run";
        fail_if!(inputs.len() != self.inputs.len();
            argument(OP), "the step was captured with {} inputs; got {}", self.inputs.len(), inputs.len());
        for (own, input) in self.inputs.iter().zip(inputs) {
            fail_if!(own.shape() != input.shape();
                shape(OP, [own, input]), "an input has the shape that the step was captured with; capture it again for another one");
            fail_if!(own.dtype() != input.dtype();
                dtype(OP, input.dtype()), "the step was captured with {}; capture it again, or cast", own.dtype());
            own.check_same_device(OP, input)?;
        }
        for (own, input) in self.inputs.iter().zip(inputs) {
            own.copy_(&input.detach())?;
        }
        self.replay()
    }

    /// Reports whether the number, shapes and dtypes of the inputs match the capture.
    #[doc(hidden)]
    pub fn accepts_inputs(&self, inputs: &[&Tensor]) -> bool {
        let is_compatible =
            |(own, input): (&Tensor, &&Tensor)| own.shape() == input.shape() && own.dtype() == input.dtype();
        self.inputs.len() == inputs.len() && self.inputs.iter().zip(inputs).all(is_compatible)
    }

    /// Returns the outputs of the last replay.
    #[must_use]
    pub fn outputs(&self) -> O {
        self.outputs.clone()
    }
}

impl<O> CapturedStep<O> {
    /// Returns the statistics of the step, which display as one line.
    #[must_use]
    pub fn stats(&self) -> CaptureStats {
        self.stats
    }

    /// Reports whether replays run as one driver graph: on CUDA, from the second replay on.
    #[must_use]
    pub fn is_driver_graph(&self) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.is_driver_graph())
    }

    /// Orders the replay after conflicting accesses of other queues, and records its own accesses.
    #[track_caller]
    fn bind_states(&self, guard: &DispatchGuard<'_>) -> Result<()> {
        for CapturedState { storage, access, slice } in &self.replay_memory.states {
            storage.device.capture_recorder().record_use_by_other(storage, *access);
            if storage.bind(*access, guard)? != Some(*slice) {
                // invariant: pinned memory does not move
                fail!(capture("replay"), "memory of the step has moved; capture it again");
            }
        }
        Ok(())
    }

    #[track_caller]
    fn enqueue_commands(&self, device: &Device) -> Result<()> {
        for RecordedCommand { command: kind, scope, .. } in &self.commands {
            let command = kind.as_command();
            let work = || match &command {
                Command::Launch(launch) => device.describe_launch(launch),
                Command::Copy { dst, .. } => WorkItem::without_flops("copy", 2 * dst.bytes),
                Command::Fill { dst, .. } => WorkItem::without_flops("fill", dst.bytes),
                Command::Matmul(call) => matmul::problem::describe_for_profiler(call),
                Command::BatchedMatmul(call) => matmul::problem::describe_batched(call),
                Command::Attention(call) => attention::describe_for_profiler(call),
                Command::Convolution(call) => implicit::describe_for_profiler(call),
                Command::Recurrent(call) => recurrent::describe_for_profiler(call),
            };
            fail_if!(!device.enqueue_timed(device.current_queue(), *scope, work, |queue| queue.enqueue(&command))?;
                capture("replay"), "the library declines a call that it accepted at capture; capture it again");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd;
    use crate::dtype::DType;

    /// Returns the statistics, allocated bytes and peak bytes of a captured and replayed step.
    fn bytes(device: &Device, fused: Option<u64>) -> Result<(CaptureStats, u64, u64)> {
        device.set_fusion_min_bytes(fused);
        let weight = |shape: &[usize]| Tensor::ones(shape, DType::F32, device)?.to_leaf();
        let weights = [weight(&[512, 64])?, weight(&[8, 512])?];
        let x = Tensor::ones([128, 64], DType::F32, device)?;
        let mut step = device.capture(|| {
            let h = x.linear(&weights[0], None)?.gelu()?.mul(2.0)?.tanh()?;
            let loss = h.linear(&weights[1], None)?.square()?.mean((), false)?;
            loss.backward()?;
            let _no_grad = autograd::no_grad();
            for weight in &weights {
                weight.sub_(&weight.grad().expect("a gradient").mul(1e-3)?)?;
                weight.set_grad(None);
            }
            Ok(loss)
        })?;
        step.replay()?;
        Ok((step.stats(), device.memory().allocated(), device.memory().peak_allocated()))
    }

    #[test]
    fn a_dry_run_has_the_memory_of_a_device_that_fuses() -> Result<()> {
        let profile = crate::backend::null::CardProfile::default();
        let dry = bytes(&Device::null(profile.clone()), None)?;
        let real = bytes(&Device::null(profile.clone()), default_fusion_min_bytes())?;
        assert_eq!(dry, real);
        assert!(dry.0.arena_bytes < dry.0.eager_bytes, "{}", dry.0);
        Ok(())
    }

    #[test]
    fn arenas_stay_within_the_largest_block() -> Result<()> {
        let mut profile = crate::backend::null::CardProfile::default().with_wgpu_limits();
        // Drivers' limits are multiples of the alignment, not of the pool's unit.
        profile.source_limits.max_segment = (1 << 20) + 256;
        let device = Device::null(profile);
        let large = Tensor::ones([1 << 18], DType::F32, &device)?;
        let small = Tensor::ones([64], DType::F32, &device)?;
        let mut step = device.capture(|| {
            let (a, b) = (large.cumsum(0)?, small.cumsum(0)?);
            a.sum((), false)?.add(&b.sum((), false)?)
        })?;
        step.replay()?;
        let max_block = device.pool().max_block_size();
        assert!(step.stats().arena_bytes > max_block, "{}", step.stats());
        Ok(())
    }
}

//! A step that is recorded once, planned as a whole, and run again with almost no work of the host.
//!
//! [`Device::capture`] runs a closure twice: once as ever, so that gradients and the optimiser's state are there and kernels
//! are compiled, and once while its commands are recorded. **Both are real steps**: behind it, parameters have made two
//! of them, and the outputs are those of the second. Each [`replay`](CapturedStep::replay) is one more, with the same bits that the closure
//! would have given. A CUDA device runs it as one graph from the second replay on; wgpu is given commands that were looked up and
//! bound ahead. While a profiler runs, commands are given one by one.
//!
//! What a replay takes anew: contents of tensors that the step reads, the learning rate and the steps of the optimisers here, and random
//! numbers, which go on. Everything else of the host is as it was when the step was recorded: branches, numbers that are given to
//! operations, shapes, and which tensors it uses. What cannot be recorded is an error when the step is captured ([`Error::Capture`]), also
//! where the step itself ignores the error of its operation: contents read from the device or uploaded, other streams, memory that moves to
//! the host.
//!
//! A state that goes from one step to the next is a tensor that the step changes in place (`state.copy_(&new)?`). A tensor that the step
//! makes, and that the program keeps without getting it from the step, is an error, because the next replay would read the old one. Two
//! buffers that trade places at each step are not noticed: copy instead.
//!
//! Memory that only the step uses is planned ahead and lies in an arena that the [`CapturedStep`] owns: kernels and products whose results nobody
//! needs are dropped, and pieces share a place when they are never needed at once. All else that it touches (parameters, state, inputs, outputs) it
//! keeps alive and where it is. A dry run on the null device asks its pool for the same bytes.
//!
//! ```
//! use forebay_core::{autograd::no_grad, device::Device, dtype::DType, tensor::Tensor};
//! # let device = Device::null(Default::default());
//! let weight = Tensor::randn(&[1, 8], DType::F32, &device)?.requires_grad_()?;
//! let x = Tensor::randn(&[32, 8], DType::F32, &device)?;
//! let mut step = device.capture_with(&[&x], |inputs| {
//!     let loss = inputs[0].linear(&weight, None)?.square()?.mean(&[], false)?;
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

use std::fmt;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::amp::{self, low_precision_copy::CapturedCast};
use crate::autograd::Leaf;
use crate::backend::command::OperandAccess;
use crate::backend::{Command, CommandSequence, OwnedCommand, SegmentId, Slice};
use crate::error::{Error, Result};
use crate::memory::{self, Block, Bytes, Request, Tag};
use crate::ops::elementwise::fusion;
use crate::ops::{attention, matmul};
use crate::runtime::device::{Device, RandomState};
use crate::runtime::profile::WorkItem;
use crate::runtime::stream::{Access, DispatchGuard, Stream};
use crate::storage::Storage;
use crate::tensor::Tensor;

use crate::runtime::capture::plan::{CapturePlan, CapturedBuffer};
pub(crate) use crate::runtime::capture::recorder::CaptureRecorder;
use crate::runtime::capture::recorder::{CaptureRecording, RecordedCommand, capture_error};
#[doc(hidden)]
pub use crate::runtime::capture::replay_params::{PhiloxState, ReplayCtx};

/// What a captured step gives: tensors, each of which every replay writes again.
pub trait CaptureOutputs: Clone {
    /// The same without history.
    #[must_use]
    fn detach_all(&self) -> Self;

    /// Its tensors. With them, a capture finds tensors that a step makes and the program keeps by another way, which is an error.
    /// `None` if they are not known.
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

impl<A: CaptureOutputs, B: CaptureOutputs> CaptureOutputs for (A, B) {
    fn detach_all(&self) -> Self {
        (self.0.detach_all(), self.1.detach_all())
    }

    fn tensors(&self) -> Option<Vec<Tensor>> {
        Some([self.0.tensors()?, self.1.tensors()?].concat())
    }
}

impl<A: CaptureOutputs, B: CaptureOutputs, C: CaptureOutputs> CaptureOutputs for (A, B, C) {
    fn detach_all(&self) -> Self {
        (self.0.detach_all(), self.1.detach_all(), self.2.detach_all())
    }

    fn tensors(&self) -> Option<Vec<Tensor>> {
        Some([self.0.tensors()?, self.1.tensors()?, self.2.tensors()?].concat())
    }
}

/// What a captured step is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CaptureStats {
    /// Commands of a replay: kernels, products, copies and fills.
    pub commands: usize,
    /// Commands that were recorded and do not run: nobody needs what they make.
    pub dropped: usize,
    /// Commands whose parameters a replay makes anew.
    pub dynamic: usize,
    /// Bytes of memory that only the step uses, as planned.
    pub arena_bytes: u64,
    /// The most bytes that the step held at once when it was recorded, besides what was there before.
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

/// A captured step: see the [module](self).
///
/// It owns all that its replays need, also when the model and the optimiser are gone, and gives it back when it is dropped.
#[must_use = "a captured step is replayed by it"]
pub struct CapturedStep<O> {
    // Before the memory that it names.
    prepared: Option<Box<dyn CommandSequence>>,
    stage: ReplayStage,
    commands: Vec<RecordedCommand>,
    replay_memory: ReplayMemory,
    stream: Stream,
    /// Where random numbers stood when it was recorded, and how many blocks it draws.
    random_state: (RandomState, u64),
    grads: Vec<CapturedGrad>,
    casts: Vec<CapturedCast>,
    inputs: Vec<Tensor>,
    outputs: O,
    stats: CaptureStats,
}

/// How often it was replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplayStage {
    /// Never: its places are new to libraries that look for the best algorithm.
    NeverReplayed,
    Replayed,
    /// The backend was asked for a quicker form.
    PrepareAttempted,
}

/// What a replay touches.
struct ReplayMemory {
    device: Device,
    arenas: Vec<Block>,
    states: Vec<CapturedState>,
    _constants: Vec<Tensor>,
}

/// Memory that is there beyond a replay.
struct CapturedState {
    storage: Arc<Storage>,
    access: Access,
    slice: Slice,
}

/// A leaf whose gradient the step leaves behind.
struct CapturedGrad {
    leaf: Arc<Leaf>,
    grad: Tensor,
    /// Whether the step adds to the gradient that was there.
    accumulates: bool,
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

/// While a step is recorded on the null device, chains fuse there as they do by default elsewhere: memory is planned by commands.
struct FusionOverride<'a>(&'a Device, bool);

impl<'a> FusionOverride<'a> {
    fn new(device: &'a Device) -> Self {
        let changed = device.is_null() && device.fusion_min_bytes().is_none();
        if changed {
            device.set_fusion_min_bytes(fusion::min_bytes_or_default());
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

/// Why no step is captured within another.
const NESTED_CAPTURE: &str = "a step inside a step; capture the outer one alone";

impl Device {
    /// Captures a step, on the stream that is current: `step` runs twice, and both runs are real. See [`capture`](crate::capture).
    ///
    /// New data is written into the tensors that the step reads ([`Tensor::copy_`]), or given by [`capture_with`](Self::capture_with).
    ///
    /// # Errors
    /// What `step` returns; [`Error::Capture`] if it does what cannot be captured; memory runs out.
    pub fn capture<O: CaptureOutputs>(&self, step: impl FnMut() -> Result<O>) -> Result<CapturedStep<O>> {
        CapturedStep::new(self, Vec::new(), step)
    }

    /// The same for a step on inputs, which it is given as tensors of its own. [`CapturedStep::run`] copies others into these.
    ///
    /// # Errors
    /// As [`capture`](Self::capture); an input is on another device.
    pub fn capture_with<O: CaptureOutputs>(
        &self,
        inputs: &[&Tensor],
        mut step: impl FnMut(&[Tensor]) -> Result<O>,
    ) -> Result<CapturedStep<O>> {
        let own = self.copy_inputs("capture_with", inputs)?;
        CapturedStep::new(self, own.clone(), || step(&own))
    }

    /// [`capture_with`](Self::capture_with) for a step that was made before, like this: it runs once, while it is recorded. So each batch of a
    /// training loop is one step: the first is made eagerly, the second recorded, the others are [run](CapturedStep::run).
    ///
    /// # Errors
    /// As [`capture_with`](Self::capture_with); an optimiser makes its first step, and its state, in it.
    pub fn record_with<O: CaptureOutputs>(
        &self,
        inputs: &[&Tensor],
        step: impl FnMut(&[Tensor]) -> Result<O>,
    ) -> Result<CapturedStep<O>> {
        CapturedStep::record_on_copies(self, inputs, step)?.1
    }

    /// Copies of a step's inputs.
    fn copy_inputs(&self, op: &'static str, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let _tag = memory::scope::enter_tag(Tag::Input);
        let own = inputs.iter().map(|input| {
            if input.device() != self {
                let (left, right) = (self.to_string(), input.device().to_string());
                return Err(Error::Device { op, left, right });
            }
            input.detach().copy()
        });
        own.collect()
    }
}

/// The memory of a step's outputs, if they are known.
fn output_storages(outputs: &impl CaptureOutputs) -> Option<Vec<Weak<Storage>>> {
    Some(outputs.tensors()?.iter().flat_map(Tensor::downgrade_storages).collect())
}

/// Fails where a step makes a tensor in place of one that it reads: each replay would read the one that it read when it was recorded.
///
/// A tensor of the step that is there beyond it is an output, or a gradient of a leaf. Any other one is the program's, which has put it
/// somewhere. So is an output of the run before that this run uses and does not give: this run gives another one in its place.
fn check_state_in_place(
    record: &CaptureRecording,
    first: &[Weak<Storage>],
    outputs: Option<Vec<Weak<Storage>>>,
) -> Result<()> {
    let Some(outputs) = outputs else { return Ok(()) };
    let is_among = |all: &[Weak<Storage>], one: &Weak<Storage>| all.iter().any(|other| other.ptr_eq(one));
    let grads: Vec<Weak<Storage>> = record
        .graded_leaves
        .iter()
        .filter_map(|(leaf, _)| leaf.grad())
        .flat_map(|grad| grad.downgrade_storages())
        .collect();
    for memory in &record.buffers {
        let storage = &memory.storage;
        if storage.strong_count() == 0 || is_among(&outputs, storage) || is_among(&grads, storage) {
            continue;
        }
        let advice = "change a state in place (`state.copy_(&new)`), so that the next replay reads what this one leaves";
        if memory.is_allocated_by_step {
            let reason = format!(
                "the program keeps {memory} that the step makes and does not return. If it is to be seen behind a replay, return it \
                 from the step; {advice}"
            );
            return Err(capture_error("capture", &reason));
        }
        if is_among(first, storage) {
            let reason = format!(
                "the step reads what it returned when it ran before, {memory}, and returns another tensor in its place: a replay would \
                 read the old one again; {advice}"
            );
            return Err(capture_error("capture", &reason));
        }
    }
    Ok(())
}

impl<O: CaptureOutputs> CapturedStep<O> {
    /// A step that runs once before it is recorded.
    fn new(device: &Device, inputs: Vec<Tensor>, mut step: impl FnMut() -> Result<O>) -> Result<Self> {
        device.capture_recorder().check_not_recording("capture", NESTED_CAPTURE)?;
        let first = {
            let _fused = FusionOverride::new(device);
            let outputs = step()?;
            output_storages(&outputs)
        };
        Self::record_step(device, inputs, &first.unwrap_or_default(), step)?.1
    }

    /// Makes a step, on copies of its inputs, and records it. What it gives is there even if it cannot be captured.
    #[doc(hidden)]
    pub fn record_on_copies(
        device: &Device,
        inputs: &[&Tensor],
        mut step: impl FnMut(&[Tensor]) -> Result<O>,
    ) -> Result<(O, Result<Self>)> {
        let own = device.copy_inputs("record_with", inputs)?;
        Self::record_step(device, own.clone(), &[], || step(&own))
    }

    /// Records a step. `first` is the memory of what it gave when it ran before.
    fn record_step(
        device: &Device,
        inputs: Vec<Tensor>,
        first: &[Weak<Storage>],
        mut step: impl FnMut() -> Result<O>,
    ) -> Result<(O, Result<Self>)> {
        device.capture_recorder().check_not_recording("capture", NESTED_CAPTURE)?;
        let _fused = FusionOverride::new(device);
        // Casts that are kept from one step to the next would never be made again.
        amp::clear_autocast_cache();
        let running = {
            let mut gate = device.lock_dispatch();
            gate.take_failure()?;
            device.capture_recorder().begin_recording(device, device.current_queue())?
        };
        let outputs = step().map(|outputs| outputs.detach_all());
        amp::clear_autocast_cache();
        let outputs = outputs?;
        device.flush_fusion()?;
        let captured = running.into_recording().and_then(|record| {
            let drawn = device.random_state().offset.wrapping_sub(record.random.offset);
            let random = (record.random, drawn);
            check_state_in_place(&record, first, output_storages(&outputs))?;
            Self::from_recording(device, inputs, outputs.clone(), random, record)
        });
        Ok((outputs, captured))
    }

    fn from_recording(
        device: &Device,
        inputs: Vec<Tensor>,
        outputs: O,
        random: (RandomState, u64),
        record: CaptureRecording,
    ) -> Result<Self> {
        let eager = record.peak_bytes();
        let CaptureRecording {
            commands,
            operands: touched,
            buffers: memories,
            graded_leaves: leaves,
            cast_leaves: copied,
            constants,
            ..
        } = record;
        let copies = copied
            .into_iter()
            .map(|(leaf, memory)| CapturedCast::new(leaf, &memory))
            .collect::<Result<_>>()?;
        let storages: Vec<Option<Arc<Storage>>> = memories.iter().map(|m| m.storage.upgrade()).collect();
        let pieces: Vec<CapturedBuffer> = memories
            .iter()
            .zip(&storages)
            .map(|(m, storage)| CapturedBuffer {
                bytes: m.bytes.next_multiple_of(16),
                outlives_step: storage.is_some(),
            })
            .collect();
        let source = device.raw_backend().limits();
        let touches = touched.iter().map(SmallVec::as_slice);
        let CapturePlan { is_needed: runs, placements: places, arena_sizes: arenas } =
            crate::runtime::capture::plan::plan_capture(
                touches,
                &pieces,
                source.alignment.max(16),
                source.max_segment,
            );
        let strange =
            places.iter().zip(&memories).find(|(place, m)| place.is_some() && !m.is_allocated_by_step);
        if let Some((_, m)) = strange {
            let reason = format!(
                "`{}` uses memory of {} that was there before the step and is gone behind it, so a replay would not find it; \
                 change such a tensor in place, and free gradients where the step ends",
                m.op,
                Bytes(m.bytes)
            );
            return Err(capture_error("capture", &reason));
        }
        let total = commands.len();
        if total == 0 {
            return Err(capture_error(
                "capture",
                "the step gave this device nothing to do; capture it on the device of its tensors",
            ));
        }
        let touched = touched.into_iter().zip(&runs).filter_map(|(t, runs)| runs.then_some(t));
        let mut written = vec![None; pieces.len()];
        for (number, touch) in touched.flatten() {
            let before: &mut Option<OperandAccess> = &mut written[number as usize];
            if *before != Some(OperandAccess::Write) {
                *before = Some(touch);
            }
        }
        let commands = commands.into_iter().zip(&runs).filter_map(|(c, runs)| runs.then_some(c));
        let mut commands: Vec<RecordedCommand> = commands.collect();
        let stats = CaptureStats {
            commands: commands.len(),
            dropped: total - commands.len(),
            dynamic: commands.iter().filter(|c| c.dynamic_params.is_some()).count(),
            arena_bytes: arenas.iter().sum(),
            eager_bytes: eager,
        };
        let mut memory = ReplayMemory {
            device: device.clone(),
            arenas: Vec::new(),
            states: Vec::new(),
            _constants: constants,
        };
        for bytes in arenas {
            let request = Request::new(bytes).queue(device.current_queue()).tag(Tag::Workspace).op("capture");
            memory.arenas.push(device.pool().alloc(request)?);
        }
        let mut at: Vec<Option<(SegmentId, u64)>> = places
            .iter()
            .map(|place| {
                let (arena, offset) = (*place)?;
                let block = memory.arenas.get(arena)?;
                Some((block.segment, block.offset + offset))
            })
            .collect();
        for ((storage, touch), at) in storages.into_iter().zip(written).zip(&mut at) {
            let (Some(storage), Some(touch)) = (storage, touch) else { continue };
            let access = if touch == OperandAccess::Write { Access::Write } else { Access::Read };
            let place = storage.pin_for_capture()?;
            *at = Some((place.segment, place.offset));
            memory.states.push(CapturedState { storage, access, slice: place });
        }
        for RecordedCommand { command: kind, .. } in &mut commands {
            kind.visit_operands(0, |(segment, offset), _| {
                if let Some(Some((there, start))) = at.get(segment.0 as usize) {
                    (*segment, *offset) = (*there, start + *offset);
                }
            });
        }
        let leaves = leaves
            .into_iter()
            .filter_map(|(leaf, before)| {
                let grad = leaf.grad()?;
                let adds = before.is_some_and(|before| before.ptr_eq(&grad.downgrade_storage()));
                Some(CapturedGrad { leaf, grad, accumulates: adds })
            })
            .collect();
        let stream = Stream::current(device);
        Ok(Self {
            prepared: None,
            stage: ReplayStage::NeverReplayed,
            commands,
            replay_memory: memory,
            stream,
            random_state: random,
            grads: leaves,
            casts: copies,
            inputs,
            outputs,
            stats,
        })
    }

    /// Makes the step once more. Its outputs are the same tensors each time, with new contents: copy what is to stay.
    ///
    /// # Errors
    /// The device was lost; a step is being captured; a gradient that the step adds to was replaced; memory runs out where others have changed
    /// weights that the step has 16-bit copies of.
    pub fn replay(&mut self) -> Result<O> {
        let device = self.replay_memory.device.clone();
        device
            .capture_recorder()
            .check_not_recording("replay", "a captured step inside a step; call what it captured")?;
        for CapturedGrad { leaf, grad, .. } in self.grads.iter().filter(|grown| grown.accumulates) {
            match leaf.grad() {
                Some(now) if now.is_same_view(grad) => {}
                Some(_) => {
                    let reason = "a gradient that the step adds to is another tensor than when it was captured; capture it again";
                    return Err(capture_error("replay", reason));
                }
                // As a first one is added to nothing.
                None => grad.fill_word(0)?,
            }
        }
        let _on = self.stream.enter();
        self.casts.iter_mut().try_for_each(CapturedCast::refresh)?;
        let (then, blocks) = self.random_state;
        let now = ReplayCtx::for_replay(then, device.draw_random_state(blocks));
        let profiled = device.is_profiled();
        let mut changed: SmallVec<[usize; 16]> = SmallVec::new();
        for (at, RecordedCommand { command: kind, dynamic_params: live, .. }) in
            self.commands.iter_mut().enumerate()
        {
            let (OwnedCommand::Launch { params, .. }, Some(live)) = (kind, live) else { continue };
            let made = live(&now).align();
            if made.bytes() != &params[..] {
                params.clear();
                params.extend_from_slice(made.bytes());
                changed.push(at);
            }
        }
        let mut gate = device.lock_dispatch();
        gate.take_failure()?;
        self.bind_states(&gate)?;
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
        drop(gate);
        if self.stage == ReplayStage::NeverReplayed {
            self.stage = ReplayStage::Replayed;
        }
        for CapturedGrad { leaf, grad, .. } in &self.grads {
            leaf.set_grad(Some(grad.clone()));
        }
        self.casts.iter().for_each(CapturedCast::publish);
        Ok(self.outputs.clone())
    }

    /// The same on other inputs, which are copied into those that the step was captured with.
    ///
    /// # Errors
    /// As [`replay`](Self::replay); there are more or fewer inputs, or one has another shape or type.
    pub fn run(&mut self, inputs: &[&Tensor]) -> Result<O> {
        const OP: &str = "run";
        if inputs.len() != self.inputs.len() {
            let (expected, got) = (self.inputs.len(), inputs.len());
            return Err(Error::argument(
                OP,
                format!("the step was captured with {expected} inputs; got {got}"),
            ));
        }
        for (own, input) in self.inputs.iter().zip(inputs) {
            if own.shape() != input.shape() {
                let rule = "an input has the shape that the step was captured with; capture it again for another one";
                return Err(Error::shape(OP, rule, &[own.shape(), input.shape()]));
            }
            if own.dtype() != input.dtype() {
                let expected =
                    format!("the step was captured with {}; capture it again, or cast", own.dtype());
                return Err(Error::dtype(OP, input.dtype(), expected));
            }
            own.check_same_device(OP, input)?;
        }
        for (own, input) in self.inputs.iter().zip(inputs) {
            own.copy_(&input.detach())?;
        }
        self.replay()
    }

    /// Whether these are as many inputs as it was captured with, of the same shapes and types.
    #[doc(hidden)]
    pub fn accepts_inputs(&self, inputs: &[&Tensor]) -> bool {
        let same =
            |(own, input): (&Tensor, &&Tensor)| own.shape() == input.shape() && own.dtype() == input.dtype();
        self.inputs.len() == inputs.len() && self.inputs.iter().zip(inputs).all(same)
    }

    /// The outputs, as the last replay has left them.
    #[must_use]
    pub fn outputs(&self) -> O {
        self.outputs.clone()
    }
}

impl<O> CapturedStep<O> {
    /// What it is made of. Displays as one line.
    #[must_use]
    pub fn stats(&self) -> CaptureStats {
        self.stats
    }

    /// Whether replays run as one graph of the driver: on CUDA, from the second on.
    #[must_use]
    pub fn is_driver_graph(&self) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.is_driver_graph())
    }

    /// Puts the replay behind what other queues do with what it touches, and notes it.
    fn bind_states(&self, gate: &DispatchGuard<'_>) -> Result<()> {
        for CapturedState { storage, access, slice: place } in &self.replay_memory.states {
            if storage.bind(*access, gate)? != Some(*place) {
                // invariant: what is held does not move
                return Err(capture_error("replay", "memory of the step has moved; capture it again"));
            }
        }
        Ok(())
    }

    /// Command by command.
    fn enqueue_commands(&self, device: &Device) -> Result<()> {
        for RecordedCommand { command: kind, scope, .. } in &self.commands {
            let command = kind.as_command();
            let work = || match &command {
                Command::Launch(launch) => device.describe_launch(launch),
                Command::Copy { dst, .. } => WorkItem::without_flops("copy", 2 * dst.bytes),
                Command::Fill { dst, .. } => WorkItem::without_flops("fill", dst.bytes),
                Command::Matmul(call) => matmul::describe_for_profiler(call),
                Command::Attention(call) => attention::describe_for_profiler(call),
            };
            if !device.enqueue_timed(device.current_queue(), *scope, work, |lane| command.enqueue(&**lane))? {
                return Err(capture_error(
                    "replay",
                    "the library declines what it took when the step was captured; capture it again",
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd;
    use crate::dtype::DType;

    /// What a card would hold while a step is captured, and replayed.
    fn bytes(device: &Device, fused: Option<u64>) -> Result<(CaptureStats, u64, u64)> {
        device.set_fusion_min_bytes(fused);
        let weight = |shape: &[usize]| Tensor::ones(shape, DType::F32, device)?.requires_grad_();
        let weights = [weight(&[512, 64])?, weight(&[8, 512])?];
        let x = Tensor::ones(&[128, 64], DType::F32, device)?;
        let mut step = device.capture(|| {
            let h = x.linear(&weights[0], None)?.gelu()?.mul(2.0)?.tanh()?;
            let loss = h.linear(&weights[1], None)?.square()?.mean(&[], false)?;
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
    fn a_dry_run_holds_what_a_device_that_fuses_holds() -> Result<()> {
        let profile = crate::backend::null::CardProfile::default();
        let dry = bytes(&Device::null(profile.clone()), None)?;
        let real = bytes(&Device::null(profile.clone()), fusion::min_bytes_or_default())?;
        assert_eq!(dry, real);
        assert!(dry.0.arena_bytes < dry.0.eager_bytes, "{}", dry.0);
        Ok(())
    }
}

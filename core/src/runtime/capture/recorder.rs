//! What is recorded while a step is captured: its commands, and which memory each touches.
//!
//! One thread records on a device at a time. What other threads do meanwhile runs as ever, and is not recorded.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::autograd::Leaf;
use crate::backend::command::OperandAccess;
use crate::backend::{Command, OwnedCommand, SegmentId, Slice};
use crate::error::{Error, Result};
use crate::memory::Bytes;
use crate::memory::scope::{self, ModulePath, Scope};
use crate::ops::kernel::launch::KernelParams;
use crate::runtime::capture::replay_params::{DynamicParams, ReplayCtx};
use crate::runtime::device::{Device, RandomState};
use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};
use crate::storage::Storage;
use crate::tensor::Tensor;

thread_local! {
    /// The tape, by its address, that this thread records on.
    static RECORDING_HERE: ScopedLocal<Cell<usize>> = const { ScopedLocal::new(Cell::new(0)) };
}

/// Where a device records, if it does.
#[derive(Default)]
pub(crate) struct CaptureRecorder {
    active: AtomicBool,
    recording: Mutex<Option<CaptureRecording>>,
}

/// What was recorded so far.
pub(crate) struct CaptureRecording {
    queue: u8,
    /// Where random numbers stood when it began.
    pub(crate) random: RandomState,
    pub(crate) commands: Vec<RecordedCommand>,
    /// What each command touches, by the numbers of the memories.
    pub(crate) operands: Vec<SmallVec<[(u32, OperandAccess); 8]>>,
    pub(crate) buffers: Vec<RecordedBuffer>,
    buffer_ids: FxHashMap<usize, u32>,
    /// Which memory is where, by segment and first byte: its end, and its number.
    buffer_ranges: BTreeMap<(u64, u64), (u64, u32)>,
    /// Leaves that were given gradients, and the memory of those that they had before.
    pub(crate) graded_leaves: Vec<(Arc<Leaf>, Option<Weak<Storage>>)>,
    /// Leaves whose 16-bit copies were read, and the memory of these.
    pub(crate) cast_leaves: Vec<(Tensor, Weak<Storage>)>,
    /// Constants from the host.
    pub(crate) constants: Vec<Tensor>,
    /// Bytes allocated before, and the most of them since.
    allocated_before: u64,
    peak_allocated: u64,
    /// The first thing that cannot be captured.
    error: Option<Error>,
}

/// A piece of memory that commands touch.
pub(crate) struct RecordedBuffer {
    pub(crate) storage: Weak<Storage>,
    pub(crate) bytes: u64,
    /// Whether it was allocated by the step.
    pub(crate) is_allocated_by_step: bool,
    /// The operation that touched it first, and its module.
    pub(crate) op: &'static str,
    module: ModulePath,
}

impl fmt::Display for RecordedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            "" => f.write_str("a tensor")?,
            op => write!(f, "a tensor of `{op}`")?,
        }
        if !self.module.is_root() {
            write!(f, " in {}", self.module)?;
        }
        write!(f, " ({})", Bytes(self.bytes))
    }
}

/// A command that is kept. Its places name a memory by its number, as their segment, and count from its start.
pub(crate) struct RecordedCommand {
    pub(crate) command: OwnedCommand,
    pub(crate) scope: Scope,
    pub(crate) dynamic_params: Option<DynamicParams>,
}

/// While it lives, this thread records on another tape, or on none.
type RecorderScope = ScopedGuard<Cell<usize>>;

/// Ends a recording, also where the step fails or panics.
pub(crate) struct RecordingGuard<'a> {
    recorder: &'a CaptureRecorder,
    _scope: RecorderScope,
}

impl Drop for RecordingGuard<'_> {
    fn drop(&mut self) {
        self.recorder.active.store(false, Ordering::Release);
        let record = self.recorder.lock_recording().take();
        drop(record);
    }
}

impl RecordingGuard<'_> {
    /// What was recorded.
    pub(crate) fn into_recording(self) -> Result<CaptureRecording> {
        let mut record = self
            .recorder
            .lock_recording()
            .take()
            .ok_or_else(|| Error::argument("capture", "nothing was recorded"))?;
        record.error.take().map_or(Ok(record), Err)
    }
}

impl CaptureRecorder {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn lock_recording(&self) -> MutexGuard<'_, Option<CaptureRecording>> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a step is recorded on the device.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Whether what this thread does is recorded.
    #[inline]
    pub(crate) fn is_recording_here(&self) -> bool {
        self.is_active() && RECORDING_HERE.current() == self.address()
    }

    /// Begins to record what this thread does on a queue.
    pub(crate) fn begin_recording(&self, device: &Device, queue: u8) -> Result<RecordingGuard<'_>> {
        let mut record = self.lock_recording();
        if record.is_some() {
            return Err(capture_error(
                "capture",
                "another one is under way on this device; capture one step at a time",
            ));
        }
        let before = device.memory().allocated();
        *record = Some(CaptureRecording {
            queue,
            random: device.random_state(),
            commands: Vec::new(),
            operands: Vec::new(),
            buffers: Vec::new(),
            buffer_ids: FxHashMap::default(),
            buffer_ranges: BTreeMap::new(),
            graded_leaves: Vec::new(),
            cast_leaves: Vec::new(),
            constants: Vec::new(),
            allocated_before: before,
            peak_allocated: before,
            error: None,
        });
        self.active.store(true, Ordering::Release);
        Ok(RecordingGuard { recorder: self, _scope: RecorderScope::new(&RECORDING_HERE, self.address()) })
    }

    /// Does something that is not recorded.
    pub(crate) fn run_unrecorded<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = RecorderScope::new(&RECORDING_HERE, 0);
        work()
    }

    /// Records what this thread does for the one that records.
    pub(crate) fn run_recorded<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = self.is_active().then(|| RecorderScope::new(&RECORDING_HERE, self.address()));
        work()
    }

    /// Fails where a step is recorded that does this. So does the capture at its end, also where the step goes on after the error.
    #[inline]
    pub(crate) fn check_not_recording(&self, op: &'static str, reason: &str) -> Result<()> {
        if !self.is_recording_here() {
            return Ok(());
        }
        self.fail_capture(op, reason);
        Err(capture_error(op, reason))
    }

    /// Lets the capture fail at its end, for what cannot fail itself.
    pub(crate) fn fail_capture(&self, op: &'static str, reason: &str) {
        self.with_recording(|record| {
            record.error.get_or_insert_with(|| capture_error(op, reason));
        });
    }

    fn with_recording(&self, change: impl FnOnce(&mut CaptureRecording)) {
        if self.is_recording_here()
            && let Some(record) = &mut *self.lock_recording()
        {
            change(record);
        }
    }

    /// Notes new memory.
    #[inline]
    pub(crate) fn record_allocation(&self, storage: &Arc<Storage>) {
        self.with_recording(|record| {
            record.buffer_id(storage, true);
        });
    }

    /// Notes where memory is that the next command touches.
    #[inline]
    pub(crate) fn record_binding(&self, storage: &Arc<Storage>, slice: Slice) {
        self.with_recording(|record| {
            let number = record.buffer_id(storage, false);
            record.insert_range(slice, number);
        });
    }

    /// Keeps a constant for the replays.
    pub(crate) fn keep_constant(&self, constant: &Tensor) {
        self.with_recording(|record| record.constants.push(constant.clone()));
    }

    /// Notes that a leaf's 16-bit copy is read.
    pub(crate) fn record_cast_read(&self, leaf: &Tensor, copy: &Tensor) {
        self.with_recording(|record| {
            if !record.cast_leaves.iter().any(|(known, _)| known.is_same_view(leaf)) {
                record.cast_leaves.push((leaf.clone(), copy.downgrade_storage()));
            }
        });
    }

    /// Notes that a leaf is given a gradient, and the one that it has.
    #[inline]
    pub(crate) fn record_grad_write(&self, leaf: &Arc<Leaf>, before: Option<&Tensor>) {
        self.with_recording(|record| {
            if !record.graded_leaves.iter().any(|(known, _)| Arc::ptr_eq(known, leaf)) {
                record.graded_leaves.push((Arc::clone(leaf), before.map(Tensor::downgrade_storage)));
            }
        });
    }

    /// Keeps a command that was just enqueued.
    #[cold]
    pub(crate) fn push_command(
        &self,
        device: &Device,
        queue: u8,
        scope: Scope,
        command: &Command<'_>,
    ) -> Result<()> {
        if let Command::Copy { dst: Slice { bytes: 0, .. }, .. }
        | Command::Fill { dst: Slice { bytes: 0, .. }, .. } = command
        {
            return Ok(());
        }
        let allocated = device.memory().allocated();
        let mut record = self.lock_recording();
        let Some(record) = &mut *record else { return Ok(()) };
        if queue != record.queue {
            let reason = "the step runs on several streams; a captured one runs on the stream that is current where it is captured";
            return Err(record.set_error(reason));
        }
        record.peak_allocated = record.peak_allocated.max(allocated);
        let written = match command {
            Command::Launch(launch) => device.kernel_write_mask(launch.kernel),
            _ => 0,
        };
        let mut kind = OwnedCommand::from_command(command);
        let mut touched = SmallVec::new();
        let mut strange = false;
        kind.visit_operands(written, |(segment, offset), touch| {
            match record.find_buffer(segment.0, *offset) {
                Some((number, start)) => {
                    (*segment, *offset) = (SegmentId(number.into()), *offset - start);
                    touched.push((number, touch));
                }
                None => strange = true,
            }
        });
        if strange {
            return Err(record.set_error("a command uses memory that belongs to no tensor of this thread"));
        }
        record.commands.push(RecordedCommand { command: kind, scope, dynamic_params: None });
        record.operands.push(touched);
        Ok(())
    }

    /// Says how the parameters of the last command are made at each of its runs.
    pub(crate) fn set_dynamic_params(
        &self,
        make: impl Fn(&ReplayCtx) -> KernelParams + Send + Sync + 'static,
    ) {
        self.with_recording(|record| {
            if let Some(last) = record.commands.last_mut() {
                last.dynamic_params = Some(Box::new(make));
            }
        });
    }
}

impl CaptureRecording {
    /// Bytes that the step held at once besides what was there.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_allocated - self.allocated_before
    }

    /// Notes that a command could not be recorded, which has run: the capture fails, whatever the step does with the error.
    fn set_error(&mut self, reason: &str) -> Error {
        self.error.get_or_insert_with(|| capture_error("capture", reason));
        capture_error("capture", reason)
    }

    fn buffer_id(&mut self, storage: &Arc<Storage>, born: bool) -> u32 {
        // The weak handle keeps the address from being another one's.
        *self.buffer_ids.entry(Arc::as_ptr(storage).addr()).or_insert_with(|| {
            let (storage, bytes) = (Arc::downgrade(storage), storage.bytes());
            let Scope { op, module, .. } = scope::current();
            self.buffers.push(RecordedBuffer { storage, bytes, is_allocated_by_step: born, op, module });
            self.buffers.len() as u32 - 1
        })
    }

    /// From here on memory is there, and nothing else.
    fn insert_range(&mut self, slice: Slice, number: u32) {
        let (segment, start) = (slice.segment.0, slice.offset);
        let end = start + slice.bytes;
        if self.buffer_ranges.get(&(segment, start)) == Some(&(end, number)) {
            return;
        }
        while let Some((&key, &(other_end, _))) = self.buffer_ranges.range(..(segment, end)).next_back() {
            if key.0 != segment || other_end <= start {
                break;
            }
            self.buffer_ranges.remove(&key);
        }
        self.buffer_ranges.insert((segment, start), (end, number));
    }

    /// The number of the memory at a place, and where it starts.
    fn find_buffer(&self, segment: u64, offset: u64) -> Option<(u32, u64)> {
        let (key, (end, number)) = self.buffer_ranges.range(..=(segment, offset)).next_back()?;
        (key.0 == segment && offset < *end).then_some((*number, key.1))
    }
}

/// The error of what cannot be captured.
pub(crate) fn capture_error(op: &'static str, reason: &str) -> Error {
    Error::Capture { op, reason: reason.to_owned() }
}

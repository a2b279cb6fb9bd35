//! Recorder of captured steps: the commands and the buffers that each command uses.
//!
//! One thread records on a device at a time. Its work on another device is an error, because a replay would leave that
//! work out. Work of other threads runs normally and is not recorded. If such work and the step use one tensor, and
//! either writes it, the capture fails.

use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::backend::command::Access;
use crate::backend::{Command, OwnedCommand, SegmentId, Slice};
use crate::error::{Error, Result, fail_if};
use crate::memory::Bytes;
use crate::memory::scope::{self, ModulePath, Scope};
use crate::runtime::capture::replay_params::{DynamicParams, ReplayCtx};
use crate::runtime::device::{Device, RandomState, WeakDevice};
use crate::runtime::kernel_params::KernelParams;
use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};
use crate::sync::LockUnpoisoned;

thread_local! {
    /// Address of the recorder that this thread records on; 0 for none.
    static RECORDING_HERE: ScopedLocal<Cell<usize>> = const { ScopedLocal::new(Cell::new(0)) };
}

/// Value of [`RECORDING_HERE`] while a recording thread runs work that replays do without.
const UNRECORDED: usize = 1;

/// Devices that record a step, each with the address of its recorder.
static RECORDING_DEVICES: Mutex<Vec<(usize, WeakDevice)>> = Mutex::new(Vec::new());
/// Number of recordings, so that operations look for one only if there is one.
static RECORDING_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Reports whether any device records a step.
#[inline]
pub(crate) fn is_any_active() -> bool {
    RECORDING_COUNT.load(Ordering::Relaxed) > 0
}

/// Fails if this thread records a step on another device than that of `op`. The capture then fails at its end, even if
/// the step ignores this error.
pub(crate) fn check_device(op: &'static str, device: &Device) -> Result<()> {
    let recorder = RECORDING_HERE.current();
    if recorder <= UNRECORDED {
        return Ok(());
    }
    let recording = RECORDING_DEVICES.lock_unpoisoned().iter().find(|(at, _)| *at == recorder).cloned();
    let Some(recording) = recording.and_then(|(_, device)| device.upgrade()) else { return Ok(()) };
    if recording == *device {
        return Ok(());
    }
    let reason = format!(
        "the step is captured on {recording}, and a replay would leave out this work on another device, {device}; do it \
         before the step or after it"
    );
    recording.capture_recorder().fail_capture(op, &reason);
    Err(capture_error(op, &reason))
}

/// Recorder of a device.
#[derive(Default)]
pub(crate) struct CaptureRecorder {
    active: AtomicBool,
    recording: Mutex<Option<CaptureRecording>>,
}

/// Recording of a step.
pub(crate) struct CaptureRecording {
    queue: u8,
    /// Random state at the start.
    pub(crate) random: RandomState,
    pub(crate) commands: Vec<RecordedCommand>,
    /// Buffers that each command uses, by index into `buffers`.
    pub(crate) operands: Vec<SmallVec<[(u32, Access); 8]>>,
    pub(crate) buffers: Vec<RecordedBuffer>,
    buffer_ids: FxHashMap<usize, u32>,
    /// End and buffer index of each memory range, by segment and first byte.
    buffer_ranges: BTreeMap<(u64, u64), (u64, u32)>,
    /// Notes of the layers above about the step, for the end of the capture.
    notes: Vec<Box<dyn Any + Send>>,
    /// Buffers that other threads have used since the start, by address. The weak handle keeps the address unique.
    used_by_others: FxHashMap<usize, (Weak<dyn Buffer>, Access)>,
    /// Bytes allocated at the start, and the peak since then.
    allocated_before: u64,
    peak_allocated: u64,
    /// First error that makes the capture fail.
    error: Option<Error>,
}

/// Memory that commands use, as the recorder sees the storage of a tensor.
pub(crate) trait Buffer: Any + Send + Sync {
    /// Returns the size of the memory.
    fn bytes(&self) -> u64;
}

/// Buffer that commands use.
pub(crate) struct RecordedBuffer {
    pub(crate) storage: Weak<dyn Buffer>,
    pub(crate) bytes: u64,
    pub(crate) is_allocated_by_step: bool,
    /// If true, each replay changes the contents: the step allocates or writes the buffer, or the buffer is an input.
    is_changed_by_replays: bool,
    /// First operation that used the buffer.
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

/// Recorded command. Its operands have a buffer index as their segment, and offsets from the start of the
/// buffer.
pub(crate) struct RecordedCommand {
    pub(crate) command: OwnedCommand,
    pub(crate) scope: Scope,
    pub(crate) dynamic_params: Option<DynamicParams>,
    /// Buffer of which the command writes every element and reads none.
    pub(crate) overwritten: Option<u32>,
}

/// Guard that switches this thread to another recorder, or to none.
type RecorderScope = ScopedGuard<Cell<usize>>;

/// Guard that ends a recording, even if the step fails or panics.
pub(crate) struct RecordingGuard<'a> {
    recorder: &'a CaptureRecorder,
    _scope: RecorderScope,
}

impl Drop for RecordingGuard<'_> {
    fn drop(&mut self) {
        self.recorder.active.store(false, Ordering::Release);
        RECORDING_DEVICES.lock_unpoisoned().retain(|(at, _)| *at != self.recorder.address());
        RECORDING_COUNT.fetch_sub(1, Ordering::Relaxed);
        let record = self.recorder.lock_recording().take();
        drop(record);
    }
}

impl RecordingGuard<'_> {
    /// Ends the recording and returns it, or its first error.
    pub(crate) fn into_recording(self) -> Result<CaptureRecording> {
        let mut record = self
            .recorder
            .lock_recording()
            .take()
            .ok_or_else(|| Error::argument("capture", "nothing was recorded"))?;
        record.error.take().map_or(Ok(()), Err)?;
        record.check_other_threads()?;
        Ok(record)
    }
}

impl CaptureRecorder {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn lock_recording(&self) -> MutexGuard<'_, Option<CaptureRecording>> {
        self.recording.lock_unpoisoned()
    }

    /// Reports whether a step is being recorded on the device.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Reports whether this thread's work is recorded.
    #[inline]
    pub(crate) fn is_recording_here(&self) -> bool {
        self.is_active() && RECORDING_HERE.current() == self.address()
    }

    /// Starts to record this thread's work on a queue.
    pub(crate) fn begin_recording(&self, device: &Device, queue: u8) -> Result<RecordingGuard<'_>> {
        let mut record = self.lock_recording();
        fail_if!(record.is_some();
            capture("capture"), "another one is under way on this device; capture one step at a time");
        let before = device.memory().allocated();
        *record = Some(CaptureRecording {
            queue,
            random: device.random_state(),
            commands: Vec::new(),
            operands: Vec::new(),
            buffers: Vec::new(),
            buffer_ids: FxHashMap::default(),
            buffer_ranges: BTreeMap::new(),
            notes: Vec::new(),
            used_by_others: FxHashMap::default(),
            allocated_before: before,
            peak_allocated: before,
            error: None,
        });
        RECORDING_DEVICES.lock_unpoisoned().push((self.address(), device.downgrade()));
        RECORDING_COUNT.fetch_add(1, Ordering::Relaxed);
        self.active.store(true, Ordering::Release);
        Ok(RecordingGuard { recorder: self, _scope: RecorderScope::new(&RECORDING_HERE, self.address()) })
    }

    /// Runs `work` without recording it.
    pub(crate) fn run_unrecorded<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = RecorderScope::new(&RECORDING_HERE, UNRECORDED);
        work()
    }

    /// Runs `work` on behalf of the recording thread, so that it is recorded.
    pub(crate) fn run_recorded<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = self.is_active().then(|| RecorderScope::new(&RECORDING_HERE, self.address()));
        work()
    }

    /// Fails if this thread records a step, in which `op` is not allowed. The capture then fails at its end,
    /// even if the step ignores this error.
    #[inline]
    pub(crate) fn check_not_recording(&self, op: &'static str, reason: &str) -> Result<()> {
        if !self.is_recording_here() {
            return Ok(());
        }
        self.fail_capture(op, reason);
        Err(capture_error(op, reason))
    }

    /// Makes the capture fail at its end, for operations that cannot return an error.
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

    #[inline]
    pub(crate) fn record_allocation(&self, storage: &Arc<impl Buffer>) {
        self.with_recording(|record| {
            record.buffer_id(storage, true);
        });
    }

    /// Records the address of a buffer that the next command uses. On a thread that records nothing, records that the
    /// thread uses the buffer.
    #[inline]
    pub(crate) fn record_binding(&self, storage: &Arc<impl Buffer>, slice: Slice, access: Access) {
        if !self.is_active() {
            return;
        }
        self.record_use_by_other(storage, access);
        self.with_recording(|record| {
            let number = record.buffer_id(storage, false);
            record.insert_range(slice, number);
            if access == Access::Write {
                record.mark_changed(number);
            }
        });
    }

    /// Records that a thread without a recording uses a buffer.
    pub(crate) fn record_use_by_other(&self, storage: &Arc<impl Buffer>, access: Access) {
        if !self.is_active() || RECORDING_HERE.current() != 0 {
            return;
        }
        if let Some(record) = &mut *self.lock_recording() {
            let used = record.used_by_others.entry(Arc::as_ptr(storage).addr());
            let (_, merged) = used.or_insert_with(|| {
                let weak = Arc::downgrade(storage);
                (weak, access)
            });
            if access == Access::Write {
                *merged = access;
            }
        }
    }

    /// Records a buffer whose contents the step uses only through data that was derived before the step.
    pub(crate) fn record_indirect_read(&self, storage: &Arc<impl Buffer>) {
        self.with_recording(|record| {
            record.buffer_id(storage, false);
        });
    }

    /// Records an input of the step, which each run overwrites.
    pub(crate) fn record_input(&self, storage: &Arc<impl Buffer>) {
        self.with_recording(|record| {
            let number = record.buffer_id(storage, false);
            record.mark_changed(number);
        });
    }

    /// Reports whether each replay changes the contents of a buffer, as far as the step is recorded.
    pub(crate) fn is_changed_by_replays(&self, storage: &Arc<impl Buffer>) -> bool {
        let address = Arc::as_ptr(storage).addr();
        self.lock_recording().as_ref().is_some_and(|record| {
            let number = record.buffer_ids.get(&address);
            number.is_some_and(|&number| record.buffers[number as usize].is_changed_by_replays)
        })
    }

    /// Adds a note about the step, unless there is one of this type for which `is_known` returns true.
    #[inline]
    pub(crate) fn add_note<N: Any + Send>(&self, note: impl FnOnce() -> N, is_known: impl Fn(&N) -> bool) {
        self.with_recording(|record| {
            if !record.notes.iter().filter_map(|known| known.downcast_ref()).any(is_known) {
                record.notes.push(Box::new(note()));
            }
        });
    }

    /// Returns the first result that `find` has for a note of its type.
    pub(crate) fn find_note<N: Any + Send, R>(&self, find: impl FnMut(&N) -> Option<R>) -> Option<R> {
        let record = self.lock_recording();
        record.as_ref()?.notes.iter().filter_map(|note| note.downcast_ref()).find_map(find)
    }

    /// Removes the notes of one type for which `is_taken` returns true. The caller drops them without the lock.
    pub(crate) fn take_notes<N: Any + Send>(
        &self,
        is_taken: impl Fn(&N) -> bool,
    ) -> Vec<Box<dyn Any + Send>> {
        let mut record = self.lock_recording();
        let Some(record) = &mut *record else { return Vec::new() };
        record.notes.extract_if(.., |note| note.downcast_ref().is_some_and(&is_taken)).collect()
    }

    /// Records a command that was just enqueued.
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
        record.commands.push(RecordedCommand {
            command: kind,
            scope,
            dynamic_params: None,
            overwritten: None,
        });
        record.operands.push(touched);
        Ok(())
    }

    /// Records that the last command writes every element of a buffer and reads none. The plan may then drop earlier
    /// writes of the buffer.
    pub(crate) fn mark_overwritten(&self, storage: &Arc<impl Buffer>) {
        self.with_recording(|record| {
            let number = record.buffer_id(storage, false);
            let is_written = |operands: &SmallVec<[(u32, Access); 8]>| {
                let mut accesses = operands.iter().filter(|(at, _)| *at == number).peekable();
                accesses.peek().is_some() && accesses.all(|(_, access)| *access == Access::Write)
            };
            if let (Some(last), Some(operands)) = (record.commands.last_mut(), record.operands.last())
                && is_written(operands)
            {
                last.overwritten = Some(number);
            }
        });
    }

    /// Sets the function that computes the last command's parameters at each replay.
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
    /// Returns the notes of one type, in order.
    pub(crate) fn notes<N: Any>(&self) -> impl Iterator<Item = &N> {
        self.notes.iter().filter_map(|note| note.downcast_ref())
    }

    /// Fails if another thread has written a buffer of the step, or has read one that the step writes.
    fn check_other_threads(&self) -> Result<()> {
        let is_conflict = |(address, (_, access)): (&usize, &(Weak<dyn Buffer>, Access))| {
            let buffer = self.buffers.get(*self.buffer_ids.get(address)? as usize)?;
            (*access == Access::Write || buffer.is_changed_by_replays).then_some(buffer)
        };
        let Some(buffer) = self.used_by_others.iter().find_map(is_conflict) else { return Ok(()) };
        Err(capture_error(
            "capture",
            &format!(
                "another thread used {buffer} while the step was recorded, and a replay would leave that out; do the \
                 work in the step itself, or let the thread wait for the end of the capture"
            ),
        ))
    }

    /// Returns the peak bytes of the step, without memory allocated before it.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_allocated - self.allocated_before
    }

    /// Records an error for a command that ran but could not be recorded: the capture fails even if the step
    /// ignores the error.
    fn set_error(&mut self, reason: &str) -> Error {
        self.error.get_or_insert_with(|| capture_error("capture", reason));
        capture_error("capture", reason)
    }

    fn buffer_id(&mut self, storage: &Arc<impl Buffer>, born: bool) -> u32 {
        // The weak handle keeps the allocation, so its address stays unique.
        *self.buffer_ids.entry(Arc::as_ptr(storage).addr()).or_insert_with(|| {
            let (weak, bytes) = (Arc::downgrade(storage), storage.bytes());
            let storage: Weak<dyn Buffer> = weak;
            let Scope { op, module, .. } = scope::current();
            self.buffers.push(RecordedBuffer {
                storage,
                bytes,
                is_allocated_by_step: born,
                is_changed_by_replays: born,
                op,
                module,
            });
            self.buffers.len() as u32 - 1
        })
    }

    fn mark_changed(&mut self, number: u32) {
        if let Some(buffer) = self.buffers.get_mut(number as usize) {
            buffer.is_changed_by_replays = true;
        }
    }

    /// Inserts the range of a buffer and removes overlapping ranges of freed buffers.
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

    /// Returns the index and the start of the buffer at an address.
    fn find_buffer(&self, segment: u64, offset: u64) -> Option<(u32, u64)> {
        let (key, (end, number)) = self.buffer_ranges.range(..=(segment, offset)).next_back()?;
        (key.0 == segment && offset < *end).then_some((*number, key.1))
    }
}

#[track_caller]
pub(crate) fn capture_error(op: &'static str, reason: &str) -> Error {
    Error::capture(op, reason)
}

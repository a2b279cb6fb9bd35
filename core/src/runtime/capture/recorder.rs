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
use crate::backend::command::Touch;
use crate::backend::{Command, Owned, SegmentId, Slice};
use crate::error::{Error, Result};
use crate::local::{Get, Local, Scoped};
use crate::memory::Bytes;
use crate::memory::scope::{self, ModulePath, Scope};
use crate::ops::kernel::launch::KernelParams;
use crate::runtime::capture::replay_params::{DynamicParams, ReplayCtx};
use crate::runtime::device::{Device, RandomState};
use crate::storage::Storage;
use crate::tensor::Tensor;

thread_local! {
    /// The tape, by its address, that this thread records on.
    static HERE: Local<Cell<usize>> = const { Local::new(Cell::new(0)) };
}

/// Where a device records, if it does.
#[derive(Default)]
pub(crate) struct CaptureRecorder {
    active: AtomicBool,
    record: Mutex<Option<Record>>,
}

/// What was recorded so far.
pub(crate) struct Record {
    queue: u8,
    /// Where random numbers stood when it began.
    pub(crate) random: RandomState,
    pub(crate) commands: Vec<Recorded>,
    /// What each command touches, by the numbers of the memories.
    pub(crate) touched: Vec<SmallVec<[(u32, Touch); 8]>>,
    pub(crate) memories: Vec<Memory>,
    numbers: FxHashMap<usize, u32>,
    /// Which memory is where, by segment and first byte: its end, and its number.
    places: BTreeMap<(u64, u64), (u64, u32)>,
    /// Leaves that were given gradients, and the memory of those that they had before.
    pub(crate) leaves: Vec<(Arc<Leaf>, Option<Weak<Storage>>)>,
    /// Leaves whose 16-bit copies were read, and the memory of these.
    pub(crate) copied: Vec<(Tensor, Weak<Storage>)>,
    /// Constants from the host.
    pub(crate) constants: Vec<Tensor>,
    /// Bytes allocated before, and the most of them since.
    before: u64,
    peak: u64,
    /// The first thing that cannot be captured.
    failed: Option<Error>,
}

/// A piece of memory that commands touch.
pub(crate) struct Memory {
    pub(crate) storage: Weak<Storage>,
    pub(crate) bytes: u64,
    /// Whether it was allocated by the step.
    pub(crate) born: bool,
    /// The operation that touched it first, and its module.
    pub(crate) op: &'static str,
    module: ModulePath,
}

impl fmt::Display for Memory {
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
pub(crate) struct Recorded {
    pub(crate) kind: Owned,
    pub(crate) scope: Scope,
    pub(crate) live: Option<DynamicParams>,
}

/// While it lives, this thread records on another tape, or on none.
type Turn = Scoped<Cell<usize>>;

/// Ends a recording, also where the step fails or panics.
pub(crate) struct Running<'a> {
    tape: &'a CaptureRecorder,
    _turn: Turn,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.tape.active.store(false, Ordering::Release);
        let record = self.tape.lock().take();
        drop(record);
    }
}

impl Running<'_> {
    /// What was recorded.
    pub(crate) fn finish(self) -> Result<Record> {
        let mut record =
            self.tape.lock().take().ok_or_else(|| Error::argument("capture", "nothing was recorded"))?;
        record.failed.take().map_or(Ok(record), Err)
    }
}

impl CaptureRecorder {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Record>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a step is recorded on the device.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Whether what this thread does is recorded.
    #[inline]
    pub(crate) fn takes(&self) -> bool {
        self.is_active() && HERE.now() == self.address()
    }

    /// Begins to record what this thread does on a queue.
    pub(crate) fn begin(&self, device: &Device, queue: u8) -> Result<Running<'_>> {
        let mut record = self.lock();
        if record.is_some() {
            return Err(captured(
                "capture",
                "another one is under way on this device; capture one step at a time",
            ));
        }
        let before = device.memory().allocated();
        *record = Some(Record {
            queue,
            random: device.random_state(),
            commands: Vec::new(),
            touched: Vec::new(),
            memories: Vec::new(),
            numbers: FxHashMap::default(),
            places: BTreeMap::new(),
            leaves: Vec::new(),
            copied: Vec::new(),
            constants: Vec::new(),
            before,
            peak: before,
            failed: None,
        });
        self.active.store(true, Ordering::Release);
        Ok(Running { tape: self, _turn: Turn::new(&HERE, self.address()) })
    }

    /// Does something that is not recorded.
    pub(crate) fn outside<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = Turn::new(&HERE, 0);
        work()
    }

    /// Records what this thread does for the one that records.
    pub(crate) fn for_recorder<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = self.is_active().then(|| Turn::new(&HERE, self.address()));
        work()
    }

    /// Fails where a step is recorded that does this. So does the capture at its end, also where the step goes on after the error.
    #[inline]
    pub(crate) fn refuse(&self, op: &'static str, reason: &str) -> Result<()> {
        if !self.takes() {
            return Ok(());
        }
        self.forbid(op, reason);
        Err(captured(op, reason))
    }

    /// Lets the capture fail at its end, for what cannot fail itself.
    pub(crate) fn forbid(&self, op: &'static str, reason: &str) {
        self.with(|record| {
            record.failed.get_or_insert_with(|| captured(op, reason));
        });
    }

    fn with(&self, change: impl FnOnce(&mut Record)) {
        if self.takes()
            && let Some(record) = &mut *self.lock()
        {
            change(record);
        }
    }

    /// Notes new memory.
    #[inline]
    pub(crate) fn born(&self, storage: &Arc<Storage>) {
        self.with(|record| {
            record.number(storage, true);
        });
    }

    /// Notes where memory is that the next command touches.
    #[inline]
    pub(crate) fn bound(&self, storage: &Arc<Storage>, slice: Slice) {
        self.with(|record| {
            let number = record.number(storage, false);
            record.place(slice, number);
        });
    }

    /// Keeps a constant for the replays.
    pub(crate) fn keep(&self, constant: &Tensor) {
        self.with(|record| record.constants.push(constant.clone()));
    }

    /// Notes that a leaf's 16-bit copy is read.
    pub(crate) fn copied(&self, leaf: &Tensor, copy: &Tensor) {
        self.with(|record| {
            if !record.copied.iter().any(|(known, _)| known.is_same_view(leaf)) {
                record.copied.push((leaf.clone(), copy.downgrade_storage()));
            }
        });
    }

    /// Notes that a leaf is given a gradient, and the one that it has.
    #[inline]
    pub(crate) fn graded(&self, leaf: &Arc<Leaf>, before: Option<&Tensor>) {
        self.with(|record| {
            if !record.leaves.iter().any(|(known, _)| Arc::ptr_eq(known, leaf)) {
                record.leaves.push((Arc::clone(leaf), before.map(Tensor::downgrade_storage)));
            }
        });
    }

    /// Keeps a command that was just enqueued.
    #[cold]
    pub(crate) fn push(&self, device: &Device, queue: u8, scope: Scope, command: &Command<'_>) -> Result<()> {
        if let Command::Copy { dst: Slice { bytes: 0, .. }, .. }
        | Command::Fill { dst: Slice { bytes: 0, .. }, .. } = command
        {
            return Ok(());
        }
        let allocated = device.memory().allocated();
        let mut record = self.lock();
        let Some(record) = &mut *record else { return Ok(()) };
        if queue != record.queue {
            let reason = "the step runs on several streams; a captured one runs on the stream that is current where it is captured";
            return Err(record.fail(reason));
        }
        record.peak = record.peak.max(allocated);
        let written = match command {
            Command::Launch(launch) => device.kernel_write_mask(launch.kernel),
            _ => 0,
        };
        let mut kind = Owned::new(command);
        let mut touched = SmallVec::new();
        let mut strange = false;
        kind.places(written, |(segment, offset), touch| match record.find(segment.0, *offset) {
            Some((number, start)) => {
                (*segment, *offset) = (SegmentId(number.into()), *offset - start);
                touched.push((number, touch));
            }
            None => strange = true,
        });
        if strange {
            return Err(record.fail("a command uses memory that belongs to no tensor of this thread"));
        }
        record.commands.push(Recorded { kind, scope, live: None });
        record.touched.push(touched);
        Ok(())
    }

    /// Says how the parameters of the last command are made at each of its runs.
    pub(crate) fn live(&self, make: impl Fn(&ReplayCtx) -> KernelParams + Send + Sync + 'static) {
        self.with(|record| {
            if let Some(last) = record.commands.last_mut() {
                last.live = Some(Box::new(make));
            }
        });
    }
}

impl Record {
    /// Bytes that the step held at once besides what was there.
    pub(crate) fn peak(&self) -> u64 {
        self.peak - self.before
    }

    /// Notes that a command could not be recorded, which has run: the capture fails, whatever the step does with the error.
    fn fail(&mut self, reason: &str) -> Error {
        self.failed.get_or_insert_with(|| captured("capture", reason));
        captured("capture", reason)
    }

    fn number(&mut self, storage: &Arc<Storage>, born: bool) -> u32 {
        // The weak handle keeps the address from being another one's.
        *self.numbers.entry(Arc::as_ptr(storage).addr()).or_insert_with(|| {
            let (storage, bytes) = (Arc::downgrade(storage), storage.bytes());
            let Scope { op, module, .. } = scope::current();
            self.memories.push(Memory { storage, bytes, born, op, module });
            self.memories.len() as u32 - 1
        })
    }

    /// From here on memory is there, and nothing else.
    fn place(&mut self, slice: Slice, number: u32) {
        let (segment, start) = (slice.segment.0, slice.offset);
        let end = start + slice.bytes;
        if self.places.get(&(segment, start)) == Some(&(end, number)) {
            return;
        }
        while let Some((&key, &(other_end, _))) = self.places.range(..(segment, end)).next_back() {
            if key.0 != segment || other_end <= start {
                break;
            }
            self.places.remove(&key);
        }
        self.places.insert((segment, start), (end, number));
    }

    /// The number of the memory at a place, and where it starts.
    fn find(&self, segment: u64, offset: u64) -> Option<(u32, u64)> {
        let (key, (end, number)) = self.places.range(..=(segment, offset)).next_back()?;
        (key.0 == segment && offset < *end).then_some((*number, key.1))
    }
}

/// The error of what cannot be captured.
pub(crate) fn captured(op: &'static str, reason: &str) -> Error {
    Error::Capture { op, reason: reason.to_owned() }
}

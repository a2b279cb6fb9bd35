//! Streams: queues of a device that run concurrently, and their synchronisation.
//!
//! Every tensor records the queue that last wrote it and the queues that have read it since. An operation
//! waits, on the device, for conflicting accesses of other queues. Results therefore never depend on streams,
//! and the host never waits.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use smallvec::SmallVec;

pub(crate) use crate::backend::command::Access;
use crate::backend::{self, Backend, Event, MAX_QUEUES, Slice};
use crate::error::Result;
use crate::memory;
use crate::memory::compaction::{BlockMove, BlockMover, HeldDispatch};
use crate::runtime::device::{Device, WeakDevice};
use crate::runtime::dispatch::{DispatchGuard, DispatchQueue};
use crate::runtime::driver_call::check_not_in_callback;
use crate::runtime::future::DeviceFuture;
use crate::sync::LockUnpoisoned;

/// The last two queues are for copies to and from the host. Streams use the queues from 1 up to these.
const DEVICE_TO_HOST_QUEUE: u8 = MAX_QUEUES - 2;
const HOST_TO_DEVICE_QUEUE: u8 = MAX_QUEUES - 1;

/// Maximum number of recorded events kept for each queue.
const MAX_KEPT_EVENTS: usize = 64;

/// Queue of work on a device, which runs concurrently with the device's other queues.
///
/// Operations run in order on the device's default stream. While this thread has [entered](Self::enter)
/// another stream, its operations run there instead. A tensor may be used on any stream: operations wait, on
/// the device, for conflicting accesses of other streams. PyTorch's `wait_stream` and `record_stream` are not
/// needed. Memory that one stream has freed is reused by other streams under the same rule.
///
/// A device with a single queue (wgpu) runs all streams in call order.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, stream::Stream, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let x = Tensor::ones(&[256, 256], DType::F32, &device)?;
/// let side = Stream::new(&device);
/// let y = {
///     let _on = side.enter();
///     x.matmul(&x)?
/// };
/// // Waits for the stream, on the device.
/// let z = y.add(&x)?;
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Stream {
    device: Device,
    queue: u8,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} queue {})", self.device, self.queue)
    }
}

/// Stream that a thread has entered.
struct EnteredStream {
    /// Larger than the ids of all streams that were entered before and not left yet.
    id: u64,
    /// Address of the device.
    device: usize,
    queue: u8,
}

thread_local! {
    /// Streams that this thread has entered, the innermost last. The empty list needs no destructor, so a guard may be
    /// dropped when the thread ends.
    static ENTERED_STREAMS: RefCell<ManuallyDrop<Vec<EnteredStream>>> =
        const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Guard during which operations of this thread run on a stream of one device. Guards may be dropped in any order: the
/// innermost live guard of a device decides.
#[derive(Debug)]
#[must_use = "a stream is left when its guard is dropped"]
pub struct StreamGuard {
    id: u64,
    // Keeps the device open, so that its address stays unique.
    _stream: Stream,
    // The guard must be dropped on the thread that created it.
    not_send: PhantomData<*const ()>,
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        // The thread-local may already be destroyed; then nothing runs on this thread.
        let _gone = ENTERED_STREAMS.try_with(|entered| {
            let mut entered = entered.borrow_mut();
            entered.retain(|stream| stream.id != self.id);
            if entered.is_empty() {
                drop(mem::take(&mut **entered));
            }
        });
    }
}

impl Stream {
    /// Creates a stream. A device has a few queues, which streams share.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        let streams = device.stream_set();
        let queues = streams.queue_count.min(DEVICE_TO_HOST_QUEUE).saturating_sub(1);
        if queues == 0 {
            return Self::default_stream(device);
        }
        streams.has_active_streams.store(true, Ordering::Release);
        let queue = 1 + streams.next_stream.fetch_add(1, Ordering::Relaxed) % queues;
        Self { device: device.clone(), queue }
    }

    /// Returns the default stream, on which operations run if no stream is entered.
    #[must_use]
    pub fn default_stream(device: &Device) -> Self {
        Self { device: device.clone(), queue: 0 }
    }

    /// Returns the current stream of this thread.
    #[must_use]
    pub fn current(device: &Device) -> Self {
        Self { device: device.clone(), queue: device.current_queue() }
    }

    /// Returns the stream's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Makes this the current stream of this thread for its device, until the guard is dropped. Streams of other
    /// devices stay current, so a thread may enter one stream for each device.
    pub fn enter(&self) -> StreamGuard {
        let id = ENTERED_STREAMS.with_borrow_mut(|entered| {
            let id = entered.last().map_or(0, |last| last.id) + 1;
            entered.push(EnteredStream { id, device: self.device.address(), queue: self.queue });
            id
        });
        StreamGuard { id, _stream: self.clone(), not_send: PhantomData }
    }

    /// Makes later work on this stream wait, on the device, for all work enqueued on `other` so far. Tensor
    /// operations synchronise automatically; this orders work that the library does not see.
    pub fn wait_stream(&self, other: &Self) -> Result<()> {
        if self.queue == other.queue || self.device != other.device {
            return Ok(());
        }
        let device = &self.device;
        check_not_in_callback("wait_stream")?;
        device.wait_for_queue(&device.lock_dispatch(), self.queue, other.queue)
    }
}

/// Queues of a device and their synchronisation state.
pub(crate) struct StreamSet {
    /// Backend of the device, which is that of queue 0.
    pub(crate) backend: Arc<dyn Backend>,
    queue_count: u8,
    /// True once more than one queue is in use. Until then all work is in order.
    has_active_streams: AtomicBool,
    next_stream: AtomicU8,
    backends: [OnceLock<Arc<dyn Backend>>; MAX_QUEUES as usize],
    sync: Mutex<StreamSync>,
    pub(crate) dispatch: DispatchQueue,
    /// Device, which launches pending work.
    pub(crate) device: OnceLock<WeakDevice>,
}

/// Point in a queue's work: a number of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StreamTicket {
    queue: u8,
    number: u64,
}

#[derive(Default)]
struct StreamSync {
    /// Number of operations of each queue since streams are in use.
    tickets: [u64; MAX_QUEUES as usize],
    /// Events of each queue, each with the ticket that it covers.
    events: [VecDeque<(u64, Event)>; MAX_QUEUES as usize],
    /// Last ticket of each queue (second index) that each queue (first index) has waited for.
    waited_for: [[u64; MAX_QUEUES as usize]; MAX_QUEUES as usize],
    /// Ticket after the last block moves.
    last_move: Option<StreamTicket>,
}

/// Uses of a storage by queues.
#[derive(Debug)]
pub(crate) struct StreamUses {
    last_write: StreamTicket,
    /// Last read of each queue since the last write.
    reads_since: SmallVec<[StreamTicket; 2]>,
}

impl Default for StreamUses {
    /// Assumes a write by the default queue before streams were in use.
    fn default() -> Self {
        Self { last_write: StreamTicket { queue: 0, number: 1 }, reads_since: SmallVec::new() }
    }
}

impl StreamSet {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Self {
            queue_count: backend.queue_count(),
            backend,
            has_active_streams: AtomicBool::new(false),
            next_stream: AtomicU8::new(0),
            backends: Default::default(),
            // All work before streams were in use counts as one operation.
            sync: Mutex::new(StreamSync { tickets: [1; MAX_QUEUES as usize], ..StreamSync::default() }),
            dispatch: DispatchQueue::default(),
            device: OnceLock::new(),
        }
    }

    fn stream_backend(&self, queue: u8) -> Result<&Arc<dyn Backend>> {
        let (backend, slot) = (&self.backend, &self.backends[usize::from(queue)]);
        if queue == 0 {
            return Ok(backend);
        }
        if let Some(queue_backend) = slot.get() {
            return Ok(queue_backend);
        }
        let sync = &mut *self.sync.lock_unpoisoned();
        let queue_backend = backend.open_queue(queue)?.unwrap_or_else(|| Arc::clone(backend));
        // A new queue waits for uses of its tensors by itself, but not for block moves.
        if let Some(moved) = sync.last_move {
            sync.wait_for(backend, queue, moved)?;
        }
        Ok(slot.get_or_init(|| queue_backend))
    }

    /// Takes the dispatch lock like [`Device::lock_dispatch`].
    fn lock_dispatch(&self) -> DispatchGuard<'_> {
        let mut guard = self.dispatch.lock();
        if !guard.is_empty()
            && let Some(device) = self.device.get().and_then(WeakDevice::upgrade)
        {
            device.flush_pending(&mut guard);
        }
        guard
    }
}

impl fmt::Debug for StreamSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamSet({:?})", self.backend)
    }
}

/// Moves blocks of the device's pool for compaction.
impl BlockMover for StreamSet {
    fn lock_dispatch(&self) -> Box<dyn HeldDispatch + '_> {
        Box::new(self.lock_dispatch())
    }

    fn enqueue_copies(&self, queue: u8, moves: &[BlockMove]) -> memory::Result<()> {
        self.copy_blocks(queue, moves).map_err(|error| memory::Error::Move(Box::new(error)))
    }
}

impl StreamSet {
    fn copy_blocks(&self, queue: u8, moves: &[BlockMove]) -> Result<()> {
        let (backend, queue_backend) = (&self.backend, self.stream_backend(queue)?);
        let sync = &mut *self.sync.lock_unpoisoned();
        // Unused queues wait for moves when they are opened.
        let used = |other: &u8| *other == 0 || self.backends[usize::from(*other)].get().is_some();
        let others: SmallVec<[u8; 8]> =
            (0..MAX_QUEUES).filter(|other| *other != queue && used(other)).collect();
        for &other in &others {
            let now = sync.next_ticket(other);
            sync.wait_for(backend, queue, now)?;
        }
        for BlockMove { from, to, bytes } in moves {
            let slice = |(segment, offset)| Slice { segment, offset, bytes: *bytes };
            queue_backend.copy(slice(*to), slice(*from))?;
        }
        let done = sync.next_ticket(queue);
        sync.last_move = Some(done);
        others.iter().try_for_each(|other| sync.wait_for(backend, *other, done))
    }
}

/// Point after all work enqueued so far on all streams of a device: see [`Device::fence`].
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let x = Tensor::ones(&[256, 256], DType::F32, &device)?;
/// let y = x.add(&x)?.exp()?;
/// let fence = device.fence()?;
/// // The host does other things meanwhile.
/// if !fence.is_ready()? {
///     fence.wait()?;
/// }
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a fence does nothing unless it is polled or waited for"]
pub struct Fence {
    device: Device,
    fence: backend::Fence,
}

impl Fence {
    /// Reports whether the device has completed the work before the fence. Never blocks. PyTorch's
    /// `Event.query`.
    pub fn is_ready(&self) -> Result<bool> {
        check_not_in_callback("is_ready")?;
        Ok(self.device.raw_backend().is_fence_signaled(self.fence)?)
    }

    /// Blocks until the device has completed the work before the fence. PyTorch's `Event.synchronize`.
    pub fn wait(&self) -> Result<()> {
        check_not_in_callback("wait")?;
        Ok(self.device.raw_backend().wait_fence(self.fence)?)
    }
}

/// Waits for the fence without blocking. The work was submitted when the fence was recorded.
impl IntoFuture for Fence {
    type Output = Result<()>;
    type IntoFuture = DeviceFuture<()>;

    fn into_future(self) -> Self::IntoFuture {
        let (backend, fence) = (Arc::clone(self.device.raw_backend()), self.fence);
        self.device
            .waiter()
            .run(move |done| backend.wait_fence_then(fence, Box::new(|passed| done.complete(passed))))
    }
}

impl Device {
    /// Submits all work enqueued so far to the device, including the pending fusion group. Does not wait.
    pub fn flush(&self) -> Result<()> {
        self.flush_fusion()?;
        self.raw_backend().flush()?;
        self.stream_set().backends.iter().filter_map(OnceLock::get).try_for_each(|queue| queue.flush())
    }

    /// Records a fence after all work enqueued so far on all streams. The pending fusion group is launched
    /// first.
    pub fn fence(&self) -> Result<Fence> {
        self.flush()?;
        let fence = self.raw_backend().record_fence()?;
        Ok(Fence { device: self.clone(), fence })
    }

    #[inline]
    pub(crate) fn current_queue(&self) -> u8 {
        if !self.uses_streams() {
            return 0;
        }
        let address = self.address();
        ENTERED_STREAMS.with_borrow(|entered| {
            entered.iter().rev().find(|stream| stream.device == address).map_or(0, |stream| stream.queue)
        })
    }

    /// Reports whether more than one queue is in use.
    #[inline]
    pub(crate) fn uses_streams(&self) -> bool {
        self.stream_set().has_active_streams.load(Ordering::Acquire)
    }

    /// Returns the backend of a queue.
    pub(crate) fn queue_backend(&self, queue: u8) -> Result<&Arc<dyn Backend>> {
        self.stream_set().stream_backend(queue)
    }

    /// Returns the queues for copies to and from the host, and marks them as in use.
    pub(crate) fn copy_queues(&self) -> (u8, u8) {
        let streams = self.stream_set();
        if streams.queue_count <= HOST_TO_DEVICE_QUEUE {
            return (0, 0);
        }
        streams.has_active_streams.store(true, Ordering::Release);
        (DEVICE_TO_HOST_QUEUE, HOST_TO_DEVICE_QUEUE)
    }

    /// Orders the next operation of `queue` after conflicting accesses of other queues, and records its
    /// access.
    pub(crate) fn order_access(
        &self,
        _guard: &DispatchGuard<'_>,
        uses: &mut StreamUses,
        access: Access,
        queue: u8,
    ) -> Result<()> {
        let sync = &mut *self.stream_set().sync.lock_unpoisoned();
        sync.wait_for(self.raw_backend(), queue, uses.last_write)?;
        if access == Access::Write {
            for ticket in uses.reads_since.drain(..) {
                sync.wait_for(self.raw_backend(), queue, ticket)?;
            }
        }
        let now = sync.next_ticket(queue);
        match access {
            Access::Write => uses.last_write = now,
            Access::Read => {
                uses.reads_since.retain(|ticket| ticket.queue != queue);
                uses.reads_since.push(now);
            }
        }
        Ok(())
    }

    /// Returns a bit mask of the queues whose accesses `queue` has not waited for, and of `queue` itself.
    pub(crate) fn pending_queues(&self, uses: &StreamUses, queue: u8) -> u8 {
        let sync = self.stream_set().sync.lock_unpoisoned();
        let seen = &sync.waited_for[usize::from(queue)];
        // Transitively complete: a writer has waited for earlier accesses, and a reader for the writer.
        let all = std::iter::once(&uses.last_write).chain(&uses.reads_since);
        let unseen = all.filter(|m| m.queue != queue && seen[usize::from(m.queue)] < m.number);
        unseen.fold(1 << queue, |mask, ticket| mask | 1 << ticket.queue)
    }

    /// Makes `queue` wait for all work of `other` so far. Takes a new ticket, because waits that the pool has
    /// enqueued have none.
    pub(crate) fn wait_for_queue(&self, _guard: &DispatchGuard<'_>, queue: u8, other: u8) -> Result<()> {
        let sync = &mut *self.stream_set().sync.lock_unpoisoned();
        let ticket = sync.next_ticket(other);
        sync.wait_for(self.raw_backend(), queue, ticket)
    }

    /// Records an event after the work of `queue` so far, so that other queues need not wait for later work.
    pub(crate) fn record_queue_event(&self, _guard: &DispatchGuard<'_>, queue: u8) -> Result<()> {
        if self.uses_streams() {
            let sync = &mut *self.stream_set().sync.lock_unpoisoned();
            sync.record_event(self.raw_backend(), queue)?;
        }
        Ok(())
    }
}

impl StreamSync {
    /// Returns the ticket of the queue's next operation.
    fn next_ticket(&mut self, queue: u8) -> StreamTicket {
        let number = &mut self.tickets[usize::from(queue)];
        *number += 1;
        StreamTicket { queue, number: *number }
    }

    fn record_event(&mut self, backend: &Arc<dyn Backend>, queue: u8) -> Result<(u64, Event)> {
        let mark = (self.tickets[usize::from(queue)], backend.record_event(queue)?);
        let events = &mut self.events[usize::from(queue)];
        if events.len() == MAX_KEPT_EVENTS {
            events.pop_front();
        }
        events.push_back(mark);
        Ok(mark)
    }

    /// Makes a queue wait for a ticket of another queue, unless it has already waited.
    fn wait_for(&mut self, backend: &Arc<dyn Backend>, queue: u8, ticket: StreamTicket) -> Result<()> {
        let (here, there) = (usize::from(queue), usize::from(ticket.queue));
        if here == there || self.waited_for[here][there] >= ticket.number {
            return Ok(());
        }
        let at = self.events[there].partition_point(|(number, _)| *number < ticket.number);
        let (number, event) = match self.events[there].get(at) {
            Some(kept) => *kept,
            None => self.record_event(backend, ticket.queue)?,
        };
        backend.wait_event(queue, event)?;
        self.waited_for[here][there] = number;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_a_current_stream_of_its_own() {
        let devices = [Device::null(Default::default()), Device::null(Default::default())];
        let [first, second] = devices.each_ref().map(Stream::new);
        let queues = || devices.each_ref().map(Device::current_queue);
        let other = Stream::new(&devices[0]);
        assert!(![0, other.queue].contains(&first.queue) && second.queue != 0);
        let guards = [first.enter(), second.enter()];
        assert_eq!(queues(), [first.queue, second.queue]);
        let inner = other.enter();
        assert_eq!(queues(), [other.queue, second.queue]);
        // In the order in which they were entered: the innermost live guard of each device decides.
        drop(guards);
        assert_eq!(queues(), [other.queue, 0]);
        drop(inner);
        assert_eq!(queues(), [0, 0]);
        assert_eq!(ENTERED_STREAMS.with_borrow(|entered| entered.capacity()), 0);
    }
}

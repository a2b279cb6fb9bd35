//! Streams: queues of a device whose work runs side by side, and what keeps them in order.
//!
//! Every tensor knows which queue wrote it last and which have read it since. An operation on one queue that touches what
//! another queue has in hand waits for it on the device, so results never depend on streams; the host waits for none of it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use smallvec::SmallVec;

use crate::backend::{self, Backend, Event, MAX_QUEUES, Slice};
use crate::error::Result;
use crate::memory::compaction::{BlockMove, BlockMover, HeldDispatch};
use crate::ops::elementwise::fusion::FusionGroup;
use crate::runtime::device::{Device, WeakDevice};
use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};

/// The queues of copies to the host and from it, which run side by side; those of streams are 1 up to these.
const DEVICE_TO_HOST_QUEUE: u8 = MAX_QUEUES - 2;
const HOST_TO_DEVICE_QUEUE: u8 = MAX_QUEUES - 1;

/// Events of one queue that are kept to be waited for.
const MAX_KEPT_EVENTS: usize = 64;

/// A queue of work on a device, beside its others.
///
/// Operations run on the device's default stream, one after another. While a stream is [entered](Self::enter), those of
/// this thread run on it instead, beside the rest. A tensor may be used on any stream: its operations wait, on the device, for
/// what other streams do with it (PyTorch's `wait_stream` and `record_stream` are not needed). Memory that one stream has
/// freed serves others in the same way.
///
/// A device without queues of its own (wgpu has one) runs all streams in the order of the calls.
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

thread_local! {
    /// The device, by its address, and the queue of the stream that this thread has entered.
    static CURRENT_STREAM: ScopedLocal<Cell<(usize, u8)>> = const { ScopedLocal::new(Cell::new((0, 0))) };
}

/// While it lives, operations of this thread run on a stream.
#[derive(Debug)]
#[must_use = "a stream is left when its guard is dropped"]
pub struct StreamGuard {
    _queue: ScopedGuard<Cell<(usize, u8)>>,
    // Keeps the address from being another device's.
    _stream: Stream,
}

impl Stream {
    /// A stream beside the others. A device has a few queues: many streams share them.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        let lanes = device.stream_set();
        let queues = lanes.queue_count.min(DEVICE_TO_HOST_QUEUE).saturating_sub(1);
        if queues == 0 {
            return Self::default_stream(device);
        }
        lanes.has_active_streams.store(true, Ordering::Release);
        let queue = 1 + lanes.next_stream.fetch_add(1, Ordering::Relaxed) % queues;
        Self { device: device.clone(), queue }
    }

    /// The stream that operations run on where none is entered.
    #[must_use]
    pub fn default_stream(device: &Device) -> Self {
        Self { device: device.clone(), queue: 0 }
    }

    /// The stream that operations of this thread run on now.
    #[must_use]
    pub fn current(device: &Device) -> Self {
        Self { device: device.clone(), queue: device.current_queue() }
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// From here on operations of this thread on its device run on it, until the guard is dropped.
    pub fn enter(&self) -> StreamGuard {
        let queue = ScopedGuard::new(&CURRENT_STREAM, (self.device.address(), self.queue));
        StreamGuard { _queue: queue, _stream: self.clone() }
    }

    /// Lets what follows on this stream wait for all that `other` was given so far, on the device. Operations on tensors do
    /// this by themselves; it orders what the library does not see.
    ///
    /// # Errors
    /// The device was lost.
    pub fn wait_stream(&self, other: &Self) -> Result<()> {
        if self.queue == other.queue || self.device != other.device {
            return Ok(());
        }
        let device = &self.device;
        device.wait_for_queue(&device.lock_dispatch(), self.queue, other.queue)
    }
}

/// The queues of a device, and how far each knows of the others.
pub(crate) struct StreamSet {
    queue_count: u8,
    /// Whether more than one was ever in use: else everything is in order.
    has_active_streams: AtomicBool,
    next_stream: AtomicU8,
    backends: [OnceLock<Arc<dyn Backend>>; MAX_QUEUES as usize],
    sync: Mutex<StreamSync>,
    pub(crate) dispatch: Mutex<FusionGroup>,
    /// The number of the group that operations join, as of its last launch.
    pub(crate) fusion_group: AtomicU64,
    /// The least bytes of results that groups make.
    pub(crate) fusion_min_bytes: AtomicU64,
    /// Launches groups.
    pub(crate) device: OnceLock<WeakDevice>,
}

/// What a thread holds from when it binds memory until the work with it is enqueued. Meanwhile nobody else enqueues, records an
/// event, or moves memory: an operation has its place in its queue, and its addresses are good, when it gets there. What waits to be
/// launched together is behind it, and is launched before.
///
/// The order of locks: gate, pool, memory of a tensor, order of queues. Under it nothing is allocated, for that may move memory.
#[derive(Debug)]
#[must_use = "the gate is open again when this is dropped"]
pub(crate) struct DispatchGuard<'a>(MutexGuard<'a, FusionGroup>);

impl<'a> DispatchGuard<'a> {
    /// The gate, with what waits behind it.
    pub(crate) fn from_lock(group: MutexGuard<'a, FusionGroup>) -> Self {
        Self(group)
    }
}

impl Deref for DispatchGuard<'_> {
    type Target = FusionGroup;

    fn deref(&self) -> &FusionGroup {
        &self.0
    }
}

impl DerefMut for DispatchGuard<'_> {
    fn deref_mut(&mut self) -> &mut FusionGroup {
        &mut self.0
    }
}

/// A moment of a queue: how many operations it has been given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StreamTicket {
    queue: u8,
    ticket: u64,
}

#[derive(Default)]
struct StreamSync {
    /// Operations given to each queue since streams are in use.
    tickets: [u64; MAX_QUEUES as usize],
    /// Events behind so many operations of each queue.
    events: [VecDeque<(u64, Event)>; MAX_QUEUES as usize],
    /// What each queue (first) has waited for of each other one.
    waited_for: [[u64; MAX_QUEUES as usize]; MAX_QUEUES as usize],
    /// Behind the last copies of blocks that moved.
    last_move: Option<StreamTicket>,
}

/// What queues do with a piece of memory.
#[derive(Debug)]
pub(crate) struct StreamUses {
    last_write: StreamTicket,
    /// Since then; each queue's last.
    reads_since: SmallVec<[StreamTicket; 2]>,
}

impl Default for StreamUses {
    /// Written before streams were in use: by the default one.
    fn default() -> Self {
        Self { last_write: StreamTicket { queue: 0, ticket: 1 }, reads_since: SmallVec::new() }
    }
}

/// How an operation touches a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

impl StreamSet {
    pub(crate) fn new(backend: &Arc<dyn Backend>) -> Self {
        Self {
            queue_count: backend.queue_count(),
            has_active_streams: AtomicBool::new(false),
            next_stream: AtomicU8::new(0),
            backends: Default::default(),
            // What came before streams were in use counts as one operation.
            sync: Mutex::new(StreamSync { tickets: [1; _], ..StreamSync::default() }),
            dispatch: Mutex::default(),
            fusion_group: AtomicU64::new(FusionGroup::default().id()),
            fusion_min_bytes: AtomicU64::new(u64::MAX),
            device: OnceLock::new(),
        }
    }

    fn stream_backend<'a>(
        &'a self,
        backend: &'a Arc<dyn Backend>,
        queue: u8,
    ) -> Result<&'a Arc<dyn Backend>> {
        let place = &self.backends[usize::from(queue)];
        if queue == 0 {
            return Ok(backend);
        }
        if let Some(lane) = place.get() {
            return Ok(lane);
        }
        let order = &mut *self.sync.lock().unwrap_or_else(PoisonError::into_inner);
        let lane = backend.open_queue(queue)?.unwrap_or_else(|| Arc::clone(backend));
        // What runs there first waits for uses of its tensors, and knows of no move.
        if let Some(moved) = order.last_move {
            order.wait_for(backend, queue, moved)?;
        }
        Ok(place.get_or_init(|| lane))
    }

    /// As [`Device::gate`].
    fn lock_dispatch(&self) -> DispatchGuard<'_> {
        let mut gate = DispatchGuard(self.dispatch.lock().unwrap_or_else(PoisonError::into_inner));
        if !gate.is_empty()
            && let Some(device) = self.device.get().and_then(WeakDevice::upgrade)
        {
            device.flush_pending(&mut gate);
        }
        gate
    }
}

/// Moves the blocks of a device's pool.
pub(crate) struct DeviceMover {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) lanes: Arc<StreamSet>,
}

impl fmt::Debug for DeviceMover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copies({:?})", self.backend)
    }
}

impl BlockMover for DeviceMover {
    fn lock_dispatch(&self) -> Box<dyn HeldDispatch + '_> {
        Box::new(self.lanes.lock_dispatch())
    }

    fn enqueue_copies(&self, queue: u8, moves: &[BlockMove]) -> Result<()> {
        let Self { backend, lanes } = self;
        let lane = lanes.stream_backend(backend, queue)?;
        let order = &mut *lanes.sync.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that nothing has run on yet wait when they are made.
        let used = |other: &u8| *other == 0 || lanes.backends[usize::from(*other)].get().is_some();
        let others: SmallVec<[u8; 8]> =
            (0..MAX_QUEUES).filter(|other| *other != queue && used(other)).collect();
        for &other in &others {
            let now = order.next_ticket(other);
            order.wait_for(backend, queue, now)?;
        }
        for BlockMove { from, to, bytes } in moves {
            let slice = |(segment, offset)| Slice { segment, offset, bytes: *bytes };
            lane.copy(slice(*to), slice(*from))?;
        }
        let done = order.next_ticket(queue);
        order.last_move = Some(done);
        others.iter().try_for_each(|other| order.wait_for(backend, *other, done))
    }
}

/// A point behind everything that a device was asked for, on all its streams: see [`Device::fence`].
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
#[must_use = "a fence is there to be asked or waited for"]
pub struct Fence {
    device: Device,
    fence: backend::Fence,
}

impl Fence {
    /// Reports whether the device has done all that the fence stands behind. Never blocks. PyTorch's `Event.query`.
    ///
    /// # Errors
    /// The device was lost.
    pub fn is_ready(&self) -> Result<bool> {
        Ok(self.device.raw_backend().is_fence_signaled(self.fence)?)
    }

    /// Blocks until the device has done all that the fence stands behind. PyTorch's `Event.synchronize`.
    ///
    /// # Errors
    /// The device was lost.
    pub fn wait(&self) -> Result<()> {
        Ok(self.device.raw_backend().wait_fence(self.fence)?)
    }
}

impl Device {
    /// Hands everything that was asked for so far to the device, operations that wait to run as one kernel among it. Waits for nothing.
    ///
    /// # Errors
    /// The device was lost, or an earlier launch failed.
    pub fn flush(&self) -> Result<()> {
        self.flush_fusion()?;
        self.raw_backend().flush()?;
        self.stream_set().backends.iter().filter_map(OnceLock::get).try_for_each(|queue| queue.flush())
    }

    /// Marks the point behind everything that was asked for so far, on all streams: [`Fence::is_ready`] asks whether the device has passed
    /// it, and [`Fence::wait`] waits until then. Operations that wait to run as one kernel are launched before.
    ///
    /// # Errors
    /// The device was lost, or an earlier launch failed.
    pub fn fence(&self) -> Result<Fence> {
        self.flush()?;
        let fence = self.raw_backend().record_fence()?;
        Ok(Fence { device: self.clone(), fence })
    }

    /// The queue that operations of this thread run on.
    #[inline]
    pub(crate) fn current_queue(&self) -> u8 {
        if !self.uses_streams() {
            return 0;
        }
        let (device, queue) = CURRENT_STREAM.current();
        if device == self.address() { queue } else { 0 }
    }

    /// Whether more than one queue is in use.
    #[inline]
    pub(crate) fn uses_streams(&self) -> bool {
        self.stream_set().has_active_streams.load(Ordering::Acquire)
    }

    /// The backend of a queue.
    pub(crate) fn queue_backend(&self, queue: u8) -> Result<&Arc<dyn Backend>> {
        self.stream_set().stream_backend(self.raw_backend(), queue)
    }

    /// The queues of copies to the host and from it; from here on they count as in use.
    pub(crate) fn copy_queues(&self) -> (u8, u8) {
        let lanes = self.stream_set();
        if lanes.queue_count <= HOST_TO_DEVICE_QUEUE {
            return (0, 0);
        }
        lanes.has_active_streams.store(true, Ordering::Release);
        (DEVICE_TO_HOST_QUEUE, HOST_TO_DEVICE_QUEUE)
    }

    /// Keeps others from enqueuing work, from recording events and from moving memory until what it returns is dropped. What
    /// waited has been launched.
    #[inline]
    pub(crate) fn lock_dispatch(&self) -> DispatchGuard<'_> {
        let mut gate =
            DispatchGuard(self.stream_set().dispatch.lock().unwrap_or_else(PoisonError::into_inner));
        self.flush_pending(&mut gate);
        gate
    }

    /// The same, but what waits on `queue` itself still does: for who enqueues nothing there, and records no event of it.
    #[inline]
    pub(crate) fn lock_dispatch_on_queue(&self, queue: u8) -> DispatchGuard<'_> {
        let mut gate =
            DispatchGuard(self.stream_set().dispatch.lock().unwrap_or_else(PoisonError::into_inner));
        if gate.waits_on_other_queue(queue) {
            self.flush_pending(&mut gate);
        }
        gate
    }

    /// Puts the next operation of `queue` behind what other queues do with a piece of memory, and notes it.
    pub(crate) fn order_access(
        &self,
        _gate: &DispatchGuard<'_>,
        uses: &mut StreamUses,
        access: Access,
        queue: u8,
    ) -> Result<()> {
        let order = &mut *self.stream_set().sync.lock().unwrap_or_else(PoisonError::into_inner);
        order.wait_for(self.raw_backend(), queue, uses.last_write)?;
        if access == Access::Write {
            for moment in uses.reads_since.drain(..) {
                order.wait_for(self.raw_backend(), queue, moment)?;
            }
        }
        let now = order.next_ticket(queue);
        match access {
            Access::Write => uses.last_write = now,
            Access::Read => {
                uses.reads_since.retain(|moment| moment.queue != queue);
                uses.reads_since.push(now);
            }
        }
        Ok(())
    }

    /// The queues, a bit each, whose work on a piece of memory `queue` has not waited for; and itself.
    pub(crate) fn pending_queues(&self, uses: &StreamUses, queue: u8) -> u8 {
        let order = self.stream_set().sync.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = &order.waited_for[usize::from(queue)];
        // Who wrote has waited for those before, and who read for who wrote.
        let all = std::iter::once(&uses.last_write).chain(&uses.reads_since);
        let unseen = all.filter(|m| m.queue != queue && seen[usize::from(m.queue)] < m.ticket);
        unseen.fold(1 << queue, |mask, moment| mask | 1 << moment.queue)
    }

    /// Lets `queue` wait for all that `other` was given so far, what the pool has let it wait for among it: that has no
    /// ticket, so this takes one.
    pub(crate) fn wait_for_queue(&self, _gate: &DispatchGuard<'_>, queue: u8, other: u8) -> Result<()> {
        let order = &mut *self.stream_set().sync.lock().unwrap_or_else(PoisonError::into_inner);
        let moment = order.next_ticket(other);
        order.wait_for(self.raw_backend(), queue, moment)
    }

    /// Keeps an event behind what `queue` was given so far: others wait for that, and not for what it gets next.
    pub(crate) fn record_queue_event(&self, _gate: &DispatchGuard<'_>, queue: u8) -> Result<()> {
        if self.uses_streams() {
            let order = &mut *self.stream_set().sync.lock().unwrap_or_else(PoisonError::into_inner);
            order.record_event(self.raw_backend(), queue)?;
        }
        Ok(())
    }
}

impl StreamSync {
    /// The moment behind the operation that a queue is given now.
    fn next_ticket(&mut self, queue: u8) -> StreamTicket {
        let ticket = &mut self.tickets[usize::from(queue)];
        *ticket += 1;
        StreamTicket { queue, ticket: *ticket }
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

    /// Lets a queue wait for a moment of another one, if it has not.
    fn wait_for(&mut self, backend: &Arc<dyn Backend>, queue: u8, moment: StreamTicket) -> Result<()> {
        let (here, there) = (usize::from(queue), usize::from(moment.queue));
        if here == there || self.waited_for[here][there] >= moment.ticket {
            return Ok(());
        }
        let at = self.events[there].partition_point(|(ticket, _)| *ticket < moment.ticket);
        let (ticket, event) = match self.events[there].get(at) {
            Some(kept) => *kept,
            None => self.record_event(backend, moment.queue)?,
        };
        backend.wait_event(queue, event)?;
        self.waited_for[here][there] = ticket;
        Ok(())
    }
}

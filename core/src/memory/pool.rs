//! The pool that programs allocate from.

use std::backtrace::Backtrace;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::config::Config;
use super::heap::{AllocRequest, NO_BLOCK};
use super::pool_state::PoolState;
use super::private_pool;
use super::scope::{self, Scope};
use super::source::{Fence, SegmentId, SegmentSource};
use super::stats::{Bytes, Stats};
use super::{OutOfMemory, Tag};
use crate::memory::error::{Error, Result};

/// An allocation request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes requested; 0 returns the smallest block.
    pub bytes: u64,
    /// Queue whose work uses the memory first. A free block of another queue may serve the request; the
    /// device then waits for that queue.
    pub queue: u8,
    /// Private pool that serves the request; 0 for none.
    pub(super) private_pool: u16,
    /// If true, the block may move: its holder looks up the address.
    pub(super) movable: bool,
    /// Purpose of the memory; the thread's current [`scope`] by default.
    pub scope: Scope,
}

impl Request {
    /// Creates a request on queue 0, in the thread's current scope.
    #[must_use]
    #[track_caller]
    #[inline]
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            queue: 0,
            private_pool: private_pool::current(),
            movable: false,
            scope: scope::current().or_caller_site(),
        }
    }

    /// Sets the queue.
    #[must_use]
    #[inline]
    pub fn queue(self, queue: u8) -> Self {
        Self { queue, ..self }
    }

    /// Sets the scope.
    #[must_use]
    #[inline]
    pub fn scope(self, scope: Scope) -> Self {
        Self { scope, ..self }
    }

    /// Sets the scope's tag.
    #[must_use]
    #[inline]
    pub fn tag(mut self, tag: Tag) -> Self {
        self.scope.tag = tag;
        self
    }

    /// Sets the scope's operation.
    #[must_use]
    #[inline]
    pub fn op(mut self, op: &'static str) -> Self {
        self.scope.op = op;
        self
    }
}

/// Handle of an allocated block. Dropping it does not free the memory.
///
/// A block is freed once, with [`Pool::free`] or [`Pool::free_after`]. Freeing it again is detected and only
/// logged and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Segment that contains the block.
    pub segment: SegmentId,
    /// Offset of the block in its segment, in bytes.
    pub offset: u64,
    /// Bytes requested.
    pub bytes: u64,
    /// Bytes after rounding; all of them belong to the block.
    pub size: u64,
    /// Queue that the block was allocated for.
    pub queue: u8,
    pub(super) slot: u32,
    pub(super) generation: u32,
}

impl Block {
    /// Creates the handle of memory that belongs to no pool.
    pub(crate) fn external(segment: SegmentId, offset: u64, bytes: u64, size: u64) -> Self {
        Self { segment, offset, bytes, size, queue: 0, slot: NO_BLOCK, generation: 0 }
    }
}

#[inline]
pub(super) fn stream_bit(queue: u8) -> u8 {
    1_u8.checked_shl(queue.into()).unwrap_or(0)
}

/// Callback that frees memory when a pool runs low: (bytes wanted) -> true if it freed memory.
pub(super) type LowMemoryCallback = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// A caching allocator over a source of segments. Clones share the same pool.
///
/// Every method may be called from any thread. Work that uses a block runs in the order of its queue, so a
/// freed block may be reused at once on the same queue. Blocks that other queues used are freed with
/// [`free_cross_stream`](Self::free_cross_stream), and blocks that wait for a fence with
/// [`free_after`](Self::free_after). When the last handle is dropped, the pool waits for the device and
/// returns all memory.
#[derive(Clone)]
pub struct Pool {
    pub(super) shared: Arc<PoolShared>,
}

pub(super) struct PoolShared {
    pub(super) state: Mutex<PoolState>,
    pub(super) callbacks: RwLock<Vec<LowMemoryCallback>>,
    /// Number of compactions.
    pub(super) move_count: AtomicU64,
    /// If true, the recorder captures stacks.
    pub(super) captures_stacks: AtomicBool,
}

impl PoolShared {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, PoolState> {
        // A panic under the lock can only come from a broken invariant; the counters are still worth having.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state and captures the caller's stack for the recorder. The capture is slow, so it precedes
    /// the lock.
    #[cold]
    fn lock_with_stack(&self) -> MutexGuard<'_, PoolState> {
        let stack = Some(Arc::new(Backtrace::force_capture()));
        let mut state = self.lock();
        if let Some(recorder) = &mut state.heap.recorder {
            recorder.current_stack = stack;
        }
        state
    }
}

impl Drop for PoolShared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.release_all();
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({})", self.stats().summary())
    }
}

impl Pool {
    /// Creates a pool that takes its segments from `source`.
    #[must_use]
    pub fn new(source: Arc<dyn SegmentSource>, config: Config) -> Self {
        Self {
            shared: Arc::new(PoolShared {
                state: Mutex::new(PoolState::new(source, config)),
                callbacks: RwLock::default(),
                move_count: AtomicU64::new(0),
                captures_stacks: AtomicBool::new(false),
            }),
        }
    }

    /// Sets the device's name for messages.
    #[must_use]
    pub fn with_device_name(self, device: impl Into<String>) -> Self {
        self.shared.lock().device = Some(device.into());
        self
    }

    /// Allocates a block. If no free block fits, the request goes through the slow path of the module's
    /// documentation. It fails with [`Error::OutOfMemory`], or with [`Error::Driver`] for a lost device or a
    /// driver error.
    #[inline]
    pub fn alloc(&self, request: Request) -> Result<Block> {
        let mut state = match self.shared.captures_stacks.load(Ordering::Relaxed) {
            false => self.shared.lock(),
            true => self.shared.lock_with_stack(),
        };
        state.heap.clock += 1;
        let need = state.resolve_request(&request);
        if state.heap.clock == state.fail_at_request {
            return Err(self.out_of_memory(state, &need, "requested by a test".to_owned()));
        }
        match state.heap.take_free_block(&need) {
            Some(block) => state.finish_alloc(block),
            None => self.alloc_slow_path(state, need),
        }
    }

    /// Makes the `n`-th request from now fail as on a full device (1 is the next one); 0 cancels this. Tests
    /// of a program use it to reach the paths that handle [`Error::OutOfMemory`].
    ///
    /// ```
    /// use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    ///
    /// let device = Device::null(Default::default());
    /// device.pool().fail_request(1);
    /// let failed = Tensor::zeros([4], DType::F32, &device);
    /// assert!(failed.is_err_and(|error| error.is_out_of_memory()));
    /// assert!(Tensor::zeros([4], DType::F32, &device).is_ok());
    /// ```
    pub fn fail_request(&self, n: u64) {
        let mut state = self.shared.lock();
        state.fail_at_request = if n == 0 { 0 } else { state.heap.clock + n };
    }

    /// Returns the number of requests so far, those that failed included.
    #[must_use]
    pub fn request_count(&self) -> u64 {
        self.shared.lock().heap.clock
    }

    /// Frees a block, which the next request on its queue may get.
    #[inline]
    pub fn free(&self, block: Block) {
        self.free_cross_stream(block, stream_bit(block.queue));
    }

    /// Frees a block that work of the queues in `queues` (a bit each) has used. The next work of its own
    /// queue that gets the memory waits for them on the device. The block counts as free at once.
    #[inline]
    pub fn free_cross_stream(&self, block: Block, queues: u8) {
        let mut state = self.shared.lock();
        match state.heap.find_slot(&block) {
            Some(slot) if queues == stream_bit(state.heap.home_stream(slot)) => state.heap.free(slot),
            Some(slot) => self.free_cross_stream_slow(&mut state, slot, queues),
            None => state.report_invalid_free(&block),
        }
    }

    #[cold]
    fn free_cross_stream_slow(&self, state: &mut PoolState, slot: u32, queues: u8) {
        if let Err(error) = state.free_cross_stream(slot, queues) {
            // The device is lost, or the next call reports the error; no work uses the block any more.
            log::debug!("a block was freed without its queues: {error}");
            state.heap.free(slot);
        }
    }

    /// Frees a block that the device still uses: it is reused only after the device has passed `fence`.
    pub fn free_after(&self, block: Block, fence: Fence) {
        let mut state = self.shared.lock();
        match state.heap.find_slot(&block) {
            Some(slot) => state.defer_free(slot, fence),
            None => state.report_invalid_free(&block),
        }
    }

    /// Returns the scope of an allocated block.
    pub(crate) fn block_scope(&self, block: &Block) -> Scope {
        let state = self.shared.lock();
        state.heap.find_slot(block).map_or(Scope::NONE, |slot| {
            let slot = state.heap.slot(slot);
            Scope { tag: slot.tag, module: slot.module, op: slot.op, site: None }
        })
    }

    /// Changes the tag of a block that was just allocated, if it is [`Tag::Other`].
    pub(crate) fn retag(&self, block: &Block, tag: Tag) {
        let mut state = self.shared.lock();
        if let Some(slot) = state.heap.find_slot(block) {
            state.heap.retag(slot, Tag::Other, tag);
        }
    }

    /// Counts memory of the program that a tensor begins to use, under [`Tag::External`].
    pub(crate) fn record_external(&self, bytes: u64) {
        self.shared.lock().heap.counters.external.add(bytes);
    }

    /// Undoes one [`record_external`](Self::record_external).
    pub(crate) fn release_external(&self, bytes: u64) {
        self.shared.lock().heap.counters.external.sub(bytes);
    }

    /// Returns current statistics, after polling fences.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut state = self.shared.lock();
        // If polling fails, no further fence counts as passed.
        let _ = state.poll_fences();
        Stats { library_bytes: state.source.library_bytes(), ..state.stats() }
    }

    /// Resets all peaks to the current values.
    pub fn reset_peak_stats(&self) {
        self.shared.lock().heap.counters.reset_peak();
    }

    /// Resets all accumulated counters to zero.
    pub fn reset_accumulated_stats(&self) {
        self.shared.lock().reset_accumulated();
    }

    /// Returns all idle memory to the device, after waiting for pending fences. Returns the bytes released.
    ///
    /// The pool itself gains no room by this, since it releases idle memory when it needs to.
    pub fn empty_cache(&self) -> Result<u64> {
        let state = self.shared.lock();
        let before = state.heap.counters.reserved();
        // Blocks that wait for a fence keep their segments from being idle.
        let mut state = self.wait_pending_fences(state)?;
        state.release_largest_idle(u64::MAX)?;
        let state = self.wait_pending_fences(state)?;
        Ok(before.saturating_sub(state.heap.counters.reserved()))
    }

    /// Releases idle memory until the pool holds at most `keep` bytes, or no idle memory is left. Does not
    /// wait: memory that the device may still use returns after its fence. Returns the bytes that are being
    /// released.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        let mut state = self.shared.lock();
        let surplus = state.heap.counters.reserved().saturating_sub(keep);
        let leaving = state.release_largest_idle(surplus)?;
        state.poll_fences()?;
        Ok(leaving)
    }

    /// Takes memory from the device in advance, so that at least `bytes` bytes are free on queue 0. They are one
    /// piece, or as few pieces as the device's largest segment allows.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the limits or the device have less room. The pool then holds no more memory than
    /// before.
    pub fn preallocate(&self, bytes: u64) -> Result<()> {
        const OP: &str = "preallocate";
        let (min_piece, max_piece, reserved_before) = {
            let mut state = self.shared.lock();
            let memory = state.source.device_memory();
            let room = state.capacity(memory).into_iter().chain(memory.total).min();
            let allocated = state.heap.counters.allocated();
            if let Some(room) = room.filter(|room| allocated.saturating_add(bytes) > *room) {
                let detail =
                    format!("the pool can hold {}, and {} are in use", Bytes(room), Bytes(allocated));
                let request = Request::new(bytes).op(OP);
                let need = state.resolve_request(&request);
                return Err(self.out_of_memory(state, &need, detail));
            }
            // Small requests would be served by the small pool.
            (state.config.small_size + 1, state.max_segment, state.heap.counters.reserved())
        };
        let mut blocks = Vec::new();
        let mut missing = bytes.max(min_piece);
        let mut taken = Ok(());
        while missing > 0 && taken.is_ok() {
            let piece = missing.min(max_piece).max(min_piece);
            missing = missing.saturating_sub(piece);
            taken = self.alloc(Request::new(piece).op(OP)).map(|block| blocks.push(block));
        }
        blocks.into_iter().for_each(|block| self.free(block));
        if taken.is_err()
            && let Err(error) = self.trim(reserved_before)
        {
            log::debug!("preallocated memory was not given back: {error}");
        }
        taken
    }

    /// Limits the bytes that the pool takes from the device; `None` removes the limit. Memory held already
    /// stays.
    pub fn set_limit(&self, bytes: Option<u64>) {
        let mut state = self.shared.lock();
        state.config.max_memory = bytes;
        state.set_limit();
    }

    /// Limits the pool to a fraction (0 to 1) of the device's memory.
    ///
    /// # Errors
    /// The fraction is out of range, or the driver does not report the device's memory.
    pub fn set_fraction(&self, fraction: f64) -> Result<()> {
        let wrong = |message: String| Err(Error::argument("set_fraction", message));
        if !(0.0..=1.0).contains(&fraction) {
            return wrong(format!("expected a number from 0 to 1, got {fraction}"));
        }
        let mut state = self.shared.lock();
        if state.source.device_memory().total.is_none() {
            return wrong("the driver does not report the memory of the device; use set_limit".to_owned());
        }
        state.config.per_process_memory_fraction = fraction;
        state.set_limit();
        Ok(())
    }

    /// Returns the limit of the pool in bytes, if it has one.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.shared.lock().limit
    }

    /// Returns the size of the largest block that the device can allocate, in bytes.
    #[must_use]
    pub fn max_block_size(&self) -> u64 {
        self.shared.lock().max_segment
    }

    /// Returns the configuration in force.
    #[must_use]
    pub fn config(&self) -> Config {
        self.shared.lock().config
    }

    /// Registers a callback that frees memory before the pool grows. It is called without the pool's lock,
    /// with the bytes wanted, and returns true if it freed memory.
    pub fn on_low_memory(&self, callback: impl Fn(u64) -> bool + Send + Sync + 'static) {
        self.shared.callbacks.write().unwrap_or_else(PoisonError::into_inner).push(Arc::new(callback));
    }

    /// Returns the out-of-memory error of a request.
    #[cold]
    pub(super) fn out_of_memory(
        &self,
        mut state: MutexGuard<'_, PoolState>,
        need: &AllocRequest,
        detail: String,
    ) -> Error {
        let source = Arc::clone(&state.source);
        let memory = source.device_memory();
        state.totals.num_ooms += 1;
        state.heap.record_oom(need, memory.free.unwrap_or(0));
        let mut error: OutOfMemory = state.out_of_memory(need, memory, detail);
        // The lock is released before the driver looks up the names of processes.
        drop(state);
        error.processes = source.processes();
        Error::OutOfMemory(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::fake_source::FakeSource;

    #[test]
    fn blocks_are_reused_merged_and_released() -> Result<()> {
        let source = Arc::new(FakeSource::plain(1 << 30));
        let pool = Pool::new(source.clone(), Config::default());
        let a = pool.alloc(Request::new(1000))?;
        let b = pool.alloc(Request::new(1000))?;
        assert_eq!((a.offset, a.bytes, a.size, b.offset), (0, 1000, 1024, 1024));
        assert_eq!((pool.stats().allocated(), pool.stats().reserved()), (2048, 2 << 20));
        pool.free(a);
        pool.free(a);
        assert_eq!(pool.stats().num_invalid_frees, 1);
        pool.free(b);
        assert_eq!(pool.alloc(Request::new(2 << 10))?.offset, 0, "the freed neighbours are one block again");
        assert_eq!(pool.empty_cache()?, 0);
        drop(pool);
        assert_eq!((source.used(), source.violations()), (0, vec![]));
        Ok(())
    }
}

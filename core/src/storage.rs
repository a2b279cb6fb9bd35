//! Memory of tensors: a block of the device, or temporarily a copy in host memory.

use std::any::Any;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use crate::backend::{SegmentId, Slice};
use crate::error::Result;
use crate::memory::scope::{self, Scope};
use crate::memory::{Block, Pool, Request, Tag};
use crate::runtime::capture::recorder::Buffer;
use crate::runtime::device::Device;
use crate::runtime::dispatch::{DispatchGuard, FusionSlot};
use crate::runtime::driver_call::{check_not_in_callback, is_in_driver_call};
use crate::runtime::stream::{Access, StreamUses};
use crate::sync::LockUnpoisoned;

/// Returns a process-wide id. Ids of nodes, leaves and storages increase in creation order.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory of one or more tensors, freed with the last of them.
pub(crate) struct Storage {
    pub(crate) device: Device,
    /// Process-wide id, larger than those of all older storages.
    pub(crate) id: u64,
    bytes: u64,
    /// Number of recorded operations that have written to the storage in place.
    pub(crate) recorded_writes: AtomicU32,
    /// Number of `SavedTensor`s that hold the storage.
    pub(crate) saved_count: AtomicU32,
    /// Returns the memory to the program, if it is the program's.
    release: Option<ReleaseExternal>,
    state: Mutex<StorageState>,
    /// Data that operations have derived from the contents.
    derived: OnceLock<Box<dyn DerivedData>>,
}

/// Data that operations derive from the contents and keep with the storage, which frees it.
///
/// The data must not hold the storage itself. It is valid for one [tracked version](Storage::tracked_version).
pub(crate) trait DerivedData: Any + Send + Sync {
    /// Frees the data.
    fn clear(&self);
}

/// Callback that returns memory to the program.
pub(crate) type ReleaseExternal = Box<dyn FnOnce() + Send + Sync>;

struct StorageState {
    residency: Residency,
    uses: StreamUses,
    /// The pool's move count when the block's location was last refreshed.
    seen_moves: u64,
    /// Role of the storage in the pending fusion group.
    fusion_slot: FusionSlot,
    /// Number of bindings for writing; used to detect changes.
    version: u64,
    /// Number of captured steps that rely on the block's address.
    capture_holds: u32,
    /// Number of running transfers without the dispatch lock; the block must not move or leave before they
    /// end.
    pin_count: u32,
    /// Number of those transfers that write.
    write_pin_count: u32,
    /// If true, an eviction was requested while the block was pinned.
    evict_when_unpinned: bool,
}

/// Location of the contents.
enum Residency {
    Device(Block),
    /// On the device, with an up-to-date copy on the host, so that the block can be evicted.
    DeviceAndHost(Block, HostBlock),
    /// On the host, with the scope of the evicted block for the block that replaces it.
    Host(HostBlock, Scope),
}

/// Block of the device's host pool.
struct HostBlock {
    device: Device,
    block: Block,
    uses: StreamUses,
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        free_block(&self.device, self.device.host_pool(), self.block, &self.uses);
    }
}

/// Guard that pins a block on the device for a transfer that does not hold the dispatch lock.
pub(crate) struct PinGuard {
    storage: Arc<Storage>,
    access: Access,
    block: Block,
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        let Self { storage, access, block } = self;
        if is_in_driver_call() {
            let moved = Self { storage: Arc::clone(storage), access: *access, block: *block };
            return storage.device.waiter().drop_later(moved);
        }
        storage.device.pool().unpin(block);
        let leaves = {
            let state = &mut *storage.lock();
            state.pin_count = state.pin_count.saturating_sub(1);
            if *access == Access::Write {
                state.write_pin_count = state.write_pin_count.saturating_sub(1);
                state.mark_written();
            }
            state.pin_count == 0 && std::mem::take(&mut state.evict_when_unpinned)
        };
        if leaves {
            storage.evict();
        }
    }
}

impl StorageState {
    /// Marks the device memory as written, which invalidates a host copy and everything derived from the
    /// contents.
    fn mark_written(&mut self) {
        if let Residency::DeviceAndHost(block, _) = &self.residency {
            self.residency = Residency::Device(*block);
        }
        self.version += 1;
    }
}

/// Returns the slice that a kernel binds: rounded up to 16 bytes for vector loads, within the block.
fn binding_slice(block: &Block) -> Slice {
    let bytes = block.bytes.next_multiple_of(16).min(block.size);
    Slice { segment: block.segment, offset: block.offset, bytes }
}

/// Returns the slice that a copy transfers: whole words.
fn copy_slice(block: &Block) -> Slice {
    Slice { segment: block.segment, offset: block.offset, bytes: block.bytes.next_multiple_of(4) }
}

impl Buffer for Storage {
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Storage {
    #[track_caller]
    pub(crate) fn new(device: &Device, bytes: u64) -> Result<Self> {
        if is_in_driver_call() {
            // The name of the operation is looked up for errors only.
            check_not_in_callback(scope::current_op_or("empty"))?;
        }
        let seen = device.pool().move_count();
        let block = device.pool().alloc(Request::new(bytes).queue(device.current_queue()).movable())?;
        let mut uses = StreamUses::default();
        if device.uses_streams() {
            device.order_access(
                &device.lock_dispatch_on_queue(block.queue),
                &mut uses,
                Access::Write,
                block.queue,
            )?;
        }
        Ok(Self::from_block(device, block, uses, seen, None))
    }

    /// Creates a storage over memory of the program, which `release` returns.
    pub(crate) fn from_external(device: &Device, slice: Slice, bytes: u64, release: ReleaseExternal) -> Self {
        let block = Block::external(slice.segment, slice.offset, bytes, slice.bytes);
        device.pool().record_external(bytes);
        Self::from_block(device, block, StreamUses::default(), device.pool().move_count(), Some(release))
    }

    fn from_block(
        device: &Device,
        block: Block,
        uses: StreamUses,
        seen_moves: u64,
        release: Option<ReleaseExternal>,
    ) -> Self {
        Self {
            device: device.clone(),
            id: next_id(),
            bytes: block.bytes,
            recorded_writes: AtomicU32::new(0),
            saved_count: AtomicU32::new(0),
            release,
            state: Mutex::new(StorageState {
                residency: Residency::Device(block),
                uses,
                seen_moves,
                fusion_slot: FusionSlot::default(),
                version: 0,
                capture_holds: 0,
                pin_count: 0,
                write_pin_count: 0,
                evict_when_unpinned: false,
            }),
            derived: OnceLock::new(),
        }
    }

    /// Tags the block if it has no tag yet.
    pub(crate) fn retag(&self, tag: Tag) {
        if let Residency::Device(block) | Residency::DeviceAndHost(block, _) = &self.lock().residency {
            self.device.pool().retag(block, tag);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the write counter: equal versions mean equal contents.
    pub(crate) fn version(&self) -> u64 {
        self.lock().version
    }

    /// Restores the version after one operation that has written the contents that were there before.
    pub(crate) fn restore_version(&self, version: u64) {
        let state = &mut *self.lock();
        // A write of another thread keeps its version.
        if state.version == version + 1 {
            state.version = version;
        }
    }

    /// Returns the version, or `None` if the contents can change without a new one: in memory of the program, and
    /// while a transfer without the dispatch lock writes.
    pub(crate) fn tracked_version(&self) -> Option<u64> {
        let state = self.lock();
        (self.release.is_none() && state.write_pin_count == 0).then_some(state.version)
    }

    /// Returns the data that operations keep with the storage, if it has this type.
    pub(crate) fn derived<D: DerivedData + Default>(&self) -> Option<&D> {
        let derived: &dyn Any = &**self.derived.get_or_init(|| Box::<D>::default());
        derived.downcast_ref()
    }

    fn lock(&self) -> MutexGuard<'_, StorageState> {
        self.state.lock_unpoisoned()
    }

    /// Binds the memory for an operation that this thread enqueues under the dispatch lock, ordered after
    /// accesses of other queues. Returns `None` if the contents are on the host. The caller must then call
    /// [`copy_to_device`](Self::copy_to_device), without the lock.
    pub(crate) fn bind(&self, access: Access, guard: &DispatchGuard<'_>) -> Result<Option<Slice>> {
        let state = &mut *self.lock();
        let Some(block) = self.locate(state, guard) else { return Ok(None) };
        if access == Access::Write {
            state.mark_written();
        }
        if self.device.uses_streams() {
            self.device.order_access(guard, &mut state.uses, access, self.device.current_queue())?;
        }
        Ok(Some(binding_slice(&block)))
    }

    /// Binds the memory for an operation that joins the fusion group.
    pub(crate) fn bind_deferred(
        &self,
        access: Access,
        guard: &DispatchGuard<'_>,
        mark: FusionSlot,
    ) -> Result<Option<Slice>> {
        let slice = self.bind(access, guard)?;
        self.lock().fusion_slot = mark;
        Ok(slice)
    }

    /// Returns the role in the pending fusion group.
    pub(crate) fn fusion_slot(&self, _gate: &DispatchGuard<'_>) -> FusionSlot {
        self.lock().fusion_slot
    }

    /// Returns the block on the device; its address is valid while the dispatch lock is held.
    #[inline]
    fn locate(&self, state: &mut StorageState, _gate: &DispatchGuard<'_>) -> Option<Block> {
        let (Residency::Device(block) | Residency::DeviceAndHost(block, _)) = &mut state.residency else {
            return None;
        };
        let pool = self.device.pool();
        let moves = pool.move_count();
        if state.seen_moves != moves {
            pool.refresh_location(block);
            state.seen_moves = moves;
        }
        Some(*block)
    }

    /// Pins the block until the guard is dropped: compaction does not move it, and [`evict`](Self::evict) is
    /// postponed. A write is counted again at the end, because a host copy made in the meantime may have old
    /// contents.
    pub(crate) fn pin(self: &Arc<Self>, access: Access, guard: &DispatchGuard<'_>) -> Option<PinGuard> {
        let state = &mut *self.lock();
        let block = self.locate(state, guard)?;
        self.device.pool().pin(&block);
        state.pin_count += 1;
        state.write_pin_count += u32::from(access == Access::Write);
        Some(PinGuard { storage: Arc::clone(self), access, block })
    }

    /// Records the access of an operation that was enqueued without the dispatch lock, after it was enqueued.
    pub(crate) fn order_after_enqueue(&self, access: Access) -> Result<()> {
        if self.device.uses_streams() {
            let guard = self.device.lock_dispatch();
            self.device.order_access(&guard, &mut self.lock().uses, access, self.device.current_queue())?;
        }
        Ok(())
    }

    /// Starts a copy to host memory. The block stays until [`evict`](Self::evict).
    pub(crate) fn copy_to_host(&self) -> Result<()> {
        let device = &self.device;
        device.check_can_enqueue("offload")?;
        device
            .capture_recorder()
            .check_not_recording("offload", "a replay finds everything on the device; keep it there")?;
        {
            let state = self.lock();
            // Memory of a captured step must stay, and memory of the program would not become free.
            let stays = state.capture_holds > 0 || self.release.is_some();
            if !matches!(state.residency, Residency::Device(_)) || stays {
                return Ok(());
            }
        }
        let (out, _) = device.copy_queues();
        let host = device.host_pool().alloc(Request::new(self.bytes).queue(out))?;
        let mut host = HostBlock { device: device.clone(), block: host, uses: StreamUses::default() };
        let guard = device.lock_dispatch();
        let state = &mut *self.lock();
        // Another thread may have copied the storage in the meantime.
        if !matches!(state.residency, Residency::Device(_)) {
            return Ok(());
        }
        let Some(block) = self.locate(state, &guard) else { return Ok(()) };
        if device.uses_streams() {
            device.order_access(&guard, &mut state.uses, Access::Read, out)?;
            device.order_access(&guard, &mut host.uses, Access::Write, out)?;
        }
        device.queue_backend(out)?.copy(copy_slice(&host.block), copy_slice(&block))?;
        device.record_queue_event(&guard, out)?;
        state.residency = Residency::DeviceAndHost(block, host);
        Ok(())
    }

    /// Frees the device block if the host has an up-to-date copy. If a transfer has pinned the block, the end
    /// of the transfer evicts it.
    pub(crate) fn evict(&self) {
        if let Some(derived) = self.derived.get() {
            derived.clear();
        }
        // Pending operations may read the block, so the lock flushes them.
        let _gate = self.device.lock_dispatch();
        let state = &mut *self.lock();
        if state.capture_holds > 0 {
            return;
        }
        let Residency::DeviceAndHost(block, _) = &state.residency else { return };
        if state.pin_count > 0 {
            state.evict_when_unpinned = true;
            return;
        }
        let block = *block;
        let scope = self.device.pool().block_scope(&block);
        free_block(&self.device, self.device.pool(), block, &state.uses);
        // invariant: matched above
        if let Residency::DeviceAndHost(_, host) =
            std::mem::replace(&mut state.residency, Residency::Device(block))
        {
            state.residency = Residency::Host(host, scope);
        }
    }

    /// Starts a copy back to the device, if the contents are on the host.
    pub(crate) fn copy_to_device(&self) -> Result<()> {
        let device = &self.device;
        device.check_can_enqueue("prefetch")?;
        let scope = {
            let state = &mut *self.lock();
            match &state.residency {
                Residency::Device(_) => return Ok(()),
                Residency::DeviceAndHost(block, _) => {
                    state.residency = Residency::Device(*block);
                    state.evict_when_unpinned = false;
                    return Ok(());
                }
                Residency::Host(_, scope) => *scope,
            }
        };
        let queue = device.current_queue();
        let (pool, seen) = (device.pool(), device.pool().move_count());
        let mut block = pool.alloc(Request::new(self.bytes).queue(queue).scope(scope).movable())?;
        let (_, back) = device.copy_queues();
        let mut uses = StreamUses::default();
        let guard = device.lock_dispatch();
        let state = &mut *self.lock();
        let Residency::Host(host, _) = &mut state.residency else {
            // Another thread has copied the storage in the meantime.
            device.pool().free(block);
            return Ok(());
        };
        let now = pool.move_count();
        if now != seen {
            pool.refresh_location(&mut block);
        }
        let copied = (|| {
            if device.uses_streams() {
                // The copy waits for earlier uses of the block on its own queue.
                device.wait_for_queue(&guard, back, queue)?;
                device.order_access(&guard, &mut uses, Access::Write, back)?;
                device.order_access(&guard, &mut host.uses, Access::Read, back)?;
            }
            device.queue_backend(back)?.copy(copy_slice(&block), copy_slice(&host.block))?;
            device.record_queue_event(&guard, back)
        })();
        copied.inspect_err(|_| free_block(device, device.pool(), block, &uses))?;
        *state = StorageState {
            residency: Residency::Device(block),
            uses,
            seen_moves: now,
            fusion_slot: FusionSlot::default(),
            capture_holds: 0,
            pin_count: 0,
            write_pin_count: 0,
            evict_when_unpinned: false,
            version: state.version,
        };
        Ok(())
    }

    /// Pins the memory on the device for a captured step. Each call needs one
    /// [`unpin_from_capture`](Self::unpin_from_capture).
    pub(crate) fn pin_for_capture(&self) -> Result<Slice> {
        loop {
            {
                let guard = self.device.lock_dispatch();
                let state = &mut *self.lock();
                if let Some(block) = self.locate(state, &guard) {
                    self.device.pool().pin(&block);
                    state.capture_holds += 1;
                    return Ok(binding_slice(&block));
                }
            }
            self.copy_to_device()?;
        }
    }

    /// Undoes one [`pin_for_capture`](Self::pin_for_capture).
    pub(crate) fn unpin_from_capture(&self) {
        let state = &mut *self.lock();
        state.capture_holds = state.capture_holds.saturating_sub(1);
        if let Residency::Device(block) | Residency::DeviceAndHost(block, _) = &state.residency {
            self.device.pool().unpin(block);
        }
    }

    /// Reports whether the contents are on the host alone.
    pub(crate) fn is_on_host(&self) -> bool {
        matches!(self.lock().residency, Residency::Host(..))
    }
}

/// Frees a block, with the queues that may still use it.
fn free_block(device: &Device, pool: &Pool, block: Block, uses: &StreamUses) {
    match device.uses_streams() {
        true => pool.free_cross_stream(block, device.pending_queues(uses, block.queue)),
        false => pool.free(block),
    }
}

impl Storage {
    /// Lets the device's thread free the memory. A callback of the program runs inside of a call that may hold the
    /// locks of the device.
    fn free_later(&mut self) {
        let state = self.state.get_mut_unpoisoned();
        let nothing = Residency::Device(Block::external(SegmentId(0), 0, 0, 0));
        let moved = StorageState {
            residency: std::mem::replace(&mut state.residency, nothing),
            uses: std::mem::take(&mut state.uses),
            ..*state
        };
        self.device.waiter().drop_later(Self {
            device: self.device.clone(),
            id: self.id,
            bytes: self.bytes,
            recorded_writes: AtomicU32::new(0),
            saved_count: AtomicU32::new(0),
            release: self.release.take(),
            state: Mutex::new(moved),
            derived: self.derived.take().map_or_else(OnceLock::new, OnceLock::from),
        });
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if is_in_driver_call() {
            return self.free_later();
        }
        let state = self.state.get_mut_unpoisoned();
        self.device.flush_before_free(state.fusion_slot);
        if let Some(release) = self.release.take() {
            self.device.pool().release_external(self.bytes);
            return release();
        }
        match &state.residency {
            Residency::Device(block) | Residency::DeviceAndHost(block, _) => {
                free_block(&self.device, self.device.pool(), *block, &state.uses)
            }
            Residency::Host(..) => {}
        }
    }
}

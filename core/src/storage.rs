//! The memory behind tensors: a block of the device, or for a while a copy of it in memory of the host.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::autograd;
use crate::backend::Slice;
use crate::error::Result;
use crate::memory::scope::Scope;
use crate::memory::{Block, Pool, Request, Tag};
use crate::ops::elementwise::fusion::FusionSlot;
use crate::runtime::device::Device;
use crate::runtime::stream::{Access, DispatchGuard, StreamUses};

/// A piece of memory, given back when the last tensor over it is dropped.
pub(crate) struct Storage {
    pub(crate) device: Device,
    /// Larger than that of all memory that is older.
    pub(crate) id: u64,
    bytes: u64,
    /// How many recorded operations have written to it in place.
    pub(crate) recorded_writes: AtomicU32,
    /// How many gradients keep it for the backward pass.
    pub(crate) saved_count: AtomicU32,
    state: Mutex<StorageState>,
}

struct StorageState {
    residency: Residency,
    uses: StreamUses,
    /// How often blocks had moved when it was known where this one is.
    seen_moves: u64,
    /// What it is to operations that wait to be launched together.
    fusion_slot: FusionSlot,
    /// How often it was bound to be written.
    version: u64,
    /// Captured steps that count on it to be where it is.
    capture_holds: u32,
    /// Copies that read or write it without the gate: it stays until they end.
    pin_count: u32,
    /// It was to leave the device while it was pinned.
    evict_when_unpinned: bool,
}

/// Where the contents are.
enum Residency {
    /// On the device.
    Device(Block),
    /// On the device, and copied to the host: the block can go when nothing has changed it.
    DeviceAndHost(Block, HostBlock),
    /// On the host. What the block was for is kept for the one it comes back to.
    Host(HostBlock, Scope),
}

/// A block of the device's pool of host memory.
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

/// Memory that stays on the device, and where it is, for a copy that holds no gate.
pub(crate) struct PinGuard<'a> {
    storage: &'a Storage,
    access: Access,
    block: Block,
}

impl Drop for PinGuard<'_> {
    fn drop(&mut self) {
        let Self { storage, access, block } = self;
        storage.device.pool().unpin(block);
        let leaves = {
            let state = &mut *storage.lock();
            state.pin_count = state.pin_count.saturating_sub(1);
            if *access == Access::Write {
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
    /// The memory on the device is written: a copy on the host is outdated, and so is what others made of the contents.
    fn mark_written(&mut self) {
        if let Residency::DeviceAndHost(block, _) = &self.residency {
            self.residency = Residency::Device(*block);
        }
        self.version += 1;
    }
}

/// What a kernel binds of a block: up to 16 bytes more than were asked for, so that vectors are whole; it is that large.
fn binding_slice(block: &Block) -> Slice {
    let bytes = block.bytes.next_multiple_of(16).min(block.size);
    Slice { segment: block.segment, offset: block.offset, bytes }
}

/// What a copy moves: whole words.
fn copy_slice(block: &Block) -> Slice {
    Slice { segment: block.segment, offset: block.offset, bytes: block.bytes.next_multiple_of(4) }
}

impl Storage {
    #[track_caller]
    pub(crate) fn new(device: &Device, bytes: u64) -> Result<Self> {
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
        Ok(Self {
            device: device.clone(),
            id: autograd::next_id(),
            bytes,
            recorded_writes: AtomicU32::new(0),
            saved_count: AtomicU32::new(0),
            state: Mutex::new(StorageState {
                residency: Residency::Device(block),
                uses,
                seen_moves: seen,
                fusion_slot: FusionSlot::default(),
                version: 0,
                capture_holds: 0,
                pin_count: 0,
                evict_when_unpinned: false,
            }),
        })
    }

    /// Tags its memory, if it has no tag yet.
    pub(crate) fn retag(&self, tag: Tag) {
        if let Residency::Device(block) | Residency::DeviceAndHost(block, _) = &self.lock().residency {
            self.device.pool().retag(block, tag);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How often it was written: the same number, the same contents.
    pub(crate) fn version(&self) -> u64 {
        self.lock().version
    }

    fn lock(&self) -> MutexGuard<'_, StorageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory, for an operation that this thread enqueues while it holds the gate: it is behind what other queues do with
    /// it. `None` if it is not on the device: then [`fetch`](Self::fetch) comes first, without the gate.
    pub(crate) fn bind(&self, access: Access, gate: &DispatchGuard<'_>) -> Result<Option<Slice>> {
        let state = &mut *self.lock();
        let Some(block) = self.locate(state, gate) else { return Ok(None) };
        if access == Access::Write {
            state.mark_written();
        }
        if self.device.uses_streams() {
            self.device.order_access(gate, &mut state.uses, access, self.device.current_queue())?;
        }
        Ok(Some(binding_slice(&block)))
    }

    /// The same for an operation that waits.
    pub(crate) fn bind_deferred(
        &self,
        access: Access,
        gate: &DispatchGuard<'_>,
        mark: FusionSlot,
    ) -> Result<Option<Slice>> {
        let slice = self.bind(access, gate)?;
        self.lock().fusion_slot = mark;
        Ok(slice)
    }

    /// What it is to operations that wait.
    pub(crate) fn fusion_slot(&self, _gate: &DispatchGuard<'_>) -> FusionSlot {
        self.lock().fusion_slot
    }

    /// The block on the device, where it is while the gate is held.
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

    /// Keeps the memory on the device where it is, from when the gate is held until the guard is dropped: compaction does not move
    /// it, and [`leave`](Self::leave) waits. A write counts again when it ends: what was copied meanwhile may be of before.
    pub(crate) fn pin(&self, access: Access, gate: &DispatchGuard<'_>) -> Option<PinGuard<'_>> {
        let state = &mut *self.lock();
        let block = self.locate(state, gate)?;
        self.device.pool().pin(&block);
        state.pin_count += 1;
        Some(PinGuard { storage: self, access, block })
    }

    /// An operation that was enqueued without the gate has been given to its queue by now.
    pub(crate) fn order_after_enqueue(&self, access: Access) -> Result<()> {
        if self.device.uses_streams() {
            let gate = self.device.lock_dispatch();
            self.device.order_access(&gate, &mut self.lock().uses, access, self.device.current_queue())?;
        }
        Ok(())
    }

    /// Starts a copy to memory of the host. The block stays until [`leave`](Self::leave).
    pub(crate) fn copy_to_host(&self) -> Result<()> {
        let device = &self.device;
        device
            .capture_recorder()
            .check_not_recording("offload", "a replay finds everything on the device; keep it there")?;
        {
            let state = self.lock();
            // What a captured step uses stays.
            if !matches!(state.residency, Residency::Device(_)) || state.capture_holds > 0 {
                return Ok(());
            }
        }
        let (out, _) = device.copy_queues();
        let host = device.host_pool().alloc(Request::new(self.bytes).queue(out))?;
        let mut host = HostBlock { device: device.clone(), block: host, uses: StreamUses::default() };
        let gate = device.lock_dispatch();
        let state = &mut *self.lock();
        // Another thread may have been faster.
        if !matches!(state.residency, Residency::Device(_)) {
            return Ok(());
        }
        let Some(block) = self.locate(state, &gate) else { return Ok(()) };
        if device.uses_streams() {
            device.order_access(&gate, &mut state.uses, Access::Read, out)?;
            device.order_access(&gate, &mut host.uses, Access::Write, out)?;
        }
        device.queue_backend(out)?.copy(copy_slice(&host.block), copy_slice(&block))?;
        device.record_queue_event(&gate, out)?;
        state.residency = Residency::DeviceAndHost(block, host);
        Ok(())
    }

    /// Gives the block on the device back, if its contents are on the host and nothing has changed it since. While a copy without
    /// the gate uses it, that copy's end does.
    pub(crate) fn evict(&self) {
        // What waits may read the block.
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
        // invariant: the place was matched above
        if let Residency::DeviceAndHost(_, host) =
            std::mem::replace(&mut state.residency, Residency::Device(block))
        {
            state.residency = Residency::Host(host, scope);
        }
    }

    /// Starts to bring the contents back, if they are on the host.
    pub(crate) fn copy_to_device(&self) -> Result<()> {
        let device = &self.device;
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
        let gate = device.lock_dispatch();
        let state = &mut *self.lock();
        let Residency::Host(host, _) = &mut state.residency else {
            // Another thread was faster.
            device.pool().free(block);
            return Ok(());
        };
        let now = pool.move_count();
        if now != seen {
            pool.refresh_location(&mut block);
        }
        let copied = (|| {
            if device.uses_streams() {
                // What the block's own queue did with it before.
                device.wait_for_queue(&gate, back, queue)?;
                device.order_access(&gate, &mut uses, Access::Write, back)?;
                device.order_access(&gate, &mut host.uses, Access::Read, back)?;
            }
            device.queue_backend(back)?.copy(copy_slice(&block), copy_slice(&host.block))?;
            device.record_queue_event(&gate, back)
        })();
        copied.inspect_err(|_| free_block(device, device.pool(), block, &uses))?;
        *state = StorageState {
            residency: Residency::Device(block),
            uses,
            seen_moves: now,
            fusion_slot: FusionSlot::default(),
            capture_holds: 0,
            pin_count: 0,
            evict_when_unpinned: false,
            version: state.version,
        };
        Ok(())
    }

    /// Keeps the memory on the device, where it is, until [`release`](Self::release), which undoes one of these.
    pub(crate) fn pin_for_capture(&self) -> Result<Slice> {
        loop {
            {
                let gate = self.device.lock_dispatch();
                let state = &mut *self.lock();
                if let Some(block) = self.locate(state, &gate) {
                    self.device.pool().pin(&block);
                    state.capture_holds += 1;
                    return Ok(binding_slice(&block));
                }
            }
            self.copy_to_device()?;
        }
    }

    /// See [`hold`](Self::hold).
    pub(crate) fn unpin_from_capture(&self) {
        let state = &mut *self.lock();
        state.capture_holds = state.capture_holds.saturating_sub(1);
        if let Residency::Device(block) | Residency::DeviceAndHost(block, _) = &state.residency {
            self.device.pool().unpin(block);
        }
    }

    /// Whether the contents are on the host alone.
    pub(crate) fn is_on_host(&self) -> bool {
        matches!(self.lock().residency, Residency::Host(..))
    }
}

/// Gives a block back to its pool, with the queues that may still use it.
fn free_block(device: &Device, pool: &Pool, block: Block, uses: &StreamUses) {
    match device.uses_streams() {
        true => pool.free_cross_stream(block, device.pending_queues(uses, block.queue)),
        false => pool.free(block),
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if state.fusion_slot.group_id() == self.device.stream_set().fusion_group.load(Ordering::Acquire) {
            self.device.flush_before_free(state.fusion_slot);
        }
        match &state.residency {
            Residency::Device(block) | Residency::DeviceAndHost(block, _) => {
                free_block(&self.device, self.device.pool(), *block, &state.uses)
            }
            Residency::Host(..) => {}
        }
    }
}

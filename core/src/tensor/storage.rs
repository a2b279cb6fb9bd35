//! The memory behind tensors: a block of the device, or for a while a copy of it in memory of the host.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::autograd;
use crate::backend::Slice;
use crate::device::Device;
use crate::error::Result;
use crate::memory::scope::Scope;
use crate::memory::{Block, Pool, Request, Tag};
use crate::ops::fuse::Mark;
use crate::stream::{Access, Gate, Uses};

/// A piece of memory, given back when the last tensor over it is dropped.
pub(crate) struct Storage {
    pub(super) device: Device,
    /// Larger than that of all memory that is older.
    pub(super) id: u64,
    bytes: u64,
    /// How many recorded operations have written to it in place.
    pub(super) writes: AtomicU32,
    /// How many gradients keep it for the backward pass.
    pub(super) kept: AtomicU32,
    state: Mutex<State>,
}

struct State {
    place: Place,
    uses: Uses,
    /// How often blocks had moved when it was known where this one is.
    seen: u64,
    /// What it is to operations that wait to be launched together.
    mark: Mark,
    /// How often it was bound to be written.
    version: u64,
    /// Captured steps that count on it to be where it is.
    held: u32,
    /// Copies that read or write it without the gate: it stays until they end.
    pinned: u32,
    /// It was to leave the device while it was pinned.
    leaves: bool,
}

/// Where the contents are.
enum Place {
    /// On the device.
    Here(Block),
    /// On the device, and copied to the host: the block can go when nothing has changed it.
    Both(Block, HostBlock),
    /// On the host. What the block was for is kept for the one it comes back to.
    Away(HostBlock, Scope),
}

/// A block of the device's pool of host memory.
struct HostBlock {
    device: Device,
    block: Block,
    uses: Uses,
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        free(&self.device, self.device.host_pool(), self.block, &self.uses);
    }
}

/// Memory that stays on the device, and where it is, for a copy that holds no gate.
pub(super) struct Pinned<'a> {
    storage: &'a Storage,
    access: Access,
    block: Block,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let Self { storage, access, block } = self;
        storage.device.pool().unpin(block);
        let leaves = {
            let state = &mut *storage.lock();
            state.pinned = state.pinned.saturating_sub(1);
            if *access == Access::Write {
                state.change();
            }
            state.pinned == 0 && std::mem::take(&mut state.leaves)
        };
        if leaves {
            storage.leave();
        }
    }
}

impl State {
    /// The memory on the device is written: a copy on the host is outdated, and so is what others made of the contents.
    fn change(&mut self) {
        if let Place::Both(block, _) = &self.place {
            self.place = Place::Here(*block);
        }
        self.version += 1;
    }
}

/// What a kernel binds of a block: up to 16 bytes more than were asked for, so that vectors are whole; it is that large.
fn slice(block: &Block) -> Slice {
    let bytes = block.bytes.next_multiple_of(16).min(block.size);
    Slice { segment: block.segment, offset: block.offset, bytes }
}

/// What a copy moves: whole words.
fn words(block: &Block) -> Slice {
    Slice { segment: block.segment, offset: block.offset, bytes: block.bytes.next_multiple_of(4) }
}

impl Storage {
    #[track_caller]
    pub(super) fn new(device: &Device, bytes: u64) -> Result<Self> {
        let seen = device.pool().moves();
        let block = device.pool().alloc(Request::new(bytes).queue(device.queue()).movable())?;
        let mut uses = Uses::default();
        if device.streams() {
            device.order(&device.gate_of(block.queue), &mut uses, Access::Write, block.queue)?;
        }
        Ok(Self {
            device: device.clone(),
            id: autograd::next_id(),
            bytes,
            writes: AtomicU32::new(0),
            kept: AtomicU32::new(0),
            state: Mutex::new(State {
                place: Place::Here(block),
                uses,
                seen,
                mark: Mark::default(),
                version: 0,
                held: 0,
                pinned: 0,
                leaves: false,
            }),
        })
    }

    /// Tags its memory, if it has no tag yet.
    pub(crate) fn retag(&self, tag: Tag) {
        if let Place::Here(block) | Place::Both(block, _) = &self.lock().place {
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory, for an operation that this thread enqueues while it holds the gate: it is behind what other queues do with
    /// it. `None` if it is not on the device: then [`fetch`](Self::fetch) comes first, without the gate.
    pub(crate) fn bind(&self, access: Access, gate: &Gate<'_>) -> Result<Option<Slice>> {
        let state = &mut *self.lock();
        let Some(block) = self.locate(state, gate) else { return Ok(None) };
        if access == Access::Write {
            state.change();
        }
        if self.device.streams() {
            self.device.order(gate, &mut state.uses, access, self.device.queue())?;
        }
        Ok(Some(slice(&block)))
    }

    /// The same for an operation that waits.
    pub(super) fn bind_in(&self, access: Access, gate: &Gate<'_>, mark: Mark) -> Result<Option<Slice>> {
        let slice = self.bind(access, gate)?;
        self.lock().mark = mark;
        Ok(slice)
    }

    /// What it is to operations that wait.
    pub(super) fn mark(&self, _gate: &Gate<'_>) -> Mark {
        self.lock().mark
    }

    /// The block on the device, where it is while the gate is held.
    #[inline]
    fn locate(&self, state: &mut State, _gate: &Gate<'_>) -> Option<Block> {
        let (Place::Here(block) | Place::Both(block, _)) = &mut state.place else { return None };
        let pool = self.device.pool();
        let moves = pool.moves();
        if state.seen != moves {
            pool.locate(block);
            state.seen = moves;
        }
        Some(*block)
    }

    /// Keeps the memory on the device where it is, from when the gate is held until the guard is dropped: compaction does not move
    /// it, and [`leave`](Self::leave) waits. A write counts again when it ends: what was copied meanwhile may be of before.
    pub(super) fn pin(&self, access: Access, gate: &Gate<'_>) -> Option<Pinned<'_>> {
        let state = &mut *self.lock();
        let block = self.locate(state, gate)?;
        self.device.pool().pin(&block);
        state.pinned += 1;
        Some(Pinned { storage: self, access, block })
    }

    /// An operation that was enqueued without the gate has been given to its queue by now.
    pub(super) fn enqueued(&self, access: Access) -> Result<()> {
        if self.device.streams() {
            let gate = self.device.gate();
            self.device.order(&gate, &mut self.lock().uses, access, self.device.queue())?;
        }
        Ok(())
    }

    /// Starts a copy to memory of the host. The block stays until [`leave`](Self::leave).
    pub(crate) fn send(&self) -> Result<()> {
        let device = &self.device;
        device.tape().refuse("offload", "a replay finds everything on the device; keep it there")?;
        {
            let state = self.lock();
            // What a captured step uses stays.
            if !matches!(state.place, Place::Here(_)) || state.held > 0 {
                return Ok(());
            }
        }
        let (out, _) = device.copies();
        let host = device.host_pool().alloc(Request::new(self.bytes).queue(out))?;
        let mut host = HostBlock { device: device.clone(), block: host, uses: Uses::default() };
        let gate = device.gate();
        let state = &mut *self.lock();
        // Another thread may have been faster.
        if !matches!(state.place, Place::Here(_)) {
            return Ok(());
        }
        let Some(block) = self.locate(state, &gate) else { return Ok(()) };
        if device.streams() {
            device.order(&gate, &mut state.uses, Access::Read, out)?;
            device.order(&gate, &mut host.uses, Access::Write, out)?;
        }
        device.lane(out)?.copy(words(&host.block), words(&block))?;
        device.mark(&gate, out)?;
        state.place = Place::Both(block, host);
        Ok(())
    }

    /// Gives the block on the device back, if its contents are on the host and nothing has changed it since. While a copy without
    /// the gate uses it, that copy's end does.
    pub(crate) fn leave(&self) {
        // What waits may read the block.
        let _gate = self.device.gate();
        let state = &mut *self.lock();
        if state.held > 0 {
            return;
        }
        let Place::Both(block, _) = &state.place else { return };
        if state.pinned > 0 {
            state.leaves = true;
            return;
        }
        let block = *block;
        let scope = self.device.pool().scope_of(&block);
        free(&self.device, self.device.pool(), block, &state.uses);
        // invariant: the place was matched above
        if let Place::Both(_, host) = std::mem::replace(&mut state.place, Place::Here(block)) {
            state.place = Place::Away(host, scope);
        }
    }

    /// Starts to bring the contents back, if they are on the host.
    pub(crate) fn fetch(&self) -> Result<()> {
        let device = &self.device;
        let scope = {
            let state = &mut *self.lock();
            match &state.place {
                Place::Here(_) => return Ok(()),
                Place::Both(block, _) => {
                    state.place = Place::Here(*block);
                    state.leaves = false;
                    return Ok(());
                }
                Place::Away(_, scope) => *scope,
            }
        };
        let queue = device.queue();
        let (pool, seen) = (device.pool(), device.pool().moves());
        let mut block = pool.alloc(Request::new(self.bytes).queue(queue).scope(scope).movable())?;
        let (_, back) = device.copies();
        let mut uses = Uses::default();
        let gate = device.gate();
        let state = &mut *self.lock();
        let Place::Away(host, _) = &mut state.place else {
            // Another thread was faster.
            device.pool().free(block);
            return Ok(());
        };
        let now = pool.moves();
        if now != seen {
            pool.locate(&mut block);
        }
        let copied = (|| {
            if device.streams() {
                // What the block's own queue did with it before.
                device.follow(&gate, back, queue)?;
                device.order(&gate, &mut uses, Access::Write, back)?;
                device.order(&gate, &mut host.uses, Access::Read, back)?;
            }
            device.lane(back)?.copy(words(&block), words(&host.block))?;
            device.mark(&gate, back)
        })();
        copied.inspect_err(|_| free(device, device.pool(), block, &uses))?;
        *state = State {
            place: Place::Here(block),
            uses,
            seen: now,
            mark: Mark::default(),
            held: 0,
            pinned: 0,
            leaves: false,
            version: state.version,
        };
        Ok(())
    }

    /// Keeps the memory on the device, where it is, until [`release`](Self::release), which undoes one of these.
    pub(crate) fn hold(&self) -> Result<Slice> {
        loop {
            {
                let gate = self.device.gate();
                let state = &mut *self.lock();
                if let Some(block) = self.locate(state, &gate) {
                    self.device.pool().pin(&block);
                    state.held += 1;
                    return Ok(slice(&block));
                }
            }
            self.fetch()?;
        }
    }

    /// See [`hold`](Self::hold).
    pub(crate) fn release(&self) {
        let state = &mut *self.lock();
        state.held = state.held.saturating_sub(1);
        if let Place::Here(block) | Place::Both(block, _) = &state.place {
            self.device.pool().unpin(block);
        }
    }

    /// Whether the contents are on the host alone.
    pub(super) fn is_away(&self) -> bool {
        matches!(self.lock().place, Place::Away(..))
    }
}

/// Gives a block back to its pool, with the queues that may still use it.
fn free(device: &Device, pool: &Pool, block: Block, uses: &Uses) {
    match device.streams() {
        true => pool.free_used(block, device.users(uses, block.queue)),
        false => pool.free(block),
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if state.mark.group() == self.device.lanes().group.load(Ordering::Acquire) {
            self.device.leaves(state.mark);
        }
        match &state.place {
            Place::Here(block) | Place::Both(block, _) => {
                free(&self.device, self.device.pool(), *block, &state.uses)
            }
            Place::Away(..) => {}
        }
    }
}

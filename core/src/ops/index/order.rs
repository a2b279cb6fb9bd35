//! Sorted order of index tensors, kept with the index, so that operations do not sort the same indices again.
//!
//! A scatter, and the gradient of a gather, over many indices sort them. A graph network does both with the same
//! edges in every layer of every step. The order therefore stays with the storage of the index. It is valid for one
//! version of the contents and one view; the next order of a written index replaces it. Memory whose writes are not
//! counted keeps none.
//!
//! A captured step uses the kept order of an index that its replays do not change, so its commands sort nothing. It
//! sorts again before a replay if the program has written the index since (`CapturedOrder`). The order of an index
//! that the replays change is computed once inside the step (`RecordedOrder`).

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::ops::prelude::*;
use crate::ops::sort;
use crate::storage::{DerivedData, Storage};
use crate::sync::LockUnpoisoned;

/// Largest number of orders that a storage keeps. A program that indexes by ever new views of one tensor does not
/// accumulate them.
const MAX_ORDERS: usize = 4;

/// Version of an order whose memory was not written completely.
const UNSORTED: u64 = u64::MAX;

/// Indices in ascending order. Both tensors are u32 [lines, length], contiguous.
pub(super) struct IndexOrder {
    /// Indices of each line; those that no extent contains are `u32::MAX`.
    pub(super) targets: Tensor,
    /// Positions of the indices in their line; equal indices keep their order.
    pub(super) positions: Tensor,
    length: usize,
    /// Version of the index's storage that was sorted.
    version: AtomicU64,
}

impl IndexOrder {
    fn empty(view: &Tensor) -> Result<Self> {
        let tensor = || empty_workspace(&[view.numel()], DType::U32, view.device());
        Ok(Self {
            targets: tensor()?,
            positions: tensor()?,
            length: view.shape().last().copied().unwrap_or(1),
            version: AtomicU64::new(UNSORTED),
        })
    }

    /// Sorts the lines of an index, whose last dimension is a line.
    fn sort(&self, op: &'static str, view: &Tensor) -> Result<()> {
        self.version.store(UNSORTED, Ordering::Relaxed);
        // Read before the sort, so that a concurrent write makes the order outdated.
        let version = view.storage().tracked_version();
        // The order serves every extent; the kernels that use it compare with theirs.
        sort::sort_index_into(op, view, (&self.targets, &self.positions))?;
        self.version.store(version.unwrap_or(UNSORTED), Ordering::Relaxed);
        Ok(())
    }

    fn is_current(&self, view: &Tensor) -> bool {
        view.storage().tracked_version() == Some(self.version.load(Ordering::Relaxed))
    }

    /// Returns the number of indices of a line.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Tells the observer that the index is read, although no kernel binds it.
    fn record_use(&self, view: &Tensor) {
        view.record_access(Access::Read);
        self.targets.record_derived();
        self.positions.record_derived();
    }
}

/// Order of one view of a storage.
struct KeptOrder {
    dtype: DType,
    layout: Layout,
    order: Arc<IndexOrder>,
}

/// Orders of one storage, the last used at the end.
#[derive(Default)]
struct KeptOrders(Mutex<Vec<KeptOrder>>);

impl DerivedData for KeptOrders {
    fn clear(&self) {
        let orders = std::mem::take(&mut *self.0.lock_unpoisoned());
        drop(orders);
    }
}

/// Note of a captured step: the order of an index that its replays read and do not change.
#[derive(Clone)]
pub(crate) struct CapturedOrder {
    op: &'static str,
    view: Tensor,
    order: Arc<IndexOrder>,
}

impl CapturedOrder {
    /// Sorts the index again before a replay, in the same memory, if the index was written since.
    pub(crate) fn refresh(&self) -> Result<()> {
        let Some(kept) = self.view.storage().derived::<KeptOrders>() else { return Ok(()) };
        let _orders = kept.0.lock_unpoisoned();
        if self.order.is_current(&self.view) {
            return Ok(());
        }
        self.order.sort(self.op, &self.view)
    }
}

/// Note of a captured step: an order that the step computes itself, valid until the step writes the index.
pub(crate) struct RecordedOrder {
    storage: Weak<Storage>,
    kept: KeptOrder,
}

/// Returns the view of an index that has each distinct line once, as [lines.., length]. Dimensions of stride 0 share
/// their indices, and extents of 1 do not matter: operations of different ranks share orders.
fn line_view(index: &Tensor, shape: &[usize], strides: &[usize], dim: usize) -> Tensor {
    let outer = (0..shape.len()).filter(|&k| k != dim && strides[k] != 0);
    let (outer_shape, outer_strides): (Dims, Dims) = outer.map(|k| (shape[k], strides[k])).unzip();
    let (mut shape_of_lines, mut merged) = collapse_dims(&outer_shape, &[&outer_strides]);
    let mut line_strides = merged.swap_remove(0);
    shape_of_lines.push(shape.get(dim).copied().unwrap_or(1));
    line_strides.push(strides.get(dim).copied().unwrap_or(0));
    index.detach().with_layout(Layout::new(shape_of_lines, line_strides, index.layout().offset()))
}

/// Returns the ascending order of an index of this shape and strides along `dim`: the kept one, or a new one.
#[track_caller]
pub(super) fn find_or_sort(
    op: &'static str,
    index: &Tensor,
    (shape, strides): (&[usize], &[usize]),
    dim: usize,
) -> Result<Arc<IndexOrder>> {
    let view = line_view(index, shape, strides, dim);
    let recorder = view.device().capture_recorder();
    if !recorder.is_recording_here() {
        return find_or_keep(op, &view);
    }
    if recorder.is_changed_by_replays(view.storage()) || view.storage().tracked_version().is_none() {
        return find_or_record(op, &view);
    }
    recorder.record_indirect_read(view.storage());
    let order = recorder.run_unrecorded(|| find_or_keep(op, &view))?;
    let note = || CapturedOrder { op, view: view.clone(), order: Arc::clone(&order) };
    recorder.add_note(note, |known: &CapturedOrder| Arc::ptr_eq(&known.order, &order));
    Ok(order)
}

/// Returns the order that is kept with the storage, or sorts and keeps it.
fn find_or_keep(op: &'static str, view: &Tensor) -> Result<Arc<IndexOrder>> {
    let Some(kept) = view.storage().derived::<KeptOrders>() else {
        let order = Arc::new(IndexOrder::empty(view)?);
        order.sort(op, view)?;
        return Ok(order);
    };
    // Held while the order is sorted: another thread waits instead of sorting into the same memory.
    let mut orders = kept.0.lock_unpoisoned();
    let is_same = |kept: &KeptOrder| kept.dtype == view.dtype() && kept.layout == *view.layout();
    let found = orders.iter().position(is_same).map(|at| orders.remove(at).order);
    let order = match found {
        Some(order) if order.is_current(view) => {
            order.record_use(view);
            order
        }
        found => {
            // Outdated orders of other views are not needed, but a captured step may hold their memory.
            orders.retain(|kept| kept.order.is_current(view));
            if orders.len() >= MAX_ORDERS {
                orders.remove(0);
            }
            let order = found.map_or_else(|| IndexOrder::empty(view).map(Arc::new), Ok)?;
            order.sort(op, view)?;
            if view.storage().tracked_version().is_none() {
                return Ok(order);
            }
            order
        }
    };
    orders.push(KeptOrder { dtype: view.dtype(), layout: view.layout().clone(), order: Arc::clone(&order) });
    Ok(order)
}

/// Returns the order that the recorded step has computed, or lets the step compute it.
fn find_or_record(op: &'static str, view: &Tensor) -> Result<Arc<IndexOrder>> {
    let recorder = view.device().capture_recorder();
    let storage = view.downgrade_storage();
    let found = recorder.find_note(|RecordedOrder { storage: of, kept }: &RecordedOrder| {
        let is_same = of.ptr_eq(&storage) && kept.dtype == view.dtype() && kept.layout == *view.layout();
        (is_same && kept.order.is_current(view)).then(|| Arc::clone(&kept.order))
    });
    if let Some(order) = found {
        order.record_use(view);
        return Ok(order);
    }
    // Orders of indices that the step has freed or written.
    // Handles are dropped after the recorder's lock, because the last handle of a storage flushes launches.
    let handles = RefCell::new(SmallVec::<[_; 4]>::new());
    let is_outdated = |RecordedOrder { storage, kept }: &RecordedOrder| {
        let storage = storage.upgrade();
        let version = storage.as_ref().and_then(|storage| storage.tracked_version());
        handles.borrow_mut().extend(storage);
        version != Some(kept.order.version.load(Ordering::Relaxed))
    };
    drop(recorder.take_notes(is_outdated));
    drop(handles);
    let order = Arc::new(IndexOrder::empty(view)?);
    order.sort(op, view)?;
    let kept = KeptOrder { dtype: view.dtype(), layout: view.layout().clone(), order: Arc::clone(&order) };
    recorder.add_note(|| RecordedOrder { storage, kept }, |_| false);
    Ok(order)
}

/// Frees the orders of an index that no other operation will use.
pub(super) fn forget(index: &Tensor) {
    let recorder = index.device().capture_recorder();
    if recorder.is_recording_here() {
        let storage = index.downgrade_storage();
        drop(recorder.take_notes(|recorded: &RecordedOrder| recorded.storage.ptr_eq(&storage)));
    }
    if let Some(kept) = index.storage().derived::<KeptOrders>() {
        kept.clear();
    }
}

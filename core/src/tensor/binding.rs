//! Binding: the addresses of tensors for an operation, under the dispatch lock.

use std::ops::Deref;

use smallvec::SmallVec;

use super::Tensor;
use crate::backend::Slice;
use crate::error::{Result, fail};
use crate::memory::scope;
use crate::runtime::device::CompiledKernel;
use crate::runtime::dispatch::DispatchGuard;
use crate::runtime::stream::Access;

/// Memory of an operation's tensors while it is enqueued. Holds the dispatch lock, which keeps the order
/// between queues and stops compaction.
#[must_use = "the addresses are good while this lives"]
pub(crate) struct BoundTensors<'a> {
    slices: SmallVec<[Slice; 8]>,
    guard: DispatchGuard<'a>,
}

impl BoundTensors<'_> {
    pub(crate) fn dispatch_guard(&self) -> &DispatchGuard<'_> {
        &self.guard
    }
}

impl Deref for BoundTensors<'_> {
    type Target = [Slice];

    fn deref(&self) -> &[Slice] {
        &self.slices
    }
}

pub(crate) fn bind_for_kernel<'a>(
    kernel: CompiledKernel,
    tensors: &[&'a Tensor],
) -> Result<BoundTensors<'a>> {
    let access = |at: usize| match kernel.write_mask.checked_shr(at as u32).unwrap_or(1) & 1 {
        0 => Access::Read,
        _ => Access::Write,
    };
    bind_tensors(tensors.iter().enumerate().map(|(at, t)| (*t, access(at))))
}

/// Binds the memory of tensors of one device, in order. This thread enqueues one operation on all of the
/// memory while it holds the result. Offloaded tensors are brought back to the device first.
#[track_caller]
pub(crate) fn bind_tensors<'a, T>(tensors: T) -> Result<BoundTensors<'a>>
where
    T: IntoIterator<Item = (&'a Tensor, Access)> + Clone,
{
    let Some((first, _)) = tensors.clone().into_iter().next() else {
        fail!(argument("launch"), "an operation on no tensors");
    };
    // Check the devices before binding, because an address means something else on another device.
    for (t, _) in tensors.clone() {
        if t.device() != first.device() {
            let op = scope::current().op;
            first.check_same_device(if op.is_empty() { "launch" } else { op }, t)?;
        }
    }
    first.device().check_can_enqueue("launch")?;
    loop {
        let mut guard = first.device().lock_dispatch();
        guard.take_failure()?;
        let mut slices = SmallVec::new();
        'bind: {
            for (t, access) in tensors.clone() {
                let Some(slice) = t.bind(access, &guard)? else { break 'bind };
                slices.push(slice);
            }
            return Ok(BoundTensors { slices, guard });
        }
        drop(guard);
        tensors.clone().into_iter().try_for_each(|(t, _)| t.prefetch_())?;
    }
}

/// Binds the bytes of contiguous tensors of one device, for copies. See [`bind_tensors`].
pub(crate) fn bind_contiguous_bytes<'a, const N: usize>(
    tensors: [(&'a Tensor, Access); N],
) -> Result<BoundTensors<'a>> {
    let mut bound = bind_tensors(tensors)?;
    for (slice, (t, _)) in bound.slices.iter_mut().zip(tensors) {
        *slice = t.byte_range_in(*slice);
    }
    Ok(bound)
}

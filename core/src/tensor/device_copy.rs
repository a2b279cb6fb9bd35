//! Copies between devices: over a link where the backends have one, otherwise through host memory.

use std::cell::Cell;

use super::Tensor;
use crate::backend::{PeerCopy, Slice};
use crate::error::Result;
use crate::memory::scope;
use crate::runtime::device::Device;
use crate::runtime::profile::WorkItem;
use crate::runtime::stream::Access;

/// Reason why a captured step contains no copy between devices.
const NOT_IN_A_STEP: &str = "a captured step runs on one device; copy before the step or after it";

impl Tensor {
    /// Copies the elements, without history, to another device.
    ///
    /// No dispatch lock is held while the copy is enqueued, because two threads may copy in opposite directions. Both
    /// tensors are pinned instead. Over a link the host does not wait. Through host memory this thread waits for the
    /// source, while other threads use both devices.
    #[track_caller]
    pub(crate) fn copy_to_other_device(&self, device: &Device) -> Result<Tensor> {
        for end in [self.device(), device] {
            end.check_not_recording("to_device", NOT_IN_A_STEP)?;
        }
        let out = Self::empty(self.shape(), self.dtype(), device)?;
        if out.numel() == 0 {
            return Ok(out);
        }
        let source = self.prepare_read()?;
        if source.enqueue_peer_copy(&out)? == PeerCopy::Declined {
            out.upload_bytes(&source.to_bytes()?)?;
        }
        Ok(out)
    }

    /// Enqueues a copy of a contiguous tensor to a new tensor of another device, if their backends can copy.
    fn enqueue_peer_copy(&self, out: &Tensor) -> Result<PeerCopy> {
        let (from, to) = (self.device(), out.device());
        let bytes = ((self.numel() * self.dtype().size()) as u64).next_multiple_of(4);
        let path = Cell::new(PeerCopy::Declined);
        let describe = || {
            let name =
                if path.get() == PeerCopy::Staged { "peer copy through the host" } else { "peer copy" };
            WorkItem::without_flops(name, bytes)
        };
        self.with_pinned_bytes(Access::Read, |src| {
            let source = from.queue_backend(from.current_queue())?;
            out.with_pinned_bytes(Access::Write, |dst| {
                to.enqueue_timed(to.current_queue(), scope::current(), describe, |queue| {
                    let (dst, src) = (Slice { bytes, ..dst }, Slice { bytes, ..src });
                    path.set(queue.copy_from_peer(dst, &**source, src)?);
                    Ok(path.get() != PeerCopy::Declined)
                })
            })
        })?;
        Ok(path.get())
    }
}

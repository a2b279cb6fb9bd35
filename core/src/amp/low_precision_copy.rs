//! 16-bit copies of parameters, which an optimiser writes in the same kernel that updates the parameters. The
//! next forward pass under [`autocast`](super::autocast()) uses the copy instead of a cast.
//!
//! A copy is valid until the parameter is written again, which storage versions detect. A parameter in memory that the
//! program can write without a version is cast each time. If a graph still
//! holds the previous copy, the next copy uses other memory. A captured step holds the copies that it was
//! recorded with (`CapturedCast`) and writes them in place at every replay. A graph that uses such a copy
//! must run its backward pass before the next replay. A copy that nothing reads is freed after a few steps.

use std::sync::Weak;

use crate::autograd;
use crate::autograd::low_precision_copy::{CopyVersion, LowPrecisionCopy};
use crate::dtype::DType;
use crate::error::{Result, fail};
use crate::memory::{self, Tag};
use crate::storage::Storage;
use crate::tensor::Tensor;

/// Writes after which a copy that was not read is freed. A program that steps twice for each forward pass keeps it.
const MAX_UNREAD_WRITES: u8 = 2;

/// Returns the copy of a leaf if it is current. Otherwise requests one from the optimiser.
pub(super) fn find_or_request(leaf: &Tensor, to: DType) -> Option<Tensor> {
    let mut copy = autograd::lock_low_precision_copy(leaf)?;
    match &mut *copy {
        LowPrecisionCopy::Ready { copy: values, source, unread_writes } if values.dtype() == to => {
            let good = source.is_current(leaf, values);
            *unread_writes = 0;
            if good {
                let note = || CapturedCastRead { leaf: leaf.clone(), copy: values.downgrade_storage() };
                leaf.device()
                    .capture_recorder()
                    .add_note(note, |known: &CapturedCastRead| known.leaf.is_same_view(leaf));
            }
            good.then(|| values.clone()).inspect(Tensor::record_derived)
        }
        // A recorded step relies on the state that it has read.
        LowPrecisionCopy::Ready { .. } if leaf.device().capture_recorder().is_recording_here() => None,
        _ => {
            *copy = LowPrecisionCopy::Requested(to);
            None
        }
    }
}

/// Reports whether a parameter was cast, so that a step should write its copy.
#[must_use]
pub fn is_wanted(parameter: &Tensor) -> bool {
    parameter.dtype() == DType::F32
        && parameter.storage().tracked_version().is_some()
        && autograd::lock_low_precision_copy(parameter)
            .is_some_and(|copy| !matches!(*copy, LowPrecisionCopy::None))
}

/// Allocates memory for the next copy of an f32 parameter that was cast, or reuses the last copy. Frees a copy that
/// nothing reads.
pub fn alloc_next_copy(parameter: &Tensor) -> Result<Option<Tensor>> {
    let _tag = memory::scope::enter_tag(Tag::Parameter);
    let copy = autograd::lock_low_precision_copy(parameter).filter(|_| parameter.dtype() == DType::F32);
    let Some(mut copy) = copy else { return Ok(None) };
    let is_recording = parameter.device().capture_recorder().is_recording_here();
    let dtype = match &*copy {
        LowPrecisionCopy::None => return Ok(None),
        LowPrecisionCopy::Ready { unread_writes: MAX_UNREAD_WRITES.., .. } if !is_recording => {
            let unread = std::mem::take(&mut *copy);
            // Unlocked first, because the last handle of a storage flushes launches.
            drop(copy);
            drop(unread);
            return Ok(None);
        }
        LowPrecisionCopy::Ready { copy: values, .. } if values.is_unique() => {
            return Ok(Some(values.clone()));
        }
        // Replays would still write the previous memory.
        _ if is_recording => return Ok(None),
        LowPrecisionCopy::Ready { copy: values, .. } => values.dtype(),
        LowPrecisionCopy::Requested(dtype) => *dtype,
    };
    Tensor::empty(parameter.shape(), dtype, parameter.device()).map(Some)
}

/// Stores a copy that was written together with the parameter.
pub fn store_copy(parameter: &Tensor, values: Tensor) {
    if let Some(mut copy) = autograd::lock_low_precision_copy(parameter) {
        let source = CopyVersion::read(parameter, &values);
        let unread_writes = match &*copy {
            LowPrecisionCopy::Ready { unread_writes, .. } => unread_writes.saturating_add(1),
            _ => 1,
        };
        *copy = LowPrecisionCopy::Ready { copy: values, source, unread_writes };
    }
}

/// Note of a captured step: a leaf whose 16-bit copy was read, and the storage of the copy.
pub(crate) struct CapturedCastRead {
    pub(crate) leaf: Tensor,
    pub(crate) copy: Weak<Storage>,
}

/// Copy that a captured step reads.
#[derive(Debug)]
pub(crate) struct CapturedCast {
    leaf: Tensor,
    copy: Tensor,
    /// Versions of the leaf and of the copy.
    versions: CopyVersion,
    /// If true, the step writes the copy together with the leaf.
    is_written_by_step: bool,
}

impl CapturedCast {
    /// Finds the copy of a leaf that a recording has read, by its storage, after the step has ended.
    #[track_caller]
    pub(crate) fn new(leaf: Tensor, memory: &Weak<Storage>) -> Result<Self> {
        let found = autograd::lock_low_precision_copy(&leaf).and_then(|copy| match &*copy {
            LowPrecisionCopy::Ready { copy: values, source, .. }
                if values.downgrade_storage().ptr_eq(memory) =>
            {
                Some((values.clone(), source.clone()))
            }
            _ => None,
        });
        let Some((values, source)) = found else {
            fail!(
                capture("capture"),
                "a parameter's 16-bit copy was created again while the step was recorded; capture the step while no \
                 other thread trains the parameter"
            );
        };
        let kept = source.is_current(&leaf, &values);
        Ok(Self { leaf, copy: values, versions: source, is_written_by_step: kept })
    }

    /// Casts the leaf again before a replay if it was changed outside of the step.
    pub(crate) fn refresh(&mut self) -> Result<()> {
        if !self.versions.is_current(&self.leaf, &self.copy) {
            // Read before the cast, so that a concurrent write counts as another change.
            let leaf = self.leaf.version();
            self.copy.copy_(&self.leaf.detach())?;
            self.versions = CopyVersion { leaf_version: leaf, ..CopyVersion::read(&self.leaf, &self.copy) };
        }
        Ok(())
    }

    /// Records the versions that a replay produces. Called under the dispatch lock, so nothing else writes.
    pub(crate) fn record_versions(&mut self) {
        if self.is_written_by_step {
            self.versions = CopyVersion::read(&self.leaf, &self.copy);
        }
    }

    /// Makes the copy available to eager steps after a replay.
    pub(crate) fn publish(&self) {
        if let Some(mut copy) =
            autograd::lock_low_precision_copy(&self.leaf).filter(|_| self.is_written_by_step)
        {
            let (copied, source) = (self.copy.clone(), self.versions.clone());
            *copy = LowPrecisionCopy::Ready { copy: copied, source, unread_writes: 0 };
        }
    }
}

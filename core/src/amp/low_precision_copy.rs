//! 16-bit copies of parameters that an optimiser keeps: written in the pass that steps them, taken by the next forward pass
//! under [`autocast`](super::autocast()) instead of a cast.
//!
//! A copy is good while nobody has written the parameter since: every tensor's memory counts how often it was. Where a graph
//! still holds the copy of before, the next one is other memory. A captured step holds those that it was recorded with
//! ([`Taken`]), and writes them in place at every replay: a graph that took one is walked before.

use std::sync::Weak;

use crate::autograd;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::storage::Storage;
use crate::tensor::Tensor;

/// What a parameter, a leaf, has of a copy.
#[derive(Debug, Default)]
pub(crate) enum LowPrecisionCopy {
    /// Nobody has cast it.
    #[default]
    None,
    /// It was cast: an optimiser may make the next one.
    Requested(DType),
    /// The copy, of the leaf as `of` says.
    Ready { copy: Tensor, source: CopyVersion },
}

/// The leaf that a copy was made of, and the copy, by their memory and how often each was written.
#[derive(Clone, Debug)]
pub(crate) struct CopyVersion {
    leaf_storage: Weak<Storage>,
    leaf_version: u64,
    copy_version: u64,
}

impl CopyVersion {
    fn read(leaf: &Tensor, numbers: &Tensor) -> Self {
        Self {
            leaf_storage: leaf.downgrade_storage(),
            leaf_version: leaf.version(),
            copy_version: numbers.version(),
        }
    }

    /// Reports that neither was written since.
    fn is_current(&self, leaf: &Tensor, numbers: &Tensor) -> bool {
        self.leaf_version == leaf.version()
            && self.copy_version == numbers.version()
            && self.leaf_storage.ptr_eq(&leaf.downgrade_storage())
    }
}

/// The copy that an optimiser has made of a leaf as it is. If there is none, it is asked for one.
pub(super) fn find_or_request(leaf: &Tensor, to: DType) -> Option<Tensor> {
    let mut copy = autograd::lock_low_precision_copy(leaf)?;
    match &*copy {
        LowPrecisionCopy::Ready { copy: numbers, source: of } if numbers.dtype() == to => {
            let good = of.is_current(leaf, numbers);
            if good {
                leaf.device().capture_recorder().record_cast_read(leaf, numbers);
            }
            good.then(|| numbers.clone())
        }
        // What a step that is recorded has read stays what it is.
        LowPrecisionCopy::Ready { .. } if leaf.device().capture_recorder().is_recording_here() => None,
        _ => {
            *copy = LowPrecisionCopy::Requested(to);
            None
        }
    }
}

/// Memory for the next copy of a parameter, if it is one of f32 that was cast.
pub fn alloc_next_copy(parameter: &Tensor) -> Result<Option<Tensor>> {
    let _tag = memory::scope::enter_tag(Tag::Parameter);
    let copy = autograd::lock_low_precision_copy(parameter).filter(|_| parameter.dtype() == DType::F32);
    let Some(copy) = copy else { return Ok(None) };
    let dtype = match &*copy {
        LowPrecisionCopy::None => return Ok(None),
        LowPrecisionCopy::Ready { copy: numbers, .. } if numbers.is_unique() => {
            return Ok(Some(numbers.clone()));
        }
        // Replays would go on with the memory of before.
        _ if parameter.device().capture_recorder().is_recording_here() => return Ok(None),
        LowPrecisionCopy::Ready { copy: numbers, .. } => numbers.dtype(),
        LowPrecisionCopy::Requested(dtype) => *dtype,
    };
    Tensor::empty(parameter.shape(), dtype, parameter.device()).map(Some)
}

/// The copy has been written, with the parameter.
pub fn store_copy(parameter: &Tensor, numbers: Tensor) {
    if let Some(mut copy) = autograd::lock_low_precision_copy(parameter) {
        let of = CopyVersion::read(parameter, &numbers);
        *copy = LowPrecisionCopy::Ready { copy: numbers, source: of };
    }
}

/// A copy that a captured step reads.
#[derive(Debug)]
pub(crate) struct CapturedCast {
    leaf: Tensor,
    copy: Tensor,
    /// The leaf as it is a copy of it.
    versions: CopyVersion,
    /// Whether the step leaves a copy of what it leaves of the leaf.
    is_written_by_step: bool,
}

impl CapturedCast {
    /// The copy of a leaf that was read while a step was recorded, in that memory, when the step is over.
    pub(crate) fn new(leaf: Tensor, memory: &Weak<Storage>) -> Result<Self> {
        let found = autograd::lock_low_precision_copy(&leaf).and_then(|copy| match &*copy {
            LowPrecisionCopy::Ready { copy: numbers, source: of }
                if numbers.downgrade_storage().ptr_eq(memory) =>
            {
                Some((numbers.clone(), of.clone()))
            }
            _ => None,
        });
        let Some((numbers, of)) = found else {
            let reason = "a parameter's 16-bit copy was made anew while the step was recorded; capture it while nobody else trains the parameter";
            return Err(Error::Capture { op: "capture", reason: reason.to_owned() });
        };
        let kept = of.is_current(&leaf, &numbers);
        Ok(Self { leaf, copy: numbers, versions: of, is_written_by_step: kept })
    }

    /// Before a replay: casts, if others have changed the leaf.
    pub(crate) fn refresh(&mut self) -> Result<()> {
        if !self.versions.is_current(&self.leaf, &self.copy) {
            // As of before the cast: a write meanwhile is another change.
            let leaf = self.leaf.version();
            self.copy.copy_(&self.leaf.detach())?;
            self.versions = CopyVersion { leaf_version: leaf, ..CopyVersion::read(&self.leaf, &self.copy) };
        }
        Ok(())
    }

    /// With a replay, while nobody else writes: what the copy is of.
    pub(crate) fn record_versions(&mut self) {
        if self.is_written_by_step {
            self.versions = CopyVersion::read(&self.leaf, &self.copy);
        }
    }

    /// Behind a replay: eager steps take the copy too.
    pub(crate) fn publish(&self) {
        if let Some(mut copy) =
            autograd::lock_low_precision_copy(&self.leaf).filter(|_| self.is_written_by_step)
        {
            *copy = LowPrecisionCopy::Ready { copy: self.copy.clone(), source: self.versions.clone() };
        }
    }
}

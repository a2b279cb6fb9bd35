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
use crate::tensor::Tensor;
use crate::tensor::storage::Storage;

/// What a parameter, a leaf, has of a copy.
#[derive(Debug, Default)]
pub(crate) enum Copy {
    /// Nobody has cast it.
    #[default]
    None,
    /// It was cast: an optimiser may make the next one.
    Asked(DType),
    /// The copy, of the leaf as `of` says.
    Kept { numbers: Tensor, of: CopyVersion },
}

/// The leaf that a copy was made of, and the copy, by their memory and how often each was written.
#[derive(Clone, Debug)]
pub(crate) struct CopyVersion {
    memory: Weak<Storage>,
    leaf: u64,
    numbers: u64,
}

impl CopyVersion {
    fn of(leaf: &Tensor, numbers: &Tensor) -> Self {
        Self { memory: leaf.downgrade_storage(), leaf: leaf.version(), numbers: numbers.version() }
    }

    /// Reports that neither was written since.
    fn is_now(&self, leaf: &Tensor, numbers: &Tensor) -> bool {
        self.leaf == leaf.version()
            && self.numbers == numbers.version()
            && self.memory.ptr_eq(&leaf.downgrade_storage())
    }
}

/// The copy that an optimiser has made of a leaf as it is. If there is none, it is asked for one.
pub(super) fn of(leaf: &Tensor, to: DType) -> Option<Tensor> {
    let mut copy = autograd::copy_of(leaf)?;
    match &*copy {
        Copy::Kept { numbers, of } if numbers.dtype() == to => {
            let good = of.is_now(leaf, numbers);
            if good {
                leaf.device().capture_recorder().copied(leaf, numbers);
            }
            good.then(|| numbers.clone())
        }
        // What a step that is recorded has read stays what it is.
        Copy::Kept { .. } if leaf.device().capture_recorder().takes() => None,
        _ => {
            *copy = Copy::Asked(to);
            None
        }
    }
}

/// Memory for the next copy of a parameter, if it is one of f32 that was cast.
pub(crate) fn room(parameter: &Tensor) -> Result<Option<Tensor>> {
    let _tag = memory::scope::tag(Tag::Parameter);
    let copy = autograd::copy_of(parameter).filter(|_| parameter.dtype() == DType::F32);
    let Some(copy) = copy else { return Ok(None) };
    let dtype = match &*copy {
        Copy::None => return Ok(None),
        Copy::Kept { numbers, .. } if numbers.is_unique() => return Ok(Some(numbers.clone())),
        // Replays would go on with the memory of before.
        _ if parameter.device().capture_recorder().takes() => return Ok(None),
        Copy::Kept { numbers, .. } => numbers.dtype(),
        Copy::Asked(dtype) => *dtype,
    };
    Tensor::empty(parameter.shape(), dtype, parameter.device()).map(Some)
}

/// The copy has been written, with the parameter.
pub(crate) fn keep(parameter: &Tensor, numbers: Tensor) {
    if let Some(mut copy) = autograd::copy_of(parameter) {
        let of = CopyVersion::of(parameter, &numbers);
        *copy = Copy::Kept { numbers, of };
    }
}

/// A copy that a captured step reads.
#[derive(Debug)]
pub(crate) struct CapturedCast {
    leaf: Tensor,
    numbers: Tensor,
    /// The leaf as it is a copy of it.
    of: CopyVersion,
    /// Whether the step leaves a copy of what it leaves of the leaf.
    kept: bool,
}

impl CapturedCast {
    /// The copy of a leaf that was read while a step was recorded, in that memory, when the step is over.
    pub(crate) fn new(leaf: Tensor, memory: &Weak<Storage>) -> Result<Self> {
        let found = autograd::copy_of(&leaf).and_then(|copy| match &*copy {
            Copy::Kept { numbers, of } if numbers.downgrade_storage().ptr_eq(memory) => {
                Some((numbers.clone(), of.clone()))
            }
            _ => None,
        });
        let Some((numbers, of)) = found else {
            let reason = "a parameter's 16-bit copy was made anew while the step was recorded; capture it while nobody else trains the parameter";
            return Err(Error::Capture { op: "capture", reason: reason.to_owned() });
        };
        let kept = of.is_now(&leaf, &numbers);
        Ok(Self { leaf, numbers, of, kept })
    }

    /// Before a replay: casts, if others have changed the leaf.
    pub(crate) fn refresh(&mut self) -> Result<()> {
        if !self.of.is_now(&self.leaf, &self.numbers) {
            // As of before the cast: a write meanwhile is another change.
            let leaf = self.leaf.version();
            self.numbers.copy_(&self.leaf.detach())?;
            self.of = CopyVersion { leaf, ..CopyVersion::of(&self.leaf, &self.numbers) };
        }
        Ok(())
    }

    /// With a replay, while nobody else writes: what the copy is of.
    pub(crate) fn note(&mut self) {
        if self.kept {
            self.of = CopyVersion::of(&self.leaf, &self.numbers);
        }
    }

    /// Behind a replay: eager steps take the copy too.
    pub(crate) fn lend(&self) {
        if let Some(mut copy) = autograd::copy_of(&self.leaf).filter(|_| self.kept) {
            *copy = Copy::Kept { numbers: self.numbers.clone(), of: self.of.clone() };
        }
    }
}

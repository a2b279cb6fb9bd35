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
    /// As it was when so much had been written.
    Kept { numbers: Tensor, version: u64 },
}

/// The copy that an optimiser has made of a leaf as it is. If there is none, it is asked for one.
pub(super) fn of(leaf: &Tensor, to: DType) -> Option<Tensor> {
    let mut copy = autograd::copy_of(leaf)?;
    match &*copy {
        Copy::Kept { numbers, version } if numbers.dtype() == to => {
            let good = *version == leaf.version();
            if good {
                leaf.device().tape().copied(leaf, numbers);
            }
            good.then(|| numbers.clone())
        }
        // What a step that is recorded has read stays what it is.
        Copy::Kept { .. } if leaf.device().tape().takes() => None,
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
        _ if parameter.device().tape().takes() => return Ok(None),
        Copy::Kept { numbers, .. } => numbers.dtype(),
        Copy::Asked(dtype) => *dtype,
    };
    Tensor::empty(parameter.shape(), dtype, parameter.device()).map(Some)
}

/// The copy has been written, with the parameter.
pub(crate) fn keep(parameter: &Tensor, numbers: Tensor) {
    if let Some(mut copy) = autograd::copy_of(parameter) {
        *copy = Copy::Kept { numbers, version: parameter.version() };
    }
}

/// A copy that a captured step reads.
#[derive(Debug)]
pub(crate) struct Taken {
    leaf: Tensor,
    numbers: Tensor,
    /// The leaf that it is a copy of, as it was when so much had been written.
    version: u64,
    /// Whether the step leaves a copy of what it leaves of the leaf.
    kept: bool,
}

impl Taken {
    /// The copy of a leaf that was read while a step was recorded, in that memory, when the step is over.
    pub(crate) fn new(leaf: Tensor, memory: &Weak<Storage>) -> Result<Self> {
        let found = autograd::copy_of(&leaf).and_then(|copy| match &*copy {
            Copy::Kept { numbers, version } if numbers.memory().ptr_eq(memory) => {
                Some((numbers.clone(), *version))
            }
            _ => None,
        });
        let Some((numbers, version)) = found else {
            let reason = "a parameter's 16-bit copy was made anew while the step was recorded; capture it while nobody else trains the parameter";
            return Err(Error::Capture { op: "capture", reason: reason.to_owned() });
        };
        let kept = version == leaf.version();
        Ok(Self { leaf, numbers, version, kept })
    }

    /// Before a replay: casts, if others have changed the leaf.
    pub(crate) fn refresh(&mut self) -> Result<()> {
        let version = self.leaf.version();
        if self.version != version {
            self.numbers.copy_(&self.leaf.detach())?;
            self.version = version;
        }
        Ok(())
    }

    /// With a replay, while nobody else writes: what the copy is of.
    pub(crate) fn note(&mut self) {
        if self.kept {
            self.version = self.leaf.version();
        }
    }

    /// Behind a replay: eager steps take the copy too.
    pub(crate) fn lend(&self) {
        if let Some(mut copy) = autograd::copy_of(&self.leaf).filter(|_| self.kept) {
            *copy = Copy::Kept { numbers: self.numbers.clone(), version: self.version };
        }
    }
}

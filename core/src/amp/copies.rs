//! 16-bit copies of parameters that an optimiser keeps: written in the pass that steps them, taken by the next forward pass
//! under [`autocast`](super::autocast()) instead of a cast.
//!
//! A copy is good while nobody has written the parameter since: every tensor's memory counts how often it was. Where a graph
//! still holds the copy of before, the next one is other memory.

use crate::autograd;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{self, Tag};
use crate::tensor::Tensor;

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
    // A replay would not know that somebody has changed the parameter: captured steps cast.
    if leaf.device().tape().takes() {
        return None;
    }
    let mut copy = autograd::copy_of(leaf)?;
    match &*copy {
        Copy::Kept { numbers, version } if numbers.dtype() == to => {
            (*version == leaf.version()).then(|| numbers.clone())
        }
        _ => {
            *copy = Copy::Asked(to);
            None
        }
    }
}

/// Memory for the next copy of a parameter, if it is one of f32 that was cast.
pub(crate) fn room(parameter: &Tensor) -> Result<Option<Tensor>> {
    let _tag = memory::scope::tag(Tag::Parameter);
    let captured = parameter.device().tape().takes();
    let copy = autograd::copy_of(parameter).filter(|_| parameter.dtype() == DType::F32 && !captured);
    let Some(copy) = copy else { return Ok(None) };
    let dtype = match &*copy {
        Copy::None => return Ok(None),
        Copy::Kept { numbers, .. } if numbers.is_unique() => return Ok(Some(numbers.clone())),
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

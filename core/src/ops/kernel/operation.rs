//! Prologue of operations, and small helpers that they share.

use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{self, Tag};
use crate::runtime::device::Device;
use crate::tensor::{Dims, Tensor};

/// Begins an operation: `operation!("mm", autocast [self, other], |a, b| a.mm(&b))`. Under autocast the operands
/// are cast, and the expression runs instead. With `in_f32`, operands of 16 bits are cast to f32 as well. Then
/// the scope of the operation is entered until the end of the block. `OP = "mm"` also declares the name.
macro_rules! operation {
    ($op:ident = $name:literal $($rest:tt)*) => {
        const $op: &str = $name;
        $crate::ops::kernel::operation::operation!($op $($rest)*);
    };
    ($op:expr $(, autocast $operands:tt, |$($autocast:ident),+| $again:expr)?) => {
        $($crate::amp::dispatch_autocast!($op, $operands, |$($autocast),+| $again);)?
        let _op = $crate::memory::scope::enter_op($op);
    };
    ($op:expr, in_f32 $operands:tt, |$($cast:ident),+| $again:expr) => {
        $crate::amp::dispatch_in_f32!($op, $operands, |$($cast),+| $again);
        let _op = $crate::memory::scope::enter_op($op);
    };
}
pub(crate) use operation;

/// Allocates a tensor that is accounted as workspace.
#[track_caller]
pub(crate) fn empty_workspace(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    Tensor::empty(shape, dtype, device)
}

/// Returns a shape with another extent of dimension `d`. A shape without this dimension stays as it is.
pub(crate) fn with_extent(shape: &[usize], d: usize, extent: usize) -> Dims {
    let mut shape: Dims = shape.into();
    if let Some(n) = shape.get_mut(d) {
        *n = extent;
    }
    shape
}

/// Returns the extent of a dimension, or 1 for a tensor without dimensions.
pub(crate) fn extent_or_one(t: &Tensor, d: usize) -> usize {
    t.shape().get(d).copied().unwrap_or(1)
}

//! Prologue of operations, and small helpers that they share.

use smallvec::SmallVec;

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

/// Runs the operation `op`, which calls other operations. Errors of these name `op`, which the user called.
#[track_caller]
pub(crate) fn run_composite<T>(op: &'static str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    operation!(op);
    run().map_err(|error| error.with_op(op))
}

/// Tensors that a kernel binds, in order.
pub(crate) type TensorList<'a> = SmallVec<[&'a Tensor; 9]>;

/// Tensors of some bindings: one, an optional one, or several.
pub(crate) trait Bindings<'a> {
    fn push_to(self, list: &mut TensorList<'a>);
}

macro_rules! impl_bindings {
    ($($value:ident: $type:ty, $items:expr;)*) => {$(
        impl<'a> Bindings<'a> for $type {
            #[inline]
            fn push_to($value, list: &mut TensorList<'a>) {
                $items.into_iter().for_each(|t| list.push(t));
            }
        }
    )*};
}

impl_bindings! {
    self: &'a Tensor, [self];
    self: Option<&'a Tensor>, self;
    self: &'a Option<Tensor>, self;
    self: &[&'a Tensor], self.iter().copied();
    self: &'a [Tensor], self;
}

/// Lists tensors, optional tensors and slices of tensors: `bindings![x, residual, &self.weight, &out]`.
macro_rules! bindings {
    ($($t:expr),* $(,)?) => {{
        let mut list = $crate::ops::kernel::operation::TensorList::new();
        $($crate::ops::kernel::operation::Bindings::push_to($t, &mut list);)*
        list
    }};
}
pub(crate) use bindings;

#[track_caller]
pub(crate) fn empty_workspace(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    Tensor::empty(shape, dtype, device)
}

/// Returns a shape with another extent of dimension `d`. A shape without this dimension stays as it is.
pub(crate) fn with_extent(shape: &[usize], d: usize, extent: usize) -> Dims {
    let mut shape = Dims::from_slice(shape);
    if let Some(n) = shape.get_mut(d) {
        *n = extent;
    }
    shape
}

/// Returns the extent of a dimension, or 1 for a tensor without dimensions.
pub(crate) fn extent_or_one(t: &Tensor, d: usize) -> usize {
    t.shape().get(d).copied().unwrap_or(1)
}

//! In-place forms of operations that have no kernel in place: the result replaces the elements. Scatters write into
//! the tensor itself where no gradient is recorded.

use crate::ops::ScatterOp;
use crate::ops::elementwise::activation::RreluOptions;
use crate::ops::elementwise::pointwise::check_fits_in_place;
use crate::ops::elementwise::unary::NanToNumOptions;
use crate::ops::index::ScatterTarget;
use crate::ops::index::scatter::ScatterReduce;
use crate::ops::matmul::AddmmOptions;
use crate::ops::prelude::*;

/// Replaces the elements of `target` by those of `result`, a function of the old value. `inputs` are the other tensors
/// that may require a gradient.
#[track_caller]
fn replace(
    op: &'static str,
    target: &Tensor,
    inputs: &[&Tensor],
    result: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    operation!(op);
    // As in PyTorch, the elements keep their type, and so do the steps between.
    let _no_autocast = amp::no_autocast();
    // A gradient may read the old value, which is overwritten.
    let before = match autograd::check_inplace(op, target, inputs)? {
        true => target.copy()?,
        false => target.clone(),
    };
    let result = result(&before).map_err(|error| error.with_op(op))?;
    fail_if!(result.shape() != target.shape();
        shape(op, [target, &result]), "the result has another shape and does not fit in place");
    check_fits_in_place(op, target.dtype(), result.dtype())?;
    target.copy_(&result)
}

/// Scatters into `target`. Where a gradient is recorded, scatters into a copy, which replaces the elements.
#[track_caller]
fn scatter_in_place(
    op: &'static str,
    target: &Tensor,
    inputs: &[&Tensor],
    scatter: impl FnOnce(&Tensor, ScatterTarget) -> Result<Tensor>,
) -> Result<()> {
    let is_recorded = autograd::check_inplace(op, target, inputs)?;
    let has_kernels = launch::check_device_dtype(op, target.dtype(), target.device()).is_ok();
    if is_recorded || !has_kernels || target.layout().has_internal_overlap() {
        return replace(op, target, inputs, |x| scatter(x, ScatterTarget::Copy));
    }
    operation!(op);
    let _no_autocast = amp::no_autocast();
    scatter(target, ScatterTarget::Operand).map(drop).map_err(|error| error.with_op(op))
}

/// Declares the in-place forms of methods. The tensors in brackets may require a gradient.
macro_rules! inplace {
    ($(pub fn $name:ident($($arg:ident: $type:ty),*) = $of:ident [$($input:ident),*], |$x:ident| $result:expr;)*) => {
        impl Tensor {
            $(
                #[doc = concat!("Applies [`", stringify!($of), "`](Self::", stringify!($of), ") in place.")]
                ///
                /// # Errors
                /// The result does not fit. The tensor is a leaf that requires a gradient while recording.
                #[track_caller]
                pub fn $name(&self $(, $arg: $type)*) -> Result<()> {
                    replace(stringify!($name), self, &[$($input),*], |$x| $result)
                }
            )*
        }
    };
}

/// Declares the in-place forms of scatters, from an expression of the operand and of the [`ScatterTarget`].
macro_rules! inplace_scatter {
    ($(
        pub fn $name:ident($($arg:ident: $type:ty),*) = $of:ident [$($input:ident),*], |$x:ident, $to:ident| $result:expr;
    )*) => {
        impl Tensor {
            $(
                #[doc = concat!("Applies [`", stringify!($of), "`](Self::", stringify!($of), ") in place.")]
                ///
                /// Without a recorded gradient, a scatter of one kernel writes only the scattered elements, and
                /// takes no memory of the size of the tensor. Means, reductions without the old values, and
                /// reductions of 16-bit types take such memory. A call that fails leaves the tensor unchanged.
                ///
                /// # Errors
                /// The tensor is a leaf that requires a gradient while recording. See also
                #[doc = concat!("[`", stringify!($of), "`](Self::", stringify!($of), ").")]
                #[track_caller]
                pub fn $name(&self $(, $arg: $type)*) -> Result<()> {
                    scatter_in_place(stringify!($name), self, &[$($input),*], |$x, $to| $result)
                }
            )*
        }
    };
}

inplace! {
    pub fn addmm_(a: &Tensor, b: &Tensor, options: &AddmmOptions) = addmm [a, b], |x| x.addmm(a, b, options);
    pub fn addmv_(matrix: &Tensor, vector: &Tensor, options: &AddmmOptions) = addmv [matrix, vector],
        |x| x.addmv(matrix, vector, options);
    pub fn addr_(a: &Tensor, b: &Tensor, options: &AddmmOptions) = addr [a, b], |x| x.addr(a, b, options);
    pub fn baddbmm_(a: &Tensor, b: &Tensor, options: &AddmmOptions) = baddbmm [a, b], |x| x.baddbmm(a, b, options);
    pub fn addbmm_(a: &Tensor, b: &Tensor, options: &AddmmOptions) = addbmm [a, b], |x| x.addbmm(a, b, options);
    pub fn cumsum_(dim: isize) = cumsum [], |x| x.cumsum_in_own_dtype(dim);
    pub fn cumprod_(dim: isize) = cumprod [], |x| x.cumprod_in_own_dtype(dim);
    pub fn tril_(diagonal: isize) = tril [], |x| x.tril(diagonal);
    pub fn triu_(diagonal: isize) = triu [], |x| x.triu(diagonal);
    pub fn renorm_(p: f64, dim: isize, max_norm: f64) = renorm [], |x| x.renorm(p, dim, max_norm);
    pub fn masked_scatter_(mask: &Tensor, source: &Tensor) = masked_scatter [source],
        |x| x.masked_scatter(mask, source);
    pub fn polygamma_(n: usize) = polygamma [], |x| x.polygamma(n);
    pub fn mvlgamma_(p: usize) = mvlgamma [], |x| x.mvlgamma(p);
    pub fn logit_(eps: Option<f64>) = logit [], |x| x.logit(eps);
    pub fn nan_to_num_() = nan_to_num [], |x| x.nan_to_num();
    pub fn nan_to_num_with_(options: &NanToNumOptions) = nan_to_num_with [], |x| x.nan_to_num_with(options);
    pub fn bitwise_not_() = bitwise_not [], |x| x.bitwise_not();
    pub fn rrelu_(options: &RreluOptions) = rrelu [], |x| x.rrelu(options);
}

inplace_scatter! {
    pub fn scatter_(dim: isize, index: &Tensor, src: &Tensor) = scatter [src],
        |x, to| x.scatter_op("scatter", dim, index, src, ScatterOp::Set, to);
    pub fn scatter_value_(dim: isize, index: &Tensor, value: impl Into<Scalar>) = scatter_value [],
        |x, to| x.scatter_value_to(dim, index, value.into(), to);
    pub fn scatter_add_(dim: isize, index: &Tensor, src: &Tensor) = scatter_add [src],
        |x, to| x.scatter_op("scatter_add", dim, index, src, ScatterOp::Add, to);
    pub fn scatter_reduce_(
        dim: isize, index: &Tensor, src: &Tensor, reduce: ScatterReduce, include_self: bool
    ) = scatter_reduce [src], |x, to| x.scatter_reduce_to(dim, index, src, (reduce, include_self), to);
    pub fn index_add_(dim: isize, index: &Tensor, src: &Tensor, alpha: impl Into<Scalar>) = index_add [src],
        |x, to| x.index_add_to(dim, index, src, alpha.into(), to);
    pub fn index_copy_(dim: isize, index: &Tensor, source: &Tensor) = index_copy [source],
        |x, to| x.index_copy_to(dim, index, source, to);
    pub fn index_put_(indices: &[Option<&Tensor>], values: &Tensor, accumulate: bool) = index_put [values],
        |x, to| x.index_put_to(indices, values, accumulate, to);
    pub fn index_reduce_(
        dim: isize, index: &Tensor, source: &Tensor, reduce: ScatterReduce, include_self: bool
    ) = index_reduce [source], |x, to| x.index_reduce_to(dim, index, source, (reduce, include_self), to);
    pub fn put_(index: &Tensor, source: &Tensor, accumulate: bool) = put [source],
        |x, to| x.put_to(index, source, accumulate, to);
}

impl Tensor {
    /// Applies [`index_fill`](Self::index_fill) in place.
    ///
    /// Without a recorded gradient, writes only the filled elements, and takes no memory of the size of the tensor.
    ///
    /// # Errors
    /// The tensor is a leaf that requires a gradient while recording. See also [`index_fill`](Self::index_fill).
    #[track_caller]
    pub fn index_fill_<'a>(&self, dim: isize, index: &Tensor, value: impl IntoOperand<'a>) -> Result<()> {
        let value = value.into();
        let inputs: SmallVec<[&Tensor; 1]> = value.as_tensor().into_iter().collect();
        scatter_in_place("index_fill_", self, &inputs, |x, to| x.index_fill_to(dim, index, value, to))
    }
}

//! In-place forms of operations that have no kernel in place: the result replaces the elements.

use crate::ops::elementwise::activation::RreluOptions;
use crate::ops::index::scatter::ScatterReduce;
use crate::ops::matmul::AddmmOptions;
use crate::ops::prelude::*;

/// Replaces the elements of `target` by those of `result`, a function of the old value.
#[track_caller]
fn replace(op: &'static str, target: &Tensor, result: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<()> {
    operation!(op);
    autograd::check_inplace(op, target, &[])?;
    // A gradient may read the old value, which is overwritten.
    let before = if autograd::is_grad_enabled() { target.copy()? } else { target.clone() };
    let result = result(&before)?;
    fail_if!(result.shape() != target.shape();
        shape(op, [target, &result]), "the result has another shape and does not fit in place");
    fail_if!(result.dtype().is_float() && !target.dtype().is_float();
        dtype(op, target.dtype()), "the result is a float and does not fit in place");
    target.copy_(&result)
}

/// Declares the in-place forms of methods.
macro_rules! inplace {
    ($(pub fn $name:ident($($arg:ident: $type:ty),*) = $of:ident;)*) => {
        impl Tensor {
            $(
                #[doc = concat!("Applies [`", stringify!($of), "`](Self::", stringify!($of), ") in place.")]
                ///
                /// # Errors
                /// The result does not fit. The tensor is a leaf that requires a gradient while recording.
                #[track_caller]
                pub fn $name(&self $(, $arg: $type)*) -> Result<()> {
                    replace(stringify!($name), self, |x| x.$of($($arg),*))
                }
            )*
        }
    };
}

inplace! {
    pub fn addmm_(a: &Tensor, b: &Tensor, options: &AddmmOptions) = addmm;
    pub fn addmv_(matrix: &Tensor, vector: &Tensor, options: &AddmmOptions) = addmv;
    pub fn addr_(a: &Tensor, b: &Tensor, options: &AddmmOptions) = addr;
    pub fn baddbmm_(a: &Tensor, b: &Tensor, options: &AddmmOptions) = baddbmm;
    pub fn addbmm_(a: &Tensor, b: &Tensor, options: &AddmmOptions) = addbmm;
    pub fn cumsum_(dim: isize) = cumsum;
    pub fn cumprod_(dim: isize) = cumprod;
    pub fn tril_(diagonal: isize) = tril;
    pub fn triu_(diagonal: isize) = triu;
    pub fn renorm_(p: f64, dim: isize, max_norm: f64) = renorm;
    pub fn scatter_(dim: isize, index: &Tensor, src: &Tensor) = scatter;
    pub fn scatter_value_(dim: isize, index: &Tensor, value: f64) = scatter_value;
    pub fn scatter_add_(dim: isize, index: &Tensor, src: &Tensor) = scatter_add;
    pub fn scatter_reduce_(dim: isize, index: &Tensor, src: &Tensor, reduce: ScatterReduce, include_self: bool) = scatter_reduce;
    pub fn index_add_(dim: isize, index: &Tensor, src: &Tensor, alpha: f64) = index_add;
    pub fn index_copy_(dim: isize, index: &Tensor, source: &Tensor) = index_copy;
    pub fn index_put_(indices: &[Option<&Tensor>], values: &Tensor, accumulate: bool) = index_put;
    pub fn index_reduce_(dim: isize, index: &Tensor, source: &Tensor, reduce: ScatterReduce, include_self: bool) = index_reduce;
    pub fn masked_scatter_(mask: &Tensor, source: &Tensor) = masked_scatter;
    pub fn put_(index: &Tensor, source: &Tensor, accumulate: bool) = put;
    pub fn polygamma_(n: usize) = polygamma;
    pub fn mvlgamma_(p: usize) = mvlgamma;
    pub fn logit_(eps: Option<f64>) = logit;
    pub fn nan_to_num_() = nan_to_num;
    pub fn bitwise_not_() = bitwise_not;
    pub fn rrelu_(options: &RreluOptions) = rrelu;
}

impl Tensor {
    /// Applies [`index_fill`](Self::index_fill) in place.
    ///
    /// # Errors
    /// The tensor is a leaf that requires a gradient while recording. See also [`index_fill`](Self::index_fill).
    #[track_caller]
    pub fn index_fill_<'a>(&self, dim: isize, index: &Tensor, value: impl Into<Operand<'a>>) -> Result<()> {
        replace("index_fill_", self, |x| x.index_fill(dim, index, value))
    }
}

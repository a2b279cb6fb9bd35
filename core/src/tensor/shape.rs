//! Arguments that name shapes and dimensions.

use smallvec::{Array, SmallVec};

use super::Dims;
use super::layout::{checked_numel, numel};
use crate::error::{Error, Result, fail_if};
use crate::memory::scope;

/// Extents or dimensions as signed integers, inline up to six.
pub type Extents = SmallVec<[isize; 6]>;

/// Integer type of an extent or a dimension: `usize`, `isize` or `i32`.
pub trait Extent: Copy {
    /// Returns the value; one that no dimension can have stays so large that it is refused.
    fn to_isize(self) -> isize;
}

macro_rules! impl_extent {
    ($($t:ty),*) => {$(
        impl Extent for $t {
            fn to_isize(self) -> isize { isize::try_from(self).unwrap_or(isize::MAX) }
        }
        impl IntoShape for $t {
            fn to_extents(&self) -> Extents { Extents::from_slice(&[self.to_isize()]) }
        }
        impl IntoDims for $t {
            fn to_dims(&self) -> Option<Extents> { Some(Extents::from_slice(&[self.to_isize()])) }
        }
    )*};
}
impl_extent!(usize, isize, i32);

/// Shape argument: an array, a slice, a `Vec` or a [`Dims`] of `usize`, `isize` or `i32`, or a reference to
/// one. A single integer is the shape of a vector, `()` that of a scalar.
///
/// One extent may be -1 where the operation can infer it: [`reshape`](super::Tensor::reshape),
/// [`view`](super::Tensor::view), [`unflatten`](super::Tensor::unflatten) and
/// [`from_slice`](super::Tensor::from_slice) infer it from the number of elements, and
/// [`expand`](super::Tensor::expand) keeps the extent. Elsewhere a negative extent is an error.
///
/// Literals without a suffix are i32. `1 << 31` wraps to a negative extent, which is an error. `1 << 40` does not
/// compile. Products of i32 variables wrap in release builds, before the call. Compute large extents as `usize`.
///
/// ```
/// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
/// # let device = Device::null(Default::default());
/// let (rows, columns) = (2, 3);
/// let x = Tensor::zeros([rows, columns], DType::F32, &device)?;
/// let y = Tensor::zeros(x.shape(), DType::F32, &device)?;
/// let z = Tensor::zeros(vec![2, 3], DType::F32, &device)?;
/// assert_eq!(y.reshape([3, -1])?.shape(), [3, 2]);
/// assert_eq!(Tensor::from_slice(&[1.0f32; 6], [-1, 3], &device)?.shape(), z.shape());
/// assert_eq!(Tensor::ones(5, DType::F32, &device)?.shape(), [5]);
/// assert_eq!(z.reshape(-1)?.shape(), [6]);
/// assert_eq!(Tensor::ones((), DType::F32, &device)?.rank(), 0);
/// assert!(Tensor::zeros([1 << 31], DType::F32, &device).is_err());
/// assert_eq!(Tensor::zeros([1usize << 31, 0], DType::F32, &device)?.numel(), 0);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a shape",
    note = "take an integer, an array, a slice or a `Vec` of usize, isize or i32, or `()` for a scalar"
)]
pub trait IntoShape {
    /// Returns the extents, -1 where one is inferred.
    fn to_extents(&self) -> Extents;
}

impl<S: IntoShape + ?Sized> IntoShape for &S {
    fn to_extents(&self) -> Extents {
        (**self).to_extents()
    }
}

impl IntoShape for () {
    fn to_extents(&self) -> Extents {
        Extents::new()
    }
}

/// Dimension argument: `1`, `-1`, `[0, 1]`, `&[0, 1]`, a slice or a `Vec` of `usize`, `isize` or `i32`.
/// `()` and `..` mean all dimensions. Negative dimensions count from the end.
///
/// An empty list means all dimensions as well, but `&[]` alone has no element type, so that the compiler asks for one:
/// write `()`.
///
/// ```
/// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
/// # let device = Device::null(Default::default());
/// let x = Tensor::ones([2, 3, 4], DType::F32, &device)?;
/// assert_eq!(x.sum(-1, false)?.shape(), [2, 3]);
/// assert_eq!(x.mean([0, -1], true)?.shape(), [1, 3, 1]);
/// assert_eq!(x.amax((), false)?.rank(), 0);
/// assert_eq!(x.norm(2.0, .., false)?.rank(), 0);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` names no dimensions",
    note = "take an integer, an array, a slice or a `Vec` of usize, isize or i32, or `()` for all dimensions"
)]
pub trait IntoDims {
    /// Returns the dimensions; `None` for all of them.
    fn to_dims(&self) -> Option<Extents>;
}

impl<D: IntoDims + ?Sized> IntoDims for &D {
    fn to_dims(&self) -> Option<Extents> {
        (**self).to_dims()
    }
}

/// Implements both kinds of arguments for lists.
macro_rules! impl_for_lists {
    ($([$($generic:tt)*] $t:ty;)*) => {$(
        impl<$($generic)*> IntoShape for $t {
            fn to_extents(&self) -> Extents { map_extents(self, |n| n.to_isize()) }
        }
        impl<$($generic)*> IntoDims for $t {
            fn to_dims(&self) -> Option<Extents> { Some(self.to_extents()) }
        }
    )*};
}
impl_for_lists! {
    [T: Extent] [T];
    [T: Extent, const N: usize] [T; N];
    [T: Extent] Vec<T>;
    [A: Array<Item: Extent>] SmallVec<A>;
}

impl IntoDims for () {
    fn to_dims(&self) -> Option<Extents> {
        None
    }
}

impl IntoDims for std::ops::RangeFull {
    fn to_dims(&self) -> Option<Extents> {
        None
    }
}

/// Converts each extent. Pushes them one by one, because collecting costs the host several times more, and each new
/// tensor and each view comes here.
#[inline]
fn map_extents<T: Copy, U>(from: &[T], convert: impl Fn(T) -> U) -> SmallVec<[U; 6]> {
    let mut all = SmallVec::new();
    from.iter().for_each(|&n| all.push(convert(n)));
    all
}

/// Returns the dimensions of a reduction, for which an empty list means all.
pub(crate) fn reduction_dims(dims: impl IntoDims) -> Extents {
    dims.to_dims().unwrap_or_default()
}

/// Returns the dimension of an operation that takes one, or `None` for all.
///
/// # Errors
/// Several dimensions are named.
#[track_caller]
pub(crate) fn single_dim(op: &'static str, dims: impl IntoDims) -> Result<Option<isize>> {
    match &reduction_dims(dims)[..] {
        [] => Ok(None),
        &[dim] => Ok(Some(dim)),
        several => Err(Error::argument(op, format!("takes one dimension, or `()` for all, got {several:?}"))),
    }
}

/// Returns the likely cause of an extent that no tensor has, for the end of an error.
pub(crate) fn impossible_extent_hint(extents: &[isize]) -> &'static str {
    match extents {
        _ if extents.iter().any(|&n| n < -1) => {
            "; literals without a suffix are i32 and may wrap, so write `1usize << 31`"
        }
        _ if extents.contains(&isize::MAX) => {
            "; `usize::MAX` is not -1: to infer an extent, write -1 in a list of isize, as in `[b as isize, -1]`"
        }
        _ => "",
    }
}

/// Returns the shape of a new tensor, for which no extent can be inferred.
#[track_caller]
pub(crate) fn new_shape(op: &'static str, shape: impl IntoShape) -> Result<Dims> {
    let extents = shape.to_extents();
    fail_if!(extents.iter().any(|&n| n < 0);
        argument(op), "shape {extents:?} has a negative extent{}", impossible_extent_hint(&extents));
    Ok(map_extents(&extents, |n| n as usize))
}

/// Returns the extents as sizes, or `None` if one is negative.
pub(crate) fn explicit_shape(extents: &[isize]) -> Option<Dims> {
    let is_explicit = extents.iter().all(|&n| n >= 0);
    is_explicit.then(|| map_extents(extents, |n| n as usize))
}

#[track_caller]
pub(crate) fn infer_shape(op: &'static str, from: &[usize], to: &[isize]) -> Result<Dims> {
    let total = numel(from);
    // The most frequent case: nothing is inferred.
    if let Some(shape) = explicit_shape(to).filter(|shape| checked_numel(shape) == Some(total)) {
        return Ok(shape);
    }
    let known_extents = map_extents(to, |n| if n == -1 { 1 } else { n.max(0) as usize });
    let known_numel = numel(&known_extents);
    let unknown = to.iter().filter(|&&n| n == -1).count();
    let location = scope::call_site();
    let fail = |rule: String| Err(Error::Reshape { op, rule, from: from.into(), to: to.into(), location });
    if to.iter().any(|&n| n < -1) || unknown > 1 {
        let hint = impossible_extent_hint(to);
        return fail(format!("extents are 0 or more, and at most one is -1{hint}"));
    }
    if unknown == 1 && (known_numel == 0 || !total.is_multiple_of(known_numel)) {
        return fail(format!("{total} elements do not divide into the extents given"));
    }
    let shape = map_extents(to, |n| if n == -1 { total / known_numel } else { n as usize });
    if checked_numel(&shape) != Some(total) {
        let hint = impossible_extent_hint(to);
        return fail(match checked_numel(&shape) {
            Some(numel) => format!("{total} elements do not fit {numel}{hint}"),
            None => format!("{total} elements do not fit{hint}"),
        });
    }
    Ok(shape)
}

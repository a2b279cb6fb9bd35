//! Arguments that name shapes and dimensions.

use smallvec::{Array, SmallVec};

use super::Dims;
use super::layout::{checked_numel, numel};
use crate::error::{Error, Result};

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
    )*};
}
impl_extent!(usize, isize, i32);

/// Shape argument: an array, a slice, a `Vec` or a [`Dims`] of `usize`, `isize` or `i32`, or a reference to
/// one. `()` is the shape of a scalar.
///
/// One extent may be -1 where the operation can infer it: [`reshape`](super::Tensor::reshape),
/// [`view`](super::Tensor::view), [`unflatten`](super::Tensor::unflatten) and
/// [`from_slice`](super::Tensor::from_slice) infer it from the number of elements, and
/// [`expand`](super::Tensor::expand) keeps the extent. Elsewhere a negative extent is an error.
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
/// assert_eq!(Tensor::ones((), DType::F32, &device)?.rank(), 0);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no shape",
    note = "take an array, a slice or a `Vec` of usize, isize or i32, or `()` for a scalar"
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

impl<T: Extent> IntoShape for [T] {
    fn to_extents(&self) -> Extents {
        self.iter().map(|&n| n.to_isize()).collect()
    }
}

impl<T: Extent, const N: usize> IntoShape for [T; N] {
    fn to_extents(&self) -> Extents {
        self[..].to_extents()
    }
}

impl<T: Extent> IntoShape for Vec<T> {
    fn to_extents(&self) -> Extents {
        self[..].to_extents()
    }
}

impl<A: Array<Item: Extent>> IntoShape for SmallVec<A> {
    fn to_extents(&self) -> Extents {
        self[..].to_extents()
    }
}

impl IntoShape for () {
    fn to_extents(&self) -> Extents {
        Extents::new()
    }
}

/// Returns the shape of a new tensor, for which no extent can be inferred.
///
/// # Errors
/// An extent is negative.
pub(crate) fn new_shape(op: &'static str, shape: impl IntoShape) -> Result<Dims> {
    let extents = shape.to_extents();
    if extents.iter().any(|&n| n < 0) {
        return Err(Error::argument(op, format!("shape {extents:?} has a negative extent")));
    }
    Ok(extents.iter().map(|&n| n as usize).collect())
}

pub(crate) fn infer_shape(op: &'static str, from: &[usize], to: &[isize]) -> Result<Dims> {
    let total = numel(from);
    let given: Dims = to.iter().filter(|&&n| n != -1).map(|&n| n.max(0) as usize).collect();
    let known = numel(&given);
    let unknown = to.iter().filter(|&&n| n == -1).count();
    let fail = |rule: String| Err(Error::Shape { op, rule, shapes: format!("{from:?} to {to:?}") });
    if to.iter().any(|&n| n < -1) || unknown > 1 {
        return fail("extents are 0 or more, and at most one is -1".into());
    }
    if unknown == 1 && (known == 0 || !total.is_multiple_of(known)) {
        return fail(format!("{total} elements do not divide into the extents given"));
    }
    let shape: Dims = to.iter().map(|&n| if n == -1 { total / known } else { n as usize }).collect();
    if checked_numel(&shape) != Some(total) {
        return fail(format!("{} elements do not fit {}", total, numel(&shape)));
    }
    Ok(shape)
}

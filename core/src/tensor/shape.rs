//! Shape arguments.

use super::Dims;
use super::layout::{checked_numel, numel};
use crate::error::{Error, Result};

/// Argument of `reshape`: extents, one of which may be -1 and is then inferred.
pub trait IntoShape {
    /// Returns the extents, with -1 for the inferred one.
    fn to_extents(&self) -> smallvec::SmallVec<[isize; 6]>;
}

/// Converts an extent. Values out of range saturate, so that they are rejected later.
fn to_extent<T: TryInto<isize>>(n: T) -> isize {
    n.try_into().unwrap_or(isize::MAX)
}

macro_rules! impl_into_shape {
    ($($t:ty),*) => {$(
        impl<const N: usize> IntoShape for [$t; N] {
            fn to_extents(&self) -> smallvec::SmallVec<[isize; 6]> { self.iter().map(|&n| to_extent(n)).collect() }
        }
        impl IntoShape for &[$t] {
            fn to_extents(&self) -> smallvec::SmallVec<[isize; 6]> { self.iter().map(|&n| to_extent(n)).collect() }
        }
    )*};
}
impl_into_shape!(isize, usize);

impl<const N: usize> IntoShape for [i32; N] {
    fn to_extents(&self) -> smallvec::SmallVec<[isize; 6]> {
        self.iter().map(|&n| n as isize).collect()
    }
}

impl IntoShape for &[i32] {
    fn to_extents(&self) -> smallvec::SmallVec<[isize; 6]> {
        self.iter().map(|&n| n as isize).collect()
    }
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

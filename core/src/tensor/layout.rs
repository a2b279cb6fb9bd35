//! Layout of a tensor's elements in its storage: shape, strides and offset, in elements.

use smallvec::SmallVec;

use crate::error::{Result, fail, fail_if};

/// Extents or strides, inline for up to six dimensions.
pub type Dims = SmallVec<[usize; 6]>;

/// Shape, strides and offset of a view. Strides are never negative; 0 repeats an element.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Dims,
    strides: Dims,
    offset: usize,
}

impl Clone for Layout {
    #[inline]
    fn clone(&self) -> Self {
        // From slices, because `SmallVec::clone` copies element by element.
        let [shape, strides] = [&self.shape, &self.strides].map(|dims| Dims::from_slice(dims));
        Self { shape, strides, offset: self.offset }
    }
}

/// Returns the strides of a contiguous (row-major) tensor.
#[must_use]
pub fn contiguous_strides(shape: &[usize]) -> Dims {
    let mut strides: Dims = SmallVec::from_elem(1, shape.len());
    let mut step: usize = 1;
    for (stride, &extent) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        // Only an empty tensor can overflow, and its strides have no meaning.
        step = step.saturating_mul(extent.max(1));
    }
    strides
}

/// Reports whether the elements are in row-major order without gaps. An extent of 1 may have any stride.
#[inline]
pub(crate) fn is_row_major(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    for (&n, &s) in shape.iter().zip(strides).rev() {
        if n != 1 && s != expected {
            return false;
        }
        expected = n.saturating_mul(expected);
    }
    true
}

/// Returns the number of elements of a shape. A view that repeats elements saturates at [`usize::MAX`].
#[doc(alias = "nelement")]
#[doc(alias = "nbytes")]
#[must_use]
pub fn numel(shape: &[usize]) -> usize {
    shape.iter().fold(1, |n: usize, &extent| n.saturating_mul(extent))
}

/// Largest number of elements of a view, with extents of 0 counted as 1. Products of extents, strides and
/// small factors then fit `usize`.
pub const MAX_VIEW_NUMEL: usize = 1 << MAX_VIEW_NUMEL_LOG2;
/// Binary logarithm of [`MAX_VIEW_NUMEL`]. With 32 bits, sizes in bytes fit too.
const MAX_VIEW_NUMEL_LOG2: u32 = if usize::BITS < 64 { 28 } else { 48 };

/// Returns the number of elements of a shape, or `None` if nonzero extents exceed [`MAX_VIEW_NUMEL`].
#[must_use]
pub fn checked_numel(shape: &[usize]) -> Option<usize> {
    let mut named = 1usize;
    for &extent in shape {
        named = named.checked_mul(extent.max(1)).filter(|&n| n <= MAX_VIEW_NUMEL)?;
    }
    Some(if shape.contains(&0) { 0 } else { named })
}

/// Fails if the extents multiply to more than [`MAX_VIEW_NUMEL`].
#[track_caller]
pub(crate) fn check_view_numel(op: &'static str, shape: &[usize]) -> Result<()> {
    fail_if!(checked_numel(shape).is_none();
        argument(op), "the extents of shape {shape:?} multiply to more than 2^{MAX_VIEW_NUMEL_LOG2}, the most that a tensor may name");
    Ok(())
}

/// Largest number of elements of a tensor, because kernels count in 32 bits.
pub const MAX_TENSOR_NUMEL: usize = u32::MAX as usize;

/// Returns the number of elements of a shape, or `None` if it exceeds [`MAX_TENSOR_NUMEL`].
#[must_use]
pub fn tensor_numel(shape: &[usize]) -> Option<usize> {
    checked_numel(shape).filter(|&n| n <= MAX_TENSOR_NUMEL)
}

/// Returns the broadcast shape by NumPy's rules: aligned at the right, extents of 1 expand.
///
/// # Errors
/// Two extents differ and neither is 1.
#[track_caller]
pub fn broadcast_shapes(op: &'static str, shapes: &[&[usize]]) -> Result<Dims> {
    if let Some((first, rest)) = shapes.split_first()
        && rest.iter().all(|shape| shape == first)
    {
        return Ok(Dims::from_slice(first));
    }
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out: Dims = SmallVec::from_elem(1, rank);
    for shape in shapes {
        let skip = rank - shape.len();
        for (d, &extent) in shape.iter().enumerate() {
            let have = &mut out[skip + d];
            if *have == 1 {
                *have = extent;
            } else if extent != 1 && extent != *have {
                fail!(
                    shape(op, shapes),
                    "shapes do not broadcast: extents {have} and {extent} at dimension {d} differ and neither is 1"
                );
            }
        }
    }
    check_view_numel(op, &out)?;
    Ok(out)
}

/// Normalises a `dim` that may count from the end, for `rank`. As in PyTorch, rank 0 counts as 1.
///
/// # Errors
/// `dim` is outside `-rank..rank`.
#[track_caller]
pub fn normalize_dim(op: &'static str, dim: isize, rank: usize) -> Result<usize> {
    let bound = rank.max(1) as isize;
    if dim < -bound || dim >= bound {
        let hint = if dim == isize::MAX { "; `usize::MAX` is not -1, which is an isize" } else { "" };
        let last = bound - 1;
        fail!(
            argument(op),
            "dimension {dim} is out of range; a tensor of rank {rank} takes -{bound} to {last}{hint}"
        );
    }
    Ok(if dim < 0 { (dim + bound) as usize } else { dim as usize })
}

impl Layout {
    /// Returns a row-major layout at offset 0.
    #[must_use]
    pub fn contiguous(shape: &[usize]) -> Self {
        Self::contiguous_from(Dims::from_slice(shape))
    }

    /// Returns a row-major layout at offset 0, which takes the extents.
    pub(crate) fn contiguous_from(shape: Dims) -> Self {
        Self { strides: contiguous_strides(&shape), shape, offset: 0 }
    }

    /// Creates a layout from its parts.
    #[must_use]
    pub fn new(shape: impl Into<Dims>, strides: impl Into<Dims>, offset: usize) -> Self {
        let (shape, strides) = (shape.into(), strides.into());
        debug_assert_eq!(shape.len(), strides.len());
        Self { shape, strides, offset }
    }

    /// Returns the extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the strides of the dimensions, in elements.
    #[doc(alias = "stride")]
    #[must_use]
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Returns the storage index of the first element.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the number of dimensions.
    #[doc(alias = "dim")]
    #[doc(alias = "ndim")]
    #[doc(alias = "ndimension")]
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        numel(&self.shape)
    }

    /// Returns one past the last storage element of the layout, or 0 for an empty layout.
    #[must_use]
    pub fn storage_end(&self) -> usize {
        if self.numel() == 0 {
            return 0;
        }
        self.offset + self.shape.iter().zip(&self.strides).map(|(&n, &s)| (n - 1) * s).sum::<usize>() + 1
    }

    /// Reports whether the elements are in row-major order without gaps, from any offset.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        is_row_major(&self.shape, &self.strides) || self.numel() == 0
    }

    /// Reports whether two indices may address the same element.
    #[must_use]
    pub fn has_internal_overlap(&self) -> bool {
        if self.shape.contains(&0) {
            return false;
        }
        let mut dims: SmallVec<[(usize, usize); 6]> =
            self.shape.iter().zip(&self.strides).filter(|(n, _)| **n > 1).map(|(&n, &s)| (s, n)).collect();
        dims.sort_unstable();
        let mut reach = 0;
        for (s, n) in dims {
            if s <= reach {
                return true;
            }
            reach += s * (n - 1);
        }
        false
    }

    /// Expands the layout to `shape` with strides of 0.
    #[track_caller]
    pub fn broadcast_to(&self, op: &'static str, shape: &[usize]) -> Result<Self> {
        if shape == self.shape() {
            return Ok(self.clone());
        }
        fail_if!(shape.len() < self.rank();
            shape(op, &[&self.shape, shape]), "the target has fewer dimensions");
        check_view_numel(op, shape)?;
        let skip = shape.len() - self.rank();
        let mut strides: Dims = SmallVec::from_elem(0, shape.len());
        for d in 0..self.rank() {
            if self.shape[d] == shape[skip + d] {
                strides[skip + d] = self.strides[d];
            } else if self.shape[d] != 1 {
                fail!(
                    shape(op, &[&self.shape, shape]),
                    "dimension {d} of extent {} does not stretch to {}",
                    self.shape[d],
                    shape[skip + d]
                );
            }
        }
        Ok(Self { shape: Dims::from_slice(shape), strides, offset: self.offset })
    }

    /// Returns the strides of a view with this `shape`, or `None` if only a copy has the shape.
    #[must_use]
    pub fn compute_view_strides(&self, shape: &[usize]) -> Option<Dims> {
        if self.numel() == 0 {
            return Some(contiguous_strides(shape));
        }
        // The most frequent case. The general code below would find the same strides.
        if is_row_major(&self.shape, &self.strides) && numel(shape) == self.numel() {
            return Some(contiguous_strides(shape));
        }
        // Match runs of contiguous old dimensions with runs of new dimensions of the same size.
        let mut old: SmallVec<[(usize, usize); 6]> = SmallVec::new();
        for (&n, &s) in self.shape.iter().zip(&self.strides) {
            if n == 1 {
                continue;
            }
            match old.last_mut() {
                Some((size, stride)) if *stride == s.saturating_mul(n) => {
                    *size = n.saturating_mul(*size);
                    *stride = s;
                }
                _ => old.push((n, s)),
            }
        }
        let mut strides: Dims = SmallVec::from_elem(0, shape.len());
        let mut d = shape.len();
        for &(size, stride) in old.iter().rev() {
            let (mut left, mut step) = (size, stride);
            while left > 1 {
                d = d.checked_sub(1)?;
                if left % shape[d] != 0 {
                    return None;
                }
                strides[d] = step;
                step *= shape[d];
                left /= shape[d];
            }
        }
        // The remaining dimensions have extent 1 and may have any stride.
        let contiguous = contiguous_strides(shape);
        for k in 0..d {
            if shape[k] != 1 {
                return None;
            }
            strides[k] = contiguous[k];
        }
        Some(strides)
    }
}

/// Merges adjacent dimensions wherever all layouts allow it, and drops extents of 1, so that kernels divide
/// less. Returns the shape and the strides of each layout.
#[must_use]
pub fn collapse_dims(shape: &[usize], strides: &[&[usize]]) -> (Dims, SmallVec<[Dims; 4]>) {
    let n = numel(shape);
    if n > 1 && strides.iter().all(|strides| is_row_major(shape, strides)) {
        // The most frequent case: all operands are contiguous.
        return (Dims::from_slice(&[n]), SmallVec::from_elem(Dims::from_slice(&[1]), strides.len()));
    }
    let mut out_shape = Dims::new();
    let mut out: SmallVec<[Dims; 4]> = strides.iter().map(|_| Dims::new()).collect();
    for d in 0..shape.len() {
        if shape[d] == 1 {
            continue;
        }
        let merges = out_shape
            .last()
            .is_some_and(|_| strides.iter().zip(&out).all(|(s, o)| o[o.len() - 1] == s[d] * shape[d]));
        if merges {
            let last = out_shape.len() - 1;
            out_shape[last] *= shape[d];
            for (s, o) in strides.iter().zip(&mut out) {
                o[last] = s[d];
            }
        } else {
            out_shape.push(shape[d]);
            for (s, o) in strides.iter().zip(&mut out) {
                o.push(s[d]);
            }
        }
    }
    (out_shape, out)
}

/// Merges the dimensions of one tensor as [`collapse_dims`] does, from pairs of extent and stride.
pub(crate) fn collapse_tensor_dims(dims: impl IntoIterator<Item = (usize, usize)>) -> (Dims, Dims) {
    let (mut shape, mut strides) = (Dims::new(), Dims::new());
    for (extent, stride) in dims {
        match (shape.last_mut(), strides.last_mut()) {
            _ if extent == 1 => {}
            (Some(outer), Some(step)) if *step == stride * extent => {
                *outer *= extent;
                *step = stride;
            }
            _ => {
                shape.push(extent);
                strides.push(stride);
            }
        }
    }
    (shape, strides)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offsets(layout: &Layout) -> Vec<usize> {
        let n = layout.numel();
        (0..n)
            .map(|i| {
                let (mut left, mut at) = (i, layout.offset());
                for d in (0..layout.rank()).rev() {
                    at += (left % layout.shape()[d]) * layout.strides()[d];
                    left /= layout.shape()[d];
                }
                at
            })
            .collect()
    }

    proptest! {
        #[test]
        fn a_view_names_the_same_elements(
            shape in proptest::collection::vec(1usize..5, 0..5),
            order in any::<u64>(),
            split in 1usize..4,
        ) {
            let base = Layout::contiguous(&shape);
            let mut dims: Vec<usize> = (0..shape.len()).collect();
            let mut seed = order;
            for i in (1..dims.len()).rev() {
                dims.swap(i, (seed % (i as u64 + 1)) as usize);
                seed /= 7;
            }
            let view = Layout::new(
                dims.iter().map(|&d| base.shape()[d]).collect::<Dims>(),
                dims.iter().map(|&d| base.strides()[d]).collect::<Dims>(),
                0,
            );
            let n = view.numel();
            let target: Vec<usize> = if n.is_multiple_of(split) { vec![split, n / split] } else { vec![1, n, 1] };
            if let Some(strides) = view.compute_view_strides(&target) {
                let seen = Layout::new(target.as_slice(), strides, 0);
                prop_assert_eq!(offsets(&seen), offsets(&view));
            } else {
                prop_assert!(!view.is_contiguous());
            }
            let (shape, strides) = collapse_dims(view.shape(), &[view.strides()]);
            let dims = view.shape().iter().copied().zip(view.strides().iter().copied());
            prop_assert_eq!(collapse_tensor_dims(dims), (shape.clone(), strides[0].clone()));
            prop_assert_eq!(offsets(&Layout::new(shape, strides[0].clone(), 0)), offsets(&view));
            prop_assert!(!view.has_internal_overlap());
        }
    }

    #[test]
    fn broadcasting_follows_numpy() {
        let shape = broadcast_shapes("add", &[&[3, 1], &[2, 1, 4]]).expect("they broadcast");
        assert_eq!(shape.as_slice(), &[2, 3, 4]);
        assert!(broadcast_shapes("add", &[&[3], &[2]]).is_err());
        let zero = broadcast_shapes("add", &[&[0], &[1]]).expect("they broadcast");
        assert_eq!(zero.as_slice(), &[0]);
    }
}

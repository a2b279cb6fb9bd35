//! Selection by condition, and search in sorted rows. The host reads only the number of selected elements.

use crate::ops::index::{IndexedElements, gather_into, index_dtype_name, scatter_unique_into};
use crate::ops::kernel::index_check::check_lengths;
use crate::ops::prelude::*;
use crate::ops::reduce::scan;
use crate::ops::sort::sort_key_type;
use crate::tensor::layout::MAX_TENSOR_NUMEL;

/// Number of elements for one workgroup.
const TILE: usize = 2048;

/// Finds nonzero elements in row-major order: as coordinates (i64 [count, rank]) or indices (u32 [count]). Without
/// `count`, the host reads the count.
#[track_caller]
fn find_nonzero(op: &'static str, x: &Tensor, coordinates: bool, count: Option<usize>) -> Result<Tensor> {
    let n = x.numel();
    let out = |count: usize| match coordinates {
        true => Tensor::empty([count, x.rank()], DType::I64, x.device()),
        false => Tensor::empty([count], DType::U32, x.device()),
    };
    if n == 0 {
        return out(0);
    }
    let (shape, strides) = if coordinates {
        (x.shape().into(), smallvec![x.strides().into()])
    } else {
        collapse_dims(x.shape(), &[x.strides()])
    };
    launch::check_rank(op, shape.len())?;
    let params = || {
        kernel_params! {
            n, rank: shape.len(), offset: x.layout().offset(), shape: &shape, strides: &strides[0],
        }
    };
    let spec = |stage: &'static str, coordinates: bool| {
        kernel_spec! { "nonzero", kind: sort_key_type(x.dtype()), stage, coordinates }
    };
    let tiles = n.div_ceil(TILE);
    let counts = empty_workspace(&[tiles], DType::U32, x.device())?;
    launch::launch(&spec("count", false), &[x, &counts], params(), tiles)?;
    let totals = scan::cumsum_counts(&counts)?;
    let count = match count {
        Some(count) => count,
        None => totals.narrow(0, tiles - 1, 1)?.item()? as usize,
    };
    // At least one element, because what is launched must not depend on the value that the host read.
    let indices = out(count.max(1))?;
    if indices.numel() > 0 {
        launch::launch(&spec("write", coordinates), &[x, &totals, &indices], params(), tiles)?;
    }
    indices.narrow(0, 0, count)
}

/// Returns the coordinates of nonzero elements. A `count` is their number, which is then not read back.
#[track_caller]
pub(crate) fn nonzero_coordinates(op: &'static str, x: &Tensor, count: Option<usize>) -> Result<Tensor> {
    find_nonzero(op, x, true, count)
}

/// Converts an index of one dimension to u32 rows, and combines it with the rows in `before`, if any. With
/// `wraps`, negative indices count from the end. An index out of range becomes `u32::MAX`.
#[track_caller]
pub(crate) fn linearize_index(
    op: &'static str,
    index: &Tensor,
    extent: usize,
    before: Option<&Tensor>,
    wraps: bool,
) -> Result<Tensor> {
    check_in_range(op, index, IndexRange { extent, allows_negative: wraps, ignored_index: None })?;
    let n = index.numel();
    let rows = Tensor::empty([n], DType::U32, index.device())?;
    run_resolve_indices(op, index, before, &rows, (extent, wraps), None)?;
    Ok(rows)
}

/// Converts an index of any strides to rows within `extent`, or to i32 if `ignored` is set.
fn run_resolve_indices(
    op: &'static str,
    index: &Tensor,
    before: Option<&Tensor>,
    out: &Tensor,
    (extent, wraps): (usize, bool),
    ignored: Option<i64>,
) -> Result<()> {
    let (shape, strides) = collapse_dims(index.shape(), &[index.strides()]);
    launch::check_rank(op, shape.len())?;
    let spec = kernel_spec! {
        "resolve_indices", index: index_dtype_name(op, index)?, chained: before.is_some(), wraps,
        narrow: ignored.is_some(),
    };
    let (n, ignored) = (index.numel(), ignored.unwrap_or(0));
    let params = kernel_params! {
        n, rank: shape.len(), offset: index.layout().offset(), extent, shape: &shape, strides: &strides[0],
        ignored: [ignored as u32, (ignored >> 32) as u32],
    };
    launch::launch(&spec, &bindings![index, before, out], params, n.div_ceil(WORKGROUP_SIZE))
}

/// Converts indices, classes or lengths of any integer type to i32. Values out of range saturate, but never
/// at the lowest i32, which replaces an `ignored` class that is itself out of range.
#[track_caller]
#[doc(hidden)]
pub fn cast_index_to_i32(op: &'static str, index: &Tensor, ignored: Option<i64>) -> Result<Tensor> {
    if index.dtype() == DType::U8 {
        return index.detach().to_dtype(DType::I32);
    }
    if index.dtype() == DType::I32 {
        return Ok(index.clone());
    }
    let out = Tensor::empty(index.shape(), DType::I32, index.device())?;
    run_resolve_indices(op, index, None, &out, (0, false), Some(ignored.unwrap_or(0)))?;
    Ok(out)
}

/// Returns the i32 that [`cast_index_to_i32`] uses for an ignored class.
#[doc(hidden)]
pub fn ignore_index_to_i32(ignored: i64) -> i32 {
    i32::try_from(ignored).unwrap_or(i32::MIN)
}

/// Options of [`Tensor::searchsorted`] and [`Tensor::bucketize`].
#[derive(Clone, Copy, Debug, Default)]
pub struct SearchSortedOptions<'a> {
    /// If true, the positions are i32, else i64; false.
    pub out_int32: bool,
    /// If true, a position is the number of elements that are not greater, else of smaller elements; false.
    pub right: bool,
    /// Order of the searched elements, from [`Tensor::argsort`]; `None` if they are sorted.
    pub sorter: Option<&'a Tensor>,
}

impl Tensor {
    /// Selects the elements for which the bool `mask` is true, as one dimension in row-major order: PyTorch's
    /// `masked_select`. Both tensors broadcast. The host reads the number of elements.
    ///
    /// # Errors
    /// `mask` is not bool, the shapes do not broadcast, or a capture is active.
    #[track_caller]
    pub fn masked_select(&self, mask: &Tensor) -> Result<Tensor> {
        operation!(OP = "masked_select");
        launch::check_bool_mask(OP, mask)?;
        self.check_same_device(OP, mask)?;
        let shape = broadcast_shapes(OP, &[self.shape(), mask.shape()])?;
        let x = self.broadcast_to(&shape)?.reshape([-1])?;
        let indices = find_nonzero(OP, &mask.broadcast_to(&shape)?, false, None)?;
        let (n, forward_indices) = (x.numel(), indices.clone());
        let forward = move |x: &Tensor| {
            let out = Tensor::empty(forward_indices.shape(), x.dtype(), x.device())?;
            gather_into(&IndexedElements::new(OP, 0, &forward_indices), x, &out)?;
            Ok(out)
        };
        let out = forward(&x)?;
        Ok(autograd::linear_differentiable(OP, out, &x, forward, move |g| {
            let zeros = Tensor::zeros([n], g.dtype(), g.device())?;
            scatter_unique_into(OP, &zeros, 0, &indices, g)?;
            Ok(zeros)
        }))
    }

    /// Returns the indices of nonzero elements as i64 [count, rank]: `torch.nonzero`. The host reads count.
    #[track_caller]
    pub fn nonzero(&self) -> Result<Tensor> {
        operation!("nonzero");
        nonzero_coordinates("nonzero", self, None)
    }

    /// Returns [`nonzero`](Self::nonzero): PyTorch's `argwhere`.
    #[track_caller]
    pub fn argwhere(&self) -> Result<Tensor> {
        self.nonzero()
    }

    /// Returns the indices of nonzero elements as one tensor for each dimension: PyTorch's
    /// `nonzero(as_tuple=True)`, and `where` of one argument. A tensor of rank 0 counts as rank 1.
    #[track_caller]
    pub fn nonzero_tuple(&self) -> Result<Vec<Tensor>> {
        let coordinates = if self.rank() == 0 { self.reshape([1])?.nonzero()? } else { self.nonzero()? };
        (0..coordinates.shape()[1]).map(|d| coordinates.select(1, d as isize)?.contiguous()).collect()
    }

    /// Repeats each index of a dimension `repeats` times: PyTorch's `repeat_interleave` with a tensor.
    ///
    /// `repeats` has one integer for each index, or one for all. Without `output_size`, the host reads the
    /// total. A passed `output_size` is not checked; the last index fills missing elements.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[2, 3], DType::F32, &device)?;
    /// let repeats = Tensor::from_slice(&[2, 0, 1], &[3], &device)?;
    /// assert_eq!(x.repeat_interleave_by(&repeats, 1, Some(3))?.shape(), [2, 3]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// `dim` is out of range, or `repeats` are not integers, are negative or do not match the extent.
    #[track_caller]
    pub fn repeat_interleave_by(
        &self,
        repeats: &Tensor,
        dim: isize,
        output_size: Option<usize>,
    ) -> Result<Tensor> {
        operation!(OP = "repeat_interleave_by");
        let d = normalize_dim(OP, dim, self.rank())?;
        let n = extent_or_one(self, d);
        self.check_same_device(OP, repeats)?;
        if !repeats.dtype().is_int() {
            return Err(Error::not_integers(OP, repeats.dtype(), "repeats are integers"));
        }
        fail_if!(repeats.rank() > 1 || !matches!(repeats.numel(), 1) && repeats.numel() != n;
            shape(OP, [self, repeats]),
            "there is one number of repeats for each index of the dimension, or one for all");
        let line = if self.rank() == 0 { self.reshape([1])? } else { self.clone() };
        if n == 0 {
            return Ok(line);
        }
        let repeats = repeats.detach();
        if output_size.is_none() {
            // The host sums exactly; the device would sum in 32 bits.
            let listed = repeats.to_integers()?;
            if let Some(least) = listed.iter().find(|&&n| n < 0) {
                fail!(argument(OP), "{least} is not a number of repeats; none is negative");
            }
            let total = listed.iter().map(|&n| n as i128).sum::<i128>()
                * if listed.len() == 1 { n as i128 } else { 1 };
            let elements = total * (line.numel() / n) as i128;
            fail_if!(elements > MAX_TENSOR_NUMEL as i128; argument(OP),
                "{total} repeats of {n} indices make {elements} elements; a tensor has at most 4,294,967,295");
        }
        let ends = {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            scan::cumsum_counts(&repeats.to_dtype(DType::U32)?.broadcast_to([n])?.contiguous()?)?
        };
        let total = match output_size {
            Some(total) => {
                check_lengths(OP, ("repeat", "`repeats`"), &repeats, 0..=total)?;
                check_lengths(OP, ("sum", "the running sums"), &ends.narrow(0, n - 1, 1)?, total..=total)?;
                total
            }
            None => ends.narrow(0, n - 1, 1)?.item()? as usize,
        };
        let positions = Tensor::arange(0.0, total as f64, 1.0, DType::U32, self.device())?;
        let index = ends
            .searchsorted(&positions, &SearchSortedOptions { out_int32: true, right: true, sorter: None })?
            .clamp(0, n as i64 - 1)?;
        line.index_select(d as isize, &index)
    }

    /// Returns the positions in the sorted `self` at which `values` keep the order: PyTorch's `searchsorted`.
    ///
    /// A one-dimensional `self` serves all values. Otherwise all dimensions but the last agree. As in
    /// PyTorch, a search continues to the right of NaN.
    ///
    /// # Errors
    /// The types differ, the shapes do not fit, or an input requires a gradient: none exists.
    #[track_caller]
    pub fn searchsorted(&self, values: &Tensor, options: &SearchSortedOptions<'_>) -> Result<Tensor> {
        self.run_searchsorted("searchsorted", values, options)
    }

    /// Returns the index of the bucket of each element: PyTorch's `bucketize`. `boundaries` are sorted, unless
    /// the options have a sorter, and one-dimensional. See [`searchsorted`](Self::searchsorted).
    #[track_caller]
    pub fn bucketize(&self, boundaries: &Tensor, options: &SearchSortedOptions<'_>) -> Result<Tensor> {
        fail_if!(boundaries.rank() != 1;
            shape("bucketize", [boundaries]), "the boundaries have one dimension");
        boundaries.run_searchsorted("bucketize", self, options)
    }

    #[track_caller]
    fn run_searchsorted(
        &self,
        op: &'static str,
        values: &Tensor,
        options: &SearchSortedOptions<'_>,
    ) -> Result<Tensor> {
        operation!(op);
        let &SearchSortedOptions { out_int32, right, sorter } = options;
        self.check_same_device(op, values)?;
        fail_if!(values.dtype() != self.dtype(); dtype(op, values.dtype()),
            "values and the sorted sequence have one type, here {}; cast with `to_dtype`", self.dtype());
        let lines =
            |t: &Tensor| -> Dims { t.shape().iter().take(t.rank().saturating_sub(1)).copied().collect() };
        let fits = self.rank() == 1 || (self.rank() == values.rank() && lines(self) == lines(values));
        fail_if!(self.rank() == 0 || !fits; shape(op, [self, values]),
            "the sorted sequence has one dimension, or all but the last agree with those of the values");
        let dtype = if out_int32 { DType::I32 } else { DType::I64 };
        let out = Tensor::empty(values.shape(), dtype, self.device())?;
        let sorter = match sorter {
            Some(sorter) => {
                fail_if!(sorter.shape() != self.shape();
                    shape(op, [self, sorter]), "the sorter has the shape of the sorted sequence");
                self.check_same_device(op, sorter)?;
                check_in_range(op, sorter, IndexRange::from_dim(self, self.rank() - 1))?;
                Some(contiguous_zero_offset(sorter)?)
            }
            None => None,
        };
        let last = normalize_dim(op, -1, self.rank())?;
        let extent = self.shape()[last];
        let n = values.numel();
        if n > 0 && extent == 0 {
            return Tensor::zeros(values.shape(), dtype, self.device());
        }
        let per_line = if self.rank() == 1 { n } else { values.shape()[last] };
        let spec = kernel_spec! {
            "searchsorted", kind: sort_key_type(self.dtype()),
            sorter: sorter.as_ref().map_or(Ok(""), |s| index_dtype_name(op, s))?,
            out: if out_int32 { "i32" } else { "i64w" },
        };
        let params = kernel_params! {
            n, extent, per_line, right: u32::from(right), flip: 0u32, nan: u32::MAX,
        };
        let (lines, values) = (contiguous_zero_offset(self)?, contiguous_zero_offset(values)?);
        let tensors = bindings![&lines, &values, &sorter, &out];
        launch::launch(&spec, &tensors, params, n.div_ceil(WORKGROUP_SIZE))?;
        drop(tensors);
        Ok(out)
    }
}

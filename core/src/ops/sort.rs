//! Sorting along a dimension, and order statistics: top k, k-th value, medians and quantiles.
//!
//! One stable sort on the device finds the order, and the values are gathered by it bit by bit. Every type
//! therefore works on every device. As in PyTorch, -0 equals 0, and NaN sort last in ascending order. Rows up
//! to `Tiling::max_size` elements are sorted in workgroup memory, several at once. Longer rows are sorted
//! in tiles and merged pairwise, only as far as needed. The first few elements of a row are selected without a
//! sort, with the same result.

mod quantile;
mod selection;
pub(crate) mod sets;

use super::index::{IndexedElements, gather_into, index_dtype_name, scatter_unique_into};
use crate::ops::norm::softmax::RowLayout;
use crate::ops::prelude::*;

pub use quantile::Interpolation;

/// First rank that is selected from a sorted row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankStart {
    /// This rank.
    Rank(usize),
    /// This rank, or the first NaN if the row has one. NaN sort to the front.
    RankOrNan(usize),
    /// Median of the elements that are not NaN.
    MedianIgnoringNan,
}

#[derive(Clone, Copy, Debug)]
struct Sorter {
    op: &'static str,
    descending: bool,
    start: RankStart,
    count: usize,
}

/// Returns the type's name in kernels that order elements by their bits.
pub(super) fn sort_key_type(dtype: DType) -> &'static str {
    if dtype == DType::Bool { "u8" } else { dtype.name() }
}

/// Division of rows into tiles that workgroups sort.
struct Tiling {
    layout: RowLayout,
    /// Type of the keys in kernels, or, for `index`, the type of indices that are sorted by their values.
    kind: &'static str,
    index: &'static str,
    /// If true, keys have two words.
    wide: bool,
    /// Elements of a tile.
    size: usize,
    /// Tiles of a row.
    tiles: usize,
}

impl Tiling {
    fn new(op: &'static str, x: &Tensor, d: usize) -> Result<Self> {
        Self::with_keys(op, x, d, (sort_key_type(x.dtype()), ""), x.dtype().size() == 8)
    }

    fn with_keys(
        op: &'static str,
        x: &Tensor,
        d: usize,
        (kind, index): (&'static str, &'static str),
        wide: bool,
    ) -> Result<Self> {
        let layout = RowLayout::new(op, x, d as isize)?;
        let size = layout.extent.next_power_of_two().min(Self::max_size(wide));
        let tiles = layout.extent.div_ceil(size);
        Ok(Self { layout, kind, index, wide, size, tiles })
    }

    /// Returns the number of elements that a workgroup sorts in 16 KiB of keys and indices.
    fn max_size(wide: bool) -> usize {
        if wide { 1024 } else { 2048 }
    }

    /// Returns the number of times that the tiles of a row are merged in pairs.
    fn merges(&self) -> u32 {
        self.tiles.next_power_of_two().ilog2()
    }
}

/// Keys and indices of rows, each with as many elements as the sorted tensor.
type SortBuffers<'a> = (&'a Tensor, &'a Tensor);

impl Sorter {
    /// Returns a sorter of whole rows of `count` elements.
    fn ascending(op: &'static str, count: usize) -> Self {
        Self { op, descending: false, start: RankStart::Rank(0), count }
    }

    /// Returns the selected indices along `d` of each row, in order, as i64.
    #[track_caller]
    fn run(self, x: &Tensor, d: usize) -> Result<Tensor> {
        let extent = extent_or_one(x, d);
        let shape = with_extent(x.shape(), d, self.count);
        let indices = Tensor::empty(&shape, DType::I64, x.device())?;
        if indices.numel() == 0 {
            return Ok(indices);
        }
        let tiling = Tiling::new(self.op, x, d)?;
        if self.try_select(x, &tiling, &indices)? {
            return Ok(indices);
        }
        if tiling.tiles == 1 {
            self.sort_tiles(x, &tiling, false, &[x, &indices])?;
            return Ok(indices);
        }
        let scratch = || -> Result<(Tensor, Tensor)> {
            let buffer = |dtype| empty_workspace(&[x.numel()], dtype, x.device());
            Ok((buffer(if tiling.wide { DType::I64 } else { DType::U32 })?, buffer(DType::U32)?))
        };
        let (first, second) = (scratch()?, scratch()?);
        let sorted = self.sort_rows(x, &tiling, (&first.0, &first.1), (&second.0, &second.1))?;
        let (rows, (first, start_kind)) = (tiling.layout.rows, self.start_params());
        let params = kernel_params! {
            rows, extent, inner: tiling.layout.inner, nan: self.nan_key(), first, count: self.count, start_kind,
        };
        let spec = kernel_spec! { "sort_select", wide: tiling.wide };
        let groups = (rows * self.count).div_ceil(WORKGROUP_SIZE);
        launch::launch(&spec, &[sorted.0, sorted.1, &indices], params, groups)?;
        Ok(indices)
    }

    /// Sorts each tile of `x`: as keys and indices, or, with one tile in each row, as the selected indices.
    fn sort_tiles(self, x: &Tensor, tiling: &Tiling, tiled: bool, tensors: &[&Tensor]) -> Result<()> {
        let &Tiling { ref layout, kind, index, size, tiles, .. } = tiling;
        // Short rows share a workgroup, so that all of its threads compare elements.
        let block_size = size.max(2 * WORKGROUP_SIZE);
        let groups = (layout.rows * tiles).div_ceil(block_size / size);
        let spec = kernel_spec! { "sort", kind, index, tiled };
        let (first, start_kind) = self.start_params();
        let params = layout.params(x, |params| {
            kernel_params! {
                ..params; flip: self.flip(), nan: self.nan_key(), first,
                count: self.count, start_kind, tiles, tile_shift: size.ilog2(),
                block_shift: block_size.ilog2(), needed: self.needed_prefix(layout.extent),
            }
        });
        launch::launch(&spec, tensors, params, groups)
    }

    /// Sorts rows into the keys and positions of `to`.
    fn sort_into(self, x: &Tensor, tiling: &Tiling, to: SortBuffers<'_>) -> Result<()> {
        if tiling.merges() == 0 {
            return self.sort_tiles(x, tiling, true, &[x, to.0, to.1]);
        }
        let buffer = |like: &Tensor| empty_workspace(&[x.numel()], like.dtype(), x.device());
        let scratch = (buffer(to.0)?, buffer(to.1)?);
        let scratch = (&scratch.0, &scratch.1);
        let is_even = tiling.merges().is_multiple_of(2);
        let (from, other) = if is_even { (to, scratch) } else { (scratch, to) };
        self.sort_rows(x, tiling, from, other).map(drop)
    }

    /// Sorts rows into `from` or `to`, and returns the buffers that have the result: `from` if the number of merges
    /// is even.
    fn sort_rows<'a>(
        self,
        x: &Tensor,
        tiling: &Tiling,
        mut from: SortBuffers<'a>,
        mut to: SortBuffers<'a>,
    ) -> Result<SortBuffers<'a>> {
        self.sort_tiles(x, tiling, true, &[x, from.0, from.1])?;
        let (rows, extent) = (tiling.layout.rows, tiling.layout.extent);
        let needed = self.needed_prefix(extent);
        let spec = kernel_spec! { "sort_merge", wide: tiling.wide };
        for merge in 0..tiling.merges() {
            let run = tiling.size << merge;
            let (pairs, tiles) = (extent.div_ceil(2 * run), needed.min(2 * run).div_ceil(tiling.size));
            let params = kernel_params! { rows, extent, run, needed, pairs, tiles, nan: self.nan_key() };
            launch::launch(&spec, &[from.0, from.1, to.0, to.1], params, rows * pairs * tiles)?;
            std::mem::swap(&mut from, &mut to);
        }
        Ok(from)
    }

    /// Returns the length of the sorted prefix that the result depends on.
    fn needed_prefix(self, extent: usize) -> usize {
        match self.start {
            RankStart::Rank(first) | RankStart::RankOrNan(first) => first + self.count,
            RankStart::MedianIgnoringNan => extent,
        }
    }

    /// Returns the key of NaN before the order is reversed.
    fn nan_key(self) -> u32 {
        if matches!(self.start, RankStart::RankOrNan(_)) { 0 } else { u32::MAX }
    }

    /// Returns the bits that reverse the order of keys.
    fn flip(self) -> u32 {
        if self.descending { u32::MAX } else { 0 }
    }

    fn start_params(self) -> (usize, u32) {
        match self.start {
            RankStart::Rank(first) => (first, 0),
            RankStart::RankOrNan(first) => (first, 1),
            RankStart::MedianIgnoringNan => (0, 2),
        }
    }

    /// Returns the values at the indices as well, with gradients.
    #[track_caller]
    fn run_with_values(self, x: &Tensor, d: usize) -> Result<(Tensor, Tensor)> {
        operation!(self.op);
        let indices = self.run(&x.detach(), d)?;
        let (at, shape, op): (_, Dims, _) = (indices.clone(), x.shape().into(), self.op);
        let forward_indices = indices.clone();
        let forward = move |x: &Tensor| {
            let value = Tensor::empty(forward_indices.shape(), x.dtype(), x.device())?;
            if value.numel() > 0 {
                gather_into(&IndexedElements::new(op, d, &forward_indices), x, &value)?;
            }
            Ok(value)
        };
        let value = forward(&x.detach())?;
        let value = autograd::linear_differentiable_with(op, value, x, &[&indices], forward, move |g| {
            let zeros = Tensor::zeros(&shape, g.dtype(), g.device())?;
            scatter_unique_into(op, &zeros, d, &at, g)?;
            Ok(zeros)
        });
        Ok((value, indices))
    }

    /// Returns one element of each row.
    #[track_caller]
    fn run_single(self, x: &Tensor, d: usize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let (value, indices) = self.run_with_values(x, d)?;
        if keepdim || x.rank() == 0 {
            return Ok((value, indices));
        }
        Ok((value.squeeze(d as isize)?, indices.squeeze(d as isize)?))
    }
}

/// Sorts the lines of an index along its last dimension in ascending order, into the indices and the positions of `to`,
/// of type u32. Indices that no extent contains become `u32::MAX`. Not recorded.
#[track_caller]
pub(super) fn sort_index_into(op: &'static str, index: &Tensor, to: SortBuffers<'_>) -> Result<()> {
    if index.numel() == 0 {
        return Ok(());
    }
    let d = index.rank().saturating_sub(1);
    let tiling = Tiling::with_keys(op, index, d, ("u32", index_dtype_name(op, index)?), false)?;
    Sorter::ascending(op, tiling.layout.extent).sort_into(index, &tiling, to)
}

/// Returns the positions, of type u32, that sort the lines of `x` along its last dimension in ascending order. Smaller
/// than the i64 indices of a sort. Not recorded.
fn sorted_positions(op: &'static str, x: &Tensor) -> Result<Tensor> {
    let tiling = Tiling::new(op, x, x.rank().saturating_sub(1))?;
    let buffer = |dtype| empty_workspace(x.shape(), dtype, x.device());
    let (keys, positions) = (buffer(if tiling.wide { DType::I64 } else { DType::U32 })?, buffer(DType::U32)?);
    Sorter::ascending(op, tiling.layout.extent).sort_into(x, &tiling, (&keys, &positions))?;
    Ok(positions)
}

/// Returns the extent of a dimension, which must not be empty.
#[track_caller]
pub(super) fn nonempty_extent(op: &'static str, x: &Tensor, d: usize) -> Result<usize> {
    let n = extent_or_one(x, d);
    fail_if!(n == 0; shape(op, [x]), "dimension {d} has no elements to choose from");
    Ok(n)
}

impl Tensor {
    /// Sorts the elements along `dim` in ascending or `descending` order, and returns them with their indices
    /// (i64): PyTorch's `sort`, always stable. NaN count as the largest.
    #[track_caller]
    pub fn sort(&self, dim: isize, descending: bool) -> Result<(Tensor, Tensor)> {
        let d = normalize_dim("sort", dim, self.rank())?;
        let count = extent_or_one(self, d);
        Sorter { op: "sort", descending, start: RankStart::Rank(0), count }.run_with_values(self, d)
    }

    /// Returns the indices (i64) that sort the elements along `dim` in ascending or `descending` order:
    /// PyTorch's `argsort`, always stable.
    #[track_caller]
    pub fn argsort(&self, dim: isize, descending: bool) -> Result<Tensor> {
        operation!("argsort");
        let d = normalize_dim("argsort", dim, self.rank())?;
        let count = extent_or_one(self, d);
        Sorter { op: "argsort", descending, start: RankStart::Rank(0), count }.run(self, d)
    }

    /// Returns the `k` largest (or smallest) elements along `dim` in order, with their indices (i64):
    /// PyTorch's `topk`. NaN count as the largest. Of equal elements, the first are taken.
    ///
    /// # Errors
    /// `dim` is out of range, or there are fewer than `k` elements.
    #[track_caller]
    pub fn topk(&self, k: usize, dim: isize, largest: bool) -> Result<(Tensor, Tensor)> {
        let d = normalize_dim("topk", dim, self.rank())?;
        let n = extent_or_one(self, d);
        fail_if!(k > n; argument("topk"), "asks for {k} of {n} elements along dimension {d}");
        fail_if!(self.rank() == 0 && k == 0;
            argument("topk"), "a tensor without dimensions has its one element only; k is 0");
        Sorter { op: "topk", descending: largest, start: RankStart::Rank(0), count: k }
            .run_with_values(self, d)
    }

    /// Returns the `k`-th smallest element along `dim`, counted from 1, with its index (i64): PyTorch's
    /// `kthvalue`. NaN count as the largest.
    ///
    /// # Errors
    /// `dim` is out of range, or `k` is 0 or exceeds the extent.
    #[track_caller]
    pub fn kthvalue(&self, k: usize, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let d = normalize_dim("kthvalue", dim, self.rank())?;
        let n = extent_or_one(self, d);
        fail_if!(k == 0 || k > n;
            argument("kthvalue"), "asks for number {k}, counted from 1, of {n} elements along dimension {d}");
        let sorter = Sorter { op: "kthvalue", descending: false, start: RankStart::Rank(k - 1), count: 1 };
        sorter.run_single(self, d, keepdim)
    }

    /// Returns the median along `dim` with its index (i64): PyTorch's `median`. Of an even number of
    /// elements, the median is the lower of the middle two. If there are NaN, the result is the first NaN.
    ///
    /// # Errors
    /// `dim` is out of range, or there are no elements along it.
    #[track_caller]
    pub fn median(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.median_along("median", dim, keepdim, RankStart::RankOrNan)
    }

    /// Returns the [`median`](Self::median) of the elements that are not NaN, or NaN if all are NaN.
    #[track_caller]
    pub fn nanmedian(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.median_along("nanmedian", dim, keepdim, |_| RankStart::MedianIgnoringNan)
    }

    /// Returns the median along `dim`. `start` selects the rank of floats.
    #[track_caller]
    fn median_along(
        &self,
        op: &'static str,
        dim: isize,
        keepdim: bool,
        start: fn(usize) -> RankStart,
    ) -> Result<(Tensor, Tensor)> {
        let d = normalize_dim(op, dim, self.rank())?;
        let middle = (nonempty_extent(op, self, d)? - 1) / 2;
        let start = if self.dtype().is_float() { start(middle) } else { RankStart::Rank(middle) };
        Sorter { op, descending: false, start, count: 1 }.run_single(self, d, keepdim)
    }

    /// Returns the median of all elements, or NaN of an empty float tensor. Equal elements share the
    /// gradient.
    ///
    /// # Errors
    /// The tensor is empty and its dtype is not a float.
    #[track_caller]
    pub fn median_all(&self) -> Result<Tensor> {
        self.median_over_all("median", |line| line.median(0, false))
    }

    /// Returns the median of all elements that are not NaN. Equal elements share the gradient.
    #[track_caller]
    pub fn nanmedian_all(&self) -> Result<Tensor> {
        self.median_over_all("nanmedian", |line| line.nanmedian(0, false))
    }

    /// Returns the result of `median` over all elements.
    #[track_caller]
    fn median_over_all(
        &self,
        op: &'static str,
        median: impl FnOnce(&Tensor) -> Result<(Tensor, Tensor)>,
    ) -> Result<Tensor> {
        // Entered here, because a closure would hide the caller's location.
        operation!(op);
        let out = match self.numel() {
            // PyTorch's result, for types that have NaN.
            0 if self.dtype().is_float() => Tensor::full((), f64::NAN, self.dtype(), self.device())?,
            _ => median(&self.detach().reshape([-1])?)?.0,
        };
        Ok(self.share_grad_among_ties(op, out))
    }

    /// Returns `out`, one of the elements, with a gradient that all elements equal to it share.
    #[track_caller]
    fn share_grad_among_ties(&self, op: &'static str, out: Tensor) -> Tensor {
        let (x, y) = (SavedTensor::input(self), SavedTensor::output(&out));
        autograd::differentiable_unary(op, out, self, move |g, ctx| {
            let (x, y) = (x.unpack_detached(ctx)?, y.unpack_detached(ctx)?);
            let wide = if g.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let equal = x.eq(&y)?.logical_or(&x.isnan()?.logical_and(&y.isnan()?)?)?.to_dtype(wide)?;
            let share = g.to_dtype(wide)?.div(&equal.sum_all()?)?;
            equal.mul(&share)?.to_dtype(g.dtype())
        })
    }
}

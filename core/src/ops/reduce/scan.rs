//! Scans (prefix sums and the like) along one dimension.

use crate::ops::elementwise::pointwise;
use crate::ops::norm::softmax::RowLayout;
use crate::ops::prelude::*;
use crate::ops::reduce::value_selecting_backward;

kernel_variants! {
    /// Operation that combines the elements.
    enum ScanOp {
        Sum = "sum",
        Prod = "prod",
        Max = "max",
        Min = "min",
        /// Each element plus a factor times the result before it.
        Affine = "affine",
    }
}

kernel_variants! {
    /// Stage of a scan in chunks.
    enum ScanStage {
        /// Scans rows of one chunk.
        Whole = "whole",
        /// Computes the totals of chunks.
        Totals = "totals",
        /// Scans chunks, each from the totals before it.
        Carried = "carried",
    }
}

#[derive(Clone, Copy)]
struct Scan<'a> {
    op: &'static str,
    combine: ScanOp,
    exclusive: bool,
    reverse: bool,
    /// Dtype of sums and products of integers and bools; `None` for i64.
    result: Option<DType>,
    /// Factors of an `affine` scan.
    factor: Option<&'a Tensor>,
}

/// Elements of a chunk that a workgroup scans together.
const WORKGROUP_CHUNK: usize = 4096;

/// Least elements of a row, of few rows, that a workgroup scans together. A thread alone waits for each element.
const MIN_SHARED_EXTENT: usize = 16;

/// Elements of a chunk that one thread scans, for strided rows.
const STRIDED_THREAD_CHUNK: usize = 128;

/// Returns the number of threads that scan a part of a row together, and the length of the part: the whole
/// row or a chunk. Chunks keep loops below the iterations at which some drivers stop them (65,535 for a
/// thread). They also let a few long rows fill a device.
fn split_rows(rows: usize, extent: usize, inner: usize) -> (usize, usize) {
    let many = rows >= 64 * WORKGROUP_SIZE;
    if !many && inner >= 32 && extent > 8 * STRIDED_THREAD_CHUNK {
        // Neighbouring threads read neighbouring rows.
        return (1, STRIDED_THREAD_CHUNK);
    }
    match (extent >= MIN_SHARED_EXTENT && !many, extent) {
        (true, ..=8192) => (WORKGROUP_SIZE, extent),
        (true, ..=262_144) if rows >= 512 => (WORKGROUP_SIZE, extent),
        (true, _) => (WORKGROUP_SIZE, WORKGROUP_CHUNK),
        (false, ..=16_384) => (1, extent),
        (false, _) => (1, 8 * STRIDED_THREAD_CHUNK),
    }
}

/// Returns the loop iterations of a chunk that `threads_per_row` threads scan and then combine in a tree.
fn loop_iterations(threads_per_row: usize, chunk: usize) -> usize {
    chunk.div_ceil(threads_per_row)
        * if threads_per_row > 1 { threads_per_row.ilog2() as usize + 2 } else { 1 }
        + 16
}

/// Returns the number of workgroups for `chunks` of one workgroup or of one thread each.
fn chunk_workgroups(chunks: usize, threads_per_row: usize) -> usize {
    if threads_per_row > 1 { chunks } else { chunks.div_ceil(WORKGROUP_SIZE) }
}

/// Splits the results of chunks as [`split_rows`] does.
fn split_chunk_totals(rows: usize, chunks: usize) -> (usize, usize) {
    match split_rows(rows, chunks, 1) {
        (WORKGROUP_SIZE, _) if chunks > WORKGROUP_CHUNK / 2 => (WORKGROUP_SIZE, WORKGROUP_CHUNK / 4),
        whole => whole,
    }
}

/// Results of chunks, [rows, chunks], with one or two values for each chunk.
struct ChunkTotals {
    rows: usize,
    chunks: usize,
    parts: SmallVec<[Tensor; 2]>,
}

impl Scan<'_> {
    /// Returns an inclusive scan from the first element on.
    fn new(op: &'static str, combine: ScanOp) -> Self {
        Self { op, combine, exclusive: false, reverse: false, result: None, factor: None }
    }

    fn alloc_totals(
        &self,
        compute: DType,
        device: &Device,
        rows: usize,
        chunks: usize,
    ) -> Result<ChunkTotals> {
        let wide = if compute.size() == 2 { DType::F32 } else { compute };
        let second = match self.combine {
            ScanOp::Max | ScanOp::Min => Some(DType::U32),
            ScanOp::Affine => Some(wide),
            ScanOp::Sum | ScanOp::Prod => None,
        };
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        let parts = [Some(wide), second].into_iter().flatten();
        let parts = parts.map(|dtype| Tensor::empty([rows * chunks], dtype, device));
        Ok(ChunkTotals { rows, chunks, parts: parts.collect::<Result<_>>()? })
    }

    /// Scans the totals of chunks, recursively in chunks if there are many.
    fn scan_totals(&self, totals: &ChunkTotals, compute: DType, device: &Device) -> Result<ChunkTotals> {
        let &ChunkTotals { rows, chunks: extent, .. } = totals;
        let (threads_per_row, chunk) = split_chunk_totals(rows, extent);
        let chunks = extent.div_ceil(chunk);
        let step = |stage: ScanStage, before: Option<&ChunkTotals>, to: &ChunkTotals| {
            let spec = kernel_spec! {
                "scan", source: "", compute: launch::shader_dtype_name(compute, device), out: "", index: "",
                combine: self.combine, exclusive: false, reverse: false, threads_per_row, stage, level: 1usize,
            };
            let params = kernel_params! {
                rows, extent, inner: 1u32, rank: 0u32, offset: 0u32, stride: 1u32, chunks, chunk,
                shape: &[] as &[usize], strides: &[] as &[usize],
            }
            .loop_iterations(loop_iterations(threads_per_row, chunk));
            let tensors: SmallVec<[&Tensor; 6]> =
                [Some(totals), before, Some(to)].into_iter().flatten().flat_map(|t| &t.parts).collect();
            launch::launch(&spec, &tensors, params, chunk_workgroups(rows * chunks, threads_per_row))
        };
        let out = self.alloc_totals(compute, device, rows, extent)?;
        if chunks == 1 {
            step(ScanStage::Whole, None, &out)?;
            return Ok(out);
        }
        let totals = self.alloc_totals(compute, device, rows, chunks)?;
        step(ScanStage::Totals, None, &totals)?;
        step(ScanStage::Carried, Some(&self.scan_totals(&totals, compute, device)?), &out)?;
        Ok(out)
    }

    /// Scans along `dim` into a new tensor, with a second tensor of indices for max and min. Not recorded.
    #[track_caller]
    fn run(&self, x: &Tensor, dim: isize) -> Result<(Tensor, Option<Tensor>)> {
        operation!(self.op);
        launch::check_computable(self.op, x)?;
        let d = normalize_dim(self.op, dim, x.rank())?;
        let extreme = matches!(self.combine, ScanOp::Max | ScanOp::Min);
        let result = match x.dtype() {
            dtype if dtype.is_float() || extreme => dtype,
            _ => self.result.unwrap_or(DType::I64),
        };
        let compute = match (extreme, x.dtype()) {
            (true, DType::U8 | DType::Bool) => DType::U32,
            (false, DType::U8) if result == DType::U8 => DType::U32,
            (false, DType::Bool) => DType::U32,
            (true, dtype) => dtype,
            _ => result,
        };
        launch::check_device_dtype_or_words(self.op, compute, x.device())?;
        let value = Tensor::empty(x.shape(), result, x.device())?;
        let indices = extreme.then(|| Tensor::empty(x.shape(), DType::I64, x.device())).transpose()?;
        if x.numel() == 0 {
            return Ok((value, indices));
        }
        let layout = RowLayout::new(self.op, x, d as isize)?;
        let (rows, extent) = (layout.rows, layout.extent);
        let (threads_per_row, chunk) = split_rows(rows, extent, layout.inner);
        let chunks = extent.div_ceil(chunk);
        let name = |t: &Tensor| launch::shader_dtype_name(t.dtype(), x.device());
        let step = |stage: ScanStage, before: Option<&ChunkTotals>, to: &[&Tensor]| {
            let spec = kernel_spec! {
                "scan", source: name(x), compute: launch::shader_dtype_name(compute, x.device()),
                out: name(&value), index: indices.as_ref().map_or("", name), combine: self.combine,
                exclusive: self.exclusive && stage != ScanStage::Totals, reverse: self.reverse, threads_per_row, stage,
                level: 0usize,
            };
            let params = layout.params(x, |params| kernel_params! { ..params; chunks, chunk });
            let params = params.loop_iterations(loop_iterations(threads_per_row, chunk));
            let tensors = bindings![x, self.factor, before.map_or(&[][..], |totals| &totals.parts), to];
            launch::launch(&spec, &tensors, params, chunk_workgroups(rows * chunks, threads_per_row))
        };
        let results: SmallVec<[&Tensor; 2]> = std::iter::once(&value).chain(indices.as_ref()).collect();
        if chunks == 1 {
            step(ScanStage::Whole, None, &results)?;
        } else {
            let totals = self.alloc_totals(compute, x.device(), rows, chunks)?;
            step(ScanStage::Totals, None, &totals.parts.iter().collect::<SmallVec<[&Tensor; 2]>>())?;
            step(ScanStage::Carried, Some(&self.scan_totals(&totals, compute, x.device())?), &results)?;
        }
        drop(results);
        Ok((value, indices))
    }
}

/// Computes the cumulative sum of one-dimensional u32 counts. Not recorded.
#[track_caller]
pub(crate) fn cumsum_counts(counts: &Tensor) -> Result<Tensor> {
    Ok(Scan { result: Some(DType::U32), ..Scan::new("totals", ScanOp::Sum) }.run(counts, 0)?.0)
}

impl Tensor {
    #[track_caller]
    fn scan(&self, op: &'static str, combine: ScanOp, dim: isize, reverse: bool) -> Result<Tensor> {
        Ok(Scan { reverse, ..Scan::new(op, combine) }.run(self, dim)?.0)
    }

    /// Computes [`cumsum`](Self::cumsum) for an operation in place: integers keep their dtype, and wrap around.
    #[track_caller]
    pub(in crate::ops) fn cumsum_in_own_dtype(&self, dim: isize) -> Result<Tensor> {
        if self.dtype().is_float() {
            self.cumsum(dim)
        } else {
            self.scan_integers("cumsum", ScanOp::Sum, dim)
        }
    }

    /// Computes [`cumprod`](Self::cumprod) for an operation in place: integers keep their dtype, and wrap around.
    #[track_caller]
    pub(in crate::ops) fn cumprod_in_own_dtype(&self, dim: isize) -> Result<Tensor> {
        if self.dtype().is_float() {
            self.cumprod(dim)
        } else {
            self.scan_integers("cumprod", ScanOp::Prod, dim)
        }
    }

    #[track_caller]
    fn scan_integers(&self, op: &'static str, combine: ScanOp, dim: isize) -> Result<Tensor> {
        // Totals of bools are i64.
        pointwise::check_fits_in_place(op, self.dtype(), DType::I64)?;
        Ok(Scan { result: Some(self.dtype()), ..Scan::new(op, combine) }.run(self, dim)?.0)
    }

    /// Computes the cumulative sum along `dim`. Integers and bools give i64.
    ///
    /// # Errors
    /// `dim` is out of range.
    #[track_caller]
    pub fn cumsum(&self, dim: isize) -> Result<Tensor> {
        dispatch_autocast!("cumsum", [self], |x| x.cumsum(dim));
        let out = self.scan("cumsum", ScanOp::Sum, dim, false)?;
        let sum = |reverse| move |x: &Tensor| x.scan("cumsum", ScanOp::Sum, dim, reverse);
        Ok(autograd::linear_differentiable("cumsum", out, self, sum(false), sum(true)))
    }

    /// Computes the cumulative product along `dim`. Integers and bools give i64.
    #[track_caller]
    pub fn cumprod(&self, dim: isize) -> Result<Tensor> {
        dispatch_autocast!("cumprod", [self], |x| x.cumprod(dim));
        let out = self.scan("cumprod", ScanOp::Prod, dim, false)?;
        let x = self.detach();
        let saved = smallvec![SavedTensor::input(self)];
        let composed = move |x: &[Tensor]| x[0].scan_associative(dim, |a, b| a.mul(b));
        Ok(autograd::composite_differentiable("cumprod", out, &[self], saved, composed, move |g, _| {
            // From the end, s[r] = g[r] + x[r + 1] s[r + 1], then times the product of all elements before r.
            // No division, so zeros need no special case.
            let factor = contiguous_zero_offset(&x)?;
            let affine =
                Scan { reverse: true, factor: Some(&factor), ..Scan::new("cumprod", ScanOp::Affine) };
            let (after, _) = affine.run(g, dim)?;
            Ok(smallvec![Some(x.exclusive_cumprod(dim, false)?.mul(&after)?)])
        }))
    }

    /// Scans with an associative operation (Hillis and Steele, 1986), differentiable as often as that.
    fn scan_associative(
        &self,
        dim: isize,
        combine: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = if self.rank() == 0 { self.reshape([1])? } else { self.clone() };
        let (n, mut reach) = (x.dim(dim)?, 1);
        while reach < n {
            let first = x.narrow(dim, 0, reach)?;
            let later = combine(&x.narrow(dim, reach, n - reach)?, &x.narrow(dim, 0, n - reach)?)?;
            x = cat(&[&first, &later], dim)?;
            reach *= 2;
        }
        x.reshape(self.shape())
    }

    fn exclusive_cumprod(&self, dim: isize, reverse: bool) -> Result<Tensor> {
        let scan = Scan { exclusive: true, reverse, ..Scan::new("prod", ScanOp::Prod) };
        Ok(scan.run(self, dim)?.0)
    }

    /// Computes, for each element, the product of all other elements along `dim`. Not recorded.
    pub(crate) fn prod_of_others(&self, dim: isize) -> Result<Tensor> {
        self.exclusive_cumprod(dim, false)?.mul(&self.exclusive_cumprod(dim, true)?)
    }

    #[track_caller]
    fn cumulative_extreme(&self, op: &'static str, combine: ScanOp, dim: isize) -> Result<(Tensor, Tensor)> {
        let (value, indices) = Scan::new(op, combine).run(self, dim)?;
        let Some(indices) = indices else {
            return Err(Error::argument(op, "gives values and indices")); // invariant: extremes have indices
        };
        let (at, shape): (_, Dims) = (SavedTensor::input(&indices), self.shape().into());
        let value = autograd::differentiable_unary(op, value, self, move |g, ctx| {
            let at = at.unpack(ctx)?;
            // One element may receive many gradients, so 16-bit gradients are rounded once.
            let wide = if g.dtype().size() == 2 { g.to_dtype(DType::F32)? } else { g.clone() };
            value_selecting_backward(&wide, &at, &shape, dim, true)?.to_dtype(g.dtype())
        });
        Ok((value, indices))
    }

    /// Computes the logarithm of the cumulative sum of exponentials along `dim`, without overflow.
    #[track_caller]
    pub fn logcumsumexp(&self, dim: isize) -> Result<Tensor> {
        operation!("logcumsumexp", in_f32[self], |x| x.logcumsumexp(dim));
        let x = if self.dtype().is_float() { self.clone() } else { self.to_dtype(DType::F32)? };
        x.scan_associative(dim, |a, b| a.logaddexp(b))
    }

    /// Returns twice the areas of the trapezoids between neighbours along `dim`. `spacing` is their distance,
    /// or a tensor of points; one-dimensional points apply along `dim`.
    #[track_caller]
    fn doubled_trapezoid_areas(&self, op: &'static str, spacing: Operand<'_>, dim: isize) -> Result<Tensor> {
        operation!(op);
        let d = normalize_dim(op, dim, self.rank())?;
        fail_if!(self.rank() == 0; shape(op, [self]), "takes at least one dimension");
        let y = if self.dtype().is_float() { self.clone() } else { self.to_dtype(DType::F32)? };
        let n = y.shape()[d];
        let sums =
            y.narrow(dim, 1.min(n), n.saturating_sub(1))?.add(&y.narrow(dim, 0, n.saturating_sub(1))?)?;
        let Operand::Tensor(points) = spacing else { return sums.mul(spacing) };
        fail_if!(points.rank() == 0;
            shape(op, [points]), "takes a number or points of at least one dimension");
        let points = if points.rank() == 1 && self.rank() > 1 {
            points.reshape(&with_extent(&Dims::from_elem(1, self.rank()), d, points.numel())[..])?
        } else {
            points.clone()
        };
        // Points with fewer dimensions align with the last dimensions.
        let along = if points.rank() == self.rank() { d as isize } else { d as isize - self.rank() as isize };
        let keeps_dtype = points.dtype().is_float() && points.dtype().size() > 2;
        let points = if keeps_dtype { points } else { points.to_dtype(y.dtype())? };
        sums.mul(&points.diff(1, along, &Default::default())?)
    }

    /// Integrates along `dim` by the trapezoidal rule. `spacing` is the distance between values, or a tensor
    /// of points with one dimension or the shape of `self`.
    ///
    /// # Errors
    /// The tensor has no dimensions, `dim` is out of range, or the points do not broadcast.
    #[doc(alias = "trapz")]
    #[track_caller]
    pub fn trapezoid<'a>(&self, spacing: impl IntoOperand<'a>, dim: isize) -> Result<Tensor> {
        let spacing = spacing.into();
        dispatch_in_f32!("trapezoid", [self], |x| x.trapezoid(spacing, dim));
        self.doubled_trapezoid_areas("trapezoid", spacing, dim)?.sum([dim], false)?.mul(0.5)
    }

    /// Computes the cumulative integral along `dim`, one element less: see [`trapezoid`](Self::trapezoid).
    #[track_caller]
    pub fn cumulative_trapezoid<'a>(&self, spacing: impl IntoOperand<'a>, dim: isize) -> Result<Tensor> {
        let spacing = spacing.into();
        dispatch_in_f32!("cumulative_trapezoid", [self], |x| x.cumulative_trapezoid(spacing, dim));
        self.doubled_trapezoid_areas("cumulative_trapezoid", spacing, dim)?.cumsum(dim)?.mul(0.5)
    }

    /// Estimates the derivative along `dim` from neighbours, to second order: PyTorch's `gradient` of one dimension.
    ///
    /// `spacing` is the distance between values, or a tensor with the position of each. At the ends, the estimate is of
    /// order `edge_order`, 1 or 2.
    ///
    /// # Errors
    /// `edge_order` is neither 1 nor 2, or there are not more values along `dim`. The positions are not
    /// one-dimensional, or not one for each value.
    #[track_caller]
    pub fn gradient<'a>(
        &self,
        spacing: impl IntoOperand<'a>,
        dim: isize,
        edge_order: usize,
    ) -> Result<Tensor> {
        let spacing = spacing.into();
        operation!(OP = "gradient", in_f32[self], |x| x.gradient(spacing, dim, edge_order));
        let d = normalize_dim(OP, dim, self.rank())?;
        fail_if!(!(1..=2).contains(&edge_order); argument(OP), "takes an edge order of 1 or 2, got {edge_order}");
        let n = extent_or_one(self, d);
        fail_if!(n <= edge_order; shape(OP, [self]), "takes at least {} values along {dim}", edge_order + 1);
        let d = d as isize;
        let changes = self.float_differences(d, 1)?;
        let dtype = changes.dtype();
        let gaps = match spacing {
            Operand::Tensor(points) => {
                fail_if!(points.shape() != [n]; shape(OP, [self, points]), "takes {n} positions");
                points.float_differences(0, 1)?
            }
            distance => Tensor::ones([n - 1], dtype, self.device())?.mul(distance)?,
        };
        let along = with_extent(&Dims::from_elem(1, self.rank()), d as usize, n - 1);
        let gaps = gaps.to_dtype(dtype)?.reshape(&along[..])?;
        let slopes = changes.div(&gaps)?;
        let slope_and_gap = |at: usize| -> Result<(Tensor, Tensor)> {
            Ok((slopes.narrow(d, at, 1)?, gaps.narrow(d, at, 1)?))
        };
        // At an end, the slope continues the change of the two slopes next to the end.
        let end = |at: usize, next: usize| -> Result<Tensor> {
            let (slope, gap) = slope_and_gap(at)?;
            if edge_order == 1 {
                return Ok(slope);
            }
            let (other, far) = slope_and_gap(next)?;
            slope.add(&slope.sub(&other)?.mul(&gap)?.div(&gap.add(&far)?)?)
        };
        let inner = match spacing {
            // The middle value has no weight, so an infinity there has no effect.
            Operand::Scalar(_) => self.float_differences(d, 2)?.mul(0.5)?.div(&gaps.narrow(d, 0, 1)?)?,
            Operand::Tensor(_) => {
                let (before, after) = (gaps.narrow(d, 0, n - 2)?, gaps.narrow(d, 1, n - 2)?);
                let sum = slopes.narrow(d, 0, n - 2)?.mul(&after)?;
                sum.add(&slopes.narrow(d, 1, n - 2)?.mul(&before)?)?.div(&before.add(&after)?)?
            }
        };
        cat(&[&end(0, 1)?, &inner, &end(n - 2, n.saturating_sub(3))?], d)
    }

    /// Returns the differences of elements that are `step` apart along `dim`. Integers are subtracted as i64,
    /// because f32 would round them. Their differences are f32.
    fn float_differences(&self, dim: isize, step: usize) -> Result<Tensor> {
        let x = if self.dtype().is_float() { self.clone() } else { self.to_dtype(DType::I64)? };
        let left = x.dim(dim)?.saturating_sub(step);
        let changes = x.narrow(dim, x.dim(dim)? - left, left)?.sub(&x.narrow(dim, 0, left)?)?;
        if changes.dtype().is_float() { Ok(changes) } else { changes.to_dtype(DType::F32) }
    }

    /// Returns the cumulative maximum along `dim` and its index (i64), the last of equal elements.
    #[track_caller]
    pub fn cummax(&self, dim: isize) -> Result<(Tensor, Tensor)> {
        self.cumulative_extreme("cummax", ScanOp::Max, dim)
    }

    /// Returns the cumulative minimum along `dim` and its index (i64), the last of equal elements.
    #[track_caller]
    pub fn cummin(&self, dim: isize) -> Result<(Tensor, Tensor)> {
        self.cumulative_extreme("cummin", ScanOp::Min, dim)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{WORKGROUP_SIZE, split_chunk_totals, split_rows};

    proptest! {
        #[test]
        fn no_thread_exceeds_the_loop_limit_of_drivers(rows in 0u32..32, extent in 0u32..32, more in 0usize..1000, inner in 0u32..12) {
            let (rows, mut extent) = (1usize << rows, (1usize << extent) + more);
            prop_assume!(rows * extent < 1 << 33);
            let (mut threads_per_row, mut chunk) = split_rows(rows, extent, 1 << inner);
            for _level in 0..8 {
                // Each workgroup-sized block takes one iteration and eight of the inner loop.
                let iterations = if threads_per_row == 1 { chunk } else { chunk.div_ceil(WORKGROUP_SIZE) * 9 };
                prop_assert!(iterations + 8 < 65_535 / 2, "{} iterations for {} x {}", iterations, rows, extent);
                if chunk >= extent { return Ok(()); }
                extent = extent.div_ceil(chunk);
                (threads_per_row, chunk) = split_chunk_totals(rows, extent);
            }
            prop_assert!(false, "chunks of chunks without an end");
        }
    }
}

//! Gather, scatter and embedding: reads and writes of elements by index tensors.
//!
//! Indices are i64, i32 or u32, and are compared in 64 bits. An index out of range (also a negative one)
//! reads as 0, and writes and gradients skip it. [`check_indices`](crate::ops::check_indices) makes it an
//! error. Sums of elements with the same index have a fixed order.

pub(crate) mod embedding;
pub(crate) mod embedding_bag;
pub(crate) mod order;
pub(crate) mod scatter;
pub(crate) mod select;
pub(crate) mod sorted_scatter;
pub(crate) mod take_put;

use super::shape::pad::PadMode;
use crate::ops::index::sorted_scatter::{ScatterBase, scatter_onto, scatter_sorted_runs};
use crate::ops::prelude::*;

/// Operation of a scatter on an existing element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScatterOp {
    /// Replaces the element. With repeated indices, the last one in order wins.
    Set,
    /// Adds to the element.
    Add,
    /// Multiplies the element.
    Mul,
    /// Keeps the larger value.
    Max,
    /// Keeps the smaller value.
    Min,
}

impl ScatterOp {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Set => "set",
            Self::Add => "add",
            Self::Mul => "mul",
            Self::Max => "max",
            Self::Min => "min",
        }
    }
}

/// Tensor that a scatter writes into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScatterTarget {
    /// Copy of the operand.
    Copy,
    /// Operand itself, whose elements do not overlap. Only where no gradient is recorded.
    Operand,
}

impl ScatterTarget {
    /// Returns the tensor that the scatter of `x` writes, without a history.
    fn written(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Copy => x.detach().copy(),
            Self::Operand => Ok(x.detach()),
        }
    }

    /// Returns an input of the scatter of `x`: a copy if its memory is written.
    fn input(self, x: &Tensor, input: &Tensor) -> Result<Tensor> {
        match self {
            Self::Operand if input.shares_storage(x) => input.detach().copy(),
            _ => Ok(input.clone()),
        }
    }

    fn scatter(self, x: &Tensor, at: &IndexedElements, src: &Tensor, how: ScatterOp) -> Result<Tensor> {
        let src = &src.detach();
        match self {
            Self::Copy => scatter_onto(at, (ScatterBase::Copy(&x.detach()), x.shape()), src, (how, None)),
            Self::Operand => {
                let out = self.written(x)?;
                scatter_into(at, &out, &src.into(), (how, None))?;
                Ok(out)
            }
        }
    }

    /// Delivers a result that was not computed in the operand's memory.
    fn store(self, x: &Tensor, result: Tensor) -> Result<Tensor> {
        if self == Self::Operand {
            x.detach().copy_(&result)?;
        }
        Ok(result)
    }
}

/// Number of invocations that a scatter into few long rows uses.
const SCATTER_THREADS: usize = 1 << 16;

/// Total index reads of all invocations above which sorting the indices is faster.
const SCATTER_MAX_READS: usize = 1 << 22;

/// Indices that one thread may scan, for few rows and for many rows. Beyond the first, which leaves most of a
/// device idle, sorting is faster. Beyond the second, some drivers end the loop.
const SCATTER_MAX_SCANS: [usize; 2] = [1 << 11, 1 << 15];

/// Largest number of indices for the kernel that compares each index with all others.
const ROW_GRAD_MAX_INDICES: usize = 1 << 14;

pub(super) fn index_dtype_name(op: &'static str, index: &Tensor) -> Result<&'static str> {
    match index.dtype() {
        DType::I64 => Ok("i64w"),
        DType::I32 => Ok("i32"),
        DType::U32 => Ok("u32"),
        got => Err(Error::not_integers(op, got, "an index is i64, i32 or u32")),
    }
}

/// Returns the strides of an operand along the dimensions of the result, and along the indexed dimension.
pub(super) fn split_dim_stride(strides: &[usize], dim: usize) -> (Dims, usize) {
    (with_extent(strides, dim, 0), strides.get(dim).copied().unwrap_or(0))
}

/// Elements that an operation gathers or scatters, and their indices along one dimension of the operand.
#[derive(Clone)]
pub(super) struct IndexedElements {
    op: &'static str,
    dim: usize,
    index: Tensor,
    /// Extents of the elements.
    shape: Dims,
    /// Strides that locate the index of each element.
    strides: Dims,
}

impl IndexedElements {
    /// Returns elements with an index each.
    pub(super) fn new(op: &'static str, dim: usize, index: &Tensor) -> Self {
        let (shape, strides) = (index.shape().into(), index.strides().into());
        Self { op, dim, index: index.clone(), shape, strides }
    }

    /// Returns elements of `shape`, whose rows along `dim` have the indices of the one-dimensional `index`.
    pub(super) fn rows(op: &'static str, dim: usize, index: &Tensor, shape: &[usize]) -> Self {
        let stride = index.strides().first().copied().unwrap_or(0);
        let strides = with_extent(&Dims::from_elem(0, shape.len()), dim, stride);
        Self { op, dim, index: index.clone(), shape: shape.into(), strides }
    }

    /// Returns the number of elements along the dimension.
    fn length(&self) -> usize {
        self.shape.get(self.dim).copied().unwrap_or(1)
    }

    /// Returns the shape with an extent of 1 in the dimension.
    fn lines_shape(&self) -> Dims {
        with_extent(&self.shape, self.dim, 1)
    }
}

/// Gathers elements of `x` into `out`, which has their shape.
pub(super) fn gather_into(at: &IndexedElements, x: &Tensor, out: &Tensor) -> Result<()> {
    let IndexedElements { op, dim, ref index, strides: ref index_strides, .. } = *at;
    x.check_same_device(op, index)?;
    check_in_range(op, index, IndexRange::from_dim(x, dim))?;
    let (in_strides, dim_stride) = split_dim_stride(x.strides(), dim);
    let extent = extent_or_one(x, dim);
    let (mut shape, mut strides) = collapse_dims(out.shape(), &[&in_strides, index_strides]);
    launch::check_rank(op, shape.len())?;
    let mut size = out.dtype().size();
    let (mut n, mut offset, mut dim_stride) = (out.numel(), x.layout().offset(), dim_stride);
    // Neighbours with the same index move together in steps of 16 bytes, if their rows are aligned.
    let width = 16 / size;
    let is_multiple = |k: &usize| k.is_multiple_of(width);
    if let ([before @ .., 1], [.., 0], [.., last]) = (&strides[0][..], &strides[1][..], &shape[..])
        && [last, &offset, &dim_stride].into_iter().chain(before).all(is_multiple)
    {
        let rank = shape.len();
        strides[0][..rank - 1].iter_mut().for_each(|s| *s /= width);
        shape[rank - 1] /= width;
        (n, offset, dim_stride, size) = (n / width, offset / width, dim_stride / width, 16);
    }
    let spec = kernel_spec! { "gather", size, index: index_dtype_name(op, index)? };
    let params = kernel_params! {
        n, rank: shape.len(), in_offset: offset, index_offset: index.layout().offset(), extent, dim_stride,
        shape: &shape, in_strides: &strides[0], index_strides: &strides[1],
    };
    let per_thread = (4 / size).max(1);
    launch::launch(&spec, &[x, index, out], params, n.div_ceil(per_thread * WORKGROUP_SIZE))
}

/// Writes `src` to the positions along `dim` in `index` (same shape), in place. The indices are unique.
pub(super) fn scatter_unique_into(
    op: &'static str,
    out: &Tensor,
    dim: usize,
    index: &Tensor,
    src: &Tensor,
) -> Result<()> {
    out.check_same_device(op, index)?;
    let (out_strides, dim_stride) = split_dim_stride(out.strides(), dim);
    let (shape, strides) = collapse_dims(src.shape(), &[src.strides(), index.strides(), &out_strides]);
    launch::check_rank(op, shape.len())?;
    let spec = kernel_spec! {
        "scatter_unique", size: out.dtype().size(), index: index_dtype_name(op, index)?,
    };
    let params = kernel_params! {
        n: src.numel(), rank: shape.len(), in_offset: src.layout().offset(),
        index_offset: index.layout().offset(), out_offset: out.layout().offset(),
        extent: extent_or_one(out, dim), dim_stride, shape: &shape,
        in_strides: &strides[0], index_strides: &strides[1], out_strides: &strides[2],
    };
    launch::launch(&spec, &[src, index, out], params, src.numel().div_ceil(WORKGROUP_SIZE))
}

/// Scattered values: a tensor with the strides of the index's shape, or a scalar.
pub(super) enum ScatterSource<'a> {
    Tensor(&'a Tensor, Dims),
    Scalar(Scalar),
}

impl<'a> From<&'a Tensor> for ScatterSource<'a> {
    fn from(src: &'a Tensor) -> Self {
        Self::Tensor(src, src.strides().into())
    }
}

/// Returns the number of slices of each line that the scanning kernel writes. `None` if sorting the indices is
/// faster.
fn scan_slices(at: &IndexedElements, extent: usize) -> Option<usize> {
    let (length, lines) = (at.length(), numel(&at.lines_shape()));
    let slices = (SCATTER_THREADS / lines.max(1)).clamp(1, extent.max(1));
    let [few, many] = SCATTER_MAX_SCANS;
    let is_long = length > if lines < WORKGROUP_SIZE * 16 { few } else { many };
    let is_repeated = slices > 1 && lines * slices * length > SCATTER_MAX_READS;
    (!is_long && !is_repeated).then_some(slices)
}

/// Creates a scalar tensor of the type of `like` in workspace memory.
fn scalar_like(value: Scalar, like: &Tensor) -> Result<Tensor> {
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    Tensor::full((), value, like.dtype(), like.device())
}

pub(super) fn scatter_into(
    at: &IndexedElements,
    out: &Tensor,
    source: &ScatterSource<'_>,
    (how, skip): (ScatterOp, Option<usize>),
) -> Result<()> {
    let IndexedElements { op, dim, ref index, ref shape, strides: ref index_strides } = *at;
    out.check_same_device(op, index)?;
    check_in_range(op, index, IndexRange::from_dim(out, dim))?;
    launch::check_device_dtype(op, out.dtype(), out.device())?;
    let (length, lines_shape) = (at.length(), at.lines_shape());
    let lines: usize = lines_shape.iter().product();
    let (out_strides, out_dim) = split_dim_stride(out.strides(), dim);
    let (index_rest, index_dim) = split_dim_stride(index_strides, dim);
    let zeros = Dims::from_elem(0, shape.len());
    let (src, src_offset, (src_rest, src_dim), value) = match source {
        ScatterSource::Tensor(t, strides) => {
            (Some(*t), t.layout().offset(), split_dim_stride(strides, dim), 0.0)
        }
        ScatterSource::Scalar(v) => (None, 0, (zeros.clone(), 0), v.to_f32()),
    };
    let (line_shape, strides) = collapse_dims(&lines_shape, &[&out_strides, &index_rest, &src_rest]);
    launch::check_rank(op, line_shape.len())?;
    let extent = extent_or_one(out, dim);
    if lines == 0 || length == 0 || extent == 0 {
        return Ok(());
    }
    let Some(slices) = scan_slices(at, extent) else {
        let scalar;
        let src = match source {
            ScatterSource::Tensor(src, strides) => (*src, &strides[..]),
            ScatterSource::Scalar(v) => {
                scalar = scalar_like(*v, out)?;
                (&scalar, &zeros[..])
            }
        };
        return scatter_sorted_runs(at, out, src, (how, skip));
    };
    let spec = kernel_spec! {
        "scatter", dtype: launch::shader_dtype_name(out.dtype(), out.device()),
        index: index_dtype_name(op, index)?, op: how.name(), scalar: src.is_none(),
    };
    let params = kernel_params! {
        lines, rank: line_shape.len(), length, extent, slices, skip: skip.map_or(u32::MAX, |s| s as u32),
        value, offsets: [out.layout().offset(), index.layout().offset(), src_offset],
        dim_strides: [out_dim, index_dim, src_dim], shape: &line_shape, out_strides: &strides[0],
        index_strides: &strides[1], src_strides: &strides[2],
    }
    .loop_iterations(length + 16);
    let groups = (lines * slices).div_ceil(WORKGROUP_SIZE);
    launch::launch(&spec, &bindings![index, src, out], params, groups)
}

/// Gathers by `index`, with zero for the index `skip`: the adjoint of [`gather_backward`].
fn gather_or_zero(at: &IndexedElements, x: &Tensor, skip: Option<usize>) -> Result<Tensor> {
    let out = Tensor::empty(&at.shape, x.dtype(), x.device())?;
    gather_into(at, x, &out)?;
    let Some(skip) = skip else { return Ok(out) };
    // Only for rows with a one-dimensional index.
    let extent = extent_or_one(x, at.dim);
    let skipped = select::linearize_index(at.op, &at.index, extent, None, false)?.eq(skip)?;
    let along = with_extent(&Dims::from_elem(1, at.shape.len()), at.dim, skipped.numel());
    out.masked_fill(&skipped.reshape(&along[..])?, 0.0)
}

/// Records the result of [`gather_backward`] or [`select_rows_backward`] for gradients of gradients.
fn attach_gather_grad(at: &IndexedElements, back: Tensor, g: &Tensor, skip: Option<usize>) -> Tensor {
    if !autograd::compute_requires_grad(&[g]) {
        return back;
    }
    let (shape, adjoint, forward): (Dims, _, _) = (back.shape().into(), at.clone(), at.clone());
    autograd::linear_differentiable_with(
        at.op,
        back,
        g,
        &[&at.index],
        move |g| gather_backward(&forward, g, &shape, skip),
        move |x| gather_or_zero(&adjoint, x, skip),
    )
}

/// Computes the gradient of a gather: adds every element of `g` to zeros at its source.
pub(super) fn gather_backward(
    at: &IndexedElements,
    g: &Tensor,
    shape: &[usize],
    skip: Option<usize>,
) -> Result<Tensor> {
    let recorded = g;
    let g = &recorded.detach();
    // 16-bit gradients are summed in f32, because a frequent index's sum would otherwise stop growing. Kernels of
    // sorted indices do so themselves.
    let extent = shape.get(at.dim).copied().unwrap_or(1);
    let is_summed_in_f32 = g.dtype().size() == 2 && scan_slices(at, extent).is_some();
    let wide = if is_summed_in_f32 { DType::F32 } else { g.dtype() };
    let base = (ScatterBase::Zero(wide), shape);
    let sum = scatter_onto(at, base, &g.to_dtype(wide)?, (ScatterOp::Add, skip))?;
    Ok(attach_gather_grad(at, sum.to_dtype(g.dtype())?, recorded, skip))
}

/// Computes the gradient of row selection, added in f32 to `sum` if its layout allows.
fn run_row_grad_kernel(
    at: &IndexedElements,
    g: &Tensor,
    shape: &[usize],
    skip: Option<usize>,
    sum: Option<Tensor>,
) -> Result<Tensor> {
    let index = &at.index;
    let sum =
        sum.filter(|sum| sum.dtype() == DType::F32 && g.dtype() == DType::F32 && sum.layout().offset() == 0);
    let sum = sum.map_or_else(|| Tensor::zeros(shape, DType::F32, g.device()), Ok)?;
    let (n, entries) = (index.numel(), shape.first().copied().unwrap_or(1));
    let extent: usize = shape.iter().skip(1).product();
    if n > 0 && sum.numel() > 0 {
        let width = if extent.is_multiple_of(VEC4_WIDTH) { VEC4_WIDTH } else { 1 };
        let g = contiguous_zero_offset(g)?;
        let spec = kernel_spec! {
            "embedding_grad", index: index_dtype_name(at.op, index)?, g: g.dtype().name(), out: "f32", width,
        };
        // In the worst case one thread lists all indices, and each tile adds iterations.
        let params = kernel_params! {
            n, entries, extent, offset: index.layout().offset(),
            stride: index.strides().first().copied().unwrap_or(0), skip: skip.map_or(u32::MAX, |s| s as u32),
        }
        .loop_iterations(n + n / 8 + n.div_ceil(4096) * 512);
        launch::launch(&spec, &[index, &g, &sum], params, n * extent.div_ceil(width * WORKGROUP_SIZE))?;
    }
    sum.to_dtype(g.dtype())
}

/// Computes the gradient of the selection of rows along dimension 0 by the cheaper method. `sum` is an optional
/// accumulator.
pub(super) fn select_rows_backward(
    at: &IndexedElements,
    g: &Tensor,
    shape: &[usize],
    skip: Option<usize>,
    sum: Option<Tensor>,
) -> Result<Tensor> {
    // Every row scans all indices, so sorting is cheaper above the limit.
    if matches!(g.dtype(), DType::F32 | DType::F16 | DType::BF16) && at.index.numel() <= ROW_GRAD_MAX_INDICES
    {
        let grad = run_row_grad_kernel(at, g, shape, skip, sum)?;
        return Ok(attach_gather_grad(at, grad, g, skip));
    }
    gather_backward(at, g, shape, skip)
}

/// Pads the end of each dimension with `value` up to `shape`.
fn pad_ends(t: &Tensor, shape: &[usize], value: f64) -> Result<Tensor> {
    let extents = shape.iter().zip(t.shape()).rev();
    let pads: Vec<isize> = extents.flat_map(|(&n, &k)| [0, (n - k) as isize]).collect();
    t.pad(&pads, PadMode::Constant(value.into()))
}

/// Returns the view of the first elements of each dimension with this shape.
fn leading_part(t: &Tensor, shape: &[usize]) -> Result<Tensor> {
    shape.iter().enumerate().try_fold(t.clone(), |part, (d, &n)| match part.shape()[d] == n {
        // The backward pass of a narrow copies the gradient.
        true => Ok(part),
        false => part.narrow(d as isize, 0, n),
    })
}

impl Tensor {
    /// Gathers `out[i][j] = self[index[i][j]][j]` for `dim` 0 (PyTorch's `gather`). The ranks are equal.
    ///
    /// An index out of range reads as 0: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// The ranks differ, or an extent of `index` in another dimension than `dim` exceeds that of `self`.
    #[track_caller]
    pub fn gather(&self, dim: isize, index: &Tensor) -> Result<Tensor> {
        operation!("gather");
        if self.rank() == 0 && index.rank() == 1 {
            return self.reshape([1])?.gather(dim, index);
        }
        let d = normalize_dim("gather", dim, self.rank())?;
        if index.numel() > 0 {
            self.check_index("gather", d, index)?;
        }
        let out = Tensor::empty(index.shape(), self.dtype(), self.device())?;
        let shape = Dims::from_slice(self.shape());
        if out.numel() == 0 {
            // PyTorch accepts an empty index of any type and shape.
            let zeros_of = |shape: Dims| move |t: &Tensor| Tensor::zeros(&shape, t.dtype(), t.device());
            let (forward, backward) = (zeros_of(index.shape().into()), zeros_of(shape));
            return Ok(autograd::linear_differentiable("gather", out, self, forward, backward));
        }
        gather_into(&IndexedElements::new("gather", d, index), self, &out)?;
        let index = SavedTensor::input(index);
        Ok(autograd::differentiable_unary("gather", out, self, move |g, ctx| {
            gather_backward(&IndexedElements::new("gather", d, &index.unpack(ctx)?), g, &shape, None)
        }))
    }

    fn check_index(&self, op: &'static str, d: usize, index: &Tensor) -> Result<()> {
        let fits = |k: usize| k == d || index.shape()[k] <= self.shape()[k];
        fail_if!(index.rank() != self.rank() || !(0..self.rank()).all(fits); shape(op, [self, index]),
            "the index has the rank of the tensor, and no larger extents except in dimension {d}");
        Ok(())
    }

    pub(super) fn check_scatter(
        &self,
        op: &'static str,
        d: usize,
        index: &Tensor,
        src: &Tensor,
    ) -> Result<()> {
        self.check_index(op, d, index)?;
        fail_if!(src.rank() != index.rank() || src.shape().iter().zip(index.shape()).any(|(s, i)| i > s);
            shape(op, [src, index]), "the source is at least as large as the index");
        self.check_source(op, src)
    }

    /// Fails if elements of `src` cannot be stored in, or added to, `self`.
    fn check_source(&self, op: &'static str, src: &Tensor) -> Result<()> {
        fail_if!(src.dtype() != self.dtype();
            dtype(op, src.dtype()), "the source has the type of the tensor, {}", self.dtype());
        self.check_same_device(op, src)
    }

    /// Selects the indices of one dimension that the one-dimensional `index` names, in its order.
    ///
    /// An index out of range reads as 0: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn index_select(&self, dim: isize, index: &Tensor) -> Result<Tensor> {
        operation!("index_select");
        let d = normalize_dim("index_select", dim, self.rank())?;
        fail_if!(index.rank() > 1; shape("index_select", [self, index]), "the index has one dimension");
        let shape = with_extent(self.shape(), d, index.numel());
        self.select_rows("index_select", d, index, &shape, None, None)
    }

    /// Selects along `d` by the one-dimensional `index`. `shares` scales the gradient of each row.
    pub(super) fn select_rows(
        &self,
        op: &'static str,
        d: usize,
        index: &Tensor,
        shape: &[usize],
        skip: Option<usize>,
        shares: Option<Tensor>,
    ) -> Result<Tensor> {
        let out = Tensor::empty(shape, self.dtype(), self.device())?;
        gather_into(&IndexedElements::rows(op, d, index, shape), self, &out)?;
        let (before, index): (Dims, _) = (self.shape().into(), SavedTensor::input(index));
        Ok(autograd::differentiable_unary(op, out, self, move |g, ctx| {
            let at = IndexedElements::rows(op, d, &index.unpack(ctx)?, g.shape());
            if let Some(shares) = &shares {
                // Do not round before the sum.
                let rows = amp::half_to_f32(g)?.mul(shares)?;
                let grad = select_rows_backward(&at, &rows, &before, skip, None)?;
                return grad.to_dtype(g.dtype());
            }
            if d == 0 {
                let sum = ctx.leaf_grad_to_accumulate(0);
                return select_rows_backward(&at, g, &before, skip, sum);
            }
            gather_backward(&at, g, &before, skip)
        }))
    }

    /// Gathers as [`gather`](Self::gather) does, with broadcasting of `index` and `self` in the dimensions
    /// other than `dim`. Indices of -n to -1 count from the end.
    ///
    /// An index out of range reads as 0: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn take_along_dim(&self, index: &Tensor, dim: isize) -> Result<Tensor> {
        let d = normalize_dim("take_along_dim", dim, self.rank())?;
        fail_if!(index.rank() != self.rank(); shape("take_along_dim", [self, index]), "both have one rank");
        let (mut x_shape, mut i_shape): (Dims, Dims) = (self.shape().into(), index.shape().into());
        for k in (0..self.rank()).filter(|&k| k != d) {
            let n = x_shape[k].max(i_shape[k]);
            (x_shape[k], i_shape[k]) = (n, n);
        }
        operation!("take_along_dim");
        // PyTorch accepts -n..n here, unlike in `gather`.
        let rows = select::linearize_index("take_along_dim", index, extent_or_one(self, d), None, true)?;
        let rows = rows.reshape(index.shape())?.broadcast_to(&i_shape)?;
        self.broadcast_to(&x_shape)?.gather(dim, &rows)
    }

    /// Returns a copy of `self` with `src` written at the positions in `index`: PyTorch's `scatter`. Of
    /// repeated indices, the last one in order wins.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// The ranks differ. `index` exceeds `src` in an extent, or `self` in a dimension other than `dim`.
    #[track_caller]
    pub fn scatter(&self, dim: isize, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        self.scatter_op("scatter", dim, index, src, ScatterOp::Set, ScatterTarget::Copy)
    }

    /// Returns a copy of `self` with `src` added at the positions in `index`.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn scatter_add(&self, dim: isize, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        dispatch_autocast!("scatter_add", [self, src], |x, src| x.scatter_add(dim, index, &src));
        self.scatter_op("scatter_add", dim, index, src, ScatterOp::Add, ScatterTarget::Copy)
    }

    #[track_caller]
    pub(super) fn scatter_op(
        &self,
        op: &'static str,
        dim: isize,
        index: &Tensor,
        src: &Tensor,
        how: ScatterOp,
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!(op);
        let d = normalize_dim(op, dim, self.rank())?;
        self.check_scatter(op, d, index, src)?;
        let (index, src) = (&target.input(self, index)?, &target.input(self, src)?);
        let out = target.scatter(self, &IndexedElements::new(op, d, index), src, how)?;
        let (index, src_shape): (_, Dims) = (SavedTensor::input(index), src.shape().into());
        Ok(autograd::differentiable(op, out, &[self, src], move |g, ctx| {
            let index = index.unpack(ctx)?;
            let self_grad = ctx.needs_input_grad[0].then(|| match how {
                ScatterOp::Add => Ok(g.clone()),
                _ => g.scatter_value(d as isize, &index, 0),
            });
            // Elements of the source beyond the index's shape were not used.
            let src_grad = ctx.needs_input_grad[1].then(|| {
                let gathered = g.gather(d as isize, &index)?;
                if gathered.shape() == &src_shape[..] {
                    return Ok(gathered);
                }
                if ctx.create_graph() {
                    return pad_ends(&gathered, &src_shape, 0.0);
                }
                let zeros = Tensor::zeros(&src_shape, g.dtype(), g.device())?;
                gathered.copy_into(&leading_part(&zeros, gathered.shape())?)?;
                Ok(zeros)
            });
            Ok(smallvec![self_grad.transpose()?, src_grad.transpose()?])
        }))
    }

    /// Returns a copy of `self` with a scalar written at the positions in `index`.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// The dtype cannot hold the scalar. See also [`scatter`](Self::scatter).
    #[track_caller]
    pub fn scatter_value(&self, dim: isize, index: &Tensor, value: impl Into<Scalar>) -> Result<Tensor> {
        self.scatter_value_to(dim, index, value.into(), ScatterTarget::Copy)
    }

    #[track_caller]
    pub(super) fn scatter_value_to(
        &self,
        dim: isize,
        index: &Tensor,
        value: Scalar,
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!("scatter");
        let d = normalize_dim("scatter", dim, self.rank())?;
        self.check_index("scatter", d, index)?;
        let value = value.checked_cast("scatter", self.dtype())?;
        let index = &target.input(self, index)?;
        let out = target.written(self)?;
        // The kernel's scalar parameter is f32.
        let wide = matches!(out.dtype(), DType::F64 | DType::I32 | DType::U32 | DType::I64);
        let scalar = wide.then(|| scalar_like(value, &out)).transpose()?;
        let source = match &scalar {
            Some(scalar) => ScatterSource::Tensor(scalar, Dims::from_elem(0, out.rank())),
            None => ScatterSource::Scalar(value),
        };
        scatter_into(&IndexedElements::new("scatter", d, index), &out, &source, (ScatterOp::Set, None))?;
        let index = SavedTensor::input(index);
        Ok(autograd::differentiable_unary("scatter", out, self, move |g, ctx| {
            let index = index.unpack(ctx)?;
            g.scatter_value(dim, &index, 0)
        }))
    }

    /// Returns a copy of `self` with alpha · `src` added to the indices of one dimension that the
    /// one-dimensional `index` names.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// The shapes do not fit, `src` has another type, or the types are integers and alpha is not.
    #[doc(alias = "scatter")]
    #[doc(alias = "scatter_add")]
    #[doc(alias = "index_put")]
    #[track_caller]
    pub fn index_add(
        &self,
        dim: isize,
        index: &Tensor,
        src: &Tensor,
        alpha: impl Into<Scalar>,
    ) -> Result<Tensor> {
        self.index_add_to(dim, index, src, alpha.into(), ScatterTarget::Copy)
    }

    #[track_caller]
    pub(super) fn index_add_to(
        &self,
        dim: isize,
        index: &Tensor,
        src: &Tensor,
        alpha: Scalar,
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!("index_add");
        let d = normalize_dim("index_add", dim, self.rank())?;
        self.check_source("index_add", src)?;
        let factor = alpha.to_integer();
        if !self.dtype().is_float() && factor.is_none() {
            fail_if!(alpha.to_f64().fract() == 0.0; argument("index_add"), "alpha {alpha} is not a value of i64");
            fail!(
                argument("index_add"),
                "alpha is a whole number where the tensor is {}; got {alpha}",
                self.dtype()
            );
        }
        let index = &target.input(self, index)?;
        let scaled = match factor {
            Some(1) => target.input(self, src)?,
            Some(factor) if !self.dtype().is_float() => src.mul(factor)?.to_dtype(src.dtype())?,
            _ => src.mul(alpha)?,
        };
        let rows = self.check_index_rows("index_add", d, index, src.shape())?;
        let out = target.scatter(self, &rows, &scaled, ScatterOp::Add)?;
        let index = SavedTensor::input(index);
        Ok(autograd::differentiable("index_add", out, &[self, src], move |g, ctx| {
            let index = index.unpack(ctx)?;
            let self_grad = ctx.needs_input_grad[0].then(|| g.clone());
            let src_grad = ctx.needs_input_grad[1].then(|| {
                let rows = g.index_select(d as isize, &index)?;
                if factor == Some(1) { Ok(rows) } else { rows.mul(alpha) }
            });
            Ok(smallvec![self_grad, src_grad.transpose()?])
        }))
    }

    /// Returns a copy of `self` with one value at the indices of one dimension that the one-dimensional
    /// `index` names. The value is a scalar or a zero-dimensional tensor.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// `index` has more than one dimension, or `value` at least one. The dtype cannot hold the scalar.
    #[track_caller]
    pub fn index_fill<'a>(&self, dim: isize, index: &Tensor, value: impl IntoOperand<'a>) -> Result<Tensor> {
        self.index_fill_to(dim, index, value.into(), ScatterTarget::Copy)
    }

    #[track_caller]
    pub(super) fn index_fill_to(
        &self,
        dim: isize,
        index: &Tensor,
        value: Operand<'_>,
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!(OP = "index_fill");
        let d = normalize_dim(OP, dim, self.rank())?;
        fail_if!(value.as_tensor().is_some_and(|value| value.rank() > 0);
            shape(OP, [self, index]), "the value is a scalar or a tensor without dimensions");
        let shape = with_extent(self.shape(), d, index.numel());
        let rows = self.check_index_rows(OP, d, index, &shape)?;
        if target == ScatterTarget::Operand {
            let scalar = empty_workspace(&[], self.dtype(), self.device())?;
            scalar.fill_(self.fill_operand(OP, value)?)?;
            let rows = IndexedElements::rows(OP, d, &target.input(self, index)?, &shape);
            let out = target.written(self)?;
            let source = ScatterSource::Tensor(&scalar, Dims::from_elem(0, shape.len()));
            if index.numel() > 0 {
                scatter_into(&rows, &out, &source, (ScatterOp::Set, None))?;
            }
            return Ok(out);
        }
        let mask = Tensor::zeros(self.shape(), DType::Bool, self.device())?;
        let one = ScatterSource::Scalar(1.0.into());
        // A zero-dimensional tensor has one element even if the index is empty.
        if index.numel() > 0 {
            scatter_into(&rows, &mask, &one, (ScatterOp::Set, None))?;
        }
        self.masked_fill(&mask, value)
    }

    /// Checks a one-dimensional index against rows of shape `src`, and returns both.
    fn check_index_rows(
        &self,
        op: &'static str,
        d: usize,
        index: &Tensor,
        src: &[usize],
    ) -> Result<IndexedElements> {
        let expected = with_extent(self.shape(), d, index.numel());
        fail_if!(index.rank() > 1 || src != &expected[..]; shape(op, &[self.shape(), index.shape(), src]),
            "the index has one dimension, and the source the shape {expected:?}");
        Ok(IndexedElements::rows(op, d, index, src))
    }
}

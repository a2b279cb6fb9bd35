//! Reductions over any dimensions: one record describes a reduction, and one function runs all of them.
//!
//! Dimensions may be negative, and an empty list means all of them. 16-bit floats are summed in f32. Sums of integers,
//! counts and indices are i64 on every device. Partial results are combined in a fixed order, without atomics.
//!
//! A new reduction is one more [`ReduceOp`], with expressions for the element, the combination and the result.

mod extreme_grad;
pub(crate) mod scan;
pub(crate) mod statistics;

use self::extreme_grad::{TieRule, share_among_ties};
use self::statistics::DIVIDED;
use super::shape::cat;
use crate::ops::kernel::heuristics::{ReduceConfig, supports_vec4};
use crate::ops::prelude::*;
use crate::runtime::device::KernelKey;
use crate::tensor::layout::{collapse_tensor_dims, contiguous_strides};

#[derive(Clone, Copy, Debug)]
pub(crate) struct ReduceOp {
    /// PyTorch's name.
    pub(crate) name: &'static str,
    /// Expression of the combined value, from the element `v`, the centre `m` and `p.args`; or `nonzero`.
    pub(crate) map: &'static str,
    /// If true, `map` also has `k`, the first element of the output: see [`ReduceDims::first_elements`].
    pub(crate) from_first: bool,
    pub(crate) combine: Combine,
    /// Expression of the result, from the combined `acc`, `m` and `p.args`.
    pub(crate) post: &'static str,
    /// Files of shaders/wgsl/math that the expressions need, in order of inclusion.
    pub(crate) math_files: &'static [&'static str],
    /// Result over no elements. `None` for extremes, which are then an error.
    pub(crate) empty_value: Option<f64>,
}

kernel_variants! {
    /// Operation that combines two values.
    pub(crate) enum Combine {
        Sum = "sum",
        Prod = "prod",
        Max = "max",
        Min = "min",
        Argmax = "argmax",
        Argmin = "argmin",
    }
}

impl ReduceOp {
    const fn plain(name: &'static str, combine: Combine, empty: Option<f64>) -> Self {
        Self { name, map: "v", from_first: false, combine, post: "acc", math_files: &[], empty_value: empty }
    }
}

static SUM: ReduceOp = ReduceOp::plain("sum", Combine::Sum, Some(0.0));
/// Sum in f32, rounded to a value of bf16.
static SUM_IN_BF16: ReduceOp = ReduceOp {
    post: "m_round_bf16(acc)",
    math_files: &["round_bf16"],
    ..ReduceOp::plain("sum", Combine::Sum, Some(0.0))
};
static PROD: ReduceOp = ReduceOp::plain("prod", Combine::Prod, Some(1.0));
static AMAX: ReduceOp = ReduceOp::plain("amax", Combine::Max, None);
static AMIN: ReduceOp = ReduceOp::plain("amin", Combine::Min, None);
static ARGMAX: ReduceOp = ReduceOp::plain("argmax", Combine::Argmax, None);
static ARGMIN: ReduceOp = ReduceOp::plain("argmin", Combine::Argmin, None);
static MEAN: ReduceOp = ReduceOp { post: DIVIDED, ..ReduceOp::plain("mean", Combine::Sum, Some(f64::NAN)) };
static ANY: ReduceOp = ReduceOp { map: "nonzero", ..ReduceOp::plain("any", Combine::Max, Some(0.0)) };
static ALL: ReduceOp = ReduceOp { map: "nonzero", ..ReduceOp::plain("all", Combine::Min, Some(1.0)) };
static COUNT: ReduceOp =
    ReduceOp { map: "nonzero", ..ReduceOp::plain("count_nonzero", Combine::Sum, Some(0.0)) };

/// Dimensions of a shape that are reduced.
#[derive(Clone, Debug)]
pub(crate) struct ReduceDims {
    is_reduced: SmallVec<[bool; 6]>,
    pub(crate) input_shape: Dims,
    /// Shape of the input with 1 for each reduced dimension.
    pub(crate) keepdim_shape: Dims,
    /// Number of elements that make one output.
    pub(crate) elements_per_output: usize,
}

impl ReduceDims {
    /// Resolves the dimensions, where an empty list means all.
    #[track_caller]
    pub(crate) fn new(op: &'static str, shape: &[usize], dims: &[isize]) -> Result<Self> {
        let mut reduced: SmallVec<[bool; 6]> = SmallVec::from_elem(dims.is_empty(), shape.len());
        for &dim in dims {
            let d = normalize_dim(op, dim, shape.len())?;
            let repeats = reduced.get_mut(d).is_some_and(|slot| std::mem::replace(slot, true));
            fail_if!(repeats; argument(op), "dimension {dim} appears twice in {dims:?}");
        }
        Ok(Self::from_mask(shape, reduced))
    }

    fn from_mask(shape: &[usize], is_reduced: SmallVec<[bool; 6]>) -> Self {
        let (input_shape, mut keepdim_shape) = (Dims::from_slice(shape), Dims::from_slice(shape));
        keepdim_shape.iter_mut().zip(&is_reduced).filter(|(_, r)| **r).for_each(|(n, _)| *n = 1);
        let reduced = shape.iter().zip(&is_reduced).filter(|(_, r)| **r);
        let elements_per_output = reduced.map(|(n, _)| n).product();
        Self { is_reduced, input_shape, keepdim_shape, elements_per_output }
    }

    pub(crate) fn result_shape(&self, keepdim: bool) -> Dims {
        if keepdim {
            return Dims::from_slice(&self.keepdim_shape);
        }
        let mut left = Dims::new();
        self.input_shape.iter().zip(&self.is_reduced).filter(|(_, r)| !**r).for_each(|(&n, _)| left.push(n));
        left
    }

    /// Fails if extremes of no elements are requested.
    fn check_extremes(&self, op: &'static str, keepdim: bool) -> Result<()> {
        fail_if!(self.elements_per_output == 0 && numel(&self.result_shape(keepdim)) > 0;
            shape(op, &[&self.input_shape]), "the dimensions reduced have no elements, and nothing is their extreme");
        Ok(())
    }

    /// Expands a tensor of the result's shape, with or without the reduced dimensions, to the input's.
    pub(crate) fn expand_to_input(&self, t: &Tensor) -> Result<Tensor> {
        t.reshape(&self.keepdim_shape[..])?.broadcast_to(&self.input_shape)
    }

    /// Returns the first element of each output as a view, with keepdim.
    #[track_caller]
    pub(crate) fn first_elements(&self, x: &Tensor) -> Result<Tensor> {
        let reduced = self.is_reduced.iter().enumerate().filter(|(_, r)| **r);
        reduced.map(|(d, _)| d as isize).try_fold(x.clone(), |first, d| first.narrow(d, 0, 1))
    }

    /// Returns the numbers of elements before, in and after the reduced dimensions of a contiguous input, or `None` if
    /// kept dimensions lie between them.
    fn adjacent_extents(&self) -> Option<[usize; 3]> {
        let mut extents = [1; 3];
        let mut part = 0;
        for (&n, &is_reduced) in self.input_shape.iter().zip(&self.is_reduced).filter(|(n, _)| **n != 1) {
            match (part, is_reduced) {
                (0, true) => part = 1,
                (1, false) => part = 2,
                (2, true) => return None,
                _ => {}
            }
            extents[part] *= n;
        }
        Some(extents)
    }

    /// Returns the extents and strides of the kept dimensions, or of the reduced ones.
    fn select_dims(&self, layout: &Layout, reduced: bool) -> SmallVec<[(usize, usize); 6]> {
        let mut side = SmallVec::new();
        let dims = layout.shape().iter().zip(layout.strides()).zip(&self.is_reduced);
        dims.filter(|(_, r)| **r == reduced).for_each(|((&n, &s), _)| side.push((n, s)));
        side
    }
}

/// Inputs of a run in addition to the reduced tensor.
#[derive(Clone, Copy, Default)]
pub(crate) struct ReduceArgs<'a> {
    /// `m` of each output.
    pub(crate) center: Option<&'a Tensor>,
    /// Indices from the first stage.
    pub(super) partial_indices: Option<&'a Tensor>,
    /// Factor of each element, with the strides of the reduced tensor. The products are in f32.
    pub(super) factor: Option<&'a Tensor>,
    pub(crate) params: [f32; 4],
}

impl ReduceArgs<'_> {
    /// Returns arguments with two parameters, followed by the rest of each that f32 rounds off.
    pub(crate) fn with_params(x: f64, y: f64) -> Self {
        let rest = |v: f64| (v - f64::from(v as f32)) as f32;
        Self { params: [x as f32, y as f32, rest(x), rest(y)], ..Self::default() }
    }
}

/// One launch of a reduction, with the input's layout split into kept and reduced dimensions.
struct ReduceStage<'a> {
    /// Reduction, with the expressions that this stage applies to elements and to results.
    op: ReduceOp,
    input: &'a Tensor,
    offset: usize,
    kept: (Dims, Dims),
    reduced: (Dims, Dims),
    args: ReduceArgs<'a>,
    compute: DType,
    /// Elements of one read: one, or four along the inner reduced dimension (kept, if `across`), counted in vectors.
    width: usize,
    /// True if neighbouring threads hold neighbouring outputs.
    across: bool,
}

impl ReduceStage<'_> {
    /// Counts the inner dimension in vectors of four, if elements are aligned and no index is needed.
    fn vectorize_inner(&mut self) {
        let arg = matches!(self.op.combine, Combine::Argmax | Combine::Argmin);
        let inner = if self.across { &mut self.kept } else { &mut self.reduced };
        let (Some(n), Some(s)) = (inner.0.last_mut(), inner.1.last_mut()) else { return };
        let has_quads =
            |t: &Tensor| supports_vec4(t.dtype()) && t.layout().offset().is_multiple_of(VEC4_WIDTH);
        let reads_quads = supports_vec4(self.input.dtype()) && self.args.factor.is_none_or(has_quads);
        if arg || !reads_quads || *s != 1 || !n.is_multiple_of(VEC4_WIDTH) {
            return;
        }
        (*n, *s) = (*n / VEC4_WIDTH, VEC4_WIDTH);
        let aligned = |strides: &[usize]| strides.iter().all(|s| s.is_multiple_of(VEC4_WIDTH));
        if self.offset.is_multiple_of(VEC4_WIDTH) && aligned(&self.kept.1) && aligned(&self.reduced.1) {
            self.width = VEC4_WIDTH;
            return;
        }
        let inner = if self.across { &mut self.kept } else { &mut self.reduced };
        if let (Some(n), Some(s)) = (inner.0.last_mut(), inner.1.last_mut()) {
            (*n, *s) = (*n * VEC4_WIDTH, 1);
        }
    }

    /// Returns the thread layout for `launch`.
    fn config(&self) -> ReduceConfig {
        ReduceConfig::new(numel(&self.kept.0), numel(&self.reduced.0), self.across)
    }

    fn launch(&self, plan: ReduceConfig, value: Option<&Tensor>, indices: Option<&Tensor>) -> Result<()> {
        let across = self.across;
        let device = self.input.device();
        let name = |t: &Tensor| launch::shader_dtype_name(t.dtype(), device);
        let compute = launch::shader_dtype_name(self.compute, device);
        for (shape, _) in [&self.kept, &self.reduced] {
            launch::check_rank(self.op.name, shape.len())?;
        }
        let (out, index) = (value.map_or(compute, name), indices.map_or("", name));
        let (factor, center) = (self.args.factor.map_or("", name), self.args.center.map_or("", name));
        let (map, combine, post) = (self.op.map, self.op.combine, self.op.post);
        let words = [name(self.input), compute, out, index, map, combine.word(), post, factor, center];
        let (outputs, extent) = (numel(&self.kept.0), numel(&self.reduced.0));
        let rows = WORKGROUP_SIZE / plan.threads_per_row;
        let staged = indices.is_none()
            && !across
            && plan.splits == 1
            && value.is_some_and(|v| matches!(v.dtype(), DType::F16 | DType::BF16))
            && [rows, outputs].iter().all(|n| n.is_multiple_of(VEC4_WIDTH));
        let (has_indices, from_first) = (self.args.partial_indices.is_some(), self.op.from_first);
        // Positions are divided by the inner extent of two dimensions.
        let (is_flat, planar) = (self.reduced.0.len() <= 1, self.reduced.0.len() == 2);
        let f32_division = planar && self.reduced.0[0] < 1 << 20 && extent < 1 << 31;
        let mut key = KernelKey::new("reduce");
        words.iter().for_each(|word| key.push_str(word));
        key.push_strs(self.op.math_files);
        key.push_flags(&[value.is_some(), has_indices, from_first, is_flat, planar]);
        key.push_flags(&[f32_division, across, staged]);
        key.push_number(plan.threads_per_row as u64 | (self.width as u64) << 16 | (plan.unroll as u64) << 32);
        let spec = || {
            kernel_spec! {
                "reduce", source: name(self.input), compute, out, index, math: self.op.math_files,
                map, from_first, combine, post, factor, center, values: value.is_some(),
                has_indices, flat: is_flat, planar, f32_division, threads_per_row: plan.threads_per_row, across,
                width: self.width, unroll: plan.unroll, staged,
            }
        };
        let params = kernel_params! {
            outputs, extent, splits: plan.splits, chunk: plan.chunk, offset: self.offset,
            kept_rank: self.kept.0.len(), reduced_rank: self.reduced.0.len(),
            factor_offset: self.args.factor.map_or(0, |t| t.layout().offset()), args: self.args.params,
            kept_shape: &self.kept.0, kept_strides: &self.kept.1, reduced_shape: &self.reduced.0,
            reduced_strides: &self.reduced.1,
        };
        // Loop iterations over the reads, over their unmerged dimensions, and to locate the output.
        let reads = plan.chunk.min(extent).div_ceil(plan.threads_per_row);
        let offset_iterations = if is_flat || planar { 0 } else { reads * self.reduced.0.len() };
        let params =
            params.loop_iterations(reads.div_ceil(plan.unroll) + plan.unroll + offset_iterations + 16);
        let ReduceArgs { factor, center, partial_indices, .. } = self.args;
        let tensors = bindings![self.input, factor, center, partial_indices, value, indices];
        let groups = (outputs * plan.splits).div_ceil(rows);
        launch::launch_by_key(&key, spec, &tensors, params, groups)
    }
}

/// Runs a reduction of `x` into `value` and `indices`, which are contiguous with one element for each output.
fn run_reduction(
    op: &ReduceOp,
    x: &Tensor,
    axes: &ReduceDims,
    compute: DType,
    extra: ReduceArgs<'_>,
    value: Option<&Tensor>,
    indices: Option<&Tensor>,
) -> Result<()> {
    let bytes_only = matches!(compute, DType::Bool | DType::U8);
    let compute = if bytes_only { DType::U32 } else { compute };
    launch::check_device_dtype_or_words(op.name, compute, x.device())?;
    fail_if!(compute == DType::F64 && !op.math_files.is_empty();
        dtype(op.name, compute), "takes f32, f16 and bf16; cast with `to_dtype`");
    let mut reduced = axes.select_dims(x.layout(), true);
    if indices.is_none() {
        // Values do not depend on the order, so read in memory order. Indices need the order of the shape.
        reduced.sort_by_key(|&(n, s)| (std::cmp::Reverse(s), n));
    }
    let (kept, reduced) =
        (collapse_tensor_dims(axes.select_dims(x.layout(), false)), collapse_tensor_dims(reduced));
    let inner = |side: &(Dims, Dims)| side.1.last().copied().unwrap_or(usize::MAX);
    let outputs = numel(&kept.0);
    let mut stage = ReduceStage {
        op: *op,
        input: x,
        offset: x.layout().offset(),
        across: inner(&kept) < inner(&reduced),
        kept,
        reduced,
        args: extra,
        compute,
        width: 1,
    };
    stage.vectorize_inner();
    let first = stage.config();
    if first.splits == 1 {
        return stage.launch(first, value, indices);
    }
    let partial = |dtype| empty_workspace(&[first.splits, outputs], dtype, x.device());
    let values = partial(accumulator_dtype(compute))?;
    let part_indices = indices.map(|_| partial(DType::U32)).transpose()?;
    let plain = ReduceOp { post: "acc", ..*op };
    ReduceStage { op: plain, ..stage }.launch(first, Some(&values), part_indices.as_ref())?;
    let mut second = ReduceStage {
        op: ReduceOp { map: "v", from_first: false, ..*op },
        input: &values,
        offset: 0,
        kept: (smallvec![outputs], smallvec![1]),
        reduced: (smallvec![first.splits], smallvec![outputs]),
        args: ReduceArgs { partial_indices: part_indices.as_ref(), factor: None, ..extra },
        compute,
        width: 1,
        // The parts of a single output are contiguous.
        across: outputs > 1,
    };
    second.vectorize_inner();
    // The second stage is short and needs no further split.
    let ReduceConfig { threads_per_row, unroll, .. } = second.config();
    let steps = numel(&second.reduced.0);
    second.launch(ReduceConfig { threads_per_row, unroll, chunk: steps, splits: 1 }, value, indices)
}

/// Returns the type of sums and partial results: f32 for 16-bit floats, so that a sum is rounded once.
pub(super) fn accumulator_dtype(dtype: DType) -> DType {
    if dtype.size() == 2 { DType::F32 } else { dtype }
}

/// Runs a reduction to a new tensor of values. Not recorded.
#[track_caller]
pub(crate) fn reduce(
    op: &ReduceOp,
    x: &Tensor,
    axes: &ReduceDims,
    keepdim: bool,
    compute: DType,
    result: DType,
    extra: ReduceArgs<'_>,
) -> Result<Tensor> {
    operation!(op.name);
    let shape = axes.result_shape(keepdim);
    match op.empty_value {
        Some(value) if axes.elements_per_output == 0 && numel(&shape) > 0 => {
            return Tensor::full(&shape, value, result, x.device());
        }
        Some(_) => {}
        None => axes.check_extremes(op.name, keepdim)?,
    }
    let out = Tensor::empty(&shape, result, x.device())?;
    if out.numel() > 0 {
        run_reduction(op, x, axes, compute, extra, Some(&out), None)?;
    }
    Ok(out)
}

/// Reduces floats to their own type. 16-bit floats are accumulated in f32.
#[track_caller]
pub(crate) fn reduce_float(
    op: &ReduceOp,
    x: &Tensor,
    axes: &ReduceDims,
    keepdim: bool,
    extra: ReduceArgs<'_>,
) -> Result<Tensor> {
    fail_if!(!x.dtype().is_float(); dtype(op.name, x.dtype()), "takes floats; cast with `to_dtype`");
    reduce(op, x, axes, keepdim, x.dtype(), x.dtype(), extra)
}

/// Computes a sum or a product; integers give i64.
#[track_caller]
fn sum_or_prod(op: &ReduceOp, x: &Tensor, axes: &ReduceDims, keepdim: bool) -> Result<Tensor> {
    if x.dtype().is_float() {
        return reduce_float(op, x, axes, keepdim, ReduceArgs::default());
    }
    launch::check_computable(op.name, x)?;
    // Bools are counted in 32 bits, which every device supports.
    let compute = if x.dtype() == DType::Bool { DType::U32 } else { DType::I64 };
    reduce(op, x, axes, keepdim, compute, DType::I64, ReduceArgs::default())
}

/// Sums a 16-bit tensor in f32, to a shape that broadcasts to its own. Returns type `result`, without a gradient.
#[track_caller]
pub(super) fn sum_to_dtype(x: &Tensor, shape: &[usize], result: DType) -> Result<Tensor> {
    let skip = x.rank() - shape.len();
    let reduced = (0..x.rank()).map(|d| d < skip || (shape[d - skip] == 1 && x.shape()[d] != 1));
    let axes = ReduceDims::from_mask(x.shape(), reduced.collect());
    let out = reduce(&SUM, &x.detach(), &axes, true, DType::F32, result, ReduceArgs::default())?;
    Ok(out.with_layout(Layout::new(shape, contiguous_strides(shape), 0)))
}

/// Sums the products of two tensors of one shape to a shape that broadcasts to theirs, without a gradient. The products
/// are in f32 and never written. Returns `None` for tensors that the kernel cannot read together: other types than
/// f32, f16 and bf16, or unequal strides that a copy of 16-bit elements does not make equal.
#[track_caller]
pub(super) fn sum_products_to(
    x: &Tensor,
    factor: &Tensor,
    shape: &[usize],
    result: DType,
) -> Result<Option<Tensor>> {
    let takes = |t: &Tensor| matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16);
    if x.shape() != factor.shape() || !takes(x) || !takes(factor) {
        return Ok(None);
    }
    let has_equal_strides = x.strides() == factor.strides();
    // A copy of 16-bit elements is smaller than the products in f32.
    if !(has_equal_strides || (factor.is_contiguous() && x.dtype().size() == 2)) {
        return Ok(None);
    }
    let x = &if has_equal_strides { x.detach() } else { x.detach().contiguous()? };
    let skip = x.rank() - shape.len();
    let reduced = (0..x.rank()).map(|d| d < skip || (shape[d - skip] == 1 && x.shape()[d] != 1));
    let axes = ReduceDims::from_mask(x.shape(), reduced.collect());
    let args = ReduceArgs { factor: Some(factor), ..ReduceArgs::default() };
    let out = reduce(&SUM, x, &axes, true, DType::F32, result, args)?;
    Ok(Some(out.with_layout(Layout::new(shape, contiguous_strides(shape), 0))))
}

/// Sums a matrix's columns to a tensor of type `result`, without a gradient.
#[track_caller]
pub(super) fn sum_columns(x: &Tensor, result: DType) -> Result<Tensor> {
    let axes = ReduceDims::new(SUM.name, x.shape(), &[0])?;
    reduce(&SUM, x, &axes, false, x.dtype(), result, ReduceArgs::default())
}

/// Sums over the first dimension, which becomes 1, to a tensor of type `result`, without a gradient.
#[track_caller]
pub(super) fn sum_first_dim(x: &Tensor, result: DType) -> Result<Tensor> {
    let axes = ReduceDims::new(SUM.name, x.shape(), &[0])?;
    reduce(&SUM, x, &axes, true, x.dtype(), result, ReduceArgs::default())
}

/// Sums over the first `count` dimensions, which are dropped, to a tensor of type `result`, without a gradient.
#[track_caller]
pub(super) fn sum_first_dims(x: &Tensor, count: isize, result: DType) -> Result<Tensor> {
    let dims: SmallVec<[isize; 4]> = (0..count).collect();
    let axes = ReduceDims::new(SUM.name, x.shape(), &dims)?;
    reduce(&SUM, x, &axes, false, x.dtype(), result, ReduceArgs::default())
}

/// Sums over the first dimension of an f32 tensor with any strides. The result is contiguous and f32, without the first
/// dimension, and has values of bf16: those of [`sum_first_dim`] to bf16, if both add in the same order.
#[track_caller]
pub(super) fn sum_first_dim_in_bf16(x: &Tensor) -> Result<Tensor> {
    let axes = ReduceDims::new(SUM_IN_BF16.name, x.shape(), &[0])?;
    reduce(&SUM_IN_BF16, x, &axes, false, DType::F32, DType::F32, ReduceArgs::default())
}

/// Sums over the first dimension of `partial` \[parts, sections, extent\], f32. Returns one tensor for each
/// section (at most three) from one launch.
#[track_caller]
pub(super) fn sum_parts(partial: &Tensor) -> Result<SmallVec<[Tensor; 3]>> {
    let &[parts, sections, extent] = partial.shape() else {
        fail!(shape("sum_partials", [partial]), "takes [parts, sections, extent]")
    };
    let outs: SmallVec<[Tensor; 3]> = (0..sections)
        .map(|_| Tensor::empty([extent], DType::F32, partial.device()))
        .collect::<Result<_>>()?;
    if extent > 0 {
        let width = if extent.is_multiple_of(VEC4_WIDTH) { VEC4_WIDTH } else { 1 };
        let spec = kernel_spec! { "sum_partials", outs: sections, width };
        let tiles = extent.div_ceil(4 * width);
        let params = kernel_params! {
            parts, extent, tiles, groups: sections * tiles,
        }
        .loop_iterations(parts.div_ceil(512) + 32);
        launch::launch(&spec, &bindings![partial, &outs[..]], params, sections * tiles)?;
    }
    Ok(outs)
}

/// Computes the gradient of selecting elements along a dimension: adds `g` at `index` into zeros of `shape`.
pub(super) fn value_selecting_backward(
    g: &Tensor,
    index: &Tensor,
    shape: &[usize],
    dim: isize,
    keepdim: bool,
) -> Result<Tensor> {
    let zeros = Tensor::zeros(shape, g.dtype(), g.device())?;
    if keepdim || shape.is_empty() {
        return zeros.scatter_add(dim, index, g);
    }
    zeros.scatter_add(dim, &index.unsqueeze(dim)?, &g.unsqueeze(dim)?)
}

/// Returns a contiguous tensor at offset 0 of its storage, for kernels that take no offset.
#[track_caller]
pub(crate) fn contiguous_zero_offset(t: &Tensor) -> Result<Tensor> {
    if t.is_contiguous() && t.layout().offset() == 0 { Ok(t.detach()) } else { t.detach().copy() }
}

impl Tensor {
    /// Sums over `dims`, or over all dimensions for `()` or an empty list.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[2, 3, 4], DType::F32, &device)?;
    /// assert_eq!(x.sum(&[0, -1], false)?.shape(), [3]);
    /// assert_eq!(x.sum(&[1], true)?.shape(), [2, 1, 4]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// A dimension is out of range or repeated.
    #[track_caller]
    pub fn sum(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        let axes = ReduceDims::new("sum", self.shape(), dims)?;
        let dtype = self.dtype();
        let is_half = dtype.is_float() && dtype.size() == 2;
        if !is_half || amp::OperandCast::for_op("sum", &[Some(dtype)]).is_none() {
            let out = sum_or_prod(&SUM, self, &axes, keepdim)?;
            return Ok(autograd::differentiable_unary("sum", out, self, move |g, _| axes.expand_to_input(g)));
        }
        // The kernel adds in f32, so autocast changes the type of the sum, and no element is cast.
        let out = reduce(&SUM, self, &axes, keepdim, dtype, DType::F32, ReduceArgs::default())?;
        Ok(autograd::differentiable_unary("sum", out, self, move |g, _| {
            axes.expand_to_input(&g.to_dtype(dtype)?)
        }))
    }

    /// Sums all elements.
    #[track_caller]
    pub fn sum_all(&self) -> Result<Tensor> {
        self.sum((), false)
    }

    /// Sums over the dimensions that broadcasting from `shape` expanded.
    #[track_caller]
    pub(crate) fn sum_to(&self, shape: &[usize]) -> Result<Tensor> {
        if self.shape() == shape {
            return Ok(self.clone());
        }
        // Fails if the shape does not broadcast to this one.
        Layout::contiguous(shape).broadcast_to("sum_to", self.shape())?;
        let skip = self.rank() - shape.len();
        let reduced = (0..self.rank()).map(|d| d < skip || (shape[d - skip] == 1 && self.shape()[d] != 1));
        let axes = ReduceDims::from_mask(self.shape(), reduced.collect());
        let out = sum_or_prod(&SUM, self, &axes, true)?;
        let out = out.with_layout(Layout::new(shape, contiguous_strides(shape), 0));
        Ok(autograd::differentiable_unary("sum_to", out, self, move |g, _| axes.expand_to_input(g)))
    }

    /// Sums to a shape that broadcasts to this one, the inverse of an expansion: PyTorch's `sum_to_size`.
    #[track_caller]
    pub fn sum_to_size(&self, shape: impl IntoShape) -> Result<Tensor> {
        operation!(OP = "sum_to_size");
        self.sum_to(&new_shape(OP, shape)?)
    }

    /// Computes the mean over `dims`, or over all dimensions if there are none.
    ///
    /// # Errors
    /// The dtype is not a float. See also [`sum`](Self::sum).
    #[track_caller]
    pub fn mean(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        let axes = ReduceDims::new("mean", self.shape(), dims)?;
        let n = axes.elements_per_output as f64;
        let extra = ReduceArgs::with_params(n, 0.0);
        let out = reduce_float(&MEAN, self, &axes, keepdim, extra)?;
        Ok(autograd::differentiable_unary("mean", out, self, move |g, _| axes.expand_to_input(&g.div(n)?)))
    }

    /// Computes the mean of all elements.
    #[track_caller]
    pub fn mean_all(&self) -> Result<Tensor> {
        self.mean((), false)
    }

    /// Computes the product over one dimension, or over all for `()`.
    ///
    /// # Errors
    /// Several dimensions are named. See also [`sum`](Self::sum).
    #[track_caller]
    pub fn prod(&self, dim: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let Some(dim) = single_dim("prod", dim)? else {
            let all = self.prod_all()?;
            return if keepdim { all.reshape(Dims::from_elem(1, self.rank())) } else { Ok(all) };
        };
        dispatch_autocast!("prod", [self], |x| x.prod(dim, keepdim));
        let axes = ReduceDims::new("prod", self.shape(), &[dim])?;
        let out = sum_or_prod(&PROD, self, &axes, keepdim)?;
        let x = self.detach();
        let saved = smallvec![SavedTensor::input(self)];
        let composed = move |x: &[Tensor]| {
            let product = x[0].prod_pairwise(dim)?;
            if keepdim { Ok(product) } else { product.squeeze(dim) }
        };
        Ok(autograd::composite_differentiable("prod", out, &[self], saved, composed, move |g, _| {
            // The product of the other elements avoids a division, so zeros need no special case.
            let others = x.prod_of_others(dim)?;
            Ok(smallvec![Some(axes.expand_to_input(g)?.mul(&others)?)])
        }))
    }

    /// Computes the product over `dim` (keepdim) as a tree of products, differentiable to any order.
    pub(super) fn prod_pairwise(&self, dim: isize) -> Result<Tensor> {
        let mut x = if self.rank() == 0 { self.reshape([1])? } else { self.clone() };
        if x.dim(dim)? == 0 {
            return x.sum([dim], true)?.add(1.0);
        }
        while x.dim(dim)? > 1 {
            let n = x.dim(dim)?;
            let half = n / 2;
            let product = x.narrow(dim, 0, half)?.mul(&x.narrow(dim, half, half)?)?;
            x = match n % 2 {
                0 => product,
                _ => cat(&[&product, &x.narrow(dim, n - 1, 1)?], dim)?,
            };
        }
        if self.rank() == 0 { x.reshape(self.shape()) } else { Ok(x) }
    }

    /// Computes the product of all elements.
    #[track_caller]
    pub fn prod_all(&self) -> Result<Tensor> {
        self.reshape([-1isize])?.prod(0, false)
    }

    #[track_caller]
    fn reduce_extreme(
        &self,
        op: &'static ReduceOp,
        dims: &[isize],
        keepdim: bool,
        rule: TieRule,
    ) -> Result<Tensor> {
        let axes = ReduceDims::new(op.name, self.shape(), dims)?;
        let out = reduce(op, self, &axes, keepdim, self.dtype(), self.dtype(), ReduceArgs::default())?;
        let (x, y) = (SavedTensor::input(self), SavedTensor::output(&out));
        Ok(autograd::differentiable_unary(op.name, out, self, move |g, ctx| {
            let (x, y) = (x.unpack_detached(ctx)?, y.unpack_detached(ctx)?);
            share_among_ties(op.name, rule, &axes, [&x, &y, g])
        }))
    }

    /// Compares elements, where NaN equals NaN.
    pub(super) fn eq_or_both_nan(&self, other: &Tensor) -> Result<Tensor> {
        self.eq(other)?.logical_or(&self.isnan()?.logical_and(&other.isnan()?)?)
    }

    /// Computes the maximum over `dims` (all if there are none), or NaN. Equal elements share the gradient.
    ///
    /// # Errors
    /// There are no elements. See also [`sum`](Self::sum).
    #[track_caller]
    pub fn amax(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        self.reduce_extreme(&AMAX, &reduction_dims(dims), keepdim, TieRule::Equal)
    }

    /// Computes the minimum over `dims` (all if there are none), or NaN. Equal elements share the gradient.
    ///
    /// # Errors
    /// There are no elements. See also [`sum`](Self::sum).
    #[track_caller]
    pub fn amin(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        self.reduce_extreme(&AMIN, &reduction_dims(dims), keepdim, TieRule::Equal)
    }

    /// Computes [`amin`](Self::amin) and [`amax`](Self::amax) over `dims`, in this order.
    #[track_caller]
    pub fn aminmax(&self, dims: impl IntoDims, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let dims = &reduction_dims(dims)[..];
        Ok((self.amin(dims, keepdim)?, self.amax(dims, keepdim)?))
    }

    /// Computes the maximum of all elements. As in PyTorch's `max`, NaN elements share the gradient of a NaN
    /// result. The gradient of [`amax`](Self::amax) is NaN in this case.
    #[track_caller]
    pub fn max_all(&self) -> Result<Tensor> {
        self.reduce_extreme(&AMAX, &[], false, TieRule::EqualOrBothNan)
    }

    /// Computes the minimum of all elements, with gradients as in [`max_all`](Self::max_all).
    #[track_caller]
    pub fn min_all(&self) -> Result<Tensor> {
        self.reduce_extreme(&AMIN, &[], false, TieRule::EqualOrBothNan)
    }

    /// Finds the indices of extremes over `dims`, and the extremes in `value`, if any. Not recorded.
    #[track_caller]
    fn find_extremes(
        &self,
        op: &ReduceOp,
        axes: &ReduceDims,
        keepdim: bool,
        value: Option<&Tensor>,
    ) -> Result<Tensor> {
        let indices = Tensor::empty(axes.result_shape(keepdim), DType::I64, self.device())?;
        if indices.numel() > 0 {
            run_reduction(op, self, axes, self.dtype(), ReduceArgs::default(), value, Some(&indices))?;
        }
        Ok(indices)
    }

    #[track_caller]
    fn reduce_with_index(
        &self,
        op: &'static ReduceOp,
        name: &'static str,
        dim: isize,
        keepdim: bool,
    ) -> Result<(Tensor, Tensor)> {
        operation!(name);
        let axes = ReduceDims::new(name, self.shape(), &[dim])?;
        axes.check_extremes(name, keepdim)?;
        let value = Tensor::empty(axes.result_shape(keepdim), self.dtype(), self.device())?;
        let indices = self.find_extremes(op, &axes, keepdim, Some(&value))?;
        let at = SavedTensor::input(&indices);
        let value = autograd::differentiable_unary(name, value, self, move |g, ctx| {
            value_selecting_backward(g, &at.unpack(ctx)?, &axes.input_shape, dim, keepdim)
        });
        Ok((value, indices))
    }

    /// Returns the maximum over one dimension and its index (i64): the first NaN, or else the first of equal
    /// elements. The gradient goes to that element.
    #[track_caller]
    pub fn max(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.reduce_with_index(&ARGMAX, "max", dim, keepdim)
    }

    /// Returns the minimum over one dimension and its index, under the rules of [`max`](Self::max).
    #[track_caller]
    pub fn min(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.reduce_with_index(&ARGMIN, "min", dim, keepdim)
    }

    #[track_caller]
    fn reduce_to_index(&self, op: &'static ReduceOp, dim: Option<isize>, keepdim: bool) -> Result<Tensor> {
        operation!(op.name);
        let axes = ReduceDims::new(op.name, self.shape(), dim.as_slice())?;
        axes.check_extremes(op.name, keepdim)?;
        self.find_extremes(op, &axes, keepdim, None)
    }

    /// Returns the index (i64) of the first maximum along `dim`, or among all elements for `()`.
    #[track_caller]
    pub fn argmax(&self, dim: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        self.reduce_to_index(&ARGMAX, single_dim("argmax", dim)?, keepdim)
    }

    /// Returns the index (i64) of the first minimum along `dim`, or among all elements for `()`.
    #[track_caller]
    pub fn argmin(&self, dim: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        self.reduce_to_index(&ARGMIN, single_dim("argmin", dim)?, keepdim)
    }

    #[track_caller]
    fn reduce_to_bool(&self, op: &'static ReduceOp, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        let axes = ReduceDims::new(op.name, self.shape(), dims)?;
        let out = reduce(op, self, &axes, keepdim, DType::U32, DType::Bool, ReduceArgs::default())?;
        if self.dtype() == DType::U8 { out.to_dtype(DType::U8) } else { Ok(out) }
    }

    /// Tests whether any element over `dims` (all if there are none) is nonzero. u8 gives u8, as in PyTorch.
    #[track_caller]
    pub fn any(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        self.reduce_to_bool(&ANY, &reduction_dims(dims), keepdim)
    }

    /// Tests whether all elements over `dims` (all if there are none) are nonzero. u8 gives u8, as in PyTorch.
    #[track_caller]
    pub fn all(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        self.reduce_to_bool(&ALL, &reduction_dims(dims), keepdim)
    }

    /// Counts the nonzero elements over `dims` (all if there are none), as i64.
    #[track_caller]
    pub fn count_nonzero(&self, dims: impl IntoDims) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        let axes = ReduceDims::new("count_nonzero", self.shape(), dims)?;
        reduce(&COUNT, self, &axes, false, DType::U32, DType::I64, ReduceArgs::default())
    }
}

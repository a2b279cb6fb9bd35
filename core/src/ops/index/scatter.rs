//! Scatter with reduction (PyTorch's `scatter_reduce`) and indexing by tensors (`index_put` and `index`).

use crate::autograd::BackwardCtx;
use crate::ops::ScatterOp;
use crate::ops::index::sorted_scatter::{
    RowReduction, ScatterBase, can_reduce_rows, reduce_rows, scatter_sorted_runs,
};
use crate::ops::index::{
    IndexedElements, ScatterSource, ScatterTarget, index_dtype_name, leading_part, order, pad_ends,
    scatter_into, select,
};
use crate::ops::kernel::heuristics::supports_vec4;
use crate::ops::prelude::*;

/// Reduction of [`Tensor::scatter_reduce`] for elements with the same index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScatterReduce {
    /// Sum.
    Sum,
    /// Product.
    Prod,
    /// Mean, rounded down for integers.
    Mean,
    /// Maximum.
    Amax,
    /// Minimum.
    Amin,
}

impl ScatterReduce {
    fn scatter_op(self) -> ScatterOp {
        match self {
            Self::Sum | Self::Mean => ScatterOp::Add,
            Self::Prod => ScatterOp::Mul,
            Self::Amax => ScatterOp::Max,
            Self::Amin => ScatterOp::Min,
        }
    }
}

const OP: &str = "scatter_reduce";

#[derive(Clone)]
struct ScatterReduction {
    dim: usize,
    index: Tensor,
    reduce: ScatterReduce,
    include_self: bool,
}

impl ScatterReduction {
    fn scatter(&self, out: &Tensor, source: &ScatterSource<'_>, how: ScatterOp) -> Result<()> {
        scatter_into(&IndexedElements::new(OP, self.dim, &self.index), out, source, (how, None))
    }

    fn scatter_add(&self, to: &Tensor, src: &Tensor) -> Result<Tensor> {
        let out = to.copy()?;
        self.scatter(&out, &src.into(), ScatterOp::Add)?;
        Ok(out)
    }

    /// Counts the elements that each position receives, or returns 1 for positions without any. Dimensions along
    /// which the index repeats have an extent of 1.
    fn count_contributions(&self, like: &Tensor) -> Result<Tensor> {
        let dtype = match like.dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            // The type of the divided values, or a type that converts without 64-bit integers.
            dtype if dtype.is_float() || dtype == DType::U32 => dtype,
            _ => DType::I32,
        };
        let (mut shape, mut index) = (Dims::from(like.shape()), self.index.clone());
        for (d, n) in shape.iter_mut().enumerate() {
            let repeats = index.strides().get(d) == Some(&0) && index.shape()[d] == *n && *n > 1;
            if d != self.dim && repeats {
                index = index.narrow(d as isize, 0, 1)?;
                *n = 1;
            }
        }
        let initial = Tensor::full(&shape, self.include_self, dtype, like.device())?;
        let one = Tensor::ones((), dtype, like.device())?.broadcast_to(index.shape())?;
        Self { index, ..self.clone() }.scatter_add(&initial, &one)?.clamp(1, i64::from(i32::MAX))
    }

    /// Reports whether one kernel computes the result for a tensor of this shape and type.
    fn reduces_rows(&self, shape: &[usize], dtype: DType) -> bool {
        let at = IndexedElements::new(OP, self.dim, &self.index);
        let is_float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        (is_float || self.reduce != ScatterReduce::Mean) && can_reduce_rows(&at, shape)
    }

    fn run(&self, x: &Tensor, src: &Tensor) -> Result<Tensor> {
        if self.reduces_rows(x.shape(), x.dtype()) {
            let at = IndexedElements::new(OP, self.dim, &self.index);
            let averages = self.reduce == ScatterReduce::Mean;
            let reduction = RowReduction { replaces: !self.include_self, averages, ties: None };
            let how = (self.reduce.scatter_op(), None);
            return reduce_rows(&at, (ScatterBase::Copy(x), x.shape()), src, how, reduction);
        }
        let out = x.copy()?;
        if !self.include_self {
            let first = match self.reduce {
                ScatterReduce::Sum | ScatterReduce::Mean => ScatterSource::Scalar(0.0.into()),
                ScatterReduce::Prod => ScatterSource::Scalar(1.0.into()),
                // Any element of the source replaces the old value: an extremum may count it twice.
                ScatterReduce::Amax | ScatterReduce::Amin => src.into(),
            };
            self.scatter(&out, &first, ScatterOp::Set)?;
        }
        self.scatter(&out, &src.into(), self.reduce.scatter_op())?;
        if self.reduce == ScatterReduce::Mean { self.divide_by_counts(&out) } else { Ok(out) }
    }

    fn divide_by_counts(&self, sum: &Tensor) -> Result<Tensor> {
        let counts = self.count_contributions(sum)?;
        match sum.dtype() {
            dtype if dtype.is_float() => sum.div(&counts),
            dtype => sum.floor_divide(&counts)?.to_dtype(dtype),
        }
    }

    /// Computes the product with differentiable products, so that gradients of any order exist, also with
    /// zero factors. Takes the memory of every element of `src` times the extent of the dimension.
    fn prod_composite(&self, x: &Tensor, src: &Tensor) -> Result<Tensor> {
        if x.rank() == 0 {
            let one = Self { index: self.index.reshape([1])?, ..self.clone() };
            return one.prod_composite(&x.reshape([1])?, &src.reshape([1])?)?.reshape(&[] as &[usize]);
        }
        if src.numel() == 0 {
            return Ok(x.clone());
        }
        let (d, n) = (self.dim as isize, x.shape()[self.dim]);
        let index = select::cast_index_to_i32("scatter_reduce", &self.index, None)?;
        let along = with_extent(&Dims::from_elem(1, x.rank() + 1), self.dim, n);
        let positions = Tensor::arange(0.0, n as f64, 1.0, DType::I32, x.device())?.reshape(&along[..])?;
        let is_selected = index.unsqueeze(d)?.eq(&positions)?;
        let factors = src.unsqueeze(d)?.where_(&is_selected, 1.0)?;
        let product = factors.prod_pairwise(d + 1)?.squeeze(d + 1)?;
        // The factor is 1 beyond the extents of the index.
        let product = pad_ends(&product, x.shape(), 1.0)?;
        if self.include_self {
            return x.mul(&product);
        }
        let named = Tensor::zeros(x.shape(), DType::Bool, x.device())?;
        self.scatter(&named, &ScatterSource::Scalar(1.0.into()), ScatterOp::Set)?;
        x.masked_fill(&named, 1.0)?.mul(&product)
    }

    /// Returns the gradients of `x` and of `src`, which has the shape of the index. Products and extrema need
    /// the saved operands and result; sums and means do not.
    fn backward(
        &self,
        g: &Tensor,
        kept: Option<&SavedReduction>,
        ctx: &BackwardCtx<'_>,
    ) -> Result<InputGrads> {
        let gathered = |t: &Tensor| t.gather(self.dim as isize, &self.index);
        let needs = |k: usize| ctx.needs_input_grad[k];
        let (self_grad, src_grad) = match kept {
            None => {
                let share = match self.reduce {
                    ScatterReduce::Mean => g.div(&self.count_contributions(g)?)?.to_dtype(g.dtype())?,
                    _ => g.clone(),
                };
                let src_grad = needs(1).then(|| gathered(&share)).transpose()?;
                (needs(0).then_some(share), src_grad)
            }
            Some(SavedReduction { x, src, out }) if self.reduce == ScatterReduce::Prod => {
                // The product of the other factors: a zero factor is left out instead of divided by.
                let filled = x.masked_fill(&x.eq(0.0)?, 1.0)?;
                let self_grad = g.mul(&self.run(&filled, src)?)?.div(&filled)?;
                let zero = src.eq(0.0)?;
                let zeros = self.scatter_add(&x.zeros_like()?, &zero.to_dtype(x.dtype())?)?;
                let is_only_zero = zero.logical_and(&gathered(&zeros)?.eq(1.0)?)?;
                let product_of_others = self.run(x, &src.masked_fill(&is_only_zero, 1.0)?)?;
                let quotient = gathered(&g.mul(out)?)?.div(&src.masked_fill(&zero, 1.0)?)?;
                let src_grad = gathered(&g.mul(&product_of_others)?)?.where_(&is_only_zero, &quotient)?;
                (Some(self_grad), Some(src_grad))
            }
            Some(saved) => self.extreme_backward(g, saved, ctx)?,
        };
        let self_grad = match self_grad.filter(|_| needs(0)) {
            Some(grad) if !self.include_self => {
                Some(grad.scatter_value(self.dim as isize, &self.index, 0.0)?)
            }
            grad => grad,
        };
        Ok(smallvec![self_grad, src_grad])
    }

    /// Shares the gradient of each extremum among the equal elements. As in PyTorch, an old value equal to the result
    /// counts as one of them even if it was not reduced. Its share of the gradient is lost.
    fn extreme_backward(
        &self,
        g: &Tensor,
        SavedReduction { x, src, out }: &SavedReduction,
        ctx: &BackwardCtx<'_>,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gathered = |t: &Tensor| t.gather(self.dim as isize, &self.index);
        let counts = if g.dtype().size() == 2 { DType::F32 } else { g.dtype() };
        let self_ties = x.eq(out)?;
        let at = IndexedElements::new(OP, self.dim, &self.index);
        let is_one_kernel = !ctx.create_graph() && counts == DType::F32 && can_reduce_rows(&at, x.shape());
        let mut src_ties = None;
        let ties = if is_one_kernel {
            let result = contiguous_zero_offset(out)?;
            let reduction = RowReduction { ties: Some(&result), ..RowReduction::default() };
            let base = (ScatterBase::Copy(&self_ties.to_dtype(counts)?), x.shape());
            reduce_rows(&at, base, src, (ScatterOp::Add, None), reduction)?
        } else {
            let ties = src.eq(&gathered(out)?)?;
            let count = self.scatter_add(&self_ties.to_dtype(counts)?, &ties.to_dtype(counts)?)?;
            src_ties = Some(ties);
            count
        };
        let share = g.div(&ties)?.to_dtype(g.dtype())?;
        // Positions without any tie get no gradient: the division gave infinity or NaN there.
        let self_grad = ctx.needs_input_grad[0].then(|| share.where_(&self_ties, 0.0)).transpose()?;
        if !ctx.needs_input_grad[1] {
            return Ok((self_grad, None));
        }
        if src_ties.is_none()
            && let Some(grad) = self.try_tie_grad(src, out, &share)?
        {
            return Ok((self_grad, Some(grad)));
        }
        let src_ties = src_ties.map_or_else(|| src.eq(&gathered(out)?), Ok)?;
        Ok((self_grad, Some(gathered(&share)?.where_(&src_ties, 0.0)?)))
    }

    /// Gathers the shares of the elements that equal the result, for rows along the first dimension that have one
    /// index each. Returns `None` for other indices.
    fn try_tie_grad(&self, src: &Tensor, out: &Tensor, share: &Tensor) -> Result<Option<Tensor>> {
        let (index, rows) = (&self.index, self.index.shape().first().copied().unwrap_or(0));
        let is_row = index.strides().iter().zip(index.shape()).skip(1).all(|(&s, &n)| s == 0 || n == 1)
            && index.shape().iter().skip(1).eq(out.shape().iter().skip(1));
        let is_supported = self.dim == 0 && is_row && src.numel() > 0 && src.numel() <= u32::MAX as usize;
        if !is_supported {
            return Ok(None);
        }
        let [src, out, share] =
            [contiguous_zero_offset(src)?, contiguous_zero_offset(out)?, contiguous_zero_offset(share)?];
        let elements = src.numel() / rows;
        let is_vec4 = supports_vec4(src.dtype()) && elements.is_multiple_of(VEC4_WIDTH);
        let width = if is_vec4 { VEC4_WIDTH } else { 1 };
        let grad = Tensor::empty(src.shape(), src.dtype(), src.device())?;
        let spec = kernel_spec! {
            "scatter_tie_grad", dtype: launch::shader_dtype_name(src.dtype(), src.device()),
            index: index_dtype_name(OP, index)?, width,
        };
        let n = src.numel() / width;
        let params = kernel_params! {
            n, steps: elements / width, extent: extent_or_one(&out, 0), index_offset: index.layout().offset(),
            index_stride: index.strides().first().copied().unwrap_or(0),
        };
        let groups = n.div_ceil(WORKGROUP_SIZE);
        launch::launch(&spec, &[index, &src, &out, &share, &grad], params, groups)?;
        Ok(Some(grad))
    }
}

/// Operands and result that gradients of products and extrema need.
struct SavedReduction {
    x: Tensor,
    src: Tensor,
    out: Tensor,
}

/// Selection of elements by index tensors for some dimensions, as rows of a matrix.
struct IndexSelection {
    /// Permutation of the dimensions that puts the indexed ones first.
    dim_order: SmallVec<[isize; 6]>,
    /// Extents in that order.
    shape: Dims,
    /// Number of rows, and elements of a row.
    matrix_shape: [usize; 2],
    /// Elements of the dimensions before and after the indexed ones, if those are adjacent.
    surrounding: Option<[usize; 2]>,
    /// Row of each selected element, one-dimensional.
    rows: Tensor,
    result_shape: Dims,
    /// Permutation of the result's dimensions that puts those of the indices first.
    result_order: SmallVec<[isize; 6]>,
}

fn invert_permutation(order: &[isize]) -> SmallVec<[isize; 6]> {
    let mut inverse: SmallVec<[isize; 6]> = (0..order.len() as isize).collect();
    inverse.sort_unstable_by_key(|&i| order[i as usize]);
    inverse
}

/// A tensor, indices into the tensor, and a dimension.
type ExpandedIndex = (Tensor, Vec<Option<Tensor>>, isize);

/// Replaces a mask of rank 0 by a mask of a new dimension of extent 1. Returns the unsqueezed tensor, the
/// indices and the new dimension.
fn expand_scalar_mask(x: &Tensor, indices: &[Option<&Tensor>]) -> Result<Option<ExpandedIndex>> {
    let flat = |t: &Tensor| t.dtype() == DType::Bool && t.rank() == 0;
    let Some(at) = indices.iter().position(|index| index.is_some_and(flat)) else { return Ok(None) };
    let covered = |index: &Option<&Tensor>| match index {
        Some(t) if t.dtype() == DType::Bool => t.rank(),
        _ => 1,
    };
    let d: usize = indices[..at].iter().map(covered).sum();
    if d > x.rank() {
        return Ok(None);
    }
    let mut all: Vec<Option<Tensor>> = indices.iter().map(|index| index.cloned()).collect();
    all[at] = indices[at].map(|mask| mask.reshape([1])).transpose()?;
    Ok(Some((x.unsqueeze(d as isize)?, all, d as isize)))
}

/// Puts one value at all elements where a mask is true, without reading the mask. Returns `None` if there are other
/// indices, or several values along the selected elements: their number is checked on the host.
fn try_put_by_mask(
    op: &'static str,
    x: &Tensor,
    indices: &[Option<&Tensor>],
    (values, accumulate): (&Tensor, bool),
    target: ScatterTarget,
) -> Result<Option<Tensor>> {
    let mut masks = indices.iter().enumerate().filter_map(|(d, index)| Some((d, (*index)?)));
    let (Some((d, mask)), None) = (masks.next(), masks.next()) else { return Ok(None) };
    let fits = mask.dtype() == DType::Bool && x.shape().get(d..d + mask.rank()) == Some(mask.shape());
    if !fits || indices.len() - 1 + mask.rank() > x.rank() {
        return Ok(None);
    }
    let (before, after) = (&x.shape()[..d], &x.shape()[d + mask.rank()..]);
    let single = values.rank().checked_sub(after.len() + 1).is_none_or(|at| values.shape()[at] == 1);
    if !single {
        return Ok(None);
    }
    x.check_same_device(op, mask)?;
    let with_rows = |rows: usize| -> Dims { [before, &[rows], after].concat().into() };
    values.layout().broadcast_to(op, &with_rows(1))?;
    let flat = x.reshape(with_rows(mask.numel()))?;
    let values = values.broadcast_to(flat.shape())?;
    let column: Dims = [&[mask.numel()][..], &vec![1; after.len()]].concat().into();
    let mask = mask.reshape(&column)?.broadcast_to(flat.shape())?;
    if target == ScatterTarget::Operand {
        let out = target.written(&flat)?;
        if accumulate {
            out.masked_add_(&mask, &values)?
        } else {
            out.masked_fill_(&mask, &values)?
        }
        return Ok(Some(out));
    }
    let new_values = if accumulate { flat.add(&values)? } else { values };
    new_values.where_(&mask, &flat)?.reshape(x.shape()).map(Some)
}

impl IndexSelection {
    #[track_caller]
    fn new(op: &'static str, x: &Tensor, indices: &[Option<&Tensor>]) -> Result<Self> {
        let mut indexed_dims: Vec<(usize, Tensor)> = Vec::new();
        let mut d = 0;
        for index in indices {
            let Some(index) = index else {
                d += 1;
                continue;
            };
            x.check_same_device(op, index)?;
            if index.dtype() != DType::Bool {
                indexed_dims.push((d, index.detach()));
                d += 1;
                continue;
            }
            let covered = x.shape().get(d..d + index.rank());
            fail_if!(covered != Some(index.shape()); shape(op, [x, index]),
                "a mask has the extents of the dimensions that it stands for, here from {d} on");
            let coordinates = select::nonzero_coordinates(op, index, None)?;
            for k in 0..index.rank() {
                indexed_dims.push((d + k, coordinates.select(1, k as isize)?));
            }
            d += index.rank();
        }
        fail_if!(indexed_dims.is_empty() || d > x.rank(); argument(op),
            "{} indices for {} dimensions; it takes one at least, and no more than there are", d, x.rank());
        let shapes: Vec<&[usize]> = indexed_dims.iter().map(|(_, t)| t.shape()).collect();
        let index = broadcast_shapes(op, &shapes)?;
        let mut rows: Option<Tensor> = None;
        for (d, t) in &indexed_dims {
            let t = t.broadcast_to(&index)?;
            rows = Some(select::linearize_index(op, &t, x.shape()[*d], rows.as_ref(), true)?);
        }
        let Some(rows) = rows else {
            return Err(Error::argument(op, "takes indices")); // invariant: an index exists
        };
        let indexed: Vec<usize> = indexed_dims.iter().map(|(d, _)| *d).collect();
        let rest: Vec<usize> = (0..x.rank()).filter(|d| !indexed.contains(d)).collect();
        let dim_order = indexed.iter().chain(&rest).map(|&d| d as isize).collect();
        let shape: Dims = indexed.iter().chain(&rest).map(|&d| x.shape()[d]).collect();
        let matrix_shape = [numel(&shape[..indexed.len()]), numel(&shape[indexed.len()..])];
        // The result's index dimensions replace adjacent indexed dimensions, and otherwise come first.
        let side_by_side = indexed.windows(2).all(|w| w[1] == w[0] + 1);
        let before = if side_by_side { indexed[0] } else { 0 };
        let surrounding =
            side_by_side.then(|| [&x.shape()[..before], &x.shape()[before + indexed.len()..]].map(numel));
        let extents = &shape[indexed.len()..];
        let result: Dims = [&extents[..before], &index, &extents[before..]].concat().into();
        let index_dims = before..before + index.len();
        let other_dims = (0..result.len()).filter(|k| !index_dims.contains(k));
        let result_order = index_dims.clone().chain(other_dims).map(|k| k as isize).collect();
        Ok(Self { dim_order, shape, matrix_shape, surrounding, rows, result_shape: result, result_order })
    }

    /// Returns a tensor of the indexed shape as a matrix of rows: a view if the strides allow it.
    fn to_matrix(&self, t: &Tensor) -> Result<Tensor> {
        t.permute(&self.dim_order)?.reshape(self.matrix_shape)
    }

    /// Undoes [`to_matrix`](Self::to_matrix). The result is contiguous.
    fn restore_from_matrix(&self, t: &Tensor) -> Result<Tensor> {
        t.reshape(&self.shape[..])?.permute(invert_permutation(&self.dim_order))?.contiguous()
    }

    /// Arranges selected rows in the shape of the result. Recorded.
    fn rows_to_result(&self, rows: &Tensor) -> Result<Tensor> {
        let shape: Dims = self.result_order.iter().map(|&k| self.result_shape[k as usize]).collect();
        rows.reshape(&shape[..])?.permute(invert_permutation(&self.result_order))
    }

    /// Arranges values of the result's shape as rows of the matrix. Recorded.
    fn values_to_matrix(&self, op: &'static str, values: &Tensor) -> Result<Tensor> {
        values.layout().broadcast_to(op, &self.result_shape)?;
        let permuted = values.broadcast_to(&self.result_shape)?.permute(&self.result_order)?;
        permuted.reshape([self.rows.numel(), self.matrix_shape[1]])
    }

    fn scatter(
        &self,
        op: &'static str,
        out: &Tensor,
        source: &ScatterSource<'_>,
        how: ScatterOp,
    ) -> Result<()> {
        let shape = [self.rows.numel(), self.matrix_shape[1]];
        scatter_into(&IndexedElements::rows(op, 0, &self.rows, &shape), out, source, (how, None))
    }

    /// Scatters the rows of the matrix `values` into a contiguous tensor in place. Sums in 16 bits are rounded once.
    fn scatter_rows(&self, op: &'static str, target: &Tensor, values: &Tensor, how: ScatterOp) -> Result<()> {
        let [extent, width] = self.matrix_shape;
        let n = self.rows.numel();
        let Some([before, after]) = self.surrounding else {
            // Dimensions that are not adjacent do not merge in a view.
            let matrix = self.to_matrix(target)?;
            let at = IndexedElements::rows(op, 0, &self.rows, &[n, width]);
            self.scatter_lines(&at, &matrix, values, how)?;
            if matrix.shares_storage(target) {
                return Ok(());
            }
            let result = matrix.reshape(&self.shape[..])?.permute(invert_permutation(&self.dim_order))?;
            return result.copy_into(target);
        };
        let lines = target.reshape([before, extent, after])?;
        let values = values.reshape([n, before, after])?.transpose(0, 1)?;
        let at = IndexedElements::rows(op, 1, &self.rows, &[before, n, after]);
        self.scatter_lines(&at, &lines, &values, how)
    }

    fn scatter_lines(
        &self,
        at: &IndexedElements,
        out: &Tensor,
        values: &Tensor,
        how: ScatterOp,
    ) -> Result<()> {
        // The scanning kernel rounds each sum.
        if how == ScatterOp::Add && out.dtype().size() == 2 && out.numel() > 0 && values.numel() > 0 {
            scatter_sorted_runs(at, out, (values, values.strides()), (how, None))?;
        } else {
            scatter_into(at, out, &values.into(), (how, None))?;
        }
        // The rows belong to this selection, and its gradient does not scatter.
        order::forget(&self.rows);
        Ok(())
    }
}

impl Tensor {
    /// Returns a copy with `src` reduced into the positions of `index`: PyTorch's `scatter_reduce`.
    ///
    /// With `include_self`, the reduction includes the old value of the position. Positions that `index` does
    /// not contain keep their value. Equal extrema share the gradient equally.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    #[track_caller]
    pub fn scatter_reduce(
        &self,
        dim: isize,
        index: &Tensor,
        src: &Tensor,
        reduce: ScatterReduce,
        include_self: bool,
    ) -> Result<Tensor> {
        self.scatter_reduce_to(dim, index, src, (reduce, include_self), ScatterTarget::Copy)
    }

    #[track_caller]
    pub(in crate::ops) fn scatter_reduce_to(
        &self,
        dim: isize,
        index: &Tensor,
        src: &Tensor,
        (reduce, include_self): (ScatterReduce, bool),
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!(OP);
        let d = normalize_dim(OP, dim, self.rank())?;
        self.check_scatter(OP, d, index, src)?;
        let call =
            ScatterReduction { dim: d, index: target.input(self, index)?.detach(), reduce, include_self };
        // The gradient of a product needs the result in f32.
        let reduces_16_bits = target == ScatterTarget::Copy
            && reduce != ScatterReduce::Prod
            && call.reduces_rows(self.shape(), self.dtype());
        if self.dtype().size() == 2 && !reduces_16_bits {
            // Reduce 16-bit floats in f32, and round once.
            let (x, src) = (self.to_dtype(DType::F32)?, src.to_dtype(DType::F32)?);
            let out = x.scatter_reduce(dim, index, &src, reduce, include_self)?.to_dtype(self.dtype())?;
            return target.store(self, out);
        }
        let is_one_scatter = include_self && reduce != ScatterReduce::Mean;
        if target == ScatterTarget::Operand && !is_one_scatter {
            // An error between the kernels of this reduction would leave the operand partly written.
            let out = self.detach().scatter_reduce(dim, index, &src.detach(), reduce, include_self)?;
            return target.store(self, out);
        }
        let part = leading_part(&target.input(self, src)?, index.shape())?;
        if target == ScatterTarget::Operand {
            let out = target.written(self)?;
            call.scatter(&out, &(&part.detach()).into(), reduce.scatter_op())?;
            return Ok(out);
        }
        let (x, src) = (self.detach(), part.detach());
        let out = call.run(&x, &src)?;
        drop((x, src));
        let saved = match reduce {
            ScatterReduce::Sum | ScatterReduce::Mean => None,
            _ => Some([SavedTensor::input(self), SavedTensor::input(&part), SavedTensor::output(&out)]),
        };
        let index = SavedTensor::input(&call.index);
        let composite_call = call.clone();
        let backward = move |g: &Tensor, ctx: &BackwardCtx<'_>| {
            index.unpack(ctx)?;
            // The positions of the extrema are constant.
            let saved = match &saved {
                Some([x, src, out]) => Some(SavedReduction {
                    x: x.unpack_detached(ctx)?,
                    src: src.unpack_detached(ctx)?,
                    out: out.unpack_detached(ctx)?,
                }),
                None => None,
            };
            call.backward(g, saved.as_ref(), ctx)
        };
        Ok(match reduce {
            // The product of the other factors depends on the operands.
            ScatterReduce::Prod => {
                let saved =
                    [self, &part, &composite_call.index].into_iter().map(SavedTensor::input).collect();
                let composed = move |t: &[Tensor]| composite_call.prod_composite(&t[0], &t[1]);
                autograd::composite_differentiable(OP, out, &[self, &part], saved, composed, backward)
            }
            _ => autograd::differentiable(OP, out, &[self, &part], backward),
        })
    }

    /// Selects elements by index tensors: PyTorch's `x[indices]`.
    ///
    /// An integer index (i64, i32, u32) replaces one dimension. A bool mask replaces as many dimensions as
    /// its rank; a mask of rank 0 adds a dimension of extent 1 or 0. `None` keeps a dimension, and so do
    /// dimensions after the last index. Indices broadcast. Their dimensions replace the indexed ones if those
    /// are adjacent, and otherwise come first. For a mask, the host reads the number of true elements.
    ///
    /// An index out of range reads as 0: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// There are no indices or too many, they do not broadcast, or a mask has other extents.
    #[track_caller]
    pub fn index(&self, indices: &[Option<&Tensor>]) -> Result<Tensor> {
        operation!("index");
        if let Some((x, indices, _)) = expand_scalar_mask(self, indices)? {
            return x.index(&indices.iter().map(Option::as_ref).collect::<Vec<_>>());
        }
        let selection = IndexSelection::new("index", self, indices)?;
        selection.rows_to_result(&selection.to_matrix(self)?.index_select(0, &selection.rows)?)
    }

    /// Returns a copy of `self` with `values` written to the elements that `indices` select, or added to them
    /// with `accumulate`: PyTorch's `index_put`.
    ///
    /// Indices work as in [`index`](Self::index), and `values` broadcast. Of repeated indices, the last one
    /// in order wins. Sums have a fixed order.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices). The host reads a mask,
    /// unless the mask is the only index and all its elements get one value.
    ///
    /// # Errors
    /// `values` have another type, or do not broadcast to the selection. The type is i64, and the device lacks
    /// 64-bit integers. See also [`index`](Self::index).
    #[track_caller]
    pub fn index_put(
        &self,
        indices: &[Option<&Tensor>],
        values: &Tensor,
        accumulate: bool,
    ) -> Result<Tensor> {
        dispatch_autocast!("index_put", [self, values], |x, values| x
            .index_put(indices, &values, accumulate));
        self.index_put_to(indices, values, accumulate, ScatterTarget::Copy)
    }

    #[track_caller]
    pub(in crate::ops) fn index_put_to(
        &self,
        indices: &[Option<&Tensor>],
        values: &Tensor,
        accumulate: bool,
        target: ScatterTarget,
    ) -> Result<Tensor> {
        operation!(OP = "index_put");
        fail_if!(values.dtype() != self.dtype();
            dtype(OP, values.dtype()), "the values have the type of the tensor, {}", self.dtype());
        self.check_same_device(OP, values)?;
        if let Some((x, indices, d)) = expand_scalar_mask(self, indices)? {
            let indices = indices.iter().map(Option::as_ref).collect::<Vec<_>>();
            return x.index_put_to(&indices, values, accumulate, target)?.squeeze(d);
        }
        if target == ScatterTarget::Operand && !self.is_contiguous() {
            return target.store(self, self.index_put_to(indices, values, accumulate, ScatterTarget::Copy)?);
        }
        if let Some(put) = try_put_by_mask(OP, self, indices, (values, accumulate), target)? {
            return Ok(put);
        }
        if target == ScatterTarget::Copy && accumulate && self.dtype().size() == 2 {
            let (x, values) = (self.to_dtype(DType::F32)?, values.to_dtype(DType::F32)?);
            return x.index_put(indices, &values, true)?.to_dtype(self.dtype());
        }
        let selection = IndexSelection::new(OP, self, indices)?;
        let values = selection.values_to_matrix(OP, &target.input(self, values)?)?;
        let how = if accumulate { ScatterOp::Add } else { ScatterOp::Set };
        let out = target.written(self)?;
        selection.scatter_rows(OP, &out, &values.detach(), how)?;
        let selection = Arc::new(selection);
        Ok(autograd::differentiable(OP, out, &[self, &values], move |g, ctx| {
            let rows = selection.to_matrix(g)?;
            let self_grad = match (ctx.needs_input_grad[0], accumulate) {
                (false, _) => None,
                (true, true) => Some(g.clone()),
                (true, false) => {
                    let forward_selection = selection.clone();
                    let clear = move |rows: &Tensor| {
                        let cleared = rows.copy()?;
                        forward_selection.scatter(
                            OP,
                            &cleared,
                            &ScatterSource::Scalar(0.0.into()),
                            ScatterOp::Set,
                        )?;
                        Ok(cleared)
                    };
                    let cleared = clear(&rows.detach())?;
                    // The function is its own transpose.
                    let cleared = autograd::linear_differentiable(OP, cleared, &rows, clear.clone(), clear);
                    Some(selection.restore_from_matrix(&cleared)?)
                }
            };
            let values_grad =
                ctx.needs_input_grad[1].then(|| rows.index_select(0, &selection.rows)).transpose()?;
            Ok(smallvec![self_grad, values_grad])
        }))
    }
}

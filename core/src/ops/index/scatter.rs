//! Reducing into places: PyTorch's `scatter_reduce`, `index_put` and its reading twin `index`.

use std::sync::Arc;

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use crate::amp::dispatch_autocast;
use crate::autograd::{self, BackwardCtx, SavedTensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::ops::ScatterOp;
use crate::ops::index::select;
use crate::ops::index::{ScatterSource, scatter_into, split_dim_stride};
use crate::ops::kernel::launch::{self, KernelParams, WORKGROUP_SIZE};
use crate::ops::shape::PadMode;
use crate::ops::sort;
use crate::tensor::layout::{broadcast_shapes, collapse_dims, normalize_dim, numel};
use crate::tensor::{Dims, Layout, Tensor};

/// Equal indices that one thread walks alone.
const MAX_SEQUENTIAL_RUN: usize = 512;

/// Elements of a sorted line of which one thread walks those of a longer run.
const RUN_CHUNK: usize = 128;

/// Scatters into `out` in place, for lines too long to be walked by each of many threads: the indices are sorted, and
/// runs of equal ones reduced in their order. A long run is reduced in parts, which a second kernel combines, so that it may be all of a line.
/// The host does not know whether there are such runs. Where there are none, that kernel ends after two reads for each 512 elements.
/// Bits are those of the walk for runs up to [`MAX_SEQUENTIAL_RUN`], but that halves are rounded once.
pub(crate) fn scatter_sorted_runs(
    op: &'static str,
    out: &Tensor,
    dim: usize,
    (index, index_strides): (&Tensor, &[usize]),
    shape: &[usize],
    (src, src_strides): (&Tensor, &[usize]),
    (how, skip): (ScatterOp, Option<usize>),
) -> Result<()> {
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    let extent = out.shape().get(dim).copied().unwrap_or(1);
    // Lines that share their indices share their order.
    let once = |(k, &n): (usize, &usize)| if k != dim && index_strides.get(k) == Some(&0) { 1 } else { n };
    let own: Dims = shape.iter().enumerate().map(once).collect();
    let seen = index.with_layout(Layout::new(own.clone(), index_strides, index.layout().offset()));
    let to = select::linearize_index(op, &seen, extent, None, false)?.reshape(&own[..])?;
    let order = sort::argsort_ascending(op, &to, dim)?;
    let own_strides: Dims =
        to.strides().iter().zip(&own).zip(shape).map(|((&s, own), n)| if own == n { s } else { 0 }).collect();
    let (out_rest, out_dim) = split_dim_stride(out.strides(), dim);
    let (own_rest, own_dim) = split_dim_stride(&own_strides, dim);
    let (src_rest, src_dim) = split_dim_stride(src_strides, dim);
    let mut lines: Dims = shape.into();
    let length = lines.get_mut(dim).map_or(1, |n| std::mem::replace(n, 1));
    let (line_shape, strides) = collapse_dims(&lines, &[&out_rest, &own_rest, &src_rest]);
    launch::check_rank(op, line_shape.len())?;
    let lines = numel(&lines);
    // Chunks of more elements where parts of these would be too many for one workgroup's loops.
    let scale = length.div_ceil(1 << 30);
    let (chunk, short) = (RUN_CHUNK * scale, MAX_SEQUENTIAL_RUN * scale);
    let long = length > short && how != ScatterOp::Set;
    let (chunks, candidates) = (length.div_ceil(chunk), length.saturating_sub(1) / short);
    let spec = |stage: &'static str| {
        let spec = KernelSpec::new("scatter_sorted")
            .def("dtype", launch::shader_dtype_name(out.dtype(), out.device()));
        spec.def("op", how.name()).def("long", long).def("stage", stage)
    };
    let params = || {
        let params = KernelParams::new().size(lines).size(line_shape.len()).size(length).size(extent);
        let params = params.u32(skip.map_or(u32::MAX, |s| s as u32));
        let params = params.size(out.layout().offset()).size(src.layout().offset());
        let params = params.size(chunk).size(short).size(candidates).align();
        let params = params.size(out_dim).size(own_dim).size(src_dim).align();
        params.dims(&line_shape).dims(&strides[0]).dims(&strides[1]).dims(&strides[2])
    };
    let part = match out.dtype() {
        DType::F16 | DType::BF16 => DType::F32,
        DType::U8 | DType::Bool => DType::U32,
        own => own,
    };
    let parts = long.then(|| Tensor::empty(&[chunks, 2, lines], part, out.device())).transpose()?;
    let mut tensors: SmallVec<[&Tensor; 5]> = smallvec![&to, &order, src, out];
    tensors.extend(&parts);
    // Besides a run, the search for where it begins.
    let walk = params().loop_iterations((short + chunk).min(length) + 64);
    launch::launch(&spec("walk"), &tensors, walk, (lines * length).div_ceil(WORKGROUP_SIZE))?;
    if let Some(parts) = &parts {
        // Of the runs that a workgroup stands for, 17 at most have more parts than a thread combines alone.
        let join = params().loop_iterations(chunks.div_ceil(WORKGROUP_SIZE) + 17 * 10 + 256);
        let groups = (lines * candidates).div_ceil(WORKGROUP_SIZE);
        launch::launch(&spec("join"), &[&to, &order, parts, out], join, groups)?;
    }
    Ok(())
}

/// How [`Tensor::scatter_reduce`] reduces the elements that meet in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScatterReduce {
    /// To their sum.
    Sum,
    /// To their product.
    Prod,
    /// To their mean; of integers rounded down.
    Mean,
    /// To the largest.
    Amax,
    /// To the smallest.
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

/// One call: where its elements go, and what becomes of them.
#[derive(Clone)]
struct ScatterReduction {
    dim: usize,
    index: Tensor,
    reduce: ScatterReduce,
    include_self: bool,
}

impl ScatterReduction {
    fn scatter(&self, out: &Tensor, source: &ScatterSource<'_>, how: ScatterOp) -> Result<()> {
        let index = (&self.index, self.index.strides());
        scatter_into(OP, out, self.dim, index, self.index.shape(), source, (how, None))
    }

    fn scatter_add(&self, to: &Tensor, src: &Tensor) -> Result<Tensor> {
        let out = to.copy()?;
        self.scatter(&out, &ScatterSource::Tensor(src, src.strides().into()), ScatterOp::Add)?;
        Ok(out)
    }

    /// How many elements meet in each place; 1 where there are none.
    fn count_contributions(&self, like: &Tensor) -> Result<Tensor> {
        let dtype = match like.dtype() {
            // What it divides, or what divides that without 64-bit integers.
            dtype if dtype.is_float() || dtype == DType::U32 => dtype,
            _ => DType::I32,
        };
        let own = Tensor::full(like.shape(), f64::from(u8::from(self.include_self)), dtype, like.device())?;
        let one = Tensor::ones((), dtype, like.device())?.broadcast_to(self.index.shape())?;
        self.scatter_add(&own, &one)?.clamp(1, i64::from(i32::MAX))
    }

    fn run(&self, x: &Tensor, src: &Tensor) -> Result<Tensor> {
        let source = ScatterSource::Tensor(src, src.strides().into());
        let out = x.copy()?;
        if !self.include_self {
            match self.reduce {
                ScatterReduce::Sum | ScatterReduce::Mean => {
                    self.scatter(&out, &ScatterSource::Scalar(0.0), ScatterOp::Set)?;
                }
                ScatterReduce::Prod => self.scatter(&out, &ScatterSource::Scalar(1.0), ScatterOp::Set)?,
                // One of them instead of the number that was there: it may be counted twice.
                ScatterReduce::Amax | ScatterReduce::Amin => self.scatter(&out, &source, ScatterOp::Set)?,
            }
        }
        self.scatter(&out, &source, self.reduce.scatter_op())?;
        if self.reduce != ScatterReduce::Mean {
            return Ok(out);
        }
        let counts = self.count_contributions(x)?;
        if x.dtype().is_float() { out.div(&counts) } else { out.floor_divide(&counts)?.to_dtype(x.dtype()) }
    }

    /// A product of products, differentiable as often as they are, zeros among the factors included. It takes the memory of every
    /// element of `src` beside every place along the dimension.
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
        let mut along = Dims::from_elem(1, x.rank() + 1);
        along[self.dim] = n;
        let places = Tensor::arange(0.0, n as f64, 1.0, DType::I32, x.device())?.reshape(&along[..])?;
        let here = index.unsqueeze(d)?.eq(&places)?;
        let factors = src.unsqueeze(d)?.where_(&here, 1.0)?;
        let product = factors.prod_pairwise(d + 1)?.squeeze(d + 1)?;
        // Beyond the index nothing is multiplied.
        let ends = x.shape().iter().zip(product.shape()).rev();
        let pads: Vec<isize> = ends.flat_map(|(&n, &k)| [0, (n - k) as isize]).collect();
        let product = product.pad(&pads, PadMode::Constant(1.0))?;
        match self.include_self {
            true => x.mul(&product),
            false => {
                let named = Tensor::zeros(x.shape(), DType::Bool, x.device())?;
                self.scatter(&named, &ScatterSource::Scalar(1.0), ScatterOp::Set)?;
                x.masked_fill(&named, 1.0)?.mul(&product)
            }
        }
    }

    /// The gradients of `x` and of `src`, which has the index's shape. Sums and means need neither; what was reduced and
    /// what came out are kept for the others.
    fn backward(&self, g: &Tensor, kept: Option<&SavedReduction>) -> Result<(Tensor, Tensor)> {
        let picked = |t: &Tensor| t.gather(self.dim as isize, &self.index);
        let (own, other) = match kept {
            None => {
                let share = if self.reduce == ScatterReduce::Mean {
                    g.div(&self.count_contributions(g)?)?
                } else {
                    g.clone()
                };
                let other = picked(&share)?;
                (share, other)
            }
            Some(SavedReduction { x, src, out }) if self.reduce == ScatterReduce::Prod => {
                // The product of the others: a factor of zero is left out, not divided by.
                let filled = x.masked_fill(&x.eq(0.0)?, 1.0)?;
                let own = g.mul(&self.run(&filled, src)?)?.div(&filled)?;
                let zero = src.eq(0.0)?;
                let zeros = self.scatter_add(&x.zeros_like()?, &zero.to_dtype(x.dtype())?)?;
                let only = zero.logical_and(&picked(&zeros)?.eq(1.0)?)?;
                let rest = self.run(x, &src.masked_fill(&only, 1.0)?)?;
                let plain = picked(&g.mul(out)?)?.div(&src.masked_fill(&zero, 1.0)?)?;
                (own, picked(&g.mul(&rest)?)?.where_(&only, &plain)?)
            }
            Some(SavedReduction { x, src, out }) => {
                // A number that is not among the reduced but equal to the result takes its share of the gradient, which is lost:
                // so it is in PyTorch.
                let (mine, theirs) = (x.eq(out)?, src.eq(&picked(out)?)?);
                let ties = self.scatter_add(&mine.to_dtype(x.dtype())?, &theirs.to_dtype(x.dtype())?)?;
                let share = g.div(&ties)?;
                // What nobody reached, or no number did, is no tie.
                (share.where_(&mine, 0.0)?, picked(&share)?.where_(&theirs, 0.0)?)
            }
        };
        let own = match self.include_self {
            true => own,
            false => own.scatter_value(self.dim as isize, &self.index, 0.0)?,
        };
        Ok((own, other))
    }
}

/// What gradients of products and extremes need.
struct SavedReduction {
    x: Tensor,
    src: Tensor,
    out: Tensor,
}

/// A choice of elements by index tensors, one for each of some dimensions, as rows of a matrix.
struct IndexSelection {
    /// Of all dimensions: the indexed ones first.
    dim_order: SmallVec<[isize; 6]>,
    /// The extents in that order.
    shape: Dims,
    /// Rows, and elements of a row.
    matrix_shape: [usize; 2],
    /// The row of each choice, of one dimension.
    rows: Tensor,
    /// The shape of the indices, and that of the result.
    index_shape: Dims,
    result_shape: Dims,
    /// Which dimensions of the result are the indices', put first.
    result_order: SmallVec<[isize; 6]>,
}

fn invert_permutation(order: &[isize]) -> SmallVec<[isize; 6]> {
    let mut back: SmallVec<[isize; 6]> = SmallVec::from_elem(0, order.len());
    for (i, &d) in order.iter().enumerate() {
        if let Some(slot) = back.get_mut(d as usize) {
            *slot = i as isize;
        }
    }
    back
}

/// A tensor, indices of it, and a dimension.
type ExpandedIndex = (Tensor, Vec<Option<Tensor>>, isize);

/// With a mask of rank 0 as one of a new dimension of extent 1: the tensor with that, the indices, and where it is.
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

impl IndexSelection {
    #[track_caller]
    fn new(op: &'static str, x: &Tensor, indices: &[Option<&Tensor>]) -> Result<Self> {
        let mut found: Vec<(usize, Tensor)> = Vec::new();
        let mut d = 0;
        for index in indices {
            let Some(index) = index else {
                d += 1;
                continue;
            };
            x.check_same_device(op, index)?;
            if index.dtype() != DType::Bool {
                found.push((d, index.detach()));
                d += 1;
                continue;
            }
            let covered = x.shape().get(d..d + index.rank());
            if covered != Some(index.shape()) {
                return Err(Error::shape(
                    op,
                    format!("a mask has the extents of the dimensions that it stands for, here from {d} on"),
                    &[x.shape(), index.shape()],
                ));
            }
            let places = select::nonzero_coordinates(op, index)?;
            for k in 0..index.rank() {
                found.push((d + k, places.select(1, k as isize)?));
            }
            d += index.rank();
        }
        if found.is_empty() || d > x.rank() {
            return Err(Error::argument(
                op,
                format!(
                    "{} indices for {} dimensions; it takes one at least, and no more than there are",
                    d,
                    x.rank()
                ),
            ));
        }
        let shapes: Vec<&[usize]> = found.iter().map(|(_, t)| t.shape()).collect();
        let index = broadcast_shapes(op, &shapes)?;
        let mut rows: Option<Tensor> = None;
        for (d, t) in &found {
            rows = Some(select::linearize_index(
                op,
                &t.broadcast_to(&index)?,
                x.shape()[*d],
                rows.as_ref(),
                true,
            )?);
        }
        let Some(rows) = rows else {
            return Err(Error::argument(op, "takes indices")); // invariant: there is one
        };
        let is_indexed = |d: usize| found.iter().any(|(k, _)| *k == d);
        let indexed: Vec<usize> = found.iter().map(|(d, _)| *d).collect();
        let rest: Vec<usize> = (0..x.rank()).filter(|&d| !is_indexed(d)).collect();
        let order: SmallVec<[isize; 6]> = indexed.iter().chain(&rest).map(|&d| d as isize).collect();
        let shape: Dims = indexed.iter().chain(&rest).map(|&d| x.shape()[d]).collect();
        let matrix = [numel(&shape[..indexed.len()]), numel(&shape[indexed.len()..])];
        // Indices that stand side by side are replaced by the dimensions of the choice; else those come first.
        let side_by_side = indexed.windows(2).all(|w| w[1] == w[0] + 1);
        let before = if side_by_side { indexed[0] } else { 0 };
        let extents: Dims = rest.iter().map(|&d| x.shape()[d]).collect();
        let mut result: Dims = extents[..before].into();
        result.extend_from_slice(&index);
        result.extend_from_slice(&extents[before..]);
        let own = before..before + index.len();
        let others = (0..result.len()).filter(|k| !own.contains(k));
        let result_order = own.clone().chain(others).map(|k| k as isize).collect();
        Ok(Self {
            dim_order: order,
            shape,
            matrix_shape: matrix,
            rows,
            index_shape: index,
            result_shape: result,
            result_order,
        })
    }

    /// A tensor of the indexed one's shape as a matrix of rows; a view where its strides allow it.
    fn to_matrix(&self, t: &Tensor) -> Result<Tensor> {
        t.permute(&self.dim_order)?.reshape(self.matrix_shape)
    }

    /// The other way round, without gaps.
    fn restore_from_matrix(&self, t: &Tensor) -> Result<Tensor> {
        t.reshape(&self.shape[..])?.permute(&invert_permutation(&self.dim_order))?.contiguous()
    }

    /// What is chosen, from its matrix; recorded.
    fn rows_to_result(&self, rows: &Tensor) -> Result<Tensor> {
        let mut shape = self.index_shape.clone();
        let own = self.index_shape.len();
        shape.extend(self.result_order.iter().skip(own).map(|&k| self.result_shape[k as usize]));
        rows.reshape(&shape[..])?.permute(&invert_permutation(&self.result_order))
    }

    /// What is put, as its matrix; recorded.
    fn values_to_matrix(&self, op: &'static str, values: &Tensor) -> Result<Tensor> {
        values.layout().broadcast_to(op, &self.result_shape)?;
        let whole = values.broadcast_to(&self.result_shape)?.permute(&self.result_order)?;
        whole.reshape([self.rows.numel(), self.matrix_shape[1]])
    }

    fn scatter(
        &self,
        op: &'static str,
        out: &Tensor,
        source: &ScatterSource<'_>,
        how: ScatterOp,
    ) -> Result<()> {
        let shape = [self.rows.numel(), self.matrix_shape[1]];
        scatter_into(op, out, 0, (&self.rows, &[1, 0]), &shape, source, (how, None))
    }
}

impl Tensor {
    /// A copy of `self` in which the elements of `src` are reduced into the places of `index`, together with what was there,
    /// or without it: PyTorch's `scatter_reduce`. Places that `index` does not name stay as they are.
    ///
    /// Of several largest or smallest each gets the same share of the gradient.
    ///
    /// An index outside its range names nothing: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// As [`scatter`](Self::scatter); integers on a device without 64-bit ones, for i64.
    #[track_caller]
    pub fn scatter_reduce(
        &self,
        dim: isize,
        index: &Tensor,
        src: &Tensor,
        reduce: ScatterReduce,
        include_self: bool,
    ) -> Result<Tensor> {
        let _op = memory::scope::enter_op(OP);
        let d = normalize_dim(OP, dim, self.rank())?;
        self.check_scatter(OP, d, index, src)?;
        if self.dtype().size() == 2 {
            // Halves are reduced in f32, and rounded once.
            let (x, src) = (self.to_dtype(DType::F32)?, src.to_dtype(DType::F32)?);
            return x.scatter_reduce(dim, index, &src, reduce, include_self)?.to_dtype(self.dtype());
        }
        let mut part = src.clone();
        for (k, &n) in index.shape().iter().enumerate() {
            part = part.narrow(k as isize, 0, n)?;
        }
        let call = ScatterReduction { dim: d, index: index.detach(), reduce, include_self };
        let (x, src) = (self.detach(), part.detach());
        let out = call.run(&x, &src)?;
        drop((x, src));
        let kept = match reduce {
            ScatterReduce::Sum | ScatterReduce::Mean => None,
            _ => Some([SavedTensor::input(self), SavedTensor::input(&part), SavedTensor::output(&out)]),
        };
        let index = SavedTensor::input(&call.index);
        let again = call.clone();
        let backward = move |g: &Tensor, wants: &BackwardCtx<'_>| {
            index.unpack(wants)?;
            // Which are the largest does not change.
            let kept = match &kept {
                Some([x, src, out]) => Some(SavedReduction {
                    x: x.unpack_detached(wants)?,
                    src: src.unpack_detached(wants)?,
                    out: out.unpack_detached(wants)?,
                }),
                None => None,
            };
            let (own, other) = call.backward(g, kept.as_ref())?;
            Ok(smallvec![Some(own), Some(other)])
        };
        Ok(match reduce {
            // The product of the others does change with them.
            ScatterReduce::Prod => {
                let saved = [self, &part, &again.index].into_iter().map(SavedTensor::input).collect();
                let composed = move |t: &[Tensor]| again.prod_composite(&t[0], &t[1]);
                autograd::composite_differentiable(OP, out, &[self, &part], saved, composed, backward)
            }
            _ => autograd::differentiable(OP, out, &[self, &part], backward),
        })
    }

    /// The elements that index tensors choose: PyTorch's `x[indices]`. An index (i64, i32, u32) stands for one dimension,
    /// a mask (bool) for as many as it has (of rank 0 for a new one, of extent 1 or 0), `None` for one that is taken whole; dimensions
    /// beyond them are. Indices
    /// broadcast; their dimensions replace the indexed ones if those lie side by side, else they come first. The host reads how
    /// many elements of a mask are true.
    ///
    /// An index outside its range names nothing: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// There are more indices than dimensions, or none; they do not broadcast; a mask has other extents.
    #[track_caller]
    pub fn index(&self, indices: &[Option<&Tensor>]) -> Result<Tensor> {
        let _op = memory::scope::enter_op("index");
        if let Some((x, indices, _)) = expand_scalar_mask(self, indices)? {
            return x.index(&indices.iter().map(Option::as_ref).collect::<Vec<_>>());
        }
        let chosen = IndexSelection::new("index", self, indices)?;
        chosen.rows_to_result(&chosen.to_matrix(self)?.index_select(0, &chosen.rows)?)
    }

    /// A copy of `self` in which the elements that `indices` choose, as in [`index`](Self::index), are replaced by
    /// `values`, or increased by them (`accumulate`): PyTorch's `index_put`. `values` broadcast. Of several for one place
    /// the last in order stays; sums are made in an order that is the same in every run.
    ///
    /// An index outside its range names nothing: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// As [`index`](Self::index); `values` have another type, or do not broadcast to what is chosen.
    #[track_caller]
    pub fn index_put(
        &self,
        indices: &[Option<&Tensor>],
        values: &Tensor,
        accumulate: bool,
    ) -> Result<Tensor> {
        const OP: &str = "index_put";
        dispatch_autocast!(OP, [self, values], |x, values| x.index_put(indices, &values, accumulate));
        let _op = memory::scope::enter_op(OP);
        if values.dtype() != self.dtype() {
            let rule = format!("the values have the type of the tensor, {}", self.dtype());
            return Err(Error::dtype(OP, values.dtype(), rule));
        }
        self.check_same_device(OP, values)?;
        if let Some((x, indices, d)) = expand_scalar_mask(self, indices)? {
            let indices = indices.iter().map(Option::as_ref).collect::<Vec<_>>();
            return x.index_put(&indices, values, accumulate)?.squeeze(d);
        }
        if accumulate && self.dtype().size() == 2 {
            let (x, values) = (self.to_dtype(DType::F32)?, values.to_dtype(DType::F32)?);
            return x.index_put(indices, &values, true)?.to_dtype(self.dtype());
        }
        let chosen = IndexSelection::new(OP, self, indices)?;
        let values = chosen.values_to_matrix(OP, values)?;
        let how = if accumulate { ScatterOp::Add } else { ScatterOp::Set };
        let rows = chosen.to_matrix(&self.detach())?.copy()?;
        let source = values.detach();
        chosen.scatter(OP, &rows, &ScatterSource::Tensor(&source, source.strides().into()), how)?;
        let out = chosen.restore_from_matrix(&rows)?;
        drop((rows, source));
        let chosen = Arc::new(chosen);
        Ok(autograd::differentiable(OP, out, &[self, &values], move |g, wants| {
            let rows = chosen.to_matrix(g)?;
            let own = match (wants[0], accumulate) {
                (false, _) => None,
                (true, true) => Some(g.clone()),
                (true, false) => {
                    let again = chosen.clone();
                    let clear = move |rows: &Tensor| {
                        let kept = rows.copy()?;
                        again.scatter(OP, &kept, &ScatterSource::Scalar(0.0), ScatterOp::Set)?;
                        Ok(kept)
                    };
                    let kept = clear(&rows.detach())?;
                    // It is its own transpose.
                    let kept = autograd::linear_differentiable(OP, kept, &rows, clear.clone(), clear);
                    Some(chosen.restore_from_matrix(&kept)?)
                }
            };
            let other = wants[1].then(|| rows.index_select(0, &chosen.rows)).transpose()?;
            Ok(smallvec![own, other])
        }))
    }
}

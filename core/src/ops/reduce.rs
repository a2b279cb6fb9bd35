//! Reductions over any dimensions: one record says what is reduced, one function runs all of them.
//!
//! Dimensions may be negative; an empty list means all of them. Sums of halves are kept in f32; sums and products of
//! integers are i64, which takes a device with 64-bit integers; counts and indices are i64 on every device. Every
//! result is the same in every run: partial results are combined in one order, without atomics.

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::launch::{self, GROUP, Params};
use super::shape::cat;
use super::spread::{QUAD, Spread, has_quads};
use crate::amp::recast;
use crate::autograd::{self, SavedTensor};
use crate::device::Identity;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::tensor::layout::{collapse_one, contiguous_strides, normalize_dim, numel};
use crate::tensor::{Dims, Layout, Tensor};

/// One reduction.
#[derive(Debug)]
pub(crate) struct Reduction {
    /// PyTorch's name.
    pub(crate) name: &'static str,
    /// What is combined: an expression of the element `v`, the number `m` of its output, and `p.args`; or `nonzero`.
    pub(crate) map: &'static str,
    /// How: sum, prod, max, min, argmax, argmin.
    pub(crate) combine: &'static str,
    /// What is written: an expression of the combined `acc`, `m` and `p.args`.
    pub(crate) post: &'static str,
    /// Files of shaders/wgsl/math that the expressions need, in the order of inclusion.
    pub(crate) math: &'static [&'static str],
    /// The result over no elements; there is none for extremes.
    pub(crate) empty: Option<f64>,
}

impl Reduction {
    const fn plain(name: &'static str, combine: &'static str, empty: Option<f64>) -> Self {
        Self { name, map: "v", combine, post: "acc", math: &[], empty }
    }
}

static SUM: Reduction = Reduction::plain("sum", "sum", Some(0.0));
static PROD: Reduction = Reduction::plain("prod", "prod", Some(1.0));
static AMAX: Reduction = Reduction::plain("amax", "max", None);
static AMIN: Reduction = Reduction::plain("amin", "min", None);
static ARGMAX: Reduction = Reduction::plain("argmax", "argmax", None);
static ARGMIN: Reduction = Reduction::plain("argmin", "argmin", None);
static MEAN: Reduction =
    Reduction { post: "acc / T(p.args.x)", ..Reduction::plain("mean", "sum", Some(f64::NAN)) };
static ANY: Reduction = Reduction { map: "nonzero", ..Reduction::plain("any", "max", Some(0.0)) };
static ALL: Reduction = Reduction { map: "nonzero", ..Reduction::plain("all", "min", Some(1.0)) };
static COUNT: Reduction = Reduction { map: "nonzero", ..Reduction::plain("count_nonzero", "sum", Some(0.0)) };

/// Which dimensions of a shape are reduced.
#[derive(Clone, Debug)]
pub(crate) struct Over {
    reduced: SmallVec<[bool; 6]>,
    /// The input's shape.
    pub(crate) shape: Dims,
    /// The input's shape with 1 where it is reduced.
    pub(crate) kept: Dims,
    /// Elements that make one output.
    pub(crate) extent: usize,
}

impl Over {
    /// The dimensions named; all of them if none is.
    #[track_caller]
    pub(crate) fn new(op: &'static str, shape: &[usize], dims: &[isize]) -> Result<Self> {
        let mut reduced: SmallVec<[bool; 6]> = SmallVec::from_elem(dims.is_empty(), shape.len());
        for &dim in dims {
            let d = normalize_dim(op, dim, shape.len())?;
            if let Some(slot) = reduced.get_mut(d)
                && std::mem::replace(slot, true)
            {
                return Err(Error::argument(op, format!("dimension {dim} appears twice in {dims:?}")));
            }
        }
        Ok(Self::marked(shape, reduced))
    }

    fn marked(shape: &[usize], reduced: SmallVec<[bool; 6]>) -> Self {
        let mut kept = Dims::from_slice(shape);
        kept.iter_mut().zip(&reduced).filter(|(_, r)| **r).for_each(|(n, _)| *n = 1);
        let extent = shape.iter().zip(&reduced).filter(|(_, r)| **r).map(|(n, _)| n).product();
        Self { reduced, shape: shape.into(), kept, extent }
    }

    /// The result's shape.
    pub(crate) fn result(&self, keepdim: bool) -> Dims {
        if keepdim {
            return self.kept.clone();
        }
        let mut left = Dims::new();
        self.shape.iter().zip(&self.reduced).filter(|(_, r)| !**r).for_each(|(&n, _)| left.push(n));
        left
    }

    /// A tensor of the result's shape, with or without the reduced dimensions, stretched back over the input's.
    #[track_caller]
    pub(crate) fn spread(&self, t: &Tensor) -> Result<Tensor> {
        t.reshape(&self.kept[..])?.broadcast_to(&self.shape)
    }

    /// Extents and strides of the dimensions that are kept, or of those that are reduced.
    fn side(&self, layout: &Layout, reduced: bool) -> SmallVec<[(usize, usize); 6]> {
        let mut side = SmallVec::new();
        let dims = layout.shape().iter().zip(layout.strides()).zip(&self.reduced);
        dims.filter(|(_, r)| **r == reduced).for_each(|((&n, &s), _)| side.push((n, s)));
        side
    }
}

/// What one run reads besides its input.
#[derive(Clone, Copy, Default)]
pub(crate) struct Extra<'a> {
    /// `m` of each output.
    pub(crate) center: Option<&'a Tensor>,
    /// Indices made by a stage before.
    pub(super) seen: Option<&'a Tensor>,
    /// `p.args`.
    pub(crate) args: [f32; 4],
}

/// One launch: the input's layout, already parted into kept and reduced dimensions.
struct Stage<'a> {
    op: &'a Reduction,
    input: &'a Tensor,
    offset: usize,
    kept: (Dims, Dims),
    reduced: (Dims, Dims),
    extra: Extra<'a>,
    compute: DType,
    /// Whether elements are mapped, and results finished, in this stage.
    map: &'static str,
    post: &'static str,
    /// Elements that are read at once: four of the inner reduced dimension or, `across`, of the inner kept one. That
    /// dimension is counted in fours.
    width: usize,
    /// Whether neighbouring threads hold neighbouring outputs.
    across: bool,
}

impl Stage<'_> {
    /// Counts the inner dimension in fours, if its elements lie so and none is asked for its index.
    fn in_fours(&mut self) {
        let arg = matches!(self.op.combine, "argmax" | "argmin");
        let inner = if self.across { &mut self.kept } else { &mut self.reduced };
        let (Some(n), Some(s)) = (inner.0.last_mut(), inner.1.last_mut()) else { return };
        if arg || !has_quads(self.input.dtype()) || *s != 1 || !n.is_multiple_of(QUAD) {
            return;
        }
        (*n, *s) = (*n / QUAD, QUAD);
        let aligned = |strides: &[usize]| strides.iter().all(|s| s.is_multiple_of(QUAD));
        if self.offset.is_multiple_of(QUAD) && aligned(&self.kept.1) && aligned(&self.reduced.1) {
            self.width = QUAD;
            return;
        }
        let inner = if self.across { &mut self.kept } else { &mut self.reduced };
        if let (Some(n), Some(s)) = (inner.0.last_mut(), inner.1.last_mut()) {
            (*n, *s) = (*n * QUAD, 1);
        }
    }

    /// How it is spread, as `launch` takes it.
    fn spread(&self) -> Spread {
        Spread::new(numel(&self.kept.0), numel(&self.reduced.0), self.across)
    }

    fn launch(&self, plan: Spread, value: Option<&Tensor>, place: Option<&Tensor>) -> Result<()> {
        let across = self.across;
        let device = self.input.device();
        let name = |t: &Tensor| launch::shader_dtype(t.dtype(), device);
        let compute = launch::shader_dtype(self.compute, device);
        for (shape, _) in [&self.kept, &self.reduced] {
            launch::check_rank(self.op.name, shape.len())?;
        }
        let (out, index) = (value.map_or(compute, name), place.map_or("", name));
        let center = self.extra.center.map_or("", name);
        let words = [name(self.input), compute, out, index, self.map, self.op.combine, self.post, center];
        let flags = [value.is_some(), self.extra.seen.is_some(), self.reduced.0.len() <= 1, across];
        let mut identity = Identity::new("reduce");
        words.iter().for_each(|word| identity.word(word));
        identity.words(self.op.math);
        identity.flags(&flags);
        identity.number(plan.lanes | self.width << 16 | plan.unroll << 32);
        let spec = || {
            KernelSpec::new("reduce")
                .def("source", name(self.input))
                .def("compute", compute)
                .def("out", out)
                .def("index", index)
                .def("math", self.op.math)
                .def("map", self.map)
                .def("combine", self.op.combine)
                .def("post", self.post)
                .def("center", center)
                .def("values", flags[0])
                .def("seen", flags[1])
                .def("flat", flags[2])
                .def("lanes", plan.lanes)
                .def("across", across)
                .def("width", self.width)
                .def("unroll", plan.unroll)
        };
        let (outputs, extent) = (numel(&self.kept.0), numel(&self.reduced.0));
        let mut params = Params::new().size(outputs).size(extent).size(plan.splits).size(plan.chunk);
        params = params.size(self.offset).size(self.kept.0.len()).size(self.reduced.0.len()).u32(0);
        // Turns over reads, and over the dimensions of each that are not merged; and those that find the output.
        let reads = plan.chunk.min(extent).div_ceil(plan.lanes);
        let walks = if flags[2] { 0 } else { reads * self.reduced.0.len() };
        params = params.turns(reads.div_ceil(plan.unroll) + plan.unroll + walks + 16);
        for arg in self.extra.args {
            params = params.f32(arg);
        }
        for (shape, strides) in [&self.kept, &self.reduced] {
            params = params.dims(shape).dims(strides);
        }
        let mut tensors: SmallVec<[&Tensor; 5]> = smallvec![self.input];
        for t in [self.extra.center, self.extra.seen, value, place].into_iter().flatten() {
            tensors.push(t);
        }
        let groups = (outputs * plan.splits).div_ceil(GROUP / plan.lanes);
        launch::launch_of(&identity, spec, &tensors, params, groups)
    }
}

/// Runs a reduction of `x` into `value` and `place`, which are contiguous and hold one element for each output.
fn run(
    op: &Reduction,
    x: &Tensor,
    over: &Over,
    compute: DType,
    extra: Extra<'_>,
    value: Option<&Tensor>,
    place: Option<&Tensor>,
) -> Result<()> {
    let bytes_only = matches!(compute, DType::Bool | DType::U8);
    let compute = if bytes_only { DType::U32 } else { compute };
    launch::check_compute(op.name, compute, x.device())?;
    if compute == DType::F64 && !op.math.is_empty() {
        return Err(Error::dtype(op.name, compute, "takes f32, f16 and bf16; cast with `to_dtype`"));
    }
    let mut reduced = over.side(x.layout(), true);
    if place.is_none() {
        // Any order gives the same set: that of memory is read fastest. Indices need the order of the shape.
        reduced.sort_by_key(|&(n, s)| (std::cmp::Reverse(s), n));
    }
    let (kept, reduced) = (collapse_one(over.side(x.layout(), false)), collapse_one(reduced));
    let inner = |side: &(Dims, Dims)| side.1.last().copied().unwrap_or(usize::MAX);
    let outputs = numel(&kept.0);
    let mut stage = Stage {
        op,
        input: x,
        offset: x.layout().offset(),
        across: inner(&kept) < inner(&reduced),
        kept,
        reduced,
        extra,
        compute,
        map: op.map,
        post: op.post,
        width: 1,
    };
    stage.in_fours();
    let first = stage.spread();
    if first.splits == 1 {
        return stage.launch(first, value, place);
    }
    let partial = |dtype| {
        let _tag = memory::scope::tag(Tag::Workspace);
        Tensor::empty(&[first.splits, outputs], dtype, x.device())
    };
    let values = partial(accumulator(compute))?;
    let places = place.map(|_| partial(DType::U32)).transpose()?;
    Stage { post: "acc", ..stage }.launch(first, Some(&values), places.as_ref())?;
    let mut second = Stage {
        op,
        input: &values,
        offset: 0,
        kept: (smallvec![outputs], smallvec![1]),
        reduced: (smallvec![first.splits], smallvec![outputs]),
        extra: Extra { seen: places.as_ref(), ..extra },
        compute,
        map: "v",
        post: op.post,
        width: 1,
        // A single output's parts lie side by side.
        across: outputs > 1,
    };
    second.in_fours();
    // In one go: what is left is short.
    let Spread { lanes, unroll, .. } = second.spread();
    let steps = numel(&second.reduced.0);
    second.launch(Spread { lanes, unroll, chunk: steps, splits: 1 }, value, place)
}

/// The type that partial results of a type are kept in.
fn accumulator(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

/// Runs a reduction to a new tensor of values, without recording it.
#[track_caller]
pub(crate) fn reduce(
    op: &Reduction,
    x: &Tensor,
    over: &Over,
    keepdim: bool,
    compute: DType,
    result: DType,
    extra: Extra<'_>,
) -> Result<Tensor> {
    let _op = memory::scope::op(op.name);
    let shape = over.result(keepdim);
    if over.extent == 0 && numel(&shape) > 0 {
        let value = op.empty.ok_or_else(|| nothing(op.name, x))?;
        return Tensor::full(&shape, value, result, x.device());
    }
    let out = Tensor::empty(&shape, result, x.device())?;
    if out.numel() > 0 {
        run(op, x, over, compute, extra, Some(&out), None)?;
    }
    Ok(out)
}

fn nothing(op: &'static str, x: &Tensor) -> Error {
    Error::shape(op, "the dimensions reduced have no elements, and nothing is their extreme", &[x.shape()])
}

/// A reduction of floats to their own type; halves are computed in f32.
#[track_caller]
pub(crate) fn reduce_float(
    op: &Reduction,
    x: &Tensor,
    over: &Over,
    keepdim: bool,
    extra: Extra<'_>,
) -> Result<Tensor> {
    if !x.dtype().is_float() {
        return Err(Error::dtype(op.name, x.dtype(), "takes floats; cast with `to_dtype`"));
    }
    reduce(op, x, over, keepdim, x.dtype(), x.dtype(), extra)
}

/// Sums and products: integers give i64.
#[track_caller]
fn total(op: &Reduction, x: &Tensor, over: &Over, keepdim: bool) -> Result<Tensor> {
    if x.dtype().is_float() {
        return reduce_float(op, x, over, keepdim, Extra::default());
    }
    launch::check_stored(op.name, x)?;
    // Truth values are counted in 32 bits, which every device has.
    let compute = if x.dtype() == DType::Bool { DType::I32 } else { DType::I64 };
    reduce(op, x, over, keepdim, compute, DType::I64, Extra::default())
}

/// The sums of a matrix's columns, in a type of its own, without a gradient.
#[track_caller]
pub(super) fn column_sums(x: &Tensor, result: DType) -> Result<Tensor> {
    let over = Over::new(SUM.name, x.shape(), &[0])?;
    reduce(&SUM, x, &over, false, x.dtype(), result, Extra::default())
}

/// The sums over the parts of `partial` \[parts, sections, extent\], f32, for each of at most three sections: one launch, and tensors of
/// their own.
#[track_caller]
pub(super) fn part_sums(partial: &Tensor) -> Result<SmallVec<[Tensor; 3]>> {
    let &[parts, sections, extent] = partial.shape() else {
        return Err(Error::shape("part_sums", "takes [parts, sections, extent]", &[partial.shape()]));
    };
    let outs: SmallVec<[Tensor; 3]> = (0..sections)
        .map(|_| Tensor::empty(&[extent], DType::F32, partial.device()))
        .collect::<Result<_>>()?;
    if extent > 0 {
        let width = if extent.is_multiple_of(QUAD) { QUAD } else { 1 };
        let spec = KernelSpec::new("part_sums").def("outs", sections).def("width", width);
        let tiles = extent.div_ceil(4 * width);
        let params = Params::new().size(parts).size(extent).size(tiles).size(sections * tiles);
        let params = params.turns(parts.div_ceil(512) + 32);
        let tensors: SmallVec<[&Tensor; 4]> = std::iter::once(partial).chain(&outs).collect();
        launch::launch(&spec, &tensors, params, sections * tiles)?;
    }
    Ok(outs)
}

/// The gradient of picking elements along a dimension: `g` added at `place` in zeros of `shape`.
#[track_caller]
pub(super) fn scatter_back(
    g: &Tensor,
    place: &Tensor,
    shape: &[usize],
    dim: isize,
    keepdim: bool,
) -> Result<Tensor> {
    let zeros = Tensor::zeros(shape, g.dtype(), g.device())?;
    if keepdim || shape.is_empty() {
        return zeros.scatter_add(dim, place, g);
    }
    zeros.scatter_add(dim, &place.unsqueeze(dim)?, &g.unsqueeze(dim)?)
}

/// A contiguous tensor from the start of its storage, for kernels that take no offset.
#[track_caller]
pub(super) fn dense(t: &Tensor) -> Result<Tensor> {
    if t.is_contiguous() && t.layout().offset() == 0 { Ok(t.detach()) } else { t.detach().copy() }
}

impl Tensor {
    /// The sum over `dims`; over all dimensions if there are none.
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
    /// A dimension is out of range or named twice; memory runs out; integers on a device without 64-bit ones.
    #[track_caller]
    pub fn sum(&self, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        recast!("sum", [self], |x| x.sum(dims, keepdim));
        let over = Over::new("sum", self.shape(), dims)?;
        let out = total(&SUM, self, &over, keepdim)?;
        Ok(autograd::attach_twice("sum", out, &[self], move |g, _| Ok(smallvec![Some(over.spread(g)?)])))
    }

    /// The sum of all elements.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    #[track_caller]
    pub fn sum_all(&self) -> Result<Tensor> {
        self.sum(&[], false)
    }

    /// The sum over the dimensions that broadcasting from `shape` stretched.
    #[track_caller]
    pub(crate) fn sum_to(&self, shape: &[usize]) -> Result<Tensor> {
        if self.shape() == shape {
            return Ok(self.clone());
        }
        // Refuses a shape that does not stretch to this one.
        Layout::contiguous(shape).broadcast_to("sum_to", self.shape())?;
        let skip = self.rank() - shape.len();
        let reduced = (0..self.rank()).map(|d| d < skip || (shape[d - skip] == 1 && self.shape()[d] != 1));
        let over = Over::marked(self.shape(), reduced.collect());
        let out = total(&SUM, self, &over, true)?;
        let out = out.with_layout(Layout::new(shape, contiguous_strides(shape), 0));
        Ok(autograd::attach_twice("sum_to", out, &[self], move |g, _| Ok(smallvec![Some(over.spread(g)?)])))
    }

    /// The mean over `dims`; over all dimensions if there are none.
    ///
    /// # Errors
    /// As [`sum`](Self::sum); the dtype is not a float.
    #[track_caller]
    pub fn mean(&self, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        let over = Over::new("mean", self.shape(), dims)?;
        let n = over.extent as f64;
        let extra = Extra { args: [n as f32, 0.0, 0.0, 0.0], ..Extra::default() };
        let out = reduce_float(&MEAN, self, &over, keepdim, extra)?;
        Ok(autograd::attach_twice("mean", out, &[self], move |g, _| {
            Ok(smallvec![Some(over.spread(&g.div(n)?)?)])
        }))
    }

    /// The mean of all elements.
    ///
    /// # Errors
    /// As [`mean`](Self::mean).
    #[track_caller]
    pub fn mean_all(&self) -> Result<Tensor> {
        self.mean(&[], false)
    }

    /// The product over `dim`.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    #[track_caller]
    pub fn prod(&self, dim: isize, keepdim: bool) -> Result<Tensor> {
        recast!("prod", [self], |x| x.prod(dim, keepdim));
        let over = Over::new("prod", self.shape(), &[dim])?;
        let out = total(&PROD, self, &over, keepdim)?;
        let x = self.detach();
        let saved = smallvec![SavedTensor::of(self)];
        let composed = move |x: &[Tensor]| {
            let product = x[0].product_of_halves(dim)?;
            if keepdim { Ok(product) } else { product.squeeze(dim) }
        };
        Ok(autograd::attach_composed("prod", out, &[self], saved, composed, move |g, _| {
            // The product of the others, without a division: right also where elements are zero.
            let others = x.product_of_others(dim)?;
            Ok(smallvec![Some(over.spread(g)?.mul(&others)?)])
        }))
    }

    /// The product over `dim`, which is kept, of products of elements: differentiable as often as they are.
    pub(super) fn product_of_halves(&self, dim: isize) -> Result<Tensor> {
        let mut x = if self.rank() == 0 { self.reshape([1])? } else { self.clone() };
        if x.dim(dim)? == 0 {
            return x.sum(&[dim], true)?.add(1.0);
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

    /// The product of all elements.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    #[track_caller]
    pub fn prod_all(&self) -> Result<Tensor> {
        self.reshape([-1isize])?.prod(0, false)
    }

    #[track_caller]
    fn extreme(
        &self,
        op: &'static Reduction,
        dims: &[isize],
        keepdim: bool,
        sharing: fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let over = Over::new(op.name, self.shape(), dims)?;
        let out = reduce(op, self, &over, keepdim, self.dtype(), self.dtype(), Extra::default())?;
        let (x, y) = (SavedTensor::of(self), SavedTensor::result(&out));
        Ok(autograd::attach_twice(op.name, out, &[self], move |g, wants| {
            let (x, y) = (x.constant(wants)?, y.constant(wants)?);
            let mask = sharing(&x, &over.spread(&y)?)?;
            let ties = mask.sum_kept(&over)?.to_dtype(g.dtype())?;
            let share = g.reshape(&over.kept[..])?.div(&ties)?;
            Ok(smallvec![Some(over.spread(&share)?.mul(&mask.to_dtype(g.dtype())?)?)])
        }))
    }

    /// Whether elements are equal, or both NaN.
    pub(super) fn same(&self, other: &Tensor) -> Result<Tensor> {
        self.eq(other)?.logical_or(&self.isnan()?.logical_and(&other.isnan()?)?)
    }

    /// How many hold, for each output; never recorded.
    fn sum_kept(&self, over: &Over) -> Result<Tensor> {
        reduce(&COUNT, self, over, true, DType::I32, DType::I32, Extra::default())
    }

    /// The largest over `dims` (all if there are none), NaN if one is; equal ones share the gradient.
    ///
    /// # Errors
    /// As [`sum`](Self::sum); there are no elements.
    #[track_caller]
    pub fn amax(&self, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        self.extreme(&AMAX, dims, keepdim, |x, y| x.eq(y))
    }

    /// The smallest over `dims` (all if there are none), NaN if one is; equal ones share the gradient.
    ///
    /// # Errors
    /// As [`sum`](Self::sum); there are no elements.
    #[track_caller]
    pub fn amin(&self, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        self.extreme(&AMIN, dims, keepdim, |x, y| x.eq(y))
    }

    /// The largest and the smallest over `dims`.
    ///
    /// # Errors
    /// As [`amax`](Self::amax).
    #[track_caller]
    pub fn aminmax(&self, dims: &[isize], keepdim: bool) -> Result<(Tensor, Tensor)> {
        Ok((self.amin(dims, keepdim)?, self.amax(dims, keepdim)?))
    }

    /// The largest of all elements. Where it is NaN the NaN share its gradient, as in PyTorch's `max`; that of [`amax`](Self::amax) is NaN.
    ///
    /// # Errors
    /// As [`amax`](Self::amax).
    #[track_caller]
    pub fn max_all(&self) -> Result<Tensor> {
        self.extreme(&AMAX, &[], false, Self::same)
    }

    /// The smallest of all elements; its gradient as that of [`max_all`](Self::max_all).
    ///
    /// # Errors
    /// As [`amin`](Self::amin).
    #[track_caller]
    pub fn min_all(&self) -> Result<Tensor> {
        self.extreme(&AMIN, &[], false, Self::same)
    }

    #[track_caller]
    fn picked(&self, op: &'static Reduction, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let name = if op.combine == "argmax" { "max" } else { "min" };
        let _op = memory::scope::op(name);
        let over = Over::new(name, self.shape(), &[dim])?;
        let shape = over.result(keepdim);
        if over.extent == 0 && numel(&shape) > 0 {
            return Err(nothing(name, self));
        }
        let value = Tensor::empty(&shape, self.dtype(), self.device())?;
        let place = Tensor::empty(&shape, DType::I64, self.device())?;
        if value.numel() > 0 {
            run(op, self, &over, self.dtype(), Extra::default(), Some(&value), Some(&place))?;
        }
        let at = SavedTensor::of(&place);
        let value = autograd::attach_twice(name, value, &[self], move |g, wants| {
            Ok(smallvec![Some(scatter_back(g, &at.get(wants)?, &over.shape, dim, keepdim)?)])
        });
        Ok((value, place))
    }

    /// The largest over one dimension and where it stands (i64): the first NaN, or else the first of equal ones. The
    /// gradient goes to that element.
    ///
    /// # Errors
    /// As [`amax`](Self::amax).
    #[track_caller]
    pub fn max(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.picked(&ARGMAX, dim, keepdim)
    }

    /// The smallest over one dimension and where it stands, as [`max`](Self::max).
    ///
    /// # Errors
    /// As [`amax`](Self::amax).
    #[track_caller]
    pub fn min(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.picked(&ARGMIN, dim, keepdim)
    }

    #[track_caller]
    fn place(&self, op: &'static Reduction, dim: Option<isize>, keepdim: bool) -> Result<Tensor> {
        let _op = memory::scope::op(op.name);
        let dims = dim.as_slice();
        let over = Over::new(op.name, self.shape(), dims)?;
        let shape = over.result(keepdim);
        if over.extent == 0 && numel(&shape) > 0 {
            return Err(nothing(op.name, self));
        }
        let place = Tensor::empty(&shape, DType::I64, self.device())?;
        if place.numel() > 0 {
            run(op, self, &over, self.dtype(), Extra::default(), None, Some(&place))?;
        }
        Ok(place)
    }

    /// Where the largest stands along `dim`, or among all elements: the first of equal ones, as i64.
    ///
    /// # Errors
    /// As [`amax`](Self::amax).
    #[track_caller]
    pub fn argmax(&self, dim: Option<isize>, keepdim: bool) -> Result<Tensor> {
        self.place(&ARGMAX, dim, keepdim)
    }

    /// Where the smallest stands along `dim`, or among all elements: the first of equal ones, as i64.
    ///
    /// # Errors
    /// As [`amax`](Self::amax).
    #[track_caller]
    pub fn argmin(&self, dim: Option<isize>, keepdim: bool) -> Result<Tensor> {
        self.place(&ARGMIN, dim, keepdim)
    }

    fn truth(&self, op: &'static Reduction, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        let over = Over::new(op.name, self.shape(), dims)?;
        let out = reduce(op, self, &over, keepdim, DType::U32, DType::Bool, Extra::default())?;
        if self.dtype() == DType::U8 { out.to_dtype(DType::U8) } else { Ok(out) }
    }

    /// Whether one element over `dims` (all if there are none) is not zero. Of u8 it is u8, as PyTorch's.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    #[track_caller]
    pub fn any(&self, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        self.truth(&ANY, dims, keepdim)
    }

    /// Whether no element over `dims` (all if there are none) is zero. Of u8 it is u8, as PyTorch's.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    #[track_caller]
    pub fn all(&self, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        self.truth(&ALL, dims, keepdim)
    }

    /// How many elements over `dims` (all if there are none) are not zero, as i64.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    #[track_caller]
    pub fn count_nonzero(&self, dims: &[isize]) -> Result<Tensor> {
        let over = Over::new("count_nonzero", self.shape(), dims)?;
        reduce(&COUNT, self, &over, false, DType::I32, DType::I64, Extra::default())
    }
}

//! Tensors as sets of numbers: equality within bounds, what is in which, how often.

use forebay_shaders::KernelSpec;

use crate::autograd;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::ops::elementwise::pointwise::GradRule::None as NoGrad;
use crate::ops::elementwise::pointwise::{Operand, PointwiseOp, TypeRule, run_pointwise};
use crate::ops::index::select::cast_index_to_i32;
use crate::ops::kernel::launch::{self, KernelParams, WORKGROUP_SIZE};
use crate::ops::reduce::scan;
use crate::ops::shape::cat;
use crate::scalar::Scalar;
use crate::tensor::layout::{normalize_dim, tensor_numel};
use crate::tensor::{Dims, Tensor};

static ISCLOSE: PointwiseOp = PointwiseOp {
    name: "isclose",
    expr: "a == b || (m_isfinite(a) && m_isfinite(b) && abs(a - b) <= atol + rtol * abs(b)) || (m_isnan(a) && m_isnan(b) && nan > 0.0)",
    int_f64_expr: "",
    type_rule: TypeRule::Predicate,
    math_files: &["base"],
    grads: &[NoGrad, NoGrad],
};

/// Numbers that a workgroup counts in its own memory.
const MAX_SHARED_BINS: usize = 2048;

/// What [`unique`](Tensor::unique) and [`unique_consecutive`](Tensor::unique_consecutive) find.
#[derive(Clone, Debug)]
pub struct Unique {
    /// The elements that differ, of one dimension.
    pub values: Tensor,
    /// For each element which of the values it is, as i64 in the shape of the input.
    pub inverse_indices: Tensor,
    /// How many elements are of each value, as i64.
    pub counts: Tensor,
}

/// Runs of equal neighbours in a line, or of equal rows: the values, the number of each one's run, the lengths.
fn find_equal_runs(x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (n, device) = (x.shape()[0], x.device());
    if n == 0 {
        let none = |dtype| Tensor::zeros(&[0], dtype, device);
        return Ok((x.clone(), none(DType::I32)?, none(DType::I64)?));
    }
    let first = Tensor::ones(&[1], DType::Bool, device)?;
    let fixed = x.detach();
    let mut new = fixed.narrow(0, 1, n - 1)?.ne(&fixed.narrow(0, 0, n - 1)?)?;
    if x.rank() > 1 {
        new = new.any(&[1], false)?;
    }
    let starts = cat(&[&first, &new], 0)?;
    let run = scan::cumsum_counts(&starts.to_dtype(DType::U32)?)?.to_dtype(DType::I32)?.sub(1)?;
    let at = starts.nonzero()?.reshape([-1])?.to_dtype(DType::I32)?;
    let end = Tensor::full(&[1], n as f64, DType::I32, device)?;
    let lengths =
        cat(&[&at.narrow(0, 1.min(at.numel()), at.numel().saturating_sub(1))?, &end], 0)?.sub(&at)?;
    Ok((x.index_select(0, &at)?, run, lengths.to_dtype(DType::I64)?))
}

/// Counts each number below `extent` in a line of i32, as u32; others are not counted. Not recorded.
fn count_values(line: &Tensor, extent: usize) -> Result<Tensor> {
    let counts = Tensor::zeros(&[extent], DType::U32, line.device())?;
    let n = line.numel();
    if n == 0 || extent == 0 {
        return Ok(counts);
    }
    // Workgroups of few numbers add all their counts in the end: each counts more than there are.
    let near = extent <= MAX_SHARED_BINS;
    let tile = if near { 16 * WORKGROUP_SIZE.max(extent) } else { 4 * WORKGROUP_SIZE };
    let spec = KernelSpec::new("bincount").def("near", near);
    let params = KernelParams::new().size(n).size(line.layout().offset());
    let params = params.size(line.strides().first().copied().unwrap_or(1)).size(extent).size(tile);
    launch::launch(&spec, &[line, &counts], params, n.div_ceil(tile))?;
    Ok(counts)
}

/// The number of each element's run, behind the order in which they were sorted, as i64.
fn scatter_inverse(order: &Tensor, run: &Tensor) -> Result<Tensor> {
    let none = Tensor::zeros(run.shape(), DType::I32, run.device())?;
    none.scatter(0, order, run)?.to_dtype(DType::I64)
}

impl Tensor {
    /// Whether |a - b| ≤ atol + rtol · |b|, element by element; infinities are close to themselves, NaN to NaN only with `equal_nan`.
    /// PyTorch's bounds are an `rtol` of 1e-5 and an `atol` of 1e-8. Integers are compared as f32, unless both bounds are 0.
    ///
    /// # Errors
    /// A bound is negative; the shapes do not broadcast; memory runs out.
    #[track_caller]
    pub fn isclose<'a>(
        &self,
        other: impl Into<Operand<'a>>,
        rtol: f64,
        atol: f64,
        equal_nan: bool,
    ) -> Result<Tensor> {
        if !(rtol >= 0.0 && atol >= 0.0) {
            return Err(Error::argument(
                "isclose",
                format!("takes bounds of at least 0, got {rtol} and {atol}"),
            ));
        }
        if rtol == 0.0 && atol == 0.0 && !self.dtype().is_float() {
            return self.eq(other);
        }
        let numbers = [
            ("rtol", Scalar::Float(rtol)),
            ("atol", Scalar::Float(atol)),
            ("nan", Scalar::Float(f64::from(u8::from(equal_nan)))),
        ];
        run_pointwise(&ISCLOSE, &[self.into(), other.into()], &numbers)
    }

    /// Whether all elements are [close](Self::isclose); the host reads it.
    ///
    /// # Errors
    /// As [`isclose`](Self::isclose); the step is being captured.
    #[track_caller]
    pub fn allclose(&self, other: &Tensor, rtol: f64, atol: f64, equal_nan: bool) -> Result<bool> {
        Ok(self.isclose(other, rtol, atol, equal_nan)?.all((), false)?.item()? != 0.0)
    }

    /// Whether shapes and all elements are equal; the host reads it.
    ///
    /// # Errors
    /// The devices differ; the step is being captured; memory runs out.
    #[track_caller]
    pub fn equal(&self, other: &Tensor) -> Result<bool> {
        self.check_same_device("equal", other)?;
        Ok(self.shape() == other.shape() && self.eq(other)?.all((), false)?.item()? != 0.0)
    }

    /// Whether each element is one of `elements`; with `invert`, whether it is none.
    ///
    /// # Errors
    /// The type is bool; memory runs out.
    #[track_caller]
    pub fn isin(&self, elements: &Tensor, invert: bool) -> Result<Tensor> {
        let _op = memory::scope::enter_op("isin");
        self.check_same_device("isin", elements)?;
        let dtype = self.dtype().promote(elements.dtype());
        let (x, set) = (self.detach().to_dtype(dtype)?, elements.detach().to_dtype(dtype)?.reshape([-1])?);
        let found = match set.numel() {
            0 => Tensor::zeros(self.shape(), DType::Bool, self.device())?,
            _ => {
                let (sorted, line) = (set.sort(0, false)?.0, x.reshape([-1])?);
                // What is there lies between two places: they compare wide integers on devices that compute with none.
                let place = |right| sorted.searchsorted(&line, true, right, None);
                place(false)?.lt(&place(true)?)?.reshape(self.shape())?
            }
        };
        if invert { found.logical_not() } else { Ok(found) }
    }

    /// The elements that differ, in order, with what each element became and how many did: PyTorch's `unique` with `sorted`. Each NaN differs. The host reads how many there
    /// are. The gradient of a value goes to one of the elements that became it.
    ///
    /// # Errors
    /// The step is being captured; memory runs out.
    #[track_caller]
    pub fn unique(&self) -> Result<Unique> {
        let _op = memory::scope::enter_op("unique");
        let line = self.reshape([-1])?;
        if line.dtype() == DType::Bool {
            let found = line.to_dtype(DType::U8)?.unique()?;
            let inverse = found.inverse_indices.reshape(self.shape())?;
            return Ok(Unique {
                values: found.values.to_dtype(DType::Bool)?,
                inverse_indices: inverse,
                counts: found.counts,
            });
        }
        let (sorted, order) = line.sort(0, false)?;
        let (values, run, counts) = find_equal_runs(&sorted)?;
        Ok(Unique { values, inverse_indices: scatter_inverse(&order, &run)?.reshape(self.shape())?, counts })
    }

    /// As [`unique`](Self::unique) of neighbours: the elements that differ from the one before, row by row.
    ///
    /// # Errors
    /// As [`unique`](Self::unique).
    #[track_caller]
    pub fn unique_consecutive(&self) -> Result<Unique> {
        let _op = memory::scope::enter_op("unique_consecutive");
        let (values, run, counts) = find_equal_runs(&self.reshape([-1])?)?;
        Ok(Unique { values, inverse_indices: run.to_dtype(DType::I64)?.reshape(self.shape())?, counts })
    }

    /// As [`unique`](Self::unique) of the slices along a dimension, in the order of their elements, the first ones first: PyTorch's `unique` with
    /// `dim`. `values` has the other dimensions too, `inverse` is a line. It sorts once for each element of a slice.
    ///
    /// # Errors
    /// As [`unique`](Self::unique); `dim` is out of range, or there is none; slices have no elements.
    #[track_caller]
    pub fn unique_dim(&self, dim: isize) -> Result<Unique> {
        const OP: &str = "unique_dim";
        let _op = memory::scope::enter_op(OP);
        let (rows, back) = self.flatten_slices(OP, dim)?;
        let (n, width) = (rows.shape()[0], rows.shape()[1]);
        // One sort for each of them.
        if tensor_numel(rows.shape()).is_none() || width > 1 << 18 {
            let rule = "takes slices of at most 2^18 elements, and less than 2^32 in all";
            return Err(Error::shape(OP, rule, &[self.shape()]));
        }
        let mut order = Tensor::arange(0.0, n as f64, 1.0, DType::I64, self.device())?;
        let keys = rows.detach();
        let keys = if keys.dtype() == DType::Bool { keys.to_dtype(DType::U8)? } else { keys };
        // Sorting is stable: what was sorted by later elements stays so where this one is equal.
        for k in (0..width).rev() {
            let (_, moved) = keys.select(1, k as isize)?.index_select(0, &order)?.sort(0, false)?;
            order = order.index_select(0, &moved)?;
        }
        let (values, run, counts) = find_equal_runs(&rows.index_select(0, &order)?)?;
        Ok(Unique { values: back(&values)?, inverse_indices: scatter_inverse(&order, &run)?, counts })
    }

    /// As [`unique_dim`](Self::unique_dim) of neighbours: the slices that differ from the one before.
    ///
    /// # Errors
    /// As [`unique_dim`](Self::unique_dim).
    #[track_caller]
    pub fn unique_consecutive_dim(&self, dim: isize) -> Result<Unique> {
        const OP: &str = "unique_consecutive_dim";
        let _op = memory::scope::enter_op(OP);
        let (rows, back) = self.flatten_slices(OP, dim)?;
        let (values, run, counts) = find_equal_runs(&rows)?;
        Ok(Unique { values: back(&values)?, inverse_indices: run.to_dtype(DType::I64)?, counts })
    }

    /// The slices along a dimension as rows, and how rows become slices again.
    #[track_caller]
    fn flatten_slices(
        &self,
        op: &'static str,
        dim: isize,
    ) -> Result<(Tensor, impl Fn(&Tensor) -> Result<Tensor>)> {
        if self.rank() == 0 {
            return Err(Error::shape(op, "takes at least one dimension", &[self.shape()]));
        }
        let d = normalize_dim(op, dim, self.rank())? as isize;
        let front = self.movedim(&[d], &[0])?;
        let rest: Dims = front.shape()[1..].into();
        let width = rest.iter().product::<usize>();
        if width == 0 {
            return Err(Error::shape(op, "takes slices that have elements", &[self.shape()]));
        }
        let rows = front.reshape([self.shape()[d as usize], width])?;
        let back = move |rows: &Tensor| {
            let shape: Dims = [rows.shape()[0]].into_iter().chain(rest.iter().copied()).collect();
            rows.reshape(&shape[..])?.movedim(&[0], &[d])
        };
        Ok((rows, back))
    }

    /// The most frequent element along `dim`, of equally frequent ones the least, and where it stands last, as i64: PyTorch's `mode`. Each NaN
    /// differs.
    ///
    /// # Errors
    /// `dim` is out of range, or has no elements; memory runs out.
    #[track_caller]
    pub fn mode(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        const OP: &str = "mode";
        let _op = memory::scope::enter_op(OP);
        let d = normalize_dim(OP, dim, self.rank())?;
        if self.rank() == 0 {
            return Ok((self.clone(), Tensor::zeros((), DType::I64, self.device())?));
        }
        let n = self.shape()[d];
        if n == 0 {
            return Err(Error::shape(
                OP,
                format!("dimension {d} has no elements to choose from"),
                &[self.shape()],
            ));
        }
        let d = d as isize;
        let keys = self.detach();
        let keys = if keys.dtype() == DType::Bool { keys.to_dtype(DType::U8)? } else { keys };
        let (sorted, order) = keys.sort(d, false)?;
        let same = sorted.narrow(d, 1, n - 1)?.eq(&sorted.narrow(d, 0, n - 1)?)?;
        // How far each one stands behind the begin of its run.
        let mut line = vec![1; self.rank()];
        line[d as usize] = n;
        let place = Tensor::arange(0.0, n as f64, 1.0, DType::I32, self.device())?.reshape(&line[..])?;
        let begins = place.narrow(d, 1, n - 1)?.broadcast_to(same.shape())?.masked_fill(&same, 0)?;
        let begins = begins.prepend_zero(d)?.cummax(d)?.0;
        let at = place.sub(&begins)?.argmax(d, true)?;
        let index = order.gather(d, &at)?;
        let values = self.gather(d, &index)?;
        if keepdim { Ok((values, index)) } else { Ok((values.squeeze(d)?, index.squeeze(d)?)) }
    }

    /// With a zero in front of each line along `dim`.
    fn prepend_zero(&self, dim: isize) -> Result<Tensor> {
        let mut shape: Dims = self.shape().into();
        shape[dim as usize] = 1;
        cat(&[&Tensor::zeros(&shape, self.dtype(), self.device())?, self], dim)
    }

    /// How often each number from 0 on stands in a line of integers, as i64, or the sums of `weights` in their type: as many as the
    /// largest number asks for, and `minlength` at least. The host reads which that is.
    ///
    /// # Errors
    /// The input is no line of integers, or has negative ones; the weights are not as many, or no floats; the step is being captured; memory runs out.
    #[track_caller]
    pub fn bincount(&self, weights: Option<&Tensor>, minlength: usize) -> Result<Tensor> {
        const OP: &str = "bincount";
        let _op = memory::scope::enter_op(OP);
        if self.rank() != 1 || weights.is_some_and(|w| w.shape() != self.shape()) {
            let rule = "takes a line of integers, and as many weights";
            return Err(Error::shape(OP, rule, &[self.shape(), weights.unwrap_or(self).shape()]));
        }
        if self.dtype().is_float() || self.dtype() == DType::Bool {
            return Err(Error::dtype(OP, self.dtype(), "takes integers; cast with `to_dtype`"));
        }
        if let Some(w) = weights.filter(|w| !w.dtype().is_float()) {
            return Err(Error::dtype(OP, w.dtype(), "takes weights that are floats; cast with `to_dtype`"));
        }
        let (mut extent, line) = (minlength, cast_index_to_i32(OP, self, None)?);
        if self.numel() > 0 {
            let (least, most) = (line.min_all()?.item()?, line.max_all()?.item()?);
            if least < 0.0 {
                return Err(Error::argument(OP, format!("takes numbers from 0 on, got {least}")));
            }
            if most >= f64::from(i32::MAX) {
                let rule =
                    "counts numbers below 2^31 - 1, and has a count for each from 0 on; got a larger one";
                return Err(Error::argument(OP, rule));
            }
            extent = extent.max(most as usize + 1);
        }
        match weights {
            Some(w) => Tensor::zeros(&[extent], w.dtype(), self.device())?.index_add(0, &line, w, 1.0),
            None => count_values(&line, extent)?.to_dtype(DType::I64),
        }
    }

    /// How many elements lie in each of `bins` parts of equal width from `min` to `max`, or from the least to the largest element where both are the same; in the
    /// type of the tensor. What lies outside is not counted.
    ///
    /// # Errors
    /// `bins` is 0; `min` is above `max`, or one is not finite; the type is no float; memory runs out.
    #[track_caller]
    pub fn histc(&self, bins: usize, min: f64, max: f64) -> Result<Tensor> {
        const OP: &str = "histc";
        let _op = memory::scope::enter_op(OP);
        if bins == 0 || !(min <= max && (max - min).is_finite()) {
            let rule =
                format!("takes at least one bin between finite bounds, got {bins} from {min} to {max}");
            return Err(Error::argument(OP, rule));
        }
        if !self.dtype().is_float() {
            return Err(Error::dtype(OP, self.dtype(), "takes floats; cast with `to_dtype`"));
        }
        autograd::check_no_grad_inputs(OP, &[self])?;
        let line = self.reshape([-1])?;
        let x = if line.dtype().size() == 2 { line.to_dtype(DType::F32)? } else { line };
        let (mut min, mut max) = (min, max);
        if min == max && x.numel() > 0 {
            (min, max) = (x.min_all()?.item()?, x.max_all()?.item()?);
            if !(max - min).is_finite() {
                return Err(Error::argument(OP, format!("takes finite numbers, got {min} to {max}")));
            }
        }
        if min == max {
            (min, max) = (min - 1.0, max + 1.0);
        }
        let inside = x.ge(min)?.logical_and(&x.le(max)?)?;
        let place = x.sub(min)?.mul(bins as f64)?.div(max - min)?.masked_fill(&inside.logical_not()?, 0.0)?;
        let place = place.floor()?.clamp(0.0, bins as f64 - 1.0)?.to_dtype(DType::I32)?;
        // What lies outside is no place.
        count_values(&place.masked_fill(&inside.logical_not()?, -1)?, bins)?.to_dtype(self.dtype())
    }
}

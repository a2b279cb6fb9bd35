//! Tensors as sets of numbers: equality within bounds, what is in which, how often.

use super::pointwise::Grad::None as NoGrad;
use super::pointwise::{Operand, Pointwise, Scalar, Types, pointwise};
use super::{scan, shape::cat};
use crate::autograd;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::Tensor;

static ISCLOSE: Pointwise = Pointwise {
    name: "isclose",
    expr: "a == b || (m_isfinite(a) && m_isfinite(b) && abs(a - b) <= atol + rtol * abs(b)) || (m_isnan(a) && m_isnan(b) && nan > 0.0)",
    plain: "",
    types: Types::Predicate,
    math: &["base"],
    grads: &[NoGrad, NoGrad],
};

/// What [`unique`](Tensor::unique) and [`unique_consecutive`](Tensor::unique_consecutive) find.
#[derive(Clone, Debug)]
pub struct Unique {
    /// The elements that differ, of one dimension.
    pub values: Tensor,
    /// For each element which of the values it is, as i64 in the shape of the input.
    pub inverse: Tensor,
    /// How many elements are of each value, as i64.
    pub counts: Tensor,
}

/// Runs of equal neighbours in a line: the values, the number of each element's run, the lengths.
fn runs(line: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (n, device) = (line.numel(), line.device());
    if n == 0 {
        let none = |dtype| Tensor::zeros(&[0], dtype, device);
        return Ok((line.clone(), none(DType::I32)?, none(DType::I64)?));
    }
    let first = Tensor::ones(&[1], DType::Bool, device)?;
    let fixed = line.detach();
    let starts = cat(&[&first, &fixed.narrow(0, 1, n - 1)?.ne(&fixed.narrow(0, 0, n - 1)?)?], 0)?;
    let run = scan::totals(&starts.to_dtype(DType::U32)?)?.to_dtype(DType::I32)?.sub(1)?;
    let at = starts.nonzero()?.reshape([-1])?.to_dtype(DType::I32)?;
    let end = Tensor::full(&[1], n as f64, DType::I32, device)?;
    let lengths =
        cat(&[&at.narrow(0, 1.min(at.numel()), at.numel().saturating_sub(1))?, &end], 0)?.sub(&at)?;
    Ok((line.masked_select(&starts)?, run, lengths.to_dtype(DType::I64)?))
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
        pointwise(&ISCLOSE, &[self.into(), other.into()], &numbers)
    }

    /// Whether all elements are [close](Self::isclose); the host reads it.
    ///
    /// # Errors
    /// As [`isclose`](Self::isclose); the step is being captured.
    #[track_caller]
    pub fn allclose(&self, other: &Tensor, rtol: f64, atol: f64, equal_nan: bool) -> Result<bool> {
        Ok(self.isclose(other, rtol, atol, equal_nan)?.all(&[], false)?.item()? != 0.0)
    }

    /// Whether shapes and all elements are equal; the host reads it.
    ///
    /// # Errors
    /// The devices differ; the step is being captured; memory runs out.
    #[track_caller]
    pub fn equal(&self, other: &Tensor) -> Result<bool> {
        self.same_device("equal", other)?;
        Ok(self.shape() == other.shape() && self.eq(other)?.all(&[], false)?.item()? != 0.0)
    }

    /// Whether each element is one of `elements`; with `invert`, whether it is none.
    ///
    /// # Errors
    /// The type is bool; memory runs out.
    #[track_caller]
    pub fn isin(&self, elements: &Tensor, invert: bool) -> Result<Tensor> {
        let _op = memory::scope::op("isin");
        self.same_device("isin", elements)?;
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
        let _op = memory::scope::op("unique");
        let line = self.reshape([-1])?;
        if line.dtype() == DType::Bool {
            let found = line.to_dtype(DType::U8)?.unique()?;
            let inverse = found.inverse.reshape(self.shape())?;
            return Ok(Unique { values: found.values.to_dtype(DType::Bool)?, inverse, counts: found.counts });
        }
        let (sorted, order) = line.sort(0, false)?;
        let (values, run, counts) = runs(&sorted)?;
        let inverse = Tensor::zeros(&[line.numel()], DType::I32, self.device())?.scatter(0, &order, &run)?;
        Ok(Unique { values, inverse: inverse.to_dtype(DType::I64)?.reshape(self.shape())?, counts })
    }

    /// As [`unique`](Self::unique) of neighbours: the elements that differ from the one before, row by row.
    ///
    /// # Errors
    /// As [`unique`](Self::unique).
    #[track_caller]
    pub fn unique_consecutive(&self) -> Result<Unique> {
        let _op = memory::scope::op("unique_consecutive");
        let (values, run, counts) = runs(&self.reshape([-1])?)?;
        Ok(Unique { values, inverse: run.to_dtype(DType::I64)?.reshape(self.shape())?, counts })
    }

    /// How often each number from 0 on stands in a line of integers, as i64, or the sums of `weights` in their type: as many as the
    /// largest number asks for, and `minlength` at least. The host reads which that is.
    ///
    /// # Errors
    /// The input is no line of integers, or has negative ones; the weights are not as many, or no floats; the step is being captured; memory runs out.
    #[track_caller]
    pub fn bincount(&self, weights: Option<&Tensor>, minlength: usize) -> Result<Tensor> {
        const OP: &str = "bincount";
        let _op = memory::scope::op(OP);
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
        let (mut extent, line) = (minlength, self.to_dtype(DType::I32)?);
        if self.numel() > 0 {
            let (least, most) = (line.min_all()?.item()?, line.max_all()?.item()?);
            if least < 0.0 {
                return Err(Error::argument(OP, format!("takes numbers from 0 on, got {least}")));
            }
            extent = extent.max(most as usize + 1);
        }
        let ones = match weights {
            Some(w) => w.clone(),
            None => Tensor::ones(self.shape(), DType::I32, self.device())?,
        };
        let sums = Tensor::zeros(&[extent], ones.dtype(), self.device())?.index_add(0, &line, &ones, 1.0)?;
        if weights.is_some() { Ok(sums) } else { sums.to_dtype(DType::I64) }
    }

    /// How many elements lie in each of `bins` parts of equal width from `min` to `max`, or from the least to the largest element where both are the same; in the
    /// type of the tensor. What lies outside is not counted.
    ///
    /// # Errors
    /// `bins` is 0; `min` is above `max`, or one is not finite; the type is no float; memory runs out.
    #[track_caller]
    pub fn histc(&self, bins: usize, min: f64, max: f64) -> Result<Tensor> {
        const OP: &str = "histc";
        let _op = memory::scope::op(OP);
        if bins == 0 || !(min <= max && (max - min).is_finite()) {
            let rule =
                format!("takes at least one bin between finite bounds, got {bins} from {min} to {max}");
            return Err(Error::argument(OP, rule));
        }
        if !self.dtype().is_float() {
            return Err(Error::dtype(OP, self.dtype(), "takes floats; cast with `to_dtype`"));
        }
        autograd::refuse(OP, &[self])?;
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
        let sums = Tensor::zeros(&[bins], x.dtype(), x.device())?;
        sums.index_add(0, &place, &inside.to_dtype(x.dtype())?, 1.0)?.to_dtype(self.dtype())
    }
}

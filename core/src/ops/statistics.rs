//! Variance, norms and log-sum-exp: reductions in two passes, or of powers.

use smallvec::smallvec;

use super::reduce::{Extra, Over, Reduction, reduce, reduce_float};
use crate::amp::{self, recast, stepwise};
use crate::autograd::{self, SavedTensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::Tensor;

const fn powers(map: &'static str, post: &'static str, math: &'static [&'static str]) -> Reduction {
    Reduction { name: "norm", map, combine: "sum", post, math, empty: Some(0.0) }
}

static MEAN: Reduction = powers("v", "acc / T(p.args.x)", &[]);
// The squares of the distances from the mean: a second pass, because the difference of two large sums loses digits.
static VAR: Reduction =
    Reduction { name: "var", empty: Some(f64::NAN), ..powers("(v - m) * (v - m)", "acc / T(p.args.x)", &[]) };
static STD: Reduction = Reduction {
    name: "std",
    empty: Some(f64::NAN),
    ..powers("(v - m) * (v - m)", "sqrt(acc / T(p.args.x))", &[])
};
static NORM_0: Reduction = powers("nonzero", "acc", &[]);
static NORM_1: Reduction = powers("abs(v)", "acc", &[]);
static NORM_2: Reduction = powers("v * v", "sqrt(acc)", &[]);
static NORM_P: Reduction =
    powers("m_pow(abs(v), p.args.x)", "m_pow(acc, p.args.y)", &["base", "exp", "log", "pow"]);
static NORM_MAX: Reduction = Reduction { combine: "max", ..powers("abs(v)", "acc", &[]) };
static NORM_MIN: Reduction = Reduction { combine: "min", empty: None, ..powers("abs(v)", "acc", &[]) };
static MAXIMUM: Reduction = Reduction {
    name: "logsumexp",
    combine: "max",
    empty: Some(f64::NEG_INFINITY),
    ..powers("v", "acc", &[])
};
// An infinite maximum is not subtracted: infinity less itself is NaN.
static LOGSUMEXP: Reduction = Reduction {
    name: "logsumexp",
    empty: Some(f64::NEG_INFINITY),
    ..powers(
        "m_exp(v - select(0.0, m, m_isfinite(m)))",
        "select(0.0, m, m_isfinite(m)) + m_log(acc)",
        &["base", "exp", "log"],
    )
};

fn args(x: f64, y: f64) -> [f32; 4] {
    [x as f32, y as f32, 0.0, 0.0]
}

impl Tensor {
    /// The mean over the dimensions in f32 (f64 for f64), kept as extents of 1. Not recorded.
    fn center(&self, over: &Over) -> Result<Tensor> {
        let dtype = if self.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let extra = Extra { args: args(over.extent as f64, 0.0), ..Extra::default() };
        reduce(&MEAN, self, over, true, self.dtype(), dtype, extra)
    }

    #[track_caller]
    fn deviation(
        &self,
        op: &'static Reduction,
        dims: &[isize],
        correction: f64,
        keepdim: bool,
    ) -> Result<Tensor> {
        let _op = memory::scope::op(op.name);
        if !self.dtype().is_float() {
            return Err(Error::dtype(op.name, self.dtype(), "takes floats; cast with `to_dtype`"));
        }
        let over = Over::new(op.name, self.shape(), dims)?;
        let center = self.center(&over)?;
        let freedom = (over.extent as f64 - correction).max(0.0);
        let extra = Extra { center: Some(&center), args: args(freedom, 0.0), ..Extra::default() };
        let out = reduce_float(op, self, &over, keepdim, extra)?;
        let root = op.name == "std";
        let (x, y) = (SavedTensor::of(self), root.then(|| SavedTensor::result(&out)));
        Ok(autograd::attach_twice(op.name, out, &[self], move |g, wants| {
            let dtype = g.dtype();
            // Halves are rounded once, behind all steps.
            let (g, x) = (amp::widened(g)?, amp::widened(&x.get(wants)?)?);
            let y = y.as_ref().map(|y| amp::widened(&y.get(wants)?)).transpose()?;
            let mean = match wants.again() {
                true => x.sum_to(&over.kept)?.div(over.extent as f64)?,
                false => center.to_dtype(x.dtype())?,
            };
            let g = match &y {
                Some(y) => g.div(&y.mul(freedom)?)?,
                None => g.mul(2.0 / freedom)?,
            };
            let g = over.spread(&g)?;
            // Zero where the deviation is zero, as in PyTorch, which divides by it nevertheless.
            let away = x.sub(&over.spread(&mean)?)?;
            let grad = g.mul(&away)?;
            let grad = match &y {
                Some(y) => grad.masked_fill(&over.spread(&y.detach())?.eq(0.0)?, 0.0)?,
                None => grad,
            };
            Ok(smallvec![Some(grad.to_dtype(dtype)?)])
        }))
    }

    /// The variance over `dims` (all if there are none), of n - `correction` degrees of freedom: 1 gives the unbiased
    /// estimate, 0 the mean square.
    ///
    /// # Errors
    /// A dimension is out of range or named twice; the dtype is not a float; memory runs out.
    #[track_caller]
    pub fn var(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<Tensor> {
        self.deviation(&VAR, dims, correction, keepdim)
    }

    /// The square root of [`var`](Self::var).
    ///
    /// # Errors
    /// As [`var`](Self::var).
    #[track_caller]
    pub fn std(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<Tensor> {
        self.deviation(&STD, dims, correction, keepdim)
    }

    /// The variance and the mean.
    ///
    /// # Errors
    /// As [`var`](Self::var).
    #[track_caller]
    pub fn var_mean(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        // Both gradients are added before they are rounded.
        let x = amp::widened(self)?;
        let (var, mean) = (x.var(dims, correction, keepdim)?, x.mean(dims, keepdim)?);
        Ok((var.to_dtype(self.dtype())?, mean.to_dtype(self.dtype())?))
    }

    /// The p-norm over `dims` (all if there are none): the number of elements that are not zero for a `p` of 0, the
    /// largest or smallest magnitude for an infinite one.
    ///
    /// # Errors
    /// As [`var`](Self::var); `p` is -inf and there are no elements.
    #[track_caller]
    pub fn norm(&self, p: f64, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        if autograd::wanted(&[self]) {
            // Its gradient is made of powers of the norm, which would be rounded before.
            stepwise!("norm", [self], |x| x.norm(p, dims, keepdim));
        }
        recast!("norm", [self], |x| x.norm(p, dims, keepdim));
        let over = Over::new("norm", self.shape(), dims)?;
        let op = match p {
            0.0 => &NORM_0,
            1.0 => &NORM_1,
            2.0 => &NORM_2,
            f64::INFINITY => &NORM_MAX,
            f64::NEG_INFINITY => &NORM_MIN,
            _ => &NORM_P,
        };
        let extra = Extra { args: args(p, 1.0 / p), ..Extra::default() };
        let out = match self.dtype() {
            // The kernel's powers are f32's.
            DType::F64 if std::ptr::eq(op, &raw const NORM_P) => {
                let _no_grad = autograd::no_grad();
                self.detach().abs()?.pow(p)?.sum(dims, keepdim)?.pow(1.0 / p)?
            }
            _ => reduce_float(op, self, &over, keepdim, extra)?,
        };
        let (x, y) = (SavedTensor::of(self), SavedTensor::result(&out));
        Ok(autograd::attach_twice("norm", out, &[self], move |g, wants| {
            let (x, y) = (x.get(wants)?, y.get(wants)?);
            let (g, y) = (over.spread(g)?, over.spread(&y)?);
            // Where something is zero, or largest, does not change with it.
            let (fixed, whole) = (x.detach(), y.detach());
            let grad = if p == 0.0 {
                x.zeros_like()?
            } else if p == 1.0 {
                g.mul(&x.sign()?)?
            } else if p.is_infinite() {
                let mask = fixed.abs()?.eq(&whole)?.to_dtype(x.dtype())?;
                let ties = mask.sum_to(&over.kept)?;
                g.mul(&x.sign()?)?.mul(&mask)?.div(&ties)?
            } else if p == 2.0 {
                // A norm of zero has a gradient of zero, as in PyTorch.
                g.mul(&x)?.div(&y)?.masked_fill(&whole.eq(0.0)?, 0.0)?
            } else if p < 1.0 {
                // x |x|^(p - 2) is infinite at zero, where PyTorch has no gradient.
                let slope = x.sign()?.mul(&x.abs()?.pow(p - 1.0)?)?.masked_fill(&fixed.eq(0.0)?, 0.0)?;
                slope.mul(&g)?.mul(&y.pow(1.0 - p)?)?
            } else {
                let slope = x.sign()?.mul(&x.abs()?.pow(p - 1.0)?)?;
                slope.mul(&g)?.div(&y.pow(p - 1.0)?)?.masked_fill(&whole.eq(0.0)?, 0.0)?
            };
            Ok(smallvec![Some(grad)])
        }))
    }

    /// The logarithm of the sum of exponentials over `dims` (all if there are none), without overflow.
    ///
    /// # Errors
    /// As [`var`](Self::var).
    #[track_caller]
    pub fn logsumexp(&self, dims: &[isize], keepdim: bool) -> Result<Tensor> {
        recast!("logsumexp", [self], |x| x.logsumexp(dims, keepdim));
        let _op = memory::scope::op("logsumexp");
        if !self.dtype().is_float() {
            return self.to_dtype(DType::F32)?.logsumexp(dims, keepdim);
        }
        let over = Over::new("logsumexp", self.shape(), dims)?;
        let largest = reduce_float(&MAXIMUM, self, &over, true, Extra::default())?;
        if self.dtype() == DType::F64 {
            // The kernel's exponential is f32's.
            let shift = largest.where_(&largest.isfinite()?, 0.0)?;
            let sum = self.sub(&over.spread(&shift)?)?.exp()?.sum(dims, keepdim)?;
            return sum.log()?.add(&shift.reshape(sum.shape())?);
        }
        let extra = Extra { center: Some(&largest), ..Extra::default() };
        // Of halves the gradient keeps it in f32: its rounding would be a factor of all weights.
        let wide = if self.dtype().size() == 2 { DType::F32 } else { self.dtype() };
        let out = reduce(&LOGSUMEXP, self, &over, keepdim, self.dtype(), wide, extra)?;
        let (x, y) = (SavedTensor::of(self), SavedTensor::result(&out));
        let out = autograd::attach_twice("logsumexp", out, &[self], move |g, wants| {
            let (x, y) = (x.get(wants)?, y.get(wants)?);
            let weight = x.to_dtype(y.dtype())?.sub(&over.spread(&y)?)?.exp()?;
            Ok(smallvec![Some(over.spread(g)?.mul(&weight)?.to_dtype(x.dtype())?)])
        });
        out.to_dtype(self.dtype())
    }
}

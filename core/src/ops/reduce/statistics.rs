//! Variance, norms and log-sum-exp: reductions in two passes, or of powers.

use crate::ops::prelude::*;
use crate::ops::reduce::{Combine, ReduceArgs, ReduceDims, ReduceOp, reduce, reduce_float};
use crate::tensor::shape::reduction_dims;
use crate::tensor::{IntoDims, Tensor};

/// Quotient of the combined value and the first parameter, of which f32 holds a part.
pub(super) const DIVIDED: &str = "acc / (T(p.args.x) + T(p.args.z))";

const fn power_sum(map: &'static str, post: &'static str, math: &'static [&'static str]) -> ReduceOp {
    let name = "norm";
    ReduceOp {
        name,
        map,
        from_first: false,
        combine: Combine::Sum,
        post,
        math_files: math,
        empty_value: Some(0.0),
    }
}

// Distance of the mean from the first element. A large mean would be rounded more coarsely than this distance, and the
// sum of large elements may overflow.
static MEAN_FROM_FIRST: ReduceOp = ReduceOp { from_first: true, ..power_sum("v - k", DIVIDED, &[]) };
// Squared distances from the mean, in a second pass, because the difference of two large sums loses digits.
static VAR: ReduceOp = ReduceOp {
    name: "var",
    from_first: true,
    empty_value: Some(f64::NAN),
    ..power_sum("((v - k) - m) * ((v - k) - m)", DIVIDED, &[])
};
static STD: ReduceOp = ReduceOp { name: "std", post: "sqrt(acc / (T(p.args.x) + T(p.args.z)))", ..VAR };
static NORM_0: ReduceOp = power_sum("nonzero", "acc", &[]);
static NORM_1: ReduceOp = power_sum("abs(v)", "acc", &[]);
static NORM_2: ReduceOp = power_sum("v * v", "sqrt(acc)", &[]);
static NORM_P: ReduceOp =
    power_sum("m_pow(abs(v), p.args.x)", "m_pow(acc, p.args.y)", &["base", "exp", "log", "pow"]);
static NORM_MAX: ReduceOp = ReduceOp { combine: Combine::Max, ..power_sum("abs(v)", "acc", &[]) };
static NORM_MIN: ReduceOp =
    ReduceOp { combine: Combine::Min, empty_value: None, ..power_sum("abs(v)", "acc", &[]) };
static LOGSUMEXP_MAX: ReduceOp = ReduceOp {
    name: "logsumexp",
    combine: Combine::Max,
    empty_value: Some(f64::NEG_INFINITY),
    ..power_sum("v", "acc", &[])
};
// An infinite maximum is not subtracted, because ∞ - ∞ is NaN.
static LOGSUMEXP: ReduceOp = ReduceOp {
    name: "logsumexp",
    empty_value: Some(f64::NEG_INFINITY),
    ..power_sum(
        "m_exp(v - select(0.0, m, m_isfinite(m)))",
        "select(0.0, m, m_isfinite(m)) + m_log(acc)",
        &["base", "exp", "log"],
    )
};

/// Returns the largest magnitude of a nonempty tensor in its type, independent of autocast. Not recorded.
pub(crate) fn largest_magnitude(x: &Tensor) -> Result<Tensor> {
    reduce_float(&NORM_MAX, x, &ReduceDims::new("norm", x.shape(), &[])?, false, ReduceArgs::default())
}

with_defaults! {
    /// Options of [`Tensor::cov`].
    #[derive(Clone, Copy, Debug)]
    pub struct CovOptions<'a> {
        /// Subtracted from the number of observations; 1, for the unbiased estimate.
        pub correction: f64 = 1.0,
        /// Integer counts of the observations; `None` for 1.
        pub fweights: Option<&'a Tensor> = None,
        /// Relative weights of the observations; `None` for 1.
        pub aweights: Option<&'a Tensor> = None,
    }
}

impl Tensor {
    /// Computes the distance of the mean from the first element in f32 (f64 for f64), with keepdim. Not recorded.
    fn mean_from_first(&self, axes: &ReduceDims) -> Result<Tensor> {
        let dtype = if self.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let extra = ReduceArgs::with_params(axes.elements_per_output as f64, 0.0);
        reduce(&MEAN_FROM_FIRST, self, axes, true, self.dtype(), dtype, extra)
    }

    /// Computes the variance or deviation, and the mean.
    #[track_caller]
    fn spread_and_mean(
        &self,
        root: bool,
        dims: &[isize],
        correction: f64,
        keepdim: bool,
    ) -> Result<(Tensor, Tensor)> {
        // Compute in f32, so that the two gradients are added before they are rounded.
        let x = amp::half_to_f32(self)?;
        let (spread, center) = x.spread_and_center(root, dims, correction, keepdim)?;
        let mean = x.mean_without_overflow(dims, keepdim, &center)?;
        Ok((spread.to_dtype(self.dtype())?, mean.to_dtype(self.dtype())?))
    }

    /// Computes the mean. Where the sum of finite elements overflows, takes the sum of the first element and `center`,
    /// the mean's distance from it.
    #[track_caller]
    fn mean_without_overflow(&self, dims: &[isize], keepdim: bool, center: &Tensor) -> Result<Tensor> {
        let axes = ReduceDims::new("mean", self.shape(), dims)?;
        if axes.elements_per_output == 0 {
            return self.mean(dims, keepdim);
        }
        let x = self.detach();
        let mean = x.mean(dims, keepdim)?;
        let from_first = axes.first_elements(&x)?.add(center)?.reshape(mean.shape())?;
        // With an infinite or NaN element neither mean is finite, and the plain one is taken.
        let takes_mean = mean.isfinite()?.logical_or(&from_first.isfinite()?.logical_not()?)?;
        let out = mean.where_(&takes_mean, &from_first)?;
        let n = axes.elements_per_output as f64;
        Ok(autograd::differentiable_unary("mean", out, self, move |g, _| axes.expand_to_input(&g.div(n)?)))
    }

    /// Computes the variance, or with `root` the deviation.
    #[track_caller]
    fn var_or_std(&self, root: bool, dims: &[isize], correction: f64, keepdim: bool) -> Result<Tensor> {
        self.spread_and_center(root, dims, correction, keepdim).map(|(spread, _)| spread)
    }

    /// Computes the variance or deviation, and what it needs: [`mean_from_first`](Self::mean_from_first).
    #[track_caller]
    fn spread_and_center(
        &self,
        root: bool,
        dims: &[isize],
        correction: f64,
        keepdim: bool,
    ) -> Result<(Tensor, Tensor)> {
        let op = if root { &STD } else { &VAR };
        operation!(op.name);
        fail_if!(!self.dtype().is_float();
            dtype(op.name, self.dtype()), "takes floats; cast with `to_dtype`");
        let axes = ReduceDims::new(op.name, self.shape(), dims)?;
        let center = self.mean_from_first(&axes)?;
        let freedom = (axes.elements_per_output as f64 - correction).max(0.0);
        let reduce_with = |op, divisor| {
            let extra = ReduceArgs { center: Some(&center), ..ReduceArgs::with_params(divisor, 0.0) };
            reduce_float(op, self, &axes, keepdim, extra)
        };
        let out = match self.dtype() {
            // The kernel's parameters are f32.
            DType::F64 if freedom.fract() != 0.0 => {
                let _no_grad = autograd::no_grad();
                let out = reduce_with(&VAR, 1.0)?.div(freedom)?;
                if root { out.sqrt()? } else { out }
            }
            _ => reduce_with(op, freedom)?,
        };
        // Without degrees of freedom the result is infinite. If dimensions are named, PyTorch's gradient
        // divides by the negative difference.
        let freedom = match dims.is_empty() || self.rank() == 0 {
            true => freedom,
            false => axes.elements_per_output as f64 - correction,
        };
        let (x, y) = (SavedTensor::input(self), root.then(|| SavedTensor::output(&out)));
        let saved_center = center.clone();
        let out = autograd::differentiable_unary(op.name, out, self, move |g, ctx| {
            let dtype = g.dtype();
            // 16-bit gradients are rounded once, after all steps.
            let (g, x) = (amp::half_to_f32(g)?, amp::half_to_f32(&x.unpack(ctx)?)?);
            let y = y.as_ref().map(|y| amp::half_to_f32(&y.unpack(ctx)?)).transpose()?;
            let deviation = match ctx.create_graph() {
                true => {
                    let mean = x.sum_to(&axes.keepdim_shape)?.div(axes.elements_per_output as f64)?;
                    x.sub(&axes.expand_to_input(&mean)?)?
                }
                // As in the kernel, by the distance from the first element.
                false if x.numel() > 0 => {
                    let distance = x.sub(&axes.expand_to_input(&axes.first_elements(&x)?)?)?;
                    distance.sub(&axes.expand_to_input(&saved_center.to_dtype(x.dtype())?)?)?
                }
                false => x.clone(),
            };
            let g = match &y {
                Some(y) => g.div(&y.mul(freedom)?)?,
                None => g.mul(2.0 / freedom)?,
            };
            let g = axes.expand_to_input(&g)?;
            // Zero where the deviation is zero, as in PyTorch. The division itself gives NaN there.
            let grad = g.mul(&deviation)?;
            let grad = match &y {
                Some(y) => grad.masked_fill(&axes.expand_to_input(&y.detach())?.eq(0.0)?, 0.0)?,
                None => grad,
            };
            grad.to_dtype(dtype)
        });
        Ok((out, center))
    }

    /// Computes the variance over `dims` (all if there are none) with n - `correction` degrees of freedom. A
    /// correction of 1 gives the unbiased estimate, 0 the mean square.
    ///
    /// # Errors
    /// A dimension is out of range or repeated, or the dtype is not a float.
    #[track_caller]
    pub fn var(&self, dims: impl IntoDims, correction: f64, keepdim: bool) -> Result<Tensor> {
        self.var_or_std(false, &reduction_dims(dims), correction, keepdim)
    }

    /// Computes the square root of [`var`](Self::var).
    #[track_caller]
    pub fn std(&self, dims: impl IntoDims, correction: f64, keepdim: bool) -> Result<Tensor> {
        self.var_or_std(true, &reduction_dims(dims), correction, keepdim)
    }

    /// Computes the variance and the mean. The mean is finite for all finite elements whose variance is.
    #[track_caller]
    pub fn var_mean(&self, dims: impl IntoDims, correction: f64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.spread_and_mean(false, &reduction_dims(dims), correction, keepdim)
    }

    /// Computes the p-norm over `dims` (all if there are none). For a `p` of 0 it counts nonzero elements,
    /// and for an infinite `p` it is the largest or smallest magnitude.
    ///
    /// # Errors
    /// `p` is -inf and there are no elements. See also [`var`](Self::var).
    #[track_caller]
    pub fn norm(&self, p: f64, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        if autograd::compute_requires_grad(&[self]) {
            // The gradient consists of powers of the norm, which must not be rounded first.
            dispatch_in_f32!("norm", [self], |x| x.norm(p, dims, keepdim));
        }
        dispatch_autocast!("norm", [self], |x| x.norm(p, dims, keepdim));
        let axes = ReduceDims::new("norm", self.shape(), dims)?;
        let op = match p {
            0.0 => &NORM_0,
            1.0 => &NORM_1,
            2.0 => &NORM_2,
            f64::INFINITY => &NORM_MAX,
            f64::NEG_INFINITY => &NORM_MIN,
            _ => &NORM_P,
        };
        let extra = ReduceArgs::with_params(p, 1.0 / p);
        let out = match self.dtype() {
            // The kernel's powers are f32.
            DType::F64 if std::ptr::eq(op, &raw const NORM_P) => {
                let _no_grad = autograd::no_grad();
                self.detach().abs()?.pow(p)?.sum(dims, keepdim)?.pow(1.0 / p)?
            }
            _ => reduce_float(op, self, &axes, keepdim, extra)?,
        };
        let (x, y) = (SavedTensor::input(self), SavedTensor::output(&out));
        Ok(autograd::differentiable_unary("norm", out, self, move |g, ctx| {
            let (x, y) = (x.unpack(ctx)?, y.unpack(ctx)?);
            let (g, y) = (axes.expand_to_input(g)?, axes.expand_to_input(&y)?);
            // The positions of zeros and of the largest elements are constants of the gradient.
            let (constant_x, constant_y) = (x.detach(), y.detach());
            let grad = if p == 0.0 {
                x.zeros_like()?
            } else if p == 1.0 {
                g.mul(&x.sign()?)?
            } else if p.is_infinite() {
                let mask = constant_x.abs()?.eq_or_both_nan(&constant_y)?.to_dtype(x.dtype())?;
                let ties = mask.sum_to(&axes.keepdim_shape)?;
                g.mul(&x.sign()?)?.mul(&mask)?.div(&ties)?
            } else if p == 2.0 {
                // The gradient of a zero norm is zero, as in PyTorch.
                g.mul(&x)?.div(&y)?.masked_fill(&constant_y.eq(0.0)?, 0.0)?
            } else if p < 1.0 {
                // x |x|^(p - 2) is infinite at zero, where PyTorch's gradient is zero.
                let slope = x.sign()?.mul(&x.abs()?.pow(p - 1.0)?)?.masked_fill(&constant_x.eq(0.0)?, 0.0)?;
                slope.mul(&g)?.mul(&y.pow(1.0 - p)?)?
            } else {
                let slope = x.sign()?.mul(&x.abs()?.pow(p - 1.0)?)?;
                slope.mul(&g)?.div(&y.pow(p - 1.0)?)?.masked_fill(&constant_y.eq(0.0)?, 0.0)?
            };
            Ok(grad)
        }))
    }

    /// Computes the standard deviation, see [`std`](Self::std), and the mean, see [`var_mean`](Self::var_mean).
    #[track_caller]
    pub fn std_mean(&self, dims: impl IntoDims, correction: f64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        self.spread_and_mean(true, &reduction_dims(dims), correction, keepdim)
    }

    /// Sums over `dims` (all if there are none), skipping NaN.
    #[track_caller]
    pub fn nansum(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        if !self.dtype().is_float() {
            return self.sum(dims, keepdim);
        }
        self.masked_fill(&self.detach().isnan()?, 0.0)?.sum(dims, keepdim)
    }

    /// Computes the mean over `dims` (all if there are none), skipping NaN.
    #[track_caller]
    pub fn nanmean(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        operation!("nanmean", in_f32[self], |x| x.nanmean(dims, keepdim));
        let x = if self.dtype().is_float() { self.clone() } else { self.to_dtype(DType::F32)? };
        let is_number = x.detach().isnan()?.logical_not()?.to_dtype(x.dtype())?;
        x.nansum(dims, keepdim)?.div(&is_number.sum(dims, keepdim)?)
    }

    /// Computes the covariance matrix of \[variables, observations\], or of the observations of one variable:
    /// PyTorch's `cov`. With weights, the host reads the smallest.
    ///
    /// # Errors
    /// There are more than two dimensions. The weights do not match the observations, or one is negative.
    #[track_caller]
    pub fn cov(&self, options: &CovOptions<'_>) -> Result<Tensor> {
        operation!(OP = "cov", in_f32[self], |x| x.cov(options));
        let &CovOptions { correction, fweights, aweights } = options;
        fail_if!(self.rank() > 2; shape(OP, [self]), "takes at most two dimensions");
        let x = if self.dtype().is_float() { self.clone() } else { self.to_dtype(DType::F32)? };
        let x = x.atleast_2d()?;
        let n = x.shape()[1];
        for w in [fweights, aweights].into_iter().flatten() {
            fail_if!(w.numel() != n || w.rank() > 1;
                shape(OP, [self, w]), "takes a weight for each observation");
        }
        let weight = |w: Option<&Tensor>| w.map(|w| w.to_dtype(x.dtype())?.reshape([n])).transpose();
        let (frequencies, importances) = (weight(fweights)?, weight(aweights)?);
        for w in frequencies.iter().chain(&importances).filter(|_| n > 0) {
            let least = w.detach().min_all()?.item()?;
            if least < 0.0 {
                return Err(Error::argument(OP, format!("a weight is {least}; none is negative")));
            }
        }
        let both = match (&frequencies, &importances) {
            (Some(frequencies), Some(importances)) => Some(frequencies.mul(importances)?),
            (Some(one), None) | (None, Some(one)) => Some(one.clone()),
            (None, None) => None,
        };
        let Some(w) = both else {
            let deviations = x.sub(&x.mean([1], true)?)?;
            // Too few observations give a division by zero, as in PyTorch.
            return deviations
                .matmul(&deviations.t()?)?
                .mul(1.0 / (n as f64 - correction).max(0.0))?
                .squeeze_all();
        };
        let sum = w.sum_all()?;
        let norm = match &importances {
            Some(importances) if correction != 0.0 => {
                sum.sub(&w.mul(importances)?.sum_all()?.mul(correction)?.div(&sum)?)?
            }
            _ => sum.sub(correction)?,
        };
        let deviations = x.sub(&x.mul(&w)?.sum([1], true)?.div(&sum)?)?;
        deviations.mul(&w)?.matmul(&deviations.t()?)?.div(&norm.maximum(0.0)?)?.squeeze_all()
    }

    /// Computes the correlation matrix of \[variables, observations\], or of the observations of one
    /// variable: covariances divided by both standard deviations.
    #[track_caller]
    pub fn corrcoef(&self) -> Result<Tensor> {
        operation!("corrcoef", in_f32[self], |x| x.corrcoef());
        let all = self.cov(&CovOptions::default())?;
        if all.rank() == 0 {
            return all.div(&all);
        }
        let deviation = all.diagonal(0, 0, 1)?.sqrt()?;
        all.div(&deviation.unsqueeze(1)?)?.div(&deviation)?.clamp(-1.0, 1.0)
    }

    /// Scales each slice along `dim` down to norm `max_norm` if its norm is larger: PyTorch's `renorm`.
    ///
    /// # Errors
    /// `self` has fewer than two dimensions or is not a float, or `dim`, `p` or `max_norm` is out of range.
    #[track_caller]
    pub fn renorm(&self, p: f64, dim: isize, max_norm: f64) -> Result<Tensor> {
        operation!(OP = "renorm", in_f32[self], |x| x.renorm(p, dim, max_norm));
        let d = normalize_dim(OP, dim, self.rank())?;
        fail_if!(self.rank() < 2; shape(OP, [self]), "takes at least two dimensions");
        fail_if!(!(p > 0.0 && max_norm >= 0.0);
            argument(OP), "takes a p above 0 and a bound from 0 on, got {p} and {max_norm}");
        let others: Vec<isize> = (0..self.rank()).filter(|&k| k != d).map(|k| k as isize).collect();
        let norm = self.norm(p, &others, true)?;
        let long = norm.detach().gt(max_norm)?;
        let factor = norm.add(1e-7)?.reciprocal()?.mul(max_norm)?;
        self.mul(&factor.where_(&long, 1.0)?)
    }

    /// Computes log Σ exp over `dims` (all if there are none), without overflow.
    #[track_caller]
    pub fn logsumexp(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        operation!("logsumexp", autocast[self], |x| x.logsumexp(dims, keepdim));
        if !self.dtype().is_float() {
            return self.to_dtype(DType::F32)?.logsumexp(dims, keepdim);
        }
        let axes = ReduceDims::new("logsumexp", self.shape(), dims)?;
        let largest = reduce_float(&LOGSUMEXP_MAX, self, &axes, true, ReduceArgs::default())?;
        if self.dtype() == DType::F64 {
            // The kernel's exponential is f32.
            let shift = largest.where_(&largest.isfinite()?, 0.0)?;
            let sum = self.sub(&axes.expand_to_input(&shift)?)?.exp()?.sum(dims, keepdim)?;
            return sum.log()?.add(&shift.reshape(sum.shape())?);
        }
        let extra = ReduceArgs { center: Some(&largest), ..ReduceArgs::default() };
        // Save 16-bit results in f32 for the gradient, because rounding would scale all weights.
        let wide = if self.dtype().size() == 2 { DType::F32 } else { self.dtype() };
        let out = reduce(&LOGSUMEXP, self, &axes, keepdim, self.dtype(), wide, extra)?;
        let (x, y) = (SavedTensor::input(self), SavedTensor::output(&out));
        let out = autograd::differentiable_unary("logsumexp", out, self, move |g, ctx| {
            let (x, y) = (x.unpack(ctx)?, y.unpack(ctx)?);
            let weight = x.to_dtype(y.dtype())?.sub(&axes.expand_to_input(&y)?)?.exp()?;
            axes.expand_to_input(g)?.mul(&weight)?.to_dtype(x.dtype())
        });
        out.to_dtype(self.dtype())
    }
}

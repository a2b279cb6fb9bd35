//! Quantiles: elements at ranks of the sorted order, and interpolation between two of them.

use super::{nonempty_extent, sorted_positions};
use crate::ops::elementwise::prelude::*;
use crate::ops::prelude::*;

/// Rule by which [`Tensor::quantile`] chooses between two elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interpolation {
    /// Linear interpolation.
    #[default]
    Linear,
    /// Lower element.
    Lower,
    /// Higher element.
    Higher,
    /// Nearer element; at the midpoint, the one of even rank.
    Nearest,
    /// Mean of both.
    Midpoint,
}

/// Largest number of elements whose ranks are products in f32, as in PyTorch, which refuses more.
const MAX_F32_RANKS: usize = 1 << 24;

pointwise_ops! {
    // Part of the rank a (b 2^16 + c) for a fraction a: 0 and 1 are the upper and the lower 16 bits of its integer
    // part, 2 is its fraction.
    RANK_PART "rank_part": Float, "m_rank_part(a, b, c, part)", ["mul_wide", "rank"], [NoGrad, NoGrad, NoGrad];
}

/// Ranks of quantiles in rows of sorted elements, with the shape of the result.
struct Ranks {
    /// Integer part, as u32.
    whole: Tensor,
    /// Fraction. It has a gradient if the quantiles require one.
    fraction: Tensor,
}

impl Ranks {
    /// Multiplies the quantiles by the `last` rank of each row, in their type.
    fn in_floats(q: &Tensor, last: &Operand<'_>) -> Result<Self> {
        let ranks = q.mul(*last)?;
        let whole = ranks.detach().floor()?;
        Ok(Self { fraction: ranks.sub(&whole)?, whole: whole.to_dtype(DType::U32)? })
    }

    /// Multiplies quantiles in f32 by the `last` rank of each row, a u32 or an integer, without rounding.
    fn exact(q: &Tensor, last: &Operand<'_>) -> Result<Self> {
        let (high, low) = match last {
            Operand::Tensor(last) => {
                let half = |t: Tensor| t.to_dtype(DType::F32);
                (half(last.floor_divide(1 << 16)?)?, half(last.remainder(1 << 16)?)?)
            }
            Operand::Scalar(last) => {
                let last = last.to_f64();
                let half = |v: f64| Tensor::full([1], v, DType::F32, q.device());
                (half((last / 65536.0).floor())?, half(last % 65536.0)?)
            }
        };
        let constant = q.detach();
        let part = |part: i64| {
            let operands = [Operand::from(&constant), Operand::from(&high), Operand::from(&low)];
            run_pointwise(&RANK_PART, &operands, &[("part", Scalar::Int(part))])
        };
        let whole = part(0)?.to_dtype(DType::U32)?.mul(1 << 16)?.add(&part(1)?.to_dtype(DType::U32)?)?;
        let fraction = part(2)?;
        if !autograd::compute_requires_grad(&[q]) {
            return Ok(Self { whole, fraction });
        }
        // Adds 0, for the gradient.
        let last = high.mul(65536.0)?.add(&low)?;
        Ok(Self { whole, fraction: q.sub(&constant)?.mul(&last)?.add(&fraction)? })
    }

    /// Returns the rank above, or the rank itself if it is whole.
    fn above(&self) -> Result<Tensor> {
        self.whole.add(&self.fraction.detach().gt(0.0)?.to_dtype(DType::U32)?)
    }

    /// Returns the nearer rank, at the midpoint the even one.
    fn nearest(&self) -> Result<Tensor> {
        let fraction = self.fraction.detach();
        let is_odd = self.whole.bitwise_and(1)?.eq(1)?;
        let rises = fraction.gt(0.5)?.logical_or(&fraction.eq(0.5)?.logical_and(&is_odd)?)?;
        self.whole.add(&rises.to_dtype(DType::U32)?)
    }
}

impl Tensor {
    /// Computes quantiles along `dim`, or of all elements for `()`, at ranks q · (n - 1): PyTorch's `quantile`. A
    /// vector `q` becomes the first dimension of the result. A row with NaN gives NaN, and so does a quantile
    /// outside of 0 to 1 in a tensor, which the host does not read.
    ///
    /// # Errors
    /// The dtype is not a float. `q` is a scalar outside of 0 to 1, or a tensor of higher rank. `dim` is out
    /// of range. There are no elements.
    #[track_caller]
    pub fn quantile<'a>(
        &self,
        q: impl IntoOperand<'a>,
        dim: impl IntoDims,
        keepdim: bool,
        interpolation: Interpolation,
    ) -> Result<Tensor> {
        self.compute_quantiles(false, &q.into(), single_dim("quantile", dim)?, keepdim, interpolation)
    }

    /// Computes the [`quantile`](Self::quantile) of the elements that are not NaN, or NaN if all are NaN.
    #[track_caller]
    pub fn nanquantile<'a>(
        &self,
        q: impl IntoOperand<'a>,
        dim: impl IntoDims,
        keepdim: bool,
        interpolation: Interpolation,
    ) -> Result<Tensor> {
        let dim = single_dim("nanquantile", dim)?;
        self.compute_quantiles(true, &q.into(), dim, keepdim, interpolation)
    }

    /// Computes quantiles, with `skips_nan` of the elements that are not NaN.
    #[track_caller]
    fn compute_quantiles(
        &self,
        skips_nan: bool,
        q: &Operand<'_>,
        dim: Option<isize>,
        keepdim: bool,
        interpolation: Interpolation,
    ) -> Result<Tensor> {
        let op = if skips_nan { "nanquantile" } else { "quantile" };
        operation!(op);
        fail_if!(!self.dtype().is_float(); dtype(op, self.dtype()), "takes floats; cast with `to_dtype`");
        let d = normalize_dim(op, dim.unwrap_or(0), self.rank())?;
        let (is_vector, q, outside) = quantile_vector(op, q, self)?;
        // The result depends smoothly on the rank only with linear interpolation.
        let q = if interpolation == Interpolation::Linear { q } else { q.detach() };
        // Move the reduced dimension to the end and leave an extent of 1.
        let lines = match dim {
            Some(_) => self.unsqueeze(-1)?.transpose(d as isize, -1)?,
            None => self.reshape([-1])?,
        };
        let last = lines.rank() - 1;
        let n = nonempty_extent(op, &lines, last)?;
        let order = sorted_positions(op, &lines.detach())?;
        let element_at = |rank: &Tensor| lines.gather(-1, &order.gather(-1, rank)?);
        let is_exact = q.dtype() == DType::F32 && n > MAX_F32_RANKS;
        let ranks_to = |last: &Operand<'_>| match is_exact {
            true => Ranks::exact(&q, last),
            false => Ranks::in_floats(&q, last),
        };
        let ranks = if skips_nan {
            let count = lines.detach().isnan()?.logical_not()?.count_nonzero([-1])?.unsqueeze(-1)?;
            let last = count.to_dtype(DType::U32)?.maximum(1)?.sub(1)?;
            ranks_to(&Operand::from(&if is_exact { last } else { last.to_dtype(q.dtype())? }))?
        } else {
            // NaN sort last and are selected if there are any.
            let Ranks { whole, fraction } = ranks_to(&Operand::from(n - 1))?;
            let has_nan = lines.detach().gather(-1, &order.narrow(-1, n - 1, 1)?)?.isnan()?;
            Ranks {
                whole: whole.masked_fill(&has_nan, (n - 1) as i64)?,
                fraction: fraction.masked_fill(&has_nan, 0.0)?,
            }
        };
        let out = match interpolation {
            Interpolation::Lower => element_at(&ranks.whole)?,
            Interpolation::Higher => element_at(&ranks.above()?)?,
            Interpolation::Nearest => element_at(&ranks.nearest()?)?,
            Interpolation::Linear | Interpolation::Midpoint => {
                let (below, above) = (element_at(&ranks.whole)?, element_at(&ranks.above()?)?);
                if interpolation == Interpolation::Midpoint {
                    below.lerp(&above, 0.5)?
                } else {
                    below.lerp(&above, &ranks.fraction.to_dtype(below.dtype())?)?
                }
            }
        };
        let out = match outside {
            Some(outside) => out.masked_fill(&outside, f64::NAN)?,
            None => out,
        };
        let order: Vec<isize> = [last].into_iter().chain(0..last).map(|d| d as isize).collect();
        let mut shape: Dims = if is_vector { smallvec![q.numel()] } else { smallvec![] };
        let extents = self.shape().iter().enumerate();
        shape.extend(extents.filter_map(|(k, &n)| match dim {
            Some(_) if k != d => Some(n),
            _ => keepdim.then_some(1),
        }));
        out.permute(&order)?.reshape(&shape[..])
    }
}

/// Returns whether the quantiles are a vector, the quantiles as a vector in f32 (f64 for f64), and a mask of those
/// outside of 0 to 1 of a tensor, which become 0.
fn quantile_vector(op: &'static str, q: &Operand<'_>, x: &Tensor) -> Result<(bool, Tensor, Option<Tensor>)> {
    let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let value = match q {
        Operand::Tensor(t) if t.rank() > 1 => {
            fail!(shape(op, [t]), "the quantiles are a number, or have one dimension")
        }
        Operand::Tensor(t) => {
            x.check_same_device(op, t)?;
            let q = t.reshape([-1])?.to_dtype(dtype)?;
            let constant_q = q.detach();
            let outside = constant_q.ge(0.0)?.logical_and(&constant_q.le(1.0)?)?.logical_not()?;
            return Ok((t.rank() == 1, q.masked_fill(&outside, 0.0)?, Some(outside)));
        }
        Operand::Scalar(q) => q.to_f64(),
    };
    fail_if!(!(0.0..=1.0).contains(&value);
        argument(op), "{value} is not a quantile; they lie between 0 and 1");
    Ok((false, Tensor::full([1], value, dtype, x.device())?, None))
}

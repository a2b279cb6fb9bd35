//! Sequences of equal steps, and their powers. One kernel computes them, so neither time nor memory of the host
//! grows with their length.

use crate::ops::prelude::*;
use crate::tensor::layout::MAX_TENSOR_NUMEL;

/// Largest magnitude up to which an f64 holds every integer.
const MAX_F64_INTEGER: u64 = 1 << 53;

/// Values of a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sequence {
    /// start + ⌊i · (quotient + remainder / divisor)⌋ towards zero, exact in 64 bits.
    Integer { start: i64, quotient: i64, remainder: u32, divisor: u32 },
    /// start + i · step for i below `half`, else end + j · back, where j counts from the last element. Computed as
    /// f64, and rounded once more to the dtype.
    Float { start: f64, step: f64, end: f64, back: f64, half: usize },
}

/// Returns the words of a finite float for `w_from_words` in `wide.wgsl`: mantissa, exponent and sign.
fn wide_words(value: f64) -> [u32; 4] {
    let (bits, magnitude) = (value.to_bits(), value.abs().to_bits());
    let fraction = magnitude & ((1 << 52) - 1);
    let (mantissa, exponent) = match magnitude >> 52 {
        0 => (fraction, -1074),
        biased => (fraction | 1 << 52, biased as i32 - 1075),
    };
    if mantissa == 0 {
        return [0; 4];
    }
    let zeros = mantissa.leading_zeros();
    let mantissa = mantissa << zeros;
    [(mantissa >> 32) as u32, mantissa as u32, (exponent - zeros as i32) as u32, (bits >> 63) as u32]
}

/// Returns the words of an integer, the lower one first.
fn integer_words(value: i64) -> [u32; 4] {
    [value as u32, (value >> 32) as u32, 0, 0]
}

impl Sequence {
    /// Returns equal steps from `start` on. Both are finite.
    fn from_start(start: f64, step: f64, count: usize) -> Self {
        Self::Float { start, step, end: 0.0, back: 0.0, half: count }
    }

    /// Returns `steps` values between both ends, for floats. Returns `None` if values are infinite or NaN.
    fn between(start: f64, end: f64, steps: usize) -> Option<Self> {
        let intervals = steps.saturating_sub(1).max(1) as f64;
        let step = match end - start {
            width if width.is_finite() => width / intervals,
            // The width of finite ends may overflow.
            _ => end / intervals - start / intervals,
        };
        // As in PyTorch, each half counts from its own end, so both ends are exact.
        let half = if steps == 1 { 1 } else { steps / 2 };
        (start.is_finite() && end.is_finite()).then_some(Self::Float { start, step, end, back: -step, half })
    }

    /// Returns `steps` integers between both ends, rounded towards zero.
    fn between_integers(start: i64, end: i64, steps: usize) -> Option<Self> {
        if start.unsigned_abs().max(end.unsigned_abs()) <= MAX_F64_INTEGER {
            // PyTorch's arithmetic, which an f64 suffices for.
            return Self::between(start as f64, end as f64, steps);
        }
        let divisor = u32::try_from(steps.saturating_sub(1).max(1)).ok()?;
        let width = if steps > 1 { i128::from(end) - i128::from(start) } else { 0 };
        let (quotient, remainder) =
            (width.div_euclid(divisor.into()), width.rem_euclid(divisor.into()) as u32);
        // Products of a quotient above the range wrap, and their sum with the start is in range again.
        Some(Self::Integer { start, quotient: quotient as i64, remainder, divisor })
    }

    /// Returns element `i` of `count` as a float.
    fn float_at(&self, i: usize, count: usize) -> f64 {
        match *self {
            Self::Integer { start, quotient, .. } => start as f64 + i as f64 * quotient as f64,
            Self::Float { start, step, half, .. } if i < half => start + i as f64 * step,
            Self::Float { end, back, .. } => end + (count - 1 - i) as f64 * back,
        }
    }

    /// Creates a tensor of the first `count` values, or of `base` to these powers.
    pub(super) fn create(
        self,
        op: &'static str,
        count: usize,
        base: Option<f64>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        fail_if!(count > MAX_TENSOR_NUMEL;
            argument(op), "{count} values, and a tensor has at most 4,294,967,295 elements");
        if let Self::Float { .. } = self
            && dtype.is_int()
        {
            // The magnitude is largest at an end. The neighbours of the ends may have another sign.
            for i in
                [0, 1, count.saturating_sub(2), count.saturating_sub(1)].into_iter().filter(|&i| i < count)
            {
                let value = self.float_at(i, count);
                Scalar::Float(base.map_or(value, |base| base.powf(value))).checked_cast(op, dtype)?;
            }
        }
        let computed = if dtype.is_int() || dtype.is_float() { dtype } else { DType::F32 };
        let out = Tensor::empty([count], computed, device)?;
        let kind = match (self, base) {
            (Self::Integer { .. }, _) => "integer",
            (Self::Float { .. }, None) => "float",
            (Self::Float { .. }, Some(_)) => "power",
        };
        let (half, divisor, [start, end, step, back]) = match self {
            Self::Integer { start, quotient, remainder, divisor } => {
                let [low, high, ..] = integer_words(quotient);
                (0, divisor, [integer_words(start), [0; 4], [low, high, remainder, 0], [0; 4]])
            }
            // A sum with zero, as the first value is computed, makes -0 to 0.
            Self::Float { start, step, end, back, half } => {
                (half, 1, [start + 0.0 * step, end + 0.0 * back, step, back].map(wide_words))
            }
        };
        let base = base.unwrap_or(1.0);
        let spec = kernel_spec! { "sequence", dtype: computed.name(), kind };
        let params = kernel_params! {
            n: count, half, negative_base: base < 0.0, divisor, start, end, step, back,
            base: wide_words(base.abs()), log2_base: wide_words(if base == 0.0 { 0.0 } else { base.abs().log2() }),
        };
        let per_thread = if computed.size() < 4 { 4 } else { 1 };
        launch::launch(&spec, &[&out], params, count.div_ceil(per_thread * WORKGROUP_SIZE))?;
        out.to_dtype(dtype)
    }
}

/// Returns the number of values from `start` to before `end`. Returns `None` if the steps do not lead there.
fn count_steps(start: Scalar, end: Scalar, step: Scalar) -> Option<usize> {
    if let (Some(start), Some(end), Some(step)) = (start.to_integer(), end.to_integer(), step.to_integer()) {
        let (width, step) = (i128::from(end) - i128::from(start), i128::from(step));
        let leads = step != 0 && (width == 0 || (width > 0) == (step > 0));
        return leads.then(|| width.unsigned_abs().div_ceil(step.unsigned_abs()) as usize);
    }
    let (start, end, step) = (start.to_f64(), end.to_f64(), step.to_f64());
    let count = ((end - start) / step).ceil();
    (step != 0.0 && count.is_finite() && count >= 0.0 && (end - start) * step >= 0.0)
        .then_some(count as usize)
}

impl Tensor {
    /// Creates the values `start`, `start + step`, ... before `end`. Their number is (`end` - `start`) / `step`,
    /// rounded up.
    ///
    /// Integers are exact in an integer type. Other values are `start + i * step` in f64 on every device, rounded once
    /// to f32 or f64. f16 and bf16 are rounded from f32. An integer type drops the fraction of each value.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// assert_eq!(Tensor::arange(0, 10, 2, DType::I64, &device)?.shape(), [5]);
    /// assert_eq!(Tensor::arange(1.0, 0.0, -0.25, DType::F32, &device)?.shape(), [4]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// `step` is 0 or points away from `end`, there are 2^32 values or more, or the dtype does not hold all of them.
    #[doc(alias = "range")]
    #[track_caller]
    pub fn arange(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        operation!(OP = "arange");
        let (start, end, step) = (start.into(), end.into(), step.into());
        let Some(count) = count_steps(start, end, step) else {
            fail!(argument(OP), "steps of {step} do not lead from {start} to {end}")
        };
        let sequence = match (start.to_integer(), step.to_integer()) {
            (Some(start), Some(step)) if dtype.is_int() => {
                let last = i128::from(start) + count.saturating_sub(1) as i128 * i128::from(step);
                for value in [i128::from(start), last].into_iter().take(count) {
                    let value = i64::try_from(value).map_or(Scalar::Float(value as f64), Scalar::Int);
                    value.checked_cast(OP, dtype)?;
                }
                Sequence::Integer { start, quotient: step, remainder: 0, divisor: 1 }
            }
            _ => Sequence::from_start(start.to_f64(), step.to_f64(), count),
        };
        sequence.create(OP, count, None, dtype, device)
    }

    /// Creates `steps` equally spaced values from `start` to `end`, both included.
    ///
    /// The values are computed in f64 on every device, as in PyTorch. An integer type drops the fractions of the ends,
    /// then those of the values. Ends beyond 2^53 give exact integers.
    ///
    /// # Errors
    /// There are 2^32 values or more, or the dtype does not hold an end.
    #[track_caller]
    pub fn linspace(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        steps: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        operation!(OP = "linspace");
        let (start, end) = (start.into().checked_cast(OP, dtype)?, end.into().checked_cast(OP, dtype)?);
        let sequence = match (start, end) {
            (Scalar::Int(start), Scalar::Int(end)) if dtype.is_int() => {
                Sequence::between_integers(start, end, steps)
            }
            _ => Sequence::between(start.to_f64(), end.to_f64(), steps),
        };
        match sequence {
            Some(sequence) => sequence.create(OP, steps, None, dtype, device),
            None => Tensor::full([steps], if steps == 1 { start } else { f64::NAN.into() }, dtype, device),
        }
    }

    /// Creates `base` to the powers of `steps` equally spaced values from `start` to `end`, both included.
    ///
    /// The values are computed in f64 on every device. An integer type drops the fractions of the exponents' ends, then
    /// those of the values.
    ///
    /// # Errors
    /// There are 2^32 values or more, a base or an end is infinite or NaN, or the dtype does not hold all values.
    #[track_caller]
    pub fn logspace(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        steps: usize,
        base: impl Into<Scalar>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        operation!(OP = "logspace");
        let exponent = |end: Scalar| if dtype.is_int() { end.to_f64().trunc() } else { end.to_f64() };
        let (start, end, base) = (exponent(start.into()), exponent(end.into()), base.into().to_f64());
        match Sequence::between(start, end, steps).filter(|_| base.is_finite()) {
            Some(sequence) => sequence.create(OP, steps, Some(base), dtype, device),
            None => fail!(argument(OP), "takes finite values, got {base} to the powers of {start} to {end}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_floats_give_their_values() {
        for value in [1.0, -0.75, 1e300, f64::MIN_POSITIVE, 5e-324, -3.5e-310, f64::MAX, 0.1] {
            let [high, low, exponent, negative] = wide_words(value);
            assert!(high >> 31 == 1, "{value}");
            let mantissa = (u64::from(high) << 32 | u64::from(low)) as f64;
            let half = exponent as i32 / 2;
            let scaled = mantissa * 2f64.powi(half) * 2f64.powi(exponent as i32 - half);
            assert_eq!(if negative == 1 { -scaled } else { scaled }, value);
        }
        assert_eq!(wide_words(0.0), [0; 4]);
    }

    #[test]
    fn steps_are_counted_exactly() {
        let count = |start: Scalar, end: Scalar, step: Scalar| count_steps(start, end, step);
        let large = (1i64 << 53) + 1;
        assert_eq!(count(large.into(), (large + 4).into(), 1.into()), Some(4));
        assert_eq!(count(i64::MIN.into(), i64::MAX.into(), i64::MAX.into()), Some(3));
        assert_eq!(count(3.into(), 0.into(), (-2).into()), Some(2));
        assert_eq!(count(0.0.into(), 1.0.into(), 0.3.into()), Some(4));
        assert_eq!(count(5.into(), 5.into(), (-1).into()), Some(0));
        assert_eq!(count(0.into(), 5.into(), (-1).into()), None);
        assert_eq!(count(0.into(), 5.into(), 0.into()), None);
        assert_eq!(count(0.0.into(), f64::INFINITY.into(), 1.into()), None);
        assert_eq!(count(0.0.into(), 1e-200.into(), (-1e-200).into()), None);
    }
}

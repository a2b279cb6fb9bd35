//! Random values by the counter-based Philox4x32-10, with the same bits on every backend for one seed.
//!
//! A fill takes the next blocks of the device's stream ([`Device::random_state`]), four elements a block.

use crate::ops::index::select::SearchSortedOptions;
use crate::ops::prelude::*;
use crate::runtime::capture::replay_params::{PhiloxState, ReplayCtx};

/// Distribution of the values. Sort keys are i64: the upper word is an `Integer` over all i32 but one, the lower word
/// a separate draw.
#[derive(Clone, Copy, Debug)]
enum Distribution {
    Uniform { low: f64, high: f64 },
    Normal { mean: f64, std: f64 },
    Integer { low: i64, high: i64 },
    Bernoulli { p: f64 },
    SortKey,
}

/// Returns the fraction bits, the smallest normal exponent and the largest value of a float type.
fn float_format(dtype: DType) -> Option<(i32, i32, f64)> {
    match dtype {
        DType::F32 => Some((23, -126, f64::from(f32::MAX))),
        DType::F16 => Some((10, -14, 65_504.0)),
        DType::BF16 => Some((7, -126, f64::from(f32::from_bits(0x7f7f_0000)))),
        _ => None,
    }
}

/// Returns the smallest positive value of a float type that kernels do not flush to zero.
fn smallest_positive(dtype: DType) -> f64 {
    match dtype {
        // Conversions keep the subnormals of f16.
        DType::F16 => 2f64.powi(-24),
        DType::F64 => f64::MIN_POSITIVE,
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// Returns the largest finite value of a float type that is not above `x`.
fn round_down_to_dtype(x: f64, dtype: DType) -> f64 {
    let Some((fraction, smallest, _)) = float_format(dtype) else { return x };
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    // A power of two, so the division is exact.
    let step = 2f64.powi(exponent.max(smallest) - fraction);
    (x / step).floor() * step
}

/// Returns the smallest and the largest value of a float type in low ≤ x < high.
///
/// If `closed`, the range is low ≤ x ≤ high, first clamped to the type's range.
///
/// # Errors
/// A bound exceeds the type's range, or the type has no value in between.
#[doc(hidden)]
#[track_caller]
pub fn representable_range(
    op: &'static str,
    low: f64,
    high: f64,
    closed: bool,
    dtype: DType,
) -> Result<[f64; 2]> {
    let largest = float_format(dtype).map_or(f64::MAX, |(_, _, largest)| largest);
    let (low, high) = if closed { (low.max(-largest), high.min(largest)) } else { (low, high) };
    fail_if!(low.abs() > largest || high.abs() > largest; argument(op),
        "{low}..{high} leaves the numbers of {dtype}, which end at {largest:e}; take a type that reaches as far");
    // Avoids -0.
    let min = 0.0 - round_down_to_dtype(-low, dtype);
    let max = round_down_to_dtype(if closed { high } else { high.next_down() }, dtype);
    fail_if!(min > max; argument(op),
        "no number of {dtype} lies in {low}..{high}; take a wider range, or a type of higher precision");
    Ok([min, max])
}

/// Returns the bits of an f32 as an integer that has the same order.
fn ordered_bits(x: f64) -> u32 {
    let bits = (x as f32).to_bits() as i32;
    (if bits < 0 { bits ^ i32::MAX } else { bits }) as u32
}

/// Returns a probability as an upper bound for 32 random bits, and whether every draw lies below the bound.
fn bernoulli_threshold(p: f64) -> (u32, bool) {
    let bound = (p * 4_294_967_296.0).round();
    if bound >= 4_294_967_296.0 { (u32::MAX, true) } else { (bound as u32, false) }
}

/// Returns the inverse of the probability that 32 random bits keep an element, so that a mean is exact for
/// every `p`.
fn dropout_keep_scale(p: f64) -> f64 {
    const OUTCOMES: f64 = 4_294_967_296.0;
    OUTCOMES / (OUTCOMES - f64::from(bernoulli_threshold(p).0))
}

/// Creates a tensor of random values for the operation `op`.
#[track_caller]
fn fill_random(
    op: &'static str,
    shape: impl IntoShape,
    kind: Distribution,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    operation!(op);
    // Bounds of types that round.
    let bounds = match kind {
        Distribution::Uniform { low, high } if low < high => {
            representable_range(op, low, high, false, dtype)?
        }
        Distribution::Integer { low, high } if dtype.is_float() => {
            representable_range(op, low as f64, high as f64, false, dtype)?
        }
        _ => [-f64::from(f32::MAX), f64::from(f32::MAX)],
    };
    let out = Tensor::empty(shape, dtype, device)?;
    launch::check_device_dtype(op, dtype, device).or_else(|e| match kind {
        // 32-bit integers fit i64 as words.
        Distribution::Integer { .. } | Distribution::SortKey if dtype == DType::I64 => Ok(()),
        _ => Err(e),
    })?;
    let blocks = out.numel().div_ceil(4);
    let philox_state = device.draw_random(blocks as u64);
    let mut factor = 1.0;
    let (name, scale, shift, low, range, (bound, always)) = match kind {
        Distribution::Uniform { low, high } => {
            if !((high - low) as f32).is_finite() {
                factor = 2.0;
            }
            let half = |x: f64| x / f64::from(factor);
            ("uniform", (half(high) - half(low)) as f32, half(low) as f32, 0, 0, (0, false))
        }
        Distribution::Normal { mean, std } => ("normal", std as f32, mean as f32, 0, 0, (0, false)),
        Distribution::Integer { low, high } => {
            ("integer", 0.0, 0.0, low as u32, (high - low) as u32, (0, false))
        }
        Distribution::Bernoulli { p } => ("bernoulli", 0.0, 0.0, 0, 0, bernoulli_threshold(p)),
        Distribution::SortKey => ("key", 0.0, 0.0, i32::MIN as u32, u32::MAX, (0, false)),
    };
    // Both distributions of i64 write words.
    let shader =
        if matches!(kind, Distribution::SortKey) { "" } else { launch::shader_dtype_name(dtype, device) };
    let spec = kernel_spec! { "random", dtype: shader, kind: name };
    let numel = out.numel();
    let params = move |replay: &ReplayCtx| {
        let (offset, seed) = philox_state.offset_and_seed(replay);
        kernel_params! {
            n: numel, zero: 0u32, scale, shift, offset, seed, low, range, threshold: bound, always,
            min_bits: ordered_bits(bounds[0]), max_bits: ordered_bits(bounds[1]), factor,
        }
    };
    launch::launch_dynamic(&spec, &[&out], params, blocks.div_ceil(WORKGROUP_SIZE))?;
    Ok(out)
}

#[track_caller]
fn check_float_dtype(op: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_float() { Ok(()) } else { Err(Error::dtype(op, dtype, "fills floats; use `randint`")) }
}

impl Tensor {
    /// Samples floats uniformly from 0 ≤ x < 1, in steps of 2⁻²⁴.
    #[track_caller]
    pub fn rand(shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Tensor> {
        Self::sample_uniform("rand", shape, [0.0, 1.0], dtype, device)
    }

    /// Samples uniformly from low ≤ x < high, in 2²⁴ rounded steps. Returns `low` if both are equal.
    ///
    /// # Errors
    /// The dtype is not a float, `low` is above `high`, or the type has no value between the bounds.
    #[track_caller]
    pub fn uniform(
        shape: impl IntoShape,
        low: f64,
        high: f64,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        Self::sample_uniform("uniform", shape, [low, high], dtype, device)
    }

    #[track_caller]
    fn sample_uniform(
        op: &'static str,
        shape: impl IntoShape,
        [low, high]: [f64; 2],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let shape = &new_shape(op, shape)?;
        check_float_dtype(op, dtype)?;
        fail_if!(!(low <= high && low.is_finite() && high.is_finite());
            argument(op), "{low}..{high} is not a range of numbers");
        if dtype != DType::F64 || (low, high) == (0.0, 1.0) {
            return fill_random(op, shape, Distribution::Uniform { low, high }, dtype, device);
        }
        operation!(op);
        // The kernel's parameters are f32.
        let unit = fill_random(op, shape, Distribution::Uniform { low: 0.0, high: 1.0 }, dtype, device)?;
        if low == high {
            return unit.mul(0.0)?.add(low);
        }
        let [min, max] = representable_range(op, low, high, false, dtype)?;
        let scaled = match high - low {
            width if width.is_finite() => unit.mul(width)?.add(low)?,
            _ => unit.mul(high / 2.0 - low / 2.0)?.add(low / 2.0)?.mul(2.0)?,
        };
        scaled.clamp(min, max)
    }

    /// Samples floats of the normal distribution with mean 0 and standard deviation 1.
    #[track_caller]
    pub fn randn(shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Tensor> {
        Self::sample_normal("randn", shape, [0.0, 1.0], dtype, device)
    }

    /// Samples a normal distribution.
    ///
    /// # Errors
    /// The dtype is not a float, or `std` is negative.
    #[track_caller]
    pub fn normal(
        shape: impl IntoShape,
        mean: f64,
        std: f64,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        Self::sample_normal("normal", shape, [mean, std], dtype, device)
    }

    #[track_caller]
    fn sample_normal(
        op: &'static str,
        shape: impl IntoShape,
        [mean, std]: [f64; 2],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        check_float_dtype(op, dtype)?;
        fail_if!(std < 0.0 || std.is_nan();
            argument(op), "a standard deviation is 0 or more, not {std}");
        fill_random(op, shape, Distribution::Normal { mean, std }, dtype, device)
    }

    /// Samples as [`rand`](Self::rand) does, with the shape, type and device of `self`.
    #[track_caller]
    pub fn rand_like(&self) -> Result<Tensor> {
        Self::sample_uniform("rand_like", self.shape(), [0.0, 1.0], self.dtype(), self.device())
    }

    /// Samples as [`randn`](Self::randn) does, with the shape, type and device of `self`.
    #[track_caller]
    pub fn randn_like(&self) -> Result<Tensor> {
        Self::sample_normal("randn_like", self.shape(), [0.0, 1.0], self.dtype(), self.device())
    }

    /// Samples integers from low ≤ x < high, in the range of an i32. The bias is below range / 2³². A float
    /// type that cannot represent an integer stores its nearest value in the range.
    ///
    /// # Errors
    /// The range is empty, too wide, or exceeds the type's range, or the type has no value in the range.
    #[track_caller]
    pub fn randint(
        low: i64,
        high: i64,
        shape: impl IntoShape,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        Self::sample_integers("randint", shape, [low, high], dtype, device)
    }

    #[track_caller]
    fn sample_integers(
        op: &'static str,
        shape: impl IntoShape,
        [low, high]: [i64; 2],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let ends = [i32::try_from(low), i32::try_from(high.saturating_sub(1))];
        fail_if!(low >= high || ends.iter().any(Result::is_err) || u32::try_from(high - low).is_err();
            argument(op), "{low}..{high} is not a range of 32-bit integers");
        let max_value = match dtype {
            DType::U8 => Some(255),
            DType::Bool => Some(1),
            _ => None,
        };
        fail_if!(max_value.is_some_and(|max| low < 0 || high - 1 > max) || (dtype == DType::U32 && low < 0);
            argument(op), "{low}..{high} are not all numbers of {dtype}");
        fill_random(op, shape, Distribution::Integer { low, high }, dtype, device)
    }

    /// Samples as [`randint`](Self::randint) does, with the shape, type and device of `self`.
    #[track_caller]
    pub fn randint_like(&self, low: i64, high: i64) -> Result<Tensor> {
        Self::sample_integers("randint_like", self.shape(), [low, high], self.dtype(), self.device())
    }

    /// Returns the integers from 0 to `n` - 1 in random order: the argsort of random 64-bit keys.
    ///
    /// # Errors
    /// `dtype` is bool, or cannot represent all of these integers.
    #[track_caller]
    pub fn randperm(n: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        operation!("randperm");
        fail_if!(dtype == DType::Bool; dtype("randperm", dtype), "takes number types");
        // Number of consecutive integers that the type represents.
        let max_count: usize = match dtype {
            DType::U8 => 1 << 8,
            DType::BF16 => (1 << 8) + 1,
            DType::F16 => (1 << 11) + 1,
            DType::F32 => (1 << 24) + 1,
            DType::I32 => 1 << 31,
            _ => usize::MAX,
        };
        fail_if!(n > max_count; argument("randperm"),
            "{dtype} does not hold all numbers below {n}, only those below {max_count}; take i64");
        let keys = {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            fill_random("randperm", [n], Distribution::SortKey, DType::I64, device)?
        };
        keys.argsort(0, false)?.to_dtype(dtype)
    }

    /// Samples 1 with probability `p`, else 0.
    ///
    /// # Errors
    /// `p` is not a probability.
    #[track_caller]
    pub fn bernoulli(shape: impl IntoShape, p: f64, dtype: DType, device: &Device) -> Result<Tensor> {
        Self::sample_probability("bernoulli", shape, p, dtype, device)
    }

    #[track_caller]
    fn sample_probability(
        op: &'static str,
        shape: impl IntoShape,
        p: f64,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        fail_if!(!(0.0..=1.0).contains(&p); argument(op), "{p} is not a probability");
        fill_random(op, shape, Distribution::Bernoulli { p }, dtype, device)
    }

    /// Samples 1 with the probability that each element states, else 0: PyTorch's `bernoulli` of a tensor. As there,
    /// the gradient of the probabilities is zero.
    ///
    /// # Errors
    /// The dtype is not a float. The host does not read the probabilities, so others than 0 to 1 are no error.
    #[doc(alias = "bernoulli")]
    #[track_caller]
    pub fn sample_bernoulli(&self) -> Result<Tensor> {
        operation!(OP = "sample_bernoulli");
        check_float_dtype(OP, self.dtype())?;
        let samples = self.draw_unit()?.lt(&self.detach())?.to_dtype(self.dtype())?;
        Ok(autograd::differentiable_unary(OP, samples, self, |g, _| g.zeros_like()))
    }

    /// Replaces the elements for the operation `op`, which errors name.
    #[track_caller]
    fn overwrite(&self, op: &'static str, values: &Tensor) -> Result<()> {
        self.copy_(values).map_err(|error| error.with_op(op))
    }

    /// Draws uniform values from 0 ≤ x < 1, in f64 for f64, else in f32.
    fn draw_unit(&self) -> Result<Tensor> {
        let dtype = if self.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        Tensor::rand(self.shape(), dtype, self.device())
    }

    /// Fills the tensor with samples from low ≤ x < high: [`uniform`](Self::uniform).
    ///
    /// # Errors
    /// The tensor is a leaf that requires a gradient while recording. See also [`uniform`](Self::uniform).
    #[track_caller]
    pub fn uniform_(&self, low: f64, high: f64) -> Result<()> {
        const OP: &str = "uniform_";
        run_composite(OP, || {
            self.copy_(&Self::sample_uniform(OP, self.shape(), [low, high], self.dtype(), self.device())?)
        })
    }

    /// Fills the tensor as [`uniform_`](Self::uniform_) does, with samples of [`normal`](Self::normal).
    #[track_caller]
    pub fn normal_(&self, mean: f64, std: f64) -> Result<()> {
        const OP: &str = "normal_";
        run_composite(OP, || {
            self.copy_(&Self::sample_normal(OP, self.shape(), [mean, std], self.dtype(), self.device())?)
        })
    }

    /// Fills the tensor as [`uniform_`](Self::uniform_) does, with integers of [`randint`](Self::randint).
    #[track_caller]
    pub fn random_(&self, low: i64, high: i64) -> Result<()> {
        const OP: &str = "random_";
        run_composite(OP, || {
            self.copy_(&Self::sample_integers(OP, self.shape(), [low, high], self.dtype(), self.device())?)
        })
    }

    /// Fills the tensor with 1 with probability `p`, else 0. A tensor has a probability for each element, and
    /// broadcasts. See [`bernoulli`](Self::bernoulli) and [`sample_bernoulli`](Self::sample_bernoulli).
    ///
    /// # Errors
    /// See [`uniform_`](Self::uniform_). `p` is not a probability, or is a tensor of another dtype than floats.
    #[track_caller]
    pub fn bernoulli_<'a>(&self, p: impl IntoOperand<'a>) -> Result<()> {
        const OP: &str = "bernoulli_";
        let p: Operand<'_> = p.into();
        run_composite(OP, || match p {
            Operand::Scalar(p) => {
                let (dtype, device) = (self.dtype(), self.device());
                self.copy_(&Self::sample_probability(OP, self.shape(), p.to_f64(), dtype, device)?)
            }
            Operand::Tensor(p) => self.copy_(&p.broadcast_to(self.shape())?.sample_bernoulli()?),
        })
    }

    /// Fills the tensor with samples of the exponential distribution, whose mean is 1 / `rate`.
    ///
    /// # Errors
    /// See [`uniform_`](Self::uniform_). `rate` is not above 0, or the dtype is not a float.
    #[track_caller]
    pub fn exponential_(&self, rate: f64) -> Result<()> {
        operation!(OP = "exponential_");
        check_float_dtype(OP, self.dtype())?;
        fail_if!(!(rate > 0.0 && rate.is_finite()); argument(OP), "takes a rate above 0, got {rate}");
        // A draw of 0 represents the values that round to it, so no sample is 0.
        let sample = self.draw_unit()?.neg()?.log1p()?.neg()?.clamp_min(f64::from(f32::EPSILON) / 4.0)?;
        // The scale and the dtype may round a sample to 0 as well.
        self.overwrite(OP, &sample.mul(1.0 / rate)?.clamp_min(smallest_positive(self.dtype()))?)
    }

    /// Fills the tensor with the number of trials until the first success, whose probability is `p`.
    ///
    /// # Errors
    /// See [`uniform_`](Self::uniform_). `p` is 0 or no probability.
    #[track_caller]
    pub fn geometric_(&self, p: f64) -> Result<()> {
        operation!(OP = "geometric_");
        fail_if!(!(p > 0.0 && p <= 1.0); argument(OP), "takes a probability above 0, got {p}");
        let failures = self.draw_unit()?.neg()?.log1p()?.mul((-p).ln_1p().recip())?;
        self.overwrite(OP, &failures.floor()?.add(1.0)?)
    }

    /// Fills the tensor with samples of the Cauchy distribution.
    ///
    /// # Errors
    /// See [`uniform_`](Self::uniform_). `scale` is not above 0, or the dtype is not a float.
    #[track_caller]
    pub fn cauchy_(&self, median: f64, scale: f64) -> Result<()> {
        operation!(OP = "cauchy_");
        check_float_dtype(OP, self.dtype())?;
        fail_if!(!(scale > 0.0 && scale.is_finite()); argument(OP), "takes a scale above 0, got {scale}");
        // The middle of each step, so that no angle is a right angle.
        let centered = self.draw_unit()?.sub(0.5)?.add(0.5f64.powi(25))?;
        self.overwrite(OP, &centered.mul(std::f64::consts::PI)?.tan()?.mul(scale)?.add(median)?)
    }

    /// Fills the tensor as [`uniform_`](Self::uniform_) does, with exponentials of [`normal`](Self::normal).
    #[track_caller]
    pub fn log_normal_(&self, mean: f64, std: f64) -> Result<()> {
        const OP: &str = "log_normal_";
        run_composite(OP, || {
            let (dtype, device) = (self.dtype(), self.device());
            self.copy_(&Self::sample_normal(OP, self.shape(), [mean, std], dtype, device)?.exp()?)
        })
    }

    /// Zeroes elements with probability `p` and scales the others by 1 / (1 - p), if `training`.
    ///
    /// # Errors
    /// `p` is not a probability, or the dtype is not a float.
    #[track_caller]
    pub fn dropout(&self, p: f64, training: bool) -> Result<Tensor> {
        operation!("dropout");
        fail_if!(!(0.0..=1.0).contains(&p); argument("dropout"), "{p} is not a probability");
        check_float_dtype("dropout", self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        if p == 1.0 {
            // Zeros instead of a product, which would keep infinities and NaN.
            let (out, zeros) = (self.detach().zeros_like()?, Tensor::zeros_like);
            return Ok(autograd::linear_differentiable("dropout", out, self, zeros, zeros));
        }
        let philox_state = self.device().draw_random(self.numel().div_ceil(4) as u64);
        let out = apply_dropout(self, p, philox_state)?;
        let linear = move |x: &Tensor| apply_dropout(x, p, philox_state);
        Ok(autograd::linear_differentiable("dropout", out, self, linear, linear))
    }

    /// Samples a differentiable one-hot approximation from logits along `dim` by Gumbel noise (Jang et al.,
    /// 2016): PyTorch's `gumbel_softmax`. A smaller `tau` is closer to one-hot. `hard` returns one-hot
    /// vectors with the gradient of the probabilities.
    ///
    /// # Errors
    /// `tau` is not above 0, `dim` is out of range, or the dtype is not a float.
    #[track_caller]
    pub fn gumbel_softmax(&self, tau: f64, hard: bool, dim: isize) -> Result<Tensor> {
        operation!(OP = "gumbel_softmax");
        fail_if!(tau.is_nan() || tau <= 0.0;
            argument(OP), "takes a temperature above 0, not {tau}; 1 is usual");
        check_float_dtype(OP, self.dtype())?;
        // 1 - u is positive and its logarithm finite. A u of 0 represents the values that round to it.
        let uniform = Tensor::rand(self.shape(), DType::F32, self.device())?;
        let noise = uniform
            .neg()?
            .add(1.0)?
            .log()?
            .neg()?
            .clamp(f64::from(f32::EPSILON) / 4.0, f64::INFINITY)?
            .log()?
            .neg()?;
        let soft = self.add(&noise.to_dtype(self.dtype())?)?.mul(1.0 / tau)?.softmax(dim)?;
        if !hard {
            return Ok(soft);
        }
        let chosen = soft.detach().argmax(dim, true)?;
        let one = Tensor::ones(chosen.shape(), soft.dtype(), soft.device())?;
        let one_hot =
            Tensor::zeros(soft.shape(), soft.dtype(), soft.device())?.scatter(dim, &chosen, &one)?;
        one_hot.sub(&soft.detach())?.add(&soft)
    }

    /// Draws `count` classes for each row of weights, \[classes\] or \[rows, classes\], as i64: PyTorch's
    /// `multinomial`. Weights need not sum to 1. With `replacement` a class can repeat. Without, each class
    /// occurs once, and classes of weight zero come last, in order.
    ///
    /// The host does not read the weights. Values that PyTorch refuses (negative, infinite or NaN) therefore
    /// count as zero. A class of weight zero is not drawn, unless all weights of the row are zero. Then class
    /// 0 is drawn with replacement, and the first classes without.
    ///
    /// # Errors
    /// There are neither one nor two dimensions. There are no classes, or fewer than `count` without
    /// replacement. The dtype is not a float.
    #[track_caller]
    pub fn multinomial(&self, count: usize, replacement: bool) -> Result<Tensor> {
        operation!(OP = "multinomial");
        check_float_dtype(OP, self.dtype())?;
        let Some((&classes, before)) = self.shape().split_last().filter(|(_, before)| before.len() < 2)
        else {
            fail!(shape(OP, [self]), "takes [classes] or [rows, classes]")
        };
        fail_if!(classes == 0 || count == 0 || (!replacement && count > classes); shape(OP, [self]),
            "draws at least one and, without replacement, at most all classes, not {count}");
        if replacement && classes <= MAX_WORKGROUP_CLASSES && self.dtype() != DType::F64 {
            let ends = multinomial_cdf(&self.detach().to_dtype(DType::F32)?, classes)?;
            let samples = Tensor::rand([before, &[count]].concat(), DType::F32, self.device())?;
            return ends.searchsorted(&samples, &SearchSortedOptions { right: true, ..Default::default() });
        }
        let weights = self.detach();
        let weights = if weights.dtype() == DType::F64 { weights } else { weights.to_dtype(DType::F32)? };
        let zero = weights.isfinite()?.logical_and(&weights.gt(0.0)?)?.logical_not()?;
        let weights = weights.masked_fill(&zero, 0.0)?;
        // Relative to the largest weight, so that the sum and a quotient by the shortest time are finite.
        let largest = weights.amax([-1], true)?;
        // GPUs flush the reciprocals of values above 2^126 to zero, so do not divide by such values.
        let scale = largest.ones_like()?.masked_fill(&largest.gt(1e30)?, 0.0625)?;
        let largest = largest.masked_fill(&largest.eq(0.0)?, 1.0)?.mul(&scale)?;
        let weights = weights.mul(&scale)?.div(&largest)?;
        if !replacement {
            // Take the first `count` of exponential clocks with the weights as rates. 31 bits rarely tie.
            let bits = Tensor::randint(0, i64::from(i32::MAX), self.shape(), DType::I32, self.device())?;
            let part = bits.to_dtype(DType::F32)?.add(0.5)?.mul(0.5f64.powi(31))?;
            let time = part.clamp(0.0, 1.0 - 0.5f64.powi(24))?.neg()?.log1p()?.neg()?;
            // A class of any positive weight comes before the classes of weight zero.
            let speed = weights.div(&time.to_dtype(weights.dtype())?)?.clamp(1e-36, f64::INFINITY)?;
            return Ok(speed.masked_fill(&zero, 0.0)?.topk(count, -1, true)?.1);
        }
        // Prefix sums round differently, so take the running maximum, which is constant at zero weights.
        let ends = weights.cumsum(-1)?.masked_fill(&zero, 0.0)?.cummax(-1)?.0;
        let total = ends.narrow(-1, classes - 1, 1)?.contiguous()?;
        let shape = [before, &[count]].concat();
        let samples =
            Tensor::rand(&shape, DType::F32, self.device())?.to_dtype(weights.dtype())?.mul(&total)?;
        // A product that was rounded up to the total belongs to the last class of positive weight.
        let out = |right| SearchSortedOptions { out_int32: true, right, sorter: None };
        let last = ends.searchsorted(&total, &out(false))?;
        ends.searchsorted(&samples, &out(true))?.minimum(&last)?.to_dtype(DType::I64)
    }

    /// Zeroes channels of \[batch, channels, ..\] with probability `p` and scales the others by 1 / (1 - p)
    /// while `training`. Otherwise returns `self`. PyTorch's `dropout1d` to `dropout3d`.
    ///
    /// # Errors
    /// There are fewer than two dimensions, `p` is not a probability, or the dtype is not a float.
    #[doc(alias = "dropout1d")]
    #[doc(alias = "dropout2d")]
    #[doc(alias = "dropout3d")]
    #[track_caller]
    pub fn feature_dropout(&self, p: f64, training: bool) -> Result<Tensor> {
        operation!(OP = "feature_dropout");
        fail_if!(!(0.0..=1.0).contains(&p); argument(OP), "{p} is not a probability");
        check_float_dtype(OP, self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        self.mul(&self.ones_per_channel(OP)?.dropout(p, true)?)
    }

    /// Sets elements to selu's lower limit with probability `p` while `training`. Then scales and shifts all
    /// elements to keep mean and variance (Klambauer et al., 2017). Otherwise returns `self`. A `p` of 1 gives zeros.
    ///
    /// # Errors
    /// `p` is not a probability, or the dtype is not a float.
    #[track_caller]
    pub fn alpha_dropout(&self, p: f64, training: bool) -> Result<Tensor> {
        self.run_alpha_dropout("alpha_dropout", p, training, false)
    }

    /// Computes [`alpha_dropout`](Self::alpha_dropout) of whole channels of \[batch, channels, ..\].
    #[track_caller]
    pub fn feature_alpha_dropout(&self, p: f64, training: bool) -> Result<Tensor> {
        self.run_alpha_dropout("feature_alpha_dropout", p, training, true)
    }

    #[track_caller]
    fn run_alpha_dropout(
        &self,
        op: &'static str,
        p: f64,
        training: bool,
        by_channel: bool,
    ) -> Result<Tensor> {
        // Limit of selu at -∞: the product of its two constants.
        const SELU_MIN: f64 = -1.758_099_340_847_376_6;
        operation!(op);
        fail_if!(!(0.0..=1.0).contains(&p); argument(op), "{p} is not a probability");
        check_float_dtype(op, self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        if p == 1.0 {
            return self.mul(0.0);
        }
        let ones = if by_channel { self.ones_per_channel(op)? } else { self.detach().ones_like()? };
        let dropped = ones.dropout(p, true)?.eq(0.0)?;
        let p = 1.0 - 1.0 / dropout_keep_scale(p);
        let scale = 1.0 / ((1.0 - p) * (1.0 + p * SELU_MIN * SELU_MIN)).sqrt();
        self.masked_fill(&dropped, SELU_MIN)?.mul(scale)?.add(-scale * p * SELU_MIN)
    }

    /// Returns ones for each channel of \[batch, channels, ..\] that broadcast.
    fn ones_per_channel(&self, op: &'static str) -> Result<Tensor> {
        let &[batch, channels, ref rest @ ..] = self.shape() else {
            fail!(shape(op, [self]), "takes [batch, channels, ..]")
        };
        let shape = [&[batch, channels][..], &vec![1; rest.len()]].concat();
        Tensor::ones(&shape, self.dtype(), self.device())
    }
}

/// Largest number of classes whose weights one workgroup sums.
const MAX_WORKGROUP_CLASSES: usize = 8192;

/// Returns the cumulative weights of the classes, scaled to 0 to 1, from the f32 weights of rows.
fn multinomial_cdf(weights: &Tensor, classes: usize) -> Result<Tensor> {
    let weights = contiguous_zero_offset(weights)?;
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    let cdf = Tensor::empty(weights.shape(), DType::F32, weights.device())?;
    let (rows, per_thread) = (weights.numel() / classes, classes.div_ceil(WORKGROUP_SIZE));
    let params = kernel_params! { rows, classes, per_thread }.loop_iterations(4 * per_thread + 32);
    launch::launch(&KernelSpec::new("multinomial_cdf"), &[&weights, &cdf], params, rows)?;
    Ok(cdf)
}

/// Writes a Philox state to device memory, so that kernels that read it are identical at each replay.
pub(super) fn write_philox_state(drawn: PhiloxState, device: &Device) -> Result<Tensor> {
    let words = Tensor::empty([4], DType::U32, device)?;
    let params = move |replay: &ReplayCtx| kernel_params! { words: drawn.to_words(replay) };
    launch::launch_dynamic(&KernelSpec::new("philox_state"), &[&words], params, 1)?;
    Ok(words)
}

fn apply_dropout(x: &Tensor, p: f64, drawn: PhiloxState) -> Result<Tensor> {
    launch::check_device_dtype("dropout", x.dtype(), x.device())?;
    // The mask depends on the row-major index of an element.
    let x = x.detach().contiguous()?;
    let out = Tensor::empty(x.shape(), x.dtype(), x.device())?;
    let n = x.numel();
    let in_offset = x.layout().offset();
    let quads =
        matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) && (n | in_offset).is_multiple_of(4);
    let spec = kernel_spec! { "dropout", dtype: launch::shader_dtype_name(x.dtype(), x.device()), quads };
    let params = move |replay: &ReplayCtx| {
        let (offset, seed) = drawn.offset_and_seed(replay);
        let (scale, threshold) = (dropout_keep_scale(p) as f32, bernoulli_threshold(p).0);
        kernel_params! { n, in_offset, scale, threshold, offset, seed }
    };
    launch::launch_dynamic(&spec, &[&x, &out], params, n.div_ceil(4 * WORKGROUP_SIZE))?;
    Ok(out)
}

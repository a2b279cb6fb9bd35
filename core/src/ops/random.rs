//! Random numbers: Philox4x32-10 by counter, the same bits on every backend for one seed.
//!
//! A fill takes the next blocks of its device's stream ([`Device::random_state`]); element `i` comes from block `i / 4`.

use forebay_shaders::KernelSpec;

use crate::autograd;
use crate::capture::{PhiloxState, ReplayCtx};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::ops::kernel::launch::{self, KernelParams, WORKGROUP_SIZE};
use crate::ops::reduce::contiguous_zero_offset;
use crate::runtime::device::Device;
use crate::tensor::Tensor;

/// What to fill with.
#[derive(Clone, Copy, Debug)]
enum Distribution {
    Uniform {
        low: f64,
        high: f64,
    },
    Normal {
        mean: f64,
        std: f64,
    },
    Integer {
        low: i64,
        high: i64,
    },
    Bernoulli {
        p: f64,
    },
    /// Words to sort by, of the type i64: the upper ones as `Integer` of all but one i32, the lower ones of a draw of their own.
    SortKey,
}

/// Bits of the fraction, the smallest normal exponent, and the largest number of a float type.
fn float_format(dtype: DType) -> Option<(i32, i32, f64)> {
    match dtype {
        DType::F32 => Some((23, -126, f64::from(f32::MAX))),
        DType::F16 => Some((10, -14, 65_504.0)),
        DType::BF16 => Some((7, -126, f64::from(f32::from_bits(0x7f7f_0000)))),
        _ => None,
    }
}

/// The largest number of a float type that is not above `x`; infinities aside.
fn round_down_to_dtype(x: f64, dtype: DType) -> f64 {
    let Some((fraction, smallest, _)) = float_format(dtype) else { return x };
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    // A power of two: division by it is exact.
    let step = 2f64.powi(exponent.max(smallest) - fraction);
    (x / step).floor() * step
}

/// The least and the largest number of a float type in low ≤ x < high; `closed`, in low ≤ x ≤ high as far as the type reaches.
///
/// # Errors
/// A bound is not a number that the type reaches; no number of it lies between them.
pub fn representable_range(
    op: &'static str,
    low: f64,
    high: f64,
    closed: bool,
    dtype: DType,
) -> Result<[f64; 2]> {
    let largest = float_format(dtype).map_or(f64::MAX, |(_, _, largest)| largest);
    let (low, high) = if closed { (low.max(-largest), high.min(largest)) } else { (low, high) };
    if low.abs() > largest || high.abs() > largest {
        let why = format!(
            "{low}..{high} leaves the numbers of {dtype}, which end at {largest:e}; take a type that reaches as far"
        );
        return Err(Error::argument(op, why));
    }
    // No -0.
    let least = 0.0 - round_down_to_dtype(-low, dtype);
    let most = round_down_to_dtype(if closed { high } else { high.next_down() }, dtype);
    if least > most {
        let why = format!(
            "no number of {dtype} lies in {low}..{high}; take a wider range, or a type of more digits"
        );
        return Err(Error::argument(op, why));
    }
    Ok([least, most])
}

/// The bits of an f32 as an integer, in the order of the numbers.
fn ordered_bits(x: f64) -> u32 {
    let bits = (x as f32).to_bits() as i32;
    (if bits < 0 { bits ^ i32::MAX } else { bits }) as u32
}

/// A probability as a bound for a 32-bit number, and whether every number lies below it.
fn bernoulli_threshold(p: f64) -> (u32, bool) {
    let bound = (p * 4_294_967_296.0).round();
    if bound >= 4_294_967_296.0 { (u32::MAX, true) } else { (bound as u32, false) }
}

#[track_caller]
fn fill_random(shape: &[usize], kind: Distribution, dtype: DType, device: &Device) -> Result<Tensor> {
    let _op = memory::scope::enter_op("random");
    // Of types that are rounded to.
    let bounds = match kind {
        Distribution::Uniform { low, high } if low < high => {
            representable_range("rand", low, high, false, dtype)?
        }
        Distribution::Integer { low, high } if dtype.is_float() => {
            representable_range("randint", low as f64, high as f64, false, dtype)?
        }
        _ => [-f64::from(f32::MAX), f64::from(f32::MAX)],
    };
    let out = Tensor::empty(shape, dtype, device)?;
    launch::check_device_dtype("random", dtype, device).or_else(|e| match kind {
        // Integers of 32 bits fit the words of an i64.
        Distribution::Integer { .. } | Distribution::SortKey if dtype == DType::I64 => Ok(()),
        _ => Err(e),
    })?;
    let blocks = out.numel().div_ceil(4);
    let drawn = device.draw_random(blocks as u64);
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
    // Both forms of an i64 have the same words.
    let shader =
        if matches!(kind, Distribution::SortKey) { "" } else { launch::shader_dtype_name(dtype, device) };
    let spec = KernelSpec::new("random").def("dtype", shader).def("kind", name);
    let numel = out.numel();
    let params = move |now: &ReplayCtx| {
        let params = KernelParams::new().size(numel).u32(0).f32(scale).f32(shift);
        let params = drawn.to_words(now).into_iter().fold(params, KernelParams::u32);
        let params = params.u32(low).u32(range).u32(bound).u32(always.into());
        params.u32(ordered_bits(bounds[0])).u32(ordered_bits(bounds[1])).f32(factor)
    };
    launch::launch_dynamic(&spec, &[&out], params, blocks.div_ceil(WORKGROUP_SIZE))?;
    Ok(out)
}

fn check_float_dtype(op: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_float() { Ok(()) } else { Err(Error::dtype(op, dtype, "fills floats; use `randint`")) }
}

impl Tensor {
    /// Uniform numbers in 0 ≤ x < 1, in steps of 2⁻²⁴.
    ///
    /// # Errors
    /// The dtype is no float; memory runs out.
    #[track_caller]
    pub fn rand(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        Self::uniform(shape, 0.0, 1.0, dtype, device)
    }

    /// Uniform numbers in low ≤ x < high, in 2²⁴ steps that are rounded to the type; `low` where both are the same.
    ///
    /// # Errors
    /// The dtype is no float; `low` is above `high`; the type has no number between them, or does not reach as far; memory runs out.
    #[track_caller]
    pub fn uniform(shape: &[usize], low: f64, high: f64, dtype: DType, device: &Device) -> Result<Tensor> {
        check_float_dtype("rand", dtype)?;
        if !(low <= high && low.is_finite() && high.is_finite()) {
            return Err(Error::argument("rand", format!("{low}..{high} is no range of numbers")));
        }
        if dtype != DType::F64 || (low, high) == (0.0, 1.0) {
            return fill_random(shape, Distribution::Uniform { low, high }, dtype, device);
        }
        // The kernel's own numbers are f32's.
        let unit = fill_random(shape, Distribution::Uniform { low: 0.0, high: 1.0 }, dtype, device)?;
        if low == high {
            return unit.mul(0.0)?.add(low);
        }
        let [least, most] = representable_range("rand", low, high, false, dtype)?;
        let near = match high - low {
            width if width.is_finite() => unit.mul(width)?.add(low)?,
            _ => unit.mul(high / 2.0 - low / 2.0)?.add(low / 2.0)?.mul(2.0)?,
        };
        near.clamp(least, most)
    }

    /// Normal numbers of mean 0 and standard deviation 1.
    ///
    /// # Errors
    /// The dtype is no float; memory runs out.
    #[track_caller]
    pub fn randn(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        Self::normal(shape, 0.0, 1.0, dtype, device)
    }

    /// Normal numbers of a mean and a standard deviation.
    ///
    /// # Errors
    /// The dtype is no float; `std` is negative; memory runs out.
    #[track_caller]
    pub fn normal(shape: &[usize], mean: f64, std: f64, dtype: DType, device: &Device) -> Result<Tensor> {
        check_float_dtype("randn", dtype)?;
        if std < 0.0 || std.is_nan() {
            return Err(Error::argument("randn", format!("a standard deviation is 0 or more, not {std}")));
        }
        fill_random(shape, Distribution::Normal { mean, std }, dtype, device)
    }

    /// As [`rand`](Self::rand), in the shape, type and device of `self`.
    ///
    /// # Errors
    /// The dtype is no float; memory runs out.
    #[track_caller]
    pub fn rand_like(&self) -> Result<Tensor> {
        Self::rand(self.shape(), self.dtype(), self.device())
    }

    /// As [`randn`](Self::randn), in the shape, type and device of `self`.
    ///
    /// # Errors
    /// The dtype is no float; memory runs out.
    #[track_caller]
    pub fn randn_like(&self) -> Result<Tensor> {
        Self::randn(self.shape(), self.dtype(), self.device())
    }

    /// Integers in low ≤ x < high, which lie in the range of an i32. The bias is below range / 2³². A float type that does not have all of them
    /// takes the nearest that it has in the range.
    ///
    /// # Errors
    /// The range is empty, too wide, or leaves the numbers of the type, or the type has none in it; memory runs out.
    #[track_caller]
    pub fn randint(low: i64, high: i64, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        let ends = [i32::try_from(low), i32::try_from(high.saturating_sub(1))];
        if low >= high || ends.iter().any(Result::is_err) || u32::try_from(high - low).is_err() {
            return Err(Error::argument("randint", format!("{low}..{high} is no range of 32-bit integers")));
        }
        let most = match dtype {
            DType::U8 => Some(255),
            DType::Bool => Some(1),
            _ => None,
        };
        if most.is_some_and(|most| low < 0 || high - 1 > most) || (dtype == DType::U32 && low < 0) {
            return Err(Error::argument("randint", format!("{low}..{high} are not all numbers of {dtype}")));
        }
        fill_random(shape, Distribution::Integer { low, high }, dtype, device)
    }

    /// The numbers from 0 to `n` - 1 in random order: where draws of 64 bits stand when they are sorted.
    ///
    /// # Errors
    /// `dtype` is bool, or does not hold all of these numbers; memory runs out.
    #[track_caller]
    pub fn randperm(n: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let _op = memory::scope::enter_op("randperm");
        if dtype == DType::Bool {
            return Err(Error::dtype("randperm", dtype, "takes number types"));
        }
        // As many as the type counts without a gap.
        let most: usize = match dtype {
            DType::U8 => 1 << 8,
            DType::BF16 => (1 << 8) + 1,
            DType::F16 => (1 << 11) + 1,
            DType::F32 => (1 << 24) + 1,
            DType::I32 => 1 << 31,
            _ => usize::MAX,
        };
        if n > most {
            let why =
                format!("{dtype} does not hold all numbers below {n}, only those below {most}; take i64");
            return Err(Error::argument("randperm", why));
        }
        let keys = {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            fill_random(&[n], Distribution::SortKey, DType::I64, device)?
        };
        keys.argsort(0, false)?.to_dtype(dtype)
    }

    /// Ones with probability `p`, else zeros.
    ///
    /// # Errors
    /// `p` is no probability; memory runs out.
    #[track_caller]
    pub fn bernoulli(shape: &[usize], p: f64, dtype: DType, device: &Device) -> Result<Tensor> {
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::argument("bernoulli", format!("{p} is no probability")));
        }
        fill_random(shape, Distribution::Bernoulli { p }, dtype, device)
    }

    /// Zeroes each element with probability `p` and scales the others by 1 / (1 - p), while `training`; else `self`.
    ///
    /// # Errors
    /// `p` is no probability; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn dropout(&self, p: f64, training: bool) -> Result<Tensor> {
        let _op = memory::scope::enter_op("dropout");
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::argument("dropout", format!("{p} is no probability")));
        }
        check_float_dtype("dropout", self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        if p == 1.0 {
            // Not a product: nothing is left of infinities and NaN either.
            let out = self.detach().zeros_like()?;
            return Ok(autograd::linear_differentiable(
                "dropout",
                out,
                self,
                Tensor::zeros_like,
                Tensor::zeros_like,
            ));
        }
        let drawn = self.device().draw_random(self.numel().div_ceil(4) as u64);
        let out = apply_dropout(self, p, drawn)?;
        let same = move |x: &Tensor| apply_dropout(x, p, drawn);
        Ok(autograd::linear_differentiable("dropout", out, self, same, same))
    }

    /// Probabilities along `dim` of logits that noise is added to, so that they are samples that have a gradient (Jang et al., 2016): near to one-hot
    /// vectors for a small `tau`, and with `hard` one-hot vectors whose gradient is that of the probabilities. PyTorch's `gumbel_softmax`.
    ///
    /// # Errors
    /// `tau` is not above 0; the dimension is out of range; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn gumbel_softmax(&self, tau: f64, hard: bool, dim: isize) -> Result<Tensor> {
        const OP: &str = "gumbel_softmax";
        let _op = memory::scope::enter_op(OP);
        if tau.is_nan() || tau <= 0.0 {
            return Err(Error::argument(OP, format!("takes a temperature above 0, not {tau}; 1 is usual")));
        }
        check_float_dtype(OP, self.dtype())?;
        // 1 - u is above 0, and its logarithm below; where u is 0 it stands for what rounds to that.
        let drawn = Tensor::rand(self.shape(), DType::F32, self.device())?;
        let noise = drawn
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
        let chosen = soft.detach().argmax(Some(dim), true)?;
        let one = Tensor::ones(chosen.shape(), soft.dtype(), soft.device())?;
        let one_hot =
            Tensor::zeros(soft.shape(), soft.dtype(), soft.device())?.scatter(dim, &chosen, &one)?;
        one_hot.sub(&soft.detach())?.add(&soft)
    }

    /// Draws `count` classes of each row of weights, \[classes\] or \[rows, classes\], which need not add up to 1: PyTorch's `multinomial`, as i64.
    /// With `replacement` a class can come again. Without, each comes once, those without weight behind all others, in their order.
    ///
    /// Weights are not read by the host, so that those which PyTorch refuses give no error: one that is negative, infinite or NaN counts as zero. A class
    /// of weight zero is not drawn, unless all of a row are: then class 0 is drawn with replacement, and the first ones without.
    ///
    /// # Errors
    /// There are neither one nor two dimensions; there are no classes, or without replacement fewer than `count`; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn multinomial(&self, count: usize, replacement: bool) -> Result<Tensor> {
        const OP: &str = "multinomial";
        let _op = memory::scope::enter_op(OP);
        check_float_dtype(OP, self.dtype())?;
        let Some((&classes, before)) = self.shape().split_last().filter(|(_, before)| before.len() < 2)
        else {
            return Err(Error::shape(OP, "takes [classes] or [rows, classes]", &[self.shape()]));
        };
        if classes == 0 || count == 0 || (!replacement && count > classes) {
            let rule =
                format!("draws at least one and, without replacement, at most all classes, not {count}");
            return Err(Error::shape(OP, rule, &[self.shape()]));
        }
        if replacement && classes <= MAX_WORKGROUP_CLASSES && self.dtype() != DType::F64 {
            let ends = draw_ends(&self.detach().to_dtype(DType::F32)?, classes)?;
            let drawn = Tensor::rand(&[before, &[count]].concat(), DType::F32, self.device())?;
            return ends.searchsorted(&drawn, false, true, None);
        }
        let weights = self.detach();
        let weights = if weights.dtype() == DType::F64 { weights } else { weights.to_dtype(DType::F32)? };
        let zero = weights.isfinite()?.logical_and(&weights.gt(0.0)?)?.logical_not()?;
        let weights = weights.masked_fill(&zero, 0.0)?;
        // In parts of the largest: their sum is finite, and so is a quotient by the shortest time.
        let largest = weights.amax(&[-1], true)?;
        // GPUs divide by numbers below 2^126 alone: a reciprocal of larger ones is flushed to zero.
        let scale = largest.ones_like()?.masked_fill(&largest.gt(1e30)?, 0.0625)?;
        let largest = largest.masked_fill(&largest.eq(0.0)?, 1.0)?.mul(&scale)?;
        let weights = weights.mul(&scale)?.div(&largest)?;
        if !replacement {
            // The first `count` of events that come at rates of the weights: exponential times over them are a race. The time of 31 bits is
            // above 0, and few classes have the same one.
            let bits = Tensor::randint(0, i64::from(i32::MAX), self.shape(), DType::I32, self.device())?;
            let part = bits.to_dtype(DType::F32)?.add(0.5)?.mul(0.5f64.powi(31))?;
            let time = part.clamp(0.0, 1.0 - 0.5f64.powi(24))?.neg()?.log1p()?.neg()?;
            // A class that has a weight comes before those that have none, however small that is.
            let speed = weights.div(&time.to_dtype(weights.dtype())?)?.clamp(1e-36, f64::INFINITY)?;
            return Ok(speed.masked_fill(&zero, 0.0)?.topk(count, -1, true)?.1);
        }
        // Sums are rounded in another order in each place: the largest so far never falls, and does not rise where a class has no weight.
        let ends = weights.cumsum(-1)?.masked_fill(&zero, 0.0)?.cummax(-1)?.0;
        let total = ends.narrow(-1, classes - 1, 1)?.contiguous()?;
        let shape = [before, &[count]].concat();
        let drawn =
            Tensor::rand(&shape, DType::F32, self.device())?.to_dtype(weights.dtype())?.mul(&total)?;
        // A product that was rounded up to the total belongs to the last class that has a weight.
        let last = ends.searchsorted(&total, true, false, None)?;
        ends.searchsorted(&drawn, true, true, None)?.minimum(&last)?.to_dtype(DType::I64)
    }

    /// Zeroes whole channels of \[batch, channels, ..\] with probability `p` and scales the others by 1 / (1 - p), while `training`;
    /// else `self`. PyTorch's `dropout1d` to `dropout3d`.
    ///
    /// # Errors
    /// There are fewer than two dimensions; `p` is no probability; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn feature_dropout(&self, p: f64, training: bool) -> Result<Tensor> {
        const OP: &str = "feature_dropout";
        let _op = memory::scope::enter_op(OP);
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::argument(OP, format!("{p} is no probability")));
        }
        check_float_dtype(OP, self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        self.mul(&self.ones_per_channel(OP)?.dropout(p, true)?)
    }

    /// Sets elements, or channels of \[batch, channels, ..\], with probability `p` to the least value of a selu, then scales and shifts
    /// all so that mean and variance stay (Klambauer et al., 2017), while `training`; else `self`.
    ///
    /// # Errors
    /// `p` is no probability, or 1; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn alpha_dropout(&self, p: f64, training: bool, by_channel: bool) -> Result<Tensor> {
        const OP: &str = "alpha_dropout";
        // What selu goes to on the left: the product of its two constants.
        const SELU_MIN: f64 = -1.758_099_340_847_376_6;
        let _op = memory::scope::enter_op(OP);
        if !(0.0..1.0).contains(&p) {
            return Err(Error::argument(OP, format!("{p} is no probability below 1")));
        }
        check_float_dtype(OP, self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        let ones = if by_channel { self.ones_per_channel(OP)? } else { self.detach().ones_like()? };
        let dropped = ones.dropout(p, true)?.eq(0.0)?;
        let scale = 1.0 / ((1.0 - p) * (1.0 + p * SELU_MIN * SELU_MIN)).sqrt();
        self.masked_fill(&dropped, SELU_MIN)?.mul(scale)?.add(-scale * p * SELU_MIN)
    }

    /// A one for each channel of \[batch, channels, ..\], which broadcasts.
    fn ones_per_channel(&self, op: &'static str) -> Result<Tensor> {
        let &[batch, channels, ref rest @ ..] = self.shape() else {
            return Err(Error::shape(op, "takes [batch, channels, ..]", &[self.shape()]));
        };
        let shape = [&[batch, channels][..], &vec![1; rest.len()]].concat();
        Tensor::ones(&shape, self.dtype(), self.device())
    }
}

/// Classes of which one workgroup adds the weights up.
const MAX_WORKGROUP_CLASSES: usize = 8192;

/// Where classes end in 0 to 1, by the weights of rows in f32.
fn draw_ends(weights: &Tensor, classes: usize) -> Result<Tensor> {
    let weights = contiguous_zero_offset(weights)?;
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    let ends = Tensor::empty(weights.shape(), DType::F32, weights.device())?;
    let (rows, each) = (weights.numel() / classes, classes.div_ceil(WORKGROUP_SIZE));
    let params = KernelParams::new().size(rows).size(classes).size(each).loop_iterations(4 * each + 32);
    launch::launch(&KernelSpec::new("draw_ends"), &[&weights, &ends], params, rows)?;
    Ok(ends)
}

/// Where numbers that were drawn stand, on the device: for kernels that read it there, and are the same command at each run.
pub(super) fn write_philox_state(drawn: PhiloxState, device: &Device) -> Result<Tensor> {
    let words = Tensor::empty(&[4], DType::U32, device)?;
    let params =
        move |now: &ReplayCtx| drawn.to_words(now).into_iter().fold(KernelParams::new(), KernelParams::u32);
    launch::launch_dynamic(&KernelSpec::new("philox_state"), &[&words], params, 1)?;
    Ok(words)
}

/// Dropout with numbers that were drawn for it.
fn apply_dropout(x: &Tensor, p: f64, drawn: PhiloxState) -> Result<Tensor> {
    launch::check_device_dtype("dropout", x.dtype(), x.device())?;
    // The mask goes by the number of the element, row-major.
    let x = x.detach().contiguous()?;
    let out = Tensor::empty(x.shape(), x.dtype(), x.device())?;
    let n = x.numel();
    let spec = KernelSpec::new("dropout").def("dtype", launch::shader_dtype_name(x.dtype(), x.device()));
    let offset = x.layout().offset();
    let params = move |now: &ReplayCtx| {
        let params = KernelParams::new()
            .size(n)
            .size(offset)
            .f32((1.0 / (1.0 - p)) as f32)
            .u32(bernoulli_threshold(p).0);
        drawn.to_words(now).into_iter().fold(params, KernelParams::u32)
    };
    launch::launch_dynamic(&spec, &[&x, &out], params, n.div_ceil(4 * WORKGROUP_SIZE))?;
    Ok(out)
}

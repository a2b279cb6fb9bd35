//! Random numbers: Philox4x32-10 by counter, the same bits on every backend for one seed.
//!
//! A fill takes the next blocks of its device's stream ([`Device::random_state`]); element `i` comes from block `i / 4`.

use forebay_shaders::KernelSpec;

use super::launch::{self, GROUP, Params};
use crate::autograd;
use crate::capture::{Draw, Now};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::Tensor;

/// What to fill with.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Uniform { low: f64, high: f64 },
    Normal { mean: f64, std: f64 },
    Integer { low: i64, high: i64 },
    Bernoulli { p: f64 },
}

/// A probability as a bound for a 32-bit number, and whether every number lies below it.
fn threshold(p: f64) -> (u32, bool) {
    let bound = (p * 4_294_967_296.0).round();
    if bound >= 4_294_967_296.0 { (u32::MAX, true) } else { (bound as u32, false) }
}

#[track_caller]
fn fill(shape: &[usize], kind: Kind, dtype: DType, device: &Device) -> Result<Tensor> {
    let _op = memory::scope::op("random");
    let out = Tensor::empty(shape, dtype, device)?;
    launch::check_compute("random", dtype, device).or_else(|e| match kind {
        // Integers of 32 bits fit the words of an i64.
        Kind::Integer { .. } if dtype == DType::I64 => Ok(()),
        _ => Err(e),
    })?;
    let blocks = out.numel().div_ceil(4);
    let drawn = device.draw(blocks as u64);
    let (name, scale, shift, low, range, (bound, always)) = match kind {
        Kind::Uniform { low, high } => ("uniform", (high - low) as f32, low as f32, 0, 0, (0, false)),
        Kind::Normal { mean, std } => ("normal", std as f32, mean as f32, 0, 0, (0, false)),
        Kind::Integer { low, high } => ("integer", 0.0, 0.0, low as u32, (high - low) as u32, (0, false)),
        Kind::Bernoulli { p } => ("bernoulli", 0.0, 0.0, 0, 0, threshold(p)),
    };
    let spec = KernelSpec::new("random").def("dtype", launch::shader_dtype(dtype, device)).def("kind", name);
    let numel = out.numel();
    let params = move |now: &Now| {
        let params = Params::new().size(numel).u32(0).f32(scale).f32(shift);
        let params = drawn.words(now).into_iter().fold(params, Params::u32);
        params.u32(low).u32(range).u32(bound).u32(always.into())
    };
    launch::launch_live(&spec, &[&out], params, blocks.div_ceil(GROUP))?;
    Ok(out)
}

fn floats(op: &'static str, dtype: DType) -> Result<()> {
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

    /// Uniform numbers in low ≤ x < high.
    ///
    /// # Errors
    /// The dtype is no float; `low` is above `high`; memory runs out.
    #[track_caller]
    pub fn uniform(shape: &[usize], low: f64, high: f64, dtype: DType, device: &Device) -> Result<Tensor> {
        floats("rand", dtype)?;
        if !(low <= high && (high - low).is_finite()) {
            return Err(Error::argument("rand", format!("{low}..{high} is no range of numbers")));
        }
        fill(shape, Kind::Uniform { low, high }, dtype, device)
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
        floats("randn", dtype)?;
        if std < 0.0 || std.is_nan() {
            return Err(Error::argument("randn", format!("a standard deviation is 0 or more, not {std}")));
        }
        fill(shape, Kind::Normal { mean, std }, dtype, device)
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

    /// Integers in low ≤ x < high, which lie in the range of an i32. The bias is below range / 2³².
    ///
    /// # Errors
    /// The range is empty, too wide, or leaves the numbers of the type; memory runs out.
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
        fill(shape, Kind::Integer { low, high }, dtype, device)
    }

    /// The numbers from 0 to `n` - 1 in random order: where draws of 32 bits stand when they are sorted.
    ///
    /// # Errors
    /// `dtype` is bool; memory runs out.
    #[track_caller]
    pub fn randperm(n: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let _op = memory::scope::op("randperm");
        if dtype == DType::Bool {
            return Err(Error::dtype("randperm", dtype, "takes number types"));
        }
        let draws = Tensor::randint(i64::from(i32::MIN), i64::from(i32::MAX), &[n], DType::I32, device)?;
        draws.argsort(0, false)?.to_dtype(dtype)
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
        fill(shape, Kind::Bernoulli { p }, dtype, device)
    }

    /// Zeroes each element with probability `p` and scales the others by 1 / (1 - p), while `training`; else `self`.
    ///
    /// # Errors
    /// `p` is no probability; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn dropout(&self, p: f64, training: bool) -> Result<Tensor> {
        let _op = memory::scope::op("dropout");
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::argument("dropout", format!("{p} is no probability")));
        }
        floats("dropout", self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        if p == 1.0 {
            return self.mul(0.0);
        }
        let drawn = self.device().draw(self.numel().div_ceil(4) as u64);
        let out = drop_some(self, p, drawn)?;
        let same = move |x: &Tensor| drop_some(x, p, drawn);
        Ok(autograd::attach_linear("dropout", out, self, same, same))
    }

    /// Probabilities along `dim` of logits that noise is added to, so that they are samples that have a gradient (Jang et al., 2016): near to one-hot
    /// vectors for a small `tau`, and with `hard` one-hot vectors whose gradient is that of the probabilities. PyTorch's `gumbel_softmax`.
    ///
    /// # Errors
    /// `tau` is not above 0; the dimension is out of range; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn gumbel_softmax(&self, tau: f64, hard: bool, dim: isize) -> Result<Tensor> {
        const OP: &str = "gumbel_softmax";
        let _op = memory::scope::op(OP);
        if tau.is_nan() || tau <= 0.0 {
            return Err(Error::argument(OP, format!("takes a temperature above 0, not {tau}; 1 is usual")));
        }
        floats(OP, self.dtype())?;
        // 1 - u is above 0, and its logarithm below: the other one is finite but for the rarest u.
        let drawn = Tensor::rand(self.shape(), DType::F32, self.device())?;
        let noise = drawn
            .neg()?
            .add(1.0)?
            .log()?
            .neg()?
            .clamp(f64::from(f32::MIN_POSITIVE), f64::INFINITY)?
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
    /// With `replacement` a class can come again; without, `count` classes of weight above zero have to be there, which is not checked.
    ///
    /// # Errors
    /// There are neither one nor two dimensions; there are no classes, or without replacement fewer than `count`; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn multinomial(&self, count: usize, replacement: bool) -> Result<Tensor> {
        const OP: &str = "multinomial";
        let _op = memory::scope::op(OP);
        floats(OP, self.dtype())?;
        let Some((&classes, before)) = self.shape().split_last().filter(|(_, before)| before.len() < 2)
        else {
            return Err(Error::shape(OP, "takes [classes] or [rows, classes]", &[self.shape()]));
        };
        if classes == 0 || count == 0 || (!replacement && count > classes) {
            let rule =
                format!("draws at least one and, without replacement, at most all classes, not {count}");
            return Err(Error::shape(OP, rule, &[self.shape()]));
        }
        let weights = self.detach();
        let weights = if weights.dtype() == DType::F64 { weights } else { weights.to_dtype(DType::F32)? };
        if !replacement {
            // The first `count` of events that come at rates of the weights: exponential times over them are a race.
            let time = Tensor::rand(self.shape(), DType::F32, self.device())?.neg()?.log1p()?.neg()?;
            // None comes at time 0, where classes of weight 0 would be among the first.
            let time = time.clamp(1e-30, f64::INFINITY)?.to_dtype(weights.dtype())?;
            return Ok(weights.div(&time)?.topk(count, -1, true)?.1);
        }
        let ends = weights.cumsum(-1)?.contiguous()?;
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
        let _op = memory::scope::op(OP);
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::argument(OP, format!("{p} is no probability")));
        }
        floats(OP, self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        self.mul(&self.channels_of_ones(OP)?.dropout(p, true)?)
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
        const LEAST: f64 = -1.758_099_340_847_376_6;
        let _op = memory::scope::op(OP);
        if !(0.0..1.0).contains(&p) {
            return Err(Error::argument(OP, format!("{p} is no probability below 1")));
        }
        floats(OP, self.dtype())?;
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        let ones = if by_channel { self.channels_of_ones(OP)? } else { self.detach().ones_like()? };
        let dropped = ones.dropout(p, true)?.eq(0.0)?;
        let scale = 1.0 / ((1.0 - p) * (1.0 + p * LEAST * LEAST)).sqrt();
        self.masked_fill(&dropped, LEAST)?.mul(scale)?.add(-scale * p * LEAST)
    }

    /// A one for each channel of \[batch, channels, ..\], which broadcasts.
    fn channels_of_ones(&self, op: &'static str) -> Result<Tensor> {
        let &[batch, channels, ref rest @ ..] = self.shape() else {
            return Err(Error::shape(op, "takes [batch, channels, ..]", &[self.shape()]));
        };
        let shape = [&[batch, channels][..], &vec![1; rest.len()]].concat();
        Tensor::ones(&shape, self.dtype(), self.device())
    }
}

/// Where numbers that were drawn stand, on the device: for kernels that read it there, and are the same command at each run.
pub(super) fn drawn_words(drawn: Draw, device: &Device) -> Result<Tensor> {
    let words = Tensor::empty(&[4], DType::U32, device)?;
    let params = move |now: &Now| drawn.words(now).into_iter().fold(Params::new(), Params::u32);
    launch::launch_live(&KernelSpec::new("drawn_words"), &[&words], params, 1)?;
    Ok(words)
}

/// Dropout with numbers that were drawn for it.
fn drop_some(x: &Tensor, p: f64, drawn: Draw) -> Result<Tensor> {
    launch::check_compute("dropout", x.dtype(), x.device())?;
    // The mask goes by the number of the element, row-major.
    let x = x.detach().contiguous()?;
    let out = Tensor::empty(x.shape(), x.dtype(), x.device())?;
    let n = x.numel();
    let spec = KernelSpec::new("dropout").def("dtype", launch::shader_dtype(x.dtype(), x.device()));
    let offset = x.layout().offset();
    let params = move |now: &Now| {
        let params = Params::new().size(n).size(offset).f32((1.0 / (1.0 - p)) as f32).u32(threshold(p).0);
        drawn.words(now).into_iter().fold(params, Params::u32)
    };
    launch::launch_live(&spec, &[&x, &out], params, n.div_ceil(4 * GROUP))?;
    Ok(out)
}

//! Initial values of parameters, like PyTorch's `nn.init`. Functions whose names end in `_` overwrite a
//! tensor; random ones draw from the generator of the tensor's device.
//!
//! All fail for a dtype that is not a floating-point type, and for shapes and options other than the text states.

use std::cell::Cell;

use crate::{DType, Device, Result, Tag, Tensor, check, fail, fail_if, memory};
use forebay_core::ops::{Scalar, representable_range};
use forebay_core::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};

thread_local! {
    static DEFAULT_DTYPE: ScopedLocal<Cell<Option<DType>>> = const { ScopedLocal::new(Cell::new(None)) };
}

/// Guard during whose lifetime this thread creates parameters of another dtype: see [`default_dtype`].
#[derive(Debug)]
#[must_use = "the type counts while the guard lives"]
pub struct DefaultDTypeGuard {
    _dtype: ScopedGuard<Cell<Option<DType>>>,
}

/// Makes layers that this thread creates use parameters of `dtype` (f32, f16, bf16 or f64) instead of f32
/// while the guard lives: PyTorch's `set_default_dtype`. This loads a model for inference in the two-byte
/// dtype of its file. Train in f32 under [`autocast`](forebay_core::amp::autocast()) instead. Running statistics and
/// position tables stay f32.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType};
/// # use forebay_nn::nn::{init, Linear};
/// # let device = Device::null(Default::default());
/// let layer = {
///     let _halves = init::default_dtype(DType::BF16)?;
///     Linear::new(8, 4, &device)?
/// };
/// assert_eq!(layer.weight.dtype(), DType::BF16);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[track_caller]
pub fn default_dtype(dtype: DType) -> Result<DefaultDTypeGuard> {
    fail_if!(!matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F64);
        dtype("init::default_dtype", dtype), "parameters are f32, f16, bf16 or f64");
    Ok(DefaultDTypeGuard { _dtype: ScopedGuard::new(&DEFAULT_DTYPE, Some(dtype)) })
}

/// Returns the dtype of new parameters on this thread: that of [`default_dtype`], or f32. A layer that creates its
/// parameters in this dtype needs no memory for another one.
#[must_use]
pub fn parameter_dtype() -> DType {
    DEFAULT_DTYPE.current().unwrap_or(DType::F32)
}

/// Creates a parameter: `make` allocates a floating-point tensor, which is tagged as a parameter and requires a
/// gradient. Under [`default_dtype`], the parameter has that dtype: a tensor of another dtype is cast, so create it in
/// [`parameter_dtype`].
#[track_caller]
pub fn create_parameter(make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    let parameter = create_buffer(|| {
        let parameter = make()?;
        match DEFAULT_DTYPE.current() {
            Some(dtype) if parameter.dtype().is_float() => parameter.to_dtype(dtype),
            _ => Ok(parameter),
        }
    })?;
    parameter.to_leaf()
}

/// Creates a buffer: a tensor of a module that is saved but not trained.
#[track_caller]
pub fn create_buffer(make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    // Takes the line of the caller here, because inside the closure it would be the closure's line.
    let _scope = memory::scope::enter_scope(memory::scope::Scope {
        tag: Tag::Parameter,
        ..memory::scope::current().or_caller_site()
    });
    make()
}

/// Returns the fan-in and fan-out of a weight \[out, in, ..\] of two or more dimensions. They are the inputs of one
/// output, and the outputs of one input.
#[track_caller]
pub fn calculate_fan_in_and_fan_out(weight: &Tensor) -> Result<(usize, usize)> {
    let &[out, inputs, ref window @ ..] = weight.shape() else {
        fail!(shape("calculate_fan_in_and_fan_out", [weight]), "takes a weight of at least two dimensions");
    };
    let window: usize = window.iter().product();
    Ok((inputs * window, out * window))
}

/// Returns the fans of a weight for the function `op`.
fn calculate_fans(op: &'static str, weight: &Tensor) -> Result<(usize, usize)> {
    calculate_fan_in_and_fan_out(weight).map_err(|error| error.with_op(op))
}

/// Overwrites a tensor for the function `op`, which errors name.
#[track_caller]
fn overwrite_with(
    op: &'static str,
    t: &Tensor,
    make: impl FnOnce(&[usize], DType, &Device) -> Result<Tensor>,
) -> Result<()> {
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    let made = make(t.shape(), t.dtype(), t.device());
    made.and_then(|values| t.detach().copy_(&values)).map_err(|error| error.with_op(op))
}

#[track_caller]
fn fill_uniform(op: &'static str, t: &Tensor, low: f64, high: f64) -> Result<()> {
    overwrite_with(op, t, |shape, to, device| Tensor::uniform(shape, low, high, to, device))
}

#[track_caller]
fn fill_normal(op: &'static str, t: &Tensor, mean: f64, std: f64) -> Result<()> {
    check::non_negative(op, "std", std)?;
    overwrite_with(op, t, |shape, to, device| Tensor::normal(shape, mean, std, to, device))
}

#[track_caller]
fn fill_constant(op: &'static str, t: &Tensor, value: Scalar) -> Result<()> {
    overwrite_with(op, t, |_, to, device| Tensor::full((), value, to, device))
}

/// Fills the tensor with uniform values in low ≤ x < high.
#[track_caller]
pub fn uniform_(t: &Tensor, low: f64, high: f64) -> Result<()> {
    fill_uniform("uniform_", t, low, high)
}

/// Fills the tensor with normal values of a deviation `std`, finite and at least 0.
#[track_caller]
pub fn normal_(t: &Tensor, mean: f64, std: f64) -> Result<()> {
    fill_normal("normal_", t, mean, std)
}

/// Fills the tensor with one value.
#[track_caller]
pub fn constant_(t: &Tensor, value: impl Into<Scalar>) -> Result<()> {
    fill_constant("constant_", t, value.into())
}

/// Fills the tensor with zeros.
#[track_caller]
pub fn zeros_(t: &Tensor) -> Result<()> {
    fill_constant("zeros_", t, 0.into())
}

/// Fills the tensor with ones.
#[track_caller]
pub fn ones_(t: &Tensor) -> Result<()> {
    fill_constant("ones_", t, 1.into())
}

/// Fills the weight \[out, in, ..\] with uniform values that preserve the variance through a layer and a leaky
/// ReLU. `a` is the slope of the leaky ReLU (0 for a ReLU). Layers use √5, which gives the bound 1/√fan_in.
#[track_caller]
pub fn kaiming_uniform_(t: &Tensor, a: f64) -> Result<()> {
    const OP: &str = "kaiming_uniform_";
    let bound = (6.0 / ((1.0 + a * a) * calculate_fans(OP, t)?.0.max(1) as f64)).sqrt();
    fill_uniform(OP, t, -bound, bound)
}

/// Fills the weight \[out, in, ..\] with normal values of the variance of [`kaiming_uniform_`].
#[track_caller]
pub fn kaiming_normal_(t: &Tensor, a: f64) -> Result<()> {
    const OP: &str = "kaiming_normal_";
    fill_normal(OP, t, 0.0, (2.0 / ((1.0 + a * a) * calculate_fans(OP, t)?.0.max(1) as f64)).sqrt())
}

/// Fills the weight \[out, in, ..\] with uniform values that preserve the variance in both directions (Glorot).
/// `gain` is finite and at least 0.
#[track_caller]
pub fn xavier_uniform_(t: &Tensor, gain: f64) -> Result<()> {
    const OP: &str = "xavier_uniform_";
    check::non_negative(OP, "gain", gain)?;
    let (fan_in, fan_out) = calculate_fans(OP, t)?;
    let bound = gain * (6.0 / (fan_in + fan_out).max(1) as f64).sqrt();
    fill_uniform(OP, t, -bound, bound)
}

/// Fills the weight with normal values of the variance of [`xavier_uniform_`], with the same conditions.
#[track_caller]
pub fn xavier_normal_(t: &Tensor, gain: f64) -> Result<()> {
    const OP: &str = "xavier_normal_";
    check::non_negative(OP, "gain", gain)?;
    let (fan_in, fan_out) = calculate_fans(OP, t)?;
    fill_normal(OP, t, 0.0, gain * (2.0 / (fan_in + fan_out).max(1) as f64).sqrt())
}

/// Activation after a weight, for [`calculate_gain`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Nonlinearity {
    /// Identity or sigmoid.
    Linear,
    /// Tanh.
    Tanh,
    /// ReLU.
    Relu,
    /// Leaky ReLU with this slope; PyTorch's default is 0.01.
    LeakyRelu(f64),
    /// Self-normalising ELU.
    Selu,
}

/// Returns the factor that an activation requires for the deviation of the weights before it: PyTorch's
/// `calculate_gain`.
///
/// ```
/// use forebay_nn::nn::init::{Nonlinearity, calculate_gain};
/// assert_eq!(calculate_gain(Nonlinearity::Tanh), 5.0 / 3.0);
/// ```
#[must_use]
pub fn calculate_gain(of: Nonlinearity) -> f64 {
    match of {
        Nonlinearity::Linear => 1.0,
        Nonlinearity::Tanh => 5.0 / 3.0,
        Nonlinearity::Relu => 2f64.sqrt(),
        Nonlinearity::LeakyRelu(slope) => (2.0 / (1.0 + slope * slope)).sqrt(),
        Nonlinearity::Selu => 0.75,
    }
}

/// Fan whose variance is preserved, in the forward or in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FanMode {
    /// Number of inputs of an output; forward pass.
    #[default]
    FanIn,
    /// Number of outputs of an input; backward pass.
    FanOut,
}

fn kaiming_std(op: &'static str, t: &Tensor, fan: FanMode, of: Nonlinearity) -> Result<f64> {
    let (fan_in, fan_out) = calculate_fans(op, t)?;
    let n = if fan == FanMode::FanIn { fan_in } else { fan_out };
    Ok(calculate_gain(of) / (n.max(1) as f64).sqrt())
}

/// Generalises [`kaiming_uniform_`] to either fan and any activation, with the same errors.
#[track_caller]
pub fn kaiming_uniform_with_mode_(t: &Tensor, fan: FanMode, of: Nonlinearity) -> Result<()> {
    const OP: &str = "kaiming_uniform_with_mode_";
    let bound = 3f64.sqrt() * kaiming_std(OP, t, fan, of)?;
    fill_uniform(OP, t, -bound, bound)
}

/// Generalises [`kaiming_normal_`] to either fan and any activation, with the same errors.
#[track_caller]
pub fn kaiming_normal_with_mode_(t: &Tensor, fan: FanMode, of: Nonlinearity) -> Result<()> {
    const OP: &str = "kaiming_normal_with_mode_";
    fill_normal(OP, t, 0.0, kaiming_std(OP, t, fan, of)?)
}

/// Fills the tensor with normal values in low ≤ x ≤ high, sampled from the inverse distribution.
///
/// # Errors
/// `low` is not below `high`, `std` is not positive, or the dtype has no value between the bounds.
#[track_caller]
pub fn trunc_normal_(t: &Tensor, mean: f64, std: f64, low: f64, high: f64) -> Result<()> {
    const OP: &str = "trunc_normal_";
    fail_if!(!(low < high && std > 0.0 && std.is_finite() && mean.is_finite());
        argument(OP), "{low}..{high} with a deviation of {std} holds no normal numbers");
    // erf at the bounds is twice the cumulative distribution minus 1. Only f32 arithmetic uses these values.
    let bound = |x: f64| libm::erf((x - mean) / (std * std::f64::consts::SQRT_2));
    // Distant or close bounds may round to the same f32 value.
    let [from, to] = [low, high].map(|x| f64::from(bound(x) as f32));
    overwrite_with(OP, t, |shape, dtype, device| {
        let [min, max] = representable_range(OP, low, high, true, dtype)?;
        // In place, because 16-bit samples would not reach the tails: these f32 samples are the only ones.
        let normal = Tensor::uniform(shape, from, to, DType::F32, device)?;
        normal.erfinv_()?;
        normal.mul_(std * std::f64::consts::SQRT_2)?;
        normal.add_(mean)?;
        let normal = normal.to_dtype(dtype)?;
        normal.clamp_(min, max)?;
        Ok(normal)
    })
}

/// Fills the tensor of two or more dimensions, as a matrix \[out, rest\], with orthogonal rows of length `gain`
/// (Saxe et al., 2013). If there are fewer columns than rows, the columns are orthogonal instead. The host computes
/// the values, and waits for the device.
#[track_caller]
pub fn orthogonal_(t: &Tensor, gain: f64) -> Result<()> {
    const OP: &str = "orthogonal_";
    calculate_fans(OP, t)?;
    let rows = t.shape()[0];
    let columns = t.numel() / rows.max(1);
    let (short, long) = (rows.min(columns), rows.max(columns));
    overwrite_with(OP, t, |shape, dtype, device| {
        let samples = Tensor::randn([short * long], DType::F32, device)?.to_f64s()?;
        let mut lines: Vec<Vec<f64>> = samples.chunks(long.max(1)).map(<[f64]>::to_vec).collect();
        for k in 0..lines.len() {
            let (earlier, rest) = lines.split_at_mut(k);
            let line = &mut rest[0];
            // Orthogonalises twice, because one pass leaves rounding errors.
            for _ in 0..2 {
                for other in earlier.iter() {
                    let along: f64 = line.iter().zip(other).map(|(a, b)| a * b).sum();
                    line.iter_mut().zip(other).for_each(|(a, b)| *a -= along * b);
                }
            }
            let length = line.iter().map(|a| a * a).sum::<f64>().sqrt();
            line.iter_mut().for_each(|a| *a /= length);
        }
        let at = |r: usize, c: usize| if rows <= columns { lines[r][c] } else { lines[c][r] };
        let values: Vec<f32> =
            (0..rows * columns).map(|i| (gain * at(i / columns, i % columns)) as f32).collect();
        Tensor::from_slice(&values, shape, device)?.to_dtype(dtype)
    })
}

/// Fills the matrix with the identity: ones on the diagonal, zeros elsewhere.
#[track_caller]
pub fn eye_(t: &Tensor) -> Result<()> {
    const OP: &str = "eye_";
    let &[rows, columns] = t.shape() else {
        fail!(shape(OP, [t]), "takes a matrix");
    };
    overwrite_with(OP, t, |_, to, device| Tensor::eye(rows, columns, to, device))
}

/// Puts ones in the centre of kernels, so that a convolution \[out, in / groups, kernel..\] preserves its
/// first channels in each group. The kernel has 1 to 3 dimensions, and the groups divide the outputs.
#[track_caller]
pub fn dirac_(t: &Tensor, groups: usize) -> Result<()> {
    const OP: &str = "dirac_";
    let &[out, inputs, ref window @ ..] = t.shape() else {
        fail!(shape(OP, [t]), "takes a weight of 3 to 5 dimensions");
    };
    fail_if!(
        !(1..=3).contains(&window.len()) || groups == 0 || !out.is_multiple_of(groups);
        shape(OP, [t]), "takes a weight of 3 to 5 dimensions whose outputs divide into {groups} groups"
    );
    let size: usize = window.iter().product();
    let middle = window.iter().fold(0, |at, n| at * n + n / 2);
    overwrite_with(OP, t, |shape, to, device| {
        let kernels = Tensor::zeros([groups, out / groups, inputs, size], to, device)?;
        if kernels.numel() > 0 {
            kernels.select(3, middle as isize)?.diagonal(0, 1, 2)?.fill_(1)?;
        }
        kernels.reshape(shape)
    })
}

/// Fills the matrix with normal values, and zeroes a random part `sparsity` (0 to 1) of each column (Martens,
/// 2010).
#[track_caller]
pub fn sparse_(t: &Tensor, sparsity: f64, std: f64) -> Result<()> {
    const OP: &str = "sparse_";
    let &[rows, columns] = t.shape() else {
        fail!(shape(OP, [t]), "takes a matrix");
    };
    fail_if!(!(0.0..=1.0).contains(&sparsity); argument(OP), "{sparsity} is not between 0 and 1");
    let zeros = (sparsity * rows as f64).ceil() as i64;
    overwrite_with(OP, t, |shape, dtype, device| {
        // Random ranks of the rows in each column.
        let ranks =
            Tensor::rand([rows, columns], DType::F32, device)?.argsort(0, false)?.to_dtype(DType::I32)?;
        let values = Tensor::normal(shape, 0.0, std, DType::F32, device)?;
        values.masked_fill(&ranks.lt(zeros)?, 0.0)?.to_dtype(dtype)
    })
}

/// Concatenates one or more parameters of one dtype to a vector: PyTorch's `parameters_to_vector`. Gradients flow
/// to all of them.
#[track_caller]
pub fn parameters_to_vector(parameters: &[Tensor]) -> Result<Tensor> {
    let flat = parameters.iter().map(|p| p.reshape([p.numel()])).collect::<Result<Vec<_>>>();
    flat.and_then(|flat| forebay_core::ops::cat(&flat, 0))
        .map_err(|error| error.with_op("parameters_to_vector"))
}

/// Copies a vector of as many elements into the parameters, in order: PyTorch's `vector_to_parameters`.
#[track_caller]
pub fn vector_to_parameters(vector: &Tensor, parameters: &[Tensor]) -> Result<()> {
    let all: usize = parameters.iter().map(Tensor::numel).sum();
    fail_if!(vector.shape() != [all]; shape("vector_to_parameters", [vector]), "the parameters have {all} elements");
    let mut start = 0;
    for p in parameters {
        p.detach().copy_(&vector.detach().narrow(0, start, p.numel())?.reshape(p.shape())?)?;
        start += p.numel();
    }
    Ok(())
}

#[track_caller]
pub(super) fn create_normal_parameter(shape: &[usize], std: f64, device: &Device) -> Result<Tensor> {
    create_parameter(|| Tensor::normal(shape, 0.0, std, parameter_dtype(), device))
}

/// Creates a parameter with the default initialisation of linear and convolutional layers: uniform within
/// 1/√fan_in, for weight and bias alike.
#[track_caller]
pub(super) fn create_uniform_parameter(shape: &[usize], fan_in: usize, device: &Device) -> Result<Tensor> {
    let bound = if fan_in == 0 { 0.0 } else { 1.0 / (fan_in as f64).sqrt() };
    create_parameter(|| Tensor::uniform(shape, -bound, bound, parameter_dtype(), device))
}

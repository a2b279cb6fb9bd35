//! Layer, RMS, group and instance normalisation, which share one family of kernels.
//!
//! Statistics are f32 for every element type. The forward kernel saves the mean and the reciprocal deviation
//! of each row. The backward pass is one kernel for the input, and a two-stage sum for weight and bias.
//! Shorter rows of layer and RMS normalisation use [`layer_norm`](crate::ops::norm::layer_norm), and batches
//! use [`batch_norm`](crate::ops::norm::batch_norm). `row_kernels.rs` launches the kernels of longer rows and of
//! groups. This file has the public operations, their checks and their composed forms.

pub(crate) mod batch_norm;
pub(crate) mod layer_norm;
pub(crate) mod modulation;
pub(crate) mod recorded_sum;
mod row_kernels;
mod row_norm_record;
pub(crate) mod softmax;

use super::shape::pad::PadMode;
use crate::ops::norm::batch_norm::BatchNormOptions;
use crate::ops::norm::layer_norm::{RowNorm, machine_epsilon};
use crate::ops::norm::row_kernels::{NormGeometry, Normalization};
use crate::ops::prelude::*;

kernel_variants! {
    /// Activation of a normalised result, which is part of the same kernels in both directions.
    pub(super) enum NormActivation {
        None = "",
        Relu = "relu",
        Silu = "silu",
    }
}

impl NormActivation {
    /// Applies the activation as an operation of its own.
    fn apply(self, y: Tensor) -> Result<Tensor> {
        match self {
            Self::None => Ok(y),
            Self::Relu => y.relu(),
            Self::Silu => y.silu(),
        }
    }

    /// Returns the type of a result of `dtype`. Under autocast, SiLU's result has the type to which a following
    /// convolution or linear layer casts it. SiLU is computed in f32, and both forms round once.
    fn result_dtype(self, dtype: DType) -> DType {
        match self {
            Self::Silu if dtype != DType::F64 => amp::autocast_dtype().unwrap_or(dtype),
            _ => dtype,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowNormKind {
    /// Layer normalisation, with a mean.
    Layer,
    /// Root mean square, without a mean.
    Rms,
}

impl RowNormKind {
    /// Returns the name of the operation, which may add a residual first.
    fn op_name(self, adds: bool) -> &'static str {
        match (self, adds) {
            (Self::Layer, false) => "layer_norm",
            (Self::Layer, true) => "add_layer_norm",
            (Self::Rms, false) => "rms_norm",
            (Self::Rms, true) => "add_rms_norm",
        }
    }
}

/// Saves contiguous copies, or the inputs themselves, in place of the inputs.
fn save_substitutes(prepared: &[&Tensor], inputs: &[&Tensor]) -> SmallVec<[SavedTensor; 4]> {
    prepared.iter().zip(inputs).map(|(prepared, t)| SavedTensor::substitute(prepared, t)).collect()
}

/// Returns the gradient of the input with those of weight and bias, which are casts of `sums`.
fn with_parameter_grads(
    dx: Option<Tensor>,
    parameters: [&Option<Tensor>; 2],
    sums: Option<[Result<Tensor>; 2]>,
    needs_input_grad: &[bool],
) -> Result<InputGrads> {
    let mut grads: InputGrads = smallvec![dx];
    let sums = sums.map_or([None, None], |sums| sums.map(Some));
    for (t, sum) in parameters.into_iter().zip(sums) {
        let Some(t) = t else { continue };
        let sum = sum.filter(|_| needs_input_grad[grads.len()]).transpose()?;
        let cast = |sum: Tensor| match sum.shape() == t.shape() {
            true => sum.to_dtype(t.dtype()),
            false => sum.to_dtype(t.dtype())?.reshape(t.shape()),
        };
        grads.push(sum.map(cast).transpose()?);
    }
    Ok(grads)
}

/// Returns the differentiable normalisation of rows of `extent` elements, for gradients of gradients.
fn row_norm_composite(
    (rows, extent): (usize, usize),
    rms: bool,
    eps: f64,
    has_weight: bool,
) -> impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static {
    move |t| {
        let x = normalize_composite(&t[0].reshape([rows, extent])?, &[1], rms, eps)?;
        apply_weight_bias(&x, &t[1..], has_weight, &[extent])?.reshape(t[0].shape())
    }
}

/// Normalises x along `dims` in f32 with differentiable operations, for gradients of gradients. Subtracts the
/// mean unless `rms` is true, then divides by the deviation.
pub(super) fn normalize_composite(x: &Tensor, dims: &[isize], rms: bool, eps: f64) -> Result<Tensor> {
    let x = x.to_dtype(norm_compute_dtype(x.dtype()))?;
    let centered = if rms { x } else { x.sub(&x.mean(dims, true)?)? };
    centered.mul(&centered.square()?.mean(dims, true)?.add(eps)?.rsqrt()?)
}

/// Multiplies x by the optional weight and adds the optional bias, both reshaped to `shape`.
pub(super) fn apply_weight_bias(
    x: &Tensor,
    parameters: &[Tensor],
    has_weight: bool,
    shape: &[usize],
) -> Result<Tensor> {
    let (weight, bias) = parameters.split_at(usize::from(has_weight));
    let dtype = norm_compute_dtype(x.dtype());
    let x = weight.iter().try_fold(x.clone(), |x, w| x.mul(&w.to_dtype(dtype)?.reshape(shape)?))?;
    bias.iter().try_fold(x, |x, b| x.add(&b.to_dtype(dtype)?.reshape(shape)?))
}

/// Returns the type of a normalisation's result. The kernels read any float, so autocast changes only the result.
/// The input is not copied, and its gradient is written in the input's type.
fn norm_result_dtype(op: &str, x: &Tensor) -> DType {
    // The cast's guard ends here, because nothing below is cast.
    if OperandCast::for_op(op, &[]).is_some() { DType::F32 } else { x.dtype() }
}

pub(super) fn norm_compute_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Returns true if x is f64, which is composed of tensor operations because it has no kernels.
#[track_caller]
pub(super) fn check_is_f64(op: &'static str, x: &Tensor) -> Result<bool> {
    match x.dtype() {
        DType::F64 => launch::check_device_dtype(op, DType::F64, x.device()).map(|()| true),
        _ => check_f32_f16_bf16(op, x).map(|()| false),
    }
}

/// Fails unless `t` is a float that is read with `x`. It may be f64 only if x is f64.
#[track_caller]
pub(super) fn check_second_float(op: &'static str, x: &Tensor, t: &Tensor) -> Result<()> {
    if x.dtype() == DType::F64 { check_is_f64(op, t).map(drop) } else { check_f32_f16_bf16(op, t) }
}

/// Returns an f64 input with its optional weight and bias, which are checked and cast to f64.
pub(super) fn f64_inputs(
    op: &'static str,
    x: &Tensor,
    parameters: [Option<&Tensor>; 2],
    shape: &[usize],
) -> Result<SmallVec<[Tensor; 3]>> {
    let check = |t: &Tensor| {
        t.check_same_device(op, x)?;
        check_parameter_shape(op, t, shape)?;
        t.to_dtype(x.dtype())
    };
    std::iter::once(Ok(x.clone())).chain(parameters.into_iter().flatten().map(check)).collect()
}

fn check_parameter_shape(op: &'static str, t: &Tensor, shape: &[usize]) -> Result<()> {
    fail_if!(t.shape() != shape;
        shape(op, &[t.shape(), shape]), "weight and bias have the normalised shape");
    Ok(())
}

/// Checks weight or bias and makes it contiguous for the kernels.
pub(super) fn prepare_parameter(
    op: &'static str,
    t: Option<&Tensor>,
    x: &Tensor,
    shape: &[usize],
) -> Result<Option<Tensor>> {
    let Some(t) = t else { return Ok(None) };
    check_parameter_shape(op, t, shape)?;
    check_f32_f16_bf16(op, t)?;
    t.check_same_device(op, x)?;
    contiguous_zero_offset(t).map(Some)
}

/// Returns the batch, the channels and the product of the other extents of a tensor.
#[track_caller]
pub(super) fn channel_dims(op: &'static str, x: &Tensor) -> Result<(usize, usize, usize)> {
    match x.shape() {
        [batch, channels, space @ ..] => Ok((*batch, *channels, space.iter().product())),
        _ => Err(Error::shape(op, "the input is [batch, channels, ...]", &[x.shape()])),
    }
}

/// Checks the running statistics of x's channels. They may be f64 only if x is f64.
#[track_caller]
pub(super) fn check_running_stats(
    op: &'static str,
    x: &Tensor,
    running: (&Tensor, &Tensor),
    n: usize,
) -> Result<()> {
    for t in [running.0, running.1] {
        fail_if!(t.shape() != [n];
            shape(op, &[t.shape(), &[n]]), "running statistics have one element for each channel");
        check_second_float(op, x, t)?;
    }
    Ok(())
}

/// Updates running = (1 - momentum) running + momentum now.
pub(super) fn update_running_stat(running: &Tensor, value: &Tensor, momentum: f64) -> Result<()> {
    let _no_grad = autograd::no_grad();
    running.copy_(&running.mul(1.0 - momentum)?.add(&value.mul(momentum)?)?)
}

with_defaults! {
    /// Options of [`Tensor::layer_norm`], [`Tensor::add_layer_norm`] and [`Tensor::group_norm`].
    #[derive(Clone, Copy, Debug)]
    pub struct NormOptions<'a> {
        /// Factors of the normalised elements, of the normalised shape (group norm: \[channels\]); `None` for 1.
        pub weight: Option<&'a Tensor> = None,
        /// Terms added to the normalised elements, of the normalised shape (group norm: \[channels\]); `None` for 0.
        pub bias: Option<&'a Tensor> = None,
        /// Term added to variances; 1e-5.
        pub eps: f64 = 1e-5,
    }

    /// Options of [`Tensor::instance_norm`].
    #[derive(Clone, Copy, Debug)]
    pub struct InstanceNormOptions<'a> {
        /// Running mean and variance, \[channels\] each; `None`.
        pub running: Option<(&'a Tensor, &'a Tensor)> = None,
        /// Factor of each channel; `None` for 1.
        pub weight: Option<&'a Tensor> = None,
        /// Summand of each channel; `None` for 0.
        pub bias: Option<&'a Tensor> = None,
        /// If false, uses the running statistics; true.
        pub use_input_stats: bool = true,
        /// Share of the input in new running statistics; 0.1.
        pub momentum: f64 = 0.1,
        /// Term added to variances; 1e-5.
        pub eps: f64 = 1e-5,
    }

    /// Options of [`Tensor::local_response_norm`].
    #[derive(Clone, Copy, Debug)]
    pub struct LocalResponseNormOptions {
        /// Factor of the mean square; 1e-4.
        pub alpha: f64 = 1e-4,
        /// Exponent of the divisor; 0.75.
        pub beta: f64 = 0.75,
        /// Term added to the mean square; 1.
        pub k: f64 = 1.0,
    }
}

impl Tensor {
    #[track_caller]
    fn normalize_rows(
        &self,
        kind: RowNormKind,
        shape: &[usize],
        parameters: [Option<&Tensor>; 2],
        eps: f64,
    ) -> Result<Tensor> {
        let (op, rms) = (kind.op_name(false), kind == RowNormKind::Rms);
        operation!(op);
        check::finite(op, "eps", eps)?;
        let double = check_is_f64(op, self)?;
        fail_if!(shape.is_empty() || !self.shape().ends_with(shape);
            shape(op, &[self.shape(), shape]), "the input ends with the normalised shape");
        let extent: usize = shape.iter().product();
        let rows = self.numel() / extent.max(1);
        let [weight, bias] = parameters;
        let composed = row_norm_composite((rows, extent), rms, eps, weight.is_some());
        if double {
            return composed(&f64_inputs(op, self, parameters, shape)?);
        }
        let prepared =
            [prepare_parameter(op, weight, self, shape)?, prepare_parameter(op, bias, self, shape)?];
        if let Some(norm) = RowNorm::new(op, (rows, extent), rms, eps, prepared.clone()) {
            let x = contiguous_zero_offset(self)?;
            return norm.forward_with_grad(x, norm_result_dtype(op, self), &bindings![self, weight, bias]);
        }
        let [prepared_weight, prepared_bias] = prepared;
        let norm = Normalization {
            op,
            geometry: NormGeometry::for_layer_norm(rows, extent),
            rms,
            eps,
            activation: NormActivation::None,
            result: norm_result_dtype(op, self),
            x: contiguous_zero_offset(self)?,
            weight: prepared_weight,
            bias: prepared_bias,
        };
        norm.forward_with_grad(self, weight, bias, composed)
    }

    /// Normalises each row over the trailing dimensions `normalized_shape` to mean 0 and variance 1, then
    /// multiplies by the weight and adds the bias.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::NormOptions};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[8, 16, 64], DType::F32, &device)?;
    /// let weight = Tensor::ones(&[64], DType::F32, &device)?;
    /// let options = NormOptions { weight: Some(&weight), ..Default::default() };
    /// assert_eq!(x.layer_norm(&[64], &options)?.shape(), x.shape());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The input does not end with `normalized_shape`, or weight or bias has another shape. The dtype is not
    /// a float, or the device lacks f64.
    #[track_caller]
    pub fn layer_norm(&self, normalized_shape: impl IntoShape, options: &NormOptions<'_>) -> Result<Tensor> {
        let &NormOptions { weight, bias, eps } = options;
        let shape = new_shape("layer_norm", normalized_shape)?;
        self.normalize_rows(RowNormKind::Layer, &shape, [weight, bias], eps)
    }

    /// Divides each row over the trailing dimensions `normalized_shape` by its root mean square, then
    /// multiplies by the weight. The default `eps` is the machine epsilon of the element type.
    #[track_caller]
    pub fn rms_norm(
        &self,
        normalized_shape: impl IntoShape,
        weight: Option<&Tensor>,
        eps: Option<f64>,
    ) -> Result<Tensor> {
        let eps = eps.unwrap_or_else(|| machine_epsilon(self.dtype()));
        self.normalize_rows(RowNormKind::Rms, &new_shape("rms_norm", normalized_shape)?, [weight, None], eps)
    }

    #[track_caller]
    fn normalize_groups(
        &self,
        op: &'static str,
        groups: usize,
        parameters: [Option<&Tensor>; 2],
        eps: f64,
        activation: NormActivation,
    ) -> Result<Tensor> {
        operation!(op);
        check::finite(op, "eps", eps)?;
        let double = check_is_f64(op, self)?;
        let (batch, channels, space) = channel_dims(op, self)?;
        fail_if!(groups == 0 || !channels.is_multiple_of(groups);
            argument(op), "{channels} channels do not divide into {groups} groups");
        let [weight, bias] = parameters;
        let has_weight = weight.is_some();
        let composed = move |t: &[Tensor]| {
            let x = t[0].reshape([batch * groups, channels / groups * space])?;
            let x = normalize_composite(&x, &[1], false, eps)?.reshape([batch, channels, space])?;
            activation
                .apply(apply_weight_bias(&x, &t[1..], has_weight, &[channels, 1])?.reshape(t[0].shape())?)
        };
        if double {
            return composed(&f64_inputs(op, self, parameters, &[channels])?);
        }
        let norm = Normalization {
            op,
            geometry: NormGeometry::for_group_norm(batch, channels, space, groups),
            rms: false,
            eps,
            activation,
            result: activation.result_dtype(norm_result_dtype(op, self)),
            x: contiguous_zero_offset(self)?,
            weight: prepare_parameter(op, weight, self, &[channels])?,
            bias: prepare_parameter(op, bias, self, &[channels])?,
        };
        norm.forward_with_grad(self, weight, bias, composed)
    }

    #[track_caller]
    fn group_norm_impl(
        &self,
        op: &'static str,
        groups: usize,
        options: &NormOptions<'_>,
        activation: NormActivation,
    ) -> Result<Tensor> {
        let &NormOptions { weight, bias, eps } = options;
        fail_if!(self.shape().iter().skip(1).any(|&extent| extent == 0);
            shape(op, [self]), "takes entries that are not empty");
        self.normalize_groups(op, groups, [weight, bias], eps, activation)
    }

    /// Normalises each of `groups` channel groups of each entry of [batch, channels, ...]. Weight and bias
    /// have one element for each channel.
    ///
    /// # Errors
    /// The channels are not divisible by the groups, or an entry is empty. See also
    /// [`layer_norm`](Self::layer_norm).
    #[track_caller]
    pub fn group_norm(&self, groups: usize, options: &NormOptions<'_>) -> Result<Tensor> {
        self.group_norm_impl("group_norm", groups, options, NormActivation::None)
    }

    /// Computes [`group_norm`](Self::group_norm) followed by [`silu`](Self::silu), fused in both directions. The
    /// graph keeps the input and the statistics, but neither the normalised result nor SiLU's.
    ///
    /// Under [`autocast`](crate::amp::autocast), the result has the scope's 16-bit dtype instead of f32: all is
    /// computed in f32 and rounded once. A convolution or linear layer would cast the f32 result to the same
    /// bits. Otherwise the result has the dtype of the input.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::NormOptions};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[8, 16, 4, 4], DType::F32, &device)?;
    /// assert_eq!(x.group_norm_silu(4, &NormOptions::default())?.shape(), x.shape());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[track_caller]
    pub fn group_norm_silu(&self, groups: usize, options: &NormOptions<'_>) -> Result<Tensor> {
        self.group_norm_impl("group_norm_silu", groups, options, NormActivation::Silu)
    }

    /// Normalises each channel of each entry of [batch, channels, ...]. Updates the running mean and variance in
    /// place. Without `use_input_stats`, the running statistics replace the input's.
    ///
    /// # Errors
    /// `use_input_stats` is false and there are no running statistics. See also
    /// [`layer_norm`](Self::layer_norm).
    #[track_caller]
    pub fn instance_norm(&self, options: &InstanceNormOptions<'_>) -> Result<Tensor> {
        let &InstanceNormOptions { running, weight, bias, use_input_stats, momentum, eps } = options;
        if !use_input_stats {
            let training = false;
            let options =
                BatchNormOptions { running, weight, bias, training, momentum, eps, ..Default::default() };
            return self.batch_norm(&options);
        }
        check::finite("instance_norm", "momentum", momentum)?;
        check::finite("instance_norm", "eps", eps)?;
        let (_, n, _) = channel_dims("instance_norm", self)?;
        if let Some((mean, var)) = running {
            check_running_stats("instance_norm", self, (mean, var), n)?;
            autograd::update_state(|| {
                let space: SmallVec<[isize; 4]> = (2..self.rank() as isize).collect();
                let flat = self.detach().to_dtype(norm_compute_dtype(self.dtype()))?;
                // Without spatial dimensions, an instance is one element.
                let (v, m) = if space.is_empty() {
                    flat.unsqueeze(-1)?.var_mean([-1], 1.0, false)?
                } else {
                    flat.var_mean(&space, 1.0, false)?
                };
                update_running_stat(mean, &m.mean([0], false)?, momentum)?;
                update_running_stat(var, &v.mean([0], false)?, momentum)
            })?;
        }
        self.normalize_groups("instance_norm", n.max(1), [weight, bias], eps, NormActivation::None)
    }

    /// Divides each element of \[batch, channels, ..\] by (k + alpha · m)^beta: PyTorch's
    /// `nn.functional.local_response_norm`. m is the mean square of the `size` nearest channels, with zero padding.
    ///
    /// # Errors
    /// There are fewer than three dimensions, `size` is 0, or the dtype is bool.
    #[track_caller]
    pub fn local_response_norm(&self, size: usize, options: &LocalResponseNormOptions) -> Result<Tensor> {
        let &LocalResponseNormOptions { alpha, beta, k } = options;
        operation!(OP = "local_response_norm");
        if !amp::is_autocast_enabled() {
            // Under autocast, powers are f32 anyway, and so is the result.
            dispatch_in_f32!(OP, [self], |x| x.local_response_norm(size, options));
        }
        if self.dtype().is_int() {
            launch::check_device_dtype(OP, self.dtype(), self.device())?;
        } else {
            check_is_f64(OP, self)?;
        }
        fail_if!(self.rank() < 3;
            shape(OP, [self]), "takes [batch, channels, ..] of at least three dimensions");
        fail_if!(size == 0; argument(OP), "takes a size of at least 1");
        if self.numel() == 0 {
            return Ok(self.clone());
        }
        let mut pads = vec![0; 2 * (self.rank() - 1)];
        if let [.., before, after] = pads.as_mut_slice() {
            (*before, *after) = ((size / 2) as isize, ((size - 1) / 2) as isize);
        }
        let squares = self.square()?.pad(&pads, PadMode::Constant(0.0.into()))?;
        // Sliding windows over channels are a view without a copy.
        let windows = squares.unfold(1, size, 1)?;
        let averages = match windows.dtype().is_float() {
            true => windows.mean([-1], false)?,
            // As in PyTorch, averages of integers are integers.
            false => windows.sum([-1], false)?.trunc_divide(size)?,
        };
        self.div(&averages.mul(alpha)?.add(k)?.pow(beta)?)
    }
}

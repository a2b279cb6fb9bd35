//! Layer, RMS, group and instance normalisation, which share one family of kernels.
//!
//! Statistics are f32 for every element type. The forward kernel saves the mean and the reciprocal deviation
//! of each row. The backward pass is one kernel for the input, and a two-stage sum for weight and bias.
//! Shorter rows of layer and RMS normalisation use [`layer_norm`](crate::ops::norm::layer_norm), and batches
//! use [`batch_norm`](crate::ops::norm::batch_norm).

pub(crate) mod batch_norm;
pub(crate) mod layer_norm;
pub(crate) mod softmax;

use super::shape::PadMode;
use crate::amp::OperandCast;
use crate::check;
use crate::ops::kernel::heuristics::split_reduction;
use crate::ops::norm::batch_norm::BatchNormOptions;
use crate::ops::norm::layer_norm::{RowNorm, machine_epsilon};
use crate::ops::norm::softmax::{check_f32_f16_bf16, choose_threads_per_row};
use crate::ops::prelude::*;

/// Mapping of elements to rows and weights: parameters of `norm.wgsl` and `norm_weight_grad.wgsl`.
#[derive(Clone, Copy, Debug)]
struct NormGeometry {
    rows: usize,
    extent: usize,
    run_length: usize,
    run_stride: usize,
    row_stride: usize,
    /// Index of an element's weight: row modulus, and strides of row, run and element.
    weight_rows: usize,
    weight_strides: [usize; 3],
    /// Number of weights, and of elements that share one.
    weights: usize,
    elements_per_weight: usize,
    /// Elements of a weight: stride between weights, run length and stride between runs.
    weight_stride: usize,
    weight_run_length: usize,
    weight_run_stride: usize,
    /// Row of such an element: stride of runs, weights in a row, stride of rows.
    row_strides: [usize; 3],
}

impl NormGeometry {
    /// Returns the geometry of rows over the trailing `extent` elements, each with its own weight.
    fn for_layer_norm(rows: usize, extent: usize) -> Self {
        Self {
            rows,
            extent,
            run_length: extent,
            run_stride: 0,
            row_stride: extent,
            weight_rows: 1,
            weight_strides: [0, 0, 1],
            weights: extent,
            elements_per_weight: rows,
            weight_stride: 1,
            weight_run_length: 1,
            weight_run_stride: extent,
            row_strides: [1, 1, 0],
        }
    }

    /// Returns the geometry of [batch, channels, space] with a row for each batch entry and channel group,
    /// and a weight for each channel.
    fn for_group_norm(batch: usize, channels: usize, space: usize, groups: usize) -> Self {
        let extent = channels / groups * space;
        Self {
            rows: batch * groups,
            extent,
            run_length: space,
            run_stride: space,
            row_stride: extent,
            weight_rows: groups,
            weight_strides: [channels / groups, 1, 0],
            row_strides: [groups, channels / groups, 1],
            ..Self::for_channel_norm(batch, channels, space)
        }
    }

    /// Returns the geometry of [batch, channels, space] with a row and a weight for each channel.
    fn for_channel_norm(batch: usize, channels: usize, space: usize) -> Self {
        Self {
            rows: channels,
            extent: batch * space,
            run_length: space,
            run_stride: channels * space,
            row_stride: space,
            weight_rows: channels,
            weight_strides: [1, 0, 0],
            weights: channels,
            elements_per_weight: batch * space,
            weight_stride: space,
            weight_run_length: space,
            weight_run_stride: channels * space,
            row_strides: [0, 1, 1],
        }
    }
}

/// Kind of a normalisation of rows.
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

/// Statistics of the rows. RMS has no mean.
#[derive(Clone)]
struct NormStatistics {
    mean: Option<Tensor>,
    rstd: Tensor,
}

/// Row length from which several workgroups share a row, if there are few rows.
const SPLIT_ROW_MIN: usize = 1 << 16;

/// Returns the number of parts of a long reduction and the elements of a part. Parts run in parallel.
fn split_weight_reduction(outputs: usize, extent: usize, threads_per_row: usize) -> (usize, usize) {
    let groups = outputs.div_ceil(WORKGROUP_SIZE / threads_per_row);
    let splits = (512 / groups).clamp(1, extent.div_ceil(threads_per_row * 16).max(1));
    let chunk = extent.div_ceil(splits).next_multiple_of(4 * threads_per_row);
    (extent.div_ceil(chunk).max(1), chunk)
}

/// Returns the number of neighbouring elements that a thread accesses at once, for rows of these strides.
fn step_width(across: bool, strides: &[usize]) -> usize {
    if !across && strides.iter().all(|n| n.is_multiple_of(VEC4_WIDTH)) { VEC4_WIDTH } else { 1 }
}

/// Distribution of rows over threads and workgroups.
#[derive(Clone, Copy)]
struct NormStage {
    threads_per_row: usize,
    across: bool,
    width: usize,
    /// Number of parts of a row, and elements of a part.
    splits_and_chunk: (usize, usize),
}

/// Normalisation of one tensor, with the operands of all its kernels.
#[derive(Clone)]
struct Normalization {
    op: &'static str,
    geometry: NormGeometry,
    rms: bool,
    eps: f64,
    /// All three are contiguous at offset 0 of their storages.
    x: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

impl Normalization {
    /// Runs the elementwise kernel: forward, or backward with the gradient `g`.
    fn run_element_kernel(&self, g: Option<&Tensor>, statistics: &NormStatistics) -> Result<Tensor> {
        let Self { geometry: at, x, .. } = self;
        let out = Tensor::empty(x.shape(), x.dtype(), x.device())?;
        if out.numel() == 0 {
            return Ok(out);
        }
        let across = at.run_length == 1 && at.rows > 1;
        let threads_per_row = choose_threads_per_row(at.extent, across);
        let width = step_width(across, &[at.run_length, at.run_stride, at.row_stride]);
        let stage = NormStage { threads_per_row, across, width, splits_and_chunk: (1, at.extent) };
        let (splits, chunk) = split_reduction(at.rows, at.extent, threads_per_row, 3);
        if at.extent < SPLIT_ROW_MIN || splits == 1 {
            // Three loops over the row, and the loops of sums over its threads.
            let iterations = 3 * at.extent.div_ceil(threads_per_row * width) + 128;
            self.launch_stage("whole", stage, g, Some(statistics), None, &out, iterations)?;
            return Ok(out);
        }
        let stage = NormStage { splits_and_chunk: (splits, chunk), ..stage };
        let iterations = 2 * chunk.div_ceil(threads_per_row * width) + 128;
        let partial = empty_workspace(&[splits, 2, at.rows], DType::F32, x.device())?;
        self.launch_stage("parts", stage, g, g.map(|_| statistics), None, &partial, iterations)?;
        let sums = match g {
            Some(_) => Some(partial.sum([0], false)?),
            None => {
                let finish = NormStage { threads_per_row: WORKGROUP_SIZE, across: false, width: 1, ..stage };
                let iterations = 2 * splits.div_ceil(WORKGROUP_SIZE) + 128;
                let (statistics, parts) = (Some(statistics), Some(&partial));
                self.launch_stage("finish", finish, None, statistics, parts, &out, iterations)?;
                None
            }
        };
        self.launch_stage("apply", stage, g, Some(statistics), sums.as_ref(), &out, iterations)?;
        Ok(out)
    }

    /// Launches one stage of `norm.wgsl`. `more` has the sums of the parts. In the stage `finish` it has the
    /// parts themselves, and there is no `out`.
    #[expect(clippy::too_many_arguments, reason = "one launch, with all that it binds")]
    fn launch_stage(
        &self,
        name: &'static str,
        stage: NormStage,
        g: Option<&Tensor>,
        statistics: Option<&NormStatistics>,
        more: Option<&Tensor>,
        out: &Tensor,
        iterations: usize,
    ) -> Result<()> {
        let Self { geometry: at, x, .. } = self;
        let NormStage { threads_per_row, across, width, splits_and_chunk: (splits, chunk) } = stage;
        let finish = name == "finish";
        // Pass only the tensors that the stage reads: statistics need no weights.
        let weight = self.weight.as_ref().filter(|_| !finish && (g.is_some() || name != "parts"));
        let bias = self.bias.as_ref().filter(|_| g.is_none() && (name == "whole" || name == "apply"));
        let spec = kernel_spec! {
            "norm", stage: name, pass: if g.is_some() { "backward" } else { "forward" },
            dtype: launch::dtype_name_of(Some(x)), weight: launch::dtype_name_of(weight),
            bias: launch::dtype_name_of(bias), rms: self.rms,
            contiguous: at.run_length >= at.extent || at.run_stride == at.run_length,
            flat: at.run_length >= at.extent, threads_per_row, across, width,
        };
        let [weight_row, weight_step, weight_inner] = at.weight_strides;
        let params = kernel_params! {
            rows: at.rows, extent: at.extent, run: at.run_length, step: at.run_stride,
            row_stride: at.row_stride, weight_rows: at.weight_rows, weight_row, weight_step, weight_inner,
            eps: self.eps as f32, splits, chunk,
        }
        .loop_iterations(iterations);
        let mean = statistics.and_then(|statistics| statistics.mean.as_ref());
        let rstd = statistics.map(|statistics| &statistics.rstd);
        let tensors = match finish {
            true => bindings![more, mean, rstd],
            false => bindings![g, x, weight, bias, mean, rstd, more, out],
        };
        let rows = if finish { at.rows } else { at.rows * splits };
        launch::launch(&spec, &tensors, params, rows.div_ceil(WORKGROUP_SIZE / threads_per_row))
    }

    /// Sums, over the elements of each weight, g times the normalised x, and g: f32 [2, weights].
    fn sum_parameter_grads(&self, g: &Tensor, statistics: &NormStatistics) -> Result<Tensor> {
        let Self { geometry: at, x, .. } = self;
        if x.numel() == 0 {
            return Tensor::zeros([2, at.weights], DType::F32, x.device());
        }
        let across = at.weight_run_length == 1 && at.weights > 1;
        let threads_per_row = choose_threads_per_row(at.elements_per_weight, across);
        let width = step_width(across, &[at.weight_run_length, at.weight_run_stride, at.weight_stride]);
        let (splits, chunk) = split_weight_reduction(at.weights, at.elements_per_weight, threads_per_row);
        let partial = empty_workspace(&[splits, 2, at.weights], DType::F32, x.device())?;
        let spec = kernel_spec! {
            "norm_weight_grad", dtype: launch::shader_dtype_name(x.dtype(), x.device()), rms: self.rms,
            single: at.weight_run_length == 1, threads_per_row, across, width,
        };
        let [row_step, row_weights, row_inner] = at.row_strides;
        let params = kernel_params! {
            weights: at.weights, extent: at.elements_per_weight, run: at.weight_run_length,
            step: at.weight_run_stride, weight_stride: at.weight_stride, row_step, row_weights, row_inner,
            splits, chunk,
        }
        .loop_iterations(chunk.div_ceil(threads_per_row * width) + 128);
        let tensors = bindings![g, x, &statistics.rstd, &statistics.mean, &partial];
        launch::launch(
            &spec,
            &tensors,
            params,
            (at.weights * splits).div_ceil(WORKGROUP_SIZE / threads_per_row),
        )?;
        partial.sum([0], false)
    }

    /// Computes the gradients of the input, and of weight and bias if present.
    fn backward(&self, g: &Tensor, statistics: &NormStatistics, wants: &[bool]) -> Result<InputGrads> {
        let g = contiguous_zero_offset(g)?;
        let sums =
            wants[1..].contains(&true).then(|| self.sum_parameter_grads(&g, statistics)).transpose()?;
        let dx = wants[0].then(|| self.run_element_kernel(Some(&g), statistics)).transpose()?;
        let sums = sums.map(|sums| [sums.select(0, 0), sums.select(0, 1)]);
        with_parameter_grads(dx, [&self.weight, &self.bias], sums, wants)
    }

    /// Normalises with new statistics and records the operation. `composed` is the differentiable version.
    fn forward_with_grad(
        self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        composed: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let stored = || Tensor::empty([self.geometry.rows], DType::F32, x.device());
        let mean = if self.rms { None } else { Some(stored()?) };
        let statistics = NormStatistics { mean, rstd: stored()? };
        let out = self.run_element_kernel(None, &statistics)?;
        let inputs = bindings![x, weight, bias];
        let saved = save_substitutes(&bindings![&self.x, &self.weight, &self.bias], &inputs);
        Ok(autograd::composite_differentiable(self.op, out, &inputs, saved, composed, move |g, wants| {
            self.backward(g, &statistics, wants)
        }))
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
    wants: &[bool],
) -> Result<InputGrads> {
    let mut grads: InputGrads = smallvec![dx];
    let sums = sums.map_or([None, None], |sums| sums.map(Some));
    for (t, sum) in parameters.into_iter().zip(sums) {
        let Some(t) = t else { continue };
        let sum = sum.filter(|_| wants[grads.len()]).transpose()?;
        grads.push(sum.map(|sum| sum.to_dtype(t.dtype())?.reshape(t.shape())).transpose()?);
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
    let away = if rms { x } else { x.sub(&x.mean(dims, true)?)? };
    away.mul(&away.square()?.mean(dims, true)?.add(eps)?.rsqrt()?)
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

/// Returns the type in which normalisations compute.
pub(super) fn norm_compute_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Returns true if x is f64, which is composed of tensor operations because it has no kernels.
pub(super) fn check_is_f64(op: &'static str, x: &Tensor) -> Result<bool> {
    match x.dtype() {
        DType::F64 => launch::check_device_dtype(op, DType::F64, x.device()).map(|()| true),
        _ => check_f32_f16_bf16(op, x).map(|()| false),
    }
}

/// Fails unless `t` is a float that is read with `x`. It may be f64 only if x is f64.
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
        shape(op, &[t.shape(), shape]), "weight and bias have the shape of what is normalised");
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
pub(super) fn channel_dims(op: &'static str, x: &Tensor) -> Result<(usize, usize, usize)> {
    match x.shape() {
        [batch, channels, space @ ..] => Ok((*batch, *channels, space.iter().product())),
        _ => Err(Error::shape(op, "the input is [batch, channels, ...]", &[x.shape()])),
    }
}

/// Checks the running statistics of x's channels. They may be f64 only if x is f64.
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
}

with_defaults! {
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
}

with_defaults! {
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
            // The kernel reads any float. Under autocast only the result is f32, and the input is not copied.
            let cast = OperandCast::for_op(op, &[]);
            let result = if cast.is_some() { DType::F32 } else { self.dtype() };
            let x = contiguous_zero_offset(self)?;
            return norm.forward_with_grad(x, result, &bindings![self, weight, bias]);
        }
        dispatch_autocast!(op, [self, weight, bias], |x, w, b| {
            x.normalize_rows(kind, shape, [w.as_ref(), b.as_ref()], eps)
        });
        let (geometry, x) = (NormGeometry::for_layer_norm(rows, extent), contiguous_zero_offset(self)?);
        let [prepared_weight, prepared_bias] = prepared;
        let norm = Normalization { op, geometry, rms, eps, x, weight: prepared_weight, bias: prepared_bias };
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
    ) -> Result<Tensor> {
        operation!(op);
        check::finite(op, "eps", eps)?;
        let double = check_is_f64(op, self)?;
        let (batch, channels, space) = channel_dims(op, self)?;
        fail_if!(groups == 0 || !channels.is_multiple_of(groups);
            argument(op), "{channels} channels do not divide into {groups} groups");
        let [weight, bias] = parameters;
        let weighs = weight.is_some();
        let composed = move |t: &[Tensor]| {
            let x = t[0].reshape([batch * groups, channels / groups * space])?;
            let x = normalize_composite(&x, &[1], false, eps)?.reshape([batch, channels, space])?;
            apply_weight_bias(&x, &t[1..], weighs, &[channels, 1])?.reshape(t[0].shape())
        };
        if double {
            return composed(&f64_inputs(op, self, parameters, &[channels])?);
        }
        let norm = Normalization {
            op,
            geometry: NormGeometry::for_group_norm(batch, channels, space, groups),
            rms: false,
            eps,
            x: contiguous_zero_offset(self)?,
            weight: prepare_parameter(op, weight, self, &[channels])?,
            bias: prepare_parameter(op, bias, self, &[channels])?,
        };
        norm.forward_with_grad(self, weight, bias, composed)
    }

    /// Normalises each of `groups` channel groups of each entry of [batch, channels, ...]. Weight and bias
    /// have one element for each channel.
    ///
    /// # Errors
    /// The channels are not divisible by the groups, or an entry is empty. See also
    /// [`layer_norm`](Self::layer_norm).
    #[track_caller]
    pub fn group_norm(&self, groups: usize, options: &NormOptions<'_>) -> Result<Tensor> {
        let &NormOptions { weight, bias, eps } = options;
        dispatch_autocast!("group_norm", [self, weight, bias], |x, w, b| {
            x.group_norm(groups, &NormOptions { weight: w.as_ref(), bias: b.as_ref(), eps })
        });
        fail_if!(self.shape().iter().skip(1).any(|&extent| extent == 0);
            shape("group_norm", [self]), "takes entries that are not empty");
        self.normalize_groups("group_norm", groups, [weight, bias], eps)
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
        self.normalize_groups("instance_norm", n.max(1), [weight, bias], eps)
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
        let squares = self.square()?.pad(&pads, PadMode::Constant(0.0))?;
        // Sliding windows over channels are a view without a copy.
        let windows = squares.unfold(1, size, 1)?;
        let means = match windows.dtype().is_float() {
            true => windows.mean([-1], false)?,
            // As in PyTorch, averages of integers are integers.
            false => windows.sum([-1], false)?.trunc_divide(size)?,
        };
        self.div(&means.mul(alpha)?.add(k)?.pow(beta)?)
    }
}

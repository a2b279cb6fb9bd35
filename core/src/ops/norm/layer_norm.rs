//! Layer and RMS normalisation of contiguous rows that fit a workgroup's registers, which reads and writes
//! each element once. The kernels also add the residual, and in the backward pass its gradient.
//!
//! Longer rows and rows of other shapes use [`norm`](crate::ops::norm).

use NormConsumer::{Any, MatmulOnly};
use RowNormKind::{Layer, Rms};

use crate::ops::kernel::heuristics::RowConfig;
use crate::ops::norm::modulation::RowLines;
use crate::ops::norm::row_norm_record::RowNormRecord;
use crate::ops::norm::{
    NormOptions, RowNormKind, check_is_f64, prepare_parameter, row_norm_composite, save_substitutes,
    with_parameter_grads,
};
use crate::ops::prelude::*;
use crate::ops::reduce::sum_parts;

/// Largest number of vec4 steps in a thread's registers. Backward has three values for each element.
const FORWARD_REGISTER_STEPS: usize = 8;
const BACKWARD_REGISTER_STEPS: usize = 4;

/// Normalisation of rows of `extent` elements.
#[derive(Clone)]
pub(crate) struct RowNorm {
    pub(super) op: &'static str,
    pub(super) rows: usize,
    pub(super) extent: usize,
    is_rms: bool,
    eps: f64,
    /// Contiguous at offset 0, as all operands.
    pub(super) weight: Option<Tensor>,
    pub(super) bias: Option<Tensor>,
    /// Type of the residual branch of a fused sum, if the branch needs a gradient. The kernel then also
    /// writes the gradient in this type, with its column sums.
    branch_dtype: Option<DType>,
}

/// Scale and shift of normalised rows, one line each for groups of rows.
#[derive(Clone, Copy)]
pub(super) struct Modulation<'a> {
    pub(super) scale: &'a RowLines,
    /// Only the forward pass reads it.
    pub(super) shift: Option<&'a RowLines>,
}

/// Sums and copies that a backward kernel writes in addition to the gradient of x.
pub(super) struct BackwardForm<'a> {
    /// Sections of the partial sums: see `layer_norm.wgsl`. 0 for no sums.
    pub(super) sections: usize,
    /// Type of the copy of the gradient.
    pub(super) copy: Option<DType>,
    pub(super) modulation: Option<Modulation<'a>>,
}

/// Results of a backward kernel.
pub(super) struct BackwardTensors {
    pub(super) dx: Tensor,
    pub(super) copy: Option<Tensor>,
    /// Partial sums \[workgroups, sections, extent\]. The workgroups of a group of rows are adjacent.
    pub(super) partial: Option<Tensor>,
}

pub(super) enum SavedRows {
    Input(Tensor),
    /// 16-bit residual branch, and a residual that another gradient saves anyway. The input is their f32 sum.
    BranchAndResidual(Tensor, Tensor),
}

impl SavedRows {
    /// Saves the f32 sum, or branch and residual, whichever keeps less memory until the backward pass.
    fn from_sum(sum: &Tensor, branch: &Tensor, residual: &Tensor) -> Self {
        let halved = sum.dtype() == DType::F32 && branch.dtype().size() < sum.dtype().size();
        match halved && residual.dtype() == DType::F32 && residual.is_saved_for_backward() {
            true => Self::BranchAndResidual(branch.detach(), residual.detach()),
            false => Self::Input(sum.clone()),
        }
    }

    /// Returns the saved tensor that stands for `input` in the autograd graph.
    fn to_saved_tensor(&self, input: &Tensor) -> SavedTensor {
        match self {
            Self::Input(x) => SavedTensor::substitute(x, input),
            Self::BranchAndResidual(branch, residual) => SavedTensor::substitute_sum(residual, branch, input),
        }
    }

    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::Input(x) => x.dtype(),
            Self::BranchAndResidual(_, residual) => residual.dtype(),
        }
    }

    /// Reports whether a kernel may write the gradient of the rows to the memory of `grad`.
    pub(super) fn is_like(&self, grad: &Tensor) -> bool {
        grad.is_contiguous() && grad.layout().offset() == 0 && grad.dtype() == self.dtype()
    }

    /// Returns a gradient with a flag: true if nothing else reads it, so that a kernel may overwrite it.
    pub(super) fn overwritable(&self, grad: Tensor) -> (Tensor, bool) {
        let may_overwrite = grad.is_unique() && self.is_like(&grad);
        (grad, may_overwrite)
    }

    /// Returns the rows as one or two operands, within `left` bindings.
    fn kernel_operands(&self, left: usize) -> Result<(Tensor, Option<&Tensor>)> {
        Ok(match self {
            Self::Input(x) => (x.clone(), None),
            Self::BranchAndResidual(branch, residual) if left >= 2 => (branch.clone(), Some(residual)),
            Self::BranchAndResidual(branch, residual) => {
                (residual.add(&branch.to_dtype(residual.dtype())?)?, None)
            }
        })
    }
}

impl RowNorm {
    /// Creates a normalisation, or returns `None` if the rows are too long.
    pub(crate) fn new(
        op: &'static str,
        (rows, extent): (usize, usize),
        rms: bool,
        eps: f64,
        [weight, bias]: [Option<Tensor>; 2],
    ) -> Option<Self> {
        let fits = Self::row_config(extent, FORWARD_REGISTER_STEPS).register_steps > 0
            && Self::row_config(extent, BACKWARD_REGISTER_STEPS).register_steps > 0;
        fits.then_some(Self { op, rows, extent, is_rms: rms, eps, weight, bias, branch_dtype: None })
    }

    fn row_config(extent: usize, max_steps: usize) -> RowConfig {
        RowConfig::for_contiguous_rows(extent, extent.is_multiple_of(VEC4_WIDTH), max_steps)
    }

    fn spec(&self, config: RowConfig) -> KernelSpec {
        let name = |t: &Option<Tensor>| t.as_ref().map_or("", |t| t.dtype().name());
        kernel_spec! {
            "layer_norm", weight: name(&self.weight), bias: name(&self.bias), rms: self.is_rms,
            threads_per_row: config.threads_per_row, width: config.width, register_steps: config.register_steps,
        }
    }

    /// Returns the parameters of workgroups with rows `step` apart. `splits` of them share a group of rows.
    fn params(&self, step: usize, splits: usize, modulation: Option<Modulation<'_>>) -> KernelParams {
        let params = kernel_params! { rows: self.rows, extent: self.extent, step, eps: self.eps as f32 };
        let Some(Modulation { scale, shift }) = modulation else { return params };
        let place = |lines: &RowLines| (lines.tensor.layout().offset(), lines.stride);
        let (scale_offset, scale_stride) = place(scale);
        let (shift_offset, shift_stride) = shift.map_or((0, 0), place);
        kernel_params! {
            ..params;
            rows_per_group: scale.rows_per_group, splits, scale_offset, scale_stride, shift_offset, shift_stride,
            zero: 0u32,
        }
    }

    /// Computes the normalised x in type `result`, and the statistics. `added` is a residual and the sum's
    /// output.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        added: Option<(&Tensor, &Tensor)>,
        modulation: Option<Modulation<'_>>,
        result: DType,
    ) -> Result<(Tensor, Tensor)> {
        let out = Tensor::empty(x.shape(), result, x.device())?;
        let statistic_count = if self.is_rms { 1 } else { 2 };
        let statistics = Tensor::empty([statistic_count, self.rows], DType::F32, x.device())?;
        let (residual, sum) = added.unzip();
        if out.numel() == 0 {
            return Ok((out, statistics));
        }
        let config = Self::row_config(self.extent, FORWARD_REGISTER_STEPS);
        let name = launch::dtype_name_of;
        let scale = modulation.map(|m| &m.scale.tensor);
        let shift = modulation.and_then(|m| m.shift).map(|lines| &lines.tensor);
        let spec = kernel_spec! {
            ..self.spec(config); pass: "forward", x: x.dtype().name(), residual: name(residual), sum: name(sum),
            result: result.name(), copy: "", partial: 0usize, scale: name(scale), shift: name(shift),
        };
        let tensors = bindings![x, residual, &self.weight, &self.bias, scale, shift, &statistics, sum, &out];
        launch::launch(&spec, &tensors, self.params(0, 1, modulation), config.workgroups(self.rows))?;
        drop(tensors);
        Ok((out, statistics))
    }

    /// Launches the backward kernel. `extra_grad` is another gradient of x to add, and a flag that allows to
    /// overwrite its memory with the sum.
    pub(super) fn launch_backward(
        &self,
        g: &Tensor,
        kept: &SavedRows,
        statistics: &Tensor,
        extra_grad: Option<(Tensor, bool)>,
        form: &BackwardForm<'_>,
    ) -> Result<BackwardTensors> {
        let g = contiguous_zero_offset(g)?;
        let (extra_grad, inplace) =
            extra_grad.map_or((None, false), |(extra_grad, inplace)| (Some(extra_grad), inplace));
        let extra_grad =
            if inplace { extra_grad } else { extra_grad.map(|m| contiguous_zero_offset(&m)).transpose()? };
        let out = match &extra_grad {
            Some(extra_grad) if inplace => extra_grad.clone(),
            _ => Tensor::empty(g.shape(), kept.dtype(), g.device())?,
        };
        let config = Self::row_config(self.extent, BACKWARD_REGISTER_STEPS);
        let rows_at_once = WORKGROUP_SIZE / config.threads_per_row;
        // Workgroups of a group of rows, and of all.
        let (splits, groups) = match form.modulation {
            Some(Modulation { scale, .. }) => {
                let splits = config.grid_stride_splits(scale.rows_per_group, scale.count_groups(self.rows));
                (splits, splits * scale.count_groups(self.rows))
            }
            None if form.sections > 0 => (1, config.grid_stride_workgroups(self.rows)),
            None => (1, config.workgroups(self.rows)),
        };
        let partial = || empty_workspace(&[groups, form.sections, self.extent], DType::F32, g.device());
        let partial = (form.sections > 0).then(partial).transpose()?;
        let copy = form.copy.filter(|&dtype| dtype != out.dtype());
        let copy = copy.map(|dtype| Tensor::empty(g.shape(), dtype, g.device())).transpose()?;
        if out.numel() > 0 {
            let extra_grad = extra_grad.as_ref();
            let added = extra_grad.filter(|_| !inplace);
            let scale = form.modulation.map(|m| &m.scale.tensor);
            let others = bindings![&self.weight, scale, statistics, added, &out, &copy, &partial];
            let max_bindings = g.device().info().limits.max_bindings as usize;
            let (x, residual) = kept.kernel_operands(max_bindings - others.len() - 1)?;
            let name = launch::dtype_name_of;
            let spec = kernel_spec! {
                ..self.spec(config); pass: "backward", x: x.dtype().name(), residual: name(residual),
                g: g.dtype().name(), extra_grad: name(extra_grad), inplace, result: out.dtype().name(),
                copy: name(copy.as_ref()), partial: form.sections, scale: name(scale), shift: "",
            };
            let tensors = bindings![&g, &x, residual, &others[..]];
            let step = rows_at_once * if form.modulation.is_some() { splits } else { groups };
            let rows = form.modulation.map_or(self.rows, |m| m.scale.rows_per_group);
            // Each iteration sums over the threads of a row in two steps.
            let params = self.params(step, splits, form.modulation);
            let params = params.loop_iterations(33 * rows.div_ceil(step) + 64);
            launch::launch(&spec, &tensors, params, groups)?;
        }
        Ok(BackwardTensors { dx: out, copy, partial })
    }

    /// Computes the gradients of x, weight and bias. `extra_grad` is that of
    /// [`launch_backward`](Self::launch_backward). `branch_dtype` is the type of a copy of the gradient of x.
    fn backward(
        &self,
        g: &Tensor,
        kept: &SavedRows,
        statistics: &Tensor,
        extra_grad: Option<(Tensor, bool)>,
        branch_dtype: Option<DType>,
        needs_input_grad: &[bool],
    ) -> Result<InputGrads> {
        let sums = needs_input_grad[1..].contains(&true);
        // Column sums of g times the normalised x, of g, and for a residual branch of the gradient.
        let of_columns = self.branch_dtype.is_some() && g.shape().last() == Some(&self.extent);
        let sections = if !sums {
            0
        } else if of_columns {
            3
        } else {
            2
        };
        let copy = self.branch_dtype.or(branch_dtype).filter(|_| needs_input_grad[0]);
        let form = BackwardForm { sections, copy, modulation: None };
        let made = self.launch_backward(g, kept, statistics, extra_grad, &form)?;
        let mut summed = made.partial.as_ref().map(sum_parts).transpose()?.into_iter().flatten();
        let (weight_sums, bias_sums, result_sum) = (summed.next(), summed.next(), summed.next());
        drop(made.partial);
        let out = match (made.copy, result_sum) {
            (None, None) => made.dx,
            (Some(low), result_sum) => {
                made.dx.with_grad_extras(Some(low.with_grad_extras(None, result_sum)), None)
            }
            (None, result_sum) => made.dx.with_grad_extras(None, result_sum),
        };
        let sums =
            weight_sums.zip(bias_sums).map(|(weight_sums, bias_sums)| [Ok(weight_sums), Ok(bias_sums)]);
        with_parameter_grads(
            needs_input_grad[0].then_some(out),
            [&self.weight, &self.bias],
            sums,
            needs_input_grad,
        )
    }

    /// Normalises x and records the operation. `inputs` are x, and weight and bias if present.
    pub(crate) fn forward_with_grad(self, x: Tensor, result: DType, inputs: &[&Tensor]) -> Result<Tensor> {
        let (out, statistics) = self.forward(&x, None, None, result)?;
        Ok(self.attach_backward(out, SavedRows::Input(x), statistics, inputs))
    }

    fn attach_backward(self, out: Tensor, x: SavedRows, statistics: Tensor, inputs: &[&Tensor]) -> Tensor {
        if !autograd::compute_requires_grad(inputs) {
            return out;
        }
        let parameters = save_substitutes(&bindings![&self.weight, &self.bias], &inputs[1..]);
        let saved = std::iter::once(x.to_saved_tensor(inputs[0])).chain(parameters).collect();
        let shape = (self.rows, self.extent);
        let composed = row_norm_composite(shape, self.is_rms, self.eps, self.weight.is_some());
        let op = self.op;
        let record = Arc::new(RowNormRecord::new(self, x, statistics, &out));
        let source = Arc::downgrade(&record);
        let out = autograd::composite_differentiable(op, out, inputs, saved, composed, move |g, ctx| {
            let RowNormRecord { norm, x, .. } = &*record;
            // Also add into the gradient of a leaf, such as a checkpoint's input, so that a checkpoint's
            // gradients have the same bits.
            let of_leaf = || ctx.leaf_grad_to_accumulate(0).filter(|m| x.is_like(m)).map(|m| (m, true));
            let extra_grad = match ctx.needs_input_grad[0] {
                true => ctx.take_pending_grad(0)?.map(|grad| x.overwritable(grad)).or_else(of_leaf),
                false => None,
            };
            // Eager steps cast after the sums for weight and bias. With a copy before these sums, the pool of GPT-2 in
            // bf16 with accumulation called the driver in each step. `modulation` copies in eager steps, too.
            let captured = g.device().capture_recorder().is_recording_here();
            let branch = ctx.branch_dtype(0).filter(|_| captured);
            norm.backward(g, x, &record.statistics(), extra_grad, branch, &ctx.needs_input_grad)
        });
        autograd::set_result_source(&out, source);
        out
    }
}

/// Operations that consume the normalised result of a fused sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormConsumer {
    /// Any operation: the result may be the residual stream, which autocast keeps in f32.
    Any,
    /// Only matrix products, which would cast the result: under autocast it is written in 16 bits at once.
    MatmulOnly,
}

impl Tensor {
    #[track_caller]
    fn add_norm_impl(
        &self,
        kind: RowNormKind,
        residual: &Tensor,
        shape: &[usize],
        parameters: [Option<&Tensor>; 2],
        eps: Option<f64>,
        next: NormConsumer,
    ) -> Result<(Tensor, Tensor)> {
        let (op, rms) = (kind.op_name(true), kind == Rms);
        operation!(op);
        check::finite(op, "eps", eps.unwrap_or(0.0))?;
        let is_f64 = check_is_f64(op, self)? | check_is_f64(op, residual)?;
        self.check_same_device(op, residual)?;
        fail_if!(self.shape() != residual.shape();
            shape(op, [self, residual]), "x and the residual have one shape");
        fail_if!(shape.is_empty() || !self.shape().ends_with(shape);
            shape(op, &[self.shape(), shape]), "the input ends with the normalised shape");
        let dtype = self.dtype().promote(residual.dtype());
        let result = match next {
            Any if amp::is_autocast_enabled() && !rms => DType::F32,
            Any => dtype,
            MatmulOnly => amp::autocast_dtype().unwrap_or(dtype),
        };
        let eps = eps.unwrap_or_else(|| machine_epsilon(dtype));
        let extent: usize = shape.iter().product();
        let [weight, bias] = parameters;
        let norm = if is_f64 {
            None
        } else {
            let prepare = |t| prepare_parameter(op, t, self, shape);
            RowNorm::new(
                op,
                (self.numel() / extent.max(1), extent),
                rms,
                eps,
                [prepare(weight)?, prepare(bias)?],
            )
        };
        let Some(mut norm) = norm else {
            let sum = self.to_dtype(dtype)?.add(&residual.to_dtype(dtype)?)?;
            let normed = match rms {
                true => sum.rms_norm(shape, weight, Some(eps))?,
                false => sum.layer_norm(shape, &NormOptions { weight, bias, eps })?,
            };
            return Ok((sum, normed.to_dtype(result)?));
        };
        let sum = Tensor::empty(self.shape(), dtype, self.device())?;
        norm.branch_dtype = self.requires_grad().then(|| self.dtype());
        let types = [self.dtype(), residual.dtype()];
        let inputs = [self, residual];
        let (branch, residual) = (contiguous_zero_offset(self)?, contiguous_zero_offset(residual)?);
        let (normed, statistics) = norm.forward(&branch, Some((&residual, &sum)), None, result)?;
        let sum = autograd::differentiable(op, sum.clone(), &inputs, move |g, ctx| {
            let mut grads = InputGrads::new();
            for (&dtype, &needs_grad) in types.iter().zip(ctx.needs_input_grad.iter()) {
                // Take the low-precision copy even if no gradient is wanted, which frees it. It has no
                // history for `create_graph`.
                let low = g.take_low_precision(dtype).filter(|_| !ctx.create_graph());
                let grad = || low.map_or_else(|| g.to_dtype(dtype), Ok);
                grads.push(if needs_grad { Some(grad()?) } else { None });
            }
            Ok(grads)
        });
        let saved = SavedRows::from_sum(&sum, &branch, &residual);
        let normed = norm.attach_backward(normed, saved, statistics, &bindings![&sum, weight, bias]);
        Ok((sum, normed))
    }

    /// Adds the residual stream to a block's output, and normalises the sum over the trailing dimensions
    /// `normalized_shape`. Equivalent to `x.add(&residual)` and [`layer_norm`](Self::layer_norm), but in one
    /// pass over memory in each direction.
    ///
    /// The sum and the normalised result have the wider type of both inputs, and the computation is f32.
    /// Under [`autocast`](crate::amp::autocast) the normalised result is f32, as in `layer_norm`, because it
    /// may be the residual stream. If only products consume the result,
    /// `LayerNorm::forward_add_low_precision` writes it in
    /// 16 bits at once.
    ///
    /// The backward pass needs the sum. If `self` has 16 bits and another gradient saves the f32 residual
    /// anyway, the operation saves both inputs instead, which takes half the memory.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::NormOptions};
    /// # let device = Device::null(Default::default());
    /// let block = Tensor::ones(&[8, 16, 64], DType::BF16, &device)?;
    /// let residual = Tensor::ones(&[8, 16, 64], DType::F32, &device)?;
    /// let weight = Tensor::ones(&[64], DType::F32, &device)?;
    /// let options = NormOptions { weight: Some(&weight), ..Default::default() };
    /// let (sum, normed) = block.add_layer_norm(&residual, &[64], &options)?;
    /// assert_eq!((sum.dtype(), normed.shape()), (DType::F32, residual.shape()));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The shapes of both inputs differ or do not end with `normalized_shape`. Weight or bias has another
    /// shape. The dtype is not a float of 16 bits or more, or the device lacks f64.
    #[track_caller]
    pub fn add_layer_norm(
        &self,
        residual: &Tensor,
        normalized_shape: impl IntoShape,
        options: &NormOptions<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let &NormOptions { weight, bias, eps } = options;
        let shape = new_shape("add_layer_norm", normalized_shape)?;
        self.add_norm_impl(Layer, residual, &shape, [weight, bias], Some(eps), Any)
    }

    /// Adds a residual and normalises by [`rms_norm`](Self::rms_norm), fused as in
    /// [`add_layer_norm`](Self::add_layer_norm).
    #[track_caller]
    pub fn add_rms_norm(
        &self,
        residual: &Tensor,
        normalized_shape: impl IntoShape,
        weight: Option<&Tensor>,
        eps: Option<f64>,
    ) -> Result<(Tensor, Tensor)> {
        let shape = new_shape("add_rms_norm", normalized_shape)?;
        self.add_norm_impl(Rms, residual, &shape, [weight, None], eps, Any)
    }

    /// Computes [`add_layer_norm`](Self::add_layer_norm) for matmul-only consumers.
    #[track_caller]
    #[doc(hidden)]
    pub fn add_layer_norm_low_precision(
        &self,
        residual: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<(Tensor, Tensor)> {
        self.add_norm_impl(Layer, residual, weight.shape(), [Some(weight), bias], Some(eps), MatmulOnly)
    }

    /// Computes [`add_rms_norm`](Self::add_rms_norm) for matmul-only consumers.
    #[track_caller]
    #[doc(hidden)]
    pub fn add_rms_norm_low_precision(
        &self,
        residual: &Tensor,
        weight: &Tensor,
        eps: Option<f64>,
    ) -> Result<(Tensor, Tensor)> {
        self.add_norm_impl(Rms, residual, weight.shape(), [Some(weight), None], eps, MatmulOnly)
    }
}

/// Returns the machine epsilon of a float type, the default `eps` of RMS normalisation.
#[doc(hidden)]
pub fn machine_epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F64 => f64::EPSILON,
        _ => f64::from(f32::EPSILON),
    }
}

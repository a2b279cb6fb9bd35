//! Batch normalisation: each channel is normalised over all other dimensions.
//!
//! The forward pass reads the input once for the statistics, which are f32, and once for the result. The
//! backward pass reads the gradient and the input twice.

use crate::ops::norm::row_kernels::pack_width;
use crate::ops::norm::softmax::choose_threads_per_row;
use crate::ops::norm::{
    NormActivation, apply_weight_bias, channel_dims, check_is_f64, check_running_stats, f64_inputs,
    normalize_composite, prepare_parameter, save_substitutes, update_running_stat, with_parameter_grads,
};
use crate::ops::prelude::*;
use crate::runtime::device::KernelKey;

/// Largest number of a channel's elements in the registers of a thread, if it accesses several at once.
const MAX_REGISTER_ELEMENTS: usize = 32;
/// Largest number of a channel's accesses of which a thread keeps the elements.
const MAX_REGISTER_STEPS: usize = 8;
/// Largest number of parts of a channel whose moments the kernel for the result combines itself. It keeps the order of
/// [`BatchNormPass::Finish`], which uses one thread for so few parts.
const MAX_FINISHED_PARTS: usize = 8;
/// Largest number of parts of a channel whose sums the kernel for the gradient of x adds itself. It keeps the order of
/// [`Tensor::sum`], which uses one thread for so few parts.
const MAX_ADDED_PARTS: usize = 4;
/// Limit of the elements of x times the parts of a channel in both cases, since each thread adds the parts again.
const MAX_REPEATED_PARTS: usize = 1 << 24;
/// Most bindings of these kernels.
const MIN_FUSED_BINDINGS: u32 = 9;
/// Target number of workgroups for the sums of a gradient.
const TARGET_WORKGROUPS: usize = 1024;

/// Normalisation of one tensor, with the operands of all its kernels.
#[derive(Clone)]
struct BatchNormalization {
    op: &'static str,
    activation: NormActivation,
    /// Type of the result and its gradient. The gradient of x has the type of x.
    result: DType,
    eps: f64,
    channels: usize,
    /// Adjacent elements of a channel, and all its elements.
    run_length: usize,
    elements_per_channel: usize,
    /// All three are contiguous at offset 0 of their storages.
    x: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

/// Distribution of a channel's elements over threads and workgroups.
struct ChannelSplit {
    threads_per_row: usize,
    width: usize,
    register_steps: usize,
    splits: usize,
    chunk: usize,
}

/// Sums of a gradient over channels, for the gradient of x.
#[derive(Clone, Copy)]
struct ChannelSums<'a> {
    /// \[parts, 2, channels\], or \[2, channels\] for one part.
    values: &'a Tensor,
    parts: usize,
    /// Gradients of the parameters that the kernel copies.
    weight_grad: Option<&'a Tensor>,
    bias_grad: Option<&'a Tensor>,
}

/// Statistics that the kernel for the result computes from moments of parts, and what it updates.
struct UnfinishedStatistics<'a> {
    partial: &'a Tensor,
    split: ChannelSplit,
    running: Option<(&'a Tensor, &'a Tensor)>,
    momentum: f64,
    batches: Option<&'a Tensor>,
}

kernel_variants! {
    /// Pass of `batch_norm.wgsl`.
    enum BatchNormPass {
        /// Moments of the parts of channels.
        Moments = "moments",
        /// Statistics from the moments of the parts.
        Finish = "finish",
        /// The result.
        Forward = "forward",
        /// Sums of the gradient over channels.
        Sums = "sums",
        /// The gradient of the input.
        Backward = "backward",
    }
}

/// Operands of a kernel in addition to x, which decide its definitions.
struct KernelOperands<'a> {
    pass: BatchNormPass,
    /// Gradient of the result.
    g: Option<&'a Tensor>,
    out: Option<&'a Tensor>,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
}

impl BatchNormalization {
    /// Splits the channels. If `hold` is true, a part is as large as the registers of its threads.
    fn split_channels(&self, fits_registers: bool) -> ChannelSplit {
        let width = pack_width(false, &[self.run_length]);
        let max_register_steps = MAX_REGISTER_STEPS.min(MAX_REGISTER_ELEMENTS / width);
        let steps = self.elements_per_channel / width;
        let threads_per_row = choose_threads_per_row(steps, self.has_adjacent_channels());
        let register_steps =
            if fits_registers { steps.div_ceil(threads_per_row).min(max_register_steps) } else { 0 };
        let chunk = if fits_registers {
            threads_per_row * register_steps * width
        } else {
            let groups = self.channels.div_ceil(WORKGROUP_SIZE / threads_per_row);
            let splits =
                (TARGET_WORKGROUPS / groups).clamp(1, steps.div_ceil(threads_per_row * max_register_steps));
            steps.div_ceil(splits).next_multiple_of(threads_per_row) * width
        };
        let splits = self.elements_per_channel.div_ceil(chunk);
        ChannelSplit { threads_per_row, width, register_steps, splits, chunk }
    }

    /// Returns true if neighbours in memory belong to neighbouring channels.
    fn has_adjacent_channels(&self) -> bool {
        self.run_length == 1 && self.channels > 1
    }

    /// Runs a kernel over all parts of all channels.
    fn run_channel_reduction(
        &self,
        pass: BatchNormPass,
        g: Option<&Tensor>,
        statistics: Option<&Tensor>,
    ) -> Result<(Tensor, ChannelSplit)> {
        let parts = self.split_channels(pass == BatchNormPass::Moments);
        let partial = empty_workspace(&[parts.splits, 2, self.channels], DType::F32, self.x.device())?;
        let activated = self.activation != NormActivation::None && g.is_some();
        let [weight, bias] = [&self.weight, &self.bias].map(|t| t.as_ref().filter(|_| activated));
        let operands = KernelOperands { pass, g, out: None, weight, bias };
        let mut key = self.kernel_key(&operands);
        let ChannelSplit { threads_per_row, width, register_steps, .. } = parts;
        key.push_number(width as u64 | (register_steps as u64) << 16 | (threads_per_row as u64) << 32);
        key.push_flags(&[self.run_length == 1, self.has_adjacent_channels()]);
        let spec = || {
            kernel_spec! {
                ..self.spec(&operands); width, register_steps,
                single: self.run_length == 1, threads_per_row, across: self.has_adjacent_channels(),
            }
        };
        let tensors = bindings![g, &self.x, statistics, weight, bias, &partial];
        let groups = (self.channels * parts.splits).div_ceil(WORKGROUP_SIZE / parts.threads_per_row);
        let iterations = parts.chunk.div_ceil(parts.threads_per_row * parts.width) + 128;
        let params = self.params(parts.splits, parts.chunk, 0.0).loop_iterations(iterations);
        launch::launch_by_key(&key, spec, &tensors, params, groups)?;
        drop(tensors);
        Ok((partial, parts))
    }

    /// Computes the result, or the gradient of x from `g`. With `unfinished`, writes `statistics`.
    fn run_element_kernel(
        &self,
        g: Option<&Tensor>,
        statistics: &Tensor,
        sums: Option<ChannelSums<'_>>,
        unfinished: Option<&UnfinishedStatistics<'_>>,
    ) -> Result<Tensor> {
        let [weight_grad, bias_grad] = sums.map_or([None; 2], |sums| [sums.weight_grad, sums.bias_grad]);
        let dtype = if g.is_some() { self.x.dtype() } else { self.result };
        let out = Tensor::empty(self.x.shape(), dtype, self.x.device())?;
        let n = out.numel();
        let width = pack_width(false, &[n]);
        let pass = if g.is_some() { BatchNormPass::Backward } else { BatchNormPass::Forward };
        let weight = self.weight.as_ref();
        let bias = self.bias.as_ref().filter(|_| g.is_none() || self.activation != NormActivation::None);
        let operands = KernelOperands { pass, g, out: Some(&out), weight, bias };
        let (mean, var) = unfinished.and_then(|u| u.running).unzip();
        let batches = unfinished.and_then(|u| u.batches);
        let [mean_dtype, var_dtype] = [mean, var].map(launch::dtype_name_of);
        let flags = [
            self.run_length.is_multiple_of(width),
            sums.is_none(),
            weight_grad.is_some(),
            bias_grad.is_some(),
            unfinished.is_some(),
            batches.is_some(),
        ];
        let mut key = self.kernel_key(&operands);
        key.push_number(width as u64);
        key.push_flags(&flags);
        key.push_str(mean_dtype);
        key.push_str(var_dtype);
        let [same_channel, fixed, copies_sums, adds_parts, finishes, counts] = flags;
        let spec = || {
            kernel_spec! {
                ..self.spec(&operands); width, same_channel, fixed, copies_sums, adds_parts,
                finishes, mean: mean_dtype, var: var_dtype, counts,
            }
        };
        let finished = unfinished.map(|_| statistics);
        let read = unfinished.map_or(statistics, |u| u.partial);
        let sum_values = sums.map(|sums| sums.values);
        let tensors = bindings![
            g,
            &self.x,
            read,
            weight,
            bias,
            sum_values,
            &out,
            weight_grad,
            bias_grad,
            finished,
            mean,
            var,
            batches,
        ];
        let params = match (unfinished, sums) {
            (Some(u), _) => self.params(u.split.splits, u.split.chunk, u.momentum),
            (None, sums) => self.params(sums.map_or(1, |sums| sums.parts), self.elements_per_channel, 0.0),
        };
        launch::launch_by_key(&key, spec, &tensors, params, n.div_ceil(width * WORKGROUP_SIZE))?;
        drop(tensors);
        Ok(out)
    }

    /// Computes the f32 mean and reciprocal deviation [2, channels] and the result, without recording.
    fn forward(&self, options: &BatchNormOptions<'_>) -> Result<[Tensor; 2]> {
        let &BatchNormOptions { running, training, num_batches_tracked: batches, momentum, eps, .. } =
            options;
        let _no_grad = autograd::no_grad();
        let with_result = |statistics: Tensor| {
            let out = self.run_element_kernel(None, &statistics, None, None)?;
            Ok([statistics, out])
        };
        match running {
            // An empty batch has NaN statistics, as in PyTorch.
            _ if training && self.x.numel() == 0 => {
                count_batch(batches)?;
                with_result(Tensor::full([2, self.channels], f64::NAN, DType::F32, self.x.device())?)
            }
            // In a checkpoint's recomputation, the running statistics are already updated.
            _ if training && autograd::is_inside_recompute() => self.normalize_batch(None, momentum, None),
            _ if training => {
                // The kernel takes no offset.
                let fused_counter = batches.filter(|batches| batches.layout().offset() == 0);
                if fused_counter.is_none() {
                    count_batch(batches)?;
                }
                self.normalize_batch(running, momentum, fused_counter)
            }
            // The next batch changes the running statistics, so the graph saves a copy.
            Some((mean, var)) => {
                let flat = |t: &Tensor| t.detach().to_dtype(DType::F32)?.reshape([1, self.channels]);
                with_result(cat(&[&flat(mean)?, &flat(var)?.add(eps)?.rsqrt()?], 0)?)
            }
            None => Err(missing_statistics_error(self.op)),
        }
    }

    /// Computes the f32 mean and reciprocal deviation [2, channels] and the result. Updates running statistics, and
    /// increments `batches`.
    fn normalize_batch(
        &self,
        running: Option<(&Tensor, &Tensor)>,
        momentum: f64,
        batches: Option<&Tensor>,
    ) -> Result<[Tensor; 2]> {
        let (partial, split) = self.run_channel_reduction(BatchNormPass::Moments, None, None)?;
        let statistics = Tensor::empty([2, self.channels], DType::F32, self.x.device())?;
        if self.finishes_statistics(&split, running) {
            let unfinished = UnfinishedStatistics { partial: &partial, split, running, momentum, batches };
            let out = self.run_element_kernel(None, &statistics, None, Some(&unfinished))?;
            return Ok([statistics, out]);
        }
        self.finish_statistics(&partial, &split, &statistics, running, momentum, batches)?;
        let out = self.run_element_kernel(None, &statistics, None, None)?;
        Ok([statistics, out])
    }

    /// Reports whether the kernel for the result also computes the statistics. It finds running statistics without
    /// strides only.
    fn finishes_statistics(&self, split: &ChannelSplit, running: Option<(&Tensor, &Tensor)>) -> bool {
        let is_plain = |t: &Tensor| t.is_contiguous() && t.layout().offset() == 0;
        split.splits <= MAX_FINISHED_PARTS
            && self.combines_parts(split.splits)
            && running.is_none_or(|(mean, var)| is_plain(mean) && is_plain(var))
    }

    /// Reports whether the threads of an element kernel can combine the parts of a channel: a thread has elements of
    /// few channels, there is a thread for each channel, and the kernel may have enough bindings.
    fn combines_parts(&self, parts: usize) -> bool {
        self.run_length >= pack_width(false, &[self.x.numel()])
            && self.x.numel().saturating_mul(parts) <= MAX_REPEATED_PARTS
            && self.x.device().info().limits.max_bindings >= MIN_FUSED_BINDINGS
    }

    /// Computes `statistics` from the moments of the parts.
    fn finish_statistics(
        &self,
        partial: &Tensor,
        parts: &ChannelSplit,
        statistics: &Tensor,
        running: Option<(&Tensor, &Tensor)>,
        momentum: f64,
        batches: Option<&Tensor>,
    ) -> Result<()> {
        let dense_running = running
            .map(|(mean, var)| Ok::<_, Error>((contiguous_zero_offset(mean)?, contiguous_zero_offset(var)?)))
            .transpose()?;
        let most = if parts.splits < 1 << 15 { 32 } else { WORKGROUP_SIZE };
        let threads_per_row = choose_threads_per_row(parts.splits, false).min(most);
        let (mean, var) = dense_running.as_ref().map(|(mean, var)| (mean, var)).unzip();
        let spec = kernel_spec! {
            "batch_norm", pass: BatchNormPass::Finish, activation: "", mean: launch::dtype_name_of(mean),
            var: launch::dtype_name_of(var), counts: batches.is_some(), threads_per_row, f32_division: false,
        };
        let tensors = bindings![partial, statistics, mean, var, batches];
        let params = self.params(parts.splits, parts.chunk, momentum);
        let params = params.loop_iterations(2 * parts.splits.div_ceil(threads_per_row) + 128);
        launch::launch(&spec, &tensors, params, self.channels.div_ceil(WORKGROUP_SIZE / threads_per_row))?;
        drop(tensors);
        if let (Some((mean, var)), Some(dense_running)) = (running, dense_running) {
            // Non-contiguous running statistics were copied; copy the result back.
            for (running, updated) in [(mean, dense_running.0), (var, dense_running.1)] {
                if !(running.is_contiguous() && running.layout().offset() == 0) {
                    running.copy_(&updated)?;
                }
            }
        }
        Ok(())
    }

    fn backward(
        &self,
        g: &Tensor,
        statistics: &Tensor,
        needs_input_grad: &[bool],
        training: bool,
    ) -> Result<InputGrads> {
        let (g, parameters) = (contiguous_zero_offset(g)?, [&self.weight, &self.bias]);
        let vector = || Tensor::empty([self.channels], DType::F32, g.device());
        let sums = if needs_input_grad[1..].contains(&true) || (training && needs_input_grad[0]) {
            Some(match self.x.numel() {
                0 => Tensor::zeros([2, self.channels], DType::F32, g.device())?,
                _ => {
                    let (values, ChannelSplit { splits: parts, .. }) =
                        self.run_channel_reduction(BatchNormPass::Sums, Some(&g), Some(statistics))?;
                    if training && needs_input_grad[0] && self.adds_parts(parts, needs_input_grad) {
                        let grads = [vector()?, vector()?];
                        let [weight_grad, bias_grad] = grads.each_ref().map(Some);
                        let sums = ChannelSums { values: &values, parts, weight_grad, bias_grad };
                        let dx = self.run_element_kernel(Some(&g), statistics, Some(sums), None)?;
                        let grads = Some(grads.map(Ok));
                        return with_parameter_grads(Some(dx), parameters, grads, needs_input_grad);
                    }
                    values.sum([0], false)?
                }
            })
        } else {
            None
        };
        let used_sums = sums.as_ref().filter(|_| training && needs_input_grad[0]);
        // A leaf keeps no part of another tensor. So one parameter gets a tensor of its own, and the other the sums.
        let copies = used_sums.is_some() && self.copies_sums(needs_input_grad);
        let weight_grad = copies.then(vector).transpose()?;
        let used_sums = used_sums.map(|values| ChannelSums {
            values,
            parts: 1,
            weight_grad: weight_grad.as_ref(),
            bias_grad: None,
        });
        let dx = || self.run_element_kernel(Some(&g), statistics, used_sums, None);
        let dx = needs_input_grad[0].then(dx).transpose()?;
        let sums =
            sums.as_ref().map(|sums| [weight_grad.map_or_else(|| sums.select(0, 0), Ok), sums.select(0, 1)]);
        with_parameter_grads(dx, parameters, sums, needs_input_grad)
    }

    /// Reports whether the kernel for the gradient of x also copies the gradient of the weight. Both parameters must
    /// want a gradient of f32, and the kernel must have a thread for each channel.
    fn copies_sums(&self, needs_input_grad: &[bool]) -> bool {
        let is_f32 = |t: &Option<Tensor>| t.as_ref().is_some_and(|t| t.dtype() == DType::F32);
        is_f32(&self.weight)
            && is_f32(&self.bias)
            && needs_input_grad[1..] == [true, true]
            && self.elements_per_channel >= pack_width(false, &[self.x.numel()])
            && self.x.device().info().limits.max_bindings >= 8
    }

    /// Reports whether the kernel for the gradient of x also adds the parts of the sums, and copies both gradients of
    /// the parameters.
    fn adds_parts(&self, parts: usize, needs_input_grad: &[bool]) -> bool {
        parts <= MAX_ADDED_PARTS && self.copies_sums(needs_input_grad) && self.combines_parts(parts)
    }

    fn spec(&self, operands: &KernelOperands<'_>) -> KernelSpec {
        let [x, g, result, weight, bias] = self.dtype_names(operands);
        let pass = operands.pass;
        kernel_spec! {
            "batch_norm", pass, x, g, result, weight, bias, activation: self.activation_of(pass),
            f32_division: self.has_f32_division(),
        }
    }

    /// Returns the key of the definitions of [`spec`](Self::spec).
    fn kernel_key(&self, operands: &KernelOperands<'_>) -> KernelKey {
        let mut key = KernelKey::new("batch_norm");
        key.push_str(operands.pass.word());
        key.push_str(self.activation_of(operands.pass).word());
        self.dtype_names(operands).into_iter().for_each(|name| key.push_str(name));
        key.push_flags(&[self.has_f32_division()]);
        key
    }

    /// Returns the types of x, the gradient, the result, the weight and the bias, empty without the tensor.
    fn dtype_names(&self, operands: &KernelOperands<'_>) -> [&'static str; 5] {
        let &KernelOperands { g, out, weight, bias, .. } = operands;
        [Some(&self.x), g, out, weight, bias].map(launch::dtype_name_of)
    }

    fn activation_of(&self, pass: BatchNormPass) -> NormActivation {
        if pass == BatchNormPass::Moments { NormActivation::None } else { self.activation }
    }

    /// Reports whether quotients fit the precision of f32. Elements are divided by the run length first, so quotients
    /// count planes.
    fn has_f32_division(&self) -> bool {
        let planes = self.x.numel() / self.run_length.max(1);
        planes < 1 << 20 && self.x.numel() < 1 << 31
    }

    fn params(&self, splits: usize, chunk: usize, momentum: f64) -> KernelParams {
        let Self { channels, run_length: run, elements_per_channel: extent, .. } = *self;
        kernel_params! {
            n: self.x.numel(), channels, run, extent, splits, chunk, eps: self.eps as f32,
            momentum: momentum as f32,
        }
    }
}

fn count_batch(batches: Option<&Tensor>) -> Result<()> {
    batches.map_or(Ok(()), |batches| autograd::update_state(|| batches.add_(1)))
}

fn missing_statistics_error(op: &'static str) -> Error {
    Error::argument(
        op,
        "takes running statistics, or makes them from the batch in training; there is neither",
    )
}

with_defaults! {
    /// Options of [`Tensor::batch_norm`].
    #[derive(Clone, Copy, Debug)]
    pub struct BatchNormOptions<'a> {
        /// Running mean and variance, \[channels\] each; `None`.
        pub running: Option<(&'a Tensor, &'a Tensor)> = None,
        /// Factor of each channel; `None` for 1.
        pub weight: Option<&'a Tensor> = None,
        /// Summand of each channel; `None` for 0.
        pub bias: Option<&'a Tensor> = None,
        /// If true, uses the statistics of the batch; false.
        pub training: bool = false,
        /// Number of batches, one element of i32, which training increments; `None`.
        pub num_batches_tracked: Option<&'a Tensor> = None,
        /// Share of the batch in new running statistics; 0.1.
        pub momentum: f64 = 0.1,
        /// Term added to variances; 1e-5.
        pub eps: f64 = 1e-5,
    }
}

/// Fails for a counter of batches that is not a single i32 on the device of `x`.
fn check_batch_counter(op: &'static str, x: &Tensor, batches: &Tensor) -> Result<()> {
    x.check_same_device(op, batches)?;
    fail_if!(batches.numel() != 1; shape(op, [batches]), "the number of batches has one element");
    fail_if!(batches.dtype() != DType::I32;
        dtype(op, batches.dtype()), "the number of batches is i32; cast it with `to_dtype`");
    Ok(())
}

/// Normalises f64 `x` \[batch, channels, run\] by tensor operations, and updates the running statistics in training.
fn normalize_f64(op: &'static str, x: &Tensor, options: &BatchNormOptions<'_>) -> Result<Tensor> {
    let &BatchNormOptions { running, training, momentum, eps, .. } = options;
    match (training, running) {
        (true, running) => {
            if let Some((mean, var)) = running.filter(|_| x.numel() > 0) {
                autograd::update_state(|| {
                    let (v, m) = x.detach().var_mean([0, 2], 1.0, false)?;
                    update_running_stat(mean, &m, momentum)?;
                    update_running_stat(var, &v, momentum)
                })?;
            }
            normalize_composite(x, &[0, 2], false, eps)
        }
        (false, Some((mean, var))) => {
            let [mean, var] =
                [mean, var].map(|t| t.detach().copy()?.to_dtype(DType::F64)?.reshape([x.shape()[1], 1]));
            x.sub(&mean?)?.mul(&var?.add(eps)?.rsqrt()?)
        }
        (false, None) => Err(missing_statistics_error(op)),
    }
}

impl Tensor {
    /// Normalises each channel of \[batch, channels, ...\] over all other dimensions. In training it uses the
    /// mean and variance of the batch, and updates the running mean and (unbiased) variance in place.
    /// Otherwise it uses the running statistics.
    ///
    /// # Errors
    /// A channel has only one element in training, or there are no running statistics outside of training.
    /// See also [`layer_norm`](Self::layer_norm).
    #[track_caller]
    pub fn batch_norm(&self, options: &BatchNormOptions<'_>) -> Result<Tensor> {
        self.batch_norm_impl("batch_norm", NormActivation::None, options)
    }

    /// Computes [`batch_norm`](Self::batch_norm) followed by [`relu`](Self::relu), fused in both directions.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::BatchNormOptions};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[8, 16, 4, 4], DType::F32, &device)?;
    /// let options = BatchNormOptions { training: true, ..Default::default() };
    /// assert_eq!(x.batch_norm_relu(&options)?.shape(), x.shape());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[track_caller]
    pub fn batch_norm_relu(&self, options: &BatchNormOptions<'_>) -> Result<Tensor> {
        self.batch_norm_impl("batch_norm_relu", NormActivation::Relu, options)
    }

    /// Computes [`batch_norm`](Self::batch_norm) followed by [`silu`](Self::silu), fused in both directions. The
    /// graph keeps the input and the statistics, but neither the normalised result nor SiLU's.
    ///
    /// Under [`autocast`](crate::amp::autocast), the result has the scope's 16-bit dtype, as that of
    /// [`group_norm_silu`](Self::group_norm_silu). Otherwise it has the dtype of the input.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::BatchNormOptions};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[8, 16, 4, 4], DType::F32, &device)?;
    /// let options = BatchNormOptions { training: true, ..Default::default() };
    /// assert_eq!(x.batch_norm_silu(&options)?.shape(), x.shape());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[track_caller]
    pub fn batch_norm_silu(&self, options: &BatchNormOptions<'_>) -> Result<Tensor> {
        self.batch_norm_impl("batch_norm_silu", NormActivation::Silu, options)
    }

    #[track_caller]
    fn batch_norm_impl(
        &self,
        op: &'static str,
        activation: NormActivation,
        options: &BatchNormOptions<'_>,
    ) -> Result<Tensor> {
        let &BatchNormOptions { running, weight, bias, training, num_batches_tracked, momentum, eps } =
            options;
        operation!(op);
        if let Some(batches) = num_batches_tracked.filter(|_| training) {
            check_batch_counter(op, self, batches)?;
        }
        check::finite(op, "momentum", momentum)?;
        check::finite(op, "eps", eps)?;
        let double = check_is_f64(op, self)?;
        let (batch, n, run) = if let [n] = self.shape() { (1, *n, 1) } else { channel_dims(op, self)? };
        if let Some(running) = running {
            check_running_stats(op, self, running, n)?;
        }
        let extent = batch * run;
        fail_if!(training && extent == 1 && n > 0;
            shape(op, [self]), "training needs more than one element for each channel");
        let has_weight = weight.is_some();
        let finish = move |x: &Tensor, t: &[Tensor]| {
            activation.apply(apply_weight_bias(x, &t[1..], has_weight, &[n, 1])?.reshape(t[0].shape())?)
        };
        if double {
            let x = normalize_f64(op, &self.reshape([batch, n, run])?, options)?;
            if training {
                count_batch(num_batches_tracked)?;
            }
            return finish(&x, &f64_inputs(op, self, [weight, bias], &[n])?);
        }
        let norm = BatchNormalization {
            op,
            activation,
            result: activation.result_dtype(self.dtype()),
            eps,
            channels: n,
            run_length: run,
            elements_per_channel: extent,
            x: contiguous_zero_offset(self)?,
            weight: prepare_parameter(op, weight, self, &[n])?,
            bias: prepare_parameter(op, bias, self, &[n])?,
        };
        let [statistics, out] = norm.forward(options)?;
        let inputs = bindings![self, weight, bias];
        let saved = save_substitutes(&bindings![&norm.x, &norm.weight, &norm.bias], &inputs);
        let saved_statistics = statistics.clone();
        let composed = move |t: &[Tensor]| {
            let x = t[0].reshape([batch, n, run])?;
            let x = if training {
                normalize_composite(&x, &[0, 2], false, eps)?
            } else {
                let [mean, rstd] = [0, 1].map(|k| saved_statistics.select(0, k)?.reshape([n, 1]));
                x.to_dtype(DType::F32)?.sub(&mean?)?.mul(&rstd?)?
            };
            finish(&x, t)
        };
        Ok(autograd::composite_differentiable(norm.op, out, &inputs, saved, composed, move |g, ctx| {
            norm.backward(g, &statistics, &ctx.needs_input_grad, training)
        }))
    }
}

//! Kernels of layer, RMS, group and instance normalisation of rows of any length.
//!
//! Input, result and gradient have types of their own, so that autocast copies nothing. An activation is part of
//! the kernels in both directions: the backward pass computes its input again from x and the statistics.

use crate::ops::kernel::heuristics::{MAX_LOOP_ITERATIONS, split_reduction};
use crate::ops::norm::softmax::choose_threads_per_row;
use crate::ops::norm::{NormActivation, save_substitutes, with_parameter_grads};
use crate::ops::prelude::*;

/// Mapping of elements to rows and weights: parameters of `norm.wgsl` and `norm_weight_grad.wgsl`.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormGeometry {
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
    pub(super) fn for_layer_norm(rows: usize, extent: usize) -> Self {
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
    pub(super) fn for_group_norm(batch: usize, channels: usize, space: usize, groups: usize) -> Self {
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

/// Statistics of the rows. RMS has no mean.
#[derive(Clone)]
struct NormStatistics {
    mean: Option<Tensor>,
    rstd: Tensor,
}

/// Row length from which several workgroups share a row, if there are few rows.
const SPLIT_ROW_MIN: usize = 1 << 16;
/// Elements in a widest access of a thread: 16 bytes of a 16-bit type.
const MAX_PACK_WIDTH: usize = 8;
/// Packs of a thread in the kernel that computes gradients from complete sums.
const APPLY_PACKS: usize = 8;
/// Workgroups that keep a large device busy although each has long runs.
const TARGET_WORKGROUPS: usize = 1024;

/// Returns the number of parts of a long reduction and the elements of a part. Parts run in parallel.
fn split_weight_reduction(outputs: usize, extent: usize, threads_per_row: usize) -> (usize, usize) {
    let groups = outputs.div_ceil(WORKGROUP_SIZE / threads_per_row);
    let splits = (512 / groups).clamp(1, extent.div_ceil(threads_per_row * 16).max(1));
    let chunk = extent.div_ceil(splits).next_multiple_of(MAX_PACK_WIDTH * threads_per_row);
    (extent.div_ceil(chunk).max(1), chunk)
}

/// Returns the number of neighbouring elements that a thread accesses at once, for rows of these strides. The
/// width is independent of the type, so that an input and its cast to f32 are added in one order.
pub(super) fn pack_width(across: bool, strides: &[usize]) -> usize {
    let fits = |width: &usize| strides.iter().all(|n| n.is_multiple_of(*width));
    if across { 1 } else { [MAX_PACK_WIDTH, VEC4_WIDTH].into_iter().find(fits).unwrap_or(1) }
}

kernel_variants! {
    /// Step of `norm.wgsl`.
    enum NormStep {
        /// Statistics and result of whole rows.
        Whole = "whole",
        /// Sums of the parts of rows.
        Parts = "parts",
        /// Statistics from the sums of the parts.
        Finish = "finish",
        /// Result of parts of rows, from the statistics.
        Apply = "apply",
    }
}

/// Distribution of rows over threads and workgroups.
#[derive(Clone, Copy)]
struct NormStage {
    threads_per_row: usize,
    across: bool,
    width: usize,
    /// Number of parts of a row, and elements of a part.
    splits_and_chunk: (usize, usize),
    /// Bound of a thread's loop iterations.
    iterations: usize,
}

#[derive(Clone, Copy)]
enum StageSums<'a> {
    None,
    /// Sums of each row [2, rows], or of the parts of rows in [`NormStep::Finish`].
    Rows(&'a Tensor),
    /// Sums of each channel [batch, 2, channels].
    Channels(&'a Tensor),
}

/// Normalisation of one tensor, with the operands of all its kernels.
#[derive(Clone)]
pub(super) struct Normalization {
    pub(super) op: &'static str,
    pub(super) geometry: NormGeometry,
    pub(super) rms: bool,
    pub(super) eps: f64,
    pub(super) activation: NormActivation,
    /// Type of the result and its gradient. The gradient of x has the type of x.
    pub(super) result: DType,
    /// All three are contiguous at offset 0 of their storages.
    pub(super) x: Tensor,
    pub(super) weight: Option<Tensor>,
    pub(super) bias: Option<Tensor>,
}

impl Normalization {
    /// Returns the distribution of whole rows.
    fn row_stage(&self) -> NormStage {
        let at = self.geometry;
        let across = at.run_length == 1 && at.rows > 1;
        let threads_per_row = choose_threads_per_row(at.extent, across);
        let width = pack_width(across, &[at.run_length, at.run_stride, at.row_stride]);
        // Two or three loops over the row, and the loops of sums over its threads.
        let iterations = 3 * at.extent.div_ceil(threads_per_row * width) + 128;
        NormStage { threads_per_row, across, width, splits_and_chunk: (1, at.extent), iterations }
    }

    /// Runs the elementwise kernel: forward, or backward with the gradient `g`.
    fn run_element_kernel(&self, g: Option<&Tensor>, statistics: &NormStatistics) -> Result<Tensor> {
        let Self { geometry: at, x, .. } = self;
        let dtype = if g.is_some() { x.dtype() } else { self.result };
        let out = Tensor::empty(x.shape(), dtype, x.device())?;
        if out.numel() == 0 {
            return Ok(out);
        }
        let stage = self.row_stage();
        let NormStage { threads_per_row, width, .. } = stage;
        let (splits, chunk) = split_reduction(at.rows, at.extent, threads_per_row, 3);
        if at.extent < SPLIT_ROW_MIN || splits == 1 {
            self.launch_stage(NormStep::Whole, stage, g, Some(statistics), StageSums::None, &out)?;
            return Ok(out);
        }
        let iterations = 2 * chunk.div_ceil(threads_per_row * width) + 128;
        let stage = NormStage { splits_and_chunk: (splits, chunk), iterations, ..stage };
        let partial = empty_workspace(&[splits, 2, at.rows], DType::F32, x.device())?;
        self.launch_stage(NormStep::Parts, stage, g, g.map(|_| statistics), StageSums::None, &partial)?;
        let sums = match g {
            Some(_) => Some(partial.sum([0], false)?),
            None => {
                let iterations = 2 * splits.div_ceil(WORKGROUP_SIZE) + 128;
                let whole_group = NormStage {
                    threads_per_row: WORKGROUP_SIZE,
                    across: false,
                    width: 1,
                    iterations,
                    ..stage
                };
                let (statistics, parts) = (Some(statistics), StageSums::Rows(&partial));
                self.launch_stage(NormStep::Finish, whole_group, None, statistics, parts, &out)?;
                None
            }
        };
        let sums = sums.as_ref().map_or(StageSums::None, StageSums::Rows);
        self.launch_stage(NormStep::Apply, stage, g, Some(statistics), sums, &out)?;
        Ok(out)
    }

    /// Computes the gradient of x from the sums [batch, 2, channels] of all channels.
    fn apply_channel_sums(&self, g: &Tensor, statistics: &NormStatistics, sums: &Tensor) -> Result<Tensor> {
        let Self { geometry: at, x, .. } = self;
        let out = Tensor::empty(x.shape(), x.dtype(), x.device())?;
        let stage = self.row_stage();
        let chunk = APPLY_PACKS * stage.threads_per_row * stage.width;
        let iterations = APPLY_PACKS + at.weight_strides[0].div_ceil(stage.threads_per_row) + 128;
        let stage = NormStage { splits_and_chunk: (at.extent.div_ceil(chunk), chunk), iterations, ..stage };
        let (statistics, sums) = (Some(statistics), StageSums::Channels(sums));
        self.launch_stage(NormStep::Apply, stage, Some(g), statistics, sums, &out)?;
        Ok(out)
    }

    /// Launches one step of `norm.wgsl`. [`NormStep::Finish`] has no `out`.
    fn launch_stage(
        &self,
        step: NormStep,
        stage: NormStage,
        g: Option<&Tensor>,
        statistics: Option<&NormStatistics>,
        sums: StageSums<'_>,
        out: &Tensor,
    ) -> Result<()> {
        let Self { geometry: at, x, .. } = self;
        let NormStage { threads_per_row, across, width, splits_and_chunk: (splits, chunk), iterations } =
            stage;
        let finish = step == NormStep::Finish;
        let applies = matches!(step, NormStep::Whole | NormStep::Apply);
        // Pass only the tensors that the stage reads: statistics need no weights.
        let activation = if applies || g.is_some() { self.activation } else { NormActivation::None };
        let weight = self.weight.as_ref().filter(|_| g.is_some() || applies);
        let has_bias = if g.is_some() { activation != NormActivation::None } else { applies };
        let bias = self.bias.as_ref().filter(|_| has_bias);
        let (sums, channel_sums) = match sums {
            StageSums::None => (None, false),
            StageSums::Rows(sums) => (Some(sums), false),
            StageSums::Channels(sums) => (Some(sums), true),
        };
        let spec = kernel_spec! {
            "norm", stage: step, pass: if g.is_some() { "backward" } else { "forward" },
            x: launch::dtype_name_of(Some(x).filter(|_| !finish)), g: launch::dtype_name_of(g),
            result: launch::dtype_name_of(Some(out).filter(|_| applies)),
            weight: launch::dtype_name_of(weight), bias: launch::dtype_name_of(bias),
            activation, rms: self.rms,
            contiguous: at.run_length >= at.extent || at.run_stride == at.run_length,
            flat: at.run_length >= at.extent, one_weight: at.weight_strides[2] == 0, channel_sums,
            threads_per_row, across, width,
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
            true => bindings![sums, mean, rstd],
            false => bindings![g, x, weight, bias, mean, rstd, sums, out],
        };
        let rows = if finish { at.rows } else { at.rows * splits };
        launch::launch(&spec, &tensors, params, rows.div_ceil(WORKGROUP_SIZE / threads_per_row))
    }

    /// Returns the threads of a run, if the sums of each channel of each batch entry give all gradients. The
    /// backward pass then reads its inputs twice instead of three times.
    fn channel_run_threads(&self) -> Option<usize> {
        let at = self.geometry;
        let run = at.weight_run_length;
        let is_group_norm = at.weight_strides[2] == 0 && at.run_stride == at.run_length;
        if self.rms || run == 1 || !is_group_norm || (self.weight.is_none() && self.bias.is_none()) {
            return None;
        }
        let threads_per_row = choose_threads_per_row(run, false);
        // Long runs of few channels would leave most of the device idle.
        let groups = (self.x.numel() / run.max(1)).div_ceil(WORKGROUP_SIZE / threads_per_row);
        let is_busy = run < SPLIT_ROW_MIN || groups >= TARGET_WORKGROUPS;
        (is_busy && run.div_ceil(threads_per_row) <= MAX_LOOP_ITERATIONS).then_some(threads_per_row)
    }

    /// Sums, over parts of the elements of each weight, g times the normalised x, and g: f32 [parts, 2, weights].
    /// With `run_threads`, a part is the run of one batch entry.
    fn sum_weight_parts(
        &self,
        g: &Tensor,
        statistics: &NormStatistics,
        run_threads: Option<usize>,
    ) -> Result<Tensor> {
        let Self { geometry: at, x, .. } = self;
        let across = at.weight_run_length == 1 && at.weights > 1;
        let width = pack_width(across, &[at.weight_run_length, at.weight_run_stride, at.weight_stride]);
        let (threads_per_row, (splits, chunk)) = match run_threads {
            Some(threads) => {
                let run = at.weight_run_length;
                (threads, (at.elements_per_weight / run, run))
            }
            None => {
                let threads = choose_threads_per_row(at.elements_per_weight, across);
                (threads, split_weight_reduction(at.weights, at.elements_per_weight, threads))
            }
        };
        let partial = empty_workspace(&[splits, 2, at.weights], DType::F32, x.device())?;
        let activated = self.activation != NormActivation::None;
        let [weight, bias] = [&self.weight, &self.bias].map(|t| t.as_ref().filter(|_| activated));
        let spec = kernel_spec! {
            "norm_weight_grad", x: launch::dtype_name_of(Some(x)), g: launch::dtype_name_of(Some(g)),
            weight: launch::dtype_name_of(weight), bias: launch::dtype_name_of(bias),
            activation: self.activation, rms: self.rms, single: at.weight_run_length == 1,
            one_run: run_threads.is_some(), threads_per_row, across, width,
        };
        let [row_step, row_weights, row_inner] = at.row_strides;
        let params = kernel_params! {
            weights: at.weights, extent: at.elements_per_weight, run: at.weight_run_length,
            step: at.weight_run_stride, weight_stride: at.weight_stride, row_step, row_weights, row_inner,
            splits, chunk,
        }
        .loop_iterations(chunk.div_ceil(threads_per_row * width) + 128);
        let tensors = bindings![g, x, weight, bias, &statistics.mean, &statistics.rstd, &partial];
        let groups = (at.weights * splits).div_ceil(WORKGROUP_SIZE / threads_per_row);
        launch::launch(&spec, &tensors, params, groups)?;
        drop(tensors);
        Ok(partial)
    }

    /// Computes the gradients of the input, and of weight and bias if present.
    fn backward(
        &self,
        g: &Tensor,
        statistics: &NormStatistics,
        needs_input_grad: &[bool],
    ) -> Result<InputGrads> {
        let g = contiguous_zero_offset(g)?;
        let needs_sums = needs_input_grad[1..].contains(&true);
        let (dx, sums) = if self.x.numel() == 0 {
            let sums = || Tensor::zeros([2, self.geometry.weights], DType::F32, g.device());
            let dx = || self.run_element_kernel(Some(&g), statistics);
            (needs_input_grad[0].then(dx).transpose()?, needs_sums.then(sums).transpose()?)
        } else {
            // Neither the choice nor the bits of a gradient depend on the other gradients that are needed.
            let run_threads = self.channel_run_threads();
            let parts = (needs_sums || run_threads.is_some())
                .then(|| self.sum_weight_parts(&g, statistics, run_threads))
                .transpose()?;
            let dx = || match &parts {
                Some(parts) if run_threads.is_some() => self.apply_channel_sums(&g, statistics, parts),
                _ => self.run_element_kernel(Some(&g), statistics),
            };
            let dx = needs_input_grad[0].then(dx).transpose()?;
            let sums = parts.filter(|_| needs_sums).map(|parts| parts.sum([0], false)).transpose()?;
            (dx, sums)
        };
        let sums = sums.map(|sums| [sums.select(0, 0), sums.select(0, 1)]);
        with_parameter_grads(dx, [&self.weight, &self.bias], sums, needs_input_grad)
    }

    /// Normalises with new statistics and records the operation. `composed` is the differentiable version.
    pub(super) fn forward_with_grad(
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
        Ok(autograd::composite_differentiable(self.op, out, &inputs, saved, composed, move |g, ctx| {
            self.backward(g, &statistics, &ctx.needs_input_grad)
        }))
    }
}

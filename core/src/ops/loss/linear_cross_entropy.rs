//! Last layer of a language model and its loss as one operation, in chunks of rows. The logits of all
//! examples are never in memory at once, and their gradient overwrites them.

use std::sync::Mutex;

use crate::ops::loss::Reduction;
use crate::ops::loss::cross_entropy::{
    CrossEntropyOptions, CrossEntropyPass, LogitsBatch, check_targets, narrow_class_targets,
    target_dtype_name,
};
use crate::ops::matmul;
use crate::ops::norm::{check_is_f64, norm_compute_dtype};
use crate::ops::prelude::*;
use crate::sync::LockUnpoisoned;

const OP: &str = "linear_cross_entropy";

/// Returns the bytes of a chunk's logits: enough rows to fill a device, but small compared with a model.
/// Software devices use a chunk that fits the CPU's caches.
fn chunk_bytes(device: &Device) -> usize {
    if device.info().software { 1 << 20 } else { 288 << 20 }
}

/// Row granularity of the vendor's products.
const GEMM_TILE_ROWS: usize = 128;

/// Returns the rows of a chunk, for `n` rows of which `fit` fit. Chunks are few, even, and whole tiles.
fn chunk_rows(n: usize, fit: usize) -> usize {
    let fit = if fit > GEMM_TILE_ROWS { fit / GEMM_TILE_ROWS * GEMM_TILE_ROWS } else { fit.max(1) };
    let even_chunk = n.div_ceil(n.div_ceil(fit).max(1));
    even_chunk.next_multiple_of(GEMM_TILE_ROWS).min(fit).min(n).max(1)
}

/// Alignment of a row of logits in elements, for the vendor's products.
const ROW_ALIGNMENT: usize = 64;

/// Multiplies x in place by a scale in device memory.
fn scale_in_place(x: &Tensor, scale: &Tensor) -> Result<()> {
    let width = if x.numel().is_multiple_of(VEC4_WIDTH) { VEC4_WIDTH } else { 1 };
    let steps = x.numel() / width;
    const STEPS_PER_THREAD: usize = 8;
    let spec =
        kernel_spec! { "scale_inplace", dtype: x.dtype().name(), width, steps_per_thread: STEPS_PER_THREAD };
    let groups = steps.div_ceil(WORKGROUP_SIZE * STEPS_PER_THREAD);
    launch::launch(&spec, &[scale, x], kernel_params! { steps }, groups)
}

/// Returns the divisor of the losses as a tensor on the device: 1 for their sum.
fn loss_divisor(
    target: &Tensor,
    classes: usize,
    batch: usize,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    let device = target.device();
    match options.reduction {
        // `check_operands` refuses losses without a reduction.
        Reduction::None | Reduction::Sum => Tensor::ones((), DType::F32, device),
        Reduction::BatchMean => Tensor::full((), batch as f64, DType::F32, device),
        Reduction::Mean => {
            let weights = Tensor::empty([target.numel()], DType::F32, device)?;
            let weight = options.weight.map(contiguous_zero_offset).transpose()?;
            let name = |t: &Tensor| launch::shader_dtype_name(t.dtype(), t.device());
            let spec = kernel_spec! {
                "class_weights", targets: target_dtype_name(target), weight: weight.as_ref().map_or("", name),
            };
            let params = kernel_params! {
                n: target.numel(), classes, ignore_class: select::ignore_index_to_i32(options.ignore_index),
            };
            let tensors = bindings![target, &weight, &weights];
            launch::launch(&spec, &tensors, params, target.numel().div_ceil(WORKGROUP_SIZE))?;
            weights.sum_all()
        }
    }
}

/// Rows of x, the weight in x's type, and the classes of the rows.
struct LinearCrossEntropy<'a> {
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    /// First extent of the targets, before they became rows.
    batch: usize,
    options: &'a CrossEntropyOptions<'a>,
}

/// Gradients of x and weight for a loss gradient of 1.
type HeadGrads = [Option<Tensor>; 2];

/// Multiplies the gradients of the forward pass by the gradient `g` of the loss: in place, unless a later backward pass
/// needs them.
fn scale_grads(grads: &mut Option<HeadGrads>, g: &Tensor, retain_graph: bool) -> Result<HeadGrads> {
    let of_one = if retain_graph { grads.clone() } else { grads.take() };
    let Some([dx, dw]) = of_one else {
        return Err(Error::backward(format!(
            "`{OP}` has released its gradients in an earlier backward pass; retain the graph there with `GradOptions`"
        )));
    };
    let g = contiguous_zero_offset(g)?;
    let scaled = |t: Tensor| match retain_graph {
        true => t.mul(&g),
        false => scale_in_place(&t, &g).map(|()| t),
    };
    Ok([dx.map(&scaled).transpose()?, dw.map(&scaled).transpose()?])
}

impl LinearCrossEntropy<'_> {
    /// Computes the loss and the requested gradients. The weight's gradient has type `weight_type`.
    fn compute_loss_and_grads(
        &self,
        needs_input_grad: [bool; 2],
        weight_type: DType,
    ) -> Result<(Tensor, HeadGrads)> {
        let Self { x, weight, target, batch, options } = self;
        let (&[n, features], &[classes, _]) = (x.shape(), weight.shape()) else {
            fail!(shape(OP, [x]), "takes rows of x and a weight of [classes, in]")
        };
        let (device, dtype) = (x.device(), x.dtype());
        let divisor = loss_divisor(target, classes, *batch, options)?;
        let scale = divisor.reciprocal()?;
        let empty_rows = || Tensor::empty([2, n], DType::F32, device);
        let losses = empty_rows()?;
        let lse = (!needs_input_grad.contains(&true)).then(&empty_rows).transpose()?;
        let dx = needs_input_grad[0].then(|| Tensor::empty([n, features], dtype, device)).transpose()?;
        // Sums over chunks are accumulated in f32 for every type.
        let dw = needs_input_grad[1]
            .then(|| Tensor::empty([classes, features], DType::F32, device))
            .transpose()?;
        let row = classes.next_multiple_of(ROW_ALIGNMENT);
        let chunk = chunk_rows(n, chunk_bytes(device) / (row * dtype.size()));
        let buffer = empty_workspace(&[chunk, row], dtype, device)?;
        for first in (0..n).step_by(chunk) {
            let rows = chunk.min(n - first);
            let part = x.narrow(0, first, rows)?;
            let logits = buffer.narrow(0, 0, rows)?.narrow(1, 0, classes)?;
            matmul::gemm_into(OP, &part, &weight.t()?, &logits, false)?;
            let example = LogitsBatch {
                x: logits,
                target: target.clone(),
                weight: options.weight.map(contiguous_zero_offset).transpose()?,
                has_soft_targets: false,
                dim: 1,
                ignore_index: select::ignore_index_to_i32(options.ignore_index),
                label_smoothing: options.label_smoothing,
                first_row: first,
                total_rows: n,
                has_padded_rows: true,
            };
            if let Some(lse) = &lse {
                example.run_pass(&CrossEntropyPass::Forward(&losses, lse))?;
                continue;
            }
            example.run_pass(&CrossEntropyPass::ForwardBackward(&losses, &scale))?;
            let logits = &example.x;
            if let Some(dx) = &dx {
                matmul::gemm_into(OP, logits, weight, &dx.narrow(0, first, rows)?, false)?;
            }
            if let Some(dw) = &dw {
                matmul::gemm_into(OP, &logits.t()?, &part, dw, first > 0)?;
            }
        }
        let loss = losses.select(0, 0)?.sum_all()?.div(&divisor)?;
        let dw = match dw {
            Some(dw) if n == 0 => Some(Tensor::zeros(dw.shape(), weight_type, device)?),
            Some(dw) => Some(dw.to_dtype(weight_type)?),
            None => None,
        };
        Ok((loss, [dx, dw]))
    }
}

impl Tensor {
    /// Computes the cross-entropy of `self` · weightᵀ with `target`, in f32 or f64: [`linear`](Self::linear)
    /// followed by [`cross_entropy_with`](Self::cross_entropy_with). Shapes are x \[.., in\], weight
    /// \[classes, in\] and classes \[..\].
    ///
    /// The logits are computed in chunks of rows of at most 288 MiB, for any batch size. The same pass
    /// computes required gradients, the weight's in f32, so that no tensor of the logits' size is saved.
    /// In f64 the logits are in memory at once.
    ///
    /// A backward pass that retains the graph (`GradOptions::retain_graph`) copies these gradients. With `create_graph`
    /// it recomputes all logits at once. The reduction must be a sum or a mean. Under
    /// [`autocast`](crate::amp::autocast) the products are of 16-bit values.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::CrossEntropyOptions};
    /// # let device = Device::null(Default::default());
    /// let hidden = Tensor::ones(&[2, 16, 64], DType::F32, &device)?.to_leaf()?;
    /// let head = Tensor::ones(&[1000, 64], DType::F32, &device)?.to_leaf()?;
    /// let next = Tensor::zeros(&[2, 16], DType::I64, &device)?;
    /// hidden.linear_cross_entropy(&head, &next, &CrossEntropyOptions::default())?.backward()?;
    /// assert_eq!(head.grad().map(|g| g.shape().to_vec()), Some(vec![1000, 64]));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The shapes or dtypes do not fit. The targets are probabilities, or the reduction is `None`. The class
    /// weights do not fit, or require a gradient.
    #[track_caller]
    pub fn linear_cross_entropy(
        &self,
        weight: &Tensor,
        target: &Tensor,
        options: &CrossEntropyOptions<'_>,
    ) -> Result<Tensor> {
        operation!(OP);
        let [classes, features] = check_operands(self, weight, target, options)?;
        let is_f64 = check_is_f64(OP, self)? | check_is_f64(OP, weight)?;
        let before = target.shape();
        // The operation consists of a linear layer, so autocast treats it like one.
        let cast = OperandCast::for_op("linear", &[Some(self.dtype()), Some(weight.dtype())]);
        let x = match &cast {
            Some(cast) => &cast.apply(self)?,
            None => self,
        };
        let low = match &cast {
            Some(cast) => cast.cast_detached(weight)?,
            None => weight.detach(),
        };
        matmul::check_matmul_operands(OP, x, &low)?;
        let n = numel(before);
        let rows = contiguous_zero_offset(&x.detach().reshape([n, features])?)?;
        let target = contiguous_zero_offset(&narrow_class_targets(&target.reshape([n])?, options)?)?;
        // Check class weights and smoothing on a view with the shape of the logits, which do not exist yet.
        check_targets(&rows.narrow(1, 0, 1)?.broadcast_to([n, classes])?, &target, options)?;
        let batch = before.first().copied().unwrap_or(1);
        let &CrossEntropyOptions { weight: _, ignore_index, reduction, label_smoothing, in_place: _ } =
            options;
        // The composed logits are rows, so their first extent is not the batch.
        let (reduction, divisor) = match reduction {
            Reduction::BatchMean => (Reduction::Sum, Some(batch as f64)),
            other => (other, None),
        };
        let composed = move |t: &[Tensor]| {
            let logits = t[0].reshape([n, features])?.linear(&t[1].to_dtype(t[0].dtype())?, None)?;
            let options = CrossEntropyOptions {
                weight: t.get(3),
                ignore_index,
                reduction,
                label_smoothing,
                ..CrossEntropyOptions::default()
            };
            let loss =
                logits.to_dtype(norm_compute_dtype(logits.dtype()))?.cross_entropy_with(&t[2], &options)?;
            divisor.map_or_else(|| Ok(loss.clone()), |batch| loss.div(batch))
        };
        if is_f64 {
            // Composed, because only kernels of f32 compute in chunks.
            let operands: SmallVec<[Tensor; 4]> =
                [x, weight, &target].into_iter().chain(options.weight).cloned().collect();
            return composed(&operands);
        }
        let head =
            LinearCrossEntropy { x: rows, weight: contiguous_zero_offset(&low)?, target, batch, options };
        let needs_input_grad = match autograd::is_grad_enabled() {
            true => [x.requires_grad(), weight.requires_grad()],
            false => [false, false],
        };
        let (loss, grads) = head.compute_loss_and_grads(needs_input_grad, weight.dtype())?;
        if !autograd::compute_requires_grad(&[x, weight]) {
            return Ok(loss);
        }
        let shape = Dims::from_slice(x.shape());
        let grads = Mutex::new(Some(grads));
        let inputs = [Some(x), Some(weight), Some(&head.target), options.weight].into_iter().flatten();
        let saved: SmallVec<[SavedTensor; 4]> = inputs.map(SavedTensor::input_for_create_graph).collect();
        Ok(autograd::composite_differentiable(OP, loss, &[x, weight], saved, composed, move |g, ctx| {
            let [dx, dw] = scale_grads(&mut grads.lock_unpoisoned(), g, ctx.retain_graph())?;
            Ok(smallvec![dx.map(|dx| dx.reshape(&shape[..])).transpose()?, dw] as InputGrads)
        }))
    }
}

/// Fails unless the operands suit the operation. Returns the extents of the weight.
fn check_operands(
    x: &Tensor,
    weight: &Tensor,
    target: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<[usize; 2]> {
    let (&[classes, features], Some((&x_features, before))) = (weight.shape(), x.shape().split_last()) else {
        let rule = "takes x of [.., in] and a weight of [classes, in]";
        return Err(Error::shape(OP, rule, &[x.shape(), weight.shape()]));
    };
    fail_if!(features != x_features || target.shape() != before; shape(OP, [x, weight, target]),
        "takes x of [.., in], a weight of [classes, in] and targets of [..]");
    fail_if!(target.dtype().is_float();
        dtype(OP, target.dtype()), "takes classes; of probabilities there is `cross_entropy`");
    fail_if!(options.reduction == Reduction::None;
        argument(OP), "takes the sum or a mean of the losses: the forward pass computes the gradients of one loss");
    Ok([classes, features])
}

#[cfg(test)]
mod tests {
    use super::chunk_rows;

    #[test]
    fn chunks_are_few_and_even() {
        // GPT-2's batch and vocabulary in 288 MiB: three even chunks, instead of four with a short last one.
        assert_eq!(chunk_rows(8192, 3001), 2816);
        assert_eq!(chunk_rows(100, 3001), 100);
        assert_eq!(chunk_rows(3000, 2999), 1536);
        assert_eq!(chunk_rows(10, 4), 4);
        assert_eq!((chunk_rows(0, 7), chunk_rows(5, 0)), (1, 1));
        for n in [1, 127, 128, 129, 1000, 8192] {
            for fit in [1, 3, 127, 128, 200, 2816] {
                let rows = chunk_rows(n, fit);
                assert!(rows <= fit && rows <= n, "{n} rows, {fit} fit: {rows}");
            }
        }
    }
}

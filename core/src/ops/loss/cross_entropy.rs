//! Cross-entropy fused from logits. It saves one value for each example, and its gradient is one kernel.

use crate::ops::kernel::heuristics::RowConfig;
use crate::ops::loss::Reduction;
use crate::ops::norm::softmax::RowLayout;
use crate::ops::norm::{check_is_f64, check_second_float, norm_compute_dtype};
use crate::ops::prelude::*;

with_defaults! {
    /// Options of [`Tensor::cross_entropy_with`]. The defaults are PyTorch's.
    ///
    /// ```
    /// # use forebay_core::ops::CrossEntropyOptions;
    /// let options = CrossEntropyOptions { label_smoothing: 0.1, ..CrossEntropyOptions::default() };
    /// assert_eq!(options.ignore_index, -100);
    /// ```
    #[derive(Clone, Copy, Debug)]
    pub struct CrossEntropyOptions<'a> {
        /// Weight of each class.
        pub weight: Option<&'a Tensor> = None,
        /// Class whose examples do not count.
        pub ignore_index: i64 = -100,
        /// Reduction of the examples' losses. A mean is weighted by the class weights.
        pub reduction: Reduction = Reduction::Mean,
        /// Part of each label that is spread over all classes, from 0 to 1.
        pub label_smoothing: f64 = 0.0,
        /// Overwrites contiguous logits with their gradient in the backward pass, which halves the memory.
        /// Requires that nothing else reads the logits, and a single backward pass.
        pub in_place: bool = false,
    }
}

const OP: &str = "cross_entropy";

/// Logits with their targets and options, for both passes.
pub(crate) struct LogitsBatch {
    pub(crate) x: Tensor,
    pub(crate) target: Tensor,
    pub(crate) weight: Option<Tensor>,
    pub(crate) has_soft_targets: bool,
    pub(crate) dim: isize,
    pub(crate) ignore_index: i32,
    pub(crate) label_smoothing: f64,
    /// First row of x within the targets, losses, log-sum-exps and scales, and the number of their rows.
    pub(crate) first_row: usize,
    pub(crate) total_rows: usize,
    /// True if rows are padded in memory to a multiple of four elements.
    pub(crate) has_padded_rows: bool,
}

/// Returns the elements of workgroup memory that cache a row for a single read. Two workgroups must fit on
/// one multiprocessor, so that one computes while the other reads. Returns 0 if they do not.
fn cached_row_elements(extent: usize, x: &Tensor) -> usize {
    // Rounds up, to limit the number of compiled kernels. The rest of a workgroup's memory is below 7 KiB.
    const STEP: usize = 2048;
    let elements = extent.next_multiple_of(STEP);
    let max_bytes = x.device().info().limits.max_workgroup_memory as usize / 2;
    if elements * x.dtype().size() + (7 << 10) <= max_bytes { elements } else { 0 }
}

/// Pass of [`LogitsBatch::run_pass`].
pub(crate) enum CrossEntropyPass<'a> {
    /// Writes weighted losses, and log-sum-exps.
    Forward(&'a Tensor, &'a Tensor),
    /// Computes the gradient from losses, log-sum-exps and scales (one, or one for each row), out of place or
    /// in place.
    Backward(&'a Tensor, &'a Tensor, &'a Tensor, Option<&'a Tensor>),
    /// Writes weighted losses, and their scaled gradient over the logits. Targets are class indices.
    ForwardBackward(&'a Tensor, &'a Tensor),
}

impl LogitsBatch {
    pub(crate) fn run_pass(&self, pass: &CrossEntropyPass<'_>) -> Result<()> {
        let rows = RowLayout::new(OP, &self.x, self.dim)?;
        let ragged =
            self.has_padded_rows && rows.is_vec4_aligned(&self.x) && !rows.extent.is_multiple_of(VEC4_WIDTH);
        let config = if ragged {
            RowConfig::for_contiguous_rows(rows.extent, true, 0)
        } else {
            rows.row_config(&self.x, 0)
        };
        let Self { x, target, weight, .. } = self;
        let (kind, scale, inplace, tensors) = match *pass {
            CrossEntropyPass::Forward(losses, lse) => {
                ("forward", None, false, bindings![x, target, weight, losses, lse])
            }
            CrossEntropyPass::Backward(losses, lse, scale, out) => {
                let (x_in, losses) = (out.map(|_| x), self.has_soft_targets.then_some(losses));
                let tensors = bindings![x_in, target, weight, losses, lse, scale, out.unwrap_or(x)];
                ("backward", Some(scale), out.is_none(), tensors)
            }
            CrossEntropyPass::ForwardBackward(losses, scale) => {
                ("both", Some(scale), true, bindings![target, weight, losses, scale, x])
            }
        };
        let in_one_read = matches!(pass, CrossEntropyPass::ForwardBackward(..))
            && config.width == VEC4_WIDTH
            && config.threads_per_row == WORKGROUP_SIZE;
        let kept = if in_one_read { cached_row_elements(rows.extent, &self.x) } else { 0 };
        // Few cached rows fit a multiprocessor, so each gets twice the threads.
        let wide =
            kept > 0 && self.x.device().info().limits.max_workgroup_size as usize >= 2 * WORKGROUP_SIZE;
        let (threads_per_row, groups) = if wide {
            (2 * WORKGROUP_SIZE, rows.rows)
        } else {
            (config.threads_per_row, config.workgroups(rows.rows))
        };
        let spec = kernel_spec! {
            "cross_entropy", pass: kind, cached_elements: kept, dtype: launch::dtype_name_of(Some(x)),
            targets: target_dtype_name(target), weight: launch::dtype_name_of(weight.as_ref()),
            soft: self.has_soft_targets, smooth: self.label_smoothing > 0.0, threads_per_row, across: rows.across,
            width: config.width, ragged, inplace,
        };
        let scale_stride = scale.map_or(0, |scale| usize::from(scale.numel() > 1));
        let share = self.label_smoothing / rows.extent as f64;
        let params =
            rows.params(&self.x, |p| kernel_params! { ..p; first: self.first_row, total: self.total_rows });
        let params = kernel_params! {
            ..params; ignore_class: self.ignore_index, scale_stride,
            label_factor: (1.0 - self.label_smoothing) as f32, class_factor: share as f32,
        };
        // Logits are read at most twice in vectors of four, and one by one if each class has a share.
        let shares = if self.has_soft_targets || self.label_smoothing > 0.0 {
            2 * rows.extent.div_ceil(threads_per_row)
        } else {
            0
        };
        let iterations = 2 * rows.extent.div_ceil(4 * threads_per_row * config.width) + shares + 128;
        launch::launch(&spec, &tensors, params.loop_iterations(iterations), groups)
    }

    /// Computes the gradient of probability targets: the loss that each class would have added.
    fn soft_target_grad(&self, lse: &Tensor, scale: &Tensor, shape: &[usize]) -> Result<Tensor> {
        let mut per_row: Dims = shape.into();
        let dim = usize::from(shape.len() > 1);
        per_row[dim] = 1;
        let grad_per_unit =
            lse.sum([0], false)?.reshape(&per_row[..])?.sub(&self.x)?.mul(1.0 - self.label_smoothing)?;
        let scale = if scale.numel() == 1 { scale.reshape([1])? } else { scale.reshape(&per_row[..])? };
        let grad = grad_per_unit.mul(&scale)?;
        let Some(weight) = &self.weight else { return grad.to_dtype(self.target.dtype()) };
        let mut per_class = Dims::from_elem(1, shape.len());
        per_class[dim] = weight.numel();
        grad.mul(&weight.reshape(&per_class[..])?)?.to_dtype(self.target.dtype())
    }
}

/// Number of classes from which many workgroups share a row, if there are few rows and for any number of
/// rows.
const SPLIT_FEW_ROWS_MIN_CLASSES: usize = 1 << 17;
const SPLIT_MAX_ROWS: usize = 64;
const SPLIT_ALWAYS_MIN_CLASSES: usize = 1 << 21;

/// Differentiable loss, for gradients of gradients.
struct CompositeCrossEntropy {
    has_soft_targets: bool,
    dim: isize,
    ignore_index: i32,
    label_smoothing: f64,
    divisor: Option<Tensor>,
    /// True if the losses are summed.
    is_reduced: bool,
}

impl CompositeCrossEntropy {
    fn compute_loss(&self, x: &Tensor, target: &Tensor, weight: Option<&Tensor>) -> Result<Tensor> {
        let dtype = norm_compute_dtype(x.dtype());
        let mut log = x.to_dtype(dtype)?.log_softmax(self.dim)?;
        let classes = log.dim(self.dim)?;
        let mut per_class = Dims::from_elem(1, x.rank());
        per_class[self.dim as usize] = classes;
        if let Some(weight) = weight {
            log = log.mul(&weight.to_dtype(dtype)?.reshape(&per_class[..])?)?;
        }
        let all = log.sum([self.dim], false)?.mul(self.label_smoothing / classes as f64)?;
        let losses = if self.has_soft_targets {
            log.mul(&target.to_dtype(dtype)?)?
                .sum([self.dim], false)?
                .mul(1.0 - self.label_smoothing)?
                .add(&all)?
        } else {
            // 32 bits suffice for classes, and every device supports them.
            let target = select::cast_index_to_i32(OP, target, None)?;
            let ignored = target.eq(i64::from(self.ignore_index))?;
            let class = target.masked_fill(&ignored, 0)?.unsqueeze(self.dim)?;
            let class_log = log.gather(self.dim, &class)?.squeeze(self.dim)?;
            class_log.mul(1.0 - self.label_smoothing)?.add(&all)?.masked_fill(&ignored, 0.0)?
        }
        .neg()?;
        let loss = if self.is_reduced { losses.sum_all()? } else { losses };
        match &self.divisor {
            Some(divisor) => loss.div(divisor),
            None => Ok(loss),
        }
    }
}

/// Returns the targets' dtype in kernels. i64 classes are read as pairs of words, which every device
/// supports.
pub(crate) fn target_dtype_name(target: &Tensor) -> &'static str {
    match target.dtype() {
        DType::I64 => "i64w",
        dtype => dtype.name(),
    }
}

/// Casts targets to i32 if their ignored class does not fit an i32, so that the kernels find the class.
pub(crate) fn narrow_class_targets(target: &Tensor, options: &CrossEntropyOptions<'_>) -> Result<Tensor> {
    if target.dtype().is_float() || i32::try_from(options.ignore_index).is_ok() {
        return Ok(target.clone());
    }
    select::cast_index_to_i32(OP, target, Some(options.ignore_index))
}

/// Checks the targets, and returns true if they are probabilities.
pub(crate) fn check_targets(x: &Tensor, target: &Tensor, options: &CrossEntropyOptions<'_>) -> Result<bool> {
    check_is_f64(OP, x)?;
    target.check_same_device(OP, x)?;
    let Some((&classes, examples)) = (match x.shape() {
        [c] => Some((c, Dims::new())),
        [n, c, rest @ ..] => Some((c, std::iter::once(*n).chain(rest.iter().copied()).collect())),
        [] => None,
    }) else {
        fail!(shape(OP, [x]), "logits are [batch, classes, ...] or [classes]")
    };
    fail_if!(classes == 0; shape(OP, [x]), "takes at least one class");
    fail_if!(!(0.0..=1.0).contains(&options.label_smoothing);
        argument(OP), "label_smoothing {} is not in 0 to 1", options.label_smoothing);
    if let Some(weight) = options.weight {
        check_second_float(OP, x, weight)?;
        weight.check_same_device(OP, x)?;
        autograd::check_no_grad_inputs("cross_entropy (of the class weights)", &[weight])?;
        fail_if!(weight.shape() != [classes];
            shape(OP, &[weight.shape(), &[classes]]), "there is one weight for each class");
    }
    if target.dtype().is_float() {
        if target.shape() == &examples[..] && target.shape() != x.shape() {
            let rule = "targets in the logits' shape without the dimension of the classes are labels, which are integers";
            return Err(Error::not_integers(OP, target.dtype(), rule));
        }
        check_second_float(OP, x, target)?;
        fail_if!(target.shape() != x.shape(); shape(OP, [x, target]),
            "targets that are floats are probabilities in the logits' shape; labels are integers, without the dimension \
             of the classes");
        return Ok(true);
    }
    fail_if!(target.dtype() == DType::Bool;
        dtype(OP, DType::Bool), "targets are classes (integers) or probabilities (floats)");
    check_in_range(
        OP,
        target,
        IndexRange { extent: classes, allows_negative: false, ignored_index: Some(options.ignore_index) },
    )?;
    fail_if!(target.shape() != &examples[..];
        shape(OP, [x, target]), "class targets have the logits' shape without the dimension of the classes");
    Ok(false)
}

/// Reduces the losses of the kernel, \[2, rows\]: losses and weights. Also returns the divisor of the gradients, if the
/// reduction divides. `examples` is the shape of the targets without classes.
fn reduce_losses(
    losses: &Tensor,
    reduction: Reduction,
    has_soft_targets: bool,
    examples: &[usize],
) -> Result<(Tensor, Option<Tensor>)> {
    Ok(match reduction {
        Reduction::None => (losses.select(0, 0)?.reshape(examples)?, None),
        Reduction::Sum => (losses.select(0, 0)?.sum_all()?, None),
        Reduction::Mean if !has_soft_targets => {
            let sums = losses.sum([1], false)?;
            let weights = sums.select(0, 1)?;
            (sums.select(0, 0)?.div(&weights)?, Some(weights))
        }
        Reduction::Mean | Reduction::BatchMean => {
            let batch = examples.first().copied().unwrap_or(1);
            let n = if reduction == Reduction::Mean { examples.iter().product() } else { batch };
            let n = Tensor::full((), n as f64, DType::F32, losses.device())?;
            (losses.select(0, 0)?.sum_all()?.div(&n)?, Some(n))
        }
    })
}

impl Tensor {
    /// Computes the mean cross-entropy of these logits, \[batch, classes, ...\] or \[classes\], with
    /// `target`. Targets are classes (integers in the shape without the class dimension) or probabilities
    /// (floats in the same shape). A class out of range gives NaN.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let logits = Tensor::zeros(&[4, 10], DType::F32, &device)?;
    /// let classes = Tensor::from_slice(&[1i64, 0, 9, 3], &[4], &device)?;
    /// assert_eq!(logits.cross_entropy(&classes)?.rank(), 0);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor) -> Result<Tensor> {
        self.cross_entropy_with(target, &CrossEntropyOptions::default())
    }

    /// Computes the divisor of the losses by tensor operations.
    fn cross_entropy_divisor(
        &self,
        target: &Tensor,
        options: &CrossEntropyOptions<'_>,
        soft: bool,
        examples: &[usize],
    ) -> Result<Option<Tensor>> {
        let dtype = norm_compute_dtype(self.dtype());
        let scalar = |n: usize| Tensor::full((), n as f64, dtype, self.device());
        Ok(match options.reduction {
            Reduction::None | Reduction::Sum => None,
            Reduction::BatchMean => Some(scalar(examples.first().copied().unwrap_or(1))?),
            Reduction::Mean if soft => Some(scalar(examples.iter().product())?),
            Reduction::Mean => {
                let classes = select::cast_index_to_i32(OP, target, Some(options.ignore_index))?;
                let left_out = classes.eq(i64::from(select::ignore_index_to_i32(options.ignore_index)))?;
                let weights = match options.weight {
                    Some(weight) => {
                        let rows = classes.masked_fill(&left_out, 0)?.reshape([-1])?;
                        weight.to_dtype(dtype)?.index_select(0, &rows)?.reshape(examples)?
                    }
                    None => Tensor::ones(examples, dtype, self.device())?,
                };
                Some(weights.masked_fill(&left_out, 0.0)?.sum_all()?)
            }
        })
    }

    /// Computes [`cross_entropy`](Self::cross_entropy) with class weights, an ignored class, label smoothing,
    /// or another reduction.
    ///
    /// # Errors
    /// The class weights do not fit, or require a gradient. See also [`cross_entropy`](Self::cross_entropy).
    #[track_caller]
    pub fn cross_entropy_with(&self, target: &Tensor, options: &CrossEntropyOptions<'_>) -> Result<Tensor> {
        operation!(OP);
        // The kernels compute in f32 from any float. Under autocast only the loss is f32, and the logits are
        // not copied.
        let cast = OperandCast::for_op(OP, &[]);
        let result = if cast.is_some() { DType::F32 } else { self.dtype() };
        let soft = check_targets(self, target, options)?;
        let mut examples = Dims::from_slice(self.shape());
        examples.remove(usize::from(self.rank() > 1));
        let rows: usize = examples.iter().product();
        let classes = self.numel() / rows.max(1);
        let composite = |divisor| CompositeCrossEntropy {
            has_soft_targets: soft,
            dim: isize::from(self.rank() > 1),
            ignore_index: select::ignore_index_to_i32(options.ignore_index),
            label_smoothing: options.label_smoothing,
            divisor,
            is_reduced: options.reduction != Reduction::None,
        };
        if self.dtype() == DType::F64
            || classes >= SPLIT_ALWAYS_MIN_CLASSES
            || (classes >= SPLIT_FEW_ROWS_MIN_CLASSES && rows <= SPLIT_MAX_ROWS)
        {
            // Tensor operations support f64 and split long sums over many workgroups.
            let composite = composite(self.cross_entropy_divisor(target, options, soft, &examples)?);
            let weight = options.weight.map(Tensor::detach);
            return composite.compute_loss(self, target, weight.as_ref())?.to_dtype(result);
        }
        let example = LogitsBatch {
            x: self.detach(),
            target: contiguous_zero_offset(&narrow_class_targets(target, options)?)?,
            weight: options.weight.map(contiguous_zero_offset).transpose()?,
            has_soft_targets: soft,
            dim: isize::from(self.rank() > 1),
            ignore_index: select::ignore_index_to_i32(options.ignore_index),
            label_smoothing: options.label_smoothing,
            first_row: 0,
            total_rows: rows,
            has_padded_rows: false,
        };
        // The gradient of probability targets reads the original logits.
        let in_place = options.in_place && !target.requires_grad() && self.is_contiguous();
        let losses = Tensor::empty([2, rows], DType::F32, self.device())?;
        let lse = Tensor::empty([2, rows], DType::F32, self.device())?;
        if rows > 0 {
            example.run_pass(&CrossEntropyPass::Forward(&losses, &lse))?;
        }
        let (out, divisor) = reduce_losses(&losses, options.reduction, soft, &examples)?;
        let out = out.to_dtype(result)?;
        let shape = Dims::from_slice(self.shape());
        let saved =
            [self, target].into_iter().chain(example.weight.as_ref()).map(SavedTensor::input).collect();
        let composite = composite(divisor.clone());
        let composed = move |t: &[Tensor]| composite.compute_loss(&t[0], &t[1], t.get(2));
        Ok(autograd::composite_differentiable(OP, out, &[self, target], saved, composed, move |g, ctx| {
            let g = g.to_dtype(DType::F32)?;
            let scale = match &divisor {
                Some(divisor) => g.div(divisor)?,
                None => g,
            };
            let scale = contiguous_zero_offset(&scale)?;
            let dx = || -> Result<Tensor> {
                let dx = match in_place {
                    true => example.x.clone(),
                    false => Tensor::empty(&shape, example.x.dtype(), example.x.device())?,
                };
                if rows > 0 {
                    let out = (!in_place).then_some(&dx);
                    example.run_pass(&CrossEntropyPass::Backward(&losses, &lse, &scale, out))?;
                }
                Ok(dx)
            };
            let dx = ctx.needs_input_grad[0].then(dx).transpose()?;
            let dy = ctx.needs_input_grad[1]
                .then(|| example.soft_target_grad(&lse, &scale, &shape))
                .transpose()?;
            Ok(smallvec![dx, dy])
        }))
    }
}

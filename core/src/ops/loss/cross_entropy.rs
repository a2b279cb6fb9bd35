//! Cross-entropy, fused from logits: what is kept is one number for each example, and the gradient is one kernel.

use forebay_shaders::KernelSpec;
use smallvec::SmallVec;

use crate::amp::OperandCast;
use crate::autograd::{self, SavedTensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::ops::index::select;
use crate::ops::kernel::heuristics::{RowConfig, VEC4_WIDTH};
use crate::ops::kernel::index_check::{IndexRange, check_in_range};
use crate::ops::kernel::launch::{self, WORKGROUP_SIZE};
use crate::ops::loss::Reduction;
use crate::ops::norm::softmax::{RowLayout, check_f32_f16_bf16};
use crate::ops::norm::{check_is_f64, norm_compute_dtype};
use crate::ops::reduce::contiguous_zero_offset;
use crate::tensor::{Dims, Tensor};

/// How [`Tensor::cross_entropy_with`] weighs and reduces; the default is PyTorch's.
///
/// ```
/// # use forebay_core::ops::CrossEntropyOptions;
/// let options = CrossEntropyOptions { label_smoothing: 0.1, ..CrossEntropyOptions::default() };
/// assert_eq!(options.ignore_index, -100);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions<'a> {
    /// A weight for each class.
    pub weight: Option<&'a Tensor>,
    /// A class whose examples count nothing.
    pub ignore_index: i64,
    /// What becomes of the losses of the examples; a mean is weighted by the weights of their classes.
    pub reduction: Reduction,
    /// The part of each label that is spread over all classes, 0 to 1.
    pub label_smoothing: f64,
    /// The backward pass writes the gradient of the logits over them, where they lie in one piece: half the memory, for
    /// who uses them no more, and walks back once.
    pub in_place: bool,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        Self {
            weight: None,
            ignore_index: -100,
            reduction: Reduction::Mean,
            label_smoothing: 0.0,
            in_place: false,
        }
    }
}

const OP: &str = "cross_entropy";

/// Logits with their targets: what both passes need.
pub(crate) struct LogitsBatch {
    pub(crate) x: Tensor,
    pub(crate) target: Tensor,
    pub(crate) weight: Option<Tensor>,
    pub(crate) has_soft_targets: bool,
    pub(crate) dim: isize,
    pub(crate) ignore_index: i32,
    pub(crate) label_smoothing: f64,
    /// The first row, and how many there are beside those of x: of targets, losses, log-sum-exps and scales.
    pub(crate) first_row: usize,
    pub(crate) total_rows: usize,
    /// Whether rows are padded in memory to a multiple of four elements.
    pub(crate) has_padded_rows: bool,
}

/// Elements of workgroup memory that keep a row, so that it is read once: where two workgroups on one multiprocessor have room for
/// theirs, as one works while the other one reads. 0 where there is less.
fn cached_row_elements(extent: usize, x: &Tensor) -> usize {
    // In steps, so that not every number of classes has a kernel of its own; what else a workgroup has is below 7 KiB.
    const STEP: usize = 2048;
    let elements = extent.next_multiple_of(STEP);
    let room = x.device().info().limits.max_workgroup_memory as usize / 2;
    if elements * x.dtype().size() + (7 << 10) <= room { elements } else { 0 }
}

/// What [`LogitsBatch::run`] does.
pub(crate) enum CrossEntropyPass<'a> {
    /// Writes losses with their weights, and log-sum-exps.
    Forward(&'a Tensor, &'a Tensor),
    /// From these and scales, one number or one for each row; to a tensor, or over the logits.
    Backward(&'a Tensor, &'a Tensor, &'a Tensor, Option<&'a Tensor>),
    /// Writes losses with their weights, and the gradient by scales over the logits, which are of classes.
    ForwardBackward(&'a Tensor, &'a Tensor),
}

impl LogitsBatch {
    pub(crate) fn run_pass(&self, pass: &CrossEntropyPass<'_>) -> Result<()> {
        let rows = RowLayout::new(OP, &self.x, self.dim)?;
        let ragged =
            self.has_padded_rows && rows.is_vec4_aligned(&self.x) && !rows.extent.is_multiple_of(VEC4_WIDTH);
        let held = if ragged {
            RowConfig::for_contiguous_rows(rows.extent, true, 0)
        } else {
            rows.row_config(&self.x, 0)
        };
        let name = |t: &Tensor| launch::shader_dtype_name(t.dtype(), t.device());
        let mut tensors: SmallVec<[&Tensor; 7]> = SmallVec::new();
        let (kind, inplace, scale_stride) = match pass {
            CrossEntropyPass::Forward(..) => ("forward", false, 0),
            CrossEntropyPass::Backward(_, _, scale, out) => {
                ("backward", out.is_none(), usize::from(scale.numel() > 1))
            }
            CrossEntropyPass::ForwardBackward(_, scale) => ("both", true, usize::from(scale.numel() > 1)),
        };
        tensors.extend((!inplace).then_some(&self.x));
        tensors.push(&self.target);
        tensors.extend(self.weight.as_ref());
        match pass {
            CrossEntropyPass::Forward(losses, lse) => tensors.extend([*losses, *lse]),
            CrossEntropyPass::Backward(losses, lse, scale, out) => {
                tensors.extend(self.has_soft_targets.then_some(*losses));
                tensors.extend([*lse, *scale, out.unwrap_or(&self.x)]);
            }
            CrossEntropyPass::ForwardBackward(losses, scale) => tensors.extend([*losses, *scale, &self.x]),
        }
        let in_one_read = matches!(pass, CrossEntropyPass::ForwardBackward(..))
            && held.width == VEC4_WIDTH
            && held.lanes == WORKGROUP_SIZE;
        let kept = if in_one_read { cached_row_elements(rows.extent, &self.x) } else { 0 };
        // The rows that a multiprocessor keeps are few: each has twice the threads.
        let wide =
            kept > 0 && self.x.device().info().limits.max_workgroup_size as usize >= 2 * WORKGROUP_SIZE;
        let (lanes, groups) =
            if wide { (2 * WORKGROUP_SIZE, rows.rows) } else { (held.lanes, held.workgroups(rows.rows)) };
        let spec = KernelSpec::new("cross_entropy")
            .def("pass", kind)
            .def("held", kept)
            .def("dtype", name(&self.x))
            .def("goal", target_dtype_name(&self.target))
            .def("weight", self.weight.as_ref().map_or("", name))
            .def("soft", self.has_soft_targets)
            .def("smooth", self.label_smoothing > 0.0)
            .def("lanes", lanes)
            .def("across", rows.across)
            .def("width", held.width)
            .def("ragged", ragged)
            .def("inplace", inplace);
        let share = self.label_smoothing / rows.extent as f64;
        let params = rows
            .params(&self.x, [self.first_row, self.total_rows])
            .u32(self.ignore_index as u32)
            .size(scale_stride);
        // Logits are read at most twice, in fours of steps, and one by one where each class has a share.
        let shares = if self.has_soft_targets || self.label_smoothing > 0.0 {
            2 * rows.extent.div_ceil(lanes)
        } else {
            0
        };
        let turns = 2 * rows.extent.div_ceil(4 * lanes * held.width) + shares + 128;
        let params = params.f32((1.0 - self.label_smoothing) as f32).f32(share as f32).loop_iterations(turns);
        launch::launch(&spec, &tensors, params, groups)
    }

    /// The gradient of probabilities: what each class would have added to the loss.
    fn soft_target_grad(&self, lse: &Tensor, scale: &Tensor, shape: &[usize]) -> Result<Tensor> {
        let mut per_row: Dims = shape.into();
        let dim = usize::from(shape.len() > 1);
        per_row[dim] = 1;
        let lost =
            lse.sum(&[0], false)?.reshape(&per_row[..])?.sub(&self.x)?.mul(1.0 - self.label_smoothing)?;
        let scale = if scale.numel() == 1 { scale.reshape([1])? } else { scale.reshape(&per_row[..])? };
        let grad = lost.mul(&scale)?;
        let Some(weight) = &self.weight else { return grad.to_dtype(self.target.dtype()) };
        let mut per_class = Dims::from_elem(1, shape.len());
        per_class[dim] = weight.numel();
        grad.mul(&weight.reshape(&per_class[..])?)?.to_dtype(self.target.dtype())
    }
}

/// Classes from which on a row is shared by many workgroups where there are few rows, and wherever that is.
const SPLIT_FEW_ROWS_MIN_CLASSES: usize = 1 << 17;
const SPLIT_MAX_ROWS: usize = 64;
const SPLIT_ALWAYS_MIN_CLASSES: usize = 1 << 21;

/// The loss of operations that have gradients of gradients.
struct CompositeCrossEntropy {
    has_soft_targets: bool,
    dim: isize,
    ignore_index: i32,
    label_smoothing: f64,
    divisor: Option<Tensor>,
    /// Whether the losses are summed.
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
        let all = log.sum(&[self.dim], false)?.mul(self.label_smoothing / classes as f64)?;
        let losses = if self.has_soft_targets {
            log.mul(&target.to_dtype(dtype)?)?
                .sum(&[self.dim], false)?
                .mul(1.0 - self.label_smoothing)?
                .add(&all)?
        } else {
            // 32 bits are enough for classes, and every device has them.
            let target = select::cast_index_to_i32(OP, target, None)?;
            let ignored = target.eq(i64::from(self.ignore_index))?;
            let class = target.masked_fill(&ignored, 0)?.unsqueeze(self.dim)?;
            let picked = log.gather(self.dim, &class)?.squeeze(self.dim)?;
            picked.mul(1.0 - self.label_smoothing)?.add(&all)?.masked_fill(&ignored, 0.0)?
        }
        .neg()?;
        let loss = if self.is_reduced { losses.sum_all()? } else { losses };
        match &self.divisor {
            Some(divisor) => loss.div(divisor),
            None => Ok(loss),
        }
    }
}

/// An ignored class for the kernels: no class is as low as the lowest i32.
pub(crate) fn kernel_ignore_index(options: &CrossEntropyOptions<'_>) -> i32 {
    select::ignore_index_to_i32(options.ignore_index)
}

/// The dtype of targets in kernels: classes are read as words, on every device.
pub(crate) fn target_dtype_name(target: &Tensor) -> &'static str {
    match target.dtype() {
        DType::I64 => "i64w",
        dtype => dtype.name(),
    }
}

/// Targets whose ignored class an i32 holds: others are narrowed, so that the kernels find the class.
pub(crate) fn narrow_class_targets(target: &Tensor, options: &CrossEntropyOptions<'_>) -> Result<Tensor> {
    if target.dtype().is_float() || i32::try_from(options.ignore_index).is_ok() {
        return Ok(target.clone());
    }
    select::cast_index_to_i32(OP, target, Some(options.ignore_index))
}

/// Checks the targets; whether they are probabilities.
pub(crate) fn check_targets(x: &Tensor, target: &Tensor, options: &CrossEntropyOptions<'_>) -> Result<bool> {
    // Beside f64 every float is taken; the kernels for the others read no f64.
    let check_second = if check_is_f64(OP, x)? {
        |t: &Tensor| check_is_f64(OP, t).map(drop)
    } else {
        |t: &Tensor| check_f32_f16_bf16(OP, t)
    };
    target.check_same_device(OP, x)?;
    let Some((&classes, examples)) = (match x.shape() {
        [c] => Some((c, Dims::new())),
        [n, c, rest @ ..] => Some((c, std::iter::once(*n).chain(rest.iter().copied()).collect())),
        [] => None,
    }) else {
        return Err(Error::shape(OP, "logits are [batch, classes, ...] or [classes]", &[x.shape()]));
    };
    if classes == 0 {
        return Err(Error::shape(OP, "takes at least one class", &[x.shape()]));
    }
    if !(0.0..=1.0).contains(&options.label_smoothing) {
        return Err(Error::argument(
            OP,
            format!("label_smoothing {} is not in 0 to 1", options.label_smoothing),
        ));
    }
    if let Some(weight) = options.weight {
        check_second(weight)?;
        weight.check_same_device(OP, x)?;
        autograd::check_no_grad_inputs("cross_entropy (of the class weights)", &[weight])?;
        if weight.shape() != [classes] {
            return Err(Error::shape(
                OP,
                "there is one weight for each class",
                &[weight.shape(), &[classes]],
            ));
        }
    }
    if target.dtype().is_float() {
        check_second(target)?;
        if target.shape() != x.shape() {
            return Err(Error::shape(
                OP,
                "probabilities have the logits' shape",
                &[x.shape(), target.shape()],
            ));
        }
        return Ok(true);
    }
    if target.dtype() == DType::Bool {
        return Err(Error::dtype(
            OP,
            DType::Bool,
            "targets are classes (integers) or probabilities (floats)",
        ));
    }
    check_in_range(
        OP,
        target,
        IndexRange { extent: classes, allows_negative: false, ignored_index: Some(options.ignore_index) },
    )?;
    if target.shape() != &examples[..] {
        return Err(Error::shape(
            OP,
            "class targets have the logits' shape without the dimension of the classes",
            &[x.shape(), target.shape()],
        ));
    }
    Ok(false)
}

impl Tensor {
    /// The mean cross-entropy of these logits, \[batch, classes, ...\] or \[classes\], with `target`: classes (integers in
    /// the shape without the dimension of the classes) or probabilities (floats in the same shape). A class outside
    /// the range gives NaN.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let logits = Tensor::zeros(&[4, 10], DType::F32, &device)?;
    /// let classes = Tensor::from_slice(&[1i64, 0, 9, 3], &[4], &device)?;
    /// assert_eq!(logits.cross_entropy(&classes)?.rank(), 0);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The shapes or dtypes do not fit; memory runs out.
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor) -> Result<Tensor> {
        self.cross_entropy_with(target, &CrossEntropyOptions::default())
    }

    /// By tensor operations, which f64 has, and whose sums many workgroups share.
    fn cross_entropy_composite(
        &self,
        target: &Tensor,
        options: &CrossEntropyOptions<'_>,
        soft: bool,
        examples: &[usize],
    ) -> Result<Tensor> {
        let dtype = norm_compute_dtype(self.dtype());
        let number = |n: usize| Tensor::full(&[], n as f64, dtype, self.device());
        let divisor = match options.reduction {
            Reduction::None | Reduction::Sum => None,
            Reduction::BatchMean => Some(number(examples.first().copied().unwrap_or(1))?),
            Reduction::Mean if soft => Some(number(examples.iter().product())?),
            Reduction::Mean => {
                let classes = select::cast_index_to_i32(OP, target, Some(options.ignore_index))?;
                let left_out = classes.eq(i64::from(kernel_ignore_index(options)))?;
                let weights = match options.weight {
                    Some(weight) => {
                        let rows = classes.masked_fill(&left_out, 0)?.reshape([-1])?;
                        weight.to_dtype(dtype)?.index_select(0, &rows)?.reshape(examples)?
                    }
                    None => Tensor::ones(examples, dtype, self.device())?,
                };
                Some(weights.masked_fill(&left_out, 0.0)?.sum_all()?)
            }
        };
        let whole = options.reduction != Reduction::None;
        let (weight, ignore) = (options.weight.map(Tensor::detach), kernel_ignore_index(options));
        let dim = if self.rank() > 1 { 1 } else { 0 };
        let smoothing = options.label_smoothing;
        CompositeCrossEntropy {
            has_soft_targets: soft,
            dim,
            ignore_index: ignore,
            label_smoothing: smoothing,
            divisor,
            is_reduced: whole,
        }
        .compute_loss(self, target, weight.as_ref())
    }

    /// As [`cross_entropy`](Self::cross_entropy) with class weights, an ignored class, smoothed labels, or another
    /// reduction.
    ///
    /// # Errors
    /// As [`cross_entropy`](Self::cross_entropy); the class weights do not fit, or require a gradient.
    #[track_caller]
    pub fn cross_entropy_with(&self, target: &Tensor, options: &CrossEntropyOptions<'_>) -> Result<Tensor> {
        let _op = memory::scope::enter_op(OP);
        // The kernels compute in f32 from any float: under autocast only the loss is f32, the logits are not copied.
        let cast = OperandCast::for_op(OP, &[]);
        let result = if cast.is_some() { DType::F32 } else { self.dtype() };
        let soft = check_targets(self, target, options)?;
        let mut examples: Dims = self.shape().into();
        examples.remove(usize::from(self.rank() > 1));
        let rows: usize = examples.iter().product();
        let classes = self.numel() / rows.max(1);
        if self.dtype() == DType::F64
            || classes >= SPLIT_ALWAYS_MIN_CLASSES
            || (classes >= SPLIT_FEW_ROWS_MIN_CLASSES && rows <= SPLIT_MAX_ROWS)
        {
            return self.cross_entropy_composite(target, options, soft, &examples)?.to_dtype(result);
        }
        let example = LogitsBatch {
            x: self.detach(),
            target: contiguous_zero_offset(&narrow_class_targets(target, options)?)?,
            weight: options.weight.map(contiguous_zero_offset).transpose()?,
            has_soft_targets: soft,
            dim: if self.rank() > 1 { 1 } else { 0 },
            ignore_index: kernel_ignore_index(options),
            label_smoothing: options.label_smoothing,
            first_row: 0,
            total_rows: rows,
            has_padded_rows: false,
        };
        // Probabilities' own gradient reads the logits as they were.
        let in_place = options.in_place && !target.requires_grad() && self.is_contiguous();
        let losses = Tensor::empty(&[2, rows], DType::F32, self.device())?;
        let lse = Tensor::empty(&[2, rows], DType::F32, self.device())?;
        if rows > 0 {
            example.run_pass(&CrossEntropyPass::Forward(&losses, &lse))?;
        }
        let loss = |k: isize| losses.select(0, k);
        // What the gradient of every row is multiplied by besides that of the result.
        let (out, divisor) = match options.reduction {
            Reduction::None => (loss(0)?.reshape(&examples[..])?, None),
            Reduction::Sum => (loss(0)?.sum_all()?, None),
            Reduction::Mean if soft => {
                let n = Tensor::full(&[], rows as f64, DType::F32, self.device())?;
                (loss(0)?.sum_all()?.div(&n)?, Some(n))
            }
            Reduction::Mean => {
                let sums = losses.sum(&[1], false)?;
                let weights = sums.select(0, 1)?;
                (sums.select(0, 0)?.div(&weights)?, Some(weights))
            }
            Reduction::BatchMean => {
                let n = examples.first().copied().unwrap_or(1);
                let n = Tensor::full(&[], n as f64, DType::F32, self.device())?;
                (loss(0)?.sum_all()?.div(&n)?, Some(n))
            }
        };
        let out = out.to_dtype(result)?;
        let shape: Dims = self.shape().into();
        let saved =
            [self, target].into_iter().chain(example.weight.as_ref()).map(SavedTensor::input).collect();
        let again = CompositeCrossEntropy {
            has_soft_targets: soft,
            dim: example.dim,
            ignore_index: example.ignore_index,
            label_smoothing: options.label_smoothing,
            divisor: divisor.clone(),
            is_reduced: options.reduction != Reduction::None,
        };
        let composed = move |t: &[Tensor]| again.compute_loss(&t[0], &t[1], t.get(2));
        Ok(autograd::composite_differentiable(OP, out, &[self, target], saved, composed, move |g, wants| {
            let g = g.to_dtype(DType::F32)?;
            let scale = match &divisor {
                Some(divisor) => g.div(divisor)?,
                None => g,
            };
            let scale = contiguous_zero_offset(&scale)?;
            let mut grads = autograd::InputGrads::from_elem(None, 2);
            if wants[0] {
                let dx = match in_place {
                    true => example.x.clone(),
                    false => Tensor::empty(&shape, example.x.dtype(), example.x.device())?,
                };
                if rows > 0 {
                    example.run_pass(&CrossEntropyPass::Backward(
                        &losses,
                        &lse,
                        &scale,
                        (!in_place).then_some(&dx),
                    ))?;
                }
                grads[0] = Some(dx);
            }
            if wants[1] {
                grads[1] = Some(example.soft_target_grad(&lse, &scale, &shape)?);
            }
            Ok(grads)
        }))
    }
}

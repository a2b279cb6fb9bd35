//! Connectionist temporal classification (Graves et al., 2006).

use crate::ops::elementwise::prelude::*;
use crate::ops::kernel::index_check::{self, check_lengths, find_outside};
use crate::ops::loss::Reduction;
use crate::ops::norm::check_is_f64;
use crate::ops::prelude::*;
use crate::ops::shape::pad::PadMode;
use crate::ops::shape::stack;

const OP: &str = "ctc_loss";
/// Finite stand-in for log(0), because -inf minus itself is NaN.
const LOG_ZERO: f64 = -1e30;

pointwise_ops! {
    /// ln(eᵃ + eᵇ + eᶜ).
    LOGSUMEXP3 "logsumexp of three": Float, "max(a, max(b, c)) + m_log(m_exp(a - max(a, max(b, c))) + m_exp(b - max(a, max(b, c))) + m_exp(c - max(a, max(b, c))))", ["base", "exp", "log"], [
        Expr("g * m_exp(a - y)", &[A, Y]),
        Expr("g * m_exp(b - y)", &[B, Y]),
        Expr("g * m_exp(c - y)", &[C, Y])];
}

/// Arguments of [`Tensor::ctc_loss`] in addition to the log-probabilities.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::CtcLossOptions, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let scores = Tensor::zeros(&[12, 2, 5], DType::F32, &device)?;
/// let labels = Tensor::from_slice(&[1i32, 2, 3, 4, 4, 0], &[2, 3], &device)?;
/// let (inputs, targets) =
///     (Tensor::from_slice(&[12i32, 10], &[2], &device)?, Tensor::from_slice(&[3i32, 2], &[2], &device)?);
/// let loss = scores.log_softmax(-1)?.ctc_loss(&CtcLossOptions::new(&labels, &inputs, &targets))?;
/// assert_eq!(loss.rank(), 0);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CtcLossOptions<'a> {
    /// Labels, \[batch, longest\], integers. Entries after a target's length are not read.
    pub targets: &'a Tensor,
    /// Steps of each example, \[batch\]. With no steps, an empty target has loss 0, any other an infinite
    /// loss.
    pub input_lengths: &'a Tensor,
    /// Number of labels of each example, \[batch\].
    pub target_lengths: &'a Tensor,
    /// Blank class, 0 by default.
    pub blank: usize,
    /// Reduction of the losses. A mean divides each loss by its target's length first.
    pub reduction: Reduction,
    /// If true, a target that is too long for its input has loss 0 and no gradient.
    pub zero_infinity: bool,
}

impl<'a> CtcLossOptions<'a> {
    /// Creates the options with PyTorch's defaults.
    #[must_use]
    pub fn new(targets: &'a Tensor, input_lengths: &'a Tensor, target_lengths: &'a Tensor) -> Self {
        Self {
            targets,
            input_lengths,
            target_lengths,
            blank: 0,
            reduction: Reduction::Mean,
            zero_infinity: false,
        }
    }
}

/// Extents of the operands of a CTC loss.
struct CtcSizes {
    steps: usize,
    batch: usize,
    classes: usize,
    /// Labels of the longest target.
    longest: usize,
}

impl CtcLossOptions<'_> {
    /// Fails for operands that do not fit the log-probabilities; returns the extents.
    fn check(&self, log_probs: &Tensor) -> Result<CtcSizes> {
        let Self { targets, input_lengths, target_lengths, blank, .. } = *self;
        let (&[steps, batch, classes], &[rows, longest]) = (log_probs.shape(), targets.shape()) else {
            let rule = "takes log-probabilities of [steps, batch, classes] and targets of [batch, longest]";
            return Err(Error::shape(OP, rule, &[log_probs.shape(), targets.shape()]));
        };
        let lengths = [input_lengths.shape(), target_lengths.shape()];
        fail_if!(rows != batch || lengths != [[batch]; 2] || steps == 0;
            shape(OP, &[log_probs.shape(), targets.shape(), lengths[0], lengths[1]]),
            "targets and lengths have the batch of the log-probabilities, whose steps are at least one");
        if let Some(other) = [targets, input_lengths, target_lengths].iter().find(|t| !t.dtype().is_int()) {
            return Err(Error::not_integers(OP, other.dtype(), "targets and lengths are integers"));
        }
        fail_if!(blank >= classes; argument(OP), "the blank is class {blank} of {classes}");
        check_lengths(OP, ("length", "`input_lengths`"), input_lengths, 0..=steps)?;
        check_lengths(OP, ("length", "`target_lengths`"), target_lengths, 0..=longest)?;
        if index_check::is_enabled()? {
            let counts = target_lengths.to_integers()?;
            let label = |at: usize, i: i64| {
                (at % longest) as i64 >= counts[at / longest] || usize::try_from(i).is_ok_and(|i| i < classes)
            };
            find_outside(OP, ("label", "`targets`"), targets, label, &format!("0..{classes}"))?;
        }
        Ok(CtcSizes { steps, batch, classes, longest })
    }
}

/// Returns the log-probabilities that paths are in each state at the last step, \[batch, width\], from the scores of
/// the states, \[steps, batch, width\]. One kernel runs all steps, and one more their gradients.
fn compute_alpha(scores: &Tensor, cannot_skip: &Tensor, lengths: &Tensor) -> Result<Tensor> {
    let &[steps, batch, width] = scores.shape() else {
        fail!(shape(OP, [scores]), "takes scores of [steps, batch, states]")
    };
    let iterations = (2 * steps + 2).saturating_mul(width.div_ceil(WORKGROUP_SIZE) + 1);
    let limit = scores.device().info().limits.max_loop_iterations as usize;
    // Operations step by step in f64, and where the loops of a kernel may not run that long.
    if scores.numel() == 0 || scores.dtype() == DType::F64 || iterations > limit {
        return compose_alpha(scores, cannot_skip, lengths);
    }
    let lengths_column = lengths;
    let (values, cannot_skip, lengths) = (
        contiguous_zero_offset(&scores.detach())?,
        contiguous_zero_offset(cannot_skip)?,
        contiguous_zero_offset(lengths)?,
    );
    let params = move || kernel_params! { steps, batch, width }.loop_iterations(iterations);
    let spec = |pass: &'static str| kernel_spec! { "ctc_alpha", pass };
    let alphas = Tensor::empty([steps, batch, width], DType::F32, scores.device())?;
    launch::launch(&spec("forward"), &[&values, &cannot_skip, &lengths, &alphas], params(), batch)?;
    let out = alphas.select(0, steps as isize - 1)?;
    let saved = smallvec![SavedTensor::input(scores)];
    let (skips, column) = (cannot_skip.clone(), lengths_column.clone());
    let composed = move |t: &[Tensor]| compose_alpha(&t[0], &skips, &column);
    Ok(autograd::composite_differentiable(OP, out, &[scores], saved, composed, move |g, _| {
        let carry = g.copy()?;
        let grad = Tensor::empty([steps, batch, width], DType::F32, g.device())?;
        let operands = [&values, &cannot_skip, &lengths, &alphas, &carry, &grad];
        launch::launch(&spec("backward"), &operands, params(), batch)?;
        Ok(smallvec![Some(grad)])
    }))
}

/// Computes [`compute_alpha`] by differentiable operations for each step.
fn compose_alpha(scores: &Tensor, cannot_skip: &Tensor, lengths: &Tensor) -> Result<Tensor> {
    let (steps, width) = (scores.shape()[0], scores.shape()[2]);
    let position = Tensor::arange(0.0, width as f64, 1.0, DType::I32, scores.device())?;
    let mut alpha = scores.select(0, 0)?.masked_fill(&position.gt(1)?, LOG_ZERO)?;
    for t in 1..steps {
        let wide = alpha.pad(&[2, 0], PadMode::Constant(LOG_ZERO.into()))?;
        let [stay, next, skip] = [2, 1, 0].map(|k| wide.narrow(1, k, width));
        let skip = skip?.masked_fill(cannot_skip, LOG_ZERO)?;
        let sum = run_pointwise(&LOGSUMEXP3, &[(&stay?).into(), (&next?).into(), (&skip).into()], &[])?;
        let ended = lengths.le(t as i64)?;
        alpha = alpha.where_(&ended, &sum.add(&scores.select(0, t as isize)?)?.maximum(LOG_ZERO)?)?;
    }
    Ok(alpha)
}

impl Tensor {
    /// Computes the negative log-likelihood of label sequences under these log-probabilities, \[steps, batch,
    /// classes\]. The likelihood sums over all alignments with blanks and repetitions. The gradient is exact.
    /// PyTorch's gradient assumes a preceding `log_softmax`, with which both agree.
    ///
    /// The host does not read lengths and labels. A length or a label out of range, which PyTorch refuses,
    /// gives a loss of NaN without a gradient; [`check_indices`](crate::ops::check_indices) makes it an error.
    ///
    /// # Errors
    /// The shapes or types do not fit, the device lacks f64, or the blank is not a class.
    #[track_caller]
    pub fn ctc_loss(&self, options: &CtcLossOptions<'_>) -> Result<Tensor> {
        operation!(OP, in_f32[self], |x| x.ctc_loss(options));
        check_is_f64(OP, self)?;
        let CtcLossOptions { targets, input_lengths, target_lengths, blank, .. } = *options;
        let CtcSizes { steps, batch, classes, longest } = options.check(self)?;
        let ints = |t: &Tensor| select::cast_index_to_i32(OP, t, None);
        let (inputs, counts) = (ints(input_lengths)?.unsqueeze(1)?, ints(target_lengths)?.unsqueeze(1)?);
        let labels = ints(targets)?;
        let outside = |t: &Tensor, max: usize| t.lt(0)?.logical_or(&t.gt(max as i64)?);
        let mut invalid = outside(&inputs, steps)?.logical_or(&outside(&counts, longest)?)?.squeeze(1)?;
        if longest > 0 {
            let position = Tensor::arange(0.0, longest as f64, 1.0, DType::I32, self.device())?;
            let read = position.lt(&counts)?;
            let used = labels.masked_fill(&read.logical_not()?, blank as i64)?;
            invalid = invalid.logical_or(&outside(&used, classes - 1)?.any([1], false)?)?;
        }
        // The states have a blank before each label and after the last.
        let blanks = labels.full_like(blank)?;
        let pairs = stack(&[&blanks, &labels], 2)?.reshape([batch, 2 * longest])?;
        let last = Tensor::full([batch, 1], blank, DType::I32, self.device())?;
        let states = cat(&[&pairs, &last], 1)?;
        let width = 2 * longest + 1;
        let all = states.unsqueeze(0)?.broadcast_to([steps, batch, width])?;
        // Entries after a target's end may have any value.
        let named = all.clamp(0, (classes - 1) as i64)?;
        let scores = self.gather(2, &named)?.maximum(LOG_ZERO)?;
        // A label may directly follow the previous label only if the two differ.
        let cannot_skip = {
            let before = states.pad(&[2, 0], PadMode::Constant(blank.into()))?.narrow(1, 0, width)?;
            states.eq(blank as i64)?.logical_or(&states.eq(&before)?)?
        };
        let alpha = compute_alpha(&scores, &cannot_skip, &inputs)?;
        // A path ends with the last label or the final blank.
        let end = counts.mul(2)?;
        let at_blank = alpha.gather(1, &end)?;
        let at_label = alpha.gather(1, &end.sub(1)?.maximum(0)?)?.masked_fill(&counts.eq(0)?, LOG_ZERO)?;
        let log_zero = at_label.full_like(LOG_ZERO)?;
        let sum =
            run_pointwise(&LOGSUMEXP3, &[(&at_blank).into(), (&at_label).into(), (&log_zero).into()], &[])?;
        let losses = sum.neg()?.squeeze(1)?;
        // Without steps, only the empty target is possible.
        let none = inputs.squeeze(1)?.le(0)?;
        let losses = losses.masked_fill(&none, 0.0)?;
        let labelled = none.logical_and(&counts.squeeze(1)?.gt(0)?)?;
        let impossible = losses.detach().gt(-LOG_ZERO / 2.0)?.logical_or(&labelled)?;
        let instead = if options.zero_infinity { 0.0 } else { f64::INFINITY };
        let losses = losses.masked_fill(&impossible, instead)?.masked_fill(&invalid, f64::NAN)?;
        match options.reduction {
            Reduction::Mean => {
                let counts = counts.squeeze(1)?.maximum(1)?.to_dtype(losses.dtype())?;
                losses.div(&counts)?.mean_all()
            }
            other => other.apply(&losses),
        }
    }
}

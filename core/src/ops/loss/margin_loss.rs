//! PyTorch's losses of counts, of pairs and of several labels. The other losses are in `loss.rs`.

use crate::ops::kernel::index_check;
use crate::ops::loss::{BceWithLogitsOptions, Reduction, apply_weight_and_reduce};
use crate::ops::prelude::*;

with_defaults! {
    /// Options of [`Tensor::poisson_nll_loss`].
    #[derive(Clone, Copy, Debug)]
    pub struct PoissonNllLossOptions {
        /// If true, the means are logarithms; true.
        pub log_input: bool = true,
        /// If true, adds Stirling's approximation of the constant; false.
        pub full: bool = false,
        /// Term added to means inside the logarithm, unless `log_input`; 1e-8.
        pub eps: f64 = 1e-8,
        /// Reduction of the losses; mean.
        pub reduction: Reduction = Reduction::Mean,
    }

    /// Options of [`Tensor::multi_margin_loss`].
    #[derive(Clone, Copy, Debug)]
    pub struct MultiMarginLossOptions<'a> {
        /// Exponent, 1 or 2; 1.
        pub p: i32 = 1,
        /// Least difference to the score of the target without a loss; 1.
        pub margin: f64 = 1.0,
        /// Factor for each class of a target; `None` for 1.
        pub weight: Option<&'a Tensor> = None,
        /// Reduction of the losses; mean.
        pub reduction: Reduction = Reduction::Mean,
    }

    /// Options of [`Tensor::triplet_margin_with_distance_loss`].
    #[derive(Clone, Copy, Debug)]
    pub struct TripletMarginWithDistanceLossOptions {
        /// Difference of the distances from which on the loss is 0; 1.
        pub margin: f64 = 1.0,
        /// If true, d(a, n) is replaced by d(p, n) where that is less; false.
        pub swap: bool = false,
        /// Reduction of the losses; mean.
        pub reduction: Reduction = Reduction::Mean,
    }
}

/// Returns scores \[batch, classes\] and integer targets \[batch, labels\], with one label unless `several`.
fn batch_scores_and_targets(
    op: &'static str,
    x: &Tensor,
    target: &Tensor,
    several: bool,
) -> Result<(Tensor, Tensor)> {
    if !target.dtype().is_int() {
        return Err(Error::not_integers(op, target.dtype(), "targets are classes, as integers"));
    }
    if x.rank() == 0 && target.rank() == 0 {
        // As in PyTorch, a number is the score of one class.
        return batch_scores_and_targets(
            op,
            &x.reshape([1, 1])?,
            &target.reshape(&[1, 1][..if several { 2 } else { 1 }])?,
            several,
        );
    }
    let labels = if several { x.shape() } else { &x.shape()[..x.rank().saturating_sub(1)] };
    if !matches!(x.rank(), 1 | 2) || target.shape() != labels {
        let rule = if several {
            "takes scores of [batch, classes] or [classes], and targets of the same shape"
        } else {
            "takes scores of [batch, classes] and targets of [batch], or both without the batch"
        };
        return Err(Error::shape(op, rule, &[x.shape(), target.shape()]));
    }
    let batch = if x.rank() == 1 { 1 } else { x.shape()[0] };
    let classes = x.shape()[x.rank() - 1];
    if several && index_check::is_enabled()? {
        let all = target.to_integers()?;
        let ended = |at: usize| all[at - at % classes..=at].iter().any(|&label| label < 0);
        let label = |at: usize, i: i64| ended(at) || i < classes as i64;
        let (what, range) = (("index", "the index tensor"), format!("0..{classes}"));
        index_check::find_outside(op, what, target, label, &range)?;
    } else if !several {
        let range = IndexRange { extent: classes, allows_negative: false, ignored_index: None };
        index_check::check_in_range(op, target, range)?;
    }
    let y =
        select::cast_index_to_i32(op, target, None)?.reshape([batch, if several { classes } else { 1 }])?;
    Ok((x.reshape([batch, classes])?, y))
}

/// Removes the batch dimension that was added to a single example.
fn squeeze_unbatched(losses: Tensor, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
    if x.rank() <= 1 && reduction == Reduction::None { losses.squeeze(0) } else { Ok(losses) }
}

impl Tensor {
    /// Computes the negative log-likelihood of the counts `target` under Poisson distributions with these
    /// means.
    #[track_caller]
    pub fn poisson_nll_loss(&self, target: &Tensor, options: &PoissonNllLossOptions) -> Result<Tensor> {
        let &PoissonNllLossOptions { log_input, full, eps, reduction } = options;
        dispatch_in_f32!("poisson_nll_loss", [self, target], |x, y| x.poisson_nll_loss(&y, options));
        let losses = if log_input {
            self.exp()?.sub(&target.mul(self)?)?
        } else {
            self.sub(&target.mul(&self.add(eps)?.log()?)?)?
        };
        if !full {
            return reduction.apply(&losses);
        }
        // Stirling's approximation applies to counts above 1 only. Other counts are replaced first, so that their
        // gradient is finite.
        let is_small = target.detach().le(1.0)?;
        let y = target.masked_fill(&is_small, 1.0)?;
        let stirling = y.xlogy(&y)?.sub(&y)?.add(&y.mul(std::f64::consts::TAU)?.log()?.mul(0.5)?)?;
        reduction.apply(&losses.add(&stirling.masked_fill(&is_small, 0.0)?)?)
    }

    /// Computes x where `target` is 1, and max(0, margin - x) where it is -1, for distances x.
    #[track_caller]
    pub fn hinge_embedding_loss(&self, target: &Tensor, margin: f64, reduction: Reduction) -> Result<Tensor> {
        dispatch_in_f32!("hinge_embedding_loss", [self, target], |x, y| x
            .hinge_embedding_loss(&y, margin, reduction));
        let y = target.detach();
        let dissimilar_loss = self.rsub(margin)?.clamp_min(0.0)?.masked_fill(&y.eq(1.0)?, 0.0)?;
        let similar_loss = self.masked_fill(&y.eq(-1.0)?, 0.0)?;
        reduction.apply(&dissimilar_loss.add(&similar_loss)?)
    }

    /// Computes 1 - cos where `target` is 1, and max(0, cos - margin) where it is -1. cos is the cosine of
    /// the angle between rows of `self` and `other`, \[batch, features\] or \[features\].
    #[track_caller]
    pub fn cosine_embedding_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: Reduction,
    ) -> Result<Tensor> {
        const OP: &str = "cosine_embedding_loss";
        // PyTorch's epsilon, which is added to squared norms.
        const EPS: f64 = 1e-12;
        dispatch_in_f32!(OP, [self, other, target], |a, b, y| a
            .cosine_embedding_loss(&b, &y, margin, reduction));
        fail_if!(!matches!(self.rank(), 1 | 2) || other.rank() != self.rank() || target.rank() + 1 != self.rank();
            shape(OP, [self, other, target]),
            "takes two of [batch, features] and targets of [batch], or all without the batch");
        let square = |t: &Tensor| t.square()?.sum([-1], false)?.add(EPS);
        let cos = self.mul(other)?.sum([-1], false)?.div(&square(self)?.mul(&square(other)?)?.sqrt()?)?;
        let y = target.detach();
        let similar_loss = cos.rsub(1.0)?.masked_fill(&y.ne(1.0)?, 0.0)?;
        let dissimilar_loss = cos.sub(margin)?.clamp_min(0.0)?.masked_fill(&y.ne(-1.0)?, 0.0)?;
        reduction.apply(&similar_loss.add(&dissimilar_loss)?)
    }

    /// Computes the mean of max(0, margin - x\[target\] + x\[i\])^p over the classes i except the target,
    /// scaled by the target's `weight`. Shapes are \[batch, classes\] with targets \[batch\], or both without
    /// the batch. A class out of range gives NaN, as in [`cross_entropy`](Self::cross_entropy).
    ///
    /// # Errors
    /// The shapes or types do not fit, or p is neither 1 nor 2.
    #[track_caller]
    pub fn multi_margin_loss(&self, target: &Tensor, options: &MultiMarginLossOptions<'_>) -> Result<Tensor> {
        let &MultiMarginLossOptions { p, margin, weight, reduction } = options;
        operation!(OP = "multi_margin_loss", in_f32 [self, weight], |x, w|
            x.multi_margin_loss(target, &MultiMarginLossOptions { weight: w.as_ref(), ..*options }));
        fail_if!(!matches!(p, 1 | 2); argument(OP), "p is {p}; it must be 1 or 2");
        let (x, y) = batch_scores_and_targets(OP, self, target, false)?;
        let margin_errors = x.sub(&x.gather(1, &y)?)?.add(margin)?.relu()?;
        let margin_errors = if p == 2 { margin_errors.square()? } else { margin_errors };
        let is_target = Tensor::arange(0.0, x.shape()[1] as f64, 1.0, DType::I32, x.device())?.eq(&y)?;
        let missing = y.lt(0)?.logical_or(&y.ge(x.shape()[1] as i64)?)?.squeeze(1)?;
        let losses =
            margin_errors.masked_fill(&is_target, 0.0)?.mean([1], false)?.masked_fill(&missing, f64::NAN)?;
        let weight = weight.map(|w| w.index_select(0, &y.reshape([-1])?)).transpose()?;
        squeeze_unbatched(apply_weight_and_reduce(losses, weight.as_ref(), reduction)?, self, reduction)
    }

    /// Computes the sum of max(0, 1 - x\[j\] + x\[i\]) over labels j and other classes i of an example,
    /// divided by the number of classes. A row of `target` lists labels up to the first negative entry. Both
    /// are \[batch, classes\], or without the batch. A label out of range gives NaN.
    #[track_caller]
    pub fn multilabel_margin_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        operation!(OP = "multilabel_margin_loss", in_f32[self], |x| x
            .multilabel_margin_loss(target, reduction));
        let (x, y) = batch_scores_and_targets(OP, self, target, true)?;
        let classes = x.shape()[1];
        let listed = y.ge(0)?.to_dtype(DType::F32)?.cumprod(1)?;
        let labels = y.masked_fill(&listed.eq(0.0)?, 0)?;
        let missing = labels.ge(classes as i64)?.any([1], false)?;
        let labelled = Tensor::zeros(x.shape(), DType::F32, x.device())?.scatter_add(1, &labels, &listed)?;
        let between = x.unsqueeze(1)?.sub(&x.gather(1, &labels)?.unsqueeze(2)?)?.add(1.0)?.relu()?;
        let counts = listed.unsqueeze(2)?.mul(&labelled.eq(0.0)?.unsqueeze(1)?)?.to_dtype(x.dtype())?;
        let losses = between.mul(&counts)?.sum([1, 2], false)?.div(classes as f64)?;
        let losses = losses.masked_fill(&missing, f64::NAN)?;
        squeeze_unbatched(reduction.apply(&losses)?, self, reduction)
    }

    /// Computes the binary cross-entropy of these logits with `target`, times a `weight` for each class,
    /// averaged over the last dimension.
    #[track_caller]
    pub fn multilabel_soft_margin_loss(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        reduction: Reduction,
    ) -> Result<Tensor> {
        if !amp::is_autocast_enabled() {
            // Under autocast, the loss of each class is f32 anyway, and so is the result.
            dispatch_in_f32!("multilabel_soft_margin_loss", [self, target, weight], |x, y, w| {
                x.multilabel_soft_margin_loss(&y, w.as_ref(), reduction)
            });
        }
        let options = BceWithLogitsOptions { weight, pos_weight: None, reduction: Reduction::None };
        let each = self.binary_cross_entropy_with_logits(target, &options)?;
        reduction.apply(&each.mean([-1], false)?)
    }

    /// Computes max(0, d(a, p) - d(a, n) + margin), with `distance` as d, for these anchors, `positive` and
    /// `negative`.
    ///
    /// # Errors
    /// `distance` fails, or the distances do not broadcast.
    #[track_caller]
    pub fn triplet_margin_with_distance_loss(
        &self,
        positive: &Tensor,
        negative: &Tensor,
        distance: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
        options: &TripletMarginWithDistanceLossOptions,
    ) -> Result<Tensor> {
        let &TripletMarginWithDistanceLossOptions { margin, swap, reduction } = options;
        let (positive_distance, negative_distance) = (distance(self, positive)?, distance(self, negative)?);
        let negative_distance =
            if swap { negative_distance.minimum(&distance(positive, negative)?)? } else { negative_distance };
        reduction.apply(&positive_distance.sub(&negative_distance)?.add(margin)?.clamp_min(0.0)?)
    }
}

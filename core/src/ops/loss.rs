//! PyTorch's losses, composed of differentiable operations.
//!
//! Losses with kernels of their own are in `cross_entropy` and `linear_cross_entropy`; `ctc_loss` and
//! `margin_loss` have the other larger ones. A new loss takes a [`Reduction`] last, or in its options.

pub(crate) mod cross_entropy;
pub(crate) mod ctc_loss;
pub(crate) mod linear_cross_entropy;
pub(crate) mod margin_loss;

use crate::ops::loss::margin_loss::TripletMarginWithDistanceLossOptions;
use crate::ops::prelude::*;

/// Reduction of the elements' losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// No reduction: the losses are returned.
    None,
    /// Mean of the losses.
    #[default]
    Mean,
    /// Sum of the losses.
    Sum,
    /// Sum divided by the first extent of the losses, PyTorch's `batchmean`: the mathematical mean of a
    /// divergence.
    BatchMean,
}

impl Reduction {
    #[track_caller]
    pub(super) fn apply(self, losses: &Tensor) -> Result<Tensor> {
        match self {
            Self::None => Ok(losses.clone()),
            Self::Mean => losses.mean_all(),
            Self::Sum => losses.sum_all(),
            Self::BatchMean => losses.sum_all()?.div(losses.shape().first().copied().unwrap_or(1) as f64),
        }
    }
}

#[track_caller]
pub(super) fn apply_weight_and_reduce(
    losses: Tensor,
    weight: Option<&Tensor>,
    reduction: Reduction,
) -> Result<Tensor> {
    match weight {
        Some(weight) => reduction.apply(&losses.mul(weight)?),
        None => reduction.apply(&losses),
    }
}

with_defaults! {
    /// Options of [`Tensor::nll_loss`].
    #[derive(Clone, Copy, Debug)]
    pub struct NllLossOptions<'a> {
        /// Weight of each class, \[classes\]; `None` for 1.
        pub weight: Option<&'a Tensor> = None,
        /// Class whose examples do not count; -100.
        pub ignore_index: i64 = -100,
        /// Reduction of the examples' losses; mean, weighted by the class weights.
        pub reduction: Reduction = Reduction::Mean,
    }

    /// Options of [`Tensor::binary_cross_entropy_with_logits`].
    #[derive(Clone, Copy, Debug)]
    pub struct BceWithLogitsOptions<'a> {
        /// Factor of each loss, broadcast to the losses; `None` for 1.
        pub weight: Option<&'a Tensor> = None,
        /// Factor of the loss of positives, broadcast to the losses; `None` for 1.
        pub pos_weight: Option<&'a Tensor> = None,
        /// Reduction of the losses; mean.
        pub reduction: Reduction = Reduction::Mean,
    }

    /// Options of [`Tensor::gaussian_nll_loss`].
    #[derive(Clone, Copy, Debug)]
    pub struct GaussianNllLossOptions {
        /// If true, adds the constant term; false.
        pub full: bool = false,
        /// Lower bound of variances; 1e-6.
        pub eps: f64 = 1e-6,
        /// Reduction of the losses; mean.
        pub reduction: Reduction = Reduction::Mean,
    }

    /// Options of [`Tensor::pairwise_distance`].
    #[derive(Clone, Copy, Debug)]
    pub struct PairwiseDistanceOptions {
        /// Order of the norm; 2.
        pub p: f64 = 2.0,
        /// Term added to each difference; 1e-6.
        pub eps: f64 = 1e-6,
        /// If true, keeps the reduced dimension with extent 1; false.
        pub keepdim: bool = false,
    }

    /// Options of [`Tensor::normalize`].
    #[derive(Clone, Copy, Debug)]
    pub struct NormalizeOptions {
        /// Order of the norm; 2.
        pub p: f64 = 2.0,
        /// Lower bound of norms; 1e-12.
        pub eps: f64 = 1e-12,
    }

    /// Options of [`Tensor::triplet_margin_loss`].
    #[derive(Clone, Copy, Debug)]
    pub struct TripletMarginLossOptions {
        /// Difference of the distances, above 0, from which on the loss is 0; 1.
        pub margin: f64 = 1.0,
        /// Order of the norm; 2.
        pub p: f64 = 2.0,
        /// If true, d(a, n) is replaced by d(p, n) where that is less; false.
        pub swap: bool = false,
        /// Reduction of the losses; mean.
        pub reduction: Reduction = Reduction::Mean,
    }
}

impl Tensor {
    /// Computes the negative log-likelihood of `target` classes under these log-probabilities, [batch,
    /// classes, ...] or \[classes\]. A class out of range gives NaN, as in
    /// [`cross_entropy`](Self::cross_entropy).
    #[track_caller]
    pub fn nll_loss(&self, target: &Tensor, options: &NllLossOptions<'_>) -> Result<Tensor> {
        let &NllLossOptions { weight, ignore_index, reduction } = options;
        operation!("nll_loss", in_f32 [self, weight], |x, w|
            x.nll_loss(target, &NllLossOptions { weight: w.as_ref(), ..*options }));
        if !target.dtype().is_int() {
            return Err(Error::not_integers("nll_loss", target.dtype(), "targets are classes, as integers"));
        }
        fail_if!(self.rank() == 0 || target.rank() + 1 != self.rank(); shape("nll_loss", [self, target]),
            "targets have the shape of [batch, classes, ...] without the classes");
        let dim = if self.rank() > 1 { 1 } else { 0 };
        let skipped = Some(ignore_index);
        check_in_range(
            "nll_loss",
            target,
            IndexRange { extent: self.shape()[dim as usize], allows_negative: false, ignored_index: skipped },
        )?;
        let classes = select::cast_index_to_i32("nll_loss", target, skipped)?;
        let ignored = classes.eq(select::ignore_index_to_i32(ignore_index))?;
        let classes = classes.masked_fill(&ignored, 0)?;
        // Ignored positions may select infinite values, so mask them. A class out of range gives NaN.
        let missing = classes.lt(0)?.logical_or(&classes.ge(self.shape()[dim as usize] as f64)?)?;
        let target_scores =
            self.gather(dim, &classes.unsqueeze(dim)?)?.squeeze(dim)?.masked_fill(&ignored, 0.0)?;
        let target_scores = target_scores.masked_fill(&missing, f64::NAN)?;
        let share = match weight {
            Some(weight) => weight.index_select(0, &classes.reshape([-1])?)?.reshape(classes.shape())?,
            None => classes.ones_like()?.to_dtype(self.dtype())?,
        };
        let share = share.masked_fill(&ignored, 0.0)?;
        let losses = target_scores.neg()?.mul(&share)?;
        match reduction {
            Reduction::Mean => losses.sum_all()?.div(&share.sum_all()?),
            other => other.apply(&losses),
        }
    }

    /// Computes the squared differences from `target`, which broadcasts: PyTorch's `mse_loss`. 16-bit differences are
    /// squared and reduced in f32.
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        dispatch_in_f32!("mse_loss", [self, target], |x, y| x.mse_loss(&y, reduction));
        reduction.apply(&self.sub(target)?.square()?)
    }

    /// Computes the absolute differences from `target`, which broadcasts: PyTorch's `l1_loss`.
    #[track_caller]
    pub fn l1_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        dispatch_in_f32!("l1_loss", [self, target], |x, y| x.l1_loss(&y, reduction));
        reduction.apply(&self.sub(target)?.abs()?)
    }

    /// Computes d² / 2 beta for differences d below `beta`, and |d| - beta / 2 above.
    ///
    /// # Errors
    /// The shapes do not broadcast, or `beta` is negative.
    #[track_caller]
    pub fn smooth_l1_loss(&self, target: &Tensor, beta: f64, reduction: Reduction) -> Result<Tensor> {
        dispatch_in_f32!("smooth_l1_loss", [self, target], |x, y| x.smooth_l1_loss(&y, beta, reduction));
        fail_if!(beta < 0.0; argument("smooth_l1_loss"), "beta {beta} is negative");
        if beta == 0.0 {
            return self.l1_loss(target, reduction);
        }
        reduction.apply(&self.huber_elements(target, beta)?.div(beta)?)
    }

    /// Computes d² / 2 for differences d up to `delta`, and delta (|d| - delta / 2) above.
    ///
    /// # Errors
    /// The shapes do not broadcast, or `delta` is not positive.
    #[track_caller]
    pub fn huber_loss(&self, target: &Tensor, delta: f64, reduction: Reduction) -> Result<Tensor> {
        dispatch_in_f32!("huber_loss", [self, target], |x, y| x.huber_loss(&y, delta, reduction));
        fail_if!(delta <= 0.0; argument("huber_loss"), "delta {delta} is not positive");
        reduction.apply(&self.huber_elements(target, delta)?)
    }

    /// Computes the Huber loss without a selection, so that infinite differences have finite gradients.
    #[track_caller]
    fn huber_elements(&self, target: &Tensor, delta: f64) -> Result<Tensor> {
        let d = self.sub(target)?.abs()?;
        let clamped = d.clamp_max(delta)?;
        clamped.mul(&d.sub(&clamped.mul(0.5)?)?)
    }

    /// Computes the cross-entropy of these probabilities, from 0 to 1, with `target`. Logarithms are clamped to at
    /// least -100.
    ///
    /// A value outside 0 to 1 gives NaN. PyTorch refuses it on the CPU, but such a check would make the host wait for
    /// the device. Logits are such values: use
    /// [`binary_cross_entropy_with_logits`](Self::binary_cross_entropy_with_logits) for them.
    ///
    /// # Errors
    /// The shapes differ.
    #[track_caller]
    pub fn binary_cross_entropy(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        reduction: Reduction,
    ) -> Result<Tensor> {
        operation!(OP = "binary_cross_entropy");
        fail_if!(amp::is_autocast_enabled(); argument(OP),
            "is unsafe under autocast, as in PyTorch: the gradient of probabilities overflows 16 bits; take \
                 `binary_cross_entropy_with_logits`, or cast to f32 under `no_autocast`");
        fail_if!(self.shape() != target.shape() || self.dtype() != target.dtype();
            shape(OP, [self, target]), "input and target have one shape and type");
        dispatch_in_f32!(OP, [self, target, weight], |x, y, w| {
            x.binary_cross_entropy(&y, w.as_ref(), reduction)
        });
        let (x, y) = (self.detach(), target.detach());
        let saved = [SavedTensor::input(self), SavedTensor::input(target)];
        let logs = |x: &Tensor| -> Result<(Tensor, Tensor)> {
            Ok((x.log()?.maximum(-100.0)?, x.neg()?.log1p()?.maximum(-100.0)?))
        };
        let (log_x, log_1mx) = logs(&x)?;
        // -(y yes + (1 - y) no)
        let losses = y.sub(1.0)?.mul(&log_1mx)?.sub(&y.mul(&log_x)?)?;
        let losses = autograd::differentiable(OP, losses, &[self, target], move |g, ctx| {
            let (x, y) = (saved[0].unpack(ctx)?, saved[1].unpack(ctx)?);
            let dx = if ctx.needs_input_grad[0] {
                // The lower bound keeps the slope finite at 0 and 1, where the logarithms are clamped.
                let slope = x.mul(&x.rsub(1.0)?)?.maximum(1e-12)?;
                Some(g.mul(&x.sub(&y)?)?.div(&slope)?)
            } else {
                None
            };
            let dy = match (ctx.needs_input_grad[1], ctx.create_graph()) {
                (false, _) => None,
                (true, false) => Some(g.mul(&log_1mx.sub(&log_x)?)?),
                (true, true) => {
                    let (log_x, log_1mx) = logs(&x)?;
                    Some(g.mul(&log_1mx.sub(&log_x)?)?)
                }
            };
            Ok(smallvec![dx, dy])
        });
        apply_weight_and_reduce(losses, weight, reduction)
    }

    /// Computes the cross-entropy of the sigmoids of these logits with `target`.
    #[track_caller]
    pub fn binary_cross_entropy_with_logits(
        &self,
        target: &Tensor,
        options: &BceWithLogitsOptions<'_>,
    ) -> Result<Tensor> {
        let &BceWithLogitsOptions { weight, pos_weight, reduction } = options;
        const OP: &str = "binary_cross_entropy_with_logits";
        dispatch_in_f32!(OP, [self, target, weight, pos_weight], |x, y, weight, pos| {
            let (weight, pos_weight) = (weight.as_ref(), pos.as_ref());
            let options = BceWithLogitsOptions { weight, pos_weight, reduction };
            x.binary_cross_entropy_with_logits(&y, &options)
        });
        let negatives = target.rsub(1.0)?.mul(self)?;
        let log = self.logsigmoid()?;
        let log = match pos_weight {
            Some(p) => p.sub(1.0)?.mul(target)?.add(1.0)?.mul(&log)?,
            None => log,
        };
        apply_weight_and_reduce(negatives.sub(&log)?, weight, reduction)
    }

    /// Computes the Kullback-Leibler divergence of these log-probabilities from `target`: probabilities, or
    /// their logarithms with `log_target`.
    #[track_caller]
    pub fn kl_div(&self, target: &Tensor, log_target: bool, reduction: Reduction) -> Result<Tensor> {
        dispatch_in_f32!("kl_div", [self, target], |x, y| x.kl_div(&y, log_target, reduction));
        let losses = if log_target {
            target.exp()?.mul(&target.sub(self)?)?
        } else {
            target.xlogy(target)?.sub(&target.mul(self)?)?
        };
        reduction.apply(&losses)
    }

    /// Computes the negative log-likelihood of `target` under normal distributions with these means and
    /// variances `var`.
    #[track_caller]
    pub fn gaussian_nll_loss(
        &self,
        target: &Tensor,
        var: &Tensor,
        options: &GaussianNllLossOptions,
    ) -> Result<Tensor> {
        let &GaussianNllLossOptions { full, eps, reduction } = options;
        dispatch_in_f32!("gaussian_nll_loss", [self, target, var], |x, y, var| {
            x.gaussian_nll_loss(&y, &var, options)
        });
        // One variance for each row of the input.
        let per_row = var.rank() + 1 == self.rank() && self.shape().starts_with(var.shape());
        let var = if per_row { var.unsqueeze(-1)? } else { var.clone() };
        // As in PyTorch, the clamp does not change the gradient.
        let clamp_difference = var.detach().maximum(eps)?.sub(&var.detach())?;
        let var = var.add(&clamp_difference)?;
        let losses = var.log()?.add(&self.sub(target)?.square()?.div(&var)?)?.mul(0.5)?;
        let constant = 0.5 * std::f64::consts::TAU.ln();
        reduction.apply(&if full { losses.add(constant)? } else { losses })
    }

    /// Computes ln(1 + e^(-x y)) for targets y of 1 and -1.
    #[track_caller]
    pub fn soft_margin_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        dispatch_in_f32!("soft_margin_loss", [self, target], |x, y| x.soft_margin_loss(&y, reduction));
        reduction.apply(&self.mul(target)?.logsigmoid()?.neg()?)
    }

    /// Computes max(0, margin - target · (`self` - `other`)): a `target` of 1 ranks `self` higher, -1 lower.
    #[track_caller]
    pub fn margin_ranking_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: Reduction,
    ) -> Result<Tensor> {
        dispatch_in_f32!("margin_ranking_loss", [self, other, target], |a, b, y| {
            a.margin_ranking_loss(&b, &y, margin, reduction)
        });
        // Negate first, because unsigned integers then wrap as in PyTorch.
        let margin_errors = target.neg()?.mul(&self.sub(other)?)?.add(margin)?;
        reduction.apply(&margin_errors.clamp_min(0.0)?)
    }

    /// Computes the cosine of the angle between vectors along `dim`. Lengths are clamped to at least `eps`.
    #[track_caller]
    pub fn cosine_similarity(&self, other: &Tensor, dim: isize, eps: f64) -> Result<Tensor> {
        dispatch_in_f32!("cosine_similarity", [self, other], |a, b| a.cosine_similarity(&b, dim, eps));
        let shape =
            crate::tensor::layout::broadcast_shapes("cosine_similarity", &[self.shape(), other.shape()])?;
        let _call = memory::scope::enter_call();
        // As in PyTorch, the clamp of lengths is not recorded: the gradient is that of the length.
        let unit = |t: &Tensor| {
            let t = t.broadcast_to(&shape)?;
            let length = t.norm(2.0, [dim], true)?;
            let missing = length.detach().rsub(eps)?.maximum(0.0)?;
            t.div(&length.add(&missing)?)
        };
        unit(self)?.mul(&unit(other)?)?.sum([dim], false)
    }

    /// Divides vectors along `dim` by their p-norm, or by `eps` if the norm is smaller: PyTorch's `normalize`.
    #[track_caller]
    pub fn normalize(&self, dim: isize, options: &NormalizeOptions) -> Result<Tensor> {
        let &NormalizeOptions { p, eps } = options;
        dispatch_in_f32!("normalize", [self], |x| x.normalize(dim, options));
        let length = self.norm(p, [dim], true)?;
        let is_clamped = length.detach().lt(eps)?;
        self.div(&length.masked_fill(&is_clamped, Operand::from(eps))?)
    }

    /// Computes the p-norm over the last dimension of `self - other + eps`: PyTorch's `pairwise_distance`. The shapes
    /// broadcast.
    #[track_caller]
    pub fn pairwise_distance(&self, other: &Tensor, options: &PairwiseDistanceOptions) -> Result<Tensor> {
        let &PairwiseDistanceOptions { p, eps, keepdim } = options;
        dispatch_in_f32!("pairwise_distance", [self, other], |x, y| x.pairwise_distance(&y, options));
        self.sub(other)?.add(eps)?.norm(p, [-1], keepdim)
    }

    /// Computes the [p-norm](Self::norm) of the difference of `self` and `other`, which broadcast (PyTorch's `dist`).
    #[track_caller]
    pub fn dist(&self, other: &Tensor, p: f64) -> Result<Tensor> {
        dispatch_in_f32!("dist", [self, other], |x, y| x.dist(&y, p));
        self.sub(other)?.norm(p, (), false)
    }

    /// Computes max(0, d(a, p) - d(a, n) + margin), with p-norm distances of these anchors to `positive` and
    /// `negative`.
    ///
    /// # Errors
    /// The shapes do not broadcast, or the margin is not positive.
    #[track_caller]
    pub fn triplet_margin_loss(
        &self,
        positive: &Tensor,
        negative: &Tensor,
        options: &TripletMarginLossOptions,
    ) -> Result<Tensor> {
        let &TripletMarginLossOptions { margin, p, swap, reduction } = options;
        dispatch_in_f32!("triplet_margin_loss", [self, positive, negative], |a, near, far| {
            a.triplet_margin_loss(&near, &far, options)
        });
        fail_if!(margin.is_nan() || margin <= 0.0;
            argument("triplet_margin_loss"), "margin {margin} is not positive");
        let _call = memory::scope::enter_call();
        let norm = PairwiseDistanceOptions { p, ..Default::default() };
        let distance = |a: &Tensor, b: &Tensor| a.pairwise_distance(b, &norm);
        let options = TripletMarginWithDistanceLossOptions { margin, swap, reduction };
        self.triplet_margin_with_distance_loss(positive, negative, distance, &options)
    }
}

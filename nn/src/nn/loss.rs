//! Losses as modules, with PyTorch's names and defaults. Each calls the tensor method of its name on the
//! first input.

use super::Module;
use crate::{Result, Tensor};
use forebay_core::ops::{
    BceWithLogitsOptions, CrossEntropyOptions, CtcLossOptions, GaussianNllLossOptions,
    MultiMarginLossOptions, NllLossOptions, PairwiseDistanceOptions, PoissonNllLossOptions, Reduction,
    TripletMarginLossOptions,
};

/// Defines losses of inputs and a target. The fields are the arguments of the method, with PyTorch's
/// defaults. A weight for each class or element is a buffer, as in PyTorch.
macro_rules! loss_layers {
    ($derive:tt $($(#[$doc:meta])* $loss:ident { $($field:ident: $ty:ty = $default:expr),* $(,)? } = |$this:ident $(, $x:ident)*| $call:expr;)*) => {$(
        with_defaults! {
            $(#[$doc])*
            #[derive $derive]
            pub struct $loss {
                $(
                    #[doc = concat!("Argument or option of the tensor method. The default is `", stringify!($default), "`.")]
                    pub $field: $ty = $default,
                )*
                /// Reduction of the losses; their mean.
                #[module(skip)]
                pub reduction: Reduction = Reduction::Mean,
            }
        }

        impl $loss {
            /// Computes the loss: a scalar, or one value for each element or example with [`Reduction::None`].
            #[track_caller]
            pub fn forward(&self $(, $x: &Tensor)*) -> Result<Tensor> {
                let $this = self;
                $call
            }
        }
    )*};
}

loss_layers! {
    (Clone, Copy, Debug, PartialEq, Module)
    /// Squared differences: [`mse_loss`](Tensor::mse_loss).
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, ops::Reduction, tensor::Tensor};
    /// # use forebay_nn::nn::MseLoss;
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::zeros(&[4, 3], DType::F32, &device)?;
    /// let y = Tensor::ones(&[4, 3], DType::F32, &device)?;
    /// assert_eq!(MseLoss::default().forward(&x, &y)?.rank(), 0);
    /// assert_eq!(MseLoss { reduction: Reduction::None }.forward(&x, &y)?.shape(), [4, 3]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    MseLoss {} = |this, x, target| x.mse_loss(target, this.reduction);
    /// Absolute differences: [`l1_loss`](Tensor::l1_loss).
    L1Loss {} = |this, x, target| x.l1_loss(target, this.reduction);
    /// Squared differences near 0, absolute differences elsewhere:
    /// [`smooth_l1_loss`](Tensor::smooth_l1_loss).
    SmoothL1Loss { beta: f64 = 1.0 } = |this, x, target| x.smooth_l1_loss(target, this.beta, this.reduction);
    /// Squared differences near 0, absolute differences elsewhere: [`huber_loss`](Tensor::huber_loss).
    HuberLoss { delta: f64 = 1.0 } = |this, x, target| x.huber_loss(target, this.delta, this.reduction);
    /// Kullback-Leibler divergence from log-probabilities: [`kl_div`](Tensor::kl_div). `BatchMean` gives the
    /// mathematical mean.
    KlDivLoss { log_target: bool = false } = |this, x, target| x.kl_div(target, this.log_target, this.reduction);
    /// Negative log-likelihood of Poisson counts: [`poisson_nll_loss`](Tensor::poisson_nll_loss).
    PoissonNllLoss { log_input: bool = true, full: bool = false, eps: f64 = 1e-8 } =
        |this, x, target| {
            let &Self { log_input, full, eps, reduction } = this;
            x.poisson_nll_loss(target, &PoissonNllLossOptions { log_input, full, eps, reduction })
        };
    /// Negative log-likelihood of normal distributions with variances:
    /// [`gaussian_nll_loss`](Tensor::gaussian_nll_loss).
    GaussianNllLoss { full: bool = false, eps: f64 = 1e-6 } =
        |this, x, target, var| {
            let &Self { full, eps, reduction } = this;
            x.gaussian_nll_loss(target, var, &GaussianNllLossOptions { full, eps, reduction })
        };
    /// Logistic loss of targets 1 and -1: [`soft_margin_loss`](Tensor::soft_margin_loss).
    SoftMarginLoss {} = |this, x, target| x.soft_margin_loss(target, this.reduction);
    /// Ranking loss of which of two inputs is larger: [`margin_ranking_loss`](Tensor::margin_ranking_loss).
    MarginRankingLoss { margin: f64 = 0.0 } =
        |this, x, other, target| x.margin_ranking_loss(other, target, this.margin, this.reduction);
    /// Hinge loss of distances, small for target 1 and large for -1:
    /// [`hinge_embedding_loss`](Tensor::hinge_embedding_loss).
    HingeEmbeddingLoss { margin: f64 = 1.0 } =
        |this, x, target| x.hinge_embedding_loss(target, this.margin, this.reduction);
    /// Loss of the cosine between vectors, similar or dissimilar:
    /// [`cosine_embedding_loss`](Tensor::cosine_embedding_loss).
    CosineEmbeddingLoss { margin: f64 = 0.0 } =
        |this, x, other, target| x.cosine_embedding_loss(other, target, this.margin, this.reduction);
    /// Loss of vectors that should be nearer to a positive than to a negative one:
    /// [`triplet_margin_loss`](Tensor::triplet_margin_loss).
    TripletMarginLoss { margin: f64 = 1.0, p: f64 = 2.0, swap: bool = false } =
        |this, x, positive, negative| {
            let &Self { margin, p, swap, reduction } = this;
            x.triplet_margin_loss(positive, negative, &TripletMarginLossOptions { margin, p, swap, reduction })
        };
    /// Margin loss of lists of labels: [`multilabel_margin_loss`](Tensor::multilabel_margin_loss).
    MultiLabelMarginLoss {} = |this, x, target| x.multilabel_margin_loss(target, this.reduction);
}

loss_layers! {
    (Clone, Debug, Module)
    /// Cross-entropy of logits and classes, or of logits and class probabilities:
    /// [`cross_entropy`](Tensor::cross_entropy).
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::CrossEntropyLoss;
    /// # let device = Device::null(Default::default());
    /// let loss = CrossEntropyLoss { label_smoothing: 0.1, ..Default::default() };
    /// let classes = Tensor::from_slice(&[1i64, 0, 9, 3], &[4], &device)?;
    /// assert_eq!(loss.forward(&Tensor::zeros(&[4, 10], DType::F32, &device)?, &classes)?.rank(), 0);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    CrossEntropyLoss { weight: Option<Tensor> = None, ignore_index: i64 = -100, label_smoothing: f64 = 0.0 } = |this, x, target| {
        let (weight, ignore_index, label_smoothing) = (this.weight.as_ref(), this.ignore_index, this.label_smoothing);
        let reduction = this.reduction;
        x.cross_entropy_with(target, &CrossEntropyOptions { weight, ignore_index, label_smoothing, reduction, ..CrossEntropyOptions::default() })
    };
    /// Negative log-likelihood of classes from log-probabilities: [`nll_loss`](Tensor::nll_loss).
    NllLoss { weight: Option<Tensor> = None, ignore_index: i64 = -100 } =
        |this, x, target| {
            let &Self { ref weight, ignore_index, reduction } = this;
            x.nll_loss(target, &NllLossOptions { weight: weight.as_ref(), ignore_index, reduction })
        };
    /// Binary cross-entropy of probabilities and targets of 0 to 1:
    /// [`binary_cross_entropy`](Tensor::binary_cross_entropy).
    BceLoss { weight: Option<Tensor> = None } = |this, x, target| x.binary_cross_entropy(target, this.weight.as_ref(), this.reduction);
    /// Binary cross-entropy of logits and targets of 0 to 1:
    /// [`binary_cross_entropy_with_logits`](Tensor::binary_cross_entropy_with_logits).
    BceWithLogitsLoss { weight: Option<Tensor> = None, pos_weight: Option<Tensor> = None } = |this, x, target| {
        let (weight, pos_weight) = (this.weight.as_ref(), this.pos_weight.as_ref());
        let options = BceWithLogitsOptions { weight, pos_weight, reduction: this.reduction };
        x.binary_cross_entropy_with_logits(target, &options)
    };
    /// Binary cross-entropy of logits and several labels:
    /// [`multilabel_soft_margin_loss`](Tensor::multilabel_soft_margin_loss).
    MultiLabelSoftMarginLoss { weight: Option<Tensor> = None } =
        |this, x, target| x.multilabel_soft_margin_loss(target, this.weight.as_ref(), this.reduction);
    /// Margin loss of scores and classes: [`multi_margin_loss`](Tensor::multi_margin_loss).
    MultiMarginLoss { weight: Option<Tensor> = None, p: i32 = 1, margin: f64 = 1.0 } =
        |this, x, target| {
            let &Self { ref weight, p, margin, reduction } = this;
            x.multi_margin_loss(target, &MultiMarginLossOptions { weight: weight.as_ref(), p, margin, reduction })
        };
}

/// Connectionist temporal classification, for label sequences without alignment:
/// [`ctc_loss`](Tensor::ctc_loss).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Module)]
pub struct CtcLoss {
    /// Index of the blank class; 0.
    pub blank: usize,
    /// Reduction of the losses; their mean, each divided by its target length.
    #[module(skip)]
    pub reduction: Reduction,
    /// If true, an infinite loss (an input too short for its target) counts as 0; false.
    pub zero_infinity: bool,
}

impl CtcLoss {
    /// Computes the loss of log-probabilities \[steps, batch, classes\] with labels \[batch, longest\]: see
    /// [`ctc_loss`](Tensor::ctc_loss).
    #[track_caller]
    pub fn forward(
        &self,
        log_probs: &Tensor,
        targets: &Tensor,
        input_lengths: &Tensor,
        target_lengths: &Tensor,
    ) -> Result<Tensor> {
        let Self { blank, reduction, zero_infinity } = *self;
        log_probs.ctc_loss(&CtcLossOptions {
            targets,
            input_lengths,
            target_lengths,
            blank,
            reduction,
            zero_infinity,
        })
    }
}

with_defaults! {
    /// Cosine of the angle between vectors: [`cosine_similarity`](Tensor::cosine_similarity).
    #[derive(Clone, Copy, Debug, PartialEq, Module)]
    pub struct CosineSimilarity {
        /// Dimension of the vectors; 1.
        pub dim: isize = 1,
        /// Lower bound of the length; 1e-8.
        pub eps: f64 = 1e-8,
    }
}

impl CosineSimilarity {
    /// Returns one cosine for each pair of vectors, which broadcast.
    #[track_caller]
    pub fn forward(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        a.cosine_similarity(b, self.dim, self.eps)
    }
}

with_defaults! {
    /// p-norm of the difference of vectors: [`pairwise_distance`](Tensor::pairwise_distance).
    #[derive(Clone, Copy, Debug, PartialEq, Module)]
    pub struct PairwiseDistance {
        /// Exponent of the norm; 2.
        pub p: f64 = 2.0,
        /// Term added to each difference; 1e-6.
        pub eps: f64 = 1e-6,
        /// If true, keeps the reduced dimension with extent 1; false.
        pub keepdim: bool = false,
    }
}

impl PairwiseDistance {
    /// Returns one distance for each pair of vectors, which broadcast, over the last dimension.
    #[track_caller]
    pub fn forward(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let &Self { p, eps, keepdim } = self;
        a.pairwise_distance(b, &PairwiseDistanceOptions { p, eps, keepdim })
    }
}

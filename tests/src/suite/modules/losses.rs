//! Loss modules.

use forebay::error::Result as CoreResult;
use forebay::nn::{
    AdaptiveLogSoftmaxWithLoss, BceLoss, BceWithLogitsLoss, CosineEmbeddingLoss, CosineSimilarity,
    CrossEntropyLoss, CtcLoss, GaussianNllLoss, HingeEmbeddingLoss, HuberLoss, KlDivLoss, L1Loss,
    MarginRankingLoss, MseLoss, MultiLabelMarginLoss, MultiLabelSoftMarginLoss, MultiMarginLoss, NllLoss,
    PairwiseDistance, PoissonNllLoss, SmoothL1Loss, SoftMarginLoss, TripletMarginLoss,
};
use forebay::ops::{Reduction, TripletMarginWithDistanceLossOptions};
use forebay::tensor::Tensor;

use super::{ModuleCase, cases, single};

/// Weights of five classes, which the case's state replaces.
fn weight(c: &ModuleCase<'_>) -> CoreResult<Option<Tensor>> {
    Ok(Some(Tensor::ones([5], c.dtype, c.device)?))
}

cases! {
    "adaptive_log_softmax": |c| AdaptiveLogSoftmaxWithLoss::new(6, 11, &[3, 7], 2.0, false, c.device), |m, x| {
        let (out, loss) = m.forward(&x[0], &x[1])?;
        Ok(vec![out, loss])
    };
    "adaptive_log_softmax_bias": |c| AdaptiveLogSoftmaxWithLoss::new(6, 11, &[3, 7, 9], 2.0, true, c.device), |m, x| {
        let (out, loss) = m.forward(&x[0], &x[1])?;
        let row = x[0].unsqueeze(0)?;
        Ok(vec![out, loss, m.log_prob(&row)?, m.predict(&row)?])
    };
    "mse_loss": |_| Ok(MseLoss::default()), |m, x| single(m.forward(&x[0], &x[1]));
    "l1_loss": |_| Ok(L1Loss { reduction: Reduction::Sum }), |m, x| single(m.forward(&x[0], &x[1]));
    "smooth_l1_loss": |_| Ok(SmoothL1Loss { beta: 0.6, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1]));
    "huber_loss": |_| Ok(HuberLoss { delta: 0.8, reduction: Reduction::None }), |m, x| single(m.forward(&x[0], &x[1]));
    "cross_entropy_loss": |c| {
        Ok(CrossEntropyLoss { weight: weight(c)?, ignore_index: 4, label_smoothing: 0.1, ..Default::default() })
    }, |m, x| single(m.forward(&x[0], &x[1]));
    "nll_loss": |c| Ok(NllLoss { weight: weight(c)?, ignore_index: 0, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1]));
    "nll_loss_sum": |_| Ok(NllLoss { reduction: Reduction::Sum, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1]));
    "bce_loss": |_| Ok(BceLoss::default()), |m, x| single(m.forward(&x[0], &x[1]));
    "bce_with_logits_loss": |c| Ok(BceWithLogitsLoss { weight: weight(c)?, pos_weight: weight(c)?, ..Default::default() }),
        |m, x| single(m.forward(&x[0], &x[1]));
    "kl_div_loss": |_| Ok(KlDivLoss { reduction: Reduction::BatchMean, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1]));
    "kl_div_loss_log": |_| Ok(KlDivLoss { log_target: true, reduction: Reduction::Sum }), |m, x| single(m.forward(&x[0], &x[1]));
    "poisson_nll_loss": |_| Ok(PoissonNllLoss { full: true, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1]));
    "poisson_nll_loss_plain": |_| Ok(PoissonNllLoss { log_input: false, reduction: Reduction::None, ..Default::default() }),
        |m, x| single(m.forward(&x[0], &x[1]));
    "gaussian_nll_loss": |_| Ok(GaussianNllLoss { full: true, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1], &x[2]));
    "soft_margin_loss": |_| Ok(SoftMarginLoss::default()), |m, x| single(m.forward(&x[0], &x[1]));
    "margin_ranking_loss": |_| Ok(MarginRankingLoss { margin: 0.3, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1], &x[2]));
    "hinge_embedding_loss": |_| Ok(HingeEmbeddingLoss { margin: 0.8, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1]));
    "cosine_embedding_loss": |_| Ok(CosineEmbeddingLoss { margin: 0.1, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1], &x[2]));
    "cosine_embedding_loss_one": |_| Ok(CosineEmbeddingLoss { reduction: Reduction::None, ..Default::default() }),
        |m, x| single(m.forward(&x[0], &x[1], &x[2]));
    "triplet_margin_loss": |_| Ok(TripletMarginLoss { margin: 1.5, swap: true, ..Default::default() }),
        |m, x| single(m.forward(&x[0], &x[1], &x[2]));
    "triplet_margin_with_distance_loss": |_| Ok(()), |_, x| {
        let distance = |a: &Tensor, b: &Tensor| a.sub(b)?.abs()?.sum([-1], false);
        single(x[0].triplet_margin_with_distance_loss(&x[1], &x[2], distance, &TripletMarginWithDistanceLossOptions { margin: 2.0, ..Default::default() }))
    };
    "multi_margin_loss": |c| Ok(MultiMarginLoss { weight: weight(c)?, margin: 0.7, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1]));
    "multi_margin_loss_squares": |_| Ok(MultiMarginLoss { p: 2, reduction: Reduction::None, ..Default::default() }),
        |m, x| single(m.forward(&x[0], &x[1]));
    "multi_margin_loss_one": |_| Ok(MultiMarginLoss::default()), |m, x| single(m.forward(&x[0], &x[1]));
    "multilabel_margin_loss": |_| Ok(MultiLabelMarginLoss { reduction: Reduction::None }), |m, x| single(m.forward(&x[0], &x[1]));
    "multilabel_margin_loss_one": |_| Ok(MultiLabelMarginLoss::default()), |m, x| single(m.forward(&x[0], &x[1]));
    "multilabel_soft_margin_loss": |c| Ok(MultiLabelSoftMarginLoss { weight: weight(c)?, ..Default::default() }),
        |m, x| single(m.forward(&x[0], &x[1]));
    "cosine_similarity": |_| Ok(CosineSimilarity::default()), |m, x| single(m.forward(&x[0], &x[1]));
    "pairwise_distance": |_| Ok(PairwiseDistance { p: 3.0, keepdim: true, ..Default::default() }), |m, x| single(m.forward(&x[0], &x[1]));
    "ctc_loss": |_| Ok(CtcLoss::default()), |m, x| single(m.forward(&x[0].log_softmax(-1)?, &x[1], &x[2], &x[3]));
    "ctc_loss_none": |_| Ok(CtcLoss { blank: 2, reduction: Reduction::None, zero_infinity: true }),
        |m, x| single(m.forward(&x[0].log_softmax(-1)?, &x[1], &x[2], &x[3]));
}

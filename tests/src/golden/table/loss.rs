//! Loss functions.

use anyhow::Result;
use forebay::ops::{
    BceWithLogitsOptions, CrossEntropyOptions, GaussianNllLossOptions, NllLossOptions, NormalizeOptions,
    Reduction, TripletMarginLossOptions,
};

use super::super::args::Args;
use super::{OpTable, single};

fn reduction(a: &Args<'_>) -> Result<Reduction> {
    Ok(match a.string(usize::MAX, "reduction", "mean") {
        "none" => Reduction::None,
        "mean" => Reduction::Mean,
        "sum" => Reduction::Sum,
        "batchmean" => Reduction::BatchMean,
        other => anyhow::bail!("reduction {other}"),
    })
}

const NAMED: usize = usize::MAX;

pub(super) fn register(table: &mut OpTable) {
    table.register("nn.functional.cross_entropy", |a| {
        let options = CrossEntropyOptions {
            weight: a.opt_tensor(2, "weight"),
            ignore_index: a.int(NAMED, "ignore_index", -100)?,
            reduction: reduction(a)?,
            label_smoothing: a.float(NAMED, "label_smoothing", 0.0)?,
            in_place: false,
        };
        single(a.tensor(0)?.cross_entropy_with(a.tensor(1)?, &options))
    });
    table.register("nn.functional.nll_loss", |a| {
        let ignore = a.int(NAMED, "ignore_index", -100)?;
        single(a.tensor(0)?.nll_loss(
            a.tensor(1)?,
            &NllLossOptions {
                weight: a.opt_tensor(2, "weight"),
                ignore_index: ignore,
                reduction: reduction(a)?,
            },
        ))
    });
    table.register("nn.functional.mse_loss", |a| single(a.tensor(0)?.mse_loss(a.tensor(1)?, reduction(a)?)));
    table.register("nn.functional.l1_loss", |a| single(a.tensor(0)?.l1_loss(a.tensor(1)?, reduction(a)?)));
    table.register("nn.functional.smooth_l1_loss", |a| {
        single(a.tensor(0)?.smooth_l1_loss(a.tensor(1)?, a.float(NAMED, "beta", 1.0)?, reduction(a)?))
    });
    table.register("nn.functional.huber_loss", |a| {
        single(a.tensor(0)?.huber_loss(a.tensor(1)?, a.float(NAMED, "delta", 1.0)?, reduction(a)?))
    });
    table.register("nn.functional.binary_cross_entropy", |a| {
        single(a.tensor(0)?.binary_cross_entropy(a.tensor(1)?, a.opt_tensor(2, "weight"), reduction(a)?))
    });
    table.register("nn.functional.binary_cross_entropy_with_logits", |a| {
        let (weight, positive) = (a.opt_tensor(2, "weight"), a.opt_tensor(NAMED, "pos_weight"));
        single(a.tensor(0)?.binary_cross_entropy_with_logits(
            a.tensor(1)?,
            &BceWithLogitsOptions { weight, pos_weight: positive, reduction: reduction(a)? },
        ))
    });
    table.register("nn.functional.kl_div", |a| {
        single(a.tensor(0)?.kl_div(a.tensor(1)?, a.flag(NAMED, "log_target", false), reduction(a)?))
    });
    table.register("nn.functional.gaussian_nll_loss", |a| {
        let (full, eps) = (a.flag(NAMED, "full", false), a.float(NAMED, "eps", 1e-6)?);
        single(a.tensor(0)?.gaussian_nll_loss(
            a.tensor(1)?,
            a.tensor(2)?,
            &GaussianNllLossOptions { full, eps, reduction: reduction(a)? },
        ))
    });
    table.register("nn.functional.soft_margin_loss", |a| {
        single(a.tensor(0)?.soft_margin_loss(a.tensor(1)?, reduction(a)?))
    });
    table.register("nn.functional.margin_ranking_loss", |a| {
        single(a.tensor(0)?.margin_ranking_loss(
            a.tensor(1)?,
            a.tensor(2)?,
            a.float(NAMED, "margin", 0.0)?,
            reduction(a)?,
        ))
    });
    table.register("nn.functional.triplet_margin_loss", |a| {
        let (margin, p) = (a.float(NAMED, "margin", 1.0)?, a.float(NAMED, "p", 2.0)?);
        single(a.tensor(0)?.triplet_margin_loss(
            a.tensor(1)?,
            a.tensor(2)?,
            &TripletMarginLossOptions {
                margin,
                p,
                swap: a.flag(NAMED, "swap", false),
                reduction: reduction(a)?,
            },
        ))
    });
    table.register("nn.functional.cosine_similarity", |a| {
        single(a.tensor(0)?.cosine_similarity(
            a.tensor(1)?,
            a.int(2, "dim", 1)? as isize,
            a.float(3, "eps", 1e-8)?,
        ))
    });
    table.register("nn.functional.normalize", |a| {
        single(a.tensor(0)?.normalize(
            a.int(2, "dim", 1)? as isize,
            &NormalizeOptions { p: a.float(1, "p", 2.0)?, eps: a.float(3, "eps", 1e-12)? },
        ))
    });
}

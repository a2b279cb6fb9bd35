//! Losses.

use anyhow::Result;
use forebay::ops::{CrossEntropy, Reduction};

use super::super::args::Args;
use super::{Table, one};

fn reduction(a: &Args<'_>) -> Result<Reduction> {
    Ok(match a.s(usize::MAX, "reduction", "mean") {
        "none" => Reduction::None,
        "mean" => Reduction::Mean,
        "sum" => Reduction::Sum,
        "batchmean" => Reduction::BatchMean,
        other => anyhow::bail!("reduction {other}"),
    })
}

const NAMED: usize = usize::MAX;

pub(super) fn register(table: &mut Table) {
    table.op("nn.functional.cross_entropy", |a| {
        let options = CrossEntropy {
            weight: a.opt_t(2, "weight"),
            ignore_index: a.i(NAMED, "ignore_index", -100)?,
            reduction: reduction(a)?,
            label_smoothing: a.f(NAMED, "label_smoothing", 0.0)?,
            in_place: false,
        };
        one(a.t(0)?.cross_entropy_with(a.t(1)?, &options))
    });
    table.op("nn.functional.nll_loss", |a| {
        let ignore = a.i(NAMED, "ignore_index", -100)?;
        one(a.t(0)?.nll_loss(a.t(1)?, a.opt_t(2, "weight"), ignore, reduction(a)?))
    });
    table.op("nn.functional.mse_loss", |a| one(a.t(0)?.mse_loss(a.t(1)?, reduction(a)?)));
    table.op("nn.functional.l1_loss", |a| one(a.t(0)?.l1_loss(a.t(1)?, reduction(a)?)));
    table.op("nn.functional.smooth_l1_loss", |a| {
        one(a.t(0)?.smooth_l1_loss(a.t(1)?, a.f(NAMED, "beta", 1.0)?, reduction(a)?))
    });
    table.op("nn.functional.huber_loss", |a| {
        one(a.t(0)?.huber_loss(a.t(1)?, a.f(NAMED, "delta", 1.0)?, reduction(a)?))
    });
    table.op("nn.functional.binary_cross_entropy", |a| {
        one(a.t(0)?.binary_cross_entropy(a.t(1)?, a.opt_t(2, "weight"), reduction(a)?))
    });
    table.op("nn.functional.binary_cross_entropy_with_logits", |a| {
        let (weight, positive) = (a.opt_t(2, "weight"), a.opt_t(NAMED, "pos_weight"));
        one(a.t(0)?.binary_cross_entropy_with_logits(a.t(1)?, weight, positive, reduction(a)?))
    });
    table.op("nn.functional.kl_div", |a| {
        one(a.t(0)?.kl_div(a.t(1)?, a.b(NAMED, "log_target", false), reduction(a)?))
    });
    table.op("nn.functional.gaussian_nll_loss", |a| {
        let (full, eps) = (a.b(NAMED, "full", false), a.f(NAMED, "eps", 1e-6)?);
        one(a.t(0)?.gaussian_nll_loss(a.t(1)?, a.t(2)?, full, eps, reduction(a)?))
    });
    table.op("nn.functional.soft_margin_loss", |a| one(a.t(0)?.soft_margin_loss(a.t(1)?, reduction(a)?)));
    table.op("nn.functional.margin_ranking_loss", |a| {
        one(a.t(0)?.margin_ranking_loss(a.t(1)?, a.t(2)?, a.f(NAMED, "margin", 0.0)?, reduction(a)?))
    });
    table.op("nn.functional.triplet_margin_loss", |a| {
        let (margin, p) = (a.f(NAMED, "margin", 1.0)?, a.f(NAMED, "p", 2.0)?);
        one(a.t(0)?.triplet_margin_loss(
            a.t(1)?,
            a.t(2)?,
            margin,
            p,
            a.b(NAMED, "swap", false),
            reduction(a)?,
        ))
    });
    table.op("nn.functional.cosine_similarity", |a| {
        one(a.t(0)?.cosine_similarity(a.t(1)?, a.i(2, "dim", 1)? as isize, a.f(3, "eps", 1e-8)?))
    });
    table.op("nn.functional.normalize", |a| {
        one(a.t(0)?.normalize(a.f(1, "p", 2.0)?, a.i(2, "dim", 1)? as isize, a.f(3, "eps", 1e-12)?))
    });
}

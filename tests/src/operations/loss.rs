//! Losses and distances of rows.

use anyhow::Context as _;

use super::prelude::*;

/// Returns one sign for each row.
fn row_signs(x: &Tensor) -> Result<Tensor> {
    Tensor::from_slice(&[1f32, -1.0, 1.0], [3], x.device())?.to_dtype(x.dtype())
}

pub(super) fn reduction(a: &Args<'_>) -> anyhow::Result<Reduction> {
    Ok(match a.string(NAMED, "reduction", "mean") {
        "none" => Reduction::None,
        "mean" => Reduction::Mean,
        "sum" => Reduction::Sum,
        "batchmean" => Reduction::BatchMean,
        other => anyhow::bail!("reduction {other}"),
    })
}

/// Returns the options of a cross-entropy, whose class weights are at a position or named.
fn cross_entropy_options<'a>(a: &'a Args<'_>, weight: usize) -> anyhow::Result<CrossEntropyOptions<'a>> {
    Ok(CrossEntropyOptions {
        weight: a.opt_tensor(weight, "weight"),
        ignore_index: a.int(NAMED, "ignore_index", -100)?,
        reduction: reduction(a)?,
        label_smoothing: a.float(NAMED, "label_smoothing", 0.0)?,
        in_place: false,
    })
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(cross_entropy(t1)))
        .case(
            smooth("cross_entropy", &[Signed(&[6, 5]), Index(&[6], 5)], |x| x[0].cross_entropy(&x[1]))
                .with_bench_inputs(&[Signed(&[2048, 32000]), Index(&[2048], 32000)]),
        )
        .golden(|a| single(a.tensor(0)?.cross_entropy_with(a.tensor(1)?, &cross_entropy_options(a, 2)?)));
    ops.add(method!(nll_loss(
        t1,
        NllLossOptions { weight: maybe2, ignore_index: int64, reduction: reduction }
    )))
    .case(
        smooth("nll_loss", &[Signed(&[6, 5]), Index(&[6], 5)], |x| x[0].nll_loss(&x[1], &Default::default()))
            .with_bytes(|x, y| cost::bytes(&x[1]) + cost::bytes(y))
            .with_bench_inputs(&[Signed(&[2048, 32000]), Index(&[2048], 32000)]),
    )
    .golden(|a| {
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
    ops.add(method!(mse_loss(t1, reduction)))
        .case(
            smooth("mse_loss", &[Signed(S), Positive(S)], |x| x[0].mse_loss(&x[1], Reduction::Mean))
                .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        )
        .golden(|a| single(a.tensor(0)?.mse_loss(a.tensor(1)?, reduction(a)?)));
    ops.add(method!(linear_cross_entropy(t1, t2, cross_entropy)))
        .case(
            smooth("linear_cross_entropy", &[Signed(&[2, 3, 4]), Signed(&[10, 4])], |x| {
                let classes = Tensor::from_slice(&[1i32, 9, 0, 3, -100, 4], [2, 3], x[0].device())?;
                x[0].linear_cross_entropy(&x[1], &classes, &CrossEntropyOptions::default())
            })
            .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[1])),
        )
        .case(
            smooth("linear_cross_entropy of weighted classes", &[Signed(&[4, 4]), Signed(&[5, 4])], |x| {
                let classes = Tensor::from_slice(&[1i32, 3, 0, 2], [4], x[0].device())?;
                let weight = Tensor::from_slice(&[0.5f32, 1.0, 2.0, 0.25, 1.5], [5], x[0].device())?;
                let options = CrossEntropyOptions {
                    weight: Some(&weight),
                    label_smoothing: 0.1,
                    ..CrossEntropyOptions::default()
                };
                x[0].linear_cross_entropy(&x[1], &classes, &options)
            })
            .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[1])),
        )
        .golden(|a| {
            let (x, weight, target) = (a.tensor(0)?, a.tensor(1)?, a.tensor(2)?);
            let (options, bias) = (cross_entropy_options(a, NAMED)?, a.opt_tensor(3, "linear_bias"));
            let is_fused = bias.is_none()
                && x.rank() == 2
                && weight.rank() == 2
                && target.dtype().is_int()
                && options.reduction != Reduction::None;
            if is_fused {
                return single(x.linear_cross_entropy(weight, target, &options));
            }
            // PyTorch's other forms: a bias, one example, several labels of an example, probabilities.
            let (&features, out) = weight.shape().split_last().context("a weight without dimensions")?;
            let bias = bias.map(|bias| bias.reshape([-1])).transpose()?;
            let weight = weight.reshape([out.iter().product(), features])?;
            let shape = [&x.shape()[..x.rank() - 1], out].concat();
            single(x.linear(&weight, bias.as_ref())?.reshape(shape)?.cross_entropy_with(target, &options))
        });
    ops.add(method!(l1_loss(t1, reduction)))
        .case(
            smooth("l1_loss", &[Signed(S), Positive(S)], |x| x[0].l1_loss(&x[1], Reduction::Sum))
                .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        )
        .golden(|a| single(a.tensor(0)?.l1_loss(a.tensor(1)?, reduction(a)?)));
    ops.add(method!(huber_loss(t1, float, reduction)))
        .case(
            smooth("huber_loss", &[Signed(S), Positive(S)], |x| x[0].huber_loss(&x[1], 0.7, Reduction::Mean))
                .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        )
        .golden(|a| {
            single(a.tensor(0)?.huber_loss(a.tensor(1)?, a.float(NAMED, "delta", 1.0)?, reduction(a)?))
        });
    ops.add(method!(binary_cross_entropy_with_logits(
        t1,
        BceWithLogitsOptions { weight: maybe2, pos_weight: maybe3, reduction: reduction }
    )))
    .case(
        smooth("binary_cross_entropy_with_logits", &[Signed(S), Bounded(S)], |x| {
            x[0].binary_cross_entropy_with_logits(&x[1], &Default::default())
        })
        .with_bench_inputs(&[Signed(&[4096, 4096]), Bounded(&[4096, 4096])]),
    )
    .golden(|a| {
        let (weight, positive) = (a.opt_tensor(2, "weight"), a.opt_tensor(NAMED, "pos_weight"));
        single(a.tensor(0)?.binary_cross_entropy_with_logits(
            a.tensor(1)?,
            &BceWithLogitsOptions { weight, pos_weight: positive, reduction: reduction(a)? },
        ))
    });
    ops.add(method!(binary_cross_entropy(t1, maybe2, reduction)))
        .case(smooth("binary_cross_entropy", &[Signed(S), Bounded(S)], |x| {
            x[0].sigmoid()?.binary_cross_entropy(&x[1].sigmoid()?, None, Reduction::Mean)
        }))
        .golden(|a| {
            single(a.tensor(0)?.binary_cross_entropy(a.tensor(1)?, a.opt_tensor(2, "weight"), reduction(a)?))
        });
    ops.add(method!(cross_entropy_with(t1, cross_entropy))).case(smooth(
        "cross_entropy_with",
        &[Signed(&[4, 5, 2]), Positive(&[4, 5, 2])],
        |x| {
            let options = CrossEntropyOptions {
                label_smoothing: 0.2,
                reduction: Reduction::Sum,
                ..CrossEntropyOptions::default()
            };
            x[0].cross_entropy_with(&x[1], &options)
        },
    ));
    ops.add(method!(kl_div(t1, flag, reduction)))
        .case(
            smooth("kl_div", &[Signed(S), Positive(S)], |x| x[0].kl_div(&x[1], false, Reduction::Sum))
                .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        )
        .golden(|a| {
            single(a.tensor(0)?.kl_div(a.tensor(1)?, a.flag(NAMED, "log_target", false), reduction(a)?))
        });
    ops.add(method!(cosine_similarity(t1, int, float)))
        .case(
            smooth("cosine_similarity", &[Signed(S), Positive(S)], |x| {
                x[0].cosine_similarity(&x[1], 1, 1e-8)
            })
            .with_tolerances(case::ONE_ROUNDING)
            .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])])
            .with_batched_inputs(3),
        )
        .golden(|a| {
            single(a.tensor(0)?.cosine_similarity(
                a.tensor(1)?,
                a.dim(2, "dim", 1)?,
                a.float(3, "eps", 1e-8)?,
            ))
        });
    ops.add(method!(multi_margin_loss(
        t1,
        MultiMarginLossOptions { p: int32, margin: float, weight: maybe2, reduction: reduction }
    )))
    .case(nonsmooth("multi_margin_loss", &[Signed(&[3, 5]), Index(&[3], 5), Positive(&[5])], |x| {
        x[0].multi_margin_loss(
            &x[1],
            &MultiMarginLossOptions { p: 2, margin: 0.8, weight: Some(&x[2]), ..Default::default() },
        )
    }))
    .golden(|a| {
        let options = MultiMarginLossOptions {
            p: i32::try_from(a.int(2, "p", 1)?)?,
            margin: a.float(3, "margin", 1.0)?,
            weight: a.opt_tensor(4, "weight"),
            reduction: reduction(a)?,
        };
        single(a.tensor(0)?.multi_margin_loss(a.tensor(1)?, &options))
    });
    ops.add(method!(multilabel_margin_loss(t1, reduction)))
        .case(nonsmooth("multilabel_margin_loss", &[Signed(&[3, 5]), Index(&[3, 5], 5)], |x| {
            x[0].multilabel_margin_loss(&x[1], Reduction::Sum)
        }))
        .golden(|a| single(a.tensor(0)?.multilabel_margin_loss(a.tensor(1)?, reduction(a)?)));
    ops.add(method!(poisson_nll_loss(
        t1,
        PoissonNllLossOptions { log_input: flag, full: flag, eps: float, reduction: reduction }
    )))
    .case(smooth("poisson_nll_loss", &[Signed(S), Positive(S)], |x| {
        x[0].poisson_nll_loss(&x[1], &Default::default())
    }))
    .case(smooth("poisson_nll_loss of counts, in full", &[Signed(S), Positive(S)], |x| {
        x[0].poisson_nll_loss(&x[1].add(1.5)?, &PoissonNllLossOptions { full: true, ..Default::default() })
    }))
    .golden(|a| {
        let options = PoissonNllLossOptions {
            log_input: a.flag(2, "log_input", true),
            full: a.flag(3, "full", false),
            eps: a.float(5, "eps", 1e-8)?,
            reduction: reduction(a)?,
        };
        single(a.tensor(0)?.poisson_nll_loss(a.tensor(1)?, &options))
    });
    ops.add(method!(cosine_embedding_loss(t1, t2, float, reduction)))
        .case(nonsmooth("cosine_embedding_loss", &[Signed(S), Positive(S)], |x| {
            x[0].cosine_embedding_loss(&x[1], &row_signs(&x[0])?, 0.1, Reduction::Sum)
        }))
        .golden(|a| {
            let margin = a.float(3, "margin", 0.0)?;
            single(a.tensor(0)?.cosine_embedding_loss(a.tensor(1)?, a.tensor(2)?, margin, reduction(a)?))
        });
    ops.add(method!(hinge_embedding_loss(t1, float, reduction)))
        .case(nonsmooth("hinge_embedding_loss", &[Signed(S)], |x| {
            x[0].hinge_embedding_loss(&x[0].detach().sign()?, 0.7, Reduction::Sum)
        }))
        .golden(|a| {
            let margin = a.float(2, "margin", 1.0)?;
            single(a.tensor(0)?.hinge_embedding_loss(a.tensor(1)?, margin, reduction(a)?))
        });
    ops.add(method!(normalize(int, NormalizeOptions { p: float, eps: float })))
        .case(smooth("normalize", &[Signed(S)], |x| x[0].normalize(1, &Default::default())))
        .golden(|a| {
            single(a.tensor(0)?.normalize(
                a.dim(2, "dim", 1)?,
                &NormalizeOptions { p: a.float(1, "p", 2.0)?, eps: a.float(3, "eps", 1e-12)? },
            ))
        });
    ops.add(method!(dist(t1, float)))
        .case(smooth("dist", &[Signed(S), Positive(&[5])], |x| x[0].dist(&x[1], 3.0)))
        .golden(|a| single(a.tensor(0)?.dist(a.tensor(1)?, a.float(2, "p", 2.0)?)));
    ops.add(method!(pairwise_distance(t1, PairwiseDistanceOptions { p: float, eps: float, keepdim: flag })))
        .case(smooth("pairwise_distance", &[Signed(S), Positive(S)], |x| {
            x[0].pairwise_distance(&x[1], &PairwiseDistanceOptions { keepdim: true, ..Default::default() })
        }))
        .golden(|a| {
            let (p, eps) = (a.float(2, "p", 2.0)?, a.float(3, "eps", 1e-6)?);
            let options = PairwiseDistanceOptions { p, eps, keepdim: a.flag(4, "keepdim", false) };
            single(a.tensor(0)?.pairwise_distance(a.tensor(1)?, &options))
        });
    ops.add(method!(smooth_l1_loss(t1, float, reduction)))
        .case(smooth("smooth_l1_loss", &[Signed(S), Positive(S)], |x| {
            x[0].smooth_l1_loss(&x[1], 0.7, Reduction::Sum)
        }))
        .golden(|a| {
            single(a.tensor(0)?.smooth_l1_loss(a.tensor(1)?, a.float(NAMED, "beta", 1.0)?, reduction(a)?))
        });
    ops.add(method!(gaussian_nll_loss(
        t1,
        t2,
        GaussianNllLossOptions { full: flag, eps: float, reduction: reduction }
    )))
    .case(smooth("gaussian_nll_loss", &[Signed(S), Signed(S), Positive(S)], |x| {
        x[0].gaussian_nll_loss(&x[1], &x[2], &GaussianNllLossOptions { full: true, ..Default::default() })
    }))
    .golden(|a| {
        let (full, eps) = (a.flag(NAMED, "full", false), a.float(NAMED, "eps", 1e-6)?);
        single(a.tensor(0)?.gaussian_nll_loss(
            a.tensor(1)?,
            a.tensor(2)?,
            &GaussianNllLossOptions { full, eps, reduction: reduction(a)? },
        ))
    });
    ops.add(method!(soft_margin_loss(t1, reduction)))
        .case(smooth("soft_margin_loss", &[Signed(S)], |x| {
            x[0].soft_margin_loss(&x[0].detach().sign()?, Reduction::Sum)
        }))
        .golden(|a| single(a.tensor(0)?.soft_margin_loss(a.tensor(1)?, reduction(a)?)));
    ops.add(method!(margin_ranking_loss(t1, t2, float, reduction)))
        .case(nonsmooth("margin_ranking_loss", &[Signed(&[3]), Positive(&[3])], |x| {
            x[0].margin_ranking_loss(&x[1], &row_signs(&x[0])?, 0.3, Reduction::Sum)
        }))
        .golden(|a| {
            single(a.tensor(0)?.margin_ranking_loss(
                a.tensor(1)?,
                a.tensor(2)?,
                a.float(NAMED, "margin", 0.0)?,
                reduction(a)?,
            ))
        });
    ops.add(method!(triplet_margin_loss(
        t1,
        t2,
        TripletMarginLossOptions { margin: float, p: float, swap: flag, reduction: reduction }
    )))
    .case(nonsmooth("triplet_margin_loss", &[Signed(S), Positive(S), Bounded(S)], |x| {
        x[0].triplet_margin_loss(
            &x[1],
            &x[2],
            &TripletMarginLossOptions { reduction: Reduction::Sum, ..Default::default() },
        )
    }))
    .golden(|a| {
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
    ops.add_without_fuzz("triplet_margin_with_distance_loss", "takes a closure")
        .case(nonsmooth("triplet_margin_with_distance_loss", &[Signed(S), Positive(S), Bounded(S)], |x| {
            let distance = |a: &Tensor, b: &Tensor| a.sub(b)?.square()?.sum([1], false);
            x[0].triplet_margin_with_distance_loss(
                &x[1],
                &x[2],
                distance,
                &TripletMarginWithDistanceLossOptions { swap: true, ..Default::default() },
            )
        }))
        .golden(|a| {
            // Files hold no functions, so the distance is the default one.
            let distance = |x: &Tensor, y: &Tensor| x.pairwise_distance(y, &Default::default());
            let options = TripletMarginWithDistanceLossOptions {
                margin: a.float(NAMED, "margin", 1.0)?,
                swap: a.flag(NAMED, "swap", false),
                reduction: reduction(a)?,
            };
            let (positive, negative) = (a.tensor(1)?, a.tensor(2)?);
            single(a.tensor(0)?.triplet_margin_with_distance_loss(positive, negative, distance, &options))
        });
    ops.add(method!(multilabel_soft_margin_loss(t1, maybe2, reduction)))
        .case(smooth("multilabel_soft_margin_loss", &[Signed(S), Positive(&[5])], |x| {
            let labels = x[0].detach().gt(0.0)?.to_dtype(x[0].dtype())?;
            x[0].multilabel_soft_margin_loss(&labels, Some(&x[1]), Reduction::Mean)
        }))
        .golden(|a| {
            let weight = a.opt_tensor(2, "weight");
            single(a.tensor(0)?.multilabel_soft_margin_loss(a.tensor(1)?, weight, reduction(a)?))
        });
}

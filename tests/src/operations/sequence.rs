//! Attention, recurrent layers and losses of sequences.

use super::loss::reduction;
use super::prelude::*;

/// Runs one direction of a recurrent layer on input projections, state, weight, bias and, for an LSTM, the cell.
fn run_recurrent(x: &[Tensor], kind: RecurrentKind, lengths: Option<&[i32]>) -> Result<Tensor> {
    let lengths = lengths.map(|n| Tensor::from_slice(n, [n.len()], x[0].device())).transpose()?;
    let of = RecurrentOp::new(kind, &x[0], &x[1], &x[2]);
    let reverse = lengths.is_some();
    let states =
        RecurrentOp { bias_hh: Some(&x[3]), c_0: x.get(4), lengths: lengths.as_ref(), reverse, ..of }
            .run()?;
    match &states.c_n {
        Some(cell) => cat(&[&states.output, &cell.unsqueeze(0)?], 0),
        None => states.output.mul(&states.h_n),
    }
}

/// Returns PyTorch's lengths of sequences: a tensor or a list.
fn lengths(a: &Args<'_>, at: usize, name: &str) -> anyhow::Result<Tensor> {
    match a.opt_tensor(at, name) {
        Some(lengths) => Ok(lengths.clone()),
        None => {
            let lengths = a.ints(at, name)?.unwrap_or_default();
            Ok(Tensor::from_slice(&lengths, lengths.len(), a.device())?)
        }
    }
}

/// Returns the labels of a CTC loss, \[batch, longest\]. PyTorch also takes those of all examples in one vector.
fn ctc_targets(targets: &Tensor, lengths: &Tensor) -> anyhow::Result<Tensor> {
    if targets.rank() != 1 {
        return Ok(targets.clone());
    }
    let lengths: Vec<usize> = lengths.to_f64s()?.into_iter().map(|n| n as usize).collect();
    let longest = lengths.iter().copied().max().unwrap_or_default();
    let mut start = 0;
    let mut rows = Vec::new();
    for n in lengths {
        let row =
            targets.narrow(0, start, n)?.pad(&[0, (longest - n) as isize], PadMode::Constant(0.0.into()))?;
        rows.push(row);
        start += n;
    }
    Ok(stack(&rows, 0)?)
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(scaled_dot_product_attention(t1, t2, attention)))
        .case(
            smooth(
                "scaled_dot_product_attention",
                &[Signed(&[2, 4, 3]), Bounded(&[2, 5, 3]), Signed(&[2, 5, 6])],
                |x| x[0].scaled_dot_product_attention(&x[1], &x[2], &AttentionOptions::default()),
            )
            .with_flops(cost::attention_flops)
            .with_bench_inputs(&[
                Signed(&[96, 1024, 64]),
                Bounded(&[96, 1024, 64]),
                Signed(&[96, 1024, 64]),
            ]),
        )
        .case(
            smooth(
                "scaled_dot_product_attention of the past",
                &[Signed(&[2, 4, 3]), Bounded(&[2, 4, 3]), Signed(&[2, 4, 3])],
                |x| {
                    x[0].scaled_dot_product_attention(
                        &x[1],
                        &x[2],
                        &AttentionOptions {
                            is_causal: true,
                            scale: Some(0.8),
                            ..AttentionOptions::default()
                        },
                    )
                },
            )
            .with_flops(cost::causal_attention_flops)
            .with_bench_inputs(&[
                Signed(&[96, 1024, 64]),
                Bounded(&[96, 1024, 64]),
                Signed(&[96, 1024, 64]),
            ]),
        )
        .case(
            smooth(
                "scaled_dot_product_attention with a mask",
                &[Signed(&[4, 3]), Bounded(&[5, 3]), Signed(&[5, 6]), Signed(&[4, 5])],
                |x| {
                    x[0].scaled_dot_product_attention(
                        &x[1],
                        &x[2],
                        &AttentionOptions { attn_mask: Some(&x[3]), ..AttentionOptions::default() },
                    )
                },
            )
            .with_tolerances(case::ONE_ROUNDING)
            .with_flops(cost::attention_flops),
        )
        .case(
            smooth(
                "scaled_dot_product_attention with dropout",
                &[Signed(&[2, 4, 3]), Bounded(&[1, 9, 3]), Signed(&[1, 9, 6])],
                |x| {
                    let options =
                        AttentionOptions { dropout_p: 0.4, enable_gqa: true, ..AttentionOptions::default() };
                    let [q, k, v] = [&x[0], &x[1], &x[2]];
                    q.scaled_dot_product_attention(k, v, &options)
                },
            )
            .with_flops(cost::attention_flops),
        )
        .golden(|a| {
            single(a.tensor(0)?.scaled_dot_product_attention(
                a.tensor(1)?,
                a.tensor(2)?,
                &AttentionOptions {
                    attn_mask: a.opt_tensor(3, "attn_mask"),
                    dropout_p: a.float(4, "dropout_p", 0.0)?,
                    is_causal: a.flag(5, "is_causal", false),
                    scale: a.opt_float(6, "scale")?,
                    enable_gqa: a.flag(7, "enable_gqa", false),
                    ..AttentionOptions::default()
                },
            ))
        });
    ops.add(method!(qkv_attention(count, count, attention)))
        .case(
            smooth("qkv_attention with dropout", &[Signed(&[2, 5, 4 * 6])], |x| {
                x[0].qkv_attention(
                    2,
                    1,
                    &AttentionOptions { is_causal: true, dropout_p: 0.3, ..AttentionOptions::default() },
                )
            })
            .with_flops(cost::causal_attention_flops),
        )
        .case(
            smooth("qkv_attention", &[Signed(&[2, 5, 4 * 6])], |x| {
                x[0].qkv_attention(2, 1, &AttentionOptions { is_causal: true, ..AttentionOptions::default() })
            })
            .with_flops(cost::causal_attention_flops)
            .with_bench_inputs(&[Signed(&[8, 1024, 256])]),
        );
    ops.add(method!(rotary_embedding(t1, t2, flag)))
        .case(smooth("rotary_embedding", &[Signed(&[2, 3, 5, 6])], |x| {
            let table = Tensor::arange(0.0, 15.0, 1.0, DType::F32, x[0].device())?.reshape([5, 3])?;
            x[0].rotary_embedding(&table.cos()?, &table.sin()?, false)
        }))
        .case(smooth("rotary_embedding of neighbours", &[Signed(&[2, 5, 7])], |x| {
            let table = Tensor::arange(0.0, 15.0, 1.0, DType::F32, x[0].device())?.reshape([5, 3])?;
            x[0].rotary_embedding(&table.cos()?, &table.sin()?, true)
        }))
        .case(smooth("rotary_embedding of vectors", &[Signed(&[2, 3, 5, 20])], |x| {
            let table = Tensor::arange(0.0, 40.0, 1.0, DType::F32, x[0].device())?.reshape([5, 8])?;
            x[0].rotary_embedding(&table.cos()?, &table.sin()?, false)
        }))
        .case(smooth("rotary_embedding of neighbours in vectors", &[Signed(&[2, 5, 20])], |x| {
            let table = Tensor::arange(0.0, 40.0, 1.0, DType::F32, x[0].device())?.reshape([5, 8])?;
            x[0].rotary_embedding(&table.cos()?, &table.sin()?, true)
        }));
    ops.add_without_fuzz("rnn_tanh", "a variant of `recurrent`").case(
        smooth("rnn_tanh", &[Signed(&[4, 2, 3]), Bounded(&[2, 3]), Bounded(&[3, 3]), Bounded(&[3])], |x| {
            run_recurrent(x, RecurrentKind::Tanh, None)
        })
        .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
        .with_tolerances(case::ONE_ROUNDING),
    );
    ops.add_without_fuzz("rnn_relu", "a variant of `recurrent`").case(
        nonsmooth(
            "rnn_relu",
            &[Signed(&[4, 2, 3]), Bounded(&[2, 3]), Bounded(&[3, 3]), Bounded(&[3])],
            |x| run_recurrent(x, RecurrentKind::Relu, Some(&[4, 2])),
        )
        .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
        .with_tolerances(case::ONE_ROUNDING),
    );
    ops.add_without_fuzz("gru", "a variant of `recurrent`")
        .case(
            smooth("gru", &[Signed(&[4, 2, 9]), Bounded(&[2, 3]), Bounded(&[9, 3]), Bounded(&[9])], |x| {
                run_recurrent(x, RecurrentKind::Gru, None)
            })
            .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
            .with_tolerances(case::ONE_ROUNDING)
            .with_bench_inputs(&[
                Signed(&[64, 32, 768]),
                Bounded(&[32, 256]),
                Bounded(&[768, 256]),
                Bounded(&[768]),
            ]),
        )
        .case(
            smooth(
                "gru of lengths",
                &[Signed(&[4, 2, 9]), Bounded(&[2, 3]), Bounded(&[9, 3]), Bounded(&[9])],
                |x| run_recurrent(x, RecurrentKind::Gru, Some(&[2, 4])),
            )
            .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
            .with_tolerances(case::ONE_ROUNDING),
        );
    ops.add_without_fuzz("lstm", "a variant of `recurrent`")
        .case(
            smooth(
                "lstm",
                &[Signed(&[4, 2, 12]), Bounded(&[2, 3]), Bounded(&[12, 3]), Bounded(&[12]), Bounded(&[2, 3])],
                |x| run_recurrent(x, RecurrentKind::Lstm, None),
            )
            .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
            .with_tolerances(case::ONE_ROUNDING)
            .with_bench_inputs(&[
                Signed(&[64, 32, 1024]),
                Bounded(&[32, 256]),
                Bounded(&[1024, 256]),
                Bounded(&[1024]),
                Bounded(&[32, 256]),
            ]),
        )
        .case(
            smooth(
                "lstm of lengths",
                &[Signed(&[4, 2, 12]), Bounded(&[2, 3]), Bounded(&[12, 3]), Bounded(&[12]), Bounded(&[2, 3])],
                |x| run_recurrent(x, RecurrentKind::Lstm, Some(&[3, 4])),
            )
            .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
            .with_tolerances(case::ONE_ROUNDING),
        );
    ops.add(FuzzOp {
        name: "ctc_loss",
        run: |r, t| {
            let options = CtcLossOptions {
                targets: &t[1],
                input_lengths: &t[2],
                target_lengths: &t[3],
                blank: r.count(),
                reduction: r.pick(REDUCTIONS),
                zero_infinity: r.flag(),
            };
            t[0].ctc_loss(&options).map(IntoTensors::into_tensors)
        },
    })
    .case(smooth("ctc_loss", &[Signed(&[6, 2, 4])], |x| {
        let ints = |n: &[i32], shape: &[usize]| Tensor::from_slice(n, shape, x[0].device());
        let (labels, steps, counts) =
            (ints(&[1, 1, 3, 2], &[2, 2])?, ints(&[6, 5], &[2])?, ints(&[2, 1], &[2])?);
        x[0].log_softmax(-1)?.ctc_loss(&CtcLossOptions::new(&labels, &steps, &counts))
    }))
    .golden(|a| {
        let input_lengths = lengths(a, 2, "input_lengths")?;
        let target_lengths = lengths(a, 3, "target_lengths")?;
        let targets = ctc_targets(a.tensor(1)?, &target_lengths)?;
        let options = CtcLossOptions {
            blank: a.count(4, "blank", 0)?,
            reduction: reduction(a)?,
            zero_infinity: a.flag(6, "zero_infinity", false),
            ..CtcLossOptions::new(&targets, &input_lengths, &target_lengths)
        };
        // PyTorch's gradient is that of the logits, though the arguments are their log-probabilities. Rounded to
        // 16 bits, these would be another input.
        let x = a.tensor(0)?;
        let log_probs = x.log_softmax_with_dtype(-1, x.dtype().promote(DType::F32))?;
        single(log_probs.ctc_loss(&options)?.to_dtype(x.dtype()))
    });
    ops.add(FuzzOp {
        name: "recurrent",
        run: |r, t| {
            let options = RecurrentOp {
                kind: r.pick(&[RecurrentKind::Tanh, RecurrentKind::Lstm, RecurrentKind::Gru]),
                input_gates: &t[0],
                h_0: &t[1],
                c_0: r.maybe(|_| &t[2]),
                weight_hh: &t[3],
                bias_hh: r.maybe(|_| &t[4]),
                lengths: r.maybe(|_| &t[2]),
                reverse: r.flag(),
            };
            options.run().map(IntoTensors::into_tensors)
        },
    })
    .without_case("its variants have cases");
}

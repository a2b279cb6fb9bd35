//! Selecting and scattering by indices.

use super::prelude::*;

const fn scatter_reduce_case(name: &'static str, call: fn(&[Tensor]) -> Result<Tensor>) -> OpCase {
    smooth(name, &[Signed(&[4, 5]), Index(&[3, 5], 4), Signed(&[3, 5])], call)
}

fn scatter_reduce(x: &[Tensor], how: ScatterReduce, include_self: bool) -> Result<Tensor> {
    x[0].scatter_reduce(0, &x[1], &x[2], how, include_self)
}

/// Returns the reduction of elements with one index.
fn reduction(a: &Args<'_>, at: usize) -> anyhow::Result<ScatterReduce> {
    Ok(match a.string(at, "reduce", "") {
        "sum" | "add" => ScatterReduce::Sum,
        "prod" | "multiply" => ScatterReduce::Prod,
        "mean" => ScatterReduce::Mean,
        "amax" => ScatterReduce::Amax,
        "amin" => ScatterReduce::Amin,
        other => return Err(missing_op(&format!("reduction {other}"))),
    })
}

/// Applies Python's subscripts as PyTorch does: numbers, slices and new axes first, then all tensors together.
fn subscript(x: &Tensor, subscripts: &[Subscript]) -> Result<Tensor> {
    let consumed = subscripts.iter().map(Subscript::consumed_dims).sum::<usize>();
    let mut out = x.clone();
    // Dimension of `out` that the next subscript applies to, and the tensors among the dimensions before.
    let (mut dim, mut tensors) = (0, Vec::new());
    for subscript in subscripts {
        let kept = match subscript {
            Subscript::At(index) => {
                out = out.select(dim, *index)?;
                0
            }
            Subscript::Slice { start, end, step } => {
                let extent = out.dim(dim)? as i64;
                let index = |n: i64| (if n < 0 { n + extent } else { n }).clamp(0, extent) as usize;
                let start = start.map_or(0, index);
                let end = end.map_or(extent as usize, index).max(start);
                out = out.slice_dim(dim, start, end, *step)?;
                1
            }
            Subscript::NewAxis => {
                out = out.unsqueeze(dim)?;
                1
            }
            Subscript::Ellipsis => x.rank().saturating_sub(consumed),
            Subscript::Tensor(index) => {
                tensors.push(Some(index));
                dim += subscript.consumed_dims() as isize;
                continue;
            }
        };
        tensors.resize(tensors.len() + kept, None);
        dim += kept as isize;
    }
    if tensors.iter().all(Option::is_none) { Ok(out) } else { out.index(&tensors) }
}

/// Applies `max_norm` to a table before the lookup.
fn renormed(a: &Args<'_>, table: &Tensor, index: &Tensor) -> anyhow::Result<()> {
    match a.get(NAMED, "max_norm") {
        Some(_) => {
            let (max_norm, p) = (a.float(NAMED, "max_norm", 0.0)?, a.float(NAMED, "norm_type", 2.0)?);
            Ok(table.embedding_renorm_(index, max_norm, p)?)
        }
        None => Ok(()),
    }
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(gather(int, t1)))
        .case(
            smooth("gather", &[Signed(S), Index(&[2, 5], 3)], |x| x[0].gather(0, &x[1]))
                .with_bytes(cost::gather_bytes)
                .with_bench_inputs(&[Signed(&[4096, 4096]), Index(&[1024, 4096], 4096)]),
        )
        .golden(|a| single(a.tensor(0)?.gather(a.dim(1, "dim", 0)?, a.tensor(2)?)));
    ops.add(method!(index_select(int, t1)))
        .case(
            smooth("index_select", &[Signed(S), Index(&[7], 5)], |x| x[0].index_select(1, &x[1]))
                .with_bytes(cost::gather_bytes)
                .with_bench_inputs(&[Signed(&[4096, 4096]), Index(&[1024], 4096)]),
        )
        .golden(|a| single(a.tensor(0)?.index_select(a.dim(1, "dim", 0)?, a.tensor(2)?)));
    ops.add(method!(embedding(t1, maybe_count)))
        .case(
            smooth("embedding", &[Signed(&[6, 4]), Index(&[2, 3], 6)], |x| x[0].embedding(&x[1], None))
                .with_bytes(cost::gather_bytes)
                .with_bench_inputs(&[Signed(&[32000, 768]), Index(&[8, 1024], 32000)])
                .with_batched_inputs(2),
        )
        .case(nonsmooth("embedding by frequency", &[Signed(&[6, 4]), Index(&[2, 3], 6)], |x| {
            x[0].embedding_with(&x[1], &EmbeddingOptions { padding_idx: Some(1), scale_grad_by_freq: true })
        }))
        .golden(|a| {
            // PyTorch's function takes the indices first, the database the weight.
            let (weight, index) = if a.tensor(0)?.dtype().is_float() {
                (a.tensor(0)?, a.tensor(1)?)
            } else {
                (a.tensor(1)?, a.tensor(0)?)
            };
            let padding = a
                .opt_int(2, "padding_idx")?
                .map(|p| if p < 0 { p + weight.dim(0).unwrap_or(0) as i64 } else { p });
            renormed(a, weight, index)?;
            let scale_grad_by_freq = a.flag(NAMED, "scale_grad_by_freq", false);
            single(weight.embedding_with(
                index,
                &EmbeddingOptions { padding_idx: padding.map(|p| p as usize), scale_grad_by_freq },
            ))
        });
    ops.add(method!(take_along_dim(t1, int)))
        .case(
            smooth("take_along_dim", &[Signed(S), Index(&[3, 2], 5)], |x| x[0].take_along_dim(&x[1], 1))
                .with_batched_inputs(3),
        )
        .golden(|a| match a.opt_int(2, "dim")? {
            Some(d) => single(a.tensor(0)?.take_along_dim(a.tensor(1)?, d as isize)),
            None => single(a.tensor(0)?.reshape([-1])?.gather(0, &a.tensor(1)?.reshape([-1])?)),
        });
    ops.add(method!(scatter_add(int, t1, t2)))
        .case(
            smooth("scatter_add", &[Signed(&[4, 5]), Index(&[3, 5], 4), Signed(&[3, 5])], |x| {
                x[0].scatter_add(0, &x[1], &x[2])
            })
            .with_bench_inputs(&[
                Signed(&[4096, 4096]),
                Index(&[1024, 4096], 4096),
                Signed(&[1024, 4096]),
            ]),
        )
        .case(smooth(
            "scatter_add of a long line",
            &[Signed(&[70]), Index(&[70_000], 61), Signed(&[70_000])],
            |x| x[0].scatter_add(0, &x[1], &x[2]),
        ))
        .golden(|a| single(a.tensor(0)?.scatter_add(a.dim(1, "dim", 0)?, a.tensor(2)?, a.tensor(3)?)));
    ops.add(method!(index_add(int, t1, t2, float)))
        .case(
            smooth("index_add", &[Signed(&[4, 5]), Index(&[3], 4), Signed(&[3, 5])], |x| {
                x[0].index_add(0, &x[1], &x[2], 0.5)
            })
            .with_bench_inputs(&[
                Signed(&[32000, 256]),
                Index(&[8192], 32000),
                Signed(&[8192, 256]),
            ]),
        )
        .golden(|a| {
            single(a.tensor(0)?.index_add(
                a.dim(1, "dim", 0)?,
                a.tensor(2)?,
                a.tensor(3)?,
                a.scalar_or(4, "alpha", 1)?,
            ))
        });
    ops.add(method!(index_fill(int, t1, operand2)))
        .case(smooth("index_fill", &[Signed(&[4, 5]), Index(&[2], 4)], |x| x[0].index_fill(0, &x[1], 2.0)))
        .golden(|a| {
            let dim = a.dim(1, "dim", 0)?;
            single(a.tensor(0)?.index_fill(dim, a.tensor(2)?, a.operand(3, "value", Scalar::Int(0))?))
        });
    ops.add(method!(masked_select(t1)))
        .case(smooth("masked_select", &[Signed(&[3, 1, 5]), Bool(&[4, 1])], |x| x[0].masked_select(&x[1])))
        .golden(|a| single(a.tensor(0)?.masked_select(a.tensor(1)?)));
    ops.add(method!(repeat_interleave_by(t1, int, maybe_count))).case(smooth(
        "repeat_interleave_by",
        &[Signed(S), Index(&[5], 3)],
        |x| x[0].repeat_interleave_by(&x[1], 1, None),
    ));
    ops.add(method!(searchsorted(t1, SearchSortedOptions { out_int32: flag, right: flag, sorter: maybe2 })))
        .case(
            nondifferentiable("searchsorted", &[Signed(&[4]), Signed(S)], |x| {
                x[0].searchsorted(&x[1], &SearchSortedOptions { right: true, ..Default::default() })
            })
            .with_batched_inputs(2),
        )
        .golden(|a| {
            let right = a.flag(NAMED, "right", false) || a.string(NAMED, "side", "left") == "right";
            single(a.tensor(0)?.searchsorted(
                &a.tensor_or_scalar(1, 0)?,
                &SearchSortedOptions {
                    out_int32: a.flag(NAMED, "out_int32", false),
                    right,
                    sorter: a.opt_tensor(NAMED, "sorter"),
                },
            ))
        });
    ops.add(method!(bucketize(t1, SearchSortedOptions { out_int32: flag, right: flag, sorter: maybe2 })))
        .case(
            nondifferentiable("bucketize", &[Signed(S), Signed(&[4])], |x| {
                x[0].bucketize(&x[1], &SearchSortedOptions { out_int32: true, ..Default::default() })
            })
            .with_batched_inputs(1),
        )
        .golden(|a| {
            single(a.tensor_or_scalar(0, 1)?.bucketize(
                a.tensor(1)?,
                &SearchSortedOptions {
                    out_int32: a.flag(NAMED, "out_int32", false),
                    right: a.flag(NAMED, "right", false),
                    ..Default::default()
                },
            ))
        });
    ops.add(method!(scatter_reduce(int, t1, t2, scatter, flag)))
        .case(scatter_reduce_case("scatter_reduce to sums", |x| scatter_reduce(x, ScatterReduce::Sum, false)))
        .case(scatter_reduce_case("scatter_reduce to products", |x| {
            scatter_reduce(x, ScatterReduce::Prod, true)
        }))
        .case(scatter_reduce_case("scatter_reduce to means", |x| {
            scatter_reduce(x, ScatterReduce::Mean, true)
        }))
        .case(scatter_reduce_case("scatter_reduce to the largest", |x| {
            scatter_reduce(x, ScatterReduce::Amax, true)
        }))
        .case(scatter_reduce_case("scatter_reduce to the smallest", |x| {
            scatter_reduce(x, ScatterReduce::Amin, false)
        }))
        .golden(|a| {
            let how = reduction(a, 4)?;
            let dim = a.opt_dim(1)?.unwrap_or(0);
            single(a.tensor(0)?.scatter_reduce(
                dim,
                a.tensor(2)?,
                a.tensor(3)?,
                how,
                a.flag(5, "include_self", true),
            ))
        });
    ops.add(method!(index(indices)))
        .case(smooth("index", &[Signed(&[3, 4, 5]), Index(&[2, 1], 3), Index(&[3], 5)], |x| {
            x[0].index(&[Some(&x[1]), None, Some(&x[2])])
        }))
        .golden_as("__getitem__", |a| single(subscript(a.tensor(0)?, &a.subscripts(1)?)));
    ops.add(method!(index_put(indices, t1, flag)))
        .case(smooth("index_put", &[Signed(&[3, 4, 5]), Index(&[3], 4), Signed(&[3, 1])], |x| {
            x[0].index_put(&[None, Some(&x[1])], &x[2], false)
        }))
        .case(smooth(
            "index_put of sums",
            &[Signed(&[4, 5]), Index(&[6], 3), Index(&[6], 5), Signed(&[6])],
            |x| x[0].index_put(&[Some(&x[1]), Some(&x[2])], &x[3], true),
        ))
        .case(smooth("index_put by a mask", &[Signed(&[4, 5]), Bool(&[4]), Signed(&[5])], |x| {
            x[0].index_put(&[Some(&x[1])], &x[2], false)
        }))
        .golden(|a| {
            single(a.tensor(0)?.index_put(
                &a.optional_tensors(1)?,
                a.tensor(2)?,
                a.flag(3, "accumulate", false),
            ))
        });
    ops.add(method!(embedding_bag(t1, bags)))
        .case(smooth(
            "embedding_bag of sums",
            &[Signed(&[6, 5]), Index(&[3, 4], 6), Positive(&[3, 4])],
            |x| {
                let bags = EmbeddingBagOptions {
                    mode: EmbeddingBagMode::Sum,
                    per_sample_weights: Some(&x[2]),
                    padding_idx: Some(2),
                    ..EmbeddingBagOptions::default()
                };
                x[0].embedding_bag(&x[1], &bags)
            },
        ))
        .case(smooth("embedding_bag of means", &[Signed(&[6, 4]), Index(&[7], 6)], |x| {
            let starts = Tensor::from_slice(&[0i32, 2, 2, 5], [4], x[0].device())?;
            x[0].embedding_bag(
                &x[1],
                &EmbeddingBagOptions { offsets: Some(&starts), ..EmbeddingBagOptions::default() },
            )
        }))
        .case(nonsmooth("embedding_bag of maxima", &[Signed(&[6, 5]), Index(&[7], 6)], |x| {
            let starts = Tensor::from_slice(&[0i64, 0, 3, 7], [4], x[0].device())?;
            let bags = EmbeddingBagOptions {
                include_last_offset: true,
                mode: EmbeddingBagMode::Max,
                ..EmbeddingBagOptions::default()
            };
            x[0].embedding_bag(&x[1], &EmbeddingBagOptions { offsets: Some(&starts), ..bags })
        }))
        .golden(|a| {
            let table = a.tensor(0)?;
            renormed(a, table, a.tensor(1)?)?;
            let padding = a
                .opt_int(NAMED, "padding_idx")?
                .map(|p| if p < 0 { p + table.dim(0).unwrap_or(0) as i64 } else { p });
            single(table.embedding_bag(
                a.tensor(1)?,
                &EmbeddingBagOptions {
                    offsets: a.opt_tensor(2, "offsets"),
                    mode: match a.string(NAMED, "mode", "mean") {
                        "sum" => EmbeddingBagMode::Sum,
                        "max" => EmbeddingBagMode::Max,
                        "mean" => EmbeddingBagMode::Mean,
                        other => return Err(missing_op(&format!("embedding_bag in mode {other}"))),
                    },
                    per_sample_weights: a.opt_tensor(NAMED, "per_sample_weights"),
                    include_last_offset: a.flag(NAMED, "include_last_offset", false),
                    padding_idx: padding.map(|p| p as usize),
                    scale_grad_by_freq: a.flag(NAMED, "scale_grad_by_freq", false),
                },
            ))
        });
    // If source elements share an index, the last one wins; here the indices are distinct.
    ops.add(method!(scatter(int, t1, t2)))
        .case(smooth("scatter", &[Signed(S), Signed(&[1, 5])], |x| {
            let rows = Tensor::from_slice(&[2i64, 0, 1, 1, 2], [1, 5], x[0].device())?;
            x[0].scatter(0, &rows, &x[1])
        }))
        .golden(|a| {
            let dim = a.dim(1, "dim", 0)?;
            if a.has(NAMED, "reduce") {
                let (x, index) = (a.tensor(0)?, a.tensor(2)?);
                let src = match a.opt_tensor(3, "src") {
                    Some(src) => src.clone(),
                    None => Tensor::full(index.shape(), a.scalar_or(3, "value", 0)?, x.dtype(), a.device())?,
                };
                return single(x.scatter_reduce(dim, index, &src, reduction(a, NAMED)?, true));
            }
            match a.opt_tensor(3, "src") {
                Some(src) => single(a.tensor(0)?.scatter(dim, a.tensor(2)?, src)),
                None => single(a.tensor(0)?.scatter_value(dim, a.tensor(2)?, a.scalar_or(3, "value", 0)?)),
            }
        });
    ops.add(method!(scatter_value(int, t1, float))).case(smooth(
        "scatter_value",
        &[Signed(S), Index(&[1, 5], 3)],
        |x| x[0].scatter_value(0, &x[1], 0.5),
    ));
    ops.add(method!(argwhere()))
        .case(nondifferentiable("argwhere", &[Signed(S)], |x| x[0].argwhere()))
        .golden(unary_call!(argwhere));
    ops.add(method!(nonzero_tuple())).case(nondifferentiable("nonzero_tuple", &[Signed(S)], |x| {
        forebay::ops::stack(&x[0].nonzero_tuple()?.iter().collect::<Vec<_>>(), 0)
    }));
    ops.add(method!(slice_scatter(t1, int, count, count, count)))
        .case(smooth("slice_scatter", &[Signed(S), Positive(&[3, 2])], |x| {
            x[0].slice_scatter(&x[1], 1, 1, 5, 2)
        }))
        .golden(|a| {
            let (x, d) = (a.tensor(0)?, a.dim(2, "dim", 0)?);
            let n = x.dim(d)? as i64;
            let index = |v: i64| (if v < 0 { v + n } else { v }).clamp(0, n) as usize;
            let start = index(a.opt_int(3, "start")?.unwrap_or(0));
            let stop = index(a.opt_int(4, "end")?.unwrap_or(n)).max(start);
            single(x.slice_scatter(a.tensor(1)?, d, start, stop, a.int(5, "step", 1)? as usize))
        });
    ops.add(method!(select_scatter(t1, int, int)))
        .case(smooth("select_scatter", &[Signed(S), Positive(&[5])], |x| x[0].select_scatter(&x[1], 0, -1)))
        .golden(|a| {
            single(a.tensor(0)?.select_scatter(a.tensor(1)?, a.dim(2, "dim", 0)?, a.dim(3, "index", 0)?))
        });
    ops.add(method!(diagonal_scatter(t1, int, int, int)))
        .case(smooth("diagonal_scatter", &[Signed(S), Positive(&[3])], |x| {
            x[0].diagonal_scatter(&x[1], 1, 0, 1)
        }))
        .golden(|a| {
            let (dim1, dim2) = (a.dim(3, "dim1", 0)?, a.dim(4, "dim2", 1)?);
            single(a.tensor(0)?.diagonal_scatter(a.tensor(1)?, a.dim(2, "offset", 0)?, dim1, dim2))
        });
    ops.add(method!(take(t1)))
        .case(
            smooth("take", &[Signed(S), Index(&[2, 3], 15)], |x| x[0].take(&x[1]))
                .with_bytes(cost::gather_bytes),
        )
        .golden(|a| single(a.tensor(0)?.take(a.tensor(1)?)));
    ops.add(method!(put(t1, t2, flag)))
        .case(smooth("put", &[Signed(S), Index(&[4], 15), Positive(&[4])], |x| x[0].put(&x[1], &x[2], true)))
        .golden(|a| single(a.tensor(0)?.put(a.tensor(1)?, a.tensor(2)?, a.flag(3, "accumulate", false))));
    ops.add(method!(index_copy(int, t1, t2)))
        .case(smooth("index_copy", &[Signed(S), Index(&[2], 3), Positive(&[2, 5])], |x| {
            x[0].index_copy(0, &x[1], &x[2])
        }))
        .golden(|a| single(a.tensor(0)?.index_copy(a.dim(1, "dim", 0)?, a.tensor(2)?, a.tensor(3)?)));
    ops.add(method!(index_reduce(int, t1, t2, scatter, flag)))
        .case(smooth("index_reduce", &[Signed(S), Index(&[4], 3), Positive(&[4, 5])], |x| {
            x[0].index_reduce(0, &x[1], &x[2], ScatterReduce::Prod, true)
        }))
        .case(smooth("index_reduce of means", &[Signed(S), Index(&[4], 5), Positive(&[3, 4])], |x| {
            x[0].index_reduce(1, &x[1], &x[2], ScatterReduce::Mean, false)
        }))
        .golden(|a| {
            let (dim, include_self) = (a.dim(1, "dim", 0)?, a.flag(5, "include_self", true));
            single(a.tensor(0)?.index_reduce(dim, a.tensor(2)?, a.tensor(3)?, reduction(a, 4)?, include_self))
        });
    ops.add(method!(unravel_index(counts)))
        .case(nondifferentiable("unravel_index", &[Index(&[7], 24)], |x| {
            stack(&x[0].unravel_index([2, 3, 4])?.iter().collect::<Vec<_>>(), 0)
        }))
        .golden(|a| Ok(a.tensor(0)?.unravel_index(&a.shape(1, "shape")?)?));
    ops.add(method!(masked_scatter(t1, t2)))
        .case(smooth("masked_scatter", &[Signed(S), Bool(&[5]), Positive(&[15])], |x| {
            x[0].masked_scatter(&x[1], &x[2])
        }))
        .golden(|a| single(a.tensor(0)?.masked_scatter(a.tensor(1)?, a.tensor(2)?)));
    ops.add(method!(embedding_with(t1, lookup))).without_case("the cases of `embedding` call it");
}

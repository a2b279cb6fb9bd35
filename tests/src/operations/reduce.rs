//! Reductions, statistics and scans.

use super::prelude::*;

fn keepdim(a: &Args<'_>) -> bool {
    a.flag(2, "keepdim", false)
}

/// Returns the correction of degrees of freedom: `correction`, or `unbiased`.
fn correction(a: &Args<'_>) -> anyhow::Result<f64> {
    let at = if a.variant() == "unbiased" { 1 } else { 2 };
    a.float(NAMED, "correction", f64::from(u8::from(a.flag(at, "unbiased", true))))
}

/// Returns the dimensions of a variance, which may be missing before `unbiased`, the correction and `keepdim`.
fn spread(a: &Args<'_>) -> anyhow::Result<(Vec<isize>, f64, bool)> {
    let dims = if a.variant() == "unbiased" { Vec::new() } else { a.dims(1, "dim")? };
    Ok((dims, correction(a)?, a.flag(3, "keepdim", false)))
}

/// Returns the spacing of samples, or their coordinates.
fn spacing<'a>(a: &'a Args<'_>) -> anyhow::Result<Operand<'a>> {
    match a.opt_tensor(1, "x") {
        Some(x) => Ok(x.into()),
        None => a.operand(NAMED, "dx", Scalar::Float(1.0)),
    }
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(sum(ints, flag)))
        .case(
            smooth("sum", &[Signed(&[3, 4, 5])], |x| x[0].sum([0, 2], false))
                .with_bench_inputs(&[Signed(&[256, 256, 256])]),
        )
        .case(
            smooth("sum of long rows", &[Signed(&[2, 5000])], |x| x[0].sum([1], true))
                .with_bench_inputs(&[Signed(&[64, 262144])]),
        )
        .golden(|a| {
            Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.sum(&a.dims(1, "dim")?, keepdim(a))?)?])
        });
    ops.add(method!(sum_all())).case(
        smooth("sum_all", &[Signed(&[3, 4, 5])], |x| x[0].sum_all())
            .with_bench_inputs(&[Signed(&[4096, 64, 64])]),
    );
    ops.add(method!(mean(ints, flag)))
        .case(
            smooth("mean", &[Signed(&[3, 4, 5])], |x| x[0].mean([-1], true))
                .with_bench_inputs(&[Signed(&[16, 1024, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| single(a.tensor_as_dtype_arg(0)?.mean(&a.dims(1, "dim")?, keepdim(a))));
    ops.add(method!(prod(int, flag)))
        .case(
            smooth("prod", &[Signed(&[3, 4])], |x| x[0].prod(1, false))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| match a.opt_dim(1)? {
            Some(d) => Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.prod(d, keepdim(a))?)?]),
            None => Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.prod_all()?)?]),
        });
    ops.add(method!(amax(ints, flag)))
        .case(
            smooth("amax", &[Signed(S)], |x| x[0].amax([1], false))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| single(a.tensor(0)?.amax(&a.dims(1, "dim")?, keepdim(a))));
    ops.add(method!(amin(ints, flag)))
        .case(
            smooth("amin", &[Signed(S)], |x| x[0].amin([0], true))
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .golden(|a| single(a.tensor(0)?.amin(&a.dims(1, "dim")?, keepdim(a))));
    ops.add(method!(max(int, flag)))
        .case(
            smooth("max", &[Signed(S)], |x| Ok(x[0].max(1, false)?.0))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| match a.variant() {
            "binary" => single(a.tensor(0)?.maximum(a.tensor(1)?)),
            "reduction_no_dim" => single(a.tensor(0)?.max_all()),
            _ => pair(a.tensor(0)?.max(a.opt_dim(1)?.unwrap_or(0), keepdim(a))?),
        });
    ops.add(method!(cumsum(int)))
        .case(
            smooth("cumsum", &[Signed(&[3, 9])], |x| x[0].cumsum(1))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.cumsum(a.dim(1, "dim", 0)?)?)?]));
    ops.add(method!(cumprod(int)))
        .case(
            smooth("cumprod", &[Signed(&[3, 4])], |x| x[0].cumprod(1))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.cumprod(a.dim(1, "dim", 0)?)?)?]));
    ops.add(method!(cummax(int)))
        .case(
            smooth("cummax", &[Signed(&[3, 9])], |x| Ok(x[0].cummax(1)?.0))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| pair(a.tensor(0)?.cummax(a.dim(1, "dim", 0)?)?));
    ops.add(method!(var(ints, float, flag)))
        .case(
            smooth("var", &[Signed(&[3, 7])], |x| x[0].var([1], 1.0, false))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| {
            let (dims, correction, keepdim) = spread(a)?;
            single(a.tensor(0)?.var(&dims, correction, keepdim))
        });
    ops.add(method!(std(ints, float, flag)))
        .case(
            smooth("std", &[Signed(&[3, 7])], |x| x[0].std([0], 0.0, true))
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .golden(|a| {
            let (dims, correction, keepdim) = spread(a)?;
            single(a.tensor(0)?.std(&dims, correction, keepdim))
        });
    ops.add(method!(norm(float, ints, flag)))
        .case(
            smooth("norm", &[Signed(&[3, 7])], |x| x[0].norm(2.0, [1], false))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden_as("linalg.vector_norm", |a| {
            let dims = a.dims(2, "dim")?;
            let (p, keepdim) = (a.float(1, "ord", 2.0)?, a.flag(3, "keepdim", false));
            Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.norm(p, &dims, keepdim)?)?])
        })
        .golden(|a| {
            if a.string(1, "p", "") == "nuc" {
                return single(a.tensor(0)?.nuclear_norm(&a.dims(2, "dim")?, a.flag(3, "keepdim", false)));
            }
            // For a matrix or a vector, the Frobenius norm equals the norm of order 2.
            let p = if a.string(1, "p", "") == "fro" { 2.0 } else { a.float(1, "p", 2.0)? };
            single(a.tensor(0)?.norm(p, &a.dims(2, "dim")?, a.flag(3, "keepdim", false)))
        });
    ops.add(method!(logsumexp(ints, flag)))
        .case(
            smooth("logsumexp", &[Signed(&[3, 7])], |x| x[0].logsumexp([-1], true))
                .with_bench_inputs(&[Signed(&[16384, 1024])])
                .with_batched_inputs(1),
        )
        .golden(|a| single(a.tensor(0)?.logsumexp(&a.dims(1, "dim")?, keepdim(a))));
    ops.add(method!(cummin(int)))
        .case(
            smooth("cummin", &[Signed(&[3, 9])], |x| Ok(x[0].cummin(1)?.0))
                .with_bench_inputs(&[Signed(&[16384, 1024])]),
        )
        .golden(|a| pair(a.tensor(0)?.cummin(a.dim(1, "dim", 0)?)?));
    ops.add(method!(nuclear_norm(ints, flag))).case(
        smooth("nuclear_norm", &[Signed(&[2, 3, 4])], |x| x[0].nuclear_norm([2, 0], true)).without_half(),
    );
    ops.add(method!(mean_all())).case(smooth("mean_all", &[Signed(S)], |x| x[0].mean_all()));
    ops.add(method!(prod_all())).case(smooth("prod_all", &[Signed(&[2, 3])], |x| x[0].prod_all()));
    ops.add(method!(max_all())).case(smooth("max_all", &[Signed(S)], |x| x[0].max_all()));
    ops.add(method!(min_all())).case(smooth("min_all", &[Signed(S)], |x| x[0].min_all()));
    ops.add(method!(min(int, flag))).case(smooth("min", &[Signed(S)], |x| Ok(x[0].min(1, false)?.0))).golden(
        |a| match a.variant() {
            "binary" => single(a.tensor(0)?.minimum(a.tensor(1)?)),
            "reduction_no_dim" => single(a.tensor(0)?.min_all()),
            _ => pair(a.tensor(0)?.min(a.opt_dim(1)?.unwrap_or(0), keepdim(a))?),
        },
    );
    ops.add(method!(aminmax(ints, flag)))
        .case(smooth("aminmax", &[Signed(S)], |x| {
            let (smallest, largest) = x[0].aminmax([1], false)?;
            largest.mul(2.0)?.sub(&smallest)
        }))
        .golden(|a| pair(a.tensor(0)?.aminmax(&a.dims(1, "dim")?, keepdim(a))?));
    ops.add(method!(argmax(ints, flag)))
        .case(nondifferentiable("argmax", &[Signed(S)], |x| x[0].argmax(1, false)))
        .golden(|a| single(a.tensor(0)?.argmax(a.opt_dim(1)?.as_slice(), keepdim(a))));
    ops.add(method!(argmin(ints, flag)))
        .case(nondifferentiable("argmin", &[Signed(S)], |x| x[0].argmin((), false)))
        .golden(|a| single(a.tensor(0)?.argmin(a.opt_dim(1)?.as_slice(), keepdim(a))));
    ops.add(method!(any(ints, flag)))
        .case(nondifferentiable("any", &[Signed(S)], |x| x[0].any([0], false)))
        .golden(|a| single(a.tensor(0)?.any(&a.dims(1, "dim")?, keepdim(a))));
    ops.add(method!(all(ints, flag)))
        .case(nondifferentiable("all", &[Signed(S)], |x| x[0].all([1], true)))
        .golden(|a| single(a.tensor(0)?.all(&a.dims(1, "dim")?, keepdim(a))));
    ops.add(method!(count_nonzero(ints)))
        .case(nondifferentiable("count_nonzero", &[Signed(S)], |x| x[0].count_nonzero([1])))
        .golden(|a| single(a.tensor(0)?.count_nonzero(&a.dims(1, "dim")?)));
    ops.add(method!(var_mean(ints, float, flag)))
        .case(smooth("var_mean", &[Signed(&[3, 7])], |x| {
            let (var, mean) = x[0].var_mean([1], 1.0, false)?;
            var.mul(&mean)
        }))
        .golden(|a| {
            let (dims, correction, keepdim) = spread(a)?;
            pair(a.tensor(0)?.var_mean(&dims, correction, keepdim)?)
        });
    ops.add(method!(renorm(float, int, float)))
        .case(nonsmooth("renorm", &[Signed(S)], |x| x[0].renorm(2.0, 0, 1.5)))
        .golden(|a| {
            single(a.tensor(0)?.renorm(
                a.float(1, "p", 2.0)?,
                a.dim(2, "dim", 0)?,
                a.float(3, "maxnorm", 1.0)?,
            ))
        });
    ops.add(method!(nansum(ints, flag)))
        .case(smooth("nansum", &[Signed(S)], |x| x[0].nansum([1], false)))
        .golden(|a| {
            Ok(vec![a.cast_to_dtype_arg(
                a.tensor_as_dtype_arg(0)?.nansum(&a.dims(1, "dim")?, a.flag(2, "keepdim", false))?,
            )?])
        });
    ops.add(method!(nanmean(ints, flag)))
        .case(smooth("nanmean", &[Signed(S)], |x| x[0].nanmean([0], true)))
        .golden(|a| {
            single(a.tensor_as_dtype_arg(0)?.nanmean(&a.dims(1, "dim")?, a.flag(2, "keepdim", false)))
        });
    ops.add(method!(std_mean(ints, float, flag)))
        .case(smooth("std_mean", &[Signed(S)], |x| {
            let (std, mean) = x[0].std_mean([1], 1.0, false)?;
            cat(&[&std, &mean], 0)
        }))
        .golden(|a| {
            let (dims, correction, keepdim) = spread(a)?;
            pair(a.tensor(0)?.std_mean(&dims, correction, keepdim)?)
        });
    ops.add(method!(logcumsumexp(int)))
        .case(smooth("logcumsumexp", &[Signed(S)], |x| x[0].logcumsumexp(1)))
        .golden(|a| single(a.tensor(0)?.logcumsumexp(a.dim(1, "dim", 0)?)));
    ops.add(method!(trapezoid(operand1, int)))
        .case(smooth("trapezoid", &[Signed(S), Positive(&[5])], |x| x[0].trapezoid(&x[1], 1)))
        .golden(|a| single(a.tensor(0)?.trapezoid(spacing(a)?, a.dim(NAMED, "dim", -1)?)));
    ops.add(method!(cumulative_trapezoid(operand1, int)))
        .case(smooth("cumulative_trapezoid", &[Signed(S)], |x| x[0].cumulative_trapezoid(0.5, 0)))
        .golden(|a| single(a.tensor(0)?.cumulative_trapezoid(spacing(a)?, a.dim(NAMED, "dim", -1)?)));
    ops.add(method!(gradient(operand1, int, count)))
        .case(smooth("gradient", &[Signed(S)], |x| x[0].gradient(0.5, 1, 2)))
        .case(smooth("gradient at positions", &[Signed(S)], |x| {
            x[0].gradient(&Tensor::new([0.0, 0.5, 0.8, 2.0, 2.5], x[0].device())?, -1, 1)
        }))
        .golden(|a| {
            let (x, order) = (a.tensor(0)?, a.count(NAMED, "edge_order", 1)?);
            let dims = match a.dims(NAMED, "dim")? {
                dims if dims.is_empty() => (0..x.rank() as isize).collect(),
                dims => dims,
            };
            // One spacing for all dimensions, or a list of numbers or of positions, one for each.
            if a.get(NAMED, "spacing").is_some_and(|v| v["l"][0].get("t").is_some()) {
                let positions = a.named_tensors(NAMED, "spacing")?;
                return dims.iter().zip(positions).map(|(&d, at)| Ok(x.gradient(at, d, order)?)).collect();
            }
            let distances = a.floats(NAMED, "spacing")?.unwrap_or_else(|| vec![1.0]);
            let of = |k: usize| distances.get(k).or(distances.first()).copied().unwrap_or(1.0);
            dims.iter().enumerate().map(|(k, &d)| Ok(x.gradient(of(k), d, order)?)).collect()
        });
    ops.add(method!(cov(CovOptions { correction: float, fweights: maybe1, aweights: maybe2 })))
        .case(
            smooth("cov", &[Signed(&[3, 6])], |x| x[0].cov(&Default::default()))
                .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1)),
        )
        .case(
            smooth("cov of weights", &[Signed(&[3, 6]), Index(&[6], 4), Positive(&[6])], |x| {
                x[0].cov(&CovOptions { fweights: Some(&x[1]), aweights: Some(&x[2]), ..Default::default() })
            })
            .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1)),
        )
        .golden(|a| {
            let correction = a.float(NAMED, "correction", 1.0)?;
            let weights = |name| a.opt_tensor(NAMED, name);
            single(a.tensor(0)?.cov(&CovOptions {
                correction,
                fweights: weights("fweights"),
                aweights: weights("aweights"),
            }))
        });
    ops.add(method!(corrcoef()))
        .case(
            nonsmooth("corrcoef", &[Signed(&[3, 6])], |x| x[0].corrcoef())
                .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1)),
        )
        .golden(|a| single(a.tensor(0)?.corrcoef()));
}

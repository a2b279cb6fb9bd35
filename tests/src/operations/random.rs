//! Random numbers, dropout and samples.

use super::prelude::*;

/// Makes zeros, which `write` replaces.
fn fill(dtype: DType, device: &Device, write: fn(&Tensor) -> Result<()>) -> Result<Tensor> {
    let x = Tensor::zeros(S, dtype, device)?;
    write(&x)?;
    Ok(x)
}

/// Applies an operation in place to a copy.
fn in_place(a: &Args<'_>, write: impl FnOnce(&Tensor) -> Result<()>) -> anyhow::Result<Vec<Tensor>> {
    let x = a.tensor(0)?.copy()?;
    write(&x)?;
    Ok(vec![x])
}

/// Golden call of an operation with a probability that applies in training.
macro_rules! dropout_call {
    ($name:ident) => {
        |a| {
            // The seed and the keyword for in-place work have no effect here.
            single(a.tensor(0)?.$name(a.float(1, "p", 0.5)?, a.flag(2, "training", true)))
        }
    };
}

/// Golden call of a factory like a tensor, in its type or the type of the argument `dtype`.
macro_rules! like_call {
    ($name:ident) => {
        |a| {
            let x = a.tensor(0)?;
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(x.dtype());
            single(x.to_dtype(dtype)?.$name())
        }
    };
}

/// Returns the bounds of random integers, of which the first may be left out, and the position after them.
fn integer_bounds(a: &Args<'_>, at: usize) -> anyhow::Result<([i64; 2], usize)> {
    let first = a.int(at, "high", 0)?;
    match a.get(at + 1, "").filter(|v| v.is_i64()) {
        Some(_) => Ok(([first, a.int(at + 1, "", 0)?], at + 2)),
        None => Ok(([0, first], at + 1)),
    }
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(constructor!(randperm(count, dtype, device)))
        .case(factory!("randperm", |_t, d| Tensor::randperm(9, DType::I32, d)))
        .golden(|a| {
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(DType::I64);
            single(Tensor::randperm(a.count(0, "n", 0)?, dtype, a.device()))
        });
    ops.add(constructor!(rand(counts, dtype, device)))
        .case(factory!("rand", |t, d| Tensor::rand(S, t, d)))
        .golden(|a| {
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(DType::F32);
            single(Tensor::rand(&a.shape(0, "size")?, dtype, a.device()))
        });
    ops.add(constructor!(uniform(counts, float, float, dtype, device)))
        .case(factory!("uniform", |t, d| Tensor::uniform(S, -2.0, 3.0, t, d)));
    ops.add(constructor!(randn(counts, dtype, device)))
        .case(factory!("randn", |t, d| Tensor::randn(S, t, d)))
        .golden(|a| {
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(DType::F32);
            single(Tensor::randn(&a.shape(0, "size")?, dtype, a.device()))
        });
    ops.add(constructor!(normal(counts, float, float, dtype, device)))
        .case(factory!("normal", |t, d| Tensor::normal(S, 1.0, 0.5, t, d)))
        .golden(|a| {
            // Means and deviations are tensors or numbers. PyTorch's `normal_` is the variant `in_place`.
            if a.variant() == "in_place" {
                let (mean, std) = (a.float(1, "mean", 0.0)?, a.float(2, "std", 1.0)?);
                return in_place(a, |x| x.normal_(mean, std));
            }
            let dtype = a.dtype(NAMED, "dtype")?;
            let mean = a.operand(0, "mean", Scalar::Float(0.0))?;
            let std = a.operand(1, "std", Scalar::Float(1.0))?;
            let samples = match (mean, std) {
                (Operand::Tensor(mean), Operand::Tensor(std)) => {
                    broadcast_tensors(&[mean, std])?[0].randn_like()?
                }
                (Operand::Tensor(t), _) | (_, Operand::Tensor(t)) => t.randn_like()?,
                _ => Tensor::randn(&a.shape(2, "size")?, dtype.unwrap_or(DType::F32), a.device())?,
            };
            single(samples.detach().mul(std)?.add(mean))
        });
    ops.add(method!(rand_like()))
        .case(factory!("rand_like", |t, d| Tensor::zeros(S, t, d)?.rand_like()))
        .golden(like_call!(rand_like));
    ops.add(method!(randn_like()))
        .case(factory!("randn_like", |t, d| Tensor::zeros(S, t, d)?.randn_like()))
        .golden(like_call!(randn_like));
    ops.add(constructor!(randint(int64, int64, counts, dtype, device)))
        .case(factory!("randint", |_t, d| Tensor::randint(-3, 9, S, DType::I32, d)))
        .golden(|a| {
            let ([low, high], at) = integer_bounds(a, 0)?;
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(DType::I64);
            single(Tensor::randint(low, high, &a.shape(at, "size")?, dtype, a.device()))
        });
    ops.add(constructor!(bernoulli(counts, float, dtype, device)))
        .case(factory!("bernoulli", |t, d| Tensor::bernoulli(S, 0.3, t, d)));
    ops.add(method!(randint_like(int64, int64)))
        .case(factory!("randint_like", |_t, d| Tensor::zeros(S, DType::I32, d)?.randint_like(-3, 9)))
        .golden(|a| {
            let ([low, high], _) = integer_bounds(a, 1)?;
            let x = a.tensor(0)?;
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(x.dtype());
            single(x.to_dtype(dtype)?.randint_like(low, high))
        });
    ops.add(method!(sample_bernoulli()))
        .case(factory!("sample_bernoulli", |t, d| Tensor::full(S, 0.3, t, d)?.sample_bernoulli()))
        .golden_as("bernoulli", unary_call!(sample_bernoulli));
    ops.add(method!(uniform_(float, float)))
        .case(factory!("uniform_", |t, d| fill(t, d, |x| x.uniform_(-2.0, 3.0))))
        .golden_as("uniform", |a| {
            let (low, high) = (a.float(1, "from", 0.0)?, a.float(2, "to", 1.0)?);
            in_place(a, |x| x.uniform_(low, high))
        });
    ops.add(method!(normal_(float, float)))
        .case(factory!("normal_", |t, d| fill(t, d, |x| x.normal_(1.0, 0.5))));
    ops.add(method!(random_(int64, int64)))
        .case(factory!("random_", |_t, d| fill(DType::I32, d, |x| x.random_(-3, 9))));
    ops.add(method!(bernoulli_(operand1)))
        .case(factory!("bernoulli_", |t, d| fill(t, d, |x| x.bernoulli_(0.3))));
    ops.add(method!(exponential_(float)))
        .case(factory!("exponential_", |t, d| fill(t, d, |x| x.exponential_(1.5))))
        .golden_as("exponential", |a| {
            let rate = a.float(1, "lambd", 1.0)?;
            in_place(a, |x| x.exponential_(rate))
        });
    ops.add(method!(geometric_(float)))
        .case(factory!("geometric_", |t, d| fill(t, d, |x| x.geometric_(0.3))))
        .golden_as("geometric", |a| {
            let p = a.float(1, "p", 0.5)?;
            in_place(a, |x| x.geometric_(p))
        });
    ops.add(method!(cauchy_(float, float)))
        .case(factory!("cauchy_", |t, d| fill(t, d, |x| x.cauchy_(0.0, 0.5))))
        .golden_as("cauchy", |a| {
            let (median, sigma) = (a.float(1, "median", 0.0)?, a.float(2, "sigma", 1.0)?);
            in_place(a, |x| x.cauchy_(median, sigma))
        });
    ops.add(method!(log_normal_(float, float)))
        .case(factory!("log_normal_", |t, d| fill(t, d, |x| x.log_normal_(0.0, 0.5))))
        .golden_as("log_normal", |a| {
            let (mean, std) = (a.float(1, "mean", 1.0)?, a.float(2, "std", 2.0)?);
            in_place(a, |x| x.log_normal_(mean, std))
        });
    ops.add(method!(rrelu(RreluOptions { lower: float, upper: float, training: flag })))
        .case(smooth("rrelu", &[Signed(S)], |x| {
            x[0].rrelu(&RreluOptions { lower: 0.1, upper: 0.3, training: true })
        }))
        .golden(|a| {
            let (lower, upper) = (a.float(1, "lower", 1.0 / 8.0)?, a.float(2, "upper", 1.0 / 3.0)?);
            single(a.tensor(0)?.rrelu(&RreluOptions { lower, upper, training: a.flag(3, "training", false) }))
        });
    ops.add(method!(dropout(float, flag)))
        .case(
            smooth("dropout", &[Signed(S)], |x| x[0].dropout(0.4, true))
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .golden(dropout_call!(dropout));
    ops.add(method!(gumbel_softmax(float, flag, int)))
        .case(
            smooth("gumbel_softmax", &[Signed(S)], |x| x[0].gumbel_softmax(0.7, false, -1))
                .with_tolerances(case::ONE_ROUNDING),
        )
        .golden(|a| {
            let hard = a.flag(2, "hard", false);
            single(a.tensor(0)?.gumbel_softmax(a.float(1, "tau", 1.0)?, hard, a.dim(4, "dim", -1)?))
        });
    ops.add(method!(feature_dropout(float, flag)))
        .case(smooth("feature_dropout", &[Signed(&[3, 4, 5])], |x| x[0].feature_dropout(0.4, true)))
        .golden_as("nn.functional.dropout1d", dropout_call!(feature_dropout))
        .golden_as("nn.functional.dropout2d", dropout_call!(feature_dropout))
        .golden_as("nn.functional.dropout3d", dropout_call!(feature_dropout));
    ops.add(method!(alpha_dropout(float, flag)))
        .case(
            smooth("alpha_dropout", &[Signed(S)], |x| x[0].alpha_dropout(0.4, true))
                .with_tolerances(case::ONE_ROUNDING),
        )
        .golden(dropout_call!(alpha_dropout));
    ops.add(method!(feature_alpha_dropout(float, flag)))
        .case(
            smooth("feature_alpha_dropout", &[Signed(&[3, 4, 5])], |x| x[0].feature_alpha_dropout(0.4, true))
                .with_tolerances(case::ONE_ROUNDING),
        )
        .golden(dropout_call!(feature_alpha_dropout));
    ops.add(method!(multinomial(count, flag)))
        .case(nondifferentiable("multinomial", &[Positive(S)], |x| x[0].multinomial(3, false)))
        .case(nondifferentiable("multinomial with replacement", &[Positive(S)], |x| {
            x[0].multinomial(9, true)
        }))
        .golden(|a| {
            single(a.tensor(0)?.multinomial(a.count(1, "num_samples", 1)?, a.flag(2, "replacement", false)))
        });
}

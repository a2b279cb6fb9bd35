//! Random numbers, dropout and samples.

use super::prelude::*;

/// Makes zeros, which `write` replaces.
fn fill(dtype: DType, device: &Device, write: fn(&Tensor) -> Result<()>) -> Result<Tensor> {
    let x = Tensor::zeros(S, dtype, device)?;
    write(&x)?;
    Ok(x)
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(constructor!(randperm(count, dtype, device)))
        .case(factory!("randperm", |_t, d| Tensor::randperm(9, DType::I32, d)));
    ops.add(constructor!(rand(counts, dtype, device))).case(factory!("rand", |t, d| Tensor::rand(S, t, d)));
    ops.add(constructor!(uniform(counts, float, float, dtype, device)))
        .case(factory!("uniform", |t, d| Tensor::uniform(S, -2.0, 3.0, t, d)));
    ops.add(constructor!(randn(counts, dtype, device)))
        .case(factory!("randn", |t, d| Tensor::randn(S, t, d)));
    ops.add(constructor!(normal(counts, float, float, dtype, device)))
        .case(factory!("normal", |t, d| Tensor::normal(S, 1.0, 0.5, t, d)));
    ops.add(method!(rand_like())).case(factory!("rand_like", |t, d| Tensor::zeros(S, t, d)?.rand_like()));
    ops.add(method!(randn_like())).case(factory!("randn_like", |t, d| Tensor::zeros(S, t, d)?.randn_like()));
    ops.add(constructor!(randint(int64, int64, counts, dtype, device)))
        .case(factory!("randint", |_t, d| Tensor::randint(-3, 9, S, DType::I32, d)));
    ops.add(constructor!(bernoulli(counts, float, dtype, device)))
        .case(factory!("bernoulli", |t, d| Tensor::bernoulli(S, 0.3, t, d)));
    ops.add(method!(randint_like(int64, int64))).case(factory!("randint_like", |_t, d| Tensor::zeros(
        S,
        DType::I32,
        d
    )?
    .randint_like(-3, 9)));
    ops.add(method!(sample_bernoulli()))
        .case(factory!("sample_bernoulli", |t, d| Tensor::full(S, 0.3, t, d)?.sample_bernoulli()));
    ops.add(method!(uniform_(float, float)))
        .case(factory!("uniform_", |t, d| fill(t, d, |x| x.uniform_(-2.0, 3.0))));
    ops.add(method!(normal_(float, float)))
        .case(factory!("normal_", |t, d| fill(t, d, |x| x.normal_(1.0, 0.5))));
    ops.add(method!(random_(int64, int64)))
        .case(factory!("random_", |_t, d| fill(DType::I32, d, |x| x.random_(-3, 9))));
    ops.add(method!(bernoulli_(operand1)))
        .case(factory!("bernoulli_", |t, d| fill(t, d, |x| x.bernoulli_(0.3))));
    ops.add(method!(exponential_(float)))
        .case(factory!("exponential_", |t, d| fill(t, d, |x| x.exponential_(1.5))));
    ops.add(method!(geometric_(float)))
        .case(factory!("geometric_", |t, d| fill(t, d, |x| x.geometric_(0.3))));
    ops.add(method!(cauchy_(float, float)))
        .case(factory!("cauchy_", |t, d| fill(t, d, |x| x.cauchy_(0.0, 0.5))));
    ops.add(method!(log_normal_(float, float)))
        .case(factory!("log_normal_", |t, d| fill(t, d, |x| x.log_normal_(0.0, 0.5))));
    ops.add(method!(rrelu(RreluOptions { lower: float, upper: float, training: flag }))).case(smooth(
        "rrelu",
        &[Signed(S)],
        |x| x[0].rrelu(&RreluOptions { lower: 0.1, upper: 0.3, training: true }),
    ));
    ops.add(method!(dropout(float, flag))).case(
        smooth("dropout", &[Signed(S)], |x| x[0].dropout(0.4, true))
            .with_bench_inputs(&[Signed(&[4096, 4096])]),
    );
    ops.add(method!(gumbel_softmax(float, flag, int))).case(
        smooth("gumbel_softmax", &[Signed(S)], |x| x[0].gumbel_softmax(0.7, false, -1))
            .with_tolerances(case::ONE_ROUNDING),
    );
    ops.add(method!(feature_dropout(float, flag))).case(smooth(
        "feature_dropout",
        &[Signed(&[3, 4, 5])],
        |x| x[0].feature_dropout(0.4, true),
    ));
    ops.add(method!(alpha_dropout(float, flag))).case(
        smooth("alpha_dropout", &[Signed(S)], |x| x[0].alpha_dropout(0.4, true))
            .with_tolerances(case::ONE_ROUNDING),
    );
    ops.add(method!(feature_alpha_dropout(float, flag))).case(
        smooth("feature_alpha_dropout", &[Signed(&[3, 4, 5])], |x| x[0].feature_alpha_dropout(0.4, true))
            .with_tolerances(case::ONE_ROUNDING),
    );
    ops.add(method!(multinomial(count, flag)))
        .case(nondifferentiable("multinomial", &[Positive(S)], |x| x[0].multinomial(3, false)))
        .case(nondifferentiable("multinomial with replacement", &[Positive(S)], |x| {
            x[0].multinomial(9, true)
        }));
}

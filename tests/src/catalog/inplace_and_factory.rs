//! Other public operations: in-place, factories, random, matrix products, losses, 1D and 3D pooling.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::ops::{
    AddmmOptions, GaussianNllLossOptions, NanToNumOptions, PairwiseDistanceOptions, Pool1dOptions,
    Pool2dOptions, Pool3dOptions, PoolOptions, Reduction, RreluOptions, ScatterReduce,
    TransposedConvolutionOptions, TripletMarginLossOptions, TripletMarginWithDistanceLossOptions,
};
use forebay::tensor::Tensor;

use super::InputSpec::{Bool, Bounded, Index, Positive, Signed};
use super::case::{self, OpCase, S, nondifferentiable, nonsmooth, smooth};
use super::cost;

/// Applies an in-place operation to a copy of the first input, which keeps the autograd history.
fn apply_inplace(x: &[Tensor], write: impl FnOnce(&Tensor) -> Result<()>) -> Result<Tensor> {
    let y = x[0].copy()?;
    write(&y)?;
    Ok(y)
}

/// Casts to an integer type that every device supports.
fn to_int(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::I32)
}

macro_rules! unary {
    ($kind:ident, $input:ident: $($name:ident $(($($arg:expr),*))?),* $(,)?) => {
        &[$($kind(stringify!($name), &[$input(S)], |x| apply_inplace(x, |y| y.$name($($($arg),*)?)))),*]
    };
}

macro_rules! binary {
    ($kind:ident, $a:ident, $b:ident: $($name:ident),* $(,)?) => {
        &[$($kind(stringify!($name), &[$a(S), $b(&[3, 1])], |x| apply_inplace(x, |y| y.$name(&x[1])))),*]
    };
}

pub(super) const IN_PLACE: &[&[OpCase]] = &[
    unary!(smooth, Signed: neg_, abs_, square_, reciprocal_, exp_, expm1_, sin_, cos_, tanh_, sigmoid_, relu_, relu6_,
        leaky_relu_(0.1), elu_(1.0), celu_(1.5), selu_, silu_, mish_, hardswish_, atan_, sinh_, cosh_, asinh_, erf_, erfc_,
        frac_, i0_, nan_to_num_, cumsum_(1), cumprod_(1), tril_(0), triu_(1)),
    unary!(smooth, Positive: sqrt_, rsqrt_, log_, log1p_, log2_, log10_, lgamma_, digamma_, sinc_, polygamma_(1)),
    unary!(smooth, Bounded: asin_, acos_, atanh_, tan_, erfinv_),
    unary!(nonsmooth, Signed: sign_, renorm_(2.0, 0, 1.5), rrelu_(&RreluOptions { lower: 0.1, upper: 0.3, training: false }),
        floor_, ceil_, round_, trunc_, hardtanh_(-1.0, 1.0), hardsigmoid_, threshold_(0.2, 7.0),
        clamp_(-0.5, 1.0)),
    binary!(smooth, Signed, Positive: add_, sub_, mul_, div_, atan2_, hypot_, xlogy_, ldexp_),
    binary!(nonsmooth, Signed, Positive: fmod_, remainder_, floor_divide_, copysign_),
    binary!(smooth, Positive, Signed: pow_),
    &[
        smooth("masked_fill_", &[Signed(S), Bool(S)], |x| apply_inplace(x, |y| y.masked_fill_(&x[1], 4.0))),
        smooth("addcmul_", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| {
            apply_inplace(x, |y| y.addcmul_(&x[1], &x[2], 0.7))
        }),
        smooth("addcdiv_", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| {
            apply_inplace(x, |y| y.addcdiv_(&x[1], &x[2], 0.7))
        }),
        smooth("lerp_", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| {
            apply_inplace(x, |y| y.lerp_(&x[1], &x[2]))
        }),
        smooth("copy_", &[Signed(S), Positive(&[5])], |x| {
            let y = x[0].mul(2.0)?;
            y.narrow(0, 1, 2)?.copy_(&x[1])?;
            Ok(y)
        }),
        nonsmooth("embedding_renorm_", &[Signed(&[6, 4]), Index(&[3], 6)], |x| {
            let table = x[0].detach().copy()?;
            table.embedding_renorm_(&x[1], 0.5, 2.0)?;
            x[0].add(&table)
        }),
        smooth("fill_", &[Signed(S)], |x| apply_inplace(x, |y| y.narrow(0, 1, 1)?.fill_(2.5))),
        smooth("acosh_", &[Positive(S)], |x| apply_inplace(&[x[0].add(1.5)?], |y| y.acosh_())),
        smooth("logit_", &[Positive(S)], |x| apply_inplace(&[x[0].mul(0.25)?], |y| y.logit_(None))),
        smooth("mvlgamma_", &[Positive(S)], |x| apply_inplace(&[x[0].add(1.5)?], |y| y.mvlgamma_(3)))
            .with_tolerances(case::ONE_ROUNDING_NEAR_4),
        smooth("addmm_", &[Signed(&[3, 5]), Signed(&[3, 4]), Signed(&[4, 5])], |x| {
            apply_inplace(x, |y| y.addmm_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        })
        .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
        smooth("addmv_", &[Signed(&[3]), Signed(&[3, 4]), Signed(&[4])], |x| {
            apply_inplace(x, |y| y.addmv_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        })
        .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
        smooth("addr_", &[Signed(&[3, 4]), Signed(&[3]), Signed(&[4])], |x| {
            apply_inplace(x, |y| y.addr_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        }),
        smooth("baddbmm_", &[Signed(&[2, 3, 5]), Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| {
            apply_inplace(x, |y| y.baddbmm_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        })
        .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
        smooth("addbmm_", &[Signed(&[3, 5]), Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| {
            apply_inplace(x, |y| y.addbmm_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        })
        .with_flops(|x, _| 2 * cost::numel(&x[1]) * cost::extent(&x[2], 2)),
        smooth("scatter_", &[Signed(S), Signed(&[1, 5])], |x| {
            let rows = Tensor::from_slice(&[2i64, 0, 1, 1, 2], [1, 5], x[0].device())?;
            apply_inplace(x, |y| y.scatter_(0, &rows, &x[1]))
        }),
        smooth("scatter_value_", &[Signed(S), Index(&[1, 5], 3)], |x| {
            apply_inplace(x, |y| y.scatter_value_(0, &x[1], 0.5))
        }),
        smooth("scatter_add_", &[Signed(&[4, 5]), Index(&[3, 5], 4), Signed(&[3, 5])], |x| {
            apply_inplace(x, |y| y.scatter_add_(0, &x[1], &x[2]))
        }),
        smooth("scatter_reduce_", &[Signed(&[4, 5]), Index(&[3, 5], 4), Signed(&[3, 5])], |x| {
            apply_inplace(x, |y| y.scatter_reduce_(0, &x[1], &x[2], ScatterReduce::Prod, true))
        }),
        smooth("index_add_", &[Signed(S), Index(&[4], 3), Signed(&[4, 5])], |x| {
            apply_inplace(x, |y| y.index_add_(0, &x[1], &x[2], 0.5))
        }),
        smooth("index_copy_", &[Signed(S), Index(&[2], 3), Positive(&[2, 5])], |x| {
            apply_inplace(x, |y| y.index_copy_(0, &x[1], &x[2]))
        }),
        smooth("index_fill_", &[Signed(S), Index(&[2], 5)], |x| {
            apply_inplace(x, |y| y.index_fill_(1, &x[1], 0.5))
        }),
        smooth("index_put_", &[Signed(S), Index(&[2], 3), Positive(&[2, 5])], |x| {
            apply_inplace(x, |y| y.index_put_(&[Some(&x[1])], &x[2], true))
        }),
        smooth("index_reduce_", &[Signed(S), Index(&[4], 3), Positive(&[4, 5])], |x| {
            apply_inplace(x, |y| y.index_reduce_(0, &x[1], &x[2], ScatterReduce::Amax, true))
        }),
        smooth("masked_scatter_", &[Signed(S), Bool(&[5]), Positive(&[15])], |x| {
            apply_inplace(x, |y| y.masked_scatter_(&x[1], &x[2]))
        }),
        smooth("put_", &[Signed(S), Index(&[4], 15), Positive(&[4])], |x| {
            apply_inplace(x, |y| y.put_(&x[1], &x[2], true))
        }),
        nondifferentiable("bitwise_not_", &[Bool(S)], |x| apply_inplace(x, |y| y.bitwise_not_())),
        nondifferentiable("bitwise_and_", &[Bool(S), Bool(&[5])], |x| {
            apply_inplace(x, |y| y.bitwise_and_(&x[1]))
        }),
        nondifferentiable("bitwise_or_", &[Bool(S), Bool(&[5])], |x| {
            apply_inplace(x, |y| y.bitwise_or_(&x[1]))
        }),
        nondifferentiable("bitwise_xor_", &[Bool(S), Bool(&[5])], |x| {
            apply_inplace(x, |y| y.bitwise_xor_(&x[1]))
        }),
        nondifferentiable("gcd_", &[Index(S, 60), Index(&[5], 48)], |x| {
            apply_inplace(&[to_int(&x[0])?], |y| y.gcd_(&to_int(&x[1])?))
        }),
        nondifferentiable("lcm_", &[Index(S, 60), Index(&[5], 48)], |x| {
            apply_inplace(&[to_int(&x[0])?], |y| y.lcm_(&to_int(&x[1])?))
        }),
        nondifferentiable("bitwise_left_shift_", &[Index(S, 60), Index(&[5], 20)], |x| {
            apply_inplace(&[to_int(&x[0])?], |y| y.bitwise_left_shift_(&to_int(&x[1])?))
        }),
        nondifferentiable("bitwise_right_shift_", &[Index(S, 60), Index(&[5], 5)], |x| {
            apply_inplace(&[to_int(&x[0])?], |y| y.bitwise_right_shift_(&to_int(&x[1])?))
        }),
        smooth("nan_to_num_with_", &[Signed(S)], |x| {
            apply_inplace(x, |y| y.nan_to_num_with_(&NanToNumOptions { nan: 1.0, ..Default::default() }))
        }),
        smooth("zero_", &[Signed(S)], |x| apply_inplace(x, |y| y.narrow(1, 2, 2)?.zero_())),
    ],
];

/// Defines a record of a factory operation.
macro_rules! factory {
    ($name:literal, |$dtype:ident, $device:ident| $made:expr) => {
        nondifferentiable($name, &[Signed(S)], |x| {
            let ($dtype, $device) = (x[0].dtype(), x[0].device());
            $made
        })
        .as_factory()
    };
}

/// Makes zeros, which `write` replaces.
fn fill(dtype: DType, device: &Device, write: fn(&Tensor) -> Result<()>) -> Result<Tensor> {
    let x = Tensor::zeros(S, dtype, device)?;
    write(&x)?;
    Ok(x)
}

pub(super) const FACTORY: &[OpCase] = &[
    factory!("arange", |t, d| Tensor::arange(1.0, 9.0, 0.5, t, d)).with_bytes(cost::no_bytes),
    factory!("linspace", |t, d| Tensor::linspace(-1.0, 2.0, 7, t, d)).with_bytes(cost::no_bytes),
    factory!("logspace", |t, d| Tensor::logspace(-1.0, 2.0, 7, 2.0, t, d)).with_bytes(cost::no_bytes),
    factory!("hann_window", |t, d| Tensor::hann_window(9, true, t, d)).with_bytes(cost::no_bytes),
    factory!("hamming_window", |t, d| Tensor::hamming_window(9, true, t, d)).with_bytes(cost::no_bytes),
    factory!("blackman_window", |t, d| Tensor::blackman_window(9, false, t, d)).with_bytes(cost::no_bytes),
    factory!("bartlett_window", |t, d| Tensor::bartlett_window(9, false, t, d)).with_bytes(cost::no_bytes),
    factory!("kaiser_window", |t, d| Tensor::kaiser_window(9, true, 12.0, t, d)).with_bytes(cost::no_bytes),
    factory!("gaussian_window", |t, d| Tensor::gaussian_window(9, 2.0, true, t, d))
        .with_bytes(cost::no_bytes),
    factory!("general_cosine_window", |t, d| Tensor::general_cosine_window(9, &[0.5, 0.3, 0.2], true, t, d))
        .with_bytes(cost::no_bytes),
    factory!("randperm", |_t, d| Tensor::randperm(9, DType::I32, d)),
    factory!("tril_indices", |_t, d| Tensor::tril_indices(3, 4, 0, d)),
    factory!("triu_indices", |_t, d| Tensor::triu_indices(3, 4, 1, d)),
    factory!("eye", |t, d| Tensor::eye(3, 5, t, d)),
    factory!("rand", |t, d| Tensor::rand(S, t, d)),
    factory!("uniform", |t, d| Tensor::uniform(S, -2.0, 3.0, t, d)),
    factory!("randn", |t, d| Tensor::randn(S, t, d)),
    factory!("normal", |t, d| Tensor::normal(S, 1.0, 0.5, t, d)),
    factory!("rand_like", |t, d| Tensor::zeros(S, t, d)?.rand_like()),
    factory!("randn_like", |t, d| Tensor::zeros(S, t, d)?.randn_like()),
    factory!("randint", |_t, d| Tensor::randint(-3, 9, S, DType::I32, d)),
    factory!("bernoulli", |t, d| Tensor::bernoulli(S, 0.3, t, d)),
    factory!("randint_like", |_t, d| Tensor::zeros(S, DType::I32, d)?.randint_like(-3, 9)),
    factory!("sample_bernoulli", |t, d| Tensor::full(S, 0.3, t, d)?.sample_bernoulli()),
    factory!("uniform_", |t, d| fill(t, d, |x| x.uniform_(-2.0, 3.0))),
    factory!("normal_", |t, d| fill(t, d, |x| x.normal_(1.0, 0.5))),
    factory!("random_", |_t, d| fill(DType::I32, d, |x| x.random_(-3, 9))),
    factory!("bernoulli_", |t, d| fill(t, d, |x| x.bernoulli_(0.3))),
    factory!("exponential_", |t, d| fill(t, d, |x| x.exponential_(1.5))),
    factory!("geometric_", |t, d| fill(t, d, |x| x.geometric_(0.3))),
    factory!("cauchy_", |t, d| fill(t, d, |x| x.cauchy_(0.0, 0.5))),
    factory!("log_normal_", |t, d| fill(t, d, |x| x.log_normal_(0.0, 0.5))),
];

/// Returns one sign for each row.
fn row_signs(x: &Tensor) -> Result<Tensor> {
    Tensor::from_slice(&[1f32, -1.0, 1.0], [3], x.device())?.to_dtype(x.dtype())
}

pub(super) const REMAINING: &[OpCase] = &[
    smooth("acosh", &[Positive(S)], |x| x[0].add(1.5)?.acosh()),
    smooth("softmin", &[Signed(S)], |x| x[0].softmin(-1)),
    smooth("softmax_with_dtype", &[Signed(S)], |x| {
        x[0].softmax_with_dtype(-1, x[0].dtype().promote(DType::F32))
    }),
    smooth("log_softmax_with_dtype", &[Signed(S)], |x| {
        x[0].log_softmax_with_dtype(0, x[0].dtype().promote(DType::F32))
    }),
    smooth("rrelu", &[Signed(S)], |x| x[0].rrelu(&RreluOptions { lower: 0.1, upper: 0.3, training: true })),
    smooth("dropout", &[Signed(S)], |x| x[0].dropout(0.4, true)).with_bench_inputs(&[Signed(&[4096, 4096])]),
    smooth("gumbel_softmax", &[Signed(S)], |x| x[0].gumbel_softmax(0.7, false, -1))
        .with_tolerances(case::ONE_ROUNDING),
    smooth("feature_dropout", &[Signed(&[3, 4, 5])], |x| x[0].feature_dropout(0.4, true)),
    smooth("alpha_dropout", &[Signed(S)], |x| x[0].alpha_dropout(0.4, true))
        .with_tolerances(case::ONE_ROUNDING),
    smooth("feature_alpha_dropout", &[Signed(&[3, 4, 5])], |x| x[0].feature_alpha_dropout(0.4, true))
        .with_tolerances(case::ONE_ROUNDING),
    nondifferentiable("bitwise_not", &[Bool(S)], |x| x[0].bitwise_not()),
    nondifferentiable("bitwise_and", &[Bool(S), Bool(&[5])], |x| x[0].bitwise_and(&x[1])),
    nondifferentiable("bitwise_or", &[Bool(S), Bool(&[5])], |x| x[0].bitwise_or(&x[1])),
    nondifferentiable("bitwise_xor", &[Bool(S), Bool(&[5])], |x| x[0].bitwise_xor(&x[1])),
    nondifferentiable("one_hot", &[Index(S, 4)], |x| x[0].to_dtype(DType::I32)?.one_hot(4)),
    smooth("pixel_unshuffle", &[Signed(&[1, 2, 4, 6])], |x| x[0].pixel_unshuffle(2)),
    // If source elements share an index, the last one wins; here the indices are distinct.
    smooth("scatter", &[Signed(S), Signed(&[1, 5])], |x| {
        let rows = Tensor::from_slice(&[2i64, 0, 1, 1, 2], [1, 5], x[0].device())?;
        x[0].scatter(0, &rows, &x[1])
    }),
    smooth("scatter_value", &[Signed(S), Index(&[1, 5], 3)], |x| x[0].scatter_value(0, &x[1], 0.5)),
    nondifferentiable("argwhere", &[Signed(S)], |x| x[0].argwhere()),
    nondifferentiable("nonzero_tuple", &[Signed(S)], |x| {
        forebay::ops::stack(&x[0].nonzero_tuple()?.iter().collect::<Vec<_>>(), 0)
    }),
    smooth("nanmedian_all", &[Signed(S)], |x| x[0].nanmedian_all()),
    smooth("mm", &[Signed(&[3, 4]), Signed(&[4, 5])], |x| x[0].mm(&x[1])).with_flops(cost::matmul_flops),
    smooth("bmm", &[Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| x[0].bmm(&x[1]))
        .with_flops(cost::matmul_flops),
    smooth("mv", &[Signed(&[3, 4]), Signed(&[4])], |x| x[0].mv(&x[1])).with_flops(cost::matmul_flops),
    smooth("inner", &[Signed(&[3, 4]), Signed(&[2, 4])], |x| x[0].inner(&x[1]))
        .with_flops(cost::matmul_flops),
    smooth("addmv", &[Signed(&[3]), Signed(&[3, 4]), Signed(&[4])], |x| {
        x[0].addmv(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
    })
    .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
    smooth("addr", &[Signed(&[3, 4]), Signed(&[3]), Signed(&[4])], |x| {
        x[0].addr(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
    }),
    smooth("baddbmm", &[Signed(&[3, 5]), Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| {
        x[0].baddbmm(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
    })
    .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
    smooth("addbmm", &[Signed(&[3, 5]), Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| {
        x[0].addbmm(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
    })
    .with_flops(|x, _| 2 * cost::numel(&x[1]) * cost::extent(&x[2], 2)),
    smooth("mean_all", &[Signed(S)], |x| x[0].mean_all()),
    smooth("prod_all", &[Signed(&[2, 3])], |x| x[0].prod_all()),
    smooth("max_all", &[Signed(S)], |x| x[0].max_all()),
    smooth("min_all", &[Signed(S)], |x| x[0].min_all()),
    smooth("min", &[Signed(S)], |x| Ok(x[0].min(1, false)?.0)),
    smooth("aminmax", &[Signed(S)], |x| {
        let (smallest, largest) = x[0].aminmax([1], false)?;
        largest.mul(2.0)?.sub(&smallest)
    }),
    nondifferentiable("argmax", &[Signed(S)], |x| x[0].argmax(1, false)),
    nondifferentiable("argmin", &[Signed(S)], |x| x[0].argmin((), false)),
    nondifferentiable("any", &[Signed(S)], |x| x[0].any([0], false)),
    nondifferentiable("all", &[Signed(S)], |x| x[0].all([1], true)),
    nondifferentiable("count_nonzero", &[Signed(S)], |x| x[0].count_nonzero([1])),
    smooth("var_mean", &[Signed(&[3, 7])], |x| {
        let (var, mean) = x[0].var_mean([1], 1.0, false)?;
        var.mul(&mean)
    }),
    smooth("normalize", &[Signed(S)], |x| x[0].normalize(1, &Default::default())),
    smooth("dist", &[Signed(S), Positive(&[5])], |x| x[0].dist(&x[1], 3.0)),
    smooth("pairwise_distance", &[Signed(S), Positive(S)], |x| {
        x[0].pairwise_distance(&x[1], &PairwiseDistanceOptions { keepdim: true, ..Default::default() })
    }),
    smooth("smooth_l1_loss", &[Signed(S), Positive(S)], |x| x[0].smooth_l1_loss(&x[1], 0.7, Reduction::Sum)),
    smooth("gaussian_nll_loss", &[Signed(S), Signed(S), Positive(S)], |x| {
        x[0].gaussian_nll_loss(&x[1], &x[2], &GaussianNllLossOptions { full: true, ..Default::default() })
    }),
    smooth("soft_margin_loss", &[Signed(S)], |x| {
        x[0].soft_margin_loss(&x[0].detach().sign()?, Reduction::Sum)
    }),
    nonsmooth("margin_ranking_loss", &[Signed(&[3]), Positive(&[3])], |x| {
        x[0].margin_ranking_loss(&x[1], &row_signs(&x[0])?, 0.3, Reduction::Sum)
    }),
    nonsmooth("triplet_margin_loss", &[Signed(S), Positive(S), Bounded(S)], |x| {
        x[0].triplet_margin_loss(
            &x[1],
            &x[2],
            &TripletMarginLossOptions { reduction: Reduction::Sum, ..Default::default() },
        )
    }),
    nonsmooth("triplet_margin_with_distance_loss", &[Signed(S), Positive(S), Bounded(S)], |x| {
        let distance = |a: &Tensor, b: &Tensor| a.sub(b)?.square()?.sum([1], false);
        x[0].triplet_margin_with_distance_loss(
            &x[1],
            &x[2],
            distance,
            &TripletMarginWithDistanceLossOptions { swap: true, ..Default::default() },
        )
    }),
    smooth("multilabel_soft_margin_loss", &[Signed(S), Positive(&[5])], |x| {
        let labels = x[0].detach().gt(0.0)?.to_dtype(x[0].dtype())?;
        x[0].multilabel_soft_margin_loss(&labels, Some(&x[1]), Reduction::Mean)
    }),
    smooth("max_pool1d", &[Signed(&[2, 3, 7])], |x| {
        x[0].max_pool1d(PoolOptions { stride: [2], padding: [1], ..Pool1dOptions::new(3) })
    }),
    nondifferentiable("max_pool1d_with_indices", &[Signed(&[2, 3, 7])], |x| {
        Ok(x[0].max_pool1d_with_indices(Pool1dOptions::new(2))?.1)
    }),
    smooth("max_pool2d_with_indices", &[Signed(&[2, 3, 6, 6])], |x| {
        Ok(x[0].max_pool2d_with_indices(Pool2dOptions::new(2))?.0)
    }),
    smooth("adaptive_max_pool2d_with_indices", &[Signed(&[2, 3, 5, 7])], |x| {
        Ok(x[0].adaptive_max_pool2d_with_indices([2, 3])?.0)
    }),
    nondifferentiable("adaptive_max_pool1d_with_indices", &[Signed(&[3, 7])], |x| {
        Ok(x[0].adaptive_max_pool1d_with_indices(4)?.1)
    }),
    smooth("avg_pool1d", &[Signed(&[2, 3, 7])], |x| {
        x[0].avg_pool1d(PoolOptions { stride: [2], padding: [1], ..Pool1dOptions::new(3) })
    }),
    smooth("adaptive_avg_pool1d", &[Signed(&[2, 3, 7])], |x| x[0].adaptive_avg_pool1d(4)),
    smooth("adaptive_avg_pool3d", &[Signed(&[2, 3, 4, 5])], |x| x[0].adaptive_avg_pool3d([2, 3, 2]))
        .with_tolerances(case::ONE_ROUNDING),
    smooth("adaptive_max_pool3d", &[Signed(&[2, 3, 4, 5])], |x| x[0].adaptive_max_pool3d([2, 3, 2])),
    smooth("lp_pool1d", &[Positive(&[2, 3, 7])], |x| x[0].lp_pool1d(2.0, Pool1dOptions::new(2))),
    smooth("lp_pool2d", &[Positive(&[2, 3, 4, 6])], |x| x[0].lp_pool2d(3.0, Pool2dOptions::new(2))),
    smooth("conv_transpose1d", &[Signed(&[2, 3, 4]), Signed(&[3, 2, 3]), Signed(&[2])], |x| {
        let options = TransposedConvolutionOptions {
            stride: [2],
            padding: [1],
            output_padding: [1],
            ..Default::default()
        };
        x[0].conv_transpose1d(&x[1], Some(&x[2]), &options)
    })
    .with_flops(cost::conv_transpose_flops),
    smooth("conv_transpose3d", &[Signed(&[1, 2, 3, 2, 2]), Signed(&[2, 2, 2, 2, 2])], |x| {
        x[0].conv_transpose3d(&x[1], None, &Default::default())
    })
    .with_flops(cost::conv_transpose_flops),
    nondifferentiable("scaled_mm", &[Bounded(&[32, 16]), Bounded(&[32, 16])], |x| {
        let (a, b) = (x[0].to_dtype(DType::F8E4M3)?, x[1].to_dtype(DType::F8E4M3)?.t()?);
        let scale = Tensor::full((), 0.5, DType::F32, x[0].device())?;
        a.scaled_mm(&b, &scale, &scale, None, DType::BF16)
    })
    .with_flops(cost::matmul_flops)
    .with_bench_inputs(&[Bounded(&[4096, 4096]), Bounded(&[4096, 4096])]),
    smooth("avg_pool3d of a volume", &[Signed(&[2, 4, 4, 4])], |x| x[0].avg_pool3d(Pool3dOptions::new(2))),
];

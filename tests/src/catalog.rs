//! Catalog of operations with inputs, from which checks, benchmarks and `docs/src/reference/operators.md` are
//! generated.

use forebay::dtype::DType;
use forebay::error::Result;
use forebay::ops::{
    AddmmOptions, AttentionOptions, ConvolutionOptions, CrossEntropyOptions, CtcLossOptions, DiffOptions,
    EmbeddingBagMode, EmbeddingBagOptions, EmbeddingOptions, GridMode, GridPadding, GridSampleOptions,
    Im2colOptions, InterpolateMode, InterpolateOptions, Interpolation, LocalResponseNormOptions,
    MultiMarginLossOptions, NanToNumOptions, PadMode, Pool1dOptions, Pool2dOptions, Pool3dOptions,
    PoolOptions, RecurrentKind, Reduction, ScatterReduce, SearchSortedOptions, TransposedConvolutionOptions,
    cat, einsum, stack,
};
use forebay::tensor::Tensor;

mod case;
mod cost;
#[cfg(test)]
pub(crate) mod coverage;
mod inplace_and_factory;
mod linalg;
mod manipulation;
mod norm;
mod recurrent;

use InputSpec::{Bool, Bounded, Index, Positive, Signed};
pub use case::{InputSpec, OpCase};
use case::{S, nondifferentiable, nonsmooth, smooth};
use recurrent::run_recurrent;

const fn scatter_reduce_case(name: &'static str, call: fn(&[Tensor]) -> Result<Tensor>) -> OpCase {
    smooth(name, &[Signed(&[4, 5]), Index(&[3, 5], 4), Signed(&[3, 5])], call)
}

fn scatter_reduce(x: &[Tensor], how: ScatterReduce, include_self: bool) -> Result<Tensor> {
    x[0].scatter_reduce(0, &x[1], &x[2], how, include_self)
}

macro_rules! unary {
    ($kind:ident, $input:ident: $($name:ident $(($($arg:expr),*))?),* $(,)?) => {
        &[$($kind(stringify!($name), &[$input(S)], |x| x[0].$name($($($arg),*)?)).elementwise()),*]
    };
}

macro_rules! binary {
    ($kind:ident, $a:ident, $b:ident: $($name:ident),* $(,)?) => {
        &[$($kind(stringify!($name), &[$a(&[3, 1, 5]), $b(&[4, 1])], |x| x[0].$name(&x[1])).elementwise()),*]
    };
}

const REPLACEMENTS: NanToNumOptions = NanToNumOptions { nan: 0.5, posinf: Some(2.0), neginf: Some(-2.0) };

const GROUPS: &[&[OpCase]] = &[
    unary!(smooth, Signed: neg, square, exp, exp2, expm1, sin, cos, atan, sinh, cosh, tanh, asinh, erf, erfc, sigmoid,
        frac, rad2deg, deg2rad, log_ndtr, spherical_bessel_j0, erfcx, i0, i0e, i1, i1e, gelu, gelu_tanh, silu, mish,
        logsigmoid, softplus(1.0, 20.0), softsign, tanhshrink, ndtr, elu(1.0), celu(1.5), selu, leaky_relu(0.1), relu,
        relu6, hardswish, abs, reciprocal),
    unary!(smooth, Positive: sqrt, rsqrt, log, log2, log10, log1p, lgamma, digamma, polygamma(1), entr, sinc),
    &[smooth("polygamma of the second order", &[Positive(S)], |x| x[0].polygamma(2)).elementwise()],
    unary!(smooth, Bounded: asin, acos, atanh, tan, erfinv),
    unary!(nonsmooth, Signed: sign, floor, ceil, round, trunc, softshrink(0.5), hardshrink(0.5), hardtanh(-1.0, 1.0),
        hardsigmoid, threshold(0.2, 7.0), nan_to_num, nan_to_num_with(&REPLACEMENTS), round_decimals(1)),
    &[smooth("logit", &[Positive(S)], |x| x[0].mul(0.25)?.logit(None)).elementwise()],
    &[
        smooth("ndtri", &[Positive(S)], |x| x[0].mul(0.25)?.ndtri()).elementwise(),
        smooth("mvlgamma", &[Positive(S)], |x| x[0].add(1.5)?.mvlgamma(3))
            .with_tolerances(case::ONE_ROUNDING_NEAR_4),
        smooth("zeta", &[Positive(S)], |x| Tensor::full((), 2.5, x[0].dtype(), x[0].device())?.zeta(&x[0])),
    ],
    &[nonsmooth("logit of clamped values", &[Bounded(S)], |x| x[0].logit(Some(0.1)))],
    unary!(nondifferentiable, Signed: isnan, isinf, isfinite, isposinf, isneginf, signbit, logical_not),
    binary!(smooth, Signed, Positive: add, sub, rsub, mul, div, atan2, hypot),
    binary!(smooth, Positive, Signed: pow),
    binary!(smooth, Signed, Positive: xlogy, xlog1py, logaddexp, logaddexp2, ldexp),
    binary!(nonsmooth, Signed, Positive: maximum, minimum, fmax, fmin, fmod, remainder, floor_divide, trunc_divide, copysign),
    binary!(nondifferentiable, Signed, Positive: eq, ne, lt, le, gt, ge, logical_and, logical_or, logical_xor, heaviside),
    &[
        smooth("add a number", &[Signed(S)], |x| x[0].add(1.5)),
        smooth("div of a number", &[Positive(S)], |x| {
            Tensor::full((), 2.0, x[0].dtype(), x[0].device())?.div(&x[0])
        }),
        smooth("prelu", &[Signed(&[2, 3, 4]), Positive(&[3])], |x| x[0].prelu(&x[1])).with_batched_inputs(1),
        smooth("glu", &[Signed(&[2, 6])], |x| x[0].glu(-1)).with_batched_inputs(1),
        smooth("where_", &[Bool(&[3, 1]), Signed(S), Positive(&[5])], |x| x[1].where_(&x[0], &x[2]))
            .with_bench_inputs(&[Bool(&[4096, 4096]), Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        smooth("masked_fill", &[Signed(S), Bool(S)], |x| x[0].masked_fill(&x[1], 4.0))
            .with_bench_inputs(&[Signed(&[4096, 4096]), Bool(&[4096, 4096])]),
        nonsmooth("clamp", &[Signed(S)], |x| x[0].clamp(-0.5, 1.0))
            .with_bench_inputs(&[Signed(&[4096, 4096])]),
        nonsmooth("clamp_min", &[Signed(S)], |x| x[0].clamp_min(-0.5)),
        nonsmooth("clamp_max", &[Signed(S)], |x| x[0].clamp_max(0.5)),
        nonsmooth("clamp by tensors", &[Signed(S), Bounded(&[5]), Positive(&[3, 1])], |x| {
            x[0].clamp(&x[1], &x[2])
        }),
        smooth("addcmul", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| x[0].addcmul(&x[1], &x[2], 0.7))
            .with_bench_inputs(&[Signed(&[4096, 4096]), Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        smooth("addcdiv", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| x[0].addcdiv(&x[1], &x[2], 0.7))
            .with_bench_inputs(&[Signed(&[4096, 4096]), Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        smooth("lerp", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| x[0].lerp(&x[1], &x[2]))
            .with_bench_inputs(&[Signed(&[4096, 4096]), Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        nonsmooth("to_dtype", &[Signed(S)], |x| x[0].to_dtype(DType::BF16)?.to_dtype(x[0].dtype())),
    ],
    &[
        smooth("reshape", &[Signed(&[2, 6])], |x| x[0].t()?.reshape([3, 4])),
        smooth("permute", &[Signed(&[2, 3, 4])], |x| x[0].permute([2, 0, 1])).with_bytes(cost::no_bytes),
        smooth("expand", &[Signed(&[1, 3])], |x| x[0].expand([4, -1])).with_bytes(cost::no_bytes),
        smooth("narrow", &[Signed(S)], |x| x[0].narrow(1, 1, 3)).with_bytes(cost::no_bytes),
        smooth("slice_dim", &[Signed(&[9])], |x| x[0].slice_dim(0, 1, 8, 3)).with_bytes(cost::no_bytes),
        smooth("select", &[Signed(S)], |x| x[0].select(0, -1)).with_bytes(cost::no_bytes),
        smooth("diagonal", &[Signed(S)], |x| x[0].diagonal(1, 0, 1)).with_bytes(cost::no_bytes),
        smooth("cat", &[Signed(&[2, 3]), Signed(&[4, 3])], |x| cat(&[&x[0], &x[1]], 0))
            .with_bench_inputs(&[Signed(&[2048, 4096]), Signed(&[2048, 4096])]),
        smooth("stack", &[Signed(S), Signed(S)], |x| stack(&[&x[0], &x[1]], -1)),
        smooth("flip", &[Signed(S)], |x| x[0].flip([1])).with_batched_inputs(1),
        smooth("roll", &[Signed(S)], |x| x[0].roll(2, 1)).with_bench_inputs(&[Signed(&[4096, 4096])]),
        smooth("movedim", &[Signed(&[2, 3, 4])], |x| x[0].movedim([0, -1], [1, 0]))
            .with_bytes(cost::no_bytes),
        smooth("repeat", &[Signed(S)], |x| x[0].repeat([2, 1, 3]))
            .with_bench_inputs(&[Signed(&[2048, 1024])]),
        smooth("repeat_interleave", &[Signed(S)], |x| x[0].repeat_interleave(3, 0)),
        smooth("pad", &[Signed(S)], |x| x[0].pad(&[1, 2, 0, 1], PadMode::Constant(3.0)))
            .with_bench_inputs(&[Signed(&[4096, 4096])]),
        smooth("pad by reflection", &[Signed(S)], |x| x[0].pad(&[2, 1], PadMode::Reflect)),
        smooth("pad by replication", &[Signed(S)], |x| x[0].pad(&[2, 1], PadMode::Replicate)),
        smooth("pad in a circle", &[Signed(S)], |x| x[0].pad(&[2, 1], PadMode::Circular)),
        smooth("tril", &[Signed(&[4, 4])], |x| x[0].tril(0)).with_bench_inputs(&[Signed(&[4096, 4096])]),
        smooth("triu", &[Signed(&[4, 4])], |x| x[0].triu(-1)).with_bench_inputs(&[Signed(&[4096, 4096])]),
        smooth("contiguous", &[Signed(&[4, 3])], |x| x[0].t()?.contiguous())
            .with_bench_inputs(&[Signed(&[4096, 4096])]),
    ],
    &[
        smooth("gather", &[Signed(S), Index(&[2, 5], 3)], |x| x[0].gather(0, &x[1]))
            .with_bytes(cost::gather_bytes)
            .with_bench_inputs(&[Signed(&[4096, 4096]), Index(&[1024, 4096], 4096)]),
        smooth("index_select", &[Signed(S), Index(&[7], 5)], |x| x[0].index_select(1, &x[1]))
            .with_bytes(cost::gather_bytes)
            .with_bench_inputs(&[Signed(&[4096, 4096]), Index(&[1024], 4096)]),
        smooth("embedding", &[Signed(&[6, 4]), Index(&[2, 3], 6)], |x| x[0].embedding(&x[1], None))
            .with_bytes(cost::gather_bytes)
            .with_bench_inputs(&[Signed(&[32000, 768]), Index(&[8, 1024], 32000)])
            .with_batched_inputs(2),
        nonsmooth("embedding by frequency", &[Signed(&[6, 4]), Index(&[2, 3], 6)], |x| {
            x[0].embedding_with(&x[1], &EmbeddingOptions { padding_idx: Some(1), scale_grad_by_freq: true })
        }),
        smooth("take_along_dim", &[Signed(S), Index(&[3, 2], 5)], |x| x[0].take_along_dim(&x[1], 1))
            .with_batched_inputs(3),
        smooth("scatter_add", &[Signed(&[4, 5]), Index(&[3, 5], 4), Signed(&[3, 5])], |x| {
            x[0].scatter_add(0, &x[1], &x[2])
        })
        .with_bench_inputs(&[
            Signed(&[4096, 4096]),
            Index(&[1024, 4096], 4096),
            Signed(&[1024, 4096]),
        ]),
        smooth("index_add", &[Signed(&[4, 5]), Index(&[3], 4), Signed(&[3, 5])], |x| {
            x[0].index_add(0, &x[1], &x[2], 0.5)
        })
        .with_bench_inputs(&[Signed(&[32000, 256]), Index(&[8192], 32000), Signed(&[8192, 256])]),
        smooth("index_fill", &[Signed(&[4, 5]), Index(&[2], 4)], |x| x[0].index_fill(0, &x[1], 2.0)),
    ],
    &[
        smooth("sort", &[Signed(&[3, 9])], |x| Ok(x[0].sort(1, false)?.0))
            .with_bench_inputs(&[Signed(&[4096, 4096])])
            .with_batched_inputs(1),
        smooth("sort of columns", &[Signed(&[7, 3])], |x| Ok(x[0].sort(0, true)?.0))
            .with_bench_inputs(&[Signed(&[4096, 4096])]),
        nonsmooth("sort of a long line", &[Signed(&[2100])], |x| Ok(x[0].sort(-1, false)?.0)),
        nondifferentiable("argsort", &[Signed(&[5, 6])], |x| x[0].argsort(1, true))
            .with_bench_inputs(&[Signed(&[4096, 4096])])
            .with_batched_inputs(1),
        smooth("topk", &[Signed(&[3, 9])], |x| Ok(x[0].topk(4, 1, true)?.0))
            .with_bench_inputs(&[Signed(&[4096, 4096])])
            .with_batched_inputs(1),
        smooth("kthvalue", &[Signed(&[3, 9])], |x| Ok(x[0].kthvalue(3, 1, true)?.0))
            .with_bench_inputs(&[Signed(&[4096, 4096])])
            .with_batched_inputs(1),
        smooth("median", &[Signed(&[4, 6])], |x| Ok(x[0].median(0, false)?.0))
            .with_bench_inputs(&[Signed(&[4096, 4096])]),
        smooth("nanmedian", &[Signed(&[4, 6])], |x| Ok(x[0].nanmedian(1, false)?.0)).with_batched_inputs(1),
        smooth("median_all", &[Signed(S)], |x| x[0].median_all()),
        smooth("quantile", &[Signed(&[4, 6])], |x| x[0].quantile(0.3, 1, false, Interpolation::Linear)),
        smooth("nanquantile", &[Signed(&[4, 6])], |x| {
            let q = Tensor::from_slice(&[0.1f32, 0.5, 0.9], [3], x[0].device())?;
            x[0].nanquantile(&q, (), true, Interpolation::Midpoint)
        }),
    ],
    &[
        smooth("masked_select", &[Signed(&[3, 1, 5]), Bool(&[4, 1])], |x| x[0].masked_select(&x[1])),
        smooth("repeat_interleave_by", &[Signed(S), Index(&[5], 3)], |x| {
            x[0].repeat_interleave_by(&x[1], 1, None)
        }),
        nondifferentiable("nonzero", &[Signed(S)], |x| x[0].nonzero()),
        nondifferentiable("searchsorted", &[Signed(&[4]), Signed(S)], |x| {
            x[0].searchsorted(&x[1], &SearchSortedOptions { right: true, ..Default::default() })
        })
        .with_batched_inputs(2),
        nondifferentiable("bucketize", &[Signed(S), Signed(&[4])], |x| {
            x[0].bucketize(&x[1], &SearchSortedOptions { out_int32: true, ..Default::default() })
        })
        .with_batched_inputs(1),
        scatter_reduce_case("scatter_reduce to sums", |x| scatter_reduce(x, ScatterReduce::Sum, false)),
        scatter_reduce_case("scatter_reduce to products", |x| scatter_reduce(x, ScatterReduce::Prod, true)),
        scatter_reduce_case("scatter_reduce to means", |x| scatter_reduce(x, ScatterReduce::Mean, true)),
        scatter_reduce_case("scatter_reduce to the largest", |x| {
            scatter_reduce(x, ScatterReduce::Amax, true)
        }),
        scatter_reduce_case("scatter_reduce to the smallest", |x| {
            scatter_reduce(x, ScatterReduce::Amin, false)
        }),
        smooth(
            "scatter_add of a long line",
            &[Signed(&[70]), Index(&[70_000], 61), Signed(&[70_000])],
            |x| x[0].scatter_add(0, &x[1], &x[2]),
        ),
        smooth("index", &[Signed(&[3, 4, 5]), Index(&[2, 1], 3), Index(&[3], 5)], |x| {
            x[0].index(&[Some(&x[1]), None, Some(&x[2])])
        }),
        smooth("index_put", &[Signed(&[3, 4, 5]), Index(&[3], 4), Signed(&[3, 1])], |x| {
            x[0].index_put(&[None, Some(&x[1])], &x[2], false)
        }),
        smooth("index_put of sums", &[Signed(&[4, 5]), Index(&[6], 3), Index(&[6], 5), Signed(&[6])], |x| {
            x[0].index_put(&[Some(&x[1]), Some(&x[2])], &x[3], true)
        }),
        smooth("index_put by a mask", &[Signed(&[4, 5]), Bool(&[4]), Signed(&[5])], |x| {
            x[0].index_put(&[Some(&x[1])], &x[2], false)
        }),
    ],
    &[
        smooth("matmul", &[Signed(&[3, 4]), Signed(&[4, 5])], |x| x[0].matmul(&x[1]))
            .with_flops(cost::matmul_flops)
            .with_bench_inputs(&[Signed(&[2048, 2048]), Signed(&[2048, 2048])])
            .with_batched_inputs(1),
        smooth("matmul of batches", &[Signed(&[2, 1, 3, 4]), Signed(&[3, 4, 2])], |x| x[0].matmul(&x[1]))
            .with_flops(cost::matmul_flops)
            .with_bench_inputs(&[Signed(&[16, 1, 512, 512]), Signed(&[4, 512, 512])])
            .with_batched_inputs(1),
        smooth("matmul with a vector", &[Signed(&[2, 3, 4]), Signed(&[4])], |x| x[0].matmul(&x[1]))
            .with_flops(cost::matmul_flops)
            .with_bench_inputs(&[Signed(&[64, 512, 1024]), Signed(&[1024])]),
        smooth("matmul of transposes", &[Signed(&[4, 3]), Signed(&[5, 4])], |x| x[0].t()?.matmul(&x[1].t()?))
            .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 0))
            .with_bench_inputs(&[Signed(&[2048, 2048]), Signed(&[2048, 2048])]),
        smooth("dot", &[Signed(&[9]), Signed(&[9])], |x| x[0].dot(&x[1]))
            .with_flops(|x, _| 2 * cost::numel(&x[0])),
        smooth("outer", &[Signed(&[3]), Signed(&[4])], |x| x[0].outer(&x[1])),
        smooth("addmm", &[Signed(&[5]), Signed(&[3, 4]), Signed(&[4, 5])], |x| {
            x[0].addmm(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
        })
        .with_flops(|x, y| cost::matmul_flops(&x[1..], y))
        .with_bench_inputs(&[Signed(&[2048]), Signed(&[2048, 2048]), Signed(&[2048, 2048])]),
        smooth("linear", &[Signed(&[2, 3, 4]), Signed(&[5, 4]), Signed(&[5])], |x| {
            x[0].linear(&x[1], Some(&x[2]))
        })
        .with_flops(cost::matmul_flops)
        .with_bench_inputs(&[Signed(&[8, 1024, 1024]), Signed(&[4096, 1024]), Signed(&[4096])])
        .with_batched_inputs(1),
        smooth(
            "mlp",
            &[Signed(&[2, 3, 4]), Signed(&[8, 4]), Bounded(&[8]), Signed(&[5, 8]), Bounded(&[5])],
            |x| x[0].mlp(&x[1], &x[2], &x[3], &x[4]),
        )
        .with_tolerances(case::ONE_ROUNDING_NEAR_4)
        .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * (cost::numel(&x[1]) + cost::numel(&x[3])))
        .with_bench_inputs(&[
            Signed(&[8, 1024, 768]),
            Signed(&[3072, 768]),
            Signed(&[3072]),
            Signed(&[768, 3072]),
            Signed(&[768]),
        ])
        .with_batched_inputs(1),
        smooth("bilinear", &[Signed(&[2, 3]), Signed(&[2, 4]), Signed(&[5, 3, 4]), Bounded(&[5])], |x| {
            x[0].bilinear(&x[1], &x[2], Some(&x[3]))
        })
        .with_flops(|x, y| {
            2 * (cost::num_rows(&x[0]) * cost::numel(&x[2]) + cost::numel(y) * cost::extent(&x[1], 1))
        })
        .with_tolerances(case::ONE_ROUNDING_NEAR_4),
        smooth("matmul of large matrices", &[Signed(&[65, 70]), Signed(&[70, 66])], |x| x[0].matmul(&x[1]))
            .with_flops(cost::matmul_flops),
    ],
    &[
        smooth("sum", &[Signed(&[3, 4, 5])], |x| x[0].sum([0, 2], false))
            .with_bench_inputs(&[Signed(&[256, 256, 256])]),
        smooth("sum_all", &[Signed(&[3, 4, 5])], |x| x[0].sum_all())
            .with_bench_inputs(&[Signed(&[4096, 64, 64])]),
        smooth("sum of long rows", &[Signed(&[2, 5000])], |x| x[0].sum([1], true))
            .with_bench_inputs(&[Signed(&[64, 262144])]),
        smooth("mean", &[Signed(&[3, 4, 5])], |x| x[0].mean([-1], true))
            .with_bench_inputs(&[Signed(&[16, 1024, 1024])])
            .with_batched_inputs(1),
        smooth("prod", &[Signed(&[3, 4])], |x| x[0].prod(1, false))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("amax", &[Signed(S)], |x| x[0].amax([1], false))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("amin", &[Signed(S)], |x| x[0].amin([0], true)).with_bench_inputs(&[Signed(&[4096, 4096])]),
        smooth("max", &[Signed(S)], |x| Ok(x[0].max(1, false)?.0))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("cumsum", &[Signed(&[3, 9])], |x| x[0].cumsum(1))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("cumprod", &[Signed(&[3, 4])], |x| x[0].cumprod(1))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("cummax", &[Signed(&[3, 9])], |x| Ok(x[0].cummax(1)?.0))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
    ],
    &[
        smooth("softmax", &[Signed(&[3, 7])], |x| x[0].softmax(-1))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("softmax of columns", &[Signed(&[4, 5])], |x| x[0].softmax(0))
            .with_bench_inputs(&[Signed(&[4096, 4096])]),
        smooth("log_softmax", &[Signed(&[3, 7])], |x| x[0].log_softmax(-1))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("cross_entropy", &[Signed(&[6, 5]), Index(&[6], 5)], |x| x[0].cross_entropy(&x[1]))
            .with_bench_inputs(&[Signed(&[2048, 32000]), Index(&[2048], 32000)]),
        smooth("nll_loss", &[Signed(&[6, 5]), Index(&[6], 5)], |x| x[0].nll_loss(&x[1], &Default::default()))
            .with_bytes(|x, y| cost::bytes(&x[1]) + cost::bytes(y))
            .with_bench_inputs(&[Signed(&[2048, 32000]), Index(&[2048], 32000)]),
        smooth("mse_loss", &[Signed(S), Positive(S)], |x| x[0].mse_loss(&x[1], Reduction::Mean))
            .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        smooth("linear_cross_entropy", &[Signed(&[2, 3, 4]), Signed(&[10, 4])], |x| {
            let classes = Tensor::from_slice(&[1i32, 9, 0, 3, -100, 4], [2, 3], x[0].device())?;
            x[0].linear_cross_entropy(&x[1], &classes, &CrossEntropyOptions::default())
        })
        .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[1])),
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
        smooth("max_pool2d", &[Signed(&[2, 3, 6, 6])], |x| x[0].max_pool2d(Pool2dOptions::new(2)))
            .with_bench_inputs(&[Signed(&[32, 64, 112, 112])])
            .with_batched_inputs(1),
        smooth("avg_pool2d", &[Signed(&[2, 3, 6, 6])], |x| x[0].avg_pool2d(Pool2dOptions::new(3)))
            .with_bench_inputs(&[Signed(&[32, 64, 112, 112])])
            .with_batched_inputs(1),
        smooth("adaptive_avg_pool2d", &[Signed(&[2, 3, 5, 7])], |x| x[0].adaptive_avg_pool2d([2, 3]))
            .with_bench_inputs(&[Signed(&[64, 512, 14, 14])])
            .with_batched_inputs(1),
    ],
    &[
        smooth("var", &[Signed(&[3, 7])], |x| x[0].var([1], 1.0, false))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("std", &[Signed(&[3, 7])], |x| x[0].std([0], 0.0, true))
            .with_bench_inputs(&[Signed(&[4096, 4096])]),
        smooth("norm", &[Signed(&[3, 7])], |x| x[0].norm(2.0, [1], false))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("logsumexp", &[Signed(&[3, 7])], |x| x[0].logsumexp([-1], true))
            .with_bench_inputs(&[Signed(&[16384, 1024])])
            .with_batched_inputs(1),
        smooth("cummin", &[Signed(&[3, 9])], |x| Ok(x[0].cummin(1)?.0))
            .with_bench_inputs(&[Signed(&[16384, 1024])]),
        smooth("l1_loss", &[Signed(S), Positive(S)], |x| x[0].l1_loss(&x[1], Reduction::Sum))
            .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        smooth("huber_loss", &[Signed(S), Positive(S)], |x| x[0].huber_loss(&x[1], 0.7, Reduction::Mean))
            .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        smooth("binary_cross_entropy_with_logits", &[Signed(S), Bounded(S)], |x| {
            x[0].binary_cross_entropy_with_logits(&x[1], &Default::default())
        })
        .with_bench_inputs(&[Signed(&[4096, 4096]), Bounded(&[4096, 4096])]),
        smooth("binary_cross_entropy", &[Signed(S), Bounded(S)], |x| {
            x[0].sigmoid()?.binary_cross_entropy(&x[1].sigmoid()?, None, Reduction::Mean)
        }),
        smooth("cross_entropy_with", &[Signed(&[4, 5, 2]), Positive(&[4, 5, 2])], |x| {
            let options = CrossEntropyOptions {
                label_smoothing: 0.2,
                reduction: Reduction::Sum,
                ..CrossEntropyOptions::default()
            };
            x[0].cross_entropy_with(&x[1], &options)
        }),
        smooth("kl_div", &[Signed(S), Positive(S)], |x| x[0].kl_div(&x[1], false, Reduction::Sum))
            .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        smooth("cosine_similarity", &[Signed(S), Positive(S)], |x| x[0].cosine_similarity(&x[1], 1, 1e-8))
            .with_tolerances(case::ONE_ROUNDING)
            .with_bench_inputs(&[Signed(&[4096, 4096]), Positive(&[4096, 4096])])
            .with_batched_inputs(3),
    ],
    &[
        smooth("conv1d", &[Signed(&[2, 3, 9]), Signed(&[4, 3, 3]), Signed(&[4])], |x| {
            x[0].conv1d(
                &x[1],
                Some(&x[2]),
                &ConvolutionOptions { stride: [2], padding: 1.into(), ..Default::default() },
            )
        })
        .with_flops(cost::conv_flops)
        .with_bench_inputs(&[Signed(&[32, 256, 1024]), Signed(&[256, 256, 3]), Signed(&[256])])
        .with_batched_inputs(1),
        smooth("conv2d", &[Signed(&[2, 3, 6, 5]), Signed(&[4, 3, 3, 2]), Signed(&[4])], |x| {
            let options = ConvolutionOptions { stride: [2, 1], padding: [1, 0].into(), ..Default::default() };
            x[0].conv2d(&x[1], Some(&x[2]), &options)
        })
        .with_flops(cost::conv_flops)
        .with_bench_inputs(&[Signed(&[32, 64, 56, 56]), Signed(&[128, 64, 3, 2]), Signed(&[128])])
        .with_batched_inputs(1),
        smooth("conv2d of groups, dilated", &[Signed(&[1, 4, 7, 7]), Signed(&[6, 2, 3, 3])], |x| {
            let options =
                ConvolutionOptions { padding: 2.into(), dilation: [2, 2], groups: 2, ..Default::default() };
            x[0].conv2d(&x[1], None, &options)
        })
        .with_flops(cost::conv_flops)
        .with_bench_inputs(&[Signed(&[32, 128, 56, 56]), Signed(&[128, 64, 3, 3])]),
        smooth("conv3d", &[Signed(&[1, 2, 4, 4, 4]), Signed(&[2, 2, 2, 2, 2])], |x| {
            x[0].conv3d(&x[1], None, &Default::default())
        })
        .with_flops(cost::conv_flops)
        .with_bench_inputs(&[Signed(&[4, 32, 16, 32, 32]), Signed(&[32, 32, 2, 2, 2])]),
        smooth("conv_transpose2d", &[Signed(&[2, 3, 4, 4]), Signed(&[3, 2, 3, 3]), Signed(&[2])], |x| {
            let options = TransposedConvolutionOptions {
                stride: [2, 2],
                padding: [1, 1],
                output_padding: [1, 1],
                ..Default::default()
            };
            x[0].conv_transpose2d(&x[1], Some(&x[2]), &options)
        })
        .with_flops(cost::conv_transpose_flops)
        .with_bench_inputs(&[Signed(&[32, 128, 28, 28]), Signed(&[128, 64, 3, 3]), Signed(&[64])]),
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
        smooth(
            "scaled_dot_product_attention of the past",
            &[Signed(&[2, 4, 3]), Bounded(&[2, 4, 3]), Signed(&[2, 4, 3])],
            |x| {
                x[0].scaled_dot_product_attention(
                    &x[1],
                    &x[2],
                    &AttentionOptions { is_causal: true, scale: Some(0.8), ..AttentionOptions::default() },
                )
            },
        )
        .with_flops(cost::causal_attention_flops)
        .with_bench_inputs(&[
            Signed(&[96, 1024, 64]),
            Bounded(&[96, 1024, 64]),
            Signed(&[96, 1024, 64]),
        ]),
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
        smooth("qkv_attention with dropout", &[Signed(&[2, 5, 4 * 6])], |x| {
            x[0].qkv_attention(
                2,
                1,
                &AttentionOptions { is_causal: true, dropout_p: 0.3, ..AttentionOptions::default() },
            )
        })
        .with_flops(cost::causal_attention_flops),
        smooth("qkv_attention", &[Signed(&[2, 5, 4 * 6])], |x| {
            x[0].qkv_attention(2, 1, &AttentionOptions { is_causal: true, ..AttentionOptions::default() })
        })
        .with_flops(cost::causal_attention_flops)
        .with_bench_inputs(&[Signed(&[8, 1024, 256])]),
        smooth("einsum", &[Signed(&[2, 3, 4]), Signed(&[4, 3, 5])], |x| {
            einsum("bij,jik->bk", &[&x[0], &x[1]])
        })
        .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[1], 2)),
    ],
    RESIZE_CASES,
    SEQUENCE_CASES,
    inplace_and_factory::REMAINING,
    inplace_and_factory::FACTORY,
    manipulation::MANIPULATION,
    linalg::LINALG,
    norm::NORM,
];

fn interpolate_options(mode: InterpolateMode) -> InterpolateOptions {
    InterpolateOptions { mode, ..InterpolateOptions::default() }
}

const RESIZE_CASES: &[OpCase] = &[
    smooth("interpolate to the nearest", &[Signed(&[2, 3, 5])], |x| {
        x[0].interpolate(&InterpolateOptions::with_scale_factor(1.7))
    }),
    smooth("interpolate to the nearest exactly", &[Signed(&[1, 2, 3, 4, 3])], |x| {
        x[0].interpolate(&InterpolateOptions {
            size: [4, 3, 5].as_slice().into(),
            ..interpolate_options(InterpolateMode::NearestExact)
        })
    }),
    smooth("interpolate along lines", &[Signed(&[2, 2, 5])], |x| {
        x[0].interpolate(&InterpolateOptions {
            align_corners: true,
            mode: InterpolateMode::Linear,
            ..InterpolateOptions::with_size([7])
        })
    }),
    smooth("interpolate images", &[Signed(&[2, 2, 4, 5])], |x| {
        x[0].interpolate(&InterpolateOptions {
            mode: InterpolateMode::Bilinear,
            ..InterpolateOptions::with_size([7, 3])
        })
    })
    .with_batched_inputs(1),
    smooth("interpolate images without aliases", &[Signed(&[1, 2, 7, 5])], |x| {
        let options = InterpolateOptions { antialias: true, ..interpolate_options(InterpolateMode::Bicubic) };
        x[0].interpolate(&InterpolateOptions { size: [3, 2].as_slice().into(), ..options })
    }),
    smooth("interpolate along cubic curves", &[Signed(&[1, 2, 4, 5])], |x| {
        x[0].interpolate(&InterpolateOptions {
            mode: InterpolateMode::Bicubic,
            ..InterpolateOptions::with_scale_factor(1.5)
        })
    }),
    smooth("interpolate volumes", &[Signed(&[1, 2, 3, 2, 4])], |x| {
        x[0].interpolate(&InterpolateOptions {
            mode: InterpolateMode::Trilinear,
            ..InterpolateOptions::with_size([4, 3, 3])
        })
    }),
    smooth("interpolate by areas", &[Signed(&[2, 3, 5, 4])], |x| {
        x[0].interpolate(&InterpolateOptions {
            mode: InterpolateMode::Area,
            ..InterpolateOptions::with_size([3, 6])
        })
    }),
    smooth("as_strided", &[Signed(&[12])], |x| x[0].copy()?.as_strided([3, 2, 4], [2, 0, 1], Some(1)))
        .with_bytes(|x, _| 2 * cost::bytes(&x[0])),
    smooth("unfold", &[Signed(&[2, 7, 3])], |x| x[0].unfold(1, 3, 2))
        .with_bytes(cost::no_bytes)
        .with_batched_inputs(1),
    smooth("unfold with overlaps", &[Signed(&[2, 7])], |x| x[0].unfold(-1, 4, 1)).with_bytes(cost::no_bytes),
    smooth("im2col", &[Signed(&[2, 3, 6, 5])], |x| {
        x[0].im2col([3, 2], &Im2colOptions { dilation: [1, 2], padding: [1, 0], stride: [2, 1] })
    })
    .with_batched_inputs(1),
    smooth("col2im", &[Signed(&[2, 12, 25])], |x| {
        x[0].col2im([5, 6], [3, 2], &Im2colOptions { padding: [1, 0], ..Default::default() })
    })
    .with_batched_inputs(1),
    smooth("tensor_split", &[Signed(&[7, 2])], |x| {
        cat(&[&x[0].tensor_split(3, 0)?[0], &x[0].tensor_split_at(&[2, -1], 0)?[1]], 0)
    }),
    smooth("diff", &[Signed(&[3, 6]), Signed(&[3, 2])], |x| {
        x[0].diff(2, 1, &DiffOptions { prepend: Some(&x[1]), ..Default::default() })
    }),
    smooth("trace", &[Signed(&[4, 5])], |x| x[0].trace()),
    smooth("cross", &[Signed(&[4, 3, 2]), Positive(&[3, 1])], |x| x[0].cross(&x[1], 1)),
    smooth("svdvals", &[Signed(&[5, 3])], |x| x[0].svdvals())
        .without_half()
        .with_bench_inputs(&[Signed(&[256, 32, 32])]),
    smooth("nuclear_norm", &[Signed(&[2, 3, 4])], |x| x[0].nuclear_norm([2, 0], true)).without_half(),
    smooth("svd", &[Signed(&[5, 3])], |x| {
        let (u, s, vh) = x[0].svd()?;
        cat(&[&u.mul(&s)?.abs()?, &vh.abs()?], 0)
    })
    .without_half(),
    smooth("pdist", &[Signed(&[5, 3])], |x| x[0].pdist(2.0)),
    smooth("grid_sample", &[Signed(&[2, 3, 4, 5]), Bounded(&[2, 3, 2, 2])], |x| {
        x[0].grid_sample(
            &x[1],
            &GridSampleOptions { padding_mode: GridPadding::Border, ..Default::default() },
        )
    }),
    nonsmooth("grid_sample of volumes", &[Signed(&[1, 2, 3, 4, 5]), Bounded(&[1, 2, 1, 3, 3])], |x| {
        x[0].grid_sample(&x[1], &GridSampleOptions { align_corners: true, ..Default::default() })
    }),
    smooth("grid_sample of images, bicubic", &[Signed(&[2, 3, 4, 5]), Bounded(&[2, 3, 2, 2])], |x| {
        x[0].grid_sample(
            &x[1],
            &GridSampleOptions {
                mode: GridMode::Bicubic,
                padding_mode: GridPadding::Reflection,
                ..Default::default()
            },
        )
    }),
    smooth("affine_grid", &[Signed(&[2, 2, 3])], |x| x[0].affine_grid([2, 1, 3, 4], false))
        .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 2)),
    smooth("lp_pool3d", &[Positive(&[2, 3, 4, 3, 4])], |x| {
        x[0].lp_pool3d(3.0, Pool3dOptions::from_kernel([2, 1, 2]))
    }),
    nonsmooth("max_unpool2d", &[Signed(&[2, 3, 6, 4])], |x| {
        let (out, indices) = x[0].max_pool2d_with_indices(Pool2dOptions::new(2))?;
        out.max_unpool2d(&indices, [6, 4])
    }),
    nonsmooth("max_unpool1d", &[Signed(&[2, 3, 6])], |x| {
        let (out, indices) = x[0].max_pool1d_with_indices(Pool1dOptions::new(2))?;
        out.max_unpool1d(&indices, Pool1dOptions::new(2).unpool_output_size([3]))
    }),
    nonsmooth("max_unpool3d", &[Signed(&[2, 3, 4, 2, 4])], |x| {
        let (out, indices) = x[0].max_pool3d_with_indices(Pool3dOptions::new(2))?;
        out.max_unpool3d(&indices, [4, 2, 4])
    }),
    nonsmooth("fractional_max_pool3d", &[Signed(&[2, 2, 5, 4, 6])], |x| {
        let samples = Tensor::full([2, 2, 3], 0.6, DType::F32, x[0].device())?;
        Ok(x[0].fractional_max_pool3d([2; 3], [3, 2, 4], Some(&samples))?.0)
    }),
    nonsmooth("max_pool3d_with_indices", &[Signed(&[2, 3, 4, 5, 4])], |x| {
        let (out, indices) = x[0].max_pool3d_with_indices(Pool3dOptions::new(2))?;
        out.add(&indices.to_dtype(out.dtype())?)
    }),
    nonsmooth("fractional_max_pool2d", &[Signed(&[2, 3, 7, 6])], |x| {
        let samples = Tensor::full([2, 3, 2], 0.6, DType::F32, x[0].device())?;
        Ok(x[0].fractional_max_pool2d([2; 2], [4, 3], Some(&samples))?.0)
    }),
    nonsmooth("cdist of 0", &[Signed(&[3, 4]), Signed(&[5, 4])], |x| x[0].cdist(&x[1], 0.0)),
    nonsmooth("cdist of 1", &[Signed(&[2, 3, 4]), Positive(&[5, 4])], |x| x[0].cdist(&x[1], 1.0)),
    smooth("cdist of 2", &[Signed(&[2, 3, 4]), Positive(&[2, 5, 4])], |x| x[0].cdist(&x[1], 2.0)),
    nonsmooth("cdist of the largest", &[Signed(&[18, 4]), Positive(&[5, 4])], |x| {
        x[0].cdist(&x[1], f64::INFINITY)
    }),
    nonsmooth("cdist of 1.5", &[Signed(&[3, 40]), Positive(&[17, 40])], |x| x[0].cdist(&x[1], 1.5)),
    smooth("cdist of 3", &[Signed(&[3, 4]), Positive(&[5, 4])], |x| x[0].cdist(&x[1], 3.0)),
    nonsmooth("adaptive_max_pool2d", &[Signed(&[2, 3, 5, 7])], |x| x[0].adaptive_max_pool2d([2, 3])),
    nonsmooth("adaptive_max_pool1d", &[Signed(&[3, 7])], |x| x[0].adaptive_max_pool1d(4)),
    smooth("local_response_norm", &[Signed(&[2, 5, 3])], |x| {
        x[0].local_response_norm(3, &LocalResponseNormOptions { alpha: 0.5, ..Default::default() })
    })
    .with_batched_inputs(1),
    smooth("embedding_bag of sums", &[Signed(&[6, 5]), Index(&[3, 4], 6), Positive(&[3, 4])], |x| {
        let bags = EmbeddingBagOptions {
            mode: EmbeddingBagMode::Sum,
            per_sample_weights: Some(&x[2]),
            padding_idx: Some(2),
            ..EmbeddingBagOptions::default()
        };
        x[0].embedding_bag(&x[1], &bags)
    }),
    smooth("embedding_bag of means", &[Signed(&[6, 4]), Index(&[7], 6)], |x| {
        let starts = Tensor::from_slice(&[0i32, 2, 2, 5], [4], x[0].device())?;
        x[0].embedding_bag(
            &x[1],
            &EmbeddingBagOptions { offsets: Some(&starts), ..EmbeddingBagOptions::default() },
        )
    }),
    nonsmooth("embedding_bag of maxima", &[Signed(&[6, 5]), Index(&[7], 6)], |x| {
        let starts = Tensor::from_slice(&[0i64, 0, 3, 7], [4], x[0].device())?;
        let bags = EmbeddingBagOptions {
            include_last_offset: true,
            mode: EmbeddingBagMode::Max,
            ..EmbeddingBagOptions::default()
        };
        x[0].embedding_bag(&x[1], &EmbeddingBagOptions { offsets: Some(&starts), ..bags })
    }),
];

const SEQUENCE_CASES: &[OpCase] = &[
    smooth("rotary_embedding", &[Signed(&[2, 3, 5, 6])], |x| {
        let table = Tensor::arange(0.0, 15.0, 1.0, DType::F32, x[0].device())?.reshape([5, 3])?;
        x[0].rotary_embedding(&table.cos()?, &table.sin()?, false)
    }),
    smooth("rotary_embedding of neighbours", &[Signed(&[2, 5, 7])], |x| {
        let table = Tensor::arange(0.0, 15.0, 1.0, DType::F32, x[0].device())?.reshape([5, 3])?;
        x[0].rotary_embedding(&table.cos()?, &table.sin()?, true)
    }),
    smooth("rotary_embedding of vectors", &[Signed(&[2, 3, 5, 20])], |x| {
        let table = Tensor::arange(0.0, 40.0, 1.0, DType::F32, x[0].device())?.reshape([5, 8])?;
        x[0].rotary_embedding(&table.cos()?, &table.sin()?, false)
    }),
    smooth("rotary_embedding of neighbours in vectors", &[Signed(&[2, 5, 20])], |x| {
        let table = Tensor::arange(0.0, 40.0, 1.0, DType::F32, x[0].device())?.reshape([5, 8])?;
        x[0].rotary_embedding(&table.cos()?, &table.sin()?, true)
    }),
    smooth("rnn_tanh", &[Signed(&[4, 2, 3]), Bounded(&[2, 3]), Bounded(&[3, 3]), Bounded(&[3])], |x| {
        run_recurrent(x, RecurrentKind::Tanh, None)
    })
    .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
    .with_tolerances(case::ONE_ROUNDING),
    nonsmooth("rnn_relu", &[Signed(&[4, 2, 3]), Bounded(&[2, 3]), Bounded(&[3, 3]), Bounded(&[3])], |x| {
        run_recurrent(x, RecurrentKind::Relu, Some(&[4, 2]))
    })
    .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
    .with_tolerances(case::ONE_ROUNDING),
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
    smooth("gru of lengths", &[Signed(&[4, 2, 9]), Bounded(&[2, 3]), Bounded(&[9, 3]), Bounded(&[9])], |x| {
        run_recurrent(x, RecurrentKind::Gru, Some(&[2, 4]))
    })
    .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
    .with_tolerances(case::ONE_ROUNDING),
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
    smooth(
        "lstm of lengths",
        &[Signed(&[4, 2, 12]), Bounded(&[2, 3]), Bounded(&[12, 3]), Bounded(&[12]), Bounded(&[2, 3])],
        |x| run_recurrent(x, RecurrentKind::Lstm, Some(&[3, 4])),
    )
    .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * cost::numel(&x[2]))
    .with_tolerances(case::ONE_ROUNDING),
    smooth("ctc_loss", &[Signed(&[6, 2, 4])], |x| {
        let ints = |n: &[i32], shape: &[usize]| Tensor::from_slice(n, shape, x[0].device());
        let (labels, steps, counts) =
            (ints(&[1, 1, 3, 2], &[2, 2])?, ints(&[6, 5], &[2])?, ints(&[2, 1], &[2])?);
        x[0].log_softmax(-1)?.ctc_loss(&CtcLossOptions::new(&labels, &steps, &counts))
    }),
    nonsmooth("multi_margin_loss", &[Signed(&[3, 5]), Index(&[3], 5), Positive(&[5])], |x| {
        x[0].multi_margin_loss(
            &x[1],
            &MultiMarginLossOptions { p: 2, margin: 0.8, weight: Some(&x[2]), ..Default::default() },
        )
    }),
    nonsmooth("multilabel_margin_loss", &[Signed(&[3, 5]), Index(&[3, 5], 5)], |x| {
        x[0].multilabel_margin_loss(&x[1], Reduction::Sum)
    }),
    smooth("poisson_nll_loss", &[Signed(S), Positive(S)], |x| {
        x[0].poisson_nll_loss(&x[1], &Default::default())
    }),
    nonsmooth("cosine_embedding_loss", &[Signed(S), Positive(S)], |x| {
        let signs = Tensor::from_slice(&[1f32, -1.0, 1.0], [3], x[0].device())?.to_dtype(x[0].dtype())?;
        x[0].cosine_embedding_loss(&x[1], &signs, 0.1, Reduction::Sum)
    }),
    nonsmooth("hinge_embedding_loss", &[Signed(S)], |x| {
        x[0].hinge_embedding_loss(&x[0].detach().sign()?, 0.7, Reduction::Sum)
    }),
    nonsmooth("max_pool3d", &[Signed(&[2, 3, 4, 4])], |x| {
        x[0].max_pool3d(PoolOptions { stride: [1; 3], ..Pool3dOptions::new(2) })
    }),
    smooth("avg_pool3d", &[Signed(&[2, 3, 4, 4])], |x| {
        x[0].avg_pool3d(PoolOptions { padding: [1; 3], ..Pool3dOptions::new(2) })
    }),
    smooth("pixel_shuffle", &[Signed(&[1, 8, 2, 3])], |x| x[0].pixel_shuffle(2)),
    smooth("channel_shuffle", &[Signed(&[1, 6, 2])], |x| x[0].channel_shuffle(2)),
];

pub fn cases() -> impl Iterator<Item = &'static OpCase> {
    GROUPS.iter().chain(inplace_and_factory::IN_PLACE).flat_map(|group| group.iter())
}

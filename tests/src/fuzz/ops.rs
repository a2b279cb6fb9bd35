//! Operations to fuzz, each with the kinds of its arguments: `t1` to `t4` are tensors, others are random values.

use forebay::ops::{
    AddmmOptions, AttentionOptions, BatchNormOptions, BceWithLogitsOptions, ConvolutionOptions, CovOptions,
    CrossEntropyOptions, CtcLossOptions, DiffOptions, EmbeddingBagMode, EmbeddingBagOptions,
    EmbeddingOptions, GaussianNllLossOptions, GridMode, GridPadding, GridSampleOptions, Im2colOptions,
    InstanceNormOptions, InterpolateMode, InterpolateOptions, Interpolation, IsCloseOptions,
    LocalResponseNormOptions, LuSolveOptions, MatrixNorm, MultiMarginLossOptions, NanToNumOptions,
    NllLossOptions, NormOptions, NormalizeOptions, PadMode, Padding, PairwiseDistanceOptions,
    PoissonNllLossOptions, PoolOptions, RecurrentKind, RecurrentOp, Reduction, RreluOptions, ScatterReduce,
    SearchSortedOptions, SolveTriangularOptions, TransposedConvolutionOptions, TripletMarginLossOptions,
    block_diag, broadcast_tensors, cartesian_prod, cat, column_stack, dstack, einsum, hstack, meshgrid,
    multi_dot, stack, vstack,
};
use forebay::tensor::Tensor;

use super::generator::ArgGenerator;
use super::{FuzzOp, IntoTensors};

/// Operations of the catalog that take a closure, or are variants of `recurrent`.
#[cfg(test)]
pub(super) const CALLED_INDIRECTLY: &[&str] =
    &["triplet_margin_with_distance_loss", "rnn_tanh", "rnn_relu", "lstm", "gru"];

const PAD_MODES: &[PadMode] =
    &[PadMode::Constant(1.0), PadMode::Reflect, PadMode::Replicate, PadMode::Circular];
const REDUCTIONS: &[Reduction] = &[Reduction::None, Reduction::Mean, Reduction::Sum, Reduction::BatchMean];
const INTERPOLATE_MODES: &[InterpolateMode] = &[
    InterpolateMode::Nearest,
    InterpolateMode::NearestExact,
    InterpolateMode::Linear,
    InterpolateMode::Bilinear,
    InterpolateMode::Bicubic,
    InterpolateMode::Trilinear,
];

fn random_pool<const N: usize>(r: &mut ArgGenerator) -> PoolOptions<N> {
    PoolOptions {
        kernel: r.count_array(),
        stride: r.count_array(),
        padding: r.count_array(),
        dilation: r.count_array(),
        ceil_mode: r.flag(),
        count_include_pad: r.flag(),
        divisor_override: r.maybe(ArgGenerator::int64),
    }
}

fn random_interpolate(r: &mut ArgGenerator) -> InterpolateOptions {
    let size = if r.flag() { r.counts().into() } else { Default::default() };
    let scale_factor = if r.flag() { r.floats().into() } else { Default::default() };
    InterpolateOptions {
        size,
        scale_factor,
        mode: r.pick(INTERPOLATE_MODES),
        align_corners: r.flag(),
        recompute_scale_factor: r.flag(),
        antialias: r.flag(),
    }
}

fn random_padding<const N: usize>(r: &mut ArgGenerator) -> Padding<N> {
    match r.below(4) {
        0 => Padding::Same,
        1 => Padding::Valid,
        _ => Padding::Zeros(r.count_array()),
    }
}

fn random_matrix_norm(r: &mut ArgGenerator) -> MatrixNorm {
    match r.below(3) {
        0 => MatrixNorm::Fro,
        1 => MatrixNorm::Nuc,
        _ => MatrixNorm::Order(r.pick(&[1.0, 2.0, -1.0, -2.0, f64::INFINITY, f64::NAN, 3.0])),
    }
}

fn random_tensor_list<'a>(r: &mut ArgGenerator, t: &'a [Tensor]) -> Vec<&'a Tensor> {
    let n = r.below(4);
    t.iter().take(n).collect()
}

fn random_index_list<'a>(r: &mut ArgGenerator, t: &'a [Tensor]) -> Vec<Option<&'a Tensor>> {
    let n = r.below(4);
    t.iter().skip(1).take(n).map(|t| r.maybe(|_| t)).collect()
}

/// Draws an argument of a kind.
macro_rules! arg {
    (t1, $r:ident, $t:ident) => {
        &$t[1]
    };
    (t2, $r:ident, $t:ident) => {
        &$t[2]
    };
    (t3, $r:ident, $t:ident) => {
        &$t[3]
    };
    (t4, $r:ident, $t:ident) => {
        &$t[4]
    };
    (maybe1, $r:ident, $t:ident) => {
        $r.maybe(|_| &$t[1])
    };
    (maybe2, $r:ident, $t:ident) => {
        $r.maybe(|_| &$t[2])
    };
    (maybe3, $r:ident, $t:ident) => {
        $r.maybe(|_| &$t[3])
    };
    (maybe4, $r:ident, $t:ident) => {
        $r.maybe(|_| &$t[4])
    };
    (operand1, $r:ident, $t:ident) => {
        $r.operand(&$t[1])
    };
    (operand2, $r:ident, $t:ident) => {
        $r.operand(&$t[2])
    };
    (running, $r:ident, $t:ident) => {
        $r.maybe(|_| (&$t[3], &$t[4]))
    };
    (ints, $r:ident, $t:ident) => {
        &$r.ints()[..]
    };
    (counts, $r:ident, $t:ident) => {
        &$r.counts()[..]
    };
    (floats, $r:ident, $t:ident) => {
        &$r.floats()[..]
    };
    (int2, $r:ident, $t:ident) => {
        $r.int_array::<2>()
    };
    (im2col, $r:ident, $t:ident) => {
        &Im2colOptions { dilation: $r.count_array(), padding: $r.count_array(), stride: $r.count_array() }
    };
    (count1, $r:ident, $t:ident) => {
        $r.count_array::<1>()
    };
    (count2, $r:ident, $t:ident) => {
        $r.count_array::<2>()
    };
    (count3, $r:ident, $t:ident) => {
        $r.count_array::<3>()
    };
    (padding1, $r:ident, $t:ident) => {
        random_padding::<1>($r)
    };
    (padding2, $r:ident, $t:ident) => {
        random_padding::<2>($r)
    };
    (padding3, $r:ident, $t:ident) => {
        random_padding::<3>($r)
    };
    (maybe_int, $r:ident, $t:ident) => {
        $r.maybe(ArgGenerator::int)
    };
    (maybe_count, $r:ident, $t:ident) => {
        $r.maybe(ArgGenerator::count)
    };
    (maybe_float, $r:ident, $t:ident) => {
        $r.maybe(ArgGenerator::float)
    };
    (device, $r:ident, $t:ident) => {
        $t[0].device()
    };
    (tensors, $r:ident, $t:ident) => {
        &random_tensor_list($r, $t)[..]
    };
    (indices, $r:ident, $t:ident) => {
        &random_index_list($r, $t)[..]
    };
    (reduction, $r:ident, $t:ident) => {
        $r.pick(REDUCTIONS)
    };
    (pad_mode, $r:ident, $t:ident) => {
        $r.pick(PAD_MODES)
    };
    (interpolation, $r:ident, $t:ident) => {
        $r.pick(&[
            Interpolation::Linear,
            Interpolation::Lower,
            Interpolation::Nearest,
            Interpolation::Midpoint,
        ])
    };
    (scatter, $r:ident, $t:ident) => {
        $r.pick(&[ScatterReduce::Sum, ScatterReduce::Prod, ScatterReduce::Mean, ScatterReduce::Amax])
    };
    (grid_mode, $r:ident, $t:ident) => {
        $r.pick(&[GridMode::Bilinear, GridMode::Nearest, GridMode::Bicubic])
    };
    (grid_padding, $r:ident, $t:ident) => {
        $r.pick(&[GridPadding::Zeros, GridPadding::Border, GridPadding::Reflection])
    };
    (pool1, $r:ident, $t:ident) => {
        random_pool::<1>($r)
    };
    (pool2, $r:ident, $t:ident) => {
        random_pool::<2>($r)
    };
    (pool3, $r:ident, $t:ident) => {
        random_pool::<3>($r)
    };
    (matrix_norm, $r:ident, $t:ident) => {
        random_matrix_norm($r)
    };
    (interpolate, $r:ident, $t:ident) => {
        &random_interpolate($r)
    };
    (attention, $r:ident, $t:ident) => {
        &AttentionOptions {
            attn_mask: $r.maybe(|_| &$t[3]),
            dropout_p: $r.float(),
            is_causal: $r.flag(),
            scale: $r.maybe(ArgGenerator::float),
            enable_gqa: $r.flag(),
            window: $r.maybe(|r| r.count_array::<2>()),
        }
    };
    (bags, $r:ident, $t:ident) => {
        &EmbeddingBagOptions {
            offsets: $r.maybe(|_| &$t[2]),
            mode: $r.pick(&[EmbeddingBagMode::Sum, EmbeddingBagMode::Mean, EmbeddingBagMode::Max]),
            per_sample_weights: $r.maybe(|_| &$t[3]),
            include_last_offset: $r.flag(),
            padding_idx: $r.maybe(ArgGenerator::count),
            scale_grad_by_freq: $r.flag(),
        }
    };
    (cross_entropy, $r:ident, $t:ident) => {
        &CrossEntropyOptions {
            weight: $r.maybe(|_| &$t[3]),
            ignore_index: $r.int64(),
            reduction: $r.pick(REDUCTIONS),
            label_smoothing: $r.float(),
            in_place: $r.flag(),
        }
    };
    (lookup, $r:ident, $t:ident) => {
        &EmbeddingOptions { padding_idx: $r.maybe(ArgGenerator::count), scale_grad_by_freq: $r.flag() }
    };
    ($kind:ident, $r:ident, $t:ident) => {
        $r.$kind()
    };
}

macro_rules! methods {
    ($($name:ident($($kind:ident),* $(; $options:ident { $($field:ident: $of:ident),* })?);)*) => {
        &[$(FuzzOp {
            name: stringify!($name),
            run: |_r, t| {
                t[0].$name($(arg!($kind, _r, t),)* $(&$options { $($field: arg!($of, _r, t)),* })?)
                    .map(IntoTensors::into_tensors)
            },
        }),*]
    };
}

macro_rules! functions {
    ($($name:ident($($kind:ident),*);)*) => {
        &[$(FuzzOp { name: stringify!($name), run: |r, t| $name($(arg!($kind, r, t)),*).map(IntoTensors::into_tensors) }),*]
    };
}

macro_rules! constructors {
    ($($name:ident($($kind:ident),*);)*) => {
        &[$(FuzzOp { name: stringify!($name), run: |r, t| Tensor::$name($(arg!($kind, r, t)),*).map(IntoTensors::into_tensors) }),*]
    };
}

const METHODS: &[FuzzOp] = methods! {
    celu(float); celu_(float); softshrink(float); hardtanh(float, float); hardtanh_(float, float); prelu(t1); glu(int); softmin(int);
    rrelu(; RreluOptions { lower: float, upper: float, training: flag }); nan_to_num(); atleast_1d(); atleast_2d(); atleast_3d(); tile(counts);
    rot90(int, int2); combinations(count, flag); kron(t1); tensordot(t1, ints, ints); scaled_dot_product_attention(t1, t2, attention);
    qkv_attention(count, count, attention); embedding_bag(t1, bags);
    batch_norm(; BatchNormOptions { running: running, weight: maybe1, bias: maybe2, training: flag, num_batches_tracked: maybe4, momentum: float, eps: float });
    batch_norm_relu(; BatchNormOptions { running: running, weight: maybe1, bias: maybe2, training: flag, num_batches_tracked: maybe4, momentum: float, eps: float });
    where_(t1, operand2); masked_fill(t1, operand2); clamp(operand1, operand2); clamp_min(operand1); clamp_max(operand1);
    addcmul(operand1, operand2, float); addcdiv(operand1, operand2, float); lerp(operand1, operand2); masked_fill_(t1, operand2); fill_(operand1);
    zero_(); clamp_(operand1, operand2); addcmul_(operand1, operand2, float); addcdiv_(operand1, operand2, float); lerp_(operand1, operand2);
    to_dtype(dtype); copy_(t1); cross(t1, int); cross_entropy(t1); cross_entropy_with(t1, cross_entropy); pdist(float); cdist(t1, float);
    embedding(t1, maybe_count); embedding_with(t1, lookup); embedding_renorm_(t1, float, float); qr(flag); eigh(flag); eigvalsh(flag); lu_factor();
    lu(); lu_solve(t1, t2; LuSolveOptions { left: flag, adjoint: flag }); lstsq(t1, maybe_float);
    grid_sample(t1; GridSampleOptions { mode: grid_mode, padding_mode: grid_padding, align_corners: flag }); affine_grid(counts, flag);
    gather(int, t1); index_select(int, t1); take_along_dim(t1, int); scatter(int, t1, t2); scatter_add(int, t1, t2); scatter_value(int, t1, float);
    index_add(int, t1, t2, float); index_fill(int, t1, operand2); interpolate(interpolate);
    add_layer_norm(t1, counts; NormOptions { weight: maybe2, bias: maybe3, eps: float }); add_rms_norm(t1, counts, maybe2, maybe_float); cholesky();
    solve_triangular(t1, flag; SolveTriangularOptions { left: flag, unitriangular: flag }); solve(t1); inv(); det(); slogdet(); matrix_power(int32);
    pinv(maybe_float); matrix_rank(maybe_float); linear(t1, maybe2); mlp(t1, t2, t3, t4); bilinear(t1, t2, maybe3);
    linear_cross_entropy(t1, t2, cross_entropy); nll_loss(t1; NllLossOptions { weight: maybe2, ignore_index: int64, reduction: reduction });
    mse_loss(t1, reduction); l1_loss(t1, reduction); smooth_l1_loss(t1, float, reduction); huber_loss(t1, float, reduction);
    binary_cross_entropy(t1, maybe2, reduction);
    binary_cross_entropy_with_logits(t1; BceWithLogitsOptions { weight: maybe2, pos_weight: maybe3, reduction: reduction });
    kl_div(t1, flag, reduction); gaussian_nll_loss(t1, t2; GaussianNllLossOptions { full: flag, eps: float, reduction: reduction });
    soft_margin_loss(t1, reduction); margin_ranking_loss(t1, t2, float, reduction); cosine_similarity(t1, int, float);
    normalize(int; NormalizeOptions { p: float, eps: float });
    pairwise_distance(t1; PairwiseDistanceOptions { p: float, eps: float, keepdim: flag }); dist(t1, float);
    triplet_margin_loss(t1, t2; TripletMarginLossOptions { margin: float, p: float, swap: flag, reduction: reduction });
    poisson_nll_loss(t1; PoissonNllLossOptions { log_input: flag, full: flag, eps: float, reduction: reduction });
    hinge_embedding_loss(t1, float, reduction); cosine_embedding_loss(t1, t2, float, reduction);
    multi_margin_loss(t1; MultiMarginLossOptions { p: int32, margin: float, weight: maybe2, reduction: reduction });
    multilabel_margin_loss(t1, reduction); multilabel_soft_margin_loss(t1, maybe2, reduction); matmul(t1); mm(t1); bmm(t1); mv(t1); dot(t1);
    outer(t1); inner(t1); addmm(t1, t2; AddmmOptions { beta: float, alpha: float }); addmv(t1, t2; AddmmOptions { beta: float, alpha: float });
    addr(t1, t2; AddmmOptions { beta: float, alpha: float }); baddbmm(t1, t2; AddmmOptions { beta: float, alpha: float });
    addbmm(t1, t2; AddmmOptions { beta: float, alpha: float }); matrix_norm(matrix_norm, int2, flag); cond(matrix_norm); vander(maybe_count);
    matrix_exp(); cholesky_solve(t1, flag); cholesky_inverse(flag); logdet(); vecdot(t1, int); tensorinv(count); tensorsolve(t1, ints);
    layer_norm(counts; NormOptions { weight: maybe1, bias: maybe2, eps: float }); rms_norm(counts, maybe1, maybe_float);
    group_norm(count; NormOptions { weight: maybe1, bias: maybe2, eps: float });
    instance_norm(; InstanceNormOptions { running: running, weight: maybe1, bias: maybe2, use_input_stats: flag, momentum: float, eps: float });
    local_response_norm(count; LocalResponseNormOptions { alpha: float, beta: float, k: float }); max_pool2d(pool2); max_pool2d_with_indices(pool2);
    avg_pool2d(pool2); adaptive_avg_pool2d(count2); adaptive_max_pool2d(count2); adaptive_max_pool2d_with_indices(count2);
    adaptive_max_pool1d(count); adaptive_max_pool1d_with_indices(count); max_pool1d(pool1); max_pool1d_with_indices(pool1); avg_pool1d(pool1);
    max_pool3d(pool3); max_pool3d_with_indices(pool3); avg_pool3d(pool3); adaptive_avg_pool1d(count); adaptive_avg_pool3d(count3);
    adaptive_max_pool3d(count3); lp_pool2d(float, pool2); lp_pool1d(float, pool1); lp_pool3d(float, pool3);
    slice_scatter(t1, int, count, count, count); select_scatter(t1, int, int); diagonal_scatter(t1, int, int, int); diag_embed(int, int, int);
    diag(int); take(t1); put(t1, t2, flag); index_copy(int, t1, t2); masked_scatter(t1, t2); rand_like(); randn_like(); dropout(float, flag);
    gumbel_softmax(float, flag, int); multinomial(count, flag); feature_dropout(float, flag); alpha_dropout(float, flag);
    feature_alpha_dropout(float, flag); sum(ints, flag); sum_all(); mean(ints, flag); mean_all(); prod(int, flag); prod_all(); amax(ints, flag);
    amin(ints, flag); aminmax(ints, flag); max_all(); min_all(); max(int, flag); min(int, flag); argmax(ints, flag); argmin(ints, flag);
    any(ints, flag); all(ints, flag); count_nonzero(ints); rotary_embedding(t1, t2, flag); scaled_mm(t1, t2, t3, maybe4, dtype); cumsum(int);
    cumprod(int); logcumsumexp(int); trapezoid(operand1, int); cumulative_trapezoid(operand1, int); cummax(int); cummin(int);
    scatter_reduce(int, t1, t2, scatter, flag); index(indices); index_put(indices, t1, flag); masked_select(t1); nonzero(); argwhere();
    nonzero_tuple(); repeat_interleave_by(t1, int, maybe_count);
    searchsorted(t1; SearchSortedOptions { out_int32: flag, right: flag, sorter: maybe2 });
    bucketize(t1; SearchSortedOptions { out_int32: flag, right: flag, sorter: maybe2 });
    isclose(operand1; IsCloseOptions { rtol: float, atol: float, equal_nan: flag });
    allclose(t1; IsCloseOptions { rtol: float, atol: float, equal_nan: flag }); equal(t1); isin(t1, flag); unique(); unique_consecutive();
    unique_dim(int); unique_consecutive_dim(int); mode(int, flag); bincount(maybe1, count); histc(count, float, float); flip(ints); roll(int, int);
    movedim(ints, ints); repeat(counts); repeat_interleave(count, int); pad(ints, pad_mode); pixel_shuffle(count); pixel_unshuffle(count);
    channel_shuffle(count); diff(count, int; DiffOptions { prepend: maybe1, append: maybe2 }); trace(); tril(int); triu(int); one_hot(count);
    softmax(int); log_softmax(int); softmax_with_dtype(int, dtype); log_softmax_with_dtype(int, dtype); sort(int, flag); argsort(int, flag);
    topk(count, int, flag); kthvalue(count, int, flag); median(int, flag); nanmedian(int, flag); median_all(); nanmedian_all();
    quantile(operand1, ints, flag, interpolation); nanquantile(operand1, ints, flag, interpolation); var(ints, float, flag); std(ints, float, flag);
    var_mean(ints, float, flag); norm(float, ints, flag); std_mean(ints, float, flag); nansum(ints, flag); nanmean(ints, flag);
    cov(; CovOptions { correction: float, fweights: maybe1, aweights: maybe2 }); corrcoef(); renorm(float, int, float); logsumexp(ints, flag);
    as_strided(counts, counts, maybe_count); unfold(int, count, count); im2col(int2, im2col); col2im(int2, int2, im2col); svd(); svdvals();
    nuclear_norm(ints, flag); polygamma(count); nan_to_num_with(; NanToNumOptions { nan: float, posinf: maybe_float, neginf: maybe_float });
    round_decimals(int32); logit(maybe_float); mvlgamma(count); bitwise_not(); zeros_like(); ones_like(); full_like(float); item(); dim(int);
    reshape(ints); view(ints); permute(ints); transpose(int, int); t(); broadcast_to(counts); expand(ints); unsqueeze(int); squeeze(int);
    squeeze_all(); flatten(int, int); unflatten(int, ints); narrow(int, count, count); slice_dim(int, count, count, count); select(int, int);
    diagonal(int, int, int); split(count, int); split_with_sizes(counts, int); chunk(count, int); tensor_split(count, int);
    tensor_split_at(ints, int); hsplit(count); vsplit(count); dsplit(count); unbind(int); contiguous(); copy(); abs(); abs_(); neg(); neg_(); sign();
    square(); square_(); reciprocal(); reciprocal_(); sqrt(); sqrt_(); rsqrt(); rsqrt_(); exp(); exp_(); exp2(); expm1(); expm1_(); log(); log_();
    log2(); log10(); log1p(); log1p_(); sin(); sin_(); cos(); cos_(); tan(); asin(); acos(); atan(); sinh(); cosh(); tanh(); tanh_(); asinh();
    acosh(); atanh(); lgamma(); digamma(); erf(); erfc(); erfinv(); sigmoid(); sigmoid_(); sinc(); ndtr(); log_ndtr(); ndtri(); erfcx(); i0(); i0e();
    i1(); i1e(); entr(); floor(); floor_(); ceil(); ceil_(); round(); round_(); trunc(); trunc_(); frac(); rad2deg(); deg2rad(); isnan(); isinf();
    isfinite(); isposinf(); isneginf(); signbit(); logical_not(); relu(); relu_(); relu6(); relu6_(); leaky_relu(float); leaky_relu_(float);
    elu(float); elu_(float); selu(); selu_(); gelu(); gelu_tanh(); silu(); silu_(); mish(); mish_(); logsigmoid(); softplus(float, float);
    softsign(); tanhshrink(); hardshrink(float); hardsigmoid(); hardsigmoid_(); hardswish(); hardswish_(); threshold(float, float);
    threshold_(float, float); add(operand1); add_(operand1); sub(operand1); sub_(operand1); rsub(operand1); mul(operand1); mul_(operand1);
    div(operand1); div_(operand1); pow(operand1); pow_(operand1); maximum(operand1); minimum(operand1); fmax(operand1); fmin(operand1);
    logaddexp(operand1); logaddexp2(operand1); heaviside(operand1); atan2(operand1); hypot(operand1); fmod(operand1); fmod_(operand1);
    remainder(operand1); remainder_(operand1); floor_divide(operand1); trunc_divide(operand1); copysign(operand1); xlogy(operand1);
    xlog1py(operand1); zeta(operand1); ldexp(operand1); gcd(operand1); lcm(operand1); bitwise_left_shift(operand1); bitwise_right_shift(operand1);
    eq(operand1); ne(operand1); lt(operand1); le(operand1); gt(operand1); ge(operand1); logical_and(operand1); logical_or(operand1);
    logical_xor(operand1); bitwise_and(operand1); bitwise_or(operand1); bitwise_xor(operand1);
    conv1d(t1, maybe2; ConvolutionOptions { stride: count1, padding: padding1, dilation: count1, groups: count });
    conv2d(t1, maybe2; ConvolutionOptions { stride: count2, padding: padding2, dilation: count2, groups: count });
    conv3d(t1, maybe2; ConvolutionOptions { stride: count3, padding: padding3, dilation: count3, groups: count });
    conv_transpose1d(t1, maybe2; TransposedConvolutionOptions {
        stride: count1, padding: count1, output_padding: count1, groups: count, dilation: count1
    });
    conv_transpose2d(t1, maybe2; TransposedConvolutionOptions {
        stride: count2, padding: count2, output_padding: count2, groups: count, dilation: count2
    });
    conv_transpose3d(t1, maybe2; TransposedConvolutionOptions {
        stride: count3, padding: count3, output_padding: count3, groups: count, dilation: count3
    });
    spherical_bessel_j0(); expand_as(t1); reshape_as(t1); view_as(t1); sum_to_size(counts); index_reduce(int, t1, t2, scatter, flag);
    unravel_index(counts); gradient(operand1, int, count); histogram(t1, maybe2, flag); polar(); lu_unpack(t1); svd_lowrank(count, count);
    pca_lowrank(count, flag, count); randint_like(int64, int64); sample_bernoulli(); uniform_(float, float); normal_(float, float);
    random_(int64, int64); bernoulli_(operand1); exponential_(float); geometric_(float); cauchy_(float, float); log_normal_(float, float);
    addmm_(t1, t2; AddmmOptions { beta: float, alpha: float }); addmv_(t1, t2; AddmmOptions { beta: float, alpha: float });
    addr_(t1, t2; AddmmOptions { beta: float, alpha: float }); baddbmm_(t1, t2; AddmmOptions { beta: float, alpha: float });
    addbmm_(t1, t2; AddmmOptions { beta: float, alpha: float }); cumsum_(int); cumprod_(int); tril_(int); triu_(int); renorm_(float, int, float);
    scatter_(int, t1, t2); scatter_value_(int, t1, float); scatter_add_(int, t1, t2); scatter_reduce_(int, t1, t2, scatter, flag);
    index_add_(int, t1, t2, float); index_copy_(int, t1, t2); index_fill_(int, t1, operand2); index_put_(indices, t1, flag);
    index_reduce_(int, t1, t2, scatter, flag); masked_scatter_(t1, t2); put_(t1, t2, flag); polygamma_(count); mvlgamma_(count);
    logit_(maybe_float); nan_to_num_(); bitwise_not_();
    nan_to_num_with_(; NanToNumOptions { nan: float, posinf: maybe_float, neginf: maybe_float });
    rrelu_(; RreluOptions { lower: float, upper: float, training: flag }); sign_(); log2_();
    log10_(); tan_(); asin_(); acos_(); atan_(); sinh_(); cosh_(); asinh_(); acosh_(); atanh_(); lgamma_(); digamma_(); erf_(); erfc_();
    erfinv_(); sinc_(); i0_(); frac_(); atan2_(operand1); hypot_(operand1); floor_divide_(operand1); copysign_(operand1); xlogy_(operand1);
    ldexp_(operand1); gcd_(operand1); lcm_(operand1); bitwise_left_shift_(operand1); bitwise_right_shift_(operand1); bitwise_and_(operand1);
    bitwise_or_(operand1); bitwise_xor_(operand1);
    max_unpool1d(t1, count1); max_unpool2d(t1, count2); max_unpool3d(t1, count3);
    fractional_max_pool2d(count2, count2, maybe1); fractional_max_pool3d(count3, count3, maybe1);
};

const FUNCTIONS: &[FuzzOp] = functions! {
    hstack(tensors); vstack(tensors); dstack(tensors); column_stack(tensors); block_diag(tensors); meshgrid(tensors, flag);
    broadcast_tensors(tensors); cartesian_prod(tensors); einsum(equation, tensors); multi_dot(tensors); cat(tensors, int); stack(tensors, int);
};

const CONSTRUCTORS: &[FuzzOp] = constructors! {
    tril_indices(count, count, int, device); triu_indices(count, count, int, device); rand(counts, dtype, device); uniform(counts, float, float,
    dtype, device); randn(counts, dtype, device); normal(counts, float, float, dtype, device); randint(int64, int64, counts, dtype, device);
    randperm(count, dtype, device); bernoulli(counts, float, dtype, device); arange(float, float, float, dtype, device); linspace(float, float, count,
    dtype, device); logspace(float, float, count, float, dtype, device); eye(count, count, dtype, device); general_cosine_window(count, floats, flag,
    dtype, device); hann_window(count, flag, dtype, device); hamming_window(count, flag, dtype, device); blackman_window(count, flag,
    dtype, device); bartlett_window(count, flag, dtype, device); kaiser_window(count, flag, float, dtype, device); gaussian_window(count, float, flag,
    dtype, device); full(counts, float, dtype, device); zeros(counts, dtype, device); ones(counts, dtype, device); empty(counts, dtype, device);
};

const SPECIAL_OPS: &[FuzzOp] = &[
    FuzzOp {
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
    },
    FuzzOp {
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
    },
    FuzzOp {
        name: "from_slice",
        run: |r, t| Tensor::from_slice(&r.floats(), r.counts(), t[0].device()).map(IntoTensors::into_tensors),
    },
    FuzzOp {
        name: "expand of a view",
        run: |r, t| t[0].expand(r.ints())?.expand(r.ints())?.permute(r.ints()).map(IntoTensors::into_tensors),
    },
    FuzzOp {
        name: "unfold of a view",
        run: |r, t| {
            t[0].unfold(r.int(), r.count(), r.count())?
                .unfold(r.int(), r.count(), r.count())
                .map(IntoTensors::into_tensors)
        },
    },
];

pub(super) fn all_ops() -> impl Iterator<Item = FuzzOp> {
    [METHODS, FUNCTIONS, CONSTRUCTORS, SPECIAL_OPS].into_iter().flatten().copied()
}

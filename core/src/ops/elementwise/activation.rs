//! Activation functions: elementwise operations, each with its gradient.

use crate::ops::elementwise::prelude::*;
use crate::ops::kernel::heuristics;
use crate::ops::prelude::*;
use crate::ops::reduce;

// Compilers turn a selection between a and the bound that a is compared with into the hardware's max or min,
// which may lose NaN. `m_max` and `m_min` therefore compare bits. Gradients at NaN follow PyTorch: only
// elements that the function cuts off lose their gradient, and NaN is not one of them.
unary! {
    /// max(a, 0).
    relu / relu_(): Number, "m_max(a, 0.0)" | "select(a, T(0), a <= T(0))", ["base"], Expr("select(g, T(0), y <= T(0))", &[Y]);
    /// min(max(a, 0), 6).
    relu6 / relu6_(): Number, "m_min(m_max(a, 0.0), 6.0)" | "select(select(a, T(0), a <= T(0)), T(6), a >= T(6))", ["base"],
        Expr("select(g, T(0), a <= T(0) || a >= T(6))", &[A]);
    /// a for a > 0, else negative_slope · a.
    leaky_relu / leaky_relu_(negative_slope): Float, "select(a * negative_slope, a, a > 0.0)", [],
        Expr("select(g * negative_slope, g, a > 0.0)", &[A]);
    /// a for a > 0, else alpha · (eᵃ - 1).
    elu / elu_(alpha): Float, "select(alpha * m_expm1(a), a, a > 0.0)", ["base", "exp"],
        Expr("select(g, g * alpha * m_exp(min(a, 0.0)), a <= 0.0)", &[A]);
    /// max(0, a) + min(0, alpha · (e^(a/alpha) - 1)).
    celu / celu_(alpha) where (alpha != 0.0, "takes an alpha that is not 0"): Float, "select(alpha * m_expm1(a / alpha), a, a > 0.0)", ["base", "exp"],
        Expr("select(g, g * m_exp(min(a, 0.0) / alpha), a <= 0.0)", &[A]);
    /// Self-normalising elu (Klambauer et al., 2017).
    selu / selu_(): Float, "1.0507009873554805 * select(1.6732632423543772 * m_expm1(a), a, a > 0.0)", ["base", "exp"],
        Expr("g * 1.0507009873554805 * select(1.0, 1.6732632423543772 * m_exp(min(a, 0.0)), a <= 0.0)", &[A]);
    /// a · Φ(a) by erf, where Φ is the normal distribution function (Hendrycks and Gimpel, 2016).
    gelu(): Float, "m_gelu(a)", ["base", "exp", "log", "erf", "activation"], Expr("g * m_gelu_grad(a)", &[A]);
    /// Tanh approximation of gelu: 0.5a(1 + tanh(√(2/π)(a + 0.044715a³))).
    gelu_tanh(): Float, "m_gelu_tanh(a)", ["base", "exp", "log", "erf", "activation"],
        Expr("g * m_gelu_tanh_grad(a)", &[A]);
    /// a · sigmoid(a).
    silu / silu_(): Float, "m_silu(a)", ["base", "exp", "log", "erf", "activation"], Expr("g * m_silu_grad(a)", &[A]);
    /// a · tanh(softplus(a)).
    mish / mish_(): Float, "m_mish(a)", ["base", "exp", "log", "erf", "activation"], Expr("g * m_mish_grad(a)", &[A]);
    /// log(sigmoid(a)).
    logsigmoid(): Float, "m_logsigmoid(a)", ["base", "exp", "log", "erf", "activation"],
        Expr("g * m_sigmoid(-a)", &[A]);
    /// log(1 + e^(beta · a)) / beta; a itself where beta · a is above threshold.
    softplus(beta, threshold): Float, "select(m_log1pexp(a * beta) / beta, a, a * beta > threshold)",
        ["base", "exp", "log", "erf", "activation"], Expr("select(g * m_sigmoid(a * beta), g, a * beta > threshold)", &[A]);
    /// a / (1 + |a|). At infinities the result and its gradient are NaN, as in PyTorch.
    softsign(): Float, "a / (1.0 + abs(a))", ["base"],
        Expr("select(m_nan(), g / ((1.0 + abs(a)) * (1.0 + abs(a))), m_isfinite(a))", &[A]);
    /// a - tanh(a).
    tanhshrink(): Float, "a - m_tanh(a)", ["base", "exp"], Expr("g * m_tanh(a) * m_tanh(a)", &[A]);
    /// a moved towards 0 by lambda; 0 between -lambda and lambda.
    softshrink(lambda) where (lambda >= 0.0, "takes a lambda of at least 0"): Float, "select(select(select(T(0), a + lambda, a < -lambda), a - lambda, a > lambda), a, m_isnan(a))"
        | "select(select(select(T(0), a + lambda, a < -lambda), a - lambda, a > lambda), a, m_isnan(f32(a)))", ["base"],
        Expr("select(g, T(0), a >= -lambda && a <= lambda)", &[A]);
    /// a outside -lambda..lambda, else 0.
    hardshrink(lambda): Float, "select(a, T(0), a >= -lambda && a <= lambda)", [],
        Expr("select(g, T(0), a >= -lambda && a <= lambda)", &[A]);
    /// a clamped to min_val..max_val.
    hardtanh / hardtanh_(min_val, max_val) where (min_val <= max_val, "takes a min_val that is not above max_val"): Number, "m_min(m_max(a, min_val), max_val)"
        | "select(min(max(a, min_val), max_val), a, m_isnan(f32(a)))", ["base"],
        Expr("select(g, T(0), a <= min_val || a >= max_val)", &[A]);
    /// min(max(a/6 + 1/2, 0), 1).
    hardsigmoid / hardsigmoid_(): Float, "select(select(a / 6.0 + 0.5, T(1), a >= 3.0), T(0), a <= -3.0)", [],
        Expr("select(T(0), g / 6.0, a > -3.0 && a < 3.0)", &[A]);
    /// a · hardsigmoid(a).
    hardswish / hardswish_(): Float, "a * select(select((a + 3.0) / 6.0, T(1), a >= 3.0), T(0), a <= -3.0)", [],
        Expr("select(select(g * (a / 3.0 + 0.5), g, a >= 3.0), T(0), a <= -3.0)", &[A]);
    /// a above threshold, else value.
    threshold / threshold_(threshold, value): Number, "select(a, value, a <= threshold)", [],
        Expr("select(g, T(0), a <= threshold)", &[A]);
}

pointwise_ops! {
    PRELU "prelu": Float, "select(a * b, a, a > 0.0)", [], [
        Expr("select(g * b, g, a > 0.0)", &[A, B]), Expr("select(g * a, 0.0, a > 0.0)", &[A])];
    GLU "glu": Float, "a * m_sigmoid(b)", ["base", "exp"], [
        Expr("g * m_sigmoid(b)", &[B]), Expr("g * a * m_sigmoid(b) * m_sigmoid(-b)", &[A, B])];
}

/// Computes the backward pass of [`gelu_tanh`](Tensor::gelu_tanh) and the products next to it, in one pass
/// over x \[rows, extent\]. Multiplies g, the gradient of the result, by the derivative in place. Returns
/// gelu_tanh(x), and the column sums of the new g in f32. Both inputs are dense at the start of their memory,
/// and no other tensor shares g's storage.
pub(crate) fn gelu_tanh_backward_recompute(x: &Tensor, g: &Tensor) -> Result<(Tensor, Tensor)> {
    let (rows, extent) = (x.shape()[0], x.shape()[1]);
    let gelu = Tensor::empty(x.shape(), x.dtype(), x.device())?;
    if x.numel() == 0 {
        return Ok((gelu, Tensor::zeros([extent], DType::F32, x.device())?));
    }
    let width = if extent.is_multiple_of(VEC4_WIDTH) { VEC4_WIDTH } else { 1 };
    // A workgroup is 64 threads wide and four rows high.
    let tiles = extent.div_ceil(64 * width);
    let strip = heuristics::rows_per_strip(rows, tiles, 16);
    let strips = rows.div_ceil(strip);
    let partial = empty_workspace(&[strips, 1, extent], DType::F32, x.device())?;
    let spec = kernel_spec! { "gelu_recompute_grad", dtype: x.dtype().name(), width };
    let params = kernel_params! {
        rows, extent, strip, tiles, groups: strips * tiles,
    }
    .loop_iterations(strip / 16 + 1);
    launch::launch(&spec, &[x, &gelu, g, &partial], params, strips * tiles)?;
    // One section gives one tensor.
    let sums = reduce::sum_parts(&partial)?.remove(0);
    Ok((gelu, sums))
}

with_defaults! {
    /// Options of [`Tensor::rrelu`].
    #[derive(Clone, Copy, Debug)]
    pub struct RreluOptions {
        /// Lower bound of slopes; 1/8.
        pub lower: f64 = 1.0 / 8.0,
        /// Upper bound of slopes; 1/3.
        pub upper: f64 = 1.0 / 3.0,
        /// If true, draws slopes; false.
        pub training: bool = false,
    }
}

impl Tensor {
    /// Computes a for a > 0, else weight · a. `weight` has one element, or one for each index of dimension 1.
    ///
    /// # Errors
    /// `weight` has neither one element nor as many as dimension 1.
    #[track_caller]
    pub fn prelu(&self, weight: &Tensor) -> Result<Tensor> {
        let channels = extent_or_one(self, 1);
        fail_if!(weight.rank() > 1 || (weight.numel() != 1 && weight.numel() != channels);
            shape("prelu", [self, weight]), "takes 1 or {channels} weights");
        let mut shape = vec![1; self.rank()];
        if weight.numel() != 1 {
            shape[1] = channels;
        }
        run_pointwise(&PRELU, &[Operand::Tensor(self), Operand::Tensor(&weight.reshape(&shape[..])?)], &[])
    }

    /// Multiplies the first half of a dimension by the sigmoid of the second half (Dauphin et al., 2016).
    ///
    /// # Errors
    /// The extent is odd.
    #[track_caller]
    pub fn glu(&self, dim: isize) -> Result<Tensor> {
        let n = self.dim(dim)?;
        fail_if!(n % 2 != 0; shape("glu", [self]), "takes a dimension of even extent");
        let (first, second) = (self.narrow(dim, 0, n / 2)?, self.narrow(dim, n / 2, n / 2)?);
        run_pointwise(&GLU, &[Operand::Tensor(&first), Operand::Tensor(&second)], &[])
    }

    /// Computes softmax(-a) along a dimension.
    ///
    /// # Errors
    /// `dim` is out of range, or the dtype is not a 16- or 32-bit float.
    #[track_caller]
    pub fn softmin(&self, dim: isize) -> Result<Tensor> {
        self.neg()?.softmax(dim)
    }

    /// Computes a for a > 0, else slope · a. In training, each element draws its slope from lower..upper. Otherwise the
    /// slope is the mean of both.
    ///
    /// # Errors
    /// `lower` is above `upper`, or the dtype is not a float.
    #[track_caller]
    pub fn rrelu(&self, options: &RreluOptions) -> Result<Tensor> {
        let &RreluOptions { lower, upper, training } = options;
        fail_if!(lower > upper;
            argument("rrelu"), "takes a lower bound that is not above {upper}, got {lower}");
        if !training {
            return self.leaky_relu((lower + upper) / 2.0);
        }
        let slopes = Tensor::uniform(self.shape(), lower, upper, self.dtype(), self.device())?;
        run_pointwise(&PRELU, &[Operand::Tensor(self), Operand::Tensor(&slopes)], &[])
    }
}

//! Elementwise operations of one tensor.

use crate::ops::elementwise::prelude::*;
use crate::ops::prelude::*;

/// Declares operations. An entry has documentation, name (and in-place name), constraint on its attributes,
/// type rule, expression (and one for integers and f64), math files and gradient.
macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident $(/ $inplace:ident)? ($($attr:ident),*) $(where ($holds:expr, $rule:literal))?: $types:ident, $expr:literal $(| $plain:literal)?,
        $math:tt, $grad:expr;)*) => {
        #[allow(non_upper_case_globals, reason = "one record an operation, under its name")]
        mod records {
            use super::*;
            $(
                pub(super) static $name: PointwiseOp =
                    pointwise_op!(stringify!($name), $types, $expr, [$($plain)?], $math, [$grad]);
            )*
        }

        /// All operations of this list.
        pub(super) static OPERATIONS: &[&PointwiseOp] = &[$(&records::$name),*];

        impl Tensor {
            $(
                $(#[$doc])*
                $(#[doc = concat!("\n\n# Errors\nIt ", $rule, "; others are errors.")])?
                #[track_caller]
                pub fn $name(&self $(, $attr: impl Into<Scalar>)*) -> Result<Tensor> {
                    $(let $attr = $attr.into();)*
                    unary!(@check $name, [$($holds, $rule)?], $($attr),*);
                    run_pointwise(&records::$name, &[Operand::Tensor(self)], &[$((stringify!($attr), $attr)),*])
                }
                unary!(@inplace $($inplace)?, $name, [$($holds, $rule)?], $($attr),*);
            )*
        }
    };
    (@inplace , $name:ident, [$($check:tt)*], $($attr:ident),*) => {};
    (@inplace $inplace:ident, $name:ident, [$($check:tt)*], $($attr:ident),*) => {
        /// Applies the operation in place.
        ///
        /// # Errors
        /// The result is a float and the tensor is not, or a leaf that requires a gradient is changed.
        #[track_caller]
        pub fn $inplace(&self $(, $attr: impl Into<Scalar>)*) -> Result<()> {
            $(let $attr = $attr.into();)*
            unary!(@check $inplace, [$($check)*], $($attr),*);
            run_pointwise_inplace(stringify!($inplace), &records::$name, self, &[], &[$((stringify!($attr), $attr)),*])
        }
    };
    (@check $name:ident, [], $($attr:ident),*) => {};
    (@check $name:ident, [$holds:expr, $rule:literal], $($attr:ident),*) => {{
        $(let $attr = $attr.to_f64();)*
        if $holds {} else { fail!(argument(stringify!($name)), "{}", $rule) }
    }};
}

pub(crate) use unary;

unary! {
    /// |a|.
    #[doc(alias = "absolute")]
    abs / abs_(): Number, "abs(a)", [], Expr("g * (select(T(0), T(1), a > T(0)) - select(T(0), T(1), a < T(0)))", &[A]);
    /// -a.
    #[doc(alias = "negative")]
    neg / neg_(): Number, "-a" | "T(0) - a", [], Expr("-g", &[]);
    /// -1, 0 or 1.
    sign / sign_(): Any, "select(T(0), T(1), a > T(0)) - select(T(0), T(1), a < T(0))", [], Zero;
    /// a². Bools give i64.
    square / square_(): NumberBoolToI64, "a * a", [], Expr("g * 2.0 * a", &[A]);
    /// 1/a.
    reciprocal / reciprocal_(): Float, "1.0 / a", [], Expr("-g * y * y", &[Y]);
    /// √a.
    sqrt / sqrt_(): Float, "sqrt(a)", [], Expr("g * 0.5 / y", &[Y]);
    /// 1/√a.
    rsqrt / rsqrt_(): Float, "m_rsqrt(a)" | "1.0 / sqrt(a)", ["base"], Expr("-0.5 * g * y * y * y", &[Y]);
    /// eᵃ.
    exp / exp_(): Float, "m_exp(a)", ["base", "exp"], Expr("g * y", &[Y]);
    /// 2ᵃ.
    exp2(): Float, "m_exp2(a)", ["base", "exp"], Expr("g * y * 0.6931471805599453", &[Y]);
    /// eᵃ - 1, accurate near 0.
    expm1 / expm1_(): Float, "m_expm1(a)", ["base", "exp"], Expr("g * (y + 1.0)", &[Y]);
    /// Natural logarithm.
    log / log_(): Float, "m_log(a)", ["base", "log"], Expr("g / a", &[A]);
    /// Logarithm to base 2.
    log2 / log2_(): Float, "m_log2(a)", ["base", "log"], Expr("g / (a * 0.6931471805599453)", &[A]);
    /// Logarithm to base 10.
    log10 / log10_(): Float, "m_log10(a)", ["base", "log"], Expr("g / (a * 2.302585092994046)", &[A]);
    /// log(1 + a), accurate near 0.
    log1p / log1p_(): Float, "m_log1p(a)", ["base", "log"], Expr("g / (a + 1.0)", &[A]);
    /// Sine of radians.
    sin / sin_(): Float, "m_sin(a)", ["base", "mul_wide", "trig"], Expr("g * m_cos(a)", &[A]);
    /// Cosine of radians.
    cos / cos_(): Float, "m_cos(a)", ["base", "mul_wide", "trig"], Expr("-g * m_sin(a)", &[A]);
    /// Tangent of radians.
    tan / tan_(): Float, "m_tan(a)", ["base", "mul_wide", "trig"], Expr("g * (1.0 + y * y)", &[Y]);
    /// Arc sine, in radians.
    #[doc(alias = "arcsin")]
    asin / asin_(): Float, "m_asin(a)", ["base", "inverse_trig"], Expr("g * m_rsqrt(1.0 - a * a)", &[A]);
    /// Arc cosine, in radians.
    #[doc(alias = "arccos")]
    acos / acos_(): Float, "m_acos(a)", ["base", "inverse_trig"], Expr("-g * m_rsqrt(1.0 - a * a)", &[A]);
    /// Arc tangent, in radians.
    #[doc(alias = "arctan")]
    atan / atan_(): Float, "m_atan(a)", ["base", "inverse_trig"], Expr("g / (1.0 + a * a)", &[A]);
    /// Hyperbolic sine.
    sinh / sinh_(): Float, "m_sinh(a)", ["base", "exp"], Expr("g * m_cosh(a)", &[A]);
    /// Hyperbolic cosine.
    cosh / cosh_(): Float, "m_cosh(a)", ["base", "exp"], Expr("g * m_sinh(a)", &[A]);
    /// Hyperbolic tangent.
    tanh / tanh_(): Float, "m_tanh(a)", ["base", "exp"], Expr("g * (1.0 - y * y)", &[Y]);
    /// Inverse hyperbolic sine.
    #[doc(alias = "arcsinh")]
    asinh / asinh_(): Float, "m_asinh(a)", ["base", "log", "inverse_hyperbolic"], Expr("g * m_rsqrt(a * a + 1.0)", &[A]);
    /// Inverse hyperbolic cosine.
    #[doc(alias = "arccosh")]
    acosh / acosh_(): Float, "m_acosh(a)", ["base", "log", "inverse_hyperbolic"], Expr("g * m_rsqrt(a * a - 1.0)", &[A]);
    /// Inverse hyperbolic tangent.
    #[doc(alias = "arctanh")]
    atanh / atanh_(): Float, "m_atanh(a)", ["base", "log", "inverse_hyperbolic"], Expr("g / (1.0 - a * a)", &[A]);
    /// Logarithm of |Γ(a)|.
    #[doc(alias = "gammaln")]
    lgamma / lgamma_(): Float, "m_lgamma(a)", ["base", "log", "mul_wide", "trig", "gamma"], Expr("g * m_digamma(a)", &[A]);
    /// Derivative of lgamma.
    #[doc(alias = "psi")]
    digamma / digamma_(): Float, "m_digamma(a)", ["base", "exp", "log", "pow", "mul_wide", "trig", "gamma", "polygamma"],
        Expr("g * m_polygamma(a, 1.0, 1.0)", &[A]);
    /// Error function.
    erf / erf_(): Float, "m_erf(a)", ["base", "exp", "log", "erf"], Expr("g * 1.1283791670955126 * m_exp(-a * a)", &[A]);
    /// 1 - erf(a), accurate for large a.
    erfc / erfc_(): Float, "m_erfc(a)", ["base", "exp", "log", "erf"], Expr("-g * 1.1283791670955126 * m_exp(-a * a)", &[A]);
    /// Inverse of the error function.
    erfinv / erfinv_(): Float, "m_erfinv(a)", ["base", "exp", "log", "erf"], Expr("g * 0.886226925452758 * m_exp(y * y)", &[Y]);
    /// 1 / (1 + e⁻ᵃ).
    #[doc(alias = "expit")]
    sigmoid / sigmoid_(): Float, "m_sigmoid(a)", ["base", "exp"], Expr("g * y * (1.0 - y)", &[Y]);
    /// sin(πa) / πa, and 1 at 0.
    sinc / sinc_(): Float, "select(m_sin(a * 3.141592653589793) / (a * 3.141592653589793), 1.0, a == 0.0)", ["base", "mul_wide", "trig"],
        Expr("select(g * ((a * 3.141592653589793 * m_cos(a * 3.141592653589793) - m_sin(a * 3.141592653589793)) \
            / (a * a * 3.141592653589793)), 0.0, a * a == 0.0)", &[A]);
    /// sin(a) / a, 1 at 0, and 0 at infinities (PyTorch's `special.spherical_bessel_j0`). Near 0 the gradient is a
    /// series.
    spherical_bessel_j0(): Float, "select(select(m_sin(a) / a, 1.0, a == 0.0), 0.0, m_isinf(a))", ["base", "mul_wide", "trig"],
        Expr("g * select(select((a * m_cos(a) - m_sin(a)) / (a * a), \
            a * -0.3333333333333333 * (1.0 - a * a / 10.0 * (1.0 - a * a / 28.0 * (1.0 - a * a / 54.0 * (1.0 - a * a / 88.0)))), \
            abs(a) < 0.25), 0.0, m_isinf(a))", &[A]);
    /// Normal distribution function Φ(a) (PyTorch's `special.ndtr`).
    ndtr(): Float, "0.5 * m_erfc(a * -0.7071067811865476)", ["base", "exp", "log", "erf"],
        Expr("g * 0.3989422804014327 * m_exp(a * a * -0.5)", &[A]);
    /// ln Φ(a), accurate far below 0 (PyTorch's `special.log_ndtr`).
    log_ndtr(): Float, "m_log_ndtr(a)", ["base", "exp", "log", "erf", "normal_tails"],
        Expr("g * 0.7978845608028654 / m_erfcx(a * -0.7071067811865476)", &[A]);
    /// Quantile of the normal distribution, the inverse of [`ndtr`](Self::ndtr) (PyTorch's `special.ndtri`).
    ndtri(): Float, "m_ndtri(a)", ["base", "exp", "log", "erf", "normal_tails"],
        Expr("g * 2.5066282746310002 * m_exp(y * y * 0.5)", &[Y]);
    /// e^(a²) · [`erfc`](Self::erfc)(a), without underflow for large a (PyTorch's `special.erfcx`).
    erfcx(): Float, "m_erfcx(a)", ["base", "exp", "log", "erf", "normal_tails"], Expr("g * (2.0 * a * m_erfcx(a) - 1.1283791670955126)", &[A]);
    /// Modified Bessel function of the first kind of order 0.
    #[doc(alias = "modified_bessel_i0")]
    i0 / i0_(): Float, "m_i0(a)", ["base", "exp", "bessel"], Expr("g * m_i1(a)", &[A]);
    /// [`i0`](Self::i0)(a) · e^-|a| (PyTorch's `special.i0e`).
    i0e(): Float, "m_i0e(a)", ["base", "exp", "bessel"],
        Expr("g * (m_i1e(a) - (select(T(0), T(1), a > T(0)) - select(T(0), T(1), a < T(0))) * m_i0e(a))", &[A]);
    /// Modified Bessel function of the first kind of order 1 (PyTorch's `special.i1`).
    #[doc(alias = "modified_bessel_i1")]
    i1(): Float, "m_i1(a)", ["base", "exp", "bessel"], Expr("select(g * (m_i0(a) - m_i1(a) / a), g * 0.5, a == 0.0)", &[A]);
    /// [`i1`](Self::i1)(a) · e^-|a| (PyTorch's `special.i1e`).
    i1e(): Float, "m_i1e(a)", ["base", "exp", "bessel"],
        Expr("select(g * (m_i0e(a) - m_i1e(a) * (select(T(-1), T(1), a > T(0)) + 1.0 / a)), g * 0.5, a == 0.0)", &[A]);
    /// -a · log(a), with 0 at 0 and -∞ below (PyTorch's `special.entr`).
    entr(): Float, "select(select(-a * m_log(a), 0.0, a == 0.0), -m_inf(), a < 0.0)", ["base", "log"],
        Expr("-g * (m_log(a) + 1.0)", &[A]);
    /// Largest integer not above a.
    floor / floor_(): Number, "floor(a)" | "a", [], Zero;
    /// Smallest integer not below a.
    ceil / ceil_(): Number, "ceil(a)" | "a", [], Zero;
    /// Nearest integer, with halves rounded to even.
    round / round_(): Number, "round(a)" | "round_even(a)", ["base"], Zero;
    /// Integer part.
    #[doc(alias = "fix")]
    trunc / trunc_(): Number, "trunc(a)" | "a", [], Zero;
    /// Fractional part, with the sign of a.
    frac / frac_(): Float, "a - trunc(a)", [], Expr("g", &[]);
    /// Degrees from radians.
    rad2deg(): Float, "a * 57.29577951308232", [], Expr("g * 57.29577951308232", &[]);
    /// Radians from degrees.
    deg2rad(): Float, "a * 0.017453292519943295", [], Expr("g * 0.017453292519943295", &[]);
    /// True where a is NaN.
    isnan(): Predicate, "m_isnan(a)" | "m_isnan(f32(a))", ["base"], NoGrad;
    /// True where a is an infinity.
    isinf(): Predicate, "m_isinf(a)" | "abs(a) > 1.7976931348623157e308", ["base"], NoGrad;
    /// True where a is neither NaN nor an infinity.
    isfinite(): Predicate, "m_isfinite(a)" | "abs(a) <= 1.7976931348623157e308", ["base"], NoGrad;
    /// True where a is ∞.
    isposinf(): Predicate, "m_isinf(a) && a > 0.0" | "a > 1.7976931348623157e308", ["base"], NoGrad;
    /// True where a is -∞.
    isneginf(): Predicate, "m_isinf(a) && a < 0.0" | "a < -1.7976931348623157e308", ["base"], NoGrad;
    /// True where the sign bit is set, as in -0.
    signbit(): Predicate, "m_signbit(a)" | "m_signbit(f32(a))", ["base"], NoGrad;
    /// True where a is zero or false.
    logical_not(): Logic, "!a", [], NoGrad;
}

pointwise_ops! {
    /// Polygamma function, where `factor` is (-1)ⁿ⁺¹ n!.
    POLYGAMMA "polygamma": Float, "m_polygamma(a, n, factor)", ["base", "exp", "pow", "polygamma"], [
        Expr("g * m_polygamma(a, n + 1.0, factor * -(n + 1.0))", &[A])];
    NAN_TO_NUM "nan_to_num_with": Float, "select(select(select(a, neginf, m_isinf(a)), posinf, m_isinf(a) && a > 0.0), nan, m_isnan(a))", ["base"], [
        Expr("select(0.0, g, m_isfinite(a))", &[A])];
    /// Rounding to decimals. At least one of `up` and `down` is 1.
    ROUND_DECIMALS "round_decimals": Float, "round(a * up / down) / up * down"
        | "round_even(a * up / down) / up * down", ["base"], [
        Zero];
    LOGIT "logit": Float, "m_log(a / (1.0 - a))", ["base", "log"], [
        Expr("select(m_nan(), g / (a * (1.0 - a)), a >= 0.0 && a <= 1.0)", &[A])];
    BITWISE_NOT "bitwise_not": Bits, "~a", [], [NoGrad];
}

/// Options of [`Tensor::nan_to_num_with`].
#[derive(Clone, Copy, Debug, Default)]
pub struct NanToNumOptions {
    /// Replacement of NaN; 0.
    pub nan: f64,
    /// Replacement of infinity; `None` for the largest finite value of the dtype.
    pub posinf: Option<f64>,
    /// Replacement of negative infinity; `None` for the smallest finite value of the dtype.
    pub neginf: Option<f64>,
}

impl Tensor {
    /// Computes the derivative of order `n` of [`digamma`](Self::digamma): (-1)ⁿ⁺¹ n! ζ(n + 1, a), with
    /// Hurwitz's ζ. Order 0 is digamma itself. Infinite at 0 and the negative integers.
    ///
    /// # Errors
    /// `n` is above 170, where n! overflows, or the dtype is not supported.
    #[track_caller]
    pub fn polygamma(&self, n: usize) -> Result<Tensor> {
        if n == 0 {
            return self.digamma();
        }
        fail_if!(n > 170; argument("polygamma"), "order {n}; that of more than 170 is not a value of f64");
        let factorial: f64 = (1..=n).map(|k| k as f64).product();
        let factor = if n.is_multiple_of(2) { -factorial } else { factorial };
        let attrs = [("n", Scalar::Float(n as f64)), ("factor", Scalar::Float(factor))];
        run_pointwise(&POLYGAMMA, &[Operand::Tensor(self)], &attrs)
    }

    /// Replaces NaN by 0 and infinities by the largest finite values. Copies tensors that are not floats.
    #[track_caller]
    pub fn nan_to_num(&self) -> Result<Tensor> {
        self.nan_to_num_with(&NanToNumOptions::default())
    }

    /// Replaces NaN and infinities by the values of `options`. Copies tensors that are not floats.
    #[doc(alias = "nan_to_num")]
    #[track_caller]
    pub fn nan_to_num_with(&self, options: &NanToNumOptions) -> Result<Tensor> {
        if !self.dtype().is_float() {
            return self.copy();
        }
        let max_finite = match self.dtype() {
            DType::F64 => f64::MAX,
            DType::F16 => 65504.0,
            DType::BF16 => f64::from(half::bf16::MAX),
            _ => f64::from(f32::MAX),
        };
        let (posinf, neginf) = (options.posinf.unwrap_or(max_finite), options.neginf.unwrap_or(-max_finite));
        let attrs = [("nan", options.nan), ("posinf", posinf), ("neginf", neginf)];
        run_pointwise(&NAN_TO_NUM, &[Operand::Tensor(self)], &attrs.map(|(name, v)| (name, Scalar::Float(v))))
    }

    /// Rounds to `decimals` digits after the point, or before the point if negative, with halves to even. As
    /// in PyTorch's `round`, computes a · 10ᵈ, rounds, and divides by 10ᵈ; 16-bit types compute in f32.
    ///
    /// # Errors
    /// The dtype is an integer and `decimals` is not 0.
    #[track_caller]
    pub fn round_decimals(&self, decimals: i32) -> Result<Tensor> {
        if decimals == 0 {
            return self.round();
        }
        fail_if!(!self.dtype().is_float();
            dtype("round_decimals", self.dtype()), "takes floats; cast with `to_dtype`");
        let power = |of: i32| Scalar::Float(10f64.powi(of.max(0)));
        let attrs = [("up", power(decimals)), ("down", power(decimals.saturating_neg()))];
        run_pointwise(&ROUND_DECIMALS, &[Operand::Tensor(self)], &attrs)
    }

    /// Computes log(a / (1 - a)), the inverse of [`sigmoid`](Self::sigmoid). `eps` clamps a to eps..1 - eps. The
    /// gradient is zero outside of this range, not at its ends.
    #[track_caller]
    pub fn logit(&self, eps: Option<f64>) -> Result<Tensor> {
        let Some(eps) = eps else { return run_pointwise(&LOGIT, &[Operand::Tensor(self)], &[]) };
        operation!(OP = "logit");
        let x = if self.dtype().is_float() { self.clone() } else { self.to_dtype(DType::F32)? };
        let (low, high) = (eps, 1.0 - eps);
        let constant = x.detach();
        // If the bounds cross, smaller values rise to the lower bound and others take the upper, as in
        // PyTorch.
        let clamped = match low <= high {
            true => constant.clamp(low, high)?,
            false => constant.mul(0.0)?.add(high)?.masked_fill(&constant.lt(low)?, low)?,
        };
        let out = clamped.logit(None)?;
        let saved = SavedTensor::input(&x);
        Ok(autograd::differentiable_unary(OP, out, &x, move |g, ctx| {
            let dtype = g.dtype();
            let (g, x) = (amp::half_to_f32(g)?, amp::half_to_f32(&saved.unpack(ctx)?)?);
            let constant = x.detach();
            let is_clamped = constant.lt(low)?.logical_or(&constant.gt(high)?)?;
            // NaN is not clamped, so its gradient is NaN.
            g.div(&x.mul(&x.rsub(1.0)?)?)?.masked_fill(&is_clamped, 0.0)?.to_dtype(dtype)
        }))
    }

    /// Computes ln of the multivariate gamma function of dimension `p`: p (p - 1) / 4 · ln π plus the sum of
    /// [`lgamma`](Self::lgamma)(a - k / 2) over k = 0..p. PyTorch's `mvlgamma` and `special.multigammaln`.
    ///
    /// # Errors
    /// `p` is 0 or above 10,000, or the dtype is not supported.
    #[doc(alias = "multigammaln")]
    #[track_caller]
    pub fn mvlgamma(&self, p: usize) -> Result<Tensor> {
        const OP: &str = "mvlgamma";
        fail_if!(p == 0; argument(OP), "takes a dimension of at least 1, got 0");
        // Each dimension launches a separate operation.
        fail_if!(p > 10_000; argument(OP), "takes a dimension of at most 10,000, got {p}");
        let _op = crate::memory::scope::enter_op(OP);
        let mut sum = self.lgamma()?;
        for k in 1..p {
            sum = sum.add(&self.sub(k as f64 / 2.0)?.lgamma()?)?;
        }
        sum.add((p * (p - 1)) as f64 / 4.0 * std::f64::consts::PI.ln())
    }

    /// Flips every bit; negates bools.
    ///
    /// # Errors
    /// The dtype is a float.
    #[track_caller]
    pub fn bitwise_not(&self) -> Result<Tensor> {
        match self.dtype() {
            DType::Bool => self.logical_not(),
            _ => run_pointwise(&BITWISE_NOT, &[Operand::Tensor(self)], &[]),
        }
    }
}

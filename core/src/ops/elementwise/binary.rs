//! Elementwise operations of two and three operands, with broadcasting. All operands but the first may be
//! scalars.

use crate::ops::elementwise::prelude::*;
use crate::ops::prelude::*;
use crate::scalar::ScalarConversion;

impl Tensor {
    /// Adds a gradient to this one in place. The sum equals that of `add_`, but the addition may join the pending
    /// kernel that computes this gradient.
    #[track_caller]
    pub(crate) fn accumulate_grad_(&self, more: &Tensor) -> Result<()> {
        run_pointwise_inplace_grad(&add, self, &[more.into()])
    }
}

/// Declares operations. An entry has documentation, name, type rule, expression (and one for integers and
/// f64), math files and gradients.
macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident $(/ $inplace:ident)?: $types:ident, $expr:literal $(| $plain:literal)?,
        $math:tt, $grads:tt;)*) => {
        $(
            #[allow(non_upper_case_globals, reason = "one record an operation, under its name")]
            static $name: PointwiseOp =
                pointwise_op!(stringify!($name), $types, $expr, [$($plain)?], $math, $grads);
        )*

        /// All operations of this list.
        pub(super) static OPERATIONS: &[&PointwiseOp] = &[$(&$name),*];

        impl Tensor {
            $(
                $(#[$doc])*
                #[track_caller]
                pub fn $name<'a>(&self, other: impl IntoOperand<'a>) -> Result<Tensor> {
                    run_pointwise(&$name, &[Operand::Tensor(self), other.into()], &[])
                }
                $(
                    /// Applies the operation in place.
                    ///
                    /// # Errors
                    /// `other` does not broadcast to this shape. The tensor is a leaf that requires a
                    /// gradient and recording is on. The operation does not support a dtype.
                    #[track_caller]
                    pub fn $inplace<'a>(&self, other: impl IntoOperand<'a>) -> Result<()> {
                        run_pointwise_inplace(stringify!($inplace), &$name, self, &[other.into()], &[])
                    }
                )?
            )*
        }
    };
}

binary! {
    /// a + b.
    add / add_: Any, "a + b", [], [Expr("g", &[]), Expr("g", &[])];
    /// a - b.
    #[doc(alias = "subtract")]
    sub / sub_: Number, "a - b", [], [Expr("g", &[]), Expr("-g", &[])];
    /// b - a.
    rsub: Number, "b - a", [], [Expr("-g", &[]), Expr("g", &[])];
    /// a · b.
    #[doc(alias = "multiply")]
    mul / mul_: Any, "a * b", [], [Expr("g * b", &[B]), Expr("g * a", &[A])];
    /// a / b in floating point.
    #[doc(alias = "divide")]
    #[doc(alias = "true_divide")]
    div / div_: Float, "a / b", [], [Expr("g / b", &[B]), Expr("-g * (a / b) / b", &[A, B])];
    /// a to the power of b. For integers, the result wraps around in their type.
    #[doc(alias = "float_power")]
    pow / pow_: Number, "m_pow(a, b)" | "power(a, b)", ["base", "exp", "log", "pow"], [
        Expr("select(g * (b * m_pow(a, b - 1.0)), 0.0, b == 0.0)", &[A, B]),
        Expr("select(g * (m_pow(a, b) * m_log(a)), 0.0, a == 0.0 && b >= 0.0)", &[A, B])];
    /// Larger operand, or NaN if either is NaN. Equal operands share the gradient; for NaN each has all of
    /// it.
    maximum: Any, "m_max(a, b)" | "select(select(max(a, b), b, m_isnan(f32(b))), a, m_isnan(f32(a)))", ["base"], [
        Expr("select(select(g, T(0), a < b), g * 0.5, a == b)", &[A, B]),
        Expr("select(select(g, T(0), b < a), g * 0.5, a == b)", &[A, B])];
    /// Smaller operand, or NaN if either is NaN. Equal operands share the gradient; for NaN each has all of
    /// it.
    minimum: Any, "m_min(a, b)" | "select(select(min(a, b), b, m_isnan(f32(b))), a, m_isnan(f32(a)))", ["base"], [
        Expr("select(select(g, T(0), a > b), g * 0.5, a == b)", &[A, B]),
        Expr("select(select(g, T(0), b > a), g * 0.5, a == b)", &[A, B])];
    /// Larger operand, or the other if one is NaN. Equal operands share the gradient.
    fmax: Any, "select(select(m_max(a, b), a, m_isnan(b)), b, m_isnan(a))"
        | "select(select(max(a, b), a, m_isnan(f32(b))), b, m_isnan(f32(a)))", ["base"], [

        Expr("select(select(T(0), g, a > b || m_isnan(b)), g * 0.5, a == b)", &[A, B]),
        Expr("select(select(g, T(0), a > b || m_isnan(b)), g * 0.5, a == b)", &[A, B])];
    /// Smaller operand, or the other if one is NaN. Equal operands share the gradient.
    fmin: Any, "select(select(m_min(a, b), a, m_isnan(b)), b, m_isnan(a))"
        | "select(select(min(a, b), a, m_isnan(f32(b))), b, m_isnan(f32(a)))", ["base"], [

        Expr("select(select(T(0), g, a < b || m_isnan(b)), g * 0.5, a == b)", &[A, B]),
        Expr("select(select(g, T(0), a < b || m_isnan(b)), g * 0.5, a == b)", &[A, B])];
    /// log(eᵃ + eᵇ) without overflow.
    logaddexp: Float, "select(max(a, b) + m_log1p(m_exp(-abs(a - b))), a, a == b && !m_isfinite(a))", ["base", "exp", "log"], [
        Expr("g * m_sigmoid(a - b)", &[A, B]), Expr("g * m_sigmoid(b - a)", &[A, B])];
    /// log2(2ᵃ + 2ᵇ) without overflow.
    logaddexp2: Float, "select(max(a, b) + m_log1p(m_exp2(-abs(a - b))) * 1.4426950408889634, a, a == b && !m_isfinite(a))",
        ["base", "exp", "log"], [
        Expr("g * m_sigmoid((a - b) * 0.6931471805599453)", &[A, B]), Expr("g * m_sigmoid((b - a) * 0.6931471805599453)", &[A, B])];
    /// 0 for a < 0, 1 for a > 0, and b where a is 0.
    heaviside: Any, "select(select(T(0), T(1), a > T(0)), b, a == T(0))", [], [NoGrad, NoGrad];
    /// Angle of the point (b, a) in radians. At the origin the gradient is zero, as in PyTorch.
    #[doc(alias = "arctan2")]
    atan2 / atan2_: Float, "m_atan2(a, b)", ["base", "inverse_trig"], [
        // Division by the hypotenuse twice, because its square may overflow or underflow f32.
        Expr("select(g * (b / m_hypot(a, b) / m_hypot(a, b)), 0.0, a == 0.0 && b == 0.0)", &[A, B]),
        Expr("select(-g * (a / m_hypot(a, b) / m_hypot(a, b)), 0.0, a == 0.0 && b == 0.0)", &[A, B])];
    /// √(a² + b²).
    hypot / hypot_: Float, "m_hypot(a, b)", ["base"], [Expr("g * a / m_hypot(a, b)", &[A, B]), Expr("g * b / m_hypot(a, b)", &[A, B])];
    /// Remainder of a / b rounded towards zero, as C's fmod.
    fmod / fmod_: Number, "m_fmod(a, b)" | "a % b", ["base", "mod"], [
        Expr("g", &[]), Expr("-g * trunc(a / b)", &[A, B])];
    /// Remainder of a / b rounded down, with the sign of b.
    remainder / remainder_: Number, "m_remainder(a, b)" | "int_remainder(a, b)", ["base", "mod"], [
        Expr("g", &[]), Expr("-g * floor(a / b)", &[A, B])];
    /// a / b rounded down.
    #[doc(alias = "divide")]
    floor_divide / floor_divide_: Number, "m_floor_div(a, b)" | "int_floor_div(a, b)", ["base", "mod"], [Zero, Zero];
    /// a / b rounded towards zero.
    #[doc(alias = "divide")]
    trunc_divide: Number, "m_trunc_div(a, b)" | "a / b", ["base", "mod"], [Zero, Zero];
    /// |a| with the sign of b.
    copysign / copysign_: Float, "m_copysign(a, b)", ["base"], [
        Expr("select(g * (y / a), 0.0, a == 0.0)", &[A, Y]), Zero];
    /// a · log(b), and 0 where a is 0.
    xlogy / xlogy_: Float, "m_xlogy(a, b)", ["base", "log"], [
        Expr("select(g * m_log(b), 0.0, a == 0.0 && b <= 0.0)", &[A, B]), Expr("g * a / b", &[A, B])];
    /// a · log(1 + b), and 0 where a is 0.
    xlog1py: Float, "select(select(a * m_log1p(b), 0.0, a == 0.0), b, m_isnan(b))", ["base", "log"], [
        Expr("select(g * m_log1p(b), 0.0, a == 0.0 && b <= -1.0)", &[A, B]), Expr("g * a / (b + 1.0)", &[A, B])];
    /// Hurwitz zeta function: the sum of (b + k)⁻ᵃ over k = 0, 1, … (PyTorch's `special.zeta`). Infinite for
    /// a = 1 and NaN below. As in PyTorch, `a` has no gradient.
    zeta: Float, "m_zeta(a, b)", ["base", "exp", "pow", "polygamma"], [NoGrad, Expr("-g * a * m_zeta(a + 1.0, b)", &[A, B])];
    /// a · 2ᵇ.
    ldexp / ldexp_: Float, "a * m_exp2(b)", ["base", "exp"], [
        Expr("g * m_exp2(b)", &[B]), Expr("g * (a * m_exp2(b)) * 0.6931471805599453", &[A, B])];
    /// Greatest common divisor, which is never negative; 0 for two zeros.
    gcd / gcd_: Integer, "gcd(a, b)", [], [NoGrad, NoGrad];
    /// Least common multiple, which is never negative; 0 if either operand is 0.
    lcm / lcm_: Integer, "lcm(a, b)", [], [NoGrad, NoGrad];
    /// a · 2ᵇ with wrap-around (PyTorch's `<<`), or 0 if b is negative or at least the number of bits.
    bitwise_left_shift / bitwise_left_shift_: Integer, "shifted_left(a, b)", [], [NoGrad, NoGrad];
    /// a / 2ᵇ rounded down (PyTorch's `>>`), or -1 or 0 if b is negative or at least the number of bits.
    bitwise_right_shift / bitwise_right_shift_: Integer, "shifted_right(a, b)", [], [NoGrad, NoGrad];
    /// a = b.
    eq: Compare, "a == b", [], [NoGrad, NoGrad];
    /// a ≠ b.
    #[doc(alias = "not_equal")]
    ne: Compare, "!(a == b)", [], [NoGrad, NoGrad];
    /// a < b.
    #[doc(alias = "less")]
    lt: Compare, "a < b", [], [NoGrad, NoGrad];
    /// a ≤ b.
    #[doc(alias = "less_equal")]
    le: Compare, "a <= b", [], [NoGrad, NoGrad];
    /// a > b.
    #[doc(alias = "greater")]
    gt: Compare, "a > b", [], [NoGrad, NoGrad];
    /// a ≥ b.
    #[doc(alias = "greater_equal")]
    ge: Compare, "a >= b", [], [NoGrad, NoGrad];
    /// True where both operands are true (not zero).
    logical_and: Logic, "a && b", [], [NoGrad, NoGrad];
    /// True where at least one operand is true.
    logical_or: Logic, "a || b", [], [NoGrad, NoGrad];
    /// True where exactly one operand is true.
    logical_xor: Logic, "a != b", [], [NoGrad, NoGrad];
    /// Bitwise and.
    bitwise_and / bitwise_and_: Bits, "a & b", [], [NoGrad, NoGrad];
    /// Bitwise or.
    bitwise_or / bitwise_or_: Bits, "a | b", [], [NoGrad, NoGrad];
    /// Bitwise exclusive or.
    bitwise_xor / bitwise_xor_: Bits, "a ^ b", [], [NoGrad, NoGrad];
}

pointwise_ops! {
    WHERE "where": Any, "select(c, b, a != T(0))", [], [
        NoGrad, Expr("select(T(0), g, a != T(0))", &[A]), Expr("select(g, T(0), a != T(0))", &[A])];
    // In place, the tensor is the first operand.
    MASKED_FILL_ "masked_fill_": Any, "select(a, c, b != T(0))", [], [
        Expr("select(g, T(0), b != T(0))", &[B]), NoGrad, Expr("select(T(0), g, b != T(0))", &[B])];
    MASKED_ADD_ "masked_add_": Any, "select(a, a + c, b != T(0))", [], [NoGrad, NoGrad, NoGrad];
    FILL_ "fill_": Any, "b", [], [Zero, Expr("g", &[])];
    // Equal operands share the gradient.
    CLAMP "clamp": Number, "m_min(m_max(a, b), c)"
        | "select(select(select(min(max(a, b), c), c, m_isnan(f32(c))), b, m_isnan(f32(b))), a, m_isnan(f32(a)))", ["base"], [
        Expr("select(select(g, g * 0.5, (a == b || a == c) && b < c), T(0), a < b || a > c)", &[A, B, C]),
        Expr("select(select(T(0), g * 0.5, a == b && b < c), g, a < b && b <= c)", &[A, B, C]),
        Expr("select(select(T(0), g * 0.5, a == c && b < c), g, b > c || (a > c && b <= c))", &[A, B, C])];
}

/// Clamp by scalars. The gradient is zero at a bound, unless the bound is infinite and so clamps nothing.
static CLAMP_SCALARS: PointwiseOp = PointwiseOp {
    grads: &[
        Expr(
            "select(select(T(0), g, a >= b && a <= c), T(0), (a == b && m_isfinite(b)) || (a == c && m_isfinite(c)))",
            &[A, B, C],
        ),
        NoGrad,
        NoGrad,
    ],
    ..CLAMP
};

fn select_clamp_op(min: &Operand<'_>, max: &Operand<'_>) -> &'static PointwiseOp {
    if matches!((min, max), (Operand::Scalar(_), Operand::Scalar(_))) { &CLAMP_SCALARS } else { &CLAMP }
}

/// Declares operations of three operands as [`binary`] does. An entry also has the names of the arguments.
macro_rules! ternary {
    ($($(#[$doc:meta])* $name:ident / $inplace:ident($b:ident, $c:ident $(, $value:ident)?): $types:ident,
        $expr:literal $(| $plain:literal)?, $math:tt, $grads:tt;)*) => {
        $(
            #[allow(non_upper_case_globals, reason = "one record an operation, under its name")]
            static $name: PointwiseOp = pointwise_op!(stringify!($name), $types, $expr, [$($plain)?], $math, $grads);
        )*

        impl Tensor {
            $(
                $(#[$doc])*
                #[track_caller]
                pub fn $name<'a>(
                    &self,
                    $b: impl IntoOperand<'a>,
                    $c: impl IntoOperand<'a>,
                    $($value: impl Into<Scalar>,)?
                ) -> Result<Tensor> {
                    let operands = [self.into(), $b.into(), $c.into()];
                    run_pointwise(&$name, &operands, &[$((stringify!($value), $value.into()))?])
                }

                /// Applies the operation in place.
                #[track_caller]
                pub fn $inplace<'a>(
                    &self,
                    $b: impl IntoOperand<'a>,
                    $c: impl IntoOperand<'a>,
                    $($value: impl Into<Scalar>,)?
                ) -> Result<()> {
                    let operands = [$b.into(), $c.into()];
                    let attrs = [$((stringify!($value), $value.into()))?];
                    run_pointwise_inplace(stringify!($inplace), &$name, self, &operands, &attrs)
                }
            )*
        }
    };
}

// The sums are `fma`: compilers choose by an operand's layout whether they contract a product with a sum.
ternary! {
    /// `self` + value · t1 · t2. A fractional `value` is an error for integers.
    addcmul / addcmul_(t1, t2, value): Number, "fma(value * b, c, a)" | "a + value * b * c", [], [
        Expr("g", &[]), Expr("g * value * c", &[C]), Expr("g * value * b", &[B])];
    /// `self` + value · t1 / t2.
    addcdiv / addcdiv_(t1, t2, value): Float, "fma(value, b / c, a)" | "a + value * (b / c)", [], [
        Expr("g", &[]), Expr("g * value / c", &[C]), Expr("-g * value * b / (c * c)", &[B, C])];
    /// `self` + weight · (end - `self`).
    lerp / lerp_(end, weight): Float, "select(b - (b - a) * (1.0 - c), a + c * (b - a), abs(c) < 0.5)", [], [
        Expr("g * (1.0 - c)", &[C]), Expr("g * c", &[C]), Expr("g * (b - a)", &[A, B])];
}

impl Tensor {
    /// Selects `self` where `condition` is true, else `other`. All three broadcast. The associated function
    /// [`where_cond`](Self::where_cond) has the order of PyTorch's `torch.where`.
    ///
    /// # Errors
    /// `condition` is not bool, the shapes do not broadcast, or an integer is outside the integer dtype.
    #[doc(alias = "where")]
    #[track_caller]
    pub fn where_<'a>(&self, condition: &Tensor, other: impl IntoOperand<'a>) -> Result<Tensor> {
        Self::where_cond(condition, self, other)
    }

    /// Selects `a` where `condition` is true, else `b`: PyTorch's `torch.where(condition, a, b)`. All three broadcast.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::new([[1.0, -2.0], [-3.0, 4.0]], &device)?;
    /// let y = Tensor::where_cond(&x.gt(0.0)?, &x, 0.0)?;
    /// assert_eq!((y.shape(), y.dtype()), (&[2, 2][..], DType::F32));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`where_`](Self::where_).
    #[doc(alias = "where")]
    #[track_caller]
    pub fn where_cond<'a, 'b>(
        condition: &Tensor,
        a: impl IntoOperand<'a>,
        b: impl IntoOperand<'b>,
    ) -> Result<Tensor> {
        launch::check_bool_mask("where", condition)?;
        let (a, b) = (a.into(), b.into());
        // An integer takes the type of the other operand, which must hold it.
        let cast = |value, other: Operand<'_>| match (value, other.as_tensor()) {
            (Operand::Scalar(Scalar::Int(_)), Some(other)) if other.dtype().is_int() => {
                other.fill_operand("where", value)
            }
            _ => Ok(value),
        };
        run_pointwise(&WHERE, &[condition.into(), cast(a, b)?, cast(b, a)?], &[])
    }

    /// Selects `value` where `mask` is true, else `self`. A scalar takes the type of `self`.
    ///
    /// # Errors
    /// `mask` is not bool, the shapes do not broadcast, or the dtype cannot hold the scalar.
    #[track_caller]
    pub fn masked_fill<'a>(&self, mask: &Tensor, value: impl IntoOperand<'a>) -> Result<Tensor> {
        launch::check_bool_mask("masked_fill", mask)?;
        let value = self.fill_operand("masked_fill", value.into())?;
        run_pointwise(&WHERE, &[mask.into(), value, self.into()], &[])
    }

    /// Casts a scalar fill value to the tensor's type.
    #[track_caller]
    pub(crate) fn fill_operand<'a>(&self, op: &'static str, value: Operand<'a>) -> Result<Operand<'a>> {
        let Operand::Scalar(scalar) = value else { return Ok(value) };
        match scalar.convert_to(self.dtype()) {
            ScalarConversion::Exact(scalar) => Ok(Operand::Scalar(scalar)),
            _ if self.dtype().is_float() => scalar.checked_cast(op, self.dtype()).map(Operand::Scalar),
            _ => fail!(
                argument(op),
                "{} does not hold the value {scalar}; cast the tensor with `to_dtype`",
                self.dtype()
            ),
        }
    }

    /// Clamps `self` to `min`..`max`; `max` wins where the bounds cross. As in PyTorch (2.15), the gradient
    /// at a bound is zero for scalar bounds, and shared if a bound is a tensor.
    ///
    /// # Errors
    /// The shapes do not broadcast, or the dtype is bool.
    #[doc(alias = "clip")]
    #[track_caller]
    pub fn clamp<'a>(&self, min: impl IntoOperand<'a>, max: impl IntoOperand<'a>) -> Result<Tensor> {
        let (min, max) = (min.into(), max.into());
        run_pointwise(select_clamp_op(&min, &max), &[self.into(), min, max], &[])
    }

    /// Clamps `self` from below: [`clamp`](Self::clamp) by a scalar, [`maximum`](Self::maximum) with a
    /// tensor.
    #[track_caller]
    pub fn clamp_min<'a>(&self, min: impl IntoOperand<'a>) -> Result<Tensor> {
        match min.into() {
            min @ Operand::Scalar(_) if self.dtype().is_float() => self.clamp(min, f64::INFINITY),
            min => self.maximum(min),
        }
    }

    /// Clamps `self` from above: [`clamp`](Self::clamp) by a scalar, [`minimum`](Self::minimum) with a
    /// tensor.
    #[track_caller]
    pub fn clamp_max<'a>(&self, max: impl IntoOperand<'a>) -> Result<Tensor> {
        match max.into() {
            max @ Operand::Scalar(_) if self.dtype().is_float() => self.clamp(f64::NEG_INFINITY, max),
            max => self.minimum(max),
        }
    }

    /// Applies [`masked_fill`](Self::masked_fill) in place.
    ///
    /// # Errors
    /// `mask` is not bool. `mask` or `value` does not broadcast to this shape. The tensor is a leaf that
    /// requires a gradient and recording is on.
    #[track_caller]
    pub fn masked_fill_<'a>(&self, mask: &Tensor, value: impl IntoOperand<'a>) -> Result<()> {
        launch::check_bool_mask("masked_fill_", mask)?;
        let value = self.fill_operand("masked_fill_", value.into())?;
        let cast = self.cast_fill_tensor(value)?;
        let value = cast.as_ref().map_or(value, Operand::Tensor);
        run_pointwise_inplace("masked_fill_", &MASKED_FILL_, self, &[mask.into(), value], &[])
    }

    /// Adds `value` in place where `mask` is true. Not differentiable.
    pub(crate) fn masked_add_(&self, mask: &Tensor, value: &Tensor) -> Result<()> {
        run_pointwise_inplace("masked_add_", &MASKED_ADD_, self, &[mask.into(), value.into()], &[])
    }

    /// Casts an integer tensor that fills a bool tensor in place, as PyTorch does. `None` for other values.
    fn cast_fill_tensor(&self, value: Operand<'_>) -> Result<Option<Tensor>> {
        let integers = value.as_tensor().filter(|t| t.dtype().is_int() && self.dtype() == DType::Bool);
        integers.map(|t| t.to_dtype(DType::Bool)).transpose()
    }

    /// Replaces every element by `value`, a scalar or a zero-dimensional tensor.
    #[doc(alias = "fill_diagonal_")]
    #[track_caller]
    pub fn fill_<'a>(&self, value: impl IntoOperand<'a>) -> Result<()> {
        let value = self.fill_operand("fill_", value.into())?;
        let cast = self.cast_fill_tensor(value)?;
        run_pointwise_inplace("fill_", &FILL_, self, &[cast.as_ref().map_or(value, Operand::Tensor)], &[])
    }

    /// Replaces every element by zero.
    #[track_caller]
    pub fn zero_(&self) -> Result<()> {
        self.fill_(false).map_err(|error| error.with_op("zero_"))
    }

    /// Applies [`clamp`](Self::clamp) in place.
    #[doc(alias = "clip_")]
    #[track_caller]
    pub fn clamp_<'a>(&self, min: impl IntoOperand<'a>, max: impl IntoOperand<'a>) -> Result<()> {
        let (min, max) = (min.into(), max.into());
        run_pointwise_inplace("clamp_", select_clamp_op(&min, &max), self, &[min, max], &[])
    }
}

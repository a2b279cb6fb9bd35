//! Elementwise operations: one record describes an operation, and one function runs all of them.
//!
//! A [`PointwiseOp`] is a WGSL expression over `a`, `b`, `c`, a rule for its types, and an expression for the
//! gradient of each input. In gradients, `g` is the gradient of the result and `y` the result. Inputs
//! broadcast, may have any strides, and may be scalars.

use std::sync::{Arc, Weak};

use crate::amp::AutocastOperand;
use crate::autograd::{BackwardCtx, ChainRole, GradEdge, ResultSource};
use crate::ops::elementwise::expr_eval::{ExprEnv, ExprValue};
use crate::ops::elementwise::recompute::RecomputableResult;
use crate::ops::elementwise::{activation, binary, unary};
use crate::ops::kernel::pointwise_kernel::{self, PointwiseInput, PointwiseSpec};
use crate::ops::norm::modulation::NormModulation;
use crate::ops::norm::recorded_sum::RecordedSum;
use crate::ops::prelude::*;
use crate::ops::reduce::{sum_products_to, sum_to_dtype};
use crate::scalar::{ScalarConversion, for_scalar_types};

/// Tensor or scalar operand.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// Tensor.
    Tensor(&'a Tensor),
    /// Scalar.
    Scalar(Scalar),
}

impl<'a> Operand<'a> {
    pub(crate) fn as_tensor(&self) -> Option<&'a Tensor> {
        match *self {
            Self::Tensor(t) => Some(t),
            Self::Scalar(_) => None,
        }
    }
}

/// Arguments that are an operand: a reference to a tensor, or a number of the host.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an operand: a reference to a tensor, or a number",
    label = "not an operand",
    note = "an operation returns a `Result`; `?` gives its tensor, in brackets before an operator: `&a + (&b * 2.0)?`"
)]
pub trait IntoOperand<'a>: Into<Operand<'a>> {}

#[diagnostic::do_not_recommend]
impl<'a, T: Into<Operand<'a>>> IntoOperand<'a> for T {}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(t: &'a Tensor) -> Self {
        Self::Tensor(t)
    }
}

macro_rules! impl_operand_from {
    ($($t:ty),*) => {$(
        impl From<$t> for Operand<'_> {
            fn from(value: $t) -> Self {
                Self::Scalar(value.into())
            }
        }
    )*};
}
for_scalar_types!(impl_operand_from);
impl_operand_from!(Scalar);

impl AutocastOperand for &[Operand<'_>] {
    type Cast = SmallVec<[Option<Tensor>; 3]>;
    fn widest_float(&self) -> Option<DType> {
        self.iter().filter_map(|arg| arg.as_tensor().widest_float()).reduce(DType::promote)
    }
    fn cast_tensors(&self, cast: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self::Cast> {
        self.iter().map(|arg| arg.as_tensor().map(&cast).transpose()).collect()
    }
}

/// Rule for the input, compute and result types of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TypeRule {
    /// Floats; integers and bools become f32.
    Float,
    /// Numeric types, promoted; bools are refused.
    Number,
    /// Numeric types, promoted; bools become i64.
    NumberBoolToI64,
    /// Numeric types and bools, promoted; a bool computes as u32.
    Any,
    /// Numeric types and bools, promoted; the result is bool.
    Compare,
    /// Floats (other types become f32); the result is bool.
    Predicate,
    /// Bools; the result is bool.
    Logic,
    /// Integers and bools, promoted.
    Bits,
    /// Integers, promoted; bools are refused.
    Integer,
}

/// Variable in the expression of a gradient: an input `a`, `b` or `c`, or the result `y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradVar {
    A,
    B,
    C,
    Y,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum GradRule {
    /// Not differentiable: an input that requires a gradient is an error.
    None,
    /// Zero everywhere (floor, sign).
    Zero,
    /// Expression of `g` and the listed variables, which are saved for the backward pass.
    Expr(&'static str, &'static [GradVar]),
}

/// Elementwise operation.
#[derive(Debug)]
pub(crate) struct PointwiseOp {
    /// PyTorch's name.
    pub(crate) name: &'static str,
    /// WGSL expression of `a`, `b`, `c` and the names of its attributes.
    pub(crate) expr: &'static str,
    /// Expression for integers and f64, with `base` as its only math file. Empty if `expr` serves them or
    /// they are unsupported. NaN is tested as f32, because compilers may fold `a != a` to false.
    pub(crate) int_f64_expr: &'static str,
    pub(crate) type_rule: TypeRule,
    /// Files of shaders/wgsl/math that the expressions need, in order of inclusion.
    pub(crate) math_files: &'static [&'static str],
    /// Gradient rule for each input. If empty, no input has a gradient.
    pub(crate) grads: &'static [GradRule],
}

/// Builds a record: `"name", TypeRule, "expr", ["expression for integers and f64"], [math files], [gradients]`.
macro_rules! pointwise_op {
    ($name:expr, $types:ident, $expr:literal, [$($plain:literal)?], [$($math:literal),*], [$($grad:expr),* $(,)?]) => {
        PointwiseOp {
            name: $name,
            expr: $expr,
            int_f64_expr: concat!($($plain)?),
            type_rule: TypeRule::$types,
            math_files: &[$($math),*],
            grads: &[$($grad),*],
        }
    };
}
pub(crate) use pointwise_op;

/// Declares operations:
/// `NAME "name": TypeRule, "expr" | "expression for integers and f64", [math files], [gradients];`.
macro_rules! pointwise_ops {
    ($($(#[$attr:meta])* $id:ident $name:literal: $types:ident, $expr:literal $(| $plain:literal)?, $math:tt, $grads:tt;)*) => {$(
        $(#[$attr])*
        pub(super) static $id: PointwiseOp =
            $crate::ops::elementwise::pointwise::pointwise_op!($name, $types, $expr, [$($plain)?], $math, $grads);
    )*};
}
pub(crate) use pointwise_ops;

/// Finds an operation that is a method of [`Tensor`] by its name.
pub(crate) fn find_op(name: &str) -> Option<&'static PointwiseOp> {
    let families = [unary::OPERATIONS, activation::OPERATIONS, binary::OPERATIONS];
    families.into_iter().flatten().copied().find(|op| op.name == name)
}

const INPUT_NAMES: [&str; 3] = ["a", "b", "c"];

fn resolve_dtypes(op: &PointwiseOp, args: &[Operand<'_>]) -> Result<(DType, DType)> {
    // As in PyTorch, a zero-dimensional tensor does not widen tensors of the same category.
    let category = |d: DType| if d.is_float() { 2 } else { u8::from(d.is_int()) };
    let dtypes = |zero_dim: bool| {
        let tensors = args.iter().filter_map(Operand::as_tensor);
        tensors.filter(move |t| (t.rank() == 0) == zero_dim).map(Tensor::dtype)
    };
    let widen = |d: DType, t: DType| if category(d) >= category(t) { d } else { d.promote(t) };
    let dtype = match dtypes(false).reduce(DType::promote) {
        Some(dtype) => Some(dtypes(true).fold(dtype, widen)),
        None => dtypes(true).reduce(DType::promote),
    };
    let Some(mut dtype) = dtype else { fail!(argument(op.name), "takes at least one tensor") };
    args.iter().filter_map(Operand::as_tensor).try_for_each(|t| launch::check_computable(op.name, t))?;
    // A sum with a wrapped scalar is the true sum modulo the range. A power or a quotient is not, so refuse the scalar.
    if let (true, &[_, Operand::Scalar(number @ Scalar::Int(value)), ..]) = (dtype.is_int(), args)
        && let Some(role) = match (op.name, number.convert_to(dtype)) {
            ("pow", ScalarConversion::AboveRange) => Some("power"),
            (
                "floor_divide" | "trunc_divide" | "remainder" | "fmod",
                ScalarConversion::AboveRange | ScalarConversion::BelowRange,
            ) => Some("divisor"),
            _ => None,
        }
    {
        let rule = "cast the tensor to a wider type with `to_dtype`";
        fail!(argument(op.name), "the {role} {value} is not a value of {dtype}; {rule}");
    }
    if let (TypeRule::Number, "pow", true, Some(Operand::Scalar(Scalar::Int(..0)))) =
        (op.type_rule, op.name, dtype.is_int(), args.get(1))
    {
        fail!(argument(op.name), "integers have no negative powers; cast them to a float with `to_dtype`");
    }
    for arg in args {
        match arg {
            Operand::Scalar(Scalar::Float(_)) if !dtype.is_float() => dtype = DType::F32,
            Operand::Scalar(Scalar::Int(_)) if dtype == DType::Bool => dtype = DType::I64,
            _ => {}
        }
    }
    Ok(match op.type_rule {
        TypeRule::Float if !dtype.is_float() => (DType::F32, DType::F32),
        TypeRule::Number if dtype == DType::Bool => {
            return Err(Error::dtype(op.name, dtype, "takes integers and floats; cast with `to_dtype`"));
        }
        TypeRule::NumberBoolToI64 if dtype == DType::Bool => (DType::I64, DType::I64),
        TypeRule::Float | TypeRule::Number | TypeRule::NumberBoolToI64 | TypeRule::Any => (dtype, dtype),
        TypeRule::Compare => (dtype, DType::Bool),
        TypeRule::Predicate if !dtype.is_float() => (DType::F32, DType::Bool),
        TypeRule::Predicate => (dtype, DType::Bool),
        TypeRule::Logic => (DType::Bool, DType::Bool),
        TypeRule::Bits if dtype.is_float() => {
            return Err(Error::not_integers(op.name, dtype, "takes integers and bools"));
        }
        TypeRule::Integer if !dtype.is_int() => {
            return Err(Error::not_integers(op.name, dtype, "takes integers"));
        }
        TypeRule::Bits | TypeRule::Integer => (dtype, dtype),
    })
}

/// Files with the f64 functions, where an expression's `m_exp` is called `m_d_exp`.
const F64_MATH: &[&str] = &["base", "f64_exp_log", "f64"];
const F64_TRIG_MATH: &[&str] = &["base", "mul_wide", "f64_exp_log", "f64", "f64_trig"];
const F64_SPECIAL_MATH: &[&str] = &["base", "f64_exp_log", "f64", "f64_special"];

fn f64_math_files(expr: &str) -> &'static [&'static str] {
    match expr {
        _ if !expr.contains("m_") && !expr.contains("power(") => &[],
        _ if ["m_sin(", "m_cos(", "m_tan("].iter().any(|name| expr.contains(name)) => F64_TRIG_MATH,
        _ if ["m_i0", "m_i1", "ndtr", "m_erfcx("].iter().any(|name| expr.contains(name)) => F64_SPECIAL_MATH,
        _ => F64_MATH,
    }
}

impl PointwiseOp {
    /// Returns the expression for a compute type, and the files that the expression needs.
    fn select_expr(&self, compute: DType) -> Result<(&'static str, &'static [&'static str])> {
        match compute {
            DType::F32 | DType::F16 | DType::BF16 => Ok((self.expr, self.math_files)),
            // Operations that round define f64 in `expr`; their other expression is for integers.
            DType::F64 if self.math_files.is_empty() => Ok((self.expr, self.math_files)),
            DType::F64 if self.int_f64_expr.is_empty() => Ok((self.expr, f64_math_files(self.expr))),
            // Remainders of f64 need exact functions; `%` is exact for integers only.
            DType::F64 if self.math_files.contains(&"mod") => Ok((self.expr, f64_math_files(self.expr))),
            DType::F64 if self.int_f64_expr.contains("power(") => {
                Ok((self.int_f64_expr, f64_math_files(self.int_f64_expr)))
            }
            _ if self.int_f64_expr.contains("m_") => Ok((self.int_f64_expr, &["base"])),
            _ if !self.int_f64_expr.is_empty() => Ok((self.int_f64_expr, &[])),
            _ if self.math_files.is_empty() => Ok((self.expr, &[])),
            _ => Err(Error::dtype(self.name, compute, "takes f32, f16 and bf16; cast with `to_dtype`")),
        }
    }
}

/// Checks scalar attributes. Those of [`Tensor::threshold`] replace elements, so the type must hold them.
fn check_attrs(op: &PointwiseOp, dtype: DType, attrs: &[(&'static str, Scalar)]) -> Result<()> {
    match (op.name, attrs) {
        ("threshold", _) => attrs.iter().try_for_each(|(_, s)| s.checked_cast(op.name, dtype).map(drop)),
        ("addcmul", &[(_, Scalar::Float(value))]) if !dtype.is_float() && value.fract() != 0.0 => fail!(
            argument(op.name),
            "the value {value} is not an integer, and the tensors are integers; cast one to a float with `to_dtype`"
        ),
        _ => Ok(()),
    }
}

/// Runs an operation. `attrs` are the scalars that its expression names in addition to `a`, `b`, `c`.
#[track_caller]
pub(crate) fn run_pointwise(
    op: &'static PointwiseOp,
    args: &[Operand<'_>],
    attrs: &[(&'static str, Scalar)],
) -> Result<Tensor> {
    dispatch_autocast!(op.name, [args], |cast| {
        let args: SmallVec<[Operand<'_>; 3]> =
            args.iter().zip(&cast).map(|(arg, t)| t.as_ref().map_or(*arg, Operand::Tensor)).collect();
        run_pointwise(op, &args, attrs)
    });
    operation!(op.name);
    let (compute, result) = resolve_dtypes(op, args)?;
    check_attrs(op, compute, attrs)?;
    // An integer tensor with a scalar out of the type's range: use an equivalent comparison.
    if let (TypeRule::Compare, &[a, Operand::Scalar(number)]) = (op.type_rule, args)
        && !compute.is_float()
        && let Some((name, bound)) = number.rewrite_comparison(op.name, compute)
        && let Some(op) = find_op(name)
    {
        return run_pointwise(op, &[a, Operand::Scalar(bound)], attrs);
    }
    // Push one by one, because collecting costs a tenth of the host time of a small operation.
    let mut tensors: SmallVec<[&Tensor; 4]> = SmallVec::new();
    args.iter().filter_map(Operand::as_tensor).for_each(|t| tensors.push(t));
    for t in &tensors[1..] {
        tensors[0].check_same_device(op.name, t)?;
    }
    for (k, arg) in args.iter().enumerate() {
        // As in PyTorch, non-float inputs have no history, and no gradient is lost.
        if let Operand::Tensor(t) = arg
            && matches!(op.grads.get(k), None | Some(GradRule::None))
            && result.is_float()
        {
            autograd::check_no_grad_inputs(op.name, &[t])?;
        }
    }
    let mut shapes: SmallVec<[&[usize]; 4]> = SmallVec::new();
    tensors.iter().for_each(|t| shapes.push(t.shape()));
    let shape = broadcast_shapes(op.name, &shapes)?;
    let out_dtype = if result == DType::Bool { DType::Bool } else { compute };
    let spec = op.build_spec(args, attrs, compute, out_dtype)?;
    let out = Tensor::empty(&shape, result, tensors[0].device())?;
    pointwise_kernel::run(&spec, &out, false)?;
    Ok(attach_backward(op, args, attrs, compute, out, &tensors))
}

impl PointwiseOp {
    /// Builds the spec of the forward operation in a compute type.
    fn build_spec<'a>(
        &self,
        args: &[Operand<'a>],
        attrs: &[(&'static str, Scalar)],
        compute: DType,
        result: DType,
    ) -> Result<PointwiseSpec<'a>> {
        let (expr, math) = self.select_expr(compute)?;
        let named = args.iter().zip(INPUT_NAMES).map(|(&operand, name)| PointwiseInput { name, operand });
        let attrs = attrs.iter().map(|&(name, s)| PointwiseInput { name, operand: Operand::Scalar(s) });
        let mut inputs = SmallVec::new();
        named.chain(attrs).for_each(|input| inputs.push(input));
        Ok(PointwiseSpec {
            op: self.name,
            expr,
            math_files: math,
            type_rule: self.type_rule,
            compute,
            result,
            inputs,
            is_grad: false,
        })
    }
}

/// Value of a variable that the backward pass reads.
enum SavedOperand {
    Tensor(SavedTensor),
    Scalar(Scalar),
    /// Input of this operation, shared with the operations that recompute its result.
    Input(Arc<RecomputableResult>),
    /// Result of another operation, with its history.
    Recomputed(Arc<RecomputableResult>, Option<GradEdge>),
    /// Normalised rows of a modulation, with their history.
    Normalized(Arc<NormModulation>, Option<GradEdge>),
}

impl SavedOperand {
    fn unpack(&self, ctx: &BackwardCtx<'_>) -> Result<ExprValue> {
        Ok(match self {
            Self::Tensor(t) => ExprValue::Tensor(t.unpack(ctx)?),
            Self::Scalar(s) => ExprValue::Scalar(s.to_f64()),
            Self::Input(result) => ExprValue::Tensor(result.unpack_input(ctx)?),
            Self::Recomputed(result, edge) => ExprValue::Tensor(result.recompute(edge.as_ref(), ctx)?),
            Self::Normalized(modulation, edge) => {
                ExprValue::Tensor(modulation.normalize_again(edge.as_ref(), ctx)?)
            }
        })
    }
}

/// Returns true if a gradient that these operands require uses a variable.
fn needs_saved(op: &PointwiseOp, args: &[Operand<'_>], var: GradVar) -> bool {
    op.grads.iter().enumerate().any(|(k, grad)| {
        matches!(grad, GradRule::Expr(_, vars) if vars.contains(&var))
            && matches!(args[k], Operand::Tensor(t) if t.requires_grad())
    })
}

/// Inputs of a gradient kernel: the gradient of the result, saved values and attributes.
type PointwiseInputs<'a> = SmallVec<[PointwiseInput<'a>; 6]>;

/// Evaluates a gradient expression in one kernel. `g` is the gradient of the result. The values are summed to `shape`
/// and rounded to `dtype`, which are those of the operand. With `overwrites`, they replace the values of `g`, which
/// nothing else reads.
fn run_gradient_kernel(
    op: &'static PointwiseOp,
    expr: &'static str,
    inputs: PointwiseInputs<'_>,
    compute: DType,
    (g, shape, dtype): (&Tensor, &Dims, DType),
    overwrites: bool,
) -> Result<Tensor> {
    // Do not round before a sum, because 16-bit terms may cancel.
    let is_summed = dtype.size() == 2 && compute.size() <= 4 && shape.as_slice() != g.shape();
    let (out_dtype, compute) = if is_summed { (DType::F32, DType::F32) } else { (dtype, compute) };
    let unreduced = match overwrites {
        true => g.detach(),
        false => Tensor::empty(g.shape(), out_dtype, g.device())?,
    };
    let math_files = match compute {
        DType::F64 => f64_math_files(expr),
        _ => op.math_files,
    };
    let spec = PointwiseSpec {
        op: op.name,
        expr,
        math_files,
        type_rule: op.type_rule,
        compute,
        result: compute,
        inputs,
        is_grad: true,
    };
    pointwise_kernel::run(&spec, &unreduced, overwrites)?;
    unreduced.sum_to(shape)?.to_dtype(dtype)
}

/// Records an operation with the gradients of its record, and saves the values that these read.
fn attach_backward(
    op: &'static PointwiseOp,
    args: &[Operand<'_>],
    attrs: &[(&'static str, Scalar)],
    compute: DType,
    out: Tensor,
    tensors: &[&Tensor],
) -> Tensor {
    if !autograd::compute_requires_grad(tensors) || !out.dtype().is_float() {
        return out;
    }
    let tensor_operands: SmallVec<[(usize, Dims, DType); 3]> = args
        .iter()
        .enumerate()
        .filter_map(|(k, a)| match a {
            Operand::Tensor(t) => Some((k, t.shape().into(), t.dtype())),
            Operand::Scalar(_) => None,
        })
        .collect();
    let used = |var: GradVar| needs_saved(op, args, var);
    let modulation = NormModulation::find(op.name, args, &out);
    RecordedSum::note_sum(op.name, args, &out);
    // An operation of one tensor that saves its input, not its result.
    let recomputable = match args {
        [Operand::Tensor(x)] if used(GradVar::A) && !used(GradVar::Y) => {
            RecomputableResult::new(op, x, attrs, &out)
        }
        _ => None,
    };
    let save_tensor = |t: &Tensor| match &recomputable {
        Some(result) => SavedOperand::Input(result.clone()),
        None => match (RecomputableResult::find(t, out.shape()), &modulation) {
            (Some(result), _) => SavedOperand::Recomputed(result, t.grad_edge()),
            (None, Some(product)) if product.normalizes(t) => {
                SavedOperand::Normalized(product.clone(), t.grad_edge())
            }
            (None, _) => SavedOperand::Tensor(SavedTensor::input(t)),
        },
    };
    let vars = [GradVar::A, GradVar::B, GradVar::C];
    let saved: SmallVec<[(GradVar, &'static str, SavedOperand); 4]> = vars
        .iter()
        .zip(INPUT_NAMES)
        .zip(args)
        .filter(|((var, _), _)| used(**var))
        .map(|((&var, name), arg)| match arg {
            Operand::Tensor(t) => (var, name, save_tensor(t)),
            Operand::Scalar(s) => (var, name, SavedOperand::Scalar(*s)),
        })
        .chain(used(GradVar::Y).then(|| (GradVar::Y, "y", SavedOperand::Tensor(SavedTensor::output(&out)))))
        .collect();
    let modulated =
        modulation.as_ref().map(|modulation| Arc::downgrade(modulation) as Weak<dyn ResultSource>);
    // Kernels widen a gradient of 16 bits as they read it.
    let accepts_cast_grad = [out.dtype(), compute] == [DType::F32; 2];
    let backward = PointwiseBackward { op, tensor_operands, saved, attrs: attrs.into(), compute, modulation };
    let role = backward.chain_role(&out);
    let source = recomputable.as_ref().map(|result| Arc::downgrade(result) as Weak<dyn ResultSource>);
    drop(recomputable);
    let dtype = out.dtype();
    let out = autograd::differentiable(op.name, out, tensors, move |g, ctx| {
        if let Some(modulation) = &backward.modulation
            && let Some(grads) = modulation.compute_grads(g, ctx)?
        {
            return Ok(grads);
        }
        let mut grad = ResultGrad { grad: g, dtype, wide: None };
        let mut result: InputGrads = smallvec![None; backward.tensor_operands.len()];
        for at in backward.order_grads(ctx) {
            result[at] = Some(backward.compute_grad(at, &mut grad, ctx)?);
        }
        Ok(result)
    });
    if let Some(source) = source.or(modulated) {
        autograd::set_result_source(&out, source);
    }
    if accepts_cast_grad {
        autograd::accept_cast_grad(&out);
    }
    if let Some(dtype) = branch_dtype(op, args, &out) {
        autograd::set_branch_dtype(&out, dtype);
    }
    autograd::set_chain_role(&out, role);
    out
}

/// Returns the 16-bit type of an addend of an f32 sum `out`, if the addend requires a gradient of the sum's shape.
fn branch_dtype(op: &PointwiseOp, args: &[Operand<'_>], out: &Tensor) -> Option<DType> {
    if out.dtype() != DType::F32 {
        return None;
    }
    op.grads.iter().zip(args).find_map(|(rule, arg)| match (rule, arg) {
        (GradRule::Expr("g", _), Operand::Tensor(t)) if t.requires_grad() && t.shape() == out.shape() => {
            Some(t.dtype()).filter(|dtype| dtype.is_float() && dtype.size() == 2)
        }
        _ => None,
    })
}

/// Gradient of a result, in the type of the result or in 16 bits: see [`autograd::accept_cast_grad`].
struct ResultGrad<'a> {
    grad: &'a Tensor,
    /// Type of the result.
    dtype: DType,
    /// Gradient in the type of the result, once an operand has needed it.
    wide: Option<Tensor>,
}

impl ResultGrad<'_> {
    /// Sums to the shape of an operand and casts to its type. With `passes_cast`, a gradient of 16 bits that needs no
    /// sum is returned as it is.
    fn sum_to(&mut self, shape: &[usize], dtype: DType, passes_cast: bool) -> Result<Tensor> {
        let g = self.grad;
        if g.dtype() == self.dtype {
            return g.sum_to(shape)?.to_dtype(dtype);
        }
        if shape != g.shape() {
            // Do not round before or within the sum.
            return sum_to_dtype(g, shape, self.dtype)?.to_dtype(dtype);
        }
        if passes_cast || dtype == g.dtype() {
            return Ok(g.clone());
        }
        if self.wide.is_none() {
            self.wide = Some(g.to_dtype(self.dtype)?);
        }
        self.wide.as_ref().unwrap_or(g).to_dtype(dtype)
    }
}

/// Backward pass of a recorded operation.
struct PointwiseBackward {
    op: &'static PointwiseOp,
    /// For each tensor input: its operand index, shape and dtype.
    tensor_operands: SmallVec<[(usize, Dims, DType); 3]>,
    saved: SmallVec<[(GradVar, &'static str, SavedOperand); 4]>,
    attrs: SmallVec<[(&'static str, Scalar); 4]>,
    compute: DType,
    /// Modulation of a normalised tensor that the operation is a part of.
    modulation: Option<Arc<NormModulation>>,
}

impl PointwiseBackward {
    /// Reports whether the gradient of operand `k` recomputes a value.
    fn recomputes(&self, k: usize) -> bool {
        let is_used =
            |var: &GradVar| matches!(self.op.grads[k], GradRule::Expr(_, vars) if vars.contains(var));
        self.saved.iter().any(|(var, _, value)| is_used(var) && matches!(value, SavedOperand::Recomputed(..)))
    }

    /// Returns the role of the operation, whose result is `out`, in a chain of gradients.
    fn chain_role(&self, out: &Tensor) -> ChainRole {
        let recomputes = self.saved.iter().any(|(.., value)| matches!(value, SavedOperand::Recomputed(..)));
        match (&self.tensor_operands[..], self.op.grads.first()) {
            ([(0, shape, dtype)], Some(GradRule::Expr(expr, _)))
                if *expr != "g"
                    && !recomputes
                    && shape.as_slice() == out.shape()
                    && [*dtype, self.compute] == [out.dtype(); 2] =>
            {
                ChainRole::Link
            }
            _ => ChainRole::Start,
        }
    }

    /// Returns the tensor inputs that need a gradient, in the order of computation.
    ///
    /// Recomputed values come first, because a chain begins with them; later gradients join the chain. Otherwise the
    /// gradient of the first operand comes last: its node is often the next one.
    fn order_grads(&self, ctx: &BackwardCtx<'_>) -> SmallVec<[usize; 3]> {
        let mut order: SmallVec<[usize; 3]> =
            (0..self.tensor_operands.len()).rev().filter(|&at| ctx.needs_input_grad[at]).collect();
        order.sort_by_key(|&at| !self.recomputes(self.tensor_operands[at].0));
        order
    }

    /// Unpacks the saved values of variables. Each gradient unpacks its own, so that a recomputed value is dropped
    /// before the next kernel, and never written.
    fn unpack(
        &self,
        vars: &[GradVar],
        ctx: &BackwardCtx<'_>,
    ) -> Result<SmallVec<[(&'static str, ExprValue); 4]>> {
        let used = self.saved.iter().filter(|(var, ..)| vars.contains(var));
        used.map(|(_, name, value)| Ok((*name, value.unpack(ctx)?))).collect()
    }

    /// Computes the gradient of the tensor input `at` from the gradient `g` of the result.
    fn compute_grad(&self, at: usize, grad: &mut ResultGrad<'_>, ctx: &BackwardCtx<'_>) -> Result<Tensor> {
        let (k, shape, dtype) = &self.tensor_operands[at];
        let g = grad.grad;
        match self.op.grads[*k] {
            // The forward pass has already refused this case.
            GradRule::None => Err(Error::no_gradient(self.op.name)),
            GradRule::Zero => Tensor::zeros(shape, *dtype, g.device()),
            GradRule::Expr("g", _) => {
                // A copy in this type has no history for `create_graph`.
                let low = g.take_low_precision(*dtype);
                match low.filter(|_| !ctx.create_graph() && shape.as_slice() == g.shape()) {
                    Some(low) => Ok(low),
                    None => grad.sum_to(shape, *dtype, ctx.passes_cast_grad(at)),
                }
            }
            GradRule::Expr(expr, vars) if ctx.create_graph() => {
                let values = self.unpack(vars, ctx)?;
                self.compose_grad(expr, values, g)?.sum_to(shape)?.to_dtype(*dtype)
            }
            GradRule::Expr(expr, vars) => {
                let values = self.unpack(vars, ctx)?;
                // The gradient of a factor that was broadcast is a sum of products.
                if let ("g * a" | "g * b", [(_, ExprValue::Tensor(value))]) = (expr, &values[..])
                    && shape.as_slice() != g.shape()
                    && let Some(sum) = sum_products_to(g, value, shape, *dtype)?
                {
                    return Ok(sum);
                }
                let mut inputs: PointwiseInputs<'_> =
                    smallvec![PointwiseInput { name: "g", operand: Operand::Tensor(g) }];
                inputs.extend(
                    values.iter().filter_map(|(name, value)| {
                        Some(PointwiseInput { name, operand: value.as_operand()? })
                    }),
                );
                let attrs = self.attrs.iter();
                inputs.extend(attrs.map(|&(name, s)| PointwiseInput { name, operand: Operand::Scalar(s) }));
                let result = (g, shape, *dtype);
                run_gradient_kernel(self.op, expr, inputs, self.compute, result, ctx.overwrites_grad())
            }
        }
    }

    /// Evaluates a gradient's expression by operations that have gradients themselves, of the shape of `g`.
    fn compose_grad(
        &self,
        expr: &'static str,
        values: SmallVec<[(&'static str, ExprValue); 4]>,
        g: &Tensor,
    ) -> Result<Tensor> {
        let grad = std::iter::once(("g", ExprValue::Tensor(g.clone())));
        let attrs = self.attrs.iter().map(|&(name, s)| (name, ExprValue::Scalar(s.to_f64())));
        let cast = |(name, value)| match value {
            ExprValue::Tensor(t) => Ok((name, ExprValue::Tensor(t.to_dtype(self.compute)?))),
            value => Ok((name, value)),
        };
        let values = grad.chain(values).chain(attrs).map(cast).collect::<Result<_>>()?;
        let names = ExprEnv { op: self.op.name, values, compute_dtype: self.compute, device: g.device() };
        // The value is smaller than g if it is zero or depends on scalars alone.
        names.evaluate(expr)?.broadcast_to(g.shape())
    }
}

/// Fails if a result does not fit in place: a float into another type, or a number into a bool.
pub(crate) fn check_fits_in_place(op: &'static str, target: DType, result: DType) -> Result<()> {
    fail_if!(result.is_float() && !target.is_float();
        dtype(op, target), "the result is a float and does not fit in place; a float scalar, as in \
            `remainder_(10.0)`, makes floats of integers, and `remainder_(10)` does not");
    fail_if!(target == DType::Bool && result != DType::Bool;
        dtype(op, target), "the result is {result} and does not fit in place; cast the tensor with `to_dtype`");
    Ok(())
}

/// Runs an operation in place on its first operand, which keeps its dtype. Errors name the method, `name`.
#[track_caller]
pub(crate) fn run_pointwise_inplace(
    name: &'static str,
    op: &'static PointwiseOp,
    target: &Tensor,
    rest: &[Operand<'_>],
    attrs: &[(&'static str, Scalar)],
) -> Result<()> {
    run_inplace(op, target, rest, attrs, false).map_err(|error| error.with_op(name))
}

/// Runs an operation in place on a gradient. It may join the pending kernel that computes the gradient.
#[track_caller]
pub(crate) fn run_pointwise_inplace_grad(
    op: &'static PointwiseOp,
    target: &Tensor,
    rest: &[Operand<'_>],
) -> Result<()> {
    run_inplace(op, target, rest, &[], true)
}

#[track_caller]
fn run_inplace(
    op: &'static PointwiseOp,
    target: &Tensor,
    rest: &[Operand<'_>],
    attrs: &[(&'static str, Scalar)],
    is_grad: bool,
) -> Result<()> {
    operation!(op.name);
    fail_if!(target.layout().has_internal_overlap();
        argument(op.name), "the tensor repeats elements (it was expanded); copy it first");
    // Another view of the same memory would be read while it is written.
    let others: SmallVec<[&Tensor; 3]> = rest.iter().filter_map(Operand::as_tensor).collect();
    let recorded = autograd::check_inplace(op.name, target, &others)?;
    let copy = |t: &Tensor| Ok::<_, Error>(t.detach().copy()?.with_grad_edge(t.grad_edge()));
    let copies: SmallVec<[Option<Tensor>; 3]> = rest
        .iter()
        .map(|a| match a {
            Operand::Tensor(t) if t.shares_storage(target) => copy(t).map(Some),
            _ => Ok(None),
        })
        .collect::<Result<_>>()?;
    // A gradient that depends on the old value needs a copy of it.
    let operands: SmallVec<[Operand<'_>; 4]> =
        std::iter::once(target.into()).chain(rest.iter().copied()).collect();
    let before = match recorded && needs_saved(op, &operands, GradVar::A) {
        true => Some(copy(target)?),
        false => None,
    };
    let mut args: SmallVec<[Operand<'_>; 4]> = smallvec![Operand::Tensor(target)];
    for (arg, copy) in rest.iter().zip(&copies) {
        args.push(copy.as_ref().map_or(*arg, Operand::Tensor));
    }
    for (k, arg) in args.iter().enumerate() {
        if let Operand::Tensor(t) = arg
            && matches!(op.grads.get(k), None | Some(GradRule::None))
        {
            autograd::check_no_grad_inputs(op.name, &[t])?;
        }
    }
    let (compute, result) = resolve_dtypes(op, &args)?;
    check_attrs(op, compute, attrs)?;
    check_fits_in_place(op.name, target.dtype(), result)?;
    let spec = PointwiseSpec { is_grad, ..op.build_spec(&args, attrs, compute, compute)? };
    pointwise_kernel::run(&spec, target, true)?;
    if !recorded {
        return Ok(());
    }
    if let Some(before) = &before {
        args[0] = Operand::Tensor(before);
    }
    let tensors: SmallVec<[&Tensor; 4]> = args.iter().filter_map(Operand::as_tensor).collect();
    let updated = attach_backward(op, &args, attrs, compute, target.detach(), &tensors);
    autograd::rebase_history(op.name, target, &updated)
}

/// Converts between types with an elementwise kernel whose expression is the input.
#[track_caller]
pub(crate) fn convert_dtype_into(from: &Tensor, to: &Tensor) -> Result<()> {
    static CAST: &str = "to_dtype";
    // A compute type without loss of precision.
    let compute = match (from.dtype(), to.dtype()) {
        (a, b) if a.is_storage_only() || b.is_storage_only() => DType::F32,
        (a, b) if a.is_float() && b.is_float() => a.promote(b),
        (DType::I64, _) | (_, DType::I64) => DType::I64,
        (a, DType::Bool) => a,
        (a, DType::U8) if a.is_float() => DType::I32,
        (a, b) if b.is_float() && a != DType::Bool => a,
        (_, b) => b,
    };
    let spec = PointwiseSpec {
        op: CAST,
        expr: "a",
        math_files: &[],
        type_rule: TypeRule::Float,
        compute,
        result: compute,
        inputs: smallvec![PointwiseInput { name: "a", operand: Operand::Tensor(from) }],
        is_grad: false,
    };
    pointwise_kernel::run(&spec, to, false)
}

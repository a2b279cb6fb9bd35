//! Differentiable gradients of elementwise operations, for `create_graph` only. The gradient expressions that
//! the kernels compute in one pass are evaluated here as tensor operations.
//!
//! The parser evaluates an expression as it reads it, so there is no second set of formulas.

use crate::ops::elementwise::pointwise::{find_op, run_pointwise};
use crate::ops::prelude::*;

/// Binary operators with their precedence and the operation of their name.
const OPERATORS: &[(&str, usize, &str)] = &[
    ("||", 0, "logical_or"),
    ("&&", 1, "logical_and"),
    ("==", 2, "eq"),
    ("!=", 2, "ne"),
    ("<=", 2, "le"),
    (">=", 2, "ge"),
    ("<", 2, "lt"),
    (">", 2, "gt"),
    ("+", 3, "add"),
    ("-", 3, "sub"),
    ("*", 4, "mul"),
    ("/", 4, "div"),
];

/// Math functions without a tensor operation, as expressions of `x`: derivatives of activations.
const FUNCTION_DEFINITIONS: &[(&str, &str)] = &[
    ("m_gelu_grad", "0.5 * m_erfc(x * -0.7071067811865476) + x * 0.3989422804014327 * m_exp(x * x * -0.5)"),
    (
        "m_gelu_tanh_grad",
        "0.5 * (1.0 + m_tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) + 0.5 * x \
         * (1.0 - m_tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)) * m_tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) \
         * 0.7978845608028654 * (1.0 + 0.134145 * x * x)",
    ),
    ("m_silu_grad", "m_sigmoid(x) * (1.0 + x * (1.0 - m_sigmoid(x)))"),
    (
        "m_mish_grad",
        "m_tanh(m_log1pexp(x)) + x * m_sigmoid(x) * (1.0 - m_tanh(m_log1pexp(x)) * m_tanh(m_log1pexp(x)))",
    ),
];

/// Value of a name or of a subexpression.
#[derive(Clone)]
pub(crate) enum ExprValue {
    Scalar(f64),
    Tensor(Tensor),
    Bool(bool),
    /// Bool tensor: a condition, which has no gradient.
    Mask(Tensor),
}

impl ExprValue {
    /// Returns the operand of an elementwise operation; `None` for truth values.
    pub(crate) fn as_operand(&self) -> Option<Operand<'_>> {
        match self {
            Self::Scalar(v) => Some(Operand::from(*v)),
            Self::Tensor(t) => Some(Operand::from(t)),
            Self::Bool(_) | Self::Mask(_) => None,
        }
    }
}

/// Values of the names in an expression.
pub(crate) struct ExprEnv<'a> {
    pub(crate) op: &'static str,
    pub(crate) values: SmallVec<[(&'a str, ExprValue); 8]>,
    pub(crate) compute_dtype: DType,
    pub(crate) device: &'a Device,
}

impl ExprEnv<'_> {
    /// Evaluates an expression over these names. Returns a tensor in the compute type.
    pub(crate) fn evaluate(&self, expr: &str) -> Result<Tensor> {
        let mut reader = ExprParser { env: self, rest: expr };
        let value = reader.parse(0)?;
        match reader.rest.trim() {
            "" => self.to_tensor(value),
            rest => Err(self.not_differentiable_error(format!("`{rest}` is left of `{expr}`"))),
        }
    }

    /// Describes an expression that has no gradient here. None exists: the tests evaluate all expressions of the
    /// tables of operations.
    fn not_differentiable_error(&self, what: String) -> Error {
        Error::backward(format!("`{}`: its gradient cannot be differentiated: {what}", self.op))
    }

    fn to_tensor(&self, value: ExprValue) -> Result<Tensor> {
        match value {
            ExprValue::Tensor(t) => Ok(t),
            ExprValue::Scalar(v) => {
                let v = Scalar::Float(v).overflow_to_infinity(self.compute_dtype);
                Tensor::full((), v, self.compute_dtype, self.device)
            }
            ExprValue::Bool(_) | ExprValue::Mask(_) => {
                Err(self.not_differentiable_error("a truth value where a number is expected".into()))
            }
        }
    }

    /// Runs the elementwise operation of this name.
    fn run(&self, op: &str, operands: &[Operand<'_>]) -> Result<Tensor> {
        match find_op(op) {
            Some(op) => run_pointwise(op, operands, &[]),
            None => Err(self.not_differentiable_error(format!("`{op}` is not known"))),
        }
    }

    /// Applies one of [`OPERATORS`]. A comparison is constant wherever the expression is differentiable.
    fn apply(&self, op: &str, a: ExprValue, b: ExprValue) -> Result<ExprValue> {
        use ExprValue::{Bool, Mask, Scalar};
        Ok(match (op, a, b) {
            ("logical_and" | "logical_or", Mask(a), Mask(b)) => {
                Mask(self.run(op, &[(&a).into(), (&b).into()])?)
            }
            ("logical_and" | "logical_or", Bool(known), other)
            | ("logical_and" | "logical_or", other, Bool(known)) => {
                if known == (op == "logical_and") {
                    other
                } else {
                    Bool(known)
                }
            }
            ("logical_and" | "logical_or", ..) => {
                return Err(self.not_differentiable_error("a number where a truth value is expected".into()));
            }
            (_, Scalar(a), Scalar(b)) => match op {
                "add" => Scalar(a + b),
                "sub" => Scalar(a - b),
                "mul" => Scalar(a * b),
                "div" => Scalar(a / b),
                "eq" => Bool(a == b),
                "ne" => Bool(a != b),
                "lt" => Bool(a < b),
                "le" => Bool(a <= b),
                "gt" => Bool(a > b),
                _ => Bool(a >= b),
            },
            ("add" | "sub" | "mul" | "div", a, Scalar(b)) => {
                ExprValue::Tensor(self.run(op, &[(&self.to_tensor(a)?).into(), b.into()])?)
            }
            (_, a, b) => {
                let (a, b) = (self.to_tensor(a)?, self.to_tensor(b)?);
                match op {
                    "add" | "sub" | "mul" | "div" => {
                        ExprValue::Tensor(self.run(op, &[(&a).into(), (&b).into()])?)
                    }
                    _ => Mask(self.run(op, &[(&a.detach()).into(), (&b.detach()).into()])?),
                }
            }
        })
    }

    fn select(&self, no: ExprValue, yes: ExprValue, condition: ExprValue) -> Result<ExprValue> {
        let mask = match condition {
            ExprValue::Bool(true) => return Ok(yes),
            ExprValue::Bool(false) => return Ok(no),
            ExprValue::Mask(mask) => mask,
            _ => return Err(self.not_differentiable_error("a number where a truth value is expected".into())),
        };
        let yes = self.to_tensor(yes)?;
        Ok(ExprValue::Tensor(match no {
            ExprValue::Scalar(no) => yes.where_(&mask, no)?,
            no => yes.where_(&mask, &self.to_tensor(no)?)?,
        }))
    }

    fn call_function(&self, name: &str, args: &[ExprValue]) -> Result<ExprValue> {
        // The order stays a scalar.
        if let ("m_polygamma", [x, ExprValue::Scalar(n), _]) = (name, args) {
            return Ok(ExprValue::Tensor(self.to_tensor(x.clone())?.polygamma(*n as usize)?));
        }
        let args = args.iter();
        let args = args.map(|v| self.to_tensor(v.clone())).collect::<Result<SmallVec<[Tensor; 2]>>>()?;
        // Math functions have the names of operations.
        let op = if name == "min" { "minimum" } else { name.strip_prefix("m_").unwrap_or(name) };
        let defined = FUNCTION_DEFINITIONS.iter().find(|(known, _)| *known == name);
        Ok(match (name, &args[..], defined) {
            ("m_isnan" | "m_isfinite" | "m_isinf", [x], _) => {
                ExprValue::Mask(self.run(op, &[(&x.detach()).into()])?)
            }
            ("m_log1pexp", [x], _) => ExprValue::Tensor(x.softplus(1.0, f64::INFINITY)?),
            (_, [x], Some((_, expr))) => {
                let values = [("x", ExprValue::Tensor(x.clone()))].into_iter().collect();
                ExprValue::Tensor(ExprEnv { values, ..*self }.evaluate(expr)?)
            }
            (_, args, _) => ExprValue::Tensor(
                self.run(op, &args.iter().map(Operand::from).collect::<SmallVec<[_; 2]>>())?,
            ),
        })
    }
}

/// Recursive-descent parser that evaluates from left to right.
struct ExprParser<'a, 'n> {
    env: &'a ExprEnv<'n>,
    rest: &'a str,
}

impl ExprParser<'_, '_> {
    /// Consumes the token if it comes next, and reports whether it did.
    fn eat(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        let next = self.rest.strip_prefix(token);
        self.rest = next.unwrap_or(self.rest);
        next.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        match self.eat(token) {
            true => Ok(()),
            false => {
                Err(self.env.not_differentiable_error(format!("`{token}` is missing before `{}`", self.rest)))
            }
        }
    }

    /// Parses an expression of operators that bind at least as tightly as `precedence`.
    fn parse(&mut self, precedence: usize) -> Result<ExprValue> {
        if OPERATORS.iter().all(|operator| operator.1 < precedence) {
            return self.parse_factor();
        }
        let mut value = self.parse(precedence + 1)?;
        while let Some((_, _, op)) =
            OPERATORS.iter().find(|(token, level, _)| *level == precedence && self.eat(token))
        {
            let other = self.parse(precedence + 1)?;
            value = self.env.apply(op, value, other)?;
        }
        Ok(value)
    }

    fn parse_factor(&mut self) -> Result<ExprValue> {
        if self.eat("-") {
            return match self.parse_factor()? {
                ExprValue::Scalar(v) => Ok(ExprValue::Scalar(-v)),
                other => Ok(ExprValue::Tensor(self.env.to_tensor(other)?.neg()?)),
            };
        }
        if self.eat("(") {
            let value = self.parse(0)?;
            self.expect(")")?;
            return Ok(value);
        }
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let (name, rest) = self.rest.split_at(self.rest.find(|c| !word(c)).unwrap_or(self.rest.len()));
        self.rest = rest;
        if let Ok(number) = name.parse() {
            return Ok(ExprValue::Scalar(number));
        }
        if !self.eat("(") {
            let known = self.env.values.iter().find(|(known, _)| *known == name);
            return known
                .map(|(_, value)| value.clone())
                .ok_or_else(|| self.env.not_differentiable_error(format!("`{name}` is not known")));
        }
        if name == "m_nan" {
            self.expect(")")?;
            return Ok(ExprValue::Scalar(f64::NAN));
        }
        let mut args: SmallVec<[ExprValue; 3]> = SmallVec::new();
        loop {
            args.push(self.parse(0)?);
            if !self.eat(",") {
                break;
            }
        }
        self.expect(")")?;
        match (name, &args[..]) {
            // A scalar takes the type of the other operand.
            ("T", [value]) => Ok(value.clone()),
            ("select", [no, yes, condition]) => self.env.select(no.clone(), yes.clone(), condition.clone()),
            (name, args) => self.env.call_function(name, args),
        }
    }
}

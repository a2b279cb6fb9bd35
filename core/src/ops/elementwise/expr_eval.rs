//! Differentiable gradients of elementwise operations, for `create_graph` only. The gradient expressions that
//! the kernels compute in one pass are evaluated here as tensor operations.
//!
//! The parser evaluates an expression as it reads it, so there is no second set of formulas.

use crate::ops::prelude::*;

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
        let value = reader.parse_or()?;
        match reader.rest.trim() {
            "" => self.to_tensor(value),
            rest => Err(self.not_differentiable_error(format!("`{rest}` is left of `{expr}`"))),
        }
    }

    /// invariant: expressions are those of the tables of operations, all of which the tests evaluate
    fn not_differentiable_error(&self, what: String) -> Error {
        Error::Backward(format!("`{}`: its gradient cannot be differentiated: {what}", self.op))
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

    fn arithmetic(&self, op: char, a: ExprValue, b: ExprValue) -> Result<ExprValue> {
        let (a, b) = match (a, b) {
            (ExprValue::Scalar(a), ExprValue::Scalar(b)) => {
                return Ok(ExprValue::Scalar(match op {
                    '+' => a + b,
                    '-' => a - b,
                    '*' => a * b,
                    _ => a / b,
                }));
            }
            (a, ExprValue::Scalar(b)) => (self.to_tensor(a)?, ExprValue::Scalar(b)),
            (a, b) => (self.to_tensor(a)?, ExprValue::Tensor(self.to_tensor(b)?)),
        };
        let b = match &b {
            ExprValue::Scalar(b) => Operand::from(*b),
            ExprValue::Tensor(b) => Operand::from(b),
            ExprValue::Bool(_) | ExprValue::Mask(_) => {
                return Err(self.not_differentiable_error("a truth value in a sum".into()));
            }
        };
        Ok(ExprValue::Tensor(match op {
            '+' => a.add(b)?,
            '-' => a.sub(b)?,
            '*' => a.mul(b)?,
            _ => a.div(b)?,
        }))
    }

    /// Compares two values. The result is constant wherever the expression is differentiable.
    fn compare(&self, op: &str, a: ExprValue, b: ExprValue) -> Result<ExprValue> {
        if let (ExprValue::Scalar(a), ExprValue::Scalar(b)) = (&a, &b) {
            return Ok(ExprValue::Bool(match op {
                "==" => a == b,
                "!=" => a != b,
                "<" => a < b,
                "<=" => a <= b,
                ">" => a > b,
                _ => a >= b,
            }));
        }
        let (a, b) = (self.to_tensor(a)?.detach(), self.to_tensor(b)?.detach());
        Ok(ExprValue::Mask(match op {
            "==" => a.eq(&b)?,
            "!=" => a.ne(&b)?,
            "<" => a.lt(&b)?,
            "<=" => a.le(&b)?,
            ">" => a.gt(&b)?,
            _ => a.ge(&b)?,
        }))
    }

    fn logic(&self, and: bool, a: ExprValue, b: ExprValue) -> Result<ExprValue> {
        match (a, b) {
            (ExprValue::Mask(a), ExprValue::Mask(b)) => {
                Ok(ExprValue::Mask(if and { a.logical_and(&b)? } else { a.logical_or(&b)? }))
            }
            (ExprValue::Bool(known), other) | (other, ExprValue::Bool(known)) => {
                Ok(if known == and { other } else { ExprValue::Bool(known) })
            }
            _ => Err(self.not_differentiable_error("a number where a truth value is expected".into())),
        }
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
        Ok(ExprValue::Tensor(match (name, &args[..]) {
            ("m_exp", [x]) => x.exp()?,
            ("m_exp2", [x]) => x.exp2()?,
            ("m_log", [x]) => x.log()?,
            ("m_sin", [x]) => x.sin()?,
            ("m_cos", [x]) => x.cos()?,
            ("m_sinh", [x]) => x.sinh()?,
            ("m_cosh", [x]) => x.cosh()?,
            ("m_tanh", [x]) => x.tanh()?,
            ("m_erfc", [x]) => x.erfc()?,
            ("m_rsqrt", [x]) => x.rsqrt()?,
            ("m_sigmoid", [x]) => x.sigmoid()?,
            ("m_log1pexp", [x]) => x.softplus(1.0, f64::INFINITY)?,
            ("abs", [x]) => x.abs()?,
            ("floor", [x]) => x.floor()?,
            ("trunc", [x]) => x.trunc()?,
            ("min", [x, y]) => x.minimum(y)?,
            ("m_pow", [x, y]) => x.pow(y)?,
            ("m_hypot", [x, y]) => x.hypot(y)?,
            ("m_copysign", [x, y]) => x.copysign(y)?,
            ("m_log1p", [x]) => x.log1p()?,
            ("m_isnan", [x]) => return Ok(ExprValue::Mask(x.detach().isnan()?)),
            ("m_isfinite", [x]) => return Ok(ExprValue::Mask(x.detach().isfinite()?)),
            ("m_digamma", [x]) => x.digamma()?,
            ("m_i0", [x]) => x.i0()?,
            ("m_i0e", [x]) => x.i0e()?,
            ("m_i1", [x]) => x.i1()?,
            ("m_i1e", [x]) => x.i1e()?,
            ("m_erfcx", [x]) => x.erfcx()?,
            ("m_zeta", [x, y]) => x.zeta(y)?,
            (name, [x]) => {
                let Some((_, expr)) = FUNCTION_DEFINITIONS.iter().find(|(known, _)| *known == name) else {
                    return Err(self.not_differentiable_error(format!("`{name}` is not known")));
                };
                let values = [("x", ExprValue::Tensor(x.clone()))].into_iter().collect();
                ExprEnv { values, ..*self }.evaluate(expr)?
            }
            _ => return Err(self.not_differentiable_error(format!("`{name}` is not known"))),
        }))
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

    fn parse_or(&mut self) -> Result<ExprValue> {
        let mut value = self.parse_and()?;
        while self.eat("||") {
            let other = self.parse_and()?;
            value = self.env.logic(false, value, other)?;
        }
        Ok(value)
    }

    fn parse_and(&mut self) -> Result<ExprValue> {
        let mut value = self.parse_comparison()?;
        while self.eat("&&") {
            let other = self.parse_comparison()?;
            value = self.env.logic(true, value, other)?;
        }
        Ok(value)
    }

    fn parse_comparison(&mut self) -> Result<ExprValue> {
        let value = self.parse_sum()?;
        for op in ["==", "!=", "<=", ">=", "<", ">"] {
            if self.eat(op) {
                let other = self.parse_sum()?;
                return self.env.compare(op, value, other);
            }
        }
        Ok(value)
    }

    fn parse_sum(&mut self) -> Result<ExprValue> {
        let mut value = self.parse_product()?;
        loop {
            let op = match (self.eat("+"), self.eat("-")) {
                (true, _) => '+',
                (_, true) => '-',
                _ => return Ok(value),
            };
            let other = self.parse_product()?;
            value = self.env.arithmetic(op, value, other)?;
        }
    }

    fn parse_product(&mut self) -> Result<ExprValue> {
        let mut value = self.parse_factor()?;
        loop {
            let op = match (self.eat("*"), self.eat("/")) {
                (true, _) => '*',
                (_, true) => '/',
                _ => return Ok(value),
            };
            let other = self.parse_factor()?;
            value = self.env.arithmetic(op, value, other)?;
        }
    }

    fn parse_factor(&mut self) -> Result<ExprValue> {
        if self.eat("-") {
            return match self.parse_factor()? {
                ExprValue::Scalar(v) => Ok(ExprValue::Scalar(-v)),
                other => Ok(ExprValue::Tensor(self.env.to_tensor(other)?.neg()?)),
            };
        }
        if self.eat("(") {
            let value = self.parse_or()?;
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
            args.push(self.parse_or()?);
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

//! The gradients of elementwise operations as tensor operations: what a kernel computes in one pass, made of operations that
//! have gradients themselves. It runs only where gradients of gradients are asked for.
//!
//! An expression is evaluated as it is read: there is no second set of formulas.

use smallvec::SmallVec;

use super::pointwise::Operand;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Functions of the math library that no tensor operation has, as expressions of `x`: derivatives of activations.
const DEFINED: &[(&str, &str)] = &[
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

/// What a name stands for, and what an expression gives.
#[derive(Clone)]
pub(super) enum Value {
    Number(f64),
    Tensor(Tensor),
    Truth(bool),
    /// A bool tensor: a condition, which has no gradient.
    Mask(Tensor),
}

/// What the names of an expression stand for.
pub(super) struct Names<'a> {
    pub(super) op: &'static str,
    pub(super) values: SmallVec<[(&'a str, Value); 8]>,
    pub(super) compute: DType,
    pub(super) device: &'a Device,
}

impl Names<'_> {
    /// The value of an expression over these names, a tensor in the type that is computed in.
    pub(super) fn evaluate(&self, expr: &str) -> Result<Tensor> {
        let mut reader = Reader { names: self, rest: expr };
        let value = reader.either()?;
        match reader.rest.trim() {
            "" => self.tensor(value),
            rest => Err(self.fail(format!("`{rest}` is left of `{expr}`"))),
        }
    }

    /// invariant: expressions are those of the tables of operations, all of which the tests evaluate
    fn fail(&self, what: String) -> Error {
        Error::Backward(format!("`{}`: its gradient cannot be differentiated: {what}", self.op))
    }

    fn tensor(&self, value: Value) -> Result<Tensor> {
        match value {
            Value::Tensor(t) => Ok(t),
            Value::Number(v) => Tensor::full(&[], v, self.compute, self.device),
            Value::Truth(_) | Value::Mask(_) => {
                Err(self.fail("a truth value where a number is expected".into()))
            }
        }
    }

    fn arithmetic(&self, op: char, a: Value, b: Value) -> Result<Value> {
        let (a, b) = match (a, b) {
            (Value::Number(a), Value::Number(b)) => {
                return Ok(Value::Number(match op {
                    '+' => a + b,
                    '-' => a - b,
                    '*' => a * b,
                    _ => a / b,
                }));
            }
            (a, Value::Number(b)) => (self.tensor(a)?, Value::Number(b)),
            (a, b) => (self.tensor(a)?, Value::Tensor(self.tensor(b)?)),
        };
        let b = match &b {
            Value::Number(b) => Operand::from(*b),
            Value::Tensor(b) => Operand::from(b),
            Value::Truth(_) | Value::Mask(_) => return Err(self.fail("a truth value in a sum".into())),
        };
        Ok(Value::Tensor(match op {
            '+' => a.add(b)?,
            '-' => a.sub(b)?,
            '*' => a.mul(b)?,
            _ => a.div(b)?,
        }))
    }

    /// A comparison, whose result does not change where it is differentiable.
    fn compare(&self, op: &str, a: Value, b: Value) -> Result<Value> {
        if let (Value::Number(a), Value::Number(b)) = (&a, &b) {
            return Ok(Value::Truth(match op {
                "==" => a == b,
                "!=" => a != b,
                "<" => a < b,
                "<=" => a <= b,
                ">" => a > b,
                _ => a >= b,
            }));
        }
        let (a, b) = (self.tensor(a)?.detach(), self.tensor(b)?.detach());
        Ok(Value::Mask(match op {
            "==" => a.eq(&b)?,
            "!=" => a.ne(&b)?,
            "<" => a.lt(&b)?,
            "<=" => a.le(&b)?,
            ">" => a.gt(&b)?,
            _ => a.ge(&b)?,
        }))
    }

    fn logic(&self, and: bool, a: Value, b: Value) -> Result<Value> {
        match (a, b) {
            (Value::Mask(a), Value::Mask(b)) => {
                Ok(Value::Mask(if and { a.logical_and(&b)? } else { a.logical_or(&b)? }))
            }
            (Value::Truth(known), other) | (other, Value::Truth(known)) => {
                Ok(if known == and { other } else { Value::Truth(known) })
            }
            _ => Err(self.fail("a number where a truth value is expected".into())),
        }
    }

    fn select(&self, no: Value, yes: Value, condition: Value) -> Result<Value> {
        let mask = match condition {
            Value::Truth(true) => return Ok(yes),
            Value::Truth(false) => return Ok(no),
            Value::Mask(mask) => mask,
            _ => return Err(self.fail("a number where a truth value is expected".into())),
        };
        let yes = self.tensor(yes)?;
        Ok(Value::Tensor(match no {
            Value::Number(no) => yes.where_(&mask, no)?,
            no => yes.where_(&mask, &self.tensor(no)?)?,
        }))
    }

    fn call(&self, name: &str, args: &[Value]) -> Result<Value> {
        // Its order is a number, and stays one.
        if let ("m_polygamma", [x, Value::Number(n), _]) = (name, args) {
            return Ok(Value::Tensor(self.tensor(x.clone())?.polygamma(*n as usize)?));
        }
        let args = args.iter();
        let args = args.map(|v| self.tensor(v.clone())).collect::<Result<SmallVec<[Tensor; 2]>>>()?;
        Ok(Value::Tensor(match (name, &args[..]) {
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
            ("m_isnan", [x]) => return Ok(Value::Mask(x.detach().isnan()?)),
            ("m_isfinite", [x]) => return Ok(Value::Mask(x.detach().isfinite()?)),
            ("m_digamma", [x]) => x.digamma()?,
            ("m_i0", [x]) => x.i0()?,
            ("m_i0e", [x]) => x.i0e()?,
            ("m_i1", [x]) => x.i1()?,
            ("m_i1e", [x]) => x.i1e()?,
            ("m_erfcx", [x]) => x.erfcx()?,
            ("m_zeta", [x, y]) => x.zeta(y)?,
            (name, [x]) => {
                let Some((_, expr)) = DEFINED.iter().find(|(known, _)| *known == name) else {
                    return Err(self.fail(format!("`{name}` is not known")));
                };
                let values = [("x", Value::Tensor(x.clone()))].into_iter().collect();
                Names { values, ..*self }.evaluate(expr)?
            }
            _ => return Err(self.fail(format!("`{name}` is not known"))),
        }))
    }
}

/// Reads an expression from left to right.
struct Reader<'a, 'n> {
    names: &'a Names<'n>,
    rest: &'a str,
}

impl Reader<'_, '_> {
    /// Whether this comes next; if so, it is read.
    fn eat(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        let next = self.rest.strip_prefix(token);
        self.rest = next.unwrap_or(self.rest);
        next.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        match self.eat(token) {
            true => Ok(()),
            false => Err(self.names.fail(format!("`{token}` is missing before `{}`", self.rest))),
        }
    }

    fn either(&mut self) -> Result<Value> {
        let mut value = self.both()?;
        while self.eat("||") {
            let other = self.both()?;
            value = self.names.logic(false, value, other)?;
        }
        Ok(value)
    }

    fn both(&mut self) -> Result<Value> {
        let mut value = self.comparison()?;
        while self.eat("&&") {
            let other = self.comparison()?;
            value = self.names.logic(true, value, other)?;
        }
        Ok(value)
    }

    fn comparison(&mut self) -> Result<Value> {
        let value = self.sum()?;
        for op in ["==", "!=", "<=", ">=", "<", ">"] {
            if self.eat(op) {
                let other = self.sum()?;
                return self.names.compare(op, value, other);
            }
        }
        Ok(value)
    }

    fn sum(&mut self) -> Result<Value> {
        let mut value = self.product()?;
        loop {
            let op = match (self.eat("+"), self.eat("-")) {
                (true, _) => '+',
                (_, true) => '-',
                _ => return Ok(value),
            };
            let other = self.product()?;
            value = self.names.arithmetic(op, value, other)?;
        }
    }

    fn product(&mut self) -> Result<Value> {
        let mut value = self.factor()?;
        loop {
            let op = match (self.eat("*"), self.eat("/")) {
                (true, _) => '*',
                (_, true) => '/',
                _ => return Ok(value),
            };
            let other = self.factor()?;
            value = self.names.arithmetic(op, value, other)?;
        }
    }

    fn factor(&mut self) -> Result<Value> {
        if self.eat("-") {
            return match self.factor()? {
                Value::Number(v) => Ok(Value::Number(-v)),
                other => Ok(Value::Tensor(self.names.tensor(other)?.neg()?)),
            };
        }
        if self.eat("(") {
            let value = self.either()?;
            self.expect(")")?;
            return Ok(value);
        }
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let (name, rest) = self.rest.split_at(self.rest.find(|c| !word(c)).unwrap_or(self.rest.len()));
        self.rest = rest;
        if let Ok(number) = name.parse() {
            return Ok(Value::Number(number));
        }
        if !self.eat("(") {
            let known = self.names.values.iter().find(|(known, _)| *known == name);
            return known
                .map(|(_, value)| value.clone())
                .ok_or_else(|| self.names.fail(format!("`{name}` is not known")));
        }
        if name == "m_nan" {
            self.expect(")")?;
            return Ok(Value::Number(f64::NAN));
        }
        let mut args: SmallVec<[Value; 3]> = SmallVec::new();
        loop {
            args.push(self.either()?);
            if !self.eat(",") {
                break;
            }
        }
        self.expect(")")?;
        match (name, &args[..]) {
            // A number takes the type of what it meets.
            ("T", [value]) => Ok(value.clone()),
            ("select", [no, yes, condition]) => self.names.select(no.clone(), yes.clone(), condition.clone()),
            (name, args) => self.names.call(name, args),
        }
    }
}

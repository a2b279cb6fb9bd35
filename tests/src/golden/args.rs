//! The arguments of a recorded call, by position and by keyword.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::{Operand, Scalar};
use forebay::tensor::Tensor;
use serde_json::Value;

use super::Call;

/// Arguments with their tensors on the device.
pub struct Args<'a> {
    call: &'a Call,
    device: &'a Device,
    tensors: BTreeMap<String, Tensor>,
}

/// The tensors that a call takes.
pub(super) fn keys(call: &Call) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    call.args.iter().chain(call.kwargs.values()).for_each(|v| collect(v, &mut keys));
    keys
}

fn collect(value: &Value, keys: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            if let Some(Value::String(key)) = map.get("t") {
                keys.insert(key.clone());
            }
            if let Some(Value::Array(list)) = map.get("l") {
                list.iter().for_each(|v| collect(v, keys));
            }
        }
        Value::Array(list) => list.iter().for_each(|v| collect(v, keys)),
        _ => {}
    }
}

fn list(value: &Value) -> Option<&Vec<Value>> {
    value.get("l").and_then(Value::as_array).or_else(|| value.as_array())
}

impl<'a> Args<'a> {
    pub(super) fn new(call: &'a Call, device: &'a Device) -> Self {
        Self { call, device, tensors: BTreeMap::new() }
    }

    pub(super) fn bind(&mut self, key: String, tensor: Tensor) {
        self.tensors.insert(key, tensor);
    }

    /// A tensor of the file by its key.
    pub fn tensor(&self, key: &str) -> Result<&Tensor> {
        self.tensors.get(key).with_context(|| format!("no input {key}"))
    }

    /// The device of the call.
    pub fn device(&self) -> &Device {
        self.device
    }

    /// Number of positional arguments.
    pub fn count(&self) -> usize {
        self.call.args.len()
    }

    /// PyTorch's name of the variant.
    pub fn variant(&self) -> &str {
        &self.call.variant
    }

    /// The argument at a position or under a keyword; `None` if neither is given, or it is null.
    pub fn get(&self, at: usize, name: &str) -> Option<&Value> {
        self.call.args.get(at).or_else(|| self.call.kwargs.get(name)).filter(|v| !v.is_null())
    }

    fn as_tensor(&self, value: &Value) -> Result<&Tensor> {
        let key = value.get("t").and_then(Value::as_str).with_context(|| format!("{value} is no tensor"))?;
        self.tensor(key)
    }

    /// A tensor by position.
    pub fn t(&self, at: usize) -> Result<&Tensor> {
        self.as_tensor(self.call.args.get(at).with_context(|| format!("no argument {at}"))?)
    }

    /// A tensor by position or keyword, if it is given and is one.
    pub fn opt_t(&self, at: usize, name: &str) -> Option<&Tensor> {
        self.get(at, name).and_then(|v| self.as_tensor(v).ok())
    }

    /// A list of tensors.
    pub fn tensors(&self, at: usize) -> Result<Vec<&Tensor>> {
        let value = self.call.args.get(at).with_context(|| format!("no argument {at}"))?;
        match list(value) {
            Some(items) => items.iter().map(|v| self.as_tensor(v)).collect(),
            None => (at..self.count()).map(|i| self.t(i)).collect(),
        }
    }

    /// A number in its own kind: PyTorch's rules of types look at it.
    pub fn scalar(&self, at: usize, name: &str) -> Result<Option<Scalar>> {
        self.get(at, name).map(scalar).transpose()
    }

    /// A tensor or a number; `default` if neither is given.
    pub fn operand(&self, at: usize, name: &str, default: Scalar) -> Result<Operand<'_>> {
        match self.opt_t(at, name) {
            Some(tensor) => Ok(tensor.into()),
            None => Ok(Operand::Scalar(self.scalar(at, name)?.unwrap_or(default))),
        }
    }

    /// A tensor by position, or a number as one without dimensions, of the type of the tensor `beside` it where that is of its kind.
    pub fn tensor_or_number(&self, at: usize, beside: usize) -> Result<Tensor> {
        let value = self.call.args.get(at).with_context(|| format!("no argument {at}"))?;
        if value.get("t").is_some() {
            return self.as_tensor(value).cloned();
        }
        let other = self.opt_t(beside, "other").map(Tensor::dtype);
        let (value, dtype) = match scalar(value)? {
            Scalar::Float(v) => (v, other.filter(|d| d.is_float()).unwrap_or(DType::F32)),
            Scalar::Int(v) => (v as f64, other.filter(|&d| d != DType::Bool).unwrap_or(DType::I64)),
            Scalar::Bool(v) => (f64::from(u8::from(v)), other.unwrap_or(DType::Bool)),
        };
        Ok(Tensor::full(&[], value, dtype, self.device)?)
    }

    /// A tensor by position, in the type that `dtype` names if it does.
    pub fn t_as(&self, at: usize) -> Result<Tensor> {
        match self.dtype(usize::MAX, "dtype")? {
            Some(dtype) => Ok(self.t(at)?.to_dtype(dtype)?),
            None => Ok(self.t(at)?.clone()),
        }
    }

    /// A result in the type that `dtype` names if it does.
    pub fn named(&self, out: Tensor) -> Result<Tensor> {
        match self.dtype(usize::MAX, "dtype")? {
            Some(dtype) => Ok(out.to_dtype(dtype)?),
            None => Ok(out),
        }
    }

    /// A number, also from `{"float": "inf"}`.
    pub fn f(&self, at: usize, name: &str, default: f64) -> Result<f64> {
        let Some(value) = self.get(at, name) else { return Ok(default) };
        number(value)
    }

    /// An integer.
    pub fn i(&self, at: usize, name: &str, default: i64) -> Result<i64> {
        let Some(value) = self.get(at, name) else { return Ok(default) };
        integer(value)
    }

    /// An integer, if it is given.
    pub fn opt_i(&self, at: usize, name: &str) -> Result<Option<i64>> {
        self.get(at, name).map(integer).transpose()
    }

    /// A truth value.
    pub fn b(&self, at: usize, name: &str, default: bool) -> bool {
        self.get(at, name).map_or(default, |v| v.as_bool().unwrap_or(v.as_i64() == Some(1)))
    }

    /// A word.
    pub fn s(&self, at: usize, name: &str, default: &'static str) -> &str {
        self.get(at, name).and_then(Value::as_str).unwrap_or(default)
    }

    /// Integers: a list, or one as a list.
    pub fn ints(&self, at: usize, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(value) = self.get(at, name) else { return Ok(None) };
        match list(value) {
            Some(items) => items.iter().map(integer).collect::<Result<Vec<_>>>().map(Some),
            None => Ok(Some(vec![integer(value)?])),
        }
    }

    /// Numbers: a list, or one as a list.
    pub fn floats(&self, at: usize, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.get(at, name) else { return Ok(None) };
        match list(value) {
            Some(items) => items.iter().map(number).collect::<Result<Vec<_>>>().map(Some),
            None => Ok(Some(vec![number(value)?])),
        }
    }

    /// Dimensions as the library takes them; empty if none are given.
    pub fn dims(&self, at: usize, name: &str) -> Result<Vec<isize>> {
        Ok(self.ints(at, name)?.unwrap_or_default().into_iter().map(|d| d as isize).collect())
    }

    /// Extents: a list, or all arguments from `at` on.
    pub fn shape(&self, at: usize, name: &str) -> Result<Vec<usize>> {
        let ints = match self.ints(at, name)? {
            Some(ints) if self.get(at, name).is_some_and(|v| list(v).is_some()) => ints,
            Some(_) => (at..self.count()).map(|i| self.i(i, "", 0)).collect::<Result<_>>()?,
            None => Vec::new(),
        };
        ints.into_iter().map(|n| usize::try_from(n).with_context(|| format!("extent {n}"))).collect()
    }

    /// An element type.
    pub fn dtype(&self, at: usize, name: &str) -> Result<Option<DType>> {
        let Some(value) = self.get(at, name) else { return Ok(None) };
        let word =
            value.get("dtype").and_then(Value::as_str).with_context(|| format!("{value} is no dtype"))?;
        Ok(Some(match word {
            "float32" => DType::F32,
            "float64" => DType::F64,
            "float16" => DType::F16,
            "bfloat16" => DType::BF16,
            "int64" => DType::I64,
            "int32" => DType::I32,
            "uint8" => DType::U8,
            "bool" => DType::Bool,
            other => bail!("dtype {other}"),
        }))
    }
}

fn scalar(value: &Value) -> Result<Scalar> {
    Ok(match value {
        Value::Bool(b) => Scalar::Bool(*b),
        value if value.is_i64() => Scalar::Int(integer(value)?),
        value => Scalar::Float(number(value)?),
    })
}

fn number(value: &Value) -> Result<f64> {
    if let Some(word) = value.get("float").and_then(Value::as_str) {
        return word.parse().with_context(|| format!("number {word}"));
    }
    if let Some(b) = value.as_bool() {
        return Ok(f64::from(u8::from(b)));
    }
    value.as_f64().with_context(|| format!("{value} is no number"))
}

fn integer(value: &Value) -> Result<i64> {
    if let Some(b) = value.as_bool() {
        return Ok(i64::from(b));
    }
    value.as_i64().with_context(|| format!("{value} is no integer"))
}

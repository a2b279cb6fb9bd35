//! Arguments of a golden call, by position and by keyword.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::{Operand, Scalar};
use forebay::tensor::Tensor;
use serde_json::Value;

use super::GoldenCall;

/// Position of an argument that PyTorch takes by keyword only.
pub(crate) const NAMED: usize = usize::MAX;

pub struct Args<'a> {
    call: &'a GoldenCall,
    device: &'a Device,
    tensors: BTreeMap<String, Tensor>,
}

/// Returns the keys of the tensors among a call's arguments.
pub(super) fn tensor_keys(call: &GoldenCall) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    call.args.iter().chain(call.kwargs.values()).for_each(|v| collect_tensor_keys(v, &mut keys));
    keys
}

fn collect_tensor_keys(value: &Value, keys: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            if let Some(Value::String(key)) = map.get("t") {
                keys.insert(key.clone());
            }
            if let Some(Value::Array(list)) = map.get("l") {
                list.iter().for_each(|v| collect_tensor_keys(v, keys));
            }
        }
        Value::Array(list) => list.iter().for_each(|v| collect_tensor_keys(v, keys)),
        _ => {}
    }
}

fn as_list(value: &Value) -> Option<&Vec<Value>> {
    value.get("l").and_then(Value::as_array).or_else(|| value.as_array())
}

impl<'a> Args<'a> {
    pub(super) fn new(call: &'a GoldenCall, device: &'a Device) -> Self {
        Self { call, device, tensors: BTreeMap::new() }
    }

    pub(super) fn insert(&mut self, key: String, tensor: Tensor) {
        self.tensors.insert(key, tensor);
    }

    pub fn tensor_by_key(&self, key: &str) -> Result<&Tensor> {
        self.tensors.get(key).with_context(|| format!("no input {key}"))
    }

    pub fn device(&self) -> &Device {
        self.device
    }

    pub fn num_positional(&self) -> usize {
        self.call.args.len()
    }

    /// Returns PyTorch's name of the variant.
    pub fn variant(&self) -> &str {
        &self.call.variant
    }

    /// Returns the argument at a position or with a keyword; `None` if it is missing or null.
    pub fn get(&self, at: usize, name: &str) -> Option<&Value> {
        self.call.args.get(at).or_else(|| self.call.kwargs.get(name)).filter(|v| !v.is_null())
    }

    fn as_tensor(&self, value: &Value) -> Result<&Tensor> {
        let key =
            value.get("t").and_then(Value::as_str).with_context(|| format!("{value} is not a tensor"))?;
        self.tensor_by_key(key)
    }

    /// Returns a tensor by position.
    pub fn tensor(&self, at: usize) -> Result<&Tensor> {
        self.as_tensor(self.call.args.get(at).with_context(|| format!("no argument {at}"))?)
    }

    /// Returns a tensor by position or keyword, if there is one.
    pub fn opt_tensor(&self, at: usize, name: &str) -> Option<&Tensor> {
        self.get(at, name).and_then(|v| self.as_tensor(v).ok())
    }

    /// Returns a list of tensors by position.
    pub fn tensors(&self, at: usize) -> Result<Vec<&Tensor>> {
        let value = self.call.args.get(at).with_context(|| format!("no argument {at}"))?;
        match as_list(value) {
            Some(items) => items.iter().map(|v| self.as_tensor(v)).collect(),
            None => (at..self.num_positional()).map(|i| self.tensor(i)).collect(),
        }
    }

    /// Returns a scalar with its kind, which PyTorch's type promotion depends on.
    pub fn scalar(&self, at: usize, name: &str) -> Result<Option<Scalar>> {
        self.get(at, name).map(scalar).transpose()
    }

    /// Returns a tensor or a scalar operand, or `default`.
    pub fn operand(&self, at: usize, name: &str, default: Scalar) -> Result<Operand<'_>> {
        match self.opt_tensor(at, name) {
            Some(tensor) => Ok(tensor.into()),
            None => Ok(Operand::Scalar(self.scalar(at, name)?.unwrap_or(default))),
        }
    }

    /// Returns a tensor by position. A scalar becomes a tensor without dimensions, with the type of the tensor at
    /// position `neighbour` if that has the same kind.
    pub fn tensor_or_scalar(&self, at: usize, neighbour: usize) -> Result<Tensor> {
        let value = self.call.args.get(at).with_context(|| format!("no argument {at}"))?;
        if value.get("t").is_some() {
            return self.as_tensor(value).cloned();
        }
        let other = self.opt_tensor(neighbour, "other").map(Tensor::dtype);
        let (value, dtype) = match scalar(value)? {
            v @ Scalar::Float(_) => (v, other.filter(|d| d.is_float()).unwrap_or(DType::F32)),
            v @ Scalar::Int(_) => (v, other.filter(|&d| d != DType::Bool).unwrap_or(DType::I64)),
            v @ Scalar::Bool(_) => (v, other.unwrap_or(DType::Bool)),
        };
        Ok(Tensor::full((), value, dtype, self.device)?)
    }

    /// Returns a tensor by position, cast to the type of the argument `dtype` if present.
    pub fn tensor_as_dtype_arg(&self, at: usize) -> Result<Tensor> {
        match self.dtype(NAMED, "dtype")? {
            Some(dtype) => Ok(self.tensor(at)?.to_dtype(dtype)?),
            None => Ok(self.tensor(at)?.clone()),
        }
    }

    /// Casts a result to the type of the argument `dtype` if present.
    pub fn cast_to_dtype_arg(&self, out: Tensor) -> Result<Tensor> {
        match self.dtype(NAMED, "dtype")? {
            Some(dtype) => Ok(out.to_dtype(dtype)?),
            None => Ok(out),
        }
    }

    /// Returns a number, which may be written as `{"float": "inf"}`.
    pub fn float(&self, at: usize, name: &str, default: f64) -> Result<f64> {
        let Some(value) = self.get(at, name) else { return Ok(default) };
        parse_float(value)
    }

    /// Returns a scalar with its kind, or `default`.
    pub fn scalar_or(&self, at: usize, name: &str, default: impl Into<Scalar>) -> Result<Scalar> {
        Ok(self.scalar(at, name)?.unwrap_or(default.into()))
    }

    pub fn int(&self, at: usize, name: &str, default: i64) -> Result<i64> {
        let Some(value) = self.get(at, name) else { return Ok(default) };
        parse_int(value)
    }

    pub fn opt_int(&self, at: usize, name: &str) -> Result<Option<i64>> {
        self.get(at, name).map(parse_int).transpose()
    }

    pub fn flag(&self, at: usize, name: &str, default: bool) -> bool {
        self.get(at, name).map_or(default, |v| v.as_bool().unwrap_or(v.as_i64() == Some(1)))
    }

    pub fn string(&self, at: usize, name: &str, default: &'static str) -> &str {
        self.get(at, name).and_then(Value::as_str).unwrap_or(default)
    }

    /// Returns integers: a list, or a single integer as a list.
    pub fn ints(&self, at: usize, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(value) = self.get(at, name) else { return Ok(None) };
        match as_list(value) {
            Some(items) => items.iter().map(parse_int).collect::<Result<Vec<_>>>().map(Some),
            None => Ok(Some(vec![parse_int(value)?])),
        }
    }

    /// Returns floats: a list, or a single number as a list.
    pub fn floats(&self, at: usize, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.get(at, name) else { return Ok(None) };
        match as_list(value) {
            Some(items) => items.iter().map(parse_float).collect::<Result<Vec<_>>>().map(Some),
            None => Ok(Some(vec![parse_float(value)?])),
        }
    }

    /// Returns dimensions as the library takes them; empty if the argument is missing.
    pub fn dims(&self, at: usize, name: &str) -> Result<Vec<isize>> {
        Ok(self.ints(at, name)?.unwrap_or_default().into_iter().map(|d| d as isize).collect())
    }

    /// Returns a dimension, or another integer that may be negative.
    pub fn dim(&self, at: usize, name: &str, default: i64) -> Result<isize> {
        Ok(self.int(at, name, default)? as isize)
    }

    /// Returns the argument `dim`, if present.
    pub fn opt_dim(&self, at: usize) -> Result<Option<isize>> {
        Ok(self.opt_int(at, "dim")?.map(|d| d as isize))
    }

    /// Returns a shape: a list, or all arguments from `at` on.
    pub fn shape(&self, at: usize, name: &str) -> Result<Vec<usize>> {
        let ints = match self.ints(at, name)? {
            Some(ints) if self.get(at, name).is_some_and(|v| as_list(v).is_some()) => ints,
            Some(_) => (at..self.num_positional()).map(|i| self.int(i, "", 0)).collect::<Result<_>>()?,
            None => Vec::new(),
        };
        ints.into_iter().map(|n| usize::try_from(n).with_context(|| format!("extent {n}"))).collect()
    }

    pub fn dtype(&self, at: usize, name: &str) -> Result<Option<DType>> {
        let Some(value) = self.get(at, name) else { return Ok(None) };
        let word =
            value.get("dtype").and_then(Value::as_str).with_context(|| format!("{value} is not a dtype"))?;
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
        value if value.is_i64() => Scalar::Int(parse_int(value)?),
        value => Scalar::Float(parse_float(value)?),
    })
}

fn parse_float(value: &Value) -> Result<f64> {
    if let Some(word) = value.get("float").and_then(Value::as_str) {
        return word.parse().with_context(|| format!("number {word}"));
    }
    if let Some(b) = value.as_bool() {
        return Ok(f64::from(u8::from(b)));
    }
    value.as_f64().with_context(|| format!("{value} is not a number"))
}

fn parse_int(value: &Value) -> Result<i64> {
    if let Some(b) = value.as_bool() {
        return Ok(i64::from(b));
    }
    value.as_i64().with_context(|| format!("{value} is not an integer"))
}

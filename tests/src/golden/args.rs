//! Arguments of a golden call, by position and by keyword.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, anyhow, bail, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::{Operand, Scalar};
use forebay::tensor::Tensor;
use serde_json::Value;

use super::{GoldenCall, missing_op};

/// Position of an argument that PyTorch takes by keyword only.
pub(crate) const NAMED: usize = usize::MAX;

/// One of Python's subscripts: `x[1]`, `x[2:5]`, `x[None]`, `x[...]`, `x[index]`.
#[derive(Debug)]
pub enum Subscript {
    At(isize),
    Slice { start: Option<i64>, end: Option<i64>, step: usize },
    NewAxis,
    Ellipsis,
    Tensor(Tensor),
}

impl Subscript {
    /// Returns the number of dimensions that the subscript applies to.
    pub fn consumed_dims(&self) -> usize {
        match self {
            Self::At(_) | Self::Slice { .. } => 1,
            Self::NewAxis | Self::Ellipsis => 0,
            Self::Tensor(index) if index.dtype() == DType::Bool => index.rank(),
            Self::Tensor(_) => 1,
        }
    }
}

/// Keywords that change neither values nor gradients of a result.
const WITHOUT_EFFECT: [&str; 8] =
    ["device", "driver", "inplace", "layout", "memory_format", "non_blocking", "pin_memory", "requires_grad"];

pub struct Args<'a> {
    call: &'a GoldenCall,
    device: &'a Device,
    tensors: BTreeMap<String, Tensor>,
    /// Positions and keywords of the arguments that the golden call has understood.
    understood: RefCell<BTreeSet<(usize, &'a str)>>,
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
        Self { call, device, tensors: BTreeMap::new(), understood: RefCell::default() }
    }

    /// Checks that the golden call has understood every argument.
    ///
    /// # Errors
    /// An argument was left unread; the error names it.
    pub(super) fn check_understood(&self) -> Result<()> {
        let understood = self.understood.borrow();
        for (at, value) in self.call.args.iter().enumerate() {
            if !value.is_null() && !understood.contains(&(at, "")) {
                bail!("argument {at} of {} is not understood: {value}", self.call.op_name());
            }
        }
        for (name, value) in &self.call.kwargs {
            let has_effect = !value.is_null() && !WITHOUT_EFFECT.contains(&name.as_str());
            if has_effect && !understood.contains(&(NAMED, name.as_str())) {
                bail!("argument `{name}` of {} is not understood: {value}", self.call.op_name());
            }
        }
        Ok(())
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

    /// Returns the position and the keyword under which an argument is present, and its value.
    fn find(&self, at: usize, name: &str) -> Option<((usize, &'a str), &'a Value)> {
        let positional = self.call.args.get(at).map(|value| ((at, ""), value));
        let named = || self.call.kwargs.get_key_value(name).map(|(name, value)| ((NAMED, &name[..]), value));
        positional.or_else(named).filter(|(_, value)| !value.is_null())
    }

    /// Returns the argument at a position or with a keyword; `None` if it is missing or null. It does not count as
    /// understood.
    pub fn get(&self, at: usize, name: &str) -> Option<&Value> {
        self.find(at, name).map(|(_, value)| value)
    }

    /// Reports whether an argument is present and not null.
    pub fn has(&self, at: usize, name: &str) -> bool {
        self.get(at, name).is_some()
    }

    /// Parses the argument at a position or with a keyword, which is then understood; `None` if it is missing or null.
    fn parse<T>(
        &self,
        at: usize,
        name: &str,
        parse: impl FnOnce(&'a Value) -> Result<T>,
    ) -> Result<Option<T>> {
        let Some((key, value)) = self.find(at, name) else { return Ok(None) };
        let parsed = parse(value).with_context(|| match name {
            "" => format!("argument {at}"),
            name => format!("argument `{name}`"),
        })?;
        self.understood.borrow_mut().insert(key);
        Ok(Some(parsed))
    }

    fn as_tensor(&self, value: &Value) -> Result<&Tensor> {
        let key =
            value.get("t").and_then(Value::as_str).with_context(|| format!("{value} is not a tensor"))?;
        self.tensor_by_key(key)
    }

    /// Returns a tensor by position.
    pub fn tensor(&self, at: usize) -> Result<&Tensor> {
        self.named_tensor(at, "")
    }

    /// Returns a tensor by position or keyword.
    pub fn named_tensor(&self, at: usize, name: &str) -> Result<&Tensor> {
        self.parse(at, name, |v| self.as_tensor(v))?.with_context(|| format!("no argument {at} {name}"))
    }

    /// Returns a tensor by position or keyword; `None` if it is missing or no tensor.
    pub fn opt_tensor(&self, at: usize, name: &str) -> Option<&Tensor> {
        self.parse(at, name, |v| self.as_tensor(v)).ok().flatten()
    }

    /// Returns a list of tensors by position.
    pub fn tensors(&self, at: usize) -> Result<Vec<&Tensor>> {
        let value = self.get(at, "").with_context(|| format!("no argument {at}"))?;
        if as_list(value).is_none() {
            return (at..self.num_positional()).map(|i| self.tensor(i)).collect();
        }
        Ok(self.optional_tensors(at)?.into_iter().flatten().collect())
    }

    /// Returns a list of tensors by position or keyword.
    pub fn named_tensors(&self, at: usize, name: &str) -> Result<Vec<&Tensor>> {
        let parsed = self.parse(at, name, |value| {
            let items = as_list(value).with_context(|| format!("{value} is not a list"))?;
            items.iter().map(|v| self.as_tensor(v)).collect()
        })?;
        parsed.with_context(|| format!("no argument {at} {name}"))
    }

    /// Returns subscripts by position. A list of numbers is an index; with others in it, it is a tuple.
    pub fn subscripts(&self, at: usize) -> Result<Vec<Subscript>> {
        let parsed = self.parse(at, "", |value| match as_list(value) {
            Some(items) if !items.iter().all(Value::is_i64) => {
                items.iter().map(|item| self.subscript(item)).collect()
            }
            _ => Ok(vec![self.subscript(value)?]),
        })?;
        parsed.with_context(|| format!("no argument {at}"))
    }

    fn subscript(&self, value: &Value) -> Result<Subscript> {
        if let Some(items) = as_list(value) {
            let indices: Vec<i64> = items.iter().map(parse_int).collect::<Result<_>>()?;
            return Ok(Subscript::Tensor(Tensor::from_slice(&indices, indices.len(), self.device)?));
        }
        if let Some(bounds) = value.get("slice") {
            let bound = |k: usize| Some(&bounds[k]).filter(|v| !v.is_null()).map(parse_int).transpose();
            let step = usize::try_from(bound(2)?.unwrap_or(1))?;
            return Ok(Subscript::Slice { start: bound(0)?, end: bound(1)?, step });
        }
        Ok(match value {
            Value::Null => Subscript::NewAxis,
            value if value.get("ellipsis").is_some() => Subscript::Ellipsis,
            value if value.is_i64() => Subscript::At(isize::try_from(parse_int(value)?)?),
            value => Subscript::Tensor(self.as_tensor(value)?.clone()),
        })
    }

    /// Returns a list of tensors by position, in which some may be null.
    pub fn optional_tensors(&self, at: usize) -> Result<Vec<Option<&Tensor>>> {
        let parsed = self.parse(at, "", |value| {
            let items = as_list(value).with_context(|| format!("{value} is not a list"))?;
            items.iter().map(|v| (!v.is_null()).then(|| self.as_tensor(v)).transpose()).collect()
        })?;
        parsed.with_context(|| format!("no argument {at}"))
    }

    /// Returns a scalar with its kind, which PyTorch's type promotion depends on.
    pub fn scalar(&self, at: usize, name: &str) -> Result<Option<Scalar>> {
        self.parse(at, name, scalar)
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
        if let Some(tensor) = self.opt_tensor(at, "") {
            return Ok(tensor.clone());
        }
        let other = self.opt_tensor(neighbour, "other").map(Tensor::dtype);
        let value = self.scalar(at, "")?.with_context(|| format!("no argument {at}"))?;
        let (value, dtype) = match value {
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
        Ok(self.opt_float(at, name)?.unwrap_or(default))
    }

    pub fn opt_float(&self, at: usize, name: &str) -> Result<Option<f64>> {
        self.parse(at, name, parse_float)
    }

    /// Returns a scalar with its kind, or `default`.
    pub fn scalar_or(&self, at: usize, name: &str, default: impl Into<Scalar>) -> Result<Scalar> {
        Ok(self.scalar(at, name)?.unwrap_or(default.into()))
    }

    pub fn int(&self, at: usize, name: &str, default: i64) -> Result<i64> {
        Ok(self.opt_int(at, name)?.unwrap_or(default))
    }

    pub fn opt_int(&self, at: usize, name: &str) -> Result<Option<i64>> {
        self.parse(at, name, parse_int)
    }

    /// Returns a count, an extent or an index from the start.
    pub fn count(&self, at: usize, name: &str, default: usize) -> Result<usize> {
        Ok(self.parse(at, name, parse_count)?.unwrap_or(default))
    }

    /// Returns a truth value, which may be 0 or 1, or `default`. Another value is not understood.
    pub fn flag(&self, at: usize, name: &str, default: bool) -> bool {
        self.parse(at, name, parse_flag).ok().flatten().unwrap_or(default)
    }

    /// Returns a string, or `default`. Another value is not understood.
    pub fn string(&self, at: usize, name: &str, default: &'static str) -> &str {
        let parse = |v: &'a Value| v.as_str().with_context(|| format!("{v} is not a string"));
        self.parse(at, name, parse).ok().flatten().unwrap_or(default)
    }

    /// Returns integers: a list, or a single integer as a list.
    pub fn ints(&self, at: usize, name: &str) -> Result<Option<Vec<i64>>> {
        self.parse(at, name, |value| match as_list(value) {
            Some(items) => items.iter().map(parse_int).collect(),
            None => Ok(vec![parse_int(value)?]),
        })
    }

    /// Returns floats: a list, or a single number as a list.
    pub fn floats(&self, at: usize, name: &str) -> Result<Option<Vec<f64>>> {
        self.parse(at, name, |value| match as_list(value) {
            Some(items) => items.iter().map(parse_float).collect(),
            None => Ok(vec![parse_float(value)?]),
        })
    }

    /// Returns `N` counts: a list, or one for all; `None` if missing or empty.
    pub fn counts<const N: usize>(&self, at: usize, name: &str) -> Result<Option<[usize; N]>> {
        let parsed = self.parse(at, name, |value| {
            let items = as_list(value).map_or(std::slice::from_ref(value), Vec::as_slice);
            let counts: Vec<usize> = items.iter().map(parse_count).collect::<Result<_>>()?;
            match counts[..] {
                [] => Ok(None),
                [n] => Ok(Some([n; N])),
                ref list => {
                    Ok(Some(list.try_into().with_context(|| format!("{value} has not {N} numbers"))?))
                }
            }
        })?;
        Ok(parsed.flatten())
    }

    /// Returns `N` extents, of which null and missing ones are those of `own`.
    pub fn extents<const N: usize>(&self, at: usize, name: &str, own: [usize; N]) -> Result<[usize; N]> {
        let parsed = self.parse(at, name, |value| {
            let items = as_list(value).map_or_else(|| vec![value.clone(); N], Clone::clone);
            let items = if items.len() == 1 { vec![items[0].clone(); N] } else { items };
            ensure!(items.len() == N, "{value} has not {N} numbers");
            let mut sizes = own;
            for (size, item) in sizes.iter_mut().zip(&items).filter(|(_, item)| !item.is_null()) {
                *size = parse_count(item)?;
            }
            Ok(sizes)
        })?;
        Ok(parsed.unwrap_or(own))
    }

    /// Returns two lists of dimensions.
    pub fn two_lists(&self, at: usize, name: &str) -> Result<[Vec<isize>; 2]> {
        let parsed = self.parse(at, name, |value| {
            let lists = as_list(value).with_context(|| format!("{value} is not a list"))?;
            let dims = |list: &Value| {
                let list = as_list(list).with_context(|| format!("{list} is not a list"))?;
                list.iter().map(|v| Ok(isize::try_from(parse_int(v)?)?)).collect::<Result<Vec<_>>>()
            };
            let lists: Vec<_> = lists.iter().map(dims).collect::<Result<_>>()?;
            lists.try_into().map_err(|lists: Vec<_>| anyhow!("{} lists", lists.len()))
        })?;
        parsed.with_context(|| format!("no argument {at} {name}"))
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
        self.parse(at, name, parse_dtype)
    }
}

fn parse_dtype(value: &Value) -> Result<DType> {
    let word =
        value.get("dtype").and_then(Value::as_str).with_context(|| format!("{value} is not a dtype"))?;
    Ok(match word {
        "float32" => DType::F32,
        "float64" => DType::F64,
        "float16" => DType::F16,
        "bfloat16" => DType::BF16,
        "int64" => DType::I64,
        "int32" => DType::I32,
        "uint8" => DType::U8,
        "bool" => DType::Bool,
        other => return Err(missing_op(other)),
    })
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

fn parse_count(value: &Value) -> Result<usize> {
    let n = parse_int(value)?;
    usize::try_from(n).with_context(|| format!("{n} is negative"))
}

fn parse_flag(value: &Value) -> Result<bool> {
    match (value.as_bool(), value.as_i64()) {
        (Some(flag), _) => Ok(flag),
        (_, Some(number @ (0 | 1))) => Ok(number == 1),
        _ => bail!("{value} is no truth value"),
    }
}

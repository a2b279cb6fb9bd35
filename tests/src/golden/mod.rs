//! Golden data: PyTorch's own results and gradients, call by call.
//!
//! `golden.json` names the calls, `golden.safetensors` holds their tensors (see `tests/golden/README.md`). Every call is
//! made on a device, its results and the gradients of its inputs are compared, and what is not supported is counted
//! with its reason. A call passes if every tensor has the shape and type that PyTorch gave and every element lies within
//! `1e-5 + 1.3e-6 * |expected|` (PyTorch's own tolerance for f32), unless the exceptions file says otherwise.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use forebay::autograd::GradOptions;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::tensor::Tensor;
use serde::Deserialize;

pub mod args;
mod exceptions;
mod operators;
mod table;

use args::Args;
use exceptions::Exceptions;
pub use table::Table;

pub use operators::page;

/// Absolute and relative tolerance of PyTorch for f32.
const TOLERANCE: (f64, f64) = (1e-5, 1.3e-6);

/// One recorded call.
#[derive(Clone, Debug, Deserialize)]
pub struct Call {
    /// PyTorch's name.
    pub op: String,
    /// PyTorch's name of the variant; empty for the plain one.
    #[serde(default)]
    pub variant: String,
    /// Which of the database's samples it was.
    pub sample: usize,
    /// Positional arguments.
    pub args: Vec<serde_json::Value>,
    /// Keyword arguments.
    pub kwargs: BTreeMap<String, serde_json::Value>,
    /// Keys of the outputs.
    pub outs: Vec<String>,
    /// Indices of the outputs that take a cotangent.
    #[serde(default)]
    pub diff_outs: Vec<usize>,
    /// Keys of the cotangents.
    #[serde(default)]
    pub cotangents: Vec<String>,
    /// Key of an input -> key of its gradient.
    #[serde(default)]
    pub grads: BTreeMap<String, String>,
}

impl Call {
    /// `div.floor_rounding #3`.
    pub fn name(&self) -> String {
        format!("{} #{}", self.op_name(), self.sample)
    }

    /// The operation with its variant.
    pub fn op_name(&self) -> String {
        if self.variant.is_empty() { self.op.clone() } else { format!("{}.{}", self.op, self.variant) }
    }
}

#[derive(Deserialize)]
struct Index {
    calls: Vec<Call>,
}

/// Calls and their tensors.
pub struct Golden {
    /// Every call, in the order of the file.
    pub calls: Vec<Call>,
    bytes: Vec<u8>,
    exceptions: Exceptions,
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything agrees.
    Passed,
    /// Something differs: what.
    Failed(String),
    /// The library does not offer this: why.
    Unsupported(String),
}

/// A host tensor of the file.
pub struct Host<'a> {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub data: &'a [u8],
}

impl Golden {
    /// Reads a folder.
    pub fn load(dir: &Path) -> Result<Self> {
        let json = dir.join("golden.json");
        let text = std::fs::read_to_string(&json).with_context(|| format!("reading {}", json.display()))?;
        let index: Index =
            serde_json::from_str(&text).with_context(|| format!("parsing {}", json.display()))?;
        let tensors = dir.join("golden.safetensors");
        let bytes = std::fs::read(&tensors).with_context(|| format!("reading {}", tensors.display()))?;
        Ok(Self { calls: index.calls, bytes, exceptions: Exceptions::load()? })
    }

    /// Makes every call on a device and tells each outcome.
    pub fn run(&self, device: &Device, filter: &[String]) -> Result<Vec<(String, Outcome)>> {
        let file = safetensors::SafeTensors::deserialize(&self.bytes)?;
        let table = Table::new();
        let mut outcomes = Vec::new();
        for call in &self.calls {
            let name = call.name();
            if !filter.is_empty() && !filter.iter().any(|f| name.contains(f.as_str())) {
                continue;
            }
            let before = device.memory().allocated();
            let outcome = match make(call, &table, &file, device, &self.exceptions) {
                Ok(()) => Outcome::Passed,
                Err(e) => match e.downcast_ref::<Error>() {
                    Some(Error::Unsupported { .. } | Error::DType { .. }) => {
                        Outcome::Unsupported(format!("{e:#}"))
                    }
                    _ if e.downcast_ref::<table::Missing>().is_some() => {
                        Outcome::Unsupported(format!("{e:#}"))
                    }
                    _ => Outcome::Failed(format!("{e:#}")),
                },
            };
            let after = device.memory().allocated();
            let outcome = match outcome {
                Outcome::Passed if after != before => Outcome::Failed(format!(
                    "{} bytes stay allocated after the call",
                    after as i64 - before as i64
                )),
                other => other,
            };
            outcomes.push((name, self.exceptions.apply(call, device, outcome)));
        }
        Ok(outcomes)
    }
}

/// A tensor of the file, on the host.
fn host<'a>(file: &'a safetensors::SafeTensors<'a>, key: &str) -> Result<Host<'a>> {
    let view = file.tensor(key).with_context(|| format!("tensor {key}"))?;
    let dtype = match view.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::F64 => DType::F64,
        safetensors::Dtype::I64 => DType::I64,
        safetensors::Dtype::I32 => DType::I32,
        safetensors::Dtype::BOOL => DType::Bool,
        safetensors::Dtype::U8 => DType::U8,
        other => bail!("tensor {key} has type {other:?}"),
    };
    Ok(Host { dtype, shape: view.shape().to_vec(), data: view.data() })
}

fn make(
    call: &Call,
    table: &Table,
    file: &safetensors::SafeTensors<'_>,
    device: &Device,
    exceptions: &Exceptions,
) -> Result<()> {
    let f = table.get(&call.op)?;
    let mut args = Args::new(call, device);
    for key in args.keys() {
        let host = host(file, &key)?;
        let tensor = Tensor::from_bytes(host.data, &host.shape, host.dtype, device)?;
        let tensor = if call.grads.contains_key(&key) { tensor.requires_grad_()? } else { tensor };
        args.bind(key, tensor);
    }
    let outs = f(&args)?;
    if outs.len() != call.outs.len() {
        bail!("{} results, expected {}", outs.len(), call.outs.len());
    }
    let tolerance = exceptions.tolerance(call, device).unwrap_or(TOLERANCE);
    for (i, (out, key)) in outs.iter().zip(&call.outs).enumerate() {
        compare(out, &host(file, key)?, tolerance).with_context(|| format!("result {i}"))?;
    }
    if call.grads.is_empty() {
        return Ok(());
    }
    let mut roots = Vec::new();
    let mut seeds = Vec::new();
    for (&i, key) in call.diff_outs.iter().zip(&call.cotangents) {
        let seed = host(file, key)?;
        if !outs[i].requires_grad() {
            bail!("result {i} lost its history: an input requires a gradient");
        }
        roots.push(outs[i].clone());
        seeds.push(Tensor::from_bytes(seed.data, &seed.shape, seed.dtype, device)?);
    }
    let inputs: Vec<Tensor> = call.grads.keys().map(|k| args.tensor(k).cloned()).collect::<Result<_>>()?;
    let grads = forebay::autograd::grad_allow_unused(
        &roots,
        &inputs,
        &GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() },
    )?;
    for ((key, grad_key), grad) in call.grads.iter().zip(&grads) {
        let Some(grad) = grad else { bail!("no gradient reached {key}") };
        compare(grad, &host(file, grad_key)?, tolerance).with_context(|| format!("gradient of {key}"))?;
    }
    Ok(())
}

/// Compares a tensor with the expected one.
fn compare(got: &Tensor, expected: &Host<'_>, (atol, rtol): (f64, f64)) -> Result<()> {
    if got.shape() != expected.shape {
        bail!("shape {:?}, expected {:?}", got.shape(), expected.shape);
    }
    if got.dtype() != expected.dtype {
        bail!("type {}, expected {}", got.dtype(), expected.dtype);
    }
    if got.device().is_null() {
        // It has no contents: shapes and types are what can be compared.
        return Ok(());
    }
    let values = got.to_f64s()?;
    let wanted = expected.values();
    let mut worst: Option<(f64, usize)> = None;
    for (i, (&a, &b)) in values.iter().zip(&wanted).enumerate() {
        let good =
            a == b || (a.is_nan() && b.is_nan()) || (b.is_finite() && (a - b).abs() <= atol + rtol * b.abs());
        if !good {
            let distance = (a - b).abs();
            // NaN against a number is the worst there is.
            if distance.is_nan() || worst.is_none_or(|(w, _)| distance > w) {
                worst = Some((distance, i));
            }
        }
    }
    if let Some((_, i)) = worst {
        bail!("element {i} of {:?} is {:e}, expected {:e}", expected.shape, values[i], wanted[i]);
    }
    Ok(())
}

impl Host<'_> {
    fn values(&self) -> Vec<f64> {
        fn all<const N: usize>(data: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            data.as_chunks::<N>().0.iter().map(|c| f(*c)).collect()
        }
        match self.dtype {
            DType::F32 => all(self.data, |b| f32::from_le_bytes(b).into()),
            DType::F64 => all(self.data, f64::from_le_bytes),
            DType::I64 => all(self.data, |b| i64::from_le_bytes(b) as f64),
            DType::I32 => all(self.data, |b| i32::from_le_bytes(b).into()),
            _ => self.data.iter().map(|&b| b.into()).collect(),
        }
    }
}

/// Prints what failed, what is unsupported by operation, and the closing line; returns the number of failures.
pub fn report(outcomes: &[(String, Outcome)], device: &Device, verbose: bool) -> usize {
    let mut passed = 0;
    let mut failed = 0;
    let mut reasons: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for (name, outcome) in outcomes {
        match outcome {
            Outcome::Passed => passed += 1,
            Outcome::Failed(why) => {
                failed += 1;
                println!("FAILED {name}: {why}");
            }
            Outcome::Unsupported(why) => {
                let op = name.split(" #").next().unwrap_or(name);
                reasons.entry(op).or_insert((0, why)).0 += 1;
            }
        }
    }
    let unsupported: usize = reasons.values().map(|(n, _)| n).sum();
    if verbose {
        for (op, (n, why)) in &reasons {
            println!("unsupported {op} ({n}): {why}");
        }
    }
    println!(
        "golden: {passed} passed, {failed} failed, {unsupported} unsupported of {} on {}",
        outcomes.len(),
        device.info().backend
    );
    failed
}

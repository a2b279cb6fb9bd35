//! Golden calls: PyTorch's own results and gradients, call by call.
//!
//! `golden.json` lists the calls, `golden.safetensors` has their tensors (see `tests/golden/README.md`). Every call
//! runs on a device; its results and the gradients of its inputs are compared. Unsupported calls are counted with
//! their reason. A call passes if every tensor has PyTorch's shape and type, and every element differs by at most
//! `1e-5 + 1.3e-6 * |expected|`. This is PyTorch's own f32 tolerance; the exceptions file may widen it.
//!
//! Calls can run in another type. In f64 they are compared with the recorded values. In f16 and bf16 the expected
//! result is our own f32 call with the same rounded inputs, so that rounding of inputs does not count. The tolerance
//! is PyTorch's for the type, or twice PyTorch's own error in this type (`half_errors.json`).

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use forebay::autograd::GradOptions;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::tensor::Tensor;
use serde::Deserialize;

pub mod args;
mod exceptions;
mod operators;
mod ties;

use args::Args;
use exceptions::Exceptions;

pub use operators::render_page;

use crate::names;
use crate::operations::{GoldenFn, Operation, registry};

/// Device and type of golden calls.
#[derive(Clone, Copy, Debug)]
pub struct CallConfig<'a> {
    /// Device that runs the calls.
    pub device: &'a Device,
    /// Type to which f32 tensors are cast; `None` for none.
    pub dtype: Option<DType>,
}

impl CallConfig<'_> {
    /// Returns PyTorch's absolute and relative tolerance for the type. f64 is compared with PyTorch's f32 results.
    fn tolerance(&self) -> (f64, f64) {
        match self.dtype {
            Some(DType::F16) => (1e-5, 1e-3),
            Some(DType::BF16) => (1e-5, 1.6e-2),
            _ => (1e-5, 1.3e-6),
        }
    }

    fn is_half(&self) -> bool {
        self.dtype.is_some_and(|dtype| dtype.size() == 2)
    }
}

#[derive(Clone, Debug, Deserialize)]
pub struct GoldenCall {
    /// PyTorch's name of the operation.
    pub op: String,
    /// PyTorch's name of the variant; empty for the default one.
    #[serde(default)]
    pub variant: String,
    /// Index of the sample in PyTorch's operator database.
    pub sample: usize,
    pub args: Vec<serde_json::Value>,
    pub kwargs: BTreeMap<String, serde_json::Value>,
    pub outs: Vec<String>,
    /// Indices of the outputs with a cotangent (the incoming gradient).
    #[serde(default)]
    pub diff_outs: Vec<usize>,
    #[serde(default)]
    pub cotangents: Vec<String>,
    /// Keys of inputs, mapped to the keys of their gradients.
    #[serde(default)]
    pub grads: BTreeMap<String, String>,
    /// PyTorch's error message, if it rejects the call; then ours must be an error as well.
    #[serde(default)]
    pub error: Option<String>,
}

impl GoldenCall {
    /// Returns the call's name with its sample: `div.floor_rounding #3`.
    pub fn name(&self) -> String {
        format!("{} #{}", self.op_name(), self.sample)
    }

    /// Returns the operation's name with its variant.
    pub fn op_name(&self) -> String {
        if self.variant.is_empty() { self.op.clone() } else { format!("{}.{}", self.op, self.variant) }
    }

    /// Reports whether the call takes f32 tensors.
    fn has_floats(&self, file: &safetensors::SafeTensors<'_>) -> bool {
        let keys = args::tensor_keys(self);
        keys.iter().any(|key| read_host_tensor(file, key).is_ok_and(|host| host.dtype == DType::F32))
    }

    /// Returns the expected type of a recorded f32 result, and whether f32 is acceptable too. The result stays f32 if
    /// the call names f32 as its type, or has no f32 tensors to cast.
    fn expected_f32(&self, file: &safetensors::SafeTensors<'_>, how: &CallConfig<'_>) -> (DType, bool) {
        let kept = self.names_f32() || !self.has_floats(file);
        (how.dtype.filter(|_| !kept).unwrap_or(DType::F32), self.names_f32())
    }

    fn names_f32(&self) -> bool {
        let is = |v: &serde_json::Value| v.get("dtype").and_then(|d| d.as_str()) == Some("float32");
        self.op == "float" || self.args.iter().chain(self.kwargs.values()).any(is)
    }
}

#[derive(Deserialize)]
struct CallIndex {
    calls: Vec<GoldenCall>,
}

pub struct GoldenSet {
    /// Every call, in the order of the file.
    pub calls: Vec<GoldenCall>,
    bytes: Vec<u8>,
    /// Errors of PyTorch's own 16-bit results compared with its f32 results, by type and call.
    half_errors: BTreeMap<String, BTreeMap<String, Option<f64>>>,
    exceptions: Exceptions,
}

/// Outcome of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All results agree.
    Passed,
    /// A result differs; the message describes the difference.
    Failed(String),
    /// The library does not support the call; the message gives the reason.
    Unsupported(String),
    /// The exceptions file excuses a difference; the message gives the reason.
    ExpectedFailure(String),
}

/// Tensor of the file, in host memory.
pub struct HostTensor<'a> {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub data: &'a [u8],
}

impl GoldenSet {
    /// Reads `golden.json` and `golden.safetensors` of a folder.
    pub fn load(dir: &Path) -> Result<Self> {
        let json = dir.join("golden.json");
        let text = std::fs::read_to_string(&json).with_context(|| format!("reading {}", json.display()))?;
        let index: CallIndex =
            serde_json::from_str(&text).with_context(|| format!("parsing {}", json.display()))?;
        let tensors = dir.join("golden.safetensors");
        let bytes = std::fs::read(&tensors).with_context(|| format!("reading {}", tensors.display()))?;
        let half_errors = match std::fs::read_to_string(dir.join("half_errors.json")) {
            Ok(text) => serde_json::from_str(&text).context("parsing half_errors.json")?,
            Err(_) => BTreeMap::new(),
        };
        Ok(Self { calls: index.calls, bytes, half_errors, exceptions: Exceptions::load()? })
    }

    fn tensors(&self) -> Result<safetensors::SafeTensors<'_>> {
        Ok(safetensors::SafeTensors::deserialize(&self.bytes)?)
    }

    /// Runs every call whose name contains one of `filter`, and returns all outcomes.
    pub fn run(&self, how: &CallConfig<'_>, filter: &[String]) -> Result<Vec<(String, Outcome)>> {
        let file = self.tensors()?;
        let mut outcomes = Vec::new();
        for call in &self.calls {
            let name = call.name();
            if !filter.is_empty() && !filter.iter().any(|f| name.contains(f.as_str())) {
                continue;
            }
            let before = how.device.memory().allocated();
            // A panic fails only its own call.
            let judged = catch_unwind(AssertUnwindSafe(|| self.check_call(call, &file, how)));
            let outcome = match judged.unwrap_or_else(|_| Err(anyhow!("panics"))) {
                Ok(()) => Outcome::Passed,
                Err(e) => match e.downcast_ref::<Error>() {
                    Some(Error::Unsupported { .. } | Error::DType { .. }) => {
                        Outcome::Unsupported(format!("{e:#}"))
                    }
                    _ if e.downcast_ref::<MissingOp>().is_some() => Outcome::Unsupported(format!("{e:#}")),
                    _ => Outcome::Failed(format!("{e:#}")),
                },
            };
            let after = how.device.memory().allocated();
            let outcome = match outcome {
                Outcome::Passed if after != before => Outcome::Failed(format!(
                    "{} bytes stay allocated after the call",
                    after as i64 - before as i64
                )),
                other => other,
            };
            outcomes.push((name, self.exceptions.apply(call, how, outcome)));
        }
        Ok(outcomes)
    }

    /// Runs a call and compares its results.
    fn check_call(
        &self,
        call: &GoldenCall,
        file: &safetensors::SafeTensors<'_>,
        how: &CallConfig<'_>,
    ) -> Result<()> {
        if let Some(error) = &call.error {
            return match run_call(call, file, how.device, Ok) {
                Err(e) if e.downcast_ref::<MissingOp>().is_some() => Err(e),
                Err(_) => Ok(()),
                Ok(_) => bail!("gives a result; PyTorch says: {error}"),
            };
        }
        let CallResult { outs, grads } = run_call(call, file, how.device, |t| match how.dtype {
            Some(dtype) => Ok(t.to_dtype(dtype)?),
            None => Ok(t),
        })?;
        let exact = match how.dtype {
            Some(dtype) if how.is_half() => {
                let rounded = |t: Tensor| Ok(t.to_dtype(dtype)?.to_dtype(DType::F32)?);
                Some(run_call(call, file, how.device, rounded).context("in f32, to compare with")?)
            }
            _ => None,
        };
        let agree = |tolerance: (f64, f64)| -> Result<()> {
            let keys = call.outs.iter().chain(call.grads.values());
            let results = (0..outs.len()).map(|i| format!("result {i}"));
            let names = results.chain(call.grads.keys().map(|key| format!("gradient of {key}")));
            let exact = exact.iter().flat_map(|made| made.outs.iter().chain(&made.grads)).map(Some);
            let exact = exact.chain(std::iter::repeat(None));
            for (((got, key), exact), name) in outs.iter().chain(&grads).zip(keys).zip(exact).zip(names) {
                let expected = read_host_tensor(file, key)?;
                let near =
                    compare_tensor(got, &expected, exact, how, call.expected_f32(file, how), tolerance);
                let index = call.outs.iter().position(|out| out == key).filter(|_| exact.is_none());
                match (index, near) {
                    (Some(result), Err(_))
                        if self.is_equivalent_tie(call, result, got, &expected, file)? => {}
                    (_, near) => near.context(name)?,
                }
            }
            Ok(())
        };
        if self.exceptions.is_random(call, how) {
            return agree((f64::MAX, 0.0));
        }
        let own = agree(self.tolerance(call, how));
        match self.exceptions.tolerance(call, how) {
            Some((_, true)) if own.is_ok() => {
                bail!("lies within the type's tolerance: remove its entry from tests/exceptions.json")
            }
            Some((wider, _)) if own.is_err() => agree(wider),
            _ => own,
        }
    }

    /// Reports whether a result of indices names elements that equal those of PyTorch's indices.
    fn is_equivalent_tie(
        &self,
        call: &GoldenCall,
        result: usize,
        got: &Tensor,
        expected: &HostTensor<'_>,
        file: &safetensors::SafeTensors<'_>,
    ) -> Result<bool> {
        let Some(input) = call.args.first().and_then(|v| v.get("t")?.as_str()) else { return Ok(false) };
        Ok(got.shape() == expected.shape
            && got.dtype() == expected.dtype
            && got.dtype().is_int()
            && ties::are_equivalent_indices(
                call,
                result,
                &read_host_tensor(file, input)?,
                &got.to_f64s()?,
                &expected.values(),
            ))
    }

    /// Returns the tolerance of a call. In 16-bit types it is at least twice PyTorch's own error.
    fn tolerance(&self, call: &GoldenCall, how: &CallConfig<'_>) -> (f64, f64) {
        let (absolute, relative) = how.tolerance();
        let own = how.dtype.and_then(|dtype| *self.half_errors.get(dtype.name())?.get(&call.name())?);
        (own.map_or(absolute, |own| absolute.max(2.0 * own)), relative)
    }
}

fn read_host_tensor<'a>(file: &'a safetensors::SafeTensors<'a>, key: &str) -> Result<HostTensor<'a>> {
    let view = file.tensor(key).with_context(|| format!("tensor {key}"))?;
    let dtype = match view.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::F64 => DType::F64,
        safetensors::Dtype::I64 => DType::I64,
        safetensors::Dtype::I32 => DType::I32,
        safetensors::Dtype::BOOL => DType::Bool,
        safetensors::Dtype::U8 => DType::U8,
        safetensors::Dtype::F16 => DType::F16,
        safetensors::Dtype::BF16 => DType::BF16,
        other => bail!("tensor {key} has type {other:?}"),
    };
    Ok(HostTensor { dtype, shape: view.shape().to_vec(), data: view.data() })
}

/// Error of a call that cannot be compared, with the reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct MissingOp(String);

/// Error for an operation, or a form of its arguments, that the library does not have.
pub(crate) fn missing_op(what: &str) -> anyhow::Error {
    MissingOp(format!("The library has no `{what}` yet.")).into()
}

/// Returns the operation that has a name of PyTorch's operator database, and its golden call: by the registry, or by
/// the table of PyTorch's names if the name is another one for the same function.
pub(crate) fn find_call(name: &str) -> Result<(&'static Operation, GoldenFn)> {
    let renamed = || registry().find_golden(names::alias(name)?);
    registry().find_golden(name).or_else(renamed).ok_or_else(|| match names::reason_of_absence(name) {
        Some(reason) => MissingOp(format!("no `{name}`: {reason}")).into(),
        None => missing_op(name),
    })
}

/// Results of a call, and the gradients of its differentiable inputs.
struct CallResult {
    outs: Vec<Tensor>,
    grads: Vec<Tensor>,
}

/// Runs a call with its f32 tensors cast by `cast`.
fn run_call(
    call: &GoldenCall,
    file: &safetensors::SafeTensors<'_>,
    device: &Device,
    cast: impl Fn(Tensor) -> Result<Tensor>,
) -> Result<CallResult> {
    let (_, f) = find_call(&call.op)?;
    let tensor = |key: &str| {
        let host = read_host_tensor(file, key)?;
        let tensor = Tensor::from_bytes(host.data, &host.shape, host.dtype, device)?;
        if host.dtype == DType::F32 { cast(tensor) } else { Ok(tensor) }
    };
    let mut args = Args::new(call, device);
    for key in args::tensor_keys(call) {
        let tensor = tensor(&key)?;
        let tensor = if call.grads.contains_key(&key) { tensor.to_leaf()? } else { tensor };
        args.insert(key, tensor);
    }
    // Random operations draw equal values in every type.
    device.manual_seed(0);
    let outs = f(&args)?;
    args.check_understood()?;
    if call.error.is_none() && outs.len() != call.outs.len() {
        bail!("{} results, expected {}", outs.len(), call.outs.len());
    }
    if call.grads.is_empty() {
        return Ok(CallResult { outs, grads: Vec::new() });
    }
    let mut roots = Vec::new();
    let mut seeds = Vec::new();
    for (&i, key) in call.diff_outs.iter().zip(&call.cotangents) {
        if !outs[i].requires_grad() {
            bail!("result {i} lost its history: an input requires a gradient");
        }
        roots.push(outs[i].clone());
        // A result with its own fixed type needs a cotangent of this type.
        seeds.push(tensor(key)?.to_dtype(outs[i].dtype())?);
    }
    let inputs: Vec<Tensor> =
        call.grads.keys().map(|k| args.tensor_by_key(k).cloned()).collect::<Result<_>>()?;
    let mut grads = Vec::new();
    let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() };
    for (key, grad) in call.grads.keys().zip(forebay::autograd::grad_allow_unused(&roots, &inputs, &options)?)
    {
        grads.push(grad.with_context(|| format!("no gradient reached {key}"))?);
    }
    let outs = outs.iter().map(Tensor::detach).collect();
    Ok(CallResult { outs, grads })
}

/// Compares a tensor with `exact` if present, otherwise with the recorded one.
fn compare_tensor(
    got: &Tensor,
    expected: &HostTensor<'_>,
    exact: Option<&Tensor>,
    how: &CallConfig<'_>,
    (expected_f32, or_f32): (DType, bool),
    (atol, rtol): (f64, f64),
) -> Result<()> {
    if got.shape() != expected.shape {
        bail!("shape {:?}, expected {:?}", got.shape(), expected.shape);
    }
    let dtype = if expected.dtype == DType::F32 { expected_f32 } else { expected.dtype };
    if got.dtype() != dtype && !(or_f32 && Some(got.dtype()) == how.dtype) {
        bail!("type {}, expected {dtype}", got.dtype());
    }
    if got.device().is_null() {
        // The null device has no contents: only shapes and types are compared.
        return Ok(());
    }
    // PyTorch's tolerances for recorded tensors of other types than f32, unless an exception is wider.
    let (atol, rtol) = match expected.dtype {
        DType::F16 => (atol.max(1e-5), rtol.max(1e-3)),
        DType::BF16 => (atol.max(1e-5), rtol.max(1.6e-2)),
        DType::F64 if how.dtype.is_none() && atol <= 1e-5 => (1e-7, 1e-7),
        _ => (atol, rtol),
    };
    let values = got.to_f64s()?;
    let wanted = exact.map_or_else(|| Ok(expected.values()), Tensor::to_f64s)?;
    let largest = if how.dtype == Some(DType::F16) { 65504.0 } else { f64::MAX };
    let mut worst: Option<(f64, usize)> = None;
    for (i, (&a, &b)) in values.iter().zip(&wanted).enumerate() {
        // Values beyond f16's range become infinite, or NaN where infinities of both signs meet.
        let overflow = b.abs() > largest && !a.is_finite();
        let close = b.is_finite() && (a - b).abs() <= atol + rtol * b.abs();
        if !(a == b || (a.is_nan() && b.is_nan()) || overflow || close) {
            let distance = (a - b).abs();
            // NaN compared with a number is the largest difference.
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

impl HostTensor<'_> {
    fn values(&self) -> Vec<f64> {
        fn all<const N: usize>(data: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            data.as_chunks::<N>().0.iter().map(|c| f(*c)).collect()
        }
        match self.dtype {
            DType::F32 => all(self.data, |b| f32::from_le_bytes(b).into()),
            DType::F64 => all(self.data, f64::from_le_bytes),
            DType::I64 => all(self.data, |b| i64::from_le_bytes(b) as f64),
            DType::F16 => all(self.data, |b| half::f16::from_le_bytes(b).into()),
            DType::BF16 => all(self.data, |b| half::bf16::from_le_bytes(b).into()),
            DType::I32 => all(self.data, |b| i32::from_le_bytes(b).into()),
            _ => self.data.iter().map(|&b| b.into()).collect(),
        }
    }
}

/// Prints failures, unsupported calls by operation, and a summary; returns the number of failures.
pub fn print_report(outcomes: &[(String, Outcome)], how: &CallConfig<'_>, verbose: bool) -> usize {
    let mut passed = 0;
    let mut failed = 0;
    let mut excepted = 0;
    let mut reasons: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for (name, outcome) in outcomes {
        match outcome {
            Outcome::Passed => passed += 1,
            Outcome::Failed(why) => {
                failed += 1;
                println!("FAILED {name}: {why}");
            }
            Outcome::ExpectedFailure(why) => {
                excepted += 1;
                println!("excepted {name}: {why}");
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
        "golden: {passed} passed, {failed} failed, {unsupported} unsupported, {excepted} excepted of {} on {}{}",
        outcomes.len(),
        how.device.info().backend,
        how.dtype.map(|dtype| format!(" in {dtype}")).unwrap_or_default()
    );
    failed
}

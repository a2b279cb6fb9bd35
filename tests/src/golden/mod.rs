//! Golden data: PyTorch's own results and gradients, call by call.
//!
//! `golden.json` names the calls, `golden.safetensors` holds their tensors (see `tests/golden/README.md`). Every call is
//! made on a device, its results and the gradients of its inputs are compared, and what is not supported is counted
//! with its reason. A call passes if every tensor has the shape and type that PyTorch gave and every element lies within
//! `1e-5 + 1.3e-6 * |expected|` (PyTorch's own tolerance for f32), unless the exceptions file says otherwise.
//!
//! The calls can be made in another type. In f64 they are compared with the same values. In f16 and bf16 what is expected is the
//! call in f32 with the same rounded inputs, within PyTorch's tolerance for the type, or twice what PyTorch itself is off by there
//! (`halves.json`): what is judged is the arithmetic, not what rounding does to an input.

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
mod table;
mod ties;

use args::Args;
use exceptions::Exceptions;
pub use table::OpTable;

pub use operators::render_page;

/// How calls are made.
#[derive(Clone, Copy, Debug)]
pub struct CallConfig<'a> {
    /// Where.
    pub device: &'a Device,
    /// What their f32 tensors are cast to, if to anything.
    pub dtype: Option<DType>,
}

impl CallConfig<'_> {
    /// Absolute and relative tolerance: PyTorch's for the type. f64 is compared with what PyTorch gave in f32.
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

/// One recorded call.
#[derive(Clone, Debug, Deserialize)]
pub struct GoldenCall {
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
    /// What PyTorch says where it refuses the call: then ours has to be an error as well.
    #[serde(default)]
    pub error: Option<String>,
}

impl GoldenCall {
    /// `div.floor_rounding #3`.
    pub fn name(&self) -> String {
        format!("{} #{}", self.op_name(), self.sample)
    }

    /// The operation with its variant.
    pub fn op_name(&self) -> String {
        if self.variant.is_empty() { self.op.clone() } else { format!("{}.{}", self.op, self.variant) }
    }

    /// Whether it takes tensors of f32.
    fn has_floats(&self, file: &safetensors::SafeTensors<'_>) -> bool {
        let keys = args::tensor_keys(self);
        keys.iter().any(|key| read_host_tensor(file, key).is_ok_and(|host| host.dtype == DType::F32))
    }

    /// What an f32 result of the file is where the calls are made in another type, and whether it may be of that type all the same:
    /// f32 where the call names it, or where nothing is f32 that would be cast.
    fn expected_f32(&self, file: &safetensors::SafeTensors<'_>, how: &CallConfig<'_>) -> (DType, bool) {
        let kept = self.names_f32() || !self.has_floats(file);
        (how.dtype.filter(|_| !kept).unwrap_or(DType::F32), self.names_f32())
    }

    /// Whether an argument is the type f32.
    fn names_f32(&self) -> bool {
        let is = |v: &serde_json::Value| v.get("dtype").and_then(|d| d.as_str()) == Some("float32");
        self.args.iter().chain(self.kwargs.values()).any(is)
    }
}

#[derive(Deserialize)]
struct CallIndex {
    calls: Vec<GoldenCall>,
}

/// Calls and their tensors.
pub struct GoldenSet {
    /// Every call, in the order of the file.
    pub calls: Vec<GoldenCall>,
    bytes: Vec<u8>,
    /// By type and call, how far PyTorch's own results in halves are from those in f32.
    halves: BTreeMap<String, BTreeMap<String, Option<f64>>>,
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
    /// It cannot agree: the reason in the exceptions file.
    ExpectedFailure(String),
}

/// A host tensor of the file.
pub struct HostTensor<'a> {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub data: &'a [u8],
}

impl GoldenSet {
    /// Reads a folder.
    pub fn load(dir: &Path) -> Result<Self> {
        let json = dir.join("golden.json");
        let text = std::fs::read_to_string(&json).with_context(|| format!("reading {}", json.display()))?;
        let index: CallIndex =
            serde_json::from_str(&text).with_context(|| format!("parsing {}", json.display()))?;
        let tensors = dir.join("golden.safetensors");
        let bytes = std::fs::read(&tensors).with_context(|| format!("reading {}", tensors.display()))?;
        let halves = match std::fs::read_to_string(dir.join("halves.json")) {
            Ok(text) => serde_json::from_str(&text).context("parsing halves.json")?,
            Err(_) => BTreeMap::new(),
        };
        Ok(Self { calls: index.calls, bytes, halves, exceptions: Exceptions::load()? })
    }

    fn tensors(&self) -> Result<safetensors::SafeTensors<'_>> {
        Ok(safetensors::SafeTensors::deserialize(&self.bytes)?)
    }

    /// Makes every call, and tells each outcome.
    pub fn run(&self, how: &CallConfig<'_>, filter: &[String]) -> Result<Vec<(String, Outcome)>> {
        let file = self.tensors()?;
        let table = OpTable::new();
        let mut outcomes = Vec::new();
        for call in &self.calls {
            let name = call.name();
            if !filter.is_empty() && !filter.iter().any(|f| name.contains(f.as_str())) {
                continue;
            }
            let before = how.device.memory().allocated();
            // A call that panics fails, and hides no other.
            let judged = catch_unwind(AssertUnwindSafe(|| self.check_call(call, &table, &file, how)));
            let outcome = match judged.unwrap_or_else(|_| Err(anyhow!("panics"))) {
                Ok(()) => Outcome::Passed,
                Err(e) => match e.downcast_ref::<Error>() {
                    Some(Error::Unsupported { .. } | Error::DType { .. }) => {
                        Outcome::Unsupported(format!("{e:#}"))
                    }
                    _ if e.downcast_ref::<table::MissingOp>().is_some() => {
                        Outcome::Unsupported(format!("{e:#}"))
                    }
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

    /// Makes a call and compares what it gives.
    fn check_call(
        &self,
        call: &GoldenCall,
        table: &OpTable,
        file: &safetensors::SafeTensors<'_>,
        how: &CallConfig<'_>,
    ) -> Result<()> {
        if let Some(error) = &call.error {
            return match run_call(call, table, file, how.device, Ok) {
                Err(e) if e.downcast_ref::<table::MissingOp>().is_some() => Err(e),
                Err(_) => Ok(()),
                Ok(_) => bail!("gives a result; PyTorch says: {error}"),
            };
        }
        let CallResult { outs, grads } = run_call(call, table, file, how.device, |t| match how.dtype {
            Some(dtype) => Ok(t.to_dtype(dtype)?),
            None => Ok(t),
        })?;
        let exact = match how.dtype {
            Some(dtype) if how.is_half() => {
                let rounded = |t: Tensor| Ok(t.to_dtype(dtype)?.to_dtype(DType::F32)?);
                Some(run_call(call, table, file, how.device, rounded).context("in f32, to compare with")?)
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
                let place = call.outs.iter().position(|out| out == key).filter(|_| exact.is_none());
                match (place, near) {
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
                bail!("lies within the type's tolerance: its entry in tests/exceptions.json has to go")
            }
            Some((wider, _)) if own.is_err() => agree(wider),
            _ => own,
        }
    }

    /// Whether a result of places names elements that are equal to those of PyTorch's places.
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

    /// PyTorch's for the type; in halves at least twice what PyTorch's own result is off by, whose steps are rounded as ours are.
    fn tolerance(&self, call: &GoldenCall, how: &CallConfig<'_>) -> (f64, f64) {
        let (absolute, relative) = how.tolerance();
        let own = how.dtype.and_then(|dtype| *self.halves.get(dtype.name())?.get(&call.name())?);
        (own.map_or(absolute, |own| absolute.max(2.0 * own)), relative)
    }
}

/// A tensor of the file, on the host.
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

/// What a call gave: results, and the gradients of the inputs that have any.
struct CallResult {
    outs: Vec<Tensor>,
    grads: Vec<Tensor>,
}

/// Makes a call with its f32 tensors cast by `cast`.
fn run_call(
    call: &GoldenCall,
    table: &OpTable,
    file: &safetensors::SafeTensors<'_>,
    device: &Device,
    cast: impl Fn(Tensor) -> Result<Tensor>,
) -> Result<CallResult> {
    let f = table.get(&call.op)?;
    let tensor = |key: &str| {
        let host = read_host_tensor(file, key)?;
        let tensor = Tensor::from_bytes(host.data, &host.shape, host.dtype, device)?;
        if host.dtype == DType::F32 { cast(tensor) } else { Ok(tensor) }
    };
    let mut args = Args::new(call, device);
    for key in args::tensor_keys(call) {
        let tensor = tensor(&key)?;
        let tensor = if call.grads.contains_key(&key) { tensor.requires_grad_()? } else { tensor };
        args.insert(key, tensor);
    }
    // Calls with random numbers draw the same ones in every type.
    device.manual_seed(0);
    let outs = f(&args)?;
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
        // A result that keeps its type whatever that of the input is takes a cotangent of its own.
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

/// Compares a tensor with the expected one: the file's, or where `exact` is given, that.
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
        // It has no contents: shapes and types are what can be compared.
        return Ok(());
    }
    // PyTorch's tolerance for what the file has in other types than f32, where no exception is wider.
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
        // What f32 holds and f16 does not is infinite there, or NaN where infinities of both signs met.
        let overflow = b.abs() > largest && !a.is_finite();
        let close = b.is_finite() && (a - b).abs() <= atol + rtol * b.abs();
        if !(a == b || (a.is_nan() && b.is_nan()) || overflow || close) {
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

/// Prints what failed, what is unsupported by operation, and the closing line; returns the number of failures.
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

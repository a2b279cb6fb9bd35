//! Fuzzing of every operation with unusual arguments, on the null device. This device runs nothing, so thousands of
//! calls a second are possible.
//!
//! A call may fail with an error, which names the line of the call. A call must not panic, and its results must fit
//! into the device's memory.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, ensure};
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::error::{Error, Result as ForebayResult};
use forebay::tensor::Tensor;

pub mod chains;
mod generator;
pub mod programs;

pub(crate) use generator::{ArgGenerator, REDUCTIONS};

use crate::operations::registry;

/// Memory of the null device; larger requests must fail.
const DEVICE_BYTES: u64 = 64 << 20;

/// Operation with its name, and a call with random arguments on random tensors, the first of which is `self`.
#[derive(Clone, Copy)]
pub(crate) struct FuzzOp {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&mut ArgGenerator, &[Tensor]) -> ForebayResult<Vec<Tensor>>,
}

/// Results of a call as a list of tensors.
pub(crate) trait IntoTensors {
    fn into_tensors(self) -> Vec<Tensor>;
}

macro_rules! outputs {
    ($($t:ty: $self:ident => $tensors:expr;)*) => {$(
        impl IntoTensors for $t {
            fn into_tensors($self) -> Vec<Tensor> { $tensors }
        }
    )*};
}
outputs! {
    Tensor: self => vec![self];
    (): self => vec![];
    bool: self => vec![];
    f64: self => vec![];
    usize: self => vec![];
    Vec<Tensor>: self => self;
    (Tensor, Tensor): self => vec![self.0, self.1];
    (Tensor, Tensor, Tensor): self => vec![self.0, self.1, self.2];
    forebay::ops::Unique: self => vec![self.values, self.inverse_indices];
    forebay::ops::LstsqResult: self => vec![self.solution, self.residuals];
    forebay::ops::RecurrentOutput: self => vec![self.output, self.h_n];
}

/// Number of calls, and how many of them succeeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FuzzCounts {
    /// Number of calls.
    pub calls: u64,
    /// Number of calls without an error.
    pub succeeded: u64,
}

thread_local! {
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Calls every operation, or those whose name contains `filter` (`=name` for one), `rounds` times with arguments
/// drawn from `seed`. `before` receives a description of each call.
///
/// # Errors
/// A call panicked, or returned a tensor that is larger than the memory; the message tells how to repeat the call.
pub fn run(rounds: u64, seed: u64, filter: &str, before: impl Fn(&str)) -> Result<FuzzCounts> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|info| LAST_PANIC.with(|text| *text.borrow_mut() = info.to_string())));
    let mut counts = FuzzCounts::default();
    let mut found = Vec::new();
    for call in
        registry().operations.iter().flat_map(|op| &op.fuzz).filter(|call| matches_filter(call.name, filter))
    {
        let device = Device::null(CardProfile { total_bytes: DEVICE_BYTES, ..CardProfile::default() });
        for round in 0..rounds {
            let mut draw = ArgGenerator::new(seed, call.name, round);
            before(&format!("{} round {round}", call.name));
            counts.calls += 1;
            match catch_unwind(AssertUnwindSafe(|| run_call(call, &mut draw, &device))) {
                Ok(Ok(done)) => counts.succeeded += u64::from(done),
                Ok(Err(error)) => {
                    found.push(format!("{}: {error:#}; {}", call.name, draw.describe_call(seed, round)))
                }
                Err(_) => {
                    let text = LAST_PANIC.with(|text| text.borrow().replace('\n', " "));
                    found.push(format!("{}: {text}; {}", call.name, draw.describe_call(seed, round)));
                }
            }
        }
    }
    std::panic::set_hook(hook);
    let mut seen = std::collections::BTreeSet::new();
    found.retain(|f| seen.insert(f.split(';').next().unwrap_or(f).to_owned()));
    ensure!(found.is_empty(), "{} calls failed:\n{}", found.len(), found.join("\n"));
    Ok(counts)
}

fn matches_filter(name: &str, filter: &str) -> bool {
    filter.strip_prefix('=').map_or_else(|| name.contains(filter), |exact| name == exact)
}

/// Runs one call, reads its results, and computes their gradients. Returns whether the call succeeded.
fn run_call(call: &FuzzOp, draw: &mut ArgGenerator, device: &Device) -> Result<bool> {
    let Ok(inputs) = draw.inputs(device) else { return Ok(false) };
    let outputs = match (call.run)(draw, &inputs) {
        Ok(outputs) => outputs,
        Err(error) => {
            check_error(&error)?;
            return Ok(false);
        }
    };
    for out in &outputs {
        let bytes = out.numel().saturating_mul(out.dtype().size());
        let own: usize = out
            .shape()
            .iter()
            .zip(out.strides())
            .filter(|(_, s)| **s != 0)
            .map(|(n, _)| *n)
            .fold(1, usize::saturating_mul);
        let overlaps = out.layout().has_internal_overlap();
        ensure!(
            overlaps || own as u64 <= DEVICE_BYTES || out.numel() == 0,
            "{:?} is larger than the memory",
            out.shape()
        );
        if bytes <= 1 << 16 {
            out.to_bytes().map_or_else(|error| check_error(&error), |_| Ok(()))?;
        }
        if out.requires_grad() && bytes <= 1 << 16 {
            let sum = out.sum_all();
            let passed = sum.and_then(|sum| sum.backward());
            passed.or_else(|error| check_error(&error))?;
        }
    }
    Ok(true)
}

/// Checks that an error has a message, and names a line of this crate, whose code calls the operations.
fn check_error(error: &Error) -> Result<()> {
    ensure!(!error.message().is_empty(), "an error without a message");
    let sources = file!().trim_end_matches("fuzz.rs");
    let is_own = error.location().is_some_and(|line| line.file().starts_with(sources));
    ensure!(is_own, "an error does not name the line of the call: {error}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_argument_makes_an_operation_panic() -> Result<()> {
        let rounds = std::env::var("FOREBAY_FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
        let seed = std::env::var("FOREBAY_FUZZ_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
        let counts = run(rounds, seed, "", |_| ())?;
        // If arguments never fit, no code after the first check would be reached.
        ensure!(counts.succeeded * 20 > counts.calls, "{counts:?}");
        Ok(())
    }
}

//! Expected failures and wider tolerances of golden calls, from `tests/exceptions.json`. Unneeded entries fail.

use anyhow::{Context, Result};
use forebay::dtype::DType;
use serde::Deserialize;

use super::{CallConfig, GoldenCall, Outcome};

/// Mesa's software driver, which CI and `cargo xtask golden` use on every machine.
const REFERENCE_DRIVER: &str = "llvmpipe";

const EXCEPTIONS_JSON: &str = include_str!("../../exceptions.json");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    /// PyTorch's name of the operation, with its variant.
    op: String,
    /// Backend, or part of the device's name or driver; empty for every device.
    #[serde(default)]
    device: String,
    /// Type of the calls; `half` for f16 and bf16.
    #[serde(default)]
    dtype: String,
    /// Wider tolerance (absolute, relative), if that is enough to pass.
    #[serde(default)]
    tolerance: Option<(f64, f64)>,
    /// True if values may differ, because they are random. Shape, type and finiteness are still checked.
    #[serde(default)]
    random: bool,
    /// Keyword whose value must be a nonzero number for the exception to apply.
    #[serde(default)]
    nonzero_kwarg: String,
    /// Reason, with a link or a measurement.
    reason: String,
}

#[derive(Debug)]
pub(super) struct Exceptions(Vec<Exception>);

impl Exception {
    fn matches_call(&self, call: &GoldenCall) -> bool {
        let number = || call.kwargs.get(&self.nonzero_kwarg)?.as_f64();
        (self.nonzero_kwarg.is_empty() || number().is_some_and(|v| v != 0.0))
            && (self.op == call.op_name() || self.op == call.name())
    }

    /// Reports whether the exception applies to calls in a type; `None` is the recorded type. A tolerance without a
    /// type applies to the recorded type only.
    fn matches_dtype(&self, dtype: Option<DType>) -> bool {
        match (self.dtype.as_str(), dtype) {
            ("", None) => true,
            // f64 results are compared with the recorded values, 16-bit results with our own f32 call.
            ("", Some(DType::F64)) => true,
            ("", Some(_)) => self.random,
            ("half", Some(DType::F16 | DType::BF16)) => true,
            (name, dtype) => dtype.is_some_and(|dtype| dtype.name() == name),
        }
    }
}

impl Exceptions {
    pub(super) fn load() -> Result<Self> {
        let all: Vec<Exception> =
            serde_json::from_str(EXCEPTIONS_JSON).context("parsing tests/exceptions.json")?;
        for e in &all {
            anyhow::ensure!(!e.reason.is_empty(), "tests/exceptions.json: {} has no reason", e.op);
        }
        Ok(Self(all))
    }

    fn find(&self, call: &GoldenCall, how: &CallConfig<'_>) -> Option<&Exception> {
        let info = how.device.info();
        self.0.iter().find(|e| {
            e.matches_dtype(how.dtype)
                && e.matches_call(call)
                && (e.device.is_empty()
                    || info.backend == e.device
                    || info.name.contains(&e.device)
                    || info.driver.contains(&e.device))
        })
    }

    /// Returns the reason of a call's exception that applies on every device.
    pub(super) fn reason(&self, call: &GoldenCall, dtype: Option<DType>) -> Option<&str> {
        self.find_for_all_devices(call, dtype).map(|e| e.reason.as_str())
    }

    /// Formats the tolerances of a call that apply on every device, in any type: `bf16 0.03, 0.1`.
    pub(super) fn tolerances(&self, call: &GoldenCall) -> impl Iterator<Item = String> {
        let of = move |e: &&Exception| e.device.is_empty() && e.matches_call(call);
        self.0.iter().filter(of).filter_map(|e| {
            let (absolute, relative) = e.tolerance?;
            Some(format!("{} {absolute:e}, {relative:e}", if e.dtype.is_empty() { "f32" } else { &e.dtype }))
        })
    }

    /// Reports whether a call is an expected failure on every device.
    pub(super) fn is_excluded(&self, call: &GoldenCall, dtype: Option<DType>) -> bool {
        self.find_for_all_devices(call, dtype).is_some_and(|e| e.tolerance.is_none())
    }

    fn find_for_all_devices(&self, call: &GoldenCall, dtype: Option<DType>) -> Option<&Exception> {
        self.0.iter().find(|e| e.matches_dtype(dtype) && e.matches_call(call) && e.device.is_empty())
    }

    /// Returns the tolerance of a call, and whether the call must fail without it. Tolerances for every device must
    /// be needed only on the reference driver, because other drivers sum in another order.
    pub(super) fn tolerance(&self, call: &GoldenCall, how: &CallConfig<'_>) -> Option<((f64, f64), bool)> {
        let e = self.find(call, how)?;
        // f64 is compared with recorded f32 values, whose rounding errors the tolerance covers.
        let judged = how.dtype != Some(DType::F64) && e.op == call.name();
        let needed = judged && (!e.device.is_empty() || how.device.info().driver.contains(REFERENCE_DRIVER));
        Some((e.tolerance?, needed))
    }

    /// Reports whether a call's values are random and only shape and type are checked.
    pub(super) fn is_random(&self, call: &GoldenCall, how: &CallConfig<'_>) -> bool {
        self.find(call, how).is_some_and(|e| e.random)
    }

    /// Applies exceptions without a tolerance: a failing call becomes an expected failure, a passing call fails.
    pub(super) fn apply(&self, call: &GoldenCall, how: &CallConfig<'_>, outcome: Outcome) -> Outcome {
        let Some(e) = self.find(call, how).filter(|e| e.tolerance.is_none()) else { return outcome };
        match outcome {
            Outcome::Passed if e.random => Outcome::ExpectedFailure(e.reason.clone()),
            Outcome::Passed => {
                Outcome::Failed(format!("passes, but is listed in tests/exceptions.json ({})", e.reason))
            }
            Outcome::Failed(_) | Outcome::Unsupported(_) if !e.random => {
                Outcome::ExpectedFailure(e.reason.clone())
            }
            outcome => outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::GoldenSet;
    use super::*;

    #[test]
    fn every_exception_belongs_to_a_call() -> Result<()> {
        let load = |folder| GoldenSet::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
        let (golden, more) = (load("golden")?, load("golden_more")?);
        for e in &golden.exceptions.0 {
            let mut calls = golden.calls.iter().chain(&more.calls);
            let there = calls.any(|call| e.op == call.op_name() || e.op == call.name());
            anyhow::ensure!(there, "tests/exceptions.json: {} is no call", e.op);
            anyhow::ensure!(
                e.tolerance.is_none() || !e.random,
                "tests/exceptions.json: {} is random and has a tolerance",
                e.op
            );
        }
        Ok(())
    }
}

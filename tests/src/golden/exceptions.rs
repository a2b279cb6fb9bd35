//! The one exceptions file: calls that may differ, and why. An exception that is not needed is a failure.

use anyhow::{Context, Result};
use forebay::dtype::DType;
use serde::Deserialize;

use super::{CallConfig, GoldenCall, Outcome};

/// Mesa's software driver, which CI and `cargo xtask golden` run everywhere.
const REFERENCE_DRIVER: &str = "llvmpipe";

const EXCEPTIONS_JSON: &str = include_str!("../../exceptions.json");

/// One exception.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    /// PyTorch's name of the operation, with its variant.
    op: String,
    /// A part of the device's name or driver, or a backend; empty for every device.
    #[serde(default)]
    device: String,
    /// Only where the calls are made in this type; `half` for f16 and bf16.
    #[serde(default)]
    dtype: String,
    /// A wider tolerance (absolute, relative), where that is all that is needed.
    #[serde(default)]
    tolerance: Option<(f64, f64)>,
    /// Only values may differ, and are numbers: all else is judged.
    #[serde(default)]
    random: bool,
    /// Only calls to which this keyword gives a number that is not zero: of calls by other samples, too.
    #[serde(default)]
    given: String,
    /// Why, with a link or a measurement.
    reason: String,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Exceptions(Vec<Exception>);

impl Exception {
    /// Whether it is for this call.
    fn matches_call(&self, call: &GoldenCall) -> bool {
        let number = || call.kwargs.get(&self.given)?.as_f64();
        (self.given.is_empty() || number().is_some_and(|v| v != 0.0))
            && (self.op == call.op_name() || self.op == call.name())
    }

    /// Whether it is for calls in a type: the file's own, if there is none. A tolerance without a type is for those.
    fn matches_dtype(&self, dtype: Option<DType>) -> bool {
        match (self.dtype.as_str(), dtype) {
            ("", None) => true,
            // f64 is compared with the same values; in halves a call with itself in f32.
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

    /// The reason of a call's exception on every device.
    pub(super) fn reason(&self, call: &GoldenCall, dtype: Option<DType>) -> Option<&str> {
        self.find_for_all_devices(call, dtype).map(|e| e.reason.as_str())
    }

    /// The tolerances of a call on every device, in any type: `bf16 0.03, 0.1`.
    pub(super) fn tolerances(&self, call: &GoldenCall) -> impl Iterator<Item = String> {
        let of = move |e: &&Exception| e.device.is_empty() && e.matches_call(call);
        self.0.iter().filter(of).filter_map(|e| {
            let (absolute, relative) = e.tolerance?;
            Some(format!("{} {absolute:e}, {relative:e}", if e.dtype.is_empty() { "f32" } else { &e.dtype }))
        })
    }

    /// Whether a call differs on every device, however wide the tolerance.
    pub(super) fn is_excluded(&self, call: &GoldenCall, dtype: Option<DType>) -> bool {
        self.find_for_all_devices(call, dtype).is_some_and(|e| e.tolerance.is_none())
    }

    fn find_for_all_devices(&self, call: &GoldenCall, dtype: Option<DType>) -> Option<&Exception> {
        self.0.iter().find(|e| e.matches_dtype(dtype) && e.matches_call(call) && e.device.is_empty())
    }

    /// The tolerance of a call, and whether it must be needed here: where it is for every device on the one that everybody has, since
    /// sums are made in other orders elsewhere.
    pub(super) fn tolerance(&self, call: &GoldenCall, how: &CallConfig<'_>) -> Option<((f64, f64), bool)> {
        let e = self.find(call, how)?;
        // f64 is compared with values of f32, whose errors the tolerance is for.
        let judged = how.dtype != Some(DType::F64) && e.op == call.name();
        let needed = judged && (!e.device.is_empty() || how.device.info().driver.contains(REFERENCE_DRIVER));
        Some((e.tolerance?, needed))
    }

    /// Whether all but the values of a call is judged.
    pub(super) fn is_random(&self, call: &GoldenCall, how: &CallConfig<'_>) -> bool {
        self.find(call, how).is_some_and(|e| e.random)
    }

    /// A call with an exception that is no tolerance counts as excepted, with the reason; one that passes without fails.
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
    fn every_exception_is_of_a_call_that_is_made() -> Result<()> {
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

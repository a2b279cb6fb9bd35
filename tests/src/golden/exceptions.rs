//! The one exceptions file: calls that may differ, and why. An exception that is not needed is a failure.

use anyhow::{Context, Result};
use forebay::device::Device;
use serde::Deserialize;

use super::{Call, Outcome};

const FILE: &str = include_str!("../../exceptions.json");

/// One exception.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    /// PyTorch's name of the operation, with its variant.
    op: String,
    /// A part of the device's name or driver, or a backend; empty for every device.
    #[serde(default)]
    device: String,
    /// A wider tolerance (absolute, relative), where that is all that is needed.
    #[serde(default)]
    tolerance: Option<(f64, f64)>,
    /// Only values may differ, and are numbers: all else is judged.
    #[serde(default)]
    random: bool,
    /// Why, with a link or a measurement.
    reason: String,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Exceptions(Vec<Exception>);

impl Exceptions {
    pub(super) fn load() -> Result<Self> {
        let all: Vec<Exception> = serde_json::from_str(FILE).context("parsing tests/exceptions.json")?;
        for e in &all {
            anyhow::ensure!(!e.reason.is_empty(), "tests/exceptions.json: {} has no reason", e.op);
        }
        Ok(Self(all))
    }

    fn find(&self, call: &Call, device: &Device) -> Option<&Exception> {
        let info = device.info();
        self.0.iter().find(|e| {
            (e.op == call.op_name() || e.op == call.name())
                && (e.device.is_empty()
                    || info.backend == e.device
                    || info.name.contains(&e.device)
                    || info.driver.contains(&e.device))
        })
    }

    /// The reason of a call's exception on every device.
    pub(super) fn reason(&self, call: &Call) -> Option<&str> {
        self.everywhere(call).map(|e| e.reason.as_str())
    }

    /// Whether a call differs on every device, however wide the tolerance.
    pub(super) fn excludes(&self, call: &Call) -> bool {
        self.everywhere(call).is_some_and(|e| e.tolerance.is_none())
    }

    fn everywhere(&self, call: &Call) -> Option<&Exception> {
        self.0.iter().find(|e| (e.op == call.op_name() || e.op == call.name()) && e.device.is_empty())
    }

    pub(super) fn tolerance(&self, call: &Call, device: &Device) -> Option<(f64, f64)> {
        self.find(call, device)?.tolerance
    }

    /// Whether all but the values of a call is judged.
    pub(super) fn random(&self, call: &Call, device: &Device) -> bool {
        self.find(call, device).is_some_and(|e| e.random)
    }

    /// A call with an exception that is no tolerance counts as excepted, with the reason; one that passes without fails.
    pub(super) fn apply(&self, call: &Call, device: &Device, outcome: Outcome) -> Outcome {
        let Some(e) = self.find(call, device).filter(|e| e.tolerance.is_none()) else { return outcome };
        match outcome {
            Outcome::Passed if e.random => Outcome::Excepted(e.reason.clone()),
            Outcome::Passed => {
                Outcome::Failed(format!("passes, but is listed in tests/exceptions.json ({})", e.reason))
            }
            Outcome::Failed(_) if !e.random => Outcome::Excepted(e.reason.clone()),
            outcome => outcome,
        }
    }
}

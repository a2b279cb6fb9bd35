//! Topics that run in a page. The module has the name and the items that their sources import.

use forebay::device::Device;

#[path = "../../src/suite/autograd.rs"]
mod autograd;
#[path = "../../src/suite/host_reference.rs"]
#[allow(dead_code, reason = "other topics use the rest")]
mod host_reference;
#[path = "../../src/suite/matmul.rs"]
mod matmul;
#[path = "../../src/suite/pointwise.rs"]
mod pointwise;
#[path = "../../src/suite/runner.rs"]
mod runner;
#[path = "../../src/suite/tensors.rs"]
mod tensors;

pub(crate) use runner::{Tally, Test};
use runner::{compute_dtypes, require_dtype, skip, tests};

const TOPICS: &[(&str, &[Test])] = &[
    ("tensors", tensors::TESTS),
    ("pointwise", pointwise::TESTS),
    ("autograd", autograd::TESTS),
    ("matmul", matmul::TESTS),
];

/// Runs all topics, and passes a line about each test to `print`.
pub(crate) fn run(device: &Device, print: &mut dyn FnMut(String)) -> Tally {
    runner::run_topics(device, TOPICS, &[], print)
}

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

/// Tests that are left out: sweeps that take a minute on a browser's software driver.
const LEFT_OUT: [&str; 2] = ["!matmul/products_of_every_layout", "!pointwise/more_workgroups_than_a_dimension_has"];

/// Runs the topics, and passes a line about each test to `print`.
pub(crate) fn run(device: &Device, print: &mut dyn FnMut(String)) -> Tally {
    runner::run_topics(device, TOPICS, &LEFT_OUT.map(str::to_owned), print)
}

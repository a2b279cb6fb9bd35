//! Tests of every device, by topic.
//!
//! A test is a function of a device, listed once in its topic. [`run`] runs all tests on one device. Its backend may
//! come from outside the workspace: `suite::run(&Device::new(backend)?, &[])`.
//!
//! A test that a device cannot run returns `skip` with the reason, and is counted as skipped. A test that leaks
//! memory or panics has failed.

use std::fmt;
use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use thiserror::Error;

mod activation_checkpointing;
mod amp;
mod asynchronous;
mod attention;
mod autocast_cache;
mod autograd;
mod capture;
mod convolutions;
mod custom_op;
mod decompositions;
mod devices;
mod dlpack;
mod double_backward;
pub mod embedding;
mod errors;
mod fault_injection;
mod faulty_backend;
mod float8;
mod fusion;
mod gpt;
mod grad_scaler;
mod hooks;
mod host_reference;
mod inplace;
mod linalg;
mod linear;
mod load_state_dict;
mod long_loops;
mod long_rows;
mod losses;
mod matmul;
mod memory;
mod memory_tags;
mod minilm;
mod modules;
mod numeric_ranges;
mod op_catalog;
mod optim;
mod optim_options;
mod plan;
mod pointwise;
mod pooling;
mod post_norm;
mod printing;
mod profiler;
mod random;
mod reductions;
mod reentrant_backward;
mod resize;
mod scope_guards;
mod sorting;
mod step_costs;
mod streams;
mod tensors;
mod train_resume;
mod trainer_fit;
mod training;
mod view_chains;
mod wgsl;

/// Test of the suite.
#[derive(Clone, Copy, Debug)]
pub struct Test {
    /// Name of the test function.
    pub name: &'static str,
    run: fn(&Device) -> Result<()>,
}

/// Lists the tests of a topic by the names of their functions.
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        pub(super) const TESTS: &[$crate::suite::Test] =
            &[$($crate::suite::Test { name: stringify!($name), run: $name }),*];
    };
}
use tests;

const TOPICS: &[(&str, &[Test])] = &[
    ("tensors", tensors::TESTS),
    ("view_chains", view_chains::TESTS),
    ("printing", printing::TESTS),
    ("fusion", fusion::TESTS),
    ("pointwise", pointwise::TESTS),
    ("pooling", pooling::TESTS),
    ("random", random::TESTS),
    ("op_catalog", op_catalog::TESTS),
    ("autograd", autograd::TESTS),
    ("double_backward", double_backward::TESTS),
    ("hooks", hooks::TESTS),
    ("reentrant_backward", reentrant_backward::TESTS),
    ("activation_checkpointing", activation_checkpointing::TESTS),
    ("inplace", inplace::TESTS),
    ("amp", amp::TESTS),
    ("autocast_cache", autocast_cache::TESTS),
    ("scope_guards", scope_guards::TESTS),
    ("attention", attention::TESTS),
    ("grad_scaler", grad_scaler::TESTS),
    ("decompositions", decompositions::TESTS),
    ("fault_injection", fault_injection::TESTS),
    ("custom_op", custom_op::TESTS),
    ("memory", memory::TESTS),
    ("streams", streams::TESTS),
    ("memory_tags", memory_tags::TESTS),
    ("capture", capture::TESTS),
    ("plan", plan::TESTS),
    ("gpt", gpt::TESTS),
    ("float8", float8::TESTS),
    ("matmul", matmul::TESTS),
    ("linear", linear::TESTS),
    ("linalg", linalg::TESTS),
    ("profiler", profiler::TESTS),
    ("step_costs", step_costs::TESTS),
    ("errors", errors::TESTS),
    ("devices", devices::TESTS),
    ("asynchronous", asynchronous::TESTS),
    ("dlpack", dlpack::TESTS),
    ("embedding", embedding::TESTS),
    ("training", training::TESTS),
    ("reductions", reductions::TESTS),
    ("resize", resize::TESTS),
    ("convolutions", convolutions::TESTS),
    ("long_rows", long_rows::TESTS),
    ("losses", losses::TESTS),
    ("long_loops", long_loops::TESTS),
    ("optim", optim::TESTS),
    ("optim_options", optim_options::TESTS),
    ("modules", modules::TESTS),
    ("minilm", minilm::TESTS),
    ("post_norm", post_norm::TESTS),
    ("sorting", sorting::TESTS),
    ("numeric_ranges", numeric_ranges::TESTS),
    ("train_resume", train_resume::TESTS),
    ("trainer_fit", trainer_fit::TESTS),
    ("load_state_dict", load_state_dict::TESTS),
    ("wgsl", wgsl::TESTS),
];

/// Returns every test with its topic.
pub fn all_tests() -> impl Iterator<Item = (&'static str, Test)> {
    TOPICS.iter().flat_map(|&(topic, tests)| tests.iter().map(move |&test| (topic, test)))
}

/// Reason why a device cannot run a test.
#[derive(Debug, Error)]
#[error("{0}")]
struct Skip(String);

/// Skips a test that the device cannot run.
fn skip<T>(why: impl Into<String>) -> Result<T> {
    Err(Skip(why.into()).into())
}

/// Skips a test on a device without this type, or without arithmetic in the type.
fn require_dtype(device: &Device, dtype: DType) -> Result<()> {
    let there = match dtype {
        DType::I64 => device.info().features.i64,
        other => device.supports_dtype(other),
    };
    if there { Ok(()) } else { skip(format!("the device computes no {dtype}")) }
}

/// Returns the types in which the device computes.
fn compute_dtypes(device: &Device) -> impl Iterator<Item = DType> + Clone + use<> {
    let features = device.info().features;
    DType::ALL.into_iter().filter(move |d| match d {
        DType::F64 => features.f64,
        DType::I64 => features.i64,
        _ => true,
    })
}

/// Numbers of tests that passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: usize,
    pub failed: usize,
    /// Tests that could not run, each with a reason.
    pub skipped: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Runs the tests whose name (`topic/name/device`) contains one of `filters`, or all of them, and prints each. A
/// filter that begins with `!` leaves out the tests whose name contains its rest.
pub fn run(device: &Device, filters: &[String]) -> Tally {
    let mut tally = Tally::default();
    let (left_out, wanted): (Vec<_>, Vec<_>) =
        filters.iter().map(String::as_str).partition(|filter| filter.starts_with('!'));
    for (topic, test) in all_tests() {
        let name = format!("{topic}/{}/{device}", test.name);
        if !wanted.is_empty() && !wanted.iter().any(|filter| name.contains(filter))
            || left_out.iter().any(|filter| name.contains(&filter[1..]))
        {
            continue;
        }
        let start = Instant::now();
        match run_test(test, device) {
            Ok(()) => {
                tally.passed += 1;
                println!("ok      {name} ({:.1} s)", start.elapsed().as_secs_f64());
            }
            Err(error) if error.is::<Skip>() => {
                tally.skipped += 1;
                println!("skipped {name}: {error}");
            }
            Err(error) => {
                tally.failed += 1;
                println!("FAILED  {name}: {error:#}");
            }
        }
    }
    tally
}

/// Runs one test, and checks that it released its memory.
fn run_test(test: Test, device: &Device) -> Result<()> {
    let before = device.memory().allocated();
    device.manual_seed(0);
    // A panic fails this test, but does not end the run.
    catch_unwind(AssertUnwindSafe(|| (test.run)(device))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(anyhow::anyhow!("panicked: {}", text.unwrap_or("without a message")))
    })?;
    let after = device.memory().allocated();
    ensure!(after == before, "{} bytes stay allocated", after as i64 - before as i64);
    Ok(())
}

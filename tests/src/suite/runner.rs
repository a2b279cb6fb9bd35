//! Runs tests on a device. The suite in a browser page (`tests/browser`) compiles this file too.

use std::fmt;
use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::platform::Instant;
use thiserror::Error;

/// Test of the suite.
#[derive(Clone, Copy, Debug)]
pub struct Test {
    /// Name of the test function.
    pub name: &'static str,
    pub(super) run: fn(&Device) -> Result<()>,
}

/// Lists the tests of a topic by the names of their functions.
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        pub(super) const TESTS: &[$crate::suite::Test] =
            &[$($crate::suite::Test { name: stringify!($name), run: $name }),*];
    };
}
pub(super) use tests;

/// Reason why a device cannot run a test.
#[derive(Debug, Error)]
#[error("{0}")]
pub(super) struct Skip(String);

/// Skips a test that the device cannot run.
pub(super) fn skip<T>(why: impl Into<String>) -> Result<T> {
    Err(Skip(why.into()).into())
}

/// Skips a test on a device without this type, or without arithmetic in the type.
pub(super) fn require_dtype(device: &Device, dtype: DType) -> Result<()> {
    let there = match dtype {
        DType::I64 => device.info().features.i64,
        other => device.supports_dtype(other),
    };
    if there { Ok(()) } else { skip(format!("the device computes no {dtype}")) }
}

/// Returns the types in which the device computes.
pub(super) fn compute_dtypes(device: &Device) -> impl Iterator<Item = DType> + Clone + use<> {
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

/// Runs the tests whose name (`topic/name/device`) contains one of `filters`, or all of them, and passes a line about
/// each to `print`. A filter that begins with `!` leaves out the tests whose name contains its rest.
pub(super) fn run_topics(
    device: &Device,
    topics: &[(&str, &[Test])],
    filters: &[String],
    print: &mut dyn FnMut(String),
) -> Tally {
    let mut tally = Tally::default();
    let (left_out, wanted): (Vec<_>, Vec<_>) =
        filters.iter().map(String::as_str).partition(|filter| filter.starts_with('!'));
    for (topic, test) in
        topics.iter().flat_map(|&(topic, tests)| tests.iter().map(move |&test| (topic, test)))
    {
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
                print(format!("ok      {name} ({:.1} s)", start.elapsed().as_secs_f64()));
            }
            Err(error) if error.is::<Skip>() => {
                tally.skipped += 1;
                print(format!("skipped {name}: {error}"));
            }
            Err(error) => {
                tally.failed += 1;
                print(format!("FAILED  {name}: {error:#}"));
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

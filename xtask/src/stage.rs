//! Stages of `cargo xtask test`: their results, and running them in parallel.

use crate::process;
use crate::tally::Tally;
use anyhow::Result;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Stage that has run, with its result.
pub(crate) struct Stage {
    name: String,
    verdict: StageOutcome,
    /// Lines that name failed tests, repeated after the table.
    failures: Vec<String>,
}

enum StageOutcome {
    Ran { tally: Tally, time: Duration },
    Skipped { why: String },
}

/// Program to run as a stage.
pub(crate) struct PendingStage {
    name: String,
    command: Command,
    /// If true, the program prints test counts.
    reports_counts: bool,
}

impl PendingStage {
    /// Creates a stage whose program prints test counts. A program that prints none or exits with an error has failed.
    pub(crate) fn new(name: impl Into<String>, command: Command) -> Self {
        Self { name: name.into(), command, reports_counts: true }
    }

    /// Creates a stage whose program passes or fails as a whole.
    pub(crate) fn pass_or_fail(name: impl Into<String>, command: Command) -> Self {
        Self { name: name.into(), command, reports_counts: false }
    }

    fn run(mut self) -> Stage {
        let name = self.name.clone();
        let mut failures = Vec::new();
        let stage = Stage::run_counted(self.name, || {
            let ended = process::run_with_prefix(&name, &mut self.command)?;
            if !ended.success {
                failures = failure_lines(&ended.lines);
            }
            if !self.reports_counts {
                return Ok(Tally::from_bool(ended.success));
            }
            let counted = Tally::parse_output(&ended.lines);
            let mut tally = counted.unwrap_or_default();
            if tally.failed == 0 && (counted.is_none() || !ended.success) {
                println!("{name} {}", if ended.success { "did not say what passed" } else { "ended badly" });
                tally.failed = 1;
            }
            Ok(tally)
        });
        Stage { failures, ..stage }
    }
}

/// Returns the first lines that name a failed test, as the suite, libtest and the compiler print them.
fn failure_lines(lines: &[String]) -> Vec<String> {
    let names_failure = |line: &&String| {
        line.starts_with("FAILED ") || line.ends_with("... FAILED") || line.starts_with("error")
    };
    lines.iter().filter(names_failure).take(MAX_FAILURE_LINES).cloned().collect()
}

/// Failed tests of a stage that the summary names; a broken driver fails hundreds.
const MAX_FAILURE_LINES: usize = 20;

impl Stage {
    /// Runs a function that passes or fails as a whole.
    pub(crate) fn run_pass_or_fail(name: &str, action: impl FnOnce() -> Result<bool>) -> Self {
        Self::run_counted(name.into(), || Ok(Tally::from_bool(action()?)))
    }

    /// Returns a skipped stage with the reason.
    pub(crate) fn skipped(name: &str, why: impl Into<String>) -> Self {
        Self { name: name.into(), verdict: StageOutcome::Skipped { why: why.into() }, failures: Vec::new() }
    }

    /// Starts independent stages in order, at most `lanes` at a time, and returns their results in this order.
    pub(crate) fn run_parallel(planned: Vec<PendingStage>, lanes: usize) -> Vec<Self> {
        let waiting = Mutex::new(planned.into_iter().enumerate());
        let done = Mutex::new(Vec::new());
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
        std::thread::scope(|scope| {
            for _ in 0..lanes {
                scope.spawn(|| {
                    while let Some((index, stage)) = next() {
                        let stage = stage.run();
                        done.lock().unwrap_or_else(PoisonError::into_inner).push((index, stage));
                    }
                });
            }
        });
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_by_key(|(index, _)| *index);
        done.into_iter().map(|(_, stage)| stage).collect()
    }

    pub(crate) fn passed(&self) -> bool {
        match self.verdict {
            StageOutcome::Ran { tally, .. } => tally.failed == 0,
            StageOutcome::Skipped { .. } => true,
        }
    }

    /// Runs a function as a stage. An error counts as a failure, so that other stages still run.
    fn run_counted(name: String, action: impl FnOnce() -> Result<Tally>) -> Self {
        println!("\n=== {name} ===");
        let start = Instant::now();
        let tally = action().unwrap_or_else(|error| {
            println!("{name}: {error:#}");
            Tally::from_bool(false)
        });
        Self { name, verdict: StageOutcome::Ran { tally, time: start.elapsed() }, failures: Vec::new() }
    }
}

fn minutes(time: Duration) -> f64 {
    time.as_secs_f64() / 60.0
}

/// Prints the result of every stage, the names of failed tests, and the totals in the last line; returns false if any
/// failed.
pub(crate) fn print_summary(stages: &[Stage], time: Duration) -> bool {
    println!("\n=== summary ===");
    println!(
        "{:<44} {:>8} {:>8} {:>8} {:>12} {:>7}",
        "", "passed", "failed", "skipped", "unsupported", "minutes"
    );
    let mut sum = Tally::default();
    for stage in stages {
        match &stage.verdict {
            StageOutcome::Ran { tally, time } => {
                let Tally { passed, failed, skipped, unsupported } = tally;
                let minutes = minutes(*time);
                println!(
                    "{:<44} {passed:>8} {failed:>8} {skipped:>8} {unsupported:>12} {minutes:>7.1}",
                    stage.name
                );
                sum += *tally;
            }
            StageOutcome::Skipped { why } => {
                println!("{:<44} not run: {why}", stage.name);
                sum.skipped += 1;
            }
        }
    }
    for stage in stages {
        for line in &stage.failures {
            println!("{} | {line}", stage.name);
        }
    }
    println!("{:<44} {:>47.1}", "all, in parallel where possible", minutes(time));
    println!("\n{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped);
    sum.failed == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, script: &str) -> PendingStage {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        PendingStage::new(name, command)
    }

    #[test]
    fn parallel_stages_are_reported_in_order() {
        // The first program ends only after the second has started: opening a named pipe waits for both ends.
        let pipe = std::env::temp_dir().join(format!("forebay-xtask-pipe-{}", std::process::id()));
        let made = Command::new("mkfifo").arg(&pipe).status();
        assert!(made.is_ok_and(|status| status.success()));
        let reads = format!("cat '{}'", pipe.display());
        let writes = format!("echo 2 passed, 0 failed > '{}'; echo 1 passed, 0 failed", pipe.display());
        let planned = vec![
            shell("reads", &reads),
            shell("writes", &writes),
            shell("silent", "true"),
            shell("ends badly", "echo 1 passed, 0 failed; exit 1"),
            PendingStage::new("missing", Command::new("no such program")),
            PendingStage::pass_or_fail("whole", Command::new("true")),
        ];
        let stages = Stage::run_parallel(planned, 2);
        let names: Vec<_> = stages.iter().map(|stage| &*stage.name).collect();
        assert_eq!(names, ["reads", "writes", "silent", "ends badly", "missing", "whole"]);
        let passed: Vec<_> = stages.iter().map(Stage::passed).collect();
        assert_eq!(passed, [true, true, false, false, false, true]);
        assert!(std::fs::remove_file(pipe).is_ok());
    }

    #[test]
    fn failed_tests_are_named() {
        let script = "echo 'ok a'; echo 'FAILED  b: wrong'; echo 'test c ... FAILED'; echo '1 passed, 2 failed'; exit 1";
        let stage = shell("suite", script).run();
        assert_eq!(stage.failures, ["FAILED  b: wrong", "test c ... FAILED"]);
        assert!(
            shell("passes", "echo 'FAILED on purpose'; echo '1 passed, 0 failed'").run().failures.is_empty()
        );
    }
}

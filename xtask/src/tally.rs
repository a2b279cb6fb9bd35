//! Counts of tests, parsed from the summaries that test programs print.

use std::ops::AddAssign;

/// Numbers of tests that passed, failed, were skipped, or are unsupported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
    /// Golden calls of operations that do not exist yet: reported, but not counted as tests.
    pub(crate) unsupported: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.unsupported += other.unsupported;
    }
}

impl Tally {
    /// Returns the tally of one check.
    pub(crate) fn from_bool(ok: bool) -> Self {
        Self { passed: ok.into(), failed: (!ok).into(), ..Self::default() }
    }

    /// Parses `3 passed, 0 failed, 1 skipped`, or libtest's summary. `None` without "passed" and "failed".
    pub(crate) fn parse_line(line: &str) -> Option<Self> {
        let words: Vec<&str> =
            line.split_whitespace().map(|word| word.trim_matches([',', ';', '.'])).collect();
        let count = |names: &[&str]| {
            let found =
                words.windows(2).find(|pair| names.contains(&pair[1]) && pair[0].parse::<usize>().is_ok());
            found.and_then(|pair| pair[0].parse::<usize>().ok())
        };
        Some(Self {
            passed: count(&["passed"])?,
            failed: count(&["failed"])?,
            skipped: count(&["skipped", "ignored", "excepted"]).unwrap_or(0),
            unsupported: count(&["unsupported"]).unwrap_or(0),
        })
    }

    /// Sums up a program's output: the program's own last summary, or the sum of libtest's lines.
    pub(crate) fn parse_output(lines: &[String]) -> Option<Self> {
        let libtest = |line: &&String| line.trim_start().starts_with("test result:");
        // Lines with a stage's prefix belong to that stage: xtask's own tests print such lines.
        let own = |line: &&String| !libtest(line) && !line.contains(" | ");
        let own = lines.iter().rev().filter(own).find_map(|line| Self::parse_line(line));
        own.or_else(|| {
            let parts: Vec<Self> =
                lines.iter().filter(libtest).filter_map(|line| Self::parse_line(line)).collect();
            (!parts.is_empty()).then(|| {
                parts.into_iter().fold(Self::default(), |mut sum, part| {
                    sum += part;
                    sum
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(Into::into).collect()
    }

    #[test]
    fn libtest_is_summed() {
        let text = "test result: ok. 5 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
                    test a ... ok\n\
                    test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(
            Tally::parse_output(&lines(text)),
            Some(Tally { passed: 12, failed: 1, skipped: 2, unsupported: 0 })
        );
    }

    #[test]
    fn a_program_with_its_own_summary_is_counted_by_it() {
        let text = "test result: FAILED. 5 passed; 1 failed; 0 ignored\n10 passed, 1 failed, 3 skipped\nbye";
        assert_eq!(
            Tally::parse_output(&lines(text)),
            Some(Tally { passed: 10, failed: 1, skipped: 3, unsupported: 0 })
        );
        let golden = "golden: 812 passed, 0 failed, 455 unsupported of 1267 on wgpu";
        assert_eq!(
            Tally::parse_line(golden),
            Some(Tally { passed: 812, failed: 0, skipped: 0, unsupported: 455 })
        );
    }

    #[test]
    fn lines_of_a_nested_stage_are_no_summaries() {
        let text = "reads | 2 passed, 0 failed\ntest result: ok. 7 passed; 0 failed; 0 ignored";
        assert_eq!(Tally::parse_output(&lines(text)), Some(Tally { passed: 7, ..Tally::default() }));
    }

    #[test]
    fn other_lines_are_no_summaries() {
        assert_eq!(Tally::parse_line("3 tests passed"), None);
        assert_eq!(Tally::parse_line("passed failed"), None);
        assert_eq!(Tally::parse_output(&[]), None);
    }
}

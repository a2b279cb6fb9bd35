//! Starting programs: quietly, for what they answer, or in sight, for what they do.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// Runs a program unseen and returns what it printed; a failure is told in its own last words.
pub(crate) fn run_captured(command: &mut Command) -> Result<String> {
    let shown = program_name(command);
    let output = command
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{shown} could not be started"))?;
    if !output.status.success() {
        bail!("{shown} failed: {}", error_summary(&String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a program can be started and ends well.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    run_captured(Command::new(program).args(args)).is_ok()
}

/// What a program that ran in sight came to.
pub(crate) struct ProcessOutput {
    /// Whether it ended well.
    pub(crate) success: bool,
    /// What it printed.
    pub(crate) lines: Vec<String>,
}

/// Runs a program in sight, each line of it behind `name`, because others may run beside it; and keeps its lines.
pub(crate) fn run_with_prefix(name: &str, command: &mut Command) -> Result<ProcessOutput> {
    let shown = program_name(command);
    let (reader, writer) = std::io::pipe().with_context(|| format!("{shown} gets no pipe"))?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let child = command.spawn().with_context(|| format!("{shown} could not be started"));
    // The pipe ends when nobody can write to it any more, and the command holds two ends.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = child?;
    let mut lines = Vec::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(std::io::stdout(), "{name} | {line}")?;
        lines.push(line);
    }
    Ok(ProcessOutput { success: child.wait()?.success(), lines })
}

/// Runs a program in the foreground, with this terminal as its own.
pub(crate) fn run_foreground(command: &mut Command) -> Result<bool> {
    let shown = program_name(command);
    let status = command.status().with_context(|| format!("{shown} could not be started"))?;
    Ok(status.success())
}

fn program_name(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
}

/// The line of an error output that says most: the first marked as an error, otherwise the last one.
fn error_summary(stderr: &str) -> String {
    let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let marked = |line: &&str| ["E:", "ERROR:", "error:", "Err:"].iter().any(|mark| line.starts_with(mark));
    lines().find(marked).or(lines().next_back()).unwrap_or("it said nothing").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_watched_to_its_end() -> Result<()> {
        let ended =
            run_with_prefix("test", Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]))?;
        assert!(!ended.success);
        assert_eq!(ended.lines, ["one", "two"]);
        assert!(run_with_prefix("test", &mut Command::new("no such program")).is_err());
        Ok(())
    }

    #[test]
    fn an_error_is_told_in_one_line() {
        assert_eq!(
            error_summary("W: old\nE: Unable to locate package x\nmore\n"),
            "E: Unable to locate package x"
        );
        assert_eq!(error_summary("one\ntwo\n\n"), "two");
        assert_eq!(error_summary(""), "it said nothing");
    }
}

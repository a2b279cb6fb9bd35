//! Running programs: with captured output, or with output on the terminal.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// Runs a program and returns its output without showing it. An error contains the program's own message.
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

/// Reports whether a program starts and exits successfully.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    run_captured(Command::new(program).args(args)).is_ok()
}

/// Result of a program whose output is on the terminal.
pub(crate) struct ProcessOutput {
    /// True if the program exited successfully.
    pub(crate) success: bool,
    /// Lines that the program printed.
    pub(crate) lines: Vec<String>,
}

/// Runs a program with its output on the terminal, and returns the lines. Each printed line has the prefix `name`,
/// because other programs may run at the same time.
pub(crate) fn run_with_prefix(name: &str, command: &mut Command) -> Result<ProcessOutput> {
    let shown = program_name(command);
    let (reader, writer) = std::io::pipe().with_context(|| format!("{shown} gets no pipe"))?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let child = command.spawn().with_context(|| format!("{shown} could not be started"));
    // The pipe ends when its last writer closes, and the command holds two write ends.
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

/// Runs a program in the foreground, with access to this terminal.
pub(crate) fn run_foreground(command: &mut Command) -> Result<bool> {
    let shown = program_name(command);
    let status = command.status().with_context(|| format!("{shown} could not be started"))?;
    Ok(status.success())
}

fn program_name(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
}

/// Returns the most informative line of an error output: the first one marked as an error, otherwise the last one.
fn error_summary(stderr: &str) -> String {
    let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let marked = |line: &&str| ["E:", "ERROR:", "error:", "Err:"].iter().any(|mark| line.starts_with(mark));
    lines().find(marked).or(lines().next_back()).unwrap_or("it said nothing").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_awaited() -> Result<()> {
        let ended =
            run_with_prefix("test", Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]))?;
        assert!(!ended.success);
        assert_eq!(ended.lines, ["one", "two"]);
        assert!(run_with_prefix("test", &mut Command::new("no such program")).is_err());
        Ok(())
    }

    #[test]
    fn an_error_is_printed_on_one_line() {
        assert_eq!(
            error_summary("W: old\nE: Unable to locate package x\nmore\n"),
            "E: Unable to locate package x"
        );
        assert_eq!(error_summary("one\ntwo\n\n"), "two");
        assert_eq!(error_summary(""), "it said nothing");
    }
}

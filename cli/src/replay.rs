//! `forebay replay`: replays recorded allocations against the pool, without a device.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use forebay::io::printable;
use forebay::memory::trace::{ReplayReport, SegmentMode, Trace, replay};
use forebay::memory::{Bytes, Config};

#[derive(Args)]
pub(crate) struct ReplayArgs {
    /// Trace files, compressed if the name ends in .xz. The first line is JSON; allocations are lines
    /// `a ID BYTES QUEUE`, and frees are lines `f ID`.
    #[arg(required = true)]
    traces: Vec<PathBuf>,
    /// Pool settings in PyTorch's syntax, such as `max_split_size_mb:256,growth_slack:0.1`; `pytorch` selects
    /// PyTorch's defaults. If repeated, each configuration is replayed. Defaults to the environment's settings.
    #[arg(long, value_parser = parse_config)]
    config: Vec<NamedConfig>,
    /// Replays only with plain segments, as on wgpu.
    #[arg(long, conflicts_with = "virtual_memory")]
    plain: bool,
    /// Replays only with virtual memory, as on CUDA.
    #[arg(long = "virtual")]
    virtual_memory: bool,
    /// Also measures the mean time of an allocation and its free, over this number of runs.
    #[arg(long, value_name = "RUNS", default_value_t = 0)]
    time: u32,
}

/// Configuration, with the text it was parsed from.
#[derive(Clone)]
struct NamedConfig {
    name: String,
    config: Config,
}

fn parse_config(text: &str) -> Result<NamedConfig> {
    let (base, rest) = match text.strip_prefix("pytorch") {
        Some(rest) => (Config::pytorch(), rest.trim_start_matches(',')),
        None => {
            forebay::variables::check()?;
            (Config::for_device("null", 0)?, text)
        }
    };
    let name = match text {
        "" if base == Config::default() => "default",
        "" => "environment's settings",
        text => text,
    };
    Ok(NamedConfig { name: name.to_owned(), config: base.with_settings(rest)? })
}

impl ReplayArgs {
    pub(crate) fn run(mut self) -> Result<()> {
        if self.config.is_empty() {
            self.config.push(parse_config("")?);
        }
        let traces = self.traces.iter().map(|path| Ok(Trace::load(path)?)).collect::<Result<Vec<_>>>()?;
        print!("{}", format_table(&traces, &self.config, &self.segment_modes(), self.time));
        Ok(())
    }

    fn segment_modes(&self) -> Vec<SegmentMode> {
        match (self.plain, self.virtual_memory) {
            (true, _) => vec![SegmentMode::Plain],
            (_, true) => vec![SegmentMode::Virtual],
            _ => vec![SegmentMode::Virtual, SegmentMode::Plain],
        }
    }
}

/// Formats a line for each trace, mode and configuration, and the mean ratio of each configuration.
fn format_table(traces: &[Trace], settings: &[NamedConfig], modes: &[SegmentMode], runs: u32) -> String {
    let mut text = "workload              requested  allocated   reserved  ratio  calls".to_owned();
    text += "     copied  segments  largest free  fragmented";
    text += if runs > 0 { "   ns/pair\n" } else { "\n" };
    for &mode in modes {
        for setting in settings {
            let _ = write!(text, "\n{mode}, {}\n", setting.name);
            let mut logs = Vec::new();
            for trace in traces {
                let _ = write!(text, "{:<20} ", printable(&trace.baseline.workload));
                match replay(trace, setting.config, mode, runs) {
                    Ok(report) => {
                        logs.push(report.ratio().ln());
                        text += &format_row(&report, runs > 0);
                    }
                    Err(error) => {
                        let error = error.to_string();
                        text += error.lines().next().unwrap_or_default();
                    }
                }
                text.push('\n');
            }
            if logs.len() > 1 {
                let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
                let _ = writeln!(text, "{:<53} {mean:>6.3}", "geometric mean");
            }
        }
    }
    text
}

fn format_row(report: &ReplayReport, timed: bool) -> String {
    let mut line = format!(
        "{:>10} {:>10} {:>10} {:>6.3} {:>6} {:>10} {:>9} {:>13} {:>9.0} %",
        Bytes(report.peak_requested),
        Bytes(report.peak_allocated),
        Bytes(report.peak_reserved),
        report.ratio(),
        report.driver_calls,
        Bytes(report.compacted_bytes),
        report.segments,
        Bytes(report.largest_free),
        100.0 * report.fragmentation()
    );
    if timed {
        let _ = write!(line, " {:>9.1}", report.ns_per_pair);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_under_two_configurations() -> Result<()> {
        let text = "{\"workload\": \"grow\", \"peak_requested\": 1, \"peak_reserved\": 1, \"device_allocs\": 1}\n\
            a 1 62914560 0\na 2 1000 0\nf 1\na 3 83886080 0\nf 3\nf 2";
        let settings =
            [parse_config("growth_slack:0.02")?, parse_config("pytorch")?, parse_config("max_memory_mb:70")?];
        let table = format_table(&[Trace::read(text.as_bytes())?], &settings, &[SegmentMode::Plain], 0);
        let lines = table.lines().collect::<Vec<_>>();
        assert_eq!(lines.len(), 10, "{table}");
        // The pool returns 60 MiB before it takes 80 MiB; PyTorch holds both.
        assert!(lines[3].contains(" 82.0 MiB "), "{table}");
        assert!(lines[6].contains(" 142.0 MiB "), "{table}");
        assert!(lines[9].contains("out of memory"), "{table}");
        assert!(parse_config("no_such_key:1").is_err_and(|e| e.to_string().contains("valid keys")));
        Ok(())
    }
}

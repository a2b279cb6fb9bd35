//! `forebay memory`: reports, pages and comparisons of pool snapshots.

mod report;
mod timeline;
mod view;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use forebay::memory::Snapshot;

#[derive(Args)]
pub(crate) struct MemoryArgs {
    #[command(subcommand)]
    command: MemoryCommand,
}

#[derive(Subcommand)]
enum MemoryCommand {
    /// Reports the holders of memory now and at the peak, and the free memory and its fragments.
    Report {
        /// Snapshot file written by `Snapshot::save`.
        snapshot: PathBuf,
        /// Maximum number of lines in each table.
        #[arg(long, default_value_t = 10)]
        top: usize,
    },
    /// Writes the snapshot as a self-contained HTML page, or its memory over time as an SVG.
    View {
        /// Snapshot file written by `Snapshot::save`.
        snapshot: PathBuf,
        /// Output file: an SVG if its name ends in `.svg`, else HTML.
        #[arg(long, short, default_value = "memory.html")]
        out: PathBuf,
    },
    /// Lists the holders whose memory grew from the first snapshot to the second.
    Diff {
        /// Earlier snapshot.
        before: PathBuf,
        /// Later snapshot.
        after: PathBuf,
    },
}

impl MemoryArgs {
    pub(crate) fn run(self) -> Result<()> {
        match self.command {
            MemoryCommand::Report { snapshot, top } => {
                print!("{}", report::format_report(&Snapshot::load(snapshot)?, top))
            }
            MemoryCommand::View { snapshot, out } => {
                let snapshot = Snapshot::load(snapshot)?;
                if out.extension().is_some_and(|end| end == "svg") {
                    timeline::write_svg(&snapshot, &out)?;
                } else {
                    view::write_page(&snapshot, &out)?;
                }
                println!("{}", out.display());
            }
            MemoryCommand::Diff { before, after } => {
                println!("{}", Snapshot::load(before)?.diff(&Snapshot::load(after)?));
            }
        }
        Ok(())
    }
}

//! `forebay memory`: reports, pages and comparisons of pool snapshots.

mod report;
mod view;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use forebay::memory::Snapshot;

#[derive(Args)]
pub(crate) struct Memory {
    #[command(subcommand)]
    question: Question,
}

#[derive(Subcommand)]
enum Question {
    /// Prints the holders of memory, now and at the peak, and the free memory with its fragmentation.
    Report {
        /// Snapshot file written by `Snapshot::save`.
        snapshot: PathBuf,
        /// Maximum number of lines in each table.
        #[arg(long, default_value_t = 10)]
        top: usize,
    },
    /// Writes a self-contained HTML page that shows the snapshot in any browser.
    View {
        /// Snapshot file written by `Snapshot::save`.
        snapshot: PathBuf,
        /// File to write.
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

impl Memory {
    pub(crate) fn run(self) -> Result<()> {
        match self.question {
            Question::Report { snapshot, top } => print!("{}", report::text(&Snapshot::load(snapshot)?, top)),
            Question::View { snapshot, out } => {
                view::write(&Snapshot::load(snapshot)?, &out)?;
                println!("{}", out.display());
            }
            Question::Diff { before, after } => {
                println!("{}", Snapshot::load(before)?.diff(&Snapshot::load(after)?));
            }
        }
        Ok(())
    }
}

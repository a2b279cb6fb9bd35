//! `forebay memory`: what snapshots of a pool say.

mod report;
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
    /// Who holds memory, now and when most was held; what is free, and in how many pieces.
    Report {
        /// What `Snapshot::save` wrote.
        snapshot: PathBuf,
        /// Lines of every table.
        #[arg(long, default_value_t = 10)]
        top: usize,
    },
    /// Writes a page that shows it all, for any browser: one file, which needs nothing else.
    View {
        /// What `Snapshot::save` wrote.
        snapshot: PathBuf,
        /// The page.
        #[arg(long, short, default_value = "memory.html")]
        out: PathBuf,
    },
    /// Who holds more in the second snapshot than in the first.
    Diff {
        /// The earlier one.
        before: PathBuf,
        /// The later one.
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
                view::write_page(&Snapshot::load(snapshot)?, &out)?;
                println!("{}", out.display());
            }
            MemoryCommand::Diff { before, after } => {
                println!("{}", Snapshot::load(before)?.diff(&Snapshot::load(after)?));
            }
        }
        Ok(())
    }
}

//! Commands that wait for a kernel that is still being compiled, and all those behind them on the same queue.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_core::backend::{Command, Owned};
use forebay_core::error::Result;

use crate::lock;

/// The commands of one queue that wait, in order.
#[derive(Debug, Default)]
pub(crate) struct Later {
    some: AtomicBool,
    commands: Mutex<VecDeque<Owned>>,
}

impl Later {
    /// Whether nothing waits, so that a command may go to the stream at once.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.some.load(Ordering::Acquire)
    }

    /// Adds a command behind all others.
    pub(crate) fn push(&self, command: &Command<'_>) {
        let mut commands = lock(&self.commands);
        commands.push_back(Owned::new(command));
        self.some.store(true, Ordering::Release);
    }

    /// Runs what waits, in order, until `run` says that a command has to wait on. A command that fails stays, and all behind it do:
    /// nothing is left out.
    pub(crate) fn run(&self, mut run: impl FnMut(&Command<'_>) -> Result<bool>) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let mut commands = lock(&self.commands);
        while let Some(command) = commands.front() {
            if !run(&command.command())? {
                return Ok(());
            }
            commands.pop_front();
        }
        self.some.store(false, Ordering::Release);
        Ok(())
    }
}

//! Commands that wait for a kernel that is still being compiled, and all that comes behind them on the same queue.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use forebay_core::backend::{Command, Owned};
use forebay_core::error::Result;

use crate::lock;
use crate::virtual_memory::Arrangement;

/// What waits.
#[derive(Debug)]
pub(crate) enum Waiting {
    Command(Owned),
    /// Memory that moves when all in front of it has used it.
    Arrangement(Arrangement),
}

/// What waits in one queue, in order.
#[derive(Debug, Default)]
pub(crate) struct Later {
    some: AtomicBool,
    waiting: Mutex<VecDeque<Waiting>>,
}

impl Later {
    /// Whether nothing waits, so that a command may go to the stream at once.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.some.load(Ordering::Acquire)
    }

    /// Whether memory waits to move.
    pub(crate) fn has_arrangement(&self) -> bool {
        !self.is_empty() && self.lock().iter().any(|waiting| matches!(waiting, Waiting::Arrangement(_)))
    }

    /// Adds a command behind all others.
    pub(crate) fn push(&self, command: &Command<'_>) {
        self.add(&mut self.lock(), Waiting::Command(Owned::new(command)));
    }

    /// Adds an arrangement behind what waits; `false` where nothing does.
    pub(crate) fn push_arrangement(&self, arrangement: Arrangement) -> bool {
        let mut waiting = self.lock();
        let some = !waiting.is_empty();
        if some {
            self.add(&mut waiting, Waiting::Arrangement(arrangement));
        }
        some
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        lock(&self.waiting)
    }

    fn add(&self, waiting: &mut VecDeque<Waiting>, last: Waiting) {
        waiting.push_back(last);
        self.some.store(true, Ordering::Release);
    }

    /// Runs what waits, in order, until `run` says that it has to wait on. What fails stays, and all behind it does: nothing is
    /// left out.
    pub(crate) fn run(&self, mut run: impl FnMut(&mut Waiting) -> Result<bool>) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let mut waiting = self.lock();
        while let Some(first) = waiting.front_mut() {
            if !run(first)? {
                return Ok(());
            }
            waiting.pop_front();
        }
        self.some.store(false, Ordering::Release);
        Ok(())
    }
}

//! Commands that wait for a kernel that is still being compiled, and all that comes behind them on the same queue.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use forebay_core::backend::{Command, OwnedCommand};
use forebay_core::error::Result;

use crate::lock;
use crate::virtual_memory::PendingRemap;

/// What waits.
#[derive(Debug)]
pub(crate) enum DeferredItem {
    Command(OwnedCommand),
    /// Memory that moves when all in front of it has used it.
    Remap(PendingRemap),
}

/// What waits in one queue, in order.
#[derive(Debug, Default)]
pub(crate) struct DeferredQueue {
    is_nonempty: AtomicBool,
    items: Mutex<VecDeque<DeferredItem>>,
}

impl DeferredQueue {
    /// Whether nothing waits, so that a command may go to the stream at once.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.is_nonempty.load(Ordering::Acquire)
    }

    /// Whether memory waits to move.
    pub(crate) fn has_remap(&self) -> bool {
        !self.is_empty() && self.lock_items().iter().any(|waiting| matches!(waiting, DeferredItem::Remap(_)))
    }

    /// Adds a command behind all others.
    pub(crate) fn push_command(&self, command: &Command<'_>) {
        self.push_item(&mut self.lock_items(), DeferredItem::Command(OwnedCommand::from_command(command)));
    }

    /// Adds an arrangement behind what waits; `false` where nothing does.
    pub(crate) fn push_remap(&self, arrangement: PendingRemap) -> bool {
        let mut waiting = self.lock_items();
        let some = !waiting.is_empty();
        if some {
            self.push_item(&mut waiting, DeferredItem::Remap(arrangement));
        }
        some
    }

    fn lock_items(&self) -> MutexGuard<'_, VecDeque<DeferredItem>> {
        lock(&self.items)
    }

    fn push_item(&self, waiting: &mut VecDeque<DeferredItem>, last: DeferredItem) {
        waiting.push_back(last);
        self.is_nonempty.store(true, Ordering::Release);
    }

    /// Runs what waits, in order, until `run` says that it has to wait on. What fails stays, and all behind it does: nothing is
    /// left out.
    pub(crate) fn drain(&self, mut run: impl FnMut(&mut DeferredItem) -> Result<bool>) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let mut waiting = self.lock_items();
        while let Some(first) = waiting.front_mut() {
            if !run(first)? {
                return Ok(());
            }
            waiting.pop_front();
        }
        self.is_nonempty.store(false, Ordering::Release);
        Ok(())
    }
}

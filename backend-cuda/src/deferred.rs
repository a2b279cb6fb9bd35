//! Commands that wait for a kernel that is still being compiled, and all later commands of the same queue.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use forebay_core::backend::{Command, OwnedCommand};
use forebay_core::error::Result;
use forebay_core::sync::LockUnpoisoned;

use crate::virtual_memory::PendingRemap;

/// Command, or change of memory, that waits for the compiler.
#[derive(Debug)]
pub(crate) enum DeferredItem {
    /// A command of the core.
    Command(OwnedCommand),
    /// A remap that is applied when all earlier commands have used the memory.
    Remap(PendingRemap),
}

/// Deferred commands of one queue, in order.
#[derive(Debug, Default)]
pub(crate) struct DeferredQueue {
    is_nonempty: AtomicBool,
    items: Mutex<VecDeque<DeferredItem>>,
}

impl DeferredQueue {
    /// Reports whether the queue is empty, so that a command may go to the stream at once.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.is_nonempty.load(Ordering::Acquire)
    }

    pub(crate) fn has_remap(&self) -> bool {
        !self.is_empty() && self.lock_items().iter().any(|item| matches!(item, DeferredItem::Remap(_)))
    }

    pub(crate) fn push_command(&self, command: &Command<'_>) {
        self.push_item(&mut self.lock_items(), DeferredItem::Command(OwnedCommand::from_command(command)));
    }

    /// Appends a remap if the queue is not empty; returns `false` if it is.
    pub(crate) fn push_remap(&self, remap: PendingRemap) -> bool {
        let mut items = self.lock_items();
        let is_nonempty = !items.is_empty();
        if is_nonempty {
            self.push_item(&mut items, DeferredItem::Remap(remap));
        }
        is_nonempty
    }

    fn lock_items(&self) -> MutexGuard<'_, VecDeque<DeferredItem>> {
        self.items.lock_unpoisoned()
    }

    fn push_item(&self, items: &mut VecDeque<DeferredItem>, item: DeferredItem) {
        items.push_back(item);
        self.is_nonempty.store(true, Ordering::Release);
    }

    /// Runs entries in order until `run` returns `false`, because a kernel is still compiling. An entry that
    /// fails stays in the queue with all later ones, so none is skipped.
    pub(crate) fn drain(&self, mut run: impl FnMut(&mut DeferredItem) -> Result<bool>) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let mut items = self.lock_items();
        while let Some(first) = items.front_mut() {
            if !run(first)? {
                return Ok(());
            }
            items.pop_front();
        }
        self.is_nonempty.store(false, Ordering::Release);
        Ok(())
    }
}

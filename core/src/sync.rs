//! Locks that ignore poisoning: a panic while a lock is locked leaves valid data everywhere in this crate.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Access to the value of a mutex, whether or not a thread has panicked while it held the lock.
pub(crate) trait LockUnpoisoned<T> {
    /// Locks the mutex.
    fn lock_unpoisoned(&self) -> MutexGuard<'_, T>;
    /// Returns the value of an exclusively borrowed mutex.
    fn get_mut_unpoisoned(&mut self) -> &mut T;
}

impl<T> LockUnpoisoned<T> for Mutex<T> {
    fn lock_unpoisoned(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get_mut_unpoisoned(&mut self) -> &mut T {
        self.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

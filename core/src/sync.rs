//! Locks that ignore poisoning: a panic while a lock is locked leaves valid data everywhere in these crates.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Access to the value of a mutex, whether or not a thread has panicked while it held the lock.
pub trait LockUnpoisoned<T> {
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

/// Access to the value of a reader-writer lock, whether or not a thread has panicked while it held the lock.
pub trait RwLockUnpoisoned<T> {
    /// Locks for reading.
    fn read_unpoisoned(&self) -> RwLockReadGuard<'_, T>;
    /// Locks for writing.
    fn write_unpoisoned(&self) -> RwLockWriteGuard<'_, T>;
}

impl<T> RwLockUnpoisoned<T> for RwLock<T> {
    fn read_unpoisoned(&self) -> RwLockReadGuard<'_, T> {
        self.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_unpoisoned(&self) -> RwLockWriteGuard<'_, T> {
        self.write().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Thread-local values that are in force while a guard exists.
//!
//! A [`ScopedLocal`] is a stack of values. Each [`ScopedGuard`] is one entry, and the top value is in force.
//! Guards may be dropped in any order: an entry below the top is removed from its place. Entries are stored
//! in their guards, so entering and leaving in order is cheap. Only an entry removed from the middle is
//! remembered until the one above it is gone.
//!
//! No type here has a destructor that runs when the thread ends. A guard in a program's `thread_local!` can
//! therefore be dropped safely at that time. Memory leaks only if guards are forgotten (`mem::forget`).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::thread::LocalKey;

/// Slot that holds the top value.
pub trait ReplaceSlot {
    /// Type of the value.
    type Value;
    /// Replaces the value and returns the previous one.
    fn replace_value(&self, value: Self::Value) -> Self::Value;
}

impl<T> ReplaceSlot for Cell<T> {
    type Value = T;
    fn replace_value(&self, value: T) -> T {
        self.replace(value)
    }
}

/// Slot of a value that is changed in place. The last value is never dropped.
pub struct NoDropCell<T>(RefCell<ManuallyDrop<T>>);

impl<T> NoDropCell<T> {
    pub const fn new(value: T) -> Self {
        Self(RefCell::new(ManuallyDrop::new(value)))
    }
}

impl<T> ReplaceSlot for NoDropCell<T> {
    type Value = T;
    fn replace_value(&self, value: T) -> T {
        ManuallyDrop::into_inner(self.0.replace(ManuallyDrop::new(value)))
    }
}

/// Entry that was removed from below another one.
struct RemovedEntry<V> {
    id: u64,
    below: u64,
    saved_value: V,
}

/// Type of a `thread_local!` whose value is set by guards.
pub struct ScopedLocal<S: ReplaceSlot> {
    slot: S,
    /// Id of the top entry; 0 if the stack is empty.
    top_entry: Cell<u64>,
    last_id: Cell<u64>,
    removed_entries: RefCell<ManuallyDrop<Vec<RemovedEntry<S::Value>>>>,
}

impl<S: ReplaceSlot> ScopedLocal<S> {
    /// Creates an empty stack; `slot` holds the value outside of all guards.
    pub const fn new(slot: S) -> Self {
        Self {
            slot,
            top_entry: Cell::new(0),
            last_id: Cell::new(0),
            removed_entries: RefCell::new(ManuallyDrop::new(Vec::new())),
        }
    }

    /// Reports whether no guard is alive.
    pub fn has_no_guards(&self) -> bool {
        self.top_entry.get() == 0
    }

    #[inline]
    fn remove_entry(&self, id: u64, below: u64, before: S::Value) {
        if self.top_entry.get() != id {
            self.removed_entries.borrow_mut().push(RemovedEntry { id, below, saved_value: before });
            return;
        }
        self.top_entry.set(below);
        drop(self.slot.replace_value(before));
        self.pop_removed_entries();
    }

    /// Pops entries that were removed while others were above them.
    #[inline]
    fn pop_removed_entries(&self) {
        while !self.removed_entries.borrow().is_empty() {
            let found = {
                let removed = &mut *self.removed_entries.borrow_mut();
                removed.iter().position(|r| r.id == self.top_entry.get()).map(|at| removed.swap_remove(at))
            };
            let Some(RemovedEntry { below, saved_value: before, .. }) = found else { return };
            self.top_entry.set(below);
            drop(self.slot.replace_value(before));
            if self.removed_entries.borrow().is_empty() {
                let empty = mem::take(&mut **self.removed_entries.borrow_mut());
                drop(empty);
            }
        }
    }
}

/// Reads a value of this thread.
pub trait GetCurrent<T> {
    /// Returns the value in force.
    fn current(&'static self) -> T;
}

impl<T: Copy + 'static> GetCurrent<T> for LocalKey<ScopedLocal<Cell<T>>> {
    #[inline]
    fn current(&'static self) -> T {
        self.with(|stack| stack.slot.get())
    }
}

/// Reads and changes a value of this thread in place.
pub trait WithCurrent<T> {
    /// Reads the value in force.
    fn with_current<R>(&'static self, read: impl FnOnce(&T) -> R) -> R;
    /// Changes the value in force.
    fn with_current_mut<R>(&'static self, change: impl FnOnce(&mut T) -> R) -> R;
}

impl<T: 'static> WithCurrent<T> for LocalKey<ScopedLocal<NoDropCell<T>>> {
    fn with_current<R>(&'static self, read: impl FnOnce(&T) -> R) -> R {
        self.with(|stack| read(&stack.slot.0.borrow()))
    }

    fn with_current_mut<R>(&'static self, change: impl FnOnce(&mut T) -> R) -> R {
        self.with(|stack| change(&mut stack.slot.0.borrow_mut()))
    }
}

/// Guard that sets a value of this thread; see the [module](self).
pub struct ScopedGuard<S: ReplaceSlot + 'static> {
    stack: &'static LocalKey<ScopedLocal<S>>,
    saved_value: Option<S::Value>,
    id: u64,
    below: u64,
    // The guard must be dropped on the thread that created it.
    not_send: PhantomData<*const ()>,
}

impl<S: ReplaceSlot> ScopedGuard<S> {
    #[inline]
    pub fn new(local: &'static LocalKey<ScopedLocal<S>>, value: S::Value) -> Self {
        local.with(|stack| {
            let (id, below) = (stack.last_id.get() + 1, stack.top_entry.get());
            stack.last_id.set(id);
            stack.top_entry.set(id);
            let before = Some(stack.slot.replace_value(value));
            Self { stack: local, saved_value: before, id, below, not_send: PhantomData }
        })
    }
}

impl<S: ReplaceSlot> Drop for ScopedGuard<S> {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.saved_value.take() {
            // The thread-local may already be destroyed; then there is nothing to restore.
            let _gone = self.stack.try_with(|stack| stack.remove_entry(self.id, self.below, before));
        }
    }
}

impl<S: ReplaceSlot> fmt::Debug for ScopedGuard<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scoped")
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    thread_local! {
        static NUMBER: ScopedLocal<Cell<u32>> = const { ScopedLocal::new(Cell::new(0)) };
        static WORD: ScopedLocal<NoDropCell<Option<Rc<String>>>> = const { ScopedLocal::new(NoDropCell::new(None)) };
    }

    #[test]
    fn the_previous_value_is_restored() {
        let outer = ScopedGuard::new(&NUMBER, 2);
        {
            let _inner = ScopedGuard::new(&NUMBER, 3);
            assert_eq!(NUMBER.current(), 3);
        }
        assert_eq!(NUMBER.current(), 2);
        drop(outer);
        assert_eq!(NUMBER.current(), 0);
        let word = Rc::new("a".to_owned());
        let guard = ScopedGuard::new(&WORD, Some(word.clone()));
        WORD.with_current_mut(|w| assert_eq!(w.take().as_deref().map(String::as_str), Some("a")));
        drop(guard);
        assert_eq!((WORD.with_current(Option::is_none), Rc::strong_count(&word)), (true, 1));
    }

    proptest! {
        #[test]
        fn guards_dropped_in_any_order_leave_the_innermost_live_one(
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..60)
        ) {
            let words = Rc::new(String::new());
            type Guards = (u32, ScopedGuard<Cell<u32>>, ScopedGuard<NoDropCell<Option<Rc<String>>>>);
            let mut alive: Vec<Guards> = Vec::new();
            for (k, (enter, at)) in steps.into_iter().enumerate() {
                if enter || alive.is_empty() {
                    let k = k as u32 + 1;
                    alive.push((k, ScopedGuard::new(&NUMBER, k), ScopedGuard::new(&WORD, Some(Rc::clone(&words)))));
                } else {
                    drop(alive.remove(at.index(alive.len())));
                }
                prop_assert_eq!(NUMBER.current(), alive.last().map_or(0, |(k, ..)| *k));
                prop_assert_eq!(NUMBER.with(ScopedLocal::has_no_guards), alive.is_empty());
            }
            drop(alive);
            prop_assert_eq!((NUMBER.current(), Rc::strong_count(&words)), (0, 1));
            prop_assert_eq!(NUMBER.with(|n| n.removed_entries.borrow().capacity()), 0);
        }
    }

    #[test]
    fn a_panic_between_guards_restores_the_previous_value() {
        let _outer = ScopedGuard::new(&NUMBER, 1);
        let unwound = std::panic::catch_unwind(|| {
            let first = ScopedGuard::new(&NUMBER, 2);
            let _second = ScopedGuard::new(&NUMBER, 3);
            drop(first);
            panic!("expected");
        });
        assert_eq!((unwound.is_err(), NUMBER.current()), (true, 1));
    }

    #[test]
    fn a_guard_is_dropped_when_its_thread_ends() {
        type Guards = (ScopedGuard<Cell<u32>>, ScopedGuard<NoDropCell<Option<Rc<String>>>>);
        thread_local! {
            // One is initialised before the values and one after them, so they are destroyed in different
            // orders.
            static EARLY: RefCell<Vec<Guards>> = const { RefCell::new(Vec::new()) };
            static LATE: RefCell<Vec<Guards>> = const { RefCell::new(Vec::new()) };
        }
        let thread = std::thread::spawn(|| {
            let make =
                |n| (ScopedGuard::new(&NUMBER, n), ScopedGuard::new(&WORD, Some(Rc::new(n.to_string()))));
            EARLY.with_borrow_mut(Vec::clear);
            for n in 1..4 {
                EARLY.with_borrow_mut(|e| e.push(make(2 * n)));
                LATE.with_borrow_mut(|l| l.push(make(2 * n + 1)));
            }
            NUMBER.current()
        });
        assert_eq!(thread.join().ok(), Some(7));
    }
}

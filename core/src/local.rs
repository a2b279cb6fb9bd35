//! Values of a thread that hold while a guard lives.
//!
//! A [`Local`] is a stack of values; each [`Scoped`] guard is one entry, and the value on top is in force. Guards may be dropped in any
//! order: an entry that is not on top is removed from where it is. Entries lie in their guards, so that entering and leaving in order
//! costs a few moves; only an entry that was removed from the middle is remembered until the one above it is gone.
//!
//! Nothing here has a destructor that the thread's end runs. A guard in a `thread_local!` of a program is therefore dropped safely
//! when its thread ends. Memory is lost only where guards are forgotten (`mem::forget`).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::thread::LocalKey;

/// Where the value on top is kept.
pub(crate) trait Slot {
    /// The value.
    type Value;
    /// Puts another value there and returns the one that was there.
    fn put(&self, value: Self::Value) -> Self::Value;
}

impl<T> Slot for Cell<T> {
    type Value = T;
    fn put(&self, value: T) -> T {
        self.replace(value)
    }
}

/// Slot of a value that is changed in place. It never drops what it holds last.
pub(crate) struct LocalSlot<T>(RefCell<ManuallyDrop<T>>);

impl<T> LocalSlot<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(RefCell::new(ManuallyDrop::new(value)))
    }
}

impl<T> Slot for LocalSlot<T> {
    type Value = T;
    fn put(&self, value: T) -> T {
        ManuallyDrop::into_inner(self.0.replace(ManuallyDrop::new(value)))
    }
}

/// An entry that was removed from below another one.
struct Removed<V> {
    id: u64,
    below: u64,
    before: V,
}

/// A value of each thread, to be the type of a `thread_local!`, with the guards that set it.
pub(crate) struct Local<S: Slot> {
    slot: S,
    /// The entry on top; 0 where there is none.
    top: Cell<u64>,
    last: Cell<u64>,
    removed: RefCell<ManuallyDrop<Vec<Removed<S::Value>>>>,
}

impl<S: Slot> Local<S> {
    /// A stack without entries: `slot` holds the value outside of all guards.
    pub(crate) const fn new(slot: S) -> Self {
        Self {
            slot,
            top: Cell::new(0),
            last: Cell::new(0),
            removed: RefCell::new(ManuallyDrop::new(Vec::new())),
        }
    }

    /// Reports whether no guard is alive.
    pub(crate) fn is_outside(&self) -> bool {
        self.top.get() == 0
    }

    #[inline]
    fn leave(&self, id: u64, below: u64, before: S::Value) {
        if self.top.get() != id {
            self.removed.borrow_mut().push(Removed { id, below, before });
            return;
        }
        self.top.set(below);
        drop(self.slot.put(before));
        self.settle();
    }

    /// Takes the entries off that were removed while others were above them.
    #[inline]
    fn settle(&self) {
        while !self.removed.borrow().is_empty() {
            let found = {
                let removed = &mut *self.removed.borrow_mut();
                removed.iter().position(|r| r.id == self.top.get()).map(|at| removed.swap_remove(at))
            };
            let Some(Removed { below, before, .. }) = found else { return };
            self.top.set(below);
            drop(self.slot.put(before));
            if self.removed.borrow().is_empty() {
                let empty = mem::take(&mut **self.removed.borrow_mut());
                drop(empty);
            }
        }
    }
}

impl<T: Copy> Local<Cell<T>> {
    /// The value in force.
    #[inline]
    pub(crate) fn get(&self) -> T {
        self.slot.get()
    }
}

/// Reads a value of this thread.
pub(crate) trait Get<T> {
    /// The value in force.
    fn now(&'static self) -> T;
}

impl<T: Copy + 'static> Get<T> for LocalKey<Local<Cell<T>>> {
    #[inline]
    fn now(&'static self) -> T {
        self.with(Local::get)
    }
}

/// Reads and changes a value of this thread in place.
pub(crate) trait InPlace<T> {
    /// Reads the value in force.
    fn read<R>(&'static self, read: impl FnOnce(&T) -> R) -> R;
    /// Changes the value in force.
    fn change<R>(&'static self, change: impl FnOnce(&mut T) -> R) -> R;
}

impl<T: 'static> InPlace<T> for LocalKey<Local<LocalSlot<T>>> {
    fn read<R>(&'static self, read: impl FnOnce(&T) -> R) -> R {
        self.with(|stack| read(&stack.slot.0.borrow()))
    }

    fn change<R>(&'static self, change: impl FnOnce(&mut T) -> R) -> R {
        self.with(|stack| change(&mut stack.slot.0.borrow_mut()))
    }
}

/// A value of this thread while it lives; see the [module](self).
pub(crate) struct Scoped<S: Slot + 'static> {
    local: &'static LocalKey<Local<S>>,
    before: Option<S::Value>,
    id: u64,
    below: u64,
    // It must be dropped where it was made.
    here: PhantomData<*const ()>,
}

impl<S: Slot> Scoped<S> {
    #[inline]
    pub(crate) fn new(local: &'static LocalKey<Local<S>>, value: S::Value) -> Self {
        local.with(|stack| {
            let (id, below) = (stack.last.get() + 1, stack.top.get());
            stack.last.set(id);
            stack.top.set(id);
            let before = Some(stack.slot.put(value));
            Self { local, before, id, below, here: PhantomData }
        })
    }
}

impl<S: Slot> Drop for Scoped<S> {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            // Without the value, where a platform has taken it down already: nothing is left to be set back.
            let _gone = self.local.try_with(|stack| stack.leave(self.id, self.below, before));
        }
    }
}

impl<S: Slot> fmt::Debug for Scoped<S> {
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
        static NUMBER: Local<Cell<u32>> = const { Local::new(Cell::new(0)) };
        static WORD: Local<LocalSlot<Option<Rc<String>>>> = const { Local::new(LocalSlot::new(None)) };
    }

    #[test]
    fn what_was_there_comes_back() {
        let outer = Scoped::new(&NUMBER, 2);
        {
            let _inner = Scoped::new(&NUMBER, 3);
            assert_eq!(NUMBER.now(), 3);
        }
        assert_eq!(NUMBER.now(), 2);
        drop(outer);
        assert_eq!(NUMBER.now(), 0);
        let word = Rc::new("a".to_owned());
        let guard = Scoped::new(&WORD, Some(word.clone()));
        WORD.change(|w| assert_eq!(w.take().as_deref().map(String::as_str), Some("a")));
        drop(guard);
        assert_eq!((WORD.read(Option::is_none), Rc::strong_count(&word)), (true, 1));
    }

    proptest! {
        #[test]
        fn guards_dropped_in_any_order_leave_the_innermost_that_lives(
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..60)
        ) {
            let words = Rc::new(String::new());
            type Guards = (u32, Scoped<Cell<u32>>, Scoped<LocalSlot<Option<Rc<String>>>>);
            let mut alive: Vec<Guards> = Vec::new();
            for (k, (enter, at)) in steps.into_iter().enumerate() {
                if enter || alive.is_empty() {
                    let k = k as u32 + 1;
                    alive.push((k, Scoped::new(&NUMBER, k), Scoped::new(&WORD, Some(Rc::clone(&words)))));
                } else {
                    drop(alive.remove(at.index(alive.len())));
                }
                prop_assert_eq!(NUMBER.now(), alive.last().map_or(0, |(k, ..)| *k));
                prop_assert_eq!(NUMBER.with(Local::is_outside), alive.is_empty());
            }
            drop(alive);
            prop_assert_eq!((NUMBER.now(), Rc::strong_count(&words)), (0, 1));
            prop_assert_eq!(NUMBER.with(|n| n.removed.borrow().capacity()), 0);
        }
    }

    #[test]
    fn a_panic_between_guards_leaves_the_value_of_before() {
        let _outer = Scoped::new(&NUMBER, 1);
        let unwound = std::panic::catch_unwind(|| {
            let first = Scoped::new(&NUMBER, 2);
            let _second = Scoped::new(&NUMBER, 3);
            drop(first);
            panic!("expected");
        });
        assert_eq!((unwound.is_err(), NUMBER.now()), (true, 1));
    }

    #[test]
    fn a_guard_is_dropped_when_its_thread_ends() {
        type Guards = (Scoped<Cell<u32>>, Scoped<LocalSlot<Option<Rc<String>>>>);
        thread_local! {
            // One that is made before the values are first used, and one after that: they are destroyed in different orders.
            static EARLY: RefCell<Vec<Guards>> = const { RefCell::new(Vec::new()) };
            static LATE: RefCell<Vec<Guards>> = const { RefCell::new(Vec::new()) };
        }
        let thread = std::thread::spawn(|| {
            let make = |n| (Scoped::new(&NUMBER, n), Scoped::new(&WORD, Some(Rc::new(n.to_string()))));
            EARLY.with_borrow_mut(Vec::clear);
            for n in 1..4 {
                EARLY.with_borrow_mut(|e| e.push(make(2 * n)));
                LATE.with_borrow_mut(|l| l.push(make(2 * n + 1)));
            }
            NUMBER.now()
        });
        assert_eq!(thread.join().ok(), Some(7));
    }
}

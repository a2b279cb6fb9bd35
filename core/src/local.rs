//! Values of a thread that hold while a guard lives.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::thread::LocalKey;

/// Where a value of a thread is kept.
pub(crate) trait Slot {
    /// The value.
    type Value;
    /// Puts another one there; gives what was there.
    fn put(&'static self, value: Self::Value) -> Self::Value;
}

impl<T: 'static> Slot for LocalKey<Cell<T>> {
    type Value = T;
    fn put(&'static self, value: T) -> T {
        self.replace(value)
    }
}

impl<T: 'static> Slot for LocalKey<RefCell<T>> {
    type Value = T;
    fn put(&'static self, value: T) -> T {
        self.replace(value)
    }
}

/// A value of this thread while it lives; then what was there before is there again. Guards of one value are dropped in reverse order.
pub(crate) struct Scoped<S: Slot + 'static> {
    slot: &'static S,
    before: Option<S::Value>,
    // It must be dropped where it was made.
    here: PhantomData<*const ()>,
}

impl<S: Slot> Scoped<S> {
    pub(crate) fn new(slot: &'static S, value: S::Value) -> Self {
        Self { slot, before: Some(slot.put(value)), here: PhantomData }
    }

    /// What will be there again.
    pub(crate) fn before(&self) -> Option<&S::Value> {
        self.before.as_ref()
    }
}

impl<S: Slot> Drop for Scoped<S> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            drop(self.slot.put(before));
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
    use super::*;

    thread_local! {
        static NUMBER: Cell<u32> = const { Cell::new(1) };
        static WORD: RefCell<Option<String>> = const { RefCell::new(None) };
    }

    #[test]
    fn what_was_there_comes_back() {
        let outer = Scoped::new(&NUMBER, 2);
        {
            let inner = Scoped::new(&NUMBER, 3);
            assert_eq!((NUMBER.get(), inner.before()), (3, Some(&2)));
        }
        assert_eq!(NUMBER.get(), 2);
        drop(outer);
        assert_eq!(NUMBER.get(), 1);
        drop(Scoped::new(&WORD, Some("a".into())));
        assert_eq!(WORD.take(), None);
    }
}

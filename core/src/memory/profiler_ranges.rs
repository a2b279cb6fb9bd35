//! Ranges of a profiler's timeline for the scopes of [`scope`](super::scope). A listener is called for each
//! module and operation that a thread enters and leaves; without a listener this costs nothing.
//!
//! The CUDA backend forwards ranges to NVTX (`FOREBAY_NVTX=1`), so that Nsight Systems shows the module of
//! each kernel.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use super::Tag;
use super::scope::Scope;

/// Listener of ranges. Ranges nest on each thread: a pop ends the last push of its thread.
pub trait RangeListener: Send + Sync {
    /// Begins a range: `encoder.fc1` for a module, `encoder.fc1: linear` for an operation in it, and
    /// `encoder.fc1: linear backward` for the operation's gradient.
    fn push(&self, name: &str);
    /// Ends the last range of this thread.
    fn pop(&self);
}

static IS_ENABLED: AtomicBool = AtomicBool::new(false);
static LISTENER: RwLock<Option<&'static dyn RangeListener>> = RwLock::new(None);

/// Sets the listener for scopes entered from now on, on every thread; `None` removes it. Earlier scopes end
/// at the listener they began with.
pub fn set_range_listener(ranges: Option<&'static dyn RangeListener>) {
    let mut set = LISTENER.write().unwrap_or_else(PoisonError::into_inner);
    *set = ranges;
    IS_ENABLED.store(ranges.is_some(), Ordering::Release);
}

/// Reports whether a listener is set.
#[inline]
pub(super) fn is_enabled() -> bool {
    IS_ENABLED.load(Ordering::Relaxed)
}

/// Range of a scope's guard: the listener to notify of its end, if the range began.
pub(super) struct ProfilerRange(Option<&'static dyn RangeListener>);

impl ProfilerRange {
    pub(super) const NONE: Self = Self(None);

    /// Begins a range if the scope names a new module or operation.
    pub(super) fn enter(before: &Scope, now: &Scope) -> Self {
        Self(begin_range(before, now))
    }

    /// Ends the range, even if the listener was removed meanwhile.
    #[inline]
    pub(super) fn end(&self) {
        if let Some(ranges) = self.0 {
            ranges.pop();
        }
    }
}

impl fmt::Debug for ProfilerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Range").field(&self.0.is_some()).finish()
    }
}

#[cold]
fn begin_range(before: &Scope, now: &Scope) -> Option<&'static dyn RangeListener> {
    let entered_op = now.op != before.op && !now.op.is_empty();
    if !entered_op && now.module == before.module {
        return None;
    }
    let ranges = (*LISTENER.read().unwrap_or_else(PoisonError::into_inner))?;
    let mut name = now.module.to_string();
    if entered_op {
        let colon = if name.is_empty() { "" } else { ": " };
        let pass = if now.tag == Tag::Gradient { " backward" } else { "" };
        // Writing to a string does not fail.
        let _ = write!(name, "{colon}{}{pass}", now.op);
    }
    ranges.push(&name);
    Some(ranges)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::dtype::DType;
    use crate::memory::scope;
    use crate::runtime::device::Device;
    use crate::tensor::Tensor;

    /// Ranges that this test's thread was told of; other tests run concurrently in the process.
    struct RangeLog(std::thread::ThreadId, Mutex<Vec<String>>);

    impl RangeLog {
        fn push_line(&self, line: String) {
            if std::thread::current().id() == self.0 {
                self.1.lock().unwrap().push(line);
            }
        }
    }

    impl RangeListener for RangeLog {
        fn push(&self, name: &str) {
            self.push_line(format!("+{name}"));
        }

        fn pop(&self) {
            self.push_line("-".into());
        }
    }

    #[test]
    fn scopes_are_ranges_in_order_while_a_listener_is_set() {
        let device = Device::null(Default::default());
        let record: &'static RangeLog =
            Box::leak(Box::new(RangeLog(std::thread::current().id(), Mutex::default())));
        let x = Tensor::ones([2, 2], DType::F32, &device).unwrap().to_leaf().unwrap();
        let _unheard = scope::enter_module("before");
        set_range_listener(Some(record));
        let y = {
            let _net = scope::enter_module("fc1");
            let _tag = scope::enter_tag(Tag::Activation);
            x.exp().unwrap().sum((), false).unwrap()
        };
        y.backward().unwrap();
        let last = scope::enter_module("last");
        set_range_listener(None);
        drop(last);
        drop(x.exp().unwrap());
        let lines = record.1.lock().unwrap().clone();
        assert_eq!(lines[..2], ["+before.fc1", "+before.fc1: exp"]);
        let at =
            |line: &str| lines.iter().position(|l| l == line).unwrap_or_else(|| panic!("{line}: {lines:?}"));
        assert!(at("+before.fc1: sum") < at("+before.fc1: sum backward"));
        assert!(at("+before.fc1: sum backward") < at("+before.fc1: exp backward"));
        assert_eq!(lines[lines.len() - 2..], ["+before.last", "-"], "a range that was begun is ended");
        let depths = lines.iter().scan(0, |depth, line| {
            *depth += if line == "-" { -1 } else { 1 };
            Some(*depth)
        });
        assert!(depths.clone().all(|depth| depth >= 0) && depths.last() == Some(0), "{lines:?}");
    }
}

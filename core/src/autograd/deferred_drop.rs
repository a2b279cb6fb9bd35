//! Drops autograd graphs without recursion, because a graph may be deeper than the stack.
//!
//! All references between parts of a graph go through a [`Node`] or a [`Leaf`]: inputs, saved tensors,
//! closures of checkpoints, gradients with a history, hooks. The outermost drop on a thread drops the
//! contents of its node. Nodes and leaves that this drops in turn put their contents into a queue of the
//! thread, which the outermost drop empties before it returns.
//!
//! All memory is free when the outermost drop returns. A panic of a destructor resumes after the queue is
//! empty.

use std::cell::RefCell;
use std::mem::{self, ManuallyDrop};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use smallvec::SmallVec;

use super::hooks::HookList;
use super::low_precision_copy::LowPrecisionCopy;
use super::{BackwardFn, BackwardFnState, GradEdge, Leaf, Node};
use crate::sync::LockUnpoisoned;
use crate::tensor::Tensor;

/// Contents of a dropped node or leaf. Fields are dropped in this order.
enum DroppedContents {
    Node {
        _backward: Option<Arc<BackwardFn>>,
        _hooks: Option<Arc<HookList>>,
        _inputs: SmallVec<[Option<GradEdge>; 4]>,
    },
    Leaf {
        _grad: Option<Tensor>,
        _copy: LowPrecisionCopy,
        _hooks: Option<Arc<HookList>>,
    },
}

/// Contents that wait to be dropped on a thread.
struct DropQueue {
    pending: Vec<DroppedContents>,
    /// If true, an outer drop is emptying the queue.
    is_draining: bool,
}

thread_local! {
    // Without a destructor the queue outlives other thread-locals, which may hold tensors.
    static DROP_QUEUE: ManuallyDrop<RefCell<DropQueue>> =
        const { ManuallyDrop::new(RefCell::new(DropQueue { pending: Vec::new(), is_draining: false })) };
}

/// Drops contents now, or queues them for the outermost drop.
fn drop_without_recursion(remains: DroppedContents) {
    let first = DROP_QUEUE.with(|queue| {
        let mut queue = queue.borrow_mut();
        if queue.is_draining {
            queue.pending.push(remains);
            return None;
        }
        queue.is_draining = true;
        Some(remains)
    });
    let Some(mut next) = first else { return };
    let mut panic = None;
    loop {
        // A panic in the destructor of a captured value must not leak the rest.
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(next))) {
            panic.get_or_insert(payload);
        }
        let popped = DROP_QUEUE.with(|queue| {
            let mut queue = queue.borrow_mut();
            let popped = queue.pending.pop();
            if popped.is_none() {
                queue.is_draining = false;
                // The queue has no destructor, so its buffer is freed here in case the thread ends.
                drop(mem::take(&mut queue.pending));
            }
            popped
        });
        match popped {
            Some(remains) => next = remains,
            None => break,
        }
    }
    if let Some(payload) = panic
        && !std::thread::panicking()
    {
        resume_unwind(payload);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let closure = mem::replace(self.backward_fn.get_mut_unpoisoned(), BackwardFnState::Freed);
        let backward = match closure {
            BackwardFnState::Saved(backward) => Some(backward),
            BackwardFnState::Running | BackwardFnState::Freed => None,
        };
        let inputs = mem::take(&mut self.next_edges);
        drop_without_recursion(DroppedContents::Node {
            _backward: backward,
            _hooks: self.hooks.take(),
            _inputs: inputs,
        });
    }
}

impl Drop for Leaf {
    fn drop(&mut self) {
        let grad = self.grad.get_mut_unpoisoned().take();
        let copy = mem::take(self.low_precision_copy.get_mut_unpoisoned());
        let hooks = self.hooks.take();
        if grad.is_some() || hooks.is_some() || !matches!(copy, LowPrecisionCopy::None) {
            drop_without_recursion(DroppedContents::Leaf { _grad: grad, _copy: copy, _hooks: hooks });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;
    use std::thread;

    use smallvec::smallvec;

    use super::super::{checkpoint, differentiable, once_differentiable};
    use super::*;
    use crate::dtype::DType;
    use crate::error::Result;
    use crate::runtime::device::Device;

    const DEPTH: usize = 30_000;

    /// Builds a graph of depth `DEPTH` on a thread with a small stack, and drops it there.
    fn on_a_small_stack(deepen: impl Fn(&Tensor) -> Result<Tensor> + Send + 'static) {
        let work = move || -> Result<()> {
            let device = Device::null(Default::default());
            let mut t = Tensor::ones([1], DType::F32, &device)?.to_leaf()?;
            for _ in 0..DEPTH {
                t = deepen(&t)?;
            }
            drop(t);
            assert_eq!(device.memory().allocated(), 0);
            Ok(())
        };
        let thread = thread::Builder::new().stack_size(1 << 20).spawn(work).expect("a thread");
        thread.join().expect("it does not panic").expect("it does not fail");
    }

    #[test]
    fn chains_of_operations_are_dropped() {
        on_a_small_stack(|t| t.reshape([1]));
    }

    #[test]
    fn closures_that_hold_results_are_dropped() {
        on_a_small_stack(|t| {
            let (held, x) = (t.clone(), t.detach().to_leaf()?);
            Ok(once_differentiable("own", x.detach(), &[&x], move |g, _| {
                let _ = &held;
                Ok(smallvec![Some(g.clone())])
            }))
        });
    }

    #[test]
    fn checkpoints_that_capture_the_last_one_are_dropped() {
        on_a_small_stack(|t| {
            let held = t.clone();
            checkpoint(&[&t.detach()], move |_| held.reshape([1]))
        });
    }

    #[test]
    fn leaves_with_gradients_that_have_a_history_are_dropped() {
        on_a_small_stack(|t| {
            let next = t.detach().to_leaf()?;
            next.set_grad(Some(t.reshape([1])?));
            Ok(next)
        });
    }

    #[test]
    fn leaves_with_leaves_for_gradients_are_dropped() {
        on_a_small_stack(|t| {
            let next = t.detach().to_leaf()?;
            next.set_grad(Some(t.clone()));
            Ok(next)
        });
    }

    #[test]
    fn hooks_that_hold_other_tensors_are_dropped() {
        on_a_small_stack(|t| {
            let (next, held) = (t.detach().to_leaf()?, t.clone());
            next.register_hook(move |_| Ok(Some(held.clone())))?;
            let (result, held) = (next.reshape([1])?, next);
            result.register_hook(move |_| Ok(Some(held.clone())))?;
            Ok(result)
        });
    }

    #[test]
    fn recorded_writes_are_dropped() {
        on_a_small_stack(|t| {
            let next = t.detach();
            next.copy_(t)?;
            Ok(next)
        });
    }

    thread_local! {
        static LAST: RefCell<Option<Tensor>> = const { RefCell::new(None) };
    }

    #[test]
    fn histories_are_dropped_when_a_thread_ends() {
        let work = || {
            let device = Device::null(Default::default());
            let mut t = Tensor::ones([1], DType::F32, &device)?.to_leaf()?;
            for _ in 0..DEPTH {
                t = t.reshape([1])?;
            }
            LAST.set(Some(t));
            Ok::<_, crate::error::Error>(device)
        };
        let thread = thread::Builder::new().stack_size(1 << 20).spawn(work).expect("a thread");
        let device = thread.join().expect("it does not panic").expect("it does not fail");
        assert_eq!(device.memory().allocated(), 0);
    }

    #[test]
    fn a_panicking_destructor_leaks_nothing_else() {
        struct PanicOnDrop;
        impl Drop for PanicOnDrop {
            fn drop(&mut self) {
                panic!("a destructor");
            }
        }
        let device = Device::null(Default::default());
        let make = || -> Result<Tensor> {
            let mut t = Tensor::ones([1], DType::F32, &device)?.to_leaf()?;
            for k in 0..10 {
                let bomb = (k == 5).then(|| PanicOnDrop);
                t = differentiable("own", t.add(1.0)?.detach(), &[&t], move |g, _| {
                    let _ = &bomb;
                    Ok(smallvec![Some(g.clone())])
                });
            }
            Ok(t)
        };
        let t = make().expect("it is made");
        assert!(catch_unwind(AssertUnwindSafe(move || drop(t))).is_err());
        assert_eq!(device.memory().allocated(), 0);
        // The queue works as before, also while a panic unwinds.
        let t = make().expect("it is made");
        let unwound = catch_unwind(AssertUnwindSafe(move || {
            let _t = t;
            panic!("the first panic");
        }));
        assert!(unwound.is_err());
        assert_eq!(device.memory().allocated(), 0);
    }
}

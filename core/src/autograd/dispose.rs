//! Drops what nodes and leaves hold without recursion: a tape is as deep as a program makes it, and the stack is not.
//!
//! Everything that leads from one piece of history to another goes through a [`Node`] or a [`Leaf`]: inputs, saved tensors, closures of
//! checkpoints, gradients with a history, hooks. The first of them that is dropped on a thread drops what it holds; those that are dropped
//! meanwhile are put in a queue of the thread, which the first one empties before it returns.
//!
//! Memory is free when the outermost drop returns. A panic of a destructor goes on after the queue is empty.

use std::cell::RefCell;
use std::mem::{self, ManuallyDrop};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, PoisonError};

use smallvec::SmallVec;

use super::hooks::Hooks;
use super::{Backward, Closure, Leaf, Meta, Node};
use crate::amp::copies::Copy;
use crate::tensor::Tensor;

/// Contents of a node or a leaf that is gone, dropped in this order.
enum Remains {
    Node {
        _backward: Option<Arc<Backward>>,
        _hooks: Option<Arc<Hooks>>,
        _inputs: SmallVec<[Option<Meta>; 4]>,
    },
    Leaf {
        _grad: Option<Tensor>,
        _copy: Copy,
        _hooks: Option<Arc<Hooks>>,
    },
}

/// Remains that wait on a thread.
struct Queue {
    waiting: Vec<Remains>,
    /// Whether a drop further out empties the queue.
    is_emptied: bool,
}

thread_local! {
    // Without a destructor of its own, the queue is there as long as the thread is, also for tensors in other thread-locals.
    static QUEUE: ManuallyDrop<RefCell<Queue>> =
        const { ManuallyDrop::new(RefCell::new(Queue { waiting: Vec::new(), is_emptied: false })) };
}

/// Drops remains, now or from a drop further out.
fn dispose(remains: Remains) {
    let first = QUEUE.with(|queue| {
        let mut queue = queue.borrow_mut();
        if queue.is_emptied {
            queue.waiting.push(remains);
            return None;
        }
        queue.is_emptied = true;
        Some(remains)
    });
    let Some(mut next) = first else { return };
    let mut panic = None;
    loop {
        // Nothing else may be lost when the destructor of something that a closure holds panics.
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(next))) {
            panic.get_or_insert(payload);
        }
        let popped = QUEUE.with(|queue| {
            let mut queue = queue.borrow_mut();
            let popped = queue.waiting.pop();
            if popped.is_none() {
                queue.is_emptied = false;
                // The thread may end without another drop.
                drop(mem::take(&mut queue.waiting));
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
        let closure =
            mem::replace(self.backward.get_mut().unwrap_or_else(PoisonError::into_inner), Closure::Freed);
        let backward = match closure {
            Closure::Saved(backward) => Some(backward),
            Closure::Running | Closure::Freed => None,
        };
        let inputs = mem::take(&mut self.inputs);
        dispose(Remains::Node { _backward: backward, _hooks: self.hooks.take(), _inputs: inputs });
    }
}

impl Drop for Leaf {
    fn drop(&mut self) {
        let grad = self.grad.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let copy = mem::take(self.copy.get_mut().unwrap_or_else(PoisonError::into_inner));
        let hooks = self.hooks.take();
        if grad.is_some() || hooks.is_some() || !matches!(copy, Copy::None) {
            dispose(Remains::Leaf { _grad: grad, _copy: copy, _hooks: hooks });
        }
    }
}

//! Waits of the training loop, which `fit` and `fit_async` share: the first blocks, the second suspends its task.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::thread;

use forebay_core::stream::Fence;

use crate::data::{BatchIter, Dataset};
use crate::{Device, Result, Tensor};

/// Way in which the loop waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitMode {
    /// Every wait blocks, so the loop's future completes at its first poll.
    Blocking,
    /// Every wait suspends the task.
    Yielding,
}

impl WaitMode {
    /// Returns the elements of a tensor.
    pub(super) async fn read(self, t: &Tensor) -> Result<Vec<f64>> {
        match self {
            Self::Blocking => t.to_f64s(),
            Self::Yielding => t.to_f64s_async().await,
        }
    }

    /// Returns the next batch, after the loader's thread has assembled it.
    pub(super) async fn next_batch<D: Dataset>(
        self,
        batches: &mut BatchIter<D>,
    ) -> Option<Result<(Tensor, Tensor)>> {
        if self == Self::Yielding {
            poll_fn(|context| batches.poll_ready(context)).await;
        }
        batches.next()
    }

    /// Lets other tasks run after a step. Waits for the step before, so that the next step does not block on a full
    /// queue.
    pub(super) async fn end_step(self, device: &Device, last_step: &mut Option<Fence>) -> Result<()> {
        if self == Self::Blocking {
            return Ok(());
        }
        if let Some(before) = last_step.replace(device.fence()?) {
            before.await?;
        }
        let mut yielded = false;
        poll_fn(|context| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        Ok(())
    }
}

/// Runs a future of [`WaitMode::Blocking`], which waits by itself.
pub(super) fn run_blocking<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::yield_now(),
        }
    }
}

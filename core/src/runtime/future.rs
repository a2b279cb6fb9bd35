//! Futures of work on a device. A helper thread waits for the device, so that neither the caller nor its executor
//! blocks. On a platform that cannot block, the driver calls back instead. The futures need no runtime.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;

use futures_channel::oneshot;

use crate::error::{Error, Result};
use crate::platform;
use crate::sync::LockUnpoisoned;

/// Future of work on a device. The work is enqueued already: dropping the future cancels nothing.
#[derive(Debug)]
#[must_use = "the result arrives where the future is awaited"]
pub struct DeviceFuture<T>(oneshot::Receiver<Result<T>>);

impl<T> DeviceFuture<T> {
    /// Creates a future that is complete.
    #[doc(hidden)]
    pub fn ready(result: Result<T>) -> Self {
        let (future, completer) = Self::new();
        completer.complete(result);
        future
    }

    /// Creates a future, and the value that completes it.
    fn new() -> (Self, Completer<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self(receiver), Completer(Some(sender)))
    }
}

impl<T> Future for DeviceFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|sent| {
            // The sender is dropped unused only by a panic.
            sent.unwrap_or_else(|_| {
                Err(Error::argument("await", "the thread that waited for the device panicked"))
            })
        })
    }
}

/// Sender of a future's result. If it is dropped, the future fails.
#[doc(hidden)]
#[derive(Debug)]
pub struct Completer<T>(Option<oneshot::Sender<Result<T>>>);

impl<T> Completer<T> {
    /// Completes the future, and wakes the task that awaits it.
    pub fn complete(mut self, result: Result<T>) {
        if let Some(sender) = self.0.take() {
            // Nobody needs the result of a future that was dropped.
            survive_waker(|| drop(sender.send(result)));
        }
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        // A sender that is dropped wakes the task too.
        survive_waker(|| drop(self.0.take()));
    }
}

/// Wakes a task of the program. A panic of its waker ends neither this thread nor other tasks.
#[doc(hidden)]
pub fn wake_task(waker: Waker) {
    survive_waker(|| waker.wake());
}

/// Runs a call that may wake a task of the program, whose waker may panic. This thread may serve other tasks, and may
/// be inside a callback of the driver. The panic hook has printed the panic's message.
fn survive_waker(call: impl FnOnce()) {
    let _panic = catch_unwind(AssertUnwindSafe(call));
}

type Job = Box<dyn FnOnce() + Send>;

/// Thread that waits for a device, started at the first wait.
#[derive(Debug, Default)]
pub(crate) struct WaiterThread {
    running: Mutex<Option<mpsc::Sender<Job>>>,
}

impl WaiterThread {
    /// Runs a wait on the thread, after all earlier ones. Where threads cannot block, starts the wait on this thread,
    /// and the driver calls back. Blocks only if no thread can be started.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        wait: impl FnOnce(Completer<T>) + Send + 'static,
    ) -> DeviceFuture<T> {
        let (future, completer) = DeviceFuture::new();
        if !platform::CAN_BLOCK {
            wait(completer);
            return future;
        }
        if let Some(job) = self.send(Box::new(move || wait(completer))) {
            job();
        }
        future
    }

    /// Drops a value on the thread, after all earlier waits, because the caller may hold locks that the drop takes.
    pub(crate) fn drop_later<T: Send + 'static>(&self, value: T) {
        if let Some(job) = self.send(Box::new(move || drop(value))) {
            log::error!("memory that a callback dropped is lost, because no thread can free it");
            std::mem::forget(job);
        }
    }

    /// Hands a job to the thread. Returns the job if no thread can be started.
    fn send(&self, job: Job) -> Option<Job> {
        let mut running = self.running.lock_unpoisoned();
        if running.is_none() {
            let (sender, jobs) = mpsc::channel::<Job>();
            let serve = move || {
                for job in jobs {
                    // A panic completes its future with an error, and later waits go on.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            };
            // The thread ends after its last job when the device is dropped. Nobody joins the thread: a drop must not
            // block, and may run on this thread.
            match thread::Builder::new().name("forebay-wait".into()).spawn(serve) {
                Ok(_) => *running = Some(sender),
                Err(error) => log::warn!("waiting for the device blocks: no thread can be started: {error}"),
            }
        }
        match &*running {
            Some(sender) => sender.send(job).err().map(|unsent| unsent.0),
            None => Some(job),
        }
    }
}

/// Runs a call that blocks on a thread of its own. Where threads cannot block, runs it on this thread.
#[doc(hidden)]
pub fn spawn_blocking<T: Send + 'static>(
    call: impl FnOnce(Completer<T>) + Send + 'static,
) -> DeviceFuture<T> {
    let (future, completer) = DeviceFuture::new();
    if !platform::CAN_BLOCK {
        call(completer);
        return future;
    }
    let run = move || call(completer);
    match thread::Builder::new().name("forebay-open".into()).spawn(run) {
        Ok(_) => future,
        Err(error) => {
            DeviceFuture::ready(Err(Error::argument("spawn", format!("no thread can be started: {error}"))))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct CountingWaker(AtomicUsize);

    impl Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_future_is_pending_until_its_wait_ends_and_wakes_its_task_once() {
        let waiter = WaiterThread::default();
        let (release, blocked) = mpsc::channel::<u32>();
        let mut future = waiter.run(move |done| done.complete(Ok(blocked.recv().unwrap())));
        let wakes = Arc::new(CountingWaker::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let context = &mut Context::from_waker(&waker);
        assert!(Pin::new(&mut future).poll(context).is_pending());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0);
        // A device that is dropped does not wait for the thread, which still completes the future.
        let next = waiter.run(|done| done.complete(Ok(())));
        drop(waiter);
        release.send(7).unwrap();
        block_on(next).unwrap();
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        assert!(matches!(Pin::new(&mut future).poll(context), Poll::Ready(Ok(7))));
    }

    /// Runs a future on this thread, which sleeps until it is woken.
    fn block_on<T>(mut future: DeviceFuture<T>) -> Result<T> {
        struct Unpark(thread::Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            match Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::park(),
            }
        }
    }

    #[test]
    fn a_waiter_may_be_dropped_by_its_own_thread() {
        let waiter = Arc::new(WaiterThread::default());
        let (release, blocked) = mpsc::channel::<()>();
        let last = Arc::clone(&waiter);
        let future = waiter.run(move |done| {
            blocked.recv().unwrap();
            drop(last);
            done.complete(Ok(3));
        });
        drop(waiter);
        release.send(()).unwrap();
        assert_eq!(block_on(future).unwrap(), 3);
    }

    #[test]
    fn a_waker_that_panics_stops_no_other_task() {
        struct PanickingWaker;
        impl Wake for PanickingWaker {
            fn wake(self: Arc<Self>) {
                panic!("a waker of the test");
            }
        }
        let waker = Waker::from(Arc::new(PanickingWaker));
        let context = &mut Context::from_waker(&waker);
        // Like a driver that completes several futures in one call.
        let mut pending: Vec<_> = (0..3).map(|_| DeviceFuture::<u32>::new()).collect();
        assert!(pending.iter_mut().all(|(future, _)| Pin::new(future).poll(context).is_pending()));
        let (mut futures, mut completers): (Vec<_>, Vec<_>) = pending.into_iter().unzip();
        drop(completers.pop());
        completers.into_iter().for_each(|completer| completer.complete(Ok(5)));
        assert!(block_on(futures.pop().unwrap()).is_err());
        assert!(futures.into_iter().all(|future| block_on(future).unwrap() == 5));
        // While a panic unwinds, too.
        let (mut future, completer) = DeviceFuture::<u32>::new();
        assert!(Pin::new(&mut future).poll(context).is_pending());
        let unwound = catch_unwind(AssertUnwindSafe(move || {
            let _completer = completer;
            panic!("a job of the test");
        }));
        assert!(unwound.is_err() && block_on(future).is_err());
    }

    #[test]
    fn a_wait_that_panics_fails_its_future_and_no_other() {
        let waiter = WaiterThread::default();
        let failed = waiter.run::<u32>(|_done| panic!("a wait of the test"));
        let next = waiter.run(|done| done.complete(Ok(1)));
        assert!(block_on(failed).is_err());
        assert_eq!(block_on(next).unwrap(), 1);
    }
}

//! A thread that gives a stream's calls to the driver while the program prepares the next ones.
//!
//! A launch costs the driver as much time as it costs the core to prepare the next one. A program with many
//! small kernels takes half the time if both happen at once. The first calls of a burst go to the driver
//! directly, because a thread that must wake up is slower than they are. Any other use of the stream, such as
//! a synchronisation, first hands over what is pending on its own thread ([`LaunchThread::flush_pending`]).

use std::ffi::c_void;
use std::fmt;
use std::hint;
use std::mem::{self, MaybeUninit};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use forebay_core::backend::SourceError;
use forebay_core::platform::run_at_exit;
use forebay_core::sync::LockUnpoisoned;

use crate::context::{ArgBytes, KernelLaunch, StreamHandle, arg_pointers};
use crate::settings::{bool_from_env, direct_launches};

/// Calls of a burst that go to the driver directly before others are left to the thread.
const DIRECT_CALLS: u32 = 4;
/// A call that comes later than this after the previous one begins a new burst.
const BURST_GAP: Duration = Duration::from_micros(50);
/// The thread sleeps after it has looked for work for this long.
const SPIN_TIME: Duration = Duration::from_micros(50);
/// Maximum number of pending calls. At the limit the program hands them over itself, so it cannot run ahead of
/// the driver without bound.
const MAX_PENDING: usize = 256;
/// Fewest processors with which the thread does not take time from the program.
const MIN_PROCESSORS: usize = 4;

/// The program ends, so the driver's library may already be gone.
static IS_EXITING: AtomicBool = AtomicBool::new(false);
/// The queues of all threads, for the end of the process.
static ALL_QUEUES: Mutex<Vec<Weak<CallQueue>>> = Mutex::new(Vec::new());

/// A call other than a kernel's launch.
type OtherCall = dyn FnOnce(CUstream) -> Result<(), SourceError> + Send;

/// The pending calls of a stream, and the thread that gives them to the driver.
#[derive(Debug)]
pub(crate) struct LaunchThread {
    queue: Arc<CallQueue>,
    /// The value of `FOREBAY_CUDA_LAUNCH_THREAD`: calls always or never go to the thread. If it is not set,
    /// they do after [`DIRECT_CALLS`] calls in quick succession.
    always: Option<bool>,
    burst: Mutex<Burst>,
    /// `None` if no thread could be started.
    thread: Option<JoinHandle<()>>,
}

/// Calls in quick succession.
#[derive(Debug, Default)]
struct Burst {
    calls: u32,
    last_call: Option<Instant>,
}

#[derive(Debug)]
struct CallQueue {
    stream: Arc<StreamHandle>,
    pending: Mutex<PendingCalls>,
    has_pending: AtomicBool,
    /// If true, calls are pending or are being given to the driver, or one of them failed and no caller has
    /// got the error yet.
    is_busy: AtomicBool,
    /// Locked while calls are given to the driver, so that they keep their order.
    submission: Mutex<Submission>,
    /// If true, the stream has had another use since the last call.
    is_interrupted: AtomicBool,
    thread_sleeps: AtomicBool,
    is_closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Submission {
    /// Calls that are being given to the driver. Empty in between; kept for its memory.
    calls: PendingCalls,
    /// The first error since the last flush.
    error: Option<SourceError>,
}

/// Calls in their order.
#[derive(Debug, Default)]
struct PendingCalls {
    calls: Vec<PendingCall>,
    /// The concatenated arguments of all launches, and the bytes of each argument.
    arg_bytes: Vec<MaybeUninit<u8>>,
    arg_sizes: Vec<usize>,
}

enum PendingCall {
    /// A launch with the number of its arguments.
    Launch(KernelLaunch, usize),
    Other(Box<OtherCall>),
}

impl fmt::Debug for PendingCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Launch(call, _) => call.fmt(f),
            Self::Other(_) => f.write_str("Other"),
        }
    }
}

impl LaunchThread {
    /// Starts the thread, unless `FOREBAY_CUDA_LAUNCH_THREAD=0` is set or there are too few processors.
    pub(crate) fn start(stream: &Arc<StreamHandle>) -> Self {
        let always = bool_from_env("FOREBAY_CUDA_LAUNCH_THREAD");
        let queue = Arc::new(CallQueue {
            stream: Arc::clone(stream),
            pending: Mutex::default(),
            has_pending: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
            submission: Mutex::default(),
            is_interrupted: AtomicBool::new(false),
            thread_sleeps: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        });
        let has_processors = || thread::available_parallelism().is_ok_and(|n| n.get() >= MIN_PROCESSORS);
        let thread = always.unwrap_or_else(has_processors).then(|| {
            stop_threads_at_exit(&queue);
            let queue = Arc::clone(&queue);
            let spawned =
                thread::Builder::new().name("forebay-launches".into()).spawn(move || queue.run_thread());
            spawned.inspect_err(|error| log::debug!("launches have no thread of their own: {error}")).ok()
        });
        Self { queue, always, burst: Mutex::default(), thread: thread.flatten() }
    }

    /// Launches a kernel now or leaves it to the thread.
    ///
    /// # Safety
    /// Same conditions as [`CudaStream::launch`](crate::context::CudaStream::launch), until the kernel is
    /// launched, which is before any other use of the stream.
    pub(crate) unsafe fn launch(
        &self,
        call: &KernelLaunch,
        arguments: &[&ArgBytes],
    ) -> Result<(), SourceError> {
        if !self.is_pending_allowed()? {
            // SAFETY: the caller's promise.
            return unsafe { self.queue.stream.launch(call, &mut arg_pointers(arguments)) };
        }
        self.push(|pending| {
            pending.calls.push(PendingCall::Launch(*call, arguments.len()));
            for argument in arguments {
                pending.arg_bytes.extend_from_slice(argument);
                pending.arg_sizes.push(argument.len());
            }
        })
    }

    /// Makes another call now or leaves it to the thread. Its context is current.
    pub(crate) fn call(
        &self,
        call: impl FnOnce(CUstream) -> Result<(), SourceError> + Send + 'static,
    ) -> Result<(), SourceError> {
        if !self.is_pending_allowed()? {
            return call(self.queue.stream.current_raw()?);
        }
        self.push(|pending| pending.calls.push(PendingCall::Other(Box::new(call))))
    }

    /// Gives the pending calls to the driver and returns the first error since the last flush.
    #[inline]
    pub(crate) fn flush_pending(&self) -> Result<(), SourceError> {
        self.queue.is_interrupted.store(true, Ordering::Relaxed);
        if !self.queue.is_busy.load(Ordering::Acquire) { Ok(()) } else { self.queue.flush() }
    }

    /// Decides whether the next call is left to the thread. If not, nothing is pending before it.
    fn is_pending_allowed(&self) -> Result<bool, SourceError> {
        if self.thread.is_none() {
            return Ok(false);
        }
        if direct_launches() {
            self.flush_pending()?;
            return Ok(false);
        }
        let was_interrupted = self.queue.is_interrupted.swap(false, Ordering::Relaxed);
        let in_burst = self
            .always
            .unwrap_or_else(|| self.burst.lock_unpoisoned().count_call(was_interrupted) > DIRECT_CALLS);
        // While the thread gives earlier calls to the driver, this one must come after them.
        Ok(in_burst || self.queue.is_busy.load(Ordering::Acquire))
    }

    fn push(&self, push: impl FnOnce(&mut PendingCalls)) -> Result<(), SourceError> {
        let queue = &*self.queue;
        let count = {
            let mut pending = queue.pending.lock_unpoisoned();
            push(&mut pending);
            queue.is_busy.store(true, Ordering::Release);
            queue.has_pending.store(true, Ordering::SeqCst);
            pending.calls.len()
        };
        if count >= MAX_PENDING {
            return queue.flush();
        }
        if queue.thread_sleeps.load(Ordering::SeqCst)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
        Ok(())
    }
}

impl Drop for LaunchThread {
    fn drop(&mut self) {
        // An error means that the device is lost.
        let _ = self.queue.flush();
        self.queue.is_closed.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Burst {
    /// Counts a call and returns the number of calls of its burst so far.
    fn count_call(&mut self, was_interrupted: bool) -> u32 {
        let now = Instant::now();
        let soon = self.last_call.replace(now).is_some_and(|before| now.duration_since(before) <= BURST_GAP);
        self.calls = if soon && !was_interrupted { self.calls.saturating_add(1) } else { 1 };
        self.calls
    }
}

impl CallQueue {
    /// Gives everything that is pending now to the driver, and returns the first error since the last flush.
    fn flush(&self) -> Result<(), SourceError> {
        let mut submission = self.submission.lock_unpoisoned();
        self.submit_pending(&mut submission);
        let result = submission.error.take().map_or(Ok(()), Err);
        self.update_busy(&submission);
        result
    }

    fn submit_pending(&self, submission: &mut Submission) {
        {
            let mut pending = self.pending.lock_unpoisoned();
            mem::swap(&mut submission.calls, &mut pending);
            self.has_pending.store(false, Ordering::SeqCst);
        }
        // Later calls were already accepted, so they are made even after an error.
        let result = submission.calls.submit(&self.stream);
        submission.error = submission.error.take().or(result.err());
    }

    fn update_busy(&self, submission: &Submission) {
        let pending = self.pending.lock_unpoisoned();
        // A caller that reads `false` makes its call without taking a lock.
        self.is_busy.store(!pending.calls.is_empty() || submission.error.is_some(), Ordering::Release);
    }

    /// Submits calls until the queue is closed.
    fn run_thread(&self) {
        let mut idle_since = Instant::now();
        while !self.is_closed.load(Ordering::SeqCst) {
            if self.has_pending.load(Ordering::SeqCst) {
                let mut submission = self.submission.lock_unpoisoned();
                if IS_EXITING.load(Ordering::SeqCst) {
                    return;
                }
                self.submit_pending(&mut submission);
                self.update_busy(&submission);
                idle_since = Instant::now();
            } else if idle_since.elapsed() < SPIN_TIME {
                hint::spin_loop();
            } else {
                self.thread_sleeps.store(true, Ordering::SeqCst);
                // A call that came before the line above did not wake this thread.
                if !self.has_pending.load(Ordering::SeqCst) && !self.is_closed.load(Ordering::SeqCst) {
                    thread::park();
                }
                self.thread_sleeps.store(false, Ordering::SeqCst);
                idle_since = Instant::now();
            }
        }
    }
}

impl PendingCalls {
    /// Makes all calls, even after one failed, and returns the first error.
    fn submit(&mut self, stream: &StreamHandle) -> Result<(), SourceError> {
        let (mut bytes, mut sizes) = (&self.arg_bytes[..], self.arg_sizes.iter());
        let mut pointers: Vec<*mut c_void> = Vec::with_capacity(16);
        let mut result = Ok(());
        for call in self.calls.drain(..) {
            result = result.and(match call {
                PendingCall::Launch(call, arguments) => {
                    pointers.clear();
                    for &size in sizes.by_ref().take(arguments) {
                        let (argument, rest) = bytes.split_at(size);
                        pointers.push(argument.as_ptr().cast_mut().cast());
                        bytes = rest;
                    }
                    // SAFETY: the promise of the caller that pushed the launch.
                    unsafe { stream.launch(&call, &mut pointers) }
                }
                PendingCall::Other(call) => stream.current_raw().and_then(call),
            });
        }
        self.arg_bytes.clear();
        self.arg_sizes.clear();
        result
    }
}

/// Makes the end of the process wait until the thread of `queue` calls the driver no more. The driver's library
/// is loaded before, so its own handler runs afterwards.
fn stop_threads_at_exit(queue: &Arc<CallQueue>) {
    extern "C" fn stop_threads() {
        IS_EXITING.store(true, Ordering::SeqCst);
        for queue in ALL_QUEUES.lock_unpoisoned().iter().filter_map(Weak::upgrade) {
            drop(queue.submission.lock_unpoisoned());
        }
    }
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| run_at_exit(stop_threads));
    let mut queues = ALL_QUEUES.lock_unpoisoned();
    queues.retain(|queue| queue.strong_count() > 0);
    queues.push(Arc::downgrade(queue));
}

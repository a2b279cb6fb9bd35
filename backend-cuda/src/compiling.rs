//! Kernels are compiled beside the program, by threads of their own: what a step launches first is compiled while the rest
//! of it is asked for. NVRTC parses one source at a time and optimises several, which is most of the work.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::thread;

use crate::cache::{DiskCache, Key, Version};
use crate::nvrtc::{self, CompileError};

/// Threads at most: what parses alone keeps no more of them busy.
const MOST: usize = 8;

/// What is to be compiled, and where the result is kept.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) label: String,
    pub(crate) source: String,
    pub(crate) arch: u32,
    pub(crate) options: &'static [&'static str],
    pub(crate) disk: DiskCache,
    pub(crate) key: Key,
    pub(crate) version: Version,
}

impl Order {
    fn compile(&self) -> Made {
        let cubin = nvrtc::compile_with(&self.source, &self.label, self.arch, self.options)?;
        self.disk.store(self.key, self.version, &cubin);
        Ok(cubin.into())
    }
}

/// Machine code, or why there is none.
type Made = Result<Arc<[u8]>, CompileError>;

/// A source that is being compiled.
#[derive(Debug, Default)]
pub(crate) struct Job {
    made: OnceLock<Made>,
    waited: Mutex<()>,
    done: Condvar,
}

impl Job {
    /// Has an order compiled: here, where there are no threads to do it.
    pub(crate) fn new(order: Order) -> Arc<Self> {
        let job = Arc::new(Self::default());
        if let Some(order) = hand_over(order, &job) {
            job.finish(order.compile());
        }
        job
    }

    /// Whether [`wait`](Self::wait) returns at once.
    pub(crate) fn is_done(&self) -> bool {
        self.made.get().is_some()
    }

    /// The result.
    pub(crate) fn wait(&self) -> Made {
        let mut waited = self.waited.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(made) = self.made.get() {
                return made.clone();
            }
            waited = self.done.wait(waited).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish(&self, made: Made) {
        let _waited = self.waited.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.made.set(made);
        self.done.notify_all();
    }
}

/// Orders that no thread has taken yet, and how many threads there are.
#[derive(Default)]
struct Orders {
    open: VecDeque<(Order, Arc<Job>)>,
    threads: usize,
}

static ORDERS: Mutex<Option<Orders>> = Mutex::new(None);
static LEFT: Condvar = Condvar::new();
/// The process ends: nothing is begun any more.
static ENDING: AtomicBool = AtomicBool::new(false);

fn orders() -> MutexGuard<'static, Option<Orders>> {
    ORDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `FOREBAY_COMPILE_THREADS`, else as many as there are processors, up to [`MOST`].
fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| {
        let given = std::env::var("FOREBAY_COMPILE_THREADS").ok().filter(|given| !given.is_empty());
        let wanted = given.as_deref().map(|given| given.parse().ok());
        if wanted == Some(None) {
            log::warn!("FOREBAY_COMPILE_THREADS is {given:?}, and no number: it is not used");
        }
        wanted.flatten().unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from).min(MOST))
    })
}

/// Leaves an order to the threads; gives it back where there are none.
fn hand_over(order: Order, job: &Arc<Job>) -> Option<Order> {
    if threads() == 0 || ENDING.load(Ordering::Acquire) {
        return Some(order);
    }
    // A compiler that runs while its library's own data are torn down would crash the process at its end.
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: C's own function, and a handler that does not unwind.
        let _ = unsafe { atexit(finish_all) };
    });
    let mut orders = orders();
    let all = orders.get_or_insert_default();
    all.open.push_back((order, Arc::clone(job)));
    if all.threads < threads() {
        match thread::Builder::new().name("forebay-compile".to_owned()).spawn(work) {
            Ok(_) => all.threads += 1,
            Err(error) if all.threads == 0 => {
                log::debug!("no thread to compile on: {error}");
                return all.open.pop_back().map(|(order, _)| order);
            }
            Err(_) => {}
        }
    }
    None
}

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> std::ffi::c_int;
}

/// What a thread does: it ends when there is nothing left.
fn work() {
    loop {
        let next = {
            let mut orders = orders();
            let all = orders.get_or_insert_default();
            let next = all.open.pop_front();
            if next.is_none() {
                all.threads -= 1;
                LEFT.notify_all();
            }
            next
        };
        let Some((order, job)) = next else { return };
        let stopped = |log: &str| Err(CompileError::Source { arch: order.arch, log: log.to_owned() });
        let made = match ENDING.load(Ordering::Acquire) {
            true => stopped("the process ends"),
            false => catch_unwind(AssertUnwindSafe(|| order.compile()))
                .unwrap_or_else(|_| stopped("the thread that compiled it panicked")),
        };
        job.finish(made);
    }
}

/// Waits for the threads, which begin nothing new.
extern "C" fn finish_all() {
    ENDING.store(true, Ordering::Release);
    let mut orders = orders();
    while orders.as_ref().is_some_and(|all| all.threads > 0) {
        orders = LEFT.wait(orders).unwrap_or_else(PoisonError::into_inner);
    }
}

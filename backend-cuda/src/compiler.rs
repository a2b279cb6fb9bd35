//! Compiles kernels on background threads, several at once. A program whose kernels are not on disk waits for
//! the slowest kernel instead of for all, one after the other.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::thread;

use crate::lock;

/// Maximum number of threads. On a host with 16 cores, both 4 and 16 threads were slower than 8 (GPT-2's 32
/// kernels).
const MAX_THREADS: usize = 8;

/// A cubin that may still be compiling.
#[derive(Debug, Default)]
pub(crate) struct PendingCubin {
    /// The cubin, or the compiler's error; `None` while compiling.
    result: Mutex<Option<Result<Arc<[u8]>, String>>>,
    finished: Condvar,
}

impl PendingCubin {
    /// Reports whether the compilation has ended.
    pub(crate) fn is_done(&self) -> bool {
        lock(&self.result).is_some()
    }

    /// Waits for the cubin.
    pub(crate) fn wait(&self) -> Result<Arc<[u8]>, String> {
        let mut code = lock(&self.result);
        loop {
            if let Some(code) = &*code {
                return code.clone();
            }
            code = self.finished.wait(code).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

type CompileJob = Box<dyn FnOnce() + Send>;

/// Jobs that wait for a thread, and the number of threads.
struct CompilePool {
    jobs: VecDeque<CompileJob>,
    threads: usize,
}

static POOL: Mutex<CompilePool> = Mutex::new(CompilePool { jobs: VecDeque::new(), threads: 0 });
static POOL_IDLE: Condvar = Condvar::new();

/// Starts to compile on a background thread.
pub(crate) fn start_compile(
    compile: impl FnOnce() -> Result<Vec<u8>, String> + Send + 'static,
) -> Arc<PendingCubin> {
    let coming = Arc::new(PendingCubin::default());
    let to = Arc::clone(&coming);
    spawn(Box::new(move || {
        let made = panic::catch_unwind(AssertUnwindSafe(compile));
        let made = made.unwrap_or_else(|_| Err("the compiler's thread panicked".to_owned()));
        *lock(&to.result) = Some(made.map(Arc::from));
        to.finished.notify_all();
    }));
    coming
}

/// Runs a job on a background thread.
pub(crate) fn spawn(job: CompileJob) {
    let mut pool = lock(&POOL);
    pool.jobs.push_back(job);
    let most = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    if pool.threads < most {
        register_exit_handler();
        let spawned = thread::Builder::new().name("forebay-compiler".into()).spawn(run_jobs);
        pool.threads += usize::from(spawned.is_ok());
        if pool.threads == 0 {
            // No thread could be started, so this thread runs the jobs.
            pool.threads = 1;
            drop(pool);
            run_jobs();
        }
    }
}

/// Runs jobs until the queue is empty.
fn run_jobs() {
    loop {
        let mut pool = lock(&POOL);
        let Some(job) = pool.jobs.pop_front() else {
            pool.threads -= 1;
            POOL_IDLE.notify_all();
            return;
        };
        drop(pool);
        // A thread that unwinds would never decrement the count, and the process would wait for the thread at
        // exit.
        let _ = panic::catch_unwind(AssertUnwindSafe(job));
    }
}

/// Waits for running compilations at process exit, which destroys the compiler's globals.
fn register_exit_handler() {
    unsafe extern "C" {
        fn atexit(call: extern "C" fn()) -> c_int;
    }
    extern "C" fn finish() {
        let mut pool = lock(&POOL);
        pool.jobs.clear();
        while pool.threads > 0 {
            pool = POOL_IDLE.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
    }
    static ONCE: Once = Once::new();
    // SAFETY: C's function, with which Rust's standard library is linked; `finish` takes nothing and does not
    // unwind. `finish` is registered after NVRTC has been loaded, so it runs before NVRTC's own handlers. If
    // `atexit` fails, only that wait is lost.
    ONCE.call_once(|| _ = unsafe { atexit(finish) });
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::start_compile;

    #[test]
    fn what_is_compiled_is_there_for_all_who_wait() {
        let (go, wait) = channel::<()>();
        let slow = start_compile(move || {
            let _ = wait.recv();
            Ok(vec![1, 2])
        });
        let wrong = start_compile(|| Err("it is wrong".to_owned()));
        let lost = start_compile(|| panic!("a test's panic"));
        assert!(!slow.is_done());
        go.send(()).unwrap();
        assert_eq!(*slow.wait().unwrap(), [1, 2]);
        assert_eq!(*slow.wait().unwrap(), [1, 2]);
        assert_eq!(wrong.wait().unwrap_err(), "it is wrong");
        assert!(lost.wait().unwrap_err().contains("panicked"));
        assert!(slow.is_done() && wrong.is_done() && lost.is_done());
    }
}

//! Compiles kernels on background threads, several at once. A program whose kernels are not on disk waits for
//! the slowest kernel instead of for all, one after the other.

use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;

use crate::platform::run_at_exit;
use crate::sync::LockUnpoisoned as _;

/// Maximum number of threads. On a host with 16 cores, both 4 and 16 threads were slower than 8 (GPT-2's 32
/// kernels through NVRTC).
const MAX_THREADS: usize = 8;

/// Compiled code that may still be compiling.
#[derive(Debug)]
pub struct PendingCode<T> {
    /// The code, or the compiler's error; empty while compiling.
    result: OnceLock<Result<T, String>>,
}

impl<T> PendingCode<T> {
    /// Returns the code or the compiler's error; `None` while compiling.
    pub fn get(&self) -> Option<Result<&T, &str>> {
        self.result.get().map(|result| result.as_ref().map_err(String::as_str))
    }

    /// Waits for the code, and returns it or the compiler's error.
    pub fn wait(&self) -> Result<&T, &str> {
        self.result.wait().as_ref().map_err(String::as_str)
    }
}

/// Unit of work for a background thread.
pub type CompileJob = Box<dyn FnOnce() + Send>;

/// Jobs that wait for a thread, and the number of threads.
struct CompilePool {
    jobs: VecDeque<CompileJob>,
    threads: usize,
}

static POOL: Mutex<CompilePool> = Mutex::new(CompilePool { jobs: VecDeque::new(), threads: 0 });
static POOL_IDLE: Condvar = Condvar::new();

/// Starts to compile on a background thread. A panic of `compile` becomes an error.
pub fn start_compile<T: Send + Sync + 'static>(
    compile: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Arc<PendingCode<T>> {
    let pending = Arc::new(PendingCode { result: OnceLock::new() });
    let to = Arc::clone(&pending);
    spawn(Box::new(move || {
        let code = panic::catch_unwind(AssertUnwindSafe(compile));
        let code = code.unwrap_or_else(|_| Err("the compiler's thread panicked".to_owned()));
        // Only this job sets the result.
        let _ = to.result.set(code);
    }));
    pending
}

/// Runs a job on a background thread; on the calling thread where threads cannot be started.
pub fn spawn(job: CompileJob) {
    let mut pool = POOL.lock_unpoisoned();
    pool.jobs.push_back(job);
    let max_threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    if pool.threads < max_threads {
        let spawned = thread::Builder::new().name("forebay-compiler".into()).spawn(run_jobs);
        pool.threads += usize::from(spawned.is_ok());
        if pool.threads == 0 {
            pool.threads = 1;
            drop(pool);
            run_jobs();
        }
    }
}

/// Runs jobs until the queue is empty.
fn run_jobs() {
    loop {
        let mut pool = POOL.lock_unpoisoned();
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

/// Makes the end of the process wait for running compilations, and drop others. A backend calls this after loading
/// its compiler's library: handlers run in reverse order, so this one runs before those that destroy the library's
/// globals.
pub fn register_exit_handler() {
    extern "C" fn finish() {
        let mut pool = POOL.lock_unpoisoned();
        pool.jobs.clear();
        while pool.threads > 0 {
            pool = POOL_IDLE.wait(pool).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
    run_at_exit(finish);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::start_compile;

    #[test]
    fn compiled_code_reaches_all_waiting_threads() {
        let (go, wait) = channel::<()>();
        let slow = start_compile(move || {
            let _ = wait.recv();
            Ok(vec![1, 2])
        });
        let wrong = start_compile(|| Err::<(), _>("it is wrong".to_owned()));
        let lost = start_compile::<()>(|| panic!("a test's panic"));
        assert!(slow.get().is_none());
        go.send(()).unwrap();
        assert_eq!(*slow.wait().unwrap(), [1, 2]);
        assert_eq!(*slow.wait().unwrap(), [1, 2]);
        assert_eq!(wrong.wait().unwrap_err(), "it is wrong");
        assert!(lost.wait().unwrap_err().contains("panicked"));
        assert!(slow.get().is_some() && wrong.get().is_some() && lost.get().is_some());
    }
}

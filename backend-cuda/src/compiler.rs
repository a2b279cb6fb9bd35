//! Kernels are compiled beside the program, several at once: a program whose kernels are not on disk waits for the slowest of
//! them instead of for all, one after the other.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::thread;

use crate::lock;

/// Threads at most. Of an H100's host with 16 cores 8 compile GPT-2's 32 kernels in 2.4 to 2.5 s, 16 in 2.7, 4 in 3.3.
const MAX_THREADS: usize = 8;

/// Machine code that may still be on its way.
#[derive(Debug, Default)]
pub(crate) struct PendingCubin {
    /// The cubin, or why there is none.
    result: Mutex<Option<Result<Arc<[u8]>, String>>>,
    finished: Condvar,
}

impl PendingCubin {
    /// Whether nobody has to wait for it.
    pub(crate) fn is_done(&self) -> bool {
        lock(&self.result).is_some()
    }

    /// The cubin, when it is there.
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

/// What waits for a thread, and how many there are.
struct CompilePool {
    jobs: VecDeque<CompileJob>,
    threads: usize,
}

static POOL: Mutex<CompilePool> = Mutex::new(CompilePool { jobs: VecDeque::new(), threads: 0 });
static POOL_IDLE: Condvar = Condvar::new();

/// Begins to compile.
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

/// Does something beside the program.
pub(crate) fn spawn(job: CompileJob) {
    let mut pool = lock(&POOL);
    pool.jobs.push_back(job);
    let most = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    if pool.threads < most {
        register_exit_handler();
        let spawned = thread::Builder::new().name("forebay-compiler".into()).spawn(run_jobs);
        pool.threads += usize::from(spawned.is_ok());
        if pool.threads == 0 {
            // No thread is to be had: this one does it.
            pool.threads = 1;
            drop(pool);
            run_jobs();
        }
    }
}

/// Does what there is to do.
fn run_jobs() {
    loop {
        let mut pool = lock(&POOL);
        let Some(job) = pool.jobs.pop_front() else {
            pool.threads -= 1;
            POOL_IDLE.notify_all();
            return;
        };
        drop(pool);
        // A thread that panics would be waited for at the end.
        let _ = panic::catch_unwind(AssertUnwindSafe(job));
    }
}

/// A process that ends destroys the compiler's globals: nothing may be compiling then.
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
    // SAFETY: C's function, which Rust's standard library is linked with; `finish` takes nothing and does not unwind. It is
    // registered after NVRTC has been loaded, so it runs before NVRTC's own.
    // Where it finds no room nothing is lost but that.
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

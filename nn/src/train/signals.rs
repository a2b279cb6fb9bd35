//! Termination signals (Ctrl-C, SIGTERM, SIGHUP). The first one asks the running loop to stop after its step.
//! A second signal, or one without a loop, ends the program as usual.

#[cfg(feature = "train")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::{Result, fail};

/// Number of running loops.
static ACTIVE_LOOPS: AtomicUsize = AtomicUsize::new(0);
static STOP_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Guard of a running loop. During its lifetime, the first signal is recorded as a request to stop.
#[derive(Debug)]
pub(super) struct SignalGuard(());

impl SignalGuard {
    /// Installs the handlers, if no earlier loop has.
    ///
    /// # Errors
    /// The crate was built without the feature `train`, or the system refuses the handlers.
    pub(super) fn new() -> Result<Self> {
        install_handler()?;
        if ACTIVE_LOOPS.fetch_add(1, Ordering::SeqCst) == 0 {
            STOP_REQUESTED.store(false, Ordering::SeqCst);
        }
        Ok(Self(()))
    }

    /// Reports whether the loop should stop.
    pub(super) fn is_stop_requested(&self) -> bool {
        STOP_REQUESTED.load(Ordering::SeqCst)
    }
}

impl Drop for SignalGuard {
    fn drop(&mut self) {
        ACTIVE_LOOPS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Records a signal, and reports whether it ends the program at once.
#[cfg(feature = "train")]
fn should_exit() -> bool {
    ACTIVE_LOOPS.load(Ordering::SeqCst) == 0 || STOP_REQUESTED.swap(true, Ordering::SeqCst)
}

#[cfg(feature = "train")]
#[track_caller]
fn install_handler() -> Result<()> {
    static INSTALLED: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| register_handler().map_err(|error| error.to_string()));
    if let Err(error) = installed {
        fail!(
            argument("stop_on_signals"),
            "the signal handlers could not be installed: {error}; leave the call out"
        );
    }
    Ok(())
}

#[cfg(not(feature = "train"))]
#[track_caller]
fn install_handler() -> Result<()> {
    fail!(
        argument("stop_on_signals"),
        "handlers of signals need the feature `train`; add it to the features of `forebay`, or leave the call out"
    )
}

#[cfg(all(feature = "train", unix))]
fn register_handler() -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mask = ignored_signals();
    // Signals ignored because of `nohup` or a shell's `&` stay ignored.
    let handled = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| mask >> (signal - 1) & 1 == 0);
    let mut signals = signal_hook::iterator::Signals::new(handled.collect::<Vec<_>>())?;
    let listen = move || {
        for signal in signals.forever() {
            if should_exit() && signal_hook::low_level::emulate_default_handler(signal).is_err() {
                std::process::exit(128 + signal);
            }
        }
    };
    std::thread::Builder::new().name("forebay-signals".into()).spawn(listen).map(drop)
}

/// Returns a bit mask of the signals that this process ignored from its start, or 0 if it is unknown.
#[cfg(all(feature = "train", unix))]
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(all(feature = "train", not(unix)))]
fn register_handler() -> std::io::Result<()> {
    let handler = || {
        if should_exit() {
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(std::io::Error::other)
}

#[cfg(all(test, not(feature = "train")))]
mod tests {
    use super::*;

    #[test]
    fn without_the_feature_handlers_are_refused() {
        let error = SignalGuard::new().expect_err("there are no handlers").to_string();
        assert!(error.contains("stop_on_signals") && error.contains("feature `train`"), "{error}");
    }
}

//! Signals that end a program (Ctrl-C, SIGTERM, SIGHUP): the first one asks the loop that runs to end after its step. The next
//! one, or one without a loop, ends the program as usual.

#[cfg(feature = "train")]
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Loops that run.
static LOOPS: AtomicUsize = AtomicUsize::new(0);
static ASKED: AtomicBool = AtomicBool::new(false);

/// Guard of a loop: while it lives, a signal is a wish to be asked for.
#[derive(Debug)]
pub(super) struct Watch(());

impl Watch {
    pub(super) fn new() -> Self {
        #[cfg(feature = "train")]
        install();
        if LOOPS.fetch_add(1, Ordering::SeqCst) == 0 {
            ASKED.store(false, Ordering::SeqCst);
        }
        Self(())
    }

    /// Reports whether the loop shall end.
    pub(super) fn asked(&self) -> bool {
        ASKED.load(Ordering::SeqCst)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        LOOPS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Takes note of a signal; true if it ends the program at once.
#[cfg(feature = "train")]
fn ends_now() -> bool {
    LOOPS.load(Ordering::SeqCst) == 0 || ASKED.swap(true, Ordering::SeqCst)
}

#[cfg(feature = "train")]
fn install() {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        if let Err(e) = handle() {
            log::warn!("Ctrl-C and termination signals will end the program without saving: {e}");
        }
    });
}

#[cfg(all(feature = "train", unix))]
fn handle() -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mask = ignored();
    // What `nohup` or a shell's `&` lets a program ignore stays ignored.
    let heeded = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| mask >> (signal - 1) & 1 == 0);
    let mut signals = signal_hook::iterator::Signals::new(heeded.collect::<Vec<_>>())?;
    let listen = move || {
        for signal in signals.forever() {
            if ends_now() && signal_hook::low_level::emulate_default_handler(signal).is_err() {
                std::process::exit(128 + signal);
            }
        }
    };
    std::thread::Builder::new().name("forebay-signals".into()).spawn(listen).map(drop)
}

/// Signals that this program was started to ignore, a bit each; none where the system does not tell.
#[cfg(all(feature = "train", unix))]
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(all(feature = "train", not(unix)))]
fn handle() -> std::io::Result<()> {
    let handler = || {
        if ends_now() {
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(std::io::Error::other)
}

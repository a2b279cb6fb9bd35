//! Ctrl-C: the first one asks the loop that runs to end after its step; the next one, or one without a loop, ends the
//! program as usual.

#[cfg(feature = "train")]
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Loops that run.
static LOOPS: AtomicUsize = AtomicUsize::new(0);
static ASKED: AtomicBool = AtomicBool::new(false);

/// While it lives, Ctrl-C is a wish to be asked for.
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

    /// Whether the loop shall end.
    pub(super) fn asked(&self) -> bool {
        ASKED.load(Ordering::SeqCst)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        LOOPS.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(feature = "train")]
fn install() {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        let handler = || {
            if LOOPS.load(Ordering::SeqCst) == 0 || ASKED.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        };
        if let Err(e) = ctrlc::set_handler(handler) {
            log::warn!("Ctrl-C will end the program without saving: {e}");
        }
    });
}

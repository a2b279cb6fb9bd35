//! What a program may choose for the whole process.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use forebay_core::environment;

/// Variables of the environment that are `0` or `1`.
pub(crate) const VARIABLES: [&str; 6] = [
    "FOREBAY_TUNE",
    "FOREBAY_PORTABLE_KERNELS",
    "FOREBAY_NVTX",
    "FOREBAY_CUDA_VMM",
    "FOREBAY_CUDA_EARLY",
    "FOREBAY_CUDA_LINES",
];

static ALLOW_TF32: AtomicBool = AtomicBool::new(false);
static LINES: AtomicBool = AtomicBool::new(true);
/// 0: as the environment says; 1: no; 2: yes.
static PORTABLE: AtomicU8 = AtomicU8::new(0);

/// Lets matrix products of f32 round their operands to TensorFloat-32, which keeps 10 bits of the mantissa and is
/// several times faster on tensor cores. Off at first, as in PyTorch.
pub fn set_allow_tf32(allow: bool) {
    ALLOW_TF32.store(allow, Ordering::Relaxed);
}

/// Whether matrix products of f32 may use TensorFloat-32.
#[must_use]
pub fn allow_tf32() -> bool {
    ALLOW_TF32.load(Ordering::Relaxed)
}

/// Runs the portable kernels where a library's would be faster, to test them or to compare. At first this is what
/// `FOREBAY_PORTABLE_KERNELS=1` says.
pub fn set_portable(portable: bool) {
    PORTABLE.store(1 + u8::from(portable), Ordering::Relaxed);
}

/// Whether the portable kernels are forced.
#[must_use]
pub fn portable() -> bool {
    if PORTABLE.load(Ordering::Relaxed) == 0 {
        // Asked once; a program that sets the switch meanwhile wins.
        let portable = 1 + u8::from(is_set("FOREBAY_PORTABLE_KERNELS") == Some(true));
        let _ = PORTABLE.compare_exchange(0, portable, Ordering::Relaxed, Ordering::Relaxed);
    }
    PORTABLE.load(Ordering::Relaxed) == 2
}

/// Whether small kernels may wait to be launched together: not while a tool is told which module each is of.
pub(crate) fn set_lines(lines: bool) {
    LINES.store(lines, Ordering::Relaxed);
}

pub(crate) fn lines() -> bool {
    LINES.load(Ordering::Relaxed)
}

/// An environment variable that is a switch; what it cannot be is an error where a device is opened.
pub(crate) fn is_set(name: &str) -> Option<bool> {
    environment::switch(name).ok().flatten()
}

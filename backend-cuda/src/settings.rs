//! What a program may choose for the whole process.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use forebay_core::environment;

/// Variables of the environment that are `0` or `1`.
pub(crate) const BOOL_VARIABLES: [&str; 6] = [
    "FOREBAY_CUBLASLT_AUTOTUNE",
    "FOREBAY_PORTABLE_KERNELS",
    "FOREBAY_NVTX",
    "FOREBAY_CUDA_VMM",
    "FOREBAY_CUDA_PDL",
    "FOREBAY_CUDA_BATCH_LAUNCHES",
];

static ALLOW_TF32: AtomicBool = AtomicBool::new(false);
static LAUNCH_BATCHING: AtomicBool = AtomicBool::new(true);
/// 0: as the environment says; 1: no; 2: yes.
static PORTABLE_KERNELS: AtomicU8 = AtomicU8::new(0);

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
pub fn set_portable_kernels(portable: bool) {
    PORTABLE_KERNELS.store(1 + u8::from(portable), Ordering::Relaxed);
}

/// Whether the portable kernels are forced.
#[must_use]
pub fn portable_kernels() -> bool {
    if PORTABLE_KERNELS.load(Ordering::Relaxed) == 0 {
        // Asked once; a program that sets the switch meanwhile wins.
        let portable = 1 + u8::from(bool_from_env("FOREBAY_PORTABLE_KERNELS") == Some(true));
        let _ = PORTABLE_KERNELS.compare_exchange(0, portable, Ordering::Relaxed, Ordering::Relaxed);
    }
    PORTABLE_KERNELS.load(Ordering::Relaxed) == 2
}

/// Whether small kernels may wait to be launched together: not while a tool is told which module each is of.
pub(crate) fn set_launch_batching(lines: bool) {
    LAUNCH_BATCHING.store(lines, Ordering::Relaxed);
}

pub(crate) fn launch_batching() -> bool {
    LAUNCH_BATCHING.load(Ordering::Relaxed)
}

/// An environment variable that is a switch; what it cannot be is an error where a device is opened.
pub(crate) fn bool_from_env(name: &str) -> Option<bool> {
    environment::read_switch(name).ok().flatten()
}

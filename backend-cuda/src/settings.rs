//! Settings that apply to the whole process.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use forebay_core::environment;

/// Environment variables that are `0` or `1`.
pub(crate) const BOOL_VARIABLES: [&str; 7] = [
    "FOREBAY_CUBLASLT_AUTOTUNE",
    "FOREBAY_PORTABLE_KERNELS",
    "FOREBAY_NVTX",
    "FOREBAY_CUDA_VMM",
    "FOREBAY_CUDA_PDL",
    "FOREBAY_CUDA_LAUNCH_THREAD",
    "FOREBAY_CUDA_PEER",
];

static ALLOW_TF32: AtomicBool = AtomicBool::new(false);
static DIRECT_LAUNCHES: AtomicBool = AtomicBool::new(false);
/// Encoding: 0 follows the environment, 1 is off, 2 is on.
static PORTABLE_KERNELS: AtomicU8 = AtomicU8::new(0);

/// Lets f32 matrix products round their operands to TensorFloat-32, which keeps 10 bits of the mantissa and
/// is several times faster on tensor cores. Off by default, as in PyTorch.
pub fn set_allow_tf32(allow: bool) {
    ALLOW_TF32.store(allow, Ordering::Relaxed);
}

/// Reports whether f32 matrix products may use TensorFloat-32.
#[must_use]
pub fn allow_tf32() -> bool {
    ALLOW_TF32.load(Ordering::Relaxed)
}

/// Forces the portable kernels even if a library would be faster, for tests and comparisons. The default is
/// the value of `FOREBAY_PORTABLE_KERNELS`.
pub fn set_portable_kernels(portable: bool) {
    PORTABLE_KERNELS.store(1 + u8::from(portable), Ordering::Relaxed);
}

/// Reports whether the portable kernels are forced.
#[must_use]
pub fn portable_kernels() -> bool {
    if PORTABLE_KERNELS.load(Ordering::Relaxed) == 0 {
        // Reads the variable once; a concurrent call of `set_portable_kernels` takes precedence.
        let portable = 1 + u8::from(bool_from_env("FOREBAY_PORTABLE_KERNELS") == Some(true));
        let _ = PORTABLE_KERNELS.compare_exchange(0, portable, Ordering::Relaxed, Ordering::Relaxed);
    }
    PORTABLE_KERNELS.load(Ordering::Relaxed) == 2
}

/// Sets whether the program's own thread launches all kernels, while a tool attributes each kernel to a module
/// of the thread that launches it.
pub(crate) fn set_direct_launches(enabled: bool) {
    DIRECT_LAUNCHES.store(enabled, Ordering::Relaxed);
}

pub(crate) fn direct_launches() -> bool {
    DIRECT_LAUNCHES.load(Ordering::Relaxed)
}

/// Reads a boolean environment variable; opening a device reports an invalid value as an error.
pub(crate) fn bool_from_env(name: &str) -> Option<bool> {
    environment::read_switch(name).ok().flatten()
}

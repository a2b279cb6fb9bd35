//! Settings that apply to the whole process.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use forebay_core::environment;

/// Environment variables that are `0` or `1`.
pub(crate) const BOOL_VARIABLES: [&str; 9] = [
    "FOREBAY_CUBLASLT_AUTOTUNE",
    "FOREBAY_PORTABLE_KERNELS",
    "FOREBAY_NVTX",
    "FOREBAY_CUDA_VMM",
    "FOREBAY_CUDA_PDL",
    "FOREBAY_CUDA_RECURRENT",
    "FOREBAY_CUDA_BATCHED_MATMUL",
    "FOREBAY_CUDA_LAUNCH_THREAD",
    "FOREBAY_CUDA_PEER",
];

static ALLOW_TF32: AtomicBool = AtomicBool::new(false);
static DIRECT_LAUNCHES: AtomicBool = AtomicBool::new(false);
/// Encoding: 0 follows the environment, 1 is off, 2 is on.
static PORTABLE_KERNELS: AtomicU8 = AtomicU8::new(0);
/// Same encoding.
static RECURRENT_KERNELS: AtomicU8 = AtomicU8::new(0);
/// Same encoding.
static BATCHED_MATMUL_KERNELS: AtomicU8 = AtomicU8::new(0);

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
    read_switch(&PORTABLE_KERNELS, "FOREBAY_PORTABLE_KERNELS", false)
}

/// Sets whether native kernels run all time steps of a recurrent layer in one launch, for tests and comparisons. The
/// default is the value of `FOREBAY_CUDA_RECURRENT`, else true.
pub fn set_recurrent_kernels(enabled: bool) {
    RECURRENT_KERNELS.store(1 + u8::from(enabled), Ordering::Relaxed);
}

/// Reports whether native kernels run recurrent layers; false while portable kernels are forced.
#[must_use]
pub fn recurrent_kernels() -> bool {
    !portable_kernels() && read_switch(&RECURRENT_KERNELS, "FOREBAY_CUDA_RECURRENT", true)
}

/// Sets whether native kernels run batches of small products of 16-bit floats, for tests and comparisons. The default
/// is the value of `FOREBAY_CUDA_BATCHED_MATMUL`, else true.
pub fn set_batched_matmul_kernels(enabled: bool) {
    BATCHED_MATMUL_KERNELS.store(1 + u8::from(enabled), Ordering::Relaxed);
}

/// Reports whether native kernels run batches of small products; false while portable kernels are forced.
#[must_use]
pub fn batched_matmul_kernels() -> bool {
    !portable_kernels() && read_switch(&BATCHED_MATMUL_KERNELS, "FOREBAY_CUDA_BATCHED_MATMUL", true)
}

/// Returns the value of a switch, which follows a variable of the environment until it is set.
fn read_switch(switch: &AtomicU8, variable: &str, default: bool) -> bool {
    if switch.load(Ordering::Relaxed) == 0 {
        // Reads the variable once; a concurrent call that sets the switch takes precedence.
        let value = 1 + u8::from(bool_from_env(variable).unwrap_or(default));
        let _ = switch.compare_exchange(0, value, Ordering::Relaxed, Ordering::Relaxed);
    }
    switch.load(Ordering::Relaxed) == 2
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

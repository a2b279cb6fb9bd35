//! Fuzzes the loader of GPT-2's weights.
#![no_main]

use std::sync::LazyLock;

use forebay_core::device::Device;
use libfuzzer_sys::fuzz_target;

#[path = "../shared.rs"]
mod shared;

static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::null(Default::default()));

fuzz_target!(|bytes: &[u8]| {
    let _ = (shared::loader("gpt2").read)(&DEVICE, bytes);
});

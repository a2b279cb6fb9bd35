//! Any bytes as a safetensors file.
#![no_main]

use std::sync::LazyLock;

use forebay_core::device::Device;
use forebay_core::io::safetensors;
use libfuzzer_sys::fuzz_target;

static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::null(Default::default()));

fuzz_target!(|bytes: &[u8]| {
    let _ = safetensors::from_bytes(bytes, &DEVICE);
});

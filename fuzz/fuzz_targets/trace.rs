//! Any bytes as a recorded trace: packed, and as its text.
#![no_main]

use forebay_core::memory::trace::Trace;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = Trace::unpack(bytes);
    let _ = Trace::read(bytes);
});

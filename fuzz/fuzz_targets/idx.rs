//! Any bytes as an idx file, gzipped if they start so.
#![no_main]

use forebay_core::io::idx;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = idx::from_bytes(bytes);
});

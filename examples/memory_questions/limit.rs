//! A memory limit, and the error of a request that exceeds it.

use anyhow::Result;
use forebay::memory::Bytes;
use forebay::prelude::*;

use crate::{MIB, print_pool_usage, zeros_mib};

pub(crate) fn answer(device: &Device) -> Result<()> {
    let memory = device.backend().device_memory();
    let format_bytes =
        |bytes: Option<u64>| bytes.map_or("not reported by the driver".to_owned(), |b| Bytes(b).to_string());
    println!("the device has {}, free {}", format_bytes(memory.total), format_bytes(memory.free));
    println!("limit: {}", device.pool().limit().map_or("none".to_owned(), |b| Bytes(b).to_string()));
    device.pool().set_limit(Some(128 * MIB));
    let _held = zeros_mib(100, device)?;
    match zeros_mib(100, device) {
        Ok(_) => println!("a limit of 128 MiB was not kept"),
        Err(error) => println!("with a limit of 128 MiB, 100 MiB and 100 MiB more:\n{error}"),
    }
    device.pool().set_limit(None);
    let _more = zeros_mib(100, device)?;
    print_pool_usage("without the limit, the same request", device.pool());
    Ok(())
}

//! Cost of emptying the cache.

use anyhow::Result;
use forebay::memory::{Bytes, Config, Pool};
use forebay::prelude::*;

use crate::{with_empty_pool, zeros_mib};

pub(crate) fn answer(device: &Device) -> Result<()> {
    let churn = |empty: bool| -> Result<Pool> {
        let device = with_empty_pool(device, Config::default());
        for step in 0..20u64 {
            let a = zeros_mib(8 + step % 5, &device)?;
            let b = zeros_mib(40 - 2 * (step % 7), &device)?;
            drop((a, b));
            if empty {
                device.pool().empty_cache()?;
            }
        }
        Ok(device.pool().clone())
    };
    for (name, empty) in [("20 steps", false), ("20 steps, the cache emptied after each", true)] {
        let stats = churn(empty)?.stats();
        let calls = stats.num_device_alloc + stats.num_device_free;
        println!(
            "{name:<44} peak {:>10} taken, {calls} calls of the driver",
            Bytes(stats.peak_reserved()).to_string()
        );
    }
    Ok(())
}

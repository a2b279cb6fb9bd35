//! Fragmentation: free memory in pieces, none of which is large enough.

use anyhow::Result;
use forebay::memory::{Config, Request};
use forebay::prelude::*;

use crate::{MIB, print_pool_usage, with_empty_pool};

/// Allocates blocks of 4 MiB, frees every second one, then allocates 32 MiB.
pub(crate) fn answer(device: &Device) -> Result<()> {
    for (name, config) in [("this pool", Config::default()), ("PyTorch's rules", Config::pytorch())] {
        let device = with_empty_pool(device, Config { max_memory: Some(96 * MIB), ..config });
        let blocks =
            (0..20).map(|_| device.pool().alloc(Request::new(4 * MIB))).collect::<Result<Vec<_>, _>>()?;
        blocks.iter().step_by(2).for_each(|block| device.pool().free(*block));
        print_pool_usage(&format!("{name}: 20 of 4 MiB, every second freed"), device.pool());
        println!("  fragmentation {:.0} %", 100.0 * device.memory().fragmentation());
        match device.pool().alloc(Request::new(32 * MIB)) {
            Ok(block) => {
                print_pool_usage("  one of 32 MiB", device.pool());
                device.pool().free(block);
            }
            Err(error) => println!("  one of 32 MiB: {error}"),
        }
        blocks.iter().skip(1).step_by(2).for_each(|block| device.pool().free(*block));
    }
    Ok(())
}

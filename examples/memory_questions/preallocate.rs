//! Opening a device allocates nothing; the pool caches freed memory.

use anyhow::Result;
use forebay::prelude::*;

use crate::{MIB, print_pool_usage, zeros_mib};

pub(crate) fn answer(device: &Device) -> Result<()> {
    print_pool_usage("opened", device.pool());
    let _small = Tensor::zeros([10], DType::F32, device)?;
    print_pool_usage("a tensor of 40 bytes", device.pool());
    let _large = zeros_mib(100, device)?;
    print_pool_usage("and one of 100 MiB", device.pool());
    device.pool().preallocate(256 * MIB)?;
    print_pool_usage("after preallocate(256 MiB)", device.pool());
    Ok(())
}

//! Opening a device takes nothing; what was taken stays with the pool.

use anyhow::Result;
use forebay::prelude::*;

use crate::{MIB, show, zeros};

pub(crate) fn answer(device: &Device) -> Result<()> {
    show("opened", device.pool());
    let _small = Tensor::zeros(&[10], DType::F32, device)?;
    show("a tensor of 40 bytes", device.pool());
    let _large = zeros(100, device)?;
    show("and one of 100 MiB", device.pool());
    device.pool().preallocate(256 * MIB)?;
    show("after preallocate(256 MiB)", device.pool());
    Ok(())
}

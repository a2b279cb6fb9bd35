//! Memory that offloading activations and optimiser state to the host saves.

use anyhow::Result;
use forebay::plan::StepConfig;
use forebay::prelude::*;

use crate::training::{BATCH_SIZE, BLOCKS, compare_strategies};

pub(crate) fn answer(device: &Device) -> Result<()> {
    if !device.backend().supports_pinned_host() {
        println!("the device reaches no memory of the host");
        return Ok(());
    }
    let whole = || StepConfig::new(BATCH_SIZE, 1);
    compare_strategies(
        device,
        &[
            ("everything on the device", whole()),
            ("the optimiser's state on the host", whole().with_offloaded_state()),
            ("what every block keeps", whole().with_offload([true; BLOCKS])),
            ("both", whole().with_offload([true; BLOCKS]).with_offloaded_state()),
        ],
    )
}

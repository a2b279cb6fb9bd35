//! Memory that gradient accumulation over parts of the batch saves.

use anyhow::Result;
use forebay::plan::StepConfig;
use forebay::prelude::*;

use crate::training::{BATCH_SIZE, compare_strategies};

pub(crate) fn answer(device: &Device) -> Result<()> {
    compare_strategies(
        device,
        &[
            ("whole batch: 8 passages", StepConfig::new(BATCH_SIZE, 1)),
            ("2 x 4 passages", StepConfig::new(BATCH_SIZE / 2, 2)),
            ("4 x 2 passages", StepConfig::new(BATCH_SIZE / 4, 4)),
            ("8 x 1 passage", StepConfig::new(1, BATCH_SIZE)),
        ],
    )
}

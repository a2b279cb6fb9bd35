//! Memory that recomputing blocks in the backward pass saves.

use anyhow::Result;
use forebay::plan::StepConfig;
use forebay::prelude::*;

use crate::training::{BATCH_SIZE, BLOCKS, compare_strategies};

pub(crate) fn answer(device: &Device) -> Result<()> {
    let first = |blocks: usize| {
        StepConfig::new(BATCH_SIZE, 1).with_recompute([0, 1, 2, 3].map(|block| block < blocks))
    };
    compare_strategies(
        device,
        &[
            ("no block again", first(0)),
            ("the first of 4", first(1)),
            ("the first two", first(2)),
            ("every block", first(BLOCKS)),
        ],
    )
}

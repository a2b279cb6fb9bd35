//! Memory that mixed precision saves, alone and combined with the other techniques.

use anyhow::Result;
use forebay::plan::StepConfig;
use forebay::prelude::*;

use crate::training::{BATCH_SIZE, BLOCKS, compare_strategies};

pub(crate) fn answer(device: &Device) -> Result<()> {
    let [whole, parts] = [StepConfig::new(BATCH_SIZE, 1), StepConfig::new(BATCH_SIZE / 4, 4)];
    compare_strategies(
        device,
        &[
            ("f32", whole.clone()),
            ("bf16", whole.clone().with_precision(DType::BF16)),
            ("f16", whole.with_precision(DType::F16)),
            (
                "bf16, every block again, 4 x 2",
                parts.with_recompute([true; BLOCKS]).with_precision(DType::BF16),
            ),
        ],
    )
}

//! What mixed precision saves, alone and with the others.

use anyhow::Result;
use forebay::plan::Choice;
use forebay::prelude::*;

use crate::training::{BLOCKS, ROWS, compare};

pub(crate) fn answer(device: &Device) -> Result<()> {
    let [whole, parts] = [Choice::new(ROWS, 1), Choice::new(ROWS / 4, 4)];
    compare(
        device,
        &[
            ("f32", whole.clone()),
            ("bf16", whole.clone().with_precision(DType::BF16)),
            ("f16", whole.with_precision(DType::F16)),
            ("bf16, every block again, 4 x 2", parts.recompute([true; BLOCKS]).with_precision(DType::BF16)),
        ],
    )
}

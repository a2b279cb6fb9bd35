//! What accumulating gradients over parts of the batch saves.

use anyhow::Result;
use forebay::plan::Choice;
use forebay::prelude::*;

use crate::training::{ROWS, compare};

pub(crate) fn answer(device: &Device) -> Result<()> {
    compare(
        device,
        &[
            ("whole batch: 8 passages", Choice::new(ROWS, 1)),
            ("2 x 4 passages", Choice::new(ROWS / 2, 2)),
            ("4 x 2 passages", Choice::new(ROWS / 4, 4)),
            ("8 x 1 passage", Choice::new(1, ROWS)),
        ],
    )
}

//! Holders of memory after a training step.

use anyhow::Result;
use forebay::memory::{Bytes, Tag};
use forebay::plan::StepConfig;
use forebay::prelude::*;

use crate::training::{BATCH_SIZE, Training};

pub(crate) fn answer(device: &Device) -> Result<()> {
    let mut training = Training::new(device)?;
    training.step(&StepConfig::new(BATCH_SIZE, 1))?;
    let stats = device.memory();
    for tag in Tag::ALL {
        let stat = stats.tag(tag);
        if stat.peak > 0 {
            let [now, peak] = [stat.current, stat.peak].map(|bytes| Bytes(bytes).to_string());
            println!("{:<44} {now:>10} allocated {peak:>10} at the peak", tag.name());
        }
    }
    println!("the largest holders:");
    for (holder, held) in device.pool().snapshot().totals_by_holder().into_iter().take(5) {
        println!(
            "  {:<42} {:>10} in {} blocks",
            holder.to_string(),
            Bytes(held.bytes).to_string(),
            held.blocks
        );
    }
    Ok(())
}

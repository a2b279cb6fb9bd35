//! A training step within a memory budget.

use std::sync::Arc;

use anyhow::Result;
use forebay::backend::null::CardProfile;
use forebay::memory::{Bytes, Config};
use forebay::plan::{Budget, StepConfig};
use forebay::prelude::*;

use crate::MIB;
use crate::training::{BATCH_SIZE, Training};

pub(crate) fn answer(device: &Device) -> Result<()> {
    // So small a model fits into one plain segment of the usual size.
    let config = Config { large_segment_size: 2 * MIB, ..Config::default() };
    let profile = CardProfile::from_device(device).with_config(config);
    let plan = |bytes: u64| {
        Budget::new(bytes, BATCH_SIZE).plan(&profile, |dry| {
            let mut training = Training::new(dry)?;
            Ok(move |choice: &StepConfig| training.step(choice))
        })
    };
    let whole = plan(u64::MAX)?.best.peak.unwrap_or(0);
    for percent in [100, 75, 50] {
        let bytes = whole * percent / 100;
        let best = plan(bytes)?.best;
        let limited = Config { max_memory: Some(bytes), ..config };
        let real = Device::with_config(Arc::clone(device.backend()), limited);
        let mut training = Training::new(&real)?;
        let _segments = best.config.apply_segments();
        for _ in 0..2 {
            training.step(&best.config)?;
        }
        let [budget, predicted, taken] =
            [bytes, best.peak.unwrap_or(0), real.memory().peak_reserved()].map(Bytes);
        println!("within {budget}, {percent} % of the plain step's:");
        println!("  {}; predicted {predicted}, reserved {taken}", best.config);
    }
    match plan(MIB) {
        Ok(_) => println!("1 MiB was reported to be enough"),
        Err(error) => println!("within 1 MiB: {error}"),
    }
    Ok(())
}

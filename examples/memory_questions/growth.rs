//! Detecting memory that grows from step to step.

use anyhow::Result;
use forebay::plan::StepConfig;
use forebay::prelude::*;

use crate::training::Training;
use crate::{print_pool_usage, zeros_mib};

pub(crate) fn answer(device: &Device) -> Result<()> {
    let mut training = Training::new(device)?;
    let choice = StepConfig::new(2, 1);
    training.step(&choice)?;
    device.pool().assert_no_growth(3, || training.step(&choice))?;
    print_pool_usage("three steps more leave nothing behind", device.pool());
    let mut kept = Vec::new();
    let leak = device.pool().assert_no_growth(2, || {
        kept.push(zeros_mib(1, device)?);
        Ok(())
    });
    match leak {
        Ok(()) => println!("a list that grows was not seen"),
        Err(error) => println!("a list that grows: {error}"),
    }
    Ok(())
}

//! Random programs in every mode, compared with an oracle in f64. `cargo xtask fuzz --programs N` runs more of them.

use anyhow::{Result, ensure};
use forebay::device::Device;

use super::tests;
use crate::fuzz::programs::{self, Mode, ProgramOptions};

tests![random_programs_agree_with_float64];

const PROGRAMS: u64 = 16;

fn random_programs_agree_with_float64(device: &Device) -> Result<()> {
    let options = ProgramOptions { programs: PROGRAMS, seed: 1, first: 0 };
    let summary = programs::run(&options, device, |_| ());
    ensure!(summary.failures.is_empty(), "{summary}:\n{}", summary.failures.join("\n"));
    let runs = PROGRAMS as usize * Mode::ALL.len();
    ensure!(summary.runs * 10 >= runs * 9, "too many programs are refused: {summary}");
    Ok(())
}

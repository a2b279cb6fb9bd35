//! Mutated files for every loader of external data. A loader accepts or rejects each file without a panic, and
//! without allocating memory that the file merely claims.
//!
//! `FOREBAY_FUZZ_ROUNDS` sets the number of files, `FOREBAY_FUZZ_SEED` the first seed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use forebay_core::device::Device;
use forebay_core::error::Result;

#[path = "../../fuzz/shared.rs"]
mod shared;

use shared::{LOADERS, Random, mutate};

/// Default number of files.
const DEFAULT_CASES: u64 = 20_700;
/// Maximum growth of the address space: files have a few hundred bytes.
const MAX_ADDRESS_SPACE_GROWTH: u64 = 1 << 30;

fn env_number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect("a number in the environment"))
}

/// Returns the peak address space of this process, or 0 if the system does not report it.
fn peak_address_space() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:"));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[test]
fn mutated_files_are_read_or_refused_by_every_loader() -> Result<()> {
    let device = Device::null(Default::default());
    let (cases, seed) =
        (env_number("FOREBAY_FUZZ_ROUNDS", DEFAULT_CASES), env_number("FOREBAY_FUZZ_SEED", 0));
    let each = cases.div_ceil(LOADERS.len() as u64);
    for loader in LOADERS {
        let file = (loader.file)(&device)?;
        // The whole file is taken: mutations begin after the first checks.
        (loader.read)(&device, &file).map_err(|e| e.with_context(loader.name))?;
        let (before, mut taken) = (peak_address_space(), 0);
        let held = device.memory().allocated();
        for case in seed..seed + each {
            let bytes = mutate(&file, &mut Random(case));
            let read = catch_unwind(AssertUnwindSafe(|| (loader.read)(&device, &bytes)));
            let shown = String::from_utf8_lossy(&bytes);
            let read = read.unwrap_or_else(|_| panic!("{}, seed {case}: a panic on {shown:?}", loader.name));
            taken += u64::from(read.is_ok());
            assert!(
                peak_address_space() < before + MAX_ADDRESS_SPACE_GROWTH,
                "{}, seed {case}: much memory for {shown:?}",
                loader.name
            );
        }
        assert_eq!(device.memory().allocated(), held, "{}: memory is left", loader.name);
        assert!(taken < each, "{}: nothing was refused, of {each} files", loader.name);
        println!("{}: {taken} of {each} mutated files were accepted", loader.name);
    }
    Ok(())
}

//! Choices between variants of a kernel, made by timing: in memory, and on disk for the next process.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, RwLock, TryLockError};
use std::time::Duration;

use forebay_shaders::KernelSpec;
use rustc_hash::FxHashMap;

use crate::backend::DeviceInfo;
use crate::disk_cache::{ChoiceCache, DiskCache};
use crate::platform::{CAN_BLOCK, Instant};
use crate::runtime::device::Device;
use crate::sync::RwLockUnpoisoned;

/// Time that timing may always take. Beyond it, timing starts only within its share of the device's age, so that a
/// program's first step stays short. Each variant takes the driver up to a second to compile.
const FREE_TIME: Duration = Duration::from_millis(1000);
/// Part of a device's age that timing may take in addition.
const TIME_SHARE: f64 = 0.1;

/// Numbers that tell variants of one kernel apart.
pub(crate) type VariantCode = [u16; 4];

/// Launches that share a choice: a kernel with the variant of the cost model, and extents by bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct VariantProblem {
    spec: KernelSpec,
    extents: [usize; 4],
}

impl VariantProblem {
    /// Creates a problem; extents are rounded up to four sizes for each power of two.
    pub(crate) fn new(spec: KernelSpec, extents: [usize; 4]) -> Self {
        let round = |extent: usize| extent.next_multiple_of((extent.next_power_of_two() / 8).max(1));
        Self { spec, extents: extents.map(round) }
    }

    /// Returns the problem in one line of text.
    fn describe(&self) -> String {
        let [m, n, k, batch] = self.extents;
        format!("{}, {m}x{n}x{k}x{batch}", self.spec.label())
    }
}

/// Fastest variants of a device's kernels.
#[derive(Debug)]
pub(crate) struct VariantChoices {
    /// Choices by problem; `None` for a problem that is not on disk.
    known: RwLock<FxHashMap<VariantProblem, Option<VariantCode>>>,
    disk: RwLock<ChoiceCache>,
    /// Name of the device and its driver.
    owner: String,
    opened: Instant,
    /// Time that timing has taken. The thread that times holds the lock.
    spent: Mutex<Duration>,
}

impl VariantChoices {
    /// Creates the choices of a device, which reads and writes the user's cache folder. The null device has none.
    pub(crate) fn new(info: &DeviceInfo) -> Self {
        let owner = format!("{} through {}, {}", info.name, info.backend, info.driver);
        let disk = if info.backend == "null" { DiskCache::in_folder(None) } else { DiskCache::from_env() };
        let disk = RwLock::new(ChoiceCache::new(owner.clone(), disk));
        Self { known: RwLock::default(), disk, owner, opened: Instant::now(), spent: Mutex::default() }
    }

    /// Returns the choice for a problem: of this process, else the one on disk.
    pub(crate) fn find(&self, problem: &VariantProblem) -> Option<VariantCode> {
        if let Some(&code) = self.known.read_unpoisoned().get(problem) {
            return code;
        }
        let on_disk = self.disk.read_unpoisoned().load(&problem.describe());
        let code = on_disk.and_then(|bytes| parse_code(&bytes));
        // Kept even if there is none: products that can't be timed would read the disk each time. Another thread may
        // have made the choice in the meantime.
        *self.known.write_unpoisoned().entry(problem.clone()).or_insert(code)
    }

    /// Keeps a choice in this process.
    pub(crate) fn remember(&self, problem: &VariantProblem, code: VariantCode) {
        self.known.write_unpoisoned().insert(problem.clone(), Some(code));
    }

    /// Keeps a choice in this process and on disk.
    pub(crate) fn store(&self, problem: &VariantProblem, code: VariantCode) {
        self.remember(problem, code);
        self.disk.read_unpoisoned().store(&problem.describe(), format_code(code).as_bytes());
    }

    /// Starts to time variants. Returns `None` while another thread does so, because both would disturb each other, and
    /// if timing has already taken its part of the device's age.
    pub(crate) fn start_timing(&self) -> Option<TimingGuard<'_>> {
        let spent = match self.spent.try_lock() {
            Ok(spent) => spent,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let has_time = *spent <= FREE_TIME + self.opened.elapsed().mul_f64(TIME_SHARE);
        has_time.then(|| TimingGuard { spent, start: Instant::now() })
    }
}

/// Guard of the only thread that times variants of a device. Counts the time until it is dropped.
pub(crate) struct TimingGuard<'a> {
    spent: MutexGuard<'a, Duration>,
    start: Instant,
}

impl Drop for TimingGuard<'_> {
    fn drop(&mut self) {
        *self.spent += self.start.elapsed();
    }
}

fn format_code(code: VariantCode) -> String {
    code.map(|number| number.to_string()).join(" ")
}

fn parse_code(bytes: &[u8]) -> Option<VariantCode> {
    let numbers: Option<Vec<u16>> =
        std::str::from_utf8(bytes).ok()?.split(' ').map(|number| number.parse().ok()).collect();
    numbers?.try_into().ok()
}

impl Device {
    /// Reports whether timing may choose a variant now. It may not while a step is recorded, because the choice
    /// launches kernels and waits, nor while a profiler would count those launches.
    pub(crate) fn may_time_variants(&self) -> bool {
        CAN_BLOCK && !self.is_null() && !self.capture_recorder().is_active() && !self.is_profiled()
    }

    /// Describes how the device chooses tiles of matrix products, in one line.
    #[must_use]
    pub fn describe_tile_choice(&self) -> String {
        if self.tile_autotune_min_flops().is_none() {
            return "tiles of products: chosen by a cost model".to_owned();
        }
        let disk = self.variant_choices().disk.read_unpoisoned();
        let kept = match disk.disk().folder() {
            Some(folder) => format!("{} choices in {}", disk.count(), folder.display()),
            None => "kept in the process".to_owned(),
        };
        format!("tiles of products: chosen by timing; {kept}")
    }

    /// Forgets all choices of variants, and keeps later ones in this folder, or only in the process. For tests.
    #[doc(hidden)]
    pub fn set_variant_choice_folder(&self, folder: Option<&Path>) {
        let choices = self.variant_choices();
        choices.known.write_unpoisoned().clear();
        let disk = DiskCache::in_folder(folder);
        *choices.disk.write_unpoisoned() = ChoiceCache::new(choices.owner.clone(), disk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::null::CardProfile;

    #[test]
    fn codes_are_read_as_they_are_written() {
        for code in [[0; 4], [128, 64, 32, 16], [u16::MAX; 4]] {
            assert_eq!(parse_code(format_code(code).as_bytes()), Some(code));
        }
        for text in ["", "1 2 3", "1 2 3 4 5", "1 2 3 70000", "1 2 3 x", "1  2 3"] {
            assert_eq!(parse_code(text.as_bytes()), None, "{text}");
        }
        assert_eq!(parse_code(&[0xff]), None);
    }

    #[test]
    fn extents_share_four_buckets_for_each_power_of_two() {
        let rounded = |n| VariantProblem::new(KernelSpec::new("matmul"), [n; 4]).extents[0];
        assert_eq!([1, 3, 8, 9, 768, 769, 1000, 1024].map(rounded), [1, 3, 8, 10, 768, 896, 1024, 1024]);
    }

    #[test]
    fn choices_are_kept_for_the_next_device_with_the_same_driver() {
        let folder = std::env::temp_dir().join(format!("forebay-variants-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let open = |name: &str| {
            let device = Device::null(CardProfile { name: name.into(), ..CardProfile::default() });
            device.set_variant_choice_folder(Some(&folder));
            device
        };
        let problem = |n| VariantProblem::new(KernelSpec::new("matmul"), [n; 4]);
        let first = open("card, driver 1");
        assert_eq!(first.variant_choices().find(&problem(64)), None);
        first.variant_choices().store(&problem(64), [1, 2, 3, 4]);
        first.variant_choices().remember(&problem(32), [5, 6, 7, 8]);
        assert_eq!(first.variant_choices().find(&problem(32)), Some([5, 6, 7, 8]));
        let second = open("card, driver 1");
        assert_eq!(second.variant_choices().find(&problem(64)), Some([1, 2, 3, 4]));
        assert_eq!(second.variant_choices().find(&problem(32)), None);
        assert_eq!(open("card, driver 2").variant_choices().find(&problem(64)), None);
        // A damaged file counts as missing.
        let file = std::fs::read_dir(&folder).expect("the folder").next().expect("a file").expect("a file");
        std::fs::write(file.path(), b"forebay cache 1\n and no more").expect("a write");
        assert_eq!(open("card, driver 1").variant_choices().find(&problem(64)), None);
        std::fs::remove_dir_all(&folder).expect("the folder");
    }

    #[test]
    fn one_thread_times_at_a_time() {
        let device = Device::null(CardProfile::default());
        let choices = device.variant_choices();
        let guard = choices.start_timing();
        assert!(guard.is_some() && choices.start_timing().is_none());
        drop(guard);
        assert!(choices.start_timing().is_some());
    }

    #[test]
    fn timing_takes_a_part_of_the_age() {
        let device = Device::null(CardProfile::default());
        let choices = device.variant_choices();
        *choices.spent.lock().expect("no panic") = FREE_TIME + Duration::from_secs(100);
        assert!(choices.start_timing().is_none());
        *choices.spent.lock().expect("no panic") = FREE_TIME;
        assert!(choices.start_timing().is_some());
    }
}

//! Chooses a cuBLASLt algorithm for each matrix product: times the heuristic's candidates and stores the
//! choice on disk.

use std::collections::HashMap;
use std::sync::Mutex;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t, cublasStatus_t as Status,
};
use forebay_core::backend::SourceError;
use forebay_core::disk_cache::{CacheKey, ChoiceCache, DiskCache};
use forebay_core::sync::LockUnpoisoned;

use crate::context::{CudaEvent, CudaStream};
use crate::settings;

/// Number of algorithms that are timed.
const MAX_CANDIDATES: usize = 8;
/// Runs that are timed together.
const TIMED_RUNS: u32 = 4;
/// Rounds in which the algorithms are timed in turn. In the first one, an idle GPU raises its clock.
const TIMED_ROUNDS: usize = 3;
/// Once timing took this long, in nanoseconds, only the second round may still begin.
const MAX_TUNING_NS: f64 = 1e8;
/// An algorithm that is slower than the fastest by this factor is not timed again.
const CLEARLY_SLOWER: f64 = 1.5;
/// A later algorithm must be faster by this factor, so that noise does not change the choice from run to run.
const CLEARLY_FASTER: f64 = 0.97;
/// Products of fewer operations use the heuristic's first algorithm: launch overhead dominates their time.
pub(crate) const MIN_FLOPS_TO_TUNE: u64 = 1 << 30;

const EMPTY_RESULT: cublasLtMatmulHeuristicResult_t = cublasLtMatmulHeuristicResult_t {
    algo: cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: Status::CUBLAS_STATUS_NOT_SUPPORTED,
    wavesCount: 0.0,
    reserved: [0; 4],
};

/// Returns the algorithms that the library's heuristic offers for a problem, the expected fastest first.
///
/// # Safety
/// All descriptors are valid.
pub(crate) unsafe fn query_heuristic(
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    [first, second, out]: [sys::cublasLtMatrixLayout_t; 3],
    preference: sys::cublasLtMatmulPreference_t,
) -> Result<Vec<cublasLtMatmulAlgo_t>, CublasError> {
    let mut results = [EMPTY_RESULT; MAX_CANDIDATES];
    let mut found = 0;
    // SAFETY: the caller's promise; the library writes at most as many results as there is room for, and
    // their count.
    let status = unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            product,
            first,
            second,
            out,
            out,
            preference,
            MAX_CANDIDATES as i32,
            results.as_mut_ptr(),
            &mut found,
        )
    };
    status.result()?;
    let found = usize::try_from(found).unwrap_or(0).min(MAX_CANDIDATES);
    let usable = results[..found].iter().filter(|result| result.state == Status::CUBLAS_STATUS_SUCCESS);
    let algorithms: Vec<_> = usable.map(|result| result.algo).collect();
    if algorithms.is_empty() { Err(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED)) } else { Ok(algorithms) }
}

/// Returns the index of the fastest algorithm on a stream; `run` enqueues the product and is called several
/// times.
///
/// The algorithms take turns, and the shortest time of each counts: else the first one would be measured at
/// the clock of an idle GPU, and the last one at that of a hot GPU.
pub(crate) fn find_fastest(
    stream: &CudaStream,
    algorithms: &[cublasLtMatmulAlgo_t],
    mut run: impl FnMut(&cublasLtMatmulAlgo_t) -> Result<(), CublasError>,
) -> Result<usize, SourceError> {
    let (start, end) = (CudaEvent::new_timed(&stream.context)?, CudaEvent::new_timed(&stream.context)?);
    // The library may refuse an algorithm that its heuristic offers; such an algorithm is skipped.
    let mut candidates: Vec<usize> = (0..algorithms.len()).filter(|&i| run(&algorithms[i]).is_ok()).collect();
    let mut shortest = vec![f64::INFINITY; algorithms.len()];
    let mut total = 0.0;
    for round in 0..TIMED_ROUNDS {
        if round > 1 && total > MAX_TUNING_NS {
            break;
        }
        for &candidate in &candidates {
            start.record(stream)?;
            let enqueued = (0..TIMED_RUNS).all(|_| run(&algorithms[candidate]).is_ok());
            end.record(stream)?;
            end.synchronize()?;
            let time = end.elapsed_since(&start)?;
            total += time;
            if enqueued {
                shortest[candidate] = shortest[candidate].min(time);
            }
        }
        let limit = CLEARLY_SLOWER * shortest.iter().copied().fold(f64::INFINITY, f64::min);
        candidates.retain(|&candidate| shortest[candidate] < limit);
    }
    Ok(choose_shortest(&shortest))
}

/// Returns the index of the shortest time, or of an earlier one that is about as short.
fn choose_shortest(times: &[f64]) -> usize {
    let mut best = 0;
    for (number, &time) in times.iter().enumerate() {
        if time < CLEARLY_FASTER * times[best] {
            best = number;
        }
    }
    best
}

/// Choices of this process. All queues of a device then sum in the same order. The order depends neither on
/// which queue came first nor on other processes that write to the disk.
static PROCESS_CHOICES: Mutex<Option<HashMap<CacheKey, cublasLtMatmulAlgo_t>>> = Mutex::new(None);

/// Choices of this process and on disk. A choice is the algorithm itself: 64 bytes that one library version
/// understands.
#[derive(Debug)]
pub(crate) struct AlgorithmChoices {
    disk: ChoiceCache,
    /// Names of the device and the library; part of the key.
    device_and_library: String,
}

impl AlgorithmChoices {
    pub(crate) fn new(device: &str, library: usize) -> Self {
        Self::in_cache(device, library, DiskCache::from_env())
    }

    fn in_cache(device: &str, library: usize, disk: DiskCache) -> Self {
        let device_and_library = format!("{device}, cuBLASLt {library}");
        Self { disk: ChoiceCache::new(device_and_library.clone(), disk), device_and_library }
    }

    /// Returns the index of the algorithm for a problem's products among the algorithms that are offered, at
    /// least one. Takes the choice of this process, else the one on disk, else the fastest that `time` finds.
    /// If `time` finds none, the choice is the first.
    pub(crate) fn choose(
        &self,
        problem: &str,
        offered: &[cublasLtMatmulAlgo_t],
        time: impl FnOnce() -> Result<Option<usize>, SourceError>,
    ) -> Result<usize, SourceError> {
        let key = CacheKey::new(&[&self.device_and_library, problem]);
        // The lock is held until the choice is made: another queue must neither time its products at the same
        // time nor choose for itself.
        let mut choices = PROCESS_CHOICES.lock_unpoisoned();
        let choices = choices.get_or_insert_default();
        let find_index = |choice: cublasLtMatmulAlgo_t| offered.iter().position(|offer| *offer == choice);
        if let Some(index) = choices.get(&key).copied().and_then(find_index) {
            return Ok(index);
        }
        let index = match self.load(problem).and_then(find_index) {
            Some(index) => index,
            None if settings::bool_from_env("FOREBAY_CUBLASLT_AUTOTUNE") == Some(false) => 0,
            None => match time()? {
                Some(fastest) => {
                    self.store(problem, &offered[fastest]);
                    fastest
                }
                None => 0,
            },
        };
        choices.entry(key).or_insert(offered[index]);
        Ok(index)
    }

    /// Loads a choice from disk.
    fn load(&self, problem: &str) -> Option<cublasLtMatmulAlgo_t> {
        let bytes = self.disk.load(problem)?;
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let words: [[u8; 8]; 8] = words.try_into().ok()?;
        Some(cublasLtMatmulAlgo_t { data: words.map(u64::from_le_bytes) })
    }

    fn store(&self, problem: &str, algorithm: &cublasLtMatmulAlgo_t) {
        let bytes: Vec<u8> = algorithm.data.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.disk.store(problem, &bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_algorithm_wins_unless_a_later_one_is_clearly_faster() {
        assert_eq!(choose_shortest(&[1.0, 0.98, 0.99]), 0);
        assert_eq!(choose_shortest(&[1.0, 0.98, 0.5, 0.49]), 2);
        assert_eq!(choose_shortest(&[f64::INFINITY, 2.0]), 1);
        assert_eq!(choose_shortest(&[f64::INFINITY; 2]), 0);
    }

    fn algorithm(first: u64) -> cublasLtMatmulAlgo_t {
        cublasLtMatmulAlgo_t { data: [first, 2, 3, 4, 5, 6, 7, u64::MAX] }
    }

    /// Choices in a folder that begins empty.
    struct TempFolder(std::path::PathBuf);

    impl TempFolder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("forebay-choices-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            Self(path)
        }

        fn choices(&self, device: &str) -> AlgorithmChoices {
            AlgorithmChoices::in_cache(device, 130_001, DiskCache::in_folder(Some(&self.0)))
        }
    }

    impl Drop for TempFolder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn cached_choices_belong_to_one_device() {
        let folder = TempFolder::new("device");
        let find = |device: &str, problem: &str| {
            let choices = folder.choices(device);
            choices.load(problem).map(|a| a.data)
        };
        let choices = folder.choices("card a");
        choices.store("64x64", &algorithm(1));
        assert_eq!(find("card a", "64x64"), Some(algorithm(1).data));
        assert!(find("card b", "64x64").is_none());
        assert!(find("card a", "64x65").is_none());
    }

    #[test]
    fn a_process_chooses_an_algorithm_once() {
        let folder = TempFolder::new("once");
        let offered = [algorithm(1), algorithm(2), algorithm(3)];
        let (first, second) = (folder.choices("card once"), folder.choices("card once"));
        assert_eq!(first.choose("64x64", &offered, || Ok(Some(2))).unwrap(), 2);
        second.store("64x64", &offered[0]);
        assert_eq!(second.choose("64x64", &offered, || Ok(Some(1))).unwrap(), 2);
        // Algorithms are found by value, not by index.
        assert_eq!(second.choose("64x64", &offered[1..], || Ok(Some(0))).unwrap(), 1);
        // A problem that could not be timed keeps its choice in this process, but not on disk.
        assert_eq!(first.choose("32x32", &offered, || Ok(None)).unwrap(), 0);
        assert_eq!(second.choose("32x32", &offered, || Ok(Some(1))).unwrap(), 0);
        assert!(first.load("32x32").is_none());
    }
}

//! Which of cuBLASLt's algorithms makes a product: its heuristic names some, the device's clock chooses, the disk remembers.

use std::collections::HashMap;
use std::sync::Mutex;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t, cublasStatus_t as Status,
};
use forebay_core::backend::SourceError;

use crate::context::{Event, Stream};
use crate::disk_cache::{CacheKey, DiskCache};
use crate::{lock, settings};

/// Algorithms that are timed.
const MAX_CANDIDATES: usize = 8;
/// Runs that are timed together, after one that is not.
const TIMED_RUNS: u32 = 4;
/// Products of fewer operations are made by the first: their time is that of the launch.
pub(crate) const MIN_FLOPS_TO_TUNE: u64 = 1 << 30;

const EMPTY_RESULT: cublasLtMatmulHeuristicResult_t = cublasLtMatmulHeuristicResult_t {
    algo: cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: Status::CUBLAS_STATUS_NOT_SUPPORTED,
    wavesCount: 0.0,
    reserved: [0; 4],
};

/// What the library offers for a problem, the one that its heuristic thinks the fastest first.
///
/// # Safety
/// All descriptors live.
pub(crate) unsafe fn query_heuristic(
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    [first, second, out]: [sys::cublasLtMatrixLayout_t; 3],
    preference: sys::cublasLtMatmulPreference_t,
) -> Result<Vec<cublasLtMatmulAlgo_t>, CublasError> {
    let mut results = [EMPTY_RESULT; MAX_CANDIDATES];
    let mut found = 0;
    // SAFETY: the caller's promise; the library writes as many results as there is room for, and their number.
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
    let good = results[..found].iter().filter(|result| result.state == Status::CUBLAS_STATUS_SUCCESS);
    let algorithms: Vec<_> = good.map(|result| result.algo).collect();
    if algorithms.is_empty() { Err(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED)) } else { Ok(algorithms) }
}

/// The fastest of some algorithms on a stream, by number; `run` enqueues the product, which may be made again and again.
pub(crate) fn find_fastest(
    stream: &Stream,
    algorithms: &[cublasLtMatmulAlgo_t],
    mut run: impl FnMut(&cublasLtMatmulAlgo_t) -> Result<(), CublasError>,
) -> Result<usize, SourceError> {
    let (start, end) = (Event::new_timed(&stream.context)?, Event::new_timed(&stream.context)?);
    let mut best = (f64::INFINITY, 0);
    for (number, algorithm) in algorithms.iter().enumerate() {
        // What the heuristic offers and the library then refuses is no candidate.
        if run(algorithm).is_err() {
            continue;
        }
        start.record(stream)?;
        let enqueued = (0..TIMED_RUNS).all(|_| run(algorithm).is_ok());
        end.record(stream)?;
        end.synchronize()?;
        let time = end.elapsed_since(&start)?;
        // A later one must be clearly faster: what differs by noise shall not differ from run to run.
        if enqueued && time < 0.97 * best.0 {
            best = (time, number);
        }
    }
    Ok(best.1)
}

/// What this process has chosen: all queues of a device sum in one order, whoever came first and whatever other processes
/// write to the disk meanwhile.
static PROCESS_CHOICES: Mutex<Option<HashMap<CacheKey, cublasLtMatmulAlgo_t>>> = Mutex::new(None);

/// Choices, on disk too. A choice is the algorithm itself: 64 bytes that mean something to one version of the library.
#[derive(Debug)]
pub(crate) struct AlgorithmChoices {
    disk: DiskCache,
    /// The device and the library.
    device_and_library: String,
    library_version: (u32, u32),
}

impl AlgorithmChoices {
    pub(crate) fn new(device: &str, library: usize) -> Self {
        let version = ((library / 10_000) as u32, (library / 100 % 100) as u32);
        Self {
            disk: DiskCache::from_env(),
            device_and_library: format!("{device}, cuBLASLt {library}"),
            library_version: version,
        }
    }

    fn cache_key(&self, problem: &str) -> CacheKey {
        CacheKey::new(&format!("{}: {problem}", self.device_and_library), 0)
    }

    /// Which of the algorithms that are offered, at least one, makes a problem's products from now on, by number: the one
    /// of this process, else that on disk, else the one that `time` finds the fastest. Where that can say nothing it is the first.
    pub(crate) fn choose(
        &self,
        problem: &str,
        offered: &[cublasLtMatmulAlgo_t],
        time: impl FnOnce() -> Result<Option<usize>, SourceError>,
    ) -> Result<usize, SourceError> {
        let key = self.cache_key(problem);
        // Until it is chosen: another queue's products shall neither be timed beside these nor choose for themselves.
        let mut chosen = lock(&PROCESS_CHOICES);
        let chosen = chosen.get_or_insert_default();
        let number = |known: cublasLtMatmulAlgo_t| offered.iter().position(|offered| *offered == known);
        if let Some(number) = chosen.get(&key).copied().and_then(number) {
            return Ok(number);
        }
        let number = match self.load(key).and_then(number) {
            Some(number) => number,
            None if settings::bool_from_env("FOREBAY_CUBLASLT_AUTOTUNE") == Some(false) => 0,
            None => match time()? {
                Some(fastest) => {
                    self.store(key, &offered[fastest]);
                    fastest
                }
                None => 0,
            },
        };
        chosen.entry(key).or_insert(offered[number]);
        Ok(number)
    }

    /// What was chosen in this place before.
    fn load(&self, key: CacheKey) -> Option<cublasLtMatmulAlgo_t> {
        let bytes = self.disk.load(key, Some(self.library_version))?;
        let mut algorithm = EMPTY_RESULT.algo;
        if bytes.len() != 8 * algorithm.data.len() {
            return None;
        }
        for (word, bytes) in algorithm.data.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        Some(algorithm)
    }

    fn store(&self, key: CacheKey, algorithm: &cublasLtMatmulAlgo_t) {
        let bytes: Vec<u8> = algorithm.data.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.disk.store(key, self.library_version, &bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

        fn choices(&self, place: &str) -> AlgorithmChoices {
            AlgorithmChoices { disk: DiskCache::in_folder(&self.0), ..AlgorithmChoices::new(place, 130_001) }
        }
    }

    impl Drop for TempFolder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn choices_are_found_again_in_their_place_alone() {
        let folder = TempFolder::new("place");
        let find = |place: &str, problem: &str| {
            let choices = folder.choices(place);
            choices.load(choices.cache_key(problem)).map(|a| a.data)
        };
        let choices = folder.choices("card a");
        choices.store(choices.cache_key("64x64"), &algorithm(1));
        assert_eq!(find("card a", "64x64"), Some(algorithm(1).data));
        assert!(find("card b", "64x64").is_none());
        assert!(find("card a", "64x65").is_none());
    }

    #[test]
    fn a_process_chooses_once_whatever_its_queues_find_faster_and_the_disk_says() {
        let folder = TempFolder::new("once");
        let offered = [algorithm(1), algorithm(2), algorithm(3)];
        let (first, second) = (folder.choices("card once"), folder.choices("card once"));
        assert_eq!(first.choose("64x64", &offered, || Ok(Some(2))).unwrap(), 2);
        second.store(second.cache_key("64x64"), &offered[0]);
        assert_eq!(second.choose("64x64", &offered, || Ok(Some(1))).unwrap(), 2);
        // By what it is, not by its place in a list.
        assert_eq!(second.choose("64x64", &offered[1..], || Ok(Some(0))).unwrap(), 1);
        // What could not be timed is remembered too, but not for other processes.
        assert_eq!(first.choose("32x32", &offered, || Ok(None)).unwrap(), 0);
        assert_eq!(second.choose("32x32", &offered, || Ok(Some(1))).unwrap(), 0);
        assert!(first.load(first.cache_key("32x32")).is_none());
    }
}

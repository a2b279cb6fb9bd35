//! Which of cuBLASLt's algorithms makes a product: its heuristic names some, the device's clock chooses, the disk remembers.

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t, cublasStatus_t as Status,
};
use forebay_core::backend::SourceError;

use crate::cache::{DiskCache, Key};
use crate::context::{Event, Stream};

/// Algorithms that are timed.
const CANDIDATES: usize = 8;
/// Runs that are timed together, after one that is not.
const RUNS: u32 = 4;
/// Products of fewer operations are made by the first: their time is that of the launch.
pub(crate) const WORTH: u64 = 1 << 30;

const EMPTY: cublasLtMatmulHeuristicResult_t = cublasLtMatmulHeuristicResult_t {
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
pub(crate) unsafe fn offered(
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    [first, second, out]: [sys::cublasLtMatrixLayout_t; 3],
    preference: sys::cublasLtMatmulPreference_t,
) -> Result<Vec<cublasLtMatmulAlgo_t>, CublasError> {
    let mut results = [EMPTY; CANDIDATES];
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
            CANDIDATES as i32,
            results.as_mut_ptr(),
            &mut found,
        )
    };
    status.result()?;
    let found = usize::try_from(found).unwrap_or(0).min(CANDIDATES);
    let good = results[..found].iter().filter(|result| result.state == Status::CUBLAS_STATUS_SUCCESS);
    let algorithms: Vec<_> = good.map(|result| result.algo).collect();
    if algorithms.is_empty() { Err(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED)) } else { Ok(algorithms) }
}

/// The fastest of some algorithms on a stream, by number; `run` enqueues the product, which may be made again and again.
pub(crate) fn fastest(
    stream: &Stream,
    algorithms: &[cublasLtMatmulAlgo_t],
    mut run: impl FnMut(&cublasLtMatmulAlgo_t) -> Result<(), CublasError>,
) -> Result<usize, SourceError> {
    let (start, end) = (Event::timed(&stream.context)?, Event::timed(&stream.context)?);
    let mut best = (f64::INFINITY, 0);
    for (number, algorithm) in algorithms.iter().enumerate() {
        // What the heuristic offers and the library then refuses is no candidate.
        if run(algorithm).is_err() {
            continue;
        }
        start.record(stream)?;
        let enqueued = (0..RUNS).all(|_| run(algorithm).is_ok());
        end.record(stream)?;
        end.wait()?;
        let time = end.since(&start)?;
        // A later one must be clearly faster: what differs by noise shall not differ from run to run.
        if enqueued && time < 0.97 * best.0 {
            best = (time, number);
        }
    }
    Ok(best.1)
}

/// Choices on disk. A choice is the algorithm itself: 64 bytes that mean something to one version of the library.
#[derive(Debug)]
pub(crate) struct Choices {
    disk: DiskCache,
    /// The device and the library.
    place: String,
    version: (u32, u32),
}

impl Choices {
    pub(crate) fn new(device: &str, library: usize) -> Self {
        let version = ((library / 10_000) as u32, (library / 100 % 100) as u32);
        Self { disk: DiskCache::from_env(), place: format!("{device}, cuBLASLt {library}"), version }
    }

    fn key(&self, problem: &str) -> Key {
        Key::new(&format!("{}: {problem}", self.place), 0)
    }

    /// What was chosen for a problem in this place before.
    pub(crate) fn find(&self, problem: &str) -> Option<cublasLtMatmulAlgo_t> {
        let bytes = self.disk.find(self.key(problem), Some(self.version))?;
        let mut algorithm = EMPTY.algo;
        if bytes.len() != 8 * algorithm.data.len() {
            return None;
        }
        for (word, bytes) in algorithm.data.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        Some(algorithm)
    }

    pub(crate) fn store(&self, problem: &str, algorithm: &cublasLtMatmulAlgo_t) {
        let bytes: Vec<u8> = algorithm.data.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.disk.store(self.key(problem), self.version, &bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_found_again_in_their_place_alone() {
        let folder = std::env::temp_dir().join(format!("forebay-choices-{}", std::process::id()));
        let choices = |place: &str| Choices { disk: DiskCache::at(&folder), ..Choices::new(place, 130_001) };
        let mut algorithm = EMPTY.algo;
        algorithm.data = [1, 2, 3, 4, 5, 6, 7, u64::MAX];
        choices("card a").store("64x64", &algorithm);
        assert_eq!(choices("card a").find("64x64").map(|a| a.data), Some(algorithm.data));
        assert!(choices("card b").find("64x64").is_none());
        assert!(choices("card a").find("64x65").is_none());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

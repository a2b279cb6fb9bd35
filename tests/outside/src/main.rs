//! A backend that only uses public items, and the whole conformance suite on it: the starting point of a new backend.
//!
//! The backend wraps the wgpu backend and counts every call. `outside [topic/ ...]` runs the tests whose names
//! contain one of the arguments, or all of them, and then prints the counts.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use forebay::backend::{
    Backend, Command, DeviceInfo, DeviceMemory, Fence, KernelId, KernelSource, PageRemap, SegmentId,
    SegmentSource, Slice, SourceError, SourceLimits,
};
use forebay::device::Device;
use forebay::error::Result as CoreResult;
use forebay_conformance::suite;
use forebay_wgpu::WgpuBackend;

/// Backend that forwards and counts every required call. Methods with defaults keep them: one queue, no host memory,
/// no vendor library, no graphs.
#[derive(Debug)]
struct CountingBackend {
    inner: Arc<dyn Backend>,
    info: DeviceInfo,
    calls: Mutex<BTreeMap<&'static str, u64>>,
}

impl CountingBackend {
    fn new(inner: Arc<dyn Backend>) -> Self {
        let info = DeviceInfo { backend: "outside", ..inner.info().clone() };
        Self { inner, info, calls: Mutex::default() }
    }

    fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Implements methods that count their call under their name and forward it.
macro_rules! counted {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self $(, $arg: $type)*) -> $result {
            *self.calls.lock().unwrap_or_else(PoisonError::into_inner).entry(stringify!($name)).or_default() += 1;
            self.inner.$name($($arg),*)
        })*
    };
}

impl SegmentSource for CountingBackend {
    fn limits(&self) -> SourceLimits {
        self.inner.limits()
    }
    fn device_memory(&self) -> DeviceMemory {
        self.inner.device_memory()
    }
    counted! {
        alloc_segment(bytes: u64) -> Result<SegmentId, SourceError>;
        free_segment(segment: SegmentId) -> Result<(), SourceError>;
        reserve_addresses(bytes: u64) -> Result<SegmentId, SourceError>;
        free_addresses(segment: SegmentId) -> Result<(), SourceError>;
        remap(pieces: &[PageRemap]) -> Result<(), SourceError>;
        unmap(segment: SegmentId, offset: u64, pieces: &[u64]) -> Result<(), SourceError>;
        record_fence() -> Result<Fence, SourceError>;
        is_fence_signaled(fence: Fence) -> Result<bool, SourceError>;
        wait_fence(fence: Fence) -> Result<(), SourceError>;
    }
}

impl Backend for CountingBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    counted! {
        compile(source: &KernelSource<'_>) -> CoreResult<KernelId>;
        wait_compiled(kernel: KernelId) -> CoreResult<()>;
        enqueue(command: &Command<'_>) -> CoreResult<bool>;
        upload(dst: Slice, data: &[u8]) -> CoreResult<()>;
        download(src: Slice, data: &mut [u8]) -> CoreResult<()>;
        flush() -> CoreResult<()>;
    }
}

fn run() -> Result<usize> {
    let backend = Arc::new(CountingBackend::new(WgpuBackend::open(0)?));
    let device = Device::new(Arc::clone(&backend) as Arc<dyn Backend>)?;
    println!("{}", device.info());
    let filters: Vec<String> = std::env::args().skip(1).collect();
    let tally = suite::run(&device, &filters);
    let calls = backend.calls();
    println!("calls: {calls:?}");
    for method in ["alloc_segment", "compile", "enqueue", "upload", "download"] {
        ensure!(calls.contains_key(method), "the suite ran without `{method}` of this backend");
    }
    println!("{tally}");
    Ok(tally.failed)
}

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

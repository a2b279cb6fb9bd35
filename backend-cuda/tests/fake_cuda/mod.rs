//! Runs tests on the fake driver. The C compiler that Rust links with builds the libraries. Each test runs again
//! in a child process that loads them.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::{env, fs};

use forebay_core::backend::Backend;
use forebay_cuda::CudaBackend;

/// Page size of the fake driver.
pub(crate) const PAGE: u64 = 2 << 20;

/// Fake libraries that the child loads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Libraries {
    /// The driver.
    Driver,
    /// The driver and NVRTC.
    Compiler,
    /// The driver and cuBLASLt.
    Products,
    /// The driver and NVML.
    Management,
}

/// Defines `name { ... }` as a test on the fake driver, with these libraries and variables.
macro_rules! on_fake {
    ($($name:ident($libraries:expr $(, $variable:literal = $value:expr)*) $body:block)*) => {
        $(#[test] fn $name() { $crate::fake_cuda::run(stringify!($name), $libraries, &[$(($variable, $value)),*], || $body); })*
    };
}
pub(crate) use on_fake;

/// Runs a test's body in the child; in the parent, starts the child with variables of the fake driver set.
pub(crate) fn run(test: &str, libraries: Libraries, variables: &[(&str, &str)], body: impl FnOnce()) {
    if env::var_os("FAKE_CUDA_CHILD").is_some() {
        return body();
    }
    let built = build();
    let mut path = built.join("driver").into_os_string();
    for (wanted, folder) in
        [(Libraries::Compiler, "nvrtc"), (Libraries::Products, "cublaslt"), (Libraries::Management, "nvml")]
    {
        if libraries == wanted {
            path.push(":");
            path.push(built.join(folder));
        }
    }
    let scratch = ScratchFolder::new(test);
    let output = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("FAKE_CUDA_CHILD", "1")
        .env("FAKE_CUDA_LOG", scratch.0.join("log"))
        .env("FOREBAY_CACHE_DIR", scratch.0.join("cache"))
        .env("LD_LIBRARY_PATH", path)
        .env_remove("FOREBAY_CUDA_VMM")
        .env_remove("FOREBAY_CUDA_PDL")
        .env_remove("FOREBAY_CUDA_PEER")
        .env_remove("FOREBAY_CUDA_LAUNCH_THREAD")
        .env_remove("FOREBAY_NVTX")
        .env_remove("NVTX_INJECTION64_PATH")
        .env_remove("FOREBAY_PORTABLE_KERNELS")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
}

/// Opens the fake device, in the child.
pub(crate) fn open() -> Arc<dyn Backend> {
    open_index(0)
}

/// Opens one of several fake devices (`FAKE_CUDA_DEVICES`), in the child.
pub(crate) fn open_index(index: usize) -> Arc<dyn Backend> {
    CudaBackend::open(index).unwrap()
}

/// Returns the lines that the fake libraries have logged so far, in the child.
pub(crate) fn call_log() -> Vec<String> {
    let log = fs::read_to_string(env::var_os("FAKE_CUDA_LOG").unwrap()).unwrap_or_default();
    log.lines().map(str::to_owned).collect()
}

/// Counts a line in the log.
pub(crate) fn count_calls(line: &str) -> usize {
    call_log().iter().filter(|found| *found == line).count()
}

/// Returns the child's cache folder.
pub(crate) fn cache() -> PathBuf {
    env::var_os("FOREBAY_CACHE_DIR").unwrap().into()
}

/// A folder for one test's files, removed at the end.
struct ScratchFolder(PathBuf);

impl ScratchFolder {
    fn new(test: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Builds the libraries once and returns their folder. `libcuda.so` is the first name that the loader tries,
/// so that a real driver is not found instead.
fn build() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_cuda");
        compile("driver", &to, "libcuda.so", &[]);
        compile("nvrtc", &to, "libnvrtc.so", &["-lcuda"]);
        compile("cublaslt", &to, "libcublasLt.so", &["-lcuda"]);
        compile("nvml", &to, "libnvidia-ml.so.1", &[]);
        compile("nvtx", &to, "libfake_nvtx.so", &[]);
        // A toolkit in a folder that the loader does not search.
        compile_as("cublaslt", &to.join("lib64"), "libcublasLt.so.13", &["-lcuda"]);
        // A driver that lacks one function.
        compile_as("driver", &to.join("old"), "libcuda.so", &["-DcuMemUnmap=cuMemUnmapGone"]);
        to
    })
}

fn compile(source: &str, to: &Path, name: &str, more: &[&str]) {
    compile_as(source, &to.join(source), name, more);
}

fn compile_as(source: &str, folder: &Path, name: &str, more: &[&str]) {
    fs::create_dir_all(folder).unwrap();
    // Replaced, not overwritten: other test processes may be loading the old file.
    let unfinished = folder.join(format!("{name}.{}", std::process::id()));
    let output = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o"])
        .arg(&unfinished)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fake_cuda/{source}.c")))
        .arg(format!("-Wl,-soname,{name}"))
        .arg(format!("-L{}", folder.with_file_name("driver").display()))
        .args(more)
        .output()
        .expect("a C compiler (cc, or the one that CC names), which Rust's linking needs too");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::rename(unfinished, folder.join(name)).unwrap();
}

/// Returns a folder with a toolkit that the loader does not search; for a child's `CUDA_HOME`.
pub(crate) fn toolkit() -> &'static Path {
    build()
}

/// A tool that listens to NVTX; for a child's `NVTX_INJECTION64_PATH`.
pub(crate) const NVTX_TOOL: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/fake_cuda/nvtx/libfake_nvtx.so");

/// Returns the folder of the driver without `cuMemUnmap`; for a child's `LD_LIBRARY_PATH`.
pub(crate) fn old_driver() -> PathBuf {
    build().join("old")
}

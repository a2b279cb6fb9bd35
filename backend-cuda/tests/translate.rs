//! The translator: what it writes, what it refuses, and that NVRTC takes it for every architecture.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_cuda::nvrtc;
use forebay_cuda::translate::translate;

/// From Turing to Blackwell.
const ARCHITECTURES: [u32; 7] = [75, 80, 86, 89, 90, 100, 120];

/// Whether NVRTC can be asked; says so where not, and fails if that is required.
fn nvrtc() -> bool {
    let required = std::env::var("FOREBAY_REQUIRE").is_ok_and(|v| v.split(',').any(|w| w.trim() == "nvrtc"));
    if nvrtc::is_present() {
        return true;
    }
    assert!(!required, "FOREBAY_REQUIRE names nvrtc, and NVRTC was not found");
    eprintln!("SKIPPED: NVRTC was not found, so nothing was compiled");
    false
}

fn corpus(folder: &str) -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "wgsl"))
        .map(|path| (path.clone(), fs::read_to_string(path).unwrap()))
        .collect();
    files.sort();
    assert!(!files.is_empty());
    files
}

/// The compute entry points of a module.
fn entries(wgsl: &str) -> Vec<String> {
    let module = naga::front::wgsl::parse_str(wgsl).unwrap_or_else(|e| panic!("{}", e.emit_to_string(wgsl)));
    module.entry_points.into_iter().map(|e| e.name).collect()
}

/// Overrides that a file of the corpus asks for in lines like `// override: n = 4`.
fn overrides(wgsl: &str) -> Vec<(&str, f64)> {
    let lines = wgsl.lines().filter_map(|line| line.strip_prefix("// override: "));
    let pairs = lines.filter_map(|line| line.split_once(" = "));
    pairs.map(|(name, value)| (name, value.parse().unwrap())).collect()
}

fn compile_all(folder: &str) {
    let compile = nvrtc();
    let mut failures = Vec::new();
    for (path, wgsl) in corpus(folder) {
        for entry in entries(&wgsl) {
            let kernel = match translate(&wgsl, &entry, &overrides(&wgsl)) {
                Ok(kernel) => kernel,
                Err(error) => {
                    failures.push(format!("{}: {entry}: {error}", path.display()));
                    continue;
                }
            };
            if let Ok(folder) = std::env::var("FOREBAY_DUMP") {
                let file = format!("{}_{entry}.cu", path.file_stem().unwrap().display());
                fs::write(Path::new(&folder).join(file), &kernel.source).unwrap();
            }
            for arch in ARCHITECTURES.into_iter().filter(|_| compile) {
                if let Err(error) = nvrtc::compile(&kernel.source, &entry, arch) {
                    failures.push(format!("{}: {entry}: {error}", path.display()));
                    break;
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_feature_compiles() {
    compile_all("wgsl");
}

#[test]
fn every_conformance_kernel_compiles() {
    compile_all("wgsl_semantics");
}

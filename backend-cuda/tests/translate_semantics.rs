//! Runs the conformance kernels of `tests/wgsl_semantics` on cuda:0, if there is one: translated kernels compute
//! what WGSL specifies.
//!
//! Every file is one kernel, `main`, for one workgroup. `@binding(0)` is the output, at least 64 zeroed
//! words. `@binding(1)`, if declared, has 64 zero words, whose values compilers cannot know. The lines `//
//! expect: ` list the first words of binding 0: values with a point are floats, values with 0x are
//! hexadecimal.

use std::fs;
use std::path::Path;

use forebay_core::backend::{Backend, KernelSource, Launch, Slice};
use forebay_cuda::CudaBackend;
use forebay_cuda::translate::translate;

/// Returns the files with their expected words.
fn kernels() -> Vec<(String, String, Vec<u32>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/wgsl_semantics");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
        .iter()
        .map(|path| {
            let wgsl = fs::read_to_string(path).unwrap();
            let lines = wgsl.lines().filter_map(|line| line.strip_prefix("// expect: "));
            let expected = lines.flat_map(str::split_whitespace).map(word).collect();
            (path.file_stem().unwrap().display().to_string(), wgsl, expected)
        })
        .collect()
}

fn word(text: &str) -> u32 {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).unwrap(),
        None if text.contains('.') => text.parse::<f32>().unwrap().to_bits(),
        None => text.parse::<i64>().unwrap() as u32,
    }
}

/// Runs one workgroup and reads binding 0.
fn run(backend: &dyn Backend, name: &str, wgsl: &str, words: usize) -> Result<Vec<u32>, String> {
    let bytes = 4 * words.max(64) as u64;
    let segment = backend.alloc_segment(4096).map_err(|e| e.to_string())?;
    let out = Slice { segment, offset: 0, bytes };
    let zeros = Slice { segment, offset: 2048, bytes: 256 };
    let source =
        KernelSource { label: name, wgsl, entry_point: "main", overrides: &[], zero_workgroup_memory: true };
    let bindings = translate(&source).map_err(|e| e.to_string())?.binding_count;
    let result = (|| {
        backend.fill(Slice { segment, offset: 0, bytes: 4096 }, 0)?;
        let kernel = backend.compile(&source)?;
        let bindings = &[out, zeros][..bindings];
        backend.launch(&Launch { kernel, bindings, params: &[], groups: [1, 1, 1] })?;
        let mut data = vec![0; bytes as usize];
        backend.download(out, &mut data)?;
        Ok(data)
    })();
    backend.free_segment(segment).map_err(|e| e.to_string())?;
    let data = result.map_err(|e: forebay_core::error::Error| e.to_string())?;
    Ok(data.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
}

#[test]
fn every_kernel_states_its_expected_values() {
    for (name, _, expected) in kernels() {
        assert!((1..=64).contains(&expected.len()), "{name}: {} words", expected.len());
    }
}

#[test]
fn kernels_compute_what_wgsl_specifies() {
    let required = std::env::var("FOREBAY_REQUIRE").is_ok_and(|v| v.split(',').any(|w| w.trim() == "cuda"));
    let backend = match CudaBackend::open(0) {
        Ok(backend) => backend,
        Err(error) if required => panic!("FOREBAY_REQUIRE names cuda: {error}"),
        Err(error) => return println!("not run: {error}"),
    };
    let mut failures = Vec::new();
    for (name, wgsl, expected) in kernels() {
        match run(&*backend, &name, &wgsl, expected.len()) {
            Ok(found) if found[..expected.len()] == expected[..] => {}
            Ok(found) => {
                let wrong = expected.iter().zip(&found).enumerate().filter(|(_, (e, f))| e != f);
                let wrong = wrong.map(|(i, (e, f))| format!("  word {i}: {f:#x}, not {e:#x}"));
                failures.push(format!("{name}:\n{}", wrong.collect::<Vec<_>>().join("\n")));
            }
            Err(error) => failures.push(format!("{name}: {error}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

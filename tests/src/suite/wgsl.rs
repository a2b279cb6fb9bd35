//! WGSL semantics, construct by construct: kernels with the words that they must write.
//!
//! The translator's own tests compile these files to CUDA; here they run in one workgroup. The expected words follow
//! `// expect:`. Binding 0 receives them; binding 1, if used, holds zeros.

use anyhow::{Context, Result, ensure};
use forebay::backend::{KernelSource, Launch, Slice};
use forebay::device::Device;
use forebay::error::Error;
use forebay::memory::Request;

use super::{skip, tests};

macro_rules! kernels {
    ($($name:ident),* $(,)?) => {
        $(
            fn $name(device: &Device) -> Result<()> {
                let file = concat!("../../wgsl_semantics/", stringify!($name), ".wgsl");
                check(stringify!($name), include_kernel!($name), device).context(file)
            }
        )*
        tests![$($name),*];
        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

macro_rules! include_kernel {
    ($name:ident) => {
        include_str!(concat!("../../wgsl_semantics/", stringify!($name), ".wgsl"))
    };
}

kernels![
    atomic_float,
    atomic_order,
    atomic_wide,
    atomics,
    bit_functions,
    bitcasts,
    builtins,
    control_flow,
    doubles,
    evaluation_order,
    exponentials,
    float_to_int,
    geometry,
    halves,
    halves_stored,
    int_to_float,
    integer_vectors,
    integers,
    layout_array,
    layout_struct,
    layout_values,
    matrices,
    min_max,
    modf_frexp,
    names,
    overrides,
    packing,
    pointers,
    private_globals,
    quantize,
    rounding,
    shadowed_lanes,
    shifts,
    short_integers,
    subgroup_block,
    subgroup_divergent,
    subgroup_reductions,
    subgroup_scans,
    switches,
    vectors,
    wide_integers,
    workgroup_reduction,
    workgroup_transpose,
    workgroup_zero,
];

/// Parses a word of an `expect` line: hexadecimal, an integer, or a float (with a point).
fn word(text: &str) -> Result<u32> {
    if let Some(digits) = text.strip_prefix("0x") {
        return Ok(u32::from_str_radix(digits, 16)?);
    }
    if text.contains('.') {
        return Ok(text.parse::<f32>()?.to_bits());
    }
    Ok(text.parse::<i64>()? as u32)
}

fn expected(wgsl: &str) -> Result<Vec<u32>> {
    let line =
        wgsl.lines().find_map(|line| line.strip_prefix("// expect: ")).context("no `// expect:` line")?;
    line.split_whitespace().map(word).collect()
}

/// Returns a feature that a kernel uses and the device lacks.
fn missing(wgsl: &str, device: &Device) -> Option<&'static str> {
    let features = device.info().features;
    let code: String = wgsl.lines().filter(|line| !line.starts_with("//")).collect();
    [
        ("enable f16", features.f16, "16-bit floats"),
        ("enable wgpu_int16", features.i16, "16-bit integers"),
        ("f64", features.f64, "64-bit floats"),
        ("i64", features.i64, "64-bit integers"),
        ("u64", features.i64, "64-bit integers"),
        ("subgroup", features.subgroups, "subgroups"),
    ]
    .into_iter()
    .find_map(|(word, there, name)| (code.contains(word) && !there).then_some(name))
}

/// Words that a driver computes wrongly: driver, kernel, word, reason. This project's kernels do not need them.
const KNOWN: [(&str, &str, usize, &str); 1] = [(
    "SwiftShader",
    "packing",
    7,
    "signed clamping of a vector gives its upper bound for values inside the bounds",
)];

fn check(name: &str, wgsl: &str, device: &Device) -> Result<()> {
    if let Some(what) = missing(wgsl, device) {
        return skip(format!("the device has no {what}"));
    }
    let expected = expected(wgsl)?;
    let backend = device.backend();
    let source =
        KernelSource { label: name, wgsl, entry_point: "main", overrides: &[], zero_workgroup_memory: true };
    let compiled = backend.compile(&source).and_then(|kernel| backend.wait_compiled(kernel).map(|()| kernel));
    let kernel = match compiled {
        // The contract has no feature for these atomics.
        Err(Error::KernelCompilation { message, .. }) if ["atomic_float", "atomic_wide"].contains(&name) => {
            return skip(format!("the device has no such atomics: {}", message.lines().next().unwrap_or("")));
        }
        other => other?,
    };
    // 64 words, because the tests of array lengths expect this size.
    let bytes = (expected.len() as u64 * 4).next_multiple_of(256);
    let blocks = [device.pool().alloc(Request::new(bytes))?, device.pool().alloc(Request::new(64))?];
    let slices = blocks.map(|b| Slice { segment: b.segment, offset: b.offset, bytes: b.bytes });
    let bindings = if wgsl.contains("@binding(1)") { &slices[..] } else { &slices[..1] };
    let mut got = vec![0; bytes as usize];
    let ran = slices
        .iter()
        .try_for_each(|slice| backend.fill(*slice, 0))
        .and_then(|()| backend.launch(&Launch { kernel, bindings, params: &[], groups: [1, 1, 1] }))
        .and_then(|()| backend.download(slices[0], &mut got));
    blocks.into_iter().for_each(|block| device.pool().free(block));
    ran?;
    for (i, (got, expected)) in got.chunks_exact(4).zip(&expected).enumerate() {
        let got = u32::from_le_bytes([got[0], got[1], got[2], got[3]]);
        if KNOWN.iter().any(|(driver, known, word, _)| {
            device.info().name.contains(driver) && *known == name && *word == i
        }) {
            continue;
        }
        ensure!(got == *expected, "word {i} is {got:#x}, expected {expected:#x}");
    }
    Ok(())
}

#[cfg(test)]
#[test]
fn every_file_is_listed() -> Result<()> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/wgsl_semantics");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let stem = path.file_stem().context("a file without a name")?.to_string_lossy().into_owned();
        expected(&std::fs::read_to_string(&path)?).with_context(|| stem.clone())?;
        found.push(stem);
    }
    found.sort();
    assert_eq!(found, NAMES);
    Ok(())
}

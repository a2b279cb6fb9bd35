//! Tests of the translator: its output, its errors, and that NVRTC compiles the output.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_core::backend::KernelSource;
use forebay_cuda::nvrtc;
use forebay_cuda::translate::{self, TranslateError, TranslatedKernel};

fn translate(
    wgsl: &str,
    entry_point: &str,
    overrides: &[(&str, f64)],
) -> Result<TranslatedKernel, TranslateError> {
    let source = KernelSource { label: "", wgsl, entry_point, overrides, zero_workgroup_memory: true };
    translate::translate(&source)
}

/// The oldest and newest architecture, and each side of the prelude's conditions.
const ARCHITECTURES: [u32; 4] = [75, 80, 90, 120];

/// Reports whether NVRTC is available; prints a line if not, and fails if it is required.
fn require_nvrtc() -> bool {
    let required = std::env::var("FOREBAY_REQUIRE").is_ok_and(|v| v.split(',').any(|w| w.trim() == "nvrtc"));
    if nvrtc::is_available() {
        return true;
    }
    assert!(!required, "FOREBAY_REQUIRE names nvrtc, and NVRTC was not found");
    eprintln!("SKIPPED: NVRTC was not found, so nothing was compiled");
    false
}

fn corpus(folder: &str) -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "wgsl"))
        .flat_map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            for_each_type(&text).into_iter().map(move |text| (path.clone(), text))
        })
        .collect();
    files.sort();
    assert!(!files.is_empty());
    files
}

/// Returns the text, or one copy for each type that its first line names, such as `// FLOAT: f16 f32`.
fn for_each_type(text: &str) -> Vec<String> {
    let Some(types) = text.lines().next().and_then(|line| line.strip_prefix("// FLOAT: ")) else {
        return vec![text.to_string()];
    };
    let with =
        |kind| format!("{}{}", if kind == "f16" { "enable f16;\n" } else { "" }, text.replace("FLOAT", kind));
    types.split_whitespace().map(with).collect()
}

/// Returns the compute entry points of a module.
fn entries(wgsl: &str) -> Vec<String> {
    let module = naga::front::wgsl::parse_str(wgsl).unwrap_or_else(|e| panic!("{}", e.emit_to_string(wgsl)));
    module.entry_points.into_iter().map(|e| e.name).collect()
}

/// Returns the overrides that a file of the corpus sets in lines such as `// override: n = 4`.
fn overrides(wgsl: &str) -> Vec<(&str, f64)> {
    let lines = wgsl.lines().filter_map(|line| line.strip_prefix("// override: "));
    let pairs = lines.filter_map(|line| line.split_once(" = "));
    pairs.map(|(name, value)| (name, value.parse().unwrap())).collect()
}

/// Optimises on one architecture only: failures that are specific to other architectures also occur without
/// optimisation.
fn compile_all(folder: &str, architectures: &[u32], optimised: u32) {
    let compile = require_nvrtc();
    let mut failures = Vec::new();
    for (at, (path, wgsl)) in corpus(folder).into_iter().enumerate() {
        for entry in entries(&wgsl) {
            let kernel = match translate(&wgsl, &entry, &overrides(&wgsl)) {
                Ok(kernel) => kernel,
                Err(error) => {
                    failures.push(format!("{}: {entry}: {error}", path.display()));
                    continue;
                }
            };
            if let Ok(folder) = std::env::var("FOREBAY_DUMP") {
                let file = format!("{}_{at}_{entry}.cu", path.file_stem().unwrap().display());
                fs::write(Path::new(&folder).join(file), &kernel.source).unwrap();
            }
            let first = if kernel.needs_matrix_units { 80 } else { 0 };
            for &arch in architectures.iter().filter(|&&arch| compile && arch >= first) {
                let options: &[&str] = if arch == optimised { &[] } else { &["--Ofast-compile=max"] };
                if let Err(error) = nvrtc::compile_with_options(&kernel.source, &entry, arch, options) {
                    failures.push(format!("{}: {entry}: {error}", path.display()));
                    break;
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn resident_workgroups_bound_registers() {
    let bounds = |declared: &str| {
        let wgsl = format!("{declared}\n@compute @workgroup_size(64) fn main() {{}}");
        let source = translate(&wgsl, "main", &[]).unwrap().source;
        let start = source.find("__launch_bounds__").unwrap();
        source[start..].split_inclusive(')').next().unwrap().to_owned()
    };
    assert_eq!(bounds(""), "__launch_bounds__(64)");
    assert_eq!(bounds("const RESIDENT_WORKGROUPS = 3u;"), "__launch_bounds__(64, 3)");
}

#[test]
fn every_feature_compiles() {
    compile_all("tests/wgsl", &ARCHITECTURES, 90);
}

#[test]
fn every_conformance_kernel_compiles() {
    // One architecture on each side of the prelude's conditions; everything else is the same on all.
    compile_all("../tests/wgsl_semantics", &[75, 80], 80);
}

/// Returns the source after the prelude.
fn source_after_prelude(kernel: &TranslatedKernel) -> &str {
    kernel.source.rsplit_once("namespace wgsl {\n").unwrap().1
}

#[test]
fn a_small_kernel() {
    let wgsl = "
struct Params { n: u32, scale: f32, shape: vec3<u32> }
@group(0) @binding(0) var<storage, read> x: array<vec3<f32>>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;
var<workgroup> partial: array<f32, 64>;

fn weight(i: u32) -> f32 {
    return dot(x[i], vec3(p.scale)) / f32(p.shape.z);
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    partial[lane] = 0.0;
    for (var i = id.x; i < min(p.n, arrayLength(&x)); i += 64u) {
        let w = weight(i);
        if w < 0.0 {
            continue;
        }
        partial[lane] += w * w;
    }
    workgroupBarrier();
    y[id.x] = partial[63u - lane];
}
";
    let kernel = translate(wgsl, "main", &[]).unwrap();
    insta::assert_snapshot!(source_after_prelude(&kernel));
    assert_eq!(kernel, translate(wgsl, "main", &[]).unwrap());
    assert_eq!(kernel.entry, "k_main");
    assert_eq!((kernel.workgroup_size, kernel.dynamic_shared_bytes), ([64, 1, 1], 0));
    assert_eq!((kernel.params_size, kernel.needs_lengths), (32, true));
    assert_eq!(kernel.binding_count, 2);
    let unzeroed =
        KernelSource { label: "", wgsl, entry_point: "main", overrides: &[], zero_workgroup_memory: false };
    let unzeroed = translate::translate(&unzeroed).unwrap();
    assert!(kernel.source.contains("zero(g_partial") && !unzeroed.source.contains("zero(g_partial"));
}

#[test]
fn control_flow_and_values() {
    let wgsl = "
struct Pair { a: u32, b: vec2<i32> }
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> unused: array<u32>;
const TABLE = array(3u, 5u, 7u);
override twice: u32 = 1;
var<private> count: i32 = -1;

fn step(p: ptr<function, Pair>) {
    (*p).a *= TABLE[(*p).a % 3u];
    count = -count / i32((*p).a);
}

@compute @workgroup_size(8)
fn main(@builtin(local_invocation_index) lane: u32) {
    var pair = Pair(lane, vec2(1, i32(lane)));
    loop {
        let old = pair.a + twice;
        switch old % 4u {
            case 0u, 2u: { continue; }
            case 1u: { step(&pair); }
            default: { break; }
        }
        pair.b.y <<= 2u;
        continuing {
            pair.a = old;
            break if old > 20u;
        }
    }
    if lane < 4u {
        out[lane] = subgroupAdd(pair.a) + u32(pair.b.yx[1]) + u32(f32(count) * 1.5);
    }
}
";
    let kernel = translate(wgsl, "main", &[("twice", 2.0)]).unwrap();
    insta::assert_snapshot!(source_after_prelude(&kernel));
    assert_eq!((kernel.binding_count, kernel.needs_lengths, kernel.needs_matrix_units), (2, false, false));
}

#[test]
fn large_workgroup_memory_is_dynamic() {
    let of = |n: u32| {
        let wgsl = format!(
            "var<workgroup> few: array<u32, 4>; var<workgroup> row: array<vec4<f32>, {n}>;
             @compute @workgroup_size(4) fn main(@builtin(local_invocation_index) i: u32) {{ row[i] = vec4<f32>(); few[i] = i; }}"
        );
        translate(&wgsl, "main", &[]).unwrap()
    };
    let few = of(3000);
    assert_eq!(few.dynamic_shared_bytes, 0);
    assert!(few.source.contains("static __shared__") && !few.source.contains("extern __shared__"));
    let many = of(6000);
    assert_eq!(many.dynamic_shared_bytes, 16 + 96_000);
    assert!(many.source.contains("extern __shared__") && many.source.contains("(dynamic_memory + 16)"));
    // Macros end with the kernel.
    assert_eq!(many.source.matches("#define g_").count(), many.source.matches("#undef g_").count());
}

#[test]
fn errors_name_what_is_unsupported() {
    let refuse = |wgsl: &str, overrides: &[(&str, f64)]| translate(wgsl, "main", overrides).unwrap_err();
    let main = |body: &str| format!("@compute @workgroup_size(1) fn main() {{ {body} }}");
    let with = |globals: &str, body: &str| format!("{globals} {}", main(body));
    let mut messages = vec![
        refuse("@compute fn", &[]),
        refuse("@compute @workgroup_size(1) fn other() {} @fragment fn main() {}", &[]),
        refuse(&main("let x: u32 = 1.5;"), &[]),
        refuse(&main("var x = 1; x = select(x, 2, subgroupAny(true)) + unknown;"), &[]),
        refuse(&with("override n: u32;", "var x = n;"), &[]),
        refuse(&main(""), &[("n", 1.0)]),
        refuse(&with("override n: u32;", "var x = n;"), &[("n", -1.0)]),
        refuse(&with("var<workgroup> big: array<f32, 60000>;", "big[0] = 1.0;"), &[]),
        refuse(&with("@group(0) @binding(0) var t: texture_2d<f32>;", "let x = textureDimensions(t);"), &[]),
        refuse(&with("@group(0) @binding(0) var<uniform> u: vec4<f32>;", "let x = u.x; var y = x;"), &[]),
        refuse(&with("@group(2) @binding(1) var<storage> s: array<f32>;", "let x = s[0]; var y = x;"), &[]),
        refuse(&with("var<immediate> i: u32;", "var x = i;"), &[]),
    ];
    messages.push(refuse(
        &with(
            "enable f16; enable wgpu_cooperative_matrix;
             @group(0) @binding(0) var<storage, read_write> a: array<f32>;",
            "let m = coopLoad<coop_mat8x8<f32, A>>(&a[0], 8); coopStore(m, &a[64], 8);",
        ),
        &[],
    ));
    assert!(matches!(messages[7], TranslateError::WorkgroupMemory { bytes: 240_000, .. }));
    messages.push(translate("@compute @workgroup_size(64, 32) fn main() {}", "main", &[]).unwrap_err());
    let messages: Vec<_> = messages.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(messages.join("\n---\n"));
}

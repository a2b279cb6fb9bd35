//! Compiles every kernel that the catalog and the golden calls need, without a GPU.
//!
//! Operations run on null devices with all optional types and with none, which record the kernels they are asked to
//! compile. Each kernel is validated by naga with the types of its device, translated to CUDA C++, and compiled by
//! NVRTC. Kernels with equal preludes are compiled in one program, each in its own namespace, because the prelude
//! dominates compilation time.

mod collect;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Result, bail};
use forebay::backend::null::{CardProfile, NullKernel};
use forebay::backend::{BatchedMatmulTiling, Features, KernelSource, RecurrentKind, RecurrentTiling};
use forebay::dtype::DType;
use forebay_cuda::NativeKernel;
use forebay_cuda::attention::{self, AttentionPass, MaskKind};
use forebay_cuda::attention_f32::{AttentionF32Kernel, AttentionF32Pass};
use forebay_cuda::batched_matmul::BatchedMatmulKernel;
use forebay_cuda::convolution::{ConvKernel, ConvPass};
use forebay_cuda::gelu_grad;
use forebay_cuda::nvrtc;
use forebay_cuda::recurrent::RecurrentKernel;
use forebay_cuda::sgemm_small::{self, CONFIGS, SgemmConfig, SgemmEpilogue};
use forebay_cuda::translate::{TranslatedKernel, translate};
use naga::valid::{Capabilities, ValidationFlags, Validator};

use self::collect::collect_matrix_kernels;
pub(crate) use self::collect::{collect_kernels, collect_kernels_on};
use crate::sass;

/// Compute capabilities from Turing to Blackwell.
pub const ARCHITECTURES: [u32; 7] = [75, 80, 86, 89, 90, 100, 120];

/// Number of kernels in one NVRTC program.
const KERNELS_PER_PROGRAM: usize = 64;

/// Results of all compilations.
#[derive(Clone, Debug, Default)]
pub struct KernelReport {
    /// Number of kernels.
    pub kernels: usize,
    /// Number of kernels compiled for each architecture; empty without NVRTC.
    pub compiled: BTreeMap<u32, usize>,
    /// Error messages by kernel.
    pub failures: BTreeMap<String, String>,
}

impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (label, why) in &self.failures {
            writeln!(f, "FAILED {label}: {why}")?;
        }
        for (arch, count) in &self.compiled {
            writeln!(f, "sm_{arch}: {count} kernels compiled")?;
        }
        write!(f, "kernels: {} passed, {} failed", self.kernels - self.failures.len(), self.failures.len())?;
        if self.compiled.is_empty() {
            write!(f, " (validated and translated; NVRTC was not found)")
        } else {
            Ok(())
        }
    }
}

const UNOPTIMISED: &[&str] = &["--Ofast-compile=max"];

/// Architectures and thoroughness of the compilation.
struct CompileOptions<'a> {
    architectures: &'a [u32],
    /// If true, compiles with optimisation on one architecture, and each kernel for all of them.
    is_full: bool,
}

impl CompileOptions<'_> {
    /// Returns how many of the kernels with this prelude are compiled for `arch`. In quick mode, the first
    /// architecture gets all of them. The others get the kernels of one program, if the prelude has code for some
    /// architectures only.
    fn count_kernels(&self, prelude: &str, kernels: usize, arch: u32) -> usize {
        // The prelude of programmatic dependent launch is equal for all kernels, so its checks do not count.
        let own = prelude.replacen(forebay_shaders::cuda::PDL, "", 1);
        if self.is_full || self.architectures.first() == Some(&arch) {
            kernels
        } else if own.contains("__CUDA_ARCH__") {
            kernels.min(KERNELS_PER_PROGRAM)
        } else {
            0
        }
    }

    /// Optimises for one architecture only: errors of the others also show without optimisation.
    fn nvrtc_flags(&self, arch: u32) -> &'static [&'static str] {
        if arch == sass::SASS_ARCH { &[] } else { UNOPTIMISED }
    }
}

/// Checks all kernels. Without `architectures`, compiles for all of [`ARCHITECTURES`], with optimisation for one of
/// them. With `architectures`, compiles quickly for these: without optimisation, and kernels without architecture
/// checks for the first one only. `filters` selects kernels whose label (template and parameters) contains one of
/// them. `golden` is the folder of the golden calls.
pub fn check(golden: &Path, architectures: &[u32], filters: &[String]) -> Result<KernelReport> {
    if let Some(other) = architectures.iter().find(|arch| !ARCHITECTURES.contains(arch)) {
        bail!("--architectures names sm_{other}: expected some of {ARCHITECTURES:?}");
    }
    let compiling = match architectures {
        [] => CompileOptions { architectures: &ARCHITECTURES, is_full: true },
        architectures => CompileOptions { architectures, is_full: false },
    };
    let required = std::env::var("FOREBAY_REQUIRE").is_ok_and(|v| v.split(',').any(|w| w.trim() == "nvrtc"));
    let there = nvrtc::is_available();
    if required && !there {
        bail!("FOREBAY_REQUIRE names nvrtc, and NVRTC was not found");
    }
    let start = Instant::now();
    let mut report = KernelReport::default();
    let mut translated = Vec::new();
    let mut seen = BTreeSet::new();
    let everything = CardProfile::default().features;
    // Reading f16 from bits is no optional feature: every driver that wgpu reports as conformant has it.
    let bare = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    let devices = [(everything, false, Capabilities::all()), (Features::default(), true, bare)];
    let sources =
        devices.map(|(features, software, allowed)| (collect_kernels(features, software, golden), allowed));
    let with_units = (collect_matrix_kernels(), Capabilities::all());
    for (kernels, allowed) in sources.into_iter().chain([with_units]) {
        for kernel in kernels? {
            if !filters.is_empty() && !filters.iter().any(|f| kernel.label.contains(f.as_str())) {
                continue;
            }
            if !seen.insert((kernel.wgsl.clone(), allowed.bits())) {
                continue;
            }
            let label = format!("{} #{}", kernel.label, seen.len());
            match validate_and_translate(&kernel, allowed) {
                Ok(cuda) => translated.push((label, cuda)),
                Err(why) => {
                    report.failures.insert(label, why);
                }
            }
        }
    }
    report.kernels = translated.len() + report.failures.len();
    // A kernel of both devices is compiled once.
    let mut sources = BTreeSet::new();
    translated.retain(|(_, cuda)| sources.insert(kernel_body(&cuda.source).to_owned()));
    println!("{} kernels translated in {:.0} s", report.kernels, start.elapsed().as_secs_f64());
    if there {
        compile_translated(&translated, &compiling, &mut report);
        compile_attention(compiling.architectures, filters, &mut report);
        compile_attention_f32(compiling.architectures, filters, &mut report);
        compile_sgemm_small(compiling.architectures, filters, &mut report);
        compile_batched_matmul(compiling.architectures, filters, &mut report);
        compile_gelu_grad(compiling.architectures, filters, &mut report);
        compile_convolution(compiling.architectures, filters, &mut report);
        compile_recurrent(compiling.architectures, filters, &mut report);
    }
    Ok(report)
}

/// Calls `f` with the source of a recorded kernel.
pub(crate) fn with_source<T>(kernel: &NullKernel, f: impl FnOnce(&KernelSource<'_>) -> T) -> T {
    let overrides: Vec<(&str, f64)> = kernel.overrides.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    f(&KernelSource {
        label: &kernel.label,
        wgsl: &kernel.wgsl,
        entry_point: &kernel.entry_point,
        overrides: &overrides,
        zero_workgroup_memory: kernel.zero_workgroup_memory,
    })
}

/// Validates a kernel and writes it as CUDA C++.
fn validate_and_translate(kernel: &NullKernel, allowed: Capabilities) -> Result<TranslatedKernel, String> {
    let module = naga::front::wgsl::parse_str(&kernel.wgsl).map_err(|e| e.emit_to_string(&kernel.wgsl))?;
    Validator::new(ValidationFlags::all(), allowed)
        .validate(&module)
        .map_err(|e| e.emit_to_string(&kernel.wgsl))?;
    with_source(kernel, translate).map_err(|e| e.to_string())
}

/// Separator between a translation's prelude and its body.
const BODY_MARKER: &str = "namespace wgsl {\n";

fn kernel_body(source: &str) -> &str {
    source.rsplit_once(BODY_MARKER).map_or(source, |(_, own)| own)
}

/// Returns the prelude, without the line that names the kernel.
fn kernel_prelude(source: &str) -> &str {
    let prelude = source.rsplit_once(BODY_MARKER).map_or("", |(prelude, _)| prelude);
    prelude.split_once('\n').map_or(prelude, |(_, rest)| rest)
}

/// Concatenates several kernels with equal preludes.
fn concat_sources(kernels: &[&(String, TranslatedKernel)]) -> String {
    let mut source = kernels.first().map_or(String::new(), |(_, k)| kernel_prelude(&k.source).to_owned());
    for (i, (_, kernel)) in kernels.iter().enumerate() {
        let own = kernel_body(&kernel.source)
            .replace(&format!(" {}(", kernel.entry), &format!(" {}_{i}(", kernel.entry));
        source.push_str(&format!("namespace wgsl {{ namespace kernel{i} {{\n{own}}}\n"));
    }
    source
}

/// Compiles a translated source. Optimised code of the known architecture is also disassembled, because only optimised
/// kernels have inlined all functions. In quick mode no machine code is made.
fn compile_and_check(
    source: &str,
    label: &str,
    arch: u32,
    compiling: &CompileOptions<'_>,
) -> Result<(), String> {
    if !compiling.is_full {
        return nvrtc::check(source, label, arch, UNOPTIMISED).map_err(|error| error.to_string());
    }
    compile_and_disassemble(source, label, arch, compiling.nvrtc_flags(arch))
}

fn compile_and_disassemble(source: &str, label: &str, arch: u32, options: &[&str]) -> Result<(), String> {
    let cubin =
        nvrtc::compile_with_options(source, label, arch, options).map_err(|error| error.to_string())?;
    if arch == sass::SASS_ARCH && !options.ends_with(UNOPTIMISED) {
        sass::count_waiting_kernels(&cubin).map(drop)
    } else {
        Ok(())
    }
}

/// Compiles one variant of a kernel that is written in CUDA C++, with optimisation if its code is disassembled.
fn compile_native(kernel: &impl NativeKernel, label: &str, arch: u32, report: &mut KernelReport) {
    let mut flags = kernel.options().to_vec();
    if arch != sass::SASS_ARCH {
        flags.extend(UNOPTIMISED);
    }
    match compile_and_disassemble(&kernel.source(), label, arch, &flags) {
        Ok(()) => *report.compiled.entry(arch).or_default() += 1,
        Err(error) => {
            report.failures.insert(label.to_owned(), error);
        }
    }
}

/// Compiles the CUDA C++ attention kernels for every architecture that supports them.
fn compile_attention(architectures: &[u32], filters: &[String], report: &mut KernelReport) {
    let plain = (MaskKind::None, false);
    let forms = [
        (64, DType::BF16, plain),
        (128, DType::BF16, plain),
        (128, DType::F16, plain),
        (40, DType::F16, plain),
        (64, DType::BF16, (MaskKind::None, true)),
        (64, DType::F16, (MaskKind::Bool, false)),
        (96, DType::F16, (MaskKind::SameAsInput, true)),
        (128, DType::BF16, (MaskKind::F32, true)),
        (64, DType::BF16, (MaskKind::F32, false)),
        (64, DType::F16, (MaskKind::SameAsInput, false)),
    ];
    for dtype in [DType::BF16, DType::F16] {
        for pass in AttentionPass::ONE_PASS_BACKWARD {
            let label = format!("attention_bwd_one_pass.cu {pass:?} {dtype}");
            if !filters.is_empty() && !filters.iter().any(|f| label.contains(f.as_str())) {
                continue;
            }
            report.kernels += 1;
            for &arch in architectures {
                let kernel = attention::AttentionKernel::new(pass, 64, dtype, arch);
                if let Some(kernel) = kernel {
                    compile_native(&kernel, &label, arch, report);
                }
            }
        }
    }
    for (head, dtype, (mask, drop)) in forms {
        for pass in
            [AttentionPass::Forward, AttentionPass::BackwardQueries, AttentionPass::BackwardKeysValues]
        {
            let label = format!("attention_common.cuh {pass:?} {dtype} {head} mask {mask:?} drop {drop}");
            if !filters.is_empty() && !filters.iter().any(|f| label.contains(f.as_str())) {
                continue;
            }
            report.kernels += 1;
            for &arch in architectures {
                let Some(kernel) = attention::AttentionKernel::new(pass, head, dtype, arch) else { continue };
                let kernel = attention::AttentionKernel { mask, has_dropout: drop, ..kernel };
                // sm_90 has two variants, and masks in pairs or tiles are loaded by other code.
                let plain = attention::AttentionKernel { uses_wgmma: false, ..kernel };
                let pairs = attention::AttentionKernel { loads_mask_pairs: true, ..kernel };
                let tiles = attention::AttentionKernel { loads_mask_tiles: true, ..kernel };
                let variants = [
                    Some(kernel),
                    kernel.uses_wgmma.then_some(plain),
                    (mask != MaskKind::None).then_some(pairs),
                    (kernel.uses_wgmma && matches!(mask, MaskKind::F32 | MaskKind::SameAsInput))
                        .then_some(tiles),
                ];
                for kernel in variants.into_iter().flatten() {
                    compile_native(&kernel, &label, arch, report);
                }
            }
        }
    }
}

/// Compiles the CUDA C++ kernels of f32 attention's gradients: each size of tiles, with and without padding.
fn compile_attention_f32(architectures: &[u32], filters: &[String], report: &mut KernelReport) {
    for head in [12, 32, 48, 64, 96, 128] {
        for pass in [AttentionF32Pass::Delta, AttentionF32Pass::Gradients] {
            let label = format!("attention_f32_bwd.cu {pass:?} {head}");
            if !filters.is_empty() && !filters.iter().any(|f| label.contains(f.as_str())) {
                continue;
            }
            report.kernels += 1;
            for &arch in architectures {
                if let Some(kernel) = AttentionF32Kernel::new(pass, head, arch) {
                    compile_native(&kernel, &label, arch, report);
                }
            }
        }
    }
}

/// Compiles the CUDA C++ kernel of small matrix products, for architectures with clusters.
fn compile_sgemm_small(architectures: &[u32], filters: &[String], report: &mut KernelReport) {
    let layouts = [[false, false], [false, true], [true, false], [true, true]];
    let configs = CONFIGS.iter().filter(|config| matches!(config.cluster_blocks, 1 | 8));
    for (&SgemmConfig { tile, cluster_blocks, .. }, mn_major) in
        configs.flat_map(|config| layouts.map(|mn_major| (config, mn_major)))
    {
        let epilogue = if mn_major[0] { SgemmEpilogue::RowSums } else { SgemmEpilogue::Bias };
        let kernel = sgemm_small::SgemmKernel { tile, cluster_blocks, mn_major, epilogue };
        let label = format!("sgemm_small.cu {kernel:?}");
        if !filters.is_empty() && !filters.iter().any(|f| label.contains(f.as_str())) {
            continue;
        }
        report.kernels += 1;
        for &arch in architectures.iter().filter(|&&arch| arch >= 90) {
            compile_native(&kernel, &label, arch, report);
        }
    }
}

/// Compiles the CUDA C++ kernel of batches of small products, for architectures with bf16 on tensor cores: each tile,
/// with all layouts, types, sums and numbers of stages between them.
fn compile_batched_matmul(architectures: &[u32], filters: &[String], report: &mut KernelReport) {
    for (index, tile) in (0_u32..).zip(BatchedMatmulTiling::ALL) {
        for variant in 0..4 {
            let shortest = 16 * tile.warps[2];
            let kernel = BatchedMatmulKernel {
                is_bf16: variant % 2 == 0,
                writes_f32: variant / 2 != index % 2,
                mn_major: [variant % 2 == 1, variant / 2 == 1],
                has_sums: variant % 3 == 0,
                tiling: BatchedMatmulTiling {
                    depth: if variant == 1 { shortest } else { tile.depth },
                    stages: if variant % 3 == 0 { tile.stages } else { variant },
                    ..tile
                },
            };
            let label = format!("batched_matmul.cu {kernel:?}");
            if !filters.is_empty() && !filters.iter().any(|f| label.contains(f.as_str())) {
                continue;
            }
            report.kernels += 1;
            for &arch in architectures.iter().filter(|&&arch| arch >= 80) {
                compile_native(&kernel, &label, arch, report);
            }
        }
    }
}

/// Compiles the CUDA C++ kernel of GELU's gradient, for the architecture that supports it.
fn compile_gelu_grad(architectures: &[u32], filters: &[String], report: &mut KernelReport) {
    for bf16 in [false, true] {
        let kernel = gelu_grad::GeluGradKernel { is_bf16: bf16 };
        let label = format!("gelu_grad.cu {kernel:?}");
        if !filters.is_empty() && !filters.iter().any(|f| label.contains(f.as_str())) {
            continue;
        }
        report.kernels += 1;
        for &arch in architectures.iter().filter(|&&arch| arch == 90) {
            compile_native(&kernel, &label, arch, report);
        }
    }
}

/// Compiles the CUDA C++ kernels of convolutions, for the architecture that supports them.
fn compile_convolution(architectures: &[u32], filters: &[String], report: &mut KernelReport) {
    let tiles = [
        (128, 64, 64),
        (128, 32, 64),
        (128, 16, 64),
        (128, 64, 32),
        (128, 32, 16),
        (64, 64, 64),
        (64, 16, 16),
    ];
    for (pass, (rows, width, depth)) in
        [ConvPass::Output, ConvPass::WeightGrad].iter().flat_map(|pass| tiles.map(|tile| (*pass, tile)))
    {
        for bf16 in [false, true] {
            let kernel = ConvKernel { pass, bf16, rows, width, depth };
            let label = format!("conv.cu {kernel:?}");
            if !filters.is_empty() && !filters.iter().any(|f| label.contains(f.as_str())) {
                continue;
            }
            report.kernels += 1;
            for &arch in architectures.iter().filter(|&&arch| arch == 90) {
                compile_native(&kernel, &label, arch, report);
            }
        }
    }
}

/// Compiles the CUDA C++ kernel of recurrent layers, for architectures with large clusters.
fn compile_recurrent(architectures: &[u32], filters: &[String], report: &mut KernelReport) {
    use RecurrentKind::{Gru, Lstm, Relu, Tanh};
    let layers = [
        (Gru, 512, 32),
        (Gru, 512, 100),
        (Gru, 512, 512),
        (Gru, 650, 20),
        (Lstm, 512, 32),
        (Lstm, 650, 20),
        (Lstm, 650, 512),
        (Lstm, 7, 3),
        (Lstm, 128, 32),
        (Tanh, 1024, 32),
        (Relu, 33, 1),
    ];
    for ((kind, hidden, batch), is_backward) in layers.into_iter().flat_map(|l| [(l, false), (l, true)]) {
        // The buffers of large batches leave the transposed weight too little memory.
        let Some(tiling) = RecurrentTiling::new(kind, is_backward, hidden, batch) else { continue };
        let loads_pairs = !is_backward && hidden.is_multiple_of(2);
        let kernel = RecurrentKernel { kind, is_backward, is_bf16: batch != 3, loads_pairs, tiling };
        let label = format!("recurrent.cu {kernel:?}");
        if !filters.is_empty() && !filters.iter().any(|f| label.contains(f.as_str())) {
            continue;
        }
        report.kernels += 1;
        for &arch in architectures.iter().filter(|&&arch| matches!(arch, 90 | 100)) {
            compile_native(&kernel, &label, arch, report);
        }
    }
}

fn compile_translated(
    translated: &[(String, TranslatedKernel)],
    compiling: &CompileOptions<'_>,
    report: &mut KernelReport,
) {
    let mut by_prelude: BTreeMap<&str, Vec<&(String, TranslatedKernel)>> = BTreeMap::new();
    for kernel in translated {
        by_prelude.entry(kernel_prelude(&kernel.1.source)).or_default().push(kernel);
    }
    let mut jobs: Vec<(u32, Vec<&(String, TranslatedKernel)>)> = Vec::new();
    for &arch in compiling.architectures {
        for (prelude, kernels) in &by_prelude {
            let kernels = &kernels[..compiling.count_kernels(prelude, kernels.len(), arch)];
            // Kernels with one prelude use the same features.
            let needs_matrix_units = kernels.iter().any(|(_, kernel)| kernel.needs_matrix_units);
            if needs_matrix_units && arch < 80 {
                continue;
            }
            jobs.extend(kernels.chunks(KERNELS_PER_PROGRAM).map(|batch| (arch, batch.to_vec())));
        }
    }
    let next = AtomicUsize::new(0);
    let shared = Mutex::new(report);
    let work = || {
        while let Some((arch, batch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let arch = *arch;
            let mut failures = Vec::new();
            if compile_and_check(&concat_sources(batch), "batch", arch, compiling).is_err() {
                // One by one, to find the kernels that fail.
                for (label, kernel) in batch {
                    if let Err(error) = compile_and_check(&kernel.source, &kernel.entry, arch, compiling) {
                        failures.push((label.clone(), error));
                    }
                }
                if failures.is_empty() {
                    let error = "it compiles alone, but not with others of its prelude".to_owned();
                    failures.push((batch[0].0.clone(), error));
                }
            }
            let mut report = shared.lock().unwrap_or_else(PoisonError::into_inner);
            *report.compiled.entry(arch).or_default() += batch.len() - failures.len();
            report.failures.extend(failures);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
}

//! Compiles every kernel that the catalog and the golden calls need, without a GPU.
//!
//! Operations run on null devices with all optional types and with none, which record the kernels they are asked to
//! compile. Each kernel is validated by naga with the types of its device, translated to CUDA C++, and compiled by
//! NVRTC. Kernels with equal preludes are compiled in one program, each in its own namespace, because the prelude
//! dominates compilation time.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Result, bail};
use forebay::amp::{autocast, fp8};
use forebay::backend::null::{CardProfile, NullBackend, NullKernel};
use forebay::backend::{Backend, Features, KernelSource, RecurrentKind, RecurrentTiling};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::memory::Config;
use forebay::ops::{
    AttentionOptions, BatchNormOptions, ConvolutionOptions, CrossEntropyOptions, NormOptions,
};
use forebay::optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Asgd, ClipGradNormOptions, GradScaler, Lamb, Lion,
    NAdam, Optimizer, RAdam, RmsProp, Rprop, Sgd, clip_grad_norm_with, clip_grad_value_,
};
use forebay::tensor::Tensor;
use forebay_cuda::NativeKernel;
use forebay_cuda::attention::{self, AttentionPass, MaskKind};
use forebay_cuda::convolution::{ConvKernel, ConvPass};
use forebay_cuda::gelu_grad;
use forebay_cuda::nvrtc;
use forebay_cuda::recurrent::RecurrentKernel;
use forebay_cuda::sgemm_small::{self, CONFIGS, SgemmConfig, SgemmEpilogue};
use forebay_cuda::translate::{TranslateOptions, TranslatedKernel, translate_with_options};
use naga::valid::{Capabilities, ValidationFlags, Validator};

use crate::catalog;
use crate::golden::{CallConfig, GoldenSet};
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
    /// Reports whether kernels with this prelude are compiled for `arch`. In quick mode, kernels without architecture
    /// checks are compiled for the first one only.
    fn should_compile(&self, prelude: &str, arch: u32) -> bool {
        // The prelude of programmatic dependent launch is equal for all kernels, so its checks do not count.
        let own = prelude.replacen(forebay_shaders::cuda::PDL, "", 1);
        self.is_full || self.architectures.first() == Some(&arch) || own.contains("__CUDA_ARCH__")
    }

    /// Optimises for one architecture only: errors of the others also show without optimisation.
    fn nvrtc_flags(&self, arch: u32) -> &'static [&'static str] {
        if self.is_full && arch == 90 { &[] } else { UNOPTIMISED }
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
        compile_sgemm_small(compiling.architectures, filters, &mut report);
        compile_gelu_grad(compiling.architectures, filters, &mut report);
        compile_convolution(compiling.architectures, filters, &mut report);
        compile_recurrent(compiling.architectures, filters, &mut report);
    }
    Ok(report)
}

/// Returns the kernels that a null device with these features is asked to compile; `software` ones choose other tiles.
pub(crate) fn collect_kernels(features: Features, software: bool, golden: &Path) -> Result<Vec<NullKernel>> {
    let profile = CardProfile { features, is_software: software, ..CardProfile::default() };
    collect_kernels_on(profile, golden)
}

/// Returns the kernels that a null device with this profile is asked to compile.
pub(crate) fn collect_kernels_on(profile: CardProfile, golden: &Path) -> Result<Vec<NullKernel>> {
    let backend = Arc::new(NullBackend::new(profile));
    let device = Device::with_config(backend.clone() as Arc<dyn Backend>, Config::default());
    let types: Vec<DType> = DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)).collect();
    for &dtype in &types {
        for case in catalog::cases().filter(|_| dtype.is_float()) {
            // Unsupported types are rejected before any compilation.
            let _ = exercise_case(case, dtype, &device);
        }
        for &to in &types {
            let x = Tensor::zeros([8, 4], dtype, &device)?;
            drop((x.to_dtype(to), x.t()?.to_dtype(to)));
            let y = Tensor::zeros([8, 4], to, &device)?;
            drop((x.add(&y), x.lt(&y)));
        }
        let x = Tensor::zeros([9, 9], dtype, &device)?;
        drop((x.t()?.copy(), x.copy_(&x.t()?)));
        drop((x.add_(&x.t()?), x.sub_(1), x.mul_(&x), x.div_(2)));
        drop((Tensor::rand([9], dtype, &device), Tensor::randn([9], dtype, &device)));
        drop((Tensor::randint(0, 9, [9], dtype, &device), Tensor::bernoulli([9], 0.5, dtype, &device)));
        drop((x.dropout(0.5, true), x.narrow(0, 0, 8)?.dropout(0.5, true)));
        // Tiles of permuted operands.
        let x = Tensor::zeros([16, 16], dtype, &device)?;
        drop((x.add(&x.t()?), x.t()?.lt(&x), x.t()?.exp()));
    }
    exercise_storage_dtypes(&device, &types)?;
    exercise_fused_chains(&device)?;
    exercise_im2col(&device)?;
    exercise_depthwise(&device)?;
    exercise_linear_cross_entropy(&device)?;
    exercise_split_rows(&device)?;
    exercise_sorted_scatters(&device, &types)?;
    exercise_selections(&device, &types);
    exercise_extremes(&device, &types)?;
    exercise_norms(&device)?;
    exercise_fp8_linear(&device)?;
    exercise_optimizers(&device)?;
    GoldenSet::load(golden)?.run(&CallConfig { device: &device, dtype: None }, &[])?;
    Ok(backend.compiled_kernels())
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

/// Returns the kernels of a device whose matrix units multiply 16-bit types.
fn collect_matrix_kernels() -> Result<Vec<NullKernel>> {
    let features = Features {
        cooperative_f16: true,
        cooperative_bf16: true,
        cooperative_side: 16,
        ..CardProfile::default().features
    };
    let backend = Arc::new(NullBackend::new(CardProfile { features, ..CardProfile::default() }));
    let device = Device::with_config(backend.clone() as Arc<dyn Backend>, Config::default());
    for dtype in [DType::F16, DType::BF16] {
        // Whole tiles, tiles with edges, and rows that are not whole vectors; each operand in both orders.
        for [m, n, k] in [[512, 512, 512], [200, 136, 72], [130, 67, 45]] {
            let a = [Tensor::zeros([m, k], dtype, &device)?, Tensor::zeros([k, m], dtype, &device)?.t()?];
            let b = [Tensor::zeros([k, n], dtype, &device)?, Tensor::zeros([n, k], dtype, &device)?.t()?];
            for (a, b) in a.iter().flat_map(|a| b.iter().map(move |b| (a, b))) {
                a.matmul(b)?;
            }
            let weight = Tensor::zeros([n, k], dtype, &device)?;
            let bias = Tensor::zeros([n], dtype, &device)?;
            a[0].linear(&weight, Some(&bias))?;
            // GELU with its argument, without it, and two gradients that accumulate.
            let down = [weight.t()?.contiguous()?, Tensor::zeros([k], dtype, &device)?];
            a[0].mlp(&weight, &bias, &down[0], &down[1])?;
            let up = weight.to_leaf()?;
            for _ in 0..2 {
                a[0].mlp(&up, &bias, &down[0], &down[1])?.sum([0isize; 0], false)?.backward()?;
            }
        }
        device.set_im2col_max_bytes(Some(0));
        let x = Tensor::zeros([4, 64, 32, 32], dtype, &device)?.to_leaf()?;
        let w = Tensor::zeros([64, 64, 3, 3], dtype, &device)?.to_leaf()?;
        x.conv2d(&w, None, &ConvolutionOptions { padding: 1.into(), ..Default::default() })?
            .sum([0isize; 0], false)?
            .backward()?;
        for (head, is_causal, dropout_p) in [(64, true, 0.0), (128, false, 0.0), (64, false, 0.1)] {
            let [q, k, v] = [(); 3].map(|()| Tensor::zeros([2, 4, 200, head], dtype, &device));
            let (q, k, v) = (q?.to_leaf()?, k?.to_leaf()?, v?.to_leaf()?);
            let options = AttentionOptions { is_causal, dropout_p, ..Default::default() };
            q.scaled_dot_product_attention(&k, &v, &options)?.sum([0isize; 0], false)?.backward()?;
        }
    }
    Ok(backend.compiled_kernels())
}

/// Casts and copies of storage-only types, and their scaled matrix products.
fn exercise_storage_dtypes(device: &Device, types: &[DType]) -> Result<()> {
    for dtype in DType::STORAGE_ONLY {
        let x = Tensor::zeros([8, 4], dtype, device)?;
        for &other in types.iter().chain(&DType::STORAGE_ONLY) {
            let y = Tensor::zeros([8, 4], other, device)?;
            drop((x.to_dtype(other)?, x.t()?.to_dtype(other)?, y.to_dtype(dtype)?, y.t()?.to_dtype(dtype)?));
        }
        x.t()?.copy()?.narrow(1, 1, 3)?.copy_(&x.t()?.narrow(1, 0, 3)?)?;
        let one = Tensor::ones((), DType::F32, device)?;
        x.scaled_mm(&x.t()?, &one, &one, None, DType::BF16)?;
    }
    Ok(())
}

/// Fused elementwise chains: vectorised and scalar, in each type, with an intermediate result that is kept.
fn exercise_fused_chains(device: &Device) -> Result<()> {
    device.set_fusion_min_bytes(Some(0));
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for columns in [8, 3] {
            let x = Tensor::zeros([4, columns], dtype, device)?;
            let row = Tensor::zeros([columns], DType::F32, device)?;
            drop(x.mul(&x)?.add(&x)?.gelu()?);
            let kept = x.mul(0.5)?;
            kept.to_dtype(DType::F32)?.add(&row)?.tanh()?.to_dtype(dtype)?;
        }
    }
    device.set_fusion_min_bytes(None);
    Ok(())
}

/// Convolutions by im2col in one, two and three dimensions, and their col2im.
fn exercise_im2col(device: &Device) -> Result<()> {
    device.set_im2col_max_bytes(Some(1 << 28));
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for shape in [&[1, 4, 5, 5][..], &[1, 4, 5, 5, 5], &[1, 4, 1 << 20]] {
            let of = |shape: &[usize]| Tensor::zeros(shape, dtype, device)?.to_leaf();
            let (x, w) = (of(shape)?, of(&[&[4, 4][..], &vec![3; shape.len() - 2]].concat())?);
            let y = match shape.len() {
                3 => x.conv1d(
                    &w,
                    None,
                    &ConvolutionOptions { stride: [2; 1], padding: 1.into(), ..Default::default() },
                ),
                4 => x.conv2d(
                    &w,
                    None,
                    &ConvolutionOptions { stride: [2; 2], padding: 1.into(), ..Default::default() },
                ),
                _ => x.conv3d(
                    &w,
                    None,
                    &ConvolutionOptions { stride: [2; 3], padding: 1.into(), ..Default::default() },
                ),
            }?;
            y.backward_with(&y.ones_like()?)?;
        }
    }
    device.set_im2col_max_bytes(None);
    Ok(())
}

/// Convolutions with a filter for each channel, of strides 1 and 2.
fn exercise_depthwise(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (side, stride) in [(8, 1), (7, 1), (8, 2)] {
            let x = Tensor::zeros([2, 4, side, side], dtype, device)?.to_leaf()?;
            let w = Tensor::zeros([4, 1, 7, 7], dtype, device)?.to_leaf()?;
            let options = ConvolutionOptions {
                stride: [stride; 2],
                padding: 3.into(),
                groups: 4,
                ..Default::default()
            };
            let y = x.conv2d(&w, None, &options)?;
            y.backward_with(&y.ones_like()?)?;
        }
    }
    Ok(())
}

/// Fused linear cross-entropy with rows in static shared memory, in dynamic shared memory, and with padding.
fn exercise_linear_cross_entropy(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for classes in [4096, 25_001, 50_304] {
            let [x, weight] = [2, classes].map(|n| Tensor::zeros([n, 8], dtype, device)?.to_leaf());
            let target = Tensor::zeros([2], DType::I32, device)?;
            x?.linear_cross_entropy(&weight?, &target, &CrossEntropyOptions::default())?.backward()?;
        }
    }
    Ok(())
}

/// Reductions whose rows are split among workgroups.
fn exercise_split_rows(device: &Device) -> Result<()> {
    let n = 1 << 17;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let row = || Tensor::zeros([1, n], dtype, device)?.to_leaf();
        let of = |y: Tensor| y.backward_with(&y.ones_like()?);
        of(row()?.softmax(1)?)?;
        of(row()?.log_softmax(1)?)?;
        of(row()?.layer_norm([n], &Default::default())?)?;
        of(row()?.rms_norm([n], None, None)?)?;
        of(row()?.adaptive_avg_pool1d(1)?)?;
        of(row()?.adaptive_max_pool1d(1)?)?;
        of(row()?.narrow(1, 0, 1)?.adaptive_avg_pool1d(n)?)?;
        of(row()?.narrow(1, 0, 1)?.adaptive_max_pool1d(n)?)?;
    }
    for p in [0.0, 1.0, 2.0, 3.0, f64::INFINITY] {
        let [few, many] = [[1, n], [n, 1]].map(|shape| Tensor::zeros(shape, DType::F32, device));
        let (few, many) = (few?.to_leaf()?, many?);
        few.cdist(&few.detach(), p)?.sum_all()?.backward()?;
        few.narrow(1, 0, 1)?.cdist(&many, p)?.sum_all()?.backward()?;
    }
    exercise_distances(device)
}

/// Distances of many rows, and their gradients for each layout of threads.
fn exercise_distances(device: &Device) -> Result<()> {
    for p in [0.0, 1.0, 2.0, 3.0, f64::INFINITY] {
        for width in [3, 10, 64] {
            let x = Tensor::zeros([32, 70, width], DType::F32, device)?.to_leaf()?;
            x.cdist(&x, p)?.sum_all()?.backward()?;
            x.cdist(&x.copy()?, p)?.sum_all()?.backward()?;
            drop(x.to_dtype(DType::F64).and_then(|x| x.cdist(&x, p)?.sum_all()?.backward()));
        }
    }
    Ok(())
}

/// Scatters that sort their indices, into new results and in place, and gradients of lookups.
fn exercise_sorted_scatters(device: &Device, types: &[DType]) -> Result<()> {
    for index_dtype in [DType::I32, DType::U32, DType::I64] {
        for &dtype in types {
            // Lines with runs of one stage, and of two. Errors are of types that an operation does not take.
            for length in [600, 3000] {
                let index = Tensor::zeros([length], index_dtype, device)?;
                let wide = index.unsqueeze(1)?.broadcast_to([length, 8192])?;
                let x = Tensor::zeros([700, 8192], dtype, device)?;
                let src = Tensor::zeros([length, 8192], dtype, device)?;
                drop((x.index_add(0, &index, &src, 1.0), x.index_add_(0, &index, &src, 1.0)));
                drop((x.scatter(0, &wide, &src), x.scatter_(0, &wide, &src)));
            }
            let index = Tensor::zeros([20_000], index_dtype, device)?;
            let table = Tensor::zeros([20_000, 8], dtype, device)?;
            let rows = table.to_leaf().and_then(|table| table.embedding(&index, Some(0)));
            drop(rows.and_then(|rows| rows.backward_with(&rows.ones_like()?)));
        }
    }
    Ok(())
}

/// Selections by groups of every size, and of long rows in two launches.
fn exercise_selections(device: &Device, types: &[DType]) {
    for &dtype in types {
        for (extent, k) in [(8, 1), (300, 4), (400, 8), (1024, 20), (1024, 50), (4096, 20), (30_000, 50)] {
            // Errors are of types that a device lacks.
            drop(Tensor::zeros([2, extent], dtype, device).and_then(|x| x.topk(k, 1, false)));
        }
    }
}

/// Extremes and their gradients over rows and columns, by one thread and by several.
fn exercise_extremes(device: &Device, types: &[DType]) -> Result<()> {
    for &dtype in types.iter().filter(|dtype| dtype.is_float()) {
        for (shape, dim) in
            [([1 << 18, 20], 1), ([64, 20], 1), ([64, 9000], 1), ([20, 64], 0), ([600, 2048], 0)]
        {
            let x = Tensor::zeros(shape, dtype, device)?.to_leaf()?;
            let y = x.amax([dim], false)?;
            y.backward_with(&y.ones_like()?)?;
        }
    }
    Ok(())
}

/// Group and batch norms of runs of every width, with the types of each under autocast.
fn exercise_norms(device: &Device) -> Result<()> {
    for (dtype, low) in [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::F32, DType::BF16)] {
        for space in [8, 1 << 12, 12, 7] {
            let x = Tensor::zeros([2, 4, space], dtype, device)?.to_leaf()?;
            let [w, b] = [(); 2].map(|()| Tensor::zeros([4], DType::F32, device)?.to_leaf());
            let (w, b) = (w?, b?);
            let options = NormOptions { weight: Some(&w), bias: Some(&b), ..Default::default() };
            let batch = BatchNormOptions {
                weight: options.weight,
                bias: options.bias,
                training: true,
                ..Default::default()
            };
            let _scope = autocast(low)?;
            for y in [x.group_norm(2, &options)?, x.group_norm_silu(2, &options)?, x.batch_norm_silu(&batch)?]
            {
                y.backward_with(&y.ones_like()?)?;
            }
        }
    }
    Ok(())
}

/// Optimisers, gradient clipping and loss scaling, with parameters of every type and alignment.
fn exercise_optimizers(device: &Device) -> Result<()> {
    let mut parameters = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for size in [8, 3] {
            let p = Tensor::zeros([size], dtype, device)?.to_leaf()?;
            p.set_grad(Some(p.ones_like()?));
            parameters.push(p);
        }
    }
    for norm_type in [1.0, 2.0, 3.0, f64::INFINITY] {
        clip_grad_norm_with(
            &parameters,
            1.0,
            &ClipGradNormOptions { norm_type, ..ClipGradNormOptions::default() },
        )?;
    }
    clip_grad_value_(&parameters, 1.0)?;
    let all = || parameters.clone();
    // The template handles types and alignments, so two parameters are enough for other algorithms.
    let few = || parameters[..2].to_vec();
    let optimizers: Vec<Box<dyn Optimizer>> = vec![
        Box::new(Sgd::new(all(), 0.1)),
        Box::new(Sgd::new(all(), 0.1).momentum(0.9)),
        Box::new(Sgd::new(all(), 0.1).momentum(0.9).nesterov(true).maximize(true)),
        Box::new(Adam::new(all(), 0.1)),
        Box::new(Adam::new(all(), 0.1).amsgrad(true).maximize(true)),
        Box::new(AdamW::new(all(), 0.1)),
        Box::new(AdamW::new(all(), 0.1).amsgrad(true)),
        Box::new(RmsProp::new(all(), 0.1)),
        Box::new(RmsProp::new(all(), 0.1).momentum(0.9)),
        Box::new(RmsProp::new(all(), 0.1).momentum(0.9).centered(true).maximize(true)),
        Box::new(Adagrad::new(few(), 0.1)),
        Box::new(Adadelta::new(few(), 0.1)),
        Box::new(Adamax::new(few(), 0.1)),
        Box::new(NAdam::new(few(), 0.1)),
        Box::new(NAdam::new(few(), 0.1).decoupled_weight_decay(true)),
        Box::new(RAdam::new(few(), 0.1)),
        Box::new(RAdam::new(few(), 0.1).decoupled_weight_decay(true)),
        Box::new(Lion::new(few(), 0.1)),
        Box::new(Asgd::new(few(), 0.1)),
        Box::new(Rprop::new(few(), 0.1).maximize(true)),
        Box::new(Adafactor::new(few(), 0.1)),
        Box::new(Lamb::new(few(), 0.1)),
    ];
    let skip = Tensor::zeros((), DType::F32, device)?;
    for mut optimizer in optimizers {
        optimizer.step()?;
        optimizer.step_unless(&skip)?;
        // After a skippable step, the device keeps the step count.
        optimizer.step()?;
    }
    exercise_low_precision_copies(device)?;
    // f16 gradients are rejected elsewhere.
    let mut optimizer = Sgd::new(parameters[..4].to_vec(), 0.1);
    let mut scaler = GradScaler::new();
    scaler.scale(&skip)?;
    scaler.step(&mut optimizer)?;
    Ok(scaler.update()?)
}

/// Optimiser steps that write 16-bit copies of parameters.
fn exercise_low_precision_copies(device: &Device) -> Result<()> {
    for low in [DType::BF16, DType::F16] {
        let mut weights = Vec::new();
        for size in [4, 3] {
            let weight = Tensor::zeros([1, size], DType::F32, device)?.to_leaf()?;
            let _autocast = autocast(low)?;
            Tensor::zeros([1, size], DType::F32, device)?.linear(&weight, None)?;
            weight.set_grad(Some(weight.ones_like()?));
            weights.push(weight);
        }
        let mut optimizer = AdamW::new(weights, 0.1).low_precision_copies(true);
        optimizer.step()?;
        optimizer.step_unless(&Tensor::zeros((), DType::F32, device)?)?;
        optimizer.step()?;
    }
    Ok(())
}

/// FP8 linear layers, with extents that the vendor's library supports and with others.
fn exercise_fp8_linear(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for extent in [16, 3] {
            let of = || Tensor::ones([extent, extent], dtype, device)?.to_leaf();
            let _fp8 = fp8();
            of()?.linear(&of()?, None)?.sum_all()?.backward()?;
        }
    }
    Ok(())
}

/// Runs a record and its gradients, on contiguous and on strided inputs.
fn exercise_case(case: &catalog::OpCase, dtype: DType, device: &Device) -> Result<()> {
    for strided in if dtype == DType::F32 { &[false, true][..] } else { &[false] } {
        let mut leaves = Vec::new();
        for input in case.inputs(dtype, device)? {
            let input = match input.rank() {
                0 => input,
                _ if *strided => input.transpose(0, -1)?.copy()?.transpose(0, -1)?,
                _ => input,
            };
            let wants = case.has_gradient && input.dtype().is_float();
            leaves.push(if wants { input.to_leaf()? } else { input });
        }
        let out = case.run(&leaves)?;
        if out.requires_grad() {
            out.backward_with(&out.ones_like()?)?;
        }
    }
    Ok(())
}

/// Validates a kernel and writes it as CUDA C++.
fn validate_and_translate(kernel: &NullKernel, allowed: Capabilities) -> Result<TranslatedKernel, String> {
    let module = naga::front::wgsl::parse_str(&kernel.wgsl).map_err(|e| e.emit_to_string(&kernel.wgsl))?;
    Validator::new(ValidationFlags::all(), allowed)
        .validate(&module)
        .map_err(|e| e.emit_to_string(&kernel.wgsl))?;
    let overrides: Vec<(&str, f64)> = kernel.overrides.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    let options = TranslateOptions {
        zero_workgroup_memory: kernel.zero_workgroup_memory,
        ..TranslateOptions::default()
    };
    translate_with_options(&kernel.wgsl, &kernel.entry_point, &overrides, &options).map_err(|e| e.to_string())
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

/// Compiles a source. Optimised code of the known architecture is also disassembled, because only optimised kernels
/// have inlined all functions.
fn compile_and_check(source: &str, label: &str, arch: u32, options: &[&str]) -> Result<(), String> {
    let cubin =
        nvrtc::compile_with_options(source, label, arch, options).map_err(|error| error.to_string())?;
    if arch == sass::SASS_ARCH && options != UNOPTIMISED {
        sass::count_waiting_kernels(&cubin).map(drop)
    } else {
        Ok(())
    }
}

/// Compiles one variant of a kernel that is written in CUDA C++.
fn compile_native(kernel: &impl NativeKernel, label: &str, arch: u32, report: &mut KernelReport) {
    match compile_and_check(&kernel.source(), label, arch, kernel.options()) {
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
        let kernel = RecurrentKernel { kind, is_backward, is_bf16: batch != 3, tiling };
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
        for (_, kernels) in by_prelude.iter().filter(|(prelude, _)| compiling.should_compile(prelude, arch)) {
            // Kernels with one prelude use the same features.
            let needs_matrix_units = kernels.iter().any(|(_, kernel)| kernel.required_features.matrix_units);
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
            if compile_and_check(&concat_sources(batch), "batch", arch, compiling.nvrtc_flags(arch)).is_err()
            {
                // One by one, to find the kernels that fail.
                for (label, kernel) in batch {
                    if let Err(error) =
                        compile_and_check(&kernel.source, &kernel.entry, arch, compiling.nvrtc_flags(arch))
                    {
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

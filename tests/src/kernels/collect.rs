//! Calls of operations on null devices, which record every kernel that they are asked to compile.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use forebay::amp::{autocast, fp8};
use forebay::backend::null::{CardProfile, NullBackend, NullKernel};
use forebay::backend::{Backend, Features};
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

use crate::catalog;
use crate::golden::{CallConfig, GoldenSet};

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
    exercise_captured_norms(&device)?;
    exercise_sorted_scatters(&device, &types)?;
    exercise_selections(&device, &types);
    exercise_extremes(&device, &types)?;
    exercise_norms(&device)?;
    exercise_fp8_linear(&device)?;
    exercise_optimizers(&device)?;
    GoldenSet::load(golden)?.run(&CallConfig { device: &device, dtype: None }, &[])?;
    Ok(backend.compiled_kernels())
}

/// Returns the kernels of a device whose matrix units multiply 16-bit types.
pub(super) fn collect_matrix_kernels() -> Result<Vec<NullKernel>> {
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
            let twice = x.mul(2.0)?;
            drop(twice.sub(&twice)?.div(&x)?);
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

/// Convolutions with a filter for each channel, of strides 1 and 2, and of lines alone.
fn exercise_depthwise(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (height, width, stride) in [(8, 8, 1), (8, 14, 1), (7, 7, 1), (8, 8, 2), (1, 66, 1), (1, 64, 1)] {
            let x = Tensor::zeros([2, 4, height, width], dtype, device)?.to_leaf()?;
            let w = Tensor::zeros([4, 1, height.min(7), 7], dtype, device)?.to_leaf()?;
            let options = ConvolutionOptions {
                stride: [stride; 2],
                padding: [height.min(7) / 2, 3].into(),
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

/// Modulated norms, and norms that a captured step computes in 16 bits, with and without a residual.
fn exercise_captured_norms(device: &Device) -> Result<()> {
    for (width, dtype) in [(7, DType::BF16), (384, DType::BF16), (384, DType::F16), (384, DType::F32)] {
        let x = Tensor::zeros([2, 32, width], DType::F32, device)?.to_leaf()?;
        let line = Tensor::zeros([2, 1, width], dtype, device)?.to_leaf()?;
        let weight = Tensor::zeros([width, width], DType::F32, device)?.to_leaf()?;
        let low = if dtype == DType::F16 { DType::F16 } else { DType::BF16 };
        let step = || {
            let _scope = autocast(low)?;
            let y = x.layer_norm([width], &Default::default())?.mul(&line)?.add(&line)?;
            let sum = x.mul(2.0)?.add(&y.linear(&weight, None)?)?;
            let y = sum.rms_norm([width], None, None)?.linear(&weight, None)?;
            sum.add(&y)?.sum_all()?.backward()
        };
        drop(device.capture(step)?);
    }
    Ok(())
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

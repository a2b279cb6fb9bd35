//! Tests that need no arithmetic, on the null device: shapes, memory, errors and the autograd graph.

use std::sync::Arc;

use forebay_core::backend::null::{CardProfile, NullBackend};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::ops::{
    BatchNormOptions, ConvolutionOptions, CrossEntropyOptions, RecurrentKind, RecurrentOp, cat,
};
use forebay_core::tensor::Tensor;

fn device() -> Device {
    Device::null(Default::default())
}

#[test]
fn memory_is_freed_after_a_step() -> Result<()> {
    let device = device();
    let w = Tensor::ones([64, 64], DType::F32, &device)?.to_leaf()?;
    let mut after = Vec::new();
    for _ in 0..10 {
        let x = Tensor::ones([64, 64], DType::F32, &device)?;
        let y = x.mul(&w)?.exp()?.add(&x)?;
        y.backward_with(&y.ones_like()?)?;
        w.set_grad(None);
        drop(y);
        after.push(device.memory().allocated());
    }
    assert!(after.iter().all(|&bytes| bytes == after[0]), "{after:?}");
    Ok(())
}

#[test]
fn a_second_backward_pass_explains_its_error() -> Result<()> {
    let device = device();
    let w = Tensor::ones([1], DType::F32, &device)?.to_leaf()?;
    let y = w.exp()?;
    y.backward()?;
    let error = y.backward().expect_err("the graph is freed");
    assert!(error.to_string().contains("has already run backward"), "{error}");
    Ok(())
}

#[test]
fn an_operation_without_a_gradient_refuses() -> Result<()> {
    let device = device();
    let w = Tensor::ones([4], DType::F32, &device)?.to_leaf()?;
    let logits = Tensor::ones([3, 4], DType::F32, &device)?;
    let classes = Tensor::from_slice(&[1_i32, 0, 3], [3], &device)?;
    let weighted = CrossEntropyOptions { weight: Some(&w), ..CrossEntropyOptions::default() };
    let error =
        logits.cross_entropy_with(&classes, &weighted).expect_err("weights of classes have no gradient");
    assert!(matches!(error, Error::NoGradient { op, .. } if op.starts_with("cross_entropy")), "{error}");
    assert!(!w.gt(0.5)?.requires_grad(), "truth values have no history");
    Ok(())
}

/// GELU's gradient in the epilogue of a matrix product saves a pass over memory and allocates no additional byte.
#[test]
fn the_gradient_of_gelu_is_fused_where_a_backend_supports_it() -> Result<()> {
    let step = |gelu_grad: bool, dtype: DType| -> Result<(u64, u64)> {
        let mut profile = CardProfile::from_card("h100")?;
        profile.library.gelu_grad_epilogue &= gelu_grad;
        let backend = Arc::new(NullBackend::new(profile));
        let device = Device::new(backend.clone())?;
        let ones = |shape: &[usize]| -> Result<Tensor> { Tensor::ones(shape, dtype, &device)?.to_leaf() };
        let (x, up, up_bias) = (ones(&[256, 64])?, ones(&[512, 64])?, ones(&[512])?);
        let (down, down_bias) = (ones(&[64, 512])?, ones(&[64])?);
        let y = x.mlp(&up, &up_bias, &down, &down_bias)?;
        let (seed, before) = (y.ones_like()?, backend.estimated_work());
        y.backward_with(&seed)?;
        Ok(((backend.estimated_work() - before).launches, device.memory().peak_allocated()))
    };
    let (with, without) = (step(true, DType::BF16)?, step(false, DType::BF16)?);
    assert_eq!((with.0 + 1, with.1), without);
    assert_eq!(step(true, DType::F32)?, step(false, DType::F32)?);
    Ok(())
}

/// A backend's own kernels take columns along the width, a third of the column matrix of a 3 x 3 filter.
#[test]
fn convolutions_need_fewer_columns_where_a_backend_supports_it() -> Result<()> {
    let step = |convolution: bool, dtype: DType, width: usize, stride: usize| -> Result<u64> {
        let mut profile = CardProfile::from_card("h100")?;
        assert!(profile.library.convolution);
        profile.library.convolution &= convolution;
        let device = Device::new(Arc::new(NullBackend::new(profile)))?;
        let x = Tensor::ones([8, 64, 64, width], dtype, &device)?.to_leaf()?;
        let w = Tensor::ones([64, 64, 3, 3], dtype, &device)?.to_leaf()?;
        let options = ConvolutionOptions { stride: [stride; 2], padding: 1.into(), ..Default::default() };
        let y = x.conv2d(&w, None, &options)?;
        y.backward_with(&y.ones_like()?)?;
        Ok(device.memory().peak_allocated())
    };
    // The column matrix has nine times the size of x.
    let columns = 9 * 8 * 64 * 64 * 64 * 2;
    assert!(step(true, DType::BF16, 64, 1)? + columns / 2 < step(false, DType::BF16, 64, 1)?);
    // A stride of 2 leaves a quarter of the columns, which are f32 for the gradient of x.
    assert!(step(true, DType::F16, 64, 2)? + columns / 4 < step(false, DType::F16, 64, 2)?);
    // Other types and widths use the column matrix.
    for (dtype, width) in [(DType::F32, 64), (DType::BF16, 60)] {
        assert_eq!(step(true, dtype, width, 1)?, step(false, dtype, width, 1)?);
    }
    Ok(())
}

/// A backend's own kernels run all steps of a recurrent layer in one launch, without memory for the steps' products.
#[test]
fn recurrent_layers_take_one_launch_each_way_where_a_backend_supports_it() -> Result<()> {
    let run = |fused: bool, dtype: DType, steps: usize, hidden: usize| -> Result<(u64, u64)> {
        let mut profile = CardProfile::from_card("h100")?;
        assert!(profile.library.recurrent);
        profile.library.recurrent &= fused;
        let backend = Arc::new(NullBackend::new(profile));
        let device = Device::new(backend.clone())?;
        let ones = |shape: &[usize]| Tensor::ones(shape, dtype, &device)?.to_leaf();
        let (x, h_0) = (ones(&[steps, 32, 3 * hidden])?, ones(&[32, hidden])?);
        let weight = ones(&[3 * hidden, hidden])?;
        let states = RecurrentOp::new(RecurrentKind::Gru, &x, &h_0, &weight).run()?;
        states.output.backward_with(&states.output.ones_like()?)?;
        Ok((backend.estimated_work().launches, device.memory().peak_allocated()))
    };
    let ((launches, peak), (all, largest)) =
        (run(true, DType::BF16, 50, 512)?, run(false, DType::BF16, 50, 512)?);
    assert!(
        launches + 190 < all && peak <= largest,
        "{launches} of {all} launches, {peak} of {largest} bytes"
    );
    // Other types, few steps, and weights that do not fit launch each step.
    for (dtype, steps, hidden) in [(DType::F32, 50, 512), (DType::F16, 3, 512), (DType::BF16, 5, 2048)] {
        assert_eq!(run(true, dtype, steps, hidden)?, run(false, dtype, steps, hidden)?);
    }
    Ok(())
}

/// Returns a device that imitates a card, and the number of launches so far.
fn h100() -> Result<(Device, impl Fn() -> u64)> {
    let backend = Arc::new(NullBackend::new(CardProfile::from_card("h100")?));
    Ok((Device::new(backend.clone())?, move || backend.estimated_work().launches))
}

#[test]
fn a_batch_norm_takes_three_launches_in_each_direction_or_two() -> Result<()> {
    let (device, launches) = h100()?;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let (mean, var) = (zeros(&[16])?, zeros(&[16])?);
    let batches = Tensor::zeros((), DType::I32, &device)?;
    // Few parts of a channel are combined by the kernels of the elements.
    for (images, forward, backward) in [(1, 2, 2), (8, 2, 3), (2048, 3, 3)] {
        let (w, b) = (zeros(&[16])?.to_leaf()?, zeros(&[16])?.to_leaf()?);
        let options = BatchNormOptions {
            running: Some((&mean, &var)),
            weight: Some(&w),
            bias: Some(&b),
            training: true,
            num_batches_tracked: Some(&batches),
            ..Default::default()
        };
        let x = zeros(&[images, 16, 32, 32])?.to_leaf()?;
        let before = launches();
        let y = x.batch_norm(&options)?;
        assert_eq!(launches() - before, forward, "moments, statistics, and result of {images} images");
        let (seed, before) = (y.ones_like()?, launches());
        y.backward_with(&seed)?;
        assert_eq!(
            launches() - before,
            backward,
            "sums of parts and of channels, and gradients of {images} images"
        );
    }
    Ok(())
}

#[test]
fn parts_of_a_tensor_share_one_gradient() -> Result<()> {
    let (device, launches) = h100()?;
    let count = |parts: usize| -> Result<u64> {
        let x = Tensor::zeros([8, 64], DType::F32, &device)?.to_leaf()?.exp()?;
        let all = x.chunk(parts, 1)?;
        let y = all.iter().skip(1).try_fold(all[0].sum_all()?, |y, part| y.add(&part.sum_all()?))?;
        let before = launches();
        y.backward()?;
        Ok(launches() - before)
    };
    // Each further part is one addition in place.
    assert_eq!(count(8)? - count(4)?, 4);
    Ok(())
}

#[test]
fn tensors_of_whole_vectors_concatenate_in_one_launch() -> Result<()> {
    let (device, launches) = h100()?;
    let count = |parts: usize, extent: usize| -> Result<u64> {
        let x = Tensor::zeros([6, extent, 5], DType::F32, &device)?;
        let before = launches();
        cat(&vec![x; parts], 1)?;
        Ok(launches() - before)
    };
    assert_eq!([count(2, 4)?, count(8, 4)?, count(9, 4)?, count(20, 4)?], [1, 1, 2, 3]);
    assert_eq!(count(3, 3)?, 3, "rows of 60 bytes are no whole vectors");
    Ok(())
}

#[test]
fn gradients_of_weights_are_summed_and_rounded_in_one_launch() -> Result<()> {
    let (device, launches) = h100()?;
    let count = |kernel: usize, stride: usize, dtype: DType| -> Result<u64> {
        let leaf = |shape: [usize; 4]| Tensor::zeros(shape, dtype, &device)?.to_leaf();
        let (x, w) = (leaf([4, 16, 16, 16])?, leaf([32, 16, kernel, kernel])?);
        let options =
            ConvolutionOptions { stride: [stride; 2], padding: (kernel / 2).into(), ..Default::default() };
        let y = x.conv2d(&w, None, &options)?;
        let (seed, before) = (y.ones_like()?, launches());
        y.backward_with(&seed)?;
        Ok(launches() - before)
    };
    for dtype in [DType::F32, DType::BF16] {
        // Weights with mirrored taps, columns, two products, a sum, and the copy that the leaf keeps.
        assert_eq!(count(3, 1, dtype)?, 6, "{dtype}");
        // Two products and a sum, which is transposed in the leaf.
        assert_eq!(count(1, 1, dtype)?, 4, "{dtype}");
        // A product and the sum over its columns; columns of the input, a product and a sum.
        assert_eq!(count(3, 2, dtype)?, 5, "{dtype}");
    }
    Ok(())
}

#[test]
fn the_bias_of_a_recurrent_layer_is_copied_for_several_steps() -> Result<()> {
    let mut profile = CardProfile::from_card("h100")?;
    profile.library.recurrent = false;
    let backend = Arc::new(NullBackend::new(profile));
    let (device, launches) = (Device::new(backend.clone())?, || backend.estimated_work().launches);
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::BF16, &device);
    let count = |steps: usize, hidden: usize| -> Result<u64> {
        let (gates, weight, bias) =
            (zeros(&[steps, 64, hidden])?, zeros(&[hidden, hidden])?, zeros(&[hidden])?);
        let state = zeros(&[64, hidden])?;
        let op = RecurrentOp {
            bias_hh: Some(&bias),
            ..RecurrentOp::new(RecurrentKind::Tanh, &gates, &state, &weight)
        };
        let before = launches();
        op.run()?;
        Ok(launches() - before)
    };
    // A product and a kernel for each step. Each 17th step copies its own bias, and then that of 16 others.
    assert_eq!(count(34, 650)? - count(17, 650)?, 2 * 17 + 2);
    // The epilogue of the library adds the bias.
    assert_eq!(count(34, 640)? - count(17, 640)?, 2 * 17);
    Ok(())
}

#[test]
fn batches_with_strides_of_their_own_take_one_launch_without_copies() -> Result<()> {
    let count = |profile: CardProfile, dtype: DType| -> Result<([u64; 3], usize)> {
        let backend = Arc::new(NullBackend::new(profile));
        let (device, launches) = (Device::new(backend.clone())?, || backend.estimated_work().launches);
        // Heads after the steps of a chunk, and one matrix for all heads.
        let x = Tensor::zeros([8, 1024, 16, 64], dtype, &device)?;
        let x = x.reshape([8, 16, 64, 16, 64])?.transpose(2, 3)?.to_leaf()?;
        let reads = Tensor::zeros([8, 64, 1024], dtype, &device)?.transpose(1, 2)?;
        let reads = reads.reshape([8, 16, 1, 64, 64])?.to_leaf()?;
        let y = reads.matmul(&x)?;
        let seed = y.ones_like()?;
        let before = launches();
        reads.detach().matmul(&x.detach())?;
        let forward = launches() - before;
        device.pool().reset_peak_stats();
        let (before, allocated) = (launches(), device.memory().allocated());
        y.backward_with(&seed)?;
        let grads = (8 * 16 * 64 * 64 * 17 * dtype.size()) as u64;
        // The gradients stay; other memory is scratch.
        let scratch = device.memory().peak_allocated() - allocated - grads;
        let kernels = backend.compiled_kernels();
        let is_copy = |label: &str| label.starts_with("copy") || label.starts_with("transpose");
        let copies = kernels.iter().filter(|kernel| is_copy(&kernel.label)).count();
        Ok(([forward, launches() - before, scratch], copies))
    };
    let h100 = CardProfile::from_card("h100")?;
    let ([forward, backward, scratch], _) = count(h100.clone(), DType::BF16)?;
    assert_eq!((forward, backward), (1, 2), "a product, and one for each gradient");
    assert!(scratch < 1 << 20, "{scratch} bytes are more than the gradients");
    // Through other APIs no kernel lays memory anew either.
    let (_, copies) = count(h100.clone().with_wgpu_limits(), DType::BF16)?;
    assert_eq!(copies, 0);
    // The library copies operands.
    let ([forward, backward, scratch], copies) = count(h100, DType::F32)?;
    assert!(
        copies > 0 && forward > 1 && backward > 3 && scratch > 1 << 20,
        "{forward} and {backward} launches"
    );
    Ok(())
}

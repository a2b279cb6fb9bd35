//! Tests that need no arithmetic, on the null device: shapes, memory, errors and the autograd graph.

use std::sync::Arc;

use forebay_core::backend::null::{CardProfile, NullBackend};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::ops::{ConvolutionOptions, CrossEntropyOptions};
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
    assert!(matches!(error, Error::NoGradient { op } if op.starts_with("cross_entropy")), "{error}");
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

/// A convolution without a column matrix allocates the weights in another order and partial sums instead.
#[test]
fn convolutions_need_no_column_matrix_where_a_backend_supports_it() -> Result<()> {
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
    // Other types, widths and strides use the column matrix.
    for (dtype, width, stride) in [(DType::F32, 64, 1), (DType::BF16, 60, 1), (DType::F16, 64, 2)] {
        assert_eq!(step(true, dtype, width, stride)?, step(false, dtype, width, stride)?);
    }
    Ok(())
}

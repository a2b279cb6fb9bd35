//! Blocks of memory name the line of the program that asked for them.

use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::Result;
use forebay_core::ops::{PadMode, Pool2dOptions, cat};
use forebay_core::tensor::Tensor;
use forebay_nn::nn::{Conv2d, Dropout, Embedding, LayerNorm, Linear, Module, SelfAttention};
use forebay_nn::optim::{AdamW, Optimizer};

#[test]
fn operations_name_the_line_of_the_program() -> Result<()> {
    let device = Device::null(Default::default());
    device.pool().start_recording(10_000);
    device.manual_seed(1);
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let (x, index) = (zeros(&[4, 8], DType::F32)?.to_leaf()?, zeros(&[4], DType::I64)?);
    let image = zeros(&[1, 3, 8, 8], DType::F32)?.to_leaf()?;
    let (linear, norm) = (Linear::new(8, 8, &device)?, LayerNorm::new([8], &device)?);
    let conv = Conv2d::new(3, 4, [3, 3], Default::default(), &device)?;
    let attention = SelfAttention::new(8, 2, &device)?;
    let words = Embedding::new(10, 8, &device)?;
    let mut optimizer = AdamW::new(linear.parameters(), 1e-3);
    let y = linear.forward(&x)?.gelu()?.add(&x)?.mul(2.0)?;
    let y = norm.forward(&Dropout::new(0.5).forward(&y)?)?.transpose(0, 1)?.contiguous()?;
    let z = attention.forward(&words.forward(&index)?.reshape([1, 4, 8])?)?;
    let parts = [
        y.matmul(&x)?.softmax(-1)?.sum_all()?,
        x.cross_entropy(&index)?,
        x.to_dtype(DType::F16)?.to_dtype(DType::F32)?.cumsum(0)?.mean_all()?,
        cat(&[&x, &x], 0)?.index_select(0, &index)?.var([0], 1.0, false)?.sum_all()?,
        conv.forward(&image)?.relu()?.max_pool2d(Pool2dOptions::new(2))?.sum_all()?,
        x.gather(1, &zeros(&[4, 8], DType::I64)?)?.pad(&[1, 1], PadMode::Reflect)?.max_all()?,
        z.sum_all()?,
        Tensor::rand([3], DType::F32, &device)?.mean_all()?,
    ];
    let loss = parts.into_iter().try_fold(zeros(&[], DType::F32)?, |sum, part| sum.add(&part))?;
    loss.backward()?;
    optimizer.step()?;
    let snapshot = device.pool().snapshot();
    let foreign =
        snapshot.holders.iter().filter(|holder| !holder.frames.iter().any(|f| f.filename == file!()));
    let foreign: Vec<_> = foreign.map(ToString::to_string).collect();
    assert_eq!(foreign, [""; 0]);
    Ok(())
}

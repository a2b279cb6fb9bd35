//! Super-resolution: residual convolutions without norms, and a shuffle of channels to pixels (Lim et al., 2017).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, Module};
use forebay::ops::Reduction;
use forebay::tensor::Tensor;

use super::Workload;

fn conv(inputs: usize, outputs: usize, device: &Device) -> Result<Conv2d> {
    Conv2d::new(inputs, outputs, 3, Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() }, device)
}

#[derive(Module)]
struct Edsr {
    stem: Conv2d,
    blocks: Vec<[Conv2d; 2]>,
    last: Conv2d,
    up: Conv2d,
    head: Conv2d,
}

/// Network that doubles the extents of images by 16 residual blocks (the EDSR baseline): 1.4M parameters.
pub(super) fn edsr(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, side, width, count] = if tiny { [2, 8, 4, 2] } else { [16, 96, 64, 16] };
    let block = |_| Ok([conv(width, width, device)?, conv(width, width, device)?]);
    let net = Edsr {
        stem: conv(3, width, device)?,
        blocks: (0..count).map(block).collect::<Result<_>>()?,
        last: conv(width, width, device)?,
        up: conv(width, 4 * width, device)?,
        head: conv(width, 3, device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::rand(shape, DType::F32, device)?;
    let target = Tensor::rand([batch, 3, 2 * side, 2 * side], DType::F32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let stem = net.stem.forward(&x)?;
        let y = net.blocks.iter().try_fold(stem.clone(), |x, [first, second]| {
            x.add(&second.forward(&first.forward(&x)?.relu()?)?)
        })?;
        let y = net.last.forward(&y)?.add(&stem)?;
        let image = net.head.forward(&net.up.forward(&y)?.pixel_shuffle(2)?)?;
        image.to_dtype(DType::F32)?.l1_loss(&target, Reduction::Mean)
    }))
}

//! Images by discrete codes: the encoder's features are replaced by the nearest of a table, whose entries follow the
//! means of the features (van den Oord et al., 2017).

use forebay::autograd::no_grad;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, ConvTranspose2d, ConvTranspose2dOptions, Module};
use forebay::ops::Reduction;
use forebay::tensor::Tensor;

use super::Workload;

/// Part of the old averages that a step keeps.
const DECAY: f64 = 0.99;

/// Residual block of two convolutions.
#[derive(Module)]
struct ResBlock {
    conv: Conv2d,
    point: Conv2d,
}

impl ResBlock {
    fn new(width: usize, device: &Device) -> Result<Self> {
        let options = Conv2dOptions { padding: [1; 2], bias: false, ..Conv2dOptions::default() };
        let point = Conv2dOptions { bias: false, ..Conv2dOptions::default() };
        Ok(Self {
            conv: Conv2d::new(width, width / 4, 3, options, device)?,
            point: Conv2d::new(width / 4, width, 1, point, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.add(&self.point.forward(&self.conv.forward(&x.relu()?)?.relu()?)?)
    }
}

/// Table of codes, with averages of the number and the sum of the features that chose a code. They are buffers.
#[derive(Module)]
struct Codebook {
    codes: Tensor,
    counts: Tensor,
    sums: Tensor,
}

impl Codebook {
    fn new(count: usize, features: usize, device: &Device) -> Result<Self> {
        let codes = Tensor::randn([count, features], DType::F32, device)?;
        let sums = codes.copy()?;
        Ok(Self { codes, counts: Tensor::ones([count], DType::F32, device)?, sums })
    }

    /// Replaces rows of x \[rows, features\] by the nearest codes, and moves the codes.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _no_grad = no_grad();
        let count = self.codes.shape()[0];
        let chosen = x.cdist(&self.codes, 2.0)?.argmin(-1, false)?;
        let quantized = self.codes.embedding(&chosen, None)?;
        let one_hot = chosen.one_hot(count)?.to_dtype(DType::F32)?;
        self.counts.lerp_(&one_hot.sum([0], false)?, 1.0 - DECAY)?;
        self.sums.lerp_(&one_hot.t()?.matmul(x)?.to_dtype(DType::F32)?, 1.0 - DECAY)?;
        // Codes that nothing chose have a small count.
        let total = self.counts.sum_all()?;
        let scale = total.div(&total.add(count as f64 * 1e-5)?)?;
        let smoothed = self.counts.add(1e-5)?.mul(&scale)?;
        self.codes.copy_(&self.sums.div(&smoothed.unsqueeze(1)?)?)?;
        Ok(quantized)
    }
}

#[derive(Module)]
struct VqVae {
    down: Vec<Conv2d>,
    encoder: Vec<ResBlock>,
    code: Conv2d,
    codebook: Codebook,
    start: Conv2d,
    decoder: Vec<ResBlock>,
    up: Vec<ConvTranspose2d>,
}

/// VQ-VAE with a table of 1,024 codes that follows averages.
pub(super) fn vqvae(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, side, width, features, codes] =
        if tiny { [2, 16, 8, 4, 10] } else { [128, 64, 128, 64, 1024] };
    let conv = |inputs, outputs, kernel, stride| {
        let options = Conv2dOptions { stride: [stride; 2], padding: [1; 2], ..Conv2dOptions::default() };
        Conv2d::new(inputs, outputs, kernel, options, device)
    };
    let up = |inputs, outputs| {
        let options =
            ConvTranspose2dOptions { stride: [2; 2], padding: [1; 2], ..ConvTranspose2dOptions::default() };
        ConvTranspose2d::new(inputs, outputs, 4, options, device)
    };
    let blocks = || (0..2).map(|_| ResBlock::new(width, device)).collect::<Result<Vec<_>>>();
    let net = VqVae {
        down: vec![conv(3, width / 2, 4, 2)?, conv(width / 2, width, 4, 2)?, conv(width, width, 3, 1)?],
        encoder: blocks()?,
        code: Conv2d::new(width, features, 1, Conv2dOptions::default(), device)?,
        codebook: Codebook::new(codes, features, device)?,
        start: conv(features, width, 3, 1)?,
        decoder: blocks()?,
        up: vec![up(width, width / 2)?, up(width / 2, 3)?],
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::rand(shape, DType::F32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let mut y = x.clone();
        for (k, conv) in net.down.iter().enumerate() {
            y = conv.forward(&y)?;
            y = if k + 1 < net.down.len() { y.relu()? } else { y };
        }
        let y = net.encoder.iter().try_fold(y, |y, block| block.forward(&y))?;
        let z = net.code.forward(&y.relu()?)?.to_dtype(DType::F32)?.permute([0, 2, 3, 1])?;
        let quantized = net.codebook.forward(&z.flatten(0, 2)?)?.reshape(z.shape())?;
        let commitment = z.mse_loss(&quantized, Reduction::Mean)?;
        // The decoder's gradient passes the choice unchanged.
        let q = z.add(&quantized.sub(&z)?.detach())?.permute([0, 3, 1, 2])?;
        let y = net.decoder.iter().try_fold(net.start.forward(&q)?, |y, block| block.forward(&y))?;
        let y = net.up[1].forward(&net.up[0].forward(&y.relu()?)?.relu()?)?.to_dtype(DType::F32)?;
        y.mse_loss(&x, Reduction::Mean)?.add(&commitment.mul(0.25)?)
    }))
}

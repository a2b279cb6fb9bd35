//! Normalising flow: invertible layers whose determinants give the likelihood of images (Kingma and Dhariwal, 2018).

use std::f64::consts::{LN_2, TAU};

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, Module, init};
use forebay::ops::cat;
use forebay::tensor::Tensor;

use super::Workload;

/// Step of Glow: scaled channels, an invertible product of the channels, and an affine coupling of their halves.
#[derive(Module)]
struct FlowStep {
    log_scale: Tensor,
    shift: Tensor,
    mix: Tensor,
    first: Conv2d,
    middle: Conv2d,
    last: Conv2d,
}

impl FlowStep {
    fn new(channels: usize, hidden: usize, device: &Device) -> Result<Self> {
        let conv = |inputs: usize, outputs: usize, kernel: usize| {
            let options = Conv2dOptions { padding: [kernel / 2; 2], ..Conv2dOptions::default() };
            Conv2d::new(inputs, outputs, kernel, options, device)
        };
        let zeros = || Tensor::zeros([1, channels, 1, 1], DType::F32, device)?.to_leaf();
        let (rotation, _) = Tensor::randn([channels; 2], DType::F32, device)?.qr(false)?;
        let last = conv(hidden, channels, 3)?;
        last.parameters().iter().try_for_each(|parameter| init::zeros_(parameter))?;
        Ok(Self {
            log_scale: zeros()?,
            shift: zeros()?,
            mix: rotation.to_leaf()?,
            first: conv(channels / 2, hidden, 3)?,
            middle: conv(hidden, hidden, 1)?,
            last,
        })
    }

    /// Returns the result, and the logarithm of the determinant for each image.
    fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let pixels = (x.shape()[2] * x.shape()[3]) as f64;
        let x = x.add(&self.shift)?.mul(&self.log_scale.exp()?)?;
        let x = x.conv2d(&self.mix.unsqueeze(-1)?.unsqueeze(-1)?, None, &Default::default())?;
        let (_, size) = self.mix.slogdet()?;
        let constant = self.log_scale.sum_all()?.add(&size)?.mul(pixels)?;
        let parts = x.chunk(2, 1)?;
        let y = self.middle.forward(&self.first.forward(&parts[0])?.relu()?)?.relu()?;
        let moments = self.last.forward(&y)?.chunk(2, 1)?;
        let log_scale = moments[0].tanh()?;
        let moved = parts[1].mul(&log_scale.exp()?)?.add(&moments[1])?;
        let determinant = log_scale.sum([1, 2, 3], false)?.add(&constant)?;
        Ok((cat(&[&parts[0].to_dtype(moved.dtype())?, &moved], 1)?, determinant))
    }
}

/// Moves blocks of 2 x 2 pixels to channels.
fn squeeze(x: &Tensor) -> Result<Tensor> {
    let &[batch, channels, height, width] = x.shape() else { unreachable!("images have four dimensions") };
    let x = x.unflatten(2, [height / 2, 2])?.unflatten(4, [width / 2, 2])?;
    x.permute([0, 1, 3, 5, 2, 4])?.reshape([batch, 4 * channels, height / 2, width / 2])
}

/// Returns the logarithm of the normal density of each image.
fn log_normal(z: &Tensor) -> Result<Tensor> {
    z.square()?.add(TAU.ln())?.sum([1, 2, 3], false)?.mul(-0.5)
}

/// Glow with three levels of eight steps, for images of 32 pixels.
pub(super) fn flow(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, side, levels, steps, hidden] = if tiny { [2, 8, 2, 2, 8] } else { [64, 32, 3, 8, 512] };
    let level = |k: usize| {
        let step = |_| FlowStep::new(12 << k, hidden, device);
        (0..steps).map(step).collect::<Result<Vec<_>>>()
    };
    let net = (0..levels).map(level).collect::<Result<Vec<_>>>()?;
    let shape = [batch, 3, side, side];
    let x = Tensor::rand(shape, DType::F32, device)?;
    let elements = (3 * side * side) as f64;
    Ok(Workload::new(&shape, net, move |net| {
        // Images have 256 levels; noise makes them continuous.
        let mut x = x.add(&x.rand_like()?.div(256.0)?)?.sub(0.5)?;
        let mut total = Tensor::zeros([batch], DType::F32, x.device())?;
        for (k, level) in net.iter().enumerate() {
            x = squeeze(&x)?;
            for step in level {
                let (y, determinant) = step.forward(&x)?;
                (x, total) = (y, total.add(&determinant)?);
            }
            // Half of the channels is done after each level.
            if k + 1 < net.len() {
                let parts = x.chunk(2, 1)?;
                total = total.add(&log_normal(&parts[1])?)?;
                x = parts[0].clone();
            }
        }
        let bits = total.add(&log_normal(&x)?)?.mean_all()?.neg()?.div(LN_2 * elements)?;
        bits.add(8.0)
    }))
}

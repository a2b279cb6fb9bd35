//! Diffusion transformer: the time and the class scale, shift and gate each block (Peebles and Xie, 2023).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, Embedding, Linear, Module, init};
use forebay::ops::{AttentionOptions, NormOptions, Reduction, cat};
use forebay::tensor::Tensor;

use super::Workload;

/// Number of frequencies of the embedding of the time.
const FREQUENCIES: usize = 128;

/// Creates a layer whose weights start at zero.
fn zero_linear(inputs: usize, outputs: usize, device: &Device) -> Result<Linear> {
    let layer = Linear::new(inputs, outputs, device)?;
    layer.parameters().iter().try_for_each(|parameter| init::zeros_(parameter))?;
    Ok(layer)
}

/// Normalises each token without weights, then scales and shifts the tokens of each image.
fn modulate(x: &Tensor, shift: &Tensor, scale: &Tensor) -> Result<Tensor> {
    let width = x.shape()[2];
    let y = x.layer_norm([width], &NormOptions { eps: 1e-6, ..NormOptions::default() })?;
    y.mul(&scale.unsqueeze(1)?.add(1.0)?)?.add(&shift.unsqueeze(1)?)
}

/// Transformer block with adaLN-zero.
#[derive(Module)]
struct Block {
    modulation: Linear,
    qkv: Linear,
    proj: Linear,
    up: Linear,
    down: Linear,
    heads: usize,
}

impl Block {
    fn new(width: usize, heads: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            modulation: zero_linear(width, 6 * width, device)?,
            qkv: Linear::new(width, 3 * width, device)?,
            proj: Linear::new(width, width, device)?,
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
            heads,
        })
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length, width) = (x.shape()[0], x.shape()[1], x.shape()[2]);
        let qkv = self.qkv.forward(x)?.reshape([batch, length, 3, self.heads, width / self.heads])?;
        let part = |k| qkv.select(2, k)?.transpose(1, 2);
        let y = part(0)?.scaled_dot_product_attention(&part(1)?, &part(2)?, &AttentionOptions::default())?;
        self.proj.forward(&y.transpose(1, 2)?.flatten(2, -1)?)
    }

    /// Transforms tokens \[batch, tokens, width\] by the conditions \[batch, width\].
    fn forward(&self, x: &Tensor, condition: &Tensor) -> Result<Tensor> {
        let parts = self.modulation.forward(&condition.silu()?)?.chunk(6, 1)?;
        let y = self.attend(&modulate(x, &parts[0], &parts[1])?)?;
        let x = x.add(&parts[2].unsqueeze(1)?.mul(&y)?)?;
        let y = self.up.forward(&modulate(&x, &parts[3], &parts[4])?)?.gelu_tanh()?;
        x.add(&parts[5].unsqueeze(1)?.mul(&self.down.forward(&y)?)?)
    }
}

#[derive(Module)]
struct Dit {
    patches: Conv2d,
    #[module(skip)]
    positions: Tensor,
    #[module(skip)]
    frequencies: Tensor,
    time: [Linear; 2],
    classes: Embedding,
    blocks: Vec<Block>,
    modulation: Linear,
    head: Linear,
}

impl Dit {
    /// Creates a network for maps of `side` with 4 channels, of which a token has 2 x 2 pixels.
    fn new(side: usize, [width, heads, layers]: [usize; 3], device: &Device) -> Result<Self> {
        let across = side / 2;
        // Sines and cosines of the row, then of the column.
        let quarter = width / 4;
        let position = |at: usize| {
            let (token, feature) = (at / width, at % width);
            let place = if feature < 2 * quarter { token / across } else { token % across };
            let angle = place as f64 * 10_000f64.powf(-((feature % quarter) as f64) / quarter as f64);
            (if feature / quarter % 2 == 0 { angle.sin() } else { angle.cos() }) as f32
        };
        let positions: Vec<f32> = (0..across * across * width).map(position).collect();
        let frequency = |k| 10_000f64.powf(-(k as f64) / FREQUENCIES as f64) as f32;
        let frequencies: Vec<f32> = (0..FREQUENCIES).map(frequency).collect();
        let options = Conv2dOptions { stride: [2, 2], ..Conv2dOptions::default() };
        Ok(Self {
            patches: Conv2d::new(4, width, 2, options, device)?,
            positions: Tensor::from_slice(&positions, [1, across * across, width], device)?,
            frequencies: Tensor::from_slice(&frequencies, [FREQUENCIES], device)?,
            time: [Linear::new(2 * FREQUENCIES, width, device)?, Linear::new(width, width, device)?],
            classes: Embedding::new(1001, width, device)?,
            blocks: (0..layers).map(|_| Block::new(width, heads, device)).collect::<Result<_>>()?,
            modulation: zero_linear(width, 2 * width, device)?,
            head: zero_linear(width, 16, device)?,
        })
    }

    fn forward(&self, x: &Tensor, steps: &Tensor, classes: &Tensor) -> Result<Tensor> {
        let (batch, across) = (x.shape()[0], x.shape()[2] / 2);
        let angles = steps.to_dtype(DType::F32)?.unsqueeze(1)?.mul(&self.frequencies)?;
        let time = self.time[0].forward(&cat(&[angles.cos()?, angles.sin()?], -1)?)?.silu()?;
        let condition = self.time[1].forward(&time)?.add(&self.classes.forward(classes)?)?;
        let tokens = self.patches.forward(x)?.flatten(2, -1)?.transpose(1, 2)?.add(&self.positions)?;
        let tokens = self.blocks.iter().try_fold(tokens, |x, block| block.forward(&x, &condition))?;
        let parts = self.modulation.forward(&condition.silu()?)?.chunk(2, 1)?;
        let y = self.head.forward(&modulate(&tokens, &parts[0], &parts[1])?)?;
        let y = y.reshape([batch, across, across, 2, 2, 4])?.permute([0, 5, 1, 3, 2, 4])?;
        y.reshape(x.shape())
    }
}

/// Diffusion transformer of size S with patches of 2 pixels, which predicts noise: 33M parameters.
pub(super) fn dit(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, extents) = if tiny { (2, 8, [16, 2, 2]) } else { (128, 32, [384, 6, 12]) };
    let net = Dit::new(side, extents, device)?;
    let shape = [batch, 4, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let noise = Tensor::randn(shape, DType::F32, device)?;
    let steps = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    let classes = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        net.forward(&x, &steps, &classes)?.to_dtype(DType::F32)?.mse_loss(&noise, Reduction::Mean)
    }))
}

//! Images by perceptrons alone: gates that mix the positions of half of the channels (Liu et al., 2021).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, LayerNorm, Linear, Module};
use forebay::tensor::Tensor;

use super::Workload;

/// Block of gMLP. The gate is a linear layer over positions, which starts near 1.
#[derive(Module)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    gate_norm: LayerNorm,
    gate: Linear,
    down: Linear,
}

impl Block {
    fn new([positions, width, hidden]: [usize; 3], device: &Device) -> Result<Self> {
        let weight = Tensor::randn([positions, positions], DType::F32, device)?.mul(1e-3)?;
        let bias = Tensor::ones([positions], DType::F32, device)?;
        Ok(Self {
            norm: LayerNorm::new([width], device)?,
            up: Linear::new(width, hidden, device)?,
            gate_norm: LayerNorm::new([hidden / 2], device)?,
            gate: Linear::from_parameters(weight.detach().to_leaf()?, Some(bias.to_leaf()?))?,
            down: Linear::new(hidden / 2, width, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let parts = self.up.forward(&self.norm.forward(x)?)?.gelu()?.chunk(2, -1)?;
        let gate = self.gate_norm.forward(&parts[1])?.transpose(1, 2)?;
        let gate = self.gate.forward(&gate)?.transpose(1, 2)?;
        x.add(&self.down.forward(&parts[0].mul(&gate)?)?)
    }
}

#[derive(Module)]
struct Gmlp {
    patches: Conv2d,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

/// Classifier of images by gMLP: twelve blocks of width 256.
pub(super) fn gmlp(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, side, patch, width, hidden, layers] =
        if tiny { [2, 16, 4, 8, 16, 2] } else { [64, 224, 16, 256, 1536, 12] };
    let options = Conv2dOptions { stride: [patch; 2], ..Conv2dOptions::default() };
    let positions = (side / patch) * (side / patch);
    let net = Gmlp {
        patches: Conv2d::new(3, width, patch, options, device)?,
        blocks: (0..layers).map(|_| Block::new([positions, width, hidden], device)).collect::<Result<_>>()?,
        norm: LayerNorm::new([width], device)?,
        head: Linear::new(width, 1000, device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.patches.forward(&x)?.flatten(2, -1)?.transpose(1, 2)?;
        let x = net.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        net.head.forward(&net.norm.forward(&x)?.mean([1], false)?)?.cross_entropy(&target)
    }))
}

//! Segmentation, GANs, speech.

use forebay::nn::{
    AttentionMasks, BatchNorm2d, Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, ConvTranspose2d,
    ConvTranspose2dOptions, Flatten, Gelu, GroupNorm, LayerNorm, LeakyRelu, Linear, Module, ModuleDict, Relu,
    Sequential, Silu, SpectralNorm, Tanh, TransformerActivation, TransformerEncoder, TransformerOptions,
    WeightNorm,
};
use forebay::ops::{Pool2dOptions, cat};

use super::*;

#[derive(Module)]
struct UNet {
    downs: Vec<Sequential>,
    middle: Sequential,
    ups: Vec<ConvTranspose2d>,
    joins: Vec<Sequential>,
    heads: ModuleDict<Conv2d>,
}

impl UNet {
    fn new(device: &Device) -> Result<Self> {
        let padded = Conv2dOptions { padding: [1; 2], ..Conv2dOptions::default() };
        let double = |inputs, outputs| -> Result<Sequential> {
            Ok(Sequential::new()
                .add(Conv2d::new(inputs, outputs, [3; 2], padded, device)?)
                .add(GroupNorm::new(2, outputs, device)?)
                .add(Silu {})
                .add(Conv2d::new(outputs, outputs, [3; 2], padded, device)?)
                .add(GroupNorm::new(2, outputs, device)?)
                .add(Silu {}))
        };
        let twice = ConvTranspose2dOptions { stride: [2; 2], ..ConvTranspose2dOptions::default() };
        let up = |inputs, outputs| ConvTranspose2d::new(inputs, outputs, [2; 2], twice, device);
        let head = |outputs| Conv2d::new(4, outputs, [1; 2], Conv2dOptions::default(), device);
        Ok(Self {
            downs: vec![double(2, 4)?, double(4, 6)?],
            middle: double(6, 8)?,
            ups: vec![up(8, 6)?, up(6, 4)?],
            joins: vec![double(12, 6)?, double(8, 4)?],
            heads: [("mask", head(1)?), ("edges", head(2)?)].into_iter().collect(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let (mut x, mut skips) = (x.clone(), Vec::new());
        for down in &self.downs {
            let skip = down.forward(&x)?;
            x = skip.max_pool2d(Pool2dOptions::new(2))?;
            skips.push(skip);
        }
        x = self.middle.forward(&x)?;
        for ((up, join), skip) in self.ups.iter().zip(&self.joins).zip(skips.iter().rev()) {
            x = join.forward(&cat(&[skip, &up.forward(&x)?], 1)?)?;
        }
        self.heads.values().map(|head| head.forward(&x)).collect()
    }
}

fn generator(device: &Device) -> Result<Sequential> {
    let up = |inputs, outputs, stride: usize, padding: usize| {
        let (stride, padding) = ([stride; 2], [padding; 2]);
        let options =
            ConvTranspose2dOptions { stride, padding, bias: false, ..ConvTranspose2dOptions::default() };
        ConvTranspose2d::new(inputs, outputs, [4; 2], options, device)
    };
    Ok(Sequential::new()
        .add(up(6, 8, 1, 0)?)
        .add(BatchNorm2d::new(8, device)?)
        .add(Relu {})
        .add(up(8, 4, 2, 1)?)
        .add(BatchNorm2d::new(4, device)?)
        .add(Relu {})
        .add(up(4, 2, 2, 1)?)
        .add(Tanh {}))
}

fn discriminator(device: &Device) -> Result<Sequential> {
    let down = |inputs, outputs, bias| {
        let options = Conv2dOptions { stride: [2; 2], padding: [1; 2], bias, ..Conv2dOptions::default() };
        SpectralNorm::new(Conv2d::new(inputs, outputs, [4; 2], options, device)?)
    };
    Ok(Sequential::new()
        .add(down(2, 4, false)?)
        .add(LeakyRelu { negative_slope: 0.2 })
        .add(down(4, 6, true)?)
        .add(LeakyRelu { negative_slope: 0.2 })
        .add(Flatten::default())
        .add(SpectralNorm::new(Linear::new(24, 1, device)?)?.n_power_iterations(2)))
}

#[derive(Module)]
struct Wav2Vec2ConvLayer {
    conv: Conv1d,
    layer_norm: Option<GroupNorm>,
}

#[derive(Module)]
struct ConvPositionalEmbedding {
    conv: WeightNorm<Conv1d>,
}

/// Feature encoder and transformer of wav2vec 2.0.
#[derive(Module)]
struct Wav2Vec2 {
    conv_layers: Vec<Wav2Vec2ConvLayer>,
    projection: (LayerNorm, Linear),
    pos_conv_embed: ConvPositionalEmbedding,
    encoder: TransformerEncoder,
}

impl Wav2Vec2 {
    fn new(device: &Device) -> Result<Self> {
        let layer = |inputs, kernel, stride, norm| -> Result<Wav2Vec2ConvLayer> {
            let options = Conv1dOptions { stride: [stride], bias: false, ..Conv1dOptions::default() };
            Ok(Wav2Vec2ConvLayer {
                conv: Conv1d::new(inputs, 6, [kernel], options, device)?,
                layer_norm: norm,
            })
        };
        let near = Conv1dOptions { padding: [2], groups: 2, ..Conv1dOptions::default() };
        let options = TransformerOptions {
            feedforward: 12,
            dropout: 0.0,
            activation: TransformerActivation::Gelu,
            batch_first: true,
            ..TransformerOptions::default()
        };
        Ok(Self {
            conv_layers: vec![layer(1, 10, 5, Some(GroupNorm::new(6, 6, device)?))?, layer(6, 3, 2, None)?],
            projection: (LayerNorm::new([6], device)?, Linear::new(6, 8, device)?),
            pos_conv_embed: ConvPositionalEmbedding {
                conv: WeightNorm::new(Conv1d::new(8, 8, [4], near, device)?, Some(2))?,
            },
            encoder: TransformerEncoder::new(8, 2, 1, options, device)?,
        })
    }

    fn forward(&self, wave: &Tensor) -> Result<Tensor> {
        let mut x = wave.unsqueeze(1)?;
        for layer in &self.conv_layers {
            x = layer.conv.forward(&x)?;
            if let Some(norm) = &layer.layer_norm {
                x = norm.forward(&x)?;
            }
            x = x.gelu()?;
        }
        let (norm, linear) = &self.projection;
        let x = linear.forward(&norm.forward(&x.transpose(1, 2)?)?)?;
        let near = self.pos_conv_embed.conv.forward(&x.transpose(1, 2)?)?;
        let near = near.narrow(-1, 0, x.shape()[1])?;
        self.encoder.forward(&x.add(&Gelu {}.forward(&near)?.transpose(1, 2)?)?, &AttentionMasks::default())
    }
}

cases! {
    "unet": |c| UNet::new(c.device), |m, x| m.forward(&x[0]);
    "generator": |c| generator(c.device), |m, x| single(m.forward(&x[0]));
    "discriminator": |c| discriminator(c.device), |m, x| single(m.forward(&x[0]));
    "speech": |c| Wav2Vec2::new(c.device), |m, x| single(m.forward(&x[0]));
}

//! Image classifiers, with torchvision's names.

use forebay::dtype::DType;
use forebay::nn::{
    AttentionMasks, BatchNorm2d, Conv2d, Conv2dOptions, Dropout, Forward, Gelu, LayerNorm, Linear, MaxPool2d,
    Module, ModuleDict, MultiheadAttention, MultiheadAttentionOptions, Relu, Sequential, init,
};
use forebay::ops::{Pool2dOptions, PoolOptions, cat};

use super::*;

const STEM: Pool2dOptions = Pool2dOptions { padding: [1; 2], stride: [2; 2], ..THREE };
const THREE: Pool2dOptions = PoolOptions {
    kernel: [3; 2],
    stride: [3; 2],
    padding: [0; 2],
    dilation: [1; 2],
    ceil_mode: false,
    count_include_pad: true,
    divisor_override: None,
};

/// Convolutions with norms; the shortcut is added to their result.
#[derive(Module)]
struct Block {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    conv3: Option<Conv2d>,
    bn3: Option<BatchNorm2d>,
    downsample: Option<ConvNorm>,
}

impl Block {
    fn new(inputs: usize, planes: usize, stride: usize, bottleneck: bool, device: &Device) -> Result<Self> {
        let norm = |n| BatchNorm2d::new(n, device);
        let outputs = if bottleneck { 4 * planes } else { planes };
        let down = if stride != 1 || inputs != outputs {
            Some((conv(inputs, outputs, 1, stride, 1, device)?, norm(outputs)?))
        } else {
            None
        };
        let (first, second) = match bottleneck {
            true => (conv(inputs, planes, 1, 1, 1, device)?, conv(planes, planes, 3, stride, 1, device)?),
            false => (conv(inputs, planes, 3, stride, 1, device)?, conv(planes, planes, 3, 1, 1, device)?),
        };
        let (conv3, bn3) = match bottleneck {
            true => (Some(conv(planes, outputs, 1, 1, 1, device)?), Some(norm(outputs)?)),
            false => (None, None),
        };
        Ok(Self {
            conv1: first,
            bn1: norm(planes)?,
            conv2: second,
            bn2: norm(planes)?,
            conv3,
            bn3,
            downsample: down,
        })
    }
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.bn1.forward_relu(&self.conv1.forward(x)?)?;
        let mut y = self.bn2.forward(&self.conv2.forward(&y)?)?;
        if let (Some(conv), Some(norm)) = (&self.conv3, &self.bn3) {
            y = norm.forward(&conv.forward(&y.relu()?)?)?;
        }
        let short = match &self.downsample {
            Some((conv, norm)) => norm.forward(&conv.forward(x)?)?,
            None => x.clone(),
        };
        y.add(&short)?.relu()
    }
}

#[derive(Module)]
struct ResNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layer1: Sequential,
    layer2: Sequential,
    fc: Linear,
}

impl ResNet {
    fn new(planes: [usize; 2], bottleneck: bool, device: &Device) -> Result<Self> {
        let wide = if bottleneck { 4 } else { 1 };
        let block = |inputs, planes, stride| Block::new(inputs, planes, stride, bottleneck, device);
        let [a, b] = planes;
        Ok(Self {
            conv1: conv(3, 4, 7, 2, 1, device)?,
            bn1: BatchNorm2d::new(4, device)?,
            layer1: Sequential::new().add(block(4, a, 1)?).add(block(a * wide, a, 1)?),
            layer2: Sequential::new().add(block(a * wide, b, 2)?),
            fc: Linear::new(b * wide, 5, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.bn1.forward_relu(&self.conv1.forward(x)?)?.max_pool2d(STEM)?;
        let x = self.layer2.forward(&self.layer1.forward(&x)?)?;
        self.fc.forward(&x.adaptive_avg_pool2d([1; 2])?.flatten(1, -1)?)
    }
}

#[derive(Module)]
struct Vgg {
    features: Sequential,
    classifier: Sequential,
}

impl Vgg {
    fn new(device: &Device) -> Result<Self> {
        let padded = Conv2dOptions { padding: [1; 2], ..Conv2dOptions::default() };
        let mut features = Sequential::new();
        for (inputs, outputs) in [(3, 4), (4, 6)] {
            features = features
                .add(Conv2d::new(inputs, outputs, [3; 2], padded, device)?)
                .add(BatchNorm2d::new(outputs, device)?)
                .add(Relu {})
                .add(MaxPool2d(Pool2dOptions::new(2)));
        }
        let classifier = Sequential::new()
            .add(Linear::new(24, 10, device)?)
            .add(Relu {})
            .add(Dropout::new(0.0))
            .add(Linear::new(10, 10, device)?)
            .add(Relu {})
            .add(Dropout::new(0.0))
            .add(Linear::new(10, 5, device)?);
        Ok(Self { features, classifier })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.classifier.forward(&self.features.forward(x)?.adaptive_avg_pool2d([2; 2])?.flatten(1, -1)?)
    }
}

/// Squeeze-and-excitation: weights for the channels, computed from all channel means.
#[derive(Module)]
struct SqueezeExcitation {
    fc1: Conv2d,
    fc2: Conv2d,
    #[module(skip)]
    activation: fn(&Tensor) -> Result<Tensor>,
    #[module(skip)]
    scale: fn(&Tensor) -> Result<Tensor>,
}

impl Forward for SqueezeExcitation {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let s = (self.activation)(&self.fc1.forward(&x.adaptive_avg_pool2d([1; 2])?)?)?;
        x.mul(&(self.scale)(&self.fc2.forward(&s)?)?)
    }
}

type ActivationFn = fn(&Tensor) -> Result<Tensor>;

/// Returns a convolution, its norm and an activation as a [`Sequential`], which defines the names.
fn unit(
    [inputs, outputs, kernel, stride, groups]: [usize; 5],
    eps: f64,
    momentum: f64,
    activation: Option<ActivationFn>,
    device: &Device,
) -> Result<Sequential> {
    let norm = BatchNorm2d::new(outputs, device)?.eps(eps).momentum(momentum);
    let layers = Sequential::new().add(conv(inputs, outputs, kernel, stride, groups, device)?).add(norm);
    Ok(match activation {
        Some(activation) => layers.add_fn(activation),
        None => layers,
    })
}

/// Inverted residual: expansion, depthwise convolution, squeeze-and-excitation, projection; shortcut if possible.
#[derive(Module)]
struct InvertedResidual {
    block: Sequential,
    shortcut: bool,
}

struct InvertedResidualOptions {
    channels: [usize; 3],
    kernel: usize,
    stride: usize,
    squeeze: Option<usize>,
    activation: ActivationFn,
    norm: (f64, f64),
    parts: (ActivationFn, ActivationFn),
}

impl InvertedResidual {
    fn new(s: &InvertedResidualOptions, device: &Device) -> Result<Self> {
        let [inputs, wide, outputs] = s.channels;
        let (eps, momentum) = s.norm;
        let part = |values, activation| unit(values, eps, momentum, activation, device);
        let mut block = Sequential::new();
        if wide != inputs {
            block = block.add(part([inputs, wide, 1, 1, 1], Some(s.activation))?);
        }
        block = block.add(part([wide, wide, s.kernel, s.stride, wide], Some(s.activation))?);
        if let Some(narrow) = s.squeeze {
            let plain = Conv2dOptions::default();
            let fc1 = Conv2d::new(wide, narrow, [1; 2], plain, device)?;
            let fc2 = Conv2d::new(narrow, wide, [1; 2], plain, device)?;
            block = block.add(SqueezeExcitation { fc1, fc2, activation: s.parts.0, scale: s.parts.1 });
        }
        block = block.add(part([wide, outputs, 1, 1, 1], None)?);
        Ok(Self { block, shortcut: s.stride == 1 && inputs == outputs })
    }
}

impl Forward for InvertedResidual {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.block.forward(x)?;
        if self.shortcut { y.add(x) } else { Ok(y) }
    }
}

#[derive(Module)]
struct Classifier {
    features: Sequential,
    classifier: Sequential,
}

impl Classifier {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.classifier.forward(&self.features.forward(x)?.adaptive_avg_pool2d([1; 2])?.flatten(1, -1)?)
    }
}

fn mobilenet_v3(device: &Device) -> Result<Classifier> {
    let norm = (1e-3, 0.01);
    let block = |channels, kernel, stride, squeeze, activation| {
        let parts: (ActivationFn, ActivationFn) = (Tensor::relu, Tensor::hardsigmoid);
        InvertedResidual::new(
            &InvertedResidualOptions { channels, kernel, stride, squeeze, activation, norm, parts },
            device,
        )
    };
    let swish = Some(Tensor::hardswish as ActivationFn);
    Ok(Classifier {
        features: Sequential::new()
            .add(unit([3, 8, 3, 2, 1], norm.0, norm.1, swish, device)?)
            .add(block([8, 8, 8], 3, 2, Some(8), Tensor::relu)?)
            .add(block([8, 16, 8], 5, 1, Some(8), Tensor::hardswish)?)
            .add(block([8, 16, 8], 3, 2, None, Tensor::hardswish)?)
            .add(unit([8, 48, 1, 1, 1], norm.0, norm.1, swish, device)?),
        classifier: Sequential::new()
            .add(Linear::new(48, 10, device)?)
            .add_fn(Tensor::hardswish)
            .add(Dropout::new(0.0))
            .add(Linear::new(10, 4, device)?),
    })
}

fn efficientnet(device: &Device) -> Result<Classifier> {
    let norm = (1e-5, 0.1);
    let block = |channels, kernel, stride, squeeze| {
        let parts: (ActivationFn, ActivationFn) = (Tensor::silu, Tensor::sigmoid);
        let activation: ActivationFn = Tensor::silu;
        InvertedResidual::new(
            &InvertedResidualOptions {
                channels,
                kernel,
                stride,
                squeeze: Some(squeeze),
                activation,
                norm,
                parts,
            },
            device,
        )
    };
    let swish = Some(Tensor::silu as ActivationFn);
    Ok(Classifier {
        features: Sequential::new()
            .add(unit([3, 8, 3, 2, 1], norm.0, norm.1, swish, device)?)
            .add(Sequential::new().add(block([8, 8, 8], 3, 1, 2)?))
            .add(Sequential::new().add(block([8, 16, 8], 5, 2, 2)?).add(block([8, 16, 8], 5, 1, 2)?))
            .add(unit([8, 12, 1, 1, 1], norm.0, norm.1, swish, device)?),
        classifier: Sequential::new().add(Dropout::new(0.0)).add(Linear::new(12, 4, device)?),
    })
}

#[derive(Module)]
struct DenseLayer {
    norm1: BatchNorm2d,
    conv1: Conv2d,
    norm2: BatchNorm2d,
    conv2: Conv2d,
}

#[derive(Module)]
struct DenseBlock(#[module(name = "")] ModuleDict<DenseLayer>);

impl DenseBlock {
    fn new(layers: usize, inputs: usize, growth: usize, device: &Device) -> Result<Self> {
        let layer = |k: usize| {
            let (inputs, between) = (inputs + k * growth, 2 * growth);
            let layer = DenseLayer {
                norm1: BatchNorm2d::new(inputs, device)?,
                conv1: conv(inputs, between, 1, 1, 1, device)?,
                norm2: BatchNorm2d::new(between, device)?,
                conv2: conv(between, growth, 3, 1, 1, device)?,
            };
            Ok((format!("denselayer{}", k + 1), layer))
        };
        Ok(Self((0..layers).map(layer).collect::<Result<_>>()?))
    }
}

impl Forward for DenseBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in self.0.values() {
            let y = layer.conv1.forward(&layer.norm1.forward_relu(&x)?)?;
            x = cat(&[&x, &layer.conv2.forward(&layer.norm2.forward_relu(&y)?)?], 1)?;
        }
        Ok(x)
    }
}

#[derive(Module)]
struct DenseNet {
    features: Sequential,
    classifier: Linear,
}

impl DenseNet {
    fn new(device: &Device) -> Result<Self> {
        let transition = Sequential::new()
            .add_named("norm", BatchNorm2d::new(10, device)?)
            .add_named("relu", Relu {})
            .add_named("conv", conv(10, 5, 1, 1, 1, device)?)
            .add_fn(|x| x.avg_pool2d(Pool2dOptions::new(2)));
        let features = Sequential::new()
            .add_named("conv0", conv(3, 4, 7, 2, 1, device)?)
            .add_named("norm0", BatchNorm2d::new(4, device)?)
            .add_named("relu0", Relu {})
            .add_named("pool0", MaxPool2d(STEM))
            .add_named("denseblock1", DenseBlock::new(2, 4, 3, device)?)
            .add_named("transition1", transition)
            .add_named("denseblock2", DenseBlock::new(2, 5, 3, device)?)
            .add_named("norm5", BatchNorm2d::new(11, device)?);
        Ok(Self { features, classifier: Linear::new(11, 5, device)? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.features.forward(x)?.relu()?.adaptive_avg_pool2d([1; 2])?;
        self.classifier.forward(&x.flatten(1, -1)?)
    }
}

/// Layer norm over the channels of images.
#[derive(Module)]
struct LayerNorm2d(#[module(name = "")] LayerNorm);

impl LayerNorm2d {
    fn new(channels: usize, device: &Device) -> Result<Self> {
        Ok(Self(LayerNorm::new([channels], device)?.eps(1e-6)))
    }
}

impl Forward for LayerNorm2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(&x.permute([0, 2, 3, 1])?)?.permute([0, 3, 1, 2])
    }
}

#[derive(Module)]
struct ConvNextBlock {
    layer_scale: Tensor,
    block: Sequential,
}

impl ConvNextBlock {
    fn new(channels: usize, device: &Device) -> Result<Self> {
        let depthwise = Conv2dOptions { padding: [3; 2], groups: channels, ..Conv2dOptions::default() };
        let norm = LayerNorm::new([channels], device)?.eps(1e-6);
        let block = Sequential::new()
            .add(Conv2d::new(channels, channels, [7; 2], depthwise, device)?)
            .add_fn(|x| x.permute([0, 2, 3, 1]))
            .add(norm)
            .add(Linear::new(channels, 4 * channels, device)?)
            .add(Gelu {})
            .add(Linear::new(4 * channels, channels, device)?)
            .add_fn(|x| x.permute([0, 3, 1, 2]));
        let scale = || Tensor::full([channels, 1, 1], 0.5, DType::F32, device);
        Ok(Self { layer_scale: init::create_parameter(scale)?, block })
    }
}

impl Forward for ConvNextBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.block.forward(x)?.mul(&self.layer_scale)?.add(x)
    }
}

fn convnext(device: &Device) -> Result<Classifier> {
    let patches = |inputs, outputs, size: usize| {
        let options = Conv2dOptions { stride: [size; 2], ..Conv2dOptions::default() };
        Conv2d::new(inputs, outputs, [size; 2], options, device)
    };
    let block = |channels| ConvNextBlock::new(channels, device);
    let features = Sequential::new()
        .add(Sequential::new().add(patches(3, 4, 4)?).add(LayerNorm2d::new(4, device)?))
        .add(Sequential::new().add(block(4)?))
        .add(Sequential::new().add(LayerNorm2d::new(4, device)?).add(patches(4, 6, 2)?))
        .add(Sequential::new().add(block(6)?).add(block(6)?));
    let norm = LayerNorm::new([6], device)?.eps(1e-6);
    Ok(Classifier {
        features,
        classifier: Sequential::new().add(norm).add_fn(|x| Ok(x.clone())).add(Linear::new(6, 3, device)?),
    })
}

#[derive(Module)]
struct VitBlock {
    ln_1: LayerNorm,
    self_attention: MultiheadAttention,
    ln_2: LayerNorm,
    mlp: Sequential,
}

#[derive(Module)]
struct VitEncoder {
    pos_embedding: Tensor,
    layers: ModuleDict<VitBlock>,
    ln: LayerNorm,
}

#[derive(Module)]
struct Vit {
    class_token: Tensor,
    conv_proj: Conv2d,
    encoder: VitEncoder,
    heads: ModuleDict<Linear>,
}

impl Vit {
    fn new(device: &Device) -> Result<Self> {
        let zeros = |shape: &[usize]| init::create_parameter(|| Tensor::zeros(shape, DType::F32, device));
        let norm = || -> Result<LayerNorm> { Ok(LayerNorm::new([8], device)?.eps(1e-6)) };
        let options = MultiheadAttentionOptions { batch_first: true, ..MultiheadAttentionOptions::default() };
        let block = |k| {
            let mlp = Sequential::new()
                .add(Linear::new(8, 12, device)?)
                .add(Gelu {})
                .add(Dropout::new(0.0))
                .add(Linear::new(12, 8, device)?);
            let self_attention = MultiheadAttention::new(8, 2, options, device)?;
            Ok((format!("encoder_layer_{k}"), VitBlock { ln_1: norm()?, self_attention, ln_2: norm()?, mlp }))
        };
        let layers = (0..2).map(block).collect::<Result<_>>()?;
        let patches = Conv2dOptions { stride: [4; 2], ..Conv2dOptions::default() };
        Ok(Self {
            class_token: zeros(&[1, 1, 8])?,
            conv_proj: Conv2d::new(3, 8, [4; 2], patches, device)?,
            encoder: VitEncoder { pos_embedding: zeros(&[1, 5, 8])?, layers, ln: norm()? },
            heads: [("head", Linear::new(8, 3, device)?)].into_iter().collect(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.conv_proj.forward(x)?.flatten(2, -1)?.transpose(1, 2)?;
        let class = self.class_token.expand([x.shape()[0] as isize, -1, -1])?;
        let mut x = cat(&[&class, &x], 1)?.add(&self.encoder.pos_embedding)?;
        for block in self.encoder.layers.values() {
            let y = block.ln_1.forward(&x)?;
            x = block.self_attention.forward(&y, &y, &y, &AttentionMasks::default())?.add(&x)?;
            x = block.mlp.forward(&block.ln_2.forward(&x)?)?.add(&x)?;
        }
        let x = self.encoder.ln.forward(&x)?.select(1, 0)?;
        self.heads.values().try_fold(x, |x, head| head.forward(&x))
    }
}

#[derive(Module)]
struct MixerBlock {
    norm1: LayerNorm,
    tokens: Sequential,
    norm2: LayerNorm,
    channels: Sequential,
}

#[derive(Module)]
struct Mixer {
    stem: Conv2d,
    blocks: Vec<MixerBlock>,
    norm: LayerNorm,
    head: Linear,
}

impl Mixer {
    fn new(device: &Device) -> Result<Self> {
        let mlp = |n, between| -> Result<Sequential> {
            Ok(Sequential::new()
                .add(Linear::new(n, between, device)?)
                .add(Gelu {})
                .add(Linear::new(between, n, device)?))
        };
        let norm = || LayerNorm::new([6], device);
        let block =
            |_| Ok(MixerBlock { norm1: norm()?, tokens: mlp(4, 5)?, norm2: norm()?, channels: mlp(6, 8)? });
        let patches = Conv2dOptions { stride: [4; 2], ..Conv2dOptions::default() };
        Ok(Self {
            stem: Conv2d::new(3, 6, [4; 2], patches, device)?,
            blocks: (0..2).map(block).collect::<Result<_>>()?,
            norm: norm()?,
            head: Linear::new(6, 3, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.stem.forward(x)?.flatten(2, -1)?.transpose(1, 2)?;
        for block in &self.blocks {
            let y = block.tokens.forward(&block.norm1.forward(&x)?.transpose(1, 2)?)?;
            x = x.add(&y.transpose(1, 2)?)?;
            x = x.add(&block.channels.forward(&block.norm2.forward(&x)?)?)?;
        }
        self.head.forward(&self.norm.forward(&x)?.mean([1], false)?)
    }
}

cases! {
    "resnet_basic": |c| ResNet::new([4, 6], false, c.device), |m, x| single(m.forward(&x[0]));
    "resnet_bottleneck": |c| ResNet::new([2, 3], true, c.device), |m, x| single(m.forward(&x[0]));
    "vgg": |c| Vgg::new(c.device), |m, x| single(m.forward(&x[0]));
    "mobilenet_v3": |c| mobilenet_v3(c.device), |m, x| single(m.forward(&x[0]));
    "efficientnet": |c| efficientnet(c.device), |m, x| single(m.forward(&x[0]));
    "densenet": |c| DenseNet::new(c.device), |m, x| single(m.forward(&x[0]));
    "convnext": |c| convnext(c.device), |m, x| single(m.forward(&x[0]));
    "vit": |c| Vit::new(c.device), |m, x| single(m.forward(&x[0]));
    "mixer": |c| Mixer::new(c.device), |m, x| single(m.forward(&x[0]));
}

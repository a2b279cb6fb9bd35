//! Models of other fields: image classification with depthwise filters, generation by transposed convolutions,
//! translation, audio, recommendation and volumes.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{
    AttentionMasks, BatchNorm2d, BatchNorm3d, Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Conv3d,
    Conv3dOptions, ConvTranspose2d, ConvTranspose2dOptions, Embedding, EmbeddingBag, LayerNorm, Linear,
    Module, TransformerDecoderLayer, TransformerEncoderLayer, TransformerOptions,
};
use forebay::ops::{EmbeddingBagMode, Reduction, cat, stack};
use forebay::tensor::Tensor;

use super::Workload;

/// Block of ConvNeXt: a depthwise 7 x 7 filter, then a network over the channels of each pixel.
#[derive(Module)]
struct DepthwiseBlock {
    filter: Conv2d,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
    scale: Tensor,
}

impl DepthwiseBlock {
    fn new(width: usize, device: &Device) -> Result<Self> {
        let options = Conv2dOptions { padding: [3, 3], groups: width, ..Conv2dOptions::default() };
        Ok(Self {
            filter: Conv2d::new(width, width, 7, options, device)?,
            norm: LayerNorm::new([width], device)?,
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
            scale: Tensor::full([width], 1e-6, DType::F32, device)?.to_leaf()?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.filter.forward(x)?.permute([0, 2, 3, 1])?;
        let y = self.down.forward(&self.up.forward(&self.norm.forward(&y)?)?.gelu()?)?;
        let y = y.mul(&self.scale.to_dtype(y.dtype())?)?;
        x.add(&y.permute([0, 3, 1, 2])?)
    }
}

#[derive(Module)]
struct ConvNext {
    stem: Conv2d,
    stages: Vec<Vec<DepthwiseBlock>>,
    downs: Vec<Conv2d>,
    head: Linear,
}

/// Image classifier of depthwise filters and networks over channels.
pub(super) fn convnext(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, widths, counts): (_, _, &[usize], &[usize]) =
        if tiny { (2, 16, &[4, 8], &[1, 1]) } else { (64, 224, &[96, 192, 384, 768], &[3, 3, 9, 3]) };
    let shrink = |from: usize, to: usize, by: usize| {
        Conv2d::new(from, to, by, Conv2dOptions { stride: [by; 2], ..Conv2dOptions::default() }, device)
    };
    let stage = |(&width, &count): (&usize, &usize)| {
        (0..count).map(|_| DepthwiseBlock::new(width, device)).collect::<Result<Vec<_>>>()
    };
    let last = widths[widths.len() - 1];
    let net = ConvNext {
        stem: shrink(3, widths[0], 4)?,
        stages: widths.iter().zip(counts).map(stage).collect::<Result<_>>()?,
        downs: widths.windows(2).map(|w| shrink(w[0], w[1], 2)).collect::<Result<_>>()?,
        head: Linear::new(last, 1000, device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let mut x = net.stem.forward(&x)?;
        for (k, stage) in net.stages.iter().enumerate() {
            if k > 0 {
                x = net.downs[k - 1].forward(&x)?;
            }
            x = stage.iter().try_fold(x, |x, block| block.forward(&x))?;
        }
        net.head.forward(&x.mean([2, 3], false)?)?.cross_entropy(&target)
    }))
}

/// Inverted residual block of MobileNet V2.
#[derive(Module)]
struct InvertedResidual {
    expand: Conv2d,
    expand_norm: BatchNorm2d,
    filter: Conv2d,
    filter_norm: BatchNorm2d,
    project: Conv2d,
    project_norm: BatchNorm2d,
    is_residual: bool,
}

impl InvertedResidual {
    fn new(inputs: usize, outputs: usize, stride: usize, device: &Device) -> Result<Self> {
        let hidden = 6 * inputs;
        let point = || Conv2dOptions { bias: false, ..Conv2dOptions::default() };
        let depthwise =
            Conv2dOptions { stride: [stride; 2], padding: [1, 1], groups: hidden, bias: false, ..point() };
        Ok(Self {
            expand: Conv2d::new(inputs, hidden, 1, point(), device)?,
            expand_norm: BatchNorm2d::new(hidden, device)?,
            filter: Conv2d::new(hidden, hidden, 3, depthwise, device)?,
            filter_norm: BatchNorm2d::new(hidden, device)?,
            project: Conv2d::new(hidden, outputs, 1, point(), device)?,
            project_norm: BatchNorm2d::new(outputs, device)?,
            is_residual: stride == 1 && inputs == outputs,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let relu6 = |x: Tensor| x.clamp(0.0, 6.0);
        let y = relu6(self.expand_norm.forward(&self.expand.forward(x)?)?)?;
        let y = relu6(self.filter_norm.forward(&self.filter.forward(&y)?)?)?;
        let y = self.project_norm.forward(&self.project.forward(&y)?)?;
        if self.is_residual { x.add(&y) } else { Ok(y) }
    }
}

#[derive(Module)]
struct MobileNet {
    stem: Conv2d,
    blocks: Vec<InvertedResidual>,
    head: Linear,
}

/// Image classifier of inverted residual blocks.
pub(super) fn mobilenet(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side) = if tiny { (2, 16) } else { (64, 224) };
    // Outputs, blocks and stride of each stage.
    let stages: &[[usize; 3]] = if tiny {
        &[[8, 2, 2]]
    } else {
        &[[16, 1, 1], [24, 2, 2], [32, 3, 2], [64, 4, 2], [96, 3, 1], [160, 3, 2], [320, 1, 1]]
    };
    let mut inputs = if tiny { 4 } else { 32 };
    let options = Conv2dOptions { stride: [2, 2], padding: [1, 1], ..Conv2dOptions::default() };
    let stem = Conv2d::new(3, inputs, 3, options, device)?;
    let mut blocks = Vec::new();
    for &[outputs, count, stride] in stages {
        for k in 0..count {
            let stride = if k == 0 { stride } else { 1 };
            blocks.push(InvertedResidual::new(inputs, outputs, stride, device)?);
            inputs = outputs;
        }
    }
    let net = MobileNet { stem, blocks, head: Linear::new(inputs, 1000, device)? };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randint(0, 1000, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.blocks.iter().try_fold(net.stem.forward(&x)?, |x, block| block.forward(&x))?;
        net.head.forward(&x.mean([2, 3], false)?)?.cross_entropy(&target)
    }))
}

#[derive(Module)]
struct Autoencoder {
    down: Vec<Conv2d>,
    down_norms: Vec<BatchNorm2d>,
    moments: Linear,
    start: Linear,
    up: Vec<ConvTranspose2d>,
    up_norms: Vec<BatchNorm2d>,
    end: Conv2d,
}

/// Variational autoencoder of images: convolutions of stride 2, and transposed ones.
pub(super) fn autoencoder(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, widths, latent): (_, _, &[usize], usize) =
        if tiny { (2, 16, &[4, 8], 4) } else { (128, 64, &[64, 128, 256, 512], 128) };
    let low = side >> widths.len();
    let features = widths[widths.len() - 1] * low * low;
    let inputs = [&[3], widths].concat();
    let options = Conv2dOptions { stride: [2, 2], padding: [1, 1], ..Conv2dOptions::default() };
    let transposed =
        ConvTranspose2dOptions { stride: [2, 2], padding: [1, 1], ..ConvTranspose2dOptions::default() };
    let outputs: Vec<usize> = widths.iter().rev().skip(1).copied().chain([32]).collect();
    let net = Autoencoder {
        down: inputs
            .windows(2)
            .map(|w| Conv2d::new(w[0], w[1], 4, options, device))
            .collect::<Result<_>>()?,
        down_norms: widths.iter().map(|&w| BatchNorm2d::new(w, device)).collect::<Result<_>>()?,
        moments: Linear::new(features, 2 * latent, device)?,
        start: Linear::new(latent, features, device)?,
        up: widths
            .iter()
            .rev()
            .zip(&outputs)
            .map(|(&from, &to)| ConvTranspose2d::new(from, to, 4, transposed, device))
            .collect::<Result<_>>()?,
        up_norms: outputs.iter().map(|&w| BatchNorm2d::new(w, device)).collect::<Result<_>>()?,
        end: Conv2d::new(32, 3, 3, Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() }, device)?,
    };
    let last = widths[widths.len() - 1];
    let shape = [batch, 3, side, side];
    let x = Tensor::rand(shape, DType::F32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let mut h = x.clone();
        for (conv, norm) in net.down.iter().zip(&net.down_norms) {
            h = norm.forward(&conv.forward(&h)?)?.leaky_relu(0.2)?;
        }
        let moments = net.moments.forward(&h.flatten(1, -1)?)?.to_dtype(DType::F32)?;
        let parts = moments.chunk(2, 1)?;
        let noise = Tensor::randn(parts[0].shape(), DType::F32, x.device())?;
        let z = parts[0].add(&parts[1].mul(0.5)?.exp()?.mul(&noise)?)?;
        let mut h = net.start.forward(&z)?.reshape([batch, last, low, low])?;
        for (conv, norm) in net.up.iter().zip(&net.up_norms) {
            h = norm.forward(&conv.forward(&h)?)?.relu()?;
        }
        let image = net.end.forward(&h)?.to_dtype(DType::F32)?.sigmoid()?;
        let divergence = parts[1].add(1.0)?.sub(&parts[0].square()?)?.sub(&parts[1].exp()?)?.mean_all()?;
        image.mse_loss(&x, Reduction::Mean)?.sub(&divergence.mul(0.5e-3)?)
    }))
}

#[derive(Module)]
struct Translator {
    source: Embedding,
    target: Embedding,
    encoder: Vec<TransformerEncoderLayer>,
    decoder: Vec<TransformerDecoderLayer>,
    head: Linear,
}

/// Encoder and decoder of a transformer with PyTorch's layers, dropout included.
pub(super) fn translator(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, length, width, heads, layers, vocabulary] =
        if tiny { [2, 8, 16, 2, 1, 50] } else { [64, 128, 512, 8, 6, 16_000] };
    let options =
        TransformerOptions { batch_first: true, feedforward: 4 * width, ..TransformerOptions::default() };
    let net = Translator {
        source: Embedding::new(vocabulary, width, device)?,
        target: Embedding::new(vocabulary, width, device)?,
        encoder: (0..layers)
            .map(|_| TransformerEncoderLayer::new(width, heads, options, device))
            .collect::<Result<_>>()?,
        decoder: (0..layers)
            .map(|_| TransformerDecoderLayer::new(width, heads, options, device))
            .collect::<Result<_>>()?,
        head: Linear::new(width, vocabulary, device)?,
    };
    let words = || Tensor::randint(0, vocabulary as i64, [batch, length], DType::I32, device);
    let (source, text, next) = (words()?, words()?, words()?.reshape([batch * length])?);
    Ok(Workload::new(&[batch, length], net, move |net| {
        let (none, causal) = (AttentionMasks::default(), AttentionMasks::causal());
        let memory =
            net.encoder.iter().try_fold(net.source.forward(&source)?, |x, layer| layer.forward(&x, &none))?;
        let x = net
            .decoder
            .iter()
            .try_fold(net.target.forward(&text)?, |x, layer| layer.forward(&x, &memory, &causal, &none))?;
        net.head.forward(&x.flatten(0, 1)?)?.cross_entropy(&next)
    }))
}

/// Layer of WaveNet: a dilated filter with a gate, and a residual sum.
#[derive(Module)]
struct GatedFilter {
    filter: Conv1d,
    point: Conv1d,
}

#[derive(Module)]
struct Audio {
    stem: Conv1d,
    layers: Vec<GatedFilter>,
    head: Conv1d,
}

/// Audio model of dilated one-dimensional convolutions with gates.
pub(super) fn audio(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, length, width, count] = if tiny { [2, 32, 4, 2] } else { [8, 8192, 128, 16] };
    let point = Conv1dOptions::default();
    let layer = |k: usize| {
        let dilation = 1 << (k % 8);
        let options = Conv1dOptions { dilation: [dilation], padding: [dilation], ..Conv1dOptions::default() };
        Ok(GatedFilter {
            filter: Conv1d::new(width, 2 * width, 3, options, device)?,
            point: Conv1d::new(width, width, 1, point, device)?,
        })
    };
    let net = Audio {
        stem: Conv1d::new(1, width, 1, point, device)?,
        layers: (0..count).map(layer).collect::<Result<_>>()?,
        head: Conv1d::new(width, 1, 1, point, device)?,
    };
    let x = Tensor::randn([batch, 1, length], DType::F32, device)?;
    let target = Tensor::randn([batch, 1, length], DType::F32, device)?;
    Ok(Workload::new(&[batch, length], net, move |net| {
        let mut x = net.stem.forward(&x)?;
        for layer in &net.layers {
            let parts = layer.filter.forward(&x)?.chunk(2, 1)?;
            x = x.add(&layer.point.forward(&parts[0].tanh()?.mul(&parts[1].sigmoid()?)?)?)?;
        }
        net.head.forward(&x)?.to_dtype(DType::F32)?.mse_loss(&target, Reduction::Mean)
    }))
}

#[derive(Module)]
struct Recommender {
    tables: Vec<EmbeddingBag>,
    bottom: Vec<Linear>,
    top: Vec<Linear>,
}

/// Click prediction: tables of embeddings, pairwise products of their rows, and two networks (DLRM).
pub(super) fn recommender(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, tables, entries, width, per_bag] =
        if tiny { [4, 3, 20, 8, 2] } else { [4096, 26, 20_000, 64, 4] };
    let pairs = (tables + 1) * tables / 2;
    let layers = |widths: &[usize]| {
        widths.windows(2).map(|w| Linear::new(w[0], w[1], device)).collect::<Result<Vec<_>>>()
    };
    let net = Recommender {
        tables: (0..tables)
            .map(|_| EmbeddingBag::new(entries, width, EmbeddingBagMode::Sum, None, device))
            .collect::<Result<_>>()?,
        bottom: layers(&[13, 512, 256, width])?,
        top: layers(&[width + pairs, 512, 256, 1])?,
    };
    let dense = Tensor::rand([batch, 13], DType::F32, device)?;
    let bags = (0..tables)
        .map(|_| Tensor::randint(0, entries as i64, [batch, per_bag], DType::I32, device))
        .collect::<Result<Vec<_>>>()?;
    let clicked = Tensor::randint(0, 2, [batch, 1], DType::I32, device)?.to_dtype(DType::F32)?;
    let below = Tensor::tril_indices(tables + 1, tables + 1, -1, device)?;
    let chosen = below.select(0, 0)?.mul((tables + 1) as i64)?.add(&below.select(0, 1)?)?;
    Ok(Workload::new(&[batch, tables, entries], net, move |net| {
        let mlp = |layers: &[Linear], x: Tensor| {
            layers.iter().enumerate().try_fold(x, |x, (k, layer)| {
                let y = layer.forward(&x)?;
                if k + 1 < layers.len() { y.relu() } else { Ok(y) }
            })
        };
        let x = mlp(&net.bottom, dense.clone())?.relu()?;
        let mut rows = vec![x.clone()];
        for (table, bag) in net.tables.iter().zip(&bags) {
            rows.push(table.forward(bag, &Default::default())?.to_dtype(x.dtype())?);
        }
        let rows = stack(&rows, 1)?;
        let products = rows.matmul(&rows.transpose(1, 2)?)?.flatten(1, 2)?.index_select(1, &chosen)?;
        let logits = mlp(&net.top, cat(&[x, products], 1)?)?;
        logits.to_dtype(DType::F32)?.binary_cross_entropy_with_logits(&clicked, &Default::default())
    }))
}

#[derive(Module)]
struct VolumeNet {
    convs: Vec<Conv3d>,
    norms: Vec<BatchNorm3d>,
    head: Linear,
}

/// Classifier of volumes by three-dimensional convolutions.
pub(super) fn volume(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, widths): (_, _, &[usize]) =
        if tiny { (2, 8, &[1, 4, 4]) } else { (8, 64, &[1, 32, 32, 64, 64, 128, 128]) };
    let conv = |(k, w): (usize, &[usize])| {
        let stride = [1 + k % 2; 3];
        let options = Conv3dOptions { stride, padding: [1; 3], bias: false, ..Conv3dOptions::default() };
        Conv3d::new(w[0], w[1], 3, options, device)
    };
    let last = widths[widths.len() - 1];
    let net = VolumeNet {
        convs: widths.windows(2).enumerate().map(conv).collect::<Result<_>>()?,
        norms: widths[1..].iter().map(|&w| BatchNorm3d::new(w, device)).collect::<Result<_>>()?,
        head: Linear::new(last, 10, device)?,
    };
    let shape = [batch, 1, side, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randint(0, 10, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let mut x = x.clone();
        for (conv, norm) in net.convs.iter().zip(&net.norms) {
            x = norm.forward(&conv.forward(&x)?)?.relu()?;
        }
        net.head.forward(&x.mean([2, 3, 4], false)?)?.cross_entropy(&target)
    }))
}

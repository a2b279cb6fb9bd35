//! Speech recognition by attention and convolution: relative positions, gates and filters (Gulati et al., 2020).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{
    BatchNorm1d, Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Dropout, LayerNorm, Linear, Module,
};
use forebay::ops::{CtcLossOptions, PadMode, cat};
use forebay::tensor::Tensor;

use super::Workload;

/// Network of two layers with SiLU.
#[derive(Module)]
struct FeedForward {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
    dropout: Dropout,
}

impl FeedForward {
    fn new(width: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            norm: LayerNorm::new([width], device)?,
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
            dropout: Dropout::new(0.1),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.dropout.forward(&self.up.forward(&self.norm.forward(x)?)?.silu()?)?;
        self.dropout.forward(&self.down.forward(&y)?)
    }
}

/// Moves row i of scores \[batch, heads, n, 2n - 1\] of all distances by i places, so that column j of the result
/// \[batch, heads, n, n\] is the score of position j (Dai et al., 2019).
fn shift(scores: &Tensor) -> Result<Tensor> {
    let &[batch, heads, n, distances] = scores.shape() else { unreachable!("scores have four dimensions") };
    let padded = scores.pad(&[1, 0], PadMode::Constant(0.0.into()))?;
    let rows = padded.reshape([batch, heads, distances + 1, n])?.narrow(2, 1, distances)?;
    rows.reshape([batch, heads, n, distances])?.narrow(3, 0, n)
}

/// Attention whose scores have a term of the distance of two positions.
#[derive(Module)]
struct RelativeAttention {
    norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    distance: Linear,
    content_bias: Tensor,
    distance_bias: Tensor,
    out: Linear,
    dropout: Dropout,
    heads: usize,
}

impl RelativeAttention {
    fn new(width: usize, heads: usize, device: &Device) -> Result<Self> {
        let linear = || Linear::new(width, width, device);
        let bias = || Tensor::zeros([heads, width / heads], DType::F32, device)?.to_leaf();
        Ok(Self {
            norm: LayerNorm::new([width], device)?,
            query: linear()?,
            key: linear()?,
            value: linear()?,
            distance: Linear::without_bias(width, width, device)?,
            content_bias: bias()?,
            distance_bias: bias()?,
            out: linear()?,
            dropout: Dropout::new(0.1),
            heads,
        })
    }

    fn forward(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let features = x.shape()[2] / self.heads;
        let x = self.norm.forward(x)?;
        let split = |t: Tensor| t.unflatten(-1, [self.heads, features]);
        let q = split(self.query.forward(&x)?)?;
        let k = split(self.key.forward(&x)?)?.permute([0, 2, 3, 1])?;
        let v = split(self.value.forward(&x)?)?.transpose(1, 2)?;
        let p = split(self.distance.forward(positions)?)?.permute([1, 2, 0])?;
        let by_content = q.add(&self.content_bias)?.transpose(1, 2)?.matmul(&k)?;
        let by_distance = shift(&q.add(&self.distance_bias)?.transpose(1, 2)?.matmul(&p)?)?;
        let scores = by_content.add(&by_distance)?.mul((features as f64).powf(-0.5))?;
        let weights = self.dropout.forward(&scores.softmax(-1)?)?;
        let y = weights.matmul(&v)?.transpose(1, 2)?.flatten(2, -1)?;
        self.dropout.forward(&self.out.forward(&y)?)
    }
}

/// Pointwise layer with a gate, filter of each channel, batch norm and pointwise layer.
#[derive(Module)]
struct Convolution {
    norm: LayerNorm,
    gate: Conv1d,
    filter: Conv1d,
    filter_norm: BatchNorm1d,
    point: Conv1d,
    dropout: Dropout,
}

impl Convolution {
    fn new(width: usize, kernel: usize, device: &Device) -> Result<Self> {
        let point = Conv1dOptions::default();
        let options = Conv1dOptions { padding: [kernel / 2], groups: width, ..point };
        Ok(Self {
            norm: LayerNorm::new([width], device)?,
            gate: Conv1d::new(width, 2 * width, 1, point, device)?,
            filter: Conv1d::new(width, width, kernel, options, device)?,
            filter_norm: BatchNorm1d::new(width, device)?,
            point: Conv1d::new(width, width, 1, point, device)?,
            dropout: Dropout::new(0.1),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.gate.forward(&self.norm.forward(x)?.transpose(1, 2)?)?.glu(1)?;
        let y = self.filter_norm.forward(&self.filter.forward(&y)?)?.silu()?;
        self.dropout.forward(&self.point.forward(&y)?.transpose(1, 2)?)
    }
}

#[derive(Module)]
struct Block {
    first: FeedForward,
    attention: RelativeAttention,
    convolution: Convolution,
    second: FeedForward,
    norm: LayerNorm,
}

impl Block {
    fn forward(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let x = x.add(&self.first.forward(x)?.mul(0.5)?)?;
        let x = x.add(&self.attention.forward(&x, positions)?)?;
        let x = x.add(&self.convolution.forward(&x)?)?;
        self.norm.forward(&x.add(&self.second.forward(&x)?.mul(0.5)?)?)
    }
}

#[derive(Module)]
struct Conformer {
    convs: [Conv2d; 2],
    start: Linear,
    dropout: Dropout,
    blocks: Vec<Block>,
    head: Linear,
}

/// Returns sines and cosines of the distances n - 1 to -(n - 1), \[2n - 1, width\].
fn distance_embeddings(n: usize, width: usize, device: &Device) -> Result<Tensor> {
    let distances = Tensor::arange(n as f64 - 1.0, -(n as f64), -1.0, DType::F32, device)?;
    let rates = Tensor::arange(0.0, width as f64, 2.0, DType::F32, device)?;
    let rates = rates.mul(-(10_000.0_f64.ln()) / width as f64)?.exp()?;
    let angles = distances.unsqueeze(1)?.mul(&rates)?;
    cat(&[angles.sin()?, angles.cos()?], 1)
}

/// Conformer of eight blocks over frames of 80 bands, with CTC.
pub(super) fn conformer(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, frames, bands, width, heads, kernel, layers, labels, classes] =
        if tiny { [2, 64, 8, 16, 2, 5, 2, 3, 10] } else { [16, 1024, 80, 256, 4, 31, 8, 60, 256] };
    let options = Conv2dOptions { stride: [2; 2], padding: [1; 2], ..Conv2dOptions::default() };
    let block = |_| {
        Ok(Block {
            first: FeedForward::new(width, device)?,
            attention: RelativeAttention::new(width, heads, device)?,
            convolution: Convolution::new(width, kernel, device)?,
            second: FeedForward::new(width, device)?,
            norm: LayerNorm::new([width], device)?,
        })
    };
    let net = Conformer {
        convs: [Conv2d::new(1, width, 3, options, device)?, Conv2d::new(width, width, 3, options, device)?],
        start: Linear::new(width * bands / 4, width, device)?,
        dropout: Dropout::new(0.1),
        blocks: (0..layers).map(block).collect::<Result<_>>()?,
        head: Linear::new(width, classes, device)?,
    };
    let steps = frames / 4;
    let positions = distance_embeddings(steps, width, device)?;
    let x = Tensor::randn([batch, 1, frames, bands], DType::F32, device)?;
    let text = Tensor::randint(1, classes as i64, [batch, labels], DType::I32, device)?;
    let counts = |n: usize| Tensor::full([batch], n as f64, DType::I32, device);
    let (steps, labels) = (counts(steps)?, counts(labels)?);
    Ok(Workload::new(&[batch, frames, bands], net, move |net| {
        let x = net.convs.iter().try_fold(x.clone(), |x, conv| conv.forward(&x)?.relu())?;
        // From [batch, channels, steps, bands] to [batch, steps, channels · bands].
        let x = net.dropout.forward(&net.start.forward(&x.transpose(1, 2)?.flatten(2, 3)?)?)?;
        let x = net.blocks.iter().try_fold(x, |x, block| block.forward(&x, &positions))?;
        let log_probs = net.head.forward(&x)?.log_softmax(-1)?.transpose(0, 1)?;
        log_probs.ctc_loss(&CtcLossOptions::new(&text, &steps, &labels))
    }))
}

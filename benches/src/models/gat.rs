//! Graph attention: each node weighs its neighbours by a softmax over the edges that reach the node.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Linear, Module};
use forebay::ops::ScatterReduce;
use forebay::tensor::Tensor;

use super::Workload;

/// Layer of GATv2 (Brody et al., 2022).
#[derive(Module)]
struct GraphAttention {
    source: Linear,
    target: Linear,
    scorer: Tensor,
    bias: Tensor,
    heads: usize,
    features: usize,
    /// If true, the result has the features of all heads, otherwise their mean.
    concatenates: bool,
}

impl GraphAttention {
    fn new(
        inputs: usize,
        [heads, features]: [usize; 2],
        concatenates: bool,
        device: &Device,
    ) -> Result<Self> {
        let linear = || Linear::new(inputs, heads * features, device);
        let scorer = Tensor::randn([heads, features], DType::F32, device)?;
        let outputs = if concatenates { heads * features } else { features };
        Ok(Self {
            source: linear()?,
            target: linear()?,
            scorer: scorer.mul((features as f64).powf(-0.5))?.detach().to_leaf()?,
            bias: Tensor::zeros([outputs], DType::F32, device)?.to_leaf()?,
            heads,
            features,
            concatenates,
        })
    }

    /// Transforms nodes \[nodes, inputs\] by the edges from the nodes `from` to the nodes `to`.
    fn forward(&self, x: &Tensor, from: &Tensor, to: &Tensor) -> Result<Tensor> {
        let shape = [x.shape()[0], self.heads, self.features];
        let messages = self.source.forward(x)?.reshape(shape)?.index_select(0, from)?;
        let targets = self.target.forward(x)?.reshape(shape)?.index_select(0, to)?;
        let pairs = messages.add(&targets)?.leaky_relu(0.2)?;
        let scores = pairs.mul(&self.scorer.to_dtype(pairs.dtype())?)?.sum([-1], false)?;
        let zeros = Tensor::zeros([shape[0], self.heads], scores.dtype(), x.device())?;
        let at = to.unsqueeze(-1)?.expand(scores.shape())?;
        let highest = zeros.scatter_reduce(0, &at, &scores.detach(), ScatterReduce::Amax, false)?;
        let weights = scores.sub(&highest.index_select(0, to)?)?.exp()?;
        let total = zeros.index_add(0, to, &weights, 1.0)?;
        let weights = weights.div(&total.index_select(0, to)?.add(1e-16)?)?;
        let messages = messages.mul(&weights.to_dtype(messages.dtype())?.unsqueeze(-1)?)?;
        let zeros = Tensor::zeros(shape, messages.dtype(), x.device())?;
        let y = zeros.index_add(0, to, &messages, 1.0)?;
        let y = if self.concatenates { y.flatten(1, 2)? } else { y.mean([1], false)? };
        y.add(&self.bias.to_dtype(y.dtype())?)
    }
}

/// Classifier of the nodes of a graph by three layers of attention.
pub(super) fn gat(tiny: bool, device: &Device) -> Result<Workload> {
    let ([nodes, edges], width, [heads, features], classes) =
        if tiny { ([50, 200], 8, [2, 4], 5) } else { ([20_000, 200_000], 128, [8, 32], 40) };
    let net = vec![
        GraphAttention::new(width, [heads, features], true, device)?,
        GraphAttention::new(heads * features, [heads, features], true, device)?,
        GraphAttention::new(heads * features, [heads, classes], false, device)?,
    ];
    let x = Tensor::randn([nodes, width], DType::F32, device)?;
    let ends = || Tensor::randint(0, nodes as i64, [edges], DType::I32, device);
    let (from, to) = (ends()?, ends()?);
    let target = Tensor::randint(0, classes as i64, [nodes], DType::I32, device)?;
    Ok(Workload::new(&[nodes, edges, heads, features], net, move |net| {
        let mut x = x.clone();
        for layer in net {
            x = layer.forward(&x, &from, &to)?;
            if layer.concatenates {
                x = x.elu(1.0)?;
            }
        }
        x.cross_entropy(&target)
    }))
}

//! A stack of linear layers, a graph convolution and a recurrent language model.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Embedding, Linear, Lstm, Module, RecurrentOptions};
use forebay::ops::Reduction;
use forebay::tensor::Tensor;

use super::Workload;

/// Eight linear layers with ReLU between them: launches dominate.
pub(super) fn linears(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, width) = if tiny { (4, 16) } else { (128, 256) };
    let net = (0..8).map(|_| Linear::new(width, width, device)).collect::<Result<Vec<_>>>()?;
    let x = Tensor::randn([batch, width], DType::F32, device)?;
    let y = Tensor::randn([batch, width], DType::F32, device)?;
    Ok(Workload::new(&[batch, width], net, move |net| {
        let mut x = x.clone();
        for (k, layer) in net.iter().enumerate() {
            x = layer.forward(&x)?;
            if k + 1 < net.len() {
                x = x.relu()?;
            }
        }
        x.to_dtype(DType::F32)?.mse_loss(&y, Reduction::Mean)
    }))
}

/// Graph convolution in three layers: every node sums the weighted features of its neighbours.
pub(super) fn graph(tiny: bool, device: &Device) -> Result<Workload> {
    let (nodes, edges, width, classes) = if tiny { (50, 200, 8, 4) } else { (20_000, 200_000, 128, 40) };
    let layer = |k| Linear::new(width, if k == 2 { classes } else { width }, device);
    let net = (0..3).map(layer).collect::<Result<Vec<_>>>()?;
    let x = Tensor::randn([nodes, width], DType::F32, device)?;
    let ends = || Tensor::randint(0, nodes as i64, [edges], DType::I32, device);
    let (from, to) = (ends()?, ends()?);
    let weights = Tensor::rand([edges, 1], DType::F32, device)?;
    let target = Tensor::randint(0, classes as i64, [nodes], DType::I32, device)?;
    Ok(Workload::new(&[nodes, edges, width], net, move |net| {
        let mut x = x.clone();
        for (k, layer) in net.iter().enumerate() {
            let h = layer.forward(&x)?;
            let messages = h.index_select(0, &from)?.mul(&weights.to_dtype(h.dtype())?)?;
            x = h.index_add(0, &to, &messages, 1.0)?;
            if k + 1 < net.len() {
                x = x.relu()?;
            }
        }
        x.cross_entropy(&target)
    }))
}

#[derive(Module)]
struct LanguageModel {
    tokens: Embedding,
    lstm: Lstm,
    head: Linear,
}

/// Language model of two LSTM layers of 650.
pub(super) fn lstm(tiny: bool, device: &Device) -> Result<Workload> {
    let (vocabulary, width) = if tiny { (64, 16) } else { (10_000, 650) };
    let [batch, steps] = if tiny { [2, 5] } else { [64, 70] };
    let options = RecurrentOptions { num_layers: 2, ..RecurrentOptions::default() };
    let net = LanguageModel {
        tokens: Embedding::new(vocabulary, width, device)?,
        lstm: Lstm::new(width, width, options, device)?,
        head: Linear::new(width, vocabulary, device)?,
    };
    let text = Tensor::randint(0, vocabulary as i64, [steps, batch], DType::I32, device)?;
    let target = Tensor::randint(0, vocabulary as i64, [steps * batch], DType::I32, device)?;
    Ok(Workload::new(&[batch, steps], net, move |net| {
        let (out, _) = net.lstm.forward(&net.tokens.forward(&text)?, None)?;
        net.head.forward(&out.flatten(0, 1)?)?.cross_entropy(&target)
    }))
}

//! Speech recognition by recurrent layers, and a state-space model of language (Mamba-2).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{
    BatchNorm2d, Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Gru, Linear, Module, RecurrentOptions, RmsNorm,
};
use forebay::ops::{CtcLossOptions, Reduction};
use forebay::tensor::Tensor;

use super::Workload;

#[derive(Module)]
struct Speech {
    convs: [Conv2d; 2],
    norms: [BatchNorm2d; 2],
    gru: Gru,
    head: Linear,
}

/// Speech recognition: two convolutions over frames and bands, three bidirectional GRU layers, and CTC.
pub(super) fn speech(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, frames, bands, channels, hidden, labels, classes] =
        if tiny { [2, 16, 8, 4, 8, 3, 5] } else { [32, 400, 80, 32, 512, 40, 29] };
    let conv = |inputs, stride| {
        let options = Conv2dOptions { stride, padding: [1, 1], bias: false, ..Conv2dOptions::default() };
        Conv2d::new(inputs, channels, 3, options, device)
    };
    let options = RecurrentOptions { num_layers: 3, bidirectional: true, ..RecurrentOptions::default() };
    let net = Speech {
        convs: [conv(1, [2, 2])?, conv(channels, [1, 2])?],
        norms: [BatchNorm2d::new(channels, device)?, BatchNorm2d::new(channels, device)?],
        gru: Gru::new(channels * bands / 4, hidden, options, device)?,
        head: Linear::new(2 * hidden, classes, device)?,
    };
    let x = Tensor::randn([batch, 1, frames, bands], DType::F32, device)?;
    let text = Tensor::randint(1, classes as i64, [batch, labels], DType::I32, device)?;
    // Lengths from a half to the whole.
    let lengths = |most: usize| {
        let values: Vec<i32> = (0..batch).map(|row| (most - row * 7 % (most / 2)) as i32).collect();
        Tensor::from_slice(&values, [batch], device)
    };
    let (steps, counts) = (lengths(frames / 2)?, lengths(labels)?);
    Ok(Workload::new(&[batch, frames, bands], net, move |net| {
        let mut x = x.clone();
        for (conv, norm) in net.convs.iter().zip(&net.norms) {
            x = norm.forward(&conv.forward(&x)?)?.relu()?;
        }
        // From [batch, channels, steps, bands] to [steps, batch, channels · bands].
        let (x, _) = net.gru.forward(&x.permute([2, 0, 1, 3])?.flatten(2, 3)?, None)?;
        let log_probs = net.head.forward(&x)?.log_softmax(-1)?;
        log_probs.ctc_loss(&CtcLossOptions::new(&text, &steps, &counts))
    }))
}

/// Elements of a head, and of its state for each of them.
const HEAD: usize = 64;

/// Layer of Mamba-2: a short filter, and states that decay by factors of the input.
#[derive(Module)]
struct StateSpace {
    norm: RmsNorm,
    inputs: Linear,
    filter: Conv1d,
    decay_log: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    gate_norm: RmsNorm,
    outputs: Linear,
    state: usize,
    chunk: usize,
}

impl StateSpace {
    fn new(width: usize, [head, state, chunk]: [usize; 3], device: &Device) -> Result<Self> {
        let inner = 2 * width;
        let (heads, filtered) = (inner / head, inner + 2 * state);
        let options = Conv1dOptions { padding: [3], groups: filtered, ..Conv1dOptions::default() };
        let rates: Vec<f32> = (1..=heads).map(|k| (k as f32).ln()).collect();
        Ok(Self {
            norm: RmsNorm::new([width], device)?,
            inputs: Linear::without_bias(width, inner + filtered + heads, device)?,
            filter: Conv1d::new(filtered, filtered, 4, options, device)?,
            decay_log: Tensor::from_slice(&rates, [heads], device)?.to_leaf()?,
            // The softplus of -4.6 is 0.01.
            step_bias: Tensor::full([heads], -4.6, DType::F32, device)?.to_leaf()?,
            skip: Tensor::ones([heads, 1], DType::F32, device)?.to_leaf()?,
            gate_norm: RmsNorm::new([inner], device)?,
            outputs: Linear::without_bias(inner, width, device)?,
            state,
            chunk,
        })
    }

    /// Returns the sums of all earlier inputs, \[batch, length, heads, elements\], decayed since then. `writes` and
    /// `reads`, \[batch, length, state\], weigh how an input enters the state and how the state is read.
    fn scan(&self, x: &Tensor, decay: &Tensor, writes: &Tensor, reads: &Tensor) -> Result<Tensor> {
        let &[batch, length, heads, elements] = x.shape() else {
            unreachable!("inputs have four dimensions")
        };
        let (chunk, state, device) = (self.chunk, self.state, x.device());
        let chunks = length / chunk;
        // [batch, chunks, heads, steps, elements] and [batch, chunks, heads, steps].
        let x = x.reshape([batch, chunks, chunk, heads, elements])?.transpose(2, 3)?;
        let sums = decay.reshape([batch, chunks, chunk, heads])?.transpose(2, 3)?.cumsum(-1)?;
        let writes = writes.reshape([batch, chunks, 1, chunk, state])?;
        let reads = reads.reshape([batch, chunks, 1, chunk, state])?;
        let above = |n: usize, diagonal: isize| {
            Tensor::ones([n, n], DType::F32, device)?.triu(diagonal)?.to_dtype(DType::Bool)
        };
        // Within chunks.
        let weights = sums.unsqueeze(-1)?.sub(&sums.unsqueeze(-2)?)?;
        let weights = weights.masked_fill(&above(chunk, 1)?, f64::NEG_INFINITY)?.exp()?;
        let inside = reads.matmul(&writes.transpose(-2, -1)?)?.mul(&weights)?.matmul(&x)?;
        // State of each chunk at its end, from the chunk alone.
        let totals = sums.narrow(-1, chunk - 1, 1)?;
        let kept = x.mul(&totals.sub(&sums)?.exp()?.unsqueeze(-1)?)?;
        let states = writes.transpose(-2, -1)?.matmul(&kept)?;
        // Sums of the decayed states of earlier chunks.
        let totals = totals.squeeze(-1)?.transpose(1, 2)?;
        let ends = totals.cumsum(-1)?;
        let between = ends.sub(&totals)?.unsqueeze(-1)?.sub(&ends.unsqueeze(-2)?)?;
        let between = between.masked_fill(&above(chunks, 0)?, f64::NEG_INFINITY)?.exp()?;
        let states = states.transpose(1, 2)?.flatten(3, 4)?;
        let states = between.matmul(&states)?.reshape([batch, heads, chunks, state, elements])?;
        let before = reads.matmul(&states.transpose(1, 2)?)?.mul(&sums.exp()?.unsqueeze(-1)?)?;
        inside.add(&before)?.transpose(2, 3)?.reshape([batch, length, heads, elements])
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let (length, heads) = (input.shape()[1], self.decay_log.numel());
        let inner = self.gate_norm.weight.numel();
        let parts = self
            .inputs
            .forward(&self.norm.forward(input)?)?
            .split_with_sizes(&[inner, inner + 2 * self.state, heads], -1)?;
        let filtered = self.filter.forward(&parts[1].transpose(1, 2)?)?.narrow(2, 0, length)?;
        let filtered = filtered.silu()?.transpose(1, 2)?;
        let of = filtered.split_with_sizes(&[inner, self.state, self.state], -1)?;
        let x = of[0].unflatten(-1, [heads, inner / heads])?;
        let step = parts[2].add(&self.step_bias)?.softplus(1.0, 20.0)?;
        let decay = step.mul(&self.decay_log.exp()?.neg()?)?;
        let y = self.scan(&x.mul(&step.unsqueeze(-1)?)?, &decay, &of[1], &of[2])?;
        let y = y.add(&x.mul(&self.skip)?)?.flatten(2, 3)?;
        let y = self.gate_norm.forward(&y.mul(&parts[0].silu()?)?)?;
        input.add(&self.outputs.forward(&y)?)
    }
}

#[derive(Module)]
struct StateSpaces {
    layers: Vec<StateSpace>,
    norm: RmsNorm,
    head: Linear,
}

/// Selective state spaces in six layers (Mamba-2), by sums within and between chunks.
pub(super) fn statespace(tiny: bool, device: &Device) -> Result<Workload> {
    let (shape, extents, layers) =
        if tiny { ([2, 16, 8], [4, 4, 4], 2) } else { ([8, 1024, 512], [HEAD, HEAD, HEAD], 6) };
    let width = shape[2];
    let net = StateSpaces {
        layers: (0..layers).map(|_| StateSpace::new(width, extents, device)).collect::<Result<_>>()?,
        norm: RmsNorm::new([width], device)?,
        head: Linear::new(width, width, device)?,
    };
    let x = Tensor::randn(shape, DType::F32, device)?;
    let target = Tensor::randn(shape, DType::F32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let x = net.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))?;
        let y = net.head.forward(&net.norm.forward(&x)?)?;
        y.to_dtype(DType::F32)?.mse_loss(&target, Reduction::Mean)
    }))
}

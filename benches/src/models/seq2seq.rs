//! Translation by recurrent networks: a decoder that attends to the encoder at every step (Bahdanau et al., 2014).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Embedding, Gru, GruCell, Linear, Module, RecurrentOptions};
use forebay::ops::{cat, stack};
use forebay::tensor::Tensor;

use super::Workload;

#[derive(Module)]
struct Seq2Seq {
    source: Embedding,
    encoder: Gru,
    start: Linear,
    target: Embedding,
    query: Linear,
    key: Linear,
    scorer: Linear,
    decoder: GruCell,
    head: Linear,
}

impl Seq2Seq {
    /// Returns the logits \[steps, batch, vocabulary\] of words that follow those of `text`.
    fn forward(&self, source: &Tensor, text: &Tensor) -> Result<Tensor> {
        let (memory, last) = self.encoder.forward(&self.source.forward(source)?, None)?;
        let mut state = self.start.forward(&cat(&[last.select(0, 0)?, last.select(0, 1)?], -1)?)?.tanh()?;
        let keys = self.key.forward(&memory)?;
        let (mut states, words) = (Vec::new(), self.target.forward(text)?);
        for word in words.unbind(0)? {
            let scores = self.scorer.forward(&keys.add(&self.query.forward(&state)?)?.tanh()?)?;
            let context = scores.softmax(0)?.mul(&memory)?.sum([0], false)?;
            let input = cat(&[&word.to_dtype(context.dtype())?, &context], -1)?;
            state = self.decoder.forward(&input, Some(&state))?;
            states.push(cat(&[&state, &context.to_dtype(state.dtype())?], -1)?);
        }
        self.head.forward(&stack(&states, 0)?)
    }
}

/// Bidirectional encoder and a decoder of 50 steps, in a loop.
pub(super) fn seq2seq(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, length, vocabulary, embedded, hidden] =
        if tiny { [2, 5, 30, 8, 8] } else { [64, 50, 10_000, 256, 512] };
    let options = RecurrentOptions { bidirectional: true, ..RecurrentOptions::default() };
    let net = Seq2Seq {
        source: Embedding::new(vocabulary, embedded, device)?,
        encoder: Gru::new(embedded, hidden, options, device)?,
        start: Linear::new(2 * hidden, hidden, device)?,
        target: Embedding::new(vocabulary, embedded, device)?,
        query: Linear::new(hidden, hidden, device)?,
        key: Linear::without_bias(2 * hidden, hidden, device)?,
        scorer: Linear::without_bias(hidden, 1, device)?,
        decoder: GruCell::new(embedded + 2 * hidden, hidden, true, device)?,
        head: Linear::new(3 * hidden, vocabulary, device)?,
    };
    let words = || Tensor::randint(0, vocabulary as i64, [length, batch], DType::I32, device);
    let (source, text, next) = (words()?, words()?, words()?.flatten(0, -1)?);
    Ok(Workload::new(&[batch, length], net, move |net| {
        net.forward(&source, &text)?.flatten(0, 1)?.cross_entropy(&next)
    }))
}

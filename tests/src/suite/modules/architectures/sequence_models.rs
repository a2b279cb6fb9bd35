//! Recurrent models, and PyTorch's transformer for translation.

use forebay::dtype::DType;
use forebay::nn::{
    AttentionMasks, Gru, Lstm, Module, RecurrentOptions, Transformer, TransformerActivation,
    TransformerOptions, init,
};

use super::*;

/// PyTorch's word language model: an embedding tied to the output layer, and LSTM layers with a projection.
#[derive(Module)]
struct LstmLanguageModel {
    encoder: Embedding,
    rnn: Lstm,
    decoder: Linear,
}

impl LstmLanguageModel {
    fn new(device: &Device) -> Result<Self> {
        let (encoder, mut decoder) = tied_embedding(13, 6, device)?;
        decoder.bias = Linear::new(6, 13, device)?.bias;
        let options = RecurrentOptions { num_layers: 2, proj_size: 6, ..RecurrentOptions::default() };
        Ok(Self { encoder, rnn: Lstm::new(6, 10, options, device)?, decoder })
    }

    fn forward(&self, words: &Tensor) -> Result<Tensor> {
        let (out, _) = self.rnn.forward(&self.encoder.forward(words)?, None)?;
        self.decoder.forward(&out)?.log_softmax(-1)
    }
}

/// Sequence tagger with a conditional random field, for sentences of several lengths.
#[derive(Module)]
struct Tagger {
    words: Embedding,
    gru: Gru,
    tags: Linear,
    transitions: Tensor,
}

impl Tagger {
    fn new(device: &Device) -> Result<Self> {
        let options =
            RecurrentOptions { batch_first: true, bidirectional: true, ..RecurrentOptions::default() };
        Ok(Self {
            words: Embedding::new(9, 5, device)?.with_padding_idx(0)?,
            gru: Gru::new(5, 4, options, device)?,
            tags: Linear::new(8, 3, device)?,
            transitions: init::create_parameter(|| Tensor::randn([3, 3], DType::F32, device))?,
        })
    }

    fn forward(&self, words: &Tensor, tags: &Tensor, lengths: &Tensor) -> Result<Vec<Tensor>> {
        let n = words.shape()[1];
        let (out, _) = self.gru.forward_lengths(&self.words.forward(words)?, lengths, None)?;
        let scores = self.tags.forward(&out)?;
        // Some devices do not compute with i64.
        let lengths = lengths.to_dtype(DType::I32)?;
        let steps = Tensor::arange(0.0, n as f64, 1.0, DType::I32, words.device())?;
        let there = steps.lt(&lengths.unsqueeze(1)?)?;
        let own = scores.gather(-1, &tags.unsqueeze(-1)?)?.squeeze(-1)?;
        let (from, to) = (tags.narrow(1, 0, n - 1)?, tags.narrow(1, 1, n - 1)?);
        let moves = self.transitions.index(&[Some(&from), Some(&to)])?;
        let path = own.mul(&there)?.sum([1], false)?;
        let path = path.add(&moves.mul(&there.narrow(1, 1, n - 1)?)?.sum([1], false)?)?;
        let mut alpha = scores.select(1, 0)?;
        for t in 1..n {
            let step = alpha.unsqueeze(2)?.add(&self.transitions)?.logsumexp([1], false)?;
            let step = step.add(&scores.select(1, t as isize)?)?;
            alpha = step.where_(&there.narrow(1, t, 1)?, &alpha)?;
        }
        Ok(vec![alpha.logsumexp([-1], false)?.sub(&path)?, scores])
    }
}

#[derive(Module)]
struct Seq2Seq {
    source: Embedding,
    target: Embedding,
    transformer: Transformer,
    generator: Linear,
}

impl Seq2Seq {
    fn new(device: &Device) -> Result<Self> {
        let options = TransformerOptions {
            feedforward: 12,
            dropout: 0.0,
            activation: TransformerActivation::Gelu,
            batch_first: true,
            norm_first: true,
            ..TransformerOptions::default()
        };
        Ok(Self {
            source: Embedding::new(9, 8, device)?,
            target: Embedding::new(7, 8, device)?,
            transformer: Transformer::new(8, 2, [1, 1], options, device)?,
            generator: Linear::new(8, 7, device)?,
        })
    }

    fn forward(&self, source: &Tensor, target: &Tensor) -> Result<Tensor> {
        let padding = source.to_dtype(DType::I32)?.eq(0)?;
        let masks = AttentionMasks::from_key_padding_mask(&padding);
        let (source, target) = (self.source.forward(source)?, self.target.forward(target)?);
        self.generator.forward(&self.transformer.forward(
            &source,
            &target,
            &masks,
            &AttentionMasks::causal(),
            &masks,
        )?)
    }
}

cases! {
    "lstm_language_model": |c| LstmLanguageModel::new(c.device), |m, x| single(m.forward(&x[0]));
    "gru_tagger": |c| Tagger::new(c.device), |m, x| m.forward(&x[0], &x[1], &x[2]);
    "seq2seq": |c| Seq2Seq::new(c.device), |m, x| single(m.forward(&x[0], &x[1]));
}

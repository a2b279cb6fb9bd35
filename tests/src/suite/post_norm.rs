//! Post-norm blocks under autocast, and BERT configurations.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::nn::{
    AttentionMasks, Bert, BertOptions, LayerNorm, Linear, Module, RmsNorm, TransformerEncoderLayer,
    TransformerOptions,
};
use forebay::tensor::Tensor;

use super::host_reference::ensure_same_bits;
use super::tests;

tests![
    a_norm_of_a_sum_has_the_type_of_a_norm_under_autocast,
    the_residual_stream_of_blocks_stays_f32,
    gradients_of_a_bert_are_as_accurate_as_those_of_plain_operations,
    a_bert_is_initialised_like_the_published_one,
    a_bert_drops_attention_weights_only_in_training,
    a_configuration_of_another_model_is_refused,
];

fn a_norm_of_a_sum_has_the_type_of_a_norm_under_autocast(device: &Device) -> Result<()> {
    let (norm, rms) = (LayerNorm::new([16], device)?, RmsNorm::new([16], device)?);
    let low = Tensor::randn([3, 16], DType::F32, device)?.to_dtype(DType::BF16)?;
    let stream = Tensor::randn([3, 16], DType::F32, device)?;
    let _scope = autocast(DType::BF16)?;
    let (sum, normed) = norm.forward_add(&low, &stream)?;
    ensure!((sum.dtype(), normed.dtype()) == (DType::F32, DType::F32));
    ensure!(rms.forward_add(&low, &stream)?.1.dtype() == DType::F32);
    // As in PyTorch, also if both inputs have 16 bits.
    let both = norm.forward_add(&low, &low)?.1;
    ensure!(both.dtype() == norm.forward(&low.add(&low)?)?.dtype(), "{both:?}");
    // Before matrix products, the result is written in the autocast type.
    let (same, small) = norm.forward_add_low_precision(&low, &stream)?;
    ensure!((same.dtype(), small.dtype()) == (DType::F32, DType::BF16));
    ensure!(rms.forward_add_low_precision(&low, &stream)?.1.dtype() == DType::BF16);
    ensure_same_bits(&small.detach(), &normed.detach().to_dtype(DType::BF16)?)
}

fn the_residual_stream_of_blocks_stays_f32(device: &Device) -> Result<()> {
    let x = Tensor::randn([2, 5, 16], DType::F32, device)?;
    for norm_first in [false, true] {
        let options = TransformerOptions {
            feedforward: 32,
            dropout: 0.0,
            batch_first: true,
            norm_first,
            ..Default::default()
        };
        let layer = TransformerEncoderLayer::new(16, 2, options, device)?;
        let _scope = autocast(DType::BF16)?;
        let y = layer.forward(&x, &AttentionMasks::default())?;
        ensure!(y.dtype() == DType::F32, "norm_first {norm_first}: {y:?}");
    }
    let model = Bert::new(&small(), device)?;
    let _scope = autocast(DType::BF16)?;
    let y = model.forward(&Tensor::from_slice(&[1i64, 5, 2, 7], [1, 4], device)?, None)?;
    ensure!(y.dtype() == DType::F32, "{y:?}");
    Ok(())
}

fn small() -> BertOptions {
    BertOptions {
        vocab_size: 50,
        max_position_embeddings: 16,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        hidden_size: 32,
        intermediate_size: 64,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        // Larger than BERT's, so that outputs of this small model are not negligible.
        initializer_range: 0.2,
        ..Default::default()
    }
}

/// Block with two linear layers and post-norm, as in BERT.
struct PostNormBlock(Vec<Linear>, LayerNorm);

impl PostNormBlock {
    fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let mut x = x.clone();
        for pair in self.0.chunks(2) {
            let y = pair[1].forward(&pair[0].forward(&x)?.gelu()?)?;
            x = if fused { self.1.forward_add(&y, &x)?.1 } else { self.1.forward(&y.add(&x)?)? };
        }
        Ok(x)
    }

    /// Returns all gradients of a loss.
    fn gradients(&self, x: &Tensor, low: bool, fused: bool) -> Result<Vec<f64>> {
        let parameters: Vec<Tensor> =
            self.0.iter().flat_map(Module::parameters).chain(self.1.parameters()).collect();
        parameters.iter().for_each(|p| p.set_grad(None));
        let loss = {
            let _scope = low.then(|| autocast(DType::BF16)).transpose()?;
            self.forward(x, fused)?.square()?.mul(&x.sin()?)?.sum_all()?
        };
        loss.backward()?;
        let mut all = Vec::new();
        for p in &parameters {
            all.extend(p.grad().context("no gradient")?.to_f64s()?);
        }
        Ok(all)
    }
}

/// Returns the distance of two lists, relative to the norm of the second.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let square = |v: f64| v * v;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().map(|v| square(*v)).sum::<f64>()).sqrt()
}

/// f32 is the exact reference: its error is a ten-thousandth of the measured errors.
fn gradients_of_a_bert_are_as_accurate_as_those_of_plain_operations(device: &Device) -> Result<()> {
    device.manual_seed(3);
    let layer = |k: usize| Linear::new([32, 64][k % 2], [64, 32][k % 2], device);
    let block = PostNormBlock((0..8).map(layer).collect::<Result<_, _>>()?, LayerNorm::new([32], device)?);
    let x = Tensor::randn([24, 32], DType::F32, device)?;
    let exact = block.gradients(&x, false, false)?;
    let fused = distance(&block.gradients(&x, true, true)?, &exact);
    let plain = distance(&block.gradients(&x, true, false)?, &exact);
    ensure!(distance(&block.gradients(&x, false, true)?, &exact) < 1e-5, "they are other gradients in f32");
    ensure!(fused > 0.0 && fused <= 1.05 * plain, "off by {fused:.2e}; plain operations by {plain:.2e}");
    Ok(())
}

fn a_bert_is_initialised_like_the_published_one(device: &Device) -> Result<()> {
    device.manual_seed(5);
    let options = BertOptions { hidden_size: 64, initializer_range: 0.02, ..small() };
    let model = Bert::new(&options, device)?;
    for (name, t) in model.state_dict() {
        let values = t.to_f64s()?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
        match (name.contains("LayerNorm"), name.ends_with("bias")) {
            (_, true) => ensure!(values.iter().all(|&v| v == 0.0), "{name} is not zero"),
            (true, false) => ensure!(values.iter().all(|&v| v == 1.0), "{name} is not one"),
            // The table of segments has only 128 values.
            _ => ensure!(
                (deviation / 0.02 - 1.0).abs() < 0.25 && mean.abs() < 0.01,
                "{name}: {mean} ± {deviation}"
            ),
        }
    }
    let padding = model.embeddings.word_embeddings.weight.select(0, 0)?.to_f64s()?;
    ensure!(padding.iter().all(|&v| v == 0.0), "the row of padding is not zero");
    Ok(())
}

fn a_bert_drops_attention_weights_only_in_training(device: &Device) -> Result<()> {
    let model = Bert::new(&BertOptions { attention_probs_dropout_prob: 0.5, ..small() }, device)?;
    let tokens = Tensor::from_slice(&[1i64, 5, 2, 7, 9, 3], [2, 3], device)?;
    let run = || -> Result<Tensor> { Ok(model.forward(&tokens, None)?.detach()) };
    ensure!(ensure_same_bits(&run()?, &run()?).is_err(), "nothing is dropped in training");
    model.eval();
    ensure_same_bits(&run()?, &run()?).context("something is dropped in evaluation")
}

fn a_configuration_of_another_model_is_refused(device: &Device) -> Result<()> {
    let config = |more: &str| {
        let text = format!(
            r#"{{"vocab_size": 50, "max_position_embeddings": 16, "type_vocab_size": 2, "num_hidden_layers": 1,
            "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64, "layer_norm_eps": 1e-12{more}}}"#
        );
        BertOptions::from_config(&text)
    };
    let read =
        config(r#", "attention_probs_dropout_prob": 0.3, "initializer_range": 0.1, "pad_token_id": null"#)?;
    ensure!(
        (read.attention_probs_dropout_prob, read.initializer_range) == (0.3, 0.1)
            && read.pad_token_id.is_none()
    );
    let read =
        config(r#", "model_type": "bert", "position_embedding_type": "absolute", "is_decoder": false"#)?;
    ensure!((read.hidden_dropout_prob, read.attention_probs_dropout_prob) == (0.1, 0.1), "as published");
    for (more, named) in [
        (r#", "hidden_act": "mish""#, "mish"),
        (r#", "position_embedding_type": "relative_key""#, "relative_key"),
        (r#", "is_decoder": true"#, "is_decoder"),
        (r#", "model_type": "roberta""#, "roberta"),
        (r#", "attention_probs_dropout_prob": 1.5"#, "1.5"),
    ] {
        let error = config(more).err().with_context(|| format!("{named} is taken"))?.to_string();
        ensure!(error.contains(named), "{error}");
    }
    let missing = BertOptions::from_config(r#"{"vocab_size": 50}"#).err().context("no sizes")?.to_string();
    ensure!(missing.contains("num_hidden_layers"), "{missing}");
    // Options written by hand are checked as well, and the configured activation is applied.
    ensure!(Bert::new(&BertOptions { hidden_act: "mish".into(), ..small() }, device).is_err());
    let tokens = Tensor::from_slice(&[1i64, 5, 2, 7], [1, 4], device)?;
    let of = |act: &str| -> Result<Tensor> {
        device.manual_seed(1);
        Ok(Bert::new(&BertOptions { hidden_act: act.into(), ..small() }, device)?
            .forward(&tokens, None)?
            .detach())
    };
    ensure!(ensure_same_bits(&of("gelu")?, &of("relu")?).is_err(), "relu is not applied");
    Ok(())
}

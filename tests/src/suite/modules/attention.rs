//! Attention, transformers, positional encodings.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::nn::{
    AttentionMasks, Dropout, Gru, LayerNorm, Linear, Lstm, Module, ModuleEntry, MultiheadAttention,
    MultiheadAttentionOptions, RecurrentOptions, RotaryEmbedding, SinusoidalEmbedding, Transformer,
    TransformerActivation, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder,
    TransformerEncoderLayer, TransformerOptions,
};
use forebay::tensor::Tensor;

use super::{cases, ensure_same, randn, single};

/// Module with recorded masks.
pub(super) struct WithMasks<M> {
    masks: Vec<Tensor>,
    module: M,
}

impl<M: Module> WithMasks<M> {
    fn new(module: M, masks: Vec<Tensor>) -> Self {
        Self { masks, module }
    }
}

impl<M: Module> Module for WithMasks<M> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        self.module.visit(path, f);
    }
}

fn multihead(
    options: MultiheadAttentionOptions,
    device: &Device,
) -> forebay::error::Result<MultiheadAttention> {
    MultiheadAttention::new(8, 2, options, device)
}

const PLAIN: MultiheadAttentionOptions = MultiheadAttentionOptions {
    dropout: 0.0,
    bias: true,
    add_bias_kv: false,
    add_zero_attn: false,
    kdim: None,
    vdim: None,
    batch_first: false,
};
const BATCH_FIRST: MultiheadAttentionOptions = MultiheadAttentionOptions { batch_first: true, ..PLAIN };
const LAYER: TransformerOptions = TransformerOptions {
    feedforward: 12,
    dropout: 0.0,
    activation: TransformerActivation::Relu,
    layer_norm_eps: 1e-5,
    batch_first: false,
    norm_first: false,
    bias: true,
};

cases! {
    "mha": |c| multihead(PLAIN, c.device), |m, x| single(m.forward(&x[0], &x[0], &x[0], &AttentionMasks::default()));
    "mha_batch_first": |c| multihead(BATCH_FIRST, c.device), |m, x| single(m.forward(&x[0], &x[0], &x[0], &AttentionMasks::causal()));
    "mha_unbatched": |c| multihead(PLAIN, c.device),
        |m, x| single(m.forward(&x[0], &x[1], &x[2], &AttentionMasks::default()));
    "mha_cross": |c| multihead(MultiheadAttentionOptions { kdim: Some(5), vdim: Some(7), bias: false, ..BATCH_FIRST }, c.device),
        |m, x| single(m.forward(&x[0], &x[1], &x[2], &AttentionMasks::default()));
    "mha_behind": |c| multihead(MultiheadAttentionOptions { add_bias_kv: true, add_zero_attn: true, ..BATCH_FIRST }, c.device),
        |m, x| single(m.forward(&x[0], &x[1], &x[2], &AttentionMasks::causal()));
    "mha_padded": |c| Ok(WithMasks::new(multihead(BATCH_FIRST, c.device)?, vec![c.shared_tensor("masks/padding")?, c.shared_tensor("masks/hides")?])),
        |m, x| {
            let masks = AttentionMasks { key_padding_mask: Some(&m.masks[0]), ..AttentionMasks::from_attn_mask(&m.masks[1]) };
            single(m.module.forward(&x[0], &x[0], &x[0], &masks))
        };
    "mha_added": |c| Ok(WithMasks::new(multihead(BATCH_FIRST, c.device)?, vec![c.shared_tensor("masks/padding")?, c.shared_tensor("masks/added")?])),
        |m, x| {
            let masks = AttentionMasks { key_padding_mask: Some(&m.masks[0]), ..AttentionMasks::from_attn_mask(&m.masks[1]) };
            single(m.module.forward(&x[0], &x[0], &x[0], &masks))
        };
    "mha_weights": |c| Ok(WithMasks::new(multihead(PLAIN, c.device)?, vec![c.shared_tensor("masks/padding")?])),
        |m, x| {
            let (out, weights) = m.module.forward_with_weights(&x[0], &x[0], &x[0], &AttentionMasks::from_key_padding_mask(&m.masks[0]))?;
            Ok(vec![out, weights])
        };
    "mha_weights_causal": |c| multihead(PLAIN, c.device), |m, x| {
        let (out, weights) = m.forward_with_weights(&x[0], &x[0], &x[0], &AttentionMasks::causal())?;
        Ok(vec![out, weights])
    };
    "encoder_layer": |c| TransformerEncoderLayer::new(8, 2, LAYER, c.device), |m, x| single(m.forward(&x[0], &AttentionMasks::default()));
    "encoder_layer_norm_first": |c| {
            let activation = TransformerActivation::Gelu;
            let options = TransformerOptions {
                norm_first: true, activation, batch_first: true, bias: false, layer_norm_eps: 1e-3, ..LAYER
            };
            Ok(WithMasks::new(TransformerEncoderLayer::new(8, 2, options, c.device)?, vec![c.shared_tensor("masks/padding")?]))
        },
        |m, x| single(m.module.forward(&x[0], &AttentionMasks { is_causal: true, ..AttentionMasks::from_key_padding_mask(&m.masks[0]) }));
    "decoder_layer": |c| TransformerDecoderLayer::new(8, 2, LAYER, c.device),
        |m, x| single(m.forward(&x[0], &x[1], &AttentionMasks::causal(), &AttentionMasks::default()));
    "decoder_layer_norm_first": |c| {
            let activation = TransformerActivation::Gelu;
            let options = TransformerOptions { norm_first: true, activation, batch_first: true, ..LAYER };
            Ok(WithMasks::new(TransformerDecoderLayer::new(8, 2, options, c.device)?, vec![c.shared_tensor("masks/padding")?]))
        },
        |m, x| single(m.module.forward(&x[0], &x[1], &AttentionMasks::default(), &AttentionMasks::from_key_padding_mask(&m.masks[0])));
    "encoder": |c| {
            let options = TransformerOptions { batch_first: true, ..LAYER };
            let encoder = TransformerEncoder::new(8, 2, 2, options, c.device)?.with_norm(LayerNorm::new([8], c.device)?);
            Ok(WithMasks::new(encoder, vec![c.shared_tensor("masks/padding")?]))
        },
        |m, x| single(m.module.forward(&x[0], &AttentionMasks::from_key_padding_mask(&m.masks[0])));
    "decoder": |c| TransformerDecoder::new(8, 2, 2, LAYER, c.device),
        |m, x| single(m.forward(&x[0], &x[1], &AttentionMasks::causal(), &AttentionMasks::default()));
    "transformer": |c| Transformer::new(8, 2, [1, 2], TransformerOptions { batch_first: true, ..LAYER }, c.device),
        |m, x| single(m.forward(&x[0], &x[1], &AttentionMasks::default(), &AttentionMasks::causal(), &AttentionMasks::default()));
}

pub(super) mod positional_embeddings {
    use super::*;

    cases! {
        "rotary": |c| RotaryEmbedding::new(9, 8, c.device), |m, x| single(m.forward(&x[0]));
        "rotary_interleaved": |c| Ok(RotaryEmbedding::new(9, 8, c.device)?.interleaved()), |m, x| single(m.forward_at(&x[0], 3));
        "rotary_partial": |c| RotaryEmbedding::new(9, 4, c.device), |m, x| single(m.forward(&x[0]));
        "sinusoidal": |c| SinusoidalEmbedding::new(9, 6, c.device), |m, x| single(m.forward(&x[0]));
    }
}

/// Strided views in every float type; the gradient applies the inverse rotation.
pub(super) fn rotary_embeddings_of_views(device: &Device) -> Result<()> {
    let rotary = RotaryEmbedding::new(40, 6, device)?;
    let plain = randn(&[2, 33, 3, 8], device)?;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = plain.to_dtype(dtype)?.to_leaf()?;
        // Adjacent heads of a position, and every other feature.
        let view = x.transpose(1, 2)?.slice_dim(-1, 0, 8, 1)?;
        let dense = x.detach().transpose(1, 2)?.contiguous()?;
        let turned = rotary.forward_at(&view, 5)?;
        let again = rotary.forward_at(&dense, 5)?;
        ensure!(turned.dtype() == dtype, "{dtype} became {}", turned.dtype());
        ensure!(turned.to_bytes()? == again.to_bytes()?, "{dtype}: a view rotates differently");
        // Rotations preserve lengths, so the gradient of half the sum of squares is x.
        let wide = turned.to_dtype(DType::F32)?;
        wide.square()?.sum_all()?.mul(0.5)?.backward()?;
        let grad = x.grad().context("a gradient")?.to_dtype(DType::F32)?;
        let within = if dtype == DType::F32 { 1e-5 } else { 4e-2 };
        super::super::host_reference::ensure_close(&grad.to_f64s()?, &x.detach().to_f64s()?, within, within)?;
    }
    let empty = Tensor::zeros([2, 0, 8], DType::F32, device)?;
    ensure!(rotary.forward(&empty)?.shape() == [2, 0, 8]);
    let every = randn(&[2, 5, 16], device)?;
    let other = every.slice_dim(-1, 0, 16, 2)?;
    ensure_same(&rotary.forward(&other)?, &rotary.forward(&other.contiguous()?)?)
}

pub(super) fn invalid_arguments_of_modules_are_refused(device: &Device) -> Result<()> {
    let x = randn(&[2, 5, 8], device)?;
    let says = |what: &str, result: forebay::error::Result<()>, part: &str| -> Result<()> {
        let text = result.err().map(|e| e.message()).unwrap_or_default();
        ensure!(text.contains(part), "{what}: `{text}` has no `{part}`");
        Ok(())
    };
    let attention = multihead(BATCH_FIRST, device)?;
    let mask = |m: &Tensor| attention.forward(&x, &x, &x, &AttentionMasks::from_attn_mask(m)).map(drop);
    says(
        "heads",
        MultiheadAttention::new(8, 3, PLAIN, device).map(drop),
        "8 features do not divide by 3 heads",
    )?;
    says("mask", mask(&randn(&[5, 4], device)?), "`attn_mask` is [5, 5] or [4, 5, 5]; got [5, 4]")?;
    let ints = Tensor::zeros([5, 5], DType::I32, device)?;
    says("mask", mask(&ints), "masks are bool (true hides) or floats")?;
    let padding = Tensor::from_bools(&[false; 5], [5], device)?;
    says(
        "padding",
        attention.forward(&x, &x, &x, &AttentionMasks::from_key_padding_mask(&padding)).map(drop),
        "`key_padding_mask` is [2, 5]",
    )?;
    let few = randn(&[2, 4, 8], device)?;
    says(
        "keys",
        attention.forward(&x, &x, &few, &AttentionMasks::default()).map(drop),
        "keys and values have one length",
    )?;
    let rotary = RotaryEmbedding::new(6, 8, device)?;
    says("rotary", rotary.forward_at(&x, 2).map(drop), "positions 2 to 7 are asked for, the table has 6")?;
    says("rotary", RotaryEmbedding::new(6, 3, device).map(drop), "3 features do not go into pairs")?;
    let table = randn(&[5, 5], device)?;
    says(
        "rotary",
        x.rotary_embedding(&table, &table, false).map(drop),
        "takes tables of [5, pairs] with at most 4 pairs",
    )?;
    let table = randn(&[5, 4], device)?.to_leaf()?;
    says("rotary", x.rotary_embedding(&table, &table, false).map(drop), "rotary_embedding: has no gradient")?;
    let options = RecurrentOptions { proj_size: 4, ..Default::default() };
    says("gru", Gru::new(8, 6, options, device).map(drop), "proj_size is 4; it is for an Lstm")?;
    let lstm = Lstm::new(7, 6, RecurrentOptions::default(), device)?;
    says("lstm", lstm.forward(&x, None).map(drop), "takes at least one step of 7 features; got [2, 5, 8]")?;
    let lstm = Lstm::new(8, 6, RecurrentOptions::default(), device)?;
    let lengths = Tensor::from_slice(&[1i32, 2], [2], device)?;
    says("lengths", lstm.forward_lengths(&x, &lengths, None).map(drop), "lengths are integers, [5]")?;
    says("state", lstm.forward(&x, Some((&x, &x))).map(drop), "states are [1, 5, 6]")?;
    says("dropout", Dropout::new(1.5).forward(&x).map(drop), "1.5 is not a probability")?;
    says(
        "shuffle",
        x.pixel_shuffle(3).map(drop),
        "the channels do not divide by the square of 3; got [2, 5, 8]",
    )?;
    says("linear", Linear::new(7, 3, device)?.forward(&x).map(drop), "[2, 5, 8]")
}

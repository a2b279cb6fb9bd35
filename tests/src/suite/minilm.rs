//! MiniLM's published weights compared with the vectors of sentence-transformers, which `benches/peers/minilm.py`
//! stores in `tests/minilm`. `cargo xtask embed` or `cargo xtask test` fetches the weights.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use forebay::autograd::no_grad;
use forebay::device::Device;
use forebay::io::safetensors;
use forebay::nn::{Bert, BertOptions, Module};

use super::host_reference::ensure_close;
use super::{skip, tests};

tests![embeddings_match_sentence_transformers];

const EXPECTED: &[u8] = include_bytes!("../../minilm/embeddings.safetensors");

fn embeddings_match_sentence_transformers(device: &Device) -> Result<()> {
    let Some(folder) = std::env::var_os("FOREBAY_MINILM").map(PathBuf::from) else {
        return skip("FOREBAY_MINILM names no folder with the weights; `cargo xtask embed` fetches them");
    };
    let config = std::fs::read_to_string(folder.join("config.json")).context("the model's configuration")?;
    let model = Bert::new(&BertOptions::from_config(&config)?, device)?;
    model.load_bert(&safetensors::load(folder.join("model.safetensors"), device)?)?;
    model.eval();
    let recorded = safetensors::from_bytes(EXPECTED, device)?.0;
    let of = |name: &str| recorded.get(name).with_context(|| format!("no `{name}` is recorded"));
    let _no_grad = no_grad();
    let vectors = model.sentence_embeddings(of("tokens")?, of("mask")?)?;
    ensure!(vectors.shape() == of("embeddings")?.shape(), "{:?}", vectors.shape());
    ensure_close(&vectors.to_f64s()?, &of("embeddings")?.to_f64s()?, 0.0, 1e-5)
        .context("vectors of sentences")?;
    let pooled = model.pooler_output(&model.forward(of("tokens")?, Some(of("mask")?))?)?;
    ensure_close(&pooled.to_f64s()?, &of("pooled")?.to_f64s()?, 0.0, 1e-4).context("the pooler")
}

//! Compares the meaning of sentences with MiniLM's published weights and tokenizer, on any device.
//!
//!     cargo xtask embed                                   # fetches the model, and compares six sentences
//!     cargo xtask embed -- "first sentence" "second"      # or your own
//!     cargo run --release -p sentence_embeddings -- --model FOLDER

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use forebay::autograd::no_grad;
use forebay::io::safetensors;
use forebay::memory::Bytes;
use forebay::nn::{Bert, BertOptions};
use forebay::prelude::*;
use tokenizers::{PaddingParams, Tokenizer, TruncationParams};

/// Maximum length of the texts that the model was trained on, in tokens; longer texts are truncated.
const MAX_TOKENS: usize = 256;
const SENTENCES: [&str; 6] = [
    "The cat sits on the mat.",
    "A kitten is resting on a rug.",
    "How do I train a neural network?",
    "What is the best way to fit a deep learning model?",
    "The stock market fell sharply today.",
    "Shares lost much of their value this afternoon, to the surprise of analysts.",
];

/// Compares sentences by meaning.
#[derive(Parser)]
struct Options {
    /// Folder of config.json, model.safetensors and tokenizer.json; `cargo xtask embed` downloads it
    #[arg(long, env = "FOREBAY_MINILM")]
    model: Option<PathBuf>,
    /// Device: `cuda:0`, `wgpu`; the best device by default
    #[arg(long)]
    device: Option<String>,
    /// Sentences to compare; six built-in ones by default
    sentences: Vec<String>,
}

/// Model with its tokenizer.
struct Encoder {
    tokenizer: Tokenizer,
    model: Bert,
    device: Device,
}

impl Encoder {
    fn open(folder: &Path, device: &Device) -> Result<Self> {
        let file = |name: &str| folder.join(name);
        let config = std::fs::read_to_string(file("config.json")).with_context(|| {
            format!("{} holds no model; `cargo xtask embed` fetches one", folder.display())
        })?;
        let model = Bert::new(&BertOptions::from_config(&config)?, device)?;
        model.load_bert(&safetensors::load(file("model.safetensors"), device)?)?;
        model.eval();
        Ok(Self { tokenizer: load_tokenizer(folder)?, model, device: device.clone() })
    }

    /// Returns one vector of length 1 for each sentence.
    fn encode(&self, sentences: &[String]) -> Result<Tensor> {
        let (ids, mask) = tokenize(&self.tokenizer, sentences)?;
        let tensor = |rows: &[Vec<i32>]| {
            let shape = [rows.len(), rows.first().map_or(0, Vec::len)];
            Tensor::from_slice(&rows.concat(), shape, &self.device)
        };
        let _no_grad = no_grad();
        Ok(self.model.sentence_embeddings(&tensor(&ids)?, &tensor(&mask)?)?)
    }
}

/// Loads a tokenizer that pads to the longest sentence of a batch.
fn load_tokenizer(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let read = Tokenizer::from_file(&path);
    let mut tokenizer = read.map_err(|e| anyhow!("{} is not a tokenizer: {e}", path.display()))?;
    tokenizer.with_padding(Some(PaddingParams::default()));
    let cut = TruncationParams { max_length: MAX_TOKENS, ..TruncationParams::default() };
    tokenizer.with_truncation(Some(cut)).map_err(|e| anyhow!(e))?;
    Ok(tokenizer)
}

/// Rows of tokens, one for each sentence.
type TokenBatch = Vec<Vec<i32>>;

/// Returns token ids and the attention mask (0 for padding), with one row for each sentence.
fn tokenize(tokenizer: &Tokenizer, sentences: &[String]) -> Result<(TokenBatch, TokenBatch)> {
    let encoded = tokenizer.encode_batch(sentences.to_vec(), true).map_err(|e| anyhow!(e))?;
    let row = |numbers: &[u32]| numbers.iter().map(|&n| n as i32).collect();
    Ok(encoded.iter().map(|e| (row(e.get_ids()), row(e.get_attention_mask()))).unzip())
}

/// Returns the folder that the user named, or the one that `cargo xtask embed` fills.
fn model_dir(named: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(folder) = named {
        return Ok(folder);
    }
    let here = std::env::current_dir().context("there is no working directory")?;
    let found = here.ancestors().map(|f| f.join(".forebay/minilm")).find(|f| f.is_dir());
    found.context("no model was found; `cargo xtask embed` fetches one, and `--model FOLDER` names one")
}

fn main() -> Result<()> {
    let options = Options::parse();
    let device = match &options.device {
        Some(id) => Device::open(id)?,
        None => Device::best()?,
    };
    println!("{}", device.info());
    let sentences = match options.sentences.as_slice() {
        [] => SENTENCES.map(str::to_owned).to_vec(),
        [_] => bail!("one sentence has nothing to be compared with; give two or more"),
        given => given.to_vec(),
    };
    let encoder = Encoder::open(&model_dir(options.model)?, &device)?;
    let embeddings = encoder.encode(&sentences)?;
    let cosines: Vec<f32> = embeddings.matmul(&embeddings.t()?)?.to_vec()?;
    for (k, sentence) in sentences.iter().enumerate() {
        println!("{:>2}  {sentence}", k + 1);
    }
    println!("\ncosines:");
    let rows: Vec<&[f32]> = cosines.chunks(sentences.len()).collect();
    let heads: String = (1..=sentences.len()).map(|k| format!("{k:>7}")).collect();
    println!("  {heads}");
    for (k, row) in rows.iter().enumerate() {
        let numbers: String = row.iter().map(|c| format!("{c:>7.3}")).collect();
        println!("{:>2}{numbers}", k + 1);
    }
    println!();
    for (k, row) in rows.iter().enumerate() {
        let others = row.iter().enumerate().filter(|(other, _)| *other != k);
        if let Some((nearest, cosine)) = others.max_by(|a, b| a.1.total_cmp(b.1)) {
            println!("{:>2} is nearest to {} ({cosine:.3})", k + 1, nearest + 1);
        }
    }
    println!("\nmemory at its peak: {}", Bytes(device.memory().allocated_bytes.all.peak));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Token ids from sentence-transformers. The conformance suite compares the vectors.
    const REFERENCE: &str = include_str!("../../../tests/minilm/tokens.json");

    #[test]
    fn the_tokenizer_makes_the_expected_tokens() -> Result<()> {
        let named = std::env::var_os("FOREBAY_MINILM").map(PathBuf::from);
        let folder = match model_dir(named) {
            Ok(folder) => folder,
            Err(why) => {
                println!("skipped: {why}");
                return Ok(());
            }
        };
        let reference: serde_json::Value = serde_json::from_str(REFERENCE)?;
        let tokenizer = load_tokenizer(&folder)?;
        for (texts, expected) in [("sentences", "tokens"), ("long", "long_tokens")] {
            let texts: Vec<String> = serde_json::from_value(reference[texts].clone())?;
            let expected: Vec<Vec<i32>> = serde_json::from_value(reference[expected].clone())?;
            assert_eq!(tokenize(&tokenizer, &texts)?.0, expected);
        }
        Ok(())
    }
}

//! Byte-level BPE tokenizer: GPT-2's own, or one that is trained on the text.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use forebay::prelude::*;
use tokenizers::AddedToken;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};

use super::options::Options;

/// Bytes in a chunk. Chunks end at line ends, and are encoded in parallel.
const CHUNK_BYTES: usize = 1 << 18;
/// Maximum number of chunks for the training of a tokenizer.
const MAX_TRAINING_CHUNKS: usize = 64;

/// Byte-level BPE tokenizer. Single bytes are tokens, so every text can be encoded.
pub(crate) struct Tokenizer(tokenizers::Tokenizer);

/// Returns the tokenizer and the text as tokens.
pub(crate) fn load_tokens(options: &Options, vocabulary: usize) -> Result<(Tokenizer, Vec<u32>)> {
    let path = match &options.data {
        Some(path) => path.clone(),
        None => Text::shakespeare_file()?,
    };
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("{} cannot be read as a text in UTF-8", path.display()))?;
    let beside = |weights: &Path| weights.with_extension("tokenizer.json");
    let given: Option<PathBuf> = match (&options.tokenizer, &options.resume) {
        (Some(path), _) => Some(path.clone()),
        // A resumed run uses the tokenizer of its first run.
        (None, Some(checkpoint)) => Some(beside(checkpoint)),
        (None, None) => None,
    };
    let tokenizer = match &given {
        Some(path) => Tokenizer::open(path)?,
        None => Tokenizer::train(&text, vocabulary)?,
    };
    tokenizer.save(&beside(&options.save))?;
    let tokens = tokenizer.encode_all(&text)?;
    Ok((tokenizer, tokens))
}

impl Tokenizer {
    fn open(path: &Path) -> Result<Self> {
        let read = tokenizers::Tokenizer::from_file(path);
        read.map(Self).map_err(|e| anyhow!("{} is not a tokenizer: {e}", path.display()))
    }

    /// Trains a BPE tokenizer with this many tokens.
    fn train(text: &str, vocabulary: usize) -> Result<Self> {
        let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        let trainer = BpeTrainer::builder()
            .vocab_size(vocabulary)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from("<|endoftext|>", true)])
            .build();
        let pieces = split_chunks(text).into_iter().take(MAX_TRAINING_CHUNKS);
        tokenizer.train(&mut TrainerWrapper::BpeTrainer(trainer), pieces).map_err(|e| anyhow!(e))?;
        Ok(Self(tokenizer))
    }

    fn save(&self, path: &Path) -> Result<()> {
        let text = self.0.to_string(false).map_err(|e| anyhow!(e))?;
        Ok(forebay::io::write_bytes(path, text)?)
    }

    /// Returns the number of tokens in the vocabulary.
    pub(crate) fn len(&self) -> usize {
        self.0.get_vocab_size(true)
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoded = self.0.encode_fast(text, false).map_err(|e| anyhow!(e))?;
        Ok(encoded.get_ids().to_vec())
    }

    fn encode_all(&self, text: &str) -> Result<Vec<u32>> {
        let encoded = self.0.encode_batch_fast(split_chunks(text), false).map_err(|e| anyhow!(e))?;
        Ok(encoded.iter().flat_map(|piece| piece.get_ids()).copied().collect())
    }

    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.0.decode(tokens, false).map_err(|e| anyhow!(e))
    }
}

/// Splits a text into chunks that end at line ends.
fn split_chunks(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        // In UTF-8, this byte occurs in no other character.
        let line = rest.bytes().skip(CHUNK_BYTES).position(|byte| byte == b'\n');
        let (piece, after) = rest.split_at(line.map_or(rest.len(), |at| CHUNK_BYTES + at + 1));
        pieces.push(piece);
        rest = after;
    }
    pieces
}

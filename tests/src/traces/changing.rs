//! Synthetic workloads of programs whose blocks change their sizes: sequence lengths of training, and caches that grow
//! by concatenation. Their shapes come from the seed too.

use super::serving::DecoderShape;
use super::trace_builder::{BlockId, TraceBuilder};
use super::transformers::{SimulatedAdam, TransformerShape, simulate_training};

/// Returns a transformer of random depth and width.
fn random_transformer(p: &mut TraceBuilder) -> TransformerShape {
    TransformerShape {
        layers: p.rand_range(4, 20),
        width: 128 * p.rand_range(3, 10),
        heads: 8,
        vocabulary: 8_000 * p.rand_range(1, 7),
        element_size: 2 * p.rand_range(1, 2),
        materializes_scores: p.rand_range(0, 2) == 0,
    }
}

/// Returns random steps: a batch size, and a length of up to `max_length` for each step.
fn random_lengths(p: &mut TraceBuilder, steps: u64, max_length: u64) -> Vec<(u64, u64)> {
    let batch = p.rand_range(4, 12);
    (0..steps).map(|_| (batch, p.rand_range(max_length / 8, max_length))).collect()
}

/// Training on sequences padded to the longest of the batch.
pub(super) fn train_padded(p: &mut TraceBuilder) {
    let net = random_transformer(p);
    let steps = random_lengths(p, 24, 512);
    simulate_training(p, &net, true, steps, |p, b, t, g| net.forward_backward(p, b, t, g));
}

/// Trains like [`train_padded`] with activation checkpointing, and lengths rounded to multiples of 8.
pub(super) fn train_checkpointed(p: &mut TraceBuilder) {
    let net = random_transformer(p);
    let steps = random_lengths(p, 12, 128).into_iter().map(|(batch, length)| (batch, 8 * length));
    simulate_training(p, &net, false, steps, |p, b, t, g| net.forward_backward_checkpointed(p, b, t, g));
}

/// Batches of a constant number of tokens, sorted by length within groups of steps.
pub(super) fn train_sorted(p: &mut TraceBuilder) {
    let net = random_transformer(p);
    let tokens = 1024 * p.rand_range(2, 6);
    let mut steps = Vec::new();
    for _ in 0..4 {
        let mut group: Vec<u64> = (0..6).map(|_| p.rand_range(32, 512)).collect();
        group.sort_unstable();
        steps.extend(group.into_iter().map(|length| (tokens / length, length)));
    }
    simulate_training(p, &net, false, steps, |p, b, t, g| net.forward_backward(p, b, t, g));
}

/// Training on short sequences with evaluation on longer ones.
pub(super) fn train_and_evaluate(p: &mut TraceBuilder) {
    let net = random_transformer(p);
    let _held = net.alloc_parameters(p);
    let (elements, mut adam) = (net.param_numels(), SimulatedAdam::default());
    for _ in 0..4 {
        for (batch, length) in random_lengths(p, 4, 384) {
            let mut gradients = Vec::new();
            net.forward_backward(p, batch, length, &mut gradients);
            adam.step(p, &elements, false);
            p.free(gradients);
        }
        for (batch, length) in random_lengths(p, 4, 768) {
            net.forward_no_grad(p, 2 * batch, length);
        }
    }
}

/// Returns a decoder of random depth and width, with 16-bit weights.
fn random_decoder(p: &mut TraceBuilder) -> DecoderShape {
    let width = 256 * p.rand_range(2, 8);
    DecoderShape { layers: p.rand_range(4, 24), width, kv_width: width, vocabulary: 32_000 }
}

/// Appends tokens to the keys and values of each layer: each step allocates the longer block, copies, and frees the
/// shorter one.
fn generate_tokens(
    p: &mut TraceBuilder,
    net: &DecoderShape,
    batch: u64,
    prompt: u64,
    steps: impl IntoIterator<Item = u64>,
) {
    let mut cache: Vec<BlockId> = Vec::new();
    for _ in 0..net.layers {
        net.run_layer(p, batch * prompt);
        cache.extend(p.alloc_all([net.kv_bytes(batch * prompt); 2]));
    }
    net.run_logits(p, batch);
    let mut length = prompt;
    for tokens in steps {
        length += tokens;
        for layer in cache.chunks_mut(2) {
            net.run_layer(p, batch * tokens);
            layer.iter_mut().for_each(|block| p.replace_block(block, net.kv_bytes(batch * length)));
        }
        net.run_logits(p, batch);
    }
    p.free(cache);
}

/// One long text, token by token.
pub(super) fn cache_of_one_text(p: &mut TraceBuilder) {
    let net = random_decoder(p);
    let _held = net.alloc_parameters(p);
    let (batch, prompt) = (p.rand_range(4, 12), p.rand_range(1, 64));
    generate_tokens(p, &net, batch, prompt, std::iter::repeat_n(1, 600));
}

/// A conversation: answers token by token, with longer questions in between.
pub(super) fn cache_of_conversation(p: &mut TraceBuilder) {
    let net = random_decoder(p);
    let _held = net.alloc_parameters(p);
    let (batch, prompt) = (p.rand_range(1, 8), p.rand_range(50, 500));
    let mut steps = Vec::new();
    for _ in 0..6 {
        steps.extend(std::iter::repeat_n(1, p.rand_range(20, 80) as usize));
        steps.push(p.rand_range(20, 200));
    }
    generate_tokens(p, &net, batch, prompt, steps);
}

/// Several texts, one after the other, each with its own prompt.
pub(super) fn cache_of_texts(p: &mut TraceBuilder) {
    let net = random_decoder(p);
    let _held = net.alloc_parameters(p);
    for _ in 0..5 {
        let (batch, prompt, steps) = (p.rand_range(2, 16), p.rand_range(10, 800), p.rand_range(30, 120));
        generate_tokens(p, &net, batch, prompt, std::iter::repeat_n(1, steps as usize));
    }
}

/// A cache alone, without weights: the copies are most of the memory.
pub(super) fn cache_alone(p: &mut TraceBuilder) {
    let (layers, row, tokens) = (p.rand_range(2, 32), 512 * p.rand_range(2, 24), p.rand_range(800, 1600));
    let mut cache = p.alloc_all((0..2 * layers).map(|_| row));
    for token in 2..=tokens {
        cache.iter_mut().for_each(|block| p.replace_block(block, token * row));
    }
    p.free(cache);
}

//! Synthetic workloads: inference.

use std::collections::VecDeque;

use super::trace_builder::{BlockId, TraceBuilder};

/// Shape of a decoder for inference, in 16 bits.
pub(super) struct DecoderShape {
    pub(super) layers: u64,
    pub(super) width: u64,
    /// Elements of a token's keys in a layer; values have as many.
    pub(super) kv_width: u64,
    pub(super) vocabulary: u64,
}

const SMALL: DecoderShape = DecoderShape { layers: 12, width: 768, kv_width: 768, vocabulary: 50_304 };
const LARGE: DecoderShape = DecoderShape { layers: 32, width: 4096, kv_width: 1024, vocabulary: 128_256 };

impl DecoderShape {
    pub(super) fn alloc_parameters(&self, p: &mut TraceBuilder) -> Vec<BlockId> {
        let w = self.width;
        let layer = [w * (w + 2 * self.kv_width) * 2, w * w * 2, w * 4 * w * 2, w * 4 * w * 2, w * 2, w * 2];
        let mut held = p.alloc_all([self.vocabulary * w * 2]);
        held.extend(p.alloc_all((0..self.layers).flat_map(|_| layer)));
        held.push(p.alloc(32 << 20));
        held
    }

    /// Allocates and frees the temporaries of a layer for some tokens.
    pub(super) fn run_layer(&self, p: &mut TraceBuilder, tokens: u64) {
        let row = tokens * self.width * 2;
        let normed = p.alloc(row);
        let qkv = p.alloc(row + tokens * self.kv_width * 4);
        let mut inner = p.alloc(row);
        p.free([qkv, normed]);
        p.replace_block(&mut inner, 4 * row);
        p.replace_block(&mut inner, 4 * row);
        p.replace_block(&mut inner, row);
        p.free([inner]);
    }

    pub(super) fn run_logits(&self, p: &mut TraceBuilder, rows: u64) {
        let logits = p.alloc(rows * self.vocabulary * 2);
        let wide = p.alloc(rows * self.vocabulary * 4);
        p.alloc_scratch(rows * self.vocabulary * 4);
        p.alloc_scratch(rows * 8);
        p.free([wide, logits]);
    }

    /// Returns the bytes of a layer's keys, or values.
    pub(super) fn kv_bytes(&self, tokens: u64) -> u64 {
        tokens * self.kv_width * 2
    }
}

/// Key-value cache that is concatenated with the next token in each step.
pub(super) fn growing_cache(p: &mut TraceBuilder) {
    let _held = LARGE.alloc_parameters(p);
    for _ in 0..3 {
        let (batch, prompt, steps) = (p.rand_range(4, 16), p.rand_range(100, 2000), p.rand_range(20, 40));
        let mut cache = Vec::new();
        for _ in 0..LARGE.layers {
            LARGE.run_layer(p, batch * prompt);
            cache.extend(p.alloc_all([LARGE.kv_bytes(batch * prompt); 2]));
        }
        LARGE.run_logits(p, batch);
        for step in 1..=steps {
            for layer in cache.chunks_mut(2) {
                for block in layer {
                    p.replace_block(block, LARGE.kv_bytes(batch * (prompt + step)));
                }
                LARGE.run_layer(p, batch);
            }
            LARGE.run_logits(p, batch);
        }
        p.free(cache);
    }
}

/// Beam search: each step reorders the beams, which copies all keys and values.
pub(super) fn beam_search(p: &mut TraceBuilder) {
    let _held = SMALL.alloc_parameters(p);
    for _ in 0..3 {
        let (rows, steps) = (4 * p.rand_range(16, 48), p.rand_range(40, 80));
        let mut cache: Vec<BlockId> = Vec::new();
        for step in 1..=steps {
            let old = std::mem::take(&mut cache);
            let mut old = old.into_iter();
            for _ in 0..SMALL.layers {
                SMALL.run_layer(p, rows);
                for _ in 0..2 {
                    let joined = p.alloc(SMALL.kv_bytes(rows * step));
                    p.free(old.next());
                    cache.push(joined);
                }
            }
            SMALL.run_logits(p, rows);
            // The reordered copy of all layers exists at once, or layer by layer.
            match step % 2 {
                0 => {
                    let sizes = vec![SMALL.kv_bytes(rows * step); cache.len()];
                    let chosen = p.alloc_all(sizes);
                    p.free(std::mem::replace(&mut cache, chosen));
                }
                _ => cache.iter_mut().for_each(|block| p.replace_block(block, SMALL.kv_bytes(rows * step))),
            }
        }
        p.free(cache);
    }
}

/// Beam search over an encoder's output for texts of varying length, with a preallocated cache.
pub(super) fn encoder_beam_search(p: &mut TraceBuilder) {
    let _held = SMALL.alloc_parameters(p);
    for _ in 0..8 {
        let (texts, length) = (p.rand_range(2, 16), p.rand_range(50, 900));
        let encoded = p.alloc(texts * length * SMALL.width * 2);
        for _ in 0..SMALL.layers {
            SMALL.run_layer(p, texts * length);
        }
        let rows = texts * 5;
        let mut cache = p.alloc_all((0..2 * SMALL.layers).map(|_| SMALL.kv_bytes(rows * length)));
        p.free([encoded]);
        for step in 1..=p.rand_range(10, 25) {
            for _ in 0..SMALL.layers {
                SMALL.run_layer(p, rows);
            }
            SMALL.run_logits(p, rows);
            cache.iter_mut().for_each(|block| p.replace_block(block, SMALL.kv_bytes(rows * (length + step))));
        }
        p.free(cache);
    }
}

/// Continuous batching: each request has its own key-value cache, which grows in pages of 256 tokens.
pub(super) fn continuous_batching(p: &mut TraceBuilder) {
    let _held = LARGE.alloc_parameters(p);
    let mut requests: Vec<(u64, u64, Vec<BlockId>)> = Vec::new();
    for _ in 0..400 {
        if requests.len() < 32 && p.rand_range(0, 2) == 0 {
            let (prompt, answer) = (p.rand_range(30, 3000), p.rand_range(10, 600));
            LARGE.run_layer(p, prompt);
            let pages = prompt.div_ceil(256);
            let held = p.alloc_all((0..pages).map(|_| LARGE.layers * 2 * LARGE.kv_bytes(256)));
            requests.push((prompt, answer, held));
        }
        LARGE.run_layer(p, requests.len() as u64);
        LARGE.run_logits(p, requests.len().max(1) as u64);
        for (length, left, held) in &mut requests {
            (*length, *left) = (*length + 8, left.saturating_sub(8));
            if held.len() as u64 * 256 < *length {
                held.push(p.alloc(LARGE.layers * 2 * LARGE.kv_bytes(256)));
            }
        }
        requests.retain_mut(|(_, left, held)| {
            let ended = *left == 0;
            if ended {
                p.free(held.drain(..));
            }
            !ended
        });
    }
}

/// Continuous batching with one contiguous cache for each request.
pub(super) fn contiguous_caches(p: &mut TraceBuilder) {
    let _held = SMALL.alloc_parameters(p);
    let mut requests: Vec<(u64, BlockId)> = Vec::new();
    for _ in 0..600 {
        if requests.len() < 48 {
            let (prompt, answer) = (p.rand_range(30, 2000), p.rand_range(10, 400));
            for _ in 0..2 {
                SMALL.run_layer(p, prompt);
            }
            requests.push((answer, p.alloc(SMALL.layers * 2 * SMALL.kv_bytes(prompt + answer))));
        }
        SMALL.run_layer(p, requests.len() as u64);
        SMALL.run_logits(p, requests.len() as u64);
        requests.retain_mut(|(left, block)| {
            *left = left.saturating_sub(16);
            if *left == 0 {
                p.free([*block]);
            }
            *left > 0
        });
    }
}

/// Speculative decoding: caches of a draft and a large model, truncated after a rejected guess.
pub(super) fn speculative_decoding(p: &mut TraceBuilder) {
    let (_large, _small) = (LARGE.alloc_parameters(p), SMALL.alloc_parameters(p));
    for _ in 0..4 {
        let mut length = p.rand_range(200, 1500);
        let mut caches = p.alloc_all((0..2 * LARGE.layers).map(|_| LARGE.kv_bytes(length)));
        let mut guessing = p.alloc_all((0..2 * SMALL.layers).map(|_| SMALL.kv_bytes(length)));
        for _ in 0..12 {
            for guess in 1..=4 {
                guessing.iter_mut().for_each(|block| p.replace_block(block, SMALL.kv_bytes(length + guess)));
                SMALL.run_logits(p, 1);
            }
            caches.iter_mut().for_each(|block| p.replace_block(block, LARGE.kv_bytes(length + 4)));
            LARGE.run_logits(p, 4);
            length += p.rand_range(1, 4);
        }
        p.free(caches);
        p.free(guessing);
    }
}

/// Speech of varying length: an encoder over frames, followed by a decoder.
pub(super) fn speech(p: &mut TraceBuilder) {
    let _held = SMALL.alloc_parameters(p);
    for _ in 0..12 {
        let (batch, frames) = (p.rand_range(1, 16), p.rand_range(200, 3000));
        let mut flow = p.alloc(batch * frames * 80 * 4);
        p.replace_block(&mut flow, batch * frames * SMALL.width * 4);
        p.replace_block(&mut flow, batch * frames / 2 * SMALL.width * 4);
        for _ in 0..SMALL.layers {
            let scores = p.alloc(batch * 12 * (frames / 2) * (frames / 2) * 2);
            p.alloc_scratch(batch * frames / 2 * SMALL.width * 4);
            p.free([scores]);
            SMALL.run_layer(p, batch * frames / 2);
            p.replace_block(&mut flow, batch * frames / 2 * SMALL.width * 4);
        }
        let mut cache = p.alloc_all((0..2 * SMALL.layers).map(|_| SMALL.kv_bytes(batch)));
        for step in 1..=p.rand_range(10, 30) {
            cache.iter_mut().for_each(|block| p.replace_block(block, SMALL.kv_bytes(batch * step)));
            SMALL.run_logits(p, batch);
        }
        p.free(cache);
        p.free([flow]);
    }
}

/// Several models with least-recently-used eviction: each is loaded on request.
pub(super) fn model_eviction(p: &mut TraceBuilder) {
    let mut loaded: VecDeque<(u64, Vec<BlockId>)> = VecDeque::new();
    for _ in 0..60 {
        let which = p.rand_range(1, 7);
        match loaded.iter().position(|(name, _)| *name == which) {
            Some(at) => {
                let one = loaded.remove(at);
                loaded.extend(one);
            }
            None => {
                if loaded.len() == 3
                    && let Some((_, gone)) = loaded.pop_front()
                {
                    p.free(gone);
                }
                let net = DecoderShape {
                    layers: 8 + 2 * which,
                    width: 512 + 128 * which,
                    kv_width: 512,
                    vocabulary: 32_000,
                };
                loaded.push_back((which, net.alloc_parameters(p)));
            }
        }
        let (rows, net) = (p.rand_range(16, 3000), DecoderShape { width: 512 + 128 * which, ..SMALL });
        for _ in 0..8 {
            net.run_layer(p, rows);
        }
    }
}

/// Embeddings of texts in batches by length, and nearest-neighbour search.
pub(super) fn search(p: &mut TraceBuilder) {
    let _held = SMALL.alloc_parameters(p);
    let mut index = Vec::new();
    for _ in 0..60 {
        let (batch, length) = (p.rand_range(8, 256), p.rand_range(8, 512));
        let mut flow = p.alloc(batch * length * SMALL.width * 2);
        for _ in 0..4 {
            let scores = p.alloc(batch * 12 * length * length * 2);
            p.alloc_scratch(batch * 12 * length * length * 2);
            p.free([scores]);
            SMALL.run_layer(p, batch * length);
            p.replace_block(&mut flow, batch * length * SMALL.width * 2);
        }
        index.push(p.alloc(batch * SMALL.width * 4));
        p.free([flow]);
        let distances = p.alloc(batch * index.len() as u64 * 130 * 4);
        let order = p.alloc(batch * index.len() as u64 * 130 * 8);
        p.free([distances, order]);
    }
}

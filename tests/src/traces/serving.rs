//! Models that answer.

use std::collections::VecDeque;

use super::program::{Block, Program};

/// The shape of a decoder that answers, in 16 bits.
struct Decoder {
    layers: u64,
    width: u64,
    /// Elements of a token's keys, and as many of its values.
    keys: u64,
    vocabulary: u64,
}

const SMALL: Decoder = Decoder { layers: 12, width: 768, keys: 768, vocabulary: 50_304 };
const LARGE: Decoder = Decoder { layers: 32, width: 4096, keys: 1024, vocabulary: 128_256 };

impl Decoder {
    fn load(&self, p: &mut Program) -> Vec<Block> {
        let w = self.width;
        let layer = [w * (w + 2 * self.keys) * 2, w * w * 2, w * 4 * w * 2, w * 4 * w * 2, w * 2, w * 2];
        let mut held = p.take_all([self.vocabulary * w * 2]);
        held.extend(p.take_all((0..self.layers).flat_map(|_| layer)));
        held.push(p.take(32 << 20));
        held
    }

    /// What a layer needs for some tokens, beside what it keeps.
    fn layer(&self, p: &mut Program, tokens: u64) {
        let row = tokens * self.width * 2;
        let normed = p.take(row);
        let qkv = p.take(row + tokens * self.keys * 4);
        let mut inner = p.take(row);
        p.free([qkv, normed]);
        p.next(&mut inner, 4 * row);
        p.next(&mut inner, 4 * row);
        p.next(&mut inner, row);
        p.free([inner]);
    }

    fn logits(&self, p: &mut Program, rows: u64) {
        let logits = p.take(rows * self.vocabulary * 2);
        let wide = p.take(rows * self.vocabulary * 4);
        p.scratch(rows * self.vocabulary * 4);
        p.scratch(rows * 8);
        p.free([wide, logits]);
    }

    /// The bytes of a layer's keys, or values.
    fn cache(&self, tokens: u64) -> u64 {
        tokens * self.keys * 2
    }
}

/// Keys and values that are joined with those of the next token in each step.
pub(super) fn growing_cache(p: &mut Program) {
    let _held = LARGE.load(p);
    for _ in 0..3 {
        let (batch, prompt, steps) = (p.any(4, 16), p.any(100, 2000), p.any(20, 40));
        let mut cache = Vec::new();
        for _ in 0..LARGE.layers {
            LARGE.layer(p, batch * prompt);
            cache.extend(p.take_all([LARGE.cache(batch * prompt); 2]));
        }
        LARGE.logits(p, batch);
        for step in 1..=steps {
            for layer in cache.chunks_mut(2) {
                for block in layer {
                    p.next(block, LARGE.cache(batch * (prompt + step)));
                }
                LARGE.layer(p, batch);
            }
            LARGE.logits(p, batch);
        }
        p.free(cache);
    }
}

/// Beams: in each step they are chosen anew, which copies all keys and values.
pub(super) fn beams(p: &mut Program) {
    let _held = SMALL.load(p);
    for _ in 0..3 {
        let (rows, steps) = (4 * p.any(16, 48), p.any(40, 80));
        let mut cache: Vec<Block> = Vec::new();
        for step in 1..=steps {
            let old = std::mem::take(&mut cache);
            let mut old = old.into_iter();
            for _ in 0..SMALL.layers {
                SMALL.layer(p, rows);
                for _ in 0..2 {
                    let joined = p.take(SMALL.cache(rows * step));
                    p.free(old.next());
                    cache.push(joined);
                }
            }
            SMALL.logits(p, rows);
            // Reordered: all of them are there twice for a moment, or one after the other.
            match step % 2 {
                0 => {
                    let sizes = vec![SMALL.cache(rows * step); cache.len()];
                    let chosen = p.take_all(sizes);
                    p.free(std::mem::replace(&mut cache, chosen));
                }
                _ => cache.iter_mut().for_each(|block| p.next(block, SMALL.cache(rows * step))),
            }
        }
        p.free(cache);
    }
}

/// Beams over an encoder's output, of texts of any length: the cache has room for as many tokens at once as comes next in a row.
pub(super) fn beams_of_texts(p: &mut Program) {
    let _held = SMALL.load(p);
    for _ in 0..8 {
        let (texts, length) = (p.any(2, 16), p.any(50, 900));
        let encoded = p.take(texts * length * SMALL.width * 2);
        for _ in 0..SMALL.layers {
            SMALL.layer(p, texts * length);
        }
        let rows = texts * 5;
        let mut cache = p.take_all((0..2 * SMALL.layers).map(|_| SMALL.cache(rows * length)));
        p.free([encoded]);
        for step in 1..=p.any(10, 25) {
            for _ in 0..SMALL.layers {
                SMALL.layer(p, rows);
            }
            SMALL.logits(p, rows);
            cache.iter_mut().for_each(|block| p.next(block, SMALL.cache(rows * (length + step))));
        }
        p.free(cache);
    }
}

/// Requests that arrive at any time: each has keys and values of its own, which grow by pages of 256 tokens.
pub(super) fn arrivals(p: &mut Program) {
    let _held = LARGE.load(p);
    let mut requests: Vec<(u64, u64, Vec<Block>)> = Vec::new();
    for _ in 0..400 {
        if requests.len() < 32 && p.any(0, 2) == 0 {
            let (prompt, answer) = (p.any(30, 3000), p.any(10, 600));
            LARGE.layer(p, prompt);
            let pages = prompt.div_ceil(256);
            let held = p.take_all((0..pages).map(|_| LARGE.layers * 2 * LARGE.cache(256)));
            requests.push((prompt, answer, held));
        }
        LARGE.layer(p, requests.len() as u64);
        LARGE.logits(p, requests.len().max(1) as u64);
        for (length, left, held) in &mut requests {
            (*length, *left) = (*length + 8, left.saturating_sub(8));
            if held.len() as u64 * 256 < *length {
                held.push(p.take(LARGE.layers * 2 * LARGE.cache(256)));
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

/// The same, with one piece for each request, of its size.
pub(super) fn arrivals_in_one_piece(p: &mut Program) {
    let _held = SMALL.load(p);
    let mut requests: Vec<(u64, Block)> = Vec::new();
    for _ in 0..600 {
        if requests.len() < 48 {
            let (prompt, answer) = (p.any(30, 2000), p.any(10, 400));
            for _ in 0..2 {
                SMALL.layer(p, prompt);
            }
            requests.push((answer, p.take(SMALL.layers * 2 * SMALL.cache(prompt + answer))));
        }
        SMALL.layer(p, requests.len() as u64);
        SMALL.logits(p, requests.len() as u64);
        requests.retain_mut(|(left, block)| {
            *left = left.saturating_sub(16);
            if *left == 0 {
                p.free([*block]);
            }
            *left > 0
        });
    }
}

/// A small model that guesses for a large one: caches of both, cut back where a guess was wrong.
pub(super) fn guesses(p: &mut Program) {
    let (_large, _small) = (LARGE.load(p), SMALL.load(p));
    for _ in 0..4 {
        let mut length = p.any(200, 1500);
        let mut caches = p.take_all((0..2 * LARGE.layers).map(|_| LARGE.cache(length)));
        let mut guessing = p.take_all((0..2 * SMALL.layers).map(|_| SMALL.cache(length)));
        for _ in 0..12 {
            for guess in 1..=4 {
                guessing.iter_mut().for_each(|block| p.next(block, SMALL.cache(length + guess)));
                SMALL.logits(p, 1);
            }
            caches.iter_mut().for_each(|block| p.next(block, LARGE.cache(length + 4)));
            LARGE.logits(p, 4);
            length += p.any(1, 4);
        }
        p.free(caches);
        p.free(guessing);
    }
}

/// Sounds of any length: an encoder over windows, and a decoder behind it.
pub(super) fn sounds(p: &mut Program) {
    let _held = SMALL.load(p);
    for _ in 0..12 {
        let (batch, frames) = (p.any(1, 16), p.any(200, 3000));
        let mut flow = p.take(batch * frames * 80 * 4);
        p.next(&mut flow, batch * frames * SMALL.width * 4);
        p.next(&mut flow, batch * frames / 2 * SMALL.width * 4);
        for _ in 0..SMALL.layers {
            let scores = p.take(batch * 12 * (frames / 2) * (frames / 2) * 2);
            p.scratch(batch * frames / 2 * SMALL.width * 4);
            p.free([scores]);
            SMALL.layer(p, batch * frames / 2);
            p.next(&mut flow, batch * frames / 2 * SMALL.width * 4);
        }
        let mut cache = p.take_all((0..2 * SMALL.layers).map(|_| SMALL.cache(batch)));
        for step in 1..=p.any(10, 30) {
            cache.iter_mut().for_each(|block| p.next(block, SMALL.cache(batch * step)));
            SMALL.logits(p, batch);
        }
        p.free(cache);
        p.free([flow]);
    }
}

/// Models that take turns: each is loaded when it is asked for, and the one that was asked for least lately goes.
pub(super) fn models_in_turn(p: &mut Program) {
    let mut loaded: VecDeque<(u64, Vec<Block>)> = VecDeque::new();
    for _ in 0..60 {
        let which = p.any(1, 7);
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
                let net = Decoder {
                    layers: 8 + 2 * which,
                    width: 512 + 128 * which,
                    keys: 512,
                    vocabulary: 32_000,
                };
                loaded.push_back((which, net.load(p)));
            }
        }
        let (rows, net) = (p.any(16, 3000), Decoder { width: 512 + 128 * which, ..SMALL });
        for _ in 0..8 {
            net.layer(p, rows);
        }
    }
}

/// Vectors of texts in batches by length, and a search among those that there are.
pub(super) fn search(p: &mut Program) {
    let _held = SMALL.load(p);
    let mut index = Vec::new();
    for _ in 0..60 {
        let (batch, length) = (p.any(8, 256), p.any(8, 512));
        let mut flow = p.take(batch * length * SMALL.width * 2);
        for _ in 0..4 {
            let scores = p.take(batch * 12 * length * length * 2);
            p.scratch(batch * 12 * length * length * 2);
            p.free([scores]);
            SMALL.layer(p, batch * length);
            p.next(&mut flow, batch * length * SMALL.width * 2);
        }
        index.push(p.take(batch * SMALL.width * 4));
        p.free([flow]);
        let distances = p.take(batch * index.len() as u64 * 130 * 4);
        let order = p.take(batch * index.len() as u64 * 130 * 8);
        p.free([distances, order]);
    }
}

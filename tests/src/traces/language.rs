//! Trainings of language models.

use super::program::Program;
use super::transformers::{Adam, BERT, MEDIUM, SMALL, Transformer, train};

/// Steps of one batch, with lengths of the seed: multiples of `of`.
fn lengths(p: &mut Program, steps: u64, batch: u64, of: u64, most: u64) -> Vec<(u64, u64)> {
    (0..steps).map(|_| (batch, of * p.any(most / of / 8, most / of))).collect()
}

/// Any length in each step.
pub(super) fn varying(p: &mut Program) {
    let steps = lengths(p, 16, 8, 1, 1024);
    train(p, &SMALL, false, steps, |p, b, t, g| SMALL.pass(p, b, t, g));
}

/// Lengths of a few kinds, and an optimiser that makes lists of temporaries.
pub(super) fn buckets(p: &mut Program) {
    let steps = lengths(p, 16, 8, 128, 1024);
    train(p, &SMALL, true, steps, |p, b, t, g| SMALL.pass(p, b, t, g));
}

/// About as many tokens in each step: short sequences in large batches.
pub(super) fn tokens(p: &mut Program) {
    let steps: Vec<_> = (0..14).map(|_| p.any(24, 512)).map(|t| (8192 / t, t)).collect();
    train(p, &BERT, false, steps, |p, b, t, g| BERT.pass(p, b, t, g));
}

/// Sequences that grow longer in the course of the training.
pub(super) fn curriculum(p: &mut Program) {
    let steps = (1..=16).map(|step| (8, 64 * step));
    train(p, &SMALL, false, steps, |p, b, t, g| SMALL.pass(p, b, t, g));
}

/// Layers that run again for their gradients.
pub(super) fn checkpointed(p: &mut Program) {
    let steps = lengths(p, 7, 8, 16, 1024);
    train(p, &MEDIUM, false, steps, |p, b, t, g| MEDIUM.checkpointed(p, b, t, g));
}

/// Micro-batches of different lengths, whose gradients add up.
pub(super) fn accumulated(p: &mut Program) {
    let steps = (0..5).map(|_| (4, 0));
    train(p, &SMALL, false, steps, |p, batch, _, gradients| {
        for micro in 0..4 {
            let length = p.any(100, 1024);
            let mut more = Vec::new();
            SMALL.pass(p, batch, length, &mut more);
            match micro {
                0 => gradients.append(&mut more),
                _ => p.free(more),
            }
        }
    });
}

/// Epochs with an evaluation in larger batches behind each.
pub(super) fn evaluated(p: &mut Program) {
    let _held = BERT.load(p);
    let (elements, mut adam) = (BERT.parameters(), Adam::default());
    for _ in 0..3 {
        for _ in 0..4 {
            let (length, mut gradients) = (p.any(64, 384), Vec::new());
            BERT.pass(p, 16, length, &mut gradients);
            adam.step(p, &elements, true);
            p.free(gradients);
        }
        for _ in 0..6 {
            let length = p.any(64, 384);
            BERT.evaluate(p, 64, length);
        }
    }
}

/// Adapters of a frozen model of 16-bit weights.
pub(super) fn adapters(p: &mut Program) {
    let net =
        Transformer { layers: 24, width: 2048, heads: 16, vocabulary: 32_000, element: 2, scores: false };
    let _held = p.take_all(net.parameters().into_iter().map(|n| n * 2));
    let sizes: Vec<u64> = (0..net.layers * 4).map(|_| 16 * net.width).collect();
    let _adapters = p.take_all(sizes.iter().map(|n| n * 4));
    let mut adam = Adam::default();
    for _ in 0..10 {
        let length = p.any(128, 1024);
        let row = 4 * length * net.width * 2;
        let mut layers = Vec::new();
        for _ in 0..net.layers {
            let (sum, mut saved) = net.forward_layer(p, 4, length);
            let small = p.take_all([4 * length * 16 * 2, 4 * length * 16 * 2]);
            p.scratch(row);
            saved.extend(small);
            saved.push(sum);
            layers.push(saved);
        }
        let mut flow = p.take(row);
        let logits = p.take(4 * length * net.vocabulary * 4);
        p.scratch(4 * length * net.vocabulary * 4);
        p.free([logits]);
        let mut gradients = Vec::new();
        while let Some(saved) = layers.pop() {
            let mut wide = p.take(4 * row);
            p.next(&mut wide, row);
            gradients.extend(p.take_all([16 * net.width * 4; 4]));
            p.next(&mut flow, row);
            p.free([wide]);
            p.free(saved);
        }
        p.free([flow]);
        adam.step(p, &sizes, false);
        p.free(gradients);
    }
}

/// Weights that are gathered from other devices layer by layer, with gradients that are sent there, on queues of their own.
pub(super) fn sharded(p: &mut Program) {
    const DEVICES: u64 = 8;
    let net =
        Transformer { layers: 24, width: 2048, heads: 16, vocabulary: 32_000, element: 2, scores: false };
    let layer = 12 * net.width * net.width;
    let _shards = p.take_all((0..net.layers).flat_map(|_| [layer * 4 / DEVICES; 3]));
    for _ in 0..6 {
        let length = 64 * p.any(4, 16);
        let mut layers = Vec::new();
        let mut gathered = None;
        for _ in 0..net.layers {
            p.queue = 1;
            let ahead = p.take(layer * 2);
            p.queue = 0;
            let (sum, mut saved) = net.forward_layer(p, 4, length);
            saved.push(sum);
            layers.push(saved);
            p.free(gathered.replace(ahead));
        }
        p.free(gathered.take());
        let mut flow = net.head(p, 4, length, &mut Vec::new());
        while let Some(saved) = layers.pop() {
            p.queue = 1;
            let ahead = p.take(layer * 2);
            p.queue = 0;
            let mut gradients = Vec::new();
            net.backward_layer(p, 4, length, saved, &mut flow, &mut gradients);
            p.queue = 2;
            let flat = p.take(layer * 2);
            p.scratch(layer * 2 / DEVICES);
            p.queue = 0;
            p.free(gradients);
            p.free([flat]);
            p.free(gathered.replace(ahead));
        }
        p.free(gathered);
        p.free([flow]);
    }
}

/// Micro-batches of a pipeline: as many are under way as it has stages, and the oldest ends first.
pub(super) fn pipelined(p: &mut Program) {
    let net = Transformer { layers: 4, ..MEDIUM };
    let _held = net.load(p);
    let mut gradients = p.take_all(net.parameters().into_iter().map(|n| n * 4));
    for _ in 0..6 {
        let mut under_way = std::collections::VecDeque::new();
        for micro in 0..20 {
            if micro < 16 {
                let length = p.any(256, 1024);
                let received = p.take(4 * length * net.width * 2);
                let mut layers = Vec::new();
                for _ in 0..net.layers {
                    let (sum, mut saved) = net.forward_layer(p, 4, length);
                    saved.push(sum);
                    layers.push(saved);
                }
                under_way.push_back((length, received, layers));
            }
            if micro >= 4
                && let Some((length, received, mut layers)) = under_way.pop_front()
            {
                let mut flow = p.take(4 * length * net.width * 2);
                while let Some(saved) = layers.pop() {
                    let mut more = Vec::new();
                    net.backward_layer(p, 4, length, saved, &mut flow, &mut more);
                    p.free(more);
                }
                p.free([flow, received]);
            }
        }
    }
    p.free(gradients.drain(..));
}

/// An encoder and a decoder, of lengths of their own.
pub(super) fn translation(p: &mut Program) {
    let net = Transformer { layers: 6, width: 512, heads: 8, vocabulary: 37_000, element: 4, scores: true };
    let (_encoder, _decoder) = (net.load(p), net.load(p));
    let (elements, mut adam) = (net.parameters(), Adam::default());
    for _ in 0..20 {
        let (from, to) = (p.any(10, 200), p.any(10, 200));
        let batch = 6000 / from.max(to);
        let (mut layers, mut gradients) = (Vec::new(), Vec::new());
        for length in [from, to] {
            for _ in 0..net.layers {
                let (sum, mut saved) = net.forward_layer(p, batch, length);
                saved.push(sum);
                if length == to {
                    saved.extend(
                        p.take_all([batch * from * net.width * 8, batch * net.heads * from * to * 4]),
                    );
                }
                layers.push((length, saved));
            }
        }
        let mut flow = net.head(p, batch, to, &mut gradients);
        while let Some((length, saved)) = layers.pop() {
            net.backward_layer(p, batch, length, saved, &mut flow, &mut gradients);
        }
        p.free([flow]);
        adam.step(p, &elements, false);
        p.free(gradients);
    }
}

/// Experts of a layer that get as many tokens as a router says.
pub(super) fn experts(p: &mut Program) {
    let net = Transformer { layers: 8, ..SMALL };
    const EXPERTS: u64 = 16;
    let _held = net.load(p);
    let inner = net.width * net.width * 4;
    let elements: Vec<u64> = (0..net.layers * EXPERTS).flat_map(|_| [inner, inner]).collect();
    let _experts = p.take_all(elements.iter().map(|n| n * 4));
    let mut adam = Adam::default();
    for _ in 0..8 {
        let tokens = 8 * p.any(400, 1024);
        let (mut layers, mut gradients) = (Vec::new(), Vec::new());
        for _ in 0..net.layers {
            let (sum, mut saved) = net.forward_layer(p, 8, tokens / 8);
            saved.extend(p.take_all([tokens * EXPERTS * 4, tokens * 16, tokens * 8]));
            let mut left = 2 * tokens;
            let mut outputs = Vec::new();
            for expert in 0..EXPERTS {
                let part = if expert + 1 == EXPERTS { left } else { p.any(0, left * 2 / (EXPERTS - expert)) };
                left -= part;
                let row = part * net.width * 2;
                saved.extend(p.take_all([row, 4 * row, 4 * row]));
                outputs.push(p.take(row));
            }
            p.free(outputs);
            saved.push(sum);
            layers.push(saved);
        }
        let mut flow = net.head(p, 8, tokens / 8, &mut gradients);
        while let Some(saved) = layers.pop() {
            for _ in 0..EXPERTS {
                let part = p.any(0, tokens / 4) * net.width * 2;
                let mut wide = p.take(4 * part);
                gradients.extend(p.take_all([inner * 4, inner * 4]));
                p.next(&mut wide, part);
                p.free([wide]);
            }
            net.backward_layer(p, 8, tokens / 8, saved, &mut flow, &mut gradients);
        }
        p.free([flow]);
        adam.step(p, &elements, false);
        p.free(gradients);
    }
}

/// Preferences: a model that is trained beside one that is not, on pairs of answers.
pub(super) fn preferences(p: &mut Program) {
    let _reference = SMALL.load(p);
    let steps: Vec<_> = (0..10).map(|_| (4, p.any(100, 900))).collect();
    train(p, &SMALL, true, steps, |p, batch, length, gradients| {
        for _ in 0..2 {
            SMALL.evaluate(p, batch, length);
        }
        SMALL.pass(p, 2 * batch, length, gradients);
    });
}

/// Layers of a recurrent network, unrolled over sequences of changing lengths: very many small tensors.
pub(super) fn recurrent(p: &mut Program) {
    const WIDTH: u64 = 1024;
    let elements: Vec<u64> =
        (0..2).flat_map(|_| [4 * WIDTH * WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH, 4 * WIDTH]).collect();
    let _held = p.take_all(elements.iter().map(|n| n * 4));
    let mut adam = Adam::default();
    for _ in 0..10 {
        let (batch, length) = (64, p.any(20, 120));
        let state = batch * WIDTH * 4;
        let input = p.take(length * state);
        let mut saved = Vec::new();
        for _ in 0..2 * length {
            let gates = p.take(4 * state);
            saved.extend(p.take_all([state; 4]));
            p.free([gates]);
            saved.extend(p.take_all([state, state]));
        }
        let logits = p.take(batch * length * 10_000 * 4);
        p.scratch(batch * length * 10_000 * 4);
        p.free([logits]);
        let gradients = p.take_all(elements.iter().map(|n| n * 4));
        let mut flow = p.take(state);
        for _ in 0..2 * length {
            let gates = p.take(4 * state);
            p.next(&mut flow, state);
            let at = saved.len() - 6;
            p.free(saved.split_off(at));
            p.free([gates]);
        }
        p.free([flow, input]);
        adam.step(p, &elements, false);
        p.free(gradients);
    }
}

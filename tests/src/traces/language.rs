//! Synthetic workloads: training of language models.

use super::trace_builder::TraceBuilder;
use super::transformers::{BERT, MEDIUM, SMALL, SimulatedAdam, TransformerShape, simulate_training};

/// Returns steps of one batch size, with random lengths that are multiples of `of`.
fn lengths(p: &mut TraceBuilder, steps: u64, batch: u64, of: u64, max_length: u64) -> Vec<(u64, u64)> {
    (0..steps).map(|_| (batch, of * p.rand_range(max_length / of / 8, max_length / of))).collect()
}

/// Lengths that vary in every step.
pub(super) fn varying(p: &mut TraceBuilder) {
    let steps = lengths(p, 16, 8, 1, 1024);
    simulate_training(p, &SMALL, false, steps, |p, b, t, g| SMALL.forward_backward(p, b, t, g));
}

/// Bucketed lengths, and a foreach optimiser that allocates lists of temporaries.
pub(super) fn buckets(p: &mut TraceBuilder) {
    let steps = lengths(p, 16, 8, 128, 1024);
    simulate_training(p, &SMALL, true, steps, |p, b, t, g| SMALL.forward_backward(p, b, t, g));
}

/// Constant number of tokens in each step: short sequences in large batches.
pub(super) fn tokens(p: &mut TraceBuilder) {
    let steps: Vec<_> = (0..14).map(|_| p.rand_range(24, 512)).map(|t| (8192 / t, t)).collect();
    simulate_training(p, &BERT, false, steps, |p, b, t, g| BERT.forward_backward(p, b, t, g));
}

/// Curriculum: sequences that grow longer during training.
pub(super) fn curriculum(p: &mut TraceBuilder) {
    let steps = (1..=16).map(|step| (8, 64 * step));
    simulate_training(p, &SMALL, false, steps, |p, b, t, g| SMALL.forward_backward(p, b, t, g));
}

/// Activation checkpointing.
pub(super) fn checkpointed(p: &mut TraceBuilder) {
    let steps = lengths(p, 7, 8, 16, 1024);
    simulate_training(p, &MEDIUM, false, steps, |p, b, t, g| {
        MEDIUM.forward_backward_checkpointed(p, b, t, g)
    });
}

/// Gradient accumulation over micro-batches of different lengths.
pub(super) fn accumulated(p: &mut TraceBuilder) {
    let steps = (0..5).map(|_| (4, 0));
    simulate_training(p, &SMALL, false, steps, |p, batch, _, gradients| {
        for micro in 0..4 {
            let length = p.rand_range(100, 1024);
            let mut more = Vec::new();
            SMALL.forward_backward(p, batch, length, &mut more);
            match micro {
                0 => gradients.append(&mut more),
                _ => p.free(more),
            }
        }
    });
}

/// Epochs, each followed by an evaluation in larger batches.
pub(super) fn evaluated(p: &mut TraceBuilder) {
    let _held = BERT.alloc_parameters(p);
    let (elements, mut adam) = (BERT.param_numels(), SimulatedAdam::default());
    for _ in 0..3 {
        for _ in 0..4 {
            let (length, mut gradients) = (p.rand_range(64, 384), Vec::new());
            BERT.forward_backward(p, 16, length, &mut gradients);
            adam.step(p, &elements, true);
            p.free(gradients);
        }
        for _ in 0..6 {
            let length = p.rand_range(64, 384);
            BERT.forward_no_grad(p, 64, length);
        }
    }
}

/// LoRA adapters of a frozen 16-bit model.
pub(super) fn adapters(p: &mut TraceBuilder) {
    let net = TransformerShape {
        layers: 24,
        width: 2048,
        heads: 16,
        vocabulary: 32_000,
        element_size: 2,
        materializes_scores: false,
    };
    let _held = p.alloc_all(net.param_numels().into_iter().map(|n| n * 2));
    let sizes: Vec<u64> = (0..net.layers * 4).map(|_| 16 * net.width).collect();
    let _adapters = p.alloc_all(sizes.iter().map(|n| n * 4));
    let mut adam = SimulatedAdam::default();
    for _ in 0..10 {
        let length = p.rand_range(128, 1024);
        let row = 4 * length * net.width * 2;
        let mut layers = Vec::new();
        for _ in 0..net.layers {
            let (sum, mut saved) = net.forward_layer(p, 4, length);
            let small = p.alloc_all([4 * length * 16 * 2, 4 * length * 16 * 2]);
            p.alloc_scratch(row);
            saved.extend(small);
            saved.push(sum);
            layers.push(saved);
        }
        let mut flow = p.alloc(row);
        let logits = p.alloc(4 * length * net.vocabulary * 4);
        p.alloc_scratch(4 * length * net.vocabulary * 4);
        p.free([logits]);
        let mut gradients = Vec::new();
        while let Some(saved) = layers.pop() {
            let mut wide = p.alloc(4 * row);
            p.replace_block(&mut wide, row);
            gradients.extend(p.alloc_all([16 * net.width * 4; 4]));
            p.replace_block(&mut flow, row);
            p.free([wide]);
            p.free(saved);
        }
        p.free([flow]);
        adam.step(p, &sizes, false);
        p.free(gradients);
    }
}

/// Sharded training (FSDP): weights are gathered layer by layer, gradients are scattered, on separate queues.
pub(super) fn sharded(p: &mut TraceBuilder) {
    const DEVICES: u64 = 8;
    let net = TransformerShape {
        layers: 24,
        width: 2048,
        heads: 16,
        vocabulary: 32_000,
        element_size: 2,
        materializes_scores: false,
    };
    let layer = 12 * net.width * net.width;
    let _shards = p.alloc_all((0..net.layers).flat_map(|_| [layer * 4 / DEVICES; 3]));
    for _ in 0..6 {
        let length = 64 * p.rand_range(4, 16);
        let mut layers = Vec::new();
        let mut gathered = None;
        for _ in 0..net.layers {
            p.queue = 1;
            let ahead = p.alloc(layer * 2);
            p.queue = 0;
            let (sum, mut saved) = net.forward_layer(p, 4, length);
            saved.push(sum);
            layers.push(saved);
            p.free(gathered.replace(ahead));
        }
        p.free(gathered.take());
        let mut flow = net.loss_and_head_backward(p, 4, length, &mut Vec::new());
        while let Some(saved) = layers.pop() {
            p.queue = 1;
            let ahead = p.alloc(layer * 2);
            p.queue = 0;
            let mut gradients = Vec::new();
            net.backward_layer(p, 4, length, saved, &mut flow, &mut gradients);
            p.queue = 2;
            let flat = p.alloc(layer * 2);
            p.alloc_scratch(layer * 2 / DEVICES);
            p.queue = 0;
            p.free(gradients);
            p.free([flat]);
            p.free(gathered.replace(ahead));
        }
        p.free(gathered);
        p.free([flow]);
    }
}

/// Pipeline parallelism: one micro-batch in flight for each stage; the oldest ends first.
pub(super) fn pipelined(p: &mut TraceBuilder) {
    let net = TransformerShape { layers: 4, ..MEDIUM };
    let _held = net.alloc_parameters(p);
    let mut gradients = p.alloc_all(net.param_numels().into_iter().map(|n| n * 4));
    for _ in 0..6 {
        let mut under_way = std::collections::VecDeque::new();
        for micro in 0..20 {
            if micro < 16 {
                let length = p.rand_range(256, 1024);
                let received = p.alloc(4 * length * net.width * 2);
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
                let mut flow = p.alloc(4 * length * net.width * 2);
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

/// Encoder and decoder with different lengths.
pub(super) fn translation(p: &mut TraceBuilder) {
    let net = TransformerShape {
        layers: 6,
        width: 512,
        heads: 8,
        vocabulary: 37_000,
        element_size: 4,
        materializes_scores: true,
    };
    let (_encoder, _decoder) = (net.alloc_parameters(p), net.alloc_parameters(p));
    let (elements, mut adam) = (net.param_numels(), SimulatedAdam::default());
    for _ in 0..20 {
        let (from, to) = (p.rand_range(10, 200), p.rand_range(10, 200));
        let batch = 6000 / from.max(to);
        let (mut layers, mut gradients) = (Vec::new(), Vec::new());
        for length in [from, to] {
            for _ in 0..net.layers {
                let (sum, mut saved) = net.forward_layer(p, batch, length);
                saved.push(sum);
                if length == to {
                    saved.extend(
                        p.alloc_all([batch * from * net.width * 8, batch * net.heads * from * to * 4]),
                    );
                }
                layers.push((length, saved));
            }
        }
        let mut flow = net.loss_and_head_backward(p, batch, to, &mut gradients);
        while let Some((length, saved)) = layers.pop() {
            net.backward_layer(p, batch, length, saved, &mut flow, &mut gradients);
        }
        p.free([flow]);
        adam.step(p, &elements, false);
        p.free(gradients);
    }
}

/// Mixture of experts: a router determines the number of tokens of each expert.
pub(super) fn experts(p: &mut TraceBuilder) {
    let net = TransformerShape { layers: 8, ..SMALL };
    const EXPERTS: u64 = 16;
    let _held = net.alloc_parameters(p);
    let inner = net.width * net.width * 4;
    let elements: Vec<u64> = (0..net.layers * EXPERTS).flat_map(|_| [inner, inner]).collect();
    let _experts = p.alloc_all(elements.iter().map(|n| n * 4));
    let mut adam = SimulatedAdam::default();
    for _ in 0..8 {
        let tokens = 8 * p.rand_range(400, 1024);
        let (mut layers, mut gradients) = (Vec::new(), Vec::new());
        for _ in 0..net.layers {
            let (sum, mut saved) = net.forward_layer(p, 8, tokens / 8);
            saved.extend(p.alloc_all([tokens * EXPERTS * 4, tokens * 16, tokens * 8]));
            let mut left = 2 * tokens;
            let mut outputs = Vec::new();
            for expert in 0..EXPERTS {
                let part =
                    if expert + 1 == EXPERTS { left } else { p.rand_range(0, left * 2 / (EXPERTS - expert)) };
                left -= part;
                let row = part * net.width * 2;
                saved.extend(p.alloc_all([row, 4 * row, 4 * row]));
                outputs.push(p.alloc(row));
            }
            p.free(outputs);
            saved.push(sum);
            layers.push(saved);
        }
        let mut flow = net.loss_and_head_backward(p, 8, tokens / 8, &mut gradients);
        while let Some(saved) = layers.pop() {
            for _ in 0..EXPERTS {
                let part = p.rand_range(0, tokens / 4) * net.width * 2;
                let mut wide = p.alloc(4 * part);
                gradients.extend(p.alloc_all([inner * 4, inner * 4]));
                p.replace_block(&mut wide, part);
                p.free([wide]);
            }
            net.backward_layer(p, 8, tokens / 8, saved, &mut flow, &mut gradients);
        }
        p.free([flow]);
        adam.step(p, &elements, false);
        p.free(gradients);
    }
}

/// Preference training (DPO): a trained model and a frozen reference, on pairs of answers.
pub(super) fn preferences(p: &mut TraceBuilder) {
    let _reference = SMALL.alloc_parameters(p);
    let steps: Vec<_> = (0..10).map(|_| (4, p.rand_range(100, 900))).collect();
    simulate_training(p, &SMALL, true, steps, |p, batch, length, gradients| {
        for _ in 0..2 {
            SMALL.forward_no_grad(p, batch, length);
        }
        SMALL.forward_backward(p, 2 * batch, length, gradients);
    });
}

/// Unrolled recurrent network over sequences of varying lengths: many small tensors.
pub(super) fn recurrent(p: &mut TraceBuilder) {
    const WIDTH: u64 = 1024;
    let elements: Vec<u64> =
        (0..2).flat_map(|_| [4 * WIDTH * WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH, 4 * WIDTH]).collect();
    let _held = p.alloc_all(elements.iter().map(|n| n * 4));
    let mut adam = SimulatedAdam::default();
    for _ in 0..10 {
        let (batch, length) = (64, p.rand_range(20, 120));
        let state = batch * WIDTH * 4;
        let input = p.alloc(length * state);
        let mut saved = Vec::new();
        for _ in 0..2 * length {
            let gates = p.alloc(4 * state);
            saved.extend(p.alloc_all([state; 4]));
            p.free([gates]);
            saved.extend(p.alloc_all([state, state]));
        }
        let logits = p.alloc(batch * length * 10_000 * 4);
        p.alloc_scratch(batch * length * 10_000 * 4);
        p.free([logits]);
        let gradients = p.alloc_all(elements.iter().map(|n| n * 4));
        let mut flow = p.alloc(state);
        for _ in 0..2 * length {
            let gates = p.alloc(4 * state);
            p.replace_block(&mut flow, state);
            let at = saved.len() - 6;
            p.free(saved.split_off(at));
            p.free([gates]);
        }
        p.free([flow, input]);
        adam.step(p, &elements, false);
        p.free(gradients);
    }
}

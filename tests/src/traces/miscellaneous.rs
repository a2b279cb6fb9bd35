//! Other synthetic workloads: graphs, point clouds, recommenders, games, streams.

use super::trace_builder::{BlockId, TraceBuilder};
use super::transformers::{SMALL, SimulatedAdam, TransformerShape};

/// Graph network on randomly sampled neighbours.
pub(super) fn neighbour_sampling(p: &mut TraceBuilder) {
    let _features = p.alloc(2_400_000 * 100 * 4);
    let _held = p.alloc_all([100 * 256 * 4, 256 * 256 * 4, 256 * 47 * 4]);
    for _ in 0..120 {
        let seeds = 1024;
        let (first, second) = (seeds * p.rand_range(6, 12), seeds * p.rand_range(40, 110));
        let index = p.alloc_all([second * 8 * 2, first * 8 * 2, second * 8]);
        let mut saved = vec![p.alloc(second * 100 * 4)];
        for (nodes, edges, width) in [(first, second, 256), (seeds, first, 256), (seeds, seeds * 10, 47)] {
            let messages = p.alloc(edges * width * 4);
            saved.push(p.alloc(nodes * width * 4));
            p.free([messages]);
            saved.extend(p.alloc_all([nodes * width * 4, nodes * width / 8]));
        }
        let mut flow = p.alloc(seeds * 47 * 4);
        for (edges, width) in [(first, 256), (second, 256), (second, 100)] {
            p.replace_block(&mut flow, edges * width * 4);
            let at = saved.len() - 3;
            p.free(saved.split_off(at));
        }
        p.free([flow]);
        p.free(saved);
        p.free(index);
    }
}

/// Molecules: batches of graphs of varying size, with forces by double backward.
pub(super) fn molecules(p: &mut TraceBuilder) {
    let _held = p.alloc_all((0..6).flat_map(|_| [128 * 128 * 4, 128 * 4, 128 * 50 * 4]));
    for _ in 0..60 {
        let atoms = p.rand_range(500, 3000);
        let edges = atoms * p.rand_range(15, 40);
        let (mut saved, mut left) = (p.alloc_all([edges * 12, edges * 4, edges * 50 * 4]), Vec::new());
        for _ in 0..6 {
            let spent = p.alloc(edges * 128 * 4);
            left.push(p.alloc(edges * 128 * 4));
            saved.extend(p.alloc_all([edges * 128 * 4, atoms * 128 * 4, atoms * 128 * 4]));
            p.free([spent]);
        }
        // The second pass also keeps the values of the first.
        for _ in 0..6 {
            let scratch = p.alloc(edges * 128 * 4);
            saved.push(p.alloc(atoms * 128 * 4));
            p.free([scratch]);
        }
        saved.reverse();
        p.free(saved);
        p.alloc_scratch(edges * 128 * 4);
        // The remaining filters are freed at the end of a step.
        p.free(left);
    }
}

/// Point clouds of varying size, by voxels.
pub(super) fn point_clouds(p: &mut TraceBuilder) {
    let _held = p.alloc_all((0..8).map(|layer| (32 << (layer / 2)) * (32 << (layer / 2)) * 27 * 4));
    for _ in 0..80 {
        let count = p.rand_range(100_000, 2_000_000);
        let cloud = p.alloc(count * 16);
        let (mut voxels, mut saved) = (count / 2, Vec::new());
        for layer in 0..8_u64 {
            let width = 32 << (layer / 2);
            let pairs = voxels * p.rand_range(8, 14);
            let map = p.alloc(pairs * 8);
            let gathered = p.alloc(pairs * width / 4 * 4);
            saved.push(p.alloc(voxels * width * 4));
            p.free([gathered]);
            saved.push(map);
            if layer % 2 == 1 {
                voxels = voxels * 2 / 5;
            }
        }
        let mut flow = p.alloc(voxels.max(1) * 256 * 4);
        while let Some(block) = saved.pop() {
            let bytes = p.rand_range(1, 120) << 20;
            p.replace_block(&mut flow, bytes);
            p.free([block]);
        }
        p.free([flow, cloud]);
    }
}

/// Embedding tables of a recommender, with sparse gradients.
pub(super) fn recommender(p: &mut TraceBuilder) {
    let rows: Vec<u64> = (0..26).map(|_| p.rand_range(100, 3_000_000)).collect();
    let _tables = p.alloc_all(rows.iter().map(|rows| rows * 32 * 4));
    let _held = p.alloc_all([512, 256, 64, 1024, 1024, 512, 256].map(|w| w * 512 * 4));
    for _ in 0..70 {
        let batch = p.rand_range(2048, 16_384);
        let mut saved = Vec::new();
        for _ in &rows {
            let index = p.rand_range(batch, 4 * batch);
            saved.extend(p.alloc_all([index * 8, batch * 32 * 4]));
        }
        saved.push(p.alloc(batch * 27 * 32 * 4));
        saved.push(p.alloc(batch * 27 * 27 * 4));
        for width in [1024, 1024, 512, 256, 1] {
            saved.push(p.alloc(batch * width * 4));
        }
        let mut flow = p.alloc(batch * 4);
        for width in [256, 512, 1024, 1024, 27 * 32] {
            p.replace_block(&mut flow, batch * width * 4);
        }
        for _ in &rows {
            let unique = p.rand_range(batch / 10, batch);
            let gradient = p.alloc(unique * 32 * 4);
            p.alloc_scratch(unique * 32 * 4);
            p.alloc_scratch(batch * 8);
            p.free([gradient]);
        }
        p.free([flow]);
        p.free(saved);
    }
}

/// Reinforcement learning: many small steps that fill a replay buffer, then training on samples of it.
pub(super) fn reinforcement_learning(p: &mut TraceBuilder) {
    let elements = [32 * 4 * 64, 64 * 32 * 16, 64 * 64 * 9, 3136 * 512, 512 * 18];
    let _held = p.alloc_all(elements.map(|n| n * 4));
    let mut adam = SimulatedAdam::default();
    for _ in 0..5 {
        let mut buffer = Vec::new();
        for _ in 0..128 {
            buffer.extend(p.alloc_all([64 * 4 * 84 * 84, 64 * 8, 64 * 4, 64 * 4, 64 * 4]));
            let mut flow = p.alloc(64 * 4 * 84 * 84 * 4);
            for bytes in [64 * 32 * 400 * 4, 64 * 64 * 81 * 4, 64 * 64 * 49 * 4, 64 * 512 * 4, 64 * 18 * 4] {
                p.replace_block(&mut flow, bytes);
            }
            p.free([flow]);
        }
        let all = p.alloc_all([128 * 64 * 4 * 84 * 84, 128 * 64 * 4, 128 * 64 * 4]);
        for _ in 0..16 {
            let batch = 2048;
            let input = p.alloc(batch * 4 * 84 * 84 * 4);
            let saved = p.alloc_all([32 * 400, 64 * 81, 64 * 49, 512, 18].map(|n| batch * n * 4));
            let mut flow = p.alloc(batch * 18 * 4);
            for (bytes, block) in
                [512, 64 * 49, 64 * 81, 32 * 400].map(|n| batch * n * 4).into_iter().zip(saved.iter().rev())
            {
                p.replace_block(&mut flow, bytes);
                p.free([*block]);
            }
            p.free([saved[0], flow, input]);
            adam.step(p, &elements, true);
        }
        p.free(all);
        p.free(buffer);
    }
}

/// Prefetching on one queue and downloads on another, concurrent with compute.
pub(super) fn streams(p: &mut TraceBuilder) {
    let net = TransformerShape { layers: 6, ..SMALL };
    let _held = net.alloc_parameters(p);
    let mut ahead: Vec<BlockId> = Vec::new();
    let mut results: Vec<BlockId> = Vec::new();
    for _ in 0..24 {
        p.queue = 1;
        let batch = p.rand_range(16, 160);
        let raw = p.alloc(batch * 224 * 224 * 3);
        let wide = p.alloc(batch * 224 * 224 * 3 * 4);
        p.free([raw]);
        ahead.push(p.alloc(batch * 224 * 224 * 3 * 2));
        p.free([wide]);
        p.queue = 0;
        let (length, mut gradients) = (p.rand_range(100, 700), Vec::new());
        net.forward_backward(p, 8, length, &mut gradients);
        p.free(gradients);
        p.queue = 2;
        results.push(p.alloc(8 * length * 768 * 4));
        p.queue = 0;
        if ahead.len() > 2 {
            p.free([ahead.remove(0)]);
        }
        if results.len() > 4 {
            p.free([results.remove(0)]);
        }
    }
}

/// Branches of a network on four queues, which exchange results.
pub(super) fn branches(p: &mut TraceBuilder) {
    let mut joined: Option<BlockId> = None;
    for _ in 0..100 {
        let rows = p.rand_range(4000, 32_000);
        let mut outputs = Vec::new();
        for queue in 0..4 {
            p.queue = queue;
            let mut flow = p.alloc(rows * 1024 * 4);
            for _ in 0..p.rand_range(2, 6) {
                let width = 512 * p.rand_range(1, 6);
                p.alloc_scratch(rows * width / 2);
                p.replace_block(&mut flow, rows * width * 4);
            }
            outputs.push(flow);
        }
        p.queue = 0;
        let together = p.alloc(rows * 4096 * 4);
        p.free(joined.replace(together));
        p.free(outputs);
    }
}

/// Hyperparameter search: models of different sizes, one after the other.
pub(super) fn hyperparameter_search(p: &mut TraceBuilder) {
    for _ in 0..9 {
        let net = TransformerShape {
            layers: p.rand_range(2, 8),
            width: 64 * p.rand_range(4, 20),
            vocabulary: 20_000,
            element_size: 4,
            ..SMALL
        };
        let held = net.alloc_parameters(p);
        let (elements, batch) = (net.param_numels(), p.rand_range(4, 32));
        let state = p.alloc_all(elements.iter().flat_map(|n| [n * 4, n * 4]));
        for _ in 0..4 {
            let mut gradients = Vec::new();
            net.forward_backward(p, batch, 256, &mut gradients);
            p.free(gradients);
        }
        p.free(state);
        p.free(held);
    }
}

/// Many small parameters, with their gradients and optimiser state.
pub(super) fn small_tensors(p: &mut TraceBuilder) {
    let elements: Vec<u64> = (0..1500).map(|_| 1 << p.rand_range(6, 18)).map(|n: u64| n + n / 3).collect();
    let _held = p.alloc_all(elements.iter().map(|n| n * 4));
    let mut adam = SimulatedAdam::default();
    for _ in 0..8 {
        let mut saved = Vec::new();
        for n in &elements {
            saved.push(p.alloc(n / 2 * 4));
            p.alloc_scratch(n * 8);
        }
        let mut gradients = Vec::new();
        for n in elements.iter().rev() {
            gradients.push(p.alloc(n * 4));
            p.free(saved.pop());
        }
        adam.step(p, &elements, true);
        p.free(gradients);
    }
}

/// Notebook: sorts, joins and products of tables of varying size, in no regular order.
pub(super) fn notebook(p: &mut TraceBuilder) {
    let mut held: Vec<BlockId> = Vec::new();
    for _ in 0..1500 {
        let rows = 1 << p.rand_range(8, 25);
        let rows = rows + p.rand_range(0, rows);
        match p.rand_range(0, 3) {
            0 => {
                let parts = p.alloc_all([rows * 4, rows * 8, rows * 8]);
                held.push(p.alloc(rows * 4));
                p.free(parts);
            }
            1 => held.push(p.alloc(rows * 16)),
            _ => p.alloc_scratch(rows * 12),
        }
        if held.len() > 40 {
            let at = p.rand_range(0, 40) as usize;
            let gone = held.swap_remove(at);
            p.free([gone]);
        }
    }
}

/// Factorisations and products of large matrices: few blocks, each a large part of the memory.
pub(super) fn matrices(p: &mut TraceBuilder) {
    for _ in 0..60 {
        let (n, m) = (128 * p.rand_range(16, 120), 128 * p.rand_range(16, 120));
        let a = p.alloc(n * m * 8);
        let square = p.alloc(m * m * 8);
        let factor = p.alloc(m * m * 8);
        p.alloc_scratch(m * 64 * 8);
        p.free([square]);
        let solved = p.alloc(n * m * 8);
        p.free([a, factor]);
        p.alloc_scratch(n * 8);
        p.free([solved]);
    }
}

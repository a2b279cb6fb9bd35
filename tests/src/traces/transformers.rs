//! Simulated training of transformers.

use super::trace_builder::{BlockId, TraceBuilder};

#[derive(Clone, Copy)]
pub(super) struct TransformerShape {
    pub(super) layers: u64,
    pub(super) width: u64,
    pub(super) heads: u64,
    pub(super) vocabulary: u64,
    /// Bytes of an activation element.
    pub(super) element_size: u64,
    /// True if attention scores and dropout masks are stored as tensors.
    pub(super) materializes_scores: bool,
}

pub(super) const SMALL: TransformerShape = TransformerShape {
    layers: 12,
    width: 768,
    heads: 12,
    vocabulary: 50_304,
    element_size: 2,
    materializes_scores: false,
};
pub(super) const MEDIUM: TransformerShape = TransformerShape { layers: 24, width: 1024, heads: 16, ..SMALL };
pub(super) const BERT: TransformerShape =
    TransformerShape { vocabulary: 30_522, element_size: 4, materializes_scores: true, ..SMALL };

/// Activations that a layer, or the head, saves for the backward pass.
type SavedActivations = Vec<BlockId>;

impl TransformerShape {
    /// Returns the number of elements of each parameter of a layer.
    fn layer_param_numels(&self) -> [u64; 12] {
        let w = self.width;
        [w, w, 3 * w * w, 3 * w, w * w, w, w, w, 4 * w * w, 4 * w, 4 * w * w, w]
    }

    /// Returns the number of elements of each parameter.
    pub(super) fn param_numels(&self) -> Vec<u64> {
        let mut all = vec![self.vocabulary * self.width, 1024 * self.width];
        all.extend((0..self.layers).flat_map(|_| self.layer_param_numels()));
        all.extend([self.width; 2]);
        all
    }

    /// Runs a layer forward. Returns its output and its saved activations.
    pub(super) fn forward_layer(
        &self,
        p: &mut TraceBuilder,
        batch: u64,
        length: u64,
    ) -> (BlockId, SavedActivations) {
        let row = batch * length * self.width * self.element_size;
        let thin = batch * length * 4;
        let mut saved = p.alloc_all([row, thin, thin, 3 * row]);
        if self.materializes_scores {
            let scores = batch * self.heads * length * length * self.element_size;
            let heads = p.alloc_all([row, row, row]);
            let raw = p.alloc(scores);
            saved.push(p.alloc(scores));
            p.free([raw]);
            saved.extend([p.alloc(scores / self.element_size), p.alloc(scores), p.alloc(row)]);
            p.free(heads);
        } else {
            saved.extend([p.alloc(row), p.alloc(batch * self.heads * length * 4)]);
        }
        let joined = p.alloc(row);
        saved.extend(p.alloc_all([row, row, thin, thin, 4 * row, 4 * row]));
        let out = p.alloc(row);
        let sum = p.alloc(row);
        p.free([joined, out]);
        (sum, saved)
    }

    /// Runs a layer backward; appends its parameters' gradients to `grads` and returns its input's gradient.
    pub(super) fn backward_layer(
        &self,
        p: &mut TraceBuilder,
        batch: u64,
        length: u64,
        saved: SavedActivations,
        flow: &mut BlockId,
        gradients: &mut Vec<BlockId>,
    ) {
        let row = batch * length * self.width * self.element_size;
        let size = |elements: u64| elements * self.element_size;
        let [.., up, up_bias, down, down_bias] = self.layer_param_numels().map(size);
        let [ln, ln_bias, qkv, qkv_bias, out, out_bias, ..] = self.layer_param_numels().map(size);
        gradients.extend(p.alloc_all([down_bias, down]));
        let mut inner = p.alloc(4 * row);
        p.replace_block(&mut inner, 4 * row);
        gradients.extend(p.alloc_all([up_bias, up]));
        let normed = p.alloc(row);
        p.free([inner]);
        gradients.extend(p.alloc_all([ln, ln_bias]));
        p.replace_block(flow, row);
        p.free([normed]);
        gradients.extend(p.alloc_all([out_bias, out]));
        let mut attended = p.alloc(row);
        if self.materializes_scores {
            let scores = batch * self.heads * length * length * self.element_size;
            let mut of_scores = p.alloc(scores);
            p.replace_block(&mut of_scores, scores);
            p.replace_block(&mut of_scores, scores);
            let parts = p.alloc_all([row, row]);
            p.free([of_scores]);
            p.free(parts);
        }
        p.replace_block(&mut attended, 3 * row);
        gradients.extend(p.alloc_all([qkv_bias, qkv]));
        p.replace_block(&mut attended, row);
        gradients.extend(p.alloc_all([ln, ln_bias]));
        p.replace_block(flow, row);
        p.free([attended]);
        p.free(saved);
    }

    /// Computes the loss, and returns the gradient of the last layer's output.
    pub(super) fn loss_and_head_backward(
        &self,
        p: &mut TraceBuilder,
        batch: u64,
        length: u64,
        gradients: &mut Vec<BlockId>,
    ) -> BlockId {
        let tokens = batch * length;
        let row = tokens * self.width * self.element_size;
        let normed = p.alloc(row);
        let logits = p.alloc(tokens * self.vocabulary * self.element_size);
        let wide = p.alloc(tokens * self.vocabulary * 4);
        let likely = p.alloc(tokens * self.vocabulary * 4);
        p.free([wide]);
        let loss = p.alloc(4);
        let slope = p.alloc(tokens * self.vocabulary * 4);
        p.free([likely]);
        let narrow = p.alloc(tokens * self.vocabulary * self.element_size);
        p.free([slope, logits, loss]);
        gradients.push(p.alloc(self.vocabulary * self.width * self.element_size));
        let flow = p.alloc(row);
        p.free([narrow, normed]);
        flow
    }

    /// Runs forward and backward, and appends the gradients.
    pub(super) fn forward_backward(
        &self,
        p: &mut TraceBuilder,
        batch: u64,
        length: u64,
        gradients: &mut Vec<BlockId>,
    ) {
        let row = batch * length * self.width * self.element_size;
        let inputs = p.alloc_all([batch * length * 8, batch * length * 8]);
        let mut sums = vec![p.alloc(row)];
        let mut layers = Vec::new();
        for _ in 0..self.layers {
            let (sum, saved) = self.forward_layer(p, batch, length);
            sums.push(sum);
            layers.push(saved);
        }
        let mut flow = self.loss_and_head_backward(p, batch, length, gradients);
        while let Some(saved) = layers.pop() {
            p.free(sums.pop());
            self.backward_layer(p, batch, length, saved, &mut flow, gradients);
        }
        p.free(sums);
        gradients.push(p.alloc(1024 * self.width * self.element_size));
        p.free([flow]);
        p.free(inputs);
    }

    /// Runs forward and backward with activation checkpointing: layers save only their inputs.
    pub(super) fn forward_backward_checkpointed(
        &self,
        p: &mut TraceBuilder,
        batch: u64,
        length: u64,
        gradients: &mut Vec<BlockId>,
    ) {
        let mut inputs = vec![p.alloc(batch * length * self.width * self.element_size)];
        for _ in 0..self.layers {
            let (sum, saved) = self.forward_layer(p, batch, length);
            p.free(saved);
            inputs.push(sum);
        }
        let mut flow = self.loss_and_head_backward(p, batch, length, gradients);
        p.free(inputs.pop());
        while let Some(input) = inputs.pop() {
            let (sum, saved) = self.forward_layer(p, batch, length);
            p.free([sum]);
            self.backward_layer(p, batch, length, saved, &mut flow, gradients);
            p.free([input]);
        }
        p.free([flow]);
    }

    /// Runs forward without gradients.
    pub(super) fn forward_no_grad(&self, p: &mut TraceBuilder, batch: u64, length: u64) {
        let row = batch * length * self.width * self.element_size;
        let mut flow = p.alloc(row);
        for _ in 0..self.layers {
            let normed = p.alloc(row);
            let wide = p.alloc(3 * row);
            p.free([normed]);
            let mut inner = p.alloc(row);
            if self.materializes_scores {
                let scores = batch * self.heads * length * length * self.element_size;
                let raw = p.alloc(scores);
                p.alloc_scratch(scores);
                p.free([raw]);
            }
            p.free([wide]);
            p.replace_block(&mut inner, 4 * row);
            p.replace_block(&mut inner, 4 * row);
            p.replace_block(&mut inner, row);
            p.replace_block(&mut flow, row);
            p.free([inner]);
        }
        let logits = p.alloc(batch * length * self.vocabulary * self.element_size);
        p.alloc_scratch(batch * length * self.vocabulary * 4);
        p.free([logits, flow]);
    }

    /// Allocates the f32 parameters in order, and a library's workspace.
    pub(super) fn alloc_parameters(&self, p: &mut TraceBuilder) -> Vec<BlockId> {
        let sizes = self.param_numels();
        let mut held = p.alloc_all(sizes.into_iter().map(|elements| elements * 4));
        held.push(p.alloc(32 << 20));
        held
    }
}

/// Adam, whose two moments of each parameter are allocated in the first step.
#[derive(Default)]
pub(super) struct SimulatedAdam {
    state: Vec<BlockId>,
}

impl SimulatedAdam {
    /// Runs a step over parameters of these sizes; with `lists` as foreach operations, which allocate temporaries.
    pub(super) fn step(&mut self, p: &mut TraceBuilder, elements: &[u64], lists: bool) {
        if self.state.is_empty() {
            for n in elements {
                self.state.extend(p.alloc_all([4, n * 4, n * 4]));
            }
        }
        if lists {
            let roots = p.alloc_all(elements.iter().map(|n| n * 4));
            p.free(roots);
        }
    }
}

/// Runs training steps of these batch sizes and lengths.
pub(super) fn simulate_training(
    p: &mut TraceBuilder,
    net: &TransformerShape,
    lists: bool,
    steps: impl IntoIterator<Item = (u64, u64)>,
    mut pass: impl FnMut(&mut TraceBuilder, u64, u64, &mut Vec<BlockId>),
) {
    let _held = net.alloc_parameters(p);
    let (elements, mut adam) = (net.param_numels(), SimulatedAdam::default());
    for (batch, length) in steps {
        let mut gradients = Vec::new();
        pass(p, batch, length, &mut gradients);
        adam.step(p, &elements, lists);
        p.free(gradients);
    }
}

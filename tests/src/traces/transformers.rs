//! Transformers that are trained.

use super::program::{Block, Program};

/// The shape of a transformer.
#[derive(Clone, Copy)]
pub(super) struct Transformer {
    pub(super) layers: u64,
    pub(super) width: u64,
    pub(super) heads: u64,
    pub(super) vocabulary: u64,
    /// Bytes of an element of what flows through it.
    pub(super) element: u64,
    /// Whether the scores of attention are a tensor, as are masks of dropout.
    pub(super) scores: bool,
}

pub(super) const SMALL: Transformer =
    Transformer { layers: 12, width: 768, heads: 12, vocabulary: 50_304, element: 2, scores: false };
pub(super) const MEDIUM: Transformer = Transformer { layers: 24, width: 1024, heads: 16, ..SMALL };
pub(super) const BERT: Transformer = Transformer { vocabulary: 30_522, element: 4, scores: true, ..SMALL };

/// What a layer, or the head, keeps for its gradient.
type Saved = Vec<Block>;

impl Transformer {
    /// The elements of each parameter of a layer.
    fn layer(&self) -> [u64; 12] {
        let w = self.width;
        [w, w, 3 * w * w, 3 * w, w * w, w, w, w, 4 * w * w, 4 * w, 4 * w * w, w]
    }

    /// The elements of each parameter.
    pub(super) fn parameters(&self) -> Vec<u64> {
        let mut all = vec![self.vocabulary * self.width, 1024 * self.width];
        all.extend((0..self.layers).flat_map(|_| self.layer()));
        all.extend([self.width; 2]);
        all
    }

    /// A layer forward. Returns what it gives and what it keeps.
    pub(super) fn forward_layer(&self, p: &mut Program, batch: u64, length: u64) -> (Block, Saved) {
        let row = batch * length * self.width * self.element;
        let thin = batch * length * 4;
        let mut saved = p.take_all([row, thin, thin, 3 * row]);
        if self.scores {
            let scores = batch * self.heads * length * length * self.element;
            let heads = p.take_all([row, row, row]);
            let raw = p.take(scores);
            saved.push(p.take(scores));
            p.free([raw]);
            saved.extend([p.take(scores / self.element), p.take(scores), p.take(row)]);
            p.free(heads);
        } else {
            saved.extend([p.take(row), p.take(batch * self.heads * length * 4)]);
        }
        let joined = p.take(row);
        saved.extend(p.take_all([row, row, thin, thin, 4 * row, 4 * row]));
        let out = p.take(row);
        let sum = p.take(row);
        p.free([joined, out]);
        (sum, saved)
    }

    /// A layer's gradients: of its parameters, appended, and of its input.
    pub(super) fn backward_layer(
        &self,
        p: &mut Program,
        batch: u64,
        length: u64,
        saved: Saved,
        flow: &mut Block,
        gradients: &mut Vec<Block>,
    ) {
        let row = batch * length * self.width * self.element;
        let size = |elements: u64| elements * self.element;
        let [.., up, up_bias, down, down_bias] = self.layer().map(size);
        let [ln, ln_bias, qkv, qkv_bias, out, out_bias, ..] = self.layer().map(size);
        gradients.extend(p.take_all([down_bias, down]));
        let mut inner = p.take(4 * row);
        p.next(&mut inner, 4 * row);
        gradients.extend(p.take_all([up_bias, up]));
        let normed = p.take(row);
        p.free([inner]);
        gradients.extend(p.take_all([ln, ln_bias]));
        p.next(flow, row);
        p.free([normed]);
        gradients.extend(p.take_all([out_bias, out]));
        let mut attended = p.take(row);
        if self.scores {
            let scores = batch * self.heads * length * length * self.element;
            let mut of_scores = p.take(scores);
            p.next(&mut of_scores, scores);
            p.next(&mut of_scores, scores);
            let parts = p.take_all([row, row]);
            p.free([of_scores]);
            p.free(parts);
        }
        p.next(&mut attended, 3 * row);
        gradients.extend(p.take_all([qkv_bias, qkv]));
        p.next(&mut attended, row);
        gradients.extend(p.take_all([ln, ln_bias]));
        p.next(flow, row);
        p.free([attended]);
        p.free(saved);
    }

    /// The loss and its gradient: what flows back into the last layer.
    pub(super) fn head(&self, p: &mut Program, batch: u64, length: u64, gradients: &mut Vec<Block>) -> Block {
        let tokens = batch * length;
        let row = tokens * self.width * self.element;
        let normed = p.take(row);
        let logits = p.take(tokens * self.vocabulary * self.element);
        let wide = p.take(tokens * self.vocabulary * 4);
        let likely = p.take(tokens * self.vocabulary * 4);
        p.free([wide]);
        let loss = p.take(4);
        let slope = p.take(tokens * self.vocabulary * 4);
        p.free([likely]);
        let narrow = p.take(tokens * self.vocabulary * self.element);
        p.free([slope, logits, loss]);
        gradients.push(p.take(self.vocabulary * self.width * self.element));
        let flow = p.take(row);
        p.free([narrow, normed]);
        flow
    }

    /// Forward and backward. Gradients are appended.
    pub(super) fn pass(&self, p: &mut Program, batch: u64, length: u64, gradients: &mut Vec<Block>) {
        let row = batch * length * self.width * self.element;
        let inputs = p.take_all([batch * length * 8, batch * length * 8]);
        let mut sums = vec![p.take(row)];
        let mut layers = Vec::new();
        for _ in 0..self.layers {
            let (sum, saved) = self.forward_layer(p, batch, length);
            sums.push(sum);
            layers.push(saved);
        }
        let mut flow = self.head(p, batch, length, gradients);
        while let Some(saved) = layers.pop() {
            p.free(sums.pop());
            self.backward_layer(p, batch, length, saved, &mut flow, gradients);
        }
        p.free(sums);
        gradients.push(p.take(1024 * self.width * self.element));
        p.free([flow]);
        p.free(inputs);
    }

    /// The same, of layers that keep their inputs alone and run again for their gradients.
    pub(super) fn checkpointed(&self, p: &mut Program, batch: u64, length: u64, gradients: &mut Vec<Block>) {
        let mut inputs = vec![p.take(batch * length * self.width * self.element)];
        for _ in 0..self.layers {
            let (sum, saved) = self.forward_layer(p, batch, length);
            p.free(saved);
            inputs.push(sum);
        }
        let mut flow = self.head(p, batch, length, gradients);
        p.free(inputs.pop());
        while let Some(input) = inputs.pop() {
            let (sum, saved) = self.forward_layer(p, batch, length);
            p.free([sum]);
            self.backward_layer(p, batch, length, saved, &mut flow, gradients);
            p.free([input]);
        }
        p.free([flow]);
    }

    /// Forward without gradients.
    pub(super) fn evaluate(&self, p: &mut Program, batch: u64, length: u64) {
        let row = batch * length * self.width * self.element;
        let mut flow = p.take(row);
        for _ in 0..self.layers {
            let normed = p.take(row);
            let wide = p.take(3 * row);
            p.free([normed]);
            let mut inner = p.take(row);
            if self.scores {
                let scores = batch * self.heads * length * length * self.element;
                let raw = p.take(scores);
                p.scratch(scores);
                p.free([raw]);
            }
            p.free([wide]);
            p.next(&mut inner, 4 * row);
            p.next(&mut inner, 4 * row);
            p.next(&mut inner, row);
            p.next(&mut flow, row);
            p.free([inner]);
        }
        let logits = p.take(batch * length * self.vocabulary * self.element);
        p.scratch(batch * length * self.vocabulary * 4);
        p.free([logits, flow]);
    }

    /// Its parameters in f32, in order, and a library's workspace.
    pub(super) fn load(&self, p: &mut Program) -> Vec<Block> {
        let sizes = self.parameters();
        let mut held = p.take_all(sizes.into_iter().map(|elements| elements * 4));
        held.push(p.take(32 << 20));
        held
    }
}

/// An optimiser with two values for each parameter, which come with the first step.
#[derive(Default)]
pub(super) struct Adam {
    state: Vec<Block>,
}

impl Adam {
    /// A step over parameters of so many elements; with `lists`, as operations over all of them, which make lists of as many temporaries.
    pub(super) fn step(&mut self, p: &mut Program, elements: &[u64], lists: bool) {
        if self.state.is_empty() {
            for n in elements {
                self.state.extend(p.take_all([4, n * 4, n * 4]));
            }
        }
        if lists {
            let roots = p.take_all(elements.iter().map(|n| n * 4));
            p.free(roots);
        }
    }
}

/// A training: steps of these batches and lengths.
pub(super) fn train(
    p: &mut Program,
    net: &Transformer,
    lists: bool,
    steps: impl IntoIterator<Item = (u64, u64)>,
    mut pass: impl FnMut(&mut Program, u64, u64, &mut Vec<Block>),
) {
    let _held = net.load(p);
    let (elements, mut adam) = (net.parameters(), Adam::default());
    for (batch, length) in steps {
        let mut gradients = Vec::new();
        pass(p, batch, length, &mut gradients);
        adam.step(p, &elements, lists);
        p.free(gradients);
    }
}

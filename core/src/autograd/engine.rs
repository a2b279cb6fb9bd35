//! Engine of the backward pass.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::backward_fn_guard::BackwardFnGuard;
use super::bypass::{Bypass, EdgeGrad};
use super::elementwise_chain::{self, ElementwiseChain};
use super::pending_grad::{PendingGrad, WrittenRanges};
use super::{
    BackwardCtx, BackwardFn, BackwardKind, GradEdge, InputGrads, Leaf, Node, anomaly, enable_grad, hooks,
    inplace, no_grad,
};
use crate::error::{Error, Result, fail, fail_if};
use crate::memory::{self, Tag};
use crate::sync::LockUnpoisoned;
use crate::tensor::Tensor;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BackwardOptions {
    pub(crate) retain_graph: bool,
    /// If true, the pass itself is recorded.
    pub(crate) create_graph: bool,
}

/// Nodes and leaves whose gradients the caller requests.
#[derive(Default)]
pub(super) struct GradTargets {
    nodes: FxHashSet<u64>,
    leaves: FxHashSet<u64>,
    /// If true, the pass does not continue beyond the targets.
    stop_at_targets: bool,
    /// If true, the pass also visits nodes that lead to no target.
    visit_all: bool,
}

impl GradTargets {
    /// Visits only nodes that lead to one of these tensors.
    pub(super) fn restrict_to(tensors: &[&Tensor]) -> Self {
        let mut targets = Self::default();
        for t in tensors {
            match t.grad_edge() {
                Some(GradEdge::Node(node)) => targets.nodes.insert(node.id),
                Some(GradEdge::Leaf(leaf)) => targets.leaves.insert(leaf.id),
                None => false,
            };
        }
        targets
    }

    /// Visits only nodes that lead to one of these tensors, and nothing beyond them.
    pub(super) fn restrict_to_and_stop_at(tensors: &[&Tensor]) -> Self {
        Self { stop_at_targets: true, ..Self::restrict_to(tensors) }
    }

    /// Visits everything except what lies beyond these tensors.
    pub(super) fn stop_at(tensors: &[&Tensor]) -> Self {
        Self { visit_all: true, ..Self::restrict_to_and_stop_at(tensors) }
    }
}

/// Gradients by the ids of leaves or nodes. The map is ordered, so that every step frees memory in the same
/// order.
pub(super) type GradSums = BTreeMap<u64, Tensor>;

/// Gradients of leaves by id, collected for [`grad`] instead of the leaves' own gradients. They belong to one
/// pass and to the nested passes of its checkpoints. A pass that a hook or a custom backward function starts
/// fills the leaves instead.
pub(super) type CapturedGrads = RefCell<GradSums>;

/// Takes the gradient that a pass with this sink has computed for a leaf.
pub(super) fn take_leaf_grad(t: &Tensor, sink: Option<&CapturedGrads>) -> Option<Tensor> {
    let leaf = t.leaf()?;
    match sink {
        Some(sink) => sink.borrow_mut().remove(&leaf.id),
        None => leaf.grad.lock_unpoisoned().take(),
    }
}

/// Result of a scan of the graph before the pass (PyTorch's `exec_info_`). Needed only if the pass has
/// targets or a leaf has a hook.
#[derive(Default)]
struct ExecInfo {
    /// Nodes that were scanned.
    visited: FxHashSet<u64>,
    /// Nodes that lead to a target; `None` means all nodes.
    needed: Option<FxHashSet<u64>>,
    /// Number of gradients still to come for each leaf with hooks.
    remaining_grads: FxHashMap<u64, usize>,
}

impl ExecInfo {
    /// Scans from `roots` down to the node `oldest`, without nodes that were scanned before.
    fn scan_graph(&mut self, roots: &[GradEdge], targets: Option<&GradTargets>, oldest: u64) {
        let ends = targets.filter(|targets| targets.stop_at_targets);
        let targets = targets.filter(|targets| !targets.visit_all);
        if targets.is_none() && !hooks::has_leaf_hooks() {
            return;
        }
        let mut seen: FxHashMap<u64, Arc<Node>> = FxHashMap::default();
        let mut stack: Vec<Arc<Node>> = Vec::new();
        stack.extend(roots.iter().filter_map(GradEdge::node).cloned());
        while let Some(node) = stack.pop() {
            // Nodes beyond are not visited, so their gradients for leaves are not counted.
            let beyond = node.id < oldest || ends.is_some_and(|ends| ends.nodes.contains(&node.id));
            if !beyond && !self.visited.contains(&node.id) && seen.insert(node.id, node.clone()).is_none() {
                stack.extend(node.next_edges.iter().flatten().filter_map(GradEdge::node).cloned());
            }
        }
        self.visited.extend(seen.keys());
        // Nodes of inputs have smaller ids than nodes of results.
        let mut order: Vec<&Arc<Node>> = seen.values().collect();
        order.sort_unstable_by_key(|node| node.id);
        if let Some(targets) = targets {
            let needed = self.needed.get_or_insert_default();
            for node in &order {
                let leads = node.kind == BackwardKind::Checkpoint
                    || node.next_edges.iter().flatten().any(|edge| match edge {
                        GradEdge::Leaf(leaf) => targets.leaves.contains(&leaf.id),
                        GradEdge::Node(input) => {
                            needed.contains(&input.id) || targets.nodes.contains(&input.id)
                        }
                    });
                if leads {
                    needed.insert(node.id);
                }
            }
        }
        let needed_nodes =
            order.iter().filter(|node| self.needed.as_ref().is_none_or(|n| n.contains(&node.id)));
        let edges = needed_nodes.flat_map(|node| node.next_edges.iter().flatten());
        for edge in edges.chain(roots) {
            if let GradEdge::Leaf(leaf) = edge
                && leaf.hooks.get().is_some()
                && targets.is_none_or(|targets| targets.leaves.contains(&leaf.id))
            {
                *self.remaining_grads.entry(leaf.id).or_default() += 1;
            }
        }
    }
}

/// Gradients of nodes that a nested pass returns to the pass around it.
pub(super) type OuterGrads = Vec<(Arc<Node>, Tensor)>;

/// State of one backward pass.
struct GraphTask<'a> {
    options: BackwardOptions,
    targets: Option<&'a GradTargets>,
    /// Collects the gradients of leaves, if the leaves themselves must not change.
    captured_grads: Option<&'a CapturedGrads>,
    exec_info: ExecInfo,
    /// Smallest node id to visit; gradients of older nodes go to `outer_grads`.
    min_node_id: u64,
    outer_grads: OuterGrads,
    /// Gradients accumulated so far, for nodes and for leaves with hooks.
    pending_grads: FxHashMap<u64, PendingGrad>,
    /// Nodes that are ready, by id. The newest runs first.
    ready_queue: BTreeMap<u64, Arc<Node>>,
    /// Gradients of the targets that are nodes.
    target_grads: GradSums,
    /// Chain of elementwise operations that runs.
    chain: ElementwiseChain,
    /// If true, elementwise operations form chains.
    has_chains: bool,
}

/// Gradients that a backward function returned.
struct NodeGrads {
    grads: InputGrads,
    /// Indices of the leaves whose sums the function took.
    accumulated: SmallVec<[usize; 2]>,
    /// Input whose gradient is partly written, and the part.
    written: Option<(usize, WrittenRanges)>,
    /// Nodes that the function bypassed.
    bypass: Option<Bypass>,
    /// The function, if memory that it saved may stay until the end of a chain.
    run: Option<BackwardFnGuard>,
}

impl NodeGrads {
    /// Fills the gradient that is partly written with zeros.
    fn complete(&mut self) -> Result<()> {
        let Some((at, written)) = self.written.take() else { return Ok(()) };
        if let Some(sum) = self.grads[at].take() {
            self.grads[at] = Some(PendingGrad { sum, written: Some(written) }.complete()?);
        }
        Ok(())
    }
}

impl GraphTask<'_> {
    /// Reports whether the gradient of this edge is needed.
    fn should_visit(&self, edge: &GradEdge) -> bool {
        let Some(needed) = &self.exec_info.needed else { return true };
        match edge {
            GradEdge::Leaf(leaf) => self.targets.is_some_and(|targets| targets.leaves.contains(&leaf.id)),
            GradEdge::Node(node) => {
                needed.contains(&node.id)
                    || self.targets.is_some_and(|targets| targets.nodes.contains(&node.id))
            }
        }
    }

    /// Reports whether [`accumulate`](Self::accumulate) adds in place: if `sum` is not shared, has the type of the
    /// result, and the pass is not recorded.
    fn accumulates_in_place(&self, sum: &Tensor, more: &Tensor) -> bool {
        !self.options.create_graph
            && sum.dtype() == sum.dtype().promote(more.dtype())
            && sum.is_unique()
            && sum.is_contiguous()
    }

    /// Adds `more` to `sum`, in place if possible.
    fn accumulate(&self, sum: Tensor, more: Tensor) -> Result<Tensor> {
        if self.accumulates_in_place(&sum, &more) {
            sum.accumulate_grad_(&more)?;
            return Ok(sum);
        }
        sum.add(&more)
    }

    /// Adds a gradient to the pending sum of a node or leaf, which it takes.
    fn add_to_pending(&mut self, id: u64, grad: Tensor) -> Result<Tensor> {
        match self.pending_grads.remove(&id) {
            Some(pending) => self.accumulate(pending.complete()?, grad),
            None => Ok(grad),
        }
    }

    /// Accumulates the gradient of an edge. If `handed` is true, the operation may have accumulated it
    /// already.
    fn add_edge_grad(&mut self, edge: &GradEdge, grad: Tensor, handed: bool) -> Result<()> {
        match edge {
            GradEdge::Leaf(leaf) => match self.exec_info.remaining_grads.get_mut(&leaf.id) {
                None => self.accumulate_leaf_grad(leaf, grad, handed),
                Some(left) => {
                    *left -= 1;
                    let last = *left == 0;
                    let sum = self.add_to_pending(leaf.id, grad)?;
                    if !last {
                        self.pending_grads.insert(leaf.id, sum.into());
                        return Ok(());
                    }
                    self.finish_hooked_leaf(leaf, sum)
                }
            },
            GradEdge::Node(node) if node.id < self.min_node_id => {
                self.outer_grads.push((node.clone(), grad));
                Ok(())
            }
            GradEdge::Node(node) => {
                self.ready_queue.entry(node.id).or_insert_with(|| node.clone());
                let sum = self.add_to_pending(node.id, grad)?;
                self.pending_grads.insert(node.id, sum.into());
                Ok(())
            }
        }
    }

    /// Runs the hooks of a leaf whose gradient is complete.
    fn finish_hooked_leaf(&self, leaf: &Arc<Leaf>, sum: Tensor) -> Result<()> {
        let Some(hooks) = leaf.hooks.get() else { return self.accumulate_leaf_grad(leaf, sum, false) };
        self.accumulate_leaf_grad(leaf, hooks.run_grad_hooks("a leaf", sum)?, false)?;
        if self.captured_grads.is_some() { Ok(()) } else { hooks.run_post_accumulate_grad_hooks() }
    }

    /// Accumulates a gradient in the leaf, or in the sink if there is one.
    fn accumulate_leaf_grad(&self, leaf: &Arc<Leaf>, grad: Tensor, handed: bool) -> Result<()> {
        leaf.check_grad(&grad, "gets")?;
        let Some(sink) = self.captured_grads else {
            return leaf.accumulate_grad(grad, self.options.create_graph, handed);
        };
        // The sum is removed during the addition, because operations may borrow the sink.
        let before = sink.borrow_mut().remove(&leaf.id);
        let sum = match before {
            Some(sum) if handed && sum.is_same_view(&grad) => sum,
            Some(sum) => self.accumulate(sum, grad)?,
            None => grad,
        };
        let replaced = sink.borrow_mut().insert(leaf.id, sum);
        drop(replaced);
        Ok(())
    }

    /// Accumulates the gradients that a nested pass returned: those of tensors that a checkpoint captures.
    fn add_outer_grads(&mut self, beyond: OuterGrads) -> Result<()> {
        for (node, grad) in beyond {
            let edge = GradEdge::Node(node);
            self.exec_info.scan_graph(std::slice::from_ref(&edge), self.targets, self.min_node_id);
            if self.should_visit(&edge) {
                self.add_edge_grad(&edge, grad, false)?;
            }
        }
        Ok(())
    }

    /// Runs a backward function, which overwrites the gradient if `overwrites` is true.
    fn run_backward_fn(&mut self, node: &Arc<Node>, grad: &Tensor, overwrites: bool) -> Result<NodeGrads> {
        let kept = self.options.retain_graph || self.options.create_graph;
        let run = BackwardFnGuard::acquire(node, kept)?;
        let needs_input_grad: SmallVec<[bool; 4]> = node
            .next_edges
            .iter()
            .map(|edge| edge.as_ref().is_some_and(|edge| self.should_visit(edge)))
            .collect();
        // A backward function that is not differentiable runs without recording; its results refuse a second
        // gradient.
        let once = self.options.create_graph && node.kind == BackwardKind::OnceDifferentiable;
        let again = self.options.create_graph && !once;
        let ctx = BackwardCtx {
            needs_input_grad,
            node,
            create_graph: again,
            retain_graph: run.is_shared,
            overwrites_grad: overwrites,
            captured_grads: self.captured_grads,
            pending_grads: RefCell::new(&mut self.pending_grads),
            accumulated_inputs: RefCell::default(),
            written: RefCell::default(),
            allows_bypass: self.has_chains && self.targets.is_none() && self.captured_grads.is_none(),
            min_node_id: self.min_node_id,
            bypass: RefCell::default(),
            outer_grads: RefCell::default(),
        };
        let grads = match once {
            false => (run.backward_fn)(grad, &ctx),
            true => {
                let _no_grad = no_grad();
                (run.backward_fn)(&grad.detach(), &ctx)
            }
        };
        let (handed, beyond) = (ctx.accumulated_inputs.take(), ctx.outer_grads.take());
        let (written, bypass) = (ctx.written.take(), ctx.bypass.take());
        // Keeps the guard for a chain. Without one, drops it, which frees saved tensors unless the graph is retained.
        let run = (self.has_chains && node.chain_role.get().is_some()).then_some(run);
        let grads = grads?;
        self.add_outer_grads(beyond)?;
        let refused = |g: Option<Tensor>| g.map(|g| forbid_second_gradient(node, grad, &g));
        let grads = if once { grads.into_iter().map(refused).collect() } else { grads };
        Ok(NodeGrads { grads, accumulated: handed, written, bypass, run })
    }

    /// Returns the nodes that continue a chain after a node with these gradients. There is none if the delivery of
    /// the gradients may allocate memory.
    fn find_links(&self, node: &Node, grads: &InputGrads) -> SmallVec<[u64; 2]> {
        let mut links = SmallVec::new();
        for (edge, grad) in node.next_edges.iter().zip(grads) {
            let (Some(edge), Some(grad)) = (edge, grad) else { continue };
            let input = match edge {
                GradEdge::Node(input) => input,
                // A leaf adopts the gradient, or adds it in place.
                GradEdge::Leaf(leaf)
                    if self.captured_grads.is_none()
                        && leaf.hooks.get().is_none()
                        && elementwise_chain::is_dense_and_unique(grad) =>
                {
                    continue;
                }
                GradEdge::Leaf(_) => return SmallVec::new(),
            };
            if self.pending_grads.contains_key(&input.id) {
                return SmallVec::new();
            }
            let is_target = self.targets.is_some_and(|targets| targets.nodes.contains(&input.id));
            if !is_target
                && input.id >= self.min_node_id
                && elementwise_chain::is_link(input)
                && elementwise_chain::can_overwrite(grad, input.dtype)
                && self.should_visit(edge)
            {
                links.push(input.id);
            }
        }
        links
    }

    /// Reports whether every gradient of a node joins a pending sum in place, which allocates nothing.
    fn delivers_in_place(&self, node: &Node, grads: &InputGrads) -> bool {
        let mut delivered =
            node.next_edges.iter().zip(grads).filter_map(|(edge, grad)| edge.as_ref().zip(grad.as_ref()));
        delivered.all(|(edge, grad)| match edge {
            GradEdge::Node(input) if input.id >= self.min_node_id => {
                self.pending_grads.get(&input.id).is_some_and(|pending| {
                    pending.written.is_none() && self.accumulates_in_place(&pending.sum, grad)
                })
            }
            GradEdge::Node(_) | GradEdge::Leaf(_) => false,
        })
    }

    /// Removes the next node that is ready, and its gradient. The flag is true for a node that continues a chain.
    fn next_node(&mut self) -> Option<(Arc<Node>, PendingGrad, bool)> {
        loop {
            let link = self.chain.next_link();
            let node = match link {
                Some(id) => self.ready_queue.remove(&id),
                None => self.ready_queue.pop_last().map(|(_, node)| node),
            };
            let found = node.and_then(|node| Some((self.pending_grads.remove(&node.id)?, node)));
            match found {
                Some((grad, node)) => return Some((node, grad, link.is_some())),
                None if link.is_none() && self.ready_queue.is_empty() => return None,
                None => {}
            }
        }
    }

    /// Delivers the gradients of the inputs of bypassed nodes, and returns the input of `node` that leads to them.
    /// Frees what these nodes have saved, as if they had run.
    fn deliver_bypass(&mut self, node: &Node, bypass: Bypass) -> Result<usize> {
        bypass.free_nodes(self.options.retain_graph)?;
        for (k, EdgeGrad { edge, grad, is_accumulated }) in bypass.grads.into_iter().enumerate() {
            edge.check_grad(&grad, node, k)?;
            self.add_edge_grad(&edge, grad, is_accumulated)?;
        }
        Ok(bypass.input)
    }

    #[track_caller]
    fn run_node(&mut self, node: &Arc<Node>, grad: PendingGrad, is_link: bool, looks: bool) -> Result<()> {
        let mut grad = grad.complete()?;
        if let Some(hooks) = node.hooks.get() {
            grad = hooks.run_grad_hooks(&format!("the result of `{}`", node.op), grad)?;
        }
        if let Some(targets) = self.targets.filter(|targets| targets.nodes.contains(&node.id)) {
            self.target_grads.insert(node.id, grad.clone());
            if targets.stop_at_targets {
                return Ok(());
            }
        }
        if self.exec_info.needed.as_ref().is_some_and(|needed| !needed.contains(&node.id)) {
            return Ok(());
        }
        // The scope lasts until the gradients are delivered, so copies and sums are attributed to this node.
        let _scope = memory::scope::enter_scope(memory::scope::Scope {
            module: node.module,
            tag: Tag::Gradient,
            op: node.op,
            site: node.site,
        });
        let overwrites = is_link && elementwise_chain::can_overwrite(&grad, node.dtype);
        let mut result = self.run_backward_fn(node, &grad, overwrites)?;
        // Only the sum of a node that this pass runs can wait for the other parts.
        let waits = |edge: &Option<GradEdge>| matches!(edge, Some(GradEdge::Node(input)) if input.id >= self.min_node_id);
        if looks || !node.next_edges.iter().all(waits) {
            result.complete()?;
        }
        let NodeGrads { grads, accumulated: handed, mut written, bypass, run } = result;
        let bypassed_input = bypass.map(|bypass| self.deliver_bypass(node, bypass)).transpose()?;
        if looks {
            anomaly::check_grads_for_nan(node, &grad, &grads)?;
        }
        // If the node passed its incoming gradient on, this handle is dropped, so that the receiver is the only owner.
        let grad = Some(grad).filter(Tensor::is_unique);
        // Sums in place join the kernels of the chain, so what these read is held until the sums are enqueued.
        let mut held = None;
        match run {
            Some(run) => {
                let links = self.find_links(node, &grads);
                match links.is_empty() && self.delivers_in_place(node, &grads) {
                    true => held = Some((run, grad)),
                    false => self.chain.extend(links, run, grad),
                }
            }
            None => drop(grad),
        }
        fail_if!(grads.len() != node.next_edges.len();
            backward, "{} returned {} gradients for {} inputs; return one for each input, `None` where \
            `needs_input_grad` is false", node.describe(), grads.len(), node.next_edges.len());
        let mut grads = grads;
        // A leaf may occur several times among the inputs: the sum that the operation took must come back
        // first.
        let (first, then): (SmallVec<[usize; 8]>, SmallVec<[usize; 8]>) =
            (0..grads.len()).partition(|k| handed.contains(k));
        for k in first.into_iter().chain(then) {
            let Some(edge) = node.next_edges[k].as_ref().filter(|edge| self.should_visit(edge)) else {
                continue;
            };
            let Some(mut grad) = grads[k].take() else {
                if bypassed_input == Some(k) {
                    continue;
                }
                fail!(backward, "{} returned no gradient for input {k}, which requires one", node.describe());
            };
            edge.check_grad(&grad, node, k)?;
            if !self.options.create_graph && grad.requires_grad() {
                grad = grad.detach();
            }
            self.add_edge_grad(edge, grad, handed.contains(&k))?;
            if let (Some((_, written)), GradEdge::Node(input)) = (written.take_if(|(at, _)| *at == k), edge)
                && let Some(pending) = self.pending_grads.get_mut(&input.id)
            {
                pending.written = Some(written);
            }
        }
        if let Some((run, grad)) = held {
            self.chain.extend(SmallVec::new(), run, grad);
        }
        Ok(())
    }
}

/// Returns the gradient with a node that fails if a second gradient is requested, because a term of it would
/// be missing.
fn forbid_second_gradient(node: &Arc<Node>, incoming: &Tensor, grad: &Tensor) -> Tensor {
    let edges = std::iter::once(incoming.grad_edge()).chain(node.next_edges.iter().cloned()).collect();
    let refuse: Arc<BackwardFn> =
        Arc::new(|_, ctx| Err(Error::NoSecondGradient { op: ctx.node.op, operation: ctx.node.describe() }));
    let refusing = Node::new(node.op, grad, edges, BackwardKind::Differentiable, refuse);
    grad.with_grad_edge(Some(GradEdge::Node(refusing)))
}

/// Runs a backward pass from `roots` with their gradients. Returns the gradients of the targets that are
/// nodes.
pub(super) fn run_backward_to(
    roots: &[(Tensor, Tensor)],
    options: BackwardOptions,
    targets: Option<&GradTargets>,
    sink: Option<&CapturedGrads>,
) -> Result<GradSums> {
    run_backward_until(0, roots, options, targets, sink).map(|(found, _)| found)
}

/// Runs a backward pass like [`run_backward_to`] without nodes older than `oldest`, whose gradients it
/// returns for the pass around this one.
#[track_caller]
pub(super) fn run_backward_until(
    oldest: u64,
    roots: &[(Tensor, Tensor)],
    options: BackwardOptions,
    targets: Option<&GradTargets>,
    sink: Option<&CapturedGrads>,
) -> Result<(GradSums, OuterGrads)> {
    let (_no_grad, _grad) = match options.create_graph {
        false => (Some(no_grad()), None),
        true => (None, Some(enable_grad())),
    };
    // Gradients are computed in the dtypes that the forward pass chose.
    let _as_given = super::autocast_mode::AutocastGuard::enter(None);
    let looks = anomaly::is_checking_grads()?;
    let mut task = GraphTask {
        options,
        targets,
        captured_grads: sink,
        exec_info: ExecInfo::default(),
        min_node_id: oldest,
        outer_grads: OuterGrads::new(),
        pending_grads: FxHashMap::default(),
        ready_queue: BTreeMap::new(),
        target_grads: GradSums::new(),
        chain: ElementwiseChain::default(),
        // A recorded pass and a check for NaN need the gradients as they were.
        has_chains: !options.create_graph && !looks,
    };
    let starts: SmallVec<[GradEdge; 4]> = roots.iter().filter_map(|(root, _)| root.grad_edge()).collect();
    task.exec_info.scan_graph(&starts, targets, oldest);
    for (root, seed) in roots {
        let Some(meta) = root.grad_edge() else {
            fail!(
                backward,
                "the tensor does not require a gradient: no input required one, or it was computed under `no_grad` \
                 or from a detached tensor"
            );
        };
        if !root.is_current() {
            return Err(inplace::stale_history_error("a backward pass from it"));
        }
        if task.should_visit(&meta) {
            task.add_edge_grad(&meta, seed.clone(), false)?;
        }
    }
    while let Some((node, grad, is_link)) = task.next_node() {
        task.run_node(&node, grad, is_link, looks)?;
    }
    Ok((task.target_grads, task.outer_grads))
}

/// Options of [`Tensor::backward_with`], [`backward`] and [`grad`]; the defaults are PyTorch's.
#[derive(Clone, Copy, Debug, Default)]
pub struct GradOptions<'a> {
    /// Gradients of the outputs, one each. `None` means ones, which requires scalar outputs.
    pub grad_outputs: Option<&'a [Tensor]>,
    /// If true, the graph is retained for another pass. `None` means the value of `create_graph`.
    pub retain_graph: Option<bool>,
    /// If true, the pass is recorded, so that the gradients have gradients. The graph is then retained by
    /// default.
    pub create_graph: bool,
}

impl<'a> From<&'a Tensor> for GradOptions<'a> {
    /// Starts the pass of one tensor from this gradient.
    fn from(grad: &'a Tensor) -> Self {
        Self { grad_outputs: Some(std::slice::from_ref(grad)), ..Self::default() }
    }
}

impl<'a> From<&GradOptions<'a>> for GradOptions<'a> {
    fn from(options: &GradOptions<'a>) -> Self {
        *options
    }
}

impl GradOptions<'_> {
    /// Returns the default options with `create_graph` set.
    #[must_use]
    pub fn create_graph() -> Self {
        Self { create_graph: true, ..Self::default() }
    }

    /// Returns the default options with `retain_graph` set.
    #[must_use]
    pub fn retain_graph() -> Self {
        Self { retain_graph: Some(true), ..Self::default() }
    }

    fn to_backward_options(self) -> BackwardOptions {
        BackwardOptions {
            retain_graph: self.retain_graph.unwrap_or(self.create_graph),
            create_graph: self.create_graph,
        }
    }

    /// Pairs the outputs with their gradients.
    #[track_caller]
    fn seeded_outputs(&self, outputs: &[impl AsRef<Tensor>]) -> Result<Vec<(Tensor, Tensor)>> {
        let Some(grads) = self.grad_outputs else {
            // No closure, which would hide the caller's line.
            let mut seeded = Vec::with_capacity(outputs.len());
            for output in outputs {
                let output = output.as_ref();
                seeded.push((output.clone(), output.create_seed_grad()?));
            }
            return Ok(seeded);
        };
        fail_if!(grads.len() != outputs.len();
            backward, "{} gradients for {} outputs", grads.len(), outputs.len());
        let mut seeded = Vec::with_capacity(outputs.len());
        for (output, grad) in outputs.iter().map(AsRef::as_ref).zip(grads) {
            output.check_seed_grad(grad)?;
            // In a recorded pass, a gradient that the caller provides keeps its history.
            seeded.push((output.clone(), if self.create_graph { grad.clone() } else { grad.detach() }));
        }
        Ok(seeded)
    }
}

/// Computes the gradients of `outputs` and adds them to the leaves: `torch.autograd.backward`.
///
/// With `create_graph` the leaves' gradients have a history that holds the leaves: a reference cycle. Remove
/// such gradients (`set_grad(None)`) when they are no longer needed, or use [`grad`].
#[track_caller]
pub fn backward(outputs: &[impl AsRef<Tensor>], options: &GradOptions<'_>) -> Result<()> {
    let location = memory::scope::call_site();
    let roots = options.seeded_outputs(outputs)?;
    match run_backward_to(&roots, options.to_backward_options(), None, None) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.with_call_of("backward", location)),
    }
}

/// Returns the gradients of `outputs` with respect to `inputs`: `torch.autograd.grad`. Inputs may be leaves
/// or intermediate results. The leaves' accumulated gradients do not change, and only nodes that lead to an
/// input are visited.
///
/// ```
/// # use forebay_core::{autograd::{self, GradOptions}, device::Device, dtype::DType, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let x = Tensor::full(&[1], 2.0, DType::F32, &device)?.to_leaf()?;
/// let y = x.pow(3.0)?;
/// let slope = autograd::grad(&[&y], &[&x], &GradOptions::create_graph())?; // 3x² = 12
/// let curve = autograd::grad(&slope, &[x], &GradOptions::default())?; // 6x = 12
/// # assert_eq!(curve[0].shape(), [1]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
///
/// # Errors
/// Those of [`Tensor::backward`], an input that requires no gradient, and an input that no path leads to
/// ([`grad_allow_unused`] allows it). With `create_graph`, a later pass fails at an operation that is only
/// once differentiable.
#[track_caller]
pub fn grad(
    outputs: &[impl AsRef<Tensor>],
    inputs: &[impl AsRef<Tensor>],
    options: &GradOptions<'_>,
) -> Result<Vec<Tensor>> {
    let found = grad_allow_unused(outputs, inputs, options)?;
    if let Some(k) = found.iter().position(Option::is_none) {
        fail!(
            backward,
            "`grad`: no path leads from the outputs to input {k}; leave it out, or use `grad_allow_unused`"
        );
    }
    Ok(found.into_iter().flatten().collect())
}

/// Returns the gradients like [`grad`], with `None` for inputs that no path leads to.
#[track_caller]
pub fn grad_allow_unused(
    outputs: &[impl AsRef<Tensor>],
    inputs: &[impl AsRef<Tensor>],
    options: &GradOptions<'_>,
) -> Result<Vec<Option<Tensor>>> {
    let inputs: Vec<&Tensor> = inputs.iter().map(AsRef::as_ref).collect();
    if let Some(k) = inputs.iter().position(|t| !t.requires_grad()) {
        fail!(backward, "`grad`: input {k} does not require a gradient");
    }
    let roots = options.seeded_outputs(outputs)?;
    let targets = GradTargets::restrict_to(&inputs);
    let sink = CapturedGrads::default();
    let location = memory::scope::call_site();
    let found = run_backward_to(&roots, options.to_backward_options(), Some(&targets), Some(&sink))
        .map_err(|error| error.with_call_of("backward", location))?;
    let sink = sink.into_inner();
    Ok(inputs
        .iter()
        .map(|t| match t.grad_edge()? {
            GradEdge::Leaf(leaf) => sink.get(&leaf.id).cloned(),
            GradEdge::Node(node) => found.get(&node.id).cloned(),
        })
        .collect())
}

impl Tensor {
    /// Computes the gradient of this scalar, adds it to the leaves, and frees the graph.
    ///
    /// # Errors
    /// The tensor is not a scalar, has no history, or its graph was freed by an earlier pass. A saved tensor
    /// was changed in place.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.backward_with(GradOptions::default())
    }

    /// Runs [`backward`](Self::backward) with options, or from a gradient of this tensor's shape and dtype.
    /// [`backward`] starts from several tensors.
    ///
    /// ```
    /// # use forebay_core::{autograd::GradOptions, device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones([3], DType::F32, &device)?.to_leaf()?;
    /// let y = x.square()?;
    /// y.backward_with(&y.ones_like()?)?;
    /// let loss = x.exp()?.sum_all()?;
    /// loss.backward_with(GradOptions::retain_graph())?;
    /// loss.backward()?;
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward), and a gradient with another shape, dtype or device.
    #[track_caller]
    pub fn backward_with<'a>(&self, options: impl Into<GradOptions<'a>>) -> Result<()> {
        backward(std::slice::from_ref(self), &options.into())
    }

    #[track_caller]
    fn check_seed_grad(&self, grad: &Tensor) -> Result<()> {
        fail_if!(grad.shape() != self.shape() || grad.dtype() != self.dtype();
            backward, "the gradient is {} {:?}, the tensor {} {:?}",
            grad.dtype(), grad.shape(), self.dtype(), self.shape());
        self.check_same_device("backward", grad)
    }

    #[track_caller]
    fn create_seed_grad(&self) -> Result<Tensor> {
        fail_if!(self.numel() != 1;
            backward, "a tensor of shape {:?} is not a scalar; reduce it (`mean`, `sum`) or give its gradient to `backward_with`",
            self.shape());
        let _scope = memory::scope::enter_tag(Tag::Gradient);
        Tensor::ones(self.shape(), self.dtype(), self.device())
    }
}

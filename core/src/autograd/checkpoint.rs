//! Activation checkpointing: intermediate results of a closure are dropped after the forward pass. The
//! backward pass recomputes them with the same random numbers (Chen et al., "Training deep nets with
//! sublinear memory cost", 2016).

use std::cell::Cell;
use std::sync::Arc;

use smallvec::SmallVec;

use super::autocast_mode::AutocastState;
use super::engine::{BackwardOptions, GradTargets, OuterGrads, run_backward_until, take_leaf_grad};
use super::{
    BackwardCtx, BackwardKind, SavedTensor, composite, compute_requires_grad, enable_grad, inplace, no_grad,
    recompute, record_node,
};
use crate::error::{Result, fail_if};
use crate::memory;
use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};
use crate::storage::next_id;
use crate::tensor::Tensor;

/// Number of checkpoints that may be inside each other. Each level takes stack in both passes. Without optimisation,
/// the levels take half of a thread's 2 MiB, and the rest is for the bodies.
const MAX_NESTING: usize = 64;

thread_local! {
    /// Number of checkpoints of this thread whose body or backward function runs.
    static NESTING: ScopedLocal<Cell<usize>> = const { ScopedLocal::new(Cell::new(0)) };
}

/// Counts a checkpoint while its body or backward function runs.
#[track_caller]
fn enter_checkpoint() -> Result<ScopedGuard<Cell<usize>>> {
    let depth = NESTING.current() + 1;
    fail_if!(depth > MAX_NESTING;
        argument("checkpoint"), "more than {MAX_NESTING} checkpoints are nested; call them one after another");
    Ok(ScopedGuard::new(&NESTING, depth))
}

/// Runs `body` on `inputs` and keeps only the inputs and the result for the backward pass.
///
/// Parameters and results that `body` captures get their gradients too. `body` must give the same result
/// when it runs again. Random numbers and the [`autocast`](crate::amp::autocast) state are those of the
/// first run. A captured tensor that was changed or replaced since then is an error. The recomputation does
/// not update the state of modules, such as running statistics; custom modules use
/// [`update_state`](super::update_state). Checkpoints nest, up to 64 deep: recomputing the outer one
/// records the inner one.
///
/// ```no_run
/// # use forebay_core::{autograd::checkpoint, tensor::Tensor, error::Result};
/// # fn f(x: &Tensor, w: &Tensor) -> Result<Tensor> {
/// let w = w.clone();
/// checkpoint(&[x], move |inputs| inputs[0].matmul(&w)?.relu())
/// # }
/// ```
///
/// # Errors
/// Those of `body`. There is no input, or more than 64 checkpoints are inside each other.
#[track_caller]
pub fn checkpoint(
    inputs: &[&Tensor],
    body: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    fail_if!(inputs.is_empty(); argument("checkpoint"), "takes at least one input");
    let _nesting = enter_checkpoint()?;
    if !super::is_grad_enabled() {
        return body(&inputs.iter().map(|t| (*t).clone()).collect::<Vec<_>>());
    }
    let (mode, scope) = (AutocastState::current(), memory::scope::current());
    let saved: Vec<SavedTensor> = inputs.iter().map(|t| SavedTensor::input(t)).collect();
    let (out, first) = {
        let _no_grad = no_grad();
        // Casts of parameters are repeated in the backward pass, and not kept until then.
        let _mode = mode.enter();
        recompute::run_forward(inputs, || body(&inputs.iter().map(|t| t.detach()).collect::<Vec<_>>()))?
    };
    // Captured parameters are unknown here, so the result is recorded even if no listed input requires a
    // gradient: a private leaf stands for them.
    let create_anchor = || Tensor::zeros((), out.dtype(), out.device())?.to_leaf();
    let anchor = (!compute_requires_grad(inputs)).then(create_anchor).transpose()?;
    let mut edges: Vec<&Tensor> = inputs.to_vec();
    edges.extend(anchor.as_ref());
    let first = Arc::new(first);
    let anchored = anchor.is_some();
    Ok(record_node("checkpoint", out.detach(), &edges, BackwardKind::Checkpoint, move |grad, ctx| {
        let _nesting = enter_checkpoint()?;
        let _grad = enable_grad();
        let saved = saved.iter().map(|t| t.unpack(ctx)).collect::<Result<Vec<_>>>()?;
        if !first.is_current() {
            return Err(inplace::changed_capture_error(&ctx.node.describe()));
        }
        // Nodes recorded from here on belong to the recomputation; older ones belong to the pass around it.
        let oldest = next_id();
        let leaves = create_inner_inputs(&saved, ctx)?;
        let (again, reads_the_same) = {
            // Recomputed activations are attributed to the module of the first run.
            let _scope = memory::scope::enter_scope(scope);
            let _mode = mode.enter();
            recompute::run_recompute(&first, &leaves, || body(&leaves))?
        };
        if !reads_the_same {
            return Err(inplace::changed_capture_error(&ctx.node.describe()));
        }
        let recorded = ctx.create_graph();
        let targets = recorded.then(|| GradTargets::stop_at(&leaves.iter().collect::<Vec<_>>()));
        let options = BackwardOptions { retain_graph: recorded, create_graph: recorded };
        let (mut found, beyond) = match again.requires_grad() {
            true => {
                let roots = [(again, grad.clone())];
                run_backward_until(oldest, &roots, options, targets.as_ref(), ctx.captured_grads)?
            }
            false => Default::default(),
        };
        hand_over_outer_grads(ctx, beyond)?;
        let mut grads = match recorded {
            true => {
                composite::collect_alias_grads(&leaves, &ctx.needs_input_grad, |leaf| found.remove(&leaf))?
            }
            false => {
                let grad =
                    |leaf| take_leaf_grad(leaf, ctx.captured_grads).map_or_else(|| leaf.zeros_like(), Ok);
                let pairs = leaves.iter().zip(ctx.needs_input_grad.iter());
                pairs
                    .map(|(leaf, needs_grad)| needs_grad.then(|| grad(leaf)).transpose())
                    .collect::<Result<_>>()?
            }
        };
        if anchored {
            grads.push(Some(Tensor::zeros((), grad.dtype(), grad.device())?));
        }
        Ok(grads)
    }))
}

/// Creates the inputs of a recomputation. In a recorded pass, the recomputation is part of the graph, and its inputs
/// keep their histories. Otherwise those that need a gradient are leaves.
fn create_inner_inputs(saved: &[Tensor], ctx: &BackwardCtx<'_>) -> Result<Vec<Tensor>> {
    if ctx.create_graph() {
        let all: SmallVec<[bool; 4]> = saved.iter().map(Tensor::requires_grad).collect();
        return Ok(composite::create_aliases(saved, &all).into_vec());
    }
    let pairs = saved.iter().zip(&ctx.needs_input_grad);
    pairs.map(|(t, &needs_grad)| if needs_grad { t.to_leaf() } else { Ok(t.detach()) }).collect()
}

/// Passes the gradients of captured tensors to the pass around.
fn hand_over_outer_grads(ctx: &BackwardCtx<'_>, beyond: OuterGrads) -> Result<()> {
    // A node younger than the first run means that the recomputation has read something else.
    if beyond.iter().any(|(node, _)| node.id > ctx.node.id) {
        return Err(inplace::changed_capture_error(&ctx.node.describe()));
    }
    ctx.outer_grads.borrow_mut().extend(beyond);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::error::Error;
    use crate::runtime::device::Device;

    fn nested(x: &Tensor, depth: usize) -> Result<Tensor> {
        match depth {
            0 => x.exp(),
            _ => checkpoint(&[x], move |x| {
                // Stack of a body, such as the functions of a module without optimisation.
                std::hint::black_box([0u8; 8 << 10]);
                nested(&x[0], depth - 1)
            }),
        }
    }

    #[test]
    fn checkpoints_nest_up_to_the_limit_on_a_small_stack() -> Result<()> {
        let run = || -> Result<()> {
            let device = Device::null(Default::default());
            let x = Tensor::ones([2], DType::F32, &device)?.to_leaf()?;
            nested(&x, MAX_NESTING)?.sum_all()?.backward()?;
            assert!(x.grad().is_some());
            for depth in [MAX_NESTING + 1, 300, 100_000] {
                let error = nested(&x, depth).err().map(|e| e.to_string()).unwrap_or_default();
                assert!(error.contains("more than 64 checkpoints"), "{depth}: {error}");
                let _no_grad = no_grad();
                assert!(nested(&x, depth).is_err());
            }
            // The guards are gone again.
            nested(&x, MAX_NESTING)?.sum_all()?.backward()
        };
        std::thread::scope(|threads| {
            let thread = std::thread::Builder::new().stack_size(2 << 20).spawn_scoped(threads, run);
            thread.map_err(|e| Error::argument("test", e.to_string()))?.join().expect("no panic")
        })
    }
}

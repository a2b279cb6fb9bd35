//! Checkpointing: a closure's intermediate results are dropped after the forward pass and computed again, with the
//! same random numbers, when the backward pass needs them (Chen et al., "Training deep nets with sublinear memory
//! cost", 2016).

use std::sync::Arc;

use smallvec::SmallVec;

use super::engine::{Beyond, Options, Targets, run_down_to, take_grad};
use super::{
    BackwardCtx, Grads, Kind, SavedTensor, compose, enable_grad, inplace, next_id, no_grad, recompute,
    record, wanted,
};
use crate::amp::Mode;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::Tensor;

/// Runs `body` on `inputs` and keeps only the inputs and the result for the backward pass.
///
/// Parameters and results that `body` captures get their gradients too, when the backward pass runs it again. A captured tensor that was changed
/// until then is an error. `body` must give the same result when it is run twice; random numbers drawn inside are the same, under the
/// [`autocast`](crate::amp::autocast) of the first time. The second run leaves the state of modules alone, such as running statistics; modules of
/// your own use [`update_state`](super::update_state). Checkpoints nest: an inner one is taken when the outer one runs again.
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
/// What `body` returns.
pub fn checkpoint(
    inputs: &[&Tensor],
    body: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    if inputs.is_empty() {
        return Err(Error::argument("checkpoint", "takes at least one input"));
    }
    if !super::is_enabled() {
        return body(&inputs.iter().map(|t| (*t).clone()).collect::<Vec<_>>());
    }
    let (mode, scope) = (Mode::current(), memory::scope::current());
    let saved: Vec<SavedTensor> = inputs.iter().map(|t| SavedTensor::of(t)).collect();
    let (out, first) = {
        let _no_grad = no_grad();
        // Parameters that are cast inside are cast again in the backward pass, and not kept until then.
        let _mode = mode.enter();
        recompute::first(|| body(&inputs.iter().map(|t| t.detach()).collect::<Vec<_>>()))?
    };
    // Captured parameters are invisible here, so the result is recorded even if no listed input wants a gradient:
    // a private leaf stands for them.
    let anchor = if wanted(inputs) { None } else { Some(anchor(&out)?) };
    let mut edges: Vec<&Tensor> = inputs.to_vec();
    edges.extend(anchor.as_ref());
    let first = Arc::new(first);
    let anchored = anchor.is_some();
    Ok(record("checkpoint", out.detach(), &edges, Kind::Checkpoint, move |grad, wants| {
        let _grad = enable_grad();
        let saved = saved.iter().map(|t| t.get(wants)).collect::<Result<Vec<_>>>()?;
        if !first.is_current() {
            return Err(inplace::captured(&wants.node.describe()));
        }
        // What is recorded from here on belongs to the second run; what is older is the walk's around.
        let oldest = next_id();
        // Recorded, the second run is a part of the tape, and its inputs have their histories.
        let leaves: Vec<Tensor> = match wants.create_graph() {
            true => {
                let all: SmallVec<[bool; 4]> = saved.iter().map(Tensor::requires_grad).collect();
                compose::aliases(&saved, &all).into_vec()
            }
            false => {
                let leaf = |(t, &w): (&Tensor, &bool)| if w { t.requires_grad_() } else { Ok(t.detach()) };
                saved.iter().zip(wants.iter()).map(leaf).collect::<Result<_>>()?
            }
        };
        let again = {
            // What is computed again is an activation of its module, as it was the first time.
            let _scope = memory::scope::enter_scope(scope);
            let _mode = mode.enter();
            recompute::again(&first, || body(&leaves))?
        };
        let mut grads: Grads = if wants.create_graph() {
            let targets = Targets::with_all(&leaves.iter().collect::<Vec<_>>());
            let options = Options { retain_graph: true, create_graph: true };
            let (mut found, beyond) = match again.requires_grad() {
                true => run_down_to(oldest, &[(again, grad.clone())], options, Some(&targets), wants.sink)?,
                false => Default::default(),
            };
            leave(wants, beyond)?;
            compose::take(&leaves, wants, |leaf| found.remove(&leaf))?
        } else {
            if again.requires_grad() {
                let (_, beyond) =
                    run_down_to(oldest, &[(again, grad.clone())], Options::default(), None, wants.sink)?;
                leave(wants, beyond)?;
            }
            let mut grads = Grads::new();
            for (leaf, &want) in leaves.iter().zip(wants.iter()) {
                grads.push(match want {
                    true => Some(take_grad(leaf, wants.sink).map_or_else(|| leaf.zeros_like(), Ok)?),
                    false => None,
                });
            }
            grads
        };
        if anchored {
            grads.push(Some(Tensor::zeros(&[], grad.dtype(), grad.device())?));
        }
        Ok(grads)
    }))
}

/// Leaves the gradients of what the closure captures to the walk around.
fn leave(wants: &BackwardCtx<'_>, beyond: Beyond) -> Result<()> {
    // A history that is younger than the first run: the second one has read something else.
    if beyond.iter().any(|(node, _)| node.id > wants.node.id) {
        return Err(inplace::captured(&wants.node.describe()));
    }
    wants.beyond.borrow_mut().extend(beyond);
    Ok(())
}

fn anchor(out: &Tensor) -> Result<Tensor> {
    Tensor::zeros(&[], out.dtype(), out.device())?.requires_grad_()
}

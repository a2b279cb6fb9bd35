//! Checkpointing: a closure's intermediate results are dropped after the forward pass and computed again, with the
//! same random numbers, when the backward pass needs them (Chen et al., "Training deep nets with sublinear memory
//! cost", 2016).

use std::sync::Arc;

use super::{Grads, Options, attach, enable_grad, no_grad, run, take_grad, wanted};
use crate::amp::Mode;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::Tensor;

/// Runs `body` on `inputs` and keeps only the inputs and the result for the backward pass.
///
/// Parameters that `body` captures get their gradients too, when the backward pass runs it again. `body` must give
/// the same result when it is run twice; random numbers drawn inside replay, under the
/// [`autocast`](crate::amp::autocast) of the first time. Checkpoints nest: an inner one is taken when the outer one
/// runs again.
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
    let Some(device) = inputs.first().map(|t| t.device().clone()) else {
        return Err(Error::argument("checkpoint", "takes at least one input"));
    };
    if !super::is_enabled() {
        return body(&inputs.iter().map(|t| (*t).clone()).collect::<Vec<_>>());
    }
    let random = device.random_state();
    let (mode, scope) = (Mode::current(), memory::scope::current());
    let saved: Vec<Tensor> = inputs.iter().map(|t| (*t).clone()).collect();
    let out = {
        let _no_grad = no_grad();
        // Parameters that are cast inside are cast again in the backward pass, and not kept until then.
        let _mode = mode.enter();
        body(&saved.iter().map(Tensor::detach).collect::<Vec<_>>())?
    };
    // Captured parameters are invisible here, so the result is recorded even if no listed input wants a gradient:
    // a private leaf stands for them.
    let anchor = if wanted(inputs) { None } else { Some(anchor(&out)?) };
    let mut edges: Vec<&Tensor> = inputs.to_vec();
    edges.extend(anchor.as_ref());
    let body = Arc::new(body);
    let anchored = anchor.is_some();
    Ok(attach("checkpoint", out.detach(), &edges, move |grad, wants| {
        let _grad = enable_grad();
        let leaves = saved
            .iter()
            .zip(wants.iter())
            .map(|(t, &w)| if w { t.requires_grad_() } else { Ok(t.detach()) })
            .collect::<Result<Vec<_>>>()?;
        let now = device.random_state();
        device.restore_random(random);
        let again = {
            // What is computed again is an activation of its module, as it was the first time.
            let _scope = memory::scope::enter_scope(scope);
            let _mode = mode.enter();
            body(&leaves)
        };
        device.restore_random(now);
        let again = again?;
        let mut grads: Grads = saved.iter().map(|_| None).collect();
        if again.requires_grad() {
            run(&[(again, grad.clone())], Options::default())?;
        }
        for (slot, (leaf, &want)) in grads.iter_mut().zip(leaves.iter().zip(wants.iter())) {
            if want {
                *slot = Some(match take_grad(leaf) {
                    Some(grad) => grad,
                    None => leaf.zeros_like()?,
                });
            }
        }
        if anchored {
            grads.push(Some(Tensor::zeros(&[], grad.dtype(), grad.device())?));
        }
        Ok(grads)
    }))
}

fn anchor(out: &Tensor) -> Result<Tensor> {
    Tensor::zeros(&[], out.dtype(), out.device())?.requires_grad_()
}

//! Looking for the operation that made the first NaN.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Node, no_grad};
use crate::error::{Error, Result};
use crate::local::{Get, InPlace, Local, LocalSlot, Scoped};
use crate::tensor::Tensor;

/// For all threads.
static EVERYWHERE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Looks at the gradients of this thread.
    static GRADIENTS: Local<Cell<bool>> = const { Local::new(Cell::new(false)) };
    /// Looks at results of the forward pass, too.
    static FORWARD: Local<Cell<bool>> = const { Local::new(Cell::new(false)) };
    /// The operation that made the first value that is not finite.
    static FIRST: Local<LocalSlot<Option<String>>> = const { Local::new(LocalSlot::new(None)) };
}

/// While it lives, backward passes of this thread look for NaN. See [`detect_anomaly`]. Guards may be dropped in any order.
#[derive(Debug)]
pub struct DetectAnomaly {
    _gradients: Scoped<Cell<bool>>,
    forward: Option<Scoped<Cell<bool>>>,
}

impl DetectAnomaly {
    /// Also looks at what recorded operations give in the forward pass: a backward pass of a loss behind one that gave infinities
    /// or NaN is an error that names it.
    #[must_use = "nothing is looked for after the guard is dropped"]
    pub fn with_forward(mut self) -> Self {
        self.forward.get_or_insert_with(|| Scoped::new(&FORWARD, true));
        self
    }

    /// The first operation that gave a value that is not finite since [`with_forward`](Self::with_forward), and where it was asked for.
    #[must_use]
    pub fn first(&self) -> Option<String> {
        FIRST.read(Clone::clone)
    }
}

impl Drop for DetectAnomaly {
    fn drop(&mut self) {
        self.forward = None;
        if !FORWARD.now() {
            forget();
        }
    }
}

/// Lets backward passes of this thread stop at the first gradient with a NaN, with an error that names the operation of the
/// forward pass that it is the gradient of, its module, and the line that asked for it. The host waits for every operation's
/// gradients: it is for finding a fault, not for training.
///
/// ```
/// # use forebay_core::{autograd, device::Device, dtype::DType, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// # let x = Tensor::zeros(&[3], DType::F32, &device)?.requires_grad_()?;
/// let guard = autograd::detect_anomaly();
/// x.sqrt()?.sum_all()?.backward()?;
/// drop(guard);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[must_use = "nothing is looked for after the guard is dropped"]
pub fn detect_anomaly() -> DetectAnomaly {
    DetectAnomaly { _gradients: Scoped::new(&GRADIENTS, true), forward: None }
}

/// As [`detect_anomaly`] for all threads, until it is called again.
pub fn set_detect_anomaly(on: bool) {
    EVERYWHERE.store(on, Ordering::Relaxed);
}

/// Forgets the first value that was not finite.
fn forget() {
    let first = FIRST.change(Option::take);
    drop(first);
}

fn holds(t: &Tensor, what: impl Fn(&Tensor) -> Result<Tensor>) -> Result<bool> {
    let _no_grad = no_grad();
    Ok(t.numel() > 0 && what(&t.detach())?.any(&[], false)?.item()? != 0.0)
}

/// An operation of the forward pass has given `out`.
pub(super) fn made(node: &Node, out: &Tensor) {
    if !FORWARD.now() || FIRST.read(Option::is_some) {
        return;
    }
    // What cannot be looked at is no anomaly; the error comes again where it matters.
    if holds(out, |t| t.isfinite()?.logical_not()).unwrap_or(false) {
        let first = node.describe();
        FIRST.change(|slot| *slot = Some(first));
    }
}

/// Whether gradients are looked at; an error if the forward pass has failed before.
pub(super) fn looks() -> Result<bool> {
    if !GRADIENTS.now() && !EVERYWHERE.load(Ordering::Relaxed) {
        return Ok(false);
    }
    match FIRST.read(Clone::clone) {
        None => Ok(true),
        Some(first) => Err(Error::Anomaly(format!(
            "in the forward pass, {first} gave the first value that is not finite"
        ))),
    }
}

/// Fails if a gradient that `node` gives, or the one that it got, has a NaN.
pub(super) fn look(node: &Node, given: &Tensor, grads: &[Option<Tensor>]) -> Result<()> {
    for (k, grad) in grads.iter().enumerate() {
        let Some(grad) = grad else { continue };
        if holds(grad, Tensor::isnan)? {
            let before = match holds(given, Tensor::isnan)? {
                true => "so has the gradient of its result, which was given so",
                false => "the gradient of its result has none",
            };
            return Err(Error::Anomaly(format!(
                "the gradient of input {k} of {} has NaN; {before}",
                node.describe()
            )));
        }
    }
    Ok(())
}

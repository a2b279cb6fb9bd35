//! Looking for the operation that made the first NaN.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Node, no_grad};
use crate::error::{Error, Result};
use crate::scoped_local::{GetCurrent, NoDropCell, ScopedGuard, ScopedLocal, WithCurrent};
use crate::tensor::Tensor;

/// For all threads.
static ALL_THREADS_ENABLED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Looks at the gradients of this thread.
    static CHECK_GRADS: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
    /// Looks at results of the forward pass, too.
    static CHECK_FORWARD: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
    /// The operation that made the first value that is not finite.
    static FIRST_NONFINITE: ScopedLocal<NoDropCell<Option<String>>> = const { ScopedLocal::new(NoDropCell::new(None)) };
}

/// While it lives, backward passes of this thread look for NaN. See [`detect_anomaly`]. Guards may be dropped in any order.
#[derive(Debug)]
pub struct DetectAnomalyGuard {
    _check_grads: ScopedGuard<Cell<bool>>,
    check_forward: Option<ScopedGuard<Cell<bool>>>,
}

impl DetectAnomalyGuard {
    /// Also looks at what recorded operations give in the forward pass: a backward pass of a loss behind one that gave infinities
    /// or NaN is an error that names it.
    #[must_use = "nothing is looked for after the guard is dropped"]
    pub fn with_forward(mut self) -> Self {
        self.check_forward.get_or_insert_with(|| ScopedGuard::new(&CHECK_FORWARD, true));
        self
    }

    /// The first operation that gave a value that is not finite since [`with_forward`](Self::with_forward), and where it was asked for.
    #[must_use]
    pub fn first_nonfinite_op(&self) -> Option<String> {
        FIRST_NONFINITE.with_current(Clone::clone)
    }
}

impl Drop for DetectAnomalyGuard {
    fn drop(&mut self) {
        self.check_forward = None;
        if !CHECK_FORWARD.current() {
            clear_first_nonfinite();
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
pub fn detect_anomaly() -> DetectAnomalyGuard {
    DetectAnomalyGuard { _check_grads: ScopedGuard::new(&CHECK_GRADS, true), check_forward: None }
}

/// As [`detect_anomaly`] for all threads, until it is called again.
pub fn set_detect_anomaly(on: bool) {
    ALL_THREADS_ENABLED.store(on, Ordering::Relaxed);
}

/// Forgets the first value that was not finite.
fn clear_first_nonfinite() {
    let first = FIRST_NONFINITE.with_current_mut(Option::take);
    drop(first);
}

fn any_element(t: &Tensor, what: impl Fn(&Tensor) -> Result<Tensor>) -> Result<bool> {
    let _no_grad = no_grad();
    Ok(t.numel() > 0 && what(&t.detach())?.any(&[], false)?.item()? != 0.0)
}

/// An operation of the forward pass has given `out`.
pub(super) fn check_forward_output(node: &Node, out: &Tensor) {
    if !CHECK_FORWARD.current() || FIRST_NONFINITE.with_current(Option::is_some) {
        return;
    }
    // What cannot be looked at is no anomaly; the error comes again where it matters.
    if any_element(out, |t| t.isfinite()?.logical_not()).unwrap_or(false) {
        let first = node.describe();
        FIRST_NONFINITE.with_current_mut(|slot| *slot = Some(first));
    }
}

/// Whether gradients are looked at; an error if the forward pass has failed before.
pub(super) fn is_checking_grads() -> Result<bool> {
    if !CHECK_GRADS.current() && !ALL_THREADS_ENABLED.load(Ordering::Relaxed) {
        return Ok(false);
    }
    match FIRST_NONFINITE.with_current(Clone::clone) {
        None => Ok(true),
        Some(first) => Err(Error::Anomaly(format!(
            "in the forward pass, {first} gave the first value that is not finite"
        ))),
    }
}

/// Fails if a gradient that `node` gives, or the one that it got, has a NaN.
pub(super) fn check_grads_for_nan(node: &Node, given: &Tensor, grads: &[Option<Tensor>]) -> Result<()> {
    for (k, grad) in grads.iter().enumerate() {
        let Some(grad) = grad else { continue };
        if any_element(grad, Tensor::isnan)? {
            let before = match any_element(given, Tensor::isnan)? {
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

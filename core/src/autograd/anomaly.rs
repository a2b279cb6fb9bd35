//! Anomaly mode: finds the operation that produced the first NaN.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Node, no_grad};
use crate::error::{Error, Result};
use crate::scoped_local::{GetCurrent, NoDropCell, ScopedGuard, ScopedLocal, WithCurrent};
use crate::tensor::Tensor;

/// True if anomaly mode is on for all threads.
static ALL_THREADS_ENABLED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// True while gradients of this thread are checked.
    static CHECK_GRADS: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
    /// True while results of the forward pass are checked too.
    static CHECK_FORWARD: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
    /// Operation that produced the first non-finite value.
    static FIRST_NONFINITE: ScopedLocal<NoDropCell<Option<String>>> = const { ScopedLocal::new(NoDropCell::new(None)) };
}

/// Guard during which backward passes of this thread check for NaN. See [`detect_anomaly`]. Guards may be
/// dropped in any order.
#[derive(Debug)]
pub struct DetectAnomalyGuard {
    _check_grads: ScopedGuard<Cell<bool>>,
    check_forward: Option<ScopedGuard<Cell<bool>>>,
}

impl DetectAnomalyGuard {
    /// Also checks the results of recorded operations in the forward pass. If one is infinite or NaN, the
    /// next backward pass fails with an error that names the operation.
    #[must_use = "nothing is looked for after the guard is dropped"]
    pub fn with_forward(mut self) -> Self {
        self.check_forward.get_or_insert_with(|| ScopedGuard::new(&CHECK_FORWARD, true));
        self
    }

    /// Returns the first operation that produced a non-finite value since
    /// [`with_forward`](Self::with_forward), with its call site.
    #[must_use]
    pub fn first_nonfinite_op(&self) -> Option<String> {
        FIRST_NONFINITE.with_current(Clone::clone)
    }
}

impl Drop for DetectAnomalyGuard {
    fn drop(&mut self) {
        self.check_forward = None;
        if !CHECK_FORWARD.current() {
            drop(FIRST_NONFINITE.with_current_mut(Option::take));
        }
    }
}

/// Makes backward passes of this thread fail at the first gradient with a NaN. The error names the operation
/// of the forward pass, its module and its call site. The host waits for every operation's gradients, so this
/// is for debugging, not for training.
///
/// ```
/// # use forebay_core::{autograd, device::Device, dtype::DType, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// # let x = Tensor::zeros(&[3], DType::F32, &device)?.to_leaf()?;
/// let guard = autograd::detect_anomaly();
/// x.sqrt()?.sum_all()?.backward()?;
/// drop(guard);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[must_use = "nothing is looked for after the guard is dropped"]
pub fn detect_anomaly() -> DetectAnomalyGuard {
    DetectAnomalyGuard { _check_grads: ScopedGuard::new(&CHECK_GRADS, true), check_forward: None }
}

/// Turns [`detect_anomaly`] on or off for all threads.
pub fn set_detect_anomaly(on: bool) {
    ALL_THREADS_ENABLED.store(on, Ordering::Relaxed);
}

fn any_element(t: &Tensor, what: impl Fn(&Tensor) -> Result<Tensor>) -> Result<bool> {
    let _no_grad = no_grad();
    Ok(t.numel() > 0 && what(&t.detach())?.any((), false)?.item()? != 0.0)
}

/// Checks the result of an operation of the forward pass.
pub(super) fn check_forward_output(node: &Node, out: &Tensor) {
    if !CHECK_FORWARD.current() || FIRST_NONFINITE.with_current(Option::is_some) {
        return;
    }
    // A failed check is not an anomaly; its error occurs again where it matters.
    if any_element(out, |t| t.isfinite()?.logical_not()).unwrap_or(false) {
        let first = node.describe();
        FIRST_NONFINITE.with_current_mut(|slot| *slot = Some(first));
    }
}

/// Reports whether gradients are checked. Fails if the forward pass has produced a non-finite value.
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

/// Fails if a gradient that `node` computed has a NaN. The error says whether the gradient of its result had
/// one too.
pub(super) fn check_grads_for_nan(node: &Node, incoming: &Tensor, grads: &[Option<Tensor>]) -> Result<()> {
    for (k, grad) in grads.iter().enumerate() {
        let Some(grad) = grad else { continue };
        if any_element(grad, Tensor::isnan)? {
            let before = match any_element(incoming, Tensor::isnan)? {
                true => "the gradient of its result has NaN too",
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

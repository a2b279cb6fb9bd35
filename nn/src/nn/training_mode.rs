//! Temporary evaluation mode.

use std::fmt;
use std::sync::atomic::Ordering;

use super::{Module, ModuleEntry, visit_model};

/// Switches a model to evaluation mode until the guard is dropped. The guard restores the mode of each
/// module, even after an error or a panic. A module that [`eval`](Module::eval) froze before stays frozen.
///
/// ```
/// # use std::sync::atomic::{AtomicBool, Ordering};
/// # use forebay_nn::nn::{self, Module};
/// // Modes of two layers; the second layer is frozen.
/// let layers = (AtomicBool::new(true), AtomicBool::new(false));
/// {
///     let _eval = nn::eval_mode(&layers);
///     assert!(!layers.0.load(Ordering::Relaxed));
/// }
/// assert!(layers.0.load(Ordering::Relaxed) && !layers.1.load(Ordering::Relaxed));
/// ```
pub fn eval_mode<M: Module + ?Sized>(model: &M) -> EvalModeGuard<'_, M> {
    let saved_modes = training_modes(model);
    model.eval();
    EvalModeGuard { model, saved_modes }
}

/// Guard of [`eval_mode`].
#[must_use = "the modes are restored when it is dropped"]
pub struct EvalModeGuard<'a, M: Module + ?Sized> {
    model: &'a M,
    /// Mode of each module, in the order of a visit.
    saved_modes: Vec<bool>,
}

impl<M: Module + ?Sized> Drop for EvalModeGuard<'_, M> {
    fn drop(&mut self) {
        let mut before = self.saved_modes.iter();
        visit_model(self.model, &mut |_, slot| {
            if let ModuleEntry::Training(switch) = slot
                && let Some(&on) = before.next()
            {
                switch.store(on, Ordering::Relaxed);
            }
        });
    }
}

impl<M: Module + ?Sized> fmt::Debug for EvalModeGuard<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EvalModeGuard").field("saved_modes", &self.saved_modes).finish_non_exhaustive()
    }
}

/// Returns the mode of each module that has one, in the order of a visit; true is training.
pub(crate) fn training_modes<M: Module + ?Sized>(model: &M) -> Vec<bool> {
    let mut modes = Vec::new();
    visit_model(model, &mut |_, slot| {
        if let ModuleEntry::Training(switch) = slot {
            modes.push(switch.load(Ordering::Relaxed));
        }
    });
    modes
}

//! Training mode of modules, and its temporary change.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Module, ModuleEntry, ModuleSummary, visit_model};
use crate::autograd;

/// Training mode of a module, as a field of the module: PyTorch's `self.training`.
///
/// [`train`](Module::train) and [`eval`](Module::eval) of the model switch the mode. A module that drops values or
/// keeps statistics by itself needs this field; a layer such as [`Dropout`](super::Dropout) has its own.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, error::Result, ops::AttentionOptions, tensor::Tensor};
/// # use forebay_nn::nn::{Linear, Module, TrainingMode};
/// #[derive(Module)]
/// # #[module(crate = forebay_nn)]
/// struct Attention {
///     qkv: Linear,
///     dropout: f64,
///     training: TrainingMode, // `TrainingMode::new()`: in training
/// }
///
/// impl Attention {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         let parts = self.qkv.forward(x)?.chunk(3, -1)?;
///         let dropout_p = if self.training.is_on() { self.dropout } else { 0.0 };
///         let options = AttentionOptions { dropout_p, ..Default::default() };
///         parts[0].scaled_dot_product_attention(&parts[1], &parts[2], &options)
///     }
/// }
/// # let device = Device::null(Default::default());
/// # let net = Attention { qkv: Linear::new(8, 24, &device)?, dropout: 0.1, training: TrainingMode::new() };
/// # net.forward(&Tensor::zeros([2, 1, 4, 8], DType::F32, &device)?)?;
/// net.eval();
/// assert!(!net.training.is_on());
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug)]
pub struct TrainingMode(pub(super) AtomicBool);

impl TrainingMode {
    /// Creates the mode of a module in training, in which modules start.
    #[must_use]
    pub fn new() -> Self {
        Self(AtomicBool::new(true))
    }

    /// Reports whether the module is in training. The recomputation of a checkpoint gets the mode of the first run.
    #[must_use]
    pub fn is_on(&self) -> bool {
        autograd::replayable_training_mode(self.0.load(Ordering::Relaxed))
    }
}

impl Default for TrainingMode {
    fn default() -> Self {
        Self::new()
    }
}

impl Module for TrainingMode {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        f(path, ModuleEntry::Training(&self.0));
    }

    fn describe(&self, _name: &str, _parent: &mut ModuleSummary) {}
}

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

//! Dropout as a layer.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Module, ModuleScope};
use crate::error::Result;
use crate::tensor::Tensor;

/// Zeroes elements at random while training; does nothing in evaluation mode.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Dropout {
    /// The probability of a zero.
    pub p: f64,
    training: AtomicBool,
    scope: ModuleScope,
}

impl Dropout {
    /// Zeroes each element with probability `p`.
    #[must_use]
    pub fn new(p: f64) -> Self {
        Self { p, training: AtomicBool::new(true), scope: ModuleScope::new() }
    }

    /// Zeroes some elements of `x` and scales the others up, while training.
    ///
    /// # Errors
    /// `p` is no probability; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.dropout(self.p, self.training.load(Ordering::Relaxed)))
    }
}

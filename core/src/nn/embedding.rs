//! Rows of a table by number.

use super::{Module, ModuleScope, init};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// A table of vectors, looked up by integers.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Embedding {
    /// \[entries, features\].
    pub weight: Tensor,
    scope: ModuleScope,
}

impl Embedding {
    /// A table of normal numbers, as PyTorch.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn new(entries: usize, features: usize, device: &Device) -> Result<Self> {
        let weight = init::parameter(|| Tensor::randn(&[entries, features], DType::F32, device))?;
        Ok(Self { weight, scope: ModuleScope::new() })
    }

    /// A table over a tensor that exists: with other initial numbers, or shared with another layer.
    #[must_use]
    pub fn from_parameter(weight: Tensor) -> Self {
        Self { weight, scope: ModuleScope::new() }
    }

    /// The rows of these numbers: a dimension of features more.
    ///
    /// # Errors
    /// `index` holds no integers; memory runs out.
    #[track_caller]
    pub fn forward(&self, index: &Tensor) -> Result<Tensor> {
        self.scope.run(|| self.weight.embedding(index, None))
    }
}

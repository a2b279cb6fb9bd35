//! Self-attention.

use super::{Dropout, Linear, Module, ModuleScope};
use forebay_core::device::Device;
use forebay_core::error::{Error, Result};
use forebay_core::ops::AttentionOptions;
use forebay_core::tensor::Tensor;

/// Attention of a sequence to itself over several heads, as in GPT-2: one projection to queries, keys and values, one
/// back.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct SelfAttention {
    /// \[features\] to queries, keys and values side by side, \[3 · features\].
    pub qkv: Linear,
    /// The heads' results to the output.
    pub proj: Linear,
    /// Applied to the output.
    pub dropout: Dropout,
    heads: usize,
    causal: bool,
    scope: ModuleScope,
}

impl SelfAttention {
    /// Each position attends to all.
    ///
    /// # Errors
    /// The features do not divide by the heads; memory runs out.
    #[track_caller]
    pub fn new(features: usize, heads: usize, device: &Device) -> Result<Self> {
        if heads == 0 || !features.is_multiple_of(heads) {
            return Err(Error::argument(
                "SelfAttention",
                format!("{features} features do not divide by {heads} heads"),
            ));
        }
        Ok(Self {
            qkv: Linear::new(features, features.saturating_mul(3), device)?,
            proj: Linear::new(features, features, device)?,
            dropout: Dropout::new(0.0),
            heads,
            causal: false,
            scope: ModuleScope::new(),
        })
    }

    /// Each position attends to itself and those before it.
    #[must_use]
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Drops elements of the output while training.
    #[must_use]
    pub fn with_dropout(mut self, p: f64) -> Self {
        self.dropout.p = p;
        self
    }

    /// \[batch, length, features\] to the same.
    ///
    /// # Errors
    /// `x` has another shape; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            if x.rank() != 3 {
                return Err(Error::shape("SelfAttention", "takes [batch, length, features]", &[x.shape()]));
            }
            let options = AttentionOptions { is_causal: self.causal, ..AttentionOptions::default() };
            let out = self.qkv.forward(x)?.qkv_attention(self.heads, self.heads, &options)?;
            self.dropout.forward(&self.proj.forward(&out)?)
        })
    }
}

//! Self-attention.

use super::{Dropout, Linear, Module, ModuleScope};
use crate::{Device, Result, Tensor, fail_if};
use forebay_core::ops::AttentionOptions;

/// Multi-head self-attention as in GPT-2: a projection to queries, keys and values, and one of the output.
#[derive(Module)]
#[module(debug)]
pub struct SelfAttention {
    /// Projection from \[features\] to queries, keys and values, concatenated: \[3 · features\].
    pub qkv: Linear,
    /// Output projection of the concatenated heads.
    pub proj: Linear,
    /// Dropout of the output.
    pub dropout: Dropout,
    heads: usize,
    causal: bool,
    scope: ModuleScope,
}

impl SelfAttention {
    /// Creates attention in which each position attends to all positions. `heads` divides `features`.
    #[track_caller]
    pub fn new(features: usize, heads: usize, device: &Device) -> Result<Self> {
        fail_if!(heads == 0 || !features.is_multiple_of(heads);
            argument("SelfAttention"), "{features} features do not divide by {heads} heads");
        Ok(Self {
            qkv: Linear::new(features, features.saturating_mul(3), device)?,
            proj: Linear::new(features, features, device)?,
            dropout: Dropout::new(0.0),
            heads,
            causal: false,
            scope: ModuleScope::new(),
        })
    }

    setters! {
        /// Makes each position attend only to itself and to earlier positions.
        fn causal() { causal: true }
        /// Sets the dropout probability of the output.
        fn with_dropout(p: f64) { dropout.p: p }
    }

    /// Computes attention: \[batch, length, features\] to the same shape.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            fail_if!(x.rank() != 3; shape("SelfAttention", [x]), "takes [batch, length, features]");
            let options = AttentionOptions { is_causal: self.causal, ..AttentionOptions::default() };
            let out = self.qkv.forward(x)?.qkv_attention(self.heads, self.heads, &options)?;
            self.dropout.forward(&self.proj.forward(&out)?)
        })
    }
}

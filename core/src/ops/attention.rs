//! Attention, composed of two products and a softmax.

use crate::amp::recast;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::Tensor;

impl Tensor {
    /// softmax(scale · q kᵀ + mask) · v, with `self` as q: \[.., queries, features\], keys \[.., keys, features\] and
    /// values \[.., keys, out\], whose batch dimensions broadcast.
    ///
    /// A bool mask lets through where it is true, a float mask is added; `is_causal` lets query i see keys up to i.
    /// `scale` is 1/√features if it is not given. `dropout_p` drops weights always, as in PyTorch: give 0 for inference.
    ///
    /// The weights are held in memory, \[.., queries, keys\], and kept for the gradient.
    ///
    /// # Errors
    /// The shapes do not fit or the types differ; a mask stands beside `is_causal`; memory runs out.
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        keys: &Tensor,
        values: &Tensor,
        attn_mask: Option<&Tensor>,
        dropout_p: f64,
        is_causal: bool,
        scale: Option<f64>,
    ) -> Result<Tensor> {
        const OP: &str = "scaled_dot_product_attention";
        recast!(OP, [self, keys, values, attn_mask], |q, k, v, mask| {
            q.scaled_dot_product_attention(&k, &v, mask.as_ref(), dropout_p, is_causal, scale)
        });
        let _op = memory::scope::op(OP);
        if self.rank() < 2 || keys.rank() < 2 || values.rank() < 2 {
            return Err(Error::shape(
                OP,
                "takes q, k and v of at least two dimensions",
                &[self.shape(), keys.shape(), values.shape()],
            ));
        }
        if is_causal && attn_mask.is_some() {
            return Err(Error::argument(OP, "takes a mask or `is_causal`, not both"));
        }
        let features = self.shape()[self.rank() - 1];
        let scale = scale.unwrap_or_else(|| 1.0 / (features.max(1) as f64).sqrt());
        // The queries are fewer numbers than the weights.
        let mut weights = self.mul(scale)?.matmul(&keys.transpose(-2, -1)?)?;
        let causal = if is_causal {
            let rank = weights.rank();
            let seen = &weights.shape()[rank - 2..];
            Some(Tensor::ones(seen, DType::F32, self.device())?.tril(0)?.to_dtype(DType::Bool)?)
        } else {
            None
        };
        if let Some(mask) = attn_mask.or(causal.as_ref()) {
            weights = if mask.dtype() == DType::Bool {
                weights.where_(mask, f64::NEG_INFINITY)?
            } else {
                weights.add(mask)?
            };
        }
        let weights = weights.softmax(-1)?;
        let weights = if dropout_p > 0.0 { weights.dropout(dropout_p, true)? } else { weights };
        weights.matmul(values)
    }
}

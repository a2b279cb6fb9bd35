//! Rotary position embeddings.

use crate::ops::kernel::heuristics::{has_vector_lines, supports_vec4};
use crate::ops::prelude::*;

const OP: &str = "rotary_embedding";

/// Contiguous cosines and sines of each position, with the pairing of features.
struct RotaryTables {
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
}

impl RotaryTables {
    /// Rotates every pair of `x`. A `direction` of -1 inverts the rotation for the backward pass.
    fn rotate_pairs(&self, x: &Tensor, direction: f32) -> Result<Tensor> {
        let out = Tensor::empty(x.shape(), x.dtype(), x.device())?;
        let (&features, rows) = x.shape().split_last().unwrap_or((&1, &[]));
        let (&step, steps) = x.strides().split_last().unwrap_or((&1, &[]));
        let [positions, pairs] = [self.cos.shape()[0], self.cos.shape()[1]];
        let (shape, strides) = collapse_dims(rows, &[steps]);
        launch::check_rank(OP, shape.len())?;
        let has_vectors = supports_vec4(x.dtype())
            && self.cos.dtype() == DType::F32
            && [pairs, features].iter().all(|n| n.is_multiple_of(VEC4_WIDTH))
            && has_vector_lines(x.layout().offset(), x.strides(), VEC4_WIDTH)
            && [&self.cos, &self.sin].iter().all(|t| t.layout().offset().is_multiple_of(VEC4_WIDTH));
        // Pairs and features in the units of an invocation.
        let width = if has_vectors { VEC4_WIDTH } else { 1 };
        let spec = kernel_spec! {
            "rotary", dtype: launch::shader_dtype_name(x.dtype(), x.device()),
            table: launch::shader_dtype_name(self.cos.dtype(), x.device()), interleaved: self.interleaved,
            vectors: has_vectors,
        };
        let (pairs, features) = (pairs / width, features / width);
        let units = features - pairs;
        let n = rows.iter().product::<usize>() * units;
        let params = kernel_params! {
            n, rank: shape.len(), positions, pairs, units, features, x_offset: x.layout().offset(),
            x_step: step, cos_offset: self.cos.layout().offset(), sin_offset: self.sin.layout().offset(),
            direction, shape: &shape, strides: &strides[0],
        };
        launch::launch(&spec, &[x, &self.cos, &self.sin, &out], params, n.div_ceil(WORKGROUP_SIZE))?;
        Ok(out)
    }
}

impl Tensor {
    /// Rotates each pair of features (a, b) by the angle of its position, in one kernel: (a cos - b sin, b
    /// cos + a sin) (Su et al., 2021). `self` is \[.., positions, features\]. `cos` and `sin` are
    /// \[positions, pairs\], for the first 2 · pairs features; later features are unchanged. Feature k pairs
    /// with k + pairs (Llama, GPT-NeoX), or with its neighbour if `interleaved` (GPT-J). The gradient is the
    /// inverse rotation. `RotaryEmbedding` stores the tables.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let q = Tensor::zeros(&[2, 4, 10, 64], DType::F32, &device)?;
    /// let angles = Tensor::zeros(&[10, 32], DType::F32, &device)?;
    /// assert_eq!(q.rotary_embedding(&angles.cos()?, &angles.sin()?, false)?.shape(), q.shape());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The shapes do not fit, a type is not a float, or the tables require a gradient.
    #[track_caller]
    pub fn rotary_embedding(&self, cos: &Tensor, sin: &Tensor, interleaved: bool) -> Result<Tensor> {
        operation!(OP);
        for table in [cos, sin] {
            self.check_same_device(OP, table)?;
        }
        let shapes = || [self.shape(), cos.shape(), sin.shape()];
        let &[ref outer @ .., positions, features] = self.shape() else {
            fail!(shape(OP, &shapes()), "takes [.., positions, features]")
        };
        let fits = |&pairs: &usize| {
            cos.shape() == [positions, pairs] && sin.shape() == cos.shape() && 2 * pairs <= features
        };
        fail_if!(!cos.shape().last().is_some_and(fits);
            shape(OP, &shapes()), "takes tables of [{positions}, pairs] with at most {} pairs", features / 2);
        fail_if!(!self.dtype().is_float(); dtype(OP, self.dtype()), "takes floats; cast with `to_dtype`");
        for t in [cos, sin] {
            fail_if!(!matches!(t.dtype(), DType::F32 | DType::F64);
                dtype(OP, t.dtype()), "angles need the precision of f32; cast the tables");
        }
        fail_if!(cos.dtype() != sin.dtype();
            dtype(OP, sin.dtype()), "the cosines are {}; cast one", cos.dtype());
        launch::check_device_dtype(OP, self.dtype(), self.device())?;
        autograd::check_no_grad_inputs(OP, &[cos, sin])?;
        if outer.contains(&0) || positions * features == 0 {
            return Ok(self.clone());
        }
        let (cos, sin) = (cos.detach().contiguous()?, sin.detach().contiguous()?);
        let tables = Arc::new(RotaryTables { cos: cos.clone(), sin: sin.clone(), interleaved });
        let out = tables.rotate_pairs(&self.detach(), 1.0)?;
        let forward_tables = tables.clone();
        let forward = move |x: &Tensor| forward_tables.rotate_pairs(x, 1.0);
        let transpose = move |g: &Tensor| tables.rotate_pairs(g, -1.0);
        Ok(autograd::linear_differentiable_with(OP, out, self, &[&cos, &sin], forward, transpose))
    }
}

//! Fused attention in the style of FlashAttention. Kernels iterate over the keys with a running softmax and
//! recompute the weights in the backward pass, so the weight matrix is never in memory.
//!
//! The operation saves q, k, v, the result and one value for each query. The backend's kernels are tried
//! first, then the crate's; both take the same memory. Other cases (head dimensions above 128, a mask that
//! requires a gradient) are composed of products and a softmax, with the weights in memory.
//!
//! `AttentionRun` launches the kernels of both directions, and `attention_composite` is the composed form. A new
//! option needs both, the fields of the backend's `AttentionCall`, and `attention.wgsl`.

mod kernels;
mod mask_grad;
pub(crate) mod rotary;

use kernels::{AttentionKernel, AttentionPass, AttentionShape, MAX_HEAD_DIM};

use super::norm::check_is_f64;
use super::random::write_philox_state;
use super::reduce::sum_parts;
use crate::amp::AutocastOperand;
use crate::backend::{
    AttentionCall, AttentionDropout, AttentionExtents, AttentionGradients, AttentionMask, AttentionOperand,
    Command, Slice,
};
use crate::ops::kernel::heuristics::has_vector_lines;
use crate::ops::prelude::*;
use crate::runtime::capture::replay_params::{PhiloxState, ReplayCtx};

const OP: &str = "scaled_dot_product_attention";

/// Window size that acts as unbounded, while sums with positions still fit 32 bits.
const UNBOUNDED_WINDOW: usize = 1 << 30;

/// Options of [`Tensor::scaled_dot_product_attention`]. The defaults are PyTorch's.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::AttentionOptions, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let q = Tensor::zeros(&[2, 8, 100, 64], DType::F32, &device)?;
/// let kv = Tensor::zeros(&[2, 2, 100, 64], DType::F32, &device)?;
/// let options = AttentionOptions { is_causal: true, enable_gqa: true, ..AttentionOptions::default() };
/// assert_eq!(q.scaled_dot_product_attention(&kv, &kv, &options)?.shape(), q.shape());
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions<'a> {
    /// Mask that broadcasts to \[.., queries, keys\]: true in a bool mask admits a key, floats add to the
    /// scores.
    pub attn_mask: Option<&'a Tensor>,
    /// Dropout probability p of the weights, rounded to a multiple of 2⁻¹⁶ that is 1 only for 1. The kept
    /// weights are scaled by 1 / (1 - p). As in PyTorch, dropout always applies: pass 0 for inference.
    pub dropout_p: f64,
    /// If true, query i attends to keys up to i. Positions count from the first key, as in PyTorch. Several queries
    /// after cached keys need a mask instead.
    pub is_causal: bool,
    /// Factor of the scores. The default is 1/√features.
    pub scale: Option<f64>,
    /// Allows k and v to have fewer heads (third dimension from the end), each for a group of adjacent q
    /// heads.
    pub enable_gqa: bool,
    /// Sliding window: query i attends to keys from i - `window[0]` to i + `window[1]`.
    pub window: Option<[usize; 2]>,
}

impl AttentionOptions<'_> {
    /// Returns the number of keys before and after its own position that a query attends to.
    fn window_sides(&self) -> [usize; 2] {
        let [left, right] = self.window.unwrap_or([UNBOUNDED_WINDOW; 2]);
        [left.min(UNBOUNDED_WINDOW), if self.is_causal { 0 } else { right.min(UNBOUNDED_WINDOW) }]
    }

    fn scale_or_default(&self, features: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (features.max(1) as f64).sqrt())
    }

    fn check_inputs(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        for t in [k, v].into_iter().chain(self.attn_mask) {
            t.check_same_device(OP, q)?;
        }
        let shapes = [q.shape(), k.shape(), v.shape()];
        let (min_rank, dims) =
            if self.enable_gqa { (3, "three dimensions with `enable_gqa`") } else { (2, "two dimensions") };
        fail_if!(shapes.iter().any(|shape| shape.len() < min_rank);
            shape(OP, &shapes), "takes q, k and v of at least {dims}");
        if let Some(other) = [k, v].into_iter().find(|t| t.dtype() != q.dtype()) {
            fail!(dtype(OP, other.dtype()), "q is {}; cast one with `to_dtype`", q.dtype());
        }
        // f64 has no kernel and uses products and a softmax.
        check_is_f64(OP, q)?;
        let end = |t: &Tensor, n: usize| t.shape()[t.rank() - n];
        fail_if!(end(q, 1) != end(k, 1) || end(k, 2) != end(v, 2); shape(OP, &shapes),
            "takes q [.., queries, features], k [.., keys, features] and v [.., keys, out]");
        if self.enable_gqa {
            let (heads, shared) = (end(q, 3), end(k, 3));
            fail_if!(shared != end(v, 3) || shared == 0 || !heads.is_multiple_of(shared);
                shape(OP, &shapes), "the heads of k and v are equal, and divide those of q");
        }
        let heads = |t: &Tensor| if t.rank() > 2 { end(t, 3) } else { 1 };
        let (q_heads, shared) = (heads(q), heads(k));
        if !self.enable_gqa && q_heads != shared && q_heads != 1 && shared != 1 {
            let advice = if q_heads.is_multiple_of(shared.max(1)) {
                "for each head of k and v to serve several of q, set `enable_gqa`"
            } else {
                "they are as many, or with `enable_gqa` those of k divide those of q"
            };
            fail!(shape(OP, &shapes), "q has {q_heads} heads, and k has {shared}; {advice}")
        }
        fail_if!(self.is_causal && self.attn_mask.is_some();
            argument(OP), "takes a mask or `is_causal`, not both");
        self.check_mask(q, end(q, 2), end(k, 2))?;
        fail_if!(!(0.0..=1.0).contains(&self.dropout_p);
            argument(OP), "dropout_p {} is not a probability", self.dropout_p);
        Ok(())
    }

    /// Fails for a mask of another type than bool or a float, or that does not broadcast to \[.., queries, keys\].
    /// Integers are often 1 for visible keys, which would be added to the scores.
    fn check_mask(&self, q: &Tensor, queries: usize, keys: usize) -> Result<()> {
        let Some(mask) = self.attn_mask else { return Ok(()) };
        let dtype = mask.dtype();
        let is_mask =
            matches!(dtype, DType::Bool | DType::F32 | DType::F16 | DType::BF16) || dtype == q.dtype();
        fail_if!(!is_mask; dtype(OP, dtype),
            "a mask is bool (true admits a key), f32 (added to the scores), 16-bit or of the type of q; \
             compare integers with `ne(0)`");
        let is_broadcast = mask.shape().iter().rev().zip([keys, queries]).all(|(&n, all)| n == 1 || n == all);
        fail_if!(!is_broadcast; shape(OP, [mask]),
            "the mask does not broadcast to [.., {queries}, {keys}] for {queries} queries and {keys} keys");
        Ok(())
    }

    /// Reports whether the mask broadcasts to the scores of this shape, so that it adds no batch dimensions.
    fn mask_fits(&self, scores: &[usize]) -> Result<bool> {
        let Some(mask) = self.attn_mask else { return Ok(true) };
        Ok(broadcast_shapes(OP, &[scores, mask.shape()])?[..] == *scores)
    }

    /// Returns the mask if it requires a gradient.
    fn learned_mask(&self) -> Option<&Tensor> {
        self.attn_mask.filter(|mask| autograd::compute_requires_grad(&[mask]))
    }

    fn has_fused_kernel(&self, q: &Tensor, v: &Tensor) -> bool {
        let kernel = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        let row = |t: &Tensor| (1..=MAX_HEAD_DIM).contains(&t.shape()[t.rank() - 1]);
        let positions = |t: &Tensor| (1..UNBOUNDED_WINDOW).contains(&t.shape()[t.rank() - 2]);
        [q, v].iter().all(|t| kernel(t.dtype()) && row(t) && positions(t))
            && self.dropout_p < 1.0
            && self.attn_mask.is_none_or(|m| m.dtype() == DType::Bool || kernel(m.dtype()))
            // The kernel of the mask's gradient has no dropout and no window.
            && (self.learned_mask().is_none() || self.dropout_p == 0.0 && self.window.is_none())
    }
}

impl Tensor {
    /// Computes softmax(scale · q kᵀ + mask) · v, with `self` as q. Shapes are q \[.., queries, features\],
    /// key \[.., keys, features\] and value \[.., keys, out\], whose batch dimensions broadcast. A query
    /// without keys gets zeros, as in PyTorch.
    ///
    /// For head dimensions up to 128 the weights are never in memory. Exceptions are a float mask that requires a
    /// gradient, with dropout or a window, and a mask that adds batch dimensions. The result has the memory layout
    /// of q, including interleaved heads.
    ///
    /// # Errors
    /// The shapes do not fit, the types differ, the mask has integers, or both a mask and `is_causal` are set.
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        key: &Tensor,
        value: &Tensor,
        options: &AttentionOptions<'_>,
    ) -> Result<Tensor> {
        let mask = options.attn_mask;
        dispatch_autocast!(OP, [self, key, value, mask], |q, k, v, mask| {
            q.scaled_dot_product_attention(&k, &v, &AttentionOptions { attn_mask: mask.as_ref(), ..*options })
        });
        let _op = memory::scope::enter_op(OP);
        options.check_inputs(self, key, value)?;
        let inner_rank = 2 + usize::from(options.enable_gqa);
        let outer = |t: &Tensor| -> Dims { t.shape()[..t.rank() - inner_rank].into() };
        let batch = broadcast_shapes(OP, &[&outer(self), &outer(key), &outer(value)])?;
        let queries = &self.shape()[self.rank() - inner_rank..self.rank() - 1];
        let keys = key.shape()[key.rank() - 2];
        let scores: Dims = batch.iter().chain(queries).copied().chain([keys]).collect();
        if !options.has_fused_kernel(self, value) || numel(&batch) == 0 || !options.mask_fits(&scores)? {
            return attention_composite(self, key, value, options, None);
        }
        let broadcast_4d = |t: &Tensor| {
            let tail = &t.shape()[t.rank() - inner_rank..];
            let shape: Dims = batch.iter().chain(tail).copied().collect();
            reshape_to_4d(&t.broadcast_to(&shape)?)
        };
        let rows = |t: &Tensor| with_contiguous_rows(&broadcast_4d(t)?);
        let (q, k, v) = (rows(self)?, rows(key)?, rows(value)?);
        let mask = options.attn_mask.map(|mask| reshape_to_4d(&mask.broadcast_to(&scores)?));
        let lead = Dims::from_slice(&scores[..scores.len() - 2]);
        let (mut shape, features) = (scores, v.shape()[3]);
        shape.pop();
        shape.push(features);
        let out = empty_rows_like(&q, features)?;
        let learned_mask = options.learned_mask();
        let requires_grad = learned_mask.is_some() || autograd::compute_requires_grad(&[&q, &k, &v]);
        let inputs = [q.detach(), k.detach(), v.detach()];
        let run = AttentionRun::new(inputs, mask.transpose()?, options, out, requires_grad)?;
        let result = run.out.reshape(&shape[..])?;
        if !requires_grad {
            return Ok(result);
        }
        let recompute = composite_recompute_fn(options, &run);
        if let Some(mask) = learned_mask {
            return Ok(run.attach_with_mask(result, [&q, &k, &v], mask, lead, recompute));
        }
        let composed = move |t: &[Tensor]| recompute(&t[0], &t[1], &t[2], t.get(3))?.reshape(&shape[..]);
        attach_backward(result, &[&q, &k, &v], run, composed, move |run, g| {
            let [q, k, v] = &run.inputs;
            let dq = empty_rows_like(q, q.shape()[3])?;
            let [dk, dv] = empty_pair_like(k, v)?;
            run.backward(&g.reshape(run.out.shape())?, [&dq, &dk, &dv], None)?;
            Ok(smallvec![Some(dq), Some(dk), Some(dv)])
        })
    }

    /// Computes self-attention of each sequence from one projection. The input is \[batch, length, (heads + 2
    /// · kv_heads) · features\], with the queries, then the keys, then the values of each position. The
    /// result is \[batch, length, heads · features\]. The gradient is one tensor too.
    ///
    /// # Errors
    /// The last extent is not divisible by the number of heads. See also
    /// [`scaled_dot_product_attention`](Self::scaled_dot_product_attention).
    #[track_caller]
    pub fn qkv_attention(
        &self,
        heads: usize,
        kv_heads: usize,
        options: &AttentionOptions<'_>,
    ) -> Result<Tensor> {
        let mask = options.attn_mask;
        operation!(OP, autocast [self, mask], |qkv, mask|
            qkv.qkv_attention(heads, kv_heads, &AttentionOptions { attn_mask: mask.as_ref(), ..*options }));
        let all = heads.saturating_add(kv_heads.saturating_mul(2));
        let &[batch, length, width] = self.shape() else {
            fail!(shape(OP, [self]), "takes [batch, length, queries, keys and values]")
        };
        fail_if!(heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || !width.is_multiple_of(all);
            argument(OP),
            "{width} elements are not {heads} heads of queries and {kv_heads} each of keys and values");
        let features = width / all;
        // Shape of each part: [batch, heads, length, features].
        let parts = move |t: &Tensor| -> Result<[Tensor; 3]> {
            let t = t.reshape([batch, length, all, features])?.transpose(1, 2)?;
            let part = |start, count| t.narrow(1, start, count);
            Ok([part(0, heads)?, part(heads, kv_heads)?, part(heads + kv_heads, kv_heads)?])
        };
        let options = AttentionOptions { enable_gqa: heads != kv_heads, ..*options };
        let inputs = parts(&self.detach())?;
        let [q, k, v] = &inputs;
        options.check_inputs(q, k, v)?;
        let full = [batch, heads, length, length];
        fail_if!(!options.mask_fits(&full)?;
            argument(OP), "the mask has more than the {batch} sequences or the {heads} heads of the input");
        let join_heads = move |t: &Tensor| t.transpose(1, 2)?.reshape([batch, length, heads * features]);
        if !options.has_fused_kernel(q, v) || options.learned_mask().is_some() || self.numel() == 0 {
            let [q, k, v] = parts(self)?;
            return join_heads(&q.scaled_dot_product_attention(&k, &v, &options)?);
        }
        let mask = options.attn_mask.map(|mask| mask.broadcast_to(full)).transpose()?;
        let out = Tensor::empty([batch, length, heads, features], self.dtype(), self.device())?;
        let requires_grad = autograd::compute_requires_grad(&[self]);
        let run = AttentionRun::new(inputs, mask, &options, out.transpose(1, 2)?, requires_grad)?;
        let result = join_heads(&run.out)?;
        let recompute = composite_recompute_fn(&options, &run);
        let composed = move |t: &[Tensor]| {
            let [q, k, v] = parts(&t[0])?;
            join_heads(&recompute(&q, &k, &v, t.get(1))?)
        };
        attach_backward(result, &[self], run, composed, move |run, g| {
            let g = g.reshape([batch, length, heads, features])?.transpose(1, 2)?;
            let grad = Tensor::empty([batch, length, width], g.dtype(), g.device())?;
            let [dq, dk, dv] = parts(&grad)?;
            // Column sums for the projection's bias. Only backends with a matmul library may compute them.
            let rows = length.div_ceil(AttentionGradients::ROWS_PER_SUM as usize);
            let sums_columns = g.device().library_features().matmul && g.dtype().size() == 2;
            let partial = || empty_workspace(&[batch * rows, 1, width], DType::F32, g.device());
            let partial = sums_columns.then(partial).transpose()?;
            let has_sums = run.backward(&g, [&dq, &dk, &dv], partial.as_ref())?;
            let Some(partial) = partial.filter(|_| has_sums) else { return Ok(smallvec![Some(grad)]) };
            // One section gives one tensor.
            let sums = sum_parts(&partial)?.remove(0);
            Ok(smallvec![Some(grad.with_grad_extras(None, Some(sums)))])
        })
    }
}

/// Returns a function that recomputes attention of q, k, v and a mask for second-order gradients. The weights
/// are in memory, and dropout repeats the same draws.
fn composite_recompute_fn(
    options: &AttentionOptions<'_>,
    run: &AttentionRun,
) -> impl Fn(&Tensor, &Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor> + Send + Sync + 'static {
    let &AttentionOptions { attn_mask: _, dropout_p, is_causal, scale, enable_gqa, window } = options;
    let dropped = run.dropout.clone();
    move |q, k, v, attn_mask| {
        let options = AttentionOptions { attn_mask, dropout_p, is_causal, scale, enable_gqa, window };
        attention_composite(q, k, v, &options, dropped.as_ref())
    }
}

/// Records attention in the autograd graph. Saves the inputs, the mask and the result.
fn attach_backward(
    out: Tensor,
    inputs: &[&Tensor],
    run: AttentionRun,
    composed: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    backward: impl Fn(&AttentionRun, &Tensor) -> Result<InputGrads> + Send + Sync + 'static,
) -> Result<Tensor> {
    let saved: SmallVec<[SavedTensor; 4]> =
        inputs.iter().copied().chain(&run.mask).map(SavedTensor::input).collect();
    let result = SavedTensor::output(&run.out);
    Ok(autograd::composite_differentiable(OP, out, inputs, saved, composed, move |g, ctx| {
        result.unpack(ctx)?;
        backward(&run, g)
    }))
}

fn reshape_to_4d(t: &Tensor) -> Result<Tensor> {
    let &[ref batch @ .., rows, elements] = t.shape() else { return Ok(t.clone()) };
    let (&heads, outer) = batch.split_last().unwrap_or((&1, &[]));
    t.reshape([numel(outer), heads, rows, elements])
}

/// Copies a tensor whose rows are not contiguous: every kernel reads such rows much more slowly.
fn with_contiguous_rows(t: &Tensor) -> Result<Tensor> {
    if t.strides()[3] == 1 || t.shape()[3] == 1 { Ok(t.clone()) } else { t.contiguous() }
}

/// Returns true if the heads of a position are adjacent in memory.
fn has_interleaved_heads(t: &Tensor) -> bool {
    t.shape()[1] > 1 && t.strides()[1] < t.strides()[2]
}

/// Returns the memory shape of `of` with rows of `width` elements, with its order of heads and rows.
fn memory_shape_like(of: &Tensor, width: usize) -> [usize; 4] {
    let &[batch, heads, rows, ..] = of.shape() else { return [0; 4] };
    if has_interleaved_heads(of) { [batch, rows, heads, width] } else { [batch, heads, rows, width] }
}

fn empty_rows_like(of: &Tensor, width: usize) -> Result<Tensor> {
    let t = Tensor::empty(memory_shape_like(of, width), of.dtype(), of.device())?;
    if has_interleaved_heads(of) { t.transpose(1, 2) } else { Ok(t) }
}

/// Allocates two tensors shaped as `a` and `b` in one storage, which a kernel binds once.
fn empty_pair_like(a: &Tensor, b: &Tensor) -> Result<[Tensor; 2]> {
    let both = Tensor::empty([a.numel() + b.numel()], a.dtype(), a.device())?;
    let part = |of: &Tensor, start| -> Result<Tensor> {
        let t = both.narrow(0, start, of.numel())?.view(memory_shape_like(of, of.shape()[3]))?;
        if has_interleaved_heads(of) { t.transpose(1, 2) } else { Ok(t) }
    };
    Ok([part(a, 0)?, part(b, a.numel())?])
}

/// Attention call with all that its gradients need. Tensors are [batch, heads, rows, elements].
struct AttentionRun {
    inputs: [Tensor; 3],
    mask: Option<Tensor>,
    out: Tensor,
    lse: Tensor,
    window_sides: [usize; 2],
    scale: f32,
    dropout: Option<AttentionDropoutState>,
    needs_grad: bool,
}

/// Backward operands: gradient of the result, gradients of q, k and v, shared workspace, and column sums.
type BackwardTensors<'a> = (&'a Tensor, &'a [&'a Tensor; 3], &'a Tensor, Option<&'a Tensor>);

#[derive(Clone)]
struct AttentionDropoutState {
    philox_state: PhiloxState,
    /// Philox state in device memory, for the backend's kernels.
    philox_buffer: Option<Tensor>,
    /// Threshold of a weight's 16 random bits, below which the weight is dropped.
    threshold: u32,
    keep_scale: f32,
}

impl AttentionDropoutState {
    /// Draws the state for a probability below 1. If `words` is true, also writes the state to device memory.
    fn new(p: f64, words: bool, device: &Device) -> Result<Self> {
        let philox_state = device.draw_random(1);
        let words = words.then(|| write_philox_state(philox_state, device)).transpose()?;
        const OUTCOMES: f64 = 65_536.0;
        let threshold = (p * OUTCOMES).round().min(OUTCOMES - 1.0);
        // The inverse of the probability of 16 bits, not of 1 - p, so that the mean is exact for every p.
        let keep_scale = (OUTCOMES / (OUTCOMES - threshold)) as f32;
        Ok(Self { philox_state, philox_buffer: words, threshold: threshold as u32, keep_scale })
    }

    /// Applies the kernels' dropout mask to weights \[.., queries, keys\].
    fn apply(&self, weights: &Tensor) -> Result<Tensor> {
        let (n, keys) = (weights.numel(), weights.shape()[weights.rank() - 1]);
        if n == 0 {
            return Ok(weights.clone());
        }
        let dropped_weights = Tensor::empty(weights.shape(), DType::F32, weights.device())?;
        let &Self { philox_state: drawn, threshold, keep_scale, .. } = self;
        let params = move |replay: &ReplayCtx| {
            let (offset, seed) = drawn.offset_and_seed(replay);
            kernel_params! { n, keys, threshold, dropout_scale: 1.0f32, offset, seed }
        };
        let spec = KernelSpec::new("attention_dropout_mask");
        launch::launch_dynamic(&spec, &[&dropped_weights], params, n.div_ceil(WORKGROUP_SIZE))?;
        weights.mul(&dropped_weights.to_dtype(weights.dtype())?)?.mul(keep_scale)
    }
}

impl AttentionRun {
    fn new(
        inputs: [Tensor; 3],
        mask: Option<Tensor>,
        options: &AttentionOptions<'_>,
        out: Tensor,
        needs_grad: bool,
    ) -> Result<Self> {
        let (q, p) = (&inputs[0], options.dropout_p);
        let drop = || AttentionDropoutState::new(p, q.dtype().size() == 2, q.device());
        let run = Self {
            lse: Tensor::empty(&out.shape()[..3], DType::F32, q.device())?,
            mask: mask.map(|mask| mask.detach()),
            window_sides: options.window_sides(),
            scale: options.scale_or_default(q.shape()[3]) as f32,
            dropout: (p > 0.0).then(drop).transpose()?,
            inputs,
            out,
            needs_grad,
        };
        if !run.try_vendor_library(None)? {
            run.run_kernel(AttentionPass::Forward, None, &[&run.out, &run.lse], [&run.out, &run.out])?;
        }
        Ok(run)
    }

    /// Writes the gradients of q, k and v; those of k and v share a storage. Returns true if `sums` was
    /// requested and written too: see [`AttentionGradients::sums`].
    fn backward(&self, g: &Tensor, grads: [&Tensor; 3], sums: Option<&Tensor>) -> Result<bool> {
        let g = &with_contiguous_rows(g)?;
        let stats = empty_workspace(&[self.backward_scratch()], DType::F32, g.device())?;
        if self.try_vendor_library(Some((g, &grads, &stats, sums)))? {
            return Ok(sums.is_some());
        }
        self.write_stats(g, &stats)?;
        let [dq, dk, dv] = grads;
        self.run_kernel(AttentionPass::Queries, Some(g), &[g, &stats, dq], [dq, dq])?;
        self.run_kernel(AttentionPass::Keys, Some(g), &[g, &stats, dk], [dk, dv])?;
        Ok(false)
    }

    /// Returns the elements of the workspace of [`backward`](Self::backward): two values for each query, or more
    /// for the backend's kernels.
    fn backward_scratch(&self) -> usize {
        let [q, k, v] = &self.inputs;
        let &[batch, heads, queries, head_dim] = q.shape() else { return 0 };
        let extents = AttentionExtents {
            batch: batch as u64,
            heads: [heads as u64, k.shape()[1] as u64],
            queries: queries as u64,
            keys: k.shape()[2] as u64,
            head_dim: head_dim as u64,
            window: self.window_sides.map(|side| side as u64),
        };
        let one_pass = q.dtype().size() == 2
            && v.shape()[3] == head_dim
            && self.mask.is_none()
            && self.dropout.is_none()
            && q.device().library_features().one_pass_attention;
        let bytes = one_pass.then(|| extents.one_pass_scratch()).flatten().unwrap_or(0) as usize;
        (2 * self.lse.numel()).max(bytes / DType::F32.size())
    }

    /// Writes the log-sum-exp of each query to `stats`, and after all of these its sum of g · out.
    fn write_stats(&self, g: &Tensor, stats: &Tensor) -> Result<()> {
        let lines = self.lse.numel();
        let name = launch::shader_dtype_name(g.dtype(), g.device());
        let spec = kernel_spec! { "attention_delta", dtype: name, value: g.shape()[3] };
        let params = kernel_params! {
            extents: [g.shape()[0], g.shape()[1], g.shape()[2]],
            offsets: [g.layout().offset(), self.out.layout().offset(), 0], g: four_strides(Some(g)),
            out: four_strides(Some(&self.out)),
        };
        launch::launch(&spec, &[g, &self.out, &self.lse, stats], params, lines.div_ceil(32))
    }

    /// Runs the backend's kernels, or returns false if they do not support the call.
    fn try_vendor_library(&self, backward: Option<BackwardTensors<'_>>) -> Result<bool> {
        let [q, k, v] = &self.inputs;
        let rows = |t: &&Tensor| t.strides()[3] == 1 || t.shape()[3] == 1;
        let gradients: SmallVec<[&Tensor; 4]> = backward
            .iter()
            .flat_map(|&(g, grads, ..)| [g].into_iter().chain(grads.iter().copied()))
            .collect();
        if q.shape()[3] != v.shape()[3] || ![q, k, v, &self.out].iter().chain(&gradients).all(rows) {
            return Ok(false);
        }
        let forward = if backward.is_some() { Access::Read } else { Access::Write };
        let mut accesses: SmallVec<[(&Tensor, Access); 13]> = smallvec![
            (q, Access::Read),
            (k, Access::Read),
            (v, Access::Read),
            (&self.out, forward),
            (&self.lse, forward),
        ];
        if let Some((g, grads, scratch, sums)) = backward {
            accesses.push((g, Access::Read));
            accesses.extend(grads.iter().map(|&t| (t, Access::Write)));
            accesses.extend([scratch].into_iter().chain(sums).map(|t| (t, Access::Write)));
        }
        let philox_buffer = self.dropout.as_ref().and_then(|drop| drop.philox_buffer.as_ref());
        if self.dropout.is_some() && philox_buffer.is_none() {
            return Ok(false);
        }
        let extra = accesses.len();
        accesses.extend(self.mask.iter().chain(philox_buffer).map(|t| (t, Access::Read)));
        let bound = launch::bind_tensors(accesses.iter().copied())?;
        let operand = |at: usize| {
            let (slice, t): (Slice, &Tensor) = (bound[at], accesses[at].0);
            let [batch_stride, head_stride, row_stride] = [0, 1, 2].map(|d| t.strides()[d] as u64);
            let offset = slice.offset + (t.layout().offset() * t.dtype().size()) as u64;
            AttentionOperand { segment: slice.segment, offset, batch_stride, head_stride, row_stride }
        };
        let call = AttentionCall {
            dtype: q.dtype(),
            batch: q.shape()[0] as u64,
            heads: q.shape()[1] as u64,
            kv_heads: k.shape()[1] as u64,
            queries: q.shape()[2] as u64,
            keys: k.shape()[2] as u64,
            head_dim: q.shape()[3] as u64,
            window_left: self.window_sides[0] as u64,
            window_right: self.window_sides[1] as u64,
            scale: self.scale,
            q: operand(0),
            k: operand(1),
            v: operand(2),
            out: operand(3),
            lse: bound[4],
            mask: self.mask.as_ref().map(|mask| {
                let Slice { segment, offset, .. } = bound[extra];
                let offset = offset + (mask.layout().offset() * mask.dtype().size()) as u64;
                let strides = [0, 1, 2, 3].map(|d| mask.strides()[d] as u64);
                AttentionMask { dtype: mask.dtype(), segment, offset, strides }
            }),
            dropout: self.dropout.as_ref().map(|drop| AttentionDropout {
                philox_state: bound[extra + usize::from(self.mask.is_some())],
                threshold: drop.threshold,
                keep_scale: drop.keep_scale,
            }),
            requires_grad: self.needs_grad,
            backward: backward.map(|(.., sums)| AttentionGradients {
                out: operand(5),
                q: operand(6),
                k: operand(7),
                v: operand(8),
                scratch: bound[9],
                grad_sums: sums.map(|_| bound[10]),
            }),
        };
        q.device().try_enqueue(|| describe_for_profiler(&call), &Command::Attention(&call))
    }

    fn loop_iterations(&self, pass: AttentionPass, kernel: AttentionKernel) -> usize {
        let [q, k, v] = &self.inputs;
        let [tile_rows, tile_columns] = kernel.tile_extents();
        let ([left, right], queries, keys) = (self.window_sides, q.shape()[2], k.shape()[2]);
        let window_extent = tile_rows + left + right + tile_columns;
        let (columns, heads) = match pass {
            AttentionPass::Keys => {
                (queries.min(window_extent).min(keys + left), q.shape()[1] / k.shape()[1].max(1))
            }
            AttentionPass::Forward | AttentionPass::Queries => {
                (keys.min(window_extent).min(queries + right), 1)
            }
        };
        let tile = kernel.tile_loop_iterations(pass, q.shape()[3], v.shape()[3]);
        // Includes the first loads and the last stores.
        (columns.div_ceil(tile_columns) * tile + 1) * heads + 256
    }

    /// Runs one pass of the crate's kernel. It binds q, k, v, the mask and `others`, which end with
    /// `results`.
    fn run_kernel(
        &self,
        pass: AttentionPass,
        g: Option<&Tensor>,
        others: &[&Tensor],
        results: [&Tensor; 2],
    ) -> Result<()> {
        let [q, k, v] = &self.inputs;
        let device = q.device();
        let name = |t: &Tensor| launch::shader_dtype_name(t.dtype(), device);
        let has_vectors = |t: &Tensor, width: usize| {
            t.shape()[3].is_multiple_of(width) && has_vector_lines(t.layout().offset(), t.strides(), width)
        };
        let packed = results.iter().all(|&t| has_vectors(t, 4));
        let reads = |width: usize| [q, k, v].into_iter().chain(g).all(|t| has_vectors(t, width));
        let has_quads = reads(4);
        let shape = AttentionShape {
            pass,
            dtype: q.dtype(),
            head: q.shape()[3],
            value: v.shape()[3],
            has_quads,
            has_vectors: reads(8),
        };
        let kernel = AttentionKernel::choose(shape, device);
        let spec = kernel_spec! {
            ..KernelSpec::new(kernel.template()); pass, dtype: name(q), head: shape.head, value: shape.value,
            mask: self.mask.as_ref().map_or("", name), dropout: self.dropout.is_some(),
            mode: if packed { "packed" } else { "scattered" },
        };
        let spec = kernel.define(spec, has_quads, device);
        let (rows, heads) = if pass == AttentionPass::Keys { (k, k.shape()[1]) } else { (q, q.shape()[1]) };
        let tiles = rows.shape()[2].div_ceil(kernel.tile_extents()[0]);
        let first = |t: Option<&Tensor>| t.map_or(0, |t| t.layout().offset());
        let mask = self.mask.as_ref();
        let [left, right] = self.window_sides;
        let (dropout_scale, threshold) =
            self.dropout.as_ref().map_or((1.0f32, 0), |drop| (drop.keep_scale, drop.threshold));
        let [out, out_v] = results.map(Some);
        let params = kernel_params! {
            extents: [q.shape()[0], q.shape()[1], k.shape()[1], q.shape()[2]],
            window: [k.shape()[2], left, right, tiles],
        };
        let words = params.len();
        let params = kernel_params! {
            ..params; random: [0u32; 4], in_offsets: [Some(q), Some(k), Some(v), g].map(first),
            out_offsets: [out, out_v, mask].map(first), q: four_strides(Some(q)), k: four_strides(Some(k)),
            v: four_strides(Some(v)), g: four_strides(g), out: four_strides(out), out_v: four_strides(out_v),
            mask: four_strides(mask), scale: self.scale, dropout_scale, threshold,
        };
        let params = params.loop_iterations(self.loop_iterations(pass, kernel));
        // Forward, the result precedes the log-sum-exp; backward, the results come last.
        let tensors = bindings![q, k, v, mask, others];
        let groups = tiles * heads * q.shape()[0];
        let Some(drawn) = self.dropout.as_ref().map(|drop| drop.philox_state) else {
            return launch::launch(&spec, &tensors, params, groups);
        };
        let params = move |replay: &ReplayCtx| params.clone().replace_words(words, drawn.to_words(replay));
        launch::launch_dynamic(&spec, &tensors, params, groups)
    }
}

pub(crate) fn describe_for_profiler(call: &AttentionCall) -> WorkItem {
    let AttentionCall { dtype, batch, heads, queries, keys, head_dim, .. } = call;
    let pass = if call.backward.is_some() { "backward " } else { "" };
    let name = format!("attention {pass}{dtype} {batch}x{heads}x{queries}x{keys}x{head_dim}").into();
    WorkItem { name, bytes: call.bytes(), flops: call.flops() as u64 }
}

/// Returns the strides of a tensor with four dimensions, or zeros.
fn four_strides(t: Option<&Tensor>) -> [usize; 4] {
    std::array::from_fn(|d| t.map_or(0, |t| t.strides()[d]))
}

/// Computes attention by products and a softmax, with weights in memory. `dropped` repeats a dropout.
fn attention_composite(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &AttentionOptions<'_>,
    dropped: Option<&AttentionDropoutState>,
) -> Result<Tensor> {
    // As in PyTorch, compute in f32, because 16-bit scores have large absolute errors.
    if let Some(half) = amp::promoted_half_dtype(&[q.widest_float(), k.widest_float(), v.widest_float()]) {
        let [q, k, v] = [amp::half_to_f32(q)?, amp::half_to_f32(k)?, amp::half_to_f32(v)?];
        let mask = options.attn_mask.map(amp::half_to_f32).transpose()?;
        let options = AttentionOptions { attn_mask: mask.as_ref(), ..*options };
        return attention_composite(&q, &k, &v, &options, dropped)?.to_dtype(half);
    }
    let (k, v) = if options.enable_gqa {
        let times = q.shape()[q.rank() - 3] / k.shape()[k.rank() - 3];
        (&repeat_heads(k, times)?, &repeat_heads(v, times)?)
    } else {
        (k, v)
    };
    // Scale the queries, which are smaller than the weights.
    let mut scores =
        q.mul(options.scale_or_default(q.shape()[q.rank() - 1]))?.matmul(&k.transpose(-2, -1)?)?;
    let mask_shape = &scores.shape()[scores.rank() - 2..];
    let [left, right] = options.window_sides();
    let window = (options.is_causal || options.window.is_some()).then(|| {
        let ones = Tensor::ones(mask_shape, DType::F32, q.device())?;
        ones.tril(right as isize)?.triu(-(left as isize))?.to_dtype(DType::Bool)
    });
    for mask in window.transpose()?.iter().chain(options.attn_mask) {
        scores = if mask.dtype() == DType::Bool {
            scores.where_(mask, f64::NEG_INFINITY)?
        } else {
            scores.add(mask)?
        };
    }
    let masked = (options.attn_mask.is_some() || options.window.is_some()) && scores.numel() > 0;
    let weights = if masked {
        // A query without keys gets zeros instead of NaN.
        let has_no_keys = scores.detach().amax([-1], true)?.eq(f64::NEG_INFINITY)?;
        scores.masked_fill(&has_no_keys, 0.0)?.softmax(-1)?.masked_fill(&has_no_keys, 0.0)?
    } else {
        scores.softmax(-1)?
    };
    let weights = match options.dropout_p {
        0.0 => weights,
        1.0 => weights.dropout(1.0, true)?,
        p => match dropped {
            Some(dropped) => dropped.apply(&weights)?,
            // Draw the same random values as the kernels.
            None => AttentionDropoutState::new(p, false, q.device())?.apply(&weights)?,
        },
    };
    weights.matmul(v)
}

fn repeat_heads(t: &Tensor, times: usize) -> Result<Tensor> {
    if times == 1 {
        return Ok(t.clone());
    }
    let &[ref outer @ .., heads, rows, elements] = t.shape() else { return Ok(t.clone()) };
    let with_middle = |middle: &[usize]| -> Dims { outer.iter().chain(middle).copied().collect() };
    let wide = t.unsqueeze(-3)?.broadcast_to(with_middle(&[heads, times, rows, elements]))?;
    wide.reshape(&with_middle(&[heads * times, rows, elements])[..])
}

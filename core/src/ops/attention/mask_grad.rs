//! Gradients of attention whose float mask requires one, such as a learned bias of relative positions.

use super::{AttentionRun, OP, empty_pair_like, empty_rows_like, four_strides, reshape_to_4d};
use crate::ops::prelude::*;

/// Queries and keys of a workgroup's tile.
const TILE: usize = 32;
/// Number of workgroups to use: several for each multiprocessor of a large GPU.
const TARGET_GROUPS: usize = 2048;

/// Splits the batch entries and heads of a call into masks and their repeats.
struct MaskRepeats {
    /// Leading extents of the masks, with ones for those over which the kernel sums.
    outer: Dims,
    masks: usize,
    mask_heads: usize,
    /// Batch entries that share a mask, and heads that do.
    batch_repeats: usize,
    head_repeats: usize,
}

impl MaskRepeats {
    /// Compares the leading extents of a mask with `lead`, the batch extents of the call and its heads.
    fn new(lead: &[usize], mask: &[usize]) -> Self {
        let mask_lead = &mask[..mask.len().saturating_sub(2)];
        let extent = |d: usize| (d + mask_lead.len()).checked_sub(lead.len()).map_or(1, |at| mask_lead[at]);
        let (heads, depth) = (lead.last().copied().unwrap_or(1), lead.len().saturating_sub(1));
        let mask_heads = if lead.is_empty() { 1 } else { extent(depth) };
        // Batch entries that share a mask are one step apart in units of all masks only if the mask broadcasts along
        // leading dimensions alone. Other masks are summed afterwards.
        let broadcast = (0..depth).take_while(|&d| extent(d) == 1).count();
        let broadcast = if (broadcast..depth).all(|d| extent(d) == lead[d]) { broadcast } else { 0 };
        let outer: Dims = (0..depth).map(|d| if d < broadcast { 1 } else { lead[d] }).collect();
        Self {
            masks: numel(&outer),
            outer,
            mask_heads,
            batch_repeats: lead[..broadcast].iter().product(),
            head_repeats: heads / mask_heads.max(1),
        }
    }
}

impl AttentionRun {
    /// Records a call whose `mask` requires a gradient. `inputs` are q, k and v in four dimensions. `lead` has the
    /// batch extents and heads of the call. `composed` computes the result from q, k, v and a mask in four
    /// dimensions.
    pub(super) fn attach_with_mask(
        self,
        result: Tensor,
        inputs: [&Tensor; 3],
        mask: &Tensor,
        lead: Dims,
        composed: impl Fn(&Tensor, &Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Tensor {
        let [q, k, v] = inputs;
        let inputs = [q, k, v, mask];
        let saved = inputs.into_iter().map(SavedTensor::input).collect();
        let out = SavedTensor::output(&self.out);
        let rows = [q.shape()[2], k.shape()[2]];
        let full: Dims = lead.iter().copied().chain(rows).collect();
        let shape: Dims = result.shape().into();
        let composed = move |t: &[Tensor]| {
            let mask = reshape_to_4d(&t[3].broadcast_to(&full)?)?;
            composed(&t[0], &t[1], &t[2], Some(&mask))?.reshape(&shape[..])
        };
        let (mask_shape, mask_dtype): (Dims, DType) = (mask.shape().into(), mask.dtype());
        autograd::composite_differentiable(OP, result, &inputs, saved, composed, move |g, ctx| {
            out.unpack(ctx)?;
            let g = g.reshape(self.out.shape())?;
            let [q, k, v] = &self.inputs;
            let mut grads: InputGrads = smallvec![None, None, None, None];
            if ctx.needs_input_grad[..3].contains(&true) {
                let dq = empty_rows_like(q, q.shape()[3])?;
                let [dk, dv] = empty_pair_like(k, v)?;
                self.backward(&g, [&dq, &dk, &dv], None)?;
                grads = smallvec![Some(dq), Some(dk), Some(dv), None];
            }
            if ctx.needs_input_grad[3] {
                let grad = self.compute_mask_grad(&g, &lead, &mask_shape)?;
                grads[3] = Some(grad.sum_to_size(&mask_shape)?.to_dtype(mask_dtype)?);
            }
            Ok(grads)
        })
    }

    /// Computes the gradient of the scores in f32, summed over batch entries and heads that share a mask where the
    /// kernel can. Its shape broadcasts the shape of the mask.
    fn compute_mask_grad(&self, g: &Tensor, lead: &[usize], mask_shape: &[usize]) -> Result<Tensor> {
        let ([q, k, v], Some(mask)) = (&self.inputs, &self.mask) else {
            fail!(argument(OP), "has no mask, whose gradient was requested")
        };
        let MaskRepeats { outer, masks, mask_heads, batch_repeats, head_repeats } =
            MaskRepeats::new(lead, mask_shape);
        let (heads, queries, keys) = (q.shape()[1], q.shape()[2], k.shape()[2]);
        let (head, value) = (q.shape()[3], v.shape()[3]);
        let tiles = [queries.div_ceil(TILE), keys.div_ceil(TILE)];
        let groups = masks * mask_heads * tiles[0] * tiles[1];
        let repeats = batch_repeats * head_repeats;
        // Loads, products and ends of loops for 32 elements of a row.
        let per_repeat = (head.div_ceil(32) + value.div_ceil(32)) * 40 + 8;
        let limit = q.device().info().limits.max_loop_iterations as usize;
        let longest = (limit.saturating_sub(64) / per_repeat).max(1);
        let per_part =
            repeats.div_ceil((TARGET_GROUPS / groups.max(1)).clamp(1, repeats.max(1))).min(longest);
        let parts = repeats.div_ceil(per_part);
        let stats = empty_workspace(&[2, self.lse.numel()], DType::F32, g.device())?;
        self.write_stats(g, &stats)?;
        let name = |t: &Tensor| launch::shader_dtype_name(t.dtype(), t.device());
        let spec = kernel_spec! { "attention_mask_grad", dtype: name(q), mask: name(mask), head, value };
        let params = kernel_params! {
            extents: [masks, mask_heads, queries, keys], repeats: [head_repeats, repeats, per_part, parts],
            heads: [heads, k.shape()[1], tiles[0], tiles[1]], offsets: [q, k, v, g].map(|t| t.layout().offset()),
            q: four_strides(Some(q)), k: four_strides(Some(k)), v: four_strides(Some(v)),
            g: four_strides(Some(g)), mask: four_strides(Some(mask)), mask_offset: mask.layout().offset(),
            lines: self.lse.numel(), scale: self.scale,
        };
        let params = params.loop_iterations(per_part * per_repeat + 64);
        let sums = empty_workspace(&[parts, masks, mask_heads, queries, keys], DType::F32, q.device())?;
        launch::launch(&spec, &[q, k, v, g, mask, &stats, &sums], params, groups * parts)?;
        let sum = if parts > 1 { sums.sum([0], false)? } else { sums };
        let shape: Dims = outer.into_iter().chain([mask_heads, queries, keys]).collect();
        sum.reshape(&shape[..])
    }
}

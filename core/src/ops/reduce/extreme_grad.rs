//! Gradients of `amax`, `amin` and of extremes of whole tensors, which equal elements share.

use super::{COUNT, ReduceArgs, ReduceDims, contiguous_zero_offset, reduce};
use crate::ops::kernel::heuristics::{ReduceConfig, supports_vec4};
use crate::ops::prelude::*;

/// Accesses of a thread that stay in registers.
const MAX_REGISTER_STEPS: usize = 8;

/// Rule by which an element equals the extreme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TieRule {
    /// NaN equals nothing, so the gradient of a NaN extreme is NaN.
    Equal,
    /// NaN elements share the gradient of a NaN extreme.
    EqualOrBothNan,
}

impl TieRule {
    fn mask(self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        match self {
            Self::Equal => x.eq(y),
            Self::EqualOrBothNan => x.eq_or_both_nan(y),
        }
    }
}

/// Computes the gradient of x from the extremes `y` and their gradient `g`: equal shares for the ties of each extreme.
pub(super) fn share_among_ties(
    op: &'static str,
    rule: TieRule,
    axes: &ReduceDims,
    [x, y, g]: [&Tensor; 3],
) -> Result<Tensor> {
    // A gradient of this gradient is recorded by the operations that compose it.
    if !g.requires_grad()
        && g.dtype() == x.dtype()
        && let Some(grad) = try_run(op, rule, axes, [x, y, g])?
    {
        return Ok(grad);
    }
    let mask = rule.mask(x, &axes.expand_to_input(y)?)?;
    // 16 bits do not hold the number of ties.
    let wide = if g.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let ties = reduce(&COUNT, &mask, axes, true, DType::U32, wide, ReduceArgs::default())?;
    let share = g.reshape(&axes.keepdim_shape[..])?.to_dtype(wide)?.div(&ties)?.to_dtype(g.dtype())?;
    axes.expand_to_input(&share)?.mul(&mask.to_dtype(g.dtype())?)
}

/// Runs one kernel for adjacent dimensions. Returns `None` for other dimensions, for rows that need several workgroups,
/// and for f64. There, the product of an infinite share and 0 cannot be computed by bits.
fn try_run(
    op: &'static str,
    rule: TieRule,
    axes: &ReduceDims,
    [x, y, g]: [&Tensor; 3],
) -> Result<Option<Tensor>> {
    let Some([outer, extent, inner]) = axes.adjacent_extents() else { return Ok(None) };
    if x.dtype() == DType::F64 || x.numel() == 0 || x.numel() > u32::MAX as usize {
        return Ok(None);
    }
    launch::check_device_dtype(op, x.dtype(), x.device())?;
    let across = inner > 1;
    let neighbours = if across { inner } else { extent };
    let is_vec4 = supports_vec4(x.dtype()) && neighbours.is_multiple_of(VEC4_WIDTH);
    let width = if is_vec4 { VEC4_WIDTH } else { 1 };
    let (steps, inner) = if across { (extent, inner / width) } else { (extent / width, 1) };
    let outputs = outer * inner;
    let config = ReduceConfig::new(outputs, steps, across);
    if config.splits > 1 {
        return Ok(None);
    }
    let [x, y, g] = [contiguous_zero_offset(x)?, contiguous_zero_offset(y)?, contiguous_zero_offset(g)?];
    let out = Tensor::empty(x.shape(), x.dtype(), x.device())?;
    let threads_per_row = config.threads_per_row;
    let iterations = steps.div_ceil(threads_per_row);
    let register_steps = if iterations <= MAX_REGISTER_STEPS { iterations } else { 0 };
    let spec = kernel_spec! {
        "extreme_grad", dtype: launch::shader_dtype_name(x.dtype(), x.device()),
        equal_nan: rule == TieRule::EqualOrBothNan, across, width, threads_per_row, steps: register_steps,
    };
    let params = kernel_params! { outputs, extent: steps, inner };
    let params = params.loop_iterations(2 * iterations + 16);
    let groups = outputs.div_ceil(WORKGROUP_SIZE / threads_per_row);
    launch::launch(&spec, &[&x, &y, &g, &out], params, groups)?;
    Ok(Some(out))
}

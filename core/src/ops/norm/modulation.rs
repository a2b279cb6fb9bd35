//! Modulation: `norm(x) * scale + shift`, with one line of scales and shifts for each group of rows, as in networks
//! whose condition scales and shifts normalised tokens.
//!
//! The operations are recorded one by one. The node of the sum refers to those of the product and the norm. Its
//! backward function computes the gradients of all three in the norm's backward kernel, and bypasses both other nodes.
//! One pass reads the gradient and x, and writes the gradient of x and sums for scale and shift. The normalised values
//! are computed again from x and not saved.
//!
//! In a captured step, a product that reads the sum in 16 bits has it written by the norm's kernel: see
//! [`row_norm_record`](super::row_norm_record).

use crate::autograd::{
    BackwardCtx, EdgeGrad, GradEdge, Node, ResultSource, TensorState, find_node, has_checkpoint_since,
    result_source_of,
};
use crate::ops::norm::layer_norm::{BackwardForm, Modulation};
use crate::ops::norm::row_norm_record::{RowNormRecord, replaces_cast};
use crate::ops::prelude::*;
use crate::tensor::layout::is_row_major;

/// Least rows of a group. Workgroups sum over the rows of one group.
const MIN_ROWS_PER_GROUP: usize = 16;

/// One line of elements for each group of adjacent rows.
#[derive(Clone)]
pub(super) struct RowLines {
    /// Tensor whose first line begins at its offset.
    pub(super) tensor: Tensor,
    /// Elements between the lines of adjacent groups.
    pub(super) stride: usize,
    pub(super) rows_per_group: usize,
    state: Arc<TensorState>,
}

impl RowLines {
    /// Returns the lines of `t`, which broadcasts to rows of `extent` elements with this `shape`. Returns `None` if
    /// the groups are short, or the lines are not contiguous.
    fn find(t: &Tensor, shape: &[usize], extent: usize) -> Option<Self> {
        if !matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return None;
        }
        let layout = t.layout().broadcast_to("mul", shape).ok()?;
        let inner = (0..shape.len()).rev().find(|&d| numel(&shape[d..]) == extent)?;
        let (outer, strides) = collapse_dims(&shape[..inner], &[&layout.strides()[..inner]]);
        let (groups, rows_per_group, stride) = match (&outer[..], &strides[0][..]) {
            (&[rows], [0]) => (1, rows, 0),
            (&[groups, rows], &[stride, 0]) => (groups, rows, stride),
            _ => return None,
        };
        let is_aligned =
            !extent.is_multiple_of(VEC4_WIDTH) || (layout.offset() | stride).is_multiple_of(VEC4_WIDTH);
        let fits = is_row_major(&shape[inner..], &layout.strides()[inner..])
            && t.numel() == groups * extent
            && rows_per_group >= MIN_ROWS_PER_GROUP
            && is_aligned;
        fits.then(|| Self {
            state: Arc::new(TensorState::new(t)),
            tensor: t.detach(),
            stride,
            rows_per_group,
        })
    }

    pub(super) fn count_groups(&self, rows: usize) -> usize {
        rows / self.rows_per_group
    }

    fn is_unchanged(&self) -> bool {
        self.state.is_state_of(&self.tensor)
    }
}

/// Operand of the product or the sum, with its index among the inputs.
#[derive(Clone)]
struct LineOperand {
    input: usize,
    shape: Dims,
    dtype: DType,
}

impl LineOperand {
    fn new(t: &Tensor, input: usize) -> Self {
        Self { input, shape: t.shape().into(), dtype: t.dtype() }
    }

    /// Returns the gradient from sums \[groups, extent\].
    fn to_grad(&self, sums: &Tensor) -> Result<Tensor> {
        sums.to_dtype(self.dtype)?.reshape(&self.shape[..])
    }
}

struct Shift {
    operand: LineOperand,
    /// Lines of the shift, kept only for a captured step.
    lines: Option<RowLines>,
    product: Arc<Node>,
}

/// Product of a normalised tensor and lines of scales, or the sum of such a product and lines of shifts.
pub(crate) struct NormModulation {
    record: Arc<RowNormRecord>,
    norm: Arc<Node>,
    scale: LineOperand,
    scale_lines: RowLines,
    shift: Option<Shift>,
    /// Input of the norm, for the gradient of the scale if the operations run backward one by one.
    x: SavedTensor,
    output: TensorState,
}

impl NormModulation {
    /// Returns a modulation if the operation `op`, with the result `out`, is its product or its sum.
    pub(crate) fn find(op: &str, args: &[Operand<'_>], out: &Tensor) -> Option<Arc<Self>> {
        let &[Operand::Tensor(a), Operand::Tensor(b)] = args else { return None };
        if out.dtype() != DType::F32 || a.shape() == b.shape() || out.numel() == 0 {
            return None;
        }
        let (rows, line, input) = if a.shape() == out.shape() { (a, b, 1) } else { (b, a, 0) };
        if rows.shape() != out.shape() || rows.dtype() != DType::F32 {
            return None;
        }
        match op {
            "mul" => Self::from_product(rows, line, input, out),
            "add" => Self::from_sum(rows, line, input, out),
            _ => None,
        }
        .map(Arc::new)
    }

    fn from_product(normed: &Tensor, scale: &Tensor, input: usize, out: &Tensor) -> Option<Self> {
        let record = result_source_of::<RowNormRecord>(normed)?;
        let x = SavedTensor::input(record.find_input(normed)?);
        if record.norm.weight.is_some() || record.norm.bias.is_some() {
            return None;
        }
        Some(Self {
            norm: find_node(normed)?,
            scale_lines: RowLines::find(scale, out.shape(), record.norm.extent)?,
            scale: LineOperand::new(scale, input),
            shift: None,
            x,
            output: TensorState::new(out),
            record,
        })
    }

    fn from_sum(product: &Tensor, shift: &Tensor, input: usize, out: &Tensor) -> Option<Self> {
        let scaled = result_source_of::<Self>(product)?;
        let x = SavedTensor::input(scaled.record.find_unchanged_input()?);
        let lines = RowLines::find(shift, out.shape(), scaled.record.norm.extent)?;
        // A checkpoint may have captured the norm's result or the product, and gives them gradients without an edge.
        if scaled.shift.is_some()
            || has_checkpoint_since(&scaled.norm)
            || !scaled.output.is_state_of(product)
            || lines.rows_per_group != scaled.scale_lines.rows_per_group
        {
            return None;
        }
        let recorder = out.device().capture_recorder();
        Some(Self {
            record: scaled.record.clone(),
            norm: scaled.norm.clone(),
            scale: scaled.scale.clone(),
            scale_lines: scaled.scale_lines.clone(),
            shift: Some(Shift {
                operand: LineOperand::new(shift, input),
                lines: Some(lines).filter(|_| recorder.is_recording_here()),
                product: find_node(product)?,
            }),
            x,
            output: TensorState::new(out),
        })
    }

    /// Reports whether the operation is the product, with `t` as the normalised operand.
    pub(crate) fn normalizes(&self, t: &Tensor) -> bool {
        self.shift.is_none() && self.record.find_input(t).is_some()
    }

    /// Computes the normalised rows again, in a backward function. In a recorded pass they have the history `edge`.
    pub(crate) fn normalize_again(&self, edge: Option<&GradEdge>, ctx: &BackwardCtx<'_>) -> Result<Tensor> {
        let _no_grad = autograd::no_grad();
        let op = self.record.norm.op;
        let x = self.x.unpack_detached(ctx).map_err(|error| {
            error.with_context(format!("the gradient of a scale, which computes `{op}` again from its input"))
        })?;
        let (normed, _) = self.record.norm.forward(&x, None, None, DType::F32)?;
        Ok(if ctx.create_graph() { normed.with_grad_edge(edge.cloned()) } else { normed })
    }

    /// Computes the gradients of the sum, the product and the norm from the gradient `g` of the sum, in f32 or 16 bits.
    /// Returns `None` if the nodes must run one by one.
    pub(crate) fn compute_grads(&self, g: &Tensor, ctx: &BackwardCtx<'_>) -> Result<Option<InputGrads>> {
        let Some(shift) = &self.shift else { return Ok(None) };
        let (record, nodes) = (&*self.record, [&shift.product, &self.norm]);
        let Some(x_edge) = self.norm.input_edge(0) else { return Ok(None) };
        if !ctx.can_bypass(&nodes)
            || record.find_unchanged_input().is_none()
            || !self.scale_lines.is_unchanged()
        {
            return Ok(None);
        }
        operation!(record.norm.op);
        let scale_edge = shift.product.input_edge(self.scale.input);
        let needs_shift = ctx.needs_input_grad[shift.operand.input];
        let pending = ctx.take_grad_of_edge(x_edge)?;
        // The kernel overwrites the accumulated gradient of a leaf, or leaves one of another type or layout to the
        // engine, which adds to it.
        let is_leaf_sum = pending.as_ref().is_some_and(|(_, is_leaf_sum)| *is_leaf_sum);
        let extra_grad = pending.and_then(|(grad, is_leaf_sum)| match is_leaf_sum {
            true => Some(grad).filter(|sum| record.x.is_like(sum)).map(|sum| (sum, true)),
            false => Some(record.x.overwritable(grad)),
        });
        let is_accumulated = is_leaf_sum && extra_grad.is_some();
        let form = BackwardForm {
            sections: if needs_shift || scale_edge.is_some() { 2 } else { 0 },
            // Also in eager steps, unlike in `layer_norm`: a modulated norm has no weight or bias. The pool of a
            // diffusion transformer with this copy no longer calls the driver after a few steps.
            copy: x_edge.branch_dtype(),
            modulation: Some(Modulation { scale: &self.scale_lines, shift: None }),
        };
        let made = record.norm.launch_backward(g, &record.x, &record.statistics(), extra_grad, &form)?;
        let sums = made.partial.map(|partial| self.sum_partials(&partial)).transpose()?;
        let dx = if made.copy.is_some() { made.dx.with_grad_extras(made.copy, None) } else { made.dx };
        let mut grads = smallvec![EdgeGrad { edge: x_edge.clone(), grad: dx, is_accumulated }];
        if let (Some(edge), Some(sums)) = (scale_edge, &sums) {
            let grad = self.scale.to_grad(&sums.select(1, 0)?)?;
            grads.push(EdgeGrad { edge: edge.clone(), grad, is_accumulated: false });
        }
        let mut result: InputGrads = smallvec![None; 2];
        if let Some(sums) = sums.filter(|_| needs_shift) {
            result[shift.operand.input] = Some(shift.operand.to_grad(&sums.select(1, 1)?)?);
        }
        ctx.bypass_nodes(1 - shift.operand.input, &nodes, grads);
        Ok(Some(result))
    }

    /// Sums the partial sums of each group of rows: \[groups, 2, extent\].
    fn sum_partials(&self, partial: &Tensor) -> Result<Tensor> {
        let groups = self.scale_lines.count_groups(self.record.norm.rows);
        let extent = self.record.norm.extent;
        let splits = partial.shape()[0] / groups;
        match splits {
            1 => partial.reshape([groups, 2, extent]),
            _ => partial.reshape([groups, splits, 2 * extent])?.sum([1], false)?.reshape([groups, 2, extent]),
        }
    }
}

impl ResultSource for NormModulation {
    fn compute_as(&self, result: &Tensor, dtype: DType) -> Result<Option<Tensor>> {
        let lines = self.shift.as_ref().and_then(|shift| shift.lines.as_ref());
        let Some((shift, x)) = lines.zip(self.record.find_unchanged_input()) else { return Ok(None) };
        if !self.output.is_state_of(result)
            || !self.scale_lines.is_unchanged()
            || !shift.is_unchanged()
            || !replaces_cast(result, dtype)
        {
            return Ok(None);
        }
        operation!(self.record.norm.op);
        let modulation = Modulation { scale: &self.scale_lines, shift: Some(shift) };
        self.record.normalize_again(x, Some(modulation), dtype).map(Some)
    }
}

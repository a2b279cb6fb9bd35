//! Convolutions by a backend's own kernels, which need no column matrix ([`ConvolutionCall`]).
//!
//! The kernels take weights as \[taps, channels, rows\], so each call copies the weights. The gradient of the
//! input is the same product with mirrored taps. The gradient of the weights has partial sums for ranges of
//! positions, which are then added in a fixed order.

use crate::backend::{Command, ConvolutionCall, ConvolutionProduct, Slice};
use crate::ops::conv::{ConvGeometry, ConvKind, spatial_numel};
use crate::ops::prelude::*;
use crate::runtime::profile::WorkItem;
use crate::runtime::stream::Access;

/// Smallest number of multiplications, and of positions of all images, for which the kernels are used.
const MIN_MULTIPLICATIONS: usize = 1 << 24;
const MIN_POSITIONS: usize = 1 << 12;

impl ConvGeometry {
    /// Reports whether a backend's own kernels compute this convolution and its gradients.
    pub(super) fn uses_implicit(&self, x: &Tensor) -> bool {
        let plane = |extents: [usize; 3]| [extents[0] as u64, extents[1] as u64];
        let covered = |extents: [usize; 3], pixels: u64| {
            extents[1].is_multiple_of(8) && ConvolutionCall::block_width(plane(extents), pixels).is_some()
        };
        let (taps, positions) = (spatial_numel(&self.kernel), self.batch * spatial_numel(&self.y_extents));
        let is_pointwise = taps == 1 && self.padding == [0; 3];
        x.device().library_features().convolution
            && x.device().im2col_max_bytes() > 0
            && matches!(x.dtype(), DType::F16 | DType::BF16)
            && self.rank == 2
            && self.groups == 1
            && self.has_unit_stride()
            && self.kernel.iter().zip(&self.dilation).all(|(&taps, &dilation)| dilation == 1 || taps == 1)
            && self.kernel.iter().all(|&taps| taps as u64 <= ConvolutionCall::MAX_KERNEL)
            && !is_pointwise
            && [self.x_extents, self.y_extents].iter().all(|&extents| {
                covered(extents, ConvolutionCall::TILE_POSITIONS)
                    && covered(extents, ConvolutionCall::STAGE_POSITIONS)
            })
            && positions >= MIN_POSITIONS
            && positions.saturating_mul(self.x_channels * self.y_channels * taps) >= MIN_MULTIPLICATIONS
    }

    /// Computes one of the products from its operands in the order of [`ConvKind`], plus an optional bias.
    /// Returns `None` if the backend declines.
    pub(super) fn try_implicit(
        &self,
        kind: ConvKind,
        a: &Tensor,
        b: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        if !self.uses_implicit(a) {
            return Ok(None);
        }
        let (a, b) = (a.contiguous()?, b.contiguous()?);
        match kind {
            ConvKind::WeightGrad => self.implicit_weight_grad(&a, &b),
            ConvKind::Forward | ConvKind::InputGrad => {
                let bias = bias.map(Tensor::contiguous).transpose()?;
                self.implicit_output(kind == ConvKind::InputGrad, &a, &b, bias.as_ref())
            }
        }
    }

    /// Computes y from x and w, or with `mirrored` the gradient of x from y's.
    fn implicit_output(
        &self,
        mirrored: bool,
        x: &Tensor,
        w: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let (taps, dtype) = (spatial_numel(&self.kernel), x.dtype());
        // Weights are [y channels, x channels, taps].
        let (channels, rows, order) = match mirrored {
            false => (self.x_channels, self.y_channels, [2, 1, 0]),
            true => (self.y_channels, self.x_channels, [2, 0, 1]),
        };
        let pitch = rows.next_multiple_of(ConvolutionCall::ROW_ALIGNMENT as usize);
        let weights = empty_workspace(&[taps, channels, pitch], dtype, x.device())?;
        let permuted = w.reshape([self.y_channels, self.x_channels, taps])?.permute(order)?;
        permuted.copy_into(&weights.narrow(2, 0, rows)?)?;
        let out = Tensor::empty(if mirrored { self.x_shape() } else { self.y_shape() }, dtype, x.device())?;
        let accepted = {
            let reads = bias.into_iter().map(|t| (t, Access::Read));
            let operands = [(x, Access::Read), (&weights, Access::Read), (&out, Access::Write)];
            let bound = launch::bind_tensors(operands.into_iter().chain(reads))?;
            let product = ConvolutionProduct::Output {
                weights: bound[1],
                bias: bias.map(|bias| bias.byte_range_in(bound[3])),
                out: bound[2],
            };
            let first = x.byte_range_in(bound[0]);
            run(&self.convolution_call(mirrored, dtype, [channels, rows], first, product), x)?
        };
        Ok(accepted.then_some(out))
    }

    /// Computes the gradient of w from y's and x.
    fn implicit_weight_grad(&self, dy: &Tensor, x: &Tensor) -> Result<Option<Tensor>> {
        let (taps, dtype) = (spatial_numel(&self.kernel), dy.dtype());
        let [rows, channels] = [self.y_channels, self.x_channels];
        let positions = self.batch * spatial_numel(&self.y_extents);
        let [r, c, t, p] = [rows, channels, taps, positions].map(|n| n as u64);
        let splits = ConvolutionCall::weight_grad_splits(r, c, t, p);
        let partial = empty_workspace(&[splits as usize, rows, taps, channels], DType::F32, x.device())?;
        let accepted = {
            let operands = [(x, Access::Read), (dy, Access::Read), (&partial, Access::Write)];
            let bound = launch::bind_tensors(operands)?;
            let grad = dy.byte_range_in(bound[1]);
            let product = ConvolutionProduct::WeightGrad { grad, partial: bound[2], splits };
            let first = x.byte_range_in(bound[0]);
            run(&self.convolution_call(false, dtype, [channels, rows], first, product), x)?
        };
        if !accepted {
            return Ok(None);
        }
        let sum = if splits == 1 { partial.squeeze(0)? } else { partial.sum([0], false)? };
        sum.permute([0, 2, 1])?.to_dtype(dtype)?.reshape(&self.w_shape()[..]).map(Some)
    }

    fn convolution_call(
        &self,
        mirrored: bool,
        dtype: DType,
        [channels, rows]: [usize; 2],
        x: Slice,
        product: ConvolutionProduct,
    ) -> ConvolutionCall {
        let plane = |extents: [usize; 3]| [extents[0] as u64, extents[1] as u64];
        let padding = [self.padding[0] as i64, self.padding[1] as i64];
        let [input, output] = match mirrored {
            false => [self.x_extents, self.y_extents],
            true => [self.y_extents, self.x_extents],
        };
        ConvolutionCall {
            dtype,
            images: self.batch as u64,
            channels: channels as u64,
            input: plane(input),
            rows: rows as u64,
            output: plane(output),
            kernel: plane(self.kernel),
            first_tap: if mirrored { padding } else { padding.map(|padding| -padding) },
            tap_step: if mirrored { -1 } else { 1 },
            x,
            product,
        }
    }
}

/// Enqueues a call whose operands are bound. Returns false if the backend declines.
fn run(call: &ConvolutionCall, x: &Tensor) -> Result<bool> {
    Ok(call.is_supported()
        && x.device().try_enqueue(|| describe_for_profiler(call), &Command::Convolution(call))?)
}

/// Describes a convolution for the profiler.
pub(crate) fn describe_for_profiler(call: &ConvolutionCall) -> WorkItem {
    let ConvolutionCall { dtype, images, channels, rows, output: [height, width], .. } = *call;
    let [taps_y, taps_x] = call.kernel;
    let kind = match call.product {
        ConvolutionProduct::Output { .. } => "convolution",
        ConvolutionProduct::WeightGrad { .. } => "convolution weight gradient",
    };
    WorkItem {
        name: format!("{kind} {dtype} {images}x{channels}x{height}x{width} to {rows}, {taps_y}x{taps_x}")
            .into(),
        bytes: call.bytes(),
        flops: call.flops(),
    }
}

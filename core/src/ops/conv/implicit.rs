//! Convolutions by a backend's own kernels, which need columns along the width only ([`ConvolutionCall`]).
//!
//! Such columns are a column matrix ([`im2col`](super::im2col)) for a filter of height and depth 1: a third of the
//! columns of a 3 x 3 filter, a ninth of those of 3 x 3 x 3. The kernels take weights as \[taps, channels, rows\], so
//! each call copies the weights. The gradient of the input is the same product with mirrored taps, for strides of 1.
//! The gradient of the weights has partial sums for ranges of positions, which are then added in a fixed order.

use crate::backend::{Command, ConvolutionCall, ConvolutionProduct, Slice};
use crate::ops::conv::im2col::{Im2colPlan, ImageChunk};
use crate::ops::conv::{ConvGeometry, ConvKind, spatial_numel};
use crate::ops::kernel::launch::VECTOR_BYTES;
use crate::ops::prelude::*;
use crate::ops::reduce::sum_first_dim;

/// Smallest number of multiplications, and of positions of all images, for which the kernels are used. Fewer do not
/// fill the card.
const MIN_MULTIPLICATIONS: usize = 1 << 27;
const MIN_POSITIONS: usize = 1 << 12;

/// Fewest channels of x and y for filters of three dimensions or with strides. The kernels multiply at least 16, which
/// filters of one plane make up for by smaller columns.
const MIN_CHANNELS: usize = 8;

impl ConvGeometry {
    /// Reports whether a backend's own kernels compute this product, with `a` as its first operand.
    pub(super) fn uses_implicit(&self, kind: ConvKind, a: &Tensor) -> bool {
        let covered = |extents: [usize; 3], pixels: u64| {
            let [_, height, width] = self.volume(extents, 1).map(|n| n as u64);
            width.is_multiple_of(8) && ConvolutionCall::block_width([height, width], pixels).is_some()
        };
        let (taps, positions) = (spatial_numel(&self.kernel), self.batch * spatial_numel(&self.y_extents));
        let is_pointwise = taps == 1 && self.padding == [0; 3];
        let supports_stride = match kind {
            ConvKind::InputGrad => self.has_unit_stride(),
            _ => self.stride.iter().all(|&stride| stride as u64 <= ConvolutionCall::MAX_STRIDE),
        };
        // The blocks of both directions, if both have one.
        let extents = [self.y_extents, if self.has_unit_stride() { self.x_extents } else { self.y_extents }];
        a.device().library_features().convolution
            && matches!(a.dtype(), DType::F16 | DType::BF16)
            && self.groups == 1
            && supports_stride
            && ((self.rank == 2 && self.has_unit_stride())
                || self.x_channels.min(self.y_channels) >= MIN_CHANNELS)
            && self.kernel.iter().all(|&taps| taps as u64 <= ConvolutionCall::MAX_KERNEL)
            && !is_pointwise
            && extents.iter().all(|&extents| {
                covered(extents, ConvolutionCall::TILE_POSITIONS)
                    && covered(extents, ConvolutionCall::STAGE_POSITIONS)
            })
            && positions >= MIN_POSITIONS
            && positions.saturating_mul(self.x_channels * self.y_channels * taps) >= MIN_MULTIPLICATIONS
            && self.uses_im2col(a)
    }

    /// Returns depth, height and width from the values of the spatial dimensions. Planar images have one plane, of
    /// which the value is `plane`.
    fn volume<T: Copy>(&self, values: [T; 3], plane: T) -> [T; 3] {
        if self.rank == 2 { [plane, values[0], values[1]] } else { values }
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
        let (images, products) = match kind {
            ConvKind::Forward | ConvKind::InputGrad => {
                (a, ImplicitProducts { weights: Some(b), positions: None, bias })
            }
            ConvKind::WeightGrad => (b, ImplicitProducts { weights: None, positions: Some(a), bias: None }),
        };
        if !self.uses_implicit(kind, a) {
            return Ok(None);
        }
        let [out, weight_grad] = self.run_implicit(kind == ConvKind::InputGrad, images, products)?;
        Ok(out.or(weight_grad))
    }

    /// Computes the gradients of x and of w, which share the columns of `dy`. Returns `None` if the backend declines.
    pub(super) fn try_implicit_backward(
        &self,
        dy: &Tensor,
        w: &Tensor,
        x: &Tensor,
    ) -> Result<Option<[Tensor; 2]>> {
        if !self.uses_implicit(ConvKind::InputGrad, dy) {
            return Ok(None);
        }
        let products = ImplicitProducts { weights: Some(w), positions: Some(x), bias: None };
        let [dx, dw] = self.run_implicit(true, dy, products)?;
        Ok(dx.zip(dw).map(Into::into))
    }

    /// Computes products with columns of `images`: of x, or with `mirrored` of y's gradient. Returns the sums over
    /// channels and taps, and the gradient of w; `None` for what is not wanted or if the backend declines.
    fn run_implicit(
        &self,
        mirrored: bool,
        images: &Tensor,
        products: ImplicitProducts,
    ) -> Result<[Option<Tensor>; 2]> {
        let plan = if mirrored { Im2colPlan::for_input_grad(self) } else { Im2colPlan::for_input(self) };
        let plan = plan.along_width();
        let (images, dtype) = (images.contiguous()?, images.dtype());
        let positions = products.positions.map(to_aligned).transpose()?;
        let bias = products.bias.map(Tensor::contiguous).transpose()?;
        let weights = products.weights.map(|w| self.implicit_weights(mirrored, w)).transpose()?;
        let shape = if mirrored { self.x_shape() } else { self.y_shape() };
        let out = weights.as_ref().map(|_| Tensor::empty(shape, dtype, images.device())).transpose()?;
        let mut sum: Option<Tensor> = None;
        for chunk in plan.split_batch(&images, dtype, false) {
            let columns = to_aligned(&plan.build_columns(&images, chunk)?)?;
            let call = ImplicitCall { geometry: self, mirrored, columns: &columns, chunk };
            if let (Some(weights), Some(out)) = (&weights, &out)
                && !call.multiply_weights(weights, bias.as_ref(), out)?
            {
                return Ok([None, None]);
            }
            if let Some(positions) = &positions {
                let Some(part) = call.sum_positions(positions)? else { return Ok([None, None]) };
                match &sum {
                    Some(sum) => sum.add_(&part)?,
                    None => sum = Some(part),
                }
            }
        }
        // From [rows, taps, channels of the columns] to [y channels, x channels, taps].
        let order = if mirrored { [2, 0, 1] } else { [0, 2, 1] };
        let finish = |sum: Tensor| sum.permute(order)?.to_dtype(dtype)?.reshape(&self.w_shape()[..]);
        Ok([out, sum.map(finish).transpose()?])
    }

    /// Copies weights to \[taps, channels, row pitch\]. Rows are those of the result.
    fn implicit_weights(&self, mirrored: bool, w: &Tensor) -> Result<Tensor> {
        let taps = spatial_numel(&self.kernel);
        // Weights are [y channels, x channels, taps].
        let (channels, rows, order) = match mirrored {
            false => (self.x_channels, self.y_channels, [2, 1, 0]),
            true => (self.y_channels, self.x_channels, [2, 0, 1]),
        };
        let pitch = rows.next_multiple_of(ConvolutionCall::ROW_ALIGNMENT as usize);
        let weights = empty_workspace(&[taps, channels, pitch], w.dtype(), w.device())?;
        let permuted = w.reshape([self.y_channels, self.x_channels, taps])?.permute(order)?;
        permuted.copy_into(&weights.narrow(2, 0, rows)?)?;
        Ok(weights)
    }
}

/// Returns an operand in adjacent memory that begins at a whole vector, as the kernels need it. The copy costs less
/// than a declined product: its operation computes the results of the other product again.
fn to_aligned(t: &Tensor) -> Result<Tensor> {
    let t = t.contiguous()?;
    let offset = t.layout().offset() * t.dtype().size();
    if offset.is_multiple_of(VECTOR_BYTES) { Ok(t) } else { t.copy() }
}

/// Operands of the wanted products with one set of columns.
#[derive(Clone, Copy)]
struct ImplicitProducts<'a> {
    /// Weights, for the sums over channels and taps, to which `bias` is added.
    weights: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
    /// Images at the positions, for the gradient of the weights.
    positions: Option<&'a Tensor>,
}

/// Products with the columns of one chunk of images.
struct ImplicitCall<'a> {
    geometry: &'a ConvGeometry,
    mirrored: bool,
    columns: &'a Tensor,
    chunk: ImageChunk,
}

impl ImplicitCall<'_> {
    /// Writes the sums over channels and taps to the chunk's images of `out`. Returns false if the backend declines.
    fn multiply_weights(&self, weights: &Tensor, bias: Option<&Tensor>, out: &Tensor) -> Result<bool> {
        let out = out.narrow(0, self.chunk.first_image, self.chunk.images)?;
        let bias_operand = bias.into_iter().map(|bias| (bias, Access::Read));
        let operands = [(self.columns, Access::Read), (weights, Access::Read), (&out, Access::Write)];
        let bound = launch::bind_tensors(operands.into_iter().chain(bias_operand))?;
        let product = ConvolutionProduct::Output {
            weights: bound[1],
            bias: bias.map(|bias| bias.byte_range_in(bound[3])),
            out: out.byte_range_in(bound[2]),
        };
        self.run(bound[0], out.shape()[1], product)
    }

    /// Returns the sum over the chunk's positions, \[rows, taps, channels\] in f32, whose rows are the channels of
    /// `positions`. Returns `None` if the backend declines.
    fn sum_positions(&self, positions: &Tensor) -> Result<Option<Tensor>> {
        let ConvGeometry { x_channels, y_channels, .. } = *self.geometry;
        let taps = spatial_numel(&self.geometry.kernel);
        let positions = positions.narrow(0, self.chunk.first_image, self.chunk.images)?;
        let (rows, channels) =
            if self.mirrored { (x_channels, y_channels) } else { (y_channels, x_channels) };
        let [r, c, t, p] = [rows, channels, taps, positions.numel() / rows].map(|n| n as u64);
        let splits = ConvolutionCall::weight_grad_splits(r, c, t, p);
        let shape = [splits as usize, rows, taps, channels];
        let partial = empty_workspace(&shape, DType::F32, positions.device())?;
        let accepted = {
            let operands =
                [(self.columns, Access::Read), (&positions, Access::Read), (&partial, Access::Write)];
            let bound = launch::bind_tensors(operands)?;
            let grad = positions.byte_range_in(bound[1]);
            let product = ConvolutionProduct::WeightGrad { grad, partial: bound[2], splits };
            self.run(bound[0], rows, product)?
        };
        if !accepted {
            return Ok(None);
        }
        let sum = if splits == 1 { partial } else { sum_first_dim(&partial, DType::F32)? };
        sum.squeeze(0).map(Some)
    }

    /// Enqueues a call whose operands are bound. Returns false if the backend declines.
    fn run(&self, columns: Slice, rows: usize, product: ConvolutionProduct) -> Result<bool> {
        let g = self.geometry;
        let (padding, dilation) = (g.padding.map(|p| p as i64), g.dilation.map(|d| d as i64));
        let (channels, input, output, first_tap, tap_step) = match self.mirrored {
            false => (g.x_channels, g.x_extents, g.y_extents, padding.map(|p| -p), dilation),
            true => (g.y_channels, g.y_extents, g.x_extents, padding, dilation.map(|d| -d)),
        };
        let sizes = |extents: [usize; 3]| g.volume(extents, 1).map(|n| n as u64);
        let [input_depth, input_height, _] = sizes(input);
        let [stride_z, stride_y, _] = sizes(g.stride);
        let [first_z, first_y, _] = g.volume(first_tap, 0);
        let [step_z, step_y, _] = g.volume(tap_step, 1);
        let call = ConvolutionCall {
            dtype: self.columns.dtype(),
            images: self.chunk.images as u64,
            channels: channels as u64,
            input: [input_depth, input_height],
            rows: rows as u64,
            output: sizes(output),
            kernel: sizes(g.kernel),
            stride: [stride_z, stride_y],
            first_tap: [first_z, first_y],
            tap_step: [step_z, step_y],
            columns: self.columns.byte_range_in(columns),
            product,
        };
        let device = self.columns.device();
        Ok(call.is_supported()
            && device.try_enqueue(|| describe_for_profiler(&call), &Command::Convolution(&call))?)
    }
}

pub(crate) fn describe_for_profiler(call: &ConvolutionCall) -> WorkItem {
    let ConvolutionCall { dtype, images, channels, rows, .. } = *call;
    let ([depth, height, width], [taps_z, taps_y, taps_x]) = (call.output, call.kernel);
    let kind = match call.product {
        ConvolutionProduct::Output { .. } => "convolution",
        ConvolutionProduct::WeightGrad { .. } => "convolution weight gradient",
    };
    WorkItem {
        name: match depth * taps_z {
            1 => format!("{kind} {dtype} {images}x{channels}x{height}x{width} to {rows}, {taps_y}x{taps_x}"),
            _ => {
                let taps = format!("{taps_z}x{taps_y}x{taps_x}");
                format!("{kind} {dtype} {images}x{channels}x{depth}x{height}x{width} to {rows}, {taps}")
            }
        }
        .into(),
        bytes: call.bytes(),
        flops: call.flops(),
    }
}

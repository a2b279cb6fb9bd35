//! Convolutions as implicit matrix products: kernels gather their operands without a copy (implicit GEMM).
//!
//! A convolution, its two gradients and a transposed convolution are three kinds of one kernel over one
//! [`ConvGeometry`]. A transposed convolution is the input gradient of the convolution with the same weights.
//! On a GPU, [`im2col`] computes all three as matrix products instead, and [`depthwise`] and [`depthwise_strips`] those
//! of filters for single channels. A backend may have kernels of its own that need a smaller column matrix
//! ([`implicit`]). The gradient of the input of a strided convolution is a convolution, too ([`strided_grad`]).

pub(crate) mod depthwise;
pub(crate) mod depthwise_strips;
pub(crate) mod grid_sample;
pub(crate) mod im2col;
pub(crate) mod implicit;
pub(crate) mod interpolate;
pub(crate) mod pool;
pub(crate) mod pool_composite;
pub(crate) mod spatial;
pub(crate) mod strided_grad;
pub(crate) mod unpool;

use crate::ops::conv::spatial::{
    ConvolutionOptions, Padding, TransposedConvolutionOptions, check_option, kernel_axes, padded_extent,
    window_extent,
};
use crate::ops::matmul::matmul_tiling::{CostModel, KMajorOperands, MatmulExtents, TilePlan};
use crate::ops::prelude::*;
use crate::tensor::layout::{MAX_TENSOR_NUMEL, check_view_numel};

/// Geometry of a convolution from x \[images, x_channels, ..\] to y \[images, y_channels, ..\] with weights
/// \[y_channels, x_channels / groups, ..\].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConvGeometry {
    pub(super) op: &'static str,
    /// Number of spatial dimensions, 2 or 3. For 2, the third entry of the arrays below is 1 or 0.
    pub(super) rank: usize,
    pub(super) batch: usize,
    pub(super) groups: usize,
    pub(super) x_channels: usize,
    pub(super) y_channels: usize,
    pub(super) x_extents: [usize; 3],
    pub(super) y_extents: [usize; 3],
    pub(super) kernel: [usize; 3],
    pub(super) stride: [usize; 3],
    pub(super) padding: [usize; 3],
    pub(super) dilation: [usize; 3],
}

impl ConvGeometry {
    fn shape(&self, first: usize, second: usize, extents: &[usize; 3]) -> Dims {
        [first, second].into_iter().chain(extents[..self.rank].iter().copied()).collect()
    }
    pub(super) fn x_shape(&self) -> Dims {
        self.shape(self.batch, self.x_channels, &self.x_extents)
    }
    pub(super) fn y_shape(&self) -> Dims {
        self.shape(self.batch, self.y_channels, &self.y_extents)
    }
    pub(super) fn w_shape(&self) -> Dims {
        self.shape(self.y_channels, self.x_channels / self.groups, &self.kernel)
    }

    /// Returns true if every quotient in the index arithmetic is small enough for division in f32.
    fn supports_f32_division(&self) -> bool {
        // A position is divided by the last extent first.
        let lines = |extents: &[usize; 3]| extents[..self.rank - 1].iter().product::<usize>();
        let counts = [
            self.batch,
            self.x_channels,
            self.y_channels,
            lines(&self.x_extents),
            lines(&self.y_extents),
            lines(&self.kernel),
        ];
        counts
            .iter()
            .chain(&self.x_extents)
            .chain(&self.y_extents)
            .chain(&self.kernel)
            .chain(&self.padding)
            .all(|&n| n < 1 << 20)
            && spatial_numel(&self.x_extents).max(spatial_numel(&self.y_extents)) < 1 << 31
    }

    /// Computes one of the products from its operands in the order of [`ConvKind`], plus an optional bias.
    fn multiply(&self, kind: ConvKind, a: &Tensor, b: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        // Below, extents of several tensors are multiplied, which fits for tensors with elements.
        if [a, b].iter().any(|t| t.numel() == 0) {
            return self.empty_sum(kind, a, bias);
        }
        if self.is_depthwise(a.dtype()) {
            return self.run_depthwise(kind, a, b, bias);
        }
        if let Some(out) = self.try_implicit(kind, a, b, bias)? {
            return Ok(out);
        }
        if kind == ConvKind::InputGrad
            && let Some(out) = self.try_phases(a, b, bias)?
        {
            return Ok(out);
        }
        let is_im2col = match kind {
            ConvKind::WeightGrad => self.weight_grad_uses_im2col(a),
            ConvKind::Forward | ConvKind::InputGrad => self.uses_im2col(a),
        };
        match (kind, is_im2col) {
            (ConvKind::Forward, true) => self.im2col_forward(a, b, bias),
            (ConvKind::InputGrad, true) => self.im2col_input_grad(a, b, bias),
            (ConvKind::WeightGrad, true) => self.im2col_weight_grad(a, b, None),
            (ConvKind::WeightGrad, false) => self.run_kernel(kind, a, b, bias),
            // The kernel gathers from the second operand, and reads the weight as the first.
            (_, false) => self.run_kernel(kind, b, a, bias),
        }
    }

    /// Returns the shape of a product.
    fn result_shape(&self, kind: ConvKind) -> Dims {
        match kind {
            ConvKind::Forward => self.y_shape(),
            ConvKind::InputGrad => self.x_shape(),
            ConvKind::WeightGrad => self.w_shape(),
        }
    }

    /// Returns the product of an operand without elements: zeros, plus the bias.
    fn empty_sum(&self, kind: ConvKind, like: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let shape = self.result_shape(kind);
        let zeros = Tensor::zeros(&shape, like.dtype(), like.device())?;
        match bias {
            Some(bias) => zeros.add(&im2col::bias_per_channel(bias, shape.len())?),
            None => Ok(zeros),
        }
    }

    /// Computes the gradients of x and of w. If `cast_from` is f32, from which autocast cast the weights, their
    /// gradient may be f32, with values of the weights' type.
    fn backward(&self, dy: &Tensor, w: &Tensor, x: &Tensor, cast_from: Option<DType>) -> Result<[Tensor; 2]> {
        if [dy, w, x].iter().any(|t| t.numel() == 0) {
            return Ok([
                self.empty_sum(ConvKind::InputGrad, dy, None)?,
                self.empty_sum(ConvKind::WeightGrad, dy, None)?,
            ]);
        }
        if let Some(grads) = self.try_implicit_backward(dy, w, x)? {
            return Ok(grads);
        }
        if self.is_depthwise(dy.dtype()) {
            // Both products read it, so that a view is copied once.
            let dy = dy.contiguous()?;
            let dw = self.run_depthwise(ConvKind::WeightGrad, &dy, x, None)?;
            return Ok([self.run_depthwise(ConvKind::InputGrad, &dy, w, None)?, dw]);
        }
        if self.uses_im2col(dy) && self.has_unit_stride() {
            return self.im2col_backward(dy, w, x, cast_from);
        }
        let dw = match self.weight_grad_uses_im2col(dy) && !self.uses_implicit(ConvKind::WeightGrad, dy) {
            true => self.im2col_weight_grad(dy, x, cast_from),
            false => self.multiply(ConvKind::WeightGrad, dy, x, None),
        };
        Ok([self.multiply(ConvKind::InputGrad, dy, w, None)?, dw?])
    }

    /// Runs one of the products, of `a` and elements gathered from `b`.
    fn run_kernel(&self, kind: ConvKind, a: &Tensor, b: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let [x_group, y_group] = [self.x_channels, self.y_channels].map(|channels| channels / self.groups);
        let [x_positions, y_positions, taps] =
            [&self.x_extents, &self.y_extents, &self.kernel].map(spatial_numel);
        // The product's extents, and the number of adjacent columns.
        let (name, m, n, k, columns) = match kind {
            ConvKind::Forward => ("forward", y_group, self.batch * y_positions, x_group * taps, y_positions),
            ConvKind::InputGrad => ("input", x_group, self.batch * x_positions, y_group * taps, x_positions),
            ConvKind::WeightGrad => {
                ("weight", y_group, x_group * taps, self.batch * y_positions, x_group * taps)
            }
        };
        // The kernel computes addresses from indices, so the operands must be contiguous.
        let (a, b) = (a.contiguous()?, b.contiguous()?);
        let bias = bias.map(Tensor::contiguous).transpose()?;
        let out = Tensor::empty(self.result_shape(kind), a.dtype(), a.device())?;
        let extents = MatmulExtents { m, n, k, batch: self.groups };
        let plan = TilePlan::new(extents, a.dtype(), CostModel::new(a.device(), true));
        let spec = kernel_spec! {
            "conv", kind: name, dtype: launch::shader_dtype_name(a.dtype(), a.device()), rank: self.rank,
            f32_division: self.supports_f32_division(), bias: bias.is_some(),
        };
        let along = KMajorOperands { a: true, b: kind == ConvKind::WeightGrad };
        let spec = plan.add_definitions(spec, along, columns.is_multiple_of(4));
        let params = kernel_params! {
            ..plan.params(); a_offset: a.layout().offset(), b_offset: b.layout().offset(),
            x_channels: self.x_channels, x_group, y_channels: self.y_channels,
            y_group, x_positions, y_positions, taps, total: out.numel(),
            bias_offset: bias.as_ref().map_or(0, |b| b.layout().offset()), x_size: self.x_extents,
            y_size: self.y_extents, kernel: self.kernel, stride: self.stride, padding: self.padding,
            dilation: self.dilation,
        };
        let inputs: SmallVec<[&Tensor; 3]> = [&a, &b].into_iter().chain(bias.as_ref()).collect();
        plan.run(&spec, &inputs, params, &out)?;
        Ok(out)
    }
}

pub(super) fn spatial_numel(extents: &[usize; 3]) -> usize {
    extents.iter().product()
}

fn check_conv_operands(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    rank: usize,
    groups: usize,
) -> Result<()> {
    let dtype = x.dtype();
    // 8-bit types would be summed in 8 bits.
    fail_if!(!dtype.is_float() && !matches!(dtype, DType::I32 | DType::U32 | DType::I64);
        dtype(op, dtype), "takes floats and integers of 32 and 64 bits; cast with `to_dtype`");
    launch::check_device_dtype(op, dtype, x.device())?;
    for t in [Some(weight), bias].into_iter().flatten() {
        x.check_same_device(op, t)?;
        fail_if!(t.dtype() != dtype; dtype(op, t.dtype()), "the input is {dtype}; cast one with `to_dtype`");
    }
    fail_if!(weight.rank() != rank + 2; shape(op, [x, weight]), "takes a weight of rank {}", rank + 2);
    fail_if!(groups == 0 || !weight.shape()[0].is_multiple_of(groups);
        argument(op), "{groups} groups do not divide the weight's first extent, {}", weight.shape()[0]);
    Ok(())
}

fn check_bias(op: &'static str, bias: Option<&Tensor>, channels: usize) -> Result<()> {
    if let Some(b) = bias.filter(|b| b.shape() != [channels]) {
        fail!(shape(op, [b]), "the bias has one element for each of {channels} channels")
    }
    Ok(())
}

/// Computes the gradient of a bias: the sum over all dimensions except the channels.
fn bias_gradient(g: &Tensor) -> Result<Tensor> {
    let dims: SmallVec<[isize; 4]> = (0..g.rank() as isize).filter(|&d| d != 1).collect();
    g.sum(&dims, false)
}

#[track_caller]
fn convolve<const N: usize>(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &ConvolutionOptions<N>,
) -> Result<Tensor> {
    operation!(op, autocast [x, weight, bias], |x, w, b| convolve(op, &x, &w, b.as_ref(), options));
    let &ConvolutionOptions { stride, padding, dilation, groups } = options;
    check_conv_operands(op, x, weight, bias, N, groups)?;
    check_bias(op, bias, weight.shape()[0])?;
    let (stride, dilation) =
        (check_option(op, "stride", stride, 1)?, check_option(op, "dilation", dilation, 1)?);
    let (x, unbatched) = spatial::ensure_batched::<N>(op, x)?;
    let (channels, of_group) = (x.shape()[1], weight.shape()[1]);
    fail_if!(of_group.checked_mul(groups) != Some(channels); shape(op, [x, weight]),
        "the input has {channels} channels, and the weight takes {of_group} for each of {groups} groups (input [batch, channels, ..], \
                 weight [out, channels of a group, ..]); give the layer the channels of the input, or change `groups`");
    let (mut before, mut extents) = ([0; N], [0; N]);
    for d in 0..N {
        let (size, taps) = (x.shape()[d + 2], weight.shape()[d + 2]);
        let window = window_extent(taps, dilation[d]);
        let padded = match padding {
            Padding::Same if stride[d] != 1 => {
                return Err(Error::argument(op, "padding `Same` takes a stride of 1"));
            }
            // An odd total pads one more at the end, as in PyTorch.
            Padding::Same => {
                before[d] = (window - 1) / 2;
                size.saturating_add(window - 1)
            }
            Padding::Valid => size,
            Padding::Zeros(padding) => {
                before[d] = check_option(op, "padding", padding, 0)?[d];
                padded_extent(size, before[d])
            }
        };
        fail_if!(taps == 0 || padded < window; shape(op, [x, weight]),
            "the filter reaches over {window} of dimension {}, the padded input has {padded}", d + 2);
        extents[d] = (padded - window) / stride[d] + 1;
    }
    let out = run_and_record(op, &x, weight, bias, extents, [stride, before, dilation], groups, false)?;
    spatial::restore_rank::<N>(&out, unbatched)
}

/// Runs and records a convolution with spatial result `extents`, or with `transposed` the input gradient of
/// one. `steps` are the stride, the padding before each dimension and the dilation.
#[expect(clippy::too_many_arguments, reason = "PyTorch's arguments")]
fn run_and_record<const N: usize>(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    extents: [usize; N],
    steps: [[usize; N]; 3],
    groups: usize,
    transposed: bool,
) -> Result<Tensor> {
    let spatial = |t: &Tensor| kernel_axes::<N>(std::array::from_fn(|d| t.shape()[d + 2]), 1);
    let [stride, padding, dilation] = steps;
    let (input, output) = (spatial(x), kernel_axes(extents, 1));
    let (x_extents, y_extents) = if transposed { (output, input) } else { (input, output) };
    let geometry = ConvGeometry {
        op,
        rank: N.max(2),
        batch: x.shape()[0],
        groups,
        x_channels: weight.shape()[1] * groups,
        y_channels: weight.shape()[0],
        x_extents,
        y_extents,
        kernel: spatial(weight),
        stride: kernel_axes(stride, 1),
        padding: kernel_axes(padding, 0),
        dilation: kernel_axes(dilation, 1),
    };
    check_view_numel(op, &if transposed { geometry.x_shape() } else { geometry.y_shape() })?;
    let (x, weight) = (spatial::ensure_planar(x)?, spatial::ensure_planar(weight)?);
    let kind = if transposed { ConvKind::InputGrad } else { ConvKind::Forward };
    let out = geometry.multiply(kind, &x.detach(), &weight.detach(), bias.map(Tensor::detach).as_ref())?;
    Ok(attach_conv_grad(geometry, out, &x, &weight, bias, transposed))
}

/// Product between two of a convolution's tensors: y of x and w, x of y and w, or w of y and x. A transposed
/// convolution is the second.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ConvKind {
    Forward,
    InputGrad,
    WeightGrad,
}

/// Computes one kind. Its gradients are the other two kinds, so it is differentiable to any order.
fn conv_with_grad(geometry: ConvGeometry, kind: ConvKind, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = geometry.multiply(kind, &a.detach(), &b.detach(), None)?;
    if !autograd::compute_requires_grad(&[a, b]) {
        return Ok(out);
    }
    let (a_kept, b_kept) = (SavedTensor::input(a), SavedTensor::input(b));
    Ok(autograd::differentiable(geometry.op, out, &[a, b], move |g, ctx| {
        let (a, b) = (a_kept.unpack(ctx)?, b_kept.unpack(ctx)?);
        use ConvKind::{Forward, InputGrad, WeightGrad};
        let (first, second) = match kind {
            Forward => ((InputGrad, g, &b), (WeightGrad, g, &a)),
            InputGrad => ((Forward, g, &b), (WeightGrad, &a, g)),
            WeightGrad => ((Forward, &b, g), (InputGrad, &a, g)),
        };
        let grad = |requires_grad: bool, (kind, a, b): (ConvKind, &Tensor, &Tensor)| {
            requires_grad.then(|| conv_with_grad(geometry, kind, a, b)).transpose()
        };
        Ok(smallvec![grad(ctx.needs_input_grad[0], first)?, grad(ctx.needs_input_grad[1], second)?])
    }))
}

fn attach_conv_grad(
    geometry: ConvGeometry,
    out: Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    transposed: bool,
) -> Tensor {
    let inputs: SmallVec<[&Tensor; 3]> = [x, weight].into_iter().chain(bias).collect();
    // Each operand is saved for the gradient of the other.
    let kept_x = weight.requires_grad().then(|| SavedTensor::input(x));
    let kept_w = x.requires_grad().then(|| SavedTensor::input(weight));
    autograd::differentiable(geometry.op, out, &inputs, move |g, ctx| {
        let get = |kept: &Option<SavedTensor>| kept.as_ref().map(|t| t.unpack(ctx)).transpose();
        let [dx, dw] = match [get(&kept_w)?, get(&kept_x)?] {
            // Both gradients share their intermediate results.
            [Some(w), Some(x)] if !transposed && !ctx.create_graph() => {
                let cast_from = ctx.own_cast_source_dtype(1);
                geometry.backward(g, &w.detach(), &x.detach(), cast_from)?.map(Some)
            }
            [w, x] => {
                let into_x = if transposed { ConvKind::Forward } else { ConvKind::InputGrad };
                let dx = w.map(|w| conv_with_grad(geometry, into_x, g, &w));
                let dw = x.map(|x| {
                    let (y, x) = if transposed { (&x, g) } else { (g, &x) };
                    conv_with_grad(geometry, ConvKind::WeightGrad, y, x)
                });
                [dx.transpose()?, dw.transpose()?]
            }
        };
        let mut grads: InputGrads = smallvec![dx, dw];
        if let Some(&needs_grad) = ctx.needs_input_grad.get(2) {
            grads.push(needs_grad.then(|| bias_gradient(g)).transpose()?);
        }
        Ok(grads)
    })
}

#[track_caller]
fn convolve_transposed<const N: usize>(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &TransposedConvolutionOptions<N>,
) -> Result<Tensor> {
    operation!(op, autocast [x, weight, bias], |x, w, b| convolve_transposed(op, &x, &w, b.as_ref(), options));
    let &TransposedConvolutionOptions { stride, padding, output_padding, groups, dilation } = options;
    check_conv_operands(op, x, weight, bias, N, groups)?;
    let channels = weight.shape()[1].checked_mul(groups).filter(|&n| n <= MAX_TENSOR_NUMEL);
    let Some(channels) = channels else {
        fail!(argument(op), "{groups} groups make more channels than a tensor can have")
    };
    check_bias(op, bias, channels)?;
    let (stride, dilation) =
        (check_option(op, "stride", stride, 1)?, check_option(op, "dilation", dilation, 1)?);
    let padding = check_option(op, "padding", padding, 0)?;
    let more = check_option(op, "output_padding", output_padding, 0)?;
    let (x, unbatched) = spatial::ensure_batched::<N>(op, x)?;
    fail_if!(x.shape()[1] != weight.shape()[0]; shape(op, [x, weight]),
        "the input has {} channels, and the weight takes {} (input [batch, channels, ..], weight [channels, out of a group, ..]); \
                 give the layer the channels of the input", x.shape()[1], weight.shape()[0]);
    let mut extents = [0; N];
    for d in 0..N {
        fail_if!(more[d] >= stride[d].max(dilation[d]);
            argument(op), "output_padding {more:?} must be smaller than the stride or the dilation");
        let (size, taps) = (x.shape()[d + 2], weight.shape()[d + 2]);
        let steps = size.saturating_sub(1).saturating_mul(stride[d]);
        let full = steps.saturating_add(window_extent(taps, dilation[d])).saturating_add(more[d]);
        fail_if!(size == 0 || taps == 0 || full <= padded_extent(0, padding[d]);
            shape(op, [x, weight]), "dimension {} of the output would be empty", d + 2);
        extents[d] = full - padded_extent(0, padding[d]);
    }
    let out = run_and_record(op, &x, weight, bias, extents, [stride, padding, dilation], groups, true)?;
    spatial::restore_rank::<N>(&out, unbatched)
}

macro_rules! impl_convolutions {
    ($($n:literal $conv:ident $transpose:ident $shape:literal;)*) => {
        impl Tensor {
            $(
                #[doc = concat!("Computes the convolution (cross-correlation) of `self`, [batch, channels, ", $shape,
                    "] or without the batch, with a weight of [out, channels / groups, ", $shape, "].")]
                ///
                /// For the algorithm and its workspace see
                /// [`Device::set_im2col_max_bytes`](crate::runtime::device::Device::set_im2col_max_bytes).
                ///
                /// # Errors
                /// The shapes do not fit, the types differ, or the type is bool or u8.
                #[track_caller]
                pub fn $conv(
                    &self,
                    weight: &Tensor,
                    bias: Option<&Tensor>,
                    options: &ConvolutionOptions<$n>,
                ) -> Result<Tensor> {
                    convolve(stringify!($conv), self, weight, bias, options)
                }

                #[doc = concat!("Computes the transposed convolution of `self`, [batch, channels, ", $shape,
                    "] or without the batch, with a weight of [channels, out / groups, ", $shape, "].")]
                ///
                /// # Errors
                /// The shapes do not fit, the types differ, or the type is bool or u8.
                #[track_caller]
                pub fn $transpose(
                    &self,
                    weight: &Tensor,
                    bias: Option<&Tensor>,
                    options: &TransposedConvolutionOptions<$n>,
                ) -> Result<Tensor> {
                    convolve_transposed(stringify!($transpose), self, weight, bias, options)
                }
            )*
        }
    };
}

impl_convolutions! {
    1 conv1d conv_transpose1d "length";
    2 conv2d conv_transpose2d "height, width";
    3 conv3d conv_transpose3d "depth, height, width";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_large_volumes_are_divided_as_integers() {
        let geometry = |rank, x_extents| ConvGeometry {
            op: "conv",
            rank,
            batch: 1,
            groups: 1,
            x_channels: 1,
            y_channels: 1,
            x_extents,
            y_extents: x_extents,
            kernel: [1; 3],
            stride: [1; 3],
            padding: [0; 3],
            dilation: [1; 3],
        };
        assert!(geometry(2, [4096, 4096, 1]).supports_f32_division());
        assert!(geometry(3, [512, 512, 512]).supports_f32_division());
        // The quotient by the last extent has 11 million values, which f32 does not count one by one after a product.
        assert!(!geometry(3, [8192, 1366, 3]).supports_f32_division());
    }
}

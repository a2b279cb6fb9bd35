//! Convolutions as matrix products over column matrices in scratch memory (im2col).
//!
//! A column matrix has one row for each channel and filter tap, and one column for each output position. With
//! one group and aligned rows, each image has a matrix of its own. Otherwise one matrix for each group holds
//! the columns of all images of a chunk (`merges_images`), and its rows are padded with zeros. With one tap,
//! unit stride and no padding, the column matrix equals the image, which is then not copied.
//!
//! - Forward: the product of the weights and the columns of the input.
//! - Gradient of the input, for stride 1: the product of the transposed weights and the columns of the
//!   output's gradient, with mirrored taps. For other strides, a product gives the gradient of the columns,
//!   and col2im sums it.
//! - Gradient of the weights: the product of one side's positions and the other side's columns. If the
//!   gradient of the input has built the mirrored columns, the product reuses them.

use crate::ops::conv::{ConvGeometry, spatial_numel};
use crate::ops::kernel::launch::VECTOR_BYTES;
use crate::ops::matmul::gemm_into;
use crate::ops::prelude::*;
use crate::ops::reduce::{sum_first_dim, sum_first_dim_in_bf16, sum_first_dims};
use crate::ops::shape::pad::PadMode;

/// Limit in bytes of f32 weight gradients that are computed for each image and then summed.
const MAX_PARTIAL_GRAD_BYTES: usize = 64 << 20;
/// Bytes of such gradients for each copied byte from which one product over all images is faster, which copies images.
const MERGE_GAIN: usize = 4;
/// Limit in bytes of such gradients whose sum is also arranged as the weights are. Its reads are not in order, which
/// larger tensors than those in the card's cache do not allow.
const MAX_ARRANGED_GRAD_BYTES: usize = 8 << 20;
/// Limit of their number, and least number of elements of the sum. Beyond both, [`sum_first_dim`] may add in another
/// order.
const MAX_ARRANGED_GRADS: usize = 63;
const MIN_ARRANGED_NUMEL: usize = 64;
/// Smallest group, in output channels and in rows of the column matrix, for which im2col is faster.
const MIN_GROUP_CHANNELS: usize = 4;
const MIN_GROUP_ROWS: usize = 16;
/// Number of output positions from which im2col is faster also for fewer output channels, if all are one group. It is
/// faster from there for the gradient of weights with fewer rows too: that sum over positions has few results, so the
/// direct kernel has few threads, while matrix products split the sum.
const MIN_POSITIONS: usize = 1 << 14;
/// Number of output positions from which that gradient is worth the memory of a column matrix.
const MIN_COPIED_POSITIONS: usize = 1 << 17;
/// Rows and columns that one workgroup of a library's product computes, and number of workgroups that keep a card busy.
const LIBRARY_TILE: usize = 128;
const TARGET_TILES: usize = 256;
/// Fewest positions of a part of a row, for sums of products that are divided.
const MIN_FOLDED_POSITIONS: usize = 256;

/// Geometry of a column matrix for images \[images, groups · channels, input extents..\].
#[derive(Clone, Copy, Debug)]
pub(super) struct Im2colPlan {
    rank: usize,
    groups: usize,
    /// Number of channels of a group.
    channels: usize,
    input_extents: [usize; 3],
    output_extents: [usize; 3],
    kernel: [usize; 3],
    stride: [usize; 3],
    /// Step between taps and position of the first tap, modulo 2^32.
    tap_step: [u32; 3],
    first_tap: [u32; 3],
    /// If true, rows of a group are padded with zero rows to whole vectors, as matrix products need them.
    pads_rows: bool,
}

/// Range of images that share one column matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageChunk {
    pub(super) first_image: usize,
    pub(super) images: usize,
    merges_images: bool,
}

impl ImageChunk {
    /// Returns the images of the chunk. One chunk of all images, the most frequent case, needs no view.
    fn select_images(&self, images: &Tensor) -> Result<Tensor> {
        match self.images == images.shape()[0] {
            true => Ok(images.clone()),
            false => images.narrow(0, self.first_image, self.images),
        }
    }
}

impl Im2colPlan {
    /// Returns the plan for columns of the input.
    pub(super) fn for_input(g: &ConvGeometry) -> Self {
        Self {
            rank: g.rank,
            groups: g.groups,
            channels: g.x_channels / g.groups,
            input_extents: g.x_extents,
            output_extents: g.y_extents,
            kernel: g.kernel,
            stride: g.stride,
            tap_step: g.dilation.map(|d| d as u32),
            first_tap: g.padding.map(|p| (p as u32).wrapping_neg()),
            pads_rows: true,
        }
    }

    /// Returns the plan for columns of the output's gradient. Taps are mirrored; the stride is 1.
    pub(super) fn for_input_grad(g: &ConvGeometry) -> Self {
        Self {
            channels: g.y_channels / g.groups,
            input_extents: g.y_extents,
            output_extents: g.x_extents,
            tap_step: g.dilation.map(|d| (d as u32).wrapping_neg()),
            first_tap: g.padding.map(|p| p as u32),
            ..Self::for_input(g)
        }
    }

    /// Returns the plan for a filter with one tap over the output positions.
    fn with_unit_kernel(self, channels: usize) -> Self {
        let (kernel, stride, start) = ([1; 3], [1; 3], [0; 3]);
        Self { channels, input_extents: self.output_extents, kernel, stride, first_tap: start, ..self }
    }

    /// Returns the plan for columns along the width: those of a filter of height and depth 1, with stride 1 along both.
    pub(super) fn along_width(self) -> Self {
        let mut plan = Self { pads_rows: false, ..self };
        for d in 0..self.rank - 1 {
            plan.output_extents[d] = self.input_extents[d];
            (plan.kernel[d], plan.stride[d], plan.tap_step[d], plan.first_tap[d]) = (1, 1, 1, 0);
        }
        plan
    }

    fn output_positions(&self) -> usize {
        spatial_numel(&self.output_extents)
    }

    /// Returns the number of rows of a group, without padding.
    fn rows_per_group(&self) -> usize {
        self.channels * spatial_numel(&self.kernel)
    }

    /// Reports whether the column matrix equals the image.
    fn is_identity(&self) -> bool {
        let has_one_tap = self.kernel[..self.rank].iter().chain(&self.stride[..self.rank]).all(|&n| n == 1);
        has_one_tap
            && self.first_tap[..self.rank].iter().all(|&n| n == 0)
            && self.input_extents == self.output_extents
    }

    /// Returns the number of rows of a group, padded with zero rows to whole vectors.
    fn padded_rows_per_group(&self, dtype: DType, merges_images: bool) -> usize {
        let unpadded_rows = self.rows_per_group();
        if !self.pads_rows || self.is_identity() || (merges_images && spatial_numel(&self.kernel) == 1) {
            return unpadded_rows;
        }
        unpadded_rows.next_multiple_of(VECTOR_BYTES / dtype.size())
    }

    /// Splits the batch into chunks within the memory limit.
    pub(super) fn split_batch(
        &self,
        images: &Tensor,
        dtype: DType,
        merges_images: bool,
    ) -> impl Iterator<Item = ImageChunk> + use<> {
        let (max_bytes, images) = (images.device().im2col_max_bytes() as usize, images.shape()[0]);
        let bytes = self.groups
            * self.padded_rows_per_group(dtype, merges_images)
            * self.output_positions()
            * dtype.size();
        let max_images = if self.is_identity() && !merges_images { images } else { max_bytes / bytes.max(1) };
        // Each chunk begins at a vector boundary of the images.
        let image = self.groups * self.channels * spatial_numel(&self.input_extents);
        let unit = if image.is_multiple_of(VECTOR_BYTES) { 1 } else { VECTOR_BYTES };
        let max_images = (max_images / unit * unit).max(unit);
        (0..images.div_ceil(max_images)).map(move |k| ImageChunk {
            first_image: k * max_images,
            images: max_images.min(images - k * max_images),
            merges_images,
        })
    }

    /// Builds a chunk's column matrix: \[images, rows, positions\], or merged \[groups, rows, columns\].
    pub(super) fn build_columns(&self, images: &Tensor, chunk: ImageChunk) -> Result<Tensor> {
        let (dtype, positions) = (images.dtype(), self.output_positions());
        let part = chunk.select_images(images)?;
        if self.is_identity() && !chunk.merges_images {
            return part.reshape([chunk.images, self.channels, positions]);
        }
        let vector_width = VECTOR_BYTES / dtype.size();
        let depth = self.padded_rows_per_group(dtype, chunk.merges_images);
        let (outer, used_columns) =
            if chunk.merges_images { (1, chunk.images * positions) } else { (chunk.images, positions) };
        let vectors = used_columns.div_ceil(vector_width);
        let blocks = outer * self.groups;
        let out = empty_workspace(&[blocks, depth, vectors * vector_width], dtype, images.device())?;
        if self.is_identity() && used_columns == vectors * vector_width {
            let shape = [chunk.images, self.groups * self.channels, positions];
            part.reshape(shape)?.transpose(0, 1)?.copy_into(&out.reshape([shape[1], shape[0], shape[2]])?)?;
            return Ok(out);
        }
        let last = self.kernel[self.rank - 1];
        let rows = self.rows_per_group() / last;
        let threads = blocks * rows * vectors;
        let f32_division = [blocks * rows, used_columns, rows].iter().all(|&n| n < 1 << 20)
            && threads.max(used_columns + vector_width) < 1 << 31;
        let spec = kernel_spec! { "im2col", size: dtype.size(), rank: self.rank, f32_division };
        let params = kernel_params! {
            n: threads, vectors, rows, groups: self.groups, depth, used_depth: self.rows_per_group(),
            used_columns, positions,
            channels: self.channels * self.groups, group: self.channels,
            in_positions: spatial_numel(&self.input_extents),
            taps: self.kernel[..self.rank - 1].iter().product::<usize>(), in_offset: part.layout().offset(),
            in_size: self.input_extents, out_size: self.output_extents, kernel: self.kernel,
            stride: self.stride, tap_step: self.tap_step, first_tap: self.first_tap,
        };
        let params = params.loop_iterations(last + (depth - self.rows_per_group()) + 16);
        launch::launch(&spec, &[&part, &out], params, threads.div_ceil(WORKGROUP_SIZE))?;
        Ok(out)
    }
}

impl ConvGeometry {
    /// Reports whether this convolution runs as im2col and matrix products.
    ///
    /// Groups must be large enough. Depthwise filters have little to multiply, but column matrices as large as
    /// those of other filters.
    pub(crate) fn uses_im2col(&self, x: &Tensor) -> bool {
        (self.y_channels / self.groups >= MIN_GROUP_CHANNELS || self.has_many_positions())
            && self.x_channels / self.groups * spatial_numel(&self.kernel) >= MIN_GROUP_ROWS
            && self.supports_im2col(x)
    }

    /// Reports whether the gradient of the weights runs as im2col, which may hold although the other products run
    /// directly. Padded to [`MIN_GROUP_ROWS`], the columns take at most four times the memory of the output's gradient.
    pub(crate) fn weight_grad_uses_im2col(&self, x: &Tensor) -> bool {
        // The columns of a filter of one tap are the images themselves.
        let min_positions =
            if spatial_numel(&self.kernel) == 1 { MIN_POSITIONS } else { MIN_COPIED_POSITIONS };
        let is_long_sum = self.groups == 1
            && self.y_channels >= MIN_GROUP_CHANNELS
            && self.batch * spatial_numel(&self.y_extents) >= min_positions;
        self.uses_im2col(x) || (is_long_sum && self.supports_im2col(x))
    }

    /// Reports whether column matrices of this convolution exist: of its type, and within the limits of sizes.
    fn supports_im2col(&self, x: &Tensor) -> bool {
        let taps = spatial_numel(&self.kernel);
        let rows = |channels: usize| channels / self.groups * taps;
        let max_numel = (rows(self.x_channels) + VECTOR_BYTES) * self.groups * spatial_numel(&self.y_extents);
        let mirrored = (rows(self.y_channels) + VECTOR_BYTES) * self.groups * spatial_numel(&self.x_extents);
        // A chunk of unaligned images holds at least as many as reach the next vector boundary.
        let aligned =
            |channels: usize, extents| (channels * spatial_numel(extents)).is_multiple_of(VECTOR_BYTES);
        let is_aligned =
            aligned(self.x_channels, &self.x_extents) && aligned(self.y_channels, &self.y_extents);
        let merged = if is_aligned { 1 } else { VECTOR_BYTES.min(self.batch) };
        matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
            && self.batch * self.x_channels * spatial_numel(&self.x_extents) * spatial_numel(&self.y_extents)
                > 0
            && max_numel.max(if self.has_unit_stride() { mirrored } else { 0 }).saturating_mul(merged)
                < 1 << 31
            && x.device().im2col_max_bytes() > 0
    }

    /// Reports whether one group of any number of output channels runs as im2col. The gradient of strided images sums
    /// columns, which costs more than the direct kernel.
    fn has_many_positions(&self) -> bool {
        self.groups == 1
            && self.has_unit_stride()
            && self.batch * spatial_numel(&self.y_extents) >= MIN_POSITIONS
    }

    /// Reports whether the stride is 1 in every dimension.
    pub(crate) fn has_unit_stride(&self) -> bool {
        self.stride[..self.rank].iter().all(|&s| s == 1)
    }

    /// Returns the weights as \[groups, y channels, x channels · taps\].
    fn weight_rows(&self, w: &Tensor) -> Result<Tensor> {
        let unpadded_rows = self.x_channels / self.groups * spatial_numel(&self.kernel);
        w.reshape([self.groups, self.y_channels / self.groups, unpadded_rows])
    }

    /// Swaps the channel dimensions of weights \[groups, y channels, x channels, taps\] or of their gradient.
    fn swap_weight_channels(&self, w: &Tensor, from: usize, to: usize) -> Result<Tensor> {
        let [from, to] = [from, to].map(|channels| channels / self.groups);
        let w = w.reshape([self.groups, from, to, spatial_numel(&self.kernel)])?;
        w.permute([0, 2, 1, 3])?.reshape([self.groups, to, from * spatial_numel(&self.kernel)])
    }

    /// Reports whether a chunk's images share one matrix: for several groups, or if rows are not aligned.
    fn merges_images(&self, plan: &Im2colPlan, dtype: DType) -> bool {
        self.groups > 1 || !(plan.output_positions() * dtype.size()).is_multiple_of(VECTOR_BYTES)
    }

    /// Reports whether the gradient of the weights is one product over all images, instead of the sum of a product
    /// for each image. `rows` is the number of rows of the column matrix, and `copied` counts the elements that a
    /// matrix of all images copies.
    fn merges_weight_grads(&self, channels: usize, rows: usize, copied: usize, dtype: DType) -> bool {
        let partial = 4 * self.batch * channels * rows;
        let is_dear = partial > MAX_ARRANGED_GRAD_BYTES && partial > MERGE_GAIN * copied * dtype.size();
        is_dear || partial > MAX_PARTIAL_GRAD_BYTES
    }

    /// Computes y from x and w.
    pub(crate) fn im2col_forward(&self, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (x, w) = (x.contiguous()?, w.contiguous()?);
        let plan = Im2colPlan::for_input(self);
        let out = Tensor::empty(self.y_shape(), x.dtype(), x.device())?;
        let merges_images = self.merges_images(&plan, x.dtype());
        let weight_rows = self.pad_weight_rows(&self.weight_rows(&w)?, &plan, merges_images)?;
        for chunk in plan.split_batch(&x, x.dtype(), merges_images) {
            self.multiply_chunk(&weight_rows, &plan.build_columns(&x, chunk)?, &plan, chunk, &out)?;
        }
        add_bias(out, bias)
    }

    /// Computes the gradients of x and of w for stride 1.
    pub(crate) fn im2col_backward(
        &self,
        dy: &Tensor,
        w: &Tensor,
        x: &Tensor,
        cast_from: Option<DType>,
    ) -> Result<[Tensor; 2]> {
        let (dx, dw) = self.im2col_shared_grads(dy, w, Some((x, cast_from)))?;
        Ok([dx, dw.map_or_else(|| self.im2col_weight_grad(dy, x, cast_from), Ok)?])
    }

    /// Computes the gradient of x. A transposed convolution is this operation, with an optional bias.
    pub(crate) fn im2col_input_grad(&self, dy: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let dx = if self.has_unit_stride() {
            self.im2col_shared_grads(dy, w, None)?.0
        } else {
            self.col2im_input_grad(dy, w)?
        };
        add_bias(dx, bias)
    }

    /// Computes the gradient of x and, if `x` is present, of w. Both use the same mirrored columns. With `x` comes the
    /// type from which autocast cast the weights.
    fn im2col_shared_grads(
        &self,
        dy: &Tensor,
        w: &Tensor,
        x: Option<(&Tensor, Option<DType>)>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (dy, w) = (&dy.contiguous()?, &w.contiguous()?);
        let cast_from = x.and_then(|(_, cast_from)| cast_from);
        let x = x.map(|(x, _)| x.contiguous()).transpose()?;
        let (plan, dtype) = (Im2colPlan::for_input_grad(self), dy.dtype());
        let out = Tensor::empty(self.x_shape(), dtype, dy.device())?;
        // The product that gives the gradient of x has to be copied too.
        let is_merged = |x: &Tensor| {
            let copied = x.numel() + out.numel() + if plan.is_identity() { dy.numel() } else { 0 };
            self.merges_weight_grads(self.x_channels, plan.rows_per_group(), copied, dtype)
        };
        let merges_images = self.merges_images(&plan, dtype) || x.as_ref().is_some_and(is_merged);
        let weight_rows = self.swap_weight_channels(w, self.y_channels, self.x_channels)?;
        let weight_rows = self.pad_weight_rows(&weight_rows, &plan, merges_images)?;
        let positions = plan.with_unit_kernel(self.x_channels / self.groups);
        let mut sum = WeightGradSum::new(dtype, true, cast_from);
        for chunk in plan.split_batch(dy, dtype, merges_images) {
            let columns = plan.build_columns(dy, chunk)?;
            self.multiply_chunk(&weight_rows, &columns, &plan, chunk, &out)?;
            if let Some(x) = &x {
                sum.add_chunk(self, &positions.build_columns(x, chunk)?, &columns, chunk)?;
            }
        }
        if sum.arranged.is_some() {
            return Ok((out, sum.arranged));
        }
        let finish = |sum: Tensor| {
            let [from, to] = [self.x_channels, self.y_channels].map(|channels| channels / self.groups);
            let sum = sum.narrow(2, 0, plan.rows_per_group())?;
            let sum = sum.reshape([self.groups, from, to, spatial_numel(&self.kernel)])?;
            // With one group this is a view: the leaf, or the cast before it, copies the elements.
            sum.permute([0, 2, 1, 3])?.to_dtype(dtype)?.reshape(&self.w_shape()[..])
        };
        Ok((out, sum.total.map(finish).transpose()?))
    }

    /// Computes the gradient of w from columns of x. `cast_from` is the type from which autocast cast the weights.
    pub(crate) fn im2col_weight_grad(
        &self,
        dy: &Tensor,
        x: &Tensor,
        cast_from: Option<DType>,
    ) -> Result<Tensor> {
        let (dy, x) = (&dy.contiguous()?, &x.contiguous()?);
        let (plan, dtype) = (Im2colPlan::for_input(self), dy.dtype());
        let copied = dy.numel() + if plan.is_identity() { x.numel() } else { 0 };
        let merges_images = self.merges_images(&plan, dtype)
            || self.merges_weight_grads(self.y_channels, plan.rows_per_group(), copied, dtype);
        let positions = plan.with_unit_kernel(self.y_channels / self.groups);
        let mut sum = WeightGradSum::new(dtype, false, cast_from);
        for chunk in plan.split_batch(x, dtype, merges_images) {
            sum.add_chunk(self, &positions.build_columns(dy, chunk)?, &plan.build_columns(x, chunk)?, chunk)?;
        }
        if let Some(arranged) = sum.arranged {
            return Ok(arranged);
        }
        match sum.total {
            Some(sum) => {
                sum.narrow(2, 0, plan.rows_per_group())?.to_dtype(dtype)?.reshape(&self.w_shape()[..])
            }
            None => Tensor::zeros(self.w_shape(), dtype, dy.device()),
        }
    }

    /// Pads the rows of the first operand with zeros to the depth of the column matrix.
    fn pad_weight_rows(
        &self,
        weight_rows: &Tensor,
        plan: &Im2colPlan,
        merges_images: bool,
    ) -> Result<Tensor> {
        let more = plan.padded_rows_per_group(weight_rows.dtype(), merges_images) - plan.rows_per_group();
        if more == 0 {
            return Ok(weight_rows.clone());
        }
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        weight_rows.pad(&[0, more as isize], PadMode::Constant(0.0.into()))
    }

    /// Writes the product of `weight_rows` and `matrix` to the chunk's images of `out`.
    fn multiply_chunk(
        &self,
        weight_rows: &Tensor,
        matrix: &Tensor,
        plan: &Im2colPlan,
        chunk: ImageChunk,
        out: &Tensor,
    ) -> Result<()> {
        let (channels, positions) = (weight_rows.shape()[1], plan.output_positions());
        let out = chunk.select_images(out)?;
        if !chunk.merges_images {
            let out = out.reshape([chunk.images, channels, positions])?;
            return gemm_into(self.op, weight_rows, matrix, &out, false);
        }
        let all = empty_workspace(&[self.groups, channels, matrix.shape()[2]], out.dtype(), out.device())?;
        gemm_into(self.op, weight_rows, matrix, &all, false)?;
        let columns = all.shape()[2];
        let shape: Dims = smallvec![chunk.images, self.groups * channels, positions];
        let each = Layout::new(shape.clone(), smallvec![positions, columns, 1], all.layout().offset());
        all.with_layout(each).copy_into(&out.reshape(&shape[..])?)
    }

    /// Computes the gradient of x as the col2im sum over the gradient of the columns.
    fn col2im_input_grad(&self, dy: &Tensor, w: &Tensor) -> Result<Tensor> {
        let (dy, w) = (&dy.contiguous()?, &w.contiguous()?);
        let plan = Im2colPlan::for_input(self);
        let dtype = dy.dtype();
        let out = Tensor::empty(self.x_shape(), dtype, dy.device())?;
        let weight_rows = self.weight_rows(w)?.transpose(-2, -1)?;
        let merges_images = self.merges_images(&plan, dtype);
        let from = plan.with_unit_kernel(self.y_channels / self.groups);
        for chunk in plan.split_batch(dy, DType::F32, merges_images) {
            let positions = from.build_columns(dy, chunk)?;
            let blocks = if merges_images { self.groups } else { chunk.images };
            let shape = [blocks, plan.rows_per_group(), positions.shape()[2]];
            let all = empty_workspace(&shape, DType::F32, dy.device())?;
            gemm_into(self.op, &weight_rows, &positions, &all, false)?;
            self.col2im(&all, &plan, chunk, &out)?;
        }
        Ok(out)
    }

    /// Writes a chunk's images of `out` as sums over the columns that cover each element.
    fn col2im(&self, all: &Tensor, plan: &Im2colPlan, chunk: ImageChunk, out: &Tensor) -> Result<()> {
        let columns = all.shape()[2];
        let part = chunk.select_images(out)?;
        let n = part.numel();
        let image =
            if chunk.merges_images { plan.output_positions() } else { plan.rows_per_group() * columns };
        let f32_division = n / self.x_extents[self.rank - 1] < 1 << 20 && n < 1 << 31;
        let spec = kernel_spec! {
            "col2im", from: all.dtype().name(), dtype: part.dtype().name(), rank: self.rank, f32_division,
        };
        let names = [
            ["kernel_x", "kernel_y", "kernel_z"],
            ["stride_x", "stride_y", "stride_z"],
            ["dilation_x", "dilation_y", "dilation_z"],
        ];
        let values = [self.kernel, self.stride, self.dilation];
        let definitions = names.iter().zip(&values).flat_map(|(n, v)| n.iter().zip(v).take(self.rank));
        let spec = definitions.fold(spec, |spec, (name, &value)| spec.def(name, value));
        let params = kernel_params! {
            n, in_offset: all.layout().offset(), image_stride: image, line_stride: columns, channels: self.x_channels,
            taps: spatial_numel(&self.kernel), out_offset: part.layout().offset(), size: self.x_extents,
            positions: self.y_extents, padding: self.padding,
        };
        // Nested loops over the filter positions that may cover an element.
        let (iterations, _) = (0..self.rank).fold((0usize, 1usize), |(all, inner), axis| {
            let edge = self.x_extents[axis] + self.padding[axis];
            let reach = self.kernel[axis].saturating_sub(1).saturating_mul(self.dilation[axis]).min(edge);
            let inner = inner.saturating_mul(reach / self.stride[axis] + 2);
            (all.saturating_add(inner), inner)
        });
        let params = params.loop_iterations(iterations.saturating_mul(4));
        launch::launch(&spec, &[all, &part], params, n.div_ceil(4 * WORKGROUP_SIZE))
    }
}

/// Returns a bias as \[1, channels, 1, ..\].
pub(super) fn bias_per_channel(bias: &Tensor, rank: usize) -> Result<Tensor> {
    bias.reshape(&with_extent(&Dims::from_elem(1, rank), 1, bias.numel())[..])
}

/// Adds a bias to each channel, in place.
fn add_bias(out: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if let Some(bias) = bias {
        out.add_(&bias_per_channel(bias, out.rank())?)?;
    }
    Ok(out)
}

/// Weight gradient, summed over chunks.
struct WeightGradSum {
    /// \[groups, output channels, rows\] in f32, or in the result's type if there is only one chunk.
    total: Option<Tensor>,
    result_dtype: DType,
    /// If true, the output channels are the convolution's input channels.
    mirrored: bool,
    /// Type from which autocast cast the weights.
    cast_from: Option<DType>,
    /// The whole gradient in the shape of the weights and in f32, if one kernel has summed and arranged it.
    arranged: Option<Tensor>,
}

impl WeightGradSum {
    fn new(result_dtype: DType, mirrored: bool, cast_from: Option<DType>) -> Self {
        Self { total: None, result_dtype, mirrored, cast_from, arranged: None }
    }

    /// Sums the products of all images to the values that [`add_chunk`](Self::add_chunk) gives otherwise, but arranged
    /// as the weights and in f32, which saves the cast. Returns `None` if that would be slower, or has other values.
    fn sum_arranged(&self, g: &ConvGeometry, each: &Tensor) -> Result<Option<Tensor>> {
        let (images, taps) = (each.shape()[0], spatial_numel(&g.kernel));
        let fits = (self.cast_from, self.result_dtype) == (Some(DType::F32), DType::BF16)
            && g.groups == 1
            && images <= MAX_ARRANGED_GRADS
            && g.x_channels * g.y_channels * taps >= MIN_ARRANGED_NUMEL
            && each.numel() * each.dtype().size() <= MAX_ARRANGED_GRAD_BYTES;
        if !fits {
            return Ok(None);
        }
        let (rows, columns, order) = match self.mirrored {
            true => (g.x_channels, g.y_channels, [0, 2, 1, 3]),
            false => (g.y_channels, g.x_channels, [0, 1, 2, 3]),
        };
        let each = each.narrow(2, 0, columns * taps)?.reshape([images, rows, columns, taps])?;
        sum_first_dim_in_bf16(&each.permute(order)?)?.reshape(&g.w_shape()[..]).map(Some)
    }

    /// Adds the product of `positions` and the transposed `columns`.
    fn add_chunk(
        &mut self,
        g: &ConvGeometry,
        positions: &Tensor,
        columns: &Tensor,
        chunk: ImageChunk,
    ) -> Result<()> {
        let transposed = columns.transpose(-2, -1)?;
        let [blocks, height, _] = [0, 1, 2].map(|d| positions.shape()[d]);
        let wide = columns.shape()[1];
        let shape = [blocks, height, wide];
        if chunk.merges_images || chunk.images == 1 {
            let dtype = if chunk.images == g.batch { self.result_dtype } else { DType::F32 };
            let (total, add) = match self.total.take() {
                Some(total) => (total, true),
                None => (Tensor::empty(shape, dtype, positions.device())?, false),
            };
            gemm_into(g.op, positions, &transposed, &total, add)?;
            self.total = Some(total);
            return Ok(());
        }
        let parts = count_folded_parts(positions, wide);
        if parts > 1 {
            let dtype = if chunk.images == g.batch { self.result_dtype } else { DType::F32 };
            let sum = sum_folded_products(g.op, positions, columns, parts, dtype)?;
            return self.add_sum(sum);
        }
        let each = empty_workspace(&shape, DType::F32, positions.device())?;
        gemm_into(g.op, positions, &transposed, &each, false)?;
        if chunk.images == g.batch {
            self.arranged = self.sum_arranged(g, &each)?;
            if self.arranged.is_some() {
                return Ok(());
            }
        }
        // The sum over a whole batch is rounded as it is written.
        let dtype = if chunk.images == g.batch { self.result_dtype } else { DType::F32 };
        self.add_sum(sum_first_dim(&each, dtype)?)
    }

    /// Adds the sum of a chunk.
    fn add_sum(&mut self, sum: Tensor) -> Result<()> {
        match &self.total {
            Some(total) => total.add_(&sum),
            None => {
                self.total = Some(sum);
                Ok(())
            }
        }
    }
}

/// Returns the number of parts into which [`sum_folded_products`] divides the rows of `positions` \[images, height,
/// positions\] and of column matrices of `wide` rows: a power of two, or 1 if products fill the device without.
fn count_folded_parts(positions: &Tensor, wide: usize) -> usize {
    let [images, height, length] = [0, 1, 2].map(|d| positions.shape()[d]);
    // The crate's own products split such sums.
    if !positions.device().library_features().matmul || wide == 0 {
        return 1;
    }
    let tiles = images * height.div_ceil(LIBRARY_TILE);
    let most = (TARGET_TILES / tiles.max(1)).min(LIBRARY_TILE / wide).max(1);
    let divides = |parts: usize| {
        let part = length / parts;
        length.is_multiple_of(parts)
            && part >= MIN_FOLDED_POSITIONS
            && (part * positions.dtype().size()).is_multiple_of(VECTOR_BYTES)
    };
    let powers = (1..usize::BITS).map(|bit| 1usize << bit).take_while(|&parts| parts <= most);
    powers.filter(|&parts| divides(parts)).last().unwrap_or(1)
}

/// Multiplies `positions` \[images, height, positions\] by the transpose of `columns` \[images, rows, positions\], and
/// sums over the images. Returns \[1, height, rows\] of type `dtype`.
///
/// A library computes a product of few rows and columns by one workgroup for each image, however long its sums are.
/// So each row is divided into `parts`, which become rows of their own. The product then has a block of `parts` by
/// `parts` for each element of the result: the elements on the diagonal of a block are those of equal parts, and the
/// others are not used.
fn sum_folded_products(
    op: &'static str,
    positions: &Tensor,
    columns: &Tensor,
    parts: usize,
    dtype: DType,
) -> Result<Tensor> {
    let [images, height, length] = [0, 1, 2].map(|d| positions.shape()[d]);
    let rows = columns.shape()[1];
    let fold = |t: &Tensor, rows: usize| t.reshape([images, rows * parts, length / parts]);
    let shape = [images, height * parts, rows * parts];
    let each = empty_workspace(&shape, DType::F32, positions.device())?;
    gemm_into(op, &fold(positions, height)?, &fold(columns, rows)?.transpose(-2, -1)?, &each, false)?;
    let line = rows * parts;
    let strides: Dims = smallvec![height * parts * line, line + 1, parts * line, parts];
    let shape: Dims = smallvec![images, parts, height, rows];
    let diagonals = Layout::new(shape, strides, each.layout().offset());
    sum_first_dims(&each.with_layout(diagonals), 2, dtype)?.reshape([1, height, rows])
}

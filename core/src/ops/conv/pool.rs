//! Pooling of images [N, C, H, W] or [C, H, W] and of signals [N, C, L] or [C, L].
//!
//! 16-bit floats are computed in f32.

use crate::ops::conv::spatial::{padded_extent, window_extent};
use crate::ops::kernel::heuristics::split_reduction;
use crate::ops::prelude::*;

/// Number of elements of a window above which a workgroup, instead of a thread, reduces the window.
const WORKGROUP_WINDOW_MIN: usize = 1024;

/// Options of a pooling operation over `N` dimensions. An extent of the window stands for options with PyTorch's
/// defaults.
///
/// A dimension of extent `n` becomes (n + 2 padding - dilation (kernel - 1) - 1) / stride + 1, rounded down, or up with
/// `ceil_mode`.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::Pool2dOptions, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let x = Tensor::zeros([1, 3, 8, 6], DType::F32, &device)?;
/// assert_eq!(x.max_pool2d(2)?.shape(), [1, 3, 4, 3]);
/// assert_eq!(x.avg_pool2d([4, 2])?.shape(), [1, 3, 2, 3]);
/// let window = Pool2dOptions { stride: [2, 2], padding: [1, 1], ..Pool2dOptions::new(3) };
/// assert_eq!(x.max_pool2d(window)?.shape(), [1, 3, 4, 3]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions<const N: usize> {
    /// Extents of the window.
    pub kernel: [usize; N],
    /// Distance between windows; by default the kernel, as in PyTorch.
    pub stride: [usize; N],
    /// Padding at each side, at most half the kernel.
    pub padding: [usize; N],
    /// Distance between the elements of a window, for maxima only.
    pub dilation: [usize; N],
    /// If true, the last window may reach beyond the padded input.
    pub ceil_mode: bool,
    /// If true, averages count the padding.
    pub count_include_pad: bool,
    /// Divisor of averages, in place of the number of elements.
    pub divisor_override: Option<i64>,
}

/// Non-overlapping windows with one extent in all dimensions.
impl<const N: usize> From<usize> for PoolOptions<N> {
    fn from(kernel: usize) -> Self {
        Self::new(kernel)
    }
}

/// Non-overlapping windows.
impl<const N: usize> From<[usize; N]> for PoolOptions<N> {
    fn from(kernel: [usize; N]) -> Self {
        Self::from_kernel(kernel)
    }
}

/// Options of signal pooling.
pub type Pool1dOptions = PoolOptions<1>;
/// Options of image pooling: height and width.
pub type Pool2dOptions = PoolOptions<2>;
/// Options of volume pooling: depth, height and width.
pub type Pool3dOptions = PoolOptions<3>;

impl<const N: usize> PoolOptions<N> {
    /// Returns options for non-overlapping windows with one extent in all dimensions.
    #[must_use]
    pub fn new(kernel: usize) -> Self {
        Self::from_kernel([kernel; N])
    }

    /// Returns options for non-overlapping windows.
    #[must_use]
    pub fn from_kernel(kernel: [usize; N]) -> Self {
        Self {
            kernel,
            stride: kernel,
            padding: [0; N],
            dilation: [1; N],
            ceil_mode: false,
            count_include_pad: true,
            divisor_override: None,
        }
    }

    /// Restricts the options to the named axes, with extent 1 in the others.
    pub(crate) fn restrict_to_axes(&self, axes: [Option<usize>; 2]) -> Pool2dOptions {
        let of = |values: [usize; N], rest: usize| axes.map(|axis| axis.map_or(rest, |axis| values[axis]));
        Pool2dOptions {
            kernel: of(self.kernel, 1),
            stride: of(self.stride, 1),
            padding: of(self.padding, 0),
            dilation: of(self.dilation, 1),
            ceil_mode: self.ceil_mode,
            count_include_pad: self.count_include_pad,
            divisor_override: self.divisor_override,
        }
    }

    /// Reports whether a window has no elements, which takes a dilation.
    pub(crate) fn has_empty_windows(&self, extents: [usize; N], outs: [usize; N]) -> bool {
        let is_empty = |axis: usize, o: usize| {
            let (k, s, p, d) =
                (self.kernel[axis], self.stride[axis], self.padding[axis], self.dilation[axis]);
            let skipped = p.saturating_sub(o * s).div_ceil(d);
            skipped >= k || o * s + skipped * d - p >= extents[axis]
        };
        // Of the windows that begin inside the plane, the last one begins farthest to the end.
        let has_empty = |axis: usize| {
            let in_padding = self.padding[axis].div_ceil(self.stride[axis]).min(outs[axis]);
            (0..in_padding).chain(outs[axis].checked_sub(1)).any(|o| is_empty(axis, o))
        };
        self.dilation != [1; N] && (0..N).any(has_empty)
    }

    /// Returns the index that PyTorch reports for each window without elements: the first one in the plane, as i32.
    pub(crate) fn empty_window_indices(
        &self,
        extents: [usize; N],
        outs: [usize; N],
        device: &Device,
    ) -> Result<Tensor> {
        let mut indices = Tensor::zeros((), DType::I32, device)?;
        for axis in 0..N {
            let (s, p, d) = (self.stride[axis], self.padding[axis], self.dilation[axis]);
            let begins = Tensor::arange(0, outs[axis], 1, DType::I32, device)?.mul(s)?.sub(p)?;
            let skipped = begins.neg()?.clamp_min(0)?.add(d - 1)?.floor_divide(d)?;
            let firsts = begins.add(&skipped.mul(d)?)?;
            indices = indices.unsqueeze(-1)?.mul(extents[axis])?.add(&firsts)?;
        }
        Ok(indices)
    }

    #[track_caller]
    fn output_extent(&self, op: &'static str, axis: usize, extent: usize) -> Result<usize> {
        let (k, s, p, d) = (self.kernel[axis], self.stride[axis], self.padding[axis], self.dilation[axis]);
        // Larger values fit no input, and positions would overflow the kernel's integers.
        let large = [k, s, p, d].iter().any(|&n| n > i32::MAX as usize);
        fail_if!(large || k == 0 || s == 0 || d == 0 || p > k / 2; argument(op),
            "kernel, stride and dilation are at least 1 and padding at most half the kernel; got {self:?}");
        // The last window may end this far after the padding.
        let ceil_padding = if self.ceil_mode { s - 1 } else { 0 };
        let (padded, window) = (padded_extent(extent, p), window_extent(k, d));
        fail_if!(padded.saturating_add(ceil_padding) < window;
            argument(op), "a window of {window} does not fit an extent of {padded} with padding");
        let mut n = (padded + ceil_padding - window) / s + 1;
        // Drop a last window that would lie entirely in the padding.
        if self.ceil_mode && (n - 1) * s >= extent + p {
            n -= 1;
        }
        Ok(n)
    }
}

kernel_variants! {
    /// Pass of `pool.wgsl`.
    enum PoolPass {
        Forward = "forward",
        Backward = "backward",
    }
}

kernel_variants! {
    /// Division of the work of `pool.wgsl`.
    enum PoolStage {
        /// A thread for each element.
        Each = "each",
        /// A workgroup for each element.
        Whole = "whole",
        /// A workgroup for a part of an element's window.
        Parts = "parts",
        /// Joins the parts.
        Join = "join",
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PoolKind {
    Max,
    Avg,
    AdaptiveMax,
    AdaptiveAvg,
}

impl PoolKind {
    fn is_max(self) -> bool {
        matches!(self, Self::Max | Self::AdaptiveMax)
    }
    fn is_adaptive(self) -> bool {
        matches!(self, Self::AdaptiveMax | Self::AdaptiveAvg)
    }
}

/// Parameters of one pooling operation.
#[derive(Clone)]
struct PoolPlan {
    op: &'static str,
    kind: PoolKind,
    options: Pool2dOptions,
    input_shape: Dims,
    output_shape: Dims,
}

impl PoolPlan {
    #[track_caller]
    fn new(
        op: &'static str,
        kind: PoolKind,
        x: &Tensor,
        window: Pool2dOptions,
        outs: Option<[usize; 2]>,
    ) -> Result<Self> {
        let (&[.., h, w], 3..=4) = (x.shape(), x.rank()) else {
            fail!(shape(op, [x]), "takes [N, C, H, W] or [C, H, W]")
        };
        // Averages of integers round towards zero, as in PyTorch. Adaptive pooling takes floats only there.
        let is_supported = match kind {
            PoolKind::Max | PoolKind::Avg => x.dtype() != DType::Bool,
            PoolKind::AdaptiveMax | PoolKind::AdaptiveAvg => x.dtype().is_float(),
        };
        if !is_supported {
            let expected = if kind.is_adaptive() { "floats" } else { "integers and floats" };
            fail!(dtype(op, x.dtype()), "takes {expected}; cast with `to_dtype`")
        }
        launch::check_device_dtype(op, x.dtype(), x.device())?;
        let [oh, ow] = match outs {
            Some(_) if h * w == 0 => fail!(shape(op, [x]), "takes planes that are not empty"),
            Some(outs) => outs,
            None => [window.output_extent(op, 0, h)?, window.output_extent(op, 1, w)?],
        };
        let rank = x.rank();
        let output_shape = with_extent(&with_extent(x.shape(), rank - 2, oh), rank - 1, ow);
        Ok(Self { op, kind, options: window, input_shape: x.shape().into(), output_shape })
    }

    #[track_caller]
    fn adaptive_max(x: &Tensor, output: [usize; 2]) -> Result<Self> {
        Self::new("adaptive_max_pool2d", PoolKind::AdaptiveMax, x, Pool2dOptions::new(1), Some(output))
    }

    /// Returns the height and width of the input, then of the result.
    fn plane_extents(&self) -> [usize; 4] {
        let plane = |d: &Dims| [d[d.len() - 2], d[d.len() - 1]];
        let ([h, w], [oh, ow]) = (plane(&self.input_shape), plane(&self.output_shape));
        [h, w, oh, ow]
    }

    /// Returns the largest number of rows and columns that contribute to one element of the pass.
    fn max_contributors(&self, forward: bool) -> [usize; 2] {
        let [h, w, oh, ow] = self.plane_extents();
        [(0, h, oh), (1, w, ow)].map(|(axis, from, to)| {
            let (k, s, d) =
                (self.options.kernel[axis], self.options.stride[axis], self.options.dilation[axis]);
            match (forward, self.kind.is_adaptive()) {
                (true, true) => from.min(from.div_ceil(to.max(1)) + 1),
                (true, false) => k.min(from.div_ceil(d)),
                (false, true) => to.min(to / from.max(1) + 3),
                (false, false) => to.min((k - 1) * d / s + 1),
            }
        })
    }

    /// Reports whether a window of a maximum has no elements.
    fn has_empty_windows(&self) -> bool {
        let [h, w, oh, ow] = self.plane_extents();
        self.kind == PoolKind::Max
            && numel(&self.output_shape) > 0
            && self.options.has_empty_windows([h, w], [oh, ow])
    }

    fn launch_pass(
        &self,
        pass: PoolPass,
        from: &Tensor,
        to: &Tensor,
        indices: Option<&Tensor>,
    ) -> Result<()> {
        let forward = pass == PoolPass::Forward;
        let [rows, cols] = self.max_contributors(forward);
        let n = to.numel();
        if n == 0 {
            return Ok(());
        }
        let steps = rows * cols;
        let [h, w, oh, ow] = self.plane_extents();
        // Extents of tensors without elements may have a product beyond 64 bits.
        let large = self.kind.is_adaptive()
            && ((h.max(w) + 1) as u64).saturating_mul((oh.max(ow) + 1) as u64) >= 1 << 32;
        let key = |stage| (pass, stage, large);
        // If products of extents need 64 bits, finding the windows over an element takes 32 iterations each.
        let (fixed, each) = if large { (8 * 32, if forward { 1 } else { 5 * 32 }) } else { (8, 1) };
        let per_thread = if to.dtype().size() <= 2 { 4 } else { 1 };
        if steps * each <= WORKGROUP_WINDOW_MIN {
            let (params, groups) = (self.stage_params(n, 1, 0), n.div_ceil(per_thread * WORKGROUP_SIZE));
            let params = params.loop_iterations(per_thread * (steps * each + rows * each + fixed));
            return self.launch_stage(key(PoolStage::Each), [from, to], [indices, None], params, groups);
        }
        let (splits, chunk) = split_reduction(n, steps, WORKGROUP_SIZE, each);
        let params = self
            .stage_params(n, splits, chunk)
            .loop_iterations(chunk.div_ceil(WORKGROUP_SIZE) * each + fixed);
        if splits == 1 {
            return self.launch_stage(key(PoolStage::Whole), [from, to], [indices, None], params, n);
        }
        let partial_dtype = match to.dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            DType::U8 => DType::U32,
            other => other,
        };
        let part = |dtype| empty_workspace(&[splits, n], dtype, to.device());
        let parts = part(partial_dtype)?;
        let part_indices = (forward && self.kind.is_max()).then(|| part(DType::I32)).transpose()?;
        let stage_indices = [part_indices.as_ref().or(indices), None];
        self.launch_stage(key(PoolStage::Parts), [from, &parts], stage_indices, params, n * splits)?;
        let params = self.stage_params(n, splits, 0).loop_iterations(splits.div_ceil(WORKGROUP_SIZE) + fixed);
        let indices = [indices.filter(|_| forward), part_indices.as_ref()];
        self.launch_stage(key(PoolStage::Join), [&parts, to], indices, params, n)
    }

    fn stage_params(&self, n: usize, splits: usize, chunk: usize) -> KernelParams {
        let w = &self.options;
        let [h, width, oh, ow] = self.plane_extents();
        let divisor = w.divisor_override.unwrap_or(0);
        let pairs = |[a, b]: [usize; 2], [c, d]: [usize; 2]| [a, b, c, d];
        kernel_params! {
            n, count_include_pad: w.count_include_pad, divisor: divisor as f32, splits,
            extents: [h, width, oh, ow], kernel_stride: pairs(w.kernel, w.stride),
            pad_dilation: pairs(w.padding, w.dilation), chunk, divisor_low: divisor as u32,
            divisor_high: (divisor >> 32) as u32,
        }
    }

    /// Launches one kernel. The indices are those of the result, and those of its parts.
    fn launch_stage(
        &self,
        (pass, stage, large): (PoolPass, PoolStage, bool),
        [from, to]: [&Tensor; 2],
        [indices, part_indices]: [Option<&Tensor>; 2],
        params: KernelParams,
        groups: usize,
    ) -> Result<()> {
        // The element type, even if the partial results have another type.
        let dtype = if stage == PoolStage::Parts { from.dtype() } else { to.dtype() };
        let spec = kernel_spec! {
            "pool", dtype: launch::shader_dtype_name(dtype, to.device()),
            kind: if self.kind.is_max() { "max" } else { "avg" }, adaptive: self.kind.is_adaptive(), large,
            pass, stage,
        };
        launch::launch(&spec, &bindings![from, to, indices, part_indices], params, groups)
    }

    /// Returns the result, and the indices of maxima.
    #[track_caller]
    fn run(self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        operation!(self.op);
        // The kernel counts elements from the start of the storage.
        let input = contiguous_zero_offset(&x.detach())?;
        let result = |dtype| Tensor::empty(&self.output_shape, dtype, x.device());
        let out = result(x.dtype())?;
        let indices = self.kind.is_max().then(|| result(DType::I32)).transpose()?;
        self.launch_pass(PoolPass::Forward, &input, &out, indices.as_ref())?;
        let saved_indices = indices.clone();
        let (op, plan) = (self.op, self.clone());
        let forward_indices = indices.clone();
        let gaps = self.kind.is_max() && self.has_empty_windows();
        // The argmax is fixed after the forward pass, so the selection is linear.
        let forward = move |x: &Tensor| {
            let x = contiguous_zero_offset(x)?;
            if let Some(indices) = &forward_indices {
                let planes: usize = plan.output_shape[..plan.output_shape.len() - 2].iter().product();
                let lines = x.reshape([planes, x.numel() / planes.max(1)])?;
                let indices = indices.reshape([planes, indices.numel() / planes.max(1)])?;
                if !gaps {
                    return lines.gather(1, &indices)?.reshape(&plan.output_shape[..]);
                }
                // A window without elements gets no gradient.
                let selected = lines.gather(1, &indices.clamp_min(0)?)?;
                return selected.masked_fill(&indices.lt(0)?, 0.0)?.reshape(&plan.output_shape[..]);
            }
            let out = Tensor::empty(&plan.output_shape, x.dtype(), x.device())?;
            plan.launch_pass(PoolPass::Forward, &x, &out, None)?;
            Ok(out)
        };
        let out = autograd::linear_differentiable(op, out, x, forward, move |g| {
            let g = contiguous_zero_offset(g)?;
            let grad = Tensor::empty(&self.input_shape, g.dtype(), g.device())?;
            self.launch_pass(PoolPass::Backward, &g, &grad, saved_indices.as_ref())?;
            Ok(grad)
        });
        Ok((out, indices))
    }

    /// Returns the result and the i32 index of each maximum in its plane; -1 for a window without elements.
    #[track_caller]
    fn run_with_i32_indices(self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let op = self.op;
        let (out, indices) = self.run(x)?;
        // invariant: a maximum has indices
        let indices = indices.ok_or_else(|| Error::argument(op, "no indices were kept"))?;
        Ok((out, indices))
    }

    /// Returns the result and the i64 index of each maximum in its plane.
    #[track_caller]
    fn run_with_indices(self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let has_empty_windows = self.has_empty_windows();
        let ([h, w, oh, ow], options) = (self.plane_extents(), self.options);
        let (out, indices) = self.run_with_i32_indices(x)?;
        if !has_empty_windows {
            return Ok((out, indices.to_dtype(DType::I64)?));
        }
        let of_empty = options.empty_window_indices([h, w], [oh, ow], out.device())?;
        let indices = of_empty.broadcast_to(indices.shape())?.where_(&indices.lt(0)?, &indices)?;
        Ok((out, indices.to_dtype(DType::I64)?))
    }
}

/// Pools as [`Tensor::max_pool2d_with_indices`] does, with i32 indices, and -1 for windows without elements.
#[track_caller]
pub(crate) fn max_pool2d_with_i32_indices(x: &Tensor, window: Pool2dOptions) -> Result<(Tensor, Tensor)> {
    PoolPlan::new("max_pool2d", PoolKind::Max, x, window, None)?.run_with_i32_indices(x)
}

/// Pools as [`Tensor::adaptive_max_pool2d_with_indices`] does, with i32 indices.
#[track_caller]
pub(crate) fn adaptive_max_pool2d_with_i32_indices(
    x: &Tensor,
    output: [usize; 2],
) -> Result<(Tensor, Tensor)> {
    PoolPlan::adaptive_max(x, output)?.run_with_i32_indices(x)
}

impl Tensor {
    /// Returns the maximum of each window, or NaN if the window has one: PyTorch's `max_pool2d`. Images are
    /// \[N, C, H, W\] or \[C, H, W\].
    ///
    /// A dilated window may lie entirely in the padding. Its maximum is minus infinity or the smallest
    /// integer, and it gets no gradient.
    ///
    /// # Errors
    /// A window does not fit; the dtype is bool.
    #[track_caller]
    pub fn max_pool2d(&self, window: impl Into<Pool2dOptions>) -> Result<Tensor> {
        let window = window.into();
        Ok(PoolPlan::new("max_pool2d", PoolKind::Max, self, window, None)?.run(self)?.0)
    }

    /// Returns [`max_pool2d`](Self::max_pool2d) and the i64 index of each maximum in its plane.
    ///
    /// The index is that of the last NaN, or else of the first maximum. A window without elements has the
    /// index at which PyTorch starts its search, which may lie outside of the plane.
    ///
    /// # Errors
    /// A window does not fit; the dtype is bool.
    #[track_caller]
    pub fn max_pool2d_with_indices(&self, window: impl Into<Pool2dOptions>) -> Result<(Tensor, Tensor)> {
        let window = window.into();
        PoolPlan::new("max_pool2d", PoolKind::Max, self, window, None)?.run_with_indices(self)
    }

    /// Returns the average of each window, computed in the dtype, or in f32 for 16-bit floats. Averages of
    /// integers are rounded towards zero.
    ///
    /// # Errors
    /// A window does not fit, or the dtype is bool or an integer type that cannot hold the divisor.
    #[track_caller]
    pub fn avg_pool2d(&self, window: impl Into<Pool2dOptions>) -> Result<Tensor> {
        let window = window.into();
        fail_if!(window.dilation != [1; 2]; argument("avg_pool2d"), "averages have no dilation");
        fail_if!(window.divisor_override == Some(0); argument("avg_pool2d"), "the divisor is not 0");
        if let Some(divisor) = window.divisor_override.filter(|_| self.dtype().is_int()) {
            Scalar::Int(divisor).checked_cast("avg_pool2d", self.dtype())?;
        }
        Ok(PoolPlan::new("avg_pool2d", PoolKind::Avg, self, window, None)?.run(self)?.0)
    }

    /// Averages over windows that divide the plane evenly, one for each output element: PyTorch's
    /// `adaptive_avg_pool2d`. `output` has the height and width of the result.
    ///
    /// # Errors
    /// The dtype is not a float, or an extent of the input is 0.
    #[track_caller]
    pub fn adaptive_avg_pool2d(&self, output: [usize; 2]) -> Result<Tensor> {
        let window = Pool2dOptions { count_include_pad: false, ..Pool2dOptions::new(1) };
        let plan = PoolPlan::new("adaptive_avg_pool2d", PoolKind::AdaptiveAvg, self, window, Some(output))?;
        Ok(plan.run(self)?.0)
    }

    /// Returns the maxima of windows that divide the plane evenly, one for each output element: PyTorch's
    /// `adaptive_max_pool2d`. `output` has the height and width of the result.
    ///
    /// # Errors
    /// The dtype is not a float, or an extent of the input is 0.
    #[track_caller]
    pub fn adaptive_max_pool2d(&self, output: [usize; 2]) -> Result<Tensor> {
        Ok(PoolPlan::adaptive_max(self, output)?.run(self)?.0)
    }

    /// Returns [`adaptive_max_pool2d`](Self::adaptive_max_pool2d) and each maximum's i64 index in its plane.
    #[track_caller]
    pub fn adaptive_max_pool2d_with_indices(&self, output: [usize; 2]) -> Result<(Tensor, Tensor)> {
        PoolPlan::adaptive_max(self, output)?.run_with_indices(self)
    }

    /// Applies [`adaptive_max_pool2d`](Self::adaptive_max_pool2d) to signals \[N, C, L\] or \[C, L\].
    #[track_caller]
    pub fn adaptive_max_pool1d(&self, output: usize) -> Result<Tensor> {
        self.unsqueeze(-2)?.adaptive_max_pool2d([1, output])?.squeeze(-2)
    }

    /// Returns [`adaptive_max_pool1d`](Self::adaptive_max_pool1d) and each maximum's i64 index in its signal.
    #[track_caller]
    pub fn adaptive_max_pool1d_with_indices(&self, output: usize) -> Result<(Tensor, Tensor)> {
        let (out, indices) = self.unsqueeze(-2)?.adaptive_max_pool2d_with_indices([1, output])?;
        Ok((out.squeeze(-2)?, indices.squeeze(-2)?))
    }
}

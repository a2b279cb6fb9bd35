//! Softmax and log-softmax: one kernel forward and one backward, for any strides.

use crate::ops::kernel::heuristics::{RowConfig, split_reduction, supports_vec4};
use crate::ops::norm::{check_is_f64, norm_compute_dtype, norm_result_dtype};
use crate::ops::prelude::*;
use crate::runtime::device::KernelKey;
use crate::tensor::layout::collapse_tensor_dims;

/// Rows of a tensor along one dimension, and their distribution over threads.
pub(crate) struct RowLayout {
    pub(crate) rows: usize,
    /// Elements of a row.
    pub(crate) extent: usize,
    /// Elements of the dimensions after the rows' dimension.
    pub(crate) inner: usize,
    /// True if neighbouring threads hold neighbouring rows.
    pub(crate) across: bool,
    stride: usize,
    shape: Dims,
    strides: Dims,
}

impl RowLayout {
    pub(crate) fn new(op: &'static str, x: &Tensor, dim: isize) -> Result<Self> {
        let d = normalize_dim(op, dim, x.rank())?;
        let extent = extent_or_one(x, d);
        let inner: usize = x.shape().iter().skip(d + 1).product();
        let dims = x.shape().iter().copied().zip(x.strides().iter().copied()).enumerate();
        let (shape, strides) = collapse_tensor_dims(dims.filter(|(k, _)| *k != d).map(|(_, dim)| dim));
        launch::check_rank(op, shape.len())?;
        let across = inner > 1;
        Ok(Self {
            rows: x.numel() / extent.max(1),
            extent,
            inner,
            across,
            stride: x.strides().get(d).copied().unwrap_or(1),
            shape,
            strides,
        })
    }

    /// Returns the parameters that locate rows: six words, the fields that `more` adds, then shape and strides.
    pub(crate) fn params(&self, x: &Tensor, more: impl FnOnce(KernelParams) -> KernelParams) -> KernelParams {
        let params = kernel_params! {
            rows: self.rows, extent: self.extent, inner: self.inner, rank: self.shape.len(),
            offset: x.layout().offset(), stride: self.stride,
        };
        kernel_params! { ..more(params); shape: &self.shape, strides: &self.strides }
    }

    /// Returns the register layout for rows of `x`, with at most `max_steps` vec4 steps for each thread.
    pub(crate) fn row_config(&self, x: &Tensor, max_steps: usize) -> RowConfig {
        let quads =
            supports_vec4(x.dtype()) && self.is_vec4_aligned(x) && self.extent.is_multiple_of(VEC4_WIDTH);
        if self.across {
            RowConfig::for_strided_rows(self.extent)
        } else {
            RowConfig::for_contiguous_rows(self.extent, quads, max_steps)
        }
    }

    /// Returns true if every row of `x` is contiguous and starts at a multiple of four elements.
    pub(crate) fn is_vec4_aligned(&self, x: &Tensor) -> bool {
        let aligned = |n: &usize| n.is_multiple_of(VEC4_WIDTH);
        self.stride == 1 && aligned(&x.layout().offset()) && self.strides.iter().all(aligned)
    }
}

pub(crate) fn choose_threads_per_row(extent: usize, across: bool) -> usize {
    match extent {
        0..=8 => 1,
        9..=64 => 8,
        65..=1024 => 32,
        _ if across => 32,
        _ => WORKGROUP_SIZE,
    }
}

/// Checks that the dtype is a float of at most 32 bits.
#[track_caller]
pub(crate) fn check_f32_f16_bf16(op: &'static str, x: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        other => Err(Error::dtype(op, other, "takes f32, f16 and bf16; cast with `to_dtype`")),
    }
}

fn softmax_op_name(log: bool) -> &'static str {
    if log { "log_softmax" } else { "softmax" }
}

/// Returns the type of a softmax, which autocast makes f32. The kernels read 16-bit floats without a copy.
fn softmax_result_dtype(op: &str, x: &Tensor) -> DType {
    match x.dtype() {
        DType::F16 | DType::BF16 => norm_result_dtype(op, x),
        other => other,
    }
}

/// Returns the names of the types of x or g, of y in the backward pass, and of the result.
fn dtype_names(input: &Tensor, y: Option<&Tensor>, result: DType) -> [&'static str; 3] {
    let name = |dtype| launch::shader_dtype_name(dtype, input.device());
    [name(input.dtype()), y.map_or("", |y| name(y.dtype())), name(result)]
}

/// Computes a softmax of x, or with y the gradient of x from the gradient `input`. The kernels compute in f32 and read
/// and write any smaller float.
fn run_softmax(
    log: bool,
    input: &Tensor,
    y: Option<&Tensor>,
    (dim, result): (isize, DType),
) -> Result<Tensor> {
    let out = Tensor::empty(input.shape(), result, input.device())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let rows = RowLayout::new(softmax_op_name(log), input, dim)?;
    let config = rows.row_config(input, if y.is_some() { 8 } else { 16 });
    let [dtype, y_dtype, result] = dtype_names(input, y, result);
    let (splits, chunk) = split_reduction(rows.rows, rows.extent, config.threads_per_row, 2);
    // Rows in registers gain nothing from more workgroups.
    if config.register_steps == 0 && rows.extent >= SPLIT_ROW_MIN && splits > 1 {
        return run_split_rows(&rows, config, (splits, chunk), input, y, log, out);
    }
    let mut key = KernelKey::new("softmax");
    for name in [dtype, y_dtype, result] {
        key.push_str(name);
    }
    key.push_flags(&[y.is_some(), log, rows.across]);
    key.push_number(
        config.threads_per_row as u64 | (config.width as u64) << 16 | (config.register_steps as u64) << 32,
    );
    let spec = || {
        kernel_spec! {
            "softmax", stage: "whole", pass: if y.is_some() { "backward" } else { "forward" }, log, dtype,
            y: y_dtype, result, threads_per_row: config.threads_per_row, across: rows.across,
            width: config.width, register_steps: config.register_steps,
        }
    };
    // Reads in vectors of four, scalar writes, and the loops of sums over the threads of a row.
    let iterations = if config.register_steps > 0 {
        0
    } else {
        5 * rows.extent.div_ceil(4 * config.threads_per_row * config.width) + 128
    };
    let params = rows.params(input, |p| kernel_params! { ..p; splits: 0usize, chunk: 0usize });
    let params = params.loop_iterations(iterations);
    let groups = config.workgroups(rows.rows);
    launch::launch_by_key(&key, spec, &bindings![input, y, &out], params, groups)?;
    Ok(out)
}

/// Row length from which several workgroups share a row, if there are few rows.
const SPLIT_ROW_MIN: usize = 1 << 16;

/// Computes few very long rows, each by several workgroups. `input` is x, or g with y in the backward pass.
fn run_split_rows(
    rows: &RowLayout,
    config: RowConfig,
    (splits, chunk): (usize, usize),
    input: &Tensor,
    y: Option<&Tensor>,
    log: bool,
    out: Tensor,
) -> Result<Tensor> {
    let (device, backward) = (input.device(), y.is_some());
    let sums = norm_compute_dtype(input.dtype());
    let scratch = |shape: &[usize]| empty_workspace(shape, sums, device);
    let [dtype, y_dtype, result] = dtype_names(input, y, out.dtype());
    let spec = |stage: &'static str, config: RowConfig, across: bool| {
        kernel_spec! {
            "softmax", stage, pass: if backward { "backward" } else { "forward" }, log, dtype, y: y_dtype, result,
            threads_per_row: config.threads_per_row, across, width: config.width, register_steps: 0usize,
        }
    };
    let params = |iterations: usize| {
        rows.params(input, |p| kernel_params! { ..p; splits, chunk }).loop_iterations(iterations + 128)
    };
    let step = config.threads_per_row * config.width;
    let partial = scratch(&[splits, if backward { 1 } else { 2 }, rows.rows])?;
    let groups = config.workgroups(rows.rows * splits);
    let reading = chunk.div_ceil(4 * step);
    let parts = spec("parts", config, rows.across);
    launch::launch(&parts, &bindings![input, y, &partial], params(reading), groups)?;
    let statistics = match backward {
        true => partial.sum([0], false)?,
        false => {
            let statistics = scratch(&[2, rows.rows])?;
            let workgroup_per_row =
                RowConfig { threads_per_row: WORKGROUP_SIZE, width: 1, register_steps: 0 };
            let params = params(2 * splits.div_ceil(WORKGROUP_SIZE));
            launch::launch(
                &spec("finish", workgroup_per_row, false),
                &[&partial, &statistics],
                params,
                rows.rows,
            )?;
            statistics
        }
    };
    let writing = chunk.div_ceil(step);
    let apply = spec("apply", config, rows.across);
    launch::launch(&apply, &bindings![input, y, &statistics, &out], params(writing), groups)?;
    Ok(out)
}

/// Computes a softmax of any float as `result`, f32 or the type of x, and records it. The gradient of x has the type of
/// x, and is computed from a gradient of 16 bits as well as from one of the result's type.
#[track_caller]
fn softmax_with_grad(log: bool, x: &Tensor, dim: isize, result: DType) -> Result<Tensor> {
    let op = softmax_op_name(log);
    operation!(op);
    check_is_f64(op, x)?;
    normalize_dim(op, dim, x.rank())?;
    let out = run_softmax(log, x, None, (dim, result))?;
    if !autograd::compute_requires_grad(&[x]) {
        return Ok(out);
    }
    let (y, dtype) = (SavedTensor::output(&out), x.dtype());
    let out = autograd::differentiable_unary(op, out, x, move |g, ctx| {
        let y = y.unpack(ctx)?;
        if !ctx.create_graph() {
            return run_softmax(log, g, Some(&y), (dim, dtype));
        }
        // Round to the element type at the end, as the kernel does.
        let wide = norm_compute_dtype(g.dtype());
        let (grad, y) = (g.to_dtype(wide)?, y.to_dtype(wide)?);
        let grad = match log {
            false => y.mul(&grad.sub(&grad.mul(&y)?.sum([dim], true)?)?)?,
            true => grad.sub(&y.exp()?.mul(&grad.sum([dim], true)?)?)?,
        };
        grad.to_dtype(dtype)
    });
    if result == DType::F32 {
        autograd::accept_cast_grad(&out);
    }
    Ok(out)
}

/// Computes a softmax in a type. A wider type than that of a 16-bit tensor needs no copy of the tensor.
#[track_caller]
fn softmax_as(log: bool, x: &Tensor, dim: isize, dtype: DType) -> Result<Tensor> {
    if x.dtype().is_float() && x.dtype().size() == 2 && dtype == DType::F32 {
        return softmax_with_grad(log, x, dim, dtype);
    }
    softmax_with_grad(log, &x.to_dtype(dtype)?, dim, dtype)
}

impl Tensor {
    /// Divides the exponentials along `dim` by their sum. A row of -inf gives NaN, as in PyTorch.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let logits = Tensor::zeros(&[2, 10], DType::F32, &device)?;
    /// assert_eq!(logits.softmax(-1)?.shape(), [2, 10]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// `dim` is out of range. The dtype is not a float, or the device lacks f64.
    #[track_caller]
    pub fn softmax(&self, dim: isize) -> Result<Tensor> {
        softmax_with_grad(false, self, dim, softmax_result_dtype("softmax", self))
    }

    /// Computes the logarithm of [`softmax`](Self::softmax) without loss of precision.
    #[track_caller]
    pub fn log_softmax(&self, dim: isize) -> Result<Tensor> {
        softmax_with_grad(true, self, dim, softmax_result_dtype("log_softmax", self))
    }

    /// Computes [`softmax`](Self::softmax) of the values cast to `dtype`. f32 avoids 16-bit rounding.
    #[track_caller]
    pub fn softmax_with_dtype(&self, dim: isize, dtype: DType) -> Result<Tensor> {
        softmax_as(false, self, dim, dtype)
    }

    /// Computes [`log_softmax`](Self::log_softmax) of the values cast to `dtype`.
    #[track_caller]
    pub fn log_softmax_with_dtype(&self, dim: isize, dtype: DType) -> Result<Tensor> {
        softmax_as(true, self, dim, dtype)
    }
}

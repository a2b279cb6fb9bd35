//! Pairwise distances between the rows of two matrices.

use crate::ops::prelude::*;

const OP: &str = "cdist";

/// Number of distances along each side of a workgroup's tile.
const TILE_SIZE: usize = 16;
/// Number of distances along each side of a tile for many rows of f32. A thread computes 4 x 4 of them.
const LARGE_TILE_SIZE: usize = 64;
/// Number of large tiles from which they are used. Fewer would leave most of a GPU idle.
const MIN_LARGE_TILES: usize = 128;
/// Number of elements of the rows that are in workgroup memory at a time.
const TILE_DEPTH: usize = 16;

/// Number of rows in a workgroup of the gradient.
const GRAD_ROWS: usize = 64;
/// Number of workgroups of the gradient below which several share the sum over the rows of b.
const MIN_GRAD_GROUPS: usize = 256;
/// Smallest number of rows of b in a part of a sum that is split for more workgroups.
const MIN_GRAD_CHUNK: usize = 256;

/// Row width from which several workgroups share a distance.
const SPLIT_ROW_MIN: usize = 1 << 13;
/// Largest number of rows whose pairs a u32 counts.
const MAX_PDIST_ROWS: usize = 1 << 16;

fn norm_name(p: f64) -> &'static str {
    match p {
        0.0 => "zero",
        1.0 => "one",
        2.0 => "two",
        f64::INFINITY => "max",
        _ => "power",
    }
}

/// Returns the parameters of both passes: rows \[batch, rows, width\] of a and b, and further matrices
/// \[batch, rows of a, rows of b\].
fn cdist_params(p: f64, operands: &[&Tensor], (splits, chunk): (usize, usize)) -> KernelParams {
    let (a, b) = (operands[0].shape(), operands[1].shape());
    let each = |of: &dyn Fn(&Tensor) -> usize| {
        std::array::from_fn::<_, 4, _>(|k| operands.get(k).map_or(0, |t| of(t)))
    };
    let strides = |d: usize| each(&|t| t.strides()[d]);
    kernel_params! {
        batch: a[0], a_rows: a[1], b_rows: b[1], width: a[2], power: p as f32,
        power_rest: (p - f64::from(p as f32)) as f32, splits, chunk, offsets: each(&|t| t.layout().offset()),
        batch_strides: strides(0), row_strides: strides(1), col_strides: strides(2),
    }
}

/// Reports whether rows are aligned quads of neighbours in memory.
fn has_quads(t: &Tensor) -> bool {
    let &[batch_stride, row_stride, col_stride] = t.strides() else { return false };
    let extents = [t.shape()[2], batch_stride, row_stride, t.layout().offset()];
    col_stride == 1 && extents.iter().all(|n| n.is_multiple_of(4))
}

fn run_cdist(a: &Tensor, b: &Tensor, p: f64) -> Result<Tensor> {
    let (batch, rows, cols) = (a.shape()[0], a.shape()[1], b.shape()[1]);
    let width = a.shape()[2];
    let tiles = |size: usize| (rows.div_ceil(size), cols.div_ceil(size));
    let (row_tiles, col_tiles) = tiles(LARGE_TILE_SIZE);
    let is_large = a.dtype() == DType::F32
        && norm_name(p) != "power"
        && rows.min(cols) > TILE_SIZE
        && batch * row_tiles * col_tiles >= MIN_LARGE_TILES;
    let symmetric = is_large && a.shares_storage(b) && a.layout() == b.layout();
    let groups = batch
        * match (is_large, symmetric) {
            // Each pair of tiles once: see the kernel.
            (true, true) => row_tiles * (row_tiles / 2 + 1),
            (true, false) => row_tiles * col_tiles,
            (false, _) => tiles(TILE_SIZE).0 * tiles(TILE_SIZE).1,
        };
    // Split long rows, to use more workgroups and to limit each to 2,048 steps.
    let target_splits =
        if width < SPLIT_ROW_MIN { 1 } else { (1024 / groups.max(1)).min(width / (SPLIT_ROW_MIN / 2)) };
    let splits = target_splits.max(width.div_ceil(2048 * TILE_DEPTH)).max(1);
    let chunk = width.div_ceil(splits).next_multiple_of(TILE_DEPTH);
    let splits = width.div_ceil(chunk.max(1)).max(1);
    let params =
        cdist_params(p, &[a, b], (splits, chunk)).loop_iterations(chunk / TILE_DEPTH * (TILE_DEPTH + 1) + 32);
    let (norm, parts) = (norm_name(p), splits > 1);
    let spec = match is_large {
        true => {
            let quads = has_quads(a) && has_quads(b);
            kernel_spec! { "cdist_tiled", norm, parts, symmetric, quads }
        }
        false => kernel_spec! { "cdist", dtype: a.dtype().name(), norm, parts },
    };
    if splits == 1 {
        let out = Tensor::empty([batch, rows, cols], a.dtype(), a.device())?;
        launch::launch(&spec, &[a, b, &out], params, groups)?;
        return Ok(out);
    }
    let parts = empty_workspace(&[splits, batch, rows, cols], a.dtype(), a.device())?;
    launch::launch(&spec, &[a, b, &parts], params, groups * splits)?;
    match p {
        0.0 | 1.0 => parts.sum([0], false),
        2.0 => parts.sum([0], false)?.sqrt(),
        f64::INFINITY => parts.amax([0], false),
        p => parts.sum([0], false)?.pow(1.0 / p),
    }
}

/// Computes the gradient of a from that of the distances.
fn run_cdist_backward(a: &Tensor, b: &Tensor, g: &Tensor, distance: &Tensor, p: f64) -> Result<Tensor> {
    if p == 0.0 {
        return Tensor::zeros(a.shape(), a.dtype(), a.device());
    }
    let (rows, width, others) = (a.shape()[1], a.shape()[2], b.shape()[1]);
    // A power takes more time than loads, so that a thread computes one element.
    let cols = match width {
        _ if norm_name(p) == "power" => 4,
        0..=4 => 4,
        5..=16 => 16,
        _ => 64,
    };
    let groups = a.shape()[0] * rows.div_ceil(GRAD_ROWS) * width.div_ceil(cols);
    // Split many rows of b, to use more workgroups, and so that loops stay within the device's limit.
    let target_splits = (MIN_GRAD_GROUPS / groups.max(1)).min(others / MIN_GRAD_CHUNK);
    let splits = target_splits.max(others.div_ceil(2 * SPLIT_ROW_MIN)).max(1);
    let chunk = others.div_ceil(splits);
    let splits = others.div_ceil(chunk.max(1)).max(1);
    // The gradient of p = 1 has only the signs of the differences.
    let operands: &[&Tensor] = if p == 1.0 { &[a, b, g] } else { &[a, b, g, distance] };
    let params = cdist_params(p, operands, (splits, chunk)).loop_iterations(chunk / 8 * 9 + 32);
    let g_across = g.strides()[1] < g.strides()[2];
    let (dtype, norm, parts) = (a.dtype().name(), norm_name(p), splits > 1);
    let spec = kernel_spec! { "cdist_grad", dtype, norm, parts, cols, g_across };
    if splits == 1 {
        let out = Tensor::empty(a.shape(), a.dtype(), a.device())?;
        launch::launch(&spec, &[operands, &[&out]].concat(), params, groups)?;
        return Ok(out);
    }
    let parts = empty_workspace(&[&[splits], a.shape()].concat(), a.dtype(), a.device())?;
    launch::launch(&spec, &[operands, &[&parts]].concat(), params, groups * splits)?;
    parts.sum([0], false)
}

/// Returns the indices of all pairs of `rows` in order, the lower ones and the upper ones.
fn pair_indices(rows: usize, device: &Device) -> Result<[Tensor; 2]> {
    let (n, count) = (rows as i64, rows * rows.saturating_sub(1) / 2);
    let line = |start: i64, end: i64, step: i64| Tensor::arange(start, end, step, DType::U32, device);
    if count == 0 {
        return Ok([line(0, 0, 1)?, line(0, 0, 1)?]);
    }
    // Row a is the lower one of n - 1 - a pairs, and they begin at pair a (2n - 1 - a) / 2.
    let (lower, partners) = (line(0, n, 1)?, line(n - 1, -1, -1)?);
    let begins = lower.mul(&line(2 * n - 1, n - 1, -1)?)?.floor_divide(2)?;
    // Differences wrap, and the sum with the number of the pair is in range again.
    let shift = lower.add(1)?.sub(&begins)?;
    // A row holds its own index.
    let first = lower.repeat_interleave_by(&partners, 0, Some(count))?;
    let second = shift.index_select(0, &first)?.add(&line(0, count as i64, 1)?)?;
    Ok([first, second])
}

impl Tensor {
    /// Computes the distances of all pairs of rows of a matrix, \[rows · (rows - 1) / 2\]: PyTorch's `pdist`.
    ///
    /// Equals [`cdist`](Self::cdist) above the diagonal. The rows of all pairs are in memory at once.
    ///
    /// # Errors
    /// `self` is not a matrix. See also [`cdist`](Self::cdist).
    #[track_caller]
    pub fn pdist(&self, p: f64) -> Result<Tensor> {
        let &[rows, _] = self.shape() else { fail!(shape("pdist", [self]), "takes a matrix") };
        fail_if!(rows > MAX_PDIST_ROWS; shape("pdist", [self]),
            "takes at most 2^16 rows, whose pairs are counted in 32 bits; take more in parts by `cdist`");
        // Gather pairs instead of computing both halves of the distance matrix.
        let [first, second] = pair_indices(rows, self.device())?;
        let of = |index: &Tensor| self.index_select(0, index)?.unsqueeze(1);
        of(&first)?.cdist(&of(&second)?, p)?.flatten(0, -1)
    }

    /// Computes the p-norms of the differences between all rows of `self` and of `other`: PyTorch's `cdist`.
    ///
    /// The operands are \[.., rows, width\] and \[.., others, width\], and the result \[.., rows, others\]. A
    /// `p` of 0 counts the differing elements, and an infinite `p` takes the largest difference.
    ///
    /// Equal rows get no gradient. 16-bit floats are computed in f32.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::zeros(&[7, 5, 3], DType::F32, &device)?;
    /// let y = Tensor::zeros(&[4, 3], DType::F32, &device)?;
    /// assert_eq!(x.cdist(&y, 2.0)?.shape(), [7, 5, 4]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// `p` is negative or NaN. There are fewer than two dimensions, the widths differ, or the leading
    /// dimensions do not broadcast. The types differ or are not floats.
    #[track_caller]
    pub fn cdist(&self, other: &Tensor, p: f64) -> Result<Tensor> {
        // Distances within one set of rows: cast once, and computed once for both orders.
        if std::ptr::eq(self, other) {
            operation!(OP, autocast[self], |x| x.cdist(&x, p));
        }
        operation!(OP, autocast [self, other], |x, y| x.cdist(&y, p));
        self.check_same_device(OP, other)?;
        fail_if!(p.is_nan() || p < 0.0; argument(OP), "p is {p}; it must be at least 0");
        let dtype = self.dtype();
        fail_if!(!dtype.is_float(); dtype(OP, dtype), "takes floats; cast with `to_dtype`");
        fail_if!(other.dtype() != dtype;
            dtype(OP, other.dtype()), "the first operand is {dtype}; cast one with `to_dtype`");
        launch::check_device_dtype(OP, dtype, self.device())?;
        let shapes = [self.shape(), other.shape()];
        let (&[ref lead_a @ .., rows, width], &[ref lead_b @ .., cols, other_width]) = (shapes[0], shapes[1])
        else {
            fail!(shape(OP, &shapes), "takes at least two dimensions")
        };
        fail_if!(width != other_width; shape(OP, &shapes), "rows of both have one width");
        if dtype.size() == 2 {
            let x = self.to_dtype(DType::F32)?;
            let y = if std::ptr::eq(self, other) { x.clone() } else { other.to_dtype(DType::F32)? };
            return x.cdist(&y, p)?.to_dtype(dtype);
        }
        let lead = broadcast_shapes(OP, &[lead_a, lead_b])?;
        let batch: usize = lead.iter().product();
        let broadcast_rows = |t: &Tensor, rows: usize| {
            let shape: Dims = lead.iter().copied().chain([rows, width]).collect();
            t.broadcast_to(&shape)?.reshape([batch, rows, width])
        };
        let (a, b) = (broadcast_rows(self, rows)?, broadcast_rows(other, cols)?);
        let out = run_cdist(&a.detach(), &b.detach(), p)?;
        let (x, y, distance) = (a.detach(), b.detach(), SavedTensor::output(&out));
        let saved = [&a, &b].into_iter().map(SavedTensor::input).collect();
        let composed = move |t: &[Tensor]| {
            let differences = t[0].unsqueeze(2)?.sub(&t[1].unsqueeze(1)?)?;
            if width == 0 {
                return differences.norm(p, [-1], false);
            }
            // Equal rows get no gradient, and no gradient of a gradient.
            let is_equal = differences.detach().abs()?.amax([-1], false)?.eq(0.0)?;
            differences
                .masked_fill(&is_equal.unsqueeze(-1)?, 1.0)?
                .norm(p, [-1], false)?
                .masked_fill(&is_equal, 0.0)
        };
        let out = autograd::composite_differentiable(OP, out, &[&a, &b], saved, composed, move |g, ctx| {
            let distance = distance.unpack(ctx)?;
            let x_grad = ctx.needs_input_grad[0].then(|| run_cdist_backward(&x, &y, g, &distance, p));
            let y_grad = ctx.needs_input_grad[1]
                .then(|| run_cdist_backward(&y, &x, &g.transpose(1, 2)?, &distance.transpose(1, 2)?, p));
            Ok(smallvec![x_grad.transpose()?, y_grad.transpose()?])
        });
        let shape: Dims = lead.iter().copied().chain([rows, cols]).collect();
        out.reshape(&shape[..])
    }
}

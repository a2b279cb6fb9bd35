//! Scatters that sort their indices, or take their order from [`order`]: for more indices than every thread can scan.

use crate::ops::ScatterOp;
use crate::ops::index::order::{self, IndexOrder};
use crate::ops::index::{IndexedElements, scan_slices, scatter_into};
use crate::ops::prelude::*;

/// Length of a run of equal indices up to which one thread reduces the run. In lines of up to twice this length, one
/// thread reduces every run.
const MAX_SEQUENTIAL_RUN: usize = 512;

/// Number of sorted elements for which one thread computes the partial result of a longer run.
const RUN_CHUNK: usize = 128;

/// Smallest number of lines for [`reduce_rows`]. With fewer, too few threads read the same indices in the bisection.
const MIN_LINES_FOR_ROWS: usize = 4;

/// Number of rows for each index up to which [`reduce_rows`] is used. A copy writes more rows in fewer threads.
const MAX_ROWS_PER_INDEX: usize = 4;

/// Order of the indices of a scatter, and the layouts of its lines in the operands.
struct SortedScatter {
    order: Arc<IndexOrder>,
    /// Number of lines.
    lines: usize,
    line_shape: Dims,
    /// Strides of the lines: of the result, the order, the source, and of the base of [`reduce_rows`].
    line_strides: SmallVec<[Dims; 4]>,
    chunk: usize,
    short: usize,
    /// If true, runs may be longer than `short`.
    long: bool,
}

impl SortedScatter {
    /// Finds the order. The strides are those of the result, the source and the base, over `shape`.
    fn new(at: &IndexedElements, [out, src, base]: [&[usize]; 3], how: ScatterOp) -> Result<Self> {
        let IndexedElements { op, dim, ref index, ref shape, strides: ref index_strides } = *at;
        // Rows that share their indices also share their order.
        let once =
            |(k, &n): (usize, &usize)| if k != dim && index_strides.get(k) == Some(&0) { 1 } else { n };
        let distinct_shape: Dims = shape.iter().enumerate().map(once).collect();
        let order = order::find_or_sort(op, index, (&distinct_shape, index_strides), dim)?;
        let length = at.length();
        // The order has the distinct lines in sequence.
        let by_lines = Layout::contiguous(&with_extent(&distinct_shape, dim, 1));
        let strides = by_lines.strides().iter().zip(&distinct_shape).zip(shape);
        let order_strides: Dims = strides.map(|((&s, m), n)| if m == n { s * length } else { 0 }).collect();
        let along_lines = |strides: &[usize]| with_extent(strides, dim, 0);
        let strides = [out, &order_strides, src, base].map(along_lines);
        let line_extents = at.lines_shape();
        let (line_shape, line_strides) = collapse_dims(&line_extents, &strides.each_ref().map(|s| &s[..]));
        launch::check_rank(op, line_shape.len())?;
        // Larger chunks for very long rows, so that one workgroup can combine all chunks.
        let scale = length.div_ceil(1 << 30);
        let (chunk, short) = (RUN_CHUNK * scale, MAX_SEQUENTIAL_RUN * scale);
        // Few chunks are not worth a second kernel.
        let long = length > 2 * short && how != ScatterOp::Set;
        Ok(Self { order, lines: numel(&line_extents), line_shape, line_strides, chunk, short, long })
    }

    /// Allocates the parts of long runs, if there may be any.
    fn alloc_parts(&self, out: &Tensor) -> Result<Option<Tensor>> {
        let part = match out.dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            DType::U8 | DType::Bool => DType::U32,
            other => other,
        };
        let chunks = self.order.length().div_ceil(self.chunk);
        self.long.then(|| empty_workspace(&[chunks, 2, self.lines], part, out.device())).transpose()
    }

    /// Launches `scatter_sorted` for each run: short ones are reduced into `out`, long ones into `parts`.
    fn launch_runs(
        &self,
        (out, out_dim): (&Tensor, usize),
        (src, src_dim): (&Tensor, usize),
        parts: Option<&Tensor>,
        what: ScatterRows,
    ) -> Result<()> {
        let length = self.order.length();
        let source = (src.layout().offset(), src_dim);
        // The loop over a run, and the search for its start.
        let params =
            self.params((out, out_dim), source, what).loop_iterations(self.longest_loop(what.how) + 64);
        let tensors = bindings![&self.order.targets, &self.order.positions, src, out, parts];
        let groups = (self.lines * length).div_ceil(WORKGROUP_SIZE);
        launch::launch(&self.spec("runs", out, what), &tensors, params, groups)
    }

    /// Launches `scatter_sorted` for the parts of long runs, which it combines with the values of `out`.
    fn launch_join(&self, (out, out_dim): (&Tensor, usize), parts: &Tensor, what: ScatterRows) -> Result<()> {
        let chunks = self.order.length().div_ceil(self.chunk);
        // At most 17 runs of a workgroup have more chunks than one thread combines alone.
        let params = self
            .params((out, out_dim), (0, 0), what)
            .loop_iterations(chunks.div_ceil(WORKGROUP_SIZE) + 17 * 10 + 256);
        let groups = (self.lines * self.candidates()).div_ceil(WORKGROUP_SIZE);
        launch::launch(&self.spec("join", out, what), &[&self.order.targets, parts, out], params, groups)
    }

    /// Returns the largest number of elements that one thread reduces.
    fn longest_loop(&self, how: ScatterOp) -> usize {
        match how {
            ScatterOp::Set => 1,
            _ if self.long => self.short + self.chunk,
            _ => self.order.length(),
        }
    }

    fn spec(
        &self,
        stage: &'static str,
        out: &Tensor,
        ScatterRows { how, divisor, .. }: ScatterRows,
    ) -> KernelSpec {
        let dtype = launch::shader_dtype_name(out.dtype(), out.device());
        kernel_spec! { "scatter_sorted", dtype, op: how.name(), long: self.long, stage, divisor }
    }

    /// Returns the number of positions at which the second stage looks for a long run.
    fn candidates(&self) -> usize {
        self.order.length().saturating_sub(1) / self.short
    }

    fn params(
        &self,
        (out, out_dim): (&Tensor, usize),
        (src_offset, src_dim): (usize, usize),
        ScatterRows { extent, skip, .. }: ScatterRows,
    ) -> KernelParams {
        let strides = &self.line_strides;
        kernel_params! {
            lines: self.lines, rank: self.line_shape.len(), length: self.order.length(), extent, skip,
            out_offset: out.layout().offset(), src_offset, chunk: self.chunk, short: self.short,
            candidates: self.candidates(), dim_strides: [out_dim, src_dim], shape: &self.line_shape,
            out_strides: &strides[0], index_strides: &strides[1], src_strides: &strides[2],
        }
    }
}

/// Operation of a scatter, and the rows that it may write.
#[derive(Clone, Copy)]
struct ScatterRows {
    how: ScatterOp,
    extent: usize,
    /// Row that is left as it is, or `u32::MAX`.
    skip: u32,
    /// Divisor of the sums of long runs, as in `scatter_sorted.wgsl`.
    divisor: &'static str,
}

impl ScatterRows {
    fn new(how: ScatterOp, extent: usize, skip: Option<usize>) -> Self {
        Self { how, extent, skip: skip.map_or(u32::MAX, |s| s as u32), divisor: "" }
    }
}

/// Variants of a reduction by [`reduce_rows`].
#[derive(Clone, Copy, Default)]
pub(super) struct RowReduction<'a> {
    /// If true, the elements of a row replace the value of the base.
    pub(super) replaces: bool,
    /// If true, sums are divided by their number of terms.
    pub(super) averages: bool,
    /// Tensor of the result's shape, contiguous and at the start of its memory. An element of the source counts as 1
    /// if it equals the tensor's element at its target, else as 0.
    pub(super) ties: Option<&'a Tensor>,
}

/// Reports whether [`reduce_rows`] supports a scatter, and is faster than a scatter into a copy of the base.
pub(super) fn can_reduce_rows(at: &IndexedElements, out_shape: &[usize]) -> bool {
    let (extent, length) = (out_shape.get(at.dim).copied().unwrap_or(1), at.length());
    let lines = numel(&at.lines_shape());
    // Each line needs one thread for each row of the result, and one for each chunk of indices.
    let threads = lines * (extent + length.div_ceil(RUN_CHUNK));
    scan_slices(at, extent).is_none()
        && with_extent(out_shape, at.dim, length) == at.shape
        && lines >= MIN_LINES_FOR_ROWS
        && (1..=MAX_ROWS_PER_INDEX * length).contains(&extent)
        && (1..=u32::MAX as usize).contains(&threads)
}

/// Values of a scatter's result before the scatter.
#[derive(Clone, Copy)]
pub(super) enum ScatterBase<'a> {
    /// Zeros of a type.
    Zero(DType),
    /// Values of a tensor, of any strides.
    Copy(&'a Tensor),
}

impl ScatterBase<'_> {
    fn dtype(self) -> DType {
        match self {
            Self::Zero(dtype) => dtype,
            Self::Copy(x) => x.dtype(),
        }
    }
}

/// Scatters onto a base into a new tensor of `out_shape`. Writes each row once where it sorts the indices.
pub(super) fn scatter_onto(
    at: &IndexedElements,
    (base, out_shape): (ScatterBase<'_>, &[usize]),
    src: &Tensor,
    (how, skip): (ScatterOp, Option<usize>),
) -> Result<Tensor> {
    if can_reduce_rows(at, out_shape) {
        return reduce_rows(at, (base, out_shape), src, (how, skip), RowReduction::default());
    }
    let out = match base {
        ScatterBase::Zero(dtype) => Tensor::zeros(out_shape, dtype, src.device())?,
        ScatterBase::Copy(x) => x.detach().copy()?,
    };
    scatter_into(at, &out, &src.into(), (how, skip))?;
    Ok(out)
}

/// Scatters onto a base into a new tensor of the base's type, for indices that [`can_reduce_rows`] accepts. Every row
/// of the result has one thread for each line, or is combined by the same kernel as in [`scatter_sorted_runs`], with
/// the same bits. 16-bit floats are reduced in f32.
pub(super) fn reduce_rows(
    at: &IndexedElements,
    (base, out_shape): (ScatterBase<'_>, &[usize]),
    src: &Tensor,
    (how, skip): (ScatterOp, Option<usize>),
    RowReduction { replaces, averages, ties }: RowReduction<'_>,
) -> Result<Tensor> {
    let IndexedElements { op, dim, ref index, ref shape, .. } = *at;
    src.check_same_device(op, index)?;
    let extent = out_shape.get(dim).copied().unwrap_or(1);
    check_in_range(op, index, IndexRange { extent, allows_negative: false, ignored_index: None })?;
    launch::check_device_dtype(op, base.dtype(), src.device())?;
    let (base_tensor, base_strides): (_, Dims) = match base {
        ScatterBase::Zero(_) => (None, Dims::from_elem(0, shape.len())),
        ScatterBase::Copy(x) => (Some(x), x.strides().into()),
    };
    let out = Layout::contiguous(out_shape);
    let strides = [out.strides(), src.strides(), &base_strides];
    let sorted = SortedScatter::new(at, strides, how)?;
    let out = Tensor::empty(out_shape, base.dtype(), src.device())?;
    let dim_strides =
        [out.strides(), src.strides(), &base_strides].map(|strides| strides.get(dim).copied().unwrap_or(0));
    let mut what = ScatterRows::new(how, extent, skip);
    if averages {
        what.divisor = if replaces { "run" } else { "all" };
    }
    let SortedScatter { ref order, lines, ref line_strides, chunk, long, .. } = sorted;
    let length = order.length();
    let chunks = if long { length.div_ceil(chunk) } else { 0 };
    let name = |t: &Tensor| launch::shader_dtype_name(t.dtype(), out.device());
    let base_name = if base_tensor.is_some() { "copy" } else { "zero" };
    let spec = kernel_spec! {
        "scatter_rows", dtype: name(&out), src: name(src), op: how.name(), base: base_name, long, replaces, averages,
        ties: ties.is_some(),
    };
    let offsets = [0, src.layout().offset(), base_tensor.map_or(0, |x| x.layout().offset())];
    let params = kernel_params! {
        lines, rank: sorted.line_shape.len(), length, extent, skip: what.skip, chunk, chunks, short: sorted.short,
        offsets, dim_strides, shape: &sorted.line_shape, out_strides: &line_strides[0],
        index_strides: &line_strides[1], src_strides: &line_strides[2], base_strides: &line_strides[3],
    }
    // The loop over a run, and two bisections.
    .loop_iterations(sorted.longest_loop(how) + 2 * 32 + 16);
    let parts = sorted.alloc_parts(&out)?;
    let tensors = bindings![&order.targets, &order.positions, src, &out, base_tensor, ties, &parts];
    launch::launch(&spec, &tensors, params, (lines * (extent + chunks)).div_ceil(WORKGROUP_SIZE))?;
    drop(tensors);
    if let Some(parts) = parts {
        sorted.launch_join((&out, dim_strides[0]), &parts, what)?;
    }
    Ok(out)
}

/// Scatters into `out` in place, for rows too long for every thread to scan all indices.
///
/// The indices are sorted, unless their order is known (see [`order`]), and runs of equal indices are reduced in
/// order. A long run is reduced in chunks, and a second kernel combines the chunks. The host does not know whether
/// long runs exist. Without them, the second kernel ends after two reads for each 512 elements.
///
/// For runs up to [`MAX_SEQUENTIAL_RUN`], results equal those of the scanning kernel bit by bit, except that 16-bit
/// floats are rounded once.
pub(super) fn scatter_sorted_runs(
    at: &IndexedElements,
    out: &Tensor,
    (src, src_strides): (&Tensor, &[usize]),
    (how, skip): (ScatterOp, Option<usize>),
) -> Result<()> {
    let strides = [out.strides(), src_strides, &Dims::from_elem(0, at.shape.len())];
    let sorted = SortedScatter::new(at, strides, how)?;
    let [out_dim, src_dim] = [out.strides(), src_strides].map(|s| s.get(at.dim).copied().unwrap_or(0));
    let parts = sorted.alloc_parts(out)?;
    let what = ScatterRows::new(how, extent_or_one(out, at.dim), skip);
    sorted.launch_runs((out, out_dim), (src, src_dim), parts.as_ref(), what)?;
    parts.map_or(Ok(()), |parts| sorted.launch_join((out, out_dim), &parts, what))
}

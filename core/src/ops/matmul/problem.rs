//! A checked matrix product, and the kernels that may run it.
//!
//! [`MatmulProblem`] has at most three batch dimensions, each with its own stride in both operands. The backend's
//! kernel for small matrices and the portable kernel take these. A vendor's library takes one, so the others are a
//! loop of calls, or the operands are copied.

use crate::backend::batched_matmul::{self, MAX_BATCH_DIMS};
use crate::backend::{
    BatchedMatmulCall, BatchedOperand, Command, Epilogue, MatmulCall, MatrixOperand, SegmentId, Slice,
};
use crate::ops::matmul::matmul_tiling::{
    CostModel, KMajorOperands, MatmulExtents, SumEpilogue, TilePlan, TiledProduct,
};
use crate::ops::matmul::matrix_layout::{BatchDims, MatrixLayout, align_dims};
use crate::ops::matmul::{check_matmul_operands, last_two};
use crate::ops::prelude::*;
use crate::runtime::profile::WorkItem;
use crate::runtime::stream::Access;
use crate::tensor::layout::collapse_tensor_dims;

/// [`Epilogue`] with tensors. Matrices have the strides of the result, and vectors start at offset 0.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) enum EpilogueTensors<'a> {
    None,
    Bias(&'a Tensor),
    GeluBias { bias: &'a Tensor, pre_activation: &'a Tensor },
    GeluGrad { x: &'a Tensor, gelu: &'a Tensor, sums: &'a Tensor },
    RowSums(&'a Tensor),
    Scaled { scales: Option<[&'a Tensor; 2]>, bias: Option<&'a Tensor> },
}

impl<'a> EpilogueTensors<'a> {
    /// Returns the tensors that the epilogue accesses.
    fn tensor_accesses(self) -> SmallVec<[(&'a Tensor, Access); 3]> {
        use Access::{Read, Write};
        match self {
            Self::None => smallvec![],
            Self::Bias(bias) => smallvec![(bias, Read)],
            Self::GeluBias { bias, pre_activation: before } => smallvec![(before, Write), (bias, Read)],
            Self::GeluGrad { x, gelu, sums } => smallvec![(x, Read), (gelu, Write), (sums, Write)],
            Self::RowSums(sums) => smallvec![(sums, Write)],
            Self::Scaled { scales, bias } => {
                scales.into_iter().flatten().chain(bias).map(|t| (t, Read)).collect()
            }
        }
    }
}

/// Matrix product whose operands are checked and folded to at most three batch dimensions.
pub(super) struct MatmulProblem {
    op: &'static str,
    pub(super) extents: MatmulExtents,
    /// Extents of the batch dimensions.
    batch: BatchDims,
    a: (Tensor, MatrixLayout),
    b: (Tensor, MatrixLayout),
    pub(super) shape: Dims,
}

/// Returns the shape of the product of two operands.
pub(super) fn product_shape(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Dims> {
    let ((m, k), (rows, n)) = (last_two(a.shape()), last_two(b.shape()));
    fail_if!(k != rows;
        shape(op, [a, b]), "the first has {k} columns, the second {rows} rows; they must be equal");
    let mut shape = broadcast_shapes(op, &[&a.shape()[..a.rank() - 2], &b.shape()[..b.rank() - 2]])?;
    shape.extend_from_slice(&[m, n]);
    Ok(shape)
}

/// Expands the batch dimensions of a matrix to those of `shape`.
fn expand_batch(t: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let batch = &shape[..shape.len() - 2];
    if t.shape()[..t.rank() - 2] == *batch {
        return Ok(t.clone());
    }
    let (rows, cols) = last_two(t.shape());
    let mut expanded = Dims::from_slice(batch);
    expanded.extend_from_slice(&[rows, cols]);
    t.broadcast_to(expanded)
}

/// Computes a · b, summed to a smaller shape, by the backend's kernel for batches. Returns `None` if the kernel does
/// not support the product, or if a product in f32 and a sum are faster. The result has the type of a and b.
pub(super) fn try_summed_product(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    shape: &[usize],
) -> Result<Option<Tensor>> {
    if !a.device().library_features().batched_matmul || a.dtype().size() != 2 {
        return Ok(None);
    }
    check_matmul_operands(op, a, b)?;
    let full = product_shape(op, a, b)?;
    let depth = full.len() - 2;
    let (a, b) = (expand_batch(a, &full)?, expand_batch(b, &full)?);
    let target = Layout::contiguous(shape).broadcast_to(op, &full)?;
    let steps = [a.strides(), b.strides(), target.strides()].map(|strides| &strides[..depth]);
    let (extents, strides) = collapse_dims(&full[..depth], &steps);
    if extents.len() > MAX_BATCH_DIMS {
        return Ok(None);
    }
    let layouts = [MatrixLayout::from_tensor(&a, &strides[0]), MatrixLayout::from_tensor(&b, &strides[1])];
    let product = MatmulProblem::with_layouts(op, [a, b], layouts, &extents, full);
    if product.is_empty() {
        return Ok(None);
    }
    let (row_stride, col_stride) = last_two(target.strides());
    let c = MatrixLayout { offset: 0, row_stride, col_stride, batch_strides: align_dims(&strides[2], 0) };
    let (a, dtype) = (&product.a.0, product.a.0.dtype());
    let call = product.batched_call(c, dtype, false);
    // The library writes all matrices in f32, which another kernel sums.
    let unsummed = MatrixLayout { batch_strides: [1; MAX_BATCH_DIMS], ..c };
    let unsummed = product.batched_call(unsummed, DType::F32, false);
    let written = numel(&product.shape) * DType::F32.size();
    let (launches, copied) = product.library_cost();
    if call.tiling().is_none() {
        return Ok(None);
    }
    let alternative =
        unsummed.estimate_library_time(launches, copied) + batched_matmul::copy_time(written as u64 / 2);
    if !call.is_faster_than(alternative) {
        return Ok(None);
    }
    let out = Tensor::empty(shape, dtype, a.device())?;
    Ok(product.enqueue_batched(call, &out)?.then_some(out))
}

impl MatmulProblem {
    pub(super) fn new(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Self> {
        check_matmul_operands(op, a, b)?;
        Self::from_checked(op, a, b)
    }

    /// Creates a problem from operands whose types were checked.
    pub(super) fn from_checked(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Self> {
        let shape = product_shape(op, a, b)?;
        // Fast path: the general code below would change nothing.
        if a.rank() == 2 && b.rank() == 2 {
            let layouts = [a, b].map(|t| MatrixLayout::from_tensor(t, &[]));
            return Ok(Self::with_layouts(op, [a.clone(), b.clone()], layouts, &[], shape));
        }
        let depth = shape.len() - 2;
        let (mut a, mut b) = (expand_batch(a, &shape)?, expand_batch(b, &shape)?);
        let fold = |a: &Tensor, b: &Tensor| {
            collapse_dims(&shape[..depth], &[&a.strides()[..depth], &b.strides()[..depth]])
        };
        let (mut extents, mut strides) = fold(&a, &b);
        if extents.len() > MAX_BATCH_DIMS {
            // Kernels take at most three batch dimensions. Contiguous operands have one.
            (a, b) = (a.contiguous()?, b.contiguous()?);
            (extents, strides) = fold(&a, &b);
        }
        let layouts =
            [MatrixLayout::from_tensor(&a, &strides[0]), MatrixLayout::from_tensor(&b, &strides[1])];
        Ok(Self::with_layouts(op, [a, b], layouts, &extents, shape))
    }

    fn with_layouts(
        op: &'static str,
        [a, b]: [Tensor; 2],
        [left, right]: [MatrixLayout; 2],
        batch: &[usize],
        shape: Dims,
    ) -> Self {
        let (m, k) = last_two(a.shape());
        let n = last_two(b.shape()).1;
        let extents = MatmulExtents { m, n, k, batch: batch.iter().product() };
        Self { op, extents, batch: align_dims(batch, 1), a: (a, left), b: (b, right), shape }
    }

    /// Returns true if there is nothing to sum or nothing to write.
    pub(super) fn is_empty(&self) -> bool {
        numel(&self.shape) == 0 || self.extents.k == 0
    }

    pub(super) fn write_into(&self, out: &Tensor, add: bool) -> Result<()> {
        if self.try_batched_kernel(out, add)? || self.try_vendor_library(out, add, EpilogueTensors::None)? {
            return Ok(());
        }
        // The kernels write whole tensors only.
        if out.is_contiguous() && out.layout().offset() == 0 && !self.reads_memory_of(out) {
            return self.run_kernel(out, None, SumEpilogue { accumulate: add, ..SumEpilogue::default() });
        }
        let product = empty_workspace(&self.shape, out.dtype(), out.device())?;
        self.run_kernel(&product, None, SumEpilogue::default())?;
        if add { out.add_(&product) } else { product.copy_into(out) }
    }

    /// Reports whether an operand shares the memory of `out`, as a gradient that is added to may do. A kernel
    /// would then read elements that it has already written.
    fn reads_memory_of(&self, out: &Tensor) -> bool {
        [&self.a.0, &self.b.0].into_iter().any(|operand| operand.shares_storage(out))
    }

    /// Returns the matrices of `out`. Returns `None` if its rows are not contiguous, if its matrices are not at equal
    /// distances, or if an operand shares its memory.
    fn output_layout(&self, out: &Tensor) -> Option<MatrixLayout> {
        let (row, col) = last_two(out.strides());
        let batch = self.shape.iter().copied().zip(out.strides().iter().copied()).take(out.rank() - 2);
        let (extents, steps) = collapse_tensor_dims(batch);
        // An output that was allocated for the product has a single batch stride.
        if col != 1 && self.extents.n > 1 || extents.len() > 1 || self.reads_memory_of(out) {
            return None;
        }
        let step = steps.first().copied().unwrap_or(0);
        let [_, middle, inner] = self.batch;
        Some(MatrixLayout {
            offset: out.layout().offset(),
            row_stride: row,
            col_stride: 1,
            batch_strides: [step * inner * middle, step * inner, step],
        })
    }

    /// Describes the product for the backend's kernel. Offsets do not include those of the tensors' memory.
    fn batched_call(&self, c: MatrixLayout, dtype_out: DType, accumulate: bool) -> BatchedMatmulCall {
        let MatmulExtents { m, n, k, .. } = self.extents;
        let dtype = self.a.0.dtype();
        let wide = |dims: BatchDims| dims.map(|n| n as u64);
        let operand = |layout: MatrixLayout, dtype: DType| BatchedOperand {
            segment: SegmentId(0),
            offset: (layout.offset * dtype.size()) as u64,
            row_stride: layout.row_stride as u64,
            col_stride: layout.col_stride as u64,
            batch_strides: wide(layout.batch_strides),
        };
        let (a, b) = (operand(self.a.1, dtype), operand(self.b.1, dtype));
        let (batch, c) = (wide(self.batch), operand(c, dtype_out));
        BatchedMatmulCall {
            dtype,
            dtype_out,
            m: m as u64,
            n: n as u64,
            k: k as u64,
            batch,
            a,
            b,
            c,
            accumulate,
        }
    }

    /// Enqueues a call of [`batched_call`](Self::batched_call), or returns false if the backend declines it.
    fn enqueue_batched(&self, mut call: BatchedMatmulCall, out: &Tensor) -> Result<bool> {
        let accesses = [(&self.a.0, Access::Read), (&self.b.0, Access::Read), (out, Access::Write)];
        let bound = launch::bind_tensors(accesses)?;
        for (operand, slice) in [&mut call.a, &mut call.b, &mut call.c].into_iter().zip(bound.iter()) {
            let Slice { segment, offset, .. } = *slice;
            (operand.segment, operand.offset) = (segment, operand.offset + offset);
        }
        out.device().try_enqueue(|| describe_batched(&call), &Command::BatchedMatmul(&call))
    }

    /// Runs the product by the backend's kernel for small matrices. Returns false if the kernel does not support the
    /// product, or if the vendor's library is faster.
    fn try_batched_kernel(&self, out: &Tensor, add: bool) -> Result<bool> {
        let is_half = self.a.0.dtype().size() == 2 && self.a.0.dtype() == self.b.0.dtype();
        if self.extents.batch == 1 || !is_half || !out.device().library_features().batched_matmul {
            return Ok(false);
        }
        let Some(c) = self.output_layout(out) else { return Ok(false) };
        let call = self.batched_call(c, out.dtype(), add);
        let (launches, copied) = self.library_cost();
        // The estimate for the library needs the bounds that the kernel's sizes have.
        if call.tiling().is_some() && call.is_faster_than(call.estimate_library_time(launches, copied)) {
            return self.enqueue_batched(call, out);
        }
        Ok(false)
    }

    /// Returns the batch dimension of the library's calls: the longest.
    fn library_batch_dim(&self) -> usize {
        (0..MAX_BATCH_DIMS).max_by_key(|&d| self.batch[d]).unwrap_or(0)
    }

    /// Returns the operands that have several batch strides, and the bytes of their copies, which have one.
    fn uneven_operands(&self) -> ([bool; 2], u64) {
        let MatmulExtents { m, n, k, batch } = self.extents;
        let mut copied = 0;
        let uneven = [(&self.a, m, k), (&self.b, k, n)].map(|((t, layout), rows, cols)| {
            let is_uneven = !layout.is_uniform(self.batch);
            copied += if is_uneven { (batch * rows * cols * t.dtype().size()) as u64 } else { 0 };
            is_uneven
        });
        (uneven, copied)
    }

    /// Reports whether the library's product is faster with copies of operands than with a loop of calls.
    fn copies_for_library(&self, launches: u64, (uneven, copied): ([bool; 2], u64)) -> bool {
        let MatmulExtents { m, n, k, .. } = self.extents;
        let are_lines = |k: usize, layout: MatrixLayout, rows, cols| {
            uneven[k] || layout.is_row_or_column_major(rows, cols)
        };
        copied > 0
            && self.a.0.dtype().is_float()
            && are_lines(0, self.a.1, m, k)
            && are_lines(1, self.b.1, k, n)
            && batched_matmul::copy_time(copied) < batched_matmul::launches_time(launches - 1)
    }

    /// Returns the calls of the vendor's library for this product, and the bytes of the copies that it needs.
    fn library_cost(&self) -> (u64, u64) {
        let launches = (self.extents.batch / self.batch[self.library_batch_dim()].max(1)) as u64;
        let uneven = self.uneven_operands();
        match launches > 1 && self.copies_for_library(launches, uneven) {
            true => (1, uneven.1),
            false => (launches, 0),
        }
    }

    /// Runs the product in the vendor's library, or returns false if unsupported. The library takes one batch
    /// dimension. The others are a loop of calls, or operands are copied, whichever takes less time.
    pub(super) fn try_vendor_library(
        &self,
        out: &Tensor,
        add: bool,
        finish: EpilogueTensors<'_>,
    ) -> Result<bool> {
        let Some(c) = self.output_layout(out) else { return Ok(false) };
        let (_, copied) = self.library_cost();
        if copied > 0 && out.device().library_features().matmul {
            let ([copies_a, copies_b], _) = self.uneven_operands();
            let copy = |t: &Tensor, is_uneven| if is_uneven { t.contiguous() } else { Ok(t.clone()) };
            let (a, b) = (copy(&self.a.0, copies_a)?, copy(&self.b.0, copies_b)?);
            return Self::from_checked(self.op, &a, &b)?.try_vendor_library(out, add, finish);
        }
        let e = self.extents;
        let [(ta, a), (tb, b)] = [(&self.a.0, self.a.1), (&self.b.0, self.b.1)];
        let mut all: SmallVec<[_; 6]> =
            smallvec![(ta, Access::Read), (tb, Access::Read), (out, Access::Write)];
        finish.tensor_accesses().into_iter().for_each(|t| all.push(t));
        let bound = launch::bind_tensors(all.iter().copied())?;
        let dim = self.library_batch_dim();
        let inner = self.batch[dim];
        // Extents of the loop over the other dimensions.
        let mut outer = self.batch;
        outer[dim] = 1;
        let operand = |at: usize, dtype: DType, m: MatrixLayout, index: usize| {
            let position = [index / outer[2] / outer[1], index / outer[2] % outer[1], index % outer[2]];
            let start: usize = position.iter().zip(m.batch_strides).map(|(i, stride)| i * stride).sum();
            MatrixOperand {
                segment: bound[at].segment,
                offset: bound[at].offset + ((m.offset + start) * dtype.size()) as u64,
                row_stride: m.row_stride as u64,
                col_stride: m.col_stride as u64,
                batch_stride: m.batch_strides[dim] as u64,
            }
        };
        let operand_of = |at: usize, t: &Tensor| {
            operand(at, t.dtype(), MatrixLayout { offset: t.layout().offset(), ..c }, 0)
        };
        let epilogue = match finish {
            EpilogueTensors::None => Epilogue::None,
            EpilogueTensors::Bias(_) => Epilogue::Bias(bound[3]),
            EpilogueTensors::GeluBias { pre_activation: before, .. } => {
                Epilogue::GeluBias { bias: bound[4], pre_activation: operand_of(3, before) }
            }
            EpilogueTensors::GeluGrad { x, gelu, .. } => Epilogue::GeluGrad {
                x: operand_of(3, x),
                gelu: operand_of(4, gelu),
                row_block_sums: bound[5],
            },
            EpilogueTensors::RowSums(_) => Epilogue::RowSums(bound[3]),
            EpilogueTensors::Scaled { scales, bias } => Epilogue::Scaled {
                scales: scales.map(|_| [bound[3], bound[4]]),
                bias: bias.map(|_| bound[bound.len() - 1]),
            },
        };
        for index in 0..outer.iter().product() {
            let call = MatmulCall {
                dtype: ta.dtype(),
                dtype_b: tb.dtype(),
                dtype_out: out.dtype(),
                m: e.m as u64,
                n: e.n as u64,
                k: e.k as u64,
                batch: inner as u64,
                a: operand(0, ta.dtype(), a, index),
                b: operand(1, tb.dtype(), b, index),
                c: operand(2, out.dtype(), c, index),
                beta: if add { 1.0 } else { 0.0 },
                epilogue,
            };
            let accepted = call.supports_epilogue()
                && out.device().try_enqueue(|| describe_for_profiler(&call), &Command::Matmul(&call))?;
            if !accepted {
                // The fallback kernels write everything again.
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Runs the crate's kernel into a contiguous `out` at offset 0. `bias` is contiguous, \[columns\].
    pub(super) fn run_kernel(
        &self,
        out: &Tensor,
        bias: Option<&Tensor>,
        epilogue: SumEpilogue<'_>,
    ) -> Result<()> {
        let ([(ta, a), (tb, b)], e) = ([(&self.a.0, self.a.1), (&self.b.0, self.b.1)], self.extents);
        let device = out.device();
        fail_if!(out.dtype() != ta.dtype() && (out.dtype() != DType::F32 || ta.dtype().size() != 2);
            dtype(self.op, out.dtype()), "a product of {} is written to {} or f32", ta.dtype(), ta.dtype());
        let costs = CostModel::new(device, false);
        let along = |sum: usize, across: usize| sum == 1 || (across != 1 && sum < across);
        let along =
            KMajorOperands { a: along(a.col_stride, a.row_stride), b: along(b.row_stride, b.col_stride) };
        let name = |dtype| launch::shader_dtype_name(dtype, device);
        let matrix = |m: MatrixLayout| [m.offset, m.row_stride, m.col_stride, m.batch_strides[0]];
        let ([_, a1, a2], [_, b1, b2]) = (a.batch_strides, b.batch_strides);
        let kernel = |plan: &TilePlan| {
            let spec = kernel_spec! {
                "matmul", dtype: name(ta.dtype()), out: name(out.dtype()), bias: bias.is_some(),
            };
            let spec = plan.add_definitions(spec, along, e.n.is_multiple_of(4));
            let width = plan.vector_elements();
            let spec = kernel_spec! {
                ..spec; k_edges: plan.has_k_edges(), a_vectors: along.a && a.has_vectors(width, e.k) || !along.a && a.transposed().has_vectors(width, e.m),
                b_vectors: along.b && b.transposed().has_vectors(width, e.k) || !along.b && b.has_vectors(width, e.n),
            };
            let params = kernel_params! {
                ..plan.params(); inner: self.batch[2], bias_offset: bias.map_or(0, |bias| bias.layout().offset()),
                a: matrix(a), b: matrix(b), batch_strides: [a1, a2, b1, b2], middle: self.batch[1],
            };
            (spec, params)
        };
        let inputs: SmallVec<[&Tensor; 3]> = [ta, tb].into_iter().chain(bias).collect();
        TiledProduct { inputs: &inputs, out, epilogue, kernel: &kernel }
            .run(TilePlan::new(e, ta.dtype(), costs), costs)
    }
}

/// Describes a product for the profiler.
pub(crate) fn describe_for_profiler(call: &MatmulCall) -> WorkItem {
    let MatmulCall { dtype, dtype_out: out, m, n, k, batch, epilogue, .. } = *call;
    let suffix = match epilogue {
        Epilogue::None => "",
        Epilogue::Bias(_) => " + bias",
        Epilogue::GeluBias { .. } => " + bias, gelu",
        Epilogue::GeluGrad { .. } => ", gelu's gradient",
        Epilogue::RowSums(_) => ", sums",
        Epilogue::Scaled { bias: Some(_), .. } => " scaled + bias",
        Epilogue::Scaled { .. } => " scaled",
    };
    let before = match epilogue {
        Epilogue::GeluBias { .. } => m * n,
        Epilogue::GeluGrad { .. } => 2 * m * n,
        _ => 0,
    };
    let written = batch * m * n * out.size() as u64 * if call.beta == 0.0 { 1 } else { 2 };
    WorkItem {
        name: format!("matmul {dtype} to {out} {batch}x{m}x{n}x{k}{suffix}").into(),
        bytes: (batch * (m * k + k * n) + before) * dtype.size() as u64 + written,
        flops: 2 * batch * m * n * k,
    }
}

/// Describes a batch of products for the profiler.
pub(crate) fn describe_batched(call: &BatchedMatmulCall) -> WorkItem {
    let BatchedMatmulCall { dtype, dtype_out: out, m, n, k, batch, .. } = *call;
    let [outer, middle, inner] = batch;
    let summed: u64 =
        batch.iter().zip(call.c.batch_strides).filter(|(_, stride)| *stride == 0).map(|(n, _)| n).product();
    let suffix = if summed > 1 { format!(", sums of {summed}") } else { String::new() };
    WorkItem {
        name: format!("batched matmul {dtype} to {out} {outer}x{middle}x{inner} of {m}x{n}x{k}{suffix}")
            .into(),
        bytes: call.bytes(),
        flops: call.flops(),
    }
}

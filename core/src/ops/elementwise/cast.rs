//! Conversions between element types, and copies between layouts.

use crate::backend::Command;
use crate::ops::elementwise::pointwise;
use crate::ops::kernel::heuristics::{find_tiled_dim, has_vector_lines, suits_tiles};
use crate::ops::kernel::launch::VECTOR_BYTES;
use crate::ops::prelude::*;

/// Smallest number of elements for which copies of scattered elements write whole vectors. Each thread then reads
/// several distant elements, so fewer threads run.
const MIN_SCATTERED_RUNS: usize = 1 << 16;
/// Elements that a thread copies one by one, where the target has no whole vectors.
const SCATTERED_PER_THREAD: usize = 4;

/// Merges dimensions as [`collapse_dims`] does, in the order in which the target has them in memory. Then the last one
/// has the target's adjacent elements, if there are any. Returns the strides of `target` and of `source`.
fn collapse_dims_as_written(target: &Tensor, source: &Tensor) -> (Dims, SmallVec<[Dims; 4]>) {
    if target.strides().is_sorted_by(|a, b| a >= b) {
        return collapse_dims(target.shape(), &[target.strides(), source.strides()]);
    }
    let mut order: SmallVec<[usize; 8]> = (0..target.rank()).collect();
    order.sort_by_key(|&d| std::cmp::Reverse(target.strides()[d]));
    let remap = |of: &[usize]| -> Dims { order.iter().map(|&d| of[d]).collect() };
    collapse_dims(&remap(target.shape()), &[&remap(target.strides()), &remap(source.strides())])
}

impl Tensor {
    /// Casts to another type, or returns `self` if it has the type. Floats become integers by truncation. NaN becomes
    /// 0. A float outside the range becomes the nearest f32 in it, or from f64 the nearest f64. For u8 this is the
    /// range of i32, of which the last 8 bits count.
    ///
    /// The gradient is cast back. A cast to an integer or bool ends the history, as in PyTorch. A cast to a
    /// storage-only type ([`DType::is_storage_only`]) goes through f32 and fails if a gradient is required: detach
    /// first.
    #[doc(alias = "to")]
    #[doc(alias = "bfloat16")]
    #[doc(alias = "bool")]
    #[doc(alias = "byte")]
    #[doc(alias = "double")]
    #[doc(alias = "float")]
    #[doc(alias = "half")]
    #[doc(alias = "int")]
    #[doc(alias = "long")]
    #[doc(alias = "type")]
    #[doc(alias = "type_as")]
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        operation!("to_dtype");
        if self.dtype().is_storage_only() || dtype.is_storage_only() {
            // An 8-bit gradient would need its own scale.
            autograd::check_no_grad_inputs("to_dtype", &[self])?;
        }
        let out = Tensor::empty(self.shape(), dtype, self.device())?;
        pointwise::convert_dtype_into(self, &out)?;
        if !dtype.is_float() {
            return Ok(out);
        }
        let from = self.dtype();
        Ok(autograd::differentiable_unary("to_dtype", out, self, move |g, ctx| {
            // Only a gradient of 16 bits may be passed on as it is.
            let is_narrow = from == DType::F32 && matches!(g.dtype(), DType::F16 | DType::BF16);
            if is_narrow && ctx.passes_cast_grad(0) { Ok(g.clone()) } else { g.to_dtype(from) }
        }))
    }

    /// Copies the elements of `self` into `target`, of the same shape and type and any strides. Not recorded.
    #[track_caller]
    #[doc(hidden)]
    pub fn copy_into(&self, target: &Tensor) -> Result<()> {
        operation!("copy");
        fail_if!(self.shape() != target.shape() || self.dtype() != target.dtype();
            shape("copy", [self, target]), "takes one shape and type");
        self.check_same_device("copy", target)?;
        let n = self.numel();
        if n == 0 {
            return Ok(());
        }
        let size = self.dtype().size();
        let words = |t: &Tensor| t.is_contiguous() && (t.layout().offset() * size).is_multiple_of(4);
        // Whole words are written only if the last word contains no other data.
        let owns_all_words =
            target.is_contiguous() && target.layout().offset() == 0 && target.storage_len() == n;
        if words(self) && words(target) && (n * size).is_multiple_of(4) {
            let bound = launch::bind_contiguous_bytes([(target, Access::Write), (self, Access::Read)])?;
            let work = || WorkItem::without_flops("copy", 2 * bound[1].bytes);
            return self.device().enqueue(work, &Command::Copy { dst: bound[0], src: bound[1] });
        }
        let (shape, strides) = collapse_dims_as_written(target, self);
        launch::check_rank("copy", shape.len())?;
        // Runs of whole vectors on both sides, such as parts of a concatenation.
        let vector = VECTOR_BYTES / size;
        let vectors = shape.last().is_some_and(|n| n.is_multiple_of(vector))
            && [target, self]
                .into_iter()
                .zip(&strides)
                .all(|(t, strides)| has_vector_lines(t.layout().offset(), strides, vector));
        // Whole output vectors are written, and an element's position follows from that of its neighbour. A kernel of
        // its own for each rank pays if the input's elements are adjacent or many.
        let adjacent = strides[1].last() == Some(&1);
        let runs = owns_all_words
            && (n * size).is_multiple_of(VECTOR_BYTES)
            && (adjacent || n >= MIN_SCATTERED_RUNS);
        if !vectors && self.transpose_into(target, &shape, &strides[1], &strides[0])? {
            return Ok(());
        }
        let spec = kernel_spec! { "copy", size };
        // Definitions of kernels whose loops over dimensions are written out.
        let unrolled = |spec: forebay_shaders::KernelSpec| {
            let lines = n / shape.last().copied().unwrap_or(1);
            spec.def("rank", shape.len().max(1)).def("f32_division", lines < 1 << 20 && n < 1 << 31)
        };
        let (spec, per_thread) = match (runs, owns_all_words) {
            _ if vectors => (spec.def("mode", "vectors"), vector),
            (true, _) => (unrolled(spec.def("mode", "runs")).def("adjacent", adjacent), vector),
            (_, true) => (spec.def("mode", "packed"), (4 / size).max(1)),
            (..) => (unrolled(spec.def("mode", "scattered")), SCATTERED_PER_THREAD),
        };
        let params = kernel_params! {
            n, rank: shape.len(), in_offset: self.layout().offset(), out_offset: target.layout().offset(),
            shape: &shape, in_strides: &strides[1], out_strides: &strides[0],
        };
        launch::launch(&spec, &[self, target], params, n.div_ceil(per_thread * WORKGROUP_SIZE))
    }

    /// Copies by tiles if adjacent elements of the target are along its last dimension, and those of `self` along
    /// another one. Returns false if the elements, the target's lines or the extents of both dimensions are unsuitable.
    fn transpose_into(
        &self,
        target: &Tensor,
        shape: &[usize],
        in_strides: &[usize],
        out_strides: &[usize],
    ) -> Result<bool> {
        let (size, last) = (self.dtype().size(), shape.len().saturating_sub(1));
        if last == 0 || !suits_tiles(shape[last]) || in_strides[last] <= 1 {
            return Ok(false);
        }
        // A short dimension is long together with the one around it, such as taps and channels of a filter.
        let pair = || {
            let inner = (0..last).find(|&d| in_strides[d] == 1)?;
            let surrounds =
                |&d: &usize| in_strides[d] == shape[inner] && suits_tiles(shape[d] * shape[inner]);
            Some(((0..last).find(surrounds)?, Some(inner)))
        };
        let adjacent = find_tiled_dim(shape, in_strides).map(|i| (i, None));
        let Some((i, inner)) = adjacent.or_else(pair) else { return Ok(false) };
        let out_offset = target.layout().offset();
        let has_even_target = shape[last].is_multiple_of(2)
            && out_offset.is_multiple_of(2)
            && out_strides[..last].iter().all(|stride| stride.is_multiple_of(2));
        if out_strides[last] != 1 || !matches!(size, 2 | 4) || (size == 2 && !has_even_target) {
            return Ok(false);
        }
        let (inner_i, out_stride_inner) = inner.map_or((1, 0), |d| (shape[d], out_strides[d]));
        let extent_i = shape[i] * inner_i;
        let in_run = |d: usize| d == i || Some(d) == inner;
        let outer: SmallVec<[usize; 8]> = (0..last).filter(|&d| !in_run(d)).collect();
        let of_outer = |of: &[usize]| -> Dims { outer.iter().map(|&d| of[d]).collect() };
        let offset = self.layout().offset();
        let has_even_lines = (0..=last).all(|d| in_run(d) || in_strides[d].is_multiple_of(2));
        let word_reads = offset.is_multiple_of(2) && has_even_lines && extent_i.is_multiple_of(2);
        let tile = 32 * (4 / size);
        let tiles = [extent_i, shape[last]].map(|extent| extent.div_ceil(tile));
        let spec = kernel_spec! { "transpose", size, word_reads, split: inner.is_some() };
        let params = kernel_params! {
            rank: outer.len(), tiles_i: tiles[0], tiles_j: tiles[1], extent_i, extent_j: shape[last],
            in_stride_j: in_strides[last], out_stride_i: out_strides[i], in_offset: offset, inner_i, out_stride_inner,
            out_offset, shape: &of_outer(shape), in_strides: &of_outer(in_strides), out_strides: &of_outer(out_strides),
        };
        let workgroups = numel(&of_outer(shape)) * tiles[0] * tiles[1];
        launch::launch(&spec, &[self, target], params, workgroups)?;
        Ok(true)
    }

    /// Replaces the elements by those of `source`, which is broadcast and cast.
    ///
    /// # Errors
    /// `source` does not broadcast to this shape. `self` is, or views, a leaf that requires a gradient while
    /// recording.
    #[track_caller]
    pub fn copy_(&self, source: &Tensor) -> Result<()> {
        operation!("copy_");
        fail_if!(self.layout().has_internal_overlap();
            argument("copy_"), "the tensor repeats elements (it was expanded); copy it first");
        let recorded = autograd::check_inplace("copy_", self, &[source])?;
        // Copy first, since overlapping views would be read while they are written.
        let source = if source.shares_storage(self) { source.copy()? } else { source.clone() };
        let source = source.to_dtype(self.dtype())?.broadcast_to_shape("copy_", self.shape())?;
        source.detach().copy_into(&self.detach())?;
        if !recorded {
            return Ok(());
        }
        let updated = autograd::differentiable("copy_", self.detach(), &[self, &source], |g, ctx| {
            Ok(smallvec![
                ctx.needs_input_grad[0].then(|| g.zeros_like()).transpose()?,
                ctx.needs_input_grad[1].then(|| g.clone())
            ])
        });
        autograd::rebase_history("copy_", self, &updated)
    }
}

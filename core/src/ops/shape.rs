//! Joining, repeating and arranging tensors by views and copies.
//!
//! Views are in `view`, `as_strided` and the sums over overlapping views in `strided`, padding and reversal in `pad`,
//! and operations composed of others in `shape_composite`.

pub(crate) mod pad;
pub(crate) mod shape_composite;
pub(crate) mod strided;
pub(crate) mod view;

use crate::ops::index::select::cast_index_to_i32;
use crate::ops::prelude::*;

/// Concatenates tensors along an existing dimension.
///
/// # Errors
/// The list is empty. The ranks, or extents in other dimensions than `dim`, differ.
///
/// ```
/// # use forebay_core::{device::Device, ops, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let x = Tensor::new([[1.0, 2.0]], &device)?;
/// let parts = vec![x.clone(), x.clone()];
/// assert_eq!(ops::cat(&parts, 0)?.shape(), [2, 2]);
/// assert_eq!(ops::cat(&[&x, &x], -1)?.shape(), [1, 4]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[doc(alias = "concat")]
#[doc(alias = "concatenate")]
#[track_caller]
pub fn cat(tensors: &[impl AsRef<Tensor>], dim: isize) -> Result<Tensor> {
    cat_refs(&as_refs(tensors), dim)
}

/// Borrows the tensors of a list of handles or references.
pub(super) fn as_refs(tensors: &[impl AsRef<Tensor>]) -> SmallVec<[&Tensor; 4]> {
    tensors.iter().map(AsRef::as_ref).collect()
}

#[track_caller]
fn cat_refs(tensors: &[&Tensor], dim: isize) -> Result<Tensor> {
    operation!("cat");
    // Legacy rule of PyTorch: an empty vector concatenates with anything.
    let matrices = tensors.iter().any(|t| t.rank() > 1);
    let joins = |t: &Tensor| !matrices || t.shape() != [0];
    let Some(&first) = tensors.iter().find(|t| joins(t)) else {
        fail!(argument("cat"), "takes at least one tensor")
    };
    let d = normalize_dim("cat", dim, first.rank())?;
    let mut dtype = first.dtype();
    let mut extent = 0;
    for t in tensors.iter().filter(|t| joins(t)) {
        first.check_same_device("cat", t)?;
        let fits =
            t.rank() == first.rank() && (0..t.rank()).all(|k| k == d || t.shape()[k] == first.shape()[k]);
        fail_if!(!fits || t.rank() == 0; shape("cat", [first, t]),
            "tensors have one rank of at least 1, and equal extents except in dimension {d}");
        dtype = dtype.promote(t.dtype());
        extent += t.shape()[d];
    }
    let out = Tensor::empty(with_extent(first.shape(), d, extent), dtype, first.device())?;
    let is_joined = try_join_rows(tensors, d, &out)?;
    let mut start = 0;
    // Range of each tensor in the result; `None` for a skipped empty vector.
    let mut parts: Vec<(Option<(usize, usize)>, DType)> = Vec::with_capacity(tensors.len());
    for t in tensors {
        let part = joins(t).then(|| (start, t.shape()[d]));
        if let Some((first, n)) = part {
            if !is_joined {
                t.detach().to_dtype(dtype)?.copy_into(&out.narrow(d as isize, first, n)?)?;
            }
            start += n;
        }
        parts.push((part, t.dtype()));
    }
    Ok(autograd::differentiable("cat", out, tensors, move |g, ctx| {
        parts
            .iter()
            .zip(ctx.needs_input_grad.iter())
            .map(|(&(part, dtype), &needs_grad)| match part {
                _ if !needs_grad => Ok(None),
                Some((start, n)) => g.narrow(d as isize, start, n)?.to_dtype(dtype).map(Some),
                None => Tensor::zeros([0], dtype, g.device()).map(Some),
            })
            .collect::<Result<InputGrads>>()
    }))
}

/// Largest number of tensors that one launch concatenates.
const MAX_CAT_INPUTS: usize = 8;

/// Matrix of a concatenation, in vectors of 16 bytes.
struct CatRows<'a> {
    tensor: &'a Tensor,
    offset: usize,
    stride: usize,
    columns: usize,
}

/// Returns a tensor of the result's type as rows of whole vectors: one row for each index of the dimensions before
/// `d`. Returns `None` for other layouts.
fn cat_rows<'a>(t: &'a Tensor, d: usize, out: &Tensor) -> Option<CatRows<'a>> {
    let (size, vector) = (t.dtype().size(), launch::VECTOR_BYTES);
    let (outer, inner) = (numel(&t.shape()[..d]), numel(&t.shape()[d..]));
    let strides = t.layout().compute_view_strides(&[outer, inner])?;
    let (stride, offset) = (strides[0] * usize::from(outer > 1) * size, t.layout().offset() * size);
    let is_whole = strides[1] == 1 && [stride, offset, inner * size].iter().all(|n| n.is_multiple_of(vector));
    (t.dtype() == out.dtype() && is_whole).then(|| CatRows {
        tensor: t,
        offset: offset / vector,
        stride: stride / vector,
        columns: inner * size / vector,
    })
}

/// Concatenates tensors along dimension `d` by kernels that read several of them. Returns false, without a launch, if
/// a tensor has another type than `out` or does not consist of rows of whole vectors.
fn try_join_rows(tensors: &[&Tensor], d: usize, out: &Tensor) -> Result<bool> {
    let filled: SmallVec<[&Tensor; 4]> = tensors.iter().copied().filter(|t| t.numel() > 0).collect();
    let rows: Option<SmallVec<[CatRows<'_>; 4]>> = filled.iter().map(|t| cat_rows(t, d, out)).collect();
    let Some(rows) = rows.filter(|rows| rows.len() > 1) else { return Ok(false) };
    let outer = numel(&out.shape()[..d]);
    let row = rows.iter().map(|part| part.columns).sum::<usize>();
    let max_inputs = (out.device().info().limits.max_bindings as usize - 1).min(MAX_CAT_INPUTS);
    let mut first = 0;
    for parts in rows.chunks(max_inputs) {
        let mut columns = 0;
        let mut starts = Dims::new();
        for part in parts {
            starts.push(columns);
            columns += part.columns;
        }
        let n = outer * columns;
        let f32_division = outer < 1 << 20 && n < 1 << 31;
        let spec = kernel_spec! { "cat", inputs: parts.len(), f32_division };
        let offsets: Dims = parts.iter().map(|part| part.offset).collect();
        let strides: Dims = parts.iter().map(|part| part.stride).collect();
        let params = kernel_params! {
            n, columns, row, first, starts: &starts, offsets: &offsets, strides: &strides,
        };
        let inputs: SmallVec<[&Tensor; 8]> = parts.iter().map(|part| part.tensor).collect();
        launch::launch(&spec, &bindings![&inputs[..], out], params, n.div_ceil(WORKGROUP_SIZE))?;
        first += columns;
    }
    Ok(true)
}

/// Concatenates tensors of the same shape along a new dimension.
///
/// # Errors
/// The list is empty, or the shapes differ.
#[track_caller]
pub fn stack(tensors: &[impl AsRef<Tensor>], dim: isize) -> Result<Tensor> {
    let tensors = as_refs(tensors);
    fail_if!(tensors.is_empty(); argument("stack"), "takes at least one tensor");
    if let Some(t) = tensors.iter().find(|t| t.shape() != tensors[0].shape()) {
        fail!(shape("stack", [tensors[0], t]), "tensors have one shape")
    }
    run_composite("stack", || {
        let rows = tensors.iter().map(|t| t.unsqueeze(dim)).collect::<Result<Vec<_>>>()?;
        cat(&rows, dim)
    })
}

/// Place at which a dimension is cut in two parts, inside its extent.
#[derive(Clone, Copy)]
struct Cut {
    dim: isize,
    at: usize,
    extent: usize,
}

/// Copies a tensor whose parts before and after each cut change places.
fn exchange_parts(x: &Tensor, cuts: &[Cut]) -> Result<Tensor> {
    if let &[Cut { dim, at, extent }] = cuts {
        return cat(&[&x.narrow(dim, at, extent - at)?, &x.narrow(dim, 0, at)?], dim);
    }
    let out = Tensor::empty(x.shape(), x.dtype(), x.device())?;
    // Each block lies on one side of each cut; the bits of its number say on which.
    for block in 0..1usize << cuts.len() {
        let (mut from, mut to) = (x.clone(), out.clone());
        for (k, &Cut { dim, at, extent }) in cuts.iter().enumerate() {
            let (source, target, length) =
                if block >> k & 1 == 0 { (at, 0, extent - at) } else { (0, extent - at, at) };
            (from, to) = (from.narrow(dim, source, length)?, to.narrow(dim, target, length)?);
        }
        from.copy_into(&to)?;
    }
    Ok(out)
}

/// Returns `out` in memory of its own, where an operation that copies ends with a view of its input `x`.
#[track_caller]
fn copy_if_shared(out: Tensor, x: &Tensor) -> Result<Tensor> {
    if out.shares_storage(x) { out.copy() } else { Ok(out) }
}

/// Normalizes dimensions, and fails if one is repeated.
#[track_caller]
pub(super) fn distinct_dims(op: &'static str, dims: &[isize], rank: usize) -> Result<Dims> {
    let mut normalized = Dims::with_capacity(dims.len());
    for &d in dims {
        normalized.push(normalize_dim(op, d, rank)?);
    }
    fail_if!(normalized.iter().enumerate().any(|(k, d)| normalized[..k].contains(d));
        argument(op), "{dims:?} names a dimension twice");
    Ok(normalized)
}

/// Options of [`Tensor::diff`].
#[derive(Clone, Copy, Debug, Default)]
pub struct DiffOptions<'a> {
    /// Tensor that is joined to the front before the differences; `None`.
    pub prepend: Option<&'a Tensor>,
    /// Tensor that is joined to the end before the differences; `None`.
    pub append: Option<&'a Tensor>,
}

impl Tensor {
    /// Concatenates tensors along an existing dimension: see the function [`cat`].
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let (a, b) = (Tensor::ones(&[2, 3], DType::F32, &device)?, Tensor::ones(&[2, 5], DType::F32, &device)?);
    /// assert_eq!(Tensor::cat(&[&a, &b], 1)?.shape(), [2, 8]);
    /// assert_eq!(Tensor::stack(&[&a, &a], 0)?.shape(), [2, 2, 3]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[track_caller]
    pub fn cat(tensors: &[impl AsRef<Tensor>], dim: isize) -> Result<Tensor> {
        cat(tensors, dim)
    }

    /// Concatenates tensors of the same shape along a new dimension: the function [`stack`].
    #[track_caller]
    pub fn stack(tensors: &[impl AsRef<Tensor>], dim: isize) -> Result<Tensor> {
        stack(tensors, dim)
    }

    /// Creates a `rows` by `cols` matrix with ones on the main diagonal and zeros elsewhere.
    #[track_caller]
    pub fn eye(rows: usize, cols: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        operation!("eye");
        // Zeros and ones name the operation around them.
        let out = Tensor::zeros([rows, cols], dtype, device)?;
        let diagonal = out.diagonal(0, 0, 1)?;
        Tensor::ones(diagonal.shape(), dtype, device)?.copy_into(&diagonal)?;
        Ok(out)
    }

    /// Shifts elements by `shifts` along `dims`, or all elements in their order by one shift for `()`. Elements that
    /// leave at one end enter at the other.
    ///
    /// # Errors
    /// There are not as many shifts as dimensions, a dimension is out of range, or the tensor is a scalar.
    #[track_caller]
    pub fn roll(&self, shifts: impl IntoDims, dims: impl IntoDims) -> Result<Tensor> {
        operation!("roll");
        let shifts = shifts.to_dims().unwrap_or_default();
        let Some(dims) = dims.to_dims() else {
            return self.reshape([-1])?.roll(shifts, 0)?.reshape(self.shape());
        };
        fail_if!(shifts.len() != dims.len(); argument("roll"),
            "takes a shift for each dimension, got {} for {}", shifts.len(), dims.len());
        fail_if!(self.rank() == 0; shape("roll", [self]), "takes at least one dimension");
        let mut totals = Dims::from_elem(0, self.rank());
        for (&shift, &dim) in shifts.iter().zip(&dims) {
            let d = normalize_dim("roll", dim, self.rank())?;
            let n = self.shape()[d].max(1);
            totals[d] = (totals[d] + shift.rem_euclid(n as isize) as usize) % n;
        }
        let moved =
            |d: usize| Cut { dim: d as isize, at: self.shape()[d] - totals[d], extent: self.shape()[d] };
        let cuts: SmallVec<[Cut; 2]> = (0..self.rank()).filter(|&d| totals[d] > 0).map(moved).collect();
        let opposite: SmallVec<[Cut; 2]> =
            cuts.iter().map(|cut| Cut { at: cut.extent - cut.at, ..*cut }).collect();
        let out = exchange_parts(&self.detach(), &cuts)?;
        // One copy, while the gradients of the parts and their sum are several.
        let forward = move |x: &Tensor| exchange_parts(x, &cuts);
        let back = move |g: &Tensor| exchange_parts(g, &opposite);
        Ok(autograd::linear_differentiable("roll", out, self, forward, back))
    }

    /// Returns a view with the dimensions `source` moved to `destination`, and the others in order
    /// (`movedim`).
    ///
    /// # Errors
    /// The lists have different lengths, or a dimension is out of range or repeated.
    #[doc(alias = "moveaxis")]
    #[track_caller]
    pub fn movedim(&self, source: impl IntoDims, destination: impl IntoDims) -> Result<Tensor> {
        const OP: &str = "movedim";
        let rank = self.rank();
        let all = || (0..rank as isize).collect();
        let source = &source.to_dims().unwrap_or_else(all)[..];
        let destination = &destination.to_dims().unwrap_or_else(all)[..];
        let (from, to) = (distinct_dims(OP, source, rank)?, distinct_dims(OP, destination, rank)?);
        fail_if!(from.len() != to.len();
            argument(OP), "takes as many destinations as sources, got {source:?} and {destination:?}");
        let mut rest = (0..rank).filter(|d| !from.contains(d));
        let at = |d: usize| to.iter().position(|&t| t == d).map(|k| from[k]);
        let order: Vec<isize> =
            (0..rank).filter_map(|d| at(d).or_else(|| rest.next())).map(|d| d as isize).collect();
        self.permute(&order)
    }

    /// Repeats the tensor along each dimension. Extra counts add leading dimensions.
    ///
    /// # Errors
    /// There are fewer counts than dimensions.
    #[track_caller]
    pub fn repeat(&self, counts: impl IntoShape) -> Result<Tensor> {
        let counts = new_shape("repeat", counts)?;
        fail_if!(counts.len() < self.rank();
            argument("repeat"), "{} counts for {} dimensions", counts.len(), self.rank());
        let skip = counts.len() - self.rank();
        let (mut split, mut wide, mut flat) = (Dims::new(), Dims::new(), Dims::new());
        for (d, &count) in counts.iter().enumerate() {
            let n = if d < skip { 1 } else { self.shape()[d - skip] };
            split.extend([1, n]);
            wide.extend([count, n]);
            flat.push(n.saturating_mul(count));
        }
        copy_if_shared(self.reshape(&split[..])?.broadcast_to(&wide)?.reshape(&flat[..])?, self)
    }

    /// Repeats every index of one dimension `repeats` times in a row.
    #[track_caller]
    pub fn repeat_interleave(&self, repeats: usize, dim: isize) -> Result<Tensor> {
        let d = normalize_dim("repeat_interleave", dim, self.rank())?;
        let mut wide = Dims::from_slice(self.shape());
        wide.insert((d + 1).min(self.rank()), repeats);
        let mut flat = Dims::from_slice(self.shape());
        match flat.get_mut(d) {
            Some(n) => *n = n.saturating_mul(repeats),
            None => flat.push(repeats),
        }
        let inner = self.unsqueeze(d as isize + isize::from(self.rank() > 0))?;
        copy_if_shared(inner.broadcast_to(&wide)?.reshape(&flat[..])?, self)
    }

    /// Rearranges \[.., channels · r², height, width\] to \[.., channels, height · r, width · r\] (Shi et
    /// al., 2016).
    #[track_caller]
    pub fn pixel_shuffle(&self, upscale_factor: usize) -> Result<Tensor> {
        let r = upscale_factor;
        let &[ref lead @ .., c, h, w] = self.shape() else {
            fail!(shape("pixel_shuffle", [self]), "takes [.., channels, height, width]")
        };
        fail_if!(r == 0 || r.checked_mul(r).is_none_or(|square| !c.is_multiple_of(square));
            shape("pixel_shuffle", [self]), "the channels do not divide by the square of {r}");
        let split = self.reshape(&[lead, &[c / (r * r), r, r, h, w]].concat()[..])?;
        split.permute_last_five(lead.len(), [0, 3, 1, 4, 2], &[lead, &[c / (r * r), h * r, w * r]].concat())
    }

    /// Rearranges \[.., channels, height · r, width · r\] to \[.., channels · r², height, width\]: the
    /// inverse of [`pixel_shuffle`](Self::pixel_shuffle).
    #[track_caller]
    pub fn pixel_unshuffle(&self, downscale_factor: usize) -> Result<Tensor> {
        let r = downscale_factor;
        let &[ref lead @ .., c, h, w] = self.shape() else {
            fail!(shape("pixel_unshuffle", [self]), "takes [.., channels, height, width]")
        };
        let channels = r.checked_mul(r).and_then(|square| square.checked_mul(c));
        fail_if!(r == 0 || channels.is_none() || !h.is_multiple_of(r) || !w.is_multiple_of(r);
            shape("pixel_unshuffle", [self]), "height and width do not divide by {r}");
        let split = self.reshape(&[lead, &[c, h / r, r, w / r, r]].concat()[..])?;
        split.permute_last_five(lead.len(), [0, 2, 4, 1, 3], &[lead, &[c * r * r, h / r, w / r]].concat())
    }

    fn permute_last_five(&self, lead: usize, last: [usize; 5], shape: &[usize]) -> Result<Tensor> {
        let order: Vec<isize> = (0..lead).chain(last.map(|d| lead + d)).map(|d| d as isize).collect();
        self.permute(&order)?.reshape(shape)
    }

    /// Interleaves the channels of \[batch, channels, ..\] by taking them from each of `groups` in turn.
    #[track_caller]
    pub fn channel_shuffle(&self, groups: usize) -> Result<Tensor> {
        const OP: &str = "channel_shuffle";
        let &[batch, channels, ref space @ ..] = self.shape() else {
            fail!(shape(OP, [self]), "takes [batch, channels, ..]")
        };
        fail_if!(space.is_empty() || groups == 0 || !channels.is_multiple_of(groups);
            shape(OP, [self]), "takes [batch, channels, ..] of channels that divide into {groups} groups");
        let split = [&[batch, groups, channels / groups], space].concat();
        self.reshape(&split[..])?.transpose(1, 2)?.reshape(self.shape())
    }

    /// Computes the differences of neighbours along a dimension, `n` times (0 returns `self`). For bools, the
    /// result is true where neighbours differ.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::zeros(&[2, 7], DType::F32, &device)?;
    /// assert_eq!(x.diff(2, -1, &Default::default())?.shape(), [2, 5]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// There is no dimension, `dim` is out of range, or a joined tensor differs in rank or other extents.
    #[track_caller]
    pub fn diff(&self, n: usize, dim: isize, options: &DiffOptions<'_>) -> Result<Tensor> {
        let &DiffOptions { prepend, append } = options;
        if n > 1 {
            dispatch_in_f32!("diff", [self, prepend, append], |x, before, after| {
                x.diff(n, dim, &DiffOptions { prepend: before.as_ref(), append: after.as_ref() })
            });
        }
        let d = normalize_dim("diff", dim, self.rank())? as isize;
        fail_if!(self.rank() == 0; shape("diff", [self]), "takes at least one dimension");
        let parts: Vec<&Tensor> = [prepend, Some(self), append].into_iter().flatten().collect();
        let mut out = if parts.len() == 1 || n == 0 { self.clone() } else { cat(&parts, d)? };
        for _ in 0..n.min(out.dim(d)?) {
            let left = out.dim(d)?.saturating_sub(1);
            let (before, after) = (out.narrow(d, 0, left)?, out.narrow(d, out.dim(d)? - left, left)?);
            out = if out.dtype() == DType::Bool { after.ne(&before)? } else { after.sub(&before)? };
        }
        Ok(out)
    }

    /// Returns the sum of a matrix's main diagonal, as a scalar.
    ///
    /// # Errors
    /// There are not two dimensions.
    #[track_caller]
    pub fn trace(&self) -> Result<Tensor> {
        fail_if!(self.rank() != 2; shape("trace", [self]), "takes a matrix");
        self.diagonal(0, 0, 1)?.sum_all()
    }

    /// Returns the lower triangle of the last two dimensions, up to `diagonal` above the main one.
    #[track_caller]
    pub fn tril(&self, diagonal: isize) -> Result<Tensor> {
        const OP: &str = "tril";
        run_composite(OP, || self.where_(&self.lower_triangle_mask(OP, diagonal)?, false))
    }

    /// Returns the upper triangle of the last two dimensions, from `diagonal` above the main one on.
    #[track_caller]
    pub fn triu(&self, diagonal: isize) -> Result<Tensor> {
        const OP: &str = "triu";
        run_composite(OP, || {
            self.where_(&self.lower_triangle_mask(OP, diagonal.saturating_sub(1))?.logical_not()?, false)
        })
    }

    /// Returns a mask that is true where column - row is at most `diagonal`.
    fn lower_triangle_mask(&self, op: &'static str, diagonal: isize) -> Result<Tensor> {
        let &[.., rows, cols] = self.shape() else {
            fail!(shape(op, [self]), "takes at least two dimensions")
        };
        fail_if!(rows.max(cols) > i32::MAX as usize / 2;
            shape(op, [self]), "takes matrices of less than 2^30 rows and columns");
        // Clamp the diagonal to the corners, with the same result.
        let diagonal = diagonal.clamp(-(rows as isize), cols as isize);
        let indices = |n: usize| Tensor::arange(0.0, n as f64, 1.0, DType::I32, self.device());
        let row = indices(rows)?.add(diagonal as i64)?.unsqueeze(1)?;
        indices(cols)?.le(&row)
    }

    /// Encodes class indices as one-hot vectors, \[.., classes\], i64. Other indices give zeros.
    ///
    /// An index out of range is skipped: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// The dtype is not an integer, or the number of classes exceeds an i32.
    #[track_caller]
    pub fn one_hot(&self, classes: usize) -> Result<Tensor> {
        const OP: &str = "one_hot";
        if !self.dtype().is_int() {
            return Err(Error::not_integers(OP, self.dtype(), "takes class numbers"));
        }
        fail_if!(classes > i32::MAX as usize; argument(OP), "{classes} classes are more than an i32 counts");
        let range = IndexRange { extent: classes, allows_negative: false, ignored_index: None };
        run_composite(OP, || {
            check_in_range(OP, self, range)?;
            let columns = Tensor::arange(0.0, classes as f64, 1.0, DType::I32, self.device())?;
            cast_index_to_i32(OP, self, None)?.unsqueeze(-1)?.eq(&columns)?.to_dtype(DType::I64)
        })
    }
}

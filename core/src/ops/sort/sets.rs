//! Set operations: comparison with tolerances, membership, unique elements and counts.

use crate::ops::elementwise::prelude::*;
use crate::ops::index::select::{SearchSortedOptions, cast_index_to_i32};
use crate::ops::prelude::*;
use crate::ops::reduce::scan;
use crate::ops::sort::nonempty_extent;
use crate::tensor::layout::tensor_numel;

pointwise_ops! {
    ISCLOSE "isclose": Predicate, "a == b || (m_isfinite(a) && m_isfinite(b) && abs(a - b) <= atol + rtol * abs(b)) || (m_isnan(a) && m_isnan(b) && nan > 0.0)", ["base"], [
        NoGrad, NoGrad];
}

/// Largest number of bins that a workgroup counts in shared memory.
const MAX_SHARED_BINS: usize = 2048;

/// Result of [`unique`](Tensor::unique) and [`unique_consecutive`](Tensor::unique_consecutive).
#[derive(Clone, Debug)]
pub struct Unique {
    /// Distinct elements, one-dimensional.
    pub values: Tensor,
    /// Index into `values` of each input element, as i64 in the shape of the input.
    pub inverse_indices: Tensor,
    /// Number of elements of each value, as i64.
    pub counts: Tensor,
}

/// Finds runs of equal neighbours. Returns the values, the run of each element, and the lengths.
fn find_equal_runs(x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (n, device) = (x.shape()[0], x.device());
    if n == 0 {
        let empty = |dtype| Tensor::zeros([0], dtype, device);
        return Ok((x.clone(), empty(DType::U32)?, empty(DType::I64)?));
    }
    let first = Tensor::ones([1], DType::Bool, device)?;
    let fixed = x.detach();
    let mut new = fixed.narrow(0, 1, n - 1)?.ne(&fixed.narrow(0, 0, n - 1)?)?;
    if x.rank() > 1 {
        new = new.any([1], false)?;
    }
    let starts = cat(&[&first, &new], 0)?;
    // As u32, which holds the position of every element.
    let run = scan::cumsum_counts(&starts.to_dtype(DType::U32)?)?.sub(1)?;
    let at = starts.nonzero()?.reshape([-1])?.to_dtype(DType::U32)?;
    let end = Tensor::full([1], n as f64, DType::U32, device)?;
    let lengths =
        cat(&[&at.narrow(0, 1.min(at.numel()), at.numel().saturating_sub(1))?, &end], 0)?.sub(&at)?;
    Ok((x.index_select(0, &at)?, run, lengths.to_dtype(DType::I64)?))
}

/// Counts each value below `extent` in a one-dimensional i32 tensor, as u32. Ignores others. Not recorded.
fn count_values(line: &Tensor, extent: usize) -> Result<Tensor> {
    let counts = Tensor::zeros([extent], DType::U32, line.device())?;
    let n = line.numel();
    if n == 0 || extent == 0 {
        return Ok(counts);
    }
    // Each workgroup adds all of its bins at the end, so it counts more values than bins.
    let privatized = extent <= MAX_SHARED_BINS;
    let tile = if privatized { 16 * WORKGROUP_SIZE.max(extent) } else { 4 * WORKGROUP_SIZE };
    let spec = kernel_spec! { "bincount", privatized };
    let params = kernel_params! {
        n, offset: line.layout().offset(), stride: line.strides().first().copied().unwrap_or(1), extent, tile,
    };
    launch::launch(&spec, &[line, &counts], params, n.div_ceil(tile))?;
    Ok(counts)
}

/// Scatters the run of each sorted element back to the original order, as i64.
fn scatter_inverse(order: &Tensor, run: &Tensor) -> Result<Tensor> {
    let zeros = Tensor::zeros(run.shape(), run.dtype(), run.device())?;
    zeros.scatter(0, order, run)?.to_dtype(DType::I64)
}

with_defaults! {
    /// Options of [`Tensor::isclose`] and [`Tensor::allclose`].
    #[derive(Clone, Copy, Debug)]
    pub struct IsCloseOptions {
        /// Relative tolerance; 1e-5.
        pub rtol: f64 = 1e-5,
        /// Absolute tolerance; 1e-8.
        pub atol: f64 = 1e-8,
        /// If true, NaN is close to NaN; false.
        pub equal_nan: bool = false,
    }
}

impl Tensor {
    /// Tests |a - b| ≤ atol + rtol · |b|: PyTorch's `isclose`.
    ///
    /// Infinities are close to themselves. Integers are compared as f32, unless both tolerances are 0.
    ///
    /// # Errors
    /// A tolerance is negative, or the shapes do not broadcast.
    #[track_caller]
    pub fn isclose<'a>(&self, other: impl IntoOperand<'a>, options: &IsCloseOptions) -> Result<Tensor> {
        let &IsCloseOptions { rtol, atol, equal_nan } = options;
        fail_if!(!(rtol >= 0.0 && atol >= 0.0);
            argument("isclose"), "takes bounds of at least 0, got {rtol} and {atol}");
        if rtol == 0.0 && atol == 0.0 && !self.dtype().is_float() {
            return self.eq(other);
        }
        let tolerances = [
            ("rtol", Scalar::Float(rtol)),
            ("atol", Scalar::Float(atol)),
            ("nan", Scalar::Float(f64::from(u8::from(equal_nan)))),
        ];
        run_pointwise(&ISCLOSE, &[self.into(), other.into()], &tolerances)
    }

    /// Reports whether all elements are [close](Self::isclose). The host reads the result.
    #[track_caller]
    pub fn allclose(&self, other: &Tensor, options: &IsCloseOptions) -> Result<bool> {
        Ok(self.isclose(other, options)?.all((), false)?.item()? != 0.0)
    }

    /// Reports whether the shapes and all elements are equal. The host reads the result.
    #[track_caller]
    pub fn equal(&self, other: &Tensor) -> Result<bool> {
        self.check_same_device("equal", other)?;
        Ok(self.shape() == other.shape() && self.eq(other)?.all((), false)?.item()? != 0.0)
    }

    /// Tests whether each element is in `elements`, or with `invert` is not.
    ///
    /// # Errors
    /// The type is bool.
    #[track_caller]
    pub fn isin(&self, elements: &Tensor, invert: bool) -> Result<Tensor> {
        operation!("isin");
        self.check_same_device("isin", elements)?;
        let dtype = self.dtype().promote(elements.dtype());
        let (x, set) = (self.detach().to_dtype(dtype)?, elements.detach().to_dtype(dtype)?.reshape([-1])?);
        let found = match set.numel() {
            0 => Tensor::zeros(self.shape(), DType::Bool, self.device())?,
            _ => {
                let (sorted, line) = (set.sort(0, false)?.0, x.reshape([-1])?);
                // The two search positions differ if the element is present. Compares wide integers on
                // devices without 64-bit arithmetic.
                let search = |right| {
                    sorted.searchsorted(&line, &SearchSortedOptions { out_int32: true, right, sorter: None })
                };
                search(false)?.lt(&search(true)?)?.reshape(self.shape())?
            }
        };
        if invert { found.logical_not() } else { Ok(found) }
    }

    /// Returns the distinct elements in order, with inverse indices and counts: PyTorch's `unique`.
    ///
    /// Each NaN is distinct. The host reads the number of values. A value's gradient goes to one element.
    #[track_caller]
    pub fn unique(&self) -> Result<Unique> {
        operation!("unique");
        let line = self.reshape([-1])?;
        if line.dtype() == DType::Bool {
            let Unique { values, inverse_indices, counts } = line.to_dtype(DType::U8)?.unique()?;
            let inverse_indices = inverse_indices.reshape(self.shape())?;
            return Ok(Unique { values: values.to_dtype(DType::Bool)?, inverse_indices, counts });
        }
        let (sorted, order) = line.sort(0, false)?;
        let (values, run, counts) = find_equal_runs(&sorted)?;
        Ok(Unique { values, inverse_indices: scatter_inverse(&order, &run)?.reshape(self.shape())?, counts })
    }

    /// Returns each element that differs from its predecessor, as [`unique`](Self::unique) does.
    #[track_caller]
    pub fn unique_consecutive(&self) -> Result<Unique> {
        operation!("unique_consecutive");
        let (values, run, counts) = find_equal_runs(&self.reshape([-1])?)?;
        Ok(Unique { values, inverse_indices: run.to_dtype(DType::I64)?.reshape(self.shape())?, counts })
    }

    /// Returns the distinct slices along `dim` in lexicographic order: PyTorch's `unique` with `dim`.
    ///
    /// `values` keeps the other dimensions. Sorts once for each element of a slice.
    ///
    /// # Errors
    /// `dim` is out of range, or slices have no elements. See also [`unique`](Self::unique).
    #[track_caller]
    pub fn unique_dim(&self, dim: isize) -> Result<Unique> {
        operation!(OP = "unique_dim");
        let (rows, restore) = self.flatten_slices(OP, dim)?;
        let (n, width) = (rows.shape()[0], rows.shape()[1]);
        // Each element of a slice costs one sort.
        fail_if!(tensor_numel(rows.shape()).is_none() || width > 1 << 18;
            shape(OP, [self]), "takes slices of at most 2^18 elements, and less than 2^32 in all");
        let mut order = Tensor::arange(0.0, n as f64, 1.0, DType::I64, self.device())?;
        let keys = rows.detach();
        let keys = if keys.dtype() == DType::Bool { keys.to_dtype(DType::U8)? } else { keys };
        // The sort is stable, so the order by later elements remains where this element is equal.
        for k in (0..width).rev() {
            let (_, permutation) = keys.select(1, k as isize)?.index_select(0, &order)?.sort(0, false)?;
            order = order.index_select(0, &permutation)?;
        }
        let (values, run, counts) = find_equal_runs(&rows.index_select(0, &order)?)?;
        Ok(Unique { values: restore(&values)?, inverse_indices: scatter_inverse(&order, &run)?, counts })
    }

    /// Returns slices that differ from their predecessors, as [`unique_dim`](Self::unique_dim) does.
    #[track_caller]
    pub fn unique_consecutive_dim(&self, dim: isize) -> Result<Unique> {
        operation!(OP = "unique_consecutive_dim");
        let (rows, restore) = self.flatten_slices(OP, dim)?;
        let (values, run, counts) = find_equal_runs(&rows)?;
        Ok(Unique { values: restore(&values)?, inverse_indices: run.to_dtype(DType::I64)?, counts })
    }

    /// Returns the slices along a dimension as rows, and the function that undoes this.
    #[track_caller]
    fn flatten_slices(
        &self,
        op: &'static str,
        dim: isize,
    ) -> Result<(Tensor, impl Fn(&Tensor) -> Result<Tensor>)> {
        fail_if!(self.rank() == 0; shape(op, [self]), "takes at least one dimension");
        let d = normalize_dim(op, dim, self.rank())? as isize;
        let dim_first = self.movedim([d], [0])?;
        let rest = Dims::from_slice(&dim_first.shape()[1..]);
        let width = rest.iter().product::<usize>();
        fail_if!(width == 0; shape(op, [self]), "takes slices that have elements");
        let rows = dim_first.reshape([self.shape()[d as usize], width])?;
        let restore = move |rows: &Tensor| {
            let shape: Dims = [rows.shape()[0]].into_iter().chain(rest.iter().copied()).collect();
            rows.reshape(&shape[..])?.movedim([0], [d])
        };
        Ok((rows, restore))
    }

    /// Returns the most frequent element along `dim` and its last index (i64): PyTorch's `mode`. Of equally
    /// frequent elements, the smallest wins. Each NaN is distinct.
    ///
    /// # Errors
    /// `dim` is out of range or has no elements.
    #[track_caller]
    pub fn mode(&self, dim: isize, keepdim: bool) -> Result<(Tensor, Tensor)> {
        operation!(OP = "mode");
        let d = normalize_dim(OP, dim, self.rank())?;
        if self.rank() == 0 {
            return Ok((self.clone(), Tensor::zeros((), DType::I64, self.device())?));
        }
        let n = nonempty_extent(OP, self, d)?;
        let line = with_extent(&Dims::from_elem(1, self.rank()), d, n);
        let d = d as isize;
        let keys = self.detach();
        let keys = if keys.dtype() == DType::Bool { keys.to_dtype(DType::U8)? } else { keys };
        let (sorted, order) = keys.sort(d, false)?;
        let equals_previous = sorted.narrow(d, 1, n - 1)?.eq(&sorted.narrow(d, 0, n - 1)?)?;
        // Distance of each element from the start of its run.
        let positions = Tensor::arange(0.0, n as f64, 1.0, DType::I32, self.device())?.reshape(&line[..])?;
        let begins = positions
            .narrow(d, 1, n - 1)?
            .broadcast_to(equals_previous.shape())?
            .masked_fill(&equals_previous, 0)?;
        let zero = Tensor::zeros(with_extent(begins.shape(), d as usize, 1), DType::I32, self.device())?;
        let begins = cat(&[&zero, &begins], d)?.cummax(d)?.0;
        let at = positions.sub(&begins)?.argmax(d, true)?;
        let index = order.gather(d, &at)?;
        let values = self.gather(d, &index)?;
        if keepdim { Ok((values, index)) } else { Ok((values.squeeze(d)?, index.squeeze(d)?)) }
    }

    /// Counts each value from 0 on in a one-dimensional integer tensor, as i64, or sums `weights` in their
    /// type: PyTorch's `bincount`.
    ///
    /// The length is the largest value plus one, and at least `minlength`. The host reads the largest value.
    ///
    /// # Errors
    /// The input is not one-dimensional, not of integers, or negative. The weights have another length or are
    /// not floats. A capture is active.
    #[track_caller]
    pub fn bincount(&self, weights: Option<&Tensor>, minlength: usize) -> Result<Tensor> {
        operation!(OP = "bincount");
        fail_if!(self.rank() != 1 || weights.is_some_and(|w| w.shape() != self.shape());
            shape(OP, &[self.shape(), weights.unwrap_or(self).shape()]),
            "takes a line of integers, and as many weights");
        if self.dtype().is_float() || self.dtype() == DType::Bool {
            return Err(Error::not_integers(OP, self.dtype(), "takes integers"));
        }
        if let Some(w) = weights.filter(|w| !w.dtype().is_float()) {
            fail!(dtype(OP, w.dtype()), "takes weights that are floats; cast with `to_dtype`")
        }
        let (mut extent, line) = (minlength, cast_index_to_i32(OP, self, None)?);
        if self.numel() > 0 {
            let (min, max) = (line.min_all()?.item()?, line.max_all()?.item()?);
            if min < 0.0 {
                // An i32 does not hold every value of an i64.
                let min = self.to_integers()?.into_iter().min().unwrap_or_default();
                fail!(argument(OP), "takes values from 0 on, got {min}")
            }
            fail_if!(max >= f64::from(i32::MAX); argument(OP),
                "counts values below 2^31 - 1, and has a count for each from 0 on; got a larger one");
            extent = extent.max(max as usize + 1);
        }
        match weights {
            Some(w) => Tensor::zeros([extent], w.dtype(), self.device())?.index_add(0, &line, w, 1.0),
            None => count_values(&line, extent)?.to_dtype(DType::I64),
        }
    }

    /// Counts elements in `bins` equal bins from `min` to `max`, in the tensor's type: PyTorch's `histc`.
    ///
    /// If both limits are equal, the tensor's extrema replace them. Elements out of range are not counted.
    ///
    /// # Errors
    /// `bins` is 0, `min` exceeds `max`, a limit is not finite, or the type is not a float.
    #[track_caller]
    pub fn histc(&self, bins: usize, min: f64, max: f64) -> Result<Tensor> {
        operation!(OP = "histc");
        fail_if!(bins == 0 || bins > i32::MAX as usize || !(min <= max && (max - min).is_finite());
            argument(OP), "takes 1 to 2^31 - 1 bins between finite bounds, got {bins} from {min} to {max}");
        fail_if!(!self.dtype().is_float(); dtype(OP, self.dtype()), "takes floats; cast with `to_dtype`");
        autograd::check_no_grad_inputs(OP, &[self])?;
        let line = self.reshape([-1])?;
        let x = if line.dtype().size() == 2 { line.to_dtype(DType::F32)? } else { line };
        let (mut min, mut max) = (min, max);
        if min == max && x.numel() > 0 {
            (min, max) = (x.min_all()?.item()?, x.max_all()?.item()?);
            fail_if!(!(max - min).is_finite(); argument(OP), "takes finite values, got {min} to {max}");
        }
        if min == max {
            (min, max) = (min - 1.0, max + 1.0);
        }
        let inside = x.ge(min)?.logical_and(&x.le(max)?)?;
        // Powers of two keep the products below finite.
        let max_range = if x.dtype() == DType::F64 { 1e300_f64 } else { 1e37 };
        let excess_exponent = ((max - min).log2() + (bins as f64).log2() - max_range.log2()).ceil();
        let scale = (-excess_exponent.max(0.0)).exp2();
        let (min, max) = (min * scale, max * scale);
        let x = if excess_exponent > 0.0 { x.mul(scale)? } else { x };
        let bin = x.sub(min)?.mul(bins as f64)?.div(max - min)?.masked_fill(&inside.logical_not()?, 0.0)?;
        // Clamped as integers: as a float, the last of many bins may round to one more.
        let bin = bin.floor()?.to_dtype(DType::I32)?.clamp(0, bins as i64 - 1)?;
        // Elements out of range get the bin -1, which is not counted.
        count_values(&bin.masked_fill(&inside.logical_not()?, -1)?, bins)?.to_dtype(self.dtype())
    }

    /// Counts elements between neighbouring `edges`, or sums their weights, in the tensor's type: PyTorch's
    /// `histogram` with its bins as a tensor. `density` divides by the sum and the widths.
    ///
    /// The edges ascend. A bin contains its lower edge, and the last bin both edges. Other elements are not counted.
    ///
    /// # Errors
    /// `edges` is not one-dimensional with at least two elements. `weight` has another shape. The types differ, or are
    /// not floats.
    #[track_caller]
    pub fn histogram(&self, edges: &Tensor, weight: Option<&Tensor>, density: bool) -> Result<Tensor> {
        operation!(OP = "histogram");
        fail_if!(edges.rank() != 1 || edges.numel() < 2;
            shape(OP, [self, edges]), "takes a vector of at least two edges");
        fail_if!(weight.is_some_and(|weight| weight.shape() != self.shape());
            shape(OP, [self, edges]), "takes a weight for each element");
        for t in [Some(self), Some(edges), weight].into_iter().flatten() {
            fail_if!(!t.dtype().is_float() || t.dtype() != self.dtype();
                dtype(OP, t.dtype()), "takes floats of one type; cast with `to_dtype`");
            autograd::check_no_grad_inputs(OP, &[t])?;
        }
        if self.dtype().size() == 2 {
            let weight = weight.map(|weight| weight.to_dtype(DType::F32)).transpose()?;
            let (x, edges) = (self.to_dtype(DType::F32)?, edges.to_dtype(DType::F32)?);
            return x.histogram(&edges, weight.as_ref(), density)?.to_dtype(self.dtype());
        }
        let (x, bins) = (self.reshape([-1])?, edges.numel() - 1);
        let last = edges.narrow(0, bins, 1)?;
        let search = SearchSortedOptions { out_int32: true, right: true, sorter: None };
        let bin = edges.contiguous()?.searchsorted(&x.contiguous()?, &search)?.sub(1)?;
        let bin = bin.masked_fill(&x.eq(&last)?, bins as i64 - 1)?;
        let outside = bin.lt(0)?.logical_or(&bin.ge(bins as i64)?)?;
        let counts = match weight {
            None => count_values(&bin.masked_fill(&outside, -1)?, bins)?.to_dtype(x.dtype())?,
            Some(weight) => {
                let weight = weight.reshape([-1])?.masked_fill(&outside, 0.0)?;
                let bin = bin.masked_fill(&outside, 0)?;
                Tensor::zeros([bins], x.dtype(), x.device())?.index_add(0, &bin, &weight, 1.0)?
            }
        };
        if !density {
            return Ok(counts);
        }
        counts.div(&counts.sum_all()?)?.div(&edges.diff(1, 0, &Default::default())?)
    }
}

//! Padding, and reversal of dimensions: copies whose positions follow a rule in each dimension.

use crate::ops::prelude::*;
use crate::ops::shape::distinct_dims;
use crate::tensor::layout::tensor_numel;

/// Values outside of a padded tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PadMode {
    /// A constant, such as `PadMode::Constant(0.into())`.
    Constant(Scalar),
    /// Mirrored at the edge, without repeating the edge.
    Reflect,
    /// Repeated edge.
    Replicate,
    /// Repeated tensor.
    Circular,
}

impl PadMode {
    /// Reports whether the mode defines position `i`, which may be outside of the extent `n`.
    fn defines(self, i: isize, n: isize) -> bool {
        match self {
            Self::Constant(_) => true,
            Self::Replicate => n > 0,
            Self::Circular => (-n..2 * n).contains(&i),
            Self::Reflect => i > -n && i < 2 * n - 1,
        }
    }

    /// Returns the rule of the kernel. Without pads, all rules are the same.
    fn rule(self) -> &'static str {
        match self {
            Self::Constant(_) | Self::Replicate => "replicate",
            Self::Reflect => "reflect",
            Self::Circular => "circular",
        }
    }
}

/// Dimension of a copy: an output position `c` reads the input position `c - before` by the mode's rule.
#[derive(Clone, Copy)]
struct RemapDim {
    output: usize,
    input: usize,
    before: isize,
    stride: usize,
    is_reversed: bool,
}

impl RemapDim {
    fn is_plain(&self) -> bool {
        self.before == 0 && self.output == self.input
    }

    /// Returns both dimensions as one, if every position of the pair is that of one dimension.
    fn merge(&self, inner: &Self) -> Option<Self> {
        let is_line = self.stride == inner.stride * inner.output && self.is_reversed == inner.is_reversed;
        (self.is_plain() && inner.is_plain() && is_line).then(|| Self {
            output: self.output * inner.output,
            input: self.input * inner.input,
            ..*inner
        })
    }
}

/// Merges dimensions wherever their positions are those of one dimension.
fn merge_dims(dims: &[RemapDim]) -> SmallVec<[RemapDim; 8]> {
    let mut merged: SmallVec<[RemapDim; 8]> = SmallVec::new();
    for dim in dims.iter().filter(|dim| dim.output != 1 || !dim.is_plain()) {
        match merged.last_mut().and_then(|last| Some((last.merge(dim)?, last))) {
            Some((both, last)) => *last = both,
            None => merged.push(*dim),
        }
    }
    merged
}

/// Copies a tensor with the given dimensions.
fn remap(op: &'static str, x: &Tensor, dims: &[RemapDim], mode: PadMode) -> Result<Tensor> {
    let shape: Dims = dims.iter().map(|dim| dim.output).collect();
    let out = Tensor::empty(&shape, x.dtype(), x.device())?;
    let mut merged = merge_dims(dims);
    launch::check_rank(op, merged.len())?;
    let (mut n, mut offset, mut size) = (out.numel(), x.layout().offset(), x.dtype().size());
    // Neighbours that stay together move in steps of 16 bytes, if their rows are aligned.
    let width = launch::VECTOR_BYTES / size;
    if let [before @ .., last] = &mut merged[..]
        && (last.stride, last.is_plain(), last.is_reversed) == (1, true, false)
        && before.iter().map(|dim| dim.stride).chain([last.output, offset]).all(|k| k.is_multiple_of(width))
    {
        before.iter_mut().for_each(|dim| dim.stride /= width);
        (last.output, last.input) = (last.output / width, last.input / width);
        (n, offset, size) = (n / width, offset / width, launch::VECTOR_BYTES);
    }
    // Positions are modulo 2^32, so a negative stride wraps.
    let stride = |dim: &RemapDim| match dim.is_reversed {
        true => (dim.stride as u32).wrapping_neg() as usize,
        false => dim.stride,
    };
    let last_positions = merged.iter().filter(|dim| dim.is_reversed);
    offset += last_positions.map(|dim| dim.input.saturating_sub(1) * dim.stride).sum::<usize>();
    let list = |of: &dyn Fn(&RemapDim) -> usize| -> Dims { merged.iter().map(of).collect() };
    let spec = kernel_spec! { "remap", size, rule: mode.rule() };
    let params = kernel_params! {
        n, rank: merged.len(), in_offset: offset, shape: &list(&|dim| dim.output),
        extents: &list(&|dim| dim.input), before: &list(&|dim| dim.before as u32 as usize),
        in_strides: &list(&stride),
    };
    let per_thread = (4 / size).max(1);
    launch::launch(&spec, &[x, &out], params, n.div_ceil(per_thread * WORKGROUP_SIZE))?;
    Ok(out)
}

/// Reverses dimensions in one copy.
fn reverse(x: &Tensor, reversed: &[usize]) -> Result<Tensor> {
    let dims: SmallVec<[RemapDim; 8]> = (0..x.rank())
        .map(|d| {
            let (n, stride) = (x.shape()[d], x.strides()[d]);
            let is_reversed = reversed.contains(&d);
            RemapDim { output: n, input: n, before: 0, stride, is_reversed }
        })
        .collect();
    if let (true, (first @ [_, ..], rest)) =
        (merge_dims(&dims).len() > launch::MAX_RANK, reversed.split_at(reversed.len() / 2))
    {
        // More dimensions than a kernel indexes.
        return reverse(&reverse(x, first)?, rest);
    }
    remap("flip", x, &dims, PadMode::Replicate)
}

/// Pads of a tensor's dimensions, before and after each. Negative pads crop.
type Pads = SmallVec<[[isize; 2]; 4]>;

/// Pads with elements of the tensor.
fn pad_with_elements(x: &Tensor, pads: &[[isize; 2]], mode: PadMode) -> Result<Tensor> {
    let dims: SmallVec<[RemapDim; 8]> = pads
        .iter()
        .enumerate()
        .map(|(d, &[before, after])| {
            let (n, stride) = (x.shape()[d], x.strides()[d]);
            let output = (before + n as isize + after) as usize;
            RemapDim { output, input: n, before, stride, is_reversed: false }
        })
        .collect();
    let padded = pads.iter().filter(|pads| **pads != [0, 0]).count();
    if merge_dims(&dims).len() > launch::MAX_RANK && padded > 1 {
        // More dimensions than a kernel indexes.
        let (mut first, mut rest, mut seen) = (Pads::from(pads), Pads::from(pads), 0);
        for (first, rest) in first.iter_mut().zip(&mut rest) {
            seen += usize::from(*first != [0, 0]);
            *(if seen > padded / 2 { first } else { rest }) = [0, 0];
        }
        return pad_with_elements(&pad_with_elements(x, &first, mode)?, &rest, mode);
    }
    remap("pad", x, &dims, mode)
}

/// Transposes [`pad_with_elements`] along dimension `d` of extent `n`: adds the values of pads to the elements that
/// they repeat.
fn add_pads(g: &Tensor, d: usize, n: usize, [before, after]: [isize; 2], mode: PadMode) -> Result<Tensor> {
    let dim = d as isize;
    let (n, first, end) = (n as isize, -before, n as isize + after);
    // Parts of the positions: before the input, in it and behind it.
    let part = |from: isize, to: isize| -> Result<Option<Tensor>> {
        let (from, to) = (from.max(first), to.min(end));
        let part = (from < to).then(|| g.narrow(dim, (from - first) as usize, (to - from) as usize));
        part.transpose()
    };
    let sum = Tensor::zeros(with_extent(g.shape(), d, n as usize), g.dtype(), g.device())?;
    let view = |from: isize, length: usize| sum.narrow(dim, from as usize, length);
    if let Some(inner) = part(0, n)? {
        inner.copy_into(&view(first.max(0), inner.shape()[d])?)?;
    }
    for (is_behind, values) in [(false, part(first, 0)?), (true, part(n.max(first), end)?)] {
        let Some(values) = values else { continue };
        let length = values.shape()[d];
        match mode {
            PadMode::Reflect => {
                let lowest = if is_behind { 2 * (n - 1) - (end - 1) } else { 1 - (end.min(0)) };
                view(lowest, length)?.add_(&reverse(&values, &[d])?)?;
            }
            PadMode::Circular => {
                let lowest = if is_behind { n.max(first) - n } else { n + first };
                view(lowest, length)?.add_(&values)?;
            }
            PadMode::Constant(_) | PadMode::Replicate => {
                view(if is_behind { n - 1 } else { 0 }, 1)?.add_(&values.sum(dim, true)?)?;
            }
        }
    }
    Ok(sum)
}

/// Transposes [`pad_with_elements`] for a tensor of `shape`.
fn pad_with_elements_backward(
    g: &Tensor,
    shape: &[usize],
    pads: &[[isize; 2]],
    mode: PadMode,
) -> Result<Tensor> {
    // Round once, after all sums.
    let wide = amp::half_to_f32(g)?;
    let mut padded = pads.iter().enumerate().filter(|(_, pads)| **pads != [0, 0]);
    padded.try_fold(wide, |g, (d, &pads)| add_pads(&g, d, shape[d], pads, mode))?.to_dtype(g.dtype())
}

/// Returns the view that negative pads leave. Other pads count as 0.
fn crop(x: &Tensor, pads: &[[isize; 2]]) -> Result<Tensor> {
    pads.iter().enumerate().try_fold(x.clone(), |x, (d, pads)| {
        let ([before, after], n) = (pads.map(|pad| (-pad).max(0) as usize), x.shape()[d]);
        match before + after {
            0 => Ok(x),
            cropped => x.narrow(d as isize, before.min(n), n.saturating_sub(cropped)),
        }
    })
}

/// Crops by negative pads, and fills the positions of the others with a constant.
fn pad_constant(x: &Tensor, pads: Pads, value: Scalar) -> Result<Tensor> {
    let shape: Dims = pads.iter().zip(x.shape()).map(|(&[a, b], &n)| (a + n as isize + b) as usize).collect();
    // A pad that only crops writes no constant.
    let is_filled = pads.iter().flatten().any(|&pad| pad > 0);
    let out = match is_filled {
        true => Tensor::full(&shape, value, x.dtype(), x.device())?,
        false => Tensor::empty(&shape, x.dtype(), x.device())?,
    };
    let opposite: Pads = pads.iter().map(|&[before, after]| [-before, -after]).collect();
    crop(&x.detach(), &pads)?.copy_into(&crop(&out, &opposite)?)?;
    let is_cropped = pads.iter().flatten().any(|&pad| pad < 0);
    let forward = move |x: &Tensor| pad_constant(x, pads.clone(), Scalar::Int(0));
    // Cropped elements have zero gradients, and pads none.
    let back = move |g: &Tensor| match is_cropped {
        true => pad_constant(g, opposite.clone(), Scalar::Int(0)),
        false => crop(g, &opposite),
    };
    Ok(autograd::linear_differentiable("pad", out, x, forward, back))
}

impl Tensor {
    /// Reverses the order of elements along `dims`, or along all dimensions for `()`. An empty list reverses none.
    ///
    /// # Errors
    /// A dimension is out of range or repeated, or an expanded tensor has 2^32 elements or more.
    #[track_caller]
    pub fn flip(&self, dims: impl IntoDims) -> Result<Tensor> {
        const OP: &str = "flip";
        let dims = dims.to_dims().unwrap_or_else(|| (0..self.rank() as isize).collect());
        let reversed = distinct_dims(OP, &dims, self.rank())?;
        if dims.is_empty() || self.rank() == 0 {
            return self.copy();
        }
        operation!(OP);
        fail_if!(tensor_numel(self.shape()).is_none();
            shape(OP, [self]), "takes tensors of less than 2^32 elements");
        let out = reverse(&self.detach(), &reversed)?;
        // Its own transpose.
        let again = move |x: &Tensor| reverse(x, &reversed);
        Ok(autograd::linear_differentiable(OP, out, self, again.clone(), again))
    }

    /// Pads by pairs (before, after), starting at the last dimension: PyTorch's `pad`. Negative pads crop.
    ///
    /// ```
    /// # use forebay_core::{device::Device, ops::PadMode, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::new([[1.0, 2.0, 3.0]], &device)?;
    /// assert_eq!(x.pad(&[1, 1], PadMode::Reflect)?.shape(), [1, 5]);
    /// assert_eq!(x.pad(&[0, 2, 1, 0], PadMode::Constant(0.5.into()))?.shape(), [2, 5]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// There are more pairs than dimensions, too few elements for the mode, or no such constant in the dtype.
    #[track_caller]
    pub fn pad(&self, pads: &[isize], mode: PadMode) -> Result<Tensor> {
        operation!(OP = "pad");
        let pairs = pads.len() / 2;
        fail_if!(!pads.len().is_multiple_of(2) || pairs > self.rank();
            argument(OP), "takes up to {} pairs, got {pads:?}", self.rank());
        let mut by_dim: Pads = smallvec![[0, 0]; self.rank()];
        by_dim.iter_mut().rev().zip(pads.chunks_exact(2)).for_each(|(to, pair)| *to = [pair[0], pair[1]]);
        let extent =
            |(&[before, after], &n): (&[isize; 2], &usize)| n as i128 + before as i128 + after as i128;
        let extents: SmallVec<[i128; 6]> = by_dim.iter().zip(self.shape()).map(extent).collect();
        let padded: Dims = extents.iter().map(|&n| usize::try_from(n.max(0)).unwrap_or(usize::MAX)).collect();
        fail_if!(tensor_numel(&padded).is_none(); argument(OP),
            "{pads:?} makes shape {padded:?}, and a tensor has at most 4,294,967,295 elements");
        if let Some(n) = pads.iter().find(|n| n.unsigned_abs() > i32::MAX as usize) {
            fail!(argument(OP), "{n} is more than a dimension can have, {}", i32::MAX);
        }
        if let Some(d) = (0..self.rank()).rev().find(|&d| extents[d] < 0) {
            fail!(argument(OP), "{pads:?} cuts more than dimension {d} of extent {} has", self.shape()[d]);
        }
        if pads.iter().all(|&pad| pad == 0) {
            return self.copy();
        }
        if let PadMode::Constant(value) = mode {
            return pad_constant(self, by_dim, value);
        }
        let mut x = self.clone();
        if mode == PadMode::Circular {
            // Crop first, because cropped elements must not wrap around.
            for (d, pads) in by_dim.iter_mut().enumerate() {
                let [before, after] = pads.map(|pad| (-pad).max(0) as usize);
                if before + after > 0 {
                    x = x.narrow(d as isize, before, x.shape()[d].saturating_sub(before + after))?;
                    *pads = pads.map(|pad| pad.max(0));
                }
            }
        }
        for (d, &[before, after]) in by_dim.iter().enumerate().rev() {
            let n = x.shape()[d] as isize;
            let end = n + after;
            // Reflected and circular pads are at most as long as the dimension.
            let fits = end == -before || (mode.defines(-before, n) && mode.defines(end - 1, n));
            fail_if!([before, after] != [0, 0] && (!fits || end > u32::MAX as isize); argument(OP),
                "({before}, {after}) is too much for dimension {d} of extent {n} in mode {mode:?}");
        }
        let out = pad_with_elements(&x.detach(), &by_dim, mode)?;
        let (shape, back): (Dims, Pads) = (x.shape().into(), by_dim.clone());
        let forward = move |x: &Tensor| pad_with_elements(x, &by_dim, mode);
        let back = move |g: &Tensor| pad_with_elements_backward(g, &shape, &back, mode);
        Ok(autograd::linear_differentiable(OP, out, &x, forward, back))
    }
}

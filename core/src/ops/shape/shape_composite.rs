//! Tensors put together: joined, crossed with each other, multiplied dimension by dimension.

use crate::amp::dispatch_autocast;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::ops::shape::{PadMode, cat, stack};
use crate::runtime::device::Device;
use crate::tensor::layout::{MAX_TENSOR_NUMEL, broadcast_shapes, normalize_dim};
use crate::tensor::shape::new_shape;
use crate::tensor::{Dims, IntoDims, IntoShape, Tensor};

/// Tensors, each made of the one given, joined along a dimension.
#[track_caller]
fn map_and_cat(tensors: &[&Tensor], dim: isize, made: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let tensors = tensors.iter().map(|t| made(t)).collect::<Result<Vec<_>>>()?;
    cat(&tensors.iter().collect::<Vec<_>>(), dim)
}

/// Tensors joined along dimension 1, those of fewer than two dimensions along dimension 0.
///
/// # Errors
/// As [`cat`].
#[track_caller]
pub fn hstack(tensors: &[&Tensor]) -> Result<Tensor> {
    let flat = tensors.first().is_some_and(|t| t.rank() < 2);
    map_and_cat(tensors, if flat { 0 } else { 1 }, Tensor::atleast_1d)
}

/// Tensors joined along dimension 0, those of fewer than two dimensions as rows.
///
/// # Errors
/// As [`cat`].
#[track_caller]
pub fn vstack(tensors: &[&Tensor]) -> Result<Tensor> {
    map_and_cat(tensors, 0, Tensor::atleast_2d)
}

/// Tensors joined along dimension 2, those of fewer than three dimensions behind each other.
///
/// # Errors
/// As [`cat`].
#[track_caller]
pub fn dstack(tensors: &[&Tensor]) -> Result<Tensor> {
    map_and_cat(tensors, 2, Tensor::atleast_3d)
}

/// Tensors joined along dimension 1, those of fewer than two dimensions as columns.
///
/// # Errors
/// As [`cat`].
#[track_caller]
pub fn column_stack(tensors: &[&Tensor]) -> Result<Tensor> {
    map_and_cat(tensors, 1, |t| if t.rank() < 2 { t.reshape([t.numel(), 1]) } else { Ok(t.clone()) })
}

/// The matrices, in their common type, along the diagonal of a matrix that is zero elsewhere; vectors are rows.
///
/// # Errors
/// The list is empty; a tensor has more than two dimensions; memory runs out.
#[track_caller]
pub fn block_diag(tensors: &[&Tensor]) -> Result<Tensor> {
    const OP: &str = "block_diag";
    let _op = memory::scope::enter_op(OP);
    if let Some(t) = tensors.iter().find(|t| t.rank() > 2) {
        return Err(Error::shape(OP, "takes tensors of at most two dimensions", &[t.shape()]));
    }
    let Some(dtype) = tensors.iter().map(|t| t.dtype()).reduce(DType::promote) else {
        return Err(Error::argument(OP, "takes at least one tensor"));
    };
    let blocks = tensors.iter().map(|t| t.to_dtype(dtype)?.atleast_2d()).collect::<Result<Vec<_>>>()?;
    let columns: usize = blocks.iter().map(|t| t.shape()[1]).sum();
    let mut before = 0;
    let rows = blocks.iter().map(|t| {
        let behind = columns - before - t.shape()[1];
        let row = t.pad(&[before as isize, behind as isize], PadMode::Constant(0.0));
        before += t.shape()[1];
        row
    });
    let rows = rows.collect::<Result<Vec<_>>>()?;
    cat(&rows.iter().collect::<Vec<_>>(), 0)
}

/// Views of lines (of one dimension, or of none as of one element), each repeated along the dimensions of the others: PyTorch's
/// `meshgrid` with `indexing="ij"`, or with `xy` as there, where the first two dimensions change places.
///
/// # Errors
/// A tensor has more than one dimension.
#[track_caller]
pub fn meshgrid(lines: &[&Tensor], xy: bool) -> Result<Vec<Tensor>> {
    if let Some(t) = lines.iter().find(|t| t.rank() > 1) {
        return Err(Error::shape("meshgrid", "takes tensors of one dimension", &[t.shape()]));
    }
    let mut order: Vec<usize> = (0..lines.len()).collect();
    if xy && lines.len() > 1 {
        order.swap(0, 1);
    }
    let shape: Dims = order.iter().map(|&k| lines[k].numel()).collect();
    let view = |(k, line): (usize, &&Tensor)| {
        let own: Dims = order.iter().map(|&o| if o == k { line.numel() } else { 1 }).collect();
        line.reshape(&own[..])?.broadcast_to(&shape)
    };
    lines.iter().enumerate().map(view).collect()
}

/// Views of all tensors in the shape that they broadcast to.
///
/// # Errors
/// The shapes do not broadcast.
#[track_caller]
pub fn broadcast_tensors(tensors: &[&Tensor]) -> Result<Vec<Tensor>> {
    let shapes: Vec<&[usize]> = tensors.iter().map(|t| t.shape()).collect();
    let shape = broadcast_shapes("broadcast_tensors", &shapes)?;
    tensors.iter().map(|t| t.broadcast_to(&shape)).collect()
}

/// All ways to take one element of each line, in order: \[ways, lines\]; of one line the line itself.
///
/// # Errors
/// The list is empty; a tensor has not one dimension; memory runs out.
#[track_caller]
pub fn cartesian_prod(lines: &[&Tensor]) -> Result<Tensor> {
    let _op = memory::scope::enter_op("cartesian_prod");
    if let Some(t) = lines.iter().find(|t| t.rank() != 1) {
        return Err(Error::shape("cartesian_prod", "takes tensors of one dimension", &[t.shape()]));
    }
    match lines {
        [] => Err(Error::argument("cartesian_prod", "takes at least one tensor")),
        [line] => Ok((*line).clone()),
        _ => {
            let columns =
                meshgrid(lines, false)?.iter().map(|t| t.reshape([-1])).collect::<Result<Vec<_>>>()?;
            stack(&columns.iter().collect::<Vec<_>>(), 1)
        }
    }
}

impl Tensor {
    /// The tensor, or of none dimensions a view with one.
    ///
    /// # Errors
    /// None are known.
    #[track_caller]
    pub fn atleast_1d(&self) -> Result<Tensor> {
        if self.rank() == 0 { self.reshape([1]) } else { Ok(self.clone()) }
    }

    /// The tensor, or of fewer dimensions a view with two: a row.
    ///
    /// # Errors
    /// None are known.
    #[track_caller]
    pub fn atleast_2d(&self) -> Result<Tensor> {
        if self.rank() < 2 { self.reshape([1, self.numel()]) } else { Ok(self.clone()) }
    }

    /// The tensor, or of fewer dimensions a view with three: \[1, n, 1\] of a vector, \[m, n, 1\] of a matrix.
    ///
    /// # Errors
    /// None are known.
    #[track_caller]
    pub fn atleast_3d(&self) -> Result<Tensor> {
        match *self.shape() {
            [] | [_] => self.reshape([1, self.numel(), 1]),
            [_, _] => self.unsqueeze(-1),
            _ => Ok(self.clone()),
        }
    }

    /// The tensor `counts` times along each dimension; missing counts, or missing dimensions, stand in front and are 1.
    /// PyTorch's `tile`.
    ///
    /// # Errors
    /// As [`repeat`](Self::repeat).
    #[track_caller]
    pub fn tile(&self, counts: impl IntoShape) -> Result<Tensor> {
        let counts = &new_shape("tile", counts)?[..];
        let missing = self.rank().saturating_sub(counts.len());
        self.repeat(&[&vec![1; missing][..], counts].concat())
    }

    /// The plane of two dimensions turned by `k` quarters, from the first towards the second.
    ///
    /// # Errors
    /// The dimensions are the same, or out of range; memory runs out.
    #[track_caller]
    pub fn rot90(&self, k: isize, dims: [isize; 2]) -> Result<Tensor> {
        let [first, second] = dims;
        if normalize_dim("rot90", first, self.rank())? == normalize_dim("rot90", second, self.rank())? {
            return Err(Error::argument("rot90", format!("takes two dimensions, got {first} and {second}")));
        }
        match k.rem_euclid(4) {
            0 => self.copy(),
            1 => self.flip(&[second])?.transpose(first, second),
            2 => self.flip(&dims),
            _ => self.transpose(first, second)?.flip(&[second]),
        }
    }

    /// All ways to take `r` elements of a line, in order, with or without repetition: \[ways, r\].
    ///
    /// # Errors
    /// There is more than one dimension; `r` is 0; memory runs out.
    #[track_caller]
    pub fn combinations(&self, r: usize, with_replacement: bool) -> Result<Tensor> {
        const OP: &str = "combinations";
        let _op = memory::scope::enter_op(OP);
        let &[n] = self.shape() else {
            return Err(Error::shape(OP, "takes a tensor of one dimension", &[self.shape()]));
        };
        if r == 0 {
            return Err(Error::argument(OP, "takes at least one element at a time"));
        }
        // The flags of all tuples are one tensor.
        let tuples = u32::try_from(r).ok().filter(|&r| r <= 64).and_then(|r| n.checked_pow(r));
        if tuples.is_none_or(|tuples| tuples > MAX_TENSOR_NUMEL) {
            return Err(Error::argument(
                OP,
                format!("{r} of {n} elements at a time are too many to go through"),
            ));
        }
        let line = Tensor::arange(0.0, n as f64, 1.0, DType::I32, self.device())?;
        // Each place holds more than the one before it, or as much: the flags of all pairs of neighbours.
        let places = meshgrid(&vec![&line; r], false)?;
        let mut rising = Tensor::ones(&vec![n; r], DType::Bool, self.device())?;
        for pair in places.windows(2) {
            let holds = if with_replacement { pair[0].le(&pair[1])? } else { pair[0].lt(&pair[1])? };
            rising = rising.logical_and(&holds)?;
        }
        let chosen = rising.nonzero()?;
        self.index_select(0, &chosen.reshape([-1])?)?.reshape(chosen.shape())
    }

    /// The places on and below a diagonal of a matrix, row by row: \[2, places\], as i64. PyTorch's `tril_indices`.
    ///
    /// # Errors
    /// The step is being captured; memory runs out.
    #[track_caller]
    pub fn tril_indices(rows: usize, columns: usize, diagonal: isize, device: &Device) -> Result<Tensor> {
        Self::ones(&[rows, columns], DType::I32, device)?.tril(diagonal)?.nonzero()?.t()?.contiguous()
    }

    /// The places on and above a diagonal of a matrix, as [`tril_indices`](Self::tril_indices).
    ///
    /// # Errors
    /// As [`tril_indices`](Self::tril_indices).
    #[track_caller]
    pub fn triu_indices(rows: usize, columns: usize, diagonal: isize, device: &Device) -> Result<Tensor> {
        Self::ones(&[rows, columns], DType::I32, device)?.triu(diagonal)?.nonzero()?.t()?.contiguous()
    }

    /// Kronecker's product: each element of `self` times all of `other`, in its place. Missing dimensions stand in front.
    ///
    /// # Errors
    /// The types are not taken; memory runs out.
    #[track_caller]
    pub fn kron(&self, other: &Tensor) -> Result<Tensor> {
        dispatch_autocast!("kron", [self, other], |a, b| a.kron(&b));
        let _op = memory::scope::enter_op("kron");
        let rank = self.rank().max(other.rank());
        let padded = |t: &Tensor| -> Dims { [&vec![1; rank - t.rank()][..], t.shape()].concat().into() };
        let (a, b) = (padded(self), padded(other));
        let pairs =
            |a: &[usize], b: &[usize]| -> Dims { a.iter().zip(b).flat_map(|(&m, &n)| [m, n]).collect() };
        let ones = vec![1; rank];
        let out = self.reshape(&pairs(&a, &ones)[..])?.mul(&other.reshape(&pairs(&ones, &b)[..])?)?;
        let shape: Dims = a.iter().zip(&b).map(|(m, n)| m * n).collect();
        out.reshape(&shape[..])
    }

    /// The sum of products over dimensions of both, which are as many and as long: the other dimensions of `self`, then those of `other`.
    ///
    /// # Errors
    /// The dimensions do not fit, or are out of range, or named twice; the types are not taken; memory runs out.
    #[track_caller]
    pub fn tensordot(
        &self,
        other: &Tensor,
        dims: impl IntoDims,
        other_dims: impl IntoDims,
    ) -> Result<Tensor> {
        const OP: &str = "tensordot";
        let all = |t: &Tensor| (0..t.rank() as isize).collect();
        let dims = &dims.to_dims().unwrap_or_else(|| all(self))[..];
        let other_dims = &other_dims.to_dims().unwrap_or_else(|| all(other))[..];
        let _op = memory::scope::enter_op(OP);
        let places = |t: &Tensor, dims: &[isize]| -> Result<Dims> {
            let places = dims.iter().map(|&d| normalize_dim(OP, d, t.rank())).collect::<Result<Dims>>()?;
            match places.iter().enumerate().any(|(k, d)| places[..k].contains(d)) {
                true => Err(Error::argument(OP, format!("{dims:?} names a dimension twice"))),
                false => Ok(places),
            }
        };
        for (t, dims) in [(self, dims), (other, other_dims)] {
            if t.rank() == 0 && !dims.is_empty() {
                let rule = format!("a tensor without dimensions has none of {dims:?} to sum over");
                return Err(Error::shape(OP, rule, &[self.shape(), other.shape()]));
            }
        }
        let (mine, theirs) = (places(self, dims)?, places(other, other_dims)?);
        let extents =
            |t: &Tensor, places: &[usize]| -> Dims { places.iter().map(|&d| t.shape()[d]).collect() };
        let shared = extents(self, &mine);
        if shared != extents(other, &theirs) {
            let rule = format!("takes dimensions of the same extents, got {dims:?} and {other_dims:?}");
            return Err(Error::shape(OP, rule, &[self.shape(), other.shape()]));
        }
        let rest = |t: &Tensor, places: &[usize]| -> Dims {
            (0..t.rank()).filter(|d| !places.contains(d)).collect()
        };
        let (left, right) = (rest(self, &mine), rest(other, &theirs));
        let order = |first: &[usize], second: &[usize]| -> Vec<isize> {
            first.iter().chain(second).map(|&d| d as isize).collect()
        };
        let (rows, columns) = (extents(self, &left), extents(other, &right));
        let (m, k, n): (usize, usize, usize) =
            (rows.iter().product(), shared.iter().product(), columns.iter().product());
        let a = self.permute(&order(&left, &mine))?.reshape([m, k])?;
        let b = other.permute(&order(&theirs, &right))?.reshape([k, n])?;
        a.matmul(&b)?.reshape(&[&rows[..], &columns].concat()[..])
    }
}

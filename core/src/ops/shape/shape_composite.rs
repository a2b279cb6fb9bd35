//! Joining, meshes, products of dimensions and other operations composed of views and copies.

use crate::ops::index::select::nonzero_coordinates;
use crate::ops::prelude::*;
use crate::ops::shape::pad::PadMode;
use crate::ops::shape::{as_refs, distinct_dims, stack};
use crate::tensor::layout::MAX_TENSOR_NUMEL;

/// Maps each tensor, and concatenates the results along a dimension, for the operation `op`.
#[track_caller]
fn map_and_cat(
    op: &'static str,
    tensors: &[&Tensor],
    dim: isize,
    f: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    run_composite(op, || {
        let tensors = tensors.iter().map(|t| f(t)).collect::<Result<Vec<_>>>()?;
        cat(&tensors, dim)
    })
}

/// Concatenates tensors along dimension 1, or along dimension 0 if they have fewer than two dimensions.
#[track_caller]
pub fn hstack(tensors: &[impl AsRef<Tensor>]) -> Result<Tensor> {
    let tensors = &as_refs(tensors)[..];
    let flat = tensors.first().is_some_and(|t| t.rank() < 2);
    map_and_cat("hstack", tensors, if flat { 0 } else { 1 }, Tensor::atleast_1d)
}

/// Concatenates tensors along dimension 0. Tensors with fewer than two dimensions become rows.
#[doc(alias = "row_stack")]
#[track_caller]
pub fn vstack(tensors: &[impl AsRef<Tensor>]) -> Result<Tensor> {
    map_and_cat("vstack", &as_refs(tensors), 0, Tensor::atleast_2d)
}

/// Concatenates tensors along dimension 2. Tensors with fewer than three dimensions are stacked along it.
#[track_caller]
pub fn dstack(tensors: &[impl AsRef<Tensor>]) -> Result<Tensor> {
    map_and_cat("dstack", &as_refs(tensors), 2, Tensor::atleast_3d)
}

/// Concatenates tensors along dimension 1. Tensors with fewer than two dimensions become columns.
#[track_caller]
pub fn column_stack(tensors: &[impl AsRef<Tensor>]) -> Result<Tensor> {
    let tensors = &as_refs(tensors)[..];
    let to_column = |t: &Tensor| if t.rank() < 2 { t.reshape([t.numel(), 1]) } else { Ok(t.clone()) };
    map_and_cat("column_stack", tensors, 1, to_column)
}

/// Arranges matrices, in their common type, along the diagonal of a zero matrix. Vectors are rows.
///
/// # Errors
/// The list is empty, or a tensor has more than two dimensions.
#[track_caller]
pub fn block_diag(tensors: &[impl AsRef<Tensor>]) -> Result<Tensor> {
    let tensors = &as_refs(tensors)[..];
    operation!(OP = "block_diag");
    if let Some(t) = tensors.iter().find(|t| t.rank() > 2) {
        return Err(Error::shape(OP, "takes tensors of at most two dimensions", &[t.shape()]));
    }
    let Some(dtype) = tensors.iter().map(|t| t.dtype()).reduce(DType::promote) else {
        fail!(argument(OP), "takes at least one tensor")
    };
    let blocks = tensors.iter().map(|t| t.to_dtype(dtype)?.atleast_2d()).collect::<Result<Vec<_>>>()?;
    let columns: usize = blocks.iter().map(|t| t.shape()[1]).sum();
    let mut before = 0;
    let rows = blocks.iter().map(|t| {
        let after = columns - before - t.shape()[1];
        let row = t.pad(&[before as isize, after as isize], PadMode::Constant(0.0.into()));
        before += t.shape()[1];
        row
    });
    let rows = rows.collect::<Result<Vec<_>>>()?;
    cat(&rows, 0)
}

/// Expands vectors (or scalars) to views over the grid of all of them: PyTorch's `meshgrid` with
/// `indexing="ij"`, or with `xy`, which swaps the first two dimensions.
#[track_caller]
pub fn meshgrid(lines: &[impl AsRef<Tensor>], xy: bool) -> Result<Vec<Tensor>> {
    let lines = &as_refs(lines)[..];
    if let Some(t) = lines.iter().find(|t| t.rank() > 1) {
        fail!(shape("meshgrid", [t]), "takes tensors of one dimension")
    }
    let mut order: Vec<usize> = (0..lines.len()).collect();
    if xy && lines.len() > 1 {
        order.swap(0, 1);
    }
    let shape: Dims = order.iter().map(|&k| lines[k].numel()).collect();
    let view = |(k, line): (usize, &&Tensor)| {
        let line_shape: Dims = order.iter().map(|&o| if o == k { line.numel() } else { 1 }).collect();
        line.reshape(&line_shape[..])?.broadcast_to(&shape)
    };
    run_composite("meshgrid", || lines.iter().enumerate().map(view).collect())
}

/// Returns views of all tensors in their common broadcast shape.
#[track_caller]
pub fn broadcast_tensors(tensors: &[impl AsRef<Tensor>]) -> Result<Vec<Tensor>> {
    let tensors = &as_refs(tensors)[..];
    let shapes: Vec<&[usize]> = tensors.iter().map(|t| t.shape()).collect();
    let shape = broadcast_shapes("broadcast_tensors", &shapes)?;
    run_composite("broadcast_tensors", || tensors.iter().map(|t| t.broadcast_to(&shape)).collect())
}

/// Returns the Cartesian product of vectors in order, \[combinations, vectors\], or a single vector as is.
///
/// # Errors
/// The list is empty, or a tensor is not one-dimensional.
#[track_caller]
pub fn cartesian_prod(lines: &[impl AsRef<Tensor>]) -> Result<Tensor> {
    let lines = &as_refs(lines)[..];
    operation!("cartesian_prod");
    if let Some(t) = lines.iter().find(|t| t.rank() != 1) {
        fail!(shape("cartesian_prod", [t]), "takes tensors of one dimension")
    }
    match lines {
        [] => Err(Error::argument("cartesian_prod", "takes at least one tensor")),
        [line] => Ok((*line).clone()),
        _ => {
            let columns =
                meshgrid(lines, false)?.iter().map(|t| t.reshape([-1])).collect::<Result<Vec<_>>>()?;
            stack(&columns, 1)
        }
    }
}

/// Returns the number of combinations of `r` of `n` elements.
fn combination_count(n: usize, r: usize, with_replacement: bool) -> usize {
    if n == 0 || (r > n && !with_replacement) {
        return 0;
    }
    let fewest = if with_replacement { n - 1 } else { n - r };
    // Each quotient is whole, because it counts the combinations of `k` elements.
    (1..=r).fold(1u128, |count, k| count * (fewest + k) as u128 / k as u128) as usize
}

/// Returns the number of entries of a matrix on and below a diagonal. The sum over the rows is in closed form, because
/// a caller may ask for more rows than a loop could visit.
fn tril_count(rows: usize, columns: usize, diagonal: isize) -> usize {
    let (rows, columns, after) = (rows as i128, columns as i128, diagonal as i128 + 1);
    // Row r has r + after entries, at least none and at most all columns.
    let first_nonempty = (-after).clamp(0, rows);
    let first_full = (columns - after).clamp(first_nonempty, rows);
    let partial = (first_full - first_nonempty) * (first_nonempty + first_full - 1 + 2 * after) / 2;
    (partial + (rows - first_full) * columns) as usize
}

impl Tensor {
    /// Returns the tensor, or a view with one dimension if there is none.
    #[track_caller]
    pub fn atleast_1d(&self) -> Result<Tensor> {
        if self.rank() == 0 { self.reshape([1]) } else { Ok(self.clone()) }
    }

    /// Returns the tensor, or a view as a row if there are fewer than two dimensions.
    #[track_caller]
    pub fn atleast_2d(&self) -> Result<Tensor> {
        if self.rank() < 2 { self.reshape([1, self.numel()]) } else { Ok(self.clone()) }
    }

    /// Returns the tensor, or a view as \[1, n, 1\] of a vector or \[m, n, 1\] of a matrix.
    #[track_caller]
    pub fn atleast_3d(&self) -> Result<Tensor> {
        match *self.shape() {
            [] | [_] => self.reshape([1, self.numel(), 1]),
            [_, _] => self.unsqueeze(-1),
            _ => Ok(self.clone()),
        }
    }

    /// Repeats the tensor along each dimension: PyTorch's `tile`. Missing leading ones are 1.
    #[track_caller]
    pub fn tile(&self, counts: impl IntoShape) -> Result<Tensor> {
        let counts = &new_shape("tile", counts)?[..];
        let missing = self.rank().saturating_sub(counts.len());
        self.repeat([&vec![1; missing][..], counts].concat())
    }

    /// Rotates the plane of two dimensions by `k` quarter turns, from the first dimension towards the second.
    #[track_caller]
    pub fn rot90(&self, k: isize, dims: [isize; 2]) -> Result<Tensor> {
        let [first, second] = dims;
        fail_if!(normalize_dim("rot90", first, self.rank())? == normalize_dim("rot90", second, self.rank())?;
            argument("rot90"), "takes two dimensions, got {first} and {second}");
        match k.rem_euclid(4) {
            0 => self.copy(),
            1 => self.flip([second])?.transpose(first, second),
            2 => self.flip(dims),
            _ => self.transpose(first, second)?.flip([second]),
        }
    }

    /// Returns the combinations of `r` elements, with or without replacement: \[combinations, r\].
    ///
    /// # Errors
    /// There is more than one dimension, or `r` is 0.
    #[track_caller]
    pub fn combinations(&self, r: usize, with_replacement: bool) -> Result<Tensor> {
        operation!(OP = "combinations");
        let &[n] = self.shape() else { fail!(shape(OP, [self]), "takes a tensor of one dimension") };
        fail_if!(r == 0; argument(OP), "takes at least one element at a time");
        // One tensor holds the flags of all tuples.
        let tuples = u32::try_from(r).ok().filter(|&r| r <= 64).and_then(|r| n.checked_pow(r));
        fail_if!(tuples.is_none_or(|tuples| tuples > MAX_TENSOR_NUMEL);
            argument(OP), "{r} of {n} elements at a time are too many to go through");
        let line = Tensor::arange(0.0, n as f64, 1.0, DType::I32, self.device())?;
        // Keep the tuples whose indices ascend, strictly or not: combine the flags of all neighbouring pairs.
        let grids = meshgrid(&vec![&line; r], false)?;
        let mut rising = Tensor::ones(vec![n; r], DType::Bool, self.device())?;
        for pair in grids.windows(2) {
            let holds = if with_replacement { pair[0].le(&pair[1])? } else { pair[0].lt(&pair[1])? };
            rising = rising.logical_and(&holds)?;
        }
        let combinations = nonzero_coordinates(OP, &rising, Some(combination_count(n, r, with_replacement)))?;
        self.index_select(0, &combinations.reshape([-1])?)?.reshape(combinations.shape())
    }

    /// Returns the indices on and below a diagonal of a matrix in row-major order, as i64 \[2, count\]:
    /// PyTorch's `tril_indices`.
    #[track_caller]
    pub fn tril_indices(rows: usize, columns: usize, diagonal: isize, device: &Device) -> Result<Tensor> {
        const OP: &str = "tril_indices";
        run_composite(OP, || {
            let kept = Self::ones([rows, columns], DType::I32, device)?.tril(diagonal)?;
            let count = tril_count(rows, columns, diagonal);
            nonzero_coordinates(OP, &kept, Some(count))?.t()?.contiguous()
        })
    }

    /// Returns the indices on and above a diagonal of a matrix: see [`tril_indices`](Self::tril_indices).
    #[track_caller]
    pub fn triu_indices(rows: usize, columns: usize, diagonal: isize, device: &Device) -> Result<Tensor> {
        const OP: &str = "triu_indices";
        run_composite(OP, || {
            let kept = Self::ones([rows, columns], DType::I32, device)?.triu(diagonal)?;
            let count = rows * columns - tril_count(rows, columns, diagonal.saturating_sub(1));
            nonzero_coordinates(OP, &kept, Some(count))?.t()?.contiguous()
        })
    }

    /// Computes the Kronecker product: each element of `self` times `other`. Missing ones are 1.
    #[track_caller]
    pub fn kron(&self, other: &Tensor) -> Result<Tensor> {
        operation!("kron", autocast [self, other], |a, b| a.kron(&b));
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

    /// Sums the products over `dims` of `self` and `other_dims` of `other`, which have the same extents:
    /// PyTorch's `tensordot`. The result has the other dimensions of `self`, then those of `other`.
    #[track_caller]
    pub fn tensordot(
        &self,
        other: &Tensor,
        dims: impl IntoDims,
        other_dims: impl IntoDims,
    ) -> Result<Tensor> {
        operation!(OP = "tensordot");
        let all = |t: &Tensor| (0..t.rank() as isize).collect();
        let dims = &dims.to_dims().unwrap_or_else(|| all(self))[..];
        let other_dims = &other_dims.to_dims().unwrap_or_else(|| all(other))[..];
        for (t, dims) in [(self, dims), (other, other_dims)] {
            fail_if!(t.rank() == 0 && !dims.is_empty();
                shape(OP, [self, other]), "a tensor without dimensions has none of {dims:?} to sum over");
        }
        let self_contracted = distinct_dims(OP, dims, self.rank())?;
        let other_contracted = distinct_dims(OP, other_dims, other.rank())?;
        let extents =
            |t: &Tensor, dims_of: &[usize]| -> Dims { dims_of.iter().map(|&d| t.shape()[d]).collect() };
        let (reduced, other_reduced) =
            broadcast_contracted(self, &self_contracted, other, &other_contracted)?;
        if let Some(reduced) = reduced {
            return reduced.tensordot(other_reduced.as_ref().unwrap_or(other), dims, other_dims);
        }
        if let Some(reduced) = other_reduced {
            return self.tensordot(&reduced, dims, other_dims);
        }
        let shared = extents(self, &self_contracted);
        fail_if!(shared != extents(other, &other_contracted); shape(OP, [self, other]),
            "takes dimensions of the same extents, got {dims:?} and {other_dims:?}");
        let other_dims_of = |t: &Tensor, dims_of: &[usize]| -> Dims {
            (0..t.rank()).filter(|d| !dims_of.contains(d)).collect()
        };
        let (left, right) = (other_dims_of(self, &self_contracted), other_dims_of(other, &other_contracted));
        let order = |first: &[usize], second: &[usize]| -> Vec<isize> {
            first.iter().chain(second).map(|&d| d as isize).collect()
        };
        let (rows, columns) = (extents(self, &left), extents(other, &right));
        let (m, k, n): (usize, usize, usize) =
            (rows.iter().product(), shared.iter().product(), columns.iter().product());
        let a = self.permute(order(&left, &self_contracted))?.reshape([m, k])?;
        let b = other.permute(order(&other_contracted, &right))?.reshape([k, n])?;
        a.matmul(&b)?.reshape(&[&rows[..], &columns].concat()[..])
    }
}

/// Sums each operand of a contraction over the dimensions in which the other one has an extent of 1, as PyTorch does:
/// the sum of the products is a product of the sum. Returns `None` for an operand that stays.
fn broadcast_contracted(
    a: &Tensor,
    a_dims: &[usize],
    b: &Tensor,
    b_dims: &[usize],
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let sum = |x: &Tensor, dims: &[usize], y: &Tensor, y_dims: &[usize]| {
        let pairs = dims.iter().zip(y_dims);
        let summed: Vec<isize> = pairs
            .filter(|&(&d, &e)| x.shape()[d] != 1 && y.shape()[e] == 1)
            .map(|(&d, _)| d as isize)
            .collect();
        (!summed.is_empty()).then(|| x.sum(summed, true)?.to_dtype(x.dtype())).transpose()
    };
    Ok((sum(a, a_dims, b, b_dims)?, sum(b, b_dims, a, a_dims)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_combinations_are_binomial_coefficients() {
        for (n, r, distinct, repeated) in [
            (5, 3, 10, 35),
            (3, 5, 0, 21),
            (0, 2, 0, 0),
            (1, 64, 0, 1),
            (4, 1, 4, 4),
            (46340, 2, 1073674630, 1073720970),
        ] {
            assert_eq!(combination_count(n, r, false), distinct, "{r} of {n}");
            assert_eq!(combination_count(n, r, true), repeated, "{r} of {n} with replacement");
        }
    }

    #[test]
    fn counts_below_a_diagonal_are_sums_over_the_rows() {
        for rows in 0..6 {
            for columns in 0..6 {
                for diagonal in -8..8 {
                    let in_row = |row| (row as isize + diagonal + 1).clamp(0, columns as isize) as usize;
                    let sum: usize = (0..rows).map(in_row).sum();
                    assert_eq!(tril_count(rows, columns, diagonal), sum, "{rows} x {columns}, {diagonal}");
                }
            }
        }
        assert_eq!(tril_count(3, 4, isize::MAX), 12);
        assert_eq!(tril_count(3, 4, isize::MIN), 0);
        assert_eq!(tril_count(1 << 40, 0, 0), 0);
        assert_eq!(tril_count(1 << 40, 4, 0), (1 << 42) - 6);
    }
}

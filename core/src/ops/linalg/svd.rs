//! Singular values and vectors by one-sided Jacobi rotations on the device.

use crate::ops::norm::softmax::choose_threads_per_row;
use crate::ops::prelude::*;

const OP: &str = "svdvals";

/// Largest number of columns for which one workgroup holds a whole matrix, and one launch runs a whole sweep.
const MAX_WORKGROUP_COLUMNS: usize = 64;

/// Rotates the columns `w` \[batch, n, height\] until their first `m` elements are orthogonal.
///
/// The number of sweeps is fixed and always suffices, because convergence is quadratic; so the host never
/// waits. Later sweeps skip a matrix that had no rotation in one sweep.
pub(crate) fn jacobi_orthogonalize(w: &Tensor, m: usize) -> Result<()> {
    let (batch, n, height) = (w.shape()[0], w.shape()[1], w.shape()[2]);
    let players = n.next_multiple_of(2);
    if n < 2 || w.numel() == 0 {
        return Ok(());
    }
    let threads_per_row = choose_threads_per_row(height, false).clamp(8, 128);
    let fits_workgroup = n <= MAX_WORKGROUP_COLUMNS;
    let groups = if fits_workgroup { 1 } else { (players / 2).div_ceil(WORKGROUP_SIZE / threads_per_row) };
    let spec = kernel_spec! { "svd", dtype: w.dtype().name(), threads_per_row };
    // Iterations of a round: two passes over each pair's elements, and two sums over the threads of a pair.
    let pairs = (players / 2).div_ceil(WORKGROUP_SIZE / threads_per_row).div_ceil(groups);
    let iterations = pairs * (m.div_ceil(threads_per_row) + height.div_ceil(threads_per_row) + 64) + 2;
    let sweeps = if w.dtype() == DType::F64 { 20 } else { 15 };
    let mut rotated_before = Tensor::ones([batch], DType::U32, w.device())?;
    for _ in 0..sweeps {
        let rotated = Tensor::zeros([batch], DType::U32, w.device())?;
        let run = |first: usize, rounds: usize, iterations: usize| {
            let params = kernel_params! { batch, n, m, height, players, first, rounds, groups };
            let params = params.loop_iterations(iterations);
            launch::launch(&spec, &[&rotated_before, &rotated, w], params, batch * groups)
        };
        if fits_workgroup {
            launch::launch_in_parts(w.device(), 1, players - 1, |_| iterations, run)?;
        } else {
            (0..players - 1).try_for_each(|first| run(first, 1, iterations + 1))?;
        }
        rotated_before = rotated;
    }
    Ok(())
}

/// Computes the singular values \[batch, n\] of matrices \[batch, m, n\] with m >= n, in descending order.
///
/// With `vectors`, also computes the singular vectors as rows: left \[batch, n, m\], right \[batch, n, n\].
/// The left vector of a zero value is zero.
fn decompose(a: &Tensor, vectors: bool) -> Result<(Tensor, Option<(Tensor, Tensor)>)> {
    let (batch, m, n) = (a.shape()[0], a.shape()[1], a.shape()[2]);
    // Scale, so that squares neither overflow nor underflow.
    let scale = a.abs()?.amax([1, 2], true)?;
    let scale = scale.masked_fill(&scale.eq(0.0)?, 1.0)?;
    let columns = a.div(&scale)?.transpose(1, 2)?;
    let w = {
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        if vectors {
            let eye = Tensor::eye(n, n, a.dtype(), a.device())?.broadcast_to([batch, n, n])?;
            cat(&[&columns, &eye], 2)?
        } else {
            columns.copy()?
        }
    };
    jacobi_orthogonalize(&w, m)?;
    let lengths = w.narrow(2, 0, m)?.norm(2.0, [2], false)?;
    let (lengths, order) = lengths.sort(1, true)?;
    let values = lengths.mul(&scale.squeeze(2)?)?;
    if !vectors {
        return Ok((values, None));
    }
    let w = w.gather(1, &order.unsqueeze(2)?.broadcast_to(w.shape())?)?;
    let is_zero = lengths.eq(0.0)?.unsqueeze(2)?;
    let left = w.narrow(2, 0, m)?.div(&lengths.unsqueeze(2)?)?.masked_fill(&is_zero, 0.0)?;
    Ok((values, Some((left, w.narrow(2, m, n)?))))
}

/// Shape of matrices \[lead.., m, n\].
pub(crate) struct BatchedMatrixShape<'a> {
    pub(crate) batch_shape: &'a [usize],
    pub(crate) m: usize,
    pub(crate) n: usize,
}

#[track_caller]
pub(crate) fn check_matrices<'a>(op: &'static str, x: &'a Tensor) -> Result<BatchedMatrixShape<'a>> {
    fail_if!(!matches!(x.dtype(), DType::F32 | DType::F64);
        dtype(op, x.dtype()), "takes f32 and f64; cast with `to_dtype`");
    launch::check_device_dtype(op, x.dtype(), x.device())?;
    match x.shape() {
        &[ref lead @ .., m, n] => Ok(BatchedMatrixShape { batch_shape: lead, m, n }),
        shape => Err(Error::shape(op, "takes matrices [.., m, n]", &[shape])),
    }
}

/// Computes the matrix's gradient from the gradient `g` of the left vectors `u` \[batch, m, k\].
///
/// The gradient is U (skew(Uᵀ g) / E) S Vᵀ + (1 - U Uᵀ) g S⁻¹ Vᵀ. E is the column's s² minus the row's, and
/// `vh` holds V as rows (Townsend, 2016; PyTorch's `svd_backward`).
fn left_vectors_backward(g: &Tensor, u: &Tensor, values: &Tensor, vh: &Tensor) -> Result<Tensor> {
    let k = values.shape()[1];
    let s = values.unsqueeze(1)?;
    let squares = s.square()?;
    let eye = Tensor::eye(k, k, s.dtype(), s.device())?;
    let differences = squares.sub(&squares.transpose(1, 2)?)?.add(&eye)?;
    let ut = u.transpose(1, 2)?;
    let along = ut.matmul(g)?;
    let rotation = along.sub(&along.transpose(1, 2)?)?.div(&differences)?.mul(&s)?;
    let mut change = u.matmul(&rotation)?;
    if u.shape()[1] > k {
        change = change.add(&g.sub(&u.matmul(&along)?)?.div(&s)?)?;
    }
    change.matmul(vh)
}

/// Returns a zero result for empty inputs, with a history that leads to the inputs.
pub(crate) fn empty_result_with_grad(
    op: &'static str,
    inputs: &[&Tensor],
    shape: &[usize],
) -> Result<Tensor> {
    let out = Tensor::zeros(shape, inputs[0].dtype(), inputs[0].device())?;
    let shapes: Vec<Dims> = inputs.iter().map(|t| Dims::from_slice(t.shape())).collect();
    Ok(autograd::differentiable(op, out, inputs, move |g, _| {
        shapes.iter().map(|shape| Ok(Some(Tensor::zeros(shape, g.dtype(), g.device())?))).collect()
    }))
}

/// Attaches gradients to the factors of `matrix` \[batch, m, n\].
///
/// `gradient` computes the matrix's gradient from the gradient of one factor (by its index) and all factors.
/// Under `create_graph`, `recompute` computes the factors again, bit by bit, signs included, with a history, because
/// all of them depend on the matrix.
pub(crate) fn attach_factor_grads<const N: usize>(
    op: &'static str,
    matrix: &Tensor,
    factors: [Tensor; N],
    recompute: impl Fn(&Tensor) -> Result<[Tensor; N]> + Clone + Send + Sync + 'static,
    gradient: impl Fn(usize, &Tensor, &[Tensor; N]) -> Result<Tensor> + Clone + Send + Sync + 'static,
) -> Result<[Tensor; N]> {
    if !autograd::compute_requires_grad(&[matrix]) {
        return Ok(factors);
    }
    // Copies, because the caller may change the results in place.
    let mut copies = factors.clone();
    for factor in &mut copies {
        *factor = factor.copy()?;
    }
    Ok(std::array::from_fn(|which| {
        let (copies, matrix_kept) = (copies.clone(), SavedTensor::input_for_create_graph(matrix));
        let (recompute, gradient) = (recompute.clone(), gradient.clone());
        autograd::differentiable_unary(op, factors[which].clone(), matrix, move |g, ctx| {
            Ok(match ctx.create_graph() {
                true => gradient(which, g, &recompute(&matrix_kept.unpack(ctx)?)?)?,
                false => gradient(which, g, &copies)?,
            })
        })
    }))
}

impl Tensor {
    /// Computes the thin SVD of matrices \[.., m, n\]: `torch.linalg.svd` with `full_matrices=False`.
    ///
    /// With k = min(m, n), returns left vectors \[.., m, k\], values \[.., k\] in descending order, and right
    /// vectors as rows \[.., k, n\]. The sign of each pair of vectors is arbitrary. For a zero value, the
    /// vector of the longer side is zero instead of a completion of the basis.
    ///
    /// The gradients of the vectors assume full rank and distinct values: they divide by the values and by
    /// differences of their squares. A loss must not depend on the signs.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let (u, s, vh) = Tensor::ones(&[7, 5, 3], DType::F32, &device)?.svd()?;
    /// assert_eq!((u.shape(), s.shape(), vh.shape()), (&[7, 5, 3][..], &[7, 3][..], &[7, 3, 3][..]));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[track_caller]
    pub fn svd(&self) -> Result<(Tensor, Tensor, Tensor)> {
        operation!(OP = "svd", autocast[self], |x| x.svd());
        let BatchedMatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
        let (k, batch) = (m.min(n), lead.iter().product::<usize>());
        let shapes: [Dims; 3] =
            [&[m, k][..], &[k], &[k, n]].map(|rest| lead.iter().chain(rest).copied().collect());
        if self.numel() == 0 {
            let [u, s, vh] = shapes.map(|shape| empty_result_with_grad(OP, &[self], &shape));
            return Ok((u?, s?, vh?));
        }
        let matrix = self.reshape([batch, m, n])?;
        let (u, s, vh) = {
            let _no_grad = autograd::no_grad();
            let a = matrix.detach();
            // Transpose wide matrices: their left vectors are the right vectors of the transpose.
            let (values, vectors) = decompose(&if m < n { a.transpose(1, 2)? } else { a }, true)?;
            let Some((long, short)) = vectors else { fail!(argument(OP), "has no vectors") };
            let (left, right) = if m < n { (short, long) } else { (long, short) };
            (left.transpose(1, 2)?, values, right)
        };
        let [u, s, vh] = attach_factor_grads(
            OP,
            &matrix,
            [u.contiguous()?, s, vh.contiguous()?],
            |x| x.svd().map(<[Tensor; 3]>::from),
            |which, g, [u, s, vh]| match which {
                0 => left_vectors_backward(g, u, s, vh),
                1 => u.matmul(&g.unsqueeze(2)?.mul(vh)?),
                // The right vectors are the left vectors of the transpose.
                _ => {
                    let (g, v, ut) = (g.transpose(1, 2)?, vh.transpose(1, 2)?, u.transpose(1, 2)?);
                    left_vectors_backward(&g, &v, s, &ut)?.transpose(1, 2)
                }
            },
        )?;
        Ok((u.reshape(&*shapes[0])?, s.reshape(&*shapes[1])?, vh.reshape(&*shapes[2])?))
    }

    /// Computes the singular values of matrices \[.., m, n\] in descending order, \[.., min(m, n)\]:
    /// PyTorch's `linalg.svdvals`.
    ///
    /// The gradient is U diag(g) Vᵀ, and zero for zero values.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[7, 5, 3], DType::F32, &device)?;
    /// assert_eq!(x.svdvals()?.shape(), [7, 3]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// There are fewer than two dimensions. The dtype is not f32, or f64 on a device that supports it.
    #[track_caller]
    pub fn svdvals(&self) -> Result<Tensor> {
        operation!(OP, autocast[self], |x| x.svdvals());
        let BatchedMatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
        let shape: Dims = lead.iter().copied().chain([m.min(n)]).collect();
        if self.numel() == 0 {
            return empty_result_with_grad(OP, &[self], &shape);
        }
        let batch: usize = lead.iter().product();
        let wide = m < n;
        let requires_grad = autograd::compute_requires_grad(&[self]);
        let _no_grad = autograd::no_grad();
        let a = self.detach().reshape([batch, m, n])?;
        let a = if wide { a.transpose(1, 2)? } else { a };
        let (values, vectors) = decompose(&a, requires_grad)?;
        let out = values.reshape(&*shape)?;
        drop(_no_grad);
        let of = Dims::from_slice(self.shape());
        let saved = std::iter::once(SavedTensor::input_for_create_graph(self)).collect();
        let composed = |t: &[Tensor]| Ok(t[0].svd()?.1);
        Ok(autograd::composite_differentiable(OP, out, &[self], saved, composed, move |g, _| {
            let Some((left, right)) = &vectors else { return Ok(smallvec![None]) };
            let g = g.reshape([batch, m.min(n), 1])?;
            let grad = left.transpose(1, 2)?.matmul(&g.mul(right)?)?;
            let grad = if wide { grad.transpose(1, 2)? } else { grad };
            Ok(smallvec![Some(grad.reshape(&*of)?)])
        }))
    }

    /// Computes the sum of singular values of the matrices in two dimensions, by default the last: PyTorch's
    /// norm of order `nuc`. The gradient is U Vᵀ.
    ///
    /// # Errors
    /// `dims` are not two different dimensions. See also [`svdvals`](Self::svdvals).
    #[track_caller]
    pub fn nuclear_norm(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        operation!(OP = "nuclear_norm");
        let &[row, col] = (if dims.is_empty() { &[-2, -1] } else { dims }) else {
            fail!(argument(OP), "takes two dimensions, got {dims:?}")
        };
        let of = MatrixDims::new(OP, self, [row, col])?;
        of.restore_keepdim(&of.move_to_last(self)?.svdvals()?.sum([-1], false)?, self, keepdim)
    }
}

/// Two dimensions that hold matrices.
pub(crate) struct MatrixDims {
    pub(crate) row: usize,
    pub(crate) col: usize,
}

impl MatrixDims {
    pub(crate) fn new(op: &'static str, x: &Tensor, dims: [isize; 2]) -> Result<Self> {
        fail_if!(x.rank() < 2; shape(op, [x]), "takes matrices [.., m, n]");
        let [row, col] = dims;
        let (row, col) = (normalize_dim(op, row, x.rank())?, normalize_dim(op, col, x.rank())?);
        fail_if!(row == col; argument(op), "takes two different dimensions, got {dims:?}");
        Ok(Self { row, col })
    }

    /// Moves the matrices to the last two dimensions.
    pub(crate) fn move_to_last(&self, x: &Tensor) -> Result<Tensor> {
        let rest = (0..x.rank()).filter(|&d| d != self.row && d != self.col);
        let order: Vec<isize> = rest.chain([self.row, self.col]).map(|d| d as isize).collect();
        x.permute(&order)
    }

    /// Restores extents of 1 for the matrix dimensions of `x` if `keepdim`. `values` has one element a matrix.
    pub(crate) fn restore_keepdim(&self, values: &Tensor, x: &Tensor, keepdim: bool) -> Result<Tensor> {
        if !keepdim {
            return Ok(values.clone());
        }
        let mut shape = Dims::from_slice(x.shape());
        (shape[self.row], shape[self.col]) = (1, 1);
        values.reshape(&*shape)
    }
}

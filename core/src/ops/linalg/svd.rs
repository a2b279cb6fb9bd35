//! Singular values and vectors, by one-sided Jacobi rotations on the device.

use forebay_shaders::KernelSpec;
use smallvec::smallvec;

use crate::amp::dispatch_autocast;
use crate::autograd::{self, SavedTensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::ops::kernel::launch::{self, KernelParams, WORKGROUP_SIZE};
use crate::ops::norm::softmax::lanes_per_row;
use crate::ops::shape::cat;
use crate::tensor::layout::normalize_dim;
use crate::tensor::shape::reduction_dims;
use crate::tensor::{Dims, IntoDims, Tensor};

const OP: &str = "svdvals";

/// Columns up to which one workgroup has a whole matrix, and one launch a whole sweep.
const MAX_WORKGROUP_COLUMNS: usize = 64;

/// Turns the columns `w`, \[batch, n, height\], until their first `m` elements are orthogonal.
///
/// A matrix that was not turned in one sweep is left alone in those that follow: they are as many as always suffice (convergence is
/// quadratic), and nobody waits for the device.
pub(crate) fn jacobi_orthogonalize(w: &Tensor, m: usize) -> Result<()> {
    let (batch, n, height) = (w.shape()[0], w.shape()[1], w.shape()[2]);
    let players = n.next_multiple_of(2);
    if n < 2 || w.numel() == 0 {
        return Ok(());
    }
    let lanes = lanes_per_row(height, false).clamp(8, 128);
    let small = n <= MAX_WORKGROUP_COLUMNS;
    let groups = if small { 1 } else { (players / 2).div_ceil(WORKGROUP_SIZE / lanes) };
    let spec = KernelSpec::new("svd").def("dtype", w.dtype().name()).def("lanes", lanes);
    // Of a round: of each of its pairs the elements twice, and two sums over the threads of a pair.
    let pairs = (players / 2).div_ceil(WORKGROUP_SIZE / lanes).div_ceil(groups);
    let turns = pairs * (m.div_ceil(lanes) + height.div_ceil(lanes) + 64) + 2;
    let sweeps = if w.dtype() == DType::F64 { 20 } else { 15 };
    let mut before = Tensor::ones(&[batch], DType::U32, w.device())?;
    for _ in 0..sweeps {
        let now = Tensor::zeros(&[batch], DType::U32, w.device())?;
        let run = |first: usize, rounds: usize, turns: usize| {
            let sizes = [batch, n, m, height, players, first, rounds, groups];
            let params =
                sizes.into_iter().fold(KernelParams::new(), KernelParams::size).loop_iterations(turns);
            launch::launch(&spec, &[&before, &now, w], params, batch * groups)
        };
        if small {
            launch::launch_in_parts(w.device(), 1, players - 1, |_| turns, run)?;
        } else {
            (0..players - 1).try_for_each(|first| run(first, 1, turns + 1))?;
        }
        before = now;
    }
    Ok(())
}

/// Matrices \[batch, m, n\] with m >= n as their singular values \[batch, n\], largest first, and if `vectors` the singular vectors
/// of each as rows: \[batch, n, m\] of the left, where the value is zero zeros, and \[batch, n, n\] of the right.
fn decompose(a: &Tensor, vectors: bool) -> Result<(Tensor, Option<(Tensor, Tensor)>)> {
    let (batch, m, n) = (a.shape()[0], a.shape()[1], a.shape()[2]);
    // Squares must not overflow or vanish.
    let scale = a.abs()?.amax(&[1, 2], true)?;
    let scale = scale.masked_fill(&scale.eq(0.0)?, 1.0)?;
    let columns = a.div(&scale)?.transpose(1, 2)?;
    let w = {
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        if vectors {
            let eye = Tensor::eye(n, n, a.dtype(), a.device())?.broadcast_to(&[batch, n, n])?;
            cat(&[&columns, &eye], 2)?
        } else {
            columns.copy()?
        }
    };
    jacobi_orthogonalize(&w, m)?;
    let lengths = w.narrow(2, 0, m)?.norm(2.0, &[2], false)?;
    let (lengths, order) = lengths.sort(1, true)?;
    let values = lengths.mul(&scale.squeeze(2)?)?;
    if !vectors {
        return Ok((values, None));
    }
    let w = w.gather(1, &order.unsqueeze(2)?.broadcast_to(w.shape())?)?;
    let none = lengths.eq(0.0)?.unsqueeze(2)?;
    let left = w.narrow(2, 0, m)?.div(&lengths.unsqueeze(2)?)?.masked_fill(&none, 0.0)?;
    Ok((values, Some((left, w.narrow(2, m, n)?))))
}

/// The extents of matrices \[lead.., m, n\].
pub(crate) struct MatrixShape<'a> {
    pub(crate) batch_shape: &'a [usize],
    pub(crate) m: usize,
    pub(crate) n: usize,
}

#[track_caller]
pub(crate) fn check_matrices<'a>(op: &'static str, x: &'a Tensor) -> Result<MatrixShape<'a>> {
    if !matches!(x.dtype(), DType::F32 | DType::F64) {
        return Err(Error::dtype(op, x.dtype(), "takes f32 and f64; cast with `to_dtype`"));
    }
    launch::check_device_dtype(op, x.dtype(), x.device())?;
    match x.shape() {
        &[ref lead @ .., m, n] => Ok(MatrixShape { batch_shape: lead, m, n }),
        shape => Err(Error::shape(op, "takes matrices [.., m, n]", &[shape])),
    }
}

/// What a change of the left singular vectors `u` \[batch, m, k\] by `g` is one of the matrix by: U (skew(Uᵀ g) / E) S Vᵀ + (1 - U Uᵀ) g S⁻¹ Vᵀ, with
/// E of s² of the column less s² of the row, and V given as rows `vh`. (Townsend, 2016; PyTorch's `svd_backward`.)
fn left_vectors_backward(g: &Tensor, u: &Tensor, values: &Tensor, vh: &Tensor) -> Result<Tensor> {
    let k = values.shape()[1];
    let s = values.unsqueeze(1)?;
    let squares = s.square()?;
    let eye = Tensor::eye(k, k, s.dtype(), s.device())?;
    let apart = squares.sub(&squares.transpose(1, 2)?)?.add(&eye)?;
    let ut = u.transpose(1, 2)?;
    let along = ut.matmul(g)?;
    let turned = along.sub(&along.transpose(1, 2)?)?.div(&apart)?.mul(&s)?;
    let mut change = u.matmul(&turned)?;
    if u.shape()[1] > k {
        change = change.add(&g.sub(&u.matmul(&along)?)?.div(&s)?)?;
    }
    change.matmul(vh)
}

/// What is made of no elements: zeros, whose history leads to the inputs.
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

/// The factors of `matrix` \[batch, m, n\] with their history. `gradient` says what that of one of them (by its number, beside all of them) is for the
/// matrix; `again` makes the same bits, signs included, once more, with their history, where a walk is recorded: all depend on the matrix.
pub(crate) fn attach_factor_grads<const N: usize>(
    op: &'static str,
    matrix: &Tensor,
    factors: [Tensor; N],
    again: impl Fn(&Tensor) -> Result<[Tensor; N]> + Clone + Send + Sync + 'static,
    gradient: impl Fn(usize, &Tensor, &[Tensor; N]) -> Result<Tensor> + Clone + Send + Sync + 'static,
) -> Result<[Tensor; N]> {
    if !autograd::compute_requires_grad(&[matrix]) {
        return Ok(factors);
    }
    // Copies: the results are the caller's, who may change them.
    let mut kept = factors.clone();
    for factor in &mut kept {
        *factor = factor.copy()?;
    }
    Ok(std::array::from_fn(|which| {
        let (kept, matrix_kept) = (kept.clone(), SavedTensor::input_for_create_graph(matrix));
        let (again, gradient) = (again.clone(), gradient.clone());
        autograd::differentiable(op, factors[which].clone(), &[matrix], move |g, wants| {
            Ok(smallvec![Some(match wants.create_graph() {
                true => gradient(which, g, &again(&matrix_kept.unpack(wants)?)?)?,
                false => gradient(which, g, &kept)?,
            })])
        })
    }))
}

impl Tensor {
    /// The singular value decomposition of matrices \[.., m, n\] with k = min(m, n): left vectors \[.., m, k\], values \[.., k\], largest first, and right
    /// vectors as rows \[.., k, n\], whose product is `self`: PyTorch's `linalg.svd` with `full_matrices=False`. Of each pair of vectors the
    /// sign is arbitrary. Where a value is zero, the vector of the longer side is zeros, and not one that completes the others.
    ///
    /// Gradients of the vectors are those of matrices of full rank whose values differ: they divide by the values and by the differences of
    /// their squares. A loss must not depend on signs.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let (u, s, vh) = Tensor::ones(&[7, 5, 3], DType::F32, &device)?.svd()?;
    /// assert_eq!((u.shape(), s.shape(), vh.shape()), (&[7, 5, 3][..], &[7, 3][..], &[7, 3, 3][..]));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`svdvals`](Self::svdvals).
    #[track_caller]
    pub fn svd(&self) -> Result<(Tensor, Tensor, Tensor)> {
        const OP: &str = "svd";
        dispatch_autocast!(OP, [self], |x| x.svd());
        let _op = memory::scope::enter_op(OP);
        let MatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
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
            // The longer side is the height: what is left of a wide matrix is right of its transpose.
            let (values, vectors) = decompose(&if m < n { a.transpose(1, 2)? } else { a }, true)?;
            let Some((long, short)) = vectors else {
                return Err(Error::argument(OP, "has no vectors"));
            };
            if m < n {
                (short.transpose(1, 2)?, values, long)
            } else {
                (long.transpose(1, 2)?, values, short)
            }
        };
        let [u, s, vh] = attach_factor_grads(
            OP,
            &matrix,
            [u.contiguous()?, s, vh.contiguous()?],
            |x| x.svd().map(<[Tensor; 3]>::from),
            |which, g, [u, s, vh]| match which {
                0 => left_vectors_backward(g, u, s, vh),
                1 => u.matmul(&g.unsqueeze(2)?.mul(vh)?),
                // Those of the right are the left ones of the transpose.
                _ => {
                    let (g, v, ut) = (g.transpose(1, 2)?, vh.transpose(1, 2)?, u.transpose(1, 2)?);
                    left_vectors_backward(&g, &v, s, &ut)?.transpose(1, 2)
                }
            },
        )?;
        Ok((u.reshape(&*shapes[0])?, s.reshape(&*shapes[1])?, vh.reshape(&*shapes[2])?))
    }

    /// The singular values of matrices \[.., m, n\], largest first: \[.., min(m, n)\]. PyTorch's `linalg.svdvals`.
    ///
    /// The gradient is that of each value, U diag(g) Vᵀ; to what is zero it is zero.
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
    /// There are fewer than two dimensions; the dtype is not f32, or f64 on a device that has it; memory runs out.
    #[track_caller]
    pub fn svdvals(&self) -> Result<Tensor> {
        dispatch_autocast!(OP, [self], |x| x.svdvals());
        let _op = memory::scope::enter_op(OP);
        let MatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
        let shape: Dims = lead.iter().copied().chain([m.min(n)]).collect();
        if self.numel() == 0 {
            return empty_result_with_grad(OP, &[self], &shape);
        }
        let batch: usize = lead.iter().product();
        let wide = m < n;
        let wanted = autograd::compute_requires_grad(&[self]);
        let _no_grad = autograd::no_grad();
        let a = self.detach().reshape([batch, m, n])?;
        let a = if wide { a.transpose(1, 2)? } else { a };
        let (values, vectors) = decompose(&a, wanted)?;
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

    /// The sum of the singular values of the matrices along two dimensions, the last ones where `dims` is empty: PyTorch's norm of
    /// order `nuc`. Its gradient is U Vᵀ.
    ///
    /// # Errors
    /// As [`svdvals`](Self::svdvals); `dims` are not two different ones.
    #[track_caller]
    pub fn nuclear_norm(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let dims = &reduction_dims(dims)[..];
        const OP: &str = "nuclear_norm";
        let _op = memory::scope::enter_op(OP);
        let &[row, col] = (if dims.is_empty() { &[-2, -1] } else { dims }) else {
            return Err(Error::argument(OP, format!("takes two dimensions, got {dims:?}")));
        };
        let of = MatrixDims::new(OP, self, [row, col])?;
        of.restore_keepdim(&of.move_to_last(self)?.svdvals()?.sum(&[-1], false)?, self, keepdim)
    }
}

/// Two dimensions that hold matrices.
pub(crate) struct MatrixDims {
    pub(crate) row: usize,
    pub(crate) col: usize,
}

impl MatrixDims {
    #[track_caller]
    pub(crate) fn new(op: &'static str, x: &Tensor, dims: [isize; 2]) -> Result<Self> {
        if x.rank() < 2 {
            return Err(Error::shape(op, "takes matrices [.., m, n]", &[x.shape()]));
        }
        let [row, col] = dims;
        let (row, col) = (normalize_dim(op, row, x.rank())?, normalize_dim(op, col, x.rank())?);
        if row == col {
            return Err(Error::argument(op, format!("takes two different dimensions, got {dims:?}")));
        }
        Ok(Self { row, col })
    }

    /// The matrices in the last two dimensions.
    pub(crate) fn move_to_last(&self, x: &Tensor) -> Result<Tensor> {
        let rest = (0..x.rank()).filter(|&d| d != self.row && d != self.col);
        let order: Vec<isize> = rest.chain([self.row, self.col]).map(|d| d as isize).collect();
        x.permute(&order)
    }

    /// One number of each matrix of `x`, with extents of 1 in place of it if `keepdim`.
    pub(crate) fn restore_keepdim(&self, numbers: &Tensor, x: &Tensor, keepdim: bool) -> Result<Tensor> {
        if !keepdim {
            return Ok(numbers.clone());
        }
        let mut shape = Dims::from_slice(x.shape());
        (shape[self.row], shape[self.col]) = (1, 1);
        numbers.reshape(&*shape)
    }
}

//! Matrix factorisations, solvers, inverses and determinants: PyTorch's `linalg` on the device. Nothing is
//! read back, so the inverse of a singular matrix is infinite or NaN instead of an error.

pub(crate) mod cross;
pub(crate) mod distance;
pub(crate) mod factorizations;
pub(crate) mod linalg_composite;
pub(crate) mod svd;

use crate::ops::linalg::svd::{BatchedMatrixShape, check_matrices, empty_result_with_grad};
use crate::ops::prelude::*;

/// Columns that a workgroup of the triangular solver handles.
const WORKGROUP_COLUMNS: usize = 32;

/// Returns the leading extents and n of square matrices \[lead.., n, n\].
#[track_caller]
pub(super) fn check_square<'a>(op: &'static str, x: &'a Tensor) -> Result<(&'a [usize], usize)> {
    match check_matrices(op, x)? {
        BatchedMatrixShape { batch_shape: lead, m, n } if m == n => Ok((lead, n)),
        _ => Err(Error::shape(op, "takes square matrices [.., n, n]", &[x.shape()])),
    }
}

/// LU factors packed in matrices \[batch, m, n\], the row permutation \[batch, m\], and its sign \[batch\].
pub(super) struct LuFactors {
    pub(super) packed_lu: Tensor,
    pub(super) row_order: Tensor,
    permutation_sign: Tensor,
}

/// Factorises matrices [lead.., m, n]. Not recorded.
pub(super) fn lu_decompose(x: &Tensor, m: usize, n: usize) -> Result<LuFactors> {
    let batch = x.numel() / (m * n).max(1);
    let triangles = x.detach().reshape([batch, m, n])?.copy()?;
    let order = empty_workspace(&[batch, m], DType::U32, x.device())?;
    let sign = Tensor::empty([batch], x.dtype(), x.device())?;
    let spec = kernel_spec! { "lu", dtype: x.dtype().name(), form: "lu" };
    run_elimination(&spec, &[&triangles, &order, &sign])?;
    Ok(LuFactors { packed_lu: triangles, row_order: order, permutation_sign: sign })
}

/// Runs `lu.wgsl` over the columns of matrices \[batch, m, n\], the first of `tensors`.
fn run_elimination(spec: &KernelSpec, tensors: &[&Tensor]) -> Result<()> {
    let &[batch, m, n] = tensors[0].shape() else { return Ok(()) };
    let iterations_of = |j: usize| {
        let (rows, columns) = (m - j, n - j - 1);
        2 * rows.div_ceil(WORKGROUP_SIZE)
            + n.div_ceil(WORKGROUP_SIZE)
            + ((rows - 1) * columns).div_ceil(WORKGROUP_SIZE)
            + 16
    };
    let fixed = m.div_ceil(WORKGROUP_SIZE) + 2;
    let run = |first: usize, count: usize, iterations: usize| {
        let params = kernel_params! { batch, m, n, first, end: first + count };
        launch::launch(spec, tensors, params.loop_iterations(iterations), batch)
    };
    launch::launch_in_parts(tensors[0].device(), fixed, m.min(n), iterations_of, run)
}

/// Computes a⁻¹ b for triangular a \[batch, n, n\] of any strides and b \[batch, n, columns\]. With `unit`, the
/// diagonal of a counts as 1. Not recorded.
fn solve_by_substitution(a: &Tensor, b: &Tensor, upper: bool, unit: bool) -> Result<Tensor> {
    let x = b.detach().copy()?.contiguous()?;
    let (batch, n, columns) = (x.shape()[0], x.shape()[1], x.shape()[2]);
    if x.numel() == 0 {
        return Ok(x);
    }
    let width = columns.min(WORKGROUP_COLUMNS);
    let spec = kernel_spec! { "solve_triangular", dtype: x.dtype().name(), upper, unit };
    let iterations_of =
        |step: usize| width.div_ceil(WORKGROUP_SIZE) + ((n - 1 - step) * width).div_ceil(WORKGROUP_SIZE) + 3;
    launch::launch_in_parts(x.device(), 1, n, iterations_of, |first, count, iterations| {
        let params = kernel_params! {
            batch, n, columns, width, offset: a.layout().offset(), batch_stride: a.strides()[0],
            row_stride: a.strides()[1], column_stride: a.strides()[2], first, end: first + count,
        };
        let params = params.loop_iterations(iterations);
        launch::launch(&spec, &[a, &x], params, batch * columns.div_ceil(width))
    })?;
    Ok(x)
}

/// Broadcasts the leading dimensions and returns both as \[batch, ..\], with the solution's shape.
fn broadcast_system(op: &'static str, a: &Tensor, b: &Tensor) -> Result<(Tensor, Tensor, Dims)> {
    let ((lead, n), rest) = (check_square(op, a)?, check_matrices(op, b)?);
    fail_if!(rest.m != n; shape(op, [a, b]), "takes right sides with a row for each of the matrix");
    fail_if!(a.dtype() != b.dtype(); dtype(op, b.dtype()), "both have the type {}", a.dtype());
    a.check_same_device(op, b)?;
    let lead = broadcast_shapes(op, &[lead, rest.batch_shape])?;
    let batch: usize = lead.iter().product();
    let broadcast_matrices =
        |t: &Tensor, m: usize| t.broadcast_to([&lead[..], &[n, m]].concat())?.reshape([batch, n, m]);
    Ok((broadcast_matrices(a, n)?, broadcast_matrices(b, rest.n)?, [&lead[..], &[n, rest.n]].concat().into()))
}

/// Counts the false elements of each row as i64. `dtype` is the type of the sum, which every device supports.
pub(super) fn count_false(none: &Tensor, dtype: DType) -> Result<Tensor> {
    none.logical_not()?.to_dtype(dtype)?.sum([-1], false)?.to_dtype(DType::I64)
}

with_defaults! {
    /// Options of [`Tensor::solve_triangular`].
    #[derive(Clone, Copy, Debug)]
    pub struct SolveTriangularOptions {
        /// If false, solves x a = b in place of a x = b; true.
        pub left: bool = true,
        /// If true, assumes a unit diagonal; false.
        pub unitriangular: bool = false,
    }
}

impl Tensor {
    /// Computes the lower triangular Cholesky factor L of symmetric positive definite matrices \[.., n, n\],
    /// which equal L · Lᵀ: PyTorch's `linalg.cholesky`. Only the lower half is read. If a matrix is not
    /// positive definite, L is NaN from the failing column on.
    ///
    /// # Errors
    /// The matrices are not square. The dtype is not f32, or f64 on a device that supports it.
    #[track_caller]
    pub fn cholesky(&self) -> Result<Tensor> {
        operation!(OP = "cholesky", autocast[self], |x| x.cholesky());
        let (_, n) = check_square(OP, self)?;
        if self.numel() == 0 {
            return empty_result_with_grad(OP, &[self], self.shape());
        }
        let batch = self.numel() / (n * n);
        let triangles = self.detach().reshape([batch, n, n])?.copy()?;
        let spec = kernel_spec! { "lu", dtype: self.dtype().name(), form: "cholesky" };
        run_elimination(&spec, &[&triangles])?;
        let out = triangles.tril(0)?.reshape(self.shape())?;
        let l = SavedTensor::output(&out);
        Ok(autograd::differentiable_unary(OP, out, self, move |g, ctx| {
            // L⁻ᵀ Φ(Lᵀ g) L⁻¹, symmetrised; Φ is the lower half with half of the diagonal (Murray, 2016).
            let l = l.unpack(ctx)?;
            let inner = l.transpose(-2, -1)?.matmul(g)?;
            let phi = inner.tril(0)?.add(&inner.tril(-1)?)?.mul(0.5)?;
            let lt = l.transpose(-2, -1)?;
            let left = lt.solve_triangular(&phi, true, &Default::default())?;
            let product = lt.solve_triangular(&left.transpose(-2, -1)?, true, &Default::default())?;
            product.add(&product.transpose(-2, -1)?)?.mul(0.5)
        }))
    }

    /// Solves a x = b, or x a = b unless `left`, for triangular a (`self`, \[.., n, n\]): PyTorch's
    /// `linalg.solve_triangular`. Reads only the `upper` or lower triangle.
    ///
    /// # Errors
    /// The shapes or types do not fit. The dtype is not f32, or f64 on a device that supports it.
    #[doc(alias = "triangular_solve")]
    #[track_caller]
    pub fn solve_triangular(
        &self,
        b: &Tensor,
        upper: bool,
        options: &SolveTriangularOptions,
    ) -> Result<Tensor> {
        operation!(OP = "solve_triangular", autocast [self, b], |a, b| a.solve_triangular(&b, upper, options));
        let &SolveTriangularOptions { left, unitriangular } = options;
        let from_left = SolveTriangularOptions { left: true, unitriangular };
        if !left {
            check_square(OP, self)?;
            check_matrices(OP, b)?;
            let (at, bt) = (self.transpose(-2, -1)?, b.transpose(-2, -1)?);
            return at.solve_triangular(&bt, !upper, &from_left)?.transpose(-2, -1);
        }
        let (a, b, shape) = broadcast_system(OP, self, b)?;
        let x = solve_by_substitution(&a.detach(), &b, upper, unitriangular)?;
        let (saved, result) = (SavedTensor::input(&a), SavedTensor::output(&x));
        let x = autograd::differentiable(OP, x, &[&a, &b], move |g, ctx| {
            let (a, x) = (saved.unpack(ctx)?, result.unpack(ctx)?);
            let gb = a.transpose(1, 2)?.solve_triangular(g, !upper, &from_left)?;
            let ga = ctx.needs_input_grad[0].then(|| {
                let product = gb.matmul(&x.transpose(1, 2)?)?.neg()?;
                let diagonal = isize::from(unitriangular);
                if upper { product.triu(diagonal) } else { product.tril(-diagonal) }
            });
            Ok(smallvec![ga.transpose()?, Some(gb)])
        });
        x.reshape(&shape[..])
    }

    /// Solves a x = b by elimination with pivoting, for square matrices a (`self`, \[.., n, n\]): PyTorch's
    /// `linalg.solve`. b is \[.., n, columns\], or \[.., n\] with the leading dimensions of a. The solution
    /// of a singular system is not finite.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let a = Tensor::eye(3, 3, DType::F32, &device)?.mul(2.0)?;
    /// assert_eq!(a.solve(&Tensor::ones(&[3], DType::F32, &device)?)?.shape(), [3]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[track_caller]
    pub fn solve(&self, b: &Tensor) -> Result<Tensor> {
        operation!(OP = "solve", autocast [self, b], |a, b| a.solve(&b));
        let (lead, n) = check_square(OP, self)?;
        if b.rank() == 1 || (b.rank() + 1 == self.rank() && b.shape() == [lead, &[n]].concat()) {
            return self.solve(&b.unsqueeze(-1)?)?.squeeze(-1);
        }
        let (a, b, shape) = broadcast_system(OP, self, b)?;
        if b.numel() == 0 {
            return empty_result_with_grad(OP, &[&a, &b], &shape);
        }
        let LuFactors { packed_lu: triangles, row_order: order, .. } = lu_decompose(&a, n, n)?;
        let rows = b.detach().gather(1, &order.unsqueeze(2)?.broadcast_to(b.shape())?)?;
        let x = solve_by_substitution(&triangles, &rows, false, true)?;
        let x = solve_by_substitution(&triangles, &x, true, false)?;
        let (saved, result) = (SavedTensor::input(&a), SavedTensor::output(&x));
        let x = autograd::differentiable(OP, x, &[&a, &b], move |g, ctx| {
            let (a, x) = (saved.unpack(ctx)?, result.unpack(ctx)?);
            let gb = a.transpose(1, 2)?.solve(g)?;
            let ga = ctx.needs_input_grad[0].then(|| gb.matmul(&x.transpose(1, 2)?)?.neg());
            Ok(smallvec![ga.transpose()?, Some(gb)])
        });
        x.reshape(&shape[..])
    }

    /// Computes the inverses of square matrices \[.., n, n\]: PyTorch's `linalg.inv`. The result is not
    /// finite for a singular matrix.
    #[doc(alias = "inverse")]
    #[track_caller]
    pub fn inv(&self) -> Result<Tensor> {
        operation!(OP = "inv", autocast[self], |x| x.inv());
        let (_, n) = check_square(OP, self)?;
        self.solve(&Tensor::eye(n, n, self.dtype(), self.device())?.broadcast_to(self.shape())?)
    }

    /// Computes the determinants of square matrices \[.., n, n\] as \[..\]. The gradient assumes
    /// invertibility.
    #[track_caller]
    pub fn det(&self) -> Result<Tensor> {
        operation!(OP = "det", autocast[self], |x| x.det());
        let (lead, n) = check_square(OP, self)?;
        if self.numel() == 0 {
            return empty_result_with_grad(OP, &[self], lead)?.add(1.0);
        }
        let LuFactors { packed_lu: triangles, permutation_sign: sign, .. } = lu_decompose(self, n, n)?;
        let out = triangles.diagonal(0, 1, 2)?.prod(1, false)?.mul(&sign)?.reshape(lead)?;
        let (x, y) = (SavedTensor::input(self), SavedTensor::output(&out));
        Ok(autograd::differentiable_unary(OP, out, self, move |g, ctx| {
            let (x, y) = (x.unpack(ctx)?, y.unpack(ctx)?);
            let scale = g.mul(&y)?.unsqueeze(-1)?.unsqueeze(-1)?;
            x.inv()?.transpose(-2, -1)?.mul(&scale)
        }))
    }

    /// Computes the signs of determinants and the logarithms of their magnitudes, without overflow, both
    /// \[..\]. A singular matrix gives 0 and -∞.
    #[track_caller]
    pub fn slogdet(&self) -> Result<(Tensor, Tensor)> {
        operation!(OP = "slogdet", autocast[self], |x| x.slogdet());
        let (lead, n) = check_square(OP, self)?;
        if self.numel() == 0 {
            let zeros = empty_result_with_grad(OP, &[self], lead)?;
            return Ok((zeros.add(1.0)?, zeros));
        }
        let LuFactors { packed_lu: triangles, permutation_sign: sign, .. } = lu_decompose(self, n, n)?;
        let diagonal = triangles.diagonal(0, 1, 2)?;
        let sign = diagonal.sign()?.prod(1, false)?.mul(&sign)?.reshape(lead)?;
        let size = diagonal.abs()?.log()?.sum([1], false)?.reshape(lead)?;
        // As in PyTorch, the sign has a history with a zero gradient.
        let shape = Dims::from_slice(self.shape());
        let sign = autograd::differentiable_unary(OP, sign, self, move |g, _| {
            Tensor::zeros(&shape, g.dtype(), g.device())
        });
        let x = SavedTensor::input(self);
        let size = autograd::differentiable_unary(OP, size, self, move |g, ctx| {
            let scale = g.unsqueeze(-1)?.unsqueeze(-1)?;
            x.unpack(ctx)?.inv()?.transpose(-2, -1)?.mul(&scale)
        });
        Ok((sign, size))
    }

    /// Computes a power, if negative of the inverse, of square matrices \[.., n, n\] (`linalg.matrix_power`).
    #[track_caller]
    pub fn matrix_power(&self, power: i32) -> Result<Tensor> {
        operation!(OP = "matrix_power", autocast[self], |x| x.matrix_power(power));
        let (_, n) = check_square(OP, self)?;
        let mut left = power.unsigned_abs();
        let mut square = if power < 0 { self.inv()? } else { self.clone() };
        let mut out: Option<Tensor> = None;
        while left > 0 {
            if left % 2 == 1 {
                out = Some(match out {
                    Some(out) => out.matmul(&square)?,
                    None => square.clone(),
                });
            }
            left /= 2;
            if left > 0 {
                square = square.matmul(&square)?;
            }
        }
        match out {
            Some(out) => Ok(out),
            None => self.mul(0.0)?.add(&Tensor::eye(n, n, self.dtype(), self.device())?),
        }
    }

    /// Computes the Moore-Penrose pseudo-inverses \[.., n, m\] of matrices \[.., m, n\] by singular values.
    /// Singular values up to `rtol` times the largest count as zero. As in PyTorch, the default is the larger
    /// extent times the machine epsilon. The gradient assumes constant rank.
    #[doc(alias = "pinverse")]
    #[track_caller]
    pub fn pinv(&self, rtol: Option<f64>) -> Result<Tensor> {
        operation!(OP = "pinv", autocast[self], |x| x.pinv(rtol));
        Ok(self.pinv_with_singular_values(OP, rtol)?.0)
    }

    /// Returns the pseudo-inverses, the singular values, and the mask of those that count as zero.
    pub(super) fn pinv_with_singular_values(
        &self,
        op: &'static str,
        rtol: Option<f64>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let _no_autocast = amp::no_autocast();
        let BatchedMatrixShape { batch_shape: lead, m, n } = check_matrices(op, self)?;
        if self.numel() == 0 {
            let values = Tensor::zeros([lead, &[m.min(n)]].concat(), self.dtype(), self.device())?;
            let is_zero = values.eq(0.0)?;
            return Ok((empty_result_with_grad(op, &[self], &[lead, &[n, m]].concat())?, values, is_zero));
        }
        let (u, s, vh) = self.detach().svd()?;
        let is_negligible = self.negligible_mask(&s, rtol)?;
        let inverse = s.masked_fill(&is_negligible, 1.0)?.reciprocal()?.masked_fill(&is_negligible, 0.0)?;
        let out = vh.transpose(-2, -1)?.mul(&inverse.unsqueeze(-2)?)?.matmul(&u.transpose(-2, -1)?)?;
        let (x, y) = (SavedTensor::input(self), SavedTensor::output(&out));
        let out = autograd::differentiable_unary(op, out, self, move |g, ctx| {
            // For p = a⁺: -pᵀ g pᵀ + (1 - a p) gᵀ p pᵀ + pᵀ p gᵀ (1 - p a) (Golub and Pereyra, 1973).
            let (a, p) = (x.unpack(ctx)?, y.unpack(ctx)?);
            let (pt, gt) = (p.transpose(-2, -1)?, g.transpose(-2, -1)?);
            let long = gt.matmul(&p)?.matmul(&pt)?;
            let wide = pt.matmul(&p)?.matmul(&gt)?;
            let grad = long.sub(&pt.matmul(g)?.matmul(&pt)?)?.sub(&a.matmul(&p.matmul(&long)?)?)?;
            grad.add(&wide.sub(&wide.matmul(&p)?.matmul(&a)?)?)
        });
        Ok((out, s, is_negligible))
    }

    /// Counts the nonzero singular values of matrices \[.., m, n\], as i64 \[..\]. For `rtol` see
    /// [`pinv`](Self::pinv).
    #[track_caller]
    pub fn matrix_rank(&self, rtol: Option<f64>) -> Result<Tensor> {
        operation!(OP = "matrix_rank", autocast[self], |x| x.matrix_rank(rtol));
        let BatchedMatrixShape { batch_shape: lead, .. } = check_matrices(OP, self)?;
        if self.numel() == 0 {
            return Tensor::zeros(lead, DType::I64, self.device());
        }
        let s = self.detach().svdvals()?;
        count_false(&self.negligible_mask(&s, rtol)?, s.dtype())
    }

    /// Returns the mask of the singular values of `self` that count as zero.
    fn negligible_mask(&self, values: &Tensor, rtol: Option<f64>) -> Result<Tensor> {
        let longest = self.shape()[self.rank() - 2..].iter().copied().max().unwrap_or(0);
        let unit = if self.dtype() == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let values = values.detach();
        let bound = values.amax([-1], true)?.mul(rtol.unwrap_or(longest as f64 * unit))?;
        values.le(&bound)
    }
}

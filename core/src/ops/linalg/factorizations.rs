//! Matrix factorisations (QR, eigendecomposition, LU) and least squares.

use crate::ops::linalg::SolveTriangularOptions;
use crate::ops::linalg::svd::{
    BatchedMatrixShape, attach_factor_grads, check_matrices, empty_result_with_grad, jacobi_orthogonalize,
};
use crate::ops::linalg::{check_square, count_false, lu_decompose};
use crate::ops::prelude::*;

/// Number of columns for a workgroup that applies reflections.
const WORKGROUP_COLUMNS: usize = 32;

/// Result of [`lstsq`](Tensor::lstsq) for matrices \[.., m, n\] and right-hand sides \[.., m, columns\].
#[derive(Clone, Debug)]
pub struct LstsqResult {
    /// Solution, \[.., n, columns\].
    pub solution: Tensor,
    /// Sums of the squared residuals, \[.., columns\].
    pub residuals: Tensor,
    /// Number of singular values that are not negligible, \[..\] as i64.
    pub rank: Tensor,
    /// Singular values in descending order, \[.., min(m, n)\]. Not recorded.
    pub singular_values: Tensor,
}

/// Returns the loop iterations for a reflection of 32 columns with `rows` rows.
fn reflection_loop_iterations(rows: usize) -> usize {
    2 * rows.div_ceil(WORKGROUP_SIZE / WORKGROUP_COLUMNS) + 16
}

/// Factorises `a` \[batch, m, n\] by Householder reflections: LAPACK's `geqrf`. Not recorded.
///
/// Returns R with the reflection vectors below its diagonal, and the factors tau.
fn householder_factorize(a: &Tensor) -> Result<(Tensor, Tensor)> {
    let (batch, m, n) = (a.shape()[0], a.shape()[1], a.shape()[2]);
    let factors = a.detach().copy()?.contiguous()?;
    let count = m.min(n);
    let tau = Tensor::empty([batch, count], a.dtype(), a.device())?;
    let spec = kernel_spec! { "qr", dtype: a.dtype().name(), form: "factor" };
    let iterations_of = |j: usize| {
        let rows = m - j - 1;
        3 * rows.div_ceil(WORKGROUP_SIZE)
            + (n - j - 1).div_ceil(WORKGROUP_COLUMNS) * reflection_loop_iterations(rows)
            + 24
    };
    launch::launch_in_parts(a.device(), 1, count, iterations_of, |first, steps, iterations| {
        let params = kernel_params! { batch, m, n, count, columns: 0usize, first, end: first + steps };
        let params = params.loop_iterations(iterations);
        launch::launch(&spec, &[&factors, &tau], params, batch)
    })?;
    Ok((factors, tau))
}

/// Computes the first `columns` columns of the product of the reflections. Not recorded.
fn householder_product(factors: &Tensor, tau: &Tensor, columns: usize) -> Result<Tensor> {
    let (batch, m, n) = (factors.shape()[0], factors.shape()[1], factors.shape()[2]);
    let eye = Tensor::eye(m, columns, factors.dtype(), factors.device())?;
    let q = eye.broadcast_to([batch, m, columns])?.copy()?;
    let spec = kernel_spec! { "qr", dtype: factors.dtype().name(), form: "apply" };
    let count = tau.shape()[1];
    // Apply the last reflection first.
    let iterations_of = |step: usize| reflection_loop_iterations(m - count + step);
    launch::launch_in_parts(q.device(), 1, count, iterations_of, |first, steps, iterations| {
        let end = count - first;
        let params = kernel_params! { batch, m, n, count, columns, first: end - steps, end };
        let params = params.loop_iterations(iterations);
        launch::launch(&spec, &[factors, tau, &q], params, batch * columns.div_ceil(WORKGROUP_COLUMNS))
    })?;
    Ok(q)
}

/// Mirrors the lower half of x to the upper half.
fn symmetrize_lower(x: &Tensor) -> Result<Tensor> {
    x.tril(0)?.add(&x.tril(-1)?.transpose(-2, -1)?)
}

/// Computes the gradient of matrices from the gradients of `q` [batch, m, n] and `r` [batch, n, n].
///
/// With M = gR Rᵀ - Qᵀ gQ, upper half mirrored: [Q sym(M) + gQ] R⁻ᵀ (Walter and Lehmann, 2018).
fn qr_backward(q: &Tensor, r: &Tensor, grad_q: Option<&Tensor>, grad_r: Option<&Tensor>) -> Result<Tensor> {
    let of_r = grad_r.map(|g| g.matmul(&r.transpose(1, 2)?)).transpose()?;
    let of_q = grad_q.map(|g| q.transpose(1, 2)?.matmul(g)).transpose()?;
    let m = match (of_r, of_q) {
        (Some(r), Some(q)) => r.sub(&q)?,
        (Some(r), None) => r,
        (None, Some(q)) => q.neg()?,
        (None, None) => fail!(argument("qr"), "has no gradient of a factor"),
    };
    let inner = q.matmul(&symmetrize_lower(&m.transpose(1, 2)?)?)?;
    let inner = grad_q.map_or(Ok(inner.clone()), |g| inner.add(g))?;
    r.transpose(1, 2)?.solve_triangular(&inner, false, &RIGHT)
}

/// Systems of triangular matrices with a unit diagonal.
const UNIT: SolveTriangularOptions = SolveTriangularOptions { left: true, unitriangular: true };
/// Systems x a = b.
const RIGHT: SolveTriangularOptions = SolveTriangularOptions { left: false, unitriangular: false };

with_defaults! {
    /// Options of [`Tensor::lu_solve`].
    #[derive(Clone, Copy, Debug)]
    pub struct LuSolveOptions {
        /// If false, solves x a = b in place of a x = b; true.
        pub left: bool = true,
        /// If true, solves with the transpose of a; false.
        pub adjoint: bool = false,
    }
}

impl Tensor {
    /// Computes the QR decomposition of matrices \[.., m, n\] by Householder reflections, with LAPACK's
    /// signs: PyTorch's `linalg.qr`.
    ///
    /// With k = min(m, n), Q is \[.., m, k\] and R is \[.., k, n\] (mode `reduced`). If `complete`, Q is
    /// \[.., m, m\] and R is \[.., m, n\]. The mode `r` is the second result alone.
    ///
    /// The gradient assumes that the first k columns are independent. As in PyTorch, complete factors have no
    /// gradient for m > n, because the completion of Q is arbitrary.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let (q, r) = Tensor::ones(&[7, 5, 3], DType::F32, &device)?.qr(false)?;
    /// assert_eq!((q.shape(), r.shape()), (&[7, 5, 3][..], &[7, 3, 3][..]));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// A gradient of complete factors with m > n is required. See also [`svdvals`](Self::svdvals).
    #[track_caller]
    pub fn qr(&self, complete: bool) -> Result<(Tensor, Tensor)> {
        operation!(OP = "qr", autocast[self], |x| x.qr(complete));
        let _no_autocast = amp::no_autocast();
        let BatchedMatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
        let batch = lead.iter().product::<usize>();
        if complete && m > n {
            autograd::check_no_grad_inputs(OP, &[self])?;
        }
        let columns = if complete { m } else { m.min(n) };
        let [of_q, of_r]: [Dims; 2] =
            [[m, columns], [columns, n]].map(|rest| lead.iter().copied().chain(rest).collect());
        if self.numel() == 0 {
            let eye = Tensor::eye(m, columns, self.dtype(), self.device())?.broadcast_to(&of_q)?;
            return Ok((
                empty_result_with_grad(OP, &[self], &of_q)?.add(&eye)?,
                empty_result_with_grad(OP, &[self], &of_r)?,
            ));
        }
        let a = self.reshape([batch, m, n])?;
        if m < n && autograd::compute_requires_grad(&[self]) {
            // Columns after the first m are Qᵀ times the input, which is differentiable by itself.
            let (q, r) = a.narrow(2, 0, m)?.qr(false)?;
            let right_columns = q.transpose(1, 2)?.matmul(&a.narrow(2, m, n - m)?)?;
            return Ok((q.reshape(&of_q[..])?, cat(&[&r, &right_columns], 2)?.reshape(&of_r[..])?));
        }
        let (q, r) = {
            let _no_grad = autograd::no_grad();
            let (factors, tau) = householder_factorize(&a)?;
            let q = householder_product(&factors, &tau, columns)?;
            let mut r = factors.narrow(1, 0, m.min(n))?.triu(0)?;
            if columns > r.shape()[1] {
                r = cat(&[&r, &Tensor::zeros([batch, m - n, n], r.dtype(), r.device())?], 1)?;
            }
            (q, r)
        };
        let [q, r] = attach_factor_grads(
            OP,
            &a,
            [q, r],
            |x| x.qr(false).map(<[Tensor; 2]>::from),
            |which, g, [q, r]| {
                let (of_q, of_r) = if which == 0 { (Some(g), None) } else { (None, Some(g)) };
                qr_backward(q, r, of_q, of_r)
            },
        )?;
        Ok((q.reshape(&of_q[..])?, r.reshape(&of_r[..])?))
    }

    /// Computes the eigenvalues and eigenvectors of symmetric matrices \[.., n, n\]: PyTorch's `linalg.eigh`.
    ///
    /// Eigenvalues \[.., n\] are in ascending order, and eigenvectors are columns, \[.., n, n\], of arbitrary
    /// sign. Only the lower half is read, or with `upper` the upper half (`UPLO="U"`).
    ///
    /// The gradient is symmetric, and assumes symmetric matrices. That of the vectors divides by the
    /// differences of the eigenvalues. A loss must not depend on the signs.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let (values, vectors) = Tensor::ones(&[7, 3, 3], DType::F32, &device)?.eigh(false)?;
    /// assert_eq!((values.shape(), vectors.shape()), (&[7, 3][..], &[7, 3, 3][..]));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[track_caller]
    pub fn eigh(&self, upper: bool) -> Result<(Tensor, Tensor)> {
        operation!(OP = "eigh", autocast[self], |x| x.eigh(upper));
        let (lead, n) = check_square(OP, self)?;
        let of_values: Dims = lead.iter().copied().chain([n]).collect();
        if self.numel() == 0 {
            return Ok((
                empty_result_with_grad(OP, &[self], &of_values)?,
                empty_result_with_grad(OP, &[self], self.shape())?,
            ));
        }
        let a = self.reshape([lead.iter().product(), n, n])?;
        let (values, vectors) = {
            let _no_grad = autograd::no_grad();
            eigh_jacobi(&a.detach(), upper)?
        };
        let [values, vectors] = attach_factor_grads(
            OP,
            &a,
            [values, vectors],
            move |x| x.eigh(upper).map(<[Tensor; 2]>::from),
            move |which, g, [values, v]| {
                let vt = v.transpose(1, 2)?;
                if which == 0 {
                    return v.mul(&g.unsqueeze(1)?)?.matmul(&vt);
                }
                // V (skew(Vᵀ g) / E) Vᵀ, where E is the column's eigenvalue minus the row's (Giles, 2008).
                let eye = Tensor::eye(n, n, g.dtype(), g.device())?;
                let differences = values.unsqueeze(1)?.sub(&values.unsqueeze(2)?)?.add(&eye)?;
                let along = vt.matmul(g)?;
                let skew = along.sub(&along.transpose(1, 2)?)?.mul(0.5)?;
                v.matmul(&skew.div(&differences)?)?.matmul(&vt)
            },
        )?;
        Ok((values.reshape(&of_values[..])?, vectors.reshape(self.shape())?))
    }

    /// Computes the eigenvalues of symmetric matrices: see [`eigh`](Self::eigh).
    #[track_caller]
    pub fn eigvalsh(&self, upper: bool) -> Result<Tensor> {
        operation!("eigvalsh", autocast[self], |x| x.eigvalsh(upper));
        check_square("eigvalsh", self)?;
        Ok(self.eigh(upper)?.0)
    }

    /// Computes the LU factorisation of \[.., m, n\] with pivoting: PyTorch's `linalg.lu_factor`.
    ///
    /// Returns one matrix with U and, below the diagonal, L without its unit diagonal. Also returns the row
    /// order as i64 \[.., m\]: for each row of L · U, the row of the input. PyTorch returns the sequence of
    /// row swaps instead. [`lu_solve`](Self::lu_solve) takes both results.
    #[doc(alias = "lu")]
    #[track_caller]
    pub fn lu_factor(&self) -> Result<(Tensor, Tensor)> {
        operation!(OP = "lu_factor", autocast[self], |x| x.lu_factor());
        let BatchedMatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
        let of_order: Dims = lead.iter().copied().chain([m]).collect();
        if self.numel() == 0 {
            let order = Tensor::arange(0.0, m as f64, 1.0, DType::I64, self.device())?;
            return Ok((empty_result_with_grad(OP, &[self], self.shape())?, order.broadcast_to(&of_order)?));
        }
        let a = self.reshape([lead.iter().product(), m, n])?;
        let factors = lu_decompose(&a, m, n)?;
        let order = factors.row_order.to_dtype(DType::I64)?.reshape(&of_order[..])?;
        if !autograd::compute_requires_grad(&[self]) {
            return Ok((factors.packed_lu.reshape(self.shape())?, order));
        }
        // Differentiate the leading square of the ordered rows. The other rows or columns follow from it.
        let rows = a.gather(1, &factors.row_order.unsqueeze(2)?.broadcast_to(a.shape())?)?;
        let k = m.min(n);
        let square = factors.packed_lu.narrow(1, 0, k)?.narrow(2, 0, k)?.contiguous()?;
        let both = attach_lu_grad(&rows.narrow(1, 0, k)?.narrow(2, 0, k)?, square);
        let out = if n > m {
            let right_columns = both.solve_triangular(&rows.narrow(2, m, n - m)?, false, &UNIT)?;
            cat(&[&both, &right_columns], 2)?
        } else if m > n {
            let lower_rows = both.solve_triangular(&rows.narrow(1, n, m - n)?, true, &RIGHT)?;
            cat(&[&both, &lower_rows], 1)?
        } else {
            both
        };
        Ok((out.reshape(self.shape())?, order))
    }

    /// Computes P, L and U with P · L · U equal to the matrices \[.., m, n\]: PyTorch's `linalg.lu`.
    ///
    /// With k = min(m, n), P is \[.., m, m\] and not recorded, L is \[.., m, k\], and U is \[.., k, n\].
    #[track_caller]
    pub fn lu(&self) -> Result<(Tensor, Tensor, Tensor)> {
        operation!("lu", autocast[self], |x| x.lu());
        let (both, order) = self.lu_factor()?;
        both.lu_unpack(&order)
    }

    /// Computes P, L and U, as [`lu`](Self::lu) does, from the results of [`lu_factor`](Self::lu_factor): PyTorch's
    /// `lu_unpack`.
    ///
    /// # Errors
    /// `order` does not have one element for each row.
    #[track_caller]
    pub fn lu_unpack(&self, order: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        operation!(OP = "lu_unpack");
        let BatchedMatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
        fail_if!(order.shape() != [lead, &[m]].concat();
            shape(OP, [self, order]), "takes the order that `lu_factor` gave, one position for each row [.., m]");
        let (both, k) = (self, m.min(n));
        let columns = Tensor::arange(0.0, m as f64, 1.0, DType::I32, self.device())?;
        let permutation = order.to_dtype(DType::I32)?.unsqueeze(-1)?.eq(&columns)?;
        let p = permutation.to_dtype(self.dtype())?.transpose(-2, -1)?;
        let eye = Tensor::eye(m, k, self.dtype(), self.device())?;
        Ok((p, both.narrow(-1, 0, k)?.tril(-1)?.add(&eye)?, both.narrow(-2, 0, k)?.triu(0)?))
    }

    /// Solves a x = b from the results of [`lu_factor`](Self::lu_factor): PyTorch's `linalg.lu_solve`.
    ///
    /// The matrices a are square, and b is \[.., n, columns\].
    ///
    /// # Errors
    /// `order` does not have one element for each row. See also [`solve_triangular`](Self::solve_triangular).
    #[track_caller]
    pub fn lu_solve(&self, order: &Tensor, b: &Tensor, options: &LuSolveOptions) -> Result<Tensor> {
        operation!(OP = "lu_solve", autocast [self, b], |a, b| a.lu_solve(order, &b, options));
        let &LuSolveOptions { left, adjoint } = options;
        let (lead, n) = check_square(OP, self)?;
        fail_if!(order.shape() != [lead, &[n]].concat();
            shape(OP, [self, order]), "takes the order that `lu_factor` gave, one position for each row [.., n]");
        if !left {
            check_matrices(OP, b)?;
            let options = LuSolveOptions { left: true, adjoint: !adjoint };
            return self.lu_solve(order, &b.transpose(-2, -1)?, &options)?.transpose(-2, -1);
        }
        let BatchedMatrixShape { batch_shape: others, m, n: columns } = check_matrices(OP, b)?;
        fail_if!(m != n; shape(OP, [self, b]), "takes right sides with a row for each of the matrix");
        let lead = broadcast_shapes(OP, &[lead, others])?;
        let index_shape: Dims = lead.iter().copied().chain([n, columns]).collect();
        let rows = order.unsqueeze(-1)?.broadcast_to(&index_shape)?;
        if adjoint {
            let transposed = self.transpose(-2, -1)?;
            let x = transposed.solve_triangular(b, false, &Default::default())?;
            let x = transposed.solve_triangular(&x, true, &UNIT)?;
            return x.zeros_like()?.scatter(-2, &rows, &x);
        }
        let rows = b.broadcast_to(&index_shape)?.gather(-2, &rows)?;
        self.solve_triangular(&self.solve_triangular(&rows, false, &UNIT)?, true, &Default::default())
    }

    /// Computes the minimum-norm least-squares solution of a x = b: PyTorch's `linalg.lstsq`. The shape of a
    /// (`self`) is \[.., m, n\], and that of b \[.., m, columns\].
    ///
    /// Uses [`pinv`](Self::pinv) with `rtol`, so matrices of any rank are valid. Unlike PyTorch, returns
    /// residuals for every rank and shape.
    ///
    /// # Errors
    /// The numbers of rows differ. See also [`svdvals`](Self::svdvals).
    #[track_caller]
    pub fn lstsq(&self, b: &Tensor, rtol: Option<f64>) -> Result<LstsqResult> {
        operation!(OP = "lstsq", autocast [self, b], |a, b| a.lstsq(&b, rtol));
        let _no_autocast = amp::no_autocast();
        let (of_a, of_b) = (check_matrices(OP, self)?, check_matrices(OP, b)?);
        fail_if!(of_a.m != of_b.m;
            shape(OP, [self, b]), "takes right sides with a row for each of the matrix");
        let (inverse, singular_values, none) = self.pinv_with_singular_values(OP, rtol)?;
        let solution = inverse.matmul(b)?;
        let residuals = self.matmul(&solution)?.sub(b)?.square()?.sum([-2], false)?;
        let rank = count_false(&none, self.dtype())?;
        Ok(LstsqResult { solution, residuals, rank, singular_values })
    }
}

/// Attaches the gradient to `out`, the packed factors of `a` [batch, n, n], whose rows are in pivot order.
fn attach_lu_grad(a: &Tensor, out: Tensor) -> Tensor {
    let result = SavedTensor::output(&out);
    autograd::differentiable_unary("lu_factor", out, a, move |g, ctx| {
        // L⁻ᵀ (tril(Lᵀ gL, -1) + triu(gU Uᵀ)) U⁻ᵀ (PyTorch's `plu_backward`).
        let both = result.unpack(ctx)?;
        let ones = Tensor::eye(g.shape()[1], g.shape()[1], g.dtype(), g.device())?;
        let lower = both.tril(-1)?.add(&ones)?.transpose(1, 2)?;
        let upper = both.triu(0)?.transpose(1, 2)?;
        let of_lower = lower.matmul(&g.tril(-1)?)?.tril(-1)?;
        let inner = of_lower.add(&g.triu(0)?.matmul(&upper)?.triu(0)?)?;
        let right = upper.solve_triangular(&inner, false, &RIGHT)?;
        lower.solve_triangular(&right, true, &UNIT)
    })
}

/// Computes ascending eigenvalues [batch, n] and eigenvectors [batch, n, n] as columns from one half of `a`.
fn eigh_jacobi(a: &Tensor, upper: bool) -> Result<(Tensor, Tensor)> {
    let (batch, n) = (a.shape()[0], a.shape()[1]);
    let a = if upper { a.transpose(1, 2)? } else { a.clone() };
    let a = symmetrize_lower(&a)?;
    // Scale the eigenvalues to [-1, 1] by the smaller of two bounds: the largest row sum of magnitudes
    // (Gershgorin), and the Frobenius norm.
    let sums = a.abs()?.sum([2], true)?.amax([1], true)?;
    let bound = sums.minimum(&a.div(&sums)?.nan_to_num()?.norm(2.0, [1, 2], true)?.mul(&sums)?)?;
    let bound = bound.masked_fill(&bound.eq(0.0)?, 1.0)?;
    let a = a.div(&bound)?;
    // Shifted by the identity, the matrix is positive semidefinite, so one-sided Jacobi rotations find the
    // eigenvectors. A larger shift would lose precision.
    let eye = Tensor::eye(n, n, a.dtype(), a.device())?.broadcast_to([batch, n, n])?;
    let w = cat(&[&a.add(&eye)?, &eye], 2)?;
    jacobi_orthogonalize(&w, n)?;
    let rows = w.narrow(2, n, n)?;
    let rows = rows.div(&rows.norm(2.0, [2], true)?)?;
    // Rayleigh quotients: their errors are quadratic in those of the vectors.
    let values = rows.matmul(&a)?.mul(&rows)?.sum([2], false)?;
    let (values, order) = values.sort(1, false)?;
    let rows = rows.gather(1, &order.unsqueeze(2)?.broadcast_to(rows.shape())?)?;
    Ok((values.mul(&bound.squeeze(2)?)?, rows.transpose(1, 2)?.contiguous()?))
}

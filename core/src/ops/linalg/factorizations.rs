//! Matrices as products of others: orthogonal and triangular ones, eigenvectors, permuted triangles; least squares by them.

use smallvec::smallvec;

use crate::amp::dispatch_autocast;
use crate::autograd::{self, SavedTensor};
use crate::dtype::DType;
use crate::error::{Error, Result, fail_if};
use crate::memory;
use crate::ops::kernel::launch::{self, WORKGROUP_SIZE, kernel_params, kernel_spec};
use crate::ops::linalg::svd::{
    MatrixShape, attach_factor_grads, check_matrices, empty_result_with_grad, jacobi_orthogonalize,
};
use crate::ops::linalg::{check_square, count_false, lu_decompose};
use crate::ops::shape::cat;
use crate::tensor::layout::broadcast_shapes;
use crate::tensor::{Dims, Tensor};

/// Columns of a workgroup that applies reflections.
const WORKGROUP_COLUMNS: usize = 32;

/// What [`lstsq`](Tensor::lstsq) finds for matrices \[.., m, n\] and right sides \[.., m, columns\].
#[derive(Clone, Debug)]
pub struct LstsqResult {
    /// \[.., n, columns\].
    pub solution: Tensor,
    /// The sums of the squares that are left, \[.., columns\].
    pub residuals: Tensor,
    /// How many singular values count, \[..\] as i64.
    pub rank: Tensor,
    /// The singular values, largest first, \[.., min(m, n)\]; without a history.
    pub singular_values: Tensor,
}

/// Turns of loops for a reflection of 32 columns, by as many `rows` below its first.
fn reflection_loop_iterations(rows: usize) -> usize {
    2 * rows.div_ceil(WORKGROUP_SIZE / WORKGROUP_COLUMNS) + 16
}

/// `a` [batch, m, n] as the triangle with the reflections' vectors below, and what they are multiplied by. Not recorded.
fn householder_factorize(a: &Tensor) -> Result<(Tensor, Tensor)> {
    let (batch, m, n) = (a.shape()[0], a.shape()[1], a.shape()[2]);
    let factors = a.detach().copy()?.contiguous()?;
    let count = m.min(n);
    let tau = Tensor::empty(&[batch, count], a.dtype(), a.device())?;
    let spec = kernel_spec! { "qr", dtype: a.dtype().name(), form: "factor" };
    let turns_of = |j: usize| {
        let rows = m - j - 1;
        3 * rows.div_ceil(WORKGROUP_SIZE)
            + (n - j - 1).div_ceil(WORKGROUP_COLUMNS) * reflection_loop_iterations(rows)
            + 24
    };
    launch::launch_in_parts(a.device(), 1, count, turns_of, |first, steps, turns| {
        let params = kernel_params! { batch, m, n, count, columns: 0usize, first, end: first + steps };
        let params = params.loop_iterations(turns);
        launch::launch(&spec, &[&factors, &tau], params, batch)
    })?;
    Ok((factors, tau))
}

/// The first `columns` columns of the product of the reflections. Not recorded.
fn householder_product(factors: &Tensor, tau: &Tensor, columns: usize) -> Result<Tensor> {
    let (batch, m, n) = (factors.shape()[0], factors.shape()[1], factors.shape()[2]);
    let eye = Tensor::eye(m, columns, factors.dtype(), factors.device())?;
    let q = eye.broadcast_to(&[batch, m, columns])?.copy()?;
    let spec = kernel_spec! { "qr", dtype: factors.dtype().name(), form: "apply" };
    let count = tau.shape()[1];
    // The last reflection comes first.
    let turns_of = |step: usize| reflection_loop_iterations(m - count + step);
    launch::launch_in_parts(q.device(), 1, count, turns_of, |first, steps, turns| {
        let end = count - first;
        let params = kernel_params! { batch, m, n, count, columns, first: end - steps, end };
        let params = params.loop_iterations(turns);
        launch::launch(&spec, &[factors, tau, &q], params, batch * columns.div_ceil(WORKGROUP_COLUMNS))
    })?;
    Ok(q)
}

/// The lower half of x and its mirror image.
fn symmetrize_lower(x: &Tensor) -> Result<Tensor> {
    x.tril(0)?.add(&x.tril(-1)?.transpose(-2, -1)?)
}

/// The gradient of matrices with the factors `q` [batch, m, n] and `r` [batch, n, n] by what that of a factor makes of both: [Q sym(M) + gQ] R⁻ᵀ with the
/// upper half of M = gR Rᵀ - Qᵀ gQ mirrored. (Walter and Lehmann, 2018.)
fn qr_backward(q: &Tensor, r: &Tensor, grad_q: Option<&Tensor>, grad_r: Option<&Tensor>) -> Result<Tensor> {
    let of_r = grad_r.map(|g| g.matmul(&r.transpose(1, 2)?)).transpose()?;
    let of_q = grad_q.map(|g| q.transpose(1, 2)?.matmul(g)).transpose()?;
    let m = match (of_r, of_q) {
        (Some(r), Some(q)) => r.sub(&q)?,
        (Some(r), None) => r,
        (None, Some(q)) => q.neg()?,
        (None, None) => return Err(Error::argument("qr", "has no gradient of a factor")),
    };
    let inner = q.matmul(&symmetrize_lower(&m.transpose(1, 2)?)?)?;
    let inner = match grad_q {
        Some(g) => inner.add(g)?,
        None => inner,
    };
    r.transpose(1, 2)?.solve_triangular(&inner, false, false, false)
}

impl Tensor {
    /// Orthogonal matrices Q and upper triangles R whose product the matrices \[.., m, n\] are, by Householder's reflections, with LAPACK's signs: with
    /// k = min(m, n) \[.., m, k\] and \[.., k, n\], PyTorch's `linalg.qr` in the mode `reduced`; where `complete`, \[.., m, m\] and
    /// \[.., m, n\]. (The mode `r` is the second one alone.)
    ///
    /// The gradient is that of matrices whose first k columns are independent. Complete factors of more rows than columns have none, as in PyTorch:
    /// what completes Q is arbitrary.
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
    /// As [`svdvals`](Self::svdvals); complete factors of more rows than columns are to have a gradient.
    #[track_caller]
    pub fn qr(&self, complete: bool) -> Result<(Tensor, Tensor)> {
        const OP: &str = "qr";
        dispatch_autocast!(OP, [self], |x| x.qr(complete));
        let _op = memory::scope::enter_op(OP);
        let MatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
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
            // Columns beyond the square are what Q makes of them, which composes.
            let (q, r) = a.narrow(2, 0, m)?.qr(false)?;
            let rest = q.transpose(1, 2)?.matmul(&a.narrow(2, m, n - m)?)?;
            return Ok((q.reshape(&of_q[..])?, cat(&[&r, &rest], 2)?.reshape(&of_r[..])?));
        }
        let (q, r) = {
            let _no_grad = autograd::no_grad();
            let (factors, tau) = householder_factorize(&a)?;
            let q = householder_product(&factors, &tau, columns)?;
            let r = factors.narrow(1, 0, m.min(n))?.triu(0)?;
            let r = match columns > r.shape()[1] {
                true => cat(&[&r, &Tensor::zeros(&[batch, m - n, n], r.dtype(), r.device())?], 1)?,
                false => r,
            };
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

    /// The eigenvalues of symmetric matrices \[.., n, n\], in ascending order, \[.., n\], and their eigenvectors as columns, \[.., n, n\]: PyTorch's
    /// `linalg.eigh`. Only the lower half is read, or with `upper` the upper one (`UPLO="U"`). Of each vector the sign is arbitrary.
    ///
    /// The gradient is that of symmetric matrices, and itself symmetric; that of the vectors divides by the differences of the values, and a
    /// loss must not depend on signs.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let (values, vectors) = Tensor::ones(&[7, 3, 3], DType::F32, &device)?.eigh(false)?;
    /// assert_eq!((values.shape(), vectors.shape()), (&[7, 3][..], &[7, 3, 3][..]));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`cholesky`](Self::cholesky).
    #[track_caller]
    pub fn eigh(&self, upper: bool) -> Result<(Tensor, Tensor)> {
        const OP: &str = "eigh";
        dispatch_autocast!(OP, [self], |x| x.eigh(upper));
        let _op = memory::scope::enter_op(OP);
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
                // V (skew(Vᵀ g) / E) Vᵀ with E of the column's value less the row's (Giles, 2008).
                let eye = Tensor::eye(n, n, g.dtype(), g.device())?;
                let apart = values.unsqueeze(1)?.sub(&values.unsqueeze(2)?)?.add(&eye)?;
                let along = vt.matmul(g)?;
                let skew = along.sub(&along.transpose(1, 2)?)?.mul(0.5)?;
                v.matmul(&skew.div(&apart)?)?.matmul(&vt)
            },
        )?;
        Ok((values.reshape(&of_values[..])?, vectors.reshape(self.shape())?))
    }

    /// The eigenvalues of symmetric matrices, as of [`eigh`](Self::eigh).
    ///
    /// # Errors
    /// As [`cholesky`](Self::cholesky).
    #[track_caller]
    pub fn eigvalsh(&self, upper: bool) -> Result<Tensor> {
        dispatch_autocast!("eigvalsh", [self], |x| x.eigvalsh(upper));
        let _op = memory::scope::enter_op("eigvalsh");
        check_square("eigvalsh", self)?;
        Ok(self.eigh(upper)?.0)
    }

    /// Matrices \[.., m, n\] by elimination with pivots: in one matrix the upper triangle U and below it L, whose diagonal of ones is left out, and for each
    /// row of their product which row of the matrix it is, \[.., m\] as i64. PyTorch's `linalg.lu_factor`, whose pivots are the exchanges in turn
    /// that lead to this order; [`lu_solve`](Self::lu_solve) takes both.
    ///
    /// # Errors
    /// As [`svdvals`](Self::svdvals).
    #[track_caller]
    pub fn lu_factor(&self) -> Result<(Tensor, Tensor)> {
        const OP: &str = "lu_factor";
        dispatch_autocast!(OP, [self], |x| x.lu_factor());
        let _op = memory::scope::enter_op(OP);
        let MatrixShape { batch_shape: lead, m, n } = check_matrices(OP, self)?;
        let of_order: Dims = lead.iter().copied().chain([m]).collect();
        if self.numel() == 0 {
            let order = Tensor::arange(0.0, m as f64, 1.0, DType::I64, self.device())?;
            return Ok((empty_result_with_grad(OP, &[self], self.shape())?, order.broadcast_to(&of_order)?));
        }
        let a = self.reshape([lead.iter().product(), m, n])?;
        let made = lu_decompose(&a, m, n)?;
        let order = made.row_order.to_dtype(DType::I64)?.reshape(&of_order[..])?;
        if !autograd::compute_requires_grad(&[self]) {
            return Ok((made.packed_lu.reshape(self.shape())?, order));
        }
        // Of the rows in order, the square that has both diagonals, and what it makes of the rows or columns beyond it.
        let rows = a.gather(1, &made.row_order.unsqueeze(2)?.broadcast_to(a.shape())?)?;
        let k = m.min(n);
        let square = made.packed_lu.narrow(1, 0, k)?.narrow(2, 0, k)?.contiguous()?;
        let both = attach_lu_grad(&rows.narrow(1, 0, k)?.narrow(2, 0, k)?, square);
        let out = if n > m {
            let beyond = both.solve_triangular(&rows.narrow(2, m, n - m)?, false, true, true)?;
            cat(&[&both, &beyond], 2)?
        } else if m > n {
            let beyond = both.solve_triangular(&rows.narrow(1, n, m - n)?, true, false, false)?;
            cat(&[&both, &beyond], 1)?
        } else {
            both
        };
        Ok((out.reshape(self.shape())?, order))
    }

    /// Permutations P \[.., m, m\], lower triangles L \[.., m, k\] and upper triangles U \[.., k, n\] with k = min(m, n), whose product P L U the matrices
    /// are: PyTorch's `linalg.lu`. P has no history.
    ///
    /// # Errors
    /// As [`svdvals`](Self::svdvals).
    #[track_caller]
    pub fn lu(&self) -> Result<(Tensor, Tensor, Tensor)> {
        dispatch_autocast!("lu", [self], |x| x.lu());
        let _op = memory::scope::enter_op("lu");
        let MatrixShape { m, n, .. } = check_matrices("lu", self)?;
        let (both, order) = self.lu_factor()?;
        let k = m.min(n);
        let columns = Tensor::arange(0.0, m as f64, 1.0, DType::I32, self.device())?;
        let taken = order.to_dtype(DType::I32)?.unsqueeze(-1)?.eq(&columns)?;
        let p = taken.to_dtype(self.dtype())?.transpose(-2, -1)?;
        let eye = Tensor::eye(m, k, self.dtype(), self.device())?;
        Ok((p, both.narrow(-1, 0, k)?.tril(-1)?.add(&eye)?, both.narrow(-2, 0, k)?.triu(0)?))
    }

    /// x with a x = b, where `self` and `order` are what [`lu_factor`](Self::lu_factor) made of square matrices a, and b is \[.., n, columns\]; with x a = b
    /// unless `left`, and with `adjoint` of the transpose of a. PyTorch's `linalg.lu_solve`.
    ///
    /// # Errors
    /// As [`solve_triangular`](Self::solve_triangular); `order` is not one place for each row.
    #[track_caller]
    pub fn lu_solve(&self, order: &Tensor, b: &Tensor, left: bool, adjoint: bool) -> Result<Tensor> {
        const OP: &str = "lu_solve";
        dispatch_autocast!(OP, [self, b], |a, b| a.lu_solve(order, &b, left, adjoint));
        let _op = memory::scope::enter_op(OP);
        let (lead, n) = check_square(OP, self)?;
        fail_if!(order.shape() != [lead, &[n]].concat();
            shape(OP, [self, order]), "takes the order that `lu_factor` gave, a place for each row [.., n]");
        if !left {
            check_matrices(OP, b)?;
            return self.lu_solve(order, &b.transpose(-2, -1)?, true, !adjoint)?.transpose(-2, -1);
        }
        let MatrixShape { batch_shape: others, m, n: columns } = check_matrices(OP, b)?;
        fail_if!(m != n; shape(OP, [self, b]), "takes right sides with a row for each of the matrix");
        let lead = broadcast_shapes(OP, &[lead, others])?;
        let whole: Dims = lead.iter().copied().chain([n, columns]).collect();
        let rows = order.unsqueeze(-1)?.broadcast_to(&whole)?;
        if adjoint {
            let turned = self.transpose(-2, -1)?;
            let x = turned.solve_triangular(b, false, true, false)?;
            let x = turned.solve_triangular(&x, true, true, true)?;
            return x.zeros_like()?.scatter(-2, &rows, &x);
        }
        let rows = b.broadcast_to(&whole)?.gather(-2, &rows)?;
        self.solve_triangular(&self.solve_triangular(&rows, false, true, true)?, true, true, false)
    }

    /// The x of least length for which a x is nearest to b, for matrices a (`self`, \[.., m, n\]) and b \[.., m, columns\]: PyTorch's `linalg.lstsq`, by
    /// [`pinv`](Self::pinv) with `rtol`, so matrices of any rank do. Residuals are there whatever the rank, and not only where it is full and m > n.
    ///
    /// # Errors
    /// As [`svdvals`](Self::svdvals); the rows of both are not as many.
    #[track_caller]
    pub fn lstsq(&self, b: &Tensor, rtol: Option<f64>) -> Result<LstsqResult> {
        const OP: &str = "lstsq";
        dispatch_autocast!(OP, [self, b], |a, b| a.lstsq(&b, rtol));
        let _op = memory::scope::enter_op(OP);
        let (of_a, of_b) = (check_matrices(OP, self)?, check_matrices(OP, b)?);
        fail_if!(of_a.m != of_b.m;
            shape(OP, [self, b]), "takes right sides with a row for each of the matrix");
        let (inverse, singular_values, none) = self.pinv_with_singular_values(OP, rtol)?;
        let solution = inverse.matmul(b)?;
        let residuals = self.matmul(&solution)?.sub(b)?.square()?.sum(&[-2], false)?;
        let rank = count_false(&none, self.dtype())?;
        Ok(LstsqResult { solution, residuals, rank, singular_values })
    }
}

/// `out`, both triangles of `a` [batch, n, n] whose rows are in order, with its history.
fn attach_lu_grad(a: &Tensor, out: Tensor) -> Tensor {
    let result = SavedTensor::output(&out);
    autograd::differentiable("lu_factor", out, &[a], move |g, wants| {
        // L⁻ᵀ (tril(Lᵀ gL, -1) + triu(gU Uᵀ)) U⁻ᵀ (PyTorch's `plu_backward`).
        let both = result.unpack(wants)?;
        let ones = Tensor::eye(g.shape()[1], g.shape()[1], g.dtype(), g.device())?;
        let lower = both.tril(-1)?.add(&ones)?.transpose(1, 2)?;
        let upper = both.triu(0)?.transpose(1, 2)?;
        let of_lower = lower.matmul(&g.tril(-1)?)?.tril(-1)?;
        let inner = of_lower.add(&g.triu(0)?.matmul(&upper)?.triu(0)?)?;
        let right = upper.solve_triangular(&inner, false, false, false)?;
        Ok(smallvec![Some(lower.solve_triangular(&right, true, true, true)?)])
    })
}

/// The eigenvalues [batch, n] in ascending order and the eigenvectors [batch, n, n] as columns, of one half of `a`.
fn eigh_jacobi(a: &Tensor, upper: bool) -> Result<(Tensor, Tensor)> {
    let (batch, n) = (a.shape()[0], a.shape()[1]);
    let a = if upper { a.transpose(1, 2)? } else { a.clone() };
    let a = symmetrize_lower(&a)?;
    // No eigenvalue is larger than the largest sum of magnitudes in a row (Gershgorin), or than the root of the sum of all squares. In units of
    // that they lie in [-1, 1].
    let sums = a.abs()?.sum(&[2], true)?.amax(&[1], true)?;
    let bound = sums.minimum(&a.div(&sums)?.nan_to_num()?.norm(2.0, &[1, 2], true)?.mul(&sums)?)?;
    let bound = bound.masked_fill(&bound.eq(0.0)?, 1.0)?;
    let a = a.div(&bound)?;
    // With what puts them above zero, the rotations that make columns orthogonal are those to the eigenvectors; a larger one costs digits.
    let eye = Tensor::eye(n, n, a.dtype(), a.device())?.broadcast_to(&[batch, n, n])?;
    let w = cat(&[&a.add(&eye)?, &eye], 2)?;
    jacobi_orthogonalize(&w, n)?;
    let rows = w.narrow(2, n, n)?;
    let rows = rows.div(&rows.norm(2.0, &[2], true)?)?;
    // Rayleigh's quotients: their errors are the squares of the vectors'.
    let values = rows.matmul(&a)?.mul(&rows)?.sum(&[2], false)?;
    let (values, order) = values.sort(1, false)?;
    let rows = rows.gather(1, &order.unsqueeze(2)?.broadcast_to(rows.shape())?)?;
    Ok((values.mul(&bound.squeeze(2)?)?, rows.transpose(1, 2)?.contiguous()?))
}

//! Matrix norms, condition numbers and other composite functions of PyTorch's `linalg`.

use crate::ops::linalg::svd::MatrixDims;
use crate::ops::linalg::{BatchedMatrixShape, check_matrices, check_square};
use crate::ops::prelude::*;
use crate::ops::shape::as_refs;

/// Matrix norm: PyTorch's `ord`. A number converts to an order ±1, ±2 or ±∞.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MatrixNorm {
    /// Frobenius norm.
    Fro,
    /// Nuclear norm: sum of the singular values.
    Nuc,
    /// Order: for 1 the largest column sum of magnitudes, for ∞ the largest row sum, for 2 the largest
    /// singular value. For -1, -∞ and -2 the smallest.
    Order(f64),
}

impl From<f64> for MatrixNorm {
    fn from(order: f64) -> Self {
        Self::Order(order)
    }
}

/// Multiplies a chain of matrices in the order with the fewest multiplications: PyTorch's `linalg.multi_dot`.
/// The first tensor may be a vector (a row), and so may the last (a column).
///
/// # Errors
/// There are fewer than two tensors, an inner one is not a matrix, or the shapes or types do not fit.
#[doc(alias = "chain_matmul")]
#[track_caller]
pub fn multi_dot(tensors: &[impl AsRef<Tensor>]) -> Result<Tensor> {
    let tensors = &as_refs(tensors)[..];
    operation!(OP = "multi_dot");
    let [first, .., last] = tensors else {
        fail!(argument(OP), "takes at least two tensors, got {}", tensors.len())
    };
    let (row, column) = (first.rank() == 1, last.rank() == 1);
    let mut chain: Vec<Tensor> = tensors.iter().map(|t| (*t).clone()).collect();
    if row {
        chain[0] = first.unsqueeze(0)?;
    }
    if column && let Some(end) = chain.last_mut() {
        *end = last.unsqueeze(1)?;
    }
    for t in &chain {
        fail_if!(t.rank() != 2; shape(OP, [t]), "takes matrices, and vectors at both ends only");
    }
    if let Some(two) = chain.windows(2).find(|two| two[0].shape()[1] != two[1].shape()[0]) {
        fail!(
            shape(OP, [two[0], two[1]]),
            "takes neighbours of which one has as many columns as the next one rows"
        )
    }
    let n = chain.len();
    // Fewest multiplications for i..=j, and the split (Cormen et al., Introduction to Algorithms, 15.2).
    let extent = |k: usize| chain[k.min(n - 1)].shape()[usize::from(k == n)] as f64;
    let mut cost = vec![vec![0.0f64; n]; n];
    let mut cut = vec![vec![0usize; n]; n];
    for length in 1..n {
        for i in 0..n - length {
            let j = i + length;
            cost[i][j] = f64::INFINITY;
            for k in i..j {
                let all = cost[i][k] + cost[k + 1][j] + extent(i) * extent(k + 1) * extent(j + 1);
                if all < cost[i][j] {
                    (cost[i][j], cut[i][j]) = (all, k);
                }
            }
        }
    }
    let out = multiply_chain(&chain, &cut, 0, n - 1)?;
    match (row, column) {
        (true, true) => out.reshape([0isize; 0]),
        (true, false) => out.squeeze(0),
        (false, true) => out.squeeze(1),
        (false, false) => Ok(out),
    }
}

/// Computes the product of `chain[i..=j]`.
fn multiply_chain(chain: &[Tensor], cut: &[Vec<usize>], i: usize, j: usize) -> Result<Tensor> {
    if i == j {
        return Ok(chain[i].clone());
    }
    let k = cut[i][j];
    multiply_chain(chain, cut, i, k)?.matmul(&multiply_chain(chain, cut, k + 1, j)?)
}

impl Tensor {
    /// Computes a norm of the matrices in two dimensions: PyTorch's `linalg.matrix_norm`, whose defaults are
    /// [`MatrixNorm::Fro`] and `[-2, -1]`.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::MatrixNorm};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::ones(&[7, 5, 3], DType::F32, &device)?;
    /// assert_eq!(x.matrix_norm(MatrixNorm::Fro, [-2, -1], false)?.shape(), [7]);
    /// assert_eq!(x.matrix_norm(f64::INFINITY, [0, 2], true)?.shape(), [1, 5, 1]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// There are fewer than two dimensions, or `dims` are equal or out of range. The order is invalid. The
    /// dtype is not a float, or 16-bit although singular values are needed.
    #[doc(alias = "norm")]
    #[track_caller]
    pub fn matrix_norm(
        &self,
        order: impl Into<MatrixNorm>,
        dims: [isize; 2],
        keepdim: bool,
    ) -> Result<Tensor> {
        operation!(OP = "matrix_norm");
        let order = order.into();
        let of = MatrixDims::new(OP, self, dims)?;
        fail_if!(!self.dtype().is_float(); dtype(OP, self.dtype()), "takes floats; cast with `to_dtype`");
        let out = match order {
            MatrixNorm::Fro => of.move_to_last(self)?.norm(2.0, [-2, -1], false)?,
            MatrixNorm::Nuc => of.move_to_last(self)?.nuclear_norm((), false)?,
            MatrixNorm::Order(p) => {
                let sums = match p.abs() {
                    1.0 => of.move_to_last(self)?.abs()?.sum([-2], false)?,
                    2.0 => of.move_to_last(self)?.svdvals()?,
                    f64::INFINITY => of.move_to_last(self)?.abs()?.sum([-1], false)?,
                    _ => fail!(
                        argument(OP),
                        "takes an order of 1, 2 or infinity, or one of them negated, got {p}"
                    ),
                };
                if p > 0.0 { sums.amax([-1], false)? } else { sums.amin([-1], false)? }
            }
        };
        of.restore_keepdim(&out, self, keepdim)
    }

    /// Computes the condition numbers of matrices \[.., m, n\] as \[..\]: PyTorch's `linalg.cond`.
    ///
    /// For order 2 (PyTorch's default), the largest singular value divided by the smallest; for -2, the
    /// inverse. For others, the norm of a square matrix times that of its inverse. Not finite if singular.
    ///
    /// # Errors
    /// The order is invalid, or the matrices are not square and the order is not ±2. See also
    /// [`svdvals`](Self::svdvals).
    #[track_caller]
    pub fn cond(&self, order: impl Into<MatrixNorm>) -> Result<Tensor> {
        const OP: &str = "cond";
        let order = order.into();
        operation!(OP, autocast[self], |x| x.cond(order));
        let MatrixNorm::Order(p @ (2.0 | -2.0)) = order else {
            let (lead, n) = check_square(OP, self)?;
            if n == 0 {
                return Tensor::zeros(lead, self.dtype(), self.device());
            }
            let norm = |x: &Tensor| x.matrix_norm(order, [-2, -1], false);
            return norm(self)?.mul(&norm(&self.inv()?)?);
        };
        let values = self.svdvals()?;
        let (largest, smallest) = (values.amax([-1], false)?, values.amin([-1], false)?);
        if p > 0.0 { largest.div(&smallest) } else { smallest.div(&largest) }
    }

    /// Returns the powers 0 to `n` - 1 of each element, as \[.., count, n\]: PyTorch's `linalg.vander`. `n`
    /// defaults to the last extent.
    #[track_caller]
    pub fn vander(&self, n: Option<usize>) -> Result<Tensor> {
        operation!(OP = "vander");
        if self.rank() == 0 {
            return self.unsqueeze(0)?.vander(n);
        }
        let count = self.dim(-1)?;
        let n = n.unwrap_or(count);
        let x = if self.dtype() == DType::Bool { self.to_dtype(DType::I64)? } else { self.clone() };
        let shape: Dims = x.shape().iter().copied().chain([n.saturating_sub(1)]).collect();
        let powers = x.unsqueeze(-1)?.broadcast_to(&shape)?.cumprod(-1)?;
        let first: Dims = x.shape().iter().copied().chain([n.min(1)]).collect();
        cat(&[&Tensor::ones(&first, powers.dtype(), x.device())?, &powers], -1)
    }

    /// Computes exponentials of square matrices by scaling and squaring: PyTorch's `linalg.matrix_exp`.
    ///
    /// The matrices are halved until their series converges quickly, and the results squared as often. The
    /// host reads the number of halvings. Takes the dtypes of [`cholesky`](Self::cholesky).
    #[track_caller]
    pub fn matrix_exp(&self) -> Result<Tensor> {
        operation!(OP = "matrix_exp", autocast[self], |x| x.matrix_exp());
        let _no_autocast = amp::no_autocast();
        let (_, n) = check_square(OP, self)?;
        let eye = Tensor::eye(n, n, self.dtype(), self.device())?;
        if self.numel() == 0 {
            return self.mul(1.0);
        }
        // Up to a norm of 1/2 (2 in f32), the remainder after 15 powers is below the type's precision.
        let norm = self.detach().abs()?.sum([-2], true)?.amax([-1], true)?;
        let more = if self.dtype() == DType::F64 { 1.0 } else { -1.0 };
        let halvings = norm.log2()?.ceil()?.add(more)?.clamp(0.0, 1100.0)?.nan_to_num()?;
        let max_halvings = halvings.max_all()?.item()? as usize;
        let x = self.mul(&halvings.neg()?.exp2()?)?;
        let x2 = x.matmul(&x)?;
        let x3 = x2.matmul(&x)?;
        let x4 = x2.matmul(&x2)?;
        let mut factorial = [1.0f64; 16];
        for k in 1..16 {
            factorial[k] = factorial[k - 1] * k as f64;
        }
        // Horner's scheme with four terms at a time (Paterson and Stockmeyer, 1973).
        let terms = |first: usize| {
            let [a, b, c, d] = [0, 1, 2, 3].map(|k| factorial[first + k]);
            eye.div(a)?.add(&x.div(b)?)?.add(&x2.div(c)?)?.add(&x3.div(d)?)
        };
        let mut out = terms(12)?;
        for first in [8, 4, 0] {
            let terms = terms(first)?;
            out = out.matmul(&x4)?.add(&terms)?;
        }
        for step in 0..max_halvings {
            // Matrices with fewer halvings are done.
            out = out.matmul(&out)?.where_(&halvings.gt(step as f64)?, &out)?;
        }
        Ok(out)
    }

    /// Solves a x = `self` for x, where `l` is the [Cholesky factor](Self::cholesky) of a, or with `upper`
    /// its transpose: PyTorch's `cholesky_solve`.
    #[track_caller]
    pub fn cholesky_solve(&self, l: &Tensor, upper: bool) -> Result<Tensor> {
        operation!("cholesky_solve");
        check_square("cholesky_solve", l)?;
        let (lower, lt) =
            if upper { (l.transpose(-2, -1)?, l.clone()) } else { (l.clone(), l.transpose(-2, -1)?) };
        let y = lower.solve_triangular(self, false, &Default::default())?;
        lt.solve_triangular(&y, true, &Default::default())
    }

    /// Computes the inverse of a matrix from its [Cholesky factor](Self::cholesky) `self`, or with `upper`
    /// from the transposed factor: PyTorch's `cholesky_inverse`.
    #[track_caller]
    pub fn cholesky_inverse(&self, upper: bool) -> Result<Tensor> {
        let (_, n) = check_square("cholesky_inverse", self)?;
        let eye = Tensor::eye(n, n, self.dtype(), self.device())?;
        eye.broadcast_to(self.shape())?.cholesky_solve(self, upper)
    }

    /// Computes the polar decomposition of \[.., m, n\], m ≥ n: PyTorch's `linalg.polar`.
    ///
    /// Returns U \[.., m, n\] with orthonormal columns, and the positive semidefinite H \[.., n, n\] with U · H equal
    /// to the input. The gradient is that of [`svd`](Self::svd): it assumes full rank and distinct singular values.
    #[track_caller]
    pub fn polar(&self) -> Result<(Tensor, Tensor)> {
        operation!(OP = "polar", autocast[self], |x| x.polar());
        let _no_autocast = amp::no_autocast();
        let BatchedMatrixShape { m, n, .. } = check_matrices(OP, self)?;
        fail_if!(m < n; shape(OP, [self]), "takes matrices with at least as many rows as columns");
        let (u, s, vh) = self.svd()?;
        Ok((u.matmul(&vh)?, vh.transpose(-2, -1)?.matmul(&s.unsqueeze(-1)?.mul(&vh)?)?))
    }

    /// Approximates the `q` largest singular values and their vectors by random projections (Halko et al., 2009):
    /// PyTorch's `svd_lowrank`.
    ///
    /// Returns U \[.., m, q\], values \[.., q\] and V \[.., n, q\]. Each of `niter` iterations makes the result more
    /// accurate. If `q` is at least the rank, the result is that of [`svd`](Self::svd). PyTorch's defaults are a `q` of
    /// 6, or the smaller extent if that is less, and 2 iterations.
    ///
    /// # Errors
    /// `q` is 0 or exceeds an extent of the matrices, or `niter` is above 1,000. See also [`svd`](Self::svd).
    #[track_caller]
    pub fn svd_lowrank(&self, q: usize, niter: usize) -> Result<(Tensor, Tensor, Tensor)> {
        operation!(OP = "svd_lowrank", autocast[self], |x| x.svd_lowrank(q, niter));
        let _no_autocast = amp::no_autocast();
        let BatchedMatrixShape { m, n, .. } = check_matrices(OP, self)?;
        fail_if!(niter > 1000; argument(OP), "takes at most 1,000 iterations, got {niter}");
        fail_if!(q == 0 || q > m.min(n); argument(OP), "takes 1 to {} values, got {q}", m.min(n));
        let (wide, across) = (self, self.transpose(-2, -1)?);
        if m < n {
            let (v, s, u) = across.svd_lowrank(q, niter)?;
            return Ok((u, s, v));
        }
        let start = Tensor::randn([n, q], self.dtype(), self.device())?;
        let mut basis = wide.matmul(&start)?.qr(false)?.0;
        for _ in 0..niter {
            let other = across.matmul(&basis)?.qr(false)?.0;
            basis = wide.matmul(&other)?.qr(false)?.0;
        }
        let (u, s, vh) = basis.transpose(-2, -1)?.matmul(wide)?.svd()?;
        Ok((basis.matmul(&u)?, s, vh.transpose(-2, -1)?))
    }

    /// Approximates the `q` largest principal components of rows \[.., samples, features\], whose means are
    /// subtracted with `center`: PyTorch's `pca_lowrank`. See [`svd_lowrank`](Self::svd_lowrank).
    #[track_caller]
    pub fn pca_lowrank(&self, q: usize, center: bool, niter: usize) -> Result<(Tensor, Tensor, Tensor)> {
        operation!(OP = "pca_lowrank", autocast[self], |x| x.pca_lowrank(q, center, niter));
        let _no_autocast = amp::no_autocast();
        check_matrices(OP, self)?;
        if !center {
            return self.svd_lowrank(q, niter);
        }
        self.sub(&self.mean([-2], true)?)?.svd_lowrank(q, niter)
    }

    /// Computes the logarithms of determinants as \[..\]: NaN for a negative determinant.
    #[track_caller]
    pub fn logdet(&self) -> Result<Tensor> {
        operation!("logdet");
        let (sign, size) = self.slogdet()?;
        size.masked_fill(&sign.lt(0.0)?, f64::NAN)
    }

    /// Sums the products along `dim`, with broadcasting: PyTorch's `linalg.vecdot`.
    #[track_caller]
    pub fn vecdot(&self, other: &Tensor, dim: isize) -> Result<Tensor> {
        operation!("vecdot");
        self.mul(other)?.sum([dim], false)
    }

    /// Inverts the linear map from the last dimensions to the first `ind` dimensions: PyTorch's
    /// `linalg.tensorinv`. Both groups of extents have the same product.
    ///
    /// # Errors
    /// `ind` is not between 1 and the rank, or the products differ. See also [`inv`](Self::inv).
    #[track_caller]
    pub fn tensorinv(&self, ind: usize) -> Result<Tensor> {
        operation!(OP = "tensorinv");
        fail_if!(ind == 0 || ind > self.rank();
            argument(OP), "takes a number of dimensions from 1 to {}, got {ind}", self.rank());
        let (to, from) = self.shape().split_at(ind);
        let n: usize = to.iter().product();
        fail_if!(n != from.iter().product::<usize>();
            shape(OP, &[to, from]), "takes as many elements in the first {ind} dimensions as in the others");
        self.reshape([n, n])?.inv()?.reshape(&[from, to].concat()[..])
    }

    /// Solves `tensordot(self, x)` = b over all dimensions of x: PyTorch's `linalg.tensorsolve`. Moves `dims`
    /// of `self` after the others first, and calls [`solve`](Self::solve).
    #[track_caller]
    pub fn tensorsolve(&self, b: &Tensor, dims: impl IntoDims) -> Result<Tensor> {
        operation!(OP = "tensorsolve");
        let dims = reduction_dims(dims);
        let contracted =
            dims.iter().map(|&d| normalize_dim(OP, d, self.rank())).collect::<Result<Vec<_>>>()?;
        let rest = (0..self.rank()).filter(|d| !contracted.contains(d));
        let order: Vec<isize> = rest.chain(contracted.iter().copied()).map(|d| d as isize).collect();
        let a = self.permute(&order)?;
        let n = b.numel();
        let Some(x) =
            a.shape().get(b.rank()..).filter(|x| x.iter().product::<usize>() == n && a.numel() == n * n)
        else {
            fail!(
                shape(OP, [&a, b]),
                "takes a tensor with the right side's dimensions and others of as many elements"
            )
        };
        let x: Dims = x.into();
        a.reshape([n, n])?.solve(&b.reshape([n])?)?.reshape(&x[..])
    }
}

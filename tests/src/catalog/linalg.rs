//! Matrices: factors, solutions, norms.

use forebay::error::Result;
use forebay::ops::{MatrixNorm, cat, multi_dot};
use forebay::tensor::Tensor;

use super::Input::{Signed, Small};
use super::case::{Case, flat, rough, smooth};
use super::cost;

/// Symmetric and positive definite.
fn definite(x: &Tensor) -> Result<Tensor> {
    let n = x.shape().last().copied().unwrap_or(1);
    x.matmul(&x.transpose(-2, -1)?)?.add(&Tensor::eye(n, n, x.dtype(), x.device())?)
}

/// Far from singular.
fn regular(x: &Tensor) -> Result<Tensor> {
    let n = x.shape().last().copied().unwrap_or(1);
    x.add(&Tensor::eye(n, n, x.dtype(), x.device())?.mul(4.0)?)
}

/// Its rows from the last one on, so that elimination has to exchange them.
fn turned(x: &Tensor) -> Result<Tensor> {
    regular(x)?.flip(&[-2])
}

/// What does not say which half is read.
fn symmetric(x: &Tensor) -> Result<Tensor> {
    x.add(&x.transpose(-2, -1)?)
}

/// Matrices as products of triangles, and what follows from them.
pub(super) const LINALG: &[Case] = &[
    smooth("cholesky", &[Signed(&[2, 4, 4])], |x| definite(&x[0])?.cholesky())
        .multiplying(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
        .wide(),
    smooth("solve_triangular", &[Small(&[2, 4, 4]), Signed(&[4, 3])], |x| {
        regular(&x[0])?.solve_triangular(&x[1], true, true, false)
    })
    .wide(),
    smooth("solve_triangular from the right", &[Small(&[3, 3]), Signed(&[2, 3])], |x| {
        x[0].solve_triangular(&x[1], false, false, true)
    })
    .wide(),
    smooth("solve", &[Small(&[2, 4, 4]), Signed(&[4, 3])], |x| regular(&x[0])?.solve(&x[1])).wide(),
    smooth("solve of a vector", &[Small(&[4, 4]), Signed(&[4])], |x| regular(&x[0])?.solve(&x[1])).wide(),
    smooth("inv", &[Small(&[2, 4, 4])], |x| regular(&x[0])?.inv()).wide(),
    smooth("det", &[Small(&[2, 3, 3])], |x| regular(&x[0])?.det()).wide(),
    smooth("slogdet", &[Small(&[3, 3])], |x| Ok(regular(&x[0])?.slogdet()?.1)).wide(),
    smooth("matrix_power", &[Small(&[3, 3])], |x| regular(&x[0])?.matrix_power(-3))
        .multiplying(|x, _| 4 * cost::numel(&x[0]) * cost::extent(&x[0], 1))
        .wide(),
    smooth("pinv", &[Signed(&[5, 3])], |x| x[0].pinv(None))
        .multiplying(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1))
        .wide(),
    flat("matrix_rank", &[Signed(&[5, 3])], |x| x[0].matrix_rank(None)).wide(),
    smooth("qr", &[Signed(&[2, 5, 3])], |x| {
        let (q, r) = x[0].qr(false)?;
        cat(&[&q, &r], -2)
    })
    .wide(),
    rough("qr of wide matrices", &[Signed(&[3, 5])], |x| {
        let (q, r) = x[0].qr(true)?;
        cat(&[&q, &r], -1)
    })
    .multiplying(|x, _| if x[0].requires_grad() { 2 * 3 * 3 * 2 } else { 0 })
    .wide(),
    flat("qr of complete factors", &[Signed(&[5, 3])], |x| {
        let (q, r) = x[0].qr(true)?;
        cat(&[&q, &r], -1)
    })
    .wide(),
    smooth("eigh", &[Signed(&[2, 4, 4])], |x| {
        let (values, vectors) = symmetric(&x[0])?.eigh(false)?;
        cat(&[&values.unsqueeze(-2)?, &vectors.square()?], -2)
    })
    .multiplying(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
    .wide(),
    smooth("eigvalsh", &[Signed(&[2, 4, 4])], |x| symmetric(&x[0])?.eigvalsh(true))
        .multiplying(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
        .wide(),
    smooth("lu_factor", &[Small(&[2, 4, 4])], |x| Ok(turned(&x[0])?.lu_factor()?.0)).wide(),
    smooth("lu_factor of tall matrices", &[Small(&[3, 5])], |x| {
        Ok(turned(&cat(&[&x[0], &x[0].mul(0.5)?.narrow(0, 1, 2)?], 0)?)?.narrow(-1, 0, 3)?.lu_factor()?.0)
    })
    .wide(),
    smooth("lu", &[Small(&[5, 5])], |x| {
        let (_, l, u) = turned(&x[0])?.narrow(0, 1, 4)?.lu()?;
        cat(&[&l, &u], -1)
    })
    .wide(),
    smooth("lu_solve", &[Small(&[4, 4]), Signed(&[2, 4, 3])], |x| {
        let (factors, order) = turned(&x[0])?.lu_factor()?;
        factors.lu_solve(&order, &x[1], true, false)
    })
    .wide(),
    smooth("lu_solve of transposes", &[Small(&[4, 4]), Signed(&[2, 3, 4])], |x| {
        let (factors, order) = turned(&x[0])?.lu_factor()?;
        factors.lu_solve(&order, &x[1], false, false)
    })
    .wide(),
    smooth("lstsq", &[Signed(&[5, 3]), Signed(&[5, 2])], |x| {
        let found = x[0].lstsq(&x[1], None)?;
        cat(&[&found.solution, &found.residuals.unsqueeze(0)?], 0)
    })
    .multiplying(|_, _| 2 * 3 * 3 * 5 + 2 * 3 * 5 * 2 + 2 * 5 * 3 * 2)
    .wide(),
    smooth("matrix_norm", &[Signed(&[2, 3, 4])], |x| x[0].matrix_norm(MatrixNorm::Fro, [-2, -1], false)),
    smooth("matrix_norm of order 1", &[Signed(&[2, 3, 4])], |x| x[0].matrix_norm(1.0, [2, 0], true)),
    smooth("matrix_norm of order -2", &[Signed(&[2, 3, 4])], |x| x[0].matrix_norm(-2.0, [1, 2], false))
        .wide(),
    smooth("cond", &[Small(&[2, 3, 3])], |x| regular(&x[0])?.cond(2.0)).wide(),
    rough("cond of order 1", &[Small(&[3, 3])], |x| regular(&x[0])?.cond(1.0)).wide(),
    smooth("multi_dot", &[Signed(&[3, 4]), Signed(&[4, 5]), Signed(&[5])], |x| {
        multi_dot(&[&x[0], &x[1], &x[2]])
    })
    .multiplying(|x, _| 2 * (cost::numel(&x[0]) + cost::numel(&x[1])))
    .within(super::case::ROUNDED_WIDE),
    smooth("vander", &[Signed(&[2, 4])], |x| x[0].vander(Some(3))),
    smooth("matrix_exp", &[Small(&[2, 3, 3])], |x| x[0].matrix_exp())
        .multiplying(|x, _| 2 * 6 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
        .wide(),
    smooth("cholesky_solve", &[Signed(&[4, 2]), Small(&[4, 4])], |x| {
        x[0].cholesky_solve(&regular(&x[1])?.tril(0)?, false)
    })
    .wide(),
    smooth("cholesky_inverse", &[Small(&[4, 4])], |x| regular(&x[0])?.triu(0)?.cholesky_inverse(true)).wide(),
    smooth("logdet", &[Small(&[2, 3, 3])], |x| regular(&x[0])?.logdet()).wide(),
    smooth("vecdot", &[Signed(&[2, 3]), Signed(&[3])], |x| x[0].vecdot(&x[1], -1)),
    smooth("tensorinv", &[Small(&[6, 6])], |x| regular(&x[0])?.reshape([2, 3, 6])?.tensorinv(2)).wide(),
    smooth("tensorsolve", &[Small(&[6, 6]), Signed(&[2, 3])], |x| {
        regular(&x[0])?.reshape([2, 3, 6])?.tensorsolve(&x[1], &[])
    })
    .wide(),
];

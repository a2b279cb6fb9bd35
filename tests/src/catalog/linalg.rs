//! Linear algebra: factorisations, solvers, norms.

use forebay::error::Result;
use forebay::ops::{LuSolveOptions, MatrixNorm, SolveTriangularOptions, cat, multi_dot};
use forebay::tensor::Tensor;

use super::InputSpec::{Bounded, Signed};
use super::case::{OpCase, nondifferentiable, nonsmooth, smooth};
use super::cost;

fn to_positive_definite(x: &Tensor) -> Result<Tensor> {
    let n = x.shape().last().copied().unwrap_or(1);
    x.matmul(&x.transpose(-2, -1)?)?.add(&Tensor::eye(n, n, x.dtype(), x.device())?)
}

/// Makes matrices that are far from singular.
fn to_well_conditioned(x: &Tensor) -> Result<Tensor> {
    let n = x.shape().last().copied().unwrap_or(1);
    x.add(&Tensor::eye(n, n, x.dtype(), x.device())?.mul(4.0)?)
}

/// Makes matrices of full rank, which need not be square, also if all columns are equal.
fn to_full_rank(x: &Tensor) -> Result<Tensor> {
    let &[.., m, n] = x.shape() else { return Ok(x.clone()) };
    x.add(&Tensor::eye(m, n, x.dtype(), x.device())?.mul(4.0)?)
}

/// Reverses the rows, so that elimination has to pivot.
fn reverse_rows(x: &Tensor) -> Result<Tensor> {
    to_well_conditioned(x)?.flip([-2])
}

/// Makes symmetric matrices, for which the choice of the triangle does not matter.
fn symmetrize(x: &Tensor) -> Result<Tensor> {
    x.add(&x.transpose(-2, -1)?)
}

/// Factorisations, and operations based on them.
pub(super) const LINALG: &[OpCase] = &[
    smooth("cholesky", &[Signed(&[2, 4, 4])], |x| to_positive_definite(&x[0])?.cholesky())
        .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
        .without_half(),
    smooth("solve_triangular", &[Bounded(&[2, 4, 4]), Signed(&[4, 3])], |x| {
        to_well_conditioned(&x[0])?.solve_triangular(&x[1], true, &Default::default())
    })
    .without_half(),
    smooth("solve_triangular from the right", &[Bounded(&[3, 3]), Signed(&[2, 3])], |x| {
        x[0].solve_triangular(&x[1], false, &SolveTriangularOptions { left: false, unitriangular: true })
    })
    .without_half(),
    smooth("solve", &[Bounded(&[2, 4, 4]), Signed(&[4, 3])], |x| to_well_conditioned(&x[0])?.solve(&x[1]))
        .without_half(),
    smooth("solve of a vector", &[Bounded(&[4, 4]), Signed(&[4])], |x| {
        to_well_conditioned(&x[0])?.solve(&x[1])
    })
    .without_half(),
    smooth("inv", &[Bounded(&[2, 4, 4])], |x| to_well_conditioned(&x[0])?.inv()).without_half(),
    smooth("det", &[Bounded(&[2, 3, 3])], |x| to_well_conditioned(&x[0])?.det()).without_half(),
    smooth("slogdet", &[Bounded(&[3, 3])], |x| Ok(to_well_conditioned(&x[0])?.slogdet()?.1)).without_half(),
    smooth("matrix_power", &[Bounded(&[3, 3])], |x| to_well_conditioned(&x[0])?.matrix_power(-3))
        .with_flops(|x, _| 4 * cost::numel(&x[0]) * cost::extent(&x[0], 1))
        .without_half(),
    smooth("pinv", &[Signed(&[5, 3])], |x| x[0].pinv(None))
        .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1))
        .without_half(),
    nondifferentiable("matrix_rank", &[Signed(&[5, 3])], |x| x[0].matrix_rank(None)).without_half(),
    smooth("qr", &[Signed(&[2, 5, 3])], |x| {
        let (q, r) = x[0].qr(false)?;
        cat(&[&q, &r], -2)
    })
    .without_half(),
    nonsmooth("qr of wide matrices", &[Signed(&[3, 5])], |x| {
        let (q, r) = x[0].qr(true)?;
        cat(&[&q, &r], -1)
    })
    .with_flops(|x, _| if x[0].requires_grad() { 2 * 3 * 3 * 2 } else { 0 })
    .without_half(),
    nondifferentiable("qr of complete factors", &[Signed(&[5, 3])], |x| {
        let (q, r) = x[0].qr(true)?;
        cat(&[&q, &r], -1)
    })
    .without_half(),
    smooth("eigh", &[Signed(&[2, 4, 4])], |x| {
        let (values, vectors) = symmetrize(&x[0])?.eigh(false)?;
        cat(&[&values.unsqueeze(-2)?, &vectors.square()?], -2)
    })
    .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
    .without_half(),
    smooth("eigvalsh", &[Signed(&[2, 4, 4])], |x| symmetrize(&x[0])?.eigvalsh(true))
        .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
        .without_half(),
    smooth("lu_factor", &[Bounded(&[2, 4, 4])], |x| Ok(reverse_rows(&x[0])?.lu_factor()?.0)).without_half(),
    smooth("lu_factor of tall matrices", &[Bounded(&[3, 5])], |x| {
        Ok(reverse_rows(&cat(&[&x[0], &x[0].mul(0.5)?.narrow(0, 1, 2)?], 0)?)?
            .narrow(-1, 0, 3)?
            .lu_factor()?
            .0)
    })
    .without_half(),
    smooth("lu", &[Bounded(&[5, 5])], |x| {
        let (_, l, u) = reverse_rows(&x[0])?.narrow(0, 1, 4)?.lu()?;
        cat(&[&l, &u], -1)
    })
    .without_half(),
    smooth("lu_unpack", &[Bounded(&[2, 4, 4])], |x| {
        let (factors, order) = reverse_rows(&x[0])?.lu_factor()?;
        let (p, l, u) = factors.lu_unpack(&order)?;
        p.matmul(&l)?.add(&u)
    })
    .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
    .without_half(),
    smooth("polar", &[Signed(&[2, 5, 3])], |x| {
        let (u, h) = to_full_rank(&x[0])?.polar()?;
        cat(&[&u, &h], -2)
    })
    .with_flops(|_, _| 2 * 2 * 3 * 3 * (5 + 3))
    .without_half(),
    smooth("svd_lowrank", &[Signed(&[5, 3])], |x| {
        // Full rank, also if the columns are equal: the vectors of a singular value of 0 depend on the random start.
        let scale = Tensor::arange(2.0, 8.0, 2.0, x[0].dtype(), x[0].device())?;
        let x = x[0].add(&Tensor::eye(5, 3, x[0].dtype(), x[0].device())?.mul(&scale)?)?;
        let (u, s, v) = x.svd_lowrank(3, 1)?;
        u.mul(&s.square()?.unsqueeze(-2)?)?.matmul(&v.transpose(-2, -1)?)
    })
    .with_flops(|_, _| 6 * 2 * 5 * 3 * 3)
    .without_half(),
    smooth("pca_lowrank", &[Signed(&[3, 6])], |x| {
        let (_, s, _) = to_full_rank(&x[0])?.pca_lowrank(2, true, 2)?;
        Ok(s)
    })
    .with_flops(|_, _| 6 * 2 * 6 * 3 * 2 + 2 * 6 * 2 * 2)
    .without_half(),
    smooth("lu_solve", &[Bounded(&[4, 4]), Signed(&[2, 4, 3])], |x| {
        let (factors, order) = reverse_rows(&x[0])?.lu_factor()?;
        factors.lu_solve(&order, &x[1], &Default::default())
    })
    .without_half(),
    smooth("lu_solve of transposes", &[Bounded(&[4, 4]), Signed(&[2, 3, 4])], |x| {
        let (factors, order) = reverse_rows(&x[0])?.lu_factor()?;
        factors.lu_solve(&order, &x[1], &LuSolveOptions { left: false, ..Default::default() })
    })
    .without_half(),
    smooth("lstsq", &[Signed(&[5, 3]), Signed(&[5, 2])], |x| {
        let found = x[0].lstsq(&x[1], None)?;
        cat(&[&found.solution, &found.residuals.unsqueeze(0)?], 0)
    })
    .with_flops(|_, _| 2 * 3 * 3 * 5 + 2 * 3 * 5 * 2 + 2 * 5 * 3 * 2)
    .without_half(),
    smooth("matrix_norm", &[Signed(&[2, 3, 4])], |x| x[0].matrix_norm(MatrixNorm::Fro, [-2, -1], false)),
    smooth("matrix_norm of order 1", &[Signed(&[2, 3, 4])], |x| x[0].matrix_norm(1.0, [2, 0], true)),
    smooth("matrix_norm of order -2", &[Signed(&[2, 3, 4])], |x| x[0].matrix_norm(-2.0, [1, 2], false))
        .without_half(),
    smooth("cond", &[Bounded(&[2, 3, 3])], |x| to_well_conditioned(&x[0])?.cond(2.0)).without_half(),
    nonsmooth("cond of order 1", &[Bounded(&[3, 3])], |x| to_well_conditioned(&x[0])?.cond(1.0))
        .without_half(),
    smooth("multi_dot", &[Signed(&[3, 4]), Signed(&[4, 5]), Signed(&[5])], |x| {
        multi_dot(&[&x[0], &x[1], &x[2]])
    })
    .with_flops(|x, _| 2 * (cost::numel(&x[0]) + cost::numel(&x[1])))
    .with_tolerances(super::case::ONE_ROUNDING_NEAR_4),
    smooth("vander", &[Signed(&[2, 4])], |x| x[0].vander(Some(3))),
    smooth("matrix_exp", &[Bounded(&[2, 3, 3])], |x| x[0].matrix_exp())
        .with_flops(|x, _| 2 * 6 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
        .without_half(),
    smooth("cholesky_solve", &[Signed(&[4, 2]), Bounded(&[4, 4])], |x| {
        x[0].cholesky_solve(&to_well_conditioned(&x[1])?.tril(0)?, false)
    })
    .without_half(),
    smooth("cholesky_inverse", &[Bounded(&[4, 4])], |x| {
        to_well_conditioned(&x[0])?.triu(0)?.cholesky_inverse(true)
    })
    .without_half(),
    smooth("logdet", &[Bounded(&[2, 3, 3])], |x| to_well_conditioned(&x[0])?.logdet()).without_half(),
    smooth("vecdot", &[Signed(&[2, 3]), Signed(&[3])], |x| x[0].vecdot(&x[1], -1)),
    smooth("tensorinv", &[Bounded(&[6, 6])], |x| {
        to_well_conditioned(&x[0])?.reshape([2, 3, 6])?.tensorinv(2)
    })
    .without_half(),
    smooth("tensorsolve", &[Bounded(&[6, 6]), Signed(&[2, 3])], |x| {
        to_well_conditioned(&x[0])?.reshape([2, 3, 6])?.tensorsolve(&x[1], ())
    })
    .without_half(),
];

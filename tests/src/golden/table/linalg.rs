//! Matrices: factors, solutions, norms.

use anyhow::{Result, bail};
use forebay::dtype::DType;
use forebay::ops::{MatrixNorm, multi_dot};
use forebay::tensor::Tensor;

use super::{Table, missing, one};
use crate::golden::args::Args;

fn power(a: &Args<'_>) -> Result<i32> {
    Ok(i32::try_from(a.i(1, "n", 1)?)?)
}

/// Whether the half that is read is the upper one.
fn upper(a: &Args<'_>) -> bool {
    a.s(1, "UPLO", "L") == "U"
}

/// A norm by its order.
fn order(a: &Args<'_>, at: usize, name: &str, default: MatrixNorm) -> Result<MatrixNorm> {
    Ok(match a.s(at, name, "") {
        "fro" => MatrixNorm::Fro,
        "nuc" => MatrixNorm::Nuc,
        _ if a.get(at, name).is_none() => default,
        _ => MatrixNorm::Order(a.f(at, name, 2.0)?),
    })
}

/// LAPACK's exchanges of rows, counted from 1, as the order that they lead to.
fn order_of(pivots: &Tensor) -> Result<Tensor> {
    let n = pivots.shape().last().copied().unwrap_or(1);
    let mut order = Vec::new();
    for line in pivots.to_f64s()?.chunks(n.max(1)) {
        let mut rows: Vec<i64> = (0..n as i64).collect();
        for (k, &pivot) in line.iter().enumerate() {
            rows.swap(k, pivot as usize - 1);
        }
        order.extend(rows);
    }
    Ok(Tensor::from_slice(&order, pivots.shape(), pivots.device())?)
}

fn factors(t: &mut Table) {
    t.op("linalg.qr", |a| {
        let (q, r) = a.t(0)?.qr(a.s(1, "mode", "reduced") == "complete")?;
        Ok(vec![q, r])
    });
    // Of vectors the sign is arbitrary.
    t.op("linalg.eigh", |a| {
        let (values, vectors) = a.t(0)?.eigh(upper(a))?;
        Ok(vec![values, vectors.abs()?])
    });
    t.op("linalg.eigvalsh", |a| one(a.t(0)?.eigvalsh(upper(a))));
    t.op("linalg.lu", |a| match a.b(usize::MAX, "pivot", true) {
        true => {
            let (p, l, u) = a.t(0)?.lu()?;
            Ok(vec![p, l, u])
        }
        false => Err(missing("lu without pivots")),
    });
    t.op("linalg.lu_factor", |a| match a.b(usize::MAX, "pivot", true) {
        true => {
            let (both, order) = a.t(0)?.lu_factor()?;
            Ok(vec![both, order])
        }
        false => Err(missing("lu without pivots")),
    });
    t.op("linalg.lu_solve", |a| {
        let (left, adjoint) = (a.b(usize::MAX, "left", true), a.b(usize::MAX, "adjoint", false));
        one(a.t(0)?.lu_solve(&order_of(a.t(1)?)?, a.t(2)?, left, adjoint))
    });
    // A column alone is a matrix here.
    t.op("linalg.lstsq", |a| Ok(vec![a.t(0)?.lstsq(a.t(1)?, None)?.solution]));
    t.op("cholesky_solve", |a| one(a.t(0)?.cholesky_solve(a.t(1)?, a.b(2, "upper", false))));
    t.op("cholesky_inverse", |a| one(a.t(0)?.cholesky_inverse(a.b(1, "upper", false))));
    t.op("linalg.tensorinv", |a| one(a.t(0)?.tensorinv(usize::try_from(a.i(1, "ind", 2)?)?)));
    t.op("linalg.tensorsolve", |a| one(a.t(0)?.tensorsolve(a.t(1)?, &a.dims(2, "dims")?)));
    t.op("matrix_exp", |a| one(a.t(0)?.matrix_exp()));
    t.op("linalg.multi_dot", |a| one(multi_dot(&a.tensors(0)?)));
    t.op("linalg.vander", |a| match a.opt_i(1, "N")? {
        Some(n) => one(a.t(0)?.vander(Some(usize::try_from(n)?))),
        None => one(a.t(0)?.vander(None)),
    });
    t.op("linalg.cond", |a| one(a.t(0)?.cond(order(a, 1, "p", MatrixNorm::Order(2.0))?)));
    t.op("linalg.matrix_norm", |a| {
        let dims = match a.dims(2, "dim")?[..] {
            [] => [-2, -1],
            [row, col] => [row, col],
            ref dims => bail!("{} dimensions", dims.len()),
        };
        let dtype = a.dtype(usize::MAX, "dtype")?.unwrap_or(a.t(0)?.dtype());
        let x = a.t(0)?.to_dtype(if dtype.is_float() { dtype } else { DType::F32 })?;
        one(x.matrix_norm(order(a, 1, "ord", MatrixNorm::Fro)?, dims, a.b(3, "keepdim", false)))
    });
}

pub(super) fn register(t: &mut Table) {
    t.op("linalg.cholesky", |a| match a.b(1, "upper", false) {
        true => one(a.t(0)?.cholesky()?.transpose(-2, -1)),
        false => one(a.t(0)?.cholesky()),
    });
    t.op("linalg.solve_triangular", |a| {
        let (upper, left) = (a.b(usize::MAX, "upper", false), a.b(usize::MAX, "left", true));
        one(a.t(0)?.solve_triangular(a.t(1)?, upper, left, a.b(usize::MAX, "unitriangular", false)))
    });
    t.op("linalg.solve", |a| one(a.t(0)?.solve(a.t(1)?)));
    t.op("linalg.inv", |a| one(a.t(0)?.inv()));
    t.op("linalg.det", |a| one(a.t(0)?.det()));
    t.op("linalg.slogdet", |a| {
        let (sign, size) = a.t(0)?.slogdet()?;
        Ok(vec![sign, size])
    });
    t.op("logdet", |a| one(a.t(0)?.logdet()));
    t.op("linalg.matrix_power", |a| one(a.t(0)?.matrix_power(power(a)?)));
    t.op("linalg.vector_norm", |a| {
        let dims = a.dims(2, "dim")?;
        let (p, keepdim) = (a.f(1, "ord", 2.0)?, a.b(3, "keepdim", false));
        Ok(vec![a.named(a.t_as(0)?.norm(p, &dims, keepdim)?)?])
    });
    t.op("linalg.vecdot", |a| one(a.t(0)?.vecdot(a.t(1)?, a.i(usize::MAX, "dim", -1)? as isize)));
    t.op("linalg.matrix_rank", |a| {
        if a.count() > 1
            || ["tol", "atol", "rtol"].iter().any(|name| a.get(usize::MAX, name).is_some())
            || a.b(usize::MAX, "hermitian", false)
        {
            return Err(missing("matrix_rank with bounds"));
        }
        one(a.t(0)?.matrix_rank(None))
    });
    t.op("linalg.pinv", |a| {
        if a.variant() == "hermitian" {
            return Err(missing("pinv of a triangle"));
        }
        if a.get(usize::MAX, "atol").is_some() || a.opt_t(usize::MAX, "rtol").is_some() {
            return Err(missing("pinv with an absolute bound"));
        }
        let rtol = a.get(usize::MAX, "rtol").is_some().then(|| a.f(usize::MAX, "rtol", 0.0)).transpose()?;
        // The database gives the factors of a singular matrix.
        match a.variant() {
            "singular" => one(a.t(0)?.matmul(&a.t(1)?.transpose(-2, -1)?)?.pinv(rtol)),
            _ => one(a.t(0)?.pinv(rtol)),
        }
    });
    factors(t);
}

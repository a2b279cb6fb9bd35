//! Linear algebra: factorisations, solvers, norms.

use anyhow::{Result, bail};
use forebay::dtype::DType;
use forebay::ops::{LuSolveOptions, MatrixNorm, SolveTriangularOptions, multi_dot};
use forebay::tensor::Tensor;

use super::{OpTable, missing_op, single};
use crate::golden::args::Args;

fn power(a: &Args<'_>) -> Result<i32> {
    Ok(i32::try_from(a.int(1, "n", 1)?)?)
}

/// Reports whether the upper triangle is read.
fn upper(a: &Args<'_>) -> bool {
    a.string(1, "UPLO", "L") == "U"
}

/// Parses the order of a norm.
fn order(a: &Args<'_>, at: usize, name: &str, default: MatrixNorm) -> Result<MatrixNorm> {
    Ok(match a.string(at, name, "") {
        "fro" => MatrixNorm::Fro,
        "nuc" => MatrixNorm::Nuc,
        _ if a.get(at, name).is_none() => default,
        _ => MatrixNorm::Order(a.float(at, name, 2.0)?),
    })
}

/// Converts LAPACK's row exchanges, counted from 1, to a permutation.
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

fn factors(t: &mut OpTable) {
    t.register("linalg.qr", |a| {
        let (q, r) = a.tensor(0)?.qr(a.string(1, "mode", "reduced") == "complete")?;
        Ok(vec![q, r])
    });
    // The sign of eigenvectors is arbitrary.
    t.register("linalg.eigh", |a| {
        let (values, vectors) = a.tensor(0)?.eigh(upper(a))?;
        Ok(vec![values, vectors.abs()?])
    });
    t.register("linalg.eigvalsh", |a| single(a.tensor(0)?.eigvalsh(upper(a))));
    t.register("linalg.lu", |a| match a.flag(usize::MAX, "pivot", true) {
        true => {
            let (p, l, u) = a.tensor(0)?.lu()?;
            Ok(vec![p, l, u])
        }
        false => Err(missing_op("lu without pivots")),
    });
    t.register("linalg.lu_factor", |a| match a.flag(usize::MAX, "pivot", true) {
        true => {
            let (both, order) = a.tensor(0)?.lu_factor()?;
            Ok(vec![both, order])
        }
        false => Err(missing_op("lu without pivots")),
    });
    t.register("linalg.lu_solve", |a| {
        let (left, adjoint) = (a.flag(usize::MAX, "left", true), a.flag(usize::MAX, "adjoint", false));
        single(a.tensor(0)?.lu_solve(
            &order_of(a.tensor(1)?)?,
            a.tensor(2)?,
            &LuSolveOptions { left, adjoint },
        ))
    });
    // The library takes a single column as a matrix.
    t.register("linalg.lstsq", |a| Ok(vec![a.tensor(0)?.lstsq(a.tensor(1)?, None)?.solution]));
    t.register("cholesky_solve", |a| {
        single(a.tensor(0)?.cholesky_solve(a.tensor(1)?, a.flag(2, "upper", false)))
    });
    t.register("cholesky_inverse", |a| single(a.tensor(0)?.cholesky_inverse(a.flag(1, "upper", false))));
    t.register("linalg.tensorinv", |a| single(a.tensor(0)?.tensorinv(usize::try_from(a.int(1, "ind", 2)?)?)));
    t.register("linalg.tensorsolve", |a| single(a.tensor(0)?.tensorsolve(a.tensor(1)?, &a.dims(2, "dims")?)));
    t.register("matrix_exp", |a| single(a.tensor(0)?.matrix_exp()));
    t.register("linalg.multi_dot", |a| single(multi_dot(&a.tensors(0)?)));
    t.register("linalg.vander", |a| match a.opt_int(1, "N")? {
        Some(n) => single(a.tensor(0)?.vander(Some(usize::try_from(n)?))),
        None => single(a.tensor(0)?.vander(None)),
    });
    t.register("linalg.cond", |a| single(a.tensor(0)?.cond(order(a, 1, "p", MatrixNorm::Order(2.0))?)));
    t.register("linalg.matrix_norm", |a| {
        let dims = match a.dims(2, "dim")?[..] {
            [] => [-2, -1],
            [row, col] => [row, col],
            ref dims => bail!("{} dimensions", dims.len()),
        };
        let dtype = a.dtype(usize::MAX, "dtype")?.unwrap_or(a.tensor(0)?.dtype());
        let x = a.tensor(0)?.to_dtype(if dtype.is_float() { dtype } else { DType::F32 })?;
        single(x.matrix_norm(order(a, 1, "ord", MatrixNorm::Fro)?, dims, a.flag(3, "keepdim", false)))
    });
}

pub(super) fn register(t: &mut OpTable) {
    t.register("linalg.cholesky", |a| match a.flag(1, "upper", false) {
        true => single(a.tensor(0)?.cholesky()?.transpose(-2, -1)),
        false => single(a.tensor(0)?.cholesky()),
    });
    t.register("linalg.solve_triangular", |a| {
        let (upper, left) = (a.flag(usize::MAX, "upper", false), a.flag(usize::MAX, "left", true));
        single(a.tensor(0)?.solve_triangular(
            a.tensor(1)?,
            upper,
            &SolveTriangularOptions { left, unitriangular: a.flag(usize::MAX, "unitriangular", false) },
        ))
    });
    t.register("linalg.solve", |a| single(a.tensor(0)?.solve(a.tensor(1)?)));
    t.register("linalg.inv", |a| single(a.tensor(0)?.inv()));
    t.register("linalg.det", |a| single(a.tensor(0)?.det()));
    t.register("linalg.slogdet", |a| {
        let (sign, size) = a.tensor(0)?.slogdet()?;
        Ok(vec![sign, size])
    });
    t.register("logdet", |a| single(a.tensor(0)?.logdet()));
    t.register("linalg.matrix_power", |a| single(a.tensor(0)?.matrix_power(power(a)?)));
    t.register("linalg.vector_norm", |a| {
        let dims = a.dims(2, "dim")?;
        let (p, keepdim) = (a.float(1, "ord", 2.0)?, a.flag(3, "keepdim", false));
        Ok(vec![a.cast_to_dtype_arg(a.tensor_as_dtype_arg(0)?.norm(p, &dims, keepdim)?)?])
    });
    t.register("linalg.vecdot", |a| {
        single(a.tensor(0)?.vecdot(a.tensor(1)?, a.int(usize::MAX, "dim", -1)? as isize))
    });
    t.register("linalg.matrix_rank", |a| {
        if a.num_positional() > 1
            || ["tol", "atol", "rtol"].iter().any(|name| a.get(usize::MAX, name).is_some())
            || a.flag(usize::MAX, "hermitian", false)
        {
            return Err(missing_op("matrix_rank with bounds"));
        }
        single(a.tensor(0)?.matrix_rank(None))
    });
    t.register("linalg.pinv", |a| {
        if a.variant() == "hermitian" {
            return Err(missing_op("pinv of a triangle"));
        }
        if a.get(usize::MAX, "atol").is_some() || a.opt_tensor(usize::MAX, "rtol").is_some() {
            return Err(missing_op("pinv with an absolute bound"));
        }
        let rtol =
            a.get(usize::MAX, "rtol").is_some().then(|| a.float(usize::MAX, "rtol", 0.0)).transpose()?;
        // The database passes factors of a singular matrix.
        match a.variant() {
            "singular" => single(a.tensor(0)?.matmul(&a.tensor(1)?.transpose(-2, -1)?)?.pinv(rtol)),
            _ => single(a.tensor(0)?.pinv(rtol)),
        }
    });
    factors(t);
}

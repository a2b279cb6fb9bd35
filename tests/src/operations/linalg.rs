//! Linear algebra: factorisations, solvers, norms, distances.

use anyhow::bail;

use super::prelude::*;

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

fn power(a: &Args<'_>) -> anyhow::Result<i32> {
    Ok(i32::try_from(a.int(1, "n", 1)?)?)
}

/// Reports whether the upper triangle is read.
fn upper(a: &Args<'_>) -> bool {
    a.string(1, "UPLO", "L") == "U"
}

/// Makes symmetric matrices of lower triangles.
fn lower_symmetric(x: &Tensor) -> Result<Tensor> {
    x.tril(0)?.add(&x.tril(-1)?.transpose(-2, -1)?)
}

/// Returns the value that all elements have.
fn common_value(x: &Tensor) -> anyhow::Result<f64> {
    let values = x.to_f64s()?;
    match values.split_first() {
        Some((first, rest)) if rest.iter().all(|value| value == first) => Ok(*first),
        Some(_) => Err(missing_op("a bound for each matrix")),
        None => Ok(0.0),
    }
}

/// Returns the matrix of a decomposition of low rank. The database passes its two factors.
fn low_rank(a: &Args<'_>) -> anyhow::Result<Tensor> {
    match a.opt_tensor(1, "") {
        Some(factor) => Ok(a.tensor(0)?.matmul(&factor.transpose(-2, -1)?)?),
        None => Ok(a.tensor(0)?.clone()),
    }
}

/// Refuses the square factors of a matrix that is not square, which the library does not compute.
fn check_reduced(x: &Tensor, full: bool) -> anyhow::Result<()> {
    match x.shape() {
        [.., m, n] if full && m != n => Err(missing_op("svd with square factors")),
        _ => Ok(()),
    }
}

/// Parses the order of a norm.
fn norm_order(a: &Args<'_>, at: usize, name: &str, default: MatrixNorm) -> anyhow::Result<MatrixNorm> {
    Ok(match a.string(at, name, "") {
        "fro" => MatrixNorm::Fro,
        "nuc" => MatrixNorm::Nuc,
        _ if a.get(at, name).is_none() => default,
        _ => MatrixNorm::Order(a.float(at, name, 2.0)?),
    })
}

/// Converts LAPACK's row exchanges, counted from 1, to a permutation of `rows`.
fn to_permutation(pivots: &Tensor, rows: usize) -> anyhow::Result<Tensor> {
    let n = pivots.shape().last().copied().unwrap_or(1);
    let mut order = Vec::new();
    for line in pivots.to_f64s()?.chunks(n.max(1)) {
        let mut rows: Vec<i64> = (0..rows as i64).collect();
        for (k, &pivot) in line.iter().enumerate() {
            rows.swap(k, (pivot as usize).saturating_sub(1));
        }
        order.extend(rows);
    }
    let batch = &pivots.shape()[..pivots.rank().saturating_sub(1)];
    Ok(Tensor::from_slice(&order, [batch, &[rows]].concat(), pivots.device())?)
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(cross(t1, int)))
        .case(smooth("cross", &[Signed(&[4, 3, 2]), Positive(&[3, 1])], |x| x[0].cross(&x[1], 1)))
        .golden(|a| {
            let (x, y) = (a.tensor(0)?, a.tensor(1)?);
            // Without `dim`, PyTorch's deprecated rule: the first dimension of extent 3.
            let shape = broadcast_tensors(&[x, y])?[0].shape().to_vec();
            let first = || shape.iter().position(|&n| n == 3).unwrap_or_default() as i64;
            single(x.cross(y, a.opt_int(2, "dim")?.unwrap_or_else(first) as isize))
        });
    ops.add(method!(svdvals()))
        .case(
            smooth("svdvals", &[Signed(&[5, 3])], |x| x[0].svdvals())
                .without_half()
                .with_bench_inputs(&[Signed(&[256, 32, 32])]),
        )
        .golden(unary_call!(svdvals));
    // The sign of singular vectors is arbitrary.
    ops.add(method!(svd()))
        .case(
            smooth("svd", &[Signed(&[5, 3])], |x| {
                let (u, s, vh) = x[0].svd()?;
                cat(&[&u.mul(&s)?.abs()?, &vh.abs()?], 0)
            })
            .without_half(),
        )
        .golden_as("linalg.svd", |a| {
            let (x, full) = (a.tensor(0)?, a.flag(1, "full_matrices", true));
            check_reduced(x, full)?;
            let (u, s, vh) = x.svd()?;
            Ok(vec![u.abs()?, s, vh.abs()?])
        })
        .golden(|a| {
            let (x, some) = (a.tensor(0)?, a.flag(1, "some", true));
            check_reduced(x, !some)?;
            let (u, s, vh) = x.svd()?;
            Ok(vec![u.abs()?, s, vh.transpose(-2, -1)?.abs()?])
        });
    ops.add(method!(pdist(float)))
        .case(smooth("pdist", &[Signed(&[5, 3])], |x| x[0].pdist(2.0)))
        .golden(|a| single(a.tensor(0)?.pdist(a.float(1, "p", 2.0)?)));
    ops.add(method!(cdist(t1, float)))
        .case(nonsmooth("cdist of 0", &[Signed(&[3, 4]), Signed(&[5, 4])], |x| x[0].cdist(&x[1], 0.0)))
        .case(nonsmooth("cdist of 1", &[Signed(&[2, 3, 4]), Positive(&[5, 4])], |x| x[0].cdist(&x[1], 1.0)))
        .case(smooth("cdist of 2", &[Signed(&[2, 3, 4]), Positive(&[2, 5, 4])], |x| x[0].cdist(&x[1], 2.0)))
        .case(nonsmooth("cdist of the largest", &[Signed(&[18, 4]), Positive(&[5, 4])], |x| {
            x[0].cdist(&x[1], f64::INFINITY)
        }))
        .case(nonsmooth("cdist of 1.5", &[Signed(&[3, 40]), Positive(&[17, 40])], |x| x[0].cdist(&x[1], 1.5)))
        .case(smooth("cdist of 3", &[Signed(&[3, 4]), Positive(&[5, 4])], |x| x[0].cdist(&x[1], 3.0)))
        .golden(|a| {
            // The mode chooses between two computations of one result.
            a.string(3, "compute_mode", "");
            single(a.tensor(0)?.cdist(a.tensor(1)?, a.float(2, "p", 2.0)?))
        });
    ops.add(method!(cholesky()))
        .case(
            smooth("cholesky", &[Signed(&[2, 4, 4])], |x| to_positive_definite(&x[0])?.cholesky())
                .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
                .without_half(),
        )
        .golden(|a| match a.flag(1, "upper", false) {
            true => single(a.tensor(0)?.cholesky()?.transpose(-2, -1)),
            false => single(a.tensor(0)?.cholesky()),
        });
    ops.add(method!(solve_triangular(t1, flag, SolveTriangularOptions { left: flag, unitriangular: flag })))
        .case(
            smooth("solve_triangular", &[Bounded(&[2, 4, 4]), Signed(&[4, 3])], |x| {
                to_well_conditioned(&x[0])?.solve_triangular(&x[1], true, &Default::default())
            })
            .without_half(),
        )
        .case(
            smooth("solve_triangular from the right", &[Bounded(&[3, 3]), Signed(&[2, 3])], |x| {
                x[0].solve_triangular(
                    &x[1],
                    false,
                    &SolveTriangularOptions { left: false, unitriangular: true },
                )
            })
            .without_half(),
        )
        .golden(|a| {
            let (upper, left) = (a.flag(NAMED, "upper", false), a.flag(NAMED, "left", true));
            single(a.tensor(0)?.solve_triangular(
                a.tensor(1)?,
                upper,
                &SolveTriangularOptions { left, unitriangular: a.flag(NAMED, "unitriangular", false) },
            ))
        });
    ops.golden_of("solve_triangular", "triangular_solve", |a| {
        let (b, x) = (a.tensor(0)?, a.tensor(1)?);
        let matrix = if a.flag(3, "transpose", false) { x.transpose(-2, -1)? } else { x.clone() };
        // The triangle changes sides with the transpose.
        let upper = a.flag(2, "upper", true) != a.flag(3, "transpose", false);
        let unitriangular = a.flag(4, "unitriangular", false);
        let solved =
            matrix.solve_triangular(b, upper, &SolveTriangularOptions { left: true, unitriangular })?;
        Ok(vec![solved, x.copy()?])
    });
    ops.add(method!(solve(t1)))
        .case(
            smooth("solve", &[Bounded(&[2, 4, 4]), Signed(&[4, 3])], |x| {
                to_well_conditioned(&x[0])?.solve(&x[1])
            })
            .without_half(),
        )
        .case(
            smooth("solve of a vector", &[Bounded(&[4, 4]), Signed(&[4])], |x| {
                to_well_conditioned(&x[0])?.solve(&x[1])
            })
            .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.solve(a.tensor(1)?)));
    ops.add(method!(inv()))
        .case(smooth("inv", &[Bounded(&[2, 4, 4])], |x| to_well_conditioned(&x[0])?.inv()).without_half())
        .golden(|a| single(a.tensor(0)?.inv()));
    ops.add(method!(det()))
        .case(smooth("det", &[Bounded(&[2, 3, 3])], |x| to_well_conditioned(&x[0])?.det()).without_half())
        .golden(|a| single(a.tensor(0)?.det()));
    ops.add(method!(slogdet()))
        .case(
            smooth("slogdet", &[Bounded(&[3, 3])], |x| Ok(to_well_conditioned(&x[0])?.slogdet()?.1))
                .without_half(),
        )
        .golden(|a| {
            let (sign, size) = a.tensor(0)?.slogdet()?;
            Ok(vec![sign, size])
        });
    ops.add(method!(matrix_power(int32)))
        .case(
            smooth("matrix_power", &[Bounded(&[3, 3])], |x| to_well_conditioned(&x[0])?.matrix_power(-3))
                .with_flops(|x, _| 4 * cost::numel(&x[0]) * cost::extent(&x[0], 1))
                .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.matrix_power(power(a)?)));
    ops.add(method!(pinv(maybe_float)))
        .case(
            smooth("pinv", &[Signed(&[5, 3])], |x| x[0].pinv(None))
                .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1))
                .without_half(),
        )
        .golden(|a| {
            if a.has(NAMED, "atol") {
                return Err(missing_op("pinv with an absolute bound"));
            }
            let rtol = match a.opt_tensor(NAMED, "rtol") {
                Some(rtol) => Some(common_value(rtol)?),
                None => a.opt_float(NAMED, "rtol")?,
            };
            let x = a.tensor(0)?;
            let x = match a.variant() {
                // The database passes factors of a singular matrix.
                "singular" => x.matmul(&a.tensor(1)?.transpose(-2, -1)?)?,
                // Only the values are those of the lower triangle. PyTorch's gradient is that of any matrix.
                _ if a.flag(NAMED, "hermitian", false) => x.add(&lower_symmetric(x)?.sub(x)?.detach())?,
                _ => x.clone(),
            };
            single(x.pinv(rtol))
        })
        .golden_as("pinverse", |a| single(a.tensor(0)?.pinv(Some(a.float(1, "rcond", 1e-15)?))));
    ops.add(method!(matrix_rank(maybe_float)))
        .case(nondifferentiable("matrix_rank", &[Signed(&[5, 3])], |x| x[0].matrix_rank(None)).without_half())
        .golden(|a| {
            let x = a.tensor(0)?;
            let x = if a.flag(NAMED, "hermitian", false) { lower_symmetric(x)? } else { x.clone() };
            if !["atol", "rtol"].iter().any(|name| a.has(NAMED, name)) {
                return single(x.matrix_rank(None));
            }
            // The rank of singular values above both bounds.
            let values = x.svdvals()?;
            let zero = Scalar::Float(0.0);
            let bound = |name, scale: &Tensor| -> anyhow::Result<Tensor> {
                let bound = a.operand(NAMED, name, zero)?;
                let bound = Tensor::zeros((), values.dtype(), a.device())?.add(bound)?;
                Ok(bound.unsqueeze(-1)?.mul(scale)?)
            };
            let largest = values.amax(-1, true)?;
            let bound = bound("rtol", &largest)?.maximum(&bound("atol", &largest.ones_like()?)?)?;
            single(values.gt(&bound)?.sum(-1, false))
        });
    ops.add(method!(qr(flag)))
        .case(
            smooth("qr", &[Signed(&[2, 5, 3])], |x| {
                let (q, r) = x[0].qr(false)?;
                cat(&[&q, &r], -2)
            })
            .without_half(),
        )
        .case(
            nonsmooth("qr of wide matrices", &[Signed(&[3, 5])], |x| {
                let (q, r) = x[0].qr(true)?;
                cat(&[&q, &r], -1)
            })
            .with_flops(|x, _| if x[0].requires_grad() { 2 * 3 * 3 * 2 } else { 0 })
            .without_half(),
        )
        .case(
            nondifferentiable("qr of complete factors", &[Signed(&[5, 3])], |x| {
                let (q, r) = x[0].qr(true)?;
                cat(&[&q, &r], -1)
            })
            .without_half(),
        )
        .golden_as("linalg.qr", |a| {
            let complete = match a.string(1, "mode", "reduced") {
                "reduced" => false,
                "complete" => true,
                other => return Err(missing_op(&format!("qr in mode {other}"))),
            };
            let (q, r) = a.tensor(0)?.qr(complete)?;
            Ok(vec![q, r])
        })
        .golden_as("qr", |a| pair(a.tensor(0)?.qr(!a.flag(1, "some", true))?));
    // The sign of eigenvectors is arbitrary.
    ops.add(method!(eigh(flag)))
        .case(
            smooth("eigh", &[Signed(&[2, 4, 4])], |x| {
                let (values, vectors) = symmetrize(&x[0])?.eigh(false)?;
                cat(&[&values.unsqueeze(-2)?, &vectors.square()?], -2)
            })
            .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
            .without_half(),
        )
        .golden(|a| {
            let (values, vectors) = a.tensor(0)?.eigh(upper(a))?;
            Ok(vec![values, vectors.abs()?])
        });
    ops.add(method!(eigvalsh(flag)))
        .case(
            smooth("eigvalsh", &[Signed(&[2, 4, 4])], |x| symmetrize(&x[0])?.eigvalsh(true))
                .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
                .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.eigvalsh(upper(a))));
    ops.add(method!(lu_factor()))
        .case(
            smooth("lu_factor", &[Bounded(&[2, 4, 4])], |x| Ok(reverse_rows(&x[0])?.lu_factor()?.0))
                .without_half(),
        )
        .case(
            smooth("lu_factor of tall matrices", &[Bounded(&[3, 5])], |x| {
                Ok(reverse_rows(&cat(&[&x[0], &x[0].mul(0.5)?.narrow(0, 1, 2)?], 0)?)?
                    .narrow(-1, 0, 3)?
                    .lu_factor()?
                    .0)
            })
            .without_half(),
        )
        .golden(|a| match a.flag(NAMED, "pivot", true) {
            true => pair(a.tensor(0)?.lu_factor()?),
            false => Err(missing_op("lu without pivots")),
        })
        .golden_as("lu", |a| {
            let (x, pivot, with_infos) =
                (a.tensor(0)?, a.flag(1, "pivot", true), a.flag(2, "get_infos", false));
            if !pivot {
                return Err(missing_op("lu without pivots"));
            }
            let mut found = pair(x.lu_factor()?)?;
            let batch = &x.shape()[..x.rank().saturating_sub(2)];
            let infos = || Tensor::zeros(batch, DType::I32, a.device());
            found.extend(with_infos.then(infos).transpose()?);
            Ok(found)
        });
    ops.add(method!(lu()))
        .case(
            smooth("lu", &[Bounded(&[5, 5])], |x| {
                let (_, l, u) = reverse_rows(&x[0])?.narrow(0, 1, 4)?.lu()?;
                cat(&[&l, &u], -1)
            })
            .without_half(),
        )
        .golden_as("linalg.lu", |a| match a.flag(NAMED, "pivot", true) {
            true => {
                let (p, l, u) = a.tensor(0)?.lu()?;
                Ok(vec![p, l, u])
            }
            false => Err(missing_op("lu without pivots")),
        });
    ops.add(method!(lu_unpack(t1)))
        .case(
            smooth("lu_unpack", &[Bounded(&[2, 4, 4])], |x| {
                let (factors, order) = reverse_rows(&x[0])?.lu_factor()?;
                let (p, l, u) = factors.lu_unpack(&order)?;
                p.matmul(&l)?.add(&u)
            })
            .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
            .without_half(),
        )
        .golden(|a| {
            let (x, pivots) = (a.tensor(0)?, a.tensor(1)?);
            if !(a.flag(2, "unpack_data", true) && a.flag(3, "unpack_pivots", true)) {
                return Err(missing_op("lu_unpack of one part"));
            }
            let rows = x.shape().iter().rev().nth(1).copied().unwrap_or_default();
            let (p, l, u) = x.lu_unpack(&to_permutation(pivots, rows)?)?;
            Ok(vec![p, l, u])
        });
    ops.add(method!(polar()))
        .case(
            smooth("polar", &[Signed(&[2, 5, 3])], |x| {
                let (u, h) = to_full_rank(&x[0])?.polar()?;
                cat(&[&u, &h], -2)
            })
            .with_flops(|_, _| 2 * 2 * 3 * 3 * (5 + 3))
            .without_half(),
        )
        .golden_as("linalg.polar", |a| pair(a.tensor(0)?.polar()?));
    ops.add(method!(svd_lowrank(count, count)))
        .case(
            smooth("svd_lowrank", &[Signed(&[5, 3])], |x| {
                // Full rank, also if the columns are equal: vectors of a singular value of 0 depend on the start.
                let scale = Tensor::arange(2.0, 8.0, 2.0, x[0].dtype(), x[0].device())?;
                let x = x[0].add(&Tensor::eye(5, 3, x[0].dtype(), x[0].device())?.mul(&scale)?)?;
                let (u, s, v) = x.svd_lowrank(3, 1)?;
                u.mul(&s.square()?.unsqueeze(-2)?)?.matmul(&v.transpose(-2, -1)?)
            })
            .with_flops(|_, _| 6 * 2 * 5 * 3 * 3)
            .without_half(),
        )
        .golden(|a| {
            let (x, q) = (low_rank(a)?, a.count(NAMED, "q", 6)?);
            let x = match a.opt_tensor(NAMED, "M") {
                Some(mean) => x.sub(mean)?,
                None => x,
            };
            let (u, s, v) = x.svd_lowrank(q, a.count(NAMED, "niter", 2)?)?;
            Ok(vec![u.abs()?, s, v.abs()?])
        });
    ops.add(method!(pca_lowrank(count, flag, count)))
        .case(
            smooth("pca_lowrank", &[Signed(&[3, 6])], |x| {
                let (_, s, _) = to_full_rank(&x[0])?.pca_lowrank(2, true, 2)?;
                Ok(s)
            })
            .with_flops(|_, _| 6 * 2 * 6 * 3 * 2 + 2 * 6 * 2 * 2)
            .without_half(),
        )
        .golden(|a| {
            let (x, q) = (low_rank(a)?, a.opt_int(NAMED, "q")?.map(usize::try_from).transpose()?);
            let q = q.unwrap_or_else(|| x.shape().iter().rev().take(2).copied().min().unwrap_or(0).min(6));
            let (u, s, v) = x.pca_lowrank(q, a.flag(NAMED, "center", true), a.count(NAMED, "niter", 2)?)?;
            Ok(vec![u.abs()?, s, v.abs()?])
        });
    ops.add(method!(lu_solve(t1, t2, LuSolveOptions { left: flag, adjoint: flag })))
        .case(
            smooth("lu_solve", &[Bounded(&[4, 4]), Signed(&[2, 4, 3])], |x| {
                let (factors, order) = reverse_rows(&x[0])?.lu_factor()?;
                factors.lu_solve(&order, &x[1], &Default::default())
            })
            .without_half(),
        )
        .case(
            smooth("lu_solve of transposes", &[Bounded(&[4, 4]), Signed(&[2, 3, 4])], |x| {
                let (factors, order) = reverse_rows(&x[0])?.lu_factor()?;
                factors.lu_solve(&order, &x[1], &LuSolveOptions { left: false, ..Default::default() })
            })
            .without_half(),
        )
        .golden_as("linalg.lu_solve", |a| {
            let (left, adjoint) = (a.flag(NAMED, "left", true), a.flag(NAMED, "adjoint", false));
            let (factors, order) = (a.tensor(0)?, to_permutation(a.tensor(1)?, a.tensor(0)?.dim(-1)?)?);
            single(factors.lu_solve(&order, a.tensor(2)?, &LuSolveOptions { left, adjoint }))
        })
        .golden(|a| {
            let (factors, order) = (a.tensor(1)?, to_permutation(a.tensor(2)?, a.tensor(1)?.dim(-1)?)?);
            single(factors.lu_solve(&order, a.tensor(0)?, &Default::default()))
        });
    // The library takes a single column as a matrix.
    ops.add(method!(lstsq(t1, maybe_float)))
        .case(
            smooth("lstsq", &[Signed(&[5, 3]), Signed(&[5, 2])], |x| {
                let found = x[0].lstsq(&x[1], None)?;
                cat(&[&found.solution, &found.residuals.unsqueeze(0)?], 0)
            })
            .with_flops(|_, _| 2 * 3 * 3 * 5 + 2 * 3 * 5 * 2 + 2 * 5 * 3 * 2)
            .without_half(),
        )
        .golden(|a| Ok(vec![a.tensor(0)?.lstsq(a.tensor(1)?, None)?.solution]));
    ops.add(method!(matrix_norm(matrix_norm, int2, flag)))
        .case(smooth("matrix_norm", &[Signed(&[2, 3, 4])], |x| {
            x[0].matrix_norm(MatrixNorm::Fro, [-2, -1], false)
        }))
        .case(smooth("matrix_norm of order 1", &[Signed(&[2, 3, 4])], |x| {
            x[0].matrix_norm(1.0, [2, 0], true)
        }))
        .case(
            smooth("matrix_norm of order -2", &[Signed(&[2, 3, 4])], |x| {
                x[0].matrix_norm(-2.0, [1, 2], false)
            })
            .without_half(),
        )
        .golden(|a| {
            let dims = match a.dims(2, "dim")?[..] {
                [] => [-2, -1],
                [row, col] => [row, col],
                ref dims => bail!("{} dimensions", dims.len()),
            };
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(a.tensor(0)?.dtype());
            let x = a.tensor(0)?.to_dtype(if dtype.is_float() { dtype } else { DType::F32 })?;
            single(x.matrix_norm(
                norm_order(a, 1, "ord", MatrixNorm::Fro)?,
                dims,
                a.flag(3, "keepdim", false),
            ))
        });
    ops.golden_of("matrix_norm", "linalg.norm", |a| {
        let x = a.tensor_as_dtype_arg(0)?;
        let (dims, keepdim) = (a.dims(2, "dim")?, a.flag(3, "keepdim", false));
        let is_matrix = dims.len() == 2 || (dims.is_empty() && x.rank() == 2);
        match a.has(1, "ord") {
            // Without an order, the norm is that of all elements.
            false => single(x.norm(2.0, &dims, keepdim)),
            true if is_matrix => {
                let &[row, column] = (if dims.is_empty() { &[0, 1][..] } else { &dims }) else {
                    bail!("{} dimensions", dims.len())
                };
                single(x.matrix_norm(norm_order(a, 1, "ord", MatrixNorm::Fro)?, [row, column], keepdim))
            }
            true => single(x.norm(a.float(1, "ord", 2.0)?, &dims, keepdim)),
        }
    });
    ops.add(method!(cond(matrix_norm)))
        .case(
            smooth("cond", &[Bounded(&[2, 3, 3])], |x| to_well_conditioned(&x[0])?.cond(2.0)).without_half(),
        )
        .case(
            nonsmooth("cond of order 1", &[Bounded(&[3, 3])], |x| to_well_conditioned(&x[0])?.cond(1.0))
                .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.cond(norm_order(a, 1, "p", MatrixNorm::Order(2.0))?)));
    ops.add(function!(multi_dot(tensors)))
        .case(
            smooth("multi_dot", &[Signed(&[3, 4]), Signed(&[4, 5]), Signed(&[5])], |x| {
                multi_dot(&[&x[0], &x[1], &x[2]])
            })
            .with_flops(|x, _| 2 * (cost::numel(&x[0]) + cost::numel(&x[1])))
            .with_tolerances(case::ONE_ROUNDING_NEAR_4),
        )
        .golden(|a| single(multi_dot(&a.tensors(0)?)));
    ops.add(method!(vander(maybe_count)))
        .case(smooth("vander", &[Signed(&[2, 4])], |x| x[0].vander(Some(3))))
        .golden(|a| match a.opt_int(1, "N")? {
            Some(n) => single(a.tensor(0)?.vander(Some(usize::try_from(n)?))),
            None => single(a.tensor(0)?.vander(None)),
        });
    ops.add(method!(matrix_exp()))
        .case(
            smooth("matrix_exp", &[Bounded(&[2, 3, 3])], |x| x[0].matrix_exp())
                .with_flops(|x, _| 2 * 6 * cost::numel(&x[0]) * cost::extent(&x[0], 2))
                .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.matrix_exp()));
    ops.add(method!(cholesky_solve(t1, flag)))
        .case(
            smooth("cholesky_solve", &[Signed(&[4, 2]), Bounded(&[4, 4])], |x| {
                x[0].cholesky_solve(&to_well_conditioned(&x[1])?.tril(0)?, false)
            })
            .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.cholesky_solve(a.tensor(1)?, a.flag(2, "upper", false))));
    ops.add(method!(cholesky_inverse(flag)))
        .case(
            smooth("cholesky_inverse", &[Bounded(&[4, 4])], |x| {
                to_well_conditioned(&x[0])?.triu(0)?.cholesky_inverse(true)
            })
            .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.cholesky_inverse(a.flag(1, "upper", false))));
    ops.add(method!(logdet()))
        .case(
            smooth("logdet", &[Bounded(&[2, 3, 3])], |x| to_well_conditioned(&x[0])?.logdet()).without_half(),
        )
        .golden(|a| single(a.tensor(0)?.logdet()));
    ops.add(method!(vecdot(t1, int)))
        .case(smooth("vecdot", &[Signed(&[2, 3]), Signed(&[3])], |x| x[0].vecdot(&x[1], -1)))
        .golden(|a| single(a.tensor(0)?.vecdot(a.tensor(1)?, a.dim(NAMED, "dim", -1)?)));
    ops.add(method!(tensorinv(count)))
        .case(
            smooth("tensorinv", &[Bounded(&[6, 6])], |x| {
                to_well_conditioned(&x[0])?.reshape([2, 3, 6])?.tensorinv(2)
            })
            .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.tensorinv(usize::try_from(a.int(1, "ind", 2)?)?)));
    ops.add(method!(tensorsolve(t1, ints)))
        .case(
            smooth("tensorsolve", &[Bounded(&[6, 6]), Signed(&[2, 3])], |x| {
                to_well_conditioned(&x[0])?.reshape([2, 3, 6])?.tensorsolve(&x[1], ())
            })
            .without_half(),
        )
        .golden(|a| single(a.tensor(0)?.tensorsolve(a.tensor(1)?, &a.dims(2, "dims")?)));
}

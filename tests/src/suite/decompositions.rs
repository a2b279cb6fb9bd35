//! QR, eigenvectors and least squares: products of their factors, for all shapes and for ill-conditioned matrices.
//! Special functions are compared with values of 50 digits (`tests/data/special.json`).

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::ops::{MatrixNorm, multi_dot};
use forebay::tensor::Tensor;

super::tests![
    orthogonal_factors_of_every_shape,
    eigenvectors_of_every_extent,
    triangles_of_every_shape,
    hard_matrices,
    least_squares_of_any_rank,
    exponentials_of_all_sizes,
    special_functions_are_accurate_for_large_arguments,
    invalid_matrices_are_refused,
];

fn types(device: &Device) -> impl Iterator<Item = (DType, f64)> + use<> {
    let wide = device.supports_dtype(DType::F64);
    [(DType::F32, 2e-6), (DType::F64, 1e-14)].into_iter().filter(move |t| t.0 == DType::F32 || wide)
}

fn largest(t: &Tensor) -> Result<f64> {
    let values = t.detach().to_f64s()?;
    ensure!(values.iter().all(|v| v.is_finite()), "not all are finite");
    Ok(values.iter().fold(0.0, |max_abs, v| v.abs().max(max_abs)))
}

fn ensure_near(what: &str, got: &Tensor, expected: &Tensor, within: f64) -> Result<()> {
    ensure!(got.shape() == expected.shape(), "{what}: {:?}, not {:?}", got.shape(), expected.shape());
    let off = largest(&got.sub(expected)?).with_context(|| what.to_owned())?;
    ensure!(off <= within, "{what}: off by {off:e}, more than {within:e}");
    Ok(())
}

fn orthonormal(what: &str, q: &Tensor, within: f64) -> Result<()> {
    let n = q.dim(-1)?;
    let eye = Tensor::eye(n, n, q.dtype(), q.device())?.broadcast_to([q.shape()[0], n, n])?;
    ensure_near(what, &q.transpose(-2, -1)?.matmul(q)?, &eye, within)
}

fn orthogonal_factors_of_every_shape(device: &Device) -> Result<()> {
    for (dtype, unit) in types(device) {
        for (m, n) in [(1, 1), (2, 2), (5, 3), (3, 5), (33, 33), (70, 9), (9, 70), (300, 35), (35, 300)] {
            let x = Tensor::randn([2, m, n], dtype, device)?;
            let within = unit * 4.0 * (m.max(n) as f64).sqrt();
            for complete in [false, true] {
                let name = format!("{dtype} [{m}, {n}], complete {complete}");
                let (q, r) = x.qr(complete)?;
                ensure_near(&name, &q.matmul(&r)?, &x, within * 2.0)?;
                orthonormal(&name, &q, within)?;
                ensure_near(&name, &r.triu(0)?, &r, 0.0)?;
            }
            // Wide matrices take another path when recorded.
            let (q, r) = x.to_leaf()?.qr(false)?;
            ensure_near(&format!("{dtype} [{m}, {n}], recorded"), &q.matmul(&r)?, &x, within * 2.0)?;
        }
    }
    Ok(())
}

fn eigenvectors_of_every_extent(device: &Device) -> Result<()> {
    for (dtype, unit) in types(device) {
        for n in [1, 2, 5, 33, 64, 67, 130] {
            let x = Tensor::randn([2, n, n], dtype, device)?;
            let x = x.add(&x.transpose(1, 2)?)?;
            let (values, v) = x.eigh(false)?;
            let name = format!("{dtype} of {n}");
            let within = unit * 6.0 * n as f64;
            orthonormal(&name, &v, within)?;
            ensure_near(
                &name,
                &v.mul(&values.unsqueeze(1)?)?.matmul(&v.transpose(1, 2)?)?,
                &x,
                within * 2.0,
            )?;
            ensure_near(&name, &values.sort(1, false)?.0, &values, 0.0)?;
            // Larger matrices take most of the time, and read triangles as these do.
            if n > 64 {
                continue;
            }
            // The other triangle is not read.
            let lower = x
                .tril(0)?
                .add(&Tensor::full((), f64::NAN, dtype, device)?.broadcast_to(x.shape())?.triu(1)?)?;
            ensure_near(&name, &lower.eigvalsh(false)?, &values, 0.0)?;
            ensure_near(&name, &x.triu(0)?.eigvalsh(true)?, &values, within)?;
        }
    }
    Ok(())
}

fn triangles_of_every_shape(device: &Device) -> Result<()> {
    for (dtype, unit) in types(device) {
        for (m, n) in [(1, 1), (5, 3), (3, 5), (33, 33), (300, 7), (7, 300)] {
            let x = Tensor::randn([2, m, n], dtype, device)?;
            let name = format!("{dtype} [{m}, {n}]");
            for x in [x.clone(), x.to_leaf()?] {
                let (p, l, u) = x.lu()?;
                ensure_near(&name, &p.matmul(&l)?.matmul(&u)?, &x, unit * 20.0 * (m.max(n) as f64).sqrt())?;
                ensure!(largest(&l)? <= 1.0, "{name}: a pivot was not the largest");
            }
        }
    }
    Ok(())
}

fn hard_matrices(device: &Device) -> Result<()> {
    for (dtype, unit) in types(device) {
        let eye = Tensor::eye(6, 6, dtype, device)?.unsqueeze(0)?;
        let ones = Tensor::ones([1, 6, 6], dtype, device)?;
        for (name, x) in [
            ("zeros", eye.zeros_like()?),
            ("ones", ones.clone()),
            ("negated ones", ones.neg()?),
            ("the identity", eye.clone()),
            ("the negated identity", eye.neg()?),
            ("eigenvalues 1 and -1", eye.flip([2])?),
        ] {
            let (q, r) = x.qr(false)?;
            ensure_near(name, &q.matmul(&r)?, &x, unit * 10.0)?;
            orthonormal(name, &q, unit * 10.0)?;
            let (values, v) = x.eigh(false)?;
            orthonormal(name, &v, unit * 20.0)?;
            ensure_near(name, &v.mul(&values.unsqueeze(1)?)?.matmul(&v.transpose(1, 2)?)?, &x, unit * 40.0)?;
        }
        // Squares of these values overflow, or vanish.
        let x = Tensor::randn([1, 7, 4], dtype, device)?;
        for scale in [1e-30, 1e30] {
            let (q, r) = x.mul(scale)?.qr(false)?;
            orthonormal("scaled", &q, unit * 10.0)?;
            ensure_near("scaled", &q.matmul(&r.div(scale)?)?, &x, unit * 20.0)?;
            let s = x.transpose(1, 2)?.matmul(&x)?;
            let values = s.mul(scale)?.eigvalsh(false)?.div(scale)?;
            ensure_near("scaled", &values, &s.eigvalsh(false)?, unit * 40.0)?;
        }
        // NaN spreads to every factor that depends on it.
        let x = Tensor::full([1, 3, 3], f64::NAN, dtype, device)?;
        let (q, r) = x.qr(false)?;
        let (values, _) = x.eigh(false)?;
        for t in [q, r.triu(0)?.select(1, 0)?, values, x.matrix_exp()?, x.cond(2.0)?] {
            ensure!(t.to_f64s()?.iter().any(|v| v.is_nan()), "NaN was lost: {t:?}");
        }
    }
    Ok(())
}

fn least_squares_of_any_rank(device: &Device) -> Result<()> {
    for (dtype, unit) in types(device) {
        let b = Tensor::randn([2, 9, 3], dtype, device)?;
        for (m, n, rank) in [(9, 4, 4), (9, 4, 2), (9, 20, 9), (9, 9, 9)] {
            let a = Tensor::randn([2, m, rank], dtype, device)?.matmul(&Tensor::randn(
                [2, rank, n],
                dtype,
                device,
            )?)?;
            let found = a.lstsq(&b, Some(1e-4))?;
            let name = format!("{dtype} [{m}, {n}] of rank {rank}");
            ensure!(found.rank.to_f64s()? == [rank as f64; 2], "{name}: {:?}", found.rank.to_f64s()?);
            // The residual is orthogonal to all columns.
            let left = a.matmul(&found.solution)?.sub(&b)?;
            let along = a.transpose(1, 2)?.matmul(&left)?;
            ensure_near(&name, &along, &along.zeros_like()?, unit * 4000.0)?;
            ensure_near(&name, &found.residuals, &left.square()?.sum([1], false)?, unit * 100.0)?;
        }
    }
    Ok(())
}

fn exponentials_of_all_sizes(device: &Device) -> Result<()> {
    for (dtype, unit) in types(device) {
        // Matrices of different norms in one batch: each needs its own number of squarings.
        let rotation = Tensor::from_slice(&[0.0f32, -1.0, 1.0, 0.0], [1, 2, 2], device)?.to_dtype(dtype)?;
        let angles = [0.0f64, 1e-6, 0.3, 2.0, 40.0];
        let scale = Tensor::from_slice(&angles.map(|v| v as f32), [5, 1, 1], device)?.to_dtype(dtype)?;
        let exact = scale.reshape([5])?.to_f64s()?;
        let got = rotation.mul(&scale)?.matrix_exp()?.to_f64s()?;
        for (k, angle) in exact.into_iter().enumerate() {
            let expected = [angle.cos(), -angle.sin(), angle.sin(), angle.cos()];
            for (got, expected) in got[k * 4..][..4].iter().zip(expected) {
                ensure!(
                    (got - expected).abs() <= unit * 10.0 * (1.0 + angle),
                    "{dtype}, {angle}: {got}, not {expected}"
                );
            }
        }
    }
    Ok(())
}

type SpecialFn = fn(&Tensor) -> CoreResult<Tensor>;

/// Functions by their names in the script `tests/data/special.py`.
const FUNCTIONS: &[(&str, SpecialFn)] = &[
    ("i0", Tensor::i0),
    ("i1", Tensor::i1),
    ("i0e", Tensor::i0e),
    ("i1e", Tensor::i1e),
    ("erfcx", Tensor::erfcx),
    ("log_ndtr", Tensor::log_ndtr),
    ("ndtri", Tensor::ndtri),
    ("zeta of 2.5", |q| Tensor::full((), 2.5, q.dtype(), q.device())?.zeta(q)),
    ("zeta of 1.0625", |q| Tensor::full((), 1.0625, q.dtype(), q.device())?.zeta(q)),
    ("zeta of 30", |q| Tensor::full((), 30.0, q.dtype(), q.device())?.zeta(q)),
];

fn special_functions_are_accurate_for_large_arguments(device: &Device) -> Result<()> {
    let table: BTreeMap<String, Vec<[f64; 2]>> =
        serde_json::from_str(include_str!("../../data/special.json"))?;
    let mut wrong = Vec::new();
    for (dtype, _) in types(device) {
        for (name, function) in FUNCTIONS {
            let rows = table.get(*name).with_context(|| format!("no values of {name}"))?;
            let x: Vec<f64> = rows.iter().map(|row| row[0]).collect();
            let x =
                Tensor::from_slice(&x.iter().map(|&v| v as f32).collect::<Vec<f32>>(), [x.len()], device)?;
            let got = function(&x.to_dtype(dtype)?)?.to_f64s()?;
            // Powers of e and of q inherit the rounding error of their exponents, which grows with the arguments.
            let within = if dtype == DType::F64 { 4e-13 } else { 1.5e-6 };
            let error = |(got, row): (&f64, &[f64; 2])| ((got - row[1]) / row[1].abs().max(1e-30)).abs();
            let worst = got.iter().zip(rows).map(|pair| (error(pair), pair));
            let worst = worst.max_by(|a, b| a.0.total_cmp(&b.0)).context("no values")?;
            if worst.0.is_nan() || worst.0 > within {
                wrong.push(format!(
                    "{dtype} {name}({:e}) is {:e}, not {:e}: off by {:e}",
                    worst.1.1[0], worst.1.0, worst.1.1[1], worst.0
                ));
            }
        }
        let ends = Tensor::from_slice(&[0.0f32, 1.0, -0.5, f32::NAN], [4], device)?.to_dtype(dtype)?;
        let got = ends.ndtri()?.to_f64s()?;
        ensure!(
            got[0] == f64::NEG_INFINITY && got[1] == f64::INFINITY && got[2].is_nan() && got[3].is_nan(),
            "{got:?}"
        );
        let far = Tensor::from_slice(&[f32::INFINITY, f32::NEG_INFINITY], [2], device)?.to_dtype(dtype)?;
        ensure!(far.i0e()?.to_f64s()? == [0.0, 0.0] && far.erfcx()?.to_f64s()? == [0.0, f64::INFINITY]);
        ensure!(far.log_ndtr()?.to_f64s()? == [0.0, f64::NEG_INFINITY]);
        // Poles and undefined arguments.
        let q = Tensor::from_slice(&[-2.0f32, -2.5, 1.0, 0.5], [4], device)?.to_dtype(dtype)?;
        let s = Tensor::from_slice(&[3.0f32, 2.5, 1.0, 0.5], [4], device)?.to_dtype(dtype)?;
        let got = s.zeta(&q)?.to_f64s()?;
        ensure!(
            got[0] == f64::INFINITY && got[1].is_nan() && got[2] == f64::INFINITY && got[3].is_nan(),
            "{got:?}"
        );
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

fn invalid_matrices_are_refused(device: &Device) -> Result<()> {
    let square = Tensor::ones([3, 3], DType::F32, device)?;
    let tall = Tensor::ones([4, 3], DType::F32, device)?;
    let line = Tensor::ones([3], DType::F32, device)?;
    let half = square.to_dtype(DType::BF16)?;
    let whole = square.to_dtype(DType::I32)?;
    let refused = |what: &str, expected: &str, result: CoreResult<()>| -> Result<()> {
        let error = result.err().with_context(|| format!("{what}: it was accepted"))?.to_string();
        ensure!(error.contains(expected), "{what}: {error}");
        Ok(())
    };
    refused(
        "qr of bf16",
        "qr: does not take bf16; takes f32 and f64; cast with `to_dtype`",
        half.qr(false).map(drop),
    )?;
    refused("qr of a line", "takes matrices", line.qr(false).map(drop))?;
    refused("a gradient of what completes", "qr: has no gradient", tall.to_leaf()?.qr(true).map(drop))?;
    refused("eigh", "takes square matrices", tall.eigh(false).map(drop))?;
    refused(
        "lu_solve",
        "takes the order that `lu_factor` gave",
        square.lu_solve(&square, &tall, &Default::default()).map(drop),
    )?;
    refused("lstsq", "a row for each of the matrix", tall.lstsq(&square, None).map(drop))?;
    refused("cond", "takes square matrices", tall.cond(1.0).map(drop))?;
    refused(
        "matrix_norm",
        "takes an order of 1, 2 or infinity",
        square.matrix_norm(3.0, [0, 1], false).map(drop),
    )?;
    refused(
        "matrix_norm",
        "two different dimensions",
        square.matrix_norm(MatrixNorm::Fro, [0, -2], false).map(drop),
    )?;
    refused("matrix_norm", "cast with `to_dtype`", whole.matrix_norm(1.0, [0, 1], false).map(drop))?;
    refused("multi_dot", "at least two tensors", multi_dot(&[&square]).map(drop))?;
    refused("multi_dot", "as many columns as the next one rows", multi_dot(&[&square, &tall]).map(drop))?;
    refused("multi_dot", "vectors at both ends only", multi_dot(&[&square, &line, &square]).map(drop))?;
    refused("tensorinv", "from 1 to 2", square.tensorinv(3).map(drop))?;
    refused("mvlgamma", "at least 1", line.mvlgamma(0).map(drop))?;
    refused("gcd", "takes integers", line.gcd(&line).map(drop))?;
    refused("shift", "takes integers", whole.bitwise_left_shift(1.5).map(drop))?;
    refused(
        "mode",
        "no elements to choose from",
        Tensor::zeros([2, 0], DType::F32, device)?.mode(1, false).map(drop),
    )?;
    refused("unique_dim", "takes at least one dimension", line.sum_all()?.unique_dim(0).map(drop))?;
    refused("hsplit", "do not divide", line.hsplit(2).map(drop))?;
    refused("dsplit", "at least 3 dimensions", square.dsplit(3).map(drop))?;
    refused("a window", "windows are floats", Tensor::hann_window(4, true, DType::I32, device).map(drop))?;
    refused("kaiser", "from 0 to 700", Tensor::kaiser_window(4, true, -1.0, DType::F32, device).map(drop))?;
    refused("gaussian", "above 0", Tensor::gaussian_window(4, f64::NAN, true, DType::F32, device).map(drop))?;
    Ok(())
}

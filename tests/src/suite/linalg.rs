//! f64 functions compared with correctly rounded values, f64 softmax, singular values.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use forebay::autograd::GradOptions;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::CustomOp;
use forebay::tensor::Tensor;
use forebay_shaders::template_source;

use super::require_dtype;

super::tests![
    functions_of_f64_are_within_two_ulp,
    softmax_in_f64_is_accurate,
    singular_values_of_every_shape,
    singular_values_of_hard_matrices,
    the_gradient_of_singular_values,
    empty_matrices_have_gradients,
    invalid_arguments_of_svdvals_are_refused,
    triangles_of_more_rows_than_a_workgroup_has_threads,
];

static EXP: LazyLock<CustomOp> = LazyLock::new(|| function_kernel("m_exp64"));
static LOG: LazyLock<CustomOp> = LazyLock::new(|| function_kernel("m_log64"));

/// Returns an operation that calls a function of the shaders' library for each element.
fn function_kernel(function: &'static str) -> CustomOp {
    let library =
        ["math/base", "math/f64_exp_log"].map(|name| template_source(name).unwrap_or_default()).concat();
    let kernel = format!(
        "{library}
        struct Params {{ n: u32 }}
        @group(0) @binding(0) var<storage, read> x: array<f64>;
        @group(0) @binding(1) var<storage, read_write> y: array<f64>;
        @group(1) @binding(0) var<uniform> p: Params;
        @compute @workgroup_size(64)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
            if id.x < p.n {{ y[id.x] = {function}(x[id.x]); }}
        }}"
    );
    // An operation is static, and so is its source.
    CustomOp::new(function, kernel.leak())
}

fn functions_of_f64_are_within_two_ulp(device: &Device) -> Result<()> {
    require_dtype(device, DType::F64)?;
    let table: BTreeMap<String, Vec<[String; 2]>> =
        serde_json::from_str(include_str!("../../data/double.json"))?;
    for (name, op) in [("exp", &*EXP), ("log", &*LOG)] {
        let run = |x: &[f64]| -> Result<Vec<f64>> {
            let n = x.len();
            let x = Tensor::from_slice(x, [n], device)?;
            let call = op.inputs(&[&x]).output([n], DType::F64).params(&[n as u32]);
            Ok(call.workgroups([n.div_ceil(64), 1, 1]).run()?.to_vec::<f64>()?)
        };
        let column =
            |k: usize| table[name].iter().map(|pair| Ok(pair[k].parse()?)).collect::<Result<Vec<f64>>>();
        let (arguments, exact) = (column(0)?, column(1)?);
        let mut wrong = Vec::new();
        for ((&x, exact), got) in arguments.iter().zip(exact).zip(run(&arguments)?) {
            let ulp = exact.abs().next_up() - exact.abs();
            // Subnormal arguments and results may be flushed to zero.
            let flushed =
                [x, exact].iter().any(|v| v.is_subnormal()) && (got == 0.0 || got == f64::NEG_INFINITY);
            if !flushed && (got - exact).abs() > 2.0 * ulp {
                wrong
                    .push(format!("{name}({x:e}) is {got:e}, not {exact:e}: {:.1} ulp", (got - exact) / ulp));
            }
        }
        ensure!(
            wrong.is_empty(),
            "{} of {}: {}",
            wrong.len(),
            arguments.len(),
            wrong[..wrong.len().min(8)].join("; ")
        );
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let special = run(&[inf, -inf, nan, 0.0, -1.0, 800.0])?;
        let expected = match name {
            "exp" => [inf, 0.0, nan, 1.0, (-1f64).exp(), inf],
            _ => [inf, nan, nan, -inf, nan, 800f64.ln()],
        };
        for (got, expected) in special.into_iter().zip(expected) {
            let same = got == expected || (got.is_nan() && expected.is_nan());
            ensure!(same || (got - expected).abs() < 1e-14 * expected.abs(), "{name}: {got}, not {expected}");
        }
    }
    Ok(())
}

fn softmax_in_f64_is_accurate(device: &Device) -> Result<()> {
    if !device.supports_dtype(DType::F64) {
        let x = Tensor::ones([3, 4], DType::F32, device)?;
        let error = x.softmax_with_dtype(1, DType::F64).err().context("it must be refused")?.to_string();
        ensure!(error.contains("f64"), "{error}");
        return super::skip("the device computes no f64, and says so");
    }
    for (rows, extent, across) in
        [(3, 5, false), (2, 300, false), (2, 9000, false), (7, 40, true), (3, 700, true)]
    {
        let x: Vec<f64> = (0..rows * extent).map(|i| ((i * 37 % 101) as f64 - 50.0) * 0.71).collect();
        let host = Tensor::from_slice(&x, [rows, extent], device)?;
        let dim = if across { 0 } else { 1 };
        let leaf = if across { host.transpose(0, 1)?.copy()? } else { host }.to_leaf()?;
        for log in [false, true] {
            let y = if log { leaf.log_softmax(dim)? } else { leaf.softmax(dim)? };
            let seed =
                Tensor::from_slice(&x.iter().map(|v| v.sin()).collect::<Vec<f64>>(), [rows, extent], device)?;
            let seed = if across { seed.transpose(0, 1)? } else { seed };
            let seeds = [seed];
            let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() };
            let grad =
                forebay::autograd::grad(std::slice::from_ref(&y), std::slice::from_ref(&leaf), &options)?
                    .remove(0);
            let row_major = |t: &Tensor| -> Result<Vec<f64>> {
                Ok(if across { t.transpose(0, 1)?.copy()? } else { t.detach() }.to_vec::<f64>()?)
            };
            let (y, grad) = (row_major(&y)?, row_major(&grad)?);
            for r in 0..rows {
                let row = &x[r * extent..(r + 1) * extent];
                let largest = row.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = row.iter().map(|v| (v - largest).exp()).sum();
                let g: Vec<f64> = row.iter().map(|v| v.sin()).collect();
                let p: Vec<f64> = row.iter().map(|v| (v - largest).exp() / total).collect();
                let weighed: f64 = g.iter().zip(&p).map(|(g, p)| if log { *g } else { g * p }).sum();
                for k in 0..extent {
                    let expected = if log {
                        (row[k] - largest - total.ln(), g[k] - p[k] * weighed)
                    } else {
                        (p[k], p[k] * (g[k] - weighed))
                    };
                    let got = (y[r * extent + k], grad[r * extent + k]);
                    let close = |a: f64, b: f64| (a - b).abs() <= 1e-13 * (1.0 + b.abs());
                    ensure!(
                        close(got.0, expected.0) && close(got.1, expected.1),
                        "{rows} rows of {extent}, log {log}: {k} is {got:?}, not {expected:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Returns the float types of the device, with the tolerance of singular values.
fn types(device: &Device) -> impl Iterator<Item = (DType, f64)> + use<> {
    let wide = device.supports_dtype(DType::F64);
    [(DType::F32, 3e-6), (DType::F64, 1e-13)].into_iter().filter(move |t| t.0 == DType::F32 || wide)
}

fn tensor(values: &[f64], shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(match dtype {
        DType::F64 => Tensor::from_slice(values, shape, device)?,
        _ => Tensor::from_slice(&values.iter().map(|&v| v as f32).collect::<Vec<f32>>(), shape, device)?,
    })
}

fn ensure_close(what: &str, got: &Tensor, expected: &[f64], within: f64) -> Result<()> {
    let got = got.to_f64s()?;
    ensure!(got.len() == expected.len(), "{what}: {} values, not {}", got.len(), expected.len());
    for (k, (g, e)) in got.iter().zip(expected).enumerate() {
        ensure!((g - e).abs() <= within, "{what}: {k} is {g:e}, not {e:e}");
    }
    Ok(())
}

/// Householder reflection of [n, n], its own inverse. A matrix between two reflections keeps the singular values.
fn reflection(n: usize, seed: usize) -> Vec<f64> {
    let v: Vec<f64> = (0..n).map(|i| (((i + 1) * (2 * seed + 3)) as f64 * 0.7).sin() + 0.1).collect();
    let length: f64 = v.iter().map(|v| v * v).sum();
    let entry = |i: usize, j: usize| f64::from(u8::from(i == j)) - 2.0 * v[i] * v[j] / length;
    (0..n * n).map(|at| entry(at / n, at % n)).collect()
}

/// Returns H diag(values) G as [m, n] on the device.
fn with_values(values: &[f64], m: usize, n: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let (h, g) = (reflection(m, 1), reflection(n, 2));
    let sum = |i: usize, j: usize| {
        values.iter().enumerate().map(|(k, v)| h[i * m + k] * v * g[k * n + j]).sum::<f64>()
    };
    let entries: Vec<f64> = (0..m * n).map(|at| sum(at / n, at % n)).collect();
    tensor(&entries, &[m, n], dtype, device)
}

fn singular_values_of_every_shape(device: &Device) -> Result<()> {
    for (dtype, within) in types(device) {
        for (m, n) in
            [(1, 1), (1, 7), (2, 2), (5, 3), (3, 5), (33, 8), (40, 40), (70, 9), (90, 67), (67, 130)]
        {
            let expected: Vec<f64> = (0..m.min(n)).map(|k| 3.0 / (1.0 + k as f64 * 0.3)).collect();
            let a = with_values(&expected, m, n, dtype, device)?;
            let name = format!("{dtype} [{m}, {n}]");
            ensure_close(&name, &a.svdvals()?, &expected, within * 3.0 * (m.max(n) as f64).sqrt())?;
            // As part of a batch, with strides.
            let b = a.mul(2.0)?;
            let both = forebay::ops::stack(&[&a, &b], 2)?.permute([2, 0, 1])?;
            let twice: Vec<f64> = expected.iter().copied().chain(expected.iter().map(|v| 2.0 * v)).collect();
            ensure_close(&name, &both.svdvals()?, &twice, within * 6.0 * (m.max(n) as f64).sqrt())?;
        }
        let none = Tensor::zeros([2, 0, 3], dtype, device)?.svdvals()?;
        ensure!(none.shape() == [2, 0], "{:?}", none.shape());
    }
    Ok(())
}

fn singular_values_of_hard_matrices(device: &Device) -> Result<()> {
    for (dtype, within) in types(device) {
        // Of rank 1, zeros, repeated columns, all magnitudes.
        let ones = Tensor::ones([4, 6], dtype, device)?;
        ensure_close("ones", &ones.svdvals()?, &[24f64.sqrt(), 0.0, 0.0, 0.0], within * 5.0)?;
        ensure_close("zeros", &ones.zeros_like()?.svdvals()?, &[0.0; 4], 0.0)?;
        for scale in [1e-30, 1e30] {
            let a = with_values(&[scale, scale * 0.25, scale * 1e-3], 6, 3, dtype, device)?;
            let exact = [scale, scale * 0.25, scale * 1e-3];
            ensure_close("scaled", &a.svdvals()?, &exact, within * scale)?;
        }
        let norm = with_values(&[3.0, 2.0, 0.5], 3, 4, dtype, device)?.reshape([1, 3, 4])?;
        let kept = norm.nuclear_norm((), true)?;
        ensure!(kept.shape() == [1, 1, 1], "{:?}", kept.shape());
        ensure_close("nuclear norm", &kept, &[5.5], within * 10.0)?;
        ensure_close(
            "over other dimensions",
            &norm.permute([1, 0, 2])?.nuclear_norm([2, 0], false)?,
            &[5.5],
            within * 10.0,
        )?;
    }
    Ok(())
}

/// Compares the gradient of the weighted sum of singular values with its closed form.
fn the_gradient_of_singular_values(device: &Device) -> Result<()> {
    for (m, n) in [(4, 3), (3, 4), (5, 5)] {
        let values: Vec<f64> = (0..m.min(n)).map(|k| 2.0 - k as f64 * 0.4).collect();
        let x = with_values(&values, m, n, DType::F32, device)?.to_leaf()?;
        let weights = [0.3, -1.0, 0.7, 0.2, 0.5];
        let g = tensor(&weights[..m.min(n)], &[m.min(n)], DType::F32, device)?;
        let seeds = [g];
        let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() };
        let grad = forebay::autograd::grad(&[x.svdvals()?], std::slice::from_ref(&x), &options)?;
        // The gradient is U diag(g) V^T, where U and V are signed columns of the reflections.
        let (h, r) = (reflection(m, 1), reflection(n, 2));
        let entry =
            |i: usize, j: usize| (0..m.min(n)).map(|k| h[i * m + k] * weights[k] * r[k * n + j]).sum();
        let expected: Vec<f64> = (0..m * n).map(|at| entry(at / n, at % n)).collect();
        ensure_close("gradient", &grad[0], &expected, 2e-5)?;
    }
    Ok(())
}

fn invalid_arguments_of_svdvals_are_refused(device: &Device) -> Result<()> {
    let x = Tensor::ones([3, 4], DType::BF16, device)?;
    let error = x.svdvals().err().context("bf16")?.to_string();
    ensure!(error.contains("svdvals: does not take bf16"), "{error}");
    let x = Tensor::ones([3], DType::F32, device)?;
    ensure!(x.svdvals().is_err() && x.nuclear_norm((), false).is_err());
    let x = Tensor::ones([3, 3], DType::F32, device)?;
    let error = x.nuclear_norm([0, -2], false).err().context("the same twice")?.to_string();
    ensure!(error.contains("two different dimensions"), "{error}");
    Ok(())
}

fn empty_matrices_have_gradients(device: &Device) -> Result<()> {
    let x = Tensor::zeros([0, 3, 2], DType::F32, device)?.to_leaf()?;
    let (u, s, vh) = x.svd()?;
    for made in [u, s, vh, x.svdvals()?] {
        ensure!(made.requires_grad(), "{made:?} has no history");
        made.sum_all()?.backward()?;
        let shape = x.grad().context("no gradient")?.shape().to_vec();
        ensure!(shape == [0, 3, 2], "the gradient is {shape:?}");
        x.set_grad(None);
    }
    Ok(())
}

fn triangles_of_more_rows_than_a_workgroup_has_threads(device: &Device) -> Result<()> {
    const N: usize = 300;
    let x = Tensor::randn([2, N, N], DType::F32, device)?;
    let b = Tensor::randn([2, N, 70], DType::F32, device)?;
    let largest = |t: &Tensor| t.abs()?.max_all()?.item();
    // Far from singular, with rows that need pivoting.
    let a = x.add(&Tensor::eye(N, N, DType::F32, device)?.mul(60.0)?)?.flip([1])?;
    let off = largest(&a.matmul(&a.solve(&b)?)?.sub(&b)?)?;
    ensure!(off < 1e-4, "a solution is off by {off}");
    let definite =
        x.matmul(&x.transpose(1, 2)?)?.mul(1.0 / N as f64)?.add(&Tensor::eye(N, N, DType::F32, device)?)?;
    let l = definite.cholesky()?;
    let off = largest(&l.matmul(&l.transpose(1, 2)?)?.sub(&definite)?)?;
    ensure!(off < 1e-4, "a product of triangles is off by {off}");
    // Both methods agree on the determinant.
    let twice = l.diagonal(0, 1, 2)?.log()?.sum([1], false)?.mul(2.0)?;
    let off = largest(&definite.slogdet()?.1.sub(&twice)?)?;
    ensure!(off < 1e-2, "a logarithm of a determinant is off by {off}");
    Ok(())
}

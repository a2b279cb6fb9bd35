//! Reductions, softmax and normalisations at sizes that golden calls do not cover: long rows, few outputs in two
//! stages, packed 16-bit writes, any strides. Results are compared with f64 sums on the host.

use forebay::dtype::DType;
use forebay::ops::{BatchNormOptions, CrossEntropyOptions, NormOptions, Reduction};
use forebay::prelude::*;

/// Returns the first device of every available backend.
fn devices() -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for found in Device::enumerate().into_iter().filter(|f| f.unavailable_reason.is_none()) {
        if !devices.iter().any(|d| found.id.starts_with(d.info().backend)) {
            devices.push(Device::open(&found.id).expect("it was found"));
        }
    }
    assert!(
        !devices.is_empty(),
        "no device was found; a software Vulkan driver serves (`cargo xtask devices`)"
    );
    devices
}

/// Returns pseudo-random values in [-1, 1): a hash of their index.
fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let mut h = (i ^ seed.rotate_left(24)).wrapping_mul(0x9e37_79b1);
            h = (h ^ (h >> 15)).wrapping_mul(0x85eb_ca77);
            h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae3d);
            ((h ^ (h >> 16)) >> 8) as f32 / (1u32 << 23) as f32 - 1.0
        })
        .collect()
}

fn close(got: &Tensor, wanted: &[f64], (atol, rtol): (f64, f64), what: &str) {
    let got = got.to_f64s().expect("downloads");
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(wanted).enumerate() {
        assert!((a - b).abs() <= atol + rtol * b.abs(), "{what}: element {i} is {a}, expected {b}");
    }
}

const F32: (f64, f64) = (1e-5, 1.3e-6);
/// Tolerance of about one unit in the last place of an f16 near 1.
const F16: (f64, f64) = (1e-3, 1e-3);

/// Returns sums over one dimension of a matrix of `rows` x `cols`.
fn sums(x: &[f64], rows: usize, cols: usize, over_rows: bool) -> Vec<f64> {
    if over_rows {
        (0..cols).map(|c| (0..rows).map(|r| x[r * cols + c]).sum()).collect()
    } else {
        (0..rows).map(|r| x[r * cols..(r + 1) * cols].iter().sum()).collect()
    }
}

const SHAPES: [(usize, usize); 9] = [
    (1, 100_000),
    (100_000, 1),
    (3, 40_001),
    (40_001, 3),
    (517, 33),
    (7, 1000),
    (1000, 7),
    (64, 768),
    (2, 8),
];

#[test]
fn sums_and_extremes_of_every_form() {
    for device in devices() {
        for (rows, cols) in SHAPES {
            let host = values(rows * cols, 1);
            let wide: Vec<f64> = host.iter().map(|&v| v.into()).collect();
            let x = Tensor::from_slice(&host, [rows, cols], &device).expect("uploads");
            let turned = Tensor::from_slice(&host, [rows, cols], &device).and_then(|t| t.t()).expect("views");
            for over_rows in [false, true] {
                let (dim, other) = if over_rows { (0, 1) } else { (1, 0) };
                let wanted = sums(&wide, rows, cols, over_rows);
                let what = format!("sum of [{rows}, {cols}] over {dim} on {device}");
                close(&x.sum([dim], false).expect("sums"), &wanted, (2e-5, 2e-6), &what);
                close(&turned.sum([other], false).expect("sums"), &wanted, (2e-5, 2e-6), &what);
                let (value, index) = x.max(dim, false).expect("finds");
                let (tv, tp) = turned.max(other, false).expect("finds");
                let taken = x.gather(dim, &index.unsqueeze(dim).expect("views")).expect("gathers");
                let largest = x.amax([dim], false).expect("finds");
                assert_eq!(value.to_vec::<f32>().ok(), largest.to_vec::<f32>().ok(), "{what}");
                assert_eq!(value.to_vec::<f32>().ok(), taken.to_vec::<f32>().ok(), "{what}");
                assert_eq!(value.to_vec::<f32>().ok(), tv.to_vec::<f32>().ok(), "{what}");
                assert_eq!(index.to_vec::<i64>().ok(), tp.to_vec::<i64>().ok(), "{what}");
            }
            let total: f64 = wide.iter().sum();
            close(&turned.sum_all().expect("sums"), &[total], (2e-5, 2e-6), "sum of all");
            let mean = total / wide.len() as f64;
            let var = wide.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / wide.len() as f64;
            close(&x.var((), 0.0, false).expect("var"), &[var], F32, "variance of all");
            let positive = wide.iter().filter(|v| **v > 0.0).count() as f64;
            let count = x.gt(0.0).and_then(|m| m.sum_all()).expect("counts");
            close(&count, &[positive], (0.0, 0.0), "count");
            let first =
                host.iter().enumerate().fold(0, |best, (i, v)| if *v < host[best] { i } else { best });
            close(&x.argmin((), false).expect("finds"), &[first as f64], (0.0, 0.0), "index of the smallest");
        }
    }
}

#[test]
fn cumulative_sums_of_long_rows() {
    for device in devices() {
        for (rows, cols) in [(3, 1000), (300, 5), (1, 70_000)] {
            let host = values(rows * cols, 2);
            let x = Tensor::from_slice(&host, [rows, cols], &device).expect("uploads");
            let mut wanted = Vec::new();
            for row in host.chunks(cols) {
                wanted.extend(row.iter().scan(0.0, |sum, v| {
                    *sum += f64::from(*v);
                    Some(*sum)
                }));
            }
            // Rounding errors of a running sum depend on its largest value, and remain when the sum falls again.
            let highest = wanted.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            let tolerance = (1e-5 + 1.3e-6 * highest, 0.0);
            close(&x.cumsum(1).expect("scans"), &wanted, tolerance, "running sum");
        }
    }
}

/// Returns softmax of the rows of a matrix, and the gradient of its product with `g`.
fn softmax(x: &[f64], g: &[f64], cols: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut dx) = (Vec::new(), Vec::new());
    for (x, g) in x.chunks(cols).zip(g.chunks(cols)) {
        let m = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = x.iter().map(|v| (v - m).exp()).sum();
        let row: Vec<f64> = x.iter().map(|v| (v - m).exp() / sum).collect();
        let dot: f64 = row.iter().zip(g).map(|(y, g)| y * g).sum();
        dx.extend(row.iter().zip(g).map(|(y, g)| y * (g - dot)));
        y.extend(row);
    }
    (y, dx)
}

#[test]
fn softmax_of_long_rows_and_of_16_bits() {
    for device in devices() {
        for (rows, cols) in [(5, 3000), (300, 8), (4, 1024), (1, 1)] {
            for (dtype, tolerance) in [(DType::F32, F32), (DType::F16, F16)] {
                let cast = |v: Vec<f32>| {
                    Tensor::from_slice(&v, [rows, cols], &device)
                        .and_then(|t| t.to_dtype(dtype))
                        .expect("uploads")
                };
                let x = cast(values(rows * cols, 3).iter().map(|v| v * 6.0).collect());
                let g = cast(values(rows * cols, 4));
                let (xs, gs) = (x.to_f64s().expect("downloads"), g.to_f64s().expect("downloads"));
                let (y, dx) = softmax(&xs, &gs, cols);
                let x = x.to_leaf().expect("floats");
                let got = x.softmax(-1).expect("runs");
                let what = format!("softmax of [{rows}, {cols}] {dtype} on {device}");
                close(&got, &y, tolerance, &what);
                got.backward_with(&g).expect("runs");
                close(&x.grad().expect("reached"), &dx, tolerance, &what);
                let turned = x.detach().t().and_then(|t| t.softmax(0)).and_then(|t| t.t()).expect("runs");
                close(&turned, &y, tolerance, &what);
            }
        }
    }
}

/// Returns layer norm of the rows without weights, and the gradient of its product with `g`.
fn layer_norm(x: &[f64], g: &[f64], cols: usize, eps: f64) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut dx) = (Vec::new(), Vec::new());
    let n = cols as f64;
    for (x, g) in x.chunks(cols).zip(g.chunks(cols)) {
        let mean = x.iter().sum::<f64>() / n;
        let rstd = 1.0 / (x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n + eps).sqrt();
        let row: Vec<f64> = x.iter().map(|v| (v - mean) * rstd).collect();
        let (plain, scaled) =
            (g.iter().sum::<f64>() / n, g.iter().zip(&row).map(|(g, y)| g * y).sum::<f64>() / n);
        dx.extend(g.iter().zip(&row).map(|(g, y)| rstd * (g - plain - y * scaled)));
        y.extend(row);
    }
    (y, dx)
}

#[test]
fn layer_and_batch_norm_of_many_rows() {
    for device in devices() {
        for (rows, cols) in [(5, 3000), (4000, 8), (300, 64), (2, 1024)] {
            for (dtype, tolerance) in [(DType::F32, (2e-5, 2e-5)), (DType::F16, (4e-3, 2e-3))] {
                let cast = |v: Vec<f32>, shape: &[usize]| {
                    Tensor::from_slice(&v, shape, &device).and_then(|t| t.to_dtype(dtype)).expect("uploads")
                };
                let x = cast(values(rows * cols, 5), &[rows, cols]);
                let g = cast(values(rows * cols, 6), &[rows, cols]);
                let (xs, gs) = (x.to_f64s().expect("downloads"), g.to_f64s().expect("downloads"));
                let what = format!("layer norm of [{rows}, {cols}] {dtype} on {device}");
                let ones = cast(vec![1.0; cols], &[cols]).to_leaf().expect("floats");
                let zeros = cast(vec![0.0; cols], &[cols]).to_leaf().expect("floats");
                let (y, dx) = layer_norm(&xs, &gs, cols, 1e-5);
                let leaf = x.to_leaf().expect("floats");
                let got = leaf
                    .layer_norm(
                        [cols],
                        &NormOptions { weight: Some(&ones), bias: Some(&zeros), ..Default::default() },
                    )
                    .expect("runs");
                close(&got, &y, tolerance, &what);
                got.backward_with(&g).expect("runs");
                close(&leaf.grad().expect("reached"), &dx, tolerance, &what);
                let products: Vec<f64> = y.iter().zip(&gs).map(|(y, g)| y * g).collect();
                let loose = (tolerance.0 * 5.0, tolerance.1);
                close(&ones.grad().expect("reached"), &sums(&products, rows, cols, true), loose, &what);
                close(&zeros.grad().expect("reached"), &sums(&gs, rows, cols, true), loose, &what);

                // The values as channels: transposed, each channel is one row of [rows, cols].
                let batch = x.t().and_then(|t| t.contiguous()).expect("copies").to_leaf().expect("floats");
                let turned = g.t().and_then(|t| t.contiguous()).expect("copies");
                let one = cast(vec![1.0; rows], &[rows]).to_leaf().expect("floats");
                let got = batch
                    .batch_norm(&BatchNormOptions {
                        weight: Some(&one),
                        training: true,
                        ..Default::default()
                    })
                    .expect("runs");
                let what = format!("batch norm of [{cols}, {rows}] {dtype} on {device}");
                close(&got.t().expect("views"), &y, tolerance, &what);
                got.backward_with(&turned).expect("runs");
                close(&batch.grad().and_then(|t| t.t().ok()).expect("reached"), &dx, tolerance, &what);
                close(&one.grad().expect("reached"), &sums(&products, rows, cols, false), loose, &what);
            }
        }
    }
}

#[test]
fn a_row_of_minus_infinity_is_nan_and_does_not_change_the_others() {
    for device in devices() {
        let low = f32::NEG_INFINITY;
        let x = Tensor::from_slice(&[low, low, 0.0, 0.0], [2, 2], &device).expect("uploads");
        let y = x.softmax(-1).and_then(|y| y.to_vec::<f32>()).expect("runs");
        assert!(y[0].is_nan() && y[1].is_nan() && y[2..] == [0.5, 0.5], "{y:?} on {device}");
    }
}

/// Returns the cross-entropy of class labels as PyTorch defines it, and the gradient of the logits; [rows, classes].
fn cross_entropy(
    x: &[f64],
    labels: &[i64],
    weight: &[f64],
    ignored: i64,
    smoothing: f64,
    mean: bool,
) -> (f64, Vec<f64>) {
    let classes = weight.len();
    let spread = smoothing / classes as f64;
    let (mut loss, mut total, mut dx) = (0.0, 0.0, Vec::new());
    for (x, &label) in x.chunks(classes).zip(labels) {
        if label == ignored {
            dx.extend(std::iter::repeat_n(0.0, classes));
            continue;
        }
        let m = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = m + x.iter().map(|v| (v - m).exp()).sum::<f64>().ln();
        // Weight of each class in the loss of this row.
        let parts: Vec<f64> = (0..classes)
            .map(|c| weight[c] * spread + if c as i64 == label { weight[c] * (1.0 - smoothing) } else { 0.0 })
            .collect();
        let all: f64 = parts.iter().sum();
        loss += x.iter().zip(&parts).map(|(v, w)| w * (lse - v)).sum::<f64>();
        dx.extend(x.iter().zip(&parts).map(|(v, w)| (v - lse).exp() * all - w));
        total += weight[label as usize];
    }
    if mean {
        loss /= total;
        dx.iter_mut().for_each(|d| *d /= total);
    }
    (loss, dx)
}

#[test]
fn cross_entropy_with_weights_smoothing_and_an_ignored_class() {
    for device in devices() {
        for (rows, classes) in [(300, 10), (5, 5000), (64, 1024), (1, 2)] {
            let labels: Vec<i64> = (0..rows as i64).map(|r| (r * 7 + 1) % classes as i64).collect();
            let weight: Vec<f32> = values(classes, 9).iter().map(|v| v + 1.5).collect();
            for (dtype, tolerance) in [(DType::F32, (1e-5, 5e-6)), (DType::F16, (2e-3, 2e-3))] {
                for (ignored, smoothing, weighted, reduction) in [
                    (-100, 0.0, false, Reduction::Mean),
                    (1, 0.0, true, Reduction::Mean),
                    (1, 0.1, true, Reduction::Mean),
                    (-100, 0.3, false, Reduction::Sum),
                ] {
                    let logits: Vec<f32> = values(rows * classes, 8).iter().map(|v| v * 4.0).collect();
                    let x = Tensor::from_slice(&logits, [rows, classes], &device)
                        .and_then(|t| t.to_dtype(dtype)?.to_leaf())
                        .expect("uploads");
                    let goal = Tensor::from_slice(&labels, [rows], &device).expect("uploads");
                    let weights = Tensor::from_slice(&weight, [classes], &device).expect("uploads");
                    let options = CrossEntropyOptions {
                        weight: weighted.then_some(&weights),
                        ignore_index: ignored,
                        label_smoothing: smoothing,
                        reduction,
                        in_place: false,
                    };
                    let host: Vec<f64> =
                        weight.iter().map(|&w| if weighted { w.into() } else { 1.0 }).collect();
                    let xs = x.to_f64s().expect("downloads");
                    let mean = reduction == Reduction::Mean;
                    let (loss, dx) = cross_entropy(&xs, &labels, &host, ignored, smoothing, mean);
                    if mean && loss.is_nan() {
                        continue;
                    }
                    let what =
                        format!("cross-entropy of [{rows}, {classes}] {dtype} {options:?} on {device}");
                    let got = x.cross_entropy_with(&goal, &options).expect("runs");
                    close(&got, &[loss], tolerance, &what);
                    got.backward().expect("runs");
                    close(&x.grad().expect("reached"), &dx, tolerance, &what);

                    // The same values with classes in dimension 1: [1, classes, rows].
                    let turned =
                        x.detach().t().and_then(|t| t.unsqueeze(0)?.contiguous()?.to_leaf()).expect("floats");
                    let goal = goal.unsqueeze(0).expect("views");
                    let got = turned.cross_entropy_with(&goal, &options).expect("runs");
                    close(&got, &[loss], tolerance, &what);
                    got.backward().expect("runs");
                    let grad =
                        turned.grad().and_then(|g| g.squeeze(0).and_then(|g| g.t()).ok()).expect("reached");
                    close(&grad, &dx, tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn an_invalid_label_gives_nan() {
    for device in devices() {
        let x = Tensor::from_slice(&[0.0f32, 1.0, 2.0, 3.0], [2, 2], &device).expect("uploads");
        let goal = Tensor::from_slice(&[2i64, 1], [2], &device).expect("uploads");
        assert!(x.cross_entropy(&goal).and_then(|l| l.item()).expect("runs").is_nan(), "{device}");
        let none = CrossEntropyOptions { reduction: Reduction::None, ..CrossEntropyOptions::default() };
        let each = x.cross_entropy_with(&goal, &none).and_then(|l| l.to_f64s()).expect("runs");
        assert!(each[0].is_nan() && each[1].is_finite(), "{each:?} on {device}");
    }
}

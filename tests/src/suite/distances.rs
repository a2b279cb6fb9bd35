//! Distances of many rows, which are computed by tiles: values and gradients against f64 on the host.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits};
use super::tests;

tests![
    many_distances_are_exact_differences,
    distances_within_a_set_are_computed_once,
    gradients_of_many_distances_equal_those_of_the_host,
    gradients_of_distances_take_any_strides,
];

/// Norms whose distances have large tiles.
const TILED_NORMS: [f64; 4] = [0.0, 1.0, 2.0, f64::INFINITY];

/// Returns the names of the kernels that `run` launches, and its result.
fn profiled<T>(device: &Device, run: impl FnOnce() -> Result<T>) -> Result<(T, String)> {
    let profiler = Profiler::start(device)?;
    let result = run()?;
    let spans = profiler.finish()?.spans;
    Ok((result, spans.iter().map(|span| span.name.to_string()).collect::<Vec<_>>().join("\n")))
}

/// Computes the distances of \[batch, rows, width\] and \[batch, others, width\].
fn host_distances(a: &Tensor, b: &Tensor, p: f64) -> Result<Vec<f64>> {
    let (&[batch, rows, width], &[_, others, _]) = (a.shape(), b.shape()) else { unreachable!() };
    let (a, b) = (a.to_f64s()?, b.to_f64s()?);
    let mut distances = Vec::with_capacity(batch * rows * others);
    for (z, i) in (0..batch).flat_map(|z| (0..rows).map(move |i| (z, i))) {
        let x = &a[(z * rows + i) * width..][..width];
        distances.extend((0..others).map(|j| {
            let y = &b[(z * others + j) * width..][..width];
            let sizes = x.iter().zip(y).map(|(x, y)| (x - y).abs());
            match p {
                0.0 => sizes.filter(|&d| d != 0.0).count() as f64,
                f64::INFINITY => sizes.fold(0.0, f64::max),
                2.0 => sizes.map(|d| d * d).sum::<f64>().sqrt(),
                1.0 => sizes.sum::<f64>(),
                _ => sizes.map(|d| d.powf(p)).sum::<f64>().powf(1.0 / p),
            }
        }));
    }
    Ok(distances)
}

fn many_distances_are_exact_differences(device: &Device) -> Result<()> {
    // Widths of aligned quads or not, and of one or more steps. Tiles at all edges are partial.
    for width in [3, 20, 33] {
        let shape = |rows| [32, rows, width];
        // A large mean: the product of both rows would lose these distances.
        let a = Tensor::rand(shape(70), DType::F32, device)?.add(1000.0)?;
        let b = Tensor::rand(shape(68), DType::F32, device)?.add(1000.0)?;
        b.narrow(1, 0, 5)?.copy_(&a.narrow(1, 0, 5)?)?;
        for p in TILED_NORMS {
            let (got, kernels) = profiled(device, || Ok(a.cdist(&b, p)?))?;
            ensure!(kernels.contains("cdist_tiled"), "p = {p}: no large tiles in {kernels}");
            ensure_close(&got.to_f64s()?, &host_distances(&a, &b, p)?, 2e-6, 0.0)
                .with_context(|| format!("p = {p}, width {width}"))?;
        }
        // Rows that are not neighbours in memory have the same sums.
        let turned = a.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
        ensure_same_bits(&turned.cdist(&b, 2.0)?, &a.cdist(&b, 2.0)?)?;
        // Rows from an unaligned place on.
        let padded = Tensor::zeros(shape(71), DType::F32, device)?.flatten(0, -1)?;
        let moved = padded.narrow(0, 1, a.numel())?;
        moved.copy_(&a.flatten(0, -1)?)?;
        ensure_same_bits(&moved.reshape(shape(70))?.cdist(&b, 2.0)?, &a.cdist(&b, 2.0)?)?;
    }
    Ok(())
}

fn distances_within_a_set_are_computed_once(device: &Device) -> Result<()> {
    // Even and odd numbers of tiles.
    for (batch, rows) in [(32, 70), (15, 150), (3, 400)] {
        let x = Tensor::randn([batch, rows, 12], DType::F32, device)?;
        let copy = x.copy()?;
        for p in TILED_NORMS {
            let (got, kernels) = profiled(device, || Ok(x.cdist(&x, p)?))?;
            ensure!(kernels.contains("symmetric"), "p = {p}: both orders are computed in {kernels}");
            ensure_same_bits(&got, &x.cdist(&copy, p)?).with_context(|| format!("{batch} {rows} {p}"))?;
        }
        let half = x.to_dtype(DType::BF16)?;
        let (got, kernels) = profiled(device, || Ok(half.cdist(&half, 2.0)?))?;
        ensure!(kernels.contains("symmetric"), "the operand is cast twice: {kernels}");
        ensure_same_bits(&got, &half.cdist(&half.copy()?, 2.0)?)?;
    }
    // Other rows of the same memory.
    let x = Tensor::randn([32, 71, 8], DType::F32, device)?;
    let (first, second) = (x.narrow(1, 0, 70)?, x.narrow(1, 1, 70)?);
    ensure_same_bits(&first.cdist(&second, 2.0)?, &first.cdist(&second.copy()?, 2.0)?)
}

/// Computes the gradients of sum(weights · distances) of both operands, without a batch.
fn host_gradients(a: &Tensor, b: &Tensor, weights: &Tensor, p: f64) -> Result<[Vec<f64>; 2]> {
    let (&[rows, width], &[others, _]) = (a.shape(), b.shape()) else { unreachable!() };
    let distances = host_distances(&a.unsqueeze(0)?, &b.unsqueeze(0)?, p)?;
    let (x, y, g) = (a.to_f64s()?, b.to_f64s()?, weights.to_f64s()?);
    let mut gradients = [vec![0.0; rows * width], vec![0.0; others * width]];
    for i in 0..rows {
        for j in 0..others {
            let distance = distances[i * others + j];
            for k in 0..width {
                let difference = x[i * width + k] - y[j * width + k];
                let derivative = match p {
                    1.0 => 1.0,
                    f64::INFINITY => f64::from(u8::from(difference.abs() == distance)),
                    _ => (difference.abs() / distance).powf(p - 1.0),
                };
                let of_pair = g[i * others + j] * derivative * difference.signum();
                if difference != 0.0 {
                    gradients[0][i * width + k] += of_pair;
                    gradients[1][j * width + k] -= of_pair;
                }
            }
        }
    }
    Ok(gradients)
}

fn gradients_of_many_distances_equal_those_of_the_host(device: &Device) -> Result<()> {
    let features = &device.info().features;
    let types = [DType::F32, DType::F64];
    for dtype in types.into_iter().filter(|&dtype| dtype == DType::F32 || features.f64) {
        // One element of a row for each thread, those of four rows, 4 x 4, and two tiles of them.
        for (rows, others, width) in [(70, 40, 3), (40, 70, 10), (66, 90, 20), (20, 33, 70), (3, 1100, 20)] {
            let a = Tensor::randn([rows, width], dtype, device)?;
            let b = Tensor::randn([others, width], dtype, device)?;
            b.narrow(0, 0, 2)?.copy_(&a.narrow(0, 0, 2)?)?;
            let weights = Tensor::randn([rows, others], dtype, device)?;
            for p in [1.0, 2.0, 3.0, 1.5, f64::INFINITY] {
                if dtype == DType::F64 && p.fract() != 0.0 {
                    continue;
                }
                let (x, y) = (a.to_leaf()?, b.to_leaf()?);
                x.cdist(&y, p)?.backward_with(&weights)?;
                let expected = host_gradients(&a, &b, &weights, p)?;
                for (name, x, expected) in [("a", x, &expected[0]), ("b", y, &expected[1])] {
                    let got = x.grad().context("there is no gradient")?.to_f64s()?;
                    let tolerance = if dtype == DType::F64 { 1e-12 } else { 2e-5 };
                    ensure_close(&got, expected, tolerance, tolerance)
                        .with_context(|| format!("{dtype} {rows} {others} {width}, p = {p}, {name}"))?;
                }
            }
        }
    }
    Ok(())
}

fn gradients_of_distances_take_any_strides(device: &Device) -> Result<()> {
    let a = Tensor::randn([3, 5, 20], DType::F32, device)?.to_leaf()?;
    let b = Tensor::randn([30, 20], DType::F32, device)?.to_leaf()?;
    let weights = Tensor::randn([3, 5, 30], DType::F32, device)?;
    a.cdist(&b, 2.0)?.backward_with(&weights)?;
    let gradients = |x: &Tensor| x.grad().context("there is no gradient");
    let expected = [gradients(&a)?, gradients(&b)?];
    let (a, b) = (a.detach(), b.detach());
    let turned = a.permute([2, 0, 1])?.contiguous()?.to_leaf()?;
    let other = b.t()?.contiguous()?.to_leaf()?;
    let by_columns = weights.permute([2, 0, 1])?.contiguous()?.permute([1, 2, 0])?;
    turned.permute([1, 2, 0])?.cdist(&other.t()?, 2.0)?.backward_with(&by_columns)?;
    ensure_same_bits(&gradients(&turned)?.permute([1, 2, 0])?.contiguous()?, &expected[0])?;
    ensure_same_bits(&gradients(&other)?.t()?.contiguous()?, &expected[1])
}

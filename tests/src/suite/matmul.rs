//! f32 matrix products compared with f64 sums: sizes around every kernel's tiles, both layouts, batches. Some matrices
//! are surrounded by NaN, which no kernel may read.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::tensor::Tensor;

use super::host_reference::ensure_close;
use super::tests;

tests![
    products_of_every_layout,
    batches_of_products,
    linear_layers_equal_products_with_a_bias,
    a_product_has_the_same_bits_each_time,
];

/// Rows, columns, terms of a sum: one tile, edges, long sums of few elements, and many tiles.
const SIZES: [[usize; 3]; 7] = [
    [8, 8, 32],
    [33, 41, 100],
    [64, 64, 64],
    [24, 16, 2000],
    [256, 10, 1024],
    [301, 517, 332],
    [1024, 1028, 70],
];

/// Batch of matrices, with a row-major copy on the host.
struct MatrixBatch {
    values: Vec<f32>,
    rows: usize,
    cols: usize,
    tensor: Tensor,
}

impl MatrixBatch {
    /// Creates a batch. `by_cols` makes matrices column-major. `margin` embeds them in a tensor of NaN, at this offset
    /// from a multiple of 16 bytes. `None` makes them contiguous.
    fn new(
        [batch, rows, cols]: [usize; 3],
        by_cols: bool,
        margin: Option<usize>,
        device: &Device,
    ) -> Result<Self> {
        let values: Vec<f32> =
            (0..batch * rows * cols).map(|i| ((i * 7919 + 13 * rows) % 1021) as f32 / 510.0 - 1.0).collect();
        let (lines, along) = if by_cols { (cols, rows) } else { (rows, cols) };
        let (margin, before) = margin.map_or((0, 0), |odd| (4, 4 + odd));
        let pitch = if margin > 0 { (along + before).next_multiple_of(4) + 4 } else { along };
        let mut all = vec![f32::NAN; batch * (lines + margin) * pitch];
        for (i, x) in values.iter().enumerate() {
            let (z, row, col) = (i / (rows * cols), i / cols % rows, i % cols);
            let (line, at) = if by_cols { (col, row) } else { (row, col) };
            all[(z * (lines + margin) + line) * pitch + before + at] = *x;
        }
        let whole = Tensor::from_slice(&all, [batch, lines + margin, pitch], device)?;
        let inside = whole.narrow(1, 0, lines)?.narrow(2, before, along)?;
        let tensor = if by_cols { inside.transpose(-2, -1)? } else { inside };
        Ok(Self { values, rows, cols, tensor })
    }

    fn element(&self, z: usize, row: usize, col: usize) -> f64 {
        self.values[(z * self.rows + row) * self.cols + col].into()
    }
}

/// Compares all elements, or about two thousand, with f64 sums.
fn check(c: &Tensor, a: &MatrixBatch, b: &MatrixBatch, more: impl Fn(usize, usize) -> f64) -> Result<()> {
    let given = c.to_vec::<f32>()?;
    let step = (given.len() / 2000).max(1);
    // Error bound for a sum of k products of values up to 1 in any order, far below a wrong element's effect.
    let bound = 1e-6 * (a.cols as f64).max(8.0);
    let indices: Vec<usize> = (0..given.len()).step_by(step).chain([given.len() - 1]).collect();
    let expected = |&i: &usize| {
        let (z, row, col) = (i / (a.rows * b.cols), i / b.cols % a.rows, i % b.cols);
        (0..a.cols).map(|k| a.element(z, row, k) * b.element(z, k, col)).sum::<f64>() + more(row, col)
    };
    let given: Vec<f64> = indices.iter().map(|&i| given[i].into()).collect();
    let expected: Vec<f64> = indices.iter().map(expected).collect();
    ensure_close(&given, &expected, 0.0, bound).with_context(|| format!("of every {step}th element"))
}

fn products_of_every_layout(device: &Device) -> Result<()> {
    for [m, n, k] in SIZES {
        for (a_by_cols, b_by_cols) in [(false, false), (false, true), (true, false), (true, true)] {
            for margin in [None, Some(0), Some(1)] {
                let a = MatrixBatch::new([1, m, k], a_by_cols, margin, device)?;
                let b = MatrixBatch::new([1, k, n], b_by_cols, margin, device)?;
                let c = a.tensor.squeeze(0)?.matmul(&b.tensor.squeeze(0)?)?;
                check(&c, &a, &b, |_, _| 0.0).with_context(|| {
                    format!("{m} x {n} x {k}, by columns: {a_by_cols}, {b_by_cols}, margin: {margin:?}")
                })?;
            }
        }
    }
    Ok(())
}

fn batches_of_products(device: &Device) -> Result<()> {
    for [m, n, k] in [[8, 8, 32], [33, 41, 100], [64, 96, 128]] {
        for (a_by_cols, b_by_cols) in [(false, false), (true, true)] {
            for margin in [None, Some(0), Some(1)] {
                let a = MatrixBatch::new([5, m, k], a_by_cols, margin, device)?;
                let b = MatrixBatch::new([5, k, n], b_by_cols, margin, device)?;
                check(&a.tensor.matmul(&b.tensor)?, &a, &b, |_, _| 0.0).with_context(|| {
                    format!("5 x {m} x {n} x {k}, by columns: {a_by_cols}, {b_by_cols}, margin: {margin:?}")
                })?;
                // One matrix shared by the whole batch.
                let (tensor, values) = (b.tensor.narrow(0, 0, 1)?, b.values[..k * n].repeat(5));
                let shared = MatrixBatch { tensor, values, rows: k, cols: n };
                check(&a.tensor.matmul(&shared.tensor)?, &a, &shared, |_, _| 0.0)?;
            }
        }
    }
    Ok(())
}

fn linear_layers_equal_products_with_a_bias(device: &Device) -> Result<()> {
    for [rows, out, features] in [[64, 64, 64], [36, 100, 132], [1024, 36, 40], [260, 1024, 64]] {
        let what = || format!("{rows} rows of {features} features to {out}");
        let x = MatrixBatch::new([1, rows, features], false, None, device)?;
        let weight = MatrixBatch::new([1, features, out], true, None, device)?;
        let bias: Vec<f32> = (0..out).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
        let parameters = [
            weight.tensor.squeeze(0)?.t()?.contiguous()?.to_leaf()?,
            Tensor::from_slice(&bias, [out], device)?.to_leaf()?,
        ];
        let y = || x.tensor.squeeze(0)?.linear(&parameters[0], Some(&parameters[1]));
        check(&y()?, &x, &weight, |_, col| bias[col].into()).with_context(what)?;
        // Gradients accumulate over two passes: gᵀ · x, and the column sums of g.
        let g = MatrixBatch::new([1, rows, out], false, None, device)?;
        for times in [1.0, 2.0] {
            y()?.backward_with(&g.tensor.squeeze(0)?)?;
            let grads = [0, 1].map(|k| Ok(parameters[k].grad().context("no gradient")?.to_f64s()?));
            let [dw, db]: [Result<Vec<f64>>; 2] = grads;
            let (dw, db) = (dw?, db?);
            let sum = |of: &dyn Fn(usize) -> f64| times * (0..rows).map(of).sum::<f64>();
            let bound = 1e-6 * times * rows as f64;
            let step = (dw.len() / 1000).max(1);
            let some: Vec<f64> = dw.iter().copied().step_by(step).collect();
            let of_weight =
                |i: usize| sum(&|row| g.element(0, row, i / features) * x.element(0, row, i % features));
            let expected: Vec<f64> = (0..dw.len()).step_by(step).map(of_weight).collect();
            ensure_close(&some, &expected, 0.0, bound)
                .with_context(|| format!("{}: every {step}th element of the weight's gradient", what()))?;
            let expected: Vec<f64> = (0..out).map(|col| sum(&|row| g.element(0, row, col))).collect();
            ensure_close(&db, &expected, 0.0, bound)
                .with_context(|| format!("{}: the bias's gradient", what()))?;
        }
    }
    Ok(())
}

/// Detects races between a kernel's reads and its prefetches, which corrupt about one tile in some hundred thousand.
fn a_product_has_the_same_bits_each_time(device: &Device) -> Result<()> {
    let (scale, times) = if device.info().software { (8, 3) } else { (1, 1000) };
    for [m, n, k] in [[1024usize, 1024, 1024], [1024, 784, 256], [256, 1024, 784], [256, 10, 1024]] {
        let a = Tensor::rand([m / scale, k], DType::F32, device)?;
        let b = Tensor::rand([k, n.div_ceil(scale)], DType::F32, device)?;
        let first = a.matmul(&b)?;
        let mut off = first.sub(&first)?;
        for _ in 0..times {
            off = off.maximum(&a.matmul(&b)?.sub(&first)?.abs()?)?;
        }
        let max_error = off.amax([0, 1], false)?.item()?;
        ensure!(max_error == 0.0, "one of {times} products of {m} x {n} x {k} is off by {max_error}");
    }
    Ok(())
}

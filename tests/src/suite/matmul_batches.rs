//! Batches of matrix products whose operands have several batch dimensions, each with its own stride. All sums are
//! exact, so results are compared bit by bit with those of the host, rounded once.

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::tensor::Tensor;
use half::{bf16, f16};

use super::host_reference::SplitMix64;
use super::tests;

tests![
    operands_with_strides_of_their_own,
    gradients_sum_over_broadcast_dimensions,
    batches_with_few_rows_and_long_sums,
    captured_batches_have_the_same_bits,
    gradients_of_sums_have_gradients,
];

/// Element types of the tests.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Batch of matrices with its values on the host, \[batch, rows, columns\].
struct Batch {
    tensor: Tensor,
    values: Vec<f64>,
    rows: usize,
    cols: usize,
}

/// Position of a tensor's dimensions in memory.
#[derive(Clone, Copy, Debug)]
struct Memory {
    /// Dimensions from the outermost to the innermost.
    order: [usize; 5],
    /// Dimensions that repeat.
    repeated: &'static [usize],
    /// Number of NaN before each line of the innermost dimension; as many follow.
    margin: usize,
}

impl Memory {
    const fn new(order: [usize; 5], repeated: &'static [usize], margin: usize) -> Self {
        Self { order, repeated, margin }
    }
}

impl Batch {
    /// Creates a batch of eighths between -1 and 1.
    fn new(shape: [usize; 5], memory: Memory, dtype: DType, device: &Device) -> Result<Self> {
        let Memory { order, repeated, margin } = memory;
        let stored = shape.iter().enumerate().map(|(d, &n)| if repeated.contains(&d) { 1 } else { n });
        let stored: Vec<usize> = stored.collect();
        let mut lengths: Vec<usize> = order.iter().map(|&d| stored[d]).collect();
        let line = lengths[4];
        lengths[4] += 2 * margin;
        let mut random = SplitMix64(lengths.iter().sum::<usize>() as u64);
        let mut all = vec![f32::NAN; lengths.iter().product()];
        for (i, value) in all.iter_mut().enumerate() {
            if (margin..margin + line).contains(&(i % lengths[4])) {
                *value = random.below(17) as f32 / 8.0 - 1.0;
            }
        }
        let mut strides = [0; 5];
        let mut step = 1;
        for (place, &d) in order.iter().enumerate().rev() {
            strides[d] = if repeated.contains(&d) { 0 } else { step };
            step *= lengths[place];
        }
        let whole = Tensor::from_slice(&all, lengths.clone(), device)?.to_dtype(dtype)?;
        let mut places = [0; 5];
        order.iter().enumerate().for_each(|(place, &d)| places[d] = place);
        let tensor = whole.narrow(4, margin, line)?.permute(places.map(|d| d as isize))?;
        let tensor = tensor.broadcast_to(shape)?;
        let values = (0..shape.iter().product::<usize>()).map(|i| {
            let (mut left, mut at) = (i, margin);
            for d in (0..5).rev() {
                at += left % shape[d] * strides[d];
                left /= shape[d];
            }
            f64::from(all[at])
        });
        Ok(Self { tensor, values: values.collect(), rows: shape[3], cols: shape[4] })
    }

    /// Returns the products of the matrices of two batches.
    fn multiply(&self, other: &Self) -> Vec<f64> {
        let (m, k, n) = (self.rows, self.cols, other.cols);
        let batch = self.values.len() / (m * k);
        let mut products = vec![0.0; batch * m * n];
        for (z, out) in products.chunks_exact_mut(m * n).enumerate() {
            let (a, b) = (&self.values[z * m * k..], &other.values[z * k * n..]);
            for (row, out) in out.chunks_exact_mut(n).enumerate() {
                for i in 0..k {
                    let x = a[row * k + i];
                    out.iter_mut().zip(&b[i * n..(i + 1) * n]).for_each(|(sum, y)| *sum += x * y);
                }
            }
        }
        products
    }

    fn transposed(&self) -> Self {
        let (rows, cols) = (self.rows, self.cols);
        let values = (0..self.values.len()).map(|i| {
            let (z, row, col) = (i / (rows * cols), i / rows % cols, i % rows);
            self.values[z * rows * cols + col * cols + row]
        });
        Self { tensor: self.tensor.clone(), values: values.collect(), rows: cols, cols: rows }
    }
}

/// Rounds an exact value to a type.
fn round(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        _ => value,
    }
}

/// Asserts that a result has the expected values, rounded once to its type.
fn ensure_rounded(result: &Tensor, expected: &[f64], what: impl Fn() -> String) -> Result<()> {
    let got = result.to_f64s()?;
    ensure!(got.len() == expected.len(), "{}: {} elements of {}", what(), got.len(), expected.len());
    for (i, (&got, &exact)) in got.iter().zip(expected).enumerate() {
        let rounded = round(exact, result.dtype());
        ensure!(got == rounded, "{}: element {i} is {got}, expected {rounded}", what());
    }
    Ok(())
}

/// Rows, columns, terms: whole tiles, and edges of all tiles. Software devices take the first ones.
const SIZES: [[usize; 3]; 8] = [
    [64, 64, 64],
    [24, 40, 72],
    [16, 300, 16],
    [300, 16, 24],
    [128, 72, 40],
    [1, 64, 72],
    [64, 1, 48],
    [33, 17, 9],
];

fn sizes(device: &Device) -> &'static [[usize; 3]] {
    if device.info().software { &SIZES[..3] } else { &SIZES }
}

/// Memory of a and b for batches \[chunks, heads, steps\].
const MEMORIES: [[Memory; 2]; 6] = [
    // One dimension in memory.
    [Memory::new([0, 1, 2, 3, 4], &[], 0), Memory::new([0, 1, 2, 3, 4], &[], 0)],
    // Two orders of the batch, and columns in front of rows.
    [Memory::new([0, 2, 1, 3, 4], &[], 0), Memory::new([0, 1, 2, 4, 3], &[], 0)],
    // A batch dimension between rows and columns.
    [Memory::new([0, 1, 3, 2, 4], &[], 0), Memory::new([0, 1, 4, 2, 3], &[], 0)],
    // Repeated matrices, and lines with neighbours that no kernel may read.
    [Memory::new([0, 1, 2, 4, 3], &[2], 8), Memory::new([2, 0, 1, 3, 4], &[], 8)],
    [Memory::new([0, 1, 2, 3, 4], &[1], 0), Memory::new([1, 2, 0, 4, 3], &[0], 0)],
    // Lines that no vector begins with.
    [Memory::new([0, 2, 1, 3, 4], &[], 3), Memory::new([0, 1, 2, 3, 4], &[2], 1)],
];

fn operands_with_strides_of_their_own(device: &Device) -> Result<()> {
    for dtype in DTYPES {
        for &[m, n, k] in sizes(device) {
            for [left, right] in MEMORIES {
                let a = Batch::new([2, 3, 2, m, k], left, dtype, device)?;
                let b = Batch::new([2, 3, 2, k, n], right, dtype, device)?;
                let what = || format!("{dtype} {m} x {n} x {k}, {left:?}, {right:?}");
                let c = a.tensor.matmul(&b.tensor).with_context(what)?;
                ensure_rounded(&c, &a.multiply(&b), what)?;
            }
        }
    }
    Ok(())
}

/// Sums values \[2, 3, 2, rows · columns\] over the repeated dimensions.
fn sum_repeated(values: &[f64], repeated: &[usize]) -> Vec<f64> {
    let extents = [2, 3, 2];
    let size = values.len() / 12;
    let kept = [0, 1, 2].map(|d| if repeated.contains(&d) { 1 } else { extents[d] });
    let mut sums = vec![0.0; kept.iter().product::<usize>() * size];
    for (z, matrix) in values.chunks_exact(size).enumerate() {
        let index = [z / 6, z / 2 % 3, z % 2];
        let to = (0..3).fold(0, |at, d| at * kept[d] + index[d].min(kept[d] - 1));
        sums[to * size..].iter_mut().zip(matrix).for_each(|(sum, value)| *sum += value);
    }
    sums
}

/// Dimensions of the batch that the first and the second operand repeat.
const REPEATED: [[&[usize]; 2]; 3] = [[&[2], &[1]], [&[1], &[]], [&[0, 2], &[1]]];

fn gradients_sum_over_broadcast_dimensions(device: &Device) -> Result<()> {
    let plain = Memory::new([0, 1, 2, 3, 4], &[], 0);
    for dtype in DTYPES {
        for &[m, n, k] in sizes(device) {
            for [repeated, of] in REPEATED {
                let what = || format!("{dtype} {m} x {n} x {k}, repeated in {repeated:?} and {of:?}");
                let a = Batch::new([2, 3, 2, m, k], Memory { repeated, ..plain }, dtype, device)?;
                let b = Batch::new([2, 3, 2, k, n], Memory { repeated: of, ..plain }, dtype, device)?;
                let once = |of: &Batch, dims: &[usize]| {
                    dims.iter().try_fold(of.tensor.clone(), |t, &d| t.narrow(d as isize, 0, 1))?.to_leaf()
                };
                let (left, right) = (once(&a, repeated)?, once(&b, of)?);
                let g =
                    Batch::new([2, 3, 2, m, n], Memory { order: [0, 1, 3, 2, 4], ..plain }, dtype, device)?;
                left.matmul(&right)?.backward_with(&g.tensor).with_context(what)?;
                let grads = [
                    (&left, g.multiply(&b.transposed()), repeated),
                    (&right, a.transposed().multiply(&g), of),
                ];
                for (leaf, exact, repeated) in grads {
                    let grad = leaf.grad().with_context(what)?;
                    ensure_rounded(&grad, &sum_repeated(&exact, repeated), what)?;
                }
            }
        }
    }
    Ok(())
}

fn batches_with_few_rows_and_long_sums(device: &Device) -> Result<()> {
    let memory = [Memory::new([0, 2, 1, 3, 4], &[], 0), Memory::new([0, 1, 2, 4, 3], &[], 0)];
    for dtype in DTYPES {
        for [m, n, k] in [[16, 16, 1000], [8, 24, 520]] {
            let a = Batch::new([2, 2, 2, m, k], memory[0], dtype, device)?;
            let b = Batch::new([2, 2, 2, k, n], memory[1], dtype, device)?;
            let what = || format!("{dtype} {m} x {n} x {k}");
            ensure_rounded(&a.tensor.matmul(&b.tensor)?, &a.multiply(&b), what)?;
        }
    }
    Ok(())
}

fn captured_batches_have_the_same_bits(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let x = Tensor::randn([2, 64, 3, 64], DType::F32, device)?.to_dtype(dtype)?;
        let y = Tensor::randn([2, 1, 64, 64], DType::F32, device)?.to_dtype(dtype)?.to_leaf()?;
        let g = [Tensor::randn([2, 3, 64, 64], DType::F32, device)?.to_dtype(dtype)?];
        let step = || {
            let product = x.transpose(1, 2)?.matmul(&y)?;
            let options = GradOptions { grad_outputs: Some(&g), ..GradOptions::default() };
            let grad = autograd::grad(&[&product], &[&y], &options)?.swap_remove(0);
            Ok((product.detach(), grad))
        };
        let (product, grad) = step()?;
        let (product, grad) = (product.to_f64s()?, grad.to_f64s()?);
        let mut captured = device.capture(step)?;
        for _ in 0..2 {
            let (again, again_grad) = captured.replay()?;
            ensure!(again.to_f64s()? == product, "{dtype}: the captured product has other bits");
            ensure!(again_grad.to_f64s()? == grad, "{dtype}: the captured gradient has other bits");
        }
    }
    Ok(())
}

fn gradients_of_sums_have_gradients(device: &Device) -> Result<()> {
    for dtype in DTYPES {
        let leaf = |shape: [usize; 4]| {
            let count: usize = shape.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (i * 5 % 9) as f32 / 4.0 - 1.0).collect();
            Tensor::from_slice(&values, shape, device)?.to_dtype(dtype)?.to_leaf()
        };
        let (a, b, g) = (leaf([2, 1, 16, 16])?, leaf([2, 3, 16, 16])?, leaf([2, 3, 16, 16])?);
        let seeds = [g.detach()];
        let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::create_graph() };
        let grad = autograd::grad(&[a.matmul(&b)?], &[&a], &options)?.swap_remove(0);
        // The gradient of a is the sum of g · bᵀ over the batch. So the gradient of its sum to an element of b is the
        // sum of a column of g.
        let again = autograd::grad(&[grad.sum_all()?], &[&b], &GradOptions::default())?.swap_remove(0);
        let values = g.to_f64s()?;
        let column = |z: usize, col: usize| (0..16).map(|row| values[(z * 16 + row) * 16 + col]).sum::<f64>();
        let exact: Vec<f64> = (0..6 * 256).map(|i| column(i / 256, i % 16)).collect();
        ensure_rounded(&again, &exact, || format!("{dtype}: gradient of a gradient"))?;
    }
    Ok(())
}

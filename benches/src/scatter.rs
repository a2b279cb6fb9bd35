//! Scatter-adds, histograms, scans, sorts and sampling over long rows, with high and low contention.

use anyhow::Result;
use forebay::autograd;
use forebay::dtype::DType;
use forebay::tensor::Tensor;

use crate::timing::{Bench, MAX_CALLS};

pub(crate) fn scatter(b: &Bench<'_>) -> Result<()> {
    let small = if b.tiny { 64 } else { 1 };
    let words = (1 << 20) / small;
    let (many, rows, slots) = ((4 << 20) / small, 200_000 / small, 10_000 / small);
    let (values, long, side) = ((16 << 20) / small, (64 << 20) / small, 4096 / small);
    let (entries, width) = (32_768, 64);
    b.device.manual_seed(7);
    let ints = |n: usize, below: usize| Tensor::randint(0, below as i64, [n], DType::I32, b.device);
    let floats = |shape: &[usize]| Tensor::rand(shape, DType::F32, b.device);
    {
        let table = floats(&[entries, width])?.to_leaf()?;
        let seed = floats(&[words, width])?;
        let tokens =
            [("one", Tensor::full([words], 5.0, DType::I32, b.device)?), ("random", ints(words, entries)?)];
        for (name, index) in &tokens {
            let grad = || -> Result<Tensor> {
                // The time includes the forward pass: a gather of these rows.
                let picked = table.embedding(index, None)?;
                let product = picked.mul(&seed)?.sum_all()?;
                let mut grads =
                    autograd::grad(&[product], std::slice::from_ref(&table), &Default::default())?;
                Ok(grads.swap_remove(0))
            };
            bench_op(b, "embedding_grad", &format!("{words}x{width}, {name}"), 4 * words * width, &grad)?;
        }
    }
    {
        let x = floats(&[many])?;
        for below in [1, 1 << 20] {
            let index = ints(many, below)?;
            let out = Tensor::zeros([below], DType::F32, b.device)?;
            let op = || Ok(out.scatter_add(0, &index, &x)?);
            bench_op(b, "scatter_add", &format!("{many} to {below}"), 4 * many, &op)?;
        }
        let (x, index) = (floats(&[rows, width])?, ints(rows, slots)?);
        let out = Tensor::zeros([slots, width], DType::F32, b.device)?;
        let op = || Ok(out.index_add(0, &index, &x, 1.0)?);
        bench_op(b, "index_add", &format!("{rows}x{width} to {slots}"), 4 * rows * width, &op)?;
    }
    {
        let x = floats(&[values])?;
        for below in [10, 100_000] {
            let index = ints(values, below)?;
            bench_op(b, "bincount", &format!("{values} to {below}"), 4 * values, &|| {
                Ok(index.bincount(None, below)?)
            })?;
        }
        bench_op(b, "histc", &format!("{values} to 100"), 4 * values, &|| Ok(x.histc(100, 0.0, 1.0)?))?;
        bench_op(b, "sort", &values.to_string(), 4 * values, &|| Ok(x.sort(0, false)?.0))?;
    }
    {
        let x = floats(&[long])?;
        bench_op(b, "cumsum", &long.to_string(), 8 * long, &|| Ok(x.cumsum(0)?))?;
        let x = floats(&[side, side])?;
        for dim in [0, 1] {
            let op = || Ok(x.cumsum(dim)?);
            bench_op(b, "cumsum", &format!("{side}x{side}, dimension {dim}"), 8 * side * side, &op)?;
        }
    }
    for classes in [600, 50_000] {
        let (x, draws) = (floats(&[classes])?, words);
        let op = || Ok(x.multinomial(draws, true)?);
        bench_op(b, "multinomial", &format!("{draws} of {classes}"), 8 * draws, &op)?;
    }
    let (rows, classes) = (64, 50_000 / small);
    let x = floats(&[rows, classes])?;
    bench_op(b, "multinomial", &format!("{rows}x{classes}, 100 each once"), 4 * x.numel(), &|| {
        Ok(x.multinomial(100, false)?)
    })
}

fn bench_op(
    b: &Bench<'_>,
    name: &str,
    shape: &str,
    bytes: usize,
    op: &dyn Fn() -> Result<Tensor>,
) -> Result<()> {
    let t = b.time(MAX_CALLS, op)?;
    b.emit_rate(name, shape, "f32", &t, ("gbps", bytes as f64 / t.median_ms / 1e6));
    Ok(())
}

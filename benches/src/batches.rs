//! Batches of small products, whose operands are broadcast or transposed, in the shapes of a state-space model.

use anyhow::Result;
use forebay::autograd::{self, GradOptions};
use forebay::dtype::DType;
use forebay::tensor::Tensor;

use crate::timing::{Bench, MAX_CALLS};

pub(crate) fn batches(b: &Bench<'_>) -> Result<()> {
    let (batch, heads) = if b.tiny { (1, 2) } else { (8, 16) };
    // Steps of a chunk, elements of a head and of a state; chunks.
    let (side, chunks) = if b.tiny { (16, 2) } else { (64, 16) };
    let tensor =
        |shape: &[usize]| -> Result<Tensor> { Ok(Tensor::randn(shape, DType::BF16, b.device)?.to_leaf()?) };
    // Time in front of channels in memory, as after a convolution.
    let by_time = |t: &Tensor| -> Result<Tensor> {
        Ok(t.transpose(1, 2)?.reshape([batch, chunks, 1, side, side])?.detach().to_leaf()?)
    };
    let reads = by_time(&tensor(&[batch, side, chunks * side])?)?;
    let writes = by_time(&tensor(&[batch, side, chunks * side])?)?;
    let x = tensor(&[batch, chunks * side, heads * side])?
        .reshape([batch, chunks, side, heads, side])?
        .transpose(2, 3)?
        .detach()
        .to_leaf()?;
    let weights = tensor(&[batch, chunks, heads, side, side])?;
    let between = tensor(&[batch, heads, chunks, chunks])?;
    let states = tensor(&[batch, chunks, heads, side * side])?.transpose(1, 2)?.detach().to_leaf()?;
    let cases = [
        ("scores", reads.clone(), writes.transpose(-2, -1)?),
        ("inside", weights, x.clone()),
        ("states", writes.transpose(-2, -1)?, x),
        ("between", between, states.clone()),
        ("before", reads, states.unflatten(3, [side, side])?.transpose(1, 2)?),
    ];
    for (name, left, right) in cases {
        let (left, right) = (left.detach().to_leaf()?, right.detach().to_leaf()?);
        let y = left.detach().matmul(&right.detach())?;
        let seeds = [Tensor::randn(y.shape(), DType::BF16, b.device)?];
        let elements = left.numel() + right.numel() + y.numel();
        let shape = format!("{:?} x {:?}", left.shape(), right.shape());
        bench_products(b, name, &shape, 2 * elements, &|| Ok(left.detach().matmul(&right.detach())?))?;
        let product = left.matmul(&right)?;
        let options =
            GradOptions { grad_outputs: Some(&seeds), retain_graph: Some(true), ..GradOptions::default() };
        // Each gradient reads the seed and an operand, and writes the other operand's.
        let bytes = 2 * (elements + y.numel() + left.numel() + right.numel());
        bench_products(b, &format!("{name}, gradients"), &shape, bytes, &|| {
            Ok(autograd::grad(&[&product], &[&left, &right], &options)?.swap_remove(1))
        })?;
    }
    Ok(())
}

fn bench_products(
    b: &Bench<'_>,
    name: &str,
    shape: &str,
    bytes: usize,
    op: &dyn Fn() -> Result<Tensor>,
) -> Result<()> {
    let t = b.time(MAX_CALLS, op)?;
    b.emit_rate(&format!("batches: {name}"), shape, "bf16", &t, ("gbps", bytes as f64 / t.median_ms / 1e6));
    Ok(())
}

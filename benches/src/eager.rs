//! Host cost of one eager operation, launch included: tensors are so small that the device finishes first.

use anyhow::Result;
use forebay::dtype::DType;
use forebay::tensor::Tensor;

use crate::timing::Bench;

/// Operation on two square matrices.
type BinaryFn = fn(&Tensor, &Tensor) -> forebay::error::Result<Tensor>;

const OPS: [(&str, BinaryFn); 6] = [
    ("add", |x, y| x.add(y)),
    ("add_", |x, y| x.add_(y).map(|()| x.clone())),
    ("relu", |x, _| x.relu()),
    ("softmax", |x, _| x.softmax(-1)),
    ("sum", |x, _| x.sum([-1], false)),
    ("mm", |x, y| x.mm(y)),
];

pub(crate) fn eager(b: &Bench<'_>) -> Result<()> {
    let n = 64;
    let (x, y) = (b.random_tensor(&[n, n], DType::F32)?, b.random_tensor(&[n, n], DType::F32)?);
    for (name, op) in OPS {
        let t = b.time(1000, || Ok(op(&x, &y)?))?;
        b.emit_rate(
            &format!("eager_{name}"),
            &format!("{n}x{n}"),
            "f32",
            &t,
            ("ns_per_op", t.median_ms * 1e6),
        );
    }
    Ok(())
}

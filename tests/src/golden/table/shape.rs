//! Views, shapes and fills.

use forebay::dtype::DType;
use forebay::ops::{DiffOptions, Scalar};
use forebay::tensor::Tensor;

use super::{OpTable, single};
use crate::golden::args::Args;

fn signed(a: &Args<'_>, at: usize, name: &str) -> anyhow::Result<Vec<isize>> {
    Ok(match a.ints(at, name)? {
        Some(v) => v.into_iter().map(|n| n as isize).collect(),
        None => Vec::new(),
    })
}

pub(super) fn register(t: &mut OpTable) {
    t.register("reshape", |a| single(a.tensor(0)?.reshape(&signed(a, 1, "shape")?[..])));
    t.register("view", |a| single(a.tensor(0)?.view(&signed(a, 1, "shape")?[..])));
    t.register("ravel", |a| single(a.tensor(0)?.reshape([-1])));
    t.register("permute", |a| single(a.tensor(0)?.permute(&a.dims(1, "dims")?)));
    t.register("transpose", |a| {
        single(a.tensor(0)?.transpose(a.int(1, "dim0", 0)? as isize, a.int(2, "dim1", 0)? as isize))
    });
    t.register("t", |a| single(a.tensor(0)?.t()));
    t.register("mT", |a| single(a.tensor(0)?.transpose(-2, -1)));
    t.register("expand", |a| single(a.tensor(0)?.expand(&signed(a, 1, "size")?)));
    t.register("broadcast_to", |a| single(a.tensor(0)?.broadcast_to(&a.shape(1, "size")?)));
    t.register("unsqueeze", |a| single(a.tensor(0)?.unsqueeze(a.int(1, "dim", 0)? as isize)));
    t.register("squeeze", |a| {
        let dims = a.dims(1, "dim")?;
        let x = a.tensor(0)?;
        if a.get(1, "dim").is_none() {
            return single(x.squeeze_all());
        }
        // In descending order, so that smaller dimensions keep their index.
        let rank = x.rank() as isize;
        let mut dims: Vec<isize> = dims.iter().map(|&d| if d < 0 { d + rank } else { d }).collect();
        dims.sort_unstable();
        let mut out = x.clone();
        for d in dims.into_iter().rev() {
            out = out.squeeze(d)?;
        }
        Ok(vec![out])
    });
    t.register("flatten", |a| {
        single(a.tensor(0)?.flatten(a.int(1, "start_dim", 0)? as isize, a.int(2, "end_dim", -1)? as isize))
    });
    t.register("unflatten", |a| {
        single(a.tensor(0)?.unflatten(a.int(1, "dim", 0)? as isize, &signed(a, 2, "sizes")?))
    });
    t.register("narrow", |a| {
        let x = a.tensor(0)?;
        let dim = a.int(1, "dim", 0)? as isize;
        let start = match a.opt_tensor(2, "start") {
            Some(s) => s.item()? as i64,
            None => a.int(2, "start", 0)?,
        };
        let start = if start < 0 { start + x.dim(dim)? as i64 } else { start };
        single(x.narrow(dim, start as usize, a.int(3, "length", 0)? as usize))
    });
    t.register("select", |a| {
        single(a.tensor(0)?.select(a.int(1, "dim", 0)? as isize, a.int(2, "index", 0)? as isize))
    });
    t.register("slice", |a| {
        let x = a.tensor(0)?;
        let dim = a.int(1, "dim", 0)? as isize;
        let extent = x.dim(dim)? as i64;
        let index = |n: i64| (if n < 0 { n + extent } else { n }).clamp(0, extent) as usize;
        let start = index(a.int(2, "start", 0)?);
        let stop = index(a.opt_int(3, "end")?.unwrap_or(extent)).max(start);
        single(x.slice_dim(dim, start, stop, a.int(4, "step", 1)? as usize))
    });
    t.register("diagonal", |a| {
        single(a.tensor(0)?.diagonal(
            a.int(1, "offset", 0)? as isize,
            a.int(2, "dim1", 0)? as isize,
            a.int(3, "dim2", 1)? as isize,
        ))
    });
    t.register("chunk", |a| {
        Ok(a.tensor(0)?.chunk(a.int(1, "chunks", 1)? as usize, a.int(2, "dim", 0)? as isize)?)
    });
    t.register("split", |a| {
        let dim = a.int(2, "dim", 0)? as isize;
        if a.variant() == "list_args" {
            return Ok(a.tensor(0)?.split_with_sizes(&a.shape(1, "split_size")?, dim)?);
        }
        Ok(a.tensor(0)?.split(a.int(1, "split_size", 1)? as usize, dim)?)
    });
    t.register("split_with_sizes", |a| {
        Ok(a.tensor(0)?.split_with_sizes(&a.shape(1, "split_sizes")?, a.int(2, "dim", 0)? as isize)?)
    });
    t.register("tensor_split", |a| {
        let (x, dim) = (a.tensor(0)?, a.int(2, "dim", 0)? as isize);
        if let Some(indices) = a.opt_tensor(1, "tensor_indices_or_sections") {
            let values: Vec<isize> = indices.to_f64s()?.into_iter().map(|n| n as isize).collect();
            return Ok(match indices.rank() {
                0 => x.tensor_split(values[0] as usize, dim)?,
                _ => x.tensor_split_at(&values, dim)?,
            });
        }
        if a.get(1, "sections").is_some_and(|v| v.is_i64()) {
            return Ok(x.tensor_split(a.int(1, "sections", 1)? as usize, dim)?);
        }
        Ok(x.tensor_split_at(&a.dims(1, "indices")?, dim)?)
    });
    t.register("diff", |a| {
        let (n, dim) = (usize::try_from(a.int(1, "n", 1)?)?, a.int(2, "dim", -1)? as isize);
        single(a.tensor(0)?.diff(
            n,
            dim,
            &DiffOptions { prepend: a.opt_tensor(3, "prepend"), append: a.opt_tensor(4, "append") },
        ))
    });
    t.register("unbind", |a| Ok(a.tensor(0)?.unbind(a.int(1, "dim", 0)? as isize)?));
    t.register("movedim", |a| {
        single(a.tensor(0)?.movedim(&a.dims(1, "source")?, &a.dims(2, "destination")?))
    });
    let like: super::GoldenFn = |a| {
        let x = a.tensor(0)?;
        single(Tensor::zeros(x.shape(), a.dtype(9, "dtype")?.unwrap_or(x.dtype()), x.device()))
    };
    t.register("zeros_like", like);
    t.register("ones_like", |a| {
        let x = a.tensor(0)?;
        single(Tensor::ones(x.shape(), a.dtype(9, "dtype")?.unwrap_or(x.dtype()), x.device()))
    });
    t.register("full_like", |a| {
        let x = a.tensor(0)?;
        let dtype = a.dtype(9, "dtype")?.unwrap_or(x.dtype());
        single(Tensor::full(x.shape(), a.float(1, "fill_value", 0.0)?, dtype, x.device()))
    });
    t.register("new_zeros", |a| {
        let x = a.tensor(0)?;
        single(Tensor::zeros(&a.shape(1, "size")?, a.dtype(9, "dtype")?.unwrap_or(x.dtype()), x.device()))
    });
    t.register("full", |a| {
        // PyTorch derives the type from the value if no type is specified.
        let natural = match a.scalar(1, "fill_value")? {
            Some(Scalar::Bool(_)) => DType::Bool,
            Some(Scalar::Int(_)) => DType::I64,
            _ => DType::F32,
        };
        let dtype = a.dtype(9, "dtype")?.unwrap_or(natural);
        single(Tensor::full(&a.shape(0, "size")?, a.float(1, "fill_value", 0.0)?, dtype, a.device()))
    });
}

//! Views, shapes and fills.

use forebay::dtype::DType;
use forebay::ops::Scalar;
use forebay::tensor::Tensor;

use super::{Table, one};
use crate::golden::args::Args;

fn signed(a: &Args<'_>, at: usize, name: &str) -> anyhow::Result<Vec<isize>> {
    Ok(match a.ints(at, name)? {
        Some(v) => v.into_iter().map(|n| n as isize).collect(),
        None => Vec::new(),
    })
}

pub(super) fn register(t: &mut Table) {
    t.op("reshape", |a| one(a.t(0)?.reshape(&signed(a, 1, "shape")?[..])));
    t.op("view", |a| one(a.t(0)?.view(&signed(a, 1, "shape")?[..])));
    t.op("ravel", |a| one(a.t(0)?.reshape([-1])));
    t.op("permute", |a| one(a.t(0)?.permute(&a.dims(1, "dims")?)));
    t.op("transpose", |a| one(a.t(0)?.transpose(a.i(1, "dim0", 0)? as isize, a.i(2, "dim1", 0)? as isize)));
    t.op("t", |a| one(a.t(0)?.t()));
    t.op("mT", |a| one(a.t(0)?.transpose(-2, -1)));
    t.op("expand", |a| one(a.t(0)?.expand(&signed(a, 1, "size")?)));
    t.op("broadcast_to", |a| one(a.t(0)?.broadcast_to(&a.shape(1, "size")?)));
    t.op("unsqueeze", |a| one(a.t(0)?.unsqueeze(a.i(1, "dim", 0)? as isize)));
    t.op("squeeze", |a| {
        let dims = a.dims(1, "dim")?;
        let x = a.t(0)?;
        if a.get(1, "dim").is_none() {
            return one(x.squeeze_all());
        }
        // From the last one on, so that the earlier ones keep their numbers.
        let rank = x.rank() as isize;
        let mut dims: Vec<isize> = dims.iter().map(|&d| if d < 0 { d + rank } else { d }).collect();
        dims.sort_unstable();
        let mut out = x.clone();
        for d in dims.into_iter().rev() {
            out = out.squeeze(d)?;
        }
        Ok(vec![out])
    });
    t.op("flatten", |a| {
        one(a.t(0)?.flatten(a.i(1, "start_dim", 0)? as isize, a.i(2, "end_dim", -1)? as isize))
    });
    t.op("unflatten", |a| one(a.t(0)?.unflatten(a.i(1, "dim", 0)? as isize, &signed(a, 2, "sizes")?)));
    t.op("narrow", |a| {
        let x = a.t(0)?;
        let dim = a.i(1, "dim", 0)? as isize;
        let start = match a.opt_t(2, "start") {
            Some(s) => s.item()? as i64,
            None => a.i(2, "start", 0)?,
        };
        let start = if start < 0 { start + x.dim(dim)? as i64 } else { start };
        one(x.narrow(dim, start as usize, a.i(3, "length", 0)? as usize))
    });
    t.op("select", |a| one(a.t(0)?.select(a.i(1, "dim", 0)? as isize, a.i(2, "index", 0)? as isize)));
    t.op("slice", |a| {
        let x = a.t(0)?;
        let dim = a.i(1, "dim", 0)? as isize;
        let extent = x.dim(dim)? as i64;
        let place = |n: i64| (if n < 0 { n + extent } else { n }).clamp(0, extent) as usize;
        let start = place(a.i(2, "start", 0)?);
        let stop = place(a.opt_i(3, "end")?.unwrap_or(extent)).max(start);
        one(x.slice_dim(dim, start, stop, a.i(4, "step", 1)? as usize))
    });
    t.op("diagonal", |a| {
        one(a.t(0)?.diagonal(
            a.i(1, "offset", 0)? as isize,
            a.i(2, "dim1", 0)? as isize,
            a.i(3, "dim2", 1)? as isize,
        ))
    });
    t.op("chunk", |a| Ok(a.t(0)?.chunk(a.i(1, "chunks", 1)? as usize, a.i(2, "dim", 0)? as isize)?));
    t.op("split", |a| {
        let dim = a.i(2, "dim", 0)? as isize;
        if a.variant() == "list_args" {
            return Ok(a.t(0)?.split_with_sizes(&a.shape(1, "split_size")?, dim)?);
        }
        Ok(a.t(0)?.split(a.i(1, "split_size", 1)? as usize, dim)?)
    });
    t.op("split_with_sizes", |a| {
        Ok(a.t(0)?.split_with_sizes(&a.shape(1, "split_sizes")?, a.i(2, "dim", 0)? as isize)?)
    });
    t.op("tensor_split", |a| {
        let (x, dim) = (a.t(0)?, a.i(2, "dim", 0)? as isize);
        if let Some(indices) = a.opt_t(1, "tensor_indices_or_sections") {
            let numbers: Vec<isize> = indices.to_f64s()?.into_iter().map(|n| n as isize).collect();
            return Ok(match indices.rank() {
                0 => x.tensor_split(numbers[0] as usize, dim)?,
                _ => x.tensor_split_at(&numbers, dim)?,
            });
        }
        if a.get(1, "sections").is_some_and(|v| v.is_i64()) {
            return Ok(x.tensor_split(a.i(1, "sections", 1)? as usize, dim)?);
        }
        Ok(x.tensor_split_at(&a.dims(1, "indices")?, dim)?)
    });
    t.op("diff", |a| {
        let (n, dim) = (usize::try_from(a.i(1, "n", 1)?)?, a.i(2, "dim", -1)? as isize);
        one(a.t(0)?.diff(n, dim, a.opt_t(3, "prepend"), a.opt_t(4, "append")))
    });
    t.op("unbind", |a| Ok(a.t(0)?.unbind(a.i(1, "dim", 0)? as isize)?));
    t.op("movedim", |a| one(a.t(0)?.movedim(&a.dims(1, "source")?, &a.dims(2, "destination")?)));
    let like: super::Op = |a| {
        let x = a.t(0)?;
        one(Tensor::zeros(x.shape(), a.dtype(9, "dtype")?.unwrap_or(x.dtype()), x.device()))
    };
    t.op("zeros_like", like);
    t.op("ones_like", |a| {
        let x = a.t(0)?;
        one(Tensor::ones(x.shape(), a.dtype(9, "dtype")?.unwrap_or(x.dtype()), x.device()))
    });
    t.op("full_like", |a| {
        let x = a.t(0)?;
        let dtype = a.dtype(9, "dtype")?.unwrap_or(x.dtype());
        one(Tensor::full(x.shape(), a.f(1, "fill_value", 0.0)?, dtype, x.device()))
    });
    t.op("new_zeros", |a| {
        let x = a.t(0)?;
        one(Tensor::zeros(&a.shape(1, "size")?, a.dtype(9, "dtype")?.unwrap_or(x.dtype()), x.device()))
    });
    t.op("full", |a| {
        // PyTorch takes the type from the number, where none is named.
        let natural = match a.scalar(1, "fill_value")? {
            Some(Scalar::Bool(_)) => DType::Bool,
            Some(Scalar::Int(_)) => DType::I64,
            _ => DType::F32,
        };
        let dtype = a.dtype(9, "dtype")?.unwrap_or(natural);
        one(Tensor::full(&a.shape(0, "size")?, a.f(1, "fill_value", 0.0)?, dtype, a.device()))
    });
}

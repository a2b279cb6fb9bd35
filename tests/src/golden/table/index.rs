//! Choosing, placing, joining and padding.

use anyhow::Result;
use forebay::dtype::DType;
use forebay::ops::{Lookup, PadMode, Scalar, ScatterReduce, cat, stack};
use forebay::tensor::Tensor;

use super::{Table, one};
use crate::golden::args::Args;

/// What `max_norm` does to a table before rows are looked up.
pub(super) fn renormed(a: &Args<'_>, table: &Tensor, index: &Tensor) -> Result<()> {
    match a.get(usize::MAX, "max_norm") {
        Some(_) => {
            let (most, p) = (a.f(usize::MAX, "max_norm", 0.0)?, a.f(usize::MAX, "norm_type", 2.0)?);
            Ok(table.embedding_renorm_(index, most, p)?)
        }
        None => Ok(()),
    }
}

/// A number, or a tensor of one.
fn bound(a: &Args<'_>, at: usize, name: &str) -> Result<f64> {
    match a.opt_t(at, name) {
        Some(v) => Ok(v.item()?),
        None => a.f(at, name, 0.0),
    }
}

/// PyTorch's windows are symmetric unless they are asked not to be.
fn windows(t: &mut Table) {
    fn of(a: &Args<'_>) -> Result<(usize, bool, DType)> {
        let dtype = a.dtype(usize::MAX, "dtype")?.unwrap_or(DType::F32);
        Ok((usize::try_from(a.i(0, "M", 0)?)?, !a.b(usize::MAX, "sym", true), dtype))
    }
    t.op("signal.windows.hann", |a| {
        let (n, periodic, dtype) = of(a)?;
        one(Tensor::hann_window(n, periodic, dtype, a.device()))
    });
    t.op("signal.windows.hamming", |a| {
        let (n, periodic, dtype) = of(a)?;
        one(Tensor::hamming_window(n, periodic, 0.54, 0.46, dtype, a.device()))
    });
    t.op("signal.windows.blackman", |a| {
        let (n, periodic, dtype) = of(a)?;
        one(Tensor::blackman_window(n, periodic, dtype, a.device()))
    });
    t.op("signal.windows.bartlett", |a| {
        let (n, periodic, dtype) = of(a)?;
        one(Tensor::bartlett_window(n, periodic, dtype, a.device()))
    });
    t.op("signal.windows.kaiser", |a| {
        let (n, periodic, dtype) = of(a)?;
        one(Tensor::kaiser_window(n, periodic, a.f(usize::MAX, "beta", 12.0)?, dtype, a.device()))
    });
    t.op("signal.windows.gaussian", |a| {
        let (n, periodic, dtype) = of(a)?;
        one(Tensor::gaussian_window(n, a.f(usize::MAX, "std", 1.0)?, periodic, dtype, a.device()))
    });
    t.op("signal.windows.general_cosine", |a| {
        let (n, periodic, dtype) = of(a)?;
        let terms = a.floats(usize::MAX, "a")?.unwrap_or_default();
        one(Tensor::general_cosine_window(n, &terms, periodic, dtype, a.device()))
    });
}

pub(super) fn register(t: &mut Table) {
    t.op("gather", |a| one(a.t(0)?.gather(a.i(1, "dim", 0)? as isize, a.t(2)?)));
    t.op("index_select", |a| one(a.t(0)?.index_select(a.i(1, "dim", 0)? as isize, a.t(2)?)));
    t.op("take_along_dim", |a| match a.opt_i(2, "dim")? {
        Some(d) => one(a.t(0)?.take_along_dim(a.t(1)?, d as isize)),
        None => one(a.t(0)?.reshape([-1])?.gather(0, &a.t(1)?.reshape([-1])?)),
    });
    t.op("scatter", |a| {
        let dim = a.i(1, "dim", 0)? as isize;
        if let Some(reduce) = a.get(9, "reduce").and_then(|v| v.as_str()) {
            let (x, index) = (a.t(0)?, a.t(2)?);
            let src = match a.opt_t(3, "src") {
                Some(src) => src.clone(),
                None => Tensor::full(index.shape(), a.f(3, "value", 0.0)?, x.dtype(), a.device())?,
            };
            let how = if reduce == "add" { ScatterReduce::Sum } else { ScatterReduce::Prod };
            return one(x.scatter_reduce(dim, index, &src, how, true));
        }
        match a.opt_t(3, "src") {
            Some(src) => one(a.t(0)?.scatter(dim, a.t(2)?, src)),
            None => one(a.t(0)?.scatter_value(dim, a.t(2)?, a.f(3, "value", 0.0)?)),
        }
    });
    t.op("scatter_add", |a| one(a.t(0)?.scatter_add(a.i(1, "dim", 0)? as isize, a.t(2)?, a.t(3)?)));
    t.op("index_add", |a| {
        one(a.t(0)?.index_add(a.i(1, "dim", 0)? as isize, a.t(2)?, a.t(3)?, a.f(4, "alpha", 1.0)?))
    });
    t.op("index_fill", |a| {
        let dim = a.i(1, "dim", 0)? as isize;
        one(a.t(0)?.index_fill(dim, a.t(2)?, a.operand(3, "value", Scalar::Int(0))?))
    });
    t.op("nn.functional.embedding", |a| {
        // PyTorch's function takes the indices first; the database the weight.
        let (weight, index) =
            if a.t(0)?.dtype().is_float() { (a.t(0)?, a.t(1)?) } else { (a.t(1)?, a.t(0)?) };
        let padding =
            a.opt_i(2, "padding_idx")?.map(|p| if p < 0 { p + weight.dim(0).unwrap_or(0) as i64 } else { p });
        renormed(a, weight, index)?;
        let scale_grad_by_freq = a.b(usize::MAX, "scale_grad_by_freq", false);
        one(weight
            .embedding_with(index, Lookup { padding_idx: padding.map(|p| p as usize), scale_grad_by_freq }))
    });
    t.op("cat", |a| one(cat(&a.tensors(0)?, a.i(1, "dim", 0)? as isize)));
    t.op("stack", |a| one(stack(&a.tensors(0)?, a.i(1, "dim", 0)? as isize)));
    t.op("flip", |a| one(a.t(0)?.flip(&a.dims(1, "dims")?)));
    t.op("roll", |a| {
        let x = a.t(0)?;
        let (shifts, dims) = (a.dims(1, "shifts")?, a.dims(2, "dims")?);
        if dims.is_empty() {
            let &[shift] = shifts.as_slice() else {
                anyhow::bail!("{} shifts of all elements", shifts.len())
            };
            return one(x.reshape([-1])?.roll(shift, 0)?.reshape(x.shape()));
        }
        anyhow::ensure!(shifts.len() == dims.len(), "{} shifts, {} dimensions", shifts.len(), dims.len());
        let mut out = x.clone();
        for (s, d) in shifts.iter().zip(&dims) {
            out = out.roll(*s, *d)?;
        }
        Ok(vec![out])
    });
    t.op("repeat", |a| one(a.t(0)?.repeat(&a.shape(1, "repeats")?)));
    t.op("repeat_interleave", |a| {
        if let Some(repeats) = a.opt_t(1, "repeats") {
            let (x, dim) = match a.opt_i(2, "dim")? {
                Some(d) => (a.t(0)?.clone(), d as isize),
                None => (a.t(0)?.reshape([-1])?, 0),
            };
            let size = a.opt_i(3, "output_size")?.map(|n| n as usize);
            return one(x.repeat_interleave_by(repeats, dim, size));
        }
        let n = a.i(1, "repeats", 1)? as usize;
        match a.opt_i(2, "dim")? {
            Some(d) => one(a.t(0)?.repeat_interleave(n, d as isize)),
            None => one(a.t(0)?.reshape([-1])?.repeat_interleave(n, 0)),
        }
    });
    let pad: super::Op = |a| {
        let pads = a.dims(1, "pad")?;
        let mode = match a.s(2, "mode", "constant") {
            "reflect" => PadMode::Reflect,
            "replicate" => PadMode::Replicate,
            "circular" => PadMode::Circular,
            _ => PadMode::Constant(a.f(3, "value", 0.0)?),
        };
        one(a.t(0)?.pad(&pads, mode))
    };
    t.op("nn.functional.pad", pad);
    t.op("constant_pad_nd", |a| {
        one(a.t(0)?.pad(&a.dims(1, "pad")?, PadMode::Constant(a.f(2, "value", 0.0)?)))
    });
    t.op("tril", |a| one(a.t(0)?.tril(a.i(1, "diagonal", 0)? as isize)));
    t.op("triu", |a| one(a.t(0)?.triu(a.i(1, "diagonal", 0)? as isize)));
    t.op("arange", |a| {
        // Numbers that are all integers give integers.
        let whole = |at| !matches!(a.scalar(at, ["start", "end", "step"][at]), Ok(Some(Scalar::Float(_))));
        let natural = if (0..3).all(whole) { DType::I64 } else { DType::F32 };
        let dtype = a.dtype(9, "dtype")?.unwrap_or(natural);
        let (start, end) = match a.get(1, "end") {
            Some(_) => (a.f(0, "start", 0.0)?, a.f(1, "end", 0.0)?),
            None => (0.0, a.f(0, "end", 0.0)?),
        };
        let step = a.f(2, "step", 1.0)?;
        one(Tensor::arange(start, end, step, dtype, a.device()))
    });
    t.op("linspace", |a| {
        let (from, to) = (bound(a, 0, "start")?, bound(a, 1, "end")?);
        let dtype = a.dtype(9, "dtype")?.unwrap_or(DType::F32);
        one(Tensor::linspace(from, to, a.i(2, "steps", 0)? as usize, dtype, a.device()))
    });
    t.op("logspace", |a| {
        let (from, to) = (bound(a, 0, "start")?, bound(a, 1, "end")?);
        let (steps, base) = (a.i(2, "steps", 0)? as usize, a.f(3, "base", 10.0)?);
        let dtype = a.dtype(9, "dtype")?.unwrap_or(DType::F32);
        one(Tensor::logspace(from, to, steps, base, dtype, a.device()))
    });
    windows(t);
    t.op("eye", |a| {
        let rows = usize::try_from(a.i(0, "n", 0)?)?;
        let cols = a.opt_i(1, "m")?.map_or(Ok(rows), usize::try_from)?;
        one(Tensor::eye(rows, cols, a.dtype(9, "dtype")?.unwrap_or(DType::F32), a.device()))
    });
    t.op("nn.functional.pixel_shuffle", |a| {
        one(a.t(0)?.pixel_shuffle(a.i(1, "upscale_factor", 1)? as usize))
    });
    t.op("nn.functional.pixel_unshuffle", |a| {
        one(a.t(0)?.pixel_unshuffle(a.i(1, "downscale_factor", 1)? as usize))
    });
}

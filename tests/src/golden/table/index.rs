//! Selecting, scattering, joining and padding.

use anyhow::Result;
use forebay::dtype::DType;
use forebay::ops::{EmbeddingOptions, PadMode, Scalar, ScatterReduce, cat, stack};
use forebay::tensor::Tensor;

use super::{OpTable, single};
use crate::golden::args::Args;

/// Applies `max_norm` to a table before the lookup.
pub(super) fn renormed(a: &Args<'_>, table: &Tensor, index: &Tensor) -> Result<()> {
    match a.get(usize::MAX, "max_norm") {
        Some(_) => {
            let (max_norm, p) =
                (a.float(usize::MAX, "max_norm", 0.0)?, a.float(usize::MAX, "norm_type", 2.0)?);
            Ok(table.embedding_renorm_(index, max_norm, p)?)
        }
        None => Ok(()),
    }
}

/// Returns a number, or the value of a one-element tensor.
fn bound(a: &Args<'_>, at: usize, name: &str) -> Result<f64> {
    match a.opt_tensor(at, name) {
        Some(v) => Ok(v.item()?),
        None => a.float(at, name, 0.0),
    }
}

/// PyTorch's window functions, which are symmetric by default in this namespace.
fn windows(t: &mut OpTable) {
    fn of(a: &Args<'_>) -> Result<(usize, bool, DType)> {
        let dtype = a.dtype(usize::MAX, "dtype")?.unwrap_or(DType::F32);
        Ok((usize::try_from(a.int(0, "M", 0)?)?, !a.flag(usize::MAX, "sym", true), dtype))
    }
    t.register("signal.windows.hann", |a| {
        let (n, periodic, dtype) = of(a)?;
        single(Tensor::hann_window(n, periodic, dtype, a.device()))
    });
    t.register("signal.windows.hamming", |a| {
        let (n, periodic, dtype) = of(a)?;
        single(Tensor::hamming_window(n, periodic, dtype, a.device()))
    });
    t.register("signal.windows.blackman", |a| {
        let (n, periodic, dtype) = of(a)?;
        single(Tensor::blackman_window(n, periodic, dtype, a.device()))
    });
    t.register("signal.windows.bartlett", |a| {
        let (n, periodic, dtype) = of(a)?;
        single(Tensor::bartlett_window(n, periodic, dtype, a.device()))
    });
    t.register("signal.windows.kaiser", |a| {
        let (n, periodic, dtype) = of(a)?;
        single(Tensor::kaiser_window(n, periodic, a.float(usize::MAX, "beta", 12.0)?, dtype, a.device()))
    });
    t.register("signal.windows.gaussian", |a| {
        let (n, periodic, dtype) = of(a)?;
        single(Tensor::gaussian_window(n, a.float(usize::MAX, "std", 1.0)?, periodic, dtype, a.device()))
    });
    t.register("signal.windows.general_cosine", |a| {
        let (n, periodic, dtype) = of(a)?;
        let terms = a.floats(usize::MAX, "a")?.unwrap_or_default();
        single(Tensor::general_cosine_window(n, &terms, periodic, dtype, a.device()))
    });
}

pub(super) fn register(t: &mut OpTable) {
    t.register("gather", |a| single(a.tensor(0)?.gather(a.int(1, "dim", 0)? as isize, a.tensor(2)?)));
    t.register("index_select", |a| {
        single(a.tensor(0)?.index_select(a.int(1, "dim", 0)? as isize, a.tensor(2)?))
    });
    t.register("take_along_dim", |a| match a.opt_int(2, "dim")? {
        Some(d) => single(a.tensor(0)?.take_along_dim(a.tensor(1)?, d as isize)),
        None => single(a.tensor(0)?.reshape([-1])?.gather(0, &a.tensor(1)?.reshape([-1])?)),
    });
    t.register("scatter", |a| {
        let dim = a.int(1, "dim", 0)? as isize;
        if let Some(reduce) = a.get(9, "reduce").and_then(|v| v.as_str()) {
            let (x, index) = (a.tensor(0)?, a.tensor(2)?);
            let src = match a.opt_tensor(3, "src") {
                Some(src) => src.clone(),
                None => Tensor::full(index.shape(), a.float(3, "value", 0.0)?, x.dtype(), a.device())?,
            };
            let how = if reduce == "add" { ScatterReduce::Sum } else { ScatterReduce::Prod };
            return single(x.scatter_reduce(dim, index, &src, how, true));
        }
        match a.opt_tensor(3, "src") {
            Some(src) => single(a.tensor(0)?.scatter(dim, a.tensor(2)?, src)),
            None => single(a.tensor(0)?.scatter_value(dim, a.tensor(2)?, a.float(3, "value", 0.0)?)),
        }
    });
    t.register("scatter_add", |a| {
        single(a.tensor(0)?.scatter_add(a.int(1, "dim", 0)? as isize, a.tensor(2)?, a.tensor(3)?))
    });
    t.register("index_add", |a| {
        single(a.tensor(0)?.index_add(
            a.int(1, "dim", 0)? as isize,
            a.tensor(2)?,
            a.tensor(3)?,
            a.float(4, "alpha", 1.0)?,
        ))
    });
    t.register("index_fill", |a| {
        let dim = a.int(1, "dim", 0)? as isize;
        single(a.tensor(0)?.index_fill(dim, a.tensor(2)?, a.operand(3, "value", Scalar::Int(0))?))
    });
    t.register("nn.functional.embedding", |a| {
        // PyTorch's function takes the indices first, the database the weight.
        let (weight, index) = if a.tensor(0)?.dtype().is_float() {
            (a.tensor(0)?, a.tensor(1)?)
        } else {
            (a.tensor(1)?, a.tensor(0)?)
        };
        let padding = a
            .opt_int(2, "padding_idx")?
            .map(|p| if p < 0 { p + weight.dim(0).unwrap_or(0) as i64 } else { p });
        renormed(a, weight, index)?;
        let scale_grad_by_freq = a.flag(usize::MAX, "scale_grad_by_freq", false);
        single(weight.embedding_with(
            index,
            &EmbeddingOptions { padding_idx: padding.map(|p| p as usize), scale_grad_by_freq },
        ))
    });
    t.register("cat", |a| single(cat(&a.tensors(0)?, a.int(1, "dim", 0)? as isize)));
    t.register("stack", |a| single(stack(&a.tensors(0)?, a.int(1, "dim", 0)? as isize)));
    t.register("flip", |a| single(a.tensor(0)?.flip(&a.dims(1, "dims")?)));
    t.register("roll", |a| {
        let x = a.tensor(0)?;
        let (shifts, dims) = (a.dims(1, "shifts")?, a.dims(2, "dims")?);
        if dims.is_empty() {
            let &[shift] = shifts.as_slice() else {
                anyhow::bail!("{} shifts of all elements", shifts.len())
            };
            return single(x.reshape([-1])?.roll(shift, 0)?.reshape(x.shape()));
        }
        anyhow::ensure!(shifts.len() == dims.len(), "{} shifts, {} dimensions", shifts.len(), dims.len());
        let mut out = x.clone();
        for (s, d) in shifts.iter().zip(&dims) {
            out = out.roll(*s, *d)?;
        }
        Ok(vec![out])
    });
    t.register("repeat", |a| single(a.tensor(0)?.repeat(&a.shape(1, "repeats")?)));
    t.register("repeat_interleave", |a| {
        if let Some(repeats) = a.opt_tensor(1, "repeats") {
            let (x, dim) = match a.opt_int(2, "dim")? {
                Some(d) => (a.tensor(0)?.clone(), d as isize),
                None => (a.tensor(0)?.reshape([-1])?, 0),
            };
            let size = a.opt_int(3, "output_size")?.map(|n| n as usize);
            return single(x.repeat_interleave_by(repeats, dim, size));
        }
        let n = a.int(1, "repeats", 1)? as usize;
        match a.opt_int(2, "dim")? {
            Some(d) => single(a.tensor(0)?.repeat_interleave(n, d as isize)),
            None => single(a.tensor(0)?.reshape([-1])?.repeat_interleave(n, 0)),
        }
    });
    let pad: super::GoldenFn = |a| {
        let pads = a.dims(1, "pad")?;
        let mode = match a.string(2, "mode", "constant") {
            "reflect" => PadMode::Reflect,
            "replicate" => PadMode::Replicate,
            "circular" => PadMode::Circular,
            _ => PadMode::Constant(a.float(3, "value", 0.0)?),
        };
        single(a.tensor(0)?.pad(&pads, mode))
    };
    t.register("nn.functional.pad", pad);
    t.register("constant_pad_nd", |a| {
        single(a.tensor(0)?.pad(&a.dims(1, "pad")?, PadMode::Constant(a.float(2, "value", 0.0)?)))
    });
    t.register("tril", |a| single(a.tensor(0)?.tril(a.int(1, "diagonal", 0)? as isize)));
    t.register("triu", |a| single(a.tensor(0)?.triu(a.int(1, "diagonal", 0)? as isize)));
    t.register("arange", |a| {
        // If all arguments are integers, the result is an integer tensor.
        let whole = |at| !matches!(a.scalar(at, ["start", "end", "step"][at]), Ok(Some(Scalar::Float(_))));
        let natural = if (0..3).all(whole) { DType::I64 } else { DType::F32 };
        let dtype = a.dtype(9, "dtype")?.unwrap_or(natural);
        let (start, end) = match a.get(1, "end") {
            Some(_) => (a.float(0, "start", 0.0)?, a.float(1, "end", 0.0)?),
            None => (0.0, a.float(0, "end", 0.0)?),
        };
        let step = a.float(2, "step", 1.0)?;
        single(Tensor::arange(start, end, step, dtype, a.device()))
    });
    t.register("linspace", |a| {
        let (from, to) = (bound(a, 0, "start")?, bound(a, 1, "end")?);
        let dtype = a.dtype(9, "dtype")?.unwrap_or(DType::F32);
        single(Tensor::linspace(from, to, a.int(2, "steps", 0)? as usize, dtype, a.device()))
    });
    t.register("logspace", |a| {
        let (from, to) = (bound(a, 0, "start")?, bound(a, 1, "end")?);
        let (steps, base) = (a.int(2, "steps", 0)? as usize, a.float(3, "base", 10.0)?);
        let dtype = a.dtype(9, "dtype")?.unwrap_or(DType::F32);
        single(Tensor::logspace(from, to, steps, base, dtype, a.device()))
    });
    windows(t);
    t.register("eye", |a| {
        let rows = usize::try_from(a.int(0, "n", 0)?)?;
        let cols = a.opt_int(1, "m")?.map_or(Ok(rows), usize::try_from)?;
        single(Tensor::eye(rows, cols, a.dtype(9, "dtype")?.unwrap_or(DType::F32), a.device()))
    });
    t.register("nn.functional.pixel_shuffle", |a| {
        single(a.tensor(0)?.pixel_shuffle(a.int(1, "upscale_factor", 1)? as usize))
    });
    t.register("nn.functional.pixel_unshuffle", |a| {
        single(a.tensor(0)?.pixel_unshuffle(a.int(1, "downscale_factor", 1)? as usize))
    });
}

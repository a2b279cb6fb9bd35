//! Pooling.

use anyhow::bail;
use forebay::ops::Pool2dOptions;
use forebay::tensor::Tensor;

use super::{OpTable, missing_op, single};
use crate::golden::args::Args;

/// Returns the pooling window of a call; `ends` is the number of spatial dimensions.
fn window(a: &Args<'_>, ends: usize) -> anyhow::Result<Pool2dOptions> {
    let pair = |at: usize, name: &str, rest: usize| -> anyhow::Result<Option<[usize; 2]>> {
        let v = a.shape(at, name).or_else(|_| a.int(at, name, 0).map(|n| vec![n as usize]))?;
        let v =
            if a.get(at, name).is_some_and(|x| x.is_i64()) { vec![a.int(at, name, 0)? as usize] } else { v };
        Ok(match (v.as_slice(), ends) {
            ([], _) => None,
            ([n], 1) => Some([rest, *n]),
            ([n], _) => Some([*n, *n]),
            (&[h, w], _) => Some([h, w]),
            (v, _) => bail!("{name} of {} numbers", v.len()),
        })
    };
    let kernel = pair(1, "kernel_size", 1)?.unwrap_or([1, 1]);
    let mut w = Pool2dOptions::from_kernel(kernel);
    if let Some(stride) = pair(2, "stride", 1)? {
        w.stride = stride;
    }
    if let Some(padding) = pair(3, "padding", 0)? {
        w.padding = padding;
    }
    Ok(w)
}

fn max(a: &Args<'_>, ends: usize) -> anyhow::Result<Vec<Tensor>> {
    let mut w = window(a, ends)?;
    if let Some(d) = a.ints(4, "dilation")? {
        let d: Vec<usize> = d.into_iter().map(|n| n as usize).collect();
        w.dilation = match (d.as_slice(), ends) {
            ([n], 1) => [1, *n],
            ([n], _) => [*n, *n],
            (&[h, w], _) => [h, w],
            (d, _) => bail!("dilation of {} numbers", d.len()),
        };
    }
    w.ceil_mode = a.flag(5, "ceil_mode", false);
    let x = if ends == 1 { a.tensor(0)?.unsqueeze(-2)? } else { a.tensor(0)?.clone() };
    let flat = |t: Tensor| if ends == 1 { t.squeeze(-2) } else { Ok(t) };
    if a.flag(6, "return_indices", false) {
        let (out, indices) = x.max_pool2d_with_indices(w)?;
        return Ok(vec![flat(out)?, flat(indices)?]);
    }
    single(flat(x.max_pool2d(w)?))
}

fn avg(a: &Args<'_>, ends: usize) -> anyhow::Result<Vec<Tensor>> {
    let mut w = window(a, ends)?;
    w.ceil_mode = a.flag(4, "ceil_mode", false);
    w.count_include_pad = a.flag(5, "count_include_pad", true);
    w.divisor_override = a.opt_int(6, "divisor_override")?;
    if ends == 1 {
        return single(a.tensor(0)?.unsqueeze(-2)?.avg_pool2d(w)?.squeeze(-2));
    }
    single(a.tensor(0)?.avg_pool2d(w))
}

/// Returns the output size of adaptive pooling; missing extents are those of the input.
fn adaptive_size(a: &Args<'_>) -> anyhow::Result<[usize; 2]> {
    let (h, w) = (a.tensor(0)?.dim(-2)?, a.tensor(0)?.dim(-1)?);
    let Some(value) = a.get(1, "output_size") else {
        return Err(missing_op("adaptive pooling without a size"));
    };
    let items = match value.get("l").and_then(|l| l.as_array()) {
        Some(items) => items.clone(),
        None => vec![value.clone(), value.clone()],
    };
    let size = |v: &serde_json::Value, own: usize| v.as_i64().map_or(Ok(own), usize::try_from);
    let [rows, cols] = items.as_slice() else { bail!("a size of {} numbers", items.len()) };
    Ok([size(rows, h)?, size(cols, w)?])
}

pub(super) fn register(t: &mut OpTable) {
    t.register("nn.functional.max_pool2d", |a| max(a, 2));
    t.register("nn.functional.max_pool1d", |a| max(a, 1));
    t.register("nn.functional.avg_pool2d", |a| avg(a, 2));
    t.register("nn.functional.avg_pool1d", |a| avg(a, 1));
    t.register("nn.functional.adaptive_avg_pool1d", |a| {
        let Some(n) = a.ints(1, "output_size")? else {
            return Err(missing_op("adaptive_avg_pool1d without a size"));
        };
        let &[n] = n.as_slice() else { bail!("a size of {} numbers", n.len()) };
        single(a.tensor(0)?.unsqueeze(-2)?.adaptive_avg_pool2d([1, usize::try_from(n)?])?.squeeze(-2))
    });
    t.register("nn.functional.adaptive_avg_pool2d", |a| {
        single(a.tensor(0)?.adaptive_avg_pool2d(adaptive_size(a)?))
    });
    t.register("nn.functional.adaptive_max_pool2d", |a| {
        let (x, size) = (a.tensor(0)?, adaptive_size(a)?);
        if a.flag(2, "return_indices", false) {
            let (out, indices) = x.adaptive_max_pool2d_with_indices(size)?;
            return Ok(vec![out, indices]);
        }
        single(x.adaptive_max_pool2d(size))
    });
    t.register("nn.functional.adaptive_max_pool1d", |a| {
        let n = a.shape(1, "output_size").ok().and_then(|n| n.first().copied());
        let n = n.map_or_else(|| Ok::<_, anyhow::Error>(a.int(1, "output_size", 1)? as usize), Ok)?;
        if a.flag(2, "return_indices", false) {
            let (out, indices) = a.tensor(0)?.adaptive_max_pool1d_with_indices(n)?;
            return Ok(vec![out, indices]);
        }
        single(a.tensor(0)?.adaptive_max_pool1d(n))
    });
}

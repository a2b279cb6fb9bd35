//! Resizing, im2col, strided views, distances and embedding bags.

use anyhow::Result;
use forebay::ops::{
    EmbeddingBagMode, EmbeddingBagOptions, GridMode, GridPadding, GridSampleOptions, Im2colOptions,
    InterpolateMode, InterpolateOptions, PadMode, broadcast_tensors,
};
use forebay::tensor::Tensor;

use super::index::renormed;
use super::{OpTable, missing_op, single};
use crate::golden::args::Args;

/// Returns two integers: a list, or one for both.
fn pair(a: &Args<'_>, at: usize, name: &str, default: isize) -> Result<[isize; 2]> {
    Ok(match a.dims(at, name)?[..] {
        [] => [default; 2],
        [n] => [n; 2],
        [h, w, ..] => [h, w],
    })
}

fn resized(a: &Args<'_>, mode: &str, align_corners: bool) -> Result<Vec<Tensor>> {
    let mode = match mode {
        "nearest" => InterpolateMode::Nearest,
        "nearest-exact" => InterpolateMode::NearestExact,
        "linear" => InterpolateMode::Linear,
        "bilinear" => InterpolateMode::Bilinear,
        "bicubic" => InterpolateMode::Bicubic,
        "trilinear" => InterpolateMode::Trilinear,
        "area" => InterpolateMode::Area,
        other => return Err(missing_op(&format!("interpolate in mode {other}"))),
    };
    let options = InterpolateOptions {
        size: a.ints(1, "size")?.unwrap_or_default().into_iter().map(|n| n as usize).collect(),
        scale_factor: a.floats(2, "scale_factor")?.unwrap_or_default().into_iter().collect(),
        mode,
        align_corners,
        recompute_scale_factor: a.flag(5, "recompute_scale_factor", false),
        antialias: a.flag(6, "antialias", false),
    };
    single(a.tensor(0)?.interpolate(&options))
}

/// Returns the positions of blocks: dilation, padding and stride from argument `at` on.
fn blocks(a: &Args<'_>, at: usize) -> Result<Im2colOptions> {
    let extents = |k: usize, name, default| -> Result<[usize; 2]> {
        let [h, w] = pair(a, at + k, name, default)?;
        Ok([h.try_into()?, w.try_into()?])
    };
    Ok(Im2colOptions {
        dilation: extents(0, "dilation", 1)?,
        padding: extents(1, "padding", 0)?,
        stride: extents(2, "stride", 1)?,
    })
}

pub(super) fn register(t: &mut OpTable) {
    t.register("nn.functional.interpolate", |a| {
        resized(a, a.string(3, "mode", "nearest"), a.flag(4, "align_corners", false))
    });
    t.register("nn.functional.upsample_nearest", |a| resized(a, "nearest", false));
    t.register("nn.functional.upsample_bilinear", |a| resized(a, "bilinear", true));
    t.register("nn.functional.unfold", |a| {
        single(a.tensor(0)?.im2col(pair(a, 1, "kernel_size", 1)?, &blocks(a, 2)?))
    });
    t.register("nn.functional.fold", |a| {
        single(a.tensor(0)?.col2im(
            pair(a, 1, "output_size", 1)?,
            pair(a, 2, "kernel_size", 1)?,
            &blocks(a, 3)?,
        ))
    });
    t.register("unfold", |a| {
        let dim = a.int(1, "dimension", 0)? as isize;
        single(a.tensor(0)?.unfold(dim, a.int(2, "size", 1)? as usize, a.int(3, "step", 1)? as usize))
    });
    t.register("as_strided", |a| {
        let offset = a.opt_int(3, "storage_offset")?.map(|n| n as usize);
        let x = match a.variant() {
            // The database's input is elements 5 to 15 of a storage of 20; only these were recorded.
            "partial_views" => a.tensor(0)?.pad(&[5, 5], PadMode::Constant(0.0))?.narrow(0, 5, 10)?,
            _ => a.tensor(0)?.clone(),
        };
        single(x.as_strided(&a.shape(1, "size")?, &a.shape(2, "stride")?, offset))
    });
    t.register("nn.functional.grid_sample", |a| {
        let mode = match a.string(2, "mode", "bilinear") {
            "nearest" => GridMode::Nearest,
            "bicubic" => GridMode::Bicubic,
            _ => GridMode::Bilinear,
        };
        let padding = match a.string(3, "padding_mode", "zeros") {
            "border" => GridPadding::Border,
            "reflection" => GridPadding::Reflection,
            _ => GridPadding::Zeros,
        };
        single(a.tensor(0)?.grid_sample(
            a.tensor(1)?,
            &GridSampleOptions {
                mode,
                padding_mode: padding,
                align_corners: a.flag(4, "align_corners", false),
            },
        ))
    });
    t.register("cdist", |a| single(a.tensor(0)?.cdist(a.tensor(1)?, a.float(2, "p", 2.0)?)));
    t.register("cross", |a| {
        let (x, y) = (a.tensor(0)?, a.tensor(1)?);
        // Without `dim`, PyTorch's deprecated rule: the first dimension of extent 3.
        let shape = broadcast_tensors(&[x, y])?[0].shape().to_vec();
        let first = || shape.iter().position(|&n| n == 3).unwrap_or_default() as i64;
        single(x.cross(y, a.opt_int(2, "dim")?.unwrap_or_else(first) as isize))
    });
    t.register("nn.functional.embedding_bag", |a| {
        let table = a.tensor(0)?;
        renormed(a, table, a.tensor(1)?)?;
        let padding = a
            .opt_int(11, "padding_idx")?
            .map(|p| if p < 0 { p + table.dim(0).unwrap_or(0) as i64 } else { p });
        single(table.embedding_bag(
            a.tensor(1)?,
            &EmbeddingBagOptions {
                offsets: a.opt_tensor(2, "offsets"),
                mode: match a.string(7, "mode", "mean") {
                    "sum" => EmbeddingBagMode::Sum,
                    "max" => EmbeddingBagMode::Max,
                    _ => EmbeddingBagMode::Mean,
                },
                per_sample_weights: a.opt_tensor(9, "per_sample_weights"),
                include_last_offset: a.flag(10, "include_last_offset", false),
                padding_idx: padding.map(|p| p as usize),
                scale_grad_by_freq: a.flag(usize::MAX, "scale_grad_by_freq", false),
            },
        ))
    });
}

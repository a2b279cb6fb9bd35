//! Resizing, windows and views by strides, distances and bags.

use anyhow::Result;
use forebay::ops::{BagMode, Bags, GridMode, GridPadding, Interpolate, InterpolateMode, PadMode};
use forebay::tensor::Tensor;

use super::index::renormed;
use super::{Table, missing, one};
use crate::golden::args::Args;

/// Two numbers: a list, or one for both.
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
        other => return Err(missing(&format!("interpolate in mode {other}"))),
    };
    let options = Interpolate {
        size: a.ints(1, "size")?.unwrap_or_default().into_iter().map(|n| n as usize).collect(),
        scale_factor: a.floats(2, "scale_factor")?.unwrap_or_default().into_iter().collect(),
        mode,
        align_corners,
        recompute_scale_factor: a.b(5, "recompute_scale_factor", false),
        antialias: a.b(6, "antialias", false),
    };
    one(a.t(0)?.interpolate(&options))
}

pub(super) fn register(t: &mut Table) {
    t.op("nn.functional.interpolate", |a| {
        resized(a, a.s(3, "mode", "nearest"), a.b(4, "align_corners", false))
    });
    t.op("nn.functional.upsample_nearest", |a| resized(a, "nearest", false));
    t.op("nn.functional.upsample_bilinear", |a| resized(a, "bilinear", true));
    t.op("nn.functional.unfold", |a| {
        one(a.t(0)?.im2col(
            pair(a, 1, "kernel_size", 1)?,
            pair(a, 2, "dilation", 1)?,
            pair(a, 3, "padding", 0)?,
            pair(a, 4, "stride", 1)?,
        ))
    });
    t.op("nn.functional.fold", |a| {
        one(a.t(0)?.col2im(
            pair(a, 1, "output_size", 1)?,
            pair(a, 2, "kernel_size", 1)?,
            pair(a, 3, "dilation", 1)?,
            pair(a, 4, "padding", 0)?,
            pair(a, 5, "stride", 1)?,
        ))
    });
    t.op("unfold", |a| {
        let dim = a.i(1, "dimension", 0)? as isize;
        one(a.t(0)?.unfold(dim, a.i(2, "size", 1)? as usize, a.i(3, "step", 1)? as usize))
    });
    t.op("as_strided", |a| {
        let offset = a.opt_i(3, "storage_offset")?.map(|n| n as usize);
        let x = match a.variant() {
            // The database's input is elements 5 to 15 of a storage of 20; the file has those.
            "partial_views" => a.t(0)?.pad(&[5, 5], PadMode::Constant(0.0))?.narrow(0, 5, 10)?,
            _ => a.t(0)?.clone(),
        };
        one(x.as_strided(&a.shape(1, "size")?, &a.shape(2, "stride")?, offset))
    });
    t.op("nn.functional.grid_sample", |a| {
        let mode = match a.s(2, "mode", "bilinear") {
            "nearest" => GridMode::Nearest,
            "bicubic" => GridMode::Bicubic,
            _ => GridMode::Bilinear,
        };
        let padding = match a.s(3, "padding_mode", "zeros") {
            "border" => GridPadding::Border,
            "reflection" => GridPadding::Reflection,
            _ => GridPadding::Zeros,
        };
        one(a.t(0)?.grid_sample(a.t(1)?, mode, padding, a.b(4, "align_corners", false)))
    });
    t.op("cdist", |a| one(a.t(0)?.cdist(a.t(1)?, a.f(2, "p", 2.0)?)));
    t.op("cross", |a| one(a.t(0)?.cross(a.t(1)?, a.opt_i(2, "dim")?.map(|d| d as isize))));
    t.op("nn.functional.embedding_bag", |a| {
        let table = a.t(0)?;
        renormed(a, table, a.t(1)?)?;
        let padding =
            a.opt_i(11, "padding_idx")?.map(|p| if p < 0 { p + table.dim(0).unwrap_or(0) as i64 } else { p });
        one(table.embedding_bag(
            a.t(1)?,
            &Bags {
                offsets: a.opt_t(2, "offsets"),
                mode: match a.s(7, "mode", "mean") {
                    "sum" => BagMode::Sum,
                    "max" => BagMode::Max,
                    _ => BagMode::Mean,
                },
                per_sample_weights: a.opt_t(9, "per_sample_weights"),
                include_last_offset: a.b(10, "include_last_offset", false),
                padding_idx: padding.map(|p| p as usize),
                scale_grad_by_freq: a.b(usize::MAX, "scale_grad_by_freq", false),
            },
        ))
    });
}

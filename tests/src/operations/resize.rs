//! Interpolation, sampling and patches of images.

use super::prelude::*;

fn interpolate_options(mode: InterpolateMode) -> InterpolateOptions {
    InterpolateOptions { mode, ..InterpolateOptions::default() }
}

/// Returns two integers: a list, or one for both.
fn height_and_width(a: &Args<'_>, at: usize, name: &str, default: isize) -> anyhow::Result<[isize; 2]> {
    Ok(match a.dims(at, name)?[..] {
        [] => [default; 2],
        [n] => [n; 2],
        [h, w, ..] => [h, w],
    })
}

fn resized(a: &Args<'_>, mode: &str, align_corners: bool) -> anyhow::Result<Vec<Tensor>> {
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
fn blocks(a: &Args<'_>, at: usize) -> anyhow::Result<Im2colOptions> {
    let extents = |k: usize, name, default| -> anyhow::Result<[usize; 2]> {
        let [h, w] = height_and_width(a, at + k, name, default)?;
        Ok([h.try_into()?, w.try_into()?])
    };
    Ok(Im2colOptions {
        dilation: extents(0, "dilation", 1)?,
        padding: extents(1, "padding", 0)?,
        stride: extents(2, "stride", 1)?,
    })
}

/// Samples at the positions of a grid. The modes have names, or numbers in PyTorch's inner functions.
fn sampled(a: &Args<'_>) -> anyhow::Result<Vec<Tensor>> {
    let name = |at, name, names: [&'static str; 3]| match a.get(at, name).is_some_and(|v| v.is_i64()) {
        true => Ok(names.get(a.count(at, name, 0)?).copied().unwrap_or_default().to_owned()),
        false => anyhow::Ok(a.string(at, name, names[0]).to_owned()),
    };
    let mode = match &*name(2, "mode", ["bilinear", "nearest", "bicubic"])? {
        "bilinear" => GridMode::Bilinear,
        "nearest" => GridMode::Nearest,
        "bicubic" => GridMode::Bicubic,
        other => return Err(missing_op(&format!("grid_sample in mode {other}"))),
    };
    let padding_mode = match &*name(3, "padding_mode", ["zeros", "border", "reflection"])? {
        "zeros" => GridPadding::Zeros,
        "border" => GridPadding::Border,
        "reflection" => GridPadding::Reflection,
        other => return Err(missing_op(&format!("grid_sample padded by {other}"))),
    };
    let align_corners = a.flag(4, "align_corners", false);
    single(a.tensor(0)?.grid_sample(a.tensor(1)?, &GridSampleOptions { mode, padding_mode, align_corners }))
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(interpolate(interpolate)))
        .case(smooth("interpolate to the nearest", &[Signed(&[2, 3, 5])], |x| {
            x[0].interpolate(&InterpolateOptions::with_scale_factor(1.7))
        }))
        .case(smooth("interpolate to the nearest exactly", &[Signed(&[1, 2, 3, 4, 3])], |x| {
            x[0].interpolate(&InterpolateOptions {
                size: [4, 3, 5].as_slice().into(),
                ..interpolate_options(InterpolateMode::NearestExact)
            })
        }))
        .case(smooth("interpolate along lines", &[Signed(&[2, 2, 5])], |x| {
            x[0].interpolate(&InterpolateOptions {
                align_corners: true,
                mode: InterpolateMode::Linear,
                ..InterpolateOptions::with_size([7])
            })
        }))
        .case(
            smooth("interpolate images", &[Signed(&[2, 2, 4, 5])], |x| {
                x[0].interpolate(&InterpolateOptions {
                    mode: InterpolateMode::Bilinear,
                    ..InterpolateOptions::with_size([7, 3])
                })
            })
            .with_batched_inputs(1),
        )
        .case(smooth("interpolate images without aliases", &[Signed(&[1, 2, 7, 5])], |x| {
            let options =
                InterpolateOptions { antialias: true, ..interpolate_options(InterpolateMode::Bicubic) };
            x[0].interpolate(&InterpolateOptions { size: [3, 2].as_slice().into(), ..options })
        }))
        .case(smooth("interpolate along cubic curves", &[Signed(&[1, 2, 4, 5])], |x| {
            x[0].interpolate(&InterpolateOptions {
                mode: InterpolateMode::Bicubic,
                ..InterpolateOptions::with_scale_factor(1.5)
            })
        }))
        .case(smooth("interpolate volumes", &[Signed(&[1, 2, 3, 2, 4])], |x| {
            x[0].interpolate(&InterpolateOptions {
                mode: InterpolateMode::Trilinear,
                ..InterpolateOptions::with_size([4, 3, 3])
            })
        }))
        .case(smooth("interpolate by areas", &[Signed(&[2, 3, 5, 4])], |x| {
            x[0].interpolate(&InterpolateOptions {
                mode: InterpolateMode::Area,
                ..InterpolateOptions::with_size([3, 6])
            })
        }))
        .golden(|a| resized(a, a.string(3, "mode", "nearest"), a.flag(4, "align_corners", false)))
        .golden_as("nn.functional.upsample_nearest", |a| resized(a, "nearest", false))
        .golden_as("nn.functional.upsample_bilinear", |a| resized(a, "bilinear", true));
    ops.add(method!(unfold(int, count, count)))
        .case(
            smooth("unfold", &[Signed(&[2, 7, 3])], |x| x[0].unfold(1, 3, 2))
                .with_bytes(cost::no_bytes)
                .with_batched_inputs(1),
        )
        .case(
            smooth("unfold with overlaps", &[Signed(&[2, 7])], |x| x[0].unfold(-1, 4, 1))
                .with_bytes(cost::no_bytes),
        )
        .golden(|a| {
            let dim = a.dim(1, "dimension", 0)?;
            single(a.tensor(0)?.unfold(dim, a.int(2, "size", 1)? as usize, a.int(3, "step", 1)? as usize))
        })
        .fuzz("unfold of a view", |r, t| {
            t[0].unfold(r.int(), r.count(), r.count())?
                .unfold(r.int(), r.count(), r.count())
                .map(IntoTensors::into_tensors)
        });
    ops.add(method!(im2col(int2, im2col)))
        .case(
            smooth("im2col", &[Signed(&[2, 3, 6, 5])], |x| {
                x[0].im2col([3, 2], &Im2colOptions { dilation: [1, 2], padding: [1, 0], stride: [2, 1] })
            })
            .with_batched_inputs(1),
        )
        .golden_as("nn.functional.unfold", |a| {
            single(a.tensor(0)?.im2col(height_and_width(a, 1, "kernel_size", 1)?, &blocks(a, 2)?))
        });
    ops.add(method!(col2im(int2, int2, im2col)))
        .case(
            smooth("col2im", &[Signed(&[2, 12, 25])], |x| {
                x[0].col2im([5, 6], [3, 2], &Im2colOptions { padding: [1, 0], ..Default::default() })
            })
            .with_batched_inputs(1),
        )
        .golden_as("nn.functional.fold", |a| {
            single(a.tensor(0)?.col2im(
                height_and_width(a, 1, "output_size", 1)?,
                height_and_width(a, 2, "kernel_size", 1)?,
                &blocks(a, 3)?,
            ))
        });
    ops.add(method!(grid_sample(
        t1,
        GridSampleOptions { mode: grid_mode, padding_mode: grid_padding, align_corners: flag }
    )))
    .case(smooth("grid_sample", &[Signed(&[2, 3, 4, 5]), Bounded(&[2, 3, 2, 2])], |x| {
        x[0].grid_sample(
            &x[1],
            &GridSampleOptions { padding_mode: GridPadding::Border, ..Default::default() },
        )
    }))
    .case(nonsmooth("grid_sample of volumes", &[Signed(&[1, 2, 3, 4, 5]), Bounded(&[1, 2, 1, 3, 3])], |x| {
        x[0].grid_sample(&x[1], &GridSampleOptions { align_corners: true, ..Default::default() })
    }))
    .case(smooth("grid_sample of images, bicubic", &[Signed(&[2, 3, 4, 5]), Bounded(&[2, 3, 2, 2])], |x| {
        x[0].grid_sample(
            &x[1],
            &GridSampleOptions {
                mode: GridMode::Bicubic,
                padding_mode: GridPadding::Reflection,
                ..Default::default()
            },
        )
    }))
    .golden(sampled)
    .golden_as("grid_sampler_2d", sampled)
    .golden_as("grid_sampler_3d", sampled);
    ops.add(method!(affine_grid(counts, flag))).case(
        smooth("affine_grid", &[Signed(&[2, 2, 3])], |x| x[0].affine_grid([2, 1, 3, 4], false))
            .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 2)),
    );
}

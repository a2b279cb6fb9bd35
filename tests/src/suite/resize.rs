//! Resizing, im2col, strided views, distances and embedding bags: hand-computed values, odd shapes, modules.

use std::slice::from_ref;

use anyhow::{Context, Result, ensure};
use forebay::autograd::GradOptions;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::nn::{
    ConvTranspose1d, ConvTranspose1dOptions, ConvTranspose2d, ConvTranspose2dOptions, EmbeddingBag, Module,
    Sequential, Upsample,
};
use forebay::ops::{
    DiffOptions, EmbeddingBagMode, EmbeddingBagOptions, Im2colOptions, InterpolateMode, InterpolateOptions,
    Pool2dOptions,
};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits, ensure_values, iota, sum_gradient};
use super::{compute_dtypes, tests};

tests![
    interpolation_has_hand_computed_values,
    resizing_takes_any_strides_and_empty_batches,
    more_workgroups_than_a_dimension_of_a_grid_has,
    gradients_of_repeated_elements_add_up,
    a_view_by_strides_gives_gradients_to_its_own_elements_only,
    folding_undoes_unfolding,
    distances_have_hand_computed_values,
    no_gradient_flows_between_equal_rows,
    bags_have_hand_computed_values,
    replays_of_a_captured_step_keep_their_tables,
    cross_products_have_hand_computed_values,
    tensor_splits_and_differences,
    windows_of_pooling_take_the_first_of_equals,
    layers_have_the_names_and_shapes_of_their_weights,
];

fn floats(device: &Device) -> impl Iterator<Item = DType> + use<> {
    compute_dtypes(device).filter(|d| d.is_float())
}

fn interpolation_has_hand_computed_values(device: &Device) -> Result<()> {
    let with = |mode, options: InterpolateOptions| InterpolateOptions { mode, ..options };
    for dtype in floats(device).chain([DType::U8]) {
        let x = Tensor::from_slice(&[0.0f32, 10.0, 20.0], [1, 1, 3], device)?.to_dtype(dtype)?;
        ensure_values(
            &x.interpolate(&InterpolateOptions::with_scale_factor(2.0))?,
            &[0.0, 0.0, 10.0, 10.0, 20.0, 20.0],
        )?;
        ensure_values(&x.interpolate(&InterpolateOptions::with_size([2]))?, &[0.0, 10.0])?;
        let exact = with(InterpolateMode::NearestExact, InterpolateOptions::with_size([2]));
        ensure_values(&x.interpolate(&exact)?, &[0.0, 20.0])?;
    }
    for dtype in floats(device) {
        let x = Tensor::from_slice(&[0.0f32, 10.0], [1, 1, 2], device)?.to_dtype(dtype)?;
        let line = with(InterpolateMode::Linear, InterpolateOptions::with_scale_factor(2.0));
        ensure_values(&x.interpolate(&line)?, &[0.0, 2.5, 7.5, 10.0])?;
        ensure_values(&sum_gradient(&x, |x| x.interpolate(&line))?, &[2.0, 2.0])?;
        let corners = InterpolateOptions {
            align_corners: true,
            ..with(InterpolateMode::Linear, InterpolateOptions::with_size([5]))
        };
        ensure_values(&x.interpolate(&corners)?, &[0.0, 2.5, 5.0, 7.5, 10.0])?;
        let x = iota(&[1, 1, 4, 2], dtype, device)?;
        let areas = with(InterpolateMode::Area, InterpolateOptions::with_size([2, 1]));
        ensure_values(&x.interpolate(&areas)?, &[1.5, 5.5])?;
        ensure_values(&sum_gradient(&x, |x| x.interpolate(&areas))?, &[0.25; 8])?;
        let smooth = InterpolateOptions {
            antialias: true,
            ..with(InterpolateMode::Bilinear, InterpolateOptions::with_size([2, 2]))
        };
        // Weights 3/7, 3/7 and 1/7 of the rows that an output covers.
        let third = (0.0 * 3.0 + 2.0 * 3.0 + 4.0) / 7.0;
        let expected = [third, third + 1.0, 6.0 - third, 7.0 - third];
        let tolerance = if dtype.size() == 2 { 0.02 } else { 1e-6 };
        ensure_close(&x.interpolate(&smooth)?.to_f64s()?, &expected, tolerance, tolerance)?;
    }
    Ok(())
}

fn resizing_takes_any_strides_and_empty_batches(device: &Device) -> Result<()> {
    let x = Tensor::randn([3, 4, 2, 5], DType::F32, device)?;
    let turned = x.permute([2, 0, 3, 1])?;
    for mode in [InterpolateMode::Nearest, InterpolateMode::Bicubic, InterpolateMode::Area] {
        let options = InterpolateOptions { mode, ..InterpolateOptions::with_size([3, 7]) };
        ensure_same_bits(&turned.interpolate(&options)?, &turned.contiguous()?.interpolate(&options)?)?;
        let none = Tensor::zeros([0, 2, 4, 4], DType::F32, device)?;
        ensure!(none.interpolate(&options)?.shape() == [0, 2, 3, 7]);
        ensure!(sum_gradient(&none, |x| x.interpolate(&options))?.shape() == [0, 2, 4, 4]);
    }
    Ok(())
}

fn more_workgroups_than_a_dimension_of_a_grid_has(device: &Device) -> Result<()> {
    let x = iota(&[1, 1, 2100, 2100], DType::F32, device)?;
    let twice = InterpolateOptions::with_scale_factor(2.0);
    let wide = x.interpolate(&twice)?;
    ensure_same_bits(&wide.slice_dim(2, 1, 4200, 2)?.slice_dim(3, 1, 4200, 2)?.contiguous()?, &x)?;
    let counts = sum_gradient(&x, |x| x.interpolate(&twice))?;
    ensure_values(&counts.amin((), false)?, &[4.0])?;
    ensure_values(&counts.amax((), false)?, &[4.0])
}

fn gradients_of_repeated_elements_add_up(device: &Device) -> Result<()> {
    for dtype in floats(device) {
        let x = iota(&[7], dtype, device)?;
        ensure_values(&x.unfold(0, 3, 2)?, &[0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0])?;
        ensure_values(&sum_gradient(&x, |x| x.unfold(0, 3, 2))?, &[1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0])?;
        ensure_values(&sum_gradient(&x, |x| x.unfold(-1, 4, 1))?, &[1.0, 2.0, 3.0, 4.0, 3.0, 2.0, 1.0])?;
        ensure_values(
            &sum_gradient(&x, |x| x.as_strided([2, 3], [0, 1], Some(4)))?,
            &[0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0],
        )?;
        let rows = iota(&[5, 2], dtype, device)?;
        let columns = sum_gradient(&rows, |x| x.t()?.unfold(1, 2, 2))?;
        ensure_values(&columns, &[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])?;
        let scalar = iota(&[], dtype, device)?;
        ensure!(scalar.unfold(0, 1, 1)?.shape() == [1]);
        ensure_values(&sum_gradient(&scalar, |x| x.unfold(0, 1, 3))?, &[1.0])?;
        ensure!(x.narrow(0, 0, 0)?.unfold(0, 0, 1)?.shape() == [1, 0]);
    }
    Ok(())
}

fn a_view_by_strides_gives_gradients_to_its_own_elements_only(device: &Device) -> Result<()> {
    let x = iota(&[6], DType::F32, device)?;
    let beside = sum_gradient(&x, |x| x.narrow(0, 2, 3)?.as_strided([2, 2], [1, 0], Some(1)))?;
    ensure_values(&beside, &[0.0, 0.0, 2.0, 0.0, 0.0, 0.0])?;
    // A repeated element gathers the gradients of all its positions.
    let shared =
        sum_gradient(&x.narrow(0, 0, 1)?.copy()?, |x| x.broadcast_to([4])?.as_strided([2], [0], None))?;
    ensure_values(&shared, &[2.0])?;
    let turned = sum_gradient(&iota(&[2, 3], DType::F32, device)?, |x| x.t()?.as_strided([3], [2], Some(1)))?;
    ensure_values(&turned, &[0.0, 1.0, 0.0, 1.0, 0.0, 1.0])?;
    let view = iota(&[12], DType::I32, device)?.as_strided([2, 3], [5, 2], Some(1))?;
    ensure_values(&view, &[1.0, 3.0, 5.0, 6.0, 8.0, 10.0])?;
    ensure!(x.as_strided([2, 0], [9, 9], Some(70)).is_ok());
    ensure!(x.as_strided([2], [usize::MAX], None).is_err() && x.as_strided([7], [1], None).is_err());
    Ok(())
}

fn folding_undoes_unfolding(device: &Device) -> Result<()> {
    for dtype in floats(device) {
        let x = iota(&[2, 3, 4, 6], dtype, device)?;
        let columns = x.im2col(2, &Im2colOptions { stride: [2; 2], ..Default::default() })?;
        ensure!(columns.shape() == [2, 12, 6]);
        ensure_same_bits(
            &columns
                .col2im([4, 6], 2, &Im2colOptions { stride: [2; 2], ..Default::default() })?
                .contiguous()?,
            &x,
        )?;
        let ones = Tensor::ones([1, 3, 3], dtype, device)?;
        // Number of 2 x 2 blocks that cover each element.
        let counts = ones.im2col(2, &Im2colOptions { padding: [1; 2], ..Default::default() })?.col2im(
            3,
            2,
            &Im2colOptions { padding: [1; 2], ..Default::default() },
        )?;
        ensure!(counts.shape() == [1, 3, 3]);
        ensure_values(&counts.contiguous()?, &[4.0; 9])?;
        let dilated =
            x.narrow(0, 0, 1)?.im2col([2, 3], &Im2colOptions { dilation: [3, 2], ..Default::default() })?;
        ensure!(dilated.shape() == [1, 18, 2]);
        ensure_values(&dilated.select(1, 5)?, &[22.0, 23.0])?;
    }
    let ints = iota(&[1, 2, 3], DType::I32, device)?
        .im2col([1, 2], &Im2colOptions { padding: [0, 1], ..Default::default() })?;
    ensure_values(&ints, &[0.0, 0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 5.0, 0.0])
}

fn distances_have_hand_computed_values(device: &Device) -> Result<()> {
    let (batch, rows, cols, width) = (2, 18, 3, 21);
    let a = Tensor::randn([batch, rows, width], DType::F32, device)?;
    let b = Tensor::randn([cols, width], DType::F32, device)?;
    for p in [0.0, 1.0, 2.0, 3.5, 0.5, f64::INFINITY] {
        for dtype in floats(device) {
            if dtype == DType::F64 && p.fract() != 0.0 {
                continue;
            }
            let (a, b) = (a.to_dtype(dtype)?, b.to_dtype(dtype)?);
            let (av, bv) = (a.to_f64s()?, b.to_f64s()?);
            let mut expected = Vec::new();
            for i in 0..batch * rows {
                for j in 0..cols {
                    let sizes = (0..width).map(|k| (av[i * width + k] - bv[j * width + k]).abs());
                    expected.push(match p {
                        0.0 => sizes.filter(|&d| d != 0.0).count() as f64,
                        f64::INFINITY => sizes.fold(0.0, f64::max),
                        _ => sizes.map(|d| d.powf(p)).sum::<f64>().powf(1.0 / p),
                    });
                }
            }
            let got = a.cdist(&b, p)?;
            ensure!(got.shape() == [batch, rows, cols] && got.dtype() == dtype);
            let tolerance = if dtype.size() == 2 { 0.005 } else { 2e-5 };
            ensure_close(&got.to_f64s()?, &expected, tolerance, tolerance)
                .with_context(|| format!("{p} {dtype}"))?;
        }
        let turned = a.permute([0, 2, 1])?.contiguous()?.permute([0, 2, 1])?;
        ensure_same_bits(&turned.cdist(&b, p)?, &a.cdist(&b, p)?)?;
    }
    let none = Tensor::zeros([0, 4], DType::F32, device)?;
    ensure!(none.cdist(&Tensor::zeros([3, 4], DType::F32, device)?, 2.0)?.shape() == [0, 3]);
    let narrow = Tensor::zeros([2, 0], DType::F32, device)?;
    ensure_values(&narrow.cdist(&narrow, 3.0)?, &[0.0; 4])
}

fn no_gradient_flows_between_equal_rows(device: &Device) -> Result<()> {
    let x = iota(&[3, 2], DType::F32, device)?;
    for p in [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, f64::INFINITY] {
        let own = sum_gradient(&x, |x| x.cdist(&x.detach(), p))?.to_f64s()?;
        ensure!(own.iter().all(|g| g.is_finite()), "{p}: {own:?}");
        let (low, middle) = (&own[..2], &own[2..4]);
        ensure!(p == 0.0 || low.iter().all(|&g| g < 0.0), "{p}: {own:?}");
        ensure_close(middle, &[0.0; 2], 1e-6, 1e-6).with_context(|| format!("{p}"))?;
    }
    Ok(())
}

fn bags_have_hand_computed_values(device: &Device) -> Result<()> {
    for dtype in floats(device) {
        let table = iota(&[4, 3], dtype, device)?;
        let index = Tensor::from_slice(&[0i32, 3, 1, 1, 2], [5], device)?;
        let starts = Tensor::from_slice(&[0i32, 2, 2], [3], device)?;
        let bags =
            |mode| EmbeddingBagOptions { offsets: Some(&starts), mode, ..EmbeddingBagOptions::default() };
        let run = |mode| table.embedding_bag(&index, &bags(mode));
        ensure_values(&run(EmbeddingBagMode::Sum)?, &[9.0, 11.0, 13.0, 0.0, 0.0, 0.0, 12.0, 15.0, 18.0])?;
        ensure_values(&run(EmbeddingBagMode::Mean)?, &[4.5, 5.5, 6.5, 0.0, 0.0, 0.0, 4.0, 5.0, 6.0])?;
        ensure_values(&run(EmbeddingBagMode::Max)?, &[9.0, 10.0, 11.0, 0.0, 0.0, 0.0, 6.0, 7.0, 8.0])?;
        let back = |mode| sum_gradient(&table, |t| t.embedding_bag(&index, &bags(mode)));
        let rows = |rows: [f64; 4]| rows.iter().flat_map(|&r| [r; 3]).collect::<Vec<_>>();
        ensure_values(&back(EmbeddingBagMode::Sum)?, &rows([1.0, 2.0, 1.0, 1.0]))?;
        ensure_values(&back(EmbeddingBagMode::Max)?, &rows([0.0, 0.0, 1.0, 1.0]))?;
        let third = if dtype.size() == 2 { 0.01 } else { 1e-6 };
        ensure_close(
            &back(EmbeddingBagMode::Mean)?.to_f64s()?,
            &rows([0.5, 2.0 / 3.0, 1.0 / 3.0, 0.5]),
            third,
            third,
        )?;
        // A padding index, and bags of one size.
        let padded = EmbeddingBagOptions {
            padding_idx: Some(1),
            mode: EmbeddingBagMode::Mean,
            ..EmbeddingBagOptions::default()
        };
        let pairs = Tensor::from_slice(&[1u32, 2, 1, 1], [2, 2], device)?;
        ensure_values(&table.embedding_bag(&pairs, &padded)?, &[6.0, 7.0, 8.0, 0.0, 0.0, 0.0])?;
        ensure_values(
            &sum_gradient(&table, |t| t.embedding_bag(&pairs, &padded))?,
            &rows([0.0, 0.0, 1.0, 0.0]),
        )?;
        // Per-sample weights have a gradient, too.
        let factors = Tensor::from_slice(&[2.0f32, 3.0, 4.0, 5.0], [2, 2], device)?.to_dtype(dtype)?;
        let scaled = |f: &Tensor| {
            let bags = EmbeddingBagOptions {
                per_sample_weights: Some(f),
                mode: EmbeddingBagMode::Sum,
                ..EmbeddingBagOptions::default()
            };
            table.embedding_bag(&pairs, &bags)
        };
        ensure_values(&scaled(&factors)?, &[24.0, 29.0, 34.0, 27.0, 36.0, 45.0])?;
        ensure_values(&sum_gradient(&factors, scaled)?, &[12.0, 21.0, 12.0, 12.0])?;
        let none = Tensor::zeros([0], DType::I32, device)?;
        ensure_values(
            &table.embedding_bag(
                &none,
                &EmbeddingBagOptions { offsets: Some(&none), ..EmbeddingBagOptions::default() },
            )?,
            &[],
        )?;
    }
    Ok(())
}

fn replays_of_a_captured_step_keep_their_tables(device: &Device) -> Result<()> {
    let x = Tensor::randn([2, 2, 5, 4], DType::F32, device)?.to_leaf()?;
    let options =
        InterpolateOptions { mode: InterpolateMode::Bicubic, ..InterpolateOptions::with_size([7, 9]) };
    let run = || -> forebay::error::Result<(Tensor, Tensor)> {
        let y =
            x.interpolate(&options)?.im2col(2, &Im2colOptions { padding: [1; 2], ..Default::default() })?;
        let seed = [y.detach().cos()?];
        let options = GradOptions { grad_outputs: Some(&seed), ..GradOptions::default() };
        let grads = forebay::autograd::grad(from_ref(&y), from_ref(&x), &options)?;
        Ok((y.detach(), grads.into_iter().next().unwrap_or(y)))
    };
    let eager = run()?;
    let mut step = device.capture(run)?;
    for _ in 0..3 {
        let (y, grad) = step.replay()?;
        ensure_same_bits(&y, &eager.0)?;
        ensure_same_bits(&grad, &eager.1)?;
    }
    Ok(())
}

fn cross_products_have_hand_computed_values(device: &Device) -> Result<()> {
    for dtype in compute_dtypes(device).filter(|&d| d != DType::Bool && d != DType::U8) {
        let a = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3], device)?.to_dtype(dtype)?;
        let b = Tensor::from_slice(&[7.0f32, 9.0, 8.0], [3], device)?.to_dtype(dtype)?;
        if dtype == DType::U32 {
            continue;
        }
        ensure_values(&a.cross(&b, -1)?, &[-11.0, 13.0, -5.0, -14.0, 10.0, 1.0])?;
        ensure_values(&a.t()?.cross(&b.unsqueeze(1)?, 0)?.t()?, &[-11.0, 13.0, -5.0, -14.0, 10.0, 1.0])?;
    }
    let none = Tensor::zeros([0, 3], DType::F32, device)?;
    ensure!(none.cross(&none, -1)?.shape() == [0, 3]);
    Ok(())
}

fn tensor_splits_and_differences(device: &Device) -> Result<()> {
    let x = iota(&[2, 3], DType::I32, device)?;
    let shapes = |parts: &[Tensor]| parts.iter().map(|p| p.shape()[1]).collect::<Vec<_>>();
    ensure!(shapes(&x.tensor_split(2, 1)?) == [2, 1] && shapes(&x.tensor_split(4, -1)?) == [1, 1, 1, 0]);
    ensure!(shapes(&x.tensor_split_at(&[-1, 1, 9], 1)?) == [2, 0, 2, 0]);
    ensure_values(&x.tensor_split_at(&[1], 1)?[1], &[1.0, 2.0, 4.0, 5.0])?;
    ensure_values(&x.diff(1, -1, &Default::default())?, &[1.0; 4])?;
    ensure!(x.diff(9, 1, &Default::default())?.shape() == [2, 0]);
    ensure_values(
        &x.diff(1, 0, &DiffOptions { prepend: Some(&x.narrow(0, 1, 1)?), ..Default::default() })?,
        &[-3.0, -3.0, -3.0, 3.0, 3.0, 3.0],
    )?;
    let flags = Tensor::from_bools(&[true, true, false, true], [4], device)?;
    let changes = flags.diff(1, 0, &Default::default())?;
    ensure!(changes.dtype() == DType::Bool);
    ensure_values(&changes, &[0.0, 1.0, 1.0])?;
    ensure_values(&iota(&[2, 4], DType::F32, device)?.t()?.trace()?, &[5.0])?;
    ensure_values(&Tensor::zeros([0, 4], DType::F32, device)?.trace()?, &[0.0])
}

fn windows_of_pooling_take_the_first_of_equals(device: &Device) -> Result<()> {
    // With `ceil_mode`, a window may be larger than the input.
    let small = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], [1, 1, 2, 2], device)?;
    let window = Pool2dOptions { stride: [2; 2], ceil_mode: true, ..Pool2dOptions::new(3) };
    ensure!(small.max_pool2d(window)?.to_vec::<f32>()? == [4.0]);
    ensure!(small.avg_pool2d(window)?.to_vec::<f32>()? == [2.5]);
    let x = Tensor::from_slice(&[1.0f32, 3.0, 3.0, 0.0, 2.0], [1, 5], device)?;
    let (out, indices) = x.adaptive_max_pool1d_with_indices(2)?;
    ensure_values(&out, &[3.0, 3.0])?;
    ensure_values(&indices, &[1.0, 2.0])?;
    ensure_values(&sum_gradient(&x, |x| x.adaptive_max_pool1d(2))?, &[0.0, 1.0, 1.0, 0.0, 0.0])?;
    let more = x.unsqueeze(0)?.adaptive_max_pool2d([2, 7])?;
    ensure!(more.shape() == [1, 2, 7]);
    ensure!(
        Tensor::zeros([0, 2, 4, 4], DType::F32, device)?.adaptive_max_pool2d([1, 2])?.shape() == [0, 2, 1, 2]
    );
    Ok(())
}

fn layers_have_the_names_and_shapes_of_their_weights(device: &Device) -> Result<()> {
    let options = ConvTranspose2dOptions { stride: [2, 2], padding: [1, 1], groups: 2, ..Default::default() };
    let up = ConvTranspose2d::new(4, 6, [4, 4], options, device)?;
    let state = up.state_dict();
    ensure!(state["weight"].shape() == [4, 3, 4, 4] && state["bias"].shape() == [6]);
    // As in PyTorch: within 1 over the root of a group's outputs times the window.
    let bound = 1.0 / (3.0f64 * 16.0).sqrt();
    ensure!(state["weight"].to_f64s()?.iter().all(|w| w.abs() <= bound + 1e-6));
    let net = Sequential::new().add(up).add(Upsample::new(InterpolateOptions::with_scale_factor(0.5)));
    let out = net.forward(&Tensor::ones([1, 4, 5, 5], DType::F32, device)?)?;
    ensure!(out.shape() == [1, 6, 5, 5] && out.requires_grad());
    let line = ConvTranspose1d::new(2, 3, [3], ConvTranspose1dOptions::default(), device)?;
    ensure!(line.forward(&Tensor::ones([1, 2, 4], DType::F32, device)?)?.shape() == [1, 3, 6]);
    let words = EmbeddingBag::new(5, 3, EmbeddingBagMode::Sum, Some(2), device)?;
    ensure!(words.weight.requires_grad());
    ensure_values(&words.weight.detach().select(0, 2)?, &[0.0; 3])?;
    let index = Tensor::from_slice(&[2i32, 0], [1, 2], device)?;
    let first = words.weight.detach().narrow(0, 0, 1)?.contiguous()?;
    ensure_same_bits(&words.forward(&index, &Default::default())?.detach(), &first)
}

//! Gradients at NaN, at infinities and at kinks, by PyTorch's formulas, and samples at such coordinates.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as ForebayResult;
use forebay::ops::{GridMode, GridPadding, GridSampleOptions, NanToNumOptions, Reduction};
use forebay::tensor::Tensor;

use super::host_reference::ensure_values;
use super::tests;

tests![
    elementwise_gradients_at_edges,
    losses_have_gradients_at_nan,
    grids_with_nonfinite_coordinates_read_edges,
    bicubic_samples_at_nonfinite_coordinates_are_nan,
];

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

type Operation = fn(&Tensor) -> ForebayResult<Tensor>;

/// Name, operation, and elements with the gradients of their results.
type GradientCase = (&'static str, Operation, &'static [(f32, f32)]);

const GRADIENTS: &[GradientCase] = &[
    ("abs", |x| x.abs(), &[(NAN, 0.0), (INF, 1.0), (-INF, -1.0), (0.0, 0.0)]),
    ("square", |x| x.square(), &[(NAN, NAN), (INF, INF), (-INF, -INF), (0.0, 0.0)]),
    ("reciprocal", |x| x.reciprocal(), &[(NAN, NAN), (INF, 0.0), (-INF, 0.0), (0.0, -INF)]),
    ("sqrt", |x| x.sqrt(), &[(NAN, NAN), (INF, 0.0), (0.0, INF), (-1.0, NAN)]),
    ("rsqrt", |x| x.rsqrt(), &[(NAN, NAN), (INF, 0.0), (0.0, -INF), (-1.0, NAN)]),
    ("exp", |x| x.exp(), &[(NAN, NAN), (INF, INF), (-INF, 0.0)]),
    ("log", |x| x.log(), &[(NAN, NAN), (INF, 0.0), (0.0, INF), (-2.0, -0.5)]),
    ("log1p", |x| x.log1p(), &[(NAN, NAN), (INF, 0.0), (-1.0, INF)]),
    ("sigmoid", |x| x.sigmoid(), &[(NAN, NAN), (INF, 0.0), (-INF, 0.0)]),
    ("tanh", |x| x.tanh(), &[(NAN, NAN), (INF, 0.0), (-INF, 0.0)]),
    ("asin", |x| x.asin(), &[(NAN, NAN), (1.0, INF), (-1.0, INF), (2.0, NAN)]),
    ("acos", |x| x.acos(), &[(NAN, NAN), (1.0, -INF), (2.0, NAN)]),
    ("atanh", |x| x.atanh(), &[(NAN, NAN), (1.0, INF), (-1.0, INF)]),
    ("acosh", |x| x.acosh(), &[(NAN, NAN), (1.0, INF), (0.0, NAN)]),
    ("erf", |x| x.erf(), &[(NAN, NAN), (INF, 0.0), (-INF, 0.0)]),
    ("sinc", |x| x.sinc(), &[(NAN, NAN), (INF, NAN), (-INF, NAN), (0.0, 0.0)]),
    ("entr", |x| x.entr(), &[(NAN, NAN), (0.0, INF), (-1.0, NAN), (INF, -INF)]),
    ("frac", |x| x.frac(), &[(NAN, 1.0), (INF, 1.0), (1.0, 1.0)]),
    ("floor", |x| x.floor(), &[(NAN, 0.0), (INF, 0.0), (1.0, 0.0)]),
    ("logit", |x| x.logit(None), &[(NAN, NAN), (0.0, INF), (1.0, INF), (-0.5, NAN), (INF, NAN), (0.5, 4.0)]),
    (
        "logit with bounds",
        |x| x.logit(Some(0.25)),
        &[
            (NAN, NAN),
            (INF, 0.0),
            (-INF, 0.0),
            (0.25, 16.0 / 3.0),
            (0.75, 16.0 / 3.0),
            (0.125, 0.0),
            (0.5, 4.0),
        ],
    ),
    (
        "logit with bounds that cross",
        |x| x.logit(Some(0.75)),
        &[(NAN, NAN), (0.5, 0.0), (0.75, 0.0), (0.25, 0.0)],
    ),
    (
        "nan_to_num",
        |x| x.nan_to_num_with(&NanToNumOptions::default()),
        &[(NAN, 0.0), (INF, 0.0), (-INF, 0.0), (1.0, 1.0)],
    ),
    ("clamp", |x| x.clamp(-1.0, 1.0), &[(NAN, 0.0), (INF, 0.0), (-INF, 0.0), (0.5, 1.0)]),
    ("relu", |x| x.relu(), &[(NAN, 1.0), (INF, 1.0), (-INF, 0.0), (0.0, 0.0)]),
    ("leaky_relu", |x| x.leaky_relu(0.5), &[(NAN, 0.5), (INF, 1.0), (-INF, 0.5), (0.0, 0.5)]),
    ("elu", |x| x.elu(2.0), &[(NAN, 1.0), (INF, 1.0), (-INF, 0.0), (0.0, 2.0)]),
    ("celu", |x| x.celu(2.0), &[(NAN, 1.0), (INF, 1.0), (-INF, 0.0), (0.0, 1.0)]),
    ("softshrink", |x| x.softshrink(0.5), &[(NAN, 1.0), (INF, 1.0), (0.5, 0.0), (-0.5, 0.0), (1.0, 1.0)]),
    ("hardshrink", |x| x.hardshrink(0.5), &[(NAN, 1.0), (INF, 1.0), (0.5, 0.0), (-0.5, 0.0), (1.0, 1.0)]),
    ("threshold", |x| x.threshold(1.0, 5.0), &[(NAN, 1.0), (INF, 1.0), (-INF, 0.0), (1.0, 0.0)]),
    (
        "hardsigmoid",
        |x| x.hardsigmoid(),
        &[(NAN, 0.0), (INF, 0.0), (3.0, 0.0), (-3.0, 0.0), (0.0, 1.0 / 6.0)],
    ),
    ("softplus", |x| x.softplus(1.0, 20.0), &[(NAN, NAN), (INF, 1.0), (-INF, 0.0), (0.0, 0.5)]),
    ("logsigmoid", |x| x.logsigmoid(), &[(NAN, NAN), (INF, 0.0), (-INF, 1.0), (0.0, 0.5)]),
    ("silu", |x| x.silu(), &[(NAN, NAN), (INF, NAN), (-INF, NAN), (0.0, 0.5)]),
    ("softsign", |x| x.softsign(), &[(NAN, NAN), (INF, NAN), (-INF, NAN), (0.0, 1.0)]),
    ("tanhshrink", |x| x.tanhshrink(), &[(NAN, NAN), (INF, 1.0), (-INF, 1.0), (0.0, 0.0)]),
    ("maximum", |x| x.maximum(&x.zeros_like()?), &[(NAN, 1.0), (INF, 1.0), (-INF, 0.0), (0.0, 0.5)]),
    ("the power 0", |x| x.pow(0.0), &[(NAN, 0.0), (INF, 0.0), (0.0, 0.0)]),
    ("the power 2", |x| x.pow(2.0), &[(NAN, NAN), (INF, INF), (0.0, 0.0)]),
    ("xlogy", |x| x.xlogy(&x.ones_like()?), &[(NAN, 0.0), (0.0, 0.0)]),
];

fn is_near(got: f64, expected: f32) -> bool {
    let expected = f64::from(expected);
    (got.is_nan() && expected.is_nan()) || got == expected || (got - expected).abs() <= 1e-5 * expected.abs()
}

fn elementwise_gradients_at_edges(device: &Device) -> Result<()> {
    for (name, run, cases) in GRADIENTS {
        let values: Vec<f32> = cases.iter().map(|(x, _)| *x).collect();
        let x = Tensor::from_slice(&values, [values.len()], device)?.to_leaf()?;
        let y = run(&x)?;
        y.backward_with(&y.ones_like()?)?;
        let grads = x.grad().context("no gradient")?.to_f64s()?;
        for ((x, expected), got) in cases.iter().zip(grads) {
            ensure!(is_near(got, *expected), "{name} at {x}: gradient {got}, expected {expected}");
        }
    }
    Ok(())
}

fn losses_have_gradients_at_nan(device: &Device) -> Result<()> {
    type Loss = fn(&Tensor, &Tensor) -> ForebayResult<Tensor>;
    let losses: [(&str, Loss, f64); 4] = [
        ("l1_loss", |x, y| x.l1_loss(y, Reduction::Sum), 0.0),
        ("mse_loss", |x, y| x.mse_loss(y, Reduction::Sum), f64::NAN),
        ("smooth_l1_loss", |x, y| x.smooth_l1_loss(y, 1.0, Reduction::Sum), f64::NAN),
        ("huber_loss", |x, y| x.huber_loss(y, 1.0, Reduction::Sum), f64::NAN),
    ];
    for (name, loss, expected) in losses {
        let x = Tensor::from_slice(&[NAN, 2.0], [2], device)?.to_leaf()?;
        loss(&x, &Tensor::zeros([2], DType::F32, device)?)?.backward()?;
        let grads = x.grad().context("no gradient")?.to_f64s()?;
        let is_expected = grads[0] == expected || (grads[0].is_nan() && expected.is_nan());
        ensure!(is_expected && grads[1].is_finite(), "{name}: {grads:?}");
    }
    Ok(())
}

/// Samples an image of one row at x coordinates, with y in the middle.
fn sample_row(
    device: &Device,
    coordinates: &[f32],
    mode: GridMode,
    padding_mode: GridPadding,
    align_corners: bool,
) -> Result<(Tensor, Tensor, Tensor)> {
    let image = Tensor::from_slice(&[1.0f32, 2.0, 4.0], [1, 1, 1, 3], device)?.to_leaf()?;
    let grid: Vec<f32> = coordinates.iter().flat_map(|&x| [x, 0.0]).collect();
    let grid = Tensor::from_slice(&grid, [1, 1, coordinates.len(), 2], device)?.to_leaf()?;
    let out = image.grid_sample(&grid, &GridSampleOptions { mode, padding_mode, align_corners })?;
    Ok((image, grid, out))
}

fn grids_with_nonfinite_coordinates_read_edges(device: &Device) -> Result<()> {
    let coordinates = [NAN, INF, -INF, 3e38, -3e38];
    let cases: [(GridPadding, [f64; 5], [f64; 3]); 3] = [
        (GridPadding::Zeros, [0.0; 5], [0.0; 3]),
        (GridPadding::Border, [1.0, 4.0, 1.0, 4.0, 1.0], [3.0, 0.0, 2.0]),
        // The distance overflows, and its remainder is NaN.
        (GridPadding::Reflection, [1.0; 5], [5.0, 0.0, 0.0]),
    ];
    for (padding, values, image_grad) in cases {
        for mode in [GridMode::Bilinear, GridMode::Nearest] {
            let context = || format!("{mode:?} with {padding:?}");
            let (image, grid, out) = sample_row(device, &coordinates, mode, padding, false)?;
            ensure_values(&out, &values).with_context(context)?;
            out.sum_all()?.backward()?;
            ensure_values(&image.grad().context("no gradient")?, &image_grad).with_context(context)?;
            if mode == GridMode::Bilinear {
                let grads = grid.grad().context("no gradient")?.to_f64s()?;
                ensure!(grads.iter().all(|&g| g == 0.0), "{mode:?} with {padding:?}: {grads:?}");
            }
        }
    }
    // With a single element between its own centres, every coordinate reads this element.
    let image = Tensor::from_slice(&[7.0f32], [1, 1, 1, 1], device)?;
    let grid = Tensor::from_slice(&[NAN, INF, 0.5, -3e38], [1, 1, 2, 2], device)?;
    for padding_mode in [GridPadding::Border, GridPadding::Reflection] {
        let options = GridSampleOptions { padding_mode, align_corners: true, ..Default::default() };
        ensure_values(&image.grid_sample(&grid, &options)?, &[7.0, 7.0])?;
    }
    // Volumes read their first element.
    let volume = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [1, 1, 2, 2, 2], device)?;
    let grid = Tensor::full([1, 1, 1, 1, 3], f64::NAN, DType::F32, device)?;
    let options = GridSampleOptions { padding_mode: GridPadding::Border, ..Default::default() };
    ensure_values(&volume.grid_sample(&grid, &options)?, &[1.0])
}

fn bicubic_samples_at_nonfinite_coordinates_are_nan(device: &Device) -> Result<()> {
    for padding in [GridPadding::Zeros, GridPadding::Border, GridPadding::Reflection] {
        let (_, _, out) = sample_row(device, &[NAN, INF, -INF, 3e38], GridMode::Bicubic, padding, false)?;
        ensure_values(&out, &[f64::NAN; 4]).with_context(|| format!("{padding:?}"))?;
    }
    // A large coordinate that the map to elements does not overflow is an element far outside.
    let (image, _, out) = sample_row(device, &[1e30, 0.0], GridMode::Bicubic, GridPadding::Zeros, true)?;
    ensure_values(&out, &[0.0, 2.0])?;
    out.sum_all()?.backward()?;
    ensure_values(&image.grad().context("no gradient")?, &[0.0, 1.0, 0.0])
}

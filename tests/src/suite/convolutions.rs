//! Operations of image networks. Compares im2col with direct kernels, and batch norms with their composition.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{self, GradOptions};
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::ops::{BatchNormOptions, ConvolutionOptions, TransposedConvolutionOptions, cat};
use forebay::plan::dry_run;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits};
use super::tests;

tests![
    im2col_equals_gathering,
    gradients_of_weights_for_few_channels_are_products,
    gradients_of_many_weights_are_one_product,
    im2col_takes_the_predicted_bytes,
    im2col_is_captured,
    im2col_rounds_once_and_is_deterministic,
    gradients_of_weights_under_autocast_save_a_cast,
    depthwise_convolutions_equal_those_of_single_channels,
    large_convolutions_round_exact_sums_once,
    large_convolutions_take_the_predicted_bytes,
    large_convolutions_are_captured,
    large_convolutions_take_operands_that_begin_inside_a_vector,
    batch_norms_equal_their_composition,
    running_statistics_are_updated_in_place,
    batches_are_counted,
];

/// Bytes of im2col memory: for all images, for some images, for one image at a time.
const CHUNKS: [u64; 3] = [1 << 28, 40_000, 1];

/// Convolution, or a transposed one with its output padding.
#[derive(Clone, Copy, Debug)]
struct ConvCase {
    x: &'static [usize],
    w: &'static [usize],
    stride: usize,
    padding: usize,
    dilation: usize,
    groups: usize,
    transposed: Option<usize>,
}

impl ConvCase {
    const fn new(x: &'static [usize], w: &'static [usize]) -> Self {
        Self { x, w, stride: 1, padding: 0, dilation: 1, groups: 1, transposed: None }
    }

    fn run(&self, x: &Tensor, w: &Tensor, b: &Tensor) -> CoreResult<Tensor> {
        match (self.x.len(), self.transposed) {
            (3, None) => x.conv1d(w, Some(b), &self.options()),
            (4, None) => x.conv2d(w, Some(b), &self.options()),
            (_, None) => x.conv3d(w, Some(b), &self.options()),
            (3, Some(more)) => x.conv_transpose1d(w, Some(b), &self.transposed_options(more)),
            (4, Some(more)) => x.conv_transpose2d(w, Some(b), &self.transposed_options(more)),
            (_, Some(more)) => x.conv_transpose3d(w, Some(b), &self.transposed_options(more)),
        }
    }

    fn options<const N: usize>(&self) -> ConvolutionOptions<N> {
        let Self { stride, padding, dilation, groups, .. } = *self;
        ConvolutionOptions { stride: [stride; N], padding: padding.into(), dilation: [dilation; N], groups }
    }

    fn transposed_options<const N: usize>(&self, output_padding: usize) -> TransposedConvolutionOptions<N> {
        let Self { stride, padding, dilation, groups, .. } = *self;
        TransposedConvolutionOptions {
            stride: [stride; N],
            padding: [padding; N],
            output_padding: [output_padding; N],
            groups,
            dilation: [dilation; N],
        }
    }

    /// Returns the result, and the gradients of all three inputs.
    fn output_and_gradients(&self, dtype: DType, device: &Device) -> CoreResult<Vec<Tensor>> {
        let channels = if self.transposed.is_some() { self.w[1] * self.groups } else { self.w[0] };
        let of = |shape: &[usize], seed| digits(shape, seed, dtype, device)?.to_leaf();
        let (x, w, b) = (of(self.x, 1)?, of(self.w, 2)?, of(&[channels], 3)?);
        let y = self.run(&x, &w, &b)?;
        y.backward_with(&digits(y.shape(), 4, dtype, device)?)?;
        Ok([Some(y.detach()), x.grad(), w.grad(), b.grad()].into_iter().flatten().collect())
    }
}

/// Convolution with few positions, for whose weights the gradients of all images together take 9 MiB in f32.
const MANY_CHANNELS: ConvCase = ConvCase::new(&[16, 384, 4, 4], &[384, 384, 1, 1]);

const CASES: [ConvCase; 21] = [
    // A 1 x 1 kernel needs no im2col; rows are multiples of vector widths, then not.
    ConvCase::new(&[3, 20, 4, 8], &[6, 20, 1, 1]),
    ConvCase::new(&[3, 17, 7, 7], &[6, 17, 1, 1]),
    ConvCase { stride: 2, ..ConvCase::new(&[2, 18, 7, 6], &[5, 18, 1, 1]) },
    ConvCase { padding: 1, ..ConvCase::new(&[2, 16, 5, 5], &[4, 16, 1, 1]) },
    ConvCase { padding: 1, ..ConvCase::new(&[3, 4, 8, 8], &[6, 4, 3, 3]) },
    ConvCase { padding: 1, ..ConvCase::new(&[9, 4, 7, 7], &[6, 4, 3, 3]) },
    ConvCase { padding: 1, stride: 2, ..ConvCase::new(&[3, 4, 16, 8], &[6, 4, 3, 3]) },
    ConvCase { padding: 3, stride: 2, ..ConvCase::new(&[2, 3, 13, 12], &[4, 3, 7, 7]) },
    ConvCase { stride: 4, ..ConvCase::new(&[2, 3, 16, 16], &[8, 3, 4, 4]) },
    // The gradient of the input is a convolution with as many multiplications.
    ConvCase { stride: 2, ..ConvCase::new(&[2, 6, 16, 10], &[8, 6, 4, 4]) },
    ConvCase { stride: 2, padding: 2, ..ConvCase::new(&[2, 4, 8, 6, 12], &[6, 4, 4, 4, 4]) },
    ConvCase { stride: 2, transposed: Some(0), ..ConvCase::new(&[2, 8, 6, 5], &[8, 4, 2, 2]) },
    ConvCase { padding: 2, dilation: 2, groups: 2, ..ConvCase::new(&[3, 8, 9, 7], &[12, 4, 3, 2]) },
    ConvCase { padding: 1, stride: 3, dilation: 2, ..ConvCase::new(&[2, 4, 17, 15], &[5, 4, 3, 3]) },
    ConvCase { padding: 2, ..ConvCase::new(&[3, 4, 19], &[6, 4, 5]) },
    ConvCase { padding: 1, stride: 2, ..ConvCase::new(&[2, 4, 5, 6, 7], &[5, 4, 3, 3, 3]) },
    ConvCase { padding: 1, ..ConvCase::new(&[2, 4, 4, 4, 8], &[4, 4, 3, 1, 3]) },
    ConvCase { padding: 1, stride: 2, transposed: Some(1), ..ConvCase::new(&[3, 4, 5, 8], &[4, 6, 3, 3]) },
    ConvCase { transposed: Some(0), ..ConvCase::new(&[2, 8, 6, 5], &[8, 4, 2, 2]) },
    ConvCase { stride: 2, groups: 2, transposed: Some(0), ..ConvCase::new(&[2, 8, 9], &[8, 4, 5]) },
    MANY_CHANNELS,
];

/// Convolutions with a filter for each channel. Lines are whole words or not, and shorter or longer than a run. Strides
/// have a remainder or none. Others have filters beyond the padding, or one dimension, or are transposed.
const DEPTHWISE_CASES: [ConvCase; 26] = [
    ConvCase { padding: 1, groups: 5, ..ConvCase::new(&[3, 5, 8, 16], &[5, 1, 3, 3]) },
    ConvCase { padding: 1, groups: 3, ..ConvCase::new(&[2, 3, 5, 7], &[3, 1, 3, 3]) },
    ConvCase { padding: 3, groups: 4, ..ConvCase::new(&[2, 4, 14, 14], &[4, 1, 7, 7]) },
    ConvCase { padding: 3, groups: 2, ..ConvCase::new(&[70, 2, 7, 7], &[2, 1, 7, 7]) },
    ConvCase { padding: 1, stride: 2, groups: 3, ..ConvCase::new(&[2, 3, 16, 16], &[3, 1, 3, 3]) },
    ConvCase { padding: 2, stride: 2, groups: 3, ..ConvCase::new(&[2, 3, 15, 13], &[3, 1, 5, 5]) },
    ConvCase { padding: 1, stride: 4, groups: 2, ..ConvCase::new(&[2, 2, 17, 18], &[2, 1, 4, 4]) },
    ConvCase { padding: 4, dilation: 2, groups: 2, ..ConvCase::new(&[2, 2, 9, 12], &[2, 1, 5, 5]) },
    ConvCase {
        padding: 1,
        stride: 2,
        dilation: 3,
        groups: 2,
        ..ConvCase::new(&[2, 2, 11, 20], &[2, 1, 2, 3])
    },
    ConvCase { padding: 6, groups: 2, ..ConvCase::new(&[1, 2, 3, 2], &[2, 1, 3, 3]) },
    ConvCase { groups: 3, ..ConvCase::new(&[2, 3, 4, 9], &[3, 1, 1, 1]) },
    ConvCase { padding: 3, groups: 4, ..ConvCase::new(&[2, 4, 37], &[4, 1, 7]) },
    // Lines of 67, 65 and 129 results, which end within runs; the third has a stride. A line of 64 has whole runs. Four
    // lines of 65 are quads but not whole runs, and three are neither.
    ConvCase { padding: 3, groups: 4, ..ConvCase::new(&[2, 4, 64], &[4, 1, 4]) },
    ConvCase { padding: 1, groups: 2, ..ConvCase::new(&[2, 2, 3, 65], &[2, 1, 3, 3]) },
    ConvCase { padding: 1, stride: 2, groups: 2, ..ConvCase::new(&[2, 2, 4, 257], &[2, 1, 3, 3]) },
    ConvCase { padding: 1, groups: 2, ..ConvCase::new(&[1, 2, 2, 64], &[2, 1, 3, 3]) },
    ConvCase { padding: 2, groups: 4, ..ConvCase::new(&[1, 4, 65], &[4, 1, 5]) },
    ConvCase { padding: 2, groups: 3, ..ConvCase::new(&[1, 3, 65], &[3, 1, 5]) },
    ConvCase {
        padding: 1,
        stride: 2,
        groups: 3,
        transposed: Some(1),
        ..ConvCase::new(&[2, 3, 6, 5], &[3, 1, 3, 3])
    },
    ConvCase { stride: 2, groups: 3, transposed: Some(0), ..ConvCase::new(&[2, 3, 4, 8], &[3, 1, 2, 2]) },
    // Long filters of one line.
    ConvCase { padding: 15, groups: 4, ..ConvCase::new(&[2, 4, 100], &[4, 1, 31]) },
    ConvCase { padding: 9, stride: 2, groups: 3, ..ConvCase::new(&[2, 3, 67], &[3, 1, 18]) },
    // Planes of several strips of lines, with whole words and without, and threads with several strips.
    ConvCase { padding: 1, groups: 2, ..ConvCase::new(&[1, 2, 150, 6], &[2, 1, 3, 3]) },
    ConvCase { padding: 2, groups: 2, ..ConvCase::new(&[3, 2, 41, 11], &[2, 1, 5, 4]) },
    ConvCase { padding: 3, groups: 2, ..ConvCase::new(&[2, 2, 30, 24], &[2, 1, 7, 7]) },
    ConvCase { padding: 1, groups: 4, ..ConvCase::new(&[33_000, 4, 2, 2], &[4, 1, 3, 3]) },
];

/// Convolutions that are large enough for a backend's own kernels. They have blocks of pixels of all widths, and few
/// and many channels on both sides. Some have filters that are not square or dilated, partial tiles, strides or three
/// dimensions, and some are transposed.
const LARGE_CASES: [ConvCase; 12] = [
    ConvCase { padding: 1, ..ConvCase::new(&[4, 16, 64, 64], &[64, 16, 3, 3]) },
    ConvCase { padding: 1, ..ConvCase::new(&[4, 24, 64, 64], &[136, 24, 1, 3]) },
    ConvCase { padding: 2, ..ConvCase::new(&[24, 3, 32, 32], &[96, 3, 5, 5]) },
    ConvCase { padding: 1, ..ConvCase::new(&[64, 40, 16, 16], &[24, 40, 3, 3]) },
    ConvCase { padding: 1, ..ConvCase::new(&[16, 64, 40, 56], &[8, 64, 3, 3]) },
    ConvCase { padding: 3, ..ConvCase::new(&[16, 64, 32, 32], &[3, 64, 7, 7]) },
    ConvCase { padding: 6, dilation: 6, ..ConvCase::new(&[8, 40, 32, 32], &[72, 40, 3, 3]) },
    ConvCase { padding: 1, transposed: Some(0), ..ConvCase::new(&[8, 32, 64, 64], &[32, 16, 3, 3]) },
    ConvCase { padding: 1, ..ConvCase::new(&[2, 16, 16, 32, 32], &[24, 16, 3, 3, 3]) },
    ConvCase { padding: 1, stride: 2, ..ConvCase::new(&[4, 16, 16, 32, 32], &[64, 16, 3, 3, 3]) },
    ConvCase { padding: 1, stride: 2, ..ConvCase::new(&[8, 32, 64, 64], &[64, 32, 3, 3]) },
    ConvCase {
        padding: 1,
        stride: 2,
        transposed: Some(0),
        ..ConvCase::new(&[8, 64, 32, 32], &[64, 24, 4, 4])
    },
];

/// Convolutions with fewer rows of columns than im2col takes for the other products, but with many positions. Some have
/// no copies, strides, or unaligned lines.
const FEW_CHANNEL_CASES: [ConvCase; 3] = [
    ConvCase::new(&[2, 6, 128, 64], &[8, 6, 1, 1]),
    ConvCase { padding: 1, stride: 2, ..ConvCase::new(&[8, 1, 256, 256], &[5, 1, 3, 3]) },
    ConvCase::new(&[3, 2, 43_700], &[4, 2, 4]),
];

/// Returns values from -1 to 1 whose products and sums are exact in every type and order.
fn digits(shape: &[usize], seed: usize, dtype: DType, device: &Device) -> CoreResult<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f32> =
        (0..n).map(|i| [-1.0, 0.0, 1.0, 0.0, 0.5][(i * i * 31 + i * 7 * seed + seed) / 3 % 5]).collect();
    Tensor::from_slice(&values, shape, device)?.to_dtype(dtype)
}

/// Returns the device with its own pool and settings.
fn with_own_pool(device: &Device) -> Device {
    Device::with_config(Arc::clone(device.backend()), device.pool().config())
}

/// Checks that an output and its three gradients are equal, and that none of them is zero everywhere.
fn ensure_same_results(made: &[Tensor], expected: &[Tensor]) -> Result<()> {
    ensure!([made.len(), expected.len()] == [4, 4], "a gradient is missing");
    for (what, (made, expected)) in ["y", "dx", "dw", "db"].iter().zip(made.iter().zip(expected)) {
        ensure!(expected.abs()?.sum_all()?.item()? > 0.0, "{what} is nothing but zeros");
        ensure_close(&made.to_f64s()?, &expected.to_f64s()?, 0.0, 0.0).with_context(|| (*what).to_owned())?;
    }
    Ok(())
}

fn im2col_equals_gathering(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    for case in CASES {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            device.set_im2col_max_bytes(Some(0));
            let expected = case.output_and_gradients(dtype, device)?;
            for max_bytes in CHUNKS {
                device.set_im2col_max_bytes(Some(max_bytes));
                let made = case.output_and_gradients(dtype, device)?;
                ensure_same_results(&made, &expected)
                    .with_context(|| format!("{case:?} {dtype} {max_bytes}"))?;
            }
        }
    }
    Ok(())
}

fn gradients_of_weights_for_few_channels_are_products(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    for case in FEW_CHANNEL_CASES {
        for dtype in [DType::F32, DType::BF16] {
            let run = |max_bytes: u64| -> Result<(Vec<Tensor>, bool)> {
                device.set_im2col_max_bytes(Some(max_bytes));
                let profiler = Profiler::start(device)?;
                let made = case.output_and_gradients(dtype, device)?;
                let spans = profiler.finish()?.spans;
                Ok((made, spans.iter().any(|span| span.name.contains("kind=weight"))))
            };
            let (expected, is_direct) = run(0)?;
            ensure!(is_direct, "{case:?} {dtype}: without im2col, no direct kernel ran");
            for max_bytes in CHUNKS {
                let (made, is_direct) = run(max_bytes)?;
                ensure!(!is_direct, "{case:?} {dtype} {max_bytes}: the direct kernel computed dw");
                ensure_same_results(&made, &expected)
                    .with_context(|| format!("{case:?} {dtype} {max_bytes}"))?;
            }
        }
    }
    Ok(())
}

/// Each channel alone is a convolution with one group, which other kernels compute. Sums of digits are exact in f32, so
/// 16-bit results are the rounded f32 results.
fn depthwise_convolutions_equal_those_of_single_channels(device: &Device) -> Result<()> {
    for (k, case) in DEPTHWISE_CASES.into_iter().enumerate() {
        let of = |shape: &[usize], seed| digits(shape, seed, DType::F32, device)?.to_leaf();
        let (x, w, b) = (of(case.x, 1)?, of(case.w, 2)?, of(&[case.groups], 3)?);
        let channel = ConvCase { groups: 1, ..case };
        let parts = (0..case.groups)
            .map(|c| channel.run(&x.narrow(1, c, 1)?, &w.narrow(0, c, 1)?, &b.narrow(0, c, 1)?))
            .collect::<CoreResult<Vec<_>>>()?;
        let y = cat(&parts, 1)?;
        y.backward_with(&digits(y.shape(), 4, DType::F32, device)?)?;
        let exact = [Some(y.detach()), x.grad(), w.grad(), b.grad()];
        // f16 differs from bf16 only in how elements are read and written.
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        for &dtype in &dtypes[..if k < 2 { 3 } else { 2 }] {
            let made = case.output_and_gradients(dtype, device)?;
            ensure!(made.len() == 4, "{case:?} {dtype}: a gradient is missing");
            for (what, (made, exact)) in ["y", "dx", "dw", "db"].iter().zip(made.iter().zip(&exact)) {
                let exact = exact.as_ref().context("a gradient of the channels is missing")?;
                ensure!(exact.abs()?.sum_all()?.item()? > 0.0, "{case:?}: {what} is nothing but zeros");
                ensure_close(&made.to_f64s()?, &exact.to_dtype(dtype)?.to_f64s()?, 0.0, 0.0)
                    .with_context(|| format!("{case:?} {dtype}: {what}"))?;
            }
        }
    }
    Ok(())
}

/// Sums of digits are exact in f32, so 16-bit results equal the rounded f32 results, which another kernel computes.
fn large_convolutions_round_exact_sums_once(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    // A software driver has no kernels of its own, and takes many seconds for the others.
    let cases = if device.info().software { &LARGE_CASES[..2] } else { &LARGE_CASES[..] };
    for case in cases {
        let exact = case.output_and_gradients(DType::F32, device)?;
        for dtype in [DType::F16, DType::BF16] {
            let made = case.output_and_gradients(dtype, device)?;
            ensure!(made.len() == 4 && exact.len() == 4, "{case:?} {dtype}: a gradient is missing");
            for (what, (made, exact)) in ["y", "dx", "dw", "db"].iter().zip(made.iter().zip(&exact)) {
                ensure!(exact.abs()?.sum_all()?.item()? > 0.0, "{case:?}: {what} is nothing but zeros");
                // A bias that is added to the rounded sum rounds a second time.
                let once = *what != "y" || device.library_features().convolution;
                let relative = if once { 0.0 } else { 1.0 / 128.0 };
                let expected = exact.to_dtype(dtype)?.to_f64s()?;
                ensure_close(&made.to_f64s()?, &expected, relative, 0.0)
                    .with_context(|| format!("{case:?} {dtype}: {what}"))?;
            }
        }
    }
    Ok(())
}

/// Dry runs allocate what the device does. A backend's own kernels need less memory than column matrices.
fn large_convolutions_take_the_predicted_bytes(device: &Device) -> Result<()> {
    let profile = CardProfile::from_device(device);
    for case in LARGE_CASES {
        let predicted = dry_run(&profile, |dry| case.output_and_gradients(DType::BF16, dry))?;
        let real = with_own_pool(device);
        case.output_and_gradients(DType::BF16, &real)?;
        let (predicted, measured) = (predicted.peak_allocated, real.memory().peak_allocated());
        ensure!(predicted == measured, "{case:?}: predicted {predicted}, measured {measured}");
        // Columns along the width are the whole matrix of a filter of height 1.
        if device.library_features().convolution && case.w[2] > 1 {
            let mut without = profile.clone();
            without.library.convolution = false;
            let columns = dry_run(&without, |dry| case.output_and_gradients(DType::BF16, dry))?;
            let columns = columns.peak_allocated;
            ensure!(measured < columns, "{case:?}: {measured} bytes, and {columns} with column matrices");
        }
    }
    Ok(())
}

/// Gradients of the weights for each image would take far more memory than the images.
fn gradients_of_many_weights_are_one_product(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    MANY_CHANNELS.output_and_gradients(DType::BF16, device)?;
    let (peak, partial) = (device.memory().peak_allocated(), 4 * 16 * 384 * 384);
    ensure!(peak < partial, "{peak} bytes, and the gradients of 16 images take {partial}");
    Ok(())
}

fn large_convolutions_are_captured(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    let case = LARGE_CASES[0];
    let of = |shape: &[usize], seed| digits(shape, seed, DType::BF16, device);
    let (x, w, b) = (of(case.x, 1)?.to_leaf()?, of(case.w, 2)?.to_leaf()?, of(&[case.w[0]], 3)?);
    let step = || -> CoreResult<Vec<Tensor>> {
        let y = case.run(&x, &w, &b)?;
        let mut all = autograd::grad(&[y.sum_all()?], &[&x, &w], &GradOptions::default())?;
        all.push(y.detach());
        Ok(all)
    };
    let expected = step()?;
    let mut captured = device.capture(step)?;
    for (replayed, expected) in captured.replay()?.iter().zip(&expected) {
        ensure_same_bits(replayed, expected)?;
    }
    Ok(())
}

/// A backend's own kernels read whole vectors. Images that begin at another element are copied once for the gradient of
/// the weights, and no product is computed twice.
fn large_convolutions_take_operands_that_begin_inside_a_vector(device: &Device) -> Result<()> {
    let case = LARGE_CASES[0];
    let of = |shape: &[usize], seed| digits(shape, seed, DType::BF16, device);
    // The second filter has no columns of its own: its products read the images.
    for w in [case.w, &[64, 16, 3, 1]] {
        let case = ConvCase { padding: 0, w, ..case };
        let run = |start: usize| -> CoreResult<Vec<Tensor>> {
            let x = of(case.x, 1)?.reshape([-1])?;
            let all = cat(&[x.narrow(0, 0, start)?, x.clone()], 0)?;
            let x = all.narrow(0, start, x.numel())?.reshape(case.x)?.to_leaf()?;
            let (w, b) = (of(case.w, 2)?.to_leaf()?, of(&[case.w[0]], 3)?);
            let y = case.run(&x, &w, &b)?;
            y.backward_with(&of(y.shape(), 4)?)?;
            Ok([Some(y.detach()), x.grad(), w.grad()].into_iter().flatten().collect())
        };
        for (made, expected) in run(1)?.iter().zip(&run(8)?) {
            ensure_same_bits(made, expected)?;
        }
    }
    Ok(())
}

fn im2col_takes_the_predicted_bytes(device: &Device) -> Result<()> {
    let profile = CardProfile::from_device(device);
    for case in CASES {
        for (dtype, max_bytes) in [(DType::F32, CHUNKS[0]), (DType::BF16, CHUNKS[1])] {
            let predicted = dry_run(&profile, |dry| {
                dry.set_im2col_max_bytes(Some(max_bytes));
                case.output_and_gradients(dtype, dry)
            })?;
            let real = with_own_pool(device);
            real.set_im2col_max_bytes(Some(max_bytes));
            case.output_and_gradients(dtype, &real)?;
            let (predicted, measured) = (predicted.peak_allocated, real.memory().peak_allocated());
            ensure!(predicted == measured, "{case:?} {dtype}: predicted {predicted}, measured {measured}");
        }
    }
    Ok(())
}

fn im2col_is_captured(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    device.set_im2col_max_bytes(Some(CHUNKS[1]));
    let case = CASES[6];
    let of = |shape: &[usize], seed| digits(shape, seed, DType::F32, device);
    let (x, w) = (of(case.x, 1)?.to_leaf()?, of(case.w, 2)?.to_leaf()?);
    let b = of(&[case.w[0]], 3)?;
    let step = || -> CoreResult<Tensor> {
        let y = case.run(&x, &w, &b)?;
        y.square()?.sum_all()?.backward()?;
        Ok(y.detach())
    };
    let expected = step()?;
    let gradients =
        || [&x, &w].into_iter().map(|t| t.grad().context("no gradient")?.copy().map_err(Into::into));
    let once = gradients().collect::<Result<Vec<Tensor>>>()?;
    let mut captured = device.capture(step)?;
    ensure_same_bits(&captured.replay()?, &expected)?;
    // Eager, captured, and replayed.
    for (now, once) in gradients().zip(&once) {
        let times = now?.sum_all()?.item()? / once.sum_all()?.item()?;
        ensure!(times == 4.0, "gradients are {times} times those of a step");
    }
    Ok(())
}

fn im2col_rounds_once_and_is_deterministic(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    device.set_im2col_max_bytes(Some(CHUNKS[1]));
    for case in [CASES[4], CASES[5], CASES[6], CASES[14]] {
        let of = |shape: &[usize]| Tensor::randn(shape, DType::BF16, device)?.to_leaf();
        let (x, w) = (of(case.x)?, of(case.w)?);
        let none = Tensor::zeros([6], DType::BF16, device)?;
        let g = Tensor::randn(case.run(&x, &w, &none)?.shape(), DType::BF16, device)?;
        let run = |dtype: DType| -> Result<Vec<Tensor>> {
            let of = |t: &Tensor| t.detach().to_dtype(dtype)?.to_leaf();
            let (x, w) = (of(&x)?, of(&w)?);
            let y = case.run(&x, &w, &none.to_dtype(dtype)?)?;
            y.backward_with(&g.to_dtype(dtype)?)?;
            let [dx, dw] = [&x, &w].map(|t| t.grad().context("no gradient"));
            Ok(vec![y.detach(), dx?, dw?])
        };
        let (one, other, exact) = (run(DType::BF16)?, run(DType::BF16)?, run(DType::F32)?);
        for ((one, other), exact) in one.iter().zip(&other).zip(&exact) {
            ensure_same_bits(one, other)?;
            // Half a unit in the last place of eight bits, and f32's own error where terms cancel.
            let off = one.to_dtype(DType::F32)?.sub(exact)?.abs()?;
            let allowed = exact.abs()?.mul(1.0 / 256.0)?.add(1e-4)?;
            let beyond = off.gt(&allowed)?.to_dtype(DType::F32)?.sum_all()?.item()?;
            ensure!(beyond == 0.0, "{case:?}: {beyond} elements are not rounded once");
        }
    }
    Ok(())
}

/// The sum over images is also the cast to the weights' type. Its bits are those of a cast by hand, which is a kernel
/// of its own.
fn gradients_of_weights_under_autocast_save_a_cast(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    device.set_im2col_max_bytes(Some(CHUNKS[0]));
    let cases = [
        ConvCase { padding: 1, ..ConvCase::new(&[8, 16, 12, 12], &[24, 16, 3, 3]) },
        ConvCase { padding: 1, ..ConvCase::new(&[3, 16, 16, 8], &[16, 16, 3, 3]) },
        ConvCase { padding: 1, stride: 2, ..ConvCase::new(&[8, 16, 16, 16], &[32, 16, 3, 3]) },
        ConvCase::new(&[17, 32, 8, 8], &[16, 32, 1, 1]),
    ];
    for case in cases {
        let x = Tensor::randn(case.x, DType::BF16, device)?;
        let w = Tensor::randn(case.w, DType::F32, device)?;
        let run = |by_hand: bool| -> Result<([Tensor; 2], usize)> {
            let (x, w) = (x.to_leaf()?, w.to_leaf()?);
            let y = match by_hand {
                true => x.conv2d(&w.to_dtype(DType::BF16)?, None, &case.options())?,
                false => {
                    let _autocast = autocast(DType::BF16)?;
                    x.conv2d(&w, None, &case.options())?
                }
            };
            let g = y.detach().mul(0.37)?;
            let profiler = Profiler::start(device)?;
            y.backward_with(&g)?;
            let launches = profiler.finish()?.spans.len();
            let [dx, dw] = [&x, &w].map(|t| t.grad().context("no gradient"));
            Ok(([dx?, dw?], launches))
        };
        let ((by_hand, more), (made, launches)) = (run(true)?, run(false)?);
        ensure!(made[1].dtype() == DType::F32 && made[1].is_contiguous(), "{case:?}: {:?}", made[1]);
        for (made, by_hand) in made.iter().zip(&by_hand) {
            ensure_same_bits(made, by_hand).with_context(|| format!("{case:?}"))?;
        }
        ensure!(launches + 1 == more, "{case:?}: {launches} launches, and {more} with a cast by hand");
    }
    Ok(())
}

/// Batch norm composed of single operations in f32.
fn reference_batch_norm(x: &Tensor, w: &Tensor, b: &Tensor, relu: bool) -> CoreResult<Tensor> {
    let dims: Vec<isize> = (0..x.rank() as isize).filter(|&d| d != 1).collect();
    let mut each = vec![1; x.rank()];
    each[1] = w.numel();
    let away = x.sub(&x.mean(&dims, true)?)?;
    let rstd = away.square()?.mean(&dims, true)?.add(1e-5)?.rsqrt()?;
    let y = away.mul(&rstd)?.mul(&w.reshape(&each[..])?)?.add(&b.reshape(&each[..])?)?;
    if relu { y.relu() } else { Ok(y) }
}

fn batch_norms_equal_their_composition(device: &Device) -> Result<()> {
    // Rows that are multiples of four and others, single elements, split channels, odd element counts.
    let shapes: [&[usize]; 11] = [
        &[5, 3, 4, 6],
        &[4, 5, 7, 7],
        &[3, 5, 3],
        &[64, 12],
        &[33, 5],
        &[9, 2, 40, 40],
        &[3, 1, 77, 51],
        &[7, 40, 2],
        // Channels of four, eight and fourteen parts, of which one kernel adds up to four or eight itself.
        &[4, 2, 80, 80],
        &[9, 1, 80, 80],
        &[11, 1, 100, 100],
    ];
    for shape in shapes {
        let x = Tensor::randn(shape, DType::F32, device)?.mul(3.0)?.add(20.0)?.detach();
        let channels = [shape[1]];
        let w = Tensor::randn(channels, DType::F32, device)?.detach();
        let b = Tensor::randn(channels, DType::F32, device)?.detach();
        let g = Tensor::randn(shape, DType::F32, device)?;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for relu in [false, true] {
                let run = |x: &Tensor, parts: bool| -> Result<Vec<Tensor>> {
                    let [x, w, b] = [x, &w, &b].map(|t| t.detach().to_leaf());
                    let (x, w, b) = (x?, w?, b?);
                    let y = match (parts, relu) {
                        (true, _) => reference_batch_norm(&x, &w, &b, relu)?,
                        (_, false) => x.batch_norm(&BatchNormOptions {
                            weight: Some(&w),
                            bias: Some(&b),
                            training: true,
                            ..Default::default()
                        })?,
                        (_, true) => x.batch_norm_relu(&BatchNormOptions {
                            weight: Some(&w),
                            bias: Some(&b),
                            training: true,
                            ..Default::default()
                        })?,
                    };
                    y.backward_with(&g.to_dtype(dtype)?.to_dtype(y.dtype())?)?;
                    let gradients = [&x, &w, &b].map(|t| t.grad().context("no gradient"));
                    [Ok(y.detach())].into_iter().chain(gradients).collect()
                };
                let x = x.to_dtype(dtype)?;
                let (made, expected) = (run(&x, false)?, run(&x.to_dtype(DType::F32)?, true)?);
                for (what, (made, expected)) in ["y", "dx", "dw", "db"].iter().zip(made.iter().zip(&expected))
                {
                    let unit = match made.dtype() {
                        DType::BF16 => 1.0 / 256.0,
                        DType::F16 => 1.0 / 2048.0,
                        _ => 0.0,
                    };
                    // The error of this many f32 terms, for x near 20, where the mean is off by its last place.
                    let off = 2e-5 * (g.numel() as f64 / channels[0] as f64).sqrt() + 1e-5;
                    ensure_close(&made.to_f64s()?, &expected.to_f64s()?, unit + 1e-5, off)
                        .with_context(|| format!("{shape:?} {dtype}, relu {relu}: {what}"))?;
                }
            }
        }
    }
    Ok(())
}

fn running_statistics_are_updated_in_place(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 6.0, 10.0, 10.0, 30.0, 30.0], [2, 2, 2], device)?;
    // Channel 0: 1, 2, 10, 10; channel 1: 3, 6, 30, 30. Unbiased variances 24.25 and 218.25.
    let expected = [[5.75, 17.25], [24.25, 218.25]];
    for dtype in [DType::F32, DType::F16] {
        let all = Tensor::from_slice(&[9.0f32, 4.0, 8.0, 9.0, 2.0, 16.0], [2, 3], device)?.to_dtype(dtype)?;
        // As views with an offset, and as contiguous tensors.
        let views = [all.select(0, 0)?.narrow(0, 1, 2)?, all.select(0, 1)?.narrow(0, 1, 2)?];
        let own = [views[0].copy()?, views[1].copy()?];
        for [mean, var] in [&views, &own] {
            let before = [mean.to_f64s()?, var.to_f64s()?];
            x.batch_norm(&BatchNormOptions {
                running: Some((mean, var)),
                training: true,
                momentum: 0.25,
                ..Default::default()
            })?;
            for ((now, before), batch) in [mean, var].iter().zip(&before).zip(expected) {
                let followed: Vec<f64> =
                    before.iter().zip(batch).map(|(old, new)| 0.75 * old + 0.25 * new).collect();
                ensure_close(&now.to_f64s()?, &followed, if dtype == DType::F32 { 1e-6 } else { 1e-3 }, 0.0)?;
            }
        }
        let first = all.to_f64s()?;
        ensure!([first[0], first[3]] == [9.0, 9.0], "elements next to the running statistics changed");
    }
    Ok(())
}

fn batches_are_counted(device: &Device) -> Result<()> {
    let counters = Tensor::from_slice(&[3i32, 5, 7], [3], device)?;
    // The first element, and one at an offset.
    for k in [0, 1] {
        let counter = counters.narrow(0, k, 1)?;
        let run = |shape: [usize; 3], dtype: DType, training: bool| -> Result<i32> {
            let before = counter.to_vec::<i32>()?[0];
            let statistics = Tensor::ones([shape[1]], dtype, device)?;
            Tensor::zeros(shape, dtype, device)?.batch_norm(&BatchNormOptions {
                running: Some((&statistics, &statistics.copy()?)),
                training,
                num_batches_tracked: Some(&counter),
                ..Default::default()
            })?;
            Ok(counter.to_vec::<i32>()?[0] - before)
        };
        // With channels for more than one workgroup, without elements, and in evaluation.
        ensure!(run([4, 3, 5], DType::F32, true)? == 1, "a batch");
        ensure!(run([2, 700, 1], DType::F32, true)? == 1, "a batch of many channels");
        ensure!(run([0, 3, 5], DType::F32, true)? == 1, "an empty batch");
        ensure!(run([4, 3, 5], DType::F32, false)? == 0, "evaluation");
        if device.supports_dtype(DType::F64) {
            ensure!(run([4, 3, 5], DType::F64, true)? == 1, "a batch of f64");
        }
    }
    let now = counters.to_vec::<i32>()?;
    ensure!(now[2] == 7 && now[0] > 5 && now[1] > 7, "{now:?}");
    let wrong = Tensor::zeros([1], DType::F32, device)?;
    let options =
        BatchNormOptions { training: true, num_batches_tracked: Some(&wrong), ..Default::default() };
    let error = Tensor::zeros([2, 3], DType::F32, device)?.batch_norm(&options).err().context("no error")?;
    ensure!(error.to_string().contains("the number of batches is i32"), "{error}");
    Ok(())
}

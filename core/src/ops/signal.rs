//! Window functions for spectra and filters, composed of a sequence and elementwise operations.

use super::sequence::Sequence;
use crate::ops::prelude::*;

use std::f64::consts::PI;

fn interval_count(n: usize, periodic: bool) -> f64 {
    if periodic { n as f64 } else { n.saturating_sub(1) as f64 }
}

/// Creates `n` weights from their distances to the nearer edge, as fractions of the window from 0 to 1/2. If
/// `periodic`, as for spectra, the last edge is excluded.
#[track_caller]
fn build_window(
    op: &'static str,
    n: usize,
    periodic: bool,
    (dtype, device): (DType, &Device),
    weights: impl FnOnce(Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    operation!(op);
    fail_if!(!dtype.is_float(); dtype(op, dtype), "windows are floats");
    if n == 1 {
        return Tensor::ones([1], dtype, device);
    }
    let step = 1.0 / interval_count(n, periodic);
    let end = if periodic { step } else { 0.0 };
    let distances = Sequence::Float { start: 0.0, step, end, back: step, half: n.div_ceil(2) };
    let computed = if dtype == DType::F64 { dtype } else { DType::F32 };
    weights(distances.create(op, n, None, computed, device)?)?.to_dtype(dtype)
}

/// Adds `coefficient` · cos(2π · `order` · x) to `sum`, which starts as nothing.
fn add_cosine(sum: Option<Tensor>, x: &Tensor, order: usize, coefficient: f64) -> Result<Option<Tensor>> {
    let term = match order {
        0 => x.full_like(coefficient)?,
        _ => {
            let term = x.mul(2.0 * PI * order as f64)?;
            term.cos_()?;
            term.mul_(coefficient)?;
            term
        }
    };
    if let Some(sum) = &sum {
        term.add_(sum)?;
    }
    Ok(Some(term))
}

/// Returns Σ (-1)ᵏ aₖ cos(2πkx).
fn sum_cosines(x: &Tensor, coefficients: &[f64]) -> Result<Tensor> {
    let signed = coefficients.iter().enumerate().map(|(k, a)| (k, if k % 2 == 1 { -a } else { *a }));
    let sum = signed.into_iter().try_fold(None, |sum, (k, a)| add_cosine(sum, x, k, a))?;
    sum.map_or_else(|| x.zeros_like(), Ok)
}

/// Computes the modified Bessel function of order 0 by its power series, whose terms are all positive.
fn bessel_i0(x: f64) -> f64 {
    let (mut sum, mut term, mut k) = (1.0, 1.0, 1.0);
    while term > sum * f64::EPSILON / 8.0 {
        term *= (x / (2.0 * k)).powi(2);
        sum += term;
        k += 1.0;
    }
    sum
}

impl Tensor {
    /// Creates Σ (-1)ᵏ aₖ cos(2πkt) for t from 0 to 1: PyTorch's `signal.windows.general_cosine`. The
    /// coefficients 0.3635819, 0.4891775, 0.1365995 and 0.0106411 give Nuttall's window.
    ///
    /// # Errors
    /// There are no coefficients, or the dtype is not a float.
    #[track_caller]
    pub fn general_cosine_window(
        n: usize,
        coefficients: &[f64],
        periodic: bool,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        const OP: &str = "general_cosine_window";
        fail_if!(coefficients.is_empty(); argument(OP), "takes at least one coefficient");
        build_window(OP, n, periodic, (dtype, device), |x| sum_cosines(&x, coefficients))
    }

    /// Creates a Hann window of `n` weights, sin²(πt): `torch.hann_window`, which is `periodic` by default.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// assert_eq!(Tensor::hann_window(400, true, DType::F32, &device)?.shape(), [400]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The dtype is not a float.
    #[track_caller]
    pub fn hann_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("hann_window", n, periodic, (dtype, device), |x| {
            x.mul_(PI)?;
            x.sin_()?;
            x.square_()?;
            Ok(x)
        })
    }

    /// Creates a Hamming window, 0.54 - 0.46 · cos(2πt): `torch.hamming_window`. For other coefficients, use
    /// [`general_cosine_window`](Self::general_cosine_window).
    #[track_caller]
    pub fn hamming_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("hamming_window", n, periodic, (dtype, device), |x| sum_cosines(&x, &[0.54, 0.46]))
    }

    /// Creates a Blackman window: `torch.blackman_window`.
    #[track_caller]
    pub fn blackman_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("blackman_window", n, periodic, (dtype, device), |x| sum_cosines(&x, &[0.42, 0.5, 0.08]))
    }

    /// Creates a Bartlett (triangular) window: `torch.bartlett_window`.
    #[track_caller]
    pub fn bartlett_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("bartlett_window", n, periodic, (dtype, device), |x| x.mul(2.0))
    }

    /// Creates a Kaiser window, I0(beta · √(1 - (2t - 1)²)) / I0(beta): `torch.kaiser_window` (`beta` 12).
    ///
    /// # Errors
    /// `beta` is negative or above 700. See also [`hann_window`](Self::hann_window).
    #[track_caller]
    pub fn kaiser_window(
        n: usize,
        periodic: bool,
        beta: f64,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        const OP: &str = "kaiser_window";
        fail_if!(!(0.0..=700.0).contains(&beta); argument(OP), "takes a beta from 0 to 700, got {beta}");
        let scaled_normalizer = bessel_i0(beta) * (-beta).exp();
        build_window(OP, n, periodic, (dtype, device), |x| {
            // The root r of 1 - (1 - 2x)². I0 is scaled by an exponential, because it overflows f32.
            let root = x.mul(&x.neg()?.add(1.0)?)?.mul(4.0)?.sqrt()?;
            let excess = x.mul(-2.0)?.add(1.0)?.square()?.div(&root.add(1.0)?)?;
            let scale = excess.mul(-beta)?.exp()?.mul(1.0 / scaled_normalizer)?;
            root.mul(beta)?.i0e()?.mul(&scale)
        })
    }

    /// Creates a centred Gaussian window with a standard deviation of `std` weights:
    /// `torch.signal.windows.gaussian`.
    ///
    /// # Errors
    /// `std` is not above 0. See also [`hann_window`](Self::hann_window).
    #[track_caller]
    pub fn gaussian_window(
        n: usize,
        std: f64,
        periodic: bool,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        const OP: &str = "gaussian_window";
        fail_if!(std.is_nan() || std <= 0.0; argument(OP), "takes a standard deviation above 0, got {std}");
        let steps = interval_count(n, periodic);
        build_window(OP, n, periodic, (dtype, device), |x| {
            x.sub_(0.5)?;
            x.mul_(steps / std)?;
            x.square_()?;
            x.mul_(-0.5)?;
            x.exp_()?;
            Ok(x)
        })
    }
}

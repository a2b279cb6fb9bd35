//! Window functions for spectra and filters. The host computes them.

use super::shape::from_host_fn;
use crate::ops::prelude::*;

use std::f64::consts::PI;

fn interval_count(n: usize, periodic: bool) -> f64 {
    if periodic { n as f64 } else { n.saturating_sub(1) as f64 }
}

/// Creates `n` weights at positions from 0 to 1. If `periodic`, as for spectra, 1 is excluded.
#[track_caller]
fn build_window(
    op: &'static str,
    n: usize,
    periodic: bool,
    (dtype, device): (DType, &Device),
    weight: impl Fn(f64) -> f64,
) -> Result<Tensor> {
    operation!(op);
    fail_if!(!dtype.is_float(); dtype(op, dtype), "windows are floats");
    let steps = interval_count(n, periodic);
    // A single weight is 1.
    let value = |k: usize| if n == 1 { 1.0 } else { weight(k as f64 / steps) };
    from_host_fn(op, n, dtype, device, value)
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
        build_window(OP, n, periodic, (dtype, device), |t| {
            let terms = coefficients.iter().enumerate();
            let signed = |(k, a): (usize, &f64)| {
                a * (2.0 * PI * k as f64 * t).cos() * if k % 2 == 1 { -1.0 } else { 1.0 }
            };
            terms.map(signed).sum()
        })
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
        build_window("hann_window", n, periodic, (dtype, device), |t| (PI * t).sin().powi(2))
    }

    /// Creates a Hamming window, 0.54 - 0.46 · cos(2πt): `torch.hamming_window`. For other coefficients, use
    /// [`general_cosine_window`](Self::general_cosine_window).
    #[track_caller]
    pub fn hamming_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("hamming_window", n, periodic, (dtype, device), |t| 0.54 - 0.46 * (2.0 * PI * t).cos())
    }

    /// Creates a Blackman window: `torch.blackman_window`.
    #[track_caller]
    pub fn blackman_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("blackman_window", n, periodic, (dtype, device), |t| {
            0.42 - 0.5 * (2.0 * PI * t).cos() + 0.08 * (4.0 * PI * t).cos()
        })
    }

    /// Creates a Bartlett (triangular) window: `torch.bartlett_window`.
    #[track_caller]
    pub fn bartlett_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("bartlett_window", n, periodic, (dtype, device), |t| 1.0 - (2.0 * t - 1.0).abs())
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
        let normalizer = bessel_i0(beta);
        build_window(OP, n, periodic, (dtype, device), |t| {
            bessel_i0(beta * (1.0 - (2.0 * t - 1.0).powi(2)).max(0.0).sqrt()) / normalizer
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
        build_window(OP, n, periodic, (dtype, device), |t| (-0.5 * (steps * (t - 0.5) / std).powi(2)).exp())
    }
}

//! Window functions: weights that fall off to both sides, for spectra and filters. They are made on the host.

use super::shape::from_host_fn;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::runtime::device::Device;
use crate::tensor::Tensor;

use std::f64::consts::PI;

/// How many weights lie between 0 and 1.
fn interval_count(n: usize, periodic: bool) -> f64 {
    if periodic { n as f64 } else { n.saturating_sub(1) as f64 }
}

/// `n` weights by where they stand from 0 to 1: the last one at 1, or if `periodic` the one behind it, as spectra want it.
#[track_caller]
fn build_window(
    op: &'static str,
    n: usize,
    periodic: bool,
    (dtype, device): (DType, &Device),
    weight: impl Fn(f64) -> f64,
) -> Result<Tensor> {
    if !dtype.is_float() {
        return Err(Error::dtype(op, dtype, "windows are floats"));
    }
    let steps = interval_count(n, periodic);
    // One weight alone is 1.
    let value = |k: usize| if n == 1 { 1.0 } else { weight(k as f64 / steps) };
    from_host_fn(op, n, dtype, device, value)
}

/// The modified Bessel function of order 0, by its series, all of whose terms are positive.
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
    /// A sum of cosines as weights: Σ (-1)ᵏ aₖ cos(2πkt) for t from 0 to 1. PyTorch's `signal.windows.general_cosine`; the coefficients 0.3635819,
    /// 0.4891775, 0.1365995 and 0.0106411 give Nuttall's window.
    ///
    /// # Errors
    /// There are no coefficients; the dtype is no float; memory runs out.
    #[track_caller]
    pub fn general_cosine_window(
        n: usize,
        coefficients: &[f64],
        periodic: bool,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        const OP: &str = "general_cosine_window";
        if coefficients.is_empty() {
            return Err(Error::argument(OP, "takes at least one coefficient"));
        }
        build_window(OP, n, periodic, (dtype, device), |t| {
            let terms = coefficients.iter().enumerate();
            let signed = |(k, a): (usize, &f64)| {
                a * (2.0 * PI * k as f64 * t).cos() * if k % 2 == 1 { -1.0 } else { 1.0 }
            };
            terms.map(signed).sum()
        })
    }

    /// Hann's window of `n` weights, sin²(πt): `torch.hann_window`, whose default is `periodic`.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// assert_eq!(Tensor::hann_window(400, true, DType::F32, &device)?.shape(), [400]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The dtype is no float; memory runs out.
    #[track_caller]
    pub fn hann_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("hann_window", n, periodic, (dtype, device), |t| (PI * t).sin().powi(2))
    }

    /// Hamming's window, alpha - beta · cos(2πt): `torch.hamming_window`, whose defaults are 0.54 and 0.46.
    ///
    /// # Errors
    /// As [`hann_window`](Self::hann_window).
    #[track_caller]
    pub fn hamming_window(
        n: usize,
        periodic: bool,
        alpha: f64,
        beta: f64,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        build_window("hamming_window", n, periodic, (dtype, device), |t| alpha - beta * (2.0 * PI * t).cos())
    }

    /// Blackman's window: `torch.blackman_window`.
    ///
    /// # Errors
    /// As [`hann_window`](Self::hann_window).
    #[track_caller]
    pub fn blackman_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("blackman_window", n, periodic, (dtype, device), |t| {
            0.42 - 0.5 * (2.0 * PI * t).cos() + 0.08 * (4.0 * PI * t).cos()
        })
    }

    /// Bartlett's window, a triangle: `torch.bartlett_window`.
    ///
    /// # Errors
    /// As [`hann_window`](Self::hann_window).
    #[track_caller]
    pub fn bartlett_window(n: usize, periodic: bool, dtype: DType, device: &Device) -> Result<Tensor> {
        build_window("bartlett_window", n, periodic, (dtype, device), |t| 1.0 - (2.0 * t - 1.0).abs())
    }

    /// Kaiser's window, I0(beta · √(1 - (2t - 1)²)) / I0(beta): `torch.kaiser_window`, whose default for `beta` is 12.
    ///
    /// # Errors
    /// As [`hann_window`](Self::hann_window); `beta` is negative, or larger than 700.
    #[track_caller]
    pub fn kaiser_window(
        n: usize,
        periodic: bool,
        beta: f64,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        const OP: &str = "kaiser_window";
        if !(0.0..=700.0).contains(&beta) {
            return Err(Error::argument(OP, format!("takes a beta from 0 to 700, got {beta}")));
        }
        let most = bessel_i0(beta);
        build_window(OP, n, periodic, (dtype, device), |t| {
            bessel_i0(beta * (1.0 - (2.0 * t - 1.0).powi(2)).max(0.0).sqrt()) / most
        })
    }

    /// Gauss' window around the middle, with a standard deviation of `std` weights: `torch.signal.windows.gaussian`.
    ///
    /// # Errors
    /// As [`hann_window`](Self::hann_window); `std` is not above 0.
    #[track_caller]
    pub fn gaussian_window(
        n: usize,
        std: f64,
        periodic: bool,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        const OP: &str = "gaussian_window";
        if std.is_nan() || std <= 0.0 {
            return Err(Error::argument(OP, format!("takes a standard deviation above 0, got {std}")));
        }
        let steps = interval_count(n, periodic);
        build_window(OP, n, periodic, (dtype, device), |t| (-0.5 * (steps * (t - 0.5) / std).powi(2)).exp())
    }
}

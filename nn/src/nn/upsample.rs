//! Resizing as a layer.

use super::summary::OptionsText;
use super::{Module, ModuleScope};
use crate::{Result, Tensor};
use forebay_core::ops::InterpolateOptions;

/// Interpolation of signals, images or volumes to other extents; see [`interpolate`](Tensor::interpolate).
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::InterpolateOptions, tensor::Tensor};
/// # use forebay_nn::nn::Upsample;
/// # let device = Device::null(Default::default());
/// let twice = Upsample::new(InterpolateOptions::with_scale_factor(2.0));
/// let x = Tensor::zeros(&[1, 3, 4, 4], DType::F32, &device)?;
/// assert_eq!(twice.forward(&x)?.shape(), [1, 3, 8, 8]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug, extra_repr)]
pub struct Upsample {
    #[module(skip)]
    options: InterpolateOptions,
    scope: ModuleScope,
}

impl Upsample {
    /// Creates a layer with the extents or factors of the options.
    #[must_use]
    pub fn new(options: InterpolateOptions) -> Self {
        Self { options, scope: ModuleScope::new() }
    }

    fn extra_repr(&self) -> String {
        let InterpolateOptions { size, scale_factor, mode, .. } = &self.options;
        OptionsText::default()
            .set_if(!size.is_empty(), "size", format_args!("{size:?}"))
            .set_if(!scale_factor.is_empty(), "scale_factor", format_args!("{scale_factor:?}"))
            .set("mode", format_args!("{mode:?}"))
            .finish()
    }

    /// Resizes the dimensions after \[batch, channels\].
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.interpolate(&self.options))
    }
}

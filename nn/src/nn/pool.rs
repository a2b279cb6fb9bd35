//! Pooling as layers.

use super::Module;
use super::summary::{OptionsText, flag, tuple};
use crate::{Result, Tensor, fail_if};
use forebay_core::ops::PoolOptions;

/// Implements constructors of pooling layers.
macro_rules! impl_pool_new {
    ($($layer:ident $n:literal)*) => {$(
        impl $layer {
            /// Creates a layer from [`PoolOptions`], or from the extent of a window, as PyTorch's class does.
            ///
            /// ```
            /// # use forebay_core::ops::PoolOptions;
            #[doc = concat!("# use forebay_nn::nn::", stringify!($layer), ";")]
            #[doc = concat!("let layer = ", stringify!($layer), "::new(2);")]
            #[doc = concat!("assert_eq!(layer, ", stringify!($layer), "(PoolOptions::new(2)));")]
            /// ```
            #[must_use]
            pub fn new(options: impl Into<PoolOptions<$n>>) -> Self {
                Self(options.into())
            }
        }
    )*};
}
impl_pool_new!(MaxPool1d 1 MaxPool2d 2 MaxPool3d 3 AvgPool1d 1 AvgPool2d 2 AvgPool3d 3);

/// Returns the options that all pools have.
fn window_repr<const N: usize>(window: &PoolOptions<N>) -> OptionsText {
    let text = OptionsText::default().set("kernel_size", tuple(&window.kernel));
    text.set("stride", tuple(&window.stride)).set("padding", tuple(&window.padding))
}

fn max_repr<const N: usize>(window: &PoolOptions<N>) -> String {
    let text = window_repr(window).set("dilation", tuple(&window.dilation));
    text.set("ceil_mode", flag(window.ceil_mode)).finish()
}

method_layers! {
    MaxPool1d(PoolOptions<1>) max_pool1d "The largest element of each window of signals" |window| max_repr(window);
    MaxPool2d(PoolOptions<2>) max_pool2d "The largest element of each window of images" |window| max_repr(window);
    MaxPool3d(PoolOptions<3>) max_pool3d "The largest element of each window of volumes" |window| max_repr(window);
    AvgPool1d(PoolOptions<1>) avg_pool1d "The average of each window of signals" |window| window_repr(window).finish();
    AvgPool2d(PoolOptions<2>) avg_pool2d "The average of each window of images" |window| window_repr(window).finish();
    AvgPool3d(PoolOptions<3>) avg_pool3d "The average of each window of volumes" |window| window_repr(window).finish();
    AdaptiveAvgPool1d(usize) adaptive_avg_pool1d "Averages of signals over a fixed number of windows" |size| format!("output_size={size}");
    AdaptiveAvgPool2d([usize; 2]) adaptive_avg_pool2d "Averages of images over a fixed number of windows" |size| format!("output_size={}", tuple(size));
    AdaptiveAvgPool3d([usize; 3]) adaptive_avg_pool3d "Averages of volumes over a fixed number of windows" |size| format!("output_size={}", tuple(size));
    AdaptiveMaxPool1d(usize) adaptive_max_pool1d "Maxima of signals over a fixed number of windows" |size| format!("output_size={size}");
    AdaptiveMaxPool2d([usize; 2]) adaptive_max_pool2d "Maxima of images over a fixed number of windows" |size| format!("output_size={}", tuple(size));
    AdaptiveMaxPool3d([usize; 3]) adaptive_max_pool3d "Maxima of volumes over a fixed number of windows" |size| format!("output_size={}", tuple(size));
}

/// p-norm of each window: [`lp_pool2d`](Tensor::lp_pool2d), for signals, images and volumes.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
#[module(extra_repr)]
pub struct LpPool<const N: usize> {
    /// Exponent of the norm.
    pub p: f64,
    /// Window, without padding.
    #[module(skip)]
    pub options: PoolOptions<N>,
}

impl<const N: usize> LpPool<N> {
    fn extra_repr(&self) -> String {
        let text =
            OptionsText::default().set("norm_type", self.p).set("kernel_size", tuple(&self.options.kernel));
        text.set("stride", tuple(&self.options.stride))
            .set("ceil_mode", flag(self.options.ceil_mode))
            .finish()
    }
}

/// Inverse of max pooling: places maxima at their indices and zeros elsewhere
/// ([`max_unpool2d`](Tensor::max_unpool2d)), for signals, images and volumes.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::Pool2dOptions, tensor::Tensor};
/// # use forebay_nn::nn::MaxUnpool2d;
/// # let device = Device::null(Default::default());
/// let options = Pool2dOptions::new(2);
/// let x = Tensor::zeros(&[1, 3, 8, 6], DType::F32, &device)?;
/// let (maxima, indices) = x.max_pool2d_with_indices(options)?;
/// assert_eq!(MaxUnpool2d { options }.forward(&maxima, &indices, None)?.shape(), x.shape());
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Module)]
#[module(extra_repr)]
pub struct MaxUnpool<const N: usize> {
    /// Window of the pooling.
    #[module(skip)]
    pub options: PoolOptions<N>,
}

impl<const N: usize> MaxUnpool<N> {
    fn extra_repr(&self) -> String {
        window_repr(&self.options).finish()
    }
}

/// Output size of a [`FractionalMaxPool`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FractionalSize<const N: usize> {
    /// Number of windows in each dimension.
    OutputSize([usize; N]),
    /// Number of windows as fractions of the input's extents, each below 1.
    OutputRatio([f64; N]),
}

/// Maximum of windows at random positions, for images and volumes:
/// [`fractional_max_pool2d`](Tensor::fractional_max_pool2d).
#[derive(Clone, Copy, Debug, PartialEq, Module)]
#[module(extra_repr)]
pub struct FractionalMaxPool<const N: usize> {
    /// Extents of a window.
    pub kernel_size: [usize; N],
    /// Number of windows.
    #[module(skip)]
    pub output_size: FractionalSize<N>,
}

impl<const N: usize> FractionalMaxPool<N> {
    fn extra_repr(&self) -> String {
        let text = OptionsText::default().set("kernel_size", tuple(&self.kernel_size));
        match self.output_size {
            FractionalSize::OutputSize(windows) => text.set("output_size", tuple(&windows)),
            FractionalSize::OutputRatio(parts) => text.set("output_ratio", format_args!("{parts:?}")),
        }
        .finish()
    }

    /// Returns the number of windows of an input.
    #[track_caller]
    fn output_extents(&self, x: &Tensor) -> Result<[usize; N]> {
        let parts = match self.output_size {
            FractionalSize::OutputSize(windows) => return Ok(windows),
            FractionalSize::OutputRatio(parts) => parts,
        };
        fail_if!(parts.iter().any(|part| !(0.0..1.0).contains(part)) || x.rank() < N;
            shape("FractionalMaxPool", [x]), "takes parts between 0 and 1 of {N} dimensions, not {parts:?}");
        Ok(std::array::from_fn(|d| (x.shape()[x.rank() - N + d] as f64 * parts[d]) as usize))
    }
}

macro_rules! dimensioned_pools {
    ($($n:literal $what:literal $lp:ident $lp_op:ident $unpool:ident $unpool_op:ident;)*) => {$(
        #[doc = concat!("[`LpPool`] for ", $what, ".")]
        pub type $lp = LpPool<$n>;
        #[doc = concat!("[`MaxUnpool`] for ", $what, ".")]
        pub type $unpool = MaxUnpool<$n>;

        impl LpPool<$n> {
            /// Applies the pooling to `x`.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$lp_op(self.p, self.options)
            }
        }

        impl_forward!($lp);

        impl MaxUnpool<$n> {
            /// Places the elements of `x` at their indices in a result of these extents. `None` stands for
            /// [the smallest extents](PoolOptions::unpool_output_size) that give the shape of `x`.
            #[track_caller]
            pub fn forward(&self, x: &Tensor, indices: &Tensor, output: Option<[usize; $n]>) -> Result<Tensor> {
                let pooled = std::array::from_fn(|d| x.shape().iter().rev().nth($n - 1 - d).copied().unwrap_or(1));
                x.$unpool_op(indices, output.unwrap_or_else(|| self.options.unpool_output_size(pooled)))
            }
        }
    )*};
}
dimensioned_pools! {
    1 "signals" LpPool1d lp_pool1d MaxUnpool1d max_unpool1d;
    2 "images" LpPool2d lp_pool2d MaxUnpool2d max_unpool2d;
    3 "volumes" LpPool3d lp_pool3d MaxUnpool3d max_unpool3d;
}

macro_rules! fractional_pools {
    ($($n:literal $what:literal $layer:ident $op:ident;)*) => {$(
        #[doc = concat!("[`FractionalMaxPool`] for ", $what, ".")]
        pub type $layer = FractionalMaxPool<$n>;

        impl FractionalMaxPool<$n> {
            /// Applies the pooling to `x`, with the errors of [`forward_with_indices`](Self::forward_with_indices).
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                Ok(self.forward_with_indices(x, None)?.0)
            }

            #[doc = concat!("Applies [`", stringify!($op), "`](Tensor::", stringify!($op), "),")]
            /// and returns the indices too. Without `samples`, the positions of the windows are random.
            #[track_caller]
            pub fn forward_with_indices(&self, x: &Tensor, samples: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
                x.$op(self.kernel_size, self.output_extents(x)?, samples)
            }
        }

        impl_forward!($layer);
    )*};
}
fractional_pools! {
    2 "images" FractionalMaxPool2d fractional_max_pool2d;
    3 "volumes" FractionalMaxPool3d fractional_max_pool3d;
}

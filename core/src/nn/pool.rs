//! Pooling as layers.

use super::Module;
use crate::error::Result;
use crate::ops::Pool;
use crate::tensor::Tensor;

/// Layers that call a method of a tensor with a window, or with the extents of the result.
macro_rules! pools {
    ($($layer:ident($of:ty) $op:ident $doc:literal;)*) => {$(
        #[doc = concat!($doc, ": [`", stringify!($op), "`](Tensor::", stringify!($op), ").")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Module)]
        #[module(crate = crate)]
        pub struct $layer(#[module(skip)] pub $of);

        impl $layer {
            /// `x`, pooled.
            ///
            /// # Errors
            /// A window does not fit; the dtype is no 16- or 32-bit float; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$op(self.0)
            }
        }
    )*};
}

pools! {
    MaxPool1d(Pool<1>) max_pool1d "The largest element of each window of signals";
    MaxPool2d(Pool<2>) max_pool2d "The largest element of each window of images";
    MaxPool3d(Pool<3>) max_pool3d "The largest element of each window of volumes";
    AvgPool1d(Pool<1>) avg_pool1d "The average of each window of signals";
    AvgPool2d(Pool<2>) avg_pool2d "The average of each window of images";
    AvgPool3d(Pool<3>) avg_pool3d "The average of each window of volumes";
    AdaptiveAvgPool1d(usize) adaptive_avg_pool1d "So many averages of signals";
    AdaptiveAvgPool2d([usize; 2]) adaptive_avg_pool2d "So many averages of images, height and width";
    AdaptiveAvgPool3d([usize; 3]) adaptive_avg_pool3d "So many averages of volumes, depth, height and width";
    AdaptiveMaxPool1d(usize) adaptive_max_pool1d "So many maxima of signals";
    AdaptiveMaxPool2d([usize; 2]) adaptive_max_pool2d "So many maxima of images, height and width";
    AdaptiveMaxPool3d([usize; 3]) adaptive_max_pool3d "So many maxima of volumes, depth, height and width";
}

/// The p-norm of each window: [`lp_pool2d`](Tensor::lp_pool2d), of signals with `N` of 1 and of images with 2.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
#[module(crate = crate)]
pub struct LpPool<const N: usize> {
    /// Which norm.
    pub p: f64,
    /// The window, without padding.
    #[module(skip)]
    pub window: Pool<N>,
}

/// Of signals.
pub type LpPool1d = LpPool<1>;
/// Of images.
pub type LpPool2d = LpPool<2>;

impl LpPool<1> {
    /// `x`, pooled.
    ///
    /// # Errors
    /// As [`lp_pool2d`](Tensor::lp_pool2d).
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.lp_pool1d(self.p, self.window)
    }
}

impl LpPool<2> {
    /// `x`, pooled.
    ///
    /// # Errors
    /// As [`lp_pool2d`](Tensor::lp_pool2d).
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.lp_pool2d(self.p, self.window)
    }
}

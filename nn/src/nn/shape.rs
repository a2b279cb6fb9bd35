//! Layers that only rearrange elements: padding, flattening, shuffling, unfolding.

use super::Module;
use super::summary::{OptionsText, tuple};
use crate::{Result, Tensor, fail};
use forebay_core::ops::{Im2colOptions, PadMode, Scalar};
use forebay_core::tensor::IntoShape;

/// Layer that returns its input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Module)]
pub struct Identity;

impl Identity {
    /// Returns `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }
}

with_defaults! {
    /// Joins dimensions into one: [`flatten`](Tensor::flatten).
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::Flatten;
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::zeros(&[2, 3, 4], DType::F32, &device)?;
    /// assert_eq!(Flatten::default().forward(&x)?.shape(), [2, 12]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Module)]
    pub struct Flatten {
        /// First dimension to join; 1.
        pub start_dim: isize = 1,
        /// Last dimension to join; -1.
        pub end_dim: isize = -1,
    }
}

impl Flatten {
    /// Returns `x` with these dimensions joined.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.flatten(self.start_dim, self.end_dim)
    }
}

/// Splits a dimension into several: [`unflatten`](Tensor::unflatten).
#[derive(Clone, Debug, PartialEq, Eq, Module)]
pub struct Unflatten {
    /// Dimension to split.
    pub dim: isize,
    /// Extents, one of which may be -1.
    pub sizes: Vec<isize>,
}

impl Unflatten {
    /// Creates a layer that splits `dim` into these extents, one of which may be -1.
    #[must_use]
    pub fn new(dim: isize, sizes: impl IntoShape) -> Self {
        Self { dim, sizes: sizes.to_extents().to_vec() }
    }

    /// Returns `x` with the dimension split. The product of the extents is the extent of the dimension.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.unflatten(self.dim, &self.sizes)
    }
}

method_layers! {
    PixelShuffle(usize) pixel_shuffle "Images of fewer channels that are larger by a factor" |factor| format!("upscale_factor={factor}");
    PixelUnshuffle(usize) pixel_unshuffle "Images of more channels that are smaller by a factor" |factor| format!("downscale_factor={factor}");
    ChannelShuffle(usize) channel_shuffle "Channels that are exchanged between groups" |groups| format!("groups={groups}");
}

/// Extraction of image blocks as columns: [`im2col`](Tensor::im2col), PyTorch's `Unfold`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Module)]
#[module(extra_repr)]
pub struct Unfold {
    /// Extents of a block.
    pub kernel_size: [usize; 2],
    /// Positions of the blocks.
    #[module(skip)]
    pub options: Im2colOptions,
}

impl Unfold {
    /// Creates a layer that extracts every block of these extents.
    #[must_use]
    pub fn new(kernel_size: [usize; 2]) -> Self {
        Self { kernel_size, options: Im2colOptions::default() }
    }

    fn extra_repr(&self) -> String {
        let Im2colOptions { dilation, padding, stride, .. } = &self.options;
        let text = OptionsText::default().set("kernel_size", tuple(&self.kernel_size));
        text.set("dilation", tuple(dilation))
            .set("padding", tuple(padding))
            .set("stride", tuple(stride))
            .finish()
    }

    /// Extracts blocks: \[batch, channels, height, width\] to \[batch, channels · block, blocks\].
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.im2col(self.kernel_size, &self.options)
    }
}

/// Sum of columns into images: [`col2im`](Tensor::col2im), PyTorch's `Fold`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Module)]
#[module(extra_repr)]
pub struct Fold {
    /// Height and width of the images.
    pub output_size: [usize; 2],
    /// Positions of the blocks in the images.
    #[module(skip)]
    pub blocks: Unfold,
}

impl Fold {
    /// Creates a layer that sums every block of these extents into images.
    #[must_use]
    pub fn new(output_size: [usize; 2], kernel_size: [usize; 2]) -> Self {
        Self { output_size, blocks: Unfold::new(kernel_size) }
    }

    fn extra_repr(&self) -> String {
        format!("output_size={}, {}", tuple(&self.output_size), self.blocks.extra_repr())
    }

    /// Sums blocks: \[batch, channels · block, blocks\] to \[batch, channels, height, width\].
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.col2im(self.output_size, self.blocks.kernel_size, &self.blocks.options)
    }
}

/// Defines layers that pad the last dimensions: before and after each, from the last dimension on.
macro_rules! pad_layers {
    ($($layer:ident $n:literal $mode:expr, $doc:literal;)*) => {$(
        #[doc = concat!("Pads the last ", stringify!($n), " dimensions ", $doc, ": before and after, from the last dimension on. Negative padding crops.")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Module)]
        pub struct $layer(pub [isize; 2 * $n]);

        impl $layer {
            /// Creates a layer with equal padding on every side.
            #[must_use]
            pub fn new(padding: isize) -> Self {
                Self([padding; 2 * $n])
            }

            /// Pads `x`: see [`pad`](Tensor::pad).
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.pad(&self.0, $mode)
            }
        }

        impl_forward!($layer);
    )*};
}
pad_layers! {
    ZeroPad1d 1 PadMode::Constant(0.0.into()), "with zeros";
    ZeroPad2d 2 PadMode::Constant(0.0.into()), "with zeros";
    ZeroPad3d 3 PadMode::Constant(0.0.into()), "with zeros";
    ReflectionPad1d 1 PadMode::Reflect, "with their mirror image";
    ReflectionPad2d 2 PadMode::Reflect, "with their mirror image";
    ReflectionPad3d 3 PadMode::Reflect, "with their mirror image";
    ReplicationPad1d 1 PadMode::Replicate, "with their edge";
    ReplicationPad2d 2 PadMode::Replicate, "with their edge";
    ReplicationPad3d 3 PadMode::Replicate, "with their edge";
    CircularPad1d 1 PadMode::Circular, "with their other end";
    CircularPad2d 2 PadMode::Circular, "with their other end";
    CircularPad3d 3 PadMode::Circular, "with their other end";
}

/// Pads the last `N` dimensions with a constant: both sides, from the last dimension on. Negative padding
/// crops.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::ConstantPad;
/// # let device = Device::null(Default::default());
/// let pad = ConstantPad::<2>::new(&[1, 1, 0, 2], 3.5)?;
/// assert_eq!(pad.forward(&Tensor::zeros(&[2, 3, 4], DType::F32, &device)?)?.shape(), [2, 5, 6]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Module)]
pub struct ConstantPad<const N: usize> {
    padding: Vec<isize>,
    #[module(skip)]
    value: Scalar,
}

/// Constant padding of signals.
pub type ConstantPad1d = ConstantPad<1>;
/// Constant padding of images.
pub type ConstantPad2d = ConstantPad<2>;
/// Constant padding of volumes.
pub type ConstantPad3d = ConstantPad<3>;

impl<const N: usize> ConstantPad<N> {
    /// Creates a layer that pads with `value`. `padding` is one extent for all sides, or two for each of the `N`
    /// dimensions.
    #[track_caller]
    pub fn new(padding: &[isize], value: impl Into<Scalar>) -> Result<Self> {
        let padding = match padding {
            [all] => vec![*all; 2 * N],
            each if each.len() == 2 * N => each.to_vec(),
            other => {
                fail!(
                    argument("ConstantPad"),
                    "takes one number or {}, two for each dimension; got {other:?}",
                    2 * N
                );
            }
        };
        Ok(Self { padding, value: value.into() })
    }

    /// Pads `x`: see [`pad`](Tensor::pad).
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.pad(&self.padding, PadMode::Constant(self.value))
    }
}

//! Convolutions and transposed convolutions as layers.

use super::{HasWeight, Module, ModuleScope, init};
use forebay_core::device::Device;
use forebay_core::error::{Error, Result};
use forebay_core::ops::{IntoSpatial, PadMode, Padding, check_at_least};
use forebay_core::tensor::Tensor;
use forebay_core::tensor::layout::numel;

/// How a convolution of `N` spatial dimensions moves its window. `Conv2dOptions { padding: [1, 1], ..Default::default() }`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvOptions<const N: usize> {
    /// Steps of the window; 1.
    pub stride: [usize; N],
    /// What is added on every side; 0.
    pub padding: [usize; N],
    /// In place of `padding`, what lets the output have the extents of the input, at a stride of 1: PyTorch's `padding="same"`; no.
    pub same_padding: bool,
    /// What stands there; zeros.
    pub padding_mode: PadMode,
    /// Distance of the window's elements; 1.
    pub dilation: [usize; N],
    /// Groups of channels that are apart; 1.
    pub groups: usize,
    /// Whether there is a bias; yes.
    pub bias: bool,
}

/// How a [`Conv1d`] moves its window.
pub type Conv1dOptions = ConvOptions<1>;
/// How a [`Conv2d`] moves its window.
pub type Conv2dOptions = ConvOptions<2>;
/// How a [`Conv3d`] moves its window.
pub type Conv3dOptions = ConvOptions<3>;

impl<const N: usize> Default for ConvOptions<N> {
    fn default() -> Self {
        Self {
            stride: [1; N],
            padding: [0; N],
            same_padding: false,
            padding_mode: PadMode::Constant(0.0),
            dilation: [1; N],
            groups: 1,
            bias: true,
        }
    }
}

/// How a transposed convolution of `N` spatial dimensions spreads its input.
/// `ConvTranspose2dOptions { stride: [2, 2], ..Default::default() }`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvTransposeOptions<const N: usize> {
    /// Steps of the window over the output; 1.
    pub stride: [usize; N],
    /// What is cut from every side of the output; 0.
    pub padding: [usize; N],
    /// What is added to one side of the output; 0.
    pub output_padding: [usize; N],
    /// Distance of the window's elements; 1.
    pub dilation: [usize; N],
    /// Groups of channels that are apart; 1.
    pub groups: usize,
    /// Whether there is a bias; yes.
    pub bias: bool,
}

/// How a [`ConvTranspose1d`] spreads its input.
pub type ConvTranspose1dOptions = ConvTransposeOptions<1>;
/// How a [`ConvTranspose2d`] spreads its input.
pub type ConvTranspose2dOptions = ConvTransposeOptions<2>;
/// How a [`ConvTranspose3d`] spreads its input.
pub type ConvTranspose3dOptions = ConvTransposeOptions<3>;

impl<const N: usize> Default for ConvTransposeOptions<N> {
    fn default() -> Self {
        Self {
            stride: [1; N],
            padding: [0; N],
            output_padding: [0; N],
            dilation: [1; N],
            groups: 1,
            bias: true,
        }
    }
}

/// A weight of \[lead, other / groups, kernel..\] and a bias of `outputs`, uniform within 1/√fan_in, where the fan is the weight without its
/// first dimension: PyTorch counts so for transposed ones too.
#[track_caller]
fn create_parameters(
    layer: &'static str,
    [lead, other]: [usize; 2],
    outputs: usize,
    kernel: &[usize],
    groups: usize,
    bias: bool,
    device: &Device,
) -> Result<(Tensor, Option<Tensor>)> {
    if groups == 0 || !lead.is_multiple_of(groups) || !other.is_multiple_of(groups) {
        let inputs = if lead == outputs { other } else { lead };
        let why = format!("{inputs} and {outputs} channels do not divide into {groups} groups");
        return Err(Error::argument(layer, why));
    }
    let shape = [&[lead, other / groups], kernel].concat();
    let fan_in = numel(&shape[1..]);
    let bias = if bias { Some(init::create_uniform_parameter(&[outputs], fan_in, device)?) } else { None };
    Ok((init::create_uniform_parameter(&shape, fan_in, device)?, bias))
}

/// A layer: its options, the order of channels in its weight, and what it does with a weight and an input.
macro_rules! conv_layer {
    (
        $layer:ident($options:ident<$n:literal>) $doc:literal $shape:literal $weight:literal $outputs_dim:literal
        [$in:ident, $out:ident -> $lead:ident, $other:ident]
        |$this:ident, $w:ident, $x:ident| $forward:expr
    ) => {
        #[doc = concat!($doc, " of \\[batch, channels, ", $shape, "\\].")]
        #[derive(Debug, Module)]
        #[module(crate = crate)]
        pub struct $layer {
            #[doc = concat!("\\[", $weight, ", ", $shape, "\\].")]
            pub weight: Tensor,
            /// \[out\].
            pub bias: Option<Tensor>,
            #[module(skip)]
            options: $options<$n>,
            scope: ModuleScope,
        }

        impl $layer {
            /// Weight and bias uniform within 1/√fan_in, as PyTorch. The kernel is one extent, or one for each dimension.
            ///
            /// # Errors
            /// The channels do not divide into the groups; the kernel has an extent of 0; memory runs out.
            #[track_caller]
            pub fn new(
                $in: usize,
                $out: usize,
                kernel: impl IntoSpatial<$n>,
                options: $options<$n>,
                device: &Device,
            ) -> Result<Self> {
                let (name, channels) = (stringify!($layer), [$lead, $other]);
                let kernel = check_at_least(name, "kernel_size", kernel.spatial(), 1)?;
                let (weight, bias) =
                    create_parameters(name, channels, $out, &kernel, options.groups, options.bias, device)?;
                Ok(Self { weight, bias, options, scope: ModuleScope::new() })
            }

            #[doc = concat!("\\[batch, in, ", $shape, "\\] to \\[batch, out, ..\\].")]
            ///
            /// # Errors
            /// The channels of `x` are not the layer's; a stride other than 1 with `same_padding`; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.forward_with(&self.weight, x)
            }
        }

        impl HasWeight for $layer {
            const OUTPUTS_DIM: usize = $outputs_dim;

            fn weight(&self) -> &Tensor {
                &self.weight
            }

            fn weight_mut(&mut self) -> &mut Tensor {
                &mut self.weight
            }

            #[track_caller]
            fn forward_with(&self, $w: &Tensor, $x: &Tensor) -> Result<Tensor> {
                let $this = self;
                self.scope.run(|| $forward)
            }
        }
    };
}

macro_rules! conv_layers {
    ($($n:literal $shape:literal $conv:ident $op:ident $transpose:ident $transpose_op:ident;)*) => {$(
        conv_layer! {
            $conv(ConvOptions<$n>) "A convolution" $shape "out, in / groups" 0 [inputs, outputs -> outputs, inputs]
            |this, w, x| {
                let ConvOptions { stride, padding, same_padding, padding_mode, dilation, groups, .. } = this.options;
                let bias = this.bias.as_ref();
                match padding_mode {
                    PadMode::Constant(0.0) if same_padding => x.$op(w, bias, stride, Padding::Same, dilation, groups),
                    PadMode::Constant(0.0) => x.$op(w, bias, stride, padding, dilation, groups),
                    mode => {
                        let sides = if same_padding { same_padding_sides(w, stride, dilation)? } else { padding.map(|n| [n; 2]) };
                        // From the last dimension on.
                        let pads: Vec<isize> = sides.iter().rev().flatten().map(|&n| n as isize).collect();
                        x.pad(&pads, mode)?.$op(w, bias, stride, [0; $n], dilation, groups)
                    }
                }
            }
        }
        conv_layer! {
            $transpose(ConvTransposeOptions<$n>) "A transposed convolution" $shape "in, out / groups" 1
            [inputs, outputs -> inputs, outputs]
            |this, w, x| {
                let ConvTransposeOptions { stride, padding, output_padding, dilation, groups, .. } = this.options;
                x.$transpose_op(w, this.bias.as_ref(), stride, padding, output_padding, groups, dilation)
            }
        }
    )*};
}

conv_layers! {
    1 "length" Conv1d conv1d ConvTranspose1d conv_transpose1d;
    2 "height, width" Conv2d conv2d ConvTranspose2d conv_transpose2d;
    3 "depth, height, width" Conv3d conv3d ConvTranspose3d conv_transpose3d;
}

/// What goes before and behind each dimension so that it keeps its extent; an odd number puts one more behind, as in PyTorch.
fn same_padding_sides<const N: usize>(
    weight: &Tensor,
    stride: [usize; N],
    dilation: [usize; N],
) -> Result<[[usize; 2]; N]> {
    if stride != [1; N] {
        return Err(Error::argument("conv", format!("`same_padding` takes a stride of 1, not {stride:?}")));
    }
    Ok(std::array::from_fn(|d| {
        let both = dilation[d] * weight.shape().get(d + 2).map_or(0, |taps| taps.saturating_sub(1));
        [both / 2, both - both / 2]
    }))
}

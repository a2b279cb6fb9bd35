//! Convolutions and transposed convolutions as layers.

use super::summary::{OptionsText, flag, tuple};
use super::{HasWeight, Module, ModuleScope, init};
use crate::{Device, Result, Tensor, fail, fail_if};
use forebay_core::ops::{
    ConvolutionOptions, IntoSpatial, PadMode, Padding, TransposedConvolutionOptions, check_at_least,
};
use forebay_core::tensor::layout::numel;

with_defaults! {
    /// Options of a convolution with `N` dimensions. `Conv2dOptions { padding: [1, 1], ..Default::default()
    /// }`.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct ConvOptions<const N: usize> {
        /// Stride of the kernel; 1.
        pub stride: [usize; N] = [1; N],
        /// Padding on both sides of each dimension; 0.
        pub padding: [usize; N] = [0; N],
        /// If true, replaces `padding` by the padding that preserves the extents of the input: PyTorch's
        /// `padding="same"`. Requires a stride of 1; false.
        pub same_padding: bool = false,
        /// Values of the padding; zeros.
        pub padding_mode: PadMode = PadMode::Constant(0.0.into()),
        /// Distance between elements of the kernel; 1.
        pub dilation: [usize; N] = [1; N],
        /// Number of independent groups of channels; 1.
        pub groups: usize = 1,
        /// If true, the layer has a bias; true.
        pub bias: bool = true,
    }
}

/// Options of a [`Conv1d`].
pub type Conv1dOptions = ConvOptions<1>;
/// Options of a [`Conv2d`].
pub type Conv2dOptions = ConvOptions<2>;
/// Options of a [`Conv3d`].
pub type Conv3dOptions = ConvOptions<3>;

with_defaults! {
    /// Options of a transposed convolution with `N` dimensions. `ConvTranspose2dOptions { stride: [2, 2],
    /// ..Default::default() }`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ConvTransposeOptions<const N: usize> {
        /// Stride of the kernel over the output; 1.
        pub stride: [usize; N] = [1; N],
        /// Number of elements removed from both sides of each output dimension; 0.
        pub padding: [usize; N] = [0; N],
        /// Number of elements added to one side of each output dimension; 0.
        pub output_padding: [usize; N] = [0; N],
        /// Distance between elements of the kernel; 1.
        pub dilation: [usize; N] = [1; N],
        /// Number of independent groups of channels; 1.
        pub groups: usize = 1,
        /// If true, the layer has a bias; true.
        pub bias: bool = true,
    }
}

/// Options of a [`ConvTranspose1d`].
pub type ConvTranspose1dOptions = ConvTransposeOptions<1>;
/// Options of a [`ConvTranspose2d`].
pub type ConvTranspose2dOptions = ConvTransposeOptions<2>;
/// Options of a [`ConvTranspose3d`].
pub type ConvTranspose3dOptions = ConvTransposeOptions<3>;

/// Creates a weight of \[lead, other / groups, kernel..\] and a bias of `outputs`, both uniform within
/// 1/√fan_in. The fan-in is the size of the weight without its first dimension, as in PyTorch, also if
/// transposed.
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
        fail!(argument(layer), "{inputs} and {outputs} channels do not divide into {groups} groups");
    }
    let shape = [&[lead, other / groups], kernel].concat();
    let fan_in = numel(&shape[1..]);
    let bias = if bias { Some(init::create_uniform_parameter(&[outputs], fan_in, device)?) } else { None };
    Ok((init::create_uniform_parameter(&shape, fan_in, device)?, bias))
}

/// Defines a layer from its options, the order of channels in its weight, and its operation.
macro_rules! conv_layer {
    (
        $layer:ident($options:ident<$n:literal>) $doc:literal $shape:literal $weight:literal $outputs_dim:literal
        [$in:ident, $out:ident -> $lead:ident, $other:ident]
        |$this:ident, $w:ident, $x:ident| $forward:expr, |$options_text:ident| $special:expr
    ) => {
        #[doc = concat!($doc, " of \\[batch, channels, ", $shape, "\\].")]
        #[derive(Module)]
        #[module(debug, extra_repr)]
        pub struct $layer {
            #[doc = concat!("\\[", $weight, ", ", $shape, "\\].")]
            pub weight: Tensor,
            /// Bias, \[out\].
            pub bias: Option<Tensor>,
            #[module(skip)]
            options: $options<$n>,
            scope: ModuleScope,
        }

        impl $layer {
            /// Creates a layer with weight and bias uniform within 1/√fan_in, as in PyTorch. `kernel` is one
            /// extent above 0, or one for each dimension. The groups divide the channels.
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

            /// Returns the channels and the kernel, and the options that differ from PyTorch's defaults.
            fn extra_repr(&self) -> String {
                let $this = self;
                let options = &self.options;
                let shape = self.weight.shape();
                // The second extent of the weight is that of a group.
                let [$lead, $other] = [shape[0], shape[1] * options.groups];
                let $options_text = OptionsText::default()
                    .value($in)
                    .value($out)
                    .set("kernel_size", tuple(&shape[2..]))
                    .set("stride", tuple(&options.stride))
                    .set_if(options.padding != [0; $n], "padding", tuple(&options.padding))
                    .set_if(options.dilation != [1; $n], "dilation", tuple(&options.dilation))
                    .set_if(options.groups != 1, "groups", options.groups)
                    .set_if(self.bias.is_none(), "bias", flag(false));
                $special.finish()
            }

            #[doc = concat!("Applies the layer: \\[batch, in, ", $shape, "\\] to \\[batch, out, ..\\].")]
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

        impl_forward!($layer);
    };
}

macro_rules! conv_layers {
    ($($n:literal $shape:literal $conv:ident $op:ident $transpose:ident $transpose_op:ident;)*) => {$(
        conv_layer! {
            $conv(ConvOptions<$n>) "A convolution" $shape "out, in / groups" 0 [inputs, outputs -> outputs, inputs]
            |this, w, x| {
                let ConvOptions { stride, padding, same_padding, padding_mode, dilation, groups, .. } = this.options;
                let bias = this.bias.as_ref();
                let with_padding = |padding| ConvolutionOptions { stride, padding, dilation, groups };
                match padding_mode {
                    PadMode::Constant(value) if value.to_f64() == 0.0 && same_padding => x.$op(w, bias, &with_padding(Padding::Same)),
                    PadMode::Constant(value) if value.to_f64() == 0.0 => x.$op(w, bias, &with_padding(padding.into())),
                    mode => {
                        let sides = if same_padding { same_padding_sides(w, stride, dilation)? } else { padding.map(|n| [n; 2]) };
                        // `pad` takes the last dimension first.
                        let pads: Vec<isize> = sides.iter().rev().flatten().map(|&n| n as isize).collect();
                        x.pad(&pads, mode)?.$op(w, bias, &with_padding(Padding::Valid))
                    }
                }
            },
            |text| {
                let ConvOptions { same_padding, padding_mode, .. } = this.options;
                text.set_if(same_padding, "padding", "same")
                    .set_if(padding_mode != PadMode::Constant(0.0.into()), "padding_mode", format_args!("{padding_mode:?}"))
            }
        }
        conv_layer! {
            $transpose(ConvTransposeOptions<$n>) "A transposed convolution" $shape "in, out / groups" 1
            [inputs, outputs -> inputs, outputs]
            |this, w, x| {
                let ConvTransposeOptions { stride, padding, output_padding, dilation, groups, .. } = this.options;
                let options = TransposedConvolutionOptions { stride, padding, output_padding, groups, dilation };
                x.$transpose_op(w, this.bias.as_ref(), &options)
            },
            |text| {
                let output_padding = this.options.output_padding;
                text.set_if(output_padding != [0; $n], "output_padding", tuple(&output_padding))
            }
        }
    )*};
}

conv_layers! {
    1 "length" Conv1d conv1d ConvTranspose1d conv_transpose1d;
    2 "height, width" Conv2d conv2d ConvTranspose2d conv_transpose2d;
    3 "depth, height, width" Conv3d conv3d ConvTranspose3d conv_transpose3d;
}

/// Returns the padding before and after each dimension that preserves its extent. An odd total puts the extra
/// element after, as in PyTorch.
#[track_caller]
fn same_padding_sides<const N: usize>(
    weight: &Tensor,
    stride: [usize; N],
    dilation: [usize; N],
) -> Result<[[usize; 2]; N]> {
    fail_if!(stride != [1; N]; argument("conv"), "`same_padding` takes a stride of 1, not {stride:?}");
    Ok(std::array::from_fn(|d| {
        let both = dilation[d] * weight.shape().get(d + 2).map_or(0, |taps| taps.saturating_sub(1));
        [both / 2, both - both / 2]
    }))
}

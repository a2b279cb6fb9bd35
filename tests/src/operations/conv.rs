//! Convolutions.

use anyhow::Context as _;

use super::prelude::*;

/// Returns `N` integers: a list, or one for all; `default` if missing or empty.
fn integers<const N: usize>(
    a: &Args<'_>,
    at: usize,
    name: &str,
    default: [usize; N],
) -> anyhow::Result<[usize; N]> {
    let list: Vec<usize> =
        a.dims(at, name)?.into_iter().map(usize::try_from).collect::<anyhow::Result<_, _>>()?;
    match list[..] {
        [] => Ok(default),
        [n] => Ok([n; N]),
        ref list => list.try_into().with_context(|| format!("{name} has {} integers, not {N}", list.len())),
    }
}

fn padding<const N: usize>(a: &Args<'_>, at: usize) -> anyhow::Result<Padding<N>> {
    Ok(match a.string(at, "padding", "") {
        "same" => Padding::Same,
        "valid" => Padding::Valid,
        _ => Padding::Zeros(integers(a, at, "padding", [0; N])?),
    })
}

fn groups(a: &Args<'_>, at: usize) -> anyhow::Result<usize> {
    Ok(usize::try_from(a.int(at, "groups", 1)?)?)
}

/// Golden call of a convolution.
macro_rules! convolution {
    ($n:literal, $name:ident) => {
        |a| {
            let options = ConvolutionOptions::<$n> {
                stride: integers(a, 3, "stride", [1; $n])?,
                padding: padding(a, 4)?,
                dilation: integers(a, 5, "dilation", [1; $n])?,
                groups: groups(a, 6)?,
            };
            single(a.tensor(0)?.$name(a.tensor(1)?, a.opt_tensor(2, "bias"), &options))
        }
    };
}

/// Golden call of a transposed convolution.
macro_rules! transposed_convolution {
    ($n:literal, $name:ident) => {
        |a| {
            let options = TransposedConvolutionOptions::<$n> {
                stride: integers(a, 3, "stride", [1; $n])?,
                padding: integers(a, 4, "padding", [0; $n])?,
                output_padding: integers(a, 5, "output_padding", [0; $n])?,
                groups: groups(a, 6)?,
                dilation: integers(a, 7, "dilation", [1; $n])?,
            };
            single(a.tensor(0)?.$name(a.tensor(1)?, a.opt_tensor(2, "bias"), &options))
        }
    };
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(conv1d(
        t1,
        maybe2,
        ConvolutionOptions { stride: count1, padding: padding, dilation: count1, groups: count }
    )))
    .case(
        smooth("conv1d", &[Signed(&[2, 3, 9]), Signed(&[4, 3, 3]), Signed(&[4])], |x| {
            x[0].conv1d(
                &x[1],
                Some(&x[2]),
                &ConvolutionOptions { stride: [2], padding: 1.into(), ..Default::default() },
            )
        })
        .with_flops(cost::conv_flops)
        .with_bench_inputs(&[Signed(&[32, 256, 1024]), Signed(&[256, 256, 3]), Signed(&[256])])
        .with_batched_inputs(1),
    )
    .golden(convolution!(1, conv1d));
    ops.add(method!(conv2d(
        t1,
        maybe2,
        ConvolutionOptions { stride: count2, padding: padding, dilation: count2, groups: count }
    )))
    .case(
        smooth("conv2d", &[Signed(&[2, 3, 6, 5]), Signed(&[4, 3, 3, 2]), Signed(&[4])], |x| {
            let options = ConvolutionOptions { stride: [2, 1], padding: [1, 0].into(), ..Default::default() };
            x[0].conv2d(&x[1], Some(&x[2]), &options)
        })
        .with_flops(cost::conv_flops)
        .with_bench_inputs(&[Signed(&[32, 64, 56, 56]), Signed(&[128, 64, 3, 2]), Signed(&[128])])
        .with_batched_inputs(1),
    )
    .case(
        smooth("conv2d of groups, dilated", &[Signed(&[1, 4, 7, 7]), Signed(&[6, 2, 3, 3])], |x| {
            let options =
                ConvolutionOptions { padding: 2.into(), dilation: [2, 2], groups: 2, ..Default::default() };
            x[0].conv2d(&x[1], None, &options)
        })
        .with_flops(cost::conv_flops)
        .with_bench_inputs(&[Signed(&[32, 128, 56, 56]), Signed(&[128, 64, 3, 3])]),
    )
    .golden(convolution!(2, conv2d));
    ops.add(method!(conv3d(
        t1,
        maybe2,
        ConvolutionOptions { stride: count3, padding: padding, dilation: count3, groups: count }
    )))
    .case(
        smooth("conv3d", &[Signed(&[1, 2, 4, 4, 4]), Signed(&[2, 2, 2, 2, 2])], |x| {
            x[0].conv3d(&x[1], None, &Default::default())
        })
        .with_flops(cost::conv_flops)
        .with_bench_inputs(&[Signed(&[4, 32, 16, 32, 32]), Signed(&[32, 32, 2, 2, 2])]),
    )
    .golden(convolution!(3, conv3d));
    ops.add(method!(conv_transpose2d(
        t1,
        maybe2,
        TransposedConvolutionOptions {
            stride: count2,
            padding: count2,
            output_padding: count2,
            groups: count,
            dilation: count2
        }
    )))
    .case(
        smooth("conv_transpose2d", &[Signed(&[2, 3, 4, 4]), Signed(&[3, 2, 3, 3]), Signed(&[2])], |x| {
            let options = TransposedConvolutionOptions {
                stride: [2, 2],
                padding: [1, 1],
                output_padding: [1, 1],
                ..Default::default()
            };
            x[0].conv_transpose2d(&x[1], Some(&x[2]), &options)
        })
        .with_flops(cost::conv_transpose_flops)
        .with_bench_inputs(&[Signed(&[32, 128, 28, 28]), Signed(&[128, 64, 3, 3]), Signed(&[64])]),
    )
    .golden(transposed_convolution!(2, conv_transpose2d));
    ops.add(method!(conv_transpose1d(
        t1,
        maybe2,
        TransposedConvolutionOptions {
            stride: count1,
            padding: count1,
            output_padding: count1,
            groups: count,
            dilation: count1
        }
    )))
    .case(
        smooth("conv_transpose1d", &[Signed(&[2, 3, 4]), Signed(&[3, 2, 3]), Signed(&[2])], |x| {
            let options = TransposedConvolutionOptions {
                stride: [2],
                padding: [1],
                output_padding: [1],
                ..Default::default()
            };
            x[0].conv_transpose1d(&x[1], Some(&x[2]), &options)
        })
        .with_flops(cost::conv_transpose_flops),
    )
    .golden(transposed_convolution!(1, conv_transpose1d));
    ops.add(method!(conv_transpose3d(
        t1,
        maybe2,
        TransposedConvolutionOptions {
            stride: count3,
            padding: count3,
            output_padding: count3,
            groups: count,
            dilation: count3
        }
    )))
    .case(
        smooth("conv_transpose3d", &[Signed(&[1, 2, 3, 2, 2]), Signed(&[2, 2, 2, 2, 2])], |x| {
            x[0].conv_transpose3d(&x[1], None, &Default::default())
        })
        .with_flops(cost::conv_transpose_flops),
    )
    .golden(transposed_convolution!(3, conv_transpose3d));
}

//! Convolutions, attention and einsum.

use anyhow::{Context, Result};
use forebay::ops::{AttentionOptions, ConvolutionOptions, Padding, TransposedConvolutionOptions, einsum};

use super::{OpTable, single};
use crate::golden::args::Args;

/// Returns `N` integers: a list, or one for all; `default` if missing or empty.
fn integers<const N: usize>(a: &Args<'_>, at: usize, name: &str, default: [usize; N]) -> Result<[usize; N]> {
    let list: Vec<usize> = a.dims(at, name)?.into_iter().map(usize::try_from).collect::<Result<_, _>>()?;
    match list[..] {
        [] => Ok(default),
        [n] => Ok([n; N]),
        ref list => list.try_into().with_context(|| format!("{name} has {} integers, not {N}", list.len())),
    }
}

fn padding<const N: usize>(a: &Args<'_>, at: usize) -> Result<Padding<N>> {
    Ok(match a.string(at, "padding", "") {
        "same" => Padding::Same,
        "valid" => Padding::Valid,
        _ => Padding::Zeros(integers(a, at, "padding", [0; N])?),
    })
}

fn groups(a: &Args<'_>, at: usize) -> Result<usize> {
    Ok(usize::try_from(a.int(at, "groups", 1)?)?)
}

macro_rules! convolutions {
    ($table:ident: $($n:literal $conv:ident $transpose:ident;)*) => {$(
        $table.register(concat!("nn.functional.", stringify!($conv)), |a| {
            let options = ConvolutionOptions::<$n> {
                stride: integers(a, 3, "stride", [1; $n])?,
                padding: padding(a, 4)?,
                dilation: integers(a, 5, "dilation", [1; $n])?,
                groups: groups(a, 6)?,
            };
            single(a.tensor(0)?.$conv(a.tensor(1)?, a.opt_tensor(2, "bias"), &options))
        });
        $table.register(concat!("nn.functional.", stringify!($transpose)), |a| {
            let options = TransposedConvolutionOptions::<$n> {
                stride: integers(a, 3, "stride", [1; $n])?,
                padding: integers(a, 4, "padding", [0; $n])?,
                output_padding: integers(a, 5, "output_padding", [0; $n])?,
                groups: groups(a, 6)?,
                dilation: integers(a, 7, "dilation", [1; $n])?,
            };
            single(a.tensor(0)?.$transpose(a.tensor(1)?, a.opt_tensor(2, "bias"), &options))
        });
    )*};
}

pub(super) fn register(table: &mut OpTable) {
    table.register("nn.functional.bilinear", |a| {
        single(a.tensor(0)?.bilinear(a.tensor(1)?, a.tensor(2)?, a.opt_tensor(3, "bias")))
    });
    table.register("einsum", |a| {
        let equation = a.string(1, "equation", "").to_owned();
        single(einsum(&equation, &a.tensors(0)?))
    });
    convolutions! { table:
        1 conv1d conv_transpose1d;
        2 conv2d conv_transpose2d;
        3 conv3d conv_transpose3d;
    }
    table.register("nn.functional.scaled_dot_product_attention", |a| {
        single(a.tensor(0)?.scaled_dot_product_attention(
            a.tensor(1)?,
            a.tensor(2)?,
            &AttentionOptions {
                attn_mask: a.opt_tensor(3, "attn_mask"),
                dropout_p: a.float(4, "dropout_p", 0.0)?,
                is_causal: a.flag(5, "is_causal", false),
                scale: a.get(6, "scale").and_then(|v| v.as_f64()),
                enable_gqa: a.flag(7, "enable_gqa", false),
                ..AttentionOptions::default()
            },
        ))
    });
}

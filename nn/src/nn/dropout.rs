//! Dropout as layers.

use std::sync::atomic::AtomicBool;

use super::{Module, ModuleScope};
use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

/// Layers of a probability, which do nothing in evaluation mode; the last argument is what they do with `x`, by `p`, in training or not.
macro_rules! dropout_layers {
    ($($(#[$doc:meta])* $layer:ident $what:literal = |$x:ident, $p:ident, $training:ident| $forward:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Module)]
        #[module(crate = crate)]
        pub struct $layer {
            /// The probability of being dropped.
            pub p: f64,
            training: AtomicBool,
            scope: ModuleScope,
        }

        impl $layer {
            #[doc = concat!("Drops each ", $what, " with probability `p`.")]
            #[must_use]
            pub fn new(p: f64) -> Self {
                Self { p, training: AtomicBool::new(true), scope: ModuleScope::new() }
            }

            /// `x` with what was drawn dropped and the rest scaled, while training; else `x`.
            ///
            /// # Errors
            /// `p` is no probability; `x` has other dimensions; memory runs out.
            #[track_caller]
            pub fn forward(&self, $x: &Tensor) -> Result<Tensor> {
                let ($p, $training) = (self.p, super::is_training(&self.training));
                self.scope.run(|| $forward)
            }
        }
    )*};
}

dropout_layers! {
    /// Zeroes elements at random while training; does nothing in evaluation mode.
    Dropout "element" = |x, p, training| x.dropout(p, training);
    /// Zeroes channels of \[batch, channels, length\] at random while training; does nothing in evaluation mode.
    Dropout1d "channel" = |x, p, training| channel_dropout("Dropout1d", x, 3, p, training);
    /// Zeroes channels of \[batch, channels, height, width\] at random while training; does nothing in evaluation mode.
    Dropout2d "channel" = |x, p, training| channel_dropout("Dropout2d", x, 4, p, training);
    /// Zeroes channels of \[batch, channels, depth, height, width\] at random while training; does nothing in evaluation mode.
    Dropout3d "channel" = |x, p, training| channel_dropout("Dropout3d", x, 5, p, training);
    /// Drops elements at random while training, for networks of [`selu`](Tensor::selu): what is dropped becomes its least value, and
    /// mean and deviation are kept ([`alpha_dropout`](Tensor::alpha_dropout)). `p` is below 1.
    AlphaDropout "element" = |x, p, training| x.alpha_dropout(p, training, false);
    /// As [`AlphaDropout`], of whole channels.
    FeatureAlphaDropout "channel" = |x, p, training| x.alpha_dropout(p, training, true);
}

/// [`feature_dropout`](Tensor::feature_dropout) of inputs of `rank` dimensions, or without the batch.
#[track_caller]
fn channel_dropout(layer: &'static str, x: &Tensor, rank: usize, p: f64, training: bool) -> Result<Tensor> {
    if x.rank() == rank {
        return x.feature_dropout(p, training);
    }
    if x.rank() + 1 == rank {
        return x.unsqueeze(0)?.feature_dropout(p, training)?.squeeze(0);
    }
    let rule =
        format!("takes [batch, channels] and {} dimensions behind them, or without the batch", rank - 2);
    Err(Error::shape(layer, rule, &[x.shape()]))
}

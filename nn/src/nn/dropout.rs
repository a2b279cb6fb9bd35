//! Dropout as layers.

use super::{Module, ModuleScope, TrainingMode};
use crate::{Result, Tensor, fail_if};

/// Defines layers that hold a probability and do nothing in evaluation mode. The closure applies the layer to
/// `x` with probability `p`, depending on the training mode.
macro_rules! dropout_layers {
    ($($(#[$doc:meta])* $layer:ident $what:literal = |$x:ident, $p:ident, $training:ident| $forward:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Module)]
        #[module(debug)]
        pub struct $layer {
            /// Probability with which an element or channel is dropped, 0 to 1.
            pub p: f64,
            training: TrainingMode,
            scope: ModuleScope,
        }

        impl $layer {
            #[doc = concat!("Drops each ", $what, " with probability `p`.")]
            #[must_use]
            pub fn new(p: f64) -> Self {
                Self { p, training: TrainingMode::new(), scope: ModuleScope::new() }
            }

            /// In training, drops at random and scales the rest. In evaluation, returns `x`.
            #[track_caller]
            pub fn forward(&self, $x: &Tensor) -> Result<Tensor> {
                let ($p, $training) = (self.p, self.training.is_on());
                self.scope.run(|| $forward)
            }
        }

        impl_forward!($layer);
    )*};
}

dropout_layers! {
    /// Zeroes elements at random while training; does nothing in evaluation mode.
    Dropout "element" = |x, p, training| x.dropout(p, training);
    /// Zeroes channels of \[batch, channels, length\] at random while training. The batch may be absent.
    Dropout1d "channel" = |x, p, training| channel_dropout("Dropout1d", x, 3, p, training);
    /// Zeroes channels of \[batch, channels, height, width\] at random while training. The batch may be absent.
    Dropout2d "channel" = |x, p, training| channel_dropout("Dropout2d", x, 4, p, training);
    /// Zeroes channels of \[batch, channels, depth, height, width\] at random while training. The batch may be
    /// absent.
    Dropout3d "channel" = |x, p, training| channel_dropout("Dropout3d", x, 5, p, training);
    /// Drops elements at random while training, for networks of [`selu`](Tensor::selu). A dropped element
    /// takes the least value of SELU; mean and deviation are preserved
    /// ([`alpha_dropout`](Tensor::alpha_dropout)). `p` is below 1.
    AlphaDropout "element" = |x, p, training| x.alpha_dropout(p, training);
    /// Variant of [`AlphaDropout`] that drops whole channels.
    FeatureAlphaDropout "channel" = |x, p, training| x.feature_alpha_dropout(p, training);
}

/// Applies [`feature_dropout`](Tensor::feature_dropout) to an input of `rank` dimensions, or without the
/// batch.
#[track_caller]
fn channel_dropout(layer: &'static str, x: &Tensor, rank: usize, p: f64, training: bool) -> Result<Tensor> {
    let unbatched = x.rank() + 1 == rank;
    fail_if!(
        !unbatched && x.rank() != rank;
        shape(layer, [x]), "takes [batch, channels] and {} dimensions after them, or without the batch", rank - 2
    );
    if unbatched {
        return x.unsqueeze(0)?.feature_dropout(p, training)?.squeeze(0);
    }
    x.feature_dropout(p, training)
}

//! Dropout as layers.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Module, ModuleScope};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Zeroes elements at random while training; does nothing in evaluation mode.
#[derive(Debug, Module)]
#[module(crate = crate)]
pub struct Dropout {
    /// The probability of a zero.
    pub p: f64,
    training: AtomicBool,
    scope: ModuleScope,
}

impl Dropout {
    /// Zeroes each element with probability `p`.
    #[must_use]
    pub fn new(p: f64) -> Self {
        Self { p, training: AtomicBool::new(true), scope: ModuleScope::new() }
    }

    /// Zeroes some elements of `x` and scales the others up, while training.
    ///
    /// # Errors
    /// `p` is no probability; memory runs out.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| x.dropout(self.p, self.training.load(Ordering::Relaxed)))
    }
}

/// Layers that zero whole channels: [`feature_dropout`](Tensor::feature_dropout), of inputs with so many dimensions behind the channels.
macro_rules! channels {
    ($($layer:ident $rank:literal $shape:literal;)*) => {$(
        #[doc = concat!("Zeroes channels of \\[batch, channels, ", $shape, "\\] at random while training; does nothing in evaluation mode.")]
        #[derive(Debug, Module)]
        #[module(crate = crate)]
        pub struct $layer {
            /// The probability of a channel of zeros.
            pub p: f64,
            training: AtomicBool,
            scope: ModuleScope,
        }

        impl $layer {
            /// Zeroes each channel with probability `p`.
            #[must_use]
            pub fn new(p: f64) -> Self {
                Self { p, training: AtomicBool::new(true), scope: ModuleScope::new() }
            }

            /// Zeroes some channels of `x` and scales the others up, while training.
            ///
            /// # Errors
            /// `x` has other dimensions; `p` is no probability; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.scope.run(|| {
                    let training = self.training.load(Ordering::Relaxed);
                    match x.rank() {
                        $rank => x.feature_dropout(self.p, training),
                        rank if rank + 1 == $rank => x.unsqueeze(0)?.feature_dropout(self.p, training)?.squeeze(0),
                        _ => {
                            let rule = concat!("takes [batch, channels, ", $shape, "], or without the batch");
                            Err(Error::shape(stringify!($layer), rule, &[x.shape()]))
                        }
                    }
                })
            }
        }
    )*};
}
channels! {
    Dropout1d 3 "length";
    Dropout2d 4 "height, width";
    Dropout3d 5 "depth, height, width";
}

/// Layers for self-normalising networks: what is dropped becomes the least value of a selu, and mean and deviation are kept.
macro_rules! alpha {
    ($($layer:ident $by_channel:literal $doc:literal;)*) => {$(
        #[doc = concat!($doc, " at random while training, for networks of [`selu`](Tensor::selu): [`alpha_dropout`](Tensor::alpha_dropout).")]
        #[derive(Debug, Module)]
        #[module(crate = crate)]
        pub struct $layer {
            /// The probability of being dropped.
            pub p: f64,
            training: AtomicBool,
            scope: ModuleScope,
        }

        impl $layer {
            /// Drops with probability `p`.
            #[must_use]
            pub fn new(p: f64) -> Self {
                Self { p, training: AtomicBool::new(true), scope: ModuleScope::new() }
            }

            /// `x` with what was drawn dropped, while training.
            ///
            /// # Errors
            /// `p` is no probability, or 1; memory runs out.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.scope.run(|| x.alpha_dropout(self.p, self.training.load(Ordering::Relaxed), $by_channel))
            }
        }
    )*};
}
alpha! {
    AlphaDropout false "Drops elements";
    FeatureAlphaDropout true "Drops channels";
}

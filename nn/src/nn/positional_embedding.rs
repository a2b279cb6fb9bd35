//! Positional embeddings: sinusoidal and rotary.

use super::{Module, ModuleScope, init};
use crate::{Device, Error, Result, Tensor, fail_if};

/// Returns the frequencies of features: base^(-2k / features) for k below features / 2.
fn rotary_frequencies(features: usize, base: f64) -> impl Iterator<Item = f64> + Clone {
    (0..features / 2).map(move |k| base.powf(-2.0 * k as f64 / features as f64))
}

/// Returns the angle of each position and frequency, row by row, in f64, because f32 is too imprecise for
/// late positions.
fn position_angles(positions: usize, features: usize, base: f64) -> impl Iterator<Item = f64> {
    (0..positions).flat_map(move |p| rotary_frequencies(features, base).map(move |f| p as f64 * f))
}

/// Adds sines and cosines of the positions to sequences (Vaswani et al., 2017). Feature 2k is sin(p /
/// 10000^(2k / features)), feature 2k + 1 the cosine. The layer has no parameters, and its table is not
/// saved.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::SinusoidalEmbedding;
/// # let device = Device::null(Default::default());
/// let positions = SinusoidalEmbedding::new(512, 64, &device)?;
/// let x = Tensor::zeros(&[2, 10, 64], DType::F32, &device)?;
/// assert_eq!(positions.forward(&x)?.shape(), [2, 10, 64]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug, Module)]
pub struct SinusoidalEmbedding {
    #[module(skip)]
    table: Tensor,
    scope: ModuleScope,
}

impl SinusoidalEmbedding {
    /// Creates a layer for up to `positions` vectors of `features`.
    ///
    /// # Errors
    /// The number of features is odd.
    #[track_caller]
    pub fn new(positions: usize, features: usize, device: &Device) -> Result<Self> {
        if !features.is_multiple_of(2) {
            let why = format!("{features} features do not go into pairs of a sine and a cosine");
            return Err(Error::argument("SinusoidalEmbedding", why));
        }
        let pairs =
            position_angles(positions, features, 10_000.0).flat_map(|a| [a.sin() as f32, a.cos() as f32]);
        let numbers: Vec<f32> = pairs.collect();
        let table = init::create_buffer(|| Tensor::from_slice(&numbers, &[positions, features], device))?;
        Ok(Self { table, scope: ModuleScope::new() })
    }

    /// Returns the table of embeddings, \[positions, features\].
    #[must_use]
    pub fn table(&self) -> &Tensor {
        &self.table
    }

    /// Adds the embeddings of the first positions to \[.., length, features\].
    ///
    /// # Errors
    /// The sequence is longer than the table, or its number of features differs.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            let (most, features) = (self.table.shape()[0], self.table.shape()[1]);
            match x.shape() {
                &[.., length, own] if length <= most && own == features => {
                    x.add(&self.table.narrow(0, 0, length)?.to_dtype(x.dtype())?)
                }
                shape => {
                    let rule = format!("takes [.., length, {features}] of up to {most} positions");
                    Err(Error::shape("SinusoidalEmbedding", rule, &[shape]))
                }
            }
        })
    }
}

/// Rotary embedding: rotates the features of queries and keys by the angles of their positions (Su et al.,
/// 2021). The product of a query and a key then depends on their distance. The layer has no parameters, and
/// its tables are not saved. One kernel: [`rotary_embedding`](Tensor::rotary_embedding).
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::RotaryEmbedding;
/// # let device = Device::null(Default::default());
/// let rotary = RotaryEmbedding::new(1024, 64, &device)?;
/// let q = Tensor::zeros(&[2, 8, 10, 64], DType::F32, &device)?;
/// assert_eq!(rotary.forward(&q)?.shape(), q.shape());
/// // One more position, after ten cached ones.
/// let next = Tensor::zeros(&[2, 8, 1, 64], DType::F32, &device)?;
/// assert_eq!(rotary.forward_at(&next, 10)?.shape(), next.shape());
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug, Module)]
pub struct RotaryEmbedding {
    #[module(skip)]
    cos: Tensor,
    #[module(skip)]
    sin: Tensor,
    interleaved: bool,
    scope: ModuleScope,
}

impl RotaryEmbedding {
    /// Creates a layer for up to `positions`, with frequencies from 1 to 1/10000. `features` of each head are
    /// rotated, all or fewer.
    ///
    /// # Errors
    /// The number of features is odd.
    #[track_caller]
    pub fn new(positions: usize, features: usize, device: &Device) -> Result<Self> {
        Self::with_base(positions, features, 10_000.0, device)
    }

    /// Creates a layer with frequencies from 1 to 1 / base; Llama 3 has a base of 500,000.
    ///
    /// # Errors
    /// The number of features is odd.
    #[track_caller]
    pub fn with_base(positions: usize, features: usize, base: f64, device: &Device) -> Result<Self> {
        fail_if!(!features.is_multiple_of(2); argument("RotaryEmbedding"), "{features} features do not go into pairs");
        let table = |f: fn(f64) -> f64| {
            let numbers: Vec<f32> = position_angles(positions, features, base).map(|a| f(a) as f32).collect();
            init::create_buffer(|| Tensor::from_slice(&numbers, &[positions, features / 2], device))
        };
        Ok(Self {
            cos: table(f64::cos)?,
            sin: table(f64::sin)?,
            interleaved: false,
            scope: ModuleScope::new(),
        })
    }

    /// Pairs each feature with its neighbour, as in GPT-J. By default, a feature pairs with the one half the
    /// features further on, as in Llama.
    #[must_use]
    pub fn interleaved(mut self) -> Self {
        self.interleaved = true;
        self
    }

    /// Rotates \[.., length, features\] from the first position on.
    ///
    /// # Errors
    /// Same errors as [`forward_at`](Self::forward_at).
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_at(x, 0)
    }

    /// Rotates \[.., length, features\] from position `start` on.
    ///
    /// # Errors
    /// The sequence ends after the last row of the table, or has too few features.
    #[track_caller]
    pub fn forward_at(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        self.scope.run(|| {
            let most = self.cos.shape()[0];
            let length = x.dim(-2)?;
            if start + length > most {
                let why =
                    format!("positions {start} to {} are asked for, the table has {most}", start + length);
                return Err(Error::argument("RotaryEmbedding", why));
            }
            let part = |t: &Tensor| t.narrow(0, start, length);
            x.rotary_embedding(&part(&self.cos)?, &part(&self.sin)?, self.interleaved)
        })
    }
}

//! Positional embeddings: sinusoidal and rotary.

use super::{Module, ModuleScope, init};
use crate::{Device, Error, Result, Tensor, fail, fail_if};
use forebay_core::tensor::layout::tensor_numel;

/// Returns the frequencies of features: base^(-2k / features) for k below features / 2.
fn rotary_frequencies(features: usize, base: f64) -> impl Iterator<Item = f64> + Clone {
    (0..features / 2).map(move |k| base.powf(-2.0 * k as f64 / features as f64))
}

/// Returns a table of `columns` values of each position and frequency, \[positions, ..\]. Angles are in f64,
/// because f32 is too imprecise for late positions.
#[track_caller]
fn position_table<const N: usize>(
    op: &'static str,
    [positions, features]: [usize; 2],
    base: f64,
    values: impl Fn(f64) -> [f32; N],
    device: &Device,
) -> Result<Tensor> {
    fail_if!(!features.is_multiple_of(2); argument(op), "{features} features do not go into pairs");
    fail_if!(!(base > 0.0 && base.is_finite());
        argument(op), "the base is {base}; it must be above 0 and finite");
    let width = features / 2 * N;
    let Some(elements) = tensor_numel(&[positions, width]).filter(|&n| n > 0) else {
        fail!(argument(op), "no table holds {positions} positions of {features} features");
    };
    let mut table: Vec<f32> = Vec::new();
    table.try_reserve_exact(elements).map_err(|e| {
        Error::argument(op, format!("a table of {elements} values does not fit the host's memory: {e}"))
    })?;
    for position in 0..positions {
        table.extend(rotary_frequencies(features, base).flat_map(|f| values(position as f64 * f)));
    }
    init::create_buffer(|| Tensor::from_slice(&table, [positions, width], device))
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
#[derive(Module)]
#[module(debug)]
pub struct SinusoidalEmbedding {
    #[module(skip)]
    table: Tensor,
    scope: ModuleScope,
}

impl SinusoidalEmbedding {
    /// Creates a layer for up to `positions` vectors of `features`, an even number.
    #[track_caller]
    pub fn new(positions: usize, features: usize, device: &Device) -> Result<Self> {
        let pair = |angle: f64| [angle.sin() as f32, angle.cos() as f32];
        let table = position_table("SinusoidalEmbedding", [positions, features], 10_000.0, pair, device)?;
        Ok(Self { table, scope: ModuleScope::new() })
    }

    /// Returns the table of embeddings, \[positions, features\].
    #[must_use]
    pub fn table(&self) -> &Tensor {
        &self.table
    }

    /// Adds the embeddings of the first positions to \[.., length, features\], no longer than the table.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            let (max_positions, features) = (self.table.shape()[0], self.table.shape()[1]);
            let length = x.dim(-2).unwrap_or(0);
            fail_if!(
                x.rank() < 2 || length > max_positions || x.shape().last() != Some(&features);
                shape("SinusoidalEmbedding", [x]), "takes [.., length, {features}] of up to {max_positions} positions"
            );
            x.add(&self.table.narrow(0, 0, length)?.to_dtype(x.dtype())?)
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
#[derive(Module)]
#[module(debug)]
pub struct RotaryEmbedding {
    #[module(skip)]
    cos: Tensor,
    #[module(skip)]
    sin: Tensor,
    interleaved: bool,
    scope: ModuleScope,
}

impl RotaryEmbedding {
    /// Creates a layer for up to `positions`, with frequencies from 1 to 1/10000. `features` of each head, an
    /// even number, are rotated, all or fewer.
    #[track_caller]
    pub fn new(positions: usize, features: usize, device: &Device) -> Result<Self> {
        Self::with_base(positions, features, 10_000.0, device)
    }

    /// Creates a layer like [`new`](Self::new) with frequencies from 1 to 1 / `base`, which is finite and above 0.
    /// Llama 3 has a base of 500,000.
    #[track_caller]
    pub fn with_base(positions: usize, features: usize, base: f64, device: &Device) -> Result<Self> {
        let table = |f: fn(f64) -> f64| {
            position_table("RotaryEmbedding", [positions, features], base, |angle| [f(angle) as f32], device)
        };
        Ok(Self {
            cos: table(f64::cos)?,
            sin: table(f64::sin)?,
            interleaved: false,
            scope: ModuleScope::new(),
        })
    }

    setters! {
        /// Pairs each feature with its neighbour, as in GPT-J. By default, a feature pairs with the one half the
        /// features further on, as in Llama.
        fn interleaved() { interleaved: true }
    }

    /// Rotates \[.., length, features\] from the first position on: see
    /// [`forward_at`](Self::forward_at).
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_at(x, 0)
    }

    /// Rotates \[.., length, features\] from position `start` on, up to the end of the table at most.
    #[track_caller]
    pub fn forward_at(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        self.scope.run(|| {
            let max_positions = self.cos.shape()[0];
            let length = x.dim(-2)?;
            let end = start.saturating_add(length);
            fail_if!(
                end > max_positions;
                argument("RotaryEmbedding"), "positions {start} to {end} are asked for, the table has {max_positions}"
            );
            let part = |t: &Tensor| t.narrow(0, start, length);
            x.rotary_embedding(&part(&self.cos)?, &part(&self.sin)?, self.interleaved)
        })
    }
}

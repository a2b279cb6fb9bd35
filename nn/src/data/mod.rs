//! Data sets, and loaders that shuffle, batch and prefetch them to a device.
//!
//! ```no_run
//! # use forebay_core::{device::Device, error::Result};
//! # use forebay_nn::data::{Dataset, FashionMnist};
//! # fn main() -> Result<()> {
//! # let device = Device::null(Default::default());
//! for batch in FashionMnist::train()?.shuffle(42).batches(128).prefetch(&device) {
//!     let (x, y) = batch?;
//!     // ...
//! }
//! # Ok(())
//! # }
//! ```

use crate::Result;
use forebay_core::dtype::Element;

mod fashion_mnist;
mod loader;
mod locate;
mod shuffle;
mod tensor_dataset;
mod text;

pub use fashion_mnist::FashionMnist;
pub use loader::{BatchIter, DataLoader, LoaderCursor};
pub use tensor_dataset::TensorDataset;
pub use text::{Text, TokenWindows};

/// An indexed set of samples, each an input and a target of fixed shapes.
///
/// Implementations provide the number of samples, the shapes, and a method that writes a sample to slices.
///
/// ```
/// # use forebay_core::{device::Device, error::Result};
/// # use forebay_nn::data::Dataset;
/// /// Numbers and their squares.
/// struct Squares;
///
/// impl Dataset for Squares {
///     type Input = f32;
///     type Target = f32;
///     fn len(&self) -> usize { 1000 }
///     fn input_shape(&self) -> &[usize] { &[1] }
///     fn target_shape(&self) -> &[usize] { &[1] }
///     fn get(&self, index: usize, input: &mut [f32], target: &mut [f32]) -> Result<()> {
///         input[0] = index as f32;
///         target[0] = (index * index) as f32;
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<()> {
/// # let device = Device::null(Default::default());
/// let mut batches = Squares.shuffle(7).batches(64).prefetch(&device);
/// let (x, y) = batches.next().expect("16 batches")?;
/// assert_eq!((x.shape(), y.shape()), (&[64, 1][..], &[64, 1][..]));
/// # Ok(())
/// # }
/// ```
pub trait Dataset: Send + Sync + 'static {
    /// Element type of inputs.
    type Input: Element;
    /// Element type of targets.
    type Target: Element;

    /// Returns the number of samples.
    fn len(&self) -> usize;
    /// Returns the shape of one input. Batches have their size as an additional first dimension.
    fn input_shape(&self) -> &[usize];
    /// Returns the shape of one target; empty for a scalar.
    fn target_shape(&self) -> &[usize];
    /// Writes sample `index`, below [`len`](Self::len), into slices of the shapes' sizes, on the loader's
    /// thread.
    ///
    /// # Errors
    /// The sample cannot be loaded. The loop over the batches receives the error.
    fn get(&self, index: usize, input: &mut [Self::Input], target: &mut [Self::Target]) -> Result<()>;

    /// Reports whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Creates a loader that shuffles the samples by `seed`, differently in each epoch.
    fn shuffle(self, seed: u64) -> DataLoader<Self>
    where
        Self: Sized,
    {
        DataLoader::new(self).shuffle(seed)
    }

    /// Creates a loader of batches of `n` samples, in order.
    fn batches(self, n: usize) -> DataLoader<Self>
    where
        Self: Sized,
    {
        DataLoader::new(self).batches(n)
    }
}

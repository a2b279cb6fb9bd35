//! Data sets, and loaders that shuffle them, batch them and put them on a device ahead of the step that needs them.
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

use forebay_core::dtype::Element;
use forebay_core::error::Result;

mod fashion_mnist;
mod loader;
mod locate;
mod text;

pub use fashion_mnist::FashionMnist;
pub use loader::{BatchIter, DataLoader, LoaderCursor};
pub use text::{Text, TokenWindows};

/// A numbered set of samples, each an input and a target of fixed shapes.
///
/// To make one: say how many samples there are, the two shapes, and how to write a sample into slices.
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
    /// The type of an input's elements.
    type Input: Element;
    /// The type of a target's elements.
    type Target: Element;

    /// How many samples there are.
    fn len(&self) -> usize;
    /// The shape of one input; batches have their length in front of it.
    fn input_shape(&self) -> &[usize];
    /// The shape of one target; empty for a single number.
    fn target_shape(&self) -> &[usize];
    /// Writes sample `index`, which is below [`len`](Self::len), into slices of the two shapes' sizes. Runs on the
    /// loader's thread.
    ///
    /// # Errors
    /// The sample cannot be had; the loop over the batches gets the error.
    fn get(&self, index: usize, input: &mut [Self::Input], target: &mut [Self::Target]) -> Result<()>;

    /// Whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A loader that takes the samples in an order that `seed` determines, another one in each epoch.
    fn shuffle(self, seed: u64) -> DataLoader<Self>
    where
        Self: Sized,
    {
        DataLoader::new(self).shuffle(seed)
    }

    /// A loader of batches of `n` samples, in order.
    fn batches(self, n: usize) -> DataLoader<Self>
    where
        Self: Sized,
    {
        DataLoader::new(self).batches(n)
    }
}

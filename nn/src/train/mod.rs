//! Training: the loop as a library type, exact checkpoints, and recorded metrics.
//!
//! A loop is short enough to write by hand, as in the `by_hand` example. [`Trainer`] adds schedules,
//! clipping, gradient accumulation, a progress bar, checkpoints, and saving on Ctrl-C, if asked for.
//!
//! Functions return the errors of loaders and of the functions that they call. A loader without samples and a file
//! that cannot be written are errors. `# Errors` sections list further errors.
//!
//! ```no_run
//! # use forebay_core::{device::Device, error::Result};
//! # use forebay_nn::{data::{Dataset, FashionMnist}, nn::{Linear, Module}};
//! # use forebay_nn::{optim::AdamW, train::{self, Trainer}};
//! # fn main() -> Result<()> {
//! # let device = Device::null(Default::default());
//! let net = Linear::new(784, 10, &device)?;
//! let mut trainer = Trainer::new(&net, AdamW::new(net.parameters(), 1e-3)).steps(1000).clip_grad_norm(1.0);
//! trainer.fit(&FashionMnist::train()?.shuffle(42).batches(128), |x, y| net.forward(x)?.cross_entropy(y))?;
//! let test = train::evaluate(&net, &FashionMnist::test()?.batches(500), |x| net.forward(x))?;
//! println!("test accuracy {:.1} %", 100.0 * test);
//! # Ok(())
//! # }
//! ```

use crate::data::{DataLoader, Dataset};
use crate::nn::{self, Module};
use crate::{DType, Device, Error, Result, Tensor, autograd, fail_if};

mod checkpoint;
mod history;
mod micro_batching;
#[cfg(feature = "train")]
mod plot;
mod progress;
mod signals;
mod step_capture;
mod trainer;
mod wait_mode;

pub use checkpoint::Checkpoint;
pub use history::{History, MemoryPoint, Validation};
pub use trainer::{FitStatus, LossOutput, Trainer};

/// Returns the fraction of rows of `logits` \[batch, classes\] whose largest element is at the class in `target`
/// \[batch\], as an f32 scalar on the device.
#[track_caller]
pub fn accuracy(logits: &Tensor, target: &Tensor) -> Result<Tensor> {
    let _no_grad = autograd::no_grad();
    logits.argmax(-1, false)?.eq(target)?.to_dtype(DType::F32)?.mean_all()
}

/// Computes the [`accuracy`] of a model in evaluation mode over all samples of a loader. Restores the mode of
/// each module, also after an error.
#[track_caller]
pub fn evaluate<D: Dataset>(
    model: &(impl Module + ?Sized),
    loader: &DataLoader<D>,
    mut forward: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<f64> {
    weighted_mean("evaluate", model, loader, |x, y| Ok((accuracy(&forward(x)?, y)?, y.numel())))
}

/// Computes the mean loss of a model in evaluation mode over all batches of a loader, each weighted by its
/// rows. Restores the mode of each module, also after an error.
#[track_caller]
pub fn mean_loss<D: Dataset>(
    model: &(impl Module + ?Sized),
    loader: &DataLoader<D>,
    mut loss: impl FnMut(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<f64> {
    weighted_mean("mean_loss", model, loader, |x, y| Ok((loss(x, y)?, x.dim(0)?)))
}

/// Computes the mean over the batches of values with their weights, in evaluation mode and without gradients.
#[track_caller]
fn weighted_mean<D: Dataset>(
    op: &'static str,
    model: &(impl Module + ?Sized),
    loader: &DataLoader<D>,
    mut compute: impl FnMut(&Tensor, &Tensor) -> Result<(Tensor, usize)>,
) -> Result<f64> {
    let _no_grad = autograd::no_grad();
    let device = model_device(op, model)?;
    let _eval = nn::eval_mode(model);
    let (mut sum, mut total_weight) = (0.0, 0.0);
    for batch in loader.prefetch(&device) {
        let (x, y) = batch?;
        let (value, weight) = compute(&x, &y)?;
        sum += value.item()? * weight as f64;
        total_weight += weight as f64;
    }
    fail_if!(total_weight == 0.0; argument(op), "the loader has no samples");
    Ok(sum / total_weight)
}

/// Returns the device of a model.
#[track_caller]
fn model_device(op: &'static str, model: &(impl Module + ?Sized)) -> Result<Device> {
    let parameters = model.parameters();
    let first = parameters.first().ok_or_else(|| Error::argument(op, "the model has no parameters"))?;
    Ok(first.device().clone())
}

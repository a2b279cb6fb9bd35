//! The training loop.

use std::path::{Path, PathBuf};

use super::interrupt::Watch;
use super::progress::{Progress, Status};
use super::{Checkpoint, History, MemoryPoint, device_of};
use crate::data::{Cursor, Dataset, Loader};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::nn::Module;
use crate::ops::stack;
use crate::optim::{Optimizer, Schedule, clip_grad_norm_};
use crate::tensor::Tensor;

/// Steps between two looks at losses and memory on a GPU; a look waits for the device.
const LOOK_EVERY: u64 = 10;

/// What a loss function returns: the loss, a scalar, and an accuracy to record if there is one.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What is minimised.
    pub loss: Tensor,
    /// What is shown and recorded beside it ([`accuracy`](super::accuracy)).
    pub accuracy: Option<Tensor>,
}

impl From<Tensor> for Outcome {
    fn from(loss: Tensor) -> Self {
        Self { loss, accuracy: None }
    }
}

impl From<(Tensor, Tensor)> for Outcome {
    fn from((loss, accuracy): (Tensor, Tensor)) -> Self {
        Self { loss, accuracy: Some(accuracy) }
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It did its steps, or the loader its epochs.
    Finished,
    /// Ctrl-C. The checkpoint is saved, if there is one.
    Interrupted,
}

/// The training loop over a model and its optimiser. See [the module](super) for an example.
#[must_use = "a trainer does nothing until `fit`"]
pub struct Trainer<'a, M: ?Sized, O> {
    model: &'a M,
    optimizer: O,
    schedule: Option<Box<dyn Schedule + 'a>>,
    clip: Option<f64>,
    accumulate: u32,
    steps: Option<u64>,
    save: Option<(PathBuf, u64)>,
    quiet: bool,
    done: Checkpoint,
}

impl<'a, M: Module + ?Sized, O: Optimizer> Trainer<'a, M, O> {
    /// Trains `model` with `optimizer`, which holds its parameters.
    pub fn new(model: &'a M, optimizer: O) -> Self {
        Self {
            model,
            optimizer,
            schedule: None,
            clip: None,
            accumulate: 1,
            steps: None,
            save: None,
            quiet: false,
            done: Checkpoint::default(),
        }
    }

    /// Sets the learning rate before every step; else it stays as the optimiser has it.
    pub fn schedule(self, schedule: impl Schedule + 'a) -> Self {
        Self { schedule: Some(Box::new(schedule)), ..self }
    }

    /// Scales the gradients down to a norm of at most `max` before every step.
    pub fn clip_grad_norm(self, max: f64) -> Self {
        Self { clip: Some(max), ..self }
    }

    /// Makes a step of `n` batches, whose losses are averaged.
    pub fn accumulate(self, n: u32) -> Self {
        Self { accumulate: n.max(1), ..self }
    }

    /// Ends after `n` steps, counted from the very first one, however many epochs they take; else after those that the
    /// loader has.
    pub fn steps(self, n: u64) -> Self {
        Self { steps: Some(n), ..self }
    }

    /// Saves a [`Checkpoint`] after every `every` steps, at the end, and on Ctrl-C.
    pub fn checkpoint(self, path: impl Into<PathBuf>, every: u64) -> Self {
        Self { save: Some((path.into(), every.max(1))), ..self }
    }

    /// Shows nothing.
    pub fn quiet(self) -> Self {
        Self { quiet: true, ..self }
    }

    /// Goes on from a checkpoint, with the same bits as if the run had not stopped.
    ///
    /// # Errors
    /// As [`Checkpoint::resume`].
    pub fn resume(mut self, path: impl AsRef<Path>) -> Result<Self> {
        self.done = Checkpoint::resume(path, self.model, &mut self.optimizer)?;
        Ok(self)
    }

    /// Steps done.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.done.step
    }

    /// What was recorded.
    #[must_use]
    pub fn history(&self) -> &History {
        &self.done.history
    }

    /// The optimiser.
    #[must_use]
    pub fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// Saves a checkpoint.
    ///
    /// # Errors
    /// As [`Checkpoint::save`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.done.save(path, self.model, &self.optimizer)
    }

    /// Runs the loop: `loss` gets the inputs and the targets of a batch. Ctrl-C ends it after a step.
    ///
    /// # Errors
    /// Those of the loader, of `loss`, of the optimiser and of saving, with the step in front of them; the batches are
    /// made in another way than those of the checkpoint that was resumed.
    pub fn fit<D: Dataset, L: Into<Outcome>>(
        &mut self,
        loader: &Loader<D>,
        mut loss: impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<Ended> {
        let device = device_of("fit", self.model)?;
        self.same_batches(loader)?;
        let loader = match self.steps {
            Some(_) => loader.clone().forever(),
            None => loader.clone(),
        };
        let total = self.steps.or_else(|| Some(loader.total_batches()? / u64::from(self.accumulate)));
        let mut batches = loader.clone().start_at(self.done.cursor).prefetch(&device);
        let mut progress = Progress::new(self.quiet, self.done.step, total);
        let mut pending = Pending::default();
        let watch = Watch::new();
        self.model.train(true);
        let mut ended = Ended::Finished;
        while total.is_none_or(|n| self.done.step < n) {
            if watch.asked() {
                ended = Ended::Interrupted;
                break;
            }
            let step = self.done.step + 1;
            let one = self
                .one_step(&mut batches, &mut loss, &mut pending)
                .map_err(|e| e.at(format!("step {step}")))?;
            if !one {
                break;
            }
            self.done.step = step;
            self.done.cursor = batches.cursor();
            progress.step(step);
            let every = if device.info().software { 1 } else { LOOK_EVERY };
            if step.is_multiple_of(every) || total == Some(step) {
                self.look(&device, &mut pending, &mut progress)?;
            }
            if let Some((path, every)) = &self.save
                && step.is_multiple_of(*every)
                && total != Some(step)
            {
                pending.read(&mut self.done.history)?;
                self.save(path)?;
            }
        }
        if self.done.history.memory.last().is_none_or(|last| last.step != self.done.step) {
            self.look(&device, &mut pending, &mut progress)?;
        }
        progress.end();
        if let Some((path, _)) = &self.save {
            self.save(path)?;
        }
        Ok(ended)
    }

    /// One step; `false` if there are no batches left for it.
    fn one_step<L: Into<Outcome>>(
        &mut self,
        batches: &mut impl Iterator<Item = Result<(Tensor, Tensor)>>,
        loss: &mut impl FnMut(&Tensor, &Tensor) -> Result<L>,
        pending: &mut Pending,
    ) -> Result<bool> {
        if let Some(schedule) = &self.schedule {
            self.optimizer.set_lr(schedule.lr(self.done.step));
        }
        // Also what an earlier step left that failed midway.
        self.optimizer.zero_grad();
        for micro in 0..self.accumulate {
            let Some(batch) = batches.next() else {
                self.optimizer.zero_grad();
                pending.forget(micro);
                return Ok(false);
            };
            let (x, y) = batch?;
            let Outcome { loss, accuracy } = loss(&x, &y)?.into();
            if self.accumulate == 1 {
                loss.backward()?;
            } else {
                loss.div(f64::from(self.accumulate))?.backward()?;
            }
            pending.push(&loss, accuracy.as_ref(), self.accumulate);
        }
        if let Some(max) = self.clip {
            clip_grad_norm_(self.optimizer.parameters(), max)?;
        }
        self.optimizer.step()?;
        self.optimizer.zero_grad();
        Ok(true)
    }

    /// Reads the losses since the last look, and the memory. Waits for the device.
    fn look(&mut self, device: &Device, pending: &mut Pending, progress: &mut Progress) -> Result<()> {
        pending.read(&mut self.done.history)?;
        let history = &mut self.done.history;
        let memory = MemoryPoint::new(self.done.step, &device.memory());
        history.memory.push(memory);
        if let Some(&loss) = history.losses.last() {
            let accuracy = history.accuracies.last().copied();
            let status = Status { loss, accuracy, lr: self.optimizer.lr(), memory: &memory };
            progress.tell(self.done.step, &status);
        }
        Ok(())
    }

    /// A checkpoint goes on only with the batches it was made with.
    fn same_batches<D: Dataset>(&mut self, loader: &Loader<D>) -> Result<()> {
        let now = loader.description();
        let before = std::mem::replace(&mut self.done.batches, now);
        if before.is_empty() || before == self.done.batches || self.done.cursor == Cursor::default() {
            return Ok(());
        }
        Err(Error::argument(
            "fit",
            format!(
                "resumed from batches of {before}, but the loader makes {}; use the same",
                self.done.batches
            ),
        ))
    }
}

/// Losses and accuracies that are still on the device.
#[derive(Default)]
struct Pending {
    losses: Vec<Tensor>,
    accuracies: Vec<Tensor>,
    micro: usize,
}

impl Pending {
    fn push(&mut self, loss: &Tensor, accuracy: Option<&Tensor>, micro: u32) {
        self.micro = micro as usize;
        self.losses.push(loss.detach());
        self.accuracies.extend(accuracy.map(Tensor::detach));
    }

    /// The last `micro` batches made no step.
    fn forget(&mut self, micro: u32) {
        for list in [&mut self.losses, &mut self.accuracies] {
            list.truncate(list.len().saturating_sub(micro as usize));
        }
    }

    /// Moves all to the history, one number a step.
    fn read(&mut self, history: &mut History) -> Result<()> {
        for (list, into) in
            [(&mut self.losses, &mut history.losses), (&mut self.accuracies, &mut history.accuracies)]
        {
            if list.is_empty() {
                continue;
            }
            let values = stack(&list.iter().collect::<Vec<_>>(), 0)?.to_f64s()?;
            list.clear();
            let means = values.chunks(self.micro).map(|c| (c.iter().sum::<f64>() / c.len() as f64) as f32);
            into.extend(means);
        }
        Ok(())
    }
}

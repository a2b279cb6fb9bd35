//! The training loop.
//!
//! [`Trainer::fit`] and `fit_async` share one loop, which waits by `WaitMode`. A step passes through these methods:
//! `step_with_retry` repeats a step that ran out of memory, and `try_step` runs it eagerly or from a capture.
//! `compute_step` computes the gradients and steps the optimiser. Losses stay on the device until `report_metrics`.
//!
//! A new option is a field, a setter, and its use in `compute_step` or `run_steps`.

use std::path::{Path, PathBuf};

use super::micro_batching::MicroBatching;
use super::progress::{ProgressReporter, StepStatus, TokenThroughput};
use super::signals::SignalGuard;
use super::step_capture::StepCapture;
use super::wait_mode::{WaitMode, run_blocking};
use super::{Checkpoint, History, MemoryPoint, Validation, model_device};
use crate::data::{BatchIter, DataLoader, Dataset, LoaderCursor};
use crate::io::safetensors::Metadata;
use crate::nn::{self, Module};
use crate::optim::{GradScaler, LrSchedule, Optimizer, clip_grad_norm_};
use crate::plan::{StepConfig, StepPlan};
use crate::{DType, Device, Result, Tensor, autograd, fail, fail_if};
use forebay_core::amp;
use forebay_core::memory::BytesOf;
use forebay_core::ops::stack;

/// Number of steps between reads of losses and memory on a GPU. Each read waits for the device.
const LOG_INTERVAL: u64 = 10;
/// Maximum of consecutive steps without a finite loss, after which the scale is 2⁻⁵⁰ of its start.
const MAX_SKIPPED_STEPS: usize = 50;

/// Output of a loss function: the loss, a scalar, and an optional accuracy.
#[derive(Clone, Debug)]
pub struct LossOutput {
    /// Loss to minimise.
    pub loss: Tensor,
    /// Accuracy to show and record ([`accuracy`](super::accuracy)).
    pub accuracy: Option<Tensor>,
}

impl From<Tensor> for LossOutput {
    fn from(loss: Tensor) -> Self {
        Self { loss, accuracy: None }
    }
}

impl From<(Tensor, Tensor)> for LossOutput {
    fn from((loss, accuracy): (Tensor, Tensor)) -> Self {
        Self { loss, accuracy: Some(accuracy) }
    }
}

/// Interval in steps, and the validation function.
type Validator<'a> = (u64, Box<dyn FnMut() -> Result<f64> + Send + 'a>);

/// Reason for the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitStatus {
    /// All steps, or all epochs of the loader, are done.
    Finished,
    /// A signal stopped the run ([`Trainer::stop_on_signals`]). The checkpoint is saved, if one is configured.
    Interrupted,
}

/// Training loop over a model and its optimiser. See [the module](super) for an example.
#[must_use = "a trainer does nothing until `fit`"]
pub struct Trainer<'a, M: ?Sized, O> {
    model: &'a M,
    optimizer: O,
    schedule: Option<Box<dyn LrSchedule + Send + 'a>>,
    max_grad_norm: Option<f64>,
    accumulation_steps: u32,
    micro_batching: MicroBatching,
    autocast: Option<DType>,
    scaler: Option<GradScaler>,
    step_plan: Option<(StepConfig, u64)>,
    step_capture: StepCapture,
    max_steps: Option<u64>,
    checkpoint_every: Option<(PathBuf, u64)>,
    validation: Option<Validator<'a>>,
    token_throughput: Option<TokenThroughput>,
    tokens_per_second: Option<f64>,
    quiet: bool,
    stops_on_signals: bool,
    position: Checkpoint,
    /// Metrics of the last steps. They stay if `fit_async` is dropped, so that the next call records them.
    pending: PendingMetrics,
    fit_state: FitState,
}

/// State of the last call of `fit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FitState {
    /// `fit` has not been called.
    NotStarted,
    /// The last call was in another process, whose checkpoint was saved within the call and resumed.
    Resumed,
    /// The last call was in another process and did all its steps before the checkpoint was saved.
    ResumedFinished,
    /// The last call ended early, by a signal or an error.
    Unfinished,
    /// The last call did all its steps.
    Finished,
}

impl<'a, M: Module + ?Sized, O: Optimizer> Trainer<'a, M, O> {
    /// Creates a loop that trains `model` with `optimizer`, which holds the model's parameters.
    pub fn new(model: &'a M, optimizer: O) -> Self {
        Self {
            model,
            optimizer,
            schedule: None,
            max_grad_norm: None,
            accumulation_steps: 1,
            micro_batching: MicroBatching::default(),
            autocast: None,
            scaler: None,
            step_plan: None,
            step_capture: StepCapture::Disabled,
            max_steps: None,
            checkpoint_every: None,
            validation: None,
            token_throughput: None,
            tokens_per_second: None,
            quiet: false,
            stops_on_signals: false,
            position: Checkpoint::default(),
            pending: PendingMetrics::default(),
            fit_state: FitState::NotStarted,
        }
    }

    setters! {
        /// Sets the learning rate before every step by a schedule. The default is the optimiser's rate.
        fn schedule(schedule: impl LrSchedule + Send + 'a) { schedule: Some(Box::new(schedule)) }
        /// Clips the gradients to a norm of at most `max` before every step.
        fn clip_grad_norm(max: f64) { max_grad_norm: Some(max) }
        /// Accumulates the gradients of `n` batches in each step, with averaged losses; 0 is 1. Steps continue
        /// across epochs. If fewer than `n` batches are left at the end, they form a last step. Each batch has
        /// equal weight, also a smaller one, as in a loop that divides each loss by the number of batches.
        fn accumulate(n: u32) { accumulation_steps: n.max(1) }
        /// Runs at most `rows` rows of a batch at once, and accumulates the gradients of the parts. A step that
        /// runs out of memory is retried with half as many rows, or with fewer if the error says so. Later steps
        /// keep the reduced number.
        ///
        /// The loss must be a mean over the rows (see [`ignore_index`](Self::ignore_index) for an exception). The
        /// gradients then equal those of the whole batch, up to the order of sums.
        fn micro_batch(rows: usize) { micro_batching.max_rows: (rows > 0).then_some(rows) }
        /// Declares that the loss is a mean over the targets other than `target`, as with
        /// [`CrossEntropyOptions::ignore_index`](forebay_core::ops::CrossEntropyOptions). Parts of a batch are then
        /// weighted by these targets.
        fn ignore_index(target: i64) { micro_batching.ignore_index: Some(target) }
        /// Runs the loss function under [`autocast`](amp::autocast) to this dtype, f16 or bf16.
        fn autocast(dtype: DType) { autocast: Some(dtype) }
        /// Scales the losses, and skips steps whose gradients are not finite; f16 needs this. Checkpoints include
        /// the scaler's state, so set the scaler before [`resume`](Self::resume).
        fn scaler(scaler: GradScaler) { scaler: Some(scaler) }
        /// Ends after `n` steps, counted from the first step of the run, over as many epochs as necessary. By
        /// default, the loader determines the number. A second [`fit`](Self::fit) needs a larger number.
        fn steps(n: u64) { max_steps: Some(n) }
    }

    /// Runs every step with the micro-batches, precision and segment policies of a [`StepPlan`], and limits
    /// the device's pool to the plan's budget. For f16, adds a [`GradScaler`] if there is none.
    pub fn plan(mut self, plan: &StepPlan) -> Self {
        let choice = &plan.best.config;
        self.optimizer.offload_state(choice.offload_state);
        self = self.micro_batch(choice.micro_batch_size);
        if let Some(dtype) = choice.precision {
            self = self.autocast(dtype);
            if dtype == DType::F16 && self.scaler.is_none() {
                self = self.scaler(GradScaler::new());
            }
        }
        Self { step_plan: Some((choice.clone(), plan.budget)), ..self }
    }

    setters! {
        /// Captures and replays steps ([`capture`](forebay_core::capture)), with bitwise equal results.
        /// [`fit`](Self::fit) runs its first step eagerly, records the second, and replays it for batches of the
        /// same shapes. Replays do not call the loss function, so its side effects on the host happen only twice.
        /// Reading a tensor in the loss function is an error.
        ///
        /// The captured step holds its memory until `fit` ends. Validation and steps of other shapes need
        /// additional memory. If that runs out, all steps run eagerly.
        fn capture(on: bool) { step_capture: if on { StepCapture::Requested } else { StepCapture::Disabled } }
        /// Stops after the current step on a termination signal (Ctrl-C, SIGTERM, SIGHUP), and saves the checkpoint, if
        /// one is configured. [`fit`](Self::fit) then installs handlers for the whole process, and a second signal ends
        /// the program. Without the feature `train`, or if the system refuses the handlers, `fit` fails. By default,
        /// signals are left to the program.
        fn stop_on_signals() { stops_on_signals: true }
        /// Saves a [`Checkpoint`] every `every` steps (0 is 1), at the end, and when a signal stops the run. All are
        /// saved within a call of [`fit`](Self::fit), which the first call after a [`resume`](Self::resume) finishes.
        /// Where that call had done all its steps, this is a call without a step; the next one trains.
        fn checkpoint(path: impl Into<PathBuf>, every: u64) { checkpoint_every: Some((path.into(), every.max(1))) }
        /// Computes a validation loss every `every` steps (0 is 1) and after the last one, shows it and records
        /// it ([`History::validations`]). `loss` runs with the model in evaluation mode and without gradients,
        /// and usually calls [`mean_loss`](super::mean_loss).
        fn validate(every: u64, loss: impl FnMut() -> Result<f64> + Send + 'a) {
            validation: Some((every.max(1), Box::new(loss)))
        }
        /// Sets the tokens of a step and the FLOPs of a token (forward and backward: `Gpt::flops_per_token`). The
        /// progress then shows tokens per second. It also shows the model-FLOPs utilisation (MFU) if the device's
        /// [peak](forebay_core::backend::PeakRates) is known.
        fn tokens(per_step: u64, flops: f64) { token_throughput: Some(TokenThroughput { per_step, flops, peak: None }) }
        /// Disables the progress display.
        fn quiet() { quiet: true }
    }

    /// Adds a string to the [metadata](Checkpoint::metadata) of this run's checkpoints.
    #[must_use = "the method returns the changed value"]
    pub fn metadata(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.position = self.position.with_metadata(name, value);
        self
    }

    /// Resumes from a checkpoint by [`Checkpoint::resume`], with bitwise the results of an uninterrupted run.
    /// Keeps the checkpoint's metadata, except strings that [`metadata`](Self::metadata) has set.
    #[track_caller]
    pub fn resume(mut self, path: impl AsRef<Path>) -> Result<Self> {
        let own = std::mem::take(&mut self.position.metadata);
        let Self { model, optimizer, scaler, .. } = &mut self;
        self.position = Checkpoint::resume_with_scaler(path, *model, optimizer, scaler.as_mut())?;
        self.position.metadata.extend(own);
        self.fit_state =
            if self.position.fit_finished { FitState::ResumedFinished } else { FitState::Resumed };
        Ok(self)
    }

    /// Returns the strings of this run's checkpoints, also those that [`resume`](Self::resume) has read.
    #[must_use]
    pub fn checkpoint_metadata(&self) -> &Metadata {
        &self.position.metadata
    }

    /// Returns the number of steps done.
    #[must_use]
    pub fn steps_done(&self) -> u64 {
        self.position.step
    }

    /// Returns the number of rows that run at once, if [`micro_batch`](Self::micro_batch) or an out-of-memory error
    /// limits it.
    #[must_use]
    pub fn micro_batch_rows(&self) -> Option<usize> {
        self.micro_batching.max_rows
    }

    /// Returns the recorded metrics.
    #[must_use]
    pub fn history(&self) -> &History {
        &self.position.history
    }

    /// Returns the tokens per second of the last [`fit`](Self::fit), without validation and saving. The
    /// measurement begins at the first read of the losses. `None` without [`tokens`](Self::tokens).
    #[must_use]
    pub fn tokens_per_second(&self) -> Option<f64> {
        self.tokens_per_second
    }

    /// Returns the optimiser.
    #[must_use]
    pub fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// Returns the gradient scaler, if there is one.
    #[must_use]
    pub fn grad_scaler(&self) -> Option<&GradScaler> {
        self.scaler.as_ref()
    }

    /// Saves a checkpoint by [`Checkpoint::save`]. If the last [`fit`](Self::fit) did all its steps, the first one
    /// after a [`resume`](Self::resume) trains again, as the next call of this trainer would.
    #[track_caller]
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.position.save_with_scaler(path, self.model, &self.optimizer, self.scaler.as_ref())
    }

    /// Runs the loop; `loss` receives the inputs and the targets of a batch.
    ///
    /// The modes of modules are unchanged. New modules are in training mode; the program may switch some to
    /// evaluation, such as frozen norms. Validation restores the mode of each module.
    ///
    /// A further call continues training. With a loader of equal batches, epochs continue to count, so that
    /// each is shuffled differently. A call after an interruption or an error first finishes the earlier
    /// call. A different loader begins at its own start.
    ///
    /// # Errors
    /// The loader, `loss`, the optimiser or saving fails; the error names the step. Also fails in these
    /// cases:
    ///
    /// - No step is left: the loader has no batches, no epochs or starts after them, or an earlier call has
    ///   done all [`steps`](Self::steps). After a resume, a call that has nothing left to do is not an error: it says
    ///   so in the progress (in the log if [`quiet`](Self::quiet)), and [`steps_done`](Self::steps_done) stays.
    /// - The loader is configured differently from that of a resumed checkpoint that was written within a call.
    /// - A loss is NaN or infinite. With a scaler, which skips such steps, fifty consecutive losses are. The
    ///   check happens when losses are read, and before a checkpoint is written.
    #[track_caller]
    pub fn fit<D: Dataset, L: Into<LossOutput>>(
        &mut self,
        loader: &DataLoader<D>,
        loss: impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<FitStatus> {
        let call = forebay_core::memory::scope::call_site();
        run_blocking(self.run_loop(loader, loss, WaitMode::Blocking))
            .map_err(|error| error.with_call_of("fit", call))
    }

    /// Runs the loop like [`fit`](Self::fit), with bitwise the same results, as a future that any executor can run.
    ///
    /// Waits for batches, for losses and for the device suspend the task, and so does the end of each step. Two steps
    /// are in flight at most. `loss`, validation and saving run between suspensions. Other tasks must not train the
    /// same model, nor draw random numbers from the device, if the results are to stay the same.
    ///
    /// Dropping the future ends the run after the last complete step. The next call finishes the run.
    ///
    /// The future is `Send` if the model is `Sync`, and the optimiser and `loss` are `Send`. An executor of several
    /// threads, such as tokio's `spawn`, can then run it.
    ///
    /// ```
    /// # use forebay_nn::data::{DataLoader, Dataset};
    /// # use forebay_nn::{nn::{Linear, Module}, optim::Optimizer, train::{FitStatus, Trainer}};
    /// # use forebay_core::error::Result;
    /// async fn train<D: Dataset, O: Optimizer>(
    ///     net: &Linear,
    ///     trainer: &mut Trainer<'_, Linear, O>,
    ///     loader: &DataLoader<D>,
    /// ) -> Result<FitStatus> {
    ///     trainer.fit_async(loader, |x, y| net.forward(x)?.cross_entropy(y)).await
    /// }
    /// ```
    pub async fn fit_async<D: Dataset, L: Into<LossOutput>>(
        &mut self,
        loader: &DataLoader<D>,
        loss: impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<FitStatus> {
        self.run_loop(loader, loss, WaitMode::Yielding).await
    }

    async fn run_loop<D: Dataset, L: Into<LossOutput>>(
        &mut self,
        loader: &DataLoader<D>,
        loss: impl FnMut(&Tensor, &Tensor) -> Result<L>,
        wait: WaitMode,
    ) -> Result<FitStatus> {
        self.step_capture.restart();
        let ended = self.run_steps(loader, loss, wait).await;
        // Frees the captured step's memory; another loss function needs a new capture.
        self.step_capture.restart();
        self.pending = PendingMetrics::default();
        ended
    }

    async fn run_steps<D: Dataset, L: Into<LossOutput>>(
        &mut self,
        loader: &DataLoader<D>,
        mut loss: impl FnMut(&Tensor, &Tensor) -> Result<L>,
        wait: WaitMode,
    ) -> Result<FitStatus> {
        let watch = self.stops_on_signals.then(SignalGuard::new).transpose()?;
        let device = model_device("fit", self.model)?;
        let (loader, total) = self.begin_fit(loader)?;
        let modes = nn::training_modes(self.model);
        if !modes.is_empty() && modes.iter().all(|training| !training) {
            log::warn!(
                "all modules are in evaluation mode, and are trained so: call `train(true)` on the model before `fit`"
            );
        }
        let mut batches = loader.prefetch(&device);
        let peak = device.info().peak_rates.flops_per_second;
        let tokens = self.token_throughput.map(|tokens| TokenThroughput { peak, ..tokens });
        let mut progress = ProgressReporter::new(self.quiet, self.position.step, total, tokens);
        if total.is_some_and(|n| n <= self.position.step) {
            progress.print_line(&format!(
                "nothing is left to do: the call of `fit` that is continued had done all its steps, {} in all",
                self.position.step
            ));
        }
        let mut last_step = None;
        if let Some((_, bytes)) = self.step_plan {
            device.pool().set_limit(Some(bytes));
        }
        let mut ended = FitStatus::Finished;
        while total.is_none_or(|n| self.position.step < n) {
            if watch.as_ref().is_some_and(SignalGuard::is_stop_requested) {
                ended = FitStatus::Interrupted;
                break;
            }
            let step = self.position.step + 1;
            match self.step_with_retry(&mut batches, &mut loss, wait).await {
                Ok(true) => {}
                // Happens only if the loader has no batches at all; otherwise it has as many as were counted.
                Ok(false) => break,
                Err(error) => {
                    // The earlier steps stay recorded, as far as their losses can be read.
                    let _ = self.pending.drain_to_history(&mut self.position.history, wait).await;
                    return Err(error.with_context(format!("step {step}")));
                }
            }
            self.position.step = step;
            self.position.cursor = batches.cursor();
            progress.set_step(step);
            let every = if device.info().software { 1 } else { LOG_INTERVAL };
            if step.is_multiple_of(every) || total == Some(step) {
                self.report_metrics(&device, &mut progress, wait).await?;
            }
            self.validate_if_due(step, total, &mut progress)?;
            if let Some((path, every)) = &self.checkpoint_every
                && step.is_multiple_of(*every)
                && total != Some(step)
            {
                let path = path.clone();
                // Fails on a NaN loss, so that a damaged model does not replace the earlier checkpoint.
                self.read_losses(wait).await?;
                progress.exclude_time(|| self.save(path))?;
            }
            wait.end_step(&device, &mut last_step).await?;
        }
        if self.position.history.memory.last().is_none_or(|last| last.step != self.position.step) {
            self.report_metrics(&device, &mut progress, wait).await?;
        }
        progress.finish();
        self.tokens_per_second = progress.tokens_per_second();
        if let Some((path, _)) = &self.checkpoint_every {
            self.save(path)?;
        }
        if ended == FitStatus::Finished {
            self.fit_state = FitState::Finished;
            self.position.fit_finished = true;
        }
        Ok(ended)
    }

    /// Measures and prints the validation loss every few steps, and after the last one.
    fn validate_if_due(
        &mut self,
        step: u64,
        total: Option<u64>,
        progress: &mut ProgressReporter,
    ) -> Result<()> {
        let Some((every, loss)) = &mut self.validation else { return Ok(()) };
        if !step.is_multiple_of(*every) && total != Some(step) {
            return Ok(());
        }
        let validate = || {
            let _no_grad = autograd::no_grad();
            let _eval = nn::eval_mode(self.model);
            loss().map_err(|e| e.with_context("validation"))
        };
        let loss = progress.exclude_time(validate)? as f32;
        self.position.history.validations.push(Validation { step, loss });
        progress.print_line(&format!("step {step}  validation loss {loss:.4}"));
        Ok(())
    }

    /// Determines the first batch of this call and its last step (`None`: when the loader ends).
    #[track_caller]
    fn begin_fit<D: Dataset>(&mut self, loader: &DataLoader<D>) -> Result<(DataLoader<D>, Option<u64>)> {
        let sizes = loader.query_sizes()?;
        let (per_epoch, batches) =
            (loader.batches_for_samples(sizes.samples), loader.describe_for_samples(sizes.samples));
        let done = &self.position;
        let is_same_loader = batches == done.loader_description;
        let (start, zero) = (loader.start, LoaderCursor::default());
        fail_if!(
            self.fit_state == FitState::Resumed
                && !done.loader_description.is_empty()
                && !is_same_loader
                && done.cursor != zero;
            argument("fit"),
            "resumed from batches of {}, but the loader makes {batches}; use the same", done.loader_description
        );
        let (cursor, first_epoch) = match self.fit_state {
            FitState::Resumed if done.cursor != zero => (done.cursor, done.first_epoch),
            FitState::Unfinished if is_same_loader => (done.cursor, done.first_epoch),
            // Runs with a step limit may end within an epoch, which then continues.
            FitState::Finished | FitState::ResumedFinished if is_same_loader && self.max_steps.is_some() => {
                (done.cursor, done.first_epoch)
            }
            FitState::Finished | FitState::ResumedFinished if is_same_loader => {
                let first = done.cursor.epoch;
                (LoaderCursor { epoch: first.saturating_add(start.epoch), ..start }, first)
            }
            _ => (start, 0),
        };
        let cursor = cursor.normalized(per_epoch);
        let (loader, total) = match (self.max_steps, loader.epochs) {
            (Some(n), _) => (loader.clone().forever(), Some(n)),
            (None, None) => (loader.clone(), None),
            (None, Some(n)) => {
                let end = first_epoch.saturating_add(n);
                let epochs = end.saturating_sub(cursor.epoch);
                let left = epochs.saturating_mul(per_epoch).saturating_sub(cursor.batch);
                let steps = left.div_ceil(u64::from(self.accumulation_steps));
                (loader.clone().epochs(end), Some(done.step.saturating_add(steps)))
            }
        };
        match total {
            Some(n) if self.max_steps.is_some() && n <= done.step && self.fit_state == FitState::Finished => {
                fail!(
                    argument("fit"),
                    "all {n} steps are done; for more, set `steps` to a larger number, which counts from the first"
                );
            }
            Some(n)
                if n <= done.step
                    && (self.fit_state == FitState::Resumed
                        || (self.fit_state == FitState::ResumedFinished && self.max_steps.is_some())) => {}
            _ if sizes.samples == 0 => {
                fail!(argument("fit"), "the loader has no batches: its data set has no samples")
            }
            // A call that ended early may have done all its steps.
            Some(n) if n <= done.step && !(self.fit_state == FitState::Unfinished && is_same_loader) => {
                loader.check_sizes(&sizes)?;
                let epochs = loader.epochs.map_or_else(|| "any number of".to_owned(), |n| n.to_string());
                fail!(
                    argument("fit"),
                    "there is no step to run: the loader makes {per_epoch} batches in each of {epochs} epochs, from batch {} of \
                     epoch {} on, and the run has {n} steps, of which {} are done",
                    cursor.batch,
                    cursor.epoch,
                    done.step
                );
            }
            _ => {}
        }
        (self.position.loader_description, self.position.cursor) = (batches, cursor);
        (self.position.first_epoch, self.position.fit_finished) = (first_epoch, false);
        self.fit_state = FitState::Unfinished;
        Ok((loader.start_at(cursor), total))
    }

    /// Runs one step; returns `false` if no batches are left.
    async fn step_with_retry<D: Dataset, L: Into<LossOutput>>(
        &mut self,
        batches: &mut BatchIter<D>,
        loss: &mut impl FnMut(&Tensor, &Tensor) -> Result<L>,
        wait: WaitMode,
    ) -> Result<bool> {
        if let Some(schedule) = &self.schedule {
            schedule.check()?;
            self.optimizer.set_lr(schedule.lr(self.position.step));
        }
        // Keeps the batches until the step succeeds, because a retry after running out of memory needs them.
        let mut taken = Vec::new();
        let device = model_device("fit", self.model)?;
        let mut is_retry = false;
        loop {
            // Also discards gradients of an earlier step that failed.
            self.optimizer.zero_grad();
            let filled = self.take_batches(batches, &mut taken, wait).await;
            let random = device.random_state();
            let result = filled.and_then(|()| self.try_step(&device, &taken, loss));
            self.optimizer.zero_grad();
            match result {
                Ok(Some(outcomes)) => {
                    if let Some(step) = device.pool().measured_batch().filter(|_| is_retry) {
                        let room = device.pool().capacity().unwrap_or(step.peak);
                        log::info!("micro-batch {} fits: {}", step.batch_size, BytesOf(step.peak, room));
                    }
                    self.pending.push_outputs(&outcomes);
                    return Ok(true);
                }
                Ok(None) => return Ok(false),
                Err(error) => {
                    device.set_random_state(random);
                    if !(error.is_out_of_memory() && self.step_capture.release_memory()) {
                        self.micro_batching.shrink_after_oom(error, &taken)?;
                    }
                    // The segments of a plain pool have the sizes of the failed step.
                    device.pool().empty_cache()?;
                    is_retry = true;
                }
            }
        }
    }

    /// Adds batches to `taken` up to the accumulation count. The last step may have fewer batches.
    ///
    /// The borrow is exclusive, so that `fit_async`'s future is `Send`. With a shared borrow across a wait, the trainer
    /// would have to be `Sync`, which its boxed functions are not.
    async fn take_batches<D: Dataset>(
        &mut self,
        batches: &mut BatchIter<D>,
        taken: &mut Vec<(Tensor, Tensor)>,
        wait: WaitMode,
    ) -> Result<()> {
        while taken.len() < self.accumulation_steps as usize {
            let Some(batch) = wait.next_batch(batches).await else { break };
            taken.push(batch?);
        }
        Ok(())
    }

    /// Runs a step on the batches in `taken`. Returns the outputs, or `None` if there are no batches.
    fn try_step<L: Into<LossOutput>>(
        &mut self,
        device: &Device,
        taken: &[(Tensor, Tensor)],
        loss: &mut impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<Option<Vec<LossOutput>>> {
        if taken.is_empty() {
            return Ok(None);
        }
        let mut replay = std::mem::take(&mut self.step_capture);
        let outcomes = replay.run_step(device, taken, |taken| self.compute_step(taken, loss));
        self.step_capture = replay;
        outcomes.map(Some)
    }

    /// Computes gradients, clips them, and steps the optimiser. The optimiser's step is the last that can run
    /// out of memory, and changes nothing in this case. Returns the outputs of the batches.
    fn compute_step<L: Into<LossOutput>>(
        &mut self,
        batches: &[(Tensor, Tensor)],
        loss: &mut impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<Vec<LossOutput>> {
        // Applied anew in each attempt, because a failed attempt leaves the segment index anywhere.
        let _segments = self.step_plan.as_ref().map(|(choice, _)| choice.apply_segments());
        if let Some(scaler) = &mut self.scaler {
            scaler.discard_step()?;
        }
        let outcomes = self.compute_gradients(batches, loss)?;
        if let Some(scaler) = &mut self.scaler {
            scaler.unscale_(&self.optimizer)?;
        }
        if let Some(max) = self.max_grad_norm {
            clip_grad_norm_(self.optimizer.parameters(), max)?;
        }
        match &mut self.scaler {
            Some(scaler) => {
                scaler.step(&mut self.optimizer)?;
                scaler.update()?;
            }
            None => self.optimizer.step()?,
        }
        self.optimizer.zero_grad();
        Ok(outcomes)
    }

    /// Computes the gradients of a step's batches, and returns their outputs.
    fn compute_gradients<L: Into<LossOutput>>(
        &self,
        batches: &[(Tensor, Tensor)],
        loss: &mut impl FnMut(&Tensor, &Tensor) -> Result<L>,
    ) -> Result<Vec<LossOutput>> {
        let scale = |loss: &Tensor| {
            let share = match batches.len() {
                1 => loss.clone(),
                n => loss.div(n as f64)?,
            };
            self.scaler.as_ref().map_or(Ok(share.clone()), |scaler| scaler.scale(&share))
        };
        let mut loss = |x: &Tensor, y: &Tensor| {
            let _autocast = self.autocast.map(amp::autocast).transpose()?;
            loss(x, y)
        };
        batches.iter().map(|batch| self.micro_batching.forward_backward(batch, scale, &mut loss)).collect()
    }

    /// Reads the losses since the last report, and the memory. Waits for the device.
    async fn report_metrics(
        &mut self,
        device: &Device,
        progress: &mut ProgressReporter,
        wait: WaitMode,
    ) -> Result<()> {
        self.read_losses(wait).await?;
        let history = &mut self.position.history;
        let memory = MemoryPoint::new(self.position.step, &device.memory());
        history.memory.push(memory);
        if let Some(&loss) = history.losses.last() {
            let accuracy = history.accuracies.last().copied();
            let status = StepStatus { loss, accuracy, lr: self.optimizer.lr(), memory: &memory };
            progress.report_status(self.position.step, &status);
        }
        Ok(())
    }

    /// Moves losses to the history. A loss that is not finite ends the run.
    async fn read_losses(&mut self, wait: WaitMode) -> Result<()> {
        let before = self.position.history.losses.len();
        self.pending.drain_to_history(&mut self.position.history, wait).await?;
        let losses = &self.position.history.losses;
        let wrong = match &self.scaler {
            None => losses[before..].iter().position(|loss| !loss.is_finite()).map(|k| before + k),
            // The scaler skips such a step and halves its scale.
            Some(_) => {
                let run = losses.iter().rev().take_while(|loss| !loss.is_finite()).count();
                (run >= MAX_SKIPPED_STEPS).then(|| losses.len() - run)
            }
        };
        let Some(at) = wrong else { return Ok(()) };
        let step = self.position.step + 1 + at as u64 - losses.len() as u64;
        fail!(
            argument("fit"),
            "the loss of step {step} is {}, and no checkpoint is written from here on: try a smaller learning rate, warm-up or \
             `clip_grad_norm`, or look for its cause with `autograd::detect_anomaly`",
            losses[at]
        )
    }
}

/// Losses and accuracies that are still on the device.
#[derive(Default)]
struct PendingMetrics {
    losses: PendingSeries,
    accuracies: PendingSeries,
}

/// Scalars, with the number of scalars in each step.
#[derive(Default)]
struct PendingSeries {
    values: Vec<Tensor>,
    values_per_step: Vec<usize>,
}

impl PendingSeries {
    fn push(&mut self, values: impl Iterator<Item = Tensor>) {
        let before = self.values.len();
        self.values.extend(values);
        self.values_per_step.push(self.values.len() - before);
    }

    /// Moves the means of the pending steps to a list, whose entry `first` is that of the first one. NaN fills
    /// steps without scalars before a step with some.
    async fn drain_means(&mut self, into: &mut Vec<f32>, first: usize, wait: WaitMode) -> Result<()> {
        if self.values.is_empty() {
            self.values_per_step.clear();
            return Ok(());
        }
        let values = match stack(&self.values.iter().collect::<Vec<_>>(), 0) {
            // Reading one by one allocates nothing.
            Err(error) if error.is_out_of_memory() => {
                let mut values = Vec::new();
                for value in &self.values {
                    values.extend(wait.read(value).await?);
                }
                values
            }
            stacked => wait.read(&stacked?).await?,
        };
        let mut values = &values[..];
        for (at, n) in (first..).zip(std::mem::take(self).values_per_step).filter(|&(_, n)| n > 0) {
            let (step, rest) = values.split_at(n);
            into.resize(at, f32::NAN);
            into.push((step.iter().sum::<f64>() / n as f64) as f32);
            values = rest;
        }
        Ok(())
    }
}

impl PendingMetrics {
    /// Adds the outputs of a step.
    fn push_outputs(&mut self, outcomes: &[LossOutput]) {
        self.losses.push(outcomes.iter().map(|o| o.loss.detach()));
        self.accuracies.push(outcomes.iter().filter_map(|o| o.accuracy.as_ref().map(Tensor::detach)));
    }

    /// Moves everything to the history, with one value for each step.
    async fn drain_to_history(&mut self, history: &mut History, wait: WaitMode) -> Result<()> {
        let first = history.losses.len();
        self.losses.drain_means(&mut history.losses, first, wait).await?;
        // Accuracies that an error kept pending are from before `first`.
        let first = history.losses.len() - self.accuracies.values_per_step.len();
        self.accuracies.drain_means(&mut history.accuracies, first, wait).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::dtype::DType;

    #[test]
    fn an_accuracy_keeps_its_step_in_the_history_and_the_csv() -> Result<()> {
        let device = Device::null(Default::default());
        let scalar = || Tensor::zeros([0; 0], DType::F32, &device);
        let mut history = History::default();
        let mut pending = PendingMetrics::default();
        for steps in [&[false, true][..], &[false], &[false, true, false]] {
            for &has_accuracy in steps {
                let accuracy = has_accuracy.then(scalar).transpose()?;
                pending.push_outputs(&[LossOutput { loss: scalar()?, accuracy }]);
            }
            run_blocking(pending.drain_to_history(&mut history, WaitMode::Blocking))?;
        }
        let path = std::env::temp_dir().join(format!("forebay-history-{}.csv", std::process::id()));
        history.write_csv(&path)?;
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let _ = std::fs::remove_file(&path);
        assert_eq!(text, "step,loss,accuracy,validation\n1,0,,\n2,0,0,\n3,0,,\n4,0,,\n5,0,0,\n6,0,,\n");
        Ok(())
    }
}

//! Gradient scaling: the loss is scaled up so that 16-bit gradients do not underflow, and the gradients are
//! unscaled before the optimiser's step.
//!
//! All state is in one small buffer on the device. It holds the scale, its inverse, the number of successful
//! steps in a row, and a non-finite flag for each optimiser. The host never reads the buffer. The optimiser's kernels
//! read the flags and skip the update if one is set.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use forebay_shaders::KernelSpec;

use crate::nn::{PreparedCopies, StagedCopies};
use crate::optim::{Optimizer, clip};
use crate::{Device, Result, Tag, Tensor, autograd, check, fail, fail_if, memory};
use forebay_core::ops::kernel::launch::{self, KernelParams};
use forebay_core::printable::printable;

/// Layout of the buffer in words, shared with amp_update.wgsl and grad_scale.wgsl.
const SCALE_INDEX: usize = 0;
const INVERSE_SCALE_INDEX: usize = 1;
const GROWTH_TRACKER_INDEX: usize = 2;
const FOUND_INF_INDEX: usize = 4;
const STATE_LEN: usize = 16;

with_defaults! {
    /// Gradient scaler with an adaptive scale. The scale doubles after 2000 steps without an infinity or NaN in
    /// the gradients, and halves after each step with one, which is skipped. Names and constants are PyTorch's.
    ///
    /// f16 needs a scaler, bf16 does not. Only [`get_scale`](Self::get_scale), saving and loading wait.
    ///
    /// ```no_run
    /// # use forebay_core::{amp::autocast, dtype::DType, error::Result, tensor::Tensor};
    /// # use forebay_nn::optim::GradScaler;
    /// # use forebay_nn::optim::{Optimizer, clip_grad_norm_};
    /// # fn train(optimizer: &mut impl Optimizer, forward: impl Fn() -> Result<Tensor>) -> Result<()> {
    /// let mut scaler = GradScaler::new();
    /// for _ in 0..1000 {
    ///     let loss = {
    ///         let _autocast = autocast(DType::F16)?;
    ///         forward()?
    ///     };
    ///     scaler.scale(&loss)?.backward()?; // more often, to accumulate
    ///     scaler.unscale_(optimizer)?; // only to clip, or to look at the gradients
    ///     clip_grad_norm_(optimizer.parameters(), 1.0)?;
    ///     scaler.step(optimizer)?;
    ///     scaler.update()?;
    ///     optimizer.zero_grad();
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[derive(Debug)]
    pub struct GradScaler {
        init_scale: f64 = 65536.0,
        growth_factor: f64 = 2.0,
        backoff_factor: f64 = 0.5,
        growth_interval: u32 = 2000,
        /// Number of successful steps in a row, from a loaded state.
        init_growth_tracker: f64 = 0.0,
        /// Allocated on the device of the first loss.
        device_state: OnceLock<Tensor> = OnceLock::new(),
        /// Optimisers used since the last update, by the address of their parameters, in the order of flags.
        optimizers: Vec<(usize, OptimizerStage)> = Vec::new(),
    }
}

/// Progress of an optimiser since the last update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OptimizerStage {
    Unscaled,
    Stepped,
}

impl GradScaler {
    /// Creates a scaler with a scale of 65536. The scale doubles after 2000 finite steps in a row, and halves after
    /// a step with an infinity or NaN.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets the initial scale.
        fn init_scale(scale: f64) { init_scale: scale }
        /// Sets the factor by which the scale grows. The scale is at most 2^126, whose inverse is a normal f32.
        fn growth_factor(factor: f64) { growth_factor: factor }
        /// Sets the factor applied to the scale after a step with an infinity or NaN.
        fn backoff_factor(factor: f64) { backoff_factor: factor }
        /// Sets the number of finite steps in a row after which the scale grows; at most 2^24.
        fn growth_interval(steps: u32) { growth_interval: steps }
    }

    /// Returns the loss multiplied by the scale, in f32, on which `backward` is called. The scale is on the device of
    /// the first loss; losses and parameters of other devices get copies.
    #[track_caller]
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        let scale = self.device_state(loss.device())?.select(0, SCALE_INDEX as isize)?;
        loss.mul(&scale.to_device(loss.device())?)
    }

    /// Divides the gradients of an optimiser's parameters by the scale, in place, and records whether any is
    /// infinite or NaN. [`step`](Self::step) does this unless it was done before, for clipping.
    ///
    /// # Errors
    /// The optimiser was unscaled since the last [`update`](Self::update). A gradient is f16, which cannot
    /// hold the quotient: keep parameters in f32 and let [`autocast`](forebay_core::amp::autocast()) cast them.
    #[track_caller]
    pub fn unscale_(&mut self, optimizer: &(impl Optimizer + ?Sized)) -> Result<()> {
        const OP: &str = "unscale_";
        let _op = memory::scope::enter_op(OP);
        let (index, stage) = self.find_optimizer(optimizer);
        fail_if!(
            stage == Some(OptimizerStage::Unscaled);
            argument(OP), "the gradients are unscaled already, since the last update"
        );
        fail_if!(stage.is_some(); argument(OP), "comes before `step`; call `update` after each step");
        let max_optimizers = STATE_LEN - FOUND_INF_INDEX;
        fail_if!(index >= max_optimizers; argument(OP), "one scaler takes up to {max_optimizers} optimisers an update");
        let Some(first) = optimizer.parameters().first() else {
            fail!(argument(OP), "the optimiser has no parameters");
        };
        let state = self.device_state(first.device())?;
        clip::unscale_grads(OP, optimizer.parameters(), state, FOUND_INF_INDEX + index)?;
        self.optimizers.push((optimizer_address(optimizer), OptimizerStage::Unscaled));
        Ok(())
    }

    /// Unscales the gradients unless that was done, and makes the optimiser's step if all of them are finite.
    /// The device decides; the host does not wait for the decision.
    ///
    /// # Errors
    /// The optimiser was stepped since the last [`update`](Self::update). Those of
    /// [`unscale_`](Self::unscale_) and of the optimiser.
    #[track_caller]
    pub fn step(&mut self, optimizer: &mut (impl Optimizer + ?Sized)) -> Result<()> {
        let (index, stage) = self.find_optimizer(optimizer);
        fail_if!(
            stage == Some(OptimizerStage::Stepped);
            argument("step"), "was done already since the last update; call `update`"
        );
        if stage.is_none() {
            self.unscale_(optimizer)?;
        }
        let Some(state) = self.device_state.get() else { return Ok(()) };
        optimizer.step_unless(&state.select(0, (FOUND_INF_INDEX + index) as isize)?)?;
        self.optimizers[index].1 = OptimizerStage::Stepped;
        Ok(())
    }

    /// Updates the scale according to the steps since the last update. Call it once for all optimisers.
    ///
    /// # Errors
    /// There was no step since the last update.
    #[track_caller]
    pub fn update(&mut self) -> Result<()> {
        const OP: &str = "update";
        let _op = memory::scope::enter_op(OP);
        let Some(state) = self.device_state.get().filter(|_| !self.optimizers.is_empty()) else {
            fail!(argument(OP), "comes after `step`, or `unscale_`; there was none since the last");
        };
        let params = KernelParams::new()
            .f32(self.growth_factor as f32)
            .f32(self.backoff_factor as f32)
            .f32(self.growth_interval as f32)
            .size(self.optimizers.len())
            .loop_iterations(self.optimizers.len() + 1);
        launch::launch(&KernelSpec::new("amp_update"), &[state], params, 1)?;
        self.optimizers.clear();
        Ok(())
    }

    /// Returns the scale. Waits for the device.
    #[track_caller]
    pub fn get_scale(&self) -> Result<f64> {
        self.device_state
            .get()
            .map_or(Ok(self.init_scale), |state| state.select(0, SCALE_INDEX as isize)?.item())
    }

    /// Returns the scale and the number of finite steps in a row (`scale`, `growth_tracker`). Factors and
    /// interval are not included. Does not wait for the device, but saving does.
    #[track_caller]
    pub fn state_dict(&self, device: &Device) -> Result<BTreeMap<String, Tensor>> {
        let _no_grad = autograd::no_grad();
        let state = self.device_state(device)?;
        let word = |at: usize| state.select(0, at as isize)?.copy();
        Ok(BTreeMap::from([
            ("scale".to_owned(), word(SCALE_INDEX)?),
            ("growth_tracker".to_owned(), word(GROWTH_TRACKER_INDEX)?),
        ]))
    }

    /// Loads a state of [`state_dict`](Self::state_dict). Waits for the device.
    ///
    /// # Errors
    /// A name is missing or unexpected, or the scale is not a finite value above 0. Nothing is changed then.
    #[track_caller]
    pub fn load_state_dict(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()> {
        self.stage_state_dict(state)?.commit(self)
    }

    /// Validates and stages a state for [`load_state_dict`](Self::load_state_dict).
    #[track_caller]
    pub(crate) fn stage_state_dict(&self, state: &BTreeMap<String, Tensor>) -> Result<StagedScalerState> {
        const OP: &str = "load_state_dict";
        let number = |name: &str| match state.get(name) {
            Some(found) => found.item(),
            None => fail!(argument(OP), "missing: {name}"),
        };
        let (scale, tracker) = (number("scale")?, number("growth_tracker")?);
        if let Some(unknown) = state.keys().find(|k| !["scale", "growth_tracker"].contains(&k.as_str())) {
            fail!(argument(OP), "unexpected: {}", printable(unknown));
        }
        fail_if!(!(scale.is_finite() && scale > 0.0); argument(OP), "a scale is a finite number above 0, not {scale}");
        fail_if!(
            !(tracker.is_finite() && tracker >= 0.0);
            argument(OP), "growth_tracker is a count of steps, and cannot be {tracker}"
        );
        let mut staged = StagedCopies::default();
        // In place, because a captured step may read the buffer.
        if let Some(state) = self.device_state.get() {
            staged.add_copy(state, &Self::create_state(state.device(), scale, tracker)?)?;
        }
        Ok(StagedScalerState { scale, growth_tracker: tracker, device_state: staged.prepare()? })
    }

    /// Discards the unscaling since the last update, for a step that ran out of memory and is repeated.
    #[track_caller]
    pub fn discard_step(&mut self) -> Result<()> {
        if let Some(state) = self.device_state.get().filter(|_| !self.optimizers.is_empty()) {
            let flags = state.narrow(0, FOUND_INF_INDEX, STATE_LEN - FOUND_INF_INDEX)?;
            flags.fill_word(0)?;
            self.optimizers.clear();
        }
        Ok(())
    }

    /// Returns the flag index of an optimiser and its progress since the last update.
    fn find_optimizer(&self, optimizer: &(impl Optimizer + ?Sized)) -> (usize, Option<OptimizerStage>) {
        let address = optimizer_address(optimizer);
        let index = self.optimizers.iter().position(|&(a, _)| a == address);
        (index.unwrap_or(self.optimizers.len()), index.map(|index| self.optimizers[index].1))
    }

    /// Returns the state buffer, allocating it at the first call.
    fn device_state(&self, device: &Device) -> Result<&Tensor> {
        if let Some(state) = self.device_state.get() {
            return Ok(state);
        }
        self.check_options()?;
        let state = Self::create_state(device, self.init_scale, self.init_growth_tracker)?;
        Ok(self.device_state.get_or_init(|| state))
    }

    /// Fails if an option is out of range.
    #[track_caller]
    fn check_options(&self) -> Result<()> {
        const OP: &str = "GradScaler";
        check::positive(OP, "init_scale", self.init_scale)?;
        check::at_least_one(OP, "growth_factor", self.growth_factor)?;
        check::positive(OP, "backoff_factor", self.backoff_factor)?;
        check::unit_interval(OP, "backoff_factor", self.backoff_factor)?;
        check::positive_count(OP, "growth_interval", self.growth_interval.into())
    }

    fn create_state(device: &Device, scale: f64, tracker: f64) -> Result<Tensor> {
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        let mut words = [0.0; STATE_LEN];
        words[SCALE_INDEX] = scale as f32;
        words[INVERSE_SCALE_INDEX] = (1.0 / scale) as f32;
        words[GROWTH_TRACKER_INDEX] = tracker as f32;
        Tensor::from_slice(&words, [STATE_LEN], device)
    }
}

/// Validated state of a scaler, staged on the device.
pub(crate) struct StagedScalerState {
    scale: f64,
    growth_tracker: f64,
    device_state: PreparedCopies,
}

impl StagedScalerState {
    /// Applies the state to the scaler.
    pub(crate) fn commit(self, scaler: &mut GradScaler) -> Result<()> {
        self.device_state.commit()?;
        (scaler.init_scale, scaler.init_growth_tracker) = (self.scale, self.growth_tracker);
        scaler.optimizers.clear();
        Ok(())
    }
}

/// Identifies an optimiser by its list of parameters, which does not move while the optimiser exists.
fn optimizer_address(optimizer: &(impl Optimizer + ?Sized)) -> usize {
    optimizer.parameters().as_ptr() as usize
}

//! Losses scaled up, so that 16-bit gradients do not vanish, and gradients scaled down again before the step.
//!
//! All that a step decides by lies in one small buffer on the device: the scale, its inverse, how many steps went well
//! in a row, and for each optimiser whether its gradients were finite. The host never reads it: the optimiser's kernels
//! look there, and do nothing where they should not.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use forebay_shaders::KernelSpec;

use crate::nn::{PreparedCopies, StagedCopies};
use crate::optim::{Optimizer, clip};
use forebay_core::autograd;
use forebay_core::check;
use forebay_core::device::Device;
use forebay_core::error::{Error, Result};
use forebay_core::memory::{self, Tag};
use forebay_core::ops::kernel::launch::{self, KernelParams};
use forebay_core::tensor::Tensor;

/// Where the buffer has what, in words. The same in amp_update.wgsl and grad_scale.wgsl.
const SCALE_INDEX: usize = 0;
const INVERSE_SCALE_INDEX: usize = 1;
const GROWTH_TRACKER_INDEX: usize = 2;
const FOUND_INF_INDEX: usize = 4;
const STATE_LEN: usize = 16;

/// Multiplies losses by a scale that adapts: it is doubled after 2000 steps without an infinity or NaN in the gradients,
/// and halved after each step with one, which changes nothing. Names and constants are PyTorch's.
///
/// f16 needs it, bf16 does not. Nothing here waits for the device, but for [`get_scale`](Self::get_scale) and the saving
/// and loading of the state.
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
    init_scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
    /// Steps that went well in a row, of a state that was loaded.
    init_growth_tracker: f64,
    /// Made when the first loss says on which device.
    device_state: OnceLock<Tensor>,
    /// The optimisers since the last update, by the address of their parameters. Their places are those of their flags.
    optimizers: Vec<(usize, OptimizerStage)>,
}

/// What was done with an optimiser since the last update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OptimizerStage {
    Unscaled,
    Stepped,
}

impl Default for GradScaler {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            init_growth_tracker: 0.0,
            device_state: OnceLock::new(),
            optimizers: Vec::new(),
        }
    }
}

impl GradScaler {
    /// A scale of 65536, doubled after 2000 finite steps in a row, halved after each that is not.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The scale to begin with.
    #[must_use]
    pub fn init_scale(self, scale: f64) -> Self {
        Self { init_scale: scale, ..self }
    }

    /// What the scale is multiplied by when it grows. It does not grow beyond 2^126, whose inverse is the last that f32
    /// holds with all its digits.
    #[must_use]
    pub fn growth_factor(self, factor: f64) -> Self {
        Self { growth_factor: factor, ..self }
    }

    /// What the scale is multiplied by after a step with an infinity or NaN.
    #[must_use]
    pub fn backoff_factor(self, factor: f64) -> Self {
        Self { backoff_factor: factor, ..self }
    }

    /// How many finite steps in a row make it grow; up to 2^24 are counted.
    #[must_use]
    pub fn growth_interval(self, steps: u32) -> Self {
        Self { growth_interval: steps, ..self }
    }

    /// The loss times the scale, in f32: what `backward` is called on.
    ///
    /// # Errors
    /// The loss is on another device than the losses before; memory runs out.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        loss.mul(&self.device_state(loss.device())?.select(0, SCALE_INDEX as isize)?)
    }

    /// Divides the gradients of an optimiser's parameters by the scale, in place, and notes whether any is infinite or NaN.
    /// [`step`](Self::step) does it, unless it was done for clipping.
    ///
    /// # Errors
    /// It was done since the last [`update`](Self::update); a gradient is of f16, which cannot hold what it is divided to
    /// (keep parameters in f32 and let [`autocast`](super::autocast) cast them); memory runs out.
    pub fn unscale_(&mut self, optimizer: &(impl Optimizer + ?Sized)) -> Result<()> {
        const OP: &str = "unscale_";
        let _op = memory::scope::enter_op(OP);
        let (place, stage) = self.find_optimizer(optimizer);
        match stage {
            None => {}
            Some(OptimizerStage::Unscaled) => {
                return Err(Error::argument(OP, "the gradients are unscaled already, since the last update"));
            }
            Some(OptimizerStage::Stepped) => {
                return Err(Error::argument(OP, "comes before `step`; call `update` after each step"));
            }
        }
        if FOUND_INF_INDEX + place >= STATE_LEN {
            let most = STATE_LEN - FOUND_INF_INDEX;
            return Err(Error::argument(OP, format!("one scaler takes up to {most} optimisers an update")));
        }
        let Some(first) = optimizer.parameters().first() else {
            return Err(Error::argument(OP, "the optimiser has no parameters"));
        };
        let state = self.device_state(first.device())?;
        clip::unscale_grads(OP, optimizer.parameters(), state, FOUND_INF_INDEX + place)?;
        self.optimizers.push((optimizer_address(optimizer), OptimizerStage::Unscaled));
        Ok(())
    }

    /// Unscales the gradients, unless that was done, and makes the optimiser's step if all of them are finite. The device
    /// decides; the host does not learn it.
    ///
    /// # Errors
    /// It was done since the last [`update`](Self::update); those of [`unscale_`](Self::unscale_) and of the optimiser.
    pub fn step(&mut self, optimizer: &mut (impl Optimizer + ?Sized)) -> Result<()> {
        const OP: &str = "step";
        match self.find_optimizer(optimizer) {
            (_, Some(OptimizerStage::Stepped)) => {
                return Err(Error::argument(OP, "was done already since the last update; call `update`"));
            }
            (_, Some(OptimizerStage::Unscaled)) => {}
            (_, None) => self.unscale_(optimizer)?,
        }
        let (place, _) = self.find_optimizer(optimizer);
        let Some(state) = self.device_state.get() else { return Ok(()) };
        optimizer.step_unless(&state.select(0, (FOUND_INF_INDEX + place) as isize)?)?;
        self.optimizers[place].1 = OptimizerStage::Stepped;
        Ok(())
    }

    /// Changes the scale, by what the steps since the last update have met. Once for all optimisers.
    ///
    /// # Errors
    /// There was no step.
    pub fn update(&mut self) -> Result<()> {
        const OP: &str = "update";
        let _op = memory::scope::enter_op(OP);
        let Some(state) = self.device_state.get().filter(|_| !self.optimizers.is_empty()) else {
            return Err(Error::argument(
                OP,
                "comes after `step`, or `unscale_`; there was none since the last",
            ));
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

    /// The scale. Waits for the device.
    ///
    /// # Errors
    /// The device was lost.
    pub fn get_scale(&self) -> Result<f64> {
        self.device_state
            .get()
            .map_or(Ok(self.init_scale), |state| state.select(0, SCALE_INDEX as isize)?.item())
    }

    /// The scale, and how many steps went well in a row (`scale`, `growth_tracker`). Factors and interval are the
    /// program's. Waits for nothing; saving does.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn state_dict(&self, device: &Device) -> Result<BTreeMap<String, Tensor>> {
        let _no_grad = autograd::no_grad();
        let state = self.device_state(device)?;
        let word = |at: usize| state.select(0, at as isize)?.copy();
        Ok(BTreeMap::from([
            ("scale".to_owned(), word(SCALE_INDEX)?),
            ("growth_tracker".to_owned(), word(GROWTH_TRACKER_INDEX)?),
        ]))
    }

    /// Goes on from a state of [`state_dict`](Self::state_dict). Waits for the device.
    ///
    /// # Errors
    /// A name is missing or unexpected; the scale is no finite number above 0; memory runs out. Nothing is changed then.
    pub fn load_state_dict(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()> {
        self.stage_state_dict(state)?.commit(self)
    }

    /// Prepares what [`load_state_dict`](Self::load_state_dict) changes.
    pub(crate) fn stage_state_dict(&self, state: &BTreeMap<String, Tensor>) -> Result<StagedScalerState> {
        const OP: &str = "load_state_dict";
        let number = |name: &str| {
            let found = state.get(name).ok_or_else(|| Error::argument(OP, format!("missing: {name}")))?;
            found.item()
        };
        let (scale, tracker) = (number("scale")?, number("growth_tracker")?);
        if let Some(strange) = state.keys().find(|k| !["scale", "growth_tracker"].contains(&k.as_str())) {
            return Err(Error::argument(OP, format!("unexpected: {strange}")));
        }
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::argument(OP, format!("a scale is a finite number above 0, not {scale}")));
        }
        if !(tracker.is_finite() && tracker >= 0.0) {
            let why = format!("growth_tracker is a count of steps, and cannot be {tracker}");
            return Err(Error::argument(OP, why));
        }
        let mut staged = StagedCopies::default();
        // In place: a captured step may look there.
        if let Some(state) = self.device_state.get() {
            staged.add_copy(state, &Self::create_state(state.device(), scale, tracker)?)?;
        }
        Ok(StagedScalerState { scale, growth_tracker: tracker, device_state: staged.prepare()? })
    }

    /// Forgets what was unscaled since the last update: for a step that ran out of memory midway, and is made again.
    ///
    /// # Errors
    /// The device was lost.
    pub fn discard_step(&mut self) -> Result<()> {
        if let Some(state) = self.device_state.get().filter(|_| !self.optimizers.is_empty()) {
            let flags = state.narrow(0, FOUND_INF_INDEX, STATE_LEN - FOUND_INF_INDEX)?;
            flags.fill_word(0)?;
            self.optimizers.clear();
        }
        Ok(())
    }

    /// The flag of an optimiser, and what was done with it since the last update.
    fn find_optimizer(&self, optimizer: &(impl Optimizer + ?Sized)) -> (usize, Option<OptimizerStage>) {
        let address = optimizer_address(optimizer);
        match self.optimizers.iter().position(|&(a, _)| a == address) {
            Some(place) => (place, Some(self.optimizers[place].1)),
            None => (self.optimizers.len(), None),
        }
    }

    /// The buffer, which the first call makes.
    fn device_state(&self, device: &Device) -> Result<&Tensor> {
        if let Some(state) = self.device_state.get() {
            return Ok(state);
        }
        self.check_options()?;
        let made = self.create_initial_state(device)?;
        Ok(self.device_state.get_or_init(|| made))
    }

    /// Fails for an option that is out of its range: before the first scale is made.
    fn check_options(&self) -> Result<()> {
        const OP: &str = "GradScaler";
        check::positive(OP, "init_scale", self.init_scale)?;
        check::at_least_one(OP, "growth_factor", self.growth_factor)?;
        check::positive(OP, "backoff_factor", self.backoff_factor)?;
        check::unit_interval(OP, "backoff_factor", self.backoff_factor)?;
        check::positive_count(OP, "growth_interval", self.growth_interval.into())
    }

    /// The buffer at the start, or after loading.
    fn create_initial_state(&self, device: &Device) -> Result<Tensor> {
        Self::create_state(device, self.init_scale, self.init_growth_tracker)
    }

    fn create_state(device: &Device, scale: f64, tracker: f64) -> Result<Tensor> {
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        let mut words = [0.0; STATE_LEN];
        words[SCALE_INDEX] = scale as f32;
        words[INVERSE_SCALE_INDEX] = (1.0 / scale) as f32;
        words[GROWTH_TRACKER_INDEX] = tracker as f32;
        Tensor::from_slice(&words, &[STATE_LEN], device)
    }
}

/// State of a scaler that was read, checked and brought to the device.
pub(crate) struct StagedScalerState {
    scale: f64,
    growth_tracker: f64,
    device_state: PreparedCopies,
}

impl StagedScalerState {
    /// Gives it to the scaler.
    ///
    /// # Errors
    /// The device was lost.
    pub(crate) fn commit(self, scaler: &mut GradScaler) -> Result<()> {
        self.device_state.commit()?;
        (scaler.init_scale, scaler.init_growth_tracker) = (self.scale, self.growth_tracker);
        scaler.optimizers.clear();
        Ok(())
    }
}

/// Who an optimiser is: its list of parameters does not move while it lives.
fn optimizer_address(optimizer: &(impl Optimizer + ?Sized)) -> usize {
    optimizer.parameters().as_ptr() as usize
}

//! Averages of a model's weights over training: PyTorch's `optim.swa_utils.AveragedModel`.

use std::collections::BTreeMap;

use crate::nn::{self, Module, NamedTensor};
use crate::{Result, Tag, Tensor, autograd, check, fail, fail_if, memory};

#[derive(Clone, Copy, Debug, PartialEq)]
enum AveragingRule {
    /// Equal weight for all updates (Izmailov et al., 2018).
    Swa,
    /// Exponential moving average with this decay.
    Ema(f64),
}

/// Averaged copy of a model's weights, which often evaluates better than the model itself. Methods fail for a model
/// with other names or shapes.
///
/// ```
/// # use forebay_core::{device::Device, error::Result};
/// # use forebay_nn::{nn::{Linear, Module}, optim::{AveragedModel, Optimizer, Sgd}};
/// # fn main() -> Result<()> {
/// # let device = Device::null(Default::default());
/// let net = Linear::new(8, 2, &device)?;
/// let mut optimizer = Sgd::new(net.parameters(), 0.1);
/// let mut average = AveragedModel::ema(&net, 0.999)?;
/// for _ in 0..10 {
///     optimizer.step()?;
///     average.update_parameters(&net)?;
/// }
/// average.swap_parameters(&net)?; // evaluate: the model has the averages
/// average.swap_parameters(&net)?; // and go on
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AveragedModel {
    rule: AveragingRule,
    use_buffers: bool,
    /// Averages by name; names of one shared parameter refer to one tensor.
    averages: BTreeMap<String, Tensor>,
    n_averaged: u64,
}

impl AveragedModel {
    /// Creates the mean over all updates: stochastic weight averaging.
    #[track_caller]
    pub fn swa<M: Module + ?Sized>(model: &M) -> Result<Self> {
        Self::new(model, AveragingRule::Swa)
    }

    /// Creates an exponential moving average; each update keeps the fraction `decay`, 0 to 1, of
    /// the average.
    #[track_caller]
    pub fn ema<M: Module + ?Sized>(model: &M, decay: f64) -> Result<Self> {
        fail_if!(
            !(0.0..=1.0).contains(&decay);
            argument("AveragedModel::ema"), "takes a decay between 0 and 1, not {decay}; 0.999 is usual"
        );
        Self::new(model, AveragingRule::Ema(decay))
    }

    #[track_caller]
    fn new<M: Module + ?Sized>(model: &M, rule: AveragingRule) -> Result<Self> {
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        let mut averages = BTreeMap::new();
        for NamedTensor { tensor, names, .. } in nn::named_tensors(model) {
            let copy = tensor.copy()?;
            averages.extend(names.into_iter().map(|name| (name, copy.clone())));
        }
        Ok(Self { rule, use_buffers: false, averages, n_averaged: 0 })
    }

    setters! {
        /// If true, also averages floating-point buffers, such as the running statistics of batch norms.
        /// Otherwise the buffers are copies of the last update's.
        fn use_buffers(on: bool) { use_buffers: on }
    }

    /// Returns the number of updates.
    #[must_use]
    pub fn n_averaged(&self) -> u64 {
        self.n_averaged
    }

    #[track_caller]
    fn zip_with_averages<M: Module + ?Sized>(
        &self,
        op: &'static str,
        model: &M,
    ) -> Result<Vec<(Tensor, NamedTensor)>> {
        let pair = |named: NamedTensor| {
            let (name, shape) = (named.names.first().map_or("", String::as_str), named.tensor.shape());
            match self.averages.get(name).filter(|t| t.shape() == shape) {
                Some(average) => Ok((average.clone(), named)),
                None => fail!(argument(op), "`{name}` of {shape:?} is not in the model that is averaged"),
            }
        };
        nn::named_tensors(model).into_iter().map(pair).collect()
    }

    /// Updates the averages with the model's weights. The first update copies them. Call this after a
    /// captured step; inside, it is an error.
    #[track_caller]
    pub fn update_parameters<M: Module + ?Sized>(&mut self, model: &M) -> Result<()> {
        const OP: &str = "AveragedModel::update";
        let _op = memory::scope::enter_op(OP);
        let _no_grad = autograd::no_grad();
        let weight = match self.rule {
            AveragingRule::Swa => 1.0 / (self.n_averaged + 1) as f64,
            AveragingRule::Ema(decay) => 1.0 - decay,
        };
        for (average, NamedTensor { tensor, is_parameter, .. }) in self.zip_with_averages(OP, model)? {
            tensor.device().check_not_recording(OP, "the program counts updates; call it after the step")?;
            let averaged = (is_parameter || self.use_buffers) && tensor.dtype().is_float();
            if averaged && self.n_averaged > 0 {
                average.lerp_(&tensor, weight)?;
            } else {
                average.copy_(&tensor)?;
            }
        }
        self.n_averaged += 1;
        Ok(())
    }

    /// Swaps the model's weights and the averages. A second call undoes the first.
    #[track_caller]
    pub fn swap_parameters<M: Module + ?Sized>(&mut self, model: &M) -> Result<()> {
        const OP: &str = "AveragedModel::swap";
        let _op = memory::scope::enter_op(OP);
        let _no_grad = autograd::no_grad();
        let pairs = self.zip_with_averages(OP, model)?;
        // Allocates first, so that running out of memory changes nothing: one buffer for each dtype and
        // device, with room for the largest tensor.
        let mut buffers: Vec<Tensor> = Vec::new();
        let mut sorted: Vec<&Tensor> = pairs.iter().map(|(_, named)| &named.tensor).collect();
        sorted.sort_by_key(|t| std::cmp::Reverse(t.numel()));
        let fits =
            |buffer: &&Tensor, t: &Tensor| buffer.dtype() == t.dtype() && buffer.device() == t.device();
        {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            for t in sorted {
                if !buffers.iter().any(|buffer| fits(&buffer, t)) {
                    buffers.push(Tensor::empty([t.numel()], t.dtype(), t.device())?);
                }
            }
        }
        for (average, NamedTensor { tensor, .. }) in &pairs {
            let Some(buffer) = buffers.iter().find(|buffer| fits(buffer, tensor)) else { continue };
            let previous = buffer.narrow(0, 0, tensor.numel())?.reshape(tensor.shape())?;
            previous.copy_(tensor)?;
            tensor.copy_(average)?;
            average.copy_(&previous)?;
        }
        Ok(())
    }

    /// Copies the averages into the model.
    #[track_caller]
    pub fn copy_to<M: Module + ?Sized>(&self, model: &M) -> Result<()> {
        let mut pairs = self.zip_with_averages("AveragedModel::copy_to", model)?.into_iter();
        pairs.try_for_each(|(average, NamedTensor { tensor, .. })| tensor.copy_(&average))
    }

    /// Returns the averages under PyTorch's names, each with the prefix `module.`, and `n_averaged`. The
    /// tensors share memory with the averages, so save or copy them.
    #[track_caller]
    pub fn state_dict(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut state: BTreeMap<String, Tensor> =
            self.averages.iter().map(|(name, t)| (format!("module.{name}"), t.clone())).collect();
        if let Some(device) = self.averages.values().next().map(Tensor::device) {
            let count = Tensor::from_slice(&[self.n_averaged as i64], (), device)?;
            state.insert(N_AVERAGED_KEY.to_owned(), count);
        }
        Ok(state)
    }

    /// Restores averages from [`state_dict`](Self::state_dict) or from PyTorch.
    ///
    /// # Errors
    /// The state has no valid `n_averaged`. Names that are missing, unexpected or do not match give a single
    /// error, and nothing is changed.
    #[track_caller]
    pub fn load_state_dict(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()> {
        let count = state.get(N_AVERAGED_KEY).filter(|t| t.numel() == 1 && t.dtype().is_int());
        let Some(count) = count else {
            fail!(
                argument("AveragedModel::load_state_dict"),
                "takes a state with `{N_AVERAGED_KEY}`, one integer: of an AveragedModel, not of a model"
            );
        };
        let count = count.item()?;
        check::non_negative("AveragedModel::load_state_dict", N_AVERAGED_KEY, count)?;
        let values = nn::rename_keys(state, |name| Some(name.strip_prefix("module.")?.to_owned()))?;
        self.averages.load_state_dict(&values)?;
        self.n_averaged = count as u64;
        Ok(())
    }
}

const N_AVERAGED_KEY: &str = "n_averaged";

//! Averages of what training goes through: PyTorch's `optim.swa_utils.AveragedModel`.

use std::collections::BTreeMap;

use crate::autograd;
use crate::check;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::nn::{self, Module, Named};
use crate::tensor::Tensor;

/// How parameters are averaged.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Average {
    /// All alike (Izmailov et al., 2018).
    Equal,
    /// Each update fades by this factor at the next one.
    Fading(f64),
}

/// A second set of a model's numbers that follows it, and is often the better one to evaluate.
///
/// ```
/// # use forebay_core::{device::Device, error::Result, nn::{Linear, Module}, optim::{AveragedModel, Optimizer, Sgd}};
/// # fn main() -> Result<()> {
/// # let device = Device::null(Default::default());
/// let net = Linear::new(8, 2, &device)?;
/// let mut optimizer = Sgd::new(net.parameters(), 0.1);
/// let mut average = AveragedModel::ema(&net, 0.999)?;
/// for _ in 0..10 {
///     optimizer.step()?;
///     average.update(&net)?;
/// }
/// average.swap(&net)?; // evaluate: the model has the averages
/// average.swap(&net)?; // and go on
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AveragedModel {
    average: Average,
    use_buffers: bool,
    /// Under all names; names of one parameter have one tensor.
    values: BTreeMap<String, Tensor>,
    updates: u64,
}

impl AveragedModel {
    /// The mean over all updates: stochastic weight averaging.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn swa<M: Module + ?Sized>(model: &M) -> Result<Self> {
        Self::new(model, Average::Equal)
    }

    /// An exponential moving average: of what there was, `decay` stays at each update.
    ///
    /// # Errors
    /// `decay` is not between 0 and 1; memory runs out.
    #[track_caller]
    pub fn ema<M: Module + ?Sized>(model: &M, decay: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&decay) {
            let why = format!("takes a decay between 0 and 1, not {decay}; 0.999 is usual");
            return Err(Error::argument("AveragedModel::ema", why));
        }
        Self::new(model, Average::Fading(decay))
    }

    #[track_caller]
    fn new<M: Module + ?Sized>(model: &M, average: Average) -> Result<Self> {
        let _tag = memory::scope::tag(Tag::OptimizerState);
        let mut values = BTreeMap::new();
        for Named { tensor, names, .. } in nn::named(model) {
            let copy = tensor.copy()?;
            values.extend(names.into_iter().map(|name| (name, copy.clone())));
        }
        Ok(Self { average, use_buffers: false, values, updates: 0 })
    }

    /// Averages buffers of floats too, such as the running statistics of batch norms; else they are those of the last update.
    #[must_use]
    pub fn use_buffers(mut self, on: bool) -> Self {
        self.use_buffers = on;
        self
    }

    /// How many updates there were.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The model's tensors beside their averages.
    fn pairs<M: Module + ?Sized>(&self, op: &'static str, model: &M) -> Result<Vec<(Named, Tensor)>> {
        let pair = |named: Named| {
            let name = named.names.first().map_or("", String::as_str);
            let average = self.values.get(name).filter(|t| t.shape() == named.tensor.shape()).cloned();
            let average = average.ok_or_else(|| {
                let why =
                    format!("`{name}` of {:?} is not in the model that is averaged", named.tensor.shape());
                Error::argument(op, why)
            })?;
            Ok((named, average))
        };
        nn::named(model).into_iter().map(pair).collect()
    }

    /// Takes the model's numbers into the averages; the first time, as they are. Not in a step that is captured: call it behind.
    ///
    /// # Errors
    /// The model has other names or shapes; a step is being captured; memory runs out.
    #[track_caller]
    pub fn update<M: Module + ?Sized>(&mut self, model: &M) -> Result<()> {
        const OP: &str = "AveragedModel::update";
        let _op = memory::scope::op(OP);
        let _no_grad = autograd::no_grad();
        let weight = match self.average {
            Average::Equal => 1.0 / (self.updates + 1) as f64,
            Average::Fading(decay) => 1.0 - decay,
        };
        for (Named { tensor, parameter, .. }, average) in self.pairs(OP, model)? {
            tensor
                .device()
                .capture_recorder()
                .refuse(OP, "updates are counted by the program; call it behind the step")?;
            let averaged = (parameter || self.use_buffers) && tensor.dtype().is_float();
            if averaged && self.updates > 0 {
                average.lerp_(&tensor, weight)?;
            } else {
                average.copy_(&tensor)?;
            }
        }
        self.updates += 1;
        Ok(())
    }

    /// Exchanges the model's numbers and the averages; again, and both are as before.
    ///
    /// # Errors
    /// The model has other names or shapes; memory runs out, for one tensor's copy.
    #[track_caller]
    pub fn swap<M: Module + ?Sized>(&mut self, model: &M) -> Result<()> {
        const OP: &str = "AveragedModel::swap";
        let _op = memory::scope::op(OP);
        let _no_grad = autograd::no_grad();
        let pairs = self.pairs(OP, model)?;
        // All that takes memory comes first: one place for each type, as large as the largest tensor of it.
        let mut places: Vec<Tensor> = Vec::new();
        let mut sorted: Vec<&Tensor> = pairs.iter().map(|(named, _)| &named.tensor).collect();
        sorted.sort_by_key(|t| std::cmp::Reverse(t.numel()));
        let fits = |place: &&Tensor, t: &Tensor| place.dtype() == t.dtype() && place.device() == t.device();
        {
            let _tag = memory::scope::tag(Tag::Workspace);
            for t in sorted {
                if !places.iter().any(|place| fits(&place, t)) {
                    places.push(Tensor::empty(&[t.numel()], t.dtype(), t.device())?);
                }
            }
        }
        for (Named { tensor, .. }, average) in &pairs {
            let Some(place) = places.iter().find(|place| fits(place, tensor)) else { continue };
            let kept = place.narrow(0, 0, tensor.numel())?.reshape(tensor.shape())?;
            kept.copy_(tensor)?;
            tensor.copy_(average)?;
            average.copy_(&kept)?;
        }
        Ok(())
    }

    /// Copies the averages into the model.
    ///
    /// # Errors
    /// The model has other names or shapes.
    #[track_caller]
    pub fn copy_to<M: Module + ?Sized>(&self, model: &M) -> Result<()> {
        for (Named { tensor, .. }, average) in self.pairs("AveragedModel::copy_to", model)? {
            tensor.copy_(&average)?;
        }
        Ok(())
    }

    /// The averages under PyTorch's names, `module.` before each, and `n_averaged`. They share memory with this: save them, or copy them.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn state_dict(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut state: BTreeMap<String, Tensor> =
            self.values.iter().map(|(name, t)| (format!("module.{name}"), t.clone())).collect();
        if let Some(device) = self.values.values().next().map(Tensor::device) {
            state.insert(COUNT.to_owned(), Tensor::from_slice(&[self.updates as i64], &[], device)?);
        }
        Ok(state)
    }

    /// Goes on from averages of [`state_dict`](Self::state_dict), or of PyTorch's.
    ///
    /// # Errors
    /// One error that lists names that are missing, unexpected or do not fit; nothing is changed then.
    pub fn load_state_dict(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()> {
        let count = state.get(COUNT).filter(|t| t.numel() == 1 && t.dtype().is_int());
        let Some(count) = count else {
            let why =
                format!("takes a state with `{COUNT}`, one integer: of an AveragedModel, not of a model");
            return Err(Error::argument("AveragedModel::load_state_dict", why));
        };
        let count = count.item()?;
        check::non_negative("AveragedModel::load_state_dict", COUNT, count)?;
        let values = nn::rename_keys(state, |name| Some(name.strip_prefix("module.")?.to_owned()))?;
        self.values.load_state_dict(&values)?;
        self.updates = count as u64;
        Ok(())
    }
}

const COUNT: &str = "n_averaged";

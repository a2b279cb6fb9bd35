//! Everything a run needs to go on as if it had not stopped, in one safetensors file.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{History, model_device};
use crate::data::LoaderCursor;
use crate::io::safetensors;
use crate::nn::{self, Module};
use crate::optim::GradScaler;
use crate::optim::Optimizer;
use forebay_core::autograd;
use forebay_core::device::RandomState;
use forebay_core::error::{Error, Result};

/// Where the header of the file keeps what is no tensor.
const HEADER_KEY: &str = "forebay.checkpoint";
const FORMAT_VERSION: u32 = 1;
const MODEL_PREFIX: &str = "model.";
const OPTIMIZER_PREFIX: &str = "optimizer.";
const SCALER_PREFIX: &str = "scaler.";

/// Where a run stands. Saved with the model's tensors, the optimiser's state and the device's random numbers, it lets
/// another process go on with the same bits.
///
/// ```no_run
/// # use forebay_core::error::Result;
/// # use forebay_nn::{data::LoaderCursor, nn::Module, optim::Optimizer, train::Checkpoint};
/// # fn run(net: &dyn Module, opt: &mut dyn Optimizer, cursor: LoaderCursor) -> Result<()> {
/// Checkpoint::new(100, cursor).save("run.safetensors", net, opt)?;
/// // In another process, on a model and an optimiser made in the same way:
/// let Checkpoint { step, cursor, .. } = Checkpoint::resume("run.safetensors", net, opt)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    /// Steps done.
    pub step: u64,
    /// The batch that comes next.
    pub cursor: LoaderCursor,
    /// What was recorded until here.
    pub history: History,
    /// How the batches are made ([`Loader::description`](crate::data::Loader::description)); empty if that is not known.
    pub loader_description: String,
    /// The epoch with which the present call of [`fit`](super::Trainer::fit) began: 0, unless it is not the run's first.
    pub first_epoch: u64,
}

/// What the header holds.
#[derive(Serialize, Deserialize)]
struct CheckpointHeader {
    version: u32,
    step: u64,
    cursor: LoaderCursor,
    seed: u64,
    offset: u64,
    batches: String,
    history: History,
    #[serde(default)]
    first_epoch: u64,
}

impl Checkpoint {
    /// After `step` steps, with the batch at `cursor` to come.
    #[must_use]
    pub fn new(step: u64, cursor: LoaderCursor) -> Self {
        Self { step, cursor, ..Self::default() }
    }

    /// Writes the file, which is replaced as a whole. Waits for the device.
    ///
    /// # Errors
    /// The file cannot be written; the device was lost.
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &(impl Optimizer + ?Sized),
    ) -> Result<()> {
        self.save_with_scaler(path, model, optimizer, None)
    }

    /// As [`save`](Self::save), with the state of a scaler.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_with_scaler(
        &self,
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &(impl Optimizer + ?Sized),
        scaler: Option<&GradScaler>,
    ) -> Result<()> {
        let path = path.as_ref();
        let _no_grad = autograd::no_grad();
        let device = model_device("save", model)?;
        let random = device.random_state();
        let header = CheckpointHeader {
            version: FORMAT_VERSION,
            step: self.step,
            cursor: self.cursor,
            seed: random.seed,
            offset: random.offset,
            batches: self.loader_description.clone(),
            history: self.history.clone(),
            first_epoch: self.first_epoch,
        };
        let header = serde_json::to_string(&header).map_err(|e| Error::file(path, format!("header: {e}")))?;
        let named = |prefix: &'static str| move |(name, tensor)| (format!("{prefix}{name}"), tensor);
        let model = model.state_dict().into_iter().map(named(MODEL_PREFIX));
        let optimizer = optimizer.state_dict()?.into_iter().map(named(OPTIMIZER_PREFIX));
        let scaler = scaler.map(|s| s.state_dict(&device)).transpose()?.unwrap_or_default();
        let all = model.chain(optimizer).chain(scaler.into_iter().map(named(SCALER_PREFIX))).collect();
        safetensors::save(path, &all, &BTreeMap::from([(HEADER_KEY.into(), header)]))
    }

    /// Reads the file, and puts model, optimiser and random numbers where they stood.
    ///
    /// # Errors
    /// The file cannot be read, is damaged or no checkpoint, or does not fit the model or the optimiser; memory runs out. Model,
    /// optimiser, scaler and random numbers then are as they were.
    pub fn resume(
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &mut (impl Optimizer + ?Sized),
    ) -> Result<Self> {
        Self::resume_with_scaler(path, model, optimizer, None)
    }

    /// As [`resume`](Self::resume), with a scaler. One that the file knows nothing of stays as it is.
    ///
    /// # Errors
    /// As [`resume`](Self::resume).
    pub fn resume_with_scaler(
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &mut (impl Optimizer + ?Sized),
        scaler: Option<&mut GradScaler>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let _no_grad = autograd::no_grad();
        let device = model_device("resume", model)?;
        let (tensors, mut strings) = safetensors::load_with_metadata(path, &device)?;
        let header = strings.remove(HEADER_KEY).ok_or_else(|| {
            Error::file(
                path,
                "is no checkpoint: it has tensors and no training state; load it with `load_state_dict`",
            )
        })?;
        let header: CheckpointHeader =
            serde_json::from_str(&header).map_err(|e| Error::file(path, format!("training state: {e}")))?;
        if header.version != FORMAT_VERSION {
            let message =
                format!("is a checkpoint of version {}; this release reads {FORMAT_VERSION}", header.version);
            return Err(Error::file(path, message));
        }
        let (mut of_model, mut of_optimizer) = (BTreeMap::new(), BTreeMap::new());
        let mut of_scaler = BTreeMap::new();
        for (name, tensor) in tensors {
            if let Some(name) = name.strip_prefix(MODEL_PREFIX) {
                of_model.insert(name.to_owned(), tensor);
            } else if let Some(name) = name.strip_prefix(OPTIMIZER_PREFIX) {
                of_optimizer.insert(name.to_owned(), tensor);
            } else if let Some(name) = name.strip_prefix(SCALER_PREFIX) {
                of_scaler.insert(name.to_owned(), tensor);
            } else {
                return Err(Error::file(
                    path,
                    format!("holds `{name}`, which is neither the model's nor the optimiser's"),
                ));
            }
        }
        let at = |e: Error| e.with_context(path.display().to_string());
        // All is prepared before anything changes. The optimiser comes last: its own load changes all or nothing, and what
        // follows it needs no memory.
        let (of_model, _) = nn::stage_state_dict(model, &of_model, true).map_err(at)?;
        let of_scaler = match &scaler {
            Some(scaler) if !of_scaler.is_empty() => Some(scaler.stage_state_dict(&of_scaler).map_err(at)?),
            None if !of_scaler.is_empty() => {
                log::warn!("{} holds the state of a scaler, and the run has none", path.display());
                None
            }
            _ => None,
        };
        optimizer.load_state_dict(&of_optimizer).map_err(at)?;
        of_model.commit().map_err(at)?;
        if let (Some(scaler), Some(staged)) = (scaler, of_scaler) {
            staged.commit(scaler).map_err(at)?;
        }
        device.set_random_state(RandomState { seed: header.seed, offset: header.offset });
        Ok(Self {
            step: header.step,
            cursor: header.cursor,
            history: header.history,
            loader_description: header.batches,
            first_epoch: header.first_epoch,
        })
    }
}

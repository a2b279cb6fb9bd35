//! Checkpoints: the complete state of a run in one safetensors file, for an exact resume.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{History, model_device};
use crate::data::LoaderCursor;
use crate::io::safetensors;
use crate::nn::{self, Module};
use crate::optim::GradScaler;
use crate::optim::Optimizer;
use crate::{Error, Result};
use forebay_core::autograd;
use forebay_core::device::RandomState;

/// Metadata key of the state that is not a tensor.
const HEADER_KEY: &str = "forebay.checkpoint";
const FORMAT_VERSION: u32 = 1;
const MODEL_PREFIX: &str = "model.";
const OPTIMIZER_PREFIX: &str = "optimizer.";
const SCALER_PREFIX: &str = "scaler.";

/// Position of a run. Saved with the model's tensors, the optimiser's state and the random state of the
/// device, it lets another process resume with bitwise equal results.
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
    /// Number of steps done.
    pub step: u64,
    /// Position of the next batch.
    pub cursor: LoaderCursor,
    /// Metrics recorded so far.
    pub history: History,
    /// Description of the batches ([`DataLoader::description`](crate::data::DataLoader::description)); empty
    /// if unknown.
    pub loader_description: String,
    /// First epoch of the current call of [`fit`](super::Trainer::fit); 0 for the first call.
    pub first_epoch: u64,
}

/// Contents of the header.
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
    /// Creates a checkpoint after `step` steps, with the next batch at `cursor`.
    #[must_use]
    pub fn new(step: u64, cursor: LoaderCursor) -> Self {
        Self { step, cursor, ..Self::default() }
    }

    /// Writes the file, which is replaced atomically. Waits for the device.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &(impl Optimizer + ?Sized),
    ) -> Result<()> {
        self.save_with_scaler(path, model, optimizer, None)
    }

    /// Saves like [`save`](Self::save), with the state of a scaler.
    ///
    /// # Errors
    /// Same errors as [`save`](Self::save).
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

    /// Reads the file and restores the model, the optimiser and the random state.
    ///
    /// # Errors
    /// The file cannot be read, is damaged or not a checkpoint, or does not match the model or the optimiser.
    /// After any error, model, optimiser, scaler and random state are unchanged.
    pub fn resume(
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &mut (impl Optimizer + ?Sized),
    ) -> Result<Self> {
        Self::resume_with_scaler(path, model, optimizer, None)
    }

    /// Resumes like [`resume`](Self::resume), with a scaler. The scaler is unchanged if the file has no state
    /// for it.
    ///
    /// # Errors
    /// Same errors as [`resume`](Self::resume).
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
        // Prepares everything before anything changes. The optimiser's load comes last: it changes all or
        // nothing, and the later steps need no memory.
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

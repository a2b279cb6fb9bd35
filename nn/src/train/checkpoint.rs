//! Checkpoints: the complete state of a run in one safetensors file, for an exact resume.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{History, model_device};
use crate::data::LoaderCursor;
use crate::io::safetensors::{self, Metadata};
use crate::nn::{self, Module};
use crate::optim::GradScaler;
use crate::optim::Optimizer;
use crate::{Error, Result, autograd, fail, fail_if};
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
/// Checkpoint::new(100, cursor).with_metadata("best_loss", 0.25).save("run.safetensors", net, opt)?;
/// // In another process, on a model and an optimiser made in the same way:
/// let Checkpoint { step, cursor, .. } = Checkpoint::resume("run.safetensors", net, opt)?;
/// // Without the tensors:
/// let best_loss = &Checkpoint::read("run.safetensors")?.metadata["best_loss"];
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Number of steps done.
    pub step: u64,
    /// Position of the next batch.
    pub cursor: LoaderCursor,
    /// Metrics recorded so far.
    pub history: History,
    /// Description of the batches ([`DataLoader::description`](crate::data::DataLoader::description)); empty
    /// if unknown.
    #[serde(rename = "batches")]
    pub loader_description: String,
    /// First epoch of the current call of [`fit`](super::Trainer::fit); 0 for the first call.
    #[serde(default)]
    pub first_epoch: u64,
    /// True if the last call of [`fit`](super::Trainer::fit) had returned. The first call after a resume then trains
    /// again instead of finishing that call.
    #[serde(default)]
    pub fit_finished: bool,
    /// Strings of the program, such as its configuration or the best loss. They are strings of the file, so
    /// [`safetensors::open`] and Python's `safe_open` read them too.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: Metadata,
}

/// Contents of the header.
#[derive(Serialize, Deserialize)]
struct CheckpointHeader {
    version: u32,
    seed: u64,
    offset: u64,
    #[serde(flatten)]
    checkpoint: Checkpoint,
}

impl CheckpointHeader {
    /// Reads the header among the strings of a file; the others are the program's metadata.
    fn parse(path: &Path, mut strings: Metadata) -> Result<Self> {
        let Some(header) = strings.remove(HEADER_KEY) else {
            fail!(
                file(path),
                "is not a checkpoint: it has tensors and no training state; load it with `load_state_dict`"
            );
        };
        let mut header: Self =
            serde_json::from_str(&header).map_err(|e| Error::file(path, format!("training state: {e}")))?;
        fail_if!(header.version != FORMAT_VERSION;
            file(path), "is a checkpoint of version {}; this release reads {FORMAT_VERSION}", header.version);
        header.checkpoint.metadata = strings;
        Ok(header)
    }
}

impl Checkpoint {
    /// Creates a checkpoint after `step` steps, with the next batch at `cursor`.
    #[must_use]
    pub fn new(step: u64, cursor: LoaderCursor) -> Self {
        Self { step, cursor, ..Self::default() }
    }

    /// Adds a string to the [`metadata`](Self::metadata). The text of a number is read back by `parse`, with
    /// the same bits.
    #[must_use = "the method returns the changed value"]
    pub fn with_metadata(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.metadata.insert(name.into(), value.to_string());
        self
    }

    /// Reads the position and the metadata of a file, without its tensors.
    ///
    /// # Errors
    /// The file cannot be read, or its header is damaged or not a checkpoint's.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let strings = safetensors::open(path)?.metadata().clone();
        Ok(CheckpointHeader::parse(path, strings)?.checkpoint)
    }

    /// Writes the file, which is replaced atomically. Waits for the device.
    #[track_caller]
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &(impl Optimizer + ?Sized),
    ) -> Result<()> {
        self.save_with_scaler(path, model, optimizer, None)
    }

    /// Saves like [`save`](Self::save), with the state of a scaler.
    #[track_caller]
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
        nn::check_distinct_names("save", model)?;
        let RandomState { seed, offset, .. } = device.random_state();
        fail_if!(self.metadata.contains_key(HEADER_KEY);
            argument("save"), "the metadata `{HEADER_KEY}` is the checkpoint's own; choose another name");
        let checkpoint = Self { metadata: Metadata::new(), ..self.clone() };
        let header = CheckpointHeader { version: FORMAT_VERSION, seed, offset, checkpoint };
        let header = serde_json::to_string(&header).map_err(|e| Error::file(path, format!("header: {e}")))?;
        let named = |prefix: &'static str| move |(name, tensor)| (format!("{prefix}{name}"), tensor);
        let model = model.state_dict().into_iter().map(named(MODEL_PREFIX));
        let optimizer = optimizer.state_dict()?.into_iter().map(named(OPTIMIZER_PREFIX));
        let scaler = scaler.map(|s| s.state_dict(&device)).transpose()?.unwrap_or_default();
        let all = model.chain(optimizer).chain(scaler.into_iter().map(named(SCALER_PREFIX))).collect();
        let mut strings = self.metadata.clone();
        strings.insert(HEADER_KEY.into(), header);
        safetensors::save(path, &all, &strings)
    }

    /// Reads the file and restores the model, the optimiser and the random state.
    ///
    /// # Errors
    /// The file cannot be read, is damaged or not a checkpoint, or does not match the model or the optimiser.
    /// After any error, model, optimiser, scaler and random state are unchanged.
    #[track_caller]
    pub fn resume(
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &mut (impl Optimizer + ?Sized),
    ) -> Result<Self> {
        Self::resume_with_scaler(path, model, optimizer, None)
    }

    /// Resumes like [`resume`](Self::resume), with a scaler. The scaler is unchanged if the file has no state
    /// for it.
    #[track_caller]
    pub fn resume_with_scaler(
        path: impl AsRef<Path>,
        model: &(impl Module + ?Sized),
        optimizer: &mut (impl Optimizer + ?Sized),
        scaler: Option<&mut GradScaler>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let _no_grad = autograd::no_grad();
        let device = model_device("resume", model)?;
        let (tensors, strings) = safetensors::load_with_metadata(path, &device)?;
        let header = CheckpointHeader::parse(path, strings)?;
        let parts = [MODEL_PREFIX, OPTIMIZER_PREFIX, SCALER_PREFIX];
        let mut states = [const { BTreeMap::new() }; 3];
        for (name, tensor) in tensors {
            let Some((part, name)) = (0..3).find_map(|k| Some((k, name.strip_prefix(parts[k])?))) else {
                fail!(file(path), "holds `{name}`, which is neither the model's nor the optimiser's");
            };
            states[part].insert(name.to_owned(), tensor);
        }
        let [of_model, of_optimizer, of_scaler] = states;
        let at = |e: Error| e.with_context(path.display().to_string());
        // Prepares everything before anything changes. The optimiser's load comes last: it changes all or
        // nothing, and the later steps need no memory.
        let (of_model, _) = nn::stage_state_dict(model, &of_model, true, "").map_err(at)?;
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
        Ok(header.checkpoint)
    }
}

//! Weights by name: what a module has, and what a file gives it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Module, Slot, leaf, walk};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Names that only one side has: of [`load_state_dict_partial`](Module::load_state_dict_partial).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "what was not loaded keeps its initial numbers"]
pub struct IncompatibleKeys {
    /// The module has them, and keeps its numbers.
    pub missing: Vec<String>,
    /// The state has them, and nobody takes them.
    pub unexpected: Vec<String>,
}

impl IncompatibleKeys {
    /// Whether everything was loaded, and nothing was left over.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty()
    }
}

impl fmt::Display for IncompatibleKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [("missing", &self.missing), ("unexpected", &self.unexpected)];
        let parts = parts.iter().filter(|(_, names)| !names.is_empty());
        let parts: Vec<_> = parts.map(|(what, names)| format!("{what}: {}", names.join(", "))).collect();
        f.write_str(&parts.join("; "))
    }
}

/// The same tensors under other names; what has none is left out.
///
/// ```
/// # use std::collections::BTreeMap;
/// # use forebay_core::{device::Device, dtype::DType, nn::rename_keys, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// # let tensor = || Tensor::zeros(&[2], DType::F32, &device);
/// # let file = BTreeMap::from([("module.fc.weight".to_owned(), tensor()?), ("optimizer".to_owned(), tensor()?)]);
/// // Of DataParallel's file, what is the model's.
/// let state = rename_keys(&file, |name| Some(name.strip_prefix("module.")?.to_owned()))?;
/// assert!(state.contains_key("fc.weight") && state.len() == 1);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
///
/// # Errors
/// Two names become one.
pub fn rename_keys(
    state: &BTreeMap<String, Tensor>,
    mut rename: impl FnMut(&str) -> Option<String>,
) -> Result<BTreeMap<String, Tensor>> {
    let mut renamed: BTreeMap<String, (&str, Tensor)> = BTreeMap::new();
    for (name, tensor) in state {
        let Some(new) = rename(name) else { continue };
        if let Some((other, _)) = renamed.get(&new) {
            let what = format!("`{other}` and `{name}` both become `{new}`; give each a name of its own");
            return Err(Error::argument("rename_keys", what));
        }
        renamed.insert(new, (name, tensor.clone()));
    }
    Ok(renamed.into_iter().map(|(name, (_, tensor))| (name, tensor)).collect())
}

/// What a module has under its names: each tensor, and the parameter that it is, which several names may share.
fn slots<M: Module + ?Sized>(module: &M) -> BTreeMap<String, (Tensor, Option<usize>)> {
    let mut slots = BTreeMap::new();
    walk(module, &mut |name, slot| match slot {
        Slot::Parameter(t) => drop(slots.insert(name.to_owned(), (t.detach(), leaf(t)))),
        Slot::Buffer(t) => drop(slots.insert(name.to_owned(), (t.detach(), None))),
        _ => {}
    });
    slots
}

/// Copies what has the same name, if all of it fits; `strict` takes missing and unexpected names for errors.
pub(super) fn load<M: Module + ?Sized>(
    module: &M,
    state: &BTreeMap<String, Tensor>,
    strict: bool,
) -> Result<IncompatibleKeys> {
    let own = slots(module);
    // A shared parameter is there under any of its names: files often keep one.
    let given: BTreeSet<usize> = own
        .iter()
        .filter(|(name, _)| state.contains_key(*name))
        .filter_map(|(_, (_, shared))| *shared)
        .collect();
    let missing = own.iter().filter(|(name, (_, shared))| {
        !state.contains_key(*name) && shared.is_none_or(|shared| !given.contains(&shared))
    });
    let keys = IncompatibleKeys {
        missing: missing.map(|(name, _)| name.clone()).collect(),
        unexpected: state.keys().filter(|name| !own.contains_key(*name)).cloned().collect(),
    };
    let kind = |t: &Tensor| (t.dtype().is_float(), t.dtype().is_int());
    let misfits = own.iter().filter_map(|(name, (t, _))| {
        let given = state.get(name)?;
        (t.shape() != given.shape() || kind(t) != kind(given)).then(|| {
            format!("{name} is {} {:?}, given {} {:?}", t.dtype(), t.shape(), given.dtype(), given.shape())
        })
    });
    let misfits = misfits.collect::<Vec<_>>().join(", ");
    let mut problems = Vec::new();
    if strict && !keys.is_empty() {
        problems.push(keys.to_string());
    }
    if !misfits.is_empty() {
        problems.push(format!("does not fit: {misfits}"));
    }
    if !problems.is_empty() {
        return Err(Error::argument("load_state_dict", problems.join("; ")));
    }
    for (name, (tensor, _)) in &own {
        if let Some(source) = state.get(name) {
            tensor.copy_(&source.detach().to_device(tensor.device())?).map_err(|e| e.at(name))?;
        }
    }
    Ok(keys)
}

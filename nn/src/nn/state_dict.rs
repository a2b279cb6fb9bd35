//! Saving and loading of weights by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::staged_copies::{PreparedCopies, StagedCopies, TensorKey};
use super::{Module, ModuleEntry, visit_model};
use crate::{Result, Tensor, autograd, fail, fail_if};
use forebay_core::printable::printable;

/// Names that only one side has, returned by [`load_state_dict_partial`](Module::load_state_dict_partial).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "tensors that were not loaded keep their values"]
pub struct IncompatibleKeys {
    /// Names that only the module has; these tensors keep their values.
    pub missing: Vec<String>,
    /// Names that only the state has; these tensors are ignored.
    pub unexpected: Vec<String>,
}

impl IncompatibleKeys {
    /// Reports whether both sides have the same names.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty()
    }
}

impl fmt::Display for IncompatibleKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [("missing", &self.missing), ("unexpected", &self.unexpected)];
        let parts = parts.iter().filter(|(_, names)| !names.is_empty());
        let parts: Vec<_> =
            parts.map(|(what, names)| format!("{what}: {}", printable(&names.join(", ")))).collect();
        f.write_str(&parts.join("; "))
    }
}

/// Renames the tensors of a state, and removes those for which `rename` returns `None`.
///
/// ```
/// # use std::collections::BTreeMap;
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::rename_keys;
/// # let device = Device::null(Default::default());
/// # let tensor = || Tensor::zeros(&[2], DType::F32, &device);
/// # let names = ["module.fc.weight", "optimizer"];
/// # let file = BTreeMap::from([(names[0].to_owned(), tensor()?), (names[1].to_owned(), tensor()?)]);
/// // Keeps the model's tensors of a DataParallel file.
/// let state = rename_keys(&file, |name| Some(name.strip_prefix("module.")?.to_owned()))?;
/// assert!(state.contains_key("fc.weight") && state.len() == 1);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
///
/// # Errors
/// Two tensors get the same name.
#[track_caller]
pub fn rename_keys(
    state: &BTreeMap<String, Tensor>,
    mut rename: impl FnMut(&str) -> Option<String>,
) -> Result<BTreeMap<String, Tensor>> {
    let mut renamed: BTreeMap<String, (&str, Tensor)> = BTreeMap::new();
    for (name, tensor) in state {
        let Some(new) = rename(name) else { continue };
        if let Some((other, _)) = renamed.get(&new) {
            let [other, name, new] = [other, name.as_str(), &new].map(printable);
            fail!(
                argument("rename_keys"),
                "`{other}` and `{name}` both become `{new}`; give each a name of its own"
            );
        }
        renamed.insert(new, (name, tensor.clone()));
    }
    Ok(renamed.into_iter().map(|(name, (_, tensor))| (name, tensor)).collect())
}

/// Tensor of a module with all its names; a parameter that modules share has several.
pub(crate) struct NamedTensor {
    pub(crate) tensor: Tensor,
    pub(crate) names: Vec<String>,
    /// True for a parameter, false for a buffer.
    pub(crate) is_parameter: bool,
}

/// Returns the tensors of a module, each once, in the order of a visit.
pub(crate) fn named_tensors<M: Module + ?Sized>(module: &M) -> Vec<NamedTensor> {
    let mut all: Vec<NamedTensor> = Vec::new();
    let mut index_by_key = BTreeMap::new();
    visit_model(module, &mut |name, slot| {
        let (t, is_parameter) = match slot {
            ModuleEntry::Parameter(t) => (t, true),
            ModuleEntry::Buffer(t) => (t, false),
            _ => return,
        };
        // Tensors are tied if they view the same elements, however they came to share them.
        let index = *index_by_key.entry(TensorKey::from_tensor(t)).or_insert(all.len());
        match all.get_mut(index) {
            Some(named) => {
                named.names.push(name.to_owned());
                named.is_parameter |= is_parameter;
            }
            None => all.push(NamedTensor { tensor: t.detach(), names: vec![name.to_owned()], is_parameter }),
        }
    });
    all
}

/// Fails if two tensors of a module have one name, as after a hand-written visit. A state would hold one of them.
pub(crate) fn check_distinct_names<M: Module + ?Sized>(op: &'static str, module: &M) -> Result<()> {
    check_distinct(op, &named_tensors(module))
}

fn check_distinct(op: &'static str, own: &[NamedTensor]) -> Result<()> {
    let mut tensors = BTreeMap::new();
    for (at, name) in own.iter().enumerate().flat_map(|(at, named)| named.names.iter().map(move |n| (at, n)))
    {
        fail_if!(tensors.insert(name, at).is_some_and(|other| other != at);
            argument(op), "two tensors of the model are called `{}`; give each a name of its own", printable(name));
    }
    Ok(())
}

/// Copies the tensors with equal names, unless one does not match. If `strict`, missing and unexpected names
/// are errors.
#[track_caller]
pub(super) fn load_state_dict<M: Module + ?Sized>(
    module: &M,
    state: &BTreeMap<String, Tensor>,
    strict: bool,
) -> Result<IncompatibleKeys> {
    let advice = if strict { STRICT_ADVICE } else { PARTIAL_ADVICE };
    let (copies, keys) = stage_state_dict(module, state, strict, advice)?;
    copies.commit()?;
    Ok(keys)
}

/// End of an error of [`load_state_dict`](Module::load_state_dict).
const STRICT_ADVICE: &str = "; rename or leave out tensors with `rename_keys`, or load the names of both sides with \
                             `load_state_dict_partial`";
/// End of an error of [`load_state_dict_partial`](Module::load_state_dict_partial).
const PARTIAL_ADVICE: &str = "; leave these names out with `rename_keys`";

/// Prepares the changes of [`load_state_dict`]. `advice` ends an error about names, shapes and kinds.
#[track_caller]
pub(crate) fn stage_state_dict<M: Module + ?Sized>(
    module: &M,
    state: &BTreeMap<String, Tensor>,
    strict: bool,
    advice: &str,
) -> Result<(PreparedCopies, IncompatibleKeys)> {
    let own = named_tensors(module);
    check_distinct("load_state_dict", &own)?;
    let names: BTreeSet<&String> = own.iter().flat_map(|named| &named.names).collect();
    // A shared parameter is present under any of its names, because files often keep one. A batch counter may
    // be missing, as in old files; PyTorch accepts these too.
    let is_present =
        |name: &String| state.contains_key(name) || name.rsplit('.').next() == Some("num_batches_tracked");
    let absent = own.iter().filter(|named| !named.names.iter().any(is_present));
    let keys = IncompatibleKeys {
        missing: absent.flat_map(|named| named.names.iter().cloned()).collect(),
        unexpected: state.keys().filter(|name| !names.contains(name)).cloned().collect(),
    };
    let kind = |t: &Tensor| (t.dtype().is_float(), t.dtype().is_int());
    let pairs = own.iter().flat_map(|NamedTensor { tensor, names, .. }| {
        names.iter().filter_map(move |name| Some((name, tensor, state.get(name)?)))
    });
    let mismatches: Vec<_> =
        pairs.filter(|(_, t, new)| t.shape() != new.shape() || kind(t) != kind(new)).collect();
    let all_transposed = !mismatches.is_empty() && mismatches.iter().all(|(_, t, new)| is_transposed(t, new));
    let mismatches = mismatches.iter().map(|(name, t, new)| {
        format!("{name} is {} {:?}, the state has {} {:?}", t.dtype(), t.shape(), new.dtype(), new.shape())
    });
    let mismatches = mismatches.collect::<Vec<_>>().join(", ");
    let mut problems = Vec::new();
    if strict && !keys.is_empty() {
        problems.push(keys.to_string());
    }
    if !mismatches.is_empty() {
        problems.push(format!("does not fit: {mismatches}"));
    }
    let renaming =
        advise_renaming(&own, state).filter(|_| advice == STRICT_ADVICE && !keys.missing.is_empty());
    let advice = match renaming {
        Some(renaming) => renaming,
        None if all_transposed && problems.len() == 1 => {
            "; the state's matrices are transposed: replace each by its `t()`".to_owned()
        }
        None => advice.to_owned(),
    };
    fail_if!(!problems.is_empty(); argument("load_state_dict"), "{}{advice}", problems.join("; "));
    let mut staged = StagedCopies::default();
    for NamedTensor { tensor, names, .. } in &own {
        let mut sources = names.iter().filter_map(|name| Some((name, state.get(name)?)));
        let Some((first, source)) = sources.next() else { continue };
        let cast = staged.add_copy(tensor, source).map_err(|e| e.with_context(first))?;
        for (name, source) in sources {
            // Compares in the model's dtype, because the file may hold one of the tensors in another.
            fail_if!(
                !has_same_bits(&cast, source).map_err(|e| e.with_context(name))?;
                argument("load_state_dict"),
                "`{first}` and `{name}` are one tensor of the model, and the state has two that differ: give it \
                 one of them, or a model that does not share them"
            );
        }
    }
    Ok((staged.prepare()?, keys))
}

/// Advises how to rename a state that has all names of a model with a prefix, as in a checkpoint (`model.`), or without
/// one. Returns `None` if renaming would leave a name of the model without a tensor.
fn advise_renaming(own: &[NamedTensor], state: &BTreeMap<String, Tensor>) -> Option<String> {
    let is_counter = |name: &str| name.rsplit('.').next() == Some("num_batches_tracked");
    let has_all = |rename: &dyn Fn(&str) -> Option<String>| {
        own.iter().all(|named| {
            let is_found = |name: &String| rename(name).is_some_and(|name| state.contains_key(&name));
            named.names.iter().any(|name| is_counter(name) || is_found(name))
        })
    };
    let first = own.iter().find(|named| !named.names.iter().any(|name| is_counter(name)))?;
    let added =
        state.keys().flat_map(|key| first.names.iter().filter_map(|name| key.strip_suffix(name.as_str())));
    let mut added: Vec<&str> = added
        .filter(|prefix| prefix.ends_with('.') && has_all(&|name| Some(format!("{prefix}{name}"))))
        .collect();
    added.dedup();
    if let Some(prefix) = added.first() {
        let prefix = printable(prefix);
        let all = added.iter().map(|prefix| format!("`{}`", printable(prefix)));
        let all = all.collect::<Vec<_>>().join(" and after ");
        return Some(format!(
            "; the state has the names after {all}: load \
             `rename_keys(&state, |name| name.strip_prefix(\"{prefix}\").map(str::to_owned))?`"
        ));
    }
    let prefixes_of = |name: &'_ String| -> Vec<String> {
        name.match_indices('.').map(|(at, _)| name[..=at].to_owned()).collect()
    };
    let mut missing = first.names.iter().flat_map(prefixes_of);
    missing.find(|prefix| has_all(&|name| Some(name.strip_prefix(prefix.as_str())?.to_owned()))).map(
        |prefix| {
            format!(
                "; the state has the names without `{prefix}`: load \
             `rename_keys(&state, |name| Some(format!(\"{prefix}{{name}}\")))?`"
            )
        },
    )
}

/// Reports whether a matrix of the state has the shape of the model's matrix with both extents exchanged.
fn is_transposed(own: &Tensor, new: &Tensor) -> bool {
    matches!((own.shape(), new.shape()), (&[rows, columns], &[a, b]) if rows != columns && [b, a] == [rows, columns])
}

/// Reports whether a tensor, cast to the dtype of another, has equal bits. May wait for the device.
fn has_same_bits(cast: &Tensor, source: &Tensor) -> Result<bool> {
    let _no_grad = autograd::no_grad();
    let source = source.detach().to_device(cast.device())?.to_dtype(cast.dtype())?;
    Ok(TensorKey::from_tensor(cast) == TensorKey::from_tensor(&source)
        || cast.to_bytes()? == source.to_bytes()?)
}

//! Path of a module in its model, known after a visit of the model.

use std::fmt;
use std::sync::RwLock;

use super::{Module, ModuleEntry, ModuleSummary};
use crate::{Error, Result, Tag};
use forebay_core::memory::scope::{self, CallSite, ModulePath, ScopeGuard};
use forebay_core::sync::RwLockUnpoisoned;

/// Path of a module, such as `encoder.fc1`, as a field of the module.
///
/// Visits of a model, such as `parameters` and `state_dict`, record the path. A module enters its scope while
/// it computes, so that memory reports and errors name the module. Before a visit the module has no name. Any
/// struct that derives [`Module`] may have such a field.
#[derive(Default)]
pub struct ModuleScope(RwLock<RecordedPath>);

#[derive(Clone, Copy, Debug, Default)]
struct RecordedPath {
    path: ModulePath,
    depth: usize,
}

impl ModuleScope {
    /// Creates a scope without a name.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the module's path, or the root before a visit.
    #[must_use]
    pub fn path(&self) -> ModulePath {
        self.0.read_unpoisoned().path
    }

    /// Attributes memory to this module during the guard's life. Allocations without a tag are activations.
    #[track_caller]
    pub fn enter(&self) -> ScopeGuard {
        enter_module_path(self.path(), scope::call_site())
    }

    /// Runs `body` in this scope, and prefixes its error with the module's path.
    #[track_caller]
    pub fn run<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let _guard = self.enter();
        body().map_err(|error| match error {
            // An inner module or the out-of-memory report already names the module.
            Error::Context { .. } | Error::OutOfMemory(_) => error,
            error if self.path().is_root() => error,
            error => error.with_context(self.path().to_string()),
        })
    }

    /// Records the path, unless a visit of a larger model has recorded a longer one.
    pub(super) fn set_path(&self, path: &str) {
        let depth = if path.is_empty() { 0 } else { path.split('.').count() };
        let mut recorded = self.0.write_unpoisoned();
        if depth > 0 && depth >= recorded.depth {
            *recorded =
                RecordedPath { path: path.split('.').fold(ModulePath::ROOT, ModulePath::child), depth };
        }
    }
}

impl fmt::Debug for ModuleScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.path().to_string())
    }
}

/// Enters a module until the guard is dropped, like [`ModuleScope::enter`] but without such a field. The path
/// derives from the paths recorded in the module's children. `#[forward]` on a method inserts this call
/// before its body.
///
/// ```
/// # use forebay_core::{device::Device, error::Result, tensor::Tensor};
/// # use forebay_nn::nn::{self, Linear, Module};
/// #[derive(Module)]
/// # #[module(crate = forebay_nn)]
/// struct Mlp {
///     up: Linear,
///     down: Linear,
/// }
///
/// impl Mlp {
/// # /*
///     #[nn::forward]
/// # */
/// #   #[nn::forward(crate = forebay_nn)]
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         let x = self.up.forward(x)?;
///         self.down.forward(&x.mul(&x.sigmoid()?)?) // the products are the Mlp's
///     }
/// }
/// ```
pub fn enter_module<M: Module + ?Sized>(module: &M) -> ScopeGuard {
    // The module is the program's: errors and reports name its own lines.
    enter_module_path(module.module_path(), None)
}

fn enter_module_path(path: ModulePath, site: CallSite) -> ScopeGuard {
    let now = scope::current();
    scope::enter_scope(scope::Scope {
        module: if path.is_root() { now.module } else { path },
        tag: if now.tag == Tag::Other { Tag::Activation } else { now.tag },
        site,
        ..now
    })
}

impl Module for ModuleScope {
    /// Reports the path of the module that contains the field, not of the field.
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        f(path.rsplit_once('.').map_or("", |(module, _)| module), ModuleEntry::Scope(self));
    }

    fn describe(&self, _name: &str, _parent: &mut ModuleSummary) {}

    fn module_path(&self) -> ModulePath {
        self.path()
    }

    fn parent_path(&self, _: &str) -> ModulePath {
        self.path()
    }
}

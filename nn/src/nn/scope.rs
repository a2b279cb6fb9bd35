//! Where a module stands in its model: known once the model has been walked.

use std::fmt;
use std::sync::{PoisonError, RwLock};

use super::{Module, ModuleEntry};
use forebay_core::error::{Error, Result};
use forebay_core::memory::Tag;
use forebay_core::memory::scope::{self, ModulePath, ScopeGuard};

/// A module's own path, `encoder.fc1`, as a field of the module.
///
/// `parameters`, `state_dict` and the other walks of a model tell it. A module enters it while it computes, so that
/// memory reports and errors name the module; until a walk it has no name. Any struct that derives
/// [`Module`] may have such a field.
#[derive(Default)]
pub struct ModuleScope(RwLock<ModulePlace>);

#[derive(Clone, Copy, Debug, Default)]
struct ModulePlace {
    path: ModulePath,
    depth: usize,
}

impl ModuleScope {
    /// A scope without a name yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The module's path; the root until a walk.
    #[must_use]
    pub fn path(&self) -> ModulePath {
        self.0.read().unwrap_or_else(PoisonError::into_inner).path
    }

    /// Memory allocated until the guard is dropped is this module's; what has no tag yet is an activation.
    #[track_caller]
    pub fn enter(&self) -> ScopeGuard {
        enter_module_path(self.path())
    }

    /// Runs `body` in this scope, and puts the module's path in front of its error.
    ///
    /// # Errors
    /// What `body` returns.
    #[track_caller]
    pub fn run<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let _guard = self.enter();
        body().map_err(|error| match error {
            // Named by a module further in, or by its own report.
            Error::Context { .. } | Error::OutOfMemory(_) => error,
            error if self.path().is_root() => error,
            error => error.with_context(self.path().to_string()),
        })
    }

    /// Learns the path, unless a walk of a larger model has told a longer one.
    pub(super) fn set_path(&self, path: &str) {
        let depth = if path.is_empty() { 0 } else { path.split('.').count() };
        let mut place = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if depth > 0 && depth >= place.depth {
            *place = ModulePlace { path: path.split('.').fold(ModulePath::ROOT, ModulePath::child), depth };
        }
    }
}

impl fmt::Debug for ModuleScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.path().to_string())
    }
}

/// Enters a module until the guard is dropped, as [`ModuleScope::enter`] does, without a field of it: its path is what walks have told its
/// children. `#[forward]` on a method puts this in front of its body.
///
/// ```
/// # use forebay_core::{device::Device, error::Result, tensor::Tensor};
/// # use forebay_nn::nn::{self, Linear, Module};
/// #[derive(Module)]
/// # #[module(crate = forebay_core)]
/// struct Mlp {
///     up: Linear,
///     down: Linear,
/// }
///
/// impl Mlp {
/// # /*
///     #[nn::forward]
/// # */
/// #   #[nn::forward(crate = forebay_core)]
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         let x = self.up.forward(x)?;
///         self.down.forward(&x.mul(&x.sigmoid()?)?) // the products are the Mlp's
///     }
/// }
/// ```
#[track_caller]
pub fn enter_module<M: Module + ?Sized>(module: &M) -> ScopeGuard {
    enter_module_path(module.module_path())
}

#[track_caller]
fn enter_module_path(path: ModulePath) -> ScopeGuard {
    let now = scope::current();
    scope::enter_scope(scope::Scope {
        module: if path.is_root() { now.module } else { path },
        tag: if now.tag == Tag::Other { Tag::Activation } else { now.tag },
        ..now.or_caller_site()
    })
}

impl Module for ModuleScope {
    /// Names the module that the field is in, not the field.
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        f(path.rsplit_once('.').map_or("", |(module, _)| module), ModuleEntry::Scope(self));
    }

    fn module_path(&self) -> ModulePath {
        self.path()
    }

    fn parent_path(&self, _: &str) -> ModulePath {
        self.path()
    }
}

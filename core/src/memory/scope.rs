//! Scopes of this thread, which say what the memory allocated next is for: a tag, a module's path and an
//! operation.
//!
//! A scope is a guard: it sets one field, and restores the previous value when dropped. Entering a scope
//! costs a thread-local read and a write, and for a module one lookup of its name. An allocation copies 32
//! bytes from it.
//!
//! ```
//! use forebay_core::memory::{Tag, scope};
//! let _module = scope::enter_module("encoder");
//! {
//!     let _tag = scope::enter_tag(Tag::Parameter);
//!     let _layer = scope::enter_module("fc1");
//!     assert_eq!(scope::current().tag, Tag::Parameter);
//!     assert_eq!(scope::current().module.to_string(), "encoder.fc1");
//! }
//! assert_eq!(scope::current().tag, Tag::Other);
//! ```

use std::cell::Cell;
use std::fmt;
use std::panic::Location;
use std::sync::{LazyLock, PoisonError, RwLock};

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::profiler_ranges::{self, ProfilerRange};
use crate::scoped_local::{GetCurrent, ScopedGuard, ScopedLocal};

/// Purpose of a block of memory, set when the block is allocated and never guessed later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Tag {
    /// A module's parameter or buffer.
    Parameter,
    /// A parameter's gradient.
    Gradient,
    /// State that an optimiser keeps for a parameter.
    OptimizerState,
    /// A value computed in the forward pass, or a gradient that flows through the backward pass.
    Activation,
    /// A batch of data.
    Input,
    /// Scratch memory of one operation.
    Workspace,
    /// Anything else.
    #[default]
    Other,
    /// Memory of the program that tensors use
    /// ([`Tensor::from_external`](crate::tensor::Tensor::from_external)). The pool neither allocates nor limits it.
    External,
}

impl Tag {
    /// Number of tags.
    pub const COUNT: usize = 8;
    /// All tags, in the order of reports.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Parameter,
        Self::Gradient,
        Self::OptimizerState,
        Self::Activation,
        Self::Input,
        Self::Workspace,
        Self::Other,
        Self::External,
    ];

    /// Returns the name in statistics: `optimizer_state`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::Gradient => "gradient",
            Self::OptimizerState => "optimizer_state",
            Self::Activation => "activation",
            Self::Input => "input",
            Self::Workspace => "workspace",
            Self::Other => "other",
            Self::External => "external",
        }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The path of a module, such as `encoder.fc1`, as the index of an interned name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModulePath(u32);

impl ModulePath {
    /// No module.
    pub const ROOT: Self = Self(0);

    /// Returns the path's index, which is valid only in this run of the program.
    pub(super) fn id(self) -> u32 {
        self.0
    }

    /// Returns the path of a child of this module.
    #[must_use]
    pub fn child(self, name: &str) -> Self {
        let find = |paths: &ModulePathTable| paths.children.get(&self.0).and_then(|c| c.get(name)).copied();
        if let Some(known) = find(&MODULE_PATHS.read().unwrap_or_else(PoisonError::into_inner)) {
            return Self(known);
        }
        let mut paths = MODULE_PATHS.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = find(&paths) {
            return Self(known);
        }
        let id = paths.names.len() as u32;
        let full = match paths.names.get(self.0 as usize) {
            Some(parent) if !parent.is_empty() => format!("{parent}.{name}"),
            _ => name.to_owned(),
        };
        paths.names.push(full);
        paths.parents.push(self.0);
        paths.children.entry(self.0).or_default().insert(name.to_owned(), id);
        Self(id)
    }

    /// Returns the path of the parent that has this module as its child `name`: `encoder` for `encoder.fc1`
    /// and `fc1`. Returns the root if the module has another name.
    #[must_use]
    pub fn strip_child(self, name: &str) -> Self {
        let paths = MODULE_PATHS.read().unwrap_or_else(PoisonError::into_inner);
        let mut at = self.0 as usize;
        for part in name.rsplit('.').filter(|part| !part.is_empty()) {
            let full = paths.names.get(at).map_or("", String::as_str);
            if full.rsplit('.').next() != Some(part) {
                return Self::ROOT;
            }
            at = paths.parents.get(at).map_or(0, |&parent| parent as usize);
        }
        Self(at as u32)
    }

    /// Reports whether this is not a module.
    #[must_use]
    pub fn is_root(self) -> bool {
        self == Self::ROOT
    }
}

impl fmt::Display for ModulePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths = MODULE_PATHS.read().unwrap_or_else(PoisonError::into_inner);
        f.pad(paths.names.get(self.0 as usize).map_or("", String::as_str))
    }
}

/// Every path that was ever entered; a program has as many as it has modules.
struct ModulePathTable {
    names: Vec<String>,
    parents: Vec<u32>,
    children: FxHashMap<u32, FxHashMap<String, u32>>,
}

static MODULE_PATHS: LazyLock<RwLock<ModulePathTable>> = LazyLock::new(|| {
    RwLock::new(ModulePathTable {
        names: vec![String::new()],
        parents: vec![0],
        children: FxHashMap::default(),
    })
});

/// A line of the program, where one is known.
pub type CallSite = Option<&'static Location<'static>>;

/// Values of this thread's scopes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Purpose of the memory.
    pub tag: Tag,
    /// The module that runs.
    pub module: ModulePath,
    /// The operation that runs; empty outside of any.
    pub op: &'static str,
    /// The line that called the outermost operation or module; outside of any, the line of the request.
    pub site: CallSite,
}

impl Scope {
    /// The scope outside of any guard.
    pub const NONE: Self = Self { tag: Tag::Other, module: ModulePath::ROOT, op: "", site: None };

    /// Sets the call site to the caller's line if none is known.
    #[must_use]
    #[track_caller]
    #[inline]
    pub fn or_caller_site(mut self) -> Self {
        self.site = self.site.or(Some(Location::caller()));
        self
    }
}

/// The operation, and the line that called the outermost one.
type OpSite = (&'static str, CallSite);

thread_local! {
    static CURRENT_TAG: ScopedLocal<Cell<Tag>> = const { ScopedLocal::new(Cell::new(Scope::NONE.tag)) };
    static CURRENT_MODULE: ScopedLocal<Cell<ModulePath>> = const { ScopedLocal::new(Cell::new(Scope::NONE.module)) };
    static CURRENT_OP: ScopedLocal<Cell<OpSite>> = const { ScopedLocal::new(Cell::new((Scope::NONE.op, Scope::NONE.site))) };
}

/// Returns the current values of this thread's scopes.
#[must_use]
#[inline]
pub fn current() -> Scope {
    let (op, site) = CURRENT_OP.current();
    Scope { tag: CURRENT_TAG.current(), module: CURRENT_MODULE.current(), op, site }
}

/// Returns the line that called the outermost operation or module; outside of any, the line of the caller. A module of
/// the program (`nn::enter_module`) begins anew.
#[must_use]
#[track_caller]
#[inline]
pub fn call_site() -> CallSite {
    CURRENT_OP.current().1.or(Some(Location::caller()))
}

/// Returns the running operation, which errors of a function that it calls should name, or the function's own `name`
/// outside of an operation.
#[must_use]
#[inline]
pub fn current_op_or(name: &'static str) -> &'static str {
    match CURRENT_OP.current().0 {
        "" => name,
        op => op,
    }
}

/// Guard of a scope, which ends when the guard is dropped. Each field has the value of the innermost live
/// scope that sets it. Guards may be dropped in any order.
#[derive(Debug)]
#[must_use = "a scope ends when its guard is dropped"]
pub struct ScopeGuard {
    _tag: Option<ScopedGuard<Cell<Tag>>>,
    _module: Option<ScopedGuard<Cell<ModulePath>>>,
    _op: Option<ScopedGuard<Cell<OpSite>>>,
    profiler_range: ProfilerRange,
}

impl Drop for ScopeGuard {
    #[inline]
    fn drop(&mut self) {
        self.profiler_range.end();
    }
}

impl ScopeGuard {
    #[inline]
    fn new(tag: Option<Tag>, module: Option<ModulePath>, op: Option<OpSite>) -> Self {
        // Each operation enters scopes, so values are compared only for a listener.
        let before = profiler_ranges::is_enabled().then(current);
        let mut guard = Self {
            _tag: tag.map(|tag| ScopedGuard::new(&CURRENT_TAG, tag)),
            _module: module.map(|module| ScopedGuard::new(&CURRENT_MODULE, module)),
            _op: op.map(|op| ScopedGuard::new(&CURRENT_OP, op)),
            profiler_range: ProfilerRange::NONE,
        };
        if let Some(before) = before {
            guard.profiler_range = ProfilerRange::enter(&before, &current());
        }
        guard
    }
}

/// Sets the tag of allocations until the guard is dropped.
pub fn enter_tag(tag: Tag) -> ScopeGuard {
    ScopeGuard::new(Some(tag), None, None)
}

/// Enters a child of the current module.
pub fn enter_module(name: &str) -> ScopeGuard {
    ScopeGuard::new(None, Some(CURRENT_MODULE.current().child(name)), None)
}

/// Sets the current operation. The caller's line is recorded unless an operation or module is already
/// running.
#[track_caller]
pub fn enter_op(name: &'static str) -> ScopeGuard {
    ScopeGuard::new(None, None, Some((name, call_site())))
}

/// Records the caller's line for the operations and errors of a function that is no operation itself, unless an
/// operation or module is already running.
#[track_caller]
pub fn enter_call() -> ScopeGuard {
    ScopeGuard::new(None, None, Some((CURRENT_OP.current().0, call_site())))
}

/// Enters a scope that was captured earlier, such as that of a recorded operation, for its gradient.
pub fn enter_scope(scope: Scope) -> ScopeGuard {
    ScopeGuard::new(Some(scope.tag), Some(scope.module), Some((scope.op, scope.site)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_nest_and_restore() {
        assert_eq!(current(), Scope::NONE);
        let outer = enter_module("net");
        {
            let _tag = enter_tag(Tag::Gradient);
            let _inner = enter_module("fc1");
            let _op = enter_op("matmul");
            let now = current();
            assert_eq!(
                (now.tag, now.op, now.module.to_string().as_str()),
                (Tag::Gradient, "matmul", "net.fc1")
            );
        }
        assert_eq!(current().module.to_string(), "net");
        assert_eq!(current().tag, Tag::Other);
        drop(outer);
        assert!(current().module.is_root());
    }

    #[test]
    fn scopes_dropped_out_of_order_keep_the_values_of_the_others() {
        let parameter = enter_tag(Tag::Parameter);
        let net = enter_module("ordered");
        let gradient = enter_tag(Tag::Gradient);
        let op = enter_op("matmul");
        drop(parameter);
        drop(net);
        let now = current();
        assert_eq!((now.tag, now.module, now.op), (Tag::Gradient, ModulePath::ROOT, "matmul"));
        drop(gradient);
        assert_eq!((current().tag, current().op), (Tag::Other, "matmul"));
        drop(op);
        assert_eq!(current(), Scope::NONE);
    }

    #[test]
    fn a_path_is_interned_once_and_threads_do_not_share_scopes() {
        let _here = enter_module("shared");
        let path = current().module;
        let there = std::thread::spawn(|| {
            assert!(current().module.is_root());
            let _same = enter_module("shared");
            current().module
        });
        assert_eq!(there.join().ok(), Some(path));
    }

    #[test]
    fn a_path_knows_its_parent_by_the_childs_name() {
        let path = |text: &str| text.split('.').fold(ModulePath::ROOT, ModulePath::child);
        for (full, name, parent) in [
            ("a.b.c", "c", "a.b"),
            ("a.b.c", "b.c", "a"),
            ("a.b.c", "", "a.b.c"),
            ("a", "a", ""),
            ("a.b", "x", ""),
            ("a.bc", "c", ""),
        ] {
            assert_eq!(path(full).strip_child(name).to_string(), parent, "{full} without {name}");
        }
    }
}

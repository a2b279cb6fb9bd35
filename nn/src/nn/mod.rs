//! Modules: layers, and structs of layers, whose parameters have names.
//!
//! A module is a value whose tensors and settings [`Module::visit`] lists; `#[derive(Module)]` implements it.
//! A visit yields the parameters for an optimiser, the names for saving, the training mode and the module's path.
//! Memory reports and errors name this path. Each module computes with a method of its own.
//! Layers of this crate have `forward`, and [`Forward`] is its trait for a [`Sequential`].
//!
//! Weights have PyTorch's layouts, names and initial values, so that weight files are compatible.
//!
//! A new layer is a struct that derives [`Module`], in the file of its kind. Layers that only call a tensor method are
//! lines of a macro (`activation`, `dropout`, `loss`).
//!
//! A layer fails for tensors and options other than its documentation states: another shape or dtype, a size of 0,
//! a value out of range. `# Errors` sections list further errors, except those of linked methods.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Result, Tensor, autograd, fail_if};

/// Implements [`Forward`] for layers by their method of this name.
macro_rules! impl_forward {
    ($($layer:ident)+) => {$(
        impl $crate::nn::Forward for $layer {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                Self::forward(self, x)
            }
        }
    )+};
}

/// Defines layers that call a tensor method with the value that they hold.
macro_rules! method_layers {
    ($($layer:ident($argument:ty) $method:ident $doc:literal |$options:ident| $repr:expr;)*) => {$(
        #[doc = concat!($doc, ": [`", stringify!($method), "`](Tensor::", stringify!($method), ").")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Module)]
        #[module(extra_repr)]
        pub struct $layer(#[module(skip)] pub $argument);

        impl $layer {
            fn extra_repr(&self) -> String {
                let $options = &self.0;
                $repr
            }

            /// Applies the tensor method to `x`, with its errors.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$method(self.0)
            }
        }

        impl_forward!($layer);
    )*};
}

/// Implements [`Module`] for layers that wrap one module, whose entries are the layer's.
macro_rules! delegate_module {
    ($($layer:ident)+) => {$(
        impl $crate::nn::Module for $layer {
            fn visit(&self, path: &str, f: &mut dyn FnMut(&str, $crate::nn::ModuleEntry<'_>)) {
                self.0.visit(path, f);
            }

            fn describe(&self, name: &str, parent: &mut $crate::nn::ModuleSummary) {
                let mut own = $crate::nn::ModuleSummary::new(stringify!($layer));
                self.0.describe("", &mut own);
                parent.add_child(name, own);
            }
        }
        impl_debug!($layer);
    )+};
}

/// Implements `Debug` of layers as the layer's part of a [`ModuleSummary`].
macro_rules! impl_debug {
    ($layer:ident) => {
        impl_debug!([] $layer);
    };
    ([$($generics:tt)*] $layer:ty) => {
        impl<$($generics)*> std::fmt::Debug for $layer {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(&$crate::nn::Module::summary(self), f)
            }
        }
    };
}

mod activation;
mod adaptive_softmax;
mod attention;
mod bert;
mod containers;
mod conv;
mod dropout;
mod embedding;
mod gpt;
mod gpt_file;
pub mod init;
mod linear;
mod loss;
mod multihead;
mod norm;
mod parametrizations;
mod pool;
mod positional_embedding;
mod recurrent;
mod scope;
pub(crate) mod segment;
mod shape;
mod staged_copies;
mod state_dict;
mod summary;
mod training_mode;
mod transformer;
mod upsample;

pub use activation::*;
pub use adaptive_softmax::*;
pub use attention::*;
pub use bert::*;
pub use containers::*;
pub use conv::*;
pub use dropout::*;
pub use embedding::*;
#[doc(hidden)]
pub use forebay_core::memory::scope::ModulePath;
pub use forebay_derive::{Module, forward};
pub use gpt::*;
pub use linear::*;
pub use loss::*;
pub use multihead::*;
pub use norm::*;
pub use parametrizations::*;
pub use pool::*;
pub use positional_embedding::*;
pub use recurrent::*;
pub use scope::*;
pub use shape::*;
pub(crate) use staged_copies::*;
pub use state_dict::*;
pub use summary::ModuleSummary;
pub use training_mode::*;
pub use transformer::*;
pub use upsample::*;

/// Entry that [`Module::visit`] yields.
#[derive(Debug)]
#[non_exhaustive]
pub enum ModuleEntry<'a> {
    /// Trained tensor.
    Parameter(&'a Tensor),
    /// Tensor that is saved but not trained.
    Buffer(&'a Tensor),
    /// Training mode of a module.
    Training(&'a AtomicBool),
    /// Storage of the module's own path.
    Scope(&'a ModuleScope),
}

/// Returns the full name of a child: `encoder` and `fc1` make `encoder.fc1`. A child without a name has its
/// parent's name.
#[must_use]
pub fn join_path(path: &str, name: &str) -> String {
    match (path, name) {
        ("", name) | (name, "") => name.to_owned(),
        (path, name) => format!("{path}.{name}"),
    }
}

/// Trait of layers and structures of layers, usually derived:
///
/// ```
/// # use forebay_core::{device::Device, error::Result, tensor::Tensor};
/// # use forebay_nn::nn::{Linear, Module};
/// #[derive(Module)]
/// # #[module(crate = forebay_nn)]
/// struct Net {
///     fc1: Linear,
///     fc2: Linear,
/// }
///
/// impl Net {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         self.fc2.forward(&self.fc1.forward(x)?.relu()?)
///     }
/// }
/// # let device = Device::null(Default::default());
/// let net = Net { fc1: Linear::new(784, 64, &device)?, fc2: Linear::new(64, 10, &device)? };
/// assert_eq!(net.num_parameters(), 784 * 64 + 64 + 64 * 10 + 10);
/// assert!(net.state_dict().contains_key("fc2.bias"));
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module",
    label = "not a module",
    note = "a field that is not part of the module, such as its configuration, takes the attribute `#[module(skip)]`",
    note = "a layer or a part of the model takes `#[derive(Module)]`"
)]
pub trait Module {
    /// Calls `f` with every entry of this module, at `path`, and of its children, under full names.
    ///
    /// The order is the order of declaration, and is stable across visits.
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>));

    /// Returns the path that earlier visits of the model recorded in the module or its children, or the root
    /// without a visit. [`enter_module`] uses the path.
    #[must_use]
    fn module_path(&self) -> ModulePath {
        let mut path = ModulePath::ROOT;
        self.for_each_child(&mut |name, child| {
            if path.is_root() {
                path = child.parent_path(name);
            }
        });
        path
    }

    /// Calls `each` with the children and their names, in the order of a visit. A module that visits its parts itself
    /// has none.
    #[doc(hidden)]
    fn for_each_child(&self, _each: &mut dyn FnMut(&str, &dyn Module)) {}

    /// Adds the module, a child of this name, to the description of its parent.
    #[doc(hidden)]
    fn describe(&self, name: &str, parent: &mut ModuleSummary) {
        parent.add_child(name, ModuleSummary::from_visit(self));
    }

    /// Returns the path of the parent, in which this module has this name.
    #[doc(hidden)]
    fn parent_path(&self, name: &str) -> ModulePath {
        self.module_path().strip_child(name)
    }

    /// Returns the tensors to train, each once, even if several modules share the tensor.
    fn parameters(&self) -> Vec<Tensor> {
        self.named_parameters().into_iter().map(|(_, t)| t).collect()
    }

    /// Returns [`parameters`](Self::parameters) with their names; a shared parameter has its first name.
    fn named_parameters(&self) -> Vec<(String, Tensor)> {
        let mut seen = BTreeSet::new();
        let mut named = Vec::new();
        visit_model(self, &mut |name, slot| {
            if let ModuleEntry::Parameter(t) = slot
                && autograd::leaf_id(t).is_none_or(|leaf| seen.insert(leaf))
            {
                named.push((name.to_owned(), t.clone()));
            }
        });
        named
    }

    /// Returns every parameter and buffer by name, in the module's memory, so save or copy them.
    fn state_dict(&self) -> BTreeMap<String, Tensor> {
        let mut state = BTreeMap::new();
        visit_model(self, &mut |name, slot| {
            if let ModuleEntry::Parameter(t) | ModuleEntry::Buffer(t) = slot {
                state.insert(name.to_owned(), t.detach());
            }
        });
        state
    }

    /// Copies tensors into the parameters and buffers with the same names.
    ///
    /// Changes nothing unless all tensors match and memory suffices for all conversions. Floats convert to
    /// floats, integers to integers. A parameter shared by several modules (tied weights) needs one of its
    /// names; values under several names must agree. The batch counter of a batch norm may be missing, as in
    /// old files. [`rename_keys`] adapts files with other names.
    ///
    /// # Errors
    /// A single error lists the names that are missing, unexpected, or of another shape or kind.
    #[track_caller]
    fn load_state_dict(&self, state: &BTreeMap<String, Tensor>) -> Result<()> {
        state_dict::load_state_dict(self, state, true).map(drop)
    }

    /// Loads like [`load_state_dict`](Self::load_state_dict), but ignores and returns names missing on either
    /// side: PyTorch's `strict=False`, for example for a body with a different head.
    ///
    /// ```
    /// # use forebay_core::device::Device;
    /// # use forebay_nn::nn::{Linear, Module, Sequential};
    /// # let device = Device::null(Default::default());
    /// let old = Sequential::new().add(Linear::new(8, 4, &device)?).add(Linear::new(4, 10, &device)?);
    /// let new = Sequential::new().add(Linear::new(8, 4, &device)?);
    /// let keys = new.load_state_dict_partial(&old.state_dict())?;
    /// assert_eq!(keys.unexpected, ["1.bias", "1.weight"]);
    /// assert!(keys.missing.is_empty());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// A name on both sides has different shapes or kinds. The error lists all such names, and nothing is
    /// changed.
    #[track_caller]
    fn load_state_dict_partial(&self, state: &BTreeMap<String, Tensor>) -> Result<IncompatibleKeys> {
        state_dict::load_state_dict(self, state, false)
    }

    /// Switches to training mode, or with `false` to evaluation mode. Modules start in training mode.
    /// [`eval_mode`] switches temporarily and restores the mode of each module.
    fn train(&self, on: bool) {
        visit_model(self, &mut |_, slot| {
            if let ModuleEntry::Training(switch) = slot {
                switch.store(on, Ordering::Relaxed);
            }
        });
    }

    /// Switches to evaluation mode.
    fn eval(&self) {
        self.train(false);
    }

    /// Frees the gradients of all parameters.
    fn zero_grad(&self) {
        visit_model(self, &mut |_, slot| {
            if let ModuleEntry::Parameter(t) = slot {
                t.set_grad(None);
            }
        });
    }

    /// Freezes all parameters, or unfreezes them, like PyTorch's method of this name. Parameters that other
    /// modules share change too. See [`Tensor::requires_grad_`].
    ///
    /// ```
    /// # use forebay_core::device::Device;
    /// # use forebay_nn::nn::{Linear, Module};
    /// # let device = Device::null(Default::default());
    /// let (body, head) = (Linear::new(8, 4, &device)?, Linear::new(4, 2, &device)?);
    /// body.requires_grad_(false);
    /// let x = forebay_core::tensor::Tensor::zeros(&[3, 8], forebay_core::dtype::DType::F32, &device)?;
    /// head.forward(&body.forward(&x)?)?.sum_all()?.backward()?;
    /// assert!(body.weight.grad().is_none() && head.weight.grad().is_some());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    fn requires_grad_(&self, on: bool) {
        // Cannot fail, because parameters are leaves.
        self.parameters().iter().for_each(|t| drop(t.requires_grad_(on)));
    }

    /// Counts the elements of all parameters, frozen ones included, each once: PyTorch's
    /// `sum(p.numel() for p in model.parameters())`.
    fn num_parameters(&self) -> usize {
        self.parameters().iter().map(Tensor::numel).sum()
    }

    /// Describes the model as a tree of its modules: PyTorch's `print(model)`, with the parameters counted.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor};
    /// # use forebay_nn::nn::{Dropout, Linear, Module, Sequential};
    /// # let device = Device::null(Default::default());
    /// let net = Sequential::new()
    ///     .add(Linear::new(784, 64, &device)?)
    ///     .add_fn(Tensor::relu)
    ///     .add(Dropout::new(0.1))
    ///     .add(Linear::without_bias(64, 10, &device)?);
    /// assert_eq!(net.summary().to_string(), "\
    /// Sequential(                                                 50,880
    ///   (0): Linear(in_features=784, out_features=64, bias=True)  50,240
    ///   (1): relu()
    ///   (2): Dropout(p=0.1)
    ///   (3): Linear(in_features=64, out_features=10, bias=False)     640
    /// )
    /// 50,880 parameters, 50,880 of them trained");
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[must_use]
    fn summary(&self) -> ModuleSummary {
        let mut root = ModuleSummary::new(summary::short_type_name::<Self>());
        self.describe("model", &mut root);
        root.into_root()
    }

    /// Counts the elements of the parameters that require a gradient.
    ///
    /// ```
    /// # use forebay_core::device::Device;
    /// # use forebay_nn::nn::{Linear, Module};
    /// # let device = Device::null(Default::default());
    /// let net = (Linear::new(8, 4, &device)?, Linear::new(4, 2, &device)?);
    /// net.0.requires_grad_(false);
    /// assert_eq!((net.num_parameters(), net.num_trainable_parameters()), (46, 10));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    fn num_trainable_parameters(&self) -> usize {
        self.parameters().iter().filter(|p| p.requires_grad()).map(Tensor::numel).sum()
    }
}

/// Visits a whole model and records the path of each module.
fn visit_model<M: Module + ?Sized>(module: &M, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
    module.visit("", &mut |name, slot| {
        if let ModuleEntry::Scope(scope) = slot {
            scope.set_path(name);
        }
        f(name, slot);
    });
}

impl Module for Tensor {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        // Frozen parameters are leaves too.
        if autograd::leaf_id(self).is_some() {
            f(path, ModuleEntry::Parameter(self));
        } else {
            f(path, ModuleEntry::Buffer(self));
        }
    }

    fn describe(&self, _name: &str, parent: &mut ModuleSummary) {
        parent.add_parameter(self);
    }
}

impl Module for AtomicBool {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        f(path, ModuleEntry::Training(self));
    }

    fn describe(&self, _name: &str, _parent: &mut ModuleSummary) {}
}

impl<M: Module> Module for Option<M> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        if let Some(module) = self {
            module.visit(path, f);
        }
    }

    fn for_each_child(&self, each: &mut dyn FnMut(&str, &dyn Module)) {
        if let Some(module) = self {
            module.for_each_child(each);
        }
    }

    fn describe(&self, name: &str, parent: &mut ModuleSummary) {
        if let Some(module) = self {
            module.describe(name, parent);
        }
    }

    fn module_path(&self) -> ModulePath {
        self.as_ref().map_or(ModulePath::ROOT, Module::module_path)
    }

    fn parent_path(&self, name: &str) -> ModulePath {
        self.as_ref().map_or(ModulePath::ROOT, |module| module.parent_path(name))
    }
}

/// Implements [`Module`] for types that stand for another module.
macro_rules! impl_module_by_target {
    ($([$($generics:tt)*] $t:ty => |$this:ident| $target:expr;)*) => {$(
        impl<$($generics)*> Module for $t {
            fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
                let $this = self;
                $target.visit(path, f);
            }

            fn for_each_child(&self, each: &mut dyn FnMut(&str, &dyn Module)) {
                let $this = self;
                $target.for_each_child(each);
            }

            fn describe(&self, name: &str, parent: &mut ModuleSummary) {
                let $this = self;
                $target.describe(name, parent);
            }

            fn module_path(&self) -> ModulePath {
                let $this = self;
                $target.module_path()
            }

            fn parent_path(&self, name: &str) -> ModulePath {
                let $this = self;
                $target.parent_path(name)
            }
        }
    )*};
}
impl_module_by_target! {
    [M: Module + ?Sized] Box<M> => |this| (**this);
    [M: Module + ?Sized] Arc<M> => |this| (**this);
    [M: Module] Vec<M> => |this| this[..];
    [M: Module, const N: usize] [M; N] => |this| this[..];
}

/// Implements the methods of collections by their children.
macro_rules! impl_by_children {
    ($kind:expr) => {
        fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
            self.for_each_child(&mut |name, child| child.visit(&join_path(path, name), f));
        }

        fn describe(&self, name: &str, parent: &mut ModuleSummary) {
            let mut list = ModuleSummary::new($kind);
            self.for_each_child(&mut |name, child| child.describe(name, &mut list));
            parent.add_list(name, list);
        }
    };
}
use impl_by_children;

impl<M: Module> Module for [M] {
    fn for_each_child(&self, each: &mut dyn FnMut(&str, &dyn Module)) {
        for (k, module) in self.iter().enumerate() {
            each(&k.to_string(), module);
        }
    }

    // Each forward pass asks for the path, so this looks no further than the first element that has one.
    fn module_path(&self) -> ModulePath {
        let mut paths = self.iter().enumerate().map(|(k, module)| module.parent_path(&k.to_string()));
        paths.find(|path| !path.is_root()).unwrap_or(ModulePath::ROOT)
    }

    impl_by_children!("ModuleList");
}

impl<M: Module> Module for BTreeMap<String, M> {
    fn for_each_child(&self, each: &mut dyn FnMut(&str, &dyn Module)) {
        for (name, module) in self {
            each(name, module);
        }
    }

    impl_by_children!("ModuleDict");
}

macro_rules! impl_module_for_tuples {
    ($(($($m:ident $k:tt),+)),*) => {$(
        impl<$($m: Module),+> Module for ($($m,)+) {
            fn for_each_child(&self, each: &mut dyn FnMut(&str, &dyn Module)) {
                $(each(stringify!($k), &self.$k);)+
            }

            impl_by_children!("ModuleList");
        }
    )*};
}
impl_module_for_tuples!(
    (A 0),
    (A 0, B 1),
    (A 0, B 1, C 2),
    (A 0, B 1, C 2, D 3),
    (A 0, B 1, C 2, D 3, E 4),
    (A 0, B 1, C 2, D 3, E 4, F 5)
);

/// Implements [`Module`] for plain values in a module, which have nothing to visit.
macro_rules! impl_module_for_values {
    ($($t:ty $([$param:ident])?;)* |$this:ident, $name:ident, $parent:ident| $describe:expr) => {$(
        impl$(<$param: ?Sized>)? Module for $t {
            fn visit(&self, _path: &str, _f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {}

            fn describe(&self, $name: &str, $parent: &mut ModuleSummary) {
                let $this = self;
                $describe
            }
        }
    )*};
}
impl_module_for_values! {
    bool; char; String; &'static str; f32; f64; u8; u16; u32; u64; usize; i8; i16; i32; i64; isize;
    |this, name, parent| parent.add_option(name, this)
}
impl_module_for_values! {
    forebay_core::device::Device; forebay_core::dtype::DType;
    |this, name, parent| parent.add_option(name, format_args!("{this}"))
}
impl_module_for_values!((); PhantomData<T> [T]; |_this, _name, _parent| ());

/// Fails for a number of layers that no model has, before the first of them is made.
#[track_caller]
pub(crate) fn check_layer_count(op: &'static str, layers: usize) -> Result<()> {
    const MAX_LAYERS: usize = 1 << 16;
    fail_if!(layers > MAX_LAYERS; argument(op), "a model has at most {MAX_LAYERS} layers, not {layers}");
    Ok(())
}

//! Containers: modules by name, and layers in sequence.

use std::fmt;

use super::*;
use crate::{Result, Tensor};
use forebay_core::memory::scope;

/// A module that maps one tensor to one tensor.
pub trait Forward {
    /// Applies the module to `x`.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}

// Macros that define several layers implement the trait for them.
impl_forward! {
    ConstantPad1d ConstantPad2d ConstantPad3d Embedding Flatten Fold GroupNorm Identity LayerNorm Linear
    LocalResponseNorm Prelu RmsNorm RotaryEmbedding Rrelu SelfAttention Sequential SinusoidalEmbedding Softmax2d
    Unflatten Unfold Upsample
}

/// A layer that a [`Sequential`] can hold.
pub trait Layer: Module + Forward + Send + Sync {}

impl<T: Module + Forward + Send + Sync> Layer for T {}

/// A function as a layer without parameters.
pub struct FnLayer<F>(pub F);

impl<F> fmt::Debug for FnLayer<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FnLayer(..)")
    }
}

impl<F> Module for FnLayer<F> {
    fn visit(&self, _path: &str, _f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {}

    fn describe(&self, name: &str, parent: &mut ModuleSummary) {
        parent.add_child(name, ModuleSummary::new(summary::short_type_name::<F>()));
    }
}

impl<F: Fn(&Tensor) -> Result<Tensor>> Forward for FnLayer<F> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (self.0)(x)
    }
}

/// Modules by name in insertion order: PyTorch's `ModuleDict`. A `BTreeMap<String, M>` is a module too, but
/// sorts by name, so `layer10` comes before `layer2`.
///
/// ```
/// # use forebay_core::device::Device;
/// # use forebay_nn::nn::{Linear, Module, ModuleDict};
/// # let device = Device::null(Default::default());
/// let heads: ModuleDict<Linear> =
///     [("size", Linear::new(8, 1, &device)?), ("colour", Linear::new(8, 3, &device)?)]
///         .into_iter().collect();
/// assert_eq!(heads.keys().collect::<Vec<_>>(), ["size", "colour"]);
/// assert_eq!(heads.get("colour").map(|head| head.weight.shape()), Some(&[3, 8][..]));
/// assert!(heads.state_dict().contains_key("size.bias"));
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModuleDict<M> {
    modules: Vec<(String, M)>,
}

impl<M> Default for ModuleDict<M> {
    fn default() -> Self {
        Self { modules: Vec::new() }
    }
}

impl<M> ModuleDict<M> {
    /// Creates an empty dictionary.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a module, or replaces the module with this name and returns the replaced one.
    pub fn insert(&mut self, name: impl Into<String>, module: M) -> Option<M> {
        let name = name.into();
        match self.modules.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => Some(std::mem::replace(old, module)),
            None => {
                self.modules.push((name, module));
                None
            }
        }
    }

    /// Returns the module with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&M> {
        self.iter().find(|(other, _)| *other == name).map(|(_, module)| module)
    }

    /// Iterates over names and modules in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&str, &M)> {
        self.modules.iter().map(|(name, module)| (name.as_str(), module))
    }

    /// Iterates over the names in order.
    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.iter().map(|(name, _)| name)
    }

    /// Iterates over the modules in order.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = &M> {
        self.iter().map(|(_, module)| module)
    }

    /// Returns the number of modules.
    #[must_use]
    pub fn len(&self) -> usize {
        self.modules.len()
    }

    /// Reports whether there are no modules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.modules.is_empty()
    }
}

impl<M, N: Into<String>> FromIterator<(N, M)> for ModuleDict<M> {
    fn from_iter<I: IntoIterator<Item = (N, M)>>(modules: I) -> Self {
        let mut dict = Self::new();
        for (name, module) in modules {
            dict.insert(name, module);
        }
        dict
    }
}

impl<M: Module> Module for ModuleDict<M> {
    fn for_each_child(&self, each: &mut dyn FnMut(&str, &dyn Module)) {
        for (name, module) in self.iter() {
            each(name, module);
        }
    }

    impl_by_children!("ModuleDict");
}

/// Layers applied one after another, named by their index or by [`add_named`](Self::add_named).
///
/// ```
/// # use forebay_core::{device::Device, tensor::Tensor};
/// # use forebay_nn::nn::{Linear, Module, Sequential};
/// # let device = Device::null(Default::default());
/// let net = Sequential::new()
///     .add(Linear::new(784, 64, &device)?)
///     .add_fn(Tensor::relu)
///     .add(Linear::new(64, 10, &device)?);
/// assert!(net.state_dict().contains_key("2.weight"));
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
///
/// A sequence may contain sequences. Forward passes, visits and the drop recurse once for each level of nesting,
/// and so take stack. 500 levels fit the 2 MiB of a thread without optimisation.
#[derive(Default, Module)]
pub struct Sequential {
    #[module(name = "")]
    layers: ModuleDict<Box<dyn Layer>>,
}

impl Sequential {
    /// Creates a sequence without layers, which is the identity.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a layer, named by its index.
    #[must_use]
    #[expect(clippy::should_implement_trait, reason = "a builder, not a sum")]
    pub fn add(self, layer: impl Layer + 'static) -> Self {
        let name = self.len().to_string();
        self.add_named(name, layer)
    }

    /// Appends a layer with this name, or replaces the layer with this name.
    #[must_use]
    pub fn add_named(mut self, name: impl Into<String>, layer: impl Layer + 'static) -> Self {
        self.layers.insert(name, Box::new(layer));
        self
    }

    /// Appends a function without parameters.
    #[must_use]
    #[track_caller]
    pub fn add_fn(self, step: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        self.add(FnLayer(step))
    }

    /// Returns the number of layers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Reports whether there are no layers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Iterates over the layers in order, for access to intermediate results.
    pub fn layers(&self) -> impl DoubleEndedIterator<Item = &dyn Layer> {
        self.layers.values().map(|layer| &**layer)
    }

    /// Applies all layers in order, up to the first error.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // `#[track_caller]` does not reach through a trait object.
        let _line = scope::enter_call();
        self.layers().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }
}

impl_debug!(Sequential);

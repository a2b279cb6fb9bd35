//! Reparametrised weights: `torch.nn.utils.parametrizations`.

use std::sync::atomic::Ordering;

use smallvec::smallvec;

use super::{Module, ModuleEntry, ModuleSummary, TrainingMode, init, join_path};
use crate::{DType, Result, Tensor, autograd, fail, fail_if};
use forebay_core::ops::NormalizeOptions;

/// A layer with one weight that can be replaced.
pub trait HasWeight: Module + Sized {
    /// Dimension of the weight that indexes the outputs.
    const OUTPUTS_DIM: usize = 0;

    /// Returns the layer's weight.
    fn weight(&self) -> &Tensor;

    /// Returns the layer's weight for replacement.
    fn weight_mut(&mut self) -> &mut Tensor;

    /// Applies the layer to `x` with `weight` in place of its own.
    fn forward_with(&self, weight: &Tensor, x: &Tensor) -> Result<Tensor>;
}

fn visit_without_weight<L: Module>(layer: &L, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
    let weight = join_path(path, "weight");
    layer.visit(path, &mut |name, slot| {
        if name != weight || matches!(slot, ModuleEntry::Scope(_)) {
            f(name, slot);
        }
    });
}

/// Describes a wrapper by its own parameters and the options of its layer.
fn describe_wrapper<L: Module>(wrapper: &impl Module, layer: &L, name: &str, parent: &mut ModuleSummary) {
    let mut own = ModuleSummary::from_visit(wrapper);
    let mut inner = ModuleSummary::new("");
    layer.describe("", &mut inner);
    own.add_options_of(inner);
    parent.add_child(name, own);
}

/// Defines the methods of a wrapper whose method `weight` computes the weight of its `layer`.
macro_rules! parametrized_layer {
    ($name:ident $([$training:ident])?) => {
        impl<L: HasWeight> $name<L> {
            /// Applies the layer with the computed weight, with the layer's errors.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.layer.forward_with(&self.weight()?, x)
            }

            /// Returns the layer with a copy of the current weight as its own.
            #[track_caller]
            pub fn remove_parametrization(mut self) -> Result<L> {
                // The current weight is that of evaluation.
                $(self.$training.0.store(false, Ordering::Relaxed);)?
                let weight = self.weight()?;
                *self.layer.weight_mut() = init::create_parameter(|| weight.detach().copy())?;
                Ok(self.layer)
            }
        }

        impl_debug!([L: HasWeight] $name<L>);

        impl<L: HasWeight> super::Forward for $name<L> {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                Self::forward(self, x)
            }
        }
    };
}

/// Layer whose weight is v · g / ‖v‖, with length and direction trained separately (Salimans and Kingma,
/// 2016). PyTorch's `parametrizations.weight_norm`, with its names. Files of the older `weight_norm` have
/// `weight_g` and `weight_v`. [`rename_keys`](super::rename_keys) renames these to
/// `parametrizations.weight.original0` and `original1`.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{Linear, Module, WeightNorm};
/// # let device = Device::null(Default::default());
/// let layer = WeightNorm::new(Linear::new(8, 4, &device)?, Some(0))?;
/// assert_eq!(layer.forward(&Tensor::zeros(&[2, 8], DType::F32, &device)?)?.shape(), [2, 4]);
/// assert_eq!(layer.state_dict()["parametrizations.weight.original0"].shape(), [4, 1]);
/// // The layer with the weight as it is now.
/// let plain: Linear = layer.remove_parametrization()?;
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
pub struct WeightNorm<L> {
    layer: L,
    magnitude: Tensor,
    direction: Tensor,
    dim: Option<usize>,
}

impl<L: HasWeight> WeightNorm<L> {
    /// Wraps a layer without changing its result. There is one length for each index of the weight's
    /// dimension `dim`, or a single one for `None`. PyTorch's default is `Some(0)`.
    #[track_caller]
    pub fn new(layer: L, dim: Option<usize>) -> Result<Self> {
        let weight = layer.weight();
        let rank = weight.rank();
        fail_if!(dim.is_some_and(|dim| dim >= rank);
            shape("WeightNorm", [weight]), "the weight has no dimension {}", dim.unwrap_or(0));
        let length = init::create_parameter(|| norm_except_dim(&weight.detach(), dim))?;
        let direction = init::create_parameter(|| weight.detach().copy())?;
        Ok(Self { layer, magnitude: length, direction, dim })
    }

    /// Computes the current weight.
    #[track_caller]
    pub fn weight(&self) -> Result<Tensor> {
        self.direction.mul(&self.magnitude.div(&norm_except_dim(&self.direction, self.dim)?)?)
    }
}
parametrized_layer!(WeightNorm);

/// Computes the norms over all dimensions except `dim`, with extent 1 in the result, or a scalar norm.
#[track_caller]
fn norm_except_dim(weight: &Tensor, dim: Option<usize>) -> Result<Tensor> {
    match dim {
        None => weight.norm(2.0, (), false),
        Some(dim) => {
            let others: Vec<isize> = (0..weight.rank()).filter(|&d| d != dim).map(|d| d as isize).collect();
            if others.is_empty() { weight.abs() } else { weight.norm(2.0, &others, true) }
        }
    }
}

impl<L: HasWeight> Module for WeightNorm<L> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        visit_without_weight(&self.layer, path, f);
        let path = join_path(path, "parametrizations.weight");
        self.magnitude.visit(&join_path(&path, "original0"), f);
        self.direction.visit(&join_path(&path, "original1"), f);
    }

    fn describe(&self, name: &str, parent: &mut ModuleSummary) {
        describe_wrapper(self, &self.layer, name, parent);
    }
}

/// Layer whose weight is divided by its largest singular value (Miyato et al., 2018): PyTorch's
/// `parametrizations.spectral_norm`, with its names. Each training pass refines the estimate by a step of the
/// power method. Evaluation uses the estimate unchanged.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::{Linear, Module, Sequential, SpectralNorm};
/// # let device = Device::null(Default::default());
/// let critic = Sequential::new()
///     .add(SpectralNorm::new(Linear::new(8, 4, &device)?)?)
///     .add_fn(|x| x.leaky_relu(0.2))
///     .add(SpectralNorm::new(Linear::new(4, 1, &device)?)?);
/// assert_eq!(critic.state_dict()["0.parametrizations.weight.0._v"].shape(), [8]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
pub struct SpectralNorm<L> {
    layer: L,
    u: Tensor,
    v: Tensor,
    n_power_iterations: usize,
    eps: f64,
    training: TrainingMode,
}

impl<L: HasWeight> SpectralNorm<L> {
    /// Wraps a layer whose weight has two or more dimensions, with one step of the power method for each pass and
    /// eps 1e-12. The initial estimate takes 15 steps, as in PyTorch.
    #[track_caller]
    pub fn new(layer: L) -> Result<Self> {
        let weight = layer.weight();
        fail_if!(weight.rank() < 2;
            shape("SpectralNorm", [weight]), "takes a layer whose weight has at least two dimensions");
        let matrix = weight_matrix::<L>(&weight.detach())?;
        let eps = 1e-12;
        let unit = |n: usize| {
            init::create_buffer(|| {
                Tensor::randn([n], DType::F32, weight.device())?
                    .normalize(0, &NormalizeOptions { eps, ..Default::default() })?
                    .to_dtype(weight.dtype())
            })
        };
        let (u, v) = (unit(matrix.shape()[0])?, unit(matrix.shape()[1])?);
        let norm = Self { layer, u, v, n_power_iterations: 1, eps, training: TrainingMode::new() };
        norm.run_power_method(&matrix, 15)?;
        Ok(norm)
    }

    setters! {
        /// Sets the steps of the power method in a training pass: PyTorch's `n_power_iterations`; 1.
        fn n_power_iterations(steps: usize) { n_power_iterations: steps }
        /// Sets the lower bound of a vector's length in the power method; 1e-12.
        fn eps(eps: f64) { eps }
    }

    /// Refines `u` and `v` towards the first singular vectors by steps of the power method.
    fn run_power_method(&self, matrix: &Tensor, steps: usize) -> Result<()> {
        let _no_grad = autograd::no_grad();
        let options = NormalizeOptions { eps: self.eps, ..Default::default() };
        let (mut u, mut v) = (self.u.clone(), self.v.clone());
        for _ in 0..steps {
            u = matrix.mv(&v)?.normalize(0, &options)?;
            v = matrix.t()?.mv(&u)?.normalize(0, &options)?;
        }
        if steps > 0 {
            self.u.copy_(&u)?;
            self.v.copy_(&v)?;
        }
        Ok(())
    }

    /// Computes the current weight. In training, first refines the estimate by the power method.
    #[track_caller]
    pub fn weight(&self) -> Result<Tensor> {
        let weight = self.layer.weight();
        let matrix = weight_matrix::<L>(weight)?;
        let vectors = autograd::replayable_state_update(|| {
            if self.training.is_on() {
                self.run_power_method(&matrix.detach(), self.n_power_iterations)?;
            }
            // Copies, because the next pass overwrites the buffers that the gradient of this pass reads.
            Ok(smallvec![self.u.copy()?, self.v.copy()?])
        })?;
        let [u, v] = &vectors[..] else {
            fail!(argument("SpectralNorm"), "the vectors of the power method are lost");
        };
        weight.div(&u.dot(&matrix.mv(v)?)?)
    }
}
parametrized_layer!(SpectralNorm[training]);

/// Reshapes a weight to a matrix with one row for each output.
#[track_caller]
fn weight_matrix<L: HasWeight>(weight: &Tensor) -> Result<Tensor> {
    weight.transpose(0, L::OUTPUTS_DIM as isize)?.flatten(1, -1)
}

impl<L: HasWeight> Module for SpectralNorm<L> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        visit_without_weight(&self.layer, path, f);
        let path = join_path(path, "parametrizations.weight");
        self.layer.weight().visit(&join_path(&path, "original"), f);
        self.u.visit(&join_path(&path, "0._u"), f);
        self.v.visit(&join_path(&path, "0._v"), f);
        self.training.visit(&join_path(&path, "training"), f);
    }

    fn describe(&self, name: &str, parent: &mut ModuleSummary) {
        describe_wrapper(self, &self.layer, name, parent);
    }
}

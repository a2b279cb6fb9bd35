//! Names that most operations import.

pub(crate) use forebay_shaders::KernelSpec;
pub(crate) use smallvec::{SmallVec, smallvec};

pub(crate) use crate::amp::{self, dispatch_autocast, dispatch_in_f32};
pub(crate) use crate::autograd::{self, InputGrads, SavedTensor};
pub(crate) use crate::check::with_defaults;
pub(crate) use crate::dtype::DType;
pub(crate) use crate::error::{Error, Result, fail, fail_if};
pub(crate) use crate::memory::{self, Tag};
pub(crate) use crate::ops::elementwise::pointwise::Operand;
pub(crate) use crate::ops::kernel::heuristics::VEC4_WIDTH;
pub(crate) use crate::ops::kernel::launch::{
    self, KernelParams, WORKGROUP_SIZE, kernel_params, kernel_spec, kernel_variants,
};
pub(crate) use crate::ops::kernel::operation::{
    bindings, empty_workspace, extent_or_one, operation, run_composite, with_extent,
};
pub(crate) use crate::ops::reduce::contiguous_zero_offset;
pub(crate) use crate::runtime::device::Device;
pub(crate) use crate::scalar::Scalar;
pub(crate) use crate::tensor::layout::{broadcast_shapes, collapse_dims, normalize_dim, numel};
pub(crate) use crate::tensor::shape::{new_shape, reduction_dims, single_dim};
pub(crate) use crate::tensor::{Dims, IntoDims, IntoShape, Layout, Tensor};

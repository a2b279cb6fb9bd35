//! Names that operations import.

pub(crate) use std::sync::Arc;

pub(crate) use forebay_shaders::KernelSpec;
pub(crate) use smallvec::{SmallVec, smallvec};

pub(crate) use crate::amp::{self, OperandCast, dispatch_autocast, dispatch_in_f32};
pub(crate) use crate::autograd::{self, InputGrads, SavedTensor};
pub(crate) use crate::check::{self, with_defaults};
pub(crate) use crate::dtype::DType;
pub(crate) use crate::error::{Error, Result, fail, fail_if};
pub(crate) use crate::memory::{self, Tag};
pub(crate) use crate::ops::elementwise::pointwise::{IntoOperand, Operand};
pub(crate) use crate::ops::index::select;
pub(crate) use crate::ops::kernel::heuristics::VEC4_WIDTH;
pub(crate) use crate::ops::kernel::index_check::{IndexRange, check_in_range};
pub(crate) use crate::ops::kernel::launch::{
    self, KernelParams, WORKGROUP_SIZE, kernel_params, kernel_spec, kernel_variants,
};
pub(crate) use crate::ops::kernel::operation::{
    bindings, empty_workspace, extent_or_one, operation, run_composite, with_extent,
};
pub(crate) use crate::ops::norm::softmax::check_f32_f16_bf16;
pub(crate) use crate::ops::reduce::contiguous_zero_offset;
pub(crate) use crate::ops::shape::cat;
pub(crate) use crate::runtime::device::Device;
pub(crate) use crate::runtime::profile::WorkItem;
pub(crate) use crate::runtime::stream::Access;
pub(crate) use crate::scalar::Scalar;
pub(crate) use crate::tensor::layout::{broadcast_shapes, collapse_dims, normalize_dim, numel};
pub(crate) use crate::tensor::shape::{new_shape, reduction_dims, single_dim};
pub(crate) use crate::tensor::{Dims, IntoDims, IntoShape, Layout, Tensor};

//! Kernels in CUDA C++: faster variants of some WGSL kernels, for CUDA only. The header of each file lists
//! its definitions.

/// Wait for the previous kernel (programmatic dependent launch); precedes all kernels, also translated ones.
pub const PDL: &str = include_str!("../cuda/pdl.cuh");
/// Code shared by the attention kernels; precedes each of them.
pub const ATTENTION_COMMON: &str = include_str!("../cuda/attention_common.cuh");
/// Masks and dropout of the attention kernels; follows the code that they share.
pub const ATTENTION_MASK: &str = include_str!("../cuda/attention_mask.cuh");
/// Attention forward.
pub const ATTENTION_FWD: &str = include_str!("../cuda/attention_fwd.cu");
/// Attention backward, in two passes.
pub const ATTENTION_BWD: &str = include_str!("../cuda/attention_bwd.cu");
/// Gradients of f32 attention, in one pass over the keys.
pub const ATTENTION_F32_BWD: &str = include_str!("../cuda/attention_f32_bwd.cu");
/// Attention backward of long sequences on Hopper, in one pass.
pub const ATTENTION_BWD_ONE_PASS: &str = include_str!("../cuda/attention_bwd_one_pass.cu");
/// Pairs of 16-bit floats; precedes the kernels that use them.
pub const PACKED_HALVES: &str = include_str!("../cuda/packed_halves.cuh");
/// Matrix products by `wgmma`; precedes the kernels that use it.
pub const WGMMA: &str = include_str!("../cuda/wgmma.cuh");
/// Convolutions from columns along the width, and their weights' gradient.
pub const CONV: &str = include_str!("../cuda/conv.cu");
/// Shared-memory stages filled by TMA; precedes the matrix product kernels.
pub const TMA_PIPELINE: &str = include_str!("../cuda/tma_pipeline.cuh");
/// The gradient of a linear layer's input and the GELU before it.
pub const GELU_GRAD: &str = include_str!("../cuda/gelu_grad.cu");
/// All time steps of a recurrent layer, or the gradients of its gates.
pub const RECURRENT: &str = include_str!("../cuda/recurrent.cu");
/// Batches of small 16-bit matrix products.
pub const BATCHED_MATMUL: &str = include_str!("../cuda/batched_matmul.cu");
/// Small f32 matrix products.
pub const SGEMM_SMALL: &str = include_str!("../cuda/sgemm_small.cu");

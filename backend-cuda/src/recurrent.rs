//! Recurrent layers of 16-bit floats: all time steps in one launch, with the weight kept on the chip.
//!
//! The kernel is `shaders/cuda/recurrent.cu`. The core chooses its partition ([`RecurrentTiling`]), which does not
//! depend on the card.

use std::ffi::CStr;
use std::sync::Arc;

use forebay_core::backend::{
    RecurrentCall, RecurrentKind, RecurrentPass, RecurrentTiling, Slice, SourceError,
};
use forebay_core::dtype::DType;

use crate::backend::slice_address;
use crate::context::{Context, CudaStream};
use crate::kernels::{KernelRegistry, SubmitStatus};
use crate::native_kernels::{LaunchPlan, NativeKernel, NativeKernels, convert_all, with_defines};
use crate::settings;

/// Architectures with clusters and enough shared memory for the partitions: Hopper, and Blackwell's data-centre cards.
const ARCHITECTURES: [u32; 3] = [90, 100, 103];

/// A variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecurrentKernel {
    /// Cell type.
    pub kind: RecurrentKind,
    /// If true, the kernel computes gradients.
    pub is_backward: bool,
    /// If true, elements are bf16, else f16.
    pub is_bf16: bool,
    /// If true, rows of the weight begin at multiples of four bytes, so that the forward pass reads pairs.
    pub loads_pairs: bool,
    /// Partition over blocks and warps.
    pub tiling: RecurrentTiling,
}

impl NativeKernel for RecurrentKernel {
    const FALLBACK_MESSAGE: &'static str = "recurrent layers launch each time step, which takes longer";

    fn source(&self) -> String {
        let RecurrentTiling { cluster_blocks, units, sequences, warps, tiles, register_tiles } = self.tiling;
        let kind = match self.kind {
            RecurrentKind::Tanh => 0,
            RecurrentKind::Relu => 1,
            RecurrentKind::Lstm => 2,
            RecurrentKind::Gru => 3,
        };
        let defines = [
            ("BF16", self.is_bf16.into()),
            ("BACKWARD", self.is_backward.into()),
            ("KIND", kind),
            ("GATES", self.kind.gate_count() as u32),
            ("CLUSTER", cluster_blocks),
            ("UNITS", units),
            ("SEQUENCES", sequences),
            ("WARPS_M", warps[0]),
            ("WARPS_K", warps[1]),
            ("TILES_M", tiles[0]),
            ("TILES_K", tiles[1]),
            ("REGISTER_TILES", register_tiles),
            ("PAIRS", self.loads_pairs.into()),
        ];
        let shared = [forebay_shaders::cuda::TMA_PIPELINE, forebay_shaders::cuda::PACKED_HALVES];
        with_defines(&defines, &[shared[0], shared[1], forebay_shaders::cuda::RECURRENT])
    }

    fn entry(&self) -> &'static CStr {
        c"recurrent"
    }

    fn block_threads(&self) -> u32 {
        self.tiling.warps[0] * self.tiling.warps[1] * 32
    }

    fn shared_bytes(&self) -> u32 {
        self.tiling.shared_bytes(self.kind.gate_count() as u64) as u32
    }

    fn cluster_blocks(&self) -> u32 {
        self.tiling.cluster_blocks
    }
}

/// `Params` of the kernel.
#[repr(C)]
#[derive(Default)]
pub(crate) struct RecurrentParams {
    weight: u64,
    lengths: u64,
    /// Products of the input, bias, and initial values.
    forward: [u64; 4],
    /// Strides of the input between steps and between sequences, in elements.
    input_strides: [i64; 2],
    states: u64,
    saved: u64,
    /// Gradients: of the input's products, of the state's products, and of the initial values.
    grads: [u64; 4],
    /// Steps, batch, hidden features.
    sizes: [i32; 3],
    reverse: i32,
}

/// Reports whether the kernels run on an architecture such as 90, unless they are switched off.
pub(crate) fn is_supported(arch: u32) -> bool {
    ARCHITECTURES.contains(&arch) && settings::recurrent_kernels()
}

/// Returns the kernel, its parameters and its grid; `None` if the kernels do not support the call.
fn plan_recurrent(call: &RecurrentCall, arch: u32) -> Option<LaunchPlan<RecurrentKernel, RecurrentParams>> {
    if !is_supported(arch) {
        return None;
    }
    let tiling = call.tiling()?;
    let optional = |slice: Option<Slice>| slice.map_or(0, slice_address);
    let weight = slice_address(call.weight);
    let common = RecurrentParams {
        weight,
        lengths: optional(call.lengths),
        sizes: convert_all([call.steps, call.batch, call.hidden])?,
        reverse: call.reverse.into(),
        ..RecurrentParams::default()
    };
    let (is_backward, params) = match call.pass {
        RecurrentPass::Forward { input, input_strides, bias, h_0, c_0, states, saved } => {
            let params = RecurrentParams {
                forward: [slice_address(input), optional(bias), slice_address(h_0), optional(c_0)],
                input_strides: convert_all(input_strides)?,
                states: slice_address(states),
                saved: optional(saved),
                ..common
            };
            (false, params)
        }
        RecurrentPass::Backward { grad, saved, gates, inner, h_0, c_0 } => {
            let params = RecurrentParams {
                states: slice_address(grad),
                saved: slice_address(saved),
                grads: [slice_address(gates), optional(inner), slice_address(h_0), optional(c_0)],
                ..common
            };
            (true, params)
        }
    };
    let blocks = u32::try_from(tiling.blocks(call.batch)).ok()?;
    let kernel = RecurrentKernel {
        kind: call.kind,
        is_backward,
        is_bf16: call.dtype == DType::BF16,
        loads_pairs: !is_backward && call.hidden.is_multiple_of(2) && weight.is_multiple_of(4),
        tiling,
    };
    Some((kernel, params, [blocks, 1, 1]))
}

/// The recurrent kernels of one device.
#[derive(Debug, Default)]
pub(crate) struct RecurrentKernels(NativeKernels<RecurrentKernel>);

impl RecurrentKernels {
    /// Enqueues a layer on `stream` if its kernel is compiled. Without a stream, only starts to compile the kernel. If
    /// `wait` is true, waits for the compiler.
    pub(crate) fn submit(
        &self,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
        stream: Option<&CudaStream>,
        call: &RecurrentCall,
        wait: bool,
    ) -> Result<SubmitStatus, SourceError> {
        let Some(plan) = plan_recurrent(call, kernels.arch()) else {
            return Ok(SubmitStatus::Declined);
        };
        // SAFETY: the kernel takes the parameters of its plan, in this layout; the core has checked that the operands
        // lie inside their segments.
        unsafe { self.0.submit(context, kernels, stream, plan, wait) }
    }
}

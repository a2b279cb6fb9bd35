//! Batches of small products of 16-bit floats, with strides for several batch dimensions.
//!
//! The kernel is `shaders/cuda/batched_matmul.cu`. The core chooses its partition ([`BatchedMatmulTiling`]), and
//! decides when it replaces cuBLASLt, because dry runs need the same answer.

use std::ffi::CStr;
use std::sync::Arc;

use forebay_core::backend::{BatchedMatmulCall, BatchedMatmulTiling, BatchedOperand, SourceError};
use forebay_core::dtype::DType;

use crate::backend::device_address;
use crate::context::{Context, CudaStream};
use crate::kernels::{KernelRegistry, SubmitStatus};
use crate::native_kernels::{LaunchPlan, NativeKernel, NativeKernels, convert_all, with_defines};
use crate::settings;

/// First architecture with `mma.sync` of bf16 and `cp.async`.
const REQUIRED_ARCH: u32 = 80;

/// A variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchedMatmulKernel {
    /// If true, elements are bf16, else f16.
    pub is_bf16: bool,
    /// If true, c is f32.
    pub writes_f32: bool,
    /// If true, the operand (a, b) is MN-major: neighbours in memory are in the next row of a or column of b.
    pub mn_major: [bool; 2],
    /// If true, dimensions of the batch are summed.
    pub has_sums: bool,
    /// Partition over blocks and warps.
    pub tiling: BatchedMatmulTiling,
}

impl NativeKernel for BatchedMatmulKernel {
    const FALLBACK_MESSAGE: &'static str =
        "batches of small products run on cuBLASLt, which takes longer and copies operands";

    fn source(&self) -> String {
        use forebay_shaders::cuda::{BATCHED_MATMUL, PACKED_HALVES, TMA_PIPELINE};
        let BatchedMatmulTiling { rows, cols, depth, warps, stages } = self.tiling;
        let defines = [
            ("BF16", self.is_bf16.into()),
            ("OUT_F32", self.writes_f32.into()),
            ("A_MN_MAJOR", self.mn_major[0].into()),
            ("B_MN_MAJOR", self.mn_major[1].into()),
            ("SUMS", self.has_sums.into()),
            ("ROWS", rows),
            ("COLS", cols),
            ("DEPTH", depth),
            ("WARPS_M", warps[0]),
            ("WARPS_N", warps[1]),
            ("WARPS_K", warps[2]),
            ("STAGES", stages),
        ];
        with_defines(&defines, &[TMA_PIPELINE, PACKED_HALVES, BATCHED_MATMUL])
    }

    fn entry(&self) -> &'static CStr {
        c"batched_matmul"
    }

    fn block_threads(&self) -> u32 {
        self.tiling.warps.iter().product::<u32>() * 32
    }

    fn shared_bytes(&self) -> u32 {
        self.tiling.shared_bytes(self.mn_major)
    }
}

/// `Params` of the kernel.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct BatchedMatmulParams {
    /// Addresses of a, b and c.
    addresses: [u64; 3],
    /// Elements between lines of a and b, and between rows of c.
    lines: [i64; 3],
    /// Strides of the batch dimensions: of a, b and c.
    batch_strides: [[i64; 3]; 3],
    /// m, n, k.
    sizes: [i32; 3],
    /// Extents of the batch dimensions that c has, and of those that are summed.
    batch: [i32; 3],
    terms: [i32; 3],
    /// Number of tiles along the rows and columns of c.
    tiles: [i32; 2],
    accumulate: i32,
}

/// Reports whether the kernels run on an architecture such as 90, unless they are switched off.
pub(crate) fn is_supported(arch: u32) -> bool {
    arch >= REQUIRED_ARCH && settings::batched_matmul_kernels()
}

/// Returns the kernel, its parameters and its grid; `None` if the kernel does not support the call.
fn plan_batched_matmul(
    call: &BatchedMatmulCall,
    arch: u32,
) -> Option<LaunchPlan<BatchedMatmulKernel, BatchedMatmulParams>> {
    if !is_supported(arch) {
        return None;
    }
    let (tiling, mn_major) = (call.tiling()?, call.mn_major()?);
    let operands = [&call.a, &call.b, &call.c];
    let address = |operand: &BatchedOperand| device_address(operand.segment, operand.offset);
    let [a_line, b_line] = call.line_strides(mn_major);
    let [mut batch, mut terms] = [[1; 3]; 2];
    for (dim, extent) in call.batch.into_iter().enumerate() {
        let extents = if call.c.batch_strides[dim] == 0 { &mut terms } else { &mut batch };
        extents[dim] = i32::try_from(extent).ok()?;
    }
    let [a_steps, b_steps, c_steps] = operands.map(|operand| convert_all(operand.batch_strides));
    let params = BatchedMatmulParams {
        addresses: operands.map(address),
        lines: convert_all([a_line, b_line, call.c.row_stride])?,
        batch_strides: [a_steps?, b_steps?, c_steps?],
        sizes: convert_all([call.m, call.n, call.k])?,
        batch,
        terms,
        tiles: convert_all([call.m.div_ceil(tiling.rows.into()), call.n.div_ceil(tiling.cols.into())])?,
        accumulate: call.accumulate.into(),
    };
    let kernel = BatchedMatmulKernel {
        is_bf16: call.dtype == DType::BF16,
        writes_f32: call.dtype_out == DType::F32,
        mn_major,
        has_sums: terms.iter().any(|extent| *extent > 1),
        tiling,
    };
    Some((kernel, params, [u32::try_from(call.blocks(&tiling)).ok()?, 1, 1]))
}

/// The kernels of one device.
#[derive(Debug, Default)]
pub(crate) struct BatchedMatmulKernels(NativeKernels<BatchedMatmulKernel>);

impl BatchedMatmulKernels {
    /// Enqueues a batch of products on `stream` if its kernel is compiled. Without a stream, only starts to compile the
    /// kernel. If `wait` is true, waits for the compiler.
    pub(crate) fn submit(
        &self,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
        stream: Option<&CudaStream>,
        call: &BatchedMatmulCall,
        wait: bool,
    ) -> Result<SubmitStatus, SourceError> {
        let Some(plan) = plan_batched_matmul(call, kernels.arch()) else {
            return Ok(SubmitStatus::Declined);
        };
        // SAFETY: the kernel takes the parameters of its plan, in this layout; the core has checked that the operands
        // lie inside their segments.
        unsafe { self.0.submit(context, kernels, stream, plan, wait) }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::size_of;

    use forebay_core::backend::{BatchedMatmulCall, BatchedOperand, SegmentId};
    use forebay_core::dtype::DType;

    use super::{BatchedMatmulParams, plan_batched_matmul};

    #[test]
    fn summed_dimensions_are_terms_of_the_kernel() {
        let operand = |batch_strides| BatchedOperand {
            segment: SegmentId(1 << 20),
            offset: 32,
            row_stride: 64,
            col_stride: 1,
            batch_strides,
        };
        let call = BatchedMatmulCall {
            dtype: DType::BF16,
            dtype_out: DType::BF16,
            m: 64,
            n: 64,
            k: 64,
            batch: [8, 1, 16],
            a: operand([1 << 16, 0, 1 << 12]),
            b: BatchedOperand { row_stride: 1, col_stride: 72, ..operand([1 << 14, 0, 0]) },
            c: operand([1 << 12, 1 << 12, 0]),
            accumulate: true,
        };
        let (kernel, params, blocks) = plan_batched_matmul(&call, 90).unwrap();
        assert_eq!((params.batch, params.terms), ([8, 1, 1], [1, 1, 16]));
        // Eight products alone would leave most of a card idle, so tiles are small.
        let tiles = 64 / kernel.tiling.rows * (64 / kernel.tiling.cols);
        assert_eq!((blocks, tiles), ([8 * tiles, 1, 1], 16));
        assert_eq!(params.lines, [64, 72, 64]);
        assert_eq!(params.addresses, [(1 << 20) + 32; 3]);
        assert!(kernel.has_sums && kernel.is_bf16 && !kernel.writes_f32 && params.accumulate == 1);
        assert_eq!(kernel.mn_major, [false, false]);
        assert!(plan_batched_matmul(&call, 75).is_none(), "no bf16 before sm_80");
        // The struct of the kernel: 15 words of 64 bits and 12 of 32 bits.
        assert_eq!(size_of::<BatchedMatmulParams>(), 15 * 8 + 12 * 4);
    }
}

//! The gradient of a linear layer's input and the GELU before it, by a native kernel. cuBLASLt's epilogue for
//! this takes four times as long as the plain product.
//!
//! The kernel is `shaders/cuda/gelu_grad.cu`.

use std::ffi::CStr;

use forebay_core::backend::{Epilogue, GELU_GRAD_SUM_ROWS, MatmulCall, MatrixOperand};
use forebay_core::dtype::DType;

use crate::backend::{operand_address, slice_address};
use crate::native_kernels::{LaunchPlan, NativeKernel, convert_all, with_defines};
use crate::tensor_map::TensorMap;

/// The architecture with `wgmma` and TMA.
pub(crate) const REQUIRED_ARCH: u32 = 90;

/// Tile of c that a block computes.
const TILE_ROWS: u32 = GELU_GRAD_SUM_ROWS as u32;
const TILE_COLS: u32 = 256;
/// Elements along K in one stage, 128 bytes, and the number of stages in shared memory.
const TILE_K: u32 = 64;
const STAGES: u32 = 3;
/// Warps that multiply, warps of the epilogue, and one warp that loads.
const TOTAL_WARPS: u32 = 8 + EPILOGUE_WARPS + 1;
const EPILOGUE_WARPS: u32 = 7;

/// A variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GeluGradKernel {
    /// If true, elements are bf16, else f16.
    pub is_bf16: bool,
}

impl NativeKernel for GeluGradKernel {
    const FALLBACK_MESSAGE: &'static str =
        "GELU's gradient is a pass of its own after the product, which takes longer";

    fn source(&self) -> String {
        use forebay_shaders::cuda::{GELU_GRAD, PACKED_HALVES, TMA_PIPELINE, WGMMA};
        let defines = [("BF16", self.is_bf16.into()), ("STAGES", STAGES)];
        with_defines(&defines, &[TMA_PIPELINE, PACKED_HALVES, WGMMA, GELU_GRAD])
    }

    fn options(&self) -> &'static [&'static str] {
        &["--gpu-architecture=sm_90a"]
    }

    fn entry(&self) -> &'static CStr {
        c"gelu_grad"
    }

    fn block_threads(&self) -> u32 {
        TOTAL_WARPS * 32
    }

    fn shared_bytes(&self) -> u32 {
        let (stages, tile) =
            (STAGES * (TILE_ROWS + TILE_COLS) * TILE_K * 2, TILE_ROWS * (TILE_COLS * 2 + 16));
        // The last two terms are the column sums and the barriers.
        stages + tile + EPILOGUE_WARPS * TILE_COLS * 4 + 16 * (STAGES + 1)
    }
}

/// `Params` of the kernel.
#[repr(C)]
pub(crate) struct GeluGradParams {
    a: TensorMap,
    b: TensorMap,
    x: u64,
    gelu: u64,
    c: u64,
    sums: u64,
    /// Row strides of x, gelu and c, in elements.
    leading_dims: [i64; 3],
    /// Sizes: m, n, k, number of tiles in a row, number of all tiles.
    sizes: [i32; 5],
    unused: i32,
}

/// Returns the tensor map of a row-major matrix of 16-bit floats, in boxes of `rows` rows.
fn matrix_tensor_map(
    elements: DType,
    operand: &MatrixOperand,
    [rows, cols]: [u64; 2],
    boxed: u32,
) -> Option<TensorMap> {
    let address = operand_address(operand);
    TensorMap::new(elements, address, &[cols, rows], &[2 * operand.row_stride], &[TILE_K, boxed], true)
}

/// Returns the kernel, its parameters and the number of blocks of a call: at most one block for each of
/// `units` multiprocessors. `None` if the kernel does not support the call.
pub(crate) fn plan_gelu_grad(
    call: &MatmulCall,
    arch: u32,
    units: u64,
) -> Option<LaunchPlan<GeluGradKernel, GeluGradParams>> {
    let Epilogue::GeluGrad { x, gelu, row_block_sums: sums } = &call.epilogue else { return None };
    if arch != REQUIRED_ARCH || !call.supports_epilogue() {
        return None;
    }
    if !matches!(call.dtype, DType::BF16 | DType::F16) {
        return None;
    }
    let MatmulCall { m, n, k, .. } = *call;
    let tile_columns = n.div_ceil(TILE_COLS.into());
    let tiles = tile_columns * m.div_ceil(TILE_ROWS.into());
    let leading_dims = convert_all([x, gelu, &call.c].map(|operand| operand.row_stride))?;
    let sizes = convert_all([m, n, k, tile_columns, tiles])?;
    let params = GeluGradParams {
        a: matrix_tensor_map(call.dtype, &call.a, [m, k], TILE_ROWS)?,
        b: matrix_tensor_map(call.dtype, &call.b, [k, n], TILE_K)?,
        x: operand_address(x),
        gelu: operand_address(gelu),
        c: operand_address(&call.c),
        sums: slice_address(*sums),
        leading_dims,
        sizes,
        unused: 0,
    };
    let kernel = GeluGradKernel { is_bf16: call.dtype == DType::BF16 };
    Some((kernel, params, [u32::try_from(tiles.min(units)).ok()?, 1, 1]))
}

#[cfg(test)]
mod tests {
    use forebay_core::backend::{Epilogue, MatmulCall, MatrixOperand, SegmentId, Slice};
    use forebay_core::dtype::DType;

    use super::{GeluGradKernel, REQUIRED_ARCH, plan_gelu_grad};

    fn operand(row_stride: u64) -> MatrixOperand {
        MatrixOperand { segment: SegmentId(1 << 20), offset: 0, row_stride, col_stride: 1, batch_stride: 0 }
    }

    fn call() -> MatmulCall {
        let sums = Slice { segment: SegmentId(1 << 20), offset: 0, bytes: 1 << 20 };
        MatmulCall {
            dtype: DType::BF16,
            dtype_b: DType::BF16,
            dtype_out: DType::BF16,
            m: 8192,
            n: 3072,
            k: 768,
            batch: 1,
            a: operand(768),
            b: operand(3072),
            c: operand(3072),
            beta: 0.0,
            epilogue: Epilogue::GeluGrad { x: operand(3072), gelu: operand(3072), row_block_sums: sums },
        }
    }

    #[test]
    fn unsupported_operands_are_declined() {
        let declined = |call: MatmulCall| plan_gelu_grad(&call, REQUIRED_ARCH, 132).is_none();
        assert!(plan_gelu_grad(&call(), 80, 132).is_none() && plan_gelu_grad(&call(), 100, 132).is_none());
        assert!(declined(MatmulCall { epilogue: Epilogue::None, ..call() }));
        assert!(declined(MatmulCall {
            dtype: DType::F32,
            dtype_b: DType::F32,
            dtype_out: DType::F32,
            ..call()
        }));
        assert!(declined(MatmulCall { dtype_out: DType::F32, ..call() }));
        assert!(declined(MatmulCall { beta: 1.0, ..call() }));
        assert!(declined(MatmulCall { batch: 2, ..call() }));
        // Unsupported: a column-major b, rows that are not multiples of 16 bytes, sizes beyond 32 bits.
        assert!(declined(MatmulCall {
            b: MatrixOperand { row_stride: 1, col_stride: 768, ..operand(1) },
            ..call()
        }));
        assert!(declined(MatmulCall { n: 3070, c: operand(3070), ..call() }));
        assert!(declined(MatmulCall { m: 1 << 40, ..call() }));
        let Epilogue::GeluGrad { gelu, row_block_sums: sums, .. } = call().epilogue else { unreachable!() };
        let x = MatrixOperand { offset: 2, ..operand(3072) };
        assert!(declined(MatmulCall {
            epilogue: Epilogue::GeluGrad { x, gelu, row_block_sums: sums },
            ..call()
        }));
    }

    #[test]
    fn blocks_share_the_tiles_and_fit_in_shared_memory() {
        use crate::native_kernels::NativeKernel;

        for is_bf16 in [false, true] {
            let kernel = GeluGradKernel { is_bf16 };
            assert_eq!((kernel.block_threads(), kernel.shared_bytes()), (512, 222_272));
            assert!(kernel.shared_bytes() <= 227 << 10);
        }
    }
}

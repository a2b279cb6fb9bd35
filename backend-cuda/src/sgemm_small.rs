//! Small f32 matrix products by a native kernel. A product may have fewer large tiles than a device has
//! multiprocessors. cuBLASLt's kernels then reach a third of this kernel's rate, and a call costs more than a
//! launch.
//!
//! The kernel is `shaders/cuda/sgemm_small.cu`. A new tile goes to `CONFIGS`, with its fitted costs. Shapes and
//! layouts alone select the kernel, so the same product always gives the same bits.

use std::ffi::CStr;
use std::sync::Arc;

use forebay_core::backend::{Epilogue, MatmulCall, MatrixOperand, SourceError};
use forebay_core::dtype::DType;

use crate::backend::{operand_address, slice_address};
use crate::context::{Context, CudaStream};
use crate::gelu_grad;
use crate::kernels::{KernelRegistry, SubmitStatus};
use crate::native_kernels::{LaunchPlan, NativeKernel, NativeKernels, convert_all, with_defines};
use crate::settings;
use crate::tensor_map::TensorMap;

/// Larger products run on cuBLASLt: maximum operations, two for each multiplication. Measured on an H100: the
/// kernel is faster for 1,024³ and slower for 2,048³.
const MAX_FLOPS: u64 = 1 << 31;
/// Minimum rows, columns (`MIN_EXTENT`) and elements of a sum (`MIN_K`): smaller products consist of partial
/// tiles.
const MIN_EXTENT: u64 = 8;
const MIN_K: u64 = 32;
/// If c has more elements and their sums at most `FEW_STAGES` stages, writing c dominates: cuBLASLt's larger
/// tiles are faster.
const MANY_OUTPUTS: u64 = 264 * 64 * 64;
const FEW_STAGES: u64 = 8;

/// Elements of each row along K in one stage, and the number of stages in shared memory.
const TILE_K: u32 = 32;
const STAGES: u32 = 4;

/// Tile of c that a block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SgemmTile {
    rows: u32,
    cols: u32,
    /// Part of the tile that a thread computes.
    thread_rows: u32,
    thread_cols: u32,
    /// Groups of threads that split the sums of the tile (slice-K).
    k_slices: u32,
}

const SMALL_TILE: SgemmTile = SgemmTile { rows: 32, cols: 32, thread_rows: 8, thread_cols: 8, k_slices: 8 };
const MEDIUM_TILE: SgemmTile = SgemmTile { rows: 64, cols: 32, thread_rows: 4, thread_cols: 8, k_slices: 4 };
const LARGE_TILE: SgemmTile = SgemmTile { rows: 64, cols: 64, thread_rows: 8, thread_cols: 8, k_slices: 2 };

impl SgemmTile {
    /// Returns the threads that compute the tile.
    fn threads(&self) -> u32 {
        self.rows / self.thread_rows * (self.cols / self.thread_cols) * self.k_slices
    }
}

/// Work partition and its cost model, fitted to 250 products of all shapes on an H100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SgemmConfig {
    /// Tile of c that a block computes.
    pub tile: SgemmTile,
    /// Blocks of a cluster, which share the sums of a tile.
    pub cluster_blocks: u32,
    /// Maximum stages of a block; for longer sums cuBLASLt is faster, because it splits K further.
    max_stages: u64,
    /// Cost in nanoseconds: of the launch, of a stage of one wave of blocks, and of a wave's remaining work.
    launch_ns: u64,
    stage_ns: u64,
    wave_ns: u64,
}

/// All configurations, from small to large tiles.
pub const CONFIGS: [SgemmConfig; 6] = [
    SgemmConfig::new(SMALL_TILE, 8, 8, [4600, 285, 4000]),
    SgemmConfig::new(SMALL_TILE, 4, 8, [4000, 280, 2000]),
    SgemmConfig::new(SMALL_TILE, 2, 8, [4000, 285, 100]),
    SgemmConfig::new(SMALL_TILE, 1, 32, [2250, 280, 500]),
    SgemmConfig::new(MEDIUM_TILE, 1, 32, [2200, 445, 680]),
    SgemmConfig::new(LARGE_TILE, 1, 32, [2650, 800, 670]),
];

impl SgemmConfig {
    const fn new(
        tile: SgemmTile,
        cluster_blocks: u32,
        max_stages: u64,
        [launch_ns, stage_ns, wave_ns]: [u64; 3],
    ) -> Self {
        Self { tile, cluster_blocks, max_stages, launch_ns, stage_ns, wave_ns }
    }

    /// Returns the fastest configuration for a product on a device of `units` multiprocessors; `None` if
    /// cuBLASLt is faster.
    fn choose(call: &MatmulCall, units: u64) -> Option<Self> {
        let MatmulCall { m, n, k, batch, .. } = *call;
        let operations = [2, m, n, k, batch].iter().try_fold(1_u64, |product, x| product.checked_mul(*x))?;
        let is_write_bound = m.saturating_mul(n).saturating_mul(batch) > MANY_OUTPUTS
            && div_ceil_pow2(k, TILE_K) <= FEW_STAGES;
        if operations > MAX_FLOPS || is_write_bound || m.min(n) < MIN_EXTENT || k < MIN_K {
            return None;
        }
        let config = CONFIGS.into_iter().min_by_key(|config| config.estimate_time(call, units))?;
        (config.stages_per_block(k) <= config.max_stages).then_some(config)
    }

    /// Returns the stages of a block.
    fn stages_per_block(&self, k: u64) -> u64 {
        div_ceil_pow2(k, TILE_K * self.cluster_blocks)
    }

    /// Estimates the nanoseconds of a product, times `units`.
    fn estimate_time(&self, call: &MatmulCall, units: u64) -> u64 {
        let tiles = div_ceil_pow2(call.m, self.tile.rows) * div_ceil_pow2(call.n, self.tile.cols);
        let blocks = tiles * call.batch * u64::from(self.cluster_blocks);
        self.launch_ns * units
            + self.stages_per_block(call.k) * self.stage_ns * blocks.max(units)
            + self.wave_ns * blocks
    }
}

/// Returns `extent` divided by a power of two, rounded up. Uses shifts, because six configurations are
/// compared for each product.
fn div_ceil_pow2(extent: u64, of: u32) -> u64 {
    (extent + u64::from(of - 1)) >> of.trailing_zeros()
}

/// Operation fused with a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SgemmEpilogue {
    /// No operation.
    None,
    /// Adds one value to each column.
    Bias,
    /// Writes the sums of a's rows.
    RowSums,
}

/// A kernel for one configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SgemmKernel {
    /// Tile of c that a block computes.
    pub tile: SgemmTile,
    /// Blocks of a cluster.
    pub cluster_blocks: u32,
    /// If true, the operand (a, b) is MN-major: neighbours in memory are in the next row of a or column of b.
    /// Else it is K-major.
    pub mn_major: [bool; 2],
    /// Fused operation.
    pub epilogue: SgemmEpilogue,
}

impl NativeKernel for SgemmKernel {
    const FALLBACK_MESSAGE: &'static str = "small products of f32 run on cuBLASLt, which takes longer";

    fn source(&self) -> String {
        let SgemmTile { rows, cols, thread_rows, thread_cols, k_slices } = self.tile;
        let defines = [
            ("ROWS", rows),
            ("COLS", cols),
            ("THREAD_ROWS", thread_rows),
            ("THREAD_COLS", thread_cols),
            ("K_SLICES", k_slices),
            ("DEPTH", TILE_K),
            ("STAGES", STAGES),
            ("CLUSTER_BLOCKS", self.cluster_blocks),
            ("A_MN_MAJOR", self.mn_major[0].into()),
            ("B_MN_MAJOR", self.mn_major[1].into()),
            ("BIAS", (self.epilogue == SgemmEpilogue::Bias).into()),
            ("ROW_SUMS", (self.epilogue == SgemmEpilogue::RowSums).into()),
        ];
        with_defines(&defines, &[forebay_shaders::cuda::TMA_PIPELINE, forebay_shaders::cuda::SGEMM_SMALL])
    }

    fn entry(&self) -> &'static CStr {
        c"sgemm_small"
    }

    fn block_threads(&self) -> u32 {
        // One more warp loads the operands.
        self.tile.threads() + 32
    }

    fn shared_bytes(&self) -> u32 {
        let SgemmTile { rows, cols, k_slices: slices, .. } = self.tile;
        let stages = STAGES * (rows + cols) * TILE_K;
        // The sums of all slices, in rows padded by four elements, and those of a's rows reuse the memory of
        // the stages.
        let sums = slices * rows * (cols + 4) + self.tile.threads();
        // The barriers come before the tiles, which begin at multiples of 1024 bytes.
        1024 + 4 * stages.max(sums)
    }
}

/// `Params` of the kernel.
#[repr(C)]
struct SgemmParams {
    a: TensorMap,
    b: TensorMap,
    bias: u64,
    c: u64,
    row_sums: u64,
    /// Strides of c between rows and between matrices of the batch, in elements.
    c_row_stride: i64,
    c_batch_stride: i64,
    /// Sizes: m, n, k, number of tiles in a row.
    sizes: [i32; 4],
    beta: f32,
    unused: i32,
}

/// Returns an operand's tensor map, and whether the operand is MN-major; `None` if TMA cannot address the
/// operand.
fn operand_tensor_map(
    call: &MatmulCall,
    operand: &MatrixOperand,
    [extent, line_stride, sum_stride]: [u64; 3],
    tile: u32,
) -> Option<(TensorMap, bool)> {
    let mn_major = match (line_stride, sum_stride) {
        (_, 1) => false,
        (1, _) => true,
        _ => return None,
    };
    let (sizes, leading_dim, boxes) = match mn_major {
        true => ([extent, call.k], sum_stride, [tile, TILE_K]),
        false => ([call.k, extent], line_stride, [TILE_K, tile]),
    };
    // TMA cannot describe rows that overlap, or one matrix shared by a whole batch.
    if leading_dim < sizes[0] || call.batch > 1 && operand.batch_stride == 0 {
        return None;
    }
    let map = TensorMap::new(
        DType::F32,
        operand_address(operand),
        &[sizes[0], sizes[1], call.batch],
        &[4 * leading_dim, 4 * operand.batch_stride],
        &[boxes[0], boxes[1], 1],
        !mn_major,
    )?;
    Some((map, mn_major))
}

/// Returns the kernel, its parameters and the grid of a call; `None` if the call belongs to cuBLASLt.
fn plan_sgemm(call: &MatmulCall, arch: u32, units: u64) -> Option<LaunchPlan<SgemmKernel, SgemmParams>> {
    let MatmulCall { m, n, k, batch, .. } = *call;
    let is_f32 = [call.dtype, call.dtype_b, call.dtype_out] == [DType::F32; 3];
    // Clusters and TMA exist from Hopper on.
    if arch < 90 || !is_f32 || settings::allow_tf32() {
        return None;
    }
    let MatrixOperand { row_stride, col_stride, batch_stride, .. } = call.c;
    // Rows of c that overlap would be written twice.
    if batch > 65_535 || col_stride != 1 || row_stride < n || batch > 1 && batch_stride == 0 {
        return None;
    }
    let SgemmConfig { tile, cluster_blocks, .. } = SgemmConfig::choose(call, units)?;
    let (epilogue, bias, row_sums) = match &call.epilogue {
        Epilogue::None => (SgemmEpilogue::None, 0, 0),
        Epilogue::Bias(bias) if batch == 1 => (SgemmEpilogue::Bias, slice_address(*bias), 0),
        Epilogue::RowSums(sums) if batch == 1 => (SgemmEpilogue::RowSums, 0, slice_address(*sums)),
        _ => return None,
    };
    let (a, a_is_mn_major) =
        operand_tensor_map(call, &call.a, [m, call.a.row_stride, call.a.col_stride], tile.rows)?;
    let (b, b_is_mn_major) =
        operand_tensor_map(call, &call.b, [n, call.b.col_stride, call.b.row_stride], tile.cols)?;
    // The kernel sums a's rows only if a is MN-major.
    if epilogue == SgemmEpilogue::RowSums && !a_is_mn_major {
        return None;
    }
    let kernel = SgemmKernel { tile, cluster_blocks, mn_major: [a_is_mn_major, b_is_mn_major], epilogue };
    let (tile_rows, tile_columns) = (div_ceil_pow2(m, tile.rows), div_ceil_pow2(n, tile.cols));
    let blocks = [
        u32::try_from(tile_rows * tile_columns * u64::from(cluster_blocks)).ok()?,
        u32::try_from(batch).ok()?,
        1,
    ];
    let [c_row_stride, c_batch_stride] = convert_all([row_stride, batch_stride])?;
    let params = SgemmParams {
        a,
        b,
        bias,
        c: operand_address(&call.c),
        row_sums,
        c_row_stride,
        c_batch_stride,
        sizes: convert_all([m, n, k, tile_columns])?,
        beta: call.beta,
        unused: 0,
    };
    Some((kernel, params, blocks))
}

/// The kernels of one device: those of this file, and of [`gelu_grad`].
#[derive(Debug)]
pub(crate) struct GemmKernels {
    sgemm: NativeKernels<SgemmKernel>,
    gelu_grad: NativeKernels<gelu_grad::GeluGradKernel>,
    /// Number of multiprocessors.
    sm_count: u64,
}

impl GemmKernels {
    pub(crate) fn new(units: u32) -> Self {
        Self {
            sgemm: NativeKernels::default(),
            gelu_grad: NativeKernels::default(),
            sm_count: units.max(1).into(),
        }
    }

    /// Enqueues a product on `stream` if its kernel is compiled. Without a stream, only starts to compile the
    /// kernel. If `wait` is true, waits for the compiler.
    pub(crate) fn submit(
        &self,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
        stream: Option<&CudaStream>,
        call: &MatmulCall,
        wait: bool,
    ) -> Result<SubmitStatus, SourceError> {
        let (arch, units) = (kernels.arch(), self.sm_count);
        if let Some(plan) = gelu_grad::plan_gelu_grad(call, arch, units) {
            // SAFETY: the kernel takes the parameters of its plan, in this layout; the core has checked that
            // the operands lie inside their segments.
            unsafe { self.gelu_grad.submit(context, kernels, stream, plan, wait) }
        } else if let Some(plan) = plan_sgemm(call, arch, units) {
            // SAFETY: as above.
            unsafe { self.sgemm.submit(context, kernels, stream, plan, wait) }
        } else {
            Ok(SubmitStatus::Declined)
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::backend::MatmulCall;

    use super::{LARGE_TILE, MEDIUM_TILE, SMALL_TILE, SgemmConfig};
    use crate::cublaslt::tests::call;

    #[test]
    fn tiles_and_splits_are_those_measured_to_be_fastest() {
        // Measured on an H100 against all other configurations and cuBLASLt; docs/lab/2026-11.md has the
        // times.
        for (m, n, k, best) in [
            (64, 64, 64, Some((SMALL_TILE, 1))),
            (256, 256, 256, Some((SMALL_TILE, 1))),
            (256, 10, 1024, Some((SMALL_TILE, 4))),
            (24, 16, 2000, Some((SMALL_TILE, 8))),
            (256, 1024, 784, Some((MEDIUM_TILE, 1))),
            (256, 1024, 1024, Some((MEDIUM_TILE, 1))),
            (1024, 784, 256, Some((LARGE_TILE, 1))),
            (1024, 1024, 256, Some((LARGE_TILE, 1))),
            (1024, 1024, 1024, Some((LARGE_TILE, 1))),
            (32, 32, 16384, None),
            (3000, 3000, 36, None),
            (2048, 2048, 2048, None),
            (1 << 40, 1 << 40, 1 << 40, None),
        ] {
            let config = SgemmConfig::choose(&MatmulCall { m, n, k, ..call() }, 132)
                .map(|config| (config.tile, config.cluster_blocks));
            assert_eq!(config, best, "{m} x {n} x {k}");
        }
    }
}

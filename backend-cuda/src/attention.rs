//! Attention on the tensor cores: kernels in CUDA C++ for f16 and bf16, with head sizes of up to 128
//! elements.
//!
//! The kernels are in `shaders/cuda` (`attention_*.cu`); this file plans their tiles, parameters and grids. Each
//! is compiled for its head size and dtype at first use and cached on disk like all others. Hopper (sm_90) has
//! a form with `wgmma` and TMA for head sizes 64 and 128. Everything else from sm_80 on uses the form with
//! `mma`. Long sequences have a backward pass of their own on Hopper (`attention_bwd_one_pass.cu`).

use std::ffi::CStr;
use std::sync::Arc;

use forebay_core::backend::{
    AttentionCall, AttentionExtents, AttentionGradients, AttentionOperand, SourceError,
};
use forebay_core::dtype::DType;
use forebay_shaders::cuda;

use crate::attention_f32::AttentionF32Kernels;
use crate::backend::{device_address, slice_address};
use crate::context::{Context, CudaStream};
use crate::kernels::{KernelRegistry, SubmitStatus};
use crate::native_kernels::{
    NativeKernel, NativeKernelLookup, NativeKernels, convert_all, launch_native, with_defines,
};
use crate::settings;
use crate::tensor_map::TensorMap;

/// The part of attention that a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionPass {
    /// The output.
    Forward,
    /// The gradient of the queries, and the values for each query that the next pass needs.
    BackwardQueries,
    /// The gradients of keys and values.
    BackwardKeysValues,
    /// In one pass: the values for each query that the next pass needs.
    OnePassRows,
    /// In one pass: the gradients of keys and values, and sums for the gradient of the queries.
    OnePassBlocks,
    /// In one pass: the gradient of the queries from its sums.
    OnePassSums,
}

impl AttentionPass {
    const TWO_PASS_BACKWARD: [Self; 2] = [Self::BackwardQueries, Self::BackwardKeysValues];
    /// The kernels of the backward pass of long sequences, in their order.
    pub const ONE_PASS_BACKWARD: [Self; 3] = [Self::OnePassRows, Self::OnePassBlocks, Self::OnePassSums];

    fn is_one_pass(self) -> bool {
        Self::ONE_PASS_BACKWARD.contains(&self)
    }
}

/// The kind of mask, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskKind {
    /// No mask.
    None,
    /// A mask of bools; true keeps a score.
    Bool,
    /// An f32 mask that is added to the scores.
    F32,
    /// A mask of the same dtype as q, k and v that is added to the scores.
    SameAsInput,
}

impl MaskKind {
    /// Returns the kind for a mask's dtype and q's dtype; `None` if no kernel supports the pair.
    fn from_dtypes(mask: Option<DType>, dtype: DType) -> Option<Self> {
        Some(match mask {
            None => Self::None,
            Some(DType::Bool) => Self::Bool,
            Some(DType::F32) => Self::F32,
            Some(mask) if mask == dtype => Self::SameAsInput,
            Some(_) => return None,
        })
    }
}

/// A kernel for one pass, head size and dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionKernel {
    /// The pass that the kernel computes.
    pub pass: AttentionPass,
    /// Elements of a head: a multiple of 8, at most 128.
    pub head_dim: u32,
    /// If true, elements are bf16, else f16.
    pub is_bf16: bool,
    /// If true, the kernel multiplies by `wgmma`, which only sm_90a has, and loads by TMA.
    pub uses_wgmma: bool,
    /// The kind of mask.
    pub mask: MaskKind,
    /// If true, rows of the mask are contiguous pairs of elements, which the passes over queries load at once.
    pub loads_mask_pairs: bool,
    /// If true, TMA loads tiles of an additive mask where shared memory has room for them.
    pub loads_mask_tiles: bool,
    /// If true, dropout is applied to the attention weights.
    pub has_dropout: bool,
}

/// Warpgroups of a block of [`AttentionPass::OnePassBlocks`] that multiply, with 64 keys each.
const ONE_PASS_UNITS: u32 = AttentionExtents::BLOCK_KEYS as u32 / 64;

/// Tile sizes of a kernel. Measured on an H100, 8 x 12 x 1024 x 64.
struct Tiling {
    /// Warps of a block, and fragments of 16 rows for each warp.
    warps: u32,
    row_fragments: u32,
    /// Rows of the tiles over which a block iterates, and the number of tiles in shared memory.
    tile_columns: u32,
    stages: u32,
    /// Blocks on a multiprocessor; this bounds the registers of a thread.
    blocks_per_sm: u32,
    /// If true, the block's own rows stay in registers.
    keeps_rows_in_registers: bool,
}

impl Tiling {
    fn block_rows(&self) -> u32 {
        16 * self.warps * self.row_fragments
    }
}

impl AttentionKernel {
    /// Returns the kernel for a pass on an architecture such as 90, without mask and dropout; `None` if there
    /// is none.
    #[must_use]
    pub fn new(pass: AttentionPass, head: u64, dtype: DType, arch: u32) -> Option<Self> {
        let head_dim = u32::try_from(head).ok().filter(|h| (8..=128).contains(h) && h.is_multiple_of(8))?;
        let is_missing = pass.is_one_pass() && (arch != 90 || head_dim != 64);
        (arch >= 80 && !is_missing && matches!(dtype, DType::BF16 | DType::F16)).then_some(Self {
            pass,
            head_dim,
            is_bf16: dtype == DType::BF16,
            uses_wgmma: arch == 90 && matches!(head_dim, 64 | 128),
            mask: MaskKind::None,
            loads_mask_pairs: false,
            loads_mask_tiles: false,
            has_dropout: false,
        })
    }

    fn tiling(&self) -> Tiling {
        if let Some(warps) = self.one_pass_warps() {
            return Tiling {
                warps,
                row_fragments: 1,
                tile_columns: 64,
                stages: 3,
                blocks_per_sm: 1,
                keeps_rows_in_registers: false,
            };
        }
        // Masks and dropout need registers, so fewer blocks fit on a multiprocessor.
        let has_mask_or_dropout = self.mask != MaskKind::None || self.has_dropout;
        let has_mask_tiles_only = self.loads_mask_tiles && !self.has_dropout;
        let key = (self.uses_wgmma, self.head_dim > 64, self.pass);
        let (warps, row_fragments, tile_columns, blocks_per_sm, keeps_rows_in_registers) = match key {
            (true, false, AttentionPass::Forward) if has_mask_or_dropout => (4, 1, 64, 3, true),
            (true, false, AttentionPass::BackwardQueries) if has_mask_or_dropout => (4, 1, 64, 3, false),
            (true, false, AttentionPass::BackwardKeysValues) if has_mask_tiles_only => (4, 1, 64, 3, false),
            (true, false, AttentionPass::BackwardKeysValues) if has_mask_or_dropout => (4, 1, 64, 2, false),
            (false, false, AttentionPass::Forward) if has_mask_or_dropout => (4, 1, 64, 3, true),
            (false, false, AttentionPass::BackwardQueries) if has_mask_or_dropout => (4, 1, 64, 2, true),
            (false, true, AttentionPass::Forward) if has_mask_or_dropout => (4, 1, 64, 2, false),
            (true, false, AttentionPass::Forward) => (4, 1, 64, 4, true),
            (true, false, AttentionPass::BackwardQueries) => (4, 1, 64, 4, false),
            (true, false, _) => (4, 1, 64, 3, false),
            (true, true, _) => (4, 1, 64, 2, false),
            (false, false, AttentionPass::Forward) => (4, 1, 64, 4, false),
            (false, false, AttentionPass::BackwardQueries) => (4, 1, 64, 3, true),
            (false, false, _) => (4, 1, 64, 2, true),
            (false, true, AttentionPass::Forward) => (4, 2, 64, 1, false),
            (false, true, _) => (4, 1, 32, 2, false),
        };
        Tiling { warps, row_fragments, tile_columns, stages: 2, blocks_per_sm, keeps_rows_in_registers }
    }

    /// Returns the warps of a block of a kernel of the one-pass form.
    fn one_pass_warps(&self) -> Option<u32> {
        match self.pass {
            AttentionPass::OnePassRows => Some(8),
            AttentionPass::OnePassBlocks => Some(4 * (ONE_PASS_UNITS + 1)),
            AttentionPass::OnePassSums => Some(4),
            AttentionPass::Forward | AttentionPass::BackwardQueries | AttentionPass::BackwardKeysValues => {
                None
            }
        }
    }

    /// Returns the bytes of shared memory for everything but the mask.
    fn operand_bytes(&self) -> u32 {
        let Tiling { tile_columns: columns, stages, .. } = self.tiling();
        if self.pass.is_one_pass() {
            if self.pass != AttentionPass::OnePassBlocks {
                return 0;
            }
            let keys = ONE_PASS_UNITS * 64;
            // Keys, values and two tiles of score gradients; tiles of queries and gradients with two values for each
            // query; two tiles of sums.
            return 1024 + 4 * keys * 128 + stages * columns * (2 * 128 + 2 * 4) + 2 * columns * 64 * 4;
        }
        let rows = self.tiling().block_rows();
        let tile = |rows: u32| rows * self.head_dim.div_ceil(64) * 128;
        let stats_bytes =
            if self.pass == AttentionPass::BackwardKeysValues { stages * 2 * columns * 4 } else { 0 };
        let row_tiles = if self.pass == AttentionPass::Forward { 1 } else { 2 };
        // Tiles begin at multiples of 1024 bytes.
        1024 + row_tiles * tile(rows) + 2 * stages * tile(columns) + stats_bytes
    }

    /// Returns the bytes of a tile of the mask in shared memory.
    fn mask_tile_bytes(&self) -> u32 {
        64 * 64 * if self.mask == MaskKind::F32 { 4 } else { 2 }
    }

    /// Returns the tiles of the mask in shared memory: one for each stage, or as many as fit without fewer blocks
    /// on a multiprocessor.
    fn mask_stages(&self) -> u32 {
        if !self.loads_mask_tiles {
            return 0;
        }
        let Tiling { stages, blocks_per_sm, .. } = self.tiling();
        let room = HOPPER_SHARED_BYTES / blocks_per_sm - BLOCK_SHARED_BYTES;
        (room.saturating_sub(self.operand_bytes()) / self.mask_tile_bytes()).min(stages)
    }
}

impl NativeKernel for AttentionKernel {
    const FALLBACK_MESSAGE: &'static str = "attention runs on the portable kernels, which are slower";

    fn entry(&self) -> &'static CStr {
        match self.pass {
            AttentionPass::Forward => c"attention_fwd",
            AttentionPass::BackwardQueries => c"attention_bwd_queries",
            AttentionPass::BackwardKeysValues => c"attention_bwd_keys",
            AttentionPass::OnePassRows => c"attention_bwd_rows",
            AttentionPass::OnePassBlocks => c"attention_bwd_blocks",
            AttentionPass::OnePassSums => c"attention_bwd_sums",
        }
    }

    fn block_threads(&self) -> u32 {
        self.tiling().warps * 32
    }

    fn shared_bytes(&self) -> u32 {
        self.operand_bytes() + self.mask_stages() * self.mask_tile_bytes()
    }

    fn source(&self) -> String {
        let tiling = self.tiling();
        let mut defines = vec![
            ("HEAD", self.head_dim),
            ("BF16", self.is_bf16.into()),
            ("HOPPER", self.uses_wgmma.into()),
            ("PASS", self.pass as u32),
            ("WARPS", tiling.warps),
            ("ROWS16", tiling.row_fragments),
            ("COLS", tiling.tile_columns),
            ("STAGES", tiling.stages),
            ("BLOCKS", tiling.blocks_per_sm),
            ("ROWS_IN_REGISTERS", tiling.keeps_rows_in_registers.into()),
            ("MASK", self.mask as u32),
            ("MASK_PAIRS", (self.loads_mask_pairs && self.pass != AttentionPass::BackwardKeysValues).into()),
            ("MASK_STAGES", self.mask_stages()),
            ("DROPOUT", self.has_dropout.into()),
        ];
        if self.pass.is_one_pass() {
            // A thread of each unit and a helper share the 512 registers of four threads.
            defines.extend([("UNITS", ONE_PASS_UNITS), ("UNIT_REGISTERS", 160), ("HELPER_REGISTERS", 32)]);
        }
        let pass = match self.pass {
            AttentionPass::Forward => cuda::ATTENTION_FWD,
            AttentionPass::BackwardQueries | AttentionPass::BackwardKeysValues => cuda::ATTENTION_BWD,
            AttentionPass::OnePassRows | AttentionPass::OnePassBlocks | AttentionPass::OnePassSums => {
                cuda::ATTENTION_BWD_ONE_PASS
            }
        };
        let shared = [cuda::TMA_PIPELINE, cuda::PACKED_HALVES, cuda::ATTENTION_COMMON, cuda::ATTENTION_MASK];
        with_defines(&defines, &[&shared[..], &[pass]].concat())
    }

    fn options(&self) -> &'static [&'static str] {
        if self.uses_wgmma { &["--gpu-architecture=sm_90a"] } else { &[] }
    }
}

/// `HeadStrides` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct HeadStrides {
    address: u64,
    batch_stride: i64,
    head_stride: i64,
    row_stride: i32,
    unused: i32,
}

impl HeadStrides {
    fn all([a, b, c, d]: [&AttentionOperand; 4]) -> Option<[Self; 4]> {
        let of = |operand| Self::new(operand, 8);
        Some([of(a)?, of(b)?, of(c)?, of(d)?])
    }

    /// Returns `None` if rows do not begin at multiples of 16 bytes, which are `vector` elements, or lie 2^31
    /// elements apart or more.
    pub(crate) fn new(operand: &AttentionOperand, vector: u64) -> Option<Self> {
        let address = device_address(operand.segment, operand.offset);
        let [batch, head, row] = [operand.batch_stride, operand.head_stride, operand.row_stride];
        if !address.is_multiple_of(16) || [batch, head, row].iter().any(|step| !step.is_multiple_of(vector)) {
            return None;
        }
        let [batch_stride, head_stride] = convert_all([batch, head])?;
        Some(Self { address, batch_stride, head_stride, row_stride: i32::try_from(row).ok()?, unused: 0 })
    }
}

/// `Params` of the kernels.
#[repr(C)]
struct AttentionParams {
    /// Tensor maps of q, k, v, the output's gradient and the mask; `NONE` if the kernel does not load by TMA.
    maps: [TensorMap; 5],
    /// Operands: q, k, v, out, and the gradients of out, q, k, v.
    heads: [HeadStrides; 8],
    lse: u64,
    row_stats: u64,
    /// Address of the gradient sums; 0 if none are requested.
    grad_sums: u64,
    /// Batch, heads, kv heads, queries, keys, left, right, heads per group.
    sizes: [i32; 8],
    scale: f32,
    /// Groups of heads whose blocks iterate over tiles in ascending order, in one pass.
    ascending_groups: i32,
    /// The fields from here on are not parameters of kernels without mask and dropout.
    mask: u64,
    /// Strides of the batch and the head.
    mask_outer_strides: [i64; 2],
    /// Strides of the query and the key.
    mask_inner_strides: [u32; 2],
    philox_state: u64,
    threshold: u32,
    keep_scale: f32,
}

impl AttentionParams {
    fn new(call: &AttentionCall) -> Option<Self> {
        let ([g, dq, dk, dv], row_stats, grad_sums) = match &call.backward {
            Some(b) => (
                HeadStrides::all([&b.out, &b.q, &b.k, &b.v])?,
                slice_address(b.scratch),
                b.grad_sums.map_or(0, slice_address),
            ),
            None => ([HeadStrides::default(); 4], 0, 0),
        };
        let [q, k, v, out] = HeadStrides::all([&call.q, &call.k, &call.v, &call.out])?;
        // The keys and values of the heads in flight should stay in the L2 cache.
        let bytes = 4 * call.keys * call.head_dim;
        let group = (L2_BUDGET / bytes.max(1)).clamp(1, call.batch * call.heads);
        let (mask, [batch, head, query, key]) =
            call.mask.map_or((0, [0; 4]), |mask| (device_address(mask.segment, mask.offset), mask.strides));
        let (philox_state, threshold, keep_scale) =
            call.dropout.map_or((0, 0, 1.0), |d| (slice_address(d.philox_state), d.threshold, d.keep_scale));
        Some(Self {
            maps: [TensorMap::NONE; 5],
            heads: [q, k, v, out, g, dq, dk, dv],
            lse: slice_address(call.lse),
            row_stats,
            grad_sums,
            sizes: convert_all([
                call.batch,
                call.heads,
                call.kv_heads,
                call.queries,
                call.keys,
                call.window_left,
                call.window_right,
                group,
            ])?,
            scale: call.scale,
            ascending_groups: 0,
            mask,
            mask_outer_strides: convert_all([batch, head])?,
            mask_inner_strides: convert_all([query, key])?,
            philox_state,
            threshold,
            keep_scale,
        })
    }
}

/// Returns the tensor maps of q, k, v and the output's gradient; `None` if TMA cannot address one of them.
fn tensor_maps(call: &AttentionCall) -> Option<[TensorMap; 4]> {
    let map = |operand: &AttentionOperand, heads: u64, rows: u64| {
        let sizes = [call.head_dim, rows, heads, call.batch];
        let steps = [operand.row_stride, operand.head_stride, operand.batch_stride].map(|step| 2 * step);
        TensorMap::new(
            call.dtype,
            device_address(operand.segment, operand.offset),
            &sizes,
            &steps,
            &[64, 64, 1, 1],
            true,
        )
    };
    let q = map(&call.q, call.heads, call.queries)?;
    let k = map(&call.k, call.kv_heads, call.keys)?;
    let v = map(&call.v, call.kv_heads, call.keys)?;
    let grad = match &call.backward {
        Some(backward) => map(&backward.out, call.heads, call.queries)?,
        None => TensorMap::NONE,
    };
    Some([q, k, v, grad])
}

/// Returns the tensor map of an additive mask, or `None` if TMA cannot address the mask. A dimension along which the
/// mask is broadcast has one element.
fn mask_map(call: &AttentionCall) -> Option<TensorMap> {
    let mask = call.mask.as_ref()?;
    let [batch, head, query, key] = mask.strides;
    if key != 1 || (query == 0 && call.queries > 1) {
        return None;
    }
    let extent = |step: u64, extent: u64| if step == 0 { 1 } else { extent };
    let sizes = [call.keys, call.queries, extent(head, call.heads), extent(batch, call.batch)];
    let bytes = mask.dtype.size() as u64;
    let steps = [query, head, batch].map(|step| step * bytes);
    let row_elements = 128 / mask.dtype.size() as u32;
    TensorMap::new(
        mask.dtype,
        device_address(mask.segment, mask.offset),
        &sizes,
        &steps,
        &[row_elements, 64, 1, 1],
        true,
    )
}

/// Bytes of shared memory of a Hopper multiprocessor, and of a block besides its tiles: what the driver takes, and
/// barriers.
const HOPPER_SHARED_BYTES: u32 = 228 << 10;
const BLOCK_SHARED_BYTES: u32 = 1024 + 64;

/// Bytes of the L2 cache that the rows of the heads in flight may take: half of an H100's.
const L2_BUDGET: u64 = 24 << 20;

/// Bytes of queries, gradients and sums of the heads in flight in one pass. Blocks of a head visit a tile soon after
/// each other, so these may take all of the L2 cache.
const ONE_PASS_L2_BUDGET: u64 = 48 << 20;

/// Returns the order of the blocks of [`AttentionPass::OnePassBlocks`]: heads of a group, and the number of groups
/// whose blocks iterate over tiles in ascending order. `heads` heads of keys have `bytes` bytes of queries, gradients
/// and sums each.
///
/// The blocks of the last group iterate in descending order. They keep the device busy to the end, but wait for each
/// other longer, so there are two groups if possible.
fn one_pass_order(heads: u64, bytes: u64) -> [u64; 2] {
    let group = (ONE_PASS_L2_BUDGET / bytes.max(1)).clamp(1, heads.div_ceil(2).max(1));
    [group, heads.div_ceil(group).saturating_sub(1)]
}

/// Reports whether a backward call takes one pass, for which it needs more scratch memory. The call has neither mask
/// nor dropout, and TMA addresses its operands.
fn takes_one_pass(call: &AttentionCall) -> bool {
    let scratch = call.backward.as_ref().map(|backward| backward.scratch.bytes);
    call.extents().one_pass_scratch().is_some_and(|bytes| scratch.is_none_or(|scratch| bytes <= scratch))
}

/// The attention kernels of one device.
#[derive(Debug, Default)]
pub(crate) struct AttentionKernels {
    kernels: NativeKernels<AttentionKernel>,
    f32_kernels: AttentionF32Kernels,
}

/// Reports whether every row of a call's mask consists of contiguous and aligned pairs of elements.
fn has_mask_pairs(call: &AttentionCall) -> bool {
    call.mask.as_ref().is_some_and(|mask| {
        let [batch, head, query, key] = mask.strides;
        let pair_bytes = 2 * mask.dtype.size() as u64;
        key == 1
            && device_address(mask.segment, mask.offset).is_multiple_of(pair_bytes)
            && [batch, head, query, call.keys].iter().all(|step| step.is_multiple_of(2))
    })
}

/// Returns the launches of a call, or `None` if no kernel supports it.
fn plan_attention(call: &AttentionCall, arch: u32) -> Option<AttentionPlan> {
    if settings::portable_kernels() || call.scale.is_nan() || call.scale <= 0.0 {
        return None;
    }
    let mut params = AttentionParams::new(call)?;
    let mask = MaskKind::from_dtypes(call.mask.map(|mask| mask.dtype), call.dtype)?;
    let kernel = AttentionKernel::new(AttentionPass::Forward, call.head_dim, call.dtype, arch)?;
    let loads_mask_pairs = has_mask_pairs(call);
    let mut kernel =
        AttentionKernel { mask, loads_mask_pairs, has_dropout: call.dropout.is_some(), ..kernel };
    if kernel.uses_wgmma {
        match tensor_maps(call) {
            Some([q, k, v, grad]) => {
                let mask = mask_map(call);
                kernel.loads_mask_tiles = mask.is_some();
                params.maps = [q, k, v, grad, mask.unwrap_or(TensorMap::NONE)];
            }
            None => kernel.uses_wgmma = false,
        }
    }
    let is_plain = call.mask.is_none() && call.dropout.is_none();
    let is_one_pass = kernel.uses_wgmma && is_plain && takes_one_pass(call);
    let backward: &[AttentionPass] =
        if is_one_pass { &AttentionPass::ONE_PASS_BACKWARD } else { &AttentionPass::TWO_PASS_BACKWARD };
    if call.backward.is_some() && is_one_pass {
        let queries = call.heads / call.kv_heads.max(1) * call.queries;
        let order = one_pass_order(call.batch * call.kv_heads, queries * call.head_dim * (2 + 2 + 4));
        [params.sizes[7], params.ascending_groups] = convert_all(order)?;
    }
    let passes = if call.backward.is_some() { backward } else { &[AttentionPass::Forward] };
    let of_pass = |&pass: &AttentionPass| {
        let kernel = AttentionKernel { pass, ..kernel };
        let of_block = match pass {
            AttentionPass::OnePassRows | AttentionPass::OnePassSums => AttentionExtents::TILE_QUERIES,
            AttentionPass::OnePassBlocks => AttentionExtents::BLOCK_KEYS,
            _ => u64::from(kernel.tiling().block_rows()),
        };
        let (rows, heads) = match pass {
            AttentionPass::BackwardKeysValues | AttentionPass::OnePassBlocks => (call.keys, call.kv_heads),
            _ => (call.queries, call.heads),
        };
        let sums = call.backward.is_some_and(|b| b.grad_sums.is_some());
        if sums && !is_one_pass && of_block != AttentionGradients::ROWS_PER_SUM {
            return None;
        }
        let blocks = i32::try_from(rows.div_ceil(of_block) * heads * call.batch).ok()?;
        Some((kernel, blocks.unsigned_abs()))
    };
    let kernels = passes.iter().map(of_pass).collect::<Option<_>>()?;
    // The backward kernels take the longest to compile, so their compilation starts first.
    let ahead = if call.requires_grad && call.backward.is_none() { backward } else { &[] };
    let ahead = ahead.iter().rev().map(|&pass| AttentionKernel { pass, ..kernel }).collect();
    Some(AttentionPlan { params, kernels, ahead })
}

/// The launches of a call.
struct AttentionPlan {
    /// Parameters shared by the kernels.
    params: AttentionParams,
    /// Each kernel with its number of blocks.
    kernels: Vec<(AttentionKernel, u32)>,
    /// Kernels that will be needed soon.
    ahead: Vec<AttentionKernel>,
}

impl AttentionKernels {
    /// Enqueues attention on `stream` if its kernels are compiled. Without a stream, only starts to compile the
    /// kernels. If `wait` is true, waits for the compiler.
    pub(crate) fn submit(
        &self,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
        stream: Option<&CudaStream>,
        call: &AttentionCall,
        wait: bool,
    ) -> Result<SubmitStatus, SourceError> {
        if call.dtype == DType::F32 {
            return self.f32_kernels.submit(context, kernels, stream, call, wait);
        }
        let Some(AttentionPlan { params, kernels: passes, ahead }) = plan_attention(call, kernels.arch())
        else {
            return Ok(SubmitStatus::Declined);
        };
        let mut launches = Vec::with_capacity(passes.len());
        for &(kernel, blocks) in &passes {
            match self.kernels.get_or_compile(context, kernels, kernel, &ahead, wait)? {
                NativeKernelLookup::Ready(function) => launches.push((function, blocks, kernel)),
                NativeKernelLookup::Compiling => {}
                NativeKernelLookup::Failed => return Ok(SubmitStatus::Declined),
            }
        }
        if launches.len() < passes.len() {
            return Ok(SubmitStatus::Compiling);
        }
        if let Some(stream) = stream {
            for (function, blocks, kernel) in launches {
                // SAFETY: the kernel takes one `Params`, in this layout; the core has checked that the operands
                // lie inside their segments.
                unsafe { launch_native(stream, &kernel, function, [blocks, 1, 1], &params) }?;
            }
        }
        Ok(SubmitStatus::Submitted)
    }
}

#[cfg(test)]
mod tests {
    use super::{AttentionKernel, AttentionPass, DType, HOPPER_SHARED_BYTES, NativeKernel, one_pass_order};

    #[test]
    fn heads_of_a_group_fit_the_cache_and_one_group_descends() {
        let bytes = |queries: u64| queries * 64 * 8;
        assert_eq!(one_pass_order(12, bytes(16_384)), [6, 1]);
        assert_eq!(one_pass_order(24, bytes(16_384)), [6, 3]);
        assert_eq!(one_pass_order(24, bytes(4096)), [12, 1]);
        assert_eq!(one_pass_order(60, bytes(4096)), [24, 2]);
        assert_eq!(one_pass_order(3, bytes(1 << 20)), [1, 2]);
        assert_eq!(one_pass_order(1, bytes(1 << 20)), [1, 0]);
    }

    #[test]
    fn one_pass_is_for_hopper_and_heads_of_64() {
        for pass in AttentionPass::ONE_PASS_BACKWARD {
            let kernel = |head, arch| AttentionKernel::new(pass, head, DType::BF16, arch);
            assert!(kernel(64, 80).is_none() && kernel(64, 100).is_none() && kernel(128, 90).is_none());
            let kernel = kernel(64, 90).unwrap();
            assert!(kernel.shared_bytes() < HOPPER_SHARED_BYTES - (4 << 10), "{kernel:?}");
        }
    }
}

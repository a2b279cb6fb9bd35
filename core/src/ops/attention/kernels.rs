//! Choice of the portable attention kernel for a call: its template, its tiles and its loop iterations.

use crate::device::Device;
use crate::dtype::DType;
use crate::ops::kernel::launch::kernel_variants;
use forebay_shaders::KernelSpec;

/// Largest head dimension of q, k and v that the kernels support.
pub(super) const MAX_HEAD_DIM: usize = 128;
/// Rows of a workgroup's tile, except in [`AttentionKernel::F32`].
const TILE_ROWS: usize = 64;
/// Columns of a tile, with the same exception.
const TILE_COLUMNS: usize = 32;

kernel_variants! {
    pub(super) enum AttentionPass {
        /// The result.
        Forward = "forward",
        /// The gradient of the queries.
        Queries = "queries",
        /// The gradients of keys and values.
        Keys = "keys",
    }
}

/// Operands that decide about the kernel.
#[derive(Clone, Copy)]
pub(super) struct AttentionShape {
    pub(super) pass: AttentionPass,
    pub(super) dtype: DType,
    /// Elements of a row of q and k, and of v.
    pub(super) head: usize,
    pub(super) value: usize,
    /// True if all rows of the operands are whole aligned quads, or vectors of eight elements.
    pub(super) has_quads: bool,
    pub(super) has_vectors: bool,
}

/// Portable kernel with its variant.
#[derive(Clone, Copy)]
pub(super) enum AttentionKernel {
    /// `attention_cooperative`: 16-bit products in matrix units.
    Cooperative,
    /// `attention_f32`: large tiles, for GPUs with much workgroup memory.
    F32(F32Tile),
    /// `attention`. If true, whole rows and columns are in workgroup memory.
    Plain(bool),
}

impl AttentionKernel {
    pub(super) fn choose(shape: AttentionShape, device: &Device) -> Self {
        let AttentionShape { pass, dtype, head, value, has_quads, has_vectors } = shape;
        if has_vectors && fits_matrix_units(dtype, head, value, device) {
            return Self::Cooperative;
        }
        let tile = F32Tile::choose(pass, head, value, device);
        match tile.filter(|_| has_quads && dtype == DType::F32) {
            Some(tile) => Self::F32(tile),
            None => Self::Plain(fits_whole_rows(pass, head, value, device)),
        }
    }

    /// Returns the rows and the columns of a tile.
    pub(super) fn tile_extents(self) -> [usize; 2] {
        match self {
            Self::F32(_) => [F32Tile::ROWS, F32Tile::COLUMNS],
            Self::Cooperative | Self::Plain(_) => [TILE_ROWS, TILE_COLUMNS],
        }
    }

    pub(super) fn template(self) -> &'static str {
        match self {
            Self::Cooperative => "attention_cooperative",
            Self::F32(_) => "attention_f32",
            Self::Plain(_) => "attention",
        }
    }

    /// Adds the definitions of this variant.
    pub(super) fn define(self, spec: KernelSpec, has_quads: bool, device: &Device) -> KernelSpec {
        let info = device.info();
        // Mesa's software driver counts barriers of a subgroup as those of the workgroup, so no subgroup may leave
        // any out there.
        let skip_hidden = !info.software;
        match self {
            Self::Cooperative => {
                spec.def("side", info.features.cooperative_side as usize).def("skip_hidden", skip_hidden)
            }
            Self::F32(tile) => spec
                .def("exchanged", tile.exchanged)
                .def("unroll", if info.software { 1 } else { 8usize })
                .def("resident", tile.resident)
                .def("subgroups", has_subgroups_of_32(device))
                .def("skip_hidden", skip_hidden),
            Self::Plain(whole) => spec.def("aligned_quads", has_quads).def("whole", whole),
        }
    }

    /// Returns the loop iterations for a tile of columns, including loop ends.
    pub(super) fn tile_loop_iterations(self, pass: AttentionPass, head: usize, value: usize) -> usize {
        match self {
            Self::Cooperative => 1,
            Self::F32(tile) => tile.loop_iterations(head, value),
            Self::Plain(whole) => plain_loop_iterations(pass, whole, head, value),
        }
    }
}

/// Tile of `attention_f32.wgsl`, by the definitions of the template.
#[derive(Clone, Copy)]
pub(super) struct F32Tile {
    exchanged: usize,
    resident: usize,
}

impl F32Tile {
    /// Longest rows whose sums an invocation has in registers.
    const MAX_ROW: usize = 64;
    /// Invocations that share a row, as in the template.
    const LANES: usize = 8;
    /// Columns of a tile, as in the template.
    const COLUMNS: usize = 64;
    /// Rows of a tile. Each invocation has four of them.
    const ROWS: usize = 128 / Self::LANES * 4;

    /// Returns the tile of a pass, or `None` if the workgroups of a GPU have too little memory.
    fn choose(pass: AttentionPass, head: usize, value: usize, device: &Device) -> Option<Self> {
        let info = device.info();
        // More workgroups on a multiprocessor leave an invocation too few registers: the backward passes have two
        // products of a tile there.
        let max_resident = if pass == AttentionPass::Forward { 3 } else { 2 };
        // SwiftShader, with subgroups of four, takes minutes and 17 GB to compile this much code without branches.
        if info.software && info.limits.subgroup_size.0 < 8 {
            return None;
        }
        // A software driver has little memory, but runs one workgroup at a time.
        let exchanged = if info.software { 8 } else { 32 };
        let tile = Self { exchanged, resident: 0 };
        let bytes = tile.workgroup_bytes(pass, head, value);
        let resident = (info.limits.max_workgroup_memory as usize / bytes).min(max_resident);
        let fits = head.max(value) <= Self::MAX_ROW && resident >= if info.software { 1 } else { 2 };
        fits.then_some(Self { resident, ..tile })
    }

    /// Returns the bytes of workgroup memory, with the parts of sums that only some devices exchange there.
    fn workgroup_bytes(&self, pass: AttentionPass, head: usize, value: usize) -> usize {
        let weight_stride = Self::ROWS / 4 + 2;
        let columns = |elements: usize| (elements / 4).next_multiple_of(Self::LANES) * (Self::COLUMNS + 1);
        let (kept, others) = match pass {
            AttentionPass::Forward => (head, Self::LANES * weight_stride),
            AttentionPass::Queries => (head + value, Self::ROWS / 2),
            AttentionPass::Keys => (head + value, Self::COLUMNS / 2),
        };
        let weights = self.exchanged * weight_stride;
        16 * (kept / 4 * (Self::ROWS + 1) + columns(head) + columns(value) + weights + others)
    }

    fn loop_iterations(&self, head: usize, value: usize) -> usize {
        let products = head / 4 + value / 4 + 2;
        // Each column is in two products, and each part of them has a loop of its own.
        let sums = 2 * (Self::COLUMNS + Self::COLUMNS / self.exchanged);
        products + sums + Self::LANES + 1
    }
}

/// Returns true if all subgroups have 32 invocations, so that those of `attention_f32.wgsl` exchange values.
fn has_subgroups_of_32(device: &Device) -> bool {
    device.info().features.subgroups && device.info().limits.subgroup_size == (32, 32)
}

/// Returns the loop iterations for a tile of columns, including loop ends. See `load`, `multiply_tiles` and
/// `accumulate_product` in `attention.wgsl`.
fn plain_loop_iterations(pass: AttentionPass, whole: bool, head: usize, value: usize) -> usize {
    let quads = |elements: usize| elements.div_ceil(4);
    let load = |lines: usize, quads: usize| (lines * quads).div_ceil(128) + 1;
    let multiply_tiles = |depth: usize, kept: bool| match (whole, kept) {
        (true, true) => quads(depth) + 1,
        (true, false) => load(TILE_ROWS, quads(depth)) + quads(depth) + 1,
        (false, _) => depth.div_ceil(16) * (load(32, 4) + load(TILE_ROWS, 4) + 6) + 1,
    };
    let accumulate_product = |depth: usize| {
        let across = depth.div_ceil(32);
        match (whole, across) {
            (true, _) => 9,
            (false, 1) => load(8, 32) + 11,
            (false, 2) => 2 * (load(16, 16) + 6) + 1,
            (false, _) => 4 * (load(across * 8, 8) + 4) + 1,
        }
    };
    let columns = if whole { load(32, quads(head)) + load(32, quads(value)) } else { 0 };
    let products = match pass {
        AttentionPass::Forward => 10 + accumulate_product(value),
        AttentionPass::Queries => multiply_tiles(value, false) + accumulate_product(head),
        AttentionPass::Keys => {
            multiply_tiles(value, false) + accumulate_product(value) + accumulate_product(head)
        }
    };
    columns + multiply_tiles(head, whole && pass == AttentionPass::Forward) + products + 1
}

/// Returns true if the device multiplies matrices of this type in matrix units, and supports rows of `head` and
/// `value` elements in `attention_cooperative.wgsl`.
fn fits_matrix_units(dtype: DType, head: usize, value: usize, device: &Device) -> bool {
    // Vectors of 16 bytes: 32 columns of both operands with padding, values of 64 rows, and statistics.
    let vectors = 32 * (head / 8 + value / 8 + 2) + 64 * 6 + 16;
    let info = device.info();
    // A subgroup has the rows of one matrix, and one or two invocations for each row.
    let has_rows =
        matches!((info.features.cooperative_side, info.limits.subgroup_size), (16, (32, 32)) | (8, (8, 8)));
    has_rows
        && info.features.has_cooperative(dtype)
        && [head, value].iter().all(|n| n.is_multiple_of(16) && (16..=MAX_HEAD_DIM).contains(n))
        && 16 * vectors <= info.limits.max_workgroup_memory as usize
}

/// Returns true if whole rows and columns fit workgroup memory at sufficient occupancy. With too few resident
/// workgroups, a GPU cannot hide their latency (docs/lab/2026-11.md).
fn fits_whole_rows(pass: AttentionPass, head: usize, value: usize, device: &Device) -> bool {
    let workgroups = if device.info().software { 1 } else { 4 };
    let rows = if pass == AttentionPass::Forward { head } else { head.max(value) }.div_ceil(4);
    let columns = 8 * (head.div_ceil(32) + value.div_ceil(32));
    let bytes = 16 * (65 * rows + 33 * columns + TILE_ROWS * 9) + 768;
    bytes * workgroups <= device.info().limits.max_workgroup_memory as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::null::CardProfile;

    /// Returns the workgroups that f32 tiles are chosen for in each pass, or zeros without such tiles.
    fn resident(profile: CardProfile, dtype: DType, head: usize, has_quads: bool) -> [usize; 3] {
        let device = Device::null(profile);
        [AttentionPass::Forward, AttentionPass::Queries, AttentionPass::Keys].map(|pass| {
            let shape = AttentionShape { pass, dtype, head, value: head, has_quads, has_vectors: false };
            match AttentionKernel::choose(shape, &device) {
                AttentionKernel::F32(tile) => tile.resident,
                AttentionKernel::Cooperative | AttentionKernel::Plain(_) => 0,
            }
        })
    }

    #[test]
    fn large_tiles_need_quads_of_f32_and_memory() {
        let card = CardProfile::default;
        assert_eq!(resident(card(), DType::F32, 64, true), [3, 2, 2]);
        assert_eq!(resident(card(), DType::F32, 64, false), [0; 3]);
        assert_eq!(resident(card(), DType::F32, 128, true), [0; 3]);
        assert_eq!(resident(card(), DType::BF16, 64, true), [0; 3]);
        let with_memory = |kibibytes: u32, is_software: bool| {
            let mut profile = CardProfile { is_software, ..card() };
            profile.limits.max_workgroup_memory = kibibytes << 10;
            profile
        };
        // An A100 has memory for two workgroups, and Vulkan on the same cards for none.
        assert_eq!(resident(with_memory(163, false), DType::F32, 64, true), [2; 3]);
        assert_eq!(resident(with_memory(48, false), DType::F32, 64, true), [0; 3]);
        assert_eq!(resident(with_memory(32, true), DType::F32, 16, true), [1; 3]);
    }
}

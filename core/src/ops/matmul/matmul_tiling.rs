//! Tiling of matrix products: the variant of the `matmul_body` kernel, and the split of long sums (split-K).

use crate::backend::{DeviceInfo, Features};
use crate::ops::prelude::*;

/// Extents of `batch` products: c is m x n, and sums run over k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatmulExtents {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) batch: usize,
}

/// Flags that say whether the inner dimension k is contiguous in each operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KMajorOperands {
    pub(crate) a: bool,
    pub(crate) b: bool,
}

/// Tile of `thread_rows` x 256/`thread_rows` invocations. Each computes `rows_per_thread` x
/// 4·`vec4_cols_per_thread` elements, `k_depth` steps of the sum at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    thread_rows: usize,
    rows_per_thread: usize,
    vec4_cols_per_thread: usize,
    k_depth: usize,
}

/// Largest tile on devices with the workgroup memory for it, in place of the first of [`TILES`].
const LARGE_TILE: Tile = Tile { thread_rows: 16, rows_per_thread: 8, vec4_cols_per_thread: 2, k_depth: 16 };

/// Tile sizes, each of which fits 16 KiB of workgroup memory.
const TILES: [Tile; 11] = [
    Tile { thread_rows: 16, rows_per_thread: 8, vec4_cols_per_thread: 2, k_depth: 8 },
    Tile { thread_rows: 8, rows_per_thread: 8, vec4_cols_per_thread: 2, k_depth: 8 },
    Tile { thread_rows: 32, rows_per_thread: 8, vec4_cols_per_thread: 2, k_depth: 8 },
    Tile { thread_rows: 16, rows_per_thread: 4, vec4_cols_per_thread: 1, k_depth: 16 },
    Tile { thread_rows: 8, rows_per_thread: 4, vec4_cols_per_thread: 1, k_depth: 16 },
    Tile { thread_rows: 32, rows_per_thread: 4, vec4_cols_per_thread: 1, k_depth: 16 },
    Tile { thread_rows: 4, rows_per_thread: 4, vec4_cols_per_thread: 1, k_depth: 8 },
    Tile { thread_rows: 64, rows_per_thread: 4, vec4_cols_per_thread: 1, k_depth: 8 },
    Tile { thread_rows: 4, rows_per_thread: 8, vec4_cols_per_thread: 2, k_depth: 4 },
    Tile { thread_rows: 8, rows_per_thread: 4, vec4_cols_per_thread: 2, k_depth: 8 },
    Tile { thread_rows: 4, rows_per_thread: 4, vec4_cols_per_thread: 2, k_depth: 4 },
];

impl Tile {
    fn height(&self) -> usize {
        self.thread_rows * self.rows_per_thread
    }
    fn width(&self) -> usize {
        WORKGROUP_SIZE / self.thread_rows * 4 * self.vec4_cols_per_thread
    }
    /// Returns the bytes in workgroup memory, in f32 with a padding vector for each row.
    fn memory_bytes(&self) -> usize {
        (self.height() / 4 + self.width() / 4 + 2) * self.k_depth * 16
    }
}

/// Tile of matrix units: subgroups compute `subgroup` elements each, 32 steps of the sum at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CooperativeTile {
    rows: usize,
    cols: usize,
    subgroup: [usize; 2],
}

/// Tiles of 16 x 16 matrices.
const COOPERATIVE_TILES: [CooperativeTile; 3] = [
    CooperativeTile { rows: 128, cols: 128, subgroup: [64, 64] },
    CooperativeTile { rows: 128, cols: 64, subgroup: [64, 32] },
    CooperativeTile { rows: 64, cols: 64, subgroup: [32, 32] },
];
/// Further tiles of 16 x 16 matrices, which only timing chooses.
const TIMED_COOPERATIVE_TILES: [CooperativeTile; 3] = [
    CooperativeTile { rows: 64, cols: 128, subgroup: [32, 64] },
    CooperativeTile { rows: 256, cols: 128, subgroup: [64, 64] },
    CooperativeTile { rows: 128, cols: 256, subgroup: [64, 64] },
];
/// Tiles of 8 x 8 matrices. A subgroup has 16 accumulators at most.
const COOPERATIVE_TILES_OF_8: [CooperativeTile; 2] = [
    CooperativeTile { rows: 64, cols: 64, subgroup: [32, 32] },
    CooperativeTile { rows: 32, cols: 32, subgroup: [16, 32] },
];

impl CooperativeTile {
    fn subgroups(&self) -> usize {
        self.rows / self.subgroup[0] * (self.cols / self.subgroup[1])
    }
    /// Returns the bytes in workgroup memory: lines of `COOPERATIVE_DEPTH` elements with a padding vector. At the end,
    /// a part of the results takes the place of the first operand.
    fn memory_bytes(&self, units: MatrixUnits) -> usize {
        let pitch = COOPERATIVE_DEPTH / 8 + 1;
        let results = self.subgroups() * units.side * 9;
        ((self.rows * pitch).max(results) + self.cols * pitch) * 16
    }
}

/// Matrix units of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MatrixUnits {
    /// Rows and columns of a matrix.
    side: usize,
    /// Invocations of a subgroup.
    lanes: usize,
}

/// Steps of the sum that a cooperative tile holds.
const COOPERATIVE_DEPTH: usize = 32;

/// Cost model of a device, in units of one fused multiply-add of an invocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CostModel {
    /// Workgroups that run concurrently, or 1 if only the total work counts.
    parallel_workgroups: usize,
    /// Target number of workgroups when long sums are split.
    split_k_workgroups: usize,
    /// Cost of loading one value from workgroup memory.
    shared_load_cost: usize,
    /// Cost of loading one element of a tensor.
    global_load_cost: usize,
    /// Largest number of loop iterations of an invocation. Longer sums are split.
    max_iterations: usize,
    /// Bytes of workgroup memory.
    workgroup_memory: usize,
    /// Largest number of invocations of a workgroup.
    workgroup_size: usize,
    /// If true, the compiler of the device takes long kernels: steps of a large tile are written out.
    unrolls: bool,
    /// The device's features, for the types whose products run on matrix units.
    features: Features,
    /// Invocations of a subgroup.
    subgroup_lanes: usize,
}

impl CostModel {
    /// Returns a device's costs. If `gathered` is true, elements of b are addressed by divisions.
    pub(crate) fn new(device: &Device, gathered: bool) -> Self {
        let gather_cost = if gathered { 2 } else { 1 };
        // Software devices run on few cores and load one lane at a time: measured on lavapipe.
        let DeviceInfo { limits, features, software, .. } = device.info();
        let (parallel_workgroups, split_k_workgroups, shared_load_cost, global_load_cost) =
            if *software { (1, 8, 20, 30) } else { (256, 512, 2, 4) };
        Self {
            parallel_workgroups,
            split_k_workgroups,
            shared_load_cost,
            global_load_cost: global_load_cost * gather_cost,
            max_iterations: limits.max_loop_iterations as usize / 2,
            workgroup_memory: limits.max_workgroup_memory as usize,
            workgroup_size: limits.max_workgroup_size as usize,
            unrolls: !software,
            features: *features,
            subgroup_lanes: limits.subgroup_size.0 as usize,
        }
    }

    /// Returns the matrix units for products of a type.
    fn matrix_units(&self, dtype: DType) -> Option<MatrixUnits> {
        let side = self.features.cooperative_side as usize;
        let is_usable = self.features.has_cooperative(dtype) && side > 0;
        is_usable.then_some(MatrixUnits { side, lanes: self.subgroup_lanes })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MatmulVariant {
    Tiled {
        tile: Tile,
        /// Steps of the sum that are written out in the kernel.
        unroll: usize,
    },
    Cooperative(CooperativeTile, MatrixUnits),
    /// `threads_per_output` invocations share the sum of one element.
    Simple {
        threads_per_output: usize,
    },
}

/// Returns the tiles among which the cost model chooses.
fn cooperative_tiles(units: MatrixUnits) -> &'static [CooperativeTile] {
    if units.side == 16 { &COOPERATIVE_TILES } else { &COOPERATIVE_TILES_OF_8 }
}

impl MatmulVariant {
    /// Returns a number of terms of a sum and the loop iterations that they take.
    fn loop_iterations(self) -> (usize, usize) {
        match self {
            Self::Tiled { tile, .. } => (tile.k_depth, 2 + tile.k_depth),
            Self::Cooperative(..) => (COOPERATIVE_DEPTH, 2),
            Self::Simple { threads_per_output } => (8 * threads_per_output, 9),
        }
    }
}

/// Kernel variant of a product, and how its work is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TilePlan {
    extents: MatmulExtents,
    variant: MatmulVariant,
    /// Workgroups for each split of the sums.
    workgroups_per_split: usize,
    split_k: usize,
    k_per_split: usize,
}

/// Work on complete sums before they are stored. Tensors are contiguous, at offset 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SumEpilogue<'a> {
    /// If true, the result is gelu_tanh of the sum.
    pub(crate) gelu: bool,
    /// Tensor for the argument of GELU, with the shape and type of the result.
    pub(crate) pre_activation: Option<&'a Tensor>,
    /// If true, the result is added to the output.
    pub(crate) accumulate: bool,
}

impl SumEpilogue<'_> {
    fn add_definitions(&self, spec: KernelSpec) -> KernelSpec {
        let pre_activation = self.pre_activation.is_some();
        kernel_spec! { ..spec; gelu: self.gelu, pre_activation, accumulate: self.accumulate }
    }
}

/// Shortest part of a sum that is worth a separate workgroup.
const MIN_K_PER_SPLIT: usize = 256;

/// Fixed cost of launching a second kernel.
const LAUNCH_COST: usize = 2000;

impl TilePlan {
    /// Chooses the cheapest variant. The cost is the number of waves of workgroups, times the steps of a
    /// split, times the cost of a step. Tiles support f32, f16 and bf16.
    pub(crate) fn new(e: MatmulExtents, dtype: DType, costs: CostModel) -> Self {
        let simple_plan = Self::for_simple_kernel(e, costs);
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return simple_plan;
        }
        let tiled = TILES.iter().map(|&tile| Self::for_tile(e, tile, costs));
        // The shortest extent is one matrix.
        let units = costs.matrix_units(dtype).filter(|units| e.m.min(e.n).min(e.k) >= units.side);
        let cooperative = units.into_iter().flat_map(|units| {
            cooperative_tiles(units).iter().map(move |&tile| {
                let variant = MatmulVariant::Cooperative(tile, units);
                Self::for_grid(e, variant, [tile.rows, tile.cols], costs)
            })
        });
        tiled
            .chain([simple_plan])
            .chain(cooperative)
            .min_by_key(|plan| plan.estimate_cost(costs))
            .unwrap_or(simple_plan)
    }

    /// Returns the plans of the same kind whose sums are split alike, by estimated cost after this plan. The cost is at
    /// most `max_ratio` times that of this plan.
    ///
    /// Tiles of one kind add the terms of a sum one after the other, in the same order. All candidates therefore have
    /// the same bits and the same workspace.
    pub(crate) fn candidates(&self, costs: CostModel, max_ratio: f64) -> SmallVec<[Self; 16]> {
        let e = self.extents;
        let others: SmallVec<[(MatmulVariant, [usize; 2]); 16]> = match self.variant {
            MatmulVariant::Tiled { .. } => {
                let tiles = TILES.iter().map(|&tile| Self::tiled_variant(tile, costs));
                let small = MatmulVariant::Tiled { tile: TILES[0], unroll: 1 };
                tiles.chain([(small, [TILES[0].height(), TILES[0].width()])]).collect()
            }
            MatmulVariant::Cooperative(_, units) => {
                let timed = if units.side == 16 { &TIMED_COOPERATIVE_TILES[..] } else { &[] };
                let tiles = cooperative_tiles(units).iter().chain(timed);
                let fitting = tiles.filter(|tile| {
                    tile.memory_bytes(units) <= costs.workgroup_memory
                        && tile.subgroups() * units.lanes <= costs.workgroup_size
                });
                fitting
                    .map(|&tile| (MatmulVariant::Cooperative(tile, units), [tile.rows, tile.cols]))
                    .collect()
            }
            MatmulVariant::Simple { .. } => SmallVec::new(),
        };
        let max_cost = self.estimate_cost(costs) as f64 * max_ratio;
        let mut plans: SmallVec<[Self; 16]> = SmallVec::new();
        for (variant, [height, width]) in others {
            let workgroups_per_split = e.m.div_ceil(height) * e.n.div_ceil(width) * e.batch;
            let plan = Self { variant, workgroups_per_split, ..*self };
            let (terms, iterations) = variant.loop_iterations();
            let fits = (self.k_per_split / terms).saturating_mul(iterations) <= costs.max_iterations;
            let is_new = variant != self.variant && plans.iter().all(|known| known.variant != variant);
            if fits && is_new && plan.estimate_cost(costs) as f64 <= max_cost {
                plans.push(plan);
            }
        }
        plans.sort_by_key(|plan| plan.estimate_cost(costs));
        plans.insert(0, *self);
        plans
    }

    /// Returns the numbers that tell this plan's tile from others of its kind.
    pub(crate) fn tile_code(&self) -> [u16; 4] {
        let code = match self.variant {
            MatmulVariant::Tiled { tile: t, .. } => {
                [t.thread_rows, t.rows_per_thread, t.vec4_cols_per_thread, t.k_depth]
            }
            MatmulVariant::Cooperative(t, _) => [t.rows, t.cols, t.subgroup[0], t.subgroup[1]],
            MatmulVariant::Simple { threads_per_output } => [threads_per_output, 0, 0, 0],
        };
        code.map(|number| number as u16)
    }

    /// Returns the extents of the product.
    pub(crate) fn extents(&self) -> MatmulExtents {
        self.extents
    }

    /// Returns the variant and the extents of a tile. Devices with the memory for it use the large tile.
    fn tiled_variant(tile: Tile, costs: CostModel) -> (MatmulVariant, [usize; 2]) {
        let (mut tile, mut unroll) = (tile, 1);
        if tile == TILES[0] && LARGE_TILE.memory_bytes() <= costs.workgroup_memory {
            tile = LARGE_TILE;
            unroll = if costs.unrolls { tile.k_depth } else { 1 };
        }
        (MatmulVariant::Tiled { tile, unroll }, [tile.height(), tile.width()])
    }

    fn for_tile(e: MatmulExtents, tile: Tile, costs: CostModel) -> Self {
        let (variant, extents) = Self::tiled_variant(tile, costs);
        Self::for_grid(e, variant, extents, costs)
    }

    fn for_grid(e: MatmulExtents, variant: MatmulVariant, tile: [usize; 2], costs: CostModel) -> Self {
        let groups = e.m.div_ceil(tile[0]) * e.n.div_ceil(tile[1]) * e.batch;
        Self::with_splits(e, variant, groups, Self::choose_split_k(e, groups, costs), costs)
    }

    fn for_simple_kernel(e: MatmulExtents, costs: CostModel) -> Self {
        let outputs = e.m * e.n * e.batch;
        let mut threads_per_output = 1;
        while threads_per_output < WORKGROUP_SIZE
            && e.k > 32 * threads_per_output
            && outputs * threads_per_output < costs.split_k_workgroups * WORKGROUP_SIZE
        {
            threads_per_output *= 2;
        }
        let groups = outputs.div_ceil(WORKGROUP_SIZE / threads_per_output);
        // Short sums need no second stage, because several threads share them.
        let splits = match threads_per_output {
            WORKGROUP_SIZE => Self::choose_split_k(e, groups, costs).min(e.k.div_ceil(32 * WORKGROUP_SIZE)),
            _ => 1,
        };
        Self::with_splits(e, MatmulVariant::Simple { threads_per_output }, groups, splits, costs)
    }

    /// Returns the number of splits that fills the device.
    fn choose_split_k(e: MatmulExtents, groups: usize, costs: CostModel) -> usize {
        (costs.split_k_workgroups / groups.max(1)).min(e.k / MIN_K_PER_SPLIT).clamp(1, 256)
    }

    fn with_splits(
        extents: MatmulExtents,
        variant: MatmulVariant,
        groups: usize,
        splits: usize,
        costs: CostModel,
    ) -> Self {
        let (k, iterations) = variant.loop_iterations();
        let splits =
            splits.max((extents.k / k).saturating_mul(iterations).div_ceil(costs.max_iterations.max(1)));
        // Round splits up to whole tiles, so that only the last may be partial.
        let step = if matches!(variant, MatmulVariant::Cooperative(..)) { COOPERATIVE_DEPTH } else { 16 };
        let chunk = extents.k.div_ceil(splits).next_multiple_of(step);
        Self { extents, variant, workgroups_per_split: groups, split_k: splits, k_per_split: chunk }
    }

    fn estimate_cost(
        &self,
        CostModel { parallel_workgroups: units, shared_load_cost: near, global_load_cost: far, .. }: CostModel,
    ) -> usize {
        let rounds = |groups: usize| groups.div_ceil(units);
        let (steps, step) = match self.variant {
            // Matrix units do about five times the work of the other units.
            MatmulVariant::Cooperative(t, _) => {
                (self.k_per_split, t.rows * t.cols / 2048 + (t.rows + t.cols) / 64)
            }
            MatmulVariant::Tiled { tile: t, .. } => {
                let loads = (t.height() + t.width()).div_ceil(WORKGROUP_SIZE) * far;
                (
                    self.k_per_split,
                    4 * t.rows_per_thread * t.vec4_cols_per_thread
                        + (t.rows_per_thread + 4 * t.vec4_cols_per_thread) * near
                        + loads,
                )
            }
            MatmulVariant::Simple { threads_per_output } => {
                (self.k_per_split.div_ceil(threads_per_output), 1 + 2 * far)
            }
        };
        let MatmulExtents { m, n, batch, .. } = self.extents;
        let second = match self.split_k {
            1 => 0,
            splits => LAUNCH_COST + rounds((m * n * batch).div_ceil(4 * WORKGROUP_SIZE)) * 4 * splits * far,
        };
        rounds(self.workgroups_per_split * self.split_k) * steps * step + second
    }

    /// Reports whether the last step of a sum may be partial.
    pub(crate) fn has_k_edges(&self) -> bool {
        let (depth, _) = self.variant.loop_iterations();
        !self.extents.k.is_multiple_of(depth) || !self.k_per_split.is_multiple_of(depth)
    }

    /// Returns the number of neighbours that a kernel of this plan loads in one access; 1 if it loads single
    /// elements.
    pub(crate) fn vector_elements(&self) -> usize {
        match self.variant {
            MatmulVariant::Tiled { .. } => 4,
            MatmulVariant::Cooperative(..) => 8,
            MatmulVariant::Simple { .. } => 1,
        }
    }

    /// Adds the kernel's definitions. If `quads` is true, columns of c are in aligned groups of four.
    pub(crate) fn add_definitions(&self, spec: KernelSpec, along: KMajorOperands, quads: bool) -> KernelSpec {
        let order = |along: bool| if along { "k" } else { "line" };
        let is_simple = matches!(self.variant, MatmulVariant::Simple { .. });
        let mode = if !is_simple && quads { "packed" } else { "scattered" };
        let spec = kernel_spec! { ..spec; split: self.split_k > 1, mode };
        let orders =
            |spec: KernelSpec| kernel_spec! { ..spec; a_order: order(along.a), b_order: order(along.b) };
        match self.variant {
            MatmulVariant::Tiled { tile: t, unroll } => orders(kernel_spec! {
                ..spec; variant: "tiled", thread_rows: t.thread_rows, rows: t.rows_per_thread,
                cols: t.vec4_cols_per_thread, depth: t.k_depth, unroll,
            }),
            MatmulVariant::Cooperative(t, units) => orders(kernel_spec! {
                ..spec; variant: "cooperative", side: units.side, lanes: units.lanes, rows: t.rows, cols: t.cols, depth: COOPERATIVE_DEPTH,
                sub_rows: t.subgroup[0], sub_cols: t.subgroup[1],
            }),
            MatmulVariant::Simple { threads_per_output } => {
                // Only the access order of the larger operand matters.
                let along = if self.extents.n >= self.extents.m { along.b } else { along.a };
                let order = order(threads_per_output > 1 && along);
                kernel_spec! { ..spec; variant: "simple", threads_per_output, order }
            }
        }
    }

    /// Returns the first six words of the kernel's parameters.
    pub(crate) fn params(&self) -> KernelParams {
        let MatmulExtents { m, n, k, batch } = self.extents;
        let (terms, iterations) = self.variant.loop_iterations();
        let iterations = self.k_per_split.div_ceil(terms) * iterations + 16;
        kernel_params! { m, n, k, batch, chunk: self.k_per_split, splits: self.split_k }
            .loop_iterations(iterations)
    }

    /// Runs the kernel over `inputs` into the contiguous `out`, and a second stage that adds the splits.
    pub(crate) fn run(
        &self,
        spec: &KernelSpec,
        inputs: &[&Tensor],
        params: KernelParams,
        out: &Tensor,
    ) -> Result<()> {
        let Some(sums) = self.empty_split_sums(out)? else {
            return launch::launch(spec, &bindings![inputs, out], params, self.workgroups_per_split);
        };
        self.launch_splits(spec, inputs, params, &sums)?;
        self.add_splits(&sums, out, SumEpilogue::default())
    }
}

/// A matrix product by kernels of this crate, into a contiguous tensor at offset 0.
pub(crate) struct TiledProduct<'a> {
    /// Operands, and the bias if there is one.
    pub(crate) inputs: &'a [&'a Tensor],
    pub(crate) out: &'a Tensor,
    /// Work of the last stage.
    pub(crate) epilogue: SumEpilogue<'a>,
    /// Returns the kernel of a plan without epilogue, and its parameters.
    pub(crate) kernel: &'a dyn Fn(&TilePlan) -> (KernelSpec, KernelParams),
}

impl TiledProduct<'_> {
    /// Runs the product with the tile of `plan`, or a faster one that splits the sums alike.
    pub(crate) fn run(&self, plan: TilePlan, costs: CostModel) -> Result<()> {
        let sums = plan.empty_split_sums(self.out)?;
        let plan = self.choose_tile(plan, costs, sums.as_ref());
        self.launch_first_stage(&plan, sums.as_ref())?;
        sums.map_or(Ok(()), |sums| plan.add_splits(&sums, self.out, self.epilogue))
    }

    /// Returns the kernel of the first stage. The last stage has the epilogue.
    pub(crate) fn first_stage(&self, plan: &TilePlan) -> (KernelSpec, KernelParams) {
        let (spec, params) = (self.kernel)(plan);
        let epilogue = if plan.split_k == 1 { self.epilogue } else { SumEpilogue::default() };
        (epilogue.add_definitions(spec), params)
    }

    /// Launches the first stage, into the splits' sums if there are any.
    pub(crate) fn launch_first_stage(&self, plan: &TilePlan, sums: Option<&Tensor>) -> Result<()> {
        let (spec, params) = self.first_stage(plan);
        if let Some(sums) = sums {
            return plan.launch_splits(&spec, self.inputs, params, sums);
        }
        let tensors = bindings![self.inputs, self.epilogue.pre_activation, self.out];
        launch::launch(&spec, &tensors, params, plan.workgroups_per_split)
    }
}

impl TilePlan {
    /// Allocates the sums of all splits. Returns `None` if sums are not split.
    fn empty_split_sums(&self, out: &Tensor) -> Result<Option<Tensor>> {
        if self.split_k == 1 {
            return Ok(None);
        }
        let dtype = match out.dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            DType::U8 => DType::U32,
            other => other,
        };
        empty_workspace(&[self.split_k, out.numel()], dtype, out.device()).map(Some)
    }

    fn launch_splits(
        &self,
        spec: &KernelSpec,
        inputs: &[&Tensor],
        params: KernelParams,
        sums: &Tensor,
    ) -> Result<()> {
        launch::launch(spec, &bindings![inputs, sums], params, self.workgroups_per_split * self.split_k)
    }

    /// Adds the sums of the splits, and applies the epilogue.
    fn add_splits(&self, sums: &Tensor, out: &Tensor, epilogue: SumEpilogue<'_>) -> Result<()> {
        let n = out.numel();
        let spec = epilogue.add_definitions(kernel_spec! {
            "splitk_reduce", T: sums.dtype().name(), dtype: launch::shader_dtype_name(out.dtype(), out.device()),
        });
        // The loops over the splits of four elements, and the loop of the epilogue.
        let params = kernel_params! { n, splits: self.split_k }.loop_iterations(4 * (self.split_k + 1) + 5);
        let tensors = bindings![sums, epilogue.pre_activation, out];
        launch::launch(&spec, &tensors, params, n.div_ceil(4 * WORKGROUP_SIZE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plan_covers_its_product() {
        let gpu = CostModel {
            parallel_workgroups: 256,
            split_k_workgroups: 512,
            shared_load_cost: 2,
            global_load_cost: 4,
            max_iterations: usize::MAX,
            workgroup_memory: 48 << 10,
            workgroup_size: 1024,
            unrolls: true,
            features: Features { cooperative_f16: true, cooperative_side: 16, ..Features::default() },
            subgroup_lanes: 32,
        };
        let features = Features { cooperative_side: 8, ..gpu.features };
        let matrices_of_8 = CostModel { features, subgroup_lanes: 8, ..gpu };
        let software = CostModel {
            parallel_workgroups: 1,
            split_k_workgroups: 8,
            shared_load_cost: 20,
            global_load_cost: 30,
            max_iterations: 32_767,
            workgroup_memory: 32 << 10,
            workgroup_size: 1024,
            unrolls: false,
            features: Features::default(),
            subgroup_lanes: 8,
        };
        for m in [1, 5, 16, 64, 100, 1000, 9000] {
            for n in [1, 10, 17, 64, 300, 9000] {
                for k in [1, 16, 100, 5000, 1 << 20] {
                    for (dtype, costs) in [
                        (DType::F32, gpu),
                        (DType::F16, gpu),
                        (DType::F16, matrices_of_8),
                        (DType::F32, software),
                        (DType::I32, gpu),
                    ] {
                        let e = MatmulExtents { m, n, k, batch: 3 };
                        let plan = TilePlan::new(e, dtype, costs);
                        let covered = match plan.variant {
                            MatmulVariant::Tiled { tile: t, .. } => {
                                plan.workgroups_per_split * t.height() * t.width()
                            }
                            MatmulVariant::Cooperative(t, units) => {
                                assert_eq!(units.side, costs.features.cooperative_side as usize, "{plan:?}");
                                plan.workgroups_per_split * t.rows * t.cols
                            }
                            MatmulVariant::Simple { threads_per_output } => {
                                plan.workgroups_per_split * WORKGROUP_SIZE / threads_per_output
                            }
                        };
                        assert!(covered >= 3 * m * n && plan.split_k >= 1, "{plan:?}");
                        assert!(plan.k_per_split * plan.split_k >= k, "{plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_long_sum_of_few_elements_is_split_between_tiles() {
        let gpu = CostModel {
            parallel_workgroups: 256,
            split_k_workgroups: 512,
            shared_load_cost: 2,
            global_load_cost: 8,
            max_iterations: usize::MAX,
            workgroup_memory: 48 << 10,
            workgroup_size: 1024,
            unrolls: true,
            features: Features::default(),
            subgroup_lanes: 32,
        };
        // Weight gradient of a convolution of 32 into 64 channels, over 128 images of 14 x 14.
        let plan = TilePlan::new(MatmulExtents { m: 64, n: 288, k: 25_088, batch: 1 }, DType::F32, gpu);
        assert!(plan.vector_elements() == 4 && plan.split_k > 16, "{plan:?}");
    }

    #[test]
    fn every_tile_fits_the_smallest_workgroup_memory() {
        for t in TILES {
            let lines = t.height() / 4 + 1 + t.width() / 4 + 1;
            assert!(lines * t.k_depth * 16 <= 16 << 10, "{t:?}");
            assert!(t.rows_per_thread.is_multiple_of(4), "{t:?}");
        }
    }
}

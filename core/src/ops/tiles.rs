//! How a matrix product is cut into workgroups: which kernel of `matmul_body` makes it, and what shares a sum.

use forebay_shaders::KernelSpec;
use smallvec::SmallVec;

use super::launch::{self, GROUP, Params};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{self, Tag};
use crate::tensor::Tensor;

/// The extents of `batch` products: c of m x n, sums over k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extents {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) batch: usize,
}

/// Whether neighbours in memory are neighbours along the sum, in each operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AlongSum {
    pub(super) a: bool,
    pub(super) b: bool,
}

/// A tile: `high` x 256/`high` invocations make `rows` x 4·`cols` elements each, over `depth` of the sum at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    high: usize,
    rows: usize,
    cols: usize,
    depth: usize,
}

/// Every tile fits 16 KiB of workgroup memory.
const TILES: [Tile; 11] = [
    Tile { high: 16, rows: 8, cols: 2, depth: 8 },
    Tile { high: 8, rows: 8, cols: 2, depth: 8 },
    Tile { high: 32, rows: 8, cols: 2, depth: 8 },
    Tile { high: 16, rows: 4, cols: 1, depth: 16 },
    Tile { high: 8, rows: 4, cols: 1, depth: 16 },
    Tile { high: 32, rows: 4, cols: 1, depth: 16 },
    Tile { high: 4, rows: 4, cols: 1, depth: 8 },
    Tile { high: 64, rows: 4, cols: 1, depth: 8 },
    Tile { high: 4, rows: 8, cols: 2, depth: 4 },
    Tile { high: 8, rows: 4, cols: 2, depth: 8 },
    Tile { high: 4, rows: 4, cols: 2, depth: 4 },
];

impl Tile {
    fn height(&self) -> usize {
        self.high * self.rows
    }
    fn width(&self) -> usize {
        GROUP / self.high * 4 * self.cols
    }
}

/// What a device is good at, in units of one fused multiply-add of an invocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// Workgroups that run side by side; 1 where the sum of all work is what counts.
    units: usize,
    /// Workgroups to split long sums into.
    pieces: usize,
    /// A number from workgroup memory.
    near: usize,
    /// An element of a tensor.
    far: usize,
    /// Turns that the loops of an invocation may take; sums of more are split.
    turns: usize,
}

impl Costs {
    /// `gathered`: elements of b are found by divisions, not by strides.
    pub(super) fn new(device: &Device, gathered: bool) -> Self {
        let far = if gathered { 2 } else { 1 };
        // A program that plays a GPU runs on few cores and loads one lane at a time: measured on lavapipe.
        let turns = device.info().limits.max_turns as usize / 2;
        if device.info().software {
            Self { units: 1, pieces: 8, near: 20, far: 30 * far, turns }
        } else {
            Self { units: 256, pieces: 512, near: 2, far: 4 * far, turns }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tiled(Tile),
    /// `lanes` invocations share the sum of one element.
    Simple {
        lanes: usize,
    },
}

impl Way {
    /// So many terms of a sum take so many turns of loops.
    fn turns(self) -> (usize, usize) {
        match self {
            Self::Tiled(tile) => {
                let loads = (tile.depth * (tile.height() + tile.width() / 4)).div_ceil(GROUP);
                (tile.depth, 2 + tile.depth + loads)
            }
            Self::Simple { lanes } => (8 * lanes, 9),
        }
    }
}

/// Which kernel multiplies, and how the work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    extents: Extents,
    way: Way,
    /// Workgroups for each piece of the sums.
    groups: usize,
    /// Pieces of a sum.
    splits: usize,
    /// The length of a piece.
    chunk: usize,
}

/// The shortest piece of a sum that is worth a workgroup of its own.
const PIECE: usize = 256;

/// What a second kernel costs before it does anything.
const LAUNCH: usize = 2000;

impl Plan {
    /// The cheapest way: rounds of workgroups side by side, times the steps of a piece of the sum, times a step's cost.
    /// Tiles are for f32, f16 and bf16.
    pub(super) fn new(e: Extents, dtype: DType, costs: Costs) -> Self {
        let simple = Self::simple(e, costs);
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return simple;
        }
        let tiled = TILES.iter().map(|&tile| Self::of_tiles(e, tile, costs));
        tiled.chain([simple]).min_by_key(|plan| plan.cost(costs)).unwrap_or(simple)
    }

    fn of_tiles(e: Extents, tile: Tile, costs: Costs) -> Self {
        let groups = e.m.div_ceil(tile.height()) * e.n.div_ceil(tile.width()) * e.batch;
        Self::cut(e, Way::Tiled(tile), groups, Self::share(e, groups, costs), costs)
    }

    fn simple(e: Extents, costs: Costs) -> Self {
        let outputs = e.m * e.n * e.batch;
        let mut lanes = 1;
        while lanes < GROUP && e.k > 32 * lanes && outputs * lanes < costs.pieces * GROUP {
            lanes *= 2;
        }
        let groups = outputs.div_ceil(GROUP / lanes);
        // Short pieces need no second stage: the lanes share them.
        let splits = match lanes {
            GROUP => Self::share(e, groups, costs).min(e.k.div_ceil(32 * GROUP)),
            _ => 1,
        };
        Self::cut(e, Way::Simple { lanes }, groups, splits, costs)
    }

    /// Into how many pieces sums are split, so that there is work for the whole device.
    fn share(e: Extents, groups: usize, costs: Costs) -> usize {
        (costs.pieces / groups.max(1)).min(e.k / PIECE).clamp(1, 256)
    }

    fn cut(extents: Extents, way: Way, groups: usize, splits: usize, costs: Costs) -> Self {
        let (k, turns) = way.turns();
        let splits = splits.max((extents.k / k).saturating_mul(turns).div_ceil(costs.turns.max(1)));
        // Pieces are whole tiles, so that none but the last is half empty.
        let chunk = extents.k.div_ceil(splits).next_multiple_of(16);
        Self { extents, way, groups, splits, chunk }
    }

    fn cost(&self, Costs { units, near, far, .. }: Costs) -> usize {
        let rounds = |groups: usize| groups.div_ceil(units);
        let (steps, step) = match self.way {
            Way::Tiled(t) => {
                let loads = (t.height() + t.width()).div_ceil(GROUP) * far;
                (self.chunk, 4 * t.rows * t.cols + (t.rows + 4 * t.cols) * near + loads)
            }
            Way::Simple { lanes } => (self.chunk.div_ceil(lanes), 1 + 2 * far),
        };
        let Extents { m, n, batch, .. } = self.extents;
        let second = match self.splits {
            1 => 0,
            splits => LAUNCH + rounds((m * n * batch).div_ceil(4 * GROUP)) * 4 * splits * far,
        };
        rounds(self.groups * self.splits) * steps * step + second
    }

    /// Whether rows of c are written four columns at a time.
    fn tiled(&self) -> bool {
        matches!(self.way, Way::Tiled(_))
    }

    /// The kernel's definitions. `quads`: columns of c lie in memory in aligned runs of four.
    pub(super) fn define(&self, spec: KernelSpec, along: AlongSum, quads: bool) -> KernelSpec {
        let order = |along: bool| if along { "k" } else { "line" };
        let spec = spec
            .def("split", self.splits > 1)
            .def("mode", if self.tiled() && quads { "packed" } else { "scattered" });
        match self.way {
            Way::Tiled(t) => spec
                .def("way", "tiled")
                .def("high", t.high)
                .def("rows", t.rows)
                .def("cols", t.cols)
                .def("depth", t.depth)
                .def("a_order", order(along.a))
                .def("b_order", order(along.b)),
            Way::Simple { lanes } => {
                // What matters is how the operand with more lines is read.
                let along = if self.extents.n >= self.extents.m { along.b } else { along.a };
                spec.def("way", "simple").def("lanes", lanes).def("order", order(lanes > 1 && along))
            }
        }
    }

    /// The first six words of the kernel's parameters.
    pub(super) fn params(&self) -> Params {
        let Extents { m, n, k, batch } = self.extents;
        let (terms, turns) = self.way.turns();
        let turns = self.chunk.div_ceil(terms) * turns + 16;
        Params::new().size(m).size(n).size(k).size(batch).size(self.chunk).size(self.splits).turns(turns)
    }

    /// Runs the kernel over `inputs` into the contiguous `out`, and the second stage where pieces of sums remain.
    pub(super) fn run(
        &self,
        spec: &KernelSpec,
        inputs: &[&Tensor],
        params: Params,
        out: &Tensor,
    ) -> Result<()> {
        let with = |out| inputs.iter().copied().chain([out]).collect::<SmallVec<[&Tensor; 4]>>();
        if self.splits == 1 {
            return launch::launch(spec, &with(out), params, self.groups);
        }
        let sums = match out.dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            DType::U8 => DType::U32,
            other => other,
        };
        let n = out.numel();
        let parts = {
            let _tag = memory::scope::tag(Tag::Workspace);
            Tensor::empty(&[self.splits, n], sums, out.device())?
        };
        launch::launch(spec, &with(&parts), params, self.groups * self.splits)?;
        let spec = KernelSpec::new("matmul_sum")
            .def("T", sums.name())
            .def("dtype", launch::shader_dtype(out.dtype(), out.device()));
        let params = Params::new().size(n).size(self.splits).turns(4 * (self.splits + 1));
        launch::launch(&spec, &[&parts, out], params, n.div_ceil(4 * GROUP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plan_covers_its_product() {
        let gpu = Costs { units: 256, pieces: 512, near: 2, far: 4, turns: usize::MAX };
        let software = Costs { units: 1, pieces: 8, near: 20, far: 30, turns: 32_767 };
        for m in [1, 5, 16, 64, 100, 1000, 9000] {
            for n in [1, 10, 17, 64, 300, 9000] {
                for k in [1, 16, 100, 5000, 1 << 20] {
                    for (dtype, costs) in [(DType::F32, gpu), (DType::F32, software), (DType::I32, gpu)] {
                        let e = Extents { m, n, k, batch: 3 };
                        let plan = Plan::new(e, dtype, costs);
                        let made = match plan.way {
                            Way::Tiled(t) => plan.groups * t.height() * t.width(),
                            Way::Simple { lanes } => plan.groups * GROUP / lanes,
                        };
                        assert!(made >= 3 * m * n && plan.splits >= 1, "{plan:?}");
                        assert!(plan.chunk * plan.splits >= k, "{plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_long_sum_of_few_elements_is_split_between_tiles() {
        let gpu = Costs { units: 256, pieces: 512, near: 2, far: 8, turns: usize::MAX };
        // The weight's gradient of a convolution of 32 into 64 channels, over 128 images of 14 x 14.
        let plan = Plan::new(Extents { m: 64, n: 288, k: 25_088, batch: 1 }, DType::F32, gpu);
        assert!(plan.tiled() && plan.splits > 16, "{plan:?}");
    }

    #[test]
    fn every_tile_fits_the_smallest_workgroup_memory() {
        for t in TILES {
            let lines = t.height() / 4 + 1 + t.width() / 4 + 1;
            assert!(lines * t.depth * 16 <= 16 << 10, "{t:?}");
            assert!(t.rows.is_multiple_of(4), "{t:?}");
        }
    }
}

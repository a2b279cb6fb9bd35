//! Small matrix products of f32 by a kernel of our own: where a device has more multiprocessors than a product has large tiles, cuBLASLt's
//! kernels reach a third of its rate, and calling it costs more than a launch.
//!
//! The kernel is `shaders/cuda/product.cu`. It is chosen by shapes and layouts alone, so that the same product is always the same bits.

use std::ffi::CStr;
use std::sync::Arc;

use forebay_core::backend::{Epilogue, MatmulCall, MatrixOperand, Slice, SourceError};
use forebay_core::dtype::DType;

use crate::context::{Context, Stream};
use crate::gelu_grad;
use crate::kernels::{Kernels, Ran};
use crate::switches;
use crate::tensor_map::{Elements, TensorMap};
use crate::written::{Found, Source, Written, defined, launch};

/// Larger products are cuBLASLt's: operations, two for each multiplication. On an H100 1,024³ takes 49 µs (cuBLASLt 55), 2,048³ 370 (337).
const MOST: u64 = 1 << 31;
/// What has fewer rows, columns or elements in a sum is all edges.
const LEAST: u64 = 8;
const LEAST_SUM: u64 = 32;
/// Where c has more elements, and their sums no more stages, writing them is what takes time: cuBLASLt's larger tiles do it better.
const MANY: u64 = 264 * 64 * 64;
const FEW_STAGES: u64 = 8;

/// Elements along the sum that a block has of each line at a time, and how many such stages are in shared memory.
const DEPTH: u32 = 32;
const STAGES: u32 = 4;

/// A block's part of c.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    rows: u32,
    cols: u32,
    /// A thread's part of it.
    high: u32,
    wide: u32,
    /// Groups of threads that share its sums.
    slices: u32,
}

const SMALL: Tile = Tile { rows: 32, cols: 32, high: 8, wide: 8, slices: 8 };
const MIDDLE: Tile = Tile { rows: 64, cols: 32, high: 4, wide: 8, slices: 4 };
const LARGE: Tile = Tile { rows: 64, cols: 64, high: 8, wide: 8, slices: 2 };

impl Tile {
    /// Threads that make the tile.
    fn threads(&self) -> u32 {
        self.rows / self.high * (self.cols / self.wide) * self.slices
    }
}

/// How the work is cut, and what that takes: fitted to 250 products of all shapes on an H100, whose times it gives within 4 to 9 % on average.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// A block's part of c.
    pub tile: Tile,
    /// Blocks of a cluster, which share the sums of a tile.
    pub share: u32,
    /// Stages of a block up to which it is faster than cuBLASLt, which cuts longer sums into more parts.
    stages: u64,
    /// Nanoseconds of the launch, of a stage of as many blocks as there are multiprocessors, or fewer, and of what else so many blocks take.
    launch: u64,
    stage: u64,
    round: u64,
}

/// From small to large.
pub const CUTS: [Cut; 6] = [
    Cut { tile: SMALL, share: 8, stages: 8, launch: 4600, stage: 285, round: 4000 },
    Cut { tile: SMALL, share: 4, stages: 8, launch: 4000, stage: 280, round: 2000 },
    Cut { tile: SMALL, share: 2, stages: 8, launch: 4000, stage: 285, round: 100 },
    Cut { tile: SMALL, share: 1, stages: 32, launch: 2250, stage: 280, round: 500 },
    Cut { tile: MIDDLE, share: 1, stages: 32, launch: 2200, stage: 445, round: 680 },
    Cut { tile: LARGE, share: 1, stages: 32, launch: 2650, stage: 800, round: 670 },
];

impl Cut {
    /// The fastest one for a product on a device of `units` multiprocessors; `None` where cuBLASLt is faster.
    fn best(call: &MatmulCall, units: u64) -> Option<Self> {
        let MatmulCall { m, n, k, batch, .. } = *call;
        let operations = [2, m, n, k, batch].iter().try_fold(1_u64, |product, x| product.checked_mul(*x))?;
        let many = m.saturating_mul(n).saturating_mul(batch) > MANY && parts(k, DEPTH) <= FEW_STAGES;
        if operations > MOST || many || m.min(n) < LEAST || k < LEAST_SUM {
            return None;
        }
        let cut = CUTS.into_iter().min_by_key(|cut| cut.time(call, units))?;
        (cut.steps(k) <= cut.stages).then_some(cut)
    }

    /// Stages of a block.
    fn steps(&self, k: u64) -> u64 {
        parts(k, DEPTH * self.share)
    }

    /// Nanoseconds of a product, times `units`.
    fn time(&self, call: &MatmulCall, units: u64) -> u64 {
        let tiles = parts(call.m, self.tile.rows) * parts(call.n, self.tile.cols);
        let blocks = tiles * call.batch * u64::from(self.share);
        self.launch * units + self.steps(call.k) * self.stage * blocks.max(units) + self.round * blocks
    }
}

/// How many times a power of two goes into `extent`, the last time in part. By shifts: six ways to cut each product are weighed.
fn parts(extent: u64, of: u32) -> u64 {
    (extent + u64::from(of - 1)) >> of.trailing_zeros()
}

/// What is done with a product besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// Nothing.
    None,
    /// A number is added to each column.
    Bias,
    /// The sums of a's rows are written.
    Sums,
}

/// A kernel for one way to cut the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// A block's part of c.
    pub tile: Tile,
    /// Blocks of a cluster.
    pub share: u32,
    /// Whether neighbours in memory are of the next row of a, of the next column of b; else they are the next along the sum.
    pub by_lines: [bool; 2],
    /// What is done besides.
    pub finish: Finish,
}

impl Source for Kernel {
    const WITHOUT: &'static str = "small products of f32 run on cuBLASLt, which takes longer";

    fn source(&self) -> String {
        let Tile { rows, cols, high, wide, slices, .. } = self.tile;
        let defines = [
            ("ROWS", rows),
            ("COLS", cols),
            ("HIGH", high),
            ("WIDE", wide),
            ("SLICES", slices),
            ("DEPTH", DEPTH),
            ("STAGES", STAGES),
            ("SHARE", self.share),
            ("A_LINES", self.by_lines[0].into()),
            ("B_LINES", self.by_lines[1].into()),
            ("BIAS", (self.finish == Finish::Bias).into()),
            ("SUMS", (self.finish == Finish::Sums).into()),
        ];
        defined(&defines, &[forebay_shaders::cuda::STAGES, forebay_shaders::cuda::PRODUCT])
    }

    fn entry(&self) -> &'static CStr {
        c"product"
    }

    fn threads(&self) -> u32 {
        // Another warp fetches the operands.
        self.tile.threads() + 32
    }

    fn shared(&self) -> u32 {
        let Tile { rows, cols, slices, .. } = self.tile;
        let stages = STAGES * (rows + cols) * DEPTH;
        // The sums of all slices, in lines of four elements more, and those of a's rows: where the stages were.
        let sums = slices * rows * (cols + 4) + self.tile.threads();
        // The barriers lie before them, and tiles begin at multiples of 1024.
        1024 + 4 * stages.max(sums)
    }

    fn alone(&self) -> bool {
        self.share > 1
    }
}

/// `Params` of the kernel.
#[repr(C)]
struct Params {
    a: TensorMap,
    b: TensorMap,
    bias: u64,
    c: u64,
    sums: u64,
    /// From one row of c to the next, from one matrix of the batch to the next, in elements.
    lead: i64,
    step: i64,
    /// m, n, k, tiles side by side.
    sizes: [i32; 4],
    beta: f32,
    unused: i32,
}

/// An operand's map, and whether its neighbours are of the next line; `None` where the copy engine does not reach it.
fn operand(
    call: &MatmulCall,
    operand: &MatrixOperand,
    [lines, line_stride, sum_stride]: [u64; 3],
    tile: u32,
) -> Option<(TensorMap, bool)> {
    let by_lines = match (line_stride, sum_stride) {
        (_, 1) => false,
        (1, _) => true,
        _ => return None,
    };
    let (sizes, lead, boxes) = match by_lines {
        true => ([lines, call.k], sum_stride, [tile, DEPTH]),
        false => ([call.k, lines], line_stride, [DEPTH, tile]),
    };
    // Lines that overlap, and one matrix for all of a batch.
    if lead < sizes[0] || call.batch > 1 && operand.batch_stride == 0 {
        return None;
    }
    let map = TensorMap::new(
        Elements::F32,
        operand.segment.0 + operand.offset,
        &[sizes[0], sizes[1], call.batch],
        &[4 * lead, 4 * operand.batch_stride],
        &[boxes[0], boxes[1], 1],
        !by_lines,
    )?;
    Some((map, by_lines))
}

/// What a call is made of: its kernel, the kernel's parameters, the blocks. `None` for what is cuBLASLt's.
fn plan(call: &MatmulCall, arch: u32, units: u64) -> Option<(Kernel, Params, [u32; 3])> {
    let MatmulCall { m, n, k, batch, .. } = *call;
    let single = [call.dtype, call.dtype_b, call.out] == [DType::F32; 3];
    // From Hopper on there are clusters and the copy engine.
    if arch < 90 || !single || switches::allow_tf32() {
        return None;
    }
    let MatrixOperand { row_stride, col_stride, batch_stride, .. } = call.c;
    // Rows of c that overlap would be written twice.
    if batch > 65_535 || col_stride != 1 || row_stride < n || batch > 1 && batch_stride == 0 {
        return None;
    }
    let Cut { tile, share, .. } = Cut::best(call, units)?;
    let address = |slice: &Slice| slice.segment.0 + slice.offset;
    let (finish, bias, sums) = match &call.epilogue {
        Epilogue::None => (Finish::None, 0, 0),
        Epilogue::Bias(bias) if batch == 1 => (Finish::Bias, address(bias), 0),
        Epilogue::RowSums(sums) if batch == 1 => (Finish::Sums, 0, address(sums)),
        _ => return None,
    };
    let (a, a_by_lines) = operand(call, &call.a, [m, call.a.row_stride, call.a.col_stride], tile.rows)?;
    let (b, b_by_lines) = operand(call, &call.b, [n, call.b.col_stride, call.b.row_stride], tile.cols)?;
    // The kernel sums rows as it finds them in memory.
    if finish == Finish::Sums && !a_by_lines {
        return None;
    }
    let kernel = Kernel { tile, share, by_lines: [a_by_lines, b_by_lines], finish };
    let (down, across) = (parts(m, tile.rows), parts(n, tile.cols));
    let blocks = [u32::try_from(down * across * u64::from(share)).ok()?, u32::try_from(batch).ok()?, 1];
    let mut sizes = [0; 4];
    for (to, size) in sizes.iter_mut().zip([m, n, k, across]) {
        *to = i32::try_from(size).ok()?;
    }
    let params = Params {
        a,
        b,
        bias,
        c: call.c.segment.0 + call.c.offset,
        sums,
        lead: i64::try_from(row_stride).ok()?,
        step: i64::try_from(batch_stride).ok()?,
        sizes,
        beta: call.beta,
        unused: 0,
    };
    Some((kernel, params, blocks))
}

/// The kernels of one device: those of this file, and of [`gelu_grad`].
#[derive(Debug)]
pub(crate) struct Products {
    small: Written<Kernel>,
    gelu_grad: Written<gelu_grad::Kernel>,
    /// Multiprocessors.
    units: u64,
}

impl Products {
    pub(crate) fn new(units: u32) -> Self {
        Self { small: Written::default(), gelu_grad: Written::default(), units: units.max(1).into() }
    }

    /// Enqueues a product, if its kernel is compiled, or `wait` says to wait for it.
    pub(crate) fn run(
        &self,
        context: &Arc<Context>,
        kernels: &Kernels,
        stream: &Stream,
        call: &MatmulCall,
        wait: bool,
    ) -> Result<Ran, SourceError> {
        fn start<K: Source, P>(
            (kernel, params, blocks): (K, P, [u32; 3]),
            found: Found,
            stream: &Stream,
        ) -> Result<Ran, SourceError> {
            let function = match found {
                Found::Ready(function) => function,
                Found::Compiling => return Ok(Ran::NotYet),
                Found::Missing => return Ok(Ran::Declined),
            };
            // SAFETY: the kernel takes one `P`, in this layout; the core has checked that the operands lie inside their segments.
            unsafe { launch(stream, &kernel, function, blocks, &params) }?;
            Ok(Ran::Done)
        }
        if let Some(planned) = gelu_grad::plan(call, kernels.arch(), self.units) {
            let found = self.gelu_grad.find(context, kernels, planned.0, &[], wait)?;
            return start(planned, found, stream);
        }
        let Some(planned) = plan(call, kernels.arch(), self.units) else { return Ok(Ran::Declined) };
        let found = self.small.find(context, kernels, planned.0, &[], wait)?;
        start(planned, found, stream)
    }

    /// Whether there is a kernel for a product, which is compiled from now on. Enqueues nothing.
    pub(crate) fn accepts(
        &self,
        context: &Arc<Context>,
        kernels: &Kernels,
        call: &MatmulCall,
    ) -> Result<bool, SourceError> {
        let found = if let Some((kernel, ..)) = gelu_grad::plan(call, kernels.arch(), self.units) {
            self.gelu_grad.find(context, kernels, kernel, &[], false)?
        } else if let Some((kernel, ..)) = plan(call, kernels.arch(), self.units) {
            self.small.find(context, kernels, kernel, &[], false)?
        } else {
            return Ok(false);
        };
        Ok(!matches!(found, Found::Missing))
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::backend::MatmulCall;

    use super::{Cut, LARGE, MIDDLE, SMALL};
    use crate::matmul::tests::call;

    #[test]
    fn work_is_cut_as_measured_to_be_the_fastest() {
        // On an H100, each beside all others and cuBLASLt; docs/performance.md has the times.
        for (m, n, k, best) in [
            (64, 64, 64, Some((SMALL, 1))),
            (256, 256, 256, Some((SMALL, 1))),
            (256, 10, 1024, Some((SMALL, 4))),
            (24, 16, 2000, Some((SMALL, 8))),
            (256, 1024, 784, Some((MIDDLE, 1))),
            (256, 1024, 1024, Some((MIDDLE, 1))),
            (1024, 784, 256, Some((LARGE, 1))),
            (1024, 1024, 256, Some((LARGE, 1))),
            (1024, 1024, 1024, Some((LARGE, 1))),
            (32, 32, 16384, None),
            (3000, 3000, 36, None),
            (2048, 2048, 2048, None),
            (1 << 40, 1 << 40, 1 << 40, None),
        ] {
            let cut = Cut::best(&MatmulCall { m, n, k, ..call() }, 132).map(|cut| (cut.tile, cut.share));
            assert_eq!(cut, best, "{m} x {n} x {k}");
        }
    }
}

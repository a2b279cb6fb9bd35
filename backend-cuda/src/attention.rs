//! Attention on the tensor cores: kernels in CUDA C++ for f16 and bf16, in heads of up to 128 elements.
//!
//! The kernels are in `shaders/cuda`. They are compiled for a size of heads and a type when it is first used, and kept on
//! disk as all others are. Hopper (sm_90) has a form with `wgmma` and the copy engine for heads of 64 and 128; everything
//! from sm_80 on has the one with `mma`.

use std::ffi::CStr;
use std::sync::Arc;

use forebay_core::backend::{AttentionCall, AttentionGradients, AttentionOperand, SourceError};
use forebay_core::dtype::DType;
use forebay_shaders::cuda;

use crate::context::{Context, Function, Stream};
use crate::kernels::{Kernels, Ran};
use crate::switches;
use crate::tensor_map::{Elements, TensorMap};
use crate::written::{Found, Source, Written, defined, launch};

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The result.
    Forward,
    /// The gradient of the queries, and what the next pass needs of each query.
    Queries,
    /// The gradients of keys and values.
    Keys,
}

/// What is masked: nothing, or by elements of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// There is none.
    None,
    /// Bools let through.
    Bool,
    /// Numbers of f32 are added.
    Single,
    /// Numbers of the type of all else are added.
    Half,
}

impl Mask {
    /// That of a mask's type beside q of another; `None` where there is no kernel for it.
    fn of(mask: Option<DType>, dtype: DType) -> Option<Self> {
        Some(match mask {
            None => Self::None,
            Some(DType::Bool) => Self::Bool,
            Some(DType::F32) => Self::Single,
            Some(mask) if mask == dtype => Self::Half,
            Some(_) => return None,
        })
    }
}

/// A kernel for one pass, size of heads and type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// What it does.
    pub pass: Pass,
    /// Elements of a head: a multiple of 8, at most 128.
    pub head: u32,
    /// Whether elements are bf16, else f16.
    pub bf16: bool,
    /// Whether it multiplies by `wgmma`, which only sm_90a has, and loads by the copy engine.
    pub hopper: bool,
    /// What is masked.
    pub mask: Mask,
    /// Whether weights are dropped.
    pub drop: bool,
}

/// How the work is cut. Measured on an H100, 8 x 12 x 1024 x 64.
struct Tiling {
    /// Warps of a block, and how many times 16 rows each has.
    warps: u32,
    rows16: u32,
    /// Rows of the tiles that a block walks over, and how many are in shared memory.
    columns: u32,
    stages: u32,
    /// Blocks on a multiprocessor: what bounds the registers.
    blocks: u32,
    /// Whether the block's own rows stay in registers.
    keep: bool,
}

impl Tiling {
    /// Rows of a block.
    fn rows(&self) -> u32 {
        16 * self.warps * self.rows16
    }
}

impl Kernel {
    /// The kernel for a pass on an architecture such as 90, without a mask and with all weights; `None` where there is none.
    #[must_use]
    pub fn new(pass: Pass, head: u64, dtype: DType, arch: u32) -> Option<Self> {
        let bf16 = match dtype {
            DType::BF16 => true,
            DType::F16 => false,
            _ => return None,
        };
        let head = u32::try_from(head).ok().filter(|h| (8..=128).contains(h) && h.is_multiple_of(8))?;
        let hopper = arch == 90 && matches!(head, 64 | 128);
        (arch >= 80).then_some(Self { pass, head, bf16, hopper, mask: Mask::None, drop: false })
    }

    fn tiling(&self) -> Tiling {
        // Masks and random numbers take registers, which more blocks would not have.
        let extra = self.mask != Mask::None || self.drop;
        let (warps, rows16, columns, blocks, keep) = match (self.hopper, self.head > 64, self.pass) {
            (true, false, Pass::Forward) if extra => (4, 1, 64, 3, true),
            (true, false, Pass::Queries) if extra => (4, 1, 64, 3, false),
            (true, false, Pass::Keys) if extra => (4, 1, 64, 2, false),
            (false, false, Pass::Forward) if extra => (4, 1, 64, 3, true),
            (false, false, Pass::Queries) if extra => (4, 1, 64, 2, true),
            (false, true, Pass::Forward) if extra => (4, 1, 64, 2, false),
            (true, false, Pass::Forward) => (4, 1, 64, 4, true),
            (true, false, Pass::Queries) => (4, 1, 64, 4, false),
            (true, false, Pass::Keys) => (4, 1, 64, 3, false),
            (true, true, _) => (4, 1, 64, 2, false),
            (false, false, Pass::Forward) => (4, 1, 64, 4, false),
            (false, false, Pass::Queries) => (4, 1, 64, 3, true),
            (false, false, Pass::Keys) => (4, 1, 64, 2, true),
            (false, true, Pass::Forward) => (4, 2, 64, 1, false),
            (false, true, Pass::Queries) => (4, 1, 32, 2, false),
            (false, true, Pass::Keys) => (4, 1, 32, 2, false),
        };
        Tiling { warps, rows16, columns, stages: 2, blocks, keep }
    }
}

impl Source for Kernel {
    const WITHOUT: &'static str = "attention runs on the portable kernels, which are slower";

    fn entry(&self) -> &'static CStr {
        match self.pass {
            Pass::Forward => c"attention_fwd",
            Pass::Queries => c"attention_bwd_queries",
            Pass::Keys => c"attention_bwd_keys",
        }
    }

    fn threads(&self) -> u32 {
        self.tiling().warps * 32
    }

    fn shared(&self) -> u32 {
        let Tiling { columns, stages, .. } = self.tiling();
        let rows = self.tiling().rows();
        let tile = |rows: u32| rows * self.head.div_ceil(64) * 128;
        let lines = if self.pass == Pass::Keys { stages * 2 * columns * 4 } else { 0 };
        let own = if self.pass == Pass::Forward { 1 } else { 2 };
        // Tiles begin at multiples of 1024.
        1024 + own * tile(rows) + 2 * stages * tile(columns) + lines
    }

    fn source(&self) -> String {
        let Tiling { warps, rows16, columns, stages, blocks, keep } = self.tiling();
        let defines = [
            ("HEAD", self.head),
            ("BF16", self.bf16.into()),
            ("HOPPER", self.hopper.into()),
            ("PASS", self.pass as u32),
            ("WARPS", warps),
            ("ROWS16", rows16),
            ("COLS", columns),
            ("STAGES", stages),
            ("BLOCKS", blocks),
            ("KEEP", keep.into()),
            ("MASK", self.mask as u32),
            ("DROP", self.drop.into()),
        ];
        let pass = match self.pass {
            Pass::Forward => cuda::ATTENTION_FWD,
            Pass::Queries | Pass::Keys => cuda::ATTENTION_BWD,
        };
        defined(&defines, &[cuda::STAGES, cuda::HALVES, cuda::ATTENTION, pass])
    }

    fn options(&self) -> &'static [&'static str] {
        if self.hopper { &["--gpu-architecture=sm_90a"] } else { &[] }
    }
}

/// `Heads` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Heads {
    at: u64,
    batch: i64,
    head: i64,
    row: i32,
    unused: i32,
}

impl Heads {
    /// `None` where its rows do not begin at multiples of 16 bytes, or lie 2^31 elements apart.
    fn new(operand: &AttentionOperand) -> Option<Self> {
        let at = operand.segment.0 + operand.offset;
        let steps = [operand.batch_stride, operand.head_stride, operand.row_stride];
        if !at.is_multiple_of(16) || steps.iter().any(|step| !step.is_multiple_of(8)) {
            return None;
        }
        let [batch, head, row] = steps;
        let (batch, head) = (i64::try_from(batch).ok()?, i64::try_from(head).ok()?);
        Some(Self { at, batch, head, row: i32::try_from(row).ok()?, unused: 0 })
    }
}

/// `Params` of the kernels.
#[repr(C)]
struct Params {
    /// Of q, k, v and the gradient of out; none where the kernel does not load by the copy engine.
    maps: [TensorMap; 4],
    /// q, k, v, out, the gradients of out, q, k, v.
    heads: [Heads; 8],
    lse: u64,
    stats: u64,
    /// 0 where nobody wants them.
    sums: u64,
    /// Batch, heads, kv heads, queries, keys, left, right, heads at a time.
    numbers: [i32; 8],
    scale: f32,
    unused: i32,
    /// From here on, what kernels without a mask and with all weights do not take.
    mask: u64,
    /// Steps of the batch and the head.
    mask_outer: [i64; 2],
    /// Steps of the query and the key.
    mask_inner: [u32; 2],
    random: u64,
    threshold: u32,
    kept: f32,
}

impl Params {
    fn new(call: &AttentionCall) -> Option<Self> {
        let (grads, stats, sums) = match &call.backward {
            Some(b) => {
                let heads = [Heads::new(&b.out)?, Heads::new(&b.q)?, Heads::new(&b.k)?, Heads::new(&b.v)?];
                let sums = b.sums.map_or(0, |sums| sums.segment.0 + sums.offset);
                (heads, b.scratch.segment.0 + b.scratch.offset, sums)
            }
            None => ([Heads::default(); 4], 0, 0),
        };
        let [g, dq, dk, dv] = grads;
        let own = [Heads::new(&call.q)?, Heads::new(&call.k)?, Heads::new(&call.v)?, Heads::new(&call.out)?];
        let [q, k, v, out] = own;
        // What heads read besides their own rows shall stay in the cache.
        let bytes = 4 * call.keys * call.head;
        let group = (CACHE / bytes.max(1)).clamp(1, call.batch * call.heads);
        let numbers =
            [call.batch, call.heads, call.kv_heads, call.queries, call.keys, call.left, call.right, group];
        let mut all = [0; 8];
        for (to, number) in all.iter_mut().zip(numbers) {
            *to = i32::try_from(number).ok()?;
        }
        let (mask, [batch, head, query, key]) =
            call.mask.map_or((0, [0; 4]), |mask| (mask.segment.0 + mask.offset, mask.strides));
        let (random, threshold, kept) =
            call.dropout.map_or((0, 0, 1.0), |d| (d.words.segment.0 + d.words.offset, d.threshold, d.kept));
        Some(Self {
            maps: [TensorMap::NONE; 4],
            heads: [q, k, v, out, g, dq, dk, dv],
            lse: call.lse.segment.0 + call.lse.offset,
            stats,
            sums,
            numbers: all,
            scale: call.scale,
            unused: 0,
            mask,
            mask_outer: [i64::try_from(batch).ok()?, i64::try_from(head).ok()?],
            mask_inner: [u32::try_from(query).ok()?, u32::try_from(key).ok()?],
            random,
            threshold,
            kept,
        })
    }
}

/// The maps of q, k, v and the gradient of out; `None` where the copy engine does not reach one of them.
fn maps(call: &AttentionCall) -> Option<[TensorMap; 4]> {
    let map = |operand: &AttentionOperand, heads: u64, rows: u64| {
        let sizes = [call.head, rows, heads, call.batch];
        let steps = [operand.row_stride, operand.head_stride, operand.batch_stride].map(|step| 2 * step);
        let elements = if call.dtype == DType::BF16 { Elements::Bf16 } else { Elements::F16 };
        TensorMap::new(elements, operand.segment.0 + operand.offset, &sizes, &steps, &[64, 64, 1, 1], true)
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

/// Bytes of the second-level cache that the rows of the heads at work may take: half of an H100's.
const CACHE: u64 = 24 << 20;

/// The attention kernels of one device.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    kernels: Written<Kernel>,
}

/// What a call is made of: the parameters of all its kernels, and of each the blocks.
fn plan(call: &AttentionCall, arch: u32) -> Option<(Params, Vec<(Kernel, u32)>)> {
    if switches::portable() || call.scale.is_nan() || call.scale <= 0.0 {
        return None;
    }
    let mut params = Params::new(call)?;
    let mask = Mask::of(call.mask.map(|mask| mask.dtype), call.dtype)?;
    let kernel = Kernel::new(Pass::Forward, call.head, call.dtype, arch)?;
    let mut kernel = Kernel { mask, drop: call.dropout.is_some(), ..kernel };
    if kernel.hopper {
        match maps(call) {
            Some(maps) => params.maps = maps,
            None => kernel.hopper = false,
        }
    }
    let passes: &[Pass] =
        if call.backward.is_some() { &[Pass::Queries, Pass::Keys] } else { &[Pass::Forward] };
    let of_pass = |&pass: &Pass| {
        let kernel = Kernel { pass, ..kernel };
        let (rows, heads) = match pass {
            Pass::Keys => (call.keys, call.kv_heads),
            Pass::Forward | Pass::Queries => (call.queries, call.heads),
        };
        let of_block = u64::from(kernel.tiling().rows());
        let sums = call.backward.is_some_and(|b| b.sums.is_some());
        if sums && of_block != AttentionGradients::SUMMED_ROWS {
            return None;
        }
        let blocks = i32::try_from(rows.div_ceil(of_block) * heads * call.batch).ok()?;
        Some((kernel, blocks.unsigned_abs()))
    };
    let kernels = passes.iter().map(of_pass).collect::<Option<_>>()?;
    Some((params, kernels))
}

/// How far the kernels of a call are.
enum Launches {
    /// There are none.
    Declined,
    /// They are being compiled.
    Compiling,
    /// The function, the blocks and the kernel of each pass.
    Ready(Vec<(Function, u32, Kernel)>),
}

impl Attention {
    /// Enqueues attention, if its kernels are compiled, or `wait` says to wait for them.
    pub(crate) fn run(
        &self,
        context: &Arc<Context>,
        kernels: &Kernels,
        stream: &Stream,
        call: &AttentionCall,
        wait: bool,
    ) -> Result<Ran, SourceError> {
        let Some((params, passes)) = plan(call, kernels.arch()) else { return Ok(Ran::Declined) };
        let launches = match self.launches(context, kernels, call, &passes, wait)? {
            Launches::Declined => return Ok(Ran::Declined),
            Launches::Compiling => return Ok(Ran::NotYet),
            Launches::Ready(launches) => launches,
        };
        for (function, blocks, kernel) in launches {
            // SAFETY: the kernel takes one `Params`, in this layout; the core has checked that the operands lie inside
            // their segments.
            unsafe { launch(stream, &kernel, function, [blocks, 1, 1], &params) }?;
        }
        Ok(Ran::Done)
    }

    /// Whether there are kernels for a call, which are compiled from now on. Enqueues nothing.
    pub(crate) fn accepts(
        &self,
        context: &Arc<Context>,
        kernels: &Kernels,
        call: &AttentionCall,
    ) -> Result<bool, SourceError> {
        let Some((_, passes)) = plan(call, kernels.arch()) else { return Ok(false) };
        Ok(!matches!(self.launches(context, kernels, call, &passes, false)?, Launches::Declined))
    }

    fn launches(
        &self,
        context: &Arc<Context>,
        kernels: &Kernels,
        call: &AttentionCall,
        passes: &[(Kernel, u32)],
        wait: bool,
    ) -> Result<Launches, SourceError> {
        let mut launches = Vec::with_capacity(passes.len());
        let mut compiling = false;
        for &(kernel, blocks) in passes {
            // Those of the gradients take longer to compile than all that comes before them.
            let ahead = [Pass::Keys, Pass::Queries].map(|pass| Kernel { pass, ..kernel });
            let ahead = if call.wants_gradients && kernel.pass == Pass::Forward { &ahead[..] } else { &[] };
            match self.kernels.find(context, kernels, kernel, ahead, wait)? {
                Found::Ready(function) => launches.push((function, blocks, kernel)),
                Found::Compiling => compiling = true,
                Found::Missing => return Ok(Launches::Declined),
            }
        }
        Ok(if compiling { Launches::Compiling } else { Launches::Ready(launches) })
    }
}

//! The contract between the core and a GPU API: bytes, kernels and queues; no tensors, no operations.
//!
//! A backend validates nothing that the core has validated (shapes, dtypes, that slices lie inside their
//! segments); it returns what only it can know: a full device, a lost device, a kernel that does not compile. Every
//! call that is not marked as blocking only enqueues: work runs in the order of the calls, on one queue, so a block
//! of memory may be handed to the next call as soon as the last one that uses it has been enqueued. Where a device has
//! several queues, each is a backend over the same segments and kernels ([`Backend::queue`]), and events order them.

use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::Result;
pub use crate::memory::source::{
    DeviceMemory, DeviceProcess, Event, Fence, MAX_QUEUES, PageRemap, SegmentId, SegmentSource, SourceError,
    SourceLimits, VirtualMemory,
};

pub mod cards;
pub(crate) mod command;
pub(crate) mod flushing;
pub mod null;

pub use command::{Command, CommandSequence, OwnedCommand};

/// What a device is.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// The backend: `cuda`, `wgpu` or `null`.
    pub backend: &'static str,
    /// Its number among the backend's devices.
    pub index: usize,
    /// The card's name, as the driver tells it.
    pub name: String,
    /// The driver, its version and the API: `Vulkan, llvmpipe, Mesa 22.3.6`.
    pub driver: String,
    /// Whether it is a program that plays a GPU (lavapipe, SwiftShader), not one.
    pub software: bool,
    /// What its kernels may use.
    pub features: Features,
    /// What its launches must keep within.
    pub limits: Limits,
    /// What it can do at most, by its data sheet.
    pub peak_rates: PeakRates,
}

/// What a device can do in a second at most, where the driver tells enough to know: what profiles are set against.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PeakRates {
    /// Bytes of its memory.
    pub bytes_per_second: Option<f64>,
    /// Operations of dense products of 16-bit floats, at the highest clock (data sheets may assume a lower one: 989 TFLOP/s of
    /// 1,070 for an H100).
    pub flops_per_second: Option<f64>,
}

/// A reading of a device's clock, when a queue has come to it: the number of those since they were last read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimestampId(pub u32);

/// What kernels may use on a device. Every one has been tried, where a driver's word is not enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features {
    /// 16-bit floats in storage and arithmetic (`enable f16`).
    pub f16: bool,
    /// 64-bit floats.
    pub f64: bool,
    /// 64-bit integers.
    pub i64: bool,
    /// 16-bit integers in storage (`array<u16>`), with which 16-bit elements can be stored one by one.
    pub i16: bool,
    /// Subgroup operations.
    pub subgroups: bool,
    /// Bits of transcendental functions on f64 (CUDA): the shading languages have none.
    pub f64_math: bool,
    /// Products of 8-bit floats by the vendor's library, if it is there (CUDA from sm_89 on).
    pub f8_matmul: bool,
    /// Products with [`Epilogue::GeluGrad`], where the vendor's library is there (CUDA on Hopper).
    pub gelu_grad_epilogue: bool,
}

/// What launches must keep within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest slice that one binding can hold, in bytes.
    pub max_binding_bytes: u64,
    /// Storage bindings in one kernel.
    pub max_bindings: u32,
    /// Invocations in one workgroup.
    pub max_workgroup_size: u32,
    /// Bytes of workgroup memory.
    pub max_workgroup_memory: u32,
    /// Workgroups along one dimension.
    pub max_workgroups_per_dim: u32,
    /// Smallest and largest number of invocations in a subgroup.
    pub subgroup_size: (u32, u32),
    /// Bytes of parameters for one launch.
    pub max_params_bytes: u32,
    /// Turns that all loops of one invocation may take together; `u32::MAX` where nothing ends them. Mesa's software driver ends
    /// loops after 65,535 turns without an error, and the results are wrong.
    pub max_loop_iterations: u32,
}

/// A range of a segment: what a kernel binds and a copy touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The segment.
    pub segment: SegmentId,
    /// First byte; a multiple of the source's alignment for bindings, of 4 for copies.
    pub offset: u64,
    /// Length in bytes; a multiple of 4.
    pub bytes: u64,
}

/// A kernel: WGSL with one entry point.
///
/// Storage buffers are `@group(0) @binding(0..n)`, declared `read` or `read_write` (a backend may bind all of them
/// read_write); parameters are one `var<uniform>` at `@group(1) @binding(0)`, if there are any.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSource<'a> {
    /// For messages and profiles, e.g. `softmax_forward f32`.
    pub label: &'a str,
    /// The module.
    pub wgsl: &'a str,
    /// The entry point.
    pub entry_point: &'a str,
    /// Values of `override` constants.
    pub overrides: &'a [(&'a str, f64)],
    /// Whether workgroup memory starts as zeros, as WGSL says. Kernels that write every element before they read it do
    /// without: zeros cost each workgroup a pass over that memory, and some compilers seconds.
    pub zero_workgroup_memory: bool,
}

/// All of a kernel but its label: what backends know one by that they have compiled before, for another device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelContent {
    wgsl: String,
    entry_point: String,
    overrides: Vec<(String, u64)>,
    zero_workgroup_memory: bool,
}

impl KernelSource<'_> {
    /// What the kernel is, whatever it is called.
    #[must_use]
    pub fn to_content(&self) -> KernelContent {
        KernelContent {
            wgsl: self.wgsl.to_owned(),
            entry_point: self.entry_point.to_owned(),
            overrides: self.overrides.iter().map(|(name, v)| ((*name).to_owned(), v.to_bits())).collect(),
            zero_workgroup_memory: self.zero_workgroup_memory,
        }
    }
}

/// A compiled kernel, owned by its backend for the backend's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub u32);

/// One run of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// What to run.
    pub kernel: KernelId,
    /// The storage bindings, in order. A slice that the kernel writes overlaps no other slice.
    pub bindings: &'a [Slice],
    /// The bytes of the uniform block, in WGSL's layout; empty if the kernel has none.
    pub params: &'a [u8],
    /// Workgroups in x, y, z, each within `Limits::max_workgroups_per_dim`; none zero.
    pub groups: [u32; 3],
}

/// One operand of a library matrix product.
#[derive(Clone, Copy, Debug)]
pub struct MatrixOperand {
    /// Where its first element is (any multiple of the element size).
    pub segment: SegmentId,
    /// Byte offset of the first element.
    pub offset: u64,
    /// Elements from one row to the next; 1 means the matrix is stored transposed (column by column).
    pub row_stride: u64,
    /// Elements from one column to the next; one of the two strides is 1.
    pub col_stride: u64,
    /// Elements from one matrix of the batch to the next; 0 repeats one matrix.
    pub batch_stride: u64,
}

/// Rows that [`Epilogue::GeluGrad`] sums up together.
pub const GELU_GRAD_SUM_ROWS: usize = 128;

/// What a library product does besides, on its way out. Slices hold a number for each element, without gaps.
#[derive(Clone, Copy, Debug, Default)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// Adds the n numbers of a bias, of c's type, to each row.
    Bias(Slice),
    /// Adds a bias, writes the sum to `before`, of c's type and strides, and its GELU (in the form of tanh) to c.
    GeluBias {
        /// n numbers of c's type.
        bias: Slice,
        /// What GELU is taken of.
        pre_activation: MatrixOperand,
    },
    /// Multiplies by the derivative of GELU (in the form of tanh) at x, and writes the GELU of x besides; both are matrices of c's type and
    /// strides. Where there is one: see [`Features::gelu_grad`].
    GeluGrad {
        /// What GELU is taken of.
        x: MatrixOperand,
        /// GELU of x.
        gelu: MatrixOperand,
        /// The sums of c's rows before they are rounded, n numbers of f32 for each [`GELU_GRAD_ROWS`] rows (the last may be fewer).
        row_block_sums: Slice,
    },
    /// The sums of a's rows, over k, go to m numbers of a's type.
    RowSums(Slice),
    /// Of 8-bit floats: multiplies by a number, f32, of a and one of b, and adds the n numbers of a bias, of c's type.
    Scaled {
        /// Of a and of b; none are 1.
        scales: Option<[Slice; 2]>,
        /// n numbers of c's type, of 16 bits.
        bias: Option<Slice>,
    },
}

/// `c = a * b` over a batch: a is m x k, b is k x n, c is m x n. Sums are kept in f32 (f64 for f64).
#[derive(Clone, Copy, Debug)]
pub struct MatmulCall {
    /// Element type of a, and of b, but of 8-bit floats.
    pub dtype: DType,
    /// Element type of b: 8-bit floats mix.
    pub dtype_b: DType,
    /// Element type of c: that of a and b, or f32 for 16-bit ones; a wider float for 8-bit ones.
    pub dtype_out: DType,
    /// Rows of a and c.
    pub m: u64,
    /// Columns of b and c.
    pub n: u64,
    /// Columns of a, rows of b.
    pub k: u64,
    /// Number of matrices.
    pub batch: u64,
    /// The left operand.
    pub a: MatrixOperand,
    /// The right operand.
    pub b: MatrixOperand,
    /// The result; `col_stride` is 1.
    pub c: MatrixOperand,
    /// 0.0 overwrites c, 1.0 adds to it.
    pub beta: f32,
    /// What is done besides; of one product, not of a batch.
    pub epilogue: Epilogue,
}

impl MatmulCall {
    /// Whether the library takes the types: floats, f32 from 16-bit ones, and from 8-bit ones, of which one is e4m3.
    #[must_use]
    pub fn has_supported_dtypes(&self) -> bool {
        if self.dtype.is_storage_only() {
            let types = [self.dtype, self.dtype_b];
            return types.contains(&DType::F8E4M3)
                && self.dtype_b.is_storage_only()
                && matches!(self.dtype_out, DType::F32 | DType::F16 | DType::BF16);
        }
        let widened = self.dtype.size() == 2 && self.dtype_out == DType::F32;
        self.dtype.is_float() && self.dtype_b == self.dtype && (self.dtype_out == self.dtype || widened)
    }

    /// Whether the library takes the epilogue, which wants lines of 16 bytes: of 16-bit floats, for its matrix units, and of f32
    /// for a bias or sums.
    #[must_use]
    pub fn supports_epilogue(&self) -> bool {
        if self.dtype.is_storage_only() || matches!(self.epilogue, Epilogue::Scaled { .. }) {
            return self.supports_fp8_scales();
        }
        let line = |o: &MatrixOperand| {
            (o.row_stride.max(o.col_stride) * self.dtype.size() as u64).is_multiple_of(16)
                && o.offset.is_multiple_of(16)
        };
        let aligned = || {
            [&self.a, &self.b, &self.c].into_iter().all(line)
                && self.n.is_multiple_of(16 / self.dtype.size() as u64)
                && self.m.is_multiple_of(16 / self.dtype.size() as u64)
        };
        let with_gelu = matches!(self.epilogue, Epilogue::GeluBias { .. } | Epilogue::GeluGrad { .. });
        let wide = self.dtype == DType::F32 && !with_gelu;
        match self.epilogue {
            Epilogue::None => true,
            Epilogue::GeluGrad { x, gelu, .. }
                if !(self.is_row_major_overwrite() && line(&x) && line(&gelu)) =>
            {
                false
            }
            // Sums of rows are not there beside results of another type.
            Epilogue::RowSums(_) if self.dtype_out != self.dtype => false,
            _ => {
                let narrow = self.dtype.size() == 2 && self.dtype.is_float();
                self.batch == 1 && (narrow || wide) && aligned()
            }
        }
    }

    /// Whether a and b lie by rows, and c is written over in their type.
    fn is_row_major_overwrite(&self) -> bool {
        [&self.a, &self.b].iter().all(|o| o.col_stride == 1)
            && self.dtype == self.dtype_b
            && self.dtype == self.dtype_out
            && self.beta == 0.0
    }

    /// The same for 8-bit floats: a lies by rows, b by columns, in lines of 16 bytes.
    fn supports_fp8_scales(&self) -> bool {
        let Epilogue::Scaled { bias, .. } = self.epilogue else { return false };
        let line = |stride: u64, side: u64, o: &MatrixOperand| {
            side == 1 && stride >= self.k && stride.is_multiple_of(16) && o.offset.is_multiple_of(16)
        };
        self.dtype.is_storage_only()
            && self.batch == 1
            && self.beta == 0.0
            && [self.k, self.n].iter().all(|extent| extent.is_multiple_of(16))
            && line(self.a.row_stride, self.a.col_stride, &self.a)
            && line(self.b.col_stride, self.b.row_stride, &self.b)
            && self.c.offset.is_multiple_of(16)
            && (self.c.row_stride * self.dtype_out.size() as u64).is_multiple_of(16)
            && (bias.is_none() || self.dtype_out.size() == 2)
    }

    /// Whether each operand lies by rows or by columns, which do not overlap: what libraries take. (A backend may be
    /// handed others, and declines.)
    #[must_use]
    pub fn is_row_or_column_major(&self) -> bool {
        let lines = |o: &MatrixOperand, rows: u64, cols: u64| {
            let by_rows = (o.col_stride == 1 || cols == 1) && (o.row_stride >= cols || rows == 1);
            let by_columns = (o.row_stride == 1 || rows == 1) && (o.col_stride >= rows || cols == 1);
            by_rows || by_columns
        };
        lines(&self.a, self.m, self.k) && lines(&self.b, self.k, self.n) && lines(&self.c, self.m, self.n)
    }
}

/// One operand of [`AttentionCall`]: rows of a head's elements, which lie side by side.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOperand {
    /// Where its first element is (any multiple of the element size).
    pub segment: SegmentId,
    /// Byte offset of the first element.
    pub offset: u64,
    /// Elements from one entry of the batch to the next.
    pub batch_stride: u64,
    /// Elements from one head to the next.
    pub head_stride: u64,
    /// Elements from one query or key to the next.
    pub row_stride: u64,
}

/// What lets weights of [`AttentionCall`] through, where it is true, or is added to the scores.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMask {
    /// Its element type: bool, or a float.
    pub dtype: DType,
    /// Where its first element is (any multiple of the element size).
    pub segment: SegmentId,
    /// Byte offset of the first element.
    pub offset: u64,
    /// Elements from one to the next entry of the batch, head, query and key; 0 repeats.
    pub strides: [u64; 4],
}

/// Weights of [`AttentionCall`] that are dropped. The weight of query i of head h of all batches' heads and of key j has half a word
/// of Philox 4x32-10: of counter \[offset, offset, h · queries + i, j / 8\] the word j / 2 % 4, its upper half if j is odd.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDropout {
    /// Two words of the generator's offset, two of its seed.
    pub philox_state: Slice,
    /// Weights whose 16 bits are below it are dropped.
    pub threshold: u32,
    /// What the others are multiplied by.
    pub keep_scale: f32,
}

/// softmax(scale · q kᵀ + mask) · v for each head, where query i sees keys i - `left` to i + `right`; or its gradients.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall {
    /// Element type of everything but `lse` and the scratch memory.
    pub dtype: DType,
    /// Entries of the batch.
    pub batch: u64,
    /// Heads of q and out.
    pub heads: u64,
    /// Heads of k and v, each of which serves the same number of q's, neighbours.
    pub kv_heads: u64,
    /// Queries of a head.
    pub queries: u64,
    /// Keys of a head.
    pub keys: u64,
    /// Elements of a row of q, k, v and out.
    pub head_dim: u64,
    /// Keys before its own that a query sees, at most 2^30.
    pub window_left: u64,
    /// Keys behind its own that a query sees, at most 2^30.
    pub window_right: u64,
    /// What products are multiplied by.
    pub scale: f32,
    /// The queries.
    pub q: AttentionOperand,
    /// The keys.
    pub k: AttentionOperand,
    /// The values.
    pub v: AttentionOperand,
    /// The result: written forward, read backward. A query that sees nothing has zeros.
    pub out: AttentionOperand,
    /// \[batch, heads, queries\] of f32: the logarithm of each query's sum of exponentials, 0 if it sees nothing. Written forward, read
    /// backward.
    pub lse: Slice,
    /// The mask, if there is one.
    pub mask: Option<AttentionMask>,
    /// What is dropped, if anything is.
    pub dropout: Option<AttentionDropout>,
    /// Whether its gradients will be asked for, so that a backend may compile their kernels meanwhile.
    pub requires_grad: bool,
    /// What a backward call has besides.
    pub backward: Option<AttentionGradients>,
}

/// What [`AttentionCall`] takes and gives backward.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGradients {
    /// The gradient of the result.
    pub out: AttentionOperand,
    /// That of the queries, written.
    pub q: AttentionOperand,
    /// That of the keys, written.
    pub k: AttentionOperand,
    /// That of the values, written.
    pub v: AttentionOperand,
    /// Scratch memory of twice the size of `lse`.
    pub scratch: Slice,
    /// Where to write the sums of the gradients over [`SUMMED_ROWS`](Self::SUMMED_ROWS) rows each, if they are wanted: of q, k and v of one
    /// length, \[batch, blocks of rows, heads of q, of k and of v, elements\] of f32.
    pub grad_sums: Option<Slice>,
}

impl AttentionGradients {
    /// Rows of one of the `sums`.
    pub const ROWS_PER_SUM: u64 = 64;
}

impl AttentionCall {
    /// Floating-point operations as they are commonly counted: two products forward, five backward, of what is seen.
    #[must_use]
    pub fn flops(&self) -> f64 {
        // Query i sees the keys from i - left to i + right that there are.
        let (n, m) = (self.queries as f64, self.keys as f64);
        let below = |bound: f64| {
            // Pairs with key - query below a bound: a sum of min(max(bound + i, 0), m) over the queries.
            let first = (-bound).clamp(0.0, n);
            let full = (m - bound).clamp(first, n);
            (bound + first + bound + full - 1.0) / 2.0 * (full - first) + (n - full) * m
        };
        let pairs = (below(self.window_right as f64 + 1.0) - below(-(self.window_left as f64))).max(0.0);
        let products = if self.backward.is_some() { 5.0 } else { 2.0 };
        products * 2.0 * (self.batch * self.heads * self.head_dim) as f64 * pairs
    }

    /// Bytes that are read and written if each is touched once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let rows = 2 * self.heads * self.queries + 2 * self.kv_heads * self.keys;
        let times = if self.backward.is_some() { 2 } else { 1 };
        times * self.batch * rows * self.head_dim * self.dtype.size() as u64
    }
}

/// A GPU API, or something that plays one. Segments, fences and memory are in its supertrait.
pub trait Backend: SegmentSource {
    /// What the device is and can do.
    fn info(&self) -> &DeviceInfo;

    /// Compiles a kernel, or finds it in the backend's disk cache. A backend may go on compiling when it returns: launches then wait for
    /// it, with all that is enqueued behind them, and what the compiler says against it is an error of whoever waits for the device.
    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId>;
    /// Waits until a kernel is compiled. Blocking.
    fn wait_compiled(&self, kernel: KernelId) -> Result<()> {
        let _ = kernel;
        Ok(())
    }
    /// Enqueues one run of a kernel.
    fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    /// Enqueues a copy from the host; `data` may be reused on return. Lengths are equal.
    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()>;
    /// Copies to the host, after everything enqueued before. Blocking. Lengths are equal.
    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()>;
    /// Enqueues a copy on the device, or between it and memory of [`alloc_host`](Self::alloc_host). The ranges do not
    /// overlap.
    fn copy(&self, dst: Slice, src: Slice) -> Result<()>;
    /// Enqueues setting every 32-bit word of `dst`.
    fn fill(&self, dst: Slice, word: u32) -> Result<()>;
    /// Hands everything enqueued so far to the device, without waiting.
    fn flush(&self) -> Result<()>;

    /// Enqueues a reading of the device's clock; `None` where it has none.
    fn record_timestamp(&self) -> Result<Option<TimestampId>> {
        Ok(None)
    }
    /// What all stamps of all queues have read, in nanoseconds on one scale, in the order of their numbers; they are
    /// forgotten then. Blocking.
    fn read_timestamps(&self) -> Result<Vec<f64>> {
        Ok(Vec::new())
    }

    /// One of the device's [queues](SegmentSource::queues): a backend that enqueues there, over the same segments and
    /// kernels. `None` where it is this one, for a device with one queue.
    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        let _ = number;
        Ok(None)
    }
    /// Whether [`alloc_host`](Self::alloc_host) gives anything.
    fn supports_pinned_host(&self) -> bool {
        false
    }
    /// Memory of the host that the device copies from and to by itself (page-locked): a segment for [`copy`](Self::copy)
    /// alone.
    fn alloc_host(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        let _ = bytes;
        let detail = "this backend has no memory of the host that the device reaches".to_owned();
        Err(SourceError::Driver { call: "alloc_host", detail })
    }
    /// Gives back what [`alloc_host`](Self::alloc_host) gave, after every use of it has been fenced.
    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        let _ = segment;
        Ok(())
    }

    /// Enqueues a matrix product of the vendor's library; `false` where there is none for this call, and the core's
    /// own kernel is used.
    fn matmul(&self, call: &MatmulCall) -> Result<bool> {
        let _ = call;
        Ok(false)
    }
    /// Enqueues attention by kernels of the backend's own; `false` where there are none for this call, and the core's are used.
    fn attention(&self, call: &AttentionCall) -> Result<bool> {
        let _ = call;
        Ok(false)
    }
    /// Commands that this queue will be given again and again, in a form that is quicker to enqueue; `None` where there is
    /// none. What they name stays where it is until the result is dropped, and each has run before, at the same places.
    /// Enqueues nothing.
    fn prepare_commands(&self, commands: &[Command<'_>]) -> Result<Option<Box<dyn CommandSequence>>> {
        let _ = commands;
        Ok(None)
    }
    /// Whether [`matmul`](Self::matmul) takes products of floats now. A dry run must know it: the core's own kernels need
    /// scratch memory.
    fn has_matmul_library(&self) -> bool {
        false
    }
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} {} ({})", self.backend, self.index, self.name, self.driver)
    }
}

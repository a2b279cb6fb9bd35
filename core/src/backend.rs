//! Contract between the core and a GPU API: bytes, kernels and queues, but no tensors and no operations.
//!
//! A backend does not repeat the core's checks of shapes, dtypes and slice bounds. It reports errors that
//! only the backend can detect: a full device, a lost device, a kernel that does not compile.
//!
//! Every call that is not marked as blocking only enqueues work. Work runs in call order on one queue. A
//! block of memory may therefore be reused by the next call once the last call that uses the block is
//! enqueued. On a device with several queues, each queue is a backend over the same segments and kernels
//! ([`Backend::open_queue`]), and events order the queues.

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
mod forward;
pub(crate) mod host_memory;
pub mod null;
mod pool_contents;

pub use command::{Command, CommandSequence, OwnedCommand};

/// Description of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Name of the backend: `cuda`, `wgpu` or `null`.
    pub backend: &'static str,
    /// Index among the backend's devices.
    pub index: usize,
    /// Name of the card as reported by the driver.
    pub name: String,
    /// Driver, its version and the API: `Vulkan, llvmpipe, Mesa 22.3.6`.
    pub driver: String,
    /// If true, the device is a software rasteriser (lavapipe, SwiftShader), not a GPU.
    pub software: bool,
    /// Optional capabilities that kernels may use.
    pub features: Features,
    /// Limits of kernel launches.
    pub limits: Limits,
    /// Peak rates according to the data sheet.
    pub peak_rates: PeakRates,
}

/// Peak rates per second, which profiles compare measured rates with. `None` if the driver reports too
/// little.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PeakRates {
    /// Memory bandwidth in bytes per second.
    pub bytes_per_second: Option<f64>,
    /// Dense 16-bit floating-point operations per second at the highest clock. Data sheets may assume a lower
    /// clock: 989 TFLOP/s instead of 1,070 for an H100.
    pub flops_per_second: Option<f64>,
}

/// Index of a timestamp query, counted since the last [`Backend::read_timestamps`]. The timestamp is taken
/// when the queue reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimestampId(pub u32);

/// Optional capabilities of a device. Capabilities that drivers misreport are confirmed by a test kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features {
    /// 16-bit floats in storage and arithmetic (`enable f16`).
    pub f16: bool,
    /// 64-bit floats.
    pub f64: bool,
    /// 64-bit integers.
    pub i64: bool,
    /// 16-bit integers in storage (`array<u16>`), which allow 16-bit elements to be stored one by one.
    pub i16: bool,
    /// Subgroup operations.
    pub subgroups: bool,
    /// Transcendental functions on f64 (CUDA). The shading languages have none.
    pub f64_math: bool,
    /// 8-bit float matrix products by the vendor's library, if it is installed (CUDA from sm_89 on).
    pub f8_matmul: bool,
    /// Matrix products with [`Epilogue::GeluGrad`], if the vendor's library is installed (CUDA on Hopper).
    pub gelu_grad_epilogue: bool,
}

/// Limits of kernel launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of one binding in bytes.
    pub max_binding_bytes: u64,
    /// Maximum number of storage bindings of a kernel.
    pub max_bindings: u32,
    /// Maximum number of invocations in a workgroup.
    pub max_workgroup_size: u32,
    /// Maximum bytes of workgroup memory.
    pub max_workgroup_memory: u32,
    /// Maximum number of workgroups along one dimension.
    pub max_workgroups_per_dim: u32,
    /// Smallest and largest number of invocations in a subgroup.
    pub subgroup_size: (u32, u32),
    /// Maximum bytes of parameters of one launch.
    pub max_params_bytes: u32,
    /// Maximum number of iterations that all loops of one invocation may run in total; `u32::MAX` if
    /// unlimited. Mesa's software driver silently ends loops after 65,535 iterations, which makes results
    /// wrong.
    pub max_loop_iterations: u32,
}

/// Range of a segment that a kernel binds or a copy accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Segment that contains the range.
    pub segment: SegmentId,
    /// First byte: a multiple of the source's alignment for bindings, and of 4 for copies.
    pub offset: u64,
    /// Length in bytes; a multiple of 4.
    pub bytes: u64,
}

/// Source of a kernel: WGSL with one entry point.
///
/// Storage buffers are `@group(0) @binding(0..n)`, declared `read` or `read_write`; a backend may bind all of
/// them as read_write. Parameters, if any, are one `var<uniform>` at `@group(1) @binding(0)`.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSource<'a> {
    /// Name for messages and profiles, e.g. `softmax_forward f32`.
    pub label: &'a str,
    /// WGSL module.
    pub wgsl: &'a str,
    /// Name of the entry point.
    pub entry_point: &'a str,
    /// Values of `override` constants.
    pub overrides: &'a [(&'a str, f64)],
    /// If true, workgroup memory is zero-initialised, as WGSL specifies. Kernels that write every element
    /// before they read it disable this: zeroing costs each workgroup a pass, and some compilers seconds.
    pub zero_workgroup_memory: bool,
}

/// A kernel's source without its label: the key under which backends share compiled kernels between devices.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelContent {
    wgsl: String,
    entry_point: String,
    overrides: Vec<(String, u64)>,
    zero_workgroup_memory: bool,
}

impl KernelSource<'_> {
    /// Returns the cache key of this source.
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

/// Handle of a compiled kernel. The backend keeps the kernel for its whole lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub u32);

/// Arguments of one kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Kernel to launch.
    pub kernel: KernelId,
    /// Storage bindings, in order. A slice that the kernel writes must not overlap any other slice.
    pub bindings: &'a [Slice],
    /// Bytes of the uniform block in WGSL's layout; empty if the kernel has none.
    pub params: &'a [u8],
    /// Workgroups in x, y and z: each at least 1 and at most `Limits::max_workgroups_per_dim`.
    pub groups: [u32; 3],
}

/// Operand of a library matrix product.
#[derive(Clone, Copy, Debug)]
pub struct MatrixOperand {
    /// Segment that contains the operand.
    pub segment: SegmentId,
    /// Byte offset of the first element: any multiple of the element size.
    pub offset: u64,
    /// Elements from one row to the next; 1 means that the matrix is stored transposed (column-major).
    pub row_stride: u64,
    /// Elements from one column to the next. One of the two strides is 1.
    pub col_stride: u64,
    /// Elements from one matrix of the batch to the next; 0 repeats one matrix.
    pub batch_stride: u64,
}

/// Number of rows per partial sum of [`Epilogue::GeluGrad`].
pub const GELU_GRAD_SUM_ROWS: usize = 128;

/// Work that a library product does on its result before the store. Slices are contiguous.
#[derive(Clone, Copy, Debug, Default)]
pub enum Epilogue {
    /// No additional work.
    #[default]
    None,
    /// Adds a bias of n values of c's dtype to each row.
    Bias(Slice),
    /// Adds a bias, writes the sum to `pre_activation`, and writes its GELU (tanh approximation) to c.
    GeluBias {
        /// Bias: n values of c's dtype.
        bias: Slice,
        /// Argument of GELU.
        pre_activation: MatrixOperand,
    },
    /// Multiplies the product by the derivative of GELU (tanh approximation) at x, and also writes the GELU
    /// of x. Both matrices have c's dtype and strides. Requires [`Features::gelu_grad_epilogue`].
    GeluGrad {
        /// Argument of GELU.
        x: MatrixOperand,
        /// GELU of x, written.
        gelu: MatrixOperand,
        /// Column sums of c before rounding, written: n f32 values for each block of [`GELU_GRAD_SUM_ROWS`]
        /// rows. The last block may have fewer rows.
        row_block_sums: Slice,
    },
    /// Writes the sums of a's rows over k: m values of a's dtype.
    RowSums(Slice),
    /// Multiplies a product of 8-bit floats by an f32 scale of a and one of b, then adds a bias of n values
    /// of c's dtype.
    Scaled {
        /// Scales of a and of b; `None` means 1.
        scales: Option<[Slice; 2]>,
        /// Bias: n values of c's dtype, which has 16 bits.
        bias: Option<Slice>,
    },
}

/// Batched matrix product `c = a * b`: a is m x k, b is k x n, c is m x n. Sums accumulate in f32 (f64 for
/// f64).
#[derive(Clone, Copy, Debug)]
pub struct MatmulCall {
    /// Element type of a. b has the same type unless both are 8-bit floats.
    pub dtype: DType,
    /// Element type of b. The two 8-bit float types may be mixed.
    pub dtype_b: DType,
    /// Element type of c: that of a and b, f32 for 16-bit operands, or a wider float for 8-bit operands.
    pub dtype_out: DType,
    /// Rows of a and c.
    pub m: u64,
    /// Columns of b and c.
    pub n: u64,
    /// Columns of a, rows of b.
    pub k: u64,
    /// Number of matrices.
    pub batch: u64,
    /// Left operand.
    pub a: MatrixOperand,
    /// Right operand.
    pub b: MatrixOperand,
    /// Result; `col_stride` is 1.
    pub c: MatrixOperand,
    /// 0.0 overwrites c, 1.0 adds to it.
    pub beta: f32,
    /// Epilogue. Requires a batch of 1.
    pub epilogue: Epilogue,
}

impl MatmulCall {
    /// Reports whether the library supports the dtypes: equal floats, f32 from 16-bit floats, or 8-bit floats
    /// of which at least one is e4m3.
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

    /// Reports whether the library supports the epilogue, which needs rows aligned to 16 bytes. Tensor cores
    /// take 16-bit floats; f32 allows only a bias or row sums.
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
            // The library has no row sums for results of another dtype.
            Epilogue::RowSums(_) if self.dtype_out != self.dtype => false,
            _ => {
                let narrow = self.dtype.size() == 2 && self.dtype.is_float();
                self.batch == 1 && (narrow || wide) && aligned()
            }
        }
    }

    /// Reports whether a and b are row-major and c is overwritten in their dtype.
    fn is_row_major_overwrite(&self) -> bool {
        [&self.a, &self.b].iter().all(|o| o.col_stride == 1)
            && self.dtype == self.dtype_b
            && self.dtype == self.dtype_out
            && self.beta == 0.0
    }

    /// Reports whether the library supports the scaled 8-bit product: row-major a, column-major b, rows
    /// aligned to 16 bytes.
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

    /// Reports whether each operand is row-major or column-major without overlap, as libraries require. A
    /// backend declines other layouts.
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

/// Operand of [`AttentionCall`]: contiguous rows of a head's elements.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOperand {
    /// Segment that contains the operand.
    pub segment: SegmentId,
    /// Byte offset of the first element: any multiple of the element size.
    pub offset: u64,
    /// Elements from one entry of the batch to the next.
    pub batch_stride: u64,
    /// Elements from one head to the next.
    pub head_stride: u64,
    /// Elements from one query or key to the next.
    pub row_stride: u64,
}

/// Mask of [`AttentionCall`]: a bool mask keeps weights where true, and a float mask is added to the scores.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMask {
    /// Element type: bool or a float.
    pub dtype: DType,
    /// Segment that contains the operand.
    pub segment: SegmentId,
    /// Byte offset of the first element: any multiple of the element size.
    pub offset: u64,
    /// Strides in elements along batch, heads, queries and keys; 0 broadcasts.
    pub strides: [u64; 4],
}

/// Dropout of [`AttentionCall`]. Each weight uses 16 bits of Philox 4x32-10. Let h count the heads of all
/// batches. The weight of query i and key j uses counter \[offset, offset, h · queries + i, j / 8\] and word
/// j / 2 % 4. An odd j uses the upper half of that word, an even j the lower half.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDropout {
    /// Four words: two of the generator's offset, then two of its seed.
    pub philox_state: Slice,
    /// Threshold below which the 16 bits drop a weight.
    pub threshold: u32,
    /// Factor of the weights that are kept.
    pub keep_scale: f32,
}

/// Attention `softmax(scale · q kᵀ + mask) · v` for each head, or its gradients. Query i attends to keys i -
/// `window_left` to i + `window_right`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall {
    /// Element type of everything but `lse` and the scratch memory.
    pub dtype: DType,
    /// Batch size.
    pub batch: u64,
    /// Heads of q and out.
    pub heads: u64,
    /// Heads of k and v. Each is shared by the same number of consecutive heads of q (grouped-query
    /// attention).
    pub kv_heads: u64,
    /// Queries per head.
    pub queries: u64,
    /// Keys per head.
    pub keys: u64,
    /// Elements per row of q, k, v and out.
    pub head_dim: u64,
    /// Number of keys before its own position that a query attends to; at most 2^30.
    pub window_left: u64,
    /// Number of keys after its own position that a query attends to; at most 2^30.
    pub window_right: u64,
    /// Factor of the scores.
    pub scale: f32,
    /// Queries.
    pub q: AttentionOperand,
    /// Keys.
    pub k: AttentionOperand,
    /// Values.
    pub v: AttentionOperand,
    /// Result: written forward, read backward. A query that attends to no key has a row of zeros.
    pub out: AttentionOperand,
    /// Logarithm of each query's sum of exponentials, 0 if it attends to no key: f32 \[batch, heads,
    /// queries\]. Written forward, read backward.
    pub lse: Slice,
    /// Mask, if any.
    pub mask: Option<AttentionMask>,
    /// Dropout, if any.
    pub dropout: Option<AttentionDropout>,
    /// If true, gradients will be requested; a backend may start to compile their kernels.
    pub requires_grad: bool,
    /// Gradient operands of a backward call.
    pub backward: Option<AttentionGradients>,
}

/// Gradient operands of a backward [`AttentionCall`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionGradients {
    /// Gradient of the result, read.
    pub out: AttentionOperand,
    /// Gradient of the queries, written.
    pub q: AttentionOperand,
    /// Gradient of the keys, written.
    pub k: AttentionOperand,
    /// Gradient of the values, written.
    pub v: AttentionOperand,
    /// Scratch memory, twice the size of `lse`.
    pub scratch: Slice,
    /// Optional sums of the gradients over blocks of [`ROWS_PER_SUM`](Self::ROWS_PER_SUM) rows: f32 \[batch,
    /// blocks of rows, heads of q, k and v, elements\]. Requires q, k and v of one length.
    pub grad_sums: Option<Slice>,
}

impl AttentionGradients {
    /// Number of rows per sum in `grad_sums`.
    pub const ROWS_PER_SUM: u64 = 64;
}

impl AttentionCall {
    /// Returns the number of floating-point operations by the usual convention: two products forward, five
    /// backward, over visible pairs only.
    #[must_use]
    pub fn flops(&self) -> f64 {
        // Query i attends to the existing keys from i - left to i + right.
        let (n, m) = (self.queries as f64, self.keys as f64);
        let below = |bound: f64| {
            // Number of pairs with key - query < bound: the sum of min(max(bound + i, 0), m) over the
            // queries.
            let first = (-bound).clamp(0.0, n);
            let full = (m - bound).clamp(first, n);
            (bound + first + bound + full - 1.0) / 2.0 * (full - first) + (n - full) * m
        };
        let pairs = (below(self.window_right as f64 + 1.0) - below(-(self.window_left as f64))).max(0.0);
        let products = if self.backward.is_some() { 5.0 } else { 2.0 };
        products * 2.0 * (self.batch * self.heads * self.head_dim) as f64 * pairs
    }

    /// Returns the bytes read and written if each operand is accessed once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let rows = 2 * self.heads * self.queries + 2 * self.kv_heads * self.keys;
        let times = if self.backward.is_some() { 2 } else { 1 };
        times * self.batch * rows * self.head_dim * self.dtype.size() as u64
    }
}

/// GPU API, or an imitation of one. Segments, fences and memory belong to the supertrait.
pub trait Backend: SegmentSource {
    /// Returns the description of the device.
    fn info(&self) -> &DeviceInfo;

    /// Compiles a kernel or loads it from the backend's disk cache. A backend may continue to compile after
    /// it returns. Later work on a queue that launched the kernel then waits. A compile error is reported by
    /// the next call that waits for the device.
    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId>;
    /// Waits until a kernel is compiled. Blocks.
    fn wait_compiled(&self, kernel: KernelId) -> Result<()> {
        let _ = kernel;
        Ok(())
    }
    /// Enqueues a kernel launch.
    fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    /// Enqueues a copy from the host. The lengths must be equal. The caller may reuse `data` on return.
    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()>;
    /// Copies to the host after all previously enqueued work. The lengths must be equal. Blocks.
    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()>;
    /// Enqueues a copy within the device, or between the device and memory of
    /// [`alloc_host`](Self::alloc_host). The ranges must not overlap.
    fn copy(&self, dst: Slice, src: Slice) -> Result<()>;
    /// Enqueues a fill that sets every 32-bit word of `dst`.
    fn fill(&self, dst: Slice, word: u32) -> Result<()>;
    /// Submits everything enqueued so far to the device, without waiting.
    fn flush(&self) -> Result<()>;

    /// Enqueues a timestamp query; returns `None` if the device has no clock.
    fn record_timestamp(&self) -> Result<Option<TimestampId>> {
        Ok(None)
    }
    /// Returns the timestamps of all queues since the last call, in nanoseconds on one clock, indexed by
    /// [`TimestampId`]. Blocks.
    fn read_timestamps(&self) -> Result<Vec<f64>> {
        Ok(Vec::new())
    }

    /// Returns a backend for one of the device's [queues](SegmentSource::queue_count), over the same segments
    /// and kernels. Returns `None` if the device has one queue.
    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        let _ = number;
        Ok(None)
    }
    /// Reports whether [`alloc_host`](Self::alloc_host) is supported.
    fn supports_pinned_host(&self) -> bool {
        false
    }
    /// Allocates page-locked host memory that the device copies from and to directly. The segment may only be
    /// used by [`copy`](Self::copy).
    fn alloc_host(&self, bytes: u64) -> Result<SegmentId, SourceError> {
        let _ = bytes;
        let detail = "this backend has no memory of the host that the device reaches".to_owned();
        Err(SourceError::Driver { call: "alloc_host", detail })
    }
    /// Frees memory of [`alloc_host`](Self::alloc_host). Every use must have been fenced.
    fn free_host(&self, segment: SegmentId) -> Result<(), SourceError> {
        let _ = segment;
        Ok(())
    }

    /// Enqueues a matrix product by the vendor's library. Returns `false` if the library does not support the
    /// call; the core then uses its own kernel.
    fn matmul(&self, call: &MatmulCall) -> Result<bool> {
        let _ = call;
        Ok(false)
    }
    /// Enqueues attention by the backend's own kernels. Returns `false` if they do not support the call; the
    /// core then uses its own kernels.
    fn attention(&self, call: &AttentionCall) -> Result<bool> {
        let _ = call;
        Ok(false)
    }
    /// Prepares commands that this queue will run repeatedly, so that they are cheaper to enqueue. Returns
    /// `None` if the backend has no such form. Enqueues nothing.
    ///
    /// Memory that the commands name must not move until the result is dropped. Each command must have run
    /// before with the same addresses.
    fn prepare_commands(&self, commands: &[Command<'_>]) -> Result<Option<Box<dyn CommandSequence>>> {
        let _ = commands;
        Ok(None)
    }
    /// Reports whether [`matmul`](Self::matmul) supports float products. A dry run depends on it, because the
    /// core's own kernels need scratch memory.
    fn has_matmul_library(&self) -> bool {
        false
    }
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} {} ({})", self.backend, self.index, self.name, self.driver)
    }
}

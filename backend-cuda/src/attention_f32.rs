//! Gradients of f32 attention in one pass over the keys: five products, where the portable kernels need seven.
//!
//! The kernels are in `shaders/cuda/attention_f32_bwd.cu`. They multiply in exact f32. Calls with a mask or with
//! dropout use the portable kernels, and so do forward passes, which are as fast there.

use std::ffi::CStr;
use std::sync::Arc;

use forebay_core::backend::{AttentionCall, AttentionGradients, SourceError};
use forebay_core::dtype::DType;
use forebay_shaders::cuda;

use crate::attention::HeadStrides;
use crate::backend::slice_address;
use crate::context::{Context, CudaStream};
use crate::kernels::{KernelRegistry, SubmitStatus};
use crate::native_kernels::{
    NativeKernel, NativeKernelLookup, NativeKernels, convert_all, launch_native, with_defines,
};
use crate::settings;

/// Queries or keys of a tile.
const TILE_ROWS: u64 = 64;
/// Threads of a block in the first pass, where eight threads share a query.
const DELTA_THREADS: u32 = 256;
const DELTA_THREADS_PER_QUERY: u64 = 8;
/// Bytes of shared memory of a block besides its tiles.
const STATIC_SHARED_BYTES: u32 = 1024;

/// The passes of the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionF32Pass {
    /// The sum of grad · out of each query. Also resets the counters of the next pass.
    Delta,
    /// The gradients of queries, keys and values.
    Gradients,
}

/// A kernel for one pass and head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionF32Kernel {
    pass: AttentionF32Pass,
    head_dim: u32,
}

impl AttentionF32Kernel {
    /// Returns the kernel for a pass on an architecture such as 90; `None` if there is none. The kernel copies to
    /// shared memory by instructions of sm_80.
    #[must_use]
    pub fn new(pass: AttentionF32Pass, head: u64, arch: u32) -> Option<Self> {
        let head_dim = u32::try_from(head).ok().filter(|h| (4..=128).contains(h) && h.is_multiple_of(4))?;
        (arch >= 80).then_some(Self { pass, head_dim })
    }

    /// Returns the elements of a row in shared memory.
    fn depth(self) -> u32 {
        self.head_dim.next_power_of_two().max(32)
    }

    /// Returns half of a block's threads.
    fn group_threads(self) -> u32 {
        if self.depth() == 128 { 128 } else { 64 }
    }

    /// Returns the blocks for which a multiprocessor of an H100 has enough shared memory; this bounds the registers
    /// of a thread.
    fn blocks_per_sm(self) -> u32 {
        match self.depth() {
            32 => 3,
            64 => 2,
            _ => 1,
        }
    }
}

impl NativeKernel for AttentionF32Kernel {
    const FALLBACK_MESSAGE: &'static str =
        "gradients of f32 attention run on the portable kernels, which are slower";

    fn entry(&self) -> &'static CStr {
        match self.pass {
            AttentionF32Pass::Delta => c"attention_f32_delta",
            AttentionF32Pass::Gradients => c"attention_f32_bwd",
        }
    }

    fn block_threads(&self) -> u32 {
        match self.pass {
            AttentionF32Pass::Delta => DELTA_THREADS,
            AttentionF32Pass::Gradients => 2 * self.group_threads(),
        }
    }

    fn shared_bytes(&self) -> u32 {
        let tile = TILE_ROWS as u32;
        match self.pass {
            AttentionF32Pass::Delta => 0,
            // Four tiles of rows, and two matrices of weights.
            AttentionF32Pass::Gradients => 4 * (4 * tile * self.depth() + 2 * tile * tile),
        }
    }

    fn source(&self) -> String {
        let defines = [
            ("HEAD", self.head_dim),
            ("PASS", self.pass as u32),
            ("DEPTH", self.depth()),
            ("GROUP", self.group_threads()),
            ("BLOCKS", self.blocks_per_sm()),
        ];
        with_defines(&defines, &[cuda::ATTENTION_F32_BWD])
    }
}

/// `Params` of the kernels.
#[repr(C)]
struct AttentionF32Params {
    /// Operands: q, k, v, out, and the gradients of out, q, k, v.
    heads: [HeadStrides; 8],
    lse: u64,
    delta: u64,
    turns: u64,
    /// Batch, heads, kv heads, queries, keys, left, right.
    sizes: [i32; 7],
    scale: f32,
}

/// The blocks of both passes.
struct PassBlocks {
    delta: u32,
    gradients: u32,
}

/// Reports whether a call's gradients have a kernel, as far as its forward call tells.
fn is_supported(call: &AttentionCall) -> bool {
    !settings::portable_kernels()
        && call.dtype == DType::F32
        && call.mask.is_none()
        && call.dropout.is_none()
        // The scratch memory of one query for each head has no room for the ticket.
        && call.queries > 1
}

/// Returns the parameters shared by both passes, and their blocks.
fn plan(call: &AttentionCall, gradients: &AttentionGradients) -> Option<(AttentionF32Params, PassBlocks)> {
    if gradients.grad_sums.is_some() {
        return None;
    }
    let operands =
        [&call.q, &call.k, &call.v, &call.out, &gradients.out, &gradients.q, &gradients.k, &gradients.v];
    let mut heads = [HeadStrides::default(); 8];
    for (to, operand) in heads.iter_mut().zip(operands) {
        *to = HeadStrides::new(operand, 4)?;
    }
    let lines = call.batch * call.heads * call.queries;
    // Kernels count threads and blocks in 32 bits.
    let [threads, key_blocks]: [i32; 2] = convert_all([
        (lines * DELTA_THREADS_PER_QUERY).next_multiple_of(u64::from(DELTA_THREADS)),
        call.batch * call.kv_heads * call.keys.div_ceil(TILE_ROWS),
    ])?;
    // Scratch memory has two words for each query: deltas, and then the counters, one for each tile of queries, and
    // the ticket.
    let delta = slice_address(gradients.scratch);
    let params = AttentionF32Params {
        heads,
        lse: slice_address(call.lse),
        delta,
        turns: delta + 4 * lines,
        sizes: convert_all([
            call.batch,
            call.heads,
            call.kv_heads,
            call.queries,
            call.keys,
            call.window_left,
            call.window_right,
        ])?,
        scale: call.scale,
    };
    let blocks =
        PassBlocks { delta: threads.unsigned_abs() / DELTA_THREADS, gradients: key_blocks.unsigned_abs() };
    Some((params, blocks))
}

/// The kernels of one device.
#[derive(Debug, Default)]
pub(crate) struct AttentionF32Kernels {
    kernels: NativeKernels<AttentionF32Kernel>,
}

impl AttentionF32Kernels {
    /// Enqueues the gradients of attention on `stream` if their kernels are compiled. Without a stream, only starts
    /// to compile them. Declines forward calls, after a start of the compilation for one that requires gradients. If
    /// `wait` is true, waits for the compiler.
    pub(crate) fn submit(
        &self,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
        stream: Option<&CudaStream>,
        call: &AttentionCall,
        wait: bool,
    ) -> Result<SubmitStatus, SourceError> {
        let passes = [AttentionF32Pass::Delta, AttentionF32Pass::Gradients]
            .map(|pass| AttentionF32Kernel::new(pass, call.head_dim, kernels.arch()));
        let [Some(delta), Some(gradients)] = passes else { return Ok(SubmitStatus::Declined) };
        let shared_bytes = gradients.shared_bytes() + STATIC_SHARED_BYTES;
        if !is_supported(call) || shared_bytes > context.max_shared_bytes {
            return Ok(SubmitStatus::Declined);
        }
        let Some(backward) = &call.backward else {
            if call.requires_grad {
                self.kernels.get_or_compile(context, kernels, delta, &[gradients], false)?;
            }
            return Ok(SubmitStatus::Declined);
        };
        let Some((params, blocks)) = plan(call, backward) else { return Ok(SubmitStatus::Declined) };
        let mut functions = Vec::with_capacity(2);
        for (kernel, blocks) in [(delta, blocks.delta), (gradients, blocks.gradients)] {
            match self.kernels.get_or_compile(context, kernels, kernel, &[gradients], wait)? {
                NativeKernelLookup::Ready(function) => functions.push((kernel, function, blocks)),
                NativeKernelLookup::Compiling => {}
                NativeKernelLookup::Failed => return Ok(SubmitStatus::Declined),
            }
        }
        if functions.len() < 2 {
            return Ok(SubmitStatus::Compiling);
        }
        if let Some(stream) = stream {
            for (kernel, function, blocks) in functions {
                // SAFETY: the kernel takes one `Params`, in this layout; the core has checked that the operands lie
                // inside their segments.
                unsafe { launch_native(stream, &kernel, function, [blocks, 1, 1], &params) }?;
            }
        }
        Ok(SubmitStatus::Submitted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(head: u64, arch: u32) -> Option<AttentionF32Kernel> {
        AttentionF32Kernel::new(AttentionF32Pass::Gradients, head, arch)
    }

    #[test]
    fn head_sizes_are_multiples_of_four_from_sm_80_on() {
        for (head, arch) in [(0, 90), (7, 90), (132, 90), (64, 75)] {
            assert_eq!(kernel(head, arch), None, "{head} on sm_{arch}");
        }
        for (head, depth) in [(4, 32), (32, 32), (36, 64), (64, 64), (96, 128), (128, 128)] {
            assert_eq!(kernel(head, 80).map(AttentionF32Kernel::depth), Some(depth), "{head}");
        }
    }

    #[test]
    fn tiles_fit_into_shared_memory() {
        // Bytes of a block on sm_80, sm_86 and sm_120, and of a multiprocessor on sm_90.
        for (head, room) in [(128, 163 << 10), (64, 99 << 10), (32, 99 << 10)] {
            let kernel = kernel(head, 80).expect("a kernel");
            assert!(kernel.shared_bytes() + STATIC_SHARED_BYTES <= room, "{head}");
            let all = kernel.blocks_per_sm() * (kernel.shared_bytes() + STATIC_SHARED_BYTES + 1024);
            assert!(all <= 228 << 10, "{head}");
        }
    }
}

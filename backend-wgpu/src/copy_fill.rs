//! Internal kernels of the backend: copies within a segment, and fills.

use std::sync::OnceLock;

use forebay_core::backend::{Backend, KernelId, KernelSource, Launch, Slice};
use forebay_core::error::Result;

use crate::backend::WgpuBackend;

/// Invocations in a workgroup of the module.
const WORKGROUP_SIZE: u64 = 64;
/// Bytes in a word and in a vector of four words.
const WORD_BYTES: u64 = 4;
const QUAD_BYTES: u64 = 16;

/// The kernels, compiled at first use.
#[derive(Debug, Default)]
pub(crate) struct CopyFillKernels {
    kernels: [OnceLock<KernelId>; 4],
}

/// Operations, in the order of [`CopyFillKernels::kernels`].
#[derive(Clone, Copy)]
enum CopyFillOp {
    CopyWords,
    CopyQuads,
    FillWords,
    FillQuads,
}

impl CopyFillKernels {
    /// Copies inside the segment that `whole` spans.
    pub(crate) fn copy(
        &self,
        backend: &WgpuBackend,
        whole: Slice,
        dst: u64,
        src: u64,
        bytes: u64,
    ) -> Result<CopyFillLaunch> {
        if (dst | src | bytes).is_multiple_of(QUAD_BYTES) {
            self.build_launch(
                backend,
                CopyFillOp::CopyQuads,
                whole,
                [dst / QUAD_BYTES, src / QUAD_BYTES, bytes / QUAD_BYTES],
                0,
            )
        } else {
            self.build_launch(
                backend,
                CopyFillOp::CopyWords,
                whole,
                [dst / WORD_BYTES, src / WORD_BYTES, bytes / WORD_BYTES],
                0,
            )
        }
    }

    /// Fills words inside the segment that `whole` spans.
    pub(crate) fn fill(
        &self,
        backend: &WgpuBackend,
        whole: Slice,
        dst: u64,
        bytes: u64,
        word: u32,
    ) -> Result<CopyFillLaunch> {
        if (dst | bytes).is_multiple_of(QUAD_BYTES) {
            self.build_launch(
                backend,
                CopyFillOp::FillQuads,
                whole,
                [dst / QUAD_BYTES, 0, bytes / QUAD_BYTES],
                word,
            )
        } else {
            self.build_launch(
                backend,
                CopyFillOp::FillWords,
                whole,
                [dst / WORD_BYTES, 0, bytes / WORD_BYTES],
                word,
            )
        }
    }

    fn build_launch(
        &self,
        backend: &WgpuBackend,
        work: CopyFillOp,
        whole: Slice,
        place: [u64; 3],
        value: u32,
    ) -> Result<CopyFillLaunch> {
        let slot = &self.kernels[work as usize];
        let kernel = match slot.get() {
            Some(kernel) => *kernel,
            None => {
                let entry = ["copy_words", "copy_quads", "fill_words", "fill_quads"][work as usize];
                let source = KernelSource {
                    label: entry,
                    wgsl: include_str!("copy_fill.wgsl"),
                    entry_point: entry,
                    overrides: &[],
                    zero_workgroup_memory: true,
                };
                let kernel = backend.compile(&source)?;
                *slot.get_or_init(|| kernel)
            }
        };
        let mut params = [0; 16];
        let words = place.into_iter().map(|n| n as u32).chain([value]);
        for (to, from) in params.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&from.to_ne_bytes());
        }
        let groups = place[2].div_ceil(WORKGROUP_SIZE);
        let x = groups.min(backend.info().limits.max_workgroups_per_dim.into());
        let groups = [x as u32, groups.div_ceil(x) as u32, 1];
        Ok(CopyFillLaunch { kernel, whole, params, groups })
    }
}

/// One launch of a kernel.
pub(crate) struct CopyFillLaunch {
    kernel: KernelId,
    whole: Slice,
    params: [u8; 16],
    groups: [u32; 3],
}

impl CopyFillLaunch {
    pub(crate) fn launch(&self) -> Launch<'_> {
        let Self { kernel, whole, params, groups } = self;
        Launch { kernel: *kernel, bindings: std::slice::from_ref(whole), params, groups: *groups }
    }
}

//! Internal kernels of the backend: copies within a segment, and fills.

use std::ops::Range;
use std::sync::OnceLock;

use forebay_core::backend::{Backend, KernelId, KernelSource, Launch, SegmentId, SegmentSource, Slice};
use forebay_core::error::{Error, Result};

use crate::backend::WgpuBackend;

/// Invocations in a workgroup of the module.
const WORKGROUP_SIZE: u64 = 64;
/// Bytes in a word and in a vector of four words.
const WORD_BYTES: u64 = 4;
const QUAD_BYTES: u64 = 16;

/// Returns the source of a module with the parameters that all share.
macro_rules! module {
    ($file:literal) => {
        concat!(include_str!("copy_fill_params.wgsl"), include_str!($file))
    };
}

/// The kernels, compiled at first use.
#[derive(Debug, Default)]
pub(crate) struct CopyFillKernels {
    kernels: [OnceLock<KernelId>; ENTRY_POINTS.len()],
}

/// Entry points for words; those for vectors of four words follow.
const ENTRY_POINTS: [&str; 6] =
    ["copy_words", "copy_distant_words", "fill_words", "copy_quads", "copy_distant_quads", "fill_quads"];

/// Operations, in the order of [`ENTRY_POINTS`].
#[derive(Clone, Copy)]
enum CopyFillOp {
    Copy,
    /// Copy between ranges of a buffer that no single binding covers.
    CopyDistant,
    Fill,
}

/// A segment and the bytes of its buffer.
#[derive(Clone, Copy)]
pub(crate) struct SizedSegment {
    pub(crate) segment: SegmentId,
    pub(crate) bytes: u64,
}

impl SizedSegment {
    /// Returns a slice that covers a range, or `None` if no binding holds the range. The whole segment is preferred,
    /// because one bind group then serves all its ranges.
    fn cover(self, backend: &WgpuBackend, range: Range<u64>) -> Option<Slice> {
        let limits = backend.info().limits;
        if self.bytes <= limits.max_binding_bytes {
            return Some(Slice { segment: self.segment, offset: 0, bytes: self.bytes });
        }
        let offset = range.start - range.start % backend.limits().alignment;
        let bytes = (range.end - offset).next_multiple_of(QUAD_BYTES).min(self.bytes - offset);
        (bytes <= limits.max_binding_bytes).then_some(Slice { segment: self.segment, offset, bytes })
    }
}

impl CopyFillKernels {
    /// Copies inside a segment.
    pub(crate) fn copy(
        &self,
        backend: &WgpuBackend,
        segment: SizedSegment,
        dst: u64,
        src: u64,
        bytes: u64,
    ) -> Result<CopyFillLaunch> {
        let span = dst.min(src)..dst.max(src) + bytes;
        if let Some(both) = segment.cover(backend, span) {
            let region = [dst - both.offset, src - both.offset, bytes];
            return self.build_launch(backend, CopyFillOp::Copy, [both, both], region, 0);
        }
        let (to, from) = (segment.cover(backend, dst..dst + bytes), segment.cover(backend, src..src + bytes));
        let (Some(to), Some(from)) = (to, from) else { return Err(too_large(backend, "copy", bytes)) };
        let region = [dst - to.offset, src - from.offset, bytes];
        self.build_launch(backend, CopyFillOp::CopyDistant, [to, from], region, 0)
    }

    /// Fills words inside a segment.
    pub(crate) fn fill(
        &self,
        backend: &WgpuBackend,
        segment: SizedSegment,
        dst: u64,
        bytes: u64,
        word: u32,
    ) -> Result<CopyFillLaunch> {
        let Some(bound) = segment.cover(backend, dst..dst + bytes) else {
            return Err(too_large(backend, "fill", bytes));
        };
        self.build_launch(backend, CopyFillOp::Fill, [bound, bound], [dst - bound.offset, 0, bytes], word)
    }

    /// Builds a launch from the offsets of destination and source, and the bytes.
    fn build_launch(
        &self,
        backend: &WgpuBackend,
        op: CopyFillOp,
        bindings: [Slice; 2],
        region: [u64; 3],
        value: u32,
    ) -> Result<CopyFillLaunch> {
        let uses_quads = region.iter().all(|bytes| bytes.is_multiple_of(QUAD_BYTES));
        let unit = if uses_quads { QUAD_BYTES } else { WORD_BYTES };
        let kernel = op as usize + if uses_quads { ENTRY_POINTS.len() / 2 } else { 0 };
        let slot = &self.kernels[kernel];
        let kernel = match slot.get() {
            Some(kernel) => *kernel,
            None => {
                let entry = ENTRY_POINTS[kernel];
                // All entry points of a module have the same bindings.
                let wgsl = match op {
                    CopyFillOp::CopyDistant => module!("copy_distant.wgsl"),
                    CopyFillOp::Copy | CopyFillOp::Fill => module!("copy_fill.wgsl"),
                };
                let source = KernelSource {
                    label: entry,
                    wgsl,
                    entry_point: entry,
                    overrides: &[],
                    zero_workgroup_memory: true,
                };
                let kernel = backend.compile(&source)?;
                *slot.get_or_init(|| kernel)
            }
        };
        let region = region.map(|bytes| bytes / unit);
        let mut params = [0; 16];
        let words = region.into_iter().map(|n| n as u32).chain([value]);
        for (to, from) in params.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&from.to_ne_bytes());
        }
        let groups = region[2].div_ceil(WORKGROUP_SIZE);
        let x = groups.min(backend.info().limits.max_workgroups_per_dim.into());
        let groups = [x as u32, groups.div_ceil(x) as u32, 1];
        let binding_count = if matches!(op, CopyFillOp::CopyDistant) { 2 } else { 1 };
        Ok(CopyFillLaunch { kernel, bindings, binding_count, params, groups })
    }
}

fn too_large(backend: &WgpuBackend, op: &'static str, bytes: u64) -> Error {
    let max = backend.info().limits.max_binding_bytes;
    Error::argument(
        op,
        format!("{bytes} bytes are more than one binding of this device holds ({max}); split them"),
    )
}

pub(crate) struct CopyFillLaunch {
    kernel: KernelId,
    bindings: [Slice; 2],
    binding_count: usize,
    params: [u8; 16],
    groups: [u32; 3],
}

impl CopyFillLaunch {
    pub(crate) fn launch(&self) -> Launch<'_> {
        let Self { kernel, bindings, binding_count, params, groups } = self;
        Launch { kernel: *kernel, bindings: &bindings[..*binding_count], params, groups: *groups }
    }
}

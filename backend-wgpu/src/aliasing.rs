//! Launches whose inputs overlap. Browsers refuse them, because every binding is declared writable.

use std::sync::Mutex;

use forebay_core::backend::{SegmentSource, Slice};
use forebay_core::error::{Error, Result};
use forebay_core::sync::LockUnpoisoned;

use crate::backend::WgpuBackend;

/// Smallest scratch segment, so that scalars and small tensors share one.
const MIN_SCRATCH_BYTES: u64 = 64 << 10;

/// Scratch segments of copies, one for each binding that a launch copies. Later launches overwrite them in order.
#[derive(Debug, Default)]
pub(crate) struct ScratchSegments(Mutex<Vec<Slice>>);

impl ScratchSegments {
    /// Returns the scratch memory of the copy with this index.
    fn get(&self, backend: &WgpuBackend, index: usize, bytes: u64) -> Result<Slice> {
        let mut segments = self.0.lock_unpoisoned();
        if segments.get(index).is_none_or(|scratch| scratch.bytes < bytes) {
            let size = scratch_size(bytes, backend.limits().max_segment);
            let segment = backend.alloc_segment(size)?;
            let scratch = Slice { segment, offset: 0, bytes: size };
            match segments.get_mut(index) {
                Some(smaller) => backend.free_segment(std::mem::replace(smaller, scratch).segment)?,
                None => segments.push(scratch),
            }
        }
        Ok(Slice { bytes, ..segments[index] })
    }
}

/// Returns the size of the scratch segment for a copy: a power of two, if the device has segments of this size.
fn scratch_size(bytes: u64, max_segment: u64) -> u64 {
    bytes.next_power_of_two().max(MIN_SCRATCH_BYTES).min(max_segment).max(bytes)
}

/// Returns bindings that do not overlap, or `None` if no bindings overlap. Bindings that the kernel only reads are
/// replaced by copies, which `copy` makes. Bit k of `written` states that the kernel writes binding k.
///
/// # Errors
/// Two bindings that the kernel writes overlap. The scratch memory cannot be allocated.
pub(crate) fn separate(
    backend: &WgpuBackend,
    scratch: &ScratchSegments,
    bindings: &[Slice],
    (label, written): (&str, u32),
    copy: impl Fn(Slice, Slice) -> Result<()>,
) -> Result<Option<Vec<Slice>>> {
    let copied = bindings_to_copy(label, bindings, written)?;
    if copied.is_empty() {
        return Ok(None);
    }
    let mut separated = bindings.to_vec();
    for (index, binding) in copied.into_iter().enumerate() {
        let source = bindings[binding];
        separated[binding] = scratch.get(backend, index, source.bytes)?;
        copy(separated[binding], source)?;
    }
    Ok(Some(separated))
}

/// Returns the bindings to copy: the kernel only reads them, and they overlap another binding, which is not copied.
/// Bit k of `written` states that the kernel writes binding k.
///
/// # Errors
/// Two bindings that the kernel writes overlap.
pub(crate) fn bindings_to_copy(label: &str, bindings: &[Slice], written: u32) -> Result<Vec<usize>> {
    let is_written = |binding: usize| written >> binding & 1 == 1;
    let mut bound_directly: Vec<usize> = (0..bindings.len()).filter(|&binding| is_written(binding)).collect();
    for (k, &first) in bound_directly.iter().enumerate() {
        let is_overlapping = |&&other: &&usize| overlap(&bindings[first], &bindings[other]);
        if let Some(second) = bound_directly[k + 1..].iter().find(is_overlapping) {
            let detail =
                format!("`{label}` writes its bindings {first} and {second}, and their memory overlaps");
            return Err(Error::argument("launch", detail));
        }
    }
    let mut copied = Vec::new();
    for binding in (0..bindings.len()).filter(|&binding| !is_written(binding)) {
        let overlaps = bound_directly.iter().any(|&other| overlap(&bindings[binding], &bindings[other]));
        if overlaps { copied.push(binding) } else { bound_directly.push(binding) }
    }
    Ok(copied)
}

fn overlap(a: &Slice, b: &Slice) -> bool {
    a.segment == b.segment && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
}

#[cfg(test)]
mod tests {
    use forebay_core::backend::SegmentId;

    use super::*;

    #[test]
    fn inputs_that_overlap_are_copied_and_outputs_are_not() -> Result<()> {
        let slice = |segment, offset| Slice { segment: SegmentId(segment), offset, bytes: 16 };
        let [a, b, other] = [slice(1, 0), slice(1, 16), slice(2, 0)];
        let to_copy = |bindings: &[Slice], written| bindings_to_copy("k", bindings, written);
        assert!(to_copy(&[a, b, other], 0b100)?.is_empty());
        assert_eq!(to_copy(&[a, a, other], 0b100)?, [1]);
        assert_eq!(to_copy(&[a, b, a], 0b100)?, [0]);
        assert_eq!(to_copy(&[a, a, a], 0b100)?, [0, 1]);
        assert_eq!(to_copy(&[slice(1, 8), b], 0b10)?, [0]);
        assert!(to_copy(&[other, a, b], 0b110)?.is_empty());
        let error =
            to_copy(&[other, a, slice(1, 8)], 0b110).expect_err("two outputs share memory").to_string();
        assert!(error.contains("`k` writes its bindings 1 and 2"), "{error}");
        Ok(())
    }

    #[test]
    fn scratch_segments_fit_the_device() {
        assert_eq!(scratch_size(100, 1 << 30), MIN_SCRATCH_BYTES);
        assert_eq!(scratch_size((1 << 20) + 4, 1 << 30), 1 << 21);
        // The largest segment need not be a power of two.
        assert_eq!(scratch_size((1 << 27) + 4, (1 << 28) - 4), (1 << 28) - 4);
        // Larger copies fail in the allocation, with the device's limit.
        assert_eq!(scratch_size(1 << 29, (1 << 28) - 4), 1 << 29);
    }
}

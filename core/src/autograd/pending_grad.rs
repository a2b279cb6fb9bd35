//! Gradients that are accumulated for a node until the node runs.

use smallvec::SmallVec;

use crate::error::Result;
use crate::tensor::Tensor;

/// Indices of one dimension of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DimRange {
    pub(crate) dim: usize,
    pub(crate) start: usize,
    pub(crate) length: usize,
}

/// Ranges of one dimension that have been written, in order and not adjacent. The other elements are uninitialised.
#[derive(Debug)]
pub(super) struct WrittenRanges {
    dim: usize,
    /// Start and end of each range. Mostly one, since the parts of a tensor come in order.
    ranges: SmallVec<[(usize, usize); 1]>,
}

impl WrittenRanges {
    pub(super) fn new(dim: usize) -> Self {
        Self { dim, ranges: SmallVec::new() }
    }

    /// Adds a range, and returns true, if none of its indices has been written.
    pub(super) fn insert(&mut self, range: DimRange) -> bool {
        let (start, end) = (range.start, range.start + range.length);
        if range.dim != self.dim || start == end {
            return range.dim == self.dim;
        }
        let at = self.ranges.partition_point(|&(first, _)| first < start);
        let is_free = (at == 0 || self.ranges[at - 1].1 <= start)
            && self.ranges.get(at).is_none_or(|&(next, _)| end <= next);
        if !is_free {
            return false;
        }
        // Adjacent ranges become one, so that the parts of a long split stay cheap.
        let (mut joined, mut replaced) = ((start, end), at..at);
        if at > 0 && self.ranges[at - 1].1 == start {
            joined.0 = self.ranges[at - 1].0;
            replaced.start -= 1;
        }
        if let Some(next) = self.ranges.get(at).filter(|next| next.0 == end) {
            joined.1 = next.1;
            replaced.end += 1;
        }
        self.ranges.drain(replaced.clone());
        self.ranges.insert(replaced.start, joined);
        true
    }

    /// Returns the start and the length of each range of `extent` indices that has not been written.
    fn gaps(&self, extent: usize) -> SmallVec<[(usize, usize); 4]> {
        let starts = std::iter::once(0).chain(self.ranges.iter().map(|range| range.1));
        let ends = self.ranges.iter().map(|range| range.0).chain([extent]);
        starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| (start, end - start)).collect()
    }
}

/// Gradient of a node. The slices of a tensor write their gradients into one sum, and only what none of them writes
/// is filled with zeros.
#[derive(Debug)]
pub(super) struct PendingGrad {
    pub(super) sum: Tensor,
    /// Written elements; `None` if all are.
    pub(super) written: Option<WrittenRanges>,
}

impl PendingGrad {
    /// Returns the gradient, with zeros where nothing has been written.
    pub(super) fn complete(self) -> Result<Tensor> {
        if let Some(written) = &self.written {
            for (start, length) in written.gaps(self.sum.shape()[written.dim]) {
                self.sum.narrow(written.dim as isize, start, length)?.zero_()?;
            }
        }
        Ok(self.sum)
    }
}

impl From<Tensor> for PendingGrad {
    fn from(sum: Tensor) -> Self {
        Self { sum, written: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_disjoint_and_the_rest_are_gaps() {
        let mut written = WrittenRanges::new(1);
        let range = |start, length| DimRange { dim: 1, start, length };
        assert_eq!(written.gaps(10).as_slice(), [(0, 10)]);
        for (start, length, is_free) in [
            (4, 2, true),
            (5, 1, false),
            (0, 5, false),
            (3, 4, false),
            (8, 2, true),
            (6, 2, true),
            (7, 0, true),
        ] {
            assert_eq!(written.insert(range(start, length)), is_free, "{start}, {length}");
        }
        assert!(!written.insert(DimRange { dim: 0, start: 0, length: 1 }));
        assert_eq!(written.gaps(10).as_slice(), [(0, 4)]);
        assert!(written.insert(range(1, 2)));
        assert_eq!(written.gaps(10).as_slice(), [(0, 1), (3, 1)]);
        assert!(written.insert(range(0, 1)) && written.insert(range(3, 1)));
        assert!(written.gaps(10).is_empty());
    }
}

//! Free blocks by size and address: the fast half of the pool.
//!
//! Sizes fall into bins of 32 steps between powers of two, found through bitmaps in constant time. A bin holds few
//! blocks, in order of (size, address), so the best fit with the lowest address is exact, and nothing is allocated
//! once a bin has had its blocks.

/// Steps between two powers of two.
const STEPS: u64 = 32;
/// Bins for sizes of up to 2^48 bytes in units of 512.
const BINS: usize = 36 * STEPS as usize;
const WORDS: usize = BINS.div_ceil(64);

/// A free block. Blocks differ in their addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Bytes.
    pub(super) size: u64,
    /// Its place, comparable across segments.
    pub(super) address: u64,
    /// Its slot in the slab.
    pub(super) slot: u32,
}

impl Entry {
    /// The order inside a bin: by size, then by address; one comparison without a branch.
    #[inline]
    fn key(&self) -> u128 {
        (u128::from(self.size) << 64) | u128::from(self.address)
    }
}

/// Up to this length a bin is searched from one end to the other, which is faster than halving it.
const SHORT: usize = 16;

/// Where a block is that is there.
#[inline]
fn position(entries: &[Entry], entry: &Entry) -> usize {
    if entries.len() <= SHORT {
        entries.iter().position(|e| e.slot == entry.slot).unwrap_or(entries.len())
    } else {
        entries.partition_point(|e| e.key() < entry.key())
    }
}

/// Moves an entry that may be out of order to its place.
#[inline]
fn settle(entries: &mut [Entry], mut at: usize) {
    let entry = entries[at];
    while at > 0 && entries[at - 1].key() > entry.key() {
        entries[at] = entries[at - 1];
        at -= 1;
    }
    while at + 1 < entries.len() && entries[at + 1].key() < entry.key() {
        entries[at] = entries[at + 1];
        at += 1;
    }
    entries[at] = entry;
}

/// The free blocks of one queue and pool.
#[derive(Debug)]
pub(super) struct Bins {
    bins: Box<[Vec<Entry>]>,
    /// Which bins hold something.
    words: [u64; WORDS],
    /// Which words are not zero.
    summary: u64,
}

impl Bins {
    pub(super) fn new() -> Self {
        Self { bins: vec![Vec::new(); BINS].into(), words: [0; WORDS], summary: 0 }
    }

    #[inline]
    fn bin(size: u64) -> usize {
        let units = size >> 9;
        if units < STEPS {
            return units as usize;
        }
        let power = u64::from(units.ilog2());
        let step = (units >> (power - 5)) & (STEPS - 1);
        (((power - 4) * STEPS + step) as usize).min(BINS - 1)
    }

    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        let bin = Self::bin(entry.size);
        let entries = &mut self.bins[bin];
        if entries.len() < SHORT {
            let last = entries.len();
            entries.push(entry);
            settle(entries, last);
        } else {
            entries.insert(entries.partition_point(|e| e.key() < entry.key()), entry);
        }
        self.words[bin / 64] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64);
    }

    /// Takes a block out, which must be there.
    #[inline]
    pub(super) fn remove(&mut self, entry: Entry) {
        let bin = Self::bin(entry.size);
        let entries = &mut self.bins[bin];
        let at = position(entries, &entry);
        debug_assert_eq!(entries.get(at), Some(&entry));
        if at + 1 == entries.len() {
            entries.pop();
        } else if at < entries.len() {
            entries.remove(at);
        }
        if entries.is_empty() {
            self.words[bin / 64] &= !(1 << (bin % 64));
            if self.words[bin / 64] == 0 {
                self.summary &= !(1 << (bin / 64));
            }
        }
    }

    /// Replaces a block, which must be there: it has been split or has grown, and often stays in its bin.
    #[inline]
    pub(super) fn replace(&mut self, old: Entry, new: Entry) {
        let bin = Self::bin(old.size);
        if bin != Self::bin(new.size) {
            self.remove(old);
            self.insert(new);
            return;
        }
        let entries = &mut self.bins[bin];
        let at = position(entries, &old);
        debug_assert_eq!(entries.get(at), Some(&old));
        if let Some(place) = entries.get_mut(at) {
            *place = new;
            settle(entries, at);
        }
    }

    /// The smallest block of at least `size` bytes; of equal ones, the one with the lowest address.
    #[inline]
    pub(super) fn best_fit(&self, size: u64) -> Option<Entry> {
        let bin = Self::bin(size);
        let entries = &self.bins[bin];
        if let Some(entry) = entries.get(entries.partition_point(|e| e.size < size)) {
            return Some(*entry);
        }
        let next = self.next_bin(bin + 1)?;
        self.bins[next].first().copied()
    }

    /// The block with the lowest address among those that are no smaller than `least`, a block that is there.
    pub(super) fn lowest_fit(&self, least: Entry) -> Option<Entry> {
        let first = Self::bin(least.size);
        let mut lowest = least;
        let mut next = Some(first);
        while let Some(bin) = next {
            for entry in self.bins[bin].iter().filter(|e| e.size >= least.size) {
                if entry.address < lowest.address {
                    lowest = *entry;
                }
            }
            next = self.next_bin(bin + 1);
        }
        Some(lowest)
    }

    /// All of them, by size.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        let bins = std::iter::successors(self.next_bin(0), |bin| self.next_bin(bin + 1));
        bins.flat_map(|bin| &self.bins[bin])
    }

    /// The largest block.
    pub(super) fn largest(&self) -> Option<Entry> {
        let word = self.summary.checked_ilog2()? as usize;
        let bin = word * 64 + self.words[word].checked_ilog2()? as usize;
        self.bins[bin].last().copied()
    }

    #[inline]
    fn next_bin(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        let here = self.words.get(word)? & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let later = self.summary & u64::MAX.checked_shl(word as u32 + 1)?;
        if later == 0 {
            return None;
        }
        let word = later.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bins_rise_with_size() {
        let sizes =
            (0..200).map(|i| 512 * i).chain((17..48).flat_map(|p| [(1 << p) - 512, 1 << p, (1 << p) + 512]));
        let mut sizes = sizes.collect::<Vec<u64>>();
        sizes.sort_unstable();
        assert!(sizes.is_sorted_by_key(|s| Bins::bin(*s)));
        assert!(Bins::bin(u64::MAX) < BINS);
    }

    proptest! {
        #[test]
        fn best_fit_is_that_of_an_ordered_set(ops in prop::collection::vec((0u64..5, 1u64..5000, 0u64..50), 1..400)) {
            let (mut bins, mut model) = (Bins::new(), BTreeSet::new());
            // A slot is a block's name: as different as size and address are here.
            let entry = |(size, address): (u64, u64)| Entry { size, address, slot: (size / 512 * 64 + address) as u32 };
            for (what, units, address) in ops {
                let key = (units * 512, address);
                let least = model.range((key.0, 0)..).next().copied();
                match what {
                    0 | 1 => if model.insert(key) { bins.insert(entry(key)) },
                    2 => if let Some(old) = least {
                        model.remove(&old);
                        bins.remove(entry(old));
                    },
                    3 => if let Some(old) = least.filter(|_| model.insert(key)) {
                        model.remove(&old);
                        bins.replace(entry(old), entry(key));
                    },
                    _ => {
                        prop_assert_eq!(bins.best_fit(key.0), least.map(entry));
                        prop_assert_eq!(bins.largest().map(|e| e.size), model.last().map(|e| e.0));
                        let lowest = model.range((key.0, 0)..).min_by_key(|e| e.1).map(|e| e.1);
                        prop_assert_eq!(least.and_then(|l| bins.lowest_fit(entry(l))).map(|e| e.address), lowest);
                    }
                }
            }
        }
    }
}

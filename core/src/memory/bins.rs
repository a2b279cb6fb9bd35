//! Free blocks by size and address: the fast half of the pool.
//!
//! Sizes fall into bins of 8 steps between powers of two, found through bitmaps. A bin has its first
//! block by (size, address) at hand and the others in a binary heap in which every block knows its place, so the best fit
//! with the lowest address is exact, a block leaves from anywhere without a search, and nothing is allocated once a bin
//! has had its blocks.

use std::hint::select_unpredictable;

/// Steps between two powers of two.
const STEPS: u64 = 8;
/// Bins for sizes of up to 2^48 bytes in units of 512.
const BINS: usize = 36 * STEPS as usize;
const WORDS: usize = BINS.div_ceil(64);
/// No block.
const NOTHING: Entry = Entry { size: 0, address: u64::MAX, slot: u32::MAX, whole: false };

/// A free block. Blocks differ in their addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Bytes.
    pub(super) size: u64,
    /// Its place, comparable across segments.
    pub(super) address: u64,
    /// Its slot in the slab.
    pub(super) slot: u32,
    /// Whether it is a whole segment.
    pub(super) whole: bool,
}

impl Entry {
    /// The order inside a bin: by size, then by address; one comparison without a branch.
    #[inline]
    fn key(&self) -> u128 {
        (u128::from(self.size) << 64) | u128::from(self.address)
    }
}

/// Bins of which something is so.
#[derive(Clone, Copy, Debug)]
struct Set([u64; WORDS]);

impl Set {
    #[inline]
    fn insert(&mut self, bin: usize) {
        self.0[bin / 64] |= 1 << (bin % 64);
    }

    #[inline]
    fn remove(&mut self, bin: usize) {
        self.0[bin / 64] &= !(1 << (bin % 64));
    }

    #[inline]
    fn has(&self, bin: usize) -> bool {
        self.0[bin / 64] & (1 << (bin % 64)) != 0
    }

    /// Those from `bin` on.
    #[inline]
    fn from(&self, bin: usize) -> impl Iterator<Item = usize> {
        let mut word = bin / 64;
        let mut bits = self.0.get(word).map_or(0, |bits| bits & (u64::MAX << (bin % 64)));
        std::iter::from_fn(move || {
            while bits == 0 {
                word += 1;
                bits = *self.0.get(word)?;
            }
            let bin = word * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            Some(bin)
        })
    }

    fn last(&self) -> Option<usize> {
        let word = self.0.iter().rposition(|word| *word != 0)?;
        Some(word * 64 + self.0[word].ilog2() as usize)
    }
}

/// Moves the entry at `at`, which may be out of order, to where it belongs, and keeps note of what moves.
fn settle(entries: &mut [Entry], places: &mut [u32], mut at: usize) {
    let Some(&entry) = entries.get(at) else { return };
    let key = entry.key();
    while at > 0 {
        let parent = (at - 1) / 2;
        let above = entries[parent];
        if above.key() < key {
            break;
        }
        entries[at] = above;
        places[above.slot as usize] = at as u32;
        at = parent;
    }
    loop {
        let mut child = 2 * at + 1;
        if child >= entries.len() {
            break;
        }
        if child + 1 < entries.len() && entries[child + 1].key() < entries[child].key() {
            child += 1;
        }
        let below = entries[child];
        if key < below.key() {
            break;
        }
        entries[at] = below;
        places[below.slot as usize] = at as u32;
        at = child;
    }
    entries[at] = entry;
    places[entry.slot as usize] = at as u32;
}

/// The free blocks of one queue and pool.
#[derive(Debug)]
pub(super) struct Bins {
    /// The first block of each bin in the order of the keys: most bins have no other.
    first: Box<[Entry; BINS]>,
    /// The others: a binary heap each.
    rest: Box<[Vec<Entry>; BINS]>,
    /// Which bins have a first block.
    filled: Set,
    /// Which have others.
    crowded: Set,
    /// Where in its heap the block of a slot is, if it is in one.
    places: Vec<u32>,
    /// The block that changed last, which is in no bin: the next request often takes it. Its size is 0 if there is none.
    hot: Entry,
}

impl Clone for Bins {
    fn clone(&self) -> Self {
        let (first, rest, places) = (self.first.clone(), self.rest.clone(), self.places.clone());
        Self { first, rest, places, ..*self }
    }

    /// In the memory that it has: planners save heaps often.
    fn clone_from(&mut self, other: &Self) {
        // Most bins hold nothing.
        self.filled.from(0).for_each(|bin| self.first[bin] = NOTHING);
        self.crowded.from(0).for_each(|bin| self.rest[bin].clear());
        other.filled.from(0).for_each(|bin| self.first[bin] = other.first[bin]);
        other.crowded.from(0).for_each(|bin| self.rest[bin].clone_from(&other.rest[bin]));
        (self.filled, self.crowded, self.hot) = (other.filled, other.crowded, other.hot);
        self.places.clone_from(&other.places);
    }
}

impl Bins {
    pub(super) fn new() -> Self {
        Self {
            first: Box::new([NOTHING; BINS]),
            rest: Box::new([const { Vec::new() }; BINS]),
            filled: Set([0; WORDS]),
            crowded: Set([0; WORDS]),
            places: Vec::new(),
            hot: NOTHING,
        }
    }

    #[inline]
    fn bin(size: u64) -> usize {
        // The highest four bits of the size; sizes of up to 15 units have a bin each.
        let units = size >> 9;
        let shift = u64::from((units | STEPS).ilog2() - STEPS.ilog2());
        ((shift * STEPS + (units >> shift)) as usize).min(BINS - 1)
    }

    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        if self.hot.size != 0 {
            self.file(self.hot);
        }
        self.hot = entry;
    }

    /// Takes a block of `size` bytes out, which must be there.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32, size: u64) {
        if self.hot.slot == slot {
            self.hot = NOTHING;
        } else {
            self.unfile(slot, size);
        }
    }

    /// Replaces a block of `size` bytes, which must be there: it has been split or has grown.
    #[inline]
    pub(super) fn replace(&mut self, slot: u32, size: u64, new: Entry) {
        if self.hot.slot == slot {
            self.hot = new;
        } else {
            self.unfile(slot, size);
            self.insert(new);
        }
    }

    /// Puts a block into its bin.
    #[inline]
    fn file(&mut self, entry: Entry) {
        let bin = Self::bin(entry.size);
        if self.first[bin].size == 0 {
            self.first[bin] = entry;
            self.filled.insert(bin);
        } else {
            self.crowd(bin, entry);
        }
    }

    /// Puts a block into a bin that has one.
    fn crowd(&mut self, bin: usize, mut entry: Entry) {
        let (first, rest) = (&mut self.first[bin], &mut self.rest[bin]);
        if entry.key() < first.key() {
            std::mem::swap(first, &mut entry);
        }
        if entry.slot as usize >= self.places.len() {
            self.places.resize((entry.slot as usize + 1).next_power_of_two(), 0);
        }
        let last = rest.len();
        rest.push(entry);
        settle(rest, &mut self.places, last);
        self.crowded.insert(bin);
    }

    /// Takes a block out of its bin.
    #[inline]
    fn unfile(&mut self, slot: u32, size: u64) {
        let bin = Self::bin(size);
        debug_assert!(self.in_bin(bin).any(|e| (e.slot, e.size) == (slot, size)));
        if self.first[bin].slot == slot && !self.crowded.has(bin) {
            self.first[bin] = NOTHING;
            self.filled.remove(bin);
        } else {
            self.thin(bin, slot);
        }
    }

    /// Takes a block out of a bin that has others.
    fn thin(&mut self, bin: usize, slot: u32) {
        let (first, rest) = (&mut self.first[bin], &mut self.rest[bin]);
        let mut at = 0;
        if first.slot == slot {
            *first = rest[0];
        } else {
            at = self.places[slot as usize] as usize;
        }
        rest.swap_remove(at);
        settle(rest, &mut self.places, at);
        if rest.is_empty() {
            self.crowded.remove(bin);
        }
    }

    /// The blocks of a bin but the first one.
    #[inline]
    fn others(&self, bin: usize) -> &[Entry] {
        if self.crowded.has(bin) { &self.rest[bin] } else { &[] }
    }

    /// The blocks of a bin that has any.
    fn in_bin(&self, bin: usize) -> impl Iterator<Item = &Entry> {
        std::iter::once(&self.first[bin]).chain(self.others(bin))
    }

    /// The smallest block of at least `size` bytes; of equal ones, the one with the lowest address.
    #[inline]
    pub(super) fn best_fit(&self, size: u64) -> Option<&Entry> {
        let filed = self.best_filed(size);
        if self.hot.size < size || filed.is_some_and(|f| f.key() < self.hot.key()) {
            return filed;
        }
        Some(&self.hot)
    }

    #[inline]
    fn best_filed(&self, size: u64) -> Option<&Entry> {
        let bin = Self::bin(size);
        if self.first[bin].size >= size {
            return Some(&self.first[bin]);
        }
        let fitting = self.others(bin).iter().filter(|e| e.size >= size);
        fitting.min_by_key(|e| e.key()).or_else(|| Some(&self.first[self.filled.from(bin + 1).next()?]))
    }

    /// The block with the lowest address among those that are no smaller than `least`, a block that is there.
    pub(super) fn lowest_fit<'a>(&'a self, least: &'a Entry) -> &'a Entry {
        // Which one is lower is hard to foretell: no branches.
        let lower = |lowest: (u64, &'a Entry), entry: &'a Entry| {
            select_unpredictable(entry.address < lowest.0, (entry.address, entry), lowest)
        };
        let bin = Self::bin(least.size);
        let mut lowest = (least.address, least);
        if self.hot.size >= least.size {
            lowest = lower(lowest, &self.hot);
        }
        if self.first[bin].size >= least.size {
            lowest = lower(lowest, &self.first[bin]);
        }
        for entry in self.others(bin).iter().filter(|e| e.size >= least.size) {
            lowest = lower(lowest, entry);
        }
        // All blocks of the later bins are large enough.
        for bin in self.filled.from(bin + 1) {
            lowest = lower(lowest, &self.first[bin]);
        }
        for bin in self.crowded.from(bin + 1) {
            lowest = self.rest[bin].iter().fold(lowest, lower);
        }
        lowest.1
    }

    /// The smallest block of at least `size` bytes that is not a whole segment.
    pub(super) fn best_part(&self, size: u64) -> Option<&Entry> {
        let fits = |e: &&Entry| e.size >= size && !e.whole;
        let mut bins = self.filled.from(Self::bin(size));
        let filed = bins.find_map(|bin| self.in_bin(bin).filter(fits).min_by_key(|e| e.key()));
        filed.into_iter().chain(Some(&self.hot).filter(fits)).min_by_key(|e| e.key())
    }

    /// All of them, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        let hot = Some(&self.hot).filter(|h| h.size != 0);
        self.filled.from(0).flat_map(|bin| self.in_bin(bin)).chain(hot)
    }

    /// All of them, by size, then by address.
    pub(super) fn sorted(&self) -> Vec<Entry> {
        self.sorted_if(|_| true)
    }

    /// Some of them, in that order.
    pub(super) fn sorted_if(&self, which: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let mut some: Vec<Entry> = self.iter().filter(|e| which(e)).copied().collect();
        some.sort_unstable_by_key(Entry::key);
        some
    }

    /// The largest block.
    pub(super) fn largest(&self) -> Option<Entry> {
        let filed = self.filled.last().into_iter().flat_map(|bin| self.in_bin(bin));
        filed.chain(Some(&self.hot).filter(|h| h.size != 0)).max_by_key(|e| e.key()).copied()
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
            let entry = |(size, address): (u64, u64)| Entry { size, address, slot: (size / 512 * 64 + address) as u32, whole: address % 3 == 0 };
            for (what, units, address) in ops {
                let key = (units * 512, address);
                let least = model.range((key.0, 0)..).next().copied();
                match what {
                    0 | 1 => if model.insert(key) { bins.insert(entry(key)) },
                    2 => if let Some(old) = least {
                        model.remove(&old);
                        bins.remove(entry(old).slot, old.0);
                    },
                    3 => if let Some(old) = least.filter(|_| model.insert(key)) {
                        model.remove(&old);
                        bins.replace(entry(old).slot, old.0, entry(key));
                    },
                    _ => {
                        prop_assert_eq!(bins.best_fit(key.0).copied(), least.map(entry));
                        prop_assert_eq!(bins.largest().map(|e| e.size), model.last().map(|e| e.0));
                        let part = model.range((key.0, 0)..).find(|e| e.1 % 3 != 0).copied();
                        prop_assert_eq!(bins.best_part(key.0).copied(), part.map(entry));
                        let lowest = model.range((key.0, 0)..).min_by_key(|e| e.1).map(|e| e.1);
                        prop_assert_eq!(least.map(|l| bins.lowest_fit(&entry(l)).address), lowest);
                    }
                }
            }
        }
    }
}

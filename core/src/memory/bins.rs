//! Free blocks by size and address: the fast half of the pool.
//!
//! Sizes fall into bins of 8 steps between powers of two, found through bitmaps in constant time. A bin has its first
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

/// The blocks of one bin: most have one, which lies here.
#[derive(Debug)]
struct Bin {
    /// The first one in the order of the keys; its size is 0 if there is none.
    first: Entry,
    /// The others: a binary heap.
    rest: Vec<Entry>,
}

impl Clone for Bin {
    fn clone(&self) -> Self {
        Self { first: self.first, rest: self.rest.clone() }
    }

    fn clone_from(&mut self, other: &Self) {
        self.first = other.first;
        self.rest.clone_from(&other.rest);
    }
}

impl Bin {
    const EMPTY: Self = Self { first: NOTHING, rest: Vec::new() };

    /// Adds a block. `places` knows where each block is: 0 is first, then the heap.
    #[inline]
    fn push(&mut self, mut entry: Entry, places: &mut [u32]) {
        if self.first.size == 0 || entry.key() < self.first.key() {
            places[entry.slot as usize] = 0;
            entry = std::mem::replace(&mut self.first, entry);
        }
        if entry.size != 0 {
            let last = self.rest.len();
            self.rest.push(entry);
            settle(&mut self.rest, places, last);
        }
    }

    /// Takes the block of a slot out.
    #[inline]
    fn remove(&mut self, slot: u32, places: &mut [u32]) {
        let place = places[slot as usize] as usize;
        if place == 0 {
            self.first = self.rest.first().copied().unwrap_or(NOTHING);
            if self.first.size == 0 {
                return;
            }
            places[self.first.slot as usize] = 0;
        }
        let at = place.saturating_sub(1);
        self.rest.swap_remove(at);
        if at < self.rest.len() {
            settle(&mut self.rest, places, at);
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.first.size == 0
    }

    /// All of them, if there are any.
    #[inline]
    fn iter(&self) -> impl Iterator<Item = &Entry> {
        std::iter::once(&self.first).chain(&self.rest)
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
        places[above.slot as usize] = at as u32 + 1;
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
        places[below.slot as usize] = at as u32 + 1;
        at = child;
    }
    entries[at] = entry;
    places[entry.slot as usize] = at as u32 + 1;
}

/// The free blocks of one queue and pool.
#[derive(Debug)]
pub(super) struct Bins {
    bins: Box<[Bin]>,
    /// Which bins hold something.
    words: [u64; WORDS],
    /// Which words are not zero.
    summary: u64,
    /// Where in its bin the block of a slot is.
    places: Vec<u32>,
    /// The block that changed last, which is in no bin: the next request often takes it. Its size is 0 if there is none.
    hot: Entry,
}

impl Clone for Bins {
    fn clone(&self) -> Self {
        Self { bins: self.bins.clone(), places: self.places.clone(), ..*self }
    }

    /// In the memory that it has: planners save heaps often.
    fn clone_from(&mut self, other: &Self) {
        // Most bins hold nothing.
        for word in 0..WORDS {
            let mut bits = self.words[word] | other.words[word];
            while bits != 0 {
                let bin = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                self.bins[bin].clone_from(&other.bins[bin]);
            }
        }
        self.places.clone_from(&other.places);
        (self.words, self.summary, self.hot) = (other.words, other.summary, other.hot);
    }
}

impl Bins {
    pub(super) fn new() -> Self {
        Self {
            bins: vec![Bin::EMPTY; BINS].into(),
            words: [0; WORDS],
            summary: 0,
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
    fn file(&mut self, entry: Entry) {
        if entry.slot as usize >= self.places.len() {
            self.places.resize((entry.slot as usize + 1).next_power_of_two(), u32::MAX);
        }
        let bin = Self::bin(entry.size);
        self.bins[bin].push(entry, &mut self.places);
        self.words[bin / 64] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64);
    }

    /// Takes a block out of its bin.
    fn unfile(&mut self, slot: u32, size: u64) {
        let bin = Self::bin(size);
        let entries = &mut self.bins[bin];
        debug_assert!(entries.iter().any(|e| (e.slot, e.size) == (slot, size)));
        entries.remove(slot, &mut self.places);
        // Whether the bin is empty now is hard to foretell: no branches.
        let word = &mut self.words[bin / 64];
        *word &= !(u64::from(entries.is_empty()) << (bin % 64));
        self.summary &= !(u64::from(*word == 0) << (bin / 64));
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
        let entries = &self.bins[bin];
        if entries.first.size >= size {
            return Some(&entries.first);
        }
        let fitting = entries.rest.iter().filter(|e| e.size >= size);
        if let Some(best) = fitting.min_by_key(|e| e.key()) {
            return Some(best);
        }
        let next = self.next_bin(bin + 1)?;
        Some(&self.bins[next].first)
    }

    /// The block with the lowest address among those that are no smaller than `least`, a block that is there.
    pub(super) fn lowest_fit<'a>(&'a self, least: &'a Entry) -> &'a Entry {
        // Which one is lower is hard to foretell: no branches.
        let mut lowest = (least.address, least);
        let mut see = |entry: &'a Entry| {
            lowest = select_unpredictable(entry.address < lowest.0, (entry.address, entry), lowest);
        };
        if self.hot.size >= least.size {
            see(&self.hot);
        }
        let from = Self::bin(least.size);
        self.bins[from].iter().filter(|e| e.size >= least.size).for_each(&mut see);
        // All blocks of the later bins are large enough.
        let mut mask = u64::MAX << (from % 64) << 1;
        for word in from / 64..WORDS {
            let mut bits = self.words[word] & std::mem::replace(&mut mask, u64::MAX);
            while bits != 0 {
                let bin = &self.bins[word * 64 + bits.trailing_zeros() as usize];
                bits &= bits - 1;
                see(&bin.first);
                bin.rest.iter().for_each(&mut see);
            }
        }
        lowest.1
    }

    /// The smallest block of at least `size` bytes that is not a whole segment.
    pub(super) fn best_part(&self, size: u64) -> Option<&Entry> {
        let fits = |e: &&Entry| e.size >= size && !e.whole;
        let mut bins = std::iter::successors(self.next_bin(Self::bin(size)), |bin| self.next_bin(bin + 1));
        let filed = bins.find_map(|bin| self.bins[bin].iter().filter(fits).min_by_key(|e| e.key()));
        filed.into_iter().chain(Some(&self.hot).filter(fits)).min_by_key(|e| e.key())
    }

    /// All of them, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        let bins = std::iter::successors(self.next_bin(0), |bin| self.next_bin(bin + 1));
        bins.flat_map(|bin| self.bins[bin].iter()).chain(Some(&self.hot).filter(|h| h.size != 0))
    }

    /// All of them, by size, then by address.
    pub(super) fn sorted(&self) -> Vec<Entry> {
        let mut all: Vec<Entry> = self.iter().copied().collect();
        all.sort_unstable_by_key(Entry::key);
        all
    }

    /// The largest block.
    pub(super) fn largest(&self) -> Option<Entry> {
        let filed = self.summary.checked_ilog2().and_then(|word| {
            let bin = word as usize * 64 + self.words[word as usize].checked_ilog2()? as usize;
            self.bins[bin].iter().max_by_key(|e| e.key()).copied()
        });
        filed.into_iter().chain(Some(self.hot).filter(|h| h.size != 0)).max_by_key(Entry::key)
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

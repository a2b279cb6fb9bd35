//! Free blocks by size and address: the fast half of the pool.
//!
//! They lie side by side in no order, a number for the size and one for the address of each, and a search passes all of them, several at a
//! time and without a branch: programs have a few dozen free blocks, and which one fits is hard to foretell. Of blocks that are alike, it
//! finds the one that lies last, which depends on nothing but the requests.

/// Blocks whose numbers lie side by side.
const LANES: usize = 8;
/// Low bits of a number: which block it is of.
const PLACE: u32 = 9;
/// How many blocks have numbers.
const NUMBERS: usize = 1 << PLACE;
/// The most that the other bits say.
const MOST: i32 = i32::MAX >> PLACE;
/// All bits but the sign's: above all numbers.
const NONE: i32 = i32::MAX;

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
    /// The order by size, then by address; one comparison without a branch.
    #[inline]
    fn key(&self) -> u128 {
        (u128::from(self.size) << 64) | u128::from(self.address)
    }
}

/// The size in 512 bytes, of blocks of less than 2 GiB.
#[inline]
fn class(size: u64) -> i32 {
    (size >> 9).min(MOST as u64) as i32
}

/// Numbers of some blocks.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Their classes, and below them which block it is; -1 is none.
    sizes: [i32; LANES],
    /// Their addresses in 128 KiB, without the segment, and the same.
    lows: [i32; LANES],
}

const EMPTY: Run = Run { sizes: [-1; LANES], lows: [0; LANES] };

/// The free blocks of one queue and pool.
#[derive(Debug, Default)]
pub(super) struct Bins {
    runs: Vec<Run>,
    entries: Vec<Entry>,
    /// Where the block of a slot is.
    places: Vec<u32>,
}

impl Clone for Bins {
    fn clone(&self) -> Self {
        Self { runs: self.runs.clone(), entries: self.entries.clone(), places: self.places.clone() }
    }

    /// In the memory that it has: planners save heaps often.
    fn clone_from(&mut self, other: &Self) {
        self.runs.clone_from(&other.runs);
        self.entries.clone_from(&other.entries);
        self.places.clone_from(&other.places);
    }
}

impl Bins {
    pub(super) fn new() -> Self {
        Self::default()
    }

    #[inline(always)]
    fn set(&mut self, at: usize, entry: Entry) {
        let (run, lane) = (&mut self.runs[at / LANES], at % LANES);
        // The last one has the lowest number.
        let place = (!at % NUMBERS) as i32;
        run.sizes[lane] = (class(entry.size) << PLACE) | place;
        run.lows[lane] = (((entry.address >> 8) as i32 & MOST) << PLACE) | place;
        self.entries[at] = entry;
        match self.places.get_mut(entry.slot as usize) {
            Some(place) => *place = at as u32,
            None => self.know(entry.slot, at),
        }
    }

    #[cold]
    fn know(&mut self, slot: u32, at: usize) {
        self.places.resize((slot as usize + 1).next_power_of_two(), 0);
        self.places[slot as usize] = at as u32;
    }

    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        let at = self.entries.len();
        if at.is_multiple_of(LANES) {
            self.runs.push(EMPTY);
        }
        self.entries.push(entry);
        self.set(at, entry);
    }

    /// Takes a block out, which must be there.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let at = self.places[slot as usize] as usize;
        let Some(&last) = self.entries.last() else { return };
        self.set(at, last);
        self.entries.pop();
        let end = self.entries.len();
        if end.is_multiple_of(LANES) {
            self.runs.pop();
        } else {
            self.runs[end / LANES].sizes[end % LANES] = -1;
        }
    }

    /// Replaces a block, which must be there: it has been split or has grown.
    #[inline(always)]
    pub(super) fn replace(&mut self, slot: u32, new: Entry) {
        self.set(self.places[slot as usize] as usize, new);
    }

    #[inline]
    fn entry(&self, number: i32) -> &Entry {
        &self.entries[!number as usize % NUMBERS]
    }

    /// The least number of a size from this class on; negative if there is none.
    #[inline]
    fn least(&self, from: i32) -> i32 {
        // As unsigned numbers those that are too small are the largest.
        let flip = (from << PLACE) ^ i32::MIN;
        let mut least = [NONE; LANES];
        for run in &self.runs {
            for (least, size) in least.iter_mut().zip(run.sizes) {
                *least = size.wrapping_sub(flip).min(*least);
            }
        }
        let least = least.into_iter().fold(NONE, i32::min);
        if least < 0 { least.wrapping_add(flip) } else { -1 }
    }

    /// The same, and the least number of an address among all blocks from that class on.
    #[inline]
    fn lowest(&self, from: i32) -> (i32, i32) {
        let flip = (from << PLACE) ^ i32::MIN;
        let (mut least, mut lowest) = ([NONE; LANES], [NONE; LANES]);
        for run in &self.runs {
            for lane in 0..LANES {
                let size = run.sizes[lane].wrapping_sub(flip);
                least[lane] = size.min(least[lane]);
                // Above all numbers where the block is too small.
                let low = run.lows[lane] | (!(size >> 31) & NONE);
                lowest[lane] = low.min(lowest[lane]);
            }
        }
        let least = least.into_iter().fold(NONE, i32::min);
        let lowest = lowest.into_iter().fold(NONE, i32::min);
        (if least < 0 { least.wrapping_add(flip) } else { -1 }, lowest)
    }

    /// The smallest block of at least `size` bytes.
    #[inline]
    pub(super) fn best_fit(&self, size: u64) -> Option<&Entry> {
        let number = self.least(class(size));
        if (number >= MOST << PLACE) | (self.entries.len() > NUMBERS) {
            return self.odd_fit(size, u64::MAX);
        }
        if number < 0 { None } else { Some(self.entry(number)) }
    }

    /// The same if it is no larger than `near`, else the block with the lowest address of all that are large enough.
    #[inline]
    pub(super) fn low_fit(&self, size: u64, near: u64) -> Option<&Entry> {
        let most = class(near);
        if (most == MOST) | (self.entries.len() > NUMBERS) {
            return self.odd_fit(size, near);
        }
        let (number, low) = self.lowest(class(size));
        if number < 0 {
            return None;
        }
        Some(self.entry(if number >> PLACE <= most { number } else { low }))
    }

    /// The same where numbers do not tell.
    #[cold]
    fn odd_fit(&self, size: u64, near: u64) -> Option<&Entry> {
        let fits = || self.entries.iter().filter(|e| e.size >= size);
        let best = fits().min_by_key(|e| e.key())?;
        if best.size <= near { Some(best) } else { fits().min_by_key(|e| e.address) }
    }

    /// The smallest block of at least `size` bytes that is not a whole segment.
    pub(super) fn best_part(&self, size: u64) -> Option<&Entry> {
        self.entries.iter().filter(|e| e.size >= size && !e.whole).min_by_key(|e| e.key())
    }

    /// All of them, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    /// All of them, by size.
    pub(super) fn sorted(&self) -> Vec<Entry> {
        // A number each for the size and the place: quicker to sort than what they stand for.
        let key = |(at, e): (usize, &Entry)| ((e.size >> 9) << 24) | at as u64;
        let mut keys: Vec<u64> = self.entries.iter().enumerate().map(key).collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| self.entries[key as usize % (1 << 24)]).collect()
    }

    /// Some of them, by size, then by address.
    pub(super) fn sorted_if(&self, which: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let mut some: Vec<Entry> = self.iter().filter(|e| which(e)).copied().collect();
        some.sort_unstable_by_key(Entry::key);
        some
    }

    /// The largest block.
    pub(super) fn largest(&self) -> Option<Entry> {
        self.iter().max_by_key(|e| e.key()).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A slot is a block's name: as different as addresses are here.
    fn entry((size, address): (u64, u64)) -> Entry {
        Entry { size, address, slot: (address / 1000) as u32, whole: address % 3000 == 0 }
    }

    fn found(block: Option<&Entry>) -> Option<(u64, u64)> {
        block.map(|e| (e.size, e.address))
    }

    /// What a model of ordered keys finds, and what the bins do.
    fn agree(bins: &Bins, model: &BTreeSet<(u64, u64)>, size: u64) -> Result<(), TestCaseError> {
        let fits = || model.range((size, 0)..);
        let least = fits().next().copied();
        let best = found(bins.best_fit(size));
        prop_assert_eq!(best.map(|b| b.0), least.map(|l| l.0));
        prop_assert!(best.is_none_or(|b| model.contains(&b)));
        let near = size + size / 4;
        let low = found(bins.low_fit(size, near));
        match least {
            Some(least) if least.0 <= near => prop_assert_eq!(low.map(|l| l.0), Some(least.0)),
            _ => prop_assert_eq!(low.map(|l| l.1), fits().map(|l| l.1).min()),
        }
        prop_assert!(low.is_none_or(|l| model.contains(&l)));
        prop_assert_eq!(found(bins.best_part(size)), fits().find(|l| l.1 % 3000 != 0).copied());
        prop_assert_eq!(bins.largest().map(|e| e.size), model.last().map(|e| e.0));
        let all: Vec<_> = bins.sorted_if(|_| true).iter().map(|e| (e.size, e.address)).collect();
        prop_assert_eq!(all, model.iter().copied().collect::<Vec<_>>());
        let mut sorted = bins.sorted();
        prop_assert!(sorted.is_sorted_by_key(|e| e.size));
        sorted.sort_by_key(|e| e.address);
        prop_assert!(sorted.windows(2).all(|w| w[0].address < w[1].address) && sorted.len() == model.len());
        Ok(())
    }

    proptest! {
        /// Blocks of one address do not come together; of many blocks and of large ones numbers do not tell.
        #[test]
        fn what_fits_is_what_an_ordered_set_finds(
            scale in prop::sample::select(vec![512, 512 << 20]),
            room in prop::sample::select(vec![50, 700]),
            ops in prop::collection::vec((0_u64..5, 1_u64..300, 0_u64..700), 1..600),
        ) {
            let (mut bins, mut model) = (Bins::new(), BTreeSet::new());
            let mut taken = BTreeSet::new();
            for (what, units, address) in ops {
                let key = (units * scale, address % room * 1000);
                let least = model.range((key.0, 0)..).next().copied();
                match what {
                    0..=2 => if taken.insert(key.1) {
                        model.insert(key);
                        bins.insert(entry(key));
                    },
                    3 => if let Some(old) = least {
                        model.remove(&old);
                        taken.remove(&old.1);
                        bins.remove(entry(old).slot);
                    },
                    _ => if let Some(old) = least.filter(|_| taken.insert(key.1)) {
                        model.remove(&old);
                        taken.remove(&old.1);
                        model.insert(key);
                        bins.replace(entry(old).slot, entry(key));
                    },
                }
                if what == 4 {
                    agree(&bins, &model, key.0)?;
                }
            }
        }
    }
}

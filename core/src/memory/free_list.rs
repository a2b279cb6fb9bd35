//! Free blocks of an arena, searched by size and address on every allocation.
//!
//! Blocks are stored unordered, with one packed key for the size and one for the address. A search scans all
//! keys, several at a time and without branches. Programs have a few dozen free blocks, and which one fits is
//! hard to predict. Among equal keys the search returns the block stored last, which depends only on the
//! requests.

/// Number of blocks whose keys are stored together.
const LANES: usize = 8;
/// Low bits of a key, which hold the block's index.
const INDEX_BITS: u32 = 9;
/// Number of blocks that keys can address.
const MAX_KEYED_BLOCKS: usize = 1 << INDEX_BITS;
/// Largest value of a key's high bits.
const MAX_SIZE_CLASS: i32 = i32::MAX >> INDEX_BITS;
/// All bits but the sign bit: above all keys.
const NO_KEY: i32 = i32::MAX;

/// A free block. Addresses are unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FreeBlock {
    pub(super) size: u64,
    /// Address, comparable across segments.
    pub(super) address: u64,
    pub(super) slot: u32,
    pub(super) is_whole_segment: bool,
}

impl FreeBlock {
    /// Returns a key that orders by size, then by address, and compares without a branch.
    #[inline]
    fn sort_key(&self) -> u128 {
        (u128::from(self.size) << 64) | u128::from(self.address)
    }
}

/// Returns the size in units of 512 bytes, capped: exact for blocks of less than 2 GiB.
#[inline]
fn size_class(size: u64) -> i32 {
    (size >> 9).min(MAX_SIZE_CLASS as u64) as i32
}

/// Keys of [`LANES`] blocks.
#[derive(Clone, Copy, Debug)]
struct KeyLanes {
    /// Size class and, in the low bits, the block's index; -1 for no block.
    size_keys: [i32; LANES],
    /// Address in 128 KiB units without the segment, and the block's index.
    address_keys: [i32; LANES],
}

const EMPTY_LANES: KeyLanes = KeyLanes { size_keys: [-1; LANES], address_keys: [0; LANES] };

/// The free blocks of one arena.
#[derive(Debug, Default)]
pub(super) struct FreeList {
    key_lanes: Vec<KeyLanes>,
    blocks: Vec<FreeBlock>,
    /// Index of a slot's block.
    positions: Vec<u32>,
}

impl FreeList {
    pub(super) fn new() -> Self {
        Self::default()
    }

    #[inline(always)]
    fn write_entry(&mut self, at: usize, entry: FreeBlock) {
        let (run, lane) = (&mut self.key_lanes[at / LANES], at % LANES);
        // The last block has the lowest index bits.
        let index = (!at % MAX_KEYED_BLOCKS) as i32;
        run.size_keys[lane] = (size_class(entry.size) << INDEX_BITS) | index;
        run.address_keys[lane] = (((entry.address >> 8) as i32 & MAX_SIZE_CLASS) << INDEX_BITS) | index;
        self.blocks[at] = entry;
        match self.positions.get_mut(entry.slot as usize) {
            Some(index) => *index = at as u32,
            None => self.grow_positions(entry.slot, at),
        }
    }

    #[cold]
    fn grow_positions(&mut self, slot: u32, at: usize) {
        self.positions.resize((slot as usize + 1).next_power_of_two(), 0);
        self.positions[slot as usize] = at as u32;
    }

    #[inline]
    pub(super) fn insert(&mut self, entry: FreeBlock) {
        let at = self.blocks.len();
        if at.is_multiple_of(LANES) {
            self.key_lanes.push(EMPTY_LANES);
        }
        self.blocks.push(entry);
        self.write_entry(at, entry);
    }

    /// Removes a block, which must be in the list.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let at = self.positions[slot as usize] as usize;
        let Some(&last) = self.blocks.last() else { return };
        self.write_entry(at, last);
        self.blocks.pop();
        let end = self.blocks.len();
        if end.is_multiple_of(LANES) {
            self.key_lanes.pop();
        } else {
            self.key_lanes[end / LANES].size_keys[end % LANES] = -1;
        }
    }

    /// Replaces a block, which must be in the list, after it was split or merged.
    #[inline(always)]
    pub(super) fn replace(&mut self, slot: u32, new: FreeBlock) {
        self.write_entry(self.positions[slot as usize] as usize, new);
    }

    #[inline]
    fn block_of_key(&self, number: i32) -> &FreeBlock {
        &self.blocks[!number as usize % MAX_KEYED_BLOCKS]
    }

    /// Returns the least size key of at least class `from`; negative if there is none.
    #[inline]
    fn min_size_key(&self, from: i32) -> i32 {
        // Read as unsigned, keys below `from` wrap around to the largest values.
        let flip = (from << INDEX_BITS) ^ i32::MIN;
        let mut least = [NO_KEY; LANES];
        for run in &self.key_lanes {
            for (least, size) in least.iter_mut().zip(run.size_keys) {
                *least = size.wrapping_sub(flip).min(*least);
            }
        }
        let least = least.into_iter().fold(NO_KEY, i32::min);
        if least < 0 { least.wrapping_add(flip) } else { -1 }
    }

    /// Returns [`min_size_key`](Self::min_size_key), and the least address key among the blocks of at least
    /// class `from`.
    #[inline]
    fn min_size_and_address_keys(&self, from: i32) -> (i32, i32) {
        let flip = (from << INDEX_BITS) ^ i32::MIN;
        let (mut least, mut lowest) = ([NO_KEY; LANES], [NO_KEY; LANES]);
        for run in &self.key_lanes {
            for lane in 0..LANES {
                let size = run.size_keys[lane].wrapping_sub(flip);
                least[lane] = size.min(least[lane]);
                // Above all keys where the block is too small.
                let low = run.address_keys[lane] | (!(size >> 31) & NO_KEY);
                lowest[lane] = low.min(lowest[lane]);
            }
        }
        let least = least.into_iter().fold(NO_KEY, i32::min);
        let lowest = lowest.into_iter().fold(NO_KEY, i32::min);
        (if least < 0 { least.wrapping_add(flip) } else { -1 }, lowest)
    }

    /// Returns the smallest block of at least `size` bytes.
    #[inline]
    pub(super) fn best_fit(&self, size: u64) -> Option<&FreeBlock> {
        let number = self.min_size_key(size_class(size));
        if (number >= MAX_SIZE_CLASS << INDEX_BITS) | (self.blocks.len() > MAX_KEYED_BLOCKS) {
            return self.fallback_fit(size, u64::MAX);
        }
        if number < 0 { None } else { Some(self.block_of_key(number)) }
    }

    /// Returns the best fit if it is at most `near_size` bytes, else the fitting block with the lowest address.
    #[inline]
    pub(super) fn lowest_address_fit(&self, size: u64, near_size: u64) -> Option<&FreeBlock> {
        let near_class = size_class(near_size);
        if (near_class == MAX_SIZE_CLASS) | (self.blocks.len() > MAX_KEYED_BLOCKS) {
            return self.fallback_fit(size, near_size);
        }
        let (number, low) = self.min_size_and_address_keys(size_class(size));
        if number < 0 {
            return None;
        }
        Some(self.block_of_key(if number >> INDEX_BITS <= near_class { number } else { low }))
    }

    /// Searches without keys, for blocks too large or too many for them.
    #[cold]
    fn fallback_fit(&self, size: u64, near_size: u64) -> Option<&FreeBlock> {
        let fits = || self.blocks.iter().filter(|e| e.size >= size);
        let best = fits().min_by_key(|e| e.sort_key())?;
        if best.size <= near_size { Some(best) } else { fits().min_by_key(|e| e.address) }
    }

    /// Returns the smallest block of at least `size` bytes that is not a whole segment.
    pub(super) fn best_split_fit(&self, size: u64) -> Option<&FreeBlock> {
        self.blocks.iter().filter(|e| e.size >= size && !e.is_whole_segment).min_by_key(|e| e.sort_key())
    }

    /// Iterates over the blocks, in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &FreeBlock> {
        self.blocks.iter()
    }

    /// Returns the blocks that match, by size, then by address.
    pub(super) fn sorted_where(&self, which: impl Fn(&FreeBlock) -> bool) -> Vec<FreeBlock> {
        let mut some: Vec<FreeBlock> = self.iter().filter(|e| which(e)).copied().collect();
        some.sort_unstable_by_key(FreeBlock::sort_key);
        some
    }

    pub(super) fn largest(&self) -> Option<FreeBlock> {
        self.iter().max_by_key(|e| e.sort_key()).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Creates a block. Slots identify blocks: here, they are as distinct as addresses.
    fn entry((size, address): (u64, u64)) -> FreeBlock {
        FreeBlock { size, address, slot: (address / 1000) as u32, is_whole_segment: address % 3000 == 0 }
    }

    fn found(block: Option<&FreeBlock>) -> Option<(u64, u64)> {
        block.map(|e| (e.size, e.address))
    }

    /// Compares the free list with a model, an ordered set.
    fn agree(bins: &FreeList, model: &BTreeSet<(u64, u64)>, size: u64) -> Result<(), TestCaseError> {
        let fits = || model.range((size, 0)..);
        let least = fits().next().copied();
        let best = found(bins.best_fit(size));
        prop_assert_eq!(best.map(|b| b.0), least.map(|l| l.0));
        prop_assert!(best.is_none_or(|b| model.contains(&b)));
        let near_size = size + size / 4;
        let low = found(bins.lowest_address_fit(size, near_size));
        match least {
            Some(least) if least.0 <= near_size => prop_assert_eq!(low.map(|l| l.0), Some(least.0)),
            _ => prop_assert_eq!(low.map(|l| l.1), fits().map(|l| l.1).min()),
        }
        prop_assert!(low.is_none_or(|l| model.contains(&l)));
        prop_assert_eq!(found(bins.best_split_fit(size)), fits().find(|l| l.1 % 3000 != 0).copied());
        prop_assert_eq!(bins.largest().map(|e| e.size), model.last().map(|e| e.0));
        let all: Vec<_> = bins.sorted_where(|_| true).iter().map(|e| (e.size, e.address)).collect();
        prop_assert_eq!(all, model.iter().copied().collect::<Vec<_>>());
        Ok(())
    }

    proptest! {
        /// Addresses are unique. Many or large blocks exceed the keys and use the fallback.
        #[test]
        fn fits_equal_those_of_an_ordered_set(
            scale in prop::sample::select(vec![512, 512 << 20]),
            room in prop::sample::select(vec![50, 700]),
            ops in prop::collection::vec((0_u64..5, 1_u64..300, 0_u64..700), 1..600),
        ) {
            let (mut bins, mut model) = (FreeList::new(), BTreeSet::new());
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

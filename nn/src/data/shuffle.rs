//! Order of a data set's samples in an epoch.

use super::loader::host_memory_error;
use crate::Result;

/// Returns the order of the samples in one epoch, or `None` without a seed.
pub(super) fn shuffled_order(len: usize, seed: Option<u64>, epoch: u64) -> Result<Option<Vec<u32>>> {
    let Some(seed) = seed else { return Ok(None) };
    // Fisher-Yates shuffle.
    let mut random = SplitMix64(seed ^ SplitMix64(epoch).next_u64());
    let mut order: Vec<u32> = Vec::new();
    order
        .try_reserve_exact(len)
        .map_err(|e| host_memory_error("shuffle", format!("the order of {len} samples"), &e))?;
    order.extend(0..len as u32);
    for i in (1..order.len()).rev() {
        order.swap(i, random.next_below(i as u64 + 1) as usize);
    }
    Ok(Some(order))
}

/// SplitMix64 generator, used only for orders. Random tensor values come from the device's generator.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a value below `n`, with a bias below n / 2⁶⁴.
    fn next_below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }
}

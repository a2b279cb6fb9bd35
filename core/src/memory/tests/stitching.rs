//! Second mappings of idle memory: steps that repeat neither wait nor call the driver.

use std::sync::Arc;

use super::fake_source::FakeSource;
use super::{MIB, alloc_mib};
use crate::memory::error::Result;
use crate::memory::{Config, Pool};

fn new_pool(capacity: u64) -> (Pool, Arc<FakeSource>) {
    let source = Arc::new(FakeSource::paged(capacity).with_contents());
    source.set_manual_fences();
    (Pool::new(source.clone(), Config::default()), source)
}

/// Allocates blocks that leave gaps where every second one is freed, and a block larger than any gap: one step of a
/// program that holds 8 blocks between its steps.
fn run_step(pool: &Pool, source: &FakeSource) -> Result<()> {
    let small = (0..16).map(|at| alloc_mib(pool, 24 + at % 3)).collect::<Result<Vec<_>>>()?;
    let (mut kept, mut freed) = (Vec::new(), Vec::new());
    for (at, block) in small.into_iter().enumerate() {
        source.write(block.segment, block.offset, &[at as u8; 64]).unwrap();
        if at % 2 == 0 { kept.push((at, block)) } else { freed.push(block) }
    }
    freed.into_iter().for_each(|block| pool.free(block));
    for size in [150, 90, 160] {
        let large = alloc_mib(pool, size)?;
        let pattern = vec![0xee; (size * MIB) as usize];
        source.write(large.segment, large.offset, &pattern).unwrap();
        // No block in use lies in the same memory.
        for (at, block) in &kept {
            let mut data = [0; 64];
            source.read(block.segment, block.offset, &mut data).unwrap();
            assert_eq!(data, [*at as u8; 64], "block {at} at {size} MiB");
        }
        pool.free(large);
    }
    kept.into_iter().for_each(|(_, block)| pool.free(block));
    Ok(())
}

#[test]
fn repeated_steps_neither_wait_nor_call_the_driver() -> Result<()> {
    let (pool, source) = new_pool(1 << 30);
    for _ in 0..3 {
        run_step(&pool, &source)?;
    }
    let (calls, stats) = (source.calls(), pool.stats());
    assert!(calls.map_again > 0 && stats.reclaim_stats.stitch.served > 0, "{calls:?}");
    for _ in 0..5 {
        run_step(&pool, &source)?;
    }
    assert_eq!(source.calls(), calls);
    let now = pool.stats();
    assert_eq!((now.reserved(), now.num_sync_all_streams), (stats.reserved(), stats.num_sync_all_streams));
    // A second mapping takes no memory.
    assert!(now.reserved() < now.allocated_bytes.all.peak * 104 / 100, "{now}");
    assert_eq!(source.used(), now.reserved());
    drop(pool);
    assert_eq!((source.used(), source.violations()), (0, vec![]));
    Ok(())
}

#[test]
fn memory_in_use_elsewhere_does_not_return_to_the_device() -> Result<()> {
    let (pool, source) = new_pool(1 << 30);
    let blocks = (0..12).map(|_| alloc_mib(&pool, 24)).collect::<Result<Vec<_>>>()?;
    let (kept, freed): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    freed.into_iter().for_each(|(_, block)| pool.free(block));
    let large = alloc_mib(&pool, 120)?;
    assert!(source.calls().map_again > 0);
    let snapshot = pool.snapshot();
    snapshot.check()?;
    let listed: u64 = snapshot.segments.iter().map(|s| s.allocated_size).sum();
    assert_eq!(listed, pool.stats().allocated());
    pool.empty_cache()?;
    let mut data = [0; 64];
    source.read(large.segment, large.offset + 120 * MIB - 64, &mut data).unwrap();
    // Once the block is freed, its memory returns, and its second mapping with it.
    pool.free(large);
    pool.empty_cache()?;
    assert!(source.read(large.segment, large.offset, &mut data).is_err());
    kept.into_iter().for_each(|(_, block)| pool.free(block));
    pool.empty_cache()?;
    assert_eq!(source.used(), 0);
    Ok(())
}

#[test]
fn other_queues_are_waited_for_at_either_address() -> Result<()> {
    let (pool, source) = new_pool(1 << 30);
    let blocks = (0..12).map(|_| alloc_mib(&pool, 24)).collect::<Result<Vec<_>>>()?;
    let (kept, freed): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    for (_, block) in freed {
        pool.free_cross_stream(block, 0b11);
    }
    let large = alloc_mib(&pool, 140)?;
    assert!(source.calls().map_again > 0);
    assert_eq!(source.last_waited_event(1, 0), Some(source.recorded_events()));
    // The block is used by another queue, and its memory is then used at its own addresses.
    pool.free_cross_stream(large, 0b101);
    let used = source.recorded_events();
    let again = alloc_mib(&pool, 24)?;
    assert_eq!(source.last_waited_event(2, 0), Some(used));
    pool.free(again);
    kept.into_iter().for_each(|(_, block)| pool.free(block));
    assert_eq!(source.violations(), Vec::<String>::new());
    Ok(())
}

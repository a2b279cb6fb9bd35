//! Tests of compaction.

use std::sync::Arc;

use super::fake_source::FakeSource;
use super::pool_model::{PoolOp, PoolTestSummary, check_pool};
use super::{MIB, alloc_mib};
use crate::memory::compaction::BlockMover;
use crate::memory::error::Result;
use crate::memory::{Action, Block, Config, Pool, Request};

/// Returns a pool of plain segments that moves blocks, over a device of `mib` MiB, and the device.
fn movable_pool(mib: u64, text: &str) -> Result<(Pool, Arc<FakeSource>)> {
    let source = Arc::new(FakeSource::plain(mib * MIB).with_contents());
    Ok((Pool::new(source.clone(), Config::parse(text)?).with_mover(source.clone()), source))
}

fn alloc_movable(pool: &Pool, mib: u64) -> Result<Block> {
    pool.alloc(Request::new(mib * MIB).movable())
}

fn assert_out_of_memory(result: Result<Block>) {
    assert!(result.is_err_and(|e| e.is_out_of_memory()));
}

/// Allocates eight blocks of 8 MiB and frees every other one: half of a device of 64 MiB is free, in four
/// parts.
fn fragment_pool(pool: &Pool) -> Result<Vec<Block>> {
    let mut blocks = vec![alloc_movable(pool, 64)?];
    pool.free(blocks.remove(0));
    for _ in 0..8 {
        blocks.push(alloc_movable(pool, 8)?);
    }
    let mut kept = Vec::new();
    for (number, block) in blocks.into_iter().enumerate() {
        if number % 2 == 0 { kept.push(block) } else { pool.free(block) }
    }
    Ok(kept)
}

#[test]
fn a_block_makes_room_in_the_segment_of_another_queue() -> Result<()> {
    let (pool, source) = movable_pool(64, "")?;
    let on = |queue, mib| pool.alloc(Request::new(mib * MIB).queue(queue).movable());
    let whole = [on(0, 32)?, on(1, 32)?];
    whole.into_iter().for_each(|block| pool.free(block));
    let (mut kept, gone) = (on(0, 12)?, on(0, 12)?);
    let (other, free) = (on(1, 12)?, on(1, 12)?);
    assert_ne!(kept.segment, other.segment);
    source.write(kept.segment, kept.offset, &[7; 1000])?;
    [gone, free].into_iter().for_each(|block| pool.free(block));
    // 20 MiB are free in the segment of each queue.
    let calls = source.calls().memory_calls();
    let large = on(0, 32)?;
    pool.refresh_location(&mut kept);
    assert_eq!(kept.segment, other.segment);
    assert_ne!(large.segment, kept.segment);
    let mut data = [0; 1000];
    source.read(kept.segment, kept.offset, &mut data)?;
    assert_eq!(data, [7; 1000]);
    let stats = pool.stats();
    assert_eq!(
        (source.calls().memory_calls(), stats.num_compactions, stats.reserved()),
        (calls, 1, 64 * MIB)
    );
    // The block's previous memory belongs to the other queue again.
    pool.free(kept);
    assert_eq!(on(1, 20)?.segment, other.segment);
    assert_eq!((pool.stats().num_compactions, source.calls().memory_calls()), (1, calls));
    [large, other].into_iter().for_each(|block| pool.free(block));
    pool.empty_cache()?;
    Ok(())
}

#[test]
fn fragmented_memory_serves_a_large_request() -> Result<()> {
    let (pool, source) = movable_pool(64, "")?;
    let mut kept = fragment_pool(&pool)?;
    for (number, block) in kept.iter().enumerate() {
        source.write(block.segment, block.offset, &[number as u8; 1000])?;
    }
    let large = alloc_movable(&pool, 32)?;
    for (number, block) in kept.iter_mut().enumerate() {
        pool.refresh_location(block);
        let mut data = [9; 1000];
        source.read(block.segment, block.offset, &mut data)?;
        assert_eq!(data, [number as u8; 1000]);
        assert!(block.offset + block.size <= large.offset || large.offset + large.size <= block.offset);
    }
    let stats = pool.stats();
    assert_eq!((source.calls().memory_calls(), stats.num_compactions, stats.reserved()), (1, 1, 64 * MIB));
    assert_eq!((source.calls().copied_bytes, stats.compacted_bytes), (16 * MIB, 16 * MIB));
    assert_eq!((stats.reclaim_stats.compact.tried, stats.reclaim_stats.compact.served), (1, 1));
    // All memory is allocated; handles are valid wherever their blocks moved.
    assert_out_of_memory(alloc_movable(&pool, 1));
    kept.into_iter().chain([large]).for_each(|block| pool.free(block));
    assert_eq!(
        (pool.stats().allocated(), pool.stats().num_invalid_frees, pool.empty_cache()?),
        (0, 0, 64 * MIB)
    );
    Ok(())
}

#[test]
fn a_virtual_range_is_compacted_before_a_request_fails() -> Result<()> {
    let source = Arc::new(FakeSource::paged(512 * MIB).with_contents());
    let config = Config { max_memory: Some(64 * MIB), ..Config::default() };
    let pool = Pool::new(source.clone(), config).with_mover(source.clone());
    let blocks = (0..5).map(|_| alloc_movable(&pool, 11)).collect::<Result<Vec<_>>>()?;
    let mut kept = Vec::new();
    for (number, block) in blocks.into_iter().enumerate() {
        if number % 2 == 1 {
            pool.free(block);
            continue;
        }
        source.write(block.segment, block.offset, &[number as u8; 1000])?;
        source.write(block.segment, block.offset + 11 * MIB - 1000, &[number as u8 + 100; 1000])?;
        kept.push(block);
    }
    // Whole pages between the blocks are unmapped; partly free pages remain.
    pool.empty_cache()?;
    assert!(pool.stats().reserved() + 31 * MIB > 64 * MIB);
    let large = alloc_movable(&pool, 31)?;
    assert_eq!(pool.stats().reserved(), 64 * MIB);
    for (number, block) in kept.iter_mut().enumerate() {
        pool.refresh_location(block);
        let mut data = [9; 1000];
        source.read(block.segment, block.offset, &mut data)?;
        assert_eq!(data, [2 * number as u8; 1000]);
        source.read(block.segment, block.offset + 11 * MIB - 1000, &mut data)?;
        assert_eq!(data, [2 * number as u8 + 100; 1000]);
        assert!(block.offset + block.size <= large.offset || large.offset + large.size <= block.offset);
    }
    assert_out_of_memory(alloc_movable(&pool, 1));
    kept.into_iter().chain([large]).for_each(|block| pool.free(block));
    assert_eq!(pool.stats().allocated(), 0);
    Ok(())
}

#[test]
fn pinned_and_private_blocks_do_not_move() -> Result<()> {
    let (pool, _) = movable_pool(64, "")?;
    let kept = fragment_pool(&pool)?;
    kept.iter().for_each(|block| pool.pin(block));
    assert_out_of_memory(alloc_movable(&pool, 32));
    // Two blocks keep one of their two pins: between and around them there is too little memory.
    kept[1..3].iter().for_each(|block| pool.pin(block));
    kept.iter().for_each(|block| pool.unpin(block));
    assert_out_of_memory(alloc_movable(&pool, 32));
    kept[1..3].iter().for_each(|block| pool.unpin(block));
    pool.free(alloc_movable(&pool, 32)?);

    for text in ["compaction:False", ""] {
        let (pool, source) = movable_pool(64, text)?;
        let blocks =
            (0..8).map(|_| if text.is_empty() { alloc_mib(&pool, 8) } else { alloc_movable(&pool, 8) });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        blocks.into_iter().step_by(2).for_each(|block| pool.free(block));
        assert_out_of_memory(alloc_movable(&pool, 32));
        assert_eq!((source.calls().copied_bytes, pool.move_count()), (0, 0), "{text}");
    }

    let (pool, source) = movable_pool(64, "")?;
    let own = pool.create_private_pool();
    let inside = own.enter();
    fragment_pool(&pool)?;
    assert_out_of_memory(alloc_movable(&pool, 32));
    drop(inside);
    assert_eq!(source.calls().copied_bytes, 0);
    Ok(())
}

#[test]
fn a_failed_copy_changes_nothing() -> Result<()> {
    #[derive(Debug)]
    struct FailingMover;
    impl BlockMover for FailingMover {
        fn lock_dispatch(&self) -> Box<dyn crate::memory::compaction::HeldDispatch + '_> {
            Box::new(())
        }
        fn enqueue_copies(&self, _: u8, _: &[crate::memory::compaction::BlockMove]) -> Result<()> {
            Err(crate::memory::error::Error::argument("copy", "it fails"))
        }
    }
    let source = Arc::new(FakeSource::plain(64 * MIB));
    let pool = Pool::new(source, Config::default()).with_mover(Arc::new(FailingMover));
    let kept = fragment_pool(&pool)?;
    let before = pool.snapshot();
    assert!(alloc_movable(&pool, 32).is_err_and(|e| !e.is_out_of_memory()));
    assert_eq!((pool.snapshot().segments, pool.move_count()), (before.segments, 0));
    kept.into_iter().for_each(|block| pool.free(block));
    alloc_movable(&pool, 64)?;
    Ok(())
}

#[test]
fn moves_are_recorded_at_source_and_destination() -> Result<()> {
    let (pool, _) = movable_pool(64, "")?;
    pool.start_recording(1000);
    fragment_pool(&pool)?;
    let changes = pool.allocation_changes().len();
    alloc_movable(&pool, 32)?;
    let snapshot = pool.snapshot();
    let ranges = |action| {
        let events = snapshot.events.iter().filter(move |e| e.action == action);
        events.map(|e| (e.address, e.size)).collect::<Vec<_>>()
    };
    let (from, to) = (ranges(Action::MovedFrom), ranges(Action::MovedTo));
    assert_eq!((from.len(), to.len()), (2, 2));
    let held: Vec<_> =
        snapshot.segments.iter().flat_map(|s| &s.blocks).map(|b| (b.address, b.size)).collect();
    assert!(to.iter().all(|range| held.contains(range)) && from.iter().zip(&to).all(|(a, b)| a.0 != b.0));
    // Compaction itself allocates and frees nothing.
    assert_eq!(pool.allocation_changes().len(), changes + 1);
    assert_eq!(snapshot.timeline().last().map(|m| m.allocated()), Some(64 * MIB));
    Ok(())
}

#[test]
fn a_small_block_is_evicted_and_the_others_slide_together() -> Result<()> {
    let (pool, source) = movable_pool(96, "")?;
    let whole = [alloc_movable(&pool, 64)?, alloc_movable(&pool, 32)?];
    whole.into_iter().for_each(|block| pool.free(block));
    // 10 MiB are free on either side of 4 and 14, and 4 in the other segment.
    let fixed = alloc_mib(&pool, 28)?;
    let (small, mut kept) = (alloc_movable(&pool, 4)?, Vec::new());
    let sides = [alloc_movable(&pool, 10)?, {
        kept.extend([alloc_movable(&pool, 4)?, alloc_movable(&pool, 14)?]);
        alloc_movable(&pool, 10)?
    }];
    let end = alloc_mib(&pool, 26)?;
    assert_eq!((fixed.segment, end.segment), (small.segment, kept[0].segment));
    for (number, block) in kept.iter().enumerate() {
        source.write(block.segment, block.offset, &[number as u8 + 1; 1000])?;
    }
    sides.into_iter().chain([small]).for_each(|block| pool.free(block));
    let calls = source.calls().memory_calls();
    let large = alloc_movable(&pool, 24)?;
    for (number, block) in kept.iter_mut().enumerate() {
        pool.refresh_location(block);
        let mut data = [9; 1000];
        source.read(block.segment, block.offset, &mut data)?;
        assert_eq!(data, [number as u8 + 1; 1000]);
    }
    assert_eq!([kept[0].segment, kept[1].segment, large.segment], [fixed.segment, end.segment, end.segment]);
    let stats = pool.stats();
    assert_eq!((source.calls().memory_calls(), stats.num_compactions), (calls, 1));
    assert_eq!((source.calls().copied_bytes, stats.cached()), (18 * MIB, 0));
    kept.into_iter().chain([fixed, end, large]).for_each(|block| pool.free(block));
    assert_eq!((pool.stats().num_invalid_frees, pool.empty_cache()?), (0, 96 * MIB));
    Ok(())
}

/// Sixteen nearly empty segments, and a request for more than half of them.
#[test]
fn small_segments_are_emptied_together() -> Result<()> {
    let source = Arc::new(FakeSource::plain(4096 * MIB));
    let pool = Pool::new(source.clone(), Config::default()).with_mover(source.clone());
    let (mut kept, mut gone) = (Vec::new(), Vec::new());
    for _ in 0..16 {
        gone.push(alloc_movable(&pool, 60)?);
        kept.push(alloc_movable(&pool, 3)?);
    }
    gone.into_iter().for_each(|block| pool.free(block));
    let before = pool.stats();
    assert!(before.reserved() > 1000 * MIB && before.largest_free < 100 * MIB, "{}", before.summary());
    kept.push(alloc_movable(&pool, 600)?);
    let after = pool.stats();
    assert!(after.reserved() <= before.peak_allocated() / 100 * 106, "{}", after.summary());
    assert!(after.compacted_bytes <= 16 * 3 * MIB, "{}", after.compacted_bytes);
    kept.into_iter().for_each(|block| pool.free(block));
    drop(pool);
    assert_eq!((source.used(), source.violations()), (0, vec![]));
    Ok(())
}

/// Ten thousand operations close to the limit, with every byte of every block checked; twice, with the same
/// moves.
#[test]
fn contents_move_with_their_blocks() -> Result<()> {
    let run = |paged: bool| -> Result<(PoolTestSummary, u64, u64)> {
        let source = if paged { FakeSource::paged(64 * MIB) } else { FakeSource::plain(64 * MIB) };
        let source = Arc::new(source.with_contents());
        let config = Config::parse("small_size_kb:16,large_segment_size_mb:2,max_memory_mb:10")?;
        let pool = Pool::new(source.clone(), config).with_mover(source.clone());
        let summary = check_pool(&pool, &*source, &PoolOp::sequence(77, 10_000, MIB / 2))
            .map_err(|message| crate::memory::error::Error::argument("check", message))?;
        drop(pool);
        assert_eq!((source.violations(), source.used()), (vec![], 0));
        Ok((summary, source.calls().copied_bytes, source.calls().memory_calls()))
    };
    for paged in [false, true] {
        let first = run(paged)?;
        assert!(first.0.moves > 50 && first.0.served > 1000, "{first:?}");
        assert_eq!(run(paged)?, first);
    }
    Ok(())
}

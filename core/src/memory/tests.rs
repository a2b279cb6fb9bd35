//! Tests of the whole pool: against a model, and step by step of the slow path.

mod cache_growth;
mod changing_shapes;
mod compaction;
mod errors;
pub(super) mod fake_source;
mod faults;
mod limits;
mod queues;
mod snapshots;
mod stitching;
mod untrusted_files;

// The suite is a package of its own and has the file.
#[path = "../../../tests/src/suite/memory/pool_model.rs"]
mod pool_model;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use self::fake_source::FakeSource;
use self::pool_model::{PoolOp, check_pool};
use super::source::{DeviceProcess, SegmentSource, SourceError};
use super::{Block, Config, Pool, Request, Tag, scope};
use crate::memory;
use crate::memory::error::{Error, Result};

const MIB: u64 = 1 << 20;

/// Creates a device of 64 MiB whose fences pass only when signaled.
fn manual_fence_source(paged: bool) -> Arc<FakeSource> {
    let source = if paged { FakeSource::paged(64 * MIB) } else { FakeSource::plain(64 * MIB) };
    let source = source.with_contents();
    source.set_manual_fences();
    Arc::new(source)
}

fn against_model(paged: bool, text: &str, bits: &[u64]) -> Result<(), TestCaseError> {
    let source = manual_fence_source(paged);
    let config = Config::parse(text).map_err(|e| TestCaseError::fail(e.to_string()))?;
    let pool = Pool::new(source.clone(), config).with_mover(source.clone());
    let ops = bits.iter().map(|b| PoolOp::from_bits(*b, 8 * MIB)).collect::<Vec<_>>();
    let outcome = check_pool(&pool, &*source, &ops);
    prop_assert!(outcome.is_ok(), "{outcome:?}");
    prop_assert_eq!(source.used(), 0);
    drop(pool);
    prop_assert_eq!(source.violations(), Vec::<String>::new());
    Ok(())
}

proptest! {
    // 5 tests of 16 cases of 160 to 240 operations: more than 10,000 operations.
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plain_segments_keep_contents(bits in prop::collection::vec(any::<u64>(), 160..240)) {
        against_model(false, "", &bits)?;
    }

    #[test]
    fn virtual_memory_keeps_contents(bits in prop::collection::vec(any::<u64>(), 160..240)) {
        against_model(true, "", &bits)?;
    }

    #[test]
    fn pytorchs_rules_keep_contents(bits in prop::collection::vec(any::<u64>(), 160..240)) {
        let text = "max_split_size_mb:5,large_segment_size_mb:4,max_non_split_rounding_mb:2,\
                    release_before_growth:False,small_size_kb:1024,fit:best,max_memory_mb:48,\
                    garbage_collection_threshold:0.5";
        against_model(false, text, &bits)?;
    }

    #[test]
    fn blocks_that_move_keep_their_contents(bits in prop::collection::vec(any::<u64>(), 160..240)) {
        against_model(false, "max_memory_mb:24,large_segment_size_mb:2", &bits)?;
    }

    #[test]
    fn a_limit_is_enforced(bits in prop::collection::vec(any::<u64>(), 160..240)) {
        against_model(true, "max_memory_mb:24,large_segment_size_mb:2,roundup_power2_divisions:8", &bits)?;
    }
}

/// Returns a pool of plain segments over a device of `mib` MiB, and the device.
fn plain_pool(mib: u64, text: &str) -> Result<(Pool, Arc<FakeSource>)> {
    let source = Arc::new(FakeSource::plain(mib * MIB));
    Ok((Pool::new(source.clone(), Config::parse(text)?), source))
}

fn alloc_mib(pool: &Pool, mib: u64) -> Result<Block> {
    pool.alloc(Request::new(mib * MIB))
}

fn expect_oom_message(result: Result<Block>) -> String {
    match result {
        // The line is in this file, and changes with it.
        Err(Error::OutOfMemory(mut error)) => {
            assert_eq!(error.site.take().map(std::panic::Location::file), Some(file!()));
            error.to_string()
        }
        other => format!("expected to be out of memory, got {other:?}"),
    }
}

#[test]
fn slow_path_polls_fences() -> Result<()> {
    let (pool, source) = plain_pool(64, "")?;
    source.set_manual_fences();
    let block = alloc_mib(&pool, 32)?;
    let fence = source.record_fence()?;
    pool.free_after(block, fence);
    assert_eq!(pool.stats().pending_bytes, 32 * MIB);
    assert_eq!(pool.stats().active_bytes.all.current, 32 * MIB);
    assert_eq!(pool.stats().allocated(), 0);
    source.signal_fence(fence);
    alloc_mib(&pool, 32)?;
    let stats = pool.stats();
    assert_eq!(
        (stats.reclaim_stats.poll.tried, stats.reclaim_stats.poll.served, stats.pending_bytes),
        (1, 1, 0)
    );
    assert_eq!((source.calls().alloc, source.calls().fence_waits), (1, 0));
    Ok(())
}

#[test]
fn slow_path_callbacks_may_free() -> Result<()> {
    let (pool, source) = plain_pool(64, "")?;
    let cached = std::sync::Mutex::new(Some(alloc_mib(&pool, 40)?));
    let (requested, handle) = (Arc::new(AtomicU64::new(0)), pool.clone());
    let seen = requested.clone();
    pool.on_low_memory(move |bytes| {
        seen.store(bytes, Ordering::Relaxed);
        // The pool can be used in a callback, since its lock is not held.
        let block = cached.lock().ok().and_then(|mut c| c.take());
        block.map(|block| handle.free(block)).is_some()
    });
    alloc_mib(&pool, 33)?;
    let rungs = pool.stats().reclaim_stats;
    assert_eq!((rungs.callbacks.tried, rungs.callbacks.served, rungs.grow.tried), (1, 1, 1));
    assert_eq!((requested.load(Ordering::Relaxed), source.calls().alloc), (33 * MIB, 1));
    Ok(())
}

#[test]
fn slow_path_releases_memory_that_was_idle_for_long() -> Result<()> {
    let text = "max_memory_mb:100,garbage_collection_threshold:0.5,release_before_growth:False";
    let (pool, source) = plain_pool(200, text)?;
    let (old, new) = (alloc_mib(&pool, 20)?, alloc_mib(&pool, 40)?);
    pool.free(old);
    for _ in 0..10 {
        pool.free(pool.alloc(Request::new(1))?);
    }
    pool.free(new);
    // 62 MiB are held, more than half of 100: the 20 MiB are older than the average.
    alloc_mib(&pool, 44)?;
    let stats = pool.stats();
    assert_eq!((stats.reclaim_stats.collect.tried, stats.reclaim_stats.grow.served), (1, 4));
    assert_eq!((stats.reserved(), source.calls().free), (62 * MIB + 44 * MIB - 20 * MIB, 1), "{stats}");
    Ok(())
}

/// Returns a pool of virtual memory with 200 MiB free, in two parts that 10 MiB separate.
fn split_between_streams(source: &Arc<FakeSource>) -> Result<(Pool, [Block; 2])> {
    let pool = Pool::new(source.clone(), Config::default());
    let (first, between) = (alloc_mib(&pool, 100)?, alloc_mib(&pool, 10)?);
    let (second, after) = (alloc_mib(&pool, 100)?, alloc_mib(&pool, 10)?);
    pool.free(first);
    pool.free(second);
    Ok((pool, [between, after]))
}

#[test]
fn idle_memory_serves_requests_without_growth() -> Result<()> {
    let mut stats = Vec::new();
    for (stitched, held_back) in [(true, false), (true, true), (false, false), (false, true)] {
        let source = Arc::new(FakeSource::paged(1 << 30));
        source.set_manual_fences();
        let (pool, kept) = split_between_streams(&source)?;
        if held_back {
            source.set_deferred_work();
        }
        if !stitched {
            let detail = "no second mapping".to_owned();
            source.fail_nth_call(0, SourceError::Driver { call: "fake", detail });
        }
        let calls = source.calls();
        let large = alloc_mib(&pool, 200)?;
        assert!(source.peak() <= 222 * MIB + 2 * MIB, "{}", source.peak());
        // A second mapping waits for nothing. Memory moves only after the device has finished with it, or after
        // submitted work. Each takes one call.
        let now = source.calls();
        let expected = (u64::from(!stitched && !held_back), u64::from(!stitched && held_back));
        assert_eq!((now.fence_waits, now.remaps_after_submitted), expected);
        assert_eq!((now.memory_calls(), now.unmap), (calls.memory_calls() + 1, 0));
        assert_eq!((now.moved_pieces > 0, now.map_again), (!stitched, u64::from(stitched)));
        // The result is the same with deferred work.
        stats.push((pool.stats().reserved(), now.moved_pieces, large.segment, large.offset));
        for block in kept.into_iter().chain([large]) {
            pool.free(block);
        }
        pool.empty_cache()?;
        assert_eq!((source.used(), pool.stats().reserved(), source.violations()), (0, 0, vec![]));
    }
    assert_eq!((stats[0], stats[2]), (stats[1], stats[3]));
    Ok(())
}

#[test]
fn never_used_memory_moves_without_waiting() -> Result<()> {
    for used in [false, true] {
        let source = Arc::new(FakeSource::paged(1 << 30));
        source.set_manual_fences();
        let pool = Pool::new(source.clone(), Config::default());
        // More than the request is mapped, ahead of the next one.
        let first = alloc_mib(&pool, 4)?;
        let ahead = pool.stats().reserved() - 4 * MIB;
        assert!(ahead >= 2 * MIB, "{ahead}");
        let kept = if used {
            let block = pool.alloc(Request::new(ahead))?;
            pool.free(block);
            pool.alloc(Request::new(MIB + MIB / 2))?
        } else {
            pool.alloc(Request::new(MIB + MIB / 2))?
        };
        // Small requests have a virtual range of their own.
        let small = pool.alloc(Request::new(1000))?;
        let calls = source.calls();
        assert_eq!(pool.stats().reserved(), source.used());
        assert!(calls.moved_pieces + calls.unmap > 0, "{calls:?}");
        assert_eq!(calls.fence_waits, u64::from(used), "{calls:?}");
        [first, kept, small].into_iter().for_each(|block| pool.free(block));
        pool.empty_cache()?;
        assert_eq!((source.used(), pool.stats().reserved(), source.violations()), (0, 0, vec![]));
    }
    Ok(())
}

#[test]
fn a_move_that_fails_loses_no_memory() -> Result<()> {
    let full = SourceError::OutOfMemory { bytes: 1, detail: String::new() };
    for error in [full, SourceError::DeviceLost("gone".to_owned())] {
        let source = Arc::new(FakeSource::paged(1 << 30));
        let (pool, kept) = split_between_streams(&source)?;
        source.fail_nth_call(0, error.clone());
        let large = alloc_mib(&pool, 200);
        assert_eq!(large.is_err(), matches!(error, SourceError::DeviceLost(_)));
        assert_eq!(pool.stats().reserved(), source.used());
        for block in kept.into_iter().chain(large.ok()) {
            pool.free(block);
        }
        pool.empty_cache()?;
        assert_eq!((source.used(), pool.stats().reserved(), source.violations()), (0, 0, vec![]));
    }
    Ok(())
}

#[test]
fn slow_path_reclaims_only_what_is_needed() -> Result<()> {
    for paged in [false, true] {
        let source = Arc::new(if paged { FakeSource::paged(1 << 30) } else { FakeSource::plain(1 << 30) });
        let pool = Pool::new(source.clone(), Config::default());
        for mib in [100, 120, 140, 160] {
            let (a, b) = (alloc_mib(&pool, mib)?, alloc_mib(&pool, mib + 10)?);
            pool.free(a);
            pool.free(b);
        }
        let stats = pool.stats();
        assert!(stats.reclaim_stats.reclaim.tried > 0 || paged, "{stats}");
        // Never more than 1 % above the peak usage.
        assert!(stats.peak_reserved() * 100 <= stats.peak_allocated() * 101, "{stats}");
        assert_eq!(source.violations(), Vec::<String>::new());
    }
    Ok(())
}

#[test]
fn slow_path_grows_by_less_than_a_segment() -> Result<()> {
    for paged in [false, true] {
        let source = Arc::new(if paged { FakeSource::paged(8 * MIB) } else { FakeSource::plain(8 * MIB) });
        let pool = Pool::new(source.clone(), Config::default());
        // This request would map or allocate 32 MiB if there were room.
        alloc_mib(&pool, 4)?;
        assert_eq!((pool.stats().reserved(), pool.stats().num_ooms), (4 * MIB, 0));
        assert_eq!(source.violations(), Vec::<String>::new());
    }
    Ok(())
}

#[test]
fn slow_path_waits_for_pending_frees() -> Result<()> {
    let (pool, source) = plain_pool(64, "")?;
    source.set_manual_fences();
    let block = alloc_mib(&pool, 40)?;
    pool.free_after(block, source.record_fence()?);
    alloc_mib(&pool, 40)?;
    let stats = pool.stats();
    assert_eq!(
        (stats.reclaim_stats.poll.served, stats.reclaim_stats.wait.served, stats.num_sync_all_streams),
        (0, 1, 1)
    );
    assert_eq!((stats.num_alloc_retries, stats.reclaim_stats.release.tried), (0, 0));
    Ok(())
}

/// PyTorch fails here (pytorch#189504), and serves the same request on a second attempt. After waiting for
/// events it releases whole segments, but does not search the free blocks in split ones.
#[test]
fn pytorch_189504_a_block_freed_by_waiting_is_found_though_its_segment_is_split() -> Result<()> {
    for text in ["", "release_before_growth:False,fit:best,small_size_kb:1024"] {
        let (pool, source) = plain_pool(40, text)?;
        source.set_manual_fences();
        let (whole, rest) = (alloc_mib(&pool, 40)?, 8 * MIB);
        pool.free(whole);
        let (pinned, waiting) = (pool.alloc(Request::new(rest))?, alloc_mib(&pool, 32)?);
        assert_eq!(pinned.segment, waiting.segment);
        pool.free_after(waiting, source.record_fence()?);
        // The segment is partly in use and cannot be released; the device has no other memory.
        let block = alloc_mib(&pool, 32)?;
        assert_eq!(block.segment, pinned.segment);
        assert_eq!(pool.stats().num_ooms, 0);
    }
    Ok(())
}

#[test]
fn slow_path_releases_all_idle_memory() -> Result<()> {
    let (pool, source) = plain_pool(64, "release_before_growth:False")?;
    let (a, b, pinned) = (alloc_mib(&pool, 20)?, alloc_mib(&pool, 20)?, alloc_mib(&pool, 20)?);
    pool.free(a);
    pool.free(b);
    alloc_mib(&pool, 40)?;
    let stats = pool.stats();
    assert_eq!(
        (stats.reclaim_stats.release.tried, stats.reclaim_stats.release.served, stats.num_alloc_retries),
        (1, 1, 1)
    );
    assert_eq!((source.calls().free, stats.reserved()), (2, 60 * MIB));
    pool.free(pinned);
    Ok(())
}

#[test]
fn a_full_device_is_an_error_and_the_pool_recovers() -> Result<()> {
    let (pool, _source) = plain_pool(64, "")?;
    let block = alloc_mib(&pool, 60)?;
    assert!(alloc_mib(&pool, 10).is_err_and(|e| e.is_out_of_memory()));
    assert_eq!(pool.stats().num_ooms, 1);
    pool.free(block);
    alloc_mib(&pool, 64)?;
    Ok(())
}

#[test]
fn fail_fast_skips_the_slow_path() -> Result<()> {
    let (pool, _source) = plain_pool(64, "release_before_growth:False,throw_on_cudamalloc_oom:True")?;
    pool.free(alloc_mib(&pool, 40)?);
    assert!(alloc_mib(&pool, 50).is_err());
    assert_eq!(pool.stats().reclaim_stats.release.tried, 0);
    Ok(())
}

#[test]
fn a_lost_device_is_not_an_out_of_memory_error() -> Result<()> {
    let (pool, source) = plain_pool(64, "")?;
    source.fail_nth_call(0, SourceError::DeviceLost("reset".to_owned()));
    assert!(matches!(alloc_mib(&pool, 1), Err(Error::Driver(SourceError::DeviceLost(_)))));
    let refusal = SourceError::Driver { call: "cuMemAlloc", detail: "invalid value".to_owned() };
    source.fail_nth_call(1, refusal.clone());
    alloc_mib(&pool, 30)?;
    assert!(matches!(alloc_mib(&pool, 31), Err(Error::Driver(e)) if e == refusal));
    alloc_mib(&pool, 31)?;
    Ok(())
}

#[test]
fn without_address_space_the_pool_uses_plain_segments() -> Result<()> {
    let source = Arc::new(FakeSource::paged(64 * MIB));
    let pool = Pool::new(source.clone(), Config::default());
    assert!(pool.stats().expandable_segments);
    source
        .fail_nth_call(0, SourceError::Driver { call: "cuMemAddressReserve", detail: "no space".to_owned() });
    let block = alloc_mib(&pool, 30)?;
    assert!(!pool.stats().expandable_segments);
    assert_eq!((source.calls().alloc, source.calls().map), (1, 0));
    pool.free(block);
    assert_eq!(pool.empty_cache()?, 30 * MIB);
    Ok(())
}

#[test]
fn memory_moves_between_queues_and_pools_by_mapping() -> Result<()> {
    let source = Arc::new(FakeSource::paged(64 * MIB));
    let pool = Pool::new(source.clone(), Config::default());
    let block = alloc_mib(&pool, 60)?;
    pool.free(block);
    // The memory that queue 0 has freed fills most of the device, and is too small where it lies.
    let other = pool.alloc(Request::new(62 * MIB).queue(7))?;
    assert_ne!(other.segment, block.segment);
    assert_eq!((source.used(), source.violations()), (62 * MIB, vec![]));
    Ok(())
}

#[test]
fn trim_does_not_wait_and_empty_cache_does() -> Result<()> {
    let (pool, source) = plain_pool(200, "")?;
    source.set_manual_fences();
    let blocks = [alloc_mib(&pool, 30)?, alloc_mib(&pool, 40)?, alloc_mib(&pool, 50)?];
    blocks.into_iter().for_each(|b| pool.free(b));
    assert_eq!(pool.trim(80 * MIB)?, 50 * MIB);
    let stats = pool.stats();
    assert_eq!((source.calls().fence_waits, source.calls().free), (0, 0));
    assert_eq!((stats.pending_bytes, stats.reserved()), (50 * MIB, 120 * MIB));
    assert_eq!(pool.empty_cache()?, 120 * MIB);
    assert_eq!((source.calls().fence_waits, pool.stats().reserved(), pool.stats().pending_bytes), (2, 0, 0));
    Ok(())
}

#[test]
fn limits_bound_reserved_memory() -> Result<()> {
    let (pool, source) = plain_pool(100, "per_process_memory_fraction:0.5")?;
    assert_eq!(pool.limit(), Some(50 * MIB));
    assert!(alloc_mib(&pool, 51).is_err());
    pool.set_fraction(0.8)?;
    pool.free(alloc_mib(&pool, 51)?);
    assert!(pool.set_fraction(1.5).is_err_and(|e| e.to_string().contains("from 0 to 1")));
    pool.set_limit(Some(20 * MIB));
    assert!(alloc_mib(&pool, 60).is_err());
    assert_eq!(source.used(), 0, "the slow path has released all idle memory");
    Ok(())
}

#[test]
fn preallocated_memory_serves_requests_without_the_driver() -> Result<()> {
    for source in [FakeSource::plain(1 << 30), FakeSource::paged(1 << 30)].map(Arc::new) {
        let pool = Pool::new(source.clone(), Config::default());
        pool.preallocate(512 * MIB)?;
        let calls = source.calls().memory_calls();
        for mib in [100, 200, 212] {
            alloc_mib(&pool, mib)?;
        }
        assert_eq!(source.calls().memory_calls(), calls);
    }
    Ok(())
}

#[test]
fn preallocation_that_fails_gives_everything_back() -> Result<()> {
    for limit in [None, Some(100 * MIB)] {
        for source in [FakeSource::plain(160 * MIB), FakeSource::paged(160 * MIB)].map(Arc::new) {
            let pool = Pool::new(source.clone(), Config { max_memory: limit, ..Config::default() });
            let kept = alloc_mib(&pool, 40)?;
            pool.preallocate(20 * MIB)?;
            let (held, calls) = (pool.stats().reserved(), source.calls().memory_calls());
            for bytes in [130 * MIB, 1 << 40, u64::MAX] {
                let error = pool.preallocate(bytes).map_or_else(|e| e.to_string(), |()| "it fits".to_owned());
                assert!(error.contains("out of memory") && error.contains("preallocate"), "{error}");
                assert_eq!(pool.stats().reserved(), held, "{bytes} bytes");
            }
            assert_eq!(source.calls().memory_calls(), calls, "the device was asked");
            pool.preallocate(50 * MIB)?;
            pool.free(kept);
        }
    }
    // A piece that the device refuses.
    let source = Arc::new(FakeSource::plain(160 * MIB).with_max_segment(16 * MIB));
    let pool = Pool::new(source.clone(), Config::default());
    let _kept = alloc_mib(&pool, 10)?;
    let held = pool.stats().reserved();
    pool.fail_request(4);
    assert!(pool.preallocate(100 * MIB).is_err_and(|e| e.is_out_of_memory()));
    assert_eq!((pool.stats().reserved(), source.used()), (held, held));
    pool.preallocate(100 * MIB)
}

#[test]
fn statistics_have_pytorchs_names_and_resets() -> Result<()> {
    let (pool, _source) = plain_pool(100, "")?;
    // PyTorch's own test: 256 floats are exactly 1,024 active bytes.
    let block = pool.alloc(Request::new(256 * 4).tag(Tag::Parameter))?;
    let map = pool.stats().to_map();
    let get = |key: &str| map.get(key).copied();
    assert_eq!(get("active_bytes.all.current"), Some(1024));
    assert_eq!(get("allocation.small_pool.current"), Some(1));
    assert_eq!(get("segment.small_pool.allocated"), Some(1));
    assert_eq!(get("inactive_split_bytes.all.current"), Some(2 * MIB - 1024));
    assert_eq!(get("tag_bytes.parameter.current"), Some(1024));
    assert_eq!(get("num_device_alloc"), Some(1));
    pool.free(block);
    assert_eq!(pool.stats().inactive_split.all.current, 0);
    pool.reset_peak_stats();
    pool.reset_accumulated_stats();
    let stats = pool.stats();
    assert_eq!((stats.peak_allocated(), stats.tag(Tag::Parameter).peak), (0, 0));
    assert_eq!((stats.allocated_bytes.all.allocated, stats.allocated_bytes.all.freed), (0, 0));
    assert_eq!((stats.peak_reserved(), stats.num_device_alloc), (2 * MIB, 0));
    Ok(())
}

#[test]
fn large_idle_segments_are_split_last() -> Result<()> {
    for (text, last) in [("", true), ("fit:best", false)] {
        let (pool, _) = plain_pool(2048, text)?;
        let blocks = [alloc_mib(&pool, 100)?, alloc_mib(&pool, 256)?];
        blocks.into_iter().for_each(|block| pool.free(block));
        let first = alloc_mib(&pool, 150)?;
        assert_eq!(first.segment, blocks[1].segment);
        // The idle segment of 100 MiB fits better than the rest of the other one.
        let second = alloc_mib(&pool, 40)?;
        assert_eq!(second.segment == first.segment, last, "{text}");
        assert_eq!(pool.stats().num_device_alloc, 2);
    }
    Ok(())
}

#[test]
fn oversize_blocks_are_not_split() -> Result<()> {
    let (pool, source) =
        plain_pool(400, "max_split_size_mb:50,large_segment_size_mb:20,release_before_growth:False")?;
    pool.free(alloc_mib(&pool, 100)?);
    // Below the limit, a request is not served from the block above it; above the limit, only if little is
    // wasted.
    alloc_mib(&pool, 30)?;
    alloc_mib(&pool, 60)?;
    assert_eq!(source.calls().alloc, 3);
    alloc_mib(&pool, 90)?;
    assert_eq!((source.calls().alloc, pool.stats().oversize_segments.current), (3, 2));
    Ok(())
}

#[test]
fn messages_name_other_processes() -> Result<()> {
    let process = |pid, name: &str, mib: Option<u64>| DeviceProcess {
        pid,
        name: name.to_owned(),
        bytes: mib.map(|m| m * MIB),
    };
    let me = process(std::process::id(), "me", Some(0));
    let all =
        vec![process(4242, "python3", Some(700)), process(7, "", Some(100)), me, process(9, "Xorg", None)];
    let source = Arc::new(FakeSource::plain(1024 * MIB).with_processes(all.clone()));
    let pool = Pool::new(source, Config::default()).with_device_name("cuda:0");
    let error =
        alloc_mib(&pool, 300).map_or_else(Error::into_out_of_memory, |_| panic!("there is no room"))?;
    assert_eq!((error.processes.as_slice(), error.held_by_others()), (&*all, Some(800 * MIB)));
    insta::assert_snapshot!(expect_oom_message(alloc_mib(&pool, 300)), @r"
    out of memory on cuda:0: a request for 300.0 MiB (other)
      device: 224.0 MiB free of 1.0 GiB; the device has no room for 314572800 more bytes (234881024 of 1073741824 bytes are free)
      others: 800.0 MiB, of that python3 (pid 4242) 700.0 MiB, process 7 100.0 MiB, Xorg (pid 9)
      pool: 0 B allocated + 0 B pending + 0 B cached = 0 B reserved
      largest free block: 0 B (fragmentation 0 %)
      try: this would fit without python3 (pid 4242), which holds 700.0 MiB
    ");
    Ok(())
}

#[test]
fn messages_list_holders_and_advice() -> Result<()> {
    let (pool, source) = plain_pool(1024, "")?;
    let pool = pool.with_device_name("wgpu:0 llvmpipe");
    source.set_manual_fences();
    let _net = scope::enter_module("net");
    let weights = {
        let _tag = scope::enter_tag(Tag::Parameter);
        let _layer = scope::enter_module("fc1");
        alloc_mib(&pool, 100)?
    };
    let _tag = scope::enter_tag(Tag::Activation);
    let mut blocks = Vec::new();
    for _ in 0..8 {
        blocks.push(alloc_mib(&pool, 100)?);
    }
    let _op = scope::enter_op("matmul");
    let full = expect_oom_message(alloc_mib(&pool, 300));
    insta::assert_snapshot!(full, @r"
    out of memory on wgpu:0 llvmpipe: matmul in net asked for 300.0 MiB (activation)
      device: 124.0 MiB free of 1.0 GiB; the device has no room for 314572800 more bytes (130023424 of 1073741824 bytes are free)
      pool: 900.0 MiB allocated + 0 B pending + 0 B cached = 900.0 MiB reserved
      largest free block: 0 B (fragmentation 0 %)
      held by: activation 800.0 MiB, parameter 100.0 MiB
      modules: net 800.0 MiB, net.fc1 100.0 MiB
      try: activations hold the most: use a smaller batch with accumulation, or checkpoint modules
    ");
    pool.set_limit(Some(900 * MIB));
    pool.free(weights);
    pool.free(blocks.swap_remove(3));
    let limited = expect_oom_message(alloc_mib(&pool, 250));
    insta::assert_snapshot!(limited, @r"
    out of memory on wgpu:0 llvmpipe: matmul in net asked for 250.0 MiB (activation)
      device: 324.0 MiB free of 1.0 GiB; the pool may take 900.0 MiB
      pool: 700.0 MiB allocated + 0 B pending + 0 B cached = 700.0 MiB reserved
      largest free block: 0 B (fragmentation 0 %)
      held by: activation 700.0 MiB
      modules: net 700.0 MiB
      try: the limit stopped this, not the device, which has 324.0 MiB free: raise max_memory_mb or per_process_memory_fraction
      try: activations hold the most: use a smaller batch with accumulation, or checkpoint modules
    ");
    let too_much = expect_oom_message(alloc_mib(&pool, 2000));
    insta::assert_snapshot!(too_much, @r"
    out of memory on wgpu:0 llvmpipe: matmul in net asked for 2.0 GiB (activation)
      device: 324.0 MiB free of 1.0 GiB; the pool may take 900.0 MiB
      pool: 700.0 MiB allocated + 0 B pending + 0 B cached = 700.0 MiB reserved
      largest free block: 0 B (fragmentation 0 %)
      held by: activation 700.0 MiB
      modules: net 700.0 MiB
      try: the request alone is larger than the pool's limit of 900.0 MiB
      try: activations hold the most: use a smaller batch with accumulation, or checkpoint modules
    ");
    Ok(())
}

#[test]
fn a_message_about_fragments_and_one_about_a_tensor_that_is_too_large() -> Result<()> {
    let (pool, _source) = plain_pool(64, "")?;
    pool.free(alloc_mib(&pool, 64)?);
    let blocks = (0..16).map(|_| alloc_mib(&pool, 4)).collect::<Result<Vec<_>>>()?;
    blocks.iter().step_by(2).for_each(|b| pool.free(*b));
    let fragments = expect_oom_message(alloc_mib(&pool, 8));
    insta::assert_snapshot!(fragments, @r"
    out of memory on the device: a request for 8.0 MiB (other)
      device: 0 B free of 64.0 MiB; the device has no room for 8388608 more bytes (0 of 67108864 bytes are free)
      pool: 32.0 MiB allocated + 0 B pending + 32.0 MiB cached = 64.0 MiB reserved
      largest free block: 4.0 MiB (fragmentation 88 %)
      held by: other 32.0 MiB
      try: 32.0 MiB are free but in pieces: allocate long-lived tensors first, or set max_split_size_mb so that large blocks stay whole
    ");

    let source = FakeSource::plain(64 * MIB).with_limits(|l| l.max_segment = 16 * MIB);
    let pool = Pool::new(Arc::new(source), Config::default());
    let _input = scope::enter_tag(Tag::Input);
    let huge = expect_oom_message(pool.alloc(Request::new(20 * MIB).op("from_slice")));
    insta::assert_snapshot!(huge, @r"
    out of memory on the device: from_slice asked for 20.0 MiB (input)
      device: 64.0 MiB free of 64.0 MiB
      pool: 0 B allocated + 0 B pending + 0 B cached = 0 B reserved
      largest free block: 0 B (fragmentation 0 %)
      try: one tensor may take at most 16.0 MiB on this device: split the tensor
    ");
    Ok(())
}

#[test]
fn a_table_and_a_line_show_the_figures() -> Result<()> {
    let (pool, _source) = plain_pool(1024, "")?;
    let block = pool.alloc(Request::new(100 * MIB).tag(Tag::Gradient))?;
    pool.alloc(Request::new(1000))?;
    pool.free(block);
    insta::assert_snapshot!(pool.stats().summary(), @"allocated 1.0 KiB, reserved 102.0 MiB, peak 100.0 MiB");
    insta::assert_snapshot!(pool.stats(), @r"
    --------------------------------------------------------------------------------------
    memory (plain segments)   out of memory: 0   retries: 0   device calls: 2 + 0
    --------------------------------------------------------------------------------------
                                 current        peak    allocated        freed     at peak
    allocated                    1.0 KiB   100.0 MiB    100.0 MiB    100.0 MiB
      large pool                     0 B   100.0 MiB    100.0 MiB    100.0 MiB
      small pool                 1.0 KiB     1.0 KiB      1.0 KiB          0 B
    active                       1.0 KiB   100.0 MiB    100.0 MiB    100.0 MiB
      large pool                     0 B   100.0 MiB    100.0 MiB    100.0 MiB
      small pool                 1.0 KiB     1.0 KiB      1.0 KiB          0 B
    requested                     1000 B   100.0 MiB    100.0 MiB    100.0 MiB
      large pool                     0 B   100.0 MiB    100.0 MiB    100.0 MiB
      small pool                  1000 B      1000 B       1000 B          0 B
    reserved                   102.0 MiB   102.0 MiB    102.0 MiB          0 B
      large pool               100.0 MiB   100.0 MiB    100.0 MiB          0 B
      small pool                 2.0 MiB     2.0 MiB      2.0 MiB          0 B
    non-releasable               2.0 MiB     2.0 MiB      2.0 MiB          0 B
      large pool                     0 B         0 B          0 B          0 B
      small pool                 2.0 MiB     2.0 MiB      2.0 MiB          0 B
      tag gradient                   0 B   100.0 MiB    100.0 MiB    100.0 MiB   100.0 MiB
      tag other                  1.0 KiB     1.0 KiB      1.0 KiB          0 B     1.0 KiB
    pending                          0 B
    allocations                        1           2            2            1
    active blocks                      1           2            2            1
    segments                           2           2            2            0
    non-releasable blocks              1           1            1            0
    --------------------------------------------------------------------------------------
    ");
    Ok(())
}

#[test]
fn tags_at_the_peak_add_up_to_the_peak() -> Result<()> {
    let (pool, _source) = plain_pool(1024, "")?;
    let at_peak = |tag: Tag| pool.stats().tags_at_peak[tag as usize] / MIB;
    let adds_up = || assert_eq!(pool.stats().tags_at_peak.iter().sum::<u64>(), pool.stats().peak_allocated());
    let alloc = |mib: u64, tag: Tag| pool.alloc(Request::new(mib * MIB).tag(tag));
    let weights = alloc(10, Tag::Parameter)?;
    let activations = alloc(30, Tag::Activation)?;
    adds_up();
    pool.free(activations);
    // The peak of gradients is later, and lower in all.
    let gradients = alloc(20, Tag::Gradient)?;
    adds_up();
    assert_eq!((at_peak(Tag::Parameter), at_peak(Tag::Activation), at_peak(Tag::Gradient)), (10, 30, 0));
    assert_eq!(pool.stats().tag(Tag::Gradient).peak, 20 * MIB);
    // A new peak, while it lasts and afterwards.
    let state = alloc(40, Tag::OptimizerState)?;
    adds_up();
    pool.free(gradients);
    pool.free(state);
    assert_eq!((at_peak(Tag::Activation), at_peak(Tag::Gradient), at_peak(Tag::OptimizerState)), (0, 20, 40));
    adds_up();
    pool.reset_peak_stats();
    adds_up();
    assert_eq!(pool.stats().to_map()["tag_bytes.parameter.at_peak"], 10 * MIB);
    pool.free(weights);
    adds_up();
    Ok(())
}

#[test]
fn threads_share_a_pool() -> Result<()> {
    let source = Arc::new(FakeSource::paged(256 * MIB));
    let pool = Pool::new(source.clone(), Config::default());
    let outcomes = std::thread::scope(|threads| {
        let run = |seed: u64| {
            let pool = pool.clone();
            threads.spawn(move || {
                let mut held = Vec::new();
                for i in 0..2000 {
                    held.push(pool.alloc(Request::new((seed * 977 + i * 131) % (3 * MIB)))?);
                    if held.len() > 8 {
                        pool.free(held.swap_remove((i as usize * 7) % 8));
                    }
                }
                held.into_iter().for_each(|b| pool.free(b));
                Ok::<_, Error>(())
            })
        };
        (1..=3)
            .map(run)
            .collect::<Vec<_>>()
            .into_iter()
            .map(|t| t.join().is_ok_and(|r| r.is_ok()))
            .collect::<Vec<_>>()
    });
    assert_eq!(outcomes, [true; 3]);
    assert_eq!((pool.stats().allocated(), pool.stats().num_invalid_frees), (0, 0));
    assert_eq!(source.violations(), Vec::<String>::new());
    Ok(())
}

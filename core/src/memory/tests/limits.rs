//! Limits of the process, and advice on the batch size.

use std::sync::Arc;

use super::fake_source::FakeSource;
use super::{MIB, alloc_mib, expect_oom_message};
use crate::memory::error::Result;
use crate::memory::{
    Config, OutOfMemory, Pool, Request, Tag, process_limit, process_reserved, set_process_limit,
};

/// The only test whose pools count towards the limit, since all tests share a process.
#[test]
fn pools_share_the_limit_of_the_process() -> Result<()> {
    let pool = |text: &str| -> Result<(Pool, Arc<FakeSource>)> {
        let source = Arc::new(FakeSource::plain(1024 * MIB).with_device_memory());
        Ok((Pool::new(source.clone(), Config::parse(text)?), source))
    };
    assert_eq!((process_limit(), process_reserved()), (None, 0));
    let ((first, _), (second, source)) = (pool("")?, pool("")?);
    set_process_limit(Some(200 * MIB));
    let held = alloc_mib(&first, 100)?;
    let kept = alloc_mib(&second, 60)?;
    assert_eq!((process_limit(), process_reserved()), (Some(200 * MIB), 160 * MIB));
    assert_eq!((first.capacity(), second.capacity()), (Some(140 * MIB), Some(100 * MIB)));
    // 40 MiB are left for both.
    let calls = source.calls().alloc;
    insta::assert_snapshot!(expect_oom_message(alloc_mib(&second, 50)), @r"
    out of memory on the device: a request for 50.0 MiB (other)
      device: 964.0 MiB free of 1.0 GiB; all pools of the process may take 200.0 MiB and hold 160.0 MiB
      pool: 60.0 MiB allocated + 0 B pending + 0 B cached = 60.0 MiB reserved
      largest free block: 0 B (fragmentation 0 %)
      held by: other 60.0 MiB
      try: the limit of 200.0 MiB on all pools of this process stopped this: raise max_process_memory_mb (`memory::set_process_limit`), or `trim` the other pools, which hold 100.0 MiB
    ");
    assert_eq!(source.calls().alloc, calls, "the device is not asked");
    // The slow path releases idle memory of its own pool.
    second.free(kept);
    let large = alloc_mib(&second, 90)?;
    let rungs = second.stats().reclaim_stats;
    assert!(rungs.reclaim.tried + rungs.release.tried > 0);
    assert_eq!(process_reserved(), 190 * MIB);
    first.free(held);
    assert!(alloc_mib(&second, 50).is_err(), "idle memory of another pool is not released");
    first.empty_cache()?;
    alloc_mib(&second, 50)?;
    second.free(large);
    second.empty_cache()?;
    assert_eq!(process_reserved(), 50 * MIB);
    // A pool may have a lower limit for the process.
    let (third, _) = pool("max_process_memory_mb:80")?;
    alloc_mib(&third, 30)?;
    assert!(alloc_mib(&third, 10).is_err_and(|e| e.is_out_of_memory()));
    set_process_limit(None);
    alloc_mib(&second, 400)?;
    // Simulated devices do not count.
    let played =
        Pool::new(Arc::new(FakeSource::plain(1024 * MIB)), Config::parse("max_process_memory_mb:1")?);
    alloc_mib(&played, 500)?;
    assert_eq!(process_reserved(), 480 * MIB);
    drop((first, second, third));
    assert_eq!(process_reserved(), 0);
    Ok(())
}

fn expect_oom(result: crate::error::Result<()>) -> Box<OutOfMemory> {
    result.map_or_else(crate::error::Error::into_out_of_memory, |()| panic!("there is room")).unwrap()
}

#[test]
fn rows_that_would_fit_are_estimated_from_earlier_steps() -> crate::error::Result<()> {
    let pool = Pool::new(Arc::new(FakeSource::paged(4096 * MIB)), Config::default());
    let keep = |mib: u64, tag| -> crate::error::Result<crate::memory::Block> {
        Ok(pool.alloc(Request::new(mib * MIB).tag(tag))?)
    };
    for _ in 0..10 {
        keep(10, Tag::Parameter)?;
    }
    // A step keeps 5 MiB a row and scratch memory of 40 MiB, and leaves a gradient.
    let gradient = std::cell::Cell::new(None);
    let step = |rows: u64| {
        pool.with_batch_size(rows as usize, || {
            let mut blocks = Vec::new();
            let made = (0..rows).try_for_each(|_| keep(5, Tag::Activation).map(|block| blocks.push(block)));
            let scratch = made.and_then(|()| keep(40, Tag::Workspace));
            let made = scratch.and_then(|scratch| {
                pool.free(scratch);
                gradient.set(Some(keep(100, Tag::Gradient)?));
                Ok(())
            });
            blocks.into_iter().for_each(|block| pool.free(block));
            made
        })
    };
    pool.set_limit(Some(400 * MIB));
    // The first step only knows what it had reached: 5 MiB a row.
    let error = expect_oom(step(64));
    let rows = error
        .batch
        .map(|rows| (rows.batch_size, rows.held_before / MIB, rows.reached_bytes / MIB, rows.earlier_step));
    assert_eq!(rows, Some((64, 100, 305, None)));
    let fits = error.fitting_batch_size().map(|fits| (fits.batch_size, fits.is_measured));
    assert_eq!(fits, Some((32, false)));
    insta::assert_snapshot!(error.advice()[0], @"micro-batch 32 may fit: more than 252.5 of 400.0 MiB, by the memory of this failed step of 64");
    // 100 + 160 + 100 MiB do fit; later steps know this.
    step(32)?;
    assert_eq!(pool.measured_batch().map(|m| (m.batch_size, m.peak / MIB)), Some((32, 360)));
    pool.set_limit(Some(345 * MIB));
    gradient.take().into_iter().for_each(|block| pool.free(block));
    pool.empty_cache()?;
    let error = expect_oom(step(32));
    let earlier = error.batch.and_then(|rows| rows.earlier_step).map(|e| (e.batch_size, e.batch_bytes / MIB));
    assert_eq!(earlier, Some((32, 110)), "of 160 MiB 40 are scratch, and 10 may be a gradient that is added");
    insta::assert_snapshot!(error.advice()[0], @"micro-batch 16 would fit: 320.3 of 345.0 MiB");
    // Outside of a step there is no estimate. A request of which no part would fit has no smaller
    // micro-batch.
    assert!(expect_oom(keep(500, Tag::Other).map(drop)).batch.is_none());
    pool.set_limit(Some(90 * MIB));
    insta::assert_snapshot!(expect_oom(step(3)).advice()[0], @"no smaller micro-batch would fit: one row needs more than 101.7 of 90.0 MiB");
    // Peaks of the pool cover all steps.
    let stats = pool.stats();
    assert_eq!((stats.peak_allocated() / MIB, stats.tag(Tag::Activation).peak / MIB), (400, 300));
    Ok(())
}

#[test]
fn the_largest_segment_can_be_filled() -> Result<()> {
    // A driver's limit is not a multiple of the pool's unit, and divisions round requests up beyond it.
    for text in ["", "roundup_power2_divisions:2"] {
        let source = Arc::new(FakeSource::plain(64 * MIB).with_max_segment(7 * MIB + 256));
        let pool = Pool::new(source.clone(), Config::parse(text)?);
        assert_eq!(pool.max_block_size(), 7 * MIB);
        let block = pool.alloc(Request::new(pool.max_block_size()))?;
        assert_eq!(block.size, 7 * MIB);
        let next = pool.alloc(Request::new(7 * MIB - 100))?;
        assert_eq!(next.size, 7 * MIB);
        assert!(pool.alloc(Request::new(7 * MIB + 1)).is_err_and(|e| e.is_out_of_memory()));
        drop(pool);
        assert_eq!(source.violations(), Vec::<String>::new());
    }
    Ok(())
}

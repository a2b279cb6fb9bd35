//! Several queues and private pools.

use super::*;

#[test]
fn a_block_used_by_another_queue_is_free_at_once_and_reuse_waits_on_the_device() -> Result<()> {
    let source = manual_fence_source(false);
    let pool = Pool::new(source.clone(), Config::default());
    let a = pool.alloc(Request::new(MIB))?;
    let plain = pool.alloc(Request::new(MIB))?;
    pool.free_cross_stream(a, 0b10);
    assert_eq!((pool.stats().allocated(), pool.stats().pending_bytes, source.recorded_events()), (MIB, 0, 1));
    // A block that no other queue used has no queue to wait for.
    pool.free(plain);
    let again = pool.alloc(Request::new(2 * MIB))?;
    assert_eq!((again.offset, source.last_waited_event(1, 0)), (a.offset, Some(1)), "what merged waits too");
    pool.free(again);
    let third = pool.alloc(Request::new(2 * MIB))?;
    assert_eq!((source.recorded_events(), source.calls().fence_waits), (1, 0), "once, and never the host");
    pool.free(third);
    Ok(())
}

#[test]
fn free_memory_of_one_queue_serves_another_before_growth() -> Result<()> {
    let source = manual_fence_source(false);
    let pool = Pool::new(source.clone(), Config::default());
    let a = pool.alloc(Request::new(20 * MIB))?;
    pool.free(a);
    let reserved = pool.stats().reserved();
    let b = pool.alloc(Request::new(20 * MIB).queue(3))?;
    assert_eq!((b.offset, pool.stats().reserved()), (a.offset, reserved));
    assert_eq!(source.last_waited_event(0, 3), Some(1));
    // The block returns to its own queue, after the other one.
    pool.free(b);
    let c = pool.alloc(Request::new(20 * MIB))?;
    assert_eq!((c.offset, source.last_waited_event(3, 0)), (a.offset, Some(2)));
    assert_eq!((source.calls().alloc, source.calls().fence_waits), (1, 0));
    Ok(())
}

#[test]
fn a_private_pool_is_isolated_and_releases_its_memory_when_dropped() -> Result<()> {
    for paged in [false, true] {
        let source = manual_fence_source(paged);
        let pool = Pool::new(source.clone(), Config::default());
        let other = Pool::new(manual_fence_source(paged), Config::default());
        let private = pool.create_private_pool();
        let inside = private.enter();
        let a = pool.alloc(Request::new(8 * MIB))?;
        let elsewhere = other.alloc(Request::new(8 * MIB))?;
        drop(inside);
        pool.free(a);
        other.free(elsewhere);
        assert_eq!(
            other.alloc(Request::new(8 * MIB))?.offset,
            0,
            "the pool of another device is not involved"
        );
        let held = private.reserved();
        assert!(held >= 8 * MIB);
        assert_eq!(pool.empty_cache()?, 0, "it keeps its memory");
        let b = pool.alloc(Request::new(8 * MIB))?;
        assert_eq!(pool.stats().reserved(), 2 * held, "it serves no other request");
        let inside = private.enter();
        let again = pool.alloc(Request::new(8 * MIB))?;
        assert_eq!((again.segment, again.offset), (a.segment, a.offset), "the same addresses");
        let still = pool.alloc(Request::new(MIB))?;
        drop(inside);
        pool.free(again);
        drop(private);
        // Blocks that outlive the private pool stay valid.
        source.write(still.segment, still.offset, &[7; 64])?;
        pool.free(still);
        pool.free(b);
        pool.empty_cache()?;
        assert_eq!((pool.stats().reserved(), source.used()), (0, 0));
        assert_eq!(source.violations(), Vec::<String>::new());
    }
    Ok(())
}

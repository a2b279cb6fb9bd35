//! Statistics right after failed requests.

use std::sync::Arc;

use super::super::source::SourceError;
use super::super::{Config, Pool, Request, Stats};
use super::MIB;
use super::fake_source::FakeSource;
use crate::memory::error::Result;

/// Returns the statistics that a failed request must not change.
fn held_figures(stats: &Stats) -> [u64; 6] {
    [
        stats.allocated(),
        stats.requested_bytes.all.current,
        stats.active_bytes.all.current,
        stats.allocation.all.current,
        stats.pending_bytes,
        stats.peak_allocated(),
    ]
}

#[test]
fn a_failed_request_does_not_change_reserved_memory() -> Result<()> {
    for source in [FakeSource::plain(100 * MIB), FakeSource::paged(100 * MIB)] {
        let source = Arc::new(source);
        let pool = Pool::new(source.clone(), Config::default()).with_mover(source.clone());
        let kept = [pool.alloc(Request::new(30 * MIB))?, pool.alloc(Request::new(1000))?];
        let idle = pool.alloc(Request::new(20 * MIB))?;
        pool.free(idle);
        let before = pool.stats();
        // Requests for more than the device has and for more than any memory, and one with an injected
        // failure.
        for bytes in [200 * MIB, 80 * MIB, 1 << 62, u64::MAX] {
            assert!(pool.alloc(Request::new(bytes)).is_err(), "{bytes}");
            let after = pool.stats();
            assert_eq!(held_figures(&after), held_figures(&before), "after {bytes}");
            assert_eq!(after.reserved(), source.used(), "after {bytes}");
        }
        pool.fail_request(1);
        assert!(pool.alloc(Request::new(5000)).is_err());
        assert_eq!(held_figures(&pool.stats()), held_figures(&before));
        assert_eq!(pool.stats().num_ooms, before.num_ooms + 5);
        // A driver that fails for another reason.
        source.fail_nth_call(
            0,
            SourceError::Driver { call: "alloc", detail: "requested by a test".to_owned() },
        );
        assert!(pool.alloc(Request::new(60 * MIB)).is_err());
        assert_eq!(held_figures(&pool.stats()), held_figures(&before));
        assert_eq!(pool.stats().reserved(), source.used());
        // The next request is not affected.
        let next = pool.alloc(Request::new(60 * MIB))?;
        assert_eq!(pool.stats().allocated(), before.allocated() + 60 * MIB);
        pool.free(next);
        kept.into_iter().for_each(|block| pool.free(block));
        pool.empty_cache()?;
        assert_eq!((pool.stats().reserved(), source.used()), (0, 0));
        assert_eq!(source.violations(), [""; 0]);
        pool.snapshot().check()?;
    }
    Ok(())
}

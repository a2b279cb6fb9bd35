//! A cache grown by `cat`: each token allocates every block anew, one row larger, and frees the old one.

use std::sync::Arc;

use super::super::{Config, Pool, Request};
use super::fake_source::FakeSource;
use crate::memory::error::Result;

/// Keys and values of `layers` layers, for `tokens` tokens of `row` bytes. The other blocks of a step are
/// small.
struct CacheProgram {
    layers: usize,
    tokens: u64,
    row: u64,
    /// If true, blocks have room for all tokens from the beginning.
    is_preallocated: bool,
}

/// Statistics of a pool that ran the program.
#[derive(Debug)]
struct CacheRun {
    calls: u64,
    ratio: f64,
}

impl CacheProgram {
    fn run(&self, source: FakeSource) -> Result<CacheRun> {
        let source = Arc::new(source);
        let pool = Pool::new(source.clone(), Config::default()).with_mover(source.clone());
        let ask = |bytes: u64| pool.alloc(Request::new(bytes).movable());
        let mut blocks = Vec::new();
        let (mut requested, mut exact) = (0, 0);
        for _ in 0..2 * self.layers {
            let tokens = if self.is_preallocated { self.tokens } else { 1 };
            blocks.push((ask(tokens * self.row)?, tokens * self.row));
            requested += tokens * self.row;
        }
        for token in 2..=self.tokens {
            let mut hidden = ask(self.row)?;
            requested += self.row;
            for (at, (block, bytes)) in blocks.iter_mut().enumerate() {
                if !self.is_preallocated {
                    let larger = ask(token * self.row)?;
                    requested += token * self.row;
                    exact = requested.max(exact);
                    pool.free(std::mem::replace(block, larger));
                    requested -= std::mem::replace(bytes, token * self.row);
                }
                if at % 2 == 1 {
                    let next = ask(self.row)?;
                    exact = (requested + self.row).max(exact);
                    pool.free(std::mem::replace(&mut hidden, next));
                }
            }
            pool.free(hidden);
            requested -= self.row;
        }
        let stats = pool.stats();
        let peak_requested = stats.requested_bytes.all.peak;
        let ratio = source.peak() as f64 / peak_requested as f64;
        assert_eq!(peak_requested, exact, "peaks are those of the requests");
        Ok(CacheRun { calls: source.calls().memory_calls(), ratio })
    }
}

#[test]
fn a_growing_cache_calls_the_driver_rarely() -> Result<()> {
    // Layers, tokens, bytes of a token; calls and reserved over requested in virtual memory, and in plain segments.
    let caches = [(12, 2000, 9216, (1100, 1.09), (20, 1.37)), (24, 1500, 8192, (1600, 1.13), (28, 1.34))];
    for (layers, tokens, row, paged, plain) in caches {
        let cache = CacheProgram { layers, tokens, row, is_preallocated: false };
        let sources = [(FakeSource::paged(80 << 30), paged), (FakeSource::plain(80 << 30), plain)];
        for (source, (calls, ratio)) in sources {
            let results = cache.run(source)?;
            assert!(results.calls <= calls && results.ratio <= ratio, "{layers} layers: {results:?}");
        }
    }
    Ok(())
}

#[test]
fn growth_calls_the_driver_a_fifth_as_often_as_moving_each_time() -> Result<()> {
    let results = CacheProgram { layers: 12, tokens: 6000, row: 3072, is_preallocated: false }
        .run(FakeSource::paged(80 << 30))?;
    assert!(results.calls <= 1750 && results.ratio <= 1.08, "{results:?}");
    Ok(())
}

#[test]
fn a_cache_that_exists_from_the_start_needs_little_extra_memory() -> Result<()> {
    let cache = CacheProgram { layers: 12, tokens: 2000, row: 9216, is_preallocated: true };
    for (source, calls) in [(FakeSource::paged(80 << 30), 30), (FakeSource::plain(80 << 30), 12)] {
        let results = cache.run(source)?;
        assert!(results.calls <= calls && results.ratio <= 1.03, "{results:?}");
    }
    Ok(())
}

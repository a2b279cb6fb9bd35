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
    /// Copied bytes as a part of the allocated bytes.
    copied: f64,
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
        let copied = stats.compacted_bytes as f64 / stats.allocated_bytes.all.allocated as f64;
        Ok(CacheRun { calls: source.calls().memory_calls(), ratio, copied })
    }
}

#[test]
fn a_growing_cache_calls_the_driver_rarely() -> Result<()> {
    // Layers, tokens, bytes of a token; calls and reserved over requested in virtual memory, and in plain segments.
    // Plain segments cannot grow: each one is replaced by a larger one whenever the blocks outgrow it.
    let caches = [(12, 2000, 9216, (40, 1.08), (600, 1.10)), (24, 1500, 8192, (40, 1.07), (1000, 1.05))];
    for (layers, tokens, row, paged, plain) in caches {
        let cache = CacheProgram { layers, tokens, row, is_preallocated: false };
        let sources = [(FakeSource::paged(80 << 30), paged), (FakeSource::plain(80 << 30), plain)];
        for (source, (calls, ratio)) in sources {
            let results = cache.run(source)?;
            let within = results.calls <= calls && results.ratio <= ratio && results.copied <= 0.02;
            assert!(within, "{layers} layers: {results:?}");
        }
    }
    Ok(())
}

#[test]
fn growth_calls_the_driver_a_fifth_as_often_as_moving_each_time() -> Result<()> {
    let results = CacheProgram { layers: 12, tokens: 6000, row: 3072, is_preallocated: false }
        .run(FakeSource::paged(80 << 30))?;
    assert!(results.calls <= 40 && results.ratio <= 1.08, "{results:?}");
    Ok(())
}

/// Blocks that creep are rounded up to size classes. On a full device, requests get their exact size.
#[test]
fn a_cache_grows_until_the_device_is_full() -> Result<()> {
    const ROW: u64 = 8192;
    let pool_of = |capacity: u64| {
        let source = Arc::new(FakeSource::plain(capacity));
        (Pool::new(source.clone(), Config::default()).with_mover(source.clone()), source)
    };
    // Grows four blocks until a request fails, and returns the size of that request in rows.
    let fill = |capacity: u64| -> Result<u64> {
        let (pool, source) = pool_of(capacity);
        let mut blocks = Vec::new();
        for _ in 0..4 {
            blocks.push(pool.alloc(Request::new(100 * ROW).movable())?);
        }
        for rows in 101.. {
            for block in &mut blocks {
                match pool.alloc(Request::new(rows * ROW).movable()) {
                    Ok(larger) => pool.free(std::mem::replace(block, larger)),
                    Err(error) => {
                        assert!(error.is_out_of_memory(), "{error}");
                        assert_eq!(source.violations(), Vec::<String>::new());
                        return Ok(rows);
                    }
                }
            }
        }
        Ok(0)
    };
    // Five blocks exist at once. Each may need a segment of its own, of whole MiB.
    let rows = fill(100 << 20)?;
    assert!(rows * ROW * 5 >= 80 << 20, "{rows} rows");
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

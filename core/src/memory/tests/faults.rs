//! Failures at every point of a program whose blocks move: each is an error, loses nothing, and a repeated
//! request is served.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::MIB;
use super::fake_source::FakeSource;
use super::pool_model::check_stats_invariants;
use crate::memory::compaction::{BlockMove, BlockMover, HeldDispatch};
use crate::memory::error::{Error, Result};
use crate::memory::source::SourceError;
use crate::memory::{Block, Config, Pool, Request};

/// Requests and frees of one run, and the bytes checked at both ends of a block.
const STEPS: u64 = 600;
const END_BYTES: usize = 64;

/// The call that fails, once, counted from 1.
#[derive(Clone, Copy, Debug)]
enum InjectedFault {
    None,
    /// A request, as on a full device.
    Request(u64),
    /// Enqueuing copies.
    Copy(u64),
    /// A call that takes memory from the device.
    DeviceAlloc(u64),
}

/// Block mover of a device that fails once.
#[derive(Debug)]
struct FaultyMover {
    source: Arc<FakeSource>,
    copies: AtomicU64,
    fail_at: u64,
}

impl BlockMover for FaultyMover {
    fn lock_dispatch(&self) -> Box<dyn HeldDispatch + '_> {
        Box::new(())
    }

    fn enqueue_copies(&self, queue: u8, moves: &[BlockMove]) -> Result<()> {
        if self.copies.fetch_add(1, Ordering::Relaxed) + 1 == self.fail_at {
            return Err(Error::argument("copy", "requested by a test"));
        }
        self.source.enqueue_copies(queue, moves)
    }
}

/// Result of a run.
#[derive(Debug, Default)]
struct FaultRun {
    /// Result of each request: true if it was served.
    served: Vec<bool>,
    errors: usize,
    requests: u64,
    copies: u64,
    growths: u64,
}

fn block_end(block: &Block, last: bool) -> (u64, usize) {
    let bytes = END_BYTES.min(block.size as usize / 2);
    (if last { block.offset + block.size - bytes as u64 } else { block.offset }, bytes)
}

fn write_ends(source: &FakeSource, block: &Block, mark: u8) -> Result<()> {
    for last in [false, true] {
        let (offset, bytes) = block_end(block, last);
        source.write(block.segment, offset, &vec![mark; bytes])?;
    }
    Ok(())
}

fn has_contents(pool: &Pool, source: &FakeSource, (block, mark): &(Block, u8)) -> Result<bool> {
    let mut block = *block;
    pool.refresh_location(&mut block);
    let mut all = true;
    for last in [false, true] {
        let (offset, bytes) = block_end(&block, last);
        let mut data = vec![0; bytes];
        source.read(block.segment, offset, &mut data)?;
        all &= data.iter().all(|byte| byte == mark);
    }
    Ok(all)
}

/// Runs random requests and frees close to the limit of a plain pool, with a fault. A request that fails here
/// but succeeded in `before`, the run without a fault, is repeated.
fn run_with_fault(fault: InjectedFault, before: Option<&FaultRun>) -> Result<FaultRun> {
    let source = Arc::new(FakeSource::plain(64 * MIB).with_contents());
    let fails = if let InjectedFault::Copy(number) = fault { number } else { 0 };
    let mover = Arc::new(FaultyMover { source: source.clone(), copies: AtomicU64::new(0), fail_at: fails });
    let config = Config::parse("small_size_kb:16,large_segment_size_mb:2,max_memory_mb:12")?;
    let pool = Pool::new(source.clone(), config).with_mover(mover.clone());
    match fault {
        InjectedFault::Request(number) => pool.fail_request(number),
        InjectedFault::DeviceAlloc(number) => {
            source.fail_nth_call(number - 1, SourceError::OutOfMemory { bytes: 1, detail: String::new() });
        }
        InjectedFault::None | InjectedFault::Copy(_) => {}
    }
    let (mut outcome, mut live, mut seed) = (FaultRun::default(), Vec::<(Block, u8)>::new(), 7_u64);
    let mut alike = true;
    for step in 0..STEPS {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = seed >> 24;
        if step % 40 == 39 {
            // Releases memory, so that the pool has to grow again.
            pool.trim(4 * MIB)?;
        }
        if bits % 32 < 15 && !live.is_empty() {
            let gone = live.swap_remove(bits as usize / 32 % live.len());
            assert!(has_contents(&pool, &source, &gone)?, "{fault:?}, step {step}: {gone:?} has changed");
            pool.free(gone.0);
            continue;
        }
        let request = Request::new((MIB / 8) << (bits / 32 % 5)).movable();
        let mut block = pool.alloc(request);
        let served = before.and_then(|b| b.served.get(outcome.served.len()).copied());
        let hit = match fault {
            InjectedFault::Request(number) => number == outcome.served.len() as u64 + 1,
            InjectedFault::Copy(number) => number <= mover.copies.load(Ordering::Relaxed),
            InjectedFault::None | InjectedFault::DeviceAlloc(_) => false,
        };
        // A request that fails in both runs moves what it can first, so from here on block positions differ.
        alike &= served != Some(false) || !hit;
        if block.is_err() && served == Some(true) && outcome.errors == 0 && alike {
            outcome.errors += 1;
            // Allocated blocks are unharmed, and the pool's statistics are correct.
            for kept in &live {
                assert!(has_contents(&pool, &source, kept)?, "{fault:?}, step {step}: {kept:?} has changed");
            }
            let stats = pool.stats();
            assert_eq!(
                (check_stats_invariants(&stats), stats.reserved()),
                (Ok(()), source.used()),
                "{fault:?}"
            );
            block = pool.alloc(request);
            // If growth failed, the pool continued with compaction, so block positions may differ.
            let differs = matches!(fault, InjectedFault::DeviceAlloc(_));
            assert!(block.is_ok() || differs, "{fault:?}, step {step}: {block:?}");
        }
        outcome.served.push(block.is_ok());
        if let Ok(block) = block {
            live.push((block, step as u8));
            write_ends(&source, &block, step as u8)?;
        }
    }
    for kept in live {
        assert!(has_contents(&pool, &source, &kept)?, "{fault:?}: {kept:?} has changed");
        pool.free(kept.0);
    }
    pool.empty_cache()?;
    let stats = pool.stats();
    assert_eq!((stats.allocated(), stats.reserved(), stats.num_invalid_frees), (0, 0, 0), "{fault:?}");
    assert_eq!((source.used(), source.violations()), (0, vec![]), "{fault:?}");
    outcome.requests = pool.request_count();
    outcome.copies = mover.copies.load(Ordering::Relaxed);
    outcome.growths = source.calls().alloc;
    Ok(outcome)
}

#[test]
fn faults_while_blocks_move_lose_nothing() -> Result<()> {
    let plain = run_with_fault(InjectedFault::None, None)?;
    assert!(plain.copies >= 10 && plain.growths >= 5, "{plain:?}");
    // Every fourth request, and all copies and growths.
    let requests = (1..=plain.requests).step_by(4).map(InjectedFault::Request);
    let copies = (1..=plain.copies).map(InjectedFault::Copy);
    let growths = (1..=plain.growths).map(InjectedFault::DeviceAlloc);
    let (mut errors, mut of_copies) = (0, 0);
    for fault in requests.chain(copies).chain(growths) {
        let found = run_with_fault(fault, Some(&plain))?.errors;
        errors += found;
        of_copies += found * usize::from(matches!(fault, InjectedFault::Copy(_)));
    }
    // Some faults hit requests for which the program has no room anyway.
    assert!(errors >= 40 && of_copies >= 6, "{errors} errors, {of_copies} of copies");
    Ok(())
}

//! Race detection for streams and offload, on a device of eight queues that runs nothing. Each access must be ordered
//! after all previous writes of its memory, and each write after all previous reads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use forebay_core::backend::null::{CardProfile, NullBackend};
use forebay_core::backend::{
    Backend, Command, DeviceInfo, DeviceMemory, Event, Fence, KernelId, KernelSource, LibraryFeatures,
    MAX_QUEUES, PageRemap, SegmentId, SegmentSource, Slice, SourceError, SourceLimits,
};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::Result;
use forebay_core::forward_backend;
use forebay_core::memory::Config;
use forebay_core::stream::Stream;
use forebay_core::tensor::Tensor;
use forebay_nn::nn::{Gpt, GptOptions, Module};
use forebay_nn::optim::{AdamW, Optimizer};
use forebay_nn::plan::StepConfig;

const QUEUES: usize = MAX_QUEUES as usize;

/// Number of completed operations of each queue, as known at one point in time.
type VectorClock = [u64; QUEUES];

/// Access of one operation to a range: its queue, its sequence number, and whether it writes.
#[derive(Clone, Debug)]
struct Access {
    slice: Slice,
    queue: usize,
    sequence: u64,
    is_write: bool,
}

#[derive(Debug, Default)]
struct AccessLog {
    clocks: [VectorClock; QUEUES],
    events: Vec<VectorClock>,
    accesses: Vec<Access>,
    races: Vec<String>,
    waits: usize,
}

/// Backend that records accesses, or the view of one of its queues.
#[derive(Debug)]
struct RaceCheckBackend {
    inner: Arc<NullBackend>,
    queue: usize,
    log: Arc<Mutex<AccessLog>>,
    /// Bit masks of the bindings that each kernel writes.
    write_masks: Arc<Mutex<Vec<u32>>>,
}

impl RaceCheckBackend {
    fn inner(&self) -> &NullBackend {
        &self.inner
    }

    fn lock_log(&self) -> MutexGuard<'_, AccessLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_access(&self, what: &str, slices: &[(Slice, bool)]) {
        let seen = &mut *self.lock_log();
        let queue = self.queue;
        seen.clocks[queue][queue] += 1;
        let (clock, number) = (seen.clocks[queue], seen.clocks[queue][queue]);
        for (slice, wrote) in slices {
            let overlaps = |t: &Access| {
                let (a, b) = (&t.slice, slice);
                a.segment == b.segment && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
            };
            for t in seen.accesses.iter().filter(|t| (t.is_write || *wrote) && overlaps(t)) {
                if t.queue != queue && clock[t.queue] < t.sequence {
                    seen.races.push(format!("{what} on queue {queue} does not wait for {t:?}"));
                }
            }
            // Accesses inside this range are ordered before this write, so later accesses need no comparison with them.
            if *wrote {
                let inside = |t: &Access| {
                    t.slice.segment == slice.segment
                        && t.slice.offset >= slice.offset
                        && t.slice.offset + t.slice.bytes <= slice.offset + slice.bytes
                };
                seen.accesses.retain(|t| !inside(t));
            }
            seen.accesses.push(Access { slice: *slice, queue, sequence: number, is_write: *wrote });
        }
    }
}

impl SegmentSource for RaceCheckBackend {
    forward_backend! {
        inner: limits device_memory alloc_segment free_segment reserve_addresses free_addresses unmap remap
            record_fence
    }
    fn queue_count(&self) -> u8 {
        MAX_QUEUES
    }
    fn record_event(&self, queue: u8) -> Result<Event, SourceError> {
        let mut seen = self.lock_log();
        let clock = seen.clocks[usize::from(queue)];
        seen.events.push(clock);
        Ok(Event(seen.events.len() as u64 - 1))
    }
    fn wait_event(&self, queue: u8, event: Event) -> Result<(), SourceError> {
        let mut seen = self.lock_log();
        let known = seen.events[event.0 as usize];
        seen.waits += 1;
        for (clock, known) in seen.clocks[usize::from(queue)].iter_mut().zip(known) {
            *clock = known.max(*clock);
        }
        Ok(())
    }
    fn is_fence_signaled(&self, fence: Fence) -> Result<bool, SourceError> {
        self.wait_fence(fence).map(|()| true)
    }
    fn wait_fence(&self, _fence: Fence) -> Result<(), SourceError> {
        // The host has waited for all queues, so later operations are ordered after everything.
        let mut seen = self.lock_log();
        let all: VectorClock = std::array::from_fn(|queue| seen.clocks[queue][queue]);
        seen.clocks = [all; QUEUES];
        Ok(())
    }
}

impl Backend for RaceCheckBackend {
    forward_backend! {
        inner: info alloc_host free_host library_features
    }
    fn compile(&self, source: &KernelSource<'_>) -> Result<KernelId> {
        let id = self.inner.compile(source)?;
        let mut written = self.write_masks.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have compiled the next kernel already.
        let len = written.len().max(id.0 as usize + 1);
        written.resize(len, u32::MAX);
        written[id.0 as usize] = forebay_shaders::writable_bindings(source.wgsl);
        Ok(id)
    }
    fn enqueue(&self, command: &Command<'_>) -> Result<bool> {
        match *command {
            Command::Launch(launch) => {
                let written =
                    self.write_masks.lock().unwrap_or_else(PoisonError::into_inner)[launch.kernel.0 as usize];
                let slices: Vec<_> =
                    launch.bindings.iter().enumerate().map(|(k, s)| (*s, written >> k & 1 == 1)).collect();
                // Lets other threads run between the core's decision and this call, to expose races.
                std::thread::yield_now();
                self.record_access("a kernel", &slices);
            }
            Command::Copy { dst, src } => self.record_access("a copy", &[(src, false), (dst, true)]),
            Command::Fill { dst, .. } => self.record_access("a fill", &[(dst, true)]),
            // The kernel that follows a declined call reports its accesses.
            _ => {}
        }
        self.inner.enqueue(command)
    }
    fn upload(&self, dst: Slice, data: &[u8]) -> Result<()> {
        self.record_access("an upload", &[(dst, true)]);
        self.inner.upload(dst, data)
    }
    fn download(&self, src: Slice, data: &mut [u8]) -> Result<()> {
        self.record_access("a download", &[(src, false)]);
        self.inner.download(src, data)
    }
    fn flush(&self) -> Result<()> {
        Ok(())
    }
    fn open_queue(&self, number: u8) -> Result<Option<Arc<dyn Backend>>> {
        Ok(Some(Arc::new(Self {
            inner: Arc::clone(&self.inner),
            queue: usize::from(number),
            log: Arc::clone(&self.log),
            write_masks: Arc::clone(&self.write_masks),
        })))
    }
    fn supports_pinned_host(&self) -> bool {
        true
    }
}

/// Runs `work` on such a device, with and without virtual memory and fusion, and fails on a race or a single queue.
fn assert_no_races(work: impl Fn(&Device) -> Result<()>) -> Result<()> {
    assert_no_races_with("", work)
}

fn assert_no_races_with(config: &str, work: impl Fn(&Device) -> Result<()>) -> Result<()> {
    for (virtual_memory, fusion) in [(true, None), (false, None), (true, Some(0)), (false, Some(0))] {
        let mut profile = CardProfile::default();
        if !virtual_memory {
            profile.source_limits.virtual_memory = None;
        }
        let backend = Arc::new(RaceCheckBackend {
            inner: Arc::new(NullBackend::new(profile)),
            queue: 0,
            log: Arc::default(),
            write_masks: Arc::default(),
        });
        let device = Device::with_config(backend.clone(), Config::parse(config)?);
        device.set_fusion_min_bytes(fusion);
        work(&device)?;
        drop(device);
        let seen = backend.lock_log();
        assert!(seen.races.is_empty(), "{} races, the first: {}", seen.races.len(), seen.races[0]);
        assert!(seen.waits > 0, "one queue alone was used");
    }
    Ok(())
}

#[test]
fn offloaded_tensors_are_waited_for() -> Result<()> {
    assert_no_races(|device| {
        let all = (0..6).map(|_| Tensor::ones([1 << 18], DType::F32, device)).collect::<Result<Vec<_>>>()?;
        all.iter().try_for_each(Tensor::offload_)?;
        for _ in 0..30 {
            for t in &all {
                t.add_(1.0)?;
                t.offload_()?;
            }
        }
        Ok(())
    })
}

#[test]
fn streams_that_share_tensors_and_memory_wait_for_each_other() -> Result<()> {
    assert_no_races(|device| {
        let streams = [Stream::default_stream(device), Stream::new(device), Stream::new(device)];
        let mut all = vec![Tensor::ones([64, 64], DType::F32, device)?; 3];
        for k in 0..60 {
            let _on = streams[k % 3].enter();
            let next = all[all.len() - 1].matmul(&all[all.len() - 3])?.add(&all[k % all.len()])?;
            next.mul_(0.5)?;
            all.push(next);
            if k % 4 == 3 {
                all.drain(..3);
            }
        }
        Ok(())
    })
}

/// Threads on their own streams pass tensors to each other. An event that another thread records must not count as
/// after an operation that has begun but is not enqueued yet.
#[test]
fn threads_on_streams_wait_for_tensors_they_receive() -> Result<()> {
    const THREADS: usize = 4;
    assert_no_races(|device| {
        let shared = Tensor::ones([64, 64], DType::F32, device)?;
        let (to, from): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Tensor>()).unzip();
        std::thread::scope(|threads| {
            let workers: Vec<_> = from
                .into_iter()
                .enumerate()
                .map(|(k, from)| {
                    let (next, shared) = (to[(k + 1) % THREADS].clone(), &shared);
                    threads.spawn(move || -> Result<()> {
                        let _on = Stream::new(device).enter();
                        let mut own = Tensor::ones([64, 64], DType::F32, device)?;
                        for _ in 0..600 {
                            // The first thread to finish closes its channel.
                            let _ = next.send(own.add(shared)?);
                            let Ok(handed) = from.recv() else { break };
                            handed.mul_(0.5)?;
                            own = own.add(&handed)?;
                        }
                        Ok(())
                    })
                })
                .collect();
            drop(to);
            // invariant: a panic of a thread fails the test
            workers.into_iter().try_for_each(|w| w.join().expect("a worker panicked"))
        })
    })
}

/// With full and fragmented memory, blocks are moved while streams, threads and copies to the host use them.
#[test]
fn blocks_that_move_are_waited_for() -> Result<()> {
    assert_no_races_with("max_memory_mb:24,large_segment_size_mb:2", |device| {
        let work = |seed: u64| -> Result<()> {
            let streams = [Stream::default_stream(device), Stream::new(device), Stream::new(device)];
            let (mut state, mut kept) = (seed, Vec::<Tensor>::new());
            for _ in 0..300 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let random = (state >> 33) as usize;
                let _on = streams[random % 3].enter();
                let mut round = || -> Result<()> {
                    if !kept.is_empty() {
                        let old = kept.swap_remove(random / 3 % kept.len());
                        old.mul_(0.5)?;
                        if random % 8 == 1 {
                            old.offload_()?;
                        }
                        if random.is_multiple_of(2) {
                            kept.push(old.exp()?);
                        } else if random % 8 == 1 {
                            kept.push(old);
                        }
                    }
                    while kept.iter().map(Tensor::numel).sum::<usize>() < 7 << 18 {
                        let size = (1 << 16) + random % 7 * (1 << 15);
                        kept.push(Tensor::ones([size], DType::F32, device)?);
                    }
                    Ok(())
                };
                match round() {
                    Err(full) if full.is_out_of_memory() => kept.truncate(kept.len() / 2),
                    done => done?,
                }
            }
            Ok(())
        };
        // How often blocks move depends on thread scheduling; sometimes no block does.
        for _ in 0..10 {
            std::thread::scope(|threads| {
                let workers: Vec<_> = (1..4).map(|seed| threads.spawn(move || work(seed))).collect();
                // invariant: a panic of a thread fails the test
                workers.into_iter().try_for_each(|w| w.join().expect("a worker panicked"))
            })?;
            if device.memory().num_compactions > 0 {
                return Ok(());
            }
        }
        panic!("nothing moved: {}", device.memory())
    })
}

/// Deferred chains wait on one queue while others read or write their inputs, and reuse freed memory.
#[test]
fn chains_that_wait_are_waited_for() -> Result<()> {
    assert_no_races(|device| {
        let shared = Tensor::ones([1 << 10], DType::F32, device)?;
        let work = |seed: usize| -> Result<()> {
            let streams = [Stream::default_stream(device), Stream::new(device), Stream::new(device)];
            let mut kept = vec![shared.add(1.0)?];
            for k in 0..300 {
                let random = ((k + 1) * (seed + 7) * 40_503) >> 4;
                let _on = streams[random % 3].enter();
                let next = kept[random % kept.len()].mul(&shared)?.add(&kept[0])?.tanh()?;
                if random.is_multiple_of(5) {
                    kept[random / 5 % kept.len()].mul_(0.5)?;
                }
                kept.push(next);
                if random.is_multiple_of(4) && kept.len() > 2 {
                    kept.swap_remove(random / 4 % kept.len());
                }
            }
            Ok(())
        };
        std::thread::scope(|threads| {
            let workers: Vec<_> = (0..3).map(|seed| threads.spawn(move || work(seed))).collect();
            // invariant: a panic of a thread fails the test
            workers.into_iter().try_for_each(|w| w.join().expect("a worker panicked"))
        })
    })
}

#[test]
fn a_training_step_with_offload_is_ordered() -> Result<()> {
    let options = GptOptions { vocabulary: 256, context: 64, layers: 5, heads: 4, width: 64, dropout: 0.1 };
    assert_no_races(|device| {
        let net = Gpt::new(&options, device)?;
        let mut optimizer = AdamW::new(net.parameters(), 1e-3);
        let choice = StepConfig::new(8, 2).with_offload([true; 5]).with_offloaded_state();
        optimizer.offload_state(choice.offload_state);
        let _segments = choice.apply_segments();
        for _ in 0..3 {
            for _ in 0..choice.micro_batch_count {
                let text = Tensor::zeros([8, 64], DType::I64, device)?;
                net.forward(&text)?.flatten(0, 1)?.cross_entropy(&text.flatten(0, 1)?)?.backward()?;
            }
            optimizer.step()?;
            optimizer.zero_grad();
        }
        Ok(())
    })
}

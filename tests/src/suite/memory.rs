//! The pool on a real device: contents compared with a model, returned memory, full devices at every point of a step.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::backend::{Backend, Slice};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::memory::source::SegmentSource;
use forebay::memory::{self, Block, Config, Pool, Tag, scope};
use forebay::stream::Stream;
use forebay::tensor::Tensor;

mod pool_model;

use self::pool_model::{DeviceContents, PoolOp, check_pool};
use super::faulty_backend::FaultyBackend;
use super::host_reference::ensure_same_bits;
use super::tests;

tests![
    the_pool_matches_its_model,
    a_thousand_steps_take_the_memory_of_ten,
    a_full_device_at_every_point_of_a_step,
    compaction_joins_fragmented_memory,
    empty_cache_releases_everything,
    memory_is_counted_by_tag,
    threads_share_a_device,
];

/// Perceptron with a hand-written training step.
struct Net {
    weights: Vec<Tensor>,
    x: Tensor,
    target: Tensor,
}

impl Net {
    fn new(width: usize, device: &Device) -> forebay::error::Result<Self> {
        device.manual_seed(8);
        let _tag = scope::enter_tag(Tag::Parameter);
        let weight = |rows, cols| Tensor::normal([rows, cols], 0.0, 0.1, DType::F32, device)?.to_leaf();
        let weights = vec![weight(20, width)?, weight(width, width)?, weight(width, 3)?];
        let _tag = scope::enter_tag(Tag::Input);
        let x = Tensor::randn([32, 20], DType::F32, device)?;
        let target = Tensor::randn([32, 3], DType::F32, device)?;
        Ok(Self { weights, x, target })
    }

    /// Computes gradients, and returns the loss.
    fn gradients(&self) -> forebay::error::Result<Tensor> {
        let _tag = scope::enter_tag(Tag::Activation);
        let mut y = self.x.clone();
        for weight in &self.weights {
            y = y.matmul(weight)?.tanh()?;
        }
        let loss = y.sub(&self.target)?.square()?.mean_all()?;
        loss.backward()?;
        Ok(loss.detach())
    }

    fn step(&self) -> forebay::error::Result<Tensor> {
        let loss = self.gradients()?;
        let _guard = forebay::autograd::no_grad();
        for weight in &self.weights {
            if let Some(grad) = weight.grad() {
                weight.sub_(&grad.mul(0.1)?)?;
            }
            weight.set_grad(None);
        }
        Ok(loss)
    }
}

impl DeviceContents for dyn Backend {
    fn write(&self, block: &Block, data: &[u8]) -> memory::Result<()> {
        self.upload(whole(block), data).map_err(|error| memory::Error::Move(Box::new(error)))
    }

    fn read(&self, block: &Block, data: &mut [u8]) -> memory::Result<()> {
        self.download(whole(block), data).map_err(|error| memory::Error::Move(Box::new(error)))
    }

    fn source(&self) -> &dyn SegmentSource {
        self
    }
}

/// Returns the memory of a block.
fn whole(block: &Block) -> Slice {
    Slice { segment: block.segment, offset: block.offset, bytes: block.size }
}

fn the_pool_matches_its_model(device: &Device) -> Result<()> {
    let pool = Pool::new(device.backend().clone(), Config::default());
    let ops = PoolOp::sequence(2026, 10_000, 64 << 10);
    let summary = check_pool(&pool, &**device.backend(), &ops).map_err(anyhow::Error::msg)?;
    ensure!(summary.served > 1000 && summary.refused == 0, "{summary:?}");
    Ok(())
}

fn a_thousand_steps_take_the_memory_of_ten(device: &Device) -> Result<()> {
    let net = Net::new(64, device)?;
    let figures = || {
        let stats = device.memory();
        (stats.allocated(), stats.reserved(), stats.peak_allocated())
    };
    device.pool().reset_peak_stats();
    let mut first = 0.0;
    for step in 1..=10 {
        let loss = net.step()?.item()?;
        if step == 1 {
            first = loss;
        }
    }
    let after_ten = figures();
    let mut last = first;
    for step in 11..=1000 {
        let loss = net.step()?;
        if step % 100 == 0 {
            last = loss.item()?;
        }
    }
    let after_thousand = figures();
    ensure!(
        after_ten == after_thousand,
        "allocated, reserved, peak: {after_ten:?}, later {after_thousand:?}"
    );
    ensure!(last < first * 0.9, "it learns: from {first} to {last}");
    Ok(())
}

fn a_full_device_at_every_point_of_a_step(device: &Device) -> Result<()> {
    let faulty = Arc::new(FaultyBackend::new(device.backend().clone()));
    let device = Device::with_config(faulty.clone(), Config::default());
    let net = Net::new(64, &device)?;
    net.gradients()?;
    let expected: Vec<Tensor> = net.weights.iter().filter_map(Tensor::grad).collect();
    let clear = || net.weights.iter().for_each(|w| w.set_grad(None));
    clear();
    device.pool().empty_cache()?;
    // From here on, the device is full. The pool's remaining memory is allocated, then released in small pieces.
    faulty.allow_calls(0);
    let mut fillers = Vec::new();
    for elements in [512, 128] {
        while let Ok(filler) = Tensor::zeros([elements], DType::F32, &device) {
            fillers.push(filler);
        }
    }
    let mut failures = 0;
    loop {
        let before = device.memory().allocated();
        match net.gradients() {
            Ok(_) => break,
            Err(error) => ensure!(error.is_out_of_memory(), "{error}"),
        }
        failures += 1;
        clear();
        let after = device.memory().allocated();
        ensure!(after == before, "after failure {failures}: {} bytes leak", after as i64 - before as i64);
        ensure!(!fillers.is_empty(), "the step fails although all memory was freed");
        fillers.truncate(fillers.len().saturating_sub(2));
    }
    ensure!(failures > 10, "{failures} failures are too few to be at every point");
    clear();
    net.gradients()?;
    for (weight, expected) in net.weights.iter().zip(&expected) {
        ensure_same_bits(&weight.grad().context("no gradient")?, expected)?;
    }
    Ok(())
}

/// Returns the device with plain segments and a memory limit.
fn limited(device: &Device, mib: u64) -> forebay::error::Result<Device> {
    let text = format!("expandable_segments:False,max_memory_mb:{mib}");
    Ok(Device::with_config(device.backend().clone(), Config::parse(&text)?))
}

fn compaction_joins_fragmented_memory(device: &Device) -> Result<()> {
    let device = limited(device, 40)?;
    let side = Stream::new(&device);
    let piece = |seed| {
        device.manual_seed(seed);
        Tensor::rand([1 << 20], DType::F32, &device)
    };
    let all = (0..8).map(piece).collect::<forebay::error::Result<Vec<_>>>()?;
    let bits = all.iter().map(Tensor::to_vec::<f32>).collect::<forebay::error::Result<Vec<_>>>()?;
    let weight = all[0].to_leaf()?;
    // Saved for the backward pass before it moves.
    let loss = weight.square()?;
    drop(loss);
    if device.backend().supports_pinned_host() {
        all[2].offload_()?;
        all[2].prefetch_()?;
    }
    let kept = all.into_iter().enumerate().filter(|(k, _)| k % 2 == 0).collect::<Vec<_>>();
    {
        let _on = side.enter();
        kept[3].1.neg()?.neg()?.copy_(&kept[3].1)?;
    }
    // 16 MiB are allocated and 24 MiB are free, with no free block as large as this request.
    let large = Tensor::full([5 << 20], 3.0, DType::F32, &device)?;
    let stats = device.memory();
    ensure!(stats.num_compactions > 0 && stats.compacted_bytes > 0, "nothing moved\n{stats}");
    ensure!(large.to_vec::<f32>()?.iter().all(|x| *x == 3.0));
    drop(large);
    for (k, t) in &kept {
        ensure!(t.to_vec::<f32>()? == bits[*k], "tensor {k} has changed");
    }
    weight.square()?.sum_all()?.backward()?;
    let grad = weight.grad().context("no gradient")?.to_vec::<f32>()?;
    ensure!(grad.iter().zip(&bits[0]).all(|(g, w)| *g == 2.0 * w), "the gradient is another one");
    Ok(())
}

fn empty_cache_releases_everything(device: &Device) -> Result<()> {
    device.pool().empty_cache()?;
    let before = device.memory().reserved();
    let sizes = [10, 1000, 100_000, 1_000_000, 5_000_000];
    let tensors: Vec<Tensor> = sizes
        .iter()
        .map(|&n| Tensor::zeros([n], DType::F32, device))
        .collect::<forebay::error::Result<_>>()?;
    let held = device.memory().reserved();
    ensure!(held >= before + 20_000_000, "{held} bytes reserved");
    drop(tensors);
    ensure!(device.memory().reserved() == held, "the pool keeps memory for the next step");
    device.pool().empty_cache()?;
    let after = device.memory().reserved();
    ensure!(after == before, "{before} bytes reserved before, {after} after");
    Ok(())
}

fn memory_is_counted_by_tag(device: &Device) -> Result<()> {
    let held = |tag| device.memory().tag(tag).current;
    let (parameters, gradients, inputs) = (held(Tag::Parameter), held(Tag::Gradient), held(Tag::Input));
    let net = Net::new(128, device)?;
    ensure!(held(Tag::Parameter) - parameters == 4 * (20 * 128 + 128 * 128 + 128 * 3));
    ensure!(held(Tag::Input) - inputs >= 4 * 32 * 23);
    net.gradients()?;
    ensure!(
        held(Tag::Gradient) - gradients == 4 * (20 * 128 + 128 * 128 + 128 * 3),
        "gradients of all parameters"
    );
    Ok(())
}

fn threads_share_a_device(device: &Device) -> Result<()> {
    let work = |seed: i64| -> Result<()> {
        for i in 0..50 {
            let x = Tensor::full([257 + seed as usize], seed as f64, DType::F32, device)?;
            let y = x.mul(&x)?.add(i)?.to_vec::<f32>()?;
            ensure!(y.iter().all(|&v| v == (seed * seed + i) as f32), "thread {seed}, round {i}");
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=4).map(|seed| scope.spawn(move || work(seed))).collect();
        threads.into_iter().try_for_each(|t| t.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })
}

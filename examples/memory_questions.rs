//! The questions that people ask about GPU memory, answered by numbers of the device at hand. docs/book.md has the answers
//! in words.
//!
//! `cargo run --release --example memory_questions -- --device wgpu` asks all of them; name one to ask it alone.

use std::sync::Arc;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use forebay::memory::{Bytes, Config, Pool, Request, Tag};
use forebay::nn::{Gpt, GptOptions};
use forebay::plan::Choice;
use forebay::prelude::*;

const MIB: u64 = 1 << 20;

/// Answers questions about GPU memory by measuring.
#[derive(Parser)]
struct Options {
    /// All of them, if none is named.
    question: Vec<Question>,
    /// The device: cuda:0, wgpu:0, ...; the best one if not given.
    #[arg(long, env = "FOREBAY_DEVICE")]
    device: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Question {
    /// Does it preallocate?
    Preallocate,
    /// How do I give it less, or all there is?
    Limit,
    /// Why out of memory, with so much free?
    Fragmentation,
    /// Does emptying the cache help?
    EmptyCache,
    /// What holds my memory?
    Holders,
    /// Does my memory grow?
    Growth,
    /// What do accumulation, checkpointing and mixed precision save?
    Savings,
}

impl Question {
    fn ask(self, device: &Device) -> Result<()> {
        match self {
            Self::Preallocate => preallocate(device),
            Self::Limit => limit(device),
            Self::Fragmentation => fragmentation(device),
            Self::EmptyCache => empty_cache(device),
            Self::Holders => holders(device),
            Self::Growth => growth(device),
            Self::Savings => savings(device),
        }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let device = match &options.device {
        Some(id) => Device::open(id)?,
        None => Device::best()?,
    };
    println!("{}", device.info());
    for question in Question::value_variants() {
        if options.question.is_empty() || options.question.contains(question) {
            let name = question.to_possible_value().and_then(|v| v.get_help().map(ToString::to_string));
            println!("\n== {}", name.unwrap_or_default());
            // Each answer over a pool of its own: what one holds does not count in another.
            question.ask(&fresh(&device, Config::default()))?;
        }
    }
    Ok(())
}

/// The same device with an empty pool.
fn fresh(device: &Device, config: Config) -> Device {
    Device::with_config(Arc::clone(device.backend()), config)
}

fn zeros(mib: u64, device: &Device) -> Result<Tensor, Error> {
    Tensor::zeros(&[(mib * MIB / 4) as usize], DType::F32, device)
}

fn show(what: &str, pool: &Pool) {
    let stats = pool.stats();
    let [held, taken] = [stats.allocated(), stats.reserved()].map(|bytes| Bytes(bytes).to_string());
    println!("{what:<44} {held:>10} held {taken:>10} taken from the device");
}

fn preallocate(device: &Device) -> Result<()> {
    show("opened", device.pool());
    let _small = Tensor::zeros(&[10], DType::F32, device)?;
    show("a tensor of 40 bytes", device.pool());
    let _large = zeros(100, device)?;
    show("and one of 100 MiB", device.pool());
    device.pool().preallocate(256 * MIB)?;
    show("after preallocate(256 MiB)", device.pool());
    Ok(())
}

fn limit(device: &Device) -> Result<()> {
    let memory = device.backend().device_memory();
    let told =
        |bytes: Option<u64>| bytes.map_or("not told by the driver".to_owned(), |b| Bytes(b).to_string());
    println!("the device has {}, free {}", told(memory.total), told(memory.free));
    println!(
        "limit: {}",
        device.pool().limit().map_or("none: all there is".to_owned(), |b| Bytes(b).to_string())
    );
    device.pool().set_limit(Some(128 * MIB));
    let _held = zeros(100, device)?;
    match zeros(100, device) {
        Ok(_) => println!("a limit of 128 MiB was not kept"),
        Err(error) => println!("with a limit of 128 MiB, 100 MiB and 100 MiB more:\n{error}"),
    }
    device.pool().set_limit(None);
    let _more = zeros(100, device)?;
    show("without the limit, the same request", device.pool());
    Ok(())
}

/// Blocks of 4 MiB, every second one freed; then one of 32 MiB.
fn fragmentation(device: &Device) -> Result<()> {
    for (name, config) in [("this pool", Config::default()), ("PyTorch's rules", Config::pytorch())] {
        let device = fresh(device, Config { max_memory: Some(96 * MIB), ..config });
        let blocks =
            (0..20).map(|_| device.pool().alloc(Request::new(4 * MIB))).collect::<Result<Vec<_>, _>>()?;
        blocks.iter().step_by(2).for_each(|block| device.pool().free(*block));
        show(&format!("{name}: 20 of 4 MiB, every second freed"), device.pool());
        println!("  fragmentation {:.0} %", 100.0 * device.memory().fragmentation());
        match device.pool().alloc(Request::new(32 * MIB)) {
            Ok(block) => {
                show("  one of 32 MiB", device.pool());
                device.pool().free(block);
            }
            Err(error) => println!("  one of 32 MiB: {error}"),
        }
        blocks.iter().skip(1).step_by(2).for_each(|block| device.pool().free(*block));
    }
    Ok(())
}

fn empty_cache(device: &Device) -> Result<()> {
    let churn = |empty: bool| -> Result<Pool> {
        let device = fresh(device, Config::default());
        for step in 0..20u64 {
            let a = zeros(8 + step % 5, &device)?;
            let b = zeros(40 - 2 * (step % 7), &device)?;
            drop((a, b));
            if empty {
                device.pool().empty_cache()?;
            }
        }
        Ok(device.pool().clone())
    };
    for (name, empty) in [("20 steps", false), ("20 steps, the cache emptied after each", true)] {
        let stats = churn(empty)?.stats();
        let calls = stats.num_device_alloc + stats.num_device_free;
        println!(
            "{name:<44} peak {:>10} taken, {calls} calls of the driver",
            Bytes(stats.peak_reserved()).to_string()
        );
    }
    Ok(())
}

const SIZES: GptOptions =
    GptOptions { vocabulary: 256, context: 128, layers: 4, heads: 4, width: 64, dropout: 0.0 };

/// One training step by a choice.
fn step(net: &Gpt, optimizer: &mut AdamW, choice: &Choice, device: &Device) -> Result<(), Error> {
    let _segments = choice.segments();
    for _ in 0..choice.count {
        let text = Tensor::randint(0, 256, &[choice.rows, SIZES.context], DType::I64, device)?;
        let autocast = choice.autocast()?;
        let loss = net.forward(&text)?.flatten(0, 1)?.cross_entropy(&text.flatten(0, 1)?)?;
        drop(autocast);
        loss.div(choice.count as f64)?.backward()?;
    }
    optimizer.step()?;
    optimizer.zero_grad();
    Ok(())
}

fn holders(device: &Device) -> Result<()> {
    let net = Gpt::new(&SIZES, device)?;
    let mut optimizer = AdamW::new(net.parameters(), 1e-3);
    step(&net, &mut optimizer, &Choice::new(8, 1), device)?;
    let stats = device.memory();
    for tag in Tag::ALL {
        let stat = stats.tag(tag);
        if stat.peak > 0 {
            let [now, peak] = [stat.current, stat.peak].map(|bytes| Bytes(bytes).to_string());
            println!("{:<44} {now:>10} held {peak:>10} at most", tag.name());
        }
    }
    println!("of now, the largest:");
    for (who, held) in device.pool().snapshot().held().into_iter().take(5) {
        println!("  {:<42} {:>10} in {} blocks", who.to_string(), Bytes(held.bytes).to_string(), held.blocks);
    }
    Ok(())
}

fn growth(device: &Device) -> Result<()> {
    let net = Gpt::new(&SIZES, device)?;
    let mut optimizer = AdamW::new(net.parameters(), 1e-3);
    let choice = Choice::new(2, 1);
    step(&net, &mut optimizer, &choice, device)?;
    device.pool().assert_no_growth(3, || step(&net, &mut optimizer, &choice, device))?;
    show("three steps more leave nothing behind", device.pool());
    let mut kept = Vec::new();
    let leak = device.pool().assert_no_growth(2, || {
        kept.push(zeros(1, device)?);
        Ok(())
    });
    match leak {
        Ok(()) => println!("a list that grows was not seen"),
        Err(error) => println!("a list that grows: {error}"),
    }
    Ok(())
}

fn savings(device: &Device) -> Result<()> {
    let all = [true; SIZES.layers];
    let whole = Choice::new(8, 1);
    println!("a training step of a small GPT, 8 passages of 128:");
    for (name, choice) in [
        ("whole batch, f32", whole.clone()),
        ("accumulation: 4 x 2 passages", Choice::new(2, 4)),
        ("checkpointing: every block", whole.clone().recompute(all)),
        ("mixed precision: bf16", whole.clone().with_precision(DType::BF16)),
        ("all three", Choice::new(2, 4).recompute(all).with_precision(DType::BF16)),
    ] {
        let device = fresh(device, Config::default());
        let net = Gpt::new(&SIZES, &device)?;
        let mut optimizer = AdamW::new(net.parameters(), 1e-3);
        step(&net, &mut optimizer, &choice, &device)?;
        device.pool().reset_peak_stats();
        step(&net, &mut optimizer, &choice, &device)?;
        let stats = device.memory();
        let [peak, activations] = [stats.peak_allocated(), stats.tag(Tag::Activation).peak];
        println!(
            "  {name:<32} peak {:>10}, activations {:>10}",
            Bytes(peak).to_string(),
            Bytes(activations).to_string()
        );
    }
    Ok(())
}

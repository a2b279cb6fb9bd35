//! Host's time of eager training steps: shapes, gradients, memory and launches, on a device that computes nothing.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Result, ensure};
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::profile::Profiler;
use serde_json::json;

use crate::models::{self, TrainStep};
use crate::timing::Bench;

/// Number of samples; the fastest counts, because other programs only add time.
const SAMPLES: usize = 5;
/// Steps before the samples, somewhat more than `run models` runs. Kernels are looked up, and the pool comes to rest.
const MODELS_STEPS: usize = 30;
/// Smallest result of a fused chain, as on devices with kernels. The null device does not fuse by default.
const FUSION_MIN_BYTES: u64 = 256 << 10;

/// Prints one line for each model, and with `lists_launches` a table of its launches, those of a captured step if
/// `captures` is true.
pub(crate) fn bench_host(
    card: &str,
    steps: usize,
    lists_launches: bool,
    captures: bool,
    names: &[String],
) -> Result<()> {
    ensure!(
        names.iter().all(|name| models::names().any(|known| known == name)),
        "expected models of: {}",
        models::names().collect::<Vec<_>>().join(", ")
    );
    for name in models::names().filter(|name| names.is_empty() || names.iter().any(|n| n == name)) {
        // A pool of its own, as each program has.
        let device = Device::null(CardProfile::from_card(card)?);
        device.set_fusion_min_bytes(Some(FUSION_MIN_BYTES));
        let mut step = models::build_step(name, false, &device)?;
        let mut driver_calls = Vec::with_capacity(MODELS_STEPS);
        let mut waits = Vec::with_capacity(MODELS_STEPS);
        for _ in 0..MODELS_STEPS {
            let before = count_driver_calls(&device);
            step()?;
            let after = count_driver_calls(&device);
            driver_calls.push(after.0 - before.0);
            waits.push(after.1 - before.1);
        }
        let memory = device.memory();
        let us = time_step(&mut step, &device, steps)?;
        let mut captured = captures.then(|| device.capture(&mut step)).transpose()?;
        let requests = device.memory().allocation.all.allocated;
        let profiler = Profiler::start(&device)?;
        match &mut captured {
            Some(captured) => drop(captured.replay()?),
            None => drop(step()?),
        }
        let profile = profiler.finish()?;
        let requests = device.memory().allocation.all.allocated - requests;
        let launches = profile.spans.len();
        Bench::new(&device, false, None).emit_line(
            "host",
            name,
            "bf16",
            json!({
                "card": card, "us_per_step": us, "launches": launches, "ns_per_launch": 1e3 * us / launches as f64,
                "requests": requests, "driver_calls": driver_calls, "waits": waits,
                "peak_mb": memory.peak_allocated() >> 20, "peak_reserved_mb": memory.peak_reserved() >> 20,
            }),
        );
        if lists_launches {
            // Launches, bytes and floating-point operations.
            let mut rows: BTreeMap<(&str, &str), (usize, u64, u64)> = BTreeMap::new();
            for span in &profile.spans {
                let (launches, bytes, flops) = rows.entry((span.op, &span.name)).or_default();
                *launches += 1;
                *bytes += span.bytes;
                *flops += span.flops;
            }
            let mut rows: Vec<_> = rows.into_iter().collect();
            rows.sort_by_key(|&(_, (launches, bytes, _))| std::cmp::Reverse((bytes, launches)));
            println!("launches        MB   GFLOP  operation                         kernel");
            for ((op, kernel), (launches, bytes, flops)) in rows {
                let (mb, gflop) = (bytes as f64 / 1e6, flops as f64 / 1e9);
                println!("{launches:8} {mb:9.2} {gflop:7.1}  {op:32}  {kernel}");
            }
        }
    }
    Ok(())
}

/// Returns the number of the driver's calls that map, allocate or free memory, and how often the pool moved or
/// returned memory before it grew. On a GPU each of the latter waits for the device, unless the memory was never used.
pub(crate) fn count_driver_calls(device: &Device) -> (u64, u64) {
    let stats = device.memory();
    (stats.num_device_alloc + stats.num_device_free, stats.reclaim_stats.reclaim.tried)
}

/// Returns the microseconds of a step in the fastest sample.
fn time_step(step: &mut TrainStep, device: &Device, steps: usize) -> Result<f64> {
    let per_sample = steps.div_ceil(SAMPLES);
    let mut least = f64::INFINITY;
    for _ in 0..SAMPLES {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..per_sample {
            step()?;
        }
        least = least.min(start.elapsed().as_secs_f64() * 1e6 / per_sample as f64);
    }
    Ok(least)
}

//! Profiles: kernels with their operations, and plausible times.

use std::time::Instant;

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::nn::{Linear, Module};
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::tests;

tests![the_profile_names_operations_and_kernels, times_lie_within_those_of_the_host, one_profiler_at_a_time];

fn the_profile_names_operations_and_kernels(device: &Device) -> Result<()> {
    let layers = vec![Linear::new(24, 40, device)?, Linear::new(40, 8, device)?];
    layers.parameters();
    let x = Tensor::rand([12, 24], DType::F32, device)?;
    let profiler = Profiler::start(device)?;
    let y = layers[1].forward(&layers[0].forward(&x)?.tanh()?)?;
    y.to_bytes()?;
    let profile = profiler.finish()?;
    y.exp()?;
    let ops: Vec<&str> = profile.spans.iter().map(|span| span.op).collect();
    ensure!(ops.iter().filter(|op| **op == "linear").count() >= 2 && ops.contains(&"tanh"), "{ops:?}");
    ensure!(!ops.contains(&"exp"), "recorded after the end: {ops:?}");
    ensure!(profile.spans.iter().any(|span| span.op == "linear" && span.module == "1"), "no module");
    ensure!(
        profile.spans.iter().any(|span| &*span.name == "download" && span.bytes == 4 * 12 * 8),
        "no download"
    );
    ensure!(
        profile.kernel_totals().iter().map(|row| row.calls).sum::<u64>() == profile.spans.len() as u64,
        "rows"
    );
    let trace: serde_json::Value = serde_json::from_str(&profile.chrome_trace())?;
    ensure!(trace["traceEvents"].as_array().map(Vec::len) == Some(2 * profile.spans.len()), "the timeline");
    Ok(())
}

fn times_lie_within_those_of_the_host(device: &Device) -> Result<()> {
    let x = Tensor::rand([256, 512], DType::F32, device)?;
    x.exp()?;
    let start = Instant::now();
    let profiler = Profiler::start(device)?;
    for _ in 0..5 {
        x.exp()?;
    }
    let profile = profiler.finish()?;
    let host = start.elapsed().as_nanos() as f64;
    ensure!(profile.spans.len() == 5, "{} spans of 5", profile.spans.len());
    if device.is_null() || profile.spans.iter().all(|span| span.duration == 0.0) {
        // A device without timestamps reports zeros throughout.
        ensure!(profile.elapsed() == 0.0, "zeros and times mixed");
        return Ok(());
    }
    ensure!(
        profile.busy_time() > 0.0 && profile.busy_time() <= host,
        "busy {} of the host's {host}",
        profile.busy_time()
    );
    ensure!(profile.elapsed() <= host, "{} of the host's {host}", profile.elapsed());
    let in_order =
        profile.spans.windows(2).all(|pair| pair[0].start + pair[0].duration <= pair[1].start + 1.0);
    ensure!(in_order, "spans of one queue overlap: {:?}", profile.spans);
    Ok(())
}

fn one_profiler_at_a_time(device: &Device) -> Result<()> {
    let first = Profiler::start(device)?;
    let refused = Profiler::start(device).err().map(|error| error.message());
    ensure!(refused.as_deref().is_some_and(|text| text.contains("recorded by another")), "{refused:?}");
    drop(first);
    Profiler::start(device)?.finish()?;
    Ok(())
}

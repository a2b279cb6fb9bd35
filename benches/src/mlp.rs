//! A training step of a small network, dominated by launch overhead.

use std::time::Instant;

use anyhow::Result;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{Linear, Module};
use forebay::optim::{Adam, Optimizer};
use forebay::tensor::Tensor;
use serde_json::json;

use crate::timing::{Bench, median};

pub(crate) fn mlp(b: &Bench<'_>) -> Result<()> {
    let (batch, hidden) = if b.tiny { (16, 32) } else { (256, 1024) };
    let (per, chunks) = if b.tiny { (2, 3) } else { (50, 12) };
    let device = b.device;
    device.manual_seed(1);
    let before = device.memory().allocated();
    device.pool().reset_peak_stats();
    let layers = [
        Linear::new(784, hidden, device)?,
        Linear::new(hidden, hidden, device)?,
        Linear::new(hidden, 10, device)?,
    ];
    let mut optimizer = Adam::new(layers.parameters(), 1e-3);
    let x = Tensor::rand([batch, 784], DType::F32, device)?;
    let classes: Vec<i32> = (0..batch).map(|i| i * 7 % 10).collect();
    let y = Tensor::from_slice(&classes, [batch], device)?;
    let mut step = || -> CoreResult<Tensor> {
        let h = layers[0].forward(&x)?.relu()?;
        let h = layers[1].forward(&h)?.relu()?;
        let loss = layers[2].forward(&h)?.cross_entropy(&y)?;
        loss.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
        Ok(loss.detach())
    };
    let start = Instant::now();
    let first_loss = step()?.item()?;
    let first_ms = start.elapsed().as_secs_f64() * 1e3;
    b.write_profile(device, "mlp_train", &mut step)?;
    let mut captured = None;
    for (bench, each, capture) in [
        ("mlp_train", false, false),
        ("mlp_train_loss_read", true, false),
        ("mlp_train_captured", false, true),
    ] {
        if capture {
            captured = Some(device.capture(&mut step)?);
            device.pool().reset_peak_stats();
        }
        let mut once = || match &mut captured {
            Some(captured) => captured.replay(),
            None => step(),
        };
        let mut ms = Vec::new();
        let mut last = 0.0;
        for k in 0..chunks + 2 {
            device.synchronize()?;
            let start = Instant::now();
            let mut loss = once()?;
            for _ in 1..per {
                if each {
                    loss.item()?;
                }
                loss = once()?;
            }
            last = loss.item()?;
            device.synchronize()?;
            if k >= 2 {
                ms.push(start.elapsed().as_secs_f64() * 1e3 / f64::from(per));
            }
        }
        let m = median(ms);
        let stats = device.memory();
        b.emit_line(
            bench,
            &format!("{batch}x784-{hidden}-{hidden}-10"),
            "f32",
            json!({
                "median_ms": m, "steps_s": 1e3 / m, "first_ms": first_ms, "first_loss": first_loss, "last_loss": last,
                "peak_mem_mb": (stats.peak_allocated() - before) as f64 / f64::from(1 << 20),
                "graph": captured.as_ref().map(|c| c.is_driver_graph()),
            }),
        );
    }
    Ok(())
}

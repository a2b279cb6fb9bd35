//! Training loop by hand, without the `Trainer`: mixed precision, accumulation of gradients, clipping by their global
//! norm, and a cosine schedule. A killed run resumes from its checkpoint with bitwise equal results.
//!
//! `cargo run --release --example by_hand [STEPS]`; `FOREBAY_DEVICE` chooses a device. Stop it and start it again: it
//! resumes.

use std::path::Path;

use forebay::prelude::*;
use forebay::train::accuracy;

const CHECKPOINT: &str = "by_hand.safetensors";
const MICRO_BATCHES: usize = 4;

#[derive(Module)]
struct Net {
    fc1: Linear,
    fc2: Linear,
}

impl Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.fc2.forward(&self.fc1.forward(x)?.relu()?)
    }
}

fn main() -> anyhow::Result<()> {
    let steps = std::env::args().nth(1).map_or(Ok(500), |steps| steps.parse())?;
    let device = Device::best()?;
    device.manual_seed(42);
    let net = Net { fc1: Linear::new(784, 128, &device)?, fc2: Linear::new(128, 10, &device)? };
    let mut opt = AdamW::new(net.parameters(), 1e-3);
    let mut scaler = GradScaler::new();
    let schedule = WarmupCosine::new(1e-3, 50, steps);
    let mut at = Checkpoint::default();
    if Path::new(CHECKPOINT).exists() {
        at = Checkpoint::resume_with_scaler(CHECKPOINT, &net, &mut opt, Some(&mut scaler))?;
    }
    let mut batches =
        FashionMnist::train()?.shuffle(42).batches(64).forever().start_at(at.cursor).prefetch(&device);
    for step in at.step..steps {
        opt.set_lr(schedule.lr(step));
        let mut total = Tensor::new(0.0, &device)?;
        for batch in batches.by_ref().take(MICRO_BATCHES) {
            let (x, y) = batch?;
            let loss = {
                let _autocast = autocast(DType::F16)?; // Casts the inputs of matrix products until it is dropped.
                net.forward(&x)?.cross_entropy(&y)?.div(MICRO_BATCHES as f64)?
            };
            scaler.scale(&loss)?.backward()?; // Adds to each parameter's gradient.
            total = total.add(&loss.detach())?;
        }
        scaler.unscale_(&opt)?;
        clip_grad_norm_(opt.parameters(), 1.0)?;
        scaler.step(&mut opt)?; // Skips the step if a gradient is not finite.
        scaler.update()?;
        opt.zero_grad();
        if (step + 1) % 50 == 0 {
            println!("step {}: loss {:.4}", step + 1, total.item()?);
            let reached = Checkpoint::new(step + 1, batches.cursor());
            reached.save_with_scaler(CHECKPOINT, &net, &opt, Some(&scaler))?;
        }
    }
    let _no_grad = no_grad();
    let (x, y) = FashionMnist::test()?.batches(1000).prefetch(&device).next().expect("it has 10,000")?;
    println!("accuracy on 1000 test images: {:.1} %", 100.0 * accuracy(&net.forward(&x)?, &y)?.item()?);
    Ok(())
}

//! Loss curves of GPT-2 124M on a real text, for comparison with PyTorch's from equal weights and data:
//! `peers/gpt2_curve.py`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::data::Text;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::io::safetensors;
use forebay::nn::{Gpt, GptOptions, Module};
use forebay::optim::{AdamW, Optimizer, clip_grad_norm_};
use forebay::tensor::Tensor;
use serde_json::json;

/// Number of warm-up steps; afterwards the learning rate is constant.
const WARMUP_STEPS: usize = 50;
const LEARNING_RATE: f64 = 3e-4;
const BATCH: usize = 8;

/// Trains `steps` steps in bf16, eagerly and captured, and writes the losses of each run into `folder`. If missing,
/// the initial weights that all runs share are written as well.
pub(crate) fn write_loss_curves(device: &Device, folder: &Path, steps: usize, tiny: bool) -> Result<()> {
    let sizes = match tiny {
        true => GptOptions { vocabulary: 256, context: 32, layers: 2, heads: 2, width: 32, dropout: 0.0 },
        false => GptOptions { vocabulary: 50_304, ..GptOptions::preset("gpt2-124m")? },
    };
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let weights = folder.join("weights.safetensors");
    if !weights.exists() {
        device.manual_seed(1);
        safetensors::save(&weights, &Gpt::new(&sizes, device)?.gpt2_state_dict()?, &BTreeMap::new())?;
    }
    let text = Text::shakespeare_file()?;
    let text = std::fs::read(&text).with_context(|| format!("reading {}", text.display()))?;
    ensure!(steps > 2 && text.len() > sizes.context + 1, "at least 3 steps, and a text");
    for captured in [false, true] {
        // Its own pool, so that runs do not share memory.
        let device = &Device::with_config(device.backend().clone(), device.pool().config());
        let losses = train_losses(device, &sizes, &weights, &text, (steps, captured))?;
        let way = if captured { "captured" } else { "eager" };
        let path = folder.join(format!("forebay-{}-{way}.json", device.info().backend));
        forebay::io::write_bytes(&path, json!(losses).to_string())?;
        println!("{}: {:.4} at first, {:.4} at the end", path.display(), losses[0], losses[steps - 1]);
    }
    Ok(())
}

/// Tokens are the bytes of the text. Each row of a batch continues the same row of the previous batch.
fn batch(text: &[u8], context: usize, step: usize) -> [Vec<i32>; 2] {
    let shifted = |by: usize| {
        let rows = (0..BATCH).flat_map(|row| {
            let start = (step * BATCH + row) * context % (text.len() - context - 1) + by;
            &text[start..start + context]
        });
        rows.map(|&byte| i32::from(byte)).collect()
    };
    [shifted(0), shifted(1)]
}

fn train_losses(
    device: &Device,
    sizes: &GptOptions,
    weights: &Path,
    text: &[u8],
    (steps, captured): (usize, bool),
) -> Result<Vec<f64>> {
    let net = Gpt::new(sizes, device)?;
    net.load_gpt2(&safetensors::load(weights, device)?)?;
    let mut optimizer = AdamW::new(net.parameters(), LEARNING_RATE)
        .betas((0.9, 0.95))
        .weight_decay(0.1)
        .low_precision_copies(true);
    let batches = (0..steps).map(|step| {
        let [x, y] = batch(text, sizes.context, step);
        let shape = [BATCH, sizes.context];
        Ok([Tensor::from_slice(&x, shape, device)?, Tensor::from_slice(&y, shape, device)?])
    });
    let batches = batches.collect::<Result<Vec<_>>>()?;
    let rate = |step: usize| LEARNING_RATE * ((step + 1) as f64 / WARMUP_STEPS as f64).min(1.0);
    let mut made = 0;
    let mut train = |x: &Tensor, y: &Tensor| {
        let loss = {
            let _autocast = autocast(DType::BF16)?;
            net.loss(x, y)?
        };
        loss.backward()?;
        clip_grad_norm_(optimizer.parameters(), 1.0)?;
        optimizer.set_lr(rate(made));
        made += 1;
        optimizer.step()?;
        optimizer.zero_grad();
        Ok(loss.detach())
    };
    let mut losses = Vec::new();
    if captured {
        let (first, rest) = batches.split_at(1);
        losses.push(train(&first[0][0], &first[0][1])?);
        let mut step = device.record_with(&[&rest[0][0], &rest[0][1]], |t| train(&t[0], &t[1]))?;
        losses.push(step.outputs().copy()?);
        for (k, [x, y]) in rest.iter().enumerate().skip(1) {
            optimizer.set_lr(rate(k + 1));
            losses.push(step.run(&[x, y])?.copy()?);
        }
    } else {
        for [x, y] in &batches {
            losses.push(train(x, y)?);
        }
    }
    losses.iter().map(|loss| Ok(loss.item()?)).collect()
}

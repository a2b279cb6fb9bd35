//! Random residual blocks of norms, modulations and products: eager steps, steps that run node by node, and replays.
//!
//! Norms, sums, scales, shifts and casts are fused in many combinations. Each program draws its operations from a seed,
//! with other uses of every intermediate result and with writes in place.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{GradOptions, checkpoint, grad_allow_unused, no_grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::ops::NormOptions;
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_same_bits};
use super::tests;

tests![random_blocks_have_one_gradient_in_all_forms];

const PROGRAMS: u64 = 24;
const BATCH: usize = 2;
const LENGTH: usize = 17;

/// Leaves of all blocks.
#[derive(Clone)]
struct Leaves {
    x: Tensor,
    /// Six lines of scales and shifts for each entry of the batch.
    condition: Tensor,
    weights: [Tensor; 2],
    norm_weight: Tensor,
    position: Tensor,
    width: usize,
}

impl Leaves {
    fn new(width: usize, device: &Device) -> Result<Self> {
        let leaf = |shape: &[usize], scale: f64| {
            Tensor::randn(shape, DType::F32, device)?.mul(scale)?.detach().to_leaf()
        };
        Ok(Self {
            x: leaf(&[BATCH, LENGTH, width], 1.0)?,
            condition: leaf(&[BATCH, 1, 6 * width], 0.5)?,
            weights: [leaf(&[width, width], 0.4)?, leaf(&[width, width], 0.4)?],
            norm_weight: leaf(&[width], 1.0)?,
            position: leaf(&[LENGTH, width], 0.5)?,
            width,
        })
    }

    fn all(&self) -> [&Tensor; 6] {
        let [first, second] = &self.weights;
        [&self.x, &self.condition, first, second, &self.norm_weight, &self.position]
    }

    fn clear_grads(&self) {
        self.all().iter().for_each(|t| t.set_grad(None));
    }

    /// Returns copies of the gradients, with zeros where there is none.
    fn copy_grads(&self) -> CoreResult<Vec<Tensor>> {
        self.all().iter().map(|t| t.grad().map_or_else(|| t.zeros_like(), |grad| grad.copy())).collect()
    }

    /// Returns one line of the condition, in 16 bits or in f32.
    fn line(&self, rng: &mut SplitMix64) -> CoreResult<Tensor> {
        let line = self.condition.narrow(2, rng.below(6) * self.width, self.width)?;
        if rng.below(2) == 0 { line.to_dtype(DType::BF16) } else { Ok(line) }
    }

    fn normalize(&self, h: &Tensor, rng: &mut SplitMix64) -> CoreResult<Tensor> {
        let shape = [self.width];
        match rng.below(5) {
            0 => h.rms_norm(shape, Some(&self.norm_weight), None),
            1 => h.rms_norm(shape, None, None),
            2 => h.layer_norm(shape, &NormOptions { weight: Some(&self.norm_weight), ..Default::default() }),
            _ => h.layer_norm(shape, &NormOptions::default()),
        }
    }

    fn modulate(&self, normed: &Tensor, rng: &mut SplitMix64) -> CoreResult<Tensor> {
        let (scale, shift) = (self.line(rng)?, self.line(rng)?);
        let scale = match rng.below(4) {
            0 => scale.add(1.0)?,
            1 => scale.narrow(0, 0, 1)?,
            _ => scale,
        };
        let product = normed.mul(&scale)?;
        match rng.below(8) {
            0 => {
                product.add_(&shift)?;
                Ok(product)
            }
            1 => shift.add(&product),
            2 => product.add(&shift)?.add(&product),
            3 => product.add(&shift)?.add(normed),
            4 => {
                product.mul_(0.5)?;
                product.add(&shift)
            }
            _ => product.add(&shift),
        }
    }

    fn run_block(&self, h: &Tensor, rng: &mut SplitMix64) -> CoreResult<Tensor> {
        let mut normed = self.normalize(h, rng)?;
        if rng.below(3) == 0 {
            normed = normed.add(&self.position)?;
        }
        if rng.below(3) > 0 {
            normed = self.modulate(&normed, rng)?;
        }
        let [first, second] = &self.weights;
        let y = match rng.below(5) {
            0 => normed.linear(first, None)?.gelu()?.linear(second, None)?,
            1 => normed.silu()?,
            2 => normed.to_dtype(DType::BF16)?.mul(0.7)?,
            _ => normed.linear(first, None)?,
        };
        let y = if rng.below(3) == 0 { y.mul(&normed.linear(second, None)?.sigmoid()?)? } else { y };
        let y = if rng.below(4) == 0 { y.mul(&self.line(rng)?)? } else { y };
        match rng.below(6) {
            0 => {
                let h = h.mul(1.0)?;
                h.add_(&y)?;
                Ok(h)
            }
            1 => y.add(h),
            2 => y.to_dtype(DType::F32),
            3 => h.add(&y)?.add(h),
            _ => h.add(&y),
        }
    }

    /// Returns the loss of the program of a seed. Every second block is a checkpoint, if `checkpoints` is true.
    fn compute_loss(&self, seed: u64, checkpoints: bool) -> CoreResult<Tensor> {
        let mut rng = SplitMix64(seed);
        let scope = match rng.below(3) {
            0 => None,
            1 => Some(autocast(DType::BF16)?),
            _ => Some(autocast(DType::F16)?),
        };
        let mut h = if rng.below(3) == 0 { self.x.clone() } else { self.x.mul(1.5)? };
        for k in 0..1 + rng.below(3) as u64 {
            let block_seed = seed.wrapping_mul(31) + k;
            h = if checkpoints && block_seed.is_multiple_of(2) {
                let leaves = self.clone();
                checkpoint(&[&h], move |t| leaves.run_block(&t[0], &mut SplitMix64(block_seed)))?
            } else {
                self.run_block(&h, &mut SplitMix64(block_seed))?
            };
        }
        drop(scope);
        h.to_dtype(DType::F32)?.square()?.mean((), false)
    }

    /// Runs a step, and returns the loss.
    fn step(&self, seed: u64) -> CoreResult<Tensor> {
        self.clear_grads();
        let loss = self.compute_loss(seed, true)?;
        loss.backward()?;
        Ok(loss.detach())
    }
}

/// Compares gradients that are rounded at other places, relative to the largest element.
fn ensure_similar(got: &Tensor, expected: &Tensor) -> Result<()> {
    let scale = expected.abs()?.amax((), false)?.item()?.max(1e-6);
    let difference = got.sub(expected)?.abs()?.amax((), false)?.item()?;
    ensure!(difference <= 0.03 * scale, "{difference} of {scale}");
    Ok(())
}

fn compare_forms(seed: u64, leaves: &Leaves, device: &Device) -> Result<()> {
    let loss = leaves.step(seed)?;
    let expected = leaves.copy_grads()?;
    // A pass for chosen tensors runs the operations one by one.
    let plain = leaves.compute_loss(seed, false)?;
    ensure_same_bits(&plain.detach(), &loss).context("without checkpoints")?;
    let found = grad_allow_unused(&[&plain], &leaves.all(), &GradOptions::default())?;
    for (k, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let Some(found) = found else { continue };
        ensure_similar(found, expected).with_context(|| format!("gradient {k} of chosen tensors"))?;
    }
    let mut captured = device.capture(|| leaves.step(seed))?;
    for inputs in ["the same", "other"] {
        if inputs == "other" {
            let _no_grad = no_grad();
            leaves.x.copy_(&leaves.x.mul(-0.7)?.add(0.3)?)?;
            leaves.condition.mul_(-1.3)?;
        }
        let replayed = captured.replay()?.copy()?;
        let grads = leaves.copy_grads()?;
        ensure_same_bits(&replayed, &leaves.step(seed)?).with_context(|| format!("{inputs} inputs"))?;
        for (k, (replayed, eager)) in grads.iter().zip(&leaves.copy_grads()?).enumerate() {
            ensure_same_bits(replayed, eager).with_context(|| format!("{inputs} inputs, gradient {k}"))?;
        }
    }
    leaves.clear_grads();
    Ok(())
}

fn random_blocks_have_one_gradient_in_all_forms(device: &Device) -> Result<()> {
    for seed in 0..PROGRAMS {
        // Rows of whole vectors and of single elements.
        let width = [7, 8, 12, 16][seed as usize % 4];
        device.manual_seed(seed);
        let leaves = Leaves::new(width, device)?;
        compare_forms(seed, &leaves, device).with_context(|| format!("program {seed}"))?;
    }
    Ok(())
}

//! Random programs of linear operations: views, parts, joins, writes in place, checkpoints, hooks and a second device.
//!
//! The gradient of a linear function has the values of the function at the unit vectors, which are computed without
//! a graph. All values are small integers, so both agree exactly.

use std::slice::from_ref;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use forebay::autograd::{GradOptions, checkpoint, grad, no_grad};
use forebay::device::Device;
use forebay::error::{Error, Result as CoreResult};
use forebay::memory::Config;
use forebay::ops::cat;
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_close};
use super::tests;

tests![gradients_of_linear_programs_are_exact];

const PROGRAMS: u64 = 32;
/// Elements of the input.
const INPUTS: usize = 12;
/// Tensors with more elements are left out.
const MAX_NUMEL: usize = 300;
/// Programs with larger values are left out, because f32 has 24 bits.
const MAX_VALUE: f64 = 1e6;

/// Random program. Each run draws the same operations.
struct Program<'a> {
    rng: SplitMix64,
    nodes: Vec<Tensor>,
    device: Device,
    /// Device that some values pass through.
    other: &'a Device,
    /// If true, hooks keep some gradients.
    has_hooks: bool,
}

impl Program<'_> {
    /// Runs the program of a seed and returns the weighted sum of all its tensors.
    fn run(seed: u64, x: &Tensor, other: &Device, has_hooks: bool) -> CoreResult<Tensor> {
        let nodes = vec![x.mul(1.0)?.reshape([3, 4])?, x.mul(2.0)?];
        let mut program =
            Program { rng: SplitMix64(seed), nodes, device: x.device().clone(), other, has_hooks };
        for _ in 0..4 + program.rng.below(10) {
            let at = program.rng.below(program.nodes.len());
            let input = program.nodes[at].clone();
            if input.rank() == 0 {
                continue;
            }
            for made in program.apply_operation(&input)? {
                program.keep(made)?;
            }
        }
        let mut loss = x.sum_all()?.mul(0.0)?;
        for t in &program.nodes {
            let factors: Vec<f32> = (0..t.numel()).map(|k| ((k * 7 + 3) % 5) as f32 - 2.0).collect();
            let factors = Tensor::from_slice(&factors, t.shape(), &program.device)?;
            loss = loss.add(&t.mul(&factors)?.sum_all()?)?;
        }
        Ok(loss)
    }

    fn keep(&mut self, made: Tensor) -> CoreResult<()> {
        let takes_hook = self.rng.below(5) == 0;
        if made.numel() > MAX_NUMEL {
            return Ok(());
        }
        if self.has_hooks && takes_hook && made.requires_grad() {
            let kept = Mutex::new(Vec::new());
            made.register_hook(move |g| {
                kept.lock().unwrap_or_else(|e| e.into_inner()).push(g.clone());
                Ok(g.numel().is_multiple_of(2).then(|| g.clone()))
            })?;
        }
        self.nodes.push(made);
        Ok(())
    }

    /// Returns the latest other tensor of this shape.
    fn find_like(&self, p: &Tensor) -> Option<&Tensor> {
        self.nodes.iter().rev().find(|q| q.shape() == p.shape() && !q.shares_storage(p))
    }

    fn apply_operation(&mut self, p: &Tensor) -> CoreResult<Vec<Tensor>> {
        let rank = p.rank();
        let d = self.rng.below(rank);
        let (dim, last, extent) = (d as isize, rank as isize - 1, p.shape()[d]);
        let kind = self.rng.below(20);
        let [a, b, c] = [(); 3].map(|()| self.rng.below(1 << 20));
        let made = match kind {
            0 | 1 => {
                let start = a % (extent + 1);
                p.narrow(dim, start, b % (extent - start + 1))?
            }
            2 | 3 if extent > 0 => p.select(dim, (a % extent) as isize)?,
            4 => p.slice_dim(dim, a % (extent + 1), extent, 1 + b % 3)?,
            5 if rank >= 2 => p.diagonal(a as isize % 3 - 1, 0, last)?,
            6 => p.transpose(0, last)?,
            7 => p.reshape([-1])?,
            8 if rank < 4 => p.unsqueeze(0)?.broadcast_to([&[2usize][..], p.shape()].concat())?,
            9 | 10 => {
                let mut parts = vec![p.clone(); 1 + a % 3];
                if extent > 1 {
                    parts.push(p.narrow(dim, b % extent, 1)?);
                }
                cat(&parts, dim)?
            }
            11 => p.mul([2.0, -1.0, 3.0][a % 3])?,
            12 => p.add(self.find_like(p).unwrap_or(p))?,
            13 => p.sum([dim], a % 2 == 0)?,
            14 => return p.chunk(1 + a % 3, dim),
            15 => p.flip([dim])?,
            16 => {
                self.write(p, dim, a)?;
                return Ok(Vec::new());
            }
            17 if extent > 0 => {
                let index = [a, b, c].map(|k| (k % extent) as i32);
                p.index_select(dim, &Tensor::from_slice(&index, [3], &self.device)?)?
            }
            18 => p.to_device(self.other)?.mul(1.0)?.to_device(&self.device)?,
            19 => {
                let captured = self.nodes[a % self.nodes.len()].clone();
                checkpoint(&[p], move |t| {
                    let twice = t[0].mul(2.0)?;
                    let part = twice.narrow(0, 0, twice.shape()[0].min(1))?;
                    twice.add(&part.sum_all()?)?.add(&captured.sum_all()?)
                })?
            }
            _ => p.copy()?,
        };
        Ok(vec![made])
    }

    /// Writes to a tensor in place.
    fn write(&self, p: &Tensor, dim: isize, choice: usize) -> CoreResult<()> {
        match (choice % 4, self.find_like(p)) {
            (0, Some(q)) => p.add_(&q.copy()?),
            (1, _) => p.copy_(&p.mul(3.0)?),
            (2, _) if p.numel() > 0 => p.select(dim, 0)?.mul_(2.0),
            _ => p.mul_(-1.0),
        }
    }
}

/// Computes gradients at ones: by one of the ways of a backward pass.
fn compute_gradients(seed: u64, device: &Device, other: &Device) -> CoreResult<Vec<Tensor>> {
    let x = Tensor::from_slice(&[1.0f32; INPUTS], [INPUTS], device)?.to_leaf()?;
    let loss = Program::run(seed, &x, other, seed.is_multiple_of(3))?;
    let passes = match seed % 4 {
        0 => 1,
        1 => 2,
        2 => return grad(&[&loss], from_ref(&x), &GradOptions::default()),
        _ => return grad(&[&loss], from_ref(&x), &GradOptions::create_graph()),
    };
    let mut found = Vec::new();
    for pass in 0..passes {
        x.set_grad(None);
        let retain_graph = Some(pass + 1 < passes);
        loss.backward_with(GradOptions { retain_graph, ..GradOptions::default() })?;
        found.extend(x.grad());
    }
    Ok(found)
}

fn gradients_of_linear_programs_are_exact(device: &Device) -> Result<()> {
    let [fusing, other] = [(); 2].map(|()| Device::with_config(device.backend().clone(), Config::default()));
    fusing.set_fusion_min_bytes(Some(0));
    let mut compared = 0;
    for seed in 0..PROGRAMS {
        let device = if seed.is_multiple_of(2) { device } else { &fusing };
        let value_at = |k: usize| -> CoreResult<f64> {
            let _no_grad = no_grad();
            let unit: Vec<f32> = (0..INPUTS).map(|i| f32::from(u8::from(i == k))).collect();
            Program::run(seed, &Tensor::from_slice(&unit, [INPUTS], device)?, &other, false)?.item()
        };
        // Tensors that repeat elements are not written in place.
        let Ok(expected) = (0..INPUTS).map(value_at).collect::<CoreResult<Vec<f64>>>() else { continue };
        if expected.iter().any(|v| v.abs() > MAX_VALUE) {
            continue;
        }
        let found = match compute_gradients(seed, device, &other) {
            Ok(found) => found,
            // The program changes what a checkpoint needs, or writes through another view.
            Err(Error::Backward { message, .. })
                if ["changed in place", "overwritten"].iter().any(|s| message.contains(s)) =>
            {
                continue;
            }
            Err(error) => return Err(error).with_context(|| format!("program {seed}")),
        };
        ensure!(!found.is_empty(), "program {seed} has no gradient");
        for grad in found {
            ensure_close(&grad.to_f64s()?, &expected, 0.0, 0.0).with_context(|| format!("program {seed}"))?;
        }
        compared += 1;
    }
    ensure!(compared >= PROGRAMS / 2, "only {compared} of {PROGRAMS} programs have gradients");
    Ok(())
}

//! Choice of a matrix product's tile by timing.
//!
//! The cost model of [`TilePlan`] knows no caches, registers or occupancy, so it is wrong by up to a factor of two. The
//! first large product of a kind therefore runs the few tiles that the model ranks best. They read its operands and
//! write its result. All candidates split the sums alike: they have the same bits, so it does not matter for results
//! which one is chosen, or when. They have the same workspace too, so dry runs stay exact.

use crate::ops::matmul::matmul_tiling::{CostModel, MatmulExtents, TilePlan, TiledProduct};
use crate::ops::prelude::*;
use crate::platform::Instant;
use crate::runtime::variant_choices::{VariantCode, VariantProblem};

/// Number of tiles that are timed. Each takes the driver up to a second to compile.
const MAX_CANDIDATES: usize = 3;
/// Tiles with a higher cost by the model, relative to the cheapest, are not timed.
const MAX_COST_RATIO: f64 = 2.0;
/// Rounds over all candidates. The clock of an idle GPU rises for tens of milliseconds, so candidates take turns.
const ROUNDS: usize = 5;
/// Seconds of a candidate's turn, in which it runs at most [`MAX_RUNS`] times.
const TURN_SECONDS: f64 = 2e-3;
const MAX_RUNS: usize = 16;
/// Time relative to the cost model's choice from which another tile replaces it, so that noise does not decide.
const MIN_GAIN_RATIO: f64 = 0.97;
/// Bytes that are compared at the beginning, in the middle and at the end of the results.
const COMPARED_BYTES: usize = 16 << 10;

impl TiledProduct<'_> {
    /// Returns the plan with the fastest tile that is known or can be found now, else `plan`. `sums` are the splits'
    /// sums of this product.
    pub(super) fn choose_tile(&self, plan: TilePlan, costs: CostModel, sums: Option<&Tensor>) -> TilePlan {
        let device = self.out.device();
        if let Some(number) = device.forced_tile() {
            let candidates = plan.candidates(costs, f64::INFINITY);
            return candidates[number % candidates.len()];
        }
        let MatmulExtents { m, n, k, batch } = plan.extents();
        let flops = [2, m, n, k, batch].iter().fold(1u64, |all, &extent| all.saturating_mul(extent as u64));
        if device.tile_autotune_min_flops().is_none_or(|min_flops| flops < min_flops) {
            return plan;
        }
        // A result that is added to can't be written several times. Such products use the choice of others.
        let may_rerun = sums.is_some() || !self.epilogue.accumulate;
        self.choose_known_or_time(plan, costs, |candidates| {
            if may_rerun && device.may_time_variants() {
                self.time_candidates(candidates, sums)
            } else {
                Ok(None)
            }
        })
    }

    /// Returns the plan of the known choice, else the one that `time` finds, else `plan`. `time` returns `None` if it
    /// cannot time now.
    fn choose_known_or_time(
        &self,
        plan: TilePlan,
        costs: CostModel,
        time: impl FnOnce(&[TilePlan]) -> Result<Option<usize>>,
    ) -> TilePlan {
        let choices = self.out.device().variant_choices();
        let problem = self.problem(&plan);
        if let Some(code) = choices.find(&problem) {
            return find_tile(&plan.candidates(costs, f64::INFINITY), code);
        }
        // Before the candidates: once timing has taken its time, products of new kinds only look their choice up.
        let Some(_guard) = choices.start_timing() else { return plan };
        let mut candidates = plan.candidates(costs, MAX_COST_RATIO);
        candidates.truncate(MAX_CANDIDATES);
        if candidates.len() == 1 {
            choices.remember(&problem, plan.tile_code());
            return plan;
        }
        match time(&candidates) {
            Ok(Some(fastest)) => {
                let fastest = candidates[fastest];
                choices.store(&problem, fastest.tile_code());
                fastest
            }
            Ok(None) => plan,
            Err(error) => {
                log::warn!("tiles of `{}` cannot be timed: {error}", scope_op());
                choices.remember(&problem, plan.tile_code());
                plan
            }
        }
    }

    /// Returns the key of the choice. Accumulation is no part of it, so that products that cannot be timed share the
    /// choice of those that can.
    fn problem(&self, plan: &TilePlan) -> VariantProblem {
        let (spec, _) = (self.kernel)(plan);
        let pre_activation = self.epilogue.pre_activation.is_some();
        let spec = kernel_spec! { ..spec; gelu: self.epilogue.gelu, pre_activation };
        let MatmulExtents { m, n, k, batch } = plan.extents();
        VariantProblem::new(spec, [m, n, k, batch])
    }

    /// Returns the index of the fastest candidate whose results equal those of the first.
    fn time_candidates(&self, candidates: &[TilePlan], sums: Option<&Tensor>) -> Result<Option<usize>> {
        let device = self.out.device();
        let kernels = candidates.iter().map(|plan| device.kernel_for_spec(&self.first_stage(plan).0));
        // All compile at once, on threads of the backend.
        let kernels: SmallVec<[_; MAX_CANDIDATES]> = kernels.collect();
        let mut reference = None;
        let mut usable: SmallVec<[usize; MAX_CANDIDATES]> = SmallVec::new();
        for (number, kernel) in kernels.into_iter().enumerate() {
            if let Err(error) = kernel.and_then(|kernel| device.wait_compiled(kernel)) {
                log::debug!("tile {:?} is not used: {error}", candidates[number].tile_code());
                // The product itself reports the error of its first choice.
                if number == 0 {
                    return Ok(None);
                }
                continue;
            }
            self.launch_first_stage(&candidates[number], sums)?;
            let results = read_samples(sums.unwrap_or(self.out))?;
            if *reference.get_or_insert_with(|| results.clone()) == results {
                usable.push(number);
            } else {
                let code = candidates[number].tile_code();
                log::warn!(
                    "tile {code:?} is not used: on {device}, its results differ from those of other tiles"
                );
            }
        }
        let mut ratios: SmallVec<[SmallVec<[f64; ROUNDS]>; MAX_CANDIDATES]> =
            usable.iter().map(|_| SmallVec::new()).collect();
        for _ in 0..ROUNDS {
            let mut first = None;
            for (&number, ratios) in usable.iter().zip(&mut ratios) {
                let seconds = self.time_turn(&candidates[number], sums)?;
                ratios.push(seconds / *first.get_or_insert(seconds));
            }
        }
        Ok(Some(usable[find_fastest(&mut ratios)]))
    }

    /// Returns the seconds of one run, averaged over a turn.
    fn time_turn(&self, plan: &TilePlan, sums: Option<&Tensor>) -> Result<f64> {
        let time = |runs: usize| -> Result<f64> {
            let start = Instant::now();
            (0..runs).try_for_each(|_| self.launch_first_stage(plan, sums))?;
            let device = self.out.device();
            let queue = device.queue_backend(device.current_queue())?;
            queue.wait_fence(queue.record_fence()?)?;
            Ok(start.elapsed().as_secs_f64().max(1e-9))
        };
        let runs = ((TURN_SECONDS / time(1)?) as usize).clamp(1, MAX_RUNS);
        Ok(time(runs)? / runs as f64)
    }
}

/// Returns the candidate with the lowest median of times relative to the first one, or the first one.
fn find_fastest(ratios: &mut [SmallVec<[f64; ROUNDS]>]) -> usize {
    let mut best = (MIN_GAIN_RATIO, 0);
    for (number, ratios) in ratios.iter_mut().enumerate().skip(1) {
        ratios.sort_by(f64::total_cmp);
        let median = ratios[ratios.len() / 2];
        if median < best.0 {
            best = (median, number);
        }
    }
    best.1
}

/// Returns the candidate with this tile, or the first: another shape of the bucket may have other candidates.
fn find_tile(candidates: &[TilePlan], code: VariantCode) -> TilePlan {
    candidates.iter().find(|plan| plan.tile_code() == code).copied().unwrap_or(candidates[0])
}

/// Waits, and returns some bytes of a contiguous tensor: at its beginning, in its middle and at its end.
fn read_samples(t: &Tensor) -> Result<[Vec<u8>; 3]> {
    let _no_grad = autograd::no_grad();
    let flat = t.reshape([t.numel()])?;
    let length = (COMPARED_BYTES / t.dtype().size()).min(flat.numel());
    // Starts are at whole words.
    let last = (flat.numel() - length) / 4 * 4;
    let read = |start: usize| flat.narrow(0, start, length)?.to_bytes();
    Ok([read(0)?, read(last / 8 * 4)?, read(last)?])
}

fn scope_op() -> &'static str {
    crate::memory::scope::current().op
}

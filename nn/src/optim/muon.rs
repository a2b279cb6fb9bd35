//! Muon (Jordan et al., 2024), in PyTorch's variant.

use smallvec::{SmallVec, smallvec};

use super::composite::{ParamStep, ParamUpdate};
use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::dtype::DType;
use forebay_core::error::Error;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// Factor of the learning rate in [`Muon`], for a matrix of A rows and B columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MuonAdjustLr {
    /// √max(1, A / B).
    #[default]
    Original,
    /// 0.2 √max(A, B), so that AdamW's learning rates and weight decays are suitable.
    MatchRmsAdamW,
    /// √(A / B).
    SpectralUnclamped,
}

/// Muon: updates by momentum whose singular values are all made approximately one. Use it for matrices of
/// hidden layers, and AdamW for the other parameters.
///
/// A step runs three bf16 matrix products for each Newton-Schulz iteration and parameter.
#[derive(Debug)]
pub struct Muon {
    rule: MuonRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct MuonRule {
    momentum: f64,
    nesterov: bool,
    ns_steps: usize,
    ns_coefficients: (f64, f64, f64),
    eps: f64,
    adjust_lr: MuonAdjustLr,
    weight_decay: f64,
    maximize: bool,
}

impl Muon {
    /// Creates Muon with Nesterov momentum 0.95, weight decay 0.1 and five Newton-Schulz iterations.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = MuonRule {
            momentum: 0.95,
            nesterov: true,
            ns_steps: 5,
            ns_coefficients: (3.4445, -4.775, 2.0315),
            eps: 1e-7,
            adjust_lr: MuonAdjustLr::Original,
            weight_decay: 0.1,
            maximize: false,
        };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Muon {
    /// Sets the decay of the momentum.
    momentum: f64,
    /// If true, uses Nesterov momentum.
    nesterov: bool,
    /// Sets the number of Newton-Schulz iterations.
    ns_steps: usize,
    /// Sets the coefficients of the iteration's polynomial a s + b s³ + c s⁵.
    ns_coefficients: (f64, f64, f64),
    /// Sets the lower bound of a momentum's norm.
    eps: f64,
    /// Sets the dependence of the learning rate on a matrix's shape.
    adjust_lr: MuonAdjustLr,
    /// Sets the weight decay, decoupled from the gradient.
    weight_decay: f64,
    /// If true, maximises the objective.
    maximize: bool,
});

impl MuonRule {
    /// Approximates U Vᵀ of the singular value decomposition, in bf16.
    fn orthogonalize_newton_schulz(&self, turn: &Tensor) -> Result<Tensor> {
        let (a, b, c) = self.ns_coefficients;
        let tall = turn.shape()[0] > turn.shape()[1];
        let turn = turn.to_dtype(DType::BF16)?;
        let turn = if tall { turn.t()? } else { turn };
        let mut x = turn.div(&turn.norm(2.0, (), false)?.maximum(self.eps)?)?;
        for _ in 0..self.ns_steps {
            let gram = x.mm(&x.t()?)?;
            x = x.addmm(&gram.addmm(&gram, &gram, b, c)?, &x, a, 1.0)?;
        }
        if tall { x.t() } else { Ok(x) }
    }
}

impl UpdateRule for MuonRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Muon";
        check::unit_interval(OP, "momentum", self.momentum)?;
        let (a, b, c) = self.ns_coefficients;
        [a, b, c].into_iter().try_for_each(|x| check::finite(OP, "ns_coefficients", x))?;
        check::non_negative(OP, "eps", self.eps)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)?;
        if self.ns_steps >= 100 {
            return Err(Error::argument(
                OP,
                format!("`ns_steps` is {}, expected fewer than 100", self.ns_steps),
            ));
        }
        Ok(())
    }

    fn has_step_count(&self) -> bool {
        false
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["momentum_buffer"]
    }

    fn check_parameter(&self, parameter: &Tensor) -> Result<()> {
        if parameter.rank() == 2 {
            return Ok(());
        }
        let rule = "Muon takes matrices; train the other parameters with AdamW";
        Err(Error::shape("step", rule, &[parameter.shape()]))
    }

    fn compute_update(&self, at: ParamStep) -> Result<ParamUpdate> {
        let ParamStep { param: p, grad: g, states, lr, weight_decay, .. } = at;
        let g = if self.maximize { g.neg()? } else { g };
        let buffer = states[0].lerp(&g, 1.0 - self.momentum)?;
        let turn = if self.nesterov { g.lerp(&buffer, self.momentum)? } else { buffer.clone() };
        let turn = self.orthogonalize_newton_schulz(&turn)?.to_dtype(DType::F32)?;
        let (rows, columns) = (p.shape()[0] as f64, p.shape()[1] as f64);
        let ratio = match self.adjust_lr {
            MuonAdjustLr::Original => (rows / columns).max(1.0).sqrt(),
            MuonAdjustLr::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
            MuonAdjustLr::SpectralUnclamped => (rows / columns).sqrt(),
        };
        let p = p.sub(&p.mul(&lr.mul(weight_decay)?)?)?;
        Ok((p.sub(&turn.mul(&lr.mul(ratio)?)?)?, smallvec![buffer]))
    }
}

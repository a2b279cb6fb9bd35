//! LAMB (You et al., 2019), with bias correction.

use smallvec::{SmallVec, smallvec};

use super::composite::{ParamStep, ParamUpdate};
use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// LAMB for large batches: Adam whose update is scaled to the norm of each parameter times the learning rate.
///
/// A step runs a few tensor operations for each parameter.
#[derive(Debug)]
pub struct Lamb {
    rule: LambRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct LambRule {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Lamb {
    /// Creates LAMB with betas 0.9 and 0.999, eps 1e-6 and weight decay 0.01.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = LambRule { betas: (0.9, 0.999), eps: 1e-6, weight_decay: 0.01, maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Lamb {
    /// Sets the decays of the running mean and of the running mean square.
    betas: (f64, f64),
    /// Sets the term added to the root of the mean square.
    eps: f64,
    /// Sets the weight decay, decoupled from the gradient.
    weight_decay: f64,
    /// If true, maximises the objective.
    maximize: bool,
});

impl UpdateRule for LambRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Lamb";
        check::betas(OP, self.betas)?;
        check::non_negative(OP, "eps", self.eps)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["exp_avg", "exp_avg_sq"]
    }

    fn compute_update(&self, at: ParamStep) -> Result<ParamUpdate> {
        let ParamStep { param: p, grad: g, states, lr, step, weight_decay, .. } = at;
        let g = if self.maximize { g.neg()? } else { g };
        let mean = states[0].lerp(&g, 1.0 - self.betas.0)?;
        let square = states[1].lerp(&g.square()?, 1.0 - self.betas.1)?;
        // Computes 1 - beta^step with expm1, which keeps precision for beta close to 1.
        let short = |beta: f64| step.mul(beta.ln().max(-1e3))?.expm1()?.neg();
        let root = square.div(&short(self.betas.1)?)?.sqrt()?.add(self.eps)?;
        let turn = mean.div(&short(self.betas.0)?)?.div(&root)?.add(&p.mul(weight_decay)?)?;
        let (length, of_turn) = (p.norm(2.0, (), false)?, turn.norm(2.0, (), false)?);
        // If a norm is zero, the trust ratio is 1.
        let none = length.mul(&of_turn)?.eq(0.0)?;
        let trust = length.div(&of_turn)?.masked_fill(&none, 1.0)?;
        Ok((p.sub(&turn.mul(&trust.mul(&lr)?)?)?, smallvec![mean, square]))
    }
}

//! LAMB (You et al., 2019), with corrections of bias.

use smallvec::{SmallVec, smallvec};

use super::composite::{ParamStep, ParamUpdate};
use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;

/// LAMB: Adam whose step has, for each parameter, the length of the parameter times the learning rate. For large batches.
///
/// Made of tensor operations, a few for each parameter.
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
    /// LAMB with betas 0.9 and 0.999, eps 1e-6, weight decay 0.01.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = LambRule { betas: (0.9, 0.999), eps: 1e-6, weight_decay: 0.01, maximize: false };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Lamb {
    /// How much of the running mean, and of the mean of squares, stays at each step.
    betas: (f64, f64),
    /// Added to the root of the mean of squares.
    eps: f64,
    /// How fast parameters decay, apart from the gradient.
    weight_decay: f64,
    /// Climbs instead.
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
        // 1 - beta^step, without losing digits where beta is close to 1.
        let short = |beta: f64| step.mul(beta.ln().max(-1e3))?.expm1()?.neg();
        let root = square.div(&short(self.betas.1)?)?.sqrt()?.add(self.eps)?;
        let turn = mean.div(&short(self.betas.0)?)?.div(&root)?.add(&p.mul(weight_decay)?)?;
        let (length, of_turn) = (p.norm(2.0, &[], false)?, turn.norm(2.0, &[], false)?);
        // A length of zero trusts the step as it is.
        let none = length.mul(&of_turn)?.eq(0.0)?;
        let trust = length.div(&of_turn)?.masked_fill(&none, 1.0)?;
        Ok((p.sub(&turn.mul(&trust.mul(&lr)?)?)?, smallvec![mean, square]))
    }
}

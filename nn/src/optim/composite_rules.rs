//! Optimisers whose rules are tensor operations: LAMB (You et al., 2019, with bias correction), Adafactor
//! (Shazeer and Stern, 2018) and Muon (Jordan et al., 2024), the last two in PyTorch's variants.

use smallvec::smallvec;

use super::composite::{ParamStep, ParamUpdate};
use super::fused::{FusedOptimizer, UpdateRule};
use super::{impl_optimizer, optimizer};
use crate::{DType, Result, fail_if};
use forebay_core::ops::{AddmmOptions, machine_epsilon};
use forebay_core::tensor::{Dims, Tensor};

optimizer! {
    /// LAMB for large batches: Adam whose update is scaled to the norm of each parameter times the learning rate.
    ///
    /// A step runs a few tensor operations for each parameter.
    Lamb(LambRule)
    /// Creates LAMB with betas 0.9 and 0.999, eps 1e-6 and weight decay 0.01.
    {
        /// Sets the decays of the running mean and of the running mean square.
        betas: (f64, f64) = (0.9, 0.999) => betas,
        /// Sets the term added to the root of the mean square.
        eps: f64 = 1e-6 => non_negative,
    } weight_decay = 0.01 ", decoupled from the gradient."
}

impl UpdateRule for LambRule {
    const STATES: &'static [&'static str] = &["exp_avg", "exp_avg_sq"];

    fn compute_update(&self, at: ParamStep) -> Result<ParamUpdate> {
        let ParamStep { param: p, grad: g, states, lr, step, weight_decay, .. } = at;
        let mean = states[0].lerp(&g, 1.0 - self.betas.0)?;
        let square = states[1].lerp(&g.square()?, 1.0 - self.betas.1)?;
        // Computes 1 - beta^step with expm1, which keeps precision for beta close to 1.
        let bias_correction = |beta: f64| step.mul(beta.ln().max(-1e3))?.expm1()?.neg();
        let root = square.div(&bias_correction(self.betas.1)?)?.sqrt()?.add(self.eps)?;
        let update = mean.div(&bias_correction(self.betas.0)?)?.div(&root)?.add(&p.mul(weight_decay)?)?;
        let (length, update_norm) = (p.norm(2.0, (), false)?, update.norm(2.0, (), false)?);
        // If a norm is zero, the trust ratio is 1.
        let has_zero_norm = length.mul(&update_norm)?.eq(0.0)?;
        let trust = length.div(&update_norm)?.masked_fill(&has_zero_norm, 1.0)?;
        Ok((p.sub(&update.mul(&trust.mul(&lr)?)?)?, smallvec![mean, square]))
    }
}

optimizer! {
    /// Adafactor: divides gradients by the root of a mean square, factored into rows and columns.
    ///
    /// A step runs about twenty tensor operations a parameter. Rows and columns are the last two dimensions.
    Adafactor(AdafactorRule)
    /// Creates Adafactor with a beta2 of 1 - t^-0.8 and no weight decay. PyTorch's default learning rate is 0.01.
    {
        /// Sets the exponent of the step number in beta2.
        beta2_decay: f64 = -0.8 => non_positive,
        /// Sets lower bounds: of the root of the mean square, and of a parameter's root mean square. The first
        /// defaults to the machine epsilon of the parameter's dtype.
        eps: (Option<f64>, f64) = (None, 1e-3) => optional_eps,
        /// Sets the clipping threshold: updates with a larger root mean square are scaled down.
        d: f64 = 1.0 => at_least_one,
    } weight_decay = 0.0 ", decoupled from the gradient."
}

impl UpdateRule for AdafactorRule {
    const STATES: &'static [&'static str] = &["row_var", "col_var", "variance"];

    fn state_shape(&self, state: &'static str, shape: &[usize]) -> Dims {
        let mut extents = Dims::from_slice(shape);
        match (state, &mut extents[..]) {
            // One value for each row, and one for each column.
            ("row_var", [.., _, columns]) => *columns = 1,
            ("col_var", [.., rows, _]) => *rows = 1,
            ("variance", [] | [_]) => {}
            _ => return Dims::from_slice(&[0]),
        }
        extents
    }

    fn compute_update(&self, at: ParamStep) -> Result<ParamUpdate> {
        let ParamStep { param: p, grad: g, mut states, lr, step, weight_decay, dtype } = at;
        let least = self.eps.0.unwrap_or(machine_epsilon(dtype));
        let weight = step.pow(self.beta2_decay)?;
        let rate = lr.minimum(&step.rsqrt()?)?.mul(&p.square()?.mean_all()?.sqrt()?.maximum(self.eps.1)?)?;
        let squares = g.square()?;
        let square = if p.rank() > 1 {
            let rows = states[0].lerp(&squares.mean([-1], true)?, &weight)?;
            let columns = states[1].lerp(&squares.mean([-2], true)?, &weight)?;
            let square = rows.mul(&columns)?.div(&rows.mean([-2], true)?.maximum(least)?)?;
            (states[0], states[1]) = (rows, columns);
            square
        } else {
            states[2] = states[2].lerp(&squares, &weight)?;
            states[2].clone()
        };
        let update = square.maximum(least * least)?.rsqrt()?.mul(&g)?;
        let long = update.square()?.mean_all()?.sqrt()?.div(self.d)?.maximum(1.0)?;
        let p = p.sub(&p.mul(&lr.mul(weight_decay)?)?)?;
        Ok((p.sub(&update.mul(&rate.div(&long)?)?)?, states))
    }
}

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

optimizer! {
    /// Muon: updates by momentum whose singular values are all made approximately one. Use it for matrices of
    /// hidden layers, and AdamW for the other parameters.
    ///
    /// A step runs three bf16 matrix products for each Newton-Schulz iteration and parameter.
    Muon(MuonRule)
    /// Creates Muon with Nesterov momentum 0.95, weight decay 0.1 and five Newton-Schulz iterations.
    {
        /// Sets the decay of the momentum.
        momentum: f64 = 0.95 => unit_interval,
        /// If true, uses Nesterov momentum.
        nesterov: bool = true,
        /// Sets the number of Newton-Schulz iterations.
        ns_steps: usize = 5,
        /// Sets the coefficients of the iteration's polynomial a s + b s³ + c s⁵.
        ns_coefficients: (f64, f64, f64) = (3.4445, -4.775, 2.0315) => finite_coefficients,
        /// Sets the lower bound of a momentum's norm.
        eps: f64 = 1e-7 => non_negative,
        /// Sets the dependence of the learning rate on a matrix's shape.
        adjust_lr: MuonAdjustLr = MuonAdjustLr::Original,
    } weight_decay = 0.1 ", decoupled from the gradient."
}

impl MuonRule {
    /// Approximates U Vᵀ of the singular value decomposition, in bf16.
    fn orthogonalize_newton_schulz(&self, update: &Tensor) -> Result<Tensor> {
        let (a, b, c) = self.ns_coefficients;
        let is_tall = update.shape()[0] > update.shape()[1];
        let update = update.to_dtype(DType::BF16)?;
        let update = if is_tall { update.t()? } else { update };
        let mut x = update.div(&update.norm(2.0, (), false)?.maximum(self.eps)?)?;
        for _ in 0..self.ns_steps {
            let gram = x.mm(&x.t()?)?;
            x = x.addmm(
                &gram.addmm(&gram, &gram, &AddmmOptions { beta: b, alpha: c })?,
                &x,
                &AddmmOptions { beta: a, ..Default::default() },
            )?;
        }
        if is_tall { x.t() } else { Ok(x) }
    }
}

impl UpdateRule for MuonRule {
    const HAS_STEP_COUNT: bool = false;
    const STATES: &'static [&'static str] = &["momentum_buffer"];

    #[track_caller]
    fn check_combination(&self) -> Result<()> {
        fail_if!(self.ns_steps >= 100; argument("Muon"), "`ns_steps` is {}, expected fewer than 100", self.ns_steps);
        Ok(())
    }

    #[track_caller]
    fn check_parameter(&self, parameter: &Tensor) -> Result<()> {
        fail_if!(parameter.rank() != 2; shape("step", [parameter]), "Muon takes matrices; train the other parameters with AdamW");
        Ok(())
    }

    fn compute_update(&self, at: ParamStep) -> Result<ParamUpdate> {
        let ParamStep { param: p, grad: g, states, lr, weight_decay, .. } = at;
        let buffer = states[0].lerp(&g, 1.0 - self.momentum)?;
        let update = if self.nesterov { g.lerp(&buffer, self.momentum)? } else { buffer.clone() };
        let update = self.orthogonalize_newton_schulz(&update)?.to_dtype(DType::F32)?;
        let (rows, columns) = (p.shape()[0] as f64, p.shape()[1] as f64);
        let ratio = match self.adjust_lr {
            MuonAdjustLr::Original => (rows / columns).max(1.0).sqrt(),
            MuonAdjustLr::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
            MuonAdjustLr::SpectralUnclamped => (rows / columns).sqrt(),
        };
        let p = p.sub(&p.mul(&lr.mul(weight_decay)?)?)?;
        Ok((p.sub(&update.mul(&lr.mul(ratio)?)?)?, smallvec![buffer]))
    }
}

//! Adafactor (Shazeer and Stern, 2018), in PyTorch's variant.

use smallvec::{SmallVec, smallvec};

use super::composite::{ParamStep, ParamUpdate};
use super::fused::{FusedOptimizer, UpdateRule};
use super::impl_optimizer;
use forebay_core::check;
use forebay_core::error::Result;
use forebay_core::ops::machine_epsilon;
use forebay_core::tensor::Dims;
use forebay_core::tensor::Tensor;

/// Adafactor: divides gradients by the root of a mean square that is factored into rows and columns to save
/// memory.
///
/// A step runs some twenty tensor operations for each parameter. Rows and columns are the last two
/// dimensions.
#[derive(Debug)]
pub struct Adafactor {
    rule: AdafactorRule,
    fused: FusedOptimizer,
}

#[derive(Clone, Copy, Debug)]
struct AdafactorRule {
    beta2_decay: f64,
    eps: (Option<f64>, f64),
    d: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Adafactor {
    /// Creates Adafactor with a beta2 of 1 - t^-0.8 and no weight decay. PyTorch's default learning rate is
    /// 0.01.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let rule = AdafactorRule {
            beta2_decay: -0.8,
            eps: (None, 1e-3),
            d: 1.0,
            weight_decay: 0.0,
            maximize: false,
        };
        Self { rule, fused: FusedOptimizer::new(parameters, lr) }
    }
}

impl_optimizer!(Adafactor {
    /// Sets the exponent of the step number in beta2.
    beta2_decay: f64,
    /// Sets lower bounds: of the root of the mean square, and of a parameter's root mean square. The first
    /// defaults to the machine epsilon of the parameter's dtype.
    eps: (Option<f64>, f64),
    /// Sets the clipping threshold: updates with a larger root mean square are scaled down.
    d: f64,
    /// Sets the weight decay, decoupled from the gradient.
    weight_decay: f64,
    /// If true, maximises the objective.
    maximize: bool,
});

impl UpdateRule for AdafactorRule {
    fn check_options(&self) -> Result<()> {
        const OP: &str = "Adafactor";
        check::non_positive(OP, "beta2_decay", self.beta2_decay)?;
        check::non_negative(OP, "eps.0", self.eps.0.unwrap_or(0.0))?;
        check::non_negative(OP, "eps.1", self.eps.1)?;
        check::at_least_one(OP, "d", self.d)?;
        check::non_negative(OP, "weight_decay", self.weight_decay)
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        smallvec!["row_var", "col_var", "variance"]
    }

    fn state_shape(&self, state: &'static str, shape: &[usize]) -> Dims {
        let mut kept = Dims::from_slice(shape);
        match (state, &mut kept[..]) {
            // One value for each row, and one for each column.
            ("row_var", [.., _, columns]) => *columns = 1,
            ("col_var", [.., rows, _]) => *rows = 1,
            ("variance", [] | [_]) => {}
            _ => return Dims::from_slice(&[0]),
        }
        kept
    }

    fn compute_update(&self, at: ParamStep) -> Result<ParamUpdate> {
        let ParamStep { param: p, grad: g, mut states, lr, step, weight_decay, dtype } = at;
        let g = if self.maximize { g.neg()? } else { g };
        let least = self.eps.0.unwrap_or(machine_epsilon(dtype));
        let moved = step.pow(self.beta2_decay)?;
        let rate = lr.minimum(&step.rsqrt()?)?.mul(&p.square()?.mean_all()?.sqrt()?.maximum(self.eps.1)?)?;
        let squares = g.square()?;
        let square = if p.rank() > 1 {
            let rows = states[0].lerp(&squares.mean(&[-1], true)?, &moved)?;
            let columns = states[1].lerp(&squares.mean(&[-2], true)?, &moved)?;
            let square = rows.mul(&columns)?.div(&rows.mean(&[-2], true)?.maximum(least)?)?;
            (states[0], states[1]) = (rows, columns);
            square
        } else {
            states[2] = states[2].lerp(&squares, &moved)?;
            states[2].clone()
        };
        let turn = square.maximum(least * least)?.rsqrt()?.mul(&g)?;
        let long = turn.square()?.mean_all()?.sqrt()?.div(self.d)?.maximum(1.0)?;
        let p = p.sub(&p.mul(&lr.mul(weight_decay)?)?)?;
        Ok((p.sub(&turn.mul(&rate.div(&long)?)?)?, states))
    }
}

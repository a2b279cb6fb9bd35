//! L-BFGS (Liu and Nocedal, 1989), in PyTorch's variant.
//!
//! All parameters are one flat vector. The host decides how a step continues, so it reads a few values in
//! each iteration; the recursion over the history does not wait for the device.

use std::collections::{BTreeMap, VecDeque};

use super::Optimizer;
use super::fused::{check_grad, check_parameter_list};
use super::line_search::{LineLimits, LinePoint, strong_wolfe};
use super::state_staging::warn_offload_failed;
use crate::{DType, Error, Result, Tag, Tensor, autograd, check, fail, fail_if, memory};
use forebay_core::amp;
use forebay_core::ops::Scalar;
use forebay_core::printable::printable;

const OP: &str = "Lbfgs";

/// Smallest product of a pair's changes that enters the history.
const MIN_CURVATURE: f64 = 1e-10;

/// Line search of [`Lbfgs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LineSearch {
    /// Search for a step that satisfies the strong Wolfe conditions.
    StrongWolfe,
}

/// L-BFGS: quasi-Newton steps from the last changes of parameters and gradients.
///
/// A step evaluates the loss several times, so it takes a closure: [`step_with`](Optimizer::step_with).
/// [`step`](Optimizer::step) is an error, and therefore a [`Trainer`](crate::train::Trainer) and a
/// [`GradScaler`](super::GradScaler) do not take this optimiser. There is one group of parameters, of f32 or
/// f64, on one device. The state needs `2 history_size + 2` times the memory of the parameters. The host waits
/// for the device, so the step cannot be captured.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::Reduction, tensor::Tensor};
/// # use forebay_nn::nn::{Linear, Module};
/// use forebay_nn::optim::{Lbfgs, LineSearch, Optimizer};
/// # let device = Device::null(Default::default());
/// # let (x, y) = (Tensor::ones(&[8, 4], DType::F32, &device)?, Tensor::ones(&[8, 1], DType::F32, &device)?);
/// let net = Linear::new(4, 1, &device)?;
/// let mut optimizer = Lbfgs::new(net.parameters(), 1.0).line_search_fn(LineSearch::StrongWolfe);
/// let loss = optimizer.step_with(&mut || {
///     net.zero_grad();
///     let loss = net.forward(&x)?.mse_loss(&y, Reduction::Mean)?;
///     loss.backward()?;
///     Ok(loss)
/// })?;
/// # assert_eq!(loss.numel(), 1);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Debug)]
pub struct Lbfgs {
    parameters: Vec<Tensor>,
    lr: f64,
    max_iter: usize,
    max_eval: Option<usize>,
    tolerance_grad: f64,
    tolerance_change: f64,
    history_size: usize,
    line_search_fn: Option<LineSearch>,
    maximize: bool,
    offloads_state: bool,
    state: LbfgsState,
}

/// State under PyTorch's names. Its tensors are never changed in place.
#[derive(Clone, Debug, Default)]
struct LbfgsState {
    func_evals: u64,
    n_iter: u64,
    history: VecDeque<CurvaturePair>,
    /// Scale of the initial inverse Hessian.
    h_diag: f64,
    /// Last iteration; `None` before the first one.
    last: Option<LastIteration>,
}

/// Changes of gradient and parameters in one iteration.
#[derive(Clone, Debug)]
struct CurvaturePair {
    grad_change: Tensor,
    step: Tensor,
    /// Reciprocal of the product of both.
    rho: f64,
}

#[derive(Clone, Debug)]
struct LastIteration {
    direction: Tensor,
    /// Length of the step, in units of the direction.
    t: f64,
    grad: Tensor,
    loss: f64,
}

impl LbfgsState {
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let history = self.history.iter().flat_map(|pair| [&pair.grad_change, &pair.step]);
        history.chain(self.last.iter().flat_map(|last| [&last.direction, &last.grad]))
    }
}

/// Loss of an evaluation as the closure returned it, and the values that the step minimises.
struct Evaluation {
    returned: Tensor,
    loss: f64,
    grad: Tensor,
}

type Closure<'a> = &'a mut dyn FnMut() -> Result<Tensor>;

impl Lbfgs {
    /// Creates L-BFGS with at most 20 iterations a step, a history of 100, tolerances 1e-7 of gradients and
    /// 1e-9 of changes, and no line search. PyTorch's default learning rate is 1.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        Self {
            parameters,
            lr,
            max_iter: 20,
            max_eval: None,
            tolerance_grad: 1e-7,
            tolerance_change: 1e-9,
            history_size: 100,
            line_search_fn: None,
            maximize: false,
            offloads_state: false,
            state: LbfgsState::default(),
        }
    }

    setters! {
        /// Sets the largest number of iterations in a step.
        fn max_iter(iterations: usize) { max_iter: iterations }
        /// Sets the number of evaluations after which a step ends; by default 5 for 4 iterations.
        fn max_eval(evaluations: usize) { max_eval: Some(evaluations) }
        /// Sets the largest magnitude of a gradient's elements at which a step ends.
        fn tolerance_grad(tolerance: f64) { tolerance_grad: tolerance }
        /// Sets the change of the loss, or of every parameter, at which a step ends.
        fn tolerance_change(tolerance: f64) { tolerance_change: tolerance }
        /// Sets the number of iterations whose changes are kept, at least 1.
        fn history_size(iterations: usize) { history_size: iterations }
        /// Sets the line search. Without one, every iteration takes the learning rate.
        fn line_search_fn(search: LineSearch) { line_search_fn: Some(search) }
        /// If true, maximises the objective.
        fn maximize(maximize: bool) { maximize }
    }

    fn check(&self) -> Result<()> {
        check::non_negative(OP, "lr", self.lr)?;
        check::non_negative(OP, "tolerance_grad", self.tolerance_grad)?;
        check::non_negative(OP, "tolerance_change", self.tolerance_change)?;
        fail_if!(self.history_size == 0; argument(OP), "`history_size` is 0, expected 1 or more");
        check_parameter_list(&self.parameters)?;
        let first = &self.parameters[0];
        for p in &self.parameters {
            fail_if!(
                !matches!(p.dtype(), DType::F32 | DType::F64) || p.dtype() != first.dtype();
                dtype(OP, p.dtype()), "takes parameters that are all f32 or all f64"
            );
            first.check_same_device(OP, p)?;
        }
        Ok(())
    }

    fn numel(&self) -> usize {
        self.parameters.iter().map(Tensor::numel).sum()
    }

    /// Returns a flat copy of the parameters.
    fn flat_parameters(&self) -> Result<Tensor> {
        let flat = |p: &Tensor| p.detach().reshape([p.numel()]);
        Tensor::cat(&self.parameters.iter().map(flat).collect::<Result<Vec<_>>>()?, 0)
    }

    /// Copies a flat vector into the parameters.
    fn set_parameters(&self, flat: &Tensor) -> Result<()> {
        let mut start = 0;
        for p in &self.parameters {
            p.detach().copy_(&flat.narrow(0, start, p.numel())?.reshape(p.shape())?)?;
            start += p.numel();
        }
        Ok(())
    }

    /// Returns a flat copy of the gradients, zero where a parameter has none.
    fn flat_grad(&self) -> Result<Tensor> {
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        let flat = |(k, p): (usize, &Tensor)| match p.grad() {
            Some(grad) => {
                check_grad(OP, k, p, &grad)?;
                grad.detach().reshape([p.numel()])
            }
            None => Tensor::zeros([p.numel()], p.dtype(), p.device()),
        };
        let parts = self.parameters.iter().enumerate().map(flat).collect::<Result<Vec<_>>>()?;
        let grad = Tensor::cat(&parts, 0)?;
        if self.maximize { grad.neg() } else { Ok(grad) }
    }

    fn evaluate(&self, closure: Closure<'_>) -> Result<Evaluation> {
        let returned = {
            let _grad = autograd::enable_grad();
            closure()?
        };
        fail_if!(returned.numel() != 1; shape("step_with", [&returned]), "the closure returns a loss of one element");
        let (_no_grad, _no_autocast) = (autograd::no_grad(), amp::no_autocast());
        let loss = returned.item()?;
        let loss = if self.maximize { -loss } else { loss };
        Ok(Evaluation { loss, grad: self.flat_grad()?, returned: returned.detach() })
    }

    /// Returns the direction of the next iteration, and adds the last iteration to the history.
    fn next_direction(&self, state: &mut LbfgsState, grad: &Tensor) -> Result<Tensor> {
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        state.n_iter += 1;
        let Some(last) = &state.last else {
            state.h_diag = 1.0;
            return grad.neg();
        };
        let (grad_change, step) = (grad.sub(&last.grad)?, last.direction.mul(last.t)?);
        let [product, square] = read([&grad_change.dot(&step)?, &grad_change.dot(&grad_change)?])?;
        if product > MIN_CURVATURE {
            while state.history.len() >= self.history_size {
                state.history.pop_front();
            }
            state.history.push_back(CurvaturePair { grad_change, step, rho: 1.0 / product });
            state.h_diag = product / square;
        }
        let mut direction = grad.neg()?;
        let mut weights = Vec::with_capacity(state.history.len());
        for pair in state.history.iter().rev() {
            let weight = pair.step.dot(&direction)?.mul(pair.rho)?;
            direction = direction.sub(&pair.grad_change.mul(&weight)?)?;
            weights.push(weight);
        }
        direction = direction.mul(state.h_diag)?;
        for (pair, weight) in state.history.iter().zip(weights.iter().rev()) {
            let other = pair.grad_change.dot(&direction)?.mul(pair.rho)?;
            direction = direction.add(&pair.step.mul(&weight.sub(&other)?)?)?;
        }
        Ok(direction)
    }

    /// Runs the iterations of a step after its first evaluation.
    fn iterate(&self, state: &mut LbfgsState, first: Evaluation, closure: Closure<'_>) -> Result<()> {
        let (_no_grad, _no_autocast) = (autograd::no_grad(), amp::no_autocast());
        let Evaluation { mut loss, mut grad, .. } = first;
        if read([&largest(&grad)?])?[0] <= self.tolerance_grad {
            return Ok(());
        }
        let mut evaluations = 1;
        let max_evaluations = self.max_eval.unwrap_or(self.max_iter.saturating_mul(5) / 4);
        let mut position = self.flat_parameters()?;
        for iteration in 1..=self.max_iter {
            let direction = self.next_direction(state, &grad)?;
            let [size, slope, direction_max] =
                read([&grad.abs()?.sum_all()?, &grad.dot(&direction)?, &largest(&direction)?])?;
            let mut t = if state.n_iter == 1 { (1.0 / size).min(1.0) * self.lr } else { self.lr };
            let loss_before = loss;
            state.last = Some(LastIteration { direction: direction.clone(), t, grad: grad.clone(), loss });
            if slope > -self.tolerance_change {
                break;
            }
            let point_at = |t: f64| position.add(&direction.mul(t)?);
            let is_last = iteration == self.max_iter;
            let mut grad_max = f64::INFINITY;
            let mut count = 0;
            match self.line_search_fn {
                Some(LineSearch::StrongWolfe) => {
                    let start = LinePoint { t: 0.0, loss, grad: grad.clone(), slope };
                    let limits = LineLimits {
                        direction_max,
                        max_evaluations: max_evaluations.saturating_sub(evaluations),
                    };
                    let (end, evaluated) = strong_wolfe(&start, t, limits, |t| {
                        self.set_parameters(&point_at(t)?)?;
                        let Evaluation { loss, grad, .. } = self.evaluate(closure)?;
                        let slope = grad.dot(&direction)?.item()?;
                        Ok(LinePoint { t, loss, grad, slope })
                    })?;
                    position = point_at(end.t)?;
                    self.set_parameters(&position)?;
                    (t, loss, grad, count) = (end.t, end.loss, end.grad, evaluated);
                    grad_max = largest(&grad)?.item()?;
                }
                None => {
                    position = point_at(t)?;
                    self.set_parameters(&position)?;
                    // The loss after the last iteration is left to the next step.
                    if !is_last {
                        Evaluation { loss, grad, .. } = self.evaluate(closure)?;
                        count = 1;
                        grad_max = largest(&grad)?.item()?;
                    }
                }
            }
            if let Some(last) = &mut state.last {
                last.t = t;
            }
            evaluations += count;
            state.func_evals += count as u64;
            if is_last
                || evaluations >= max_evaluations
                || grad_max <= self.tolerance_grad
                || direction_max * t.abs() <= self.tolerance_change
                || (loss - loss_before).abs() < self.tolerance_change
            {
                break;
            }
        }
        Ok(())
    }
}

/// Returns the largest magnitude of the elements.
fn largest(t: &Tensor) -> Result<Tensor> {
    t.abs()?.max_all()
}

/// Reads scalars at once.
fn read<const N: usize>(scalars: [&Tensor; N]) -> Result<[f64; N]> {
    let values = Tensor::stack(&scalars, 0)?.to_f64s()?;
    Ok(std::array::from_fn(|k| values[k]))
}

impl Optimizer for Lbfgs {
    /// Fails, because a step evaluates the loss several times.
    fn step(&mut self) -> Result<()> {
        fail!(
            argument(OP),
            "a step evaluates the loss several times; call `step_with` and pass a closure that computes the loss \
             and its gradients, in a loop of your own"
        )
    }

    fn step_with(&mut self, closure: &mut dyn FnMut() -> Result<Tensor>) -> Result<Tensor> {
        self.check()?;
        let mut state = self.state.clone();
        let first = self.evaluate(closure)?;
        state.func_evals += 1;
        let returned = first.returned.clone();
        let before = self.flat_parameters()?;
        self.iterate(&mut state, first, closure).inspect_err(|_| {
            if let Err(error) = self.set_parameters(&before) {
                log::warn!("the parameters of a failed step could not be restored: {error}");
            }
        })?;
        self.state = state;
        if self.offloads_state {
            self.state
                .tensors()
                .try_for_each(Tensor::offload_)
                .unwrap_or_else(|error| warn_offload_failed(&error));
        }
        Ok(returned)
    }

    /// Keeps the state in host memory between steps. A step needs all of it on the device.
    fn offload_state(&mut self, on: bool) {
        self.offloads_state = on;
    }

    fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn state_dict(&self) -> Result<BTreeMap<String, Tensor>> {
        let LbfgsState { func_evals, n_iter, history, h_diag, last } = &self.state;
        let mut tensors = BTreeMap::new();
        let Some(device) = self.parameters.first().map(Tensor::device).filter(|_| *func_evals > 0) else {
            return Ok(tensors);
        };
        let count = |value: u64| Tensor::from_slice(&[value as i64], (), device);
        // A device without f64 stores the bits.
        let scalar = |value: f64| match device.info().features.f64 {
            true => Tensor::from_slice(&[value], (), device),
            false => Tensor::from_slice(&[value.to_bits() as i64], (), device),
        };
        let mut insert = |name: &str, tensor: Tensor| tensors.insert(format!("0.{name}"), tensor);
        insert("func_evals", count(*func_evals)?);
        insert("n_iter", count(*n_iter)?);
        if let Some(LastIteration { direction, t, grad, loss }) = last {
            insert("H_diag", scalar(*h_diag)?);
            insert("d", direction.clone());
            insert("t", scalar(*t)?);
            insert("prev_flat_grad", grad.clone());
            insert("prev_loss", scalar(*loss)?);
        }
        for (k, CurvaturePair { grad_change, step, rho }) in history.iter().enumerate() {
            insert(&format!("old_dirs.{k}"), grad_change.clone());
            insert(&format!("old_stps.{k}"), step.clone());
            insert(&format!("ro.{k}"), scalar(*rho)?);
        }
        Ok(tensors)
    }

    fn load_state_dict(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()> {
        self.check()?;
        let mut reader =
            StateReader { state, read: Vec::new(), parameter: &self.parameters[0], numel: self.numel() };
        let mut loaded = LbfgsState::default();
        if !state.is_empty() {
            loaded.func_evals = reader.count("func_evals")?;
            loaded.n_iter = reader.count("n_iter")?;
        }
        if loaded.n_iter > 0 {
            loaded.h_diag = reader.float("H_diag")?;
            loaded.last = Some(LastIteration {
                direction: reader.vector("d")?,
                t: reader.float("t")?,
                grad: reader.vector("prev_flat_grad")?,
                loss: reader.float("prev_loss")?,
            });
        }
        for k in (0..).take_while(|k| state.contains_key(&format!("0.old_dirs.{k}"))) {
            loaded.history.push_back(CurvaturePair {
                grad_change: reader.vector(&format!("old_dirs.{k}"))?,
                step: reader.vector(&format!("old_stps.{k}"))?,
                rho: reader.float(&format!("ro.{k}"))?,
            });
        }
        reader.finish()?;
        self.state = loaded;
        Ok(())
    }
}

/// Reads the entries of a state dict.
struct StateReader<'a> {
    state: &'a BTreeMap<String, Tensor>,
    /// Names that were read.
    read: Vec<String>,
    parameter: &'a Tensor,
    /// Elements of all parameters.
    numel: usize,
}

impl<'a> StateReader<'a> {
    const OP: &'static str = "load_state_dict";

    fn get(&mut self, name: &str) -> Result<&'a Tensor> {
        let name = format!("0.{name}");
        let found =
            self.state.get(&name).ok_or_else(|| Error::argument(Self::OP, format!("missing: {name}")));
        self.read.push(name);
        found
    }

    fn scalar(&mut self, name: &str) -> Result<f64> {
        let tensor = self.get(name)?;
        fail_if!(tensor.numel() != 1; shape(Self::OP, [tensor]), "0.{name} is one number");
        tensor.item()
    }

    /// Returns a float, which may be stored as its bits.
    fn float(&mut self, name: &str) -> Result<f64> {
        match self.get(name)?.to_scalar() {
            Ok(Scalar::Int(bits)) => Ok(f64::from_bits(bits as u64)),
            _ => self.scalar(name),
        }
    }

    fn count(&mut self, name: &str) -> Result<u64> {
        let value = self.scalar(name)?;
        fail_if!(value < 0.0 || value.fract() != 0.0 || !value.is_finite();
            argument(Self::OP), "`0.{name}` is {value}, expected a whole number of 0 or more");
        Ok(value as u64)
    }

    /// Copies a vector of one value for each element of the parameters.
    fn vector(&mut self, name: &str) -> Result<Tensor> {
        let tensor = self.get(name)?;
        fail_if!(tensor.shape() != [self.numel];
            shape(Self::OP, &[tensor.shape(), &[self.numel]]), "0.{name} has the elements of all parameters");
        fail_if!(!tensor.dtype().is_float();
            dtype(Self::OP, tensor.dtype()), "0.{name} is read from any float");
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        let moved = tensor.detach().to_device(self.parameter.device())?.to_dtype(self.parameter.dtype())?;
        if moved.shares_storage(tensor) { moved.copy() } else { Ok(moved) }
    }

    /// Fails for entries that were not read. PyTorch's `al` is a buffer of the recursion.
    fn finish(self) -> Result<()> {
        let is_known = |name: &String| self.read.contains(name) || name.starts_with("0.al");
        let unknown: Vec<&str> =
            self.state.keys().filter(|name| !is_known(name)).map(String::as_str).collect();
        fail_if!(!unknown.is_empty(); argument(Self::OP),
            "unexpected: {}; the state is of another optimiser, or of other parameters", printable(&unknown.join(", ")));
        Ok(())
    }
}

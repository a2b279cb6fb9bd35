//! Recurrent layers: one direction of one layer. The whole sequence is one autograd node.
//!
//! The input products of all steps are computed in advance. Each time step is then a product and one kernel, unless
//! the backend has a kernel for all steps ([`fused`]). The backward pass also has one product for each step, for the
//! state's gradient. The weights' gradients are one product over all steps.

use super::shape::stack;
pub use crate::backend::RecurrentKind;
use crate::ops::matmul::repeated_linear::RepeatedLinear;
use crate::ops::norm::{check_is_f64, norm_compute_dtype};
use crate::ops::prelude::*;

pub(crate) mod fused;

impl RecurrentKind {
    fn op_name(self) -> &'static str {
        match self {
            Self::Tanh => "rnn_tanh",
            Self::Relu => "rnn_relu",
            Self::Lstm => "lstm",
            Self::Gru => "gru",
        }
    }

    fn kernel_name(self) -> &'static str {
        self.op_name().trim_start_matches("rnn_")
    }
}

/// One direction of one layer over all time steps, as used by `Lstm` and similar modules.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::{RecurrentOp, RecurrentKind}, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
/// let (input, state, weight) = (zeros(&[10, 2, 3 * 8])?, zeros(&[2, 8])?, zeros(&[3 * 8, 8])?);
/// let states = RecurrentOp::new(RecurrentKind::Gru, &input, &state, &weight).run()?;
/// assert_eq!((states.output.shape(), states.h_n.shape()), (&[10, 2, 8][..], &[2, 8][..]));
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RecurrentOp<'a> {
    /// Cell type.
    pub kind: RecurrentKind,
    /// Products of the input with their bias: \[steps, batch, gates · hidden\].
    pub input_gates: &'a Tensor,
    /// Initial state, \[batch, hidden\]. For a single step, its width is that of the weight.
    pub h_0: &'a Tensor,
    /// Initial cell of an LSTM, \[batch, hidden\]; `None` for other types.
    pub c_0: Option<&'a Tensor>,
    /// Weight of the state: \[gates · hidden, width of the state\].
    pub weight_hh: &'a Tensor,
    /// Bias of the state's products: \[gates · hidden\].
    pub bias_hh: Option<&'a Tensor>,
    /// Length of each sequence in steps, \[batch\]: i32, at least 1.
    pub lengths: Option<&'a Tensor>,
    /// If true, runs from the last step to the first.
    pub reverse: bool,
}

/// Result of a [`RecurrentOp`].
#[derive(Clone, Debug)]
pub struct RecurrentOutput {
    /// State after each step: \[steps, batch, hidden\]. Ended sequences repeat their last state.
    pub output: Tensor,
    /// State after the last computed step: \[batch, hidden\].
    pub h_n: Tensor,
    /// Cell after the last computed step, of an LSTM.
    pub c_n: Option<Tensor>,
}

struct InitialGrads {
    h_0: Tensor,
    /// Gradient of an LSTM's initial cell.
    c_0: Option<Tensor>,
}

/// Forward run with the tensors that the backward pass needs.
struct RecurrentRun {
    kind: RecurrentKind,
    sizes: [usize; 3],
    reverse: bool,
    /// States including the initial one: \[steps + 1, ..\].
    states: Tensor,
    /// Gates and previous values, \[steps, batch, 5, hidden\], if there are gates and a gradient is required.
    saved_gates: Option<Tensor>,
    h_0: Tensor,
    weight_hh: Tensor,
    has_bias: bool,
    lengths: Option<Tensor>,
}

impl RecurrentRun {
    fn time_order(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let (steps, reverse) = (self.sizes[0], self.reverse);
        (0..steps).map(move |k| if reverse { steps - 1 - k } else { k })
    }

    /// Returns the index of the state after step `t`.
    fn state_slot(&self, t: usize) -> usize {
        if self.reverse { t } else { t + 1 }
    }

    /// Returns the states before each step: \[steps · batch, width\].
    fn previous_states(&self) -> Result<Tensor> {
        let [steps, batch, _] = self.sizes;
        // For a single step, the width may differ from that of the states.
        if steps == 1 {
            return Ok(self.h_0.clone());
        }
        self.states.narrow(0, usize::from(self.reverse), steps)?.reshape([steps * batch, self.h_0.shape()[1]])
    }

    fn spec(&self, pass: &'static str, t: &Tensor) -> KernelSpec {
        let name = |t: &Tensor| launch::shader_dtype_name(t.dtype(), t.device());
        kernel_spec! {
            "recurrent", kind: self.kind.kernel_name(), pass, dtype: name(t),
            keep: self.saved_gates.is_some(), lengths: self.lengths.as_ref().map_or("", name),
        }
    }

    /// Returns the first words of the kernel's parameters.
    fn params(&self, t: usize) -> KernelParams {
        let [_, batch, hidden] = self.sizes;
        kernel_params! { n: batch * hidden, hidden, step: t }
    }

    fn lengths_offset(&self) -> usize {
        self.lengths.as_ref().map_or(0, |t| t.layout().offset())
    }

    /// Runs all steps. `running` holds the state and cell in the compute dtype, and is updated in place.
    fn forward(&self, input: &Tensor, bias: Option<&Tensor>, running: &Tensor) -> Result<()> {
        let [_, batch, hidden] = self.sizes;
        let spec = self.spec("forward", input);
        let mut state = self.h_0.clone();
        let mut layer = RepeatedLinear::new(&self.weight_hh, bias, self.sizes[0]);
        for t in self.time_order() {
            let product = layer.forward(&state)?;
            let out = self.state_slot(t) * batch * hidden + self.states.layout().offset();
            let params = kernel_params! {
                ..self.params(t); input_offset: input.layout().offset() + t * input.strides()[0],
                input_stride: input.strides()[1], carry_offset: product.layout().offset(), out_offset: out,
                saved_offset: t * batch * hidden * 5, lengths_offset: self.lengths_offset(), gates_offset: 0usize,
            };
            let bound = bindings![input, &product, running, &self.states, &self.saved_gates, &self.lengths];
            launch::launch(&spec, &bound, params, (batch * hidden).div_ceil(WORKGROUP_SIZE))?;
            state = self.states.select(0, self.state_slot(t) as isize)?;
        }
        Ok(())
    }

    /// Writes the initial state, the states of all steps and an LSTM's last cell to `states`, without a history.
    /// `state_width` is the number of features of `h_0`.
    fn compute_states(&self, input: &Tensor, of: &RecurrentOp<'_>, state_width: usize) -> Result<()> {
        let ([steps, batch, hidden], dtype) = (self.sizes, input.dtype());
        let _no_grad = autograd::no_grad();
        if self.try_fused_forward(input, of)? {
            return Ok(());
        }
        let running = {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            let zeros = || Tensor::zeros([batch, hidden], dtype, input.device());
            let state = if state_width == hidden { self.h_0.clone() } else { zeros()? };
            let cell = of.c_0.map_or_else(zeros, |cell| Ok(cell.detach()))?;
            stack(&[&state, &cell], 0)?.to_dtype(norm_compute_dtype(dtype))?.contiguous()?
        };
        if state_width == hidden {
            let first = if self.reverse { steps } else { 0 };
            self.states.select(0, first as isize)?.copy_(&self.h_0)?;
        }
        self.forward(input, of.bias_hh.map(Tensor::detach).as_ref(), &running)?;
        if self.kind == RecurrentKind::Lstm {
            self.states.select(0, steps as isize + 1)?.copy_(&running.select(0, 1)?)?;
        }
        Ok(())
    }

    /// Computes the gradients of input, state, weight, bias and cell from the gradients of the states.
    fn backward(&self, g: &Tensor, needs_input_grad: &[bool]) -> Result<InputGrads> {
        let [steps, batch, hidden] = self.sizes;
        let op = self.kind.op_name();
        let g = g.contiguous()?;
        let wide = self.kind.gate_count() * hidden;
        let empty = |shape: &[usize]| Tensor::empty(shape, g.dtype(), g.device());
        let gates = empty(&[steps, batch, wide])?;
        // Gradient of the state's products, which differs from that of the input's products for a GRU only.
        let inner = (self.kind == RecurrentKind::Gru).then(|| empty(&[steps, batch, wide])).transpose()?;
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        let InitialGrads { h_0, c_0 } = match self.try_fused_backward(&g, &gates, inner.as_ref())? {
            Some(grads) => grads,
            None => self.backward_steps(&g, &gates, inner.as_ref())?,
        };
        let flat = inner.as_ref().unwrap_or(&gates).reshape([steps * batch, wide])?;
        let weight = needs_input_grad[2].then(|| flat.t()?.mm(&self.previous_states()?)).transpose()?;
        let mut grads: InputGrads = smallvec![Some(gates.clone()), Some(h_0), weight];
        if self.has_bias {
            grads.push(needs_input_grad[3].then(|| flat.sum([0], false)).transpose()?);
        }
        grads.extend(c_0.map(Some));
        debug_assert_eq!(grads.len(), needs_input_grad.len(), "{op}");
        Ok(grads)
    }

    /// Writes the gradients of the gates step by step, and returns those of the initial values.
    fn backward_steps(&self, g: &Tensor, gates: &Tensor, inner: Option<&Tensor>) -> Result<InitialGrads> {
        let [steps, batch, hidden] = self.sizes;
        let (plane, wide) = (batch * hidden, self.kind.gate_count() * hidden);
        // A layer without gates needs only its states.
        let saved = self.saved_gates.as_ref().unwrap_or(&self.states);
        let running = Tensor::zeros([2, batch, hidden], norm_compute_dtype(g.dtype()), g.device())?;
        let is_lstm = self.kind == RecurrentKind::Lstm;
        if is_lstm {
            running.select(0, 1)?.copy_(&g.select(0, steps as isize + 1)?)?;
        }
        let mut state_grad = Tensor::zeros([batch, hidden], g.dtype(), g.device())?;
        let spec = self.spec("backward", g);
        for t in self.time_order().rev() {
            let saved_start =
                if self.saved_gates.is_some() { t * plane * 5 } else { self.state_slot(t) * plane };
            let params = kernel_params! {
                ..self.params(t); input_offset: g.layout().offset() + self.state_slot(t) * plane,
                input_stride: 0usize, carry_offset: state_grad.layout().offset(), out_offset: 0usize,
                saved_offset: saved.layout().offset() + saved_start, lengths_offset: self.lengths_offset(),
                gates_offset: t * batch * wide,
            };
            let bound = bindings![g, &state_grad, &running, saved, gates, inner, &self.lengths];
            launch::launch(&spec, &bound, params, plane.div_ceil(WORKGROUP_SIZE))?;
            drop(bound);
            state_grad = inner.unwrap_or(gates).select(0, t as isize)?.mm(&self.weight_hh)?.contiguous()?;
        }
        let running_grad = |k: isize| running.select(0, k)?.to_dtype(g.dtype());
        // A state of another width contributes through products only.
        let h_0 = if state_grad.shape() == [batch, hidden] {
            state_grad.add(&running_grad(0)?)?
        } else {
            state_grad
        };
        Ok(InitialGrads { h_0, c_0: is_lstm.then(|| running_grad(1)).transpose()? })
    }
}

/// Attaches the history of a sum to the known value of its gate. The sum's values are not read.
fn attach_gate_grad(
    op: &'static str,
    sum: &Tensor,
    value: Tensor,
    slope: fn(&Tensor) -> Result<Tensor>,
) -> Tensor {
    let saved = SavedTensor::output(&value);
    autograd::differentiable_unary(op, value, sum, move |g, ctx| g.mul(&slope(&saved.unpack(ctx)?)?))
}

fn sigmoid_derivative(y: &Tensor) -> Result<Tensor> {
    y.sub(&y.square()?)
}

fn tanh_derivative(y: &Tensor) -> Result<Tensor> {
    y.square()?.neg()?.add(1.0)
}

fn relu_derivative(y: &Tensor) -> Result<Tensor> {
    y.detach().gt(0.0)?.to_dtype(y.dtype())
}

/// Recomputation of the states for gradients of gradients, by differentiable operations on saved tensors.
/// Uses only the history of the input, whose values were not saved.
impl RecurrentRun {
    fn recompute(&self, t: &[Tensor]) -> Result<Tensor> {
        let ([steps, batch, hidden], op) = (self.sizes, self.kind.op_name());
        let (Some((input, rest)), Some(states)) = (t.split_first(), t.last()) else {
            fail!(argument(op), "has no inputs")
        };
        let (first, weight) = (&rest[0], &rest[1]);
        let bias = self.has_bias.then(|| &rest[2]);
        let is_lstm = self.kind == RecurrentKind::Lstm;
        let mut cell = is_lstm.then(|| rest[2 + usize::from(self.has_bias)].clone());
        let mut product_input = first.clone();
        let mut state = match first.shape()[1] == hidden {
            true => first.clone(),
            false => Tensor::zeros([batch, hidden], first.dtype(), first.device())?,
        };
        let mut slots = vec![state.clone(); steps + 1];
        for time in self.time_order() {
            let ended = self.lengths.as_ref().map(|lengths| lengths.le(time as i64)?.unsqueeze(1));
            let ended = ended.transpose()?;
            // Steps after a sequence's end were not written.
            let mask_ended = |t: Tensor| match &ended {
                Some(ended) => t.detach().masked_fill(ended, 0.0),
                None => Ok(t.detach()),
            };
            let value = |k: isize| match &self.saved_gates {
                Some(saved) => mask_ended(saved.select(0, time as isize)?.select(1, k)?),
                None => mask_ended(states.select(0, self.state_slot(time) as isize)?),
            };
            let (gates, product) = (input.select(0, time as isize)?, product_input.linear(weight, bias)?);
            let part = |t: &Tensor, k: usize| t.narrow(1, k * hidden, hidden);
            let sum = |k: usize| part(&gates, k)?.add(&part(&product, k)?);
            let sigmoid = |k: usize| -> Result<Tensor> {
                Ok(attach_gate_grad(op, &sum(k)?, value(k as isize)?, sigmoid_derivative))
            };
            let keep = |before: &Tensor, new: Tensor| match &ended {
                Some(ended) => before.where_(ended, &new),
                None => Ok(new),
            };
            let new = match (self.kind, cell.clone()) {
                (RecurrentKind::Lstm, Some(before)) => {
                    let candidate = attach_gate_grad(op, &sum(2)?, value(2)?, tanh_derivative);
                    let next_cell = sigmoid(1)?.mul(&before)?.add(&sigmoid(0)?.mul(&candidate)?)?;
                    let new = sigmoid(3)?.mul(&next_cell.tanh()?)?;
                    cell = Some(keep(&before, next_cell)?);
                    new
                }
                (RecurrentKind::Gru, _) => {
                    let candidate_sum = part(&gates, 2)?.add(&sigmoid(0)?.mul(&part(&product, 2)?)?)?;
                    let candidate = attach_gate_grad(op, &candidate_sum, value(2)?, tanh_derivative);
                    candidate.add(&sigmoid(1)?.mul(&state.sub(&candidate)?)?)?
                }
                (RecurrentKind::Relu, _) => attach_gate_grad(op, &sum(0)?, value(0)?, relu_derivative),
                _ => attach_gate_grad(op, &sum(0)?, value(0)?, tanh_derivative),
            };
            state = keep(&state, new)?;
            slots[self.state_slot(time)] = state.clone();
            product_input = state.clone();
        }
        slots.extend(cell);
        stack(&slots, 0)
    }
}

/// Extents of a checked [`RecurrentOp`].
struct RecurrentSizes {
    steps: usize,
    batch: usize,
    /// Features of all gates together.
    gate_width: usize,
    /// Features of a gate, and of the states that the steps write.
    hidden: usize,
    /// Features of the initial state; differs from `hidden` in a single step with a projected state.
    state_width: usize,
}

impl RecurrentOp<'_> {
    /// Fails for operands that do not fit each other; returns their extents.
    fn check(&self) -> Result<RecurrentSizes> {
        let op = self.kind.op_name();
        check_is_f64(op, self.input_gates)?;
        let dtype = self.input_gates.dtype();
        for t in [Some(self.h_0), self.c_0, Some(self.weight_hh), self.bias_hh].into_iter().flatten() {
            self.input_gates.check_same_device(op, t)?;
            fail_if!(t.dtype() != dtype; dtype(op, t.dtype()), "the input is {dtype}; cast one with `to_dtype`");
        }
        let &[steps, batch, gate_width] = self.input_gates.shape() else {
            fail!(shape(op, [self.input_gates]), "takes [steps, batch, features]")
        };
        let hidden = gate_width / self.kind.gate_count();
        let state_width = self.weight_hh.shape().last().copied().unwrap_or_default();
        let fits = |t: &Tensor, width: usize| t.shape() == [batch, width];
        if self.weight_hh.shape() != [gate_width, state_width]
            || !fits(self.h_0, state_width)
            || !self.c_0.is_none_or(|cell| fits(cell, hidden))
            || (state_width != hidden && steps != 1)
        {
            let cell = self.c_0.map_or(&[][..], Tensor::shape);
            let shapes = [self.input_gates.shape(), self.h_0.shape(), cell, self.weight_hh.shape()];
            fail!(shape(op, &shapes), "the states are [batch, hidden] and go with input and weight")
        }
        let is_lstm = self.kind == RecurrentKind::Lstm;
        fail_if!(is_lstm != self.c_0.is_some(); argument(op), "an LSTM takes a cell, and the others take none");
        if let Some(lengths) = self.lengths
            && (lengths.shape() != [batch] || lengths.dtype() != DType::I32)
        {
            fail!(shape(op, [lengths]), "lengths are i32, [{batch}]; these are {}", lengths.dtype())
        }
        Ok(RecurrentSizes { steps, batch, gate_width, hidden, state_width })
    }
}

impl<'a> RecurrentOp<'a> {
    /// Creates a forward-time run without cell, bias and lengths.
    #[must_use]
    pub fn new(kind: RecurrentKind, input_gates: &'a Tensor, h_0: &'a Tensor, weight_hh: &'a Tensor) -> Self {
        Self { kind, input_gates, h_0, c_0: None, weight_hh, bias_hh: None, lengths: None, reverse: false }
    }

    /// Runs all steps.
    ///
    /// # Errors
    /// The shapes or `c_0` do not fit, or the types differ or are not floats of 16 bits or more.
    #[track_caller]
    pub fn run(&self) -> Result<RecurrentOutput> {
        operation!(self.kind.op_name());
        run_recurrent(self)
    }
}

fn run_recurrent(of: &RecurrentOp<'_>) -> Result<RecurrentOutput> {
    let op = of.kind.op_name();
    dispatch_autocast!(op, [of.input_gates, of.h_0, of.c_0, of.weight_hh, of.bias_hh], |x, h, c, w, b| {
        let (input_gates, h_0, c_0, weight_hh, bias_hh) = (&x, &h, c.as_ref(), &w, b.as_ref());
        run_recurrent(&RecurrentOp { input_gates, h_0, c_0, weight_hh, bias_hh, ..*of })
    });
    let RecurrentSizes { steps, batch, gate_width, hidden, state_width } = of.check()?;
    let (device, dtype) = (of.input_gates.device(), of.input_gates.dtype());
    let is_lstm = of.kind == RecurrentKind::Lstm;
    let order: SmallVec<[&Tensor; 5]> =
        [Some(of.input_gates), Some(of.h_0), Some(of.weight_hh), of.bias_hh, of.c_0]
            .into_iter()
            .flatten()
            .collect();
    let keeps = autograd::compute_requires_grad(&order);
    let input = match of.input_gates.detach() {
        t if t.strides()[2] == 1 || gate_width == 1 => t,
        t => t.contiguous()?,
    };
    let slots = steps + 1 + usize::from(is_lstm);
    let run = RecurrentRun {
        kind: of.kind,
        sizes: [steps, batch, hidden],
        reverse: of.reverse,
        states: Tensor::empty([slots, batch, hidden], dtype, device)?,
        saved_gates: (keeps && of.kind.gate_count() > 1)
            .then(|| Tensor::empty([steps, batch, 5, hidden], dtype, device))
            .transpose()?,
        h_0: of.h_0.detach(),
        weight_hh: of.weight_hh.detach(),
        has_bias: of.bias_hh.is_some(),
        lengths: of.lengths.map(|t| t.detach().contiguous()).transpose()?,
    };
    run.compute_states(&input, of, state_width)?;
    let (from, last) = if of.reverse { (0, 0) } else { (1, steps) };
    let states = run.states.clone();
    let states = match keeps {
        false => states,
        true => {
            // This tensor has the input's history but not its memory: it is a view that repeats one element.
            let one_element =
                Layout::new(of.input_gates.shape(), &[0; 3][..], run.weight_hh.layout().offset());
            let history =
                run.weight_hh.with_layout(one_element).detach().with_grad_edge(of.input_gates.grad_edge());
            let mut saved: SmallVec<[SavedTensor; 4]> =
                [&history, of.h_0, of.weight_hh].map(SavedTensor::input).into_iter().collect();
            // Only `create_graph` reads these.
            saved.extend([of.bias_hh, of.c_0].into_iter().flatten().map(SavedTensor::input_for_create_graph));
            saved.extend(run.lengths.as_ref().map(SavedTensor::input));
            saved.push(SavedTensor::output(&states));
            let run = Arc::new(run);
            let composite_run = run.clone();
            let composed = move |t: &[Tensor]| composite_run.recompute(t);
            autograd::composite_differentiable(op, states, &order, saved, composed, move |g, ctx| {
                run.backward(g, &ctx.needs_input_grad)
            })
        }
    };
    Ok(RecurrentOutput {
        output: states.narrow(0, from, steps)?,
        h_n: states.select(0, last as isize)?,
        c_n: if is_lstm { Some(states.select(0, steps as isize + 1)?) } else { None },
    })
}

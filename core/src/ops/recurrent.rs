//! Recurrent layers, one direction of one layer: a product and one kernel for each time step, and one node on the tape for the
//! whole sequence.
//!
//! The products of the input are made before, for all steps at once. Backward there is one product a step too, for the state's
//! gradient; the weights' gradients are one product over all steps.

use std::sync::Arc;

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::launch::{self, GROUP, Params};
use super::shape::stack;
use super::softmax::check_float;
use crate::amp::recast;
use crate::autograd::{self, Grads, SavedTensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{self, Tag};
use crate::tensor::{Layout, Tensor};

/// What a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecurrentKind {
    /// tanh of the sum.
    Tanh,
    /// The positive part of the sum.
    Relu,
    /// Input, forget, cell and output gates (Hochreiter and Schmidhuber, 1997; PyTorch's order).
    Lstm,
    /// Reset, update and new gates (Cho et al., 2014; PyTorch's order, with the reset gate behind the product).
    Gru,
}

impl RecurrentKind {
    /// Rows of a weight for each hidden feature.
    #[must_use]
    pub fn gates(self) -> usize {
        match self {
            Self::Tanh | Self::Relu => 1,
            Self::Lstm => 4,
            Self::Gru => 3,
        }
    }

    /// PyTorch's name of the operation.
    fn op(self) -> &'static str {
        match self {
            Self::Tanh => "rnn_tanh",
            Self::Relu => "rnn_relu",
            Self::Lstm => "lstm",
            Self::Gru => "gru",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tanh => "tanh",
            Self::Relu => "relu",
            Self::Lstm => "lstm",
            Self::Gru => "gru",
        }
    }
}

/// One direction of one layer over all time steps, for layers of one's own; [`Lstm`](crate::nn::Lstm) and its like are made of these.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::{Recurrent, RecurrentKind}, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
/// let (input, state, weight) = (zeros(&[10, 2, 3 * 8])?, zeros(&[2, 8])?, zeros(&[3 * 8, 8])?);
/// let states = Recurrent::new(RecurrentKind::Gru, &input, &state, &weight).run()?;
/// assert_eq!((states.all.shape(), states.last.shape()), (&[10, 2, 8][..], &[2, 8][..]));
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Recurrent<'a> {
    /// What a step computes.
    pub kind: RecurrentKind,
    /// Products of the input, with their bias: \[steps, batch, gates · hidden\].
    pub input: &'a Tensor,
    /// The first state, \[batch, hidden\]; of a single step, as wide as the weight says.
    pub state: &'a Tensor,
    /// The first cell, \[batch, hidden\]: for an LSTM, and no other.
    pub cell: Option<&'a Tensor>,
    /// Of the state: \[gates · hidden, width of the state\].
    pub weight: &'a Tensor,
    /// Of the state's products: \[gates · hidden\].
    pub bias: Option<&'a Tensor>,
    /// After how many steps each sequence ends, \[batch\]: i32, at least 1.
    pub lengths: Option<&'a Tensor>,
    /// From the last step to the first.
    pub reverse: bool,
}

/// What a [`Recurrent`] makes.
#[derive(Clone, Debug)]
pub struct States {
    /// After each step, in the order of time: \[steps, batch, hidden\]. A sequence that has ended repeats its last.
    pub all: Tensor,
    /// After the step that was made last: \[batch, hidden\].
    pub last: Tensor,
    /// The cell then, of an LSTM.
    pub cell: Option<Tensor>,
}

/// A run that may have to be walked back.
struct Run {
    kind: RecurrentKind,
    sizes: [usize; 3],
    reverse: bool,
    /// The states, with the first one: \[steps + 1, ..\].
    states: Tensor,
    /// Gates and what was before, \[steps, batch, 5, hidden\], where there are gates and a gradient is wanted.
    saved: Option<Tensor>,
    state: Tensor,
    weight: Tensor,
    bias: bool,
    lengths: Option<Tensor>,
}

impl Run {
    /// The time steps in the order in which they are made.
    fn order(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let (steps, reverse) = (self.sizes[0], self.reverse);
        (0..steps).map(move |k| if reverse { steps - 1 - k } else { k })
    }

    /// Where the state after step `t` stands.
    fn slot(&self, t: usize) -> usize {
        if self.reverse { t } else { t + 1 }
    }

    /// The states before each step: \[steps · batch, width\].
    fn before(&self) -> Result<Tensor> {
        let [steps, batch, _] = self.sizes;
        // Of a single step it may be of another width than the states.
        if steps == 1 {
            return Ok(self.state.clone());
        }
        self.states
            .narrow(0, usize::from(self.reverse), steps)?
            .reshape([steps * batch, self.state.shape()[1]])
    }

    fn spec(&self, pass: &'static str, t: &Tensor) -> KernelSpec {
        let name = |t: &Tensor| launch::shader_dtype(t.dtype(), t.device());
        KernelSpec::new("recurrent")
            .def("kind", self.kind.name())
            .def("pass", pass)
            .def("dtype", name(t))
            .def("keep", self.saved.is_some())
            .def("lengths", self.lengths.as_ref().map_or("", name))
    }

    /// The first words of the kernel's parameters.
    fn params(&self, t: usize) -> Params {
        let [_, batch, hidden] = self.sizes;
        Params::new().size(batch * hidden).size(hidden).size(t)
    }

    fn lengths_offset(&self) -> usize {
        self.lengths.as_ref().map_or(0, |t| t.layout().offset())
    }

    /// All steps: `running` is the state and the cell, in f32, and is changed.
    fn forward(&self, input: &Tensor, bias: Option<&Tensor>, running: &Tensor) -> Result<()> {
        let [_, batch, hidden] = self.sizes;
        let spec = self.spec("forward", input);
        let mut state = self.state.clone();
        for t in self.order() {
            let fed = state.linear(&self.weight, bias)?.contiguous()?;
            let out = self.slot(t) * batch * hidden + self.states.layout().offset();
            let params = self.params(t).size(input.layout().offset() + t * input.strides()[0]);
            let params = params.size(input.strides()[1]).size(fed.layout().offset()).size(out);
            let params = params.size(t * batch * hidden * 5).size(self.lengths_offset()).size(0);
            let bound: SmallVec<[&Tensor; 6]> = [Some(input), Some(&fed), Some(running), Some(&self.states)]
                .into_iter()
                .chain([self.saved.as_ref(), self.lengths.as_ref()])
                .flatten()
                .collect();
            launch::launch(&spec, &bound, params, (batch * hidden).div_ceil(GROUP))?;
            state = self.states.select(0, self.slot(t) as isize)?;
        }
        Ok(())
    }

    /// The gradients of input, state, weight, bias and cell, from those of the states.
    fn backward(&self, g: &Tensor, wants: &[bool]) -> Result<Grads> {
        let [steps, batch, hidden] = self.sizes;
        let (op, plane) = (self.kind.op(), batch * hidden);
        // A plain layer's own states are all it needs.
        let saved = self.saved.as_ref().unwrap_or(&self.states);
        let g = g.contiguous()?;
        let wide = self.kind.gates() * hidden;
        let empty = |shape: &[usize]| Tensor::empty(shape, g.dtype(), g.device());
        let gates = empty(&[steps, batch, wide])?;
        // What the state's products get; for a GRU not what the input's get.
        let inner = match self.kind {
            RecurrentKind::Gru => Some(empty(&[steps, batch, wide])?),
            _ => None,
        };
        let _tag = memory::scope::tag(Tag::Workspace);
        let running = Tensor::zeros(&[2, batch, hidden], DType::F32, g.device())?;
        let is_lstm = self.kind == RecurrentKind::Lstm;
        if is_lstm {
            running.select(0, 1)?.copy_(&g.select(0, steps as isize + 1)?)?;
        }
        let mut carry = Tensor::zeros(&[batch, hidden], g.dtype(), g.device())?;
        let spec = self.spec("backward", &g);
        for t in self.order().rev() {
            let params = self.params(t).size(g.layout().offset() + self.slot(t) * plane).size(0);
            let params = params.size(carry.layout().offset()).size(0);
            let kept = if self.saved.is_some() { t * plane * 5 } else { self.slot(t) * plane };
            let params = params.size(saved.layout().offset() + kept).size(self.lengths_offset());
            let params = params.size(t * batch * wide);
            {
                let bound: SmallVec<[&Tensor; 7]> =
                    [Some(&g), Some(&carry), Some(&running), Some(saved), Some(&gates)]
                        .into_iter()
                        .chain([inner.as_ref(), self.lengths.as_ref()])
                        .flatten()
                        .collect();
                launch::launch(&spec, &bound, params, plane.div_ceil(GROUP))?;
            }
            carry = inner.as_ref().unwrap_or(&gates).select(0, t as isize)?.mm(&self.weight)?.contiguous()?;
        }
        let flat = inner.as_ref().unwrap_or(&gates).reshape([steps * batch, wide])?;
        let past = |k: isize| running.select(0, k)?.to_dtype(g.dtype());
        // A state of another width than the hidden one has products alone.
        let state = if carry.shape() == [batch, hidden] { carry.add(&past(0)?)? } else { carry };
        let weight = if wants[2] { Some(flat.t()?.mm(&self.before()?)?) } else { None };
        let mut grads: Grads = SmallVec::new();
        grads.extend([Some(gates.clone()), Some(state), weight]);
        if self.bias {
            grads.push(if wants[3] { Some(flat.sum(&[0], false)?) } else { None });
        }
        if is_lstm {
            grads.push(Some(past(1)?));
        }
        debug_assert_eq!(grads.len(), wants.len(), "{op}");
        Ok(grads)
    }
}

/// A gate whose value is known, with the history of the sum that it is taken of: nobody reads that sum.
fn gate(op: &'static str, sum: &Tensor, value: Tensor, slope: fn(&Tensor) -> Result<Tensor>) -> Tensor {
    let kept = SavedTensor::result(&value);
    autograd::attach_twice(op, value, &[sum], move |g, wants| {
        Ok(smallvec![Some(g.mul(&slope(&kept.get(wants)?)?)?)])
    })
}

fn slope_of_sigmoid(y: &Tensor) -> Result<Tensor> {
    y.sub(&y.square()?)
}

fn slope_of_tanh(y: &Tensor) -> Result<Tensor> {
    y.square()?.neg()?.add(1.0)
}

fn slope_of_relu(y: &Tensor) -> Result<Tensor> {
    y.detach().gt(0.0)?.to_dtype(y.dtype())
}

/// For gradients of gradients: the states once more, of differentiable operations on what was kept. Of the input, which was not, only the
/// history is used.
impl Run {
    fn again(&self, t: &[Tensor]) -> Result<Tensor> {
        let ([steps, batch, hidden], op) = (self.sizes, self.kind.op());
        let (Some((input, rest)), Some(states)) = (t.split_first(), t.last()) else {
            return Err(Error::argument(op, "has no inputs"));
        };
        let (first, weight) = (&rest[0], &rest[1]);
        let bias = self.bias.then(|| &rest[2]);
        let mut cell = match self.kind {
            RecurrentKind::Lstm => Some(rest[2 + usize::from(self.bias)].clone()),
            _ => None,
        };
        let mut fed_by = first.clone();
        let mut state = match first.shape()[1] == hidden {
            true => first.clone(),
            false => Tensor::zeros(&[batch, hidden], first.dtype(), first.device())?,
        };
        let mut slots = vec![state.clone(); steps + 1];
        for time in self.order() {
            let ended = match &self.lengths {
                Some(lengths) => Some(lengths.le(time as i64)?.unsqueeze(1)?),
                None => None,
            };
            // What has ended was not written.
            let known = |t: Tensor| match &ended {
                Some(ended) => t.detach().masked_fill(ended, 0.0),
                None => Ok(t.detach()),
            };
            let value = |k: isize| match &self.saved {
                Some(saved) => known(saved.select(0, time as isize)?.select(1, k)?),
                None => known(states.select(0, self.slot(time) as isize)?),
            };
            let (given, fed) = (input.select(0, time as isize)?, fed_by.linear(weight, bias)?);
            let part = |t: &Tensor, k: usize| t.narrow(1, k * hidden, hidden);
            let sum = |k: usize| part(&given, k)?.add(&part(&fed, k)?);
            let sigmoid =
                |k: usize| -> Result<Tensor> { Ok(gate(op, &sum(k)?, value(k as isize)?, slope_of_sigmoid)) };
            let keep = |before: &Tensor, now: Tensor| match &ended {
                Some(ended) => before.where_(ended, &now),
                None => Ok(now),
            };
            let now = match (self.kind, cell.clone()) {
                (RecurrentKind::Lstm, Some(before)) => {
                    let fresh = gate(op, &sum(2)?, value(2)?, slope_of_tanh);
                    let inside = sigmoid(1)?.mul(&before)?.add(&sigmoid(0)?.mul(&fresh)?)?;
                    let now = sigmoid(3)?.mul(&inside.tanh()?)?;
                    cell = Some(keep(&before, inside)?);
                    now
                }
                (RecurrentKind::Gru, _) => {
                    let inside = part(&given, 2)?.add(&sigmoid(0)?.mul(&part(&fed, 2)?)?)?;
                    let fresh = gate(op, &inside, value(2)?, slope_of_tanh);
                    fresh.add(&sigmoid(1)?.mul(&state.sub(&fresh)?)?)?
                }
                (RecurrentKind::Relu, _) => gate(op, &sum(0)?, value(0)?, slope_of_relu),
                _ => gate(op, &sum(0)?, value(0)?, slope_of_tanh),
            };
            state = keep(&state, now)?;
            slots[self.slot(time)] = state.clone();
            fed_by = state.clone();
        }
        slots.extend(cell);
        stack(&slots.iter().collect::<Vec<_>>(), 0)
    }
}

impl<'a> Recurrent<'a> {
    /// From the first step to the last, without a cell, a bias and lengths.
    #[must_use]
    pub fn new(kind: RecurrentKind, input: &'a Tensor, state: &'a Tensor, weight: &'a Tensor) -> Self {
        Self { kind, input, state, cell: None, weight, bias: None, lengths: None, reverse: false }
    }

    /// Makes the steps.
    ///
    /// # Errors
    /// The shapes do not fit, the types differ or are no 16- or 32-bit floats; a cell is missing or too many; memory runs out.
    #[track_caller]
    pub fn run(&self) -> Result<States> {
        let _op = memory::scope::op(self.kind.op());
        recurrent(self)
    }
}

fn recurrent(of: &Recurrent<'_>) -> Result<States> {
    let op = of.kind.op();
    recast!(op, [of.input, of.state, of.cell, of.weight, of.bias], |input, state, cell, weight, bias| {
        recurrent(&Recurrent {
            input: &input,
            state: &state,
            cell: cell.as_ref(),
            weight: &weight,
            bias: bias.as_ref(),
            ..*of
        })
    });
    check_float(op, of.input)?;
    let (device, dtype) = (of.input.device(), of.input.dtype());
    for t in [Some(of.state), of.cell, Some(of.weight), of.bias].into_iter().flatten() {
        of.input.same_device(op, t)?;
        if t.dtype() != dtype {
            let expected = format!("the input is {dtype}; cast one with `to_dtype`");
            return Err(Error::dtype(op, t.dtype(), expected));
        }
    }
    let &[steps, batch, wide] = of.input.shape() else {
        return Err(Error::shape(op, "takes [steps, batch, features]", &[of.input.shape()]));
    };
    let hidden = wide / of.kind.gates();
    let width = of.weight.shape().last().copied().unwrap_or_default();
    let fits = |t: &Tensor, width: usize| t.shape() == [batch, width];
    if of.weight.shape() != [wide, width]
        || !fits(of.state, width)
        || !of.cell.is_none_or(|cell| fits(cell, hidden))
        || (width != hidden && steps != 1)
    {
        let cell = of.cell.map_or(&[][..], Tensor::shape);
        let shapes = [of.input.shape(), of.state.shape(), cell, of.weight.shape()];
        return Err(Error::shape(op, "the states are [batch, hidden] and go with input and weight", &shapes));
    }
    let is_lstm = of.kind == RecurrentKind::Lstm;
    if is_lstm != of.cell.is_some() {
        return Err(Error::argument(op, "an LSTM takes a cell, and the others take none"));
    }
    if let Some(lengths) = of.lengths
        && (lengths.shape() != [batch] || lengths.dtype() != DType::I32)
    {
        let rule = format!("lengths are i32, [{batch}]; these are {}", lengths.dtype());
        return Err(Error::shape(op, rule, &[lengths.shape()]));
    }
    let order: SmallVec<[&Tensor; 5]> =
        [Some(of.input), Some(of.state), Some(of.weight), of.bias, of.cell].into_iter().flatten().collect();
    let keeps = autograd::wanted(&order);
    let input = match of.input.detach() {
        t if t.strides()[2] == 1 || wide == 1 => t,
        t => t.contiguous()?,
    };
    let slots = steps + 1 + usize::from(is_lstm);
    let run = Run {
        kind: of.kind,
        sizes: [steps, batch, hidden],
        reverse: of.reverse,
        states: Tensor::empty(&[slots, batch, hidden], dtype, device)?,
        saved: (keeps && of.kind.gates() > 1)
            .then(|| Tensor::empty(&[steps, batch, 5, hidden], dtype, device))
            .transpose()?,
        state: of.state.detach(),
        weight: of.weight.detach(),
        bias: of.bias.is_some(),
        lengths: of.lengths.map(|t| t.detach().contiguous()).transpose()?,
    };
    {
        let _no_grad = autograd::no_grad();
        let running = {
            let _tag = memory::scope::tag(Tag::Workspace);
            let zeros = || Tensor::zeros(&[batch, hidden], dtype, device);
            let state = if width == hidden { run.state.clone() } else { zeros()? };
            let cell = of.cell.map_or_else(zeros, |cell| Ok(cell.detach()))?;
            stack(&[&state, &cell], 0)?.to_dtype(DType::F32)?.contiguous()?
        };
        if width == hidden {
            let first = if of.reverse { steps } else { 0 };
            run.states.select(0, first as isize)?.copy_(&run.state)?;
        }
        run.forward(&input, of.bias.map(Tensor::detach).as_ref(), &running)?;
        if is_lstm {
            run.states.select(0, steps as isize + 1)?.copy_(&running.select(0, 1)?)?;
        }
    }
    let (from, last) = if of.reverse { (0, 0) } else { (1, steps) };
    let states = run.states.clone();
    let states = match keeps {
        false => states,
        true => {
            // The history of the input, without its memory: any number of its type in all places.
            let nowhere = Layout::new(of.input.shape(), &[0; 3][..], run.weight.layout().offset());
            let history = run.weight.with_layout(nowhere).detach().with_meta(of.input.meta());
            let mut saved: SmallVec<[SavedTensor; 4]> =
                [&history, of.state, of.weight].map(SavedTensor::of).into_iter().collect();
            // The gradients do not read these.
            saved.extend([of.bias, of.cell].into_iter().flatten().map(SavedTensor::apart));
            saved.extend(run.lengths.as_ref().map(SavedTensor::of));
            saved.push(SavedTensor::result(&states));
            let run = Arc::new(run);
            let again = run.clone();
            autograd::attach_composed(
                op,
                states,
                &order,
                saved,
                move |t| again.again(t),
                move |g, wants| run.backward(g, wants),
            )
        }
    };
    Ok(States {
        all: states.narrow(0, from, steps)?,
        last: states.select(0, last as isize)?,
        cell: if is_lstm { Some(states.select(0, steps as isize + 1)?) } else { None },
    })
}

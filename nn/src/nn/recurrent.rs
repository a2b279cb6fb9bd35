//! Recurrent layers, with PyTorch's parameters.

use super::summary::{OptionsText, flag};
use super::{Module, ModuleEntry, ModuleScope, ModuleSummary, TrainingMode, init, join_path};
use crate::{DType, Device, Error, Result, Tensor, fail, fail_if};
use forebay_core::ops::{RecurrentKind, RecurrentOp, cat, stack};

with_defaults! {
    /// Options of a recurrent layer. `RecurrentOptions { num_layers: 2, ..Default::default() }`.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct RecurrentOptions {
        /// Number of stacked layers; 1.
        pub num_layers: usize = 1,
        /// If true, the layers have biases; true.
        pub bias: bool = true,
        /// If true, the layout is \[batch, steps, features\], else \[steps, batch, features\]; false.
        pub batch_first: bool = false,
        /// Dropout probability between layers in training; 0.
        pub dropout: f64 = 0.0,
        /// If true, a second direction processes the sequence in reverse; false.
        pub bidirectional: bool = false,
        /// Projected output features of an [`Lstm`], fewer than the hidden ones, or 0 for no projection.
        pub proj_size: usize = 0,
    }
}

/// Parameters of one direction of one layer, or of a cell.
#[derive(Debug)]
struct RecurrentWeights {
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Option<Tensor>,
    bias_hh: Option<Tensor>,
    weight_hr: Option<Tensor>,
}

impl RecurrentWeights {
    /// Creates parameters uniform within 1/√hidden, as in PyTorch.
    #[track_caller]
    fn new(
        inputs: usize,
        hidden: usize,
        gates: usize,
        bias: bool,
        proj: usize,
        device: &Device,
    ) -> Result<Self> {
        let uniform = |shape: &[usize]| init::create_uniform_parameter(shape, hidden, device);
        let state = if proj > 0 { proj } else { hidden };
        let rows = hidden.saturating_mul(gates);
        Ok(Self {
            weight_ih: uniform(&[rows, inputs])?,
            weight_hh: uniform(&[rows, state])?,
            bias_ih: bias.then(|| uniform(&[rows])).transpose()?,
            bias_hh: bias.then(|| uniform(&[rows])).transpose()?,
            weight_hr: (proj > 0).then(|| uniform(&[proj, hidden])).transpose()?,
        })
    }

    /// Visits the parameters under PyTorch's names with a suffix: none for a cell, `_l0`, `_l0_reverse`.
    fn visit(&self, path: &str, ending: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        for (name, t) in [
            ("weight_ih", Some(&self.weight_ih)),
            ("weight_hh", Some(&self.weight_hh)),
            ("bias_ih", self.bias_ih.as_ref()),
            ("bias_hh", self.bias_hh.as_ref()),
            ("weight_hr", self.weight_hr.as_ref()),
        ] {
            if let Some(t) = t {
                t.visit(&join_path(path, &format!("{name}{ending}")), f);
            }
        }
    }

    /// Runs one direction over all steps of \[steps, batch, features\], or of \[batch, steps, features\] if
    /// `transposed`. Returns \[steps, batch, out\], the last state and the last cell.
    fn run_direction(
        &self,
        kind: RecurrentKind,
        x: &Tensor,
        transposed: bool,
        [state, cell]: [&Tensor; 2],
        lengths: Option<&Tensor>,
        reverse: bool,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        // One matrix product for the inputs of all steps, in their memory order.
        let input = x.linear(&self.weight_ih, self.bias_ih.as_ref())?;
        let input = if transposed { input.transpose(0, 1)? } else { input };
        let cell = (kind == RecurrentKind::Lstm).then_some(cell);
        let of = RecurrentOp {
            kind,
            input_gates: &input,
            h_0: state,
            c_0: cell,
            weight_hh: &self.weight_hh,
            bias_hh: self.bias_hh.as_ref(),
            lengths,
            reverse,
        };
        let Some(hr) = &self.weight_hr else {
            let states = of.run()?;
            return Ok((states.output, states.h_n, states.c_n));
        };
        // Each step depends on the projected state of the previous step.
        let (steps, mut state, mut cell) = (input.shape()[0], state.clone(), cell.cloned());
        let mut outs = Vec::with_capacity(steps);
        for k in 0..steps {
            let t = if reverse { steps - 1 - k } else { k };
            let input = input.narrow(0, t, 1)?;
            let step =
                RecurrentOp { input_gates: &input, h_0: &state, c_0: cell.as_ref(), lengths: None, ..of }
                    .run()?;
            let (mut next, mut next_cell) = (step.h_n.linear(hr, None)?, step.c_n);
            if let Some(lengths) = lengths {
                let ended = lengths.le(t as i64)?.unsqueeze(1)?;
                next = state.where_(&ended, &next)?;
                next_cell = match (&cell, next_cell) {
                    (Some(cell), Some(next)) => Some(cell.where_(&ended, &next)?),
                    (_, next) => next,
                };
            }
            outs.push(next.clone());
            (state, cell) = (next, next_cell);
        }
        if reverse {
            outs.reverse();
        }
        Ok((stack(&outs, 0)?, state, cell))
    }
}

/// Shared implementation of the recurrent layers, whose parameters are the layer's.
#[derive(Debug)]
struct RecurrentStack {
    name: &'static str,
    kind: RecurrentKind,
    hidden: usize,
    options: RecurrentOptions,
    /// Weights of each layer and of each direction in the layer.
    weights: Vec<RecurrentWeights>,
    training: TrainingMode,
    scope: ModuleScope,
}

/// Output, states and cells of a run.
type SequenceOutput = (Tensor, Tensor, Option<Tensor>);

impl RecurrentStack {
    #[track_caller]
    fn new(
        name: &'static str,
        kind: RecurrentKind,
        [inputs, hidden]: [usize; 2],
        options: RecurrentOptions,
        device: &Device,
    ) -> Result<Self> {
        let RecurrentOptions { num_layers, bias, bidirectional, proj_size, .. } = options;
        fail_if!(hidden == 0 || num_layers == 0;
            argument(name), "{num_layers} layers of {hidden} features compute nothing");
        super::check_layer_count(name, num_layers)?;
        fail_if!(
            proj_size > 0 && (kind != RecurrentKind::Lstm || proj_size >= hidden);
            argument(name), "proj_size is {proj_size}; it is for an Lstm, and below the {hidden} hidden features"
        );
        let directions = 1 + usize::from(bidirectional);
        let out = if proj_size > 0 { proj_size } else { hidden };
        let direction = |k: usize| {
            let inputs = if k < directions { inputs } else { out * directions };
            RecurrentWeights::new(inputs, hidden, kind.gate_count(), bias, proj_size, device)
        };
        let weights = (0..num_layers * directions).map(direction).collect::<Result<_>>()?;
        let training = TrainingMode::new();
        Ok(Self { name, kind, hidden, options, weights, training, scope: ModuleScope::new() })
    }

    /// Returns the initial state, \[layers · directions, batch, width\]: `initial`, or zeros for `None`.
    #[track_caller]
    fn initial_state(
        &self,
        initial: Option<&Tensor>,
        x: &Tensor,
        batch: usize,
        width: usize,
        unbatched: bool,
    ) -> Result<Tensor> {
        let shape = [self.weights.len(), batch, width];
        let Some(initial) = initial else { return Tensor::zeros(shape, x.dtype(), x.device()) };
        let state = if unbatched && initial.rank() == 2 { initial.unsqueeze(1)? } else { initial.clone() };
        fail_if!(state.shape() != shape;
            shape(self.name, [initial]), "states are {shape:?}: [layers · directions, batch, features]");
        Ok(state)
    }

    #[track_caller]
    fn forward(
        &self,
        x: &Tensor,
        initial: [Option<&Tensor>; 2],
        lengths: Option<&Tensor>,
    ) -> Result<SequenceOutput> {
        let (name, options) = (self.name, &self.options);
        let unbatched = x.rank() == 2;
        // The layout is [steps, batch, features], except for the first layer's input with `batch_first`.
        let transposed = options.batch_first && !unbatched;
        let mut x = if unbatched { x.unsqueeze(1)? } else { x.clone() };
        let &[first, second, features] = x.shape() else {
            fail!(
                shape(name, [x]),
                "takes [steps, batch, features] (`batch_first`: [batch, steps, features]), or without the batch"
            );
        };
        let inputs = self.weights[0].weight_ih.shape()[1];
        let (steps, batch) = if transposed { (second, first) } else { (first, second) };
        fail_if!(features != inputs || steps == 0; shape(name, [x]), "takes at least one step of {inputs} features");
        let ended = lengths.map(|lengths| ended_mask(name, lengths, steps, batch)).transpose()?;
        let lengths = ended.as_ref().map(|(lengths, _)| lengths);
        let output = if options.proj_size > 0 { options.proj_size } else { self.hidden };
        let states = self.initial_state(initial[0], &x, batch, output, unbatched)?;
        let cells = self.initial_state(initial[1], &x, batch, self.hidden, unbatched)?;
        let directions = 1 + usize::from(options.bidirectional);
        let (mut last, mut last_cells) = (Vec::new(), Vec::new());
        for (layer, weights) in self.weights.chunks(directions).enumerate() {
            if layer > 0 {
                x = x.dropout(options.dropout, self.training.is_on())?;
            }
            let mut outs = Vec::with_capacity(directions);
            for (direction, weights) in weights.iter().enumerate() {
                let at = (layer * directions + direction) as isize;
                let initial = [&states.select(0, at)?, &cells.select(0, at)?];
                let transposed = transposed && layer == 0;
                let (out, state, cell) =
                    weights.run_direction(self.kind, &x, transposed, initial, lengths, direction == 1)?;
                outs.push(out);
                last.push(state);
                last_cells.extend(cell);
            }
            x = match outs.as_slice() {
                [out] => out.clone(),
                both => cat(both, -1)?,
            };
            if let Some((_, ended)) = &ended {
                x = x.masked_fill(ended, 0.0)?;
            }
        }
        let stack_states = |t: &[Tensor]| if unbatched { stack(t, 0)?.squeeze(1) } else { stack(t, 0) };
        let out = match (unbatched, transposed) {
            (true, _) => x.squeeze(1)?,
            (_, true) => x.transpose(0, 1)?,
            _ => x,
        };
        let cells = (!last_cells.is_empty()).then(|| stack_states(&last_cells)).transpose()?;
        Ok((out, stack_states(&last)?, cells))
    }
}

/// Returns the lengths as i32, and a mask of the steps after each sequence's end: \[steps, batch, 1\].
#[track_caller]
fn ended_mask(name: &'static str, lengths: &Tensor, steps: usize, batch: usize) -> Result<(Tensor, Tensor)> {
    fail_if!(lengths.shape() != [batch] || !lengths.dtype().is_int();
        shape(name, [lengths]), "lengths are integers, [{batch}]; got {} of them", lengths.dtype());
    forebay_core::ops::check_lengths(name, ("length", "the lengths"), lengths, 1..=steps)?;
    let lengths = forebay_core::ops::cast_index_to_i32(name, lengths, None)?;
    let steps = Tensor::arange(0.0, steps as f64, 1.0, DType::I32, lengths.device())?.unsqueeze(1)?;
    let ended = steps.ge(&lengths)?.unsqueeze(2)?;
    Ok((lengths, ended))
}

impl Module for RecurrentStack {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        let directions = 1 + usize::from(self.options.bidirectional);
        for (k, weights) in self.weights.iter().enumerate() {
            let reverse = if k % directions == 1 { "_reverse" } else { "" };
            weights.visit(path, &format!("_l{}{reverse}", k / directions), f);
        }
        self.training.visit(path, f);
        f(path, ModuleEntry::Scope(&self.scope));
    }

    fn describe(&self, name: &str, parent: &mut ModuleSummary) {
        let RecurrentOptions { num_layers, bias, batch_first, dropout, bidirectional, proj_size } =
            self.options;
        let text = OptionsText::default()
            .value(self.weights[0].weight_ih.shape()[1])
            .value(self.hidden)
            .set_if(proj_size > 0, "proj_size", proj_size)
            .set_if(num_layers != 1, "num_layers", num_layers)
            .set_if(!bias, "bias", flag(bias))
            .set_if(batch_first, "batch_first", flag(batch_first))
            .set_if(dropout != 0.0, "dropout", dropout)
            .set_if(bidirectional, "bidirectional", flag(bidirectional));
        let mut own = ModuleSummary::from_visit(self);
        own.set_options(text.finish());
        parent.add_child(name, own);
    }
}

delegate_module!(Rnn Lstm Gru RnnCell LstmCell GruCell);

macro_rules! recurrent_layers {
    ($($(#[$doc:meta])* $layer:ident $kind:ident;)*) => {$(
        $(#[$doc])*
        /// Parameters have PyTorch's names: `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0`, and
        /// so on for each layer, with `_reverse` for the second direction.
        pub struct $layer(RecurrentStack);

        impl $layer {
            /// Creates a layer from `inputs` to `hidden` features. All parameters are uniform within 1/√hidden, as
            /// in PyTorch.
            #[track_caller]
            pub fn new(inputs: usize, hidden: usize, options: RecurrentOptions, device: &Device) -> Result<Self> {
                Ok(Self(RecurrentStack::new(stringify!($layer), RecurrentKind::$kind, [inputs, hidden], options, device)?))
            }
        }
    )*};
}

recurrent_layers! {
    /// Elman network over sequences: h ← tanh(W x + b + V h + c) (Elman, 1990).
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::{RecurrentOptions, Rnn};
    /// # let device = Device::null(Default::default());
    /// let options = RecurrentOptions { bidirectional: true, ..Default::default() };
    /// let layer = Rnn::new(8, 16, options, &device)?.relu();
    /// let (out, states) = layer.forward(&Tensor::zeros(&[10, 2, 8], DType::F32, &device)?, None)?;
    /// assert_eq!((out.shape(), states.shape()), (&[10, 2, 32][..], &[2, 2, 16][..]));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    Rnn Tanh;
    /// Long short-term memory over sequences (Hochreiter and Schmidhuber, 1997). A `proj_size` above 0 adds
    /// projections (Sak et al., 2014) with the parameter `weight_hr_l0`. Outputs and states then have that
    /// many features.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::{Lstm, RecurrentOptions};
    /// # let device = Device::null(Default::default());
    /// let options = RecurrentOptions { num_layers: 2, batch_first: true, ..Default::default() };
    /// let layer = Lstm::new(8, 16, options, &device)?;
    /// let x = Tensor::zeros(&[2, 10, 8], DType::F32, &device)?;
    /// let (out, (state, cell)) = layer.forward(&x, None)?;
    /// assert_eq!((out.shape(), state.shape()), (&[2, 10, 16][..], &[2, 2, 16][..]));
    /// // Sequences of 10 and 7 steps; outputs after the end are zero.
    /// let lengths = Tensor::from_slice(&[10i32, 7], &[2], &device)?;
    /// layer.forward_lengths(&x, &lengths, Some((&state, &cell)))?;
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    Lstm Lstm;
    /// Gated recurrent units over sequences (Cho et al., 2014). The reset gate follows the product, as in
    /// PyTorch.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::{Gru, RecurrentOptions};
    /// # let device = Device::null(Default::default());
    /// let layer = Gru::new(8, 16, RecurrentOptions::default(), &device)?;
    /// let (out, state) = layer.forward(&Tensor::zeros(&[10, 2, 8], DType::F32, &device)?, None)?;
    /// assert_eq!((out.shape(), state.shape()), (&[10, 2, 16][..], &[1, 2, 16][..]));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    Gru Gru;
}

/// Shared implementation of the cells: one step.
#[derive(Debug)]
struct RecurrentCell {
    name: &'static str,
    kind: RecurrentKind,
    hidden: usize,
    weights: RecurrentWeights,
    scope: ModuleScope,
}

impl RecurrentCell {
    #[track_caller]
    fn forward(&self, x: &Tensor, initial: [Option<&Tensor>; 2]) -> Result<(Tensor, Option<Tensor>)> {
        let unbatched = x.rank() == 1;
        let x = if unbatched { x.unsqueeze(0)? } else { x.clone() };
        let inputs = self.weights.weight_ih.shape()[1];
        let &[batch, features] = x.shape() else {
            fail!(shape(self.name, [x]), "takes [batch, features] or [features]");
        };
        fail_if!(features != inputs; shape(self.name, [x]), "takes {inputs} features");
        let state = |initial: Option<&Tensor>| -> Result<Tensor> {
            let Some(initial) = initial else {
                return Tensor::zeros([batch, self.hidden], x.dtype(), x.device());
            };
            let state = if unbatched { initial.unsqueeze(0)? } else { initial.clone() };
            fail_if!(
                state.shape() != [batch, self.hidden];
                shape(self.name, [initial]), "states are [{batch}, {}], without the batch where x has none", self.hidden
            );
            Ok(state)
        };
        let (states, cells) = (state(initial[0])?, state(initial[1])?);
        let (_, state, cell) =
            self.weights.run_direction(self.kind, &x.unsqueeze(0)?, false, [&states, &cells], None, false)?;
        let restore_rank = |t: Tensor| if unbatched { t.squeeze(0) } else { Ok(t) };
        Ok((restore_rank(state)?, cell.map(restore_rank).transpose()?))
    }
}

impl Module for RecurrentCell {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, ModuleEntry<'_>)) {
        self.weights.visit(path, "", f);
        f(path, ModuleEntry::Scope(&self.scope));
    }

    fn describe(&self, name: &str, parent: &mut ModuleSummary) {
        let RecurrentWeights { weight_ih, bias_ih, .. } = &self.weights;
        let text = OptionsText::default().value(weight_ih.shape()[1]).value(self.hidden);
        let mut own = ModuleSummary::from_visit(self);
        own.set_options(text.set_if(bias_ih.is_none(), "bias", flag(false)).finish());
        parent.add_child(name, own);
    }
}

macro_rules! recurrent_cells {
    ($($(#[$doc:meta])* $cell:ident $kind:ident;)*) => {$(
        $(#[$doc])*
        pub struct $cell(RecurrentCell);

        impl $cell {
            /// Creates a cell from `inputs` to `hidden` features. All parameters are uniform within 1/√hidden, as
            /// in PyTorch.
            #[track_caller]
            pub fn new(inputs: usize, hidden: usize, bias: bool, device: &Device) -> Result<Self> {
                let kind = RecurrentKind::$kind;
                let weights = RecurrentWeights::new(inputs, hidden, kind.gate_count(), bias, 0, device)?;
                Ok(Self(RecurrentCell { name: stringify!($cell), kind, hidden, weights, scope: ModuleScope::new() }))
            }
        }
    )*};
}

recurrent_cells! {
    /// One step of an [`Rnn`].
    RnnCell Tanh;
    /// One step of an [`Lstm`].
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::LstmCell;
    /// # let device = Device::null(Default::default());
    /// let cell = LstmCell::new(8, 16, true, &device)?;
    /// let x = Tensor::zeros(&[2, 8], DType::F32, &device)?;
    /// let (h, c) = cell.forward(&x, None)?;
    /// assert_eq!(cell.forward(&x, Some((&h, &c)))?.0.shape(), [2, 16]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    LstmCell Lstm;
    /// One step of a [`Gru`].
    GruCell Gru;
}

/// Defines the forward passes of a layer and its cell, by the types of the initial and of the final states.
macro_rules! recurrent_forward {
    ($(
        $layer:ident $cell:ident $states:literal
        $initial_type:ty => |$initial:ident| $parts:expr;
        $final_type:ty => |$state:ident, $last_cell:pat_param| $joined:expr;
    )*) => {$(
        impl $layer {
            /// Runs the layer over \[steps, batch, inputs\] (with `batch_first` \[batch, steps, inputs\]), or
            #[doc = concat!("without the batch. Initial ", $states, " are \\[layers · directions, batch, hidden\\], or zeros.")]
            /// Returns the last layer's outputs, \[steps, batch, directions · hidden\], and
            #[doc = concat!("the last ", $states, ".")]
            #[track_caller]
            pub fn forward(&self, x: &Tensor, $initial: $initial_type) -> Result<(Tensor, $final_type)> {
                let (out, $state, $last_cell) = self.0.scope.run(|| self.0.forward(x, $parts, None))?;
                Ok((out, $joined))
            }

            /// Runs [`forward`](Self::forward) on sequences of these `lengths`, integers \[batch\], each from 1 to
            /// the number of steps. Equals PyTorch's packed sequences, but without sorting. The last states
            /// are those at each sequence's end, where the second direction begins. Outputs after the end are
            /// zero. [`check_indices`](forebay_core::ops::check_indices) checks the lengths.
            #[track_caller]
            pub fn forward_lengths(&self, x: &Tensor, lengths: &Tensor, $initial: $initial_type) -> Result<(Tensor, $final_type)> {
                let (out, $state, $last_cell) = self.0.scope.run(|| self.0.forward(x, $parts, Some(lengths)))?;
                Ok((out, $joined))
            }
        }

        impl $cell {
            #[doc = concat!("Computes the next ", $states, " from \\[batch, inputs\\] and ", $states, " \\[batch, hidden\\],")]
            /// or from all without the batch. Begins with zeros for `None`.
            #[track_caller]
            pub fn forward(&self, x: &Tensor, $initial: $initial_type) -> Result<$final_type> {
                let ($state, $last_cell) = self.0.scope.run(|| self.0.forward(x, $parts))?;
                Ok($joined)
            }
        }
    )*};
}
recurrent_forward! {
    Rnn RnnCell "states" Option<&Tensor> => |state| [state, None]; Tensor => |state, _| state;
    Gru GruCell "states" Option<&Tensor> => |state| [state, None]; Tensor => |state, _| state;
    Lstm LstmCell "states and cells"
    Option<(&Tensor, &Tensor)> => |states| [states.map(|(state, _)| state), states.map(|(_, cell)| cell)];
    (Tensor, Tensor) => |state, cell| (state, cell.ok_or_else(|| Error::argument("Lstm", "the run returned no cells"))?);
}

macro_rules! relu_option {
    ($($layer:ident)*) => {$(
        impl $layer {
            setters! {
                /// Replaces tanh by ReLU.
                fn relu() { 0.kind: RecurrentKind::Relu }
            }
        }
    )*};
}
relu_option!(Rnn RnnCell);

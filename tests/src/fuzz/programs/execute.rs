//! Runs a program on a device through the public interface, and writes it as Rust.

use std::fmt::Write as _;
use std::sync::Arc;

use forebay::amp::autocast;
use forebay::autograd::{GradOptions, checkpoint, grad_allow_unused, no_grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result};
use forebay::memory::Config;
use forebay::ops::{ConvolutionOptions, NormOptions, Padding};
use forebay::tensor::Tensor;

use super::oracle::EPS;
use super::program::{Input, InputKind, Op, Program, Statement};

/// Way to run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One kernel for each operation.
    Eager,
    /// Chains of elementwise operations of any size as one kernel.
    Fused,
    /// Replays of a captured step, with changed inputs.
    Captured,
    /// Parts of the program inside of checkpoints.
    Checkpointed,
    /// Under autocast to bf16.
    Autocast,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 5] = [Self::Eager, Self::Fused, Self::Captured, Self::Checkpointed, Self::Autocast];
}

/// Result of a program, or an element of its derivatives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Output {
    Variable(usize),
    Loss,
    /// Gradient by `grad` with a graph.
    Grad(usize),
    /// Gradient that `backward` leaves in a leaf.
    Backward(usize),
    /// Gradient of the weighted sum of the gradients.
    Second(usize),
}

/// Variables of a run; `None` for those that do not exist (yet).
type Variables = Vec<Option<Tensor>>;

/// Creates the tensor of an input.
fn create_input(input: &Input, round: usize, device: &Device) -> Result<Tensor> {
    let values = &input.values[round];
    match input.kind {
        InputKind::Leaf => create_constant(values, &input.shape, device)?.to_leaf(),
        InputKind::Constant => create_constant(values, &input.shape, device),
        InputKind::Index => {
            let values: Vec<i32> = values.iter().map(|&v| v as i32).collect();
            Tensor::from_slice(&values, &input.shape, device)
        }
        InputKind::Mask => {
            let values: Vec<bool> = values.iter().map(|&v| v != 0.0).collect();
            Tensor::from_bools(&values, &input.shape, device)
        }
    }
}

fn create_constant(values: &[f64], shape: &[usize], device: &Device) -> Result<Tensor> {
    Tensor::from_slice(&values.iter().map(|&v| v as f32).collect::<Vec<_>>(), shape, device)
}

/// Writes the call that creates a tensor with these values.
fn input_text(input: &Input, round: usize) -> String {
    let values = &input.values[round];
    let list = |suffix: &str| {
        let all: Vec<String> = values.iter().map(|v| format!("{v}{suffix}")).collect();
        all.join(", ")
    };
    let shape = list_text(&input.shape);
    match input.kind {
        InputKind::Leaf | InputKind::Constant => {
            format!("Tensor::from_slice(&[{}], {shape}, &device)?", list("f32"))
        }
        InputKind::Index => format!("Tensor::from_slice(&[{}], {shape}, &device)?", list("i32")),
        InputKind::Mask => {
            let values: Vec<bool> = values.iter().map(|&v| v != 0.0).collect();
            format!("Tensor::from_bools(&{values:?}, {shape}, &device)?")
        }
    }
}

/// Writes a shape or a list of dimensions.
fn list_text(list: &[usize]) -> String {
    if list.is_empty() { "()".to_owned() } else { format!("{list:?}") }
}

/// Text of a call, and its result: `None` for a write.
type Applied = (String, Result<Option<Tensor>>);

/// Calls a method of the first tensor, and writes the call. `(1)` is the tensor at index 1, `[value]` a literal.
macro_rules! call {
    ($x:ident, $names:ident, $method:ident $($arg:tt)*) => {(
        format!("{}.{}({})?", $names[0], stringify!($method), [$(call!(@text $names, $arg)),*].join(", ")),
        $x[0].$method($(call!(@value $x, $arg)),*).map(IntoResult::into_result),
    )};
    (@text $names:ident, ($k:literal)) => { format!("&{}", $names[$k]) };
    (@text $names:ident, [$value:expr]) => { format!("{:?}", $value) };
    (@value $x:ident, ($k:literal)) => { &$x[$k] };
    (@value $x:ident, [$value:expr]) => { $value };
}

/// Result of a method: a tensor, or nothing for a write.
trait IntoResult {
    fn into_result(self) -> Option<Tensor>;
}

impl IntoResult for Tensor {
    fn into_result(self) -> Option<Tensor> {
        Some(self)
    }
}

impl IntoResult for () {
    fn into_result(self) -> Option<Tensor> {
        None
    }
}

/// Fills the places of a call with arguments.
fn fill_call(name: &str, call: &str, args: &[String]) -> String {
    let filled = args.iter().fold(call.to_owned(), |text, arg| text.replacen("{}", arg, 1));
    format!("{name}.{filled}")
}

/// Runs an operation on tensors with these names.
fn apply(op: &Op, x: &[Tensor], names: &[String], device: &Device) -> Applied {
    match op {
        Op::Full(shape, value) => (
            format!("Tensor::full({}, {value:?}, DType::F32, &device)?", list_text(shape)),
            Tensor::full(shape, *value, DType::F32, device).map(Some),
        ),
        Op::Unary(f) => (fill_call(&names[0], f.call, &[]), (f.run)(&x[0]).map(Some)),
        Op::WriteUnary(f) => (
            format!("{}.{}_()?", names[0], f.name),
            f.run_in_place.map_or(Ok(()), |run| run(&x[0])).map(|()| None),
        ),
        Op::Binary(f) => {
            (format!("{}.{}(&{})?", names[0], f.name, names[1]), (f.run)(&x[0], &x[1]).map(Some))
        }
        Op::Reduce(f, dims, keepdim) => {
            let signed: Vec<isize> = dims.iter().map(|&d| d as isize).collect();
            let text = fill_call(&names[0], f.call, &[list_text(dims), keepdim.to_string()]);
            (text, (f.run)(&x[0], &signed, *keepdim).map(Some))
        }
        Op::Scan(f, dim) => {
            (fill_call(&names[0], f.call, &[dim.to_string()]), (f.run)(&x[0], *dim as isize).map(Some))
        }
        Op::AddScalar(value) => call!(x, names, add[*value]),
        Op::MulScalar(value) => call!(x, names, mul[*value]),
        Op::Power(p) => call!(x, names, pow[*p]),
        Op::Cast(dtype) => {
            (format!("{}.to_dtype(DType::{dtype:?})?", names[0]), x[0].to_dtype(*dtype).map(Some))
        }
        Op::Greater => call!(x, names, gt(1)),
        Op::Where => (
            format!("{}.where_(&{}, &{})?", names[1], names[0], names[2]),
            x[1].where_(&x[0], &x[2]).map(Some),
        ),
        Op::MaskedFill(value) => call!(x, names, masked_fill(1)[*value]),
        Op::Transpose(a, b) => call!(x, names, transpose[*a as isize][*b as isize]),
        Op::Permute(order) => call!(x, names, permute[&order[..]]),
        Op::Narrow(dim, start, length) => call!(x, names, narrow[*dim as isize][*start][*length]),
        Op::Slice(dim, start, stop, step) => {
            call!(x, names, slice_dim[*dim as isize][*start][*stop][*step])
        }
        Op::Select(dim, at) => call!(x, names, select[*dim as isize][*at as isize]),
        Op::Diagonal(offset) => call!(x, names, diagonal[*offset][0][1]),
        Op::Unsqueeze(dim) => call!(x, names, unsqueeze[*dim as isize]),
        Op::Expand(shape) => call!(x, names, expand[&shape[..]]),
        Op::Reshape(shape) => {
            (format!("{}.reshape({})?", names[0], list_text(shape)), x[0].reshape(shape).map(Some))
        }
        Op::Unfold(dim, size, step) => call!(x, names, unfold[*dim as isize][*size][*step]),
        Op::Flip(dim) => call!(x, names, flip[*dim]),
        Op::Roll(shift, dim) => call!(x, names, roll[*shift][*dim]),
        Op::Repeat(counts) => call!(x, names, repeat[&counts[..]]),
        Op::Tril(diagonal) => call!(x, names, tril[*diagonal]),
        Op::Cat(dim) => (
            format!("Tensor::cat(&[{}], {dim})?", references(names)),
            Tensor::cat(x, *dim as isize).map(Some),
        ),
        Op::Stack(dim) => (
            format!("Tensor::stack(&[{}], {dim})?", references(names)),
            Tensor::stack(x, *dim as isize).map(Some),
        ),
        Op::Argsort(dim) => call!(x, names, argsort[*dim as isize][true]),
        Op::LayerNorm => {
            let options = NormOptions { weight: Some(&x[1]), bias: Some(&x[2]), eps: EPS };
            let last = x[0].shape().last().copied().unwrap_or(1);
            let text = format!(
                "{}.layer_norm([{last}], &forebay::ops::NormOptions {{ weight: Some(&{}), bias: Some(&{}), eps: {EPS:?} }})?",
                names[0], names[1], names[2]
            );
            (text, x[0].layer_norm([last], &options).map(Some))
        }
        Op::RmsNorm => {
            let last = x[0].shape().last().copied().unwrap_or(1);
            let text = format!("{}.rms_norm([{last}], Some(&{}), Some({EPS:?}))?", names[0], names[1]);
            (text, x[0].rms_norm([last], Some(&x[1]), Some(EPS)).map(Some))
        }
        Op::Matmul => call!(x, names, matmul(1)),
        Op::Linear => (
            format!("{}.linear(&{}, Some(&{}))?", names[0], names[1], names[2]),
            x[0].linear(&x[1], Some(&x[2])).map(Some),
        ),
        Op::Conv2d { stride, padding } => {
            let options = ConvolutionOptions {
                stride: [*stride; 2],
                padding: Padding::Zeros([*padding; 2]),
                ..ConvolutionOptions::default()
            };
            let text = format!(
                "{}.conv2d(&{}, Some(&{}), &forebay::ops::ConvolutionOptions {{ stride: [{stride}; 2], \
                 padding: forebay::ops::Padding::Zeros([{padding}; 2]), ..Default::default() }})?",
                names[0], names[1], names[2]
            );
            (text, x[0].conv2d(&x[1], Some(&x[2]), &options).map(Some))
        }
        Op::AvgPool2d(size) => call!(x, names, avg_pool2d[[*size; 2]]),
        Op::MaxPool2d(size) => call!(x, names, max_pool2d[[*size; 2]]),
        Op::IndexSelect(dim) => call!(x, names, index_select[*dim as isize](1)),
        Op::Gather(dim) => call!(x, names, gather[*dim as isize](1)),
        Op::ScatterAdd(dim) => call!(x, names, scatter_add[*dim as isize](1)(2)),
        Op::IndexAdd(dim) => call!(x, names, index_add[*dim as isize](1)(2)[1.0]),
        Op::Embedding => {
            (format!("{}.embedding(&{}, None)?", names[0], names[1]), x[0].embedding(&x[1], None).map(Some))
        }
        Op::WriteAdd => call!(x, names, add_(1)),
        Op::WriteMul => call!(x, names, mul_(1)),
        Op::WriteCopy => call!(x, names, copy_(1)),
        Op::WriteFill(value) => call!(x, names, fill_[*value]),
        Op::WriteMulScalar(value) => call!(x, names, mul_[*value]),
        Op::WriteMaskedFill(value) => call!(x, names, masked_fill_(1)[*value]),
    }
}

fn references(names: &[String]) -> String {
    names.iter().map(|name| format!("&{name}")).collect::<Vec<_>>().join(", ")
}

/// Returns the variables as tensors; statements only take variables that exist.
fn operands(args: &[usize], variables: &Variables) -> Result<Vec<Tensor>> {
    let find = |&k: &usize| {
        variables
            .get(k)
            .cloned()
            .flatten()
            .ok_or_else(|| Error::argument("program", format!("no variable {k}")))
    };
    args.iter().map(find).collect()
}

/// Variables that a checkpoint of the rest of a program takes as inputs.
fn checkpoint_inputs(program: &Program, cut: usize) -> Vec<usize> {
    let mut inputs: Vec<usize> = program.used_from(cut).filter(|&v| v < program.result(cut)).collect();
    inputs.sort_unstable();
    inputs.dedup();
    inputs
}

/// Runs the statements from `start` on, the rest after the first of `cuts` in a checkpoint. Returns the loss. `text`
/// gets the statements as Rust.
fn run_statements(
    program: &Arc<Program>,
    (start, cuts): (usize, &[usize]),
    variables: &mut Variables,
    device: &Device,
    text: &mut String,
) -> Result<Tensor> {
    let end = cuts.first().copied().unwrap_or(program.statements.len());
    for k in start..end {
        let Statement { op, args } = &program.statements[k];
        let names: Vec<String> = args.iter().map(|&arg| program.name(arg)).collect();
        let (line, result) = apply(op, &operands(args, variables)?, &names, device);
        let _ = match op.writes() {
            true => writeln!(text, "{line};"),
            false => writeln!(text, "let {} = {line};", program.name(program.result(k))),
        };
        variables.push(result?);
    }
    let Some((&cut, inner)) = cuts.split_first() else { return run_loss(program, variables, text) };
    let live = checkpoint_inputs(program, cut);
    let names: Vec<String> = live.iter().map(|&v| program.name(v)).collect();
    let inputs = operands(&live, variables)?;
    let (body_program, body_device, inner) = (Arc::clone(program), device.clone(), inner.to_vec());
    let body = move |inputs: &[Tensor], text: &mut String| {
        let mut variables: Variables = vec![None; body_program.result(cut)];
        live.iter().zip(inputs).for_each(|(&v, t)| variables[v] = Some(t.clone()));
        run_statements(&body_program, (cut, &inner), &mut variables, &body_device, text)
    };
    let mut lines = String::new();
    // Runs once more for its text.
    let _ = if device.is_null() { body(&inputs, &mut lines).map(drop) } else { Ok(()) };
    let all: Vec<usize> = (0..inputs.len()).collect();
    let _ = writeln!(
        text,
        "let inner_device = device.clone();\nlet loss = forebay::autograd::checkpoint(&[{}], move |inputs| {{\nlet \
         device = inner_device.clone();\nlet [{}] = {all:?}.map(|k| inputs[k].clone());\n{lines}Ok(loss)\n}})?;",
        references(&names),
        names.join(", ")
    );
    checkpoint(&inputs.iter().collect::<Vec<_>>(), move |inputs| body(inputs, &mut String::new()))
}

/// Returns the sum of the terms of the loss.
fn run_loss(program: &Program, variables: &Variables, text: &mut String) -> Result<Tensor> {
    let mut loss: Option<Tensor> = None;
    for &(variable, factor) in &program.loss {
        let [x, w] = &operands(&[variable, factor], variables)?[..] else { continue };
        let term = x.mul(w)?.sum((), false)?;
        let line = format!("{}.mul(&{})?.sum((), false)?", program.name(variable), program.name(factor));
        let _ = match loss {
            None => writeln!(text, "let loss = {line};"),
            Some(_) => writeln!(text, "let loss = loss.add(&{line})?;"),
        };
        loss = Some(match loss {
            Some(loss) => loss.add(&term)?,
            None => term,
        });
    }
    loss.ok_or_else(|| Error::argument("program", "the program has no loss"))
}

/// Tensors of a program on a device.
pub(super) struct Step {
    program: Arc<Program>,
    mode: Mode,
    device: Device,
    inputs: Vec<Tensor>,
    /// Directions of second derivatives, one for each leaf.
    directions: Vec<Tensor>,
}

impl Step {
    /// Creates the inputs on a device of its own, with or without fusion.
    pub(super) fn new(program: &Program, mode: Mode, device: &Device) -> Result<Self> {
        let device = match device.is_null() {
            true => device.clone(),
            false => Device::with_config(device.backend().clone(), Config::default()),
        };
        device.set_fusion_min_bytes((mode != Mode::Eager).then_some(0));
        let create = |input| create_input(input, 0, &device);
        let inputs = program.inputs.iter().map(create).collect::<Result<_>>()?;
        let direction = |k| create_constant(&program.direction(k), &program.inputs[k].shape, &device);
        let directions = program.leaves().map(direction).collect::<Result<_>>()?;
        let mut program = program.clone();
        if mode != Mode::Checkpointed {
            program.cuts.clear();
        }
        Ok(Self { program: Arc::new(program), mode, device, inputs, directions })
    }

    /// Runs the program and its derivatives once. `text` gets the program as Rust.
    pub(super) fn run(&self, text: &mut String) -> Result<Vec<(Output, Tensor)>> {
        let program = &self.program;
        let leaves: Vec<usize> = program.leaves().collect();
        let tensors: Vec<&Tensor> = leaves.iter().map(|&k| &self.inputs[k]).collect();
        tensors.iter().for_each(|leaf| leaf.set_grad(None));
        let mut variables: Variables = self.inputs.iter().cloned().map(Some).collect();
        let loss = {
            let _autocast = (self.mode == Mode::Autocast).then(|| autocast(DType::BF16)).transpose()?;
            run_statements(program, (0, &program.cuts), &mut variables, &self.device, text)?
        };
        let mut outputs = vec![(Output::Loss, loss.clone())];
        let made = variables.into_iter().enumerate().skip(program.inputs.len());
        outputs.extend(made.filter_map(|(k, t)| Some((Output::Variable(k), t?))));
        if !loss.requires_grad() {
            return Ok(outputs);
        }
        let first = grad_allow_unused(&[&loss], &tensors, &GradOptions::create_graph())?;
        let mut sum: Option<Tensor> = None;
        for ((&leaf, grad), direction) in leaves.iter().zip(&first).zip(&self.directions) {
            let Some(grad) = grad else { continue };
            outputs.push((Output::Grad(leaf), grad.clone()));
            let term = grad.mul(direction)?.sum((), false)?;
            sum = Some(match sum {
                Some(sum) => sum.add(&term)?,
                None => term,
            });
        }
        if let Some(sum) = sum.filter(Tensor::requires_grad) {
            let second = grad_allow_unused(&[&sum], &tensors, &GradOptions::retain_graph())?;
            outputs.extend(leaves.iter().zip(second).filter_map(|(&k, t)| Some((Output::Second(k), t?))));
        }
        loss.backward()?;
        outputs
            .extend(leaves.iter().zip(&tensors).filter_map(|(&k, t)| Some((Output::Backward(k), t.grad()?))));
        outputs.iter_mut().for_each(|(_, t)| *t = t.detach());
        Ok(outputs)
    }

    /// Runs the program once, or captures and replays it with the inputs of both rounds. `check` receives the round and
    /// its outputs.
    pub(super) fn run_rounds(
        &self,
        mut check: impl FnMut(usize, Vec<(Output, Tensor)>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        if self.mode != Mode::Captured {
            return check(0, self.run(&mut String::new())?);
        }
        let mut outputs = Vec::new();
        let mut step = self.device.capture(|| {
            let (names, tensors): (Vec<Output>, Vec<Tensor>) =
                self.run(&mut String::new())?.into_iter().unzip();
            outputs = names;
            Ok(tensors)
        })?;
        for round in [0, 1, 0] {
            self.set_inputs(round)?;
            let replayed = step.replay()?;
            check(round, outputs.iter().copied().zip(replayed).collect())?;
        }
        Ok(())
    }

    fn set_inputs(&self, round: usize) -> Result<()> {
        let _no_grad = no_grad();
        for (tensor, input) in self.inputs.iter().zip(&self.program.inputs) {
            tensor.copy_(&create_input(input, round, &self.device)?.detach())?;
        }
        Ok(())
    }
}

/// Writes a program as a test that runs it in a mode, and checks one element of an output. A program that fails ends
/// with the statement that fails.
pub(super) fn source(program: &Program, mode: Mode, device: &Device, check: &Check) -> String {
    let dry = Device::null(Default::default());
    let mut body = String::new();
    let ends_early = Step::new(program, mode, &dry).and_then(|step| step.run(&mut body)).is_err();
    let (before, found) =
        if ends_early { (String::new(), "()".to_owned()) } else { found_text(program, check.output) };
    let (scope, end_scope) = match mode {
        Mode::Autocast => ("let scope = autocast(DType::BF16)?;\n", "drop(scope);\n"),
        _ => ("", ""),
    };
    let fusion = if mode == Mode::Eager { "None" } else { "Some(0)" };
    let mut text = format!(
        "use forebay::prelude::*;\n\n/// {}\n#[test]\nfn program() -> Result<()> {{\nlet device = \
         Device::open(\"{device}\")?;\ndevice.set_fusion_min_bytes({fusion});\n",
        check.summary
    );
    for (k, input) in program.inputs.iter().enumerate() {
        let leaf = if input.kind == InputKind::Leaf { ".to_leaf()?" } else { "" };
        let _ = writeln!(text, "let {} = {}{leaf};", program.name(k), input_text(input, 0));
    }
    if mode == Mode::Captured {
        let clear: String =
            program.leaves().map(|leaf| format!("{}.set_grad(None);\n", program.name(leaf))).collect();
        let _ = writeln!(
            text,
            "let mut step = device.capture(|| {{\n{clear}{body}{before}Ok({found})\n}})?;\n{{\nlet _no_grad = no_grad();"
        );
        for (k, input) in program.inputs.iter().enumerate() {
            let _ = writeln!(text, "{}.copy_(&{})?;", program.name(k), input_text(input, check.round));
        }
        text.push_str("}\nlet found = step.replay()?;\n");
    } else {
        let _ = writeln!(text, "{scope}{body}{end_scope}{before}let found = {found};");
    }
    let assertion = if ends_early { "" } else { &check.assertion };
    let _ = write!(text, "{assertion}Ok(())\n}}\n");
    indent(&text)
}

/// Writes the statements that compute an output, and the expression of its tensor.
fn found_text(program: &Program, output: Output) -> (String, String) {
    let leaves: Vec<String> = program.leaves().map(|k| program.name(k)).collect();
    let place = |leaf: usize| program.leaves().position(|k| k == leaf).unwrap_or_default();
    let grads = |name: &str, of: &str, option: &str| {
        format!(
            "let {name} = forebay::autograd::grad_allow_unused(&[&{of}], &[{}], \
             &forebay::autograd::GradOptions::{option}())?;\n",
            references(&leaves)
        )
    };
    let tensor =
        |list: &str, leaf| format!("{list}[{}].as_ref().expect(\"a gradient\").detach()", place(leaf));
    match output {
        Output::Variable(v) => (String::new(), format!("{}.detach()", program.name(v))),
        Output::Loss => (String::new(), "loss.detach()".to_owned()),
        Output::Backward(leaf) => {
            let found = format!("{}.grad().expect(\"a gradient\")", program.name(leaf));
            ("loss.backward()?;\n".to_owned(), found)
        }
        Output::Grad(leaf) => (grads("first", "loss", "create_graph"), tensor("first", leaf)),
        Output::Second(leaf) => {
            let mut lines = grads("first", "loss", "create_graph");
            lines.push_str("let mut sum = Tensor::zeros((), DType::F32, &device)?;\n");
            for (k, leaf) in program.leaves().enumerate() {
                let values = [program.direction(leaf), Vec::new()];
                let direction = Input { kind: InputKind::Constant, values, ..program.inputs[leaf].clone() };
                let _ = writeln!(
                    lines,
                    "if let Some(grad) = &first[{k}] {{\nsum = sum.add(&grad.mul(&{})?.sum((), false)?)?;\n}}",
                    input_text(&direction, 0)
                );
            }
            lines.push_str(&grads("second", "sum", "retain_graph"));
            (lines, tensor("second", leaf))
        }
    }
}

/// Element of an output that is wrong.
#[derive(Clone, Debug)]
pub(super) struct Check {
    /// Sentence about the failure.
    pub(super) summary: String,
    pub(super) output: Output,
    pub(super) round: usize,
    /// Assertion about the tensor `found`, as lines of Rust.
    pub(super) assertion: String,
}

/// Indents lines by their braces.
fn indent(text: &str) -> String {
    let mut depth = 0usize;
    let mut indented = String::new();
    for line in text.lines() {
        if line.starts_with('}') {
            depth = depth.saturating_sub(1);
        }
        let _ = writeln!(indented, "{:width$}{line}", "", width = 4 * depth);
        if line.ends_with('{') {
            depth += 1;
        }
    }
    indented
}

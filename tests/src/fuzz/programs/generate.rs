//! Draws programs. Each statement runs on the oracle at once: one that is undefined, ambiguous or too large for the
//! precision of any mode is drawn again.

use forebay::dtype::DType;

use super::oracle::{Oracle, View, broadcast};
use super::program::{BINARY, Input, InputKind, Op, Program, REDUCTIONS, SCANS, Statement, UNARY};
use crate::fuzz::ArgGenerator;

/// Statements that are drawn at most, with those that are left out.
const MAX_DRAWS: usize = 120;
/// Largest number of elements of a variable.
const MAX_NUMEL: usize = 64;
/// Largest absolute value of an element.
const MAX_VALUE: f64 = 32.0;
/// Error bounds of comparisons are this many times larger than in checks, which know all uses of a variable.
const MARGIN: f64 = 4.0;

/// Argument of a statement that is drawn.
enum Arg {
    Variable(usize),
    New(Input),
}

/// Program with its states on the oracle: for both values of the inputs, without and under autocast.
struct Generator {
    rng: ArgGenerator,
    program: Program,
    states: Vec<(usize, Oracle)>,
}

/// Draws program `index` of a seed.
pub(super) fn generate(seed: u64, index: u64) -> Program {
    let states = [(0, false), (1, false), (0, true), (1, true)];
    let states = states.map(|(round, autocast)| (round, Oracle::new(autocast, MARGIN))).to_vec();
    let mut generator =
        Generator { rng: ArgGenerator::new(seed, "programs", index), program: Program::default(), states };
    for _ in 0..2 + generator.rng.below(2) {
        let shape = generator.shape();
        let input = generator.input(InputKind::Leaf, &shape);
        generator.add_input(input);
    }
    let statements = 4 + generator.rng.below(9);
    for _ in 0..MAX_DRAWS {
        if generator.program.statements.len() == statements {
            break;
        }
        if let Some((op, args)) = generator.draw() {
            generator.try_push(op, args);
        }
    }
    generator.draw_loss();
    generator.draw_cuts();
    generator.program
}

impl Generator {
    fn shape(&mut self) -> Vec<usize> {
        let rank = self.rng.pick(&[1, 2, 2, 3, 3, 4]);
        let extents = if rank == 4 { &[1, 2, 2, 3, 4][..] } else { &[1, 2, 3, 4, 5] };
        let shape: Vec<usize> = (0..rank).map(|_| self.rng.pick(extents)).collect();
        if shape.iter().product::<usize>() > MAX_NUMEL / 2 { vec![3, 4] } else { shape }
    }

    fn input(&mut self, kind: InputKind, shape: &[usize]) -> Input {
        let numel: usize = shape.iter().product();
        let is_positive = self.rng.one_in(3);
        let mut values = || -> Vec<f64> {
            (0..numel)
                .map(|_| match kind {
                    InputKind::Mask => self.rng.below(2) as f64,
                    _ if is_positive => self.rng.below(128) as f64 / 64.0 + 0.25,
                    _ => self.rng.below(257) as f64 / 64.0 - 2.0,
                })
                .collect()
        };
        Input { kind, shape: shape.to_vec(), values: [values(), values()] }
    }

    /// Draws indices below `extent`.
    fn indices(&mut self, shape: &[usize], extent: usize) -> Input {
        let mut values = || (0..shape.iter().product()).map(|_| self.rng.below(extent) as f64).collect();
        Input { kind: InputKind::Index, shape: shape.to_vec(), values: [values(), values()] }
    }

    /// Draws a parameter: mostly a leaf.
    fn parameter(&mut self, shape: &[usize]) -> Arg {
        let kind = if self.rng.one_in(3) { InputKind::Constant } else { InputKind::Leaf };
        Arg::New(self.input(kind, shape))
    }

    fn add_input(&mut self, input: Input) {
        let at = self.program.inputs.len();
        let shift = |v: &mut usize| *v += usize::from(*v >= at);
        self.program.statements.iter_mut().for_each(|s| s.args.iter_mut().for_each(shift));
        self.program.loss.iter_mut().for_each(|(variable, _)| shift(variable));
        self.program.inputs.push(input);
        for (round, state) in &mut self.states {
            state.add_input(&self.program, at, *round, None);
            let view = state.variables.pop().flatten();
            state.variables.insert(at, view);
        }
    }

    /// Appends a statement if all states can run it.
    fn try_push(&mut self, op: Op, args: Vec<Arg>) {
        let before = (self.program.clone(), self.states.clone());
        let inputs = self.program.inputs.len();
        let added = args.iter().filter(|arg| matches!(arg, Arg::New(_))).count();
        let mut numbers = Vec::new();
        for arg in args {
            numbers.push(match arg {
                Arg::Variable(v) => v + if v >= inputs { added } else { 0 },
                Arg::New(input) => {
                    self.add_input(input);
                    self.program.inputs.len() - 1
                }
            });
        }
        self.program.statements.push(Statement { op, args: numbers });
        if self.run_last().is_none() {
            (self.program, self.states) = before;
        }
    }

    /// Runs the last statement on all states; `None` if one cannot run it or has too large values or errors.
    fn run_last(&mut self) -> Option<()> {
        let k = self.program.statements.len() - 1;
        let statement = &self.program.statements[k];
        let made = if statement.op.writes() { statement.args[0] } else { self.program.result(k) };
        for (_, state) in &mut self.states {
            state.execute(&self.program, k)?;
            let array = state.read(made)?;
            let is_fine = |x: f64, error: f64| x.abs() <= MAX_VALUE && error <= 0.25 * x.abs().max(1.0);
            let fits = array.data.len() <= MAX_NUMEL && array.shape.len() <= 5 && !array.data.is_empty();
            (fits && array.data.iter().all(|x| is_fine(x.value(), x.error()))).then_some(())?;
        }
        Some(())
    }

    fn view(&self, variable: usize) -> Option<&View> {
        self.states[0].1.view(variable)
    }

    /// Picks a variable that fits, mostly a late one.
    fn pick(&mut self, fits: impl Fn(&View) -> bool) -> Option<usize> {
        let count = self.states[0].1.variables.len();
        let all: Vec<usize> = (0..count).filter(|&v| self.view(v).is_some_and(&fits)).collect();
        let last = all.len().checked_sub(1)?;
        let [a, b] = [(); 2].map(|()| self.rng.below(last + 1));
        Some(all[a.max(b)])
    }

    /// Picks a float variable of at least this rank, with its view.
    fn pick_float(&mut self, rank: usize) -> Option<(usize, View)> {
        let v = self.pick(|view| view.dtype.is_float() && view.positions.shape.len() >= rank)?;
        Some((v, self.view(v)?.clone()))
    }

    /// Picks or creates a float tensor of this dtype whose shape fits.
    fn operand(&mut self, like: &View, fits: impl Fn(&[usize]) -> bool, shape: &[usize]) -> Arg {
        let dtype = like.dtype;
        match self.pick(|view| view.dtype == dtype && fits(&view.positions.shape)) {
            Some(v) if !self.rng.one_in(4) => Arg::Variable(v),
            _ => self.parameter(shape),
        }
    }

    /// Returns a shape that is broadcast to another one.
    fn narrower(&mut self, shape: &[usize]) -> Vec<usize> {
        let skip = self.rng.below(shape.len() + 1).min(1);
        shape[skip..].iter().map(|&n| if self.rng.one_in(3) { 1 } else { n }).collect()
    }

    fn mask(&mut self, shape: &[usize]) -> Arg {
        let found =
            self.pick(|view| view.dtype == DType::Bool && broadcast(&view.positions.shape, shape) == shape);
        match found {
            Some(v) if !self.rng.one_in(4) => Arg::Variable(v),
            _ => {
                let shape = self.narrower(shape);
                Arg::New(self.input(InputKind::Mask, &shape))
            }
        }
    }

    /// Draws an operation with its arguments; `None` if no variable fits.
    fn draw(&mut self) -> Option<(Op, Vec<Arg>)> {
        match self.rng.below(20) {
            0..=3 => self.draw_elementwise(),
            4..=8 => self.draw_view(),
            9 | 10 => self.draw_copy(),
            11 | 12 => self.draw_reduction(),
            13 | 14 => self.draw_product(),
            15 | 16 => self.draw_index(),
            _ => self.draw_write(),
        }
    }

    fn scalar(&mut self) -> f64 {
        self.rng.pick(&[-1.5, -0.75, 0.5, 1.25, 2.0])
    }

    fn draw_elementwise(&mut self) -> Option<(Op, Vec<Arg>)> {
        let (x, view) = self.pick_float(0)?;
        let shape = view.positions.shape.clone();
        let broadcasts = |other: &[usize]| {
            let both = broadcast(other, &shape);
            let agrees =
                |of: &[usize]| of.iter().rev().zip(both.iter().rev()).all(|(n, m)| *n == 1 || n == m);
            agrees(other) && agrees(&shape)
        };
        Some(match self.rng.below(12) {
            0..=3 => (Op::Unary(&UNARY[self.rng.below(UNARY.len())]), vec![Arg::Variable(x)]),
            4..=6 => {
                let narrow = self.narrower(&shape);
                let other = self.operand(&view, broadcasts, &narrow);
                (Op::Binary(&BINARY[self.rng.below(BINARY.len())]), vec![Arg::Variable(x), other])
            }
            7 => (Op::AddScalar(self.scalar()), vec![Arg::Variable(x)]),
            8 => (Op::MulScalar(self.scalar()), vec![Arg::Variable(x)]),
            9 => (Op::Power(self.rng.pick(&[2.0, 3.0])), vec![Arg::Variable(x)]),
            10 => {
                let dtype = if view.dtype == DType::F32 { DType::BF16 } else { DType::F32 };
                (Op::Cast(dtype), vec![Arg::Variable(x)])
            }
            _ => {
                let other = self.operand(&view, broadcasts, &shape);
                match self.rng.below(3) {
                    0 => (Op::Greater, vec![Arg::Variable(x), other]),
                    1 => (Op::Where, vec![self.mask(&shape), Arg::Variable(x), other]),
                    _ => (Op::MaskedFill(self.scalar()), vec![Arg::Variable(x), self.mask(&shape)]),
                }
            }
        })
    }

    fn draw_view(&mut self) -> Option<(Op, Vec<Arg>)> {
        let (x, view) = self.pick_float(1)?;
        let shape = view.positions.shape;
        let rank = shape.len();
        let (dim, other) = (self.rng.below(rank), self.rng.below(rank));
        let n = shape[dim];
        let start = self.rng.below(n);
        let op = match self.rng.below(11) {
            0 => Op::Transpose(dim, other),
            1 => Op::Permute((0..rank).map(|d| (d + dim) % rank).collect()),
            2 | 3 => Op::Narrow(dim, start, 1 + self.rng.below(n - start)),
            4 => Op::Slice(dim, start, n, 1 + self.rng.below(3)),
            5 => Op::Select(dim, start),
            6 if rank >= 2 => Op::Diagonal(self.rng.below(shape[1]) as isize),
            7 => Op::Unsqueeze(self.rng.below(rank + 1)),
            8 => {
                let mut expanded: Vec<usize> =
                    shape.iter().map(|&n| if n == 1 { 1 + self.rng.below(3) } else { n }).collect();
                if self.rng.one_in(2) {
                    expanded.insert(0, 1 + self.rng.below(3));
                }
                Op::Expand(expanded)
            }
            9 => {
                let size = 1 + self.rng.below(n);
                Op::Unfold(dim, size, 1 + self.rng.below(2))
            }
            _ => {
                let numel: usize = shape.iter().product();
                let rows = self.rng.pick(&[1, 2, 3, 4]);
                match numel.is_multiple_of(rows) {
                    true if self.rng.one_in(2) => Op::Reshape(vec![rows, numel / rows]),
                    true => Op::Reshape(vec![numel / rows, 1, rows]),
                    false => Op::Reshape(vec![numel]),
                }
            }
        };
        Some((op, vec![Arg::Variable(x)]))
    }

    fn draw_copy(&mut self) -> Option<(Op, Vec<Arg>)> {
        let (x, view) = self.pick_float(1)?;
        let shape = view.positions.shape.clone();
        let rank = shape.len();
        let dim = self.rng.below(rank);
        let op = match self.rng.below(7) {
            0 => Op::Flip(dim),
            1 => Op::Roll(self.rng.below(shape[dim]), dim),
            2 => Op::Repeat((0..rank).map(|_| 1 + self.rng.below(2)).collect()),
            3 if rank >= 2 => Op::Tril(self.rng.below(3) as isize - 1),
            4 => {
                let shape = self.shape();
                return Some((Op::Full(shape, self.scalar()), Vec::new()));
            }
            5 => {
                let same = |other: &[usize]| other == shape;
                let parts = vec![self.operand(&view, same, &shape), Arg::Variable(x)];
                return Some((Op::Stack(dim), parts));
            }
            _ => {
                let fits = |other: &[usize]| {
                    other.len() == rank && (0..rank).all(|d| d == dim || other[d] == shape[d])
                };
                let parts = vec![Arg::Variable(x), self.operand(&view, fits, &shape)];
                return Some((Op::Cat(dim), parts));
            }
        };
        Some((op, vec![Arg::Variable(x)]))
    }

    fn draw_reduction(&mut self) -> Option<(Op, Vec<Arg>)> {
        let (x, view) = self.pick_float(1)?;
        let shape = view.positions.shape;
        let rank = shape.len();
        let dim = self.rng.below(rank);
        let last = shape[rank - 1];
        Some(match self.rng.below(8) {
            0..=2 => {
                let mut dims: Vec<usize> = (0..rank).filter(|_| self.rng.one_in(3)).collect();
                if dims.is_empty() {
                    dims.push(dim);
                }
                let reduction = &REDUCTIONS[self.rng.below(REDUCTIONS.len())];
                (Op::Reduce(reduction, dims, self.rng.one_in(2)), vec![Arg::Variable(x)])
            }
            3..=5 => (Op::Scan(&SCANS[self.rng.below(SCANS.len())], dim), vec![Arg::Variable(x)]),
            6 => {
                let parameters = [self.parameter(&[last]), self.parameter(&[last])];
                (Op::LayerNorm, [Arg::Variable(x)].into_iter().chain(parameters).collect())
            }
            _ => (Op::RmsNorm, vec![Arg::Variable(x), self.parameter(&[last])]),
        })
    }

    fn draw_product(&mut self) -> Option<(Op, Vec<Arg>)> {
        let (x, view) = self.pick_float(2)?;
        // Products of two dtypes are errors, and parameters are f32.
        if view.dtype != DType::F32 {
            return None;
        }
        let shape = view.positions.shape.clone();
        let rank = shape.len();
        let last = shape[rank - 1];
        let columns = 1 + self.rng.below(4);
        Some(match self.rng.below(if rank == 4 { 8 } else { 4 }) {
            0 | 1 => {
                let batch = &shape[..rank - 2];
                let fits = |other: &[usize]| match other.split_last_chunk::<2>() {
                    Some((before, [n, _])) => *n == last && (before.is_empty() || before == batch),
                    None => false,
                };
                (Op::Matmul, vec![Arg::Variable(x), self.operand(&view, fits, &[last, columns])])
            }
            2 | 3 => (
                Op::Linear,
                vec![Arg::Variable(x), self.parameter(&[columns, last]), self.parameter(&[columns])],
            ),
            4 | 5 => {
                let [height, width] = [shape[2], shape[3]].map(|n| 1 + self.rng.below(n.min(2)));
                let weight = self.parameter(&[columns, shape[1], height, width]);
                let op = Op::Conv2d { stride: 1 + self.rng.below(2), padding: self.rng.below(2) };
                (op, vec![Arg::Variable(x), weight, self.parameter(&[columns])])
            }
            kind if shape[2].min(last) >= 2 => {
                (if kind == 6 { Op::AvgPool2d(2) } else { Op::MaxPool2d(2) }, vec![Arg::Variable(x)])
            }
            _ => return None,
        })
    }

    fn draw_index(&mut self) -> Option<(Op, Vec<Arg>)> {
        let (x, view) = self.pick_float(1)?;
        let shape = view.positions.shape.clone();
        let rank = shape.len();
        let dim = self.rng.below(rank);
        let count = 1 + self.rng.below(4);
        let with = |n: usize| {
            let mut shape = shape.clone();
            shape[dim] = n;
            shape
        };
        let fits = |other: &[usize]| other == with(count);
        Some(match self.rng.below(6) {
            0 => (Op::IndexSelect(dim), vec![Arg::Variable(x), Arg::New(self.indices(&[count], shape[dim]))]),
            1 => {
                let index = self.pick(|view| view.dtype == DType::I64 && view.positions.shape == shape);
                let index = match index {
                    Some(v) => Arg::Variable(v),
                    None => Arg::New(self.indices(&with(count), shape[dim])),
                };
                (Op::Gather(dim), vec![Arg::Variable(x), index])
            }
            2 if view.dtype == DType::F32 => {
                let index = Arg::New(self.indices(&with(count), shape[dim]));
                (Op::ScatterAdd(dim), vec![Arg::Variable(x), index, self.operand(&view, fits, &with(count))])
            }
            3 if view.dtype == DType::F32 => {
                let index = Arg::New(self.indices(&[count], shape[dim]));
                (Op::IndexAdd(dim), vec![Arg::Variable(x), index, self.operand(&view, fits, &with(count))])
            }
            4 if rank == 2 => {
                (Op::Embedding, vec![Arg::Variable(x), Arg::New(self.indices(&[count], shape[0]))])
            }
            _ => (Op::Argsort(dim), vec![Arg::Variable(x)]),
        })
    }

    /// Returns the storages that a gradient may need.
    fn saved_storages(&self) -> Vec<usize> {
        let statements = self.program.statements.iter().enumerate().filter(|(_, s)| !s.op.saves_nothing());
        let touched = statements.flat_map(|(k, s)| s.args.iter().copied().chain([self.program.result(k)]));
        touched.filter_map(|v| Some(self.view(v)?.storage)).collect()
    }

    /// Draws a write to a tensor that a statement made.
    fn draw_write(&mut self) -> Option<(Op, Vec<Arg>)> {
        let inputs: Vec<usize> =
            (0..self.program.inputs.len()).filter_map(|k| Some(self.view(k)?.storage)).collect();
        // A write to a tensor that a gradient needs is refused by the backward pass, so few programs have one.
        let saved: Vec<usize> = if self.rng.one_in(8) { Vec::new() } else { self.saved_storages() };
        let may_write = |view: &View| {
            view.dtype.is_float()
                && !inputs.contains(&view.storage)
                && !saved.contains(&view.storage)
                && !view.positions.overlaps()
        };
        let x = self.pick(may_write)?;
        let view = self.view(x)?.clone();
        let shape = view.positions.shape.clone();
        let narrow = self.narrower(&shape);
        let fits = |other: &[usize]| other.len() <= shape.len() && broadcast(other, &shape) == shape;
        let target = Arg::Variable(x);
        Some(match self.rng.below(8) {
            0 => {
                let functions: Vec<_> = UNARY.iter().filter(|f| f.run_in_place.is_some()).collect();
                (Op::WriteUnary(functions[self.rng.below(functions.len())]), vec![target])
            }
            1 | 2 => (Op::WriteAdd, vec![target, self.operand(&view, fits, &narrow)]),
            3 => (Op::WriteMul, vec![target, self.operand(&view, fits, &narrow)]),
            4 => (Op::WriteCopy, vec![target, self.operand(&view, fits, &narrow)]),
            5 => (Op::WriteFill(self.scalar()), vec![target]),
            6 => (Op::WriteMulScalar(self.scalar()), vec![target]),
            _ => (Op::WriteMaskedFill(self.scalar()), vec![target, self.mask(&shape)]),
        })
    }

    /// Adds the variables that no statement takes to the loss, and some others.
    fn draw_loss(&mut self) {
        for k in 0..self.program.statements.len() {
            let variable = self.program.result(k);
            let Some(view) = self.view(variable).filter(|view| view.dtype.is_float()) else { continue };
            let shape = view.positions.shape.clone();
            let is_used = self.program.statements.iter().any(|s| s.args.contains(&variable));
            if is_used && !self.rng.one_in(4) {
                continue;
            }
            self.push_term(self.program.result(k), &shape);
        }
        if self.program.loss.is_empty() {
            let shape = self.program.inputs[0].shape.clone();
            self.push_term(0, &shape);
        }
    }

    /// Adds a variable to the loss.
    fn push_term(&mut self, variable: usize, shape: &[usize]) {
        self.program.loss.push((variable, self.program.inputs.len()));
        let factor = self.input(InputKind::Constant, shape);
        self.add_input(factor);
    }

    /// Draws where checkpoints begin: no statement inside of one may write what exists before.
    fn draw_cuts(&mut self) {
        let program = &self.program;
        let storage = |v: usize| self.view(v).map(|view| view.storage);
        let is_allowed = |&cut: &usize| {
            let before: Vec<usize> = (0..program.result(cut)).filter_map(storage).collect();
            let writes = program.statements[cut..].iter().filter(|s| s.op.writes());
            writes.filter_map(|s| storage(s.args[0])).all(|written| !before.contains(&written))
        };
        let mut cuts: Vec<usize> = (0..program.statements.len()).filter(is_allowed).collect();
        while cuts.len() > 2 {
            cuts.remove(self.rng.below(cuts.len()));
        }
        self.program.cuts = cuts;
    }
}

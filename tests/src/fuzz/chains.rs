//! Fuzzing of fused chains: random elementwise programs with repeated operands, on values that reveal rewrites.
//!
//! A program runs on a handle that fuses and on one that does not. Results and gradients must have the same bits, but
//! any NaN equals any other.

use std::fmt::{self, Write};

use anyhow::{Result, ensure};
use clap::Args;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::memory::Config;
use forebay::tensor::Tensor;

use super::ArgGenerator;

const FLOATS: [DType; 4] = [DType::F32, DType::F32, DType::F16, DType::BF16];
/// Rows and columns: lines of whole vectors of 16 bits, of f32 only, and of neither.
const SHAPES: [[usize; 2]; 5] = [[4, 16], [2, 24], [3, 12], [5, 7], [1, 9]];
const SPECIAL: [f32; 20] = [
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-45,
    -3e-39,
    3e38,
    -2e19,
    1e-30,
    65504.0,
    -65520.0,
    6e-8,
    100.0,
    -88.0,
    1.0,
    -0.5,
];

/// Numbers of programs, and where they begin.
#[derive(Args, Clone, Copy, Debug)]
pub struct ChainOptions {
    /// Programs whose results are compared.
    #[arg(long, default_value_t = 2000)]
    pub programs: u64,
    /// Programs whose gradients are compared.
    #[arg(long, default_value_t = 1000)]
    pub gradients: u64,
    /// Seed of the first program; each other program has the next one.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Outcome of a run.
#[derive(Clone, Debug, Default)]
pub struct ChainSummary {
    /// Programs that ran on both handles.
    pub compared: u64,
    /// Programs that both handles refuse.
    pub refused: u64,
    /// Programs whose results differ, each with its first difference.
    pub differences: Vec<String>,
}

impl fmt::Display for ChainSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for difference in self.differences.iter().take(10) {
            writeln!(f, "{difference}")?;
        }
        let (compared, refused) = (self.compared, self.refused);
        write!(f, "chains: {compared} compared, {refused} refused, {} differ", self.differences.len())
    }
}

/// Operation with its text, its number of tensors, and a call that reads the first of three.
type Call = (&'static str, usize, fn(&[Tensor; 3]) -> CoreResult<Tensor>);

/// Lists operations of a number of tensors.
macro_rules! calls {
    ($count:tt: $($name:ident($($argument:expr),*)),* $(,)?) => {
        &[$((
            concat!(stringify!($name) $(, " ", stringify!($argument))*),
            $count,
            calls!(@$count $name, $($argument),*),
        )),*]
    };
    (@1 $name:ident, $($argument:expr),*) => { |t| t[0].$name($($argument),*) };
    (@2 $name:ident, $($argument:expr),*) => { |t| t[0].$name(&t[1] $(, $argument)*) };
    (@3 $name:ident, $($argument:expr),*) => { |t| t[0].$name(&t[1], &t[2] $(, $argument)*) };
}

const INF: f64 = f64::INFINITY;
const UNARY: &[Call] = calls![1:
    neg(), abs(), square(), sqrt(), reciprocal(), rsqrt(), exp(), log(), log1p(), expm1(), tanh(), sigmoid(), relu(),
    gelu(), silu(), softplus(1.0, 20.0), leaky_relu(0.1), hardtanh(-1.0, 1.0), softsign(), hardshrink(0.5), trunc(),
    frac(), sign(), sinc(), nan_to_num(), elu(1.0), logsigmoid(), add(1.5), sub(INF), mul(2.0), mul(0.0), div(3.0),
    div(0.0), rsub(1.0), pow(2.0), clamp(-1.0, 1.0), clamp_min(0.0), clamp_max(INF), to_dtype(DType::F32),
    to_dtype(DType::F16), to_dtype(DType::BF16),
];
/// Operations that a compiler may simplify for equal operands come several times.
const BINARY: &[Call] = calls![2:
    add(), sub(), mul(), div(), add(), sub(), mul(), div(), sub(), div(), rsub(), maximum(), minimum(), fmax(), fmin(),
    logaddexp(), hypot(), copysign(), fmod(), remainder(), xlogy(), atan2(), pow(), clamp_min(), clamp_max(), lerp(0.3),
];
const TERNARY: &[Call] = calls![3: addcmul(0.5), addcmul(-1.0), addcdiv(-1.0), addcdiv(0.5), lerp(), clamp()];

/// Program that is drawn while it runs. Each run of a seed draws the same operations.
struct Chain<'a> {
    draw: ArgGenerator,
    device: &'a Device,
    shape: [usize; 2],
    needs_grads: bool,
    inputs: Vec<(String, Tensor)>,
    masks: Vec<(String, Tensor)>,
    results: Vec<(String, Tensor)>,
    count: usize,
    text: &'a mut String,
}

impl Chain<'_> {
    /// Runs the program of a seed, which is written to `text`. Returns its results, or the gradients of its inputs.
    fn run(
        seed: u64,
        needs_grads: bool,
        device: &Device,
        text: &mut String,
    ) -> CoreResult<Vec<(String, Tensor)>> {
        let mut draw = ArgGenerator::new(seed, if needs_grads { "gradients" } else { "chains" }, 0);
        let shape = draw.pick(&SHAPES);
        let (inputs, masks, results) = (Vec::new(), Vec::new(), Vec::new());
        let mut chain = Chain { draw, device, shape, needs_grads, inputs, masks, results, count: 0, text };
        for k in 0..2 + chain.draw.below(2) {
            chain.add_input(k)?;
        }
        let [rows, columns] = shape;
        let extents = chain.draw.pick(&[shape, [1, columns], [rows, 1]]);
        let mask: Vec<bool> = (0..extents[0] * extents[1]).map(|_| chain.draw.one_in(2)).collect();
        let _ = writeln!(chain.text, "  m0: bool {extents:?}");
        chain.masks.push(("m0".to_owned(), Tensor::from_bools(&mask, extents, device)?));
        // Otherwise the casts of the inputs would be a part of the chain.
        device.synchronize()?;
        for _ in 0..3 + chain.draw.below(6) {
            chain.apply_operation()?;
        }
        if !needs_grads {
            return Ok(chain.results);
        }
        let Some((name, last)) = chain.results.last().cloned() else { return Ok(Vec::new()) };
        if !last.requires_grad() {
            return Ok(chain.results);
        }
        let seed = chain.values(last.numel());
        let seed = Tensor::from_slice(&seed, last.shape(), device)?.to_dtype(last.dtype())?;
        device.synchronize()?;
        last.backward_with(&seed)?;
        let grads =
            chain.inputs.iter().filter_map(|(name, t)| Some((format!("gradient of {name}"), t.grad()?)));
        Ok(grads.chain([(name, last.detach())]).collect())
    }

    fn values(&mut self, count: usize) -> Vec<f32> {
        let mut value = || match self.draw.below(2) {
            0 => self.draw.pick(&SPECIAL),
            _ => (self.draw.below(4001) as f32 - 2000.0) / 531.0,
        };
        (0..count).map(|_| value()).collect()
    }

    /// Adds an operand of any float type, which may broadcast or be strided.
    fn add_input(&mut self, k: usize) -> CoreResult<()> {
        let [rows, columns] = self.shape;
        let layout = self.draw.below(8);
        let in_memory = match layout {
            0 => [1, columns],
            1 => [rows, 1],
            2 => [columns, rows],
            3 => [rows, columns + 1],
            4 => [2 * rows, columns],
            _ => self.shape,
        };
        let (dtype, values) = (self.draw.pick(&FLOATS), self.values(in_memory.iter().product()));
        let t = Tensor::from_slice(&values, in_memory, self.device)?.to_dtype(dtype)?;
        let t = match layout {
            2 => t.t()?,
            3 => t.narrow(1, 1, columns)?,
            4 => t.narrow(0, rows, rows)?,
            _ => t,
        };
        let t = if self.needs_grads { t.to_leaf()? } else { t };
        let _ = writeln!(self.text, "  x{k}: {dtype} {in_memory:?}, layout {layout}");
        self.inputs.push((format!("x{k}"), t));
        Ok(())
    }

    /// Draws an operand: most often the latest result or an earlier one.
    fn operand(&mut self) -> (String, Tensor) {
        let results = self.results.len();
        match self.draw.below(5) {
            0 | 1 if results > 0 => self.results[results - 1].clone(),
            2 if results > 0 => self.results[self.draw.below(results)].clone(),
            _ => self.inputs[self.draw.below(self.inputs.len())].clone(),
        }
    }

    /// Draws an operand that is `first` in half of all cases.
    fn repeated(&mut self, first: &(String, Tensor)) -> (String, Tensor) {
        if self.draw.one_in(2) { first.clone() } else { self.operand() }
    }

    fn apply_operation(&mut self) -> CoreResult<()> {
        let a = self.operand();
        let (text, made) = match self.draw.below(12) {
            0..=7 => {
                let table = self.draw.pick(&[UNARY, BINARY, BINARY, BINARY, TERNARY]);
                let (call, count, run) = self.draw.pick(table);
                let [b, c] = [(); 2].map(|()| self.repeated(&a));
                let names = [&*a.0, &*b.0, &*c.0][..count].join(", ");
                (format!("{call} of {names}"), run(&[a.1, b.1, c.1]))
            }
            8 => (format!("{0}.sub({0}.detach())", a.0), a.1.sub(&a.1.detach())),
            9 => {
                let (b, mask) = (self.repeated(&a), self.mask());
                (format!("where({}, {}, {})", mask.0, a.0, b.0), a.1.where_(&mask.1, &b.1))
            }
            10 => {
                let mask = self.mask();
                match self.draw.below(3) {
                    0 => (format!("{}.masked_fill({}, inf)", a.0, mask.0), a.1.masked_fill(&mask.1, INF)),
                    1 => (format!("{}.mul({})", a.0, mask.0), a.1.mul(&mask.1)),
                    _ => {
                        let b = self.repeated(&a);
                        let name = format!("m{}", self.masks.len());
                        let _ = writeln!(self.text, "  {name} = {}.lt({})", a.0, b.0);
                        self.masks.push((name, a.1.lt(&b.1)?));
                        return Ok(());
                    }
                }
            }
            _ if self.needs_grads || self.results.is_empty() => (format!("{}.mul(1)", a.0), a.1.mul(1.0)),
            _ => return self.write_in_place(),
        };
        let name = format!("t{}", self.count);
        self.count += 1;
        let _ = writeln!(self.text, "  {name} = {text}");
        self.results.push((name, made?));
        // A result that is dropped before the launch stays in a register.
        if self.results.len() > 2 && self.draw.one_in(3) {
            let at = self.draw.below(self.results.len() - 1);
            let _ = writeln!(self.text, "  drop {}", self.results[at].0);
            self.results.remove(at);
        }
        Ok(())
    }

    fn mask(&mut self) -> (String, Tensor) {
        self.masks[self.draw.below(self.masks.len())].clone()
    }

    /// Overwrites a result.
    fn write_in_place(&mut self) -> CoreResult<()> {
        let a = self.results[self.draw.below(self.results.len())].clone();
        let b = self.repeated(&a);
        // The result may be a line only.
        if a.1.shape() != self.shape || b.1.dtype() != a.1.dtype() {
            return Ok(());
        }
        let _ = writeln!(self.text, "  {}.sub_({})", a.0, b.0);
        a.1.sub_(&b.1)
    }
}

/// Returns the first difference between two lists of results.
fn find_difference(alone: &[(String, Tensor)], fused: &[(String, Tensor)]) -> Result<Option<String>> {
    ensure!(alone.len() == fused.len(), "{} results, fused {}", alone.len(), fused.len());
    for ((name, a), (_, b)) in alone.iter().zip(fused) {
        ensure!(a.shape() == b.shape() && a.dtype() == b.dtype(), "{name} has another shape or type");
        let (expected, got) = (a.to_f64s()?, b.to_f64s()?);
        let differs = |(x, y): (&f64, &f64)| x.to_bits() != y.to_bits() && !(x.is_nan() && y.is_nan());
        if let Some(at) = expected.iter().zip(&got).position(differs) {
            let (x, y) = (expected[at], got[at]);
            return Ok(Some(format!("element {at} of {name}, {}, is {x:?} alone, {y:?} fused", a.dtype())));
        }
    }
    Ok(None)
}

/// Runs random chains with and without fusion.
///
/// # Errors
/// A result has another shape or type, or cannot be read.
pub fn run(device: &Device, options: &ChainOptions) -> Result<ChainSummary> {
    let handle = |least: Option<u64>| {
        let handle = Device::with_config(device.backend().clone(), Config::default());
        handle.set_fusion_min_bytes(least);
        handle
    };
    let (alone, fusing) = (handle(None), handle(Some(0)));
    let mut summary = ChainSummary::default();
    for (count, needs_grads) in [(options.programs, false), (options.gradients, true)] {
        for seed in options.seed..options.seed + count {
            let mut text = String::new();
            let expected = Chain::run(seed, needs_grads, &alone, &mut text);
            let found = Chain::run(seed, needs_grads, &fusing, &mut String::new());
            let difference = match (expected, found) {
                (Ok(expected), Ok(found)) => {
                    summary.compared += 1;
                    find_difference(&expected, &found)?
                }
                (Err(_), Err(_)) => {
                    summary.refused += 1;
                    None
                }
                (Ok(_), Err(error)) => Some(format!("fused it fails: {error}")),
                (Err(error), Ok(_)) => Some(format!("alone it fails: {error}")),
            };
            let kind = if needs_grads { "gradients" } else { "program" };
            summary
                .differences
                .extend(difference.map(|what| format!("{kind} of seed {seed}: {what}\n{text}")));
        }
    }
    Ok(summary)
}

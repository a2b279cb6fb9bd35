//! Programs as values: inputs, statements over typed and shaped variables, and the terms of a scalar loss.

use forebay::dtype::DType;
use forebay::error::Result;
use forebay::tensor::Tensor;

use super::hyper_dual::{Derivatives, HyperDual, functions as f};

/// Use of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InputKind {
    /// f32 tensor that requires a gradient.
    Leaf,
    /// f32 tensor without a gradient.
    Constant,
    /// i32 tensor of indices.
    Index,
    /// Bool tensor.
    Mask,
}

/// Input tensor.
#[derive(Clone, Debug)]
pub(super) struct Input {
    pub(super) kind: InputKind,
    pub(super) shape: Vec<usize>,
    /// Values of the first run, and of the run with changed inputs.
    pub(super) values: [Vec<f64>; 2],
}

/// Dtype that an operation runs in under autocast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Precision {
    /// That of its inputs.
    Inputs,
    /// f32.
    Full,
    /// The 16-bit dtype of the scope.
    Low,
}

/// Elementwise function of one tensor.
pub(super) struct Unary {
    pub(super) name: &'static str,
    /// Call, as it is written after the tensor.
    pub(super) call: &'static str,
    pub(super) run: fn(&Tensor) -> Result<Tensor>,
    /// The form that changes its tensor, if there is one.
    pub(super) run_in_place: Option<fn(&Tensor) -> Result<()>>,
    pub(super) derivatives: Derivatives,
    /// Exclusive lower bound of the arguments.
    pub(super) above: f64,
    /// Arguments without a derivative.
    pub(super) kinks: &'static [f64],
    pub(super) precision: Precision,
}

macro_rules! unary {
    ($($name:ident $(($arg:literal))? $(/ $in_place:ident)?: $derivatives:path, $above:expr, $kinks:expr, $precision:ident;)*) => {
        /// Elementwise functions of one tensor, with their form in place, derivatives, lower bound, kinks and
        /// precision.
        pub(super) static UNARY: &[Unary] = &[$(Unary {
            name: stringify!($name),
            call: concat!(stringify!($name), "(", $(stringify!($arg),)? ")?"),
            run: |x| x.$name($($arg)?),
            run_in_place: unary!(@in_place $($in_place)?),
            derivatives: $derivatives,
            above: $above,
            kinks: $kinks,
            precision: Precision::$precision,
        }),*];
    };
    (@in_place) => { None };
    (@in_place $in_place:ident) => { Some(|x| x.$in_place()) };
}

const ANY: f64 = f64::NEG_INFINITY;
/// Lower bound of functions with a pole at 0.
const POSITIVE: f64 = 0.125;

unary! {
    neg / neg_: f::neg, ANY, &[], Inputs;
    abs / abs_: f::abs, ANY, &[0.0], Inputs;
    square / square_: f::square, ANY, &[], Inputs;
    exp / exp_: f::exp, ANY, &[], Full;
    expm1: f::expm1, ANY, &[], Full;
    log / log_: f::log, POSITIVE, &[], Full;
    log1p: f::log1p, POSITIVE, &[], Full;
    sqrt / sqrt_: f::sqrt, POSITIVE, &[], Inputs;
    rsqrt: f::rsqrt, POSITIVE, &[], Full;
    reciprocal / reciprocal_: f::reciprocal, POSITIVE, &[], Full;
    sin / sin_: f::sin, ANY, &[], Inputs;
    cos: f::cos, ANY, &[], Inputs;
    tanh / tanh_: f::tanh, ANY, &[], Inputs;
    sigmoid / sigmoid_: f::sigmoid, ANY, &[], Inputs;
    erf: f::erf, ANY, &[], Inputs;
    relu / relu_: f::relu, ANY, &[0.0], Inputs;
    leaky_relu(0.125): f::leaky_relu, ANY, &[0.0], Inputs;
    elu(1.0): f::elu, ANY, &[0.0], Inputs;
    silu / silu_: f::silu, ANY, &[], Inputs;
    gelu: f::gelu, ANY, &[], Inputs;
}

/// Elementwise function of two tensors.
pub(super) struct Binary {
    pub(super) name: &'static str,
    pub(super) run: fn(&Tensor, &Tensor) -> Result<Tensor>,
    pub(super) host: fn(HyperDual, HyperDual, f64) -> Option<HyperDual>,
}

macro_rules! binary {
    ($($name:ident: $host:expr;)*) => {
        /// Elementwise functions of two tensors.
        pub(super) static BINARY: &[Binary] =
            &[$(Binary { name: stringify!($name), run: |x, y| x.$name(y), host: $host }),*];
    };
}

binary! {
    add: |x, y, _| Some(x + y);
    sub: |x, y, _| Some(x - y);
    mul: |x, y, _| Some(x * y);
    div: |x, y, margin| Some(x * positive(y, margin)?.apply(f::reciprocal));
    maximum: |x, y, margin| Some(if is_less(&x, &y, margin)? { y } else { x });
    minimum: |x, y, margin| Some(if is_less(&x, &y, margin)? { x } else { y });
}

/// Reduction over dimensions.
pub(super) struct Reduction {
    /// Call with places for the dimensions and for `keepdim`.
    pub(super) call: &'static str,
    pub(super) run: fn(&Tensor, &[isize], bool) -> Result<Tensor>,
    pub(super) host: fn(&[HyperDual], f64) -> Option<HyperDual>,
    pub(super) precision: Precision,
}

/// Reductions.
pub(super) static REDUCTIONS: &[Reduction] = &[
    Reduction {
        call: "sum({}, {})?",
        run: |x, dims, keep| x.sum(dims, keep),
        host: |x, _| Some(sum(x)),
        precision: Precision::Full,
    },
    Reduction {
        call: "mean({}, {})?",
        run: |x, dims, keep| x.mean(dims, keep),
        host: |x, _| Some(mean(x)),
        precision: Precision::Inputs,
    },
    Reduction {
        call: "amax({}, {})?",
        run: |x, dims, keep| x.amax(dims, keep),
        host: |x, margin| sort(x, true, margin)?.first().map(|&k| x[k]),
        precision: Precision::Inputs,
    },
    Reduction {
        call: "amin({}, {})?",
        run: |x, dims, keep| x.amin(dims, keep),
        host: |x, margin| sort(x, false, margin)?.first().map(|&k| x[k]),
        precision: Precision::Inputs,
    },
    Reduction {
        call: "var({}, 0.0, {})?",
        run: |x, dims, keep| x.var(dims, 0.0, keep),
        host: |x, _| Some(mean(&centered(x).map(f::square))),
        precision: Precision::Inputs,
    },
    Reduction {
        call: "logsumexp({}, {})?",
        run: |x, dims, keep| x.logsumexp(dims, keep),
        host: |x, _| Some(log_sum_exp(x)),
        precision: Precision::Full,
    },
    Reduction {
        call: "norm(2.0, {}, {})?",
        run: |x, dims, keep| x.norm(2.0, dims, keep),
        host: |x, margin| Some(positive(sum(&x.to_vec().map(f::square)), margin)?.apply(f::sqrt)),
        precision: Precision::Full,
    },
];

/// Operation along a dimension that keeps the shape.
pub(super) struct Scan {
    /// Call with a place for the dimension.
    pub(super) call: &'static str,
    pub(super) run: fn(&Tensor, isize) -> Result<Tensor>,
    pub(super) host: fn(&[HyperDual], f64) -> Option<Vec<HyperDual>>,
    pub(super) precision: Precision,
}

/// Operations along a dimension.
pub(super) static SCANS: &[Scan] = &[
    Scan {
        call: "softmax({})?",
        run: |x, dim| x.softmax(dim),
        host: |x, _| Some(log_softmax(x).map(f::exp)),
        precision: Precision::Full,
    },
    Scan {
        call: "log_softmax({})?",
        run: |x, dim| x.log_softmax(dim),
        host: |x, _| Some(log_softmax(x)),
        precision: Precision::Full,
    },
    Scan {
        call: "cumsum({})?",
        run: |x, dim| x.cumsum(dim),
        host: |x, _| Some((1..=x.len()).map(|n| sum(&x[..n])).collect()),
        precision: Precision::Full,
    },
    Scan {
        call: "cumprod({})?",
        run: |x, dim| x.cumprod(dim),
        host: |x, _| {
            let product = |n| x[..n].iter().fold(HyperDual::constant(1.0), |y, x| y * *x);
            Some((1..=x.len()).map(product).collect())
        },
        precision: Precision::Full,
    },
    Scan {
        call: "sort({}, false)?.0",
        run: |x, dim| Ok(x.sort(dim, false)?.0),
        host: |x, margin| Some(sort(x, false, margin)?.into_iter().map(|k| x[k]).collect()),
        precision: Precision::Inputs,
    },
];

/// Operation of a statement. The tensors that it takes are the statement's arguments.
#[derive(Clone)]
pub(super) enum Op {
    Full(Vec<usize>, f64),
    Unary(&'static Unary),
    Binary(&'static Binary),
    AddScalar(f64),
    MulScalar(f64),
    Power(f64),
    Cast(DType),
    Greater,
    Where,
    MaskedFill(f64),
    Transpose(usize, usize),
    Permute(Vec<usize>),
    Narrow(usize, usize, usize),
    Slice(usize, usize, usize, usize),
    Select(usize, usize),
    Diagonal(isize),
    Unsqueeze(usize),
    Expand(Vec<usize>),
    Reshape(Vec<usize>),
    Unfold(usize, usize, usize),
    Flip(usize),
    Roll(usize, usize),
    Repeat(Vec<usize>),
    Tril(isize),
    Cat(usize),
    Stack(usize),
    Reduce(&'static Reduction, Vec<usize>, bool),
    Scan(&'static Scan, usize),
    Argsort(usize),
    LayerNorm,
    RmsNorm,
    Matmul,
    Linear,
    Conv2d { stride: usize, padding: usize },
    AvgPool2d(usize),
    MaxPool2d(usize),
    IndexSelect(usize),
    Gather(usize),
    ScatterAdd(usize),
    IndexAdd(usize),
    Embedding,
    WriteUnary(&'static Unary),
    WriteAdd,
    WriteMul,
    WriteCopy,
    WriteFill(f64),
    WriteMulScalar(f64),
    WriteMaskedFill(f64),
}

impl Op {
    /// Reports whether the operation changes its first argument and has no result.
    pub(super) fn writes(&self) -> bool {
        matches!(
            self,
            Self::WriteUnary(_)
                | Self::WriteAdd
                | Self::WriteMul
                | Self::WriteCopy
                | Self::WriteFill(_)
                | Self::WriteMulScalar(_)
                | Self::WriteMaskedFill(_)
        )
    }

    /// Reports whether the gradient needs neither an argument nor the result, so that a later write to them is allowed.
    pub(super) fn saves_nothing(&self) -> bool {
        !matches!(
            self,
            Self::Unary(_)
                | Self::Binary(_)
                | Self::Power(_)
                | Self::Reduce(..)
                | Self::Scan(..)
                | Self::LayerNorm
                | Self::RmsNorm
                | Self::Matmul
                | Self::Linear
                | Self::Conv2d { .. }
                | Self::MaxPool2d(_)
                | Self::WriteUnary(_)
                | Self::WriteMul
        )
    }

    /// Returns the precision under autocast.
    pub(super) fn precision(&self) -> Precision {
        match self {
            Self::Unary(function) => function.precision,
            Self::Reduce(reduction, ..) => reduction.precision,
            Self::Scan(scan, _) => scan.precision,
            Self::Power(_) | Self::LayerNorm => Precision::Full,
            Self::Matmul | Self::Linear | Self::Conv2d { .. } => Precision::Low,
            _ => Precision::Inputs,
        }
    }
}

/// Statement: an operation on variables. Variable `inputs.len() + k` is the result of statement `k`.
#[derive(Clone)]
pub(super) struct Statement {
    pub(super) op: Op,
    pub(super) args: Vec<usize>,
}

/// Random program. Its loss is the sum of some variables times constants.
#[derive(Clone, Default)]
pub(super) struct Program {
    pub(super) inputs: Vec<Input>,
    pub(super) statements: Vec<Statement>,
    /// Variables, each with the input that it is multiplied by.
    pub(super) loss: Vec<(usize, usize)>,
    /// Statements at which a checkpoint of the rest of the program begins.
    pub(super) cuts: Vec<usize>,
}

impl Program {
    /// Returns the variable that is the result of a statement.
    pub(super) fn result(&self, statement: usize) -> usize {
        self.inputs.len() + statement
    }

    /// Returns the name of a variable.
    pub(super) fn name(&self, variable: usize) -> String {
        match variable.checked_sub(self.inputs.len()) {
            Some(statement) => format!("v{statement}"),
            None => format!("x{variable}"),
        }
    }

    /// Returns the leaves.
    pub(super) fn leaves(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.inputs.len()).filter(|&k| self.inputs[k].kind == InputKind::Leaf)
    }

    /// Returns the variables that statements from `start` on, and the loss, take.
    pub(super) fn used_from(&self, start: usize) -> impl Iterator<Item = usize> + '_ {
        let args = self.statements[start..].iter().flat_map(|s| s.args.iter().copied());
        args.chain(self.loss.iter().flat_map(|&(variable, factor)| [variable, factor]))
    }

    /// Returns the direction of second derivatives along a leaf.
    pub(super) fn direction(&self, leaf: usize) -> Vec<f64> {
        let numel = self.inputs[leaf].shape.iter().product();
        (0..numel).map(|k| ((k * 3 + leaf) % 5) as f64 * 0.5 - 0.75).collect()
    }
}

/// Reports whether `x` is less than `y`; `None` if their errors allow both.
pub(super) fn is_less(x: &HyperDual, y: &HyperDual, margin: f64) -> Option<bool> {
    let difference = y.value() - x.value();
    (difference.abs() > margin * (x.error() + y.error())).then_some(difference > 0.0)
}

/// Returns the value if it is far enough from 0 for a quotient.
fn positive(x: HyperDual, margin: f64) -> Option<HyperDual> {
    is_less(&HyperDual::constant(POSITIVE), &x, margin)?.then_some(x)
}

/// Maps lists of values by functions.
trait MapAll {
    fn map(self, derivatives: Derivatives) -> Vec<HyperDual>;
}

impl MapAll for Vec<HyperDual> {
    fn map(self, derivatives: Derivatives) -> Vec<HyperDual> {
        self.into_iter().map(|x| x.apply(derivatives)).collect()
    }
}

fn sum(x: &[HyperDual]) -> HyperDual {
    x.iter().copied().sum()
}

pub(super) fn mean(x: &[HyperDual]) -> HyperDual {
    sum(x).scale(1.0 / x.len() as f64)
}

/// Subtracts the mean.
pub(super) fn centered(x: &[HyperDual]) -> Vec<HyperDual> {
    let mean = mean(x);
    x.iter().map(|x| *x - mean).collect()
}

/// Multiplies by the inverse root of the mean square plus `eps`.
pub(super) fn normalized(x: &[HyperDual], eps: f64) -> Vec<HyperDual> {
    let power = mean(&x.to_vec().map(f::square)) + HyperDual::constant(eps);
    let factor = power.apply(f::rsqrt);
    x.iter().map(|x| *x * factor).collect()
}

fn log_sum_exp(x: &[HyperDual]) -> HyperDual {
    let largest = x.iter().map(HyperDual::value).fold(f64::MIN, f64::max);
    let largest = HyperDual::constant(largest);
    sum(&x.iter().map(|x| (*x - largest).apply(f::exp)).collect::<Vec<_>>()).apply(f::log) + largest
}

fn log_softmax(x: &[HyperDual]) -> Vec<HyperDual> {
    let total = log_sum_exp(x);
    x.iter().map(|x| *x - total).collect()
}

/// Returns the positions in sorted order; `None` if errors allow another order.
pub(super) fn sort(x: &[HyperDual], descending: bool, margin: f64) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[a].value().total_cmp(&x[b].value()));
    if !order.windows(2).all(|pair| is_less(&x[pair[0]], &x[pair[1]], margin) == Some(true)) {
        return None;
    }
    if descending {
        order.reverse();
    }
    Some(order)
}

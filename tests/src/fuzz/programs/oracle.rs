//! Oracle: runs a program on the host with hyper-dual numbers, without any kernel.
//!
//! A view is the list of its elements' positions in a storage, so writes through views need no strides. Every statement
//! adds the error of its roundings, which gives each value and gradient its own bound.

use std::rc::Rc;

use forebay::dtype::DType;

use super::hyper_dual::{HyperDual, functions};
use super::program::{InputKind, Op, Precision, Program, Statement, centered, is_less, normalized, sort};

/// Added to variances and mean squares by norms.
pub(super) const EPS: f64 = 0.0625;

/// Elements in row-major order: values of a tensor, or positions in a storage.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Array<T> {
    pub(super) shape: Vec<usize>,
    pub(super) data: Vec<T>,
}

/// Returns every index of a shape, in row-major order.
fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..shape.iter().product()).map(move |mut at: usize| {
        let mut index = vec![0; shape.len()];
        for (i, n) in index.iter_mut().zip(shape).rev() {
            *i = at % n;
            at /= n;
        }
        index
    })
}

/// Returns a copy with one extent, or one part of an index, replaced.
fn replaced(list: &[usize], dim: usize, value: usize) -> Vec<usize> {
    let mut list = list.to_vec();
    list[dim] = value;
    list
}

impl<T: Copy> Array<T> {
    /// Returns the element at an index of this shape or of one that it is broadcast to.
    fn at(&self, index: &[usize]) -> T {
        let own = &index[index.len() - self.shape.len()..];
        let step = |at, (i, n): (&usize, &usize)| at * n + if *n == 1 { 0 } else { *i };
        self.data[own.iter().zip(&self.shape).fold(0, step)]
    }

    /// Creates an array whose element at an index is that of this array at index `old`.
    fn remap(&self, shape: &[usize], old: impl Fn(&[usize]) -> Vec<usize>) -> Self {
        Self { shape: shape.to_vec(), data: indices(shape).map(|index| self.at(&old(&index))).collect() }
    }

    /// Creates an array in which one dimension of the index is remapped.
    fn remap_dim(&self, dim: usize, extent: usize, old: impl Fn(usize) -> usize) -> Self {
        self.remap(&replaced(&self.shape, dim, extent), |index| replaced(index, dim, old(index[dim])))
    }

    fn expand(&self, shape: &[usize]) -> Self {
        self.remap(shape, <[usize]>::to_vec)
    }

    fn permute(&self, order: &[usize]) -> Self {
        let shape: Vec<usize> = order.iter().map(|&d| self.shape[d]).collect();
        self.remap(&shape, |index| {
            let mut old = vec![0; order.len()];
            order.iter().zip(index).for_each(|(&d, &i)| old[d] = i);
            old
        })
    }

    fn reshape(&self, shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), data: self.data.clone() }
    }

    /// Applies an operation of views; `None` for other operations.
    fn view(&self, op: &Op) -> Option<Self> {
        let rank = self.shape.len();
        Some(match op {
            Op::Transpose(a, b) => {
                let mut order: Vec<usize> = (0..rank).collect();
                order.swap(*a, *b);
                self.permute(&order)
            }
            Op::Permute(order) => self.permute(order),
            Op::Narrow(dim, start, length) => self.remap_dim(*dim, *length, |i| start + i),
            Op::Slice(dim, start, stop, step) => {
                self.remap_dim(*dim, (stop - start).div_ceil(*step), |i| start + i * step)
            }
            Op::Select(dim, at) => {
                let mut shape = self.shape.clone();
                shape.remove(*dim);
                self.remap_dim(*dim, 1, |_| *at).reshape(&shape)
            }
            Op::Diagonal(offset) => {
                let (rows, columns) = (self.shape[0], self.shape[1]);
                let (down, right) = ((-offset).max(0) as usize, (*offset).max(0) as usize);
                let length = (rows - down).min(columns - right);
                let shape = [&self.shape[2..], &[length]].concat();
                self.remap(&shape, |index| {
                    let k = index[rank - 2];
                    [&[k + down, k + right], &index[..rank - 2]].concat()
                })
            }
            Op::Unsqueeze(dim) => {
                let mut shape = self.shape.clone();
                shape.insert(*dim, 1);
                self.reshape(&shape)
            }
            Op::Expand(shape) => self.expand(shape),
            Op::Unfold(dim, size, step) => {
                let mut shape = replaced(&self.shape, *dim, (self.shape[*dim] - size) / step + 1);
                shape.push(*size);
                self.remap(&shape, |index| replaced(&index[..rank], *dim, index[*dim] * step + index[rank]))
            }
            _ => return None,
        })
    }

    fn cat(parts: &[Self], dim: usize) -> Self {
        let total = parts.iter().map(|part| part.shape[dim]).sum();
        let shape = replaced(&parts[0].shape, dim, total);
        let element = |index: Vec<usize>| {
            let (mut k, mut at) = (0, index[dim]);
            while at >= parts[k].shape[dim] {
                at -= parts[k].shape[dim];
                k += 1;
            }
            parts[k].at(&replaced(&index, dim, at))
        };
        Self { data: indices(&shape).map(element).collect(), shape }
    }
}

impl Array<usize> {
    /// Reports whether the positions have strides, so that a reshape is a view and not a copy.
    fn is_strided(&self) -> bool {
        let Some(&base) = self.data.first() else { return true };
        let rank = self.shape.len();
        let stride = |d: usize| match self.shape[d] {
            1 => 0,
            _ => self.at(&replaced(&vec![0; rank], d, 1)) as isize - base as isize,
        };
        let strides: Vec<isize> = (0..rank).map(stride).collect();
        indices(&self.shape).zip(&self.data).all(|(index, &at)| {
            let expected: isize = index.iter().zip(&strides).map(|(&i, s)| i as isize * s).sum();
            at as isize == base as isize + expected
        })
    }

    /// Reports whether two elements have the same position.
    pub(super) fn overlaps(&self) -> bool {
        let mut at = self.data.clone();
        at.sort_unstable();
        at.windows(2).any(|pair| pair[0] == pair[1])
    }
}

impl Array<HyperDual> {
    /// Applies `f` to the elements along the dimensions. Each list of results is along the last new dimension.
    fn fold(&self, dims: &[usize], f: impl Fn(&[HyperDual]) -> Option<Vec<HyperDual>>) -> Option<Self> {
        let kept: Vec<usize> = (0..self.shape.len()).filter(|d| !dims.contains(d)).collect();
        let turned = self.permute(&[&kept[..], dims].concat());
        let length: usize = dims.iter().map(|&d| self.shape[d]).product();
        let lists = turned.data.chunks(length).map(f).collect::<Option<Vec<_>>>()?;
        let mut shape: Vec<usize> = kept.iter().map(|&d| self.shape[d]).collect();
        shape.push(lists[0].len());
        Some(Self { shape, data: lists.concat() })
    }

    /// Applies `f` along a dimension, which keeps its place.
    fn along(&self, dim: usize, f: impl Fn(&[HyperDual]) -> Option<Vec<HyperDual>>) -> Option<Self> {
        let mut order: Vec<usize> = (0..self.shape.len() - 1).collect();
        order.insert(dim, self.shape.len() - 1);
        Some(self.fold(&[dim], f)?.permute(&order))
    }

    fn map(&self, f: impl Fn(HyperDual) -> Option<HyperDual>) -> Option<Self> {
        let data = self.data.iter().map(|&x| f(x)).collect::<Option<_>>()?;
        Some(Self { shape: self.shape.clone(), data })
    }

    fn zip(&self, other: &Self, f: impl Fn(HyperDual, HyperDual) -> Option<HyperDual>) -> Option<Self> {
        let shape = broadcast(&self.shape, &other.shape);
        let data =
            indices(&shape).map(|index| f(self.at(&index), other.at(&index))).collect::<Option<_>>()?;
        Some(Self { shape, data })
    }

    fn position(&self, index: &[usize]) -> usize {
        self.at(index).value() as usize
    }

    /// Adds `source` at the positions that `to` returns.
    fn add_at(mut self, source: &Self, to: impl Fn(&[usize]) -> Vec<usize>) -> Self {
        for index in indices(&source.shape) {
            let at = to(&index).iter().zip(&self.shape).fold(0, |at, (i, n)| at * n + i);
            self.data[at] = self.data[at] + source.at(&index);
        }
        self
    }

    fn matmul(&self, other: &Self) -> Self {
        let (a, b) = (self.shape.len() - 2, other.shape.len() - 2);
        let mut shape = broadcast(&self.shape[..a], &other.shape[..b]);
        let rank = shape.len();
        shape.extend([self.shape[a], other.shape[b + 1]]);
        let element = |index: Vec<usize>| {
            let term = |k| self.at(&replaced(&index, rank + 1, k)) * other.at(&replaced(&index, rank, k));
            (0..other.shape[b]).map(term).sum()
        };
        Self { data: indices(&shape).map(element).collect(), shape }
    }

    fn transposed(&self) -> Self {
        self.permute(&[1, 0])
    }

    /// Returns the windows of an image as dimensions [.., height, width, size, size].
    fn windows(&self, size: [usize; 2], stride: usize) -> Option<Self> {
        let rank = self.shape.len();
        self.view(&Op::Unfold(rank - 2, size[0], stride))?.view(&Op::Unfold(rank - 1, size[1], stride))
    }

    fn padded(&self, padding: usize) -> Self {
        let [n, c, h, w] = [0, 1, 2, 3].map(|d| self.shape[d]);
        let shape = vec![n, c, h + 2 * padding, w + 2 * padding];
        let count = shape.iter().product();
        Self { shape, data: vec![HyperDual::default(); count] }
            .add_at(self, |i| vec![i[0], i[1], i[2] + padding, i[3] + padding])
    }
}

/// Returns the shape that two shapes are broadcast to.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Vec<usize> {
    let rank = a.len().max(b.len());
    let extent = |shape: &[usize], d: usize| (d + shape.len()).checked_sub(rank).map_or(1, |d| shape[d]);
    (0..rank).map(|d| if extent(a, d) == 1 { extent(b, d) } else { extent(a, d) }).collect()
}

/// Variable: a view of a storage.
#[derive(Clone)]
pub(super) struct View {
    pub(super) storage: usize,
    pub(super) positions: Array<usize>,
    pub(super) dtype: DType,
}

/// State of a program on the host.
#[derive(Clone)]
pub(super) struct Oracle {
    storages: Vec<Rc<Vec<HyperDual>>>,
    /// Variables; `None` for statements without a result.
    pub(super) variables: Vec<Option<View>>,
    /// If true, operations choose their dtype as under autocast to bf16.
    autocast: bool,
    /// Factor of error bounds in comparisons.
    margin: f64,
}

/// Returns the largest relative error of one rounding.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    }
}

impl Oracle {
    /// Creates a state without variables.
    pub(super) fn new(autocast: bool, margin: f64) -> Self {
        Self { storages: Vec::new(), variables: Vec::new(), autocast, margin }
    }

    /// Runs a program with the values of run `round`, and the first direction along one element of the leaves. Returns
    /// the state and the loss; `None` if a comparison is within the error of its operands.
    pub(super) fn run(
        program: &Program,
        round: usize,
        element: usize,
        autocast: bool,
    ) -> Option<(Self, HyperDual)> {
        let mut oracle = Self::new(autocast, 1.0);
        let mut first = 0;
        for k in 0..program.inputs.len() {
            let along = element.checked_sub(first);
            first += oracle.add_input(program, k, round, along);
        }
        for k in 0..program.statements.len() {
            oracle.execute(program, k)?;
        }
        let loss = oracle.loss(program);
        Some((oracle, loss))
    }

    /// Adds an input. Returns the number of its elements if it is a leaf, or 0.
    pub(super) fn add_input(
        &mut self,
        program: &Program,
        k: usize,
        round: usize,
        along: Option<usize>,
    ) -> usize {
        let input = &program.inputs[k];
        let values = &input.values[round];
        let is_leaf = input.kind == InputKind::Leaf;
        let direction = if is_leaf { program.direction(k) } else { vec![0.0; values.len()] };
        let element = |(i, (&value, &direction)): (usize, (&f64, &f64))| {
            HyperDual::variable(value, f64::from(is_leaf && along == Some(i)), direction)
        };
        let data = values.iter().zip(&direction).enumerate().map(element).collect();
        let dtype = match input.kind {
            InputKind::Leaf | InputKind::Constant => DType::F32,
            InputKind::Index => DType::I32,
            InputKind::Mask => DType::Bool,
        };
        self.push(Array { shape: input.shape.clone(), data }, dtype);
        if is_leaf { values.len() } else { 0 }
    }

    fn push(&mut self, array: Array<HyperDual>, dtype: DType) {
        let positions = Array { shape: array.shape, data: (0..array.data.len()).collect() };
        self.storages.push(Rc::new(array.data));
        self.variables.push(Some(View { storage: self.storages.len() - 1, positions, dtype }));
    }

    /// Returns a variable; statements only take variables that exist.
    pub(super) fn view(&self, variable: usize) -> Option<&View> {
        self.variables.get(variable)?.as_ref()
    }

    /// Reads the elements of a variable.
    pub(super) fn read(&self, variable: usize) -> Option<Array<HyperDual>> {
        let view = self.view(variable)?;
        let storage = &self.storages[view.storage];
        let data = view.positions.data.iter().map(|&at| storage[at]).collect();
        Some(Array { shape: view.positions.shape.clone(), data })
    }

    /// Returns the weighted sum of the program's variables.
    fn loss(&self, program: &Program) -> HyperDual {
        let mut loss = HyperDual::default();
        for &(variable, factor) in &program.loss {
            let product =
                self.read(variable).zip(self.read(factor)).and_then(|(x, w)| x.zip(&w, |x, w| Some(x * w)));
            let Some(product) = product else { continue };
            loss = loss + product.data.iter().copied().sum();
            let dtype = self.view(variable).map_or(DType::F32, |view| view.dtype);
            loss.round(unit(dtype) + (product.data.len() + 2 * program.loss.len()) as f64 * unit(DType::F32));
        }
        loss
    }

    /// Runs a statement. Returns `None`, and changes nothing, if a comparison is within the error of its operands or an
    /// argument is outside of the operation's domain.
    pub(super) fn execute(&mut self, program: &Program, k: usize) -> Option<()> {
        let Statement { op, args } = &program.statements[k];
        let views = args.iter().map(|&arg| self.view(arg).cloned()).collect::<Option<Vec<_>>>()?;
        if matches!(op, Op::IndexAdd(_)) && views[0].dtype != views[2].dtype {
            return None;
        }
        if let Some(first) = views.first() {
            let positions = match op {
                Op::Reshape(shape) => Some(first.positions.reshape(shape)).filter(Array::is_strided),
                Op::Cast(dtype) if *dtype == first.dtype => Some(first.positions.clone()),
                op => first.positions.view(op),
            };
            if let Some(positions) = positions {
                self.variables.push(Some(View { positions, ..first.clone() }));
                return Some(());
            }
        }
        let arrays = args.iter().map(|&arg| self.read(arg)).collect::<Option<Vec<_>>>()?;
        let mut result = self.compute(op, &arrays)?;
        let floats: Vec<DType> = views.iter().map(|v| v.dtype).filter(|dtype| dtype.is_float()).collect();
        // A scalar tensor does not change the dtype of others, as in PyTorch.
        let ranked = views.iter().filter(|v| v.dtype.is_float() && !v.positions.shape.is_empty());
        let widest = ranked.map(|v| v.dtype).reduce(DType::promote);
        let widest = widest.or_else(|| floats.iter().copied().reduce(DType::promote)).unwrap_or(DType::F32);
        let dtype = match op {
            Op::Cast(dtype) => *dtype,
            Op::Greater => DType::Bool,
            Op::Argsort(_) => DType::I64,
            op if op.writes() || matches!(op, Op::RmsNorm) => views[0].dtype,
            op => match op.precision() {
                Precision::Low if self.autocast => DType::BF16,
                Precision::Full if self.autocast => DType::F32,
                _ => widest,
            },
        };
        // A result is rounded once, each operand's cast and gradient once, and each sum of gradients once. Second
        // gradients pass through twice as many.
        let uses = program.used_from(k).filter(|v| *v == program.result(k) || args.contains(v)).count();
        let longest = arrays.iter().chain([&result]).map(|a| a.data.len()).max().unwrap_or(1);
        let largest = floats.iter().map(|d| unit(*d)).fold(unit(dtype), f64::max);
        let units = (2 * (1 + args.len() + uses)) as f64 * largest + (8 + longest) as f64 * unit(DType::F32);
        result.data.iter_mut().for_each(|x| x.round(units));
        if !op.writes() {
            self.push(result, dtype);
            return Some(());
        }
        let storage = Rc::make_mut(&mut self.storages[views[0].storage]);
        views[0].positions.data.iter().zip(result.data).for_each(|(&at, value)| storage[at] = value);
        self.variables.push(None);
        Some(())
    }

    /// Computes the result of an operation, or the new elements of the tensor that it writes.
    fn compute(&self, op: &Op, x: &[Array<HyperDual>]) -> Option<Array<HyperDual>> {
        let constant = HyperDual::constant;
        let margin = self.margin;
        let is_set = |mask: &HyperDual| mask.value() != 0.0;
        Some(match op {
            Op::Full(shape, value) => {
                Array { shape: shape.clone(), data: vec![constant(*value); shape.iter().product()] }
            }
            Op::Unary(function) | Op::WriteUnary(function) => x[0].map(|x| {
                let is_inside = is_less(&constant(function.above), &x, margin)?;
                let is_clear = |kink: &f64| is_less(&constant(*kink), &x, margin).is_some();
                (is_inside && function.kinks.iter().all(is_clear)).then(|| x.apply(function.derivatives))
            })?,
            Op::Binary(function) => x[0].zip(&x[1], |a, b| (function.host)(a, b, margin))?,
            Op::WriteAdd => x[0].zip(&x[1], |a, b| Some(a + b))?,
            Op::WriteMul => x[0].zip(&x[1], |a, b| Some(a * b))?,
            Op::WriteCopy => x[1].expand(&x[0].shape),
            Op::AddScalar(value) => x[0].map(|x| Some(x + constant(*value)))?,
            Op::MulScalar(value) | Op::WriteMulScalar(value) => x[0].map(|x| Some(x.scale(*value)))?,
            Op::WriteFill(value) => x[0].map(|_| Some(constant(*value)))?,
            // Only whole powers, which have all arguments.
            Op::Power(p) if *p == 2.0 => x[0].map(|x| Some(x.apply(functions::square)))?,
            Op::Power(_) => x[0].map(|x| Some(x.apply(|x| functions::power(x, 3.0))))?,
            Op::Cast(_) => x[0].clone(),
            Op::Greater => x[0].zip(&x[1], |a, b| Some(constant(f64::from(is_less(&b, &a, margin)?))))?,
            Op::Where => {
                let shape = broadcast(&broadcast(&x[0].shape, &x[1].shape), &x[2].shape);
                let pick = |index: Vec<usize>| x[if is_set(&x[0].at(&index)) { 1 } else { 2 }].at(&index);
                Array { data: indices(&shape).map(pick).collect(), shape }
            }
            Op::MaskedFill(value) | Op::WriteMaskedFill(value) => {
                x[0].zip(&x[1], |x, mask| Some(if is_set(&mask) { constant(*value) } else { x }))?
            }
            Op::Reshape(shape) => x[0].reshape(shape),
            Op::Flip(dim) => x[0].remap_dim(*dim, x[0].shape[*dim], |i| x[0].shape[*dim] - 1 - i),
            Op::Roll(shift, dim) => {
                let n = x[0].shape[*dim];
                x[0].remap_dim(*dim, n, |i| (i + n - shift % n) % n)
            }
            Op::Repeat(counts) => {
                let shape: Vec<usize> = counts.iter().zip(&x[0].shape).map(|(k, n)| k * n).collect();
                x[0].remap(&shape, |index| index.iter().zip(&x[0].shape).map(|(i, n)| i % n).collect())
            }
            Op::Tril(diagonal) => {
                let rank = x[0].shape.len();
                let mut lower = x[0].clone();
                for (index, value) in indices(&x[0].shape).zip(&mut lower.data) {
                    if index[rank - 1] as isize - index[rank - 2] as isize > *diagonal {
                        *value = HyperDual::default();
                    }
                }
                lower
            }
            Op::Cat(dim) => Array::cat(x, *dim),
            Op::Stack(dim) => {
                let parts = x.iter().map(|x| x.view(&Op::Unsqueeze(*dim))).collect::<Option<Vec<_>>>()?;
                Array::cat(&parts, *dim)
            }
            Op::Reduce(reduction, dims, keepdim) => {
                let folded = x[0].fold(dims, |list| Some(vec![(reduction.host)(list, margin)?]))?;
                let extents = x[0].shape.iter().enumerate();
                let left = extents.filter(|(d, _)| *keepdim || !dims.contains(d));
                let shape: Vec<usize> = left.map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect();
                folded.reshape(&shape)
            }
            Op::Scan(scan, dim) => x[0].along(*dim, |list| (scan.host)(list, margin))?,
            Op::Argsort(dim) => x[0].along(*dim, |list| {
                Some(sort(list, true, margin)?.into_iter().map(|k| constant(k as f64)).collect())
            })?,
            Op::LayerNorm => {
                let last = x[0].shape.len() - 1;
                let normed = x[0].along(last, |list| Some(normalized(&centered(list), EPS)))?;
                normed.zip(&x[1], |a, b| Some(a * b))?.zip(&x[2], |a, b| Some(a + b))?
            }
            Op::RmsNorm => {
                let last = x[0].shape.len() - 1;
                x[0].along(last, |list| Some(normalized(list, EPS)))?.zip(&x[1], |a, b| Some(a * b))?
            }
            Op::Matmul => x[0].matmul(&x[1]),
            Op::Linear => x[0].matmul(&x[1].transposed()).zip(&x[2], |a, b| Some(a + b))?,
            Op::Conv2d { stride, padding } => {
                let [outputs, channels, height, width] = [0, 1, 2, 3].map(|d| x[1].shape[d]);
                let windows = x[0].padded(*padding).windows([height, width], *stride)?;
                let taps = channels * height * width;
                // [batch, height, width, channels, taps] as rows of a product.
                let columns = windows.permute(&[0, 2, 3, 1, 4, 5]);
                let [batch, rows, lines] = [0, 1, 2].map(|d| columns.shape[d]);
                let columns = columns.reshape(&[batch * rows * lines, taps]);
                let made = columns.matmul(&x[1].reshape(&[outputs, taps]).transposed());
                let made = made.zip(&x[2], |a, b| Some(a + b))?;
                made.reshape(&[batch, rows, lines, outputs]).permute(&[0, 3, 1, 2])
            }
            Op::AvgPool2d(size) => {
                let windows = x[0].windows([*size; 2], *size)?;
                let pooled = windows.fold(&[4, 5], |list| Some(vec![super::program::mean(list)]))?;
                pooled.reshape(&windows.shape[..4])
            }
            Op::MaxPool2d(size) => {
                let windows = x[0].windows([*size; 2], *size)?;
                let pooled =
                    windows.fold(&[4, 5], |list| Some(vec![list[*sort(list, true, margin)?.first()?]]))?;
                pooled.reshape(&windows.shape[..4])
            }
            Op::IndexSelect(dim) => x[0].remap_dim(*dim, x[1].data.len(), |i| x[1].position(&[i])),
            Op::Gather(dim) if x[1].data.iter().any(|i| i.value() >= x[0].shape[*dim] as f64) => return None,
            Op::Gather(dim) => x[0].remap(&x[1].shape, |index| replaced(index, *dim, x[1].position(index))),
            Op::ScatterAdd(dim) => {
                x[0].clone().add_at(&x[2], |index| replaced(index, *dim, x[1].position(index)))
            }
            Op::IndexAdd(dim) => {
                x[0].clone().add_at(&x[2], |index| replaced(index, *dim, x[1].position(&index[*dim..=*dim])))
            }
            Op::Embedding => {
                let shape = [&x[1].shape[..], &x[0].shape[1..]].concat();
                let rank = x[1].shape.len();
                x[0].remap(&shape, |index| vec![x[1].position(&index[..rank]), index[rank]])
            }
            Op::Transpose(..)
            | Op::Permute(_)
            | Op::Narrow(..)
            | Op::Slice(..)
            | Op::Select(..)
            | Op::Diagonal(_)
            | Op::Unsqueeze(_)
            | Op::Expand(_)
            | Op::Unfold(..) => return None,
        })
    }
}

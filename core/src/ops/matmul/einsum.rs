//! Einsum: views, one batched product for each further operand, and a sum.

use crate::ops::prelude::*;
use crate::ops::shape::as_refs;

const OP: &str = "einsum";

/// Label of a dimension: a letter, or a position within the ellipsis counted from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Ellipsis(usize),
    Letter(char),
}

type Labels = SmallVec<[Label; 8]>;

fn equation_error(equation: &str, what: &str) -> Error {
    Error::argument(OP, format!("`{equation}`: {what}"))
}

/// Parses the labels of one operand. The ellipsis stands for `dots` dimensions.
fn parse_labels(equation: &str, term: &str, dots: usize) -> Result<Labels> {
    let mut out = Labels::new();
    let (head, tail) = term.split_once("...").unwrap_or((term, ""));
    let letters = |part: &str, out: &mut Labels| {
        part.chars().filter(|c| !c.is_whitespace()).try_for_each(|c| {
            if !c.is_ascii_alphabetic() {
                return Err(equation_error(equation, &format!("`{c}` is not a letter")));
            }
            out.push(Label::Letter(c));
            Ok(())
        })
    };
    letters(head, &mut out)?;
    if term.contains("...") {
        out.extend((0..dots).rev().map(Label::Ellipsis));
    }
    letters(tail, &mut out)?;
    Ok(out)
}

/// Operand with one label for each dimension.
struct EinsumOperand {
    tensor: Tensor,
    labels: Labels,
}

impl EinsumOperand {
    /// Creates an operand. A label that is repeated within one operand selects the diagonal.
    fn new(tensor: &Tensor, labels: Labels) -> Result<Self> {
        let mut term = Self { tensor: tensor.clone(), labels };
        let repeated = |labels: &Labels| {
            (0..labels.len()).find_map(|i| Some((i, (0..i).find(|&j| labels[j] == labels[i])?)))
        };
        while let Some((second, first)) = repeated(&term.labels) {
            let extents = (term.tensor.shape()[first], term.tensor.shape()[second]);
            fail_if!(extents.0 != extents.1; shape(OP, [term.tensor]), "a repeated label has two extents");
            let label = term.labels[first];
            term.tensor = term.tensor.diagonal(0, first as isize, second as isize)?;
            term.labels.remove(second);
            term.labels.remove(first);
            term.labels.push(label);
        }
        Ok(term)
    }

    fn extent(&self, label: Label) -> Option<usize> {
        self.labels.iter().position(|&l| l == label).map(|d| self.tensor.shape()[d])
    }

    /// Sums over the labels that no later step needs.
    fn sum_unneeded(self, needed: &Labels) -> Result<Self> {
        let unneeded: SmallVec<[isize; 8]> = (0..self.labels.len())
            .filter(|&d| !needed.contains(&self.labels[d]))
            .map(|d| d as isize)
            .collect();
        if unneeded.is_empty() {
            return Ok(self);
        }
        let labels = self.labels.iter().copied().filter(|l| needed.contains(l)).collect();
        Ok(Self { tensor: self.tensor.sum(&unneeded, false)?, labels })
    }

    /// Permutes the dimensions to these labels and merges each group. A missing label has extent 1.
    fn permute_and_merge(&self, groups: [&Labels; 3]) -> Result<Tensor> {
        let order: SmallVec<[isize; 8]> = groups
            .iter()
            .flat_map(|g| g.iter())
            .filter_map(|label| self.labels.iter().position(|l| l == label))
            .map(|d| d as isize)
            .collect();
        let extents = groups.map(|g| g.iter().filter_map(|&l| self.extent(l)).product::<usize>());
        self.tensor.permute(&order)?.reshape(extents)
    }

    /// Multiplies by another operand and sums over the shared labels that are not in `needed`.
    fn contract(self, other: Self, needed: &Labels) -> Result<Self> {
        let in_both = |l: &Label| self.labels.contains(l) && other.labels.contains(l);
        // An extent of 1 broadcasts: drop the label here and keep the other operand's.
        let broadcast: Labels = self
            .labels
            .iter()
            .copied()
            .filter(|l| in_both(l) && self.extent(*l) != other.extent(*l))
            .collect();
        if !broadcast.is_empty() {
            return self.squeeze_labels(&broadcast)?.contract(other.squeeze_labels(&broadcast)?, needed);
        }
        let keep = |l: &Label| needed.contains(l);
        let batch: Labels = self.labels.iter().copied().filter(|l| in_both(l) && keep(l)).collect();
        let summed: Labels = self.labels.iter().copied().filter(|l| in_both(l) && !keep(l)).collect();
        let rows: Labels = self.labels.iter().copied().filter(|l| !in_both(l)).collect();
        let cols: Labels = other.labels.iter().copied().filter(|l| !in_both(l)).collect();
        let a = self.permute_and_merge([&batch, &rows, &summed])?;
        let b = other.permute_and_merge([&batch, &summed, &cols])?;
        let extent = |l: &Label| self.extent(*l).or_else(|| other.extent(*l)).unwrap_or(1);
        let labels: Labels = batch.iter().chain(&rows).chain(&cols).copied().collect();
        let shape: Dims = labels.iter().map(extent).collect();
        Ok(Self { tensor: a.bmm(&b)?.reshape(&shape[..])?, labels })
    }

    /// Removes the dimensions of these labels that have extent 1.
    fn squeeze_labels(&self, which: &Labels) -> Result<Self> {
        let keep = |d: &usize| !which.contains(&self.labels[*d]) || self.tensor.shape()[*d] != 1;
        let kept: SmallVec<[usize; 8]> = (0..self.labels.len()).filter(keep).collect();
        let shape: Dims = kept.iter().map(|&d| self.tensor.shape()[d]).collect();
        Ok(Self {
            tensor: self.tensor.reshape(&shape[..])?,
            labels: kept.iter().map(|&d| self.labels[d]).collect(),
        })
    }
}

/// Parses the labels of one operand. Also returns the rank of its ellipsis, 0 without one.
fn parse_operand(equation: &str, term: &str, tensor: &Tensor) -> Result<(EinsumOperand, usize)> {
    let letters = parse_labels(equation, term, 0)?.len();
    let ellipsis_rank = tensor.rank().saturating_sub(letters);
    let labels = parse_labels(equation, term, ellipsis_rank)?;
    if labels.len() != tensor.rank() {
        return Err(equation_error(
            equation,
            &format!(
                "`{}` does not name the {} dimensions of {:?}",
                term.trim(),
                tensor.rank(),
                tensor.shape()
            ),
        ));
    }
    let operand = EinsumOperand::new(tensor, labels)?;
    Ok((operand, if term.contains("...") { ellipsis_rank } else { 0 }))
}

/// Returns the labels of the result of an equation without `->`: the ellipsis, then the letters that occur once.
fn implicit_result_labels(left: &str, ellipsis_rank: usize) -> Labels {
    let is_unique = |c: &char| c.is_ascii_alphabetic() && left.matches(*c).count() == 1;
    let mut unique_labels: Labels = left.chars().filter(is_unique).map(Label::Letter).collect();
    unique_labels.sort_unstable();
    (0..ellipsis_rank).rev().map(Label::Ellipsis).chain(unique_labels).collect()
}

/// Fails for a result that repeats or invents a label, and for a label with several extents other than 1.
fn check_labels(
    equation: &str,
    parsed: &[EinsumOperand],
    result: &Labels,
    operands: &[&Tensor],
) -> Result<()> {
    for (i, label) in result.iter().enumerate() {
        if result[..i].contains(label) {
            return Err(equation_error(equation, "the result names a label twice"));
        }
        if !parsed.iter().any(|t| t.labels.contains(label)) {
            return Err(equation_error(equation, "the result names a label that no operand has"));
        }
    }
    for term in parsed {
        for &label in &term.labels {
            let other = parsed.iter().filter_map(|t| t.extent(label)).find(|&n| n != 1);
            if term.extent(label) != Some(1) && term.extent(label) != other {
                let shapes: SmallVec<[&[usize]; 4]> = operands.iter().map(|t| t.shape()).collect();
                return Err(Error::shape(OP, "extents of one label differ", &shapes));
            }
        }
    }
    Ok(())
}

/// Computes the sum of products of an equation such as `bij,bjk->bik`. Each dimension has a letter, and `...`
/// stands for dimensions that broadcast. Letters missing in the result are summed over. Without `->`, the
/// result has the letters that occur once, in alphabetical order. Operands are multiplied from left to right.
///
/// ```
/// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType, ops::einsum};
/// # let device = Device::null(Default::default());
/// let a = Tensor::zeros(&[5, 2, 3], DType::F32, &device)?;
/// let b = Tensor::zeros(&[5, 3, 4], DType::F32, &device)?;
/// assert_eq!(einsum("bij,bjk->ki", &[&a, &b])?.shape(), [4, 2]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
///
/// # Errors
/// The equation is malformed or does not fit the operands, or the types differ.
#[track_caller]
pub fn einsum(equation: &str, operands: &[impl AsRef<Tensor>]) -> Result<Tensor> {
    let operands = &as_refs(operands)[..];
    operation!(OP, autocast[operands], |cast| {
        let out = einsum(equation, &cast.iter().collect::<Vec<_>>())?;
        // Other operations may share a cast, so a view of one would change their operand if it was written in place.
        let is_view_of_cast =
            |(cast, t): (&Tensor, &&Tensor)| !cast.shares_storage(t) && out.shares_storage(cast);
        if cast.iter().zip(operands).any(is_view_of_cast) { out.copy() } else { Ok(out) }
    });
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation, None),
    };
    let terms: SmallVec<[&str; 4]> = left.split(',').collect();
    if terms.len() != operands.len() || operands.is_empty() {
        return Err(equation_error(
            equation,
            &format!("names {} operands, got {}", terms.len(), operands.len()),
        ));
    }
    let mut ellipsis_rank = 0;
    let mut parsed: SmallVec<[EinsumOperand; 4]> = SmallVec::new();
    for (term, tensor) in terms.iter().zip(operands) {
        let (operand, rank) = parse_operand(equation, term, tensor)?;
        ellipsis_rank = ellipsis_rank.max(rank);
        parsed.push(operand);
    }
    let result = match right {
        Some(right) => parse_labels(equation, right, ellipsis_rank)?,
        None => implicit_result_labels(left, ellipsis_rank),
    };
    check_labels(equation, &parsed, &result, operands)?;
    let mut operands = parsed.into_iter();
    // invariant: there is at least one operand, checked above.
    let Some(mut sum) = operands.next() else { return Err(equation_error(equation, "names no operand")) };
    let mut operands: SmallVec<[EinsumOperand; 4]> = operands.collect();
    loop {
        let needed_by = |terms: &[EinsumOperand]| -> Labels {
            result.iter().copied().chain(terms.iter().flat_map(|t| t.labels.iter().copied())).collect()
        };
        sum = sum.sum_unneeded(&needed_by(&operands))?;
        if operands.is_empty() {
            break;
        }
        let next = operands.remove(0);
        let needed = needed_by(&operands);
        let mut both = needed.clone();
        both.extend(sum.labels.iter().copied());
        sum = sum.contract(next.sum_unneeded(&both)?, &needed)?;
    }
    let order: SmallVec<[isize; 8]> = result
        .iter()
        .filter_map(|label| sum.labels.iter().position(|l| l == label))
        .map(|d| d as isize)
        .collect();
    sum.tensor.permute(&order)
}

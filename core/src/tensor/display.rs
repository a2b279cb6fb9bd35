//! Printing of tensors by PyTorch's rules (`torch/_tensor_str.py`).
//!
//! All elements share one number format and column width, brackets nest, and long dimensions are shortened.
//! Device, type and gradient follow the elements.

use std::fmt;

use super::Tensor;
use super::create::{decode_f64s, decode_integers};
use crate::dtype::DType;
use crate::error::Result;

/// Number of elements shown at each end of a shortened dimension.
const EDGE_ITEMS: usize = 3;
/// Number of elements above which a tensor is shortened.
const SUMMARIZE_THRESHOLD: usize = 1000;
/// Default number of digits after the decimal point.
const PRECISION: usize = 4;
/// Number of columns of a printed row.
const LINE_WIDTH: usize = 80;
/// Number of elements above which only the edges of dimensions are read.
const FULL_READ_MAX: usize = 1 << 16;
/// Attempts to take the dispatch lock before printing gives up.
const LOCK_ATTEMPTS: usize = 10_000;
const PREFIX: &str = "tensor(";

impl fmt::Display for Tensor {
    /// Prints as PyTorch does: `tensor([1.0000, 2.5000], device='wgpu:0')`. A precision such as `{:.2}`
    /// applies to the elements.
    ///
    /// Reads the elements, which waits for the device. If the read fails, prints the reason instead.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let precision = f.precision().unwrap_or(PRECISION);
        f.write_str(&format_tensor(self, precision, true))
    }
}

impl fmt::Debug for Tensor {
    /// Prints the text of [`Display`](fmt::Display). Of a tensor that `Display` would shorten, prints the shape without
    /// elements, so that a struct of weights stays readable.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let precision = f.precision().unwrap_or(PRECISION);
        f.write_str(&format_tensor(self, precision, false))
    }
}

/// Formats a tensor; a long one with its edges, or with its shape alone.
fn format_tensor(tensor: &Tensor, precision: usize, has_edges: bool) -> String {
    let shape = tensor.shape();
    let mut suffixes = vec![format!("device='{}'", tensor.device())];
    let plain = matches!(tensor.dtype(), DType::F32 | DType::I64 | DType::Bool);
    let shorten = tensor.numel() > SUMMARIZE_THRESHOLD;
    let elements = if tensor.numel() == 0 {
        if shape.len() != 1 {
            suffixes.push(format!("shape={shape:?}"));
        }
        if tensor.dtype() != DType::F32 {
            suffixes.push(format!("dtype={}", tensor.dtype()));
        }
        "[]".to_owned()
    } else if shorten && !has_edges {
        suffixes.push(format!("shape={shape:?}"));
        if !plain {
            suffixes.push(format!("dtype={}", tensor.dtype()));
        }
        "...".to_owned()
    } else {
        match read_printed_values(tensor, shorten) {
            Ok((values, shape)) => {
                if !plain {
                    suffixes.push(format!("dtype={}", tensor.dtype()));
                }
                let style = NumberFormat::from_values(&values, precision);
                let full_shape = tensor.shape();
                TensorPrinter { values: &values, number_format: style, is_summarized: shorten, full_shape }
                    .format_level(0, 0, &shape, PREFIX.len())
            }
            Err(reason) => {
                suffixes.push(format!("shape={shape:?}"));
                suffixes.push(format!("dtype={}", tensor.dtype()));
                reason
            }
        }
    };
    if let Some(meta) = tensor.grad_meta() {
        suffixes
            .push(meta.op().map_or_else(|| "requires_grad=True".to_owned(), |op| format!("grad_fn=<{op}>")));
    }
    let mut text = format!("{PREFIX}{elements}");
    let mut line = text.rfind('\n').map_or(text.len() + 2, |at| text.len() - at + 1);
    for suffix in suffixes {
        if line + suffix.len() + 2 > LINE_WIDTH {
            text.push_str(&format!(",\n{:1$}{suffix}", "", PREFIX.len()));
            line = PREFIX.len() + suffix.len();
        } else {
            text.push_str(&format!(", {suffix}"));
            line += suffix.len() + 2;
        }
    }
    text + ")"
}

enum PrintedValues {
    Float(Vec<f64>),
    Int(Vec<i64>),
    Bool(Vec<bool>),
}

/// Reads the elements to print. Returns them with their extents, or the text to print instead.
fn read_printed_values(tensor: &Tensor, shorten: bool) -> Result<(PrintedValues, Vec<usize>), String> {
    if tensor.device().is_null() {
        return Err("<unknown: the null device computes no values>".to_owned());
    }
    // A rejected read would fail the captured step, but printing must not.
    if tensor.device().capture_recorder().is_recording_here() {
        return Err("<error: a step is being captured, so its values are not there yet>".to_owned());
    }
    // Do not block: the thread that formats may already hold the dispatch lock.
    for attempt in 0.. {
        if !tensor.device().stream_set().dispatch.is_locked() {
            break;
        }
        if attempt == LOCK_ATTEMPTS {
            return Err("<error: the device is in use by an operation that has not ended>".to_owned());
        }
        std::thread::yield_now();
    }
    let mut shape = tensor.shape().to_vec();
    let size = tensor.dtype().size();
    let bytes = if shorten && tensor.numel() > FULL_READ_MAX {
        let mut edges = Vec::new();
        read_edges(&tensor.detach(), &mut edges).map(|()| edges)
    } else if shorten {
        let select = |all: Vec<u8>| {
            printed_offsets(&shape).iter().flat_map(|at| &all[at * size..][..size]).copied().collect()
        };
        tensor.to_bytes().map(select)
    } else {
        tensor.to_bytes()
    };
    let bytes = bytes.map_err(|e| format!("<error: {}>", e.to_string().replace('\n', " ")))?;
    if shorten {
        shape.iter_mut().for_each(|n| *n = printed_indices(*n).count());
    }
    Ok((decode_values(&bytes, tensor.dtype()), shape))
}

fn printed_indices(n: usize) -> impl Iterator<Item = usize> {
    let cut = n > 2 * EDGE_ITEMS;
    (0..n.min(2 * EDGE_ITEMS)).map(move |i| if cut && i >= EDGE_ITEMS { n - 2 * EDGE_ITEMS + i } else { i })
}

/// Returns the row-major offsets of the printed elements in the full tensor.
fn printed_offsets(shape: &[usize]) -> Vec<usize> {
    shape.iter().fold(vec![0], |offsets, &n| {
        offsets.iter().flat_map(|at| printed_indices(n).map(move |i| at * n + i)).collect()
    })
}

/// Reads the printed elements of a large tensor.
fn read_edges(tensor: &Tensor, into: &mut Vec<u8>) -> Result<()> {
    let n = tensor.shape().first().copied().unwrap_or(1);
    match tensor.rank() {
        1 if n > 2 * EDGE_ITEMS => {
            into.extend(tensor.narrow(0, 0, EDGE_ITEMS)?.to_bytes()?);
            into.extend(tensor.narrow(0, n - EDGE_ITEMS, EDGE_ITEMS)?.to_bytes()?);
        }
        0 | 1 => into.extend(tensor.to_bytes()?),
        _ => {
            for i in printed_indices(n) {
                read_edges(&tensor.select(0, i as isize)?, into)?;
            }
        }
    }
    Ok(())
}

fn decode_values(bytes: &[u8], dtype: DType) -> PrintedValues {
    match decode_integers(bytes, dtype) {
        Some(all) if dtype == DType::Bool => PrintedValues::Bool(all.iter().map(|&x| x != 0).collect()),
        Some(all) => PrintedValues::Int(all),
        None => PrintedValues::Float(decode_f64s(bytes, dtype)),
    }
}

/// Notation and width for all elements.
#[derive(Clone, Copy, Debug, Default)]
struct NumberFormat {
    /// If true, all values are integers, printed as `3.`.
    is_integral: bool,
    /// If true, prints an exponent.
    is_scientific: bool,
    precision: usize,
    /// Minimum number of characters of an element.
    width: usize,
}

impl NumberFormat {
    fn from_values(values: &PrintedValues, precision: usize) -> Self {
        let all = match values {
            PrintedValues::Float(all) => all,
            PrintedValues::Int(all) => {
                let width = all.iter().map(|v| v.to_string().len()).max().unwrap_or(1);
                return Self { width, ..Self::default() };
            }
            PrintedValues::Bool(all) => {
                return Self { width: if all.contains(&false) { 5 } else { 4 }, ..Self::default() };
            }
        };
        let nonzero = || all.iter().copied().filter(|v| v.is_finite() && *v != 0.0);
        let (smallest, largest) =
            nonzero().map(f64::abs).fold((f64::INFINITY, 0.0), |(l, m), v| (f64::min(l, v), f64::max(m, v)));
        let mut style = Self { is_integral: true, is_scientific: false, precision, width: 1 };
        if largest > 0.0 {
            style.is_integral = nonzero().all(|v| v == v.ceil());
            style.is_scientific =
                largest / smallest > 1000.0 || largest > 1e8 || (!style.is_integral && smallest < 1e-4);
            style.width = nonzero().map(|v| style.format_float(v).len()).max().unwrap_or(1);
        }
        style
    }

    /// Formats a value without padding.
    fn format_float(&self, value: f64) -> String {
        if value.is_nan() {
            return "nan".to_owned();
        }
        if value.is_infinite() {
            return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
        }
        let precision = self.precision;
        if !self.is_scientific {
            return if self.is_integral { format!("{value:.0}.") } else { format!("{value:.precision$}") };
        }
        // The exponent has a sign and at least two digits.
        let text = format!("{value:.precision$e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
        format!("{digits}e{sign}{exponent:0>2}")
    }
}

/// Formats the elements in nested brackets.
struct TensorPrinter<'a> {
    values: &'a PrintedValues,
    number_format: NumberFormat,
    is_summarized: bool,
    /// Extents before dimensions were shortened.
    full_shape: &'a [usize],
}

impl TensorPrinter<'_> {
    fn format_element(&self, at: usize) -> String {
        let width = self.number_format.width;
        let text = match self.values {
            PrintedValues::Float(all) => self.number_format.format_float(all[at]),
            PrintedValues::Int(all) => all[at].to_string(),
            PrintedValues::Bool(all) => if all[at] { "True" } else { "False" }.to_owned(),
        };
        format!("{text:>width$}")
    }

    /// Formats the part at `depth` whose first element is `start`. `column` is the indentation.
    fn format_level(&self, depth: usize, start: usize, shape: &[usize], column: usize) -> String {
        let Some((&n, inner)) = shape.split_first() else { return self.format_element(start) };
        let step: usize = inner.iter().product();
        let cut = self.is_summarized && self.full_shape[depth] > 2 * EDGE_ITEMS;
        let mut parts: Vec<String> = Vec::new();
        for i in 0..n {
            if cut && i == EDGE_ITEMS {
                parts.push(if inner.is_empty() { " ..." } else { "..." }.to_owned());
            }
            parts.push(self.format_level(depth + 1, start + i * step, inner, column + 1));
        }
        let indent = " ".repeat(column + 1);
        if !inner.is_empty() {
            let between = format!(",{}{indent}", "\n".repeat(inner.len()));
            return format!("[{}]", parts.join(&between));
        }
        let in_line = (LINE_WIDTH.saturating_sub(column) / (self.number_format.width + 2)).max(1);
        let lines: Vec<String> = parts.chunks(in_line).map(|line| line.join(", ")).collect();
        format!("[{}]", lines.join(&format!(",\n{indent}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown_as(values: PrintedValues, shape: &[usize]) -> String {
        let style = NumberFormat::from_values(&values, PRECISION);
        TensorPrinter { values: &values, number_format: style, is_summarized: false, full_shape: shape }
            .format_level(0, 0, shape, PREFIX.len())
    }

    fn floats(values: &[f64]) -> String {
        shown_as(PrintedValues::Float(values.to_vec()), &[values.len()])
    }

    #[test]
    fn one_scale_is_chosen_for_all_elements() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert_eq!(floats(&[1.0, 2.5]), "[1.0000, 2.5000]");
        assert_eq!(floats(&[1.0, -20.0, 0.0]), "[  1., -20.,   0.]");
        assert_eq!(floats(&[1e-10, 1e10]), "[1.0000e-10, 1.0000e+10]");
        assert_eq!(floats(&[1e-10]), "[1.0000e-10]");
        assert_eq!(floats(&[1e10, 0.0]), "[1.0000e+10, 0.0000e+00]");
        assert_eq!(floats(&[1.0, 1000.0]), "[   1., 1000.]");
        assert_eq!(floats(&[1.0, 1001.0]), "[1.0000e+00, 1.0010e+03]");
        assert_eq!(floats(&[0.5, 501.0]), "[5.0000e-01, 5.0100e+02]");
        assert_eq!(floats(&[1e8, 1e8]), "[100000000., 100000000.]");
        assert_eq!(floats(&[1e-4, 0.01]), "[0.0001, 0.0100]");
        assert_eq!(floats(&[9e-5, 0.01]), "[9.0000e-05, 1.0000e-02]");
        assert_eq!(floats(&[0.0, -0.0, 0.0]), "[0., -0., 0.]");
        assert_eq!(floats(&[nan, inf, -inf]), "[nan, inf, -inf]");
        assert_eq!(floats(&[nan, 1.5, -inf]), "[   nan, 1.5000,   -inf]");
        assert_eq!(floats(&[1e-300, inf]), "[1.0000e-300,         inf]");
        assert_eq!(floats(&[0.12345, -1.0]), "[ 0.1235, -1.0000]");
    }

    #[test]
    fn rows_and_blocks_are_aligned() {
        let values = PrintedValues::Int(vec![1, 10, -100, 4, 5, 6, 7, 8]);
        let text =
            "[[[   1,   10],\n         [-100,    4]],\n\n        [[   5,    6],\n         [   7,    8]]]";
        assert_eq!(shown_as(values, &[2, 2, 2]), text);
        assert_eq!(shown_as(PrintedValues::Bool(vec![true, false]), &[2]), "[ True, False]");
        assert_eq!(shown_as(PrintedValues::Bool(vec![true, true]), &[2]), "[True, True]");
        assert_eq!(shown_as(PrintedValues::Float(vec![3.0]), &[]), "3.");
        assert_eq!(shown_as(PrintedValues::Int(vec![i64::MIN]), &[]), "-9223372036854775808");
    }

    #[test]
    fn long_rows_are_broken_at_eighty_columns() {
        let text = shown_as(PrintedValues::Float((0..20).map(|i| f64::from(i) + 0.5).collect()), &[20]);
        let lines: Vec<&str> = text.lines().collect();
        // (80 - 7) / (7 + 2) elements fit.
        assert_eq!(lines[0], "[ 0.5000,  1.5000,  2.5000,  3.5000,  4.5000,  5.5000,  6.5000,  7.5000,");
        assert_eq!(
            lines[1],
            "         8.5000,  9.5000, 10.5000, 11.5000, 12.5000, 13.5000, 14.5000, 15.5000,"
        );
        assert_eq!(lines[2], "        16.5000, 17.5000, 18.5000, 19.5000]");
    }

    #[test]
    fn indices_of_summarized_dimensions() {
        assert_eq!(printed_offsets(&[8]), [0, 1, 2, 5, 6, 7]);
        assert_eq!(printed_offsets(&[2, 7]), [0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 13]);
        assert_eq!(printed_offsets(&[]), [0]);
    }
}

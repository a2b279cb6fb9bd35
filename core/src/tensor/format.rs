//! How a tensor prints: nested brackets, long dimensions shortened, type and device last.

use std::fmt;

use super::Tensor;
use crate::dtype::DType;

/// Indices shown at each end of a shortened dimension.
const EDGE: usize = 3;
/// Tensors of more elements are shortened.
const SHORTEN: usize = 1000;

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.device().is_null() {
            return write!(f, "{self:?}");
        }
        match self.to_f64s() {
            Ok(values) => {
                let shorten = self.numel() > SHORTEN;
                write_level(f, &values, self.shape(), self.dtype(), shorten, 0)?;
                write!(f, " {} {:?} {}", self.dtype(), self.shape(), self.device())
            }
            Err(e) => write!(f, "{self:?} (not readable: {e})"),
        }
    }
}

fn write_level(
    f: &mut fmt::Formatter<'_>,
    values: &[f64],
    shape: &[usize],
    dtype: DType,
    shorten: bool,
    depth: usize,
) -> fmt::Result {
    let Some((&n, inner)) = shape.split_first() else {
        return match (values.first(), dtype) {
            (None, _) => Ok(()),
            (Some(v), DType::Bool) => write!(f, "{}", *v != 0.0),
            (Some(v), d) if d.is_float() || d.is_stored() => match f.precision() {
                Some(p) => write!(f, "{v:.p$}"),
                None => write!(f, "{v:.4}"),
            },
            (Some(v), _) => write!(f, "{v}"),
        };
    };
    let step = values.len().checked_div(n).unwrap_or(0);
    f.write_str("[")?;
    for i in 0..n {
        if shorten && n > 2 * EDGE && i == EDGE {
            f.write_str(", ...")?;
        }
        if shorten && n > 2 * EDGE && (EDGE..n - EDGE).contains(&i) {
            continue;
        }
        if i > 0 {
            if inner.is_empty() {
                f.write_str(", ")?;
            } else {
                write!(f, ",\n{:width$}", "", width = depth + 1)?;
            }
        }
        write_level(f, &values[i * step..(i + 1) * step], inner, dtype, shorten, depth + 1)?;
    }
    f.write_str("]")
}

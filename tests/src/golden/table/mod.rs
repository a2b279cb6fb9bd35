//! Table from PyTorch's names to calls of this library. Each family registers its operations in its own file.

use std::collections::HashMap;

use anyhow::Result;
use forebay::tensor::Tensor;
use thiserror::Error;

use super::args::Args;

mod conv;
mod elementwise;
mod index;
mod linalg;
mod loss;
mod manipulation;
mod matmul;
mod norm;
mod pool;
mod reduce;
mod resize;
mod shape;
mod sort;

/// PyTorch's names of operations that have another name in this library, also without the module.
const RENAMED: &[(&str, &str)] = &[
    ("clone", "copy"),
    ("constant_pad_nd", "pad"),
    ("diagflat", "diag"),
    ("fill", "full_like"),
    ("fliplr", "flip"),
    ("flipud", "flip"),
    ("linalg.vector_norm", "norm"),
    ("mT", "transpose"),
    ("msort", "sort"),
    ("new_zeros", "zeros"),
    ("nn.functional.fold", "col2im"),
    ("nn.functional.unfold", "im2col"),
    ("nn.functional.upsample_bilinear", "interpolate"),
    ("nn.functional.upsample_nearest", "interpolate"),
    ("ravel", "reshape"),
    ("sgn", "sign"),
    ("signal.windows.bartlett", "bartlett_window"),
    ("signal.windows.blackman", "blackman_window"),
    ("signal.windows.gaussian", "gaussian_window"),
    ("signal.windows.general_cosine", "general_cosine_window"),
    ("signal.windows.hamming", "hamming_window"),
    ("signal.windows.hann", "hann_window"),
    ("signal.windows.kaiser", "kaiser_window"),
    ("slice", "slice_dim"),
    ("true_divide", "div"),
    ("where", "where_"),
];

/// Returns the name of a function of PyTorch without its module.
fn strip_module(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Returns this library's name of one of PyTorch's operations.
pub(super) fn method_name(name: &str) -> &str {
    RENAMED.iter().find(|(other, _)| *other == name).map_or_else(|| strip_module(name), |(_, own)| own)
}

/// Entry of the table: takes the arguments, returns the results.
pub(super) type GoldenFn = fn(&Args<'_>) -> Result<Vec<Tensor>>;

/// Error of a call that cannot be compared, with the reason.
#[derive(Debug, Error)]
#[error("{0}")]
pub(crate) struct MissingOp(pub String);

pub struct OpTable(HashMap<&'static str, GoldenFn>);

impl OpTable {
    /// Builds the table with all families.
    pub fn new() -> Self {
        let mut table = Self(HashMap::new());
        conv::register(&mut table);
        elementwise::register(&mut table);
        loss::register(&mut table);
        norm::register(&mut table);
        pool::register(&mut table);
        matmul::register(&mut table);
        reduce::register(&mut table);
        index::register(&mut table);
        manipulation::register(&mut table);
        linalg::register(&mut table);
        sort::register(&mut table);
        resize::register(&mut table);
        shape::register(&mut table);
        table
    }

    pub(super) fn register(&mut self, name: &'static str, f: GoldenFn) {
        let before = self.0.insert(name, f);
        debug_assert!(before.is_none(), "{name} is listed twice");
    }

    pub(super) fn get(&self, name: &str) -> Result<GoldenFn> {
        self.0.get(name).copied().ok_or_else(|| missing_op(name))
    }
}

impl Default for OpTable {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns a single result as a list.
pub(super) fn single(t: forebay::error::Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![t?])
}

/// Error for an operation, or a form of its arguments, that the library does not have.
pub(super) fn missing_op(what: &str) -> anyhow::Error {
    MissingOp(format!("The library has no `{what}` yet.")).into()
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;

    use super::*;
    use crate::catalog::coverage::public_operations;

    #[test]
    fn every_entry_is_a_public_operation() -> Result<()> {
        let (table, there) = (OpTable::new(), public_operations()?);
        let unknown: Vec<_> = table.0.keys().filter(|name| !there.contains(method_name(name))).collect();
        ensure!(unknown.is_empty(), "no function of core/src/ops has the name of {unknown:?}: see RENAMED");
        for (name, own) in RENAMED {
            ensure!(table.0.contains_key(name), "RENAMED has {name}, which the table does not have");
            ensure!(strip_module(name) != *own, "RENAMED has {name}, which has this name without its module");
        }
        Ok(())
    }
}

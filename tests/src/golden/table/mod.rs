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

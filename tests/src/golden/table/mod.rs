//! PyTorch's names -> calls of this library. One line an operation; a family adds its lines in its own file.

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

/// What a line does: arguments in, results out.
pub(super) type GoldenFn = fn(&Args<'_>) -> Result<Vec<Tensor>>;

/// What cannot be compared: why.
#[derive(Debug, Error)]
#[error("{0}")]
pub(crate) struct MissingOp(pub String);

/// The lines.
pub struct OpTable(HashMap<&'static str, GoldenFn>);

impl OpTable {
    /// All families.
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

    /// Adds a line.
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

/// One result.
pub(super) fn single(t: forebay::error::Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![t?])
}

/// An operation, or a form of its arguments, that the library does not have.
pub(super) fn missing_op(what: &str) -> anyhow::Error {
    MissingOp(format!("The library has no `{what}` yet.")).into()
}

//! PyTorch's names -> calls of this library. One line an operation; a family adds its lines in its own file.

use std::collections::HashMap;

use anyhow::Result;
use forebay::tensor::Tensor;
use thiserror::Error;

use super::args::Args;

mod conv;
mod elementwise;
mod index;
mod joined;
mod linalg;
mod loss;
mod norm;
mod order;
mod pool;
mod product;
mod reduce;
mod resize;
mod shape;

/// What a line does: arguments in, results out.
pub(super) type Op = fn(&Args<'_>) -> Result<Vec<Tensor>>;

/// What cannot be compared: why.
#[derive(Debug, Error)]
#[error("{0}")]
pub(crate) struct Missing(pub String);

/// The lines.
pub struct Table(HashMap<&'static str, Op>);

impl Table {
    /// All families.
    pub fn new() -> Self {
        let mut table = Self(HashMap::new());
        conv::register(&mut table);
        elementwise::register(&mut table);
        loss::register(&mut table);
        norm::register(&mut table);
        pool::register(&mut table);
        product::register(&mut table);
        reduce::register(&mut table);
        index::register(&mut table);
        joined::register(&mut table);
        linalg::register(&mut table);
        order::register(&mut table);
        resize::register(&mut table);
        shape::register(&mut table);
        table
    }

    /// Adds a line.
    pub(super) fn op(&mut self, name: &'static str, f: Op) {
        let before = self.0.insert(name, f);
        debug_assert!(before.is_none(), "{name} is listed twice");
    }

    pub(super) fn get(&self, name: &str) -> Result<Op> {
        self.0.get(name).copied().ok_or_else(|| missing(name))
    }
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

/// One result.
pub(super) fn one(t: forebay::error::Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![t?])
}

/// An operation, or a form of its arguments, that the library does not have.
pub(super) fn missing(what: &str) -> anyhow::Error {
    Missing(format!("The library has no `{what}` yet.")).into()
}

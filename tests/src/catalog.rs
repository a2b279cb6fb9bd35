//! Catalog of operations with inputs, from which checks, benchmarks and `docs/src/reference/operators.md` are
//! generated. Its cases are those of the operations in `tests/src/operations`.

use crate::operations::registry;

pub(crate) mod case;
pub(crate) mod cost;

pub use case::{InputSpec, OpCase};

pub fn cases() -> impl Iterator<Item = &'static OpCase> {
    registry().operations.iter().flat_map(|op| op.cases.iter())
}

//! Registry of the library's operations. Each operation is listed once, in the file of its family.
//!
//! An entry says how the fuzzer calls the operation, has its cases, and the calls that compare it with PyTorch's golden
//! data. The catalog, the golden table, the fuzzer, the catalog's benchmarks and the pages of the reference are derived
//! from these lists.

use std::collections::HashMap;
use std::sync::LazyLock;

use anyhow::Result;
use forebay::tensor::Tensor;

use crate::catalog::OpCase;
use crate::fuzz::FuzzOp;
use crate::golden::args::Args;

#[macro_use]
mod macros;

mod conv;
mod create;
mod elementwise;
mod in_place;
mod index;
mod linalg;
mod loss;
mod matmul;
mod norm;
mod pool;
mod random;
mod reduce;
mod resize;
mod sequence;
mod shape;
mod sort;
#[cfg(test)]
mod tests;

/// Names that the families use.
mod prelude {
    pub(super) use forebay::device::Device;
    pub(super) use forebay::dtype::DType;
    pub(super) use forebay::error::Result;
    pub(super) use forebay::ops::*;
    pub(super) use forebay::tensor::Tensor;

    pub(super) use super::{Registry, pair, single};
    pub(super) use crate::catalog::InputSpec::{Bool, Bounded, Index, Positive, Signed};
    pub(super) use crate::catalog::case::{self, OpCase, S, nondifferentiable, nonsmooth, smooth};
    pub(super) use crate::catalog::cost;
    pub(super) use crate::fuzz::{ArgGenerator, FuzzOp, IntoTensors, REDUCTIONS};
    pub(super) use crate::golden::args::{Args, NAMED, Subscript};
    pub(super) use crate::golden::missing_op;
}

/// Modules whose functions have names of their own, so that the registry lists them without the module.
const MODULES: [&str; 3] = ["nn.functional.", "linalg.", "special."];

/// Golden call: takes PyTorch's arguments, returns the results.
pub(crate) type GoldenFn = fn(&Args<'_>) -> Result<Vec<Tensor>>;

/// Operation of the library, with all that the suite knows about it.
pub(crate) struct Operation {
    /// Name of the method or function.
    pub(crate) name: &'static str,
    /// Calls with random arguments; the first one has the operation's name.
    pub(crate) fuzz: Vec<FuzzOp>,
    /// Cases for the catalog.
    pub(crate) cases: Vec<OpCase>,
    /// PyTorch's names with their golden calls. A name that equals the operation's has no module.
    golden: Vec<(&'static str, GoldenFn)>,
    /// Reason why there is no case, and why there is no call of the fuzzer.
    exemptions: Vec<&'static str>,
}

impl Operation {
    fn case(&mut self, case: OpCase) -> &mut Self {
        self.cases.push(case);
        self
    }

    fn without_case(&mut self, reason: &'static str) -> &mut Self {
        self.exemptions.push(reason);
        self
    }

    /// Adds the call for PyTorch's operation of the same name, in any module.
    fn golden(&mut self, call: GoldenFn) -> &mut Self {
        self.golden_as(self.name, call)
    }

    /// Adds the call for PyTorch's operation of another name, with its module.
    fn golden_as(&mut self, name: &'static str, call: GoldenFn) -> &mut Self {
        self.golden.push((name, call));
        self
    }

    /// Adds another call of the fuzzer.
    fn fuzz(
        &mut self,
        name: &'static str,
        run: fn(&mut crate::fuzz::ArgGenerator, &[Tensor]) -> forebay::error::Result<Vec<Tensor>>,
    ) -> &mut Self {
        self.fuzz.push(FuzzOp { name, run });
        self
    }
}

/// All operations, and PyTorch's names of them.
pub(crate) struct Registry {
    pub(crate) operations: Vec<Operation>,
    /// Index of the operation, and its golden call, by PyTorch's name.
    golden: HashMap<&'static str, (usize, GoldenFn)>,
}

impl Registry {
    fn new() -> Self {
        let mut ops = Self { operations: Vec::new(), golden: HashMap::new() };
        elementwise::register(&mut ops);
        in_place::register(&mut ops);
        shape::register(&mut ops);
        index::register(&mut ops);
        sort::register(&mut ops);
        matmul::register(&mut ops);
        reduce::register(&mut ops);
        norm::register(&mut ops);
        loss::register(&mut ops);
        pool::register(&mut ops);
        conv::register(&mut ops);
        sequence::register(&mut ops);
        resize::register(&mut ops);
        linalg::register(&mut ops);
        create::register(&mut ops);
        random::register(&mut ops);
        for (k, op) in ops.operations.iter().enumerate() {
            ops.golden.extend(op.golden.iter().map(|&(name, call)| (name, (k, call))));
        }
        ops
    }

    fn add(&mut self, call: FuzzOp) -> &mut Operation {
        let op = self.add_operation(call.name);
        op.fuzz.push(call);
        op
    }

    /// Adds an operation that the fuzzer does not call under its own name.
    fn add_without_fuzz(&mut self, name: &'static str, reason: &'static str) -> &mut Operation {
        let op = self.add_operation(name);
        op.exemptions.push(reason);
        op
    }

    /// Adds the call for PyTorch's operation `name` to an operation of a list.
    fn golden_of(&mut self, own: &str, name: &'static str, call: GoldenFn) {
        let found = self.operations.iter_mut().find(|op| op.name == own);
        found.expect("the list has the operation").golden_as(name, call);
    }

    fn add_operation(&mut self, name: &'static str) -> &mut Operation {
        self.operations.push(Operation {
            name,
            fuzz: Vec::new(),
            cases: Vec::new(),
            golden: Vec::new(),
            exemptions: Vec::new(),
        });
        let last = self.operations.len() - 1;
        &mut self.operations[last]
    }

    /// Returns the operation that has one of PyTorch's names, and its golden call.
    ///
    /// A name with a module of functions is also found without the module. `view_copy` and `unsafe_split` have the
    /// values of `view` and `split`: such copies of views, and views without checks, are found under the view's name.
    pub(crate) fn find_golden(&self, name: &str) -> Option<(&Operation, GoldenFn)> {
        let short = MODULES.iter().find_map(|module| name.strip_prefix(module)).unwrap_or(name);
        let view = short.strip_suffix("_copy").or_else(|| short.strip_prefix("unsafe_"));
        let names = [Some(name), Some(short), view];
        let &(k, call) = names.into_iter().flatten().find_map(|name| self.golden.get(name))?;
        Some((&self.operations[k], call))
    }

    /// Returns this library's name of an operation that PyTorch calls `name`, if it differs.
    pub(crate) fn own_name(&self, name: &str) -> Option<&'static str> {
        let &(k, _) = self.golden.get(name)?;
        Some(self.operations[k].name).filter(|own| *own != name)
    }
}

/// Returns the registry.
pub(crate) fn registry() -> &'static Registry {
    static REGISTRY: LazyLock<Registry> = LazyLock::new(Registry::new);
    &REGISTRY
}

/// Returns a single result as a list.
fn single(t: forebay::error::Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![t?])
}

/// Returns two results as a list.
fn pair((first, second): (Tensor, Tensor)) -> Result<Vec<Tensor>> {
    Ok(vec![first, second])
}

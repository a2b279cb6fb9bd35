//! `docs/operators.md`: what there is of PyTorch's operator database. Written by the null device, which knows every shape, type and
//! error.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::Result;
use forebay::backend::Features;
use forebay::backend::null::Profile;
use forebay::device::Device;
use forebay::dtype::DType;

use super::{Golden, How, Outcome};
use crate::catalog;

const HEAD: &str = "\
# Operators

PyTorch's operator database as `tests/golden` records it: each line is an operation under PyTorch's name, with its variants.

- *calls* agree with PyTorch's results in f32 and in the integers they have; *gradients* are those of them whose gradients agree too.
- *types* are those in which every call can be made, instead of f32; `bf16 (2 of 3)` says that some cannot. `cargo xtask golden --dtype bf16` makes
  them, and compares them with f32 from the same rounded inputs.
- *devices*: `all` are CUDA and wgpu, also on adapters without 64-bit types and f16; `3 of 4` says how many calls an adapter without them can make.
- *tolerance* is absolute and relative, where it is not PyTorch's own (f32 1e-5, 1.3e-6; f16 1e-5, 1e-3; bf16 1e-5, 1.6e-2; f64 as f32, with whose
  results it is compared). `tests/exceptions.json` has the reasons of all exceptions.

`cargo xtask golden` makes all calls on every device found; on CUDA and on wgpu they are the same. What this library's own records add stands below.

In Rust most are methods of `Tensor` of the same name. `nn.functional.unfold` and `fold` are `im2col` and `col2im`; what takes a number or a tensor in PyTorch is two methods where Rust needs
two (`repeat_interleave`, `repeat_interleave_by`).

Generated: `cargo xtask operators`; a test says when it is stale.

| operation | calls | gradients | types | devices | tolerance | what is different |
| --- | ---: | ---: | --- | --- | --- | --- |
";

const RECORDS: &str = "
## Records

Every public operation has a record in `tests/src/catalog.rs` or beside it, under its name in Rust; a test fails where one has none. The topic `records` checks
each on every device: a gradient for each input that requires one, or an error; gradients beside finite differences (in f64 where device and operation
have it, with f32 beside it); the same bits again, random numbers included; transposed inputs from the middle of a buffer, and inputs of stride 0; few lines
and 65,601; inputs of other ranks, extents, types and devices, which are refused by name. Second gradients are checked in the topic `second`.

- *types* are those in which an operation and its gradient can be called, instead of f32; *devices* as above.
- *tolerance* is where f16 and bf16 are compared with f32 from the same rounded inputs with another one than the type's; the records have the reasons.
- *measured*: `forebay-bench records` gives the rate that is achieved, in bytes or in operations of products.
- *gradient*: `checked` is compared with finite differences; `reaches` has kinks or steps, and is so in f64 alone, between two of them; an operation without one refuses an
  input that requires it, or gives truth values, integers or what depends on no input.

| operation | records | types | devices | gradient | tolerance | measured |
| --- | ---: | --- | --- | --- | --- | --- |
";

/// The types beside f32.
const TYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F64];

/// What is known of one operation.
#[derive(Default)]
struct Row {
    calls: usize,
    agree: usize,
    gradients: usize,
    /// Calls with floats, and how many of them can be made in each of the types.
    floats: usize,
    types: [usize; 3],
    /// Calls that an adapter without optional types can make.
    bare: usize,
    tolerances: BTreeSet<String>,
    notes: Vec<String>,
}

impl Row {
    fn note(&mut self, note: &str) {
        if !self.notes.iter().any(|n| n == note) {
            self.notes.push(note.to_owned());
        }
    }
}

/// `all`, or how many of them.
fn share(part: usize, all: usize, name: &str) -> Option<String> {
    match part {
        0 => None,
        _ if part == all => Some(name.to_owned()),
        _ => Some(format!("{name} ({part} of {all})")),
    }
}

/// The page.
///
/// # Errors
/// The calls cannot be read.
pub fn page(golden: &Golden) -> Result<String> {
    let device = Device::null(Default::default());
    let run = |device: &Device, dtype| golden.run(&How { device, dtype }, &[]);
    let outcomes = run(&device, None)?;
    let typed = [run(&device, Some(TYPES[0]))?, run(&device, Some(TYPES[1]))?, run(&device, Some(TYPES[2]))?];
    let bare = run(&Device::null(Profile { features: Features::default(), ..Profile::default() }), None)?;
    let file = golden.file()?;
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    for (at, call) in golden.calls.iter().enumerate() {
        let row = rows.entry(&call.op).or_default();
        row.calls += 1;
        row.tolerances.extend(golden.exceptions.tolerances(call));
        // What it has no contents for, the null device cannot find to be different.
        let can = |outcome: &Outcome, dtype| {
            matches!(outcome, Outcome::Passed | Outcome::Failed(_))
                && !golden.exceptions.excludes(call, dtype)
        };
        if let Some(reason) = golden.exceptions.reason(call, None) {
            row.note(reason);
        }
        if let Outcome::Unsupported(why) = &outcomes[at].1 {
            row.note(why);
        }
        row.bare += usize::from(can(&bare[at].1, None));
        if !can(&outcomes[at].1, None) {
            continue;
        }
        row.agree += 1;
        row.gradients += usize::from(!call.grads.is_empty());
        if call.has_floats(&file) {
            row.floats += 1;
            for (k, dtype) in TYPES.into_iter().enumerate() {
                row.types[k] += usize::from(can(&typed[k][at].1, Some(dtype)));
            }
        }
    }
    let mut page = HEAD.to_owned();
    for (op, row) in rows {
        let Row { calls, agree, gradients, floats, types, bare, tolerances, notes } = row;
        let count = if agree == calls { calls.to_string() } else { format!("{agree} of {calls}") };
        let gradients = if gradients > 0 { gradients.to_string() } else { String::new() };
        let types = TYPES.iter().zip(types).filter_map(|(dtype, part)| share(part, floats, dtype.name()));
        let types = types.collect::<Vec<_>>().join(", ");
        let devices = if bare == agree { "all".to_owned() } else { format!("{bare} of {calls}") };
        let tolerances = tolerances.into_iter().collect::<Vec<_>>().join("; ");
        let notes = notes.join(" ").replace('|', "\\|");
        writeln!(page, "| `{op}` | {count} | {gradients} | {types} | {devices} | {tolerances} | {notes} |")?;
    }
    records(&mut page)?;
    Ok(page)
}

/// A line for each operation of the catalog.
fn records(page: &mut String) -> Result<()> {
    let mut operations: BTreeMap<&str, Vec<&catalog::Case>> = BTreeMap::new();
    for case in catalog::cases() {
        operations.entry(case.operation()).or_default().push(case);
    }
    page.push_str(RECORDS);
    let bare = Device::null(Profile { features: Features::default(), ..Profile::default() });
    for (name, cases) in operations {
        let taken = TYPES.iter().filter_map(|&dtype| {
            share(cases.iter().filter(|case| case.takes(dtype)).count(), cases.len(), dtype.name())
        });
        let taken = taken.collect::<Vec<_>>().join(", ");
        let gradient = match () {
            () if cases.iter().any(|case| case.gradient && case.smooth) => "checked",
            () if cases.iter().any(|case| case.gradient) => "reaches",
            () => "",
        };
        let can = cases.iter().filter(|case| case.runs_on(&bare)).count();
        let devices = if can == cases.len() { "all".to_owned() } else { format!("{can} of {}", cases.len()) };
        let tolerances: BTreeSet<String> = cases.iter().flat_map(|case| case.tolerances()).collect();
        let tolerances = tolerances.into_iter().collect::<Vec<_>>().join("; ");
        let measured = match () {
            () if cases.iter().any(|case| case.multiplies() && case.is_measured()) => "FLOP/s",
            () if cases.iter().any(|case| case.is_measured()) => "GB/s",
            () => "",
        };
        writeln!(
            page,
            "| `{name}` | {} | {taken} | {devices} | {gradient} | {tolerances} | {measured} |",
            cases.len()
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_page_of_operators_is_what_there_is() -> Result<()> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let page = page(&Golden::load(&root.join("golden"))?)?;
        let kept = std::fs::read_to_string(root.join("../docs/operators.md"))?;
        let stale = page.lines().zip(kept.lines()).find(|(now, then)| now != then);
        anyhow::ensure!(
            page == kept,
            "docs/operators.md is stale; write it with `cargo xtask operators`. The first difference: {stale:?}"
        );
        Ok(())
    }
}

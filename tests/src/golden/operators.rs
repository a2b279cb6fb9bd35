//! Generator of `docs/src/reference/operators.md`, which shows the coverage of PyTorch's operator database. Calls run on the null
//! device, which checks shapes and types and reports errors.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::Result;
use forebay::backend::Features;
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;

use super::{CallConfig, GoldenSet, Outcome};
use crate::catalog;

const PAGE_HEADER: &str = "\
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

const CATALOG_HEADER: &str = "
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

/// Types in addition to f32.
const EXTRA_DTYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F64];

/// Coverage of one operation.
#[derive(Default)]
struct OperatorStats {
    calls: usize,
    num_passed: usize,
    gradients: usize,
    /// Number of calls with floats, and how many of these support each type.
    float_calls: usize,
    calls_by_dtype: [usize; 3],
    /// Calls that run on an adapter without optional types.
    minimal_device_calls: usize,
    tolerances: BTreeSet<String>,
    notes: Vec<String>,
}

impl OperatorStats {
    fn add_note(&mut self, note: &str) {
        if !self.notes.iter().any(|n| n == note) {
            self.notes.push(note.to_owned());
        }
    }
}

/// Formats `all`, or how many of them.
fn format_share(part: usize, all: usize, name: &str) -> Option<String> {
    match part {
        0 => None,
        _ if part == all => Some(name.to_owned()),
        _ => Some(format!("{name} ({part} of {all})")),
    }
}

/// Renders the page.
///
/// # Errors
/// The calls cannot be read.
pub fn render_page(golden: &GoldenSet) -> Result<String> {
    let device = Device::null(Default::default());
    let run = |device: &Device, dtype| golden.run(&CallConfig { device, dtype }, &[]);
    let outcomes = run(&device, None)?;
    let typed = [
        run(&device, Some(EXTRA_DTYPES[0]))?,
        run(&device, Some(EXTRA_DTYPES[1]))?,
        run(&device, Some(EXTRA_DTYPES[2]))?,
    ];
    let bare =
        run(&Device::null(CardProfile { features: Features::default(), ..CardProfile::default() }), None)?;
    let file = golden.tensors()?;
    let mut rows: BTreeMap<&str, OperatorStats> = BTreeMap::new();
    for (at, call) in golden.calls.iter().enumerate() {
        let row = rows.entry(&call.op).or_default();
        row.calls += 1;
        row.tolerances.extend(golden.exceptions.tolerances(call));
        // The null device cannot find differences of values, because it has no contents.
        let can = |outcome: &Outcome, dtype| {
            matches!(outcome, Outcome::Passed | Outcome::Failed(_))
                && !golden.exceptions.is_excluded(call, dtype)
        };
        if let Some(reason) = golden.exceptions.reason(call, None) {
            row.add_note(reason);
        }
        if let Outcome::Unsupported(why) = &outcomes[at].1 {
            row.add_note(why);
        }
        row.minimal_device_calls += usize::from(can(&bare[at].1, None));
        if !can(&outcomes[at].1, None) {
            continue;
        }
        row.num_passed += 1;
        row.gradients += usize::from(!call.grads.is_empty());
        if call.has_floats(&file) {
            row.float_calls += 1;
            for (k, dtype) in EXTRA_DTYPES.into_iter().enumerate() {
                row.calls_by_dtype[k] += usize::from(can(&typed[k][at].1, Some(dtype)));
            }
        }
    }
    let mut page = PAGE_HEADER.to_owned();
    for (op, row) in rows {
        let OperatorStats {
            calls,
            num_passed: agree,
            gradients,
            float_calls: floats,
            calls_by_dtype: types,
            minimal_device_calls: bare,
            tolerances,
            notes,
        } = row;
        let count = if agree == calls { calls.to_string() } else { format!("{agree} of {calls}") };
        let gradients = if gradients > 0 { gradients.to_string() } else { String::new() };
        let types = EXTRA_DTYPES
            .iter()
            .zip(types)
            .filter_map(|(dtype, part)| format_share(part, floats, dtype.name()));
        let types = types.collect::<Vec<_>>().join(", ");
        let devices = if bare == agree { "all".to_owned() } else { format!("{bare} of {calls}") };
        let tolerances = tolerances.into_iter().collect::<Vec<_>>().join("; ");
        let notes = notes.join(" ").replace('|', "\\|");
        writeln!(page, "| `{op}` | {count} | {gradients} | {types} | {devices} | {tolerances} | {notes} |")?;
    }
    write_catalog_table(&mut page)?;
    Ok(page)
}

/// Writes a line for each operation of the catalog.
fn write_catalog_table(page: &mut String) -> Result<()> {
    let mut operations: BTreeMap<&str, Vec<&catalog::OpCase>> = BTreeMap::new();
    for case in catalog::cases() {
        operations.entry(case.op_name()).or_default().push(case);
    }
    page.push_str(CATALOG_HEADER);
    let bare = Device::null(CardProfile { features: Features::default(), ..CardProfile::default() });
    for (name, cases) in operations {
        let taken = EXTRA_DTYPES.iter().filter_map(|&dtype| {
            format_share(
                cases.iter().filter(|case| case.supports_dtype(dtype)).count(),
                cases.len(),
                dtype.name(),
            )
        });
        let taken = taken.collect::<Vec<_>>().join(", ");
        let gradient = match () {
            () if cases.iter().any(|case| case.has_gradient && case.is_smooth) => "checked",
            () if cases.iter().any(|case| case.has_gradient) => "reaches",
            () => "",
        };
        let can = cases.iter().filter(|case| case.supports_device(&bare)).count();
        let devices = if can == cases.len() { "all".to_owned() } else { format!("{can} of {}", cases.len()) };
        let tolerances: BTreeSet<String> = cases.iter().flat_map(|case| case.tolerances()).collect();
        let tolerances = tolerances.into_iter().collect::<Vec<_>>().join("; ");
        let measured = match () {
            () if cases.iter().any(|case| case.has_flops() && case.has_bench_inputs()) => "FLOP/s",
            () if cases.iter().any(|case| case.has_bench_inputs()) => "GB/s",
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
        let page = render_page(&GoldenSet::load(&root.join("golden"))?)?;
        let kept = std::fs::read_to_string(root.join("../docs/src/reference/operators.md"))?;
        let stale = page.lines().zip(kept.lines()).find(|(now, then)| now != then);
        anyhow::ensure!(
            page == kept,
            "docs/src/reference/operators.md is stale; write it with `cargo xtask operators`. The first difference: {stale:?}"
        );
        Ok(())
    }
}

//! `docs/operators.md`: what there is of PyTorch's operator database. Written by the null device, which knows every shape, type and
//! error.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::Result;
use forebay::device::Device;

use super::{Golden, Outcome};

const HEAD: &str = "\
# Operators

PyTorch's operator database as `tests/golden` records it: each line is an operation under PyTorch's name, with its variants. *Calls* agree with
PyTorch's results in f32 and in the integers they have, *gradients* are those of them whose gradients agree too; both within PyTorch's own tolerance for f32 unless the last
column says otherwise. `cargo xtask golden` makes all of them on every device found; on CUDA and on wgpu they are the same. In f16 and bf16, with other strides and
without elements, operations run in the topics `pointwise`, `autograd` and `order` of the conformance suite.

In Rust most are methods of `Tensor` of the same name. `nn.functional.unfold` and `fold` are `im2col` and `col2im`; what takes a number or a tensor in PyTorch is two methods where Rust needs
two (`repeat_interleave`, `repeat_interleave_by`).

Generated: `cargo xtask operators`; a test says when it is stale.

| operation | calls | gradients | what is different |
| --- | ---: | ---: | --- |
";

/// What is known of one operation.
#[derive(Default)]
struct Row<'a> {
    calls: usize,
    agree: usize,
    gradients: usize,
    notes: Vec<&'a str>,
}

impl<'a> Row<'a> {
    fn note(&mut self, note: &'a str) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

/// The page.
///
/// # Errors
/// The calls cannot be read.
pub fn page(golden: &Golden) -> Result<String> {
    let device = Device::null(Default::default());
    let outcomes = golden.run(&device, &[])?;
    let mut rows: BTreeMap<&str, Row<'_>> = BTreeMap::new();
    for (call, (_, outcome)) in golden.calls.iter().zip(&outcomes) {
        let row = rows.entry(&call.op).or_default();
        row.calls += 1;
        if let Some(reason) = golden.exceptions.reason(call) {
            row.note(reason);
        }
        match outcome {
            Outcome::Unsupported(why) => row.note(why),
            // What it has no contents for, it cannot find to be different.
            Outcome::Excepted(_) => {}
            Outcome::Passed | Outcome::Failed(_) if golden.exceptions.excludes(call) => {}
            Outcome::Passed | Outcome::Failed(_) => {
                row.agree += 1;
                row.gradients += usize::from(!call.grads.is_empty());
            }
        }
    }
    let mut page = HEAD.to_owned();
    for (op, Row { calls, agree, gradients, notes }) in rows {
        let count = if agree == calls { calls.to_string() } else { format!("{agree} of {calls}") };
        let gradients = if gradients > 0 { gradients.to_string() } else { String::new() };
        writeln!(page, "| `{op}` | {count} | {gradients} | {} |", notes.join(" ").replace('|', "\\|"))?;
    }
    Ok(page)
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

//! Checks that every public operation has a record, by comparing `core/src/ops` with the catalog's sources.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};

use super::cases;

/// Public functions that are no tensor operations, with the reason.
const NON_OPERATIONS: &[(&str, &str)] = &[
    ("fusion_min_bytes", "a setting of a device"),
    ("check_indices", "a guard of the program"),
    ("set_check_indices", "a setting of the program"),
    ("set_fusion_min_bytes", "a setting of a device"),
    ("im2col_max_bytes", "a setting of a device"),
    ("set_im2col_max_bytes", "a setting of a device"),
    ("gate_count", "how many gates a recurrent layer has"),
    ("offsets", "an argument"),
    ("new", "makes arguments"),
    ("with", "makes arguments"),
    ("to", "makes arguments"),
    ("by", "makes arguments"),
    ("output", "a user's own operation: the topic `custom`"),
    ("input", "a user's own operation: the topic `custom`"),
    ("params", "a user's own operation: the topic `custom`"),
    ("param", "a user's own operation: the topic `custom`"),
    ("overrides", "a user's own operation: the topic `custom`"),
    ("define", "a user's own operation: the topic `custom`"),
    ("save", "a user's own operation: the topic `custom`"),
    ("gradient", "a user's own operation: the topic `custom`"),
    ("workgroups", "a user's own operation: the topic `custom`"),
    ("run_all", "a user's own operation: the topic `custom`"),
    ("broadcast_to", "a view: the topic `tensors`"),
    ("chunk", "a view: the topic `tensors`"),
    ("flatten", "a view: the topic `tensors`"),
    ("is_expanded", "a view: the topic `tensors`"),
    ("split_with_sizes", "a view: the topic `tensors`"),
    ("squeeze", "a view: the topic `tensors`"),
    ("squeeze_all", "a view: the topic `tensors`"),
    ("unbind", "a view: the topic `tensors`"),
    ("unflatten", "a view: the topic `tensors`"),
    ("view", "a view: the topic `tensors`"),
    ("full_like", "makes or moves a tensor: the topic `tensors`"),
    ("ones", "makes or moves a tensor: the topic `tensors`"),
    ("to_device", "makes or moves a tensor: the topic `tensors`"),
    ("zeros_like", "makes or moves a tensor: the topic `tensors`"),
    ("add_layer_norm_low_precision", "for `forebay-nn` alone"),
    ("add_rms_norm_low_precision", "for `forebay-nn` alone"),
    ("cast_index_to_i32", "for `forebay-nn` alone"),
    ("check_at_least", "for `forebay-nn` alone"),
    ("check_lengths", "for `forebay-nn` alone"),
    ("copy_into", "for `forebay-nn` alone"),
    ("fill_word", "for `forebay-nn` alone"),
    ("ignore_index_to_i32", "for `forebay-nn` alone"),
    ("launch", "for `forebay-nn` alone"),
    ("launch_dynamic", "for `forebay-nn` alone"),
    ("machine_epsilon", "for `forebay-nn` alone"),
    ("representable_range", "for `forebay-nn` alone"),
];

/// Returns the lines outside of comments and tests.
fn strip_comments_and_tests(text: &str) -> impl Iterator<Item = &str> {
    let tests = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    text[..tests].lines().map(|line| line.split("//").next().unwrap_or(line))
}

fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Returns the operations that a line declares: `pub fn name(`, or a macro entry such as `name / name_(arg): TypeRule,
/// "expression"` or `2 conv2d conv_transpose2d "height, width";`.
fn operations_of_line(line: &str) -> Vec<&str> {
    if let Some((_, after)) = line.split_once("pub fn ") {
        // A macro's operations are its entries.
        return if after.starts_with('$') { Vec::new() } else { identifiers(after).take(1).collect() };
    }
    let entry = line
        .strip_prefix("    ")
        .filter(|l| l.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()));
    let Some(entry) = entry else { return Vec::new() };
    let (names, rest) = entry.split_once(['(', ':', '"']).unwrap_or((entry, ""));
    let types =
        ["Float", "Number", "NumberBoolToI64", "Any", "Compare", "Predicate", "Logic", "Bits", "Integer"];
    let of_family = types.iter().any(|types| line.contains(&format!(": {types}, \"")));
    match names.strip_prefix(|c: char| c.is_ascii_digit()) {
        Some(names) if rest.ends_with("\";") => identifiers(names).collect(),
        _ if of_family => identifiers(names).collect(),
        _ => Vec::new(),
    }
}

fn read_sources(folder: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            all.extend(read_sources(&path)?);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("coverage.rs") {
            all.push(std::fs::read_to_string(path)?);
        }
    }
    Ok(all)
}

/// Returns the names that `names_of_line` finds in sources.
fn names_in<'a>(sources: &'a [String], names_of_line: impl Fn(&'a str) -> Vec<&'a str>) -> BTreeSet<String> {
    let lines = sources.iter().flat_map(|text| strip_comments_and_tests(text));
    lines.flat_map(names_of_line).map(str::to_owned).collect()
}

/// Returns the names of all public functions of `core/src/ops`.
pub(crate) fn public_operations() -> Result<BTreeSet<String>> {
    let families = read_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/src/ops"))?;
    Ok(names_in(&families, operations_of_line))
}

/// Returns the names that the catalog's sources use.
fn catalog_names() -> Result<BTreeSet<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut catalog = read_sources(&root.join("src/catalog"))?;
    catalog.push(std::fs::read_to_string(root.join("src/catalog.rs"))?);
    Ok(names_in(&catalog, |line| identifiers(line).collect()))
}

/// Returns the reason why an operation needs no record.
fn exemption(name: &str) -> Option<&'static str> {
    NON_OPERATIONS.iter().find(|(other, _)| *other == name).map(|(_, reason)| *reason)
}

#[test]
fn every_public_operation_has_a_record() -> Result<()> {
    let (called, there) = (catalog_names()?, public_operations()?);
    for name in ["hypot", "softplus", "abs_", "conv_transpose3d", "einsum", "layer_norm", "masked_fill_"] {
        ensure!(there.contains(name), "this test does not find {name} in core/src/ops");
    }
    let missing: Vec<_> =
        there.iter().filter(|name| !called.contains(*name) && exemption(name).is_none()).collect();
    ensure!(
        missing.is_empty(),
        "without a record in tests/src/catalog.rs or tests/src/catalog/: {missing:?}"
    );
    Ok(())
}

#[test]
fn a_record_stands_once() -> Result<()> {
    let mut seen = BTreeSet::new();
    for case in cases() {
        ensure!(seen.insert(case.name), "{} stands twice", case.name);
    }
    Ok(())
}

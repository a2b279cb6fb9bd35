//! Checks that every public operation has a record, by comparing `core/src/ops` with the catalog's sources.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};

use super::cases;
use crate::scan::{identifiers, names_in, operations_of_line, read_sources};

/// Public functions that are not tensor operations, with the reason.
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
    ("to_device", "moves a tensor: the topic `two_devices`"),
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
fn records_are_unique() -> Result<()> {
    let mut seen = BTreeSet::new();
    for case in cases() {
        ensure!(seen.insert(case.name), "{} stands twice", case.name);
    }
    Ok(())
}

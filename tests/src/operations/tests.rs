//! Checks that the registry has every public operation of the library once, and nothing else.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};

use super::{Registry, registry};
use crate::scan::{read_sources, tensor_operations};

/// Public functions that are not tensor operations, with the reason.
const NON_OPERATIONS: &[(&str, &str)] = &[
    ("check_indices", "a guard of the program"),
    ("set_check_indices", "a setting of the program"),
    ("is_expanded", "a view: the topic `tensors`"),
    ("to_device", "moves a tensor: the topic `two_devices`"),
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

/// Returns the methods of `Tensor` and the public functions of a folder of the library.
fn public_names(folder: &str) -> Result<BTreeSet<String>> {
    let sources = read_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/src").join(folder))?;
    Ok(sources.iter().flat_map(|text| tensor_operations(text)).map(str::to_owned).collect())
}

#[test]
fn every_public_operation_is_registered() -> Result<()> {
    let public = public_names("ops")?;
    for name in ["hypot", "softplus", "abs_", "conv_transpose3d", "einsum", "layer_norm", "masked_fill_"] {
        ensure!(public.contains(name), "this test does not find {name} in core/src/ops");
    }
    let known: BTreeSet<&str> = registry().operations.iter().map(|op| op.name).collect();
    let exempt = |name: &str| NON_OPERATIONS.iter().any(|(other, _)| *other == name);
    let missing: Vec<_> =
        public.iter().filter(|name| !known.contains(name.as_str()) && !exempt(name)).collect();
    ensure!(missing.is_empty(), "not in tests/src/operations: {missing:?}");
    let stale: Vec<_> = NON_OPERATIONS.iter().filter(|(name, _)| !public.contains(*name)).collect();
    ensure!(stale.is_empty(), "in NON_OPERATIONS, but no public function: {stale:?}");
    Ok(())
}

#[test]
fn every_entry_is_a_public_function() -> Result<()> {
    let mut public = public_names("ops")?;
    public.extend(public_names("tensor")?);
    let variants_of_recurrent = ["recurrent", "rnn_tanh", "rnn_relu", "lstm", "gru"];
    for op in &registry().operations {
        ensure!(
            public.contains(op.name) || variants_of_recurrent.contains(&op.name),
            "no function of core/src/ops or core/src/tensor has the name of {}",
            op.name
        );
    }
    Ok(())
}

#[test]
fn every_operation_has_cases_and_calls_or_a_reason() -> Result<()> {
    let (mut names, mut cases) = (BTreeSet::new(), BTreeSet::new());
    for op in &registry().operations {
        ensure!(names.insert(op.name), "{} is listed twice", op.name);
        let missing = usize::from(op.cases.is_empty()) + usize::from(op.fuzz.is_empty());
        ensure!(op.exemptions.len() == missing, "{}: {missing} missing, {:?}", op.name, op.exemptions);
        for case in &op.cases {
            ensure!(case.op_name() == op.name, "{} is a case of {}", case.name, op.name);
            ensure!(cases.insert(case.name), "{} stands twice", case.name);
        }
    }
    Ok(())
}

#[test]
fn names_of_pytorch_are_unique() -> Result<()> {
    let mut seen = BTreeSet::new();
    for op in &Registry::new().operations {
        for (name, _) in &op.golden {
            ensure!(seen.insert(*name), "{name} is listed twice");
        }
    }
    Ok(())
}

//! The layers of forebay-core: every module imports modules of its own layer's left only.
//!
//! The check reads paths that begin with `crate::`. Imports that still point the other way are listed in [`KNOWN`]; the check
//! fails on any other one, and on an entry that is no longer needed.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::Path;

/// Top-level modules of `core/src`, in the order of their layers: a module imports what stands before it.
const LAYERS: [&str; 18] = [
    "scoped_local",
    "dtype",
    "atomic_write",
    "environment",
    "memory",
    "error",
    "variables",
    "check",
    "scalar",
    "backend",
    "runtime",
    "storage",
    "tensor",
    "autograd",
    "amp",
    "ops",
    "func",
    "capture",
];

/// Imports against the direction that remain, as (importer, imported).
const KNOWN: &[(&str, &str)] = &[];

/// Reports whether all imports of `core/src` follow the layers; prints those that do not.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let found = imports(&root.join("core/src"))?;
    let against: BTreeSet<(&str, &str)> = found
        .iter()
        .filter(|(from, to)| rank(from) < rank(to))
        .map(|(from, to)| (from.as_str(), to.as_str()))
        .collect();
    let known: BTreeSet<(&str, &str)> = KNOWN.iter().copied().collect();
    for (from, to) in against.difference(&known) {
        println!(
            "core/src: `{from}` imports `{to}`, which stands above it; move the code, or pass it in through a trait"
        );
    }
    for (from, to) in known.difference(&against) {
        println!("xtask/src/layers.rs: `{from}` no longer imports `{to}`; remove the entry from KNOWN");
    }
    Ok(against == known)
}

/// Place of a module in [`LAYERS`]; a module that is not listed is above all others.
fn rank(module: &str) -> usize {
    LAYERS.iter().position(|layer| *layer == module).unwrap_or(LAYERS.len())
}

/// Pairs of top-level modules of which the first imports the second, test code left out.
fn imports(folder: &Path) -> Result<BTreeSet<(String, String)>> {
    let mut found = BTreeSet::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            if path.file_name().is_none_or(|name| name != "tests") {
                for entry in std::fs::read_dir(&path)? {
                    open.push(entry?.path());
                }
            }
            continue;
        }
        let is_source = path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs");
        let first = path.strip_prefix(folder)?.components().next().context("a file has no name")?;
        let module = first.as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned();
        if is_source {
            for imported in imported_modules(&std::fs::read_to_string(&path)?) {
                if imported != module {
                    found.insert((module.clone(), imported));
                }
            }
        }
    }
    Ok(found)
}

/// First segments of all paths that begin with `crate::`.
fn imported_modules(text: &str) -> BTreeSet<String> {
    let code: String = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default()
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n");
    let name = |text: &str| {
        text.trim_start().split(|c: char| !c.is_alphanumeric() && c != '_').next().map(str::to_owned)
    };
    let mut found = BTreeSet::new();
    for path in code.split("crate::").skip(1) {
        match path.strip_prefix('{') {
            Some(list) => found.extend(top_level_items(list).into_iter().filter_map(name)),
            None => found.extend(name(path)),
        }
    }
    // A macro or an item of the crate's root is no module.
    found.retain(|module| LAYERS.contains(&module.as_str()));
    found
}

/// Items of a list in braces, without the lists inside of them.
fn top_level_items(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                items.push(&list[start..at]);
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lists_and_test_code_are_told_apart() {
        let text = "use crate::memory::{self, Tag};\nuse crate::{autograd::{differentiable, Leaf}, tensor};\n// crate::train\nfn f() { crate::dtype::DType::F32; }\n\
                    #[cfg(test)]\nmod tests {\n use crate::nn::Linear;\n}";
        let found: Vec<String> = imported_modules(text).into_iter().collect();
        assert_eq!(found, ["autograd", "dtype", "memory", "tensor"]);
    }

    #[test]
    fn an_import_against_the_layers_is_found() {
        assert!(rank("tensor") < rank("ops") && rank("memory") < rank("tensor"));
        assert!(rank("a_new_module") > rank("train"));
    }
}

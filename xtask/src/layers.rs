//! Layers of the crates: every module imports only modules that stand before it in the list.
//!
//! The check reads paths that begin with `crate::`, outside of tests. Imports in one direction form no cycles.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::Path;

/// Source folders with their top-level modules, in the order of the layers.
const CRATES: [(&str, &[&str]); 2] = [
    (
        "core/src",
        &[
            "scoped_local",
            "sync",
            "platform",
            "printable",
            "dtype",
            "atomic_write",
            "environment",
            "disk_cache",
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
        ],
    ),
    ("nn/src", &["io", "nn", "optim", "data", "plan", "train"]),
];

/// Reports whether all imports follow the layers; prints those that do not.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut is_clean = true;
    for (folder, layers) in CRATES {
        let rank = |module: &str| layers.iter().position(|layer| *layer == module).unwrap_or(layers.len());
        for (from, to) in imports(&root.join(folder), layers)? {
            if rank(&from) < rank(&to) {
                is_clean = false;
                println!(
                    "{folder}: `{from}` imports `{to}`, which stands above it; move the code, or pass it in through a trait"
                );
            }
        }
    }
    Ok(is_clean)
}

/// Pairs of top-level modules of which the first imports the second, test code left out.
fn imports(folder: &Path, layers: &[&str]) -> Result<BTreeSet<(String, String)>> {
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
                // A macro or an item of the root of the crate is not a module.
                if imported != module && layers.contains(&imported.as_str()) {
                    found.insert((module.clone(), imported));
                }
            }
        }
    }
    Ok(found)
}

/// Returns the first segments of all paths that begin with `crate::`.
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
    found
}

/// Returns the items of a list in braces, without the lists inside of them.
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
    fn paths_lists_and_test_code_are_distinguished() {
        let text = "use crate::memory::{self, Tag};\nuse crate::{autograd::{differentiable, Leaf}, tensor};\n// crate::train\nfn f() { crate::dtype::DType::F32; }\n\
                    #[cfg(test)]\nmod tests {\n use crate::nn::Linear;\n}";
        let found: Vec<String> = imported_modules(text).into_iter().collect();
        assert_eq!(found, ["autograd", "dtype", "memory", "tensor"]);
    }

    #[test]
    fn an_import_against_the_layers_is_found() -> Result<()> {
        let root = std::env::temp_dir().join(format!("forebay-xtask-layers-{}", std::process::id()));
        for (folder, layers) in CRATES {
            let source = root.join(folder);
            std::fs::create_dir_all(&source)?;
            let (first, last) = (layers[0], layers[layers.len() - 1]);
            std::fs::write(source.join(format!("{last}.rs")), format!("use crate::{first}::Item;"))?;
        }
        assert!(check(&root)?);
        let (folder, layers) = CRATES[0];
        let (first, last) = (layers[0], layers[layers.len() - 1]);
        std::fs::write(root.join(folder).join(format!("{first}.rs")), format!("use crate::{last};"))?;
        let is_clean = check(&root);
        std::fs::remove_dir_all(&root)?;
        assert!(!is_clean?);
        Ok(())
    }
}

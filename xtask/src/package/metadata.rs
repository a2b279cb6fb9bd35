//! Facts of the manifests, as `cargo metadata` states them.

use crate::process;
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Fields that a registry shows or requires.
const FIELDS: [&str; 7] =
    ["description", "license", "repository", "readme", "keywords", "categories", "rust_version"];

/// Output of `cargo metadata`.
pub(super) struct Metadata {
    json: Value,
}

impl Metadata {
    pub(super) fn load(workspace: &Workspace) -> Result<Self> {
        let text =
            process::run_captured(&mut workspace.cargo_command(&["metadata", "--format-version", "1"]))?;
        Ok(Self { json: serde_json::from_str(&text).context("cargo metadata prints no JSON")? })
    }

    fn packages(&self) -> &[Value] {
        self.json["packages"].as_array().map_or(&[], Vec::as_slice)
    }

    fn members(&self) -> impl Iterator<Item = &Value> {
        let is_member = |package: &&Value| {
            self.json["workspace_members"].as_array().is_some_and(|members| members.contains(&package["id"]))
        };
        self.packages().iter().filter(is_member)
    }

    fn package(&self, name: &str) -> Result<&Value> {
        self.members()
            .find(|package| package["name"] == name)
            .with_context(|| format!("there is no crate {name}"))
    }

    /// Returns the oldest compiler that a crate supports.
    pub(super) fn rust_version(&self, name: &str) -> Result<String> {
        let version = self.package(name)?["rust_version"].as_str();
        Ok(version.with_context(|| format!("{name} names no `rust-version`"))?.to_owned())
    }

    /// Returns the folder of a crate.
    pub(super) fn folder(&self, name: &str) -> Result<PathBuf> {
        let manifest = self.package(name)?["manifest_path"].as_str().map(Path::new);
        Ok(manifest.and_then(Path::parent).with_context(|| format!("{name} has no manifest"))?.to_owned())
    }

    /// Returns the members that may be published, sorted.
    #[cfg(test)]
    pub(super) fn published(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self
            .members()
            .filter(|package| package["publish"].is_null())
            .filter_map(|package| package["name"].as_str())
            .collect();
        names.sort_unstable();
        names
    }

    /// Checks the manifests of crates: fields, order, requirements, and the minimum Rust version of all dependencies.
    /// Prints what is wrong.
    pub(super) fn check(&self, crates: &[&str]) -> Result<bool> {
        let mut problems = Vec::new();
        for (at, name) in crates.iter().enumerate() {
            let package = self.package(name)?;
            problems.extend(missing_fields(package).into_iter().map(|field| format!("{name}: no `{field}`")));
            let earlier = &crates[..at];
            let wrong =
                dependencies(package).filter_map(|dependency| dependency_problem(dependency, earlier));
            problems.extend(wrong.map(|problem| format!("{name}: {problem}")));
        }
        let oldest = self.rust_version("forebay")?;
        problems.extend(self.newer_dependencies(crates, &oldest)?);
        for problem in &problems {
            println!("{problem}");
        }
        Ok(problems.is_empty())
    }

    /// Returns the dependencies of crates, direct and indirect, that need a newer compiler.
    fn newer_dependencies(&self, crates: &[&str], oldest: &str) -> Result<Vec<String>> {
        let nodes = self.json["resolve"]["nodes"].as_array().context("cargo metadata resolves nothing")?;
        let mut open: Vec<&Value> =
            crates.iter().map(|name| Ok(&self.package(name)?["id"])).collect::<Result<_>>()?;
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            if !seen.insert(id.as_str().unwrap_or_default()) {
                continue;
            }
            let node = nodes.iter().find(|node| node["id"] == *id).context("a dependency is not resolved")?;
            open.extend(
                list(&node["deps"]).filter(|dependency| !is_only_for_tests(dependency)).map(|d| &d["pkg"]),
            );
        }
        let needs_newer = |package: &&Value| {
            seen.contains(package["id"].as_str().unwrap_or_default())
                && package["rust_version"].as_str().is_some_and(|needed| release(needed) > release(oldest))
        };
        let tell = |package: &Value| {
            format!(
                "{} {} needs Rust {}, newer than {oldest}",
                package["name"], package["version"], package["rust_version"]
            )
        };
        Ok(self.packages().iter().filter(needs_newer).map(tell).collect())
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn dependencies(package: &Value) -> impl Iterator<Item = &Value> {
    list(&package["dependencies"])
}

/// Reports whether a resolved dependency is one of tests and examples only.
fn is_only_for_tests(dependency: &Value) -> bool {
    list(&dependency["dep_kinds"]).all(|kind| kind["kind"] == "dev")
}

fn missing_fields(package: &Value) -> Vec<&'static str> {
    let is_empty = |field: &&&str| match &package[**field] {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    FIELDS.iter().filter(is_empty).copied().collect()
}

/// Describes a dependency that a registry refuses, or that splits programs from other users of the crate.
fn dependency_problem(dependency: &Value, earlier: &[&str]) -> Option<String> {
    let name = dependency["name"].as_str().unwrap_or_default();
    let requirement = dependency["req"].as_str().unwrap_or_default();
    let is_local = !dependency["path"].is_null();
    if requirement == "*" {
        return Some(format!("`{name}` has no version; a registry needs one"));
    }
    if requirement.starts_with('=') {
        return Some(format!(
            "`{name} = \"{requirement}\"` excludes other users of the crate; use a caret requirement"
        ));
    }
    let is_late = is_local && dependency["kind"] != "dev" && !earlier.contains(&name);
    is_late.then(|| format!("`{name}` is published after it; change the order in xtask"))
}

/// Returns the numbers of a release such as `1.88` or `1.88.1`.
fn release(version: &str) -> [u32; 3] {
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
    [0; 3].map(|missing| numbers.next().unwrap_or(missing))
}

/// Returns the toolchains of a minor release from the output of `rustup toolchain list`, oldest first. A toolchain is
/// named `1.88` or `1.88.0`, with a target after it. A patch release before that of `oldest` is left out.
pub(super) fn toolchains_of<'a>(installed: &'a str, oldest: &str) -> Vec<&'a str> {
    let wanted = release(oldest);
    let mut found: Vec<([u32; 3], &str)> = installed
        .lines()
        .filter_map(|line| {
            let name = line.split_whitespace().next()?;
            let version = name.split('-').next()?;
            // A name without a patch release is that of the newest one.
            let numbers = if version == oldest { wanted } else { release(version) };
            (numbers[..2] == wanted[..2] && numbers >= wanted).then_some((numbers, name))
        })
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_and_requirements_are_checked() {
        let package = json!({ "description": "d", "keywords": [], "readme": null });
        assert!(
            missing_fields(&package).contains(&"keywords") && missing_fields(&package).contains(&"readme")
        );
        assert!(!missing_fields(&package).contains(&"description"));
        let problem = |name: &str, req: &str, path: Value| {
            dependency_problem(&json!({ "name": name, "req": req, "path": path, "kind": null }), &["first"])
        };
        assert!(problem("cudarc", "^0.19", Value::Null).is_none());
        assert!(problem("cudarc", "=0.19.10", Value::Null).is_some());
        assert!(problem("first", "^0.1", json!("/first")).is_none());
        assert!(problem("first", "*", json!("/first")).is_some());
        assert!(problem("second", "^0.1", json!("/second")).is_some());
    }

    #[test]
    fn any_patch_release_of_the_oldest_compiler_is_found() {
        let installed = "stable-x86_64-unknown-linux-gnu (active, default)\n1.188.0-x86_64-unknown-linux-gnu\n\
                         1.88.1-x86_64-unknown-linux-gnu\n1.88.0-x86_64-unknown-linux-gnu\n\
                         1.95.0-x86_64-unknown-linux-gnu\n";
        assert_eq!(
            toolchains_of(installed, "1.88"),
            ["1.88.0-x86_64-unknown-linux-gnu", "1.88.1-x86_64-unknown-linux-gnu"]
        );
        assert_eq!(toolchains_of(installed, "1.88.1"), ["1.88.1-x86_64-unknown-linux-gnu"]);
        assert_eq!(toolchains_of("1.88-aarch64-apple-darwin\n", "1.88"), ["1.88-aarch64-apple-darwin"]);
        assert!(toolchains_of(installed, "1.90").is_empty() && toolchains_of("", "1.88").is_empty());
    }

    #[test]
    fn releases_are_compared_as_numbers() {
        assert!(release("1.100") > release("1.88.1") && release("1.88") == release("1.88.0"));
    }
}

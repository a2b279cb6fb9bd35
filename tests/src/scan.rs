//! Line scan of the library's sources for the names of public items.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Returns the root of the repository.
pub(crate) fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the lines outside of comments and tests.
pub(crate) fn strip_comments_and_tests(text: &str) -> impl Iterator<Item = &str> {
    let tests = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    text[..tests].lines().map(|line| line.split("//").next().unwrap_or(line))
}

pub(crate) fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Returns the operations that a line declares: `pub fn name(`, or a macro entry such as `name / name_(arg): TypeRule,
/// "expression"` or `2 conv2d conv_transpose2d "height, width";`.
pub(crate) fn operations_of_line(line: &str) -> Vec<&str> {
    if let Some((_, after)) = line.split_once("pub fn ").or_else(|| line.split_once("pub unsafe fn ")) {
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

/// Returns the texts of the Rust sources below a folder.
pub(crate) fn read_sources(folder: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            all.extend(read_sources(&path)?);
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.push(std::fs::read_to_string(path)?);
        }
    }
    Ok(all)
}

/// Returns the operations of a source file: methods of `Tensor`, functions of modules, and entries of macros. Methods
/// of other types are left out.
pub(crate) fn tensor_operations(text: &str) -> Vec<&str> {
    let mut of_another_type = false;
    let mut found = Vec::new();
    for line in strip_comments_and_tests(text) {
        if ["impl ", "impl<", "unsafe impl"].iter().any(|start| line.starts_with(start)) {
            of_another_type = !line.starts_with("impl Tensor {") && !line.ends_with('}');
        }
        if !of_another_type {
            found.extend(operations_of_line(line));
        }
        of_another_type &= !line.starts_with('}');
    }
    found
}

/// Returns the public item that a line declares.
#[cfg(test)]
pub(crate) fn item_of_line(line: &str) -> Vec<&str> {
    let mut words = identifiers(line);
    let kinds = ["fn", "struct", "enum", "trait", "const", "static", "mod", "type"];
    if words.next() != Some("pub") {
        return operations_of_line(line);
    }
    words.skip_while(|word| kinds.contains(word) || *word == "unsafe").take(1).collect()
}

/// Returns the type of an `impl` that begins on a line.
#[cfg(test)]
fn impl_type(line: &str) -> Option<&str> {
    let after = line.strip_prefix("unsafe ").unwrap_or(line).strip_prefix("impl")?;
    let after = Some(after).filter(|after| after.starts_with([' ', '<']))?;
    let mut depth = 0;
    let is_past_generics = |c: char| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        depth == 0 && c == ' '
    };
    let name = &after[after.find(is_past_generics)?..];
    identifiers(name.split_once(" for ").map_or(name, |(_, name)| name)).next()
}

/// Returns the public items of a source file, each with the type that an `impl` gives it to. An entry of a macro is a
/// method of `Tensor`. Other items outside of an `impl` have no type.
#[cfg(test)]
pub(crate) fn items_with_types(text: &str) -> Vec<(Option<&str>, &str)> {
    let mut current = None;
    let mut found = Vec::new();
    for line in strip_comments_and_tests(text) {
        if !line.trim_end().ends_with('}') {
            current = impl_type(line).or(current);
        }
        let is_entry = current.is_none() && line.starts_with(' ');
        let items = if is_entry { operations_of_line(line) } else { item_of_line(line) };
        let of = if is_entry { Some("Tensor") } else { current };
        found.extend(items.into_iter().map(|item| (of, item)));
        if line.starts_with('}') {
            current = None;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_belong_to_the_types_of_their_impl() {
        let text = "pub struct Seed {\n    pub value: u64,\n}\nimpl Seed {\n    pub fn get(&self) {}\n}\n\
                    impl<T: Into<f64>> From<T> for Seed {}\nimpl<'a> Scan<'a> {\n    pub const fn run(&self) {}\n}\n\
                    inplace! {\n    pub fn exp_() = exp;\n}\npub fn cat() {}\n";
        assert_eq!(
            items_with_types(text),
            [
                (None, "Seed"),
                (Some("Seed"), "get"),
                (Some("Scan"), "run"),
                (Some("Tensor"), "exp_"),
                (None, "cat")
            ]
        );
    }

    #[test]
    fn methods_of_other_types_are_not_operations() {
        let text = "impl Options {\n    pub fn with(&self) {}\n}\nimpl Tensor {\n    pub fn exp(&self) {}\n}\npub fn cat() {}\n";
        assert_eq!(tensor_operations(text), ["exp", "cat"]);
    }
}

//! Files that sources include: an archive without them does not compile.

use crate::checks::source_files;
use anyhow::{Context, Result};
use std::path::Path;

/// Beginnings of an attribute or macro call that names a file.
const INCLUDES: [&str; 4] = ["#[path = \"", "include!(\"", "include_str!(\"", "include_bytes!(\""];

/// Returns each file that a source of a crate includes and that the archive lacks. Unit tests, in `tests.rs` or
/// folders `tests`, may include files of other crates.
pub(super) fn find_missing(root: &Path, is_in_archive: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let root = root.canonicalize()?;
    let sources = root.join("src");
    let mut missing = Vec::new();
    for source in source_files(&sources) {
        let inner = source.strip_prefix(&sources)?;
        if inner.iter().any(|part| part == "tests" || part == "tests.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&source)?;
        let folder = source.parent().context("a source is in no folder")?;
        for name in included_files(&text) {
            let found = folder.join(name).canonicalize().ok();
            let in_crate = found.as_deref().and_then(|file| file.strip_prefix(&root).ok()?.to_str());
            if !in_crate.is_some_and(&is_in_archive) {
                missing.push(format!("{name}, which src/{} includes", inner.display()));
            }
        }
    }
    Ok(missing)
}

/// Returns the names of the files that a source includes.
fn included_files(source: &str) -> Vec<&str> {
    let names = |line| INCLUDES.map(|include| Some(str::split_once(line, include)?.1.split_once('"')?.0));
    source.lines().filter(|line| !line.trim_start().starts_with("//")).flat_map(names).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    const SOURCE: &str = "#[path = \"../a.rs\"]\nmod a;\nconst B: &str = include_str!(\"b.txt\");\n\
                          // include_str!(\"c.txt\")\nlet d = \"d\";";

    #[test]
    fn included_files_are_found() {
        assert_eq!(included_files(SOURCE), ["../a.rs", "b.txt"]);
    }

    #[test]
    fn files_outside_of_the_archive_are_missing() -> Result<()> {
        let root = std::env::temp_dir().join(format!("forebay-xtask-includes-{}", std::process::id()));
        std::fs::create_dir_all(root.join("crate/src/tests"))?;
        for file in ["a.rs", "crate/src/b.txt"] {
            std::fs::write(root.join(file), "")?;
        }
        for file in ["tests/unit.rs", "lib.rs"] {
            std::fs::write(root.join("crate/src").join(file), SOURCE.replace("../a.rs", "../../a.rs"))?;
        }
        let missing = find_missing(&root.join("crate"), |file| file == "src/b.txt");
        let none = find_missing(&root.join("crate"), |_| false);
        std::fs::remove_dir_all(&root)?;
        assert_eq!(missing?, ["../../a.rs, which src/lib.rs includes"]);
        assert_eq!(none?.len(), 2);
        Ok(())
    }

    #[test]
    fn the_guide_is_included_by_the_facade() -> Result<()> {
        let missing = find_missing(&Workspace::find()?.root, |file| !file.starts_with("docs/src/guide"))?;
        assert!(missing.iter().any(|file| file.contains("guide/embedding.md")), "{missing:?}");
        Ok(())
    }
}

//! Search for data sets in the file system.

use std::env;
use std::path::{Path, PathBuf};

use crate::{Result, fail};

/// Variable that names a folder of data sets, or the folder of one.
const DATA_VARIABLE: &str = "FOREBAY_DATA";
/// Folder in which Debian installs data sets.
const SYSTEM_FOLDER: &str = "usr/share/datasets";

/// Returns the folders to search in addition to `FOREBAY_DATA`, in order of preference. These are the
/// system's folder, and those of projects that contain the working directory or the program.
fn search_roots() -> Vec<PathBuf> {
    let mut roots = vec![Path::new("/").join(SYSTEM_FOLDER)];
    let starts = [env::current_dir().ok(), env::current_exe().ok()];
    for folder in starts.iter().flatten().flat_map(|start| start.ancestors()) {
        let private = folder.join(".forebay/data");
        roots.extend([private.join(SYSTEM_FOLDER), private, folder.join("tests/data")]);
    }
    roots
}

/// Returns the folder that the variable names, if any.
pub(super) fn folder_from_env() -> Option<PathBuf> {
    env::var_os(DATA_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// Returns the first of `files` that exists in folders called `names`, in order of preference.
pub(super) fn find_file(files: &[&str], names: &[&str], advice: &str) -> Result<PathBuf> {
    search_folders(folder_from_env(), search_roots(), files, names, advice)
}

#[track_caller]
fn search_folders(
    named: Option<PathBuf>,
    mut roots: Vec<PathBuf>,
    files: &[&str],
    names: &[&str],
    advice: &str,
) -> Result<PathBuf> {
    // The variable may name the folder of the data set, or a folder of several.
    roots.splice(0..0, named.clone());
    let below = names.iter().flat_map(|name| roots.iter().map(move |root| root.join(name)));
    let mut searched: Vec<PathBuf> = Vec::new();
    for folder in named.iter().cloned().chain(below) {
        if let Some(found) = files.iter().map(|file| folder.join(file)).find(|path| path.is_file()) {
            return Ok(found);
        }
        if !searched.contains(&folder) {
            searched.push(folder);
        }
    }
    // Folders above the project are searched too, but listing them would clutter the message.
    searched.truncate(6);
    let searched: Vec<String> = searched.iter().map(|p| p.display().to_string()).collect();
    fail!(
        file(files.first().copied().unwrap_or_default()),
        "not found; looked in {} and the folders above; {advice}",
        searched.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_wins_over_the_first_root_and_the_error_says_where_it_looked() -> std::io::Result<()> {
        let root = env::temp_dir().join(format!("forebay-find-{}", std::process::id()));
        let roots = vec![root.join("a"), root.join("b")];
        for folder in ["a/small", "b/whole"] {
            std::fs::create_dir_all(root.join(folder))?;
            std::fs::write(root.join(folder).join("x.gz"), [])?;
        }
        let files = ["x", "x.gz"];
        let found = search_folders(None, roots.clone(), &files, &["whole", "small"], "");
        assert_eq!(found.ok(), Some(root.join("b/whole/x.gz")));
        let found =
            search_folders(Some(root.join("a/small")), roots.clone(), &files, &["whole", "small"], "");
        assert_eq!(found.ok(), Some(root.join("a/small/x.gz")), "what the variable names wins");
        let missing = search_folders(None, roots, &["y"], &["whole"], "do this");
        let missing = missing.err().map(|e| e.to_string()).unwrap_or_default();
        std::fs::remove_dir_all(&root)?;
        assert!(missing.contains("y: not found; looked in") && missing.ends_with("do this"), "{missing}");
        assert!(missing.contains(&root.join("a/whole").display().to_string()), "{missing}");
        Ok(())
    }
}

//! The book: its build with mdBook, and a check of the links of all documentation.

use crate::environment::Environment;
use crate::prose::CHECKED_FOLDERS;
use crate::workspace::Workspace;
use crate::{checks, diffs, process};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Version of mdBook that is installed if none is on the path.
const MDBOOK_VERSION: &str = "0.5.4";

/// Checks the links, then builds the book into `target/book`.
pub(crate) fn build(workspace: &Workspace) -> Result<bool> {
    let mdbook = find_mdbook(workspace)?;
    let output = workspace.target_dir().join("book");
    let mut command = Command::new(mdbook);
    command.arg("build").arg(workspace.root.join("docs")).arg("--dest-dir").arg(&output);
    let passed = check_docs(&workspace.root)? && process::run_foreground(&mut command)?;
    if passed {
        println!("{}", output.join("index.html").display());
    }
    Ok(passed)
}

/// Draws `docs/src/pictures` again. A training run of `steps` steps gives loss and memory. A dry run gives the
/// memory over time, the viewer's page and its screenshot.
pub(crate) fn draw_pictures(workspace: &Workspace, environment: &Environment, steps: u32) -> Result<bool> {
    let work = workspace.target_dir().join("pictures");
    let pictures = workspace.root.join("docs/src/pictures");
    std::fs::create_dir_all(&work)?;
    let words = |line: &str, file: &Path| -> Vec<String> {
        line.split(' ').map(String::from).chain([file.display().to_string()]).collect()
    };
    let (weights, snapshot) = (work.join("train.safetensors"), work.join("memory.json"));
    let train = words(&format!("--steps {steps} --save"), &weights);
    let dry_run = "--card rtx4090 --layers 4 --width 768 --batch 4 --memory-snapshot";
    let view = |picture: &str| -> Result<bool> {
        let view = words("run --release -p forebay-cli -- memory view", &snapshot);
        let view = [view, words("-o", &pictures.join(picture))].concat();
        workspace.run_cargo(&view.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let passed = workspace.run_example("dry_run", &words(dry_run, &snapshot), environment)?
        && view("memory.html")?
        && view("memory.svg")?
        && workspace.run_example("train_images", &train, environment)?;
    if passed {
        std::fs::copy(weights.with_extension("svg"), pictures.join("train.svg"))?;
        take_screenshot(&pictures.join("memory.html"), &pictures.join("memory.png"))?;
    }
    Ok(passed)
}

/// Takes a screenshot of a page with Chromium or Chrome, or says that there is none.
fn take_screenshot(page: &Path, picture: &Path) -> Result<()> {
    let browsers = ["chromium", "chromium-browser", "google-chrome"];
    let Some(browser) = browsers.into_iter().find(|name| process::succeeds(name, &["--version"])) else {
        println!("skipped: {}, which needs Chromium or Chrome on the path", picture.display());
        return Ok(());
    };
    // Without the sandbox, which root cannot start: the page is the viewer's own.
    let mut command = Command::new(browser);
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1200,900",
    ]);
    command.arg(format!("--screenshot={}", picture.display()));
    command.arg(format!("file://{}", page.display()));
    process::run_captured(&mut command)?;
    Ok(())
}

/// Returns mdBook from the path, or one that is installed below `target`.
fn find_mdbook(workspace: &Workspace) -> Result<PathBuf> {
    if process::succeeds("mdbook", &["--version"]) {
        return Ok("mdbook".into());
    }
    let folder = workspace.target_dir().join("tools");
    let program = folder.join("bin/mdbook");
    let root = folder.to_str().context("the target folder's name is not Unicode")?;
    let args = [
        "install",
        "mdbook",
        "--version",
        MDBOOK_VERSION,
        "--locked",
        "--no-default-features",
        "--features",
        "search",
        "--root",
        root,
    ];
    if !program.exists() && !workspace.run_cargo(&args)? {
        bail!("mdBook was not installed: see above");
    }
    Ok(program)
}

/// Checks all Markdown files of the workspace; prints each mistake with its location. Links must have a target, and
/// pages of the book link only within the book. The lines that a diff adds must be in its file. A page with Rust
/// samples must be part of the documentation tests. Pages, files and folders that a source or a page names must exist.
pub(crate) fn check_docs(root: &Path) -> Result<bool> {
    let book = root.join("docs/src");
    let tested = std::fs::read_to_string(root.join("src/lib.rs"))?;
    let summary = std::fs::read_to_string(book.join("SUMMARY.md"))?;
    let pages = find_pages(root)?;
    let mut mistakes = Vec::new();
    for page in &pages {
        let text = std::fs::read_to_string(page)?;
        let in_book = page.strip_prefix(&book).ok();
        for link in links(&text) {
            if let Some(mistake) = find_mistake(page, &text, link, in_book.map(|_| &*book)) {
                mistakes.push(format!("{}: {mistake}", page.display()));
            }
        }
        let stale = diffs::find_stale_lines(root, &text);
        mistakes.extend(stale.into_iter().map(|mistake| format!("{}: {mistake}", page.display())));
        if !is_history(page.strip_prefix(root).unwrap_or(page)) {
            let code = prose_lines(&text).flat_map(|line| line.split('`').skip(1).step_by(2));
            mistakes.extend(find_missing_paths(root, page, code));
        }
        let Some(name) = in_book.and_then(Path::to_str).filter(|name| *name != "SUMMARY.md") else {
            continue;
        };
        if !summary.contains(&format!("]({name})")) {
            mistakes.push(format!("{}: SUMMARY.md does not list it", page.display()));
        }
        if text.contains("```rust") && !tested.contains(&format!("docs/src/{name}\"")) {
            mistakes.push(format!("{}: src/lib.rs does not include its samples", page.display()));
        }
    }
    for source in checks::source_files(root) {
        if !source.starts_with(root.join("xtask")) {
            let text = std::fs::read_to_string(&source)?;
            let missing = named_pages(&text).filter(|page| !root.join(page).exists());
            mistakes.extend(missing.map(|page| format!("{}: `{page}` is missing", source.display())));
            let comments = text.lines().filter_map(|line| Some(line.split_once("//")?.1));
            mistakes.extend(find_missing_paths(root, &source, comments));
        }
    }
    for mistake in &mistakes {
        println!("{mistake}");
    }
    Ok(mistakes.is_empty())
}

/// Returns the Markdown files of the repository.
pub(crate) fn find_pages(root: &Path) -> Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    collect_pages(root, &mut pages)?;
    Ok(pages)
}

/// Adds the Markdown files of a folder and its subfolders, in order of their names.
fn collect_pages(folder: &Path, pages: &mut Vec<PathBuf>) -> Result<()> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    entries.sort();
    for path in entries {
        if path.is_dir() && !checks::EXCLUDED_DIRS.iter().any(|foreign| path.ends_with(foreign)) {
            collect_pages(&path, pages)?;
        } else if path.extension().is_some_and(|end| end == "md") {
            pages.push(path);
        }
    }
    Ok(())
}

/// Returns the lines of a text that are outside of code blocks.
fn prose_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    })
}

/// Returns the targets of the links of a page, without those in code.
fn links(text: &str) -> Vec<&str> {
    let outside_code = prose_lines(text).flat_map(|line| line.split('`').step_by(2));
    outside_code
        .flat_map(|part| part.split("](").skip(1))
        .filter_map(|rest| Some(rest.split_once(')')?.0))
        .collect()
}

/// Returns the pages of `docs` that a source names.
fn named_pages(text: &str) -> impl Iterator<Item = &str> {
    let named = text.split("docs/").skip(1).zip(text.match_indices("docs/"));
    named.filter_map(|(rest, (start, _))| {
        let end =
            rest.find(|c: char| !c.is_ascii_alphanumeric() && !"/-_.".contains(c)).unwrap_or(rest.len());
        let page = &text[start..start + "docs/".len() + end];
        Some(&page[..page.rfind(".md")? + ".md".len()])
    })
}

/// Reports whether a page is a record of the past, which may name files that are gone.
fn is_history(page: &Path) -> bool {
    page.starts_with("docs/lab") || page == Path::new("CHANGELOG.md")
}

/// Describes the files and folders of the workspace that texts name, such as `core/src/lib.rs`, and that do not exist.
fn find_missing_paths<'a>(root: &Path, source: &Path, texts: impl Iterator<Item = &'a str>) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "/-_.".contains(c);
    let paths = texts.flat_map(|text| text.split(|c: char| !is_part(c)));
    let in_workspace = paths.filter(|path| {
        // `src` may be a folder of any package, or of the program of a user.
        path.split_once('/').is_some_and(|(folder, _)| folder != "src" && CHECKED_FOLDERS.contains(&folder))
    });
    let missing =
        in_workspace.map(|path| path.trim_end_matches('.')).filter(|path| !root.join(path).exists());
    missing.map(|path| format!("{}: `{path}` is missing", source.display())).collect()
}

/// Describes why a link is broken: its file or its heading is missing, or it leaves the book.
fn find_mistake(page: &Path, text: &str, link: &str, book: Option<&Path>) -> Option<String> {
    if link.contains("://") {
        return None;
    }
    let (file, heading) = link.split_once('#').unwrap_or((link, ""));
    let target = if file.is_empty() { page.to_path_buf() } else { page.parent()?.join(file) };
    let Ok(target) = target.canonicalize() else { return Some(format!("the target of `{link}` is missing")) };
    if book.and_then(|book| book.canonicalize().ok()).is_some_and(|book| !target.starts_with(book)) {
        return Some(format!("`{link}` leaves the book"));
    }
    let read =
        if file.is_empty() { text.to_owned() } else { std::fs::read_to_string(&target).unwrap_or_default() };
    let found = heading.is_empty() || prose_lines(&read).filter_map(anchor).any(|known| known == heading);
    (!found).then(|| format!("the heading of `{link}` is missing"))
}

/// Returns the anchor that mdBook and GitHub give a heading, or nothing for any other line.
fn anchor(line: &str) -> Option<String> {
    let title = line.strip_prefix('#')?.trim_start_matches('#').strip_prefix(' ')?;
    let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    Some(kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_links_and_untested_pages_are_found() -> Result<()> {
        let root = std::env::temp_dir().join(format!("forebay-xtask-book-{}", std::process::id()));
        let write = |name: &str, text: &str| -> Result<()> {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().context("a file has a folder")?)?;
            Ok(std::fs::write(path, text)?)
        };
        write("README.md", "[the page](docs/src/page.md#its-heading)")?;
        write("CONTRIBUTING.md", "[`code`](README.md), and `[no](link)`")?;
        write("src/lib.rs", "#[doc = include_str!(\"../docs/src/page.md\")]")?;
        write("docs/src/SUMMARY.md", "- [Page](page.md)")?;
        write("docs/src/page.md", "# Its `heading`\n```rust\n[no](link)\n```\n[here](#its-heading)")?;
        assert!(check_docs(&root)?);
        for broken in ["[x](no.md)", "[x](#no)", "[x](../../README.md)", "[`x`](no.md)"] {
            write("docs/src/page.md", &format!("# Its heading\n{broken}"))?;
            assert!(!check_docs(&root)?, "{broken}");
        }
        write("docs/src/page.md", "# Its heading\n```rust\n```")?;
        write("src/lib.rs", "")?;
        assert!(!check_docs(&root)?);
        write("src/lib.rs", "include_str!(\"../docs/src/page.md\") // see docs/no.md.")?;
        assert!(!check_docs(&root)?);
        write("src/lib.rs", "include_str!(\"../docs/src/page.md\") // see core/no.rs")?;
        assert!(!check_docs(&root)?);
        write("src/lib.rs", "include_str!(\"../docs/src/page.md\") // see core/a.rs.")?;
        write("core/a.rs", "")?;
        write("docs/src/page.md", "# Its heading\nSee `core/a.rs` and `core/`, not core/no.rs.")?;
        assert!(check_docs(&root)?);
        write("docs/src/page.md", "# Its heading\n`core/no.rs`")?;
        assert!(!check_docs(&root)?);
        std::fs::remove_dir_all(&root)?;
        Ok(())
    }
}

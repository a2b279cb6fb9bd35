//! Diffs in documents: blocks of ```` ```diff ```` that show how the repository's own files came to be.
//!
//! Every line that such a block adds must be in the file today. Other lines are reported as stale.
//!
//! `--- path  comment` names the file of the lines below. `...` in a line stands for omitted text, and a comment that
//! follows two spaces and `//` belongs to the page.

use std::path::Path;

/// Returns a description of each added line of the diffs of a page that its file does not contain.
pub(crate) fn find_stale_lines(root: &Path, page: &str) -> Vec<String> {
    let mut mistakes = Vec::new();
    let mut in_diff = false;
    let mut file: Option<(&str, String)> = None;
    for line in page.lines().map(str::trim_start) {
        if line.starts_with("```") {
            in_diff = line == "```diff";
            file = None;
        } else if let Some(name) = line.strip_prefix("--- ").filter(|_| in_diff) {
            let name = name.split_whitespace().next().unwrap_or_default();
            file = std::fs::read_to_string(root.join(name)).ok().map(|text| (name, join_words(&text)));
            if file.is_none() {
                mistakes.push(format!("a diff changes `{name}`, which is missing"));
            }
        } else if let (true, Some(added), Some((name, text))) = (in_diff, line.strip_prefix('+'), &file) {
            let code = added.split_once("  //").map_or(added, |(code, _)| code);
            if let Some(missing) = code.split("...").map(join_words).find(|part| !text.contains(part)) {
                mistakes.push(format!("a diff adds `{missing}`, which `{name}` does not contain"));
            }
        }
    }
    mistakes
}

/// Returns a text with single spaces between its words, so that lines may be broken elsewhere.
fn join_words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::find_stale_lines;

    #[test]
    fn lines_and_files_that_are_gone_are_found() -> anyhow::Result<()> {
        let root = std::env::temp_dir().join(format!("forebay-xtask-diffs-{}", std::process::id()));
        std::fs::create_dir_all(&root)?;
        std::fs::write(root.join("a.rs"), "fn f(\n    x: u32,\n) {\n    g(x); // why\n}\n")?;
        let stale = |added: &str| {
            find_stale_lines(&root, &format!("text\n```diff\n--- a.rs  a file\n-fn e() {{}}\n{added}\n```\n"))
                .len()
        };
        let found = [
            stale("+fn f( x: u32, ) { ... }"),
            stale("+    g(x);          // a comment of the page\n+    g(x); // why"),
            stale("+fn h() {}"),
            stale("+fn f( ... h(x); ... }"),
            stale("--- b.rs\n+fn f("),
            find_stale_lines(&root, "```rust\n--- b.rs\n+fn h() {}\n```\n+no diff").len(),
        ];
        std::fs::remove_dir_all(&root)?;
        assert_eq!(found, [0, 0, 1, 1, 1, 0]);
        Ok(())
    }
}

//! Prose of comments: doc comments begin with a verb or a noun, and some words do not occur.

use std::path::Path;

/// Folders whose comments follow the rules.
pub(crate) const CHECKED_FOLDERS: [&str; 13] = [
    "backend-cuda",
    "backend-wgpu",
    "benches",
    "cli",
    "core",
    "derive",
    "examples",
    "fuzz",
    "nn",
    "shaders",
    "src",
    "tests",
    "xtask",
];
/// Beginnings of doc comments that leave the reader to guess the subject.
const BANNED_BEGINNINGS: [&str; 6] = ["What ", "Whether ", "Who ", "How ", "The same", "As ["];
/// Words that have a plainer one: "in addition to" or "compared with", "passed", "no one" or the subject itself.
const BANNED_WORDS: [&str; 5] = ["beside", "lent", "whoever", "somebody", "nobody"];

/// Describes the first rule that a line of Rust breaks, if it is a comment that breaks one.
pub(crate) fn find_violation(line: &str) -> Option<String> {
    let line = line.trim_start();
    let comment = line.strip_prefix("//")?;
    let is_doc = comment.starts_with(['/', '!']);
    let text = comment.trim_start_matches(['/', '!']).trim_start();
    if let Some(beginning) =
        BANNED_BEGINNINGS.iter().find(|beginning| is_doc && text.starts_with(**beginning))
    {
        return Some(format!(
            "a doc comment begins with `{}`; begin with a verb or a noun",
            beginning.trim_end()
        ));
    }
    find_banned_word(text)
}

fn find_banned_word(text: &str) -> Option<String> {
    let mut words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.find(|word| BANNED_WORDS.contains(word)).map(|word| format!("the word `{word}` has a plainer one"))
}

/// Checks the comments of a source file, or the text of a Markdown file; prints each violation with its place.
pub(crate) fn check_file(path: &Path, text: &str) -> bool {
    let find =
        if path.extension().is_some_and(|end| end == "md") { find_banned_word } else { find_violation };
    let mut is_plain = true;
    for (at, line) in text.lines().enumerate() {
        if let Some(violation) = find(line) {
            println!("{}:{}: {violation}", path.display(), at + 1);
            is_plain = false;
        }
    }
    is_plain
}

#[cfg(test)]
mod tests {
    use super::find_violation;

    #[test]
    fn comments_that_break_a_rule_are_found_and_code_is_not() {
        assert!(find_violation("    /// Whether it is set.").is_some());
        assert!(find_violation("//! As [`replace`] does.").is_some());
        assert!(find_violation("// It stands beside the other.").is_some());
        assert!(find_violation("/// Returns what is set.").is_none());
        assert!(find_violation("// What follows is a plain comment.").is_none());
        assert!(find_violation("let beside = 1;").is_none());
    }
}

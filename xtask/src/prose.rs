//! Prose of comments: doc comments begin with a verb or a noun, some words do not occur, and lines are short.

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

/// Longest line of documents, comments and shaders. rustfmt limits the lines of Rust code.
const MAX_COLUMNS: usize = 120;

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

/// Kinds of files, by the lines that the rules cover.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// All lines outside tables and blocks of code.
    Markdown,
    /// Comments.
    Rust,
    /// All lines, except the values that a test of the translator expects. Words are not checked.
    Shader,
}

impl Kind {
    fn of(path: &Path) -> Self {
        match path.extension().and_then(|end| end.to_str()) {
            Some("md") => Self::Markdown,
            Some("rs") => Self::Rust,
            _ => Self::Shader,
        }
    }

    /// Describes a line that is too long.
    fn find_long_line(self, line: &str, is_code: bool) -> Option<String> {
        let may_be_long = match self {
            Self::Markdown => is_code || line.starts_with('|'),
            Self::Rust => !line.trim_start().starts_with("//"),
            Self::Shader => line.starts_with("// expect: "),
        };
        let columns = line.chars().count();
        (columns > MAX_COLUMNS && !may_be_long).then(|| format!("{columns} columns, more than {MAX_COLUMNS}"))
    }
}

/// Checks the comments of a source file, or the text of a Markdown file; prints each violation with its location.
pub(crate) fn check_file(path: &Path, text: &str) -> bool {
    let kind = Kind::of(path);
    let (mut is_plain, mut is_code) = (true, false);
    for (at, line) in text.lines().enumerate() {
        is_code ^= line.trim_start().starts_with("```");
        let violation = match kind {
            Kind::Markdown => find_banned_word(line),
            Kind::Rust => find_violation(line),
            Kind::Shader => None,
        };
        if let Some(violation) = violation.or_else(|| kind.find_long_line(line, is_code)) {
            println!("{}:{}: {violation}", path.display(), at + 1);
            is_plain = false;
        }
    }
    is_plain
}

#[cfg(test)]
mod tests {
    use super::{Kind, find_violation};

    #[test]
    fn comments_that_break_a_rule_are_found_and_code_is_not() {
        assert!(find_violation("    /// Whether it is set.").is_some());
        assert!(find_violation("//! As [`replace`] does.").is_some());
        assert!(find_violation("// It stands beside the other.").is_some());
        assert!(find_violation("/// Returns what is set.").is_none());
        assert!(find_violation("// What follows is a plain comment.").is_none());
        assert!(find_violation("let beside = 1;").is_none());
    }

    #[test]
    fn long_lines_are_found_where_no_formatter_breaks_them() {
        let long = "x".repeat(121);
        let found = |kind: Kind, line: &str| kind.find_long_line(line, false).is_some();
        assert!(found(Kind::Shader, &long) && found(Kind::Markdown, &long));
        assert!(found(Kind::Rust, &format!("    // {long}")));
        assert!(!found(Kind::Rust, &long) && !found(Kind::Markdown, &format!("| {long} |")));
        assert!(!found(Kind::Shader, &long[1..]) && Kind::Markdown.find_long_line(&long, true).is_none());
    }
}

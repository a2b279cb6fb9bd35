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

/// Beginnings of a function's documentation in addition to a verb such as "Returns".
const OTHER_BEGINNINGS: [&str; 4] = ["Also", "If", "In", "See"];
/// Folders whose functions are scenarios: their documentation states a condition instead of an action.
const SCENARIO_FOLDERS: [&str; 2] = ["tests/src", "benches/src"];

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

/// State of the search for functions whose documentation does not begin with a verb.
#[derive(Default)]
struct FunctionDocs<'a> {
    /// First line of the documentation that precedes the current line.
    first: Option<&'a str>,
}

impl<'a> FunctionDocs<'a> {
    /// Describes the violation of a function that this line declares. Attributes may precede the function.
    fn find_violation(&mut self, line: &'a str) -> Option<String> {
        let line = line.trim_start();
        if let Some(text) = line.strip_prefix("///") {
            // An empty line follows a line that a macro computes.
            self.first.get_or_insert(if text.trim().is_empty() { "See" } else { text.trim() });
            return None;
        }
        if line.starts_with("#[") && line != "#[test]" {
            if line.starts_with("#[doc") {
                // A macro computes this line.
                self.first.get_or_insert("See");
            }
            return None;
        }
        let word = self.first.take()?.split(' ').next()?.trim_end_matches([',', ':']);
        let is_verb = word.starts_with(char::is_uppercase) && word.ends_with('s');
        (is_function(line) && !is_verb && !OTHER_BEGINNINGS.contains(&word))
            .then(|| format!("the documentation of a function begins with `{word}`; begin with a verb"))
    }
}

/// Reports whether a line begins the declaration of a function.
fn is_function(line: &str) -> bool {
    let is_qualifier = |word: &str| {
        ["pub", "const", "async", "unsafe", "extern", "\"C\""].contains(&word)
            || word.starts_with("pub(")
            || word.ends_with(')')
    };
    line.split_once("fn ").is_some_and(|(before, _)| before.split_whitespace().all(is_qualifier))
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
    let mut function_docs = FunctionDocs::default();
    let has_scenarios = SCENARIO_FOLDERS.iter().any(|folder| path.to_string_lossy().contains(folder));
    for (at, line) in text.lines().enumerate() {
        is_code ^= line.trim_start().starts_with("```");
        let violation = match kind {
            Kind::Markdown => find_banned_word(line),
            Kind::Rust => {
                let function = function_docs.find_violation(line).filter(|_| !has_scenarios);
                find_violation(line).or(function)
            }
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
    use super::{FunctionDocs, Kind, find_violation};

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
    fn documentation_of_functions_begins_with_a_verb() {
        let is_refused = |text: &str| {
            let mut docs = FunctionDocs::default();
            text.lines().any(|line| docs.find_violation(line).is_some())
        };
        assert!(is_refused("/// The size.\nfn size() {}"));
        assert!(is_refused("    /// a for a > 0.\n    #[must_use]\n    pub(in crate::x) const fn f() {}"));
        for text in [
            "/// Returns the size.\n/// And more.\n#[inline]\nfn size() {}",
            "/// The size.\nsize: u32,",
            "/// A condition.\n#[test]\nfn sizes_are_equal() {}",
            "#[doc = concat!(\"Computes\", $op)]\n/// and more.\npub fn f() {}",
            "/// If true, keeps it.\nfn keep(on: bool) {}",
            "// The size.\nfn size() {}",
        ] {
            assert!(!is_refused(text), "{text}");
        }
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

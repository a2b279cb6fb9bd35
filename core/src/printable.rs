//! Text of unknown origin, such as a name in a file, in a form that is safe to print.

use std::borrow::Cow;

/// Returns the text with escapes (`\u{1b}`) in place of characters that would change how a terminal or a page shows the
/// text around them: control characters, line ends, and marks of the writing direction.
///
/// ```
/// # use forebay_core::printable::printable;
/// assert_eq!(printable("fc1.weight"), "fc1.weight");
/// assert_eq!(printable("\u{1b}[2Jfc1\n"), "\\u{1b}[2Jfc1\\u{a}");
/// ```
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unprintable) {
        return Cow::Borrowed(text);
    }
    let escape = |mut safe: String, c: char| {
        match is_unprintable(c) {
            true => safe.extend(c.escape_unicode()),
            false => safe.push(c),
        }
        safe
    };
    Cow::Owned(text.chars().fold(String::with_capacity(2 * text.len()), escape))
}

/// Reports whether a character is a control character, ends a line, or changes the writing direction.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_line_ends_and_directions_are_escaped() {
        for text in ["", "encoder.fc1.weight", "Größe 層 🧱", r"C:\new\table"] {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text), "{text}");
        }
        for (text, expected) in [
            ("\u{1b}]0;title\u{7}", r"\u{1b}]0;title\u{7}"),
            ("\u{9b}31m", r"\u{9b}31m"),
            ("a\r\nb\tc\u{7f}\0", r"a\u{d}\u{a}b\u{9}c\u{7f}\u{0}"),
            ("\u{202e}txt.\u{2066}\u{2069}\u{200f}\u{61c}", r"\u{202e}txt.\u{2066}\u{2069}\u{200f}\u{61c}"),
            ("a\u{2028}b\u{2029}", r"a\u{2028}b\u{2029}"),
        ] {
            assert_eq!(printable(text), expected);
        }
    }
}

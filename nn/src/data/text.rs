//! Text as a sequence of characters.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Dataset, locate};
use crate::{Error, Result, fail_if};

/// A text and its vocabulary: the sorted characters that occur in the text.
#[derive(Clone, Debug)]
pub struct Text {
    tokens: Arc<[u32]>,
    vocabulary: Arc<[char]>,
}

impl Text {
    /// Creates a text from a string.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let vocabulary: Arc<[char]> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        // No character is missing, because the vocabulary is made from the same text.
        let tokens =
            text.chars().filter_map(|c| vocabulary.binary_search(&c).ok()).map(|i| i as u32).collect();
        Self { tokens, vocabulary }
    }

    /// Reads a text from a file.
    ///
    /// # Errors
    /// The file cannot be read, is not UTF-8, or is empty.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text =
            std::fs::read_to_string(path).map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
        fail_if!(text.is_empty(); file(path), "is empty");
        Ok(Self::new(&text))
    }

    /// Loads nine plays of Shakespeare, from the same folders as [`FashionMnist`](super::FashionMnist).
    ///
    /// # Errors
    /// The file is not found. The message lists the folders that were searched.
    pub fn shakespeare() -> Result<Self> {
        Self::open(Self::shakespeare_file()?)
    }

    /// Finds the file of [`shakespeare`](Self::shakespeare) and returns its path, for use with a custom tokenizer.
    ///
    /// # Errors
    /// The file is not found. The message lists the folders that were searched.
    pub fn shakespeare_file() -> Result<PathBuf> {
        let advice = "it is `tests/data/shakespeare.txt` of the project's repository: name a folder that has it in \
                      FOREBAY_DATA, or open another text with `Text::open`";
        locate::find_file(&["shakespeare.txt"], &[""], advice)
    }

    /// Returns the number of characters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Reports whether the text is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the characters that occur in the text; a token is an index into this slice.
    #[must_use]
    pub fn vocabulary(&self) -> &[char] {
        &self.vocabulary
    }

    /// Encodes a string as tokens.
    ///
    /// # Errors
    /// A character is not in the vocabulary.
    #[track_caller]
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        let encode_char = |c: char| {
            let index = self.vocabulary.binary_search(&c);
            index
                .map(|i| i as i64)
                .map_err(|_| Error::argument("encode", format!("{c:?} does not occur in the text")))
        };
        text.chars().map(encode_char).collect()
    }

    /// Decodes tokens to characters; an invalid token becomes `\u{fffd}`.
    #[must_use]
    pub fn decode(&self, tokens: &[i64]) -> String {
        let decode_token = |&t: &i64| usize::try_from(t).ok().and_then(|t| self.vocabulary.get(t)).copied();
        tokens.iter().map(|t| decode_token(t).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    }

    /// Splits the text at the fraction `first`; both parts share the vocabulary.
    #[must_use]
    pub fn split(&self, first: f64) -> (Self, Self) {
        let at = ((self.len() as f64 * first) as usize).min(self.len());
        let part = |tokens: &[u32]| Self { tokens: tokens.into(), vocabulary: self.vocabulary.clone() };
        (part(&self.tokens[..at]), part(&self.tokens[at..]))
    }

    /// Creates a data set of all runs of `length` characters. A target is the run one character later.
    #[must_use]
    pub fn token_windows(&self, length: usize) -> TokenWindows {
        TokenWindows::new(self.tokens.clone(), length)
    }
}

/// Data set of runs of tokens, each with the run one token later as its target. Tokens are characters
/// ([`Text::token_windows`]) or those of a custom tokenizer.
///
/// Input and target are i64, \[length\].
#[derive(Clone, Debug)]
pub struct TokenWindows {
    tokens: Arc<[u32]>,
    shape: [usize; 1],
    stride: usize,
}

impl TokenWindows {
    /// Creates a data set of all runs of `length` tokens. The target of a run is the run one token later.
    #[must_use]
    pub fn new(tokens: impl Into<Arc<[u32]>>, length: usize) -> Self {
        Self { tokens: tokens.into(), shape: [length], stride: 1 }
    }

    setters! {
        /// Keeps only every `n`-th run; with `n` equal to the length, runs do not overlap.
        fn with_stride(n: usize) { stride: n.max(1) }
    }
}

impl Dataset for TokenWindows {
    type Input = i64;
    type Target = i64;

    fn len(&self) -> usize {
        self.tokens.len().saturating_sub(self.shape[0]).div_ceil(self.stride)
    }

    fn input_shape(&self) -> &[usize] {
        &self.shape
    }

    fn target_shape(&self) -> &[usize] {
        &self.shape
    }

    fn get(&self, index: usize, input: &mut [i64], target: &mut [i64]) -> Result<()> {
        let start = index * self.stride;
        let tokens = &self.tokens[start..=start + self.shape[0]];
        for (i, pair) in tokens.windows(2).enumerate() {
            (input[i], target[i]) = (pair[0].into(), pair[1].into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_encoded_and_decoded() -> Result<()> {
        let text = Text::new("to be, or not to be");
        assert_eq!(text.vocabulary(), [' ', ',', 'b', 'e', 'n', 'o', 'r', 't']);
        assert_eq!(text.decode(&text.encode("robot, not")?), "robot, not");
        assert_eq!(text.decode(&[0, 99, -1]), " \u{fffd}\u{fffd}");
        assert!(text.encode("X").is_err_and(|e| e.message() == "encode: 'X' does not occur in the text"));
        Ok(())
    }

    #[test]
    fn windows_are_shifted_by_one_and_end_with_the_text() -> Result<()> {
        let text = Text::new("abcdefg");
        let windows = text.token_windows(3);
        assert_eq!(
            (windows.len(), windows.clone().with_stride(3).len(), text.token_windows(7).len()),
            (4, 2, 0)
        );
        let (mut x, mut y) = ([0; 3], [0; 3]);
        windows.get(3, &mut x, &mut y)?;
        assert_eq!((text.decode(&x), text.decode(&y)), ("def".into(), "efg".into()));
        windows.with_stride(3).get(1, &mut x, &mut y)?;
        assert_eq!(text.decode(&y), "efg");
        let (first, rest) = text.split(0.5);
        assert_eq!((first.len(), rest.len(), rest.vocabulary().len()), (3, 4, 7));
        Ok(())
    }

    #[test]
    fn the_text_is_complete() -> Result<()> {
        let text = Text::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/shakespeare.txt"))?;
        assert!(text.len() > 1_000_000 && text.vocabulary().len() < 100, "{}", text.len());
        Ok(())
    }
}

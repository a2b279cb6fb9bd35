//! Choices between implementations of one operation, made by timing, in one file each.

use super::{CacheKey, DiskCache};

const SUFFIX: &str = ".choice";

/// Fastest implementations by problem, for one owner: a device with its driver, and a library if one implements them.
///
/// A file repeats its owner and its problem in plain text. So a file under another name is not used.
#[derive(Clone, Debug)]
pub struct ChoiceCache {
    disk: DiskCache,
    owner: String,
}

impl ChoiceCache {
    /// Creates the cache of an owner. Everything that may change the fastest implementation is part of its name.
    #[must_use]
    pub fn new(owner: String, disk: DiskCache) -> Self {
        Self { disk, owner }
    }

    /// Returns the cache's files.
    #[must_use]
    pub fn disk(&self) -> &DiskCache {
        &self.disk
    }

    /// Loads the choice for a problem. Returns `None` if there is none, or if its file is damaged.
    #[must_use]
    pub fn load(&self, problem: &str) -> Option<Vec<u8>> {
        let content = self.disk.load(&self.file_name(problem))?;
        let header = self.header(problem);
        let choice = content.strip_prefix(header.as_bytes());
        if choice.is_none() {
            log::warn!("{} is about another problem and is not used", self.file_name(problem));
        }
        choice.map(<[u8]>::to_vec)
    }

    /// Stores the choice for a problem. Of several processes, the last one to store wins.
    pub fn store(&self, problem: &str, choice: &[u8]) {
        self.disk.store(&self.file_name(problem), &[self.header(problem).as_bytes(), choice].concat());
    }

    /// Returns the number of choices on disk.
    #[must_use]
    pub fn count(&self) -> usize {
        self.disk.find_names(&self.file_prefix(), SUFFIX).len()
    }

    fn header(&self, problem: &str) -> String {
        format!("{}\n{problem}\n", self.owner)
    }

    fn file_prefix(&self) -> String {
        format!("{}-", CacheKey::new(&[&self.owner]))
    }

    fn file_name(&self, problem: &str) -> String {
        format!("{}{}{SUFFIX}", self.file_prefix(), CacheKey::new(&[problem]))
    }
}

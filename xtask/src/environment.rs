//! Environment variables that let programs find dependencies.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variables to set, and folders to prepend to path lists.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Environment {
    values: BTreeMap<String, OsString>,
    path_lists: BTreeMap<String, Vec<PathBuf>>,
}

impl Environment {
    /// Sets a variable, whatever its previous value.
    pub(crate) fn set(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.values.insert(name.into(), value.into());
        self
    }

    /// Returns the value that was set for a variable.
    pub(crate) fn value(&self, name: &str) -> Option<OsString> {
        self.values.get(name).cloned()
    }

    /// Prepends a folder to a path list, once.
    pub(crate) fn prepend(mut self, name: &str, folder: impl AsRef<Path>) -> Self {
        let folders = self.path_lists.entry(name.into()).or_default();
        if !folders.iter().any(|known| known == folder.as_ref()) {
            folders.push(folder.as_ref().into());
        }
        self
    }

    /// Merges two environments; on conflict, `other` wins.
    pub(crate) fn merge(mut self, other: Self) -> Self {
        self.values.extend(other.values);
        for (name, folders) in other.path_lists {
            self = folders.iter().fold(self, |all, folder| all.prepend(&name, folder));
        }
        self
    }

    /// Sets the variables for a command. Path lists keep this process's entries after the new ones.
    pub(crate) fn apply(&self, command: &mut Command) {
        command.envs(&self.values);
        for (name, folders) in &self.path_lists {
            command.env(name, join_paths(folders, std::env::var_os(name)));
        }
    }
}

fn join_paths(folders: &[PathBuf], inherited: Option<OsString>) -> OsString {
    let inherited = inherited.unwrap_or_default();
    let rest = std::env::split_paths(&inherited).filter(|path| !path.as_os_str().is_empty());
    // A folder with a separator in its name cannot be part of a list; the variable then stays unchanged.
    std::env::join_paths(folders.iter().cloned().chain(rest)).unwrap_or(inherited.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_previous_entries() {
        let folders = [PathBuf::from("/a"), PathBuf::from("/b")];
        assert_eq!(join_paths(&folders, Some("/old:".into())), OsString::from("/a:/b:/old"));
        assert_eq!(join_paths(&folders, None), OsString::from("/a:/b"));
    }

    #[test]
    fn merging_keeps_both_and_prefers_the_other() {
        let one = Environment::default().set("DRIVER", "one").set("KEPT", "yes").prepend("LIBS", "/one");
        let two = Environment::default().set("DRIVER", "two").prepend("LIBS", "/two").prepend("LIBS", "/one");
        let both = one.merge(two);
        assert_eq!(both.values["DRIVER"], "two");
        assert_eq!(both.values["KEPT"], "yes");
        assert_eq!(both.path_lists["LIBS"], [PathBuf::from("/one"), PathBuf::from("/two")]);
    }

    #[test]
    fn a_command_gets_the_variables() {
        let mut command = Command::new("true");
        Environment::default().set("NAME", "value").apply(&mut command);
        let found = command.get_envs().any(|(name, value)| name == "NAME" && value == Some("value".as_ref()));
        assert!(found);
    }
}

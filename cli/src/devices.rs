//! `forebay devices`: devices of this machine, their memory use by process, and unavailable backends.

use std::fmt::Write as _;

use anyhow::Result;
use forebay::ProbedDevice;
use forebay::backend::DeviceProcess;
use forebay::memory::Bytes;
use forebay::prelude::*;

pub(crate) fn run() -> Result<()> {
    for found in Device::enumerate() {
        print!("{}", describe_device(&found, Device::open));
    }
    Ok(())
}

/// Formats a device's lines. Opens the device, because drivers report memory only for an open device.
fn describe_device(
    found: &ProbedDevice,
    open: impl FnOnce(&str) -> forebay::error::Result<Device>,
) -> String {
    let ProbedDevice { id, name, driver, unavailable_reason, .. } = found;
    if let Some(reason) = unavailable_reason {
        return format!("{id:<8} cannot be used: {reason}\n");
    }
    let mut text = format!("{id:<8} {name} ({driver})\n");
    let _ = match open(id) {
        Ok(device) => {
            let paths = device.info().paths.iter().cloned();
            // A vendor's library chooses its own tiles.
            let has_tiles = !device.is_null() && !device.library_features().matmul;
            let tiles = has_tiles.then(|| device.describe_tile_choice());
            let mut lines = std::iter::once(describe_memory(&device)).chain(paths).chain(tiles);
            lines.try_for_each(|line| writeln!(text, "{:<8} {line}", ""))
        }
        Err(error) => writeln!(text, "{:<8} cannot be opened: {error}", ""),
    };
    text
}

fn describe_memory(device: &Device) -> String {
    let memory = device.backend().device_memory();
    let mut text = match (memory.total, memory.free) {
        (Some(total), Some(free)) => format!("{} free of {}", Bytes(free), Bytes(total)),
        (Some(total), None) => format!("{}; the driver does not report how much is free", Bytes(total)),
        _ => "the driver does not report its memory".to_owned(),
    };
    let users = device.backend().processes().iter().map(DeviceProcess::describe_usage).collect::<Vec<_>>();
    if !users.is_empty() {
        let _ = write!(text, "; used by {}", users.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_lists_its_memory_or_why_it_is_unavailable() {
        let found = |reason: Option<&str>| ProbedDevice {
            id: "null".into(),
            name: "a card".into(),
            driver: "none".into(),
            is_software: false,
            unavailable_reason: reason.map(str::to_owned),
        };
        let open = |_: &str| Ok(Device::null(Default::default()));
        let text = describe_device(&found(None), open);
        assert_eq!(text, "null     a card (none)\n         80.0 GiB free of 80.0 GiB\n");
        let text = describe_device(&found(Some("no driver")), open);
        assert_eq!(text, "null     cannot be used: no driver\n");
        let text = describe_device(&found(None), |_| Device::open("cuda:x"));
        assert!(text.contains("\n         cannot be opened: no device `cuda:x`: an id is"), "{text}");
    }
}

//! Core topics of the conformance suite in a browser page.
//!
//! Tests read results with calls that block. Here the engine suspends the whole stack of the module in such a call
//! (JavaScript Promise Integration), while the page runs its event loop.

mod suite;
mod suspending;

use std::cell::RefCell;
use std::sync::Arc;

use forebay::device::Device;
use forebay::future::spawn_blocking;
use forebay_wgpu::WgpuBackend;
use suspending::SuspendingBackend;
use wasm_bindgen::prelude::*;

thread_local! {
    static DEVICE: RefCell<Option<Device>> = const { RefCell::new(None) };
    static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn print(line: String) {
    LINES.with_borrow_mut(|lines| lines.push(line));
}

/// Opens the browser's device.
#[wasm_bindgen]
pub async fn open() -> Result<(), JsError> {
    // A panic ends the module; the page posts the report with this line.
    std::panic::set_hook(Box::new(|panic| print(format!("FAILED  {panic}"))));
    let backend =
        spawn_blocking(|opened| WgpuBackend::open_then(0, |backend| opened.complete(backend))).await?;
    let device = Device::new(Arc::new(SuspendingBackend(backend)))?;
    print(device.info().to_string());
    DEVICE.set(Some(device));
    Ok(())
}

/// Runs the topics. The page calls this export so that it can be suspended.
#[wasm_bindgen]
pub fn run_topics() {
    match DEVICE.with_borrow(Clone::clone) {
        Some(device) => {
            let tally = suite::run(&device, &mut print);
            print(tally.to_string());
        }
        None => print("FAILED  the device is not open".to_owned()),
    }
}

/// Returns the lines of the report.
#[wasm_bindgen]
pub fn report() -> String {
    LINES.with_borrow(|lines| lines.join("\n"))
}

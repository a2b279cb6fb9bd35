//! Window in which a network learns the classes of points while the user draws them. `cargo xtask app` starts it.
//!
//! The network trains on the window's own wgpu device, and a shader reads its output where it is. `network` has the
//! model, `training` enqueues steps between frames, `boundary` draws the output, and `app` and `panel` are the window.

mod app;
mod boundary;
mod network;
mod panel;
mod report;
mod training;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use eframe::egui::{self, vec2};
use eframe::egui_wgpu::{WgpuConfiguration, WgpuSetupCreateNew};
use forebay::wgpu;

const TITLE: &str = "A boundary that learns";

/// A window in which a network learns the classes of points while you draw them.
#[derive(Parser)]
struct Options {
    /// Print the state four times a second: `cargo xtask app --test` reads it.
    #[arg(long)]
    report: bool,
    /// Close the window after this many frames.
    #[arg(long)]
    frames: Option<u64>,
    /// PNG file for a screenshot of the last frame.
    #[arg(long, requires = "frames")]
    screenshot: Option<PathBuf>,
}

/// Returns the options of the window, and of its wgpu device.
fn window_options() -> eframe::NativeOptions {
    let mut setup = WgpuSetupCreateNew::without_display_handle();
    // WebGPU's minimum suffices. Subgroups make reductions faster.
    setup.device_descriptor = Arc::new(|adapter| wgpu::DeviceDescriptor {
        label: Some("window"),
        required_features: adapter.features() & wgpu::Features::SUBGROUP,
        ..Default::default()
    });
    eframe::NativeOptions {
        viewport: egui::ViewportBuilder::default()
            .with_inner_size(vec2(1000.0, 680.0))
            .with_min_inner_size(vec2(720.0, 620.0)),
        renderer: eframe::Renderer::Wgpu,
        wgpu_options: WgpuConfiguration { wgpu_setup: setup.into(), ..Default::default() },
        ..Default::default()
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let create = |window: &eframe::CreationContext<'_>| match app::App::new(window, options) {
        Ok(app) => Ok(Box::new(app) as Box<dyn eframe::App>),
        Err(error) => Err(error.into()),
    };
    match eframe::run_native(TITLE, window_options(), Box::new(create)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

//! Window in which a network learns the classes of points while the user draws them. `cargo xtask app` starts it.
//!
//! The network trains on the window's own wgpu device, and a shader reads its output where it is. `network` has the
//! model, `training` enqueues steps between frames, `boundary` draws the output, and `app` and `panel` are the window.
//! `offscreen` runs the same application without a window, and measures its frames.

mod app;
mod boundary;
mod network;
mod offscreen;
mod panel;
mod report;
mod training;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use eframe::egui::{self, vec2};
use eframe::egui_wgpu::{WgpuConfiguration, WgpuSetupCreateNew};

const TITLE: &str = "A boundary that learns";
/// Width and height of the window when it opens.
const WINDOW_SIZE: [u32; 2] = [1000, 680];

/// A window in which a network learns the classes of points while you draw them.
#[derive(Parser)]
struct Options {
    /// Print the state four times a second: `cargo xtask app --test` reads it.
    #[arg(long)]
    report: bool,
    /// End after this many frames.
    #[arg(long)]
    frames: Option<u64>,
    /// File for a screenshot of the last frame: PPM if its name ends in `.ppm`, else PNG.
    #[arg(long, requires = "frames")]
    screenshot: Option<PathBuf>,
    /// Open no window: draw frames into a texture, and print their times. A scripted pointer adds points.
    #[arg(long, requires = "frames")]
    offscreen: bool,
}

/// Returns the options of the window's wgpu device.
fn wgpu_options() -> WgpuConfiguration {
    let mut setup = WgpuSetupCreateNew::without_display_handle();
    // WebGPU's minimum suffices. With these features and limits, training is as fast as on a device of its own.
    setup.device_descriptor = Arc::new(forebay::wgpu_device_descriptor);
    WgpuConfiguration { wgpu_setup: setup.into(), ..Default::default() }
}

fn window_options() -> eframe::NativeOptions {
    eframe::NativeOptions {
        viewport: egui::ViewportBuilder::default()
            .with_inner_size(WINDOW_SIZE.map(|side| side as f32))
            .with_min_inner_size(vec2(720.0, 620.0)),
        renderer: eframe::Renderer::Wgpu,
        wgpu_options: wgpu_options(),
        ..Default::default()
    }
}

/// Opens the window, and returns when the user has closed it.
fn run_window(options: Options) -> Result<(), Box<dyn Error>> {
    let create = |window: &eframe::CreationContext<'_>| match app::App::new(window, options) {
        Ok(app) => Ok(Box::new(app) as Box<dyn eframe::App>),
        Err(error) => Err(error.into()),
    };
    Ok(eframe::run_native(TITLE, window_options(), Box::new(create))?)
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.frames.filter(|_| options.offscreen) {
        Some(frames) => offscreen::run(options, frames),
        None => run_window(options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

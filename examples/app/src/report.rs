//! Output for the test (`cargo xtask app --test`), and screenshots of the window.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use eframe::egui::{self, Color32, ColorImage, Rect, ViewportCommand};

use image::ImageEncoder;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};

use crate::Options;
use crate::app::Failure;
use crate::boundary::{COLORS, area_color};
use crate::training::Training;

const PERIOD: Duration = Duration::from_millis(250);

/// Prints the state, and closes the window after a number of frames.
pub(crate) struct Report {
    options: Options,
    /// Rectangle of the plane in the window.
    pub(crate) plane: Rect,
    /// Rectangle of the slider in the window.
    pub(crate) slider: Rect,
    pub(crate) budget_mib: u64,
    /// Bytes that the panel shows as reserved.
    pub(crate) reserved: u64,
    frames: u64,
    last: Option<Instant>,
}

impl Report {
    pub(crate) fn new(options: Options) -> Self {
        let (plane, slider) = (Rect::ZERO, Rect::ZERO);
        Self { options, plane, slider, budget_mib: 0, reserved: 0, frames: 0, last: None }
    }

    /// Ends a frame.
    pub(crate) fn end_frame(
        &mut self,
        window: &egui::Context,
        points: usize,
        training: &Training,
        failure: Option<&Failure>,
    ) {
        self.frames += 1;
        if self.options.report {
            window.request_repaint_after(PERIOD);
            if self.last.is_none_or(|last| last.elapsed() >= PERIOD) {
                self.last = Some(Instant::now());
                self.print(window, points, training, failure);
            }
        }
        if let Some(last) = self.options.frames {
            self.close_after(window, last);
        }
    }

    /// Prints one line of `key=value`. Rectangles are in pixels of the screen.
    fn print(&self, window: &egui::Context, points: usize, training: &Training, failure: Option<&Failure>) {
        let inner = window.input(|input| input.viewport().inner_rect).unwrap_or(Rect::ZERO);
        let scale = window.pixels_per_point();
        let format_rect = |rect: Rect| {
            let rect = rect.translate(inner.min.to_vec2()) * scale;
            format!("{:.0},{:.0},{:.0},{:.0}", rect.left(), rect.top(), rect.width(), rect.height())
        };
        let hex = |color: Color32| format!("{:02x}{:02x}{:02x}", color.r(), color.g(), color.b());
        let areas = [0, 1, 2].map(|class| hex(area_color(class))).join(",");
        println!(
            "points={points} steps={} loss={} plane={} slider={} budget={} reserved={} colors={} areas={areas} \
            failure={}",
            training.steps,
            training.losses.last().copied().unwrap_or(f64::NAN),
            format_rect(self.plane),
            format_rect(self.slider),
            self.budget_mib,
            self.reserved,
            COLORS.map(hex).join(","),
            failure.and_then(|failure| failure.text.lines().next()).unwrap_or("none"),
        );
    }

    /// Saves a screenshot of frame `last`, and closes the window.
    fn close_after(&self, window: &egui::Context, last: u64) {
        window.request_repaint();
        let Some(file) = &self.options.screenshot else {
            if self.frames >= last {
                window.send_viewport_cmd(ViewportCommand::Close);
            }
            return;
        };
        if self.frames == last {
            let (file, closing) = (file.clone(), window.clone());
            window.request_screenshot(move |picture| {
                match save(&picture, &file) {
                    Ok(()) => println!("{} was written", file.display()),
                    Err(error) => eprintln!("error: {} cannot be written: {error}", file.display()),
                }
                closing.send_viewport_cmd(ViewportCommand::Close);
            });
        }
    }
}

/// Writes a picture as PPM if the name ends in `.ppm`, else as PNG.
pub(crate) fn save(picture: &ColorImage, path: &Path) -> image::ImageResult<()> {
    let [width, height] = picture.size.map(|side| side as u32);
    let pixels =
        picture.pixels.iter().flat_map(|color| [color.r(), color.g(), color.b()]).collect::<Vec<u8>>();
    let mut file = BufWriter::new(File::create(path)?);
    if path.extension().is_some_and(|extension| extension == "ppm") {
        write!(file, "P6\n{width} {height}\n255\n")?;
        return Ok(file.write_all(&pixels)?);
    }
    let encoder = PngEncoder::new_with_quality(file, CompressionType::Best, FilterType::Adaptive);
    encoder.write_image(&pixels, width, height, image::ExtendedColorType::Rgb8)
}

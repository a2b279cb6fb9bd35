//! The window: the plane with its points, and the work of a frame.

use std::f32::consts::TAU;
use std::time::{Duration, Instant};

use eframe::egui::{self, Align2, Color32, FontId, Pos2, Rect, Sense, Stroke, StrokeKind, Ui, vec2};
use forebay::WgpuOptions;
use forebay::memory::{Config, Stats};
use forebay::prelude::*;

use crate::Options;
use crate::boundary::{BoundaryPainter, COLORS};
use crate::network::{CLASSES, Classifier, Point, create_grid};
use crate::report::Report;
use crate::training::Training;

pub(crate) const MIB: u64 = 1 << 20;
/// Distance between the points of a stroke, in the window's units.
const SPACING: f32 = 14.0;
const ERROR_COLOR: Color32 = Color32::from_rgb(240, 130, 115);
/// Pause after a failure, since a request for memory waits for the device before it fails.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Values that the user chooses.
pub(crate) struct Settings {
    /// Class of the next points.
    pub(crate) class: usize,
    /// Units of a hidden layer.
    pub(crate) width: usize,
    pub(crate) budget_mib: u64,
    pub(crate) is_training: bool,
}

/// Error of the last attempt to train.
pub(crate) struct Failure {
    pub(crate) text: String,
    retry_at: Instant,
}

impl Failure {
    fn new(error: &Error) -> Self {
        Self { text: error.to_string(), retry_at: Instant::now() + RETRY_AFTER }
    }
}

pub(crate) struct App {
    pub(crate) device: Device,
    boundary: BoundaryPainter,
    /// Positions of the grid.
    grid: Tensor,
    pub(crate) settings: Settings,
    pub(crate) points: Vec<Point>,
    points_changed: bool,
    /// Position of the last point of the stroke that is being drawn.
    stroke_end: Option<Pos2>,
    classifier: Option<Classifier>,
    pub(crate) training: Training,
    /// Scores of the classes at the positions of the grid.
    grid_scores: Option<Tensor>,
    /// Statistics after the last burst of steps, complete or failed, with the peaks within the burst.
    pub(crate) memory: Stats,
    pub(crate) failure: Option<Failure>,
    pub(crate) rates: Rates,
    report: Report,
}

impl App {
    /// Opens the window's device for tensors.
    pub(crate) fn new(window: &eframe::CreationContext<'_>, options: Options) -> Result<Self, String> {
        let Some(state) = &window.wgpu_render_state else {
            return Err("the window has no wgpu device".into());
        };
        Self::open(state, options).map_err(|error| error.to_string())
    }

    /// Opens a wgpu device of egui for tensors.
    pub(crate) fn open(state: &eframe::egui_wgpu::RenderState, options: Options) -> Result<Self> {
        let settings = Settings { class: 0, width: 64, budget_mib: 64, is_training: true };
        // Small segments, so that the pool follows a budget of some MiB closely.
        let memory = Config {
            large_segment_size: 4 * MIB,
            max_memory: Some(settings.budget_mib * MIB),
            ..Config::from_env()?
        };
        let options_of_memory = WgpuOptions { memory: Some(memory), ..Default::default() };
        let device = Device::from_wgpu_with(&state.adapter, &state.device, &state.queue, options_of_memory)?;
        Ok(Self {
            boundary: BoundaryPainter::new(state),
            grid: create_grid(&state.device, &device)?,
            settings,
            points: Example::Spirals.points(),
            points_changed: false,
            stroke_end: None,
            classifier: None,
            training: Training::new(),
            grid_scores: None,
            memory: device.memory(),
            failure: None,
            rates: Rates::new(),
            report: Report::new(options),
            device,
        })
    }

    /// Discards the network and its training.
    pub(crate) fn restart(&mut self) {
        self.classifier = None;
        self.training = Training::new();
        self.failure = None;
    }

    pub(crate) fn replace_points(&mut self, points: Vec<Point>) {
        self.points = points;
        self.points_changed = true;
        if self.points.is_empty() {
            self.restart();
            self.grid_scores = None;
        }
    }

    /// Limits the pool's memory to the budget. Memory in use stays, and idle memory returns to the device.
    pub(crate) fn apply_budget(&mut self) {
        let budget = self.settings.budget_mib * MIB;
        self.device.pool().set_limit(Some(budget));
        self.failure = self.device.pool().trim(budget).err().map(|error| Failure::new(&error.into()));
        self.memory = self.device.memory();
    }

    /// Trains, unless there is nothing to learn or the last failure is recent. An error never ends the program.
    fn train(&mut self, window: &egui::Context) {
        if !self.settings.is_training || self.points.is_empty() {
            return;
        }
        if let Some(failure) = &self.failure
            && let Some(rest) = failure.retry_at.checked_duration_since(Instant::now())
        {
            window.request_repaint_after(rest);
            return;
        }
        match self.advance(window) {
            Ok(true) => self.failure = None,
            Ok(false) => {}
            Err(error) => {
                self.failure = Some(Failure::new(&error));
                // The error names the memory of the failed burst, and so does the panel.
                self.memory = self.device.memory();
                window.request_repaint_after(RETRY_AFTER);
            }
        }
    }

    /// Enqueues the next burst and its scores on the grid if the device is ready; returns false if it is not.
    fn advance(&mut self, window: &egui::Context) -> Result<bool> {
        let classifier = match &mut self.classifier {
            Some(classifier) => classifier,
            none => none.insert(Classifier::new(self.settings.width, &self.points, &self.grid)?),
        };
        if self.points_changed {
            classifier.set_points(&self.points)?;
            self.points_changed = false;
        }
        self.device.pool().reset_peak_stats();
        if !self.training.advance(classifier, window)? {
            return Ok(false);
        }
        self.grid_scores = Some(classifier.grid_scores()?);
        self.memory = self.device.memory();
        Ok(true)
    }

    /// Trains, and shows the window's contents.
    pub(crate) fn show(&mut self, ui: &mut Ui) {
        self.train(ui.ctx());
        self.rates.count_frame(self.training.steps);
        let frame = egui::Frame::central_panel(ui.style()).inner_margin(16);
        egui::Panel::right("panel").exact_size(300.0).resizable(false).frame(frame).show(ui, |ui| {
            self.report.slider = self.show_panel(ui);
        });
        if let Some(failure) = &self.failure {
            egui::Panel::bottom("failure").frame(frame).show(ui, |ui| {
                ui.colored_label(ERROR_COLOR, &failure.text);
            });
        }
        egui::CentralPanel::default().frame(frame).show(ui, |ui| self.show_plane(ui));
        self.report.budget_mib = self.settings.budget_mib;
        self.report.reserved = self.memory.reserved();
        self.report.end_frame(ui.ctx(), self.points.len(), &self.training, self.failure.as_ref());
    }

    /// Returns the rectangle of the plane in the last frame.
    pub(crate) fn plane(&self) -> Rect {
        self.report.plane
    }

    /// Shows the plane, and adds points where the user clicks or drags.
    fn show_plane(&mut self, ui: &mut Ui) {
        let space = ui.available_rect_before_wrap();
        let plane = Rect::from_center_size(space.center(), egui::Vec2::splat(space.size().min_elem()));
        let response = ui.allocate_rect(plane, Sense::click_and_drag());
        self.draw(&response);
        let painter = ui.painter_at(plane);
        painter.rect_filled(plane, 0.0, Color32::from_gray(24));
        if let Some(scores) = &self.grid_scores {
            match self.boundary.paint(plane, scores) {
                Ok(shape) => {
                    painter.add(shape);
                }
                Err(error) => self.failure = Some(Failure::new(&error)),
            }
        }
        for point in &self.points {
            let outline = Stroke::new(1.0, Color32::from_white_alpha(200));
            painter.circle(to_window(plane, point.position), 5.0, COLORS[point.class as usize], outline);
        }
        if self.points.is_empty() {
            let font = FontId::proportional(18.0);
            painter.text(plane.center(), Align2::CENTER_CENTER, "Draw points here", font, Color32::GRAY);
        }
        painter.rect_stroke(plane, 0.0, Stroke::new(1.0, Color32::from_gray(70)), StrokeKind::Inside);
        self.report.plane = plane;
    }

    fn draw(&mut self, response: &egui::Response) {
        // A click may begin and end between two frames.
        let is_drawing = response.is_pointer_button_down_on() || response.clicked();
        let pointer = response.interact_pointer_pos().filter(|_| is_drawing);
        let Some(position) = pointer.filter(|pointer| response.rect.contains(*pointer)) else {
            self.stroke_end = None;
            return;
        };
        if self.stroke_end.is_none_or(|last| last.distance(position) >= SPACING) {
            let point = to_plane(response.rect, position);
            self.points.push(Point { position: point, class: self.settings.class as u32 });
            self.points_changed = true;
            self.stroke_end = Some(position);
        }
    }
}

impl eframe::App for App {
    fn ui(&mut self, ui: &mut Ui, _: &mut eframe::Frame) {
        self.show(ui);
    }
}

/// Returns the position in the window of a position in the plane.
pub(crate) fn to_window(plane: Rect, [x, y]: [f32; 2]) -> Pos2 {
    plane.center() + vec2(x, y) * plane.size() / 2.0
}

fn to_plane(plane: Rect, position: Pos2) -> [f32; 2] {
    let offset = (position - plane.center()) * 2.0 / plane.size();
    [offset.x, offset.y]
}

/// Points to begin with.
#[derive(Clone, Copy)]
pub(crate) enum Example {
    Spirals,
    Rings,
}

impl Example {
    pub(crate) fn points(self) -> Vec<Point> {
        const POINTS: usize = 50;
        let point = |class: usize, index: usize| {
            let part = index as f32 / POINTS as f32;
            let (radius, angle) = match self {
                Self::Spirals => (0.08 + 0.84 * part, TAU * class as f32 / CLASSES as f32 + 4.0 * part),
                Self::Rings => (0.15 + 0.32 * class as f32, TAU * part),
            };
            Point { position: [radius * angle.cos(), radius * angle.sin()], class: class as u32 }
        };
        (0..CLASSES).flat_map(|class| (0..POINTS).map(move |index| point(class, index))).collect()
    }
}

/// Frames and steps per second, measured over half a second.
pub(crate) struct Rates {
    since: Instant,
    frames: u32,
    steps: u64,
    pub(crate) frames_per_second: f64,
    pub(crate) steps_per_second: f64,
}

impl Rates {
    fn new() -> Self {
        Self { since: Instant::now(), frames: 0, steps: 0, frames_per_second: 0.0, steps_per_second: 0.0 }
    }

    /// Counts a frame, at whose beginning `steps` steps were done.
    fn count_frame(&mut self, steps: u64) {
        self.frames += 1;
        let seconds = self.since.elapsed().as_secs_f64();
        if seconds >= 0.5 {
            self.frames_per_second = f64::from(self.frames) / seconds;
            self.steps_per_second = steps.saturating_sub(self.steps) as f64 / seconds;
            (self.since, self.frames, self.steps) = (Instant::now(), 0, steps);
        }
    }
}

//! The application without a window: frames are drawn into a texture, and a scripted pointer draws points.
//!
//! The loop is that of a window: a frame begins when the application asks for it, and after the device has drawn the
//! last one. No screen limits the rate, so the times are those of the application and the device.

use std::error::Error;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use eframe::egui::{self, ColorImage, Event, Modifiers, PointerButton, Pos2, RawInput, Rect};
use eframe::egui_wgpu::{RenderState, RendererOptions, ScreenDescriptor};
use forebay::prelude::*;
use forebay::wgpu;

use crate::app::{App, Example, to_window};
use crate::network::CLASSES;
use crate::{Options, WINDOW_SIZE, report, wgpu_options};

/// Time of a frame at 60 frames per second. Without a request, the next frame begins after this time.
const REFRESH: Duration = Duration::from_nanos(1_000_000_000 / 60);
/// Frames from the beginning of a stroke to that of the next one.
const STROKE_PERIOD: u64 = 60;
/// Points of a stroke, one in a frame.
const STROKE_POINTS: u64 = 24;
/// Angle between the strokes of a class.
const STROKE_ANGLE: f32 = 0.15;

/// Draws `frames` frames, prints their times and the progress of the training, and saves the last frame on request.
pub(crate) fn run(options: Options, frames: u64) -> Result<(), Box<dyn Error>> {
    let screenshot = options.screenshot.clone();
    // Nothing closes a window, and nothing asks a window for its picture.
    let mut screen = Screen::open(Options { frames: None, screenshot: None, ..options })?;
    let mut times = Vec::new();
    let mut first_loss = None;
    for frame in 0..frames {
        let start = Instant::now();
        screen.draw_frame(frame)?;
        screen.wait_for_request();
        times.push(start.elapsed());
        if let Some(failure) = &screen.app.failure {
            return Err(failure.text.clone().into());
        }
        first_loss = first_loss.or_else(|| screen.app.training.losses.first().copied());
    }
    print_result(&mut times, &screen.app, first_loss);
    if let Some(file) = screenshot {
        report::save(&screen.read()?, &file)?;
        println!("{} was written", file.display());
    }
    Ok(())
}

/// Prints one line of `key=value`.
fn print_result(times: &mut [Duration], app: &App, first_loss: Option<f64>) {
    times.sort_unstable();
    let seconds = times.iter().sum::<Duration>().as_secs_f64();
    let ms = |rank: f64| {
        let index = (rank * times.len() as f64) as usize;
        times.get(index.min(times.len().saturating_sub(1))).map_or(f64::NAN, |t| t.as_secs_f64() * 1e3)
    };
    println!(
        "frames={} steps={} points={} median_ms={:.2} p99_ms={:.2} longest_ms={:.2} late={} frames_s={:.1} \
         steps_s={:.1} first_loss={:.4} last_loss={:.4}",
        times.len(),
        app.training.steps,
        app.points.len(),
        ms(0.5),
        ms(0.99),
        ms(1.0),
        times.iter().filter(|time| **time > REFRESH).count(),
        times.len() as f64 / seconds,
        app.training.steps as f64 / seconds,
        first_loss.unwrap_or(f64::NAN),
        app.training.losses.last().copied().unwrap_or(f64::NAN),
    );
}

/// Texture in place of a window, with the application that draws into it.
struct Screen {
    app: App,
    context: egui::Context,
    state: RenderState,
    target: wgpu::Texture,
    /// Requests of the application for a frame.
    requests: Receiver<()>,
    opened: Instant,
}

impl Screen {
    /// Opens a device like the window's, and the application on it.
    fn open(options: Options) -> Result<Self, Box<dyn Error>> {
        let config = wgpu_options();
        let instance = pollster::block_on(config.wgpu_setup.new_instance());
        let state = RenderState::create(&config, &instance, None, RendererOptions::default());
        let state = pollster::block_on(state)?;
        let [width, height] = WINDOW_SIZE;
        let target = state.device.create_texture(&wgpu::TextureDescriptor {
            label: Some("screen"),
            size: wgpu::Extent3d { width, height, depth_or_array_layers: 1 },
            mip_level_count: 1,
            sample_count: 1,
            dimension: wgpu::TextureDimension::D2,
            format: state.target_format,
            usage: wgpu::TextureUsages::RENDER_ATTACHMENT | wgpu::TextureUsages::COPY_SRC,
            view_formats: &[],
        });
        let app = App::open(&state, options)?;
        println!("{}", app.device.info());
        let context = egui::Context::default();
        let (sender, requests) = channel();
        context.set_request_repaint_callback(move |request| {
            if request.delay.is_zero() {
                let _ = sender.send(());
            }
        });
        Ok(Self { app, context, state, target, requests, opened: Instant::now() })
    }

    /// Runs the application for a frame, draws the result, and waits until the device has drawn it.
    fn draw_frame(&mut self, frame: u64) -> Result<(), wgpu::PollError> {
        // This frame serves all requests so far.
        self.requests.try_iter().for_each(drop);
        let [width, height] = WINDOW_SIZE;
        let input = RawInput {
            screen_rect: Some(Rect::from_min_size(Pos2::ZERO, egui::vec2(width as f32, height as f32))),
            time: Some(self.opened.elapsed().as_secs_f64()),
            events: move_pointer(frame, &mut self.app),
            ..Default::default()
        };
        let mut output = self.context.run_ui(input, |ui| self.app.show(ui));
        let shapes = self.context.tessellate(output.shapes, output.pixels_per_point);
        let RenderState { device, queue, renderer, .. } = &self.state;
        let view = self.target.create_view(&wgpu::TextureViewDescriptor::default());
        let screen =
            ScreenDescriptor { size_in_pixels: WINDOW_SIZE, pixels_per_point: output.pixels_per_point };
        let mut renderer = renderer.write();
        for (id, deltas) in output.textures_delta.set.drain() {
            deltas.iter().for_each(|delta| renderer.update_texture(device, queue, id, delta));
        }
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut commands = renderer.update_buffers(device, queue, &mut encoder, &shapes, &screen);
        let pass = encoder.begin_render_pass(&wgpu::RenderPassDescriptor {
            color_attachments: &[Some(wgpu::RenderPassColorAttachment {
                view: &view,
                depth_slice: None,
                resolve_target: None,
                ops: wgpu::Operations::default(),
            })],
            ..Default::default()
        });
        renderer.render(&mut pass.forget_lifetime(), &shapes, &screen);
        commands.push(encoder.finish());
        let submission = queue.submit(commands);
        for id in output.textures_delta.free.drain() {
            renderer.free_texture(&id);
        }
        device.poll(wgpu::PollType::Wait { submission_index: Some(submission), timeout: None })?;
        Ok(())
    }

    /// Waits until the application asks for the next frame, at most for the time of a frame.
    fn wait_for_request(&self) {
        let _ = self.requests.recv_timeout(REFRESH);
    }

    /// Reads the last frame.
    fn read(&self) -> forebay::error::Result<ColorImage> {
        let pixels = Tensor::from_wgpu_texture(&self.target, &self.app.device)?.to_vec::<u8>()?;
        Ok(ColorImage::from_rgba_premultiplied(WINDOW_SIZE.map(|side| side as usize), &pixels))
    }
}

/// Returns the events of the pointer in a frame. Each stroke follows the spiral of its class at another angle.
fn move_pointer(frame: u64, app: &mut App) -> Vec<Event> {
    let (stroke, step) = (frame / STROKE_PERIOD, frame % STROKE_PERIOD);
    let class = stroke as usize % CLASSES;
    // The first frame shows where the plane is.
    if !(1..=STROKE_POINTS + 1).contains(&step) {
        return Vec::new();
    }
    let spiral = Example::Spirals.points().into_iter().filter(|point| point.class == class as u32);
    let Some(point) = spiral.into_iter().nth(2 * step as usize - 2) else { return Vec::new() };
    let (sin, cos) = (STROKE_ANGLE * (1 + stroke / CLASSES as u64 % 4) as f32).sin_cos();
    let [x, y] = point.position;
    let position = to_window(app.plane(), [x * cos - y * sin, x * sin + y * cos]);
    let button = |pressed| Event::PointerButton {
        pos: position,
        button: PointerButton::Primary,
        pressed,
        modifiers: Modifiers::default(),
    };
    let mut events = vec![Event::PointerMoved(position)];
    if step == 1 {
        app.settings.class = class;
        events.push(button(true));
    } else if step > STROKE_POINTS {
        events.push(button(false));
    }
    events
}

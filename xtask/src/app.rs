//! `cargo xtask app`: opens the window of examples/app, or tests it without a window and on a virtual screen.
//!
//! The test of the window clicks with a real pointer of the X server, and reads the pixels from the server's memory.
//! The application prints its state, and where the plane and the slider are.

mod offscreen;

use crate::environment::Environment;
use crate::process;
use crate::setup::Setup;
use crate::tally::Tally;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail, ensure};
use std::cell::Cell;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const FOLDER: &str = "examples/app";
const PROGRAM: &str = "forebay-app";
const SCREEN: &str = "1000x680x24";
/// Longest time until an expected state. A software driver trains some steps in a second.
const PATIENCE: Duration = Duration::from_secs(120);
/// Part of the first loss that remains when the network has learnt.
const LEARNT: f64 = 0.5;

/// Builds the application, and runs it in the foreground on the best adapter of this machine.
pub(crate) fn run(workspace: &Workspace, setup: &Setup, args: &[String]) -> Result<bool> {
    let environment = setup.device_env();
    let mut command = Command::new(build(workspace, "release", &["--release"])?);
    environment.apply(&mut command);
    process::run_foreground(command.args(args))
}

/// Tests the application on lavapipe, without which the test is skipped. The window also needs a virtual screen.
pub(crate) fn test(workspace: &Workspace, setup: &Setup) -> Result<bool> {
    let Ok(lavapipe) = setup.ensure_lavapipe() else {
        println!("SKIPPED  the application: lavapipe is missing, see above");
        println!("0 passed, 0 failed, 2 skipped");
        return Ok(true);
    };
    let start = Instant::now();
    let program = build(workspace, "debug", &[])?;
    println!("the application was built in {:.0} s", start.elapsed().as_secs_f64());
    let folder = workspace.target_dir().join("app");
    let mut tally = Tally::default();
    let checked = offscreen::check(&program, &folder, &lavapipe.environment, |name, passed| {
        count_check(&mut tally, name, passed);
    });
    count_error(&mut tally, checked);
    match setup.ensure_xvfb() {
        Ok(xvfb) => {
            let screen = Screen::start(&folder.join("screen"), xvfb.environment)?;
            let app = RunningApp::start(&program, &screen, &lavapipe.environment)?;
            let checked = check_all(&app, &screen, &mut tally);
            count_error(&mut tally, checked);
        }
        Err(_) => {
            println!("SKIPPED  the window: Xvfb is missing, see above");
            tally += Tally { skipped: 1, ..Tally::default() };
        }
    }
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    Ok(tally.failed == 0)
}

/// Prints and counts a check.
fn count_check(tally: &mut Tally, name: &str, passed: bool) {
    println!("{}  {name}", if passed { "passed" } else { "FAILED" });
    *tally += Tally::from_bool(passed);
}

/// Prints and counts an error that ended the checks.
fn count_error(tally: &mut Tally, checked: Result<()>) {
    if let Err(error) = checked {
        println!("FAILED  {error:#}");
        *tally += Tally::from_bool(false);
    }
}

/// Builds the application, and returns the program.
fn build(workspace: &Workspace, profile: &str, args: &[&str]) -> Result<PathBuf> {
    let target = workspace.target_dir().join("app");
    let mut command = workspace.outside_build_command(FOLDER, &target)?;
    if !process::run_foreground(command.args(args))? {
        bail!("the application does not build: see above");
    }
    Ok(target.join(profile).join(PROGRAM))
}

/// Runs all checks in one run of the application.
fn check_all(app: &RunningApp, screen: &Screen, tally: &mut Tally) -> Result<()> {
    let mut check = |name: &str, passed: bool| count_check(tally, name, passed);
    let first = app.wait_for("the first steps", |state| state.steps > 0 && state.loss.is_finite())?;
    println!("step {}: loss {:.4}, {} points", first.steps, first.loss, first.points);
    let learnt = app.wait_for("a lower loss", |state| state.loss < LEARNT * first.loss);
    check("the loss falls", learnt.is_ok());

    // The click is in a corner that the network assigns to another class. Elsewhere, the area could have the expected
    // colour before the click.
    let [left, top, side, _] = first.plane;
    let offset = |part: f64| (side as f64 * part) as i32;
    let corners = [0.06, 0.94].map(|x| [0.06, 0.94].map(|y| (left + offset(x), top + offset(y)))).concat();
    let foreign = Cell::new(None);
    let is_foreign_found = || {
        let image = screen.read()?;
        let is_foreign = |point| image.pixel(point).is_some_and(|color| first.areas.nearest(color) != 0);
        foreign.set(corners.iter().copied().find(|&point| is_foreign(point)));
        Ok(foreign.get().is_some())
    };
    app.wait_until(is_foreign_found)?;
    let point = foreign.get().context("no corner of the plane shows another class")?;
    screen.xdotool(&format!("mousemove {} {} click 1", point.0, point.1))?;
    let clicked = app.wait_for("another point", |state| state.points > first.points)?;
    check("a click adds one point", clicked.points == first.points + 1);
    let point_color = first.colors.0[0];
    let is_drawn = || Ok(screen.read()?.pixel(point).is_some_and(|color| distance(color, point_color) <= 12));
    check("the point is drawn in the colour of its class", app.wait_until(is_drawn)?);
    let is_learnt = || {
        let image = screen.read()?;
        let around = [(0, 12), (0, -12), (12, 0), (-12, 0), (9, 9), (9, -9), (-9, 9), (-9, -9)];
        let colors = around.iter().filter_map(|(x, y)| image.pixel((point.0 + x, point.1 + y)));
        Ok(colors.filter(|color| first.areas.nearest(*color) == 0).count() >= around.len() / 2)
    };
    check("the area around the point takes its colour", app.wait_until(is_learnt)?);

    // The left end of the slider is the smallest budget, the right end the largest.
    let [left, top, width, height] = first.slider;
    // The button stays down until the application has seen it.
    let drag_to = |x: i32, budget: u64| {
        screen.xdotool(&format!("mousemove {x} {} mousedown 1", top + height / 2))?;
        app.wait_for("another budget", |state| state.budget == budget)?;
        screen.xdotool("mouseup 1")
    };
    drag_to(left + 3, 1)?;
    let is_full = |state: &State| state.failure.contains("out of memory");
    let full = app.wait_for("an error", is_full);
    check("a budget that is too small shows the error", full.is_ok());
    // The pool has returned its idle memory, so the panel shows less than before.
    let is_shown = app.wait_for("less memory", |state| state.reserved < clicked.reserved && is_full(state));
    check("the panel shows the memory at the error", is_shown.is_ok());
    drag_to(left + width - 3, 256)?;
    let resumed = app.wait_for("the end of the error", |state| state.failure == "none")?;
    let later = app.wait_for("more steps", |state| state.steps > resumed.steps);
    check("a larger budget ends the error, and training goes on", later.is_ok());
    if let Ok(last) = later {
        println!("step {}: loss {:.4}, {} points", last.steps, last.loss, last.points);
    }
    Ok(())
}

/// Colour as red, green and blue.
type Color = [u8; 3];

/// Colours of the classes.
#[derive(Debug, PartialEq)]
struct Palette(Vec<Color>);

impl Palette {
    /// Returns the index of the most similar colour.
    fn nearest(&self, color: Color) -> usize {
        let order = |index: &usize| distance(self.0[*index], color);
        (0..self.0.len()).min_by_key(order).unwrap_or_default()
    }
}

fn distance(a: Color, b: Color) -> u32 {
    a.iter().zip(b).map(|(a, b)| u32::from(a.abs_diff(b))).sum()
}

/// State that the application prints.
#[derive(Debug, PartialEq)]
struct State {
    points: usize,
    steps: u64,
    loss: f64,
    /// Left, top, width and height of the plane, in pixels.
    plane: [i32; 4],
    /// Left, top, width and height of the budget's slider, in pixels.
    slider: [i32; 4],
    /// Budget in MiB.
    budget: u64,
    /// Bytes that the panel shows as reserved.
    reserved: u64,
    /// Colours of the points.
    colors: Palette,
    /// Colours of the areas.
    areas: Palette,
    /// First line of the error that is shown, or `none`.
    failure: String,
}

impl State {
    /// Parses `points=1 steps=2 ... failure=a text to the end`.
    fn parse(line: &str) -> Result<Self> {
        let (words, failure) = line.split_once(" failure=").context("the line names no failure")?;
        let fields: HashMap<_, _> = words.split(' ').filter_map(|word| word.split_once('=')).collect();
        let field = |name: &str| fields.get(name).copied().with_context(|| format!("no `{name}`"));
        let rect = |name: &str| -> Result<[i32; 4]> {
            let sides = field(name)?.split(',').map(str::parse).collect::<Result<Vec<i32>, _>>()?;
            sides.try_into().ok().with_context(|| format!("`{name}` does not have four values"))
        };
        let palette = |name: &str| -> Result<Palette> {
            let parse = |color: &str| -> Result<Color> {
                let [_, red, green, blue] = u32::from_str_radix(color, 16)?.to_be_bytes();
                Ok([red, green, blue])
            };
            field(name)?.split(',').map(parse).collect::<Result<_>>().map(Palette)
        };
        Ok(Self {
            points: field("points")?.parse()?,
            steps: field("steps")?.parse()?,
            loss: field("loss")?.parse()?,
            plane: rect("plane")?,
            slider: rect("slider")?,
            budget: field("budget")?.parse()?,
            reserved: field("reserved")?.parse()?,
            colors: palette("colors")?,
            areas: palette("areas")?,
            failure: failure.to_owned(),
        })
    }
}

/// Child process that ends with its handle.
struct OwnedChild(Child);

impl Drop for OwnedChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Application on the virtual screen, with the lines that it prints.
struct RunningApp {
    lines: Receiver<String>,
    _process: OwnedChild,
}

impl RunningApp {
    fn start(program: &Path, screen: &Screen, driver: &Environment) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg("--report").stdin(Stdio::null()).stdout(Stdio::piped());
        screen.environment.clone().merge(driver.clone()).apply(&mut command);
        // Other displays of this machine, and their scale, do not count.
        command.env_remove("WAYLAND_DISPLAY").env("WINIT_X11_SCALE_FACTOR", "1");
        let mut process = OwnedChild(command.spawn().context("the application could not be started")?);
        let output = process.0.stdout.take().context("the application has no output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
        });
        Ok(Self { lines, _process: process })
    }

    /// Waits for a state.
    fn wait_for(&self, what: &str, is_there: impl Fn(&State) -> bool) -> Result<State> {
        let end = Instant::now() + PATIENCE;
        let mut last = None;
        loop {
            let Ok(line) = self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) else {
                bail!("the application does not report {what}; its last state: {last:?}");
            };
            let state = State::parse(&line).with_context(|| format!("the application printed `{line}`"))?;
            if is_there(&state) {
                return Ok(state);
            }
            last = Some(state);
        }
    }

    /// Waits until a condition of the screen holds; returns false if it does not in time.
    fn wait_until(&self, holds: impl Fn() -> Result<bool>) -> Result<bool> {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if holds()? {
                return Ok(true);
            }
            self.wait_for("its state", |_| true)?;
        }
        Ok(false)
    }
}

/// Virtual X server, which keeps its screen in a file.
struct Screen {
    /// Environment of programs on this screen.
    environment: Environment,
    file: PathBuf,
    _process: OwnedChild,
}

impl Screen {
    fn start(folder: &Path, environment: Environment) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let log = folder.join("xvfb.log");
        let mut command = Command::new("Xvfb");
        command.args(["-displayfd", "1", "-nolisten", "tcp", "-screen", "0", SCREEN, "-fbdir"]).arg(folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(std::fs::File::create(&log)?);
        environment.apply(&mut command);
        let mut process = OwnedChild(command.spawn().context("Xvfb could not be started")?);
        let mut display = String::new();
        BufReader::new(process.0.stdout.take().context("Xvfb has no output")?).read_line(&mut display)?;
        let display = display.trim();
        ensure!(!display.is_empty(), "Xvfb does not start: see {}", log.display());
        let environment = environment.set("DISPLAY", format!(":{display}"));
        Ok(Self { environment, file: folder.join("Xvfb_screen0"), _process: process })
    }

    /// Runs commands of xdotool.
    fn xdotool(&self, commands: &str) -> Result<()> {
        let mut command = Command::new("xdotool");
        self.environment.apply(&mut command);
        process::run_captured(command.args(commands.split(' '))).map(drop)
    }

    fn read(&self) -> Result<Image> {
        Image::parse(std::fs::read(&self.file)?)
    }
}

/// Screen in the format XWD, with pixels of four bytes: blue, green, red, and one unused.
struct Image {
    bytes: Vec<u8>,
    /// Offset of the first pixel.
    pixels: usize,
    bytes_per_line: usize,
    size: (usize, usize),
}

impl Image {
    /// Reads the header: words of four bytes, the most significant byte first.
    fn parse(bytes: Vec<u8>) -> Result<Self> {
        let word = |index: usize| -> Result<usize> {
            let word = bytes.get(4 * index..4 * index + 4).context("the screen's file is too short")?;
            Ok(word.iter().fold(0, |value, byte| value << 8 | usize::from(*byte)))
        };
        let (header, width, height, is_big_endian) = (word(0)?, word(4)?, word(5)?, word(7)? != 0);
        let (bits_per_pixel, bytes_per_line, colors) = (word(11)?, word(12)?, word(19)?);
        ensure!(bits_per_pixel == 32 && !is_big_endian, "the screen has pixels of {bits_per_pixel} bits");
        Ok(Self { pixels: header + 12 * colors, bytes_per_line, size: (width, height), bytes })
    }

    /// Returns a pixel of the screen, or `None` outside of it.
    fn pixel(&self, (x, y): (i32, i32)) -> Option<Color> {
        let (x, y) = (usize::try_from(x).ok()?, usize::try_from(y).ok()?);
        let at = self.pixels + y * self.bytes_per_line + 4 * x;
        let pixel = self.bytes.get(at..at + 3).filter(|_| x < self.size.0 && y < self.size.1)?;
        Some([pixel[2], pixel[1], pixel[0]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read() -> Result<()> {
        let line = "points=3 steps=20 loss=0.5 plane=1,2,3,4 slider=5,6,7,8 budget=64 reserved=4096 \
                    colors=ff0000,00ff00 areas=010203 failure=out of memory";
        let state = State::parse(line)?;
        assert_eq!((state.points, state.steps, state.loss), (3, 20, 0.5));
        assert_eq!((state.plane, state.slider), ([1, 2, 3, 4], [5, 6, 7, 8]));
        assert_eq!((state.budget, state.reserved), (64, 4096));
        assert_eq!(state.areas, Palette(vec![[1, 2, 3]]));
        assert_eq!(state.colors.nearest([10, 200, 30]), 1);
        assert_eq!(state.failure, "out of memory");
        assert!(State::parse("points=3 failure=none").is_err() && State::parse("").is_err());
        Ok(())
    }

    #[test]
    fn pixels_of_a_screen_are_read() -> Result<()> {
        let mut bytes = vec![0; 100];
        for (word, value) in [(0, 100), (4, 2), (5, 1), (11, 32), (12, 8), (19, 1)] {
            bytes[4 * word + 3] = value;
        }
        bytes.extend([0; 12]);
        bytes.extend([1, 2, 3, 0, 4, 5, 6, 0]);
        let image = Image::parse(bytes)?;
        assert_eq!([image.pixel((0, 0)), image.pixel((1, 0))], [Some([3, 2, 1]), Some([6, 5, 4])]);
        assert_eq!([image.pixel((2, 0)), image.pixel((0, 1)), image.pixel((-1, 0))], [None; 3]);
        assert!(Image::parse(vec![0; 8]).is_err());
        Ok(())
    }
}

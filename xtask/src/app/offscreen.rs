//! Test of the application without a window: what it prints, and the picture of its last frame.

use super::{Color, LEARNT, State, distance};
use crate::environment::Environment;
use crate::process;
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

/// Frames that are drawn: one stroke of the pointer, and enough steps on a software driver to learn.
const FRAMES: u64 = 60;
/// Smallest number of pixels in the colour of the points of a class, or of the area of a class.
const MIN_PIXELS: usize = 100;

/// Runs the application without a window, and checks each part of the result.
pub(super) fn check(
    program: &Path,
    folder: &Path,
    driver: &Environment,
    mut check: impl FnMut(&str, bool),
) -> Result<()> {
    let picture = folder.join("offscreen.ppm");
    let mut command = Command::new(program);
    command.args(["--offscreen", "--report", "--frames", &FRAMES.to_string(), "--screenshot"]).arg(&picture);
    driver.apply(&mut command);
    let output = process::run_captured(command.env_remove("DISPLAY").env_remove("WAYLAND_DISPLAY"))?;
    let first = output.lines().find(|line| line.starts_with("points=")).context("no state was printed")?;
    let first = State::parse(first)?;
    let line = output.lines().find(|line| line.starts_with("frames=")).context("no result was printed")?;
    println!("{line}");
    let result = Summary::parse(line)?;
    check("frames are drawn without a window", result.value("frames")? == FRAMES as f64);
    let times = [result.value("median_ms")?, result.value("p99_ms")?, result.value("longest_ms")?];
    check("the times of the frames are in order", 0.0 < times[0] && times.is_sorted());
    check("the scripted pointer adds points", result.value("points")? > first.points as f64);
    let losses = [result.value("first_loss")?, result.value("last_loss")?];
    check("the loss falls without a window", losses[1] < LEARNT * losses[0]);
    let pixels = read_ppm(&std::fs::read(&picture)?)?;
    let count = |color: &Color| pixels.iter().filter(|pixel| distance(**pixel, *color) <= 12).count();
    let counts = first.colors.0.iter().chain(&first.areas.0).map(count).collect::<Vec<_>>();
    println!("pixels in the colours of points and areas: {counts:?}");
    check("the picture has the colours of the classes", counts.iter().all(|&count| count >= MIN_PIXELS));
    Ok(())
}

/// Result of a run, as `key=value`.
struct Summary(HashMap<String, f64>);

impl Summary {
    fn parse(line: &str) -> Result<Self> {
        let parse = |word: &str| -> Result<(String, f64)> {
            let (key, value) =
                word.split_once('=').with_context(|| format!("`{word}` is not `key=value`"))?;
            Ok((key.to_owned(), value.parse().with_context(|| format!("`{word}` has no number"))?))
        };
        line.split(' ').map(parse).collect::<Result<_>>().map(Self)
    }

    fn value(&self, key: &str) -> Result<f64> {
        self.0.get(key).copied().with_context(|| format!("the result has no `{key}`"))
    }
}

/// Reads the pixels of a picture in the format PPM, with the header that the application writes.
fn read_ppm(bytes: &[u8]) -> Result<Vec<Color>> {
    let mut parts = bytes.splitn(4, |byte| *byte == b'\n');
    let mut line = || std::str::from_utf8(parts.next().unwrap_or_default()).context("the header is no text");
    let (magic, size, depth) = (line()?, line()?, line()?);
    ensure!(magic == "P6" && depth == "255", "the picture begins with {magic} and has the depth {depth}");
    let (width, height) = size.split_once(' ').context("the picture has no size")?;
    let pixels = width.parse::<usize>()? * height.parse::<usize>()?;
    let data = parts.next().unwrap_or_default();
    ensure!(data.len() == 3 * pixels, "the picture has {} bytes for {pixels} pixels", data.len());
    Ok(data.chunks_exact(3).map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_are_read() -> Result<()> {
        assert_eq!(read_ppm(b"P6\n2 1\n255\n\x01\n\x03abc")?, [[1, b'\n', 3], *b"abc"]);
        for wrong in [&b"P6\n2 1\n255\nabc"[..], b"P5\n1 1\n255\nabc", b"P6\n1\n255\nabc", b""] {
            assert!(read_ppm(wrong).is_err(), "{wrong:?}");
        }
        Ok(())
    }

    #[test]
    fn summaries_are_read() -> Result<()> {
        let summary = Summary::parse("frames=3 median_ms=1.25 last_loss=NaN")?;
        assert_eq!((summary.value("frames")?, summary.value("median_ms")?), (3.0, 1.25));
        assert!(summary.value("last_loss")?.is_nan() && summary.value("steps").is_err());
        assert!(Summary::parse("frames").is_err() && Summary::parse("frames=many").is_err());
        Ok(())
    }
}

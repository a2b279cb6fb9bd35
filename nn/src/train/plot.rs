//! Plots of a run's metrics.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::History;
use crate::io::write_bytes;
use crate::{Error, Result};

const SIZE: (u32, u32) = (960, 640);
/// Maximum number of points in a line; more than the image's pixels add no information.
const MAX_POINTS: usize = 2000;
const FAINT: RGBColor = RGBColor(0xb8, 0xcf, 0xe6);
const STRONG: RGBColor = RGBColor(0x1f, 0x5f, 0xa8);
const ACCENT: RGBColor = RGBColor(0xc4, 0x5a, 0x1c);

type Points = Vec<(f64, f64)>;
type ChartLines<'a> = [(&'a str, RGBColor, Points)];
type PlotResult<T = ()> = Result<T, Box<dyn std::error::Error>>;

impl History {
    /// Draws the loss and the memory over the steps, as an SVG.
    pub fn write_svg(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let svg = self.render_svg().map_err(|e| Error::file(path, format!("cannot be drawn: {e}")))?;
        write_bytes(path, svg)
    }

    fn render_svg(&self) -> PlotResult<String> {
        let mut svg = String::new();
        {
            let all = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            all.fill(&WHITE)?;
            let (upper, lower) = all.split_vertically(SIZE.1 * 3 / 5);
            let losses: Points =
                self.losses.iter().enumerate().map(|(i, &l)| ((i + 1) as f64, l.into())).collect();
            let smooth = smooth_losses(&losses);
            draw_chart(&upper, "loss", &[("each step", FAINT, losses), ("smoothed", STRONG, smooth)])?;
            let line = |of: fn(&super::MemoryPoint) -> u64| -> Points {
                self.memory.iter().map(|m| (m.step as f64, of(m) as f64 / f64::from(1 << 20))).collect()
            };
            let memory = [
                ("reserved", FAINT, line(|m| m.reserved)),
                ("peak", ACCENT, line(|m| m.peak)),
                ("allocated", STRONG, line(|m| m.allocated)),
            ];
            draw_chart(&lower, "memory (MiB)", &memory)?;
            all.present()?;
        }
        Ok(svg)
    }
}

/// Returns the exponential moving average over about fifty steps, with bias correction.
fn smooth_losses(points: &[(f64, f64)]) -> Points {
    const KEEP: f64 = 0.96;
    let (mut sum, mut weight) = (0.0, 0.0);
    let finite = points.iter().filter(|p| p.1.is_finite());
    finite
        .map(|&(x, y)| {
            sum = KEEP * sum + (1.0 - KEEP) * y;
            weight = KEEP * weight + (1.0 - KEEP);
            (x, sum / weight)
        })
        .collect()
}

fn draw_chart(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, lines: &ChartLines<'_>) -> PlotResult {
    let points = || lines.iter().flat_map(|(_, _, points)| points).filter(|p| p.1.is_finite());
    let last = points().map(|p| p.0).fold(1.0, f64::max);
    let top = points().map(|p| p.1).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(title, ("sans-serif", 18))
        .x_label_area_size(28)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..last, 0.0..if top > 0.0 { 1.05 * top } else { 1.0 })?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("step")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .draw()?;
    for (name, color, points) in lines {
        let every = points.len().div_ceil(MAX_POINTS).max(1);
        let shown = points.iter().copied().filter(|p| p.1.is_finite()).step_by(every);
        let color = *color;
        chart
            .draw_series(LineSeries::new(shown, color.stroke_width(2)))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(FAINT).draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::MemoryPoint;

    #[test]
    fn curves_of_any_values_are_drawn() -> PlotResult {
        let memory = |step| MemoryPoint { step, allocated: 1 << 20, reserved: 4 << 20, peak: 3 << 20 };
        let histories = [
            History::default(),
            History { losses: vec![2.0], memory: vec![memory(0)], ..History::default() },
            History { losses: vec![f32::NAN, f32::INFINITY, 0.0], ..History::default() },
            History {
                losses: vec![1.0; 10_000],
                memory: (0..99).map(memory).collect(),
                ..History::default()
            },
        ];
        for history in histories {
            let svg = history.render_svg()?;
            assert!(svg.starts_with("<svg") && svg.contains("memory (MiB)") && !svg.contains("NaN"), "{svg}");
            assert!(svg.len() < 200_000, "{}", svg.len());
        }
        Ok(())
    }
}

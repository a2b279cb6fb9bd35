//! The memory of a snapshot over its events, by tag, as an SVG: the upper drawing of the viewer's page.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;
use forebay::io::write_bytes as write_file;
use forebay::memory::{Bytes, Snapshot, Tag, TimelinePoint};

/// Size of the image and margins of the plot, in pixels: left, right, top, bottom.
const SIZE: (usize, usize) = (960, 400);
const MARGINS: (usize, usize, usize, usize) = (84, 160, 16, 40);
/// Colours of the page's light scheme, in the order of [`Tag::ALL`].
const COLORS: [&str; Tag::COUNT] =
    ["#4269d0", "#efb118", "#ff725c", "#3fa796", "#7cb342", "#e377b8", "#9c6b4e", "#9498a0"];

pub(super) fn write_svg(snapshot: &Snapshot, path: &Path) -> Result<()> {
    Ok(write_file(path, render_svg(&snapshot.timeline())?)?)
}

fn render_svg(timeline: &[TimelinePoint]) -> Result<String> {
    let (left, right, above, below) = MARGINS;
    let (width, height) = (SIZE.0 - left - right, SIZE.1 - above - below);
    let (end, bottom) = (left + width, above + height);
    // At most one point for each pixel: the one of the most memory.
    let points: Vec<&TimelinePoint> = timeline
        .chunks(timeline.len().div_ceil(width).max(1))
        .filter_map(|chunk| chunk.iter().max_by_key(|point| point.allocated()))
        .collect();
    let top = timeline.iter().map(TimelinePoint::allocated).max().unwrap_or(0).max(1);
    let x = |index: usize| left as f64 + width as f64 * index as f64 / points.len().max(1) as f64;
    let y = |bytes: u64| bottom as f64 - height as f64 * bytes as f64 / top as f64;

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
        SIZE.0, SIZE.1
    );
    let step = (top / 8).next_power_of_two();
    for bytes in (0..=top / step).map(|line| line * step) {
        let (at, label) = (y(bytes), Bytes(bytes));
        writeln!(svg, "<path d=\"M{left} {at:.1}H{end}\" stroke=\"#d8dbe0\"/>")?;
        writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", left - 8, at + 4.0)?;
    }
    let mut floors = vec![0; points.len()];
    let mut shown = 0;
    for (tag, color) in Tag::ALL.into_iter().zip(COLORS) {
        let tops: Vec<u64> = floors.iter().zip(&points).map(|(f, p)| f + p.by_tag[tag as usize]).collect();
        if tops != floors {
            let mut area = format!("M{left} {bottom}");
            let mut index = 0;
            for equal in tops.chunk_by(|a, b| a == b) {
                index += equal.len();
                write!(area, "V{:.1}H{:.1}", y(equal[0]), x(index))?;
            }
            for equal in floors.chunk_by(|a, b| a == b).rev() {
                index -= equal.len();
                write!(area, "V{:.1}H{:.1}", y(equal[0]), x(index))?;
            }
            writeln!(svg, "<path d=\"{area}Z\" fill=\"{color}\"/>")?;
            let row = above + 20 * shown;
            let (swatch, label) = (end + 16, end + 34);
            writeln!(svg, "<rect x=\"{swatch}\" y=\"{row}\" width=\"12\" height=\"12\" fill=\"{color}\"/>")?;
            writeln!(svg, "<text x=\"{label}\" y=\"{}\">{}</text>", row + 11, tag.name().replace('_', " "))?;
            shown += 1;
        }
        floors = tops;
    }
    let (middle, line) = (left + width / 2, SIZE.1 - 12);
    let events = timeline.len();
    writeln!(svg, "<text x=\"{middle}\" y=\"{line}\" text-anchor=\"middle\">{events} events</text>\n</svg>")?;
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timelines_of_any_length_are_drawn() -> Result<()> {
        for events in [0, 1, 100_000] {
            let point =
                |event| TimelinePoint { event, by_tag: [event as u64; Tag::COUNT], ..Default::default() };
            let svg = render_svg(&(0..events).map(point).collect::<Vec<_>>())?;
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
            assert!(svg.len() < 300_000, "{}", svg.len());
            assert_eq!(svg.contains("optimizer state"), events > 1);
        }
        Ok(())
    }
}

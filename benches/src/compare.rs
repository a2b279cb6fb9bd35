//! Two sets of lines side by side.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

/// The figure of a line: its field, and whether more is better.
const FIGURES: [(&str, bool); 6] = [
    ("tflops", true),
    ("gbps", true),
    ("steps_s", true),
    ("ns_per_op", false),
    ("median_ms", false),
    ("first_ms", false),
];

fn lines(path: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    Ok(text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect())
}

fn word<'a>(line: &'a Value, field: &str) -> &'a str {
    line.get(field).and_then(Value::as_str).unwrap_or("")
}

fn figure(line: &Value) -> Option<(&'static str, bool, f64)> {
    FIGURES.iter().find_map(|&(name, up)| Some((name, up, line.get(name)?.as_f64()?)))
}

/// Prints `| work | shape | type | backend | ours | peer (variant) | ratio |`; a ratio above 1 means ours is better.
pub(crate) fn table(ours: &[PathBuf], peer: &Path) -> Result<()> {
    let mut peers: BTreeMap<(String, String, String), Vec<Value>> = BTreeMap::new();
    for line in lines(peer)? {
        let key = (word(&line, "bench").into(), word(&line, "shape").into(), word(&line, "dtype").into());
        peers.entry(key).or_default().push(line);
    }
    println!("| work | shape | type | backend | forebay | peer | ratio |\n|---|---|---|---|---|---|---|");
    for path in ours {
        for line in lines(path)? {
            let Some((name, up, value)) = figure(&line) else { continue };
            let (bench, shape, dtype) = (word(&line, "bench"), word(&line, "shape"), word(&line, "dtype"));
            let found = peers.get(&(bench.into(), shape.into(), dtype.into()));
            let cells: Vec<(String, f64)> = found
                .into_iter()
                .flatten()
                .filter_map(|p| Some((word(p, "variant").to_owned(), p.get(name)?.as_f64()?)))
                .collect();
            let peer: Vec<String> =
                cells.iter().map(|(v, x)| format!("{x:.1} {v}").trim().to_owned()).collect();
            let ratio: Vec<String> =
                cells.iter().map(|(_, x)| format!("{:.2}", if up { value / x } else { x / value })).collect();
            println!(
                "| {bench} | {shape} | {dtype} | {} | {value:.1} {name} | {} | {} |",
                word(&line, "backend"),
                peer.join(", "),
                ratio.join(", ")
            );
        }
    }
    Ok(())
}

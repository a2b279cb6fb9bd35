//! Comparison of two sets of benchmark lines.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::timing::median;

/// Metric of a line: its field, and whether higher is better.
const METRICS: [(&str, bool); 6] = [
    ("tflops", true),
    ("gbps", true),
    ("steps_s", true),
    ("ns_per_op", false),
    ("median_ms", false),
    ("first_ms", false),
];

fn read_lines(path: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    Ok(text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect())
}

fn str_field<'a>(line: &'a Value, field: &str) -> &'a str {
    line.get(field).and_then(Value::as_str).unwrap_or("")
}

fn metric(line: &Value) -> Option<(&'static str, bool, f64)> {
    METRICS.iter().find_map(|&(name, up)| Some((name, up, line.get(name)?.as_f64()?)))
}

/// Returns the key of a measurement: benchmark, shape, type.
fn bench_key(line: &Value) -> [String; 3] {
    ["bench", "shape", "dtype"].map(|field| str_field(line, field).to_owned())
}

fn group_by_key(lines: impl IntoIterator<Item = Value>) -> BTreeMap<[String; 3], Vec<Value>> {
    let mut map = BTreeMap::<_, Vec<Value>>::new();
    for line in lines {
        map.entry(bench_key(&line)).or_default().push(line);
    }
    map
}

/// Merges the lines of equal work, as of several rounds: the metric of the result is their median. Lines keep the order
/// of their first ones.
fn merge_rounds(lines: Vec<Value>) -> Vec<Value> {
    let key = |line: &Value| {
        (bench_key(line), ["backend", "variant"].map(|field| str_field(line, field).to_owned()))
    };
    let mut merged = Vec::<(_, Vec<Value>)>::new();
    for line in lines {
        let key = key(&line);
        match merged.iter_mut().find(|(known, _)| *known == key) {
            Some((_, rounds)) => rounds.push(line),
            None => merged.push((key, vec![line])),
        }
    }
    let merge = |(_, rounds): (_, Vec<Value>)| {
        let mut line = rounds[0].clone();
        if let Some((name, ..)) = metric(&line) {
            let values = rounds.iter().filter_map(|round| round.get(name)?.as_f64());
            line[name] = median(values.collect()).into();
        }
        line
    };
    merged.into_iter().map(merge).collect()
}

/// Returns the backend with which our lines of a backend are compared.
fn reference_backend(backend: &str) -> Option<&'static str> {
    match backend {
        "cuda" => None,
        "wgpu-shared" => Some("wgpu"),
        _ => Some("cuda"),
    }
}

/// Formats a row for each of our lines. The row compares the line with the peer's lines of the same work, and with our
/// line of the same variant on the reference backend. A ratio above 1 means that our line is better.
fn format_rows(ours: &[Value], peers: Vec<Value>) -> Vec<String> {
    let peers = group_by_key(peers);
    let own = group_by_key(ours.iter().cloned());
    let row = |line: &Value| {
        let (name, up, value) = metric(line)?;
        let ratio = |other: f64| format!("{:.3}", if up { value / other } else { other / value });
        let other = |line: &Value| line.get(name).and_then(Value::as_f64);
        let cells: Vec<(&str, f64)> = peers
            .get(&bench_key(line))
            .into_iter()
            .flatten()
            .filter_map(|p| Some((str_field(p, "variant"), other(p)?)))
            .collect();
        let peer: Vec<String> = cells.iter().map(|(v, x)| format!("{x:.1} {v}").trim().to_owned()).collect();
        let ratios: Vec<String> = cells.iter().map(|(_, x)| ratio(*x)).collect();
        let reference = reference_backend(str_field(line, "backend"));
        let is_reference = |found: &&Value| {
            Some(str_field(found, "backend")) == reference
                && str_field(found, "variant") == str_field(line, "variant")
        };
        let to_reference = own.get(&bench_key(line)).into_iter().flatten().find(is_reference);
        let to_reference = to_reference.and_then(other).map(ratio);
        let [bench, shape, dtype] = bench_key(line);
        let kind = match str_field(line, "variant") {
            "" => dtype,
            variant => variant.to_owned(),
        };
        Some(format!(
            "| {bench} | {shape} | {kind} | {} | {value:.1} {name} | {} | {} | {} |",
            str_field(line, "backend"),
            peer.join(", "),
            ratios.join(", "),
            to_reference.unwrap_or_default()
        ))
    };
    ours.iter().filter_map(row).collect()
}

/// Prints a table that compares our lines with the peer's. It also compares lines of other backends with ours on CUDA,
/// and lines of a shared device with those of an own device.
pub(crate) fn print_table(ours: &[PathBuf], peer: Option<&Path>) -> Result<()> {
    let ours = ours.iter().map(|path| read_lines(path)).collect::<Result<Vec<_>>>()?.concat();
    let ours = merge_rounds(ours);
    println!(
        "| work | shape | type | backend | forebay | peer | ratio | to CUDA or own device |\n|---|---|---|---|---|---|---|---|"
    );
    let peers = peer.map(read_lines).transpose()?.unwrap_or_default();
    format_rows(&ours, peers).iter().for_each(|row| println!("{row}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rounds_become_their_median() {
        let line = |backend: &str, ms: f64| json!({ "bench": "mlp", "backend": backend, "median_ms": ms });
        let lines = [("wgpu", 3.0), ("wgpu-shared", 2.0), ("wgpu", 1.0), ("wgpu-shared", 4.0), ("wgpu", 2.0)];
        let merged = merge_rounds(lines.map(|(backend, ms)| line(backend, ms)).to_vec());
        assert_eq!(merged, [line("wgpu", 2.0), line("wgpu-shared", 4.0)]);
    }

    #[test]
    fn results_are_matched_with_their_peers() {
        let line = |backend: &str, variant: &str, ms: f64| json!({ "bench": "gpt", "shape": "8x1024", "dtype": "bf16", "backend": backend, "variant": variant, "median_ms": ms });
        let ours = [
            line("cuda", "bf16", 10.0),
            line("cuda", "bf16_captured", 8.0),
            line("wgpu", "bf16_captured", 80.0),
            line("wgpu-shared", "bf16_captured", 100.0),
        ];
        let rows = format_rows(&ours, vec![line("cuda", "bf16", 30.0), line("cuda", "bf16_compile", 20.0)]);
        let start = "| gpt | 8x1024 | bf16";
        assert_eq!(
            rows,
            [
                format!("{start} | cuda | 10.0 median_ms | 30.0 bf16, 20.0 bf16_compile | 3.000, 2.000 |  |"),
                format!(
                    "{start}_captured | cuda | 8.0 median_ms | 30.0 bf16, 20.0 bf16_compile | 3.750, 2.500 |  |"
                ),
                format!(
                    "{start}_captured | wgpu | 80.0 median_ms | 30.0 bf16, 20.0 bf16_compile | 0.375, 0.250 | 0.100 |"
                ),
                format!(
                    "{start}_captured | wgpu-shared | 100.0 median_ms | 30.0 bf16, 20.0 bf16_compile | 0.300, 0.200 | 0.800 |"
                ),
            ]
        );
    }
}

//! `forebay memory report`: a snapshot as text.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use forebay::io::printable;
use forebay::memory::{BlockState, Bytes, SegmentInfo, Snapshot, Tag, TimelinePoint};

/// Formats the whole report; every table has at most `top` lines.
pub(super) fn format_report(snapshot: &Snapshot, top: usize) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_report(&mut text, snapshot, top);
    text
}

fn write_report(out: &mut String, snapshot: &Snapshot, top: usize) -> fmt::Result {
    let peak = snapshot.peak();
    write_totals(out, snapshot, peak)?;
    write_tags(out, snapshot, peak)?;
    write_modules(out, snapshot, peak, top)?;
    write_holders(out, snapshot, peak, top)?;
    write_segments(out, snapshot, top)
}

/// Writes the sums of the pool, its settings, and the moment of the peak.
fn write_totals(out: &mut String, snapshot: &Snapshot, peak: Option<TimelinePoint>) -> fmt::Result {
    let stat = |key: &str| Bytes(snapshot.stats.get(key).copied().unwrap_or(0));
    let device = if snapshot.device.is_empty() { "a pool".into() } else { printable(&snapshot.device) };
    writeln!(
        out,
        "memory of {device}: {} allocated, {} pending, {} reserved; peak {} allocated, {} reserved",
        stat("allocated_bytes.all.current"),
        stat("pending_bytes"),
        stat("reserved_bytes.all.current"),
        stat("allocated_bytes.all.peak"),
        stat("reserved_bytes.all.peak"),
    )?;
    writeln!(out, "settings: {}", printable(&snapshot.config))?;
    match peak {
        None => writeln!(out, "nothing was recorded: call sites and earlier usage are unknown"),
        Some(peak) => {
            let (kept, dropped) = (snapshot.events.len(), snapshot.dropped_events);
            write!(out, "recorded: {kept} events")?;
            if dropped > 0 {
                write!(out, " ({dropped} older events were dropped)")?;
            }
            write!(out, "; the peak was after event {}: {}", peak.event + 1, Bytes(peak.allocated()))?;
            let at_peak = snapshot.events.get(peak.event).and_then(|e| snapshot.holder(e.holder));
            writeln!(out, "{}", at_peak.map_or(String::new(), |holder| format!(", by {holder}")))
        }
    }
}

fn write_tags(out: &mut String, snapshot: &Snapshot, peak: Option<TimelinePoint>) -> fmt::Result {
    writeln!(out, "\n{:<44} {:>12} {:>12}", "by tag", "now", "at the peak")?;
    let now =
        sum_by_key(snapshot.totals_by_holder().into_iter().map(|(holder, held)| (holder.tag, held.bytes)));
    for tag in Tag::ALL {
        let now = now.get(&tag).copied().unwrap_or(0);
        write_row(out, tag.name(), now, peak.map(|p| p.by_tag[tag as usize]))?;
    }
    Ok(())
}

fn write_modules(
    out: &mut String,
    snapshot: &Snapshot,
    peak: Option<TimelinePoint>,
    top: usize,
) -> fmt::Result {
    writeln!(out, "\nby module")?;
    let module = |m: &str| if m.is_empty() { "no module".to_owned() } else { m.to_owned() };
    let now = sum_by_key(
        snapshot.totals_by_holder().into_iter().map(|(holder, held)| (module(&holder.module), held.bytes)),
    );
    let then = peak.map(|p| {
        sum_by_key(
            snapshot.holders_at(p.event).into_iter().map(|(holder, bytes)| (module(&holder.module), bytes)),
        )
    });
    let bytes = |of: &BTreeMap<String, u64>, name: &str| of.get(name).copied().unwrap_or(0);
    let larger = |name: &str| bytes(&now, name).max(then.as_ref().map_or(0, |then| bytes(then, name)));
    let mut names: Vec<&String> = now.keys().chain(then.iter().flat_map(BTreeMap::keys)).collect();
    names.sort_by_key(|name| (std::cmp::Reverse(larger(name)), *name));
    names.dedup();
    for name in names.iter().take(top) {
        write_row(out, name, bytes(&now, name), then.as_ref().map(|then| bytes(then, name)))?;
    }
    write_omitted_count(out, names.len(), top)
}

fn sum_by_key<K: Ord>(parts: impl Iterator<Item = (K, u64)>) -> BTreeMap<K, u64> {
    let mut sums = BTreeMap::new();
    for (key, bytes) in parts {
        *sums.entry(key).or_default() += bytes;
    }
    sums
}

fn write_row(out: &mut String, name: &str, now: u64, then: Option<u64>) -> fmt::Result {
    if now == 0 && then.unwrap_or(0) == 0 {
        return Ok(());
    }
    write!(out, "{:<44} {:>12}", printable(name), Bytes(now).to_string())?;
    match then {
        Some(then) => writeln!(out, " {:>12}", Bytes(then).to_string()),
        None => writeln!(out),
    }
}

/// Writes the number of rows that a table leaves out.
fn write_omitted_count(out: &mut String, all: usize, top: usize) -> fmt::Result {
    if all > top { writeln!(out, "({} more: --top)", all - top) } else { Ok(()) }
}

fn write_holders(
    out: &mut String,
    snapshot: &Snapshot,
    peak: Option<TimelinePoint>,
    top: usize,
) -> fmt::Result {
    let held = snapshot.totals_by_holder();
    writeln!(out, "\ntop holders now")?;
    for (holder, held) in held.iter().take(top) {
        writeln!(out, "{:>12} {:>6} blocks  {holder}", Bytes(held.bytes).to_string(), held.blocks)?;
    }
    write_omitted_count(out, held.len(), top)?;
    let Some(peak) = peak else { return Ok(()) };
    let held = snapshot.holders_at(peak.event);
    writeln!(out, "\ntop holders at the peak")?;
    for (holder, bytes) in held.iter().take(top) {
        writeln!(out, "{:>12}  {holder}", Bytes(*bytes).to_string())?;
    }
    write_omitted_count(out, held.len(), top)
}

/// Returns the free bytes of a segment, and the largest free piece.
fn free_bytes(segment: &SegmentInfo) -> (u64, u64) {
    let pieces = segment.blocks.iter().filter(|b| b.state == BlockState::Inactive).map(|b| b.size);
    pieces.fold((0, 0), |(sum, largest), size| (sum + size, largest.max(size)))
}

fn write_segments(out: &mut String, snapshot: &Snapshot, top: usize) -> fmt::Result {
    let (sum, largest) = snapshot
        .segments
        .iter()
        .map(free_bytes)
        .fold((0, 0), |(sum, most), (free, largest)| (sum + free, most.max(largest)));
    let fragmentation = if sum == 0 { 0.0 } else { 100.0 * (1.0 - largest as f64 / sum as f64) };
    writeln!(
        out,
        "\nfree: {}, of them {} in one piece (fragmentation {fragmentation:.0} %)",
        Bytes(sum),
        Bytes(largest)
    )?;
    writeln!(
        out,
        "\n{:<18} {:>12} {:>12} {:>12} {:>13} {:>7}  kind",
        "segments", "bytes", "allocated", "free", "largest free", "blocks"
    )?;
    let mut segments: Vec<&SegmentInfo> = snapshot.segments.iter().collect();
    segments.sort_by_key(|s| (std::cmp::Reverse(s.total_size), s.address));
    for segment in segments.iter().take(top) {
        let (sum, largest) = free_bytes(segment);
        let kind = if segment.small { "small" } else { "large" };
        let mapped = if segment.is_expandable { ", mapped" } else { "" };
        let sizes = [segment.total_size, segment.allocated_size, sum].map(|n| Bytes(n).to_string());
        let [total, allocated, sum] = sizes;
        writeln!(
            out,
            "{:<#18x} {total:>12} {allocated:>12} {sum:>12} {:>13} {:>7}  {kind}{mapped}",
            segment.address,
            Bytes(largest).to_string(),
            segment.blocks.len()
        )?;
    }
    write_omitted_count(out, segments.len(), top)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use anyhow::Result;
    use forebay::backend::SourceLimits;
    use forebay::backend::null::{CardProfile, NullBackend};
    use forebay::memory::{Config, Pool, Request, scope};

    use super::*;

    #[test]
    fn a_report_lists_holders_now_and_at_the_peak() -> Result<()> {
        const MIB: u64 = 1 << 20;
        let source_limits = SourceLimits { alignment: 256, max_segment: 1 << 30, virtual_memory: None };
        let card = CardProfile { total_bytes: 1 << 30, source_limits, ..CardProfile::default() };
        let pool = Pool::new(Arc::new(NullBackend::new(card)), Config::default()).with_device_name("fake:0");
        pool.start_recording(100);
        let _net = scope::enter_module("net");
        let _weight = pool.alloc(Request::new(40 * MIB).tag(Tag::Parameter))?;
        let _layer = scope::enter_module("fc1");
        let value = pool.alloc(Request::new(60 * MIB).tag(Tag::Activation).op("relu"))?;
        pool.free(value);
        let report = format_report(&pool.snapshot(), 10);
        let has = |line: &str| assert!(report.contains(line), "{line}\n{report}");
        has(
            "memory of fake:0: 40.0 MiB allocated, 0 B pending, 100.0 MiB reserved; peak 100.0 MiB allocated",
        );
        has("recorded: 5 events; the peak was after event 4: 100.0 MiB, by activation of net.fc1, in relu (");
        has("parameter                                        40.0 MiB     40.0 MiB");
        has("activation                                            0 B     60.0 MiB");
        has("net.fc1                                               0 B     60.0 MiB");
        has("    60.0 MiB  activation of net.fc1, in relu (");
        has("free: 60.0 MiB, of them 60.0 MiB in one piece (fragmentation 0 %)");
        has("     60.0 MiB          0 B     60.0 MiB      60.0 MiB       1  large");

        pool.stop_recording();
        let report = format_report(&pool.snapshot(), 1);
        assert!(report.contains("nothing was recorded"), "{report}");
        assert!(report.contains("(1 more: --top)"), "{report}");
        Ok(())
    }
}

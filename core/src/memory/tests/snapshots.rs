//! Snapshots, their events, and their uses.

use std::process::Command;
use std::sync::Arc;

use super::super::source::SegmentSource;
use super::super::{Action, BlockState, Config, Pool, RecordingOptions, Request, Snapshot, Tag, scope};
use super::fake_source::FakeSource;
use crate::memory::error::{Error, Result};

const MIB: u64 = 1 << 20;

fn pool(source: FakeSource, settings: &str) -> Result<(Pool, Arc<FakeSource>)> {
    let source = Arc::new(source);
    Ok((Pool::new(source.clone(), Config::parse(settings)?).with_device_name("fake:0"), source))
}

/// Returns a snapshot with events of every kind.
fn snapshot_of_every_event() -> Result<Snapshot> {
    let (pool, source) = pool(FakeSource::paged(100 * MIB), "")?;
    let early = pool.alloc(Request::new(3000).tag(Tag::Parameter))?;
    pool.start_recording(1000);
    source.set_manual_fences();
    let _module = scope::enter_module("net");
    let weight = pool.alloc(Request::new(1000).tag(Tag::Parameter))?;
    let large = pool.alloc(Request::new(40 * MIB).tag(Tag::Activation).op("matmul"))?;
    pool.free(large);
    let waits = pool.alloc(Request::new(30 * MIB).op("relu"))?;
    pool.free_after(waits, source.record_fence()?);
    assert!(pool.alloc(Request::new(200 * MIB).op("too_much")).is_err_and(|e| e.is_out_of_memory()));
    pool.free(early);
    let last = pool.alloc(Request::new(2000).tag(Tag::Gradient))?;
    pool.empty_cache()?;
    let snapshot = pool.snapshot();
    pool.free(weight);
    pool.free(last);
    Ok(snapshot)
}

#[test]
fn blocks_and_their_holders() -> Result<()> {
    let (pool, source) = pool(FakeSource::plain(100 * MIB), "")?;
    source.set_manual_fences();
    let _module = scope::enter_module("net");
    let (a, _b) = (pool.alloc(Request::new(1000).op("relu"))?, pool.alloc(Request::new(2000))?);
    pool.free_after(a, source.record_fence()?);
    let snapshot = pool.snapshot();
    assert_eq!(snapshot.segments.len(), 1);
    let segment = &snapshot.segments[0];
    let blocks = segment.blocks.iter().map(|b| {
        (
            b.address - segment.address,
            b.size,
            b.state,
            snapshot.holder(b.holder).map_or("", |w| w.module.as_str()),
        )
    });
    let expected = [
        (0, 1024, BlockState::ActiveAwaitingFree, ""),
        (1024, 2048, BlockState::ActiveAllocated, "net"),
        (3072, 2 * MIB - 3072, BlockState::Inactive, ""),
    ];
    assert_eq!(blocks.collect::<Vec<_>>(), expected);
    assert_eq!((segment.total_size, segment.active_size, segment.requested_size), (2 * MIB, 3072, 2000));
    assert_eq!(snapshot.events, []);
    Ok(())
}

#[test]
fn every_event_is_recorded_in_order() -> Result<()> {
    let snapshot = snapshot_of_every_event()?;
    let events = snapshot.events.iter().map(|e| {
        let holder =
            snapshot.holder(e.holder).map_or("-", |w| if w.op.is_empty() { w.tag.name() } else { &w.op });
        format!("{:?} {} {holder}", e.action, e.size)
    });
    insta::assert_snapshot!(events.collect::<Vec<_>>().join("\n"), @r"
    Alloc 1024 parameter
    SegmentMap 41943040 -
    Alloc 41943040 matmul
    Free 41943040 matmul
    Alloc 31457280 relu
    FreeRequested 31457280 relu
    FreeCompleted 31457280 relu
    SegmentUnmap 10485760 -
    SegmentUnmap 31457280 -
    Oom 209715200 too_much
    Free 3072 parameter
    Alloc 2048 gradient
    ");
    // The timeline ends at the pool's current state.
    let timeline = snapshot.timeline();
    assert_eq!(timeline.last().map(|m| m.allocated()), Some(1024 + 2048));
    assert_eq!(
        timeline.last().map(|m| m.reserved),
        snapshot.stats.get("reserved_bytes.all.current").copied()
    );
    let peak = snapshot.peak().ok_or(Error::Snapshot("no peak".into()))?;
    assert_eq!(peak.allocated(), 3072 + 1024 + 40 * MIB);
    assert_eq!(snapshot.holders_at(peak.event)[0].0.op, "matmul");
    assert!(timeline.iter().all(|m| m.allocated() <= m.reserved));
    Ok(())
}

#[test]
fn a_holder_has_the_line_of_its_request() -> Result<()> {
    let (pool, _) = pool(FakeSource::plain(100 * MIB), "")?;
    pool.start_recording(RecordingOptions::new(10).with_stacks());
    let here = line!() + 1;
    let _op = scope::enter_op("outer");
    let _a = pool.alloc(Request::new(100))?;
    let snapshot = pool.snapshot();
    let (_, holder) = snapshot.live_blocks().next().ok_or(Error::Snapshot("nothing is live".into()))?;
    let frame = holder.frames.iter().find(|f| f.filename.ends_with("snapshots.rs"));
    assert!(frame.is_some_and(|f| f.line == here + 1 && f.name.contains("a_holder_has")), "{holder:#?}");

    pool.start_recording(10);
    let _b = pool.alloc(Request::new(100))?;
    let snapshot = pool.snapshot();
    let lines = snapshot.live_blocks().flat_map(|(_, w)| w.frames.first()).map(|f| (f.name.as_str(), f.line));
    assert_eq!(
        lines.collect::<Vec<_>>(),
        [("outer", here)],
        "the outermost operation's; none of the first block"
    );
    Ok(())
}

#[test]
fn the_ring_keeps_the_newest_events() -> Result<()> {
    let (pool, _) = pool(FakeSource::plain(100 * MIB), "")?;
    pool.start_recording(5);
    assert!(pool.is_recording());
    for bytes in 1..=10 {
        pool.free(pool.alloc(Request::new(bytes))?);
    }
    let snapshot = pool.snapshot();
    let kept = snapshot.events.iter().map(|e| (e.action, e.requested_size)).collect::<Vec<_>>();
    use Action::{Alloc, Free};
    assert_eq!(kept, [(Free, 8), (Alloc, 9), (Free, 9), (Alloc, 10), (Free, 10)]);
    assert_eq!(snapshot.dropped_events, 16);
    pool.stop_recording();
    assert!(!pool.is_recording());
    assert_eq!(pool.snapshot().events, []);
    Ok(())
}

#[test]
fn json_round_trips_a_snapshot() -> Result<()> {
    let snapshot = snapshot_of_every_event()?;
    let json = serde_json::to_string(&snapshot).map_err(|e| Error::Snapshot(e.to_string()))?;
    assert_eq!(Snapshot::read(json.as_bytes())?, snapshot);

    let message =
        |json: &str| Snapshot::read(json.as_bytes()).map_or_else(|e| e.to_string(), |_| String::new());
    assert!(message(&json[..json.len() / 2]).starts_with("no snapshot of memory, or a damaged one: EOF"));
    assert!(
        message(&json.replace("\"version\":1", "\"version\":9"))
            .contains("version 9; this program reads version 1")
    );
    assert!(message(&json.replacen("\"holder\":0", "\"holder\":77", 1)).contains("holder 77 is named"));
    Ok(())
}

#[test]
fn growth_is_an_error_that_names_its_holder() -> crate::error::Result<()> {
    let (pool, _) = pool(FakeSource::paged(100 * MIB), "")?;
    let _module = scope::enter_module("head");
    let mut state = None;
    pool.assert_no_growth(5, || {
        // Allocated once and kept, as an optimiser's state.
        if state.is_none() {
            state = Some(pool.alloc(Request::new(5000).tag(Tag::OptimizerState))?);
        }
        pool.free(pool.alloc(Request::new(MIB))?);
        Ok(())
    })?;
    let mut losses = Vec::new();
    let grown = pool.assert_no_growth(5, || {
        losses.push(pool.alloc(Request::new(1000).tag(Tag::Activation).op("mean"))?);
        Ok(())
    });
    let Err(crate::error::Error::MemoryGrowth(growth)) = grown else { panic!("{grown:?}") };
    assert_eq!((growth.steps, growth.diff.bytes()), (5, 5 * 1024));
    assert_eq!(growth.diff.by_tag().into_iter().collect::<Vec<_>>(), [(Tag::Activation, 5 * 1024)]);
    let text = growth.to_string();
    assert!(text.starts_with("5.0 KiB more are held after 5 steps, 1.0 KiB a step:\nactivation"), "{text}");
    assert!(text.contains("+5 blocks  activation of head, in mean ("), "{text}");
    assert!(!pool.is_recording());
    Ok(())
}

/// Loads the pickle with Python and checks the fields that PyTorch's tools read. Reports if there is no
/// Python.
#[test]
fn python_reads_the_pickle() -> Result<()> {
    const CHECK: &str = r#"
import pickle, sys
data = pickle.load(sys.stdin.buffer)
assert set(data) >= {"segments", "device_traces", "allocator_settings"}, data.keys()
for s in data["segments"]:
    assert set(s) >= {"device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream",
                      "segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"}, s.keys()
    assert sum(b["size"] for b in s["blocks"]) == s["total_size"] > 0
    assert s["segment_type"] in ("small", "large") and s["segment_pool_id"] == (0, 0)
    at = s["address"]
    for b in s["blocks"]:
        assert set(b) == {"address", "size", "requested_size", "state", "frames"}, b.keys()
        assert b["address"] == at
        assert b["state"] in ("active_allocated", "active_pending_free", "inactive"), b["state"]
        at += b["size"]
(trace,) = data["device_traces"]
for e in trace:
    assert set(e) >= {"action", "size", "stream", "time_us", "frames"}, e.keys()
    assert ("device_free" if e["action"] == "oom" else "addr") in e
    for f in e["frames"]:
        assert set(f) == {"name", "filename", "line"} and isinstance(f["line"], int)
print(" ".join(sorted({e["action"] for e in trace})))
oom = [e for e in trace if e["action"] == "oom"][0]
print(oom["size"], oom["frames"][0]["name"], [f["filename"] for f in oom["frames"][1:]])
print(sorted(b["requested_size"] for s in data["segments"] for b in s["blocks"] if b["state"] == "active_allocated"))
print(data["allocator_settings"]["expandable_segments"], data["allocator_settings"]["max_split_size"])
"#;
    let io = |e: std::io::Error| Error::Snapshot(e.to_string());
    let path = std::env::temp_dir().join(format!("forebay-{}.pickle", std::process::id()));
    snapshot_of_every_event()?.save(&path)?;
    let file = std::fs::File::open(&path).map_err(io)?;
    let python = Command::new("python3").args(["-c", CHECK]).stdin(file).output();
    std::fs::remove_file(&path).map_err(io)?;
    let Ok(output) = python else {
        println!("SKIPPED: there is no python3");
        return Ok(());
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    insta::assert_snapshot!(String::from_utf8_lossy(&output.stdout).trim_end(), @r"
    alloc free_completed free_requested oom segment_map segment_unmap
    209715200 too_much ['operation', 'module', 'tag']
    [1000, 2000]
    True -1
    ");
    Ok(())
}

//! Snapshots and traces from files: those that a pool wrote are accepted, and hostile values are errors.

use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;

use super::super::snapshot::read_bounded;
use super::super::trace::{Trace, TraceEvent};
use super::super::validation::MAX_MEMORY_BYTES;
use super::super::{Block, Config, Pool, Request, Snapshot, Tag, scope};
use super::fake_source::FakeSource;
use crate::memory::error::{Error, Result};

const MIB: u64 = 1 << 20;
/// Values that exceed any memory but parse as numbers.
const HUGE: [u64; 6] =
    [MAX_MEMORY_BYTES + 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 512, u64::MAX - 511, u64::MAX];

/// Returns the JSON of a snapshot with blocks and events of every kind.
fn snapshot() -> Result<Value> {
    let source = Arc::new(FakeSource::paged(100 * MIB));
    let pool = Pool::new(source.clone(), Config::default()).with_device_name("fake:0");
    let early = pool.alloc(Request::new(3000).tag(Tag::Parameter))?;
    pool.start_recording(1000);
    source.set_manual_fences();
    let _module = scope::enter_module("net");
    let _weight = pool.alloc(Request::new(1000).tag(Tag::Parameter))?;
    let large = pool.alloc(Request::new(40 * MIB).tag(Tag::Activation).op("matmul"))?;
    pool.free(large);
    let waits = pool.alloc(Request::new(30 * MIB).op("relu"))?;
    pool.free_after(waits, super::super::source::SegmentSource::record_fence(&*source)?);
    assert!(pool.alloc(Request::new(200 * MIB).op("too_much")).is_err_and(|e| e.is_out_of_memory()));
    pool.free(early);
    let _last = pool.alloc(Request::new(2000).tag(Tag::Gradient))?;
    pool.empty_cache()?;
    serde_json::to_value(pool.snapshot()).map_err(|e| Error::Snapshot(e.to_string()))
}

/// Collects every number's position, as a JSON pointer.
fn number_pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| number_pointers(v, &format!("{at}/{i}"), found));
        }
        Value::Object(map) => map.iter().for_each(|(k, v)| number_pointers(v, &format!("{at}/{k}"), found)),
        _ => {}
    }
}

fn read(value: &Value) -> Result<Snapshot> {
    Snapshot::read(value.to_string().as_bytes())
}

/// Checks sums over a snapshot that was read: none wraps around, or exceeds any memory.
fn check_sums(snapshot: &Snapshot) {
    let live: u128 = snapshot.live_blocks().map(|(b, _)| u128::from(b.size)).sum();
    let held: u128 = snapshot.totals_by_holder().iter().map(|(_, held)| u128::from(held.bytes)).sum();
    assert_eq!(live, held);
    assert!(live <= MAX_MEMORY_BYTES.into());
    for moment in snapshot.timeline() {
        let exact: u128 = moment.by_tag.iter().map(|b| u128::from(*b)).sum();
        assert_eq!(u128::from(moment.allocated()), exact);
        assert!(exact <= moment.reserved.into() && moment.reserved <= MAX_MEMORY_BYTES, "{moment:?}");
    }
    for event in 0..snapshot.events.len() {
        assert!(snapshot.holders_at(event).iter().all(|(_, bytes)| *bytes <= MAX_MEMORY_BYTES));
    }
    let (gone, come) = (snapshot.diff(&Snapshot::default()), Snapshot::default().diff(snapshot));
    assert_eq!((i128::from(gone.bytes()), i128::from(come.bytes())), (-(live as i128), live as i128));
    let _ = (gone.to_string(), come.to_string(), snapshot.write_pickle(std::io::sink()));
}

#[test]
fn every_huge_value_of_a_snapshot_is_an_error() -> Result<()> {
    let good = snapshot()?;
    check_sums(&read(&good)?);
    let mut paths = Vec::new();
    number_pointers(&good, "", &mut paths);
    assert!(paths.len() > 250, "{}", paths.len());
    for path in paths {
        let oom = path.rsplit_once('/').and_then(|(event, _)| good.pointer(event)?.get("action"));
        let oom = oom.is_some_and(|action| action == "oom");
        let field = path.rsplit('/').next().unwrap_or_default();
        // A failed request may have been for any number of bytes; sums over the whole run have looser bounds.
        let free = oom && ["address", "size", "requested_size"].contains(&field);
        for huge in HUGE {
            let bound = !(path.starts_with("/stats/") || field == "address") || huge > 1 << 62;
            let mut bad = good.clone();
            *bad.pointer_mut(&path).ok_or_else(|| Error::Snapshot(path.clone()))? = huge.into();
            match read(&bad) {
                Ok(snapshot) => {
                    assert!(free || !bound || field == "dropped_events", "{path} = {huge} is accepted");
                    check_sums(&snapshot);
                }
                Err(e) => assert!(!free, "{path} = {huge}: {e}"),
            }
        }
    }
    Ok(())
}

#[test]
fn inconsistent_snapshots_are_errors() -> Result<()> {
    let good = snapshot()?;
    let message = |changes: &[(&str, u64)]| {
        let mut bad = good.clone();
        for (path, value) in changes {
            if let Some(number) = bad.pointer_mut(path) {
                *number = (*value).into();
            }
        }
        read(&bad).map_or_else(|e| e.to_string(), |_| "accepted".to_owned())
    };
    let number = |path: &str| good.pointer(path).and_then(Value::as_u64).unwrap_or(0);
    let first = number("/segments/0/address");
    assert!(message(&[("/segments/0/blocks/1/address", first)]).contains("overlaps the block before it"));
    assert!(message(&[("/segments/0/address", first + 512)]).contains("lies outside of the segment"));
    assert!(message(&[("/segments/0/allocated_size", 1)]).contains("that of its blocks is"));
    let twice =
        message(&[("/stats/allocated_bytes.all.current", number("/stats/reserved_bytes.all.current") + 1)]);
    assert!(twice.contains("the snapshot is inconsistent"), "{twice}");
    let named = message(&[("/segments/0/total_size", 1 << 63)]);
    assert!(named.contains("9223372036854775808") && named.contains("9007199254740992"), "{named}");
    Ok(())
}

#[test]
fn other_kinds_of_files_are_named() -> Result<()> {
    let message = |bytes: &[u8]| Snapshot::read(bytes).map_or_else(|e| e.to_string(), |_| String::new());
    let mut pickle = Vec::new();
    read(&snapshot()?)?.write_pickle(&mut pickle).map_err(|e| Error::Snapshot(e.to_string()))?;
    let text = message(&pickle);
    assert!(text.contains("Python pickle") && text.contains("snapshot.save(\"memory.json\")"), "{text}");
    assert!(message(b"{\"workload\": \"w\"}").contains("forebay replay"));
    assert!(message(b"").contains("it is empty"));
    let trace = Trace::load(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")))
        .map_or_else(|e| e.to_string(), |_| String::new());
    assert!(trace.contains("no trace: it is text"), "{trace}");
    Ok(())
}

/// A file without an end is read up to its bound.
#[test]
fn files_without_an_end_are_errors() {
    let message =
        |endless: io::Repeat| Snapshot::read(endless).map_or_else(|e| e.to_string(), |_| String::new());
    assert!(message(io::repeat(0)).contains("it does not begin with `{`"));
    let bounded = read_bounded(io::repeat(b'{'), 1000).map_err(|error| error.to_string());
    assert_eq!(bounded, Err("it has more than 1000 bytes".to_owned()));
    assert_eq!(read_bounded(io::repeat(b'{').take(1000), 1000).map(|bytes| bytes.len()).ok(), Some(1000));
}

/// Snapshots of recorded workloads, taken at intervals, are read back unchanged.
#[test]
fn snapshots_of_recorded_workloads_are_taken() -> Result<()> {
    for (name, limit) in [("moe_train", 30_000), ("gnn_varsize", 30_000)] {
        let path = format!("{}/../tests/traces/{name}.trace.xz", env!("CARGO_MANIFEST_DIR"));
        let trace = Trace::load(Path::new(&path))?;
        for source in [FakeSource::plain(80 << 30), FakeSource::paged(80 << 30)] {
            let source = Arc::new(source);
            let pool = Pool::new(source.clone(), Config::default()).with_mover(source);
            pool.start_recording(3000);
            let mut table: Vec<Option<Block>> = vec![None; trace.slot_count];
            for (at, event) in trace.events.iter().take(limit).enumerate() {
                match *event {
                    TraceEvent::Alloc { slot, bytes, queue } => {
                        let tag = Tag::ALL[at % Tag::COUNT];
                        let request = Request::new(bytes).queue(queue).tag(tag).movable();
                        table[slot as usize] = Some(pool.alloc(request)?);
                    }
                    TraceEvent::Free { slot } => {
                        table[slot as usize].take().into_iter().for_each(|block| pool.free(block));
                    }
                }
                if at % 5000 == 4999 {
                    pool.snapshot().check()?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn huge_values_of_a_trace_are_errors() {
    let header = |figures: [u64; 4]| {
        format!(
            "{{\"workload\":\"w\",\"peak_requested\":{},\"peak_reserved\":{},\"device_allocs\":{},\"device_frees\":{}}}\n",
            figures[0], figures[1], figures[2], figures[3]
        )
    };
    assert!(Trace::read(header([1; 4]).as_bytes()).is_ok());
    for at in 0..4 {
        let mut figures = [1; 4];
        figures[at] = 1 << 63;
        assert!(Trace::read(header(figures).as_bytes()).is_err(), "figure {at}");
    }
    let mut text = header([1; 4]);
    (0..=MAX_MEMORY_BYTES >> 44).for_each(|id| text.push_str(&format!("a {id} {} 0\n", 1_u64 << 44)));
    assert!(Trace::read(text.as_bytes()).is_err_and(|e| e.to_string().contains("all live blocks")));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Random values in random places yield an error, or a snapshot whose sums are exact.
    #[test]
    fn random_values_are_errors_or_consistent(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0_u32..64), 1..6),
    ) {
        let mut bad = snapshot().map_err(|e| TestCaseError::fail(e.to_string()))?;
        let mut paths = Vec::new();
        number_pointers(&bad, "", &mut paths);
        for (index, value, shift) in changes {
            if let Some(number) = bad.pointer_mut(index.get::<String>(&paths).as_str()) {
                *number = (value >> shift).into();
            }
        }
        if let Ok(snapshot) = read(&bad) {
            check_sums(&snapshot);
        }
    }
}

//! Recorded requests of real workloads, and their replay through a pool.
//!
//! A trace is an xz file of text. Its first line is JSON: the workload, and PyTorch's results. Each further
//! line is an event: `a ID BYTES QUEUE` allocates, `f ID` frees.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use liblzma::read::XzDecoder;
use liblzma::stream::Stream;
use rustc_hash::FxHashMap;
use serde::Deserialize;
use thiserror::Error;

use super::file_kind;
use super::validation;
use crate::atomic_write::FileError;
use crate::memory::error::Result;
use crate::printable::printable;

mod replay;

pub use replay::{ReplayReport, ReplayRow, ReplayTable, SegmentMode, replay, replay_folder};

/// Longest event line, in bytes.
const MAX_LINE: u64 = 128;
/// Longest header, in bytes.
const MAX_HEADER: u64 = 64 << 10;
/// Most events.
const MAX_EVENTS: usize = 1 << 26;
/// Largest request, in bytes.
const MAX_BYTES: u64 = 1 << 44;
/// Most memory for unpacking, in bytes.
const MAX_DECODER_BYTES: u64 = 256 << 20;

/// Error of reading a trace.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be read or unpacked.
    #[error("the trace cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// The first line is not a header.
    #[error("line 1 of the trace is not its header: {0}")]
    Header(String),
    /// A line is too long or not a valid event, or there are too many events.
    #[error("{0}")]
    Event(String),
}

/// PyTorch's results on a trace: its header, or a line of `reserved.jsonl`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct PyTorchBaseline {
    /// Name of the workload.
    pub workload: String,
    /// Allocator of PyTorch.
    #[serde(default)]
    pub allocator: String,
    /// Peak of the requested bytes in use.
    #[serde(deserialize_with = "validation::deserialize_bytes")]
    pub peak_requested: u64,
    /// Peak of the bytes that the allocator held.
    #[serde(deserialize_with = "validation::deserialize_bytes")]
    pub peak_reserved: u64,
    /// Driver calls that took memory.
    #[serde(deserialize_with = "validation::deserialize_count")]
    pub device_allocs: u64,
    /// Driver calls that returned memory.
    #[serde(default, deserialize_with = "validation::deserialize_count")]
    pub device_frees: u64,
}

/// One event. Blocks are identified by their slots in a table of live blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceEvent {
    /// A request.
    Alloc {
        /// Slot in the table.
        slot: u32,
        /// Bytes requested.
        bytes: u64,
        /// Queue of the request.
        queue: u8,
    },
    /// A free.
    Free {
        /// Slot in the table.
        slot: u32,
    },
}

/// A recorded workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// PyTorch's results.
    pub baseline: PyTorchBaseline,
    /// Events, in order.
    pub events: Vec<TraceEvent>,
    /// Largest number of live blocks, which is the size of the slot table.
    pub slot_count: usize,
    /// Peak of the requested bytes in use.
    pub peak_requested: u64,
}

impl Trace {
    /// Reads a trace, packed or as text.
    ///
    /// # Errors
    /// The file cannot be read, is of another kind, or has invalid events.
    pub fn load(path: &Path) -> Result<Self> {
        let wrong = |e: &dyn fmt::Display| file_error(path, e);
        let mut file = BufReader::new(std::fs::File::open(path).map_err(|e| wrong(&e))?);
        let head = file.fill_buf().map_err(|e| wrong(&e))?;
        let packed = head.starts_with(b"\xfd7zXZ\0");
        let kind = file_kind::describe(&head[..head.len().min(file_kind::HEADER_LEN)]);
        let trace = if packed { Self::read_xz(file) } else { Self::read(file) };
        trace.map_err(|e| match (&e, kind) {
            (TraceError::Header(_), Some(kind)) if !kind.contains("trace") => wrong(&format!(
                "no trace: {kind}. A trace is text with a header of JSON, or such text packed by xz ({e})"
            )),
            _ => wrong(&e),
        })
    }

    /// Reads a packed trace.
    pub fn read_xz(packed: impl Read) -> Result<Self, TraceError> {
        let stream = Stream::new_stream_decoder(MAX_DECODER_BYTES, 0).map_err(std::io::Error::from)?;
        Self::read(BufReader::new(XzDecoder::new_stream(packed, stream)))
    }

    /// Reads a trace as text.
    pub fn read(mut text: impl BufRead) -> Result<Self, TraceError> {
        let mut buffer = Vec::new();
        read_line(&mut text, &mut buffer, 1, MAX_HEADER)?;
        let recorded: PyTorchBaseline = serde_json::from_slice(&buffer)
            .map_err(|e| TraceError::Header(printable(&e.to_string()).into()))?;
        let mut reader = EventReader::default();
        let mut events = Vec::new();
        for line in 2.. {
            buffer.clear();
            if !read_line(&mut text, &mut buffer, line, MAX_LINE)? {
                break;
            }
            if events.len() == MAX_EVENTS {
                return Err(TraceError::Event(format!("the trace has more than {MAX_EVENTS} events")));
            }
            let parsed = std::str::from_utf8(&buffer).ok().and_then(parse_event);
            let event = parsed
                .ok_or_else(|| "expected `a ID BYTES QUEUE` (a queue is 0 to 255) or `f ID`".to_owned());
            let event = event.and_then(|(id, alloc)| reader.resolve_slot(id, alloc));
            let wrong = |message| TraceError::Event(format!("line {line} of the trace: {message}"));
            events.push(event.map_err(wrong)?);
        }
        Ok(Self {
            baseline: recorded,
            events,
            slot_count: reader.slot_count as usize,
            peak_requested: reader.peak,
        })
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn request_count(&self) -> usize {
        self.events.iter().filter(|e| matches!(e, TraceEvent::Alloc { .. })).count()
    }
}

fn file_error(path: &Path, error: &(impl fmt::Display + ?Sized)) -> crate::memory::error::Error {
    crate::memory::error::Error::File(FileError::new(path, error.to_string()))
}

/// Reads one line without its end; returns false at the end of the text.
fn read_line(text: &mut impl BufRead, into: &mut Vec<u8>, line: usize, max: u64) -> Result<bool, TraceError> {
    text.by_ref().take(max + 1).read_until(b'\n', into)?;
    if into.last() == Some(&b'\n') {
        into.pop();
        return Ok(true);
    }
    if into.len() as u64 > max {
        return Err(TraceError::Event(format!("line {line} of the trace is longer than {max} bytes")));
    }
    Ok(!into.is_empty())
}

/// Parses an event: `(id, Some((bytes, queue)))` for an allocation, `(id, None)` for a free.
fn parse_event(line: &str) -> Option<(u64, Option<(u64, u8)>)> {
    let mut words = line.split(' ');
    let kind = words.next()?;
    let id = words.next()?.parse().ok()?;
    let alloc = match kind {
        "a" => Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?)),
        "f" => None,
        _ => return None,
    };
    words.next().is_none().then_some((id, alloc))
}

/// Maps the ids of a file to slots of the smallest possible table.
#[derive(Default)]
struct EventReader {
    live: FxHashMap<u64, (u32, u64)>,
    vacant_slots: Vec<u32>,
    slot_count: u32,
    requested: u64,
    peak: u64,
}

impl EventReader {
    fn resolve_slot(&mut self, id: u64, alloc: Option<(u64, u8)>) -> Result<TraceEvent, String> {
        let Some((bytes, queue)) = alloc else {
            let (slot, bytes) = self.live.remove(&id).ok_or_else(|| format!("block {id} is not live"))?;
            self.requested -= bytes;
            self.vacant_slots.push(slot);
            return Ok(TraceEvent::Free { slot });
        };
        if bytes > MAX_BYTES {
            return Err(format!("{bytes} bytes are more than {MAX_BYTES}"));
        }
        let slot = self.vacant_slots.pop().unwrap_or_else(|| {
            self.slot_count += 1;
            self.slot_count - 1
        });
        if self.live.insert(id, (slot, bytes)).is_some() {
            return Err(format!("block {id} is live already"));
        }
        self.requested = self.requested.saturating_add(bytes);
        validation::check_bytes("the size of all live blocks", self.requested)?;
        self.peak = self.peak.max(self.requested);
        Ok(TraceEvent::Alloc { slot, bytes, queue })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str =
        r#"{"workload": "w", "peak_requested": 1, "peak_reserved": 2, "device_allocs": 3, "more": [4]}"#;

    fn read(text: &str) -> Result<Trace, TraceError> {
        Trace::read(text.as_bytes())
    }

    fn message(events: &str) -> String {
        read(&format!("{HEADER}\n{events}")).map_or_else(|e| e.to_string(), |t| format!("accepted: {t:?}"))
    }

    #[test]
    fn events_are_read_and_slots_reused() -> Result<(), TraceError> {
        let trace = read(&format!("{HEADER}\na 7 100 0\na 8 50 1\nf 7\na 9 10 0"))?;
        let alloc = |slot, bytes, queue| TraceEvent::Alloc { slot, bytes, queue };
        let expected = [alloc(0, 100, 0), alloc(1, 50, 1), TraceEvent::Free { slot: 0 }, alloc(0, 10, 0)];
        assert_eq!(trace.events, expected);
        assert_eq!((trace.slot_count, trace.peak_requested, trace.request_count()), (2, 150, 3));
        Ok(())
    }

    #[test]
    fn damaged_and_hostile_traces_are_errors() {
        insta::assert_snapshot!(message("a 1 2"), @"line 2 of the trace: expected `a ID BYTES QUEUE` (a queue is 0 to 255) or `f ID`");
        insta::assert_snapshot!(message("a 1 2 0 9"), @"line 2 of the trace: expected `a ID BYTES QUEUE` (a queue is 0 to 255) or `f ID`");
        insta::assert_snapshot!(message("a 1 2 0\na 1 2 0"), @"line 3 of the trace: block 1 is live already");
        insta::assert_snapshot!(message("f 5"), @"line 2 of the trace: block 5 is not live");
        insta::assert_snapshot!(message("a 1 99999999999999999 0"), @"line 2 of the trace: 99999999999999999 bytes are more than 17592186044416");
        insta::assert_snapshot!(message(&"a".repeat(1 << 20)), @"line 2 of the trace is longer than 128 bytes");
        assert!(matches!(read("[]"), Err(TraceError::Header(_))));
        assert!(matches!(read(""), Err(TraceError::Header(_))));
        let long = read(&"{".repeat(1 << 20)).map_or_else(|e| e.to_string(), |_| String::new());
        assert_eq!(long, "line 1 of the trace is longer than 65536 bytes");
        assert!(matches!(Trace::read_xz(&b"no xz file"[..]), Err(TraceError::Read(_))));
        let missing =
            Trace::load(Path::new("no/such/file")).map_or_else(|e| e.to_string(), |_| String::new());
        assert!(missing.starts_with("no/such/file: "), "{missing}");
    }
}

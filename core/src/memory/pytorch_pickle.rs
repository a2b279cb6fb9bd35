//! Writes a snapshot in PyTorch's format: the pickle of `torch.cuda.memory._dump_snapshot`, for the viewer at
//! pytorch.org/memory_viz and the tools of `torch.cuda._memory_viz`.
//!
//! This writer is not a general crate because text and stacks must be written once and then referred to. A
//! file of a million events names each of its keys a million times.

use std::io::{self, Write};

use rustc_hash::FxHashMap;

use super::Config;
use super::recorder::Action;
use super::snapshot::{AllocationSite, BlockState, Snapshot};

/// Items appended to a list at once, as Python does. The viewer's script passes each item as an argument of
/// one call, and engines limit the number of arguments.
const APPEND_BATCH: usize = 1000;

/// Writer of pickle protocol 2, as far as a snapshot needs it. Each text is written once.
struct PickleWriter<W> {
    out: W,
    text_refs: FxHashMap<String, u32>,
    next_memo: u32,
}

impl<W: Write> PickleWriter<W> {
    fn new(mut out: W) -> io::Result<Self> {
        out.write_all(b"\x80\x02")?;
        Ok(Self { out, text_refs: FxHashMap::default(), next_memo: 0 })
    }

    fn finish(mut self) -> io::Result<()> {
        self.out.write_all(b".")
    }

    /// Memoizes the last value; [`write_ref`](Self::write_ref) repeats it.
    fn memoize(&mut self) -> io::Result<u32> {
        let memo = self.next_memo;
        self.next_memo += 1;
        self.out.write_all(b"r")?;
        self.out.write_all(&memo.to_le_bytes())?;
        Ok(memo)
    }

    fn write_ref(&mut self, memo: u32) -> io::Result<()> {
        match u8::try_from(memo) {
            Ok(short) => self.out.write_all(&[b'h', short]),
            Err(_) => {
                self.out.write_all(b"j")?;
                self.out.write_all(&memo.to_le_bytes())
            }
        }
    }

    fn write_text(&mut self, text: &str) -> io::Result<()> {
        if let Some(&memo) = self.text_refs.get(text) {
            return self.write_ref(memo);
        }
        let length = u32::try_from(text.len()).map_err(|_| io::Error::other("text of more than 4 GiB"))?;
        self.out.write_all(b"X")?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(text.as_bytes())?;
        let memo = self.memoize()?;
        self.text_refs.insert(text.to_owned(), memo);
        Ok(())
    }

    fn write_int(&mut self, value: u64) -> io::Result<()> {
        if let Ok(byte) = u8::try_from(value) {
            return self.out.write_all(&[b'K', byte]);
        }
        if let Ok(value) = i32::try_from(value) {
            self.out.write_all(b"J")?;
            return self.out.write_all(&value.to_le_bytes());
        }
        // Little-endian signed integer with a length byte: a ninth byte keeps values with the highest bit set
        // positive.
        let bytes = value.to_le_bytes();
        let length = if value >> 63 == 0 { 8 } else { 9 };
        self.out.write_all(&[0x8a, length])?;
        self.out.write_all(&bytes)?;
        self.out.write_all(&[0][..usize::from(length) - 8])
    }

    fn write_dict(&mut self, items: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        self.out.write_all(b"}(")?;
        items(self)?;
        self.out.write_all(b"u")
    }

    fn write_list<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut each: impl FnMut(&mut Self, T) -> io::Result<()>,
    ) -> io::Result<()> {
        self.out.write_all(b"](")?;
        for (at, item) in items.into_iter().enumerate() {
            if at > 0 && at % APPEND_BATCH == 0 {
                self.out.write_all(b"e(")?;
            }
            each(self, item)?;
        }
        self.out.write_all(b"e")
    }

    /// Writes keys and values of a dictionary.
    fn write_fields(&mut self, fields: &[(&str, PickleValue<'_>)]) -> io::Result<()> {
        for (key, value) in fields {
            self.write_text(key)?;
            match *value {
                PickleValue::Int(value) => self.write_int(value)?,
                PickleValue::Text(text) => self.write_text(text)?,
                PickleValue::Bool(value) => self.out.write_all(if value { b"\x88" } else { b"\x89" })?,
                PickleValue::Float(value) => {
                    self.out.write_all(b"G")?;
                    self.out.write_all(&value.to_be_bytes())?;
                }
                PickleValue::Opcodes(bytes) => self.out.write_all(bytes)?,
            }
        }
        Ok(())
    }
}

/// Value of a field.
enum PickleValue<'a> {
    Int(u64),
    Text(&'a str),
    Bool(bool),
    Float(f64),
    Opcodes(&'static [u8]),
}

use PickleValue::{Bool, Float, Int, Opcodes, Text};

const NONE: PickleValue<'_> = Opcodes(b"N");
/// PyTorch's -1 for no limit.
const NO_LIMIT: PickleValue<'_> = Opcodes(b"J\xff\xff\xff\xff");
/// `(0, 0)`, the id of the pool that is not private.
const DEFAULT_POOL_ID: PickleValue<'_> = Opcodes(b"K\x00K\x00\x86");

/// Memo indices of each holder's frames.
type FrameRefs = FxHashMap<Option<usize>, u32>;

impl Snapshot {
    /// Writes the snapshot in PyTorch's format. Frames also carry what that format has no fields for: after
    /// the program's lines follow the operation, the module and the tag.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn write_pickle(&self, out: impl Write) -> io::Result<()> {
        let mut p = PickleWriter::new(out)?;
        let mut frames = FrameRefs::default();
        p.write_dict(|p| {
            p.write_text("segments")?;
            p.write_list(&self.segments, |p, s| {
                p.write_dict(|p| {
                    p.write_fields(&[
                        ("device", Int(0)),
                        ("address", Int(s.address)),
                        ("total_size", Int(s.total_size)),
                        ("allocated_size", Int(s.allocated_size)),
                        ("active_size", Int(s.active_size)),
                        ("requested_size", Int(s.requested_size)),
                        ("stream", Int(s.stream.into())),
                        ("segment_type", Text(if s.small { "small" } else { "large" })),
                        ("segment_pool_id", DEFAULT_POOL_ID),
                        ("is_expandable", Bool(s.is_expandable)),
                    ])?;
                    self.write_frames(p, &mut frames, None)?;
                    p.write_text("blocks")?;
                    p.write_list(&s.blocks, |p, b| {
                        p.write_dict(|p| {
                            p.write_fields(&[
                                ("address", Int(b.address)),
                                ("size", Int(b.size)),
                                ("requested_size", Int(b.requested_size)),
                                ("state", Text(pytorch_block_state(b.state))),
                            ])?;
                            self.write_frames(p, &mut frames, b.holder)
                        })
                    })
                })
            })?;
            p.write_text("device_traces")?;
            let events =
                self.events.iter().flat_map(|e| pytorch_actions(e.action).iter().map(move |a| (*a, e)));
            p.write_list([events], |p, events| {
                p.write_list(events, |p, (action, e)| {
                    p.write_dict(|p| {
                        let location = match action {
                            "oom" => ("device_free", Int(e.requested_size)),
                            _ => ("addr", Int(e.address)),
                        };
                        let holder = self.holder(e.holder).map_or(String::new(), |w| w.to_string());
                        p.write_fields(&[
                            ("action", Text(action)),
                            location,
                            ("size", Int(e.size)),
                            ("stream", Int(e.stream.into())),
                            ("time_us", Int(e.time_us)),
                            ("pool_id", DEFAULT_POOL_ID),
                            ("compile_context", Text("N/A")),
                            ("user_metadata", Text(&holder)),
                        ])?;
                        self.write_frames(p, &mut frames, e.holder)
                    })
                })
            })?;
            p.write_text("allocator_settings")?;
            self.write_settings(p)?;
            p.write_text("external_annotations")?;
            p.write_list::<()>([], |_, ()| Ok(()))
        })?;
        p.finish()
    }

    /// Writes the frames of a holder once, and a reference after that.
    fn write_frames<W: Write>(
        &self,
        p: &mut PickleWriter<W>,
        known: &mut FrameRefs,
        holder: Option<usize>,
    ) -> io::Result<()> {
        p.write_text("frames")?;
        if let Some(&memo) = known.get(&holder) {
            return p.write_ref(memo);
        }
        let lines = self.holder(holder).map(holder_frames).unwrap_or_default();
        p.write_list(lines, |p, (name, filename, line)| {
            p.write_dict(|p| {
                p.write_fields(&[
                    ("name", Text(&name)),
                    ("filename", Text(&filename)),
                    ("line", Int(line.into())),
                ])
            })
        })?;
        known.insert(holder, p.memoize()?);
        Ok(())
    }

    fn write_settings<W: Write>(&self, p: &mut PickleWriter<W>) -> io::Result<()> {
        // A snapshot that was read may hold any text.
        let config = Config::parse(&self.config).unwrap_or_default();
        p.write_dict(|p| {
            p.write_fields(&[
                ("PYTORCH_CUDA_ALLOC_CONF", Text(&self.config)),
                ("max_split_size", config.max_split_size.map_or(NO_LIMIT, Int)),
                ("garbage_collection_threshold", Float(config.garbage_collection_threshold)),
                ("expandable_segments", Bool(config.expandable_segments)),
                ("pinned_num_register_threads", Int(1)),
                ("release_lock_on_cudamalloc", Bool(false)),
                ("pinned_use_cuda_host_register", Bool(false)),
            ])?;
            p.write_text("roundup_power2_divisions")?;
            let steps =
                (0..16).map(|power| (power, config.roundup_power2_divisions.steps_for(1 << (20 + power))));
            p.write_dict(|p| {
                for (power, steps) in steps {
                    p.write_fields(&[(&(1u64 << power).to_string(), Int(steps))])?;
                }
                Ok(())
            })?;
            p.write_fields(&[("graph_capture_record_stream_reuse", NONE)])
        })
    }
}

/// Returns PyTorch's events for one of this pool's: a free is requested and completed at once.
fn pytorch_actions(action: Action) -> &'static [&'static str] {
    match action {
        Action::Alloc | Action::MovedTo => &["alloc"],
        Action::Free | Action::MovedFrom => &["free_requested", "free_completed"],
        Action::FreeRequested => &["free_requested"],
        Action::FreeCompleted => &["free_completed"],
        Action::SegmentAlloc => &["segment_alloc"],
        Action::SegmentFree => &["segment_free"],
        Action::SegmentMap => &["segment_map"],
        Action::SegmentUnmap => &["segment_unmap"],
        Action::Oom => &["oom"],
    }
}

fn pytorch_block_state(state: BlockState) -> &'static str {
    match state {
        BlockState::ActiveAllocated => "active_allocated",
        // PyTorch's code writes and its viewer reads this name; its documentation has `active_awaiting_free`.
        BlockState::ActiveAwaitingFree => "active_pending_free",
        // PyTorch has no state for memory on its way back to the device.
        BlockState::Inactive | BlockState::Releasing => "inactive",
    }
}

/// Returns the frames of a holder: its lines, and its operation, module and tag.
fn holder_frames(holder: &AllocationSite) -> Vec<(String, String, u32)> {
    let mut lines: Vec<_> =
        holder.frames.iter().map(|f| (f.name.clone(), f.filename.clone(), f.line)).collect();
    let mut push = |kind: &str, name: &str| {
        if !name.is_empty() {
            lines.push((name.to_owned(), kind.to_owned(), 0));
        }
    };
    push("operation", &holder.op);
    push("module", &holder.module);
    push("tag", holder.tag.name());
    lines
}

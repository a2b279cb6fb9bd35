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
        let place = self.next_memo;
        self.next_memo += 1;
        self.out.write_all(b"r")?;
        self.out.write_all(&place.to_le_bytes())?;
        Ok(place)
    }

    fn write_ref(&mut self, place: u32) -> io::Result<()> {
        match u8::try_from(place) {
            Ok(short) => self.out.write_all(&[b'h', short]),
            Err(_) => {
                self.out.write_all(b"j")?;
                self.out.write_all(&place.to_le_bytes())
            }
        }
    }

    fn write_text(&mut self, text: &str) -> io::Result<()> {
        if let Some(&place) = self.text_refs.get(text) {
            return self.write_ref(place);
        }
        let length = u32::try_from(text.len()).map_err(|_| io::Error::other("text of more than 4 GiB"))?;
        self.out.write_all(b"X")?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(text.as_bytes())?;
        let place = self.memoize()?;
        self.text_refs.insert(text.to_owned(), place);
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

    fn write_bool(&mut self, value: bool) -> io::Result<()> {
        self.out.write_all(if value { b"\x88" } else { b"\x89" })
    }

    fn write_none(&mut self) -> io::Result<()> {
        self.out.write_all(b"N")
    }

    fn write_float(&mut self, value: f64) -> io::Result<()> {
        self.out.write_all(b"G")?;
        self.out.write_all(&value.to_be_bytes())
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

    fn write_int_field(&mut self, key: &str, value: u64) -> io::Result<()> {
        self.write_text(key)?;
        self.write_int(value)
    }

    fn write_text_field(&mut self, key: &str, value: &str) -> io::Result<()> {
        self.write_text(key)?;
        self.write_text(value)
    }

    /// Writes `(0, 0)`, the id of the pool that is not private.
    fn write_default_pool_id(&mut self, key: &str) -> io::Result<()> {
        self.write_text(key)?;
        self.out.write_all(b"K\x00K\x00\x86")
    }
}

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
                    p.write_int_field("device", 0)?;
                    p.write_int_field("address", s.address)?;
                    p.write_int_field("total_size", s.total_size)?;
                    p.write_int_field("allocated_size", s.allocated_size)?;
                    p.write_int_field("active_size", s.active_size)?;
                    p.write_int_field("requested_size", s.requested_size)?;
                    p.write_int_field("stream", s.stream.into())?;
                    p.write_text_field("segment_type", if s.small { "small" } else { "large" })?;
                    p.write_default_pool_id("segment_pool_id")?;
                    p.write_text("is_expandable")?;
                    p.write_bool(s.is_expandable)?;
                    self.write_frames(p, &mut frames, None)?;
                    p.write_text("blocks")?;
                    p.write_list(&s.blocks, |p, b| {
                        p.write_dict(|p| {
                            p.write_int_field("address", b.address)?;
                            p.write_int_field("size", b.size)?;
                            p.write_int_field("requested_size", b.requested_size)?;
                            p.write_text_field("state", pytorch_block_state(b.state))?;
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
                        p.write_text_field("action", action)?;
                        p.write_int_field(
                            if action == "oom" { "device_free" } else { "addr" },
                            match action {
                                "oom" => e.requested_size,
                                _ => e.address,
                            },
                        )?;
                        p.write_int_field("size", e.size)?;
                        p.write_int_field("stream", e.stream.into())?;
                        p.write_int_field("time_us", e.time_us)?;
                        p.write_default_pool_id("pool_id")?;
                        p.write_text_field("compile_context", "N/A")?;
                        p.write_text_field(
                            "user_metadata",
                            &self.holder(e.holder).map_or(String::new(), |w| w.to_string()),
                        )?;
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
        who: Option<usize>,
    ) -> io::Result<()> {
        p.write_text("frames")?;
        if let Some(&place) = known.get(&who) {
            return p.write_ref(place);
        }
        let lines = self.holder(who).map(holder_frames).unwrap_or_default();
        p.write_list(lines, |p, (name, filename, line)| {
            p.write_dict(|p| {
                p.write_text_field("name", &name)?;
                p.write_text_field("filename", &filename)?;
                p.write_int_field("line", line.into())
            })
        })?;
        known.insert(who, p.memoize()?);
        Ok(())
    }

    fn write_settings<W: Write>(&self, p: &mut PickleWriter<W>) -> io::Result<()> {
        // A snapshot that was read may hold any text.
        let config = Config::parse(&self.config).unwrap_or_default();
        p.write_dict(|p| {
            p.write_text_field("PYTORCH_CUDA_ALLOC_CONF", &self.config)?;
            p.write_text("max_split_size")?;
            match config.max_split_size {
                Some(size) => p.write_int(size)?,
                // PyTorch writes -1 for no limit.
                None => p.out.write_all(b"J\xff\xff\xff\xff")?,
            }
            p.write_text("garbage_collection_threshold")?;
            p.write_float(config.garbage_collection_threshold)?;
            p.write_text("expandable_segments")?;
            p.write_bool(config.expandable_segments)?;
            p.write_int_field("pinned_num_register_threads", 1)?;
            p.write_text("release_lock_on_cudamalloc")?;
            p.write_bool(false)?;
            p.write_text("pinned_use_cuda_host_register")?;
            p.write_bool(false)?;
            p.write_text("roundup_power2_divisions")?;
            let steps =
                (0..16).map(|power| (power, config.roundup_power2_divisions.steps_for(1 << (20 + power))));
            p.write_dict(|p| {
                for (power, steps) in steps {
                    p.write_int_field(&(1u64 << power).to_string(), steps)?;
                }
                Ok(())
            })?;
            p.write_text("graph_capture_record_stream_reuse")?;
            p.write_none()
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
fn holder_frames(who: &AllocationSite) -> Vec<(String, String, u32)> {
    let mut lines: Vec<_> = who.frames.iter().map(|f| (f.name.clone(), f.filename.clone(), f.line)).collect();
    let mut tell = |what: &str, name: &str| {
        if !name.is_empty() {
            lines.push((name.to_owned(), what.to_owned(), 0));
        }
    };
    tell("operation", &who.op);
    tell("module", &who.module);
    tell("tag", who.tag.name());
    lines
}

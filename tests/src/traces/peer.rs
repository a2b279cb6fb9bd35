//! What PyTorch's allocator makes of a trace with `expandable_segments:True`: a model of c10/cuda/CUDACachingAllocator.cpp (2.11), which agrees with
//! all that was recorded of it. Its default allocator is [`Config::pytorch`](forebay::memory::Config::pytorch).

use std::collections::{BTreeMap, BTreeSet};

use forebay::memory::trace::{Event, Recorded, Trace};

const MIB: u64 = 1 << 20;
/// More addresses than any workload asks for.
const ADDRESSES: u64 = 1 << 46;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Held,
    Unmapped,
}

/// The segment of one queue, of small requests or large ones.
#[derive(Debug)]
struct Expandable {
    /// What is mapped is a multiple of this.
    page: u64,
    /// By address: bytes, and what they are.
    blocks: BTreeMap<u64, (u64, State)>,
    /// By size, then by address.
    free: BTreeSet<(u64, u64)>,
    mapped: u64,
    calls: u64,
}

impl Expandable {
    fn new(small: bool) -> Self {
        let blocks = BTreeMap::from([(0, (ADDRESSES, State::Unmapped))]);
        let page = if small { 2 * MIB } else { 20 * MIB };
        Self { page, blocks, free: BTreeSet::new(), mapped: 0, calls: 0 }
    }

    fn after(&self, at: u64) -> Option<(u64, u64, State)> {
        let next = self.blocks.range(at + 1..).next();
        next.map(|(at, (bytes, state))| (*at, *bytes, *state))
    }

    fn before(&self, at: u64) -> Option<(u64, u64, State)> {
        let before = self.blocks.range(..at).next_back();
        before.map(|(at, (bytes, state))| (*at, *bytes, *state))
    }

    /// A free block counts with the addresses behind it that have no memory: `get_free_block`.
    fn expandable(&self, (bytes, at): (u64, u64)) -> u64 {
        match self.after(at) {
            Some((_, more, State::Unmapped)) => bytes + more,
            _ => bytes,
        }
    }

    fn take(&mut self, bytes: u64) -> u64 {
        let mut fits = self.free.range((bytes, 0)..).copied();
        let mut found = fits.next();
        while let (Some(best), Some(next)) = (found, fits.next()) {
            if self.expandable(next) >= self.expandable(best) {
                break;
            }
            found = Some(next);
        }
        let at = found.map_or_else(|| self.expand(bytes), |(_, at)| at);
        self.hold(at, bytes)
    }

    /// The first place with so many addresses, which gets memory: `try_allocate_expandable_block`.
    fn expand(&mut self, bytes: u64) -> u64 {
        let holes = self.blocks.iter().filter(|(_, of)| of.1 == State::Unmapped).map(|(at, _)| *at);
        let places = holes.map(|at| match self.before(at) {
            Some((before, _, State::Free)) => before,
            _ => at,
        });
        let room = |at: &u64| {
            let unused = self.blocks.range(at..).take_while(|(_, of)| of.1 != State::Held);
            unused
                .map(|(_, of)| of.0)
                .scan(0, |sum, of| {
                    *sum += of;
                    Some(*sum)
                })
                .any(|sum| sum >= bytes)
        };
        let mut at = places.filter(room).min().unwrap_or(0);
        loop {
            let (size, state) = self.blocks[&at];
            match state {
                State::Unmapped => at = self.map(at, size.min(bytes)),
                _ if size >= bytes => return at,
                _ => {
                    let (next, more, _) = self.after(at).unwrap_or((at, 0, State::Held));
                    at = self.map(next, more.min(bytes - size));
                }
            }
        }
    }

    /// Maps the first bytes of a hole. Returns the free block that they are in: `map_block`.
    fn map(&mut self, at: u64, bytes: u64) -> u64 {
        let (size, bytes) = (self.blocks[&at].0, bytes.next_multiple_of(self.page));
        if size > bytes {
            self.blocks.insert(at + bytes, (size - bytes, State::Unmapped));
        }
        self.mapped += bytes;
        self.calls += 1;
        self.blocks.insert(at, (bytes, State::Held));
        self.release(at)
    }

    fn hold(&mut self, at: u64, bytes: u64) -> u64 {
        let (size, _) = self.blocks[&at];
        self.free.remove(&(size, at));
        if size > bytes {
            self.blocks.insert(at + bytes, (size - bytes, State::Free));
            self.free.insert((size - bytes, at + bytes));
        }
        self.blocks.insert(at, (bytes, State::Held));
        at
    }

    /// Frees a block, and joins it with its free neighbours.
    fn release(&mut self, mut at: u64) -> u64 {
        let (mut bytes, _) = self.blocks[&at];
        if let Some((next, more, State::Free)) = self.after(at) {
            self.blocks.remove(&next);
            self.free.remove(&(more, next));
            bytes += more;
        }
        if let Some((before, more, State::Free)) = self.before(at) {
            self.blocks.remove(&at);
            self.free.remove(&(more, before));
            (at, bytes) = (before, bytes + more);
        }
        self.blocks.insert(at, (bytes, State::Free));
        self.free.insert((bytes, at));
        at
    }
}

/// What PyTorch makes of a trace with expandable segments.
pub(super) fn expandable(trace: &Trace) -> Recorded {
    let mut segments: BTreeMap<(u8, bool), Expandable> = BTreeMap::new();
    let mut held = vec![((0, false), 0); trace.places];
    for event in &trace.events {
        match *event {
            Event::Alloc { place, bytes, queue } => {
                let bytes = bytes.max(1).next_multiple_of(512);
                let of = (queue, bytes <= MIB);
                let segment = segments.entry(of).or_insert_with(|| Expandable::new(of.1));
                held[place as usize] = (of, segment.take(bytes));
            }
            Event::Free { place } => {
                let (of, at) = held[place as usize];
                if let Some(segment) = segments.get_mut(&of) {
                    segment.release(at);
                }
            }
        }
    }
    Recorded {
        allocator: "expandable".to_owned(),
        // Nothing goes back.
        peak_reserved: segments.values().map(|s| s.mapped).sum(),
        device_allocs: segments.values().map(|s| s.calls).sum(),
        device_frees: 0,
        ..trace.recorded.clone()
    }
}

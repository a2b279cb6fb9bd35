//! Statistics of a pool, under PyTorch's names, and their display.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::Tag;
use crate::memory::error::{Error, Result};

/// A counter and its history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Current value.
    pub current: u64,
    /// Largest value since the last reset of peaks.
    pub peak: u64,
    /// Sum of all increases since the last reset.
    pub allocated: u64,
    /// Sum of all decreases since the last reset.
    pub freed: u64,
}

/// A counter of the small pool, the large pool and both together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStat {
    /// Both pools.
    pub all: Stat,
    /// Requests of up to `small_size`.
    pub small_pool: Stat,
    /// Larger requests.
    pub large_pool: Stat,
}

/// Statistics of one step of the slow path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimStepStats {
    /// Number of times the step ran.
    pub tried: u64,
    /// Number of requests served right after it.
    pub served: u64,
}

/// Steps of the slow path, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimStats {
    /// Polls fences and searches again.
    pub poll: ReclaimStepStats,
    /// Runs the registered callbacks and searches again.
    pub callbacks: ReclaimStepStats,
    /// Releases segments that were idle for long (`garbage_collection_threshold`).
    pub collect: ReclaimStepStats,
    /// Moves blocks in use to join free memory.
    pub compact: ReclaimStepStats,
    /// Maps scattered idle memory a second time, side by side.
    pub stitch: ReclaimStepStats,
    /// Releases idle memory before growing past what the program has shown to need.
    pub reclaim: ReclaimStepStats,
    /// Requests memory from the source.
    pub grow: ReclaimStepStats,
    /// Waits for the fences of freed blocks and searches again.
    pub wait: ReclaimStepStats,
    /// Releases all idle memory and requests memory from the source again.
    pub release: ReclaimStepStats,
}

/// Statistics of a pool at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Allocated blocks.
    pub allocation: PoolStat,
    /// Segments.
    pub segment: PoolStat,
    /// Blocks that are allocated, or freed and waiting for a fence.
    pub active: PoolStat,
    /// Free blocks that cannot be released, because a part of their segment is active.
    pub inactive_split: PoolStat,
    /// Bytes of allocated blocks, after rounding.
    pub allocated_bytes: PoolStat,
    /// Bytes of all segments (of mapped memory, where segments are virtual).
    pub reserved_bytes: PoolStat,
    /// Bytes of active blocks.
    pub active_bytes: PoolStat,
    /// Bytes of inactive split blocks.
    pub inactive_split_bytes: PoolStat,
    /// Bytes of allocated blocks, as requested.
    pub requested_bytes: PoolStat,
    /// Blocks of at least `max_split_size`.
    pub oversize_allocations: Stat,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Stat,
    /// Bytes waiting for a fence: freed blocks that cannot be reused yet, and memory that has not returned to
    /// the device yet.
    pub pending_bytes: u64,
    /// Bytes that vendor libraries allocated outside of the pool: one workspace for each queue that ran a
    /// matrix product.
    pub library_bytes: u64,
    /// Size of the largest free block: the largest request that needs no new memory.
    pub largest_free: u64,
    /// Bytes allocated for each tag, in the order of [`Tag::ALL`]. [`Tag::External`] is not part of the totals.
    pub tags: [Stat; Tag::COUNT],
    /// Bytes of each tag at the moment of the peak of the allocated bytes, which is their sum. The peaks in
    /// `tags` may be of other moments.
    pub tags_at_peak: [u64; Tag::COUNT],
    /// Requests for which all idle memory was released before growing again.
    pub num_alloc_retries: u64,
    /// Requests that failed.
    pub num_ooms: u64,
    /// Number of times the pool waited for the device.
    pub num_sync_all_streams: u64,
    /// Calls of the source that allocated a segment or mapped memory.
    pub num_device_alloc: u64,
    /// Calls of the source that freed a segment or unmapped memory.
    pub num_device_free: u64,
    /// Number of compactions.
    pub num_compactions: u64,
    /// Bytes copied by compactions.
    pub compacted_bytes: u64,
    /// Frees of blocks that were not allocated (a bug of the caller; nothing was freed).
    pub num_invalid_frees: u64,
    /// The setting `max_split_size`; `None` is unlimited.
    pub max_split_size: Option<u64>,
    /// If true, segments grow by mapping pages; false also where reserving addresses failed.
    pub expandable_segments: bool,
    /// Statistics of the slow path.
    pub reclaim_stats: ReclaimStats,
}

impl Stats {
    /// Returns the bytes allocated, after rounding.
    #[must_use]
    #[expect(clippy::misnamed_getters, reason = "what is allocated now, not all that ever was")]
    pub fn allocated(&self) -> u64 {
        self.allocated_bytes.all.current
    }

    /// Returns the bytes taken from the device.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved_bytes.all.current
    }

    /// Returns the peak of the allocated bytes.
    #[must_use]
    pub fn peak_allocated(&self) -> u64 {
        self.allocated_bytes.all.peak
    }

    /// Returns the peak of the bytes taken from the device.
    #[must_use]
    pub fn peak_reserved(&self) -> u64 {
        self.reserved_bytes.all.peak
    }

    /// Returns the bytes taken from the device that are free for the next request.
    #[must_use]
    pub fn cached(&self) -> u64 {
        self.reserved().saturating_sub(self.allocated() + self.pending_bytes)
    }

    /// Returns the part of the free memory outside of the largest free block; 0 for a single block.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        match self.cached() {
            0 => 0.0,
            cached => 1.0 - self.largest_free as f64 / cached as f64,
        }
    }

    /// Returns the counters of one tag.
    #[must_use]
    pub fn tag(&self, tag: Tag) -> Stat {
        self.tags[tag as usize]
    }

    /// Returns all counters under PyTorch's keys (`allocated_bytes.all.current`), and further ones.
    #[must_use]
    pub fn to_map(&self) -> BTreeMap<String, u64> {
        let mut map = BTreeMap::new();
        let mut put = |name: &str, stat: &Stat| {
            let fields = [
                ("current", stat.current),
                ("peak", stat.peak),
                ("allocated", stat.allocated),
                ("freed", stat.freed),
            ];
            for (field, value) in fields {
                map.insert(format!("{name}.{field}"), value);
            }
        };
        for (name, stat) in self.pool_stats() {
            put(&format!("{name}.all"), &stat.all);
            put(&format!("{name}.small_pool"), &stat.small_pool);
            put(&format!("{name}.large_pool"), &stat.large_pool);
        }
        put("oversize_allocations", &self.oversize_allocations);
        put("oversize_segments", &self.oversize_segments);
        for tag in Tag::ALL {
            put(&format!("tag_bytes.{tag}"), &self.tag(tag));
        }
        for tag in Tag::ALL {
            map.insert(format!("tag_bytes.{tag}.at_peak"), self.tags_at_peak[tag as usize]);
        }
        let scalars = [
            ("pending_bytes", self.pending_bytes),
            ("library_bytes", self.library_bytes),
            ("largest_free_block", self.largest_free),
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("num_invalid_frees", self.num_invalid_frees),
            ("num_compactions", self.num_compactions),
            ("compacted_bytes", self.compacted_bytes),
        ];
        map.extend(scalars.map(|(name, value)| (name.to_owned(), value)));
        if let Some(limit) = self.max_split_size {
            map.insert("max_split_size".to_owned(), limit);
        }
        for (name, step) in self.reclaim_stats.by_name() {
            map.insert(format!("reclaim.{name}.tried"), step.tried);
            map.insert(format!("reclaim.{name}.served"), step.served);
        }
        map
    }

    /// Returns one line for a progress bar: `allocated 12.3 MiB, reserved 20.0 MiB, peak 15.1 MiB`.
    #[must_use]
    pub fn summary(&self) -> String {
        let [allocated, reserved, peak] =
            [self.allocated(), self.reserved(), self.peak_allocated()].map(Bytes);
        format!("allocated {allocated}, reserved {reserved}, peak {peak}")
    }

    fn pool_stats(&self) -> [(&'static str, &PoolStat); 9] {
        [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ]
    }
}

impl ReclaimStats {
    /// Returns the steps with their names, in order.
    #[must_use]
    pub fn by_name(&self) -> [(&'static str, ReclaimStepStats); 9] {
        [
            ("poll", self.poll),
            ("callbacks", self.callbacks),
            ("collect", self.collect),
            ("compact", self.compact),
            ("stitch", self.stitch),
            ("reclaim", self.reclaim),
            ("grow", self.grow),
            ("wait", self.wait),
            ("release", self.release),
        ]
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rule = "-".repeat(86);
        writeln!(f, "{rule}")?;
        let kind = if self.expandable_segments { "virtual memory" } else { "plain segments" };
        writeln!(
            f,
            "memory ({kind})   out of memory: {}   retries: {}   device calls: {} + {}",
            self.num_ooms, self.num_alloc_retries, self.num_device_alloc, self.num_device_free
        )?;
        writeln!(f, "{rule}")?;
        let columns = ["current", "peak", "allocated", "freed", "at peak"];
        let [current, peak, allocated, freed, at_peak] = columns;
        writeln!(f, "{:<24}{current:>12}{peak:>12}{allocated:>13}{freed:>13}{at_peak:>12}", "")?;
        let mut bytes = |name: &str, stat: &Stat, at_peak: Option<u64>| {
            let Stat { current, peak, allocated, freed } = *stat;
            let [current, peak, allocated, freed] = [current, peak, allocated, freed].map(Bytes);
            write!(f, "{name:<24}{current:>12}{peak:>12}{allocated:>13}{freed:>13}")?;
            match at_peak {
                Some(at_peak) => writeln!(f, "{:>12}", Bytes(at_peak)),
                None => writeln!(f),
            }
        };
        let tables = [
            ("allocated", &self.allocated_bytes),
            ("active", &self.active_bytes),
            ("requested", &self.requested_bytes),
            ("reserved", &self.reserved_bytes),
            ("non-releasable", &self.inactive_split_bytes),
        ];
        for (name, stat) in tables {
            bytes(name, &stat.all, None)?;
            bytes("  large pool", &stat.large_pool, None)?;
            bytes("  small pool", &stat.small_pool, None)?;
        }
        for tag in Tag::ALL {
            let stat = self.tag(tag);
            if stat.peak.max(self.tags_at_peak[tag as usize]) > 0 {
                bytes(&format!("  tag {tag}"), &stat, Some(self.tags_at_peak[tag as usize]))?;
            }
        }
        writeln!(f, "{:<24}{:>12}", "pending", Bytes(self.pending_bytes))?;
        if self.library_bytes > 0 {
            writeln!(f, "{:<24}{:>12}", "vendor library", Bytes(self.library_bytes))?;
        }
        let counts = [
            ("allocations", &self.allocation),
            ("active blocks", &self.active),
            ("segments", &self.segment),
            ("non-releasable blocks", &self.inactive_split),
        ];
        for (name, stat) in counts {
            let Stat { current, peak, allocated, freed } = stat.all;
            writeln!(f, "{name:<24}{current:>12}{peak:>12}{allocated:>13}{freed:>13}")?;
        }
        write!(f, "{rule}")
    }
}

/// Number of bytes, displayed as PyTorch does, `12.3 MiB`, and parsed with or without a unit.
///
/// ```
/// # use forebay_core::memory::Bytes;
/// assert_eq!("4GiB".parse::<Bytes>()?, Bytes(4 << 30));
/// assert_eq!("1.5 GB".parse::<Bytes>()?.to_string(), "1.4 GiB");
/// assert!("4 gallons".parse::<Bytes>().is_err());
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = Error;

    /// Parses a number with an optional unit: `4GiB`, `1.5 GB`, `512M` (of 1024), `1048576`.
    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.trim().to_lowercase();
        let (letter, base) = match unit.strip_suffix("ib").or_else(|| unit.strip_suffix('b')) {
            Some(letter) if !unit.ends_with("ib") && !letter.is_empty() => (letter, 1000f64),
            Some(letter) => (letter, 1024.0),
            None => (unit.as_str(), 1024.0),
        };
        let power = ["", "k", "m", "g", "t"].iter().position(|known| *known == letter);
        match (number.parse::<f64>(), power) {
            (Ok(number), Some(power)) => Ok(Self((number * base.powi(power as i32)) as u64)),
            _ => Err(Error::argument(
                "bytes",
                format!("expected a number and a unit, such as 4GiB, got `{text}`"),
            )),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        f.pad(&format!("{value:.1} {}", UNITS[unit]))
    }
}

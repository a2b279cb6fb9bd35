//! Error of a request that failed after all steps of the slow path: it lists the holders of memory and gives
//! advice.

use std::fmt;

use super::batch::{BatchEstimate, FittingBatch};
use super::scope::{CallSite, ModulePath, Tag};
use super::source::DeviceProcess;
use super::stats::Bytes;

/// A request for memory that failed, with the state of the pool at that moment.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// Bytes requested.
    pub requested: u64,
    /// The requesting operation; empty if none was named.
    pub op: &'static str,
    /// The line of the program that called the operation, or the module around it.
    pub site: CallSite,
    /// The requesting module.
    pub module: ModulePath,
    /// Purpose of the requested memory.
    pub tag: Tag,
    /// The device's name, if the pool has one.
    pub device: Option<String>,
    /// All memory of the device, where the driver reports it.
    pub total: Option<u64>,
    /// Memory that no process uses, where the driver reports it.
    pub free: Option<u64>,
    /// Processes that hold memory of the device, this one included, the largest first. Empty where the driver
    /// does not report them.
    pub processes: Vec<DeviceProcess>,
    /// Limit of the pool in bytes, if it has one.
    pub limit: Option<u64>,
    /// Limit on all pools of the process together, if there is one.
    pub process_limit: Option<u64>,
    /// Bytes that all pools of the process hold.
    pub process_reserved: u64,
    /// Most bytes that this pool could hold, by its limits and the device's free memory. `None` without a
    /// limit where the driver does not report free memory.
    pub capacity: Option<u64>,
    /// Largest segment that the device supports.
    pub max_segment: u64,
    /// Dependence of the need on the batch size, within
    /// [`Pool::with_batch_size`](super::Pool::with_batch_size).
    pub batch: Option<BatchEstimate>,
    /// Bytes allocated by the program.
    pub allocated: u64,
    /// Bytes freed that the device may still use.
    pub pending: u64,
    /// Bytes free in the pool.
    pub cached: u64,
    /// Largest free block.
    pub largest_free: u64,
    /// Bytes taken from the device.
    pub reserved: u64,
    /// If true, the pool grows through virtual memory, where free pages move to where they are needed.
    pub virtual_memory: bool,
    /// Message of the source when more memory was requested; empty if none was requested.
    pub detail: String,
    /// Bytes allocated for each tag, the largest first.
    pub by_tag: Vec<(Tag, u64)>,
    /// Bytes allocated for each module, the largest first, at most [`OutOfMemory::MAX_LISTED`].
    pub by_module: Vec<(ModulePath, u64)>,
}

impl OutOfMemory {
    /// Largest number of modules and processes that an error names.
    pub const MAX_LISTED: usize = 5;

    /// Returns the part of the free memory outside of the largest free block; 0 for a single block.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.cached == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.cached as f64 }
    }

    /// Returns the device's used bytes outside of this pool: other processes, other pools and drivers. `None`
    /// where the driver does not report them.
    #[must_use]
    pub fn held_by_others(&self) -> Option<u64> {
        Some(self.total?.saturating_sub(self.free?).saturating_sub(self.reserved))
    }

    fn other_processes(&self) -> impl Iterator<Item = &DeviceProcess> {
        self.processes.iter().filter(|p| !p.is_current())
    }

    /// Returns the largest batch size that would fit, among half, a quarter, ... of the failed one. It relies
    /// on an earlier step that completed if possible, else on what this step had reached. Returns `None`
    /// outside of [`Pool::with_batch_size`](super::Pool::with_batch_size), and if not one row would fit.
    #[must_use]
    pub fn fitting_batch_size(&self) -> Option<FittingBatch> {
        let rows = self.batch?;
        let room = self.capacity_or_reserved();
        let fits = |need: &FittingBatch| {
            let one = u128::from(self.requested) * need.batch_size as u128 / rows.batch_size as u128;
            need.bytes <= room && one <= u128::from(self.max_segment)
        };
        let known = rows.halved_batch_sizes().map(|n| rows.estimate(n)).find(fits);
        // Estimates from earlier steps are rather too high, so a lower bound may still fit.
        known.or_else(|| rows.halved_batch_sizes().map(|n| rows.lower_bound(n)).find(fits))
    }

    /// Returns the capacity; for a device that reports nothing, the bytes reserved so far.
    fn capacity_or_reserved(&self) -> u64 {
        self.capacity.unwrap_or(self.reserved)
    }

    /// Returns advice on the batch size; `None` if the request was not part of a batch.
    fn batch_advice(&self) -> Option<String> {
        let rows = self.batch.filter(|rows| rows.batch_size > 1)?;
        let of = |bytes: u64| BytesOf(bytes, self.capacity_or_reserved());
        Some(match self.fitting_batch_size() {
            Some(FittingBatch { batch_size: rows, bytes, is_measured: true }) => {
                format!("micro-batch {rows} would fit: {}", of(bytes))
            }
            Some(FittingBatch { batch_size: fits, bytes, .. }) => format!(
                "micro-batch {fits} may fit: more than {}, by the memory of this failed step of {}",
                of(bytes),
                rows.batch_size
            ),
            None => format!(
                "no smaller micro-batch would fit: one row needs more than {}",
                of(rows.lower_bound(1).bytes)
            ),
        })
    }

    /// Returns advice for a request that is larger than all memory it could get.
    fn size_advice(&self) -> Option<String> {
        if let Some(limit) = self.limit.filter(|l| self.requested > *l) {
            return Some(format!("the request alone is larger than the pool's limit of {}", Bytes(limit)));
        }
        let total = self.total.filter(|t| self.requested > *t)?;
        Some(format!("the request alone is larger than the device's memory of {}", Bytes(total)))
    }

    /// Returns the pool's limit if it stopped a request that is no larger.
    fn exceeded_limit(&self) -> Option<u64> {
        self.limit.filter(|l| self.requested <= *l && self.reserved.saturating_add(self.requested) > *l)
    }

    /// Returns the limit of all pools together if it stopped the request.
    fn exceeded_process_limit(&self) -> Option<u64> {
        self.process_limit.filter(|l| self.process_reserved.saturating_add(self.requested) > *l)
    }

    fn limit_advice(&self) -> Option<String> {
        if let Some(limit) = self.exceeded_limit() {
            return match self.free {
                Some(room) if room > self.requested => Some(format!(
                    "the limit stopped this, not the device, which has {} free: raise max_memory_mb or \
                     per_process_memory_fraction",
                    Bytes(room)
                )),
                Some(_) => None,
                None => Some(format!(
                    "the limit of {} stopped this: raise max_memory_mb (`Pool::set_limit`) if the device has more",
                    Bytes(limit)
                )),
            };
        }
        let limit = self.exceeded_process_limit()?;
        Some(format!(
            "the limit of {} on all pools of this process stopped this: raise max_process_memory_mb \
             (`memory::set_process_limit`), or `trim` the other pools, which hold {}",
            Bytes(limit),
            Bytes(self.process_reserved.saturating_sub(self.reserved))
        ))
    }

    /// Returns advice for free memory in pieces.
    fn fragmentation_advice(&self) -> Option<String> {
        if self.cached < self.requested || self.fragmentation() <= 0.5 {
            return None;
        }
        let cached = Bytes(self.cached);
        Some(if self.virtual_memory {
            format!(
                "{cached} are free but in pieces that share pages with live tensors: free the tensors that live longest"
            )
        } else {
            format!(
                "{cached} are free but in pieces: allocate long-lived tensors first, or set max_split_size_mb so \
                 that large blocks stay whole"
            )
        })
    }

    /// Returns advice for a device whose memory others hold, unless a limit stopped the request.
    fn others_advice(&self) -> Option<String> {
        let others = self.held_by_others().filter(|o| *o > self.requested)?;
        if self.exceeded_limit().or(self.exceeded_process_limit()).is_some() {
            return None;
        }
        Some(match self.other_processes().find(|p| p.bytes > Some(self.requested)) {
            Some(process) => {
                let bytes = Bytes(process.bytes.unwrap_or(0));
                format!("this would fit without {process}, which holds {bytes}")
            }
            None => format!("other programs (and drivers) hold {} of the device", Bytes(others)),
        })
    }

    /// Returns advice by the tag that holds the most.
    fn tag_advice(&self) -> Option<String> {
        // A tag that holds little compared with the request would not make room for it.
        let (tag, bytes) =
            self.by_tag.first().filter(|(_, bytes)| bytes.saturating_mul(8) > self.requested)?;
        let advice = match tag {
            Tag::Activation if bytes * 2 <= self.allocated => return None,
            Tag::Activation if self.batch.is_some() => "activations hold the most: checkpoint modules",
            Tag::Activation => {
                "activations hold the most: use a smaller batch with accumulation, or checkpoint modules"
            }
            Tag::OptimizerState => {
                "optimiser state holds the most: an optimiser with less state (SGD) would fit more"
            }
            Tag::Parameter | Tag::Gradient => {
                "parameters and gradients hold the most: a smaller model, or a 16-bit one"
            }
            _ => return None,
        };
        Some(advice.to_owned())
    }

    /// Returns advice from these fields alone, the most helpful first.
    #[must_use]
    pub fn advice(&self) -> Vec<String> {
        let mut advice = self.batch_advice().into_iter().collect::<Vec<_>>();
        let size_advice = self.size_advice();
        // Parts of a request that is larger than all memory would not fit either.
        if self.requested > self.max_segment && size_advice.is_none() {
            advice.push(format!(
                "one tensor may take at most {} on this device: split the tensor",
                Bytes(self.max_segment)
            ));
            return advice;
        }
        let more = [
            size_advice,
            self.limit_advice(),
            self.fragmentation_advice(),
            self.others_advice(),
            self.tag_advice(),
        ];
        advice.extend(more.into_iter().flatten());
        if advice.is_empty() {
            advice.push("drop tensors that are no longer needed, or use a smaller batch".to_owned());
        }
        advice
    }
}

/// Formats bytes as a part of others: `9.1 of 10.0 GiB`.
#[doc(hidden)]
pub struct BytesOf(pub u64, pub u64);

impl fmt::Display for BytesOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (part, all) = (Bytes(self.0).to_string(), Bytes(self.1).to_string());
        let unit = |text: &str| text.split_once(' ').map(|(_, unit)| unit.to_owned());
        match part.split_once(' ') {
            Some((number, own)) if Some(own) == unit(&all).as_deref() => write!(f, "{number} of {all}"),
            _ => write!(f, "{part} of {all}"),
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device.as_deref().unwrap_or("the device");
        write!(f, "out of memory on {device}: ")?;
        if !self.op.is_empty() {
            write!(f, "{} ", self.op)?;
        }
        if !self.module.is_root() {
            write!(f, "in {} ", self.module)?;
        }
        let asker = if self.op.is_empty() && self.module.is_root() { "a request" } else { "asked" };
        write!(f, "{asker} for {} ({})", Bytes(self.requested), self.tag)?;
        if let Some(site) = self.site {
            write!(f, "\n  at: {}:{}", site.file(), site.line())?;
        }
        write!(f, "\n  device: ")?;
        match (self.total, self.free) {
            (Some(total), Some(free)) => write!(f, "{} free of {}", Bytes(free), Bytes(total))?,
            (Some(total), None) => write!(f, "{} in all", Bytes(total))?,
            _ => write!(f, "its driver does not report its memory")?,
        }
        if let Some(limit) = self.limit {
            write!(f, "; the pool may take {}", Bytes(limit))?;
        }
        if let Some(limit) = self.process_limit {
            let held = Bytes(self.process_reserved);
            write!(f, "; all pools of the process may take {} and hold {held}", Bytes(limit))?;
        }
        if !self.detail.is_empty() {
            write!(f, "; {}", self.detail)?;
        }
        let mut names =
            self.other_processes().take(Self::MAX_LISTED).map(DeviceProcess::describe_usage).peekable();
        let others = self.held_by_others().filter(|o| *o > 0);
        if others.is_some() || names.peek().is_some() {
            f.write_str("\n  others:")?;
            others.map_or(Ok(()), |bytes| write!(f, " {}", Bytes(bytes)))?;
            if names.peek().is_some() {
                let between = if others.is_some() { ", of that" } else { "" };
                write!(f, "{between} {}", names.collect::<Vec<_>>().join(", "))?;
            }
        }
        write!(
            f,
            "\n  pool: {} allocated + {} pending + {} cached = {} reserved",
            Bytes(self.allocated),
            Bytes(self.pending),
            Bytes(self.cached),
            Bytes(self.reserved)
        )?;
        write!(
            f,
            "\n  largest free block: {} (fragmentation {:.0} %)",
            Bytes(self.largest_free),
            self.fragmentation() * 100.0
        )?;
        if !self.by_tag.is_empty() {
            let held = self.by_tag.iter().map(|(tag, bytes)| format!("{tag} {}", Bytes(*bytes)));
            write!(f, "\n  held by: {}", held.collect::<Vec<_>>().join(", "))?;
        }
        if !self.by_module.is_empty() {
            let held = self.by_module.iter().map(|(module, bytes)| format!("{module} {}", Bytes(*bytes)));
            write!(f, "\n  modules: {}", held.collect::<Vec<_>>().join(", "))?;
        }
        for advice in self.advice() {
            write!(f, "\n  try: {advice}")?;
        }
        Ok(())
    }
}

//! The error of a request that no rung of the ladder could serve: who holds what, and what to do.

use std::fmt;
use std::panic::Location;

use super::scope::{ModulePath, Tag};
use super::stats::Bytes;

/// A request for memory that could not be served, with the state of the pool at that moment.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// Bytes that were requested.
    pub requested: u64,
    /// The operation that asked; empty if none was named.
    pub op: &'static str,
    /// The line of the program that asked: that called the operation, or the module around it.
    pub site: Option<&'static Location<'static>>,
    /// The module that asked.
    pub module: ModulePath,
    /// What the memory was for.
    pub tag: Tag,
    /// The device's name, if the pool was told.
    pub device: Option<String>,
    /// All memory of the device, where the driver tells it.
    pub total: Option<u64>,
    /// What no process uses, where the driver tells it.
    pub free: Option<u64>,
    /// The most the pool may take, if it is limited.
    pub limit: Option<u64>,
    /// The largest segment that the device gives.
    pub max_segment: u64,
    /// Bytes held by the program.
    pub allocated: u64,
    /// Bytes freed, but not passed by the device yet.
    pub pending: u64,
    /// Bytes free in the pool.
    pub cached: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// Bytes taken from the device.
    pub reserved: u64,
    /// Whether the pool grows through virtual memory, where free pages are moved to where they are needed.
    pub virtual_memory: bool,
    /// What the source said when it was asked for more; empty if it was not asked.
    pub detail: String,
    /// Bytes held for each tag, the largest first.
    pub by_tag: Vec<(Tag, u64)>,
    /// Bytes held by each module, the largest first, at most [`OutOfMemory::TOP`].
    pub by_module: Vec<(ModulePath, u64)>,
}

impl OutOfMemory {
    /// How many modules an error names.
    pub const TOP: usize = 5;

    /// The part of the free memory that a request for the largest free block could not use: 0 is one block.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.cached == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.cached as f64 }
    }

    /// What would help, most helpful first, from the figures alone.
    #[must_use]
    pub fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        if self.requested > self.max_segment {
            advice.push(format!(
                "one tensor may take at most {} on this device: split the tensor",
                Bytes(self.max_segment)
            ));
            return advice;
        }
        if let Some(limit) = self.limit.filter(|l| self.requested > *l) {
            advice.push(format!("the request alone is larger than the pool's limit of {}", Bytes(limit)));
        } else if let Some(total) = self.total.filter(|t| self.requested > *t) {
            advice.push(format!("the request alone is larger than the device's memory of {}", Bytes(total)));
        }
        let limited = self.limit.filter(|l| self.requested <= *l && self.reserved + self.requested > *l);
        match (limited, self.free) {
            (Some(_), Some(room)) if room > self.requested => advice.push(format!(
                "the limit stopped this, not the device, which has {} free: raise max_memory_mb or \
                 per_process_memory_fraction",
                Bytes(room)
            )),
            (Some(limit), None) => advice.push(format!(
                "the limit of {} stopped this: raise max_memory_mb (`Pool::set_limit`) if the device has more",
                Bytes(limit)
            )),
            _ => {}
        }
        if self.cached >= self.requested && self.fragmentation() > 0.5 {
            let cached = Bytes(self.cached);
            advice.push(if self.virtual_memory {
                format!("{cached} are free but in pieces that share pages with live tensors: free what is held longest")
            } else {
                format!(
                    "{cached} are free but in pieces: allocate what lives longest first, or set max_split_size_mb so \
                     that large blocks stay whole"
                )
            });
        }
        let others = match (self.total, self.free) {
            (Some(total), Some(free)) => total.saturating_sub(free).saturating_sub(self.reserved),
            _ => 0,
        };
        if others > self.requested && limited.is_none() {
            advice.push(format!("other programs (and drivers) hold {} of the device", Bytes(others)));
        }
        match self.by_tag.first() {
            Some((Tag::Activation, bytes)) if bytes * 2 > self.allocated => advice.push(
                "activations hold the most: use a smaller batch with accumulation, or checkpoint modules"
                    .to_owned(),
            ),
            Some((Tag::OptimizerState, _)) => {
                advice.push(
                    "optimiser state holds the most: an optimiser with less state (SGD) would fit more"
                        .to_owned(),
                );
            }
            Some((Tag::Parameter | Tag::Gradient, _)) => {
                advice.push(
                    "parameters and gradients hold the most: a smaller model, or a 16-bit one".to_owned(),
                );
            }
            _ => {}
        }
        if advice.is_empty() {
            advice.push("drop tensors that are no longer needed, or use a smaller batch".to_owned());
        }
        advice
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
            _ => write!(f, "its driver does not tell how much memory it has")?,
        }
        if let Some(limit) = self.limit {
            write!(f, "; the pool may take {}", Bytes(limit))?;
        }
        if !self.detail.is_empty() {
            write!(f, "; {}", self.detail)?;
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

//! Compile times of every kernel by a driver, the slowest first.
//!
//! A software driver compiles a kernel at its first launch, so each kernel is launched once, on zeros. Without elements
//! in its parameters, a kernel computes nothing.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use forebay::backend::null::{CardProfile, NullKernel};
use forebay::backend::{Backend, Launch, Slice};
use forebay_wgpu::WgpuBackend;
use naga::AddressSpace;

use crate::kernels;

/// Bytes of each binding. A kernel may read the first elements of an operand before it compares their number.
const BINDING_BYTES: u64 = 1 << 20;

/// Time of one kernel's compilation and first launch.
#[derive(Clone, Debug)]
pub struct CompileTime {
    /// Template and parameters of the kernel.
    pub label: String,
    /// Time until the first launch has ended.
    pub time: Duration,
}

/// Compile times of kernels, the longest first.
#[derive(Clone, Debug, Default)]
pub struct CompileTimes {
    /// All kernels.
    pub kernels: Vec<CompileTime>,
}

impl CompileTimes {
    /// Sums the times of a template's kernels, and counts them; the longest sum first.
    #[must_use]
    pub fn by_template(&self) -> Vec<(String, usize, Duration)> {
        let mut sums: Vec<(String, usize, Duration)> = Vec::new();
        for kernel in &self.kernels {
            let template = kernel.label.split(' ').next().unwrap_or_default();
            match sums.iter_mut().find(|(name, ..)| name == template) {
                Some((_, count, sum)) => (*count, *sum) = (*count + 1, *sum + kernel.time),
                None => sums.push((template.to_owned(), 1, kernel.time)),
            }
        }
        sums.sort_by_key(|(.., sum)| std::cmp::Reverse(*sum));
        sums
    }
}

/// Number of rows of each table.
const SHOWN: usize = 25;

impl fmt::Display for CompileTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>9}  kernel", "ms")?;
        for kernel in self.kernels.iter().take(SHOWN) {
            writeln!(f, "{:>9.1}  {}", milliseconds(kernel.time), kernel.label)?;
        }
        writeln!(f, "\n{:>9}  {:>7}  template", "ms", "kernels")?;
        for (template, count, sum) in self.by_template().iter().take(SHOWN) {
            writeln!(f, "{:>9.1}  {count:>7}  {template}", milliseconds(*sum))?;
        }
        let sum = self.kernels.iter().map(|kernel| kernel.time).sum();
        write!(f, "{:>9.1}  {:>7}  all", milliseconds(sum), self.kernels.len())
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Compiles the kernels of the catalog and of the golden calls in the folder `golden` on wgpu's first device. `filters`
/// selects kernels whose label contains one of them. A driver's own cache makes the times of a second run shorter.
///
/// # Errors
/// There is no device, or a kernel does not compile.
pub fn measure(golden: &Path, filters: &[String]) -> Result<CompileTimes> {
    let backend = WgpuBackend::open(0)?;
    let info = backend.info().clone();
    let profile = CardProfile {
        features: info.features,
        is_software: info.software,
        limits: info.limits,
        ..CardProfile::default()
    };
    let mut kernels = kernels::collect_kernels_on(profile, golden)?;
    let mut seen = BTreeSet::new();
    kernels.retain(|kernel| {
        let is_selected = filters.is_empty() || filters.iter().any(|f| kernel.label.contains(f.as_str()));
        is_selected && seen.insert(kernel.wgsl.clone())
    });
    let memory: Vec<Slice> = (0..info.limits.max_bindings)
        .map(|_| {
            let segment = backend.alloc_segment(BINDING_BYTES)?;
            Ok(Slice { segment, offset: 0, bytes: BINDING_BYTES })
        })
        .collect::<Result<_>>()?;
    let mut times = CompileTimes::default();
    for kernel in &kernels {
        let time = time_first_launch(&backend, kernel, &memory).with_context(|| kernel.label.clone())?;
        times.kernels.push(CompileTime { label: kernel.label.clone(), time });
    }
    times.kernels.sort_by_key(|kernel| std::cmp::Reverse(kernel.time));
    Ok(times)
}

/// Compiles a kernel and launches one workgroup of it.
fn time_first_launch(backend: &Arc<dyn Backend>, kernel: &NullKernel, memory: &[Slice]) -> Result<Duration> {
    let module = naga::front::wgsl::parse_str(&kernel.wgsl)?;
    let in_space = |space: fn(AddressSpace) -> bool| {
        module.global_variables.iter().filter(move |(_, global)| space(global.space))
    };
    let bindings = in_space(|space| matches!(space, AddressSpace::Storage { .. })).count();
    let params = in_space(|space| space == AddressSpace::Uniform)
        .map(|(_, global)| module.types[global.ty].inner.size(module.to_ctx()))
        .sum::<u32>();
    let params = vec![0; params as usize];
    let start = Instant::now();
    let id = kernels::with_source(kernel, |source| backend.compile(source))?;
    backend.wait_compiled(id)?;
    backend.launch(&Launch {
        kernel: id,
        bindings: &memory[..bindings],
        params: &params,
        groups: [1, 1, 1],
    })?;
    let fence = backend.record_fence()?;
    backend.wait_fence(fence)?;
    Ok(start.elapsed())
}

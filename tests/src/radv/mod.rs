//! Compiles every kernel with RADV, Mesa's driver of AMD cards, on its null device.
//!
//! `RADV_FORCE_FAMILY` lets the driver compile for a card that is not present. It is read once in a process, so each
//! card has a process of its own. The process writes an event in JSON to its output for each kernel.

#[cfg_attr(not(target_os = "linux"), path = "driver_absent.rs")]
mod driver;
mod page;

use std::collections::HashSet;
use std::fmt;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::ScopedJoinHandle;

use anyhow::{Context, Result, bail};
use forebay::backend::null::CardProfile;
use forebay_shaders::TEMPLATES;
use forebay_wgpu::offline;
use serde::{Deserialize, Serialize};

use crate::{kernels, lowering};

/// Name of the size of a kernel's subgroups among the statistics.
const SUBGROUP_SIZE: &str = "Subgroup size";

/// A card that RADV imitates.
#[derive(Clone, Copy, Debug)]
pub struct RadvCard {
    /// Name of the chip.
    pub family: &'static str,
    /// Name of the chip in older versions of Mesa, if that is another one.
    old_family: Option<&'static str>,
    /// Generation.
    pub generation: &'static str,
    /// A product with this chip.
    pub product: &'static str,
}

/// Cards of the generations since 2017 that Debian's Mesa knows.
pub const CARDS: [RadvCard; 4] = [
    RadvCard { family: "vega10", old_family: None, generation: "GFX9", product: "Vega 64" },
    RadvCard { family: "navi10", old_family: None, generation: "GFX10", product: "RX 5700" },
    RadvCard { family: "navi21", old_family: None, generation: "GFX10.3", product: "RX 6800" },
    RadvCard { family: "navi31", old_family: Some("gfx1100"), generation: "GFX11", product: "RX 7900" },
];

/// Templates whose tiles, vectors or workgroups are tuned. Their kernels must not spill registers. Others must not
/// spill vector registers, whose memory is slow; scalar registers are spilled to vector registers.
const TUNED: [&str; 15] = [
    "attention",
    "col2im",
    "conv",
    "copy",
    "cross_entropy",
    "fused_pointwise",
    "im2col",
    "layer_norm",
    "matmul",
    "norm",
    "norm_weight_grad",
    "optim",
    "reduce",
    "softmax",
    "splitk_reduce",
];

/// The driver's statistics of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct KernelStats {
    vgprs: u64,
    sgprs: u64,
    /// Vector registers that are spilled to memory.
    spilled_vgprs: u64,
    /// Scalar registers that are spilled to vector registers.
    spilled_sgprs: u64,
    /// Bytes of workgroup memory.
    lds: u64,
    /// Bytes of memory of an invocation for spilled registers, and for arrays that are not in registers.
    scratch: u64,
    /// Subgroups that a SIMD unit holds at once.
    waves: u64,
    /// Invocations of a subgroup.
    subgroup: u64,
}

impl KernelStats {
    /// Reads the statistics of a pipeline; `None` if the driver has other ones.
    fn from_driver(statistics: &[(String, u64)]) -> Option<Self> {
        let get = |name: &str| statistics.iter().find(|(found, _)| found == name).map(|(_, value)| *value);
        Some(Self {
            vgprs: get("VGPRs")?,
            sgprs: get("SGPRs")?,
            spilled_vgprs: get("Spilled VGPRs")?,
            spilled_sgprs: get("Spilled SGPRs")?,
            lds: get("LDS size")?,
            scratch: get("Scratch size")?,
            waves: get("Subgroups per SIMD")?,
            subgroup: get(SUBGROUP_SIZE)?,
        })
    }

    fn spills(&self) -> bool {
        self.spilled_vgprs + self.spilled_sgprs > 0
    }

    /// Reports whether these spills are an error in a kernel of this label.
    fn is_problem(&self, label: &str) -> bool {
        self.spilled_vgprs > 0 || (self.spilled_sgprs > 0 && is_tuned(label))
    }
}

impl fmt::Display for KernelStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} VGPRs, {} SGPRs, {} and {} of them spilled, {} bytes of LDS, {} of scratch, {} waves of {}",
            self.vgprs,
            self.sgprs,
            self.spilled_vgprs,
            self.spilled_sgprs,
            self.lds,
            self.scratch,
            self.waves,
            self.subgroup
        )
    }
}

/// Line of JSON that the process of a card writes.
#[derive(Debug, Serialize, Deserialize)]
enum Event {
    /// Name and version of the driver.
    Driver(String),
    /// Label of the kernel that is compiled next.
    Start(String),
    Compiled(KernelStats),
    Failed(String),
}

impl Event {
    /// Returns the event of a kernel from the driver's statistics, or from the error of its compilation.
    fn from_result(compiled: Result<Vec<(String, u64)>, String>) -> Self {
        match compiled.map(|statistics| KernelStats::from_driver(&statistics).ok_or(statistics)) {
            Ok(Ok(stats)) => Self::Compiled(stats),
            Ok(Err(statistics)) => Self::Failed(format!("the driver has other statistics: {statistics:?}")),
            Err(error) => Self::Failed(error),
        }
    }
}

/// Results for one card.
#[derive(Clone, Debug, Default)]
struct CardReport {
    driver: String,
    kernels: Vec<(String, KernelStats)>,
    /// Labels and messages.
    failures: Vec<(String, String)>,
}

/// Choice of kernels and cards.
#[derive(Clone, Debug)]
pub struct RadvOptions<'a> {
    /// Families of the cards; empty for all of [`CARDS`].
    pub families: Vec<String>,
    /// If true, compiles only kernels of tuned templates.
    pub tuned: bool,
    /// If true, prints the statistics of each kernel.
    pub verbose: bool,
    /// Only kernels whose label contains one of these; empty for all.
    pub filters: Vec<String>,
    /// Folder of the golden calls.
    pub golden: &'a Path,
}

/// Compiles kernels for each card, and prints a summary. Returns the page for the book.
///
/// # Errors
/// RADV is not found or does not know a card. A kernel does not compile, or spills registers (scalar ones only count in
/// tuned kernels).
pub fn check(options: &RadvOptions<'_>) -> Result<String> {
    let cards = select_cards(&options.families)?;
    let reports: Vec<(RadvCard, CardReport)> = std::thread::scope(|scope| {
        let running: Vec<_> =
            cards.iter().map(|card| (*card, scope.spawn(move || compile_for_card(card, options)))).collect();
        let join = |(card, thread): (RadvCard, ScopedJoinHandle<'_, Result<CardReport>>)| {
            let report = thread.join().unwrap_or_else(|_| bail!("the thread of {} panicked", card.family))?;
            Ok((card, report))
        };
        running.into_iter().map(join).collect::<Result<_>>()
    })?;
    let mut problems = 0;
    for (card, report) in &reports {
        problems += print_report(card, report, options.verbose);
    }
    let total: usize = reports.iter().map(|(_, report)| report.kernels.len() + report.failures.len()).sum();
    println!("RADV: {} passed, {problems} failed", total.saturating_sub(problems));
    if problems > 0 {
        bail!("{problems} kernels do not compile, or spill registers");
    }
    Ok(page::render(&reports))
}

fn select_cards(families: &[String]) -> Result<Vec<RadvCard>> {
    if families.is_empty() {
        return Ok(CARDS.to_vec());
    }
    let find = |family: &String| {
        let known = CARDS.iter().find(|card| card.family == family).copied();
        known.with_context(|| {
            format!("no card `{family}`; expected some of {}", CARDS.map(|c| c.family).join(", "))
        })
    };
    families.iter().map(find).collect()
}

/// Compiles for one card in a process of its own.
fn compile_for_card(card: &RadvCard, options: &RadvOptions<'_>) -> Result<CardReport> {
    let mut output = run_child(card.family, options)?;
    if let Some(old) = card.old_family.filter(|_| is_unknown_family(&output)) {
        output = run_child(old, options)?;
    }
    read_output(card, &output)
}

/// Runs the process that compiles for one card.
fn run_child(family: &str, options: &RadvOptions<'_>) -> Result<Output> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["radv", "--child", "--dir"]).arg(options.golden).args(&options.filters);
    if options.tuned {
        command.arg("--tuned");
    }
    command
        .env("RADV_FORCE_FAMILY", family)
        .env("MESA_SHADER_CACHE_DISABLE", "true")
        .env("WGPU_BACKEND", "vulkan")
        .env("WGPU_ADAPTER_NAME", "RADV")
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .output()
        .context("the process of a card cannot be started")
}

/// Reports whether RADV ended because it does not know the name of the card.
fn is_unknown_family(output: &Output) -> bool {
    !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("Unknown family")
}

/// Compiles kernels in this process, and writes the events that [`check`] reads.
///
/// # Errors
/// RADV is not found or refuses the device, or an operation fails on the null device.
pub fn compile_in_child(options: &RadvOptions<'_>) -> Result<()> {
    let adapter = offline::find_adapter(0)?;
    let (info, max_immediate_bytes) = (adapter.info.clone(), adapter.max_immediate_bytes);
    let device = driver::CompileDevice::open(adapter)?;
    let output = std::io::stdout();
    let write = |event: Event| {
        writeln!(output.lock(), "{}", serde_json::to_string(&event)?).map_err(anyhow::Error::from)
    };
    write(Event::Driver(info.driver.clone()))?;
    let profile = CardProfile { features: info.features, limits: info.limits, ..CardProfile::default() };
    let mut seen = HashSet::new();
    for kernel in kernels::collect_kernels_on(profile, options.golden)? {
        let is_wanted = (!options.tuned || is_tuned(&kernel.label))
            && (options.filters.is_empty()
                || options.filters.iter().any(|f| kernel.label.contains(f.as_str())));
        if !is_wanted || !seen.insert(kernels::with_source(&kernel, |source| source.to_content())) {
            continue;
        }
        write(Event::Start(kernel.label.clone()))?;
        let compiled =
            lowering::lower(&kernel, &info.limits, max_immediate_bytes).and_then(|(module, checked)| {
                device.compile(&module, &checked, &kernel.entry_point, kernel.zero_workgroup_memory)
            });
        write(Event::from_result(compiled))?;
    }
    Ok(())
}

/// Returns the template of a kernel. The label of a fused chain begins with an operation instead.
fn template(label: &str) -> &str {
    let first = label.split_whitespace().next().unwrap_or_default();
    match TEMPLATES.iter().any(|(name, _)| *name == first) {
        true => first,
        false => "fused_pointwise",
    }
}

fn is_tuned(label: &str) -> bool {
    TUNED.contains(&template(label))
}

/// Reads the events of a card's process.
fn read_output(card: &RadvCard, output: &Output) -> Result<CardReport> {
    let report = read_events(&String::from_utf8_lossy(&output.stdout));
    if output.status.success() {
        return report.with_context(|| format!("RADV for {}", card.family));
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    // A panic and the driver print lines without the prefix of this program's errors. A backtrace may follow either.
    let named = errors.lines().find_map(|line| line.strip_prefix("Error: "));
    let last = errors.lines().rev().find(|line| !line.trim().is_empty());
    let why = named.or(last).unwrap_or("it printed nothing");
    let place = report.map_or_else(|error| format!("; {error}"), |_| String::new());
    bail!("RADV for {}: the process ended with {}: {why}{place}", card.family, output.status);
}

/// Collects events. Other lines are ignored: operations and drivers may print, too.
fn read_events(text: &str) -> Result<CardReport> {
    let mut report = CardReport::default();
    let mut current = None;
    for event in text.lines().filter_map(|line| serde_json::from_str(line).ok()) {
        match event {
            Event::Driver(driver) => report.driver = driver,
            Event::Start(label) => current = Some(label),
            Event::Compiled(stats) => report.kernels.extend(current.take().map(|label| (label, stats))),
            Event::Failed(why) => report.failures.extend(current.take().map(|label| (label, why))),
        }
    }
    match current {
        Some(label) => bail!("it did not finish `{label}`"),
        None => Ok(report),
    }
}

/// Prints the results of a card; returns the number of problems.
fn print_report(card: &RadvCard, report: &CardReport, verbose: bool) -> usize {
    for (label, why) in &report.failures {
        println!("FAILED {} {label}: {}", card.family, why.replace('\n', " "));
    }
    let mut problems = report.failures.len();
    let mut spills = 0;
    for (label, stats) in &report.kernels {
        if stats.spills() {
            let is_problem = stats.is_problem(label);
            let word = if is_problem { "FAILED" } else { "spills" };
            println!("{word} {} {label}: {stats}", card.family);
            spills += 1;
            problems += usize::from(is_problem);
        } else if verbose {
            println!("{} {label}: {stats}", card.family);
        }
    }
    let tuned = report.kernels.iter().filter(|(label, _)| is_tuned(label)).count();
    println!(
        "{} ({}): {} kernels compiled, {tuned} of them tuned; {spills} spill registers; {} do not compile",
        card.family,
        report.driver,
        report.kernels.len(),
        report.failures.len()
    );
    if report.kernels.is_empty() {
        println!("FAILED {}: no kernel was compiled", card.family);
        problems += 1;
    }
    problems
}

#[cfg(test)]
mod tests {
    use forebay::backend::null::NullKernel;

    use super::*;

    fn stats(values: [u64; 8]) -> KernelStats {
        let names = [
            "VGPRs",
            "SGPRs",
            "Spilled VGPRs",
            "Spilled SGPRs",
            "LDS size",
            "Scratch size",
            "Subgroups per SIMD",
            SUBGROUP_SIZE,
        ];
        let named: Vec<_> = names.map(str::to_owned).into_iter().zip(values).collect();
        assert_eq!(KernelStats::from_driver(&named[1..]), None, "a statistic is missing");
        KernelStats::from_driver(&named).unwrap()
    }

    fn written(events: &[Event]) -> String {
        let lines: Vec<_> = events.iter().map(|event| serde_json::to_string(event).unwrap()).collect();
        format!("a driver's own line\n{}\n", lines.join("\n"))
    }

    fn start(label: &str) -> Event {
        Event::Start(label.to_owned())
    }

    #[test]
    fn spills_and_failures_are_problems() {
        let text = written(&[
            Event::Driver("Vulkan, radv, Mesa 1".to_owned()),
            start("matmul f32"),
            Event::Compiled(stats([24, 32, 0, 2, 4096, 0, 8, 64])),
            start("svd f32"),
            Event::Failed("not a kernel".to_owned()),
            start("mul add exp f32"),
            Event::Compiled(stats([8, 16, 0, 0, 0, 0, 10, 64])),
            start("scan f64"),
            Event::Compiled(stats([8, 16, 0, 4, 0, 0, 10, 64])),
        ]);
        let report = read_events(&text).unwrap();
        assert_eq!(report.driver, "Vulkan, radv, Mesa 1");
        assert_eq!(report.failures, [("svd f32".to_owned(), "not a kernel".to_owned())]);
        assert_eq!(report.kernels.len(), 3);
        assert_eq!(
            print_report(&CARDS[0], &report, true),
            2,
            "a tuned kernel spills, and another one failed"
        );
        let in_memory = stats([256, 16, 1, 0, 0, 16, 1, 64]);
        assert!(in_memory.is_problem("scan f64"), "no kernel may spill to memory");
        assert_eq!(print_report(&CARDS[0], &CardReport::default(), false), 1, "nothing was compiled");
    }

    #[test]
    fn a_broken_kernel_is_a_failure() {
        let kernel = NullKernel {
            label: "svd f32".into(),
            wgsl: "@compute @workgroup_size(64) fn main() { missing = 1.0; }".into(),
            entry_point: "main".into(),
            overrides: Vec::new(),
            zero_workgroup_memory: false,
        };
        let lowered = lowering::lower(&kernel, &CardProfile::default().limits, 128);
        let event = Event::from_result(lowered.map(|_| Vec::new()));
        let report = read_events(&written(&[start(&kernel.label), event])).unwrap();
        assert!(report.failures[0].1.contains("missing"), "{:?}", report.failures);
        assert_eq!(print_report(&CARDS[3], &report, false), 2, "the kernel failed, and none was compiled");
        let other = Event::from_result(Ok(vec![("registers".to_owned(), 4)]));
        assert!(matches!(other, Event::Failed(why) if why.contains("other statistics")));
    }

    #[test]
    fn a_process_that_ends_early_names_its_kernel() {
        let error = read_events(&written(&[start("matmul f32")])).unwrap_err().to_string();
        assert!(error.contains("did not finish `matmul f32`"), "{error}");
    }

    #[test]
    fn tuned_templates_exist() {
        for name in TUNED {
            assert!(TEMPLATES.iter().any(|(known, _)| *known == name), "{name}");
        }
        assert_eq!(template("mul add exp f32"), "fused_pointwise");
    }
}

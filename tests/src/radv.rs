//! Compiles every kernel with RADV, Mesa's driver of AMD cards, on its null device.
//!
//! `RADV_FORCE_FAMILY` lets the driver compile for a card that is not present, and `RADV_DEBUG=shaderstats` lets it
//! print the registers and the occupancy of each kernel. Both are read once in a process, so each card has a process
//! of its own. It names a kernel on its error stream before the driver prints the statistics there.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::ScopedJoinHandle;

use anyhow::{Context, Result, bail};
use forebay::backend::Backend;
use forebay::backend::null::CardProfile;
use forebay_wgpu::offline;

use crate::kernels;

/// A card that RADV imitates.
#[derive(Clone, Copy, Debug)]
pub struct RadvCard {
    /// Name of the chip.
    pub family: &'static str,
    /// Name of the chip in older versions of Mesa, if that is another one.
    old_family: Option<&'static str>,
    /// Generation, with a card that has it.
    pub generation: &'static str,
}

/// Cards of the generations since 2017 that Debian's Mesa knows.
pub const CARDS: [RadvCard; 4] = [
    RadvCard { family: "vega10", old_family: None, generation: "GFX9 (Vega 64)" },
    RadvCard { family: "navi10", old_family: None, generation: "GFX10 (RX 5700)" },
    RadvCard { family: "navi21", old_family: None, generation: "GFX10.3 (RX 6800)" },
    RadvCard { family: "navi31", old_family: Some("gfx1100"), generation: "GFX11 (RX 7900)" },
];

/// Templates whose tiles, vectors or workgroups are tuned. Their kernels must not spill registers.
const TUNED: [&str; 16] = [
    "attention",
    "attention_rows",
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

/// Beginning of the line that names a kernel before the driver prints its statistics.
const KERNEL_MARK: &str = "forebay kernel: ";
/// Beginning of the line that names a kernel that does not compile.
const FAILURE_MARK: &str = "forebay failure: ";
/// Beginning of the line that describes the driver.
const DRIVER_MARK: &str = "forebay driver: ";

/// Statistics that RADV prints of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KernelStats {
    vgprs: u64,
    sgprs: u64,
    /// Spilled registers, scalar and vector.
    spilled: u64,
    /// Bytes of workgroup memory.
    lds: u64,
    /// Bytes of memory for arrays of an invocation that are not in registers.
    scratch: u64,
    /// Subgroups that a SIMD unit holds at once.
    waves: u64,
}

/// Results for one card.
#[derive(Clone, Debug, Default)]
struct CardReport {
    driver: String,
    kernels: Vec<(String, KernelStats)>,
    failures: BTreeMap<String, String>,
}

/// Choice of kernels and cards.
#[derive(Clone, Debug)]
pub struct RadvOptions<'a> {
    /// Families of the cards; empty for all of [`CARDS`].
    pub families: Vec<String>,
    /// If true, compiles only kernels of tuned templates.
    pub tuned: bool,
    /// Only kernels whose label contains one of these; empty for all.
    pub filters: Vec<String>,
    /// Folder of the golden calls.
    pub golden: &'a Path,
}

/// Compiles kernels for each card, and prints a summary. Returns the page for the book.
///
/// # Errors
/// RADV is not found or does not know a card, a kernel does not compile, or a tuned kernel spills registers.
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
        problems += print_report(card, report);
    }
    if problems > 0 {
        bail!("{problems} problems with RADV");
    }
    Ok(render_page(&reports, options.tuned))
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
        .env("RADV_DEBUG", "shaderstats")
        // A cached kernel has no statistics.
        .env("MESA_SHADER_CACHE_DISABLE", "true")
        // Kernels of release builds.
        .env("FOREBAY_BOUNDS_CHECKS", "0")
        .env("WGPU_BACKEND", "vulkan")
        .env("WGPU_ADAPTER_NAME", "RADV")
        .stdin(Stdio::null())
        .output()
        .context("the process of a card cannot be started")
}

/// Reports whether RADV ended because it does not know the name of the card.
fn is_unknown_family(output: &Output) -> bool {
    !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("Unknown family")
}

/// Compiles kernels in this process. [`check`] reads what this function and the driver print.
///
/// # Errors
/// RADV does not open, or an operation fails on the null device.
pub fn compile_in_child(options: &RadvOptions<'_>) -> Result<()> {
    let backend = offline::open_unprobed(0)?;
    let info = backend.info();
    eprintln!("{DRIVER_MARK}{}", info.driver);
    let profile = CardProfile { features: info.features, limits: info.limits, ..CardProfile::default() };
    let mut seen = HashSet::new();
    for kernel in kernels::collect_kernels_on(profile, options.golden)? {
        let is_wanted = (!options.tuned || is_tuned(&kernel.label))
            && (options.filters.is_empty()
                || options.filters.iter().any(|f| kernel.label.contains(f.as_str())));
        if !is_wanted || !seen.insert(kernels::with_source(&kernel, |source| source.to_content())) {
            continue;
        }
        eprintln!("{KERNEL_MARK}{}", kernel.label);
        let compiled = kernels::with_source(&kernel, |source| backend.compile(source));
        // One by one, because the statistics do not name their kernel.
        if let Err(error) = compiled.and_then(|id| backend.wait_compiled(id)) {
            eprintln!("{FAILURE_MARK}{}", error.to_string().replace('\n', " "));
        }
    }
    Ok(())
}

/// Returns the template of a kernel.
fn template(label: &str) -> &str {
    label.split_whitespace().next().unwrap_or_default()
}

fn is_tuned(label: &str) -> bool {
    TUNED.contains(&template(label))
}

/// Reads the error stream of a card's process.
fn read_output(card: &RadvCard, output: &Output) -> Result<CardReport> {
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it printed nothing");
        bail!("RADV for {}: the process ended with {}: {last}", card.family, output.status);
    }
    parse_stats(&text)
}

/// Parses the marks of [`compile_in_child`] and the driver's statistics between them.
fn parse_stats(text: &str) -> Result<CardReport> {
    let mut report = CardReport::default();
    let mut has_stats = true;
    for line in text.lines() {
        if let Some(driver) = line.strip_prefix(DRIVER_MARK) {
            driver.clone_into(&mut report.driver);
        } else if let Some(label) = line.strip_prefix(KERNEL_MARK) {
            if !has_stats {
                bail!(
                    "RADV printed no statistics before `{label}`; does this Mesa know RADV_DEBUG=shaderstats?"
                );
            }
            report.kernels.push((label.to_owned(), KernelStats::default()));
            has_stats = false;
        } else if let Some(why) = line.strip_prefix(FAILURE_MARK) {
            if let Some((label, _)) = report.kernels.pop() {
                report.failures.insert(label, why.to_owned());
            }
            has_stats = true;
        } else if let (Some((_, stats)), Some((name, value))) =
            (report.kernels.last_mut(), line.trim().split_once(": "))
        {
            let digits = value.split_whitespace().next().unwrap_or_default();
            let Ok(value) = digits.parse::<u64>() else { continue };
            has_stats = true;
            match name {
                "VGPRS" | "VGPRs" => stats.vgprs = value,
                "SGPRS" | "SGPRs" => stats.sgprs = value,
                "Spilled SGPRs" | "Spilled VGPRs" => stats.spilled += value,
                "LDS" | "LDS size" => stats.lds = value,
                "Scratch" | "Scratch size" => stats.scratch = value,
                "Max Waves" | "Max waves" | "Subgroups per SIMD" => stats.waves = value,
                _ => {}
            }
        }
    }
    match (has_stats, report.kernels.last()) {
        (false, Some((label, _))) => bail!("RADV printed no statistics of `{label}`"),
        _ => Ok(report),
    }
}

/// Prints the results of a card; returns the number of problems.
fn print_report(card: &RadvCard, report: &CardReport) -> usize {
    for (label, why) in &report.failures {
        println!("FAILED {} {label}: {why}", card.family);
    }
    let spilling: Vec<_> = report.kernels.iter().filter(|(_, stats)| stats.spilled > 0).collect();
    let mut problems = report.failures.len();
    for (label, stats) in &spilling {
        let is_tuned = is_tuned(label);
        let word = if is_tuned { "SPILLS" } else { "spills" };
        println!("{word} {} {label}: {} registers", card.family, stats.spilled);
        problems += usize::from(is_tuned);
    }
    let count = report.kernels.len();
    let (tuned, spills) = (report.kernels.iter().filter(|(l, _)| is_tuned(l)).count(), spilling.len());
    println!(
        "{} ({}): {count} kernels compiled, {tuned} of them tuned; {spills} spill registers; {} failed",
        card.family,
        report.driver,
        report.failures.len()
    );
    problems
}

/// Renders the page of the book: a table of tuned kernels for each card.
fn render_page(reports: &[(RadvCard, CardReport)], tuned: bool) -> String {
    let driver = reports.first().map_or("", |(_, report)| &report.driver);
    let mut page = format!(
        "# AMD cards\n\n\
         `cargo xtask kernels --radv{} --page FILE` writes this page. RADV, Mesa's driver of AMD\n\
         cards, compiles every kernel on its null device, so no card is needed. A kernel that does not compile and a\n\
         tuned kernel that spills registers are errors.\n\n\
         Driver: {driver}.\n\n\
         Columns: the most vector and scalar registers of a kernel, the sum of spilled registers, the most workgroup\n\
         memory (LDS) and scratch memory in bytes, and the fewest and most waves that a SIMD unit holds.\n",
        if tuned { " --tuned" } else { "" }
    );
    for (card, report) in reports {
        let _ = write!(
            page,
            "\n## {}, `{}`\n\n\
             | template | kernels | VGPRs | SGPRs | spilled | LDS | scratch | waves |\n\
             | --- | --: | --: | --: | --: | --: | --: | --: |\n",
            card.generation, card.family
        );
        let mut groups: BTreeMap<&str, Vec<&KernelStats>> = BTreeMap::new();
        let (tuned, others): (Vec<_>, Vec<_>) = report.kernels.iter().partition(|(label, _)| is_tuned(label));
        for (label, stats) in &tuned {
            groups.entry(template(label)).or_default().push(stats);
        }
        let mut rows: Vec<(String, Vec<&KernelStats>)> =
            groups.into_iter().map(|(name, stats)| (format!("`{name}`"), stats)).collect();
        if !others.is_empty() {
            rows.push(("others".to_owned(), others.iter().map(|(_, stats)| stats).collect()));
        }
        for (name, stats) in rows {
            let maximum = |of: fn(&KernelStats) -> u64| stats.iter().map(|s| of(s)).max().unwrap_or_default();
            let spilled: u64 = stats.iter().map(|s| s.spilled).sum();
            let fewest = stats.iter().map(|s| s.waves).min().unwrap_or_default();
            let _ = writeln!(
                page,
                "| {name} | {} | {} | {} | {spilled} | {} | {} | {fewest} to {} |",
                stats.len(),
                maximum(|s| s.vgprs),
                maximum(|s| s.sgprs),
                maximum(|s| s.lds),
                maximum(|s| s.scratch),
                maximum(|s| s.waves)
            );
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "SGPRs: 99\nforebay driver: Vulkan, radv, Mesa 1\nforebay kernel: matmul f32\n\
                          *** SHADER STATS ***\nSGPRs: 32\nVGPRs: 24\nSpilled SGPRs: 1\nSpilled VGPRs: 2\n\
                          Code size: 100\nLDS size: 4096\nScratch size: 8\nSubgroups per SIMD: 16\n\
                          forebay kernel: svd f32\nforebay failure: svd f32: not a kernel\n";

    #[test]
    fn statistics_belong_to_the_kernel_before_them() {
        let report = parse_stats(OUTPUT).unwrap();
        let expected = KernelStats { vgprs: 24, sgprs: 32, spilled: 3, lds: 4096, scratch: 8, waves: 16 };
        assert_eq!(report.kernels, [("matmul f32".to_owned(), expected)]);
        assert_eq!(report.driver, "Vulkan, radv, Mesa 1");
        assert_eq!(report.failures["svd f32"], "svd f32: not a kernel");
        assert_eq!(print_report(&CARDS[0], &report), 2, "a tuned kernel spills, and another one failed");
        let page = render_page(&[(CARDS[0], report)], false);
        assert!(page.contains("| `matmul` | 1 | 24 | 32 | 3 | 4096 | 8 | 16 to 16 |"), "{page}");
    }

    #[test]
    fn a_driver_without_statistics_is_an_error() {
        let text = "forebay kernel: matmul f32\nforebay kernel: softmax f32\n";
        assert!(parse_stats(text).is_err_and(|error| error.to_string().contains("softmax f32")));
    }
}

//! `cargo xtask browser`: builds the browser page and serves it, or tests pages in headless Chromium.
//!
//! The test also lets Chromium check the WGSL of every kernel, because browsers refuse more than naga does.
//!
//! The pages and the tool that makes their bindings are crates outside of the workspace, whose builds need neither.

use crate::environment::Environment;
use crate::process;
use crate::setup::{Dependency, Setup, rust_std};
use crate::tally::Tally;
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Target of the pages.
pub(crate) const WASM_TARGET: &str = "wasm32-unknown-unknown";
/// Steps of the test.
const STEPS: usize = 20;
/// Largest difference of a loss from that of a native run, relative to the native loss. Both runs compute in f32, and
/// the compilers of their shaders order sums differently.
const MAX_DIFFERENCE: f64 = 1e-3;
/// Arguments of Chromium for a page without a window. A container has no sandbox and little shared memory.
const CHROMIUM_ARGS: [&str; 7] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
];

/// Page that trains.
const TRAINING: PageSource = PageSource { folder: "examples/browser", module: "forebay_browser" };
/// Page that runs topics of the conformance suite.
const CONFORMANCE: PageSource = PageSource { folder: "tests/browser", module: "browser_conformance" };

/// Builds the page and serves it until the program is ended.
pub(crate) fn serve(workspace: &Workspace, setup: &Setup, port: u16) -> Result<bool> {
    let builder = PageBuilder::new(workspace, setup.ensure_std(WASM_TARGET)?)?;
    let page = builder.build(&TRAINING)?;
    print_size(&page)?;
    process::run_foreground(builder.tool_command("serve").arg(page).arg(port.to_string()))
}

/// Runs both pages in headless Chromium. The first trains some steps, whose losses are compared with those of a native
/// run, and classifies a drawing. The second checks the WGSL of all kernels, and runs topics of the conformance suite.
/// The native programs must be built.
pub(crate) fn test(workspace: &Workspace, setup: &Setup) -> Result<bool> {
    let (std, chromium) = (setup.ensure_std(WASM_TARGET)?, setup.ensure_chromium()?);
    let adapter = setup.ensure_swiftshader()?;
    let start = Instant::now();
    let builder = PageBuilder::new(workspace, std)?;
    let (training, conformance) = (builder.build(&TRAINING)?, builder.build(&CONFORMANCE)?);
    println!("the pages were built in {:.0} s", start.elapsed().as_secs_f64());
    print_size(&training)?;
    write_kernels(workspace, &conformance)?;

    let start = Instant::now();
    let trained = run_page(&builder, &chromium, &training, &format!("?steps={STEPS}"))?;
    let tested = run_page(&builder, &chromium, &conformance, "")?;
    println!("the pages ran in {:.0} s", start.elapsed().as_secs_f64());

    let losses = parse_losses(&trained);
    let mut tally = Tally::from_bool(compare_losses(&losses, &run_native(workspace, &adapter)?));
    tally += Tally::from_bool(has_classified(&trained));
    // The page posts one line for the kernels and one for the topics. A module that ends early posts fewer.
    let counts = tested.lines().filter_map(Tally::parse_line).collect::<Vec<_>>();
    tally += Tally::from_bool(counts.len() == 2);
    counts.into_iter().for_each(|count| tally += count);
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    Ok(tally.failed == 0)
}

/// Reports whether the page made all steps, with losses close to the native ones.
fn compare_losses(page: &[f64], native: &[f64]) -> bool {
    if [page.len(), native.len()] != [STEPS, STEPS] {
        println!("FAILED  the page made {} steps, the native run {}, of {STEPS}", page.len(), native.len());
        return false;
    }
    let differences = page.iter().zip(native).map(|(page, native)| ((page - native) / native).abs());
    let worst =
        differences.fold(0.0, |worst: f64, next| if next > worst || next.is_nan() { next } else { worst });
    println!("largest relative difference from the native losses: {worst:.1e}, at most {MAX_DIFFERENCE:.0e}");
    // A comparison with NaN is false.
    let is_close = worst <= MAX_DIFFERENCE;
    if !is_close {
        println!("FAILED  the losses of the page differ from the native ones");
    }
    is_close
}

/// Reports whether the page classified the drawing that its test makes.
fn has_classified(text: &str) -> bool {
    let is_classified = text.lines().any(|line| line.starts_with("classified "));
    if !is_classified {
        println!("FAILED  the page has classified no drawing");
    }
    is_classified
}

/// Opens a page in Chromium, and returns the text that the page posts.
fn run_page(builder: &PageBuilder<'_>, chromium: &Dependency, page: &Path, query: &str) -> Result<String> {
    let mut command = builder.tool_command("test");
    command.arg(page).arg(query).arg(&chromium.description).args(CHROMIUM_ARGS);
    command.arg(format!("--user-data-dir={}", builder.target.join("profile").display()));
    chromium.environment.apply(&mut command);
    let text = process::run_captured(&mut command)?;
    text.lines().for_each(|line| println!("page: {line}"));
    Ok(text)
}

/// Package of a page.
struct PageSource {
    /// Folder of the package, from the root of the workspace.
    folder: &'static str,
    /// File name of its module.
    module: &'static str,
}

/// Builder of pages, with the tool that makes their bindings.
struct PageBuilder<'a> {
    workspace: &'a Workspace,
    std: Dependency,
    target: PathBuf,
}

impl<'a> PageBuilder<'a> {
    /// Builds the tool.
    fn new(workspace: &'a Workspace, std: Dependency) -> Result<Self> {
        let builder = Self { workspace, std, target: workspace.target_dir().join("browser") };
        let mut tool = workspace.outside_build_command("examples/browser/tool", &builder.target)?;
        if !process::run_foreground(&mut tool)? {
            bail!("the pages' tool does not build: see above");
        }
        Ok(builder)
    }

    /// Builds a page, and returns its folder.
    fn build(&self, source: &PageSource) -> Result<PathBuf> {
        let mut module = self.workspace.outside_build_command(source.folder, &self.target)?;
        module.args(["--release", "--target", WASM_TARGET]);
        if rust_std::is_source(&self.std) {
            module.arg("-Zbuild-std=std,panic_abort");
        }
        self.std.environment.apply(&mut module);
        if !process::run_foreground(&mut module)? {
            bail!("the page in {} does not build: see above", source.folder);
        }
        let page = self.target.join("pages").join(source.module);
        std::fs::create_dir_all(&page)?;
        let module = self.target.join(WASM_TARGET).join("release").join(source.module).with_extension("wasm");
        process::run_captured(self.tool_command("bindings").arg(module).arg(&page))?;
        for file in std::fs::read_dir(self.workspace.root.join(source.folder).join("page"))? {
            let file = file?;
            std::fs::copy(file.path(), page.join(file.file_name()))?;
        }
        Ok(page)
    }

    fn tool_command(&self, action: &str) -> Command {
        let mut command = Command::new(self.target.join("debug/browser-tool"));
        command.arg(action);
        command
    }
}

/// Prints the sizes of the files that a browser loads.
fn print_size(page: &Path) -> Result<()> {
    let mut total = 0;
    for file in std::fs::read_dir(page)? {
        let file = file?;
        let name = file.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".ts") {
            let bytes = file.metadata()?.len();
            println!("{name}: {bytes} bytes");
            total += bytes;
        }
    }
    println!("size of the page: {:.2} MB, data set included", total as f64 / 1e6);
    Ok(())
}

/// Writes the WGSL of every kernel to the folder of a page.
fn write_kernels(workspace: &Workspace, page: &Path) -> Result<()> {
    let mut command = workspace.program_command("forebay-conformance", Profile::Dev, &Environment::default());
    process::run_captured(command.args(["kernels", "--web"]).arg(page.join("kernels.json")))?;
    Ok(())
}

/// Returns the losses of the native program with the page's options and data.
fn run_native(workspace: &Workspace, adapter: &Dependency) -> Result<Vec<f64>> {
    let folder = workspace.target_dir().join("browser/native");
    std::fs::create_dir_all(&folder)?;
    let curve = folder.join("curve.csv");
    let mut command = workspace.program_command("examples/train_images", Profile::Dev, &adapter.environment);
    command.args(["--device", "wgpu:0", "--batch", "32", "--width", "8", "--data", "nn/data/fashion-small"]);
    command.arg("--steps").arg(STEPS.to_string()).arg("--curve").arg(&curve);
    command.arg("--save").arg(folder.join("weights.safetensors"));
    process::run_captured(&mut command)?;
    let text = std::fs::read_to_string(&curve)?;
    let rows = text.lines().skip(1);
    rows.map(|row| {
        let loss = row.split(',').nth(1).context("a row of the curve has no loss")?;
        loss.parse::<f64>().with_context(|| format!("`{loss}` is not a loss"))
    })
    .collect()
}

/// Returns the losses that a page reports, as `step 1 2.30 0.125`.
fn parse_losses(text: &str) -> Vec<f64> {
    let steps = text.lines().filter_map(|line| line.strip_prefix("step "));
    steps.filter_map(|step| step.split_whitespace().nth(1)?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_must_be_complete_accurate_and_finite() {
        let native = [2.0; STEPS];
        assert!(compare_losses(&[2.0001; STEPS], &native));
        assert!(!compare_losses(&[2.1; STEPS], &native));
        assert!(!compare_losses(&[2.0; STEPS - 1], &native));
        let mut page = native;
        page[3] = f64::NAN;
        assert!(!compare_losses(&page, &native));
    }

    #[test]
    fn losses_of_a_page_are_read() {
        assert_eq!(parse_losses("device x\nstep 1 2.5 0.1\nstep 2 NaN 0\n")[..1], [2.5]);
        assert!(parse_losses("step 2 NaN 0")[0].is_nan());
        assert!(parse_losses("error: step").is_empty());
    }
}

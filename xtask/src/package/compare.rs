//! `cargo xtask package --compare`: what a dependency costs, compared with other crates.
//!
//! `benches/peers/minimal` has one program for each crate. All train the same perceptron for some steps. Each program
//! is built in an empty folder, after its sources were fetched, so the time is that of a clean build.

use crate::environment::Environment;
use crate::process;
use crate::setup::Setup;
use crate::workspace::Workspace;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

const FOLDER: &str = "benches/peers/minimal";

/// Program with a set of features.
struct Variant {
    /// Folder of the program.
    program: &'static str,
    /// Crate whose version is shown.
    library: &'static str,
    /// Features in addition to those of the manifest.
    features: &'static str,
    devices: &'static str,
}

const VARIANTS: [Variant; 4] = [
    Variant { program: "forebay", library: "forebay", features: "", devices: "wgpu" },
    Variant { program: "forebay", library: "forebay", features: "cuda", devices: "CUDA, wgpu" },
    Variant { program: "candle", library: "candle-core", features: "", devices: "CPU" },
    Variant { program: "burn", library: "burn", features: "", devices: "wgpu" },
];

/// Measured costs of a program.
#[derive(Debug)]
struct Costs {
    /// Version of the library.
    version: String,
    /// Crates of the program's dependencies on this target, without those of build scripts.
    crates: usize,
    build: Duration,
    /// Processor time of the compiler, on Linux. Other programs on the machine change it less than the time.
    cpu: Option<Duration>,
    /// Size of the stripped binary.
    bytes: u64,
}

/// Measures all programs and prints a table last; returns false if one of them does not build or run.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    let environment = Setup::new(workspace)?.device_env();
    let measured: Vec<Result<Costs>> = VARIANTS
        .iter()
        .map(|variant| {
            println!("\n=== {}, {} ===", variant.program, variant.devices);
            let costs = measure(workspace, variant, &environment);
            match &costs {
                Ok(costs) => println!("built in {:.0} s", costs.build.as_secs_f64()),
                Err(error) => println!("FAILED  {error:#}"),
            }
            costs
        })
        .collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = std::env::var("CARGO_BUILD_JOBS").unwrap_or_else(|_| cores.to_string());
    let compiler = process::run_captured(Command::new("rustc").arg("--version"))?;
    println!("\n{}, cores: {cores}, jobs: {jobs}\n", compiler.trim());
    print!("{}", table(&measured));
    Ok(measured.iter().all(Result::is_ok))
}

/// Builds and runs a program.
fn measure(workspace: &Workspace, variant: &Variant, environment: &Environment) -> Result<Costs> {
    let folder = workspace.root.join(FOLDER).join(variant.program);
    if variant.program == "forebay" {
        // The lock file has the versions that the tests use.
        std::fs::copy(workspace.root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    }
    let cargo = |args: &[&str]| {
        let mut command = workspace.cargo_command(args);
        command.arg("--manifest-path").arg(folder.join("Cargo.toml"));
        command
    };
    process::run_captured(&mut cargo(&["fetch", "--quiet"]))?;
    let features = format!("--features={}", variant.features);
    let tree = ["tree", "--edges", "normal", "--prefix", "none", "--format", "{p}", &features];
    let tree = process::run_captured(&mut cargo(&tree))?;

    let target = empty_target_dir(workspace, variant)?;
    let (start, cpu_before) = (Instant::now(), children_cpu_time());
    let mut build = cargo(&["build", "--quiet", "--release", &features]);
    let is_built = process::run_foreground(build.arg("--target-dir").arg(&target))?;
    ensure!(is_built, "{} does not build: see above", variant.program);
    let (build, cpu) = (start.elapsed(), children_cpu_time());

    let binary = target.join("release").join(format!("minimal-{}", variant.program));
    let bytes = std::fs::metadata(&binary).with_context(|| binary.display().to_string())?.len();
    let mut command = Command::new(&binary);
    environment.apply(&mut command);
    print!("{}", process::run_captured(&mut command)?);
    Ok(Costs {
        version: find_version(&tree, variant.library).context("cargo tree shows no version")?.to_owned(),
        crates: count_crates(&tree),
        build,
        cpu: cpu.zip(cpu_before).map(|(after, before)| after.saturating_sub(before)),
        bytes,
    })
}

/// Returns the target folder of a program, without results of earlier builds.
fn empty_target_dir(workspace: &Workspace, variant: &Variant) -> Result<PathBuf> {
    let name = [variant.program, variant.features].join("-");
    let folder = workspace.target_dir().join("minimal").join(name.trim_end_matches('-'));
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(folder)
}

/// Counts the different crates of a tree without prefixes. Its first line is the program.
fn count_crates(tree: &str) -> usize {
    let crates: BTreeSet<&str> = tree.lines().skip(1).map(|line| line.trim_end_matches(" (*)")).collect();
    crates.iter().filter(|line| !line.is_empty()).count()
}

/// Returns the version of a crate in a tree without prefixes.
fn find_version<'a>(tree: &'a str, name: &str) -> Option<&'a str> {
    tree.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" v")?.split(' ').next())
}

/// Returns the processor time of all programs that this one has started and awaited; `None` if it is unknown.
fn children_cpu_time() -> Option<Duration> {
    parse_children_cpu_time(&std::fs::read_to_string("/proc/self/stat").ok()?)
}

/// Reads the user and system time of awaited children from Linux's `/proc/self/stat`, in hundredths of a second.
fn parse_children_cpu_time(stat: &str) -> Option<Duration> {
    // The second field is a name in parentheses, which may contain spaces. The third is the first after them.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some(Duration::from_millis(10 * (ticks(16)? + ticks(17)?)))
}

/// Formats the costs as a table of Markdown, in the order of [`VARIANTS`].
fn table(measured: &[Result<Costs>]) -> String {
    let mut text = String::from(
        "| crate | devices | crates | clean release build, s | processor time, s | stripped binary, MB |\n\
         | --- | --- | ---: | ---: | ---: | ---: |\n",
    );
    for (Variant { library, devices, .. }, costs) in VARIANTS.iter().zip(measured) {
        text += &match costs {
            Ok(Costs { version, crates, build, cpu, bytes }) => {
                let build = build.as_secs_f64();
                let cpu = cpu.map_or_else(String::new, |cpu| format!("{:.0}", cpu.as_secs_f64()));
                let megabytes = *bytes as f64 / 1e6;
                format!(
                    "| {library} {version} | {devices} | {crates} | {build:.0} | {cpu} | {megabytes:.1} |\n"
                )
            }
            Err(_) => format!("| {library} | {devices} | failed | | | |\n"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "minimal-burn v0.0.0 (/minimal/burn)\nburn v0.22.1\nburn-core v0.22.1\nlog v0.4.29\n\
                        syn v2.0.1 (proc-macro)\nburn-core v0.22.1 (*)\nsyn v1.0.9\n\n";

    #[test]
    fn crates_of_a_tree_are_counted_once() {
        assert_eq!(count_crates(TREE), 5);
        assert_eq!(count_crates("minimal v0.0.0\n"), 0);
    }

    #[test]
    fn versions_are_found_by_the_whole_name() {
        assert_eq!(find_version(TREE, "burn-core"), Some("0.22.1"));
        assert_eq!(find_version("a v0\nforebay v0.1.0 (/forebay)\n", "forebay"), Some("0.1.0"));
        assert_eq!(find_version(TREE, "bur"), None);
    }

    #[test]
    fn processor_time_of_children_is_read() {
        let stat = "7 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 11 12 250 50 20 0";
        assert_eq!(parse_children_cpu_time(stat), Some(Duration::from_secs(3)));
        assert_eq!(parse_children_cpu_time("7 (name) S 1 2"), None);
    }

    #[test]
    fn a_table_has_one_row_for_each_program() {
        let costs = |crates| Costs {
            version: "1.2.3".into(),
            crates,
            build: Duration::from_millis(61_400),
            cpu: None,
            bytes: 7_960_000,
        };
        let text = table(&[Ok(costs(90)), Err(anyhow::anyhow!("no network"))]);
        let rows: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            rows,
            ["| forebay 1.2.3 | wgpu | 90 | 61 |  | 8.0 |", "| forebay | CUDA, wgpu | failed | | | |"]
        );
    }
}

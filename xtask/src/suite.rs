//! `cargo xtask test`: everything that CI runs, one build for all of it, and nothing left out in silence.

use crate::environment::Environment;
use crate::setup::{Ready, Setup};
use crate::tally::Tally;
use crate::workspace::{Profile, Workspace};
use crate::{bundle, checks, process};
use anyhow::Result;
use std::process::Command;
use std::time::{Duration, Instant};

const SUITE: &str = "forebay-conformance";

/// A part of the run, and what it came to.
pub(crate) struct Stage {
    name: String,
    verdict: Verdict,
}

enum Verdict {
    Ran { tally: Tally, time: Duration },
    Skipped { why: String },
}

impl Stage {
    /// Something that passes or fails as a whole.
    pub(crate) fn run(name: &str, what: impl FnOnce() -> Result<bool>) -> Result<Self> {
        Self::count(name, || Ok(Tally::one(what()?)))
    }

    /// A program whose output says how many tests passed. One that does not say so has failed, as has one that ends badly.
    pub(crate) fn program(name: &str, command: &mut Command) -> Result<Self> {
        Self::count(name, || {
            let ended = process::watch(command)?;
            let counted = Tally::of(&ended.lines);
            let mut tally = counted.unwrap_or_default();
            if tally.failed == 0 && (counted.is_none() || !ended.ok) {
                println!("{name} {}", if ended.ok { "did not say what passed" } else { "ended badly" });
                tally.failed = 1;
            }
            Ok(tally)
        })
    }

    /// Something that could not be run here.
    pub(crate) fn skipped(name: &str, why: impl Into<String>) -> Self {
        Self { name: name.into(), verdict: Verdict::Skipped { why: why.into() } }
    }

    pub(crate) fn passed(&self) -> bool {
        match self.verdict {
            Verdict::Ran { tally, .. } => tally.failed == 0,
            Verdict::Skipped { .. } => true,
        }
    }

    fn count(name: &str, what: impl FnOnce() -> Result<Tally>) -> Result<Self> {
        println!("\n=== {name} ===");
        let start = Instant::now();
        let tally = what()?;
        Ok(Self { name: name.into(), verdict: Verdict::Ran { tally, time: start.elapsed() } })
    }
}

/// Runs all stages; false if anything failed. A stage that fails does not keep the others from running.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    println!("=== setup ===");
    let setup = Setup::new(workspace)?;
    let data = setup.data()?.environment;
    let nvrtc = setup.nvrtc();
    let model = setup.minilm();
    let validation = setup.validation();
    let adapters = [("lavapipe", setup.lavapipe()), ("SwiftShader", setup.swiftshader())];
    // What needs the model says that it is skipped where it is missing.
    let data = data.and(environment_of(&model));
    let with_nvrtc = data.clone().and(environment_of(&nvrtc));
    // Unit tests that need a device take any software one that is there.
    let any_adapter = adapters.iter().find_map(|(_, found)| found.as_ref().ok());
    let any_adapter = any_adapter.map(|ready| ready.environment.clone());

    let mut stages = checks::all(workspace)?;
    let mut tests = workspace.cargo_command(&["test", "--workspace", "--no-fail-fast"]);
    let required = [("wgpu", any_adapter.is_some()), ("nvrtc", nvrtc.is_ok())];
    let required: Vec<&str> = required.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
    let for_tests = with_nvrtc.clone().and(any_adapter.unwrap_or_default());
    for_tests.set("FOREBAY_REQUIRE", required.join(",")).apply(&mut tests);
    stages.push(Stage::program("unit tests, documentation tests, examples", &mut tests)?);

    let built = Stage::run("programs", || workspace.cargo(&Workspace::build_args(Profile::Dev)))?;
    let ready = built.passed();
    stages.push(built);
    if ready {
        let program = |name: &str, args: &[&str], environment: &Environment| {
            Stage::program(name, workspace.command(SUITE, Profile::Dev, environment).args(args))
        };
        match &nvrtc {
            Ok(_) => {
                let environment = with_nvrtc.clone().set("FOREBAY_REQUIRE", "nvrtc");
                stages.push(program("kernels through NVRTC", &["kernels"], &environment)?);
            }
            Err(why) => stages.push(Stage::skipped("kernels through NVRTC", format!("{why:#}"))),
        }
        let mut once = true;
        for (name, found) in &adapters {
            let Ok(found) = found else {
                stages.push(Stage::skipped(&format!("conformance on {name}"), why(found)));
                continue;
            };
            let environment = data.clone().and(found.environment.clone()).set("FOREBAY_REQUIRE", "wgpu");
            // SwiftShader keeps to Vulkan's minimum without help; the layer's checks are the same on both.
            let validated = match (*name, &validation) {
                ("lavapipe", Ok(layer)) => environment.clone().and(layer.environment.clone()),
                _ => environment.clone(),
            };
            stages.push(program(&format!("conformance on {name}"), &["test"], &validated)?);
            stages.push(program(
                &format!("golden on {name}"),
                &["golden", "--device", "wgpu"],
                &environment,
            )?);
            // The kernels are the same on both; SwiftShader takes four times as long.
            for dtype in ["bf16", "f16"].into_iter().filter(|_| *name == "lavapipe") {
                let title = format!("golden in {dtype} on {name}");
                stages.push(program(
                    &title,
                    &["golden", "--device", "wgpu", "--dtype", dtype],
                    &environment,
                )?);
            }
            if std::mem::take(&mut once) {
                stages.push(outside(workspace, &environment)?);
                stages.push(program(
                    &format!("curves on {name}"),
                    &["curves", "--device", "wgpu"],
                    &environment,
                )?);
                // What is promised about memory, beside what the conformance suite has just checked.
                let mut memory =
                    bundle::check_memory(workspace, &environment, ["6", "9", "savings", "fragmentation"]);
                stages.push(Stage::program(
                    &format!("memory's programs on {name}"),
                    memory.env("DEVICES", "wgpu"),
                )?);
            }
        }
        if setup.has_gpu() {
            let title = "conformance on this machine's GPU";
            stages.push(program(title, &["test"], &with_nvrtc)?);
        } else {
            stages.push(Stage::skipped("conformance on this machine's GPU", "there is no GPU"));
        }
        stages.push(program("traces", &["traces"], &data)?);
    } else {
        stages.push(Stage::skipped("everything else", "the programs do not build"));
    }
    if let Err(missing) = &model {
        stages.push(Stage::skipped("MiniLM's weights", format!("{missing:#}")));
    }
    if let Err(missing) = &validation {
        stages.push(Stage::skipped("Vulkan's validation layer", format!("{missing:#}")));
    }
    Ok(report(&stages))
}

/// The suite on a backend of a crate outside the workspace, as anyone's would be: a few topics, which show that it can be done.
fn outside(workspace: &Workspace, environment: &Environment) -> Result<Stage> {
    let name = "a backend outside the workspace";
    let folder = workspace.root.join("tests/outside");
    // The same versions: what comes from the registry is built already.
    std::fs::copy(workspace.root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    let mut run = workspace.cargo_command(&["run", "--quiet", "--offline", "--target-dir"]);
    run.arg(workspace.target()).arg("--manifest-path").arg(folder.join("Cargo.toml"));
    run.args(["--", "tensors/", "custom/", "errors/", "hooks/", "inplace/"]);
    environment.apply(&mut run);
    Stage::program(name, &mut run)
}

fn environment_of(found: &Result<Ready>) -> Environment {
    found.as_ref().map(|ready| ready.environment.clone()).unwrap_or_default()
}

fn why(found: &Result<Ready>) -> String {
    found.as_ref().err().map(|error| format!("{error:#}")).unwrap_or_default()
}

/// Prints what every stage came to, and all of them together in the last line.
fn report(stages: &[Stage]) -> bool {
    println!("\n=== summary ===");
    println!(
        "{:<44} {:>8} {:>8} {:>8} {:>12} {:>7}",
        "", "passed", "failed", "skipped", "unsupported", "time"
    );
    let mut sum = Tally::default();
    for stage in stages {
        match &stage.verdict {
            Verdict::Ran { tally, time } => {
                let Tally { passed, failed, skipped, unsupported } = tally;
                let seconds = time.as_secs_f64();
                println!(
                    "{:<44} {passed:>8} {failed:>8} {skipped:>8} {unsupported:>12} {seconds:>6.0}s",
                    stage.name
                );
                sum += *tally;
            }
            Verdict::Skipped { why } => {
                println!("{:<44} not run: {why}", stage.name);
                sum.skipped += 1;
            }
        }
    }
    println!("\n{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped);
    sum.failed == 0
}

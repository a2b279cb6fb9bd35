//! `cargo xtask test`: everything that CI runs, one build for all of it, and nothing left out in silence.
//!
//! The programs are built while what is missing is fetched. Then everything runs side by side: most stages keep one core busy,
//! SwiftShader above all, which compiles kernels on the thread that asks for them.

use crate::environment::Environment;
use crate::setup::{Ready, Setup};
use crate::stage::{Planned, Stage, report};
use crate::workspace::{Profile, Workspace};
use crate::{bundle, checks};
use anyhow::{Result, anyhow};
use std::process::Command;
use std::time::Instant;

const SUITE: &str = "forebay-conformance";

/// The most stages at a time: some have threads of their own, and each takes gigabytes.
const LANES: usize = 4;

/// Runs all stages; false if anything failed. A stage that fails does not keep the others from running.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    let start = Instant::now();
    let setup = Setup::new(workspace)?;
    let (found, mut stages, programs) = std::thread::scope(|scope| {
        let found = scope.spawn(|| Found::look(&setup));
        let quick = checks::quick(workspace);
        let programs = Stage::run("programs", || workspace.cargo(&Workspace::build_args(Profile::Dev)));
        (found.join().unwrap_or_else(|_| Err(anyhow!("the set-up panicked"))), quick, programs)
    });
    let suite = Suite { workspace, found: found? };
    let planned = suite.planned(programs.passed(), &mut stages)?;
    stages.push(programs);
    let lanes = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(LANES));
    stages.extend(Stage::side_by_side(planned, lanes));

    if setup.has_gpu() {
        // Alone: it asks how much memory the others leave.
        let planned = suite.program(ON_GPU, &["test"], &suite.found.with_nvrtc());
        stages.extend(Stage::side_by_side(vec![planned], 1));
    } else {
        stages.push(Stage::skipped(ON_GPU, "there is no GPU"));
    }
    Ok(report(&stages, start.elapsed()))
}

const UNIT_TESTS: &str = "unit tests, documentation tests, examples";
const ON_GPU: &str = "conformance on this machine's GPU";

/// What was found on this machine, or fetched.
struct Found {
    data: Ready,
    nvrtc: Result<Ready>,
    model: Result<Ready>,
    validation: Result<Ready>,
    lavapipe: Result<Ready>,
    swiftshader: Result<Ready>,
}

impl Found {
    fn look(setup: &Setup) -> Result<Self> {
        Ok(Self {
            data: setup.data()?,
            nvrtc: setup.nvrtc(),
            model: setup.minilm(),
            validation: setup.validation(),
            lavapipe: setup.lavapipe(),
            swiftshader: setup.swiftshader(),
        })
    }

    /// The data set and the model. What needs the model says that it is skipped where it is missing.
    fn data(&self) -> Environment {
        self.data.environment.clone().and(environment_of(&self.model))
    }

    fn with_nvrtc(&self) -> Environment {
        self.data().and(environment_of(&self.nvrtc))
    }

    /// What programs need to run on a driver, and nowhere else.
    fn on(&self, adapter: &Ready) -> Environment {
        self.data().and(adapter.environment.clone()).set("FOREBAY_REQUIRE", "wgpu")
    }

    /// The same for kernels of which most run a few times on little: lavapipe does not optimise them, and tests take a fifth less.
    fn quickly_on(&self, adapter: &Ready) -> Environment {
        self.on(adapter).set("GALLIVM_PERF", "nopt")
    }

    /// Where what runs once runs.
    fn any_adapter(&self) -> Option<(&'static str, &Ready)> {
        let lavapipe = self.lavapipe.as_ref().map(|ready| ("lavapipe", ready));
        lavapipe.or(self.swiftshader.as_ref().map(|ready| ("SwiftShader", ready))).ok()
    }
}

/// The stages that are programs.
struct Suite<'a> {
    workspace: &'a Workspace,
    found: Found,
}

impl Suite<'_> {
    /// All that need nothing of each other, the longest first; what cannot be run here goes to `skipped`. Without the
    /// programs, which did not build, those are left that say why.
    fn planned(&self, programs: bool, skipped: &mut Vec<Stage>) -> Result<Vec<Planned>> {
        let mut planned = Vec::new();
        if programs {
            self.on_drivers(&mut planned, skipped)?;
        } else {
            skipped.push(Stage::skipped("everything else", "the programs do not build"));
        }
        // Soon, and one after the other where there are two lanes: cargo lets nothing else be built meanwhile.
        let soon = planned.len().min(1);
        planned.insert(soon, Planned::new(UNIT_TESTS, self.unit_tests()));
        match checks::clippy(self.workspace) {
            Ok(clippy) => planned.insert(soon, clippy),
            Err(missing) => skipped.push(missing),
        }
        Ok(planned)
    }

    /// What runs on Vulkan's drivers and on NVRTC.
    fn on_drivers(&self, planned: &mut Vec<Planned>, skipped: &mut Vec<Stage>) -> Result<()> {
        let mut skip =
            |name: &str, why: &anyhow::Error| skipped.push(Stage::skipped(name, format!("{why:#}")));
        match &self.found.swiftshader {
            Ok(ready) => {
                planned.push(self.program("conformance on SwiftShader", &["test"], &self.found.on(ready)));
            }
            Err(why) => skip("conformance on SwiftShader", why),
        }
        match &self.found.nvrtc {
            Ok(_) => {
                let environment = self.found.with_nvrtc().set("FOREBAY_REQUIRE", "nvrtc");
                // The ends, and both sides of what sources ask of an architecture; `cargo xtask kernels` takes all seven, and optimises.
                let args = ["kernels", "--architectures", "75,80,90,120"];
                planned.push(self.program("kernels through NVRTC", &args, &environment));
            }
            Err(why) => skip("kernels through NVRTC", why),
        }
        match &self.found.lavapipe {
            Ok(ready) => {
                // SwiftShader keeps to Vulkan's minimum without help; the layer's checks are the same on both.
                let environment = self.found.quickly_on(ready).and(environment_of(&self.found.validation));
                planned.push(self.program("conformance on lavapipe", &["test"], &environment));
            }
            Err(why) => skip("conformance on lavapipe", why),
        }
        if let Some((name, ready)) = self.found.any_adapter() {
            planned.extend(self.once(name, &self.found.on(ready))?);
        }
        // In halves on one of them: the kernels are the same on both, and SwiftShader takes four times as long.
        for (name, found, types) in [
            ("SwiftShader", &self.found.swiftshader, &["f32"][..]),
            ("lavapipe", &self.found.lavapipe, &["f32", "bf16", "f16"]),
        ] {
            for dtype in types.iter().filter(|_| found.is_ok()) {
                let environment =
                    found.as_ref().map(|ready| self.found.quickly_on(ready)).unwrap_or_default();
                let title = format!("golden in {dtype} on {name}");
                let args = ["golden", "--device", "wgpu", "--dtype", dtype];
                planned.push(self.program(&title, &args, &environment));
            }
        }
        planned.push(self.program("traces", &["traces"], &self.found.data()));
        if let Err(why) = &self.found.model {
            skip("MiniLM's weights", why);
        }
        if let Err(why) = &self.found.validation {
            skip("Vulkan's validation layer", why);
        }
        Ok(())
    }

    /// What one driver is enough for.
    fn once(&self, name: &str, environment: &Environment) -> Result<[Planned; 3]> {
        // What is promised about memory, beside what the conformance suite checks.
        let items = ["6", "9", "savings", "fragmentation"];
        let mut memory = bundle::check_memory(self.workspace, environment, items);
        memory.env("DEVICES", "wgpu");
        Ok([
            self.outside(environment)?,
            Planned::new(format!("memory's programs on {name}"), memory),
            self.program(&format!("curves on {name}"), &["curves", "--device", "wgpu"], environment),
        ])
    }

    /// The suite on a backend of a crate outside the workspace, as anyone's would be: a few topics, which show that it can be done.
    fn outside(&self, environment: &Environment) -> Result<Planned> {
        let folder = self.workspace.root.join("tests/outside");
        // The same versions: what comes from the registry is built already.
        std::fs::copy(self.workspace.root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
        let mut run = self.workspace.cargo_command(&["run", "--quiet", "--offline", "--target-dir"]);
        run.arg(self.workspace.target()).arg("--manifest-path").arg(folder.join("Cargo.toml"));
        run.args(["--", "tensors/", "custom/", "errors/", "hooks/", "inplace/"]);
        environment.apply(&mut run);
        Ok(Planned::new("a backend outside the workspace", run))
    }

    fn program(&self, name: &str, args: &[&str], environment: &Environment) -> Planned {
        let mut command = self.workspace.command(SUITE, Profile::Dev, environment);
        command.args(args);
        Planned::new(name, command)
    }

    /// Unit tests that need a device take any software one that is there.
    fn unit_tests(&self) -> Command {
        let adapter = self.found.any_adapter();
        let required = [("wgpu", adapter.is_some()), ("nvrtc", self.found.nvrtc.is_ok())];
        let required: Vec<&str> =
            required.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
        let mut command = self.workspace.cargo_command(&["test", "--workspace", "--no-fail-fast"]);
        let adapter = adapter.map(|(_, ready)| ready.environment.clone()).unwrap_or_default();
        let environment = self.found.with_nvrtc().and(adapter);
        environment.set("FOREBAY_REQUIRE", required.join(",")).apply(&mut command);
        command
    }
}

fn environment_of(found: &Result<Ready>) -> Environment {
    found.as_ref().map(|ready| ready.environment.clone()).unwrap_or_default()
}

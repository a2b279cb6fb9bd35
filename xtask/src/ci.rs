//! `cargo xtask test`: runs everything that CI runs after one build, and reports every stage that is skipped.
//!
//! The programs are built while missing dependencies are fetched. Then stages run in parallel, because most keep only
//! one core busy: SwiftShader compiles kernels on the calling thread.

use crate::browser::WASM_TARGET;
use crate::environment::Environment;
use crate::setup::{Dependency, Setup};
use crate::stage::{PendingStage, Stage, print_summary};
use crate::workspace::{Profile, Workspace};
use crate::{bundle, checks, package};
use anyhow::{Result, anyhow};
use std::process::Command;
use std::time::Instant;

const CONFORMANCE_BIN: &str = "forebay-conformance";

/// Maximum number of parallel stages: some stages have several threads, and each needs gigabytes of memory.
const MAX_PARALLEL_STAGES: usize = 4;

/// Runs all stages; returns false if any failed. Stages run even if others fail.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    let start = Instant::now();
    let setup = Setup::new(workspace)?;
    let (found, mut stages, programs) = std::thread::scope(|scope| {
        let found = scope.spawn(|| TestDependencies::detect(&setup));
        let mut quick = checks::run_quick(workspace);
        quick.extend(package::run_quick(workspace));
        let programs =
            Stage::run_pass_or_fail("programs", || workspace.run_cargo(&Workspace::build_args(Profile::Dev)));
        (found.join().unwrap_or_else(|_| Err(anyhow!("the set-up panicked"))), quick, programs)
    });
    let suite = StagePlanner { workspace, dependencies: found? };
    let planned = suite.plan_stages(programs.passed(), &mut stages)?;
    stages.push(programs);
    let lanes = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(MAX_PARALLEL_STAGES));
    stages.extend(Stage::run_parallel(planned, lanes));

    if setup.has_gpu() {
        // This stage runs alone, because it measures the memory that is free.
        let planned = suite.conformance_stage(GPU_STAGE, &["test"], &suite.dependencies.nvrtc_env());
        stages.extend(Stage::run_parallel(vec![planned], 1));
    } else {
        stages.push(Stage::skipped(GPU_STAGE, "there is no GPU"));
    }
    Ok(print_summary(&stages, start.elapsed()))
}

/// Shards of the suite on a driver: the longest one ends soon after the other stages.
const LAVAPIPE_SHARDS: usize = 6;
const SWIFTSHADER_SHARDS: usize = 2;

/// Filters of the suite on SwiftShader, which compiles and runs a kernel many times slower than lavapipe.
/// It leaves out tests of host code, and sweeps over shapes and operations whose kernels golden calls run on it.
const SWIFTSHADER_FILTERS: [&str; 33] = [
    "!op_catalog/",
    "!double_backward/",
    "!plan/",
    "!fault_injection/",
    "!index_order/",
    "!minilm/",
    "!step_costs/",
    "!tile_autotune/",
    "!amp/listed_operations_run_in_their_dtype",
    "!asynchronous/only_listed_operations_read_back",
    "!attention/attention_equals_softmax_weights_times_values",
    "!attention/attention_in_16_bits_is_accurate",
    "!attention/masks_and_dropout_apply_in_16_bits",
    "!attention_masks/learned_masks_of_every_shape_use_the_kernels",
    "!autograd/a_leaf_used_several_times_gets_all_gradients",
    "!convolutions/batch_norms_equal_their_composition",
    "!convolutions/gradients_of_weights_for_few_channels_are_products",
    "!convolutions/im2col_equals_gathering",
    "!convolutions/large_convolutions_",
    "!decompositions/eigenvectors_of_every_extent",
    "!fusion/second_gradients_of_random_programs_do_not_depend_on_fusion",
    "!linalg/singular_values_of_every_shape",
    "!linear/an_mlp_of_many_tiles_equals_its_composition",
    "!linear/an_mlp_without_gradients_has_the_same_bits",
    "!long_loops/cumulative_sums_of_millions",
    "!long_rows/convolutions_with_long_filters_are_correct_or_refused",
    "!losses/gradients_of_embedding_tables_are_summed_in_order",
    "!matmul/products_of_every_layout",
    "!memory/a_thousand_steps_take_the_memory_of_ten",
    "!optim_options/steps_that_fail_at_any_request_can_be_repeated",
    "!reductions/equal_extremes_share_their_gradient",
    "!reductions/softmax_of_every_length",
    "!sorting/a_million_elements_sort",
];

const UNIT_TEST_STAGE: &str = "unit tests, documentation tests, examples";
const BROWSER_STAGE: &str = "a page in headless Chromium";
const RADV_STAGE: &str = "kernels through Mesa's compiler for AMD cards";
const APP_STAGE: &str = "an application on a virtual screen";
const PYTHON_STAGE: &str = "a Python module with NumPy";
const GPU_STAGE: &str = "conformance on this machine's GPU";

/// Dependencies that were found on this machine or fetched.
struct TestDependencies {
    data: Dependency,
    nvrtc: Result<Dependency>,
    model: Result<Dependency>,
    validation: Result<Dependency>,
    lavapipe: Result<Dependency>,
    swiftshader: Result<Dependency>,
    radv: Result<Dependency>,
    /// The standard library for pages, and a browser.
    browser: Result<()>,
}

impl TestDependencies {
    fn detect(setup: &Setup) -> Result<Self> {
        Ok(Self {
            data: setup.ensure_data()?,
            nvrtc: setup.ensure_nvrtc(),
            model: setup.ensure_minilm(),
            validation: setup.ensure_validation_layer(),
            lavapipe: setup.ensure_lavapipe(),
            swiftshader: setup.ensure_swiftshader(),
            radv: setup.ensure_radv(),
            browser: setup.ensure_std(WASM_TARGET).and_then(|_| setup.ensure_chromium()).map(drop),
        })
    }

    /// Returns the environment with the data set and the model. Without the model, its tests are skipped.
    fn data_env(&self) -> Environment {
        self.data.environment.clone().merge(env_or_default(&self.model))
    }

    fn nvrtc_env(&self) -> Environment {
        self.data_env().merge(env_or_default(&self.nvrtc))
    }

    /// Returns the environment in which programs run on this driver only.
    fn adapter_env(&self, adapter: &Dependency) -> Environment {
        self.data_env().merge(adapter.environment.clone()).set("FOREBAY_REQUIRE", "wgpu")
    }

    /// Returns the [`adapter_env`](Self::adapter_env) without lavapipe's optimiser: most kernels run only a few
    /// times on small inputs, so compilation dominates.
    fn unoptimized_adapter_env(&self, adapter: &Dependency) -> Environment {
        self.adapter_env(adapter).set("GALLIVM_PERF", "nopt")
    }

    /// Returns the driver for stages that run on one driver only.
    fn preferred_adapter(&self) -> Option<(&'static str, &Dependency)> {
        let lavapipe = self.lavapipe.as_ref().map(|ready| ("lavapipe", ready));
        lavapipe.or(self.swiftshader.as_ref().map(|ready| ("SwiftShader", ready))).ok()
    }
}

/// Planner of the stages that run programs.
struct StagePlanner<'a> {
    workspace: &'a Workspace,
    dependencies: TestDependencies,
}

impl StagePlanner<'_> {
    /// Plans all independent stages, longest first; stages that cannot run here go to `skipped`. If the programs did
    /// not build (`programs` is false), only stages without them are planned.
    fn plan_stages(&self, programs: bool, skipped: &mut Vec<Stage>) -> Result<Vec<PendingStage>> {
        let mut planned = Vec::new();
        if programs {
            self.plan_driver_stages(&mut planned, skipped)?;
        } else {
            skipped.push(Stage::skipped("everything else", "the programs do not build"));
        }
        let mut builds = Vec::new();
        match checks::plan_clippy(self.workspace) {
            Ok(clippy) => builds.push(clippy),
            Err(missing) => skipped.push(missing),
        }
        builds.push(PendingStage::new(UNIT_TEST_STAGE, self.unit_test_command()));
        builds.push(checks::plan_rustdoc(self.workspace));
        // One build blocks another by cargo's lock, so a shard of the suite runs between two of them.
        for (number, build) in builds.into_iter().enumerate() {
            planned.insert(planned.len().min(2 * number + 1), build);
        }
        Ok(planned)
    }

    /// Plans the stages that need Vulkan drivers or NVRTC.
    fn plan_driver_stages(&self, planned: &mut Vec<PendingStage>, skipped: &mut Vec<Stage>) -> Result<()> {
        let mut skip =
            |name: &str, why: &anyhow::Error| skipped.push(Stage::skipped(name, format!("{why:#}")));
        match &self.dependencies.lavapipe {
            Ok(ready) => {
                // SwiftShader reports Vulkan's minimum limits on its own; the layer's checks are the same on both.
                let environment = self
                    .dependencies
                    .unoptimized_adapter_env(ready)
                    .merge(env_or_default(&self.dependencies.validation));
                planned.extend(self.suite_stages(
                    "conformance on lavapipe",
                    LAVAPIPE_SHARDS,
                    &[],
                    &environment,
                ));
            }
            Err(why) => skip("conformance on lavapipe", why),
        }
        match &self.dependencies.swiftshader {
            Ok(ready) => {
                let environment = self.dependencies.adapter_env(ready);
                let name = "conformance on SwiftShader";
                planned.extend(self.suite_stages(
                    name,
                    SWIFTSHADER_SHARDS,
                    &SWIFTSHADER_FILTERS,
                    &environment,
                ));
            }
            Err(why) => skip("conformance on SwiftShader", why),
        }
        match &self.dependencies.nvrtc {
            Ok(_) => {
                let environment = self.dependencies.nvrtc_env().set("FOREBAY_REQUIRE", "nvrtc");
                // These are the oldest, the newest, and both sides of the architecture checks in sources. `cargo xtask
                // kernels` optimises and compiles for all seven.
                let args = ["kernels", "--architectures", "75,80,90,120"];
                planned.push(self.conformance_stage("kernels through NVRTC", &args, &environment));
            }
            Err(why) => skip("kernels through NVRTC", why),
        }
        match self.dependencies.browser.as_ref().and(self.dependencies.swiftshader.as_ref().map(drop)) {
            Ok(()) => {
                let mut command = Command::new(std::env::current_exe()?);
                command.args(["browser", "--test", "--built"]).current_dir(&self.workspace.root);
                planned.push(PendingStage::new(BROWSER_STAGE, command));
            }
            Err(why) => skip(BROWSER_STAGE, why),
        }
        match &self.dependencies.radv {
            Ok(ready) => {
                // This generation has the fewest registers. `cargo xtask kernels --radv` compiles for all four.
                let args = ["radv", "--families", "vega10"];
                planned.push(self.conformance_stage(RADV_STAGE, &args, &ready.environment));
            }
            Err(why) => skip(RADV_STAGE, why),
        }
        let writers = ["kernels", "--writers"];
        planned.push(self.conformance_stage("kernels as MSL and HLSL", &writers, &Environment::default()));
        if let Some((name, ready)) = self.dependencies.preferred_adapter() {
            planned.extend(self.plan_single_driver_stages(name, &self.dependencies.adapter_env(ready))?);
        }
        // Half-precision types run on one driver only: kernels are equal on both, and SwiftShader is slow.
        for (name, found, types) in [
            ("SwiftShader", &self.dependencies.swiftshader, &["f32"][..]),
            ("lavapipe", &self.dependencies.lavapipe, &["f32", "bf16", "f16"]),
        ] {
            for dtype in types.iter().filter(|_| found.is_ok()) {
                let environment = found
                    .as_ref()
                    .map(|ready| self.dependencies.unoptimized_adapter_env(ready))
                    .unwrap_or_default();
                let title = format!("golden in {dtype} on {name}");
                let args = ["golden", "--device", "wgpu", "--dtype", dtype];
                planned.push(self.conformance_stage(&title, &args, &environment));
            }
        }
        planned.push(self.conformance_stage("traces", &["traces"], &self.dependencies.data_env()));
        skip(APP_STAGE, &anyhow!("only by command: cargo xtask app --test"));
        skip(PYTHON_STAGE, &anyhow!("only by command: cargo xtask python"));
        if let Err(why) = &self.dependencies.model {
            skip("MiniLM's weights", why);
        }
        if let Err(why) = &self.dependencies.validation {
            skip("Vulkan's validation layer", why);
        }
        Ok(())
    }

    /// Plans the stages for which one driver is enough.
    fn plan_single_driver_stages(&self, name: &str, environment: &Environment) -> Result<[PendingStage; 4]> {
        // Memory guarantees that the conformance suite does not check.
        let items = ["6", "9", "savings", "fragmentation"];
        let mut memory = bundle::memory_check_command(self.workspace, environment, items);
        memory.env("DEVICES", "wgpu");
        let mut examples = Command::new(std::env::current_exe()?);
        examples.args(["examples", "--built"]).current_dir(&self.workspace.root);
        environment.clone().set("FOREBAY_DEVICE", "wgpu").apply(&mut examples);
        Ok([
            self.external_backend_stage(environment),
            PendingStage::new(format!("memory's programs on {name}"), memory),
            PendingStage::new(format!("examples on {name}"), examples),
            self.conformance_stage(
                &format!("curves on {name}"),
                &["curves", "--device", "wgpu"],
                environment,
            ),
        ])
    }

    /// Runs some topics of the suite on a backend that only uses public items.
    fn external_backend_stage(&self, environment: &Environment) -> PendingStage {
        let mut run = self.workspace.program_command("outside", Profile::Dev, environment);
        run.args(["tensors/", "custom_op/", "errors/", "hooks/", "inplace/"]);
        PendingStage::new("a backend of another crate", run)
    }

    /// Plans the suite in several shards, because SwiftShader and lavapipe compile kernels on one thread.
    fn suite_stages(
        &self,
        name: &str,
        shards: usize,
        filters: &[&str],
        environment: &Environment,
    ) -> Vec<PendingStage> {
        let plan_shard = |number: usize| {
            let shard = format!("{number}/{shards}");
            let args: Vec<&str> = ["test", "--shard", &shard].iter().chain(filters).copied().collect();
            self.conformance_stage(&format!("{name}, {shard}"), &args, environment)
        };
        (1..=shards).map(plan_shard).collect()
    }

    fn conformance_stage(&self, name: &str, args: &[&str], environment: &Environment) -> PendingStage {
        let mut command = self.workspace.program_command(CONFORMANCE_BIN, Profile::Dev, environment);
        command.args(args);
        PendingStage::new(name, command)
    }

    /// Returns the command of the unit tests. Tests that need a device use any available software driver.
    fn unit_test_command(&self) -> Command {
        let adapter = self.dependencies.preferred_adapter();
        let required = [("wgpu", adapter.is_some()), ("nvrtc", self.dependencies.nvrtc.is_ok())];
        let required: Vec<&str> =
            required.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
        let mut command = self.workspace.cargo_command(&[
            "test",
            "--workspace",
            "--no-fail-fast",
            "--features",
            "forebay/ndarray",
        ]);
        let adapter = adapter.map(|(_, ready)| ready.environment.clone()).unwrap_or_default();
        let environment = self.dependencies.nvrtc_env().merge(adapter);
        environment.set("FOREBAY_REQUIRE", required.join(",")).apply(&mut command);
        command
    }
}

fn env_or_default(found: &Result<Dependency>) -> Environment {
    found.as_ref().map(|ready| ready.environment.clone()).unwrap_or_default()
}

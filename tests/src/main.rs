//! The conformance suite as one program that needs only a device.
//!
//! Each command is one kind of check: `test` runs the topics of `suite`, and the others compare with PyTorch's data,
//! replay traces, compile kernels or write pages of the book. A new command is a variant of `Command`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use forebay::device::Device;
use forebay::prelude::*;
use forebay_conformance::{
    compile_times, curves, fuzz, golden, kernels, names, radv, suite, traces, validation, web_kernels,
    writers,
};

#[derive(Parser)]
#[command(about = "Runs forebay's conformance suite on the devices of this machine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists devices, and unavailable backends with the reason.
    Devices,
    /// Runs the suite's own tests on every available backend.
    Test {
        /// Device id (`cuda:0`, `wgpu`); every available backend by default. `wgpu-minimum` is a device of the
        /// program with WebGPU's minimum limits and no features.
        #[arg(long)]
        device: Option<String>,
        /// Lists the tests without running them.
        #[arg(long)]
        list: bool,
        /// Runs only the topics of one of several shards, such as 2/4, so that processes share the suite.
        #[arg(long, default_value = "1/1")]
        shard: suite::Shard,
        /// Only tests whose name (`topic/name/wgpu:0`) contains one of these; `!text` leaves tests out.
        filter: Vec<String>,
    },
    /// Trains models as PyTorch did, and compares the losses.
    Curves {
        /// Folder of the reference curves.
        #[arg(long)]
        dir: Option<PathBuf>,
        /// Device id (`cuda:0`, `wgpu`); every available backend by default.
        #[arg(long)]
        device: Option<String>,
    },
    /// Compares single operations, and their gradients, with PyTorch's results.
    Golden {
        /// Folder of golden.json and golden.safetensors; by default those of this package.
        #[arg(long, env = "FOREBAY_GOLDEN")]
        dir: Option<PathBuf>,
        /// Device id (`cuda:0`, `wgpu`); every available backend by default.
        #[arg(long)]
        device: Option<String>,
        /// Runs the calls in this type: f16, bf16 or f64.
        #[arg(long)]
        dtype: Option<String>,
        /// Lists unsupported calls with the reason.
        #[arg(long, short)]
        verbose: bool,
        /// Only calls whose name contains one of these.
        filter: Vec<String>,
    },
    /// Writes two pages of docs/src/reference: operators.md (coverage of PyTorch's operator database) and
    /// pytorch-names.md (counterparts of PyTorch's public names).
    Operators {
        /// Folder to write to.
        folder: PathBuf,
    },
    /// Compiles every kernel without a GPU: naga validates it, NVRTC compiles its CUDA translation.
    Kernels {
        /// Writes every kernel as MSL and HLSL instead, as wgpu does on Metal and Direct3D 12.
        #[arg(long, conflicts_with = "architectures")]
        writers: bool,
        /// Writes every kernel as browsers get it to this file instead.
        #[arg(long, conflicts_with_all = ["architectures", "writers"])]
        web: Option<PathBuf>,
        /// Prints how long the driver of the first Vulkan, Metal or Direct3D 12 device compiles each kernel instead.
        #[arg(long, conflicts_with_all = ["architectures", "writers", "web"])]
        times: bool,
        /// Quick check for these architectures, such as 75,90: no optimisation; most kernels for the first only.
        #[arg(long, value_delimiter = ',')]
        architectures: Vec<u32>,
        /// Folder of the golden calls, whose kernels are compiled too.
        #[arg(long, env = "FOREBAY_GOLDEN")]
        dir: Option<PathBuf>,
        /// Only kernels whose label (`optim algorithm=adam`) contains one of these.
        filter: Vec<String>,
    },
    /// Compiles every kernel for AMD cards with RADV, Mesa's driver, whose null device needs no card.
    Radv {
        /// Cards such as vega10,navi21; all known ones by default.
        #[arg(long, value_delimiter = ',')]
        families: Vec<String>,
        /// Only kernels whose tiles or workgroups are tuned.
        #[arg(long)]
        tuned: bool,
        /// Folder of the golden calls, whose kernels are compiled too.
        #[arg(long, env = "FOREBAY_GOLDEN")]
        dir: Option<PathBuf>,
        /// File to write the tables to, a page of the book; needs all cards and kernels.
        #[arg(long, conflicts_with_all = ["families", "tuned", "filter"])]
        page: Option<PathBuf>,
        /// Prints the statistics of each kernel.
        #[arg(long, short)]
        verbose: bool,
        /// Compiles for the card of the environment; the command starts one such process for each card.
        #[arg(long, hide = true)]
        child: bool,
        /// Only kernels whose label contains one of these.
        filter: Vec<String>,
    },
    /// Calls every operation with unusual arguments on the null device; none may panic.
    #[command(args_conflicts_with_subcommands = true)]
    Fuzz {
        #[command(subcommand)]
        other: Option<FuzzCommand>,
        /// Calls of each operation.
        #[arg(long, default_value_t = 2000)]
        rounds: u64,
        /// Seed of the arguments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Prints each call before it runs, to find a call that crashes or hangs.
        #[arg(long, short)]
        verbose: bool,
        /// Only operations whose name contains this; `=name` for exactly one.
        filter: Option<String>,
    },
    /// Replays allocation traces of real workloads, and compares the pool with PyTorch's allocator.
    Traces {
        /// Folder of the traces and of reserved.jsonl.
        #[arg(long, env = "FOREBAY_TRACES")]
        dir: Option<PathBuf>,
    },
}

/// Other kinds of fuzzing.
#[derive(Subcommand)]
enum FuzzCommand {
    /// Runs random elementwise chains with and without fusion, and compares bits.
    Chains {
        #[command(flatten)]
        options: fuzz::chains::ChainOptions,
        /// Device id (`cuda:0`, `wgpu`); every available backend by default.
        #[arg(long)]
        device: Option<String>,
    },
    /// Runs random programs in several modes, and compares values and gradients with f64 on the host.
    Programs {
        #[command(flatten)]
        options: fuzz::programs::ProgramOptions,
        /// Device id (`cuda:0`, `wgpu`); every available backend by default.
        #[arg(long)]
        device: Option<String>,
    },
}

/// Returns a data folder: next to the program in a bundle, otherwise in the sources of this package.
///
/// # Errors
/// Neither has the folder.
fn data_dir(name: &str) -> Result<PathBuf> {
    let bundled = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("tests").join(name)));
    let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name);
    let mut folders = bundled.into_iter().chain([sources]);
    folders.find(|folder| folder.is_dir()).with_context(|| {
        format!("this package has no folder `{name}`; name that of a checkout, tests/{name}, with --dir")
    })
}

/// Opens the requested device, or the first one of every backend.
fn select_devices(requested: Option<&str>) -> Result<Vec<Device>> {
    if let Some(id) = requested {
        return Ok(vec![match id {
            "wgpu-minimum" => suite::wgpu_devices::open_minimum()?,
            id => Device::open(id)?,
        }]);
    }
    if std::env::var("FOREBAY_DEVICE").is_ok_and(|id| !id.is_empty()) {
        return Ok(vec![Device::best()?]);
    }
    let found = Device::enumerate();
    let mut devices: Vec<Device> = Vec::new();
    for f in &found {
        match &f.unavailable_reason {
            Some(reason) => println!("not found: {}: {reason}", f.id),
            None if devices.iter().any(|d| f.id.starts_with(d.info().backend)) => {}
            None => devices.push(Device::open(&f.id)?),
        }
    }
    for required in std::env::var("FOREBAY_REQUIRE").unwrap_or_default().split(',').filter(|r| !r.is_empty())
    {
        if ["cuda", "wgpu"].contains(&required) && !devices.iter().any(|d| d.info().backend == required) {
            bail!("FOREBAY_REQUIRE requires {required}, which was not found");
        }
    }
    if devices.is_empty() {
        bail!("no device was found");
    }
    Ok(devices)
}

/// Prints the devices that are found, and why others are not.
fn list_devices() {
    for f in Device::enumerate() {
        match f.unavailable_reason {
            None => println!("{:8} {} ({})", f.id, f.name, f.driver),
            Some(reason) => println!("{:8} not found: {reason}", f.id),
        }
    }
}

/// Runs the tests on each device.
fn run_tests(device: Option<&str>, shard: suite::Shard, filter: &[String]) -> Result<()> {
    let errors = validation::install_error_counter();
    let mut tally = suite::Tally::default();
    for device in select_devices(device)? {
        println!("{}", device.info());
        suite::check_filters(&device, filter)?;
        tally += suite::run_shard(&device, shard, filter);
    }
    if let Some(errors) = errors {
        println!("errors of Vulkan's validation layer: {}", errors.count());
        tally.failed += usize::from(errors.count() > 0);
    }
    println!("{tally}");
    if tally.failed > 0 {
        bail!("{} tests failed", tally.failed);
    }
    Ok(())
}

/// Compares training curves on each device.
fn run_curves(dir: Option<PathBuf>, device: Option<&str>) -> Result<()> {
    let dir = dir.map_or_else(|| data_dir("curves"), Ok)?;
    let mut failed = 0;
    for device in select_devices(device)? {
        println!("{}", device.info());
        failed += curves::print_report(&curves::run(&dir, &device)?, &device);
    }
    if failed > 0 {
        bail!("{failed} curves failed");
    }
    Ok(())
}

/// Returns the type that golden calls run in, or `None` for their own.
fn parse_golden_dtype(dtype: Option<&str>) -> Result<Option<DType>> {
    Ok(match dtype {
        None | Some("f32") => None,
        Some("f16") => Some(DType::F16),
        Some("bf16") => Some(DType::BF16),
        Some("f64") => Some(DType::F64),
        Some(other) => bail!("--dtype takes f16, bf16, f32 or f64, not {other}"),
    })
}

/// Runs the golden calls on each device.
fn run_golden(
    dir: Option<PathBuf>,
    device: Option<&str>,
    dtype: Option<DType>,
    verbose: bool,
    filter: &[String],
) -> Result<()> {
    let dirs = match dir {
        Some(dir) => vec![dir],
        None => vec![data_dir("golden")?, data_dir("golden_more")?],
    };
    let golden: Vec<_> = dirs.iter().map(|dir| golden::GoldenSet::load(dir)).collect::<Result<_>>()?;
    let mut failed = 0;
    for device in select_devices(device)? {
        println!("{}", device.info());
        let how = golden::CallConfig { device: &device, dtype };
        let mut outcomes = Vec::new();
        for golden in &golden {
            outcomes.extend(golden.run(&how, filter)?);
        }
        failed += golden::print_report(&outcomes, &how, verbose);
    }
    if failed > 0 {
        bail!("{failed} golden calls failed");
    }
    Ok(())
}

/// Runs random chains on each device.
fn run_fuzz_chains(options: &fuzz::chains::ChainOptions, device: Option<&str>) -> Result<()> {
    let mut differ = 0;
    for device in select_devices(device)? {
        println!("{}", device.info());
        let summary = fuzz::chains::run(&device, options)?;
        println!("{summary}");
        differ += summary.differences.len();
    }
    if differ > 0 {
        bail!("{differ} chains differ");
    }
    Ok(())
}

/// Runs random programs on each device.
fn run_fuzz_programs(options: &fuzz::programs::ProgramOptions, device: Option<&str>) -> Result<()> {
    let mut failed = 0;
    for device in select_devices(device)? {
        println!("{}", device.info());
        let summary = fuzz::programs::run(options, &device, |program| println!("{program}"));
        println!("{summary}");
        failed += summary.failures.len();
    }
    if failed > 0 {
        bail!("{failed} programs failed");
    }
    Ok(())
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Devices => list_devices(),
        Command::Test { list: true, .. } => {
            for (topic, test) in suite::all_tests() {
                println!("{topic}/{}", test.name);
            }
        }
        Command::Test { device, shard, filter, .. } => run_tests(device.as_deref(), shard, &filter)?,
        Command::Curves { dir, device } => run_curves(dir, device.as_deref())?,
        Command::Golden { dir, device, dtype, verbose, filter } => {
            run_golden(dir, device.as_deref(), parse_golden_dtype(dtype.as_deref())?, verbose, &filter)?;
        }
        Command::Operators { folder } => {
            forebay::io::write_bytes(folder.join("pytorch-names.md"), names::render_page()?)?;
            let page = golden::render_page(&golden::GoldenSet::load(&data_dir("golden")?)?)?;
            forebay::io::write_bytes(folder.join("operators.md"), page)?;
        }
        Command::Kernels { writers: true, dir, filter, .. } => {
            let report = writers::check(&dir.map_or_else(|| data_dir("golden"), Ok)?, &filter)?;
            println!("{report}");
            if !report.failures.is_empty() {
                bail!("{} kernels cannot be written", report.failures.len());
            }
        }
        Command::Kernels { web: Some(file), dir, .. } => {
            let count = web_kernels::write(&dir.map_or_else(|| data_dir("golden"), Ok)?, &file)?;
            println!("{count} kernels are in {}", file.display());
        }
        Command::Kernels { times: true, dir, filter, .. } => {
            println!("{}", compile_times::measure(&dir.map_or_else(|| data_dir("golden"), Ok)?, &filter)?);
        }
        Command::Kernels { architectures, dir, filter, .. } => {
            let report =
                kernels::check(&dir.map_or_else(|| data_dir("golden"), Ok)?, &architectures, &filter)?;
            println!("{report}");
            if !report.failures.is_empty() {
                bail!("{} kernels failed", report.failures.len());
            }
        }
        Command::Radv { families, tuned, dir, page, verbose, child, filter } => {
            let golden = dir.map_or_else(|| data_dir("golden"), Ok)?;
            let options = radv::RadvOptions { families, tuned, verbose, filters: filter, golden: &golden };
            if child {
                return radv::compile_in_child(&options);
            }
            let text = radv::check(&options)?;
            if let Some(page) = page {
                forebay::io::write_bytes(&page, text)?;
            }
        }
        Command::Fuzz { other: Some(FuzzCommand::Chains { options, device }), .. } => {
            run_fuzz_chains(&options, device.as_deref())?;
        }
        Command::Fuzz { other: Some(FuzzCommand::Programs { options, device }), .. } => {
            run_fuzz_programs(&options, device.as_deref())?;
        }
        Command::Fuzz { rounds, seed, verbose, filter, .. } => {
            let tell = |call: &str| {
                if verbose {
                    println!("{call}");
                }
            };
            let counts = fuzz::run(rounds, seed, filter.as_deref().unwrap_or(""), tell)?;
            println!("{} calls, {} of them succeeded, none panicked", counts.calls, counts.succeeded);
        }
        Command::Traces { dir } => {
            let report = traces::check(&dir.map_or_else(|| data_dir("traces"), Ok)?)?;
            println!("{report}");
            if report.failed() > 0 {
                bail!("{} checks of traces failed", report.failed());
            }
        }
    }
    Ok(())
}

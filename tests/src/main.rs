//! The conformance suite, as one program that needs nothing but a device.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use forebay::device::Device;
use forebay::prelude::*;
use forebay_conformance::{curves, fuzz, golden, kernels, suite, traces, validation};

#[derive(Parser)]
#[command(about = "Runs forebay's conformance suite on the devices of this machine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists devices, and why those that cannot be used cannot.
    Devices,
    /// Runs the suite's own tests on every backend that is found.
    Test {
        /// A device id (`cuda:0`, `wgpu`); every backend that is found, if not given.
        #[arg(long)]
        device: Option<String>,
        /// Names the tests, and runs none.
        #[arg(long)]
        list: bool,
        /// Only tests whose name (`topic/name/wgpu:0`) contains one of these.
        filter: Vec<String>,
    },
    /// Trains whole models as PyTorch did, and compares the losses.
    Curves {
        /// The folder of the curves.
        #[arg(long)]
        dir: Option<PathBuf>,
        /// A device id (`cuda:0`, `wgpu`); every backend that is found, if not given.
        #[arg(long)]
        device: Option<String>,
    },
    /// Compares single operations, and their gradients, with PyTorch's results.
    Golden {
        /// A folder of golden.json and golden.safetensors instead of those of this package.
        #[arg(long, env = "FOREBAY_GOLDEN")]
        dir: Option<PathBuf>,
        /// A device id (`cuda:0`, `wgpu`); every backend that is found, if not given.
        #[arg(long)]
        device: Option<String>,
        /// Makes the calls in this type: f16, bf16 or f64.
        #[arg(long)]
        dtype: Option<String>,
        /// Lists what is unsupported, and why.
        #[arg(long, short)]
        verbose: bool,
        /// Only calls whose name contains one of these.
        filter: Vec<String>,
    },
    /// Writes docs/operators.md: what there is of PyTorch's operator database.
    Operators {
        /// The file.
        file: PathBuf,
    },
    /// Compiles every kernel without a GPU: naga checks it, NVRTC makes CUDA code of it.
    Kernels {
        /// Quickly, for these architectures alone, such as 75,90: unoptimised, and what asks nothing of its architecture for the first.
        #[arg(long, value_delimiter = ',')]
        architectures: Vec<u32>,
        /// The folder of the golden calls, whose kernels are compiled too.
        #[arg(long, env = "FOREBAY_GOLDEN")]
        dir: Option<PathBuf>,
        /// Only kernels whose label (`optim algorithm=adam`) contains one of these.
        filter: Vec<String>,
    },
    /// Calls every operation with arguments that nobody would choose, on the null device: none may panic.
    Fuzz {
        /// Calls of each operation.
        #[arg(long, default_value_t = 2000)]
        rounds: u64,
        /// Seed of the arguments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Names each call before it is made: the last one is the call that ended the process, or never ends.
        #[arg(long, short)]
        verbose: bool,
        /// Only operations whose name contains this; one alone with `=` in front of its name.
        filter: Option<String>,
    },
    /// Replays allocator traces of real workloads, and compares with PyTorch's allocator.
    Traces {
        /// The folder of the traces and of reserved.jsonl.
        #[arg(long, env = "FOREBAY_TRACES")]
        dir: Option<PathBuf>,
    },
}

/// A folder of this package, wherever the program runs: beside the program in a bundle, else in the sources.
fn data_dir(name: &str) -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("tests").join(name)));
    match beside {
        Some(path) if path.is_dir() => path,
        _ => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name),
    }
}

/// The devices to run on: the one asked for, else the first of every backend.
fn select_devices(asked: Option<&str>) -> Result<Vec<Device>> {
    if let Some(id) = asked {
        return Ok(vec![Device::open(id)?]);
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
            bail!("FOREBAY_REQUIRE asks for {required}, and there is none");
        }
    }
    if devices.is_empty() {
        bail!("no device was found");
    }
    Ok(devices)
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Devices => {
            for f in Device::enumerate() {
                match f.unavailable_reason {
                    None => println!("{:8} {} ({})", f.id, f.name, f.driver),
                    Some(reason) => println!("{:8} not found: {reason}", f.id),
                }
            }
        }
        Command::Test { list: true, .. } => {
            for (topic, test) in suite::all_tests() {
                println!("{topic}/{}", test.name);
            }
        }
        Command::Test { device, filter, .. } => {
            let errors = validation::install_error_counter();
            let mut tally = suite::Tally::default();
            for device in select_devices(device.as_deref())? {
                println!("{}", device.info());
                tally += suite::run(&device, &filter);
            }
            if let Some(errors) = errors {
                println!("errors of Vulkan's validation layer: {}", errors.count());
                tally.failed += usize::from(errors.count() > 0);
            }
            println!("{tally}");
            if tally.failed > 0 {
                bail!("{} tests failed", tally.failed);
            }
        }
        Command::Curves { dir, device } => {
            let dir = dir.unwrap_or_else(|| data_dir("curves"));
            let mut failed = 0;
            for device in select_devices(device.as_deref())? {
                println!("{}", device.info());
                failed += curves::print_report(&curves::run(&dir, &device)?, &device);
            }
            if failed > 0 {
                bail!("{failed} curves failed");
            }
        }
        Command::Golden { dir, device, dtype, verbose, filter } => {
            let dtype = match dtype.as_deref() {
                None | Some("f32") => None,
                Some("f16") => Some(DType::F16),
                Some("bf16") => Some(DType::BF16),
                Some("f64") => Some(DType::F64),
                Some(other) => bail!("--dtype takes f16, bf16, f32 or f64, not {other}"),
            };
            let dirs = dir.map_or_else(|| vec![data_dir("golden"), data_dir("golden_more")], |dir| vec![dir]);
            let golden: Vec<_> =
                dirs.iter().map(|dir| golden::GoldenSet::load(dir)).collect::<Result<_>>()?;
            let mut failed = 0;
            for device in select_devices(device.as_deref())? {
                println!("{}", device.info());
                let how = golden::CallConfig { device: &device, dtype };
                let mut outcomes = Vec::new();
                for golden in &golden {
                    outcomes.extend(golden.run(&how, &filter)?);
                }
                failed += golden::print_report(&outcomes, &how, verbose);
            }
            if failed > 0 {
                bail!("{failed} golden calls failed");
            }
        }
        Command::Operators { file } => {
            let page = golden::render_page(&golden::GoldenSet::load(&data_dir("golden"))?)?;
            forebay::io::write_bytes(&file, page)?;
        }
        Command::Kernels { architectures, dir, filter } => {
            let report = kernels::check(&dir.unwrap_or_else(|| data_dir("golden")), &architectures, &filter)?;
            println!("{report}");
            if !report.failures.is_empty() {
                bail!("{} kernels failed", report.failures.len());
            }
        }
        Command::Fuzz { rounds, seed, verbose, filter } => {
            let tell = |call: &str| {
                if verbose {
                    println!("{call}");
                }
            };
            let counts = fuzz::run(rounds, seed, filter.as_deref().unwrap_or(""), tell)?;
            println!("{} calls, {} of them succeeded, none panicked", counts.calls, counts.succeeded);
        }
        Command::Traces { dir } => {
            let report = traces::check(&dir.unwrap_or_else(|| data_dir("traces")))?;
            println!("{report}");
            if report.failed() > 0 {
                bail!("{} checks of traces failed", report.failed());
            }
        }
    }
    Ok(())
}

//! Tests of every device, by topic.
//!
//! A test is a function of a device, listed once in its topic. [`run`] runs all tests on one device. Its backend may
//! come from outside the workspace: `suite::run(&Device::new(backend)?, &[])`.
//!
//! A test that a device cannot run returns `skip` with the reason, and is counted as skipped. A test that leaks
//! memory or panics has failed.

use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use forebay::device::Device;

mod activation_checkpointing;
mod amp;
mod asynchronous;
mod attention;
mod attention_long;
mod attention_masks;
mod autocast_cache;
mod autograd;
mod capture;
mod composites;
mod convolutions;
mod creation;
mod custom_op;
mod decompositions;
mod devices;
mod distances;
mod dlpack;
mod double_backward;
mod edges;
mod errors;
mod exponentials;
mod fault_injection;
mod faulty_backend;
mod float8;
mod fusion;
mod fusion_values;
mod gpt;
mod grad_scaler;
mod hooks;
mod host_reference;
mod index_order;
mod indexing;
mod inplace;
mod lbfgs;
mod linalg;
mod linear;
mod load_state_dict;
mod long_loops;
mod long_rows;
mod losses;
mod matmul;
mod matmul_batches;
mod memory;
mod memory_tags;
mod minilm;
mod modulation;
mod modules;
mod norms;
mod numeric_ranges;
mod op_catalog;
mod optim;
mod optim_options;
mod order_statistics;
mod plan;
mod pointwise;
mod pooling;
mod post_norm;
mod printing;
mod profiler;
mod random;
mod random_blocks;
mod random_graphs;
mod random_programs;
mod recurrent;
mod reductions;
mod reentrant_backward;
mod resize;
mod runner;
mod scope_guards;
mod sorting;
mod step_costs;
mod streams;
mod tensors;
mod tile_autotune;
mod train_resume;
mod trainer_fit;
mod training;
mod two_device_training;
mod two_devices;
mod view_chains;
mod wgpu_buffers;
pub mod wgpu_devices;
mod wgsl;
mod wide_integers;

pub use runner::{Tally, Test};
use runner::{compute_dtypes, require_dtype, skip, tests};

const TOPICS: &[(&str, &[Test])] = &[
    ("tensors", tensors::TESTS),
    ("creation", creation::TESTS),
    ("view_chains", view_chains::TESTS),
    ("printing", printing::TESTS),
    ("fusion", fusion::TESTS),
    ("fusion_values", fusion_values::TESTS),
    ("pointwise", pointwise::TESTS),
    ("pooling", pooling::TESTS),
    ("random", random::TESTS),
    ("op_catalog", op_catalog::TESTS),
    ("autograd", autograd::TESTS),
    ("double_backward", double_backward::TESTS),
    ("hooks", hooks::TESTS),
    ("reentrant_backward", reentrant_backward::TESTS),
    ("random_graphs", random_graphs::TESTS),
    ("random_blocks", random_blocks::TESTS),
    ("random_programs", random_programs::TESTS),
    ("activation_checkpointing", activation_checkpointing::TESTS),
    ("inplace", inplace::TESTS),
    ("amp", amp::TESTS),
    ("autocast_cache", autocast_cache::TESTS),
    ("scope_guards", scope_guards::TESTS),
    ("attention", attention::TESTS),
    ("attention_long", attention_long::TESTS),
    ("attention_masks", attention_masks::TESTS),
    ("grad_scaler", grad_scaler::TESTS),
    ("decompositions", decompositions::TESTS),
    ("fault_injection", fault_injection::TESTS),
    ("custom_op", custom_op::TESTS),
    ("memory", memory::TESTS),
    ("streams", streams::TESTS),
    ("memory_tags", memory_tags::TESTS),
    ("capture", capture::TESTS),
    ("plan", plan::TESTS),
    ("gpt", gpt::TESTS),
    ("float8", float8::TESTS),
    ("matmul", matmul::TESTS),
    ("matmul_batches", matmul_batches::TESTS),
    ("tile_autotune", tile_autotune::TESTS),
    ("linear", linear::TESTS),
    ("linalg", linalg::TESTS),
    ("profiler", profiler::TESTS),
    ("step_costs", step_costs::TESTS),
    ("edges", edges::TESTS),
    ("wide_integers", wide_integers::TESTS),
    ("errors", errors::TESTS),
    ("devices", devices::TESTS),
    ("two_devices", two_devices::TESTS),
    ("two_device_training", two_device_training::TESTS),
    ("asynchronous", asynchronous::TESTS),
    ("dlpack", dlpack::TESTS),
    ("wgpu_devices", wgpu_devices::TESTS),
    ("wgpu_buffers", wgpu_buffers::TESTS),
    ("training", training::TESTS),
    ("reductions", reductions::TESTS),
    ("composites", composites::TESTS),
    ("resize", resize::TESTS),
    ("distances", distances::TESTS),
    ("convolutions", convolutions::TESTS),
    ("recurrent", recurrent::TESTS),
    ("long_rows", long_rows::TESTS),
    ("losses", losses::TESTS),
    ("long_loops", long_loops::TESTS),
    ("optim", optim::TESTS),
    ("optim_options", optim_options::TESTS),
    ("lbfgs", lbfgs::TESTS),
    ("modules", modules::TESTS),
    ("minilm", minilm::TESTS),
    ("norms", norms::TESTS),
    ("modulation", modulation::TESTS),
    ("post_norm", post_norm::TESTS),
    ("sorting", sorting::TESTS),
    ("order_statistics", order_statistics::TESTS),
    ("indexing", indexing::TESTS),
    ("index_order", index_order::TESTS),
    ("numeric_ranges", numeric_ranges::TESTS),
    ("exponentials", exponentials::TESTS),
    ("train_resume", train_resume::TESTS),
    ("trainer_fit", trainer_fit::TESTS),
    ("load_state_dict", load_state_dict::TESTS),
    ("wgsl", wgsl::TESTS),
];

/// Returns every test with its topic.
pub fn all_tests() -> impl Iterator<Item = (&'static str, Test)> {
    TOPICS.iter().flat_map(|&(topic, tests)| tests.iter().map(move |&test| (topic, test)))
}

/// Fails if a filter of [`run`] matches no test on this device, such as one with a name that was changed.
pub fn check_filters(device: &Device, filters: &[String]) -> Result<()> {
    for filter in filters {
        let part = filter.strip_prefix('!').unwrap_or(filter);
        let is_used = |(topic, test): (&str, Test)| format!("{topic}/{}/{device}", test.name).contains(part);
        ensure!(all_tests().any(is_used), "no test matches `{part}`; `test --list` prints all tests");
    }
    Ok(())
}

/// Runs the tests whose name (`topic/name/device`) contains one of `filters`, or all of them, and prints each. A
/// filter that begins with `!` leaves out the tests whose name contains its rest.
pub fn run(device: &Device, filters: &[String]) -> Tally {
    run_shard(device, Shard::default(), filters)
}

/// Runs the tests of [`run`] that belong to a shard.
pub fn run_shard(device: &Device, shard: Shard, filters: &[String]) -> Tally {
    let topics: Vec<_> = TOPICS.iter().skip(shard.number - 1).step_by(shard.count).copied().collect();
    runner::run_topics(device, &topics, filters, &mut |line| println!("{line}"))
}

/// Part of the suite, so that several processes share one run: every `count`-th topic from topic `number` on. Tests of
/// a topic stay together, because they share kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    number: usize,
    count: usize,
}

impl Default for Shard {
    /// Returns the whole suite.
    fn default() -> Self {
        Self { number: 1, count: 1 }
    }
}

impl FromStr for Shard {
    type Err = anyhow::Error;

    /// Parses `2/4`, the second of four shards.
    fn from_str(text: &str) -> Result<Self> {
        let parsed = text
            .split_once('/')
            .and_then(|(number, count)| Some((number.parse().ok()?, count.parse().ok()?)));
        match parsed {
            Some((number, count)) if (1..=count).contains(&number) => Ok(Self { number, count }),
            _ => bail!(
                "`{text}` is no shard; expected a number and a count, such as 2/4 for the second of four"
            ),
        }
    }
}

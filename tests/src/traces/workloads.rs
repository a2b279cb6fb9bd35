//! Synthetic workloads as traces, generated from a seed.

use forebay::memory::trace::Trace;

use super::trace_builder::TraceBuilder;
use super::{changing, language, miscellaneous, serving, vision};

type Workload = (&'static str, fn(&mut TraceBuilder));

const WORKLOADS: &[Workload] = &[
    ("text_varying", language::varying),
    ("text_buckets", language::buckets),
    ("text_tokens", language::tokens),
    ("text_curriculum", language::curriculum),
    ("text_checkpointed", language::checkpointed),
    ("text_accumulated", language::accumulated),
    ("text_evaluated", language::evaluated),
    ("text_adapters", language::adapters),
    ("text_sharded", language::sharded),
    ("text_pipelined", language::pipelined),
    ("text_translation", language::translation),
    ("text_experts", language::experts),
    ("text_preferences", language::preferences),
    ("text_recurrent", language::recurrent),
    ("serve_growing_cache", serving::growing_cache),
    ("serve_beam_search", serving::beam_search),
    ("serve_encoder_beam_search", serving::encoder_beam_search),
    ("serve_continuous_batching", serving::continuous_batching),
    ("serve_contiguous_caches", serving::contiguous_caches),
    ("serve_speculative_decoding", serving::speculative_decoding),
    ("serve_speech", serving::speech),
    ("serve_model_eviction", serving::model_eviction),
    ("serve_search", serving::search),
    ("image_batches", vision::growing_batches),
    ("image_sizes", vision::sizes),
    ("image_evaluation", vision::evaluation),
    ("image_inference", vision::inference),
    ("image_detection", vision::detection),
    ("image_volumes", vision::volumes),
    ("image_diffusion", vision::diffusion),
    ("image_gan", vision::gan),
    ("image_autotuning", vision::autotuning),
    ("graph_neighbour_sampling", miscellaneous::neighbour_sampling),
    ("graph_molecules", miscellaneous::molecules),
    ("point_clouds", miscellaneous::point_clouds),
    ("recommender", miscellaneous::recommender),
    ("reinforcement_learning", miscellaneous::reinforcement_learning),
    ("streams", miscellaneous::streams),
    ("branches", miscellaneous::branches),
    ("hyperparameter_search", miscellaneous::hyperparameter_search),
    ("small_tensors", miscellaneous::small_tensors),
    ("notebook", miscellaneous::notebook),
    ("matrices", miscellaneous::matrices),
];

/// Workloads whose blocks change their sizes. Their shapes are random too.
const CHANGING_WORKLOADS: &[Workload] = &[
    ("train_padded", changing::train_padded),
    ("train_checkpointed", changing::train_checkpointed),
    ("train_sorted", changing::train_sorted),
    ("train_and_evaluate", changing::train_and_evaluate),
    ("cache_of_one_text", changing::cache_of_one_text),
    ("cache_of_conversation", changing::cache_of_conversation),
    ("cache_of_texts", changing::cache_of_texts),
    ("cache_alone", changing::cache_alone),
];

/// Returns the traces of all workloads but those of changing sizes.
pub(super) fn synthetic_traces(seed: u64) -> impl Iterator<Item = Trace> {
    generate_traces(WORKLOADS, seed * 1000 + 1)
}

/// Returns the traces of workloads whose blocks change their sizes.
pub(super) fn changing_traces(seed: u64) -> impl Iterator<Item = Trace> {
    generate_traces(CHANGING_WORKLOADS, seed * 1000 + 501)
}

fn generate_traces(workloads: &'static [Workload], first_seed: u64) -> impl Iterator<Item = Trace> {
    workloads.iter().zip(first_seed..).map(|((name, run), seed)| {
        let mut program = TraceBuilder::new(seed);
        run(&mut program);
        program.into_trace(name)
    })
}

//! Training steps of models that no kernel was tuned for, eager and captured. `peers/models.py` has the same models.

mod capsules;
mod clip;
mod conformer;
mod densenet;
mod detector;
mod dit;
mod dlrm;
mod dqn;
mod edsr;
mod flow;
mod gat;
mod generative;
mod gla;
mod gmlp;
mod images;
mod longformer;
mod lora;
mod lovasz;
mod mae;
mod nerf;
mod others;
mod physics;
mod points;
mod ppo;
mod resnet;
mod sage;
mod segmentation;
mod seq2seq;
mod sequences;
mod sinkhorn;
mod small;
mod stylegan;
mod swin;
mod t5;
mod text;
mod vqvae;

use std::time::Instant;

use anyhow::{Context, Result, bail};
use forebay::amp::autocast;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::Module;
use forebay::optim::{AdamW, Optimizer};
use forebay::tensor::Tensor;
use serde_json::json;

use crate::host_cost::count_driver_calls;
use crate::timing::Bench;

/// Model on its device, with one batch.
struct Workload {
    /// Extents of the batch.
    shape: String,
    /// Number of elements of all parameters.
    parameters: usize,
    step: TrainStep,
}

impl Workload {
    /// Creates a workload whose step trains one network by AdamW, with the forward pass in bf16 by autocast.
    fn new<N: Module + 'static>(
        shape: &[usize],
        net: N,
        loss: impl Fn(&N) -> CoreResult<Tensor> + 'static,
    ) -> Self {
        let parameters = net.parameters();
        let mut optimizer = AdamW::new(parameters.clone(), 1e-4).low_precision_copies(true);
        let step = move || {
            let loss = {
                let _autocast = autocast(DType::BF16)?;
                loss(&net)?
            };
            loss.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(loss.detach())
        };
        Self::with_step(shape, &parameters, Box::new(step))
    }

    /// Creates a workload with a step of its own.
    fn with_step(shape: &[usize], parameters: &[Tensor], step: TrainStep) -> Self {
        let shape = shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        Self { shape, parameters: parameters.iter().map(Tensor::numel).sum(), step }
    }
}

/// Training step, which returns its loss.
pub(crate) type TrainStep = Box<dyn FnMut() -> CoreResult<Tensor>>;

/// Builds a model with a batch, small if `tiny`.
type Build = fn(tiny: bool, &Device) -> CoreResult<Workload>;

const MODELS: [(&str, Build); 48] = [
    ("decoder", text::decoder),
    ("bert", text::bert),
    ("mixture", text::mixture),
    ("linears", small::linears),
    ("convnet", images::convnet),
    ("unet", images::unet),
    ("graph", small::graph),
    ("lstm", small::lstm),
    ("convnext", others::convnext),
    ("mobilenet", others::mobilenet),
    ("autoencoder", others::autoencoder),
    ("translator", others::translator),
    ("audio", others::audio),
    ("recommender", others::recommender),
    ("volume", others::volume),
    ("swin", swin::swin),
    ("dcgan", generative::dcgan),
    ("speech", sequences::speech),
    ("statespace", sequences::statespace),
    ("efficientnet", images::efficientnet),
    ("points", points::points),
    ("t5", t5::t5),
    ("gat", gat::gat),
    ("dlrm", dlrm::dlrm),
    ("dit", dit::dit),
    ("nerf", nerf::nerf),
    ("edsr", edsr::edsr),
    ("densenet", densenet::densenet),
    ("segmentation", segmentation::segmentation),
    ("detector", detector::detector),
    ("clip", clip::clip),
    ("flow", flow::flow),
    ("gla", gla::gla),
    ("seq2seq", seq2seq::seq2seq),
    ("lora", lora::lora),
    ("physics", physics::physics),
    ("dqn", dqn::dqn),
    ("gmlp", gmlp::gmlp),
    ("conformer", conformer::conformer),
    ("mae", mae::mae),
    ("vqvae", vqvae::vqvae),
    ("stylegan", stylegan::stylegan),
    ("sage", sage::sage),
    ("longformer", longformer::longformer),
    ("capsules", capsules::capsules),
    ("sinkhorn", sinkhorn::sinkhorn),
    ("ppo", ppo::ppo),
    ("lovasz", lovasz::lovasz),
];

/// Returns the names of the models.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    MODELS.into_iter().map(|(name, _)| name)
}

/// Builds the eager step of a model: AdamW, with the forward pass in bf16 by autocast.
pub(crate) fn build_step(name: &str, tiny: bool, device: &Device) -> Result<TrainStep> {
    let (_, build) = MODELS.into_iter().find(|(known, _)| *known == name).context("no such model")?;
    Ok(build(tiny, device)?.step)
}

/// Prints one line for each model and variant. A model that fails gets a line with its error, and the others still run.
pub(crate) fn models(b: &Bench<'_>) -> Result<()> {
    let mut failed = Vec::new();
    for (name, build) in MODELS.into_iter().filter(|(name, _)| b.wants("models", name)) {
        for variant in ["bf16", "bf16_captured"] {
            if let Err(error) = bench_model(b, name, variant, build) {
                let fields = json!({ "variant": variant, "error": format!("{error:#}") });
                b.emit_line("models_train", name, "bf16", fields);
                failed.push(format!("{name} {variant}"));
            }
        }
    }
    if !failed.is_empty() {
        bail!("models that failed: {}; their lines have the errors", failed.join(", "));
    }
    Ok(())
}

fn bench_model(b: &Bench<'_>, name: &str, variant: &str, build: Build) -> Result<()> {
    // Its own pool, so that the peak belongs to this variant only.
    let device = &Device::with_config(b.device.backend().clone(), b.device.pool().config());
    device.manual_seed(1);
    let Workload { shape, parameters, mut step } = build(b.tiny, device)?;
    let shape = format!("{name} {shape}");
    device.synchronize()?;
    let start = Instant::now();
    let first_loss = step()?.item()?;
    let first_ms = start.elapsed().as_secs_f64() * 1e3;
    let mut captured = (variant == "bf16_captured").then(|| device.capture(&mut step)).transpose()?;
    let (mut driver_calls, mut waits) = (Vec::new(), Vec::new());
    let once = || {
        let before = count_driver_calls(device);
        let loss = match &mut captured {
            Some(captured) => captured.replay(),
            None => step(),
        };
        let after = count_driver_calls(device);
        driver_calls.push(after.0 - before.0);
        waits.push(after.1 - before.1);
        loss
    };
    let counts = if b.tiny { (1, 2) } else { (5, b.steps) };
    let (median_ms, last_loss) = Bench::time_steps(device, counts, once)?;
    let memory = device.memory();
    let mb = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    b.emit_line(
        "models_train",
        &shape,
        "bf16",
        json!({
            "variant": variant, "median_ms": median_ms,
            "capture": captured.as_ref().map(|c| format!("{}, graph: {}", c.stats(), c.is_driver_graph())),
            "first_ms": first_ms, "first_loss": first_loss, "last_loss": last_loss,
            "params": parameters, "driver_calls": driver_calls, "waits": waits,
            "peak_mem_mb": mb(memory.peak_allocated()), "peak_reserved_mb": mb(memory.peak_reserved()),
        }),
    );
    if variant == "bf16" {
        b.write_profile(device, &format!("models_{name}"), step)?;
    }
    Ok(())
}

//! Training runs compared with PyTorch's loss curves. Models, initial weights and batches are those of the PyTorch
//! runs. In f64, our losses must differ from PyTorch's at most five times as much as PyTorch's own f32 losses do.
//!
//! Two f32 runs diverge from step to step, and may cross. The difference at a step is therefore the largest relative
//! difference so far, at least 1e-5 / 5. Model sizes come from the shapes of the weights.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use forebay::device::Device;
use forebay::io::safetensors::{self, Tensors};
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, Embedding, LayerNorm, Linear, Module, SelfAttention};
use forebay::ops::Pool2dOptions;
use forebay::optim::schedule::WarmupCosine;
use forebay::optim::{Adam, AdamW, LrSchedule, Optimizer, RmsProp, Sgd, clip_grad_norm_};
use forebay::tensor::Tensor;
use serde::Deserialize;

/// Allowed multiple of PyTorch's own f32 difference, and the minimum relative tolerance.
const TOLERANCE_FACTOR: f64 = 5.0;
const MIN_RELATIVE_ERROR: f64 = 1e-5;

/// Reference curve, as the JSON file describes it.
#[derive(Debug, Deserialize)]
struct ReferenceCurve {
    #[serde(default = "default_accumulate")]
    accumulate: usize,
    optimizer: OptimizerConfig,
    /// Attention heads, which the shapes of weights do not determine.
    heads: Option<usize>,
    loss_f64: Vec<f64>,
    loss_f32: Vec<f64>,
    #[serde(default)]
    grad_norm_f64: Vec<f64>,
    #[serde(default)]
    grad_norm_f32: Vec<f64>,
}

fn default_accumulate() -> usize {
    1
}

#[derive(Debug, Deserialize)]
struct OptimizerConfig {
    opt: String,
    lr: f64,
    #[serde(default)]
    momentum: f64,
    #[serde(default)]
    dampening: f64,
    #[serde(default)]
    nesterov: bool,
    #[serde(default)]
    centered: bool,
    #[serde(default)]
    amsgrad: bool,
    alpha: Option<f64>,
    betas: Option<(f64, f64)>,
    eps: Option<f64>,
    weight_decay: Option<f64>,
    clip: Option<f64>,
    warmup: Option<u64>,
    cosine_to: Option<f64>,
}

impl OptimizerConfig {
    fn build_optimizer(&self, parameters: Vec<Tensor>) -> Result<Box<dyn Optimizer>> {
        let (betas, eps) = (self.betas.unwrap_or((0.9, 0.999)), self.eps.unwrap_or(1e-8));
        let decay = |default: f64| self.weight_decay.unwrap_or(default);
        Ok(match self.opt.to_ascii_lowercase().as_str() {
            "sgd" => Box::new(
                Sgd::new(parameters, self.lr)
                    .momentum(self.momentum)
                    .dampening(self.dampening)
                    .nesterov(self.nesterov)
                    .weight_decay(decay(0.0)),
            ),
            "adam" => Box::new(
                Adam::new(parameters, self.lr)
                    .betas(betas)
                    .eps(eps)
                    .weight_decay(decay(0.0))
                    .amsgrad(self.amsgrad),
            ),
            "adamw" => Box::new(
                AdamW::new(parameters, self.lr)
                    .betas(betas)
                    .eps(eps)
                    .weight_decay(decay(0.01))
                    .amsgrad(self.amsgrad),
            ),
            "rmsprop" => Box::new(
                RmsProp::new(parameters, self.lr)
                    .alpha(self.alpha.unwrap_or(0.99))
                    .eps(eps)
                    .weight_decay(decay(0.0))
                    .momentum(self.momentum)
                    .centered(self.centered),
            ),
            other => bail!("no optimiser `{other}`; there are sgd, adam, adamw and rmsprop"),
        })
    }

    fn lr_at(&self, step: usize, steps: usize) -> f64 {
        match (self.warmup, self.cosine_to) {
            (None, None) => self.lr,
            (warmup, to) => {
                let schedule = WarmupCosine::new(self.lr, warmup.unwrap_or(0), steps as u64);
                schedule.min_lr(to.unwrap_or(self.lr)).lr(step as u64)
            }
        }
    }
}

/// Model that returns class logits in its last dimension.
trait Classifier: Module {
    fn logits(&self, x: &Tensor) -> forebay::error::Result<Tensor>;

    fn loss(&self, x: &Tensor, y: &Tensor) -> forebay::error::Result<Tensor> {
        let logits = self.logits(x)?;
        let classes = logits.dim(-1)?;
        logits.reshape(&[-1, classes as isize][..])?.cross_entropy(&y.reshape([-1])?)
    }
}

/// Linear layers `fc1`, `fc2`, ... with ReLU between them.
struct Mlp(Vec<Linear>);

impl Module for Mlp {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, forebay::nn::ModuleEntry<'_>)) {
        for (k, layer) in self.0.iter().enumerate() {
            layer.visit(&forebay::nn::join_path(path, &format!("fc{}", k + 1)), f);
        }
    }
}

impl Classifier for Mlp {
    fn logits(&self, x: &Tensor) -> forebay::error::Result<Tensor> {
        let mut x = x.clone();
        for (k, layer) in self.0.iter().enumerate() {
            x = layer.forward(&x)?;
            if k + 1 < self.0.len() {
                x = x.relu()?;
            }
        }
        Ok(x)
    }
}

#[derive(Module)]
struct Cnn {
    c1: Conv2d,
    b1: BatchNorm2d,
    c2: Conv2d,
    b2: BatchNorm2d,
    fc: Linear,
}

impl Classifier for Cnn {
    fn logits(&self, x: &Tensor) -> forebay::error::Result<Tensor> {
        let x = self.b1.forward(&self.c1.forward(x)?)?.relu()?.max_pool2d(Pool2dOptions::new(2))?;
        let x = self.b2.forward(&self.c2.forward(&x)?)?.relu()?;
        self.fc.forward(&x.flatten(1, -1)?)
    }
}

#[derive(Module)]
struct Block {
    ln1: LayerNorm,
    attn: SelfAttention,
    ln2: LayerNorm,
    fc: Linear,
    out: Linear,
}

impl Block {
    fn forward(&self, x: &Tensor) -> forebay::error::Result<Tensor> {
        let x = x.add(&self.attn.forward(&self.ln1.forward(x)?)?)?;
        let hidden = self.fc.forward(&self.ln2.forward(&x)?)?.gelu_tanh()?;
        x.add(&self.out.forward(&hidden)?)
    }
}

/// GPT whose head shares the token embedding.
#[derive(Module)]
struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
}

impl Classifier for Gpt {
    fn logits(&self, x: &Tensor) -> forebay::error::Result<Tensor> {
        let length = x.dim(-1)?;
        let indices = self.wpe.weight.narrow(0, 0, length)?;
        let mut x = self.wte.forward(x)?.add(&indices)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.ln_f.forward(&x)?.linear(&self.wte.weight, None)
    }
}

/// Builds the model that has weights of these names and shapes.
fn build_model(weights: &Tensors, curve: &ReferenceCurve, device: &Device) -> Result<Box<dyn Classifier>> {
    let shape = |name: &str| {
        weights.get(name).map(|t| t.shape().to_vec()).with_context(|| format!("no weight `init/{name}`"))
    };
    let matrix = |name: &str| match shape(name)?[..] {
        [rows, cols] => Ok((rows, cols)),
        ref other => bail!("`init/{name}` is not a matrix: {other:?}"),
    };
    let count = |prefix: &str, suffix: &str, first: usize| {
        (first..).take_while(|k| weights.contains_key(&format!("{prefix}{k}{suffix}"))).count()
    };
    let linear = |name: &str| -> Result<Linear> {
        let (outputs, inputs) = matrix(&format!("{name}.weight"))?;
        Ok(if weights.contains_key(&format!("{name}.bias")) {
            Linear::new(inputs, outputs, device)?
        } else {
            Linear::without_bias(inputs, outputs, device)?
        })
    };
    if weights.contains_key("wte.weight") {
        let (tokens, features) = matrix("wte.weight")?;
        let (indices, _) = matrix("wpe.weight")?;
        let heads = curve.heads.unwrap_or(4);
        let norm = || LayerNorm::new([features], device);
        let block = |k: usize| -> Result<Block> {
            Ok(Block {
                ln1: norm()?,
                attn: SelfAttention::new(features, heads, device)?.causal(),
                ln2: norm()?,
                fc: linear(&format!("blocks.{k}.fc"))?,
                out: linear(&format!("blocks.{k}.out"))?,
            })
        };
        return Ok(Box::new(Gpt {
            wte: Embedding::new(tokens, features, device)?,
            wpe: Embedding::new(indices, features, device)?,
            blocks: (0..count("blocks.", ".ln1.weight", 0)).map(block).collect::<Result<_>>()?,
            ln_f: norm()?,
        }));
    }
    if weights.contains_key("c1.weight") {
        let conv = |name: &str, stride: usize| -> Result<Conv2d> {
            let weight = format!("{name}.weight");
            let [outputs, inputs, height, width] = shape(&weight)?[..] else {
                bail!("`init/{weight}` is no kernel of a convolution");
            };
            let options = Conv2dOptions {
                stride: [stride, stride],
                padding: [1, 1],
                bias: weights.contains_key(&format!("{name}.bias")),
                ..Conv2dOptions::default()
            };
            Ok(Conv2d::new(inputs, outputs, [height, width], options, device)?)
        };
        let norm = |name: &str| -> Result<BatchNorm2d> {
            Ok(BatchNorm2d::new(shape(&format!("{name}.weight"))?.iter().product(), device)?)
        };
        return Ok(Box::new(Cnn {
            c1: conv("c1", 1)?,
            b1: norm("b1")?,
            c2: conv("c2", 2)?,
            b2: norm("b2")?,
            fc: linear("fc")?,
        }));
    }
    let layers = count("fc", ".weight", 1);
    if layers == 0 {
        bail!("no model has weights of these names: {:?}", weights.keys().collect::<Vec<_>>());
    }
    Ok(Box::new(Mlp((1..=layers).map(|k| linear(&format!("fc{k}"))).collect::<Result<_>>()?)))
}

/// Result of comparing a run with its reference curve.
#[derive(Clone, Debug)]
pub struct CurveReport {
    /// Name of the curve.
    pub name: String,
    /// Number of compared steps.
    pub steps: usize,
    /// Largest difference of a loss in units of the tolerance, and its step.
    pub loss: (f64, usize),
    /// Largest difference of a gradient norm in units of the tolerance, and its step; `None` if not recorded.
    pub grad_norm: Option<(f64, usize)>,
    /// Our last loss, and PyTorch's in f64.
    pub last: (f64, f64),
    /// Error that ended the run early.
    pub error: Option<String>,
}

impl CurveReport {
    /// Reports whether all differences are within tolerance.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.error.is_none() && self.loss.0 <= 1.0 && self.grad_norm.is_none_or(|n| n.0 <= 1.0)
    }
}

/// Returns the largest difference from `exact` in units of the tolerance, and its step.
fn max_error(ours: &[f64], exact: &[f64], single: &[f64]) -> (f64, usize) {
    let mut distance = MIN_RELATIVE_ERROR / TOLERANCE_FACTOR;
    let mut worst = (0.0, 0);
    for (step, ((&ours, &exact), &single)) in ours.iter().zip(exact).zip(single).enumerate() {
        let scale = exact.abs().max(f64::MIN_POSITIVE);
        distance = f64::max(distance, (single - exact).abs() / scale);
        let off = (ours - exact).abs() / scale / (TOLERANCE_FACTOR * distance);
        if off > worst.0 || off.is_nan() {
            worst = (if off.is_nan() { f64::INFINITY } else { off }, step);
        }
    }
    worst
}

fn batch_tensor<'a>(data: &'a Tensors, kind: &str, k: usize) -> Result<&'a Tensor> {
    data.get(&format!("{kind}/{k}")).with_context(|| format!("no tensor `{kind}/{k}`"))
}

/// Trains as PyTorch did; returns losses and gradient norms.
fn train(curve: &ReferenceCurve, data: &Tensors, device: &Device) -> Result<(Vec<f64>, Vec<f64>)> {
    let weights: Tensors =
        data.iter().filter_map(|(k, t)| Some((k.strip_prefix("init/")?.to_owned(), t.clone()))).collect();
    let net = build_model(&weights, curve, device)?;
    net.load_state_dict(&weights)?;
    let mut optimizer = curve.optimizer.build_optimizer(net.parameters())?;
    let steps = curve.loss_f64.len();
    // Read back at the end, so that no step waits for the device.
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        optimizer.set_lr(curve.optimizer.lr_at(step, steps));
        let mut total: Option<Tensor> = None;
        for micro in 0..curve.accumulate {
            let k = step * curve.accumulate + micro;
            let loss = net
                .loss(batch_tensor(data, "x", k)?, batch_tensor(data, "y", k)?)?
                .div(curve.accumulate as f64)?;
            loss.backward()?;
            let loss = loss.detach();
            total = Some(match total {
                None => loss,
                Some(sum) => sum.add(&loss)?,
            });
        }
        losses.extend(total);
        // A bound that no norm reaches, so that gradients are not clipped.
        norms.push(clip_grad_norm_(optimizer.parameters(), curve.optimizer.clip.unwrap_or(1e30))?);
        optimizer.step()?;
        optimizer.zero_grad();
    }
    let read = |tensors: &[Tensor]| tensors.iter().map(|t| Ok(t.item()?)).collect::<Result<Vec<f64>>>();
    Ok((read(&losses)?, read(&norms)?))
}

fn run_curve(path: &Path, device: &Device) -> Result<CurveReport> {
    let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let curve: ReferenceCurve = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let data = safetensors::load(path.with_extension("safetensors"), device)?;
    let steps = curve.loss_f64.len();
    if curve.loss_f32.len() != steps || curve.grad_norm_f64.len() != curve.grad_norm_f32.len() {
        bail!("{}: the runs have different lengths", path.display());
    }
    Ok(match train(&curve, &data, device) {
        Ok((losses, norms)) => CurveReport {
            name,
            steps,
            loss: max_error(&losses, &curve.loss_f64, &curve.loss_f32),
            grad_norm: (!curve.grad_norm_f64.is_empty())
                .then(|| max_error(&norms, &curve.grad_norm_f64, &curve.grad_norm_f32)),
            last: (losses.last().copied().unwrap_or(f64::NAN), curve.loss_f64[steps - 1]),
            error: None,
        },
        Err(e) => CurveReport {
            name,
            steps,
            loss: (0.0, 0),
            grad_norm: None,
            last: (f64::NAN, f64::NAN),
            error: Some(e.to_string()),
        },
    })
}

/// Runs every curve of a folder.
///
/// # Errors
/// The folder has no curves, or its files cannot be read.
pub fn run(dir: &Path, device: &Device) -> Result<Vec<CurveReport>> {
    let entries = std::fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    let mut paths: Vec<PathBuf> = entries.map(|e| Ok(e?.path())).collect::<std::io::Result<Vec<_>>>()?;
    paths.retain(|p| p.extension().is_some_and(|e| e == "json") && p.with_extension("safetensors").is_file());
    paths.sort();
    if paths.is_empty() {
        bail!("{}: no curves (NAME.json with NAME.safetensors)", dir.display());
    }
    paths.iter().map(|path| run_curve(path, device)).collect()
}

/// Prints a line for each curve and a summary; returns the number of failures.
pub fn print_report(reports: &[CurveReport], device: &Device) -> usize {
    for r in reports {
        let verdict = if r.passed() { "passed" } else { "FAILED" };
        if let Some(error) = &r.error {
            println!("{verdict} {}: {error}", r.name);
            continue;
        }
        let norm = r.grad_norm.map_or(String::new(), |(off, step)| format!(", norms {off:.2} (step {step})"));
        println!(
            "{verdict} {}: {} steps, last loss {:.6} ({:.6}); of the distance allowed: losses {:.2} (step {}){norm}",
            r.name, r.steps, r.last.0, r.last.1, r.loss.0, r.loss.1
        );
    }
    let failed = reports.iter().filter(|r| !r.passed()).count();
    let backend = device.info().backend;
    println!("curves: {} passed, {failed} failed on {backend}", reports.len() - failed);
    failed
}

//! `forebay plan`: plans the training of a model within a memory budget, without a GPU.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::Args;
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::io::safetensors;
use forebay::memory::Bytes;
use forebay::nn::{Gpt, GptOptions, Module};
use forebay::optim::{AdamW, Optimizer};
use forebay::plan::{self, Budget, CARDS, StepConfig};
use forebay::tensor::Tensor;

#[derive(Args, Clone)]
pub(crate) struct PlanArgs {
    /// Model: gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1.5b, gpt3-6.7b, or a safetensors file with GPT-2's layout.
    #[arg(long, default_value = "gpt2-124m")]
    model: String,
    /// Number of transformer blocks. Replaces the model's value, as do the width, heads and vocab options.
    #[arg(long, value_parser = parse_positive)]
    layers: Option<usize>,
    /// Embedding width: features per token.
    #[arg(long, value_parser = parse_positive)]
    width: Option<usize>,
    /// Attention heads per block. If only the width is set, each head has 64 features.
    #[arg(long, value_parser = parse_positive)]
    heads: Option<usize>,
    /// Vocabulary size, in tokens.
    #[arg(long, value_parser = parse_positive)]
    vocab: Option<usize>,
    /// Batch size: sequences per optimiser step.
    #[arg(long, default_value_t = 8, value_parser = parse_positive)]
    batch: usize,
    /// Tokens per sequence; by default the model's maximum.
    #[arg(long, value_parser = parse_positive)]
    context: Option<usize>,
    /// Memory that training may use, such as 4GiB; by default all memory of the card.
    #[arg(long)]
    budget: Option<Bytes>,
    /// Card to plan for, such as rtx4090, h100 or t4. An unknown name lists all known cards.
    #[arg(long, default_value = "rtx4090")]
    card: String,
    /// Plans for the wgpu backend on a card that runs CUDA by default.
    #[arg(long)]
    wgpu: bool,
    /// Also allows autocast to a 16-bit dtype, bf16 or f16. May be repeated. Without it, the plan is of f32, and a line
    /// says what bf16 would take.
    #[arg(long, value_name = "DTYPE", value_parser = parse_half)]
    allow: Vec<DType>,
    /// Keeps everything on the card: disables offload to host memory.
    #[arg(long)]
    no_offload: bool,
    /// Stops at the first configuration that fits; by default all configurations are measured.
    #[arg(long)]
    quick: bool,
    /// Prints all measured configurations; by default only the Pareto front of memory and time.
    #[arg(long)]
    all: bool,
}

/// Reads the sizes of a model from the shapes in the header of a safetensors file. Skips the tensors' data.
fn read_model_sizes(path: &Path) -> Result<GptOptions> {
    let file = safetensors::open(path)?;
    let device = Device::null(CardProfile::default());
    // Only shapes count: tables give sizes, and each norm shows that its block exists.
    let names = file
        .keys()
        .filter(|name| ["wte.weight", "wpe.weight", "ln_1.weight"].iter().any(|end| name.ends_with(end)));
    let shape = |name| Tensor::empty(file.shape(name).unwrap_or_default(), DType::U8, &device);
    let shapes = names.map(|name| Ok((name.to_owned(), shape(name)?))).collect::<Result<_>>()?;
    GptOptions::from_gpt2_state_dict(&shapes).with_context(|| format!("`{}`", path.display()))
}

fn parse_half(name: &str) -> Result<DType, String> {
    match name {
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        other => Err(format!("`{other}` is neither bf16 nor f16; f32 is always allowed")),
    }
}

fn parse_positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("expected a whole number of at least 1, got `{text}`")),
    }
}

impl PlanArgs {
    pub(crate) fn run(self) -> Result<()> {
        let (card, options, context, plan) = self.compute_plan()?;
        let GptOptions { layers, width, heads, vocabulary, .. } = options;
        println!(
            "{} ({layers} layers, width {width}, {heads} heads, {vocabulary} tokens), {} sequences of {context} tokens per step, AdamW, on {}",
            self.model, self.batch, card.name
        );
        if self.all {
            println!("{plan:#}")
        } else {
            println!("{plan}\n--all prints all configurations")
        }
        if let Some(comparison) = self.compare_with_half(&plan)? {
            println!("{comparison}");
        }
        Ok(())
    }

    /// Returns the sizes of the named or saved model, replaced by those of the options.
    fn model_options(&self) -> Result<GptOptions> {
        let path = Path::new(&self.model);
        let mut options = if path.extension().is_some_and(|end| end == "safetensors") {
            read_model_sizes(path)?
        } else {
            GptOptions::preset(&self.model)?
        };
        options.layers = self.layers.unwrap_or(options.layers);
        options.vocabulary = self.vocab.unwrap_or(options.vocabulary);
        if let Some(width) = self.width {
            options.width = width;
            options.heads = (width / 64).max(1);
        }
        options.heads = self.heads.unwrap_or(options.heads);
        let GptOptions { width, heads, .. } = options;
        ensure!(
            width.is_multiple_of(heads),
            "a width of {width} is not a multiple of {heads} heads; set `--heads` to a divisor of the width"
        );
        Ok(options)
    }

    /// Compares an f32 plan with bf16 autocast by dry runs, if no 16-bit dtype is allowed.
    fn compare_with_half(&self, plan: &plan::StepPlan) -> Result<Option<String>> {
        if !self.allow.is_empty() {
            return Ok(None);
        }
        let half = Self { allow: vec![DType::BF16], quick: true, ..self.clone() };
        let (.., half) = half.compute_plan()?;
        let (half, full) = (half.best, &plan.best);
        // In 16 bits, the fastest configuration is no slower than in f32.
        if half.config.precision.is_none() {
            return Ok(None);
        }
        let (Some(peak), Some(full_peak)) = (half.peak, full.peak) else { return Ok(None) };
        Ok(Some(format!(
            "--allow bf16 would take {:.1} ms a step instead of {:.1} and a peak of {} instead of {}: {}",
            half.seconds * 1e3,
            full.seconds * 1e3,
            Bytes(peak),
            Bytes(full_peak),
            half.config
        )))
    }

    /// Returns the card, the model's sizes, the tokens of a sequence, and the plan for `train_gpt`'s step.
    fn compute_plan(&self) -> Result<(CardProfile, GptOptions, usize, plan::StepPlan)> {
        let options = self.model_options()?;
        let context = self.context.unwrap_or(options.context);
        let options = GptOptions { context: context.max(options.context), ..options };
        let mut card = CardProfile::from_card(&self.card)?;
        if self.wgpu {
            card = card.with_wgpu_limits();
        }
        let budget = self.budget.map_or(card.available_bytes(), |b| b.0);
        let mut budget = Budget::new(budget, self.batch);
        for dtype in &self.allow {
            budget = budget.allow_precision(*dtype);
        }
        if self.no_offload {
            budget = budget.without_offload();
        }
        if !self.quick {
            budget = budget.measure_all();
        }
        let batch = self.batch;
        let plan = budget.plan(&card, |device| {
            let net = Gpt::new(&options, device)?;
            let mut optimizer = AdamW::new(net.parameters(), 3e-4);
            let device = device.clone();
            Ok(move |choice: &StepConfig| {
                optimizer.offload_state(choice.offload_state);
                for _ in 0..choice.micro_batch_count {
                    let text = || Tensor::zeros([choice.micro_batch_size, context], DType::I64, &device);
                    let autocast = choice.autocast()?;
                    let loss = net.loss(&text()?, &text()?)?;
                    drop(autocast);
                    // Like `train_gpt`: the micro-batches' gradients sum to the gradient of the whole batch.
                    loss.mul(choice.micro_batch_size as f64 / batch as f64)?.backward()?;
                }
                optimizer.step()?;
                optimizer.zero_grad();
                Ok(())
            })
        });
        let plan = plan.map_err(|error| match error {
            // Another card may have room for the step.
            Error::BudgetTooSmall { .. } => anyhow::anyhow!("{error}\nknown cards: {}", CARDS.join(", ")),
            error => error.into(),
        });
        Ok((card, options, context, plan?))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        plan: PlanArgs,
    }

    #[test]
    fn a_plan_is_made_for_the_training_step() -> Result<()> {
        let args = ["plan", "--card", "h100", "--context", "1024", "--allow", "bf16", "--quick"];
        let (_, _, _, plan) = Command::try_parse_from(args)?.plan.compute_plan()?;
        // About what `forebay-bench run gpt` takes: the scores of all positions would be 1.6 GiB more.
        let peak = plan.best.peak.map(|bytes| bytes >> 20);
        assert!(peak.is_some_and(|mib| (3_950..4_100).contains(&mib)), "{peak:?} MiB");
        for nothing in [["plan", "--batch", "0"], ["plan", "--context", "0"], ["plan", "--batch", "x"]] {
            let wrong = Command::try_parse_from(nothing).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(wrong.contains("expected a whole number of at least 1"), "{wrong}");
        }
        Ok(())
    }

    fn make_plan(args: &[&str]) -> Result<(GptOptions, usize, plan::StepPlan)> {
        let (_, options, context, plan) =
            Command::try_parse_from(["plan"].iter().chain(args))?.plan.compute_plan()?;
        Ok((options, context, plan))
    }

    const SMALL: [&str; 12] = [
        "--layers",
        "2",
        "--width",
        "128",
        "--vocab",
        "500",
        "--context",
        "64",
        "--batch",
        "4",
        "--budget",
        "64MiB",
    ];

    #[test]
    fn the_best_config_comes_first_and_then_the_pareto_front() -> Result<()> {
        let (options, context, plan) = make_plan(&SMALL)?;
        assert_eq!((options.layers, options.width, options.heads, options.vocabulary), (2, 128, 2, 500));
        assert_eq!(context, 64);
        let (few, all) = (plan.to_string(), format!("{plan:#}"));
        for text in [&few, &all] {
            let mut lines = text.lines();
            let first = lines.next().unwrap_or_default();
            assert!(first.starts_with("within 64.0 MiB on ") && first.contains("rows, f32"), "{text}");
            assert!(lines.next().is_some_and(|line| line.starts_with("  peak ")), "{text}");
        }
        let measured = plan.estimates.iter().filter(|e| e.peak.is_some()).count();
        assert_eq!(all.lines().count(), measured + 4, "{all}");
        let front = plan.pareto();
        assert_eq!(few.lines().count(), front.len() + 4, "{few}");
        assert!(front.len() < measured);
        for (k, one) in front.iter().enumerate() {
            let beaten = |by: &&plan::Estimate| by.seconds <= one.seconds && by.peak < one.peak;
            assert!(!plan.estimates.iter().any(|by| by.peak.is_some() && beaten(&by)), "row {k} of {few}");
        }
        let wrong = make_plan(&["--width", "100", "--heads", "3"]).err().map(|e| e.to_string());
        assert!(wrong.is_some_and(|e| e.contains("`--heads`")));
        Ok(())
    }

    #[test]
    fn an_f32_plan_says_what_16_bits_would_take() -> Result<()> {
        // Launches dominate the steps of narrower layers.
        let wide = SMALL.map(|word| match word {
            "128" => "1024",
            "64MiB" => "2GiB",
            word => word,
        });
        let compare = |more: &[&str]| -> Result<_> {
            let args = Command::try_parse_from(["plan"].iter().chain(&wide).chain(more))?.plan;
            let (.., plan) = args.compute_plan()?;
            Ok((args.compare_with_half(&plan)?, plan.best))
        };
        let (comparison, full) = compare(&[])?;
        let (none, half) = compare(&["--allow", "bf16", "--quick"])?;
        assert_eq!(none, None);
        assert!(half.config.precision == Some(DType::BF16) && half.seconds < full.seconds);
        let text = comparison.unwrap_or_default();
        let milliseconds = |estimate: &plan::Estimate| format!("{:.1}", estimate.seconds * 1e3);
        let peak = |estimate: &plan::Estimate| Bytes(estimate.peak.unwrap_or(0)).to_string();
        for figure in [milliseconds(&half), milliseconds(&full), peak(&half), peak(&full)] {
            assert!(
                text.starts_with("--allow bf16 would take ") && text.contains(&figure),
                "{figure}: {text}"
            );
        }
        Ok(())
    }

    #[test]
    fn sizes_are_read_from_a_saved_model() -> Result<()> {
        let folder = std::env::temp_dir().join(format!("forebay-plan-{}", std::process::id()));
        let path = folder.join("model.safetensors");
        let name = path.display().to_string();
        let device = Device::null(CardProfile::default());
        // Saves a model whose table of positions and whose second norm have these shape and name.
        let save = |positions: [usize; 2], second: &str| -> Result<()> {
            let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
            let tensors = [
                ("transformer.wte.weight", tensor(&[300, 128])?),
                ("transformer.wpe.weight", tensor(&positions)?),
                ("transformer.h.0.ln_1.weight", tensor(&[128])?),
                (second, tensor(&[128])?),
            ];
            let tensors = tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
            Ok(safetensors::save(&path, &tensors, &safetensors::Metadata::new())?)
        };
        let wrong = || make_plan(&["--model", &name]).err().map(|e| format!("{e:#}")).unwrap_or_default();

        save([32, 128], "transformer.h.1.ln_1.weight")?;
        let (options, context, _) = make_plan(&["--model", &name, "--batch", "2", "--quick"])?;
        assert_eq!((options.layers, options.width, options.heads), (2, 128, 2));
        assert_eq!((options.vocabulary, options.context, context), (300, 32, 32));
        std::fs::write(&path, &std::fs::read(&path)?[..60])?;
        assert!(wrong().contains("cut short"), "{}", wrong());
        save([0, 128], "transformer.h.1.ln_1.weight")?;
        assert!(wrong().contains("`wpe.weight` has the shape [0, 128]"), "{}", wrong());
        save([32, 128], "transformer.h.3.ln_1.weight")?;
        assert!(wrong().contains("2 of 4 blocks"), "{}", wrong());
        std::fs::remove_dir_all(&folder)?;
        assert!(wrong().contains(&name), "{}", wrong());
        Ok(())
    }
}

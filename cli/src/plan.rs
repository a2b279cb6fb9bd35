//! `forebay plan`: how to train a model within given bytes, without a GPU.

use anyhow::Result;
use clap::Args;
use forebay::backend::null::Profile;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::memory::Bytes;
use forebay::nn::{Gpt, GptOptions, Module};
use forebay::optim::{AdamW, Optimizer};
use forebay::plan::{self, Budget, CARDS, Choice};
use forebay::tensor::Tensor;

#[derive(Args)]
pub(crate) struct Plan {
    /// The model: gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1.5b, gpt3-6.7b.
    #[arg(long, default_value = "gpt2-124m")]
    model: String,
    /// Passages in a step.
    #[arg(long, default_value_t = 8, value_parser = some)]
    batch: usize,
    /// Tokens in a passage; all that the model takes if not given.
    #[arg(long, value_parser = some)]
    context: Option<usize>,
    /// Bytes that training may take, as 4GiB; all of the card's if not given.
    #[arg(long)]
    budget: Option<Bytes>,
    /// The card: rtx4090, h100, t4, ...
    #[arg(long, default_value = "rtx4090")]
    card: String,
    /// Through wgpu, on a card that is used through CUDA else.
    #[arg(long)]
    wgpu: bool,
    /// Also allows a 16-bit precision: bf16 or f16.
    #[arg(long, value_name = "DTYPE", value_parser = half)]
    allow: Vec<DType>,
    /// Keeps everything on the card: nothing goes to memory of the host.
    #[arg(long)]
    no_offload: bool,
    /// Only the choices up to the one that fits; else all of them are measured.
    #[arg(long)]
    quick: bool,
}

fn half(name: &str) -> Result<DType, String> {
    match name {
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        other => Err(format!("`{other}` is neither bf16 nor f16; f32 is always allowed")),
    }
}

/// A number of rows or tokens.
fn some(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("expected a whole number of at least 1, got `{text}`")),
    }
}

impl Plan {
    pub(crate) fn run(self) -> Result<()> {
        let (card, context, plan) = self.made()?;
        println!(
            "{}, {} passages of {context} tokens a step, AdamW, on {}",
            self.model, self.batch, card.name
        );
        println!("{plan}");
        Ok(())
    }

    /// The card, the tokens of a passage, and the plan: of the step that `train_gpt` makes.
    fn made(&self) -> Result<(Profile, usize, plan::Plan)> {
        let options = GptOptions::preset(&self.model)?;
        let context = self.context.unwrap_or(options.context);
        let options = GptOptions { context: context.max(options.context), ..options };
        let mut card = Profile::card(&self.card)?;
        if self.wgpu {
            card = card.through_wgpu();
        }
        let budget = self.budget.map_or(card.room(), |b| b.0);
        let mut budget = Budget::new(budget, self.batch);
        for dtype in &self.allow {
            budget = budget.allow(*dtype);
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
            Ok(move |choice: &Choice| {
                optimizer.offload_state(choice.offload_state);
                for _ in 0..choice.count {
                    let text = || Tensor::zeros(&[choice.rows, context], DType::I64, &device);
                    let autocast = choice.autocast()?;
                    let loss = net.loss(&text()?, &text()?)?;
                    drop(autocast);
                    // As `train_gpt` steps: what parts add up to is the gradient of the whole batch.
                    loss.mul(choice.rows as f64 / batch as f64)?.backward()?;
                }
                optimizer.step()?;
                optimizer.zero_grad();
                Ok(())
            })
        });
        let plan = plan.map_err(|error| match error {
            // Another one may do.
            Error::Budget { .. } => anyhow::anyhow!("{error}\nknown cards: {}", CARDS.join(", ")),
            error => error.into(),
        });
        Ok((card, context, plan?))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        plan: Plan,
    }

    #[test]
    fn a_plan_is_of_the_step_that_training_makes() -> Result<()> {
        let given = ["plan", "--card", "h100", "--context", "1024", "--allow", "bf16", "--quick"];
        let (_, _, plan) = Command::try_parse_from(given)?.plan.made()?;
        // About what `forebay-bench run gpt` takes: the scores of all positions would be 1.6 GiB more.
        let peak = plan.best.peak.map(|bytes| bytes >> 20);
        assert!(peak.is_some_and(|mib| (3_950..4_100).contains(&mib)), "{peak:?} MiB");
        for nothing in [["plan", "--batch", "0"], ["plan", "--context", "0"], ["plan", "--batch", "x"]] {
            let wrong = Command::try_parse_from(nothing).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(wrong.contains("expected a whole number of at least 1"), "{wrong}");
        }
        Ok(())
    }
}

//! Advice of out-of-memory errors: the recommended batch size fits, and a trainer switches to it directly.

use std::sync::Mutex;

use forebay_core::backend::null::CardProfile;
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::memory::{OutOfMemory, Tag, scope};
use forebay_core::tensor::Tensor;
use forebay_nn::data::Dataset;
use forebay_nn::nn::{Gpt, GptOptions, Linear, Module};
use forebay_nn::optim::{Adam, AdamW, Optimizer};
use forebay_nn::train::Trainer;
use proptest::prelude::*;

/// Sizes of a model to train.
#[derive(Clone, Debug)]
enum ModelSpec {
    /// Widths of linear layers.
    Layers(Vec<usize>),
    /// Width, layers, context.
    Gpt(usize, usize, usize),
}

/// Minimum peak of a case. Smaller peaks depend on the number of 32 MiB segments rather than on the batch
/// size.
const MIN_PEAK_BYTES: u64 = 256 << 20;

/// Model built from a `ModelSpec`.
enum TestModel {
    Layers(Vec<Linear>),
    Gpt(Box<Gpt>, usize),
}

impl TestModel {
    fn new(model: &ModelSpec, device: &Device) -> Result<Self> {
        Ok(match model {
            ModelSpec::Layers(widths) => {
                let layers = widths.windows(2).map(|w| Linear::new(w[0], w[1], device));
                Self::Layers(layers.collect::<Result<_>>()?)
            }
            &ModelSpec::Gpt(width, layers, context) => {
                let options = GptOptions { vocabulary: 1000, context, layers, heads: 4, width, dropout: 0.0 };
                Self::Gpt(Box::new(Gpt::new(&options, device)?), context)
            }
        })
    }

    fn parameters(&self) -> Vec<Tensor> {
        match self {
            Self::Layers(layers) => layers.iter().flat_map(Module::parameters).collect(),
            Self::Gpt(gpt, _) => gpt.parameters(),
        }
    }

    fn input(&self, rows: usize, device: &Device) -> Result<Tensor> {
        let _tag = scope::enter_tag(Tag::Input);
        match self {
            Self::Layers(layers) => Tensor::zeros([rows, layers[0].weight.shape()[1]], DType::F32, device),
            Self::Gpt(_, context) => Tensor::zeros([rows, *context], DType::I64, device),
        }
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let _tag = scope::enter_tag(Tag::Activation);
        match self {
            Self::Layers(layers) => {
                layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.gelu())?.mean_all()
            }
            Self::Gpt(gpt, _) => gpt.forward(x)?.flatten(0, 1)?.cross_entropy(&x.flatten(0, 1)?),
        }
    }
}

fn oom_details(result: Result<()>) -> Result<Option<Box<OutOfMemory>>> {
    result.map_or_else(|error| error.into_out_of_memory().map(Some), |()| Ok(None))
}

/// Runs a step whose batch is split into `parts` of `rows` rows.
fn train_step(
    net: &TestModel,
    optimizer: &mut AdamW,
    parts: usize,
    rows: usize,
    device: &Device,
) -> Result<()> {
    let x = net.input(parts * rows, device)?;
    optimizer.zero_grad();
    let made = (0..parts).try_for_each(|part| {
        let x = x.narrow(0, part * rows, rows)?;
        device.pool().with_batch_size(rows, || net.loss(&x)?.backward())
    });
    let made = made.and_then(|()| optimizer.step());
    optimizer.zero_grad();
    made
}

/// Runs a model, then runs it with less memory than it took, and follows the advice of the error, if any.
/// Returns whether there was advice.
fn check_advice(model: &ModelSpec, rows: usize, parts: usize, part: u64, card: CardProfile) -> Result<bool> {
    let device = Device::null(card);
    let net = TestModel::new(model, &device)?;
    let mut optimizer = AdamW::new(net.parameters(), 1e-3);
    for _ in 0..2 {
        // Some models are too large for the card, or for one tensor.
        if train_step(&net, &mut optimizer, parts, rows, &device).is_err() {
            return Ok(false);
        }
    }
    let measured = device.pool().measured_batch().filter(|m| m.batch_size == rows);
    let peak = measured.map(|m| m.peak).ok_or_else(|| Error::argument("test", "nothing was measured"))?;
    if peak < MIN_PEAK_BYTES {
        return Ok(false);
    }
    device.pool().empty_cache()?;
    let least = device.memory().reserved();
    device.pool().set_limit(Some(least + peak.saturating_sub(least) * part / 100));
    let failed = oom_details(train_step(&net, &mut optimizer, parts, rows, &device))?;
    let Some(error) = failed.filter(|e| e.batch.is_some()) else { return Ok(false) };
    let Some(fits) = error.fitting_batch_size().filter(|fits| fits.is_measured) else { return Ok(false) };
    let text = error.to_string();
    assert!(text.contains(&format!("try: micro-batch {} would fit: ", fits.batch_size)), "{text}");
    assert!(fits.batch_size <= rows.div_ceil(2) && Some(fits.bytes) <= error.capacity);
    // Plain segments were sized for the step that failed.
    device.pool().empty_cache()?;
    match oom_details(train_step(&net, &mut optimizer, parts, fits.batch_size, &device))? {
        Some(again) => panic!("{fits:?} did not fit: {again}\nafter: {text}"),
        None => Ok(true),
    }
}

fn card_profile(plain: bool) -> Result<CardProfile> {
    let card = CardProfile::from_card("h100")?;
    Ok(if plain { card.with_wgpu_limits() } else { card })
}

fn any_model() -> impl Strategy<Value = ModelSpec> {
    let width = prop_oneof![16..200usize, (2..48usize).prop_map(|w| 64 * w)];
    prop_oneof![
        prop::collection::vec(width, 2..7).prop_map(ModelSpec::Layers),
        (1..24usize, 1..6usize, 1..64usize).prop_map(|(w, l, c)| ModelSpec::Gpt(32 * w, l, 16 * c)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rows_that_would_fit_run(
        model in any_model(),
        rows in prop_oneof![2..200usize, (4..13u32).prop_map(|power| 1 << power)],
        parts in 1..4usize,
        part in 10..99u64,
        plain in any::<bool>(),
    ) {
        check_advice(&model, rows, parts, part, card_profile(plain)?)?;
    }
}

#[test]
fn out_of_memory_errors_have_advice() -> Result<()> {
    for plain in [false, true] {
        let model = ModelSpec::Layers(vec![1024, 4096, 4096, 1024]);
        let advised =
            (30..90).step_by(10).map(|part| check_advice(&model, 32_768, 2, part, card_profile(plain)?));
        let advised = advised.collect::<Result<Vec<_>>>()?;
        assert!(advised.iter().filter(|a| **a).count() >= 4, "{advised:?}");
    }
    Ok(())
}

/// Data set of this many samples of 1024 values, in two classes.
struct ConstantDataset(usize);

impl Dataset for ConstantDataset {
    type Input = f32;
    type Target = i64;

    fn len(&self) -> usize {
        self.0
    }

    fn input_shape(&self) -> &[usize] {
        &[1024]
    }

    fn target_shape(&self) -> &[usize] {
        &[]
    }

    fn get(&self, index: usize, input: &mut [f32], target: &mut [i64]) -> Result<()> {
        input.fill(0.5);
        target.fill(index as i64 % 2);
        Ok(())
    }
}

/// Lines that the trainer has logged.
static LOG_LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct CapturingLogger;

impl log::Log for CapturingLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LOG_LINES.lock().unwrap().push(record.args().to_string());
    }

    fn flush(&self) {}
}

#[test]
fn a_trainer_reduces_to_the_rows_that_fit() -> Result<()> {
    log::set_logger(&CapturingLogger).unwrap();
    log::set_max_level(log::LevelFilter::Info);
    let log_lines = || -> Vec<String> {
        let lines = std::mem::take(&mut *LOG_LINES.lock().unwrap());
        lines.into_iter().filter(|line| line.contains("repeated with") || line.contains("fits")).collect()
    };
    // With and without a measurement of the whole batch's step.
    for knows in [true, false] {
        let device = Device::null(card_profile(false)?);
        let net = TestModel::new(&ModelSpec::Layers(vec![1024, 4096, 4096, 2]), &device)?;
        let TestModel::Layers(layers) = &net else { return Ok(()) };
        let samples = || ConstantDataset(16_384).batches(8192);
        let loss = |x: &Tensor, y: &Tensor| -> Result<Tensor> {
            layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.gelu())?.cross_entropy(y)
        };
        let mut trainer = Trainer::new(layers, Adam::new(net.parameters(), 1e-3)).quiet();
        if knows {
            trainer.fit(&samples(), loss)?;
        }
        device.pool().set_limit(Some(510 << 20));
        device.pool().empty_cache()?;
        trainer = trainer.steps(4);
        trainer.fit(&samples(), loss)?;
        let (lines, rows) = (log_lines(), trainer.micro_batch_rows());
        assert_eq!(rows, Some(1024), "{lines:?}");
        assert_eq!(lines.last().unwrap(), "micro-batch 1024 fits: 432.3 of 510.0 MiB", "{lines:?}");
        if knows {
            assert_eq!(lines.len(), 2, "{lines:?}");
            assert!(lines[0].ends_with("repeated with 1024 rows at a time instead of 8192"), "{lines:?}");
        }
    }
    Ok(())
}

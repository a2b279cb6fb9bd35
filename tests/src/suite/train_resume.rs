//! Files, loaders and the training loop: saved data is restored, and a resumed run has identical bits.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use forebay::data::{DataLoader, Dataset};
use forebay::device::Device;
use forebay::error::Result as CoreResult;
use forebay::io::safetensors;
use forebay::memory::Config;
use forebay::nn::{Dropout, Linear, Module};
use forebay::optim::{Adam, Optimizer, Sgd, schedule::CosineAnnealing};
use forebay::tensor::Tensor;
use forebay::train::{Checkpoint, FitStatus, Trainer, mean_loss};

use super::host_reference::ensure_close;
use super::{compute_dtypes, tests};

tests![
    tensors_round_trip_through_a_file,
    a_loader_puts_its_samples_on_the_device,
    a_resumed_run_has_the_same_bits,
    a_captured_run_has_the_same_bits,
    a_run_validates_in_evaluation_mode,
    a_checkpoint_of_other_batches_is_refused,
    a_checkpoint_holds_strings_of_the_program,
    a_loss_of_nan_ends_the_run,
    accumulated_batches_are_one_large_batch,
    memory_does_not_grow_with_the_steps,
    a_step_that_runs_out_of_memory_is_repeated_in_halves,
    micro_batches_are_weighted_by_their_counted_targets,
];

/// File that is removed at the end of the test.
pub(super) struct TempFile(pub(super) PathBuf);

impl TempFile {
    pub(super) fn new(device: &Device, name: &str) -> Self {
        let name = format!("forebay-{}-{}-{name}", std::process::id(), device.to_string().replace(':', "-"));
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // The file may not exist.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns the class of a point from its index, the number of points, and its values.
type LabelFn = fn(usize, usize, &[f32]) -> i64;

/// Data set of this many points with their classes.
pub(super) struct PointDataset(pub(super) usize, LabelFn);

impl PointDataset {
    /// Classes depend only on the index.
    pub(super) fn new(n: usize) -> Self {
        Self(n, |index, _, _| (index % 3) as i64)
    }

    /// Classes depend only on the index; every third and the last three targets are ignored.
    fn with_ignored_targets(n: usize) -> Self {
        Self(n, |index, n, _| if index % 3 == 2 || index + 3 >= n { -100 } else { (index % 3) as i64 })
    }

    /// Learnable classes: the number of positive values among the first two.
    pub(super) fn learnable(n: usize) -> Self {
        Self(n, |_, _, values| values[..2].iter().filter(|x| **x > 0.0).count() as i64)
    }
}

impl Dataset for PointDataset {
    type Input = f32;
    type Target = i64;

    fn len(&self) -> usize {
        self.0
    }

    fn input_shape(&self) -> &[usize] {
        &[4]
    }

    fn target_shape(&self) -> &[usize] {
        &[]
    }

    fn get(&self, index: usize, input: &mut [f32], target: &mut [i64]) -> CoreResult<()> {
        for (k, x) in input.iter_mut().enumerate() {
            *x = ((index * 37 + k * 101) % 53) as f32 / 26.0 - 1.0;
        }
        target[0] = self.1(index, self.0, input);
        Ok(())
    }
}

#[derive(Module)]
struct Net {
    fc1: Linear,
    drop: Dropout,
    fc2: Linear,
}

impl Net {
    fn new(device: &Device) -> CoreResult<Self> {
        device.manual_seed(5);
        Ok(Self {
            fc1: Linear::new(4, 16, device)?,
            drop: Dropout::new(0.25),
            fc2: Linear::new(16, 3, device)?,
        })
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> CoreResult<Tensor> {
        let hidden = self.drop.forward(&self.fc1.forward(x)?.tanh()?)?;
        self.fc2.forward(&hidden)?.cross_entropy(y)
    }

    fn bits(&self) -> Result<BTreeMap<String, Vec<u8>>> {
        self.state_dict().into_iter().map(|(name, t)| Ok((name, t.to_bytes()?))).collect()
    }
}

fn loader() -> DataLoader<PointDataset> {
    PointDataset::new(50).shuffle(9).batches(8)
}

fn trainer(net: &Net, steps: u64) -> Trainer<'_, Net, Adam> {
    Trainer::new(net, Adam::new(net.parameters(), 1e-2))
        .schedule(CosineAnnealing { base_lr: 1e-2, eta_min: 1e-3, t_max: 40 })
        .clip_grad_norm(1.0)
        .steps(steps)
        .quiet()
}

fn tensors_round_trip_through_a_file(device: &Device) -> Result<()> {
    let file = TempFile::new(device, "tensors");
    let counted = |dtype| Tensor::arange(0.0, 6.0, 1.0, dtype, device)?.reshape([2, 3]);
    let mut tensors = BTreeMap::new();
    for dtype in compute_dtypes(device).filter(|d| d.is_float() || d.is_int()) {
        tensors.insert(dtype.to_string(), counted(dtype)?);
        tensors.insert(format!("{dtype}.turned"), counted(dtype)?.transpose(0, 1)?);
    }
    tensors.insert("bool".into(), Tensor::from_bools(&[true, false, true], [3], device)?);
    tensors.insert("scalar".into(), Tensor::from_slice(&[-0.0f32], (), device)?);
    tensors.insert("empty".into(), Tensor::from_slice::<i64>(&[], &[0, 2], device)?);
    let strings = BTreeMap::from([("about".to_owned(), "a \"test\"\n".to_owned())]);
    safetensors::save(&file.0, &tensors, &strings)?;
    let (loaded, found) = safetensors::load_with_metadata(&file.0, device)?;
    ensure!(found == strings, "{found:?}");
    ensure!(loaded.keys().eq(tensors.keys()), "{:?}", loaded.keys());
    for (name, tensor) in &tensors {
        let back = &loaded[name];
        ensure!((back.shape(), back.dtype()) == (tensor.shape(), tensor.dtype()), "{name}: {back:?}");
        ensure!(back.to_bytes()? == tensor.to_bytes()?, "{name} came back with other bits");
    }
    Ok(())
}

fn a_loader_puts_its_samples_on_the_device(device: &Device) -> Result<()> {
    let data = PointDataset::new(20);
    let (mut input, mut target) = ([0.0; 4], [0]);
    let mut index = 0;
    for batch in PointDataset::new(20).batches(8).prefetch(device) {
        let (x, y) = batch?;
        let (xs, ys) = (x.to_vec::<f32>()?, y.to_vec::<i64>()?);
        for (row, class) in xs.chunks(4).zip(ys) {
            data.get(index, &mut input, &mut target)?;
            ensure!(row == input && class == target[0], "sample {index} is {row:?}, {class}");
            index += 1;
        }
    }
    ensure!(index == 20, "{index} samples");
    Ok(())
}

fn a_resumed_run_has_the_same_bits(device: &Device) -> Result<()> {
    let file = TempFile::new(device, "checkpoint");
    // Seven batches an epoch: the run stops in the middle of an epoch.
    let whole = Net::new(device)?;
    let mut run = trainer(&whole, 16);
    run.fit(&loader(), |x, y| whole.loss(x, y))?;
    let losses = run.history().losses.clone();

    let first = Net::new(device)?;
    let mut run = trainer(&first, 11).checkpoint(&file.0, 4);
    ensure!(run.fit(&loader(), |x, y| first.loss(x, y))? == FitStatus::Finished);
    drop(run);
    drop(first);

    let second = Net::new(device)?;
    device.manual_seed(77);
    let mut run = trainer(&second, 16).resume(&file.0)?;
    ensure!(run.steps_done() == 11, "resumed at step {}", run.steps_done());
    run.fit(&loader(), |x, y| second.loss(x, y))?;
    let bits = |losses: &[f32]| losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
    ensure!(bits(&run.history().losses) == bits(&losses), "{:?} became {losses:?}", run.history().losses);
    ensure!(second.bits()? == whole.bits()?, "the parameters differ");
    ensure!(losses.len() == 16 && losses.iter().all(|l| l.is_finite()), "{losses:?}");
    Ok(())
}

/// Batches of two sizes, two batches a step; stopped and resumed.
fn a_captured_run_has_the_same_bits(device: &Device) -> Result<()> {
    let run = |captured: bool| -> Result<_> {
        let file = TempFile::new(device, "captured");
        let mut calls = 0;
        let mut losses = Vec::new();
        let mut bits = BTreeMap::new();
        for (from, to) in [(0, 11), (11, 20)] {
            let net = Net::new(device)?;
            let mut run = trainer(&net, to).accumulate(2).capture(captured).checkpoint(&file.0, 100);
            if from > 0 {
                run = run.resume(&file.0)?;
            }
            run.fit(&loader(), |x, y| {
                calls += 1;
                Ok((net.loss(x, y)?, x.mean_all()?))
            })?;
            let history = run.history();
            losses = history.losses.iter().chain(&history.accuracies).map(|l| l.to_bits()).collect();
            bits = net.bits()?;
        }
        Ok((losses, bits, calls))
    };
    let (losses, bits, calls) = run(false)?;
    let (losses_too, bits_too, fewer) = run(true)?;
    ensure!(losses == losses_too, "losses differ: {losses:?} and {losses_too:?}");
    ensure!(bits == bits_too, "the parameters differ");
    // Two of seven batches are in a step that contains the small batch.
    ensure!(calls == 40 && fewer < 20, "the loss was called {calls} times, {fewer} where steps are captured");
    Ok(())
}

fn a_run_validates_in_evaluation_mode(device: &Device) -> Result<()> {
    let net = Net::new(device)?;
    let valid = PointDataset::new(6).batches(4);
    let mut losses = Vec::new();
    let mut run = trainer(&net, 5).tokens(100, 1e6).validate(2, || {
        // In evaluation mode dropout is off, so that both losses are equal.
        let [a, b] = [(); 2].map(|()| mean_loss(&net, &valid, |x, y| net.loss(x, y)));
        losses.push((a?, b?));
        Ok(losses[losses.len() - 1].0)
    });
    run.fit(&loader(), |x, y| net.loss(x, y))?;
    let found = run.history().validations.clone();
    // On a GPU, the rate is measured only after more steps than these.
    ensure!(run.tokens_per_second().is_some_and(|rate| rate > 0.0) == device.info().software, "no rate");
    drop(run);
    ensure!(found.iter().map(|v| v.step).eq([2, 4, 5]), "{found:?}");
    ensure!(
        found.iter().zip(&losses).all(|(v, (a, b))| a == b && v.loss == *a as f32),
        "{found:?}, {losses:?}"
    );
    Ok(())
}

fn a_loss_of_nan_ends_the_run(device: &Device) -> Result<()> {
    let net = Net::new(device)?;
    let file = TempFile::new(device, "finite");
    let mut steps = 0;
    let mut run = trainer(&net, 20).checkpoint(&file.0, 2);
    let ended = run.fit(&loader(), |x, y| {
        steps += 1;
        net.loss(x, y)?.mul(if steps == 4 { f64::NAN } else { 1.0 })
    });
    let text = ended.err().context("it must fail")?.to_string();
    ensure!(text.starts_with("fit: the loss of step 4 is NaN, and no checkpoint is written"), "{text}");
    // The previous checkpoint is intact and resumes correctly.
    let mut again = trainer(&net, 6).resume(&file.0)?;
    ensure!(again.steps_done() == 2, "resumed at step {}", again.steps_done());
    again.fit(&loader(), |x, y| net.loss(x, y))?;
    ensure!(again.history().losses.iter().all(|loss| loss.is_finite()));
    Ok(())
}

fn a_checkpoint_of_other_batches_is_refused(device: &Device) -> Result<()> {
    let file = TempFile::new(device, "other");
    let net = Net::new(device)?;
    trainer(&net, 3).checkpoint(&file.0, 10).fit(&loader(), |x, y| net.loss(x, y))?;
    let failed = trainer(&net, 5).resume(&file.0)?.fit(&loader().batches(4), |x, y| net.loss(x, y));
    let message = failed.err().context("the run went on")?.to_string();
    ensure!(message.contains("resumed from batches of 8 of 50 samples shuffled by 9"), "{message}");
    safetensors::save(&file.0, &net.state_dict(), &BTreeMap::new())?;
    let message = trainer(&net, 5).resume(&file.0).err().context("weights are no checkpoint")?.to_string();
    ensure!(message.contains("is not a checkpoint"), "{message}");
    Ok(())
}

/// Strings are written by a trainer and by hand, and read back by both, by the header alone and as a plain file.
fn a_checkpoint_holds_strings_of_the_program(device: &Device) -> Result<()> {
    let file = TempFile::new(device, "strings");
    let net = Net::new(device)?;
    let best = 0.1 + 0.2;
    let mut first = trainer(&net, 2).metadata("config", "{\"width\": 16}").metadata("best_loss", best);
    first.fit(&loader(), |x, y| net.loss(x, y))?;
    first.save(&file.0)?;
    let read = Checkpoint::read(&file.0)?;
    ensure!(read.step == 2 && read.metadata == *first.checkpoint_metadata(), "{read:?}");
    ensure!(read.metadata["best_loss"].parse::<f64>()? == best, "{:?}", read.metadata);
    let strings = safetensors::open(&file.0)?.metadata().clone();
    ensure!(strings["config"] == "{\"width\": 16}", "{strings:?}");

    // A resumed run keeps the strings, except those that it sets.
    let resumed = trainer(&net, 4).metadata("best_loss", "0.5").resume(&file.0)?.metadata("more", 1);
    let kept = resumed.checkpoint_metadata();
    let expected = [("best_loss", "0.5"), ("config", "{\"width\": 16}"), ("more", "1")];
    ensure!(kept.iter().map(|(k, v)| (k.as_str(), v.as_str())).eq(expected), "{kept:?}");
    let mut adam = Adam::new(net.parameters(), 1e-2);
    let by_hand = Checkpoint::new(7, Default::default()).with_metadata("note", "later");
    by_hand.save(&file.0, &net, &adam)?;
    ensure!(Checkpoint::resume(&file.0, &net, &mut adam)? == by_hand, "other strings by hand");

    let taken = by_hand.with_metadata("forebay.checkpoint", "{}").save(&file.0, &net, &adam);
    let message = taken.err().context("a name of the format was taken")?.to_string();
    ensure!(message.contains("choose another name"), "{message}");
    ensure!(Checkpoint::read(&file.0)?.step == 7, "a checkpoint that was refused replaced the file");
    safetensors::save(&file.0, &net.state_dict(), &BTreeMap::new())?;
    let message = Checkpoint::read(&file.0).err().context("weights are no checkpoint")?.to_string();
    ensure!(message.contains("is not a checkpoint"), "{message}");
    Ok(())
}

fn accumulated_batches_are_one_large_batch(device: &Device) -> Result<()> {
    let step = |batch: usize, accumulate: u32| -> Result<Vec<f64>> {
        let net = Net::new(device)?;
        let mut run =
            Trainer::new(&net, Adam::new(net.parameters(), 1e-2)).accumulate(accumulate).steps(1).quiet();
        run.fit(&PointDataset::new(48).batches(batch), |x, y| {
            net.fc2.forward(&net.fc1.forward(x)?.tanh()?)?.cross_entropy(y)
        })?;
        ensure!(run.optimizer().parameters().iter().all(|p| p.grad().is_none()), "gradients are left");
        let mut all = vec![f64::from(run.history().losses[0])];
        all.extend(net.fc1.weight.to_f64s()?);
        Ok(all)
    };
    ensure_close(&step(6, 4)?, &step(24, 1)?, 1e-4, 1e-5)
}

fn memory_does_not_grow_with_the_steps(device: &Device) -> Result<()> {
    let net = Net::new(device)?;
    let mut run = trainer(&net, 100);
    run.fit(&loader().drop_last(), |x, y| net.loss(x, y))?;
    let at = |step| {
        run.history().memory_after(step).with_context(|| format!("no memory was recorded after step {step}"))
    };
    let (early, late) = (at(10)?, at(100)?);
    ensure!(early.allocated == late.allocated, "{} bytes, then {}", early.allocated, late.allocated);
    ensure!(early.reserved == late.reserved, "{} bytes reserved, then {}", early.reserved, late.reserved);
    Ok(())
}

fn a_step_that_runs_out_of_memory_is_repeated_in_halves(device: &Device) -> Result<()> {
    // A pool with its own limit, and a model that needs most of it for 64 rows at once.
    let device = Device::with_config(device.backend().clone(), Config::default());
    let train = |limit: Option<u64>, capture: bool| -> Result<(Option<usize>, Vec<f64>, [u64; 2])> {
        device.manual_seed(3);
        let net = (Linear::new(4, 4096, &device)?, Linear::new(4096, 3, &device)?);
        let mut run = Trainer::new(&net, Sgd::new(net.parameters(), 0.1)).accumulate(2).steps(3).quiet();
        run = run.capture(capture);
        device.pool().empty_cache()?;
        device.pool().set_limit(limit);
        device.pool().reset_peak_stats();
        let fitted = run.fit(&PointDataset::new(384).batches(64), |x, y| {
            net.1.forward(&net.0.forward(x)?.tanh()?)?.cross_entropy(y)
        });
        device.pool().set_limit(None);
        fitted?;
        let mut all: Vec<f64> = run.history().losses.iter().map(|&loss| f64::from(loss)).collect();
        all.extend(net.0.weight.to_f64s()?);
        ensure!(run.optimizer().parameters().iter().all(|p| p.grad().is_none()), "gradients are left");
        let memory = device.memory();
        Ok((run.micro_batch_rows(), all, [memory.peak_allocated(), memory.peak_reserved()]))
    };
    let (rows, expected, [peak, reserved]) = train(None, false)?;
    ensure!(rows.is_none(), "{rows:?}");
    let before = device.memory().allocated();
    for capture in [false, true] {
        let (rows, halved, _) = train(Some(peak * 6 / 10), capture)?;
        ensure!(rows.is_some_and(|rows| rows < 64), "{rows:?} rows at once fit 60 % of the memory");
        ensure!(device.memory().allocated() == before, "memory is left");
        ensure_close(&halved, &expected, 1e-4, 1e-5)?;
    }
    // If eager steps fit, whole batches continue even if the memory of a captured step does not fit.
    let (rows, same, _) = train(Some(reserved), true)?;
    ensure!(rows.is_none(), "{rows:?} rows at once where whole batches fit");
    ensure!(device.memory().allocated() == before, "memory is left");
    ensure_close(&same, &expected, 1e-4, 1e-5)
}

fn micro_batches_are_weighted_by_their_counted_targets(device: &Device) -> Result<()> {
    let step = |micro: usize| -> Result<Vec<f64>> {
        let net = Net::new(device)?;
        let mut run = Trainer::new(&net, Sgd::new(net.parameters(), 0.5)).steps(1).quiet();
        run = run.micro_batch(micro).ignore_index(-100);
        run.fit(&PointDataset::with_ignored_targets(12).batches(12), |x, y| {
            net.fc2.forward(&net.fc1.forward(x)?.tanh()?)?.cross_entropy(y)
        })?;
        let mut all = vec![f64::from(run.history().losses[0])];
        all.extend(net.fc1.weight.to_f64s()?);
        Ok(all)
    };
    ensure_close(&step(3)?, &step(0)?, 1e-5, 1e-6)
}

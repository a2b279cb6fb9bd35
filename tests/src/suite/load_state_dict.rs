//! Loading is atomic: a rejected load, or one that runs out of memory, leaves every bit unchanged.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use forebay::data::LoaderCursor;
use forebay::device::{Device, RandomState};
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::io::safetensors;
use forebay::memory::Config;
use forebay::nn::{Embedding, Gpt, GptOptions, Linear, Module};
use forebay::optim::{Adafactor, Adam, AveragedModel, GradScaler, Optimizer, Sgd};
use forebay::tensor::Tensor;
use forebay::train::{Checkpoint, Trainer};

use super::tests;
use super::train_resume::TempFile;

tests![
    a_load_that_runs_out_of_memory_changes_nothing,
    a_refused_resume_changes_nothing,
    a_damaged_checkpoint_changes_nothing,
    tied_weights_load_from_any_names_that_agree,
    a_state_that_shares_memory_with_the_model_is_read_before_it_is_written,
    integers_of_other_widths_are_widened_without_loss,
    a_tensor_that_is_read_in_chunks_is_complete,
];

/// Returns the device with its own pool, so that only this test's allocations are counted.
fn with_own_pool(device: &Device) -> Device {
    Device::with_config(device.backend().clone(), Config::default())
}

type StateBytes = BTreeMap<String, Vec<u8>>;

fn bits(state: &BTreeMap<String, Tensor>) -> Result<StateBytes> {
    state.iter().map(|(name, t)| Ok((name.clone(), t.to_bytes()?))).collect()
}

type Layers = (Linear, Linear);

/// Model, optimiser and scaler after one step.
struct TrainingRun {
    net: Layers,
    optimizer: Box<dyn Optimizer>,
    scaler: GradScaler,
}

type OptimizerCtor = fn(Vec<Tensor>) -> Box<dyn Optimizer>;

const OPTIMIZERS: [OptimizerCtor; 3] = [
    |p| Box::new(Adam::new(p, 0.1)),
    |p| Box::new(Sgd::new(p, 0.1).momentum(0.9)),
    |p| Box::new(Adafactor::new(p, 0.1)),
];

impl TrainingRun {
    fn new(device: &Device, seed: u64, make: OptimizerCtor, scale: f64) -> Result<Self> {
        device.manual_seed(seed);
        let net = (Linear::new(4, 8, device)?, Linear::new(8, 3, device)?);
        let optimizer = make(net.parameters());
        let mut run = Self { net, optimizer, scaler: GradScaler::new().init_scale(scale) };
        run.step(device)?;
        Ok(run)
    }

    fn step(&mut self, device: &Device) -> Result<()> {
        let x = Tensor::rand([2, 4], DType::F32, device)?;
        let loss = self.net.1.forward(&self.net.0.forward(&x)?.tanh()?)?.mean_all()?;
        self.scaler.scale(&loss)?.backward()?;
        self.scaler.unscale_(&*self.optimizer)?;
        self.scaler.step(&mut *self.optimizer)?;
        self.scaler.update()?;
        self.optimizer.zero_grad();
        Ok(())
    }

    fn state(&self, device: &Device) -> Result<(StateBytes, StateBytes, StateBytes, RandomState)> {
        Ok((
            bits(&self.net.state_dict())?,
            bits(&self.optimizer.state_dict()?)?,
            bits(&self.scaler.state_dict(device)?)?,
            device.random_state(),
        ))
    }
}

/// Fails each allocation of a load in turn, until the load succeeds. Returns the number of failures.
fn fail_each(
    device: &Device,
    what: &str,
    mut load: impl FnMut() -> CoreResult<()>,
    state: impl Fn() -> Result<Vec<u8>>,
) -> Result<u64> {
    for n in 1.. {
        let at = || format!("{what}, request {n}");
        let before = state()?;
        device.pool().fail_request(n);
        let loaded = load();
        device.pool().fail_request(0);
        let after = state()?;
        match loaded {
            Ok(()) => {
                ensure!(before != after, "{}: nothing was loaded", at());
                return Ok(n - 1);
            }
            Err(error) => ensure!(error.is_out_of_memory(), "{}: {error}", at()),
        }
        ensure!(before == after, "{}: something has changed", at());
    }
    unreachable!("a load has no end of requests")
}

fn flat(state: &BTreeMap<String, Tensor>) -> Result<Vec<u8>> {
    Ok(bits(state)?.into_values().flatten().collect())
}

fn a_load_that_runs_out_of_memory_changes_nothing(device: &Device) -> Result<()> {
    let device = &with_own_pool(device);
    // Modules, from a transposed state of another type.
    let (from, to) = (
        (Linear::new(4, 8, device)?, Linear::new(8, 3, device)?),
        (Linear::new(4, 8, device)?, Linear::new(8, 3, device)?),
    );
    let to_bf16 = |(name, t): (String, Tensor)| CoreResult::Ok((name, t.to_dtype(DType::BF16)?));
    let state = from.state_dict().into_iter().map(to_bf16).collect::<CoreResult<_>>()?;
    let failed = fail_each(device, "a module", || to.load_state_dict(&state), || flat(&to.state_dict()))?;
    ensure!(failed >= 4, "{failed} requests for four casts");
    ensure!(bits(&to.state_dict())?.len() == 4);
    let averaged = RefAverage(std::cell::RefCell::new(AveragedModel::ema(&to, 0.9)?));
    let other =
        AveragedModel::ema(&(Linear::new(4, 8, device)?, Linear::new(8, 3, device)?), 0.9)?.state_dict()?;
    let to_bf16 = |(name, t): (String, Tensor)| {
        CoreResult::Ok((name, if t.dtype().is_float() { t.to_dtype(DType::BF16)? } else { t }))
    };
    let other = other.into_iter().map(to_bf16).collect::<CoreResult<_>>()?;
    fail_each(device, "averages", || averaged.load(&other), || averaged.flat())?;
    let sizes = GptOptions { vocabulary: 5, context: 4, layers: 1, heads: 1, width: 4, dropout: 0.0 };
    let (from, to) = (Gpt::new(&sizes, device)?, Gpt::new(&sizes, device)?);
    let to_bf16 = |(name, t): (String, Tensor)| CoreResult::Ok((name, t.to_dtype(DType::BF16)?));
    let file = from.gpt2_state_dict()?.into_iter().map(to_bf16).collect::<CoreResult<_>>()?;
    fail_each(device, "GPT-2", || to.load_gpt2(&file), || flat(&to.state_dict()))?;
    let file = TempFile::new(device, "faults");
    for (k, make) in OPTIMIZERS.into_iter().enumerate() {
        let saved = TrainingRun::new(device, 3, make, 256.0)?;
        device.manual_seed(99);
        Checkpoint::new(7, LoaderCursor::default()).save_with_scaler(
            &file.0,
            &saved.net,
            &*saved.optimizer,
            Some(&saved.scaler),
        )?;
        let expected = saved.state(device)?;
        // An optimiser after a step, and one without state.
        for fresh in [false, true].into_iter().take(if k == 0 { 2 } else { 1 }) {
            let mut run = TrainingRun::new(device, 4, make, 512.0)?;
            if fresh {
                run.optimizer = make(run.net.parameters());
            }
            let mut n = 0;
            loop {
                n += 1;
                let before = run.state(device)?;
                let held = device.memory().allocated();
                device.pool().fail_request(n);
                let resumed = Checkpoint::resume_with_scaler(
                    &file.0,
                    &run.net,
                    &mut *run.optimizer,
                    Some(&mut run.scaler),
                );
                device.pool().fail_request(0);
                let at = || format!("optimiser {k}, request {n}");
                let Err(error) = resumed else { break };
                ensure!(error.is_out_of_memory(), "{}: {error}", at());
                drop(error);
                ensure!(run.state(device)? == before, "{}: something has changed", at());
                ensure!(device.memory().allocated() == held, "{}: memory is left", at());
            }
            ensure!(n > 10, "{n} requests are few for a checkpoint");
            let loaded = run.state(device)?;
            for (part, loaded, saved) in [
                ("model", &loaded.0, &expected.0),
                ("optimiser", &loaded.1, &expected.1),
                ("scaler", &loaded.2, &expected.2),
            ] {
                let same = |name: &&String| loaded.get(*name) == saved.get(*name);
                let other: Vec<_> = loaded.keys().chain(saved.keys()).filter(|name| !same(name)).collect();
                ensure!(other.is_empty(), "optimiser {k}, {part}: {other:?} is not what was saved");
            }
            ensure!(loaded.3 == expected.3, "optimiser {k}: another random state");
        }
    }
    Ok(())
}

/// Averaged model that can be inspected while it is loaded.
struct RefAverage(std::cell::RefCell<AveragedModel>);

impl RefAverage {
    fn load(&self, state: &BTreeMap<String, Tensor>) -> CoreResult<()> {
        self.0.borrow_mut().load_state_dict(state)
    }

    fn flat(&self) -> Result<Vec<u8>> {
        flat(&self.0.borrow().state_dict()?)
    }
}

fn a_refused_resume_changes_nothing(device: &Device) -> Result<()> {
    let file = TempFile::new(device, "refused");
    let saved = TrainingRun::new(device, 3, OPTIMIZERS[0], 256.0)?;
    Checkpoint::new(7, LoaderCursor::default()).save_with_scaler(
        &file.0,
        &saved.net,
        &*saved.optimizer,
        Some(&saved.scaler),
    )?;
    let (mut tensors, strings) = safetensors::load_with_metadata(&file.0, device)?;
    let check = |what: &str, make: OptimizerCtor| -> Result<()> {
        let mut run = TrainingRun::new(device, 4, make, 512.0)?;
        let before = run.state(device)?;
        let resumed =
            Checkpoint::resume_with_scaler(&file.0, &run.net, &mut *run.optimizer, Some(&mut run.scaler));
        ensure!(resumed.is_err(), "{what}: resumed");
        ensure!(run.state(device)? == before, "{what}: something has changed");
        Ok(())
    };
    check("another optimiser", OPTIMIZERS[1])?;
    check("another optimiser", OPTIMIZERS[2])?;
    // Replaces one tensor at a time: with another shape, or removes it.
    let names: Vec<String> = tensors.keys().cloned().collect();
    for name in &names {
        let right = tensors.remove(name).context("a tensor of the file is missing")?;
        for wrong in [None, Some(Tensor::zeros([3, 2], DType::F32, device)?)] {
            tensors.extend(wrong.map(|wrong| (name.clone(), wrong)));
            safetensors::save(&file.0, &tensors, &strings)?;
            // A missing step count means that the parameter has made no step, which is a valid state.
            if tensors.contains_key(name) || !name.ends_with(".step") {
                check(name, OPTIMIZERS[0])?;
            }
            tensors.remove(name);
        }
        tensors.insert(name.clone(), right);
    }
    for (name, value) in [
        ("scaler.scale", f32::NAN),
        ("scaler.growth_tracker", -1.0),
        ("optimizer.0.step", -3.0),
        ("optimizer.1.step", 0.5),
    ] {
        let right = tensors.insert(name.to_owned(), Tensor::from_slice(&[value], (), device)?);
        safetensors::save(&file.0, &tensors, &strings)?;
        check(name, OPTIMIZERS[0])?;
        tensors.extend(right.map(|right| (name.to_owned(), right)));
    }
    // Through the trainer.
    let net = (Linear::new(4, 8, device)?, Linear::new(8, 3, device)?);
    let before = bits(&net.state_dict())?;
    ensure!(Trainer::new(&net, Sgd::new(net.parameters(), 0.1).momentum(0.9)).resume(&file.0).is_err());
    ensure!(bits(&net.state_dict())? == before, "the trainer's model has changed");
    Ok(())
}

fn a_damaged_checkpoint_changes_nothing(device: &Device) -> Result<()> {
    let (file, damaged) = (TempFile::new(device, "whole"), TempFile::new(device, "damaged"));
    let saved = TrainingRun::new(device, 3, OPTIMIZERS[0], 256.0)?;
    Checkpoint::new(7, LoaderCursor::default()).save(&file.0, &saved.net, &*saved.optimizer)?;
    let bytes = std::fs::read(&file.0)?;
    let mut run = TrainingRun::new(device, 4, OPTIMIZERS[0], 512.0)?;
    let before = run.state(device)?;
    for cut in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&damaged.0, &bytes[..cut])?;
        ensure!(Checkpoint::resume(&damaged.0, &run.net, &mut *run.optimizer).is_err(), "cut to {cut} bytes");
        ensure!(run.state(device)? == before, "cut to {cut} bytes: something has changed");
    }
    Ok(())
}

#[derive(Module)]
struct Tied {
    tokens: Embedding,
    head: Linear,
}

impl Tied {
    fn new(device: &Device) -> Result<Self> {
        let tokens = Embedding::new(5, 3, device)?;
        let mut head = Linear::new(3, 5, device)?;
        head.weight = tokens.weight.clone();
        Ok(Self { tokens, head })
    }
}

fn tied_weights_load_from_any_names_that_agree(device: &Device) -> Result<()> {
    let (net, file) = (Tied::new(device)?, TempFile::new(device, "tied"));
    let before = bits(&net.state_dict())?;
    let state = Tied::new(device)?.state_dict();
    let weights = flat(&BTreeMap::from([("w".to_owned(), state["tokens.weight"].clone())]))?;
    // Both names as `torch.save` stores them, both as separate tensors of a file, or only one name.
    safetensors::save(&file.0, &state, &BTreeMap::new())?;
    let twice = safetensors::load(&file.0, device)?;
    for (states, missing) in [(&state, ""), (&twice, ""), (&twice, "tokens.weight"), (&twice, "head.weight")]
    {
        let mut given = states.clone();
        given.remove(missing);
        let net = Tied::new(device)?;
        net.load_state_dict(&given).with_context(|| format!("without `{missing}`"))?;
        ensure!(
            net.tokens.weight.to_bytes()? == weights && net.head.weight.to_bytes()? == weights,
            "`{missing}`"
        );
    }
    // Two different tensors are an error in any order and for any loader.
    for name in ["tokens.weight", "head.weight"] {
        let mut given = twice.clone();
        given.insert(name.to_owned(), Tensor::zeros([5, 3], DType::F32, device)?);
        let error = net.load_state_dict(&given).err().context("they differ")?.to_string();
        ensure!(error.contains("`tokens.weight` and `head.weight` are one tensor of the model"), "{error}");
        ensure!(net.load_state_dict_partial(&given).is_err(), "they differ");
        ensure!(bits(&net.state_dict())? == before, "the refused state changed the model");
    }
    // Tied by a view without gradients.
    let table = Tensor::zeros([2], DType::F32, device)?;
    let both = (table.clone(), table.detach());
    let ones = Tensor::ones([2], DType::F32, device)?;
    let given = BTreeMap::from([("0".to_owned(), ones.clone()), ("1".to_owned(), ones.mul(2.0)?)]);
    ensure!(both.load_state_dict(&given).is_err() && table.to_vec::<f32>()? == [0.0; 2], "they differ");
    Ok(())
}

fn a_state_that_shares_memory_with_the_model_is_read_before_it_is_written(device: &Device) -> Result<()> {
    let net = (Linear::new(2, 2, device)?, Linear::new(2, 2, device)?);
    let before = bits(&net.state_dict())?;
    net.load_state_dict(&net.state_dict())?;
    ensure!(bits(&net.state_dict())? == before, "loading its own state changed the model");
    // Exchanges the two layers.
    let other = |name: &str| Some(format!("{}{}", if name.starts_with('0') { 1 } else { 0 }, &name[1..]));
    net.load_state_dict(&forebay::nn::rename_keys(&net.state_dict(), other)?)?;
    let after = bits(&net.state_dict())?;
    for end in ["weight", "bias"] {
        let (first, second) = (format!("0.{end}"), format!("1.{end}"));
        ensure!(after[&first] == before[&second] && after[&second] == before[&first], "{end}");
    }
    Ok(())
}

fn integers_of_other_widths_are_widened_without_loss(device: &Device) -> Result<()> {
    let bytes: Vec<u8> = [
        [-128i8, 127].iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>(),
        [i16::MIN, i16::MAX].iter().flat_map(|n| n.to_le_bytes()).collect(),
        [0, u16::MAX].iter().flat_map(|n| n.to_le_bytes()).collect(),
        [0, i64::MAX as u64].iter().flat_map(|n| n.to_le_bytes()).collect(),
        [0.5f32, -2.0].iter().flat_map(|n| n.to_le_bytes()).collect(),
    ]
    .concat();
    let entry = |name: &str, dtype: &str, start: usize, end: usize| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":[2],"data_offsets":[{start},{end}]}}"#)
    };
    let entries = [
        entry("a", "I8", 0, 2),
        entry("b", "I16", 2, 6),
        entry("c", "U16", 6, 10),
        entry("d", "U64", 10, 26),
        entry("e", "F32", 26, 34),
    ];
    let header = format!("{{{}}}", entries.join(","));
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    let (tensors, _) = safetensors::from_bytes(&file, device)?;
    let narrow = |name: &str| tensors[name].to_vec::<i32>();
    ensure!(narrow("a")? == [-128, 127], "I8: {:?}", narrow("a"));
    ensure!(narrow("b")? == [-32_768, 32_767], "I16: {:?}", narrow("b"));
    ensure!(narrow("c")? == [0, 65_535], "U16: {:?}", narrow("c"));
    ensure!(tensors["d"].to_vec::<i64>()? == [0, i64::MAX], "U64");
    ensure!(tensors["e"].to_vec::<f32>()? == [0.5, -2.0], "F32");
    let large = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[255; 34]].concat();
    let error =
        safetensors::from_bytes(&large, device).err().context("a U64 beyond i64 was loaded")?.to_string();
    ensure!(error.contains("tensor `d` is U64 and holds 18446744073709551615"), "{error}");
    Ok(())
}

fn a_tensor_that_is_read_in_chunks_is_complete(device: &Device) -> Result<()> {
    // Slightly more than the host's staging buffer holds.
    let (elements, file) = ((33 << 20) + 5, TempFile::new(device, "parts"));
    let header =
        format!(r#"{{"a":{{"dtype":"BF16","shape":[{elements}],"data_offsets":[0,{}]}}}}"#, 2 * elements);
    let data: Vec<u8> = (0..2 * elements).map(|i| (i % 251) as u8 & 0x3f).collect();
    std::fs::write(&file.0, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat())?;
    let tensors = safetensors::load(&file.0, device)?;
    ensure!(tensors["a"].to_bytes()? == data, "other bytes came back");
    Ok(())
}

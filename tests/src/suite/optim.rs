//! Optimisers compared with PyTorch's (`tests/data/optim.py`): groups, steps counted on the device, saved states.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::memory::Config;
use forebay::optim::schedule::{
    ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts, CyclicLr, CyclicMode,
    ExponentialLr, LambdaLr, LinearLr, LrSchedule, LrScheduler, MultiStepLr, MultiplicativeLr, OneCycleLr,
    PolynomialLr, ReduceLrOnPlateau, SequentialLr, StepLr,
};
use forebay::optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Asgd, Lamb, Lion, Muon, MuonAdjustLr, NAdam,
    Optimizer, ParamGroup, RAdam, RmsProp, Rprop, Sgd,
};
use forebay::tensor::Tensor;

super::tests![
    twenty_steps_match_pytorch,
    step_counts_on_the_device_give_the_same_steps,
    skipped_steps_change_nothing,
    restored_states_continue_with_the_same_bits,
    states_of_pytorch_can_be_continued,
    parameters_in_16_bits_keep_their_dtype,
    parameters_of_any_layout_get_the_same_bits,
    offloaded_states_have_the_same_bits,
    offloaded_states_return_in_groups,
    invalid_parameter_groups_are_refused,
    schedules_match_pytorch,
    schedulers_continue_from_their_states,
];

const SHAPES: [&[usize]; 3] = [&[4, 6], &[7], &[6, 3]];
const STEPS: usize = 20;

type OptimizerCtor = fn(Vec<Tensor>) -> Result<Box<dyn Optimizer>>;

/// Puts the three parameters into groups, as `groups` in the script does.
fn groups(mut optimizer: impl Optimizer + 'static, p: Vec<Tensor>) -> Result<Box<dyn Optimizer>> {
    optimizer.add_param_group(ParamGroup::new(vec![p[1].clone()]).lr(0.05))?;
    optimizer.add_param_group(ParamGroup::new(vec![p[2].clone()]).weight_decay(0.3))?;
    Ok(Box::new(optimizer))
}

fn matrices(p: &[Tensor]) -> Vec<Tensor> {
    p.iter().filter(|p| p.rank() == 2).cloned().collect()
}

/// Optimisers by their names in the script.
pub(super) const ALL: &[(&str, OptimizerCtor)] = &[
    ("sgd", |p| Ok(Box::new(Sgd::new(p, 0.1).momentum(0.9).weight_decay(0.1).maximize(true)))),
    ("sgd groups", |p| groups(Sgd::new(vec![p[0].clone()], 0.1).momentum(0.9), p)),
    ("adam", |p| Ok(Box::new(Adam::new(p, 0.02).weight_decay(0.1)))),
    ("adamw groups", |p| groups(AdamW::new(vec![p[0].clone()], 0.02), p)),
    ("rmsprop", |p| Ok(Box::new(RmsProp::new(p, 0.01).momentum(0.5).centered(true)))),
    ("adagrad", |p| {
        let optimizer = Adagrad::new(p, 0.1).lr_decay(0.01).weight_decay(0.1);
        Ok(Box::new(optimizer.initial_accumulator_value(0.2)))
    }),
    ("adadelta", |p| Ok(Box::new(Adadelta::new(p, 1.0).weight_decay(0.1)))),
    ("adamax", |p| Ok(Box::new(Adamax::new(p, 0.02).weight_decay(0.1)))),
    ("nadam", |p| Ok(Box::new(NAdam::new(p, 0.02).weight_decay(0.1)))),
    ("nadam decoupled", |p| {
        let optimizer = NAdam::new(p, 0.02).weight_decay(0.1).decoupled_weight_decay(true);
        Ok(Box::new(optimizer.momentum_decay(0.1)))
    }),
    ("radam", |p| Ok(Box::new(RAdam::new(p, 0.02).weight_decay(0.1)))),
    ("radam decoupled", |p| {
        let optimizer = RAdam::new(p, 0.02).betas((0.8, 0.9)).weight_decay(0.1);
        Ok(Box::new(optimizer.decoupled_weight_decay(true)))
    }),
    ("asgd", |p| Ok(Box::new(Asgd::new(p, 0.1).lambd(0.01).weight_decay(0.1)))),
    ("rprop", |p| Ok(Box::new(Rprop::new(p, 0.05)))),
    ("adafactor", |p| Ok(Box::new(Adafactor::new(p, 0.1).weight_decay(0.1)))),
    ("adafactor far", |p| Ok(Box::new(Adafactor::new(p, 2.0).beta2_decay(-0.5).maximize(true)))),
    ("muon", |p| Ok(Box::new(Muon::new(matrices(&p), 0.05)))),
    ("muon rms", |p| {
        let optimizer = Muon::new(matrices(&p), 0.05).nesterov(false).weight_decay(0.0);
        Ok(Box::new(optimizer.adjust_lr(MuonAdjustLr::MatchRmsAdamW)))
    }),
    ("lion", |p| Ok(Box::new(Lion::new(p, 0.02).weight_decay(0.1)))),
    ("lamb", |p| Ok(Box::new(Lamb::new(p, 0.02)))),
];

pub(super) fn initial_parameters(device: &Device) -> Result<Vec<Tensor>> {
    let make = |(k, shape): (usize, &&[usize])| {
        let n = shape.iter().product::<usize>();
        let values: Vec<f32> = (0..n).map(|i| (0.5 * i as f64 + k as f64).cos() as f32).collect();
        Ok(Tensor::from_slice(&values, shape, device)?.to_leaf()?)
    };
    SHAPES.iter().enumerate().map(make).collect()
}

/// Sets the gradients of step `t` for an optimiser's parameters.
pub(super) fn set_gradients(all: &[Tensor], optimizer: &dyn Optimizer, t: usize) -> Result<()> {
    for (k, p) in all.iter().enumerate() {
        if !optimizer.parameters().iter().any(|q| q.shape() == p.shape()) {
            continue;
        }
        let grad = p
            .to_f64s()?
            .into_iter()
            .enumerate()
            .map(|(i, w)| ((1.7 * i as f64 + 0.9 * t as f64 + k as f64).sin() * (1.0 + 0.3 * w)) as f32);
        let grad = Tensor::from_slice(&grad.collect::<Vec<f32>>(), p.shape(), p.device())?;
        p.set_grad(Some(grad.to_dtype(p.dtype())?));
    }
    Ok(())
}

/// Runs training steps, each by `step`; the learning rate falls after ten.
fn train(
    all: &[Tensor],
    optimizer: &mut dyn Optimizer,
    steps: std::ops::RangeInclusive<usize>,
    step: impl Fn(&mut dyn Optimizer) -> Result<()>,
) -> Result<()> {
    for t in steps {
        if t == 11 {
            optimizer.set_lr(optimizer.lr() * 0.5);
        }
        set_gradients(all, optimizer, t)?;
        step(optimizer)?;
    }
    Ok(())
}

fn compare(device: &Device, step: impl Fn(&mut dyn Optimizer) -> Result<()>) -> Result<()> {
    let exact: BTreeMap<String, Vec<Vec<f64>>> = serde_json::from_str(include_str!("../../data/optim.json"))?;
    ensure!(
        exact.keys().all(|name| ALL.iter().any(|(n, _)| n == name)),
        "an optimiser of the file is not run"
    );
    for (name, make) in ALL {
        let all = initial_parameters(device)?;
        let mut optimizer = make(all.clone())?;
        if *name == "asgd" {
            // PyTorch's optimiser applies a changed rate one step later.
            for t in 1..=STEPS {
                set_gradients(&all, &*optimizer, t)?;
                step(&mut *optimizer)?;
            }
        } else {
            train(&all, &mut *optimizer, 1..=STEPS, &step)?;
        }
        ensure_final_values(name, &all, exact.get(*name).with_context(|| format!("no values of {name}"))?)?;
    }
    Ok(())
}

fn ensure_final_values(name: &str, all: &[Tensor], exact: &[Vec<f64>]) -> Result<()> {
    // Our bf16 products are rounded after each operation.
    let within = if name.starts_with("muon") { 2e-2 } else { 2e-5 };
    for (p, exact) in all.iter().zip(exact) {
        for (i, (got, exact)) in p.to_f64s()?.into_iter().zip(exact).enumerate() {
            ensure!(
                (got - exact).abs() <= within * (1.0 + exact.abs()),
                "{name}, element {i}: {got} is not {exact}"
            );
        }
    }
    Ok(())
}

/// Loads PyTorch's state after ten steps; ten more steps must reach PyTorch's result after twenty.
fn states_of_pytorch_can_be_continued(device: &Device) -> Result<()> {
    let exact: BTreeMap<String, Vec<Vec<f64>>> = serde_json::from_str(include_str!("../../data/optim.json"))?;
    let states: BTreeMap<String, BTreeMap<String, Vec<f64>>> =
        serde_json::from_str(include_str!("../../data/optim_states.json"))?;
    for (name, state) in &states {
        let (_, make) = ALL.iter().find(|(n, _)| n == name).with_context(|| format!("no {name}"))?;
        let all = initial_parameters(device)?;
        let tensor = |values: &[f64], shape: &[usize]| -> Result<Tensor> {
            let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
            Ok(Tensor::from_slice(&values, shape, device)?)
        };
        for (k, p) in all.iter().enumerate() {
            let values = state.get(&format!("p{k}")).context("no parameter")?;
            p.detach().copy_(&tensor(values, p.shape())?)?;
        }
        let mut optimizer = make(all.clone())?;
        // The state's shapes equal our own.
        set_gradients(&all, &*optimizer, 1)?;
        let mut first = make(initial_parameters(device)?)?;
        set_gradients(first.parameters(), &*first, 1)?;
        first.step()?;
        let shapes = first.state_dict()?;
        let given = state.iter().filter(|(key, _)| !key.starts_with('p')).map(|(key, values)| {
            let shape = shapes.get(key).map_or(&[][..], |t| t.shape());
            Ok((key.clone(), tensor(values, shape)?))
        });
        optimizer.load_state_dict(&given.collect::<Result<_>>()?).with_context(|| name.clone())?;
        for t in 11..=STEPS {
            if t == 11 && name != "asgd" {
                optimizer.set_lr(optimizer.lr() * 0.5);
            }
            set_gradients(&all, &*optimizer, t)?;
            optimizer.step()?;
        }
        ensure_final_values(name, &all, exact.get(name).with_context(|| format!("no values of {name}"))?)?;
    }
    Ok(())
}

fn twenty_steps_match_pytorch(device: &Device) -> Result<()> {
    compare(device, |optimizer| Ok(optimizer.step()?))
}

fn step_counts_on_the_device_give_the_same_steps(device: &Device) -> Result<()> {
    let skip = Tensor::zeros((), DType::F32, device)?;
    compare(device, |optimizer| Ok(optimizer.step_unless(&skip)?))
}

fn values(all: &[Tensor]) -> Result<Vec<Vec<f64>>> {
    all.iter().map(|p| Ok(p.to_f64s()?)).collect()
}

fn skipped_steps_change_nothing(device: &Device) -> Result<()> {
    let (take, skip) = (Tensor::zeros((), DType::F32, device)?, Tensor::ones((), DType::F32, device)?);
    for (name, make) in ALL {
        let run = |with_skips: bool| -> Result<Vec<Vec<f64>>> {
            let all = initial_parameters(device)?;
            let mut optimizer = make(all.clone())?;
            for t in 1..=4 {
                if with_skips && t % 2 == 0 {
                    // With other gradients, some of them infinite.
                    set_gradients(&all, &*optimizer, 77 + t)?;
                    all[0].set_grad(Some(all[0].mul(f64::INFINITY)?.detach()));
                    let before = values(&all)?;
                    optimizer.step_unless(&skip)?;
                    ensure!(values(&all)? == before, "{name}: a skipped step changed parameters");
                }
                set_gradients(&all, &*optimizer, t)?;
                optimizer.step_unless(&take)?;
            }
            values(&all)
        };
        ensure!(run(true)? == run(false)?, "{name}: a skipped step was counted or kept");
    }
    Ok(())
}

fn restored_states_continue_with_the_same_bits(device: &Device) -> Result<()> {
    for (name, make) in ALL {
        let first = initial_parameters(device)?;
        let mut optimizer = make(first.clone())?;
        train(&first, &mut *optimizer, 1..=3, |o| Ok(o.step()?))?;
        let second = initial_parameters(device)?;
        for (to, from) in second.iter().zip(&first) {
            to.detach().copy_(&from.detach())?;
        }
        let mut resumed = make(second.clone())?;
        resumed.load_state_dict(&optimizer.state_dict()?)?;
        train(&first, &mut *optimizer, 4..=6, |o| Ok(o.step()?))?;
        train(&second, &mut *resumed, 4..=6, |o| Ok(o.step()?))?;
        ensure!(values(&first)? == values(&second)?, "{name}: the runs differ");
        // A state that does not fit completely changes nothing.
        let ends = |dict: &BTreeMap<String, Tensor>| -> Result<Vec<Vec<f64>>> {
            values(&dict.values().cloned().collect::<Vec<_>>())
        };
        let before = ends(&resumed.state_dict()?)?;
        let mut other = BTreeMap::new();
        for (name, t) in optimizer.state_dict()? {
            other.insert(name, t.add(if t.dtype().is_float() { 1.0 } else { 2.0 })?.to_dtype(t.dtype())?);
        }
        let last = other.keys().rfind(|name| !name.ends_with(".step")).cloned();
        if let Some(last) = &last {
            let mut wrong = other.clone();
            wrong.insert(last.clone(), Tensor::zeros([2, 1, 1, 1], DType::F32, device)?);
            let error = resumed.load_state_dict(&wrong).err().context("it was taken")?.to_string();
            ensure!(error.contains(last.as_str()), "{name}: {error}");
        }
        other.insert("9.nothing".into(), Tensor::zeros((), DType::F32, device)?);
        let error = resumed.load_state_dict(&other).err().context("it was taken")?.to_string();
        ensure!(
            error.contains("unexpected: 9.nothing; the state is of another optimiser"),
            "{name}: {error}"
        );
        ensure!(ends(&resumed.state_dict()?)? == before, "{name}: a state that was refused is there");
        let mut fewer = optimizer.state_dict()?;
        let state = fewer.keys().find(|name| !name.ends_with(".step")).cloned();
        if let Some(state) = state {
            fewer.remove(&state);
            let error = resumed.load_state_dict(&fewer).err().context("it was taken")?.to_string();
            ensure!(error.contains(&format!("missing: {state}")), "{name}: {error}");
        }
    }
    Ok(())
}

fn parameters_in_16_bits_keep_their_dtype(device: &Device) -> Result<()> {
    for (name, make) in ALL {
        let full = initial_parameters(device)?;
        let half: Vec<Tensor> =
            full.iter().map(|p| Ok(p.detach().to_dtype(DType::BF16)?.to_leaf()?)).collect::<Result<_>>()?;
        for all in [&full, &half] {
            let mut optimizer = make(all.clone())?;
            train(all, &mut *optimizer, 1..=1, |o| Ok(o.step()?))?;
        }
        for (full, half) in full.iter().zip(&half) {
            ensure!(half.dtype() == DType::BF16, "{name}: {}", half.dtype());
            for (a, b) in full.to_f64s()?.into_iter().zip(half.to_f64s()?) {
                ensure!((a - b).abs() <= 3e-2 * (1.0 + a.abs()), "{name}: {b} is not {a}");
            }
        }
    }
    Ok(())
}

/// Copies parameters into every second column of a larger buffer, transposed, and returns the buffers as well.
fn strided_parameters(all: &[Tensor], dtype: DType) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let copy = |p: &Tensor| -> Result<(Tensor, Tensor)> {
        let (rows, columns) = (p.shape()[0], p.shape().get(1).copied().unwrap_or(1));
        let buffer = Tensor::full([columns, rows, 2], 5.0, dtype, p.device())?;
        let view = buffer.select(2, 1)?.t()?;
        let view = if p.rank() == 1 { view.select(1, 0)? } else { view };
        view.copy_(&p.detach())?;
        Ok((view.to_leaf()?, buffer))
    };
    Ok(all.iter().map(copy).collect::<Result<Vec<_>>>()?.into_iter().unzip())
}

fn parameters_of_any_layout_get_the_same_bits(device: &Device) -> Result<()> {
    let one = Tensor::ones([1], DType::F32, device)?;
    for (name, make) in ALL {
        for dtype in [DType::F32, DType::BF16] {
            let packed = initial_parameters(device)?;
            let packed: Vec<Tensor> =
                packed.iter().map(|p| Ok(p.detach().to_dtype(dtype)?.to_leaf()?)).collect::<Result<_>>()?;
            let (strided, buffers) = strided_parameters(&packed, dtype)?;
            ensure!(strided.iter().all(|p| !p.is_contiguous()), "the parameters are contiguous");
            let mut states = Vec::new();
            for all in [&packed, &strided] {
                let mut optimizer = make(all.clone())?;
                train(all, &mut *optimizer, 1..=3, |o| Ok(o.step()?))?;
                optimizer.step_unless(&one)?;
                let state = optimizer.state_dict()?;
                states.push(values(&state.into_values().collect::<Vec<_>>())?);
            }
            ensure!(values(&packed)? == values(&strided)?, "{name} in {dtype}: other values");
            ensure!(states[0] == states[1], "{name} in {dtype}: other states");
            for buffer in &buffers {
                let between = buffer.select(2, 0)?.to_f64s()?;
                ensure!(
                    between.iter().all(|&x| x == 5.0),
                    "{name} in {dtype}: elements of others were written"
                );
            }
        }
    }
    Ok(())
}

fn offloaded_states_have_the_same_bits(device: &Device) -> Result<()> {
    for (name, make) in ALL {
        let run = |away: bool| -> Result<Vec<Vec<f64>>> {
            let all = initial_parameters(device)?;
            let mut optimizer = make(all.clone())?;
            optimizer.offload_state(away);
            train(&all, &mut *optimizer, 1..=4, |o| Ok(o.step()?))?;
            values(&all)
        };
        ensure!(run(true)? == run(false)?, "{name}");
    }
    Ok(())
}

/// Groups of parameters step in turn, so their states are not on the device together.
fn offloaded_states_return_in_groups(device: &Device) -> Result<()> {
    let sizes = [300, 260, 150, 280, 270, 8, 16, 290];
    // Returns the parameters after three steps, and the memory that a step needs in addition.
    let run = |make: OptimizerCtor, away: bool| -> Result<(Vec<Vec<f64>>, u64)> {
        let device = Device::with_config(device.backend().clone(), Config::default());
        let parameters = sizes
            .iter()
            .map(|&n| Tensor::full([n, 256], 1.0 / n as f64, DType::F32, &device)?.to_leaf())
            .collect::<forebay::error::Result<Vec<Tensor>>>()?;
        let mut optimizer = make(parameters.clone())?;
        optimizer.offload_state(away);
        let mut peak = 0;
        for t in 1..=3 {
            for p in &parameters {
                p.set_grad(Some(p.detach().mul(t as f64)?.sin()?));
            }
            device.pool().reset_peak_stats();
            let before = device.memory().allocated();
            optimizer.step()?;
            // The first step creates the states.
            if t > 1 {
                peak = peak.max(device.memory().peak_allocated() - before);
            }
        }
        Ok((values(&parameters)?, peak))
    };
    let adamw: OptimizerCtor = |p| Ok(Box::new(AdamW::new(p, 0.01)));
    let lamb: OptimizerCtor = |p| Ok(Box::new(Lamb::new(p, 0.01)));
    let mut peaks = Vec::new();
    for (name, make) in [("lamb", lamb), ("adamw", adamw)] {
        let ((expected, _), (got, peak)) = (run(make, false)?, run(make, true)?);
        ensure!(got == expected, "{name}: offloaded groups have other bits");
        peaks.push(peak);
    }
    // The largest state has two values of 4 bytes for each element; the small ones share a group.
    let (bound, peak) = (300 * 256 * 8 + (4 << 10), peaks[1]);
    ensure!(peak <= bound, "a step takes {peak} bytes, more than the {bound} of its largest group");
    Ok(())
}

fn invalid_parameter_groups_are_refused(device: &Device) -> Result<()> {
    let p = initial_parameters(device)?;
    let refused = |optimizer: &mut dyn Optimizer, group: ParamGroup, what: &str| -> Result<()> {
        let error = optimizer.add_param_group(group).err().with_context(|| format!("not refused: {what}"))?;
        ensure!(error.to_string().contains(what), "{error}");
        Ok(())
    };
    let mut optimizer = AdamW::new(vec![p[0].clone()], 0.1);
    refused(&mut optimizer, ParamGroup::new(vec![p[0].clone()]), "more than one group")?;
    refused(&mut AdamW::new(vec![], 0.0), ParamGroup::new(vec![p[1].clone()]).lr(0.1), "which is 0")?;
    set_gradients(&p, &optimizer, 1)?;
    optimizer.step()?;
    refused(&mut optimizer, ParamGroup::new(vec![p[1].clone()]), "before the first step")?;
    let mut muon = Muon::new(p.clone(), 0.1);
    set_gradients(&p, &muon, 1)?;
    let error = muon.step().err().context("a vector")?.to_string();
    ensure!(error.contains("AdamW"), "{error}");
    Ok(())
}

fn schedules() -> Result<Vec<(&'static str, Box<dyn LrSchedule>)>> {
    let base = 0.1;
    let cosine = |steps, min| CosineAnnealingLr { base_lr: base, eta_min: min, t_max: steps };
    let cyclic = |down, mode| {
        let up = if down == 6 { 4 } else { down };
        Box::new(CyclicLr { base_lr: base, max_lr: 0.5, step_size_up: up, step_size_down: down, mode })
    };
    let linear = |start_factor, end_factor, total_iters| LinearLr {
        base_lr: base,
        start_factor,
        end_factor,
        total_iters,
    };
    let constant = |factor, total_iters| Box::new(ConstantLr { base_lr: base, factor, total_iters });
    Ok(vec![
        ("step", Box::new(StepLr { base_lr: base, step_size: 7, gamma: 0.5 })),
        ("multi_step", Box::new(MultiStepLr { base_lr: base, milestones: vec![5, 20, 21], gamma: 0.3 })),
        ("constant", constant(0.25, 9)),
        ("linear", Box::new(linear(0.2, 0.9, 13))),
        ("exponential", Box::new(ExponentialLr { base_lr: base, gamma: 0.93 })),
        ("polynomial", Box::new(PolynomialLr { base_lr: base, total_iters: 30, power: 1.7 })),
        ("cosine", Box::new(cosine(15, 0.01))),
        (
            "restarts",
            Box::new(CosineAnnealingWarmRestarts { base_lr: base, t_0: 5, t_mult: 2, eta_min: 0.01 }),
        ),
        (
            "restarts_same",
            Box::new(CosineAnnealingWarmRestarts { base_lr: base, t_0: 6, t_mult: 1, eta_min: 0.0 }),
        ),
        ("cyclic", cyclic(6, CyclicMode::Triangular)),
        ("cyclic2", cyclic(5, CyclicMode::Triangular2)),
        ("cyclic_exp", cyclic(5, CyclicMode::ExpRange(0.95))),
        ("one_cycle", Box::new(OneCycleLr::new(0.5, 41))),
        ("lambda", Box::new(LambdaLr { base_lr: base, factor: |t| 1.0 / (1.0 + t as f64) })),
        (
            "multiplicative",
            Box::new(MultiplicativeLr { base_lr: base, factor: |t| 1.0 - 1.0 / (2.0 + t as f64) }),
        ),
        (
            "sequential",
            Box::new(SequentialLr::new(
                vec![Box::new(linear(0.1, 1.0, 8)), Box::new(cosine(20, 0.01)), constant(0.1, 100)],
                &[8, 28],
            )?),
        ),
        (
            "chained",
            Box::new(ChainedScheduler::new(
                base,
                vec![constant(0.25, 9), Box::new(ExponentialLr { base_lr: base, gamma: 0.9 })],
            )?),
        ),
    ])
}

fn plateaus() -> [(&'static str, ReduceLrOnPlateau); 2] {
    [
        ("plateau", ReduceLrOnPlateau::new().factor(0.5).patience(3).cooldown(2).min_lr(0.002)),
        (
            "plateau_max",
            ReduceLrOnPlateau::new().maximize().factor(0.5).patience(2).absolute_threshold(0.005),
        ),
    ]
}

fn rates() -> Result<BTreeMap<String, Vec<f64>>> {
    Ok(serde_json::from_str(include_str!("../../data/schedules.json"))?)
}

/// Rates that the schedule sets equal those of the file in every step.
fn schedules_match_pytorch(device: &Device) -> Result<()> {
    let exact = rates()?;
    let same = |name: &str, t: usize, lr: f64| -> Result<()> {
        let expected = exact[name][t];
        ensure!(
            (lr - expected).abs() <= 1e-12 + 1e-10 * expected.abs(),
            "{name}, step {t}: {lr:e}, not {expected:e}"
        );
        Ok(())
    };
    let steps = exact["metrics"].len();
    let mut optimizer = Sgd::new(initial_parameters(device)?, 0.1);
    for (name, schedule) in schedules()? {
        let mut scheduler = LrScheduler::new(&*schedule, &mut optimizer);
        for t in 0..steps {
            same(name, t, optimizer.lr())?;
            scheduler.step(&mut optimizer);
        }
    }
    for (name, mut scheduler) in plateaus() {
        optimizer.set_lr(0.1);
        for (t, &metric) in exact["metrics"].iter().enumerate() {
            same(name, t, optimizer.lr())?;
            scheduler.step(metric, &mut optimizer);
        }
    }
    ensure!(SequentialLr::new(vec![], &[3]).is_err(), "milestones without schedules were accepted");
    ensure!(ChainedScheduler::new(0.0, vec![]).is_err(), "a rate of 0 has no factors");
    Ok(())
}

fn schedulers_continue_from_their_states(device: &Device) -> Result<()> {
    let exact = rates()?;
    let p = initial_parameters(device)?;
    for (name, schedule) in schedules()? {
        let (mut first, mut second) = (Sgd::new(p.clone(), 0.1), Sgd::new(p.clone(), 7.0));
        let mut scheduler = LrScheduler::new(&*schedule, &mut first);
        (0..17).for_each(|_| scheduler.step(&mut first));
        let mut resumed = LrScheduler::new(&*schedule, &mut second);
        resumed.load_state(scheduler.state(), &mut second);
        ensure!(first.lr() == second.lr() && resumed.last_lr() == second.lr(), "{name}");
    }
    for (name, fresh) in plateaus() {
        let (mut first, mut second) = (Sgd::new(p.clone(), 0.1), Sgd::new(p.clone(), 7.0));
        let (mut scheduler, mut resumed) = (fresh, fresh);
        exact["metrics"][..17].iter().for_each(|&m| scheduler.step(m, &mut first));
        let saved = serde_json::to_string(&scheduler.state())?;
        resumed.load_state(serde_json::from_str(&saved)?, &mut second);
        for &m in &exact["metrics"][17..] {
            scheduler.step(m, &mut first);
            resumed.step(m, &mut second);
            ensure!(first.lr() == second.lr(), "{name}: {} and {}", first.lr(), second.lr());
        }
        ensure!(first.lr() < 0.1, "{name}: the rate never fell");
    }
    Ok(())
}

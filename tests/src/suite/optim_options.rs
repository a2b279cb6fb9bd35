//! Optimisers and clipping: rejected options, state of frozen parameters, and steps that run out of memory.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::memory::{Config, Tag};
use forebay::nn::{
    BatchNorm1d, Dropout, GroupNorm, InstanceNorm1d, LayerNorm, Linear, Module, RmsNorm, init,
};
use forebay::ops::{CrossEntropyOptions, NormOptions};
use forebay::optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Asgd, AveragedModel, ClipGradNormOptions, GradScaler,
    Lamb, Lion, Muon, NAdam, Optimizer, ParamGroup, RAdam, RmsProp, Rprop, Sgd, clip_grad_norm_,
    clip_grad_norm_with, clip_grad_value_,
};
use forebay::tensor::Tensor;

use super::host_reference::ensure_same_bits;
use super::optim::{ALL, initial_parameters, set_gradients};

super::tests![
    options_out_of_range_are_refused_by_name,
    bounds_out_of_range_do_not_change_gradients,
    rates_out_of_range_are_refused_before_the_step,
    scalers_refuse_factors_out_of_range,
    layers_refuse_options_out_of_range,
    parameter_lists_are_checked_as_in_pytorch,
    gradients_that_do_not_fit_their_parameters_are_refused,
    frozen_parameters_have_no_state,
    parameters_get_their_state_with_their_first_gradient,
    partial_states_are_loaded,
    loaded_states_out_of_range_are_refused,
    steps_that_fail_at_any_request_can_be_repeated,
    averages_survive_a_failure_at_every_request,
];

fn with_own_pool(device: &Device) -> Device {
    Device::with_config(device.backend().clone(), Config::default())
}

/// Returns the text of an expected error.
fn expect_error<T>(result: forebay::error::Result<T>, what: &str) -> Result<String> {
    Ok(result.err().with_context(|| format!("not refused: {what}"))?.to_string())
}

fn bits(all: &[Tensor]) -> Result<Vec<Vec<u64>>> {
    all.iter().map(|p| Ok(p.to_f64s()?.into_iter().map(f64::to_bits).collect())).collect()
}

/// Sets the gradients of a step, and checks that the optimiser rejects the step and changes nothing.
fn step_is_refused(mut optimizer: impl Optimizer, what: &str) -> Result<String> {
    let p = optimizer.parameters().to_vec();
    set_gradients(&p, &optimizer, 1)?;
    let before = bits(&p)?;
    let error = expect_error(optimizer.step(), what)?;
    ensure!(bits(&p)? == before, "{what}: a refused step changed parameters");
    ensure!(
        optimizer.state_dict().map_or(true, |state| state.is_empty()),
        "{what}: a refused step has state"
    );
    Ok(error)
}

fn options_out_of_range_are_refused_by_name(device: &Device) -> Result<()> {
    let p = initial_parameters(device)?;
    macro_rules! refuse {
        ($($name:ident.$option:ident: $($value:expr),+;)*) => {$($(
            let what = concat!(stringify!($name), ".", stringify!($option));
            let error = step_is_refused($name::new(p.clone(), 0.1).$option($value), what)?;
            ensure!(error.contains(concat!("`", stringify!($option))), "{what}: {error}");
        )+)*};
    }
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    refuse! {
        Sgd.momentum: -0.1, nan, inf; Sgd.dampening: 2.0, nan; Sgd.weight_decay: -1.0, nan; Sgd.nesterov: true;
        Adam.betas: (1.0, 0.9), (0.9, -0.1), (nan, 0.9); Adam.eps: -1e-8, nan; Adam.weight_decay: -1.0, inf;
        AdamW.betas: (0.9, 1.5); AdamW.weight_decay: nan; Adamax.betas: (-1.0, 0.9); RAdam.eps: nan;
        NAdam.momentum_decay: -1.0, nan;
        RmsProp.alpha: -0.1, 1.1, nan; RmsProp.eps: -1.0; RmsProp.momentum: -1.0; RmsProp.weight_decay: nan;
        Adagrad.lr_decay: -1.0; Adagrad.initial_accumulator_value: -1.0; Adagrad.eps: nan; Adagrad.weight_decay: -1.0;
        Adadelta.rho: -0.1, 1.1; Adadelta.eps: nan; Adadelta.weight_decay: -1.0;
        Asgd.lambd: -1.0; Asgd.alpha: nan; Asgd.t0: -1.0, nan; Asgd.weight_decay: -1.0;
        Rprop.etas: (0.0, 1.2), (1.0, 1.2), (0.5, 1.0), (0.5, nan); Rprop.step_sizes: (-1.0, 1.0), (1.0, nan), (1.0, 0.5);
        Lion.betas: (0.9, 1.0); Lion.weight_decay: -1.0; Lamb.betas: (1.0, 0.9); Lamb.eps: -1.0; Lamb.weight_decay: nan;
        Adafactor.beta2_decay: 0.1, nan; Adafactor.eps: (Some(-1.0), 1e-3), (None, nan); Adafactor.d: 0.5, nan;
        Adafactor.weight_decay: -1.0;
    }
    let matrix = vec![p[0].clone()];
    for (muon, name) in [
        (Muon::new(matrix.clone(), 0.1).momentum(-0.1), "`momentum`"),
        (Muon::new(matrix.clone(), 0.1).weight_decay(nan), "`weight_decay`"),
        (Muon::new(matrix.clone(), 0.1).ns_steps(100), "`ns_steps`"),
        (Muon::new(matrix.clone(), 0.1).eps(-1.0), "`eps`"),
        (Muon::new(matrix, 0.1).ns_coefficients((1.0, nan, 0.0)), "`ns_coefficients`"),
    ] {
        let error = step_is_refused(muon, name)?;
        ensure!(error.contains(name), "{name}: {error}");
    }
    for group in [
        ParamGroup::new(vec![p[1].clone()]).lr(-0.1),
        ParamGroup::new(vec![p[1].clone()]).lr(nan),
        ParamGroup::new(vec![p[1].clone()]).weight_decay(-0.1),
    ] {
        let mut optimizer = Sgd::new(vec![p[0].clone()], 0.1);
        let error = expect_error(optimizer.add_param_group(group), "a group")?;
        ensure!(error.contains("expected a finite number of 0 or more"), "{error}");
        ensure!(optimizer.parameters().len() == 1, "a refused group was added");
    }
    // Options that determine the kinds of state must be set before the first step.
    let mut optimizer = Sgd::new(p.clone(), 0.1);
    set_gradients(&p, &optimizer, 1)?;
    optimizer.step()?;
    let error = expect_error(optimizer.momentum(0.9).step(), "momentum after a step")?;
    ensure!(error.contains("before the first step"), "{error}");
    Ok(())
}

fn bounds_out_of_range_do_not_change_gradients(device: &Device) -> Result<()> {
    let p = initial_parameters(device)?;
    set_gradients(&p, &Sgd::new(p.clone(), 0.1), 1)?;
    let grads: Vec<Tensor> = p.iter().filter_map(Tensor::grad).collect();
    let before = bits(&grads)?;
    for bad in [-1.0, f64::NAN, f64::NEG_INFINITY, -1e-300] {
        for error in [
            expect_error(clip_grad_norm_(&p, bad), "a bound")?,
            expect_error(
                clip_grad_norm_with(
                    &p,
                    bad,
                    &ClipGradNormOptions { norm_type: 1.0, ..ClipGradNormOptions::default() },
                ),
                "it",
            )?,
        ] {
            ensure!(error.contains(&format!("`max_norm` is {bad}, expected 0 or more")), "{error}");
        }
        let error = expect_error(clip_grad_value_(&p, bad), "a bound")?;
        ensure!(error.contains(&format!("`clip_value` is {bad}, expected 0 or more")), "{error}");
    }
    for bad in [-1.0, f64::NAN, 0.0] {
        let error = expect_error(
            clip_grad_norm_with(
                &p,
                1.0,
                &ClipGradNormOptions { norm_type: bad, ..ClipGradNormOptions::default() },
            ),
            "it",
        )?;
        ensure!(error.contains("order above 0"), "{error}");
    }
    // A bound of infinity does not clip.
    let norm = clip_grad_norm_(&p, f64::INFINITY)?.item()?;
    let exact = grads
        .iter()
        .map(|g| Ok(g.to_f64s()?.into_iter().map(|x| x * x).sum::<f64>()))
        .sum::<Result<f64>>()?;
    ensure!((norm - exact.sqrt()).abs() <= 1e-5 * exact.sqrt(), "{norm} is not {}", exact.sqrt());
    clip_grad_norm_(&p, 1e300)?;
    clip_grad_value_(&p, f64::INFINITY)?;
    ensure!(bits(&grads)? == before, "a bound of infinity changed gradients");
    // A bound of 0 is valid.
    clip_grad_norm_(&p, 0.0)?;
    ensure!(
        grads.iter().all(|g| g.to_f64s().is_ok_and(|g| g.iter().all(|&x| x == 0.0))),
        "a bound of 0 leaves gradients"
    );
    // On request, a norm that is not finite is an error that changes nothing.
    p[0].set_grad(Some(p[0].detach().mul(f64::INFINITY)?));
    let strict = ClipGradNormOptions { error_if_nonfinite: true, ..ClipGradNormOptions::default() };
    let before = bits(&[p[0].grad().context("no gradient")?])?;
    let error = expect_error(clip_grad_norm_with(&p, 1.0, &strict), "an infinite norm")?;
    ensure!(error.contains("cannot be clipped"), "{error}");
    ensure!(bits(&[p[0].grad().context("no gradient")?])? == before, "gradients changed");
    Ok(())
}

fn rates_out_of_range_are_refused_before_the_step(device: &Device) -> Result<()> {
    let p = initial_parameters(device)?;
    for bad in [-0.1, f64::NAN, f64::INFINITY, 1e300] {
        let error = step_is_refused(AdamW::new(p.clone(), bad), "a rate")?;
        ensure!(error.contains(&format!("`lr` is {bad}, expected")), "{error}");
        let mut optimizer = Sgd::new(p.clone(), 0.1);
        optimizer.set_lr(bad);
        let error = step_is_refused(optimizer, "a rate that was set")?;
        ensure!(error.contains("`lr`"), "{error}");
        let mut optimizer = Sgd::new(vec![p[0].clone()], 0.1);
        optimizer.add_param_group(ParamGroup::new(vec![p[1].clone()]).lr(1.0))?;
        optimizer.set_lr(bad);
        step_is_refused(optimizer, "a rate of a group")?;
    }
    // With a valid option, the optimiser steps again.
    let mut optimizer = Sgd::new(p.clone(), f64::NAN);
    set_gradients(&p, &optimizer, 1)?;
    expect_error(optimizer.step(), "NaN")?;
    optimizer.set_lr(0.0);
    optimizer.step()?;
    Ok(())
}

fn scalers_refuse_factors_out_of_range(device: &Device) -> Result<()> {
    let loss = Tensor::ones((), DType::F32, device)?;
    for (name, scaler) in [
        ("init_scale", GradScaler::new().init_scale(0.0)),
        ("init_scale", GradScaler::new().init_scale(-2.0)),
        ("init_scale", GradScaler::new().init_scale(f64::NAN)),
        ("init_scale", GradScaler::new().init_scale(f64::INFINITY)),
        ("growth_factor", GradScaler::new().growth_factor(0.5)),
        ("growth_factor", GradScaler::new().growth_factor(f64::NAN)),
        ("backoff_factor", GradScaler::new().backoff_factor(0.0)),
        ("backoff_factor", GradScaler::new().backoff_factor(1.5)),
        ("backoff_factor", GradScaler::new().backoff_factor(f64::NAN)),
        ("growth_interval", GradScaler::new().growth_interval(0)),
    ] {
        let error = expect_error(scaler.scale(&loss), name)?;
        ensure!(error.contains(&format!("`{name}` is")), "{error}");
    }
    Ok(())
}

fn layers_refuse_options_out_of_range(device: &Device) -> Result<()> {
    let x = Tensor::ones([4, 2, 6], DType::F32, device)?;
    // Negative values are accepted, as in PyTorch.
    for bad in [f64::NEG_INFINITY, f64::NAN, f64::INFINITY] {
        let eps = format!("`eps` is {bad}, expected");
        for made in [
            LayerNorm::new([6], device)?.eps(bad).forward(&x),
            RmsNorm::new([6], device)?.eps(bad).forward(&x),
            GroupNorm::new(1, 2, device)?.eps(bad).forward(&x),
            BatchNorm1d::new(2, device)?.eps(bad).forward(&x),
            InstanceNorm1d::new(2).eps(bad).forward(&x),
            x.add_layer_norm(&x, [6], &NormOptions { eps: bad, ..Default::default() }).map(|(x, _)| x),
            x.add_rms_norm(&x, [6], None, Some(bad)).map(|(x, _)| x),
        ] {
            let error = expect_error(made, &eps)?;
            ensure!(error.contains(&eps), "{error}");
        }
        let norm = BatchNorm1d::new(2, device)?.momentum(bad);
        let before = bits(&norm.state_dict().into_values().collect::<Vec<_>>())?;
        let error = expect_error(norm.forward(&x), "momentum")?;
        ensure!(error.contains("`momentum` is"), "{error}");
        let after = bits(&norm.state_dict().into_values().collect::<Vec<_>>())?;
        ensure!(before == after, "a momentum that was refused changed statistics");
    }
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        expect_error(Dropout::new(bad).forward(&x), "p")?;
        let smoothing = CrossEntropyOptions { label_smoothing: bad, ..CrossEntropyOptions::default() };
        let classes = Tensor::zeros([4, 6], DType::I32, device)?;
        expect_error(x.cross_entropy_with(&classes, &smoothing), "smoothing")?;
        expect_error(init::normal_(&x, 0.0, bad), "std")?;
        expect_error(init::xavier_uniform_(&x, bad), "gain")?;
        expect_error(AveragedModel::ema(&vec![x.clone()], bad), "decay")?;
    }
    ensure!(x.to_f64s()?.iter().all(|&x| x == 1.0), "a refused initialisation changed the tensor");
    Ok(())
}

fn parameter_lists_are_checked_as_in_pytorch(device: &Device) -> Result<()> {
    let p = initial_parameters(device)?;
    let plain = p[0].detach();
    let result = p[0].mul(2.0)?;
    let view = p[0].t()?;
    let expanded = Tensor::zeros([1, 3], DType::F32, device)?.broadcast_to([2, 3])?.to_leaf()?;
    for (list, what) in [
        (vec![], "empty parameter list"),
        (vec![p[0].clone(), plain], "parameter 1 of shape [4, 6] requires no gradient"),
        (vec![result], "parameter 0 of shape [4, 6] is not a leaf"),
        (vec![view], "is not a leaf"),
        (vec![expanded], "parameter 0 of shape [2, 3] repeats elements"),
        (vec![p[0].clone(), p[1].clone(), p[0].detach().to_leaf()?, p[1].clone()], "parameter 3 of"),
        (vec![p[0].clone(), p[0].clone()], "parameter 1 of shape [4, 6] is in the list twice"),
    ] {
        let error = expect_error(Sgd::new(list.clone(), 0.1).step(), what)?;
        ensure!(error.contains(what), "{error}");
        let mut optimizer = Adam::new(list, 0.1);
        let error = expect_error(optimizer.load_state_dict(&std::collections::BTreeMap::new()), what)?;
        ensure!(error.contains(what), "{error}");
    }
    for (name, make) in ALL {
        // Muon makes groups of its own.
        let made = make(vec![p[0].clone(), p[0].clone()]);
        let refused = made.and_then(|mut optimizer| Ok(optimizer.step()?));
        let error = refused.err().with_context(|| format!("{name}: not refused"))?.to_string();
        ensure!(error.contains("twice"), "{name}: {error}");
    }
    // A frozen leaf is accepted.
    p[2].requires_grad_(false)?;
    let mut optimizer = Sgd::new(p.clone(), 0.1);
    optimizer.step()?;
    let error =
        expect_error(optimizer.add_param_group(ParamGroup::new(vec![p[1].clone()])), "a second group")?;
    ensure!(error.contains("more than one group"), "{error}");
    // Parameters on several devices are stepped on each.
    let other = initial_parameters(&with_own_pool(device))?;
    let mut both = Adam::new(vec![p[0].clone(), other[0].clone()], 0.1);
    for q in [&p[0], &other[0]] {
        q.set_grad(Some(q.detach().ones_like()?));
    }
    both.step()?;
    ensure!(bits(&p[..1])? == bits(&other[..1])?, "the devices differ");
    Ok(())
}

fn gradients_that_do_not_fit_their_parameters_are_refused(device: &Device) -> Result<()> {
    let elsewhere = with_own_pool(device);
    let f32 = DType::F32;
    type InvalidCall = (&'static str, fn(&Tensor, &Device) -> forebay::error::Result<Tensor>);
    let wrong: [InvalidCall; 3] = [
        ("shape", |p, _| Tensor::ones([p.numel()], DType::F32, p.device())),
        ("type", |p, _| Tensor::ones(p.shape(), DType::BF16, p.device())),
        ("device", |p, other| Tensor::ones(p.shape(), DType::F32, other)),
    ];
    for (what, make) in wrong {
        let all = initial_parameters(device)?;
        let set = || -> Result<()> {
            for p in &all {
                p.set_grad(Some(Tensor::ones(p.shape(), f32, device)?));
            }
            all[2].set_grad(Some(make(&all[2], &elsewhere)?));
            Ok(())
        };
        set()?;
        let before = bits(&all)?;
        let grads: Vec<Tensor> = all[..2].iter().filter_map(Tensor::grad).collect();
        let grads_before = bits(&grads)?;
        for (name, make) in ALL {
            let mut optimizer = make(all.clone())?;
            expect_error(optimizer.step(), &format!("{name}: {what}"))?;
            let skip = Tensor::zeros((), f32, device)?;
            expect_error(optimizer.step_unless(&skip), &format!("{name}: {what}"))?;
            ensure!(bits(&all)? == before, "{name}: a gradient of another {what} changed parameters");
        }
        expect_error(clip_grad_norm_(&all, 0.1), what)?;
        expect_error(clip_grad_value_(&all, 0.1), what)?;
        let sgd = Sgd::new(all.clone(), 0.1);
        let error = expect_error(GradScaler::new().unscale_(&sgd), what)?;
        ensure!(error.contains("gradient of parameter 2"), "{error}");
        ensure!(bits(&grads)? == grads_before, "{what}: gradients were changed before the check");
        // The optimiser also rejects the gradients once its state exists.
        let mut optimizer = Adam::new(all.clone(), 0.1);
        all[2].set_grad(Some(Tensor::ones(all[2].shape(), f32, device)?));
        optimizer.step()?;
        set()?;
        let before = bits(&all)?;
        expect_error(optimizer.step(), what)?;
        ensure!(bits(&all)? == before, "a gradient of another {what} changed parameters");
    }
    Ok(())
}

/// Returns the bytes of optimiser state.
fn state_bytes(device: &Device) -> u64 {
    device.memory().tags[Tag::OptimizerState as usize].current
}

fn frozen_parameters_have_no_state(device: &Device) -> Result<()> {
    let device = with_own_pool(device);
    let (body, head) = (Linear::new(64, 32, &device)?, Linear::new(32, 2, &device)?);
    let net = (body, head);
    net.0.requires_grad_(false);
    ensure!(net.num_parameters() == 64 * 32 + 32 + 66 && net.num_trainable_parameters() == 66, "miscounted");
    let x = Tensor::ones([3, 64], DType::F32, &device)?;
    let run = |parameters: Vec<Tensor>| -> Result<(u64, Vec<String>)> {
        let mut optimizer = AdamW::new(parameters, 1e-3);
        for _ in 0..2 {
            net.1.forward(&net.0.forward(&x)?)?.sum_all()?.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
        }
        Ok((state_bytes(&device), optimizer.state_dict()?.into_keys().collect()))
    };
    let (trained, _) = run(net.1.parameters())?;
    let (all, names) = run(net.parameters())?;
    ensure!(trained > 0 && all == trained, "{all} bytes of state, {trained} of what trains alone");
    ensure!(
        names.len() == 6 && names.iter().all(|n| n.starts_with("2.") || n.starts_with("3.")),
        "{names:?}"
    );
    ensure!(state_bytes(&device) == 0, "state is left");
    Ok(())
}

fn parameters_get_their_state_with_their_first_gradient(device: &Device) -> Result<()> {
    // Each parameter's steps equal those it would make alone, whenever it starts or pauses.
    for (name, make) in ALL {
        if name.contains("groups") {
            continue;
        }
        let trains = |k: usize, t: usize| [true, t >= 3, t != 2 && t < 4][k];
        let (all, alone) = (initial_parameters(device)?, initial_parameters(device)?);
        let mut optimizer = make(all.clone())?;
        let mut singles: Vec<Option<Box<dyn Optimizer>>> = (0..3).map(|_| None).collect();
        for t in 1..=5 {
            set_gradients(&all, &*optimizer, t)?;
            for (k, p) in all.iter().enumerate() {
                p.requires_grad_(true)?;
                if !trains(k, t) {
                    p.requires_grad_(false)?;
                }
            }
            for (p, q) in all.iter().zip(&alone) {
                q.set_grad(p.grad().map(|g| g.copy()).transpose()?);
            }
            optimizer.step()?;
            for (k, q) in alone.iter().enumerate().filter(|(_, q)| q.grad().is_some()) {
                let single = match &mut singles[k] {
                    Some(single) => single,
                    none => none.insert(make(vec![q.clone()])?),
                };
                if single.parameters().is_empty() {
                    continue; // Muon takes matrices.
                }
                single.step()?;
            }
        }
        // A launch of several parameters is another program than a launch of one. CUDA's compiler may contract a
        // multiply-add in only one, which changes a last bit in Adamax and RAdam. A wrong step count shows at 1e-3.
        let near = |a: &f64, b: &f64| (a - b).abs() <= 1e-6 * b.abs().max(1.0);
        for (p, q) in all.iter().zip(&alone) {
            let (got, expected) = (p.to_f64s()?, q.to_f64s()?);
            ensure!(
                got.iter().zip(&expected).all(|(a, b)| near(a, b)),
                "{name}: {got:?} is not what each parameter does alone, {expected:?}"
            );
        }
    }
    Ok(())
}

fn partial_states_are_loaded(device: &Device) -> Result<()> {
    let all = initial_parameters(device)?;
    let mut first = AdamW::new(all.clone(), 0.02);
    all[1].requires_grad_(false)?;
    set_gradients(&all, &first, 1)?;
    all[1].set_grad(None);
    first.step()?;
    let state = first.state_dict()?;
    ensure!(state.len() == 6 && !state.keys().any(|k| k.starts_with("1.")), "{:?}", state.keys());
    let own_memory = state_bytes(device);
    let mut second = AdamW::new(all.clone(), 0.02);
    second.load_state_dict(&state)?;
    ensure!(state_bytes(device) == 2 * own_memory, "the loaded state takes another number of bytes");
    ensure!(second.state_dict()?.keys().eq(state.keys()), "a parameter that made no step has state");
    for (name, t) in second.state_dict()? {
        ensure_same_bits(&t, &state[&name]).context(name)?;
    }
    // Loading replaces all state: a parameter without loaded state starts again.
    all[1].requires_grad_(true)?;
    set_gradients(&all, &second, 2)?;
    second.step()?;
    ensure!(second.state_dict()?.len() == 9, "the unfrozen parameter has no state");
    second.load_state_dict(&state)?;
    ensure!(
        second.state_dict()?.keys().eq(state.keys()),
        "loading kept the state of a parameter that the file lacks"
    );
    Ok(())
}

fn loaded_states_out_of_range_are_refused(device: &Device) -> Result<()> {
    let all = initial_parameters(device)?;
    let mut first = Adam::new(all.clone(), 0.02);
    set_gradients(&all, &first, 1)?;
    first.step()?;
    let good = first.state_dict()?;
    let number = |x: f32| Tensor::from_slice(&[x], (), device);
    let wrong = [
        ("0.step", number(-1.0)?, "whole number of 0 or more"),
        ("0.step", number(f32::NAN)?, "whole number of 0 or more"),
        ("0.step", number(1.5)?, "whole number of 0 or more"),
        ("0.step", Tensor::ones([2], DType::F32, device)?, "expected one number"),
        ("1.exp_avg", Tensor::ones([7], DType::I32, device)?, "1.exp_avg"),
        ("1.exp_avg", Tensor::ones([6], DType::F32, device)?, "1.exp_avg"),
    ];
    for (name, tensor, what) in wrong {
        let mut state = good.clone();
        state.insert(name.into(), tensor);
        let mut second = Adam::new(all.clone(), 0.02);
        let error = expect_error(second.load_state_dict(&state), name)?;
        ensure!(error.contains(what), "{name}: {error}");
        ensure!(second.state_dict()?.is_empty(), "{name}: a refused state is there");
    }
    let mut average = AveragedModel::swa(&all)?;
    let state = average.state_dict()?;
    for bad in [-1i64, i64::MIN] {
        let mut state = state.clone();
        state.insert("n_averaged".into(), Tensor::from_slice(&[bad], (), device)?);
        let error = expect_error(average.load_state_dict(&state), "n_averaged")?;
        ensure!(error.contains("n_averaged"), "{error}");
    }
    Ok(())
}

/// A step that ran out of memory at any allocation, and is repeated, equals an uninterrupted step.
fn steps_that_fail_at_any_request_can_be_repeated(device: &Device) -> Result<()> {
    let device = with_own_pool(device);
    // Optimiser, previous steps, skippable on the device, state on the host. Composed optimisers first.
    let runs = [
        ("adafactor", 0, false, false),
        ("adafactor", 1, true, false),
        ("lamb", 1, false, true),
        ("muon", 0, false, false),
        ("rmsprop", 0, false, false),
        ("adamw groups", 1, true, false),
        ("sgd groups", 1, false, true),
    ];
    for (name, before, skips, away) in runs {
        let (_, make) = ALL.iter().find(|(n, _)| *n == name).context("no such optimiser")?;
        let start = || -> Result<(Vec<Tensor>, Box<dyn Optimizer>)> {
            let all = initial_parameters(&device)?;
            let mut optimizer = make(all.clone())?;
            optimizer.offload_state(away);
            for t in 1..=before {
                set_gradients(&all, &*optimizer, t)?;
                optimizer.step()?;
            }
            set_gradients(&all, &*optimizer, 7)?;
            Ok((all, optimizer))
        };
        let flag = Tensor::zeros((), DType::F32, &device)?;
        let step = |optimizer: &mut dyn Optimizer| {
            clip_grad_norm_(optimizer.parameters(), 1e6)?;
            if skips { optimizer.step_unless(&flag) } else { optimizer.step() }
        };
        let (exact, mut optimizer) = start()?;
        let first = device.pool().request_count();
        step(&mut *optimizer)?;
        let count = device.pool().request_count() - first;
        let state =
            |optimizer: &dyn Optimizer| bits(&optimizer.state_dict()?.into_values().collect::<Vec<_>>());
        let (expected, expected_state) = (bits(&exact)?, state(&*optimizer)?);
        for n in 1..=count {
            let at = || format!("{name}, request {n} of {count} after {before} steps, {skips}, {away}");
            let (all, mut optimizer) = start()?;
            let values = bits(&all)?;
            device.pool().fail_request(n);
            let failed = step(&mut *optimizer);
            device.pool().fail_request(0);
            match failed {
                Ok(()) => {}
                Err(error) => {
                    ensure!(error.is_out_of_memory(), "{}: {error}", at());
                    ensure!(bits(&all)? == values, "{}: it failed, and parameters changed", at());
                    step(&mut *optimizer).with_context(at)?;
                }
            }
            ensure!(bits(&all)? == expected, "{}: parameters differ", at());
            ensure!(state(&*optimizer)? == expected_state, "{}: states differ", at());
        }
    }
    Ok(())
}

fn averages_survive_a_failure_at_every_request(device: &Device) -> Result<()> {
    let device = with_own_pool(device);
    type AveragedModelCall = fn(&mut AveragedModel, &Vec<Tensor>) -> forebay::error::Result<()>;
    let uses: [(&str, AveragedModelCall); 3] = [
        ("update", |a, m| a.update_parameters(m)),
        ("swap", |a, m| a.swap_parameters(m)),
        ("copy_to", |a, m| a.copy_to(m)),
    ];
    for (name, run) in uses {
        let start = || -> Result<(Vec<Tensor>, AveragedModel)> {
            // One parameter that does not fill vec4s, and one of another type.
            let mut model = initial_parameters(&device)?;
            model.push(model[1].detach().to_dtype(DType::BF16)?.to_leaf()?);
            let mut average = AveragedModel::ema(&model, 0.75)?;
            for p in &model {
                p.detach().copy_(&p.detach().mul(0.5)?)?;
            }
            average.update_parameters(&model)?;
            Ok((model, average))
        };
        let (model, mut average) = start()?;
        let first = device.pool().request_count();
        run(&mut average, &model)?;
        let count = device.pool().request_count() - first;
        let both = |model: &[Tensor], average: &AveragedModel| -> Result<Vec<Vec<u64>>> {
            let averages = average.state_dict()?.into_values();
            bits(&model.iter().cloned().chain(averages).collect::<Vec<_>>())
        };
        let expected = both(&model, &average)?;
        for n in 1..=count {
            let (model, mut average) = start()?;
            let before = both(&model, &average)?;
            device.pool().fail_request(n);
            let failed = run(&mut average, &model);
            device.pool().fail_request(0);
            if let Err(error) = failed {
                ensure!(error.is_out_of_memory(), "{name}: {error}");
                ensure!(
                    both(&model, &average)? == before,
                    "{name}, request {n} of {count}: it changed something"
                );
                run(&mut average, &model)?;
            }
            ensure!(both(&model, &average)? == expected, "{name}, request {n} of {count}: it differs");
        }
    }
    Ok(())
}

//! Training with parameters on two devices: optimisers, clipping, loss scaling and averages equal those of one device.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{Linear, Module};
use forebay::optim::{
    Adam, AdamW, AveragedModel, ClipGradNormOptions, GradScaler, Optimizer, Sgd, clip_grad_norm_with,
    clip_grad_value_,
};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_equal};
use super::optim::{ALL, initial_parameters, set_gradients};
use super::two_devices::{Pair, pairs};
use super::{skip, tests};

tests![
    every_optimiser_steps_on_each_device,
    one_flag_skips_the_step_of_every_device,
    offloaded_states_stay_on_their_devices,
    gradients_are_clipped_by_their_common_norm,
    an_infinity_on_one_device_skips_the_step_of_all,
    a_pipeline_trains_like_one_device,
];

/// Returns the parameters of the optimisers' tests, every second one on the other device.
fn alternate_parameters(device: &Device, second: &Device) -> Result<Vec<Tensor>> {
    let (here, there) = (initial_parameters(device)?, initial_parameters(second)?);
    Ok(here.into_iter().zip(there).enumerate().map(|(k, (a, b))| if k % 2 == 0 { a } else { b }).collect())
}

fn values(all: &[Tensor]) -> Result<Vec<f64>> {
    let read: Vec<Vec<f64>> = all.iter().map(|t| t.detach().to_f64s()).collect::<CoreResult<_>>()?;
    Ok(read.concat())
}

fn every_optimiser_steps_on_each_device(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        for (rule, make) in ALL {
            let run = |second: &Device| -> Result<Vec<f64>> {
                let all = alternate_parameters(device, second)?;
                let mut optimizer = make(all.clone())?;
                for t in 1..=3 {
                    set_gradients(&all, &*optimizer, t)?;
                    optimizer.step()?;
                }
                // The states are on the devices of their parameters, and return to them.
                let state = optimizer.state_dict()?;
                let mut restored = make(all.clone())?;
                restored.load_state_dict(&state)?;
                set_gradients(&all, &*restored, 4)?;
                restored.step()?;
                values(&all)
            };
            ensure_equal(&run(&second)?, &run(device)?).with_context(|| format!("{name}: {rule}"))?;
        }
    }
    Ok(())
}

fn one_flag_skips_the_step_of_every_device(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        for (rule, make) in
            ALL.iter().filter(|(rule, _)| ["adam", "sgd groups", "adafactor", "lamb"].contains(rule))
        {
            let run = |second: &Device, flag_on: &Device| -> Result<Vec<f64>> {
                let all = alternate_parameters(device, second)?;
                let mut optimizer = make(all.clone())?;
                for (t, skips) in [0.0, 1.0, 0.0].into_iter().enumerate() {
                    set_gradients(&all, &*optimizer, t + 1)?;
                    let before = values(&all)?;
                    optimizer.step_unless(&Tensor::full((), skips, DType::F32, flag_on)?)?;
                    ensure!((values(&all)? == before) == (skips == 1.0), "step {t}");
                }
                values(&all)
            };
            let expected = run(device, device)?;
            for flag_on in [device, &second] {
                ensure_equal(&run(&second, flag_on)?, &expected)
                    .with_context(|| format!("{name}: {rule}, the flag on {flag_on}"))?;
            }
        }
    }
    Ok(())
}

fn offloaded_states_stay_on_their_devices(device: &Device) -> Result<()> {
    if !device.backend().supports_pinned_host() {
        return skip("the device reaches no memory of the host");
    }
    for Pair { name, second } in pairs(device)? {
        let run = |second: &Device, offloads: bool| -> Result<Vec<f64>> {
            let all = alternate_parameters(device, second)?;
            let mut optimizer = Adam::new(all.clone(), 0.02);
            optimizer.offload_state(offloads);
            for t in 1..=3 {
                set_gradients(&all, &optimizer, t)?;
                optimizer.step()?;
            }
            values(&all)
        };
        ensure_equal(&run(&second, true)?, &run(device, false)?).context(name)?;
    }
    Ok(())
}

fn gradients_are_clipped_by_their_common_norm(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        for norm_type in [1.0, 2.0, 3.5, f64::INFINITY] {
            let run = |second: &Device| -> Result<Vec<f64>> {
                let all = alternate_parameters(device, second)?;
                set_gradients(&all, &Sgd::new(all.clone(), 0.1), 1)?;
                let options = ClipGradNormOptions { norm_type, error_if_nonfinite: true };
                let norm = clip_grad_norm_with(&all, 0.5, &options)?;
                ensure!(norm.device() == device, "the norm is on {}", norm.device());
                let grads: Vec<Tensor> = all.iter().filter_map(Tensor::grad).collect();
                Ok([values(&grads)?, vec![norm.item()?]].concat())
            };
            ensure_close(&run(&second)?, &run(device)?, 1e-5, 1e-7)
                .with_context(|| format!("{name}: order {norm_type}"))?;
        }
        // Only the second device has gradients.
        let all = alternate_parameters(device, &second)?;
        all[1].set_grad(Some(Tensor::full(all[1].shape(), 2.0, DType::F32, &second)?));
        let norm = clip_grad_norm_with(&all, 1.0, &ClipGradNormOptions::default())?.item()?;
        ensure_close(&[norm], &[2.0 * 7f64.sqrt()], 1e-6, 0.0).context(name)?;
        ensure_close(
            &values(&[all[1].grad().context("the clipped gradient is missing")?])?,
            &[1.0 / 7f64.sqrt(); 7],
            1e-5,
            0.0,
        )?;
        clip_grad_value_(&all, 0.25)?;
        ensure_equal(&values(&[all[1].grad().context("the clipped gradient is missing")?])?, &[0.25; 7])
            .context(name)?;
    }
    Ok(())
}

fn an_infinity_on_one_device_skips_the_step_of_all(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let run = |second: &Device, scale_on: &Device| -> Result<Vec<f64>> {
            let all = alternate_parameters(device, second)?;
            let mut optimizer = AdamW::new(all.clone(), 0.02);
            let mut scaler = GradScaler::new().init_scale(8.0).growth_interval(2);
            scaler.scale(&Tensor::ones((), DType::F32, scale_on)?)?;
            let mut found = Vec::new();
            // The parameter whose gradient is infinite in each step, if any: one of each device.
            for (t, infinite) in [None, Some(1), Some(0), None, None].into_iter().enumerate() {
                set_gradients(&all, &optimizer, t + 1)?;
                if let Some(k) = infinite {
                    let grad = Tensor::full(all[k].shape(), f64::INFINITY, DType::F32, all[k].device())?;
                    all[k].set_grad(Some(grad));
                }
                let before = values(&all)?;
                scaler.step(&mut optimizer)?;
                scaler.update()?;
                let after = values(&all)?;
                ensure!((after == before) == infinite.is_some(), "step {t}");
                found.extend(after);
                found.push(scaler.get_scale()?);
            }
            // A loss of the other device gets the scale, too.
            let losses = [Tensor::ones((), DType::F32, device)?, Tensor::ones((), DType::F32, second)?];
            for loss in &losses {
                found.push(scaler.scale(loss)?.item()?);
            }
            Ok(found)
        };
        let expected = run(device, device)?;
        for scale_on in [device, &second] {
            ensure_equal(&run(&second, scale_on)?, &expected)
                .with_context(|| format!("{name}, the scale on {scale_on}"))?;
        }
    }
    Ok(())
}

/// Network of two halves, each on its own device.
type Pipeline = (Linear, Linear);

fn pipeline(device: &Device, second: &Device) -> Result<Pipeline> {
    // Built on one device, so that both arrangements begin with the same values.
    device.manual_seed(11);
    let initial = (Linear::new(6, 16, device)?, Linear::new(16, 3, device)?);
    let made = (Linear::new(6, 16, device)?, Linear::new(16, 3, second)?);
    made.load_state_dict(&initial.state_dict())?;
    Ok(made)
}

fn a_pipeline_trains_like_one_device(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let run = |second: &Device| -> Result<Vec<f64>> {
            let net = pipeline(device, second)?;
            ensure!(net.1.weight.device() == second, "the second half is on {}", net.1.weight.device());
            device.manual_seed(12);
            let x = Tensor::randn([12, 6], DType::F32, device)?;
            let classes = Tensor::from_slice(&[0i64, 1, 2, 2, 1, 0, 1, 0, 2, 0, 2, 1], [12], second)?;
            let mut optimizer = AdamW::new(net.parameters(), 1e-2);
            let mut averages = AveragedModel::ema(&net, 0.9)?;
            let mut found = Vec::new();
            for _ in 0..6 {
                let hidden = net.0.forward(&x)?.gelu()?.to_device(second)?;
                let loss = net.1.forward(&hidden)?.cross_entropy(&classes)?;
                loss.backward()?;
                clip_grad_norm_with(optimizer.parameters(), 0.5, &ClipGradNormOptions::default())?;
                optimizer.step()?;
                optimizer.zero_grad();
                averages.update_parameters(&net)?;
                found.push(loss.item()?);
            }
            ensure!(found[5] < found[0], "the loss does not fall: {found:?}");
            averages.copy_to(&net)?;
            found.extend(values(&net.parameters())?);
            Ok(found)
        };
        ensure_close(&run(&second)?, &run(device)?, 1e-4, 1e-6).context(name)?;
    }
    Ok(())
}

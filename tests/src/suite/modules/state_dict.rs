//! Weights by name: partial, shared, renamed, of other types, parametrised, averaged.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::nn::{
    AdaptiveLogSoftmaxWithLoss, BatchNorm1d, BatchNorm2d, Conv2d, ConvOptions, Embedding,
    FractionalMaxPool2d, FractionalSize, GroupNorm, LayerNorm, Linear, Module, RmsNorm, Sequential,
    SpectralNorm, WeightNorm, init, rename_keys,
};
use forebay::optim::AveragedModel;
use forebay::tensor::Tensor;

use super::super::host_reference::ensure_close;
use super::randn;

/// Embedding shared with the output layer, and a norm with statistics.
#[derive(Module)]
struct Tied {
    words: Embedding,
    norm: BatchNorm1d,
    scores: Linear,
}

/// Linear layer within another module.
#[derive(Module)]
struct Wrapped {
    net: Linear,
}

impl Tied {
    fn new(device: &Device) -> Result<Self> {
        let words = Embedding::new(7, 4, device)?;
        let scores = Linear::from_parameters(words.weight.clone(), None)?;
        Ok(Self { words, norm: BatchNorm1d::new(4, device)?, scores })
    }
}

fn ensure_message<T>(result: forebay::error::Result<T>, part: &str) -> Result<()> {
    let text = result.err().map(|e| e.message()).unwrap_or_default();
    ensure!(text.contains(part), "`{text}` has no `{part}`");
    Ok(())
}

/// Missing, unexpected, shared and renamed entries; other types.
pub(super) fn weights_load_by_name(device: &Device) -> Result<()> {
    let (from, to) = (Tied::new(device)?, Tied::new(device)?);
    let mut state: BTreeMap<String, Tensor> = BTreeMap::new();
    for (name, t) in from.state_dict() {
        // The file has one of the tied names, 16-bit values, and no `num_batches_tracked`, as in old files.
        if name != "scores.weight" && name != "norm.num_batches_tracked" {
            state.insert(name, t.to_dtype(DType::BF16)?);
        }
    }
    to.load_state_dict(&state)?;
    let expected = state["words.weight"].to_f64s()?;
    ensure!(
        to.scores.weight.to_f64s()? == expected && to.words.weight.to_f64s()? == expected,
        "a shared table"
    );

    let before = to.words.weight.to_f64s()?;
    let mut other = from.state_dict();
    // PyTorch counts in i64.
    other.insert("norm.num_batches_tracked".into(), Tensor::from_slice(&[7i64], (), device)?);
    to.load_state_dict(&other)?;
    ensure!(to.state_dict()["norm.num_batches_tracked"].to_f64s()? == [7.0], "the count of batches");
    to.load_state_dict(&state)?;
    let mut wrong = other.clone();
    wrong.insert("norm.weight".into(), randn(&[5], device)?);
    wrong.insert("head.bias".into(), randn(&[5], device)?);
    wrong.remove("norm.bias");
    let whole = to.load_state_dict(&wrong);
    ensure_message(
        whole,
        "missing: norm.bias; unexpected: head.bias; does not fit: norm.weight is f32 [4], the state has f32 [5]",
    )?;
    ensure_message(
        to.load_state_dict_partial(&wrong),
        "does not fit: norm.weight is f32 [4], the state has f32 [5]",
    )?;
    ensure!(to.words.weight.to_f64s()? == before, "a state that does not fit changed something");
    wrong.remove("norm.weight");
    let keys = to.load_state_dict_partial(&wrong)?;
    ensure!(keys.missing == ["norm.weight", "norm.bias"] && keys.unexpected == ["head.bias"], "{keys}");
    ensure!(to.words.weight.to_f64s()? == from.words.weight.to_f64s()?, "the rest was not loaded");

    let wrapped: BTreeMap<String, Tensor> =
        other.iter().map(|(name, t)| (format!("module.{name}"), t.clone())).collect();
    ensure_message(to.load_state_dict(&wrapped), "unexpected: module.norm.bias")?;
    let advice = "the state has the names after `module.`: load `rename_keys(&state, |name| name.strip_prefix(\"module.\")";
    ensure_message(to.load_state_dict(&wrapped), advice)?;
    // One name of a tied tensor is enough, and so is a state that lacks a counter of batches.
    let tied: BTreeMap<String, Tensor> =
        state.iter().map(|(name, t)| (format!("module.{name}"), t.clone())).collect();
    ensure_message(to.load_state_dict(&tied), advice)?;
    // Both copies of a state with averaged weights.
    let mut averaged = wrapped.clone();
    averaged.extend(other.iter().map(|(name, t)| (format!("ema.{name}"), t.clone())));
    ensure_message(
        to.load_state_dict(&averaged),
        "the state has the names after `ema.` and after `module.`: load ",
    )?;
    // Removal of the prefix would leave out the names without it.
    let mut mixed = other.clone();
    for name in ["norm.weight", "norm.bias"] {
        let tensor = mixed.remove(name).context(name)?;
        mixed.insert(format!("model.{name}"), tensor);
    }
    ensure_message(to.load_state_dict(&mixed), "rename or leave out tensors with `rename_keys`")?;
    // A part of the model, with names that begin after that of the part.
    let part: BTreeMap<String, Tensor> = [("weight", &other["norm.weight"]), ("bias", &other["norm.bias"])]
        .map(|(name, t)| (name.to_owned(), t.clone()))
        .into();
    ensure_message(to.load_state_dict(&part), "rename or leave out tensors with `rename_keys`")?;
    let net = Wrapped { net: Linear::new(4, 3, device)? };
    let linear = Linear::new(4, 3, device)?.state_dict();
    ensure_message(
        net.load_state_dict(&linear),
        "the state has the names without `net.`: load `rename_keys(&state, |name| Some(format!(\"net.{name}\")))?`",
    )?;
    net.load_state_dict(&rename_keys(&linear, |name| Some(format!("net.{name}")))?)?;
    // Matrices as [inputs, outputs], as other frameworks have them.
    let mut turned = net.state_dict();
    turned.insert("net.weight".into(), randn(&[4, 3], device)?);
    ensure_message(
        net.load_state_dict(&turned),
        "the state's matrices are transposed: replace each by its `t()`",
    )?;
    turned.insert("net.bias".into(), randn(&[4], device)?);
    ensure_message(net.load_state_dict(&turned), "rename or leave out tensors with `rename_keys`")?;
    let mut fewer = wrapped.clone();
    fewer.remove("module.norm.bias");
    ensure_message(to.load_state_dict(&fewer), "rename or leave out tensors with `rename_keys`")?;
    to.load_state_dict(&rename_keys(&wrapped, |name| Some(name.strip_prefix("module.")?.to_owned()))?)?;
    ensure_message(rename_keys(&wrapped, |_| Some("x".into())), "both become `x`")
}

/// Files of the older `weight_norm`, and removal of the parametrisation.
pub(super) fn parametrized_weights(device: &Device) -> Result<()> {
    let make = || -> Result<_> {
        Ok(WeightNorm::new(Conv2d::new(3, 4, [2; 2], ConvOptions::default(), device)?, Some(0))?)
    };
    let x = randn(&[2, 3, 5, 4], device)?;
    let plain = Conv2d::new(3, 4, [2; 2], ConvOptions::default(), device)?;
    let expected = plain.forward(&x)?.to_f64s()?;
    let layer = WeightNorm::new(plain, Some(0))?;
    // Direction and length reproduce the weight, and removal keeps it.
    ensure_close(&layer.forward(&x)?.to_f64s()?, &expected, 1e-5, 1e-5)?;
    let (g, v) = (randn(&[4, 1, 1, 1], device)?, randn(&[4, 3, 2, 2], device)?);
    let old = BTreeMap::from([
        ("weight_g".to_owned(), g.clone()),
        ("weight_v".to_owned(), v.clone()),
        ("bias".to_owned(), randn(&[4], device)?),
    ]);
    let new = rename_keys(&old, |name| {
        let new = match name {
            "weight_g" => "parametrizations.weight.original0",
            "weight_v" => "parametrizations.weight.original1",
            other => other,
        };
        Some(new.to_owned())
    })?;
    let layer = make()?;
    layer.load_state_dict(&new)?;
    let expected = layer.forward(&x)?.to_f64s()?;
    let folded = layer.remove_parametrization()?;
    ensure!(
        folded.parameters().len() == 2 && folded.state_dict().contains_key("weight"),
        "not a plain layer"
    );
    ensure_close(&folded.forward(&x)?.to_f64s()?, &expected, 1e-6, 1e-6)?;
    let lengths = folded.weight.norm(2.0, [1, 2, 3], false)?.to_f64s()?;
    ensure_close(&lengths, &g.abs()?.to_f64s()?, 1e-5, 1e-6)?;

    let layer = SpectralNorm::new(Linear::new(6, 5, device)?)?.n_power_iterations(60);
    layer.forward(&randn(&[2, 6], device)?)?.sum_all()?.backward()?;
    ensure!(layer.parameters().iter().all(|p| p.grad().is_some()), "no gradient through a spectral norm");
    let values = layer.remove_parametrization()?.weight.detach().svdvals()?.to_f64s()?;
    ensure_close(&values[..1], &[1.0], 1e-4, 0.0)?;
    ensure_message(WeightNorm::new(Linear::new(2, 2, device)?, Some(2)), "no dimension 2")
}

/// Equal and exponential averages compared with the host; exchanged with the model and back.
pub(super) fn averages_of_models(device: &Device) -> Result<()> {
    for decay in [None, Some(0.75)] {
        for use_buffers in [false, true] {
            let net = Tied::new(device)?;
            let average = match decay {
                Some(decay) => AveragedModel::ema(&net, decay)?,
                None => AveragedModel::swa(&net)?,
            };
            let mut average = average.use_buffers(use_buffers);
            let mut expected: BTreeMap<String, Vec<f64>> = BTreeMap::new();
            for k in 0..4 {
                let state = net.state_dict();
                for t in state.values().filter(|t| t.dtype().is_float()) {
                    t.copy_(&randn(t.shape(), device)?)?;
                }
                state["norm.num_batches_tracked"].fill_(k)?;
                average.update_parameters(&net)?;
                for (name, t) in state {
                    let now = t.to_f64s()?;
                    let mean = expected.entry(name.clone()).or_insert_with(|| now.clone());
                    let weight = match decay {
                        _ if k == 0 || name.contains("num_") || name.contains("running") && !use_buffers => {
                            1.0
                        }
                        Some(decay) => 1.0 - decay,
                        None => 1.0 / (k + 1) as f64,
                    };
                    mean.iter_mut().zip(now).for_each(|(mean, now)| *mean += (now - *mean) * weight);
                }
            }
            let last: BTreeMap<_, _> =
                net.state_dict().into_iter().map(|(n, t)| Ok((n, t.to_bytes()?))).collect::<Result<_>>()?;
            average.swap_parameters(&net)?;
            for (name, t) in net.state_dict() {
                ensure_close(&t.to_f64s()?, &expected[&name], 1e-5, 1e-6)?;
            }
            let state = average.state_dict()?;
            ensure!(state["n_averaged"].to_f64s()? == [4.0] && state.contains_key("module.scores.weight"));
            average.swap_parameters(&net)?;
            for (name, t) in net.state_dict() {
                ensure!(t.to_bytes()? == last[&name], "{name} is another after two exchanges");
            }
            let mut again = AveragedModel::swa(&net)?;
            again.load_state_dict(&average.state_dict()?)?;
            again.copy_to(&net)?;
            ensure_close(&net.words.weight.to_f64s()?, &expected["words.weight"], 1e-5, 1e-6)?;
            ensure!(again.n_averaged() == 4);
        }
    }
    let net = Linear::new(3, 2, device)?;
    let mut average = AveragedModel::swa(&net)?;
    ensure_message(
        average.update_parameters(&Linear::new(4, 2, device)?),
        "`weight` of [2, 4] is not in the model that is averaged",
    )?;
    ensure_message(average.load_state_dict(&net.state_dict()), "takes a state with `n_averaged`")?;
    ensure_message(AveragedModel::ema(&net, 1.5), "takes a decay between 0 and 1")?;
    ensure_message(device.capture(|| average.update_parameters(&net)), "call it after the step")
}

/// Fractional max pooling, sizes that do not fit, class indices out of range, layers by name.
pub(super) fn containers_of_modules(device: &Device) -> Result<()> {
    let x = randn(&[2, 3, 9, 8], device)?;
    let pool = FractionalMaxPool2d { kernel_size: [3, 2], output_size: FractionalSize::OutputSize([4, 5]) };
    let (out, indices) = pool.forward_with_indices(&x, None)?;
    let at = x.flatten(2, -1)?.gather(2, &indices.flatten(2, -1)?)?.reshape([2, 3, 4, 5])?;
    ensure!(out.to_bytes()? == at.to_bytes()?, "maxima are not at their indices");
    // The last window ends at the border.
    let last = x.narrow(2, 6, 3)?.narrow(3, 6, 2)?.amax([2, 3], false)?;
    ensure!(
        out.select(3, 4)?.select(2, 3)?.to_bytes()? == last.to_bytes()?,
        "the last window is not at the end"
    );
    ensure_message(x.fractional_max_pool2d([3; 2], [8; 2], None), "have no room")?;
    ensure_message(
        x.fractional_max_pool2d([3; 2], [4; 2], Some(&randn(&[2, 3], device)?)),
        "samples are [batch, channels, 2]",
    )?;
    ensure_message(x.max_unpool2d(&randn(&[2, 3, 9, 8], device)?, [18, 16]), "indices are integers")?;

    // Samples are one-hot vectors with the expected frequencies, and have gradients.
    let logits = Tensor::from_slice(&[0.2f32.ln(), 0.8f32.ln()], [1, 2], device)?.to_leaf()?;
    let drawn = logits.expand([4000, 2])?.gumbel_softmax(0.5, true, -1)?;
    let often = drawn.detach().mean([0], false)?.to_f64s()?;
    ensure_close(&often, &[0.2, 0.8], 0.0, 0.035)?;
    ensure_close(&drawn.detach().amax([1], false)?.to_f64s()?, &[1.0; 4000], 1e-6, 0.0)?;
    drawn.select(1, 1)?.sum_all()?.backward()?;
    ensure!(
        logits.grad().is_some_and(|g| g.to_f64s().is_ok_and(|g| g[1] > 0.0 && g[0] < 0.0)),
        "no gradient"
    );
    ensure_message(logits.gumbel_softmax(0.0, false, -1), "a temperature above 0")?;
    let grid = randn(&[2, 3, 3, 3], device)?;
    let says_grid = "a grid of [batch, height, width, 2]";
    ensure_message(x.grid_sample(&grid, &Default::default()), says_grid)?;

    let softmax = AdaptiveLogSoftmaxWithLoss::new(6, 10, &[3, 7], 2.0, false, device)?;
    let (rows, target) = (randn(&[2, 6], device)?, Tensor::from_slice(&[1i64, 10], [2], device)?);
    ensure_message(softmax.forward(&rows, &target), "below the 10 classes; some are not")?;
    ensure_message(AdaptiveLogSoftmaxWithLoss::new(6, 10, &[7, 3], 2.0, false, device), "cutoffs rise")?;
    let total = softmax.log_prob(&rows)?.exp()?.sum([1], false)?.to_f64s()?;
    ensure_close(&total, &[1.0, 1.0], 1e-5, 0.0)?;

    let options = ConvOptions { stride: [2; 2], same_padding: true, ..ConvOptions::default() };
    ensure_message(Conv2d::new(3, 2, [3; 2], options, device)?.forward(&x), "a stride of 1")?;
    let net = Sequential::new()
        .add_named("first", Linear::new(8, 4, device)?)
        .add_fn(Tensor::relu)
        .add(Linear::new(4, 2, device)?);
    let names: Vec<String> = net.named_parameters().into_iter().map(|(name, _)| name).collect();
    ensure!(names == ["first.weight", "first.bias", "2.weight", "2.bias"], "{names:?}");
    ensure!(net.forward(&x)?.shape() == [2, 3, 9, 2]);
    Ok(())
}

/// Evaluation with 16-bit parameters, compared with f32.
pub(super) fn layers_in_16_bits(device: &Device) -> Result<()> {
    let make = || -> Result<Sequential> {
        let options = ConvOptions { padding: [1; 2], ..ConvOptions::default() };
        Ok(Sequential::new()
            .add(Conv2d::new(3, 8, [3; 2], options, device)?)
            .add(BatchNorm2d::new(8, device)?)
            .add(GroupNorm::new(2, 8, device)?)
            .add_fn(|x| x.gelu()?.flatten(2, -1)?.transpose(1, 2))
            .add(LayerNorm::new([8], device)?)
            .add(Linear::new(8, 6, device)?)
            .add(RmsNorm::new([6], device)?))
    };
    let wide = make()?;
    let x = randn(&[2, 3, 5, 4], device)?;
    wide.eval();
    let expected = wide.forward(&x)?;
    for dtype in [DType::BF16, DType::F16] {
        let low = {
            let _dtype = init::default_dtype(dtype)?;
            make()?
        };
        low.load_state_dict(&wide.state_dict())?;
        low.eval();
        ensure!(low.parameters().iter().all(|p| p.dtype() == dtype), "not all parameters are {dtype}");
        let got = low.forward(&x.to_dtype(dtype)?)?;
        ensure!(got.dtype() == dtype, "{dtype} became {}", got.dtype());
        // A few roundings to 8 bits.
        ensure_close(&got.to_f64s()?, &expected.to_f64s()?, 0.0, 0.08)?;
    }
    ensure!(make()?.parameters()[0].dtype() == DType::F32, "the type outlives its guard");
    ensure_message(init::default_dtype(DType::I32), "parameters are f32, f16, bf16 or f64")
}

//! GPT-2: its weight files, and its logits compared with a model of plain operations.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::io::safetensors;
use forebay::nn::{Gpt, GptOptions, Module};
use forebay::plan::StepConfig;
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_close, ensure_same_bits};
use super::tests;
use super::train_resume::TempFile;

tests![
    weights_of_gpt2_reproduce_its_logits,
    a_file_that_does_not_fit_is_refused,
    deferred_residual_sums_change_only_gradients_of_biases,
];

const SIZES: GptOptions =
    GptOptions { vocabulary: 11, context: 6, layers: 2, heads: 2, width: 8, dropout: 0.0 };

type StateDict = BTreeMap<String, Tensor>;

/// Returns weights in the layout of GPT-2's files: \[in, out\] matrices, with the optional mask and head.
fn file(device: &Device) -> Result<StateDict> {
    let mut rng = SplitMix64(5);
    let mut file = StateDict::new();
    let GptOptions { vocabulary, context, layers, width, .. } = SIZES;
    let mut put = |name: &str, shape: &[usize]| -> Result<()> {
        let n = shape.iter().product();
        let data: Vec<f32> = (0..n).map(|_| (rng.below(2001) as f32 - 1e3) / 2e3).collect();
        file.insert(format!("transformer.{name}"), Tensor::from_slice(&data, shape, device)?);
        Ok(())
    };
    put("wte.weight", &[vocabulary, width])?;
    // The file has more positions than the model uses.
    put("wpe.weight", &[context + 2, width])?;
    for (name, inputs, outputs) in [
        ("attn.c_attn", width, 3 * width),
        ("attn.c_proj", width, width),
        ("mlp.c_fc", width, 4 * width),
        ("mlp.c_proj", 4 * width, width),
    ] {
        for k in 0..layers {
            put(&format!("h.{k}.{name}.weight"), &[inputs, outputs])?;
            put(&format!("h.{k}.{name}.bias"), &[outputs])?;
        }
    }
    for norm in ["ln_f", "h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2"] {
        put(&format!("{norm}.weight"), &[width])?;
        put(&format!("{norm}.bias"), &[width])?;
    }
    put("h.0.attn.bias", &[1, 1, context, context])?;
    file.insert("lm_head.weight".into(), file["transformer.wte.weight"].clone());
    Ok(file)
}

/// Computes the logits of a file's model by plain operations.
fn scores(file: &StateDict, text: &Tensor) -> CoreResult<Tensor> {
    let get = |name: &str| &file[&format!("transformer.{name}")];
    let norm = |x: &Tensor, name: &str| {
        let centred = x.sub(&x.mean([-1], true)?)?;
        let std = centred.mul(&centred)?.mean([-1], true)?.add(1e-5)?.sqrt()?;
        centred.div(&std)?.mul(get(&format!("{name}.weight")))?.add(get(&format!("{name}.bias")))
    };
    let layer =
        |x: &Tensor, name: &str| x.matmul(get(&format!("{name}.weight")))?.add(get(&format!("{name}.bias")));
    let (length, heads) = (text.dim(1)?, SIZES.heads);
    let size = SIZES.width / heads;
    let mut x = get("wte.weight").embedding(text, None)?.add(&get("wpe.weight").narrow(0, 0, length)?)?;
    let later = Tensor::ones([length, length], DType::F32, text.device())?.triu(1)?.mul(-1e9)?;
    for k in 0..SIZES.layers {
        let all = layer(&norm(&x, &format!("h.{k}.ln_1"))?, &format!("h.{k}.attn.c_attn"))?;
        let mut seen = Vec::new();
        for head in 0..heads {
            let part = |at: usize| all.narrow(2, at * SIZES.width + head * size, size);
            let (q, k, v) = (part(0)?, part(1)?, part(2)?);
            let weights =
                q.matmul(&k.transpose(1, 2)?)?.div((size as f64).sqrt())?.add(&later)?.softmax(-1)?;
            seen.push(weights.matmul(&v)?);
        }
        let seen = forebay::ops::cat(&seen, 2)?;
        x = x.add(&layer(&seen, &format!("h.{k}.attn.c_proj"))?)?;
        let y = layer(&norm(&x, &format!("h.{k}.ln_2"))?, &format!("h.{k}.mlp.c_fc"))?;
        let cube = y.mul(&y)?.mul(&y)?.mul(0.044_715)?;
        let inner = y.add(&cube)?.mul((2.0 / std::f64::consts::PI).sqrt())?.tanh()?.add(1.0)?;
        x = x.add(&layer(&y.mul(&inner)?.mul(0.5)?, &format!("h.{k}.mlp.c_proj"))?)?;
    }
    norm(&x, "ln_f")?.matmul(&get("wte.weight").t()?)
}

fn weights_of_gpt2_reproduce_its_logits(device: &Device) -> Result<()> {
    let _no_grad = autograd::no_grad();
    let given = file(device)?;
    let saved = TempFile::new(device, "gpt2.safetensors");
    safetensors::save(&saved.0, &given, &BTreeMap::new())?;
    let read = safetensors::load(&saved.0, device)?;
    let sizes = GptOptions::from_gpt2_state_dict(&read)?;
    // The head count cannot be derived for so small heads.
    ensure!(sizes == GptOptions { heads: 1, context: 8, ..SIZES }, "{sizes:?}");
    let net = Gpt::new(&SIZES, device)?;
    net.load_gpt2(&read)?;
    let text = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 6], device)?;
    ensure_close(&net.forward(&text)?.to_f64s()?, &scores(&given, &text)?.to_f64s()?, 1e-5, 1e-5)?;

    // Saved weights equal loaded ones, without the non-parameters and the extra positions.
    let back = net.gpt2_state_dict()?;
    ensure!(back.len() == given.len() - 2, "{:?}", back.keys());
    for (name, tensor) in back.iter().filter(|(name, _)| *name != "wpe.weight") {
        let given = &given[&format!("transformer.{name}")];
        ensure!(tensor.shape() == given.shape(), "{name}: {:?}", tensor.shape());
        ensure!(tensor.to_bytes()? == given.to_bytes()?, "{name} came back changed");
    }
    Ok(())
}

fn a_file_that_does_not_fit_is_refused(device: &Device) -> Result<()> {
    let _no_grad = autograd::no_grad();
    let net = Gpt::new(&SIZES, device)?;
    let mut given = file(device)?;
    given.remove("transformer.ln_f.bias");
    let error = net.load_gpt2(&given).err().map(|e| e.to_string()).unwrap_or_default();
    ensure!(error.contains("missing: ln_f.bias"), "{error}");
    given.clear();
    let error = GptOptions::from_gpt2_state_dict(&given).err().map(|e| e.to_string()).unwrap_or_default();
    ensure!(error.contains("wte.weight"), "{error}");
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
    for (name, tensor, expected) in [
        ("transformer.wte.weight", Some(zeros(&[0, 12])?), "`wte.weight` has the shape [0, 12]"),
        ("transformer.wte.weight", Some(zeros(&[12])?), "`wte.weight` has the shape [12]"),
        ("transformer.wpe.weight", Some(zeros(&[8, 0])?), "`wpe.weight` has the shape [8, 0]"),
        ("transformer.wpe.weight", Some(zeros(&[8, 5])?), "`wpe.weight` 5; expected one width"),
        ("transformer.h.9.ln_1.weight", Some(zeros(&[12])?), " of 10 blocks"),
        ("transformer.h.0.ln_1.weight", None, " 1 of 2 blocks"),
    ] {
        let mut given = file(device)?;
        match tensor {
            Some(tensor) => given.insert(name.to_owned(), tensor),
            None => given.remove(name),
        };
        let error = GptOptions::from_gpt2_state_dict(&given).err().map(|e| e.to_string()).unwrap_or_default();
        ensure!(error.contains(expected), "{name}: {error}");
    }
    let mut given = file(device)?;
    given.insert("lm_head.weight".into(), given["transformer.wte.weight"].mul(2.0)?);
    let error = net.load_gpt2(&given).err().map(|e| e.to_string()).unwrap_or_default();
    ensure!(error.contains("shares them"), "{error}");
    Ok(())
}

/// Without recomputation, a block's last sum is fused into the next norm; recomputed segments prevent this fusion.
/// The fused norm's backward pass also sums columns for the biases' gradients, in f32 and in another order.
fn deferred_residual_sums_change_only_gradients_of_biases(device: &Device) -> Result<()> {
    let net = Gpt::new(&SIZES, device)?;
    let text = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 6], device)?;
    for low in [None, Some(DType::BF16)] {
        let mut seen: Vec<Vec<Tensor>> = Vec::new();
        for again in [None, Some(false), Some(true)] {
            let choice = again.map(|again| StepConfig::new(2, 1).with_recompute(vec![again; SIZES.layers]));
            let _segments = choice.as_ref().map(StepConfig::apply_segments);
            let loss = {
                let _autocast = low.map(autocast).transpose()?;
                net.loss(&text, &text)?
            };
            loss.backward()?;
            let parameters = net.parameters();
            let grads = parameters.iter().map(|p| p.grad().context("no gradient"));
            seen.push(grads.chain([Ok(loss.detach())]).collect::<Result<_>>()?);
            parameters.iter().for_each(|p| p.set_grad(None));
        }
        let names: Vec<String> = net.named_parameters().into_iter().map(|(name, _)| name).collect();
        let bound = if low.is_some() { 1e-2 } else { 1e-6 };
        for (way, first) in [(1, 0), (2, 0), (2, 1)] {
            for (k, (a, b)) in seen[way].iter().zip(&seen[first]).enumerate() {
                let what = || format!("{low:?}, ways {way} and {first}, {:?}", names.get(k));
                let own = first == 0 && names.get(k).is_some_and(|name| name.ends_with("c_proj.bias"));
                match own {
                    false => ensure_same_bits(a, b).with_context(what)?,
                    true => {
                        let apart = a.sub(b)?.abs()?.max_all()?.item()?;
                        let size = b.abs()?.max_all()?.item()?;
                        ensure!(apart <= bound * size, "{}: {apart} of {size}", what());
                    }
                }
            }
        }
    }
    Ok(())
}

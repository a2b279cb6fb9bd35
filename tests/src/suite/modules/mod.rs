//! Modules compared with PyTorch's: names and values of the state, results, gradients and changed buffers, in
//! training and evaluation mode.
//!
//! `benches/peers/modules.py` creates `tests/modules/modules.safetensors` and documents its names. A case has a name
//! in this file, a function that creates the module, and a function that calls it.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::io::safetensors::{self, Tensors};
use forebay::nn::{Gpt, GptOptions, Module, init as nn_init};
use forebay::tensor::Tensor;

use super::host_reference::ensure_close;
use super::{require_dtype, tests};

mod architectures;
mod attention;
mod init;
mod layers;
mod losses;
mod recurrent;
mod state_dict;

tests![
    attention_and_transformers,
    positional_embeddings,
    recurrent_layers,
    layers_with_weights,
    activations,
    losses_of_pytorch,
    pooling,
    rearranging_layers,
    sampling_of_images,
    models_of_images,
    models_of_images_and_sound,
    models_of_texts,
    models_of_sequences,
    every_recorded_case_is_run,
    initial_values,
    initial_values_by_name,
    dropout_masks_are_drawn,
    recurrent_layers_in_16_bits,
    long_sequences_and_wide_layers,
    rotary_embeddings_of_views,
    invalid_arguments_of_modules_are_refused,
    weights_load_by_name,
    parametrized_weights,
    averages_of_models,
    containers_of_modules,
    layers_in_16_bits,
    modules_in_f64,
    a_language_model_in_f64,
];

/// Results of PyTorch's modules.
const MODULE_DATA: &[u8] = include_bytes!("../../../modules/modules.safetensors");
/// Results of PyTorch's models.
const MODEL_DATA: &[u8] = include_bytes!("../../../modules/architectures.safetensors");

/// Test case on a device.
struct ModuleCase<'a> {
    device: &'a Device,
    /// Dtype of parameters and inputs.
    dtype: DType,
    data: &'a Tensors,
    name: &'static str,
}

/// Name of a case, and the function that checks it.
type CaseEntry = (&'static str, fn(&ModuleCase<'_>) -> Result<()>);

/// Defines cases: the name, the module's constructor, and a call with the case's inputs.
macro_rules! cases {
    ($($name:literal: |$device:pat_param| $make:expr, |$module:pat_param, $x:ident| $call:expr;)*) => {
        pub(in crate::suite::modules) const CASES: &[$crate::suite::modules::CaseEntry] = &[$(
            ($name, |case| case.check_module(|$device| $make, |$module, $x| $call)),
        )*];
    };
}
use cases;

fn single(out: CoreResult<Tensor>) -> CoreResult<Vec<Tensor>> {
    Ok(vec![out?])
}

impl ModuleCase<'_> {
    /// Returns a tensor that several cases share.
    fn shared_tensor(&self, name: &str) -> CoreResult<Tensor> {
        let found = self.data.get(name).cloned();
        found.ok_or_else(|| forebay::error::Error::argument("modules", format!("no `{name}` is recorded")))
    }

    /// Returns the tensors recorded under a prefix of the case, with the rest of their names.
    fn recorded_tensors(&self, under: &str) -> Vec<(&str, &Tensor)> {
        let prefix = format!("{}/{under}/", self.name);
        self.data.iter().filter_map(|(name, t)| Some((name.strip_prefix(&prefix)?, t))).collect()
    }

    /// Compares everything that is recorded for a case.
    fn check_module<M: Module>(
        &self,
        make: impl Fn(&ModuleCase<'_>) -> CoreResult<M>,
        call: impl Fn(&M, &[Tensor]) -> CoreResult<Vec<Tensor>>,
    ) -> Result<()> {
        let module = make(self)?;
        let state: Tensors =
            self.recorded_tensors("state").into_iter().map(|(n, t)| (n.to_owned(), t.clone())).collect();
        let mut modes = 0;
        for mode in ["train", "eval"] {
            let outs = self.recorded_tensors(&format!("{mode}/out"));
            if outs.is_empty() {
                continue;
            }
            modes += 1;
            // Missing or unexpected names are an error.
            module.load_state_dict(&state).context("the names of the state")?;
            module.zero_grad();
            module.train(mode == "train");
            let mut inputs: Vec<(usize, bool, Tensor)> = Vec::new();
            for (kind, wanted) in [("in", true), ("fixed", false)] {
                for (k, t) in self.recorded_tensors(kind) {
                    let t = t.detach().copy()?;
                    inputs.push((k.parse()?, wanted, if wanted { t.to_leaf()? } else { t }));
                }
            }
            inputs.sort_by_key(|(k, ..)| *k);
            let leaves: Vec<Tensor> = inputs.iter().map(|(.., t)| t.clone()).collect();
            let got = call(&module, &leaves)?;
            ensure!(got.len() == outs.len(), "{mode}: {} results, not {}", got.len(), outs.len());
            let mut loss: Option<Tensor> = None;
            for (k, t) in &outs {
                let at: usize = k.parse()?;
                ensure_same(&got[at], t).with_context(|| format!("{mode}: result {k}"))?;
                if got[at].requires_grad() {
                    let of: Vec<f32> =
                        (0..t.numel()).map(|i| (0.7 * i as f64 + at as f64).cos() as f32).collect();
                    let weights = Tensor::from_slice(&of, t.shape(), self.device)?;
                    let sum = got[at].mul(&weights)?.sum_all()?;
                    loss = Some(match loss {
                        Some(loss) => loss.add(&sum)?,
                        None => sum,
                    });
                }
            }
            if let Some(loss) = loss {
                loss.backward()?;
            }
            for (k, wanted, leaf) in &inputs {
                let recorded = self.data.get(&format!("{}/{mode}/grad/in/{k}", self.name));
                match (recorded, leaf.grad()) {
                    (Some(t), Some(grad)) => ensure_same(&grad, t),
                    (None, None) => Ok(()),
                    (Some(_), None) => bail!("{mode}: no gradient of input {k}, expected: {wanted}"),
                    (None, Some(_)) => bail!("{mode}: a gradient of input {k} that PyTorch has not"),
                }
                .with_context(|| format!("{mode}: gradient of input {k}"))?;
            }
            for (name, parameter) in module.named_parameters() {
                let recorded = self.data.get(&format!("{}/{mode}/grad/{name}", self.name));
                match (recorded, parameter.grad()) {
                    (Some(t), Some(grad)) => ensure_same(&grad, t),
                    (None, None) => Ok(()),
                    (Some(_), None) => bail!("{mode}: no gradient of `{name}`"),
                    (None, Some(_)) => bail!("{mode}: a gradient of `{name}` that PyTorch has not"),
                }
                .with_context(|| format!("{mode}: gradient of `{name}`"))?;
            }
            let after = module.state_dict();
            for (name, t) in self.recorded_tensors(&format!("{mode}/state")) {
                let own = after.get(name).with_context(|| format!("no buffer `{name}`"))?;
                ensure_same(own, t).with_context(|| format!("{mode}: buffer `{name}`"))?;
            }
        }
        ensure!(modes > 0, "no results are recorded");
        Ok(())
    }
}

/// Compares shapes and values, up to the order of sums.
fn ensure_same(got: &Tensor, expected: &Tensor) -> Result<()> {
    ensure!(got.shape() == expected.shape(), "{:?}, not {:?}", got.shape(), expected.shape());
    let expected = expected.to_f64s()?;
    let largest = expected.iter().filter(|v| v.is_finite()).fold(1f64, |a, b| a.max(b.abs()));
    ensure_close(&got.to_f64s()?, &expected, 1e-5, 1e-5 * largest)
}

fn load(bytes: &[u8], device: &Device) -> Result<Tensors> {
    Ok(safetensors::from_bytes(bytes, device)?.0)
}

/// Runs all cases of a table; failures are named.
fn run_module_cases(device: &Device, rows: &[CaseEntry]) -> Result<()> {
    run_cases(MODULE_DATA, device, DType::F32, rows)
}

/// Compares every module in f64 with the same results. PyTorch rounds them to f32.
fn modules_in_f64(device: &Device) -> Result<()> {
    require_dtype(device, DType::F64)?;
    run_cases(MODULE_DATA, device, DType::F64, &TABLES.concat())
}

/// Compares GPT's loss and gradients in f64 with those in f32.
fn a_language_model_in_f64(device: &Device) -> Result<()> {
    require_dtype(device, DType::F64)?;
    let options = GptOptions { vocabulary: 40, context: 8, layers: 2, heads: 2, width: 16, dropout: 0.0 };
    let texts = Tensor::arange(0.0, 18.0, 1.0, DType::I64, device)?.reshape([2, 9])?;
    let (text, next) = (texts.narrow(1, 0, 8)?, texts.narrow(1, 1, 8)?);
    let single = Gpt::new(&options, device)?;
    let wide = {
        let _dtype = nn_init::default_dtype(DType::F64)?;
        Gpt::new(&options, device)?
    };
    wide.load_state_dict(&single.state_dict())?;
    let train = |net: &Gpt| -> Result<Tensor> {
        let loss = net.loss(&text, &next)?;
        loss.backward()?;
        Ok(loss)
    };
    let (expected, got) = (train(&single)?, train(&wide)?);
    ensure!(got.dtype() == DType::F64, "the loss is {}", got.dtype());
    ensure_same(&got, &expected).context("the loss")?;
    for ((name, single), (_, wide)) in single.named_parameters().into_iter().zip(wide.named_parameters()) {
        let (expected, got) = (single.grad().context("a gradient")?, wide.grad().context("a gradient")?);
        ensure!(got.dtype() == DType::F64, "the gradient of `{name}` is {}", got.dtype());
        ensure_same(&got, &expected).with_context(|| format!("the gradient of `{name}`"))?;
    }
    Ok(())
}

/// Runs cases with parameters and inputs in a dtype.
fn run_cases(bytes: &[u8], device: &Device, dtype: DType, rows: &[CaseEntry]) -> Result<()> {
    let mut data = load(bytes, device)?;
    for t in data.values_mut().filter(|t| t.dtype().is_float()) {
        *t = t.to_dtype(dtype)?;
    }
    let _dtype = nn_init::default_dtype(dtype)?;
    let mut failed = Vec::new();
    for &(name, check) in rows {
        if let Err(error) = check(&ModuleCase { device, dtype, data: &data, name }) {
            failed.push(format!("{name}: {error:#}"));
        }
    }
    ensure!(failed.is_empty(), "{} of {} cases: {}", failed.len(), rows.len(), failed.join("; "));
    Ok(())
}

/// Tables, in the order of their tests.
const TABLES: [&[CaseEntry]; 9] = [
    attention::CASES,
    attention::positional_embeddings::CASES,
    recurrent::CASES,
    layers::weights::CASES,
    layers::activations::CASES,
    losses::CASES,
    layers::pooling::CASES,
    layers::rearranging::CASES,
    layers::sampling::CASES,
];

fn attention_and_transformers(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[0])
}

fn positional_embeddings(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[1])
}

fn recurrent_layers(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[2])
}

fn layers_with_weights(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[3])
}

fn activations(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[4])
}

fn losses_of_pytorch(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[5])
}

fn pooling(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[6])
}

fn rearranging_layers(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[7])
}

fn sampling_of_images(device: &Device) -> Result<()> {
    run_module_cases(device, TABLES[8])
}

/// Tables of models, in the order of their tests.
const MODEL_TABLES: [&[CaseEntry]; 4] = [
    architectures::vision::CASES,
    architectures::unet_gan_speech::CASES,
    architectures::language_models::CASES,
    architectures::sequence_models::CASES,
];

fn models_of_images(device: &Device) -> Result<()> {
    run_cases(MODEL_DATA, device, DType::F32, MODEL_TABLES[0])
}

fn models_of_images_and_sound(device: &Device) -> Result<()> {
    run_cases(MODEL_DATA, device, DType::F32, MODEL_TABLES[1])
}

fn models_of_texts(device: &Device) -> Result<()> {
    run_cases(MODEL_DATA, device, DType::F32, MODEL_TABLES[2])
}

fn models_of_sequences(device: &Device) -> Result<()> {
    run_cases(MODEL_DATA, device, DType::F32, MODEL_TABLES[3])
}

fn every_recorded_case_is_run(device: &Device) -> Result<()> {
    for (bytes, tables) in [(MODULE_DATA, &TABLES[..]), (MODEL_DATA, &MODEL_TABLES[..])] {
        let data = load(bytes, device)?;
        let recorded: BTreeSet<&str> =
            data.keys().filter_map(|name| name.split('/').next()).filter(|name| *name != "masks").collect();
        let run: BTreeSet<&str> = tables.iter().flat_map(|rows| rows.iter().map(|(name, _)| *name)).collect();
        let lost: Vec<_> = recorded.symmetric_difference(&run).collect();
        ensure!(lost.is_empty(), "recorded and not run, or run and not recorded: {lost:?}");
    }
    Ok(())
}

use attention::{invalid_arguments_of_modules_are_refused, rotary_embeddings_of_views};
use init::{dropout_masks_are_drawn, initial_values, initial_values_by_name};
use recurrent::{long_sequences_and_wide_layers, recurrent_layers_in_16_bits};
use state_dict::{
    averages_of_models, containers_of_modules, layers_in_16_bits, parametrized_weights, weights_load_by_name,
};

fn randn(shape: &[usize], device: &Device) -> Result<Tensor> {
    Ok(Tensor::randn(shape, DType::F32, device)?)
}

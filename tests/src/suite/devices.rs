//! Mixing tensors of two devices is an error that names both devices.

use std::slice::from_ref;

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions, once_differentiable};
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::func;
use forebay::ops::{AttentionOptions, BatchNormOptions, NormOptions, cat, stack};
use forebay::optim::{
    Adadelta, Adafactor, Adagrad, AdamW, GradScaler, Lamb, Lion, Muon, NAdam, Optimizer, RmsProp, Rprop, Sgd,
    clip_grad_norm_, clip_grad_value_,
};
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_values};
use super::tests;

tests![
    optimisers_refuse_mismatched_gradients,
    seeds_of_another_device_are_refused,
    gradients_of_another_device_are_refused,
    operations_refuse_operands_of_two_devices,
];

fn other() -> Device {
    Device::null(CardProfile::default())
}

/// Strips the context from an error.
fn innermost(error: Error) -> Error {
    match error {
        Error::Context { error, .. } => innermost(*error),
        error => error,
    }
}

fn is_of_devices<T>(result: CoreResult<T>, what: &str) -> Result<()> {
    match result.map_err(innermost) {
        Err(Error::Device { op, left, right, .. }) => {
            ensure!(left != right && !op.is_empty(), "{what}: {op}, {left}, {right}");
            Ok(())
        }
        Err(error) => anyhow::bail!("{what}: another error: {error}"),
        Ok(_) => anyhow::bail!("{what}: accepted"),
    }
}

type OptimizerCtor = fn(Vec<Tensor>) -> Box<dyn Optimizer>;

fn optimisers_refuse_mismatched_gradients(device: &Device) -> Result<()> {
    let null = other();
    let make: [OptimizerCtor; 11] = [
        |p| Box::new(Sgd::new(p, 0.1)),
        |p| Box::new(AdamW::new(p, 0.1)),
        |p| Box::new(Adadelta::new(p, 0.1)),
        |p| Box::new(Adafactor::new(p, 0.1)),
        |p| Box::new(Adagrad::new(p, 0.1)),
        |p| Box::new(Lamb::new(p, 0.1)),
        |p| Box::new(Lion::new(p, 0.1)),
        |p| Box::new(Muon::new(p, 0.1)),
        |p| Box::new(RmsProp::new(p, 0.1)),
        |p| Box::new(Rprop::new(p, 0.1)),
        |p| Box::new(NAdam::new(p, 0.1)),
    ];
    let bad = [
        Tensor::ones([2, 2], DType::F32, &null)?,
        Tensor::ones([2, 3], DType::F32, device)?,
        Tensor::ones([4], DType::F32, device)?,
        Tensor::ones([2, 2], DType::BF16, device)?,
    ];
    let parameters = || -> Result<Vec<Tensor>> {
        let make = |_| Tensor::ones([2, 2], DType::F32, device)?.to_leaf();
        let made: Vec<Tensor> = (0..2).map(make).collect::<CoreResult<_>>()?;
        made[0].set_grad(Some(Tensor::ones([2, 2], DType::F32, device)?));
        Ok(made)
    };
    let unchanged = |p: &[Tensor], what: &str| -> Result<()> {
        for t in p.iter().chain(&p[0].grad()) {
            ensure_values(&t.detach(), &[1.0; 4]).with_context(|| what.to_owned())?;
        }
        Ok(())
    };
    for (k, grad) in bad.iter().enumerate() {
        for (at, make) in make.iter().enumerate() {
            let p = parameters()?;
            p[1].set_grad(Some(grad.clone()));
            let what = format!("optimiser {at}, gradient {k}");
            let done = make(p.clone()).step();
            if k == 0 {
                is_of_devices(done, &what)?
            } else {
                ensure!(done.is_err(), "{what}: accepted")
            }
            unchanged(&p, &what)?;
        }
        let p = parameters()?;
        p[1].set_grad(Some(grad.clone()));
        let mut scaler = GradScaler::new();
        let opt = Sgd::new(p.clone(), 0.1);
        let all: [CoreResult<()>; 3] =
            [clip_grad_norm_(&p, 0.1).map(drop), clip_grad_value_(&p, 0.1), scaler.unscale_(&opt)];
        for (at, done) in all.into_iter().enumerate() {
            let what = format!("clip {at}, gradient {k}");
            if k == 0 {
                is_of_devices(done, &what)?
            } else {
                ensure!(done.is_err(), "{what}: accepted")
            }
            unchanged(&p, &what)?;
        }
    }
    Ok(())
}

fn seeds_of_another_device_are_refused(device: &Device) -> Result<()> {
    let null = other();
    let x = Tensor::ones([3], DType::F32, device)?.to_leaf()?;
    let y = x.exp()?;
    let seed = Tensor::ones([3], DType::F32, &null)?;
    let seeds = [seed.clone()];
    for create_graph in [false, true] {
        let options = GradOptions { grad_outputs: Some(&seeds), create_graph, ..GradOptions::default() };
        is_of_devices(autograd::grad(from_ref(&y), from_ref(&x), &options), "grad")?;
        is_of_devices(autograd::backward(from_ref(&y), &options), "backward")?;
    }
    is_of_devices(y.backward_with(&seed), "backward_with")?;
    is_of_devices(func::vjp(|x| x[0].exp(), &[x.detach()], &seed), "vjp")?;
    ensure!(x.grad().is_none());
    y.sum_all()?.backward().context("a refused pass runs nothing")
}

fn gradients_of_another_device_are_refused(device: &Device) -> Result<()> {
    let null = other();
    let w = Tensor::ones([2, 2], DType::F32, device)?.to_leaf()?;
    let x = Tensor::ones([2, 2], DType::F32, device)?;
    let bad = Tensor::ones([2, 2], DType::F32, &null)?;
    w.set_grad(Some(bad.clone()));
    is_of_devices(x.linear(&w, None)?.sum_all()?.backward(), "a product")?;
    is_of_devices(w.exp()?.sum_all()?.backward(), "exp")?;
    w.set_grad(None);
    let foreign = bad.clone();
    let own = |x: &Tensor| {
        let foreign = foreign.clone();
        once_differentiable("own", x.detach(), &[x], move |_, _| {
            Ok([Some(foreign.clone())].into_iter().collect())
        })
    };
    is_of_devices(own(&w).sum_all()?.backward(), "a gradient of one's own")?;
    is_of_devices(own(&w.exp()?).sum_all()?.backward(), "a gradient of one's own, on the way")?;
    ensure!(w.grad().is_none());
    Ok(())
}

type MismatchCase = (&'static str, fn(&[Tensor; 3]) -> CoreResult<Tensor>);

/// Operations on [4, 4] tensors.
const CASES: &[MismatchCase] = &[
    ("add", |t| t[0].add(&t[1])),
    ("mul_", |t| t[0].mul_(&t[1]).map(|()| t[0].clone())),
    ("copy_into a chain", |t| t[0].exp()?.mul(&t[1])?.add(&t[2])),
    ("where", |t| t[0].where_(&t[1].gt(0.5)?, &t[2])),
    ("matmul", |t| t[0].matmul(&t[1])),
    ("linear", |t| t[0].linear(&t[1], Some(&t[2].select(0, 0)?))),
    ("addmm", |t| t[2].addmm(&t[0], &t[1], &Default::default())),
    ("layer_norm", |t| {
        t[0].layer_norm(
            [4],
            &NormOptions {
                weight: Some(&t[1].select(0, 0)?),
                bias: Some(&t[2].select(0, 0)?),
                ..Default::default()
            },
        )
    }),
    ("batch_norm", |t| {
        let [mean, var] = [t[1].select(0, 0)?.copy()?, t[2].select(0, 0)?.copy()?];
        t[0].batch_norm(&BatchNormOptions {
            running: Some((&mean, &var)),
            training: true,
            ..Default::default()
        })
    }),
    ("cat", |t| cat(&[&t[0], &t[1], &t[2]], 0)),
    ("stack", |t| stack(&[&t[0], &t[1], &t[2]], 0)),
    ("gather", |t| t[0].gather(0, &t[1].to_dtype(DType::I32)?)),
    ("index_select", |t| t[0].index_select(0, &t[1].select(0, 0)?.to_dtype(DType::I32)?)),
    ("scatter_add", |t| t[0].scatter_add(0, &t[1].to_dtype(DType::I32)?, &t[2])),
    ("masked_fill", |t| t[0].masked_fill(&t[1].gt(0.5)?, 1.0)),
    ("attention", |t| {
        let [q, k, v] = [0, 1, 2].map(|k| t[k].reshape([1, 1, 4, 4]));
        q?.scaled_dot_product_attention(&k?, &v?, &AttentionOptions::default())
    }),
    ("cross_entropy", |t| t[0].cross_entropy(&t[1].select(0, 0)?.to_dtype(DType::I32)?)),
    ("embedding", |t| t[0].embedding(&t[1].to_dtype(DType::I32)?, None)),
    ("lerp", |t| t[0].lerp(&t[1], 0.5)),
    ("addcmul", |t| t[0].addcmul(&t[1], &t[2], 1.0)),
    ("cdist", |t| t[0].cdist(&t[1], 2.0)),
];

fn operations_refuse_operands_of_two_devices(device: &Device) -> Result<()> {
    let null = other();
    let mut rng = SplitMix64(11);
    for (name, case) in CASES {
        let makes = |foreign: Option<usize>, trains: bool| -> Result<[Tensor; 3]> {
            let make = |k: usize| -> Result<Tensor> {
                let on = if foreign == Some(k) { &null } else { device };
                let t = Tensor::ones([4, 4], DType::F32, on)?;
                Ok(if trains && *name != "mul_" { t.to_leaf()? } else { t })
            };
            Ok([make(0)?, make(1)?, make(2)?])
        };
        // Number of operands. An argument that may be on another device without an error is not an operand.
        let operands = if [
            "add",
            "mul_",
            "matmul",
            "gather",
            "index_select",
            "masked_fill",
            "conv1d",
            "cross_entropy",
            "embedding",
            "lerp",
            "cdist",
        ]
        .contains(name)
        {
            2
        } else {
            3
        };
        let before = device.memory().allocated();
        for _ in 0..2 {
            let (foreign, trains) = (rng.below(operands), rng.below(2) == 1);
            let fused = rng.below(2) == 1;
            let least = device.fusion_min_bytes();
            device.set_fusion_min_bytes(if fused { Some(0) } else { least });
            let done = case(&makes(Some(foreign), trains)?);
            device.set_fusion_min_bytes(least);
            is_of_devices(done, &format!("{name}, operand {foreign}, fused: {fused}"))?;
        }
        ensure!(device.memory().allocated() == before, "{name} keeps memory");
    }
    Ok(())
}

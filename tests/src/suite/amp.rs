//! Mixed precision: result types of all operations, f32 weights, and the cache of casts.

use anyhow::{Context, Result, bail, ensure};
use forebay::amp::{CastPolicy, autocast, autocast_dtype, no_autocast};
use forebay::autograd::{checkpoint, no_grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::nn::{Linear, Module};
use forebay::ops::{
    AddmmOptions, AttentionOptions, BceWithLogitsOptions, CtcLossOptions, MultiMarginLossOptions,
    NllLossOptions, NormOptions, RecurrentKind, RecurrentOp, Reduction, cat, einsum,
};
use forebay::optim::{AdamW, Optimizer, RmsProp, Sgd};
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits};
use super::tests;

tests![
    listed_operations_run_in_their_dtype,
    unlisted_operations_keep_the_dtype_of_their_inputs,
    integers_and_explicit_dtypes_are_not_cast,
    scopes_nest_and_end,
    weights_stay_f32_and_get_f32_gradients,
    a_weight_is_cast_once,
    cached_casts_do_not_outlive_their_weights,
    a_loss_of_16_bit_logits_equals_that_of_their_casts,
    a_softmax_reads_and_writes_16_bits_without_copies,
    a_checkpoint_recomputes_under_its_autocast,
    memory_of_cached_casts_is_freed,
    copies_of_an_optimiser_replace_casts,
    optimisers_write_copies_of_cast_weights_by_default,
    copies_that_nothing_reads_are_freed,
    a_graph_keeps_the_low_precision_copy_that_it_saved,
];

const LOW: [DType; 2] = [DType::F16, DType::BF16];
const MEAN: Reduction = Reduction::Mean;

/// Operation on a [4, 4] matrix and a [4] vector of one type, with values between 0 and 1.
type BinaryFn = fn(&Tensor, &Tensor) -> CoreResult<Tensor>;

const CALLS: &[(&str, BinaryFn)] = &[
    ("addbmm", |m, _| {
        m.addbmm(&m.unsqueeze(0)?, &m.unsqueeze(0)?, &AddmmOptions { alpha: 0.5, ..Default::default() })
    }),
    ("addmm", |m, v| v.addmm(m, m, &AddmmOptions { beta: 0.5, ..Default::default() })),
    ("addmv", |m, v| v.addmv(m, v, &AddmmOptions { beta: 0.5, ..Default::default() })),
    ("addr", |m, v| m.addr(v, v, &AddmmOptions { beta: 0.5, ..Default::default() })),
    ("baddbmm", |m, _| {
        m.baddbmm(&m.unsqueeze(0)?, &m.unsqueeze(0)?, &AddmmOptions { alpha: 0.5, ..Default::default() })
    }),
    ("bmm", |m, _| m.unsqueeze(0)?.bmm(&m.unsqueeze(0)?)),
    ("conv1d", |m, v| m.conv1d(&m.reshape([4, 4, 1])?, Some(v), &Default::default())),
    ("conv2d", |m, v| m.reshape([4, 4, 1])?.conv2d(&m.reshape([4, 4, 1, 1])?, Some(v), &Default::default())),
    ("conv3d", |m, v| {
        m.reshape([4, 4, 1, 1])?.conv3d(&m.reshape([4, 4, 1, 1, 1])?, Some(v), &Default::default())
    }),
    ("conv_transpose1d", |m, v| m.conv_transpose1d(&m.reshape([4, 4, 1])?, Some(v), &Default::default())),
    ("conv_transpose2d", |m, v| {
        m.reshape([4, 4, 1])?.conv_transpose2d(&m.reshape([4, 4, 1, 1])?, Some(v), &Default::default())
    }),
    ("conv_transpose3d", |m, v| {
        m.reshape([4, 4, 1, 1])?.conv_transpose3d(&m.reshape([4, 4, 1, 1, 1])?, Some(v), &Default::default())
    }),
    ("einsum", |m, v| einsum("ij,jk,k->i", &[m, m, v])),
    ("gru", |m, v| {
        let (input, weight) = (m.narrow(1, 0, 3)?.reshape([4, 1, 3])?, v.narrow(0, 0, 3)?.reshape([3, 1])?);
        Ok(RecurrentOp::new(RecurrentKind::Gru, &input, &v.narrow(0, 0, 1)?.unsqueeze(0)?, &weight)
            .run()?
            .output)
    }),
    ("lstm", |m, v| {
        let state = v.narrow(0, 0, 1)?.unsqueeze(0)?;
        let (input, weight) = (m.unsqueeze(1)?, v.unsqueeze(1)?);
        let of = RecurrentOp::new(RecurrentKind::Lstm, &input, &state, &weight);
        Ok(RecurrentOp { c_0: Some(&state), bias_hh: Some(v), ..of }.run()?.output)
    }),
    ("rnn_relu", |m, v| {
        Ok(RecurrentOp::new(RecurrentKind::Relu, &m.unsqueeze(1)?, &v.unsqueeze(0)?, m).run()?.output)
    }),
    ("rnn_tanh", |m, v| {
        Ok(RecurrentOp::new(RecurrentKind::Tanh, &m.unsqueeze(1)?, &v.unsqueeze(0)?, m).run()?.h_n)
    }),
    ("linear", |m, v| m.linear(m, Some(v))),
    ("matmul", |m, v| m.matmul(v)),
    ("mm", |m, _| m.mm(m)),
    ("mv", |m, v| m.mv(v)),
    ("prelu", |m, v| m.prelu(v)),
    ("scaled_dot_product_attention", |m, _| {
        m.scaled_dot_product_attention(
            m,
            m,
            &AttentionOptions { is_causal: true, ..AttentionOptions::default() },
        )
    }),
    ("acos", |m, _| m.acos()),
    ("asin", |m, _| m.asin()),
    ("binary_cross_entropy_with_logits", |m, v| {
        m.binary_cross_entropy_with_logits(
            m,
            &BceWithLogitsOptions { weight: Some(v), pos_weight: Some(v), ..Default::default() },
        )
    }),
    ("cdist", |m, _| m.cdist(m, 2.0)),
    ("cosh", |m, _| m.cosh()),
    ("cosine_embedding_loss", |m, v| m.cosine_embedding_loss(&m.t()?, &v.ones_like()?, 0.1, MEAN)),
    ("ctc_loss", |m, _| {
        let ints = |n: &[i32], shape: &[usize]| Tensor::from_slice(n, shape, m.device());
        let (labels, steps, count) = (ints(&[1, 3], &[1, 2])?, ints(&[4], &[1])?, ints(&[2], &[1])?);
        m.unsqueeze(1)?.ctc_loss(&CtcLossOptions::new(&labels, &steps, &count))
    }),
    ("hinge_embedding_loss", |m, v| m.hinge_embedding_loss(v, 1.0, MEAN)),
    ("multi_margin_loss", |m, v| {
        m.multi_margin_loss(
            &Tensor::zeros([4], DType::I64, m.device())?,
            &MultiMarginLossOptions { weight: Some(v), ..Default::default() },
        )
    }),
    ("multilabel_margin_loss", |m, _| {
        m.multilabel_margin_loss(&Tensor::zeros([4, 4], DType::I64, m.device())?, MEAN)
    }),
    ("poisson_nll_loss", |m, v| m.poisson_nll_loss(v, &Default::default())),
    ("cosine_similarity", |m, v| m.cosine_similarity(v, -1, 1e-8)),
    ("cross_entropy", |m, _| m.cross_entropy(m)),
    ("cumprod", |m, _| m.cumprod(0)),
    ("cumsum", |m, _| m.cumsum(0)),
    ("erfinv", |m, _| m.erfinv()),
    ("exp", |m, _| m.exp()),
    ("expm1", |m, _| m.expm1()),
    ("group_norm", |m, v| {
        m.group_norm(2, &NormOptions { weight: Some(v), bias: Some(v), ..Default::default() })
    }),
    ("huber_loss", |m, v| m.huber_loss(v, 1.0, MEAN)),
    ("kl_div", |m, v| m.kl_div(v, false, MEAN)),
    ("l1_loss", |m, v| m.l1_loss(v, MEAN)),
    ("layer_norm", |m, v| {
        m.layer_norm([4], &NormOptions { weight: Some(v), bias: Some(v), ..Default::default() })
    }),
    ("log", |m, _| m.log()),
    ("log10", |m, _| m.log10()),
    ("log1p", |m, _| m.log1p()),
    ("log2", |m, _| m.log2()),
    ("log_softmax", |m, _| m.log_softmax(-1)),
    ("logsumexp", |m, _| m.logsumexp([0], false)),
    ("margin_ranking_loss", |m, v| m.margin_ranking_loss(v, v, 0.1, MEAN)),
    ("mse_loss", |m, v| m.mse_loss(v, MEAN)),
    ("nll_loss", |m, v| {
        let classes = Tensor::zeros([4], DType::I64, m.device())?;
        m.nll_loss(&classes, &NllLossOptions { weight: Some(v), ..Default::default() })
    }),
    ("norm", |m, _| m.norm(3.0, [0], false)),
    ("pow", |m, v| m.pow(v)),
    ("prod", |m, _| m.prod(0, false)),
    ("reciprocal", |m, _| m.reciprocal()),
    ("rsqrt", |m, _| m.rsqrt()),
    ("sinh", |m, _| m.sinh()),
    ("smooth_l1_loss", |m, v| m.smooth_l1_loss(v, 1.0, MEAN)),
    ("soft_margin_loss", |m, v| m.soft_margin_loss(v, MEAN)),
    ("softmax", |m, _| m.softmax(-1)),
    ("softplus", |m, _| m.softplus(1.0, 20.0)),
    ("sum", |m, _| m.sum([0], false)),
    ("tan", |m, _| m.tan()),
    ("triplet_margin_loss", |m, v| m.triplet_margin_loss(m, v, &Default::default())),
    ("addcdiv", |m, v| m.addcdiv(v, v, 0.5)),
    ("addcmul", |m, v| m.addcmul(v, v, 0.5)),
    ("atan2", |m, v| m.atan2(v)),
    ("bilinear", |m, v| m.bilinear(m, &m.unsqueeze(0)?, Some(&v.narrow(0, 0, 1)?))),
    ("dot", |_, v| v.dot(v)),
    ("index_put", |m, v| {
        let indices = Tensor::zeros([4], DType::I32, m.device())?;
        m.index_put(&[Some(&indices)], v, true)
    }),
    ("inner", |m, v| m.inner(v)),
    ("scatter_add", |m, _| {
        let indices = Tensor::zeros([4, 4], DType::I64, m.device())?;
        m.scatter_add(0, &indices, m)
    }),
];

/// Operations that promote to the widest type, tested with a matrix of one type and a vector of the other.
const MIXED: &[&str] = &["addcdiv", "addcmul", "atan2", "bilinear", "index_put", "inner"];

fn operands(device: &Device) -> Result<(Tensor, Tensor)> {
    let values: Vec<f32> = (0..16).map(|i| (i * 7 % 16) as f32 / 32.0 + 0.25).collect();
    Ok((Tensor::from_slice(&values, [4, 4], device)?, Tensor::from_slice(&values[3..7], [4], device)?))
}

fn listed_operations_run_in_their_dtype(device: &Device) -> Result<()> {
    let (m, v) = operands(device)?;
    for policy in CastPolicy::ALL {
        for op in policy.operations() {
            ensure!(CALLS.iter().any(|(name, _)| name == op), "{op} is listed and not tested");
        }
    }
    for low in LOW {
        for (name, call) in CALLS {
            let policy =
                CastPolicy::for_op(name).with_context(|| format!("{name} is tested and not listed"))?;
            for given in [DType::F32, low] {
                let (m, v) = (m.to_dtype(given)?.to_leaf()?, v.to_dtype(given)?.to_leaf()?);
                let expected = match policy {
                    CastPolicy::LowerPrecision => low,
                    CastPolicy::Fp32 => DType::F32,
                    CastPolicy::Promote => given,
                };
                let out = {
                    let _autocast = autocast(low)?;
                    call(&m, &v).with_context(|| format!("{name} of {given} under {low}"))?
                };
                ensure!(
                    out.dtype() == expected,
                    "{name} of {given} under {low} gives {}, expected {expected}",
                    out.dtype()
                );
                // Casts are recorded: gradients have the types of the inputs.
                out.backward_with(&out.ones_like()?)
                    .with_context(|| format!("gradient of {name} of {given} under {low}"))?;
                let grads: Vec<Tensor> = [&m, &v].into_iter().filter_map(Tensor::grad).collect();
                ensure!(!grads.is_empty(), "{name}: no gradient");
                ensure!(
                    grads.iter().all(|g| g.dtype() == given),
                    "{name} of {given}: a gradient was not cast back"
                );
                // The expected value is that of the operation without autocast, with operands cast by hand.
                let by_hand = match policy {
                    CastPolicy::LowerPrecision => low,
                    CastPolicy::Fp32 => DType::F32,
                    CastPolicy::Promote => given,
                };
                let exact = call(&m.detach().to_dtype(by_hand)?, &v.detach().to_dtype(by_hand)?)?;
                ensure_same_bits(&out.detach(), &exact)
                    .with_context(|| format!("{name} of {given} under {low}"))?;
            }
            if MIXED.contains(name) {
                let _autocast = autocast(low)?;
                let out = call(&m.to_dtype(low)?, &v)?;
                ensure!(out.dtype() == DType::F32, "{name} of {low} and f32 gives {}", out.dtype());
            }
        }
    }
    Ok(())
}

fn unlisted_operations_keep_the_dtype_of_their_inputs(device: &Device) -> Result<()> {
    let (m, _) = operands(device)?;
    for low in LOW {
        let half = m.to_dtype(low)?;
        let _autocast = autocast(low)?;
        for t in [&m, &half] {
            for (name, out) in [
                ("relu", t.relu()?),
                ("gelu", t.gelu()?),
                ("tanh", t.tanh()?),
                ("sigmoid", t.sigmoid()?),
                ("mean", t.mean_all()?),
                ("mul", t.mul(2.0)?),
                ("dropout", t.dropout(0.5, true)?),
                ("max", t.amax([0], false)?),
            ] {
                ensure!(out.dtype() == t.dtype(), "{name} of {} gives {}", t.dtype(), out.dtype());
            }
        }
        // Mixed operands are promoted to the widest type.
        for (name, out) in [
            ("add", half.add(&m)?),
            ("where", half.where_(&m.gt(0.5)?, &m)?),
            ("cat", cat(&[&half, &m], 0)?),
            ("lerp", half.lerp(&m, 0.5)?),
        ] {
            ensure!(out.dtype() == DType::F32, "{name} of {low} and f32 gives {}", out.dtype());
        }
    }
    Ok(())
}

fn integers_and_explicit_dtypes_are_not_cast(device: &Device) -> Result<()> {
    let (m, _) = operands(device)?;
    let _autocast = autocast(DType::F16)?;
    let i = Tensor::ones([4, 4], DType::I32, device)?;
    ensure!(i.matmul(&i)?.dtype() == DType::I32, "a product of integers was cast");
    ensure!(i.amax([0], false)?.dtype() == DType::I32);
    ensure!(
        m.softmax_with_dtype(-1, DType::F16)?.dtype() == DType::F16,
        "an explicitly requested type was changed"
    );
    // An in-place operation keeps its target's type.
    let half = m.to_dtype(DType::F16)?;
    half.add_(&m)?;
    ensure!(half.dtype() == DType::F16);
    if device.supports_dtype(DType::F64) && device.info().features.f64 {
        let wide = m.to_dtype(DType::F64)?;
        ensure!(wide.matmul(&wide)?.dtype() == DType::F64 && wide.sum_all()?.dtype() == DType::F64);
    }
    let error =
        m.binary_cross_entropy(&m, None, MEAN).err().context("binary_cross_entropy ran under autocast")?;
    ensure!(error.to_string().contains("binary_cross_entropy_with_logits"), "{error}");
    Ok(())
}

fn scopes_nest_and_end(device: &Device) -> Result<()> {
    let (m, _) = operands(device)?;
    let type_now = || -> Result<DType> { Ok(m.matmul(&m)?.dtype()) };
    ensure!(
        matches!(autocast(DType::F32), Err(Error::DType { op: "autocast", .. })),
        "autocast accepted f32"
    );
    ensure!(autocast_dtype().is_none() && type_now()? == DType::F32);
    {
        let _outer = autocast(DType::F16)?;
        ensure!(type_now()? == DType::F16);
        {
            let _inner = autocast(DType::BF16)?;
            ensure!(autocast_dtype() == Some(DType::BF16) && type_now()? == DType::BF16);
            let _off = no_autocast();
            ensure!(type_now()? == DType::F32);
        }
        ensure!(type_now()? == DType::F16, "an inner scope did not end");
        let other = std::thread::scope(|s| s.spawn(autocast_dtype).join());
        ensure!(matches!(other, Ok(None)), "the scope applies to another thread");
        // A scope also ends on an error.
        let failed: Result<()> = (|| {
            let _inner = no_autocast();
            bail!("on the way")
        })();
        ensure!(failed.is_err() && type_now()? == DType::F16);
    }
    ensure!(type_now()? == DType::F32);
    Ok(())
}

fn weights_stay_f32_and_get_f32_gradients(device: &Device) -> Result<()> {
    for low in LOW {
        let net = Linear::new(8, 8, device)?;
        let x = Tensor::randn([4, 8], DType::F32, device)?;
        let before = net.weight.to_vec::<f32>()?;
        let mut optimizer = Sgd::new(net.parameters(), 0.1);
        let (loss, out) = {
            let _autocast = autocast(low)?;
            let out = net.forward(&x)?;
            (out.mse_loss(&x, MEAN)?, out)
        };
        ensure!(out.dtype() == low && loss.dtype() == DType::F32);
        loss.backward()?;
        for p in net.parameters() {
            ensure!(p.dtype() == DType::F32, "a weight became {}", p.dtype());
            let grad = p.grad().context("no gradient")?;
            ensure!(grad.dtype() == DType::F32, "a gradient is {}", grad.dtype());
            ensure!(grad.to_vec::<f32>()?.iter().any(|g| *g != 0.0), "a gradient is zero");
        }
        optimizer.step()?;
        ensure!(net.weight.dtype() == DType::F32 && net.weight.to_vec::<f32>()? != before);
        optimizer.zero_grad();
    }
    Ok(())
}

fn a_weight_is_cast_once(device: &Device) -> Result<()> {
    let w = Tensor::ones([64, 64], DType::F32, device)?.to_leaf()?;
    let x = Tensor::ones([64, 64], DType::F16, device)?;
    // Bytes that a product allocates in addition to its result: the cast of the weight.
    let more = || -> Result<(u64, Tensor)> {
        let before = device.memory().allocated();
        let y = x.matmul(&w)?;
        Ok((device.memory().allocated() - before, y))
    };
    let half = 2 * 64 * 64;
    let _autocast = autocast(DType::F16)?;
    let (first, a) = more()?;
    let (second, b) = more()?;
    ensure!(first == 2 * half && second == half, "{first} and {second} bytes: the weight was cast twice");
    // The gradients of both uses reach the weight.
    a.add(&b)?.sum_all()?.backward()?;
    let grad = w.grad().context("no gradient")?.to_vec::<f32>()?;
    ensure!(grad.iter().all(|&g| g == 128.0), "a use of the weight was lost: {}", grad[0]);
    // Nested scopes share the cast cache of the outermost scope.
    drop((a, b));
    let _first = more()?;
    let _inner = autocast(DType::F16)?;
    ensure!(more()?.0 == half, "a nested scope casts again");
    Ok(())
}

fn cached_casts_do_not_outlive_their_weights(device: &Device) -> Result<()> {
    let w = Tensor::ones([4, 4], DType::F32, device)?.to_leaf()?;
    let x = Tensor::ones([4, 4], DType::F32, device)?;
    let mut optimizer = Sgd::new(vec![w.clone()], 1.0);
    let _autocast = autocast(DType::BF16)?;
    let value = |y: &Tensor| -> Result<f64> { Ok(y.to_f64s()?[0]) };
    // A cast made under `no_grad` has no history; recorded uses need a new one.
    {
        let _no_grad = no_grad();
        ensure!(value(&x.matmul(&w)?)? == 4.0);
    }
    for (step, expected) in [4.0, -12.0, -28.0].into_iter().enumerate() {
        // The scope stays open during the backward pass and the optimiser step.
        let y = x.matmul(&w)?;
        ensure!(value(&y)? == expected, "step {step} computes with the weights of another: {}", value(&y)?);
        y.sum_all()?.backward()?;
        let grad = w.grad().context("no gradient")?.to_vec::<f32>()?;
        ensure!(grad == [4.0; 16], "step {step}: {grad:?}");
        optimizer.step()?;
        optimizer.zero_grad();
        let _no_grad = no_grad();
        ensure!(value(&x.matmul(&w)?)? == expected - 16.0, "step {step} evaluates old weights");
    }
    // A write by hand also makes the cast outdated.
    {
        let _no_grad = no_grad();
        x.matmul(&w)?;
        w.detach().copy_(&x)?;
        ensure!(value(&x.matmul(&w)?)? == 4.0);
    }
    Ok(())
}

fn a_loss_of_16_bit_logits_equals_that_of_their_casts(device: &Device) -> Result<()> {
    for low in LOW {
        let logits = Tensor::randn([6, 10], DType::F32, device)?.to_dtype(low)?;
        let classes = Tensor::from_slice(&[1i64, 0, 9, 3, 3, 7], [6], device)?;
        let (fused, by_hand) = (logits.to_leaf()?, logits.to_leaf()?);
        let a = {
            let _autocast = autocast(low)?;
            fused.cross_entropy(&classes)?
        };
        let b = by_hand.to_dtype(DType::F32)?.cross_entropy(&classes)?;
        ensure_same_bits(&a.detach(), &b.detach()).context("loss")?;
        a.backward()?;
        b.backward()?;
        let (a, b) = (fused.grad().context("gradient")?, by_hand.grad().context("gradient")?);
        ensure_same_bits(&a, &b).with_context(|| format!("gradient of {low}"))?;
    }
    Ok(())
}

/// Two layers with a shared weight, and dropout in between.
fn tied(x: &Tensor, w: &Tensor) -> CoreResult<Tensor> {
    x.matmul(w)?.gelu()?.dropout(0.25, true)?.matmul(w)
}

fn a_checkpoint_recomputes_under_its_autocast(device: &Device) -> Result<()> {
    for low in LOW {
        let run = |depth: u32, inside: bool| -> Result<[Tensor; 3]> {
            device.manual_seed(5);
            let x = Tensor::randn([8, 8], DType::F32, device)?.to_leaf()?;
            let w = Tensor::randn([8, 8], DType::F32, device)?.to_leaf()?;
            let scope = autocast(low)?;
            // The weight is also cast outside the checkpoint, in a second graph.
            let x1 = x.matmul(&w)?;
            let captured = w.clone();
            let y = match depth {
                0 => tied(&x1, &w)?,
                1 => checkpoint(&[&x1], move |t| tied(&t[0], &captured))?,
                _ => checkpoint(&[&x1, &w], |t| {
                    let captured = t[1].clone();
                    checkpoint(&[&t[0]], move |t| tied(&t[0], &captured))
                })?,
            };
            ensure!(y.dtype() == low, "the closure ran in {}", y.dtype());
            let loss = y.matmul(&w)?.sum_all()?;
            if inside {
                loss.backward()?;
                drop(scope);
            } else {
                drop(scope);
                loss.backward()?;
            }
            let grad = |t: &Tensor| t.grad().context("no gradient");
            ensure!(autocast_dtype().is_none(), "a scope of the checkpoint stays");
            Ok([y.detach(), grad(&x)?, grad(&w)?])
        };
        let plain = run(0, false)?;
        for depth in [1, 2] {
            let kept = [run(depth, false)?, run(depth, true)?];
            for kept in &kept {
                ensure_same_bits(&kept[0], &plain[0]).with_context(|| format!("{low}: result"))?;
                ensure_same_bits(&kept[1], &plain[1]).with_context(|| format!("{low}: gradient of x"))?;
                // Gradients of the weight's uses are summed in 16 bits inside a graph, and in f32 between graphs.
                let exact = plain[2].to_f64s()?;
                let unit = if low == DType::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
                let largest = exact.iter().fold(0f64, |m, g| m.max(g.abs()));
                ensure_close(&kept[2].to_f64s()?, &exact, 0.0, 4.0 * unit * largest)
                    .with_context(|| format!("{low}: gradient of w"))?;
            }
            ensure_same_bits(&kept[0][2], &kept[1][2]).context("backward inside and outside of the scope")?;
        }
    }
    Ok(())
}

fn memory_of_cached_casts_is_freed(device: &Device) -> Result<()> {
    let w = Tensor::ones([64, 64], DType::F32, device)?.to_leaf()?;
    let x = Tensor::ones([1, 64], DType::F32, device)?;
    let before = device.memory().allocated();
    {
        let _autocast = autocast(DType::BF16)?;
        drop(x.matmul(&w)?);
        ensure!(device.memory().allocated() > before, "the cast is not kept within the scope");
    }
    ensure!(device.memory().allocated() == before, "casts outlive the scope");
    // A checkpoint does not keep the casts of its function alive.
    let _autocast = autocast(DType::BF16)?;
    let captured = w.clone();
    let y = checkpoint(&[&x], move |t| t[0].matmul(&captured))?;
    let kept = device.memory().allocated() - before;
    ensure!(kept < 2 * 64 * 64, "{kept} bytes are kept: the cast of a checkpointed weight");
    drop(y);
    Ok(())
}

/// Two layers, with extents that are multiples of vector widths and others.
fn layers(device: &Device) -> Result<[Linear; 2]> {
    device.manual_seed(3);
    Ok([Linear::new(8, 12, device)?, Linear::new(12, 5, device)?])
}

fn autocast_loss(layers: &[Linear; 2], x: &Tensor, low: DType) -> CoreResult<Tensor> {
    let _autocast = autocast(low)?;
    layers[1].forward(&layers[0].forward(x)?.relu()?)?.to_dtype(DType::F32)?.square()?.mean_all()
}

/// Runs steps, one of which is skipped; a weight is changed by hand after another. Returns losses and parameters.
fn steps(
    optimizer: &mut dyn Optimizer,
    layers: &[Linear; 2],
    low: DType,
    skips: bool,
) -> Result<Vec<Tensor>> {
    let device = layers[0].weight.device();
    let x = Tensor::arange(0.0, 32.0, 1.0, DType::F32, device)?.sin()?.reshape([4, 8])?;
    let mut seen = Vec::new();
    for k in 0..5 {
        let loss = autocast_loss(layers, &x, low)?;
        loss.backward()?;
        seen.push(loss.detach());
        match skips {
            true => {
                optimizer.step_unless(&Tensor::full((), f64::from(k % 3 == 0), DType::F32, device)?)?;
            }
            false => optimizer.step()?,
        }
        optimizer.zero_grad();
        if k == 2 {
            layers[0].weight.detach().mul_(0.5)?;
        }
    }
    seen.extend(layers.iter().flat_map(Module::parameters).map(|p| p.detach()));
    Ok(seen)
}

fn copies_of_an_optimiser_replace_casts(device: &Device) -> Result<()> {
    type OptimizerCtor = fn(Vec<Tensor>, bool) -> Box<dyn Optimizer>;
    let kinds: [OptimizerCtor; 3] = [
        |p, on| Box::new(AdamW::new(p, 0.02).low_precision_copies(on)),
        |p, on| Box::new(Sgd::new(p, 0.05).low_precision_copies(on)),
        |p, on| Box::new(RmsProp::new(p, 0.01).momentum(0.5).low_precision_copies(on)),
    ];
    for low in LOW {
        for (k, (make, skips)) in kinds.iter().flat_map(|make| [(make, false), (make, true)]).enumerate() {
            // Fewer kernels to compile: rarer optimisers run in one type only.
            if k > 1 && low == DType::F16 {
                continue;
            }
            let mut seen = Vec::new();
            for on in [false, true] {
                let layers = layers(device)?;
                let parameters: Vec<Tensor> = layers.iter().flat_map(Module::parameters).collect();
                let before = device.memory().allocated();
                let mut optimizer = make(parameters, on);
                let run = steps(&mut *optimizer, &layers, low, skips)?;
                seen.push((run, device.memory().allocated() - before));
            }
            let [(plain, plain_bytes), (copied, copied_bytes)] = &seen[..] else { bail!("two runs") };
            ensure!(
                copied_bytes > plain_bytes,
                "{low}: no copy is kept: {copied_bytes} bytes, {plain_bytes} without"
            );
            for (at, (a, b)) in copied.iter().zip(plain).enumerate() {
                ensure_same_bits(a, b).with_context(|| format!("{low}, kind {k}, result {at}"))?;
            }
        }
    }
    Ok(())
}

fn optimisers_write_copies_of_cast_weights_by_default(device: &Device) -> Result<()> {
    let x = Tensor::arange(0.0, 32.0, 1.0, DType::F32, device)?.cos()?.reshape([4, 8])?;
    // Launches of the second forward pass, and bytes that remain allocated.
    let run = |make: fn(Vec<Tensor>) -> AdamW, low: Option<DType>| -> Result<(usize, u64)> {
        let layers = layers(device)?;
        let before = device.memory().allocated();
        let mut optimizer = make(layers.iter().flat_map(Module::parameters).collect());
        let loss = || match low {
            Some(low) => autocast_loss(&layers, &x, low),
            None => layers[1].forward(&layers[0].forward(&x)?.relu()?)?.square()?.mean_all(),
        };
        loss()?.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
        let profiler = Profiler::start(device)?;
        drop(loss()?);
        let launches = profiler.finish()?.spans.len();
        Ok((launches, device.memory().allocated() - before))
    };
    let never = |p| AdamW::new(p, 0.02).low_precision_copies(false);
    let default = |p| AdamW::new(p, 0.02);
    let (casting, plain) = (run(never, Some(DType::BF16))?, run(never, None)?);
    let (copying, without_autocast) = (run(default, Some(DType::BF16))?, run(default, None)?);
    // Two weights and two biases.
    ensure!(casting.0 == copying.0 + 4, "{} launches with casts, {} with copies", casting.0, copying.0);
    ensure!(copying.1 > casting.1, "no copy is kept: {} bytes, {} without", copying.1, casting.1);
    ensure!(without_autocast == plain, "{without_autocast:?} without autocast, expected {plain:?}");
    Ok(())
}

/// Steps without autocast, and replays that have copies of their own, end the copies of the optimiser.
fn copies_that_nothing_reads_are_freed(device: &Device) -> Result<()> {
    let x = Tensor::arange(0.0, 32.0, 1.0, DType::F32, device)?.cos()?.reshape([4, 8])?;
    let plain_loss =
        |layers: &[Linear; 2]| layers[1].forward(&layers[0].forward(&x)?.relu()?)?.square()?.mean_all();
    let run = |on: bool, captured: bool| -> Result<(Vec<u64>, Vec<Tensor>)> {
        let before = device.memory().allocated();
        let layers = layers(device)?;
        let parameters: Vec<Tensor> = layers.iter().flat_map(Module::parameters).collect();
        let mut optimizer = Sgd::new(parameters.clone(), 0.1).low_precision_copies(on);
        let mut allocated = Vec::new();
        let mut step = captured
            .then(|| device.capture(|| autocast_loss(&layers, &x, DType::BF16)?.backward()))
            .transpose()?;
        for k in 0..7 {
            optimizer.zero_grad();
            match &mut step {
                Some(step) => step.replay()?,
                // The first step and the last have copies.
                None if matches!(k, 0 | 5 | 6) => autocast_loss(&layers, &x, DType::BF16)?.backward()?,
                None => plain_loss(&layers)?.backward()?,
            }
            optimizer.step()?;
            allocated.push(device.memory().allocated() - before);
        }
        Ok((allocated, parameters))
    };
    for captured in [false, true] {
        let ((with, got), (without, expected)) = (run(true, captured)?, run(false, captured)?);
        ensure!(with[1] > without[1], "captured: {captured}: no copies, {with:?} bytes, {without:?} without");
        ensure!(
            with[4] == without[4],
            "captured: {captured}: copies stay, {with:?} bytes, {without:?} without"
        );
        ensure!(captured || with[6] > without[6], "no copies, {with:?} bytes, {without:?} without");
        for (got, expected) in got.iter().zip(&expected) {
            ensure_same_bits(got, expected).with_context(|| format!("captured: {captured}"))?;
        }
    }
    Ok(())
}

fn a_graph_keeps_the_low_precision_copy_that_it_saved(device: &Device) -> Result<()> {
    let x = Tensor::arange(0.0, 32.0, 1.0, DType::F32, device)?.cos()?.reshape([4, 8])?;
    let mut grads = Vec::new();
    for on in [false, true] {
        let layers = layers(device)?;
        let parameters: Vec<Tensor> = layers.iter().flat_map(Module::parameters).collect();
        let mut optimizer = Sgd::new(parameters, 0.1).low_precision_copies(on);
        autocast_loss(&layers, &x, DType::BF16)?.backward()?;
        optimizer.step()?;
        // This loss uses the copies of the first step, but its backward pass runs after the second.
        let early = autocast_loss(&layers, &x, DType::BF16)?;
        optimizer.step()?;
        optimizer.zero_grad();
        early.backward()?;
        let bias = layers[0].bias.as_ref().and_then(Tensor::grad).context("no gradient")?;
        grads.push(bias);
    }
    ensure_same_bits(&grads[1], &grads[0])
}

/// The softmax of a 16-bit tensor has the bits of the softmax of its cast, and so has the gradient, also from a 16-bit
/// gradient. Neither direction casts.
fn a_softmax_reads_and_writes_16_bits_without_copies(device: &Device) -> Result<()> {
    let softmax = |x: &Tensor, log: bool, dim| if log { x.log_softmax(dim) } else { x.softmax(dim) };
    // Rows of quads and others, columns, and rows that several workgroups share.
    let cases: [(&[usize], isize); 5] =
        [(&[3, 96], -1), (&[4, 30], -1), (&[2, 9, 12], 1), (&[2, 3000], -1), (&[1, 140_000], -1)];
    for low in LOW {
        for (shape, dim) in cases {
            let count = shape.iter().product::<usize>() as f64;
            let line = |step: f64| Tensor::arange(0.0, count, 1.0, DType::F32, device)?.mul(step)?.sin();
            let x = line(0.7)?.mul(6.0)?.reshape(shape)?.to_dtype(low)?;
            let seed = line(1.3)?.reshape(shape)?.to_dtype(low)?;
            for log in [false, true] {
                let wide = x.to_dtype(DType::F32)?.to_leaf()?;
                let expected = softmax(&wide, log, dim)?;
                expected.backward_with(&seed.to_dtype(DType::F32)?)?;
                let expected_grad = wide.grad().context("a gradient")?.to_dtype(low)?;
                for with_dtype in [false, true] {
                    let case = || format!("{low} {shape:?}, dimension {dim}, log {log}, {with_dtype}");
                    let leaf = x.to_leaf()?;
                    let profiler = Profiler::start(device)?;
                    let y = match (with_dtype, log) {
                        (true, false) => leaf.softmax_with_dtype(dim, DType::F32)?,
                        (true, true) => leaf.log_softmax_with_dtype(dim, DType::F32)?,
                        (false, _) => {
                            let _autocast = autocast(low)?;
                            softmax(&leaf, log, dim)?
                        }
                    };
                    let spans = profiler.finish()?.spans;
                    ensure!(spans.iter().all(|span| span.op != "to_dtype"), "{}: {spans:?}", case());
                    ensure_same_bits(&y, &expected).with_context(case)?;
                    let narrow = y.to_dtype(low)?;
                    let profiler = Profiler::start(device)?;
                    narrow.backward_with(&seed)?;
                    let spans = profiler.finish()?.spans;
                    ensure!(spans.iter().all(|span| span.op != "to_dtype"), "{}: {spans:?}", case());
                    let grad = leaf.grad().context("a gradient")?;
                    ensure_same_bits(&grad, &expected_grad).with_context(case)?;
                }
            }
        }
    }
    Ok(())
}

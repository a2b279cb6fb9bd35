//! Gradients: they reach every input, accumulate, and are unchanged by checkpoints.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use forebay::autograd::{self, GradOptions, checkpoint};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::nn::{Linear, Module};
use forebay::ops::{
    AddmmOptions, AttentionOptions, CrossEntropyOptions, EmbeddingBagMode, EmbeddingBagOptions, NormOptions,
    RecurrentKind, RecurrentOp, cat,
};
use forebay::optim::{AdamW, Optimizer};
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_same_bits, ensure_values};
use super::tests;

tests![
    gradients_of_diamond_graphs_accumulate,
    gradients_of_repeated_use_accumulate,
    a_gradient_returned_twice_is_added_twice,
    a_leaf_used_several_times_gets_all_gradients,
    a_gradient_that_was_read_is_not_accumulated_into,
    gradients_accumulate_in_place,
    gradients_of_parts_add_up,
    gradients_of_slices_are_written_once,
    gradients_of_rolled_and_reversed_tensors_are_one_copy,
    no_grad_stops_recording,
    detach_stops_gradients,
    frozen_leaves_have_no_gradient,
    requires_grad_changes_the_tensor_itself,
    a_constant_that_was_written_before_becomes_a_leaf,
    a_graph_runs_backward_once,
    a_retained_graph_runs_backward_again,
    grad_does_not_change_leaves,
    a_custom_gradient_has_the_shape_and_the_type_of_its_input,
    long_chains_do_not_overflow_the_stack,
    a_checkpoint_gives_the_same_bits,
    checkpoints_nest,
    a_checkpoint_reaches_captured_parameters,
    grad_goes_through_checkpoints,
    captured_tensors_of_a_checkpoint_share_the_backward_pass,
    saved_tensors_are_freed_during_backward,
];

fn gradients_of_diamond_graphs_accumulate(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3], device)?.to_leaf()?;
    // y = x², z = 3y + y·x, one gradient through four paths: dz/dx = 6x + 3x²
    let y = x.mul(&x)?;
    let z = y.mul(3.0)?.add(&y.mul(&x)?)?;
    z.backward_with(&z.ones_like()?)?;
    ensure_values(&x.grad().context("no gradient")?, &[9.0, 24.0, 45.0])
}

/// A wrong gradient is an error that names the operation, also where later operations would stretch it.
fn a_custom_gradient_has_the_shape_and_the_type_of_its_input(device: &Device) -> Result<()> {
    type Rule = fn(&Tensor) -> CoreResult<Vec<Option<Tensor>>>;
    const RULES: [(&str, Rule); 6] = [
        ("a gradient of f32 [] for input 0, which is f32 [3]", |g| Ok(vec![Some(g.sum_all()?)])),
        ("a gradient of f32 [1] for input 0, which is f32 [3]", |g| Ok(vec![Some(g.narrow(0, 0, 1)?)])),
        ("a gradient of f32 [1, 3] for input 0, which is f32 [3]", |g| Ok(vec![Some(g.unsqueeze(0)?)])),
        ("a gradient of f16 [3] for input 0, which is f32 [3]", |g| Ok(vec![Some(g.to_dtype(DType::F16)?)])),
        ("no gradient for input 0, which requires one", |_| Ok(vec![None])),
        ("2 gradients for 1 inputs; return one for each input", |g| Ok(vec![Some(g.clone()), None])),
    ];
    let leaf = Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3], device)?.to_leaf()?;
    for (expected, rule) in RULES {
        let loss_of = |x: &Tensor| -> CoreResult<Tensor> {
            let out = x.detach().square()?;
            autograd::differentiable("custom", out, &[x], move |g, _| Ok(rule(g)?.into())).sum_all()
        };
        let inner = leaf.exp()?;
        let results = [
            loss_of(&leaf)?.backward(),
            loss_of(&leaf.exp()?)?.backward(),
            autograd::grad(&[loss_of(&inner)?], &[&inner], &GradOptions::default()).map(drop),
            autograd::grad(&[loss_of(&inner)?], &[&leaf], &GradOptions::create_graph()).map(drop),
        ];
        for (k, result) in results.into_iter().enumerate() {
            let message =
                result.err().with_context(|| format!("no error of {expected:?}, case {k}"))?.to_string();
            ensure!(
                message.contains("`custom` (at ") && message.contains(&format!("returned {expected}")),
                "{message}"
            );
        }
        ensure!(leaf.grad().is_none(), "a wrong gradient was accumulated");
    }
    Ok(())
}

fn gradients_of_repeated_use_accumulate(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[2.0f32], [1], device)?.to_leaf()?;
    let mut y = x.clone();
    for _ in 0..5 {
        y = y.mul(&x)?;
    }
    y.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[6.0 * 32.0])
}

fn a_gradient_returned_twice_is_added_twice(device: &Device) -> Result<()> {
    let x = Tensor::ones([3], DType::F32, device)?.to_leaf()?;
    // Both operands receive the same gradient tensor.
    for options in [GradOptions::default(), GradOptions::create_graph()] {
        let y = x.add(&x)?.sum_all()?;
        ensure_values(&autograd::grad(&[y], std::slice::from_ref(&x), &options)?[0], &[2.0; 3])?;
    }
    x.add(&x)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[2.0; 3])?;
    // The gradient of the leaf itself is passed as an incoming gradient.
    let known = x.grad().context("no gradient")?;
    x.add(1.0)?.backward_with(&known)?;
    ensure_values(&x.grad().context("no gradient")?, &[4.0; 3])
}

/// Operation whose arguments may be the same tensor: indices select a leaf, \[4, 4\] or \[4\], for each argument.
type ArgumentOp = (&'static str, &'static [usize], fn(&[Tensor]) -> CoreResult<Tensor>);

const ARGUMENT_OPS: &[ArgumentOp] = &[
    ("mlp", &[0, 0, 1, 0, 1], |x| x[0].mlp(&x[1], &x[2], &x[3], &x[4])),
    ("linear", &[0, 0, 1], |x| x[0].linear(&x[1], Some(&x[2]))),
    ("two linear layers", &[0, 0, 1, 0, 1], |x| x[0].linear(&x[1], Some(&x[2]))?.linear(&x[3], Some(&x[4]))),
    ("layer_norm", &[1, 1, 1], |x| {
        x[0].layer_norm([4], &NormOptions { weight: Some(&x[1]), bias: Some(&x[2]), ..Default::default() })
    }),
    ("add_layer_norm", &[0, 0, 1, 1], |x| {
        let (sum, normed) = x[0].add_layer_norm(
            &x[1],
            [4],
            &NormOptions { weight: Some(&x[2]), bias: Some(&x[3]), ..Default::default() },
        )?;
        normed.mul(&sum)
    }),
    ("scaled_dot_product_attention", &[0, 0, 0], |x| {
        x[0].scaled_dot_product_attention(&x[1], &x[2], &AttentionOptions::default())
    }),
    ("scaled_dot_product_attention with a mask", &[0, 0, 0, 0], |x| {
        let options = AttentionOptions { attn_mask: Some(&x[3]), ..AttentionOptions::default() };
        x[0].scaled_dot_product_attention(&x[1], &x[2], &options)
    }),
    ("embedding", &[0, 0, 0], |x| {
        let rows = Tensor::from_slice(&[1i32, 3, 1, 0], [4], x[0].device())?;
        x[0].embedding(&rows, None)?.mul(&x[1].embedding(&rows, None)?)?.add(&x[2])
    }),
    ("embedding_bag", &[0, 0], |x| {
        let rows =
            Tensor::from_slice(&[1i32, 3, 1, 0, 2, 2, 0, 1, 0, 0, 3, 3, 1, 1, 2, 0], [4, 4], x[0].device())?;
        let bags = EmbeddingBagOptions {
            mode: EmbeddingBagMode::Sum,
            per_sample_weights: Some(&x[1]),
            ..EmbeddingBagOptions::default()
        };
        x[0].embedding_bag(&rows, &bags)
    }),
    ("addmm", &[0, 0, 0], |x| x[0].addmm(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })),
    ("addcmul", &[0, 0, 1], |x| x[0].addcmul(&x[1], &x[2], 0.7)),
    ("lerp", &[0, 1, 0], |x| x[0].lerp(&x[1], &x[2])),
    ("rnn_tanh", &[0, 0, 1], |x| {
        let input = x[0].unsqueeze(0)?.mul(0.5)?;
        let of = RecurrentOp::new(RecurrentKind::Tanh, &input, &x[0], &x[1]);
        Ok(RecurrentOp { bias_hh: Some(&x[2]), ..of }.run()?.h_n)
    }),
    ("linear_cross_entropy", &[0, 0], |x| {
        let classes = Tensor::from_slice(&[1i32, 3, 0, 2], [4], x[0].device())?;
        x[0].linear_cross_entropy(&x[1], &classes, &CrossEntropyOptions::default())
    }),
    ("cross_entropy_with", &[0, 0], |x| x[0].cross_entropy_with(&x[1], &CrossEntropyOptions::default())),
    ("cat", &[0, 0], |x| cat(&[&x[0], &x[1]], 1)),
    ("conv1d", &[0, 0, 1], |x| {
        x[0].unsqueeze(-1)?.conv1d(&x[1].unsqueeze(-1)?, Some(&x[2]), &Default::default())
    }),
];

fn a_leaf_used_several_times_gets_all_gradients(device: &Device) -> Result<()> {
    let values: Vec<f32> = (0..16).map(|i| (i * 7 % 16) as f32 * 0.1 - 0.7).collect();
    let leaves = || -> Result<Vec<Tensor>> {
        let leaf = |n: usize, shape: &[usize]| -> Result<Tensor> {
            Ok(Tensor::from_slice(&values[..n], shape, device)?.to_leaf()?)
        };
        Ok(vec![leaf(16, &[4, 4])?, leaf(4, &[4])?])
    };
    for &(name, indices, run) in ARGUMENT_OPS {
        // With separate leaves, each argument has its own gradient.
        let apart = leaves()?;
        let apart = indices.iter().map(|&k| Ok(apart[k].to_leaf()?)).collect::<Result<Vec<_>>>()?;
        run(&apart)?.square()?.sum_all()?.backward()?;
        let of = |leaf: usize| -> Result<Vec<f64>> {
            let mut sum = vec![0.0; [16, 4][leaf]];
            for (t, _) in apart.iter().zip(indices).filter(|(_, k)| **k == leaf) {
                let grad = t.grad().context("no gradient")?.to_f64s()?;
                sum.iter_mut().zip(grad).for_each(|(sum, g)| *sum += g);
            }
            Ok(sum)
        };
        let expected = [of(0)?, of(1)?];
        let again = move |x: &[Tensor]| run(x)?.square()?.sum_all();
        let check = |what: &str, times: f64, found: &dyn Fn(usize) -> Option<Tensor>| -> Result<()> {
            for leaf in [0, 1].into_iter().filter(|leaf| indices.contains(leaf)) {
                let grad = found(leaf).with_context(|| format!("{name}, {what}: no gradient"))?;
                let expected: Vec<f64> = expected[leaf].iter().map(|v| v * times).collect();
                ensure_close(&grad.to_f64s()?, &expected, 1e-5, 1e-5)
                    .with_context(|| format!("{name}, {what}: leaf {leaf}"))?;
            }
            Ok(())
        };
        let all = |of: &[Tensor]| indices.iter().map(|&k| of[k].clone()).collect::<Vec<_>>();
        let used = |of: &[Tensor]| {
            [0, 1].into_iter().filter(|k| indices.contains(k)).map(|k| of[k].clone()).collect::<Vec<_>>()
        };
        // A second path first gives each leaf a gradient, to which operations add in place.
        let known = |of: &[Tensor], loss: Tensor| -> CoreResult<Tensor> {
            used(of).iter().try_fold(loss, |loss, t| loss.add(&t.mul(0.0)?.sum_all()?))
        };

        let x = leaves()?;
        let loss = again(&all(&x))?;
        loss.backward_with(GradOptions::retain_graph())?;
        check("a first pass", 1.0, &|k| x[k].grad())?;
        loss.backward()?;
        check("a second pass", 2.0, &|k| x[k].grad())?;
        known(&x, again(&all(&x))?)?.backward()?;
        check("a third pass", 3.0, &|k| x[k].grad())?;

        for options in [GradOptions::default(), GradOptions::create_graph()] {
            let x = leaves()?;
            let loss = known(&x, again(&all(&x))?)?;
            // Each input is listed twice, and receives the whole gradient both times.
            let inputs = [used(&x), used(&x)].concat();
            let found = autograd::grad(&[loss], &inputs, &options)?;
            for half in found.chunks(inputs.len() / 2) {
                let at = |k: usize| half.get(if indices.contains(&0) { k } else { 0 }).cloned();
                check(if options.create_graph { "recorded" } else { "`grad`" }, 1.0, &at)?;
            }
            ensure!(x.iter().all(|t| t.grad().is_none()), "{name}: `grad` touched a leaf");
        }

        let x = leaves()?;
        for t in &x {
            t.register_hook(|g| g.mul(2.0).map(Some))?;
        }
        again(&all(&x))?.backward()?;
        check("a hook that doubles", 2.0, &|k| x[k].grad())?;

        // The leaves are inputs of a checkpoint first, then tensors that its function captures.
        let x = leaves()?;
        for _ in 0..2 {
            let inputs = all(&x);
            checkpoint(&inputs.iter().collect::<Vec<_>>(), again)?.backward()?;
        }
        check("inputs of checkpoints", 2.0, &|k| x[k].grad())?;
        let (captured, one) = (all(&x), Tensor::ones((), DType::F32, device)?);
        checkpoint(&[&one], move |_| again(&captured))?.backward()?;
        check("captured by a checkpoint", 3.0, &|k| x[k].grad())?;
        let captured = all(&x);
        let loss = known(&x, checkpoint(&[&one], move |_| again(&captured))?)?;
        let found = autograd::grad(&[loss], &used(&x), &GradOptions::default())?;
        check("`grad` of what a checkpoint captures", 1.0, &|k| {
            found.get(if indices.contains(&0) { k } else { 0 }).cloned()
        })?;
    }
    Ok(())
}

/// A program may pass a leaf's gradient to an operation or back into the backward pass, so accumulation must copy.
fn a_gradient_that_was_read_is_not_accumulated_into(device: &Device) -> Result<()> {
    let values: Vec<f32> = (0..16).map(|i| (i * 7 % 16) as f32 * 0.1 - 0.7).collect();
    let apart = || Tensor::from_slice(&values, [4, 4], device);
    let run = |x: &Tensor, seed: &Tensor, known: &Tensor| -> Result<Vec<f64>> {
        let w = apart()?.mul(0.5)?.to_leaf()?;
        let b = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
        w.set_grad(Some(known.clone()));
        x.linear(&w, Some(&b))?.backward_with(seed)?;
        Ok(w.grad().context("no gradient")?.to_f64s()?)
    };
    let expected = run(&apart()?, &apart()?, &apart()?)?;
    let known = apart()?;
    ensure_close(&run(&apart()?, &known, &known)?, &expected, 1e-5, 1e-5).context("the seed")?;
    let known = apart()?;
    ensure_close(&run(&known, &apart()?, &known)?, &expected, 1e-5, 1e-5).context("the input")
}

fn gradients_accumulate_in_place(device: &Device) -> Result<()> {
    let x = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
    let step = || -> Result<()> {
        let y = x.mul(3.0)?;
        Ok(y.backward_with(&y.ones_like()?)?)
    };
    step()?;
    let first = x.grad().context("no gradient")?;
    step()?;
    let second = x.grad().context("no gradient")?;
    ensure!(first.shares_storage(&second), "the second pass adds into the first gradient");
    ensure_values(&first, &[6.0; 4])?;
    x.set_grad(None);
    ensure!(x.grad().is_none());
    step()?;
    ensure_values(&x.grad().context("no gradient")?, &[3.0; 4])
}

fn gradients_of_parts_add_up(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3], device)?
            .to_dtype(dtype)?
            .to_leaf()?;
        let y = x.mul(2.0)?;
        // Parts that overlap, a transposed part, and the whole, whose gradient is an expanded number.
        let parts = [y.narrow(1, 0, 2)?.sum_all()?, y.select(1, -1)?.mul(3.0)?.sum_all()?];
        let more = [y.transpose(0, 1)?.narrow(0, 1, 1)?.square()?.sum_all()?, y.sum_all()?];
        let loss = parts.iter().chain(&more).skip(1).try_fold(parts[0].clone(), |sum, t| sum.add(t))?;
        let expected = [4.0, 20.0, 8.0, 4.0, 44.0, 8.0];
        // A pass that is recorded gives the same gradients.
        let recorded = autograd::grad(&[&loss], &[&x], &GradOptions::create_graph())?;
        ensure_values(&recorded[0], &expected)?;
        // A gradient that the program holds does not change.
        let held = autograd::grad(&[&loss], &[&y], &GradOptions::retain_graph())?;
        let before = held[0].to_f64s()?;
        loss.backward()?;
        ensure_values(&x.grad().context("no gradient")?, &expected)?;
        ensure_values(&held[0], &before)?;
    }
    Ok(())
}

/// The slices of a tensor write their gradients into one tensor, which is filled only where there is no slice.
fn gradients_of_slices_are_written_once(device: &Device) -> Result<()> {
    let shape = [2, 6, 3];
    let x = Tensor::rand(shape, DType::F32, device)?.to_leaf()?;
    // Start and length of each slice of the second dimension, and the launches that its gradient takes.
    let cases: [(&[[usize; 2]], usize); 5] = [
        (&[[0, 2], [2, 1], [3, 3]], 3),
        (&[[3, 3], [0, 2], [2, 1]], 3),
        // Two slices, and zeros at the end.
        (&[[2, 2], [0, 2]], 3),
        // Two slices, and zeros around them.
        (&[[1, 1], [3, 2]], 5),
        // The last slice is written, and the first adds, after zeros around the last.
        (&[[0, 4], [2, 2]], 4),
    ];
    for (slices, launches) in cases {
        for of_leaf in [false, true] {
            let y = if of_leaf { x.clone() } else { x.mul(2.0)? };
            let parts: Vec<Tensor> = slices
                .iter()
                .map(
                    |&[start, length]| {
                        if length == 1 { y.select(1, start as isize) } else { y.narrow(1, start, length) }
                    },
                )
                .collect::<CoreResult<_>>()?;
            let grads: Vec<Tensor> = parts
                .iter()
                .map(|part| Tensor::rand(part.shape(), DType::F32, device))
                .collect::<CoreResult<_>>()?;
            let mut expected = vec![0.0; 36];
            for (grad, &[start, length]) in grads.iter().zip(slices) {
                for (k, g) in grad.to_f64s()?.into_iter().enumerate() {
                    let (i, j, c) = (k / (3 * length), k / 3 % length, k % 3);
                    expected[(i * 6 + start + j) * 3 + c] += if of_leaf { g } else { 2.0 * g };
                }
            }
            // Memory that a gradient does not write has NaN.
            let options = GradOptions { grad_outputs: Some(&grads), ..GradOptions::retain_graph() };
            for checks in [false, true] {
                drop(Tensor::full([64], f64::NAN, DType::F32, device)?);
                drop(Tensor::full(shape, f64::NAN, DType::F32, device)?);
                let _anomaly = checks.then(autograd::detect_anomaly);
                let profiler = Profiler::start(device)?;
                let got = autograd::grad(&parts, &[&x], &options)?.swap_remove(0);
                let profile = profiler.finish()?;
                ensure_close(&got.to_f64s()?, &expected, 1e-6, 0.0)?;
                let seen = profile.spans.len();
                ensure!(checks || of_leaf || seen == launches + 1, "{slices:?}: {seen} launches\n{profile}");
            }
        }
    }
    Ok(())
}

/// The gradient of a rolled or reversed tensor moves the elements back, by one copy, and has a gradient itself.
fn gradients_of_rolled_and_reversed_tensors_are_one_copy(device: &Device) -> Result<()> {
    type Move = fn(&Tensor) -> CoreResult<Tensor>;
    let moves: [(Move, Move); 5] = [
        (|x| x.roll(2, 1), |x| x.roll(-2, 1)),
        (|x| x.roll(-7, 0), |x| x.roll(7, 0)),
        (|x| x.roll(0, 2), |x| x.roll(0, 2)),
        (|x| x.roll(3, 0), |x| x.roll(0, 0)),
        (|x| x.flip([1]), |x| x.flip([1])),
    ];
    for (k, (there, back)) in moves.into_iter().enumerate() {
        let x = Tensor::rand([3, 5, 4], DType::F32, device)?.to_leaf()?;
        let g = Tensor::rand([3, 5, 4], DType::F32, device)?;
        let y = there(&x)?;
        let profiler = Profiler::start(device)?;
        y.backward_with(&g)?;
        let profile = profiler.finish()?;
        // A reversed order is a constant, which is uploaded once.
        let launches = profile.spans.iter().filter(|span| !span.name.contains("upload")).count();
        ensure!(launches == 1, "move {k}: {profile}");
        ensure_same_bits(&x.grad().context("a gradient")?, &back(&g)?)?;
        let options =
            GradOptions { grad_outputs: Some(&[g.to_leaf()?]), create_graph: true, ..Default::default() };
        let once = autograd::grad(&[there(&x)?.square()?], &[&x], &options)?.swap_remove(0);
        let twice = autograd::grad(&[once.sum_all()?], &[&x], &GradOptions::default())?.swap_remove(0);
        ensure_close(&twice.to_f64s()?, &back(&g.mul(2.0)?)?.to_f64s()?, 1e-6, 0.0)?;
    }
    Ok(())
}

fn no_grad_stops_recording(device: &Device) -> Result<()> {
    let x = Tensor::ones([2], DType::F32, device)?.to_leaf()?;
    {
        let _guard = autograd::no_grad();
        ensure!(!x.exp()?.requires_grad() && x.requires_grad());
        x.add_(1.0)?;
        let _inner = autograd::enable_grad();
        ensure!(x.exp()?.requires_grad());
    }
    ensure!(x.exp()?.requires_grad() && autograd::is_grad_enabled());
    ensure_values(&x, &[2.0; 2])
}

fn frozen_leaves_have_no_gradient(device: &Device) -> Result<()> {
    let x = Tensor::ones([2, 3], DType::F32, device)?;
    let (body, head) = (Linear::new(3, 4, device)?, Linear::new(4, 2, device)?);
    let has = |net: &Linear| net.parameters().iter().filter(|p| p.grad().is_some()).count();
    let pass = |x: &Tensor| head.forward(&body.forward(x)?.tanh()?)?.sum_all()?.backward();
    pass(&x)?;
    ensure!((has(&body), has(&head)) == (2, 2));
    let names = body.state_dict().into_keys().collect::<Vec<_>>();
    body.requires_grad_(false);
    ensure!(has(&body) == 0, "a frozen parameter keeps its gradient");
    ensure!(body.parameters().len() == 2 && body.state_dict().into_keys().eq(names), "they stay parameters");
    // Operations on frozen parameters are not recorded, even through another handle.
    ensure!(!body.weight.clone().requires_grad() && !body.forward(&x)?.requires_grad());
    let mut optimizer = AdamW::new([body.parameters(), head.parameters()].concat(), 0.1);
    let before = body.weight.to_vec::<f32>()?;
    pass(&x)?;
    optimizer.step()?;
    ensure!((has(&body), has(&head)) == (0, 2) && body.weight.to_vec::<f32>()? == before);
    // Gradients pass through the frozen layer to earlier inputs.
    let input = x.to_leaf()?;
    pass(&input)?;
    ensure!(has(&body) == 0 && input.grad().is_some());
    ensure!(
        autograd::grad(
            &[body.forward(&input)?.sum_all()?],
            std::slice::from_ref(&body.weight),
            &GradOptions::default()
        )
        .is_err()
    );
    body.requires_grad_(true);
    pass(&x)?;
    ensure!(has(&body) == 2);
    Ok(())
}

/// A recorded write outdates histories, and a constant has none.
fn a_constant_that_was_written_before_becomes_a_leaf(device: &Device) -> Result<()> {
    let x = Tensor::ones([3], DType::F32, device)?;
    let constant = x.detach();
    x.add_(&Tensor::ones([3], DType::F32, device)?.to_leaf()?)?;
    constant.requires_grad_(true)?;
    constant.square()?.sum_all()?.backward()?;
    ensure_values(&constant.grad().context("no gradient")?, &[4.0, 4.0, 4.0])
}

fn requires_grad_changes_the_tensor_itself(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, -2.0, 3.0], [3], device)?;
    let other = x.clone();
    ensure!(!x.requires_grad_(false)?.requires_grad(), "a tensor without history stays one");
    x.requires_grad_(true)?;
    ensure!(x.is_leaf() && other.requires_grad(), "a clone is the same tensor");
    let y = x.square()?;
    y.sum_all()?.backward()?;
    ensure!(other.grad().map(|g| g.to_vec::<f32>()).transpose()? == Some(vec![2.0, -4.0, 6.0]));
    // A view becomes a leaf of its own.
    let base = Tensor::ones([2, 3], DType::F32, device)?;
    let row = base.select(0, 1)?.requires_grad_(true)?;
    row.mul(&row)?.sum_all()?.backward()?;
    ensure!(row.grad().is_some() && !base.requires_grad());
    ensure!(row.add_(1.0).is_err(), "a leaf is not changed in place");
    // An operation's result always requires a gradient.
    ensure!(y.requires_grad_(true)?.requires_grad() && y.requires_grad_(false).is_err());
    ensure!(Tensor::zeros([2], DType::I32, device)?.requires_grad_(true).is_err());
    // Freezing frees the gradient, and a frozen leaf thaws.
    ensure!(!x.requires_grad_(false)?.requires_grad() && x.grad().is_none());
    ensure!(!x.square()?.requires_grad() && x.requires_grad_(true)?.square()?.requires_grad());
    Ok(())
}

fn detach_stops_gradients(device: &Device) -> Result<()> {
    let x = Tensor::full([2], 3.0, DType::F32, device)?.to_leaf()?;
    let y = x.mul(&x.detach())?;
    y.backward_with(&y.ones_like()?)?;
    ensure_values(&x.grad().context("no gradient")?, &[3.0; 2])
}

fn a_graph_runs_backward_once(device: &Device) -> Result<()> {
    let x = Tensor::ones([1], DType::F32, device)?.to_leaf()?;
    let y = x.exp()?;
    y.backward()?;
    ensure!(matches!(y.backward(), Err(Error::Backward { .. })));
    // A second graph through the same leaf is independent.
    x.exp()?.backward()?;
    Ok(())
}

fn a_retained_graph_runs_backward_again(device: &Device) -> Result<()> {
    let x = Tensor::full([1], 2.0, DType::F32, device)?.to_leaf()?;
    let y = x.mul(&x)?;
    y.backward_with(GradOptions::retain_graph())?;
    y.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[8.0])
}

fn grad_does_not_change_leaves(device: &Device) -> Result<()> {
    let x = Tensor::full([1], 2.0, DType::F32, device)?.to_leaf()?;
    let other = Tensor::full([1], 2.0, DType::F32, device)?.to_leaf()?;
    let y = x.mul(&x)?;
    let grads = autograd::grad_allow_unused(&[y], &[x.clone(), other], &GradOptions::default())?;
    ensure_values(grads[0].as_ref().context("no gradient")?, &[4.0])?;
    ensure!(grads[1].is_none() && x.grad().is_none());
    Ok(())
}

fn long_chains_do_not_overflow_the_stack(device: &Device) -> Result<()> {
    let device = if device.info().software { Device::null(Default::default()) } else { device.clone() };
    let x = Tensor::ones([1], DType::F32, &device)?.to_leaf()?;
    let mut y = x.clone();
    for _ in 0..20_000 {
        y = y.add(1.0)?;
    }
    y.backward()?;
    ensure!(x.grad().is_some());
    let mut dropped = x.exp()?;
    for _ in 0..20_000 {
        dropped = dropped.add(1.0)?;
    }
    drop(dropped);
    Ok(())
}

/// Block with dropout.
fn block(x: &Tensor, w: &Tensor) -> forebay::error::Result<Tensor> {
    x.matmul(w)?.gelu()?.dropout(0.25, true)?.mul(x)
}

/// Returns loss and gradients of two blocks, run by `wrap`.
fn two_blocks(
    device: &Device,
    wrap: fn(&Tensor, &Tensor) -> forebay::error::Result<Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    device.manual_seed(77);
    let x = Tensor::randn([16, 16], DType::F32, device)?.to_leaf()?;
    let w = Tensor::randn([16, 16], DType::F32, device)?.to_leaf()?;
    let y = wrap(&wrap(&x, &w)?, &w)?;
    // Random numbers drawn between forward and backward must not matter, and must not change.
    let drawn = Tensor::rand([5], DType::F32, device)?;
    y.backward_with(&y.ones_like()?)?;
    let after = Tensor::rand([5], DType::F32, device)?;
    ensure!(drawn.to_bytes()? != after.to_bytes()?);
    let state = device.random_state();
    ensure!(state.offset == 64 + 64 + 64 + 64 + 2 + 2, "the random state is {}", state.offset);
    Ok((y.detach(), x.grad().context("no gradient of x")?, w.grad().context("no gradient of w")?))
}

fn a_checkpoint_gives_the_same_bits(device: &Device) -> Result<()> {
    let plain = two_blocks(device, block)?;
    let kept = two_blocks(device, |x, w| checkpoint(&[x, w], |inputs| block(&inputs[0], &inputs[1])))?;
    ensure_same_bits(&kept.0, &plain.0).context("result")?;
    ensure_same_bits(&kept.1, &plain.1).context("gradient of x")?;
    ensure_same_bits(&kept.2, &plain.2).context("gradient of w")
}

fn checkpoints_nest(device: &Device) -> Result<()> {
    let plain = two_blocks(device, block)?;
    let kept = two_blocks(device, |x, w| {
        checkpoint(&[x, w], |outer| checkpoint(&[&outer[0], &outer[1]], |inner| block(&inner[0], &inner[1])))
    })?;
    ensure_same_bits(&kept.0, &plain.0).context("result")?;
    ensure_same_bits(&kept.1, &plain.1).context("gradient of x")?;
    ensure_same_bits(&kept.2, &plain.2).context("gradient of w")
}

fn a_checkpoint_reaches_captured_parameters(device: &Device) -> Result<()> {
    let plain = two_blocks(device, block)?;
    let captured = two_blocks(device, |x, w| {
        let w = w.clone();
        checkpoint(&[x], move |inputs| block(&inputs[0], &w))
    })?;
    ensure_same_bits(&captured.2, &plain.2).context("gradient of w")?;
    // This also holds if no listed input requires a gradient.
    let w = Tensor::full([2], 3.0, DType::F32, device)?.to_leaf()?;
    let x = Tensor::full([2], 5.0, DType::F32, device)?;
    let inner = w.clone();
    let y = checkpoint(&[&x], move |inputs| inputs[0].mul(&inner))?;
    y.backward_with(&y.ones_like()?)?;
    ensure_values(&w.grad().context("no gradient")?, &[5.0; 2])
}

/// Captured results with other uses and hooks have the same gradients, whatever the order of nodes in the graph.
fn captured_tensors_of_a_checkpoint_share_the_backward_pass(device: &Device) -> Result<()> {
    let values = [0.3f32, -0.7, 1.1];
    // Returns the loss, the captured result, and the number of calls of its hook.
    let build = |x: &Tensor, again: bool| -> Result<(Tensor, Tensor, Arc<AtomicUsize>)> {
        let h = x.exp()?;
        let calls = Arc::new(AtomicUsize::new(0));
        let count = calls.clone();
        h.register_hook(move |g| {
            count.fetch_add(1, Ordering::Relaxed);
            g.mul(2.0).map(Some)
        })?;
        let (z, held) = (x.mul(3.0)?, h.clone());
        let body = move |z: &[Tensor]| z[0].mul(&held)?.sin()?.mul(&held);
        let y = match again {
            // Nested checkpoints, with the captured result also as an input.
            true => checkpoint(&[&z, &h], move |z| checkpoint(&[&z[0]], body.clone())?.mul(&z[1]))?,
            false => body(&[z])?.mul(&h)?,
        };
        Ok((y.add(&h)?.sum_all()?, h, calls))
    };
    let leaf = || -> Result<Tensor> { Ok(Tensor::from_slice(&values, [3], device)?.to_leaf()?) };
    let run = |again: bool| -> Result<Vec<Vec<f64>>> {
        let mut found = Vec::new();
        let x = leaf()?;
        let (loss, _, calls) = build(&x, again)?;
        loss.backward_with(GradOptions::retain_graph())?;
        found.push(x.grad().context("no gradient")?.to_f64s()?);
        loss.backward()?;
        found.push(x.grad().context("no gradient")?.to_f64s()?);
        ensure!(calls.load(Ordering::Relaxed) == 2, "the hook saw parts of the gradient");
        for options in [GradOptions::default(), GradOptions::create_graph()] {
            let x = leaf()?;
            let (loss, h, _) = build(&x, again)?;
            let grads = autograd::grad(&[loss], &[h, x.clone()], &options)?;
            for grad in &grads {
                found.push(grad.to_f64s()?);
            }
            if options.create_graph {
                grads[1].square()?.sum_all()?.backward()?;
                found.push(x.grad().context("no second gradient")?.to_f64s()?);
            }
        }
        Ok(found)
    };
    for (k, (again, plain)) in run(true)?.iter().zip(run(false)?).enumerate() {
        ensure_close(again, &plain, 1e-4, 1e-5).with_context(|| format!("gradient {k}"))?;
    }
    // A leaf with a hook that is reachable only through the captured tensor.
    let x = leaf()?;
    x.register_hook(|g| g.mul(2.0).map(Some))?;
    let (h, one) = (x.exp()?, Tensor::ones((), DType::F32, device)?);
    checkpoint(&[&one], move |one| h.mul(&one[0])?.mul(&h)?.sum_all())?.backward()?;
    let expected: Vec<f64> = values.iter().map(|&v| 4.0 * (2.0 * f64::from(v)).exp()).collect();
    ensure_close(&x.grad().context("no gradient")?.to_f64s()?, &expected, 1e-5, 1e-5)?;
    // Changing a captured tensor is an error, not a wrong gradient.
    let x = leaf()?;
    let h = x.mul(2.0)?;
    let held = h.clone();
    let y = checkpoint(&[&x], move |x| x[0].mul(&held))?;
    h.add_(1.0)?;
    let error = y.sum_all()?.backward().err().context("a changed tensor was used")?.to_string();
    ensure!(
        error.contains("`checkpoint`") && error.contains("captures a tensor that was changed"),
        "{error}"
    );
    Ok(())
}

fn grad_goes_through_checkpoints(device: &Device) -> Result<()> {
    let w = Tensor::full([2], 3.0, DType::F32, device)?.to_leaf()?;
    let x = Tensor::full([2], 5.0, DType::F32, device)?.to_leaf()?;
    let inner = w.clone();
    let y = checkpoint(&[&x], move |outer| {
        let inner = inner.clone();
        checkpoint(&[&outer[0]], move |inputs| inputs[0].mul(&inner)?.mul(&inner))
    })?;
    let seeds = [y.ones_like()?];
    let options = GradOptions { grad_outputs: Some(&seeds), ..GradOptions::default() };
    let found = autograd::grad(&[y], &[x.clone(), w.clone()], &options)?;
    ensure_values(&found[0], &[9.0; 2])?;
    ensure_values(&found[1], &[30.0; 2])?;
    ensure!(x.grad().is_none() && w.grad().is_none(), "the leaves got gradients");
    Ok(())
}

fn saved_tensors_are_freed_during_backward(device: &Device) -> Result<()> {
    let x = Tensor::ones([1 << 16], DType::F32, device)?.to_leaf()?;
    let seed = Tensor::ones([1 << 16], DType::F32, device)?;
    let before = device.memory().allocated();
    let mut y = x.clone();
    for _ in 0..10 {
        y = y.tanh()?;
    }
    let forward = device.memory().allocated() - before;
    device.pool().reset_peak_stats();
    y.backward_with(&seed)?;
    let peak = device.memory().peak_allocated() - before;
    let one = 4 << 16;
    ensure!(forward == 10 * one, "each tanh keeps its result: {forward} bytes");
    ensure!(peak <= forward + 3 * one, "the backward pass peaks at {peak} bytes over {forward}");
    drop(y);
    ensure!(device.memory().allocated() - before == one, "only the gradient stays");
    Ok(())
}

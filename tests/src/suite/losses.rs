//! Cross-entropy at the sizes and layouts where kernels change, in place, and fused with the preceding layer;
//! gradients of embedding tables.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{self, GradOptions};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::{CrossEntropyOptions, CtcLossOptions, MultiMarginLossOptions, NllLossOptions, Reduction};
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

super::tests![
    cross_entropy_of_many_classes,
    cross_entropy_over_its_logits,
    cross_entropy_sees_nan,
    losses_of_invalid_classes_are_nan,
    linear_cross_entropy_equals_its_composition,
    a_batch_mean_divides_by_the_first_extent,
    linear_cross_entropy_under_autocast,
    linear_cross_entropy_is_captured,
    invalid_arguments_of_linear_cross_entropy_are_refused,
    gradients_of_embedding_tables_are_summed_in_order,
    margins_that_are_met_exactly_have_no_gradient,
    sequences_without_steps,
    ctc_of_more_states_than_threads,
];

fn losses_of_invalid_classes_are_nan(device: &Device) -> Result<()> {
    let x = uniform(&[3, 4], device)?;
    for class in [-1, 4, 1_000_000_000] {
        let target = Tensor::from_slice(&[0, class, -100], [3], device)?;
        let losses = x
            .log_softmax(-1)?
            .nll_loss(&target, &NllLossOptions { reduction: Reduction::None, ..Default::default() })?
            .to_vec::<f32>()?;
        let sound = losses[0].is_finite() && losses[1].is_nan() && losses[2] == 0.0;
        ensure!(sound && x.cross_entropy(&target)?.item()?.is_nan(), "{class}: {losses:?}");
    }
    Ok(())
}

fn uniform(shape: &[usize], device: &Device) -> Result<Tensor> {
    Ok(Tensor::rand(shape, DType::F32, device)?.sub(0.5)?)
}

/// Returns classes for `n` examples, of which every seventh is ignored.
fn classes(n: usize, classes: usize, device: &Device) -> Result<Tensor> {
    let of = |i: usize| if i % 7 == 5 { -100 } else { (i * 7919 % classes) as i64 };
    Ok(Tensor::from_slice(&(0..n).map(of).collect::<Vec<_>>(), [n], device)?)
}

fn close(what: &str, got: &Tensor, expected: &Tensor, within: f32) -> Result<()> {
    ensure!(got.shape() == expected.shape(), "{what}: {:?}, not {:?}", got.shape(), expected.shape());
    let f32s = |t: &Tensor| t.detach().to_dtype(DType::F32)?.to_vec::<f32>();
    for (k, (g, e)) in f32s(got)?.into_iter().zip(f32s(expected)?).enumerate() {
        ensure!((g - e).abs() <= within * (1.0 + e.abs()), "{what}: element {k} is {g}, not {e}");
    }
    Ok(())
}

/// Computes the mean loss by plain operations.
fn plain(logits: &Tensor, target: &Tensor, options: &CrossEntropyOptions<'_>) -> Result<Tensor> {
    let log = logits.log_softmax(-1)?.neg()?;
    let kept = target.ne(options.ignore_index)?.to_dtype(DType::F32)?;
    let some = target.masked_fill(&target.eq(options.ignore_index)?, 0)?;
    let own = log.gather(1, &some.unsqueeze(1)?)?.squeeze(1)?;
    let spread = log.mean([1], false)?;
    let e = options.label_smoothing;
    let loss = own.mul(1.0 - e)?.add(&spread.mul(e)?)?.mul(&kept)?.sum_all()?;
    Ok(match options.reduction {
        Reduction::Mean => loss.div(&kept.sum_all()?)?,
        _ => loss,
    })
}

fn grad(t: &Tensor) -> Result<Tensor> {
    t.grad().context("there is a gradient")
}

fn cross_entropy_of_many_classes(device: &Device) -> Result<()> {
    super::require_dtype(device, DType::I64)?;
    for (rows, extent) in [(9, 3), (5, 64), (2, 5000), (2, 5001)] {
        let x = uniform(&[rows, extent], device)?.mul(8.0)?;
        let target = classes(rows, extent, device)?;
        for label_smoothing in [0.0, 0.2] {
            let options = CrossEntropyOptions { label_smoothing, ..CrossEntropyOptions::default() };
            let name = format!("{rows} of {extent}, smoothed by {label_smoothing}");
            let (leaf, other) = (x.to_leaf()?, x.to_leaf()?);
            let (loss, expected) =
                (leaf.cross_entropy_with(&target, &options)?, plain(&other, &target, &options)?);
            close(&name, &loss, &expected, 1e-5)?;
            loss.backward()?;
            expected.backward()?;
            close(&format!("{name}, gradient"), &grad(&leaf)?, &grad(&other)?, 1e-5)?;
            for dtype in [DType::BF16, DType::F16].into_iter().filter(|_| label_smoothing == 0.0) {
                let low = x.to_dtype(dtype)?.to_leaf()?;
                let wide = low.detach().to_dtype(DType::F32)?.to_leaf()?;
                low.cross_entropy_with(&target, &options)?.backward()?;
                wide.cross_entropy_with(&target, &options)?.backward()?;
                close(&format!("{name}, {dtype}"), &grad(&low)?, &grad(&wide)?, 4e-3)?;
            }
        }
    }
    Ok(())
}

fn cross_entropy_over_its_logits(device: &Device) -> Result<()> {
    for (extent, dtype) in [(100, DType::F32), (101, DType::BF16), (64, DType::F16)] {
        let x = uniform(&[6, extent], device)?.to_dtype(dtype)?;
        let target = classes(6, extent, device)?;
        let (leaf, other) = (x.to_leaf()?, x.to_leaf()?);
        other.mul(2.0)?.cross_entropy(&target)?.backward()?;
        let logits = leaf.mul(2.0)?;
        let before = device.memory().allocated();
        let options = CrossEntropyOptions { in_place: true, ..CrossEntropyOptions::default() };
        let loss = logits.cross_entropy_with(&target, &options)?;
        drop(logits);
        loss.backward()?;
        drop(loss);
        let name = format!("{extent} {dtype}");
        close(&name, &grad(&leaf)?, &grad(&other)?, 0.0)?;
        let after = device.memory().allocated();
        ensure!(
            after <= before,
            "{name}: the gradient does not overwrite the logits: {after} bytes after {before}"
        );
    }
    Ok(())
}

fn cross_entropy_sees_nan(device: &Device) -> Result<()> {
    let target = Tensor::from_slice(&[1i32, 2, 3], [3], device)?;
    let each = CrossEntropyOptions { reduction: Reduction::None, ..CrossEntropyOptions::default() };
    // Vectorised and scalar kernels; 16-bit values are compared in pairs.
    for (dtype, extent) in
        [DType::F32, DType::BF16, DType::F16].into_iter().flat_map(|dtype| [(dtype, 64), (dtype, 4097)])
    {
        for (index, nan) in [(6, f32::NAN), (7, -f32::NAN), (extent - 1, f32::NAN)] {
            let mut values = vec![0.5f32; 3 * extent];
            values[extent + index] = nan;
            let x = Tensor::from_slice(&values, [3, extent], device)?.to_dtype(dtype)?.to_leaf()?;
            let losses = x.cross_entropy_with(&target, &each)?;
            losses.sum_all()?.backward()?;
            let name = format!("{extent} {dtype}, NaN at {index}");
            let seen = |t: &Tensor| -> Result<Vec<bool>> {
                Ok(t.to_dtype(DType::F32)?.to_vec::<f32>()?.iter().map(|v| v.is_nan()).collect())
            };
            ensure!(seen(&losses)? == [false, true, false], "{name}: {:?}", seen(&losses)?);
            let rows = seen(&grad(&x)?)?;
            let found: Vec<usize> =
                rows.chunks(extent).map(|row| row.iter().filter(|v| **v).count()).collect();
            ensure!(found == [0, extent, 0], "{name}, gradient: {found:?} are NaN");
        }
    }
    // Fused loss and gradient, with rows that fit into workgroup memory and rows that do not.
    for (dtype, classes) in
        [DType::F32, DType::BF16].into_iter().flat_map(|dtype| [(dtype, 96), (dtype, 4096)])
    {
        let weight = uniform(&[classes, 4], device)?.to_dtype(dtype)?.to_leaf()?;
        let mut values = [0.25f32; 12];
        values[5] = f32::NAN;
        let x = Tensor::from_slice(&values, [3, 4], device)?.to_dtype(dtype)?.to_leaf()?;
        let loss = x.linear_cross_entropy(&weight, &target, &CrossEntropyOptions::default())?;
        ensure!(loss.item()?.is_nan(), "{classes} {dtype}: the loss is a number");
        loss.backward()?;
        let found: Vec<bool> =
            grad(&x)?.to_dtype(DType::F32)?.to_vec::<f32>()?.iter().map(|v| v.is_nan()).collect();
        let expected: Vec<bool> = (0..12).map(|i| i / 4 == 1).collect();
        ensure!(found == expected, "{classes} {dtype}: {found:?}");
    }
    Ok(())
}

fn linear_cross_entropy_equals_its_composition(device: &Device) -> Result<()> {
    super::require_dtype(device, DType::I64)?;
    // Several chunks: of 1 MiB on a software driver, else of 256 MiB.
    let many = if device.info().software { (600, 4, 1001) } else { (2200, 4, 40_001) };
    for (n, features, count) in [(5, 8, 10), (3, 7, 65), many] {
        let (x, weight) = (uniform(&[n, features], device)?, uniform(&[count, features], device)?);
        let target = classes(n, count, device)?;
        for (reduction, label_smoothing) in [(Reduction::Mean, 0.0), (Reduction::Sum, 0.1)] {
            if n > 100 && label_smoothing > 0.0 {
                continue;
            }
            let options =
                CrossEntropyOptions { reduction, label_smoothing, ..CrossEntropyOptions::default() };
            let name = format!("{n} x {features} x {count}, {reduction:?}");
            let leaves = [x.to_leaf()?, weight.to_leaf()?];
            let others = [x.to_leaf()?, weight.to_leaf()?];
            let loss = leaves[0].linear_cross_entropy(&leaves[1], &target, &options)?;
            let expected = others[0].linear(&others[1], None)?.cross_entropy_with(&target, &options)?;
            close(&name, &loss, &expected, 1e-5)?;
            loss.mul(3.0)?.backward()?;
            ensure!(loss.backward().is_err(), "{name}: the graph was not retained");
            expected.mul(3.0)?.backward()?;
            for (got, expected) in leaves.iter().zip(&others) {
                close(&format!("{name}, gradient"), &grad(got)?, &grad(expected)?, 1e-5)?;
            }
            // Gradients accumulate, and a single one can be requested.
            let frozen = x.linear_cross_entropy(&leaves[1], &target, &options)?;
            frozen.mul(3.0)?.backward()?;
            close(&format!("{name}, twice"), &grad(&leaves[1])?, &grad(&others[1])?.mul(2.0)?, 1e-5)?;
        }
    }
    Ok(())
}

/// Losses of targets [2, 3]: their sum over 2, with and without the layer, and the gradient of the gradient.
fn a_batch_mean_divides_by_the_first_extent(device: &Device) -> Result<()> {
    let (x, weight) = (uniform(&[2, 3, 4], device)?, uniform(&[5, 4], device)?);
    let target = classes(6, 5, device)?.reshape([2, 3])?;
    let reduce = |reduction| CrossEntropyOptions { reduction, ..CrossEntropyOptions::default() };
    let [mean, sum] = [Reduction::BatchMean, Reduction::Sum].map(reduce);
    let logits = |x: &Tensor| x.linear(&weight, None)?.transpose(1, 2);
    let expected = logits(&x)?.cross_entropy_with(&target, &sum)?.div(2.0)?;
    close("of logits", &logits(&x)?.cross_entropy_with(&target, &mean)?, &expected, 1e-6)?;
    close("of a layer", &x.linear_cross_entropy(&weight, &target, &mean)?, &expected, 1e-6)?;
    let log = logits(&x)?.log_softmax(1)?;
    let options = NllLossOptions { reduction: Reduction::BatchMean, ..Default::default() };
    close("of log-probabilities", &log.nll_loss(&target, &options)?, &expected, 1e-6)?;
    let second = |options: &CrossEntropyOptions<'_>, factor: f64| -> Result<[Tensor; 2]> {
        let leaf = x.to_leaf()?;
        let loss = leaf.linear_cross_entropy(&weight, &target, options)?.mul(factor)?;
        let first = autograd::grad(&[&loss], &[&leaf], &GradOptions::create_graph())?.remove(0);
        first.square()?.sum_all()?.backward()?;
        Ok([first.detach(), grad(&leaf)?])
    };
    for (got, expected) in second(&mean, 1.0)?.iter().zip(&second(&sum, 0.5)?) {
        close("gradients", got, expected, 1e-5)?;
    }
    Ok(())
}

fn linear_cross_entropy_under_autocast(device: &Device) -> Result<()> {
    // Rows shared by a few threads, and rows that fit into large workgroup memory, also padded ones.
    [(50, 0.0), (2500, 0.0), (4001, 0.1), (50_304, 0.0)]
        .into_iter()
        .filter(|&(count, _)| count < 10_000 || !device.info().software)
        .try_for_each(|(count, smoothing)| autocast_loss(count, smoothing, device))
}

fn autocast_loss(count: usize, label_smoothing: f64, device: &Device) -> Result<()> {
    let (x, weight) = (uniform(&[2, 3, 16], device)?, uniform(&[count, 16], device)?);
    let target = classes(6, count, device)?.reshape([2, 3])?;
    let options = CrossEntropyOptions { label_smoothing, ..CrossEntropyOptions::default() };
    let run = |fused: bool| -> Result<(Tensor, [Tensor; 2])> {
        let leaves = [x.to_leaf()?, weight.to_leaf()?];
        let loss = {
            let _autocast = autocast(DType::BF16)?;
            if fused {
                leaves[0].linear_cross_entropy(&leaves[1], &target, &options)?
            } else {
                let logits = leaves[0].linear(&leaves[1], None)?;
                logits.reshape([6, count])?.cross_entropy_with(&target.reshape([6])?, &options)?
            }
        };
        loss.backward()?;
        Ok((loss.detach(), [grad(&leaves[0])?, grad(&leaves[1])?]))
    };
    let (got, expected) = (run(true)?, run(false)?);
    close(&format!("the loss of {count} classes"), &got.0, &expected.0, 1e-5)?;
    for (got, expected) in got.1.iter().zip(&expected.1) {
        ensure!(got.dtype() == DType::F32, "gradients of f32 leaves are f32, not {}", got.dtype());
        close(&format!("a gradient of {count} classes"), got, expected, 1e-3)?;
    }
    Ok(())
}

fn linear_cross_entropy_is_captured(device: &Device) -> Result<()> {
    // Rows in workgroup memory; on a GPU, launches have to request this much.
    let count = if device.info().software { 4001 } else { 50_304 };
    let (x, weight) = (uniform(&[6, 16], device)?, uniform(&[count, 16], device)?.to_leaf()?);
    let target = classes(6, count, device)?;
    let step = || -> forebay::error::Result<Tensor> {
        weight.set_grad(None);
        let _autocast = autocast(DType::BF16)?;
        let loss = x.linear_cross_entropy(&weight, &target, &CrossEntropyOptions::default())?;
        loss.backward()?;
        weight.grad().map_or_else(|| Ok(loss.clone()), |g| g.square()?.sum_all()?.add(&loss))
    };
    let mut captured = device.capture(step)?;
    for factor in [1.0, 0.5] {
        x.mul_(factor)?;
        let expected = step()?.item()?;
        for _ in 0..2 {
            let got = captured.replay()?.item()?;
            ensure!(got == expected, "{got}, not {expected}, after a change by {factor}");
        }
    }
    Ok(())
}

fn invalid_arguments_of_linear_cross_entropy_are_refused(device: &Device) -> Result<()> {
    let (x, weight) = (uniform(&[4, 8], device)?, uniform(&[10, 8], device)?);
    let target = classes(4, 10, device)?;
    let options = CrossEntropyOptions::default();
    let none = CrossEntropyOptions { reduction: Reduction::None, ..options };
    ensure!(x.linear_cross_entropy(&weight, &target, &none).is_err(), "a loss for each example");
    ensure!(x.linear_cross_entropy(&weight, &x, &options).is_err(), "probabilities");
    ensure!(x.linear_cross_entropy(&weight.t()?, &target, &options).is_err(), "a transposed weight");
    ensure!(x.linear_cross_entropy(&weight, &target.narrow(0, 0, 3)?, &options).is_err(), "too few classes");
    Ok(())
}

fn gradients_of_embedding_tables_are_summed_in_order(device: &Device) -> Result<()> {
    for (n, entries, width) in [(1, 3, 4), (50, 7, 5), (3000, 40, 12), (2500, 2, 1028), (300, 900, 64)] {
        let at = |i: usize| if i % 11 == 3 { -1 } else { (i * i * 31 % entries) as i32 };
        let index: Vec<i32> = (0..n).map(at).collect();
        let g = uniform(&[n, width], device)?;
        let host = g.to_vec::<f32>()?;
        let mut sums = vec![0f64; entries * width];
        for (i, &row) in index.iter().enumerate() {
            // Negative indices are ignored.
            let Ok(row) = usize::try_from(row) else { continue };
            for c in 0..width {
                sums[row * width + c] += f64::from(host[i * width + c]);
            }
        }
        let expected: Vec<f32> = sums.iter().map(|&v| v as f32).collect();
        let expected = Tensor::from_slice(&expected, [entries, width], device)?;
        let index = Tensor::from_slice(&index, [n], device)?;
        let name = format!("{n} of {entries} x {width}");
        let table = uniform(&[entries, width], device)?.to_leaf()?;
        table.embedding(&index, None)?.backward_with(&g)?;
        close(&name, &grad(&table)?, &expected, 1e-4)?;
        let first = grad(&table)?.to_vec::<f32>()?;
        table.embedding(&index, Some(1))?.backward_with(&g)?;
        let second = grad(&table)?.to_vec::<f32>()?;
        for (k, (a, b)) in first.iter().zip(&second).enumerate() {
            let skipped = k / width == 1;
            let doubled = (b - 2.0 * a).abs() <= 1e-4 * (1.0 + a.abs());
            ensure!(if skipped { a == b } else { doubled }, "{name}: element {k} goes from {a} to {b}");
        }
        let again = table.detach().to_leaf()?;
        again.embedding(&index, None)?.backward_with(&g)?;
        ensure!(grad(&again)?.to_vec::<f32>()? == first, "{name}: two runs give the same bits");
        let low = table.detach().to_dtype(DType::BF16)?.to_leaf()?;
        low.embedding(&index, None)?.backward_with(&g.to_dtype(DType::BF16)?)?;
        close(&format!("{name}, bf16"), &grad(&low)?, &expected, 4e-2)?;
    }
    Ok(())
}

/// Margin losses have gradients only where they exceed 0, as in PyTorch.
fn margins_that_are_met_exactly_have_no_gradient(device: &Device) -> Result<()> {
    let leaf = |x: &[f32]| -> Result<Tensor> { Ok(Tensor::from_slice(x, [1, x.len()], device)?.to_leaf()?) };
    let x = leaf(&[0.0, 1.0, 0.5])?;
    let own = Tensor::from_slice(&[1i32], [1], device)?;
    for p in [1, 2] {
        x.set_grad(None);
        x.multi_margin_loss(&own, &MultiMarginLossOptions { p, ..Default::default() })?.backward()?;
        super::host_reference::ensure_close(&grad(&x)?.to_f64s()?, &[0.0, -1.0 / 3.0, 1.0 / 3.0], 1e-6, 0.0)?;
    }
    let x = leaf(&[0.0, 1.0, 0.0, 2.0])?;
    let labels = Tensor::from_slice(&[1i32, -1, -1, 0], [1, 4], device)?;
    x.multilabel_margin_loss(&labels, Reduction::Mean)?.backward()?;
    super::host_reference::ensure_values(&grad(&x)?, &[0.0, -0.25, 0.0, 0.25])
}

/// Without time steps, the empty label sequence has probability 1 and every other 0, as in PyTorch.
fn sequences_without_steps(device: &Device) -> Result<()> {
    let x = Tensor::rand([4, 3, 5], DType::F32, device)?.to_leaf()?;
    let labels = Tensor::from_slice(&[1i32, 2, 2, 3, 1, 1], [3, 2], device)?;
    let steps = Tensor::from_slice(&[0i32, 4, 0], [3], device)?;
    let counts = Tensor::from_slice(&[0i32, 2, 1], [3], device)?;
    for (zero_infinity, last) in [(false, f64::INFINITY), (true, 0.0)] {
        x.set_grad(None);
        let options = CtcLossOptions {
            reduction: Reduction::None,
            zero_infinity,
            ..CtcLossOptions::new(&labels, &steps, &counts)
        };
        let losses = x.log_softmax(-1)?.ctc_loss(&options)?;
        let found = losses.to_f64s()?;
        ensure!(found[0] == 0.0 && found[1] > 1.0 && found[2] == last, "{found:?}");
        losses.sum_all()?.backward()?;
        let all = grad(&x)?;
        let of = |k: isize| -> Result<f64> { Ok(all.select(1, k)?.abs()?.sum_all()?.item()?) };
        let found = [of(0)?, of(1)?, of(2)?];
        ensure!(found[0] == 0.0 && found[1] > 0.1 && found[2] == 0.0, "{found:?}");
    }
    Ok(())
}

/// Computes the CTC loss of one example in f64, and its gradient by the log-probabilities \[steps, classes\]. Sums over
/// the paths to and from each state give both. The blank is class 0.
fn ctc_on_host(log_probs: &[Vec<f64>], labels: &[i32]) -> (f64, Vec<Vec<f64>>) {
    let classes: Vec<usize> =
        labels.iter().flat_map(|&label| [0, label as usize]).chain([0]).collect::<Vec<_>>();
    let (steps, width) = (log_probs.len(), classes.len());
    let log_sum = |terms: &[f64]| {
        let largest = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if largest == f64::NEG_INFINITY {
            return largest;
        }
        largest + terms.iter().map(|v| (v - largest).exp()).sum::<f64>().ln()
    };
    let skips = |s: usize| s >= 2 && classes[s] != 0 && classes[s] != classes[s - 2];
    let mut to = vec![vec![f64::NEG_INFINITY; width]; steps];
    let mut from = to.clone();
    for s in 0..2 {
        to[0][s] = log_probs[0][classes[s]];
        from[steps - 1][width - 1 - s] = 0.0;
    }
    for t in 1..steps {
        for s in 0..width {
            let entered: Vec<f64> =
                (0..3).filter(|&k| k <= s && (k < 2 || skips(s))).map(|k| to[t - 1][s - k]).collect();
            to[t][s] = log_sum(&entered) + log_probs[t][classes[s]];
        }
    }
    for t in (0..steps - 1).rev() {
        for s in 0..width {
            let left: Vec<f64> = (s..width.min(s + 3))
                .filter(|&to| to < s + 2 || skips(to))
                .map(|to| from[t + 1][to] + log_probs[t + 1][classes[to]])
                .collect();
            from[t][s] = log_sum(&left);
        }
    }
    let total = log_sum(&[to[steps - 1][width - 1], to[steps - 1][width - 2]]);
    let mut grad = vec![vec![0.0; log_probs[0].len()]; steps];
    for t in 0..steps {
        for s in 0..width {
            grad[t][classes[s]] -= (to[t][s] + from[t][s] - total).exp();
        }
    }
    (-total, grad)
}

/// A target of 140 labels has 281 states, more than a workgroup has threads. The steps run in one kernel.
fn ctc_of_more_states_than_threads(device: &Device) -> Result<()> {
    let (steps, batch, classes, longest) = (240, 2, 5, 140);
    let lengths = [240usize, 90];
    let counts = [140usize, 33];
    let x = uniform(&[steps, batch, classes], device)?.mul(4.0)?.log_softmax(-1)?.detach().to_leaf()?;
    // Every third label repeats the one before.
    let label = |k: usize| (1 + (k - usize::from(k % 3 == 2)) * 7 % 4) as i32;
    let labels: Vec<i32> = (0..batch * longest).map(label).collect();
    let ints = |of: [usize; 2]| Tensor::from_slice(&of.map(|n| n as i32), [2], device);
    let targets = Tensor::from_slice(&labels, [batch, longest], device)?;
    let (inputs, ends) = (ints(lengths)?, ints(counts)?);
    let options =
        CtcLossOptions { reduction: Reduction::None, ..CtcLossOptions::new(&targets, &inputs, &ends) };
    let profiler = Profiler::start(device)?;
    let losses = x.ctc_loss(&options)?;
    losses.sum_all()?.backward()?;
    let launches = profiler.finish()?.spans.len();
    ensure!(launches < steps, "{launches} launches for {steps} steps");
    let values = x.detach().to_f64s()?;
    let (losses, gradient) = (losses.to_f64s()?, grad(&x)?.to_f64s()?);
    for b in 0..batch {
        let row = |t: usize| (t * batch + b) * classes;
        let rows: Vec<Vec<f64>> = (0..lengths[b]).map(|t| values[row(t)..][..classes].to_vec()).collect();
        let (loss, expected) = ctc_on_host(&rows, &labels[b * longest..][..counts[b]]);
        super::host_reference::ensure_close(&losses[b..=b], &[loss], 1e-5, 0.0)?;
        for t in 0..steps {
            let expected = expected.get(t).cloned().unwrap_or_else(|| vec![0.0; classes]);
            super::host_reference::ensure_close(&gradient[row(t)..][..classes], &expected, 1e-3, 1e-4)?;
        }
    }
    Ok(())
}

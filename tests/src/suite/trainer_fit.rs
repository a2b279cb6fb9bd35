//! `fit`: incomplete accumulations at the end, repeated calls, and modes of modules.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use forebay::data::{DataLoader, Dataset, LoaderCursor};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::nn::{Linear, Module};
use forebay::optim::schedule::CosineAnnealing;
use forebay::optim::{Optimizer, Sgd};
use forebay::tensor::Tensor;
use forebay::train::{FitStatus, Trainer, evaluate, mean_loss};

use super::asynchronous::block_on;
use super::host_reference::ensure_close;
use super::tests;
use super::train_resume::{PointDataset, TempFile};

tests![
    the_last_batches_are_a_step_of_their_own_weight,
    a_smaller_last_batch_has_the_weight_of_a_batch,
    a_second_fit_trains_again,
    a_fit_that_ended_midway_is_finished_by_the_next,
    a_fit_without_steps_is_an_error,
    a_second_fit_is_resumed_where_it_stopped,
    a_run_saved_between_fits_trains_on,
    modes_are_always_restored,
    errors_of_a_data_set_end_the_run,
    an_asynchronous_fit_is_bitwise_the_blocking_one,
    an_asynchronous_fit_that_is_dropped_is_finished_by_the_next,
    an_asynchronous_fit_moves_between_threads,
];

#[derive(Module)]
struct Net {
    layer: Linear,
    /// Training mode of two layers, of which the second is frozen.
    modes: (AtomicBool, AtomicBool),
}

impl Net {
    fn new(device: &Device) -> CoreResult<Self> {
        device.manual_seed(5);
        let modes = (AtomicBool::new(true), AtomicBool::new(false));
        Ok(Self { layer: Linear::new(4, 3, device)?, modes })
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> CoreResult<Tensor> {
        self.layer.forward(x)?.cross_entropy(y)
    }

    fn modes(&self) -> (bool, bool) {
        (self.modes.0.load(Ordering::Relaxed), self.modes.1.load(Ordering::Relaxed))
    }

    fn weights(&self) -> Result<Vec<f64>> {
        Ok([self.layer.weight.to_f64s()?, self.layer.bias.as_ref().context("a bias")?.to_f64s()?].concat())
    }
}

fn trainer(net: &Net) -> Trainer<'_, Net, Sgd> {
    Trainer::new(net, Sgd::new(net.parameters(), 0.5)).quiet()
}

/// Returns the losses of the steps, and the weights after them.
fn run(
    device: &Device,
    loader: &DataLoader<PointDataset>,
    set: impl Fn(Trainer<'_, Net, Sgd>) -> Trainer<'_, Net, Sgd>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let net = Net::new(device)?;
    let mut run = set(trainer(&net));
    ensure!(run.fit(loader, |x, y| net.loss(x, y))? == FitStatus::Finished);
    ensure!(run.steps_done() == run.history().losses.len() as u64, "a step without a loss");
    ensure!(run.optimizer().parameters().iter().all(|p| p.grad().is_none()), "gradients are left");
    Ok((run.history().losses.iter().map(|&loss| loss.into()).collect(), net.weights()?))
}

fn the_last_batches_are_a_step_of_their_own_weight(device: &Device) -> Result<()> {
    // Ten batches of four: full accumulations, and one of the remaining batches.
    for (accumulate, rows) in [(4u32, 16), (16, 40), (3, 12), (5, 20)] {
        let small = PointDataset::new(40).shuffle(3).batches(4);
        let large = PointDataset::new(40).shuffle(3).batches(rows);
        let expected = run(device, &large, |t| t)?;
        ensure!(expected.0.len() == 40usize.div_ceil(rows), "{} steps", expected.0.len());
        for (way, micro, capture) in [("eager", 0, false), ("in parts", 3, false), ("captured", 0, true)] {
            let found =
                run(device, &small, |t| t.accumulate(accumulate).micro_batch(micro).capture(capture))?;
            let at = || format!("{accumulate} batches a step, {way}");
            ensure_close(&found.0, &expected.0, 1e-5, 1e-5).with_context(at)?;
            ensure_close(&found.1, &expected.1, 1e-5, 1e-5).with_context(at)?;
        }
    }
    // Accumulation across epochs: three batches an epoch, two epochs, four batches a step.
    let losses = run(device, &PointDataset::new(12).batches(4).epochs(2), |t| t.accumulate(4))?.0;
    ensure!(losses.len() == 2, "{losses:?}");
    Ok(())
}

fn a_smaller_last_batch_has_the_weight_of_a_batch(device: &Device) -> Result<()> {
    // A hand-written loop as in PyTorch: the mean of the losses of a batch of four and a batch of one.
    let net = Net::new(device)?;
    let mut optimizer = Sgd::new(net.parameters(), 0.5);
    let mut sum = 0.0;
    for batch in PointDataset::new(5).batches(4).prefetch(device) {
        let (x, y) = batch?;
        let loss = net.loss(&x, &y)?.div(2.0)?;
        loss.backward()?;
        sum += loss.item()?;
    }
    optimizer.step()?;
    let (losses, weights) = run(device, &PointDataset::new(5).batches(4), |t| t.accumulate(3))?;
    ensure_close(&losses, &[sum], 1e-6, 1e-6)?;
    ensure_close(&weights, &net.weights()?, 1e-6, 1e-6)
}

fn a_second_fit_trains_again(device: &Device) -> Result<()> {
    let net = Net::new(device)?;
    let (loader, other) =
        (PointDataset::new(8).shuffle(1).batches(4).epochs(2), PointDataset::new(9).batches(3));
    let mut run = trainer(&net);
    let seen = RefCell::new(Vec::new());
    let mut loss = |x: &Tensor, y: &Tensor| {
        seen.borrow_mut().push(x.to_vec::<f32>()?);
        net.loss(x, y)
    };
    for (call, steps) in [(&loader, 4), (&loader, 8), (&other, 11), (&loader, 15), (&other, 18)] {
        run.fit(call, &mut loss)?;
        ensure!(
            run.steps_done() == steps && run.history().losses.len() as u64 == steps,
            "{} steps",
            run.steps_done()
        );
    }
    let seen = seen.take();
    // Epochs 0 and 1, then 2 and 3 of the same shuffle; another loader starts with its own first batch.
    let all: Vec<_> =
        PointDataset::new(8).shuffle(1).batches(4).epochs(4).prefetch(device).collect::<CoreResult<_>>()?;
    for (k, (x, _)) in all.iter().enumerate() {
        ensure!(seen[k] == x.to_vec::<f32>()?, "batch {k} is another");
    }
    ensure!(seen[8..11] == seen[15..18], "the other loader did not restart");
    ensure!(seen[11..15] == seen[..4], "the first loader did not restart after another");
    Ok(())
}

fn a_fit_that_ended_midway_is_finished_by_the_next(device: &Device) -> Result<()> {
    let net = Net::new(device)?;
    let loader = PointDataset::new(20).shuffle(1).batches(4);
    let mut run = trainer(&net);
    let mut calls = 0;
    let failed = run.fit(&loader, |x, y| {
        calls += 1;
        if calls == 3 {
            return Err(Error::other(std::io::Error::other("the third one")));
        }
        net.loss(x, y)
    });
    let failed = failed.err().context("it must fail")?;
    let text = failed.to_string();
    ensure!(text.contains("step 3") && text.contains("the third one"), "{text}");
    ensure!(failed.downcast_ref::<std::io::Error>().is_some() && failed.downcast_ref::<Error>().is_none());
    run.fit(&loader, |x, y| net.loss(x, y))?;
    ensure!(run.steps_done() == 5, "{} steps of five batches", run.steps_done());
    // Another loader starts from its beginning: the failed run is not resumed.
    let mut run = trainer(&net);
    let failing = run.fit(&loader, |_, _| Err::<Tensor, _>(Error::argument("loss", "never")));
    ensure!(failing.is_err());
    run.fit(&PointDataset::new(8).batches(4), |x, y| net.loss(x, y))?;
    ensure!(run.steps_done() == 2, "{} steps of two batches", run.steps_done());
    Ok(())
}

fn a_fit_without_steps_is_an_error(device: &Device) -> Result<()> {
    let net = Net::new(device)?;
    let loader = PointDataset::new(8).batches(4);
    let mut run = trainer(&net).steps(3);
    run.fit(&loader, |x, y| net.loss(x, y))?;
    let text = run.fit(&loader, |x, y| net.loss(x, y)).err().context("all steps are done")?.to_string();
    ensure!(text.starts_with("fit: all 3 steps are done; for more, set `steps`"), "{text}");
    let mut run = run.steps(5);
    run.fit(&loader, |x, y| net.loss(x, y))?;
    ensure!(run.steps_done() == 5, "{} steps", run.steps_done());
    let empty = trainer(&net).fit(&PointDataset::new(0).batches(4), |x, y| net.loss(x, y));
    let text = empty.err().context("there are no batches")?.to_string();
    ensure!(text.starts_with("fit: the loader has no batches"), "{text}");
    type Change = fn(DataLoader<PointDataset>) -> DataLoader<PointDataset>;
    let none: [(Change, &str); 6] = [
        (|loader| loader.batches(10).drop_last(), "the data set has 8 samples, too few for one batch of 10"),
        (|loader| loader.epochs(0), "2 batches in each of 0 epochs"),
        (|loader| loader.start_at(LoaderCursor { epoch: 1, batch: 0 }), "from batch 0 of epoch 1 on"),
        (|loader| loader.start_at(LoaderCursor { epoch: 0, batch: 9 }), "from batch 0 of epoch 1 on"),
        (|loader| loader.start_at(LoaderCursor { epoch: u64::MAX, batch: 0 }), "there is no step to run"),
        (
            |loader| loader.start_at(LoaderCursor { epoch: u64::MAX, batch: u64::MAX }),
            "there is no step to run",
        ),
    ];
    let before = net.weights()?;
    for (change, text) in none {
        let mut run = trainer(&net);
        let loader = change(loader.clone());
        for _ in 0..2 {
            let ended = run.fit(&loader, |x, y| net.loss(x, y));
            let error = ended.err().with_context(|| format!("{text}: no error"))?.to_string();
            ensure!(error.contains(text), "{error}");
        }
        // Another loader is trained on.
        run.fit(&PointDataset::new(4).batches(4), |_, _| net.layer.weight.mul(0.0)?.sum_all())?;
        ensure!(run.steps_done() == 1);
    }
    ensure!(trainer(&net).steps(0).fit(&loader, |x, y| net.loss(x, y)).is_err() && before == net.weights()?);
    Ok(())
}

fn a_second_fit_is_resumed_where_it_stopped(device: &Device) -> Result<()> {
    let file = TempFile::new(device, "second-fit");
    let loader = PointDataset::new(20).shuffle(4).batches(4);
    let whole = Net::new(device)?;
    let mut run = trainer(&whole);
    for _ in 0..2 {
        run.fit(&loader, |x, y| whole.loss(x, y))?;
    }
    ensure!(run.steps_done() == 10, "{} steps", run.steps_done());
    let part = Net::new(device)?;
    let mut run = trainer(&part).checkpoint(&file.0, 1);
    run.fit(&loader, |x, y| part.loss(x, y))?;
    let mut left = 3;
    let failed = run.fit(&loader, |x, y| {
        left -= 1;
        if left == 0 { Err(Error::argument("loss", "stopped")) } else { part.loss(x, y) }
    });
    ensure!(failed.is_err());
    let rest = Net::new(device)?;
    let mut run = trainer(&rest).resume(&file.0)?;
    ensure!(run.steps_done() == 7, "resumed at step {}", run.steps_done());
    run.fit(&loader, |x, y| rest.loss(x, y))?;
    ensure!(run.steps_done() == 10, "{} steps", run.steps_done());
    ensure_close(&rest.weights()?, &whole.weights()?, 0.0, 0.0)?;
    // A loader's own start counts if nothing was resumed.
    let mut run = trainer(&rest);
    run.fit(&loader.start_at(LoaderCursor { epoch: 0, batch: 3 }), |x, y| rest.loss(x, y))?;
    ensure!(run.steps_done() == 2, "{} steps from the fourth batch of five on", run.steps_done());
    Ok(())
}

/// Runs of one `fit` for each epoch, which early stopping needs, resume as exactly as runs of one `fit`.
fn a_run_saved_between_fits_trains_on(device: &Device) -> Result<()> {
    let file = TempFile::new(device, "between-fits");
    let loader = PointDataset::new(20).shuffle(4).batches(4);
    let whole = Net::new(device)?;
    let mut run = trainer(&whole);
    run.fit(&loader, |x, y| whole.loss(x, y))?;
    run.save(&file.0)?;
    run.fit(&loader, |x, y| whole.loss(x, y))?;
    let rest = Net::new(device)?;
    let mut run = trainer(&rest).resume(&file.0)?;
    run.fit(&loader, |x, y| rest.loss(x, y))?;
    ensure!(run.steps_done() == 10, "{} steps", run.steps_done());
    ensure_close(&rest.weights()?, &whole.weights()?, 0.0, 0.0)?;
    // A limit of steps is that of the whole run: nothing is left after it, and a larger one trains on.
    run.save(&file.0)?;
    let mut run = trainer(&rest).steps(10).resume(&file.0)?;
    run.fit(&loader, |x, y| rest.loss(x, y))?;
    ensure!(run.steps_done() == 10, "{} steps", run.steps_done());
    let mut run = trainer(&rest).steps(12).resume(&file.0)?;
    run.fit(&loader, |x, y| rest.loss(x, y))?;
    ensure!(run.steps_done() == 12, "{} steps", run.steps_done());
    // A call that had not returned is finished, not repeated.
    let mut run = trainer(&rest).checkpoint(&file.0, 5);
    run.fit(&loader, |x, y| rest.loss(x, y))?;
    let mut run = trainer(&rest).resume(&file.0)?;
    run.fit(&loader, |x, y| rest.loss(x, y))?;
    ensure!(run.steps_done() == 5, "{} steps", run.steps_done());
    // So a loop that counts steps does all of its epochs.
    while run.steps_done() < 3 * loader.batches_per_epoch() {
        run.fit(&loader, |x, y| rest.loss(x, y))?;
    }
    ensure!(run.steps_done() == 15, "{} steps", run.steps_done());
    Ok(())
}

fn modes_are_always_restored(device: &Device) -> Result<()> {
    // Accuracy compares classes, which are i64.
    super::require_dtype(device, DType::I64)?;
    let net = Net::new(device)?;
    let loader = PointDataset::new(8).batches(4);
    let failure = || Error::argument("forward", "failed");
    let expect = |at: &str| {
        let modes = net.modes();
        if modes == (true, false) { Ok(()) } else { bail!("{at}: the modes are {modes:?}") }
    };
    evaluate(&net, &loader, |x| {
        if net.modes() != (false, false) { Err(failure()) } else { net.layer.forward(x) }
    })?;
    expect("evaluate")?;
    ensure!(evaluate(&net, &loader, |_| Err(failure())).is_err());
    expect("an evaluate that fails")?;
    ensure!(mean_loss(&net, &loader, |_, _| Err(failure())).is_err());
    expect("a mean loss that fails")?;
    ensure!(evaluate(&net, &PointDataset::new(0).batches(1), |x| net.layer.forward(x)).is_err());
    expect("an evaluate without samples")?;
    let panicked = catch_unwind(AssertUnwindSafe(|| evaluate(&net, &loader, |_| panic!("of the test"))));
    ensure!(panicked.is_err());
    expect("an evaluate that panics")?;
    let trained = |x: &Tensor, y: &Tensor| {
        if net.modes() != (true, false) { Err(failure()) } else { net.loss(x, y) }
    };
    trainer(&net).validate(1, || mean_loss(&net, &loader, |x, y| net.loss(x, y))).fit(&loader, trained)?;
    expect("fit")?;
    ensure!(trainer(&net).validate(1, || Err(failure())).fit(&loader, trained).is_err());
    expect("a validation that fails")
}

/// Data set that panics in the named method, after a number of calls.
struct PanickingDataset(&'static str, std::sync::atomic::AtomicUsize);

impl PanickingDataset {
    fn maybe_panic(&self, method: &str) {
        if self.0 == method && self.1.fetch_add(1, Ordering::Relaxed) == 2 {
            panic!("of the test");
        }
    }
}

impl Dataset for PanickingDataset {
    type Input = f32;
    type Target = i64;

    fn len(&self) -> usize {
        self.maybe_panic("len");
        4
    }

    fn input_shape(&self) -> &[usize] {
        &[4]
    }

    fn target_shape(&self) -> &[usize] {
        &[]
    }

    fn get(&self, _: usize, input: &mut [f32], target: &mut [i64]) -> CoreResult<()> {
        self.maybe_panic("get");
        input.fill(0.5);
        target[0] = 1;
        Ok(())
    }
}

fn errors_of_a_data_set_end_the_run(device: &Device) -> Result<()> {
    let net = Net::new(device)?;
    for method in ["len", "get"] {
        let loader = PanickingDataset(method, Default::default()).batches(2).epochs(4);
        let text = trainer(&net).fit(&loader, |x, y| net.loss(x, y)).err().context(method)?.to_string();
        ensure!(text.contains(&format!("`{method}` panicked: of the test")), "{text}");
    }
    Ok(())
}

fn an_asynchronous_fit_is_bitwise_the_blocking_one(device: &Device) -> Result<()> {
    type Setter = fn(Trainer<'_, Net, Sgd>) -> Trainer<'_, Net, Sgd>;
    let setters: [(&str, Setter); 4] = [
        ("plain", |t| t),
        ("accumulated", |t| t.accumulate(3)),
        ("in parts", |t| t.micro_batch(2).clip_grad_norm(0.1)),
        ("captured", |t| t.capture(true)),
    ];
    for (name, set) in setters {
        let loader = PointDataset::new(24).shuffle(3).batches(4).epochs(2);
        let expected = run(device, &loader, set)?;
        let net = Net::new(device)?;
        let mut trainer = set(trainer(&net));
        let (mut polls, mut other_runs) = (0u64, 0u64);
        {
            let mut training = pin!(trainer.fit_async(&loader, |x, y| net.loss(x, y)));
            // This thread's other task is polled whenever the training is suspended.
            let both = poll_fn(|context| {
                polls += 1;
                let ended = training.as_mut().poll(context);
                other_runs += u64::from(ended.is_pending());
                ended
            });
            ensure!(block_on(both)? == FitStatus::Finished, "{name}");
        }
        ensure!(other_runs >= trainer.steps_done() && polls == other_runs + 1, "{name}: {other_runs} turns");
        let losses = trainer.history().losses.iter().map(|&loss| f64::from(loss)).collect::<Vec<_>>();
        ensure!((&losses, &net.weights()?) == (&expected.0, &expected.1), "{name}: other results");
        ensure!(
            trainer.fit(&loader, |x, y| net.loss(x, y))? == FitStatus::Finished,
            "{name}: a blocking call after"
        );
    }
    // Errors name their step, as in `fit`.
    let net = Net::new(device)?;
    let loader = PointDataset::new(8).batches(4);
    let mut failing = trainer(&net);
    let wrong = block_on(failing.fit_async(&loader, |x, _| x.matmul(x))).unwrap_err().to_string();
    ensure!(wrong.contains("step 1"), "{wrong}");
    Ok(())
}

fn an_asynchronous_fit_that_is_dropped_is_finished_by_the_next(device: &Device) -> Result<()> {
    let loader = PointDataset::new(24).shuffle(3).batches(4).epochs(2);
    let expected = run(device, &loader, |t| t)?;
    let net = Net::new(device)?;
    let mut trainer = trainer(&net);
    let calls = Cell::new(0);
    {
        let mut training = pin!(trainer.fit_async(&loader, |x, y| {
            calls.set(calls.get() + 1);
            net.loss(x, y)
        }));
        block_on(poll_fn(|context| match calls.get() {
            5.. => Poll::Ready(()),
            _ => training.as_mut().poll(context).map(drop),
        }));
    }
    let done = trainer.steps_done();
    ensure!((4..=5).contains(&done), "{done} steps");
    ensure!(trainer.fit(&loader, |x, y| net.loss(x, y))? == FitStatus::Finished);
    let losses = trainer.history().losses.iter().map(|&loss| f64::from(loss)).collect::<Vec<_>>();
    ensure!(trainer.steps_done() == expected.0.len() as u64, "{} steps", trainer.steps_done());
    ensure!((losses, net.weights()?) == expected, "other results");
    Ok(())
}

/// Executors of several threads poll a task on any of them, and so require that the future is `Send`.
fn an_asynchronous_fit_moves_between_threads(device: &Device) -> Result<()> {
    type Setter = fn(Trainer<'_, Net, Sgd>) -> Trainer<'_, Net, Sgd>;
    let setters: [(&str, Setter); 2] = [
        ("scheduled", |t| {
            t.schedule(CosineAnnealing { base_lr: 0.1, eta_min: 0.01, t_max: 12 }).accumulate(2)
        }),
        ("captured", |t| t.capture(true)),
    ];
    let valid = PointDataset::new(6).batches(4);
    for (name, set) in setters {
        let loader = PointDataset::new(24).shuffle(3).batches(4).epochs(2);
        let expected = run(device, &loader, set)?;
        let net = Net::new(device)?;
        let mut trainer = set(trainer(&net)).validate(2, || mean_loss(&net, &valid, |x, y| net.loss(x, y)));
        {
            let mut training = pin!(trainer.fit_async(&loader, |x, y| net.loss(x, y)));
            let ended = block_on(poll_fn(|context| {
                let (waker, training) = (context.waker().clone(), training.as_mut());
                let poll = move || training.poll(&mut TaskContext::from_waker(&waker));
                thread::scope(|scope| scope.spawn(poll).join()).expect("the training panicked")
            }));
            ensure!(ended? == FitStatus::Finished, "{name}");
        }
        let losses = trainer.history().losses.iter().map(|&loss| f64::from(loss)).collect::<Vec<_>>();
        ensure!((losses, net.weights()?) == expected, "{name}: other results");
    }
    Ok(())
}

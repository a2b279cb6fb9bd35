//! Fault injection: out of memory at every allocation of a training step. The step fails cleanly or succeeds, leaks
//! nothing, and repeating it has the result of an uninterrupted step.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::checkpoint;
use forebay::data::Dataset;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::memory::Config;
use forebay::nn::{Linear, Module};
use forebay::ops::{AddmmOptions, ScatterReduce};
use forebay::optim::{Adam, GradScaler, Optimizer, clip_grad_norm_};
use forebay::tensor::Tensor;
use forebay::train::Trainer;

use super::host_reference::{ensure_close, ensure_same_bits};
use super::tests;
use super::train_resume::PointDataset;

tests![
    a_manual_step_survives_a_failure_at_every_request,
    a_trainer_survives_a_failure_at_every_request,
    an_in_place_operation_that_fails_leaves_its_operand_unchanged,
];

/// Returns the device with its own pool, so that only this test's allocations are counted.
fn with_own_pool(device: &Device) -> Device {
    Device::with_config(device.backend().clone(), Config::default())
}

/// Model with everything that a step can hold: a checkpoint, dropout, autocast's casts, a scaler.
struct TrainingStep {
    first: Linear,
    second: Linear,
    optimizer: Adam,
    scaler: GradScaler,
    x: Tensor,
    y: Tensor,
}

impl TrainingStep {
    fn new(device: &Device) -> Result<Self> {
        device.manual_seed(17);
        let (first, second) = (Linear::new(4, 16, device)?, Linear::new(16, 3, device)?);
        let parameters = [first.parameters(), second.parameters()].concat();
        Ok(Self {
            x: Tensor::randn([6, 4], DType::F32, device)?,
            y: Tensor::from_slice(&[0i64, 1, 2, 1, 0, 2], [6], device)?,
            optimizer: Adam::new(parameters, 1e-2),
            scaler: GradScaler::new().init_scale(256.0),
            first,
            second,
        })
    }

    /// Runs two batches with gradient clipping. Returns the second loss.
    fn run(&mut self) -> CoreResult<Tensor> {
        self.scaler.discard_step()?;
        self.optimizer.zero_grad();
        let mut last = None;
        for part in 0..2 {
            let (x, y) = (self.x.narrow(0, 3 * part, 3)?, self.y.narrow(0, 3 * part, 3)?);
            let loss = {
                let _autocast = autocast(DType::F16)?;
                let first = (self.first.weight.clone(), self.first.bias.clone());
                let hidden = checkpoint(&[&x], move |t| {
                    t[0].linear(&first.0, first.1.as_ref())?.gelu()?.dropout(0.25, true)
                })?;
                self.second.forward(&hidden)?.cross_entropy(&y)?
            };
            self.scaler.scale(&loss.div(2.0)?)?.backward()?;
            last = Some(loss.detach());
        }
        self.scaler.unscale_(&self.optimizer)?;
        clip_grad_norm_(self.optimizer.parameters(), 0.5)?;
        self.scaler.step(&mut self.optimizer)?;
        self.scaler.update()?;
        last.ok_or_else(|| forebay::error::Error::argument("run", "there are two parts"))
    }

    /// Returns parameters, gradients, and the state of optimiser and scaler.
    fn state(&self) -> Result<Vec<Tensor>> {
        let mut all = Vec::new();
        for p in self.optimizer.parameters() {
            all.push(p.detach().copy()?);
            all.extend(p.grad().map(|g| g.copy()).transpose()?);
        }
        for t in self.optimizer.state_dict()?.values() {
            all.push(t.copy()?);
        }
        all.extend(self.scaler.state_dict(self.x.device())?.into_values());
        Ok(all)
    }
}

fn ensure_same(got: &[Tensor], expected: &[Tensor]) -> Result<()> {
    ensure!(got.len() == expected.len(), "{} tensors, expected {}", got.len(), expected.len());
    got.iter()
        .zip(expected)
        .enumerate()
        .try_for_each(|(k, (a, b))| ensure_same_bits(a, b).with_context(|| format!("tensor {k}")))
}

fn a_manual_step_survives_a_failure_at_every_request(device: &Device) -> Result<()> {
    let device = with_own_pool(device);
    // The first step also allocates the optimiser's state, which exists in the second.
    for steps_before in [0, 1] {
        let start = || -> Result<TrainingStep> {
            let mut step = TrainingStep::new(&device)?;
            for _ in 0..steps_before {
                step.run()?;
            }
            Ok(step)
        };
        let mut exact = start()?;
        let before = device.pool().request_count();
        let loss = exact.run()?;
        let count = device.pool().request_count() - before;
        let expected = exact.state()?;
        ensure!(count > 50, "{count} requests are few for a step");
        drop(exact);
        for n in 1..=count {
            let mut step = start()?;
            let at = || format!("request {n} of {count} of step {steps_before}");
            let random = device.random_state();
            step.optimizer.zero_grad();
            let before = device.memory().allocated();
            device.pool().fail_request(n);
            let failed = step.run();
            device.pool().fail_request(0);
            let error = failed.err().with_context(|| format!("{}: it did not fail", at()))?;
            ensure!(error.is_out_of_memory(), "{}: {error}", at());
            drop(error);
            step.optimizer.zero_grad();
            // Optimiser state of a first step may remain; the graph, gradients and casts may not.
            let left = device.memory().allocated() as i64 - before as i64;
            let state = if steps_before == 0 { 4096 } else { 0 };
            ensure!((0..=state).contains(&left), "{}: {left} bytes are left", at());
            device.set_random_state(random);
            let again = step.run().with_context(at)?;
            ensure_same_bits(&again, &loss).with_context(at)?;
            ensure_same(&step.state()?, &expected).with_context(at)?;
        }
    }
    Ok(())
}

fn a_trainer_survives_a_failure_at_every_request(device: &Device) -> Result<()> {
    let device = with_own_pool(device);
    // Losses and weights after two steps, number of allocations, whether `fit` failed, rows at once.
    type Outcome = (Vec<f64>, u64, bool, Option<usize>);
    let train = |n: u64| -> Result<Outcome> {
        device.manual_seed(23);
        let net = (Linear::new(4, 8, &device)?, Linear::new(8, 3, &device)?);
        let mut run = Trainer::new(&net, Adam::new(net.parameters(), 1e-2))
            .autocast(DType::BF16)
            .scaler(GradScaler::new())
            .clip_grad_norm(0.5)
            .accumulate(2)
            .steps(2)
            .quiet();
        let loader = PointDataset::learnable(16).batches(4);
        let mut loss = |x: &Tensor, y: &Tensor| net.1.forward(&net.0.forward(x)?.tanh()?)?.cross_entropy(y);
        let before = device.pool().request_count();
        device.pool().fail_request(n);
        let fitted = run.fit(&loader, &mut loss);
        device.pool().fail_request(0);
        let count = device.pool().request_count() - before;
        let failed = fitted.is_err();
        if let Err(error) = fitted {
            ensure!(error.is_out_of_memory(), "{error}");
            drop(error);
            // The program resumes the interrupted run.
            run.fit(&loader, &mut loss)?;
        }
        ensure!(run.steps_done() == 2 && run.history().losses.len() == 2, "steps were lost");
        let mut all: Vec<f64> = run.history().losses.iter().map(|&l| f64::from(l)).collect();
        for p in net.parameters() {
            ensure!(p.grad().is_none(), "a gradient is left");
            all.extend(p.to_f64s()?);
        }
        Ok((all, count, failed, run.micro_batch_rows()))
    };
    let (exact, count, ..) = train(0)?;
    let before = device.memory().allocated();
    let (mut survived, mut same_rows) = (0, 0);
    for n in 1..=count {
        let at = || format!("request {n} of {count}");
        let (all, _, failed, rows) = train(n).with_context(at)?;
        let left = device.memory().allocated() as i64 - before as i64;
        ensure!(left == 0, "{}: {left} bytes are left", at());
        survived += usize::from(!failed);
        if rows.is_none() {
            // Whole batches that are repeated give identical bits.
            same_rows += 1;
            ensure_close(&all, &exact, 0.0, 0.0).with_context(at)?;
        } else {
            // With half batches, sums have another order, over products that bf16 rounds to 2^-8. Adam's step of 0.01
            // depends mostly on the gradient's sign.
            ensure!(rows == Some(2), "{}: {rows:?} rows at once", at());
            ensure_close(&all, &exact, 2f64.powi(-8), 2e-3).with_context(at)?;
        }
    }
    ensure!(
        survived > count as usize / 2,
        "{survived} of {count} failures were survived ({same_rows} without halving)"
    );
    Ok(())
}

/// In-place operation on the first tensor, with a source of the same shape, indices of it, and a vector of indices of
/// dimension 0.
type InPlaceCall = Box<dyn Fn(&Tensor, &Tensor, &Tensor, &Tensor) -> CoreResult<()>>;

fn in_place_calls() -> Vec<(String, InPlaceCall)> {
    let mut calls: Vec<(String, InPlaceCall)> = Vec::new();
    for reduce in [
        ScatterReduce::Sum,
        ScatterReduce::Prod,
        ScatterReduce::Mean,
        ScatterReduce::Amax,
        ScatterReduce::Amin,
    ] {
        for include_self in [true, false] {
            let name = format!("{reduce:?}, include_self {include_self}");
            calls.push((
                format!("scatter_reduce_ {name}"),
                Box::new(move |x, src, at, _| x.scatter_reduce_(0, at, src, reduce, include_self)),
            ));
            calls.push((
                format!("index_reduce_ {name}"),
                Box::new(move |x, src, _, rows| x.index_reduce_(0, rows, src, reduce, include_self)),
            ));
        }
    }
    let others: [(&str, InPlaceCall); 16] = [
        ("scatter_", Box::new(|x, src, at, _| x.scatter_(0, at, src))),
        ("scatter_add_", Box::new(|x, src, at, _| x.scatter_add_(0, at, src))),
        ("scatter_value_", Box::new(|x, _, at, _| x.scatter_value_(0, at, 7.0))),
        ("index_add_", Box::new(|x, src, _, rows| x.index_add_(0, rows, src, 2.0))),
        ("index_copy_", Box::new(|x, src, _, rows| x.index_copy_(0, rows, src))),
        ("index_fill_", Box::new(|x, _, _, rows| x.index_fill_(0, rows, 7.0))),
        ("index_put_", Box::new(|x, src, _, rows| x.index_put_(&[Some(rows)], src, false))),
        ("index_put_ accumulate", Box::new(|x, src, _, rows| x.index_put_(&[Some(rows)], src, true))),
        ("put_", Box::new(|x, src, _, rows| x.put_(rows, &src.narrow(1, 0, 1)?.squeeze(1)?, true))),
        ("masked_fill_", Box::new(|x, src, _, _| x.masked_fill_(&src.gt(0.0)?, 7.0))),
        ("masked_scatter_", Box::new(|x, src, _, _| x.masked_scatter_(&src.gt(0.0)?, src))),
        ("cumsum_", Box::new(|x, _, _, _| x.cumsum_(0))),
        ("renorm_", Box::new(|x, _, _, _| x.renorm_(2.0, 0, 0.5))),
        ("add_", Box::new(|x, src, _, _| x.add_(src))),
        ("lerp_", Box::new(|x, src, _, _| x.lerp_(src, 0.25))),
        ("addmm_", Box::new(|x, src, _, _| x.addmm_(src, &src.t()?.matmul(src)?, &AddmmOptions::default()))),
    ];
    calls.extend(others.map(|(name, call)| (name.to_owned(), call)));
    calls
}

/// The longest rows take the sorted kernels, which need working memory.
fn an_in_place_operation_that_fails_leaves_its_operand_unchanged(device: &Device) -> Result<()> {
    let device = with_own_pool(device);
    device.manual_seed(29);
    let mut failures = 0;
    for (length, dtype, is_transposed) in [
        (12, DType::F32, false),
        (12, DType::F32, true),
        (12, DType::BF16, false),
        (2_100, DType::F32, false),
    ] {
        let shape = if is_transposed { [3, length] } else { [length, 3] };
        let lay = |t: Tensor| if is_transposed { t.t() } else { Ok(t) };
        let values = lay(Tensor::randn(shape, dtype, &device)?)?;
        let src = Tensor::randn([length, 3], dtype, &device)?;
        let at = Tensor::randint(0, length as i64, [length, 3], DType::I32, &device)?;
        let rows = Tensor::randperm(length, DType::I32, &device)?;
        for (name, call) in in_place_calls() {
            for n in 1.. {
                let x = lay(Tensor::empty(shape, dtype, &device)?)?;
                x.copy_(&values)?;
                device.pool().fail_request(n);
                let result = call(&x, &src, &at, &rows);
                device.pool().fail_request(0);
                let Err(error) = result else { break };
                let at = || format!("{name} of {length} x 3 in {}, request {n}: {error}", dtype.name());
                ensure!(error.is_out_of_memory(), "{}", at());
                ensure_same_bits(&x, &values).with_context(at)?;
                failures += 1;
            }
        }
    }
    ensure!(failures > 150, "only {failures} requests failed");
    Ok(())
}

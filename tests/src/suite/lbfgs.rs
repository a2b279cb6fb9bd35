//! L-BFGS compared with PyTorch's (`tests/data/lbfgs.py`), and steps that evaluate a closure.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use forebay::data::Dataset;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::nn::{Linear, LstmCell, Module, init};
use forebay::ops::Reduction;
use forebay::optim::{Adam, Lbfgs, LineSearch, Optimizer, ParamGroup, Sgd};
use forebay::tensor::Tensor;
use forebay::train::Trainer;

use super::optim::{ALL, initial_parameters, set_gradients};
use super::train_resume::PointDataset;
use super::{compute_dtypes, tests};

tests![
    steps_match_pytorch,
    time_sequence_prediction_matches_pytorch,
    saved_states_continue_with_the_same_bits,
    offloaded_states_have_the_same_bits,
    a_closure_that_fails_changes_nothing,
    states_that_do_not_fit_are_refused,
    parameters_and_options_are_checked,
    a_step_without_a_closure_is_refused,
    other_optimisers_evaluate_the_closure_once,
];

const SHAPES: [&[usize]; 4] = [&[4, 6], &[7], &[6, 3], &[2]];

type Objective = fn(&[Tensor]) -> CoreResult<Tensor>;
type Make = fn(Vec<Tensor>) -> Lbfgs;

fn wolfe(p: Vec<Tensor>, lr: f64) -> Lbfgs {
    Lbfgs::new(p, lr).line_search_fn(LineSearch::StrongWolfe)
}

/// Cases of the script: name, objective, sign of the loss, and optimiser.
const CASES: &[(&str, Objective, f64, Make)] = &[
    ("bowl", bowl, 1.0, |p| Lbfgs::new(p, 0.5).max_iter(4)),
    ("bowl wolfe", bowl, 1.0, |p| wolfe(p, 1.0).max_iter(4)),
    ("bowl history", bowl, 1.0, |p| Lbfgs::new(p, 0.5).max_iter(4).history_size(2)),
    ("bowl maximize", bowl, -1.0, |p| Lbfgs::new(p, 0.5).max_iter(4).maximize(true)),
    ("bowl evaluations", bowl, 1.0, |p| wolfe(p, 1.0).max_iter(8).max_eval(3)),
    ("bowl gradient", bowl, 1.0, |p| wolfe(p, 1.0).tolerance_grad(0.2)),
    ("bowl change", bowl, 1.0, |p| Lbfgs::new(p, 0.5).tolerance_change(0.05)),
    ("valley", valley, 1.0, |p| Lbfgs::new(p, 0.2).max_iter(6)),
    ("valley wolfe", valley, 1.0, |p| wolfe(p, 1.0).max_iter(6)),
    ("valley far wolfe", valley, 1.0, |p| wolfe(p, 3.0).max_iter(6).history_size(3)),
];

/// Creates a tensor from a function of the element's index.
fn tensor(shape: &[usize], dtype: DType, device: &Device, f: impl Fn(f64) -> f64) -> CoreResult<Tensor> {
    let values = (0..shape.iter().product()).map(|i: usize| f(i as f64));
    match dtype {
        DType::F64 => Tensor::from_slice(&values.collect::<Vec<f64>>(), shape, device),
        _ => Tensor::from_slice(&values.map(|v| v as f32).collect::<Vec<f32>>(), shape, device),
    }
}

fn start(dtype: DType, device: &Device) -> CoreResult<Vec<Tensor>> {
    let of = |(k, shape): (usize, &&[usize])| {
        tensor(shape, dtype, device, |i| (0.5 * i + k as f64).cos())?.to_leaf()
    };
    SHAPES.iter().enumerate().map(of).collect()
}

fn sum(terms: impl IntoIterator<Item = CoreResult<Tensor>>) -> CoreResult<Tensor> {
    let mut terms = terms.into_iter();
    let first = terms.next().ok_or_else(|| Error::argument("sum", "there are no terms"))??;
    terms.try_fold(first, |sum, term| sum.add(&term?))
}

/// A convex function whose curvature differs between elements.
fn bowl(params: &[Tensor]) -> CoreResult<Tensor> {
    let squares = sum(params.iter().enumerate().map(|(k, w)| {
        let constant = |f: &dyn Fn(f64) -> f64| tensor(w.shape(), w.dtype(), w.device(), f);
        let distance = w.sub(&constant(&|i| (i + k as f64).sin())?)?;
        distance.square()?.mul(&constant(&|i| 1.0 + i % 5.0)?)?.sum_all()
    }))?;
    let fourth = sum(params.iter().map(|w| w.square()?.square()?.sum_all()))?;
    let total = sum(params.iter().map(Tensor::sum_all))?;
    squares.add(&fourth.mul(0.1)?)?.add(&total.square()?.mul(0.05)?)
}

/// Rosenbrock's function of each parameter.
fn valley(params: &[Tensor]) -> CoreResult<Tensor> {
    sum(params.iter().map(|w| {
        let n = w.numel();
        let w = w.reshape([n])?;
        let (before, after) = (w.narrow(0, 0, n - 1)?, w.narrow(0, 1, n - 1)?);
        let curve = after.sub(&before.square()?)?.square()?.mul(10.0)?;
        curve.add(&before.neg()?.add(1.0)?.square()?)?.sum_all()
    }))
}

/// Computes loss and gradients as a closure does; the last parameter gets no gradient.
fn evaluate(params: &[Tensor], objective: Objective, sign: f64) -> CoreResult<Tensor> {
    params.iter().for_each(|p| p.set_grad(None));
    let loss = objective(&params[..params.len() - 1])?.mul(sign)?;
    loss.backward()?;
    Ok(loss)
}

fn values(params: &[Tensor]) -> Result<Vec<Vec<f64>>> {
    params.iter().map(|p| Ok(p.to_f64s()?)).collect()
}

fn dtypes(device: &Device) -> impl Iterator<Item = DType> + use<'_> {
    compute_dtypes(device).filter(|dtype| matches!(dtype, DType::F32 | DType::F64))
}

/// Compares a run with the script's, step by step.
fn ensure_steps(
    name: &str,
    params: &[Tensor],
    optimizer: &mut Lbfgs,
    closure: &mut dyn FnMut() -> CoreResult<Tensor>,
) -> Result<()> {
    let all: serde_json::Value = serde_json::from_str(include_str!("../../data/lbfgs.json"))?;
    let steps = all[name].as_array().with_context(|| format!("{name} is not recorded"))?;
    let within = if params[0].dtype() == DType::F64 { 1e-7 } else { 2e-4 };
    let close = |what: String, got: f64, exact: f64| -> Result<()> {
        ensure!((got - exact).abs() <= within * (1.0 + exact.abs()), "{what}: {got} is not {exact}");
        Ok(())
    };
    for (t, step) in steps.iter().enumerate() {
        let at = format!("{name} in {}, step {t}", params[0].dtype());
        let loss = optimizer.step_with(closure).with_context(|| at.clone())?.item()?;
        close(format!("{at}, loss"), loss, step["loss"].as_f64().context("a loss")?)?;
        let state = optimizer.state_dict()?;
        for count in ["n_iter", "func_evals"] {
            let got = state[&format!("0.{count}")].item()?;
            ensure!(Some(got) == step[count].as_f64(), "{at}: {count} is {got}, not {}", step[count]);
        }
        let exact: Vec<Vec<f64>> = serde_json::from_value(step["params"].clone())?;
        ensure!(exact.len() == params.len(), "{at}: {} parameters", exact.len());
        for (k, (got, exact)) in values(params)?.iter().zip(&exact).enumerate() {
            ensure!(got.len() == exact.len(), "{at}: parameter {k} has another size");
            for (i, (got, exact)) in got.iter().zip(exact).enumerate() {
                close(format!("{at}, parameter {k}, element {i}"), *got, *exact)?;
            }
        }
    }
    Ok(())
}

fn steps_match_pytorch(device: &Device) -> Result<()> {
    for dtype in dtypes(device) {
        // A line search through a narrow valley multiplies the rounding errors of f32.
        for (name, objective, sign, make) in
            CASES.iter().filter(|(name, ..)| dtype == DType::F64 || name.contains("bowl"))
        {
            let params = start(dtype, device)?;
            let mut optimizer = make(params.clone());
            ensure_steps(name, &params, &mut optimizer, &mut || evaluate(&params, *objective, *sign))?;
        }
    }
    Ok(())
}

/// PyTorch's example of time-sequence prediction.
struct SequenceNet {
    lstm1: LstmCell,
    lstm2: LstmCell,
    linear: Linear,
}

impl SequenceNet {
    fn new(device: &Device) -> CoreResult<Self> {
        let cell = |inputs| LstmCell::new(inputs, 6, true, device);
        Ok(Self { lstm1: cell(1)?, lstm2: cell(6)?, linear: Linear::new(6, 1, device)? })
    }

    fn parameters(&self) -> Vec<Tensor> {
        [self.lstm1.parameters(), self.lstm2.parameters(), self.linear.parameters()].concat()
    }

    fn forward(&self, x: &Tensor) -> CoreResult<Tensor> {
        let zeros = Tensor::zeros([x.shape()[0], 6], x.dtype(), x.device())?;
        let (mut first, mut second) = ((zeros.clone(), zeros.clone()), (zeros.clone(), zeros));
        let mut outs = Vec::new();
        for t in 0..x.shape()[1] {
            first = self.lstm1.forward(&x.narrow(1, t, 1)?, Some((&first.0, &first.1)))?;
            second = self.lstm2.forward(&first.0, Some((&second.0, &second.1)))?;
            outs.push(self.linear.forward(&second.0)?);
        }
        Tensor::cat(&outs, 1)
    }
}

fn time_sequence_prediction_matches_pytorch(device: &Device) -> Result<()> {
    for dtype in dtypes(device) {
        let _dtype = init::default_dtype(dtype)?;
        let net = SequenceNet::new(device)?;
        let params = net.parameters();
        for (k, p) in params.iter().enumerate() {
            p.detach().copy_(&tensor(p.shape(), dtype, device, |i| 0.4 * (0.7 * i + k as f64).cos())?)?;
        }
        let wave = tensor(&[3, 9], dtype, device, |i| (i / 2.0).sin())?;
        let (x, y) = (wave.narrow(1, 0, 8)?, wave.narrow(1, 1, 8)?);
        let mut optimizer = Lbfgs::new(params.clone(), 0.8).max_iter(4);
        ensure_steps("sequence", &params, &mut optimizer, &mut || {
            params.iter().for_each(|p| p.set_grad(None));
            let loss = net.forward(&x)?.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            Ok(loss)
        })?;
    }
    Ok(())
}

/// Returns the names and values of the state.
fn dump_state(optimizer: &Lbfgs) -> Result<Vec<(String, Vec<f64>)>> {
    optimizer.state_dict()?.into_iter().map(|(name, t)| Ok((name, t.to_f64s()?))).collect()
}

fn saved_states_continue_with_the_same_bits(device: &Device) -> Result<()> {
    for dtype in dtypes(device) {
        let cases = CASES.iter().filter(|(name, ..)| ["bowl history", "valley wolfe"].contains(name));
        for (name, objective, sign, make) in cases {
            let first = start(dtype, device)?;
            let mut optimizer = make(first.clone());
            optimizer.step_with(&mut || evaluate(&first, *objective, *sign))?;
            let second: Vec<Tensor> =
                first.iter().map(|p| p.detach().copy()?.to_leaf()).collect::<CoreResult<_>>()?;
            let mut resumed = make(second.clone());
            resumed.load_state_dict(&optimizer.state_dict()?)?;
            for _ in 0..2 {
                let loss = optimizer.step_with(&mut || evaluate(&first, *objective, *sign))?.item()?;
                let other = resumed.step_with(&mut || evaluate(&second, *objective, *sign))?.item()?;
                ensure!(loss == other, "{name} in {dtype}: {loss} and {other}");
            }
            ensure!(values(&first)? == values(&second)?, "{name} in {dtype}: the runs differ");
            ensure!(dump_state(&optimizer)? == dump_state(&resumed)?, "{name} in {dtype}: the states differ");
        }
    }
    Ok(())
}

fn offloaded_states_have_the_same_bits(device: &Device) -> Result<()> {
    let run = |away: bool| -> Result<Vec<Vec<f64>>> {
        let params = start(DType::F32, device)?;
        let mut optimizer = wolfe(params.clone(), 1.0).max_iter(3);
        optimizer.offload_state(away);
        for _ in 0..3 {
            optimizer.step_with(&mut || evaluate(&params, bowl, 1.0))?;
        }
        values(&params)
    };
    ensure!(run(true)? == run(false)?, "the runs differ");
    Ok(())
}

/// Fails the closure at every evaluation in turn.
fn a_closure_that_fails_changes_nothing(device: &Device) -> Result<()> {
    for make in [(|p| wolfe(p, 1.0).max_iter(3)) as Make, |p| Lbfgs::new(p, 0.5).max_iter(3)] {
        let params = start(DType::F32, device)?;
        let mut optimizer = make(params.clone());
        optimizer.step_with(&mut || evaluate(&params, bowl, 1.0))?;
        for failing in 0..3 {
            let (before, state) = (values(&params)?, dump_state(&optimizer)?);
            let mut evaluations = 0;
            let result = optimizer.step_with(&mut || {
                evaluations += 1;
                match evaluations > failing {
                    true => Err(Error::argument("closure", "out of batches")),
                    false => evaluate(&params, bowl, 1.0),
                }
            });
            let error = result.err().context("the closure's error is lost")?.to_string();
            ensure!(error.contains("out of batches"), "{error}");
            ensure!(evaluations == failing + 1, "{evaluations} evaluations");
            ensure!(values(&params)? == before, "a step that failed changed parameters");
            ensure!(dump_state(&optimizer)? == state, "a step that failed changed the state");
        }
        // Another shape of the loss is an error, too.
        let before = values(&params)?;
        let result = optimizer.step_with(&mut || Ok(params[0].clone()));
        let error = result.err().context("a loss of many elements")?.to_string();
        ensure!(error.contains("a loss of one element"), "{error}");
        ensure!(values(&params)? == before, "a step that failed changed parameters");
    }
    Ok(())
}

fn states_that_do_not_fit_are_refused(device: &Device) -> Result<()> {
    let params = start(DType::F32, device)?;
    let mut optimizer = wolfe(params.clone(), 1.0).max_iter(4);
    ensure!(optimizer.state_dict()?.is_empty(), "there is state before the first step");
    optimizer.step_with(&mut || evaluate(&params, bowl, 1.0))?;
    let (state, before) = (optimizer.state_dict()?, dump_state(&optimizer)?);
    let refused = |optimizer: &mut Lbfgs, state: &BTreeMap<String, Tensor>, what: &str| -> Result<()> {
        let error = optimizer.load_state_dict(state).err().with_context(|| format!("taken: {what}"))?;
        ensure!(error.to_string().contains(what), "{error}");
        Ok(())
    };
    for name in ["0.d", "0.ro.0", "0.old_stps.1", "0.prev_loss", "0.n_iter"] {
        let mut fewer = state.clone();
        fewer.remove(name);
        refused(&mut optimizer, &fewer, &format!("missing: {name}"))?;
    }
    for (name, wrong, what) in [
        ("0.d", Tensor::zeros([3], DType::F32, device)?, "0.d has the elements of all parameters"),
        (
            "0.prev_flat_grad",
            Tensor::zeros([51], DType::I32, device)?,
            "0.prev_flat_grad is read from any float",
        ),
        ("0.n_iter", Tensor::from_slice(&[-1.0f32], (), device)?, "`0.n_iter` is -1"),
        ("0.t", Tensor::zeros([2], DType::F32, device)?, "0.t is one number"),
        ("1.d", Tensor::zeros([51], DType::F32, device)?, "unexpected: 1.d"),
    ] {
        let mut other = state.clone();
        other.insert(name.to_owned(), wrong);
        refused(&mut optimizer, &other, what)?;
    }
    ensure!(dump_state(&optimizer)? == before, "a state that was refused is there");
    Ok(())
}

fn parameters_and_options_are_checked(device: &Device) -> Result<()> {
    let params = start(DType::F32, device)?;
    let half = tensor(&[3], DType::F32, device, |i| i)?.to_dtype(DType::BF16)?.to_leaf()?;
    let refused = |mut optimizer: Lbfgs, what: &str| -> Result<()> {
        let before = values(&params)?;
        let result = optimizer.step_with(&mut || evaluate(&params, bowl, 1.0));
        let error = result.err().with_context(|| format!("not refused: {what}"))?.to_string();
        ensure!(error.contains(what), "{error}");
        ensure!(values(&params)? == before, "{what}: parameters changed");
        Ok(())
    };
    let new = |lr: f64| Lbfgs::new(params.clone(), lr);
    refused(new(-1.0), "`lr`")?;
    refused(new(f64::NAN), "`lr`")?;
    refused(new(1.0).tolerance_grad(-1.0), "`tolerance_grad`")?;
    refused(new(1.0).tolerance_change(f64::NAN), "`tolerance_change`")?;
    refused(new(1.0).history_size(0), "`history_size`")?;
    refused(Lbfgs::new(Vec::new(), 1.0), "empty parameter list")?;
    refused(Lbfgs::new(vec![params[0].clone(), params[0].clone()], 1.0), "twice")?;
    refused(Lbfgs::new(vec![params[0].clone(), half.clone()], 1.0), "all f32 or all f64")?;
    refused(Lbfgs::new(vec![half], 1.0), "all f32 or all f64")?;
    let error = new(1.0).add_param_group(ParamGroup::new(vec![])).err().context("a second group")?;
    ensure!(error.to_string().contains("one group"), "{error}");
    // Without iterations, the loss is evaluated once and nothing moves.
    let mut still = new(1.0).max_iter(0);
    let before = values(&params)?;
    still.step_with(&mut || evaluate(&params, bowl, 1.0))?;
    ensure!(values(&params)? == before, "parameters changed");
    Ok(())
}

fn a_step_without_a_closure_is_refused(device: &Device) -> Result<()> {
    let net = Linear::new(4, 3, device)?;
    let mut optimizer = Lbfgs::new(net.parameters(), 1.0);
    let error = optimizer.step().err().context("a step without a closure")?.to_string();
    ensure!(error.contains("call `step_with`"), "{error}");
    let loader = PointDataset::new(8).batches(4);
    let loss = |x: &Tensor, y: &Tensor| net.forward(x)?.cross_entropy(y);
    let fit = Trainer::new(&net, optimizer).quiet().steps(1).fit(&loader, loss);
    let error = fit.err().context("a trainer took L-BFGS")?.to_string();
    ensure!(error.contains("call `step_with`") && error.contains("a loop of your own"), "{error}");
    Ok(())
}

fn other_optimisers_evaluate_the_closure_once(device: &Device) -> Result<()> {
    for (name, make) in ALL {
        let (plain, closed) = (initial_parameters(device)?, initial_parameters(device)?);
        let (mut optimizer, mut other) = (make(plain.clone())?, make(closed.clone())?);
        let trained = other.parameters().to_vec();
        for t in 1..=2 {
            set_gradients(&plain, &*optimizer, t)?;
            optimizer.step()?;
            let mut calls = 0;
            let loss = other.step_with(&mut || {
                calls += 1;
                let gradients = set_gradients(&closed, &Sgd::new(trained.clone(), 0.1), t);
                gradients.map_err(|error| Error::argument("closure", error.to_string()))?;
                Tensor::full((), 3.0, DType::F32, device)
            })?;
            ensure!(calls == 1 && loss.item()? == 3.0, "{name}: {calls} calls, a loss of {}", loss.item()?);
        }
        ensure!(values(&plain)? == values(&closed)?, "{name}: a closure changed the step");
    }
    // Gradients are recorded in the closure, and its errors return before the step.
    let params = initial_parameters(device)?;
    let _no_grad = forebay::autograd::no_grad();
    let mut adam = Adam::new(params.clone(), 0.1);
    adam.step_with(&mut || {
        let loss = params[0].square()?.sum_all()?;
        loss.backward()?;
        Ok(loss)
    })?;
    let before = values(&params)?;
    ensure!(before != values(&initial_parameters(device)?)?, "the closure's gradients were lost");
    let result = adam.step_with(&mut || Err(Error::argument("closure", "out of batches")));
    ensure!(result.is_err() && values(&params)? == before, "a closure's error was lost");
    Ok(())
}

//! Recurrent layers and cells.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{Gru, GruCell, Lstm, LstmCell, Module, RecurrentOptions, Rnn, RnnCell};
use forebay::tensor::Tensor;

use super::super::host_reference::ensure_close;
use super::{ModuleCase, cases, ensure_same, randn, single};

const ONE: RecurrentOptions = RecurrentOptions {
    num_layers: 1,
    bias: true,
    batch_first: false,
    dropout: 0.0,
    bidirectional: false,
    proj_size: 0,
};
const DEEP: RecurrentOptions =
    RecurrentOptions { num_layers: 2, bidirectional: true, batch_first: true, ..ONE };
const WITHOUT_BIAS: RecurrentOptions = RecurrentOptions { bias: false, ..ONE };
const LENGTHS: RecurrentOptions = RecurrentOptions { num_layers: 2, bidirectional: true, ..ONE };
const PROJECTED: RecurrentOptions = RecurrentOptions { proj_size: 2, ..LENGTHS };

fn two((out, state): (Tensor, Tensor)) -> CoreResult<Vec<Tensor>> {
    Ok(vec![out, state])
}

fn three((out, (state, cell)): (Tensor, (Tensor, Tensor))) -> CoreResult<Vec<Tensor>> {
    Ok(vec![out, state, cell])
}

/// Returns the lengths of the recorded sequences.
fn lengths(x: &Tensor) -> CoreResult<Tensor> {
    Tensor::from_slice(&[3i32, 5, 1], [3], x.device())
}

/// Returns state and cell, if present.
fn both(x: &[Tensor]) -> Option<(&Tensor, &Tensor)> {
    x.get(1).zip(x.get(2))
}

fn rnn(c: &ModuleCase<'_>, options: RecurrentOptions) -> CoreResult<Rnn> {
    Rnn::new(3, 4, options, c.device)
}

fn gru(c: &ModuleCase<'_>, options: RecurrentOptions) -> CoreResult<Gru> {
    Gru::new(3, 4, options, c.device)
}

fn lstm(c: &ModuleCase<'_>, options: RecurrentOptions) -> CoreResult<Lstm> {
    Lstm::new(3, if options.proj_size > 0 { 5 } else { 4 }, options, c.device)
}

cases! {
    "rnn": |c| rnn(c, ONE), |m, x| two(m.forward(&x[0], None)?);
    "rnn_deep": |c| rnn(c, DEEP), |m, x| two(m.forward(&x[0], x.get(1))?);
    "rnn_unbatched": |c| rnn(c, WITHOUT_BIAS), |m, x| two(m.forward(&x[0], x.get(1))?);
    "rnn_lengths": |c| rnn(c, LENGTHS), |m, x| two(m.forward_lengths(&x[0], &lengths(&x[0])?, x.get(1))?);
    "rnn_relu": |c| Ok(rnn(c, RecurrentOptions { bidirectional: true, ..ONE })?.relu()), |m, x| two(m.forward(&x[0], None)?);
    "gru": |c| gru(c, ONE), |m, x| two(m.forward(&x[0], None)?);
    "gru_deep": |c| gru(c, DEEP), |m, x| two(m.forward(&x[0], x.get(1))?);
    "gru_unbatched": |c| gru(c, WITHOUT_BIAS), |m, x| two(m.forward(&x[0], x.get(1))?);
    "gru_lengths": |c| gru(c, LENGTHS), |m, x| two(m.forward_lengths(&x[0], &lengths(&x[0])?, x.get(1))?);
    "lstm": |c| lstm(c, ONE), |m, x| three(m.forward(&x[0], None)?);
    "lstm_deep": |c| lstm(c, DEEP), |m, x| three(m.forward(&x[0], both(x))?);
    "lstm_unbatched": |c| lstm(c, WITHOUT_BIAS), |m, x| three(m.forward(&x[0], both(x))?);
    "lstm_lengths": |c| lstm(c, LENGTHS), |m, x| three(m.forward_lengths(&x[0], &lengths(&x[0])?, both(x))?);
    "lstm_proj": |c| lstm(c, PROJECTED), |m, x| three(m.forward(&x[0], both(x))?);
    "lstm_proj_lengths": |c| lstm(c, RecurrentOptions { num_layers: 1, ..PROJECTED }),
        |m, x| three(m.forward_lengths(&x[0], &lengths(&x[0])?, both(x))?);
    "rnn_cell": |c| RnnCell::new(3, 4, true, c.device), |m, x| single(m.forward(&x[0], x.get(1)));
    "rnn_cell_relu": |c| Ok(RnnCell::new(3, 4, true, c.device)?.relu()), |m, x| single(m.forward(&x[0], x.get(1)));
    "rnn_cell_unbatched": |c| RnnCell::new(3, 4, false, c.device), |m, x| single(m.forward(&x[0], None));
    "gru_cell": |c| GruCell::new(3, 4, true, c.device), |m, x| single(m.forward(&x[0], x.get(1)));
    "gru_cell_unbatched": |c| GruCell::new(3, 4, false, c.device), |m, x| single(m.forward(&x[0], None));
    "lstm_cell": |c| LstmCell::new(3, 4, true, c.device), |m, x| two(m.forward(&x[0], both(x))?);
    "lstm_cell_unbatched": |c| LstmCell::new(3, 4, false, c.device), |m, x| two(m.forward(&x[0], None)?);
}

/// bf16 and f16 weights, and autocast, compared with f32 results.
pub(super) fn recurrent_layers_in_16_bits(device: &Device) -> Result<()> {
    let x = randn(&[6, 3, 5], device)?;
    // Odd sizes: adjacent 16-bit values share a word.
    let options = RecurrentOptions { bidirectional: true, ..ONE };
    let (lstm, gru) = (Lstm::new(5, 7, options, device)?, Gru::new(5, 7, options, device)?);
    let step = |x: &Tensor| -> Result<[Tensor; 2]> {
        let x = x.detach().copy()?.to_leaf()?;
        lstm.zero_grad();
        gru.zero_grad();
        let sum = lstm.forward(&x, None)?.0.add(&gru.forward(&x, None)?.0)?;
        sum.to_dtype(DType::F32)?.square()?.sum_all()?.backward()?;
        let grads =
            lstm.parameters().into_iter().chain(gru.parameters()).map(|p| p.grad().context("a gradient"));
        let grads: Vec<Tensor> = grads.collect::<Result<_>>()?;
        let flat: Vec<Tensor> = grads.iter().map(|g| g.reshape([-1isize])).collect::<CoreResult<_>>()?;
        Ok([sum.detach(), forebay::ops::cat(&flat, 0)?])
    };
    let expected = step(&x)?;
    for dtype in [DType::BF16, DType::F16] {
        let _autocast = autocast(dtype)?;
        let got = step(&x)?;
        ensure!(got[0].dtype() == dtype, "autocast to {dtype} gave {}", got[0].dtype());
        for (got, expected) in got.iter().zip(&expected) {
            let expected = expected.to_f64s()?;
            let largest = expected.iter().fold(0.1f64, |a, b| a.max(b.abs()));
            ensure_close(&got.to_f64s()?, &expected, 0.0, 0.04 * largest)
                .with_context(|| format!("{dtype}"))?;
        }
    }
    Ok(())
}

/// A long sequence equals its steps by the cell; rows are wider than a workgroup.
pub(super) fn long_sequences_and_wide_layers(device: &Device) -> Result<()> {
    let (steps, batch, hidden) = (9, 2, 300);
    let layer = Lstm::new(8, hidden, ONE, device)?;
    let cell = LstmCell::new(8, hidden, true, device)?;
    let state = layer.state_dict().into_iter().map(|(name, t)| (name.replace("_l0", ""), t)).collect();
    cell.load_state_dict(&state)?;
    let x = randn(&[steps, batch, 8], device)?;
    let (out, (h, c)) = layer.forward(&x, None)?;
    let mut now: Option<(Tensor, Tensor)> = None;
    for t in 0..steps {
        let step = cell.forward(&x.select(0, t as isize)?, now.as_ref().map(|(h, c)| (h, c)))?;
        ensure_same(&out.select(0, t as isize)?, &step.0.detach())?;
        now = Some(step);
    }
    let (last, last_cell) = now.context("steps")?;
    ensure_same(&h.select(0, 0)?, &last.detach())?;
    ensure_same(&c.select(0, 0)?, &last_cell.detach())?;
    out.square()?.sum_all()?.add(&c.sum_all()?)?.backward()?;
    let grads = |m: &dyn Module| {
        m.named_parameters().into_iter().map(|(n, p)| (n.replace("_l0", ""), p.grad())).collect::<Vec<_>>()
    };
    let whole = grads(&layer);
    // Gradients compared with those through the cell's steps.
    let mut now: Option<(Tensor, Tensor)> = None;
    let mut loss: Option<Tensor> = None;
    for t in 0..steps {
        let step = cell.forward(&x.select(0, t as isize)?, now.as_ref().map(|(h, c)| (h, c)))?;
        let own = step.0.square()?.sum_all()?;
        loss = Some(match loss {
            Some(loss) => loss.add(&own)?,
            None => own,
        });
        now = Some(step);
    }
    let (loss, (_, last_cell)) = loss.zip(now).context("steps")?;
    loss.add(&last_cell.sum_all()?)?.backward()?;
    for ((name, a), (other, b)) in whole.iter().zip(grads(&cell)) {
        ensure!(*name == other, "{name} and {other}");
        let (a, b) = (a.as_ref().context("a gradient")?, b.context("a gradient")?);
        let expected = b.to_f64s()?;
        let largest = expected.iter().fold(1f64, |a, b| a.max(b.abs()));
        ensure_close(&a.to_f64s()?, &expected, 1e-4, 1e-5 * largest).with_context(|| name.clone())?;
    }
    Ok(())
}

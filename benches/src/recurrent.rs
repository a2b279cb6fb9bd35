//! Recurrent layers over sequences, forward and forward plus backward.

use anyhow::Result;
use forebay::amp::autocast;
use forebay::autograd::no_grad;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{Gru, Lstm, Module, RecurrentOptions};
use forebay::tensor::Tensor;

use crate::timing::{Bench, MAX_CALLS};

/// Times one layer; `run` returns its output.
fn bench_forward_backward(
    b: &Bench<'_>,
    name: &str,
    x: &Tensor,
    layer: &dyn Module,
    run: impl Fn(&Tensor) -> CoreResult<Tensor>,
) -> Result<()> {
    let shape = x.shape().iter().map(usize::to_string).collect::<Vec<_>>().join("x");
    let steps = x.shape()[0] * x.shape()[1];
    let parameters = layer.parameters();
    for (dtype, low) in [("f32", None), ("bf16", Some(DType::BF16))] {
        let _autocast = low.map(autocast).transpose()?;
        let t = {
            let _no_grad = no_grad();
            b.time(MAX_CALLS, || Ok(run(x)?))?
        };
        b.emit_rate(name, &shape, dtype, &t, ("tokens_s", steps as f64 / t.median_ms * 1e3));
        let seed = run(x)?.ones_like()?;
        let t = b.time(MAX_CALLS, || {
            parameters.iter().for_each(|p| p.set_grad(None));
            let out = run(x)?;
            out.backward_with(&seed)?;
            Ok(out.detach())
        })?;
        b.emit_rate(
            &format!("{name}, gradient"),
            &shape,
            dtype,
            &t,
            ("tokens_s", steps as f64 / t.median_ms * 1e3),
        );
    }
    Ok(())
}

pub(crate) fn recurrent(b: &Bench<'_>) -> Result<()> {
    let [steps, batch, width] = if b.tiny { [4, 2, 8] } else { [128, 64, 512] };
    let x = b.random_tensor(&[steps, batch, width], DType::F32)?;
    let options = RecurrentOptions { num_layers: 2, ..RecurrentOptions::default() };
    let lstm = Lstm::new(width, width, options, b.device)?;
    bench_forward_backward(b, "lstm, 2 layers", &x, &lstm, |x| Ok(lstm.forward(x, None)?.0))?;
    let gru = Gru::new(width, width, options, b.device)?;
    bench_forward_backward(b, "gru, 2 layers", &x, &gru, |x| Ok(gru.forward(x, None)?.0))
}

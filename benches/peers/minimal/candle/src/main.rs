//! Trains a perceptron of two layers with candle.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{AdamW, Linear, Module, Optimizer, VarBuilder, VarMap, linear};

struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    fn new(variables: VarBuilder) -> Result<Self> {
        Ok(Self {
            hidden: linear(2, 64, variables.pp("hidden"))?,
            output: linear(64, 1, variables.pp("output"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.output.forward(&self.hidden.forward(x)?.relu()?)
    }
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let variables = VarMap::new();
    let net = Mlp::new(VarBuilder::from_varmap(&variables, DType::F32, &device))?;
    let mut optimizer = AdamW::new_lr(variables.all_vars(), 1e-2)?;
    let x = Tensor::randn(0f32, 1.0, (256, 2), &device)?;
    let y = x.sqr()?.sum_keepdim(1)?;
    let mut losses = Vec::new();
    for _ in 0..20 {
        let loss = net.forward(&x)?.sub(&y)?.sqr()?.mean_all()?;
        optimizer.backward_step(&loss)?;
        losses.push(loss.to_scalar::<f32>()?);
    }
    println!("loss {:.4} to {:.4}", losses[0], losses[19]);
    assert!(losses[19] < losses[0]);
    Ok(())
}

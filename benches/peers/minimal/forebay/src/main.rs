//! Trains a perceptron of two layers with forebay.

use forebay::prelude::*;

#[derive(Module)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Result<Self> {
        Ok(Self { hidden: Linear::new(2, 64, device)?, output: Linear::new(64, 1, device)? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.output.forward(&self.hidden.forward(x)?.relu()?)
    }
}

fn main() -> Result<()> {
    let device = Device::best()?;
    let net = Mlp::new(&device)?;
    let mut optimizer = AdamW::new(net.parameters(), 1e-2);
    let x = Tensor::randn([256, 2], DType::F32, &device)?;
    let y = x.square()?.sum(1, true)?;
    let mut losses = Vec::new();
    for _ in 0..20 {
        let loss = net.forward(&x)?.sub(&y)?.square()?.mean((), false)?;
        loss.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
        losses.push(loss.item()?);
    }
    println!("loss {:.4} to {:.4}", losses[0], losses[19]);
    assert!(losses[19] < losses[0]);
    Ok(())
}

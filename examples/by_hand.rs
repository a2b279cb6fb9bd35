//! A hand-written training loop: a small network on Fashion-MNIST, which prints loss and accuracy.
//!
//! `cargo run --release --example by_hand`; `FOREBAY_DEVICE` chooses another device than the best one.

use forebay::autograd::no_grad;
use forebay::prelude::*;
use forebay::train::accuracy;

#[derive(Module)]
struct Net {
    fc1: Linear,
    fc2: Linear,
}

impl Net {
    fn new(device: &Device) -> Result<Self> {
        Ok(Self { fc1: Linear::new(784, 128, device)?, fc2: Linear::new(128, 10, device)? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.fc2.forward(&self.fc1.forward(x)?.relu()?)
    }
}

fn main() -> anyhow::Result<()> {
    let device = Device::best()?;
    println!("{}", device.info());
    let net = Net::new(&device)?;
    let mut opt = AdamW::new(net.parameters(), 1e-3);
    let train = FashionMnist::train()?.shuffle(42).batches(64).epochs(5);
    for (step, batch) in (1..).zip(train.prefetch(&device)) {
        let (x, y) = batch?;
        let logits = net.forward(&x)?;
        let loss = logits.cross_entropy(&y)?;
        loss.backward()?; // Adds into each parameter's gradient.
        opt.step()?;
        opt.zero_grad();
        if step % 50 == 0 {
            let accuracy = 100.0 * accuracy(&logits, &y)?.item()?;
            println!("step {step}: loss {:.4}, accuracy {accuracy:.1} %", loss.item()?);
        }
    }
    let _no_grad = no_grad();
    let (x, y) =
        FashionMnist::test()?.batches(1000).prefetch(&device).next().expect("the test set has 1000")?;
    println!("accuracy on 1000 test pictures: {:.1} %", 100.0 * accuracy(&net.forward(&x)?, &y)?.item()?);
    println!("{}", device.memory());
    Ok(())
}

//! A program that depends on Forebay: it trains a small classifier, saves its weights and loads them again.
//!
//! Copy the folder, remove the line `[workspace]` of its `Cargo.toml`, set the path of Forebay there, and begin here.

use anyhow::{Result, ensure};
use forebay::prelude::*;
use forebay::train::accuracy;

#[derive(Module)]
struct Net {
    hidden: Linear,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Result<Self> {
        Ok(Self { hidden: Linear::new(2, 32, device)?, output: Linear::new(32, 2, device)? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.output.forward(&self.hidden.forward(x)?.tanh()?)?)
    }
}

fn main() -> Result<()> {
    // CUDA, else wgpu; the variable FOREBAY_DEVICE chooses another one.
    let device = Device::best()?;
    println!("{}", device.info());

    let net = Net::new(&device)?;
    println!("{}", net.summary());
    let mut optimizer = AdamW::new(net.parameters(), 1e-2);
    let x = Tensor::randn([1024, 2], DType::F32, &device)?;
    // Two classes: the points inside of a circle, and those outside.
    let y = x.square()?.sum(1, false)?.lt(1.4)?.to_dtype(DType::I32)?;
    let mut losses = Vec::new();
    for step in 0..200 {
        let logits = net.forward(&x)?;
        let loss = logits.cross_entropy(&y)?;
        loss.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
        if step % 50 == 49 {
            // Reading a value waits for the device, so the program reads few.
            losses.push(loss.item()?);
            let right = 100.0 * accuracy(&logits, &y)?.item()?;
            println!("step {}: loss {:.4}, accuracy {right:.1} %", step + 1, losses[losses.len() - 1]);
        }
    }
    ensure!(losses.windows(2).all(|pair| pair[1] < pair[0]), "the loss does not decrease: {losses:?}");

    let file = std::env::temp_dir().join("my-program.safetensors");
    safetensors::save(&file, &net.state_dict(), &Default::default())?;
    let copy = Net::new(&device)?;
    copy.load_state_dict(&safetensors::load(&file, &device)?)?;
    let _guard = no_grad();
    ensure!(copy.forward(&x)?.equal(&net.forward(&x)?)?, "the loaded weights differ from the saved ones");
    println!("{}", device.memory().summary());
    Ok(())
}
